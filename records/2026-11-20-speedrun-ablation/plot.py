"""curves.png from the logs: validation loss against training tokens, tuning text and held-out text side by side."""

from pathlib import Path

import matplotlib.pyplot as plt

from ablation import val_losses

HERE = Path(__file__).parent
STYLE = HERE.parent.parent / "plumbing" / "notebook.mplstyle"
COLORS = {"adamw": "#8a929c", "muon": "#1f4e79", "best": "#d9792b"}
PANELS = [
    ("tune", "tuning: technical documents", "1337", [
        ("adamw-cosine-0.004", "AdamW, cosine (gpt2's recipe, best of 3 rates)", "adamw", "-"),
        ("short-adamw-wsd-0.004", "AdamW, wsd, 40% of the tokens", "adamw", ":"),
        ("short-muon-cosine-0.04", "Muon, cosine", "muon", ":"),
        ("short-muon-wsd-0.04", "Muon, wsd", "muon", "-"),
        ("best-320", "Muon, wsd, rates tuned (speedrun): 40%", "best", "-"),
        ("best-240", "the same with 30%", "best", "--"),
    ]),
    ("heldout", "held out: Shakespeare, other seed", "1", [
        ("adamw-cosine-0.004", "AdamW, cosine", "adamw", "-"),
        ("best-320", "speedrun: 40%", "best", "-"),
        ("best-240", "speedrun: 30%", "best", "--"),
    ]),
]  # fmt: skip


def main():
    plt.style.use(STYLE)
    figure, axes = plt.subplots(1, 2, figsize=(8.6, 3.8))
    for ax, (folder, title, seed, lines) in zip(axes, PANELS):
        for name, label, color, style in lines:
            losses = val_losses(HERE / folder / f"{name}-seed{seed}.txt")
            ax.plot([2048 * step / 1e6 for step in losses], list(losses.values()), style, color=COLORS[color], label=label)
        target = list(val_losses(HERE / folder / f"adamw-cosine-0.004-seed{seed}.txt").values())[-1]
        ax.axhline(target, color=COLORS["adamw"], linewidth=0.8, alpha=0.6)
        ax.set(title=title, xlabel="training tokens (millions)", ylabel="validation loss (nats per byte)", ylim=(1.7, 4.3))
        ax.legend(fontsize=8.5, handlelength=1.6)
    figure.savefig(HERE / "curves.png", dpi=110)


if __name__ == "__main__":
    main()
