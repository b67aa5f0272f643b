"""The losses of the runs that ../2026-11-20-fp8-head/run.sh makes, and of those that it made then, beside bfloat16's.

    python records/2026-11-21-fp8-known-scale/compare.py RUNS DATA

RUNS: a folder per run, with its log.txt and last checkpoint, whose weights are also validated in float32.
"""

import contextlib
import sys
from pathlib import Path

here = Path(__file__).parent
sys.path.insert(0, str(here.parents[1]))

import train_gpt2 as t  # first: it sets how OpenMP threads wait

import numpy as np
from plumbing.distributed import World

runs, data = Path(sys.argv[1]), sys.argv[2]
VAL = (250, 500, 750, 1000)


def losses(log):
    """({step: validation loss}, the training loss of each step) of a log."""
    lines = [line.split() for line in log.read_text().splitlines()]
    val = {int(step): float(value) for step, name, value in lines if name == "val"}
    return val, np.array([float(value) for _, name, value in lines if name == "train"])


def in_float32(run):
    """The validation loss of a run's last weights, with all arithmetic in float32."""
    model, _ = t.load_model(runs / run / "model_01000.pt")
    loader = t.DataLoaderLite(data, "val", 8, 128)
    return t.evaluate_val_loss(model, loader, 1024, 8, contextlib.nullcontext(), World())


print(f"{'':22}" + "".join(f"{f'val {step}':>10}" for step in VAL) + f"{'in float32':>12}{'train 901-1000':>16}"
      + f"{'- bfloat16':>12}{'train 501-1000 - bfloat16, s.d. of a step':>43}")  # fmt: skip
for seed in (1337, 1):
    for when, folder in (("now", runs), ("before", here.parent / "2026-11-20-fp8-head" / "logs")):
        end = "/log.txt" if when == "now" else ".txt"
        log = lambda dtype: folder / f"{dtype}-{seed}{end}"  # noqa: E731
        base = losses(log("bfloat16"))[1]
        for dtype in ("float32", "bfloat16", "fp8"):
            if not log(dtype).exists():
                continue
            val, train = losses(log(dtype))
            exact = f"{in_float32(f'{dtype}-{seed}'):12.4f}" if when == "now" else f"{'':12}"
            difference = (train - base)[500:]
            print(f"{dtype}-{seed} {when:9}".ljust(22) + "".join(f"{val[step]:10.4f}" for step in VAL) + exact
                  + f"{train[-100:].mean():16.4f}{(train - base)[-100:].mean():+12.4f}"
                  + f"{difference.mean():+33.4f}{difference.std():10.4f}")  # fmt: skip
