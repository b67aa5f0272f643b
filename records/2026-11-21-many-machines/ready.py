"""When the backward pass of GPT-2 124M has filled each of DDP's buckets, and how large they are.

    OMP_NUM_THREADS=1 python records/2026-11-21-many-machines/ready.py > ready.txt

One process in a group of one: the hook sums nothing, so what is timed is the pass alone.
"""

import os
import statistics
import sys
import time
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import train_gpt2 as t

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

B, T, ROUNDS = 2, 256, 7


def measure(megabytes, first_call="in DDP"):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = t.GPT(t.GPTConfig(block_size=1024, vocab_size=50304, n_layer=12, n_head=12, n_embd=768))
    x, y = torch.randint(50257, (2, B, T)).unbind()
    t.DDP = lambda module, **options: DistributedDataParallel(module, **options | {"bucket_cap_mb": megabytes})
    compiled = torch.compile(model, dynamic=False)
    if first_call != "in DDP":
        compiled(x, y, return_logits=False)[1].backward()
        model.zero_grad(set_to_none=True)
    config = types.SimpleNamespace(compile=False, shard=False)  # it is compiled already
    ddp = t.wrap(compiled, config, types.SimpleNamespace(size=2))
    filled = []

    def hook(state, bucket):
        filled.append((time.perf_counter(), bucket.buffer().nbytes))
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, hook)
    rounds = []
    for _ in range(ROUNDS + 2):  # the first compiles, and after it DDP makes its buckets anew
        loss = ddp(x, y, return_logits=False)[1]
        filled.clear()
        start = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        model.zero_grad(set_to_none=True)
        rounds.append([(moment - start) / (end - start) for moment, _ in filled])
    shares = [statistics.median(column) for column in zip(*rounds[2:])]
    print(f"buckets of {megabytes} MB, the first compiled call {first_call}; a pass takes {end - start:.2f} s")
    for (_, size), share in zip(filled, shares):
        print(f"  {size:11,} bytes at {share:.0%} of the backward pass")
    sys.stdout.flush()


if __name__ == "__main__":
    os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="29577", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo")
    measure(25)
    measure(100)
    measure(100, first_call="before DDP")
    dist.destroy_process_group()
    os._exit(0)  # subtle: torch's inductor leaves worker processes behind
