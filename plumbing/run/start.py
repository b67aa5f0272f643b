"""How a run begins. What it is, is decided here and once: from the preset, from what the run, its parent or its model
has, and from what was typed, in this order. Rank 0 decides, behind the lock on the run's folder; the others are told.
"""

import contextlib
import dataclasses
import functools
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from plumbing.cli.console import UserError, plain, print0, quote, quote_group
from plumbing.cli.flags import check, flag_of
from plumbing.data import shards
from plumbing.data.windows import stream_names
from plumbing.files import FolderLock, lock_folder
from plumbing.run import checkpoint as checkpoints
from plumbing.run import checks, logs, source_code, summary, wandb_log
from plumbing.run.checkpoint import Checkpoint
from plumbing.run.folder import Beginning, Ended, Run, branch_command, export, print_next_commands
from plumbing.run.huggingface import is_export_of
from plumbing.run.options import RunOptions, StartOptions, is_per_node, names_of, recipe_of
from plumbing.system import autofit
from plumbing.system.devices import process_restored
from plumbing.system.distributed import World, join

MakeConfig = Callable[[dict[str, Any], dict[str, Any], World], Any]


@contextlib.contextmanager
def begin(
    config_class: type, presets: Mapping[str, Any], typed: dict[str, Any], make_config: MakeConfig
) -> Iterator["Start"]:
    """Join the ranks, lock the run's folder, and decide what the run is: the Start that everything else comes from.

    make_config(settings, typed, world) makes and checks a TrainConfig, the class `config_class`.
    """
    asked = dataclasses.replace(presets[typed.get("preset", next(iter(presets)))], **typed)
    if asked.init_from and asked.max_steps == 0 and "out_dir" not in typed:
        # an evaluation has a folder of its own, as the usual one is often that of the model's run
        asked = dataclasses.replace(asked, out_dir=f"{asked.out_dir}/eval")
    own = {field.name for field in dataclasses.fields(config_class) if is_per_node(field)}
    facts = {flag_of(name): value for name, value in typed.items() if name not in own}
    code = source_code.describe(config_class)
    facts |= {
        f"the version of {name}": copy for name, copy in {code["name"]: code["copy"], **code["modules"]}.items()
    }
    facts["the version of torch"] = str(torch.__version__)
    with process_restored(), join(asked.device) as world:
        world.check_agreement(facts)
        with lock_out_dir(asked.out_dir, world) as lock:
            beginning = world.broadcast_from_master(decide, asked, typed, make_config, world)
            here = {name: value for name, value in typed.items() if name in own}  # this node's paths
            config = dataclasses.replace(beginning.config, **here)
            world = dataclasses.replace(world, dtype=world.torch_dtype(config.dtype))
            yield Start(beginning._replace(config=config), world, lock)


def lock_out_dir(out_dir: str, world: World) -> contextlib.AbstractContextManager[FolderLock | None]:
    """The lock on out_dir, taken on rank 0 before anything in it is read; a context of None on other ranks."""
    locks: list[FolderLock] = []
    world.broadcast_from_master(lambda: locks.append(lock_folder(out_dir)))
    return locks[0] if locks else contextlib.nullcontext()


# ----- The decision -------------------------------------------------------------------------------------


def decide(asked: Any, typed: dict[str, Any], make_config: MakeConfig, world: World) -> Beginning:
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
    saved, initial, source, given = own, None, asked.out_dir, {}
    if own:
        given = own["config"]
    elif asked.branch_from:
        source, saved = asked.branch_from, load_state(asked.branch_from)
        if not saved:
            raise UserError(
                f"There is no checkpoint in {source} that can be continued. Give a run's folder or its model_*.pt, or "
                "use --init-from for weights alone."
            )
        given = {name: value for name, value in saved["config"].items() if name != "branch_from"}
    elif asked.init_from:
        source, initial = asked.init_from, checkpoints.load_saved_model(asked.init_from)
        given = initial.settings
    # what belongs to an earlier start is not taken over, and "auto" leaves the choice as it is
    names = names_of(type(asked)) - names_of(StartOptions)
    given = {name: value for name, value in given.items() if name in names}
    typed = {name: value for name, value in typed.items() if not (value == "auto" and name in given)}
    config = make_config(vars(asked) | given | typed, typed, world)
    branched = None
    if own:
        refuse_another_recipe(config, own, typed)
        if own["finished"]:
            return Beginning(config, finished_step=own["step"])
    elif saved:
        branched = branch(config, saved)
    say_what_is_taken_over(config, asked, typed, given, source=source)
    if saved:
        source_code.compare(saved.get("code", {}), type(config), source, may_be_a_copy=True)
        return Beginning(config, saved, None, branched, saved.get("tokenizer", "gpt2"))
    if initial:
        source_code.compare(initial.code, type(config), source, may_be_a_copy=True)
        return Beginning(config, None, (initial.settings, initial.weights), None, initial.enc.name)
    return Beginning(config)


def folder_of(source: Path) -> Path:
    """The folder of a run, of which `source` is the folder or a checkpoint."""
    return source.parent if source.is_file() else source


def load_own(asked: Any) -> Checkpoint | None:
    """The newest checkpoint of the run that is to be continued in out_dir; None for a new run."""
    if asked.resume:
        return load_state(asked.out_dir)
    # under --no-resume, a run goes on that this very torchrun has begun, and restarts after a crash
    saved = load_state(asked.out_dir) if logs.is_restarted() else None
    return saved if saved and saved["launch"] == logs.launch() else None


def load_state(source: str) -> Checkpoint | None:
    """Load the newest checkpoint of a run or of a file, or None. UserError if it lacks what a run continues from."""
    saved = checkpoints.newest_checkpoint(source)
    if saved and "optimizer" not in saved:
        raise UserError(
            f"{source} has weights, but not the optimizer state that a run continues from. To start a run from "
            "them, use --init-from."
        )
    return saved


def differences(then: dict[str, Any], config: Any) -> dict[str, tuple[Any, Any]]:
    """{name: (then, now)} of the recipe's settings in which `config` differs from the settings of a checkpoint."""
    now, defaults, free = recipe_of(config), vars(type(config)()), names_of(RunOptions)
    # a setting that did not exist yet counts as the default, and one that is gone as unknown
    both = {
        name: (then.get(name, defaults.get(name)), now.get(name, "unknown"))
        for name in dict.fromkeys([*then, *now])
        if name not in free
    }
    # "log/" is the folder "log"
    return {name: pair for name, pair in both.items() if len({str(value).rstrip("/") for value in pair}) == 2}


def refuse_another_recipe(config: Any, saved: Checkpoint, typed: dict[str, Any]) -> None:
    """Raise UserError if what was typed is not the recipe of the run in out_dir, with the command for a branch."""
    different = differences(saved["config"], config)
    if not different:
        return
    told = ", ".join(f"{name} was {then!r}, now {now!r}" for name, (then, now) in different.items())
    out_dir, changed = config.out_dir, {name: typed[name] for name in different if name in typed}
    if config.max_steps == 0:
        advice = f"evaluate it: add --init-from {out_dir} --out-dir NEW"
    elif different.keys() & {"branch_from", "init_from"} or not changed:
        advice = "begin what you typed in another --out-dir"
    else:
        # a run that is to be shorter than what it has done still needs some steps in which its rate decays
        step, max_steps = saved["step"], max(config.max_steps, math.ceil(1.1 * saved["step"]))
        changed |= {"max_steps": max_steps} if max_steps != saved["config"]["max_steps"] else {}
        done = "" if max_steps == config.max_steps else f" (it has done {step} steps already)"
        command = " ".join(map(quote_group, branch_command(config, changed)))
        advice = f"train what you typed{done} as a branch: {command}"
    raise UserError(
        f"{out_dir} has a run with other settings ({told}). Leave these flags out to continue it, add --no-resume to "
        f"move it aside, or {advice}"
    )


def branch(config: Any, saved: Checkpoint) -> dict[str, Any]:
    """What run.txt says of a new branch from the checkpoint `saved`. UserError if it cannot continue from that."""
    parent = Path(config.branch_from)
    if saved["step"] >= config.max_steps:
        raise UserError(
            f"The branch would end at step {config.max_steps}, but {parent} has done {saved['step']} steps already. "
            "Give more --max-steps or --passes or, to evaluate it, use --init-from in place of --branch-from."
        )
    changed = differences(saved["config"], config)
    changed.pop("branch_from", None)
    # the parent's best weights and its other checkpoints are not in the branch's folder
    saved["best_val_loss"], saved["temporary"] = math.inf, []
    return {"parent": str(folder_of(parent)), "step": saved["step"], "changed": changed}


def say_what_is_taken_over(
    config: Any, asked: Any, typed: dict[str, Any], given: dict[str, Any], *, source: str
) -> None:
    """Say which settings come from the run, its parent or its model, and are not those that the command asks for."""
    if config.branch_from and "preset" in typed and given.get("preset", typed["preset"]) != typed["preset"]:
        print0(f"note: A branch has its parent's settings, and not those of --preset {typed['preset']}.")
    taken = [
        f"{name} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"
        for name, value in given.items()
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
        world.choose_dtype(c.dtype)
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
    if c.wandb and not wandb_log.is_installed():
        yield "--wandb needs the package wandb. Install it with: pip install wandb"


# ----- What the run begins with -------------------------------------------------------------------------


class Start:
    """A run before its first step: its config and ranks, and how its parts are made, continued and examined."""

    def __init__(self, beginning: Beginning, world: World, lock: FolderLock | None):
        self.beginning, self.world, self.lock = beginning, world, lock
        self.config, self.saved = beginning.config, beginning.saved
        self.fit: Any = None  # what works on this machine: an autofit.Fit
        self.examined: dict[str, Any] = {}  # what was found out about the model: checks.examine

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to do: the run's last checkpoint was written after its last evaluation."""
        return self.beginning.finished_step is not None

    def check_data(self, loader: Any, val_loaders: list[Any], enc: Any, *, num_ids: int) -> None:
        """Raise UserError unless the data are whole, enough, the same on all ranks, and of the model's tokenizer.

        num_ids: how many ids the model has.
        """
        checkpoints.check_num_ids(num_ids, enc)
        fingerprints = {
            "the training data": fingerprint_of([loader]),
            "the validation data": fingerprint_of(val_loaders),
        }
        self.world.check_agreement(fingerprints | {"the tokenizer": enc.name})
        for folder, val_loader in zip(self.config.data, val_loaders):
            train = [split for split in loader.splits if split.folder == folder]
            shards.check_folder(folder, [*train, *val_loader.splits], enc)
        total = self.config.total_batch_size
        if not self.config.data_weights:  # else a folder is read again, as often as its share needs
            options = dict(num_windows=loader.num_windows, at_least=total)
            shards.check_size(" ".join(self.config.data), "train", loader.T, **options)
        checkpoints.check_tokenizer(self.beginning.tokenizer, enc, " ".join(self.config.data))

    def make_model(self, model_class: type, *, fixed: Iterable[str], resizable: Mapping[str, str]) -> Any:
        """The model on the device, with its first weights: new ones, or those that the run begins with.

        A field of GPTConfig that is `fixed` must be that of the weights; one that is `resizable` is a number of rows,
        to which fine-tuning may add, as `checkpoint.new_rows` says, or leave out the last.
        """
        self.first_weights = functools.partial(self.make_first, model_class, list(fixed), dict(resizable))
        with named_settings(self.config):
            if not self.beginning.model:
                autofit.check_memory(lambda: model_class(self.config.model_config), self.world.device)
            model = self.first_weights().to(self.world.device)
        self.samples = autofit.samples_of(model)
        return model

    def make_first(self, model_class: type, fixed: list[str], resizable: dict[str, str]) -> Any:
        """`make_model` on the CPU; the same again whenever it is called."""
        config = self.config.model_config
        self.world.seed_random_numbers(self.config.seed)
        if not self.beginning.model:
            return autofit.make(model_class, config)
        settings, weights = self.beginning.model
        then = checkpoints.make_config(type(config), settings)
        for name in fixed:
            if getattr(config, name) != getattr(then, name):
                raise UserError(
                    f"{flag_of(name)} is {getattr(config, name)}, but the weights that the run begins with have "
                    f"{getattr(then, name)}. Leave it out."
                )
        for name, how in resizable.items():
            before, now = getattr(then, name), getattr(config, name)
            if before == now:
                continue
            older, then = then, dataclasses.replace(then, **{name: now})
            with autofit.SkipInit():
                made_before, made = model_class(older), model_class(then)
            weights = weights | checkpoints.other_tables(weights, made_before, made)
            shapes = {key: own.shape for key, own in checkpoints.tensors_in(made.state_dict()).items()}
            resized = checkpoints.resize(checkpoints.tensors_in(weights), shapes, how, rows=(before, now))
            if resized and self.saved:
                raise UserError(
                    f"{flag_of(name)} is {now}, but {plain(next(iter(resized)))} has {before} rows, and a branch keeps "
                    "the shapes of its parent's weights. Leave it out, or begin a new run with these weights: "
                    f"--init-from {quote(self.config.branch_from)} {flag_of(name)} {now}"
                )
            weights = weights | resized
        return checkpoints.from_state(model_class, config, weights)

    def put_back(self, raw_model: Any) -> None:
        """Give the model its first weights again, if a forward pass has written to them, as to normalize them."""
        if not all(map(torch.equal, autofit.samples_of(raw_model), self.samples)):
            again = dict(self.first_weights().named_parameters())
            with torch.no_grad():
                for name, parameter in raw_model.named_parameters():
                    parameter.copy_(again[name])

    def find_what_fits(self, raw_model: Any, wrap: Callable[..., Any], num_ids: int) -> autofit.Fit:
        """Find out what works on this machine: B, torch.compile, attention kernels. wrap makes the model to train."""
        self.fit = autofit.find_what_fits(raw_model, wrap, self.config, num_ids=num_ids, world=self.world)
        self.put_back(raw_model)
        if self.config.dtype == "fp8" and not self.fit.compiled:
            print0(
                "note: Without torch.compile, fp8 takes the memory of float32 logits, so that B may be smaller."
            )
        return self.fit

    def examine(self, raw_model: Any, optimizers: list[Any], num_ids: int, *, longest: int) -> None:
        """Find out what the model does, unless the same code was asked before; say what cannot be kept."""
        checks.check_groups(raw_model, optimizers)
        code = source_code.describe(type(self.config))["hash"]
        known = self.saved.get("examined", {}) if self.saved else {}
        if known.get("code") != code:
            known = self.world.broadcast_from_master(checks.examine, raw_model, num_ids, longest)
            self.put_back(raw_model)
        raw_model.has_cache = known["has_cache"]
        self.examined = {**known, "code": code}

    def restore(self, raw_model: Any, optimizers: list[Any], scaler: Any, *, loaders: tuple[Any, Any]) -> None:
        """Continue from the checkpoint, if there is one. Each part says what it can't continue: then the run is
        refused, or a branch begins that anew.
        """
        checkpoints.mark_groups(optimizers)
        loader, val_loaders = loaders
        checkpoints.check_readable(checkpoints.training_state(raw_model, optimizers, scaler, loader))
        if not self.saved:
            return
        other_order = loader.load_state_dict(self.saved["loader"])
        other_val = self.saved["val_fingerprint"] != fingerprint_of(val_loaders)
        other_groups = checkpoints.load_optimizer_states(raw_model, optimizers, self.saved["optimizer"])
        if scaler.is_enabled() and self.saved["scaler"]:  # a branch may use float16 although its parent did not
            scaler.load_state_dict(self.saved["scaler"])
        if not self.beginning.branched:
            refuse_other_parts(self.config, [other_order, "validation data" if other_val else ""], other_groups)
            return
        if other_order:
            ramp = " Its batch ramp begins anew, too." if self.config.batch_ramp else ""
            print0(
                f"note: This branch reads from the beginning of a new order, with another {other_order}.{ramp}"
            )
        if other_val:
            print0("note: The validation data are not the parent's, so losses cannot be compared with its own.")
        if other_groups:
            print0(
                f"note: The optimizers begin without the parent's averages of gradients: it has {other_groups}."
            )

    def print_summary(self, parts: Any) -> None:
        """Say what the run will do and cost."""
        summary.print_summary(self.beginning, parts, self.fit, self.world)

    def open_run(self, parts: Any) -> Run:
        """Open the run's folder; from here on, signals stop the run at the end of a step."""
        metadata = checkpoints.metadata(self.config, parts.enc, fingerprint_of(parts.val_loaders))
        metadata |= {"examined": self.examined, "launch": logs.launch()}
        shares = parts.loader.shares
        if self.config.data_weights:
            shares = [weight / sum(self.config.data_weights) for weight in self.config.data_weights]
        train = {split.folder: split.fingerprint[:16] for split in parts.loader.splits}
        val = [loader.splits[0].fingerprint[:16] for loader in parts.val_loaders]
        names = stream_names(self.config.data)
        of_both = [[train.get(folder, ""), of_val] for folder, of_val in zip(self.config.data, val)]
        beginning = self.beginning._replace(fingerprints=dict(zip(names, of_both)))
        splits = [split for loader in (parts.loader, *parts.val_loaders) for split in loader.splits]
        options: dict[str, Any] = dict(metadata=metadata, fit=self.fit, shares=shares, splits=splits)
        run = Run(beginning, self.world, self.lock, **options)
        self.beginning = self.beginning._replace(saved=None, initial=None)  # frees gigabytes
        self.saved = None
        return run

    def ended(self) -> Ended:
        """What `main` returns where nothing was trained."""
        return Ended(self.beginning.step, {})

    def report_finished(self, model_class: type) -> Ended:
        """Say that the run is finished, and export its model again if hf/ does not hold it."""
        out_dir, step = Path(self.config.out_dir), self.beginning.finished_step
        assert step is not None
        if not self.world.is_master:
            return Ended(step, {})
        saved = load_state(self.config.out_dir)
        assert saved
        enc = checkpoints.model_tokenizer(saved)
        print(f"The run in {out_dir} is finished.")
        if not (self.config.dry_run or is_export_of(out_dir / "hf", saved["model"], step)):
            model = checkpoints.from_state(model_class, self.config.model_config, saved["model"])
            export(out_dir, step, model, enc)
        model = out_dir / "hf" if (out_dir / "hf").exists() else checkpoints.list_checkpoints(out_dir)[-1]
        print(f"Its model is in {model}.")
        print("To train again, name another --out-dir, or add --no-resume to move it aside.")
        print_next_commands(self.config, enc)
        return Ended(step, logs.last_values(out_dir / "log.txt"))


@contextlib.contextmanager
def named_settings(config: Any) -> Iterator[None]:
    """Context in which a model is made, which may ask its GPTConfig for a setting that only the run has."""
    try:
        yield
    except AttributeError as error:
        if error.obj != config.model_config or error.name not in vars(config):
            raise
        raise UserError(
            f"The model uses the setting {error.name}, which is not saved with its weights. Move it from Recipe into "
            f"{type(error.obj).__name__}, or give one of the model's own another name."
        ) from None


def fingerprint_of(loaders: list[Any]) -> str:
    """Those of all data that are read."""
    return " ".join(split.fingerprint for loader in loaders for split in loader.splits)


def refuse_other_parts(config: Any, of_the_data: list[str], of_the_optimizers: str) -> None:
    """Raise UserError if a run's data or optimizers, of which the arguments say what differs, cannot go on."""
    branch = f"begin a branch: --branch-from {quote(config.out_dir)} --out-dir NEW"
    if any(of_the_data):
        what, data = " and ".join(filter(None, of_the_data)), " ".join(config.data)
        raise UserError(
            f"The {what} in {data} are not what the run in {config.out_dir} began with. Give the run's own with --data,"
            f" or {branch}"
        )
    if of_the_optimizers:
        raise UserError(
            f"The optimizers of this run are not those of the checkpoint, which has {of_the_optimizers}. Continue with "
            f"the file that trained it, or {branch}"
        )
