"""Which ingredient of the speedrun saves how many tokens: small GPTs on a CPU, each run a real run of train_gpt2.py.

    python ablation.py --data edu_bytes --runs runs NAME...     run the named experiments, or all

Every run's log.txt is kept as <runs>/<name>.txt; a run that is there is not run again. Then prints the table.
"""

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHAPE = (
    "--preset quickstart --n-layer 3 --n-head 3 --n-embd 96 --block-size 64 --sequence-length 64 --batch-size 32 "
    "--total-batch-size 2048 --val-tokens 65536 --val-every 80 --sample-every 0 --checkpoint-every 0 "
    "--schedule cosine --decay-fraction 0.5"
)
FULL, SHORT = 800, 320  # steps: the baseline's run, and 40% of it


def adamw(lr, steps, *more):
    return f"--optimizer adamw --max-lr {lr} --min-lr {lr / 10} --max-steps {steps} --warmup-steps {steps // 26}".split() + list(more)


def muon(lr, steps, *more, adam_lr=4e-3):
    return f"--optimizer muon --muon-lr {lr} --max-lr {adam_lr} --min-lr {adam_lr / 10} --max-steps {steps} --warmup-steps {steps // 26}".split() + list(more)


WSD = ("--schedule", "wsd")
EXPERIMENTS = {
    # the baseline's peak learning rate, swept: AdamW and cosine as in preset gpt2
    **{f"adamw-cosine-{lr:g}": adamw(lr, FULL) for lr in (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)},
    # 40% of its tokens
    **{f"short-adamw-cosine-{lr:g}": adamw(lr, SHORT) for lr in (4e-3, 8e-3)},
    **{f"short-adamw-wsd-{lr:g}": adamw(lr, SHORT, *WSD) for lr in (4e-3, 8e-3)},
    **{f"short-muon-cosine-{lr:g}": muon(lr, SHORT) for lr in (0.02, 0.04, 0.08)},
    **{f"short-muon-wsd-{lr:g}": muon(lr, SHORT, *WSD) for lr in (0.02, 0.04, 0.08)},
    **{f"short-muon-wsd-0.04-adam{a:g}": muon(0.04, SHORT, *WSD, adam_lr=a) for a in (2e-3, 8e-3)},
    **{f"short-muon-wsd-0.04-decay{d:g}": muon(0.04, SHORT, *WSD, "--decay-fraction", f"{d}") for d in (0.3, 0.7, 1.0)},
    **{f"short-muon-wsd-0.04-wd{w:g}": muon(0.04, SHORT, *WSD, "--muon-weight-decay", f"{w}") for w in (0.0, 0.1)},
    # what was best above, together, with 40%, 30% and 20% of the baseline's tokens
    **{f"best-{steps}": muon(0.04, steps, *WSD, "--decay-fraction", "0.7", adam_lr=8e-3) for steps in (320, 240, 160)},
}


def val_losses(path):
    lines = (line.split() for line in path.read_text().splitlines())
    return {int(step): float(value) for step, stream, value in lines if stream == "val"}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--data", required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--seed", default="1337")
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    for name in args.names or EXPERIMENTS:
        log = args.runs / f"{name}-seed{args.seed}.txt"
        if log.exists():
            continue
        start, out_dir = time.perf_counter(), args.runs / "current"
        shutil.rmtree(out_dir, ignore_errors=True)
        flags = [*SHAPE.split(), "--data", args.data, "--out-dir", str(out_dir), "--seed", args.seed, *EXPERIMENTS[name]]
        subprocess.run([sys.executable, str(ROOT / "train_gpt2.py"), *flags], check=True, stdout=subprocess.DEVNULL)
        shutil.copy(out_dir / "log.txt", log)
        print(f"{name}: val loss {list(val_losses(log).values())[-1]:.4f} in {time.perf_counter() - start:.0f} s", flush=True)
    print("\nfinal validation loss, best first")
    table = {path.stem: list(val_losses(path).items())[-1] for path in sorted(args.runs.glob("*.txt"))}
    for name, (step, loss) in sorted(table.items(), key=lambda item: item[1][1]):
        print(f"{loss:.4f}  {2048 * step:9,d} tokens  {name}")


if __name__ == "__main__":
    main()
