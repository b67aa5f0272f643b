"""Cross-entropy as a Triton kernel: one program per row, which reads its logits twice and writes their gradient.

With TRITON_INTERPRET=1 in the environment it runs on a CPU, for tests.
"""

import math

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

LOG2_E, LOG_2 = tl.constexpr(math.log2(math.e)), tl.constexpr(math.log(2))
# 1,024 threads (32 warps); each loads 16 bytes (8 bfloat16 numbers) at a time. subtle: two such programs fill a
# multiprocessor, so the rows in progress (26 MB on an H200) are still in the L2 cache when they are read again
THREADS, PER_THREAD = tl.constexpr(1024), tl.constexpr(8)


@triton.jit
def kernel(logits, targets, losses, gradient, log2_scale, ignore_index, V: tl.constexpr):
    """Of contiguous logits (N, V), on a grid of N programs; both are 0 if the target is ignore_index:

    losses[row] = logsumexp(logits[row]) - logits[row, target]
    gradient[row] = (softmax(logits[row]) - one_hot(target)) * 2**log2_scale
    """
    row = tl.program_id(0)
    target = tl.load(targets + row)
    is_target = target != ignore_index
    start_of_row = row.to(tl.int64) * V  # 64 bits: a micro-batch has more than 2**31 logits
    logits += start_of_row
    gradient += start_of_row
    target_logit = tl.load(logits + target, mask=is_target, other=0.0).to(tl.float32)
    columns = tl.arange(0, THREADS)[:, None] * PER_THREAD + tl.arange(0, PER_THREAD)[None, :]
    # 1) each thread's maximum, and its sum of exponentials relative to that, rescaled when the maximum grows.
    # Exponentials have base 2, for which the hardware has an instruction
    maximum = tl.full((THREADS,), -1e30, tl.float32)  # finite, because inf - inf is not a number
    total = tl.zeros((THREADS,), tl.float32)
    for first in range(0, V, THREADS * PER_THREAD):
        x = tl.load(logits + first + columns, mask=first + columns < V, other=-1e30).to(tl.float32)
        new_maximum = tl.maximum(maximum, tl.max(x, 1))
        shift = new_maximum * LOG2_E
        total = total * tl.exp2(maximum * LOG2_E - shift) + tl.sum(tl.exp2(x * LOG2_E - shift[:, None]), 1)
        maximum = new_maximum
    row_maximum = tl.max(maximum, 0)
    row_total = tl.sum(total * tl.exp2((maximum - row_maximum) * LOG2_E), 0)
    log2_sum = row_maximum * LOG2_E + tl.log2(row_total)
    tl.store(losses + row, tl.where(is_target, log2_sum * LOG_2 - target_logit, 0.0))
    # 2) the softmax minus the one-hot
    shift = tl.where(is_target, log2_scale - log2_sum, -float("inf"))  # 2**-inf is 0
    for first in range(0, V, THREADS * PER_THREAD):
        x = tl.load(logits + first + columns, mask=first + columns < V, other=0.0).to(tl.float32)
        one_hot = tl.where(first + columns == target, tl.exp2(log2_scale), 0.0)
        difference = tl.exp2(x * LOG2_E + shift) - one_hot
        tl.store(gradient + first + columns, difference.to(gradient.dtype.element_ty), mask=first + columns < V)
