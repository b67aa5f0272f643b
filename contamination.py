"""Which evaluation examples occur in the training text? Training on them would inflate the score.

    python contamination.py --data edu_fineweb10B
    python contamination.py --data books --eval examples.jsonl --num-proc 4

The shards of a folder are searched for 13-grams of tokens from HellaSwag's examples (the context with each
of its endings). Hashes only narrow down the candidates, tokens decide. Memory does not grow with the corpus.
"""

from dataclasses import dataclass

from plumbing import flags, program


@dataclass
class Options:
    data: str = "edu_fineweb10B"  # folder of token shards to search
    eval: str = "hellaswag/hellaswag_val.jsonl"  # HellaSwag's examples: JSON lines with ctx and endings
    num_proc: int = 0  # cores to search on; 0: all


if __name__ == "__main__":
    program.run(lambda: flags.parse(Options))  # --help and a mistyped flag need not wait for the imports

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from tqdm import tqdm

import tokenizer
from plumbing.documents import num_cores, read_records
from plumbing.program import UserError
from plumbing.shards import check_meta, num_parts_of, open_shard, split_of

NGRAM = 13  # length in tokens of an overlap that counts; GPT-3's contamination study takes 13 words
HASH_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that multiplying by it loses nothing modulo 2**64
TABLE_BITS = 27  # 128 MB of flags: with a million n-grams, 1 token in 100 passes and needs an exact check
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
            tokens = tokenizer.encode_text(enc, f"{context} {ending}")
            examples.append((number, tokens.astype(np.uint16)))
    return examples


def open_shards(folder):
    """All shards of a folder in the order of their text."""
    files = sorted(Path(folder).glob("*"))
    # when the data was prepared in parts (--part), consecutive shards of one part differ by the number of parts
    step = max(map(num_parts_of, files), default=1)

    def part_and_number(file):
        number = int(re.findall(r"\d*$", file.stem)[0] or 0)
        return number % step, number

    shards = [file for file in files if split_of(file.name)]
    return [open_shard(file) for file in sorted(shards, key=part_and_number)]


def ngram_hashes(tokens):
    """(n,) uint16 -> (n - NGRAM + 1,) uint64: the hash of the n-gram at each position, a polynomial."""
    tokens = tokens.astype(np.uint64) + 1  # otherwise leading zeros would not affect the hash
    hashes = tokens[: max(0, len(tokens) - NGRAM + 1)].copy()
    for i in range(1, NGRAM):
        hashes *= np.uint64(HASH_MULTIPLIER)  # wraps around
        hashes += tokens[i : i + len(hashes)]
    return hashes


class NgramIndex:
    """All distinct n-grams of NGRAM tokens in some texts; `ngram_ids` has the one at each position of each text."""

    def __init__(self, texts):
        ngrams = np.concatenate([sliding_window_view(tokens, NGRAM) for tokens in texts])
        hashes = np.concatenate([ngram_hashes(tokens) for tokens in texts])
        self.hashes, first, self.ngram_ids = np.unique(hashes, return_index=True, return_inverse=True)
        self.ngrams = ngrams[first]  # (distinct n-grams, NGRAM)
        collides = self.ngrams[self.ngram_ids] != ngrams
        assert not collides.any(), "choose another HASH_MULTIPLIER"
        self.shift = np.uint64(64 - TABLE_BITS)
        self.table = np.zeros(2**TABLE_BITS, bool)
        self.table[self.hashes >> self.shift] = True

    def search(self, shard, following):
        """{n-gram: (shard, position)} of the n-grams that begin in a shard; they may end in the `following` one."""
        found = {}
        length = BLOCK + NGRAM - 1
        for start in range(0, len(shard), BLOCK):
            tokens = shard.read(start, length)
            if following and len(tokens) < length:
                tokens = np.append(tokens, following.read(0, NGRAM - 1))
            hashes = ngram_hashes(tokens)
            # the table of flags lets few positions pass; their tokens are compared with the nearest hash's
            positions = np.flatnonzero(self.table[hashes >> self.shift])
            nearest = np.searchsorted(self.hashes[:-1], hashes[positions])
            candidates = tokens[positions[:, None] + np.arange(NGRAM)]
            same = (candidates == self.ngrams[nearest]).all(axis=1)
            matches = zip(nearest[same].tolist(), positions[same].tolist())
            for ngram, position in matches:
                found.setdefault(ngram, (shard, start + position))
        return found


def longest_overlaps(examples, index, found):
    """{line number: (length, shard, position, tokens)} of each example's longest stretch of n-grams in `found`."""
    longest, ngrams = {}, iter(index.ngram_ids.tolist())
    for number, tokens in examples:
        stretch = []  # the n-grams in `found` up to the present one
        for end in range(NGRAM, len(tokens) + 1):
            ngram = next(ngrams)
            if ngram not in found:
                stretch = []
                continue
            stretch.append(ngram)
            length = NGRAM - 1 + len(stretch)
            best, *_ = longest.get(number, [0])
            if length > best:
                shard, position = found[stretch[0]]
                longest[number] = length, shard, position, tokens[end - length : end]
    return longest


def report(folder, path, num_proc=0):
    """Print which examples in `path` occur in the shards in `folder`. Returns {line number: longest overlap}."""
    shards = open_shards(folder)
    if not shards:
        raise UserError(
            f"There are no shards in {folder}. Make them with fineweb.py, or give their folder with --data."
        )
    check_meta(folder, shards)
    enc = tokenizer.folder_encoding(folder)
    examples = read_examples(path, enc)
    texts = [tokens for _, tokens in examples if len(tokens) >= NGRAM]
    if not texts:
        raise UserError(
            f"No example in {path} has {NGRAM} tokens. Give HellaSwag's validation file with --eval."
        )
    num_examples = len({number for number, _ in examples})
    print(f"{program.plain(path)}: {num_examples:,} examples")
    print(f"{program.plain(folder)}: {sum(map(len, shards)):,} tokens of {enc.name}", flush=True)
    if len(enc._mergeable_ranks) == 256:
        print(f"note: {NGRAM} bytes in a row are often the same by chance. Shards of longer tokens tell more.")
    index, found = NgramIndex(texts), {}
    with ThreadPoolExecutor(num_proc or num_cores()) as executor:
        results = executor.map(index.search, shards, [*shards[1:], None])
        for result in tqdm(results, total=len(shards), unit="shard", desc=program.plain(folder), delay=0.5):
            found = result | found  # the first place counts
    longest = longest_overlaps(examples, index, found)
    lengths = {number: overlap[0] for number, overlap in longest.items()}
    share = len(longest) / num_examples
    print(f"{len(longest)} of {num_examples} examples ({share:.2%}) share {NGRAM} or more tokens in a row")
    for number in sorted(lengths, key=lambda number: lengths[number], reverse=True)[:10]:
        length, shard, position, tokens = longest[number]
        text = enc.decode(tokens)[:150]
        place = f"{program.plain(shard.path.name)} at {position:,}"
        print(f"  line {number}: {length} tokens, the first {NGRAM} of them in {place}: {text!r}")
    return lengths


def main(args=None):
    options = flags.parse(Options, args)
    flags.check(options)
    report(options.data, options.eval, options.num_proc)


if __name__ == "__main__":
    program.run(main, output_is_product=True)
