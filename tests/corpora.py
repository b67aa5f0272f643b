"""Texts, a tokenizer that is trained on some, and what shards of them must hold, worked by hand."""

import csv
import functools
import itertools
import json
import os
import pydoc_data.topics
import random
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tiktoken
import tokenizer
from fineweb import Options, prepare
from plumbing.data import tokenizers

from harness import KILLED, die_at, patched, run

# letters of many scripts, digits, blanks of every kind, signs, contractions, characters beyond 16 bits
COMMON = list(" \n\t\r  '\u2019sSdDtTlLvVeErR.,!?0123456789abcdefghijklmnopqrstuvwxyzABCDE")
RARE = list("\u017f\u212a\x00\x1c\x85\xa0\u180e\u200b\u2028\u3000\ufeff\u00e9\u0301\u0633\u093f\u65e5\u2167\u00bd")
RARE += list("\U0001f642\U0010ffff")


def odd_texts(count, seed=0):
    """Random strings, one character in ten from all of Unicode."""
    rng = random.Random(seed)
    anything = [chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000]
    pools = [COMMON] * 7 + [RARE] * 2 + [anything]
    texts = []
    for _ in range(count):
        characters = [rng.choice(rng.choice(pools)) for _ in range(rng.randrange(60))]
        texts.append("".join(characters))
    return texts


@functools.cache
def corpus():
    """Text to learn from: part of the language reference that comes with Python, and odd texts."""
    return [text for _, text in sorted(pydoc_data.topics.topics.items())[:40]] + odd_texts(200, seed=1)


# GPT-4's pattern, as of a tokenizer that someone brings along: a sign may begin a word
GPT4 = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"""
GPT4 += r"""|\s*[\r\n]+|\s+(?!\S)|\s+"""


@functools.cache
def train_small(pattern):
    """A tokenizer of 1,000 ids, two of them special, which splits text by GPT-2's or GPT-4's pattern."""
    ranks = tokenizer.train(corpus(), 999)._mergeable_ranks
    pat_str = {"gpt2": tokenizers.FAST_GPT2, "gpt4": GPT4}[pattern]
    special = {"<|endoftext|>": 998, "<|pad|>": 999}
    return tiktoken.Encoding(f"small-{pattern}", pat_str=pat_str, mergeable_ranks=ranks, special_tokens=special)


TABLES = ["tokenizer.tiktoken", "tokenizer.tiktoken.json"]  # beside all shards
WORDS = ["the", "of", "a", "and", "cat's", "don't", "\u00fcber", "na\u00efve", "\u65e5\u672c", "\U0001f642"]
WORDS += ["3.14", "x=1", "\t", "\n\n", "<|endoftext|>"]


def random_texts(count, seed=0, longest=300):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randrange(1, longest))) for _ in range(count)]


def as_bytes(texts):
    """What the byte tokenizer must make of documents: 256, then the bytes of UTF-8, each document in turn."""
    tokens = []
    for text in texts:
        tokens += [256, *text.encode()]
    return np.array(tokens, dtype=np.uint16)


def documents(folder, split):
    """The documents in a split of the byte tokenizer, whose shards must each begin with one."""
    found = []
    for path in sorted(Path(folder).glob(f"*_{split}_*.npy")):
        tokens = np.load(path)
        starts = np.flatnonzero(tokens == 256)
        assert starts[0] == 0
        for ids in np.split(tokens, starts[1:]):
            found.append(bytes(ids[1:].astype(np.uint8)).decode())
    return found


def holds(folder, texts):
    """Whether the shards hold these documents, each whole in one of the splits, in the order of the input."""
    train = documents(folder, "train")
    val = documents(folder, "val")
    for text in texts:
        for left in (train, val):
            if left[:1] == [text]:
                del left[0]
                break
        else:
            return False
    return train == val == []


def read(folder, pattern="*.npy"):
    """All tokens of a folder, validation last, read with numpy and nothing of ours."""
    return np.concatenate([np.load(file) for file in sorted(Path(folder).glob(pattern))])


def read_meta(folder, name="meta.json"):
    return json.loads(Path(folder, name).read_text(encoding="utf-8"))


def write(path, text):
    """Write a text file. Returns its path."""
    Path(path).write_text(text, encoding="utf-8")
    return Path(path)


def write_rows(path, rows):
    """Write these rows in the format that the name of the file says. Returns its path."""
    path = Path(path)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    elif path.suffix in (".csv", ".tsv"):
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, "excel" if path.suffix == ".csv" else "excel-tab")
            writer.writerow(rows[0])
            for row in rows:
                writer.writerow(json.dumps(value) if isinstance(value, list) else value for value in row.values())
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    else:
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def write_texts(path, texts):
    return write_rows(path, [{"text": text} for text in texts])


def die_at_rename(number, after=True):
    """Patch os.replace: the process dies by SIGKILL at the N-th file that gets its name, before or after it has."""
    count = itertools.count(1)
    last_act = (lambda replace, *args: replace(*args)) if after else (lambda *args: None)
    return die_at(os, "replace", lambda *args: next(count) == number, last_act)


def renamed_by(function, *args, **options):
    """The names of the files that get their name while function(*args) runs, in order."""
    names = []
    replace = os.replace

    def record(part, path):
        names.append(Path(path).name)
        replace(part, path)

    with patched(os, "replace", record):
        function(*args, **options)
    return names


def call_and_die(number, function, *args):
    with die_at_rename(number, after=number % 2 == 0):
        function(*args)
    os.kill(os.getpid(), signal.SIGKILL)


def kill_again_and_again(function, *args):
    """Run function(*args) in a process that is killed at the first file that gets its name, then in one that is killed
    at its second one, and so on."""
    for number in range(1, 9):
        run(call_and_die, number, function, *args, ends=[KILLED])


def make_here(*inputs, name="out", **options):
    """Make shards of these files in the current folder, with the byte tokenizer. Returns their folder."""
    settings = dict(input=tuple(map(str, inputs)), out_dir=str(name), tokenizer="bytes")
    return Path(prepare(Options(**settings | options)))
