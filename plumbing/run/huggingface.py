"""GPT-2's own formats: Hugging Face's, read and written, and the checkpoints of the peers, which have the same names.

transformers, vLLM and lm-evaluation-harness read what is written here. GPT has the parameter names of GPT2LMHeadModel,
but pads its vocabulary, and stores a block's four matrices as (out, in) where their Conv1D has (in, out). llama.cpp
converts only models with GPT-2's own tokenizer, because it recognizes tokenizers by a fixed list.
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
import pickle
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from plumbing.cli.console import UserError, first_line
from plumbing.data import tokenizers
from plumbing.files import atomic_write, free_name, read_json, remove_folder
from plumbing.system.devices import exact_matmuls

FIELDS = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")  # those of GPTConfig that define a GPT-2
MATRICES = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
# the values in config.json that GPT supports; an export has the first one, which transformers assumes if there is none
SUPPORTED = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
MASKS = (".attn.bias", ".attn.masked_bias")  # causal masks in older files
# how far two logits may be apart, in standard deviations: rounding in float32 makes 5e-6 in small models and in 124M,
# up to 3e-5 where weights are large; another form of GELU makes 2e-4 in a new model and more in a trained one
LOGITS_LIMIT = 2e-4
SAMPLE_TEXT = "The 1st of 1,000 isn't easy:\n\tna\u00efve \u65e5\u672c\u8a9e {x == 42}"  # tells tokenizers apart
COPY_AGAIN = "Copy or export the model again."
CHAT_TEMPLATE = (  # for apply_chat_template: a conversation as smoltalk.py renders it
    "{{ '<|endoftext|>' }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['user', 'assistant', 'system'] %}"
    "{{ raise_exception('The role ' + message['role'] + ' is not user, assistant or system.') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def transposed(weights):
    """Convert a state dict between the two formats."""
    return {
        name: weight.T if name.endswith(MATRICES) and weight.dim() == 2 else weight
        for name, weight in weights.items()
    }


def load_huggingface(name_or_directory):
    """Load (settings, weights) of a GPT-2 from the hub or a folder: GPTConfig's fields and a state dict for GPT."""
    directory = find_folder(name_or_directory)
    path = directory / "config.json"
    config = read_json(path, COPY_AGAIN)
    for name, values in SUPPORTED.items():
        if config.get(name, values[0]) not in values:
            found = f"its {name} is {config[name]!r:.60}, not {values[0]!r}"
            raise UserError(f"{path} describes a model other than GPT-2: {found}. Use a GPT-2.")
    with reading("weights", directory):
        model, doubts = read_model(directory)
    if doubts:
        raise UserError(f"{directory} is not a GPT-2 that this program can use: it has {doubts}. {COPY_AGAIN}")
    weights = transposed(model.state_dict())
    return shape_of(weights, model.config.n_head, directory), weights


@contextlib.contextmanager
def reading(what: str, directory: Path) -> Iterator[None]:
    """Context in which an error of transformers, or of the readers below it, becomes a UserError."""
    try:
        yield
    except Exception as error:  # of many kinds
        reason = first_line(error)
        if isinstance(error, pickle.UnpicklingError):  # torch's own text says how to run the code
            reason = "they are a pickle of more than tensors, perhaps of code, which is never run"
        raise UserError(f"Could not read the {what} in {directory}: {reason}. {COPY_AGAIN}") from None


def find_folder(name):
    """The folder of this name or, if there is none, that of a model of the hub, downloaded if need be."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:  # where there is no network, transformers' own download would try again for 20 seconds
        return Path(snapshot_download(str(name), allow_patterns=["config.json", "model.safetensors"]))
    except Exception as error:  # the hub's client has renamed its network errors from version to version
        advice = "Check the network and run the same command again, or give a folder in Hugging Face format."
        raise UserError(f"Could not download {name}: {first_line(error)}. {advice}") from None


def read_model(directory: Path) -> tuple[Any, str]:
    """(transformers' model in a folder, in float32; what is missing there or does not belong there, "" for nothing)."""
    from transformers import GPT2LMHeadModel, logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    options: dict[str, Any] = dict(output_loading_info=True, ignore_mismatched_sizes=True, local_files_only=True)
    loaded: Any = GPT2LMHeadModel.from_pretrained(directory, dtype=torch.float32, **options)
    model, info = loaded
    info["unexpected_keys"] = {name for name in info["unexpected_keys"] if not name.endswith(MASKS)}
    doubts = [
        f"{kind.replace('_', ' ')} such as {min(map(str, found))}" for kind, found in info.items() if found
    ]
    return model, "; ".join(doubts)


def from_peer(weights, n_head, path):
    """Return (weights, settings) of a checkpoint of nanoGPT or build-nanogpt: a state dict and GPTConfig's fields."""
    weights = {name: weight for name, weight in weights.items() if not name.endswith(MASKS)}
    for name, weight in list(weights.items()):
        if name.startswith(("transformer.h.", "transformer.ln_f.")) and name.endswith(".weight"):
            # nanoGPT's bias=False is the same as biases of zero
            weights.setdefault(name.removesuffix("weight") + "bias", weight.new_zeros(len(weight)))
    return weights, shape_of(weights, n_head, path)


def shape_of(weights, n_head, source):
    """Return GPTConfig's fields for the GPT with this state dict; UserError if it cannot be one."""
    wte, wpe = weights.get("transformer.wte.weight"), weights.get("transformer.wpe.weight")
    n_layer = sum(name.endswith(".ln_1.weight") for name in weights)
    if wte is None or wpe is None or wte.dim() != 2 or wpe.dim() != 2 or not n_layer:
        problem = "no embeddings or no blocks"
    elif not all(weight.sum().isfinite() for weight in weights.values()):  # faster than looking at each number
        problem = "weights that are not finite, as a training that diverged leaves them"
    elif type(n_head) is not int or n_head < 1 or wte.size(1) % n_head:
        problem = f"an n_head of {n_head!r:.60}, which does not divide its n_embd of {wte.size(1)}"
    else:
        sizes = dict(block_size=len(wpe), vocab_size=len(wte), n_embd=wte.size(1))
        return sizes | dict(n_layer=n_layer, n_head=n_head)
    raise UserError(f"{source} is not a GPT-2 that this program can use: it has {problem}. Use another model.")


def load_tokenizer(name_or_directory, settings):
    """Return the tokenizer of a GPT-2 on the hub, which is OpenAI's, or of a folder in Hugging Face format.

    Tokens that a model has in addition to GPT-2's, such as one for padding, are neither fed to it nor sampled.
    """
    directory, vocab_size = Path(name_or_directory), settings["vocab_size"]
    if (directory / "tokenizer.tiktoken").exists():
        return tokenizers.read_encoding(directory / "tokenizer.tiktoken")
    if any((directory / name).exists() for name in ("tokenizer.json", "vocab.json")):
        from transformers import AutoTokenizer

        with reading("tokenizer", directory):
            theirs: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        expected = tokenizers.get_encoding("gpt2").encode_ordinary(SAMPLE_TEXT)
        is_gpt2 = theirs.encode(SAMPLE_TEXT, add_special_tokens=False) == expected
    else:  # GPT-2's size, or that padded to a multiple of 64
        is_gpt2 = not directory.is_dir() or vocab_size in (50257, 50304)
    if not is_gpt2:
        raise UserError(
            f"The model in {directory}, with {vocab_size} token ids, has a tokenizer of its own. Only GPT-2's and "
            "those of this program are read. If it was trained here, copy its tokenizer.tiktoken and "
            "tokenizer.tiktoken.json there. Otherwise use another model."
        )
    return tokenizers.get_encoding("gpt2")


def export_huggingface(model: Any, enc: Any, directory: Path, *, step: int = -1, make_card: Any = None) -> None:
    """Write a GPT-2 and its tokenizer to `directory`; anything there is moved aside, to `directory`.1.

    The padding of the vocabulary is dropped; every other weight is exported bit for bit. A chat model also gets its
    chat template, and stops after its turn. make_card(folder) returns a README.md, "" for none. UserError if the model
    is not a GPT-2: then nothing is written.
    """
    from safetensors.torch import save

    part = directory.with_name(f".{directory.name}.part")
    weights, contents = model.state_dict(), export_files(vars(model.config), enc)
    contents["model.safetensors"] = save(export_weights(weights, enc), describe(weights, step))
    remove_folder(part)  # left by a killed process
    try:
        part.mkdir(parents=True)
        for name, content in contents.items():
            with atomic_write(part / name) as file:
                file.write(content)
        tokenizers.write_encoding(enc, part / "tokenizer.tiktoken")
        check_export(model, enc, part)
        card = make_card(part) if make_card else ""
        if card:
            with atomic_write(part / "README.md") as file:
                file.write(card.encode())
        if os.path.lexists(directory):
            aside = directory.rename(free_name(directory))
            print(f"Moved what was at {directory} to {aside}.", flush=True)
        part.rename(directory)
    finally:
        remove_folder(part)


def export_weights(weights, enc):
    """Return {name: tensor} of the exported weights of a GPT-2 with this state dict and tokenizer."""
    other = [name for name, value in weights.items() if not isinstance(value, torch.Tensor)]  # get_extra_state's
    if other:
        raise UserError(f"The model is no GPT-2 any more: it has state that is no tensor, {other[0]}.")
    # clone: a file in this format cannot have tensors that share memory
    exported = {name: weight.cpu().clone().contiguous() for name, weight in transposed(weights).items()}
    if "transformer.wte.weight" in exported and "lm_head.weight" in exported:
        exported["transformer.wte.weight"] = exported.pop("lm_head.weight")[: enc.n_vocab].clone()
    return exported


def check_export(model: Any, enc: Any, directory: Path) -> None:
    """Raise UserError unless transformers reads the model in a folder without a doubt and computes the same logits."""
    theirs, doubts = read_model(directory)
    if doubts:
        raise UserError(f"The model is no GPT-2 any more: transformers finds {doubts}.")
    T = model.config.block_size
    device = next(model.parameters()).device
    ids = text_to_compare(enc)
    num_rows = math.ceil(len(ids) / T)
    # the last row is filled up from the beginning
    rows = ids.repeat(2 + T // len(ids))[: num_rows * T].view(num_rows, T)
    batches = rows.split(max(1, 1024 // T))  # all logits at once would be gigabytes
    with torch.no_grad(), exact_matmuls():
        for batch in (*batches, rows[:1, : max(1, T // 2)]):  # a text need not fill the block
            expected = theirs(batch).logits
            ours = model(batch.to(device))[0].cpu()[..., : enc.n_vocab]
            is_same = (ours - expected).abs().amax((0, 2)) <= LOGITS_LIMIT * expected.std()
            if not is_same.all():
                raise UserError(
                    "The model is no GPT-2 any more: transformers computes other logits from its weights, first at "
                    f"token {int(is_same.int().argmin()):,} of {T:,}."
                )


def text_to_compare(enc: Any) -> torch.Tensor:
    """Ids (n,) on which a changed model shows that it is one, whatever in a text makes it compute something else.

    They are the paragraphs of this file, each behind a special token; any two letters, digits, blanks or line ends side
    by side; then each byte and each special token.
    """
    characters = string.digits + string.ascii_letters + " \n"
    pairs = itertools.combinations_with_replacement(
        characters, 2
    )  # aa ab ac: a is beside each, before and behind it
    paragraphs = Path(__file__).read_text(encoding="utf-8").split("\n\n")
    paragraphs.append("".join(map("".join, pairs)))
    special_ids = sorted(enc._special_tokens.values())
    ids = []
    for special_id, paragraph in zip(itertools.cycle(special_ids), paragraphs):
        ids += [special_id, *enc.encode_ordinary(paragraph + "\n\n")]
    ids += [i for token, i in enc._mergeable_ranks.items() if len(token) == 1]
    return torch.tensor(ids + special_ids)


def describe(weights: dict[str, Any], step: int) -> dict[str, str]:
    """The metadata of exported weights: after how many updates, and a hash of samples of them, which names the run."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        entries = weights[name].flatten()
        digest.update(name.encode() + entries[:: len(entries) // 64 + 1].cpu().numpy().tobytes())
    return {"format": "pt", "step": str(step), "weights": digest.hexdigest()}  # transformers asks for the format


def is_export_of(directory: Path, weights: dict[str, Any], step: int) -> bool:
    """Whether `directory` has the export of a model with this state dict after `step` updates."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(directory / "model.safetensors", "pt") as file:  # an error if it is not whole
            return file.metadata() == describe(weights, step)
    except (OSError, SafetensorError):
        return False


def export_files(shape, enc):
    """Return {name: content} of the small files for a GPT with these fields of GPTConfig and this tokenizer."""
    missing = [name for name in FIELDS if name not in shape]
    if missing:
        raise UserError(f"The model is no GPT-2 any more: its GPTConfig has no {', '.join(missing)}.")
    eot, length, special_tokens = enc.eot_token, shape["block_size"], enc._special_tokens
    ends = [special_tokens[token] for token in (tokenizers.EOT, "<|end|>") if token in special_tokens]
    config = {name: values[0] for name, values in SUPPORTED.items()}
    config |= {name: shape[name] for name in ("n_layer", "n_head", "n_embd")}
    config |= dict(n_positions=length, n_ctx=length, vocab_size=enc.n_vocab)
    config |= dict(architectures=["GPT2LMHeadModel"], dtype="float32", bos_token_id=eot, eos_token_id=eot)
    config |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    generation = dict(bos_token_id=eot, eos_token_id=ends, pad_token_id=eot)
    return tokenizer_files(enc, length) | {
        "config.json": json.dumps(config, indent=2).encode(),
        "generation_config.json": json.dumps(generation, indent=2).encode(),
    }


def tokenizer_files(enc, max_length=None):
    """Return {name: content} of the files with which transformers' AutoTokenizer gives the same ids as `enc`."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    special_tokens = sorted(enc._special_tokens, key=enc._special_tokens.get)
    pattern: Any = tokenizers.FOR_HUGGINGFACE.get(enc._pat_str, enc._pat_str)
    converter: Any = TikTokenConverter(pattern=pattern, extra_special_tokens=special_tokens)
    # its own reads a file through tiktoken, which keeps a copy of that by its path, for good
    converter.load_tiktoken_bpe = lambda path: enc._mergeable_ranks
    converted = converter.converted()
    for token, i in enc._special_tokens.items():
        if converted.token_to_id(token) != i:
            raise UserError(
                f"Tokenizer {enc.name} cannot be exported: its special token {token!r} is an ordinary one, too, or has "
                "not one of the last ids. Use another tokenizer."
            )
    config: dict[str, Any] = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), tokenizers.EOT)
    config |= dict(tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=False)
    config["model_max_length"] = max_length
    if tokenizers.has_chat_tokens(enc):
        config["chat_template"] = CHAT_TEMPLATE
    return {"tokenizer.json": converted.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}
