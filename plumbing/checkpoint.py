"""Find, read, check and write checkpoints, and read the weights that other programs have saved."""

import contextlib
import math
import os
import pickle
import pickletools
import re
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import tokenizer
from plumbing.cli import UserError, flag_of, suggest
from plumbing.files import atomic_write
from plumbing.huggingface import load_huggingface, load_tokenizer

SHAPE = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")  # the fields of GPTConfig
OPENAI_MODELS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
CHECKPOINT_NAME = re.compile(r"model_([0-9]{5,15})\.pt")
BEST = "model_best.pt"  # the weights with the lowest validation loss
NOT_RESUMABLE = (
    "Use a model_<step>.pt file from a run of train_gpt2.py; with weights alone, start a new run with --init-from."
)
NOT_OURS = "Use a model_*.pt file from a run of train_gpt2.py, or one of nanoGPT or build-nanogpt."

# what the pickle of a checkpoint may contain besides plain data and tensor storages: tensors, and peers' configs
TENSOR_CLASSES = ("torch._utils._rebuild_tensor_v2", "collections.OrderedDict")
PEER_CONFIGS = ("__main__.GPTConfig", "train_gpt2.GPTConfig", "model.GPTConfig")  # as build-nanogpt pickles it

OUT_OF_RANGE = "a number out of range"  # of an int that is negative, or larger than any count

# what Adam and Muon keep for each parameter
OPTIMIZER_STATE = {"AdamW": ("step", "exp_avg", "exp_avg_sq"), "Muon": ("momentum",)}

# ----------------------------------------------------------------------------------------------------------
# Reading


def list_checkpoints(folder):
    """The paths of a folder's checkpoints, oldest first."""
    paths = [path for path in Path(folder).glob("model_*.pt") if CHECKPOINT_NAME.fullmatch(path.name)]
    return sorted(filter(Path.is_file, paths), key=step_of)


def step_of(path):
    """ "log/model_00500.pt" -> 500"""
    return int(CHECKPOINT_NAME.fullmatch(path.name)[1])


def newest_checkpoint(folder, for_resume=True):
    """The newest intact checkpoint in a folder, as a dict, or None if there are none.

    Reports the damaged ones that it skips. Raises UserError if all are.
    """
    paths = list_checkpoints(folder)
    for path in reversed(paths):
        try:
            return load_checkpoint(path, for_resume)
        except UserError as error:
            print(f"warning: {error} Skipping it and trying the checkpoint before it.", flush=True)
    if paths:
        raise UserError(
            f"None of the checkpoints in {folder} can be read, for the reasons above. "
            "Restore one from a backup, or train again with train_gpt2.py --no-resume."
        )
    return None


def load_checkpoint(path, for_resume=False):
    """Load a checkpoint's dict onto the CPU; it is checked as far as that is possible without the model.

    for_resume: require all that resuming needs. Anything else in the file is left out.
    """
    content = read_pickle(path)
    types = {"model": dict, "config": dict, "step": int, "tokenizer_file": str}
    if for_resume:
        types |= {"optimizer": list, "scaler": dict, "loader": dict}
    problem = check_types(content, types) or check_shape(content["config"], content["model"])
    if problem and for_resume:
        raise UserError(f"A run cannot continue from {path}: {problem}. {NOT_RESUMABLE}")
    if problem:
        raise UserError(f"{path} is not a checkpoint of train_gpt2.py: {problem}. {NOT_OURS}")
    losses = {name: content.get(name) for name in ("val_loss", "best_val_loss")}  # None if there was no validation yet
    losses = {name: value if type(value) is float else None for name, value in losses.items()}
    return {name: content[name] for name in types} | losses


def read_pickle(path):
    """The dict in a file of torch.save. Only tensors and plain data are read, so that no file can run code."""
    try:
        check_archive(path)
        with warnings.catch_warnings(action="ignore"), allow_peer_config():
            content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(
            f"Could not open checkpoint {path}: {error.strerror or error}. "
            "Check that it exists and that you have permission to read it."
        ) from None
    except pickle.UnpicklingError:
        raise UserError(
            f"{path} is not a checkpoint of train_gpt2.py, or it contains code, which is never run. {NOT_OURS}"
        ) from None
    except Exception as error:  # a damaged file can make the unpickler fail in any way
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise UserError(
            f"Checkpoint {path} is damaged: {reason}. Use another one, or copy it again from where it came."
        ) from None
    if not isinstance(content, dict):
        name = type(content).__name__
        raise UserError(f"{path} is not a checkpoint of train_gpt2.py: it holds a value of type {name}. {NOT_OURS}")
    return content


def check_archive(path):
    """Raise an error unless `path` is an intact zip archive of torch.save that needs no more memory than it has bytes.

    torch.load checks no checksums, it unpacks compressed archives, and even with weights_only it calls `bytearray`
    and `torch.Tensor` with any size that the file gives.
    """
    with open(path, "rb") as file:
        beginning = file.read(2)
    if beginning not in (b"", b"PK"):
        raise pickle.UnpicklingError
    with zipfile.ZipFile(path) as archive, ThreadPoolExecutor() as executor:
        if sum(entry.file_size for entry in archive.infolist()) > os.path.getsize(path):
            raise ValueError("it is compressed")
        for name in archive.namelist():
            if name.endswith("data.pkl"):
                check_classes(archive.read(name))
        list(executor.map(lambda name: check_sum(archive, name), archive.namelist()))


def check_sum(archive, name):
    """Raise zipfile.BadZipFile unless a part of an archive has the right checksum."""
    with archive.open(name) as part:
        while part.read(2**20):
            pass


def check_classes(pickled):
    """Raise UnpicklingError if a pickle names a class or function that tensors and plain data do not need."""
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name in ("GLOBAL", "INST", "STACK_GLOBAL"):
            module, _, name = (argument or "").partition(" ")
            is_storage = module == "torch" and name.endswith("Storage")
            if not is_storage and f"{module}.{name}" not in (*TENSOR_CLASSES, *PEER_CONFIGS):
                raise pickle.UnpicklingError


def check_types(content, types):
    """What the dict `content` lacks or has with another type than in `types`; "" if nothing."""
    for name, expected in types.items():
        if name not in content:
            return f"it has no {name}"
        is_odd = describe(content[name]) in ("a bool", OUT_OF_RANGE)
        if is_odd or not isinstance(content[name], expected):
            return f"its {name} is {describe(content[name])} instead of a {expected.__name__}"
    return ""


def check_shape(config, weights):
    """What is wrong with a checkpoint's shape and weights, or "". No model of that shape exists yet."""
    for name, weight in weights.items():
        if not is_weight(name, weight):
            return f"its weight {name!r:.60} is {describe(weight)}"
    missing = [name for name in SHAPE if name not in config]
    if missing:
        return f"its config has no {', '.join(missing)}"
    for name in SHAPE:
        if describe(config[name]) != "a whole number" or config[name] < 1:
            return f"its {name} is {config[name]!r:.60}"
    if config["n_embd"] % config["n_head"]:
        return f"its n_embd {config['n_embd']} is not a multiple of its n_head {config['n_head']}"
    # the model must not need more memory than the weights in the file have
    if config["n_layer"] > len(weights):
        return f"it has {len(weights)} weights, too few for {config['n_layer']} layers"
    for name, rows in (("transformer.wte.weight", "vocab_size"), ("transformer.wpe.weight", "block_size")):
        shape, expected = describe_shape(weights.get(name)), str((config[rows], config["n_embd"]))
        if shape != expected:
            return f"its {name} has the shape {shape} instead of {expected}"
    embedding, output = weights["transformer.wte.weight"], weights.get("lm_head.weight")
    if describe(output) != describe(embedding) or not torch.equal(output, embedding):
        return "its lm_head.weight is not its transformer.wte.weight"
    return ""


def is_weight(name, value):
    """Whether an entry of a state dict is a name and a floating-point tensor, with all its numbers in the file."""
    is_floating = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 0
    return isinstance(name, str) and is_floating and is_stored_whole(value)


def is_stored_whole(tensor):
    """Whether a tensor has memory for each of its entries, as every tensor that a run saves does."""
    return tensor.untyped_storage().nbytes() >= tensor.nbytes


def describe(value):
    """What a value in a checkpoint is: its type, a tensor's dtype and shape, or a number that is not plausible."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {describe_shape(value)}"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "a dict"
    if type(value) is int:
        return "a whole number" if 0 <= value < 2**48 else OUT_OF_RANGE
    if type(value) is float:
        return "a number" if math.isfinite(value) else str(value)
    return "missing" if value is None else f"a {type(value).__name__}"


def describe_shape(value):
    """The shape of a tensor, as text."""
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else "of no tensor"


def describe_difference(value, template, place=""):
    """Say how `value` differs from `template` in structure, type, dtype or shape; "" if it does not."""
    if describe(value) != describe(template):
        return f"{place or 'it'} is {describe(value)} instead of {describe(template)}"
    if isinstance(template, dict):
        names = list(template)
        for name in names:
            if name not in value:
                return f"{place or 'it'} has no {name}"
        for name in value:
            if name not in template:
                return f"{place or 'it'} has {name!r:.60}, which does not belong there"
    elif isinstance(template, (list, tuple)):
        names = range(len(template))
    else:
        return ""
    for name in names:
        problem = describe_difference(value[name], template[name], f"{place}.{name}".strip("."))
        if problem:
            return problem
    return ""


def check_values(tensors):
    """What is wrong with the numbers in {name: tensor}, or "". `describe_difference` has checked their shapes."""
    storages = set()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        if storage in storages or not is_stored_whole(tensor):
            return f"{name} shares its memory with another tensor"
        storages.add(storage)
        if tensor.is_floating_point():
            least, largest = tensor.aminmax()
            if not (least.isfinite() and largest.isfinite()):
                return f"{name} has numbers that are not finite"
    return ""


def check_averages(tensors, step):
    """What is wrong with the tensors that optimizers keep, {name: tensor}, after `step` steps of the run, or ""."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():  # the fused optimizers read them in the order of memory
            return f"{name} is not contiguous"
        if name.endswith((".step", ".exp_avg_sq")) and tensor.min() < 0:  # counts and squares
            return f"{name} has negative numbers"
        if name.endswith(".step") and tensor > step:
            return f"{name} is {tensor:.0f}"
    return ""


def check_weights(weights, template):
    """Raise UserError unless the state dict `weights` fits a model whose state dict is `template`."""
    problem = describe_difference(weights, template)
    if not problem:
        separate = {name: weight for name, weight in weights.items() if name != "lm_head.weight"}
        problem = check_values(separate)
    if problem:
        raise UserError(
            f"The model's weights do not fit its own settings: {problem}. They were probably changed after they were "
            "written; use another checkpoint."
        )


def check_state(saved, state, optimizers):
    """Raise UserError unless the checkpoint's dict `saved` has what a run like this one would write.

    state: what training_state() of train_gpt2.py returns for `optimizers` that have not taken a step.
    """
    template = {name: value for name, value in state.items() if name != "model"}  # check_weights has checked those
    template["optimizer"] = [{"state": optimizer_template(optimizer)} for optimizer in optimizers]
    content = {name: saved[name] for name in template}
    content["optimizer"] = [{"state": part.get("state")} for part in saved["optimizer"] if isinstance(part, dict)]
    content["loader"] = {"fingerprint": "", **saved["loader"]}  # older checkpoints have none
    if not template["scaler"] or not saved["scaler"]:  # only float16 has one
        content["scaler"] = template["scaler"]
    problem = describe_difference(content, template)
    if not problem:
        tensors = {
            f"optimizer.{i}.state.{number}.{name}": tensor
            for i, part in enumerate(content["optimizer"])
            for number, state in part["state"].items()
            for name, tensor in state.items()
        }
        problem = check_values(tensors) or check_averages(tensors, saved["step"])
    if problem:
        raise UserError(
            f"The checkpoint of step {saved['step']} does not fit the run: {problem}. It was probably changed after it "
            "was written; delete it to continue from the checkpoint before it."
        )


def optimizer_template(optimizer):
    """What the state of an optimizer looks like once it has taken a step: {number of the parameter: its state}."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    names = OPTIMIZER_STATE[type(optimizer).__name__]
    return {i: {name: torch.zeros(()) if name == "step" else p for name in names} for i, p in enumerate(params)}


# ----------------------------------------------------------------------------------------------------------
# A model for any purpose: its shape, weights and tokenizer


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
    """(shape, weights, tokenizer) of a GPT-2 name, a Hugging Face folder, a checkpoint, or a run's newest."""
    path = Path(source)
    if path.is_file():
        content = read_pickle(path)
        if is_of_a_peer(content):
            return peer_model_state(path, content)
        checkpoint = load_checkpoint(path)
        return *model_state(checkpoint), model_tokenizer(checkpoint)
    if (path / "config.json").exists() or source in OPENAI_MODELS:
        return *load_huggingface(source), load_tokenizer(source)
    checkpoint = newest_checkpoint(path, for_resume=False)
    if checkpoint:
        return *model_state(checkpoint), model_tokenizer(checkpoint)
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
    """Stands in for the GPTConfig that build-nanogpt pickles into its checkpoints: only its fields."""


def allow_peer_config():
    """Let torch.load read that one class. It unpickles PeerConfig objects, and no code is run."""
    return torch.serialization.safe_globals([(PeerConfig, name) for name in PEER_CONFIGS])


def is_of_a_peer(content):
    """Whether a checkpoint is nanoGPT's (with model_args) or build-nanogpt's (with a pickled GPTConfig)."""
    return isinstance(content.get("model_args"), dict) or isinstance(content.get("config"), PeerConfig)


def peer_model_state(path, content):
    """(shape, weights, tokenizer) of a checkpoint of nanoGPT or build-nanogpt, which both keep GPT-2's names."""
    config = content["model_args"] if "model_args" in content else vars(content["config"])
    weights = content.get("model")
    if not isinstance(weights, dict) or not all(map(is_weight, weights, weights.values())):
        raise UserError(f"{path} looks like a checkpoint of nanoGPT, but it has no weights. {NOT_OURS}")
    weights = {strip_wrappers(name): w.float() for name, w in weights.items()}
    weights = {name: w for name, w in weights.items() if not name.endswith((".attn.bias", ".attn.masked_bias"))}
    weights.setdefault("lm_head.weight", weights.get("transformer.wte.weight"))
    problem = check_shape(config, weights)
    if problem:
        raise UserError(f"{path} looks like a checkpoint of nanoGPT, but {problem}. {NOT_OURS}")
    if config["vocab_size"] < 50257:
        raise UserError(
            f"{path} was trained with a tokenizer of {config['vocab_size']} ids that is not in the file, so its text "
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
    return {name: config[name] for name in SHAPE}, weights, tokenizer.get_encoding("gpt2")


def strip_wrappers(name):
    """A parameter's name without the prefixes of torch.compile and DDP: "module._orig_mod.x" -> "x"."""
    while name.startswith(("_orig_mod.", "module.")):
        name = name.split(".", 1)[1]
    return name


# ----------------------------------------------------------------------------------------------------------
# The model that a run begins with


def check_tokenizer(model_enc, enc, data):
    """Raise UserError unless the shards in `data`, made with tokenizer `enc`, are of the model's tokenizer."""
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
    """Rows of the embedding for a tokenizer: 50,304 for 50,257 tokens, so that matmuls have even tiles."""
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

    preset: the TrainConfig of --preset. A shape flag that differs from it was given by the user, and must agree.
    """
    shape, weights, model_enc = load_model_state(config.init_from)
    check_tokenizer(model_enc, enc, config.data)
    for name in ("n_layer", "n_head", "n_embd"):
        given = getattr(config, name)
        if given not in (getattr(preset, name), shape[name]):
            raise UserError(
                f"{flag_of(name)} is {given}, but {config.init_from} has {shape[name]}. Leave the flag out."
            )
    if not {"transformer.wte.weight", "transformer.wpe.weight"} <= set(weights):
        raise UserError(f"{config.init_from} has no embeddings, so it is not a GPT-2. Use another model.")
    shape, weights = resize(shape, weights, config.block_size, max(config.vocab_size, padded_vocab_size(enc)))
    if config.sequence_length > shape["block_size"]:
        raise UserError(
            f"--sequence-length {config.sequence_length} is longer than the {shape['block_size']} tokens that "
            f"{config.init_from} can read. Lower it to that or less."
        )
    return {"config": shape, "model": weights}


# ----------------------------------------------------------------------------------------------------------
# Writing


def copy_to_cpu(state):
    """Copy the tensors in nested dicts and lists to the CPU, so that further training cannot change them."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {name: copy_to_cpu(value) for name, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [copy_to_cpu(value) for value in state]
    return state


def write_checkpoint(path, checkpoint):
    """Write a checkpoint atomically."""
    try:
        with atomic_write(path) as file:
            torch.save(checkpoint, file)
    except RuntimeError as error:  # how torch's writer reports a write that failed
        reason = (str(error).splitlines() or ["RuntimeError"])[0].rstrip(".")
        raise UserError(
            f"Could not write {path}: {reason}. Check that its folder exists, is writable and has free space, "
            "then run the same command again."
        ) from None


def delete_checkpoints(newest, keep, milestone_every):
    """Delete checkpoints older than the path `newest`, except milestones and the last ones, so that `keep` remain."""
    paths = list_checkpoints(newest.parent)
    older = paths[: paths.index(newest)]
    for path in older[: max(0, len(older) + 1 - keep)]:
        is_milestone = milestone_every and step_of(path) % milestone_every == 0
        if not is_milestone:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()


class CheckpointWriter:
    """Writes checkpoints in the background: the training loop waits for the copy to the CPU, not for the disk."""

    def __init__(self, out_dir, keep, milestone_every):
        self.out_dir, self.keep, self.milestone_every = Path(out_dir), keep, milestone_every
        self.executor, self.pending = ThreadPoolExecutor(1), []

    def write(self, checkpoint):
        """Copy the checkpoint to the CPU and write it in the background, after the previous one has finished."""
        self.wait()
        path = self.out_dir / f"model_{checkpoint['step']:05d}.pt"
        self.pending.append(self.executor.submit(self.write_and_delete, path, self.copy(checkpoint)))

    def write_best(self, checkpoint):
        """Write the weights with the lowest validation loss so far, in the same way."""
        self.wait()
        self.pending.append(self.executor.submit(write_checkpoint, self.out_dir / BEST, self.copy(checkpoint)))

    def copy(self, checkpoint):
        copied = copy_to_cpu(checkpoint)
        # re-tie the weights, so that the file stores them once
        copied["model"]["lm_head.weight"] = copied["model"]["transformer.wte.weight"]
        return copied

    def write_and_delete(self, path, checkpoint):
        write_checkpoint(path, checkpoint)
        delete_checkpoints(path, self.keep, self.milestone_every)

    def wait(self):
        """Wait until the pending checkpoints are on disk; re-raise any error from writing them."""
        while self.pending:
            self.pending.pop().result()
