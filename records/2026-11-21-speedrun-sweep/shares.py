"""shares.md and shares.png from logs/: which share of tuned AdamW's tokens each recipe needs for the same loss.

A recipe that ran at two lengths is interpolated, its loss a straight line in the logarithm of the steps. One that ran
at one length only borrows the slope of the plain Muon recipe at its size and, if that was run there, its seed. Seeds
are compared with themselves.
"""

import math
from pathlib import Path

import matplotlib.pyplot as plt

from sweep import LOGS, SIZES, TAILS, read_log

HERE = Path(__file__).parent
# AdamW's steps, and those of the others that are compared with it
BUDGETS = {800: (800, 280, 200), 2400: (2400, 840, 600)}
PARAMETERS = {"0.1M": 124_672, "0.4M": 372_576, "2M": 1_853_568, "8M": 7_521_280}
PLAIN = "muon-lr0.02-wd0.01-a0.008"
VARIANTS = {
    PLAIN: ("Muon 0.02, 0.01", "#7f7f7f", "o"),
    "muon-lr0.025-wd0.05-a0.008": ("Muon 0.025, 0.05 (the preset's)", "#d62728", "s"),
    "muon-lr0.035-wd0.025-a0.008": ("Muon 0.035, 0.025", "#1f77b4", "^"),
    "soap-lr0.009-wd0.01-a0.008-every1": ("SOAP 0.009, 0.01", "#9467bd", "D"),
    "soapmuon-lr0.025-wd0.05-a0.008-every1": ("SOAP-Muon 0.025, 0.05", "#2ca02c", "v"),
}
# steps to a loss of 3.28 at 124M, of 5,625 with AdamW: modded-nanogpt, records/track_3_optimization, entries 1, 36, 12
PUBLISHED = dict(zip(VARIANTS, (3600, 3250, 3325)))
STREAMS = ["val", *(f"val_tail{share}" for share in TAILS)]


def load_runs():
    """{(size, recipe, seed, budget): {steps: {stream: loss}}}"""
    runs = {}
    for path in LOGS.glob("*/*/*/*.txt"):
        size, recipe, steps = path.relative_to(LOGS).parts[:3]
        log = read_log(path)
        losses = {stream: log[stream][int(steps)] for stream in [*STREAMS, "step_seconds", "optimizer_seconds"]}
        budget = next(full for full, lengths in BUDGETS.items() if int(steps) in lengths)
        runs.setdefault((size, recipe, path.stem, budget), {})[int(steps)] = losses
    return runs


def find_target(runs, size, seed, budget):
    """The lowest final loss of AdamW, over the rates and schedules that were run for `budget` steps."""
    finals = [lengths[budget]["val"] for (s, recipe, d, b), lengths in runs.items()
              if (s, d, b) == (size, seed, budget) and recipe.startswith("adamw")]  # fmt: skip
    return min(finals, default=None)


def slope(lengths):
    """Loss per unit of log(steps) between the shortest and the longest of a recipe's runs."""
    short, long = min(lengths), max(lengths)
    return (lengths[long]["val"] - lengths[short]["val"]) / math.log(long / short)


def share(runs, size, recipe, seed, budget):
    """The share of AdamW's steps after which the recipe would end at AdamW's loss, or None where runs are missing."""
    target, lengths = find_target(runs, size, seed, budget), runs[size, recipe, seed, budget]
    plain = [runs.get((size, PLAIN, other, budget), {}) for other in (seed, "1")]
    reference = next((found for found in [lengths, *plain] if len(found) > 1), None)
    if target is None or reference is None:
        return None
    steps, losses = min(lengths.items(), key=lambda item: abs(item[1]["val"] - target))
    return steps * math.exp((target - losses["val"]) / slope(reference)) / budget


def fit(points):
    """Intercept and slope of a line through (parameters, share), with parameters as powers of ten."""
    x, y = [math.log10(n) for n, _ in points], [share for _, share in points]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y)) / sum((a - mean_x) ** 2 for a in x)
    return mean_y - slope * mean_x, slope


def plot(runs):
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for number, (recipe, (label, color, marker)) in enumerate(VARIANTS.items()):
        apart = 1.08 ** (number - 2)  # side by side where they would cover each other
        found = {(PARAMETERS[key[0]], key[3], 100 * share(runs, *key)) for key in runs
                 if key[1] == recipe and share(runs, *key)}  # fmt: skip
        short = sorted((n, percent) for n, budget, percent in found if budget == min(BUDGETS))
        left.plot([n * apart for n, _ in short], [percent for _, percent in short], marker, color=color, label=label)
        for n, budget, percent in found:
            if budget != min(BUDGETS):
                left.plot(n * apart, percent, marker, color=color, fillstyle="left", markersize=9)
        if recipe in PUBLISHED:
            left.plot(124e6 * apart, 100 * PUBLISHED[recipe] / 5625, marker, color=color, fillstyle="none")
        if recipe == PLAIN:
            intercept, per_decade = fit(short)
            print(f"plain Muon: {per_decade:.1f} points of share per decade, "
                  f"{intercept + per_decade * math.log10(124e6):.0f}% at 124M if the line went on")  # fmt: skip
            ends = (short[0][0], 124e6)
            left.plot(ends, [intercept + per_decade * math.log10(n) for n in ends], ":", color=color)
        for size, r, seed, budget in runs:
            plain = runs.get((size, PLAIN, seed, budget), {})
            if r == recipe != PLAIN and 280 in plain:
                gain = runs[size, r, seed, budget][280]["val"] - plain[280]["val"]
                right.plot(PARAMETERS[size] * apart, gain, marker, color=color)
    if any(budget != min(BUDGETS) for *_, budget in runs):
        left.plot([], [], "o", color="black", fillstyle="left", markersize=9, label="three times as long")
    left.plot([], [], "o", color="black", fillstyle="none", label="published, another program (see README)")
    left.set(xscale="log", ylim=(0, 100), xlabel="parameters", ylabel="tokens needed, % of AdamW's",
             title="Tokens for AdamW's final loss")  # fmt: skip
    left.legend(frameon=False, fontsize=8.5, loc="upper left")
    right.axhline(0, color=VARIANTS[PLAIN][1], linewidth=0.8)
    right.set(xscale="log", xlim=left.get_xlim(), xlabel="parameters", ylabel="nats per byte",
              title="Loss after 280 steps, less that of Muon 0.02, 0.01")  # fmt: skip
    figure.savefig(HERE / "shares.png", dpi=110)


def main():
    runs = load_runs()
    lines = ["| size | seed | recipe | steps | loss | mean of last 5% | of last 20% | share of AdamW's tokens "
             "| processor ms per step | of them optimizer |",
             "|---|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for size in SIZES:
        keys = sorted(key for key in runs if key[0] == size)
        for _, recipe, seed, budget in sorted(keys, key=lambda key: (key[3], key[2], key[1])):
            for steps, losses in sorted(runs[size, recipe, seed, budget].items()):
                found = None if recipe.startswith("adamw") else share(runs, size, recipe, seed, budget)
                cells = " | ".join(f"{losses[stream]:.4f}" for stream in STREAMS)
                text = f"{100 * found:.1f}%" if found else ""
                seconds = (losses["step_seconds"], losses["optimizer_seconds"])
                times = " | ".join(f"{1000 * total / steps:.0f}" for total in seconds)
                lines.append(f"| {size} | {seed} | {recipe} | {steps} | {cells} | {text} | {times} |")
    (HERE / "shares.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    plot(runs)


if __name__ == "__main__":
    main()
