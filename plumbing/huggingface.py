"""Import and export GPT-2 in Hugging Face format, which transformers, vLLM, llama.cpp and lm-evaluation-harness read.

The format keeps the parameter names of OpenAI's checkpoint, as we do. Two things differ: OpenAI's Conv1D stores a
block's four matrices as (in, out), nn.Linear as (out, in); and our vocabulary is padded.
"""

import json
import os
import shutil
from pathlib import Path

import tokenizer
from plumbing.cli import UserError

# the four matrices of a block, which Conv1D stores transposed
MATRICES = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def transposed(weights):
    """Return a state dict with the blocks' matrices transposed, which converts it between the two formats."""
    return {name: weight.T if name.endswith(MATRICES) else weight for name, weight in weights.items()}


def load_huggingface(name_or_directory):
    """Load (shape, weights) of a GPT-2 from the hub or a folder: GPTConfig's fields and a state dict for GPT.

    Raises UserError if there is none, or if it is a variant that GPT does not implement.
    """
    from safetensors import SafetensorError
    from transformers import GPT2LMHeadModel, logging  # slow to import, and only needed here

    logging.disable_progress_bar()
    try:
        hf = GPT2LMHeadModel.from_pretrained(name_or_directory)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(explain_failed_load(name_or_directory, error)) from error
    config = hf.config
    is_gelu = config.activation_function in ("gelu_new", "gelu_pytorch_tanh")
    if not is_gelu or config.n_inner not in (None, 4 * config.n_embd):
        raise UserError(
            f"{name_or_directory} is a variant of GPT-2 that is not supported: its activation is "
            f"{config.activation_function} and its n_inner {config.n_inner}. "
            "Use a model with gelu_new and an MLP 4 times as wide as n_embd."
        )
    shape = {
        "block_size": config.n_positions,
        "vocab_size": config.vocab_size,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_embd": config.n_embd,
    }
    return shape, transposed(hf.state_dict())


def explain_failed_load(name_or_directory, error):
    """Word the message for a model that transformers could not load."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if os.path.isdir(name_or_directory):
        return (
            f"Could not load a model from {name_or_directory}: {reason}. "
            "The folder needs a whole config.json and model.safetensors; copy or export them again."
        )
    return (
        f"Could not download {name_or_directory}: {reason}. "
        "Check the network and run the same command again, or give a folder in Hugging Face format."
    )


def export_huggingface(model, enc, directory):
    """Write a GPT and its tokenizer to `directory` atomically.

    GPT2LMHeadModel.from_pretrained and AutoTokenizer.from_pretrained load it offline. The vocabulary padding is
    dropped; every other weight is exported bit for bit.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    weights = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    weights["transformer.wte.weight"] = weights["transformer.wte.weight"][: enc.n_vocab]
    weights = {name: weight.contiguous() for name, weight in transposed(weights).items()}
    special_ids = {"bos_token_id": enc.eot_token, "eos_token_id": enc.eot_token}
    config = huggingface_config(model.config, enc) | special_ids
    directory = Path(directory)
    part = directory.with_name(directory.name + ".part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (part / "generation_config.json").write_text(json.dumps(special_ids, indent=2) + "\n")
        tokenizer.export_huggingface(enc, part)
        save_file(weights, part / "model.safetensors", metadata={"format": "pt"})
        shutil.rmtree(directory, ignore_errors=True)
        part.rename(directory)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"Could not write {directory}: {reason}. Check that its folder exists, is writable and has free space, "
            "then run the same command again."
        ) from error


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
    }
