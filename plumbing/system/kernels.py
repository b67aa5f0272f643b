"""Attention for CPUs, a cache for generating text, and faster ways to compute the loss.

A step of GPT-2 124M spends more than a quarter of its time in the output layer and the loss. The logits take 100 KB per
token, so what counts is how often they are read and written.
"""

import contextlib
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from plumbing.cli.console import UserError, print0

# A logit's gradient lies between -1 and 1, so a constant scale moves it into the range of float8, without a pass that
# finds its largest value. The largest number in e5m2 (5 bits of exponent, 2 of mantissa) is 57,344
GRADIENT_SCALE = 2.0**15


class KVCache:
    """The keys and values of the `length` tokens so far, with room for max_len, for generating one token at a time."""

    def __init__(self, max_len):
        self.length, self.max_len = 0, max_len
        self.keys_values = []  # of each layer: its keys and values (2, B, nh, max_len, hs)
        self.layer = 0  # the next one that calls `update`

    def update(self, k, v):
        """Append one layer's k, v (B, nh, T, hs) to the cache; return all keys and values so far (2, B, nh, S, hs)."""
        B, nh, T, hs = k.shape
        assert self.length == 0 or T == 1, "feed the whole prompt first, then one token at a time"
        if self.layer == len(self.keys_values):
            self.keys_values.append(k.new_empty(2, B, nh, self.max_len, hs))
        keys_values = self.keys_values[self.layer][:, :, :, : self.length + T]
        self.layer += 1
        keys_values[0, :, :, self.length :] = k
        keys_values[1, :, :, self.length :] = v
        return keys_values

    def advance(self, T):
        """Count T tokens as read, after the last layer."""
        self.length, self.layer = self.length + T, 0


@torch.no_grad()
def uses_cache(model: Any, idx: torch.Tensor, max_len: int) -> bool:
    """Whether `model` computes with a KVCache what it computes without: a changed model may not. Asked only once."""
    if not hasattr(model, "uses_cache"):
        last, agrees = idx[:, -min(8, max_len - 1) :], False  # few tokens, so that this takes next to no time
        limit = 1e-3 if next(model.parameters()).dtype == torch.float32 else 0.05
        with torch.autocast(idx.device.type, enabled=False):
            expected = model.hidden_states(torch.cat([last, last[:, :1]], 1)[:, :max_len])[:, -1]
            with contextlib.suppress(Exception):  # it may not take a cache at all
                cache = KVCache(max_len)
                model.hidden_states(last, cache=cache)
                found = model.hidden_states(last[:, :1], cache=cache)[:, -1]
                agrees = bool((found - expected).abs().max() <= limit * expected.std())
        if not agrees and max_len > 1:
            print0("note: With a cache this model computes something else, so it gets none.", file=sys.stderr)
        model.uses_cache = agrees
    return model.uses_cache


def attention_on_cpu(q, k, v, attn_mask=None, **options):
    """F.scaled_dot_product_attention in float32: on a CPU, up to T = 512, faster than in bfloat16."""
    if attn_mask is not None and attn_mask.is_floating_point():  # ALiBi's, for example
        attn_mask = attn_mask.float()
    options["attn_mask"] = attn_mask
    with torch.autocast("cpu", enabled=False):
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), **options).to(q.dtype)


# ----- The loss -----------------------------------------------------------------------------------------


class FasterLoss(TorchFunctionMode):
    """Context in which F.cross_entropy is computed in float32, and by a faster kernel where there is one.

    float8: logits that F.linear has computed inside of the context, and nothing has changed, are computed in float8.
    """

    def __init__(self, float8: bool = False):
        super().__init__()
        self.float8 = float8
        self.factors = self.product = None  # of the last F.linear

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            factors = self.factors if args[0] is self.product else None
            return cross_entropy(*args, **kwargs, factors=factors)
        result = func(*args, **kwargs)
        if self.float8 and func is F.linear and args[2] is None:  # without a bias
            # subtle: a product that nobody uses is not computed where the model is compiled
            self.factors, self.product = args[:2], result
        return result


def cross_entropy(logits, target, weight=None, *args, factors=None, **options):
    """F.cross_entropy in float32, by a kernel where that computes all that is asked for.

    factors: x and weight, if the logits are their product, which is then computed in float8.
    """
    # the kernels sum the plain losses of rows of logits
    is_plain = options.get("reduction") == "sum" and not options.get("label_smoothing")
    is_plain = is_plain and options.get("size_average") is None and options.get("reduce") is None
    is_plain = is_plain and logits.dim() == 2 and not target.is_floating_point() and weight is None and not args
    ignore_index = options.get("ignore_index", -100)
    if is_plain and factors:
        return LinearCrossEntropy.apply(*factors, target, ignore_index)
    # the compiler fuses F.cross_entropy itself, and would unroll the loops; few logits take little memory anyway
    is_large = not torch.compiler.is_compiling() and logits.numel() > CrossEntropyInChunks.size(logits)
    if is_plain and is_large:
        return CrossEntropyInChunks.apply(logits, target, ignore_index)
    # near 11, a bfloat16 loss has a resolution of only 0.06
    return F.cross_entropy(logits.float(), target, weight, *args, **options)


class CrossEntropyInChunks(torch.autograd.Function):
    """The sum of the cross-entropy losses of logits (N, V).

    F.cross_entropy makes several float32 copies of all logits, gigabytes for a vocabulary like GPT-2's. Here, a few
    rows are in float32 at a time and, on a CPU, stay in the caches.
    """

    LOGITS = 2**20  # in float32 at a time: 4 MB. 2**18 is as fast, 2**22 a twentieth slower
    LOGITS_ON_GPU = 2**25  # 128 MB: little memory, and yet kernels that take longer than their launch

    @classmethod
    def size(cls, logits):
        return cls.LOGITS if logits.is_cpu else cls.LOGITS_ON_GPU

    @staticmethod
    def forward(ctx, logits, targets, ignore_index):
        ctx.rows = max(1, CrossEntropyInChunks.size(logits) // logits.size(1))
        log_sums = torch.cat([rows.float().logsumexp(1) for rows in logits.split(ctx.rows)])
        is_target = targets != ignore_index
        of_targets = logits.gather(1, targets.clamp(min=0)[:, None])[:, 0].float()
        ctx.save_for_backward(logits, targets, log_sums, is_target)
        return torch.where(is_target, log_sums - of_targets, 0.0).sum()

    @staticmethod
    def backward(ctx, grad_output):
        logits, targets, log_sums, is_target = ctx.saved_tensors
        columns = targets.clamp(min=0)[:, None], log_sums[:, None], (is_target * grad_output)[:, None]
        gradients = torch.empty_like(logits)
        chunks = zip(*(tensor.split(ctx.rows) for tensor in (gradients, logits, *columns)))
        for out, rows, target, log_sum, weight in chunks:
            gradient = (rows.float() - log_sum).exp_()
            gradient.scatter_add_(1, target, gradient.new_full(target.shape, -1))
            out.copy_(gradient.mul_(weight))
        return gradients, None, None


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
