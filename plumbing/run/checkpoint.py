"""Find, read and write checkpoints, and read weights saved by other programs, for whatever model the trainer has."""

import dataclasses
import io
import itertools
import os
import pickle
import re
import zipfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple, TypedDict, TypeVar

import numpy as np
import tiktoken
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from plumbing.cli.console import UserError, first_line, plain, print0
from plumbing.cli.flags import suggest
from plumbing.data import tokenizers
from plumbing.files import FolderLock, Name, atomic_write, open_regular
from plumbing.run import checks, huggingface, source_code
from plumbing.system.autofit import SkipInit, make

Config = TypeVar("Config")
OPENAI_MODELS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
CHECKPOINT_NAME = re.compile(r"model_([0-9]{5,15})\.pt")  # log/model_00500.pt is that of step 500
BEST = "model_best.pt"  # the weights with the lowest validation loss
READABLE = "Use a model_*.pt file from a run of train_gpt2.py, or a checkpoint of nanoGPT or build-nanogpt."


class Checkpoint(TypedDict):
    """What a model_<step>.pt holds: plain data and tensors. model_best.pt has no state to continue from.

    A checkpoint of nanoGPT or build-nanogpt is given the first four of these, without a name of the tokenizer.
    """

    model: dict[str, Tensor]  # the model's state dict, without prefixes of DDP or torch.compile
    config: dict[str, Any]  # TrainConfig's fields
    model_fields: list[str]  # those of them that define the model
    tokenizer: str  # its name
    tokenizer_file: str  # all of it, as tokenizers.dumps gives it; "" is GPT-2's
    step: int  # updates so far
    optimizer: list[dict[str, Any]]  # the state of each optimizer, see `optimizer_states`
    scaler: dict[str, Any]  # float16's gradient scaler; empty in other dtypes
    loader: dict[str, Any]  # the position in the training data, and what fixes their order
    val_fingerprint: str | None  # that of the validation data
    val_loss: float | None  # the last one measured
    best_val_loss: float  # that of model_best.pt
    code: source_code.Code  # of the file that trained it
    temporary: list[int]  # steps whose checkpoints in the same folder may be deleted
    finished: bool  # whether the run's last evaluation is done
    examined: dict[str, Any]  # what was found out about the model, and of which code: checks.examine
    launch: str  # of the torchrun that wrote it, see logs.py


class PeerConfig:
    """Stands in for the GPTConfig that build-nanogpt pickles into its checkpoints, and has only its fields."""


def unpickle(path: Name | IO[bytes], mmap: bool = False) -> Any:
    """Read tensors, plain data and PeerConfig under any of its names; nothing else, so that no file can run code."""
    names: Any = [(PeerConfig, f"{module}.GPTConfig") for module in ("__main__", "train_gpt2", "model")]
    with torch.serialization.safe_globals(names):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


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
            print(f"warning: {error} Now the one before it is tried.", flush=True)
    if paths:
        raise UserError(
            f"None of the checkpoints in {source} can be read. Restore one from a backup. To start the training over, "
            "add --no-resume to its command."
        )
    return None


def load_checkpoint(path: Name) -> Checkpoint:
    """Load a checkpoint of this program, nanoGPT or build-nanogpt onto the CPU, as a dict of this program's form."""
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()  # the checksums, which torch.load does not check
        if damaged:
            raise zipfile.BadZipFile(f"the checksum of its part {damaged} is wrong")
        content = in_our_form(unpickle(path), path)
        kinds = {"model": dict, "config": dict, "model_fields": list, "tokenizer_file": str}
        kinds |= {"optimizer": list} if "optimizer" in content else {}
        missing = [f"no {name}" for name, kind in kinds.items() if not isinstance(content.get(name), kind)]
        if missing:
            raise UserError(
                f"{path} is not a checkpoint of train_gpt2.py: it has {', '.join(missing)}. {READABLE}"
            )
    except (UserError, FileNotFoundError):
        raise
    except Exception as error:  # a file that is damaged, or made by hand, can fail in any way
        reason = first_line(error)
        if isinstance(error, pickle.UnpicklingError):
            reason = "it contains more than tensors and plain data, perhaps code, which is never run"
        raise UserError(f"Checkpoint {path} cannot be read: {reason}. {READABLE}") from None
    return content


def metadata(config: Any, enc: tiktoken.Encoding, val_fingerprint: str) -> dict[str, Any]:
    """What every checkpoint of a run holds beside its state."""
    texts = {"tokenizer": enc.name, "tokenizer_file": tokenizers.dumps(enc), "val_fingerprint": val_fingerprint}
    settings = {"config": dataclasses.asdict(config), "model_fields": list(vars(config.model_config))}
    return settings | texts | {"code": source_code.describe(type(config))}


def in_our_form(content: Any, path: Name) -> Any:
    """The dict of a checkpoint; one of nanoGPT or build-nanogpt, which use GPT-2's names, is changed to our form."""
    if not isinstance(content, dict):
        return {}
    if "model_args" in content:
        config = content["model_args"]
    elif isinstance(content.get("config"), PeerConfig):
        config = vars(content["config"])
    else:
        return content
    # without the prefixes of DDP and torch.compile
    weights = {re.sub(r"^(module\.|_orig_mod\.)*", "", name): w for name, w in content["model"].items()}
    weights, settings = huggingface.from_peer(weights, config.get("n_head"), path)
    return {
        "model": weights,
        "config": settings,
        "model_fields": list(settings),
        "tokenizer_file": "",  # GPT-2's
    }


# ----- A model for any purpose: its settings, weights and tokenizer -------------------------------------


class SavedModel(NamedTuple):
    """A model as a checkpoint or a folder in Hugging Face format has it."""

    settings: dict[str, Any]  # GPTConfig's fields
    weights: dict[str, Tensor]  # its state dict
    enc: tiktoken.Encoding
    code: source_code.Code  # of the file that trained it; {} if that is not known
    examined: dict[str, Any] = {}  # what that code's model was found to do: checks.examine


def is_huggingface(source: Name) -> bool:
    """Whether `source` is a folder in Hugging Face format, or the name of a GPT-2 on the hub."""
    return Path(source, "config.json").exists() or str(source) in OPENAI_MODELS


def load_saved_model(source: str, config_class: type | None = None) -> SavedModel:
    """Load a GPT-2 by its name, a folder in Hugging Face format, a checkpoint or a run's newest one.

    config_class: the GPTConfig of the file that is to use it; UserError if that is not the file that trained it.
    """
    path = Path(source)
    if is_huggingface(source):
        settings, weights = huggingface.load_huggingface(source)
        return SavedModel(settings, weights, huggingface.load_tokenizer(source, settings), {})
    checkpoint = newest_checkpoint(path)
    if checkpoint:
        code = checkpoint.get("code", {})
        if config_class:
            source_code.compare(code, config_class, source, may_be_a_copy=False)
        parts = model_settings(checkpoint), checkpoint["model"], model_tokenizer(checkpoint)
        return SavedModel(*parts, code, checkpoint.get("examined", {}))
    runs = sorted(path.glob("*/run.txt"), key=os.path.getmtime, reverse=True)
    if runs:
        names = ", ".join(str(run.parent) for run in runs)
        raise UserError(f"{source} holds runs, not a model. Name one of them: {names}.")
    nearest = suggest(source, [*OPENAI_MODELS, *map(str, list_checkpoints(path.parent))])
    raise UserError(
        f"There is no model in {source}. Name a checkpoint (model_*.pt), a run's folder, a folder in Hugging Face "
        f"format, or a GPT-2. {nearest} To train a model first: python train_gpt2.py --preset quickstart"
    )


def model_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """Those settings in a checkpoint that define its model: GPTConfig's fields."""
    config = checkpoint["config"]
    return {name: config[name] for name in checkpoint["model_fields"] if name in config}


def model_tokenizer(checkpoint: Checkpoint) -> tiktoken.Encoding:
    text = checkpoint["tokenizer_file"]
    try:
        return tokenizers.loads(text) if text else tokenizers.get_encoding("gpt2")
    except ValueError as error:
        raise UserError(f"The checkpoint's tokenizer is damaged: {error}. Use another checkpoint.") from None


def make_config(config_class: type[Config], settings: dict[str, Any]) -> Config:
    """A GPTConfig from a saved model's settings: an unknown one is a UserError, a missing one takes its default."""
    defaults, problems = vars(config_class()), []
    for name, value in settings.items():
        if name not in defaults:
            problems.append(f"{name}, which {config_class.__name__} does not have")
        elif None not in (value, defaults[name]) and is_number(value) != is_number(defaults[name]):
            problems.append(f"a {name} of {value!r:.60}")
    if problems:
        raise UserError(
            f"The saved model has {'; '.join(problems)}. Use it with the file that trained it (--code), or use another "
            "model."
        )
    return config_class(**settings)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def from_state(model_class: type, config: Any, weights: dict[str, Tensor]) -> Any:
    """Make a model as `config` says and copy the state dict `weights` into it; UserError unless they fit exactly."""
    with SkipInit():
        model = make(model_class, config)
    new = sorted(model.state_dict().keys() - weights.keys())
    if new:  # a model whose load_state_dict allows that, as with adapters, begins these as it makes them
        model = make(model_class, config)
    load_weights(model, weights)
    if new:
        print0(
            f"note: The weights have no {', '.join(new[:3])}, so the model begins with what it has made there."
        )
    return model


def load_model(model_class: type, config_class: type, source: str) -> tuple[Any, SavedModel]:
    """Load a model, for generating text and for scoring, from whatever `load_saved_model` reads; and what was read."""
    saved = load_saved_model(source, config_class)
    return from_state(model_class, make_config(config_class, saved.settings), saved.weights).eval(), saved


def examine_loaded(model: Any, saved: SavedModel, *, num_ids: int, longest: int) -> None:
    """Find out whether a loaded model of num_ids ids has a cache, unless the run that trained this code knew it."""
    check_num_ids(num_ids, saved.enc)
    code, known = source_code.describe(type(model.config))["hash"], saved.examined
    if known.get("code") != code:
        known = checks.examine(model, saved.enc.n_vocab, longest, is_new=False)
    model.has_cache = known["has_cache"]


def load_pretrained(model_class: type, config_class: type, name_or_directory: str) -> Any:
    """Load a GPT-2 from the hub or from a Hugging Face folder, without its tokenizer."""
    settings, weights = huggingface.load_huggingface(name_or_directory)
    return from_state(model_class, config_class(**settings), weights)


def load_weights(model: torch.nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy a state dict into `model`. UserError unless names and shapes are its own, and shared tensors are equal."""
    problems = []
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        # below torch's first line: missing names, unknown names, other shapes; an error of the model's own has one line
        found = str(error).splitlines()[1:] or [first_line(error)]
        problems = [plain(line.strip(" \t.")) for line in found]
    else:
        name_of = {}
        own = tensors_in(model.state_dict())
        for name in [name for name in own if name in weights]:  # in the model's order
            same = name_of.setdefault(memory_of(own[name]), name)
            if same != name and not torch.equal(weights[name], weights[same]):
                problems.append(f"{name} and {same} differ, but are one tensor here")
    if problems:
        raise UserError(
            f"The saved weights are not those of this model: {'; '.join(problems[:3])}. Use the file and the settings "
            "that trained them, or use other weights."
        )


def new_rows(weight: Tensor, number: int, how: str) -> Tensor:
    """So many rows to add to a weight. "mean": that of the others, for ids, as zeros would give an id logit 0, far
    above that of most. "tiling": the others from the first on, for positions (records/2026-11-25-longer-sequences).
    """
    if how == "mean":
        return weight.mean(0).expand(number, *weight.shape[1:])
    return weight[torch.arange(number) % len(weight)]


def resize(
    weights: dict[str, Tensor], shapes: dict[str, torch.Size], how: str, *, rows: tuple[int, int]
) -> dict[str, Tensor]:
    """Those of `weights` that have as many rows as rows[0], where the model's own `shapes` have rows[1]: with so many.

    How new ones are made is said to `new_rows`; what is too many is left out.
    """
    then, now = rows
    return {
        name: torch.cat([weight[:now], new_rows(weight, max(0, now - then), how)])
        for name, weight in weights.items()
        if weight.shape[:1] == (then,) and shapes.get(name, ())[:1] == (now,)
    }


def other_tables(weights: dict[str, Tensor], before: torch.nn.Module, now: torch.nn.Module) -> dict[str, Tensor]:
    """The buffers of the model `now` that have other shapes than in `before`, which made those in `weights`.

    That is of tables such as rotary embeddings or a causal mask. What a buffer has learned is not as it was made.
    """
    own, then = (dict(each.named_buffers(remove_duplicate=False)) for each in (now, before))
    return {
        name: own[name]
        for name in own.keys() & then.keys() & weights.keys()
        if own[name].shape != then[name].shape == weights[name].shape
        and torch.allclose(weights[name], then[name].to(weights[name].dtype))
    }


def tensors_in(state: dict[str, Any]) -> dict[str, Tensor]:
    """A state dict without what get_extra_state has added, unless that is a tensor, too."""
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """What is the same for tensors that share their memory entirely, such as tied weights."""
    if not tensor.numel():
        return (id(tensor),)  # all of them are at address 0
    place = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
    return *place, tensor.shape, tensor.stride(), tensor.dtype


def check_tokenizer(name: str, enc: tiktoken.Encoding, data: str) -> None:
    """Raise UserError unless `enc`, the tokenizer of the shards in `data`, is the model's own, called `name`."""
    if name and name.removesuffix("+chat") != enc.name.removesuffix("+chat"):
        raise UserError(
            f"The shards in {data} have tokenizer {enc.name}, but the model uses {name}. Make shards with "
            "that tokenizer, in another folder."
        )


def check_num_ids(num_ids: int, enc: tiktoken.Encoding) -> None:
    """Raise UserError if a model with logits for `num_ids` ids has none for some id of the tokenizer."""
    if num_ids < enc.n_vocab:
        raise UserError(
            f"The model has room for {num_ids} token ids, but tokenizer {enc.name} has {enc.n_vocab}. Use the "
            f"model's own tokenizer, or set a new model's --vocab-size to {enc.n_vocab} or more."
        )


# ----- The state that a run continues from --------------------------------------------------------------


def training_state(model: torch.nn.Module, optimizers: list[Any], scaler: Any, loader: Any) -> dict[str, Any]:
    """What an exact resume needs, except for the step; each part loads its own entry again."""
    return {
        "model": model.state_dict(),
        "optimizer": optimizer_states(model, optimizers),
        "scaler": scaler.state_dict(),
        "loader": loader.state_dict(),
    }


def check_readable(state: Any) -> None:
    """Raise UserError, which names the place, if what a checkpoint holds beside tensors could not be read again."""

    def without_tensors(value: Any) -> Any:
        return None if isinstance(value, Tensor) else as_pythons(value)

    place = unreadable(tree_map(without_tensors, state), "")
    if place:
        raise UserError(
            f"No checkpoint could be read again with {place}. Keep tensors, numbers and texts there, or lists and "
            "dicts of these, and make all else anew at every start."
        )


def as_pythons(value: Any) -> Any:
    """Python's number for one of numpy's, which could be written, but not read again."""
    return value.item() if isinstance(value, np.generic) else value


def unreadable(value: Any, place: str) -> str:
    """What of `value`, which is at `place`, cannot be read again: "['loader'], which is a function"; "" if all can."""
    file = io.BytesIO()
    try:
        torch.serialization.save(value, file)
        file.seek(0)
        unpickle(file)
        return ""
    except Exception:  # whatever an object of any class does there
        inside = dict(enumerate(value)) if isinstance(value, (list, tuple)) else value
        entries = inside.items() if isinstance(inside, dict) else ()
        places = (unreadable(entry, f"{place}[{name!r}]") for name, entry in entries)
        return next(filter(None, places), f"{place}, which is a {type(value).__name__}")


# torch's names for state that is as large as the parameter
ELEMENTWISE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
MADE = "made"  # in a parameter group: its values when the optimizer was made, by this run's settings


def mark_groups(optimizers: list[Any]) -> None:
    """Keep in each parameter group the values with which it was made, for `load_optimizer_states`."""
    for group in [group for optimizer in optimizers for group in optimizer.param_groups]:
        group[MADE] = {name: value for name, value in group.items() if name != "params"}


def optimizer_states(model: torch.nn.Module, optimizers: list[Any]) -> list[dict[str, Any]]:
    """The state dict of each optimizer, to which its class and the names of the parameters are added."""
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    states = []
    for optimizer in optimizers:
        state = optimizer.state_dict()
        for group, own in zip(state["param_groups"], optimizer.param_groups):
            group["param_names"] = [name_of.get(parameter, "unknown") for parameter in own["params"]]
        states.append(state | {"class": type(optimizer).__name__})
    return states


def load_optimizer_states(model: torch.nn.Module, optimizers: list[Any], states: list[dict[str, Any]]) -> str:
    """Restore what `optimizer_states` returned; "" or, if it does not fit, why: then nothing is changed.

    What this run's settings made is this run's, and everything else the checkpoint's: where a group's value is made as
    it was then, the saved one counts, which a schedule or the optimizer itself may have changed since.
    """
    then, now = places(states), places(optimizer_states(model, optimizers))
    pairs = itertools.zip_longest(then, now, fillvalue="nothing")
    problems = [f"{before} in the place of {after}" for before, after in pairs if before != after]
    for optimizer, state in zip(optimizers, states) if not problems else ():
        is_torchs = type(optimizer).__module__.startswith("torch.")  # another's state may be of any shape
        for own, name, value in tensors_of(optimizer, state):
            if value.shape == own.shape:
                # a fused kernel reads memory in order, so what lies transposed in it must do so here, too
                layout = torch.empty_like(own, dtype=value.dtype, device=value.device)
                value.data = value if value.stride() == layout.stride() else layout.copy_(value)
            elif is_torchs and name in ELEMENTWISE:
                problems.append(f"{name} of shape {tuple(value.shape)} for a parameter of {tuple(own.shape)}")
    if problems:
        return problems[0]
    for optimizer, state in zip(optimizers, states):
        groups = [
            {"params": saved["params"], **continued(own, saved)}
            for own, saved in zip(optimizer.param_groups, state["param_groups"])
        ]
        rest = {name: value for name, value in state.items() if name != "class"}
        optimizer.load_state_dict({**rest, "param_groups": groups})
        # torch has made each floating one the parameter's dtype
        for own, name, value in tensors_of(optimizer, state):
            restored = optimizer.state[own][name]
            if restored.dtype != value.dtype:
                optimizer.state[own][name] = value.to(restored.device)
    return ""


def tensors_of(optimizer: Any, state: dict[str, Any]) -> list[tuple[Tensor, str, Tensor]]:
    """(parameter, name, tensor) of each tensor that a saved state has of one of the optimizer's parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [
        (parameters[number], name, value)
        for number, values in state["state"].items()
        if isinstance(number, int) and isinstance(values, dict)
        for name, value in values.items()
        if isinstance(value, Tensor)
    ]


def continued(own: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """The values of a parameter group that goes on: `own` as this run has made it, `saved` as the checkpoint has it."""

    def same(one: Any, other: Any) -> bool:
        tensors = isinstance(one, Tensor) and isinstance(other, Tensor)
        return bool(torch.equal(one, other)) if tensors else bool(one == other)

    made, made_then = own[MADE], saved[MADE]
    kept = {name for name, value in made.items() if name in made_then and same(value, made_then[name])}
    values = {name: saved[name] if name in kept and name in saved else value for name, value in made.items()}
    # what was added since, such as a count of steps; but not a copy of what has another value now, such as a peak rate
    others = {name: value for name, value in made_then.items() if name not in kept}
    added = [name for name in saved if name not in (*made, "params", "param_names", MADE)]
    copies = {name for name in added for other in others if other in name and same(saved[name], others[other])}
    return values | {MADE: made} | {name: saved[name] for name in added if name not in copies}


def places(states: list[dict[str, Any]]) -> list[str]:
    """A text for each group and each parameter in it, in the order of the optimizers."""
    texts = []
    for state in states:
        for number, group in enumerate(state["param_groups"]):
            place = f"group {number} of {state['class']}"
            texts += [place, *(f"{name} in {place}" for name in group["param_names"])]
    return texts


def diverged(
    config: Any, step: int, loss: float, norm: float, *, loader: Any, start: int, B: int, batch_losses: list[Any]
) -> UserError:
    """The error for a loss or gradient norm that is not finite, in a step whose windows begin at position `start`.

    batch_losses: for each rank, the losses of its micro-batches, of B windows each.
    """
    losses = np.array(batch_losses).T.flatten()  # in the order of the micro-batches
    bad = np.flatnonzero(~np.isfinite(losses)).tolist() or range(len(losses))
    positions = [start + number * B + row for number in bad for row in range(B)][:4]
    where = ", ".join(split.describe(number) for split, number in loader.locate(np.array(positions)))
    rates = "--max-lr LOWER --muon-lr LOWER" if config.optimizer == "muon" else "--max-lr LOWER"
    # from the checkpoint of this very step, no step has succeeded
    good = [path for path in list_checkpoints(config.out_dir) if step_of(path) < step]
    remedy = f"--branch-from {good[-1]} {rates} --out-dir NEW" if good else f"--no-resume {rates}"
    return UserError(
        f"Training diverged in step {step}: the loss is {loss}, the gradient norm {norm}. The batch includes the "
        f"sequences at {where}. Train at a lower rate: {remedy}."
    )


# ----- Writing ------------------------------------------------------------------------------------------


class CheckpointWriter:
    """Writes checkpoints in the background: the training loop waits for the copy to the CPU, not for the disk."""

    def __init__(self, lock: FolderLock, keep: int, milestone_every: int, deletable: list[int]):
        """deletable: the steps of the checkpoints in the folder that may be deleted."""
        self.lock, self.keep, self.milestone_every, self.deletable = lock, keep, milestone_every, deletable
        self.executor = ThreadPoolExecutor(1)
        self.pending: list[Future[None]] = []
        self.has_written = False  # since `delete_old` was called

    def write(self, checkpoint: Checkpoint) -> None:
        step = checkpoint["step"]
        if not self.milestone_every or step % self.milestone_every:
            self.deletable.append(step)
        self.submit(f"model_{step:05d}.pt", {**checkpoint, "temporary": self.deletable})

    def submit(self, name: str, checkpoint: Checkpoint) -> None:
        """Copy a checkpoint to the CPU and write it in the background, after the previous one has finished."""
        self.wait()
        copies: dict[Any, Tensor] = {}

        def copy(value):
            if not isinstance(value, Tensor):
                return as_pythons(value)
            memory = memory_of(value)
            if memory not in copies:  # tied weights are copied once, and tied in the file
                copies[memory] = value.to("cpu", copy=True)
            return copies[memory]

        check_readable(checkpoint)
        copied = tree_map(copy, checkpoint)
        self.pending.append(self.executor.submit(self.write_file, self.lock.folder / name, copied))

    def write_file(self, path, checkpoint):
        self.lock.check()
        with atomic_write(path) as file:
            try:
                torch.save(checkpoint, file)
            except RuntimeError as error:  # torch's writer hides why the file could not be written
                raise error.__context__ or error from None
        self.has_written = True

    def delete_old(self) -> None:
        """Delete what may be deleted but for the newest `keep` checkpoints, once the newest is known to be good."""
        if self.has_written:
            self.has_written = False
            for old in list_checkpoints(self.lock.folder)[: -self.keep]:
                if step_of(old) in self.deletable:
                    old.unlink(missing_ok=True)

    def raise_error(self) -> None:
        """Raise the error that has ended the writing of the pending checkpoint, if there is one."""
        if self.pending and self.pending[0].done():
            self.wait()

    def wait(self) -> None:
        """Wait until the pending checkpoint is on disk; re-raise any error from writing it."""
        while self.pending:
            self.pending.pop().result()
