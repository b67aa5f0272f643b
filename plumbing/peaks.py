"""Peak FLOP/s of GPUs, for the MFU (model FLOPs utilization): the share of that peak which training reaches."""

import re

# TFLOP/s of dense matmuls on tensor cores, in bfloat16 (on V100 and T4, which lack it, float16) with float32
# accumulation, by PyTorch's names for the GPUs without the brand. Most are from NVIDIA's datasheet of that GPU, which
# prints twice as much where it counts sparse matrices or, for GeForce cards, accumulation in float16
PEAK_TFLOPS = {
    "V100-SXM2-16GB, V100-SXM2-32GB": 125,
    "V100-PCIE-16GB, V100-PCIE-32GB": 112,
    "V100S-PCIE-32GB": 130,
    "T4": 65,
    "A100-SXM4-40GB, A100-SXM4-80GB, A100-PCIE-40GB, A100 80GB PCIe": 312,
    "A10": 125,
    "A10G": 70,
    "A40": 149.7,
    "RTX A6000": 154.8,  # this and the next: whitepaper "NVIDIA Ampere GA102 GPU Architecture"
    "RTX 3090": 71,
    "L4": 121,
    "L40": 181.05,
    "L40S": 362.05,
    "RTX 4090": 165.2,  # whitepaper "NVIDIA Ada GPU Architecture", appendix A
    "RTX 5090": 209.5,  # whitepaper "NVIDIA RTX Blackwell GPU Architecture", appendix A
    "H20": 148,
    "H100 80GB HBM3, H200, GH200 120GB, GH200 480GB, GH200 144G HBM3e": 989.4,
    "H100 PCIe": 756,
    "H100 NVL, H200 NVL": 835.5,
    "B200": 2250,  # "NVIDIA HGX B200" datasheet: 36 PFLOP/s with sparsity for eight
    "GB200": 2500,  # "NVIDIA GB200 NVL72" datasheet: 360 PFLOP/s with sparsity for 72
}


def peak_flops(device_name):
    """The peak in FLOP/s of a GPU, by its name as torch.cuda.get_device_name gives it; None if it is not known.

    Names must match exactly: an L40 is not an L4, a laptop's RTX 4090 is not a desktop's, and a MIG slice is only
    a part of a GPU.
    """
    name = re.sub(r"^((NVIDIA|Tesla|GeForce) )+", "", device_name)
    return next((1e12 * peak for names, peak in PEAK_TFLOPS.items() if name in names.split(", ")), None)
