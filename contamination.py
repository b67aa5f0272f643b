"""Find evaluation examples in the training text: they inflate the score.

    python contamination.py --data edu_fineweb10B
    python contamination.py --data books --eval examples.jsonl

A HellaSwag example counts as found if the shards contain 13 of its tokens in a
row, from the context with any of its endings. The search compares 64-bit
hashes, and its memory use does not grow with the corpus.
"""

import os
import sys
from dataclasses import dataclass

sys.path.append(os.path.dirname(__file__))  # python -P and -I leave this folder out

from plumbing.cli import console, flags


@dataclass
class Options:
    data: str = "edu_fineweb10B"  # the folder of token shards to search
    eval: str = "hellaswag/hellaswag_val.jsonl"  # HellaSwag's examples: JSON lines with ctx and endings


if __name__ == "__main__":
    console.run(lambda: flags.parse(Options))  # --help and a mistyped flag need not wait for the imports

import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from plumbing.cli.console import UserError
from plumbing.data import tokenizers
from plumbing.data.readers import read_records
from plumbing.data.shards import Shard, check_meta, open_shards, read_meta, split_of
from plumbing.system.limits import num_cores

NGRAM = 13  # tokens in the shortest overlap that counts; GPT-3's contamination study takes 13 words
HASH_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that multiplying by it loses nothing modulo 2**64
TABLE_BITS = 27  # 128 MB of flags: with a million n-grams, 1 token in 100 passes and is looked up
BLOCK = 2**17  # tokens that a core searches at a time, few enough for its cache


def read_examples(path, enc):
    """[(line number, tokens)] of a HellaSwag file: the context with each ending."""
    if not os.path.exists(path):
        raise UserError(
            f"There is no file {path}. Download HellaSwag's examples with hellaswag.py, or name a file with --eval."
        )
    examples = []
    for number, place, example in read_records(path):
        context, endings = example.get("ctx"), example.get("endings")
        if not isinstance(context, str) or not isinstance(endings, list):
            raise UserError(f"{place} has no ctx or no list of endings. Fix or remove it.")
        for ending in endings:
            tokens = tokenizers.encode_text(enc, f"{context} {ending}")
            examples.append((number, tokens.astype(np.uint16)))
    return examples


def ngram_hashes(tokens):
    """(n,) uint16 -> (n - NGRAM + 1,) uint64: a polynomial hash of the n-gram at each position."""
    tokens = tokens.astype(np.uint64) + 1  # without it, leading zeros would not affect the hash
    hashes = tokens[: max(0, len(tokens) - NGRAM + 1)].copy()
    for i in range(1, NGRAM):
        hashes *= np.uint64(HASH_MULTIPLIER)  # wraps around
        hashes += tokens[i : i + len(hashes)]
    return hashes


def first_bits(hashes):
    return hashes >> np.uint64(64 - TABLE_BITS)


class Overlap(NamedTuple):
    """A stretch of tokens that an example shares with the shards."""

    length: int
    shard: Shard
    position: int  # in the shard, of its first n-gram
    tokens: np.ndarray


def search(
    shard: Shard, following: Shard | None, *, wanted: set[int], table: np.ndarray
) -> dict[int, tuple[Shard, int]]:
    """{hash: (shard, position)} of the `wanted` n-grams that begin in a shard; they may end in the `following` one.

    table: whether a wanted hash begins with these TABLE_BITS. It lets few others pass.
    """
    found = {}
    length = BLOCK + NGRAM - 1
    for start in range(0, len(shard), BLOCK):
        tokens = shard.read(start, length)
        if following and len(tokens) < length:
            tokens = np.append(tokens, following.read(0, NGRAM - 1))
        hashes = ngram_hashes(tokens)
        positions = np.flatnonzero(table[first_bits(hashes)])
        for ngram, position in zip(hashes[positions].tolist(), positions.tolist()):
            if ngram in wanted:
                found.setdefault(ngram, (shard, start + position))
    return found


def longest_overlaps(examples, found):
    """{line number: Overlap} of each example's longest stretch of n-grams in `found`."""
    longest = {}
    for number, tokens in examples:
        ngrams = ngram_hashes(tokens).tolist()
        start = 0  # of the current stretch
        for i, ngram in enumerate(ngrams):
            length = i + NGRAM - start
            if ngram not in found:
                start = i + 1
            elif number not in longest or length > longest[number].length:
                shard, position = found[ngrams[start]]
                longest[number] = Overlap(length, shard, position, tokens=tokens[start : i + NGRAM])
    return longest


def report(folder, path):
    """Print which examples in `path` occur in the shards in `folder`. Returns {line number: longest overlap}."""
    splits = {split_of(path.name) for path in Path(folder).glob("*")} - {None}
    shards = []
    for split in ("val", "train"):  # in the order of their text
        if split in splits or not splits:
            shards += open_shards(folder, split)
    meta = read_meta(folder)
    check_meta(folder, meta, shards)
    enc = tokenizers.folder_encoding(folder, meta.tokenizer)
    examples = read_examples(path, enc)
    if all(len(tokens) < NGRAM for _, tokens in examples):
        raise UserError(
            f"No example in {path} has {NGRAM} tokens or more. Give HellaSwag's validation file with --eval."
        )
    num_examples = len({number for number, _ in examples})
    print(f"{path}: {num_examples:,} examples")
    print(f"{folder}: {sum(map(len, shards)):,} tokens of {enc.name}", flush=True)
    if len(enc._mergeable_ranks) == 256:
        console.note(f"{NGRAM} bytes in a row are often the same by chance. A larger vocabulary tells more.")
    hashes = np.concatenate([ngram_hashes(tokens) for _, tokens in examples])
    table = np.zeros(2**TABLE_BITS, bool)
    table[first_bits(hashes)] = True
    search_shard = functools.partial(search, wanted=set(hashes.tolist()), table=table)
    found = {}
    with ThreadPoolExecutor(num_cores()) as executor:
        results = executor.map(search_shard, shards, [*shards[1:], None])
        title = console.plain(folder)
        for result in tqdm(results, total=len(shards), unit="shard", desc=title, delay=0.5):
            found = result | found  # the first place counts
    longest = longest_overlaps(examples, found)
    share = len(longest) / num_examples
    print(f"{len(longest)} of {num_examples} examples ({share:.2%}) share {NGRAM} or more tokens in a row")
    for number in sorted(longest, key=lambda number: longest[number].length, reverse=True)[:10]:
        overlap = longest[number]
        text = enc.decode(overlap.tokens)[:150]
        place = f"{overlap.shard.path.name} at {overlap.position:,}"
        print(f"  line {number}: {overlap.length} tokens, the first {NGRAM} of them in {place}: {text!r}")
    return {number: overlap.length for number, overlap in longest.items()}


def main(args=None):
    options = flags.parse(Options, args)
    report(options.data, options.eval)


if __name__ == "__main__":
    console.run(main, output_is_product=True)
