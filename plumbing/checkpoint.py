"""Find, read and write checkpoints, and read weights saved by other programs."""

import contextlib
import json
import math
import os
import pickle
import re
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import tokenizer
from plumbing.cli import UserError, first_line, flag_of, suggest
from plumbing.files import atomic_write, open_regular
from plumbing.huggingface import load_huggingface, load_tokenizer, shape_of

SHAPE = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")  # the fields of GPTConfig
OPENAI_MODELS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
CHECKPOINT_NAME = re.compile(r"model_([0-9]{5,15})\.pt")
BEST = "model_best.pt"  # the weights with the lowest validation loss
NOT_OURS = "Use a model_*.pt file from a run of train_gpt2.py, or one of nanoGPT or build-nanogpt."

# ----------------------------------------------------------------------------------------------------------
# Reading


def list_checkpoints(folder):
    """The paths of a folder's checkpoints, oldest first."""
    paths = [path for path in Path(folder).glob("model_*.pt") if CHECKPOINT_NAME.fullmatch(path.name)]
    return sorted(filter(Path.is_file, paths), key=step_of)


def step_of(path):
    """ "log/model_00500.pt" -> 500"""
    return int(CHECKPOINT_NAME.fullmatch(path.name)[1])


def newest_checkpoint(source, for_resume=True):
    """Load the newest intact checkpoint in a folder, or the file `source` itself, as a dict. None if there are none.

    Reports the damaged ones that it skips. Raises UserError if all are damaged.
    """
    if Path(source).is_file():
        return load_checkpoint(source, for_resume)
    paths = list_checkpoints(source)
    for path in reversed(paths):
        try:
            return load_checkpoint(path, for_resume)
        except UserError as error:
            print(f"warning: {error} Skipping it and trying the checkpoint before it.", flush=True)
    if paths:
        raise UserError(
            f"None of the checkpoints in {source} can be read, for the reasons above. "
            "Restore one from a backup, or train again with train_gpt2.py --no-resume."
        )
    return None


def load_checkpoint(path, for_resume=False):
    """Load a checkpoint's dict onto the CPU. for_resume: require everything that resuming needs."""
    return check_content(path, read_pickle(path), for_resume)


def check_content(path, content, for_resume=False):
    """Return the dict `content` of the file `path` if it is a whole checkpoint, with the shape of its weights."""
    kinds = {"model": dict, "config": dict, "step": int, "tokenizer_file": str}
    if for_resume:
        kinds |= {"optimizer": list, "scaler": dict, "loader": dict}
    missing = ", ".join(f"no {name}" for name, kind in kinds.items() if not isinstance(content.get(name), kind))
    if missing:
        remedy = "To start a new run from weights alone, use --init-from." if for_resume else NOT_OURS
        raise UserError(f"{path} is not a whole checkpoint of train_gpt2.py: it has {missing}. {remedy}")
    content["config"] |= shape_of(content["model"], content["config"].get("n_head"), path)
    return {"val_loss": None, "best_val_loss": None} | content  # older checkpoints may lack these


def peek_settings(*sources):
    """The settings of the first model among files, runs and Hugging Face folders that can be read; {} if none can.

    No weights are read; errors in a file are reported when it is loaded.
    """
    for path in map(Path, sources):
        for checkpoint in [path] if path.is_file() else reversed(list_checkpoints(path)):
            with contextlib.suppress(Exception), allow_peer_config():
                content = torch.load(checkpoint, map_location="cpu", mmap=True, weights_only=True)
                config = content.get("model_args") or content["config"]
                return config if isinstance(config, dict) else vars(config)
        with contextlib.suppress(Exception), open_regular(path / "config.json") as file:
            return {"block_size": json.load(file)["n_positions"]}
    return {}


def read_pickle(path):
    """The dict in a file written by torch.save. Only tensors and plain data are read, so no file can run code."""
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()  # the checksums, which torch.load does not check
        if damaged:
            raise zipfile.BadZipFile(f"the checksum of its part {damaged} is wrong")
        with warnings.catch_warnings(action="ignore"), allow_peer_config():
            content = torch.load(path, map_location="cpu", weights_only=True)
    except UserError:
        raise
    except pickle.UnpicklingError:
        reason = "it contains more than tensors and plain data, perhaps code, which is never run"
    except Exception as error:  # a damaged file can make the unpickler fail in any way
        reason = getattr(error, "strerror", None) or first_line(error).rstrip(".")
    else:
        if isinstance(content, dict):
            return content
        reason = f"it holds a value of type {type(content).__name__}"
    raise UserError(f"Checkpoint {path} cannot be read: {reason}. {NOT_OURS}")


# ----------------------------------------------------------------------------------------------------------
# A model for any purpose: its shape, weights and tokenizer


def load_weights(model, weights):
    """Use a state dict's tensors as the weights of `model`, without copying. Raises UserError unless they fit."""
    try:
        model.load_state_dict({name: weight.contiguous() for name, weight in weights.items()}, assign=True)
    except RuntimeError as error:  # it lists missing, unexpected and differently shaped weights, one per line
        reason = " ".join(str(error).splitlines()[1:2]).strip(" \t.")
        raise UserError(f"The weights are not those of a GPT-2: {reason}. Use another model.") from None


def model_state(checkpoint):
    """(shape, weights) of a checkpoint's dict: GPTConfig's fields and a state dict for GPT."""
    weights = {name: weight.float() for name, weight in checkpoint["model"].items()}  # a file may store bfloat16
    return {name: checkpoint["config"][name] for name in SHAPE}, weights


def model_tokenizer(checkpoint):
    """The tokenizer in a checkpoint's dict."""
    try:
        return tokenizer.loads(checkpoint["tokenizer_file"])
    except ValueError as error:
        raise UserError(f"The checkpoint's tokenizer is damaged: {error}. Use another checkpoint.") from None


def load_model_state(source):
    """Load (shape, weights, tokenizer) from a GPT-2 name, a Hugging Face folder, a checkpoint or a run's newest one."""
    path = Path(source)
    if path.exists() and not path.is_dir():
        content = read_pickle(path)
        if isinstance(content.get("model_args"), dict) or isinstance(content.get("config"), PeerConfig):
            return peer_model_state(path, content)
        checkpoint = check_content(path, content)
        return *model_state(checkpoint), model_tokenizer(checkpoint)
    if (path / "config.json").exists() or source in OPENAI_MODELS:
        shape, weights = load_huggingface(source)
        return shape, weights, load_tokenizer(source, shape["vocab_size"])
    checkpoint = newest_checkpoint(path, for_resume=False)
    if checkpoint:
        return *model_state(checkpoint), model_tokenizer(checkpoint)
    runs = sorted(path.glob("*/run.txt"), key=os.path.getmtime, reverse=True)
    if runs:
        names = ", ".join(str(run.parent) for run in runs)
        raise UserError(f"The folder {source} is not a run, but it has runs in it. Give one of them: {names}.")
    if path.is_dir():
        raise UserError(
            f"The folder {source} has neither a checkpoint (model_*.pt) nor a config.json. "
            "Give a run's folder, or one in Hugging Face format."
        )
    raise UserError(
        f"There is no model called {str(source)!r}. Give a checkpoint, a run's folder, a folder in Hugging Face "
        f"format, or the name of a GPT-2. {suggest(str(source), OPENAI_MODELS)}"
    )


class PeerConfig:
    """Stands in for the GPTConfig that build-nanogpt pickles into its checkpoints, and has only its fields."""


def allow_peer_config():
    """Let torch.load read build-nanogpt's GPTConfig, under any of its names, as a PeerConfig, without running code."""
    names = ("__main__.GPTConfig", "train_gpt2.GPTConfig", "model.GPTConfig")
    return torch.serialization.safe_globals([(PeerConfig, name) for name in names])


def peer_model_state(path, content):
    """(shape, weights, tokenizer) of a checkpoint written by nanoGPT or build-nanogpt, which keep GPT-2's names."""
    config = content["model_args"] if "model_args" in content else vars(content["config"])
    weights = {
        re.sub(r"^(module\.|_orig_mod\.)*", "", name): weight.float()  # the prefixes of DDP and torch.compile
        for name, weight in content["model"].items()
        if not name.endswith((".attn.bias", ".attn.masked_bias"))
    }
    weights.setdefault("lm_head.weight", weights.get("transformer.wte.weight"))
    shape = shape_of(weights, config.get("n_head"), path)
    if shape["vocab_size"] < 50257:
        raise UserError(
            f"{path} was trained with a tokenizer of {shape['vocab_size']} ids that is not in the file, so its text "
            "cannot be read. Only checkpoints with GPT-2's tokenizer can be used."
        )
    for name in [name for name in weights if name.endswith(".weight")]:
        is_linear_or_norm = not name.startswith(("lm_head", "transformer.wte", "transformer.wpe"))
        bias = name.removesuffix("weight") + "bias"
        if is_linear_or_norm and bias not in weights:  # nanoGPT's bias=False is the same as biases of zero
            weights[bias] = weights[name].new_zeros(len(weights[name]))
    if "model_args" in content:
        print(
            "note: nanoGPT computes the exact GELU and this program GPT-2's approximation of it, so this model's "
            "losses are slightly different here.",
            flush=True,
        )
    return shape, weights, tokenizer.get_encoding("gpt2")


# ----------------------------------------------------------------------------------------------------------
# The model that a run begins with


def check_tokenizer(model_enc, enc, data):
    """Raise UserError unless `enc`, the tokenizer of the shards in `data`, is the model's own."""
    if model_enc.name.removesuffix("+chat") != enc.name.removesuffix("+chat"):
        raise UserError(
            f"The shards in {data} were made with tokenizer {enc.name}, but the model uses {model_enc.name}. "
            "Make shards with the model's tokenizer and give their folder with --data."
        )


def check_vocab_size(vocab_size, enc):
    """Raise UserError if an embedding of vocab_size rows has no row for some id of the tokenizer."""
    if vocab_size < enc.n_vocab:
        raise UserError(
            f"The model has room for {vocab_size} token ids, but tokenizer {enc.name} has {enc.n_vocab}. "
            f"Leave --vocab-size out, or set it to {enc.n_vocab} or more."
        )


def padded_vocab_size(enc):
    """Rows of the embedding for a tokenizer, padded to a multiple of 64 for faster matmuls: 50,304 for 50,257."""
    return math.ceil(enc.n_vocab / 64) * 64


def resize(shape, weights, block_size, vocab_size):
    """Truncate the positions of a model's state to block_size and pad its vocabulary to at least vocab_size rows.

    New rows are the mean of the existing ones: a row of zeros would give logit 0, far above what a trained
    model assigns to most tokens.
    """
    wte, wpe = weights["transformer.wte.weight"], weights["transformer.wpe.weight"]
    new_rows = wte.mean(0).expand(max(0, vocab_size - len(wte)), -1)
    wte = torch.cat([wte, new_rows])
    wpe = wpe[:block_size].clone()
    shape = shape | {"vocab_size": len(wte), "block_size": len(wpe)}
    resized = {"transformer.wte.weight": wte, "lm_head.weight": wte, "transformer.wpe.weight": wpe}
    return shape, weights | resized


def load_initial_weights(config, preset, enc):
    """{"config": shape, "model": weights} of --init-from, fitted to the run's block size and tokenizer.

    preset: the TrainConfig of --preset. Shape flags that differ from it are the user's, and must match the model.
    """
    shape, weights, model_enc = load_model_state(config.init_from)
    check_tokenizer(model_enc, enc, config.data)
    for name in ("n_layer", "n_head", "n_embd"):
        given = getattr(config, name)
        if given not in (getattr(preset, name), shape[name]):
            raise UserError(
                f"{flag_of(name)} is {given}, but {config.init_from} has {shape[name]}. Leave the flag out."
            )
    shape, weights = resize(shape, weights, config.block_size, max(config.vocab_size, padded_vocab_size(enc)))
    if config.sequence_length > shape["block_size"]:
        raise UserError(
            f"--sequence-length {config.sequence_length} is longer than the {shape['block_size']} tokens that "
            f"{config.init_from} can read. Lower it to that or less."
        )
    return {"config": shape, "model": weights}


# ----------------------------------------------------------------------------------------------------------
# Writing


class CheckpointWriter:
    """Writes checkpoints in the background: the training loop waits for the copy to the CPU, not for the disk."""

    def __init__(self, lock, keep, milestone_every, temporary):
        """temporary: the steps of the checkpoints in the folder that may be deleted when there are newer ones."""
        self.lock, self.out_dir, self.keep, self.milestone_every = lock, lock.folder, keep, milestone_every
        self.temporary, self.buffers = set(temporary), {}
        self.executor, self.pending = ThreadPoolExecutor(1), []

    def write(self, checkpoint):
        """Copy the checkpoint to the CPU and write it in the background, after the previous one has finished."""
        self.wait()
        step = checkpoint["step"]
        if self.milestone_every and step % self.milestone_every == 0:
            self.temporary.discard(step)
        else:
            self.temporary.add(step)
        copied = self.copy(checkpoint | {"temporary": sorted(self.temporary)})
        path = self.out_dir / f"model_{step:05d}.pt"
        self.pending.append(self.executor.submit(self.write_and_delete, path, copied))

    def write_best(self, checkpoint):
        """Write the weights with the lowest validation loss so far, in the same way."""
        self.wait()
        self.pending.append(self.executor.submit(self.write_one, self.out_dir / BEST, self.copy(checkpoint)))

    def copy(self, checkpoint):
        """Copy a checkpoint to the CPU, where further training cannot change it; tied weights are copied once."""
        model = {name: weight for name, weight in checkpoint["model"].items() if name != "lm_head.weight"}
        copied = self.copy_to_cpu(checkpoint | {"model": model})
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        copied["model"]["lm_head.weight"] = copied["model"]["transformer.wte.weight"]
        return copied

    def copy_to_cpu(self, state, place=()):
        """Copy the tensors in nested dicts and lists to buffers that are kept for the next checkpoint."""
        if isinstance(state, torch.Tensor):
            if place not in self.buffers:  # the GPU copies to pinned memory several times as fast
                self.buffers[place] = torch.empty_like(state, device="cpu", pin_memory=state.is_cuda)
            return self.buffers[place].copy_(state.detach(), non_blocking=state.is_cuda)
        if isinstance(state, dict):
            return {name: self.copy_to_cpu(value, (*place, name)) for name, value in state.items()}
        if isinstance(state, (list, tuple)):
            return [self.copy_to_cpu(value, (*place, i)) for i, value in enumerate(state)]
        return state

    def write_one(self, path, checkpoint):
        self.lock.check()
        with atomic_write(path) as file:
            try:
                torch.save(checkpoint, file)
            except RuntimeError as error:  # torch's writer hides why the file could not be written
                raise error.__context__ or error from None

    def write_and_delete(self, path, checkpoint):
        """Write a checkpoint; then delete older temporary ones, so that `keep` checkpoints remain."""
        self.write_one(path, checkpoint)
        paths = list_checkpoints(self.out_dir)
        older = paths[: paths.index(path)]
        for old in older[: max(0, len(older) + 1 - self.keep)]:
            if step_of(old) in self.temporary:
                with contextlib.suppress(FileNotFoundError):
                    old.unlink()

    def wait(self):
        """Wait until the pending checkpoints are on disk; re-raise any error from writing them."""
        while self.pending:
            self.pending.pop().result()
