"""Kernels that are faster than what the compiler makes: the output layer in float8."""

import torch


def to_float8(tensor, dtype):
    """The tensor in an 8-bit dtype, its largest value at the end of the range, and the scale to multiply it with."""
    scale = tensor.abs().amax().float().clamp(min=1e-12) / torch.finfo(dtype).max
    return (tensor / scale).to(dtype), scale


class Float8Matmul(torch.autograd.Function):
    """x (N, C) @ w (V, C).T in 8-bit floats, whose matmuls run at twice bfloat16's rate (Hopper, Ada, and newer).

    Four bits of exponent and three of mantissa for x and w, five and two for the gradient, which spans more
    (Micikevicius et al. 2022). N, C and V must be multiples of 16.
    """

    @staticmethod
    def forward(ctx, x, w):
        x, x_scale = to_float8(x, torch.float8_e4m3fn)
        w, w_scale = to_float8(w, torch.float8_e4m3fn)
        ctx.save_for_backward(x, x_scale, w, w_scale)
        return torch._scaled_mm(x, w.T, x_scale, w_scale, out_dtype=torch.bfloat16, use_fast_accum=True)

    @staticmethod
    def backward(ctx, grad):
        x, x_scale, w, w_scale = ctx.saved_tensors
        grad, scale = to_float8(grad, torch.float8_e5m2)
        # the hardware wants rows of the first operand and columns of the second in one piece
        grad_x = torch._scaled_mm(grad, w.T.contiguous().T, scale, w_scale, out_dtype=torch.bfloat16)
        grad_w = torch._scaled_mm(grad.T.contiguous(), x.T.contiguous().T, scale, x_scale, out_dtype=torch.float32)
        return grad_x, grad_w


def float8_linear(x, weight):
    """x (B, T, C) @ weight (V, C).T -> (B, T, V) in float8."""
    return Float8Matmul.apply(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])
