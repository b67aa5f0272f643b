"""The machine: its devices, dtypes and attention kernels, their speed, and the commit of this program."""

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import torch

from plumbing.program import UserError


def output_of(*command: str) -> str:
    """What a command prints; "" if it is not installed."""
    if not shutil.which(command[0]):
        return ""
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def git_commit() -> str:
    """The commit of this program, with "-dirty" if it was changed since; "" if that is not known."""
    return output_of("git", "-C", os.path.dirname(__file__), "describe", "--always", "--dirty", "--abbrev=40")


def choose_device(name: str) -> str:
    """The device called `name`, or for "auto" the best on this machine. Raises UserError if there is none."""
    known = ["cpu"]
    if torch.backends.mps.is_available():
        known = ["mps", *known]
    if torch.cuda.is_available():
        known = ["cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count())), *known]
    if name == "auto":
        return known[0]
    if name not in known:
        raise UserError(
            f"There is no device {name!r} here. Leave --device out, or choose from {', '.join(known)}."
        )
    return name


def choose_dtype(name: str, device: str, n_embd: int) -> tuple[torch.dtype, str]:
    """The dtype called `name` as (torch dtype of activations, name); for "auto" the best for this device and width."""
    is_gpu = device.startswith("cuda")
    # NVIDIA's GPUs have it since Ampere; other devices can at least emulate it
    has_bfloat16 = not is_gpu or torch.version.hip or torch.cuda.get_device_capability(device) >= (8, 0)
    if name == "auto" and is_gpu:
        name = "bfloat16" if has_bfloat16 else "float16"
    elif name == "auto":
        # CPUs with bfloat16 instructions are faster with them unless the matrices are tiny
        is_faster = device == "cpu" and n_embd >= 128 and torch.cpu._is_avx512_bf16_supported()
        name = "bfloat16" if is_faster else "float32"
    if (name == "bfloat16" and not has_bfloat16) or (name == "fp8" and not has_float8(device)):
        raise UserError(
            f"This device does not support --dtype {name}. NVIDIA's GPUs have bfloat16 since the Ampere generation and "
            "fp8 since Ada and Hopper. Leave --dtype out to use the best it has."
        )
    return torch.bfloat16 if name == "fp8" else getattr(torch, name), name  # fp8 is for the output layer only


def has_float8(device: str) -> bool:
    """Whether a device can multiply float8 matrices. On a CPU, this is found out by calling torch's kernel."""
    if device != "cpu":
        return device.startswith("cuda") and torch.cuda.get_device_capability(device) >= (8, 9)
    ones, scale = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(())
    try:
        torch._scaled_mm(ones, ones.T, scale, scale, out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


def flops_per_token(c: Any, T: int) -> int:
    """Training FLOPs per token of a GPTConfig, by PaLM's convention (Chowdhery et al. 2022, appendix B)."""
    # 6 per weight of every matmul, and 12 * L * T * C for attention, which counts the full square of scores
    num_weights = 12 * c.n_layer * c.n_embd**2 + c.vocab_size * c.n_embd
    return 6 * num_weights + 12 * c.n_layer * T * c.n_embd


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


def peak_flops(device_name: str) -> float | None:
    """The peak in FLOP/s of a GPU, by its name as torch.cuda.get_device_name gives it; None if it is not known."""
    # names must match exactly: an L40 is not an L4, and a MIG slice is only a part of a GPU
    name = re.sub(r"^((NVIDIA|Tesla|GeForce) )+", "", device_name)
    return next((1e12 * peak for names, peak in PEAK_TFLOPS.items() if name in names.split(", ")), None)


@contextlib.contextmanager
def disable_cudnn_attention() -> Iterator[None]:
    """Disable cuDNN attention, for inputs of many shapes: it would build a kernel for each of them."""
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)


def enable_fused_attention(enabled: bool) -> None:
    """Allow or forbid fused attention kernels in this process; the unfused one is always available."""
    torch.backends.cuda.enable_cudnn_sdp(enabled)
    torch.backends.cuda.enable_flash_sdp(enabled)
    torch.backends.cuda.enable_mem_efficient_sdp(enabled)
