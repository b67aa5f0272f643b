"""A key/value cache, attention for CPUs, and a loss that takes little memory."""

import collections
import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import get_device_states, set_device_states

from plumbing.system.devices import FUSED_ATTENTION, enabled_attention


class KVCache:
    """Keys and values of the tokens read so far, so that later tokens need not be computed with them again.

    length: the number of these tokens; state: a layer's other tensors, such as the last inputs of a convolution.
    """

    def __init__(self, max_len: int):
        self.length = 0
        self.max_len = max_len
        self.kept: dict[int, list[torch.Tensor]] = {}
        self.state: dict[int, dict[str, torch.Tensor]] = collections.defaultdict(dict)

    def append(self, layer: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Append a layer's tensors (..., T, size), such as keys and values. Returns all so far, (..., S, size)."""
        if layer not in self.kept:
            self.kept[layer] = []
            for x in tensors:
                *rows, _, size = x.shape
                self.kept[layer].append(x.new_empty(*rows, self.max_len, size))
        end = self.length + tensors[0].size(-2)
        for kept, x in zip(self.kept[layer], tensors):
            kept[..., self.length : end, :] = x
        return [kept[..., :end, :] for kept in self.kept[layer]]

    def advance(self, T: int) -> None:
        """Count T more tokens as read. Called after the last layer."""
        self.length += T

    def repeat(self, n: int) -> None:
        """Repeat each row n times, so that n texts can continue one beginning."""
        for layer, kept in self.kept.items():
            self.kept[layer] = [x.repeat_interleave(n, 0) for x in kept]
        for layer, state in self.state.items():
            self.state[layer] = {name: x.repeat_interleave(n, 0) for name, x in state.items()}


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """F.scaled_dot_product_attention. CPUs compute it in float32, which is faster than bfloat16 there up to T = 512."""
    if not q.is_cpu:
        return F.scaled_dot_product_attention(q, k, v, **options)
    mask = options.get("attn_mask")
    if mask is not None and mask.is_floating_point():  # ALiBi's, for example
        options["attn_mask"] = mask.float()
    with torch.autocast("cpu", enabled=False):
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), **options).to(q.dtype)


def without_cudnn_attention() -> contextlib.AbstractContextManager[Any]:
    """Context without cuDNN's attention, which would build a kernel for each input shape."""
    others = [FUSED_ATTENTION[name] for name in enabled_attention("cuda") if name != "cudnn"]
    return sdpa_kernel([*others, SDPBackend.MATH])


# ----- The loss -----------------------------------------------------------------------------------------

# loss(logits, targets) of logits (N, V) and targets (N,), summed over the rows
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# 4 MB in float32, which fit into a CPU's caches; 2**18 is as fast, 2**22 is 5% slower
LOGITS_IN_CHUNK = 2**20
LOGITS_IN_CHUNK_ON_GPU = 2**25  # 128 MB: a kernel takes longer than its launch


def in_chunks(loss: Loss, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """loss(logits, targets), computed in chunks of rows, so that temporaries such as float32 copies stay small.

    The backward pass calls the loss again, with each chunk and the same random numbers.
    """
    at_once = LOGITS_IN_CHUNK if logits.is_cpu else LOGITS_IN_CHUNK_ON_GPU
    # torch.compile fuses the loss itself, and would unroll the loop
    if torch.compiler.is_compiling() or logits.numel() <= at_once:
        return loss(logits, targets)
    rows = max(1, at_once // logits.size(1))
    random_state = torch.get_rng_state(), *get_device_states(logits)
    total: Any = 0
    for chunk in zip(logits.detach().split(rows), targets.split(rows)):
        with torch.enable_grad():
            total = total + loss(*chunk)
        if total.requires_grad:  # a loss with parameters needs their gradients as well
            return loss(logits, targets)
    try:
        return InChunks.apply(total, loss, logits, targets, rows, random_state)  # pyright: ignore
    except RuntimeError:  # torch.func does not take it
        return loss(logits, targets)


class InChunks(torch.autograd.Function):
    """The total of a loss over chunks of rows. The backward pass computes each chunk again, under the same autocast."""

    @staticmethod
    def forward(ctx, total, loss, logits, targets, rows, random_state):
        ctx.loss = loss
        ctx.rows = rows
        ctx.random_state = random_state
        device = logits.device.type
        enabled = torch.is_autocast_enabled(device)
        ctx.autocast = functools.partial(
            torch.autocast, device, torch.get_autocast_dtype(device), enabled=enabled
        )
        ctx.save_for_backward(logits, targets)
        return total.clone()

    @staticmethod
    def backward(ctx, grad_output):
        logits, targets = ctx.saved_tensors
        random_state, devices, device_states = ctx.random_state
        with torch.random.fork_rng(devices):
            torch.set_rng_state(random_state)
            set_device_states(devices, device_states)
            if torch.is_grad_enabled():  # create_graph: a second derivative needs the graph of all rows
                with ctx.autocast():
                    loss = ctx.loss(logits, targets)
                (gradients,) = torch.autograd.grad(loss, logits, grad_output, create_graph=True)
                return None, None, gradients, None, None, None
            gradients = torch.empty_like(logits)
            for start in range(0, len(logits), ctx.rows):
                rows = slice(start, start + ctx.rows)
                with torch.enable_grad(), ctx.autocast():
                    chunk = logits[rows].detach().requires_grad_()
                    loss = ctx.loss(chunk, targets[rows])
                (gradients[rows],) = torch.autograd.grad(loss, chunk, grad_output)
        return None, None, gradients, None, None, None
