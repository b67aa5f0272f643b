"""Attention and the loss for CPUs, a cache for generating text, and the output layer in float8, for --dtype fp8.

A step of GPT-2 124M spends more than a quarter of its time in that layer. Its logits take 100 KB per token, so what
counts is how often they are read and written: in float8, the forward pass computes their gradient, softmax - one_hot,
together with the loss.
"""

import torch
import torch.nn.functional as F

# A logit's gradient lies between -1 and 1, so a constant scale moves it into the range of float8, without a pass that
# finds its largest value. The largest number in e5m2 (5 bits of exponent, 2 of mantissa) is 57,344
GRADIENT_SCALE = 2.0**15


class KVCache:
    """The keys and values of the `length` tokens so far, with room for max_len, for generating one token at a time."""

    def __init__(self, max_len):
        self.length, self.max_len = 0, max_len
        self.keys_values = {}  # attention layer -> its keys and values (2, B, nh, max_len, hs)

    def update(self, layer, k, v):
        """Append one layer's k, v (B, nh, T, hs) to the cache; return all keys and values so far (2, B, nh, S, hs)."""
        B, nh, T, hs = k.shape
        assert self.length == 0 or T == 1, "feed the whole prompt first, then one token at a time"
        if layer not in self.keys_values:
            self.keys_values[layer] = k.new_empty(2, B, nh, self.max_len, hs)
        keys_values = self.keys_values[layer][:, :, :, : self.length + T]
        keys_values[0, :, :, self.length :] = k
        keys_values[1, :, :, self.length :] = v
        return keys_values


def attention_on_cpu(q, k, v, **options):
    """F.scaled_dot_product_attention in float32: on a CPU, up to T = 512, faster than in bfloat16."""
    with torch.autocast("cpu", enabled=False):
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), **options).to(q.dtype)


def cross_entropy_on_cpu(logits, targets, ignore_index=-100):
    """The sum of the cross-entropy losses of the logits (N, V), as F.cross_entropy has it in float32.

    That makes several float32 copies of all logits, gigabytes for a vocabulary like GPT-2's. Here, a few rows are in
    float32 at a time and stay in the caches, and the backward pass writes the gradient over the logits.
    """
    # the compiler fuses F.cross_entropy itself, and would unroll the loops; few logits stay in the caches anyway
    if torch.compiler.is_compiling() or logits.numel() <= CrossEntropyOnCPU.LOGITS:
        return F.cross_entropy(logits.float(), targets, reduction="sum", ignore_index=ignore_index)
    return CrossEntropyOnCPU.apply(logits, targets, ignore_index)


class CrossEntropyOnCPU(torch.autograd.Function):
    """See `cross_entropy_on_cpu`."""

    LOGITS = 2**20  # in float32 at a time: 4 MB. 2**18 is as fast, 2**22 a twentieth slower

    @staticmethod
    def forward(ctx, logits, targets, ignore_index):
        ctx.rows = max(1, CrossEntropyOnCPU.LOGITS // logits.size(1))
        log_sums = torch.cat([rows.float().logsumexp(1) for rows in logits.split(ctx.rows)])
        is_target = targets != ignore_index
        of_targets = logits.gather(1, targets.clamp(min=0)[:, None])[:, 0].float()
        ctx.save_for_backward(logits, targets, log_sums, is_target)
        return torch.where(is_target, log_sums - of_targets, 0.0).sum()

    @staticmethod
    def backward(ctx, grad_output):
        logits, targets, log_sums, is_target = ctx.saved_tensors
        columns = targets.clamp(min=0)[:, None], log_sums[:, None], (is_target * grad_output)[:, None]
        chunks = zip(*(tensor.split(ctx.rows) for tensor in (logits, *columns)))
        for rows, target, log_sum, weight in chunks:
            gradient = (rows.float() - log_sum).exp_()
            gradient.scatter_add_(1, target, gradient.new_full(target.shape, -1))
            rows.copy_(gradient.mul_(weight))
        return logits, None, None


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
