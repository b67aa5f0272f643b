"""longer.png from the logs, and the tables: four ways of making 128 new position embeddings, before and after training."""

import collections
import sys
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1]))

from plumbing.run.logs import read_log

SEEDS = (1, 2, 3)
WAYS = {
    "last": "last row",
    "mean": "mean of the rows",
    "linear": "linear interpolation",
    "tile": "the rows again",
}


def curve(way):
    """(steps, validation losses (seeds, steps))."""
    logs = []
    for seed in SEEDS:
        log = read_log(HERE / f"{way}-{seed}" / "log.txt")
        logs.append({step: value for step, stream, value in log if stream == "val"})
    return list(logs[0]), np.array([list(log.values()) for log in logs])


def read_halves():
    """{name: [(loss in the first half, in the second)]}, a pair for each seed."""
    found = collections.defaultdict(list)
    for line in (HERE / "halves.txt").read_text().splitlines()[1:]:
        name, first, second = line.rsplit(" ", 2)
        found[name if "step" in name else name.partition("-")[0]].append((float(first), float(second)))
    return {name: np.array(pairs) for name, pairs in found.items()}


def main():
    matplotlib.use("Agg")
    plt.style.use(HERE.parents[1] / "plumbing" / "notebook.mplstyle")
    halves = read_halves()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.2, 3.6))
    for number, (way, label) in enumerate(WAYS.items()):
        steps, losses = curve(way)
        left.plot(steps, losses.mean(0), "o-", markersize=4, label=label)
        left.fill_between(steps, losses.min(0), losses.max(0), alpha=0.2)
        before, after = halves[f"{way} step 0"][0, 1], halves[way][:, 1]
        right.plot([0, 1], [before, after.mean()], "o-", markersize=5, label=label, color=f"C{number}")
    right.axhline(halves["parent"][0, 1], color="#22272e", linestyle="--", linewidth=1)
    right.annotate("parent, windows of 128", (-0.17, halves["parent"][0, 1]), va="bottom", fontsize=8.5)
    left.set(xlabel="step", ylabel="loss (nats per byte)", title="All of a window of 256", xticks=steps)
    right.set(title="Positions 128 to 255", xlim=(-0.2, 1.2))
    right.set_xticks([0, 1], ["step 0", f"step {steps[-1]}"])
    left.legend(fontsize=8.5)
    figure.savefig(HERE / "longer.png", dpi=110)
    base = curve("mean")[1][:, -1]
    for way in WAYS:
        steps, losses = curve(way)
        minus = losses[:, -1] - base
        text = f"{minus.mean():+.4f} ± {4.303 * minus.std(ddof=1) / 3**0.5:.4f}"  # Student's t, 95%
        ends = ", ".join(f"{loss:.4f}" for loss in losses[:, -1])
        print(f"{way}: step 0 {losses[0, 0]:.4f}; last {ends}; mean {losses[:, -1].mean():.4f}; minus mean's {text}")
        print(f"  halves: {halves[f'{way} step 0'][0].round(4)}, in the end {halves[way].mean(0).round(4)}")
    print("parent:", halves["parent"][0])


if __name__ == "__main__":
    main()
