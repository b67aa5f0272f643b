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

from plumbing.cli.console import UserError
from plumbing.system.devices import FUSED_ATTENTION, enabled_attention

# A logit's gradient lies between -1 and 1, so a constant scale moves it into the range of float8, without a pass that
# finds its largest value. The largest number in e5m2 (5 bits of exponent, 2 of mantissa) is 57,344
GRADIENT_SCALE = 2.0**15


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


@torch.no_grad()
def check_float8(loss_sum: Callable[..., Any], weight: torch.Tensor) -> None:
    """Raise UserError if loss_sum(x, targets) is not the plain loss of x @ weight.T, which is what float8 computes."""
    device = weight.device
    generator = torch.Generator(device).manual_seed(0)  # the training's random numbers stay as they are
    x = torch.randn(32, weight.size(1), device=device, generator=generator)
    x *= 10 / weight.std()  # so that a soft cap shows
    targets = torch.randint(weight.size(0), (32,), device=device, generator=generator)
    with torch.autocast(device.type, enabled=False):
        expected = F.cross_entropy(F.linear(x, weight), targets, reduction="sum")
        is_plain = torch.allclose(loss_sum(x, targets)[1], expected, rtol=1e-4, equal_nan=True)
    if not is_plain:
        raise UserError(
            "--dtype fp8 computes the output layer and the plain cross-entropy at once, but loss_sum computes "
            "something else. Use --dtype bfloat16."
        )


def cross_entropy_in_float8(
    loss_sum: Callable[..., Any], x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, ignore_index: int
) -> Any:  # fmt: skip
    """The sum of the cross-entropy losses of the logits x @ weight.T, whose products are computed in float8.

    UserError if loss_sum(x, targets) is another loss; asked without torch.compile, as the first trial of a model is.
    """
    if not torch.compiler.is_compiling():
        check_float8(loss_sum, weight)
    return LinearCrossEntropy.apply(x, weight, targets, ignore_index)


def to_float8(tensor):
    """The tensor in e4m3 (4 bits of exponent, 3 of mantissa) and a scale that undoes it (Micikevicius et al. 2022)."""
    scale = tensor.abs().amax().float().clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (tensor / scale).to(torch.float8_e4m3fn), scale


def losses_and_gradient(logits, targets, ignore_index):
    """The losses (N,) of logits (N, V), in float32, and their gradient in e5m2, times GRADIENT_SCALE."""
    logits, targets = logits.float(), targets[:, None]
    is_target = targets != ignore_index
    log_sum = logits.logsumexp(1, keepdim=True)
    losses = torch.where(is_target, log_sum - logits.gather(1, targets.clamp(min=0)), 0.0)[:, 0]
    one_hot = torch.arange(logits.size(1), device=logits.device) == targets
    gradient = torch.where(is_target, (logits - log_sum).exp() - one_hot.float(), 0.0)
    return losses, (gradient * GRADIENT_SCALE).to(torch.float8_e5m2)


class LinearCrossEntropy(torch.autograd.Function):
    """The sum of the cross-entropy losses of the logits x @ weight.T, in float32, with matmuls in float8.

    x is (N, C), weight (V, C) and targets (N,); targets equal to ignore_index don't count. As in F.cross_entropy, the
    softmax is over all V ids, padding included. float8 matmuls run at twice the rate of bfloat16, but N, C and V must
    be multiples of 16, and Hopper multiplies only rows by rows, so the large gradient is also transposed, byte by byte.
    The forward pass computes the logits' gradient, softmax - one_hot, together with the loss.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, ignore_index):
        if any(size % 16 for size in (*x.shape, *weight.shape)):
            raise UserError(
                f"--dtype fp8 needs multiples of 16, but the output layer multiplies {tuple(x.shape)} by "
                f"{tuple(weight.shape)}: tokens of a micro-batch, channels, ids. Change these, or leave --dtype out."
            )
        x, x_scale = to_float8(x)
        weight, weight_scale = to_float8(weight)
        # F.scaled_mm, the public name, gives the same bits, but before torch 2.13 Inductor had no lowering for it
        logits = torch._scaled_mm(
            x, weight.T, x_scale, weight_scale, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        losses, gradient = losses_and_gradient(logits, targets, ignore_index)
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
        return grad_x, grad_weight, None, None  # autograd converts them to the dtypes of x and weight
