"""GPT-2 in and out of Hugging Face's format: what transformers, vLLM, llama.cpp and lm-evaluation-harness open.

The format keeps the names of OpenAI's checkpoint, and so do we. Two things differ: OpenAI's Conv1D stores a
block's four matrices as (in, out), nn.Linear as (out, in); and our vocabulary has rows of padding.
"""

import json
import shutil
from pathlib import Path

import tokenizer
from plumbing.cli import UserError

# the matrices of a block, in the order of a forward pass
MATRICES = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def load_huggingface(name_or_directory):
    """(shape, weights) of a GPT-2 on the hub or in a folder: GPTConfig's fields and a state dict for GPT.

    Raises UserError where there is none, or a variant of GPT-2 that GPT does not compute.
    """
    from safetensors import SafetensorError
    from transformers import GPT2LMHeadModel, logging  # takes seconds, and only this needs it

    logging.disable_progress_bar()
    try:
        hf = GPT2LMHeadModel.from_pretrained(name_or_directory)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"got no GPT-2 from {name_or_directory} ({reason}), needed a folder with config.json and "
            "model.safetensors, or a name on the hub and a network"
        ) from error
    c = hf.config
    if c.activation_function not in ("gelu_new", "gelu_pytorch_tanh") or c.n_inner not in (None, 4 * c.n_embd):
        raise UserError(f"got a variant in {name_or_directory}, needed GPT-2's tanh GELU and an MLP 4 times as wide")
    shape = dict(
        block_size=c.n_positions, vocab_size=c.vocab_size, n_layer=c.n_layer, n_head=c.n_head, n_embd=c.n_embd
    )
    return shape, {name: w.T if name.endswith(MATRICES) else w for name, w in hf.state_dict().items()}


def export_huggingface(model, enc, directory):
    """Write a GPT and its tokenizer to `directory`, which appears whole or not at all.

    GPT2LMHeadModel.from_pretrained and AutoTokenizer.from_pretrained read it without a network. The vocabulary
    is cut to the tokenizer's; every other weight goes out bit for bit.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    weights = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    weights["transformer.wte.weight"] = weights["transformer.wte.weight"][: enc.n_vocab]
    weights = {name: (w.T if name.endswith(MATRICES) else w).contiguous() for name, w in weights.items()}
    c = model.config
    ends = dict(bos_token_id=enc.eot_token, eos_token_id=enc.eot_token)
    config = dict(
        architectures=["GPT2LMHeadModel"], model_type="gpt2", activation_function="gelu_new",
        n_positions=c.block_size, n_ctx=c.block_size, n_embd=c.n_embd, n_layer=c.n_layer, n_head=c.n_head,
        vocab_size=enc.n_vocab, layer_norm_epsilon=1e-5, tie_word_embeddings=True, dtype="float32",
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, **ends,
    )  # fmt: skip
    directory = Path(directory)
    part = directory.with_name(directory.name + ".part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (part / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")
        tokenizer.export_huggingface(enc, part)
        save_file(weights, part / "model.safetensors", metadata={"format": "pt"})
        shutil.rmtree(directory, ignore_errors=True)
        part.rename(directory)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise UserError(f"got '{error}' while writing {directory}, needed room, make some and try again") from error
