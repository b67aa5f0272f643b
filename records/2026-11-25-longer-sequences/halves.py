"""The loss in the first and in the second half of windows of 256, before and after the training that run.sh does.

`parent` reads the second halves as windows of their own, which is what a model does that has 128 positions.
"""

import sys
from pathlib import Path

import torch
from torch.nn import functional as F

sys.path.append(str(Path(__file__).resolve().parents[2]))

from train_gpt2 import DataLoaderLite, load_model

WINDOWS, SEEDS, WAYS = 32, (1, 2, 3), ("last", "mean", "linear", "tile")


@torch.no_grad()
def halves(source, x, y):
    """(loss in the first 128 positions, in the others)."""
    model, _ = load_model(source)
    T = model.config.block_size
    losses = [
        F.cross_entropy(model(idx)[0].flatten(0, 1), targets.flatten(), reduction="none")
        for idx, targets in zip(x.view(-1, T).split(16), y.view(-1, T).split(16))
    ]
    first, second = torch.cat(losses).view(len(x), 2, -1).mean((0, 2)).tolist()
    return f"{first:.4f} {second:.4f}"


def main():
    x, y = DataLoaderLite("python_docs", "val", WINDOWS, 256, shuffle=True).next_batch()
    print("# model, loss in the first half, in the second", flush=True)
    print("parent", halves("log/constant", x, y), flush=True)
    for way in WAYS:
        print(f"{way} step 0", halves(f"log/extended/{way}", x, y), flush=True)
    for seed in SEEDS:
        for way in WAYS:
            print(f"{way}-{seed} end", halves(f"log/{way}-{seed}", x, y), flush=True)


if __name__ == "__main__":
    main()
