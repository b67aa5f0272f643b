"""Checkpoints: the state that a run continues from. They are written in the background, and verified when read."""

import copy
import io
import itertools
import pickle
import re
import zipfile
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TypedDict

import numpy as np
import tiktoken
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

from plumbing.cli.console import UserError, first_line, note, print0, quote
from plumbing.data import tokenizers
from plumbing.files import FolderLock, Name, atomic_write
from plumbing.run import source_code
from plumbing.system.layout import Splits

CHECKPOINT_NAME = re.compile(r"model_([0-9]{5,15})\.pt")  # log/model_00500.pt is the checkpoint of step 500
BEST = "model_best.pt"  # the weights with the lowest validation loss
READABLE = "Use a model_*.pt file from a run of train_gpt2.py, or a checkpoint of nanoGPT or build-nanogpt."


# for each optimizer, the settings of its groups as the trainer made them
Made = list[list[dict[str, Any]]]
PARAMETERS = ("params", "param_names")  # the entries of an optimizer's group that are not settings


make_number: Any = np.float64(0).__reduce__()[0]  # how NumPy pickles a number, under NumPy 2's name and 1's
NUMBER_TYPES = {kind for kind in np.sctypeDict.values() if issubclass(kind, (np.number, np.bool_))}
NUMPY_NUMBERS = [make_number, (make_number, "numpy.core.multiarray.scalar"), np.dtype]
NUMPY_NUMBERS += {type(np.dtype(kind)) for kind in NUMBER_TYPES}


class Checkpoint(TypedDict):
    """The contents of a model_<step>.pt: plain data and tensors. model_best.pt has no state to continue from."""

    model: dict[str, Tensor]  # the model's state dict, without prefixes of DDP or torch.compile
    config: dict[str, Any]  # TrainConfig's fields
    model_fields: list[str]  # GPTConfig's fields
    tokenizer: str  # its name
    tokenizer_file: str  # the tokenizer itself, from tokenizers.dumps; "": GPT-2's
    step: int  # updates so far
    optimizer: list[dict[str, Any]]  # the state dict of each optimizer
    splits: list[Splits]  # how each of these was split over the ranks, with --shard
    groups: list[str]  # their groups and the parameters in them, in words
    made: Made
    scaler: dict[str, Any]  # float16's gradient scaler; empty in other dtypes
    loader: dict[str, Any]  # the position in the training data, and the settings of their order
    own: dict[str, Any]  # the state dicts of the objects in the trainer's Parts.own
    val_fingerprint: str  # of the validation data
    val_loss: float | None  # the last one measured
    best_val_loss: float  # the validation loss of model_best.pt
    code: source_code.Code  # the code that trained it
    temporary: list[int]  # steps whose checkpoints in the same folder may be deleted
    finished: bool  # whether the run's last evaluation is done
    launch: str  # logs.torchrun_id() of the torchrun that wrote it


class PeerConfig:
    """Stands in for the GPTConfig that build-nanogpt pickles into its checkpoints, and has only its fields."""


def unpickle(path: Name | IO[bytes]) -> Any:
    """Read tensors, plain data, NumPy's numbers and PeerConfig; nothing else, so that no file can run code."""
    names: Any = [(PeerConfig, f"{module}.GPTConfig") for module in ("__main__", "train_gpt2", "model")]
    with torch.serialization.safe_globals([*names, *NUMPY_NUMBERS]):
        return torch.load(path, map_location="cpu", weights_only=True)


# ----- Reading ------------------------------------------------------------------------------------------


def list_checkpoints(folder: Name) -> list[Path]:
    """The paths of a folder's checkpoints, oldest first."""
    paths = Path(folder).glob("model_*.pt")
    found = [path for path in paths if CHECKPOINT_NAME.fullmatch(path.name) and path.is_file()]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    return int(path.stem.removeprefix("model_"))


def newest_checkpoint(source: Name) -> Checkpoint | None:
    """Load the newest intact checkpoint in a folder, or the file `source` itself. None if there is none."""
    if Path(source).is_file():
        return load_checkpoint(source)
    paths = list_checkpoints(source)
    for path in reversed(paths):
        try:
            return load_checkpoint(path)
        except FileNotFoundError:  # a run in progress has deleted it meanwhile, and written newer ones
            return newest_checkpoint(source)
        except UserError as error:
            print0(f"warning: {error} Trying the one before it.")
    if paths:
        raise UserError(
            f"None of the checkpoints in {source} can be read. Restore one from a backup, or train from the start: add "
            "--no-resume to the command."
        )
    return None


def read_file(path: Name) -> dict[str, Any]:
    """Load the dict in a file that torch.save wrote, to the CPU. UserError if it is damaged or holds anything else."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # the checksums, which torch.load does not check
        if damaged:
            raise zipfile.BadZipFile(f"the checksum of its part {damaged} is wrong")
        content = unpickle(path)
    except FileNotFoundError:
        raise
    except Exception as error:  # a file that is damaged, or made by hand, can fail in any way
        reason = first_line(error)
        if isinstance(error, pickle.UnpicklingError):
            reason = "it contains more than tensors and plain data, perhaps code, which is never run"
        raise UserError(f"Checkpoint {path} cannot be read: {reason}. {READABLE}") from None
    return content if isinstance(content, dict) else {}


def load_checkpoint(path: Name) -> Checkpoint:
    """Load a checkpoint of this program."""
    return as_checkpoint(read_file(path), path)


def load_state(source: str) -> Checkpoint | None:
    """Load a run's newest checkpoint, or the one in a file, or None. UserError if it has weights but no other state."""
    saved = newest_checkpoint(source)
    if saved and "optimizer" not in saved:
        raise UserError(
            f"{source} has weights but no optimizer state, so no run can continue from it. To start a run from these "
            "weights, use --init-from."
        )
    return saved


def as_checkpoint(content: dict[str, Any], path: Name) -> Checkpoint:
    """Return the content of the file at `path` if it is a checkpoint of this program; otherwise raise UserError."""
    names = ("model", "config", "model_fields", "tokenizer_file", "code")
    missing = [f"no {name}" for name in names if name not in content]
    if missing:
        raise UserError(f"{path} is not a checkpoint of train_gpt2.py: it has {', '.join(missing)}. {READABLE}")
    return content  # pyright: ignore[reportReturnType]


def metadata(config: Any, enc: tiktoken.Encoding) -> dict[str, Any]:
    """The entries of a checkpoint that do not depend on the step."""
    settings = {"config": vars(config), "model_fields": list(vars(config.model_config))}
    texts = {"tokenizer": enc.name, "tokenizer_file": tokenizers.dumps(enc)}
    return settings | texts | {"code": source_code.code_of(type(config))}


# ----- The training state: what an exact resume needs, written and read ---------------------------------


def settings_of_groups(optimizers: list[Any]) -> Made:
    """A copy of the settings of each optimizer's groups, such as rates: all entries but the parameters."""
    made = []
    for optimizer in optimizers:
        groups = []
        for group in optimizer.param_groups:
            settings = {name: value for name, value in group.items() if name not in PARAMETERS}
            groups.append(copy.deepcopy(settings))  # an optimizer may write into a tensor
        made.append(groups)
    return made


def check_own(own: Mapping[str, Any]) -> None:
    """Raise UserError for an object in Parts.own that has no state to save."""
    for name, value in own.items():
        if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
            raise UserError(
                f"Parts.own[{name!r}] is a {type(value).__name__}, which has no state_dict() and load_state_dict(), so "
                "no checkpoint would hold it. Put it into an object that has both, such as a torch.nn.Module with a "
                "buffer."
            )


def training_state(parts: Any) -> dict[str, Any]:
    """The state of the trainer's `parts`, for `restore_state`."""
    optimizers = [each.state_dict() for each in parts.optimizers]
    return {
        "model": parts.raw_model.state_dict(),
        "optimizer": optimizers,
        "splits": [parts.layout.splits_of(each) for each in optimizers],
        "groups": places_in(parts.optimizers),
        "scaler": parts.scaler.state_dict(),
        "loader": parts.loader.state_dict(),
        "val_fingerprint": " ".join(loader.order.fingerprint for loader in parts.val_loaders),
        "own": {name: each.state_dict() for name, each in parts.own.items()},
    }


def restore_state(start: Any, parts: Any, *, made: Made, now: dict[str, Any]) -> None:
    """Restore a Start's checkpoint, whose weights the model has already. If a part of it does not fit, a run cannot
    continue (UserError). A branch starts without that part, and a note says so.

    made: the settings of the optimizers' groups as this start made them; now: the training state before.
    """
    config, saved, layout = parts.config, start.saved, parts.layout
    different = {}  # {what differs from the checkpoint: the note about it}
    order = parts.loader.load_state_dict(saved["loader"])
    if order:
        said = f"This branch differs from its parent in {order}, so it starts at the beginning of a new order."
        if config.batch_ramp:
            said += " Its batch ramp starts again."
        different[f"another order of the data ({order})"] = said
    if saved["val_fingerprint"] != now["val_fingerprint"]:
        said = "The validation data are not the parent's, so the losses of both cannot be compared."
        different["other validation data"] = said
    pairs = itertools.zip_longest(saved["groups"], now["groups"])
    groups = next((f"{then} instead of {here}" for then, here in pairs if then != here), "")
    if groups:
        said = f"The optimizers start without the parent's optimizer state: it has {groups}."
        different[f"other optimizers, where it has {groups}"] = said
    own_state = parts.world.broadcast_from_master(saved.get, "own")
    own = ", ".join(sorted(parts.own.keys() ^ own_state.keys()))
    if own:
        different[f"other objects in Parts.own ({own})"] = f"Only the parent, or only this branch, has {own}."
    if different and start.branched is None:
        raise UserError(
            f"The run in {config.out_dir} cannot continue with {' and '.join(different)}. Give it the data "
            f"(--data) and code that it had, or start a branch: --branch-from {quote(config.out_dir)} --out-dir NEW"
        )
    for said in different.values():
        note(said)
    if not groups:
        states = saved.get("optimizer") or [None] * len(parts.optimizers)  # rank 0 has them
        splits = saved.get("splits") or [{}] * len(states)  # older checkpoints have none
        for optimizer, state, split, then, now_made in zip(
            parts.optimizers, states, splits, saved["made"], made
        ):
            shared = layout.hand_out_optimizer(state, parameters_of(optimizer), split)
            load_optimizer(optimizer, shared, then=then, now=now_made)
    if parts.scaler.is_enabled() and saved["scaler"]:  # a branch may use float16 although its parent did not
        parts.scaler.load_state_dict(saved["scaler"])
    for name in parts.own.keys() & own_state.keys():
        parts.own[name].load_state_dict(own_state[name])


def places_in(optimizers: list[Any]) -> list[str]:
    """A text for each group and each parameter in it, in the order of the optimizers."""
    texts = []
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            place = f"group {number} of {type(optimizer).__name__}"
            names = group.get("param_names", range(len(group["params"])))  # parameters may have no names
            texts.append(place)
            texts += [f"{name} in {place}" for name in names]
    return texts


def load_optimizer(
    optimizer: Any, state: dict[str, Any], *, then: list[dict[str, Any]], now: list[dict[str, Any]]
) -> None:
    """Load a state_dict() of the same parameters, but keep the settings that this start has made differently.

    then, now: the settings of its groups as they were made, in the run that saved the state and at this start. An entry
    that the optimizer has changed since, such as a count, is part of its state.
    """
    optimizer.load_state_dict(state)
    for group, made_then, made_now in zip(optimizer.param_groups, then, now):
        for name, value in made_now.items():
            if name not in made_then or not is_same(made_then[name], value):
                group[name] = copy.deepcopy(value)
    # torch has cast each floating tensor to the parameter's dtype
    parameters = parameters_of(optimizer)
    for number, values in state.get("state", {}).items():
        if not isinstance(number, int):
            continue
        loaded = optimizer.state[parameters[number]]
        for name, value in values.items():
            if isinstance(value, Tensor) and value.dtype != loaded[name].dtype:
                loaded[name] = value.to(loaded[name].device)


def parameters_of(optimizer: Any) -> list[Tensor]:
    """The parameters in the order in which state_dict() numbers them."""
    parameters = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters


def is_same(a: Any, b: Any) -> bool:
    """Whether two settings would be equal in a checkpoint: numbers, texts, tensors, or lists and dicts of these."""
    leaves, structure = tree_flatten(a)
    others, other_structure = tree_flatten(b)
    return structure == other_structure and all(map(is_same_leaf, leaves, others))


def is_same_leaf(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a.cpu(), b.cpu())
    a, b = as_pythons(a), as_pythons(b)
    both_nan = a != a and b != b
    return type(a) is type(b) and (both_nan or a == b)


def check_readable(state: Any) -> None:
    """Raise UserError, naming the place, if something in a checkpoint besides tensors could not be read again."""
    without_tensors = tree_map_only(Tensor, lambda tensor: None, state)
    place = unreadable(tree_map(as_pythons, without_tensors), "")
    if place:
        raise UserError(
            f"A checkpoint with {place}, could not be read again. Keep tensors, numbers and texts there, or lists and "
            "dicts of these, and make everything else at each start."
        )


def as_pythons(value: Any) -> Any:
    """Python's number for one of NumPy's, so that torch.load(weights_only=True) reads the checkpoint anywhere."""
    return value.item() if isinstance(value, np.generic) else value


def unreadable(value: Any, place: str) -> str:
    """Which part of `value` cannot be read again: "['loader'], which is a function"; "" if all can. place: of value."""
    file = io.BytesIO()
    try:
        torch.serialization.save(value, file)
        file.seek(0)
        unpickle(file)
        return ""
    except Exception:  # an object of any class may raise anything
        inside = dict(enumerate(value)) if isinstance(value, (list, tuple)) else value
        if isinstance(inside, dict):
            for name, entry in inside.items():
                wrong = unreadable(entry, f"{place}[{name!r}]")
                if wrong:
                    return wrong
        return f"{place}, which is a {type(value).__name__}"


# ----- Writing ------------------------------------------------------------------------------------------


class CheckpointWriter:
    """Writes checkpoints in the background: the training loop waits for the copy to the CPU, not for the disk."""

    def __init__(self, lock: FolderLock, *, keep: int, milestone_every: int, deletable: list[int]):
        """keep: how many of the newest checkpoints stay; deletable: the steps of those that may be deleted."""
        self.lock = lock
        self.keep = keep
        self.milestone_every = milestone_every
        self.deletable = deletable
        self.executor = ThreadPoolExecutor(1)
        self.pending: list[Future[None]] = []
        self.has_written = False  # since `delete_old` was called

    def write(self, checkpoint: dict[str, Any]) -> None:
        """Write a Checkpoint as model_<step>.pt in the background."""
        step = checkpoint["step"]
        is_milestone = self.milestone_every > 0 and step % self.milestone_every == 0
        if not is_milestone:
            self.deletable.append(step)
        self.submit(f"model_{step:05d}.pt", {**checkpoint, "temporary": self.deletable})

    def submit(self, name: str, checkpoint: dict[str, Any]) -> None:
        """Write a checkpoint in the background, after the previous one has finished. Its tensors must not change."""
        self.wait()
        check_readable(checkpoint)
        plain = tree_map(as_pythons, checkpoint)
        self.pending.append(self.executor.submit(self.write_file, self.lock.folder / name, plain))

    def write_file(self, path, checkpoint):
        self.lock.check()
        with atomic_write(path) as file:
            try:
                torch.save(checkpoint, file)
            except RuntimeError as error:  # torch's writer hides why the file could not be written
                raise error.__context__ or error from None
        self.has_written = True

    def delete_old(self) -> None:
        """Delete old checkpoints, once the newest one is known to be good: a step that started from it was finite."""
        if self.has_written:
            self.has_written = False
            for old in list_checkpoints(self.lock.folder)[: -self.keep]:
                if step_of(old) in self.deletable:
                    old.unlink(missing_ok=True)

    def raise_error(self) -> None:
        """Raise the error of the pending checkpoint, if writing it has failed."""
        if self.pending and self.pending[0].done():
            self.wait()

    def wait(self) -> None:
        """Wait until the pending checkpoint is on disk, and raise the error if writing it has failed."""
        while self.pending:
            self.pending.pop().result()
