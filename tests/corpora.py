"""Texts, a tokenizer that is trained on some, and what shards of them must hold, worked by hand."""

import functools
import gzip
import itertools
import json
import math
import os
import pydoc_data.topics
import random
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tiktoken
import tokenizer
from fineweb import Options, prepare
from plumbing.data import tokenizers

from harness import die_at

# letters of many scripts, digits, blanks of every kind, signs, contractions, characters beyond 16 bits
COMMON = list(" \n\t\r  '\u2019sSdDtTlLvVeErR.,!?0123456789abcdefghijklmnopqrstuvwxyzABCDE")
RARE = list("\u017f\u212a\x00\x1c\x85\xa0\u180e\u200b\u2028\u3000\ufeff\u00e9\u0301\u0633\u093f\u65e5\u2167\u00bd")
RARE += list("\U0001f642\U0010ffff")


def odd_texts(count, seed=0):
    """Random strings, one character in ten from all of Unicode."""
    rng = random.Random(seed)
    anything = [chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000]
    pools = [COMMON] * 7 + [RARE] * 2 + [anything]
    return ["".join(rng.choice(rng.choice(pools)) for _ in range(rng.randrange(60))) for _ in range(count)]


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
    return np.array([token for text in texts for token in [256, *text.encode()]], dtype=np.uint16)


def plan_runs(files, num_bytes, shard_size=100_000_000, limit=math.inf):
    """[{split: its tokens}] for each run of whole rows, by a plain loop: `files` are lists of rows."""
    every = max(11, math.ceil(min(num_bytes, limit) / shard_size))
    runs, seen = [{"val": [], "train": []}], 0
    for number, row, text in ((i, j, text) for i, texts in enumerate(files) for j, text in enumerate(texts)):
        tokens = [256, *text.encode()]
        group, place = divmod(number + row, every)
        split = "val" if place == zlib.crc32(str(group).encode()) % 11 else "train"
        if runs[-1][split] and len(runs[-1][split]) + len(tokens) > shard_size:
            runs.append({"val": [], "train": []})
        runs[-1][split] += tokens
        seen += len(tokens)
        if seen >= limit:
            break
    if not all(any(run[split] for run in runs) for split in ("val", "train")):
        # about a tenth of the last ones, up to where a document starts if there are several
        tokens = runs[-1]["val"] + runs[-1]["train"]
        starts = [i for i, token in enumerate(tokens) if token == 256 and i]
        at = min(starts or [math.ceil(len(tokens) / 10)], key=lambda start: abs(start - math.ceil(len(tokens) / 10)))
        val, train = sorted([tokens[:at], tokens[at:]], key=len)
        runs[-1] = {"val": val, "train": train}
    return runs


def is_split(folder, files, paths, **options):
    """Whether the shards in `folder` are what `plan_runs` makes of the documents."""
    runs = plan_runs(files, sum(map(os.path.getsize, paths)), **options)
    for split, first in (("val", 0), ("train", 1)):
        expected = [run[split] for run in runs if run[split]]
        found = sorted(Path(folder).glob(f"*_{split}_*.npy"))
        if [path.stem[-6:] for path in found] != [f"{i:06d}" for i in range(first, first + len(expected))]:
            return False
        if not all(np.load(path).tolist() == tokens for path, tokens in zip(found, expected)):
            return False
    return True


def read(folder, pattern="*.npy"):
    """All tokens of a folder, validation last, read with numpy and nothing of ours."""
    files = sorted(Path(folder).glob(pattern))
    shards = [np.load(file, allow_pickle=False) for file in files]
    assert all(shard.dtype == np.uint16 and shard.ndim == 1 for shard in shards)
    return np.concatenate(shards)


def read_meta(folder, name="meta.json"):
    return json.loads(Path(folder, name).read_text(encoding="utf-8"))


def write_jsonl(path, texts):
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    return str(path)


def write_parquet(path, texts, column="text"):
    nested = [{"b": "not this"}] * len(texts)  # parquet calls this field a.b, as a column may be called, too
    pq.write_table(pa.table({"id": range(len(texts)), "a": nested, column: texts}), path, row_group_size=7)
    return str(path)


def die_at_rename(number, after=True):
    """Patch os.replace: the process dies by SIGKILL at the N-th file that gets its name, before or after it has."""
    count = itertools.count(1)
    last_act = (lambda replace, *args: replace(*args)) if after else (lambda *args: None)
    return die_at(os, "replace", lambda *args: next(count) == number, last_act)


def make(tmp_path, *inputs, name="out", **options):
    return prepare(
        Options(**{"input": tuple(map(str, inputs)), "out_dir": str(tmp_path / name), "tokenizer": "bytes"} | options)
    )
