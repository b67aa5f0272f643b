"""Can the models of a constant run copy? The loss on the second half of windows whose halves are equal, milestone by milestone.

    nice python records/2026-11-24-scaling-law/copying.py log/law/runs/3x96-seed1/constant [...]

Twice the same 64 bytes: text of the validation split, and letters drawn at random, of which only a model that looks for what
followed the same bytes before can predict the second half (3.26 nats without that).
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

sys.path.insert(0, ".")
from train_gpt2 import load_model

text = np.load("log/law/tokens/tokens_val_000000.npy", mmap_mode="r")
rng = np.random.default_rng(0)
starts = rng.integers(0, len(text) - 64, 256)
halves = {
    "text": np.stack([text[start : start + 64] for start in starts]).astype(np.int64),
    "letters": rng.integers(ord("a"), ord("z") + 1, (256, 64)),
}
print("steps: loss of text the first and the second time; of letters the first and the second time")
for run in sys.argv[1:]:
    print(run)
    for path in sorted(Path(run).glob("model_?????.pt")):
        model, _ = load_model(str(path))
        found = []
        for half in halves.values():
            windows = torch.from_numpy(np.concatenate([half, half], 1))
            with torch.no_grad():
                logits = model(windows)[0][..., :257].float()
            losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), windows[:, 1:], reduction="none").mean(0)
            found += [losses[31:63].mean(), losses[95:].mean()]  # the later half of each time
        print(f"  {path.stem[6:]}: " + " ".join(f"{value:.3f}" for value in found))
