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

from corpora import corpus, odd_texts, renamed_by, train_small, write, write_rows
from harness import listing, printed_commands, refused


@pytest.fixture
def bytes_enc():
    return tokenizers.get_encoding("bytes")


def test_bytes_are_the_bytes_of_utf8(bytes_enc):
    """They need no network."""
    assert isinstance(bytes_enc, tiktoken.Encoding)
    assert (bytes_enc.name, bytes_enc.n_vocab) == ("bytes", 257)
    for text in [*odd_texts(100), "x" * 10_000, "<|endoftext|>"]:
        assert bytes_enc.encode_ordinary(text) == list(text.encode())
        assert bytes_enc.decode(list(text.encode())) == text
    assert bytes_enc.encode("a<|endoftext|>", allowed_special="all") == [97, 256]


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
def test_a_tokenizer_that_was_saved_in_a_file_or_a_checkpoint_is_the_same(tmp_path, pattern):
    trained = train_small(pattern)
    tokenizers.write_encoding(trained, tmp_path / "x.tiktoken")
    for enc in (tokenizers.get_encoding(tmp_path / "x.tiktoken"), tokenizers.loads(tokenizers.dumps(trained))):
        assert enc.name == trained.name
        assert enc._special_tokens == {"<|endoftext|>": 998, "<|pad|>": 999}
        for text in odd_texts(200) + corpus()[:5]:
            assert enc.encode_ordinary(text) == trained.encode_ordinary(text)


@pytest.mark.parametrize("pattern", ["gpt2", "gpt4"])
def test_a_trained_tokenizer_loses_nothing(pattern):
    enc = train_small(pattern)
    sizes = tokenizers.token_bytes(enc)
    assert sizes.shape == (1000,)
    assert sizes[998:].tolist() == [0, 0]  # the special tokens
    for text in odd_texts(200) + corpus()[:5]:
        ids = enc.encode_ordinary(text)
        assert enc.decode(ids) == text
        assert sizes[ids].sum() == len(text.encode())


def test_tiktoken_reads_the_file(tmp_path, monkeypatch):
    trained = train_small("gpt4")
    tokenizers.write_encoding(trained, tmp_path / "x.tiktoken")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")  # tiktoken caches local files as well
    monkeypatch.setattr("tiktoken.load.read_file", lambda path: Path(path).read_bytes())  # older ones need blobfile
    assert load_tiktoken_bpe(str(tmp_path / "x.tiktoken")) == trained._mergeable_ranks


@pytest.mark.parametrize("name", ["tokenizer.tiktoken", "x.tiktoken"])
def test_a_file_is_not_replaced_by_another_tokenizers(tmp_path, bytes_enc, name):
    """A user's own tokenizer in the folder of the shards was, and one that appeared while another was learned."""
    tokenizers.write_encoding(bytes_enc, tmp_path / "tokenizer.tiktoken")
    (tmp_path / "x.tiktoken.json").write_bytes(b"\xffmine")
    before = listing(tmp_path)
    with pytest.raises(UserError, match=f"{name}.* exists already, with other contents"):
        tokenizers.write_encoding(train_small("gpt4"), tmp_path / name)
    assert listing(tmp_path) == before


@pytest.fixture
def gpt2(monkeypatch):
    """A tokenizer that this process takes for GPT-2's."""
    trained = train_small("gpt4")
    enc = tokenizers.copy_encoding(trained, "gpt2", trained._special_tokens)
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: enc)
    return enc


@pytest.mark.parametrize("name", ["small", "small+chat", "bytes", "gpt2"])
def test_a_folder_of_shards_opens_with_its_own_tokenizer(tmp_path, name, gpt2, monkeypatch):
    """GPT-2's, too: a node without a network and without tiktoken's cache has its tables from the shards."""
    trained = train_small("gpt4")
    encs = {"small": trained, "small+chat": tokenizers.with_chat(trained), "gpt2": gpt2}
    enc = encs.get(name) or tokenizers.get_encoding(name)
    write(tmp_path / "meta.json", json.dumps({"tokenizer": enc.name}))
    tokenizers.save_for_folder(enc, tmp_path)
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: pytest.fail("it asked for the network"))
    assert tokenizers.dumps(Folder(tmp_path).enc) == tokenizers.dumps(enc)
    assert sorted(listing(tmp_path)) == ["meta.json", "tokenizer.tiktoken", "tokenizer.tiktoken.json"]


def test_shards_that_do_not_name_a_tokenizer_have_gpt2s(tmp_path, gpt2):
    assert Folder(tmp_path).enc is gpt2


def test_a_folder_with_the_files_of_another_tokenizer_is_refused(tmp_path):
    tokenizers.save_for_folder(train_small("gpt4"), tmp_path)
    write(tmp_path / "meta.json", '{"tokenizer": "bytes"}')
    with pytest.raises(UserError, match="holds tokenizer small-gpt4, but the meta.json beside it names bytes"):
        tokenizers.folder_encoding(tmp_path, "bytes")


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
def test_a_tokenizer_with_a_bad_header_is_refused(tmp_path, bytes_enc, header):
    path = tmp_path / "x.tiktoken"
    tokenizers.write_encoding(bytes_enc, path)
    json_path = tmp_path / "x.tiktoken.json"
    if isinstance(header, dict):
        header = json.dumps(json.loads(json_path.read_text(encoding="ascii")) | header)
    write(json_path, header)
    with pytest.raises(UserError, match="Tokenizer .*x.tiktoken is missing or damaged: ") as caught:
        tokenizers.get_encoding(path)
    assert str(caught.value).isprintable()


def test_a_tokenizer_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UserError, match="x.tiktoken is missing or damaged: .*No such file"):
        tokenizers.get_encoding(tmp_path / "x.tiktoken")


@pytest.mark.parametrize(
    "line, other",
    [
        ("IQ== 33\n", "I 33\n"),  # no base64
        ("IQ== 33\n", "Ig== 33\n"),  # a byte twice, and another one missing
        ("IQ== 33\n", "IWE= 33\n"),  # a byte is missing
        ("IQ== 33\n", ""),
        ("eg== 122\n", "eg== 123\n"),  # an id twice
    ],
)
def test_a_damaged_tokenizer_in_a_checkpoint_is_an_error(bytes_enc, line, other):
    text = tokenizers.dumps(bytes_enc)
    assert line in text
    with pytest.raises(ValueError):
        tokenizers.loads(text.replace(line, other))


@pytest.mark.parametrize("name", ["bytes+chat", "gpt2", "gpt4"])
def test_transformers_reads_an_export(tmp_path, name):
    from transformers import AutoTokenizer

    enc = tokenizers.get_encoding(name) if "+" in name else train_small(name)
    for file, content in tokenizer_files(enc).items():
        (tmp_path / file).write_bytes(content)
    write(tmp_path / "config.json", '{"model_type": "gpt2"}')  # as beside an exported model
    theirs = AutoTokenizer.from_pretrained(tmp_path)
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


TRAIN = ["--input=-a.txt", "--out", "x.tiktoken", "--vocab-size", "500"]


@pytest.fixture
def text_here(tmp_path, monkeypatch):
    """The file -a.txt in the current folder."""
    monkeypatch.chdir(tmp_path)
    write("-a.txt", "".join(corpus()[:-200]))


def test_the_command_trains_a_tokenizer(text_here, capsys):
    tokenizer.main(TRAIN)
    enc = tokenizers.get_encoding("x.tiktoken")
    assert enc.name.startswith("x-")
    assert enc._special_tokens == {"<|endoftext|>": 499}
    [words] = printed_commands(capsys.readouterr().out)
    assert words[2:] == ["--input", "./-a.txt", "--tokenizer", "x.tiktoken"]


def test_the_command_says_how_many_ids_there_are_where_the_text_has_too_few_pairs(tmp_path, monkeypatch, capsys):
    """256 bytes, one pair and <|endoftext|>."""
    monkeypatch.chdir(tmp_path)
    write("a.txt", "ab")
    tokenizer.main(["--input", "a.txt", "--out", "x.tiktoken", "--vocab-size", "500"])
    assert ", 258 ids\n" in capsys.readouterr().out


def test_after_a_kill_between_its_two_files_the_same_command_ends_with_the_same_bytes(text_here):
    assert renamed_by(tokenizer.main, TRAIN)[-1] == "x.tiktoken"
    before = listing(".")
    Path("x.tiktoken").unlink()
    tokenizer.main(TRAIN)
    assert listing(".") == before


def test_the_command_that_comes_next_reads_the_same_column(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(Path("a.jsonl"), [{"body": "half a pair \ud83d", "head": "A"}, {"text": "not this"}] * 5)
    words = ["--text-column", "head,body"]
    tokenizer.main(["--input", "a.jsonl", "--out", "x.tiktoken", "--vocab-size", "260", *words])
    said = capsys.readouterr().out
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
def test_bad_input_is_refused_in_one_line(tmp_path, words, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = {"a.txt": "text", "empty.txt": "", "old.tiktoken": "mine", "x.tiktoken.json": "mine"}
    for name, content in files.items():
        write(name, content)
    before = listing(tmp_path)
    assert BAD_INPUTS[words] in refused(tokenizer.main, *words.split())
    assert listing(tmp_path) == before
