"""fineweb.py: what it writes is what a plain loop over the documents gives, whatever happens on the way."""

import errno
import functools
import gzip
import http.server
import io
import itertools
import json
import os
import pickle
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fineweb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiktoken
import tokenizer
import train_gpt2
from fineweb import Options, prepare
from plumbing import documents
from plumbing.cli import UserError
from plumbing.files import lock_folder
from plumbing.shards import new_meta
from tqdm import tqdm

from harness import ROOT, die_at, listing, needs, patched, refused, run, status_of
from test_tokenizer import train_small

TOKENIZER = ["tokenizer.tiktoken", "tokenizer.tiktoken.json"]  # beside all shards
WORDS = "the of a and \u00fcber na\u00efve \u65e5\u672c cat's 3.14 x=1 \t \n\n <|endoftext|> don't \U0001f642".split(
    " "
)


def random_documents(count, seed=0, longest=300):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randrange(1, longest))) for _ in range(count)]


def as_bytes(texts):
    """What the byte tokenizer must make of documents: 256, then the bytes of UTF-8, each document in turn."""
    return np.array([token for text in texts for token in [256, *text.encode()]], dtype=np.uint16)


def split_by_hand(files, num_bytes, shard_size=100_000_000, limit=10**9):
    """(validation tokens, training tokens) of own text: `files` are lists of documents, of so many bytes on disk."""
    every = max(11, -(-num_bytes // shard_size))
    validation, training, seen = [], [], 0
    for i, texts in enumerate(files):
        for j, text in enumerate(texts):
            tokens = [256, *text.encode()][: limit - seen]
            seen += len(tokens)
            fits = len(validation) + len(tokens) <= min(seen // 10, shard_size)
            (validation if fits and (i + j) % every == every - 1 else training).extend(tokens)
    share = max(1, min(shard_size, seen // every))
    if len(validation) < share / 2:
        last_shard = (len(training) - 1) // shard_size * shard_size
        cut = max(last_shard, len(training) - (share - len(validation)))
        validation, training = validation + training[cut:], training[:cut]
    return np.array(validation, np.uint16), np.array(training, np.uint16)


def is_split(folder, files, paths, **options):
    """Whether the shards in `folder` are what `split_by_hand` makes of the documents."""
    validation, training = split_by_hand(files, sum(map(os.path.getsize, paths)), **options)
    same = np.array_equal(read(folder, "*_val_*"), validation) and np.array_equal(read(folder, "*_train_*"), training)
    return same and 0 < len(validation) <= max(1, (len(training) + len(validation)) // 10)


def read(folder, pattern="*.npy"):
    """All tokens of a folder in the order of the shards' numbers, read with numpy and nothing of ours."""
    files = sorted(Path(folder).glob(pattern), key=lambda path: path.stem[-6:])
    shards = [np.load(file, allow_pickle=False) for file in files]
    assert all(shard.dtype == np.uint16 and shard.ndim == 1 for shard in shards)
    return np.concatenate(shards)


def write_jsonl(path, texts, key="text"):
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({key: text}) + "\n" for text in texts)
    return str(path)


def write_parquet(path, texts, column="text"):
    pq.write_table(pa.table({"id": range(len(texts)), column: texts}), path, row_group_size=7)
    return str(path)


def make(tmp_path, *inputs, name="out", **options):
    return prepare(Options(**{"input": inputs, "out_dir": str(tmp_path / name), "tokenizer": "bytes"} | options))


def script(*args, cwd, environment):
    """`python fineweb.py ...` as a user runs it."""
    command = [sys.executable, str(ROOT / "fineweb.py"), *map(str, args)]
    options = dict(capture_output=True, encoding="utf-8", timeout=60)
    return subprocess.run(command, cwd=cwd, env={**os.environ, **environment}, **options)


def full_disk(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "the disk")


# ----- Reading ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "jsonl.gz", "jsonl.zst", "txt", "txt.gz", "txt.zst"])
def test_every_kind_of_input_gives_the_tokens_of_a_plain_loop(tmp_path, kind):
    texts = random_documents(40)
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
    return tiktoken.Encoding(
        "x", pat_str=pat_str, mergeable_ranks=small._mergeable_ranks, special_tokens=small._special_tokens
    )


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
    texts = ["\n".join(random_documents(30, seed=1))]
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
    texts = random_documents(12)
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
    texts = random_documents(20)
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


# ----- Shards -------------------------------------------------------------------------------------------


def test_shards_are_cut_as_the_docstring_says():
    def cut(*texts, limit=99, skip=0):
        stream = ((0, i, np.array([*map(ord, text)], dtype=np.uint16)) for i, text in enumerate(texts))
        limited = fineweb.limit_tokens(stream, limit + skip, tqdm(disable=True))
        return [("".join(map(chr, shard)), end) for shard, end in fineweb.cut_into_shards(limited, 4, skip)]

    assert cut("aaa", "bbbbb", "c") == [("aaab", [0, 1, 1]), ("bbbb", [0, 2, 0]), ("c", None)]
    # what is exactly full is still the last, a document may be longer than two shards
    assert cut("aaaa") == [("aaaa", None)]
    assert cut("abcdefghij") == [("abcd", [0, 0, 4]), ("efgh", [0, 0, 8]), ("ij", None)]
    assert cut("aaa", "bbbbb", limit=6, skip=1) == [("aabb", [0, 1, 2]), ("bb", None)]


def test_names_and_meta_json_say_what_is_there(tmp_path):
    texts = random_documents(30)
    folder = make(tmp_path, write_parquet(tmp_path / "a.parquet", texts), shard_size=6000)
    validation, training = split_by_hand([texts], os.path.getsize(tmp_path / "a.parquet"), 6000)
    tokens = as_bytes(texts)
    files = ["out_val_000000.npy"] + [f"out_train_{i:06d}.npy" for i in range(1, -(-len(training) // 6000) + 1)]
    assert sorted(os.listdir(folder)) == sorted([*files, "meta.json", *TOKENIZER])
    meta = json.loads((tmp_path / "out" / "meta.json").read_text(encoding="utf-8"))
    lengths = [len(validation)] + [6000] * (len(files) - 2) + [len(training) % 6000]
    assert meta["shards"] == dict(zip(files, lengths)) and list(meta["shards"]) == files
    assert (meta["dataset"], meta["tokenizer"], meta["vocab_size"]) == ("input", "bytes", 257)
    assert (meta["documents"], meta["tokens"], meta["complete"]) == (30, len(tokens), True)
    # each is what np.save writes, to the byte
    np.save(tmp_path / "saved.npy", training[:6000])
    assert (tmp_path / "saved.npy").read_bytes() == (tmp_path / "out" / files[1]).read_bytes()


@pytest.mark.parametrize(
    "dataset, length, lengths",
    [
        ("python-docs", 101, [11] * 9 + [2]),  # their order is random, so the first tenth is like the rest
        ("python-docs", 2, [1, 1]),
        ("", 101, [9, 92]),
        ("", 2, [1, 1]),
        ("", 2000, [181, 1000, 819]),
    ],
)
def test_one_document_is_cut_into_two_splits(tmp_path, dataset, length, lengths):
    text = "x" * (length - 1)
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    source = {"dataset": dataset} if dataset else {"input": (str(tmp_path / "a.txt"),)}
    with patched(documents, "python_docs", lambda: [text]):
        folder = make(tmp_path, shard_size=1000, **source)
    meta = json.loads(Path(folder, "meta.json").read_text(encoding="utf-8"))
    assert list(meta["shards"].values()) == lengths and len(read(folder, "*_val_*")) == lengths[0]


def test_own_text_validates_on_a_sample_of_all_of_it(tmp_path, capsys):
    """It was the first shard: of a corpus of 338,000 tokens, 286,000 became validation."""
    path = tmp_path / "a.txt"
    path.write_text(" ".join(f"{i} " * random.Random(i).randrange(1, 1600) for i in range(400)), encoding="utf-8")
    folder = make(tmp_path, str(path), shard_size=150_000)
    validation, training = read(folder, "*_val_*"), read(folder, "*_train_*")
    total = len(validation) + len(training)
    assert total // 20 < len(validation) <= total // 10
    numbers = [int(n) for n in bytes(validation[validation < 256].astype(np.uint8)).split()[1:-1]]
    assert np.histogram(numbers, 8, (0, 400))[0].all()  # some from every eighth of the text
    said = capsys.readouterr().out
    assert f"{len(training):,} tokens to train on, {len(validation):,} to validate on" in said


def test_a_large_corpus_validates_on_no_more_than_a_shard_and_still_on_all_of_it(tmp_path):
    texts = [f"{i:03d} " * 20 for i in range(1000)]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    folder = make(tmp_path, path, shard_size=2000)
    assert is_split(folder, [texts], [path], shard_size=2000) and len(read(folder, "*_val_*")) <= 2000


def test_max_tokens_ends_in_the_middle_of_a_document(tmp_path):
    texts = random_documents(30)
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    folder = make(tmp_path, path, shard_size=1000, max_tokens=2345)
    assert is_split(folder, [texts], [path], shard_size=1000, limit=2345) and len(read(folder)) == 2345


@pytest.mark.parametrize("length", [40, 900, 30_000])
def test_the_command_that_comes_next_trains_on_the_shards(tmp_path, length, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a text.txt").write_text("To be. " * (length // 7), encoding="utf-8")
    fineweb.main(["--input", "a text.txt", "--tokenizer", "bytes"])
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert command[:4] == ["python", "train_gpt2.py", "--data", "a text"]
    assert status_of(train_gpt2.main, [*command[2:], "--max-steps", "1", "--device", "cpu"]) == 0


def test_much_text_is_for_gpt2():
    assert fineweb.training_command("edu_fineweb10B", {"train": [10**8] * 99, "val": [10**8]})[2:] == []
    command = fineweb.training_command("x", {"train": [10**8] * 10, "val": [10**8]})
    assert command[2:] == ["--data", "x", "--max-steps", 1907, "--warmup-steps", 70]


# ----- Cores, kills, faults -----------------------------------------------------------------------------


def test_neither_cores_nor_batches_change_a_byte(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", random_documents(200))
    for name, num_proc, chars in (("one", 1, 2**19), ("two", 2, 5000), ("five", 5, 100)):
        with patched(documents, "BATCH_CHARS", chars):
            make(tmp_path, path, name=f"{name}/out", num_proc=num_proc, shard_size=7000)
    one = listing(tmp_path / "one")
    assert len(one) > 5 and listing(tmp_path / "two") == one and listing(tmp_path / "five") == one


@pytest.fixture(params=["threads", "processes"])
def row_groups(tmp_path, monkeypatch, request):
    """A parquet file whose row groups are read by the cores that tokenize them, and its documents."""
    monkeypatch.setattr(fineweb, "MAX_THREADS", 8 if request.param == "threads" else 0)
    monkeypatch.setattr(documents, "BATCH_CHARS", 1000)  # seven documents have more
    texts = random_documents(200)
    path = write_parquet(tmp_path / "a.parquet", texts)
    assert len(documents.list_row_groups(documents.local_source(path), "text")) == 29
    return path, texts


@needs("SIGKILL")
def test_row_groups_are_read_where_they_are_tokenized_and_change_no_byte(tmp_path, row_groups):
    """Also from the middle of a row group on, where a shard ended when it was killed."""
    path, texts = row_groups
    paths = path, write_jsonl(tmp_path / "b.jsonl", texts)
    whole = listing(make(tmp_path, *paths, name="whole/out", shard_size=9000, num_proc=2))
    assert is_split(tmp_path / "whole" / "out", [texts, texts], paths, shard_size=9000)
    for renames in (9, 30):
        die(tmp_path, paths, f"{renames}/out", renames, True)
        make(tmp_path, *paths, name=f"{renames}/out", shard_size=9000, num_proc=2)
        assert listing(tmp_path / f"{renames}" / "out") == whole


def test_a_damaged_row_group_is_one_line_wherever_it_is_read(tmp_path, row_groups):
    path = Path(row_groups[0])
    content = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(20).column(1).dictionary_page_offset
    content[start : start + 200] = bytes(200)
    path.write_bytes(content)
    with pytest.raises(UserError, match="a.parquet is damaged"):
        make(tmp_path, str(path), shard_size=9000, num_proc=2)


def test_a_process_that_is_killed_is_one_line(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", random_documents(20))
    monkeypatch.setattr(fineweb, "MAX_THREADS", 0)

    def start_and_kill(*args, **kwargs):
        process = popen(*args, **kwargs)
        process.kill()
        return process

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start_and_kill)
    with pytest.raises(UserError, match="process that tokenizes came to an end.*smaller --num-proc"):
        make(tmp_path, path, num_proc=2)


def test_a_process_whose_parent_dies_in_a_message_ends_without_a_word():
    enc = tokenizer.get_encoding("bytes")
    start = pickle.dumps(tokenizer.copy_encoding(enc, enc.name, enc._special_tokens))
    read = pickle.dumps(functools.partial(iter, [("x" * 100_000, True)]))
    for received in (start[: len(start) // 2], start + read[:1000]):
        command = [sys.executable, "-c", "import fineweb; fineweb.serve()"]
        process = subprocess.run(command, cwd=ROOT, input=received, capture_output=True)
        assert (process.stderr, process.returncode) == (b"", 0)


@needs("SIGKILL")
@pytest.mark.parametrize("number, said", [("SIGKILL", ""), ("SIGINT", "interrupted\n")])
def test_processes_do_not_outlive_the_one_that_started_them(tmp_path, number, said):
    path = write_jsonl(tmp_path / "a.jsonl", random_documents(1500, longest=3000))
    code = (
        "import fineweb; from plumbing import cli; fineweb.MAX_THREADS = 0\n"
        f"cli.run(lambda: fineweb.main(['--input', {path!r}, '--tokenizer', 'bytes', '--num-proc', '2', "
        f"'--shard-size', '1000000', '--out-dir', {str(tmp_path / 'out')!r}]))"
    )
    (tmp_path / "pickle.py").write_text("raise ImportError('of the current folder')", encoding="utf-8")
    options = dict(cwd=tmp_path, stderr=subprocess.PIPE, encoding="utf-8", start_new_session=True)
    process = subprocess.Popen([sys.executable, "-P", "-c", code], **options)
    while not (tmp_path / "out" / "out_train_000001.npy").exists():
        assert process.poll() is None
        time.sleep(0.01)
    if number == "SIGINT":  # a terminal sends it to all of them
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.kill()
    lines = process.communicate(timeout=60)[1].splitlines(keepends=True)  # when all that hold its stderr have ended
    assert "".join(line for line in lines if "tok/s" not in line and line.strip()) == said


def make_and_die(tmp_path, paths, name, renames, after):
    documents.BATCH_CHARS = documents.BLOCK_CHARS = 1000
    count = itertools.count(1)
    last_act = (lambda replace, *args: replace(*args)) if after else (lambda *args: None)
    with die_at(os, "replace", lambda *args: next(count) == renames, last_act):
        make(tmp_path, *paths, name=name, shard_size=9000)


def die(tmp_path, *args):
    """Make shards in a process that dies by SIGKILL at the N-th file that gets its name, before or after it has."""
    output = tmp_path / "output"
    assert run(make_and_die, tmp_path, *args, output=output) == [-signal.SIGKILL], output.read_text(encoding="utf-8")


@needs("SIGKILL")
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "txt"])
def test_killed_at_any_rename_the_same_command_ends_with_the_same_bytes(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(documents, "BLOCK_CHARS", 1000)
    texts = random_documents(40) + ["one long document " * 300]
    if kind == "txt":
        (tmp_path / "a.txt").write_text("\n".join(texts), encoding="utf-8")
        paths = (str(tmp_path / "a.txt"),)
    else:
        writer = write_jsonl if kind == "jsonl" else write_parquet
        paths = (writer(tmp_path / f"a.{kind}", texts[:20]), writer(tmp_path / f"b.{kind}", texts[20:]))
    whole = listing(make(tmp_path, *paths, name="whole/out", shard_size=9000))
    # meta.json and the tokenizer's two files, then for every training shard the validation sample, itself and meta.json
    renames = 3 * (len(whole) - 4) + 3
    for count in range(1, renames + 1):
        die(tmp_path, paths, f"{count}/out", count, count % 2 == 0)
        make(tmp_path, *paths, name=f"{count}/out", shard_size=9000)
        assert listing(tmp_path / f"{count}" / "out") == whole


def test_a_finished_folder_is_left_alone_and_a_damaged_shard_made_again(tmp_path, capsys):
    path = write_jsonl(tmp_path / "a.jsonl", random_documents(60))
    folder = make(tmp_path, path, shard_size=5000)
    before = listing(folder)
    make(tmp_path, path, shard_size=5000)
    assert "is complete" in capsys.readouterr().out
    for damage in (lambda file: os.truncate(file, 5000), lambda file: os.truncate(file, 0), os.remove):
        damage(Path(folder) / "out_train_000002.npy")
        make(tmp_path, path, shard_size=5000)
        assert listing(folder) == before
    meta = json.loads(Path(folder, "meta.json").read_text(encoding="utf-8"))
    Path(folder, "meta.json").write_text(json.dumps(meta | {"shards": {}}), encoding="utf-8")
    make(tmp_path, path, shard_size=5000)
    assert listing(folder) == before


def test_bad_lines_can_be_mended_and_the_run_goes_on(tmp_path, capsys):
    texts = random_documents(60)
    path = Path(write_jsonl(tmp_path / "a.jsonl", texts))
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([*lines[:50], lines[50][:-3], *lines[51:]]), encoding="utf-8")
    with patched(documents, "BATCH_CHARS", 1000), pytest.raises(UserError, match="Line 51"):
        make(tmp_path, str(path), shard_size=5000, num_proc=1)
    assert (tmp_path / "out" / "out_val_000000.npy").exists()
    path.write_text("\n".join(lines), encoding="utf-8")
    folder = make(tmp_path, str(path), shard_size=5000)
    assert is_split(folder, [texts], [path], shard_size=5000)
    # meta.json tells of the file as it is now, else the same command would take it for another one
    before = listing(folder)
    make(tmp_path, str(path), shard_size=5000)
    assert "is complete" in capsys.readouterr().out and listing(folder) == before


@pytest.mark.parametrize("begun", [True, False])
def test_an_input_that_is_another_text_is_refused(tmp_path, begun, capsys):
    path = Path(write_jsonl(tmp_path / "a.jsonl", random_documents(60)))
    folder = Path(make(tmp_path, str(path), shard_size=5000))
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8")) | {"complete": not begun}
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    text, middle = path.read_bytes(), path.stat().st_size // 2
    refusal = r"the input \(name, bytes, hash\) was \['a.jsonl', .* and is now \['a.jsonl', "
    # of the same size, with a change in the middle; of another size, with another start
    for other in (text[:middle] + text[middle:].replace(b"the", b"two", 1), text.replace(b"the", b"those")):
        path.write_bytes(other)
        with pytest.raises(UserError, match=refusal):
            make(tmp_path, str(path), shard_size=5000)
    path.write_bytes(text)
    meta["made_from"]["sources"] = [source[:2] for source in meta["made_from"]["sources"]]  # as older runs wrote it
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    folder.rename(tmp_path / "renamed")  # the names of its shards stay
    make(tmp_path, str(path), name="renamed", shard_size=5000)
    assert ("is complete" in capsys.readouterr().out) != begun
    assert {file.name[:4] for file in (tmp_path / "renamed").glob("*.npy")} == {"out_"}


def test_a_folder_that_another_process_works_on_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", random_documents(20))
    with lock_folder(tmp_path / "out"):
        with pytest.raises(UserError, match="in use by process"):
            make(tmp_path, path)
    with lock_folder(make(tmp_path, path)):  # what is complete can be used by several at once
        make(tmp_path, path)


def test_a_disk_that_is_too_small_is_refused_before_the_download(tmp_path):
    usage = types.SimpleNamespace(free=10**8)
    with patched(shutil, "disk_usage", lambda folder: usage):
        with pytest.raises(UserError, match="0.4 GB, .* 0.1 GB free"):
            prepare(Options(pretokenized=1, out_dir=str(tmp_path / "out")))


def test_a_disk_that_fills_up_keeps_the_shards_before(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", random_documents(60))
    fsync, calls = os.fsync, []

    def full(number):
        calls.append(number)
        # meta.json, the tokenizer's two files (one twice), then three files for each training shard
        (full_disk if len(calls) > 10 else fsync)(number)

    with patched(os, "fsync", full), pytest.raises(UserError, match="No space left"):
        make(tmp_path, path, shard_size=4000)
    before = listing(tmp_path / "out")
    assert len(before) == 6 and not any(name.endswith(".part") for name in before)
    make(tmp_path, path, shard_size=4000)
    after = listing(tmp_path / "out")
    assert after == listing(make(tmp_path, path, name="other/out", shard_size=4000))
    assert all(after[name] == digest for name, digest in before.items() if "_train_" in name)


def test_parts_are_disjoint_and_their_union_is_the_whole(tmp_path):
    texts = random_documents(50)
    for i in range(5):
        write_jsonl(tmp_path / f"{i}.jsonl", texts[10 * i : 10 * i + 10])

    def make_part(part):
        return make(tmp_path, str(tmp_path / "*.jsonl"), shard_size=3000, part=part, num_proc=1)

    with ThreadPoolExecutor(3) as executor:  # at the same time
        list(executor.map(make_part, ("1/3", "2/3", "3/3")))  # as `seq 3` counts; 0/3 is 3/3
    make_part("0/3")
    folder = tmp_path / "out"
    metas = [json.loads((folder / f"meta.part-{i}-of-3.json").read_text(encoding="utf-8")) for i in range(3)]
    assert {file for meta in metas for file in meta["shards"]} == {file.name for file in folder.glob("*.npy")}
    assert sum(len(meta["shards"]) for meta in metas) == len(list(folder.glob("*.npy")))
    for i, meta in enumerate(metas):
        tokens = np.concatenate([np.load(folder / file) for file in meta["shards"]])
        mine = [texts[10 * number : 10 * number + 10] for number in range(i, 5, 3)]
        if i == 0:  # the part that validates
            paths = [tmp_path / f"{number}.jsonl" for number in range(i, 5, 3)]
            assert np.array_equal(tokens, np.concatenate(split_by_hand(mine, sum(map(os.path.getsize, paths)), 3000)))
        else:
            assert np.array_equal(tokens, as_bytes([text for texts in mine for text in texts]))
    write_jsonl(tmp_path / "5.jsonl", texts[:5])
    with pytest.raises(UserError, match="all_inputs was"):
        make_part("0/3")
    with pytest.raises(UserError, match="the number of parts was 3 and is now 2"):
        make_part("0/2")
    assert len(list(folder.glob("*_val_*"))) == 1 and tokenizer.folder_encoding(folder).name == "bytes"


def test_importing_runs_nothing(tmp_path):
    code = (
        "import socket, sys\n"
        "def refuse(*args): raise OSError('no network')\n"
        "socket.socket.connect = socket.create_connection = refuse\n"
        "import fineweb, smoltalk, tokenizer\n"
        "slow = {'datasets', 'transformers', 'torch', 'pyarrow', 'huggingface_hub', 'tokenizers'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, encoding="utf-8")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "") and not list(tmp_path.iterdir())


# ----- Downloads ----------------------------------------------------------------------------------------


class Handler(http.server.BaseHTTPRequestHandler):
    """Files by path, and as much of the hub as its client asks for. The first answer of each path is broken off."""

    def do_GET(self):
        path = urllib.parse.unquote(self.path.split("?")[0])
        self.server.asked.append(path)
        content = self.server.files.get(path)
        if content is None:
            self.send_error(404)
            return
        first = self.server.asked.count(path) == 1 and self.command == "GET"
        if first and self.server.flaky == "status":
            self.send_error(503)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", '"0123456789abcdef"')
        self.send_header("X-Repo-Commit", "c" * 40)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[: len(content) // 2] if first and self.server.flaky == "short" else content)

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    """Also the hub, as `python fineweb.py` sees it with `server.env`."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files, server.asked, server.flaky = {}, [], ""
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.env = {"HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    server.env |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("flaky", ["status", "short"])
def test_urls_are_fetched_again_when_the_network_fails_and_removed_after(tmp_path, server, flaky):
    texts = random_documents(40)
    write_jsonl(tmp_path / "a.jsonl.gz", texts[:20])
    write_parquet(tmp_path / "x.parquet", texts[20:30])
    write_parquet(tmp_path / "y.parquet", texts[30:])
    files = {"/a.jsonl.gz": "a.jsonl.gz", "/x/b.parquet": "x.parquet", "/y/b.parquet": "y.parquet"}
    server.files = {path: (tmp_path / name).read_bytes() for path, name in files.items()}
    server.flaky = flaky
    with patched(documents, "RETRY_SECONDS", 0):
        urls = [f"{server.url}{path}" for path in files]
        folder = make(tmp_path, urls[0] + "?download=1", *urls[1:], shard_size=5000)
    assert is_split(folder, [texts[:20], texts[20:30], texts[30:]], [], shard_size=5000)
    assert all(server.asked.count(path) == 2 for path in files)
    assert all(re.search(r"\.npy$|^meta.json$|^tokenizer.tiktoken", name) for name in os.listdir(folder))


@pytest.mark.parametrize("prefetch", [True, False])
def test_an_outage_later_than_the_first_download_is_survived(tmp_path, monkeypatch, prefetch):
    (tmp_path / "a.txt").write_text("text", encoding="utf-8")
    attempts = []

    def fetch(source, folder, number=3):
        attempts.append(number)
        return source._replace(path=str(tmp_path / "a.txt"))

    monkeypatch.setattr(documents, "fetch", fetch)
    sources = [documents.Source(f"http://host/{name}.txt") for name in "abc"]
    assert list(documents.read_batches(sources, "text", str(tmp_path), prefetch=prefetch)) and attempts == [3, 9, 9]


def test_a_download_is_whole_or_not_there(tmp_path, server):
    server.files, path, bars = {"/a.bin": b"content" * 1000}, tmp_path / "a.bin", []
    server.flaky = "short"

    class Bar(tqdm):
        def __init__(self, *args, **options):
            super().__init__(*args, **options, file=io.StringIO())
            bars.append(self)

    with patched(documents, "RETRY_SECONDS", 0), patched(documents, "tqdm", Bar):
        match = "ended after 3,500 of 7,000 bytes. Call a friend."
        with pytest.raises(UserError, match=match):
            documents.download(f"{server.url}/a.bin", str(path), "Call a friend.", attempts=1)
        assert not any(tmp_path.iterdir())
        documents.download(f"{server.url}/a.bin", str(path), "")
    assert path.read_bytes() == server.files["/a.bin"] and [(bar.total, bar.n) for bar in bars[1:]] == [(7000, 7000)]
    # what the disk refuses, or the server for good, is not asked for again
    with patched(os, "fsync", full_disk), pytest.raises((UserError, OSError), match="No space left"):
        documents.download(f"{server.url}/a.bin", str(path), "")
    with pytest.raises(UserError, match="404"):
        documents.download(f"{server.url}/missing", str(path), "")
    assert server.asked == ["/a.bin"] * 3 + ["/missing"] and path.read_bytes() == server.files["/a.bin"]


def test_fineweb_edu_comes_file_by_file_from_the_hub(tmp_path, server):
    repo, commit = "HuggingFaceFW/fineweb-edu", "c" * 40
    texts, tree = random_documents(60), []
    for i in range(3):
        write_parquet(tmp_path / "x.parquet", texts[20 * i : 20 * i + 20])
        path, content = f"sample/10BT/{i:03d}_00000.parquet", (tmp_path / "x.parquet").read_bytes()
        server.files[f"/datasets/{repo}/resolve/{commit}/{path}"] = content
        tree.append({"type": "file", "path": path, "size": len(content), "oid": "0" * 40})
    server.files[f"/api/datasets/{repo}"] = json.dumps({"id": repo, "sha": commit, "siblings": []}).encode()
    server.files[f"/api/datasets/{repo}/tree/{commit}/sample/10BT"] = json.dumps(tree[::-1]).encode()
    server.flaky = "status"
    tokens = as_bytes(texts)
    args = ["--tokenizer", "bytes", "--shard-size", "7000", "--max-tokens", len(tokens) - 100]
    done = script(*args, cwd=tmp_path, environment=server.env)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "edu_fineweb10B"
    assert np.array_equal(read(folder), tokens[:-100])
    count = -(-len(tokens[100:]) // 7000)
    shards = ["edufineweb_val_000000.npy"] + [f"edufineweb_train_{i:06d}.npy" for i in range(1, count)]
    assert sorted(os.listdir(folder)) == sorted([*shards, "meta.json", *TOKENIZER])  # and no parquet
    # what is complete needs no network
    asked = len(server.asked)
    assert "is complete" in script(*args, cwd=tmp_path, environment=server.env).stdout and len(server.asked) == asked


def test_ready_made_shards_come_whole_or_again(tmp_path, server):
    rng = np.random.default_rng(0)
    shards = {}
    for file in ["val_000000", "train_000001", "train_000002"]:
        tokens = rng.integers(0, 50257, 1000, dtype=np.uint16)
        tokens[0] = 50256
        header = np.zeros(256, dtype="<i4")
        header[:3] = 20240520, 1, len(tokens)
        shards[f"finewebedu_{file}.bin"] = header.tobytes() + tokens.tobytes()
    prefix = "/datasets/kjj0/finewebedu10B-gpt2/resolve/main/"
    server.files = {prefix + file: content for file, content in shards.items()}
    server.flaky = "short"
    done = script("--pretokenized", 2, cwd=tmp_path, environment=server.env)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "edu_fineweb10B"
    assert {path.name: path.read_bytes() for path in folder.glob("*.bin")} == shards
    assert set(os.listdir(folder)) - set(TOKENIZER) == {*shards, "meta.json"}
    # a machine without a network and without tiktoken's cache can train on them, if this one has the tables
    assert ("note: The tokenizer" in done.stdout) != (folder / "tokenizer.tiktoken").exists()
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    assert meta["shards"] == dict.fromkeys(shards, 1000) and meta["tokens"] == 3000 and meta["complete"]
    # one more shard than there is: said, and what is there stays
    done = script("--pretokenized", 3, cwd=tmp_path, environment=server.env)
    assert done.returncode == 2 and "finewebedu_train_000003.bin" in done.stderr and "Traceback" not in done.stderr
    assert {path.name: path.read_bytes() for path in folder.glob("*.bin")} == shards


# ----- Bad input: one line, status 2, nothing written ---------------------------------------------------


def bad_inputs(tmp_path):
    """[(arguments, words that the line must have)]"""
    texts = random_documents(5)
    good, other = (write_jsonl(tmp_path / f"{name}.jsonl", texts) for name in ("good", "other"))
    parquet = write_parquet(tmp_path / "p.parquet", texts, column="content")
    lists, enc = pa.array([["a"]], pa.list_(pa.string())), tokenizer.get_encoding("bytes")
    pq.write_table(pa.table({"lists": lists, "good": ["c"]}), tmp_path / "nested.parquet")
    contents = {
        "broken.jsonl": b'{"text": "a"}\n\n{"text": \n',
        "list.jsonl": b'{"text": "a"}\n["b"]\n',
        "number.jsonl": b'{"text": 3}\n',
        "empty.jsonl": b"\n",
        "latin.txt": b"\xe9",
        "cut.parquet": Path(parquet).read_bytes()[:-20],
        "cut.jsonl.gz": gzip.compress(b'{"text": "abc"}\n' * 99)[:-9],
        "a.csv": b"text\n",
        "a.tiktoken": b"hello",
        "file": b"",
        "foreign/x_train_000001.npy": b"",
        "trained/tokenizer.tiktoken": b"by the user",
        "strange/meta.json": b'{"tokenizer": "bytes"}',
        "ready/meta.json": json.dumps(new_meta("finewebedu10B-gpt2", enc, {"sources": []})).encode(),
    }
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    ranks = {bytes([i]): i for i in range(256)} | {i.to_bytes(4, "big"): i for i in range(256, 65536)}
    parts = dict(pat_str="(?s:.)", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 65536})
    tokenizer.write_encoding(tiktoken.Encoding("big", **parts), tmp_path / "big.tiktoken")
    make(tmp_path, good, name="taken")
    taken = ["--out-dir", tmp_path / "taken"]
    wrong_inputs = [
        ("p.parquet", "'text' of "),
        ("broken.jsonl", "Line 3"),
        ("list.jsonl", "Line 2"),
        ("number.jsonl", "Line 1"),
        ("empty.jsonl", "contains no text"),
        ("latin.txt", "UTF-8"),
        ("cut.parquet", "is damaged"),
        ("cut.jsonl.gz", "is damaged"),
        ("a.csv", ".parquet"),
        ("foreign", "No file matches"),
    ]
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.txt")
        wrong_inputs.append(("pipe.txt", "is a pipe or a device"))
    cases = [(["--input", tmp_path / name], [words]) for name, words in wrong_inputs]
    # what is wrong with the input is said before what is wrong with the tokenizer
    cases.append((["--input", tmp_path / "none*.txt", "--tokenizer", "nowhere"], ["none*.txt"]))
    cases += [
        (["--input", good, *args], words.split(" & "))
        for args, words in [
            (["--out-dir", ""], "--out-dir is empty"),
            (["--tokenizer", tmp_path / "a.tiktoken"], "a.tiktoken"),
            (["--tokenizer", "gpt3"], "gpt2"),
            (["--tokenizer", tmp_path / "big.tiktoken"], "65,537 & 65,536"),
            (["--part", "5/4", "--shard-size", 0], "5/4 & 0/4 & --shard-size is 0"),
            (["--part", "1/" + "4" * 5000], "is not of the form"),
            (["--part", "0/4"], "only 1 input files"),
            (["--tokenizer", "bytes+chat", *taken], "+chat"),
            (["--shard-size", 7, *taken], "shard_size was 100000000 and is now 7"),
            (["--out-dir", tmp_path / "foreign"], "did not write"),
            (["--out-dir", tmp_path / "trained"], "other contents"),
            (["--out-dir", tmp_path / "strange"], "strange"),
            (["--out-dir", tmp_path / "file"], "file"),
        ]
    ]
    return cases + [
        (["--input", parquet, "--text-column", "id"], ["int64"]),
        (["--input", tmp_path / "nested.parquet", "--text-column", "lists"], ["list<", "--text-column: good."]),
        (["--input", other, *taken], ["good.jsonl", "other.jsonl"]),
        (["--dataset", "python-docs", *taken], ["input", "python-docs"]),
        (["--out-dir", tmp_path / "ready"], ["dataset was 'finewebedu10B-gpt2' and is now 'fineweb-edu'"]),
        (["--dataset", "python-doc"], ["Did you mean python-docs?"]),
        ([], ["--dataset python-docs", "--input"]),  # no network
        (["--pretokenized", 1, "--tokenizer", "gpt2"], ["val_000000.bin"]),
        (["--input", "http://127.0.0.1:9/a.txt", "--num-proc", 1], ["127.0.0.1:9"]),
    ]


def test_bad_input_is_one_line_and_status_2_and_changes_nothing(tmp_path):
    cases = bad_inputs(tmp_path)
    before = listing(tmp_path)
    for number, (args, words) in enumerate(cases):
        args = args if "--tokenizer" in args else [*args, "--tokenizer", "bytes"]
        args = args if "--out-dir" in args else [*args, "--out-dir", tmp_path / f"out{number}"]
        with patched(documents, "RETRY_SECONDS", 0):
            line = refused(fineweb.main, *args)
        assert all(word in line for word in words), (args, line)
        assert listing(tmp_path) == before, args
