"""fineweb.py: what it writes is what a plain loop over the documents gives, whatever happens on the way."""

import errno
import gzip
import http.server
import io
import json
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiktoken
from conftest import ROOT, SHARED, listing, patched, refusal_of, run
from tqdm import tqdm

import fineweb
import tokenizer
from fineweb import Options, prepare
from plumbing import documents
from plumbing.cli import UserError
from plumbing.files import lock_folder

needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="no ../shared/data beside the repository")
needs_gpt2 = pytest.mark.skipif(not (SHARED / "tiktoken_cache").exists(), reason="GPT-2's tables are not at hand")
TOKENIZER = ["tokenizer.tiktoken", "tokenizer.tiktoken.json"]  # beside all shards
WORDS = "the of a and über naïve 日本 cat's 3.14 x=1 \t \n\n <|endoftext|> don't 🙂 end".split(" ")


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


def script(*args, name="fineweb.py", cwd=None, timeout=60, **environment):
    """`python fineweb.py ...` as a user runs it."""
    command = [sys.executable, str(ROOT / name), *map(str, args)]
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)


def full_disk(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "the disk")


# -----------------------------------------------------------------------------
# Reading


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
            data = gzip.compress(data[:1000]) + gzip.compress(data[1000:])  # of two members, as pigz and cat make them
        elif kind.endswith("zst"):
            data = pa.compress(data, codec="zstd", asbytes=True)
        path.write_bytes(data)
    folder = make(tmp_path, str(path), shard_size=5000)
    assert is_split(folder, [texts], [path], shard_size=5000)


@needs_gpt2
def test_gpt2_tokens_of_odd_texts_are_tiktokens_own(tmp_path):
    texts = ["", "<|endoftext|>", "a\r\nb", " " * 3000 + "x", "half a pair \ud83d", "\x00\x1c\u3000 end", "日本語" * 9]
    folder = make(tmp_path, write_jsonl(tmp_path / "a.jsonl", texts), tokenizer="gpt2", shard_size=100)
    enc = tiktoken.get_encoding("gpt2")
    tokens = [*read(folder, "*_train_*"), *read(folder, "*_val_*")]  # of few documents, the last tokens validate
    assert tokens == [i for text in texts for i in [50256, *enc.encode_ordinary(text)]]


@needs_gpt2
@pytest.mark.parametrize(
    "pattern, tail",
    [("gpt2", "x"), ("gpt2", "\nx"), ("gpt2", "\x1cx"), ("gpt2", " \n\n  x y"), ("gpt4", "x"), ("gpt4", " \n\n  x y")],
)
def test_a_run_of_blanks_that_tiktoken_gives_up_on_is_cut_where_it_splits_anyway(pattern, tail):
    gpt2 = tiktoken.get_encoding("gpt2")
    parts = dict(mergeable_ranks=gpt2._mergeable_ranks, special_tokens=gpt2._special_tokens)
    pat_str = {"gpt2": tokenizer.FAST_GPT2, "gpt4": tokenizer.PATTERNS["gpt4"]}[pattern]
    enc = tiktoken.Encoding("x", pat_str=pat_str, **parts)
    text = "a b" + " " * 20_000 + tail  # short enough for tiktoken: it is the reference

    class GivesUp:  # on anything longer than a run of blanks alone
        _pat_str = enc._pat_str

        def encode_to_numpy(self, part, disallowed_special):
            if part == text:
                raise ValueError("Regex error while tokenizing")
            return enc.encode_to_numpy(part, disallowed_special=disallowed_special)

    assert tokenizer.encode_text(GivesUp(), text).tolist() == enc.encode_ordinary(text)
    million = tokenizer.encode_text(gpt2, "a" + " " * 1_000_000 + "x")
    assert gpt2.decode(million) == "a" + " " * 1_000_000 + "x"


# what a text is made of: words, white space and signs, and scripts with and without spaces, with marks that are no
# letters: Russian, Chinese, Arabic, Hindi, Thai
SCRIPTS = [
    WORDS,
    [" ", "  ", "\n", "\r\n", "\n\n", "\t", "\u00a0", "\u3000", "\x1c", "\u2028", "\x85"],
    [".", "...", ",", "'s", "'", "\u2019s", "3.14", "1234567", "\u00b2", "_", "<|endoftext|>", "\U0001f642", "\u200b"],
    ["\u0412\u0441\u0435", "\u0441\u0447\u0430\u0441\u0442\u044c\u0435", "\u0441\u0435\u043c\u044c\u0438"],
    ["\u6211\u662f", "\u4eba", "\u3002", "\uff0c", "\u300c", "\u300d", "\u4e8c\u5341", "\uff12"],
    ["\u0643\u062a\u0627\u0628", "\u060c"],
    ["\u0939\u093f\u0928\u094d\u0926\u0940", "\u0964"],
    ["\u0e44\u0e17\u0e22", "\u0e20\u0e32\u0e29\u0e32"],
]


def two_tokenizers():
    """GPT-2's tables with the two patterns that text can be split by before merging."""
    gpt2 = tiktoken.get_encoding("gpt2")
    parts = dict(mergeable_ranks=gpt2._mergeable_ranks, special_tokens=gpt2._special_tokens)
    patterns = (tokenizer.PATTERNS["gpt2"], tokenizer.FAST_GPT2, tokenizer.PATTERNS["gpt4"])
    return [tiktoken.Encoding("x", pat_str=pattern, **parts) for pattern in patterns]


@needs_gpt2
def test_a_long_text_is_cut_where_no_token_crosses():
    rng = random.Random(0)
    encs = two_tokenizers()
    texts = ["\n".join(random_documents(30, seed=1))]
    for _ in range(100):
        scripts = [rng.choice(SCRIPTS) for _ in range(3)]
        texts.append("".join(rng.choice(rng.choice(scripts)) for _ in range(300)))
    num_pieces = 0
    for text in texts:
        for size in (1, 7, 50):
            pieces = list(documents.split_between_tokens(text[i : i + size] for i in range(0, len(text), size)))
            num_pieces += len(pieces)
            assert "".join(pieces) == text
            for enc in encs:
                assert [i for piece in pieces for i in enc.encode_ordinary(piece)] == enc.encode_ordinary(text)
    assert num_pieces > 5000


@pytest.mark.parametrize(
    "words",
    [
        ["\u0441\u0447\u0430\u0441\u0442\u043b\u0438\u0432\u044b\u0435 "],
        ["\u6211\u662f\u4eba", "\u3002\n"],
        ["\u0939\u093f\u0928\u094d\u0926\u0940 "],
        ["\u0643\u062a\u0627\u0628\n"],
    ],
)
def test_a_text_without_ascii_letters_is_not_held_in_memory(words):
    """It was: the only places to cut at were after an ASCII letter, so 290 MB of Cyrillic took 2.4 GB."""
    text = "".join(words * 3000)
    pieces = list(documents.split_between_tokens(text[i : i + 1000] for i in range(0, len(text), 1000)))
    assert "".join(pieces) == text and max(map(len, pieces)) < 1100


@pytest.mark.parametrize("block", [1, 5, 40, 100_000])
def test_a_separator_ends_a_document(tmp_path, block, monkeypatch):
    monkeypatch.setattr(documents, "BLOCK_CHARS", block)
    texts = ["One day.\n\nThe end.", "Two.", "a long one " * 50 + "x", "four < five <|endof"]
    joined = "\n<|endoftext|>\n".join(texts[:2]) + "\n<|endoftext|>\r\n\n<|endoftext|>"
    joined += "<|endoftext|>\n".join(texts[2:])
    (tmp_path / "stories.txt").write_bytes(joined.encode() + b"\n<|endoftext|>\n")
    found = []
    for text, starts in documents.read_txt(tmp_path / "stories.txt", "", "<|endoftext|>"):
        found += [text] if starts else []
        if not starts:
            found[-1] += text
    assert found == texts


def test_stories_between_separators_become_documents_and_a_note_says_how(tmp_path, capsys):
    stories = [f"Once upon a time there were {i} bears." for i in range(40)]
    path = tmp_path / "TinyStories-valid.txt"
    path.write_text("\n<|endoftext|>\n".join(stories))
    make(tmp_path, str(path), name="one")
    assert '--separator "<|endoftext|>"' in capsys.readouterr().out
    folder = make(tmp_path, str(path), name="out", separator="<|endoftext|>")
    assert is_split(folder, [stories], [path]) and "--separator" not in capsys.readouterr().out
    with pytest.raises(UserError, match=r"separator was '<\|endoftext\|>' and is now ''\."):
        make(tmp_path, str(path), name="out")


def test_json_is_taken_for_json_lines_as_in_c4(tmp_path):
    texts = random_documents(20)
    write_jsonl(tmp_path / "a.jsonl.gz", texts)
    (tmp_path / "c4-train.00000-of-01024.json.gz").write_bytes((tmp_path / "a.jsonl.gz").read_bytes())
    write_jsonl(tmp_path / "b.json", texts)
    paths = [tmp_path / "b.json", tmp_path / "c4-train.00000-of-01024.json.gz"]
    assert is_split(make(tmp_path, *map(str, paths)), [texts, texts], paths)


def test_globs_are_sorted_and_the_order_given_is_kept(tmp_path):
    texts = random_documents(9)
    for i in (2, 0, 1):
        write_jsonl(tmp_path / f"{i}.jsonl", texts[3 * i : 3 * i + 3])
    folder = make(tmp_path, str(tmp_path / "2.jsonl"), str(tmp_path / "[01].jsonl"), shard_size=1000)
    assert is_split(folder, [texts[6:], texts[:3], texts[3:6]], tmp_path.glob("*.jsonl"), shard_size=1000)


def test_python_docs_are_the_documentation_of_this_python(tmp_path):
    folder = prepare(Options(dataset="python-docs", tokenizer="bytes", out_dir=str(tmp_path / "docs")))
    tokens = read(folder)
    meta = json.loads((tmp_path / "docs" / "meta.json").read_text())
    assert 1e6 < len(tokens) == meta["tokens"] and np.count_nonzero(tokens == 256) == meta["documents"] > 300
    text = bytes(np.where(tokens == 256, 0, tokens).astype(np.uint8)).decode()
    # a piece of the language reference, and a docstring of the library
    assert "statement is used for conditional execution" in text and json.dumps.__doc__.splitlines()[0] in text


def test_docstrings_stand_under_what_they_document_in_an_order_of_their_own(tmp_path, monkeypatch):
    (tmp_path / "pack" / "tests").mkdir(parents=True)
    source = '"A package."\nprint("never run")\nclass C:\n  "Its class."\n  def f(self, *, a=1):\n    "Does."\n'
    (tmp_path / "pack" / "__init__.py").write_text(source)
    (tmp_path / "pack" / "tests" / "t.py").write_text('"""left out"""')
    (tmp_path / "old.py").write_text("print 1")  # not Python 3
    (tmp_path / "silent.py").write_text("x = 1")
    for i in range(5):
        (tmp_path / f"m{i}.py").write_text(f'"""Module {i}."""')
    monkeypatch.setattr(documents.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    monkeypatch.setattr("pydoc_data.topics.topics", {"if": "The if statement."})
    texts = documents.python_docs()
    package = "module pack\n\nA package.\n\nclass C\n\nIts class.\n\ndef f(self, *, a=1)\n\nDoes."
    assert sorted(texts) == sorted(["The if statement.", package, *(f"module m{i}\n\nModule {i}." for i in range(5))])
    walk = os.walk  # the order in which a disk lists its files does not matter
    monkeypatch.setattr(os, "walk", lambda root: ((at, folders, files[::-1]) for at, folders, files in walk(root)))
    assert documents.python_docs() == texts


# -----------------------------------------------------------------------------
# Shards


def test_shards_are_cut_as_the_docstring_says():
    def stream(*texts):
        for i, text in enumerate(texts):
            tokens = np.array([ord(char) for char in text], dtype=np.uint16)
            yield documents.Batch(0, i, [None]), tokens, np.array([len(text)])

    def cut(*texts, limit=99, skip=0):
        limited = fineweb.limit_tokens(stream(*texts), limit + skip, tqdm(disable=True))
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
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    lengths = [len(validation)] + [6000] * (len(files) - 2) + [len(training) % 6000]
    assert meta["shards"] == dict(zip(files, lengths)) and list(meta["shards"]) == files
    assert (meta["dataset"], meta["tokenizer"], meta["vocab_size"]) == ("input", "bytes", 257)
    assert (meta["documents"], meta["tokens"], meta["complete"]) == (30, len(tokens), True)
    # each is what np.save writes, to the byte
    np.save(tmp_path / "saved.npy", training[:6000])
    assert (tmp_path / "saved.npy").read_bytes() == (tmp_path / "out" / files[1]).read_bytes()


@pytest.mark.parametrize("length, lengths", [(100, [10] * 10), (101, [11] * 9 + [2]), (2, [1, 1]), (1000, [100] * 10)])
def test_python_docs_within_one_shard_are_cut_into_tenths(tmp_path, length, lengths):
    """Their order is random, so the first tenth is like the rest."""
    with patched(documents, "python_docs", lambda: ["x" * (length - 1)]):
        folder = make(tmp_path, dataset="python-docs", shard_size=1000)
    assert list(json.loads((tmp_path / "out" / "meta.json").read_text())["shards"].values()) == lengths
    assert len(read(folder, "*_val_*")) == lengths[0]


@pytest.mark.parametrize("length, lengths", [(100, [9, 91]), (101, [9, 92]), (2, [1, 1]), (2000, [181, 1000, 819])])
def test_of_one_document_the_end_validates(tmp_path, length, lengths):
    (tmp_path / "a.txt").write_text("x" * (length - 1))
    folder = make(tmp_path, str(tmp_path / "a.txt"), shard_size=1000)
    assert list(json.loads((tmp_path / "out" / "meta.json").read_text())["shards"].values()) == lengths
    assert len(read(folder, "*_val_*")) == lengths[0]


@pytest.mark.parametrize("kind", ["documents", "one text"])
def test_own_text_validates_on_a_sample_of_all_of_it(tmp_path, kind, capsys):
    """It was the first shard: of a corpus of 338,000 tokens, 286,000 became validation."""
    texts = [f"{i} " * random.Random(i).randrange(1, 1600) for i in range(400)]
    if kind == "documents":
        path = write_jsonl(tmp_path / "a.jsonl", texts)
    else:
        path = str(tmp_path / "a.txt")
        Path(path).write_text(" ".join(texts))
    folder = make(tmp_path, path, shard_size=150_000)
    validation, training = read(folder, "*_val_*"), read(folder, "*_train_*")
    total = len(validation) + len(training)
    assert total // 20 < len(validation) <= total // 10
    numbers = [int(n) for n in bytes(validation[validation < 256].astype(np.uint8)).split()[1:-1]]
    assert np.histogram(numbers, 8, (0, 400))[0].all()  # some from every eighth of the text
    said = capsys.readouterr().out
    assert f"{len(training):,} tokens to train on and {len(validation):,} to validate on" in said
    assert "shards, the last one with what was left; " in said


def test_a_large_corpus_validates_on_no_more_than_a_shard_and_still_on_all_of_it(tmp_path):
    texts = [f"{i:03d} " * 20 for i in range(1000)]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    folder = make(tmp_path, path, shard_size=2000)
    assert is_split(folder, [texts], [path], shard_size=2000)
    validation = read(folder, "*_val_*")
    numbers = {int(n) for n in bytes(validation[validation < 256].astype(np.uint8)).split()}
    assert len(validation) <= 2000 and min(numbers) < 100 and max(numbers) > 900


def test_max_tokens_ends_in_the_middle_of_a_document(tmp_path):
    texts = random_documents(30)
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    folder = make(tmp_path, path, shard_size=1000, max_tokens=2345)
    assert is_split(folder, [texts], [path], shard_size=1000, limit=2345) and len(read(folder)) == 2345


@needs_shared
def test_docs_edu_is_what_an_independent_loop_makes_of_it(tmp_path):
    files = sorted(map(str, (SHARED / "docs_edu").glob("*.parquet")))
    folder = make(tmp_path, *files, tokenizer="gpt2", shard_size=1_000_000)
    got = read(folder)
    assert len(got) == 9_641_889 and np.count_nonzero(got == 50256) == 1966
    # every eighth document, found by its <|endoftext|>
    enc, starts = tiktoken.get_encoding("gpt2"), [*np.flatnonzero(got == 50256), len(got)]
    texts = [text for file in files for text in pq.read_table(file)["text"].to_pylist()]
    found = [enc.decode(got[start + 1 : stop].tolist()) for start, stop in zip(starts, starts[1:])]
    assert sorted(found) == sorted(texts)
    for i in range(0, len(texts), 8):
        assert got[starts[i] + 1 : starts[i + 1]].tolist() == enc.encode_ordinary(found[i])


# -----------------------------------------------------------------------------
# Cores, kills, faults


def test_neither_cores_nor_batches_nor_spawn_change_a_byte(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", random_documents(200))
    for name, num_proc, chars in (("one", 1, 2**19), ("two", 2, 5000), ("five", 5, 100)):
        with patched(documents, "BATCH_CHARS", chars):
            make(tmp_path, path, name=f"{name}/out", num_proc=num_proc, shard_size=7000)
    code = (
        "import multiprocessing, fineweb; multiprocessing.set_start_method('spawn', force=True); "
        f"fineweb.prepare(fineweb.Options(input=({path!r},), tokenizer='bytes', shard_size=7000, "
        f"out_dir={str(tmp_path / 'spawn/out')!r}))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    one = listing(tmp_path / "one")
    assert len(one) > 5
    assert listing(tmp_path / "two") == one and listing(tmp_path / "five") == one and listing(tmp_path / "spawn") == one


def row_groups(tmp_path, monkeypatch):
    """A parquet file whose row groups are read by the cores that tokenize them, and its documents."""
    monkeypatch.setattr(documents, "BATCH_CHARS", 1000)  # seven documents have more
    texts = random_documents(200)
    path = write_parquet(tmp_path / "a.parquet", texts)
    assert len(documents.list_row_groups(path, path, "text")) == 29
    return path, texts


@pytest.mark.parametrize("max_threads", [8, 0])
def test_row_groups_are_read_where_they_are_tokenized_and_change_no_byte(tmp_path, monkeypatch, max_threads):
    """By threads and by processes; also from the middle of a row group on, where a shard ended when it was killed."""
    path, texts = row_groups(tmp_path, monkeypatch)
    lines = write_jsonl(tmp_path / "b.jsonl", texts)
    monkeypatch.setattr(fineweb, "MAX_THREADS", max_threads)
    whole = listing(make(tmp_path, path, lines, name="whole/out", shard_size=9000, num_proc=2))
    assert is_split(tmp_path / "whole" / "out", [texts, texts], [path, lines], shard_size=9000)
    for renames in (9, 30):
        options = Options(
            input=(path, lines), out_dir=str(tmp_path / f"{renames}/out"), tokenizer="bytes", shard_size=9000
        )
        assert run(prepare_and_die, options, renames, True, output=tmp_path / "output") == [-signal.SIGKILL]
        make(tmp_path, path, lines, name=f"{renames}/out", shard_size=9000, num_proc=2)
        assert listing(tmp_path / f"{renames}" / "out") == whole


@pytest.mark.parametrize("max_threads", [8, 0])
def test_a_damaged_row_group_is_one_line_wherever_it_is_read(tmp_path, monkeypatch, max_threads):
    path, _ = row_groups(tmp_path, monkeypatch)
    monkeypatch.setattr(fineweb, "MAX_THREADS", max_threads)
    content = bytearray(Path(path).read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(20).column(1).dictionary_page_offset
    content[start : start + 200] = bytes(200)
    Path(path).write_bytes(content)
    with pytest.raises(UserError, match="a.parquet is damaged"):
        make(tmp_path, path, shard_size=9000, num_proc=2)


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
    pieces = pickle.dumps([("x" * 100_000, True)])
    for received in (start[: len(start) // 2], start + pieces[:1000]):
        command = [sys.executable, "-c", "import fineweb; fineweb.serve()"]
        process = subprocess.run(command, cwd=ROOT, input=received, capture_output=True)
        assert (process.stderr, process.returncode) == (b"", 0)


@pytest.mark.parametrize("number, said", [(signal.SIGKILL, ""), (signal.SIGINT, "interrupted\n")])
def test_processes_do_not_outlive_the_one_that_started_them(tmp_path, number, said):
    path = write_jsonl(tmp_path / "a.jsonl", random_documents(1500, longest=3000))
    code = (
        "import fineweb; from plumbing import cli; fineweb.MAX_THREADS = 0\n"
        f"cli.run(lambda: fineweb.main(['--input', {path!r}, '--tokenizer', 'bytes', '--num-proc', '2', "
        f"'--shard-size', '1000000', '--out-dir', {str(tmp_path / 'out')!r}]))"
    )
    (tmp_path / "pickle.py").write_text("raise ImportError('what lies in the current folder is not for fineweb.py')")
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while not (tmp_path / "out" / "out_train_000001.npy").exists():
        assert process.poll() is None
        time.sleep(0.01)
    threads = Path(f"/proc/{process.pid}/task").glob("*/children")
    children = [child for path in threads for child in path.read_text().split()]
    if number == signal.SIGINT:  # a terminal sends it to all of them
        os.killpg(process.pid, number)
    else:
        process.kill()
    lines = process.communicate(timeout=60)[1].splitlines(keepends=True)
    assert "".join(line for line in lines if "tok/s" not in line and line.strip()) == said
    end = time.monotonic() + 30
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < end, f"still there: {children}"
        time.sleep(0.05)
    assert len(children) >= 2


def prepare_and_die(options, renames, after):
    """Die by SIGKILL at the `renames`-th file that gets its name, before or after it has."""
    documents.BATCH_CHARS = documents.BLOCK_CHARS = 1000
    replace = os.replace

    def replace_or_die(*args):
        nonlocal renames
        renames -= 1
        if renames == 0 and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*args)
        if renames == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    os.replace = replace_or_die
    prepare(options)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "txt"])
def test_killed_at_any_rename_the_same_command_ends_with_the_same_bytes(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(documents, "BLOCK_CHARS", 1000)
    texts = random_documents(40) + ["one long document " * 300]
    if kind == "txt":
        (tmp_path / "a.txt").write_text("\n".join(texts))
        paths = (str(tmp_path / "a.txt"),)
    else:
        writer = write_jsonl if kind == "jsonl" else write_parquet
        paths = (writer(tmp_path / f"a.{kind}", texts[:20]), writer(tmp_path / f"b.{kind}", texts[20:]))
    whole = listing(make(tmp_path, *paths, name="whole/out", shard_size=9000))
    # meta.json and the tokenizer's two files, then for every training shard the validation sample, itself and meta.json
    renames = 3 * (len(whole) - 4) + 3
    for count in range(1, renames + 1):
        options = Options(input=paths, out_dir=str(tmp_path / f"{count}" / "out"), tokenizer="bytes", shard_size=9000)
        status = run(prepare_and_die, options, count, count % 2 == 0, output=tmp_path / "output")
        assert status == [-signal.SIGKILL], (tmp_path / "output").read_text()
        make(tmp_path, *paths, name=f"{count}/out", shard_size=9000)
        assert listing(tmp_path / f"{count}" / "out") == whole


def test_the_script_killed_at_work_goes_on_where_it_was(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", random_documents(1500, longest=3000))
    args = ["--input", path, "--tokenizer", "bytes", "--shard-size", "200000", "--num-proc", "1"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "fineweb.py"), *args, "--out-dir", "out"], cwd=tmp_path, stderr=subprocess.DEVNULL
    )
    while not (tmp_path / "out" / "out_train_000003.npy").exists():
        assert process.poll() is None
        time.sleep(0.005)
    process.kill()
    process.wait()
    before = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "out").glob("*_00000[12].npy")}
    assert script(*args, "--out-dir", "out", cwd=tmp_path).returncode == 0
    assert script(*args, "--out-dir", "other/out", cwd=tmp_path).returncode == 0
    assert listing(tmp_path / "out") == listing(tmp_path / "other" / "out")
    assert {file.name: file.stat().st_mtime_ns for file in (tmp_path / "out").glob("*_00000[12].npy")} == before


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


def test_bad_lines_can_be_mended_and_the_run_goes_on(tmp_path, capsys):
    texts = random_documents(60)
    path = Path(write_jsonl(tmp_path / "a.jsonl", texts))
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:50], lines[50][:-3], *lines[51:]]))
    with patched(documents, "BATCH_CHARS", 1000), pytest.raises(UserError, match="Line 51"):
        make(tmp_path, str(path), shard_size=5000, num_proc=1)
    assert (tmp_path / "out" / "out_val_000000.npy").exists()
    path.write_text("\n".join(lines))
    folder = make(tmp_path, str(path), shard_size=5000)
    assert is_split(folder, [texts], [path], shard_size=5000)
    # meta.json tells of the file as it is now, else the same command would take it for another one
    before = listing(folder)
    make(tmp_path, str(path), shard_size=5000)
    assert "is complete" in capsys.readouterr().out and listing(folder) == before


def test_a_folder_that_another_process_works_on_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", random_documents(20))
    with lock_folder(tmp_path / "out"):
        with pytest.raises(UserError, match="in use by process"):
            make(tmp_path, path)
    with lock_folder(make(tmp_path, path)):  # what is complete can be used by several at once
        make(tmp_path, path)


def test_a_bar_shows_how_far_a_download_is(tmp_path, server):
    server.files = {"/a.jsonl": (json.dumps({"text": "x" * 5000}) + "\n").encode() * 3}
    shown = []

    class Bar(tqdm):
        def __init__(self, *args, **options):
            super().__init__(*args, **options, file=io.StringIO())
            shown.append(self)

    with patched(documents, "tqdm", Bar):
        make(tmp_path, f"{server.url}/a.jsonl")
    assert [(bar.total, bar.n) for bar in shown] == [(len(server.files["/a.jsonl"]),) * 2]


def limited(options, size):
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    prepare(options)


def test_a_disk_that_refuses_leaves_whole_shards_and_one_line(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", random_documents(60))
    # 4,000 tokens are 8,128 bytes; the limit on a file's size stands for a full disk
    options = Options(input=(path,), out_dir=str(tmp_path / "out"), tokenizer="bytes", shard_size=4000)
    assert run(limited, options, 8000, output=tmp_path / "output") == [2]
    assert "File too large" in (tmp_path / "output").read_text()
    assert not list((tmp_path / "out").glob("*_train_*")) and not list((tmp_path / "out").glob("*.part"))
    prepare(options)
    assert listing(tmp_path / "out") == listing(make(tmp_path, path, name="other/out", shard_size=4000))


def test_a_disk_that_fills_up_later_keeps_the_shards_before(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", random_documents(60))
    fsync, calls = os.fsync, []

    def full(number):
        calls.append(number)
        if len(calls) > 11:  # meta.json and the tokenizer's two files (twice), then three files for each training shard
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(number)

    with patched(os, "fsync", full), pytest.raises(UserError, match="No space left"):
        make(tmp_path, path, shard_size=4000)
    before = listing(tmp_path / "out")
    assert len(before) == 6 and not any(name.endswith(".part") for name in before)
    make(tmp_path, path, shard_size=4000)
    assert listing(tmp_path / "out") == listing(make(tmp_path, path, name="other/out", shard_size=4000))
    after = listing(tmp_path / "out")
    assert all(after[name] == digest for name, digest in before.items() if "_train_" in name)


def test_parts_are_disjoint_and_their_union_is_the_whole(tmp_path):
    texts = random_documents(50)
    for i in range(5):
        write_jsonl(tmp_path / f"{i}.jsonl", texts[10 * i : 10 * i + 10])
    for part in ("1/3", "2/3", "3/3"):  # as `seq 3` counts; 0/3 is 3/3
        make(tmp_path, str(tmp_path / "*.jsonl"), shard_size=3000, part=part)
    make(tmp_path, str(tmp_path / "*.jsonl"), shard_size=3000, part="0/3")
    folder = tmp_path / "out"
    metas = [json.loads((folder / f"meta.part-{i}-of-3.json").read_text()) for i in range(3)]
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
    with pytest.raises(UserError, match="in 3 part.s., and --part now asks for 2"):
        make(tmp_path, str(tmp_path / "*.jsonl"), shard_size=3000, part="0/2")
    assert len(list(folder.glob("*_val_*"))) == 1 and tokenizer.folder_encoding(folder).name == "bytes"


def test_parts_made_at_the_same_time_are_those_made_in_turn(tmp_path):
    for i in range(4):
        write_jsonl(tmp_path / f"{i}.jsonl", random_documents(20, seed=i))

    def make_part(name, part):
        make(tmp_path, str(tmp_path / "*.jsonl"), name=name, shard_size=3000, part=part, num_proc=1)

    with ThreadPoolExecutor(2) as executor:
        list(executor.map(make_part, ["a/out"] * 2, ["0/2", "1/2"]))
    for part in ("0/2", "1/2"):
        make_part("b/out", part)
    assert listing(tmp_path / "a") == listing(tmp_path / "b")


def test_importing_runs_nothing(tmp_path):
    code = (
        "import socket, sys\n"
        "def refuse(*args): raise OSError('no network')\n"
        "socket.socket.connect = socket.create_connection = refuse\n"
        "import fineweb, tokenizer\n"
        "slow = {'datasets', 'transformers', 'torch', 'pyarrow', 'huggingface_hub', 'tokenizers'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    tmp_path.chmod(0o555)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    tmp_path.chmod(0o755)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "") and not list(tmp_path.iterdir())


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    peaks = []
    for times in (1, 4):
        for i in range(times):
            write_jsonl(tmp_path / f"{i}.jsonl", random_documents(1200, longest=4000))
        code = (
            "import resource, fineweb; "
            f"fineweb.prepare(fineweb.Options(input=({str(tmp_path / '*.jsonl')!r},), tokenizer='bytes', num_proc=2, "
            f"shard_size=1_000_000, out_dir={str(tmp_path / f'out{times}')!r})); "
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
        peaks.append(int(done.stdout.split()[-1]))
    assert peaks[1] < 1.15 * peaks[0], peaks


# -----------------------------------------------------------------------------
# Downloads


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
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files, server.asked, server.flaky = {}, [], ""
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def hub(server):
    """The server as the hub: what `python fineweb.py` sees when HF_ENDPOINT names it."""
    server.env = {"HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    server.env |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    return server


@pytest.mark.parametrize("flaky", ["status", "short"])
def test_urls_are_fetched_again_when_the_network_fails_and_removed_after(tmp_path, server, flaky):
    texts = random_documents(40)
    write_jsonl(tmp_path / "a.jsonl.gz", texts[:20])
    write_parquet(tmp_path / "x.parquet", texts[20:30])
    write_parquet(tmp_path / "y.parquet", texts[30:])
    files = {"/a.jsonl.gz": "a.jsonl.gz", "/x/b.parquet": "x.parquet", "/y/b.parquet": "y.parquet"}
    server.files = {path: (tmp_path / name).read_bytes() for path, name in files.items()}
    server.flaky = flaky
    with patched(documents, "RETRY_SECONDS", 0.01):
        urls = [f"{server.url}{path}" for path in files]
        folder = make(tmp_path, urls[0] + "?download=1", *urls[1:], shard_size=5000)
    assert is_split(folder, [texts[:20], texts[20:30], texts[30:]], [], shard_size=5000)
    assert all(server.asked.count(path) == 2 for path in files)
    assert all(re.search(r"\.npy$|^meta.json$|^tokenizer.tiktoken", name) for name in os.listdir(folder))


def test_a_download_is_whole_or_not_there(tmp_path, server):
    server.files, path = {"/a.bin": b"content" * 1000}, tmp_path / "new" / "a.bin"
    server.flaky = "short"
    with patched(documents, "RETRY_SECONDS", 0.01):
        with pytest.raises(UserError, match="ended after 3,500 of 7,000 bytes. Call a friend."):
            documents.download(f"{server.url}/a.bin", str(path), "Call a friend.", attempts=1)
        assert not any(path.parent.iterdir())
        documents.download(f"{server.url}/a.bin", str(path), "")
    assert path.read_bytes() == server.files["/a.bin"]
    # what the disk refuses is not asked for again
    with patched(os, "fsync", full_disk), pytest.raises((UserError, OSError), match="No space left"):
        documents.download(f"{server.url}/a.bin", str(path), "")
    assert len(server.asked) == 3 and path.read_bytes() == server.files["/a.bin"]


def test_a_url_that_is_not_there_is_one_line_and_no_folder(tmp_path, server):
    with pytest.raises(UserError, match="404"):
        make(tmp_path, f"{server.url}/missing.jsonl")
    assert server.asked == ["/missing.jsonl"]  # asked once: it would not come


def test_fineweb_edu_comes_file_by_file_from_the_hub(tmp_path, hub):
    repo, commit = "HuggingFaceFW/fineweb-edu", "c" * 40
    texts, tree = random_documents(60), []
    for i in range(3):
        write_parquet(tmp_path / "x.parquet", texts[20 * i : 20 * i + 20])
        path, content = f"sample/10BT/{i:03d}_00000.parquet", (tmp_path / "x.parquet").read_bytes()
        hub.files[f"/datasets/{repo}/resolve/{commit}/{path}"] = content
        tree.append({"type": "file", "path": path, "size": len(content), "oid": "0" * 40})
    hub.files[f"/api/datasets/{repo}"] = json.dumps({"id": repo, "sha": commit, "siblings": []}).encode()
    hub.files[f"/api/datasets/{repo}/tree/{commit}/sample/10BT"] = json.dumps(tree[::-1]).encode()
    hub.flaky = "status"
    tokens = as_bytes(texts)
    args = ["--tokenizer", "bytes", "--shard-size", "7000", "--max-tokens", len(tokens) - 100]
    done = script(*args, cwd=tmp_path, **hub.env)
    assert done.returncode == 0, done.stderr
    assert "minutes" in done.stdout  # how long it will take
    folder = tmp_path / "edu_fineweb10B"
    assert np.array_equal(read(folder), tokens[:-100])
    count = -(-len(tokens[100:]) // 7000)
    shards = ["edufineweb_val_000000.npy"] + [f"edufineweb_train_{i:06d}.npy" for i in range(1, count)]
    assert sorted(os.listdir(folder)) == sorted([*shards, "meta.json", *TOKENIZER])  # and no parquet
    # what is complete needs no network
    asked = len(hub.asked)
    assert "is complete" in script(*args, cwd=tmp_path, **hub.env).stdout and len(hub.asked) == asked


def test_ready_made_shards_come_whole_or_again(tmp_path, hub):
    rng = np.random.default_rng(0)
    shards = {}
    for file in ["val_000000", "train_000001", "train_000002"]:
        tokens = rng.integers(0, 50257, 1000, dtype=np.uint16)
        tokens[0] = 50256
        header = np.zeros(256, dtype="<i4")
        header[:3] = 20240520, 1, len(tokens)
        shards[f"finewebedu_{file}.bin"] = header.tobytes() + tokens.tobytes()
    prefix = "/datasets/kjj0/finewebedu10B-gpt2/resolve/main/"
    hub.files = {prefix + file: content for file, content in shards.items()}
    hub.flaky = "short"
    done = script("--pretokenized", 2, cwd=tmp_path, **hub.env)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "edu_fineweb10B"
    assert {path.name: path.read_bytes() for path in folder.glob("*.bin")} == shards
    assert set(os.listdir(folder)) - set(TOKENIZER) == {*shards, "meta.json"}
    # a machine without a network and without tiktoken's cache can train on them, if this one has the tables
    assert (folder / "tokenizer.tiktoken").exists() == (SHARED / "tiktoken_cache").exists()
    assert ("note: The tokenizer" in done.stdout) != (folder / "tokenizer.tiktoken").exists()
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["shards"] == dict.fromkeys(shards, 1000) and meta["tokens"] == 3000 and meta["complete"]
    # one more shard than there is: said, and what is there stays
    done = script("--pretokenized", 3, cwd=tmp_path, **hub.env)
    assert done.returncode == 2 and "finewebedu_train_000003.bin" in done.stderr and "Traceback" not in done.stderr
    assert {path.name: path.read_bytes() for path in folder.glob("*.bin")} == shards


# -----------------------------------------------------------------------------
# Bad input: one line, status 2, nothing written


def bad_inputs(tmp_path):
    """{name: (arguments, words that the line must have)}"""
    texts = random_documents(5)
    good, other = (write_jsonl(tmp_path / f"{name}.jsonl", texts) for name in ("good", "other"))
    parquet = write_parquet(tmp_path / "p.parquet", texts, column="content")
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n\n{"text": \n')
    (tmp_path / "list.jsonl").write_text('{"text": "a"}\n["b"]\n')
    (tmp_path / "number.jsonl").write_text('{"text": 3}\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "link.txt").symlink_to(tmp_path / "nowhere.txt")
    lists = {"lists": [["a"]], "maps": [[("a", "b")]], "good": ["c"]}
    types = {"lists": pa.list_(pa.string()), "maps": pa.map_(pa.string(), pa.string()), "good": pa.string()}
    nested = tmp_path / "nested.parquet"
    pq.write_table(pa.table({name: pa.array(lists[name], types[name]) for name in lists}), nested)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "cut.parquet").write_bytes(Path(parquet).read_bytes()[:-20])
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "abc"}\n' * 99)[:-9])
    (tmp_path / "a.csv").write_text("text\n")
    (tmp_path / "a.tiktoken").write_text("hello")
    big = tmp_path / "big.tiktoken"
    ranks = {bytes([i]): i for i in range(256)} | {i.to_bytes(4, "big"): i for i in range(256, 65536)}
    eot = {"<|endoftext|>": 65536}
    parts = dict(pat_str="(?s:.)", mergeable_ranks=ranks, special_tokens=eot)
    tokenizer.write_encoding(tiktoken.Encoding("big", **parts), big)
    (tmp_path / "file").write_text("")
    for name in ("taken", "foreign", "strange"):
        (tmp_path / name).mkdir()
    (tmp_path / "foreign" / "x_train_000001.npy").write_text("")
    (tmp_path / "strange" / "meta.json").write_text("{}")
    make(tmp_path, good, name="taken")
    inputs = {
        "missing column": (["--input", parquet], ["text", "content"]),
        "column of numbers": (["--input", parquet, "--text-column", "id"], ["int64"]),
        "column of lists": (["--input", nested, "--text-column", "lists"], ["list<", "--text-column: good."]),
        "column of maps": (["--input", nested, "--text-column", "maps"], ["map<", "--text-column: good."]),
        "a link to nowhere": (["--input", tmp_path / "link.txt"], ["Could not open", "link.txt"]),
        "empty name of a folder": (["--input", good, "--out-dir", ""], ["--out-dir is empty"]),
        "malformed JSON": (["--input", tmp_path / "broken.jsonl"], ["broken.jsonl", "Line 3"]),
        "no object": (["--input", tmp_path / "list.jsonl"], ["list.jsonl", "Line 2"]),
        "no text": (["--input", tmp_path / "number.jsonl"], ["Line 1", "text"]),
        "no documents": (["--input", tmp_path / "empty.jsonl"], ["contains no text"]),
        "empty text": (["--input", tmp_path / "empty.txt"], ["contains no text"]),
        "not UTF-8": (["--input", tmp_path / "latin.txt"], ["latin.txt", "UTF-8"]),
        "truncated parquet": (["--input", tmp_path / "cut.parquet"], ["cut.parquet"]),
        "truncated gzip": (["--input", tmp_path / "cut.jsonl.gz"], ["cut.jsonl.gz"]),
        "unknown kind": (["--input", tmp_path / "a.csv"], [".parquet"]),
        "missing file": (["--input", tmp_path / "none*.txt"], ["none*.txt"]),
        "a folder without text": (["--input", tmp_path / "foreign"], ["No file matches", ".jsonl"]),
        "broken tokenizer": (["--input", good, "--tokenizer", tmp_path / "a.tiktoken"], ["a.tiktoken"]),
        "unknown tokenizer": (["--input", good, "--tokenizer", "gpt3"], ["gpt2"]),
        "large tokenizer": (["--input", good, "--tokenizer", big], ["65,537", "65,536"]),
        "unknown data set": (["--dataset", "python-doc"], ["python-docs"]),
        "unknown flag": (["--shard-sizes", 3], ["--shard-size"]),
        "bad counts": (["--shard-size", 0, "--max-tokens", -1], ["--shard-size is 0", "--max-tokens is -1"]),
        "bad part": (["--part", "5/4"], ["5/4", "0/4"]),
        "part without a file": (["--input", good, "--part", "0/4"], ["0/4"]),
        "another data set": (["--dataset", "python-docs", "--out-dir", tmp_path / "taken"], ["input", "python-docs"]),
        "another file": (["--input", other, "--out-dir", tmp_path / "taken"], ["good.jsonl", "other.jsonl"]),
        "another tokenizer": (["--tokenizer", "bytes+chat", "--input", good, "--out-dir", tmp_path / "taken"], ["+c"]),
        "another shard size": (["--input", good, "--out-dir", tmp_path / "taken", "--shard-size", 7], ["shard_size"]),
        "shards of unknown origin": (["--input", good, "--out-dir", tmp_path / "foreign"], ["meta.json"]),
        "a strange meta.json": (["--input", good, "--out-dir", tmp_path / "strange"], ["strange"]),
        "a file for a folder": (["--input", good, "--out-dir", tmp_path / "file"], ["file"]),
        "no network": ([], ["--dataset python-docs", "--input"]),
        "no network for ready-made shards": (["--pretokenized", 1, "--tokenizer", "gpt2"], ["val_000000.bin"]),
        "no network for a URL": (["--input", "http://127.0.0.1:9/a.txt", "--num-proc", 1], ["127.0.0.1:9"]),
    }
    for number, (args, _) in enumerate(inputs.values()):
        if "--tokenizer" not in args:
            args += ["--tokenizer", "bytes"]
        if "--out-dir" not in args:
            args += ["--out-dir", tmp_path / f"out{number}"]  # none finds what another has left
    return inputs


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("bad")
    cases = bad_inputs(tmp_path)
    before = listing(tmp_path)
    with patched(documents, "RETRY_SECONDS", 0.01):
        done = {name: refusal_of(fineweb.main, *args) for name, (args, _) in cases.items()}
    return cases, done, before == listing(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "missing column",
        "column of numbers",
        "column of lists",
        "column of maps",
        "a link to nowhere",
        "empty name of a folder",
        "malformed JSON",
        "no object",
        "no text",
        "no documents",
        "empty text",
        "not UTF-8",
        "truncated parquet",
        "truncated gzip",
        "unknown kind",
        "missing file",
        "a folder without text",
        "broken tokenizer",
        "unknown tokenizer",
        "large tokenizer",
        "unknown data set",
        "unknown flag",
        "bad counts",
        "bad part",
        "part without a file",
        "another data set",
        "another file",
        "another tokenizer",
        "another shard size",
        "shards of unknown origin",
        "a strange meta.json",
        "a file for a folder",
        "no network",
        "no network for a URL",
        "no network for ready-made shards",
    ],
)
def test_bad_input_is_one_line_and_status_2(refusals, name):
    cases, done, _ = refusals
    status, _, stderr = done[name]
    assert status == 2, stderr
    lines = [line for line in stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("error: "), stderr
    assert all(word in lines[0] for word in cases[name][1]), lines[0]


def test_bad_input_leaves_everything_as_it_was(refusals):
    assert refusals[2]


def test_the_real_script_leaves_with_status_2_and_one_line(tmp_path):
    done = script("--input", "none*.txt", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and "none*.txt" in done.stderr
    assert not any(tmp_path.iterdir())
