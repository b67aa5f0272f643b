"""GPT with experiments that no flag of the trainer reaches: a Triton kernel for the loss, plain attention."""

import math

import torch

from plumbing import kernels
from train_gpt2 import GPT, IGNORE_INDEX, CausalSelfAttention


class BenchGPT(GPT):
    """GPT whose loss may come from the Triton kernel, and which may return logits that nobody uses."""

    def __init__(self, config, triton_loss=False, return_logits=False):
        super().__init__(config)
        self.triton_loss, self.return_logits = triton_loss, return_logits

    def forward(self, idx, targets=None, return_logits=True):
        if targets is None or return_logits or not self.triton_loss:
            return super().forward(idx, targets, return_logits or self.return_logits)
        x, targets, weight = self.hidden_states(idx).flatten(0, 1), targets.flatten(), self.lm_head.weight
        if self.float8_lm_head:
            loss = kernels.linear_cross_entropy(x, weight, targets, IGNORE_INDEX, cross_entropy_float8)
        else:
            loss = TritonLoss.apply(x, weight, targets)
        return None, loss / (targets != IGNORE_INDEX).sum().clamp(min=1)


class PlainAttention(CausalSelfAttention):
    """Attention without a fused kernel: the T x T scores of each head are written to memory."""

    def forward(self, x, attn_mask=None, cache=None):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (part.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for part in (q, k, v))
        scores = q @ k.mT / math.sqrt(k.size(-1))  # (B, nh, T, T)
        future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        y = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class TritonLoss(torch.autograd.Function):
    """The sum of the losses of the logits x @ weight.T, in bfloat16; their gradient takes the logits' place."""

    @staticmethod
    def forward(ctx, x, weight, targets):
        ctx.dtypes = x.dtype, weight.dtype
        x, weight = x.bfloat16(), weight.bfloat16()
        logits = x @ weight.T
        losses = cross_entropy_in_place(logits, targets)
        ctx.save_for_backward(x, weight, logits)
        return losses.sum()

    @staticmethod
    def backward(ctx, grad_output):
        x, weight, gradient = ctx.saved_tensors
        # multiply the small results by grad_output, this loss's weight in the step, not the large gradient
        grad_x, grad_weight = (gradient @ weight) * grad_output, (gradient.T @ x) * grad_output
        return grad_x.to(ctx.dtypes[0]), grad_weight.to(ctx.dtypes[1]), None


# Custom operators, so that torch.compile calls the kernel as it is. They import triton, which only CUDA builds have


@torch.library.custom_op("train_gpt2::cross_entropy_in_place", mutates_args=["logits"])
def cross_entropy_in_place(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    from bench import triton_cross_entropy

    return triton_cross_entropy.launch(logits, targets, logits, 1.0, IGNORE_INDEX)


@torch.library.custom_op("train_gpt2::cross_entropy_float8", mutates_args=[])
def cross_entropy_float8(
    logits: torch.Tensor, targets: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    from bench import triton_cross_entropy

    gradient = torch.empty_like(logits, dtype=torch.float8_e5m2)
    return triton_cross_entropy.launch(logits, targets, gradient, kernels.GRADIENT_SCALE, ignore_index), gradient


@cross_entropy_in_place.register_fake
def _(logits, targets):
    return logits.new_empty(len(logits), dtype=torch.float32)


@cross_entropy_float8.register_fake
def _(logits, targets, ignore_index):
    return logits.new_empty(len(logits), dtype=torch.float32), torch.empty_like(logits, dtype=torch.float8_e5m2)
