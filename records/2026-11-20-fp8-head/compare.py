"""The losses of the runs that run.sh makes, beside bfloat16's; the final weights are also validated in float32.

    python records/2026-11-20-fp8-head/compare.py RUNS DATA
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch

import train_gpt2 as t

runs, data = Path(sys.argv[1]), sys.argv[2]


def stream(run, name):
    lines = [line.split() for line in (runs / run / "log.txt").read_text().splitlines()]
    return {int(step): float(value) for step, what, value in lines if what == name}


print(f"{'':17}" + "".join(f"{f'val {step}':>10}" for step in (250, 500, 750, 1000))
      + f"{'in float32':>12}{'mean train loss of 901-1000':>29}{'- bfloat16':>12}{'step by step':>14}")  # fmt: skip
for seed in (1337, 1):
    base = np.array(list(stream(f"bfloat16-{seed}", "train").values()))
    for dtype in ("float32", "bfloat16", "fp8"):
        run = f"{dtype}-{seed}"
        val, train = stream(run, "val"), np.array(list(stream(run, "train").values()))
        model, _ = t.load_model(runs / run / "model_01000.pt")
        loader = t.DataLoaderLite(data, "val", 8, 128)
        exact = t.evaluate_val_loss(model, loader, 1024, t.Distributed(0, 0, 1, "cpu", torch.float32))
        print(f"{run:17}" + "".join(f"{val[step]:10.4f}" for step in (250, 500, 750, 1000))
              + f"{exact:12.4f}{train[-100:].mean():29.4f}{train[-100:].mean() - base[-100:].mean():12.4f}"
              + f"{np.abs(train - base).mean():14.4f}")  # fmt: skip
