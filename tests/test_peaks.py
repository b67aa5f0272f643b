"""The peak of a GPU is found by its whole name."""

import pytest

from plumbing.peaks import peak_flops

# names as torch.cuda.get_device_name gives them, dense TFLOP/s of their datasheets; near misses have none
NAMES = {
    "Tesla V100-SXM2-16GB": 125,
    "NVIDIA A100-SXM4-40GB": 312,
    "A100-SXM4-40GB": 312,  # what drivers before 2021 said
    "GeForce RTX 3090": 71,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA L4": 121,
    "NVIDIA L40S": 362.05,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H200": 989.4,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA GeForce RTX 3090 Ti": None,
    "NVIDIA RTX A600": None,
    "NVIDIA A100-SXM4-80GB MIG 1g.10gb": None,
    "GRID A100-40C": None,
    "NVIDIA H800": None,
    "NVIDIA": None,
    "cpu": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_is_known_by_its_whole_name(name):
    assert peak_flops(name) == (NAMES[name] and pytest.approx(1e12 * NAMES[name]))
