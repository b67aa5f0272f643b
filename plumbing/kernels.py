"""The output layer and its loss as one function, for GPUs: matmuls in float8, the loss from a Triton kernel.

A step of GPT-2 124M spends a third of its time here. The logits take 100 KB per token, so what counts is how often
they are read and written. Their gradient, softmax - one_hot, can be computed as soon as they are, so the forward pass
computes it together with the loss, while a row is in the cache, and leaves only matmuls to the backward pass.
"""

import torch

# A logit's gradient lies between -1 and 1, so a constant scale moves it into the range of float8, without a pass that
# finds its largest value. The largest number in e5m2 (5 bits of exponent, 2 of mantissa) is 57,344
GRADIENT_SCALE = 2.0**15


def linear_cross_entropy(x, weight, targets, float8=False, triton=False, ignore_index=-100):
    """The sum of the cross-entropy losses of the logits x @ weight.T, in float32.

    x is (N, C), weight (V, C) and targets (N,); targets equal to ignore_index don't count. As in
    F.cross_entropy, the softmax is over all V ids, padding included. The logits are bfloat16. With `float8` the
    matmuls are in float8, at twice the bfloat16 rate (Ada, Hopper and newer; N, C and V must be multiples of 16).
    With `triton` a Triton kernel computes losses and gradient; it needs CUDA.
    """
    return LinearCrossEntropy.apply(x, weight, targets, float8, triton, ignore_index)


class LinearCrossEntropy(torch.autograd.Function):
    """See `linear_cross_entropy`."""

    @staticmethod
    def forward(ctx, x, weight, targets, float8, triton, ignore_index):
        ctx.dtypes = x.dtype, weight.dtype
        if float8:
            x, x_scale = to_float8(x)
            weight, weight_scale = to_float8(weight)
            logits = torch._scaled_mm(x, weight.T, x_scale, weight_scale, out_dtype=torch.bfloat16, use_fast_accum=True)
        else:
            x_scale = weight_scale = None
            x, weight = x.bfloat16(), weight.bfloat16()
            logits = x @ weight.T
        compute = cross_entropy_triton if triton else cross_entropy
        losses, gradient = compute(logits, targets, float8, ignore_index)
        ctx.save_for_backward(x, x_scale, weight, weight_scale, gradient)
        return losses.sum()

    @staticmethod
    def backward(ctx, grad_output):
        x, x_scale, weight, weight_scale, gradient = ctx.saved_tensors
        # multiply small tensors by grad_output, the weight of this loss in the step's, and not the large gradient
        if x_scale is None:
            grad_x, grad_weight = (gradient @ weight) * grad_output, (gradient.T @ x) * grad_output
        else:
            scale = grad_output / GRADIENT_SCALE
            # the hardware requires a row-major first operand and a column-major second one
            weight, x = weight.T.contiguous().T, x.T.contiguous().T
            grad_x = torch._scaled_mm(gradient, weight, scale, weight_scale, out_dtype=torch.bfloat16)
            gradient = gradient.T.contiguous()
            grad_weight = torch._scaled_mm(gradient, x, scale, x_scale, out_dtype=torch.float32)
        x_dtype, weight_dtype = ctx.dtypes
        return grad_x.to(x_dtype), grad_weight.to(weight_dtype), None, None, None, None


def to_float8(tensor):
    """The tensor in e4m3 (4 bits of exponent, 3 of mantissa), and the scale to multiply it with.

    The scale moves its largest value to the end of the range (Micikevicius et al. 2022).
    """
    scale = tensor.abs().amax().float().clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (tensor / scale).to(torch.float8_e4m3fn), scale


def cross_entropy(logits, targets, float8, ignore_index):
    """The losses (N,) of logits (N, V) and their gradient, which is bfloat16, or e5m2 and times GRADIENT_SCALE."""
    logits, targets = logits.float(), targets[:, None]
    is_target = targets != ignore_index
    log_sum = logits.logsumexp(1, keepdim=True)
    losses = torch.where(is_target, log_sum - logits.gather(1, targets.clamp(min=0)), 0.0)[:, 0]
    one_hot = torch.arange(logits.size(1), device=logits.device) == targets
    gradient = torch.where(is_target, (logits - log_sum).exp() - one_hot.float(), 0.0)
    return losses, (gradient * GRADIENT_SCALE).to(torch.float8_e5m2) if float8 else gradient.bfloat16()


def cross_entropy_triton(logits, targets, float8, ignore_index):
    """What `cross_entropy` returns, from the Triton kernel. In bfloat16 the gradient takes the place of the logits."""
    if float8:
        return cross_entropy_float8(logits, targets, ignore_index)
    return cross_entropy_in_place(logits, targets, ignore_index), logits


# Custom operators, so that torch.compile calls the kernel as it is. They import triton, which a CPU does not have


@torch.library.custom_op("train_gpt2::cross_entropy_in_place", mutates_args=["logits"])
def cross_entropy_in_place(logits: torch.Tensor, targets: torch.Tensor, ignore_index: int) -> torch.Tensor:
    from plumbing import triton_cross_entropy

    return triton_cross_entropy.launch(logits, targets, logits, 1.0, ignore_index)


@torch.library.custom_op("train_gpt2::cross_entropy_float8", mutates_args=[])
def cross_entropy_float8(
    logits: torch.Tensor, targets: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    from plumbing import triton_cross_entropy

    gradient = torch.empty_like(logits, dtype=torch.float8_e5m2)
    return triton_cross_entropy.launch(logits, targets, gradient, GRADIENT_SCALE, ignore_index), gradient


@cross_entropy_in_place.register_fake
def _(logits, targets, ignore_index):
    return logits.new_empty(len(logits), dtype=torch.float32)


@cross_entropy_float8.register_fake
def _(logits, targets, ignore_index):
    return logits.new_empty(len(logits), dtype=torch.float32), torch.empty_like(logits, dtype=torch.float8_e5m2)
