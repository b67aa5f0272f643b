"""Import and export GPT-2 in Hugging Face format, which transformers, vLLM and lm-evaluation-harness read.

GPT has the parameter names of transformers' GPT2LMHeadModel. Two things differ: its Conv1D stores a block's four
matrices as (in, out), nn.Linear as (out, in); and GPT's vocabulary is padded. llama.cpp reads the format, too, but
only converts models with GPT-2's own tokenizer, as it recognizes tokenizers by a list.
"""

import contextlib
import itertools
import json
import os
import shutil
from pathlib import Path

import tokenizer
from plumbing.cli import UserError, first_line
from plumbing.files import read_json
from plumbing.huggingface_tokenizer import export_tokenizer, import_tokenizer
from plumbing.modelcard import write_model_card

# the four matrices of a block, which Conv1D stores transposed
MATRICES = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
# the values in config.json that GPT supports; transformers assumes the first one if the key is missing
SUPPORTED = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
    "quantization_config": (None,),
}
COPY_AGAIN = "Copy or export the model again."


def transposed(weights):
    """Return a state dict with the blocks' matrices transposed, which converts it between the two formats."""
    return {name: weight.T if name.endswith(MATRICES) else weight for name, weight in weights.items()}


# ----------------------------------------------------------------------------------------------------------
# Import


def load_huggingface(name_or_directory):
    """Load (shape, weights) of a GPT-2 from the hub or a folder: GPTConfig's fields and a state dict for GPT.

    Raises UserError if there is none, or if it is a variant that GPT does not implement.
    """
    directory = Path(name_or_directory)
    if not directory.is_dir():
        directory = download(str(name_or_directory))
    path = directory / "config.json"
    config = {"model_type": None} | read_json(path, COPY_AGAIN)
    for name, values in SUPPORTED.items():
        if config.get(name, values[0]) not in values:
            raise UserError(
                f"{path} describes a variant of GPT-2, or another model, that is not supported: its {name} is "
                f"{config[name]!r:.60}, not {values[0]!r}. Use a model of GPT-2's own architecture."
            )
    weights = read_weights(directory)
    return shape_of(weights, config.get("n_head", 12), directory), weights


def download(name):
    """Download a model from the hub, unless it is in the cache; return its folder."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache

    try:
        if not isinstance(try_to_load_from_cache(name, "model.safetensors"), str):
            get_hf_file_metadata(hf_hub_url(name, "model.safetensors"))  # without a network, an error at once
        hf_hub_download(name, "model.safetensors")  # retries and resumes
        return Path(hf_hub_download(name, "config.json")).parent
    except Exception as error:  # the hub's client has renamed its network errors from version to version
        raise UserError(
            f"Could not download {name}: {first_line(error).rstrip('.')}. "
            "Check the network and run the same command again, or give a folder in Hugging Face format."
        ) from None


def read_weights(directory):
    """Return a state dict for GPT, in float32, of the safetensors in a folder: one file, or its parts."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    single = directory / "model.safetensors"
    paths = [single] if single.is_file() else sorted(directory.glob("model-*-of-*.safetensors"))
    if not paths or not all(path.is_file() for path in paths):
        pickles = " Its weights in *.bin are pickles, which can run code." if any(directory.glob("*.bin")) else ""
        raise UserError(f"{directory} has no model.safetensors.{pickles} Convert, copy or export the model again.")
    found, weights = {}, {}
    try:
        for path in paths:
            found |= load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"Could not read the weights in {directory}: {first_line(error)}. {COPY_AGAIN}") from None
    for name, weight in found.items():
        if not name.startswith(("transformer.", "lm_head.")):  # older files have no prefix
            name = f"transformer.{name}"
        if not name.endswith((".attn.bias", ".attn.masked_bias")):  # causal masks in older files
            weights[name] = weight.float()
    weights.setdefault("lm_head.weight", weights.get("transformer.wte.weight"))
    return transposed(weights)


def shape_of(weights, n_head, source):
    """Return GPTConfig's fields for the GPT with this state dict, which has all of them but the number of heads.

    Raises UserError, which names `source`, if these are not weights of a GPT; a strict load_state_dict finds the rest.
    """
    import torch

    wte, wpe = weights.get("transformer.wte.weight"), weights.get("transformer.wpe.weight")
    if wte is None or wpe is None or wte.dim() != 2:
        problem = "no embeddings"
    elif not all(weight.sum().isfinite() for weight in weights.values()):  # faster than looking at each number
        problem = "weights that are not finite, as a training that diverged leaves them"
    elif not torch.equal(weights.get("lm_head.weight", wte), wte):
        problem = "an output layer (lm_head.weight) that is not its embedding (transformer.wte.weight)"
    elif type(n_head) is not int or n_head < 1 or wte.size(1) % n_head:
        problem = f"an n_head of {n_head!r:.60}, which does not divide its n_embd of {wte.size(1)}"
    else:
        n_layer = sum(name.endswith(".ln_1.weight") for name in weights)
        sizes = dict(block_size=len(wpe), vocab_size=len(wte), n_embd=wte.size(1))
        return sizes | dict(n_layer=n_layer, n_head=n_head)
    raise UserError(f"{source} is not a GPT-2 that this program can use: it has {problem}. Use another model.")


def load_tokenizer(name_or_directory, vocab_size):
    """Return the tokenizer of a GPT-2 on the hub, which is OpenAI's, or of a folder in Hugging Face format.

    Raises UserError if it is of a kind that tiktoken does not support, or has more ids than the model.
    """
    directory = Path(name_or_directory)
    names = {path.name for path in directory.iterdir()} if directory.is_dir() else set()
    if "tokenizer.tiktoken" in names:
        enc = tokenizer.read_encoding(directory / "tokenizer.tiktoken")
    elif "tokenizer.json" in names or {"vocab.json", "merges.txt"} <= names:
        enc = import_tokenizer(directory)
    elif not names or vocab_size in (50257, 50304):  # GPT-2's size, or that padded to a multiple of 64
        enc = tokenizer.get_encoding("gpt2")
    else:
        raise UserError(f"{directory} has no tokenizer.json and no vocab.json with merges.txt. Copy them there.")
    if enc.n_vocab > vocab_size:
        raise UserError(
            f"The tokenizer in {directory} has {enc.n_vocab} ids, but the model only {vocab_size}. "
            "Give the model its own tokenizer."
        )
    return enc


# ----------------------------------------------------------------------------------------------------------
# Export

JSON_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
EXPORTED_FILES = {*JSON_FILES, "model.safetensors", "tokenizer.tiktoken", "tokenizer.tiktoken.json"}


def export_huggingface(model, enc, directory, run_folder=None, step=None, sample=""):
    """Write a GPT and its tokenizer to `directory` atomically; anything there is moved aside, to `directory`.1.

    run_folder: the folder of the run that trained it, for a model card, with the figures after `step` updates (None:
    after all of them) and with `sample`, a text written by the model.

    GPT2LMHeadModel.from_pretrained and AutoTokenizer.from_pretrained load it offline. The vocabulary padding is
    dropped; every other weight is exported bit for bit. With a chat tokenizer, it also has a chat template and
    stops at the end of a turn.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    directory = Path(directory)
    part = directory.with_name(directory.name + ".part")
    weights = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    weights["transformer.wte.weight"] = weights["transformer.wte.weight"][: enc.n_vocab]
    weights = {name: weight.contiguous() for name, weight in transposed(weights).items()}
    remove_part(part)
    try:
        make_way(part)
        part.mkdir(parents=True)
        for name, fields in config_files(vars(model.config), enc).items():
            (part / name).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        export_tokenizer(enc, part, max_length=model.config.block_size)
        save_file(weights, part / "model.safetensors", metadata={"format": "pt"})
        shutil.copymode(part / "config.json", part / "model.safetensors")  # safetensors lets only the owner read
        make_way(directory)
        part.rename(directory)
    except SafetensorError as error:
        reason = str(error).split("error: ")[-1].split(" (os error")[0]
        raise UserError(f"Could not write {part}: {reason}. Make room there and run the same command again.") from None
    finally:
        remove_part(part)
    if run_folder:
        write_model_card(directory, run_folder, step, sample)


def remove_part(part):
    """Delete an export that was not finished, unless it contains a file that no export has."""
    names = EXPORTED_FILES | {f".{name}.part" for name in EXPORTED_FILES}
    is_folder = part.is_dir() and not part.is_symlink()
    if is_folder and all(path.name in names and path.is_file() for path in part.iterdir()):
        shutil.rmtree(part)


def make_way(path):
    """Rename anything at `path` to the first free name of `path`.1, `path`.2 and so on; an empty folder is deleted."""
    with contextlib.suppress(OSError):
        path.rmdir()
    if os.path.lexists(path):
        others = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
        aside = next(other for other in others if not os.path.lexists(other))
        path.rename(aside)
        print(f"Moved what was at {path} to {aside}.", flush=True)


def is_export_of(directory, weights, n_head, enc):
    """Whether `directory` holds a whole export of the GPT with the state dict `weights` and the tokenizer `enc`."""
    import torch

    directory = Path(directory)
    try:
        found = {name: read_json(directory / name, COPY_AGAIN) for name in JSON_FILES}
        shape, theirs = load_huggingface(directory)
        their_enc = load_tokenizer(directory, shape["vocab_size"])
    except (UserError, OSError):
        return False
    expected = config_files(shape | {"n_head": n_head}, enc)
    is_whole = found | expected == found and (directory / "model.safetensors").is_file()
    if not is_whole or tokenizer.digest(their_enc) != tokenizer.digest(enc) or theirs.keys() != weights.keys():
        return False
    return all(torch.equal(theirs[name], weight[: len(theirs[name])].float()) for name, weight in weights.items())


def config_files(shape, enc):
    """Return the contents of config.json and generation_config.json for a GPT with these fields of a GPTConfig."""
    eot, ends = enc.eot_token, enc.eot_token
    if tokenizer.has_chat_tokens(enc):
        ends = [eot, enc.encode_single_token("<|end|>")]
    model = dict(architectures=["GPT2LMHeadModel"], model_type="gpt2", activation_function="gelu_new", dtype="float32")
    model |= {name: shape[name] for name in ("n_layer", "n_head", "n_embd")}
    model |= dict(n_positions=shape["block_size"], n_ctx=shape["block_size"], vocab_size=enc.n_vocab)
    model |= dict(tie_word_embeddings=True, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, layer_norm_epsilon=1e-5)
    return {
        "config.json": model | dict(bos_token_id=eot, eos_token_id=eot),
        "generation_config.json": dict(bos_token_id=eot, eos_token_id=ends, pad_token_id=eot),
    }
