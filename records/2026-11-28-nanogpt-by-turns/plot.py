"""Draw turns.png, and print both programs' losses and the ratio of their times, with 95% intervals over the seeds.

python records/2026-11-28-nanogpt-by-turns/plot.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

FOLDER = Path(__file__).parent
T_975 = 2.262  # of Student's t distribution with 9 degrees of freedom: ten seeds
BLUE, ORANGE, GRAY = "#1f4e79", "#d9792b", "#8a929c"


def read(side):
    """An array (3, seeds): losses, seconds by the clock, seconds by the processor."""
    rows = [line.split() for line in (FOLDER / "turns.txt").read_text().splitlines()]
    found = {int(seed): [*map(float, values)] for seed, name, *values in rows if name == side}
    return np.array([found[seed] for seed in sorted(found)]).T


def interval(values):
    """(mean, half of its 95% interval)"""
    return values.mean(), T_975 * values.std(ddof=1) / len(values) ** 0.5


def ratio(theirs, ours):
    """(geometric mean, lower and upper end of its 95% interval) of the paired ratios"""
    mean, half = interval(np.log(theirs / ours))
    return np.exp([mean, mean - half, mean + half])


theirs, ours = read("nanoGPT"), read("ours")
for side, values in (("nanoGPT", theirs), ("ours", ours)):
    mean, half = interval(values[0])
    print(f"{side}: loss {mean:.4f} +- {half:.4f}, {values[0].min():.4f} to {values[0].max():.4f}; "
          f"{values[2].mean():.0f} s of the processor, {values[1].mean():.0f} s by the clock")  # fmt: skip
print(f"loss, nanoGPT's minus ours: {interval(theirs[0] - ours[0])}, lowest {(theirs[0] - ours[0]).min():.4f}")
print("time by the processor: {:.2f} [{:.2f}, {:.2f}]".format(*ratio(theirs[2], ours[2])))
print("time by the clock: {:.2f} [{:.2f}, {:.2f}]".format(*ratio(theirs[1], ours[1])))

plt.style.use(FOLDER.parents[1] / "plumbing" / "notebook.mplstyle")
figure, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.6), dpi=110, width_ratios=[1.7, 1])
for one, other in zip(theirs.T, ours.T):
    left.plot([one[2], other[2]], [one[0], other[0]], color=GRAY, linewidth=0.6)
left.plot(theirs[2], theirs[0], "o", color=ORANGE, label="nanoGPT, 2,000 steps")
left.plot(ours[2], ours[0], "o", color=BLUE, label="train_gpt2, 520 steps")
left.set(xlim=(0, None), xlabel="time of the whole program (seconds of the processor)")
left.set(ylabel="loss on the validation split", title="nanoGPT's quick start, ten seeds by turns")
left.legend(loc="upper left")
ratios = theirs[2] / ours[2]
mean, low, high = ratio(theirs[2], ours[2])
right.axhspan(low, high, color=BLUE, alpha=0.15, linewidth=0)
right.axhline(mean, color=BLUE)
right.plot(range(1, len(ratios) + 1), ratios, "o", color=BLUE, mfc="white")
right.set(xlabel="seed", ylabel="nanoGPT's time / ours", ylim=(1, None))
right.set_title(f"{mean:.2f} times, 95%: {low:.2f} to {high:.2f}")
figure.savefig(FOLDER / "turns.png")
