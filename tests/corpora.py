"""Texts, a tokenizer that is trained on some, and what shards of them must hold, worked by hand."""

import functools
import gzip
import json
import os
import pydoc_data.topics
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tiktoken
import tokenizer
from fineweb import Options, prepare
from plumbing.data import tokenizers

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


def split_texts(files, num_bytes, shard_size=100_000_000, limit=10**9):
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
    """Whether the shards in `folder` are what `split_texts` makes of the documents."""
    validation, training = split_texts(files, sum(map(os.path.getsize, paths)), **options)
    same = np.array_equal(read(folder, "*_val_*"), validation) and np.array_equal(read(folder, "*_train_*"), training)
    return same and 0 < len(validation) <= max(1, (len(training) + len(validation)) // 10)


def read(folder, pattern="*.npy"):
    """All tokens of a folder in the order of the shards' numbers, read with numpy and nothing of ours."""
    files = sorted(Path(folder).glob(pattern), key=lambda path: path.stem[-6:])
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


def make(tmp_path, *inputs, name="out", **options):
    return prepare(Options(**{"input": inputs, "out_dir": str(tmp_path / name), "tokenizer": "bytes"} | options))
