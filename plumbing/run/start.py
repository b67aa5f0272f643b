"""How a run begins. What it is, is decided here and once: from the preset, from what the run, its parent or its model
has, and from what was typed, in this order. Rank 0 decides, behind the lock on the run's folder; the others are told.
"""

import contextlib
import dataclasses
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from plumbing.cli.console import UserError, print0, quote_group
from plumbing.cli.flags import check, flag_of
from plumbing.data import shards
from plumbing.files import FolderLock, lock_folder
from plumbing.run import checkpoint as checkpoints
from plumbing.run import checks, logs, models, source_code, wandb_log
from plumbing.run.checkpoint import Checkpoint
from plumbing.run.commands import branch_command, print_next_commands, train_command
from plumbing.run.huggingface import is_export_of
from plumbing.run.options import StartOptions, differences, inheritable, is_per_node, names_of
from plumbing.run.run import Ended, export
from plumbing.system import autofit, devices
from plumbing.system.distributed import World

MakeConfig = Callable[[dict[str, Any], dict[str, Any], World], Any]


class Start(NamedTuple):
    """What a run is, and what it begins with: a checkpoint, weights alone or, if both are None, nothing."""

    config: Any  # the TrainConfig, made once
    typed: dict[str, Any]  # what was typed: {setting: value}
    saved: Checkpoint | None = None  # the run's newest one or, for a new branch, its parent's
    weights: dict[str, torch.Tensor] | None = None  # the state dict of the model to begin with
    branched: dict[str, Any] | None = None  # of a new branch: its parent, the step and the changes, for run.txt
    old_ids: torch.Tensor | None = None  # for data with another tokenizer: what its tokens had, see GPT.extend
    ended: Ended | None = None  # of a run of which nothing is left to do: what it ended with
    lock: FolderLock | None = None  # on the run's folder, held by rank 0

    @property
    def step(self) -> int:
        return self.saved["step"] if self.saved else 0


@contextlib.contextmanager
def begin(
    presets: Mapping[str, Any], typed: dict[str, Any], make_config: MakeConfig, model_class: type, world: World
) -> Iterator[Start]:
    """Context in which the run's folder is locked, and the run is what rank 0 has decided: the Start for all ranks.

    make_config(inherited, typed, world) makes and checks a TrainConfig, which `presets` are as well.
    """
    asked = dataclasses.replace(presets[typed.get("preset", next(iter(presets)))], **typed)
    config_class = type(asked)
    if asked.init_from and asked.max_steps == 0 and "out_dir" not in typed:
        # an evaluation has a folder of its own, as the usual one is often that of the model's run
        typed = typed | {"out_dir": f"{asked.out_dir}/eval"}
        asked = dataclasses.replace(asked, out_dir=typed["out_dir"])
    own = {field.name for field in dataclasses.fields(config_class) if is_per_node(field)}
    facts = {flag_of(name): value for name, value in typed.items() if name not in own}
    facts |= {f"the version of {name}": copy for name, copy in source_code.describe(config_class).items()}
    world.check_agreement(facts | {"the version of torch": str(torch.__version__)})
    locks: list[FolderLock] = []  # rank 0's, taken before anything in the folder is read
    world.broadcast_from_master(lambda: locks.append(lock_folder(asked.out_dir)))
    with locks[0] if locks else contextlib.nullcontext() as lock:
        start = world.broadcast_from_master(decide, asked, typed, make_config, world)
        here = {name: value for name, value in typed.items() if name in own}  # this node's paths
        devices.choose_dtype(start.config.dtype, world.device)  # which another rank's device may lack
        if start.ended:
            world.broadcast_from_master(report_finished, start.config, start.saved, model_class)
        yield start._replace(config=dataclasses.replace(start.config, **here), typed=typed, lock=lock)


# ----- The decision -------------------------------------------------------------------------------------


def decide(asked: Any, typed: dict[str, Any], make_config: MakeConfig, world: World) -> Start:
    """What the run is and begins with, on rank 0. `asked` is the preset under what was typed."""
    if asked.branch_from and asked.init_from:
        raise UserError("--branch-from and --init-from both name the first weights. Give one of them.")
    parent = folder_of(Path(asked.branch_from))
    # also with --no-resume, which would move the parent aside
    if asked.branch_from and parent.exists() and parent.samefile(asked.out_dir):
        raise UserError(
            f"--out-dir is the folder of the parent (--branch-from), {parent}. Give the branch a folder of its own."
        )
    own = load_own(asked)
    saved, model, source = own, None, asked.out_dir
    if not own and asked.branch_from:
        saved, source = checkpoints.load_parent(asked.branch_from), asked.branch_from
    elif not own and asked.init_from:
        model, source = models.load_saved_model(asked.init_from), asked.init_from
    elif not own and typed.keys() <= names_of(StartOptions) and "out_dir" in typed:
        raise UserError(
            f"There is no checkpoint in {source} to go on from{'' if asked.resume else ' under --no-resume'}. Give the "
            f"folder of a run or, to begin one there, its settings, too, such as --preset {asked.preset}."
        )
    if saved:
        model = models.from_checkpoint(saved)
    settings = saved["config"] if saved else model.settings if model else {}
    inherited = inheritable(type(asked), settings)
    # "auto" leaves a choice as it is
    typed = {name: value for name, value in typed.items() if value != "auto" or name not in inherited}
    if saved and not own:
        del inherited["branch_from"]
        # the shares are those of the parent's folders
        if tuple(asked.data) != tuple(inherited["data"]) and {"data"} == typed.keys() & {"data", "data_weights"}:
            del inherited["data_weights"]
    config = make_config(inherited, typed, world)
    old_ids = models.ids_in(model, config) if model and not saved else None
    if old_ids is not None:
        inherited.pop("vocab_size", None)  # the model gets the rows that the data's tokenizer needs
        config = make_config(inherited, typed, world)
    changed = differences(settings, config) if saved else {}
    if own and changed:
        refuse_another_recipe(config, own, typed, different=changed)
    if own and own["finished"]:
        return Start(config, typed, own, ended=Ended(own["step"], logs.last_values(Path(source) / "log.txt")))
    say_what_is_taken_over(config, asked, typed, inherited, source=source)
    if not model:
        return Start(config, typed)
    branched = None
    if saved and not own:
        branched = branch(config, saved["step"], changed)
        # the parent's best weights and its other checkpoints are not in the branch's folder
        saved["best_val_loss"], saved["temporary"] = math.inf, []
    models.config_of(type(config.model_config), model.settings)  # refuses what this file does not know
    if old_ids is None:
        models.check_tokenizer(saved["tokenizer"] if saved else model.enc.name, config)
    source_code.compare(model.code, type(config), source, goes_on=True)
    return Start(config, typed, saved, None if saved else model.weights, branched, old_ids)


def load_own(asked: Any) -> Checkpoint | None:
    """The newest checkpoint of the run that is to be continued in out_dir; None for a new run."""
    if asked.resume:
        return checkpoints.load_state(asked.out_dir)
    # under --no-resume, a run goes on that this very torchrun has begun, and restarts after a crash
    saved = checkpoints.load_state(asked.out_dir) if logs.is_restarted() else None
    return saved if saved and saved["launch"] == logs.launch() else None


def folder_of(source: Path) -> Path:
    """The folder of a run, of which `source` is the folder or a checkpoint."""
    return source.parent if source.is_file() else source


def refuse_another_recipe(
    config: Any, saved: Checkpoint, typed: dict[str, Any], *, different: dict[str, tuple[Any, Any]]
) -> None:
    """Raise UserError, as what was typed is not the recipe of the run in out_dir, with the command for a branch.

    different: the settings in which they differ, {name: (then, now)}.
    """
    told = ", ".join(f"{name} was {then!r}, now {now!r}" for name, (then, now) in different.items())
    out_dir, then = config.out_dir, saved["config"]
    rest = {n: value for n, value in typed.items() if n not in names_of(StartOptions) and value != then.get(n)}
    if config.max_steps == 0:
        advice = f"evaluate it: add --init-from {out_dir} --out-dir NEW"
    elif different.keys() & {"branch_from", "init_from"} or not different.keys() & rest.keys():
        advice = "begin what you typed in another --out-dir"
    else:
        shape = different.keys() & vars(config.model_config).keys()
        if shape:  # which a branch keeps; and a model brings no other settings of its run along
            defaults = vars(type(config)())
            own = {*saved["model_fields"], "branch_from", *names_of(StartOptions)}
            own |= {"max_steps"} if "passes" in rest else set()
            kept = {n: value for n, value in vars(config).items() if n not in own and value != defaults[n]}
            folders = {"init_from": out_dir, "out_dir": f"{out_dir.rstrip('/')}-new"}
            command = train_command(type(config), kept | folders | rest)
            done = " with its weights"
        else:
            # a run that is to be shorter than what it has done still needs some steps in which its rate decays
            step, max_steps = saved["step"], max(config.max_steps, math.ceil(1.1 * saved["step"]))
            if "passes" not in rest and max_steps != then["max_steps"]:
                rest |= {"max_steps": max_steps}
            done = "" if max_steps == config.max_steps else f" (it has done {step} steps already)"
            command, done = branch_command(config, rest), f"{done} as a branch"
        advice = f"train what you typed{done}: {' '.join(map(quote_group, command))}"
    raise UserError(
        f"{out_dir} has a run with other settings ({told}). Leave these flags out to continue it, add --no-resume to "
        f"move it aside, or {advice}"
    )


def branch(config: Any, step: int, changed: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    """What run.txt says of a new branch from a checkpoint after `step` updates. UserError if it ends before that."""
    parent = Path(config.branch_from)
    if step >= config.max_steps:
        raise UserError(
            f"The branch would end at step {config.max_steps}, but {parent} has done {step} steps already. "
            "Give more --max-steps or --passes or, to evaluate it, use --init-from in place of --branch-from."
        )
    changes = {name: pair for name, pair in changed.items() if name != "branch_from"}
    return {"parent": str(folder_of(parent)), "step": step, "changed": changes}


def say_what_is_taken_over(
    config: Any, asked: Any, typed: dict[str, Any], inherited: dict[str, Any], *, source: str
) -> None:
    """Say which settings come from the run, its parent or its model, and are not those that the command asks for."""
    if config.branch_from and inherited.get("preset") != typed.get("preset", inherited.get("preset")):
        print0(f"note: A branch has its parent's settings, and not those of --preset {typed['preset']}.")
    taken = [
        f"{name} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"
        for name, value in inherited.items()
        if name not in typed and value == getattr(config, name) != getattr(asked, name)
    ]
    if taken:
        text = f"Settings taken over from {source}: {', '.join(taken)}."
        print0(textwrap.fill(text, 79, break_long_words=False, break_on_hyphens=False))


def check_config(config: Any, complaints: Iterable[str], world: World) -> None:
    """Raise one UserError with everything that is wrong with a TrainConfig, to which the trainer has `complaints`."""
    check(config, [*complaints, *complaints_here(config, world)])


def complaints_here(c: Any, world: World) -> Iterator[str]:
    """A sentence for each setting that is wrong on this machine or for this number of ranks."""
    T, total, smallest = c.sequence_length, c.total_batch_size, c.sequence_length * world.size
    try:
        devices.choose_dtype(c.dtype, world.device)
    except UserError as error:
        yield str(error)
    if T > 0 and total > 0 and total % smallest:
        ranks = f"Start a number of ranks that divides {total // T}, or try" if total % T == 0 else "Try"
        yield (
            f"--total-batch-size {total} is not a multiple of {smallest} (--sequence-length {T} x {world.size} "
            f"ranks). {ranks} --total-batch-size {max(1, round(total / smallest)) * smallest}."
        )
    if c.batch_ramp and T > 0 and (total % 2**15 or 2**15 % smallest):
        yield (
            f"A batch ramp grows in steps of 32,768 tokens: that must be a multiple of {smallest} (--sequence-length "
            "x ranks), and --total-batch-size a multiple of it. Change these, or leave --batch-ramp out."
        )
    if c.val_every and c.val_tokens < T:
        yield f"--val-tokens is {c.val_tokens}, but it must be {T} or more, the length of one sequence."
    if c.wandb and not wandb_log.is_installed():
        yield "--wandb needs the package wandb. Install it with: pip install wandb"


# ----- What the run begins with -------------------------------------------------------------------------


def check_data(
    config: Any, loader: Any, val_loaders: list[Any], enc: Any, *, num_ids: int, world: World
) -> None:
    """Raise UserError unless the data are whole, enough, the same on all ranks, and have no more than num_ids ids."""
    if not enc:  # a dry run without data
        return
    models.check_num_ids(num_ids, enc)
    loaders = [loader] if loader else []
    splits = {"the training data": loaders, "the validation data": val_loaders}
    found = {name: [each.order.fingerprint for each in of_split] for name, of_split in splits.items()}
    world.check_agreement(found | {"the tokenizer": enc.name})
    for folder, val_loader in zip(config.data, val_loaders):
        train = [split for each in loaders for split in each.order.splits if split.folder == folder]
        shards.check_folder(folder, [*train, *val_loader.order.splits], enc)
    if loader and not config.data_weights:  # else a folder is read again, as often as its share needs
        options = dict(num_windows=loader.num_windows, at_least=config.total_batch_size)
        shards.check_size(" ".join(config.data), "train", loader.T, **options)


def first_model(model_class: type, start: Start, device: torch.device) -> Any:
    """The model on the device, with its first weights: new ones, or those that the run begins with."""
    config = start.config.model_config
    weights = start.saved["model"] if start.saved else start.weights
    if weights is None:
        if start.config.dry_run:  # which is about any machine
            # a model that reads its first values is not made without memory
            with contextlib.suppress(Exception), torch.device("meta"), autofit.SkipInit():
                return model_class(config)
        if start.config.max_steps:
            autofit.check_memory(lambda: model_class(config), device)
        return autofit.new_model(model_class, config).to(device)
    is_new = start.saved is None or start.branched is not None  # a run that is resumed has its model's shapes
    model = models.from_state(model_class, config, weights, extends=is_new, old_ids=start.old_ids)
    for name, p in model.named_parameters() if start.saved else ():
        if name in weights and p.shape != weights[name].shape:
            raise UserError(
                f"With the settings that you typed, {name} has {len(p)} rows in place of {len(weights[name])}, and a "
                "branch keeps the shapes of its parent's weights. Leave out what changes the model, or begin a new run "
                "with these weights, by --init-from in place of --branch-from."
            )
    return model.to(device)


def try_out(
    start: Start, raw_model: Any, optimizers: list[Any], *, wrap: Any, autocast: Any, text: Any, num_ids: int,
    longest: int, world: World,
) -> tuple[autofit.Fit, bool]:  # fmt: skip
    """(what works on this machine, whether the model has a cache): a trial of a step and an examination of the model,
    which is as before then.

    text: a batch of validation data (B, T), or None; num_ids: of the tokenizer; longest: what the model reads.
    """
    checks.check_groups(raw_model, optimizers)
    trial = autofit.Trial(raw_model, wrap, autocast, num_ids, start.config, world)
    if start.config.dry_run:
        return autofit.estimate(trial), True
    with autofit.undone(raw_model):
        fit = autofit.find_what_fits(trial)
    texts = checks.texts(num_ids, longest) + ([] if text is None else [text])
    has_cache = world.broadcast_from_master(checks.examine, raw_model, texts)
    if start.config.dtype == "fp8" and not fit.compiled:
        print0("note: Without torch.compile, fp8 takes the memory of float32 logits, so that B may be smaller.")
    return fit, has_cache


def report_finished(config: Any, saved: Checkpoint, model_class: type) -> None:
    """Say that the run is finished, and export its model again if hf/ does not hold it; other code has another model.

    saved: its last checkpoint.
    """
    out_dir, step, enc = Path(config.out_dir), saved["step"], models.tokenizer_of(saved)
    source_code.compare(saved["code"], type(config), config.out_dir, goes_on=True)
    print(f"The run in {out_dir} is finished.")
    is_same = saved["code"] == source_code.describe(type(config))
    if is_same and not config.dry_run and not is_export_of(out_dir / "hf", saved["model"], step):
        export(out_dir, step, models.from_state(model_class, config.model_config, saved["model"]), enc)
    model = out_dir / "hf" if (out_dir / "hf").exists() else checkpoints.list_checkpoints(out_dir)[-1]
    print(f"Its model is in {model}.")
    print("To train again, name another --out-dir, or add --no-resume to move it aside.")
    print_next_commands(config, enc)
