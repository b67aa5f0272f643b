"""How far a validation loss on some of the split's windows is from that on all of them: for two models, and their difference.

    nice python records/2026-11-24-scaling-law/noise.py CHECKPOINT CHECKPOINT [WINDOWS]

It takes the first WINDOWS (default 8192) of the order in which training validates, which is a random one, so that the
standard error for n windows is the deviation of one over the square root of n, less the share of the split that is seen.
"""

import sys

import numpy as np
import torch
from torch.nn import functional as F

sys.path.insert(0, ".")
from train_gpt2 import DataLoaderLite, load_model

B, T = 64, 128


def losses_of(name, count):
    """The mean loss of each of the first `count` windows of validation."""
    model, _ = load_model(name)
    model.eval()
    loader = DataLoaderLite("log/law/tokens", "val", B, T, shuffle=True)
    found = []
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for _ in range(count // B):
            x, y = loader.next_batch()
            logits = model(x)[0][..., :257].float()
            found.append(F.cross_entropy(logits.transpose(1, 2), y, reduction="none").mean(1))
    return torch.cat(found).numpy(), loader.num_windows


def main():
    count = int(sys.argv[3]) if len(sys.argv) > 3 else 8192
    (a, total), (b, _) = (losses_of(name, count) for name in sys.argv[1:3])
    print(f"{count} of {total} windows of {T} tokens: mean losses {a.mean():.4f} and {b.mean():.4f}")
    for tokens in (2**15, 2**17, 2**19, 2**20, 2**21, 2**22, total * T):
        n = tokens // T
        error = np.sqrt(max(0, 1 - n / total) / n)
        print(f"{tokens:10,} tokens: standard error of a loss {a.std() * error:.4f}, of the difference {(a - b).std() * error:.4f}")


if __name__ == "__main__":
    main()
