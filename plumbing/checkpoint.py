"""Checkpoints: found, read, checked and written; and the weights that other programs have saved."""

import contextlib
import math
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import tokenizer
from plumbing.cli import UserError, suggest
from plumbing.files import atomic_write
from plumbing.huggingface import load_huggingface, load_tokenizer

SHAPE = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")  # the fields of GPTConfig
OPENAI_MODELS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
BEST = "model_best.pt"  # the weights with the lowest validation loss
NOT_RESUMABLE = (
    "Use a model_<step>.pt file from a run of train_gpt2.py; with weights alone, start a new run with --init-from."
)
NOT_OURS = "Use a model_*.pt file from a run of train_gpt2.py, or one of nanoGPT or build-nanogpt."

# what Adam and Muon keep for each parameter
OPTIMIZER_STATE = {"AdamW": ("step", "exp_avg", "exp_avg_sq"), "Muon": ("momentum",)}

# ----------------------------------------------------------------------------------------------------------
# Reading


def list_checkpoints(folder):
    """The paths of a folder's checkpoints, oldest first."""
    paths = [path for path in Path(folder).glob("model_*.pt") if path.stem.removeprefix("model_").isdigit()]
    return sorted(paths, key=lambda path: int(path.stem.removeprefix("model_")))


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
    """Load a checkpoint's dict onto the CPU; it is checked as far as that can be done without the model.

    weights_only: tensors and plain data, so that no file can run code. `for_resume`: with all that resuming needs.
    """
    checkpoint = read_pickle(path)
    template = {"model": {}, "config": {}, "step": 0, "tokenizer_file": ""}
    if for_resume:
        template |= {"optimizer": [], "scaler": {}, "loader": {}, "rng": torch.get_rng_state()}
    problem = describe_difference({name: checkpoint.get(name) for name in template}, template, "", shallow=True)
    problem = problem or check_shape(checkpoint["config"], checkpoint["model"])
    if problem and for_resume:
        raise UserError(f"A run cannot continue from {path}: {problem}. {NOT_RESUMABLE}")
    if problem:
        raise UserError(f"{path} is not a checkpoint of train_gpt2.py: {problem}. {NOT_OURS}")
    return checkpoint


def read_pickle(path):
    """The dict in a file of torch.save, tensors and plain data only."""
    try:
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
        raise UserError(f"{path} is not a checkpoint of train_gpt2.py: it holds a {type(content).__name__}. {NOT_OURS}")
    return content


def check_shape(config, weights):
    """What is wrong with the shape in a checkpoint's config, or ""; before a model of that shape is made."""
    for name in SHAPE:
        if type(config.get(name)) is not int or not 0 < config[name] < 2**31:
            return f"its {name} is {config.get(name)!r}"
    if config["n_embd"] % config["n_head"]:
        return f"its n_embd {config['n_embd']} is not a multiple of its n_head {config['n_head']}"
    if config["n_layer"] > len(weights):
        return f"it has {len(weights)} weights, too few for {config['n_layer']} layers"
    return ""


def describe_difference(value, template, place="", shallow=False):
    """Where `value` has another structure, type, dtype or shape than `template`, in words; "" if it has not.

    Values themselves may differ. `shallow`: what is inside dicts and lists of the template's first level may, too.
    """
    what = place or "it"
    if isinstance(template, torch.Tensor):
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_quantized:
            return f"{what} is not a tensor"
        if value.dtype != template.dtype or value.shape != template.shape:
            return f"{what} is {describe_tensor(value)} instead of {describe_tensor(template)}"
    elif isinstance(template, dict):
        if not isinstance(value, dict):
            return f"{what} is {value!r:.40} instead of a dict" if value is not None else f"it has no {place}"
        if shallow and place:
            return ""
        for name in template:
            if name not in value:
                return f"{what} has no {name}"
        for name in value:
            if name not in template:
                return f"{what} has {name!r:.60}, which does not belong there"
        differences = (
            describe_difference(value[name], template[name], f"{place}.{name}".strip("."), shallow) for name in template
        )
        return next(filter(None, differences), "")
    elif isinstance(template, (list, tuple)):
        if not isinstance(value, (list, tuple)):
            return f"{what} is {value!r:.40} instead of a list" if value is not None else f"it has no {place}"
        if shallow and place:
            return ""
        if len(value) != len(template):
            return f"{what} has {len(value)} entries instead of {len(template)}"
        differences = (describe_difference(a, b, f"{place}[{i}]") for i, (a, b) in enumerate(zip(value, template)))
        return next(filter(None, differences), "")
    elif isinstance(template, (bool, str)) and type(value) is not type(template):
        return f"{what} is {value!r:.40} instead of a {type(template).__name__}"
    elif isinstance(template, (int, float)) and not isinstance(template, bool):
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
            return f"{what} is {value!r:.40} instead of a number"
    return ""


def describe_tensor(tensor):
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def check_state(saved, state, optimizers):
    """Raise UserError unless the checkpoint's dict `saved` has what a run like this one would write.

    state: what training_state() of train_gpt2.py returns, for `optimizers` that have not taken a step.
    """
    template = {name: value for name, value in state.items() if name != "optimizer"}
    template["optimizer"] = [{"state": optimizer_template(optimizer)} for optimizer in optimizers]
    content = {name: saved[name] for name in template}
    content["loader"] = {"fingerprint": "", **saved["loader"]}  # older checkpoints have none
    content["optimizer"] = [{"state": part.get("state")} for part in saved["optimizer"] if isinstance(part, dict)]
    if not template["scaler"] or not saved["scaler"]:  # only float16 has one
        content["scaler"] = template["scaler"]
    problem = describe_difference(content, template)
    if problem:
        raise UserError(
            f"The checkpoint of step {saved['step']} does not fit the run: {problem}. It was probably changed after it "
            "was written; delete it to continue from the checkpoint before it."
        )


def check_weights(weights, template):
    """Raise UserError unless the state dict `weights` has the names, shapes and dtypes of `template`."""
    problem = describe_difference(weights, template)
    if problem:
        raise UserError(
            f"The model's weights do not fit its own settings: {problem}. They were probably changed after they were "
            "written; use another checkpoint."
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
    weights = {name: weight.float() for name, weight in checkpoint["model"].items()}  # a record may keep bfloat16
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
        f"format, or a GPT-2. {suggest(str(source), OPENAI_MODELS)}"
    )


class PeerConfig:
    """Stands for the GPTConfig that build-nanogpt pickles into its checkpoints: a plain record of numbers."""


def allow_peer_config():
    """Let torch.load read that one class; what it unpickles are PeerConfig objects, and no code is run."""
    names = ("__main__.GPTConfig", "train_gpt2.GPTConfig", "model.GPTConfig")
    return torch.serialization.safe_globals([(PeerConfig, name) for name in names])


def is_of_a_peer(content):
    """Whether a checkpoint is nanoGPT's (with model_args) or build-nanogpt's (with a pickled GPTConfig)."""
    return isinstance(content.get("model_args"), dict) or isinstance(content.get("config"), PeerConfig)


def peer_model_state(path, content):
    """(shape, weights, tokenizer) of a checkpoint of nanoGPT or build-nanogpt, which both keep GPT-2's names."""
    config = content["model_args"] if "model_args" in content else vars(content["config"])
    weights = content.get("model")
    if not isinstance(weights, dict) or not all(isinstance(w, torch.Tensor) for w in weights.values()):
        raise UserError(f"{path} looks like a checkpoint of nanoGPT, but it has no weights. {NOT_OURS}")
    weights = {strip_wrappers(name): w.float() for name, w in weights.items()}
    weights = {name: w for name, w in weights.items() if not name.endswith((".attn.bias", ".attn.masked_bias"))}
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
        print("note: nanoGPT computes the exact GELU and this program GPT-2's approximation of it, so this model's "
              "losses are slightly different here.", flush=True)  # fmt: skip
    return {name: config[name] for name in SHAPE}, weights, tokenizer.get_encoding("gpt2")


def strip_wrappers(name):
    """A parameter's name without what torch.compile and DDP put before it: "module._orig_mod.x" -> "x"."""
    while name.startswith(("_orig_mod.", "module.")):
        name = name.split(".", 1)[1]
    return name


# ----------------------------------------------------------------------------------------------------------
# The model that a run begins with


def check_tokenizer(model_enc, enc, data):
    """Raise UserError unless the shards in `data`, of tokenizer `enc`, are of the model's tokenizer."""
    if model_enc.name.removesuffix("+chat") != enc.name.removesuffix("+chat"):
        raise UserError(
            f"The shards in {data} were made with tokenizer {enc.name}, but the model uses {model_enc.name}. "
            "Make shards with the model's tokenizer and give their folder with --data."
        )


def check_vocab_size(vocab_size, enc):
    """Raise UserError if a model of vocab_size rows has no row for some id of the tokenizer."""
    if vocab_size < enc.n_vocab:
        raise UserError(
            f"The model has room for {vocab_size} token ids, but tokenizer {enc.name} has {enc.n_vocab}. "
            f"Leave --vocab-size out, or set it to at least {enc.n_vocab}."
        )


def padded_vocab_size(enc):
    """Rows of the embedding for a tokenizer: 50,257 tokens become 50,304 rows, even tiles for the matmuls."""
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
    """The model of --init-from, fitted to the run's block size and to the tokenizer of its data, as `model_state` has it.

    preset: the TrainConfig of --preset. A shape flag that differs from it was given by the user, and must agree.
    """
    shape, weights, model_enc = load_model_state(config.init_from)
    check_tokenizer(model_enc, enc, config.data)
    for name in ("n_layer", "n_head", "n_embd"):
        given = getattr(config, name)
        if given not in (getattr(preset, name), shape[name]):
            flag = "--" + name.replace("_", "-")
            raise UserError(f"{flag} is {given}, but {config.init_from} has {shape[name]}. Leave the flag out.")
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
    """Delete all but the newest `keep` checkpoints beside the path `newest`, and those of every milestone_every steps.

    Checkpoints of later steps are deleted, too: they were damaged, or the run would have resumed from them.
    """
    paths = list_checkpoints(newest.parent)
    index = paths.index(newest)
    for path in paths[: max(0, index + 1 - keep)] + paths[index + 1 :]:
        is_milestone = milestone_every and int(path.stem.removeprefix("model_")) % milestone_every == 0
        if not is_milestone or path in paths[index + 1 :]:
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
        """The same for the weights with the lowest validation loss so far."""
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
        """Wait until the pending checkpoints are on disk; re-raises any error from writing them."""
        while self.pending:
            self.pending.pop().result()
