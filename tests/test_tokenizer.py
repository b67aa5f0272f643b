"""tokenizer.py: every tokenizer is a tiktoken.Encoding, loses nothing, and agrees with whoever else reads it."""

import json
from pathlib import Path

import pytest
import tiktoken
import tokenizer
from plumbing.cli.console import UserError
from plumbing.data import tokenizers
from plumbing.data.windows import Folder
from plumbing.run.huggingface import tokenizer_files
from tiktoken.load import load_tiktoken_bpe

from corpora import TABLES, corpus, odd_texts, read_meta, renamed_by, train_small, write, write_rows
from harness import listing, printed_commands, refused

BYTES = tokenizers.get_encoding("bytes")


def test_bytes_are_the_bytes_of_utf8():
    """They need no network."""
    assert isinstance(BYTES, tiktoken.Encoding)
    assert (BYTES.name, BYTES.n_vocab) == ("bytes", 257)
    for text in [*odd_texts(100), "x" * 10_000, "<|endoftext|>"]:
        assert BYTES.encode_ordinary(text) == list(text.encode())
        assert BYTES.decode(list(text.encode())) == text
    assert BYTES.encode("a<|endoftext|>", allowed_special="all") == [97, 256]


def test_chat_markers_take_the_ids_after_the_tokenizers_own():
    trained = train_small("gpt4")
    chat = tokenizers.with_chat(trained)
    assert chat.name == trained.name + "+chat"
    assert chat.eot_token == trained.eot_token
    markers = "".join(tokenizers.CHAT_TOKENS)
    assert chat.encode(markers, allowed_special="all") == [1000, 1001, 1002, 1003]
    assert chat.encode_ordinary(markers) == trained.encode_ordinary(markers)  # typed by a user, it is text


def test_the_first_merges_are_those_that_can_be_counted_by_hand():
    # the textbook example of byte-pair encoding: "aaabdaaabac" -> aa, then ab, then aaab
    enc = tokenizer.train(["aaabdaaabac"], 260, name="t")
    tokens = sorted(enc._mergeable_ranks, key=enc._mergeable_ranks.get)[256:]
    assert tokens == [b"aa", b"ab", b"aaab"]
    assert enc.n_vocab == 260
    assert enc.decode_tokens_bytes(enc.encode_ordinary("aaabdaaabac")) == [b"aaab", b"d", b"aaab", b"a", b"c"]


def test_the_name_tells_tokenizers_apart():
    one, again, other = (tokenizer.train([text], 300, name="n").name for text in ("aaab", "aaab", "bbbc"))
    assert one == again != other
    assert one.startswith("n-")


@pytest.mark.parametrize("pattern", ["gpt2", "gpt4"])
def test_a_trained_tokenizer_loses_nothing_and_is_the_same_in_a_file_or_a_checkpoint(pattern):
    trained = train_small(pattern)
    tokenizers.write_encoding(trained, "x.tiktoken")
    saved = [tokenizers.get_encoding("x.tiktoken"), tokenizers.loads(tokenizers.dumps(trained))]
    for enc in saved:
        assert enc.name == trained.name
        assert enc._special_tokens == {"<|endoftext|>": 998, "<|pad|>": 999}
    sizes = tokenizers.token_bytes(trained)
    assert sizes[998:].tolist() == [0, 0]  # the special tokens
    for text in odd_texts(200) + corpus()[:5]:
        ids = trained.encode_ordinary(text)
        assert [enc.encode_ordinary(text) for enc in saved] == [ids, ids]
        assert trained.decode(ids) == text
        assert sizes[ids].sum() == len(text.encode())


def test_tiktoken_reads_the_file(monkeypatch):
    trained = train_small("gpt4")
    tokenizers.write_encoding(trained, "x.tiktoken")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")  # tiktoken caches local files as well
    monkeypatch.setattr("tiktoken.load.read_file", lambda path: Path(path).read_bytes())  # older ones need blobfile
    assert load_tiktoken_bpe("x.tiktoken") == trained._mergeable_ranks


@pytest.mark.parametrize("name", ["tokenizer.tiktoken", "x.tiktoken"])
def test_a_file_is_not_replaced_by_another_tokenizers(name):
    """A user's own tokenizer in the folder of the shards was, and one that appeared while another was learned."""
    tokenizers.write_encoding(BYTES, "tokenizer.tiktoken")
    Path("x.tiktoken.json").write_bytes(b"\xffmine")
    before = listing(".")
    with pytest.raises(UserError, match=f"{name}.* exists already, with other contents"):
        tokenizers.write_encoding(train_small("gpt4"), name)
    assert listing(".") == before


@pytest.fixture
def gpt2(monkeypatch):
    """A tokenizer that this process takes for GPT-2's."""
    trained = train_small("gpt4")
    enc = tokenizers.copy_encoding(trained, "gpt2", trained._special_tokens)
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: enc)
    return enc


@pytest.mark.parametrize("name", ["small", "small+chat", "bytes", "gpt2"])
def test_a_folder_of_shards_opens_with_its_own_tokenizer(name, gpt2, monkeypatch):
    """GPT-2's, too: a node without a network and without tiktoken's cache has its tables from the shards."""
    trained = train_small("gpt4")
    encs = {"small": trained, "small+chat": tokenizers.with_chat(trained), "gpt2": gpt2}
    enc = encs.get(name) or tokenizers.get_encoding(name)
    write("meta.json", json.dumps({"tokenizer": enc.name}))
    tokenizers.save_for_folder(enc, ".")
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: pytest.fail("it asked for the network"))
    assert tokenizers.dumps(Folder(".").enc) == tokenizers.dumps(enc)
    assert sorted(listing(".")) == ["meta.json", *TABLES]


def test_shards_that_do_not_name_a_tokenizer_have_gpt2s(gpt2):
    assert Folder(".").enc is gpt2


def test_a_folder_with_the_files_of_another_tokenizer_is_refused():
    tokenizers.save_for_folder(train_small("gpt4"), ".")
    with pytest.raises(UserError, match="holds tokenizer small-gpt4, but the meta.json beside it names bytes"):
        tokenizers.folder_encoding(".", "bytes")


# what its .json cannot be, or cannot have
BAD_HEADERS = [
    "3",
    "{",
    "\u00e9",
    {"name": "x\x1b[31m"},  # a terminal obeys it
    {"special_tokens": {"<|endoftext|>": "256"}},
    {"special_tokens": {"<|end|>": 256}},
    {"pat_str": "a"},  # it loses text without a word
    {"pat_str": "("},
    {"sha256": "0"},
]


@pytest.mark.parametrize("header", BAD_HEADERS)
def test_a_tokenizer_with_a_bad_header_is_refused(header):
    tokenizers.write_encoding(BYTES, "x.tiktoken")
    if isinstance(header, dict):
        header = json.dumps(read_meta(".", "x.tiktoken.json") | header)
    write("x.tiktoken.json", header)
    with pytest.raises(UserError, match="Tokenizer x.tiktoken is missing or damaged: ") as caught:
        tokenizers.get_encoding("x.tiktoken")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "line, other",
    [
        ("IQ== 33\n", "I 33\n"),  # no base64
        ("IQ== 33\n", "IWE= 33\n"),  # a byte is missing
        ("eg== 122\n", "eg== 123\n"),  # an id twice
    ],
)
def test_a_damaged_tokenizer_in_a_checkpoint_is_an_error(line, other):
    text = tokenizers.dumps(BYTES)
    assert line in text
    with pytest.raises(ValueError):
        tokenizers.loads(text.replace(line, other))


@pytest.mark.parametrize("name", ["bytes+chat", "gpt2", "gpt4"])
def test_transformers_reads_an_export(name):
    from transformers import AutoTokenizer

    enc = tokenizers.get_encoding(name) if "+" in name else train_small(name)
    for file, content in tokenizer_files(enc).items():
        Path(file).write_bytes(content)
    write("config.json", '{"model_type": "gpt2"}')  # as beside an exported model
    theirs = AutoTokenizer.from_pretrained(".")
    for text in odd_texts(200) + corpus()[:5]:
        plain = text.replace("<|", "< |")
        assert enc.encode_ordinary(plain) == theirs.encode(plain)
        assert theirs.decode(theirs.encode(text)) == text
    assert enc.n_vocab == len(theirs)
    assert enc.eot_token == theirs.eos_token_id == theirs.bos_token_id
    specials = "".join(enc._special_tokens)
    assert theirs.encode(specials) == list(enc._special_tokens.values())


def test_a_special_token_that_is_a_word_too_is_not_exported_as_one():
    enc = tokenizer.train(["aaabdaaabac"], 260)
    enc = tokenizers.copy_encoding(enc, enc.name, enc._special_tokens | {"aaab": 260})
    with pytest.raises(UserError, match="its special token 'aaab' is also an ordinary token"):
        tokenizer_files(enc)


TRAIN = "--input=-a.txt --out x.tiktoken --vocab-size 500".split()


def test_the_command_trains_a_tokenizer(output):
    """And again with the same bytes after a kill between its two files."""
    write("-a.txt", "".join(corpus()[:-200]))
    assert renamed_by(tokenizer.main, TRAIN)[-1] == "x.tiktoken"
    enc = tokenizers.get_encoding("x.tiktoken")
    assert enc.name.startswith("x-")
    assert enc._special_tokens == {"<|endoftext|>": 499}
    [words] = printed_commands(output())
    assert words[2:] == ["--input", "./-a.txt", "--tokenizer", "x.tiktoken"]
    before = listing(".")
    Path("x.tiktoken").unlink()
    tokenizer.main(TRAIN)
    assert listing(".") == before


def test_the_command_says_how_many_ids_there_are_where_the_text_has_too_few_pairs(output):
    """256 bytes, one pair and <|endoftext|>."""
    write("-a.txt", "ab")
    tokenizer.main(TRAIN)
    assert ", 258 ids\n" in output()


def test_the_command_that_comes_next_reads_the_same_column(output):
    write_rows("a.jsonl", [{"body": "half a pair \ud83d", "head": "A"}, {"text": "not this"}] * 5)
    words = ["--text-column", "head,body"]
    tokenizer.main(["--input=a.jsonl", *TRAIN[1:], *words])
    said = output()
    assert printed_commands(said)[0][-2:] == words
    assert "note: 5 rows left out. Line 2 of a.jsonl has no text under 'head,body'." in said


# {arguments: words that the line must have}
BAD_INPUTS = {
    "--input a.txt --out new.tiktoken --vocab-size 256": "must be from 257",
    "--input a.txt --out new.tiktoken --vocab-size 65537": "to 65536",
    "--input none.txt --out new.tiktoken": "To read from the Hub, use --dataset",
    "--input empty.txt --out new.tiktoken": "There is no text in",
    "": "--input is missing. Give the files to learn from. --out is missing",
    "--input a.txt --out old.tiktoken": "exists already",
    "--input a.txt --out \x1b.tiktoken": "an existing, writable folder",
    "--input a.txt --out none/new.tiktoken": "an existing, writable folder",
}


@pytest.mark.parametrize("words", BAD_INPUTS)
def test_bad_input_is_refused_in_one_line(words):
    files = {"a.txt": "text", "empty.txt": "", "old.tiktoken": "mine", "x.tiktoken.json": "mine"}
    for name, content in files.items():
        write(name, content)
    before = listing(".")
    assert BAD_INPUTS[words] in refused(tokenizer.main, *words.split())
    assert listing(".") == before
