"""ends.png from the logs, and the table of the last losses: what 120 steps on code make of three beginnings."""

import sys
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1]))

from plumbing.run.logs import last_values, read_log

SEEDS = (1, 2, 3)
WAYS = {"kept": "--branch-from\n(state kept)", "weights": "--init-from\n(weights only)", "scratch": "from scratch"}
STREAMS = {"val/python_docs": "documentation", "val/code": "code"}


def ends(way, stream):
    return np.array([last_values(HERE / f"{way}-{seed}" / "log.txt")[stream] for seed in SEEDS])


def main():
    matplotlib.use("Agg")
    plt.style.use(HERE.parents[1] / "plumbing" / "notebook.mplstyle")
    begin = {stream: value for step, stream, value in read_log(HERE / "weights-1" / "log.txt") if step == 0}
    figure, axes = plt.subplots(1, 2, figsize=(8.6, 3.4))
    for ax, stream in zip(axes, ("val/code", "val/python_docs")):
        ax.axhline(begin[stream], color="#8a929c", linestyle="--", linewidth=1.2)
        ax.annotate("before", (2.65, begin[stream]), ha="right", va="bottom", fontsize=9)
        for x, way in enumerate(WAYS):
            losses = ends(way, stream)
            ax.plot([x] * len(losses), losses, "o", color="#6f93b5", markersize=5)
            ax.plot([x - 0.15, x + 0.15], [losses.mean()] * 2, color="#1f4e79")
            ax.annotate(f"{losses.mean():.3f}", (x + 0.18, losses.mean()), va="center", fontsize=9.5)
        ax.set_xticks(range(len(WAYS)), list(WAYS.values()))
        ax.set_xlim(-0.5, 2.7)
        ax.set_ylabel("loss (nats per byte)")
        ax.set_title(f"On {STREAMS[stream]}, after 120 steps on code")
    figure.savefig(HERE / "ends.png", dpi=110)
    for stream in STREAMS:
        print(f"{stream}, before: {begin[stream]:.4f}")
        for way in WAYS:
            losses = ends(way, stream)
            print(f"  {way}: {', '.join(f'{loss:.4f}' for loss in losses)}; mean {losses.mean():.4f}")
        for way in ("weights", "scratch"):
            minus = ends(way, stream) - ends("kept", stream)
            # Student's t for two degrees of freedom, 95%
            print(f"  {way} - kept: {minus.mean():+.4f} ± {4.303 * minus.std(ddof=1) / 3**0.5:.4f}")


if __name__ == "__main__":
    main()
