"""Draw curve.png: the run's losses, and what the model wrote along the way.

    python records/2026-11-21-own-text/plot.py
"""

import ast
import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FOLDER = Path(__file__).parent
INK, BLUE, ORANGE, PALE = "#22272e", "#1f4e79", "#d9792b", "#dde3e9"
SHOWN = {0: 0, 200: 0, 400: 0, 1000: 1}  # step: which of its four samples

losses = {"train": ([], []), "val": ([], [])}
for line in (FOLDER / "log.txt").read_text().splitlines():
    step, stream, value = line.split()
    if stream in losses:
        losses[stream][0].append(int(step))
        losses[stream][1].append(float(value))
samples = {}
for line in (FOLDER / "console.txt").read_text(errors="replace").splitlines():
    match = re.match(r"step +(\d+) \| sample \| (.*)", line)
    if match:
        samples.setdefault(int(match[1]), []).append(ast.literal_eval(match[2]))

plt.rcParams.update({"font.size": 9.5, "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK})
figure, ax = plt.subplots(figsize=(8.6, 4.4), dpi=110, constrained_layout=True)
ax.plot(*losses["train"], color=BLUE, linewidth=0.7, alpha=0.45, label="training loss")
ax.plot(*losses["val"], "o-", color=BLUE, markersize=4.5, mfc="white", label=f"validation loss, last {losses['val'][1][-1]:.2f}")
for (step, which), x, y in zip(SHOWN.items(), (40, 190, 415, 625), (5.45, 4.55, 3.6, 2.45)):
    text = samples[step][which].rstrip()
    text = "".join(c if c.isascii() and c.isprintable() or c == "\n" else "\u00b7" for c in text)
    if step == 0:
        text = text[:30]
    loss = losses["val"][1][losses["val"][0].index(step)]
    ax.annotate(text, (step, loss), (x, y), va="center", family="monospace", fontsize=8.5, linespacing=1.25,
                bbox=dict(boxstyle="round,pad=0.5", facecolor="white", edgecolor=ORANGE, linewidth=0.9),
                arrowprops=dict(arrowstyle="-", color=ORANGE, linewidth=0.9, relpos=(0.0 if step < 1000 else 0.95, 0.5)))
ax.set(xlabel="step (2,048 bytes each)", ylabel="loss (nats per byte)", ylim=(1.2, 6), xlim=(-15, 1015),
       title="A GPT of 0.85M parameters on 1.1 MB of Shakespeare: 2.4 minutes on two cores")
ax.title.set_fontsize(10.5)
ax.spines[["top", "right"]].set_visible(False)
ax.grid(color=PALE, linewidth=0.7)
ax.set_axisbelow(True)
ax.legend(loc="upper right", frameon=False)
figure.savefig(FOLDER / "curve.png")
