"""The runs of this record, smallest first; the same command goes on where it was stopped and skips what is finished.

    nice python records/2026-11-24-scaling-law/runs.py [NAME ...]

It is started in the root of the repository, with the tokens in log/law/tokens (see README.md). NAMEs choose series by
the beginning of their names, such as 2x64 or 4x128-seed2. For each series, one run at a constant rate keeps milestones, and
branches of it decay to zero over the last fifth of each length. A run that is finished leaves its run.txt and the part of
its log.txt that fit.py reads in runs/ beside this file; what is there is not run again.

`--list` says what is finished and what is missing, and runs nothing. `--predicted` makes the last run, the largest size
on 48M tokens; it is refused until `fit.py --predict` has written what it will end at to prediction.txt.
"""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

KEPT, WORK = Path(__file__).parent / "runs", Path("log/law")
RECORDS = "diff --git a/records/"
TOKENS_PER_STEP = 4096
STEPS = {"2M": 500, "4M": 1000, "8M": 2000, "16M": 4000, "32M": 8000, "48M": 12000}
GRID = ["2M", "4M", "8M", "16M", "32M"]
PREDICTED = ("6x192-seed1", "48M")
DECAY = 0.2  # of the steps
VAL_TOKENS = 2**21
SIZES = {"2x64": (2, 64), "3x96": (3, 96), "4x128": (4, 128), "5x160": (5, 160), "6x192": (6, 192)}
# what is the same for all: bfloat16 is given, as --dtype auto would take float32 below 128 channels
COMMON = (
    "--preset quickstart --data log/law/tokens --dtype bfloat16 --block-size 128 --sequence-length 128 --batch-size 32"
    f" --total-batch-size {TOKENS_PER_STEP} --schedule wsd --sample-every 0 --no-keep-best"
).split()
# series: (size, seed, factor of the rates, lengths), in the order in which they are run
SERIES = {
    "2x64-seed1": ("2x64", 1, 1.0, GRID),
    "2x64-seed1-half": ("2x64", 1, 0.5, ["2M", "8M"]),
    "2x64-seed1-double": ("2x64", 1, 2.0, ["2M", "8M"]),
    "3x96-seed1": ("3x96", 1, 1.0, GRID),
    "2x64-seed2": ("2x64", 2, 1.0, GRID),
    "4x128-seed1": ("4x128", 1, 1.0, GRID),
    "4x128-seed1-half": ("4x128", 1, 0.5, ["2M", "8M"]),
    "4x128-seed1-double": ("4x128", 1, 2.0, ["2M", "8M"]),
    "3x96-seed2": ("3x96", 2, 1.0, GRID),
    "5x160-seed1": ("5x160", 1, 1.0, GRID),
    "4x128-seed2": ("4x128", 2, 1.0, GRID),
    "6x192-seed1": ("6x192", 1, 1.0, GRID),
    "2x64-seed1-half-long": ("2x64", 1, 0.5, ["32M"]),  # the best rate falls with the length: by how much in the end?
}


def muon_lr(channels):
    return 0.03 * (128 / channels) ** 0.25


def kept_val(name, length):
    """The last validation loss of a finished run, None if it is not finished."""
    log = KEPT / name / length / "log.txt"
    lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    values = [float(value) for step, stream, value in lines if stream == "val" and int(step) == STEPS[length]]
    return values[-1] if values else None


def train(folder, *flags, until=None):
    """Run train_gpt2.py, or go on with it, and add its processor seconds to a file in the run's folder.

    As soon as the file `until` exists, the run is stopped, which makes it write a checkpoint from which it can go on.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "train_gpt2.py", *map(str, flags), "--out-dir", str(folder)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    stopped = False
    with open(WORK / "console.txt", "a") as console:
        process = subprocess.Popen(command, env=env, stdout=console, stderr=console)
        try:
            while process.poll() is None:
                time.sleep(1)
                if until and until.exists() and not stopped:
                    process.terminate()
                    stopped = True
        finally:  # this program was stopped itself: the run goes on from its checkpoint next time
            process.terminate()
            process.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    with open(folder / "seconds.txt", "a") as file:
        file.write(f"{seconds:.1f}\n")
    if process.returncode and not stopped:
        sys.exit(f"error: {' '.join(command)} ended with status {process.returncode}: see {WORK / 'console.txt'}.")


def keep(folder, kept, steps):
    """Copy run.txt, the validation losses and twenty of the training losses to where records lie."""
    kept.mkdir(parents=True, exist_ok=True)
    every = steps // 20
    lines = []
    for line in (folder / "log.txt").read_text().splitlines():
        step, stream, _ = line.split()
        if stream in ("val", "val_bpb") or stream == "train" and (int(step) + 1) % every == 0:
            lines.append(line)
    seconds = sum(map(float, (folder / "seconds.txt").read_text().split()))
    run = (folder / "run.txt").read_text().splitlines(keepends=True)
    # this record's own logs, which change while it runs, are no changes of the program
    run = [line for line in run if not line.startswith("changes: ") or "diff --git a/" in line.replace(RECORDS, "")]
    (kept / "log.txt").write_text("\n".join(lines) + "\n")
    # of a branch, which begins with its parent's log and run.txt, these are the seconds after it
    (kept / "run.txt").write_text("".join(run) + f"processor seconds: {seconds:.0f}\n")


def run_series(name, lengths):
    """Run what is missing of these lengths of a series, and the constant run that they branch from."""
    size, seed, factor, _ = SERIES[name]
    lengths = [length for length in lengths if kept_val(name, length) is None]
    if not lengths:
        return
    layers, channels = SIZES[size]
    # the constant run is the same whatever is finished; a longer branch than planned goes on from its end
    end = round((1 - DECAY) * max(STEPS[length] for length in SERIES[name][3]))
    every = round((1 - DECAY) * min(STEPS.values()))
    constant = WORK / "runs" / name / "constant"
    rate = factor * muon_lr(channels)
    for length in lengths:
        steps = STEPS[length]
        parent = constant / f"model_{min(end, round((1 - DECAY) * steps)):05}.pt"
        if not parent.exists():  # go on only that far, so that short lengths are finished before long ones begin
            train(
                constant, *COMMON, "--n-layer", layers, "--n-head", channels // 32, "--n-embd", channels,
                "--muon-lr", f"{rate:.5f}", "--max-lr", f"{rate / 10:.6f}", "--seed", seed, "--decay-fraction", 0,
                "--max-steps", end, "--val-every", 0, "--checkpoint-every", every, "--milestone-every", every,
                until=parent,
            )  # fmt: skip
        folder = WORK / "runs" / name / length
        train(
            folder, "--branch-from", parent, "--max-steps", steps, "--decay-fraction", DECAY, "--val-every", 10**6,
            "--val-tokens", VAL_TOKENS, "--checkpoint-every", 500, "--milestone-every", 0,
        )  # fmt: skip
        keep(folder, KEPT / name / length, steps)
        keep(constant, KEPT / name / "constant", end)
        print(f"{name} {length}: {kept_val(name, length):.4f}", flush=True)


def main():
    args = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    if args == ["--list"]:
        for name, (*_, lengths) in SERIES.items():
            losses = {length: kept_val(name, length) for length in lengths}
            print(name, *(f"{length} {f'{loss:.4f}' if loss else 'missing'}" for length, loss in losses.items()), sep="  ")
        return
    if args == ["--predicted"]:
        if not (KEPT.parent / "prediction.txt").exists():
            sys.exit("error: there is no prediction yet. Write it with fit.py --predict, and commit it, before this run.")
        run_series(PREDICTED[0], [PREDICTED[1]])
        return
    unknown = [arg for arg in args if not any(name.startswith(arg) for name in SERIES)]
    if unknown:
        sys.exit(f"error: there is no series {unknown[0]!r}. There are {', '.join(SERIES)}.")
    if not (WORK / "tokens" / "meta.json").exists():
        sys.exit("error: there are no tokens in log/law/tokens. Make them as README.md says, and start this in the root.")
    for name, (*_, lengths) in SERIES.items():
        if not args or any(name.startswith(arg) for arg in args):
            run_series(name, lengths)


if __name__ == "__main__":
    main()
