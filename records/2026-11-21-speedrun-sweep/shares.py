"""shares.md and shares.png from logs/: which share of tuned AdamW's tokens each recipe needs for the same loss.

A recipe that ran at two lengths is interpolated, its loss a straight line in the logarithm of the steps. One that ran at
one length only borrows the slope of the plain Muon recipe at its size and seed. Seeds are compared with themselves.
"""

import math
from pathlib import Path

import matplotlib.pyplot as plt

from sweep import LOGS, SIZES, TAILS, read_log

HERE = Path(__file__).parent
FULL = 800  # AdamW's steps
PARAMETERS = {"0.4M": 372_576, "2M": 1_853_568, "8M": 7_521_280}
PLAIN = "muon-lr0.02-wd0.01-a0.008"
STREAMS = ["val", *(f"val_tail{share}" for share in TAILS)]


def load_runs():
    """{(size, recipe, seed): {steps: {stream: loss}}}"""
    runs = {}
    for path in LOGS.glob("*/*/*/*.txt"):
        size, recipe, steps = path.relative_to(LOGS).parts[:3]
        log = read_log(path)
        losses = {stream: log[stream][int(steps)] for stream in STREAMS}
        runs.setdefault((size, recipe, path.stem), {})[int(steps)] = losses
    return runs


def find_target(runs, size, seed):
    """The lowest final loss of AdamW, over the rates and schedules that were run for FULL steps."""
    finals = [lengths[FULL]["val"] for (s, recipe, d), lengths in runs.items()
              if (s, d) == (size, seed) and recipe.startswith("adamw") and FULL in lengths]  # fmt: skip
    return min(finals, default=None)


def slope(lengths):
    """Loss per unit of log(steps) between the shortest and the longest of a recipe's runs."""
    short, long = min(lengths), max(lengths)
    return (lengths[long]["val"] - lengths[short]["val"]) / math.log(long / short)


def share(runs, size, recipe, seed, stream="val"):
    """The share of FULL steps after which the recipe would end at AdamW's loss, or None where runs are missing."""
    target, lengths = find_target(runs, size, seed), runs[size, recipe, seed]
    plain = runs.get((size, PLAIN, seed), {})
    reference = lengths if len(lengths) > 1 else plain
    if target is None or len(reference) < 2:
        return None
    steps, losses = min(lengths.items(), key=lambda item: abs(item[1][stream] - target))
    return steps * math.exp((target - losses[stream]) / slope(reference)) / FULL


def main():
    runs = load_runs()
    lines = ["| size | seed | recipe | steps | loss | mean of last 5% | of last 20% | share of AdamW's tokens |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for size in SIZES:
        keys = sorted(key for key in runs if key[0] == size)
        for _, recipe, seed in sorted(keys, key=lambda key: (key[2], key[1])):
            for steps, losses in sorted(runs[size, recipe, seed].items()):
                found = share(runs, size, recipe, seed) if recipe.startswith("muon") else None
                cells = " | ".join(f"{losses[stream]:.4f}" for stream in STREAMS)
                text = f"{100 * found:.1f}%" if found else ""
                lines.append(f"| {size} | {seed} | {recipe} | {steps} | {cells} | {text} |")
    (HERE / "shares.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
