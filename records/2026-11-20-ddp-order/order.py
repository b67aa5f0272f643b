"""Where DDP and the compiler meet: parts of the graph, when the buckets of gradients are ready, step time, losses.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node=2 records/2026-11-20-ddp-order/order.py
"""

import dataclasses
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import bench  # before torch

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import train_gpt2 as t

config = dataclasses.replace(
    t.PRESETS["quickstart"], optimizer="adamw", vocab_size=8192, n_layer=6, n_embd=256, compile=True, dtype="float32",
    batch_size=4, total_batch_size=2048, device="cpu",
)  # fmt: skip
ddp = t.setup_distributed(config)
if ddp.is_master:
    print(f"{'':42}{'parts':>6}{'validation':>12}{'step s':>8}  {'losses':17}   bucket ready at, of the backward pass",
          flush=True)  # fmt: skip


def arrange(order, model):
    """(model to train, model to validate)"""
    views = "no bucket views" not in order
    # 31 MB of weights in buckets of 5 MB, as 498 MB of GPT-2 124M in those of 25 MB
    wrap = lambda module: DDP(module, gradient_as_bucket_view=views, bucket_cap_mb=5)  # noqa: E731
    if order.startswith("compiler around DDP"):
        outside = torch.compile(wrap(model), dynamic=False)
        return outside, outside
    compiled = torch.compile(model, dynamic=False) if "compile" in order else model
    if order == "DDP around what is already compiled":
        x, y = torch.randint(config.vocab_size, (2, config.batch_size, config.sequence_length)).unbind()
        compiled(x, y, return_logits=False)[1].backward()
        model.zero_grad(set_to_none=True)
    return wrap(compiled), compiled


orders = ("not compiled", "DDP around what is already compiled", "DDP around what it compiles", "compiler around DDP",
          "DDP around what it compiles, no bucket views")  # fmt: skip
for order in orders:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = t.GPT(t.GPTConfig(config.block_size, config.vocab_size, config.n_layer, config.n_head, config.n_embd))
    ready = []

    def hook(state, bucket):
        ready.append(time.perf_counter())
        return allreduce_hook(state, bucket)

    with tempfile.TemporaryDirectory() as folder:
        bench.random_shards(folder, config)
        layout = dict(B=config.batch_size, T=config.sequence_length, rank=ddp.rank, world_size=2)
        loader, val_loader = t.DataLoaderLite(folder, "train", **layout), t.DataLoaderLite(folder, "val", **layout)
        optimizers = t.configure_optimizers(model, config, "cpu")
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        trained, validated = arrange(order, model)
        seconds, losses = [], []
        for step in range(8):
            start = time.perf_counter()
            losses.append(t.train_step(trained, loader, optimizers, scaler, 16, config, ddp)[0])
            seconds.append(time.perf_counter() - start)
        parts = torch._dynamo.utils.counters["aot_autograd"]["total"]
        t.evaluate_val_loss(validated, val_loader, 16, ddp)
        more = torch._dynamo.utils.counters["aot_autograd"]["total"] - parts
        # a step behind a validation, then a backward pass by hand, with the times at which its buckets are ready
        losses.append(t.train_step(trained, loader, optimizers, scaler, 16, config, ddp)[0])
        (trained._orig_mod if hasattr(trained, "_orig_mod") else trained).register_comm_hook(None, hook)
        x, y = loader.next_batch()
        for _ in range(2):
            loss = trained(x, y, return_logits=False)[1]
            ready.clear()
            start = time.perf_counter()
            loss.backward()
            end = time.perf_counter()
            model.zero_grad(set_to_none=True)
        dist.barrier()
    if ddp.is_master:
        shares = " ".join(f"{(moment - start) / (end - start):4.0%}" for moment in ready)
        print(f"{order:42}{parts:6}{more:12}{statistics.median(seconds[2:]):8.3f}  {losses[0]:.6f} {losses[-1]:.6f}   "
              f"{shares}", flush=True)  # fmt: skip
dist.destroy_process_group()
os._exit(0)  # subtle: torch's inductor leaves worker processes behind that keep torchrun waiting
