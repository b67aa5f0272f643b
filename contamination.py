"""Which examples of an evaluation stand in the training text? Training on them makes its curve lie.

    python fineweb.py --contamination hellaswag_val.jsonl --out-dir edu_fineweb10B

searches all the shards of a folder for runs of 13 tokens of HellaSwag's examples, a context with
each of its endings. Exact: hashes only say where to look, tokens decide. Memory does not grow with
the corpus.
"""

import itertools
import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from tqdm import tqdm

import fineweb
import tokenizer
from plumbing.cli import UserError

RUN = 13  # tokens in common that count, as in GPT-3's study of contamination
FACTOR = 0x9E3779B97F4A7C15  # odd, so that multiplying by it loses nothing modulo 2**64
TABLE_BITS = 27  # 128 MB of flags: at a million runs looked for, 1 token in 100 needs a second look
SEGMENT = 2**24  # tokens of a shard that a core reads at a time
BLOCK = 2**16  # tokens of them that it hashes at a time: small enough to stay in its cache


def read_examples(path, enc):
    """The lines of a HellaSwag file as [(line number, the tokens of its context and each ending)]."""
    examples = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    example = json.loads(line)
                    texts = [f"{example['ctx']} {ending}" for ending in example["endings"]]
                except (ValueError, KeyError, TypeError) as error:
                    got = f"got {path} line {number} ({error!r})"
                    raise UserError(f"{got}, needed HellaSwag's ctx and endings, do mend it") from None
                examples.append((number, [fineweb.encode_text(enc, text).astype(np.uint16) for text in texts]))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"got --contamination {path} ({error}), needed a HellaSwag file, do check the path") from None
    return examples


def segments(folder):
    """[(shard, start, stop, shard that follows)] over all the tokens of a folder."""
    files = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    shards = [(file, re.search(r"_(?:train|val)_(\d+)\.(npy|bin)$", file)) for file in files]
    numbers = {int(match[1]): os.path.join(folder, file) for file, match in shards if match}
    # written in parts, shards follow each other in steps of the number of parts
    steps = [int(match[1]) for file in files if (match := re.search(r"^meta.*-of-(\d+)\.json$", file))]
    for number, path in sorted(numbers.items()):
        size = len(fineweb.open_shard(path))
        for start in range(0, size, SEGMENT):
            stop = min(start + SEGMENT, size)
            yield path, start, stop, numbers.get(number + max(steps, default=1)) if stop == size else None


def run_hashes(tokens):
    """(n,) uint16 -> (n - RUN + 1,) uint64, a polynomial in FACTOR of the RUN tokens from each position."""
    tokens = tokens.astype(np.uint64) + 1  # else leading zeros would not show
    hashes = tokens[: len(tokens) - RUN + 1].copy()
    for i in range(1, RUN):
        hashes *= np.uint64(FACTOR)  # wraps around
        hashes += tokens[i : i + len(hashes)]
    return hashes


class Runs:
    """Every distinct run of RUN tokens in some texts, to be looked for."""

    def __init__(self, texts):
        """`which`: per text and place in it, the number of the run that begins there."""
        runs = np.concatenate([np.lib.stride_tricks.sliding_window_view(tokens, RUN) for tokens in texts])
        hashes = np.concatenate([run_hashes(tokens) for tokens in texts])
        self.hashes, first, self.which = np.unique(hashes, return_index=True, return_inverse=True)
        self.runs = runs[first]  # (runs, RUN)
        assert (self.runs[self.which] == runs).all(), "two runs with one hash: choose another FACTOR"
        self.shift = np.uint64(64 - TABLE_BITS)
        self.table = np.zeros(2**TABLE_BITS, dtype=bool)
        self.table[self.hashes >> self.shift] = True

    def search(self, segment):
        """The runs in a segment of a shard, and where each is seen first."""
        shard, start, stop, follower = segment
        tokens = fineweb.open_shard(shard)[start : stop + RUN - 1]
        if follower:  # a run may begin in one shard and end in the next
            tokens = np.concatenate([tokens, fineweb.open_shard(follower)[: RUN - 1]])
        seen, places = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        for at in range(0, len(tokens) - RUN + 1, BLOCK):
            block = np.asarray(tokens[at : at + BLOCK + RUN - 1])
            hashes = run_hashes(block)
            place = np.flatnonzero(self.table[hashes >> self.shift])
            index = np.minimum(np.searchsorted(self.hashes, hashes[place]), len(self.hashes) - 1)
            place, index = place[same := self.hashes[index] == hashes[place]], index[same]
            equal = (block[place[:, None] + np.arange(RUN)] == self.runs[index]).all(axis=1)
            seen.append(index[equal])
            places.append(start + at + place[equal])
        seen, order = np.unique(np.concatenate(seen), return_index=True)
        return seen, np.concatenate(places)[order]


def report(folder, path, num_proc=0):
    """Print which examples of `path` the shards in `folder` have in them. Returns {line: longest run in common}."""
    work = list(segments(folder))
    if not work:
        raise UserError(f"got {folder} without shards, needed the training text, do make it or give --out-dir")
    enc = tokenizer.folder_encoding(folder)
    examples = read_examples(path, enc)
    texts = [tokens for _, endings in examples for tokens in endings if len(tokens) >= RUN]
    if not texts:
        raise UserError(f"got {path} without an example of {RUN} tokens, needed some, do give HellaSwag's file")
    runs = Runs(texts)

    found = {}  # run: (shard, position)
    clock = time.perf_counter()
    num_proc = num_proc or fineweb.num_cores()
    with ThreadPoolExecutor(num_proc) as pool, tqdm(unit="tok", unit_scale=True, desc=folder, delay=0.5) as bar:
        for (shard, start, stop, _), (seen, places) in zip(work, pool.map(runs.search, work)):
            for run, place in zip(seen.tolist(), places.tolist()):
                found.setdefault(run, (shard, place))
            bar.update(stop - start)
    seconds, num_tokens = time.perf_counter() - clock, sum(stop - start for _, start, stop, _ in work)

    # per example the longest stretch of runs that were all found
    at, worst = 0, {}
    for number, endings in examples:
        for tokens in endings:
            here = runs.which[at : at + max(0, len(tokens) - RUN + 1)].tolist()
            at += len(here)
            for hit, stretch in itertools.groupby(range(len(here)), key=lambda i: here[i] in found):
                first, *rest = stretch
                length = RUN + len(rest)
                if hit and length > worst.get(number, (0,))[0]:
                    worst[number] = length, *found[here[first]], tokens[first : first + length]
    short = sum(all(len(tokens) < RUN for tokens in endings) for _, endings in examples)
    print(
        f"{len(worst)} of {len(examples)} examples ({len(worst) / len(examples):.2%}) of {path} have {RUN} tokens "
        f"in a row in common with {folder} ({num_tokens:,} tokens of {enc.name}); {short} are shorter than that"
    )
    for number, (length, shard, place, tokens) in sorted(worst.items(), key=lambda item: (-item[1][0], item[0]))[:10]:
        text, shard = enc.decode(tokens)[:150], os.path.basename(shard)
        print(f"  line {number}: {length} tokens, {shard} at {place:,}: {text!r}")
    rate, minutes = num_tokens / seconds, 1e10 * seconds / num_tokens / 60
    print(f"{seconds:.1f} s, {rate / 1e6:.1f}M tokens/s on {num_proc} cores; 10B tokens would take {minutes:.0f} min")
    return {number: length for number, (length, *_) in worst.items()}
