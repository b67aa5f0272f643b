"""This machine's devices, dtypes, attention kernels and memory, and the peak FLOP/s of its GPU."""

import contextlib
import math
import os
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch.nn.attention import SDPBackend

from plumbing.cli.console import UserError, is_rank_0, note, output_of
from plumbing.system.limits import memory_limits, num_cores


def choose_device(name: str) -> str:
    """The device called `name`; for "auto", the best one on this machine. UserError if torch cannot use it.

    Also limits torch's threads to the cores of a container, because more would only wait for each other.
    """
    typed = name
    name = re.sub("^gpu", "cuda", name)
    known = ["cpu"]
    if torch.backends.mps.is_available():
        known = ["mps", *known]
    if torch.cuda.is_available():
        known = ["cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count())), *known]
    if name == "auto":
        name = known[0]
        if name == "cpu" and is_rank_0():
            look_for_gpu()
    if name not in known:
        raise UserError(
            f"PyTorch {torch.__version__} finds no device {typed!r} on this machine, only {', '.join(known)}. Choose "
            "one of these, or leave --device out. requirements.txt says which build of PyTorch supports which GPU."
        )
    if name.startswith("cuda"):
        check_kernels(name)
    torch.set_num_threads(min(torch.get_num_threads(), num_cores()))
    return name


def look_for_gpu() -> None:
    """Print a note if torch cannot use this machine's GPU: it may be built without CUDA, or for a newer driver."""
    gpus = output_of("nvidia-smi", "--list-gpus")
    if re.search("^GPU [0-9]", gpus, re.M) and "CUDA_VISIBLE_DEVICES" not in os.environ:
        note(
            f"This machine has an NVIDIA GPU, but PyTorch {torch.__version__} cannot use it and runs on the CPU. "
            "requirements.txt says which build of PyTorch supports which GPU.",
            file=sys.stderr,
        )


def check_kernels(device: str) -> None:
    """Raise UserError if this build of torch has no kernels for a GPU. torch itself only warns."""
    major, minor = torch.cuda.get_device_capability(device)

    def runs(kind: str, kernel_major: str, kernel_minor: str) -> bool:
        # sm_86 is for 8.6 to 8.9, compute_86 for 8.6 and all later GPUs
        is_old_enough = int(kernel_major + kernel_minor) <= 10 * major + minor
        return is_old_enough and (kind == "compute" or int(kernel_major) == major)

    built = torch.cuda.get_arch_list()
    kernels = re.findall(r"\b(sm|compute)_(\d+)(\d)", " ".join(built))  # AMD's GPUs have other names
    if kernels and not any(runs(*kernel) for kernel in kernels):
        raise UserError(
            f"PyTorch {torch.__version__} has kernels for {', '.join(built)}, but none for this machine's "
            f"{torch.cuda.get_device_name(device)}, which is sm_{major}{minor}. Install the build of PyTorch that "
            "requirements.txt names for it, or add --device cpu."
        )


def free_memory(device: torch.device, root: Path = Path("/")) -> float:
    """Free bytes on a GPU, or in RAM within the container's limit; infinite if unknown."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, for reuse
        return torch.cuda.mem_get_info(device)[0] + cached
    meminfo = root / "proc/meminfo"  # only Linux has it; elsewhere all RAM counts as free
    free = math.inf
    if meminfo.exists():
        free = 1024 * int(re.findall("MemAvailable: *([0-9]+)", meminfo.read_text())[0])
    elif hasattr(os, "sysconf"):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([free, *memory_limits(root)])


def choose_dtype(name: str, device: torch.device, is_wide: bool = False) -> str:
    """The dtype called `name`; for "auto", the best one for this device. UserError if the device lacks it.

    is_wide: whether the model is so wide that bfloat16 is faster on a CPU with instructions for it.
    """
    half = "bfloat16"
    if device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) < (8, 0):
        half = "float16"  # NVIDIA's GPUs have bfloat16 since Ampere; other devices can at least emulate it
    if name == "auto":
        is_fast = device.type == "cpu" and is_wide and torch.cpu._is_avx512_bf16_supported()
        return half if device.type == "cuda" or is_fast else "float32"
    if (name == "bfloat16" and half != name) or (name == "fp8" and not has_float8(device)):
        raise UserError(
            f"This device does not support --dtype {name}. NVIDIA GPUs support bfloat16 from Ampere on, and fp8 from "
            f"Ada and Hopper on. Leave --dtype out. A run that began in {name} can continue here only as a branch: "
            f"--branch-from RUN --out-dir NEW --dtype {half}"
        )
    return name


def has_float8(device: torch.device) -> bool:
    """Whether a device can multiply float8 matrices. On a CPU, this tries torch's kernel."""
    if device.type == "cuda":
        # AMD's MI300 (capability 9.4) has another float8 format, which nobody has tried
        return not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 9)
    if device.type != "cpu":
        return False
    # before this call, torch does not know the processor's instructions and uses another kernel
    torch.cpu._is_avx512_bf16_supported()
    ones = torch.ones(16, 16).to(torch.float8_e4m3fn)
    scale = torch.ones(())
    try:
        torch._scaled_mm(ones, ones.T, scale, scale, out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


# peak TFLOP/s of tensor cores for dense matmuls in bfloat16 (V100 and T4: float16) with float32 accumulation. The keys
# are PyTorch's names of the GPUs without the brand. Most numbers are from NVIDIA's datasheets, which print twice as
# much for sparse matrices (marked by a star) and, for GeForce cards, for accumulation in float16
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
    """The peak FLOP/s of a GPU, by its name from torch.cuda.get_device_name; None if unknown."""
    # names must match exactly: an L40 is not an L4, and a MIG slice is only a part of a GPU
    name = re.sub(r"^((NVIDIA|Tesla|GeForce) )+", "", device_name)
    for names, peak in PEAK_TFLOPS.items():
        if name in names.split(", "):
            return 1e12 * peak
    return None


FUSED_ATTENTION = {  # by torch's names; the unfused kernel is always enabled
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "mem_efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def enabled_attention(device_type: str) -> list[str]:
    """The fused attention kernels that this process may use on this type of device."""
    kernels = FUSED_ATTENTION if device_type == "cuda" else ("flash",)
    return [name for name in kernels if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()]


def disable_attention(*kernels: str) -> None:
    """Disable fused attention kernels in this process."""
    for name in kernels:
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(False)


def seed_random_numbers(seed: int, *more: int) -> None:
    """Seed the random number generators of torch, numpy and Python with one number or several."""
    if more:
        seed = int(np.random.SeedSequence([seed, *more]).generate_state(1)[0])
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def random_state(device: torch.device) -> torch.Tensor:
    """The state of torch's random number generators on the CPU and on this device."""
    state = torch.get_rng_state()
    if device.type == "cuda":
        state = torch.cat([state, torch.cuda.get_rng_state(device)])
    return state


@contextlib.contextmanager
def exact_matmuls() -> Iterator[None]:
    """Context in which float32 matmuls do not use TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def all_cores() -> Iterator[None]:
    """Context in which torch uses all cores on this rank, while the others wait: torchrun gives each one thread."""
    threads = torch.get_num_threads()
    if os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":
        torch.set_num_threads(num_cores())
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def process_restored() -> Iterator[None]:
    """Context of exact matmuls. When it ends, it restores their precision and the enabled attention kernels."""
    enabled = enabled_attention("cuda")
    try:
        with exact_matmuls():
            yield
    finally:
        for name in FUSED_ATTENTION:
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(name in enabled)
