# ran at commit 7141a9d; modules that it imports have moved since
"""Count the memory of a training step on a simulated GPU that computes nothing: python records/.../count.py, in the root.

A line of flags of train_gpt2.py per line of stdin; with "whole", the loss is torch's own, as it was before it took the logits
in chunks. Counted are live tensors, each rounded up to 512 bytes: what torch.cuda.max_memory_allocated() says, but for workspaces.
"""

import sys

sys.path[:0] = ["", "tests/card"]
import gpu

gpu.load()
gpu.insert("H200", gib=4096, hollow=True)
import torch
import train_gpt2
from plumbing import distributed, kernels, machine


class Loader:
    position = 0

    def __init__(self, B, T):
        self.B, self.T = B, T

    def next_batch(self, B):
        return torch.zeros(2, B, self.T, dtype=torch.long, device="cuda:0").unbind()


def peak(flags):
    """GiB at the peak of the second step of two micro-steps, by when the optimizer has its state."""
    config = train_gpt2.parse_args([*flags, "--vocab-size", "50304"])
    dtype, config.dtype = machine.choose_dtype(config.dtype, "cuda:0")
    world = distributed.World(device="cuda:0", dtype=dtype)
    with torch.device("cuda:0"):
        model = train_gpt2.GPT(config)
    model.activation_checkpointing = config.activation_checkpointing
    model.float8_lm_head = config.dtype == "fp8"
    optimizers = train_gpt2.configure_optimizers(model, config)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    loader = Loader(config.batch_size, config.sequence_length)
    rest = dict(config=config, optimizers=optimizers, scaler=scaler, signals=[], world=world)
    for step in range(2):
        torch.cuda.reset_peak_memory_stats()
        train_gpt2.train_step(model, loader, 2 * loader.B, step=step, **rest)
    return torch.cuda.max_memory_allocated() / 2**30


for line in sys.stdin:
    *flags, last = line.split()
    is_whole = last == "whole"
    if not is_whole:
        flags.append(last)
    size = kernels.CrossEntropyInChunks.LOGITS_ON_GPU
    kernels.CrossEntropyInChunks.LOGITS_ON_GPU = 2**62 if is_whole else size
    print(f"{peak(flags):6.2f} GiB  {line.strip()}", flush=True)
    kernels.CrossEntropyInChunks.LOGITS_ON_GPU = size
