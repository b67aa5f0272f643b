"""How a run starts. What it is, is decided here, once: see NEW, CONTINUED and the others.

Rank 0 decides, while it holds the lock on the run's folder, and tells the other ranks. Settings come from the preset,
then from the run, its parent or its model, then from the command. The later ones win.
"""

import contextlib
import dataclasses
import functools
import math
import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from plumbing.cli.console import UserError, note, print0, quote
from plumbing.cli.flags import check, flag_of, preset_of
from plumbing.data import shards
from plumbing.data.windows import Folder, open_folders
from plumbing.files import FolderLock, lock_folder
from plumbing.run import checkpoint as checkpoints
from plumbing.run import checks, logs, models, source_code, wandb_log
from plumbing.run.checkpoint import Checkpoint
from plumbing.run.commands import print_next_command
from plumbing.run.huggingface import is_export_of
from plumbing.run.options import StartOptions, changed_settings, inheritable, names_of, per_node_names
from plumbing.run.run import Ended, export
from plumbing.system import devices, memory
from plumbing.system.distributed import ImaginedWorld, World
from plumbing.system.layout import Imagined, Whole, imagined
from plumbing.system.trial import Fit, Trial

NEW, CONTINUED, BRANCH, TUNED, EVALUATION = "new run", "continued run", "branch", "fine-tuning", "evaluation"
# make_config(inherited, typed, world, kind=, tokenizer=) makes and checks a TrainConfig, and opens its folders of data
MakeConfig = Callable[..., tuple[Any, Sequence[Folder]]]


class Source(NamedTuple):
    """What a start begins from."""

    kind: str  # of start
    name: str = ""  # what the user calls it
    settings: dict[str, Any] = {}  # to inherit
    saved: Checkpoint | None = None  # the run's newest checkpoint or, for a branch, its parent's
    model: models.SavedModel | None = None


class Start(NamedTuple):
    """The decision about a start. Only rank 0 has the weights, and what is needed to write."""

    kind: str
    config: Any  # the TrainConfig, made once
    typed: dict[str, Any]  # the typed settings, by name
    layout: Any = None  # how the ranks hold the model: a Whole or another class of that kind
    folders: Sequence[Folder] = ()  # this rank's folders of data
    # the checkpoint that it continues from; on other ranks than 0 without the state in LARGE_PARTS
    saved: Checkpoint | None = None
    branched: dict[str, Any] | None = None  # of a new branch: its parent, the step and the changes, for run.txt
    ended: Ended | None = None  # what a finished run ended with
    weights: dict[str, torch.Tensor] | None = None  # on rank 0: the state dict of the model to start from
    # on rank 0, for data with another tokenizer: the old ids of its tokens, see GPT.extend
    old_ids: torch.Tensor | None = None
    lock: FolderLock | None = None  # on rank 0: on the run's folder

    @property
    def step(self) -> int:
        return self.saved["step"] if self.saved else 0


def split_of(kind: str) -> str:
    """The split that a start of this kind reads in the order of the training."""
    return "val" if kind == EVALUATION else "train"


LARGE_PARTS = ("model", "optimizer", "own")  # of a checkpoint: the ranks share these out themselves


@contextlib.contextmanager
def begin(
    presets: Mapping[str, Any],
    typed: dict[str, Any],
    make_config: MakeConfig,
    *,
    model_class: type,
    world: World,
) -> Iterator[Start]:
    """Context that locks the run's folder and yields rank 0's decision, the same Start on all ranks.

    The presets are TrainConfigs.
    """
    asked = dataclasses.replace(preset_of(typed, presets), **typed)
    config_class = type(asked)
    if asked.init_from and asked.max_steps == 0 and "out_dir" not in typed:
        # an evaluation gets its own folder, because the model's run is often in the default one
        typed = typed | {"out_dir": f"{asked.out_dir}/eval"}
        asked = dataclasses.replace(asked, out_dir=typed["out_dir"])
    per_node = per_node_names(config_class)
    check_agreement(typed, config_class, per_node, world=world)
    world = imagined(asked, world)
    lock = world.run_on_master(lock_folder, asked.out_dir)  # before anything in the folder is read
    with lock or contextlib.nullcontext():
        decided = world.run_on_master(decide, asked, typed, make_config, world)
        start = world.broadcast_from_master(without_weights, decided)
        config = dataclasses.replace(start.config, **{name: typed[name] for name in typed.keys() & per_node})
        if decided:
            start = decided
        elif not start.ended:
            devices.choose_dtype(config.dtype, world.device)  # this rank's device may lack it
            folders = open_folders(config, split_of(start.kind), num_ids=config.vocab_size, tokenizer="")
            start = start._replace(folders=folders)
        layout = choose_layout(config, world)
        if start.ended:
            world.run_on_master(report_finished, start, model_class)
        with layout.explained():
            yield start._replace(config=config, layout=layout, lock=lock)


def choose_layout(config: Any, world: World) -> Whole:
    """How the ranks hold the model of this TrainConfig."""
    shares = world.size if config.shard else 1
    if config.shard and shares == 1:
        note("--shard splits a model across ranks. With a single process there is nothing to split.")
    if isinstance(world, ImaginedWorld):
        return Imagined(world, shares)
    if shares == 1:
        return Whole(world)
    from plumbing.system import sharding  # takes a second to import

    return sharding.Shared(world)


def without_weights(start: Start) -> Start:
    """What rank 0 tells the other ranks of a start. Weights and optimizer state follow when there is room for them."""
    saved: Any = start.saved
    if saved:
        saved = {name: value for name, value in saved.items() if name not in LARGE_PARTS}
    return start._replace(folders=(), saved=saved, weights=None, old_ids=None)


def check_agreement(typed: dict[str, Any], config_class: type, per_node: set[str], *, world: World) -> None:
    """Raise UserError unless all ranks have the same flags, code and torch. per_node: settings that may differ."""
    facts = {flag_of(name): value for name, value in typed.items() if name not in per_node}
    for name, copy in source_code.code_of(config_class).items():
        facts[f"the version of {name}"] = copy
    facts["the version of torch"] = str(torch.__version__)
    world.check_agreement(facts)


# ----- The decision -------------------------------------------------------------------------------------


def decide(asked: Any, typed: dict[str, Any], make_config: MakeConfig, world: World) -> Start:
    """Decide on rank 0 what this start is. asked: the preset with the typed settings applied."""
    source = find_source(asked, typed)
    kind, saved, model = source.kind, source.saved, source.model
    inherited = inheritable(type(asked), source.settings)
    if kind == BRANCH:
        inherited.pop("branch_from", None)
        parents = source.settings["data"]
        if [*map(os.path.realpath, typed.get("data", parents))] != [*map(os.path.realpath, parents)]:
            inherited.pop("data_weights", None)  # these are the shares of the parent's folders
    # "auto" keeps an inherited choice
    chosen = {name: value for name, value in typed.items() if value != "auto" or name not in inherited}
    ended = None
    if saved and kind == CONTINUED and saved["finished"]:
        ended = Ended(saved["step"], logs.last_values(Path(asked.out_dir, "log.txt")))
        config = dataclasses.replace(asked, **inherited | chosen)
        if not changed_settings(source.settings, config):  # its data may be gone
            return Start(kind, config, typed, saved=saved, ended=ended)
    tokenizer = ""
    if saved:
        tokenizer = saved["tokenizer"]
    elif model:
        tokenizer = model.enc.name
    config, folders = make_config(inherited, chosen, world, kind=kind, tokenizer=tokenizer)
    start = Start(kind, config, typed, folders=folders, saved=saved)
    if saved and kind == CONTINUED:
        refuse_another_recipe(source, config)
        if ended:
            return start._replace(ended=ended)
    elif kind == BRANCH:
        start = start_branch(source, start)
    if not model:
        return start
    say_what_is_taken_over(source, asked, typed, config=config)
    models.config_of(type(config.model_config), model.settings)  # UserError for a setting that GPTConfig lacks
    if kind != TUNED:  # weights that are trained further may as well be used in another way
        source_code.check_code(model.code, type(config), source.name, goes_on=True)
    elif not model.code and typed.keys().isdisjoint(("max_lr", "preset")):
        note(
            f"--max-lr is {config.max_lr:g}, as for a new model. For weights from elsewhere, 3e-5 is usual: add "
            "--max-lr 3e-5 --min-lr 3e-6."
        )
    enc = folders[0].enc
    if kind == TUNED and not models.is_tokenizer(tokenizer, enc):
        start = start._replace(old_ids=models.ids_in(model, enc))
    else:
        models.check_tokenizer(tokenizer, config, enc)
    return start._replace(weights=model.weights)


def find_source(asked: Any, typed: dict[str, Any]) -> Source:
    """What this start begins from. UserError if the command names two sources, or one that is not there."""
    if asked.branch_from and asked.init_from:
        raise UserError("--branch-from and --init-from both name the weights to start from. Give one of them.")
    if asked.branch_from:
        parent = folder_of(asked.branch_from)
        if parent.exists() and parent.samefile(asked.out_dir):  # --no-resume would move it aside
            raise UserError(
                f"--out-dir is the folder of the parent (--branch-from), {parent}. Name another folder for the branch."
            )
    own = load_own(asked)
    if own:
        return Source(CONTINUED, asked.out_dir, own["config"], own, models.from_checkpoint(own))
    if asked.branch_from:
        saved = checkpoints.load_state(asked.branch_from)
        if not saved:
            raise UserError(
                f"There is no checkpoint in {asked.branch_from} that can be continued. Give a run's folder or its "
                "model_*.pt, or use --init-from for weights alone."
            )
        return Source(BRANCH, asked.branch_from, saved["config"], saved, models.from_checkpoint(saved))
    if asked.init_from:
        model = models.load_saved_model(asked.init_from)
        kind = TUNED if asked.max_steps else EVALUATION
        return Source(kind, asked.init_from, model.settings, model=model)
    if "out_dir" in typed and typed.keys() <= names_of(StartOptions):
        left_out = "" if asked.resume else " under --no-resume"
        raise UserError(
            f"There is no checkpoint in {asked.out_dir} to continue from{left_out}. Give the folder of a run or, to "
            f"start one there, its settings as well, such as --preset {asked.preset}."
        )
    return Source(NEW if asked.max_steps else EVALUATION)


def start_branch(source: Source, start: Start) -> Start:
    """Complete the start of a branch. UserError if it would have no steps left."""
    config, parent = start.config, source.saved
    assert parent
    step = parent["step"]
    if step >= config.max_steps:
        raise UserError(
            f"The branch would end at step {config.max_steps}, but {source.name} has done {step} steps already. Raise "
            "--max-steps or --passes. To evaluate it, use --init-from instead of --branch-from."
        )
    changed = changed_settings(source.settings, config)
    changed.pop("branch_from", None)
    branched = {"parent": str(folder_of(source.name)), "step": step, "changed": changed}
    # the parent's best weights and its other checkpoints are not in the branch's folder
    fresh: Any = parent | {"best_val_loss": math.inf, "temporary": []}
    return start._replace(saved=fresh, branched=branched)


def load_own(asked: Any) -> Checkpoint | None:
    """The newest checkpoint of the run that continues in out_dir; None for a new run."""
    if asked.resume:
        return checkpoints.load_state(asked.out_dir)
    # with --no-resume, a run continues only if this same torchrun has started it, and restarts it after a crash
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return None
    saved = checkpoints.load_state(asked.out_dir)
    return saved if saved and saved["launch"] == logs.torchrun_id() else None


def folder_of(source: str) -> Path:
    """The folder of a run, given that folder or one of its checkpoints."""
    path = Path(source)
    return path.parent if path.is_file() else path


def refuse_another_recipe(source: Source, config: Any) -> None:
    """Raise UserError if the run in out_dir has another recipe than the command."""
    own: Any = source.saved
    changed = changed_settings(own["config"], config)
    if not changed:
        return
    step = own["step"]
    told = ", ".join(f"{name} was {then!r}, now {now!r}" for name, (then, now) in changed.items())
    kind = "finished run" if own["finished"] else "run"
    advice = "Start what you typed in another --out-dir, or add --no-resume to move this run aside."
    if not own["finished"]:
        advice = f"Leave these flags out to continue it. {advice}"
    if changed.keys().isdisjoint(("branch_from", "init_from")):
        # a branch keeps the shapes of the weights, and ends after the step that it starts from
        keeps_shapes = changed.keys().isdisjoint(vars(config.model_config))
        flag = "--branch-from" if keeps_shapes and config.max_steps > step else "--init-from"
        advice += f" To go on from its weights at step {step}, add {flag} {quote(config.out_dir)} --out-dir NEW."
    raise UserError(f"{config.out_dir} has a {kind} with other settings ({told}). {advice}")


def say_what_is_taken_over(source: Source, asked: Any, typed: dict[str, Any], *, config: Any) -> None:
    """Print the inherited settings that differ from the command's, unless it asks for them by a run's name alone."""
    preset = typed.get("preset")
    if config.branch_from and preset and preset != source.settings.get("preset"):
        note(f"A branch keeps its parent's settings, not those of --preset {preset}.")
    if not preset and (config.branch_from or typed.keys() <= names_of(StartOptions)):
        return
    taken = []
    for name, value in inheritable(type(config), source.settings).items():
        expected = getattr(asked, name)
        if name not in typed and value == getattr(config, name) and expected not in ("auto", value):
            shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
            taken.append(f"{name} {shown}")
    if taken:
        text = f"Settings inherited from {source.name}: {', '.join(taken)}."
        print0(textwrap.fill(text, 79, break_long_words=False, break_on_hyphens=False))


def check_config(
    config: Any, typed: dict[str, Any], complaints: Iterable[str], *, world: World, is_wide: bool
) -> Any:
    """A TrainConfig with its dtype chosen. Raises one UserError with everything that is wrong with it.

    complaints: the trainer's sentences; is_wide: see `devices.choose_dtype`.
    """
    found = [*complaints, *complaints_here(config, typed, world)]
    dtype = config.dtype
    try:
        dtype = world.choose_dtype(dtype, is_wide)
    except UserError as error:
        found.append(str(error))
    check(config, found)
    return dataclasses.replace(config, dtype=dtype)


def complaints_here(c: Any, typed: dict[str, Any], world: World) -> Iterator[str]:
    """A sentence for each setting of a TrainConfig that does not fit the others, this machine or its ranks."""
    folders = {os.path.realpath(folder) for folder in c.data}
    if len(folders) < len(c.data):
        yield f"--data names a folder twice: {' '.join(c.data)}. Name each once, and set shares with --data-weights."
    weights = c.data_weights
    if weights:
        one_each = len(weights) == len(c.data)
        if not one_each or min(weights) < 0 or not 0 < sum(weights) < math.inf:
            found = f"--data-weights is {' '.join(map(str, weights))}, and --data {' '.join(c.data)}"
            yield f"{found}. Give a share for each folder: 0 or more, and not all 0."
    if bool(c.passes) + bool(c.tokens_per_parameter) + bool(typed.get("max_steps")) > 1:
        yield "--passes, --tokens-per-parameter and --max-steps set the length of the run. Give one of them."
    if c.passes and weights:
        yield "--passes has no meaning with --data-weights: the folders' epochs differ. Give --max-steps instead."
    T, total = c.sequence_length, c.total_batch_size
    smallest = T * world.size
    if smallest > 0 and total > 0 and total % smallest:
        advice = "Try"
        if total % T == 0:
            advice = f"Use a number of ranks that divides {total // T} or, in a new run or a branch,"
        yield (
            f"--total-batch-size {total} is not a multiple of {smallest} (--sequence-length {T} x {world.size} "
            f"ranks). {advice} --total-batch-size {max(1, round(total / smallest)) * smallest}."
        )
    if c.val_every and c.val_tokens < T:
        yield f"--val-tokens is {c.val_tokens}, but it must be {T} or more, the length of one sequence."
    if c.wandb and not wandb_log.is_installed():
        yield "--wandb needs the package wandb. Install it with: pip install wandb"


# ----- What the run starts from -------------------------------------------------------------------------


def check_data(start: Start, loader: Any, val_loaders: list[Any]) -> None:
    """Raise UserError unless the data are complete, enough, the same on all ranks, and have ids of the model."""
    config, enc = start.config, start.folders[0].enc
    models.check_num_ids(config.vocab_size, enc)
    start.layout.world.check_agreement(
        {
            "the training data": loader.order.fingerprint,
            "the validation data": [each.order.fingerprint for each in val_loaders],
            "the tokenizer": enc.name,
        }
    )
    for folder in start.folders:
        shards.check_folder(folder)
    # with shares, a folder is read as often as needed
    if loader.order.name == "train" and not config.data_weights:
        named, num_windows = " ".join(config.data), loader.num_windows
        shards.check_size(named, "train", loader.T, num_windows=num_windows, at_least=config.total_batch_size)


def make_model(make: Callable[[Any], Any], start: Start, *, shard: Any, text: Any) -> Any:
    """The model that the run starts with, as the ranks hold it.

    make(config): a new model for this TrainConfig; shard: see `Shared`; text: a batch of data (B, T).
    """
    return start.layout.make(
        start.config,
        functools.partial(first_model, make, start),
        functools.partial(memory.new_model, make),
        examine=functools.partial(examine, start, text),
        shard=shard,
    )


def examine(start: Start, text: Any, model: Any) -> bool:
    """Whether a cache works for the model of this start. text: a batch of data (B, T)."""
    return checks.examine(model, start.folders[0].enc.n_vocab, start.config.block_size, text)


def first_model(make: Callable[[Any], Any], start: Start, config: Any) -> Any:
    """On rank 0: a new model, or one with the weights that the run starts from.

    UserError if a branch's settings change a weight's shape.
    """
    weights = start.weights
    if weights is None:
        memory.check_memory(functools.partial(make, config), start.layout.world, shares=start.layout.shares)
        return memory.new_model(make, config)
    # the buffers of a branch may have other shapes
    model = models.from_state(make, config, weights, extends=start.kind != CONTINUED, old_ids=start.old_ids)
    for name, p in model.named_parameters():
        if start.kind == BRANCH and name in weights and p.shape != weights[name].shape:
            raise UserError(
                f"With the typed settings, {name} has {len(p)} rows instead of {len(weights[name])}, and a branch "
                "keeps the shapes of its parent's weights. Leave out the flags that change the model, or start a new "
                "run from these weights, with --init-from instead of --branch-from."
            )
    return model


def try_out(start: Start, model: Any, optimizers: list[Any], *, text: Any, **functions: Any) -> Fit:
    """Find what works on this machine and the largest B that fits, and examine the model, which stays as it is.

    text: a batch of data (B, T); functions: the trainer's, see `Trial`.
    """
    if optimizers:
        checks.check_groups(model, optimizers)
    trial = Trial(
        model,
        optimizers,
        **functions,
        num_ids=start.folders[0].enc.n_vocab,
        config=start.config,
        layout=start.layout,
    )
    return start.layout.try_out(trial, functools.partial(examine, start, text))


def report_finished(start: Start, model_class: type) -> None:
    """Say that the run is finished, and export its model again if hf/ lacks it and the code is the same."""
    config, saved = start.config, start.saved
    assert saved
    out_dir, step = Path(config.out_dir), saved["step"]
    enc = models.tokenizer_of(saved)
    source_code.check_code(saved["code"], type(config), config.out_dir, goes_on=True)
    print(f"The run in {out_dir} is finished after {step} steps.")
    has_same_code = source_code.is_same(saved["code"], type(config))
    if has_same_code and not config.dry_run and not is_export_of(out_dir / "hf", saved["model"], enc):
        model = models.from_state(model_class, config.model_config, saved["model"])
        export(out_dir, model, enc)
    model_path = out_dir / "hf"
    if not model_path.exists():
        model_path = checkpoints.list_checkpoints(out_dir)[-1]
    print(f"Its model is in {model_path}.")
    print("To train again, name another --out-dir, or add --no-resume to move this run aside.")
    print_next_command(config, enc)
