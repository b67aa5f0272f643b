"""kill -9 at random moments, then the same command again: does it end bit for bit as a run that nothing interrupted?

    OMP_NUM_THREADS=1 python records/2026-11-20-fault-injection/kills.py 50 20 > kills.txt    # of training, of fineweb.py
"""

import collections
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRAIN = (
    "--n-layer 2 --n-head 2 --n-embd 32 --block-size 32 --sequence-length 16 --batch-size 4 --total-batch-size 128 "
    "--device cpu --dtype float32 --no-compile --max-steps 300 --warmup-steps 3 --val-every 5 --val-tokens 512 "
    "--hellaswag-every 0 --sample-every 10 --checkpoint-every 3 --milestone-every 60 --keep-best"
).split()
FINEWEB = "--tokenizer bytes --shard-size 30000 --num-proc 2".split()


def start(script, *arguments):
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return subprocess.Popen([sys.executable, ROOT / script, *map(str, arguments)], **quiet)


def digests(folder, pattern="*"):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob(pattern)}


def result(out):
    """What must be equal: each logged value that is no time, once, and the exported model."""
    lines = [line for line in (out / "log.txt").read_text().splitlines() if line.split()[1] != "tok/s"]
    return collections.Counter(lines), digests(out / "hf", "*.safetensors")


def identity(path):
    """Changes whenever a process writes to the file anew."""
    return (path.stat().st_ino, path.stat().st_mtime_ns) if path.exists() else None


def time_of_a_run(out, command):
    """(seconds until the log begins, seconds from there to the end)"""
    begun, process = time.monotonic(), start(*command)
    while not (out / "log.txt").exists():
        time.sleep(0.005)
    logged = time.monotonic()
    assert process.wait() == 0
    return logged - begun, time.monotonic() - logged


def wait_until_it_logs(log, process):
    before = identity(log)
    while identity(log) == before and process.poll() is None:
        time.sleep(0.002)


def kill_training(kills, folder):
    (folder / "text.txt").write_text(" ".join(random.choices("abcdefghij", k=200_000)))
    assert start("fineweb.py", "--input", folder / "text.txt", "--out-dir", folder / "data", *FINEWEB).wait() == 0
    out, straight = folder / "run", folder / "straight"
    command = ("train_gpt2.py", "--data", folder / "data", *TRAIN, "--out-dir")
    startup, training = time_of_a_run(straight, (*command, straight))
    done, runs, different = 0, 0, 0
    while done < kills:
        for _ in range(min(kills - done, random.randint(1, 6))):
            process = start(*command, out)
            if random.random() < 0.2:
                time.sleep(random.uniform(0, startup))
            else:
                wait_until_it_logs(out / "log.txt", process)
                time.sleep(random.uniform(0, training))
            if process.poll() is not None:
                break
            process.kill()
            process.wait()
            done += 1
            lines = len((out / "log.txt").read_text().splitlines()) if (out / "log.txt").exists() else 0
            print(f"kill {done}, run {runs + 1}: {lines} lines in the log", flush=True)
        assert start(*command, out).wait() == 0
        equal = result(out) == result(straight)
        runs, different = runs + 1, different + (not equal)
        left = [str(path.relative_to(out)) for name in ("*.part", ".lock") for path in out.rglob(name)]
        print(f"run {runs}: {'equal' if equal else 'DIFFERENT'}; left behind: {left or 'nothing'}", flush=True)
        out.rename(folder / f"finished-{runs}")
    print(f"training: {done} kills in {runs} runs, {different} of them different", flush=True)


def kill_fineweb(kills, folder):
    for i in range(3):
        texts = (" ".join(random.choices(["a", "bcd", "efghi", "jklmnop"], k=80)) for _ in range(2500))
        (folder / f"{i}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    command = ("fineweb.py", "--input", *folder.glob("*.jsonl"), *FINEWEB, "--out-dir")
    begun = time.monotonic()
    straight = folder / "straight" / "shards"  # shards are named after their folder
    assert start(*command, straight).wait() == 0
    whole = time.monotonic() - begun
    done, runs, different = 0, 0, 0
    while done < kills:
        runs += 1
        out = folder / f"run-{runs}" / "shards"
        for _ in range(min(kills - done, random.randint(1, 4))):
            process = start(*command, out)
            time.sleep(random.uniform(0.1, whole))
            if process.poll() is not None:
                break
            process.kill()
            process.wait()
            done += 1
            print(f"kill {done}, run {runs}: {len(list(out.glob('*.npy')))} shards there", flush=True)
        assert start(*command, out).wait() == 0
        equal = digests(out) == digests(straight)
        different += not equal
        print(f"run {runs}: {len(digests(out))} files, {'equal' if equal else 'DIFFERENT'}", flush=True)
    print(f"fineweb.py: {done} kills in {runs} runs, {different} of them different", flush=True)


if __name__ == "__main__":
    random.seed(0)
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        kill_training(int(sys.argv[1]), Path(one))
        kill_fineweb(int(sys.argv[2]), Path(two))
