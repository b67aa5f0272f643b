"""Which evaluation examples occur in the training text? Training on them would inflate the score.

    python contamination.py --data edu_fineweb10B
    python contamination.py --data books --eval examples.jsonl

The shards of a folder are searched for 13-grams of tokens from HellaSwag's examples (the context with each
of its endings), by hashes of 64 bits. Memory does not grow with the corpus.
"""

import os
import sys
from dataclasses import dataclass

sys.path.append(os.path.dirname(__file__))  # which python -P and -I leave out

from plumbing.cli import console, flags


@dataclass
class Options:
    data: str = "edu_fineweb10B"  # folder of token shards to search
    eval: str = "hellaswag/hellaswag_val.jsonl"  # HellaSwag's examples: JSON lines with ctx and endings


if __name__ == "__main__":
    console.run(lambda: flags.parse(Options))  # --help and a mistyped flag need not wait for the imports

import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

from plumbing.cli.console import UserError
from plumbing.data import tokenizers
from plumbing.data.readers import read_records
from plumbing.data.shards import check_meta, open_shard, split_of
from plumbing.system.limits import num_cores

NGRAM = 13  # length in tokens of an overlap that counts; GPT-3's contamination study takes 13 words
HASH_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that multiplying by it loses nothing modulo 2**64
TABLE_BITS = 27  # 128 MB of flags: with a million n-grams, 1 token in 100 passes and is looked up
BLOCK = 2**17  # tokens that a core searches at a time: few enough for its cache


def read_examples(path, enc):
    """[(line number, tokens)] of a HellaSwag file: the context with each ending."""
    if not os.path.exists(path):
        raise UserError(
            f"There is no file {path}. hellaswag.py downloads HellaSwag's examples; --eval names another file."
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
    """(n,) uint16 -> (n - NGRAM + 1,) uint64: the hash of the n-gram at each position, a polynomial."""
    tokens = tokens.astype(np.uint64) + 1  # otherwise leading zeros would not affect the hash
    hashes = tokens[: max(0, len(tokens) - NGRAM + 1)].copy()
    for i in range(1, NGRAM):
        hashes *= np.uint64(HASH_MULTIPLIER)  # wraps around
        hashes += tokens[i : i + len(hashes)]
    return hashes


def first_bits(hashes):
    return hashes >> np.uint64(64 - TABLE_BITS)


def search(shard, following, wanted, table):
    """{hash: (shard, position)} of the `wanted` n-grams that begin in a shard; they may end in the `following` one.

    table: whether one of the wanted hashes begins with these TABLE_BITS, which lets few others pass.
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
    """{line number: (length, shard, position, tokens)} of each example's longest stretch of n-grams in `found`."""
    longest = {}
    for number, tokens in examples:
        ngrams = ngram_hashes(tokens).tolist()
        start = 0  # of the present stretch
        for i, ngram in enumerate(ngrams):
            if ngram not in found:
                start = i + 1
            elif i + NGRAM - start > longest.get(number, [0])[0]:
                longest[number] = i + NGRAM - start, *found[ngrams[start]], tokens[start : i + NGRAM]
    return longest


def report(folder, path):
    """Print which examples in `path` occur in the shards in `folder`. Returns {line number: longest overlap}."""
    paths = sorted(Path(folder).glob("*"))
    # in the order of their text
    shards = [open_shard(path) for split in ("val", "train") for path in paths if split_of(path.name) == split]
    if not shards:
        raise UserError(
            f"There are no shards in {folder}. Make them with fineweb.py, or give their folder with --data."
        )
    check_meta(folder, shards)
    enc = tokenizers.folder_encoding(folder)
    examples = read_examples(path, enc)
    if all(len(tokens) < NGRAM for _, tokens in examples):
        raise UserError(
            f"No example in {path} has {NGRAM} tokens. Give HellaSwag's validation file with --eval."
        )
    num_examples = len({number for number, _ in examples})
    print(f"{path}: {num_examples:,} examples")
    print(f"{folder}: {sum(map(len, shards)):,} tokens of {enc.name}", flush=True)
    if len(enc._mergeable_ranks) == 256:
        print(f"note: {NGRAM} bytes in a row are often the same by chance. Shards of longer tokens tell more.")
    hashes = np.concatenate([ngram_hashes(tokens) for _, tokens in examples])
    table, found = np.zeros(2**TABLE_BITS, bool), {}
    table[first_bits(hashes)] = True
    find = functools.partial(search, wanted=set(hashes.tolist()), table=table)
    with ThreadPoolExecutor(num_cores()) as executor:
        results = executor.map(find, shards, [*shards[1:], None])
        for result in tqdm(results, total=len(shards), unit="shard", desc=console.plain(folder), delay=0.5):
            found = result | found  # the first place counts
    longest = longest_overlaps(examples, found)
    lengths = {number: overlap[0] for number, overlap in longest.items()}
    share = len(longest) / num_examples
    print(f"{len(longest)} of {num_examples} examples ({share:.2%}) share {NGRAM} or more tokens in a row")
    for number in sorted(lengths, key=lambda number: lengths[number], reverse=True)[:10]:
        length, shard, position, tokens = longest[number]
        text = enc.decode(tokens)[:150]
        place = f"{shard.path.name} at {position:,}"
        print(f"  line {number}: {length} tokens, the first {NGRAM} of them in {place}: {text!r}")
    return lengths


def main(args=None):
    options = flags.parse(Options, args)
    report(options.data, options.eval)


if __name__ == "__main__":
    console.run(main, output_is_product=True)
