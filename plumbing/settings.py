"""The settings of a run: what they may be, and what may change on resuming, in a branch, and between ranks."""

import dataclasses
import hashlib
import math
import textwrap
from collections.abc import Iterator
from typing import Any

import torch

from plumbing import checkpoint as checkpoints
from plumbing import machine, mirror
from plumbing.distributed import World
from plumbing.flags import check, flag_of
from plumbing.program import ROOT, UserError, plain, print0

# settings that may change when a run is resumed, because they do not affect what the model learns
MAY_CHANGE_ON_RESUME = set(
    "preset passes out_dir resume device compile activation_checkpointing batch_size data val_every hellaswag_every "
    "hellaswag_limit hellaswag_data sample_every sample_prompt checkpoint_every keep_checkpoints keep_best "
    "milestone_every wandb".split()
)
AS_THE_RUN_HAS_IT = {"dtype": "auto", "vocab_size": 0, "branch_from": ""}  # what these values mean on resuming
# settings that may differ from node to node
MAY_DIFFER_BETWEEN_RANKS = {"data", "out_dir", "init_from", "branch_from", "hellaswag_data", "device"}
# settings that a branch must share with its parent, because the state depends on them
SAME_IN_A_BRANCH = {*checkpoints.SHAPE, "init_from", "optimizer", "sequence_length", "seed", "shuffle"}
# settings that a branch does not take over from its parent
OWN_IN_A_BRANCH = {"preset", "passes", "out_dir", "resume", "branch_from", "device", "compile"}

# ----- What they may be ---------------------------------------------------------------------------------


def check_config(config: Any, world: World) -> None:
    """Raise one UserError with everything that is wrong with the TrainConfig `config` on these ranks."""
    positive = "n_layer n_head n_embd block_size batch_size sequence_length total_batch_size max_steps max_lr"
    positive += " val_tokens keep_checkpoints"
    check(config, complaints(config, world), positive.split(), ["beta1", "beta2", "muon_momentum"])


def complaints(c: Any, world: World) -> Iterator[str]:
    """A sentence for each thing that is wrong with the TrainConfig `c`, except for numbers that are out of range."""
    T, total, smallest = c.sequence_length, c.total_batch_size, c.sequence_length * world.size
    try:
        machine.choose_dtype(c.dtype, world.device, c.n_embd)
    except UserError as error:
        yield str(error)
    if c.n_embd > 0 and c.n_head > 0 and c.n_embd % c.n_head:
        divisors = [n for n in range(1, c.n_embd + 1) if c.n_embd % n == 0]
        heads = min(divisors, key=lambda n: (abs(n - c.n_head), -n))
        yield (
            f"--n-embd {c.n_embd} is not a multiple of --n-head {c.n_head}. "
            f"Try --n-head {heads}, or --n-embd {nearest_multiple(c.n_embd, 8 * c.n_head)}."
        )
    if T > 0 and total > 0 and total % smallest:
        ranks = f"Start a number of ranks that divides {total // T}, or try" if total % T == 0 else "Try"
        yield (
            f"--total-batch-size {total} is not a multiple of {smallest} (--sequence-length {T} x {world.size} "
            f"ranks). {ranks} --total-batch-size {nearest_multiple(total, smallest)}."
        )
    if c.batch_ramp and T > 0 and (total % 2**15 or 2**15 % smallest):
        yield (
            f"A batch ramp grows in steps of 32,768 tokens: that must be a multiple of {smallest} (--sequence-length "
            "x ranks), and --total-batch-size a multiple of it. Change these, or leave --batch-ramp out."
        )
    # a lower bound: weights, gradients and Adam's two moments in float32, and 64 KB of Python's objects per block
    num_params = c.n_layer * (12 * c.n_embd**2 + 13 * c.n_embd)
    num_params += (c.vocab_size + c.block_size + 2) * c.n_embd
    needed, available = 16 * num_params + c.n_layer * 2**16, machine.total_memory(world.device)
    if needed > available:
        yield (
            f"This model's {num_params:,} or more parameters need {needed // 2**30:,} GiB to be trained, but there are "
            f"{available / 2**30:,.0f} GiB. Lower --n-layer, --n-embd, --vocab-size or --block-size."
        )
    if not c.out_dir:
        yield "--out-dir is empty. Give the folder in which the run is to be kept."
    if T > c.block_size:
        longer = "" if c.init_from or c.branch_from else ", or raise --block-size"
        yield f"--sequence-length {T} is above --block-size {c.block_size}. Lower it{longer}."
    if c.val_tokens < T:
        yield f"--val-tokens is {c.val_tokens}, but it must be {T} or more, the length of one sequence."
    if c.decay_fraction > 1:
        yield f"--decay-fraction is {c.decay_fraction}, but it must be between 0 and 1."
    if c.preset == "chat" and not (c.init_from or c.branch_from):
        yield "--preset chat fine-tunes a model. Name one with --init-from, for example --init-from log or gpt2."
    if c.wandb and not mirror.is_installed():
        yield "--wandb needs the package wandb. Install it with: pip install wandb"
    for name in ("sequence_length", "n_embd", "vocab_size") if c.dtype == "fp8" else ():
        value = getattr(c, name)
        if value % 16:
            up = math.ceil(value / 16) * 16  # a vocabulary that is rounded down has no room for the tokenizer
            yield f"{flag_of(name)} {value} is not a multiple of 16, as --dtype fp8 needs. Try {flag_of(name)} {up}."


def nearest_multiple(value: int, unit: int) -> int:
    return max(unit, (value + (unit - 1) // 2) // unit * unit)


# ----- What another run or model gives ------------------------------------------------------------------


def inherit(config: Any) -> dict[str, Any]:
    """The settings that a branch takes from its parent or, for fine-tuning, the lengths that its model can read."""
    source = config.branch_from or config.init_from
    if not source:
        return {}
    own = [config.out_dir] if config.resume else []  # it has the settings, too, in case the other model is gone
    then = checkpoints.peek_settings(*own, source)
    if not config.branch_from:
        longest = then.get("block_size", math.inf)
        return {name: min(longest, getattr(config, name)) for name in ("block_size", "sequence_length")}
    if "max_steps" not in then:  # the settings of a run have it
        raise UserError(
            f"There is no checkpoint in {source} that can be continued. Give a run's folder or its model_*.pt, or use "
            "--init-from for weights alone."
        )
    return {name: value for name, value in then.items() if hasattr(config, name) and name not in OWN_IN_A_BRANCH}


def print_notes(config: Any, preset: Any, inherited: dict[str, Any]) -> None:
    """Say which settings of the run are inherited and not those of its preset, and which have no effect."""
    if config.keep_best > preset.keep_best and not config.val_every:
        print0("note: --keep-best has no effect, because --val-every is 0.")
    if config.warmup_steps > config.max_steps and not config.passes:
        print0(f"note: The run ends in its warmup: --warmup-steps {config.warmup_steps} is above --max-steps.")
    if config.min_lr > config.max_lr and config.schedule == "cosine":
        print0(f"note: The learning rate grows at the end: --min-lr {config.min_lr} is above --max-lr.")
    taken = [
        f"{name} {value}"
        for name, value in inherited.items()
        if value == getattr(config, name) != getattr(preset, name)
    ]
    if taken:
        source = config.branch_from or config.init_from
        text = plain(f"Settings taken over from {source}: {', '.join(taken)}.", 2000)
        print0(textwrap.fill(text, 79, break_long_words=False, break_on_hyphens=False))


def with_passes(config: Any, num_windows: int) -> Any:
    """The settings with --max-steps computed from --passes over this many training sequences, if --passes is given."""
    if not config.passes:
        return config
    if config.passes > 4:
        print0("note: Beyond four passes over a text, further ones add little (Muennighoff et al. 2023).")
    max_steps = max(1, round(config.passes * num_windows * config.sequence_length / config.total_batch_size))
    warmup_steps = min(config.warmup_steps, max_steps // 10)  # unchanged, but at most a tenth of the run
    return dataclasses.replace(config, max_steps=max_steps, warmup_steps=warmup_steps)


def changes(config: Any, then: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """{name: (then, now)} of the settings that affect the losses and in which `config` differs from those of a run."""
    # a setting that did not exist yet counts as TrainConfig's default
    now, then = dataclasses.asdict(config), dataclasses.asdict(type(config)()) | then
    free = MAY_CHANGE_ON_RESUME | {name for name, value in AS_THE_RUN_HAS_IT.items() if now[name] == value}
    if config.init_from:
        free |= {*checkpoints.SHAPE}  # the model's
    different = {}
    for name, before in then.items():
        after = now.get(name, "unknown")
        if name not in free and str(before).rstrip("/") != str(after).rstrip("/"):  # "log/" is the folder "log"
            different[name] = (before, after)
    return different


def in_words(different: dict[str, tuple[Any, Any]]) -> str:
    """The result of `changes` in words."""
    return ", ".join(f"{name} was {then!r}, now {now!r}" for name, (then, now) in different.items())


def facts_for_all_ranks(config: Any) -> dict[str, Any]:
    """Facts that must be the same on all ranks: settings, and the versions of this program and of torch."""
    facts = {name: value for name, value in vars(config).items() if name not in MAY_DIFFER_BETWEEN_RANKS}
    source = (ROOT / "train_gpt2.py").read_bytes()
    facts["the version of train_gpt2.py"] = hashlib.sha256(source).hexdigest()[:12]
    facts["the version of torch"] = str(torch.__version__)
    return facts
