"""nanoGPT's quick start for a CPU, and this program at the same shape on the same text: seeds by turns.

    export OMP_NUM_THREADS=1
    python records/2026-11-28-nanogpt-by-turns/turns.py NANOGPT tinyshakespeare.txt $(seq 10) > turns.txt

NANOGPT is a clone of https://github.com/karpathy/nanoGPT. A line of the output is a run: seed, side, loss on the whole
validation split, seconds by the clock and by the processor, from the start of the program to its end.
"""

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
T = 64
# the command in nanoGPT's README; a checkpoint is kept of the last evaluation, not of the best one
NANOGPT = (
    "train.py config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 --log_interval=1 "
    "--block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 "
    "--dropout=0.0 --always_save_checkpoint=True"
).split()
# its shape and its batch; a quarter of its steps
OURS = (
    "train_gpt2.py --preset quickstart --device cpu --block-size 64 --sequence-length 64 --batch-size 12 "
    "--total-batch-size 768 --max-steps 520 --warmup-steps 30 --schedule cosine --min-lr 4e-5 --val-every 520 "
    "--val-tokens 111488 --sample-every 0 --data shards"
).split()
SEED = "torch.manual_seed(1337 + seed_offset)"


def run(arguments, folder):
    """(seconds by the clock, seconds of the processor) of a program in a folder."""

    def processor():
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    clock, before = time.perf_counter(), processor()
    subprocess.run([sys.executable, *map(str, arguments)], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - clock, processor() - before


def prepare(clone, text, folder):
    """nanoGPT's data by its own script, and the same two parts of the text as shards of bytes."""
    shutil.copytree(clone, folder / "nanoGPT", ignore=shutil.ignore_patterns(".git"))
    shutil.copy(text, folder / "nanoGPT/data/shakespeare_char/input.txt")
    run(["data/shakespeare_char/prepare.py"], folder / "nanoGPT")
    ids = np.frombuffer(Path(text).read_bytes(), np.uint8).astype(np.uint16)
    cut = int(len(ids) * 0.9)  # as in prepare.py; the text is ASCII
    (folder / "shards").mkdir()
    (folder / "shards/meta.json").write_text('{"tokenizer": "bytes"}')
    np.save(folder / "shards/shakespeare_train_000001.npy", ids[:cut])
    np.save(folder / "shards/shakespeare_val_000000.npy", ids[cut:])


@torch.no_grad()
def loss_of_nanogpt(folder):
    """Its last checkpoint's loss on all windows of the validation split; its own log has a sample of 20 batches."""
    sys.path.insert(0, str(folder))
    from model import GPT, GPTConfig  # pyright: ignore: nanoGPT's

    saved = torch.load(folder / "out-shakespeare-char/ckpt.pt", weights_only=True)
    with contextlib.redirect_stdout(None):  # it prints its number of parameters
        model = GPT(GPTConfig(**saved["model_args"]))
    model.load_state_dict(saved["model"])
    ids = torch.from_numpy(np.fromfile(folder / "data/shakespeare_char/val.bin", np.uint16).astype(np.int64))
    windows = (len(ids) - 1) // T
    x, y = ids[: windows * T].view(-1, T), ids[1 : windows * T + 1].view(-1, T)
    return model.eval()(x, y)[1].item()


def train_nanogpt(seed, folder):
    source = folder / "nanoGPT/train.py"
    text = source.read_text()
    assert text.count(SEED) == 1
    source.write_text(text.replace(SEED, SEED.replace("1337", str(seed))))
    seconds = run(NANOGPT, folder / "nanoGPT")
    source.write_text(text)
    return loss_of_nanogpt(folder / "nanoGPT"), *seconds


def train_ours(seed, folder):
    seconds = run([ROOT / OURS[0], *OURS[1:], "--seed", seed, "--out-dir", f"log/{seed}"], folder)
    lines = (folder / f"log/{seed}/log.txt").read_text().splitlines()
    losses = [float(line.split()[2]) for line in lines if line.split()[1] == "val"]
    return losses[-1], *seconds


def main(clone, text, *seeds):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(clone, os.path.abspath(text), folder)
        sides = {"nanoGPT": train_nanogpt, "ours": train_ours}
        for seed in map(int, seeds):
            for side in [*sides][:: 1 if seed % 2 else -1]:  # the first one of a pair changes by turns
                loss, clock, processor = sides[side](seed, folder)
                print(seed, side, f"{loss:.4f} {clock:.1f} {processor:.1f}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
