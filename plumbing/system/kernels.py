"""A cache for reading on, attention for CPUs, and faster ways to compute the loss.

A step of GPT-2 124M spends more than a quarter of its time in the output layer and the loss. The logits take 100 KB per
token, so what counts is how often they are read and written.
"""

import collections
import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from plumbing.system.devices import FUSED_ATTENTION, enabled_attention


class KVCache:
    """What the layers keep of the tokens read so far, so that the next ones, any number at a time, need not read them.

    length: how many these are; state: of each layer, tensors of its own, such as the last inputs of a convolution.
    """

    def __init__(self, max_len: int):
        self.length, self.max_len = 0, max_len
        self.kept: dict[int, list[torch.Tensor]] = {}
        self.state: dict[int, dict[str, torch.Tensor]] = collections.defaultdict(dict)

    def append(self, layer: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Append each of a layer's tensors (..., T, size), such as keys and values; all so far, (..., S, size)."""
        if layer not in self.kept:
            self.kept[layer] = [x.new_empty(*x.shape[:-2], self.max_len, x.size(-1)) for x in tensors]
        end = self.length + tensors[0].size(-2)
        for kept, x in zip(self.kept[layer], tensors):
            kept[..., self.length : end, :] = x
        return [kept[..., :end, :] for kept in self.kept[layer]]

    def advance(self, T: int) -> None:
        """Count T tokens as read, after the last layer."""
        self.length += T

    def repeat(self, n: int) -> None:
        """Repeat each row n times, so that n texts go on where one has begun."""
        for layer, kept in self.kept.items():
            self.kept[layer] = [x.repeat_interleave(n, 0) for x in kept]
        for layer, state in self.state.items():
            self.state[layer] = {name: x.repeat_interleave(n, 0) for name, x in state.items()}


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """F.scaled_dot_product_attention; on a CPU in float32, which up to T = 512 is faster there than bfloat16."""
    if not q.is_cpu:
        return F.scaled_dot_product_attention(q, k, v, **options)
    mask = options.get("attn_mask")
    if mask is not None and mask.is_floating_point():  # ALiBi's, for example
        options["attn_mask"] = mask.float()
    with torch.autocast("cpu", enabled=False):
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), **options).to(q.dtype)


def without_cudnn_attention() -> contextlib.AbstractContextManager[Any]:
    """Context without cuDNN's attention, for inputs of many shapes: it would build a kernel for each of them."""
    others = [FUSED_ATTENTION[name] for name in enabled_attention("cuda") if name != "cudnn"]
    return sdpa_kernel([*others, SDPBackend.MATH])


# ----- The loss -----------------------------------------------------------------------------------------

# of logits (N, V) and targets (N,), summed over the rows
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# 4 MB in float32, which stay in a CPU's caches; 2**18 is as fast, 2**22 a twentieth slower
LOGITS_IN_CHUNK = 2**20
LOGITS_IN_CHUNK_ON_GPU = 2**25  # 128 MB: little memory, and yet kernels that take longer than their launch


def in_chunks(loss: Loss, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """loss(logits, targets), with what it makes of the logits, such as float32 copies, for some rows at a time only."""
    at_once = LOGITS_IN_CHUNK if logits.is_cpu else LOGITS_IN_CHUNK_ON_GPU
    # the compiler fuses the loss itself, and would unroll the loop; few logits take little memory anyway
    if torch.compiler.is_compiling() or logits.numel() <= at_once:
        return loss(logits, targets)
    with torch.enable_grad():  # a loss with parameters of its own needs their gradients, too
        if loss(logits[:1].detach(), targets[:1]).requires_grad:
            return loss(logits, targets)
    return InChunks.apply(loss, logits, targets, max(1, at_once // logits.size(1)))  # pyright: ignore


class InChunks(torch.autograd.Function):
    """The sum of a loss over chunks of rows. The backward pass computes each chunk again, under the same autocast."""

    @staticmethod
    def forward(ctx, loss, logits, targets, rows):
        ctx.loss = loss
        ctx.rows = rows
        device = logits.device.type
        enabled = torch.is_autocast_enabled(device)
        ctx.autocast = functools.partial(
            torch.autocast, device, torch.get_autocast_dtype(device), enabled=enabled
        )
        ctx.save_for_backward(logits, targets)
        return sum(loss(*chunk) for chunk in zip(logits.split(rows), targets.split(rows)))

    @staticmethod
    def backward(ctx, grad_output):
        logits, targets = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: a second derivative needs the graph of all rows
            with ctx.autocast():
                loss = ctx.loss(logits, targets)
            return None, *torch.autograd.grad(loss, logits, grad_output, create_graph=True), None, None
        gradients = torch.empty_like(logits)
        for out, chunk, ids in zip(*(tensor.split(ctx.rows) for tensor in (gradients, logits, targets))):
            with torch.enable_grad(), ctx.autocast():
                chunk = chunk.detach().requires_grad_()
                loss = ctx.loss(chunk, ids)
            out.copy_(torch.autograd.grad(loss, chunk, grad_output)[0])
        return None, gradients, None, None
