# ran at commit 319c91e; the trainer's functions take other parameters now
"""Count the bytes that every rank sends and receives in a training step, and compare them with the formula.

Each rank runs in a network namespace of its own, which stands for a machine, and counts twice: what it hands to
torch.distributed, by hooks, and what its network interface has sent and received, by the kernel's counters.
Needs Linux and root.

    OMP_NUM_THREADS=1 python records/2026-11-21-many-machines/count.py --ranks 4 --shape gpt2 --optimizer muon
"""

import argparse
import dataclasses
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import train_gpt2 as t

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook

from plumbing import distributed

SHAPES = {
    # 9 and 3 matrices of a kind, so that four ranks cannot share them evenly
    "tiny": dict(n_layer=3, n_head=4, n_embd=128, block_size=128, vocab_size=320, sequence_length=64),
    "gpt2": dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50304, sequence_length=64),
}
MICRO_STEPS = 2  # of one sequence per rank


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    parser.add_argument("--bf16", action="store_true", help="torch's hook that sends gradients in bfloat16")
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # given to the ranks
    return parser.parse_args()


# ----------------------------------------------------------------------------------------------------------
# The machines


def run(command):
    subprocess.run(command.split(), check=True)


def start_ranks(args):
    """Start one process per rank, each in a namespace with one interface; a bridge in another joins them."""
    switch, names = f"switch{os.getpid()}", [f"rank{os.getpid()}_{r}" for r in range(args.ranks)]
    try:
        run(f"ip netns add {switch}")
        run(f"ip -n {switch} link add bridge type bridge")
        run(f"ip -n {switch} link set bridge up")
        for rank, name in enumerate(names):
            run(f"ip netns add {name}")
            run(f"ip link add eth0 netns {name} type veth peer name port{rank} netns {switch}")
            run(f"ip -n {name} address add 10.77.0.{rank + 1}/24 dev eth0")
            run(f"ip -n {name} link set lo up")
            run(f"ip -n {name} link set eth0 up")
            run(f"ip -n {switch} link set port{rank} master bridge up")
        with tempfile.TemporaryDirectory() as folder:
            vocab_size = SHAPES[args.shape]["vocab_size"]
            for split in ("val_000000", "train_000001"):
                ids = np.random.default_rng(0).integers(vocab_size, size=2**14).astype(np.uint16)
                np.save(Path(folder) / f"random_{split}.npy", ids)
            processes = []
            for rank, name in enumerate(names):
                place = dict(RANK=rank, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1, WORLD_SIZE=args.ranks,
                             MASTER_ADDR="10.77.0.1", MASTER_PORT=29500, GLOO_SOCKET_IFNAME="eth0")  # fmt: skip
                environment = os.environ | {key: str(value) for key, value in place.items()}
                command = ["ip", "netns", "exec", name, sys.executable, *sys.argv, "--folder", folder]
                processes.append(subprocess.Popen(command, env=environment))
            return max(process.wait() for process in processes)
    finally:
        for name in [*names, switch]:
            subprocess.run(["ip", "netns", "del", name])


# ----------------------------------------------------------------------------------------------------------
# One rank


def wire_bytes():
    """(sent, received) bytes of this namespace's interface so far, headers included."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if "eth0:" in line)
    numbers = line.split(":")[1].split()
    return int(numbers[8]), int(numbers[0])


class Counter:
    """The payloads handed to torch.distributed and the bytes on the wire, since the last `report`."""

    def __init__(self, world):
        self.world, self.calls, self.in_bucket = world, [], False
        self.wrap("all_reduce", lambda tensor, *rest: tensor)
        self.wrap("all_gather", lambda outputs, local, *rest: local)
        self.wrap("broadcast", lambda tensor, *rest: tensor)
        self.before = wire_bytes()

    def wrap(self, name, payload):
        """Replace torch.distributed's function by one that notes the size of what it is given."""
        function = getattr(dist, name)

        def counted(*args, **kwargs):
            self.calls.append(("bucket" if self.in_bucket else name, payload(*args).nbytes))
            return function(*args, **kwargs)

        setattr(dist, name, counted)

    def bucket_hook(self, bf16):
        """DDP's reduction of one bucket of gradients, which calls all_reduce, counted under a name of its own."""
        hook = bf16_compress_hook if bf16 else allreduce_hook

        def counted(group, bucket):
            self.in_bucket = True
            future = hook(group, bucket)
            self.in_bucket = False
            return future

        return counted

    def report(self, what, expected=None):
        """Print what this phase has cost, on rank 0; `expected`: the formula's bytes on the wire, each way."""
        dist.barrier()
        time.sleep(0.5)  # until the last packets are counted
        now = wire_bytes()
        sent, received = (after - before for after, before in zip(now, self.before))
        everyone = [None] * self.world.size
        dist.all_gather_object(everyone, (sent, received))
        if self.world.is_master:
            print(f"\n{what}")
            for name in dict.fromkeys(name for name, _ in self.calls):
                sizes = [size for called, size in self.calls if called == name]
                print(f"  {name:10} {len(sizes):4} calls {sum(sizes):13,} bytes handed over  {shorten(sizes)}")
            for rank, (sent, received) in enumerate(everyone):
                line = f"  rank {rank} on the wire: sent {sent:13,} received {received:13,}"
                if expected:
                    line += f"   formula {expected:13,.0f}: {sent / expected - 1:+.2%} {received / expected - 1:+.2%}"
                print(line, flush=True)
        dist.barrier()
        time.sleep(0.5)
        self.calls, self.before = [], wire_bytes()


def shorten(sizes):
    """[4, 4, 8] as "2 x 4, 8"."""
    if len(sizes) > 24:
        return ""
    return ", ".join(f"{sizes.count(size)} x {size:,}" for size in dict.fromkeys(sizes))


def expected_bytes(model, args):
    """The formula: bytes that a rank sends in a step, and receives, without headers and small reductions."""
    n = args.ranks
    parameters = sum(p.numel() for p in model.parameters())
    gradients = 2 * (n - 1) / n * parameters * (2 if args.bf16 else 4)  # a ring: reduce-scatter, then all-gather
    updates = 0
    if args.optimizer == "muon":
        L, C = model.config.n_layer, model.config.n_embd
        # query, key, value | attention's projection | into and out of the MLP: matrices of a kind, elements of each
        for matrices, elements in ((3 * L, C * C), (L, C * C), (L, 4 * C * C), (L, 4 * C * C)):
            updates += (n - 1) * math.ceil(matrices / n) * elements * 4  # the other ranks' shares, in float32 on a CPU
    return gradients + updates


def run_rank(args):
    """Set up as train_gpt2.train does, then count the start, three steps and a validation."""
    shape = SHAPES[args.shape]
    T = shape["sequence_length"]
    config = dataclasses.replace(
        t.PRESETS["gpt2"], **shape, data=args.folder, compile=False, dtype="float32", device="cpu", batch_size=1,
        total_batch_size=T * args.ranks * MICRO_STEPS, optimizer=args.optimizer,
    )  # fmt: skip
    world = distributed.setup_distributed("cpu")
    torch.manual_seed(0)
    layout = dict(B=1, T=T, rank=world.rank, world_size=world.size)
    loader, val_loader = (t.DataLoaderLite(args.folder, split, **layout) for split in ("train", "val"))
    shape = (config.block_size, config.vocab_size, config.n_layer, config.n_head, config.n_embd)
    raw_model = t.GPT(t.GPTConfig(*shape))
    autocast = torch.autocast("cpu", enabled=False)
    counter = Counter(world)
    if world.is_master:
        parameters = sum(p.numel() for p in raw_model.parameters())
        print(f"{args.shape}: {parameters:,} parameters, {args.ranks} ranks, {args.optimizer}, "
              f"gradients {'in bfloat16' if args.bf16 else 'in float32'}, {MICRO_STEPS} micro-steps")  # fmt: skip
    model, B = t.fit_to_machine(raw_model, config, autocast, world)
    counter.report("start: DDP's broadcast of the weights, the trial step's verdict")
    model.register_comm_hook(None, counter.bucket_hook(args.bf16))
    optimizers = t.configure_optimizers(raw_model, config)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    expected = expected_bytes(raw_model, args)
    for step in range(3):
        windows = world.size * MICRO_STEPS
        t.train_step(model, loader, windows, B, optimizers, scaler, step, config, [], autocast, world)
        counter.report(f"step {step}", expected)
    t.evaluate_val_loss(raw_model, val_loader, 4 * world.size, B, autocast, world)
    counter.report("validation")
    distributed.cleanup_distributed()


if __name__ == "__main__":
    args = parse_args()
    if args.folder:
        run_rank(args)
    else:
        sys.exit(start_ranks(args))
