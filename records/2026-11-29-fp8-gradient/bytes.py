"""Ran at commit ddd0d7f. The bytes that the compiled output layer and loss move, as torch.compile schedules their kernels."""

import torch
import torch.nn.functional as F
from plumbing.system import float8
from torch._functorch import config
from torch._inductor.scheduler import Scheduler

TOKENS, CHANNELS, IDS = 16_384, 768, 50_304  # a quarter of the micro-batch of an H200
LARGEST = 57_344  # of e5m2


def by_the_largest_value(gradient):
    return to_float8(gradient, torch.float8_e5m2)


def by_a_sample_of_rows(gradient):
    scale = gradient[::64].abs().amax().float().clamp(min=1e-30) / LARGEST * 256
    return (gradient / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e5m2), scale


def by_a_constant(gradient):
    scale = torch.full((), 2.0**-31)
    return (gradient / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e5m2), scale


class Counted(Exception):
    """Ends the compilation: nothing is computed."""


def count(layer, x, targets):
    """GB in the forward and in the backward graph."""
    counted = []

    def count_nodes(scheduler):
        counted.append(sum(node.get_read_write_buffers_sizes() for node in scheduler.nodes) / 1e9)
        if len(counted) == 2:
            raise Counted
        return codegen(scheduler)

    def loss(x, targets):
        return F.cross_entropy(layer(x).float(), targets)

    torch.compiler.reset()
    codegen, Scheduler.codegen = Scheduler.codegen, count_nodes
    try:
        with torch.autocast("cpu", torch.bfloat16):
            torch.compile(loss, dynamic=False)(x, targets)
    except Exception as error:
        if "Counted" not in repr(error):
            raise
    finally:
        Scheduler.codegen = codegen
    return counted


def show(name, forward, backward):
    print(f"{name:32} {forward:5.2f} + {backward:5.2f} = {forward + backward:5.2f} GB", flush=True)


config.force_non_lazy_backward_lowering = True
to_float8 = float8.to_float8
layer = torch.nn.Linear(CHANNELS, IDS, bias=False)
x = torch.randn(TOKENS, CHANNELS, requires_grad=True)
targets = torch.randint(IDS, (TOKENS,))
show("bfloat16", *count(layer, x, targets))
for scaled in (by_the_largest_value, by_a_sample_of_rows, by_a_constant):
    float8.to_float8 = lambda t, dtype: scaled(t) if dtype == torch.float8_e5m2 else to_float8(t, dtype)
    name = scaled.__name__.replace("_", " ")
    show(f"float8, scaled {name}", *count(float8.Float8Linear(layer), x, targets))
