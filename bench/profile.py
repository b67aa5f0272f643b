"""Where the time of a training step goes, and what the machine's matmuls reach."""

import re
from collections import Counter

import torch

from bench.measure import timed
from plumbing.machine import flops_per_token, peak_flops

# patterns in the names of each family of kernels (on a CPU, operators); the first match counts
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
    "other": "",
}


def roofline(side, tok_per_s):
    """Print and return where a side's step spends its time, and its share of the peak (MFU, in PaLM's convention)."""
    config, activity = side.config, torch.profiler.ProfilerActivity
    cuda = config.device.startswith("cuda")
    with torch.profiler.profile(activities=[activity.CUDA if cuda else activity.CPU]) as profiler:
        side()
    kernels, families = Counter(), dict.fromkeys(KERNEL_FAMILIES, 0.0)
    for event in profiler.key_averages():
        kernels[event.key] = (event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e6
        family = next(name for name, pattern in KERNEL_FAMILIES.items() if re.search(pattern, event.key.lower()))
        families[family] += kernels[event.key]
    for family, seconds in families.items():
        print(f"  {family:20}{1e3 * seconds:10.2f} ms {seconds / sum(families.values()):6.1%}")
    n = 8192 if cuda else 1024
    square = torch.randn(n, n, device=config.device, dtype=torch.bfloat16 if cuda else side.world.dtype)
    peaks: dict[str, float | None] = {"measured": matmul_rate(square, square)}
    if cuda:
        peaks["datasheet"] = peak_flops(torch.cuda.get_device_name())
    flops = flops_per_token(config, config.sequence_length) * tok_per_s
    mfu = {name: flops / peak for name, peak in peaks.items() if peak}
    print("MFU: " + ", ".join(f"{share:.1%} of the {name} peak" for name, share in mfu.items()))
    return {"peaks": peaks, "mfu": mfu, "families": families, "kernels": dict(kernels.most_common(40))}


def matmul_rate(a, b):
    """FLOP/s of a @ b, the best of three times ten."""

    def ten_times():
        for _ in range(10):
            torch.mm(a, b)

    seconds = min(timed(ten_times)[0] for _ in range(3))
    return 10 * 2 * a.size(0) * a.size(1) * b.size(1) / seconds
