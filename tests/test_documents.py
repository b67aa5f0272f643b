"""Documents: every kind of file is read as a plain loop reads it, and a long text is cut where no token crosses."""

import gzip
import json
import os
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiktoken
import tokenizer
from fineweb import Options, prepare
from plumbing import documents
from plumbing.program import UserError

from corpora import WORDS, is_split, make, random_texts, read, train_small, write_jsonl, write_parquet


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "jsonl.gz", "jsonl.zst", "txt", "txt.gz", "txt.zst"])
def test_every_kind_of_input_gives_the_tokens_of_a_plain_loop(tmp_path, kind):
    texts = random_texts(40)
    path = tmp_path / f"data.{kind}"
    if kind == "parquet":
        write_parquet(path, texts)
    else:
        content = "".join(json.dumps({"text": t}) + "\n" for t in texts) if "jsonl" in kind else "\n".join(texts)
        texts = texts if "jsonl" in kind else [content]
        data = content.encode()
        if kind.endswith("gz"):
            # of two members, as pigz and cat make them
            data = gzip.compress(data[:1000]) + gzip.compress(data[1000:])
        elif kind.endswith("zst"):
            data = pa.compress(data, codec="zstd", asbytes=True)
        path.write_bytes(data)
    folder = make(tmp_path, str(path), shard_size=5000)
    assert is_split(folder, [texts], [path], shard_size=5000)


def test_tokens_of_odd_texts_are_tiktokens_own(tmp_path):
    enc = train_small("gpt2")
    tokenizer.write_encoding(enc, tmp_path / "small.tiktoken")
    texts = ["", "<|endoftext|>", "a\r\nb", " " * 3000 + "x", "half a pair \ud83d", "\x00\x1c\u3000 end"]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    folder = make(tmp_path, path, tokenizer=str(tmp_path / "small.tiktoken"), shard_size=100)
    tokens = [*read(folder, "*_train_*"), *read(folder, "*_val_*")]  # of few documents, the last tokens validate
    assert tokens == [i for text in texts for i in [enc.eot_token, *enc.encode_ordinary(text)]]


def with_pattern(pat_str):
    """A small trained tokenizer that splits text by another pattern before merging."""
    small = train_small("gpt2")
    parts = dict(mergeable_ranks=small._mergeable_ranks, special_tokens=small._special_tokens)
    return tiktoken.Encoding("x", pat_str=pat_str, **parts)


@pytest.mark.parametrize("pattern", [tokenizer.FAST_GPT2, tokenizer.PATTERNS["gpt4"]])
def test_a_run_of_blanks_that_tiktoken_gives_up_on_loses_nothing(pattern):
    million, enc = "a" + " " * 1_000_000 + "x", with_pattern(pattern)
    assert enc.decode(tokenizer.encode_text(enc, million)) == million


# what a text is made of: words, white space and signs, and scripts with and without spaces, with marks that are no
# letters: Russian, Chinese, Arabic, Hindi, Thai
SCRIPTS = [
    WORDS,
    [" ", "  ", "\n", "\r\n", "\n\n", "\t", "\u00a0", "\u3000", "\x1c", "\u2028", "\x85"],
    ". ... , 's ' \u2019s 3.14 1234567 \u00b2 _ <|endoftext|> \U0001f642 \u200b".split(" "),
    ["\u0412\u0441\u0435", "\u0441\u0447\u0430\u0441\u0442\u044c\u0435", "\u0441\u0435\u043c\u044c\u0438"],
    ["\u6211\u662f", "\u4eba", "\u3002", "\uff0c", "\u300c", "\u300d", "\u4e8c\u5341", "\uff12"],
    ["\u0643\u062a\u0627\u0628", "\u060c"],
    ["\u0939\u093f\u0928\u094d\u0926\u0940", "\u0964"],
    ["\u0e44\u0e17\u0e22", "\u0e20\u0e32\u0e29\u0e32"],
]


def test_a_long_text_is_cut_where_no_token_crosses():
    rng = random.Random(0)
    patterns = (tokenizer.PATTERNS["gpt2"], tokenizer.FAST_GPT2, tokenizer.PATTERNS["gpt4"])
    encs = [with_pattern(pattern) for pattern in patterns]
    texts = ["\n".join(random_texts(30, seed=1))]
    for _ in range(100):
        scripts = [rng.choice(SCRIPTS) for _ in range(3)]
        texts.append("".join(rng.choice(rng.choice(scripts)) for _ in range(300)))
    num_pieces = 0
    for text in texts:
        for size in (1, 7, 50):
            blocks = (text[i : i + size] for i in range(0, len(text), size))
            pieces = [piece.text for piece in documents.split_text(blocks)]
            num_pieces += len(pieces)
            assert "".join(pieces) == text
            for enc in encs:
                assert [i for piece in pieces for i in enc.encode_ordinary(piece)] == enc.encode_ordinary(text)
    assert num_pieces > 5000


CYRILLIC, CHINESE = "\u0441\u0447\u0430\u0441\u0442\u043b\u0438\u0432\u044b\u0435 ", "\u6211\u662f\u4eba\u3002\n"


HINDI, ARABIC = "\u0939\u093f\u0928\u094d\u0926\u0940 ", "\u0643\u062a\u0627\u0628\n"


@pytest.mark.parametrize("separator", ["", "<|endoftext|>"])
@pytest.mark.parametrize("unit", [CYRILLIC, CHINESE, HINDI, ARABIC, "a", "\x00", "\n", "1,2\n"])
def test_a_long_text_is_neither_held_in_memory_nor_searched_twice(unit, separator, monkeypatch):
    """The only places to cut at were after an ASCII letter; and 20 MB without one took hours with a separator."""
    monkeypatch.setattr(documents, "BLOCK_CHARS", 1000)
    monkeypatch.setattr(documents, "MAX_PIECE", 10_000)
    num_searched, find = 0, documents.find_token_boundary

    def count_searched(text, start, stop):
        nonlocal num_searched
        num_searched += max(0, stop - start)
        return find(text, start, stop)

    monkeypatch.setattr(documents, "find_token_boundary", count_searched)
    text = "x" + unit * (100_000 // len(unit)) + "x"
    blocks = (text[i : i + 1000] for i in range(0, len(text), 1000))
    pieces = [text for text, _ in documents.split_text(blocks, separator)]
    assert "".join(pieces) == text and max(map(len, pieces)) <= 12_000 and num_searched < 4 * len(text)


@pytest.mark.parametrize("block", [1, 5, 40, 100_000])
def test_a_separator_ends_a_document(tmp_path, block, monkeypatch):
    monkeypatch.setattr(documents, "BLOCK_CHARS", block)
    texts = ["One day.\n\nThe end.", "Two.", "a long one " * 50 + "x", "four < five <|endof"]
    joined = "\n<|endoftext|>\n".join(texts[:2]) + "\n<|endoftext|>\r\n\n<|endoftext|>"
    joined += "<|endoftext|>\n".join(texts[2:])
    (tmp_path / "stories.txt").write_bytes(joined.encode() + b"\n<|endoftext|>\n")
    source, found = documents.local_source(str(tmp_path / "stories.txt")), []
    for text, starts in documents.read_txt(source, "<|endoftext|>"):
        found += [text] if starts else []
        if not starts:
            found[-1] += text
    assert found == texts


def test_a_last_text_that_ends_as_the_separator_begins_is_whole():
    assert list(documents.split_text(["a---b--"], "---")) == [("a", True), ("b--", True)]


def test_stories_between_separators_become_documents_and_notes_say_how(tmp_path, capsys):
    stories = [f"Once upon a time there were {i} bears." for i in range(40)]
    path = tmp_path / "TinyStories-valid.txt"
    path.write_text("\n<|endoftext|>\n".join(stories), encoding="utf-8")
    make(tmp_path, str(path), name="one")
    assert '--separator "<|endoftext|>"' in capsys.readouterr().out
    make(tmp_path, str(path), name="two", separator="</s>")
    assert "does not contain --separator '</s>'" in capsys.readouterr().out
    folder = make(tmp_path, str(path), name="out", separator="<|endoftext|>")
    assert is_split(folder, [stories], [path]) and "note" not in capsys.readouterr().out
    with pytest.raises(UserError, match=r"separator was '<\|endoftext\|>' and is now ''\."):
        make(tmp_path, str(path), name="out")


def test_a_single_story_that_ends_with_the_separator_has_it(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("Once upon a time.\n<|endoftext|>\n", encoding="utf-8")
    assert len(list(documents.read_txt(documents.local_source(str(tmp_path / "a.txt")), "<|endoftext|>"))) == 1
    assert not capsys.readouterr().out


def test_inputs_are_files_folders_and_globs_in_the_order_given(tmp_path, monkeypatch):
    texts = random_texts(12)
    (tmp_path / "texts").mkdir()
    names = ["texts/b.json", "texts/a.jsonl.gz", "2.jsonl", "1.jsonl"]  # .json is taken for JSON lines, as in C4
    for i, name in enumerate(names):
        write_jsonl(tmp_path / name, texts[3 * i : 3 * i + 3])
    make(tmp_path, str(tmp_path / "1.jsonl"), name="texts")  # writes meta.json and more into that folder
    (tmp_path / "texts" / "notes.md").write_text("not a text to train on", encoding="utf-8")
    folder = make(tmp_path, str(tmp_path / "texts"), str(tmp_path / "[12].jsonl"), shard_size=1000)
    paths = [tmp_path / name for name in names]
    assert is_split(folder, [texts[3:6], texts[:3], texts[9:], texts[6:9]], paths, shard_size=1000)
    monkeypatch.chdir(tmp_path)
    assert prepare(Options(input=("texts",), tokenizer="bytes")) == "texts_shards"


def test_a_column_with_the_name_of_a_field_of_another_column_is_read(tmp_path):
    texts = random_texts(20)
    nested = pa.array([{"b": "not this"}] * 20, pa.struct([("b", pa.string())]))
    pq.write_table(pa.table({"a": nested, "a.b": texts}), tmp_path / "x.parquet")
    folder = make(tmp_path, str(tmp_path / "x.parquet"), text_column="a.b")
    assert is_split(folder, [texts], [tmp_path / "x.parquet"])


def test_python_docs_are_the_documentation_of_this_python(tmp_path):
    folder = prepare(Options(dataset="python-docs", tokenizer="bytes", out_dir=str(tmp_path / "docs")))
    tokens = read(folder)
    meta = json.loads((tmp_path / "docs" / "meta.json").read_text(encoding="utf-8"))
    assert 1e6 < len(tokens) == meta["tokens"] and np.count_nonzero(tokens == 256) == meta["documents"] > 300
    text = bytes(np.where(tokens == 256, 0, tokens).astype(np.uint8)).decode()
    # a piece of the language reference, and a docstring of the library
    assert "statement is used for conditional execution" in text and json.dumps.__doc__.splitlines()[0] in text


def test_docstrings_stand_under_what_they_document_in_an_order_of_their_own(tmp_path, monkeypatch):
    (tmp_path / "pack" / "tests").mkdir(parents=True)
    source = '"A package."\nprint("never run")\nclass C:\n  "Its class."\n  def f(self, *, a=1):\n    "Does."\n'
    (tmp_path / "pack" / "__init__.py").write_text(source, encoding="utf-8")
    (tmp_path / "pack" / "tests" / "t.py").write_text('"""left out"""', encoding="utf-8")
    (tmp_path / "old.py").write_text("print 1", encoding="utf-8")  # not Python 3
    for i in range(5):
        (tmp_path / f"m{i}.py").write_text(f'"""Module {i}."""', encoding="utf-8")
    monkeypatch.setattr(documents.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    monkeypatch.setattr("pydoc_data.topics.topics", {"if": "The if statement."})
    texts = documents.python_docs()
    package = "module pack\n\nA package.\n\nclass C\n\nIts class.\n\ndef f(self, *, a=1)\n\nDoes."
    assert sorted(texts) == sorted(["The if statement.", package, *(f"module m{i}\n\nModule {i}." for i in range(5))])
    walk = os.walk  # the order in which a disk lists its files does not matter
    monkeypatch.setattr(os, "walk", lambda root: ((at, folders, files[::-1]) for at, folders, files in walk(root)))
    assert documents.python_docs() == texts
