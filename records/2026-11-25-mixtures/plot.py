"""mixtures.png from the logs, and the table of the last losses: a point for each share of code, seeds as spread."""

import sys
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1]))

from plumbing.run.logs import last_values

SHARES, SEEDS = (0, 25, 50, 75, 100), (1, 2, 3)


def ends(share):
    """(seeds, 2): the last losses on docs and on code."""
    logs = [last_values(HERE / f"code{share}-{seed}" / "log.txt") for seed in SEEDS]
    return np.array([[log["val/python_docs"], log["val/code"]] for log in logs])


def main():
    matplotlib.use("Agg")
    plt.style.use(HERE.parents[1] / "plumbing" / "notebook.mplstyle")
    losses = {share: ends(share) for share in SHARES}
    means = np.array([each.mean(0) for each in losses.values()])
    figure, ax = plt.subplots(figsize=(6.4, 4.2))
    ax.plot(*means.T, color="#8a929c", linewidth=1, zorder=1)
    for share, mean in zip(SHARES, means):
        low, high = mean - losses[share].min(0), losses[share].max(0) - mean
        bars = dict(xerr=[[low[0]], [high[0]]], yerr=[[low[1]], [high[1]]])
        ax.errorbar(*mean, **bars, fmt="o", color="#1f4e79", ecolor="#6f93b5", elinewidth=1.5, capsize=2)
        ax.annotate(f"{share}% code", mean, xytext=(9, 7), textcoords="offset points", fontsize=9.5)
    ax.set_xlabel("loss on documentation (nats per byte)")
    ax.set_ylabel("loss on code (nats per byte)")
    ax.set_title("Five mixtures of documentation and code: mean and range of three seeds")
    ax.margins(x=0.2, y=0.12)
    figure.savefig(HERE / "mixtures.png", dpi=110)
    print("| code | loss on docs, seeds 1, 2, 3 | mean | loss on code, seeds 1, 2, 3 | mean |\n|---|---|---|---|---|")
    for share, (docs, code) in zip(SHARES, means):
        each = [", ".join(f"{loss:.3f}" for loss in column) for column in losses[share].T]
        print(f"| {share}% | {each[0]} | {docs:.3f} | {each[1]} | {code:.3f} |")


if __name__ == "__main__":
    main()
