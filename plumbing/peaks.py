"""Peak FLOP/s of GPUs, for the MFU (model FLOPs utilization): the share of that peak which training reaches."""

import re

# FLOP/s of dense matmuls on tensor cores, in bfloat16 (on V100 and T4, which lack it, float16) with float32
# accumulation, by PyTorch's name of the GPU without the brand. Datasheets print twice as much when they count sparse
# matrices or, for GeForce cards, accumulation in float16.
PEAK_FLOPS = {
    # "NVIDIA V100 Tensor Core GPU" datasheet, deep learning: 125 for SXM2, 112 for PCIe; V100S: 130
    "V100-SXM2-16GB": 125e12,
    "V100-SXM2-32GB": 125e12,
    "V100-PCIE-16GB": 112e12,
    "V100-PCIE-32GB": 112e12,
    "V100S-PCIE-32GB": 130e12,
    "T4": 65e12,  # "NVIDIA T4" datasheet, mixed precision
    # "NVIDIA A100 Tensor Core GPU" datasheet, the same for all of them
    "A100-SXM4-40GB": 312e12,
    "A100-SXM4-80GB": 312e12,
    "A100-PCIE-40GB": 312e12,
    "A100 80GB PCIe": 312e12,
    "A10": 125e12,  # "NVIDIA A10 Tensor Core GPU" datasheet
    "A10G": 70e12,  # "NVIDIA A10G" datasheet
    "A40": 149.7e12,  # "NVIDIA A40" datasheet
    # whitepaper "NVIDIA Ampere GA102 GPU Architecture", tables of the two cards, BF16 with FP32 accumulate
    "RTX A6000": 154.8e12,
    "RTX 3090": 71e12,
    "L4": 121e12,  # "NVIDIA L4 Tensor Core GPU" datasheet: 242 with sparsity
    "L40": 181.05e12,  # "NVIDIA L40" datasheet
    "L40S": 362.05e12,  # "NVIDIA L40S" datasheet
    "RTX 4090": 165.2e12,  # whitepaper "NVIDIA Ada GPU Architecture", appendix A, BF16 with FP32 accumulate
    "RTX 5090": 209.5e12,  # whitepaper "NVIDIA RTX Blackwell GPU Architecture", appendix A, likewise
    "H20": 148e12,  # "NVIDIA H20" datasheet
    # "NVIDIA H100 Tensor Core GPU" datasheet and whitepaper: 1,979 (SXM), 1,513 (PCIe) and 1,671 (NVL) with sparsity
    "H100 80GB HBM3": 989.4e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835.5e12,
    # "NVIDIA H200 Tensor Core GPU" datasheet: 1,979 (SXM) and 1,671 (NVL) with sparsity
    "H200": 989.4e12,
    "H200 NVL": 835.5e12,
    # "NVIDIA GH200 Grace Hopper Superchip" datasheet: an H100's or H200's GPU, named by memory
    "GH200 120GB": 989.4e12,
    "GH200 480GB": 989.4e12,
    "GH200 144G HBM3e": 989.4e12,
    "B200": 2250e12,  # "NVIDIA HGX B200" datasheet: 36 PFLOP/s with sparsity for eight
    "GB200": 2500e12,  # "NVIDIA GB200 NVL72" datasheet: 360 PFLOP/s with sparsity for 72
}


def peak_flops(device_name):
    """The peak in FLOP/s of a GPU, by its name as torch.cuda.get_device_name gives it; None if it is not known.

    Names must match exactly: an L40 is not an L4, a laptop's RTX 4090 is not a desktop's, and a MIG slice is only
    a part of a GPU.
    """
    return PEAK_FLOPS.get(re.sub(r"^((NVIDIA|Tesla|GeForce) )+", "", device_name))
