"""What each lever gains, paired by seed: writes levers.md and levers.png from the runs in logs/.

    python records/2026-11-24-speedrun-levers/levers.py

A difference is a lever's validation loss minus that of "base" with the same seed, size and steps; its 95% interval is
Student's, over the seeds. "in tokens" converts it by the slope of base's loss between its two lengths: how many of base's
tokens the lever saves, if that is little. The share of tokens is the number of steps in which a recipe ends at AdamW's loss,
divided by AdamW's steps, on the line through the two lengths in log steps.
"""

import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from sweep import LOGS, SIZES  # noqa: E402

LENGTHS = (280, 1120)
ADAMW = {280: 800, 1120: 3200}  # the steps of AdamW that a length is compared with
T_975 = [12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31]  # Student's t with 1, 2, ... degrees of freedom


def read_runs(stream="val"):
    """{(size, levers, steps): {seed: loss}}"""
    runs = {}
    for path in sorted(LOGS.glob("*/*/*/*.txt")):
        size, levers, steps, seed = path.relative_to(LOGS).with_suffix("").parts
        lines = [line.split() for line in path.read_text().splitlines()]
        values = {name: float(value) for _, name, value in lines if name != "train"}
        runs.setdefault((size, levers, int(steps)), {})[int(seed)] = values[stream]
    return runs


def interval(differences):
    """(mean, half of the 95% interval); infinite for one seed."""
    d = np.array(differences)
    half = T_975[len(d) - 2] * d.std(ddof=1) / len(d) ** 0.5 if len(d) > 1 else np.inf
    return d.mean(), half


def paired(runs, size, levers, steps, base="base"):
    """Differences to `base` by seed."""
    ours, theirs = runs.get((size, levers, steps), {}), runs.get((size, base, steps), {})
    return [ours[seed] - theirs[seed] for seed in sorted(ours) if seed in theirs]


def slope(runs, size, levers="base"):
    """The loss per factor e of steps, from the seeds that have both lengths."""
    short, long = (runs.get((size, levers, steps), {}) for steps in LENGTHS)
    both = short.keys() & long.keys()
    if not both:
        return np.nan  # then nothing can be said in tokens
    return np.mean([long[seed] - short[seed] for seed in both]) / np.log(LENGTHS[1] / LENGTHS[0])


def best_adamw(runs, size, steps):
    """(levers, {seed: loss}) of the rate with the lowest loss of seed 1."""
    found = {key[1]: losses for key, losses in runs.items() if key[0] == size and key[2] == steps and "adamw" in key[1]}
    return min(found.items(), key=lambda item: item[1].get(1, np.inf), default=(None, {}))


def share(runs, size, levers, steps):
    """[share of AdamW's tokens] by seed."""
    _, adamw = best_adamw(runs, size, ADAMW[steps])
    ours, per_e = runs.get((size, levers, steps), {}), slope(runs, size)
    return [np.exp((adamw[s] - ours[s]) / per_e) * steps / ADAMW[steps] for s in sorted(ours) if s in adamw]


def cell(runs, size, levers, steps):
    differences = paired(runs, size, levers, steps)
    if not differences:
        return ""
    mean, half = interval(differences)
    sure, per_e = "**" if abs(mean) > half else "", slope(runs, size)
    text = f"{sure}{mean:+.4f} ± {half:.4f}{sure}" if half < np.inf else f"{mean:+.4f} (one seed)"
    return text if np.isnan(per_e) else f"{text} ({np.expm1(mean / -per_e):+.1%})"


def draw(runs, cells, levers):
    """The differences and their intervals, a panel for each size and length; levers that were run at both lengths."""
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(1, len(cells), figsize=(11, 0.27 * len(levers) + 1.1), sharey=True, layout="constrained")
    for ax, (size, steps) in zip(axes, cells):
        ax.axvline(0, color="#999999", linewidth=1)
        for y, each in enumerate(levers):
            differences = paired(runs, size, each, steps)
            if len(differences) > 1:
                mean, half = interval(differences)
                color = "#888888" if abs(mean) <= half else "#1f77b4" if mean < 0 else "#d62728"
                ax.errorbar(mean, y, xerr=half, fmt="o", color=color, markersize=4, capsize=2, linewidth=1.2)
        ax.set(title=f"{size}, {steps} steps", xlim=(-0.1, 0.11))
        ax.grid(axis="x", alpha=0.25)
    axes[0].set_yticks(range(len(levers)), levers)
    axes[0].invert_yaxis()
    figure.supxlabel("validation loss minus that of the preset's recipe, nats per byte; 95% intervals", fontsize=9)
    figure.savefig(HERE / "levers.png", dpi=110)


def main():
    runs = read_runs()
    levers = sorted({key[1] for key in runs if "adamw" not in key[1]} - {"base"})
    cells = [(size, steps) for size in SIZES for steps in LENGTHS]
    size, steps = cells[0]  # whose column the rows are sorted by
    by_difference = sorted(levers, key=lambda each: interval(paired(runs, size, each, steps) or [0, 0])[0])
    lines = ["| lever | " + " | ".join(f"{size}, {steps} steps" for size, steps in cells) + " |"]
    lines.append("|---" * (len(cells) + 1) + "|")
    means = [runs.get((size, "base", steps), {}).values() for size, steps in cells]
    lines.append("| base: loss | " + " | ".join(f"{np.mean(list(m)):.4f}" if m else "" for m in means) + " |")
    for each in by_difference:
        lines.append(f"| {each} | " + " | ".join(cell(runs, size, each, steps) for size, steps in cells) + " |")
    lines += ["", "| share of AdamW's tokens | " + " | ".join(f"{s}, {n} steps" for s, n in cells) + " |"]
    lines.append("|---" * (len(cells) + 1) + "|")
    for each in ["base", *levers]:
        shares = [share(runs, size, each, steps) for size, steps in cells]
        if any(shares):
            texts = [f"{np.mean(s):.1%} (seeds {min(s):.1%} to {max(s):.1%})" if s else "" for s in shares]
            lines.append(f"| {each} | " + " | ".join(texts) + " |")
    lines += ["", "AdamW's rates, seed 1:"]
    for size in SIZES:
        for steps in ADAMW.values():
            rates = {key[1].split("lr=")[1]: v for key, v in runs.items() if key[0] == size and key[2] == steps}
            rates = {rate: v for rate, v in rates.items() if rate and 1 in v}
            if rates:
                lines.append(f"- {size}, {steps} steps: " + ", ".join(f"{r} {rates[r][1]:.4f}" for r in sorted(rates)))
    draw(runs, cells, [each for each in by_difference if paired(runs, "0.4M", each, 1120)])
    text = "\n".join(lines) + "\n"
    (HERE / "levers.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
