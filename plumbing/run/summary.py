"""Prints before the first step what a run will do and cost. A dry run prints only this."""

import collections
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from plumbing.cli.console import count, duration, note, print0, print_next, short
from plumbing.run.checkpoint import BEST
from plumbing.run.commands import training_command
from plumbing.system import memory

TOKENS_PER_PARAMETER = 20  # in a compute-optimal run (Hoffmann et al. 2022, table 3), for tokens of BPE
BYTE_IDS = 512  # a tokenizer with no more ids has little more than bytes
A100_FLOPS = 312e12 * 0.4  # its peak in bfloat16, times the usual MFU of models of GPT-2's sizes
A100_PARAMETERS = 100_000_000  # smaller models do not reach this MFU
LONG = 24 * 60 * 60  # seconds

Row = tuple[str, str]  # (name, text); a name of "" continues the row above


def print_summary(start: Any, parts: Any) -> None:
    """Print what the run of this Start, with the trainer's `parts`, will do and cost."""
    seconds = 0.0
    if parts.world.device.type == "cpu":  # the trial does not measure the time of a GPU
        seconds = tokens_left(start) * parts.found.seconds_per_token
    time = f", about {duration(seconds)} here" if seconds else ""
    print_rows(training_rows(start, parts, time))
    if seconds > LONG:
        note("That takes more than a day. Use --preset quickstart, a smaller model or a GPU.")


def print_account(start: Any, parts: Any) -> None:
    """Print in a dry run what the run would do and cost, and the command that starts it."""
    time = ""
    if memory.count_parameters(parts.raw_model) >= A100_PARAMETERS:
        seconds = tokens_left(start) * parts.flops_per_token / A100_FLOPS
        time = f": {duration(seconds)} on an A100, {duration(seconds / 8)} on 8, at 40% of their peak"
    print_rows(training_rows(start, parts, time))
    print_rows(fit_rows(parts))
    if parts.world.is_master:
        print("This was a dry run, so nothing was written. To start the run, leave out --dry-run.")
        typed = {
            name: value for name, value in start.typed.items() if name not in ("dry_run", "gpus", "gpu_memory")
        }
        print_next(training_command(type(start.config), typed))


def print_evaluation(start: Any, parts: Any) -> None:
    """Print what an evaluation evaluates."""
    print_rows([model_row(parts), validation_row(parts), ("run", start.config.out_dir)])


def print_rows(rows: Iterable[Row]) -> None:
    """Print aligned lines."""
    for name, text in rows:
        label = f"{name}:" if name else ""
        print0(f"{label:<11} {text}")


def tokens_left(start: Any) -> int:
    return (start.config.max_steps - start.step) * start.config.total_batch_size


def training_rows(start: Any, parts: Any, time: str) -> Iterator[Row]:
    """time: how long the run takes, in words, or ""."""
    config = start.config
    yield model_row(parts)
    yield from group_rows(parts.optimizers)
    yield from data_rows(start, parts.loader)
    if config.vocab_size > BYTE_IDS:
        optimal = short(TOKENS_PER_PARAMETER * memory.count_parameters(parts.raw_model))
        yield "", f"(compute-optimal for this size: {optimal} tokens, by Hoffmann et al. 2022)"
    yield validation_row(parts)
    B, T, ranks = parts.found.B, config.sequence_length, parts.world.size
    micro_steps = config.total_batch_size // (B * T * ranks)
    step = f"{config.total_batch_size:,} tokens = B {B} * T {T} * ranks {ranks} * micro-steps {micro_steps}"
    yield "step", step
    yield "compute", f"{tokens_left(start) * parts.flops_per_token:.2g} FLOPs{time}"
    yield from size_rows(config, parts)
    branched = f", a branch of {start.branched['parent']}" if start.branched else ""
    yield "run", f"{config.out_dir}{branched}, from step {start.step} to {config.max_steps}"


def model_row(parts: Any) -> Row:
    parameters = memory.count_parameters(parts.raw_model)
    world = parts.world
    return "model", f"{parameters:,} parameters on {world.size} x {world.device_name}, {parts.config.dtype}"


def data_rows(start: Any, loader: Any) -> Iterator[Row]:
    """The number of tokens in the data, and how many of them the run reads."""
    config = start.config
    at_most = "at most " if config.batch_ramp else ""
    T = config.sequence_length
    tokens = loader.num_windows * T
    reads = loader.position * T + tokens_left(start)  # a branch may start a new order of the data
    if start.folders[0].is_assumed:
        yield "data", f"none yet in {' '.join(config.data)}; the run reads {at_most}{reads:,} tokens"
        return
    passes = "" if config.data_weights else f": {reads / tokens:.2g} passes"
    yield "data", f"{tokens:,} training tokens; the run reads {at_most}{reads:,}{passes}"
    if len(config.data) == 1:
        return
    for split, share in zip(loader.order.splits, loader.order.shares):
        tokens = split.num_windows * T
        passes = share * reads / tokens
        yield "", f"{split.folder.path}: {tokens:,} tokens, {share:.1%} of the run, {passes:.2g} passes"


def validation_row(parts: Any) -> Row:
    config = parts.config
    if parts.loader.order.splits[0].folder.is_assumed:
        return "assumed", f"a tokenizer of at most {config.vocab_size:,} ids, and enough data"
    T = config.sequence_length
    tokens = validated = 0
    for loader in parts.val_loaders:
        tokens += loader.num_windows * T
        validated += min(config.val_tokens // T, loader.num_windows) * T
    which = "drawn from all of them" if config.shuffle else "the first ones"
    return "validation", f"{validated:,} of {tokens:,} tokens, {which}; tokenizer: {parts.enc.name}"


def size_rows(config: Any, parts: Any) -> Iterator[Row]:
    """The memory and disk space that the run takes."""
    weights = sum(p.nbytes for p in parts.raw_model.parameters())
    state = sum(map(memory.state_bytes, parts.optimizers))
    account, B = parts.found.account, parts.found.B
    yield "memory", f"{size(account.state)} for weights, gradients and optimizer"
    if account.sequence:
        yield "", f"and {size(account.beside_state(B))} for B {B}: at most {size(account.total(B))} on each rank"
    checkpoints = config.keep_checkpoints
    if config.milestone_every:
        checkpoints += config.max_steps // config.milestone_every
    best = f", {size(weights)} for {BEST}" if config.keep_best else ""
    yield (
        "disk",
        f"{count(checkpoints, 'checkpoint')} of {size(weights + state)}{best}, {size(weights)} for hf/",
    )


def fit_rows(parts: Any) -> Iterator[Row]:
    """What to do if that does not fit."""
    world, layout = parts.world, parts.layout
    account, free = parts.found.account, world.free_memory()
    needed = account.total(parts.found.B)
    if needed <= free:
        return
    advice = "With --shard, several GPUs share it."
    if world.size > 1:
        advice = (
            f"With --shard, each of {world.size} ranks needs {size(account.state / world.size)} for the first."
        )
    if layout.shares > 1:
        advice = "Use more ranks, or a smaller model."
    yield "", f"That is more than the {size(free)} free here. {advice}"


def note_state(optimizers: list[Any]) -> None:
    """Note after the first step if the optimizers' state is not as large as guessed."""
    leaves, _ = tree_flatten([optimizer.state_dict() for optimizer in optimizers])
    found = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
    guessed = sum(map(memory.state_bytes, optimizers))
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
