"""Where the time of a training step goes."""

import re

import torch

from bench.measure import machine, timed
from plumbing.distributed import flops_per_token, peak_flops

# patterns that identify each family of kernels (on a CPU, operators) by their names; the first match counts
KERNEL_FAMILIES = {
    "attention": r"flash|fmha|sdpa|attention",
    "loss": r"softmax|nll|loss|logsumexp|cross_entropy",
    "LayerNorm, residual": r"layer_?norm",
    "matmul": r"gemm|nvjet|cutlass|cublas|xmma|splitk|::addmm|::mm|::bmm|matmul|scaled_mm",
    "optimizer": r"adam|multi_tensor|foreach|lerp|norm_kernel",
    "embedding": r"embedding",
    "bias gradients": r"(red|per)_fused_\w*sum|::sum$",
    "GELU": r"gelu",
    "q, k, v gradients": r"_cat_|::cat$|catarray",
    "copies": r"memcpy|memset|direct_copy|::copy_|to_copy(_t|_add)?_\d+$",
}


def family_of(kernel):
    """The family in KERNEL_FAMILIES that a kernel's name belongs to."""
    matches = (family for family, pattern in KERNEL_FAMILIES.items() if re.search(pattern, kernel.lower()))
    return next(matches, "other")


def profile(side):
    """{kernel (on a CPU, operator): its seconds} in one call of a side, the longest first."""
    cuda, activity = side.world.device_type == "cuda", torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if cuda else activity.CPU]) as profiler:
        side()
    times = {e.key: e.self_device_time_total if cuda else e.self_cpu_time_total for e in profiler.key_averages()}
    return {kernel: microseconds / 1e6 for kernel, microseconds in sorted(times.items(), key=lambda item: -item[1])}


def roofline(side, seconds):
    """Print where a step of `seconds` spends its time, and its share of the peak; return the numbers."""
    config, kernels, families = side.config, profile(side), {}
    for kernel, duration in kernels.items():
        family = family_of(kernel)
        families[family] = families.get(family, 0.0) + duration
    print("one step of train_gpt2, by family of kernels:")
    for family, duration in sorted(families.items(), key=lambda item: -item[1]):
        print(f"  {family:20}{1e3 * duration:10.2f} ms {duration / sum(families.values()):6.1%}")
    flops = flops_per_token(side.raw_model.config, config.sequence_length) * config.total_batch_size / seconds
    peaks = {"measured": matmul_peak(config.device), "datasheet": peak_flops(machine(config.device)["device"])}
    mfu = {name: flops / peak for name, peak in peaks.items() if peak}
    print("MFU (PaLM's convention): " + ", ".join(f"{share:.1%} of the {name} peak" for name, share in mfu.items()))
    return {"peaks": peaks, "mfu": mfu, "families": families, "kernels": dict(list(kernels.items())[:40])}


def matmul_peak(device):
    """FLOP/s of a large matmul: bf16 of size 8192 on a GPU; float32, as in training, of size 1024 on a CPU."""
    n, dtype, repeat = (8192, torch.bfloat16, 20) if device.startswith("cuda") else (1024, torch.float32, 3)
    a = torch.randn(n, n, device=device, dtype=dtype)
    a @ a
    return max(2 * n**3 * repeat / timed(lambda: [a @ a for _ in range(repeat)], device)[0] for _ in range(3))
