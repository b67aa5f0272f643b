"""The settings of a run: what they may be, and what may change on resuming, in a branch, and between ranks."""

import dataclasses
import itertools
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from plumbing.cli.console import UserError, print0, quote
from plumbing.cli.flags import check
from plumbing.run import checkpoint as checkpoints
from plumbing.run import logs, source_code, wandb_log
from plumbing.system import devices
from plumbing.system.distributed import World

# settings that may change when a run is resumed, because they do not affect what the model learns
MAY_CHANGE_ON_RESUME = set(
    "preset passes out_dir resume dry_run device compile activation_checkpointing batch_size data val_every "
    "hellaswag_every hellaswag_limit hellaswag_data sample_every sample_prompt checkpoint_every keep_checkpoints "
    "keep_best milestone_every wandb".split()
)
AS_THE_RUN_HAS_IT = {"dtype": "auto", "branch_from": ""}  # what these values mean on resuming
# settings that may differ from node to node
MAY_DIFFER_BETWEEN_RANKS = {"data", "out_dir", "init_from", "branch_from", "hellaswag_data", "device"}
# settings that a branch must share with its parent, besides those of the model, because the state depends on them
SAME_IN_A_BRANCH = {"init_from", "optimizer", "sequence_length", "seed", "shuffle"}
# settings that a branch does not take over from its parent
OWN_IN_A_BRANCH = {"preset", "passes", "out_dir", "resume", "dry_run", "branch_from", "device", "compile"}

# ----- What they may be ---------------------------------------------------------------------------------


def check_config(config: Any, world: World, of_the_model: Iterable[str], above_0: Iterable[str] = ()) -> None:
    """Raise one UserError with everything that is wrong with the TrainConfig `config` on these ranks.

    of_the_model: a sentence for each thing that is wrong with the model's fields; above_0: those that must not be 0.
    """
    positive = "batch_size sequence_length total_batch_size max_lr val_tokens keep_checkpoints".split()
    errors = itertools.chain(of_the_model, complaints(config, world))
    check(config, errors, [*above_0, *positive], ["beta1", "beta2", "muon_momentum"])


def complaints(c: Any, world: World) -> Iterator[str]:
    """A sentence for each thing that is wrong with the TrainConfig `c`, except for numbers that are out of range."""
    T, total, smallest = c.sequence_length, c.total_batch_size, c.sequence_length * world.size
    try:
        devices.choose_dtype(c.dtype, world.device)
    except UserError as error:
        yield str(error)
    if T > 0 and total > 0 and total % smallest:
        ranks = f"Start a number of ranks that divides {total // T}, or try" if total % T == 0 else "Try"
        nearest = ["--total-batch-size", str(max(1, round(total / smallest)) * smallest)]
        yield (
            f"--total-batch-size {total} is not a multiple of {smallest} (--sequence-length {T} x {world.size} "
            f"ranks). {ranks} {' '.join(nearest)}: {' '.join(map(quote, [*logs.command(), *nearest]))}"
        )
    if c.batch_ramp and T > 0 and (total % 2**15 or 2**15 % smallest):
        yield (
            f"A batch ramp grows in steps of 32,768 tokens: that must be a multiple of {smallest} (--sequence-length "
            "x ranks), and --total-batch-size a multiple of it. Change these, or leave --batch-ramp out."
        )
    if c.val_every and c.val_tokens < T:
        yield f"--val-tokens is {c.val_tokens}, but it must be {T} or more, the length of one sequence."
    if c.decay_fraction > 1:
        yield f"--decay-fraction is {c.decay_fraction}, but it must be between 0 and 1."
    if c.preset == "chat" and not (c.init_from or c.branch_from):
        yield "--preset chat fine-tunes a model. Name one with --init-from, for example --init-from log or gpt2."
    if c.wandb and not wandb_log.is_installed():
        yield "--wandb needs the package wandb. Install it with: pip install wandb"


# ----- What another run or model gives ------------------------------------------------------------------


def inherit(config: Any) -> dict[str, Any]:
    """The settings that a branch takes from its parent or, for fine-tuning, those of the model that it begins with."""
    source = config.branch_from or config.init_from
    if not source:
        return {}
    # a run that continues has the settings, too, in case the other model is gone; an evaluation is never continued
    continues = config.resume and (config.branch_from or config.max_steps)
    own = [config.out_dir] if continues else []
    then, of_the_model = checkpoints.peek_settings(*own, source)
    if not config.branch_from:
        # an evaluation has a folder of its own, unless a flag names one: it is often that of the model's run
        own_folder = {} if config.max_steps else {"out_dir": f"{config.out_dir}/eval"}
        return own_folder | {name: then[name] for name in of_the_model if hasattr(config, name) and name in then}
    if "max_steps" not in then:  # the settings of a run have it
        raise UserError(
            f"There is no checkpoint in {source} that can be continued. Give a run's folder or its model_*.pt, or use "
            "--init-from for weights alone."
        )
    return {name: value for name, value in then.items() if hasattr(config, name) and name not in OWN_IN_A_BRANCH}


def print_notes(config: Any, preset: Any, inherited: dict[str, Any]) -> None:
    """Say which settings of the run are inherited and not those of its preset."""
    if config.branch_from and config.preset != type(config)().preset:
        print0(f"note: A branch has its parent's settings, and not those of --preset {config.preset}.")
    taken = [
        f"{name} {value}"
        for name, value in inherited.items()
        if value == getattr(config, name) != getattr(preset, name) and name not in OWN_IN_A_BRANCH
    ]
    if taken:
        text = f"Settings taken over from {config.branch_from or config.init_from}: {', '.join(taken)}."
        print0(textwrap.fill(text, 79, break_long_words=False, break_on_hyphens=False))


def with_passes(config: Any, num_windows: int) -> Any:
    """The settings with --max-steps computed from --passes over this many training sequences, if --passes is given."""
    if not config.passes:
        return config
    max_steps = max(1, round(config.passes * num_windows * config.sequence_length / config.total_batch_size))
    warmup_steps = min(config.warmup_steps, max_steps // 10)  # unchanged, but at most a tenth of the run
    return dataclasses.replace(config, max_steps=max_steps, warmup_steps=warmup_steps)


def changes(config: Any, then: dict[str, Any], fixed: bool = False) -> dict[str, tuple[Any, Any]]:
    """{name: (then, now)} of the settings that affect the losses and in which `config` differs from those of a run.

    fixed: only those that a branch, too, must share with its parent.
    """
    # a setting that did not exist yet counts as TrainConfig's default
    now, then = dataclasses.asdict(config), dataclasses.asdict(type(config)()) | then
    free = MAY_CHANGE_ON_RESUME | {name for name, value in AS_THE_RUN_HAS_IT.items() if now[name] == value}
    if fixed:
        free |= then.keys() - {*SAME_IN_A_BRANCH, *checkpoints.model_fields(config)}
    both = {name: (then[name], now.get(name, "unknown")) for name in then if name not in free}
    # "log/" is the folder "log"
    return {name: pair for name, pair in both.items() if len({str(value).rstrip("/") for value in pair}) == 2}


def in_words(different: dict[str, tuple[Any, Any]]) -> str:
    """The result of `changes` in words."""
    return ", ".join(f"{name} was {then!r}, now {now!r}" for name, (then, now) in different.items())


def facts_for_all_ranks(config: Any) -> dict[str, Any]:
    """Facts that must be the same on all ranks: settings, and the versions of this program and of torch."""
    facts = {name: value for name, value in vars(config).items() if name not in MAY_DIFFER_BETWEEN_RANKS}
    code = source_code.describe(type(config))
    facts[f"the version of {code['name']}"] = code["copy"]
    facts["the version of torch"] = str(torch.__version__)
    return facts
