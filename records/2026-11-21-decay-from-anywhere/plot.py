"""curves.png from the logs, and the table of end losses: the branches on the left, every run's end on the right."""

from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
TOKENS = 1024  # per step
BRANCHES = {400: ("#1f77b4", 500), 600: ("#2ca02c", 750), 800: ("#d62728", 1000)}  # step: colour, length
SCRATCH = {
    "decay-20%": ("from scratch, decay over the last 20%", "o", "#555555"),
    "decay-70%": ("from scratch, decay over the last 70%", "^", "#9467bd"),
    "cosine": ("from scratch, cosine to 0", "s", "#e6a000"),
}


def val_losses(folder):
    """{step: validation loss} of a run."""
    lines = (line.split() for line in (HERE / folder / "log.txt").read_text().splitlines())
    return {int(step): float(value) for step, stream, value in lines if stream == "val"}


def scratch_ends(schedule):
    """{length: {seed: last validation loss}} of the runs from scratch that are there."""
    ends = {}
    for folder in sorted((HERE / "scratch").glob(f"{schedule}-*")):
        steps, _, seed = folder.name.removeprefix(f"{schedule}-").split("-")
        ends.setdefault(int(steps), {})[int(seed)] = val_losses(folder)[int(steps)]
    return dict(sorted(ends.items()))


def draw_branches(ax):
    constant = val_losses("constant")
    ax.plot([s * TOKENS / 1e6 for s in constant], list(constant.values()), color="#999999", label="constant rate")
    for step, (color, length) in BRANCHES.items():
        losses = {s: loss for s, loss in val_losses(f"decay-from-{step}").items() if s >= step}
        x = [s * TOKENS / 1e6 for s in losses]
        label = f"branched at {step}: {losses[length]:.4f} after {length} steps"
        ax.plot(x, list(losses.values()), color=color, linewidth=2, label=label)
        ax.plot(x[0], losses[step], "D", color=color, mfc="white", markersize=7, zorder=5)
        ax.plot(x[-1], losses[length], "o", color=color, markersize=5, zorder=5)
    ax.set(title="One run, decayed from three of its checkpoints", ylim=(2.0, 3.0), xlim=(0.1, 1.06))


def draw_ends(ax):
    ends = [(length * TOKENS / 1e6, val_losses(f"decay-from-{step}")[length]) for step, (_, length) in BRANCHES.items()]
    ax.plot(*zip(*ends), "-", color="#bbbbbb", zorder=1)
    for (x, loss), (color, _) in zip(ends, BRANCHES.values()):
        ax.plot(x, loss, "D", color=color, mfc="white", mew=2, markersize=11, zorder=2)
    ax.plot([], [], "D", color="#777777", mfc="white", mew=2, markersize=9, label="the branches")
    for schedule, (label, marker, color) in SCRATCH.items():
        points = [(length * TOKENS / 1e6, loss) for length, seeds in scratch_ends(schedule).items() for loss in seeds.values()]
        if points:
            ax.plot(*zip(*points), marker, color=color, markersize=5, label=label, zorder=3)
    ax.set(title="Where runs of these lengths end", xticks=[length * TOKENS / 1e6 for _, length in BRANCHES.values()])
    ax.margins(x=0.12)


def print_table():
    for step, (_, length) in BRANCHES.items():
        print(f"branched at {step}, {length} steps: {val_losses(f'decay-from-{step}')[length]:.4f}")
    for schedule in SCRATCH:
        for length, seeds in scratch_ends(schedule).items():
            print(f"{schedule}, {length} steps: " + ", ".join(f"{loss:.4f} (seed {seed})" for seed, loss in seeds.items()))


def main():
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.3), layout="constrained", width_ratios=[1.35, 1])
    draw_branches(left)
    draw_ends(right)
    for ax in (left, right):
        ax.set(xlabel="training tokens (millions)", ylabel="validation loss (nats per byte)")
        ax.grid(alpha=0.25)
        ax.legend(frameon=False, fontsize=9)
    figure.savefig(HERE / "curves.png", dpi=110)
    print_table()


if __name__ == "__main__":
    main()
