"""Ran at commit a28cb84. Count graphs of torch.compile, or bytes of each rank, in three steps of --shard: counts.py graphs|bytes FLAGS..., by torchrun."""

import functools
import os
import resource
import sys
from unittest import mock

import torch
import train_gpt2
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves


def local_bytes(state):
    """Bytes of the tensors on this rank, each once."""
    sizes = {}
    for leaf in tree_leaves(state):
        if isinstance(leaf, torch.Tensor):
            local = leaf.to_local() if hasattr(leaf, "to_local") else leaf
            sizes[local.data_ptr()] = local.nbytes
    return sum(sizes.values())


def resident():
    """MB in main memory now, and the most so far."""
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[1]) * resource.getpagesize()
    return now / 1e6, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def count_bytes(step, parts, signals):
    before = resident()
    done = train_step(step, parts, signals)
    now, most = resident()
    state = [each.state_dict() for each in parts.optimizers]
    weights = local_bytes(dict(parts.raw_model.named_parameters()))
    print(
        f"rank {parts.world.rank} of {parts.world.size}, step {step}: weights {weights / 1e6:.0f} MB, "
        f"optimizer {local_bytes(state) / 1e6:.0f} MB; process {before[0]:.0f} MB before, {now:.0f} MB after, "
        f"{most:.0f} MB at most",
        flush=True,
    )
    return done


what, *flags = sys.argv[1:]
train_step = train_gpt2.train_step
if what == "bytes":
    with mock.patch.object(train_gpt2, "train_step", count_bytes):
        train_gpt2.main(flags)
else:
    with mock.patch.object(torch, "compile", functools.partial(torch.compile, backend="aot_eager")):
        train_gpt2.main(flags)
    if os.environ["RANK"] == "0":
        stats, again = counters["stats"], sum(counters["recompiles"].values())
        print(
            f"graphs {stats['unique_graphs']}, calls captured {stats['calls_captured']}, recompilations {again}"
        )
