"""An output layer that multiplies in float8, at twice the rate of bfloat16 (Micikevicius et al. 2022)."""

import torch
import torch.nn as nn

from plumbing.cli.console import UserError


class Float8Linear(nn.Linear):
    """Replaces a linear layer and shares its weight. The weight's gradients stay in float32.

    While gradients are enabled, as in training and validation, both passes multiply in float8: inputs and weight in
    e4m3 (4 bits of exponent, 3 of mantissa), gradients in e5m2. Otherwise this is an ordinary linear layer.
    """

    def __init__(self, layer: nn.Linear):
        if type(layer) is not nn.Linear:
            raise UserError(
                f"--dtype fp8 computes an nn.Linear in float8, but the output layer is a {type(layer).__name__}. Use "
                "--dtype bfloat16."
            )
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight = layer.weight
        self.bias = layer.bias

    def forward(self, input):
        if not torch.is_grad_enabled():
            return super().forward(input)
        output = Float8Matmul.apply(input.flatten(0, -2), self.weight)
        if self.bias is not None:
            output = output + self.bias.to(output.dtype)
        return output.view(*input.shape[:-1], -1)


class Float8Matmul(torch.autograd.Function):
    """x @ weight.T in bfloat16, for x (N, C) and weight (V, C). Each size must be a multiple of 16."""

    @staticmethod
    def forward(ctx, x, weight):
        if any(size % 16 for size in (*x.shape, *weight.shape)):
            raise UserError(
                f"--dtype fp8 needs sizes that are multiples of 16, but the output layer multiplies {tuple(x.shape)} "
                f"(tokens of a micro-batch, channels) by {tuple(weight.shape)} (ids, channels). Change these sizes, or "
                "leave --dtype out."
            )
        x, x_scale = to_float8(x, torch.float8_e4m3fn)
        weight, weight_scale = to_float8(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(x, x_scale, weight, weight_scale)
        # F.scaled_mm, the public name, gives the same bits, but before torch 2.13 Inductor had no lowering for it
        return torch._scaled_mm(
            x, weight.T, x_scale, weight_scale, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    @staticmethod
    def backward(ctx, grad_output):
        x, x_scale, weight, weight_scale = ctx.saved_tensors
        gradient, scale = to_float8(grad_output, torch.float8_e5m2)
        # Hopper takes a row-major first operand and a column-major second one, so two matrices are transposed
        weight, x = weight.T.contiguous().T, x.T.contiguous().T
        grad_x = torch._scaled_mm(gradient, weight, scale, weight_scale, out_dtype=torch.bfloat16)
        grad_weight = torch._scaled_mm(gradient.T.contiguous(), x, scale, x_scale, out_dtype=torch.float32)
        return grad_x, grad_weight  # autograd converts them to the dtypes of x and weight


def to_float8(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(the scaled tensor, the factor that undoes the scaling). The largest value becomes the largest of the dtype."""
    scale = tensor.abs().amax().float().clamp(min=1e-30) / torch.finfo(dtype).max
    return (tensor / scale).to(dtype), scale
