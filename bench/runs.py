"""Whole runs, in processes of their own: how fast one starts, and nanoGPT's quick start on tiny Shakespeare."""

import functools
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from bench.measure import measure, run_program, timed
from bench.steps import as_flags, check_peer
from plumbing.journal import read_log
from plumbing.program import ROOT

TRAINER = str(ROOT / "train_gpt2.py")


def start(options):
    """The first update of the quick start, and answers that need no torch, beside a process that imports torch."""
    with tempfile.TemporaryDirectory() as folder:

        def first_update():
            out_dir = tempfile.mkdtemp(dir=folder)
            flags = as_flags(f"preset=quickstart,device={options.device},val_every=0,out_dir={out_dir}")
            command, pipe = [sys.executable, TRAINER, *flags], subprocess.PIPE
            with subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True) as process:
                is_there = any("| loss" in line for line in process.stdout or [])
                process.kill()
                if not is_there:
                    raise RuntimeError(f"The quick start made no update: {process.communicate()[1]}")

        def answer(*arguments):
            subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True)

        sides = {
            "first update": first_update,
            "import torch": lambda: answer("-c", "import torch"),
            "--help": lambda: answer(TRAINER, "--help"),
            "a mistyped flag": lambda: answer(TRAINER, "--max-stesp", "5"),
        }
        # the warm-up makes the quick start's shards
        return measure(sides, options.rounds, dict.fromkeys(sides, 1), "runs", ours="import torch")[0]


# the command for a CPU in nanoGPT's README
NANOGPT_FLAGS = (
    "config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 "
    "--batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"
)
# the same shape and batch, with the quick start's optimizer, in about a quarter of the steps
OUR_FLAGS = (
    "--preset quickstart --device cpu --block-size 64 --sequence-length 64 --batch-size 12 --total-batch-size 768 "
    "--max-steps 520 --warmup-steps 30 --schedule cosine --min-lr 4e-5 --val-every 520 --val-tokens 111488 "
    "--sample-every 0"
)


def shakespeare(options):
    """nanoGPT's own program and the trainer, one after the other, on the split of nanoGPT: its last tenth is unseen."""
    check_peer(options.peer, "train.py")
    text = Path(options.text).read_bytes()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "meta.json").write_text(json.dumps({"tokenizer": "bytes"}), encoding="utf-8")
        ids, cut = np.frombuffer(text, np.uint8).astype(np.uint16), len(text) * 9 // 10
        for split, part in (("train_000001", ids[:cut]), ("val_000000", ids[cut:])):
            np.save(folder / f"shakespeare_{split}.npy", part)
        shutil.copytree(options.peer, folder / "nanoGPT")
        data = folder / "nanoGPT" / "data" / "shakespeare_char"
        (data / "input.txt").write_bytes(text)  # or its script would download it

        run = functools.partial(run_program, log=folder / "programs.txt")

        def ours():
            flags = [*OUR_FLAGS.split(), *as_flags(options.settings)]
            run(TRAINER, *flags, "--data", temporary, "--out-dir", f"{temporary}/run", cwd=folder)
            return [value for _, stream, value in read_log(folder / "run" / "log.txt") if stream == "val"]

        def theirs():
            text = run("train.py", *NANOGPT_FLAGS.split(), cwd=folder / "nanoGPT")
            return list(map(float, re.findall(r"val loss ([\d.]+)", text)))

        run("prepare.py", cwd=data)
        sides = {}
        for name, side in {"train_gpt2": ours, "nanoGPT": theirs}.items():
            seconds, cpu_seconds, losses = timed(side)
            sides[name] = {"seconds": seconds, "cpu_seconds": cpu_seconds, "val_losses": losses}
            result = f"{name:12} validation loss {losses[-1]:.4f}"
            print(f"{result} {seconds:8.1f} s {cpu_seconds:8.1f} s of CPU", flush=True)
    ratio = sides["nanoGPT"]["seconds"] / sides["train_gpt2"]["seconds"]
    print(f"nanoGPT takes {ratio:.2f} times as long.")
    return {"ratio": ratio, "sides": sides}
