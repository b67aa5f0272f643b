"""From the files of a data set to token shards: rows, what a script makes of each, two splits, shards and meta.json.

A script's Renderer says what becomes of a row; all else is the same for documents and conversations. A row here is also
a piece of a long text. A shard holds whole rows, so a place in the input is the number of a file and of a row in it,
and whether a row is for validation is computed from these two numbers.

meta.json says after each run of rows where the next one begins, so the same command continues, and makes the same
bytes, whenever it was killed and on any number of cores.
"""

import collections
import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
import shutil
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
from tqdm import tqdm

from plumbing.cli import console
from plumbing.cli.console import UserError
from plumbing.data import shards, sources, tokenizers
from plumbing.data.options import DataOptions
from plumbing.data.readers import COLUMN_ADVICE, Counts, Row, Unusable, explain, read_rows
from plumbing.data.shards import Meta, read_meta, split_of
from plumbing.files import atomic_write, lock_folder, remove_folder
from plumbing.system.limits import num_cores

BATCH_BYTES = 2**19  # of text, given to a core at a time: 0.04 s of work, so that the overhead is negligible
QUEUE_BYTES = 2**26  # of text that waits or is done: enough to keep all cores busy while a shard is written
MAX_THREADS = 32  # the one that reads keeps fewer busy; each has a tokenizer of its own, of 4 MB
VALIDATE_EVERY = 11  # of so many rows one is for validation, of a large text of more
# flags that change no token, or are recorded by the names that they stand for
UNRECORDED = ("input", "dataset", "tokenizer", "out_dir", "num_proc", "pretokenized", "init_from")

# ids (n,) of uint16, and their mask (n,) of uint8, or None where all are targets
Tokens = tuple[np.ndarray, np.ndarray | None]
Place = tuple[int, int]  # the number of a file, and of a row in it


class Renderer:
    """What a script makes of rows: `read` is called where the files are read, `encode` in the threads that tokenize."""

    columns: Sequence[str] = ()  # that are read of a table
    needed: Sequence[str] = ()  # of these, those that the first file must have
    separator = ""  # between the documents of a text file
    counted: Sequence[tuple[str, str]] = ()  # what is counted besides the rows left out: ("message", "left out")
    prefix = ""  # of the shards' names, by default the folder's
    noun = "document"
    masks = False
    advice = COLUMN_ADVICE  # if no row can be used

    read: Callable[[Row], tuple[Any, int]]  # (what `encode` takes, or Unusable; its size in bytes)
    # what becomes of each, and how often it has what is `counted`
    encode: Callable[[tiktoken.Encoding, list[Any]], list[tuple[Tokens | Unusable, tuple[int, ...]]]]

    def arrange(self, tokens: Tokens) -> Tokens:
        """What is written of the rows of a shard."""
        return tokens


# ----- What a command makes -----------------------------------------------------------------------------


def complaints_of(options: DataOptions) -> list[str]:
    """What is wrong with the flags that say which data set is meant."""
    names = ("dataset", "config", "split", "revision")
    changed = [name for name in names if getattr(options, name) != getattr(type(options), name)]
    if options.input and changed:
        return [f"--input is a data set of its own: leave {' and '.join(f'--{name}' for name in changed)} out."]
    return []


def plan(
    options: DataOptions, *, types=tuple(sources.TYPES), default: str = ""
) -> tuple[str, list[sources.Source], Meta]:
    """(folder, files, Meta at first) of the shards that a script's options describe.

    default: the folder, if it is not named after the data set. The hub is asked once for the files of a folder.
    """
    found = None
    if options.input:
        found = sources.find(options, types)
        default = os.path.basename(found.sources[0].name).lstrip(".").split(".")[0]  # of books.jsonl.gz: books
        if os.path.isdir(options.input[0]):
            default = os.path.basename(os.path.abspath(options.input[0])) + "_shards"
    folder = options.out_dir or default or os.path.basename(options.dataset)
    found = found or sources.find_again(vars(read_meta(folder)), options) or sources.find(options)
    meta = Meta(found.dataset, complete=False)
    meta.made_from = {name: value for name, value in vars(options).items() if name not in UNRECORDED}
    meta.made_from |= {"config": found.config, "split": found.split, "revision": found.commit}
    meta.made_from["sources"] = [source.recorded() for source in found.sources]
    num_bytes = sum(source.size for source in found.sources)
    num_bytes = min(num_bytes, meta.made_from.get("max_tokens") or num_bytes)  # a token has one byte or more
    meta.validation_every = max(VALIDATE_EVERY, math.ceil(num_bytes / options.shard_size))
    if found.commit:
        meta.asked = {name: getattr(options, name) for name in ("dataset", "config", "revision")}
    return folder, found.sources, meta


def continued(folder: str, new: Meta) -> Meta:
    """The meta.json of `folder` if it continues `new`, else `new` itself; UserError if it is of a different data set.

    Files that were not read to their end may have been mended, but not at their beginning.
    """
    old, names = read_meta(folder), os.listdir(folder) if os.path.isdir(folder) else []
    has_shards = any(map(split_of, names))
    if "sources" not in old.made_from and ("meta.json" in names or has_shards):
        raise UserError(
            f"{folder} has files that fineweb.py and smoltalk.py did not write. Choose another folder."
        )
    if not (old.shards or has_shards):
        return new
    num_read = sys.maxsize if old.complete else max((end[0] for end in old.ends.values()), default=0)

    def recorded(meta):
        record = {"dataset": meta.dataset, "tokenizer": meta.tokenizer} | meta.made_from
        for number, (name, size, digest) in enumerate(record.pop("sources")):
            key = f"file {number + 1} of the input (name, bytes, hash)"
            record[key] = [name, size, digest] if number < num_read else [name, digest]
        return record

    then, now = recorded(old), recorded(new)
    for key in then | now:
        before, after = (console.plain(repr(record.get(key, ""))) for record in (then, now))
        if before != after:
            raise UserError(
                f"{folder} has shards of other data: {key} was {before} and is now {after}. Move it away, or make the"
                " new ones elsewhere."
            )
    return dataclasses.replace(old, made_from=new.made_from)  # with the present sizes of mended files


def make_shards(
    folder: str,
    new: Meta,
    renderer: Renderer,
    enc: tiktoken.Encoding,
    found: list[sources.Source],
    options: DataOptions,
) -> Meta:
    """Make the shards of `new` in a folder, or those that are missing. Returns what meta.json says of them all."""
    if enc.n_vocab > 2**16:
        raise UserError(
            f"Tokenizer {enc.name} has {enc.n_vocab:,} ids, but shards can hold 65,536. Use a smaller one."
        )
    new = dataclasses.replace(new, tokenizer=enc.name, vocab_size=enc.n_vocab, masks=renderer.masks)
    meta = continued(folder, new)
    if not is_complete(folder, meta):  # several processes may use complete shards at once
        with lock_folder(folder):
            meta = continued(folder, new)  # another process may have worked on it until now
            if not is_complete(folder, meta):
                write_shards(folder, meta, renderer, enc, found, options)
                return meta
    print(f"{console.plain(folder)} is complete: {meta.tokens:,} tokens in {len(meta.shards)} shards")
    return meta


def write_shards(folder, meta, renderer, enc, found, options):
    """Write shards from where those that are there end."""
    *begin, meta.documents, counts = keep_whole(folder, meta, renderer.counted)
    most, sizes = meta.made_from.get("max_tokens", 0), [source.size for source in found]
    if found[0].repo:
        # a shard has about as many bytes as the files, which are compressed. Beside a few shards' text, three files may
        # be on disk: one is finished, one is being read, one is being downloaded
        check_disk_space(folder, (2 * (most - meta.tokens) if most else sum(sizes)) + 3 * max(sizes))
        save(folder, meta)  # so that the files that are on disk can be found again without a network
    downloads = os.path.join(folder, ".download")
    files = sources.fetched(
        found, downloads, begin[0], ahead=not most
    )  # with a limit, the next may not be needed
    num_threads = min(options.num_proc or num_cores(), MAX_THREADS)
    encoded = encode_all(renderer, enc, read_batches(renderer, files, begin), num_threads)
    title = console.plain(folder)
    bar = tqdm(total=most or None, initial=meta.tokens, unit="tok", unit_scale=True, desc=title, delay=0.5)
    with bar, contextlib.closing(encoded):
        rows = usable(encoded, [source.name for source in found], counts, most, bar)
        for parts, place in cut(rows, options.shard_size, meta.validation_every, is_first=not meta.shards):
            if not place and not all(meta.lengths(split) or len(parts[split][0]) for split in parts):
                parts = in_two(parts, enc.eot_token, renderer, counts)
            write(folder, meta, parts, renderer, enc)
            meta.rows_left_out, meta.left_out = counts.numbers[0], counts.sentences
            if place:
                meta.ends[[*meta.shards][-1]] = [*place, meta.documents, *counts.numbers]
                save(folder, meta)
                sources.remove_fetched(found[: place[0]], downloads)  # what is not in a shard will be read again
    remove_folder(downloads)  # before the end is recorded: what is complete is not looked at again
    finish(folder, meta, renderer.noun)
    counts.note()


def check_disk_space(folder: str, size: int) -> None:
    """Raise UserError if the disk that `folder` is on has less than `size` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < size:
        raise UserError(
            f"The shards need {size / 1e9:.1f} GB, but the disk of {folder} has {free / 1e9:.1f} GB free. Make room, "
            "choose another --out-dir, or ask for fewer tokens with --max-tokens or --pretokenized."
        )


# ----- Rows to tokens -----------------------------------------------------------------------------------


def read_batches(renderer, files, begin):
    """The rows of (number, source) of `files` from a place on: ([(place, in words, what was read)], bytes)."""
    for number, source in files:
        needed = renderer.needed if number == 0 else ()
        rows = read_rows(source, renderer.columns, separator=renderer.separator, needed=needed)
        first = begin[1] if number == begin[0] else 0
        batch, batch_bytes = [], 0
        for row_number, row in itertools.islice(enumerate(rows), first, None):
            entry, num_bytes = renderer.read(row)
            if isinstance(entry, Unusable):
                entry, num_bytes = entry._replace(values=row.values), len(repr(row.values))
            batch.append(((number, row_number), row.place, entry))
            batch_bytes += num_bytes
            if batch_bytes >= BATCH_BYTES:
                yield batch, batch_bytes
                batch, batch_bytes = [], 0
        yield batch, batch_bytes


def encode_all(renderer, enc, batches, num_threads):
    """Yield the batches in order, each with what becomes of its rows that can be used, in `num_threads` threads.

    This thread reads, and the others tokenize, as tiktoken releases Python's lock meanwhile.
    """
    worker = threading.local()

    def start():
        # subtle: each thread gets a copy, as sharing one costs a tenth more CPU time
        worker.enc = tokenizers.copy_encoding(enc, enc.name, enc._special_tokens)

    def encode(batch):
        return renderer.encode(worker.enc, [entry for *_, entry in batch if not isinstance(entry, Unusable)])

    executor = ThreadPoolExecutor(num_threads, initializer=start)
    pending, waiting, failure = collections.deque(), 0, None
    try:
        while True:
            try:
                while waiting < QUEUE_BYTES and (read := next(batches, None)):
                    batch, num_bytes = read
                    pending.append((batch, num_bytes, executor.submit(encode, batch)))
                    waiting += num_bytes
            except (UserError, OSError) as error:  # of a file: what is before it goes into the shards
                failure = error
            if not pending:
                break
            batch, num_bytes, future = pending.popleft()
            waiting -= num_bytes
            yield batch, future.result()
        if failure:
            raise failure
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


def usable(encoded, names: list[str], counts: Counts, most: int, bar: tqdm) -> Iterator[tuple[Place, Tokens]]:
    """The rows of batches that can be used, up to that with which there are `most` tokens (0: all), shown on a bar.

    `counts` is of all rows before the one that is yielded.
    """
    num_tokens = bar.n
    for batch, rendered in encoded:
        coming = iter(rendered)
        for place, where, entry in batch:
            tokens, more = (entry, ()) if isinstance(entry, Unusable) else next(coming)
            if isinstance(tokens, Unusable):
                counts.leave_out(where, names[place[0]], tokens)
                continue
            yield place, tokens
            counts.add(more)
            bar.set_postfix_str(f"file {place[0] + 1} of {len(names)}", refresh=False)
            bar.update(len(tokens[0]))
            num_tokens += len(tokens[0])
            if most and num_tokens >= most:
                return


# ----- Two splits, and shards ---------------------------------------------------------------------------


def is_validation(place: Place, every: int) -> bool:
    """Whether a row is for validation: of `every` rows one, at random among the first eleven."""
    group, number = divmod(sum(place), every)
    return number == zlib.crc32(b"%d" % group) % VALIDATE_EVERY


def cut(
    rows: Iterable[tuple[Place, Tokens]], size: int, every: int, is_first: bool
) -> Iterator[tuple[dict[str, Tokens], Place | None]]:
    """Cut rows into runs with at most `size` tokens in a split, but for a longer row.

    Yields ({split: tokens}, place): where in the input the next run begins, None after the last.
    every: as in `is_validation`; with 0, the first run is for validation and no other one. Rows of 3, 5 and 1 tokens in
    runs of 4: aaa | bbbbb | c
    """
    parts = empty_parts()
    for place, (ids, mask) in rows:
        split = "val" if (is_validation(place, every) if every else is_first) else "train"
        if parts[split][0] and len(parts[split][0]) // 2 + len(ids) > size:
            yield as_tokens(parts), place
            parts, is_first = empty_parts(), False
            split = split if every else "train"
        parts[split][0].extend(ids.data)
        if mask is not None:
            parts[split][1].extend(mask.data)
    yield as_tokens(parts), None


def empty_parts():
    return {split: (bytearray(), bytearray()) for split in ("val", "train")}


def as_tokens(parts) -> dict[str, Tokens]:
    return {
        split: (np.frombuffer(ids, np.uint16), np.frombuffer(mask, np.uint8) if mask else None)
        for split, (ids, mask) in parts.items()
    }


def in_two(parts: dict[str, Tokens], eot: int, renderer: Renderer, counts: Counts) -> dict[str, Tokens]:
    """The last rows of an input of which all were for one split: about a tenth of them is for the other one.

    A single document is cut, a single conversation refused, and so is an input without a text.
    """
    ids, mask = max(parts.values(), key=lambda tokens: len(tokens[0]))
    if not len(ids):
        if counts.first:
            raise UserError(f"No row can be used. {explain(*counts.first, renderer.advice)}")
        raise UserError("The input contains no text. Check --input and --text-column.")
    tenth = math.ceil(len(ids) / 10)
    starts = np.flatnonzero(ids == eot)[1:]
    if not len(starts) and renderer.masks:
        raise UserError(f"A single {renderer.noun} is too few, as one is needed to validate on. Add more.")
    at = int(min(starts, key=lambda start: abs(start - tenth), default=tenth))
    halves = [(ids[:at], mask if mask is None else mask[:at]), (ids[at:], mask if mask is None else mask[at:])]
    val, train = sorted(halves, key=lambda tokens: len(tokens[0]))
    return {"val": val, "train": train}


# ----- Writing ------------------------------------------------------------------------------------------


def write(folder: str, meta: Meta, parts: dict[str, Tokens], renderer: Renderer, enc: tiktoken.Encoding):
    """Write a shard of each split that has tokens; before the first ones, what tells of them.

    Only meta.json makes them shards: if this is killed before it is saved, they are written again.
    """
    if not meta.shards:
        tokenizers.save_for_folder(enc, folder)
        save(folder, meta)
    prefix = renderer.prefix or re.sub(r"[^A-Za-z0-9]+", "-", os.path.basename(os.path.abspath(folder)))
    for file in meta.shards:  # the folder may have had another name when they were begun
        prefix = file.rsplit("_", 2)[0]
    for split, tokens in parts.items():
        if len(tokens[0]):
            meta.documents += int(np.count_nonzero(tokens[0] == enc.eot_token))
            ids, mask = renderer.arrange(tokens)
            path = Path(folder, f"{prefix}_{split}_{len(meta.lengths(split)) + (split == 'train'):06d}.npy")
            if mask is not None:  # first: without a mask, every token would count as a target
                write_array(path.with_suffix(".mask"), mask)
            write_array(path, ids)
            meta.shards[path.name] = len(ids)


def write_array(path, array):
    """Write tokens or a mask as np.save does, which would hide why a write failed."""
    with atomic_write(path) as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(array.data)


def is_whole(folder: str, meta: Meta, file: str) -> bool:
    """Whether a shard, and its mask, can be read and have as many entries as meta.json says."""
    path, length = Path(folder, file), meta.shards.get(file, -1)
    try:
        shards.open_shard(path, length=length)
        if meta.masks:
            shards.open_shard(path.with_suffix(".mask"), dtype=np.uint8, length=length)
        return True
    except (UserError, OSError):
        return False


def is_complete(folder: str, meta: Meta) -> bool:
    return meta.complete and bool(meta.shards) and all(is_whole(folder, meta, file) for file in meta.shards)


def keep_whole(folder: str, meta: Meta, counted: Sequence[tuple[str, str]]) -> tuple[int, int, int, Counts]:
    """Keep the runs of rows before the first damaged shard.

    Returns the numbers of the file and the row at which the next run begins, and how many documents there are and what
    was counted up to there.
    """
    kept = list(itertools.takewhile(lambda name: is_whole(folder, meta, name), meta.shards))
    while kept and kept[-1] not in meta.ends:
        kept.pop()
    file, row, documents, *numbers = meta.ends[kept[-1]] if kept else [0, 0, 0]
    meta.shards = {name: meta.shards[name] for name in kept}
    meta.ends = {name: recorded for name, recorded in meta.ends.items() if name in kept}
    meta.tokens, meta.complete = sum(meta.shards.values()), False
    counts = Counts(counted, numbers)
    counts.sentences = meta.left_out[: counts.numbers[0]]  # those of later rows come again
    return file, row, documents, counts


def save(folder: str, meta: Meta) -> None:
    meta.tokens = sum(meta.shards.values())
    with atomic_write(Path(folder, "meta.json"), "w", encoding="utf-8") as file:
        json.dump(vars(meta), file, indent=1)


def finish(folder: str, meta: Meta, noun: str) -> None:
    """Record that the shards are complete, and say what they hold."""
    meta.complete = True
    save(folder, meta)
    train, val = (sum(meta.lengths(split)) for split in ("train", "val"))
    print(f"{console.plain(folder)}: {train:,} tokens to train on, {val:,} to validate on")
    print(f"in {console.count(len(meta.shards), 'shard')}, from {console.count(meta.documents, noun)}")
    if meta.masks:
        masks = [Path(folder, file).with_suffix(".mask") for file in meta.shards]
        num_targets = sum(int(shards.open_shard(mask, dtype=np.uint8).read().sum()) for mask in masks)
        print(f"{num_targets:,} tokens are targets")


# ----- What comes next ----------------------------------------------------------------------------------

# {preset of train_gpt2.py: (its sequence length, tokens of a step, and between how many steps passes are counted)}
PRESETS = {
    "gpt2": (1024, 2**19, 0, 18_000),
    "quickstart": (128, 2**11, 400, 3000),
    "chat": (1024, 2**17, 0, 3000),
}


def training_command(
    preset: str, folder: str, lengths: list[int], T: int, *, passes: int = 0, start=""
) -> list[Any]:
    """The command that trains on shards of these lengths, in sequences of T tokens, from the model `start`.

    It makes so many `passes` unless they take too few or too many steps: then it makes the preset's. A step may have
    fewer tokens than the preset's, so that a pass takes 8 steps or more.
    """
    own_T, own_batch, least, most = PRESETS[preset]
    windows = sum((length - 1) // T for length in lengths)
    batch = max(1, min(own_batch // T, windows // 8))
    batch = 2 ** (batch.bit_length() - 1)
    command = ["python", "train_gpt2.py", ("--preset", preset), ("--data", folder)]
    command.append(("--out-dir", f"log/{os.path.basename(os.path.abspath(folder))}"))
    if start:
        command.append(("--init-from", start))
    if (T, batch * T) != (own_T, own_batch):
        command += [("--sequence-length", T), ("--total-batch-size", batch * T)]
    if least < passes * windows // batch < most:
        command.append(("--passes", passes))
    return command
