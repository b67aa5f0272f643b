"""How a run starts. It is decided here, once: a run that continues, a branch, a fine-tuning or a new run.

Rank 0 decides, while it holds the lock on the run's folder, and tells the other ranks. Settings come from the preset,
then from the run, its parent or its model, then from the command. The later ones win.
"""

import contextlib
import dataclasses
import functools
import math
import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from plumbing.cli.console import UserError, first_line, note, print0, quote
from plumbing.cli.flags import check, flag_of
from plumbing.data import shards
from plumbing.files import FolderLock, lock_folder
from plumbing.run import checkpoint as checkpoints
from plumbing.run import checks, logs, models, source_code, wandb_log
from plumbing.run.checkpoint import Checkpoint
from plumbing.run.commands import print_next_command
from plumbing.run.huggingface import is_export_of
from plumbing.run.options import StartOptions, changed_settings, inheritable, is_per_node, names_of
from plumbing.run.run import Ended, export
from plumbing.system import devices, memory
from plumbing.system.distributed import World
from plumbing.system.trial import Fit, Trial, estimate, find_what_fits, try_sharded, undone

MakeConfig = Callable[[dict[str, Any], dict[str, Any], World], Any]


class Start(NamedTuple):
    """The decision about a start: the config, and a checkpoint or weights to start from, None for a new model."""

    config: Any  # the TrainConfig, made once
    typed: dict[str, Any]  # the typed settings, by name
    saved: Checkpoint | None = None  # the run's newest checkpoint or, for a new branch, its parent's
    weights: dict[str, torch.Tensor] | None = None  # the state dict of the model to start from
    branched: dict[str, Any] | None = None  # of a new branch: its parent, the step and the changes, for run.txt
    # for data with another tokenizer: the old ids of its tokens, see GPT.extend
    old_ids: torch.Tensor | None = None
    ended: Ended | None = None  # what a finished run ended with
    lock: FolderLock | None = None  # on the run's folder, held by rank 0

    @property
    def step(self) -> int:
        return self.saved["step"] if self.saved else 0


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

    make_config(inherited, typed, world) makes and checks a TrainConfig. The presets are TrainConfigs as well.
    """
    asked = dataclasses.replace(presets[typed.get("preset", next(iter(presets)))], **typed)
    config_class = type(asked)
    if asked.init_from and asked.max_steps == 0 and "out_dir" not in typed:
        # an evaluation gets its own folder, because the model's run is often in the default one
        typed = typed | {"out_dir": f"{asked.out_dir}/eval"}
        asked = dataclasses.replace(asked, out_dir=typed["out_dir"])
    per_node = {field.name for field in dataclasses.fields(config_class) if is_per_node(field)}
    check_agreement(typed, config_class, per_node, world=world)
    lock = world.run_on_master(lock_folder, asked.out_dir)  # before anything in the folder is read
    with lock or contextlib.nullcontext():
        request = Request(asked, typed, make_config, world=world)
        start = world.broadcast_from_master(decide, request, keeps=is_sharded)
        if asked.shard and world.size == 1:
            note("--shard splits a model across ranks. With a single process there is nothing to split.")
        devices.choose_dtype(start.config.dtype, world.device)  # another rank's device may lack it
        if start.ended:
            world.run_on_master(report_finished, start.config, start.saved, model_class)
        own_paths = {name: value for name, value in typed.items() if name in per_node}
        config = dataclasses.replace(start.config, **own_paths)
        try:
            yield start._replace(config=config, typed=typed, lock=lock)
        except AssertionError as error:
            if not config.shard or "FSDP" not in str(error):
                raise
            raise UserError(
                f"--shard: {first_line(error)}. Leave --shard out, or change the code that needs this."
            ) from None


def is_sharded(start: Start) -> bool:
    """Whether the run is sharded. Then only rank 0 ever has all weights and optimizer state, and hands them out."""
    return start.config.shard


def check_agreement(typed: dict[str, Any], config_class: type, per_node: set[str], *, world: World) -> None:
    """Raise UserError unless all ranks have the same flags, code and torch. per_node: settings that may differ."""
    facts = {flag_of(name): value for name, value in typed.items() if name not in per_node}
    for name, copy in source_code.code_of(config_class).items():
        facts[f"the version of {name}"] = copy
    facts["the version of torch"] = str(torch.__version__)
    world.check_agreement(facts)


# ----- The decision -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Request:
    """A command: its settings, and how to make a config of them."""

    asked: Any  # the preset with the typed settings applied
    typed: dict[str, Any]
    make_config: MakeConfig
    world: World = dataclasses.field(kw_only=True)

    def config(self, settings: dict[str, Any], *, without: Iterable[str] = ()) -> Any:
        """The config of a run that inherits the settings of a checkpoint or a model, except those in `without`."""
        inherited = inheritable(type(self.asked), settings)
        for name in without:
            inherited.pop(name, None)
        # "auto" keeps an inherited choice
        typed = {name: value for name, value in self.typed.items() if value != "auto" or name not in inherited}
        return self.make_config(inherited, typed, self.world)


def decide(request: Request) -> Start:
    """Decide on rank 0 what this start is: a run that continues, a branch, a fine-tuning or a new run."""
    asked, typed = request.asked, request.typed
    if asked.branch_from and asked.init_from:
        raise UserError("--branch-from and --init-from both name the weights to start from. Give one of them.")
    if asked.branch_from:
        check_folder_of_branch(folder_of(asked.branch_from), asked.out_dir)
    own = load_own(asked)
    if own:
        return continue_run(own, request)
    if asked.branch_from:
        return start_branch(checkpoints.load_parent(asked.branch_from), request)
    if asked.init_from:
        return start_from_model(models.load_saved_model(asked.init_from), request)
    if "out_dir" in typed and typed.keys() <= names_of(StartOptions):
        left_out = "" if asked.resume else " under --no-resume"
        raise UserError(
            f"There is no checkpoint in {asked.out_dir} to continue from{left_out}. Give the folder of a run or, to "
            f"start one there, its settings as well, such as --preset {asked.preset}."
        )
    return Start(request.config({}), typed)


def continue_run(own: Checkpoint, request: Request) -> Start:
    """Continue the run in out_dir from its newest checkpoint, unless it is finished."""
    config = request.config(own["config"])
    changed = changed_settings(own["config"], config)
    if changed:
        refuse_another_recipe(own, config, changed)
    if own["finished"]:
        ended = Ended(own["step"], logs.last_values(Path(config.out_dir, "log.txt")))
        return Start(config, request.typed, own, ended=ended)
    say_what_is_taken_over(own["config"], config, request, source=config.out_dir)
    model = models.from_checkpoint(own)
    check_model(model, config, source=config.out_dir)
    models.check_tokenizer(own["tokenizer"], config)
    return Start(config, request.typed, own)


def start_branch(parent: Checkpoint, request: Request) -> Start:
    """Start a new run from another run's state, with other settings. UserError if it would have no steps left."""
    settings, step = parent["config"], parent["step"]
    without = ["branch_from"]
    folders, parents = request.asked.data, settings["data"]
    has_other_data = [*map(os.path.realpath, folders)] != [*map(os.path.realpath, parents)]
    if has_other_data and "data" in request.typed and "data_weights" not in request.typed:
        without.append("data_weights")  # these are the shares of the parent's folders
    config = request.config(settings, without=without)
    source = config.branch_from
    say_what_is_taken_over(settings, config, request, source=source)
    if step >= config.max_steps:
        raise UserError(
            f"The branch would end at step {config.max_steps}, but {source} has done {step} steps already. Raise "
            "--max-steps or --passes. To evaluate it, use --init-from instead of --branch-from."
        )
    model = models.from_checkpoint(parent)
    check_model(model, config, source=source)
    models.check_tokenizer(parent["tokenizer"], config)
    changed = changed_settings(settings, config)
    changed.pop("branch_from", None)
    branched = {"parent": str(folder_of(source)), "step": step, "changed": changed}
    # the parent's best weights and its other checkpoints are not in the branch's folder
    parent["best_val_loss"] = math.inf
    parent["temporary"] = []
    return Start(config, request.typed, parent, branched=branched)


def start_from_model(model: models.SavedModel, request: Request) -> Start:
    """Start a new run from a model's weights. For data with another tokenizer, it gets a row for each of its ids."""
    config = request.config(model.settings)
    old_ids = models.ids_in(model, config)
    if old_ids is not None:
        config = request.config(model.settings, without=["vocab_size"])
    say_what_is_taken_over(model.settings, config, request, source=config.init_from)
    models.config_of(type(config.model_config), model.settings)
    if not config.max_steps:  # weights that are trained further may as well be used in another way
        source_code.check_code(model.code, type(config), config.init_from, goes_on=True)
    if not model.code and config.max_steps and request.typed.keys().isdisjoint(("max_lr", "preset")):
        note(
            f"--max-lr is {config.max_lr:g}, as for a new model. For weights from elsewhere, 3e-5 is usual: add "
            "--max-lr 3e-5 --min-lr 3e-6."
        )
    if old_ids is None:
        models.check_tokenizer(model.enc.name, config)
    return Start(config, request.typed, weights=model.weights, old_ids=old_ids)


def load_own(asked: Any) -> Checkpoint | None:
    """The newest checkpoint of the run that continues in out_dir; None for a new run."""
    if asked.resume:
        return checkpoints.load_state(asked.out_dir)
    if not logs.is_restarted():
        return None
    # with --no-resume, a run continues only if this same torchrun has started it, and restarts it after a crash
    saved = checkpoints.load_state(asked.out_dir)
    return saved if saved and saved["launch"] == logs.torchrun_id() else None


def folder_of(source: str) -> Path:
    """The folder of a run, given that folder or one of its checkpoints."""
    path = Path(source)
    return path.parent if path.is_file() else path


def check_folder_of_branch(parent: Path, out_dir: str) -> None:
    """Raise UserError if the branch has its parent's folder, which --no-resume would move aside."""
    if parent.exists() and parent.samefile(out_dir):
        raise UserError(
            f"--out-dir is the folder of the parent (--branch-from), {parent}. Name another folder for the branch."
        )


def refuse_another_recipe(own: Checkpoint, config: Any, changed: dict[str, tuple[Any, Any]]) -> None:
    """Raise UserError: the run in out_dir has another recipe than the command. changed: {setting: (then, now)}."""
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


def say_what_is_taken_over(settings: dict[str, Any], config: Any, request: Request, *, source: str) -> None:
    """Print the inherited settings that differ from the command's, unless it asks for them by a run's name alone."""
    asked, typed = request.asked, request.typed
    preset = typed.get("preset")
    if config.branch_from and preset and preset != settings.get("preset"):
        note(f"A branch keeps its parent's settings, not those of --preset {preset}.")
    if not preset and (config.branch_from or typed.keys() <= names_of(StartOptions)):
        return
    taken = []
    for name, value in inheritable(type(config), settings).items():
        expected = getattr(asked, name)
        if name not in typed and value == getattr(config, name) != expected != "auto":
            shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
            taken.append(f"{name} {shown}")
    if taken:
        text = f"Settings inherited from {source}: {', '.join(taken)}."
        print0(textwrap.fill(text, 79, break_long_words=False, break_on_hyphens=False))


def check_model(model: models.SavedModel, config: Any, *, source: str) -> None:
    """Raise UserError for a setting that GPTConfig does not have. Note if other code trained the model."""
    models.config_of(type(config.model_config), model.settings)
    source_code.check_code(model.code, type(config), source, goes_on=True)


def check_config(config: Any, complaints: Iterable[str], world: World) -> None:
    """Raise one UserError with everything that is wrong with a TrainConfig. complaints: the trainer's sentences."""
    check(config, [*complaints, *complaints_here(config, world)])


def complaints_here(c: Any, world: World) -> Iterator[str]:
    """A sentence for each setting of a TrainConfig that is wrong on this machine or for this number of ranks."""
    T, total = c.sequence_length, c.total_batch_size
    smallest = T * world.size
    try:
        devices.choose_dtype(c.dtype, world.device)
    except UserError as error:
        yield str(error)
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


def check_data(
    config: Any, loader: Any, val_loaders: list[Any], *, enc: Any, num_ids: int, world: World
) -> None:
    """Raise UserError unless the data are complete, enough, the same on all ranks, and have at most num_ids ids."""
    if not enc:  # a dry run without data
        return
    models.check_num_ids(num_ids, enc)
    loaders = [loader] if loader else []
    world.check_agreement(
        {
            "the training data": [each.order.fingerprint for each in loaders],
            "the validation data": [each.order.fingerprint for each in val_loaders],
            "the tokenizer": enc.name,
        }
    )
    for folder, val_loader in zip(config.data, val_loaders):
        splits = list(val_loader.order.splits)
        if loader:
            splits += [split for split in loader.order.splits if split.folder == folder]
        shards.check_folder(folder, splits, enc)
    if loader and not config.data_weights:  # with shares, a folder is read again as often as its share needs
        options = dict(num_windows=loader.num_windows, at_least=config.total_batch_size)
        shards.check_size(" ".join(config.data), "train", loader.T, **options)


def first_model(model_class: type, start: Start, device: torch.device, *, ranks: int = 1) -> Any:
    """Make the model on the device, with new weights or with those that the run starts from.

    ranks: how many train it. The message for a model that is too large for one rank then advises --shard.
    """
    config = start.config.model_config
    if start.saved:
        return model_of_checkpoint(model_class, start, start.saved["model"]).to(device)
    if start.weights is not None:
        model = models.from_state(model_class, config, start.weights, extends=True, old_ids=start.old_ids)
        return model.to(device)
    if start.config.dry_run:  # it may be about a larger machine than this one
        # a model that reads its initial values cannot be made without memory
        with contextlib.suppress(Exception), torch.device("meta"), memory.SkipInit():
            return model_class(config)
    elif start.config.max_steps and not start.config.shard:
        memory.check_memory(lambda: model_class(config), device, ranks=ranks)
    return memory.new_model(model_class, config).to(device)


def model_of_checkpoint(model_class: type, start: Start, weights: dict[str, torch.Tensor]) -> Any:
    """The model in the run's or its parent's checkpoint. UserError if a branch's settings change a weight's shape."""
    extends = start.branched is not None  # the buffers of a branch may have other shapes
    model = models.from_state(model_class, start.config.model_config, weights, extends=extends)
    for name, p in model.named_parameters():
        if name in weights and p.shape != weights[name].shape:
            raise UserError(
                f"With the typed settings, {name} has {len(p)} rows instead of {len(weights[name])}, and a branch "
                "keeps the shapes of its parent's weights. Leave out the flags that change the model, or start a new "
                "run from these weights, with --init-from instead of --branch-from."
            )
    return model


def sharded_model(
    model_class: type, start: Start, shard: Callable[..., None], *, text: Any, num_ids: int, longest: int, world: World
) -> Any:  # fmt: skip
    """The model with its first weights, split across the ranks by shard(model, config, world).

    Rank 0 makes the whole model in main memory, and examines it there: see `try_out`.
    """
    config = start.config
    make_model = functools.partial(model_class, config.model_config)
    if config.dry_run:
        return first_model(model_class, start, world.device)
    if config.max_steps:
        memory.check_memory(make_model, world.device, ranks=world.size, shares=world.size)
    whole = world.run_on_master(first_model, model_class, start, torch.device("cpu"))
    has_cache = examine(whole, text, num_ids=num_ids, longest=longest, world=world)
    world.run_on_master(checks.check_weights_stay, whole, num_ids)
    try:
        with torch.device("meta"), memory.SkipInit():
            model = make_model()
        shard(model, config, world)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise UserError(
            f"--shard cannot split this model: {first_line(error)}. Change that in the model, or leave --shard out."
        ) from None
    from plumbing.system import sharding  # takes a second to import

    sharding.fill(model, whole, world)
    model.has_cache = has_cache
    return model


def examine(model: Any, text: Any, *, num_ids: int, longest: int, world: World) -> bool:
    """Whether decoding with a KV cache gives the same result. Rank 0 checks it for all.

    text: a batch of validation data (B, T), or None; longest: see `try_out`.
    """

    def examination() -> bool:
        texts = checks.texts(num_ids, longest)
        if text is not None:
            texts.append(text)
        return checks.examine(model, texts)

    return world.broadcast_from_master(examination)


def try_out(
    raw_model: Any, optimizers: list[Any], settings: dict[str, Any], *, text: Any, longest: int
) -> tuple[Fit, bool]:
    """Try a step and examine the model, which stays as it is. Returns (the trial's Fit, whether a cache works).

    settings: the other fields of a Trial; text: a batch of validation data (B, T), or None; longest: the most tokens
    that the model reads at once.
    """
    trial = Trial(raw_model, **settings)
    config, world = trial.config, trial.world
    checks.check_groups(raw_model, optimizers)
    if config.dry_run:
        return estimate(trial), True
    if config.shard:
        return try_sharded(trial), raw_model.has_cache
    with undone(raw_model):
        found = find_what_fits(trial)
    has_cache = examine(raw_model, text, num_ids=trial.num_ids, longest=longest, world=world)
    return found, has_cache


def report_finished(config: Any, saved: Checkpoint, model_class: type) -> None:
    """Say that the run is finished, and export its model again if hf/ lacks it and the code is the same.

    saved: its last checkpoint.
    """
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
