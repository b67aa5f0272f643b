"""CPU time of causal attention, forward and backward, in float32 and in bfloat16: 2,048 tokens in 4 heads."""

import time

import torch
from torch.nn import functional as F

torch.set_num_threads(1)


def milliseconds(q, in_float32, repeats=5):
    times = []
    for _ in range(repeats + 1):
        start = time.process_time()
        x = q.float() if in_float32 else q
        y = F.scaled_dot_product_attention(x, x, x, is_causal=True).to(q.dtype)
        y.backward(y.detach())
        times.append(time.process_time() - start)
    return 1e3 * min(times[1:])


for head_size in (32, 64):
    for T in (64, 128, 256, 512, 1024):
        q = torch.randn(max(1, 2048 // T), 4, T, head_size)
        half = q.bfloat16().requires_grad_()
        times = {
            "float32": milliseconds(q.requires_grad_(), False), "bfloat16": milliseconds(half, False),
            "float32 and casts": milliseconds(half, True),
        }  # fmt: skip
        print(f"head size {head_size}, T {T:5}: " + ", ".join(f"{name} {time:.1f} ms" for name, time in times.items()))
