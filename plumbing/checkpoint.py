"""Find, read and write checkpoints, and read weights saved by other programs."""

import ast
import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import pickle
import re
import sys
import zipfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypedDict

import tiktoken
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_with_path

import tokenizer
from plumbing.files import FolderLock, Name, atomic_write, open_regular
from plumbing.flags import flag_of, suggest
from plumbing.huggingface import load_huggingface, load_tokenizer, shape_of
from plumbing.program import ROOT, UserError, first_line, plain

SHAPE = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")  # the fields of GPTConfig
OPENAI_MODELS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
CHECKPOINT_NAME = re.compile(r"model_([0-9]{5,15})\.pt")  # log/model_00500.pt is that of step 500
BEST = "model_best.pt"  # the weights with the lowest validation loss
READABLE = "Use a model_*.pt file from a run of train_gpt2.py, or a checkpoint of nanoGPT or build-nanogpt."


class Checkpoint(TypedDict):
    """What a model_<step>.pt holds: plain data and tensors. model_best.pt has no state to continue from.

    A checkpoint of nanoGPT or build-nanogpt is given this form, with `model`, `config` and `tokenizer_file` alone.
    """

    model: dict[str, Tensor]  # GPT's state dict, without prefixes of DDP or torch.compile
    config: dict[str, Any]  # TrainConfig's fields
    tokenizer: str  # its name
    tokenizer_file: str  # all of it, as tokenizer.dumps gives it; "" is GPT-2's
    step: int  # updates so far
    optimizer: list[dict[str, Any]]  # the state dict of each optimizer
    scaler: dict[str, Any]  # float16's gradient scaler; empty in other dtypes
    loader: dict[str, Any]  # the position in the training data, and their fingerprint
    val_fingerprint: str | None  # that of the validation data
    val_loss: float | None  # the last one measured
    best_val_loss: float  # that of model_best.pt
    model_code: str  # a hash of the model's code
    temporary: list[int]  # steps whose checkpoints in the same folder may be deleted


class PeerConfig:
    """Stands in for the GPTConfig that build-nanogpt pickles into its checkpoints, and has only its fields."""


def unpickle(path: Name, mmap: bool = False) -> Any:
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
            problem = str(error).removesuffix(f" {READABLE}")
            print(f"warning: {plain(problem, 500)} Skipping it and trying the one before.", flush=True)
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
        content = from_peer(unpickle(path))
        missing = [f"no {name}" for name in ("model", "config", "tokenizer_file") if content.get(name) is None]
        if missing:
            raise UserError(
                f"{path} is not a checkpoint of train_gpt2.py: it has {', '.join(missing)}. {READABLE}"
            )
        content["config"] |= shape_of(content["model"], content["config"].get("n_head"), path)
    except (UserError, FileNotFoundError):
        raise
    except Exception as error:  # a file that is damaged, or made by hand, can fail in any way
        reason = first_line(error)
        if isinstance(error, pickle.UnpicklingError):
            reason = "it contains more than tensors and plain data, perhaps code, which is never run"
        raise UserError(f"Checkpoint {path} cannot be read: {reason}. {READABLE}") from None
    if content.get("model_code", model_code()) != model_code():  # those of the peers have none
        print(
            f"note: {plain(path)} was trained with a different version of the model's code in train_gpt2.py. If the "
            "forward pass has changed since, check out the commit that run.txt names.",
            file=sys.stderr,
        )
    return content


def metadata(config: Any, enc: tiktoken.Encoding, val_fingerprint: str) -> dict[str, Any]:
    """What every checkpoint of a run holds beside its state."""
    texts = {"tokenizer": enc.name, "tokenizer_file": tokenizer.dumps(enc), "model_code": model_code()}
    return {"config": dataclasses.asdict(config), "val_fingerprint": val_fingerprint, **texts}


@functools.cache
def model_code() -> str:
    """A hash of the code of the model's classes in train_gpt2.py, comments aside."""
    tree = ast.parse((ROOT / "train_gpt2.py").read_text(encoding="utf-8"))
    names = ("CausalSelfAttention", "MLP", "Block", "GPT")
    code = [ast.unparse(node) for node in tree.body if isinstance(node, ast.ClassDef) and node.name in names]
    return hashlib.sha256("".join(code).encode()).hexdigest()[:16]


def from_peer(content: Any) -> Any:
    """The dict of a checkpoint; one of nanoGPT or build-nanogpt, which use GPT-2's names, is changed to our form."""
    if not isinstance(content, dict):
        return {}
    if "model_args" in content:
        config = content["model_args"]
    elif isinstance(content.get("config"), PeerConfig):
        config = vars(content["config"])
    else:
        return content
    weights = {}
    for name, weight in content["model"].items():
        name = re.sub(r"^(module\.|_orig_mod\.)*", "", name)  # the prefixes of DDP and torch.compile
        if not name.endswith(".attn.bias"):  # the causal mask
            weights[name] = weight
        if name.startswith(("transformer.h.", "transformer.ln_f.")) and name.endswith(".weight"):
            # nanoGPT's bias=False is the same as biases of zero
            weights.setdefault(name.removesuffix("weight") + "bias", weight.new_zeros(len(weight)))
    return {"model": weights, "config": config, "tokenizer_file": ""}  # the tokenizer is GPT-2's


def peek_settings(*sources: Name) -> dict[str, Any]:
    """The settings of the first of these files, runs or Hugging Face folders that can be read; {} if none can."""
    for path in map(Path, sources):
        for checkpoint in [path] if path.is_file() else reversed(list_checkpoints(path)):
            with contextlib.suppress(Exception):  # it is reported when the file is loaded
                return dict(from_peer(unpickle(checkpoint, mmap=True))["config"])
        with contextlib.suppress(Exception), open_regular(path / "config.json") as file:
            return {"block_size": int(json.load(file)["n_positions"])}
    return {}


# ----- A model for any purpose: its shape, weights and tokenizer ----------------------------------------


def load_weights(model: torch.nn.Module, weights: dict[str, Tensor]) -> None:
    """Use a state dict's tensors as the weights of `model`, without copying. Raises UserError unless they fit."""
    try:
        model.load_state_dict({name: weight.contiguous() for name, weight in weights.items()}, assign=True)
    except RuntimeError as error:  # it lists missing, unexpected and differently shaped weights, one per line
        reason = " ".join(str(error).splitlines()[1:2]).strip(" \t.")
        raise UserError(f"The weights are not those of a GPT-2: {reason}. Use another model.") from None


def model_state(checkpoint: Checkpoint) -> tuple[dict[str, int], dict[str, Tensor]]:
    """(shape, weights) of a checkpoint's dict: GPTConfig's fields and a state dict for GPT."""
    weights = {name: weight.float() for name, weight in checkpoint["model"].items()}  # a file may store bfloat16
    return {name: checkpoint["config"][name] for name in SHAPE}, weights


def model_tokenizer(checkpoint: Checkpoint) -> tiktoken.Encoding:
    text = checkpoint["tokenizer_file"]
    try:
        return tokenizer.loads(text) if text else tokenizer.get_encoding("gpt2")
    except ValueError as error:
        raise UserError(f"The checkpoint's tokenizer is damaged: {error}. Use another checkpoint.") from None


def load_model_state(source: str) -> tuple[dict[str, int], dict[str, Tensor], tiktoken.Encoding]:
    """Load (shape, weights, tokenizer) from a GPT-2 name, a Hugging Face folder, a checkpoint or a run's newest one."""
    path = Path(source)
    if (path / "config.json").exists() or source in OPENAI_MODELS:
        shape, weights = load_huggingface(source)
        enc = load_tokenizer(source, shape["vocab_size"])
    elif checkpoint := newest_checkpoint(path):
        shape, weights = model_state(checkpoint)
        enc = model_tokenizer(checkpoint)
    else:
        runs = sorted(path.glob("*/run.txt"), key=os.path.getmtime, reverse=True)
        if runs:
            names = ", ".join(str(run.parent) for run in runs)
            raise UserError(f"{source} holds runs, not a model. Name one of them: {names}.")
        if not path.exists():
            raise UserError(
                f"There is no file or folder {source}, and no GPT-2 of that name. "
                f"{suggest(str(source), [*OPENAI_MODELS, *map(str, list_checkpoints(path.parent))])} To train a model "
                "first: python train_gpt2.py --preset quickstart"
            )
        raise UserError(
            f"There is no model in {source}. Name a checkpoint (model_*.pt), a run's folder, a folder in Hugging Face "
            f"format, or a GPT-2: {', '.join(OPENAI_MODELS)}."
        )
    check_vocab_size(shape["vocab_size"], enc)
    return shape, weights, enc


# ----- The model that a run begins with -----------------------------------------------------------------


def check_tokenizer(model_enc: tiktoken.Encoding, enc: tiktoken.Encoding, data: str) -> None:
    """Raise UserError unless `enc`, the tokenizer of the shards in `data`, is the model's own."""
    if model_enc.name.removesuffix("+chat") != enc.name.removesuffix("+chat"):
        raise UserError(
            f"The shards in {data} have tokenizer {enc.name}, but the model uses {model_enc.name}. Make shards with "
            "that tokenizer, in another folder."
        )


def check_vocab_size(vocab_size: int, enc: tiktoken.Encoding) -> None:
    """Raise UserError if an embedding of vocab_size rows has no row for some id of the tokenizer."""
    if vocab_size < enc.n_vocab:
        raise UserError(
            f"The model has room for {vocab_size} token ids, but tokenizer {enc.name} has {enc.n_vocab}. Use the "
            f"model's own tokenizer, or set a new model's --vocab-size to {enc.n_vocab} or more."
        )


def padded_vocab_size(enc: tiktoken.Encoding) -> int:
    """Rows of the embedding for a tokenizer, padded to a multiple of 64 for faster matmuls: 50,304 for 50,257."""
    return math.ceil(enc.n_vocab / 64) * 64


def resize(shape, weights, *, block_size, vocab_size):
    """Truncate the positions of a model's state to block_size and pad its vocabulary to at least vocab_size rows."""
    wte, wpe = weights["transformer.wte.weight"], weights["transformer.wpe.weight"]
    # not zeros, which would give logit 0, far above what a trained model assigns to most tokens
    new_rows = wte.mean(0).expand(max(0, vocab_size - len(wte)), -1)
    wte = torch.cat([wte, new_rows])
    wpe = wpe[:block_size].clone()
    shape = shape | {"vocab_size": len(wte), "block_size": len(wpe)}
    resized = {"transformer.wte.weight": wte, "lm_head.weight": wte, "transformer.wpe.weight": wpe}
    return shape, weights | resized


def load_initial_weights(
    config: Any, preset: Any, enc: tiktoken.Encoding
) -> tuple[dict[str, int], dict[str, Tensor]]:
    """(shape, weights) of --init-from, fitted to the run. Flags that differ from `preset` must match the model."""
    shape, weights, model_enc = load_model_state(config.init_from)
    check_tokenizer(model_enc, enc, config.data)
    for name in ("n_layer", "n_head", "n_embd"):
        given, flag = getattr(config, name), flag_of(name)
        if given not in (getattr(preset, name), shape[name]):
            raise UserError(f"{flag} is {given}, but {config.init_from} has {shape[name]}. Leave the flag out.")
    vocab_size = max(config.vocab_size, padded_vocab_size(enc))
    shape, weights = resize(shape, weights, block_size=config.block_size, vocab_size=vocab_size)
    if config.sequence_length > shape["block_size"]:
        raise UserError(
            f"--sequence-length {config.sequence_length} is above the {shape['block_size']} tokens that "
            f"{config.init_from} can read. Lower it to that."
        )
    return shape, weights


# ----- Writing ------------------------------------------------------------------------------------------


class CheckpointWriter:
    """Writes checkpoints in the background: the training loop waits for the copy to the CPU, not for the disk."""

    def __init__(self, lock: FolderLock, keep: int, milestone_every: int, deletable: list[int]):
        """deletable: the steps of the checkpoints in the folder that may be deleted."""
        self.lock, self.keep, self.milestone_every, self.deletable = lock, keep, milestone_every, deletable
        self.executor = ThreadPoolExecutor(1)
        self.pending: list[Future[None]] = []
        self.buffers: dict[Any, Tensor] = {}

    def write(self, checkpoint: Checkpoint) -> None:
        step = checkpoint["step"]
        if not self.milestone_every or step % self.milestone_every:
            self.deletable.append(step)
        self.submit(f"model_{step:05d}.pt", {**checkpoint, "temporary": self.deletable})

    def submit(self, name: str, checkpoint: Checkpoint) -> None:
        """Copy a checkpoint to the CPU and write it in the background, after the previous one has finished."""
        self.wait()
        model: dict[str, Any] = checkpoint["model"] | {"lm_head.weight": None}  # tied weights are copied once
        copied = tree_map_with_path(self.copy, {**checkpoint, "model": model})
        if model["transformer.wte.weight"].is_cuda:
            torch.cuda.synchronize()
        copied["model"]["lm_head.weight"] = copied["model"]["transformer.wte.weight"]
        self.pending.append(self.executor.submit(self.write_file, self.lock.folder / name, copied))

    def copy(self, place, value):
        """Copy a tensor to a buffer, which is kept for the next checkpoint's tensor in the same place."""
        if not isinstance(value, torch.Tensor):
            return value
        if place not in self.buffers:  # the GPU copies to pinned memory several times as fast
            try:
                self.buffers[place] = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
            except RuntimeError:  # such memory is scarce, and torch rounds it up to powers of two
                self.buffers[place] = torch.empty_like(value, device="cpu")
        return self.buffers[place].copy_(value, non_blocking=value.is_cuda)

    def write_file(self, path, checkpoint):
        """Write a checkpoint; then delete all that may be deleted but the newest `keep` checkpoints."""
        self.lock.check()
        with atomic_write(path) as file:
            try:
                torch.save(checkpoint, file)
            except RuntimeError as error:  # torch's writer hides why the file could not be written
                raise error.__context__ or error from None
        for old in list_checkpoints(path.parent)[: -self.keep]:
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
