"""GPT-2's file formats: reads and writes Hugging Face's, and reads checkpoints of nanoGPT and build-nanogpt.

transformers, vLLM, mlx-lm and lm-evaluation-harness read the folders that this module writes. GPT has the parameter
names of GPT2LMHeadModel, but pads its vocabulary, and stores a block's four matrices as (out, in) instead of Conv1D's
(in, out).
llama.cpp only converts models with GPT-2's tokenizer, because it recognizes tokenizers by a fixed list.
"""

import json
import math
import os
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import tiktoken
import torch
from torch import Tensor

from plumbing.cli.console import UserError, first_line
from plumbing.data import tokenizers
from plumbing.files import Name, atomic_write, free_name, read_json, remove_folder
from plumbing.run.model_card import make_card
from plumbing.system.devices import all_cores, exact_matmuls, free_memory

Weights = dict[str, Tensor]  # a state dict
FIELDS = (
    "block_size",
    "vocab_size",
    "n_layer",
    "n_head",
    "n_embd",
)  # the fields of GPTConfig that define a GPT-2
MATRICES = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
# the values in config.json that GPT supports. An export has the first one, which transformers assumes by default
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
# the largest difference between equal logits, in standard deviations. Rounding in float32 causes 5e-6 in small models
# and in 124M, up to 3e-5 with large weights; another form of GELU causes 2e-4 in a new model, more in a trained one
LOGITS_LIMIT = 2e-4
COPY_AGAIN = "Copy or export the model again."
CHAT_TEMPLATE = (  # for apply_chat_template: renders a conversation as smoltalk.py does
    "{{ '<|endoftext|>' }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['user', 'assistant', 'system'] %}"
    "{{ raise_exception('The role ' + message['role'] + ' is not user, assistant or system.') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def transposed(weights: Weights) -> Weights:
    """Convert a state dict between the two formats."""
    converted = dict(weights)
    for name, weight in weights.items():
        if name.endswith(MATRICES) and weight.dim() == 2:
            converted[name] = weight.T
    return converted


def load_huggingface(directory: Path) -> tuple[dict[str, int], Weights]:
    """Load (settings, weights) of a GPT-2 from a folder: GPTConfig's fields and a state dict for GPT."""
    path = directory / "config.json"
    config = read_json(path, COPY_AGAIN)
    for name, values in SUPPORTED.items():
        if config.get(name, values[0]) not in values:
            found = f"its {name} is {config[name]!r:.60}, not {values[0]!r}"
            raise UserError(f"{path} describes a model other than GPT-2: {found}. Use a GPT-2.")
    try:
        model, doubts = read_model(directory)
    except Exception as error:  # of many kinds
        reason = first_line(error)
        if isinstance(error, pickle.UnpicklingError):  # torch's own message explains how to run the code
            reason = "the file contains more than tensors, perhaps code, which is never run"
        raise UserError(f"Could not read the weights in {directory}: {reason}. {COPY_AGAIN}") from None
    if doubts:
        raise UserError(f"{directory} is not a GPT-2 that this program can use: it has {doubts}. {COPY_AGAIN}")
    weights = transposed(model.state_dict())
    return shape_of(weights, model.config.n_head, directory), weights


def read_model(directory: Path) -> tuple[Any, str]:
    """(transformers' model in a folder, in float32; missing, unexpected or misshapen weights, "" if there are none)."""
    from transformers import GPT2LMHeadModel, logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    loaded: Any = GPT2LMHeadModel.from_pretrained(
        directory,
        torch_dtype=torch.float32,  # called dtype since transformers 4.56, which reads both names
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        local_files_only=True,
        tie_word_embeddings=False,  # transformers 4 would replace an output layer that differs from the embedding
    )
    model, info = loaded
    missing = info["missing_keys"]
    head, wte = model.lm_head, model.transformer.wte
    if "lm_head.weight" in missing:
        missing.remove("lm_head.weight")
        head.weight = wte.weight
    elif "transformer.wte.weight" in missing:
        missing.remove("transformer.wte.weight")
        wte.weight = head.weight
    info["unexpected_keys"] = {name for name in info["unexpected_keys"] if not name.endswith(MASKS)}
    doubts = []
    for kind, names in info.items():
        if names:
            doubts.append(f"{kind.replace('_', ' ')} such as {min(map(str, names))}")
    return model, "; ".join(doubts)


def convert_peer_weights(weights: Weights, n_head: Any, path: Name) -> tuple[Weights, dict[str, int]]:
    """(a state dict for GPT, GPTConfig's fields) for the state dict of nanoGPT or build-nanogpt in the file `path`."""
    weights = {name: weight for name, weight in weights.items() if not name.endswith(MASKS)}
    for name, weight in list(weights.items()):
        if name.startswith(("transformer.h.", "transformer.ln_f.")) and name.endswith(".weight"):
            # nanoGPT's bias=False is the same as biases of 0
            weights.setdefault(name.removesuffix("weight") + "bias", weight.new_zeros(len(weight)))
    return weights, shape_of(weights, n_head, path)


def shape_of(weights: Weights, n_head: Any, source: Name) -> dict[str, int]:
    """GPTConfig's fields for the GPT with this state dict; UserError if it cannot be one."""
    matrices = {name: weight for name, weight in weights.items() if weight.dim() == 2}
    wte = matrices.get("transformer.wte.weight")
    wpe = matrices.get("transformer.wpe.weight")
    n_layer = sum(name.endswith(".ln_1.weight") for name in weights)
    if wte is None or wpe is None or n_layer == 0:
        problem = (
            f"no embeddings or no blocks under GPT-2's names, but {', '.join([*weights][:3]) or 'no weights'}"
        )
    elif not all(weight.sum().isfinite() for weight in weights.values()):  # faster than checking each number
        problem = "weights that are not finite, as after a training that diverged"
    elif type(n_head) is not int or n_head < 1 or wte.size(1) % n_head:
        problem = f"an n_head of {n_head!r:.60}, which does not divide its n_embd of {wte.size(1)}"
    else:
        vocab_size, n_embd = wte.shape
        return dict(block_size=len(wpe), vocab_size=vocab_size, n_layer=n_layer, n_head=n_head, n_embd=n_embd)
    raise UserError(f"{source} is not a GPT-2 that this program can use: it has {problem}. Use another model.")


def load_tokenizer(directory: Path, settings: dict[str, int]) -> tiktoken.Encoding:
    """The tokenizer of a folder in Hugging Face format.

    Tokens that a model has in addition to GPT-2's, such as one for padding, are never fed to it or sampled.
    """
    vocab_size = settings["vocab_size"]
    if any((directory / name).exists() for name in ("tokenizer.tiktoken", "tokenizer.json", "vocab.json")):
        return tokenizers.read_folder(directory)
    if vocab_size not in (50257, 50304):  # GPT-2's size, or the same padded to a multiple of 64
        raise UserError(
            f"The model in {directory}, with {vocab_size} token ids, has no tokenizer, and GPT-2's has 50257. Copy its "
            "tokenizer files to that folder, or use another model."
        )
    return tokenizers.get_encoding("gpt2")


def export_huggingface(model: Any, enc: Any, directory: Path, *, run_folder: Path | None = None) -> None:
    """Write a GPT-2 and its tokenizer to `directory`. An existing folder is moved aside, to `directory`.1.

    The padding of the vocabulary is dropped; every other weight is exported bit for bit. A chat model also gets its
    chat template, and stops after its turn. run_folder: the run that README.md describes. If the model is not a GPT-2,
    this raises UserError and writes nothing.
    """
    part = directory.with_name(f".{directory.name}.part")
    contents = export_files(vars(model.config), enc)
    contents["model.safetensors"] = weights_file(model.state_dict(), enc)
    remove_folder(part)  # a killed process may have left it
    try:
        part.mkdir(parents=True)
        for name, content in contents.items():
            with atomic_write(part / name) as file:
                file.write(content)
        tokenizers.write_encoding(enc, part / "tokenizer.tiktoken")
        if tokenizers.files_of(enc) and tokenizers.has_chat_tokens(enc):
            add_markers(part, enc)
        check_export(model, enc, part)
        if card := run_folder and make_card(part, run_folder):
            with atomic_write(part / "README.md") as file:
                file.write(card.encode())
        if os.path.lexists(directory):
            aside = directory.rename(free_name(directory))
            print(f"Moved the old {directory} to {aside}.", flush=True)
        part.rename(directory)
    finally:
        remove_folder(part)


def weights_file(weights: dict[str, Any], enc: tiktoken.Encoding) -> bytes:
    """The file of weights for a GPT-2 with this state dict and tokenizer, in the names of OpenAI's file.

    Equal models have equal files.
    """
    from safetensors.torch import save

    exported = {}
    for name, weight in transposed(weights).items():
        if not isinstance(weight, torch.Tensor):  # get_extra_state may return anything
            raise UserError(f"The model is no longer a GPT-2: it has state that is not a tensor, {name}.")
        if name in ("transformer.wte.weight", "lm_head.weight"):
            weight = weight[: enc.n_vocab]
        # copied, because a safetensors file cannot have tensors that share memory
        exported[name.removeprefix("transformer.")] = weight.cpu().clone().contiguous()
    head = exported.pop("lm_head.weight", None)
    if head is not None and not torch.equal(head, exported.get("wte.weight", head)):
        raise UserError("The model is no longer a GPT-2: its output layer is not its embedding.")
    return save(exported, {"format": "pt"})  # it writes several keys in random order


def check_export(model: Any, enc: tiktoken.Encoding, directory: Path) -> None:
    """Raise UserError unless transformers reads all weights in a folder and computes the model's logits from them."""
    theirs, doubts = read_model(directory)
    if doubts:
        raise UserError(f"The model is no longer a GPT-2: transformers finds {doubts}.")
    T = model.config.block_size
    device = next(model.parameters()).device
    weights = sum(p.nbytes for p in model.parameters())
    numbers = max(T, 1024) * (enc.n_vocab + 16 * model.config.n_embd)  # logits and activations of a batch
    if free_memory(device) > 2 * weights + 32 * numbers:
        theirs.to(device)
    ids = text_to_compare(enc)
    num_rows = math.ceil(len(ids) / T)
    repeated = ids.repeat(2 + T // len(ids))  # so that the last row is full
    rows = repeated[: num_rows * T].view(num_rows, T)
    batches = [*rows.split(max(1, 1024 // T))]  # all logits at once would take gigabytes
    batches.append(rows[:1, : max(1, T // 2)])  # a text that does not fill the block
    with torch.no_grad(), exact_matmuls(), all_cores():
        for batch in batches:
            expected = theirs(batch.to(theirs.device)).logits
            logits, _ = model(batch.to(device))
            ours = logits[..., : enc.n_vocab].to(theirs.device)
            worst = (ours - expected).abs().amax((0, 2))  # of each token
            is_same = worst <= LOGITS_LIMIT * expected.std()
            if not is_same.all():
                raise UserError(
                    "The model is no longer a GPT-2: transformers would compute different logits, first at "
                    f"token {int(is_same.int().argmin()):,} of {T:,}."
                )


def text_to_compare(enc: tiktoken.Encoding) -> Tensor:
    """Ids (n,) of a text that reveals a changed model, even one that depends on line ends, digits or neighbors.

    It has texts that tokenizers are compared on as well, every byte, and each special token before a paragraph.
    """
    ids = []
    for special_id in sorted(enc._special_tokens.values()):
        ids += [special_id, *enc.encode_ordinary("A paragraph.\n\n")]
    for text in tokenizers.probes():
        ids += [enc.eot_token, *enc.encode_ordinary(text + "\n\n")]
    return torch.tensor(ids + [i for token, i in enc._mergeable_ranks.items() if len(token) == 1])


def is_export_of(directory: Path, weights: Weights, enc: tiktoken.Encoding) -> bool:
    """Whether `directory` has the export of a model with this state dict and tokenizer."""
    try:
        return (directory / "model.safetensors").read_bytes() == weights_file(weights, enc)
    except (OSError, UserError):
        return False


def export_files(shape: dict[str, Any], enc: tiktoken.Encoding) -> dict[str, bytes]:
    """{name: content} of the small files for a GPT with these fields of GPTConfig and this tokenizer."""
    missing = [name for name in FIELDS if name not in shape]
    if missing:
        raise UserError(f"The model is no longer a GPT-2: its GPTConfig has no {', '.join(missing)}.")
    eot = enc.eot_token
    length = shape["block_size"]
    special_tokens = enc._special_tokens
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


def tokenizer_files(enc: tiktoken.Encoding, max_length: int | None = None) -> dict[str, bytes]:
    """{name: content} of the files that give transformers' AutoTokenizer the ids of `enc`."""
    if files := tokenizers.files_of(enc):  # a chat model's: see `add_markers`
        return {name: text.encode() for name, text in files.items()}
    from transformers.convert_slow_tokenizer import TikTokenConverter

    special_tokens = sorted(enc._special_tokens, key=enc._special_tokens.__getitem__)
    pattern: Any = tokenizers.FOR_HUGGINGFACE.get(enc._pat_str, enc._pat_str)
    # the second name is that of transformers 4, and each version ignores the other's
    converter = TikTokenConverter(
        pattern=pattern, extra_special_tokens=special_tokens, additional_special_tokens=special_tokens
    )
    # tiktoken's own function would read a file, and cache it forever
    with mock.patch("tiktoken.load.load_tiktoken_bpe", return_value=enc._mergeable_ranks):
        converted = converter.converted()
    for token, i in enc._special_tokens.items():
        if converted.token_to_id(token) != i:
            raise UserError(
                f"Tokenizer {enc.name} cannot be exported: its special token {token!r} is also an ordinary token, or "
                "does not have one of the last ids. Use another tokenizer."
            )
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    config: dict[str, Any] = dict.fromkeys(names, tokenizers.EOT)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["clean_up_tokenization_spaces"] = False
    config["model_max_length"] = max_length
    if tokenizers.has_chat_tokens(enc):
        config["chat_template"] = CHAT_TEMPLATE
    return {
        "tokenizer.json": converted.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }


def add_markers(directory: Path, enc: tiktoken.Encoding) -> None:
    """Add the role markers and the chat template to the tokenizer that a folder has as it was before."""
    from transformers import AutoTokenizer

    theirs: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    theirs.add_special_tokens({"additional_special_tokens": [*tokenizers.CHAT_TOKENS]})
    if theirs.convert_tokens_to_ids("<|end|>") != enc.encode_single_token("<|end|>"):
        raise UserError(f"Tokenizer {enc.name} cannot be exported: the role markers would have other ids.")
    theirs.chat_template = CHAT_TEMPLATE.replace(tokenizers.EOT, theirs.convert_ids_to_tokens(enc.eot_token))
    theirs.save_pretrained(directory)
