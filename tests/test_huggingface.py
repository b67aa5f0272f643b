"""plumbing/run/huggingface.py: reads what the model computes, and writes what others read as it is."""

import functools
import json
import os
import shutil
from pathlib import Path

import pytest
import tiktoken
import torch
from plumbing.cli.console import UserError
from plumbing.data import tokenizers
from plumbing.run.huggingface import (
    export_huggingface,
    is_export_of,
    load_huggingface,
    load_tokenizer,
)
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from train_gpt2 import GPT, load_model

from harness import Touch, assert_same_tensors, listing, parrot_model, tiny_model

pytestmark = pytest.mark.gpt2
whole_text = pytest.mark.usefixtures("whole_text")

BYTES = tokenizers.get_encoding("bytes")
CHAT = tokenizers.get_encoding("bytes+chat")


@pytest.fixture
def hf():
    """A folder with a model of 2 layers over bytes."""
    folder = Path("hf")
    export_huggingface(tiny_model(vocab_size=257), BYTES, folder)
    return folder


def change_config(hf, **changes):
    fields = json.loads((hf / "config.json").read_text(encoding="utf-8")) | changes
    (hf / "config.json").write_text(json.dumps(fields), encoding="utf-8")


def read(hf):
    """(shape, weights in the order of their names) of the model in a folder."""
    shape, weights = load_huggingface(hf)
    return shape, dict(sorted(weights.items()))


def refusal(function, *args):
    """The one line with which `function` refuses its input."""
    with pytest.raises(UserError) as caught:
        function(*args)
    line = str(caught.value)
    assert "\n" not in line and len(line) < 500
    return line


# ----- Import -------------------------------------------------------------------------------------------


def rewrite(hf, change, prefix="transformer."):
    """Change the weights in a folder. By default they get the names that transformers itself writes."""
    weights = {}
    for name, weight in load_file(hf / "model.safetensors").items():
        weights[prefix + name] = weight
    change(weights)
    (hf / "model.safetensors").unlink()  # older versions of safetensors still read from it
    save_file(weights, hf / "model.safetensors", {"format": "pt"})


def test_what_makes_no_difference_is_read(hf):
    expected = read(hf)
    assert expected[0] == dict(block_size=32, vocab_size=257, n_layer=2, n_head=2, n_embd=32)
    change_config(hf, activation_function="gelu_pytorch_tanh", resid_pdrop=0.1, dtype="bfloat16")
    assert_same_tensors(read(hf), expected)
    rewrite(hf, lambda w: w.update({"lm_head.weight": w["transformer.wte.weight"].clone()}))
    assert_same_tensors(read(hf), expected)
    rewrite(hf, lambda w: w.pop("transformer.wte.weight"), prefix="")
    assert_same_tensors(read(hf), expected)


# transformers' other kinds of GPT-2
OTHER_KINDS = {
    "model_type": "gptj",
    "activation_function": "relu",
    "layer_norm_epsilon": 1e-6,
    "scale_attn_weights": False,
    "scale_attn_by_inverse_layer_idx": True,
    "add_cross_attention": True,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("name, value", OTHER_KINDS.items())
def test_another_kind_of_model_is_refused(name, value, hf):
    change_config(hf, **{name: value})
    assert f"its {name} is {value!r}, not" in refusal(load_huggingface, hf)


NAME = "transformer.h.1.mlp.c_fc.weight"
BAD_WEIGHTS = [
    (lambda w: w.pop(NAME), NAME),
    (lambda w: w.update({NAME: w[NAME][1:]}), NAME),
    (lambda w: w.update({"lm_head.weight": w["transformer.wte.weight"] + 1}), "lm_head.weight"),
    (lambda w: w["transformer.wte.weight"].fill_(torch.nan), "not finite"),
]


@pytest.mark.parametrize("change, said", BAD_WEIGHTS)
def test_weights_that_are_not_those_of_a_gpt2_are_refused(change, said, hf):
    rewrite(hf, change)
    assert said in refusal(GPT.from_pretrained, hf)


DAMAGES = [
    lambda hf: os.truncate(hf / "model.safetensors", 5000),
    lambda hf: (hf / "config.json").write_bytes(b"[]"),
    # sizes that the weights do not have
    lambda hf: change_config(hf, vocab_size=2**40),
    lambda hf: change_config(hf, n_head=3),
    lambda hf: change_config(hf, n_layer=1),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_folder_whose_files_do_not_belong_together_is_refused(damage, hf):
    damage(hf)
    assert "Copy or export the model again" in refusal(load_huggingface, hf)


def test_a_file_of_a_folder_stands_for_the_folder(hf):
    assert_same_tensors(
        load_model(str(hf / "model.safetensors"))[0].state_dict(), load_model(str(hf))[0].state_dict()
    )


def test_a_pickle_is_read_where_there_is_nothing_else_and_its_code_is_never_run(hf):
    expected = read(hf)
    weights = load_file(hf / "model.safetensors")
    torch.save({"x": Touch("touched")}, hf / "pytorch_model.bin")
    assert_same_tensors(read(hf), expected)  # the file beside it
    (hf / "model.safetensors").unlink()
    said = refusal(load_huggingface, hf)
    # transformers 4 does not say why
    assert "perhaps code, which is never run" in said or "Unable to load weights" in said
    assert not os.path.exists("touched")
    torch.save(weights, hf / "pytorch_model.bin")
    assert_same_tensors(read(hf), expected)


def test_openais_names_and_half_precision_are_read(hf):
    shape, expected = read(hf)

    def to_openais(weights):
        for name, weight in weights.items():
            weights[name] = weight.bfloat16()
        weights["h.0.attn.bias"] = torch.ones(1, 1, 32, 32, dtype=torch.uint8)  # the causal masks
        weights["h.0.attn.masked_bias"] = torch.tensor(-1e4)

    rewrite(hf, to_openais, prefix="")
    rounded = {name: weight.bfloat16().float() for name, weight in expected.items()}
    assert_same_tensors(read(hf), (shape, rounded))


# ----- A folder's tokenizer -----------------------------------------------------------------------------


@pytest.fixture
def no_tables(hf, monkeypatch):
    """The folder without its tokenizer.tiktoken, where GPT-2's tokenizer is the one of bytes that it has."""
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: BYTES)
    for path in hf.glob("tokenizer.tiktoken*"):
        path.unlink()
    return hf


def test_a_model_without_a_tokenizer_has_gpt2s_if_it_has_its_size(no_tables):
    for path in no_tables.glob("tokenizer*"):
        path.unlink()
    for vocab_size in (50257, 50304):
        assert load_tokenizer(no_tables, dict(vocab_size=vocab_size)) is BYTES
    told = refusal(load_tokenizer, no_tables, dict(vocab_size=50258))
    assert "with 50258 token ids, has no tokenizer" in told


def test_gpt2s_tokenizer_is_known_by_its_tokens(no_tables, monkeypatch):
    """A token that was added to them, as for padding, only needs a row of the embedding."""
    path = no_tables / "tokenizer.json"
    fields = json.loads(path.read_text(encoding="utf-8"))
    added = fields["added_tokens"]
    added.append(added[0] | {"id": 257, "content": "[PAD]"})
    path.write_text(json.dumps(fields), encoding="utf-8")
    assert load_tokenizer(no_tables, dict(vocab_size=258)).name.startswith("bpe-")
    ranks = tokenizers.dumps(BYTES).partition("\n")[2]
    monkeypatch.setattr(tokenizers, "GPT2_RANKS", tokenizers.sha256(ranks))
    assert load_tokenizer(no_tables, dict(vocab_size=258)) is BYTES


def test_a_damaged_tokenizer_is_refused(no_tables):
    (no_tables / "tokenizer.json").write_text("{", encoding="utf-8")
    assert f"The tokenizer in {no_tables} cannot be used" in refusal(load_tokenizer, no_tables, dict(vocab_size=257))


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(no_tables):
    tokenizers.write_encoding(CHAT, no_tables / "tokenizer.tiktoken")
    assert "room for 257 token ids, but tokenizer" in refusal(load_model, no_tables)


# ----- Export -------------------------------------------------------------------------------------------


def test_what_stands_in_the_place_of_an_export_is_moved_aside_and_nothing_is_deleted(hf):
    """But for what a killed export left."""
    (hf / "thesis.tex").write_text("precious", encoding="utf-8")
    os.symlink("nowhere", "hf.1")  # a link is something, too
    shutil.copytree(hf, ".hf.part")
    before = listing(hf)
    export_huggingface(tiny_model(seed=1, vocab_size=257), BYTES, hf)
    assert listing("hf.2") == before
    assert {*os.listdir()} == {"hf", "hf.1", "hf.2"}


NOT_THIS_MODEL = {
    "one number is another": lambda hf: rewrite(hf, lambda w: w["ln_f.bias"][7].add_(1), ""),
    "missing": shutil.rmtree,
    "weights cut short": lambda hf: os.truncate(hf / "model.safetensors", 50),
}


@pytest.mark.parametrize("name", [None, *NOT_THIS_MODEL])
def test_only_an_export_of_the_same_weights_is_taken_for_the_model(hf, name):
    if name:
        NOT_THIS_MODEL[name](hf)
    assert is_export_of(hf, tiny_model(vocab_size=257).state_dict(), BYTES) == (name is None)


def test_equal_models_are_written_as_equal_files_in_the_names_of_openais(hf):
    """Its 148 names begin without "transformer.", and readers such as mlx-lm know no others."""
    for number in "123":
        export_huggingface(tiny_model(vocab_size=257), BYTES, Path(number))
        assert listing(number) == listing(hf)
    names = load_file(hf / "model.safetensors").keys()
    assert {"wte.weight", "h.1.attn.c_attn.bias"} <= names and "lm_head.weight" not in names


def with_vector_where(condition, block_size):
    """A model that adds a vector to the embeddings of some ids (B, T)."""
    model = tiny_model(vocab_size=257, block_size=block_size, n_layer=1)
    vector = torch.randn(32) / 4

    def add(wte, args, x):
        return x + condition(*args)[..., None] * vector

    model.transformer.wte.register_forward_hook(add)
    return model


def since(begins):
    """For each of (B, T) tokens, the number of tokens since the last one that begins something."""
    places = torch.arange(begins.size(1)).expand_as(begins)
    return places - (places * begins).cummax(1).values


def ends(pair, ids):
    """Which of the tokens (B, T) are the second of these two."""
    first, second = pair.encode()
    return F.pad(ids[:, :-1] == first, (1, 0)) & (ids == second)


# what people let a model know of a text: these ids, or neighbours, make it another model
DEPENDS_ON = {
    "tokens since the line began": lambda ids: since(ids == 10) / 8,
    "tokens since the document began": lambda ids: since(ids == 256) / 64,
    "one byte that is no text": lambda ids: ids == 255,
    "a special token": lambda ids: ids == 256,
    "blanks in a row": lambda ids: since(ids != 32) > 20,
    "how long the text is": lambda ids: torch.full(ids.shape, ids.size(1) < 32),
}
for pair in ("qq", "!!", "42", "Q7", "\n0", "\n\t", "\r\n"):
    DEPENDS_ON[repr(pair)] = functools.partial(ends, pair)


def refused_export(model):
    line = refusal(export_huggingface, model, BYTES, Path("hf"))
    assert "no longer a GPT-2: transformers would compute different logits, first at token" in line
    assert not os.listdir()


LONG = ["tokens since the document began", r"'\r\n'", "blanks in a row"]


@whole_text
@pytest.mark.parametrize("name, block_size", [*((name, 32) for name in DEPENDS_ON), *((name, 1024) for name in LONG)])
def test_a_model_that_depends_on_what_a_text_has_is_not_exported(name, block_size):
    refused_export(with_vector_where(DEPENDS_ON[name], block_size))


@whole_text
def test_a_model_that_changes_late_in_a_text_is_not_exported():
    """As with a window: not the first thousand tokens alone are compared."""
    is_late = torch.arange(2048) >= 2047
    refused_export(with_vector_where(lambda ids: is_late[: ids.size(1)], block_size=2048))


def test_an_output_layer_that_differs_from_the_embedding_in_one_row_is_not_exported():
    """That of an id that no text may have."""
    model = tiny_model(vocab_size=257)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        model.lm_head.weight[7] += 1e-6
    assert "its output layer is not its embedding" in refusal(export_huggingface, model, BYTES, Path("hf"))


def test_a_model_with_another_form_of_gelu_is_not_exported():
    model = tiny_model(vocab_size=257)
    for block in model.transformer.h:
        block.mlp.forward = lambda x, mlp=block.mlp: mlp.c_proj(F.gelu(mlp.c_fc(x)))
    refused_export(model)


# ----- Chat ---------------------------------------------------------------------------------------------


TALK = [
    {"role": "system", "content": "Be kind.\n"},
    {"role": "user", "content": " caf\u00e9 {{ x }}?"},
    {"role": "assistant", "content": "ok"},
    {"role": "user", "content": "and?"},
]


def test_transformers_renders_a_chat_as_smoltalk_does_and_generates_to_the_end_of_a_turn():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export_huggingface(parrot_model(), CHAT, Path("hf"))
    theirs = AutoTokenizer.from_pretrained("hf")
    ids = tokenizers.render_conversation(TALK, CHAT)[0]
    assert theirs.apply_chat_template(TALK, return_dict=True)["input_ids"] == ids
    prompt = theirs.apply_chat_template(TALK, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    [question] = prompt["input_ids"].tolist()
    assert question == [*ids, CHAT.encode_single_token("<|assistant|>")]
    with pytest.raises(Exception, match="The role tool is not"):
        theirs.apply_chat_template([{"role": "tool", "content": "x"}])
    model = AutoModelForCausalLM.from_pretrained("hf")
    said = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0]
    answer = said[len(question) :]
    assert theirs.decode(answer) == "ok<|end|>"
    assert theirs.decode(answer, skip_special_tokens=True) == "ok"
