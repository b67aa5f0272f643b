"""A model for any purpose, as a checkpoint or another program has saved it: its settings, weights and tokenizer."""

import dataclasses
import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import tiktoken
import torch
from torch import Tensor

from plumbing.cli.console import UserError, first_line, note, plain
from plumbing.cli.flags import suggest
from plumbing.data import tokenizers
from plumbing.data.windows import data_tokenizer
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
from plumbing.system.autofit import SkipInit, new_model

Config = TypeVar("Config")
OPENAI_MODELS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")


@dataclasses.dataclass(frozen=True, eq=False)
class SavedModel:
    """A model as a checkpoint or a folder in Hugging Face format has it."""

    settings: dict[str, Any]  # GPTConfig's fields
    weights: dict[str, Tensor]  # its state dict
    get_encoding: Callable[[], tiktoken.Encoding]  # loads the tokenizer
    code: source_code.Code = dataclasses.field(default_factory=dict)  # that trained it; {} if that is not known

    @functools.cached_property
    def enc(self) -> tiktoken.Encoding:
        return self.get_encoding()


def load_saved_model(source: str) -> SavedModel:
    """Load a GPT-2 by its name, a folder in Hugging Face format, a checkpoint or a run's newest one."""
    path = Path(source)
    if source in OPENAI_MODELS or (path / "config.json").exists():
        settings, weights = huggingface.load_huggingface(source)
        return SavedModel(settings, weights, lambda: huggingface.load_tokenizer(source, settings))
    if path.is_file():
        content = read_file(path)
        settings = peer_settings(content)
        if settings is None:
            return from_checkpoint(as_checkpoint(content, path))
        return from_peer(content.get("model", {}), settings, path)
    if checkpoint := newest_checkpoint(path):
        return from_checkpoint(checkpoint)
    runs = [run.parent for run in path.glob("*/model_*.pt")]
    if runs:
        newest = max(runs, key=os.path.getmtime)
        raise UserError(f"There is no model in {source} itself. Its newest run is {newest}: name that.")
    nearest = suggest(source, [*OPENAI_MODELS, *map(str, list_checkpoints(path.parent))])
    raise UserError(
        f"There is no model in {source}. Name a checkpoint (model_*.pt), a run's folder, a folder in Hugging Face "
        f"format, or a GPT-2. {nearest} To train a model first: python train_gpt2.py --preset quickstart"
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
    """The model of nanoGPT or build-nanogpt with these weights and settings: with GPT-2's names and its tokenizer."""
    # without the prefixes of DDP and torch.compile
    weights = {re.sub(r"^(module\.|_orig_mod\.)*", "", name): weight for name, weight in weights.items()}
    weights, settings = huggingface.from_peer(weights, settings.get("n_head"), path)
    return SavedModel(settings, weights, lambda: tokenizers.get_encoding("gpt2"))


def config_of(config_class: type[Config], settings: dict[str, Any]) -> Config:
    """A GPTConfig from a saved model's settings: an unknown one is a UserError, a missing one takes its default."""
    unknown = [name for name in settings if name not in vars(config_class())]
    if unknown:
        raise UserError(
            f"The saved model has {', '.join(unknown)}, which {config_class.__name__} does not have. Use it with the "
            "file that trained it (--code), or use another model."
        )
    return config_class(**settings)


def from_state(
    model_class: type, config: Any, weights: dict[str, Tensor], *, extends: bool = False, old_ids: Tensor | None = None
) -> Any:  # fmt: skip
    """Make a model as `config` says and copy the state dict `weights` into it; UserError unless they fit exactly.

    extends: first give them the rows that the model has, as its `extend` says; old_ids: of another tokenizer.
    """
    with SkipInit():
        model = new_model(model_class, config)
    new = sorted(model.state_dict().keys() - weights.keys())
    if new:  # a model whose load_state_dict allows that, as with adapters, begins these as it makes them
        model = new_model(model_class, config)
    load_weights(model, model.extend(weights, old_ids) if extends else weights)
    if new:
        note(
            f"The weights have nothing called {', '.join(new[:3])}: unless the model's load_state_dict takes "
            "that from another name, the model begins with what it has made there."
        )
    return model


def load_model(model_class: type, config_class: type, source: str) -> tuple[Any, SavedModel]:
    """Load a model, for generating text and for scoring, from whatever `load_saved_model` reads; and what was read.

    UserError if train_gpt2.py is to use what a changed copy of it has trained.
    """
    saved = load_saved_model(source)
    source_code.check_code(saved.code, config_class, source, goes_on=False)
    return from_state(model_class, config_of(config_class, saved.settings), saved.weights).eval(), saved


def examine_loaded(model: Any, saved: SavedModel, *, num_ids: int, longest: int) -> bool:
    """Whether a loaded model, of num_ids ids and texts up to the `longest`, has a cache."""
    check_num_ids(num_ids, saved.enc)
    return checks.examine(model, checks.texts(saved.enc.n_vocab, longest), is_new=False)


def load_weights(model: torch.nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy a state dict into `model`. UserError unless names and shapes are its own, and shared tensors are equal."""
    problems = []
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        # below torch's first line: missing names, unknown names, other shapes; an error of the model's own has one line
        problems = [plain(line.strip(" \t.")) for line in str(error).splitlines()[1:] or [first_line(error)]]
    else:
        name_of = {}
        own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
        for name in [name for name in own if name in weights]:  # in the model's order
            same = name_of.setdefault((own[name].data_ptr() or name, own[name].shape), name)
            if same != name and not torch.equal(weights[name], weights[same]):
                problems.append(f"{name} and {same} differ, but are one tensor here")
    if problems:
        raise UserError(
            f"The saved weights are not those of this model: {'; '.join(problems[:3])}. Use the file and the settings "
            "that trained them, or use other weights."
        )


def is_tokenizer(name: str, enc: tiktoken.Encoding) -> bool:
    """Whether a tokenizer is the one called `name`, but for role markers."""
    return name.removesuffix("+chat") == enc.name.removesuffix("+chat")


def check_tokenizer(name: str, config: Any) -> None:
    """Raise UserError unless the tokenizer of a run's shards is the model's own, called `name`."""
    enc = data_tokenizer(config)
    if enc and not is_tokenizer(name, enc):
        raise UserError(
            f"The shards in {' '.join(config.data)} have tokenizer {enc.name}, but the model uses {name}. Make shards "
            "with that tokenizer, in another folder; or train a model that begins with this one, by --init-from, on "
            "these."
        )


def ids_in(model: SavedModel, config: Any) -> Tensor | None:
    """The id in a model to begin with of each token of the data, (n_vocab,): that of the same bytes, or -1.

    None if the data have the model's own tokenizer, or nothing is trained.
    """
    new = data_tokenizer(config)
    if not new or not config.max_steps or is_tokenizer(model.enc.name, new):
        return None
    before, now = (enc._mergeable_ranks | enc._special_tokens for enc in (model.enc, new))
    old_ids = torch.tensor([before.get(token, -1) for token in sorted(now, key=now.__getitem__)])
    note(
        f"Of the {new.n_vocab:,} tokens of {new.name}, {int((old_ids >= 0).sum()):,} are also of "
        f"{model.enc.name}, the model's own, and keep their embeddings. The others begin with the mean."
    )
    return old_ids


def check_num_ids(num_ids: int, enc: tiktoken.Encoding) -> None:
    """Raise UserError if a model with logits for `num_ids` ids has none for some id of the tokenizer."""
    if num_ids < enc.n_vocab:
        raise UserError(
            f"The model has room for {num_ids} token ids, but tokenizer {enc.name} has {enc.n_vocab}. Use the "
            f"model's own tokenizer, or set a new model's --vocab-size to {enc.n_vocab} or more."
        )
