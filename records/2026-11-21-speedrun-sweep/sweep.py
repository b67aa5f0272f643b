"""Ran at commits 1b9ca12 and e47e104; today the trainer's functions take keyword parameters, which its wrappers lack.

What of the newest speedrun evidence pays at small sizes: each run is a run of train_gpt2.py in a process of its own.

    python sweep.py --data edu_bytes NAME...     do these runs, one after the other; those with a log are skipped
    python sweep.py                            only print the table of the runs that are there

A name is size/recipe/steps/seed, e.g. 2M/muon-lr0.02-wd0.01-a0.008/280/1: see `flags` for what a recipe may say.
logs/<name>.txt keeps the run's `step stream value` lines, thinned: 16 of the training losses, the final validation
loss (val), those of the mean of the weights over the last 5% and 20% of the steps (val_tail0.05, val_tail0.2), and the
processor seconds of all training steps (step_seconds) and of the optimizers in them (optimizer_seconds).
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LOGS = HERE / "logs"
TAILS = (0.05, 0.2)

SIZES = {  # layers, heads, channels; bytes, 64 positions
    "0.1M": (2, 2, 64),  # 124,672 parameters
    "0.4M": (3, 3, 96),  # 372,576 parameters
    "2M": (4, 6, 192),  # 1,853,568
    "8M": (6, 10, 320),  # 7,521,280
}
# preset quickstart only lends its small defaults: every flag that matters is said here, so that later defaults
# change nothing
COMMON = (
    "--preset quickstart --device cpu --dtype bfloat16 --no-compile --block-size 64 --sequence-length 64 "
    "--batch-size 16 --total-batch-size 1024 --val-tokens 32768 --sample-every 0 --checkpoint-every 0 "
    "--weight-decay 0.1 --beta1 0.9 --beta2 0.95 --grad-clip 1.0 --muon-momentum 0.95 --decay-fraction 0.7"
)


def flags(name):
    """The command line of a run's name.

    recipe: adamw, muon, soap or soapmuon, then parts joined by "-": lrX (of AdamW, or of the other on its matrices),
    wdX (of the other), aX (AdamW's rate beside it), everyX (steps from one basis of SOAP to the next), coolX (the share
    of steps in which Muon's momentum falls), cosine or wsd. The first three words are for `run_one`, the rest for
    train_gpt2, which takes SOAP for its Muon.
    """
    size, recipe, steps, seed = name.split("/")
    optimizer, *parts = recipe.split("-")
    n_layer, n_head, n_embd = SIZES[size]
    words = {part.rstrip("0123456789."): part.lstrip("abcdefghijklmnopqrstuvwxyz") for part in parts}
    schedule = "cosine" if "cosine" in words else "wsd"
    line = f"{COMMON} --n-layer {n_layer} --n-head {n_head} --n-embd {n_embd} --seed {seed} --schedule {schedule}"
    line += f" --max-steps {steps} --warmup-steps {int(steps) // 26} --val-every {steps}"
    max_lr = float(words["lr"] if optimizer == "adamw" else words["a"])
    line += f" --max-lr {max_lr:g} --min-lr {max_lr / 10:g} --optimizer {'adamw' if optimizer == 'adamw' else 'muon'}"
    if optimizer != "adamw":
        line += f" --muon-lr {words['lr']} --muon-weight-decay {words['wd']}"
    return [optimizer, words.get("cool", "0"), words.get("every", "10"), *line.split()]


def run_one(optimizer_name, cooldown, every, arguments):
    """Be one run: train_gpt2's main, with what has no flag there put around its functions."""
    sys.path.insert(0, str(ROOT))
    import torch

    import soap
    import train_gpt2

    torch.set_num_threads(1)
    max_steps = int(arguments[arguments.index("--max-steps") + 1])
    out_dir = Path(arguments[arguments.index("--out-dir") + 1])
    tail_steps = {share: max(1, round(share * max_steps)) for share in TAILS}
    sums, trained, seconds = {}, 0, {"step": 0.0, "optimizer": 0.0}
    orthogonalize, train_step = train_gpt2.orthogonalize, train_gpt2.train_step
    evaluate_val_loss, apply_schedules = train_gpt2.evaluate_val_loss, train_gpt2.apply_schedules
    configure_optimizers = train_gpt2.configure_optimizers

    def add_seconds(clock, sign):
        seconds[clock] += sign * time.process_time()

    def configure_and_clock(model, config):
        optimizers = configure_optimizers(model, config)
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(lambda *_: add_seconds("optimizer", -1))
            optimizer.register_step_post_hook(lambda *_: add_seconds("optimizer", 1))
        return optimizers

    def apply_schedules_and_momentum(optimizers, step, config):
        # the warm-up takes a tenth of the run, as in the benchmark, not 300 steps: no run here has so many
        cooldown_steps = max(1e-9, cooldown * max_steps)
        share = min(1.0, step / (0.1 * max_steps), (max_steps - step) / cooldown_steps)
        lr = apply_schedules(optimizers, step, config)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            if "momentum" in group:
                group["momentum"] = 0.85 + (config.muon_momentum - 0.85) * share
        return lr

    def train_step_and_average(model, *args):
        nonlocal trained
        add_seconds("step", -1)
        result = train_step(model, *args)
        add_seconds("step", 1)
        trained += 1
        for share, length in tail_steps.items():
            if trained > max_steps - length:
                weights = [p.detach() / length for p in model.parameters()]
                if share in sums:
                    torch._foreach_add_(sums[share], weights)
                else:
                    sums[share] = weights
        return result

    def evaluate_with_averages(model, loader, num_windows, *args):
        if trained == 0:  # nobody asks how good random weights are: one batch will do
            return evaluate_val_loss(model, loader, loader.B, *args)
        loss = evaluate_val_loss(model, loader, num_windows, *args)
        parameters = list(model.parameters())
        raw = [p.detach().clone() for p in parameters]
        with open(out_dir / "averages.txt", "w") as file:
            for share, weights in sums.items():
                for p, mean in zip(parameters, weights):
                    p.data.copy_(mean)
                mean_loss, _ = evaluate_val_loss(model, loader, num_windows, *args)
                file.write(f"{trained} val_tail{share} {mean_loss:.9g}\n")
            for clock, total in seconds.items():
                file.write(f"{trained} {clock}_seconds {total:.1f}\n")
        for p, weight in zip(parameters, raw):
            p.data.copy_(weight)
        return loss

    train_gpt2.orthogonalize = lambda G: orthogonalize(G.bfloat16())  # as on a GPU
    if "soap" in optimizer_name:
        after = train_gpt2.orthogonalize if optimizer_name == "soapmuon" else None
        train_gpt2.Muon = lambda groups, lr, momentum, weight_decay: soap.SOAP(groups, lr, weight_decay, every, after)
    train_gpt2.configure_optimizers = configure_and_clock
    train_gpt2.apply_schedules = apply_schedules_and_momentum
    train_gpt2.train_step = train_step_and_average
    train_gpt2.evaluate_val_loss = evaluate_with_averages
    train_gpt2.main(arguments)


def read_log(path):
    """{stream: {step: value}} of a log."""
    streams = {}
    for line in path.read_text().splitlines():
        step, stream, value = line.split()
        streams.setdefault(stream, {})[int(step)] = float(value)
    return streams


def keep_log(out_dir, log, steps):
    """What logs/ keeps of a run."""
    lines = (out_dir / "log.txt").read_text().splitlines()
    every = max(1, steps // 16)
    kept = [line for line in lines if line.split()[1] == "train" and int(line.split()[0]) % every == 0]
    kept += [line for line in lines if line.split()[:2] == [str(steps), "val"]]
    kept += (out_dir / "averages.txt").read_text().splitlines()
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("\n".join(kept) + "\n")


def print_table():
    rows = []
    for path in sorted(LOGS.glob("*/*/*/*.txt")):
        log, (size, recipe, steps) = read_log(path), path.relative_to(LOGS).parts[:3]
        losses = [next(iter(log[stream].values())) for stream in ["val", *(f"val_tail{share}" for share in TAILS)]]
        rows.append((size, losses[0], recipe, int(steps), path.stem, losses))
    for size, _, recipe, steps, seed, losses in sorted(rows):
        print(f"{size:5s} {recipe:32s} {steps:5d} steps, seed {seed}: " + "  ".join(f"{loss:.4f}" for loss in losses))


def main():
    if "--out-dir" in sys.argv:  # a run of its own, started below
        return run_one(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--data", default="edu_bytes")
    args = parser.parse_args()
    for name in args.names:
        log = LOGS / f"{name}.txt"
        if log.exists():
            continue
        with tempfile.TemporaryDirectory() as folder:
            out_dir, before = Path(folder) / "run", os.times()
            command = [sys.executable, __file__, *flags(name), "--data", args.data, "--out-dir", str(out_dir)]
            with open(Path(folder) / "console.txt", "w+") as console:
                if subprocess.run(command, stdout=console, stderr=console).returncode:
                    console.seek(0)
                    sys.exit(f"{name} failed:\n{console.read()[-2000:]}")
            after = os.times()
            seconds = after.children_user + after.children_system - before.children_user - before.children_system
            keep_log(out_dir, log, int(name.split("/")[2]))
        val = list(read_log(log)["val"].values())[0]
        print(f"{time.strftime('%H:%M:%S')} {name}: {val:.4f} in {seconds:.0f} processor seconds", flush=True)
    print_table()


if __name__ == "__main__":
    main()
