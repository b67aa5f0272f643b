# ran at commit a88caf8; the trainer's function that makes a model is gone since
"""Levers of preset speedrun at small sizes: each run is train_gpt2.py's own, in a process of its own.

    python records/2026-11-24-speedrun-levers/sweep.py --data log/edu_bytes NAME ...   # those with a log are skipped
    python records/2026-11-24-speedrun-levers/sweep.py --data log/edu_bytes --plan 0.4M 280,1120 1,2,3,4 LEVER ...

It is started in the root of the repository. A NAME is size/levers/steps/seed, such as 0.4M/beta1=0.8+decay=0.5/280/1; "base"
stands for no lever, and "adamw" for the recipe of preset gpt2, to which "lr" gives a rate. --plan makes the names. What a
lever does is said in LEVERS. logs/NAME.txt keeps 16 of the training losses, the validation loss, that of the mean of the last
weights (val_tail0.1: over the last tenth of the steps), and the processor seconds of all training steps.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LOGS = HERE / "logs"
TAIL = 0.1  # of the steps, over which the weights are averaged
SIZES = {"0.4M": (3, 3, 96), "2M": (4, 6, 192)}  # layers, heads, channels: 372,576 and 1,853,568 parameters
BATCH = 1024  # tokens per step
# every setting that matters is given, so that later defaults change nothing
COMMON = (
    "--preset quickstart --device cpu --dtype bfloat16 --no-compile --block-size 64 --sequence-length 64 --batch-size 16"
    f" --total-batch-size {BATCH} --val-tokens 131072 --sample-every 0 --checkpoint-every 0 --no-keep-best --grad-clip 1.0"
    " --weight-decay 0.1 --beta1 0.9 --beta2 0.95"
)
MUON = (
    " --optimizer muon --schedule wsd --decay-fraction 0.7 --muon-lr 0.025 --muon-weight-decay 0.05 --muon-momentum 0.95"
    " --max-lr 0.008"
)
LEVERS = {
    # A. the momentum's warm-up from 0.85, over this share of the steps in place of 300; its fall to 0.85 at the end
    "warm": "share of the steps over which Muon's momentum rises",
    "cool": "share of the steps over which Muon's momentum falls to 0.85 at the end",
    "momentum": "Muon's momentum after the rise",
    # B. AdamW for the embeddings, of which one is the output layer, and for vectors
    "a": "AdamW's rate beside Muon",
    "wte": "factor of that rate for the token embedding, which is the output layer",
    "wpe": "factor of that rate for the position embedding",
    "vectors": "factor of that rate for biases and norms",
    "beta1": "AdamW's first beta",
    "beta2": "AdamW's second beta",
    "awd": "AdamW's weight decay",
    # C. the schedule
    "decay": "share of the steps in which the rate falls",
    "ramp": "share of the tokens that are read in batches of half the size",
    "warmup": "share of the steps in which the rate rises",
    # D. the rest
    "lr": "Muon's rate, or AdamW's alone",
    "wd": "Muon's weight decay",
    "down": "factor of Muon's update of the MLP's second matrix, which is wider than tall",
    "up": "factor of Muon's update of the MLP's first matrix, which is taller than wide",
    "init": "factor of the initial token embedding, which is the output layer",
    "zero": "1: the projections into the residual stream begin at zero",
    "cautious": "1: Muon decays only where the update has the sign of the weight",
    "normuon": "beta of the second moment by which the rows of Muon's update are normalized",
    "polar": "1: Newton-Schulz with the coefficients of Polar Express",
}
FLAG_OF = {"beta1": "beta1", "beta2": "beta2", "awd": "weight-decay", "decay": "decay-fraction", "a": "max-lr"}
FLAG_OF |= {"lr": "muon-lr", "wd": "muon-weight-decay", "momentum": "muon-momentum"}


def parse(name):
    """("0.4M", {"beta1": "0.8"}, 280, 1) of a name; AdamW alone has the lever "adamw"."""
    size, levers, steps, seed = name.split("/")
    levers = {} if levers == "base" else dict(lever.partition("=")[::2] for lever in levers.split("+"))
    unknown = levers.keys() - LEVERS.keys() - {"adamw"}
    if unknown or size not in SIZES:
        sys.exit(f"error: {name}: there is no size {size} or no lever {unknown}. Levers are {', '.join(LEVERS)}.")
    return size, levers, int(steps), int(seed)


def steps_of(levers, steps):
    """The number of updates for the tokens of `steps` full batches."""
    return round(steps * (1 + float(levers.get("ramp", 0))))


def arguments_of(size, levers, steps, seed):
    """The trainer's command line of a run."""
    n_layer, n_head, n_embd = SIZES[size]
    steps = steps_of(levers, steps)
    line = f"{COMMON} --n-layer {n_layer} --n-head {n_head} --n-embd {n_embd} --seed {seed} --max-steps {steps}"
    line += f" --warmup-steps {round(steps * float(levers.get('warmup', 1 / 26)))} --val-every {steps}"
    if "adamw" in levers:
        rate = float(levers["lr"])
        return f"{line} --optimizer adamw --schedule cosine --max-lr {rate:g} --min-lr {rate / 10:g}".split()
    words = [f"--{FLAG_OF[lever]}={value}" for lever, value in levers.items() if lever in FLAG_OF]
    return (line + MUON).split() + words


# ----- What the trainer has no flag for -----------------------------------------------------------------


def apply_levers(train_gpt2, levers, steps):
    """Put the levers around the functions of the module train_gpt2."""
    import torch

    number = {lever: float(value) for lever, value in levers.items() if value}
    configure_optimizers, apply_schedules = train_gpt2.configure_optimizers, train_gpt2.apply_schedules
    load_or_make_model, orthogonalize = train_gpt2.load_or_make_model, train_gpt2.orthogonalize

    def regrouped(model, config):
        *muon, adamw = configure_optimizers(model, config)
        wte, wpe = model.transformer.wte.weight, model.transformer.wpe.weight
        rest = [p for group in adamw.param_groups for p in group["params"]]
        vectors = [p for p in rest if p.dim() < 2]
        groups = [
            dict(params=[p], lr=config.max_lr * number.get(lever, 1), weight_decay=config.weight_decay)
            for lever, p in (("wte", wte), ("wpe", wpe))
        ]
        groups.append(dict(params=vectors, lr=config.max_lr * number.get("vectors", 1), weight_decay=0.0))
        betas = config.beta1, config.beta2
        for optimizer in muon:
            for group in optimizer.param_groups:
                rows, columns = group["params"][0].shape
                rows //= group["split"]
                # the decay is a rate times a weight decay: only the update is to change
                factor = number.get("down" if rows < columns else "up" if rows > columns else "", 1)
                group["lr"] *= factor
                group["weight_decay"] /= factor
        return [*muon, torch.optim.AdamW(groups, lr=config.max_lr, betas=betas, eps=1e-8, fused=True)]

    def scheduled(optimizers, step, config):
        lr = apply_schedules(optimizers, step, config)
        for optimizer in optimizers:
            for group in optimizer.param_groups if isinstance(optimizer, train_gpt2.Muon) else ():
                if "warm" in levers:
                    rise = min(1.0, step / max(1, number["warm"] * steps))
                    group["momentum"] = 0.85 + (config.muon_momentum - 0.85) * rise
                if "cool" in levers and step > (1 - number["cool"]) * steps:
                    fallen = (step / steps - 1 + number["cool"]) / number["cool"]
                    group["momentum"] += (0.85 - group["momentum"]) * fallen
        return lr

    def made(config, start, world):
        model = load_or_make_model(config, start, world)
        with torch.no_grad():
            model.transformer.wte.weight *= number.get("init", 1)
            for name, p in model.named_parameters():
                if "zero" in levers and name.endswith("c_proj.weight"):
                    p.zero_()
        return model

    if levers.keys() & {"wte", "wpe", "vectors", "up", "down"}:
        train_gpt2.configure_optimizers = regrouped
    if levers.keys() & {"warm", "cool"}:
        train_gpt2.apply_schedules = scheduled
    if levers.keys() & {"init", "zero"}:
        train_gpt2.load_or_make_model = made
    if "ramp" in levers:
        half = number["ramp"] * steps / (1 + number["ramp"]) * BATCH  # tokens
        train_gpt2.get_batch_size = lambda seen, config: BATCH // 2 if seen < half else BATCH
    if "polar" in levers:
        train_gpt2.orthogonalize = polar_express
    else:  # as on a GPU
        train_gpt2.orthogonalize = lambda G: orthogonalize(G.bfloat16()).float()
    if levers.keys() & {"normuon", "cautious"}:
        train_gpt2.Muon.step = changed_step(train_gpt2, number.get("normuon"), "cautious" in levers)


def polar_express(G):
    """The coefficients of Amsel et al. 2025, algorithm 2, for five steps, with the safety factor of modded-nanogpt."""
    import torch

    X = G.bfloat16()
    X = X.mT if G.size(1) > G.size(2) else X
    X = X / (X.norm(dim=(1, 2), keepdim=True) * 1.02 + 1e-6)
    for a, b, c in (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ):
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return (X.mT if G.size(1) > G.size(2) else X).float()


def changed_step(train_gpt2, beta2, cautious):
    """Muon's step, normalized by rows (NorMuon, Li et al. 2025) or with cautious weight decay (Chen et al. 2025)."""
    import torch

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = group["params"]
            updates = []
            for p in params:
                state = self.state[p]
                momentum = state.setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - group["momentum"])
                updates.append(p.grad.lerp(momentum, group["momentum"]))
            rows, columns = params[0].shape
            rows //= group["split"]
            matrices = torch.stack(updates).view(-1, rows, columns)
            updates = train_gpt2.orthogonalize(matrices).view(len(params), -1, columns).unbind()
            scale = max(1, rows / columns) ** 0.5
            for p, update in zip(params, updates):
                state = self.state[p]
                if beta2:
                    second = state.setdefault("second", torch.zeros_like(update[:, :1]))
                    second.lerp_(update.square().mean(1, keepdim=True), 1 - beta2)
                    size = update.norm()
                    update = update / second.sqrt().clamp(min=1e-10)
                    update *= size / update.norm()
                decayed = group["lr"] * group["weight_decay"] * p
                p.sub_(decayed * (update * p >= 0) if cautious else decayed)
                p.add_(update, alpha=-group["lr"] * scale)

    return step


def run_one(name, data, log):
    """Be one run."""
    sys.path.insert(0, str(ROOT))
    import torch

    import train_gpt2

    torch.set_num_threads(1)
    size, levers, steps, seed = parse(name)
    arguments, steps = arguments_of(size, levers, steps, seed), steps_of(levers, steps)
    if "adamw" not in levers:
        apply_levers(train_gpt2, levers, steps)
    train_step, evaluate_val_loss = train_gpt2.train_step, train_gpt2.evaluate_val_loss
    tail, sums, trained, seconds, kept = max(1, round(TAIL * steps)), [], 0, 0.0, {}

    def timed_step(model, *args, **options):
        nonlocal trained, seconds
        before = time.process_time()
        result = train_step(model, *args, **options)
        seconds += time.process_time() - before
        trained += 1
        if trained > steps - tail:
            weights = [p.detach().clone() for p in model.parameters()]
            sums[:] = [total + p for total, p in zip(sums, weights)] if sums else weights
        return result

    def evaluate(model, *args, **options):
        losses = evaluate_val_loss(model, *args, **options)
        if trained == steps:
            kept["val"] = losses[0]
            last = [p.detach().clone() for p in model.parameters()]
            with torch.no_grad():
                for p, total in zip(model.parameters(), sums):
                    p.copy_(total / tail)
                kept[f"val_tail{TAIL}"] = evaluate_val_loss(model, *args, **options)[0]
                for p, weight in zip(model.parameters(), last):
                    p.copy_(weight)
        return losses

    train_gpt2.train_step, train_gpt2.evaluate_val_loss = timed_step, evaluate
    with tempfile.TemporaryDirectory() as folder:
        try:
            train_gpt2.main([*arguments, "--data", data, "--out-dir", folder])
        except SystemExit as leaving:
            if leaving.code:
                raise
        if "val" not in kept:
            sys.exit("stopped")  # by a signal
        lines = [line.split() for line in Path(folder, "log.txt").read_text().splitlines()]
    losses = [(int(step), value) for step, stream, value in lines if stream == "train"]
    every = max(1, steps // 16)
    text = "".join(f"{step} train {value}\n" for step, value in losses if (step + 1) % every == 0)
    text += "".join(f"{steps} {stream} {value:.6f}\n" for stream, value in kept.items())
    log.parent.mkdir(parents=True, exist_ok=True)
    part = log.with_suffix(".part")
    part.write_text(text + f"{steps} step_seconds {seconds:.1f}\n")
    part.rename(log)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--plan", nargs="+", help="SIZE STEPS,... SEEDS,... LEVERS ...")
    parser.add_argument("--one", action="store_true", help="be one run, in this process")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    names = options.names
    if options.plan:
        size, lengths, seeds, *levers = options.plan
        names = [f"{size}/{each}/{n}/{s}" for each in levers for n in lengths.split(",") for s in seeds.split(",")]
    for name in names:
        parse(name)
        log = LOGS / f"{name}.txt"
        if options.one:
            run_one(name, options.data, log)
        elif not log.exists():
            with tempfile.TemporaryFile("w+") as said:
                command = [sys.executable, __file__, "--data", options.data, "--one", name]
                if subprocess.run(command, stdout=said, stderr=said).returncode:
                    said.seek(0)
                    sys.exit(f"error: {name} failed:\n{said.read()[-3000:]}")
            values = [line.split() for line in log.read_text().splitlines()]
            print(name, *(f"{stream} {value}" for _, stream, value in values if stream != "train"), flush=True)


if __name__ == "__main__":
    main()
