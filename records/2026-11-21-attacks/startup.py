"""What the checks cost at the start of a run: python startup.py OLD NEW, two checkouts of this repository.

Prints, for each checkout in turn and several times, seconds of a new run of one step on tiny data; then what the
checks of NEW take of a checkpoint of GPT-2 124M, and the fingerprint of 100 shards of 200 MB (sparse files).
Seconds are of the processor (user and system) and, in brackets, of the clock.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

old, new = map(Path, sys.argv[1:3])
sys.path[:0] = [str(new)]
TINY = (
    "--n-layer 2 --n-head 2 --n-embd 32 --block-size 32 --sequence-length 16 --batch-size 4 --total-batch-size 128 "
    "--max-steps 1 --warmup-steps 1 --val-every 0 --hellaswag-every 0 --sample-every 0 --checkpoint-every 0 "
    "--device cpu --no-compile"
).split()


def make_data(folder):
    folder.mkdir()
    rng = np.random.default_rng(0)
    shards = {"tiny_val_000000.npy": 2000, "tiny_train_000001.npy": 3000}
    for name, length in shards.items():
        np.save(folder / name, rng.integers(0, 256, length).astype(np.uint16))
    meta = {"dataset": "input", "tokenizer": "bytes", "vocab_size": 257, "shards": shards, "complete": True}
    (folder / "meta.json").write_text(json.dumps(meta))


def run_once(checkout, place, number):
    command = [sys.executable, str(checkout / "train_gpt2.py"), "--data", str(place / "data"), *TINY]
    command += ["--out-dir", str(place / f"run{number}")]
    before, start = os.times(), time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    after = os.times()
    processor = after.children_user - before.children_user + after.children_system - before.children_system
    return processor, time.perf_counter() - start


def timed(name, function, *args):
    start, processor = time.perf_counter(), time.process_time()
    result = function(*args)
    seconds, clock = time.process_time() - processor, time.perf_counter() - start
    print(f"{name}: {seconds:.3f} s ({clock:.3f} s)", flush=True)
    return result


def measure_checkpoint(place):
    import torch

    import train_gpt2
    from plumbing import checkpoint

    path = place / "model_00001.pt"
    config = train_gpt2.PRESETS["gpt2"]
    model = train_gpt2.GPT(train_gpt2.GPTConfig())
    optimizers = train_gpt2.configure_optimizers(model, config)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizers[0].step()
    model.zero_grad()
    state = {"model": model.state_dict(), "optimizer": [o.state_dict() for o in optimizers], "scaler": {}, "loader": {}}
    state |= {"rng": torch.get_rng_state(), "step": 1, "config": vars(train_gpt2.GPTConfig()), "tokenizer_file": ""}
    torch.save(state, path)
    print(f"a checkpoint of {path.stat().st_size / 1e9:.2f} GB")
    for _ in range(3):
        timed("torch.load alone", torch.load, path)
        timed("check_archive", checkpoint.check_archive, path)
        saved = timed("load_checkpoint, with both", checkpoint.load_checkpoint, path, True)
        timed("check_weights", checkpoint.check_weights, saved["model"], model.state_dict())
        now = {**state, "model": model.state_dict()}
        now = {name: now[name] for name in ("model", "optimizer", "scaler", "rng")}
        timed("check_state", checkpoint.check_state, {**saved, "loader": {"fingerprint": ""}},
              now | {"loader": {"fingerprint": ""}}, optimizers)  # fmt: skip


def measure_fingerprint(place):
    from plumbing import shards

    paths = [place / f"x_train_{number:06d}.npy" for number in range(1, 101)]
    for path in paths:
        with open(path, "wb") as file:
            file.truncate(200 * 10**6)
    for _ in range(3):
        timed("fingerprint of 100 shards of 200 MB", shards.fingerprint, paths)


with tempfile.TemporaryDirectory() as place:
    place = Path(place)
    make_data(place / "data")
    times = {"old": [], "new": []}
    for number in range(7):
        for name, checkout in (("old", old), ("new", new)):
            processor, clock = run_once(checkout, place, f"{number}-{name}")
            times[name].append(processor)
            print(f"a run of one step, {name}: {processor:.2f} s ({clock:.2f} s)", flush=True)
    medians = {name: float(np.median(values)) for name, values in times.items()}
    print(f"medians: old {medians['old']:.2f} s, new {medians['new']:.2f} s")
    measure_fingerprint(place)
    measure_checkpoint(place)
