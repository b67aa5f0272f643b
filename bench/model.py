"""GPT with experiments that no flag of the trainer reaches: a Triton kernel for the loss, plain attention."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from plumbing import kernels
from train_gpt2 import GPT, IGNORE_INDEX, CausalSelfAttention


class BenchGPT(GPT):
    """GPT whose loss may come from the Triton kernel, and which may return logits that nobody uses."""

    triton_loss = return_logits = False

    def forward(self, idx, targets=None, return_logits=True):
        if not self.triton_loss or return_logits:
            return super().forward(idx, targets, return_logits or self.return_logits)
        assert targets is not None, "without targets there is no loss"
        x, targets, weight = self.hidden_states(idx).flatten(0, 1), targets.flatten(), self.lm_head.weight
        if self.float8_lm_head:
            loss = kernels.linear_cross_entropy(x, weight, targets, IGNORE_INDEX, cross_entropy)
        else:
            loss = TritonLoss.apply(x, weight, targets)
        return None, loss / (targets != IGNORE_INDEX).sum().clamp(min=1)


class PlainAttention(CausalSelfAttention):
    """Attention without a fused kernel: the T x T scores of each head are written to memory."""

    def forward(self, x, attn_mask=None, cache=None):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (part.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for part in (q, k, v))
        future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.mT / math.sqrt(k.size(-1))).masked_fill(future, -math.inf)  # (B, nh, T, T)
        y = scores.softmax(-1) @ v
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class TritonLoss(torch.autograd.Function):
    """The sum of the losses of the logits x @ weight.T, in bfloat16."""

    @staticmethod
    def forward(ctx, x, weight, targets):
        ctx.x_dtype, x, weight = x.dtype, x.bfloat16(), weight.bfloat16()
        losses, gradient = cross_entropy(x @ weight.T, targets, IGNORE_INDEX, False)
        ctx.save_for_backward(x, weight, gradient)
        return losses.sum()

    @staticmethod
    def backward(ctx, grad_output):
        x, weight, gradient = ctx.saved_tensors
        # multiply the small results by grad_output, this loss's weight in the step, not the large gradient
        grad_x, grad_weight = (gradient @ weight) * grad_output, (gradient.T @ x) * grad_output
        return grad_x.to(ctx.x_dtype), grad_weight.float(), None


def check_kernel(num_rows, vocab_size, device):
    """Errors of the kernel in the last of many rows, whose offsets do not fit into 32 bits; RuntimeError if large."""
    logits = torch.randn(num_rows, vocab_size, device=device, dtype=torch.bfloat16) * 3
    targets = torch.randint(vocab_size, (num_rows,), device=device)
    targets[::5] = IGNORE_INDEX
    exact = logits[-256:].double().requires_grad_()
    exact_losses = F.cross_entropy(exact, targets[-256:], reduction="none")
    (expected,) = torch.autograd.grad(exact_losses.sum(), exact)
    for float8, scale, limit in ((False, 1.0, 0.004), (True, kernels.GRADIENT_SCALE, 0.08)):
        losses, gradient = cross_entropy(logits, targets, IGNORE_INDEX, float8)
        error = (gradient[-256:].double() / scale - expected).norm() / expected.norm()
        loss_error = (losses[-256:] - exact_losses).abs().max()
        if not (error < limit and loss_error < 1e-4):
            raise RuntimeError(
                f"The kernel is wrong: errors of {error:.1e} in gradients, {loss_error:.1e} in losses."
            )
    return {"loss_error": loss_error.item(), "float8_gradient_error": error.item()}


# A custom operator, so that torch.compile calls the kernel as it is
@torch.library.custom_op("train_gpt2::cross_entropy", mutates_args=[])
def cross_entropy(
    logits: Tensor, targets: Tensor, ignore_index: int, float8: bool = True
) -> tuple[Tensor, Tensor]:
    """The losses, and the logits' gradient in the logits' dtype, or in float8 times GRADIENT_SCALE."""
    from bench.triton_cross_entropy import kernel  # needs triton, which only CUDA builds of torch bring

    losses, gradient = fake_cross_entropy(logits, targets, ignore_index, float8)
    log2_scale, (N, V) = math.log2(kernels.GRADIENT_SCALE if float8 else 1.0), logits.shape
    arguments = logits, targets, losses, gradient, log2_scale, ignore_index, V
    kernel[(N,)](*arguments, num_warps=32)  # pyright: ignore[reportIndexIssue]  # triton adds the grid
    return losses, gradient


@cross_entropy.register_fake
def fake_cross_entropy(logits, targets, ignore_index, float8=True):
    dtype = torch.float8_e5m2 if float8 else logits.dtype
    return logits.new_empty(len(logits), dtype=torch.float32), torch.empty_like(logits, dtype=dtype)
