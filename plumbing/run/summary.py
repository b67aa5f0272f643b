"""Prints before the first step what a run will do and cost. A dry run prints only this."""

import collections
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from plumbing.cli.console import count, duration, note, print0, print_next, short
from plumbing.run.checkpoint import BEST, parameters_of
from plumbing.run.commands import training_command
from plumbing.system import devices

TOKENS_PER_PARAMETER = 20  # in a compute-optimal run (Hoffmann et al. 2022, table 3), for tokens of BPE
BYTE_IDS = 512  # a tokenizer with no more ids has little more than bytes
A100_FLOPS = 312e12 * 0.4  # its peak in bfloat16, times the usual MFU of models of GPT-2's sizes
A100_PARAMETERS = 100_000_000  # smaller models do not reach this MFU
LONG = 24 * 60 * 60  # seconds

Row = tuple[str, str]  # (name, text); a name of "" continues the row above


def print_summary(start: Any, parts: Any) -> None:
    """Print in aligned lines what the run of this Start, with the trainer's `parts`, will do and cost."""
    config = start.config
    seconds = 0.0
    if parts.world.device.type == "cpu":  # the trial does not measure the time of a GPU
        seconds = tokens_left(start) * parts.found.seconds_per_token
    for name, text in make_rows(start, parts, seconds):
        label = f"{name}:" if name else ""
        print0(f"{label:<11} {text}")
    if seconds > LONG:
        note("That takes more than a day. Use --preset quickstart, a smaller model or a GPU.")
    if config.dry_run and parts.world.is_master:
        print("This was a dry run, so nothing was written. To start the run, leave out --dry-run.")
        typed = {name: value for name, value in start.typed.items() if name != "dry_run"}
        print_next(training_command(type(config), typed))


def tokens_left(start: Any) -> int:
    return (start.config.max_steps - start.step) * start.config.total_batch_size


def make_rows(start: Any, parts: Any, seconds: float) -> Iterator[Row]:
    """seconds: how long the run takes on this machine, or 0 if unknown."""
    config, world = start.config, parts.world
    T = config.sequence_length
    B = parts.found.B
    parameters = sum(p.numel() for p in parts.raw_model.parameters())
    yield "model", f"{parameters:,} parameters on {world.size} x {world.device_name}, {config.dtype}"
    yield from group_rows(parts.optimizers)
    if config.max_steps:
        yield from data_rows(start, parts.loader)
        if config.vocab_size > BYTE_IDS:
            optimal = short(TOKENS_PER_PARAMETER * parameters)
            yield "", f"(compute-optimal for this size: {optimal} tokens, by Hoffmann et al. 2022)"
    yield validation_row(config, parts)
    micro_steps = config.total_batch_size // (B * T * world.size)
    step = f"{config.total_batch_size:,} tokens = B {B} * T {T} * ranks {world.size} * micro-steps {micro_steps}"
    yield "step", step
    if config.max_steps:
        flops = tokens_left(start) * parts.raw_model.flops_per_token(T)
        yield "compute", f"{flops:.2g} FLOPs{describe_time(config, parameters, flops=flops, seconds=seconds)}"
        yield from size_rows(config, parts)
    branched = f", a branch of {start.branched['parent']}" if start.branched else ""
    yield "run", f"{config.out_dir}{branched}, from step {start.step} to {config.max_steps}"


def data_rows(start: Any, loader: Any) -> Iterator[Row]:
    """The number of tokens in the data, and how many of them the run reads."""
    config = start.config
    at_most = "at most " if config.batch_ramp else ""
    if not loader:
        reads = start.step * config.total_batch_size + tokens_left(start)
        yield "data", f"none yet in {' '.join(config.data)}; the run reads {at_most}{reads:,} tokens"
        return
    T = config.sequence_length
    tokens = loader.num_windows * T
    reads = loader.position * T + tokens_left(start)  # a branch may start a new order of the data
    passes = "" if config.data_weights else f": {reads / tokens:.2g} passes"
    yield "data", f"{tokens:,} training tokens; the run reads {at_most}{reads:,}{passes}"
    if len(config.data) == 1:
        return
    for split, share in zip(loader.order.splits, loader.order.shares):
        tokens = split.num_windows * T
        passes = share * reads / tokens
        yield "", f"{split.folder}: {tokens:,} tokens, {share:.1%} of the run, {passes:.2g} passes"


def validation_row(config: Any, parts: Any) -> Row:
    if not parts.enc:
        return "assumed", f"a tokenizer of at most {config.vocab_size:,} ids, and enough data"
    T = config.sequence_length
    num_windows = [loader.num_windows for loader in parts.val_loaders]
    tokens = sum(num_windows) * T
    validated = sum(min(config.val_tokens // T, number) for number in num_windows) * T
    which = "drawn from all of them" if config.shuffle else "the first ones"
    return "validation", f"{validated:,} of {tokens:,} tokens, {which}; tokenizer: {parts.enc.name}"


def describe_time(config: Any, parameters: int, *, flops: float, seconds: float) -> str:
    if seconds:
        return f", about {duration(seconds)} here"
    if not config.dry_run or parameters < A100_PARAMETERS:
        return ""
    on_one = duration(flops / A100_FLOPS)
    on_eight = duration(flops / A100_FLOPS / 8)
    return f": {on_one} on an A100, {on_eight} on 8, at 40% of their peak"


def size_rows(config: Any, parts: Any) -> Iterator[Row]:
    """The memory and disk space that the run takes."""
    weights = sum(p.nbytes for p in parts.raw_model.parameters())
    state = sum(map(state_bytes, parts.optimizers))
    activations = parts.found.kept_bytes * parts.found.B
    kept = f", at most {size(activations)} for activations" if activations else ""
    world = parts.world
    needed = 2 * weights + state
    if config.shard:
        needed /= world.size
    yield "memory", f"{size(needed)} for weights, gradients and optimizer{kept}"
    free = devices.free_memory(world.device)
    if config.dry_run and needed > free:
        advice = "With --shard, several GPUs share it."
        if world.size > 1:
            advice = f"With --shard, each of {world.size} ranks needs {size(needed / world.size)}."
        if config.shard:
            advice = "Use more ranks, or a smaller model."
        yield "", f"That is more than the {size(free)} free here. {advice}"
    checkpoints = config.keep_checkpoints
    if config.milestone_every:
        checkpoints += config.max_steps // config.milestone_every
    best = f", {size(weights)} for {BEST}" if config.keep_best else ""
    yield (
        "disk",
        f"{count(checkpoints, 'checkpoint')} of {size(weights + state)}{best}, {size(weights)} for hf/",
    )


def state_bytes(optimizer: Any) -> float:
    """A guess at the bytes of an optimizer's state: two numbers per parameter, as AdamW has, unless its class has
    numbers_per_parameter.
    """
    return getattr(optimizer, "numbers_per_parameter", 2) * sum(p.nbytes for p in parameters_of(optimizer))


def note_state(optimizers: list[Any]) -> None:
    """Note after the first step if the optimizers' state is not as large as guessed."""
    leaves, _ = tree_flatten([optimizer.state_dict() for optimizer in optimizers])
    found = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
    guessed = sum(map(state_bytes, optimizers))
    if abs(found - guessed) > 0.05 * guessed:
        note(f"The optimizers' state takes {size(found)}, and not {size(guessed)} as the account above assumes.")


def size(number: float) -> str:
    """2100000 -> "2.1 MB"."""
    text = short(number).replace("B", "G")
    return f"{text[:-1]} {text[-1]}B" if text[-1].isalpha() else f"{text} B"


def rate_flags(optimizers: list[Any]) -> list[str]:
    """The flags that set the peak learning rates of the optimizers' groups."""
    flags = {}
    for optimizer in optimizers:
        flags |= {group["flag"]: None for group in optimizer.param_groups if "flag" in group}
    return [*flags] or ["--max-lr"]


def group_rows(optimizers: list[Any]) -> Iterator[Row]:
    """A row for each optimizer and peak learning rate: the number of parameters, and the flag that sets the rate."""
    sizes: dict[tuple[str, str, float], int] = collections.defaultdict(int)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            key = type(optimizer).__name__, group.get("flag", "rate"), group["initial_lr"]
            sizes[key] += sum(p.numel() for p in group["params"])
    for (name, flag, rate), parameters in sizes.items():
        yield "optimizer", f"{name} for {parameters:,} parameters, {flag} {rate:g}"
