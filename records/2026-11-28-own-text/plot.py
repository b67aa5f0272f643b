"""Draw curve.png: the run's losses, and what the model wrote along the way.

python records/2026-11-28-own-text/plot.py
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FOLDER = Path(__file__).parent
BLUE, ORANGE = "#1f4e79", "#d9792b"
# step: which of its four samples, and where its box begins
BOXES = {200: (0, 60, 5.0), 400: (1, 450, 4.2), 1000: (0, 650, 3.0)}


def read_losses(stream):
    steps, values = [], []
    for line in (FOLDER / "log.txt").read_text().splitlines():
        step, name, value = line.split()
        if name == stream:
            steps.append(int(step))
            values.append(float(value))
    return steps, values


def read_samples():
    samples = {}
    for line in (FOLDER / "samples.txt").read_text().splitlines():
        step, _, text = line.partition(" ")
        samples.setdefault(int(step), []).append(json.loads(text))
    return samples


def draw_boxes(ax, val_loss, samples):
    for step, (which, x, y) in BOXES.items():
        box = dict(boxstyle="round,pad=0.5", facecolor="white", edgecolor=ORANGE, linewidth=0.9)
        arrow = dict(arrowstyle="-", color=ORANGE, linewidth=0.9)
        text = samples[step][which].rstrip()
        font = dict(family="monospace", fontsize=8.5, linespacing=1.25)
        ax.annotate(text, (step, val_loss[step]), (x, y), va="center", bbox=box, arrowprops=arrow, **font)


plt.style.use(FOLDER.parent.parent / "plumbing" / "notebook.mplstyle")
figure, ax = plt.subplots(figsize=(8.6, 3.6), dpi=110)
ax.plot(*read_losses("train"), color=BLUE, linewidth=0.7, alpha=0.45, label="training loss")
steps, values = read_losses("val")
marks = dict(color=BLUE, markersize=4.5, mfc="white")
ax.plot(steps[:1], values[:1], "o", **marks)  # a line from here to the next one would not be the curve
ax.plot(steps[1:], values[1:], "o-", **marks, label=f"validation loss, last {values[-1]:.2f}")
draw_boxes(ax, dict(zip(steps, values)), read_samples())
ax.set(xlabel="step (2,048 bytes each)", ylabel="loss (nats per byte)", ylim=(1.2, 6), xlim=(-15, 1015))
ax.set_title("A GPT with 0.85M parameters on 1.1 MB of Shakespeare: 1.8 minutes on two cores")
ax.legend(loc="upper right")
figure.savefig(FOLDER / "curve.png")
