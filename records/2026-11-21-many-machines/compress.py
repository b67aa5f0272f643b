# ran at commit 319c91e; the trainer's functions take other parameters now
"""What bfloat16 sums of gradients do to the loss, and to the gradients of more ranks than this machine has.

    cd records/2026-11-21-many-machines
    torchrun --standalone --nproc_per_node=2 compress.py train adamw 4e-3 0 1 >> compress_train.txt  # muon, too
    torchrun --standalone --nproc_per_node=2 compress.py train adamw 1e-3 0 1 >> compress_train.txt
    python compress.py control > compress_control.txt
    python compress.py error > compress_error.txt
"""

import dataclasses
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import train_gpt2 as t

import numpy as np
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from plumbing import distributed

TEXT = Path(__file__).parents[3] / "shared" / "data" / "tinyshakespeare.txt"
STEPS, EVERY = 300, 100
AUTOCAST = torch.autocast("cpu", enabled=False)


def make_config(folder, seed, optimizer, max_lr=4e-3):
    """Bytes of tiny Shakespeare, 2,048 a step, in 0.4M parameters."""
    return dataclasses.replace(
        t.PRESETS["gpt2"], data=folder, seed=seed, compile=False, dtype="float32", device="cpu",
        n_layer=3, n_head=3, n_embd=96, block_size=64, vocab_size=256, sequence_length=64, batch_size=16,
        total_batch_size=2048, max_steps=STEPS, warmup_steps=20, schedule="wsd", max_lr=max_lr, muon_lr=0.04,
        optimizer=optimizer,
    )  # fmt: skip


def write_shards(folder):
    ids = np.frombuffer(TEXT.read_bytes(), np.uint8).astype(np.uint16)
    np.save(Path(folder) / "shakespeare_train_000001.npy", ids[:-100_000])
    np.save(Path(folder) / "shakespeare_val_000000.npy", ids[-100_000:])


def make_model(config):
    torch.manual_seed(config.seed)
    return t.GPT(t.GPTConfig(config.block_size, config.vocab_size, config.n_layer, config.n_head, config.n_embd))


def train(name, config, world, B, prepare):
    """Train from scratch and print the validation losses. prepare(raw_model): the model to train."""
    raw_model = make_model(config)
    model = prepare(raw_model)
    layout = dict(B=B, T=config.sequence_length, rank=world.rank, world_size=world.size)
    loader = t.DataLoaderLite(config.data, "train", **layout, seed=config.seed, shuffle=True)
    val_loader = t.DataLoaderLite(config.data, "val", **layout)
    optimizers = t.configure_optimizers(raw_model, config)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    windows = config.total_batch_size // config.sequence_length
    start, losses, tail = time.perf_counter(), [], []
    for step in range(STEPS):
        t.apply_schedules(optimizers, step, config)
        loss, _, _ = t.train_step(model, loader, windows, B, optimizers, scaler, step, config, [], AUTOCAST, world)
        tail = [*tail, loss][-EVERY:]
        if (step + 1) % EVERY == 0:
            losses.append(t.evaluate_val_loss(raw_model, val_loader, 512, B, AUTOCAST, world))
    if world.is_master:
        print(f"{name:34} seed {config.seed}  validation {' '.join(f'{loss:.5f}' for loss in losses)}  "
              f"training, last {EVERY} steps {np.mean(tail):.5f}  {time.perf_counter() - start:.0f} s",
              flush=True)  # fmt: skip


def compress(group, bucket):
    """torch's hook, by another name: DDP refuses it by its own on gloo, where it works, too."""
    return bf16_compress_hook(group, bucket)


def compare_on_two_ranks():
    world = distributed.setup_distributed("cpu")
    with tempfile.TemporaryDirectory() as folder:
        write_shards(folder)
        optimizer, max_lr, *seeds = sys.argv[2:]
        for seed in map(int, seeds):
            config = make_config(folder, seed, optimizer, float(max_lr))
            for bf16 in (False, True):

                def prepare(raw_model):
                    model = t.wrap(raw_model, False, world)
                    if bf16:
                        model.register_comm_hook(None, compress)
                    return model

                name = f"{optimizer} {max_lr}, {'bfloat16' if bf16 else 'float32'} sums"
                train(name, config, world, 16, prepare)
    distributed.cleanup_distributed()


def train_otherwise():
    """How far runs are apart that differ only by float32's rounding: one rank, and micro-batches of 8 windows."""
    with tempfile.TemporaryDirectory() as folder:
        write_shards(folder)
        for seed in (1, 0):
            config = make_config(folder, seed, "adamw")
            train("adamw, float32 sums, 4 x 8 windows", config, distributed.World(), 8, lambda model: model)


def measure_error():
    """How far bfloat16 sums of n ranks' gradients, one window each, are from the exact ones."""
    with tempfile.TemporaryDirectory() as folder:
        write_shards(folder)
        config = make_config(folder, 0, "adamw")
        model = make_model(config)
        loader = t.DataLoaderLite(folder, "train", 1, config.sequence_length, shuffle=True)
        optimizers = t.configure_optimizers(model, config)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        world = distributed.World()
        print("errors are of the exact gradient's norm; in brackets, the part along the gradient\n"
              "model           ranks   float32 ring   bfloat16 ring        bfloat16 tree        noise of two batches")
        for trained in (0, 100):
            for step in range(trained):
                t.train_step(model, loader, 32, 16, optimizers, scaler, step, config, [], AUTOCAST, world)
            for n in (2, 8, 64, 512):
                exact, single, ring, tree, variance = measure_sums(model, loader, n)
                norm = exact.norm()
                errors = [f"{((s - exact).norm() / norm).item():.2e}" for s in (single, ring, tree)]
                along = [f"({((s - exact) @ exact / norm**2).item():+.4f})" for s in (ring, tree)]
                noise = (2 * variance / n).sqrt() / norm
                print(f"after {trained:3} steps {n:5}   {errors[0]:12}   {errors[1]} {along[0]}   "
                      f"{errors[2]} {along[1]}   {noise:.2f}", flush=True)  # fmt: skip


def measure_sums(model, loader, n):
    """The mean gradient over n ranks: exact, a float32 ring's, a bfloat16 ring's and tree's; one rank's variance."""
    exact = single = ring = squares = 0
    machines = []
    for rank in range(n):
        x, y = loader.next_batch(1)
        grads = torch.autograd.grad(model(x, y, return_logits=False)[1], list(model.parameters()))
        flat = torch.cat([grad.flatten() for grad in grads]) / n
        exact, single, squares = exact + flat.double(), single + flat, squares + (flat.double() * n).square().sum()
        # from rank to rank, rounded each time
        ring = ring + flat.bfloat16() if rank else flat.bfloat16()
        # within a machine of 8 from rank to rank, then pairs of machines, pairs of pairs and so on
        if rank % 8:
            machines[-1] = machines[-1] + flat.bfloat16()
        else:
            machines.append(flat.bfloat16())
    while len(machines) > 1:
        machines = [a + b for a, b in zip(machines[::2], machines[1::2])]
    variance = (squares / n - exact.square().sum()) * n / (n - 1)
    return exact, single.double(), ring.double(), machines[0].double(), variance


if __name__ == "__main__":
    {"train": compare_on_two_ranks, "control": train_otherwise, "error": measure_error}[sys.argv[1]]()
