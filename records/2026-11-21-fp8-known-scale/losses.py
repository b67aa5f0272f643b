"""Losses of a small GPT over 1,000 steps: python losses.py SHARDS OUT DTYPE-SEED..., in the program's folder.

DTYPE: float32, bfloat16 or fp8; float32+sigmoid and bfloat16+sigmoid compute GELU as x * sigmoid(2u).
"""

import sys

sys.path.insert(0, ".")

import train_gpt2
import torch
from torch.nn import functional as F

shards, out, *runs = sys.argv[1:]
torch.set_num_threads(1)
plain_gelu = F.gelu
config = train_gpt2.TrainConfig(max_steps=1000, warmup_steps=50, max_lr=2e-3, min_lr=2e-4)


def gelu_by_sigmoid(x, approximate):
    f = x.float()
    return (f * torch.sigmoid(1.5957691216057308 * (f + 0.044715 * f**3))).to(x.dtype)


def loss_of(model, batch, dtype):
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype != "float32"):
        return model(*batch, return_logits=False)[1]


def train(dtype, seed, file):
    torch.manual_seed(seed)
    model = train_gpt2.GPT(train_gpt2.GPTConfig(64, 4096, 2, 2, 64))
    model.residual_dtype = torch.float32 if dtype == "float32" else torch.bfloat16
    model.float8_lm_head = model.float8_head = dtype == "fp8"  # the name now, and that before
    optimizers = train_gpt2.configure_optimizers(model, config, "cpu")
    loader = train_gpt2.DataLoaderLite(shards, "train", 4, 64, seed=seed, shuffle=True)
    val_loader = train_gpt2.DataLoaderLite(shards, "val", 64, 64)

    def validate(dtype):
        val_loader.position = 0
        with torch.no_grad():
            return sum(loss_of(model, val_loader.next_batch(), dtype).item() for _ in range(16)) / 16

    for step in range(1000):
        train_gpt2.set_schedules(optimizers, step, config)
        loss = loss_of(model, loader.next_batch(), dtype)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers[0].step()
        optimizers[0].zero_grad()
        print(step, "train", f"{loss.item():.7f}", file=file)
        if (step + 1) % 250 == 0:
            print(step + 1, "val", f"{validate(dtype):.6f}", file=file, flush=True)
    model.residual_dtype, model.float8_lm_head, model.float8_head = torch.float32, False, False
    print(1000, "val_in_float32", f"{validate('float32'):.6f}", file=file)


for run in runs:
    name, seed = run.split("-")
    dtype, _, gelu = name.partition("+")
    F.gelu = gelu_by_sigmoid if gelu else plain_gelu
    with open(f"{out}/{run}.txt", "w") as file:
        train(dtype, int(seed), file)
