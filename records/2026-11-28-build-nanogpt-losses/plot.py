"""Draw losses.png, and print the largest differences between the two programs' losses and predictions.

python records/2026-11-28-build-nanogpt-losses/plot.py
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

FOLDER = Path(__file__).parent
LAST_DIGIT = 5e-7  # build-nanogpt's log has six decimals
BLUE, ORANGE, TEAL = "#1f4e79", "#d9792b", "#45a294"
PAIRS = {
    "float32-his-shards": ("float32, its shards", BLUE),
    "float32-ours-shards": ("float32, our shards", TEAL),
    "bfloat16-his-shards": ("bfloat16, its shards", ORANGE),
}


def read(name, stream="train"):
    rows = [line.split() for line in (FOLDER / f"{name}.txt").read_text().splitlines()]
    return {int(step): float(value) for step, kind, value in rows if kind == stream}


def differences(one, other):
    steps = sorted(one.keys() & other.keys())
    return steps, np.array([abs(one[step] - other[step]) for step in steps])


def report(name, words):
    steps, train = differences(read(f"build-nanogpt-{name}"), read(f"ours-{name}"))
    _, val = differences(read(f"build-nanogpt-{name}", "val"), read(f"ours-{name}", "val"))
    predictions = json.loads((FOLDER / "predictions.json").read_text())[name]
    equal = sum(a == b for a, b in zip(predictions["build-nanogpt"], predictions["ours"], strict=True))
    print(f"{words}: {len(steps)} steps, {train.max():.1e}, first 20 {train[:20].max():.1e}, last 100 mean "
          f"{train[-100:].mean():.1e}; validation {val.max():.1e}; predictions {equal}")  # fmt: skip
    return steps, train


plt.style.use(FOLDER.parents[1] / "plumbing" / "notebook.mplstyle")
figure, (top, bottom) = plt.subplots(2, figsize=(8.6, 5.2), dpi=110, sharex=True, height_ratios=[1, 1.3])
theirs = read("build-nanogpt-float32-his-shards")
ours = read("ours-float32-his-shards")
top.plot(theirs.keys(), theirs.values(), color=ORANGE, linewidth=3.5, alpha=0.5, label="build-nanogpt")
top.plot(ours.keys(), ours.values(), color=BLUE, linewidth=0.9, label="train_gpt2")
top.set(
    ylabel="training loss",
    title="build-nanogpt's own program and this one, from the same weights, in file order",
)
top.legend()
for name, (words, color) in PAIRS.items():
    steps, values = report(name, words)
    bottom.plot(steps, values.clip(LAST_DIGIT), ".", color=color, markersize=3, label=words)
bottom.axhline(LAST_DIGIT, color="#8a929c", linewidth=0.8)
bottom.text(
    500,
    LAST_DIGIT * 0.55,
    "half of the last digit of build-nanogpt's log",
    ha="right",
    va="top",
    color="#8a929c",
)
bottom.set(yscale="log", ylim=(1.5e-7, 0.04), xlabel="step (512 tokens each)", ylabel="difference of the losses")
bottom.legend(loc="upper left", markerscale=4, ncols=3)
figure.savefig(FOLDER / "losses.png")
print("killed and resumed:", "equal" if read("ours-killed") == ours else "DIFFERENT", "in", len(ours), "steps")
