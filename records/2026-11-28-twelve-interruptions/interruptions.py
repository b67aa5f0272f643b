"""One run of 1,500 steps, interrupted twelve times, beside the same run that nothing interrupts.

    OMP_NUM_THREADS=1 python records/2026-11-28-twelve-interruptions/interruptions.py OTHER_PYTHON > interruptions.txt

OTHER_PYTHON is a Python with another version of torch. The logs are written to this folder.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
STEPS, EVERY = 1500, 115  # steps in all, and between two interruptions
RUN = (
    "train_gpt2.py --preset quickstart --device cpu --dtype float32 --n-layer 2 --n-head 2 --n-embd 64 --block-size 64 "
    f"--sequence-length 64 --total-batch-size 1536 --max-steps {STEPS} --val-every 100 --sample-every 0 "
    "--checkpoint-every 30"
).split()
# how the run goes on, and what ends that: (words, processes, B, other flags, signal)
PARTS = [
    ("one process, B = 24", 1, 24, [], "kill -9"),
    ("the same", 1, 24, [], "SIGTERM"),
    ("the same, with another torch", 1, 24, [], "kill -9"),
    ("one process, B = 24", 1, 24, [], "SIGTERM"),
    ("one process, B = 8", 1, 8, [], "kill -9"),
    ("one process, B = 24", 1, 24, [], "SIGTERM"),
    ("two processes, DDP", 2, 12, [], "kill -9 of one of them"),
    ("three processes, DDP", 3, 8, [], "SIGTERM"),
    ("two processes, sharded", 2, 12, ["--shard"], "kill -9 of one of them"),
    ("three processes, sharded", 3, 8, ["--shard"], "SIGTERM"),
    ("two processes, DDP", 2, 12, [], "SIGTERM"),
    ("one process, B = 6", 1, 6, [], "kill -9"),
    ("one process, B = 24", 1, 24, [], ""),
]


def start(out, processes, B, *, flags=(), python=sys.executable):
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [python, *(torchrun if processes > 1 else []), ROOT / RUN[0], *RUN[1:], "--batch-size", str(B)]
    return subprocess.Popen(
        [*command, *flags, "--out-dir", out], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def wait_for(step, log, process):
    while not log.exists() or f"\n{step} train " not in log.read_text():
        assert process.poll() is None, "the run has ended by itself"
        time.sleep(0.02)


def interrupt(process, how):
    target = process.pid
    if how == "kill -9 of one of them":
        target = int(Path(f"/proc/{target}/task/{target}/children").read_text().split()[-1])
    os.kill(target, signal.SIGTERM if how == "SIGTERM" else signal.SIGKILL)
    process.wait()


def keep_log(out, name):
    lines = (out / "log.txt").read_text().splitlines(keepends=True)
    (FOLDER / f"{name}.txt").write_text("".join(line for line in lines if line.split()[1] in ("train", "val")))


def main(other_python):
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        for name, B in (("undisturbed", 24), ("undisturbed_B8", 8)):
            assert start(Path(name), 1, B).wait() == 0
            keep_log(Path(name), name)
        out = Path("interrupted")
        for number, (words, processes, B, flags, how) in enumerate(PARTS, 1):
            python = other_python if "another torch" in words else sys.executable
            process = start(out, processes, B, flags=flags, python=python)
            if how:
                wait_for(number * EVERY, out / "log.txt", process)
                interrupt(process, how)
            else:
                assert process.wait() == 0
            starts = re.findall(r"^from step: (\d+)", (out / "run.txt").read_text(), re.MULTILINE)
            assert len(starts) == number
            print(f"{number}; from step {starts[-1]}; {words}; {how or 'the end'}", flush=True)
        keep_log(out, "interrupted")
        versions = set(re.findall(r"^versions: (.*)", (out / "run.txt").read_text(), re.MULTILINE))
        print(*sorted(versions), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1])
