"""A run's checkpoint with twice as many position embeddings: python extend.py RUN WAY OUT.

last    each new row is the last of the old ones
mean    each is their mean
linear  all rows are interpolated, so that the old ones lie twice as far apart
tile    the old rows come again
"""

import sys
from pathlib import Path

import torch

POSITIONS = "transformer.wpe.weight"
WAYS = {
    "last": lambda old: torch.cat([old, old[-1:].expand_as(old)]),
    "mean": lambda old: torch.cat([old, old.mean(0).expand_as(old)]),
    "linear": lambda old: torch.nn.functional.interpolate(
        old.T[None], size=2 * len(old), mode="linear", align_corners=True
    )[0].T.contiguous(),
    "tile": lambda old: torch.cat([old, old]),
}

if __name__ == "__main__":
    run, way, out = sys.argv[1:]
    newest = max(Path(run).glob("model_[0-9]*.pt"))
    checkpoint = torch.load(newest, weights_only=True)
    checkpoint["model"][POSITIONS] = WAYS[way](checkpoint["model"][POSITIONS])
    checkpoint["config"]["block_size"] *= 2
    Path(out).mkdir(parents=True, exist_ok=True)
    torch.save(checkpoint, Path(out, newest.name))
