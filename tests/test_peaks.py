"""The peak of a GPU is found by its whole name."""

import pytest

from plumbing.peaks import PEAK_FLOPS, peak_flops

# names as torch.cuda.get_device_name gives them, and dense tensor-core TFLOP/s
KNOWN = {
    "Tesla V100-SXM2-16GB": 125,
    "Tesla V100-SXM2-32GB": 125,
    "Tesla V100-PCIE-16GB": 112,
    "Tesla V100-PCIE-32GB": 112,
    "Tesla V100S-PCIE-32GB": 130,
    "Tesla T4": 65,
    "NVIDIA A100-SXM4-40GB": 312,
    "A100-SXM4-40GB": 312,  # what drivers before 2021 said
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA A10": 125,
    "NVIDIA A10G": 70,
    "NVIDIA A40": 149.7,
    "NVIDIA RTX A6000": 154.8,
    "RTX A6000": 154.8,
    "NVIDIA GeForce RTX 3090": 71,
    "GeForce RTX 3090": 71,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 5090": 209.5,
    "NVIDIA L4": 121,
    "NVIDIA L40": 181.05,
    "NVIDIA L40S": 362.05,
    "NVIDIA H20": 148,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA H200": 989.4,
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA GH200 120GB": 989.4,
    "NVIDIA GH200 480GB": 989.4,
    "NVIDIA GH200 144G HBM3e": 989.4,
    "NVIDIA B200": 2250,
    "NVIDIA GB200": 2500,
}
# near misses: other GPUs, parts of one, and none at all
UNKNOWN = [
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 5090 D",
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA RTX 6000 Ada Generation",
    "Quadro RTX 6000",
    "NVIDIA RTX A600",
    "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
    "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
    "GRID A100-40C",
    "NVIDIA A40-48Q",
    "NVIDIA A100-SXM-64GB",
    "NVIDIA A800-SXM4-80GB",
    "NVIDIA H800",
    "NVIDIA L40G",
    "NVIDIA L2",
    "NVIDIA A16",
    "NVIDIA",
    "AMD Instinct MI300X",
    "cpu",
    "mps",
    "",
]


@pytest.mark.parametrize("name", KNOWN)
def test_a_gpu_is_known_by_the_name_that_torch_gives_it(name):
    assert peak_flops(name) == pytest.approx(1e12 * KNOWN[name])


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_name_that_is_only_similar_has_no_peak(name):
    assert peak_flops(name) is None


def test_every_peak_of_the_table_is_tested():
    assert len(PEAK_FLOPS) == len(
        {name.removeprefix("NVIDIA ").removeprefix("Tesla ").removeprefix("GeForce ") for name in KNOWN}
    )
