"""Loads a saved model of this program or another one: its settings, weights and tokenizer."""

import dataclasses
import functools
import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

import tiktoken
import torch
from torch import Tensor

from plumbing.cli.console import UserError, first_line, note, plain
from plumbing.cli.flags import suggest
from plumbing.data import downloads, tokenizers
from plumbing.files import Name
from plumbing.run import checks, huggingface, source_code
from plumbing.run.checkpoint import (
    Checkpoint,
    PeerConfig,
    as_checkpoint,
    list_checkpoints,
    newest_checkpoint,
    read_file,
)
from plumbing.system.memory import SkipInit, new_model

Config = TypeVar("Config")
# what DDP, torch.compile, FSDP and checkpoint wrappers add to a name, where their module stands
WRAPPERS = re.compile(r"\b(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
OPENAI_MODELS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")


@dataclasses.dataclass(frozen=True, eq=False)
class SavedModel:
    """The content of a checkpoint or of a folder in Hugging Face format."""

    settings: dict[str, Any]  # GPTConfig's fields
    weights: dict[str, Tensor]  # its state dict
    get_encoding: Callable[[], tiktoken.Encoding]  # loads the tokenizer
    code: source_code.Code = dataclasses.field(default_factory=dict)  # the code that trained it; {} if unknown

    @functools.cached_property
    def enc(self) -> tiktoken.Encoding:
        return self.get_encoding()


def load_saved_model(source: str) -> SavedModel:
    """Load a GPT-2 by name, a folder in Hugging Face format, a checkpoint, or the newest checkpoint of a run."""
    path = downloads.find_model(source)
    # a file may be one of a folder in Hugging Face format
    folder = path.parent if path.is_file() and path.suffix != ".pt" else path
    if (folder / "config.json").exists():
        settings, weights = huggingface.load_huggingface(folder)
        return SavedModel(settings, weights, lambda: huggingface.load_tokenizer(folder, settings))
    if path.is_file():
        content = read_file(path)
        settings = peer_settings(content)
        if settings is None:
            return from_checkpoint(as_checkpoint(content, path))
        weights = content.get("model", content.get("model_state_dict", {}))
        return from_peer(weights, settings, path)
    if checkpoint := newest_checkpoint(path):
        return from_checkpoint(checkpoint)
    runs = [run.parent for run in path.glob("*/model_*.pt")]
    if runs:
        newest = max(runs, key=os.path.getmtime)
        raise UserError(
            f"There is no model in {source}, but in folders inside it. The newest run is in {newest}."
        )
    problem = f"{source} is a folder without a model" if path.exists() else f"There is no {source}"
    nearest = suggest(source, [*map(str, list_checkpoints(path.parent)), *OPENAI_MODELS])
    raise UserError(
        f"{problem}. Name a checkpoint (model_*.pt), a run's folder, a folder in Hugging Face format, or a GPT-2. "
        f"{nearest} To train a model: python train_gpt2.py --preset quickstart"
    )


def from_checkpoint(checkpoint: Checkpoint) -> SavedModel:
    """The model in a checkpoint of this program."""
    config = checkpoint["config"]
    settings = {name: config[name] for name in checkpoint["model_fields"]}
    return SavedModel(settings, checkpoint["model"], lambda: tokenizer_of(checkpoint), checkpoint["code"])


def tokenizer_of(checkpoint: Checkpoint) -> tiktoken.Encoding:
    text = checkpoint["tokenizer_file"]
    return tokenizers.loads(text) if text else tokenizers.get_encoding("gpt2")


def peer_settings(content: dict[str, Any]) -> dict[str, Any] | None:
    """The settings of the model in a checkpoint of nanoGPT or build-nanogpt; None if it is not one of theirs."""
    if isinstance(content.get("model_args"), dict):
        return content["model_args"]
    config = content.get("config")
    return vars(config) if isinstance(config, PeerConfig) else None


def from_peer(weights: dict[str, Tensor], settings: dict[str, Any], path: Name) -> SavedModel:
    """A model of nanoGPT or build-nanogpt with these weights and settings. Its tokenizer is GPT-2's."""
    weights = {WRAPPERS.sub("", name): weight for name, weight in weights.items()}
    if "bias" in settings:
        note(
            "Since June 2023, nanoGPT computes GELU exactly. Here it is GPT-2's approximation: logits differ a little."
        )
    weights, shape = huggingface.convert_peer_weights(weights, settings.get("n_head"), path)
    return SavedModel(shape, weights, lambda: tokenizers.get_encoding("gpt2"))


def config_of(config_class: type[Config], settings: dict[str, Any]) -> Config:
    """A GPTConfig from a saved model's settings. A missing field has its default, an unknown one is a UserError."""
    unknown = [name for name in settings if name not in vars(config_class())]
    if unknown:
        raise UserError(
            f"The saved model has {', '.join(unknown)}, but {config_class.__name__} has no such field. Give the file "
            "that trained it with --code, or use another model."
        )
    return config_class(**settings)


def from_state(
    make: Callable[[Any], Any],
    config: Any,
    weights: dict[str, Tensor],
    *,
    extends: bool = False,
    old_ids: Tensor | None = None,
) -> Any:
    """Make a model with make(config), and copy the state dict `weights` into it; UserError unless they fit exactly.

    extends: let the model's `extend` resize the weights first. old_ids: for `extend`, the old id of each token.
    """
    with SkipInit():
        model = new_model(make, config)
    new = sorted(model.state_dict().keys() - weights.keys())
    if new:  # a model with adapters, say, may load weights without them: initialize them after all
        model = new_model(make, config)
    load_weights(model, model.extend(weights, old_ids) if extends else weights)
    if new:
        note(
            f"The weights have nothing called {', '.join(new[:3])}. Unless the model's extend or load_state_dict adds "
            "it, it starts with the model's own initialization."
        )
    return model


def load_model(model_class: type, config_class: type, source: str) -> tuple[Any, SavedModel]:
    """(a model for generating and scoring, its SavedModel) from any source that `load_saved_model` reads.

    UserError if a changed copy of train_gpt2.py trained the model, but train_gpt2.py would run it.
    """
    saved = load_saved_model(source)
    source_code.check_code(saved.code, config_class, source, goes_on=False)
    return from_state(model_class, config_of(config_class, saved.settings), saved.weights).eval(), saved


def examine_loaded(model: Any, saved: SavedModel, *, num_ids: int, longest: int) -> bool:
    """Whether a loaded model can use a cache, for texts up to the `longest`. UserError if num_ids is too small."""
    check_num_ids(num_ids, saved.enc)
    return checks.examine(model, saved.enc.n_vocab, longest)


def load_weights(model: torch.nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy a state dict into `model`. UserError unless names and shapes match, and tied weights are equal."""
    problems = []
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        # torch lists missing names, unknown names and other shapes below its first line; a model may raise one line
        lines = str(error).splitlines()[1:] or [first_line(error)]
        problems = [plain(line.strip(" \t.")) for line in lines]
    else:
        name_of = {}  # {a tensor of the model: its first name}
        for name, value in model.state_dict().items():
            if name not in weights or not isinstance(value, Tensor):
                continue
            first = name_of.setdefault((value.data_ptr() or name, value.shape), name)
            if first != name and not torch.equal(weights[name], weights[first]):
                problems.append(f"{name} and {first} differ, but are one tensor here")
    if problems:
        raise UserError(
            f"The saved weights do not fit this model: {'; '.join(problems[:3])}. Use the file and the settings that "
            "trained them, or use other weights."
        )


def is_tokenizer(name: str, enc: tiktoken.Encoding) -> bool:
    """Whether a tokenizer is the one called `name`; chat tokens do not matter."""
    return name.removesuffix("+chat") == enc.name.removesuffix("+chat")


def check_tokenizer(name: str, config: Any, enc: tiktoken.Encoding) -> None:
    """Raise UserError unless the shards of a run, with tokenizer `enc`, have the model's tokenizer, called `name`."""
    if not is_tokenizer(name, enc):
        raise UserError(
            f"The shards in {' '.join(config.data)} have tokenizer {enc.name}, but the model uses {name}. Make shards "
            "with the model's tokenizer in another folder, or start a new model from this one with --init-from."
        )


def ids_in(model: SavedModel, new: tiktoken.Encoding) -> Tensor:
    """For each token of the tokenizer `new`, the model's id for the same bytes, or -1: (n_vocab,)."""
    before = model.enc._mergeable_ranks | model.enc._special_tokens
    now = new._mergeable_ranks | new._special_tokens
    tokens = sorted(now, key=now.__getitem__)
    old_ids = torch.tensor([before.get(token, -1) for token in tokens])
    note(
        f"Of the {new.n_vocab:,} tokens of {new.name}, {int((old_ids >= 0).sum()):,} are also in {model.enc.name}, the "
        "model's tokenizer, and keep their embeddings. The others start with the mean embedding."
    )
    return old_ids


def check_num_ids(num_ids: int, enc: tiktoken.Encoding) -> None:
    """Raise UserError if a model has fewer logits (`num_ids`) than the tokenizer has ids."""
    if num_ids < enc.n_vocab:
        raise UserError(
            f"The model has room for {num_ids} token ids, but tokenizer {enc.name} has {enc.n_vocab}. Use the model's "
            f"tokenizer, or give a new model a --vocab-size of {enc.n_vocab} or more."
        )
