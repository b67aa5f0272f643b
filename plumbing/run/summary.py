"""What a run will do and cost, said before its first step; with --dry-run, that is all."""

import collections
from typing import Any

from plumbing.cli.console import count, duration, note, print0, print_next, short
from plumbing.cli.flags import flag_of
from plumbing.run.checkpoint import BEST
from plumbing.run.commands import train_command

TOKENS_PER_PARAMETER = 20  # of a compute-optimal run (Hoffmann et al. 2022, table 3)
A100_FLOPS = 312e12 * 0.4  # its peak in bfloat16, and a usual share of it for GPT-2's sizes, in training


def print_summary(start: Any, parts: Any) -> None:
    """Say in aligned lines what the run of this Start and with the trainer's `parts` will do and cost."""
    c, raw_model, loader, world, found = start.config, parts.raw_model, parts.loader, parts.world, parts.found
    T, B, S = c.sequence_length, found.B, c.total_batch_size
    N = sum(p.numel() for p in raw_model.parameters())
    there = loader.num_windows * T if loader else 0
    val_there = sum(each.num_windows * T for each in parts.val_loaders)
    left = (c.max_steps - start.step) * S
    # a branch may begin a new order of the data
    read = left + (loader.position * T if loader else start.step * S)
    rows = [("model", f"{N:,} parameters on {world.size} x {world.device_name}, {c.dtype}")]
    rows += [("optimizer", text) for text in describe_groups(c, parts.optimizers)]
    if c.max_steps:
        at_most = "at most " if c.batch_ramp else ""
        passes = "" if c.data_weights or not there else f": {read / there:.2g} passes"
        tokens = f"{there:,} training tokens" if there else f"none yet in {' '.join(c.data)}"
        rows.append(("data", f"{tokens}; the run reads {at_most}{read:,}{'' if there else ' tokens'}{passes}"))
        for split, share in zip(loader.order.splits, loader.order.shares) if loader and len(c.data) > 1 else ():
            tokens = split.num_windows * T
            passes = f"{tokens:,} tokens, {share:.1%} of the run, {share * read / tokens:.2g} passes"
            rows.append(("", f"{split.folder}: {passes}"))
        optimal = short(TOKENS_PER_PARAMETER * N)
        rows.append(("", f"(compute-optimal for this size: {optimal}, by Hoffmann et al. 2022)"))
    if parts.enc:
        which = "from all of the split" if c.shuffle else "the first ones"
        validated = sum(min(c.val_tokens // T, each.num_windows) * T for each in parts.val_loaders)
        tokenizer = f"tokenizer {parts.enc.name}"
        rows.append(("validation", f"{validated:,} of {val_there:,} tokens, {which}; {tokenizer}"))
    else:
        rows.append(("assumed", f"a tokenizer of at most {c.vocab_size:,} ids, and data enough"))
    micro_steps = S // (B * T * world.size)
    rows.append(("step", f"{S:,} tokens = B {B} * T {T} * ranks {world.size} * micro-steps {micro_steps}"))
    seconds = 0.0
    if c.max_steps:
        flops = left * raw_model.flops_per_token(T)
        # of a GPU, the trial has no time
        seconds = left * found.seconds_per_token if world.device.type == "cpu" else 0.0
        takes = f", about {duration(seconds)} here" if seconds else ""
        a100 = [duration(flops / A100_FLOPS / gpus) for gpus in (1, 8)]
        a100 = f"{a100[0]} on an A100, {a100[1]} on 8, at 40% of their peak"
        rows.append(("compute", f"{flops:.2g} FLOPs{takes}{f': {a100}' if c.dry_run else ''}"))
        # in float32: weights, gradients and two numbers per parameter for the optimizer
        kept = f", at most {size(found.kept_bytes * B)} for activations" if found.kept_bytes else ""
        rows.append(("memory", f"{size(16 * N)} for weights and optimizer{kept}"))
        files = c.keep_checkpoints + (c.max_steps // c.milestone_every if c.milestone_every else 0)
        best = f", {size(4 * N)} for {BEST}" if c.keep_best else ""
        rows.append(("disk", f"{count(files, 'checkpoint')} of {size(12 * N)}{best}, {size(4 * N)} for hf/"))
    branched = f", a branch of {start.branched['parent']}" if start.branched else ""
    rows.append(("run", f"{c.out_dir}{branched}, from step {start.step} to {c.max_steps}"))
    for name, text in rows:
        print0(f"{name + ':' if name else '':<11} {text}")
    if seconds > 24 * 60 * 60:
        note("That is long. Use --preset quickstart or a smaller model here, or a GPU.")
    if c.dry_run and world.is_master:
        print("Nothing was written, because of --dry-run. The command without it begins the run.")
        print_next(
            train_command(type(c), {name: value for name, value in start.typed.items() if name != "dry_run"})
        )


def size(num_bytes: float) -> str:
    """2100000 -> "2.1 MB"."""
    text = short(num_bytes)
    return f"{text[:-1]} {text[-1]}B" if text[-1].isalpha() else f"{text} B"


def names_of_rates(config: Any) -> list[str]:
    """The settings that are peak learning rates."""
    return [name for name in vars(config) if name.endswith("_lr") and name != "min_lr"]


def rate_flags(config: Any, optimizers: list[Any]) -> list[str]:
    """The flags of the peak learning rates that the optimizers' groups have."""
    peaks = {group["initial_lr"] for optimizer in optimizers for group in optimizer.param_groups}
    return [flag_of(name) for name in names_of_rates(config) if getattr(config, name) in peaks] or ["--max-lr"]


def describe_groups(config: Any, optimizers: list[Any]) -> list[str]:
    """Of each optimizer and learning rate: how many parameters have it, and which setting it is."""
    sizes: dict[tuple[str, float], int] = collections.defaultdict(int)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            sizes[type(optimizer).__name__, group["lr"]] += sum(p.numel() for p in group["params"])
    flag_with = {getattr(config, name): flag_of(name) for name in names_of_rates(config)}
    return [
        f"{name} for {n:,} parameters, {flag_with.get(lr, 'rate')} {lr:g}" for (name, lr), n in sizes.items()
    ]
