"""Draw ladder.png from ladder.json: tokens per second of each rung, by the median processor time of its rounds.

python records/2026-11-23-cpu-bench/plot.py
"""

import json
from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FOLDER = Path(__file__).resolve().parent
LECTURE, OURS = "#1f4e79", "#d9792b"

plt.style.use(FOLDER.parents[1] / "plumbing" / "notebook.mplstyle")
measured = json.loads((FOLDER / "ladder.json").read_text(encoding="utf-8"))
tokens = measured["settings"]["total_batch_size"]
speeds = {name: tokens / median(side["cpu_seconds"]) for name, side in measured["sides"].items()}

figure, ax = plt.subplots(figsize=(8.6, 3.4), dpi=110)
for place, (name, speed) in enumerate(speeds.items()):
    is_ours = name == "this program"
    color = OURS if is_ours else LECTURE
    label = {0: "the lecture's steps", len(speeds) - 1: "this program's own"}.get(place)
    ax.barh(-place, speed, 0.66, color=color, label=label)
    ax.text(speed, -place, f"  {speed:.0f}, {speed / speeds['float32']:.2f}x", va="center")
ax.set_yticks(range(0, -len(speeds), -1), speeds)
ax.set(xlabel="tokens per second of processor time", ylabel="optimization, on top of those above", xlim=(0, 790))
ax.set_title("Training on one core of an AMD EPYC: speed, and gain over float32")
ax.grid(False, axis="y")
ax.tick_params(axis="y", length=0)
ax.legend(loc="upper right")
figure.savefig(FOLDER / "ladder.png")
