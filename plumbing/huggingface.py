"""Import and export GPT-2 in Hugging Face format, which transformers, vLLM and lm-evaluation-harness read.

The format keeps the parameter names of OpenAI's checkpoint, as GPT does. Two things differ: OpenAI's Conv1D stores a
block's four matrices as (in, out), nn.Linear as (out, in); and GPT's vocabulary is padded. llama.cpp reads the format,
too, but only converts models with GPT-2's own tokenizer, as it recognizes tokenizers by a list.
"""

import json
import shutil
from pathlib import Path

import tokenizer
from plumbing.cli import UserError
from plumbing.huggingface_tokenizer import export_tokenizer, import_tokenizer
from plumbing.modelcard import write_model_card

# the four matrices of a block, which Conv1D stores transposed
MATRICES = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
SIZES = {"n_positions": 1024, "vocab_size": 50257, "n_layer": 12, "n_head": 12, "n_embd": 768}  # GPT2Config's defaults


def transposed(weights):
    """Return a state dict with the blocks' matrices transposed, which converts it between the two formats."""
    return {name: weight.T if name.endswith(MATRICES) else weight for name, weight in weights.items()}


# ----------------------------------------------------------------------------------------------------------
# Import


def load_huggingface(name_or_directory):
    """Load (shape, weights) of a GPT-2 from the hub or a folder: GPTConfig's fields and a state dict for GPT.

    Raises UserError if there is none, if it is a variant that GPT does not implement, or if config.json and the
    weights do not fit each other.
    """
    directory = Path(name_or_directory)
    if not directory.is_dir():
        directory = download(str(name_or_directory))
    config = read_config(directory)
    weights = read_weights(directory, config)
    shape = {
        "block_size": config["n_positions"],
        "vocab_size": config["vocab_size"],
        "n_layer": config["n_layer"],
        "n_head": config["n_head"],
        "n_embd": config["n_embd"],
    }
    return shape, transposed(weights)


def download(name):
    """Download a model from the hub, unless it is in the cache; return its folder."""
    from huggingface_hub import hf_hub_download  # slow to import

    try:
        hf_hub_download(name, "model.safetensors")
        return Path(hf_hub_download(name, "config.json")).parent
    except (OSError, ValueError) as error:  # the hub's own exceptions are among these
        raise UserError(
            f"Could not download {name}: {tokenizer.first_line(error).rstrip('.')}. "
            "Check the network and run the same command again, or give a folder in Hugging Face format."
        ) from None


def read_config(directory):
    """Return config.json's fields, with GPT2Config's default for each size that it does not give."""
    path = Path(directory, "config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"Could not open {path}: {error.strerror}. Give a folder in Hugging Face format, which has that file."
        ) from None
    except (ValueError, RecursionError):
        raise UserError(f"{path} is damaged: it is not JSON. Copy or export the model again.") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} is damaged: it is not a JSON object. Copy or export the model again.")
    config = SIZES | config
    for name in SIZES:
        if type(config[name]) is not int or config[name] < 1:
            raise UserError(
                f"{path} is damaged: its {name} is {show(config[name])}, not a whole number above 0. "
                "Copy or export the model again."
            )
    check_variant(config, path)
    return config


def check_variant(config, path):
    """Raise UserError if config.json describes a model that GPT does not implement."""
    allowed = {
        "model_type": ("gpt2",),
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "n_inner": (None, 4 * config["n_embd"]),
        "layer_norm_epsilon": (1e-5,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
        "quantization_config": (None,),
    }
    differences = []
    for name, values in allowed.items():
        value = config.get(name, values[0])
        if value not in values:
            differences.append(f"its {name} is {show(value)}, not {values[-1]!r}")
    if "model_type" not in config:
        differences.append("it has no model_type")
    if config["n_embd"] % config["n_head"]:
        differences.append(f"its n_embd {config['n_embd']} is not a multiple of its n_head {config['n_head']}")
    if differences:
        raise UserError(
            f"{path} describes a variant of GPT-2, or another model, that is not supported: "
            f"{', and '.join(differences)}. Use a model of GPT-2's own architecture."
        )


def show(value):
    """Return a value's repr for a message, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."


def read_weights(directory, config):
    """Return the weights of a model, in float32, after checking all their names, shapes and dtypes.

    The checks read only the headers of the files, so that absurd sizes in config.json take no memory.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    paths = weight_files(directory)
    try:
        files = [safe_open(path, "pt") for path in paths]
        found = {}
        for file in files:
            for key in file.keys():
                name = key if key.startswith(("transformer.", "lm_head.")) else f"transformer.{key}"
                if not name.endswith((".attn.bias", ".attn.masked_bias")):  # causal masks in older files
                    found[name] = (file, key)
        check_weights(found, config, directory)
        weights = {name: file.get_tensor(key).float() for name, (file, key) in found.items()}
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"Could not read the weights in {directory}: {tokenizer.first_line(error)}. Copy or export the model again."
        ) from None
    embedding = weights["transformer.wte.weight"]
    if not torch.equal(weights.setdefault("lm_head.weight", embedding), embedding):
        raise UserError(
            f"{directory} holds a variant of GPT-2 that is not supported: its lm_head.weight is not its "
            "transformer.wte.weight. Use a model of GPT-2's own architecture."
        )
    return weights


def weight_files(directory):
    """Return the paths of a model's safetensors files: one, or its parts."""
    single = Path(directory, "model.safetensors")
    parts = sorted(Path(directory).glob("model-*-of-*.safetensors"))
    if single.exists():
        return [single]
    if parts:
        return parts
    pickles = sorted(path.name for path in Path(directory).glob("*.bin"))
    if pickles:
        raise UserError(
            f"{directory} has its weights only as pickles ({pickles[0]}), which can run code when they are read and "
            "are therefore refused. Convert them to model.safetensors."
        )
    raise UserError(f"{directory} has no model.safetensors. Copy or export the model again.")


def check_weights(found, config, directory):
    """Raise UserError unless the tensors in the files are those of a GPT-2 with this config.

    found: {parameter name: (open file, its name there)}.
    """
    num_layers = sum(name.endswith(".ln_1.weight") for name in found)
    if num_layers != config["n_layer"]:
        problems = [f"config.json says {config['n_layer']} layers, but the weights have {num_layers}"]
    else:
        problems = list(compare_weights(found, expected_shapes(config)))
    if problems:
        more = f" and {len(problems) - 1} more problems" if len(problems) > 1 else ""
        raise UserError(
            f"The weights in {directory} do not fit its config.json: {problems[0]}{more}. "
            "Copy or export the model again."
        )


def compare_weights(found, expected):
    """Yield what is wrong with each tensor: missing, unexpected, of another shape or dtype."""
    for name, shape in expected.items():
        if name not in found and name != "lm_head.weight":
            yield f"{name} is missing"
    for name, (file, key) in found.items():
        tensor = file.get_slice(key)
        if name not in expected:
            yield f"{name} is not a weight of GPT-2"
        elif tensor.get_shape() != expected[name]:
            yield f"{name} has the shape {tensor.get_shape()} instead of {expected[name]}"
        elif tensor.get_dtype() not in ("F64", "F32", "F16", "BF16"):
            yield f"{name} has the dtype {tensor.get_dtype()}, not a floating-point one"


def expected_shapes(config):
    """Return {parameter name: shape} of a GPT-2 in Hugging Face format."""
    C, V = config["n_embd"], config["vocab_size"]
    shapes = {
        "transformer.wte.weight": [V, C],
        "transformer.wpe.weight": [config["n_positions"], C],
        "transformer.ln_f.weight": [C],
        "transformer.ln_f.bias": [C],
        "lm_head.weight": [V, C],
    }
    block = {
        "ln_1.weight": [C],
        "ln_1.bias": [C],
        "attn.c_attn.weight": [C, 3 * C],
        "attn.c_attn.bias": [3 * C],
        "attn.c_proj.weight": [C, C],
        "attn.c_proj.bias": [C],
        "ln_2.weight": [C],
        "ln_2.bias": [C],
        "mlp.c_fc.weight": [C, 4 * C],
        "mlp.c_fc.bias": [4 * C],
        "mlp.c_proj.weight": [4 * C, C],
        "mlp.c_proj.bias": [C],
    }
    for layer in range(config["n_layer"]):
        for name, shape in block.items():
            shapes[f"transformer.h.{layer}.{name}"] = shape
    return shapes


def load_tokenizer(name_or_directory):
    """Return the tokenizer of a GPT-2 on the hub, which is OpenAI's, or of a folder in Hugging Face format.

    Raises UserError if it is of a kind that tiktoken does not support, or has more ids than the model.
    """
    directory = Path(name_or_directory)
    if not directory.is_dir():
        return tokenizer.get_encoding("gpt2")
    vocab_size = read_config(directory)["vocab_size"]
    has_merges = (directory / "vocab.json").exists() and (directory / "merges.txt").exists()
    if (directory / "tokenizer.tiktoken").exists():
        enc = tokenizer.read_encoding(directory / "tokenizer.tiktoken")
    elif (directory / "tokenizer.json").exists() or has_merges:
        enc = import_tokenizer(directory)
    elif vocab_size in (50257, 50304):  # GPT-2's, and that padded to a multiple of 64
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

EXPORTED_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.tiktoken",
    "tokenizer.tiktoken.json",
    "README.md",
    "curve.png",
)


def export_huggingface(model, enc, directory, run_folder=None, step=None, sample=""):
    """Write a GPT and its tokenizer to `directory` atomically; replaces an older export, and nothing else.

    run_folder: the folder of the run that trained it, for a model card, with the figures after `step` updates (None:
    after all of them) and with `sample`, a text that the model has written.

    GPT2LMHeadModel.from_pretrained and AutoTokenizer.from_pretrained load it offline. The vocabulary padding is
    dropped; every other weight is exported bit for bit. With a tokenizer of conversations it has a chat template
    and stops at the end of a turn.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    directory = Path(directory)
    part = directory.with_name(directory.name + ".part")
    check_export_folder(directory)
    weights = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    weights["transformer.wte.weight"] = weights["transformer.wte.weight"][: enc.n_vocab]
    weights = {name: weight.contiguous() for name, weight in transposed(weights).items()}
    config = huggingface_config(model.config, enc)
    try:
        remove_export(part)
        part.mkdir(parents=True)
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (part / "generation_config.json").write_text(json.dumps(generation_config(enc), indent=2) + "\n")
        export_tokenizer(enc, part, max_length=model.config.block_size)
        save_file(weights, part / "model.safetensors", metadata={"format": "pt"})
        shutil.copymode(part / "config.json", part / "model.safetensors")  # safetensors lets only the owner read
        if run_folder:
            write_model_card(part, run_folder, step, sample)
        remove_export(directory)
        part.rename(directory)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"Could not write {directory}: {reason}. Check that its folder exists, is writable and has free space, "
            "then run the same command again."
        ) from error
    finally:
        remove_export(part)


def check_export_folder(directory):
    """Raise UserError if an export to `directory` would have to delete something that is not an export."""
    directory = Path(directory)
    part = directory.with_name(directory.name + ".part")
    for path in (directory, part):
        foreign = foreign_file(path)
        if foreign:
            is_folder = path.is_dir() and not path.is_symlink()
            reason = f"holds {foreign}, which no export has" if is_folder else "is not a folder"
            raise UserError(
                f"{path} cannot be replaced by an export, because it {reason}. "
                "Move it elsewhere and run the same command again."
            )
    has_files = directory.is_dir() and any(directory.iterdir())
    if has_files and not (directory / "tokenizer.tiktoken").exists():
        raise UserError(
            f"{directory} holds a model that was not exported by train_gpt2.py or sample.py. "
            "Move it elsewhere and run the same command again."
        )


def foreign_file(path):
    """Return what at `path` is not an export's: the name of a file in it, the path itself, or None."""
    path = Path(path)
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        return str(path)
    if path.is_dir():
        for entry in sorted(path.iterdir()):
            if entry.name.removesuffix(".part") not in EXPORTED_FILES or entry.is_dir():
                return entry.name
    return None


def remove_export(path):
    """Delete an export by the names of its files; leaves a folder that has others."""
    if foreign_file(path) is None and path.is_dir():
        for entry in path.iterdir():
            entry.unlink()
        path.rmdir()


def huggingface_config(config, enc):
    """Return config.json's fields for a GPT of GPTConfig `config` with the tokenizer `enc`."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "n_positions": config.block_size,
        "n_ctx": config.block_size,
        "n_embd": config.n_embd,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "vocab_size": enc.n_vocab,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "dtype": "float32",
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "bos_token_id": enc.eot_token,
        "eos_token_id": enc.eot_token,
    }


def generation_config(enc):
    """Return generation_config.json's fields: the ids that begin and end a text."""
    ends = [enc.eot_token]
    if tokenizer.has_chat_tokens(enc):
        ends.append(enc.encode_single_token("<|end|>"))
    return {
        "bos_token_id": enc.eot_token,
        "eos_token_id": ends if len(ends) > 1 else enc.eot_token,
        "pad_token_id": enc.eot_token,
    }
