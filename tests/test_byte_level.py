"""Byte-level BPE in Hugging Face format, of several makers: read, compared and kept. What is none is one line."""

import os
from pathlib import Path

import huggingface_hub
import pytest
import sample
import train_gpt2
from plumbing.cli.console import UserError
from plumbing.data import tokenizers
from plumbing.run.huggingface import export_huggingface
from plumbing.run.models import load_saved_model
from tokenizers import (
    ByteLevelBPETokenizer,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, RobertaTokenizerFast

from corpora import GPT4, corpus, make_here, odd_texts, write
from harness import losses, refusal_of, status_of, talk, tiny_flags, tiny_model

BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
SPLIT = pre_tokenizers.Split(Regex(GPT4), "isolated")
AFTER_SPLIT = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def in_a_class(pre_tokenizer, special, *, trainer=trainers.BpeTrainer, model=models.BPE, normalizer=None, **settings):
    """Save a tokenizer of the package tokenizers in transformers' own class. The last special token ends a text."""
    made = Tokenizer(model())
    made.pre_tokenizer = pre_tokenizer
    made.decoder = decoders.ByteLevel()
    if normalizer:
        made.normalizer = normalizer
    options = dict(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=special, show_progress=False)
    made.train_from_iterator(corpus()[::4], trainer(vocab_size=600, **options))
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token=special[-1], **settings).save_pretrained(".")


def in_its_own_class(save):
    made = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    made.train_from_iterator(corpus()[::4], vocab_size=600, special_tokens=special, show_progress=False)
    save(made)
    write("config.json", '{"model_type": "gpt2", "vocab_size": 600}')


def in_robertas_class():
    in_its_own_class(lambda made: made.save_model("."))
    theirs = RobertaTokenizerFast.from_pretrained(".")
    for name in os.listdir():
        os.remove(name)
    theirs.save_pretrained(".")


# each saves one in the current folder
MAKERS = {
    "vocab.json": lambda: in_its_own_class(lambda made: made.save_model(".")),
    "tokenizer.json": lambda: in_its_own_class(lambda made: made.save("tokenizer.json")),
    "RoBERTa's": in_robertas_class,
    "GPT-2's pattern": lambda: in_a_class(BYTE_LEVEL, ["<|endoftext|>"]),
    "another pattern": lambda: in_a_class(pre_tokenizers.Sequence([SPLIT, AFTER_SPLIT]), ["<pad>", "</s>"]),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_a_byte_level_bpe_gives_its_makers_ids(maker):
    MAKERS[maker]()
    enc = tokenizers.get_encoding(".")
    saved = tokenizers.loads(tokenizers.dumps(enc))
    theirs = AutoTokenizer.from_pretrained(".")
    for text in [*odd_texts(200), *corpus()[:5]]:
        ids = enc.encode_ordinary(text)
        assert ids == theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert enc.decode(ids) == text
        assert saved.encode_ordinary(text) == ids
    assert enc.n_vocab == 600
    assert enc.eot_token == theirs.convert_tokens_to_ids("<|endoftext|>" if maker == "GPT-2's pattern" else "</s>")


NOT_BYTE_LEVEL = {
    '"add_prefix_space": true': (pre_tokenizers.ByteLevel(add_prefix_space=True), dict(add_prefix_space=True)),
    "Digits": (pre_tokenizers.Sequence([pre_tokenizers.Digits(), BYTE_LEVEL]), {}),
    "Metaspace": (pre_tokenizers.Metaspace(), {}),  # as sentencepiece's
    "NFKC": (BYTE_LEVEL, dict(normalizer=normalizers.NFKC())),
    "it is a WordPiece": (BYTE_LEVEL, dict(model=models.WordPiece, trainer=trainers.WordPieceTrainer)),
    "it is a Unigram": (BYTE_LEVEL, dict(model=models.Unigram, trainer=trainers.UnigramTrainer)),
}


@pytest.mark.parametrize("words", NOT_BYTE_LEVEL)
def test_what_is_no_byte_level_bpe_is_refused_by_its_name(words):
    pre_tokenizer, options = NOT_BYTE_LEVEL[words]
    in_a_class(pre_tokenizer, ["</s>"], **options)
    with pytest.raises(UserError, match=words):
        tokenizers.get_encoding(".")


def test_a_token_that_splits_texts_unasked_is_refused():
    """It is no special one, so the original finds it in the middle of a word."""
    MAKERS["GPT-2's pattern"]()
    theirs = AutoTokenizer.from_pretrained(".")
    theirs.add_tokens("caf")
    theirs.save_pretrained(".")
    with pytest.raises(UserError, match="gives other ids for 'caf'"):
        tokenizers.get_encoding(".")


@pytest.fixture
def german(monkeypatch):
    """The files of a tokenizer of its own, beside transformers' GPT-2 in the folder `german`."""
    Path("german").mkdir()
    monkeypatch.chdir("german")
    MAKERS["vocab.json"]()
    files = {name: Path(name).read_bytes() for name in ("vocab.json", "merges.txt")}
    config = GPT2Config(vocab_size=600, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(".")
    monkeypatch.chdir("..")
    return files


@pytest.mark.gpt2
def test_a_fine_tuned_model_keeps_its_tokenizer(german, output):
    write("a.txt", "\n".join(corpus()[:5]))
    data = make_here("a.txt", name="data", tokenizer="german")
    words = tiny_flags(data, "out", init_from="german", max_steps=2, block_size=64)
    place = words.index("--max-lr")
    del words[place : place + 2]
    assert "3e-5" not in refusal_of(train_gpt2.main, *words, "--preset", "gpt2", "--dry-run")[1]
    status, said, _ = refusal_of(train_gpt2.main, *words)
    assert status == 0
    assert "3e-5 is usual" in said
    assert losses("out", "val")[0] < 6.5  # ln 600 = 6.4
    for name, content in german.items():
        assert Path("out/hf", name).read_bytes() == content
    os.rename(data, "gone")
    output()
    assert status_of(sample.main, ["Stra\u00dfe", "-m", "out", "--max-new-tokens", "3"]) == 0
    assert output().startswith("Stra\u00dfe")


@pytest.mark.gpt2
def test_a_name_on_the_hub_is_a_model_with_its_tokenizer(german, monkeypatch):
    """Unless there is a folder here that it may lie in."""
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **options: {"OWNER/german": "german"}[name]
    )
    assert load_saved_model("OWNER/german").enc.name == tokenizers.get_encoding("OWNER/german").name
    with pytest.raises(UserError, match="Could not download OWNER/nothing"):
        load_saved_model("OWNER/nothing")
    Path("OWNER").mkdir()
    with pytest.raises(UserError, match="There is no OWNER/german"):
        load_saved_model("OWNER/german")


@pytest.mark.gpt2
def test_a_chat_model_keeps_its_tokenizer_and_adds_the_markers():
    MAKERS["another pattern"]()
    enc = tokenizers.with_chat(tokenizers.get_encoding("."))
    export_huggingface(tiny_model(vocab_size=640), enc, Path("hf"))
    theirs = AutoTokenizer.from_pretrained("hf")
    ids = tokenizers.render_conversation(talk("Hi ", "caf\u00e9"), enc)[0]
    assert theirs.apply_chat_template(talk("Hi ", "caf\u00e9"), return_dict=True)["input_ids"] == ids
    assert ids[0] == theirs.eos_token_id
