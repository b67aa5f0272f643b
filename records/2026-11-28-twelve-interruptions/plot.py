"""Draw interruptions.png, and print the largest difference to the undisturbed run in each part of the interrupted one.

python records/2026-11-28-twelve-interruptions/plot.py
"""

import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

FOLDER = Path(__file__).parent
BLUE, ORANGE, GRAY = "#1f4e79", "#d9792b", "#8a929c"
ZERO = 2e-8  # where a difference of 0 is drawn


def read(name):
    rows = [line.split() for line in (FOLDER / f"{name}.txt").read_text().splitlines()]
    return np.array([float(value) for _, stream, value in rows if stream == "train"])


plt.style.use(FOLDER.parents[1] / "plumbing" / "notebook.mplstyle")
undisturbed, other_B, interrupted = map(read, ("undisturbed", "undisturbed_B8", "interrupted"))
difference, of_B = abs(interrupted - undisturbed), abs(other_B - undisturbed)
parts = re.findall(
    r"^\d+; from step (\d+); (.*); (.*)", (FOLDER / "interruptions.txt").read_text(), re.MULTILINE
)
firsts = [int(first) for first, _, _ in parts]

figure, (top, bottom) = plt.subplots(2, figsize=(8.6, 5.8), dpi=110, sharex=True, height_ratios=[1, 1.1])
top.plot(interrupted, color=BLUE, linewidth=0.8)
bottom.plot(of_B.clip(ZERO), ".", color=GRAY, markersize=2, label="an undisturbed run with B = 8")
bottom.plot(difference.clip(ZERO), ".", color=ORANGE, markersize=3, label="the interrupted run")
for (first, layout, end), last in zip(parts, [*firsts[1:], len(difference)]):
    values = difference[int(first) : last]
    print(f"{first:>4} to {last:4}  {values.max():.1e}  {layout}; {end}")
    for ax in (top, bottom):
        ax.axvline(last, color=GRAY, linewidth=0.6)
    words = layout.replace(", ", ",\n")
    top.text((int(first) + last) / 2, 5.6, words, rotation=90, ha="center", va="top", fontsize=7.5)
print(f"undisturbed with B = 8: {of_B.max():.1e}, last 100 steps {of_B[-100:].max():.1e}")
top.set(ylabel="training loss (nats per byte)", title="One run of 1,500 steps, interrupted twelve times")
bottom.set(yscale="log", ylim=(1e-8, 3), xlabel="step", ylabel="difference to the undisturbed run")
bottom.set_yticks([ZERO, *10.0 ** np.arange(-7, 0)], ["0", *(f"$10^{{{power}}}$" for power in range(-7, 0))])
bottom.legend(loc="upper left", markerscale=4, ncols=2)
figure.savefig(FOLDER / "interruptions.png")
