"""Which evaluation examples occur in the training text? Training on them would inflate the score.

    python contamination.py --data edu_fineweb10B
    python contamination.py --data books --eval examples.jsonl --num-proc 4

searches all shards of a folder for 13-grams of tokens from HellaSwag's examples (the context with each
of its endings). The match is exact: hashes only narrow down the candidates, tokens decide. Memory does
not grow with the corpus.
"""

from dataclasses import dataclass

from plumbing import cli


@dataclass
class Options:
    data: str = "edu_fineweb10B"  # folder of token shards to search
    eval: str = "hellaswag/hellaswag_val.jsonl"  # HellaSwag's examples: JSON lines with ctx and endings
    num_proc: int = 0  # cores to search on; 0: all


if __name__ == "__main__":
    cli.run(lambda: cli.parse(Options))  # --help and a mistyped flag need not wait for the imports

import itertools
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from tqdm import tqdm

import tokenizer
from plumbing.cli import UserError
from plumbing.documents import num_cores, read_json_lines
from plumbing.shards import num_parts_of, open_shard, split_of

NGRAM = 13  # length in tokens of an overlap that counts, as in GPT-3's contamination study
HASH_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that multiplying by it loses nothing modulo 2**64
TABLE_BITS = 27  # 128 MB of flags: with a million n-grams to find, 1 token in 100 passes and needs an exact check
SEGMENT = 2**24  # tokens of a shard that a core reads at a time
BLOCK = 2**16  # tokens of a segment that a core hashes at a time: few enough for its cache


def read_examples(path, enc):
    """Read a HellaSwag file as [(line number, the tokens of the context with each ending)]."""
    if not os.path.exists(path):
        raise UserError(f"There is no file {path}. hellaswag.py downloads HellaSwag's; or give another with --eval.")
    examples = []
    for number, example in read_json_lines(path):
        context, endings = example.get("ctx"), example.get("endings")
        if not isinstance(context, str) or not isinstance(endings, list):
            raise UserError(
                f"Line {number} of {path} is not a HellaSwag example: it has no ctx, or no list of endings. Fix or "
                "remove that line."
            )
        texts = [f"{context} {ending}" for ending in endings]
        examples.append((number, [tokenizer.encode_text(enc, text).astype(np.uint16) for text in texts]))
    return examples


def list_segments(folder):
    """[(shard, start, stop, next shard)] over all the tokens of a folder; the next one only at a shard's end."""
    files = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    # when the data was prepared in parts (--part), consecutive shards of one part differ by the number of parts
    step = max((num_parts_of(file) for file in files), default=1)
    shards = {}
    for file in filter(split_of, files):
        # a shard without a number in its name has no next shard
        match = re.search(r"_(\d+)\.(npy|bin)$", file)
        number = int(match[1]) if match else -1 - len(shards)
        shards[number] = open_shard(os.path.join(folder, file))
    segments = []
    for number, shard in sorted(shards.items()):
        for start in range(0, len(shard), SEGMENT):
            stop = min(start + SEGMENT, len(shard))
            is_end = stop == len(shard) and number >= 0
            segments.append((shard, start, stop, shards.get(number + step) if is_end else None))
    return segments


def ngram_hashes(tokens):
    """(n,) uint16 -> (n - NGRAM + 1,) uint64: the hash of the n-gram at each position, a polynomial."""
    tokens = tokens.astype(np.uint64) + 1  # otherwise leading zeros would not affect the hash
    hashes = tokens[: len(tokens) - NGRAM + 1].copy()
    for i in range(1, NGRAM):
        hashes *= np.uint64(HASH_MULTIPLIER)  # wraps around
        hashes += tokens[i : i + len(hashes)]
    return hashes


class NgramIndex:
    """All distinct n-grams of NGRAM tokens in some texts, indexed for searching."""

    def __init__(self, texts):
        """`ngram_ids`: for each position in each text, the index of the n-gram that starts there."""
        ngrams = np.concatenate([np.lib.stride_tricks.sliding_window_view(tokens, NGRAM) for tokens in texts])
        hashes = np.concatenate([ngram_hashes(tokens) for tokens in texts])
        self.hashes, first, self.ngram_ids = np.unique(hashes, return_index=True, return_inverse=True)
        self.ngrams = ngrams[first]  # (distinct n-grams, NGRAM)
        assert (self.ngrams[self.ngram_ids] == ngrams).all(), "hash collision: choose another HASH_MULTIPLIER"
        self.shift = np.uint64(64 - TABLE_BITS)
        self.table = np.zeros(2**TABLE_BITS, dtype=bool)
        self.table[self.hashes >> self.shift] = True

    def search(self, segment):
        """The n-grams found in a segment of a shard, and the first position of each."""
        shard, start, stop, follower = segment
        tokens = shard.read(start, stop - start + NGRAM - 1)
        if follower:  # an n-gram may begin in one shard and end in the next
            tokens = np.concatenate([tokens, follower.read(0, NGRAM - 1)])
        found, all_positions = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        for offset in range(0, len(tokens) - NGRAM + 1, BLOCK):
            block = tokens[offset : offset + BLOCK + NGRAM - 1]
            hashes = ngram_hashes(block)
            # 1) the table of flags lets few positions pass
            positions = np.flatnonzero(self.table[hashes >> self.shift])
            # 2) of these, the ones whose whole hash is known
            ids = np.searchsorted(self.hashes, hashes[positions])
            ids = np.minimum(ids, len(self.hashes) - 1)
            same_hash = self.hashes[ids] == hashes[positions]
            positions, ids = positions[same_hash], ids[same_hash]
            # 3) of these, the ones with the same tokens
            candidates = block[positions[:, None] + np.arange(NGRAM)]
            same_tokens = (candidates == self.ngrams[ids]).all(axis=1)
            found.append(ids[same_tokens])
            all_positions.append(start + offset + positions[same_tokens])
        found, first = np.unique(np.concatenate(found), return_index=True)
        return found, np.concatenate(all_positions)[first]


def longest_overlaps(examples, index, found):
    """{line number: (length, shard, position, tokens)} of each example's longest stretch of n-grams in `found`."""
    longest, offset = {}, 0
    for number, endings in examples:
        for tokens in endings:
            num_ngrams = max(0, len(tokens) - NGRAM + 1)
            ids = index.ngram_ids[offset : offset + num_ngrams].tolist()
            offset += num_ngrams
            for is_found, stretch in itertools.groupby(range(num_ngrams), key=lambda i: ids[i] in found):
                first, *rest = stretch
                length = NGRAM + len(rest)
                if is_found and (number not in longest or length > longest[number][0]):
                    shard, position = found[ids[first]]
                    longest[number] = length, shard, position, tokens[first : first + length]
    return longest


def report(folder, path, num_proc=0):
    """Print which examples in `path` occur in the shards in `folder`.

    Returns {line number: longest overlap in tokens}.
    """
    segments = list_segments(folder)
    if not segments:
        raise UserError(
            f"There are no shards in {folder}. Make them with fineweb.py, or give the folder that has them with --data."
        )
    enc = tokenizer.folder_encoding(folder)
    examples = read_examples(path, enc)
    texts = [tokens for _, endings in examples for tokens in endings if len(tokens) >= NGRAM]
    if not texts:
        raise UserError(
            f"No example in {path} has {NGRAM} tokens or more, so there is nothing to search for. Give HellaSwag's "
            "validation file with --eval."
        )
    num_tokens = sum(stop - start for _, start, stop, _ in segments)
    print(f"{path}: {cli.count(len(examples), 'example')}\n{folder}: {num_tokens:,} tokens of {enc.name}", flush=True)
    if len(enc._mergeable_ranks) == 256:
        print(f"note: {NGRAM} bytes in a row are often the same by chance. Shards of longer tokens tell more.")
    index = NgramIndex(texts)

    found = {}  # n-gram: (shard, position)
    start_time = time.perf_counter()
    num_proc = num_proc or num_cores()
    with ThreadPoolExecutor(num_proc) as executor, tqdm(unit="tok", unit_scale=True, desc=folder, delay=0.5) as bar:
        for (shard, start, stop, _), (ids, positions) in zip(segments, executor.map(index.search, segments)):
            for ngram, position in zip(ids.tolist(), positions.tolist()):
                found.setdefault(ngram, (shard, position))
            bar.update(stop - start)
    seconds = time.perf_counter() - start_time

    longest = longest_overlaps(examples, index, found)
    num_short = sum(all(len(tokens) < NGRAM for tokens in endings) for _, endings in examples)
    share = f"{len(longest)} of {len(examples)} examples ({len(longest) / len(examples):.2%})"
    print(f"{share} share {NGRAM} or more tokens in a row; {num_short} are shorter")
    for number, overlap in sorted(longest.items(), key=lambda item: (-item[1][0], item[0]))[:10]:
        length, shard, position, tokens = overlap
        text = enc.decode(tokens)[:150]
        print(f"  line {number}: {length} tokens, {shard.path.name} at {position:,}: {text!r}")
    rate, minutes = num_tokens / seconds, 1e10 * seconds / num_tokens / 60
    print(f"{seconds:.1f} s, {rate / 1e6:.1f}M tokens/s on {num_proc} cores; 10B tokens would take {minutes:.0f} min")
    return {number: length for number, (length, *_) in longest.items()}


def main(args=None):
    """Search a folder of shards for an evaluation's examples."""
    options = cli.parse(Options, args)
    errors = cli.check_numbers(options, above_0=[])
    if errors:
        raise UserError(" ".join(errors))
    report(options.data, options.eval, options.num_proc)


if __name__ == "__main__":
    cli.run(main, output_is_product=True)
