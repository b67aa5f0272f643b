# ran at commit 7141a9d; modules that it imports have moved since
"""The order of things in three steps on a simulated GPU: python records/.../order.py FOLDER_OF_SHARDS, in the root."""

import itertools
import sys
import threading
import traceback

sys.path[:0] = ["", "tests/card"]
import gpu

gpu.load()
gpu.insert("H200")
import torch
import train_gpt2
from plumbing.distributed import World
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

B, T = 4, 16
events, lock = [], threading.Lock()


def note(what):
    with lock:
        events.append(what)


class Order(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        before = torch.ops.card.waits()
        result = function(*args, **kwargs or {})
        tensors = [each for each in tree_leaves((args, result)) if isinstance(each, torch.Tensor)]
        pinned = any(each.is_cpu and each.is_pinned() for each in tensors)
        if torch.ops.card.waits() > before:
            frames = [frame for frame in traceback.extract_stack() if frame.filename.endswith("train_gpt2.py")]
            note(f"the host WAITS for the card: {frames[-1].line}")
        elif pinned:
            note("a batch begins its way from pinned memory to the card")
        elif any(each.is_cuda for each in tensors):
            note("launch")
        return result


def read(self, position, rows):
    note(f"(thread) begins to read windows {position} to {position + rows - 1}")
    batch = read_batch(self, position, rows)
    note(f"(thread) has pinned windows {position} to {position + rows - 1}")
    return batch


read_batch, train_gpt2.DataLoaderLite.read_batch = train_gpt2.DataLoaderLite.read_batch, read
config = train_gpt2.TrainConfig(n_layer=1, n_head=2, n_embd=32, block_size=T, vocab_size=320, total_batch_size=2 * B * T)
model = train_gpt2.GPT(config).cuda()
loader = train_gpt2.DataLoaderLite(sys.argv[1], "train", B, T, device="cuda:0")
options = dict(config=config, optimizers=train_gpt2.configure_optimizers(model, config), signals=[])
options |= dict(scaler=torch.amp.GradScaler("cuda", enabled=False), world=World(device="cuda:0", dtype=torch.bfloat16))
for step in range(3):
    events.clear()
    with Order():
        train_gpt2.train_step(model, loader, 2 * B, step=step, **options)
    print(f"step {step}, which trains on windows {2 * B * step} to {2 * B * (step + 1) - 1}")
    for what, times in itertools.groupby(events):
        number = len(list(times))
        print(f"    {what}" if what != "launch" else f"    {number} operators are launched")
