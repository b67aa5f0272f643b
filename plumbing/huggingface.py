"""Import and export GPT-2 in Hugging Face format, which transformers, vLLM and lm-evaluation-harness read.

GPT has the parameter names of GPT2LMHeadModel, but pads its vocabulary, and stores a block's four matrices as (out, in)
where their Conv1D has (in, out). llama.cpp converts only models with GPT-2's own tokenizer, because it recognizes
tokenizers by a fixed list.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import tokenizer
from plumbing.files import atomic_write, free_name, open_regular, read_json, remove_folder
from plumbing.program import UserError, first_line, plain

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
METADATA = {"format": "pt"}  # of an exported safetensors file; transformers asks for it
PART = re.compile(r"model-\d{5}-of-(\d{5})\.safetensors")
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
    """Load (shape, weights) of a GPT-2 from the hub or a folder: GPTConfig's fields and a state dict for GPT."""
    directory = Path(name_or_directory)
    if not directory.is_dir():
        directory = download(str(name_or_directory))
    path = directory / "config.json"
    config = read_json(path, COPY_AGAIN)
    for name, values in SUPPORTED.items():
        if config.get(name, values[0]) not in values:
            found = f"its {name} is {config[name]!r:.60}, not {values[0]!r}"
            raise UserError(f"{path} describes a model other than GPT-2: {found}. Use a GPT-2.")
    weights = read_weights(directory)
    return shape_of(weights, config.get("n_head", 12), directory), weights


def download(name):
    """Download a model from the hub, unless it is in the cache; return its folder."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["config.json", "model.safetensors"]))
    except Exception as error:  # the hub's client has renamed its network errors from version to version
        advice = "Check the network and run the same command again, or give a folder in Hugging Face format."
        raise UserError(f"Could not download {name}: {first_line(error)}. {advice}") from None


def weight_files(directory):
    """Return the paths of model.safetensors or, without it, of all parts model-00001-of-0000n.safetensors."""
    names = {path.name for path in directory.glob("model*.safetensors") if path.is_file()}
    if "model.safetensors" in names:
        return [directory / "model.safetensors"]
    counts = {match[1] for match in map(PART.fullmatch, names) if match}
    if not counts:
        raise UserError(
            f"{directory} has no model.safetensors, and pickles such as *.bin are not read. Save it as safetensors "
            "first, with transformers' save_pretrained."
        )
    count = max(counts)
    expected = [f"model-{i:05d}-of-{count}.safetensors" for i in range(1, int(count) + 1)]
    missing = ", ".join(name for name in expected if name not in names)
    if missing or len(counts) > 1:
        problem = f"lacks {plain(missing)}" if missing else "has the parts of several models"
        raise UserError(f"{directory} {problem}. {COPY_AGAIN}")
    return [directory / name for name in expected]


def read_weights(directory):
    """Return a state dict for GPT, in float32, of the safetensors in a folder."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    weights = {}
    for path in weight_files(directory):
        try:
            found = load_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"Could not read the weights in {path}: {first_line(error)}. {COPY_AGAIN}") from None
        for name, weight in found.items():
            if not name.startswith(("transformer.", "lm_head.")):  # older files have no prefix
                name = f"transformer.{name}"
            if name.endswith((".attn.bias", ".attn.masked_bias")):  # causal masks in older files
                continue
            if name in weights or not weight.is_floating_point():
                problem = "there twice" if name in weights else f"of {weight.dtype}"
                raise UserError(f"{path} cannot be used: {plain(name)} is {problem}. {COPY_AGAIN}")
            weights[name] = weight.float()
    weights.setdefault("lm_head.weight", weights.get("transformer.wte.weight"))
    return transposed(weights)


def shape_of(weights, n_head, source):
    """Return GPTConfig's fields for the GPT with this state dict; UserError if it cannot be one."""
    import torch

    wte, wpe = weights.get("transformer.wte.weight"), weights.get("transformer.wpe.weight")
    n_layer = sum(name.endswith(".ln_1.weight") for name in weights)
    if wte is None or wpe is None or wte.dim() != 2 or wpe.dim() != 2:
        problem = "no embeddings"
    elif not n_layer:
        problem = "no blocks"
    elif not all(weight.sum().isfinite() for weight in weights.values()):  # faster than looking at each number
        problem = "weights that are not finite, as a training that diverged leaves them"
    elif not torch.equal(weights.get("lm_head.weight", wte), wte):
        problem = "an output layer (lm_head.weight) that is not its embedding (transformer.wte.weight)"
    elif type(n_head) is not int or n_head < 1 or wte.size(1) % n_head:
        problem = f"an n_head of {n_head!r:.60}, which does not divide its n_embd of {wte.size(1)}"
    else:
        sizes = dict(block_size=len(wpe), vocab_size=len(wte), n_embd=wte.size(1))
        return sizes | dict(n_layer=n_layer, n_head=n_head)
    raise UserError(f"{source} is not a GPT-2 that this program can use: it has {problem}. Use another model.")


def load_tokenizer(name_or_directory, vocab_size):
    """Return the tokenizer of a GPT-2 on the hub, which is OpenAI's, or of a folder in Hugging Face format.

    Tokens that a model has in addition to GPT-2's, such as one for padding, are neither fed to it nor sampled.
    """
    directory = Path(name_or_directory)
    if (directory / "tokenizer.tiktoken").exists():
        return tokenizer.read_encoding(directory / "tokenizer.tiktoken")
    found = [path for name in ("tokenizer.json", "vocab.json") if (path := directory / name).exists()]
    if found:
        content = read_json(found[0], COPY_AGAIN)
        model = content.get("model")  # of tokenizer.json; vocab.json has nothing but the vocabulary
        vocab = model.get("vocab") if isinstance(model, dict) else content
        is_gpt2 = vocab == vocab_of(tokenizer.get_encoding("gpt2"))
    else:  # GPT-2's size, or that padded to a multiple of 64
        is_gpt2 = not directory.is_dir() or vocab_size in (50257, 50304)
    if not is_gpt2:
        raise UserError(
            f"The model in {directory}, with {vocab_size} token ids, has a tokenizer of its own. Only GPT-2's and "
            "those of this program are read. If it was trained here, copy its tokenizer.tiktoken and "
            "tokenizer.tiktoken.json there. Otherwise use another model."
        )
    return tokenizer.get_encoding("gpt2")


def vocab_of(enc):
    """Return {token: id} of a tokenizer as these files have it, with a printable character for each byte."""
    chars, ranks = tokenizer.byte_chars(), enc._mergeable_ranks
    vocab = {"".join(chars[byte] for byte in token): rank for token, rank in ranks.items()}
    return vocab | enc._special_tokens


def export_huggingface(model, enc, directory):
    """Write a GPT and its tokenizer to `directory` atomically; anything there is moved aside, to `directory`.1.

    The padding of the vocabulary is dropped; every other weight is exported bit for bit. A chat model also gets its
    chat template, and stops after its turn.
    """
    from safetensors.torch import save

    directory = Path(directory)
    part = directory.with_name(f".{directory.name}.part")
    contents = export_files(vars(model.config), enc)
    weights = {name: weight.contiguous() for name, weight in export_weights(model.state_dict(), enc).items()}
    contents["model.safetensors"] = save(weights, METADATA)
    names = {*contents, "tokenizer.tiktoken", "tokenizer.tiktoken.json"}
    remove_part(part, names)
    make_way(part)
    try:
        part.mkdir(parents=True)
        for name, content in contents.items():
            with atomic_write(part / name) as file:
                file.write(content)
        tokenizer.write_encoding(enc, part / "tokenizer.tiktoken")
        make_way(directory)
        part.rename(directory)
    finally:
        remove_part(part, names)


def export_weights(weights, enc):
    """Return {name: tensor} of the exported weights of a GPT with this state dict and tokenizer."""
    exported = {name: weight.cpu() for name, weight in transposed(weights).items()}
    exported["transformer.wte.weight"] = exported.pop("lm_head.weight")[: enc.n_vocab]
    return exported


def check_export(model: Any, directory: Path) -> bool:
    """Whether transformers computes the same logits from an export; prints a note if not: the model was changed."""
    import torch

    idx = torch.arange(min(64, model.config.block_size))[None]
    try:
        from transformers import GPT2LMHeadModel, logging

        logging.disable_progress_bar()
        theirs = GPT2LMHeadModel.from_pretrained(directory)
        with torch.no_grad():
            expected = theirs(idx).logits
    except Exception as error:  # the model is exported, whatever a large package says of it
        print(f"note: {plain(directory)} could not be compared with transformers: {plain(first_line(error))}")
        return True
    device, model.residual_dtype = next(model.parameters()).device, torch.float32
    with torch.no_grad():
        ours = model(idx.to(device))[0].cpu()[..., : theirs.config.vocab_size]
    is_same = bool((ours - expected).abs().max() <= 0.05 * expected.std())  # TF32 changes a hundredth of that
    if not is_same:
        print(
            f"note: transformers computes other logits from {plain(directory)} than this program does: the code of "
            "the model was changed, so it is no GPT-2 any more. Use it with this program only."
        )
    return is_same


def export_files(shape, enc):
    """Return {name: content} of the small files for a GPT with these fields of GPTConfig and this tokenizer."""
    eot, length, special_tokens = enc.eot_token, shape["block_size"], enc._special_tokens
    ends = [special_tokens[token] for token in (tokenizer.EOT, "<|end|>") if token in special_tokens]
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
    ranks, vocab, merges = enc._mergeable_ranks, vocab_of(enc), []
    words = {i: word for word, i in vocab.items()}
    for token in sorted(ranks, key=ranks.get):
        ids = [ranks.get(part) for part in tokenizer.last_merge(token, ranks)]
        if not {ranks[token], *ids} <= words.keys():
            raise UserError(
                f"Tokenizer {enc.name} cannot be exported: its token {token!r} is a special token, too, or not made of "
                "two shorter ones. Use another tokenizer."
            )
        if len(token) > 1:
            merges.append(tuple(words[i] for i in ids))
    model = tokenizer.huggingface_model(enc._pat_str, vocab, merges)
    model.add_special_tokens(list(enc._special_tokens))
    config: dict[str, Any] = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), tokenizer.EOT)
    config |= dict(tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=False)
    config["model_max_length"] = max_length
    if tokenizer.has_chat_tokens(enc):
        config["chat_template"] = CHAT_TEMPLATE
    return {"tokenizer.json": model.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}


def is_export_of(directory, weights, shape, enc):
    """Whether `directory` holds all that `export_huggingface` writes for this model and the tokenizer `enc`."""
    from safetensors import SafetensorError, safe_open

    try:
        found = tokenizer.read_encoding(directory / "tokenizer.tiktoken")
        if tokenizer.digest(found) != tokenizer.digest(enc):
            return False
        for name, content in export_files(shape, enc).items():
            with open_regular(directory / name) as file:
                if file.read() != content:
                    return False
        path, expected = directory / "model.safetensors", export_weights(weights, enc)
        # a tensor at a time: all of them would be the model once more, 6 GB for gpt2-xl
        with open_regular(path), safe_open(path, "pt") as file:  # a pipe would block safe_open
            if file.metadata() != METADATA or set(file.keys()) != expected.keys():
                return False
            pairs = ((file.get_tensor(name), weight) for name, weight in expected.items())
            return all(tensor.dtype == weight.dtype and tensor.equal(weight) for tensor, weight in pairs)
    except (UserError, OSError, SafetensorError):
        return False


def remove_part(part, names):
    """Delete a folder with an export that was not finished, unless it contains a file that no export has."""
    found = {path.name.removeprefix(".").removesuffix(".part") for path in part.glob("*")}
    if found <= names:
        remove_folder(part)


def make_way(path):
    if os.path.lexists(path):
        aside = path.rename(free_name(path))
        print(plain(f"Moved what was at {path} to {aside}.", 2000), flush=True)
