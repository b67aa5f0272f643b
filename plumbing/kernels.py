"""Attention for CPUs, and the output layer with its loss as one function in float8, for --dtype fp8.

A step of GPT-2 124M spends a third of its time in that layer. Its logits take 100 KB per token, so what counts is how
often they are read and written: the forward pass computes their gradient, softmax - one_hot, together with the loss.
"""

import torch
import torch.nn.functional as F

# A logit's gradient lies between -1 and 1, so a constant scale moves it into the range of float8, without a pass that
# finds its largest value. The largest number in e5m2 (5 bits of exponent, 2 of mantissa) is 57,344
GRADIENT_SCALE = 2.0**15


def attention_on_cpu(q, k, v, **options):
    """F.scaled_dot_product_attention in float32, which is faster on a CPU even if the matmuls are in bfloat16."""
    with torch.autocast("cpu", enabled=False):
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), **options).to(q.dtype)


def to_float8(tensor):
    """The tensor in e4m3 (4 bits of exponent, 3 of mantissa) and a scale that undoes it (Micikevicius et al. 2022)."""
    scale = tensor.abs().amax().float().clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (tensor / scale).to(torch.float8_e4m3fn), scale


def cross_entropy(logits, targets, ignore_index):
    """The losses (N,) of logits (N, V), in float32, and their gradient in e5m2, times GRADIENT_SCALE."""
    logits, targets = logits.float(), targets[:, None]
    is_target = targets != ignore_index
    log_sum = logits.logsumexp(1, keepdim=True)
    losses = torch.where(is_target, log_sum - logits.gather(1, targets.clamp(min=0)), 0.0)[:, 0]
    one_hot = torch.arange(logits.size(1), device=logits.device) == targets
    gradient = torch.where(is_target, (logits - log_sum).exp() - one_hot.float(), 0.0)
    return losses, (gradient * GRADIENT_SCALE).to(torch.float8_e5m2)


def linear_cross_entropy(x, weight, targets, ignore_index=-100, cross_entropy=cross_entropy):
    """The sum of the cross-entropy losses of the logits x @ weight.T, in float32, with matmuls in float8.

    x is (N, C), weight (V, C) and targets (N,); targets equal to ignore_index don't count. As in F.cross_entropy, the
    softmax is over all V ids, padding included. float8 matmuls run at twice the rate of bfloat16, but N, C and V must
    be multiples of 16, and Hopper multiplies only rows by rows, so the large gradient is also transposed, byte by byte.
    """
    return LinearCrossEntropy.apply(x, weight, targets, ignore_index, cross_entropy)


class LinearCrossEntropy(torch.autograd.Function):
    """See `linear_cross_entropy`."""

    @staticmethod
    def forward(ctx, x, weight, targets, ignore_index, cross_entropy):
        x, x_scale = to_float8(x)
        weight, weight_scale = to_float8(weight)
        # F.scaled_mm, the public name, gives the same bits, but before torch 2.13 Inductor had no lowering for it
        logits = torch._scaled_mm(
            x, weight.T, x_scale, weight_scale, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        losses, gradient = cross_entropy(logits, targets, ignore_index)
        ctx.save_for_backward(x, x_scale, weight, weight_scale, gradient)
        return losses.sum()

    @staticmethod
    def backward(ctx, grad_output):
        x, x_scale, weight, weight_scale, gradient = ctx.saved_tensors
        # scale the small results, rather than the large gradient, by grad_output, this loss's weight in the step
        scale = grad_output / GRADIENT_SCALE
        # the hardware requires a row-major first operand and a column-major second one
        weight, x = weight.T.contiguous().T, x.T.contiguous().T
        grad_x = torch._scaled_mm(gradient, weight, scale, weight_scale, out_dtype=torch.bfloat16)
        grad_weight = torch._scaled_mm(gradient.T.contiguous(), x, scale, x_scale, out_dtype=torch.float32)
        return grad_x, grad_weight, None, None, None  # autograd converts them to the dtypes of x and weight
