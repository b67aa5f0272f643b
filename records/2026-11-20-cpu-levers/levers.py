"""Each lever of the CPU's speed with and without, in turn in one process, and whether the result stays the same.

    python records/2026-11-20-cpu-levers/levers.py --hellaswag hellaswag_val.jsonl --input 'docs/*.parquet' > levers.txt
"""

import argparse
import contextlib
import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import bench  # before torch

import numpy as np
import torch
import torch.nn.functional as F

import fineweb
import hellaswag
import tokenizer
import train_gpt2 as t

parser = argparse.ArgumentParser()
parser.add_argument("--hellaswag", required=True)
parser.add_argument("--input", required=True)
parser.add_argument("--rounds", type=int, default=9)
flags = parser.parse_args()
torch.set_num_threads(1)


def compare(lever, with_it, without, rounds=flags.rounds, same=None):
    """A line of the table: the median over the rounds of without / with."""
    with contextlib.redirect_stdout(sys.stderr):
        measured = bench.alternate({"with": with_it, "without": without}, rounds, "cpu")
    seconds = {name: run["seconds"] for name, run in measured.items()}
    ratios = [b / a for a, b in zip(seconds["with"], seconds["without"])]
    medians = [statistics.median(each) for each in seconds.values()]
    results = [run["result"] for run in measured.values()]
    difference = "" if same is None else same(*results)
    print(f"{lever:58}{medians[1]:10.4f}{medians[0]:10.4f}{statistics.median(ratios):8.2f}"
          f"  ({min(ratios):.2f} to {max(ratios):.2f})  {difference}", flush=True)  # fmt: skip


def losses(a, b):
    return "the same loss, bit for bit" if a == b else f"losses differ by {abs(a - b):.1e}"


def ours(folder, **changes):
    """Steps of preset quickstart's shape with AdamW; every side reads the same windows."""
    config = dataclasses.replace(t.PRESETS["quickstart"], **{"vocab_size": 320, "optimizer": "adamw"} | changes)
    bench.random_shards(folder, config)
    return bench.Ours(config, folder, bench.alone(config, "cpu"), 3)


print(f"{'lever':58}{'without s':>10}{'with s':>10}{'ratio':>8}")
with tempfile.TemporaryDirectory() as folder:
    # the optimizer
    plain = ours(folder)
    plain.optimizers = [torch.optim.AdamW(plain.raw_model.parameters(), lr=plain.config.max_lr, betas=(0.9, 0.95))]
    for group in plain.optimizers[0].param_groups:
        group |= {"peak_lr": plain.config.max_lr, "weight_decay": 0.1}
    compare("fused AdamW (without: torch's loop)", ours(folder), plain)

    batched, single = ours(folder, optimizer="muon"), ours(folder, optimizer="muon")
    single.optimizers = t.configure_optimizers(single.raw_model, single.config, "cpu")
    muon = [p for group in single.optimizers[0].param_groups for p in group["params"]]
    loop = torch.optim.Muon(muon, lr=0.04, momentum=0.95, weight_decay=0.01)
    loop.param_groups[0]["peak_lr"] = 0.04
    single.optimizers[0] = loop
    compare("Muon in batches, float32 (without: torch.optim.Muon)", batched, single)

    # the loader
    ahead, inline = ours(folder), ours(folder)

    class Now:
        """An executor that does the work when its result is wanted."""

        def submit(self, function, *args):
            self.result = lambda: function(*args)
            return dataclasses.make_dataclass("Task", ["result"])(self.result)

    inline.loader.reader = Now()
    compare("the next batch read by a thread", ahead, inline, same=losses)

    compare("B 16 (without: 4, and accumulation)", ours(folder), ours(folder, batch_size=4), same=losses)
    compare("bfloat16 at this width (not the default)", ours(folder, dtype="bfloat16"), ours(folder), same=losses)

    # a wide model: what --dtype auto means by "where matrices are large"
    wide = dict(n_layer=2, n_head=12, n_embd=768, block_size=1024, sequence_length=1024, batch_size=1,
                total_batch_size=1024)  # fmt: skip
    auto, full = ours(folder, **wide), ours(folder, **wide, dtype="float32")
    auto.steps = full.steps = 1
    compare("bfloat16 at 768 channels, T 1024, 2 layers (auto)", auto, full, 3, losses)

# OpenMP: two threads on a machine that is busy with something else, too
step = [sys.executable, str(Path(bench.__file__)), "train", "--rounds", "5", "--steps", "2", "--dtype", "float32"]


def with_policy(policy):
    def run():
        environment = os.environ | {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": policy}
        if policy == "ACTIVE":
            environment["GOMP_SPINCOUNT"] = "infinity"
        output = subprocess.run(step, env=environment, capture_output=True, text=True, check=True).stdout
        line = next(line for line in output.splitlines() if line.startswith("train_gpt2 "))
        return float(line.split()[2])  # the median step, without the start of a process

    return run


busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
try:
    passive, active = [], []
    for _ in range(2):
        passive.append(with_policy("PASSIVE")())
        active.append(with_policy("ACTIVE")())
finally:
    for process in busy:
        process.kill()
passive, active = statistics.median(passive), statistics.median(active)
lever = "OMP_WAIT_POLICY=PASSIVE, 2 threads beside 2 busy processes"
print(f"{lever:58}{active:10.4f}{passive:10.4f}{active / passive:8.2f}", flush=True)

# HellaSwag, 124M
torch.manual_seed(0)
model, enc = t.GPT(t.GPTConfig()).eval(), tokenizer.get_encoding("gpt2")
lines = [line for _, line in zip(range(32), hellaswag.iterate_examples(flags.hellaswag))]
examples = [hellaswag.render_example(line, enc) for line in lines]


@torch.no_grad()
def rows_of_their_own(examples, packed=True, in_order=False, all_logits=False):
    """hellaswag.score with a lever taken back: a row per ending, file order, or logits at every position."""
    rows = [(context, [ending]) for context, endings, *_ in examples for ending in endings]
    rows = [(context, endings) for context, endings, *_ in examples] if packed else rows
    sizes = np.array([len(context) + sum(len(ending) - 1 for ending in endings) for context, endings in rows])
    order = np.arange(len(rows)) if in_order else np.argsort(-sizes, kind="stable")
    scores, done = {}, 0
    while done < len(rows):
        chosen = order[done : done + max(1, 2**11 // int(sizes[order[done]]))]
        L = -(-int(sizes[chosen].max()) // 16) * 16
        idx, pos, attn_mask, places, targets = hellaswag.pack([rows[i] for i in chosen], L)
        hidden = model.hidden_states(idx, pos, attn_mask).flatten(0, 1)
        logits = model.lm_head(hidden)[places] if all_logits else model.lm_head(hidden[places])
        each = -F.cross_entropy(logits[:, : enc.n_vocab].float(), targets, reduction="none")
        lengths = [len(ending) for i in chosen for ending in rows[i][1]]
        for i, part in zip(np.repeat(chosen, len(rows[0][1])), each.split(lengths)):
            scores.setdefault(i, []).append(part.sum().item())
        done += len(chosen)
    total = np.array([scores[i] for i in range(len(rows))]).reshape(-1, 4)
    return total.argmax(1)


def choices(a, b):
    return f"{(a == b).sum()} of {len(a)} choices equal"


def predict():
    return hellaswag.predict(model, examples, enc.n_vocab)[:, 0]


few = 3
compare("HellaSwag: endings share their context", predict, lambda: rows_of_their_own(examples, False), few, choices)
compare("HellaSwag: sorted by length", predict, lambda: rows_of_their_own(examples, in_order=True), few, choices)
compare("HellaSwag: logits where an ending is predicted", predict, lambda: rows_of_their_own(examples, all_logits=True),
        few, choices)  # fmt: skip

# data preparation
numbers = iter(range(10**6))
with tempfile.TemporaryDirectory() as folder:

    def prepare(num_proc):
        with contextlib.redirect_stdout(None), contextlib.redirect_stderr(open(os.devnull, "w")):
            out_dir = f"{folder}/{next(numbers)}"
            fineweb.prepare(fineweb.Options(input=(flags.input,), out_dir=out_dir, num_proc=num_proc))
        return b"".join(path.read_bytes() for path in sorted(Path(out_dir).glob("*.npy")))

    def files(a, b):
        return "the same bytes" if a == b else "OTHER BYTES"

    compare("data: tokenizing on both cores", lambda: prepare(2), lambda: prepare(1), 3, files)

# start-up
root = Path(bench.__file__).parent
for script in ("train_gpt2", "fineweb", "hellaswag", "tokenizer", "sample", "smoltalk", "bench", "bench_gpu"):

    def start(*command):
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL, cwd=root)

    eager = f"import transformers, datasets, matplotlib.pyplot; import {script}"
    compare(f"start-up: {script}.py --help (without: all imports on top)", lambda: start(f"{script}.py", "--help"),
            lambda: start("-c", eager), 3)  # fmt: skip
