"""Fault injection: kill -9 at random moments, the same command again until it is done, compare.

    python tests/faults.py --kills 50 --fineweb-kills 20 [--seed 0] [--json FILE]
    python tests/faults.py --elastic         SIGTERM on 1 process, on with 2 ranks, one of them killed

Real processes with the real command lines. A run of the trainer that was killed, however often, must
end with the train and val values of log.txt bit for bit those of one never interrupted; shards of
`fineweb.py --input` must be equal byte for byte.
"""

import argparse
import collections
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # two threads on cores that others use too wait more than they compute

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# 60 steps of 10 ms, validation every 5, a checkpoint every 7: starting takes longer than training, and a
# kill finds each of them
TRAINER = (
    "--n-layer 2 --n-head 2 --n-embd 64 --block-size 64 --sequence-length 32 --batch-size 4 --total-batch-size 256 "
    "--warmup-steps 5 --max-lr 3e-3 --min-lr 3e-4 --val-every 5 --val-tokens 2048 --hellaswag-every 0 "
    "--sample-every 20 --checkpoint-every 7 --device cpu --dtype float32 --no-compile"
).split()


def make_corpus(folder, seed):
    """A JSON lines file of 3,000 documents of invented words, 3 MB."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(2000)]
    with open(folder / "corpus.jsonl", "w") as file:
        for _ in range(3000):
            file.write(json.dumps({"text": " ".join(rng.choices(words, k=rng.randint(20, 300)))}) + "\n")
    return folder / "corpus.jsonl"


def make_data(folder, seed):
    """Two train shards and a val one, of letters each of which is often followed by the next."""
    rng = np.random.default_rng(seed)
    folder.mkdir()
    for number, split in enumerate(("val", "train", "train")):
        steps = np.where(rng.random(9000) < 1 / 3, rng.integers(0, 16, 9000), 1)
        np.save(folder / f"faults_{split}_{number:06d}.npy", (97 + np.cumsum(steps) % 16).astype(np.uint16))
    (folder / "meta.json").write_text(json.dumps({"dataset": "input", "tokenizer": "bytes", "vocab_size": 257}))
    return folder


def launch(command, output):
    """Start a command in its own session, what it prints appended to `output`."""
    with open(output, "ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)


def kill_family(process):
    """kill -9 a process and what it has started: the pool of fineweb.py must not outlive it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it has not yet come to its session
        os.kill(process.pid, signal.SIGKILL)
    process.wait()


def run_through(command, output):
    """Run a command to its end; seconds taken."""
    begin = time.monotonic()
    status = launch(command, output).wait(300)
    if status:
        raise SystemExit(f"{' '.join(command)} left with {status}:\n{Path(output).read_text()[-3000:]}")
    return time.monotonic() - begin


def values(out_dir):
    """The train and val lines of log.txt: what must not change."""
    lines = (out_dir / "log.txt").read_text().splitlines()
    return [line for line in lines if line.split()[1] in ("train", "val")]


def starts(out_dir):
    """How many processes have come to train in a folder."""
    return (out_dir / "run.txt").read_text().count("started: ") if (out_dir / "run.txt").exists() else 0


def phase(out_dir, trains):
    """Where a killed process was, as the folder shows it."""
    if list(out_dir.glob("*.part")):
        return "writing " + sorted(path.name for path in out_dir.glob("*.part"))[0].split("_")[0].removesuffix(".part")
    if not trains:
        return "starting"
    return "after the export" if (out_dir / "hf").exists() else "training"


def wait_or_kill(process, out_dir, startup, training, rng):
    """Wait for the end of a process, or kill it at a random moment; the moment's phase, None if it has ended.

    One kill in five falls anywhere into the seconds of `startup`, the others into those of `training`.
    """
    before, begin = starts(out_dir), time.monotonic()
    early = rng.random() < 0.2
    moment = rng.uniform(0, startup if early else training)
    while process.poll() is None:
        if not early and starts(out_dir) == before:
            begin = time.monotonic()
        if time.monotonic() - begin >= moment:
            kill_family(process)
            return phase(out_dir, starts(out_dir) > before)
        time.sleep(0.005)
    return None


def kill_trainer(folder, kills, seed, say):
    """`kills` kills over as many training runs as it takes. Counts what was hit and what came out different."""
    rng = random.Random(seed)
    data = make_data(folder / "data", seed)

    def command(out_dir):
        script = [sys.executable, str(ROOT / "train_gpt2.py")]
        return [*script, "--data", str(data), "--out-dir", str(out_dir), "--max-steps", "60", *TRAINER]

    straight = folder / "straight"
    begin = time.monotonic()
    process = launch(command(straight), folder / "straight.out")
    wait_for(lambda: starts(straight) or process.poll() is not None)
    startup = time.monotonic() - begin
    status = process.wait(300)
    training = time.monotonic() - begin - startup
    if status:
        raise SystemExit((folder / "straight.out").read_text()[-3000:])
    expected = values(straight)
    found = {"kills": 0, "runs": 0, "different": 0, "startup s": round(startup, 1), "training s": round(training, 1)}
    found["killed while"] = collections.Counter()
    while found["kills"] < kills:
        out_dir = folder / f"run{found['runs']}"
        found["runs"] += 1
        patience = rng.randint(1, 6)  # kills of this run; one that has begun is always brought to its end
        while True:
            process = launch(command(out_dir), folder / f"{out_dir.name}.out")
            if patience == 0 or found["kills"] == kills:
                process.wait(300)
                break
            hit = wait_or_kill(process, out_dir, startup, training, rng)
            if hit is None:
                break
            patience -= 1
            found["kills"] += 1
            found["killed while"][hit] += 1
            logged = len(values(out_dir)) if (out_dir / "log.txt").exists() else 0
            say(f"kill {found['kills']}: {out_dir.name}, {hit}, {logged} values logged")
        if process.wait():
            printed = (folder / f"{out_dir.name}.out").read_text()
            raise SystemExit(f"{out_dir} left with {process.wait()}: {printed[-3000:]}")
        exports = [run / "hf" / "model.safetensors" for run in (out_dir, straight)]
        same = values(out_dir) == expected and exports[0].read_bytes() == exports[1].read_bytes()
        found["different"] += not same
        word = "equal" if same else "DIFFERENT"
        say(f"{out_dir.name}: {starts(out_dir)} starts, {len(expected)} values and the exported model {word}")
    return found


def kill_fineweb(folder, kills, seed, say):
    """The same for `fineweb.py --input`: kills while it tokenizes, shards compared byte for byte."""
    rng = random.Random(seed)
    corpus = make_corpus(folder, seed)

    def command(out_dir):
        script = [sys.executable, str(ROOT / "fineweb.py"), "--input", str(corpus), "--tokenizer", "bytes"]
        return [*script, "--shard-size", "100000", "--num-proc", "2", "--out-dir", str(out_dir)]

    def shards(out_dir):
        return {path.name: path.read_bytes() for path in sorted(out_dir.iterdir()) if path.suffix == ".npy"}

    # shards are named after their folder: each run has its own parent
    out_dir = folder / "straight" / "shards"
    seconds = run_through(command(out_dir), folder / "fineweb-straight.out")
    expected, meta = shards(out_dir), json.loads((out_dir / "meta.json").read_text())
    found = {"kills": 0, "runs": 0, "different": 0, "shards": len(expected), "seconds of a run": round(seconds, 1)}
    found["shards there when killed"] = collections.Counter()
    while found["kills"] < kills:
        out_dir = folder / f"fineweb{found['runs']}" / "shards"
        found["runs"] += 1
        patience = rng.randint(1, 4)
        while True:
            process = launch(command(out_dir), folder / "fineweb.out")
            try:
                aim = patience > 0 and found["kills"] < kills
                status = process.wait(rng.uniform(0.3, 1.0) * seconds if aim else 300)
            except subprocess.TimeoutExpired:
                kill_family(process)
                patience -= 1
                found["kills"] += 1
                there = len(shards(out_dir)) if out_dir.exists() else 0
                found["shards there when killed"][there] += 1
                say(f"fineweb kill {found['kills']}: {there} of {len(expected)} shards there")
                continue
            if status:
                raise SystemExit(f"fineweb.py left with {status}: {(folder / 'fineweb.out').read_text()[-3000:]}")
            break
        same = shards(out_dir) == expected and json.loads((out_dir / "meta.json").read_text()) == meta
        found["different"] += not same
        say(f"fineweb run {found['runs']}: {len(expected)} shards and meta.json {'equal' if same else 'DIFFERENT'}")
    return found


def inject(folder, kills, fineweb_kills, seed, say=lambda text: None):
    """Both kinds of kills; a dictionary of figures."""
    folder = Path(folder)
    report = {"seed": seed}
    for name, inject_kind, count in (("training", kill_trainer, kills), ("fineweb", kill_fineweb, fineweb_kills)):
        (folder / name).mkdir()
        report[name] = inject_kind(folder / name, count, seed, say)
        say(f"{name}: {json.dumps(report[name])}")
    return report


# ----------------------------------------------------------------------------------------------------------
# Ranks that come and go


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(f"waited {seconds} s in vain")
        time.sleep(0.02)


def torchrun(*options):
    return [sys.executable, "-m", "torch.distributed.run", *options, str(ROOT / "train_gpt2.py")]


def logged_steps(out_dir):
    path = out_dir / "log.txt"
    return sum(" train " in line for line in path.read_text().splitlines()) if path.exists() else 0


def elastic(folder, steps=150, seed=0, say=lambda text: None):
    """SIGTERM on 1 process at a third, on with 2 ranks of which one is killed at two thirds; the largest
    difference of a train loss to the uninterrupted run on 1 process.

    The ranks have B = 2 instead of 4: with the same micro-batches the two runs' sums would be the same bits.
    """
    folder = Path(folder)
    data = make_data(folder / "data", seed)

    def args(out_dir, batch_size="4"):
        trainer = [batch_size if before == "--batch-size" else word for before, word in zip(["", *TRAINER], TRAINER)]
        return ["--data", str(data), "--out-dir", str(out_dir), "--max-steps", str(steps), *trainer]

    trainer = [sys.executable, str(ROOT / "train_gpt2.py")]
    straight = launch(trainer + args(folder / "straight"), folder / "straight.out")  # at the same time as the others
    out_dir = folder / "out"
    process = launch(trainer + args(out_dir), folder / "one.out")
    wait_for(lambda: logged_steps(out_dir) >= steps // 3 or process.poll() is not None)
    process.terminate()
    status, stopped = process.wait(60), logged_steps(out_dir)
    say(f"1 process: SIGTERM, left with status {status} after {stopped} steps")
    if status or not steps // 3 <= stopped < steps:
        raise SystemExit(f"status {status} after {stopped} steps")

    elastic_torchrun = torchrun("--standalone", "--nproc_per_node=2", "--max-restarts=2", "--monitor-interval=0.1")
    agent = launch(elastic_torchrun + args(out_dir, "2"), folder / "two.out")
    wait_for(lambda: logged_steps(out_dir) >= 2 * steps // 3 or agent.poll() is not None)
    ranks = children(agent.pid)
    os.kill(ranks[1], signal.SIGKILL)
    killed = logged_steps(out_dir)
    try:
        status = agent.wait(120)
    except subprocess.TimeoutExpired:
        agent.terminate()  # kill -9 would leave its ranks behind
        agent.wait(60)
        raise SystemExit(f"the restarted ranks hang: {(folder / 'two.out').read_text()[-3000:]}") from None
    say(f"2 ranks: one killed with -9 after {killed} steps, torchrun left with status {status}")
    if status:
        raise SystemExit((folder / "two.out").read_text()[-3000:])
    if straight.wait(120):
        raise SystemExit((folder / "straight.out").read_text()[-3000:])
    losses = []
    for run in (folder / "straight", out_dir):
        lines = [line.split() for line in values(run) if " train " in line]
        if [int(step) for step, _, _ in lines] != list(range(steps)):
            raise SystemExit(f"{run}: not every step once")
        losses.append(np.array([float(value) for _, _, value in lines]))
    difference = np.abs(losses[0] - losses[1])
    found = {
        "steps": steps,
        "stopped after": stopped,
        "killed after": killed,
        "restarts": (out_dir / "run.txt").read_text().count("started: ") - 2,
        "first steps": float(difference[: stopped + 10].max()),
        "largest": float(difference.max()),
        "at step": int(difference.argmax()),
    }
    say(f"largest difference of a train loss: {json.dumps(found)}")
    return found


def start_agents(args, folder):
    """Two torchruns that find each other by a rendezvous on this machine, one rank each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test"]
    command = torchrun("--nnodes=2", "--nproc_per_node=1", *rendezvous, "--local-addr=127.0.0.1") + args
    return [launch(command, Path(folder) / f"agent{number}") for number in (0, 1)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="of the trainer")
    parser.add_argument("--fineweb-kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--elastic", action="store_true", help="only the run that goes from 1 process to 2 ranks")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    begin = time.monotonic()

    def say(text):
        print(f"{time.monotonic() - begin:7.1f} s  {text}", flush=True)

    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        if options.elastic:
            report = elastic(folder, seed=options.seed, say=say)
        else:
            report = inject(folder, options.kills, options.fineweb_kills, options.seed, say)
    finally:
        shutil.rmtree(folder)
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    bad = not options.elastic and (report["training"]["different"] or report["fineweb"]["different"])
    say("some runs came out different" if bad else "done")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
