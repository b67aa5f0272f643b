"""plumbing/huggingface.py: what is read is what the model computes, and what is written is read by others as it is."""

import json
import os
import shutil

import pytest
import tiktoken
import tokenizer
import torch
from plumbing.checkpoint import load_model_state
from plumbing.huggingface import export_huggingface, is_export_of, load_huggingface, load_tokenizer
from plumbing.program import UserError
from safetensors.torch import load_file, save_file
from train_gpt2 import GPT

from harness import listing, parrot_model, tiny_model

BYTES = tokenizer.get_encoding("bytes")
CHAT = tokenizer.get_encoding("bytes+chat")


@pytest.fixture
def hf(tmp_path):
    """A folder with a model of 2 layers over bytes."""
    export_huggingface(tiny_model(vocab_size=257), BYTES, tmp_path / "hf")
    return tmp_path / "hf"


def change_config(hf, **changes):
    fields = json.loads((hf / "config.json").read_text(encoding="utf-8")) | changes
    (hf / "config.json").write_text(json.dumps(fields), encoding="utf-8")


def refusal(function, *args):
    """The one line with which `function` refuses its input."""
    with pytest.raises(UserError) as caught:
        function(*args)
    line = str(caught.value)
    assert "\n" not in line and len(line) < 500
    return line


# ----- Import -------------------------------------------------------------------------------------------


VARIANTS = [
    dict(layer_norm_epsilon=1e-6),
    dict(scale_attn_weights=False),
    dict(scale_attn_by_inverse_layer_idx=True),
    dict(activation_function="relu"),
    dict(add_cross_attention=True),
    dict(tie_word_embeddings=False),
    dict(model_type="llama"),
    dict(n_head=3),  # does not divide n_embd
    dict(n_head=[2]),
]


@pytest.mark.parametrize("change", VARIANTS, ids=lambda change: next(iter(change)))
def test_a_variant_that_the_model_does_not_compute_is_refused(hf, change):
    change_config(hf, **change)
    assert next(iter(change)) in refusal(load_huggingface, hf)


def test_sizes_come_from_the_weights_and_what_makes_no_difference_is_read(hf):
    expected = load_huggingface(hf)
    assert expected[0] == dict(block_size=32, vocab_size=257, n_layer=2, n_head=2, n_embd=32)
    change_config(hf, reorder_and_upcast_attn=True, activation_function="gelu_pytorch_tanh", resid_pdrop=0.1)
    change_config(hf, vocab_size=2**40, n_positions=2**60, n_embd=None)
    shape, weights = load_huggingface(hf)
    assert shape == expected[0] and all(torch.equal(weights[name], expected[1][name]) for name in weights)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"[" * 10**6, b"\xff\xfe", b'{"n_layer": %s}' % (b"9" * 5000)])
def test_a_config_that_is_none_is_refused(hf, content):
    (hf / "config.json").write_bytes(content)
    assert "config.json" in refusal(load_huggingface, hf)


def rewrite(hf, change):
    weights = load_file(hf / "model.safetensors")
    change(weights)
    contiguous = {name: weight.contiguous() for name, weight in weights.items()}
    save_file(contiguous, hf / "model.safetensors", {"format": "pt"})


NAME = "transformer.h.1.mlp.c_fc.weight"
BAD_WEIGHTS = {
    "a tensor is missing": (lambda w: w.pop(NAME), NAME),
    "a tensor too many": (lambda w: w.update({"score.weight": torch.ones(2, 32)}), "score.weight"),
    "another shape": (lambda w: w.update({NAME: w[NAME][:, 1:]}), NAME),
    "an untied head": (lambda w: w.update({"lm_head.weight": w["transformer.wte.weight"] + 1}), "lm_head.weight"),
    "not a number": (lambda w: w["transformer.wte.weight"].fill_(torch.nan), "not finite"),
    "an infinity": (lambda w: w[NAME].view(-1)[0].fill_(torch.inf), "not finite"),
    "no tensors": (lambda w: w.clear(), "no embeddings"),
    "positions that are a number": (
        lambda w: w.update({"transformer.wpe.weight": torch.tensor(1.0)}),
        "no embeddings",
    ),
    "no blocks": (lambda w: [w.pop(name) for name in list(w) if ".h." in name], "no blocks"),
    "a part is missing": (lambda w: [w.pop(name) for name in list(w) if ".h.0." in name], "transformer.h.0."),
}


@pytest.mark.parametrize("name", BAD_WEIGHTS)
def test_weights_that_are_not_those_of_a_gpt2_are_refused(hf, name):
    change, reason = BAD_WEIGHTS[name]
    rewrite(hf, change)
    assert reason in refusal(GPT.from_pretrained, hf)


@pytest.mark.parametrize("length", [0, 5, 100, 5000])
def test_a_truncated_file_is_refused(hf, length):
    path = hf / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    assert "Could not read the weights" in refusal(load_huggingface, hf)


def test_pickles_and_pipes_are_not_read(hf):
    (hf / "model.safetensors").rename(hf / "pytorch_model.bin")
    os.mkfifo(hf / "model-00001-of-00001.safetensors")
    assert "no model.safetensors, and pickles such as *.bin are not read" in refusal(load_huggingface, hf)


def test_openais_names_parts_and_half_precision_are_read(hf):
    _, expected = load_huggingface(hf)
    weights = load_file(hf / "model.safetensors")
    # OpenAI's file has no "transformer." and holds the causal masks
    plain = {name.removeprefix("transformer."): weight.bfloat16() for name, weight in weights.items()}
    plain["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
    plain["lm_head.weight"] = plain["wte.weight"].clone()
    names = sorted(plain)
    (hf / "model.safetensors").unlink()
    for part in range(2):
        save_file({name: plain[name] for name in names[part::2]}, hf / f"model-0000{part + 1}-of-00002.safetensors")
    _, found = load_huggingface(hf)
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        assert weight.dtype == torch.float32 and torch.equal(weight, expected[name].bfloat16().float()), name


def save_parts(hf, weights, *names):
    for number, name in enumerate(names):
        save_file({key: weights[key] for key in sorted(weights)[number :: len(names)]}, hf / name)


def test_other_weights_beside_the_right_ones_are_not_read(hf):
    _, expected = load_huggingface(hf)
    weights = load_file(hf / "model.safetensors")
    wrong = {name: weight + 1 for name, weight in weights.items()}
    others = ("model-old.safetensors", "model.bf16.safetensors", "model_best.safetensors", "model-1-of-2.safetensors")
    for name in others:
        save_file(wrong, hf / name)
    save_parts(hf, wrong, "model-00001-of-00001.safetensors")  # a numbering gives way to model.safetensors
    assert all(torch.equal(weight, expected[name]) for name, weight in load_huggingface(hf)[1].items())
    (hf / "model.safetensors").unlink()
    (hf / "model-00001-of-00001.safetensors").unlink()
    assert "has no model.safetensors" in refusal(load_huggingface, hf)
    save_parts(hf, weights, *(f"model-0000{part}-of-00003.safetensors" for part in (1, 2, 3)))
    assert all(torch.equal(weight, expected[name]) for name, weight in load_huggingface(hf)[1].items())


@pytest.mark.parametrize(
    "numbers, reason",
    [
        (["1-of-00003", "3-of-00003"], "lacks model-00002-of-00003.safetensors. Copy"),
        (["1-of-00005", "2-of-00005", "3-of-00005"], "lacks model-00004-of-00005.safetensors, model-00005-of-00005"),
        (
            ["1-of-00001", "1-of-00002", "2-of-00002"],
            "has the parts of several models",
        ),
    ],
)
def test_parts_that_are_not_one_whole_model_are_refused(hf, numbers, reason):
    weights = load_file(hf / "model.safetensors")
    (hf / "model.safetensors").unlink()
    save_parts(hf, weights, *(f"model-0000{number}.safetensors" for number in numbers))
    assert reason in refusal(load_huggingface, hf)


def test_weights_that_can_be_read_in_two_ways_are_refused(hf):
    rewrite(hf, lambda w: w.update({"h.1.mlp.c_fc.weight": w[NAME] + 1}))
    assert f"{NAME} is there twice" in refusal(load_huggingface, hf)
    rewrite(hf, lambda w: (w.pop("h.1.mlp.c_fc.weight"), w.update({NAME: w[NAME].to(torch.int8)})))
    assert f"{NAME} is of torch.int8" in refusal(load_huggingface, hf)
    weights = load_file(hf / "model.safetensors")
    weights[NAME] = weights[NAME].float()
    (hf / "model.safetensors").unlink()
    save_parts(hf, weights, "model-00001-of-00002.safetensors")
    save_parts(hf, weights, "model-00002-of-00002.safetensors")
    assert "is there twice" in refusal(load_huggingface, hf)


# ----- A folder's tokenizer -----------------------------------------------------------------------------


def test_a_folder_is_read_with_its_own_tokenizer(hf):
    assert load_tokenizer(hf, 257).name == "bytes"
    (hf / "tokenizer.tiktoken").unlink()
    enc = load_tokenizer(hf, 257)  # made of tokenizer.json
    assert enc.name.startswith("hf-") and enc.n_vocab == 257 and enc.encode_ordinary("ab") == [97, 98]
    (hf / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in refusal(load_tokenizer, hf, 257)
    (hf / "tokenizer.json").write_text("{", encoding="utf-8")
    assert "is damaged or not supported" in refusal(load_tokenizer, hf, 257)


def give_tokenizer(hf, enc):
    for path in hf.glob("tokenizer.tiktoken*"):
        path.unlink()
    tokenizer.write_encoding(enc, hf / "tokenizer.tiktoken")


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(hf):
    give_tokenizer(hf, CHAT)
    assert "room for 257 token ids, but tokenizer" in refusal(load_model_state, hf)


def test_openais_models_have_gpt2s_tokenizer(hf, monkeypatch):
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: BYTES)
    for path in hf.glob("tokenizer*"):
        path.unlink()
    for name, vocab_size in (("gpt2-medium", 50257), (hf, 50257), (hf, 50304)):
        assert load_tokenizer(name, vocab_size) is BYTES


# ----- Export -------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.name == "nt", reason="Windows has no umask")
def test_the_files_have_the_permissions_that_the_umask_gives(tmp_path):
    before = os.umask(0o027)
    try:
        export_huggingface(tiny_model(), BYTES, tmp_path / "hf")
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "hf").iterdir()}
    assert modes == dict.fromkeys(modes, "0o640")


def test_what_stands_in_the_place_of_an_export_is_moved_aside_and_nothing_is_deleted(hf, tmp_path):
    (hf / "thesis.tex").write_text("precious", encoding="utf-8")
    (tmp_path / "hf.1").symlink_to(tmp_path / "nowhere")
    (tmp_path / "hf.part").mkdir()
    (tmp_path / "hf.part" / "config.json").write_text("precious", encoding="utf-8")
    (tmp_path / ".hf.part").mkdir()
    (tmp_path / ".hf.part" / "thesis.tex").write_text("precious", encoding="utf-8")
    before = listing(hf)
    export_huggingface(tiny_model(seed=1, vocab_size=257), BYTES, hf)
    assert listing(tmp_path / "hf.2") == before and (tmp_path / ".hf.part.1" / "thesis.tex").exists()
    assert sorted(os.listdir(tmp_path)) == [".hf.part.1", "hf", "hf.1", "hf.2", "hf.part"]
    assert os.listdir(tmp_path / "hf.part") == ["config.json"]
    for place, make in (("file", lambda path: path.write_bytes(b"mine")), ("link", lambda path: path.symlink_to(hf))):
        make(tmp_path / place)
        export_huggingface(tiny_model(), BYTES, tmp_path / place)
        assert (tmp_path / place / "model.safetensors").exists() and not (tmp_path / place).is_symlink()
    assert (tmp_path / "file.1").read_bytes() == b"mine" and (tmp_path / "link.1").is_symlink()


def test_what_a_killed_export_left_is_cleared_away(hf, tmp_path):
    hf.rename(tmp_path / ".hf.part")
    export_huggingface(tiny_model(), BYTES, hf)
    assert os.listdir(tmp_path) == ["hf"]


def test_a_pipe_or_a_link_where_an_export_is_written_blocks_nothing_and_its_target_stays(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("precious", encoding="utf-8")
    part = tmp_path / ".hf.part"
    os.mkfifo(part)
    export_huggingface(tiny_model(), BYTES, tmp_path / "hf")
    part.mkdir()
    os.mkfifo(part / "config.json")
    export_huggingface(tiny_model(), BYTES, tmp_path / "hf")
    part.symlink_to(tmp_path / "mine")
    export_huggingface(tiny_model(), BYTES, tmp_path / "hf")
    assert sorted(os.listdir(tmp_path)) == [".hf.part.1", ".hf.part.2", "hf", "hf.1", "hf.2", "mine"]
    assert (tmp_path / "mine" / "config.json").read_text(encoding="utf-8") == "precious"


NOT_THIS_MODEL = {
    "a stale one": lambda hf: rewrite(hf, lambda w: w[NAME].add_(1e-3)),
    "of another number format": lambda hf: rewrite(hf, lambda w: w.update({NAME: w[NAME].bfloat16()})),
    "of another shape": lambda hf: rewrite(hf, lambda w: w.update({NAME: w[NAME].T})),
    "a weight too many": lambda hf: rewrite(hf, lambda w: w.update(more=torch.ones(1))),
    "a weight too few": lambda hf: rewrite(hf, lambda w: w.pop(NAME)),
    "of other sizes": lambda hf: change_config(hf, n_head=4),
    "that reads less": lambda hf: change_config(hf, n_positions=7),
    "without an end": lambda hf: (hf / "generation_config.json").write_text("{}", encoding="utf-8"),
    "a part without its index": lambda hf: (hf / "model.safetensors").rename(hf / "model-00001-of-00001.safetensors"),
    "empty": lambda hf: [path.unlink() for path in hf.iterdir()],
    "missing": shutil.rmtree,
    "weights cut short": lambda hf: os.truncate(hf / "model.safetensors", 5000),
    "tokenizer cut short": lambda hf: os.truncate(hf / "tokenizer.json", 50),
    "another tokenizer": lambda hf: give_tokenizer(hf, other_tokenizer()),
    "mkfifo": lambda hf: ((hf / "tokenizer.json").unlink(), os.mkfifo(hf / "tokenizer.json")),  # it would block
}


def other_tokenizer():
    """Bytes with their ids in another order."""
    ranks = {bytes([255 - i]): i for i in range(256)}
    return tiktoken.Encoding(
        "bytes", pat_str=BYTES._pat_str, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 256}
    )


@pytest.mark.parametrize("name", [None, *NOT_THIS_MODEL])
def test_only_a_whole_export_of_the_same_weights_is_taken_for_the_model(hf, name):
    model = tiny_model(vocab_size=257)  # what the fixture has exported
    if name:
        NOT_THIS_MODEL[name](hf)
    assert is_export_of(hf, model.state_dict(), vars(model.config), BYTES) == (name is None)


# ----- Chat ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parrot(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parrot") / "hf"
    export_huggingface(parrot_model(), CHAT, folder)
    return folder


TALK = [
    {"role": "system", "content": "Be kind.\n"},
    {"role": "user", "content": " caf\u00e9 {{ x }}?"},
    {"role": "assistant", "content": "ok"},
    {"role": "user", "content": "and?"},
]


def test_the_chat_template_is_what_smoltalk_trains_on(parrot):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(parrot)
    ids = tokenizer.render_conversation(TALK, CHAT)[0]
    assert theirs.apply_chat_template(TALK)["input_ids"] == ids
    prompt = theirs.apply_chat_template(TALK, add_generation_prompt=True)["input_ids"]
    assert prompt == ids + [CHAT.encode_single_token("<|assistant|>")]
    with pytest.raises(Exception, match="The role tool is not"):
        theirs.apply_chat_template([{"role": "tool", "content": "x"}])


def test_generate_stops_at_the_end_of_a_turn(parrot):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs, model = AutoTokenizer.from_pretrained(parrot), AutoModelForCausalLM.from_pretrained(parrot)
    assert model.generation_config.eos_token_id == [256, CHAT.encode_single_token("<|end|>")]
    prompt = theirs.apply_chat_template(TALK, add_generation_prompt=True, return_tensors="pt")
    out = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert theirs.decode(out) == "ok<|end|>" and theirs.decode(out, skip_special_tokens=True) == "ok"


def test_a_model_that_does_not_chat_has_no_template_and_the_length_that_it_reads_is_known(hf):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(hf)
    assert theirs.chat_template is None and theirs.model_max_length == 32
    assert json.loads((hf / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"] == [256]
