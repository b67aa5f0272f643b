"""From the files of a data set to token shards: rows, what a script makes of each, two splits, shards and meta.json.

A script's Renderer says what becomes of a row; all else is the same for documents and conversations. Their tokens, in
input order, are cut into shards. Shard 0 is the validation split: it takes every 11th piece of the input, or fewer of a
large one, at most a tenth of the tokens and one shard.

meta.json says after each shard where in the input the next one begins, so the same command continues, and makes the
same bytes, whenever it was killed and on any number of cores.
"""

import collections
import contextlib
import itertools
import json
import math
import operator
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from plumbing.cli import console
from plumbing.cli.console import UserError
from plumbing.data import shards, sources, tokenizers
from plumbing.data.options import DataOptions
from plumbing.data.readers import Counts, Row, Unusable, read_rows
from plumbing.data.shards import Meta, read_meta, split_of
from plumbing.files import atomic_write, lock_folder
from plumbing.system.limits import num_cores

BATCH_BYTES = 2**19  # of text, given to a core at a time: 0.04 s of work, so that the overhead is negligible
QUEUE_BYTES = 2**26  # of text that waits or is done
MAX_THREADS = 32  # the one that reads keeps fewer busy; each has a tokenizer of its own, of 4 MB
QUEUE = 16  # batches per thread, at most: enough to keep all cores busy while a shard is written
SAMPLE_EVERY = 11  # every 11th piece is for validation, fewer of a large text: under a tenth


class Rendered(NamedTuple):
    """What becomes of a row."""

    tokens: Any  # an array of ids (n,), or of ids and mask (2, n); Unusable if nothing does
    counts: tuple[int, ...] = ()  # as the renderer's `counted`


class Renderer:
    """What a script makes of rows: `read` is called where the files are read, `encode` in the threads that tokenize."""

    columns: Sequence[str] = ()  # that are read of a table
    needed: Sequence[str] = ()  # of these, those that the first file must have
    separator = ""  # between the documents of a text file
    counted: Sequence[tuple[str, str]] = ()  # what is counted besides the rows left out: ("message", "left out")
    noun = "document"
    block = 1  # tokens that stay together
    pad: np.ndarray | None = None  # (2, 1), the id and mask behind the last block of a shard, if there are masks

    # {row: (what `encode` takes, its size in bytes)}; or Unusable is raised
    read: Callable[[Row], tuple[Any, int]]
    encode: Callable[[Any, list[Any]], list[Rendered]]  # with a tokenizer
    explain: Callable[[str, Unusable], str]  # where a row is and what is wrong with it, if none can be used

    def pack(self, units: Iterator["Unit"]) -> Iterator["Unit"]:
        return units


class Unit(NamedTuple):
    """Tokens that are in one split: a piece of a document, or a block of conversations."""

    source: int  # where reading begins again to make it: the number of the file
    row: int  # of the row
    part: int  # and how many blocks from there on are to be skipped
    tokens: np.ndarray
    counts: tuple[int, ...]  # up to that row: rows left out, and what else is counted


class Position(NamedTuple):
    """A place in the input, where a shard ends; meta.json has it as a list."""

    source: int = 0  # as in Unit
    row: int = 0
    part: int = 0
    token: int = 0  # tokens of that unit that stand in the shard and those before
    sampled: int = 0  # tokens of the validation split so far, if it is sampled from all of the input
    documents: int = 0  # so far
    counts: tuple[int, ...] = (0,)


# ----- What a command makes -----------------------------------------------------------------------------


def complaints_of(options: DataOptions) -> list[str]:
    """What is wrong with the flags that say which data set is meant."""
    changed = [
        name for name in ("dataset", "revision") if getattr(options, name) != getattr(type(options), name)
    ]
    if options.input and changed:
        return [f"--input is a data set of its own: leave {' and '.join(f'--{name}' for name in changed)} out."]
    return []


def plan(
    options: DataOptions, settings: dict[str, Any], *, types=tuple(sources.TYPES), default: str = ""
) -> tuple[str, list[sources.Source], Meta]:
    """(folder, files, Meta at first) of the shards that a script's options describe.

    settings: what must be the same in all shards of a folder; default: the folder of a data set, if not named after it.
    An earlier run's files are found again without asking the hub.
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
    meta.made_from = settings | {"config": found.config, "split": found.split, "revision": found.commit}
    meta.made_from["sources"] = [source.recorded() for source in found.sources]
    num_bytes = sum(source.size for source in found.sources)
    meta.validation_every = max(SAMPLE_EVERY, math.ceil(num_bytes / options.shard_size))
    if found.commit:
        meta.asked = {name: getattr(options, name) for name in ("dataset", "config", "revision")}
    return folder, found.sources, meta


def continue_meta(folder, meta):
    """The meta.json of `folder` if it continues `meta`, else `meta` itself; refuses one of a different data set."""
    old, names = read_meta(folder), os.listdir(folder) if os.path.isdir(folder) else []
    has_shards = any(map(split_of, names))
    if "sources" not in old.made_from and ("meta.json" in names or has_shards):
        raise UserError(
            f"{folder} has files that fineweb.py and smoltalk.py did not write. Choose another folder."
        )
    if not (old.shards or has_shards):
        return meta
    for key, before, after in pairs_of(old, meta):
        if before != after:
            raise UserError(
                f"{folder} has shards of other data: {key} was {console.plain(repr(before))} and is now "
                f"{console.plain(repr(after))}. Move it away, or make the new ones elsewhere."
            )
    return replace(old, made_from=meta.made_from)  # with the present sizes of mended files


def pairs_of(old, new):
    """(its name, then, now) of all that must be the same; while there is more to read, the last file may be mended."""
    was, now = ({"dataset": meta.dataset, "tokenizer": meta.tokenizer} | meta.made_from for meta in (old, new))
    for key in was | now:
        if key != "sources":
            yield key, was.get(key, ""), now.get(key, "")
    num_read = sys.maxsize if old.complete else max((end[0] for end in old.ends.values()), default=-1)
    files = itertools.zip_longest(was["sources"], now["sources"], fillvalue=["", 0, ""])
    for number, (before, after) in enumerate(files):
        if number > num_read:
            before, after = before[:1], after[:1]
        elif number == num_read and before[1] != after[1]:
            # behind its start, as nothing else is known of its contents
            before, after = ([name, digest[:8]] for name, _, digest in (before, after))
        yield "the input (name, bytes, hash)", before, after


# ----- Rows to tokens -----------------------------------------------------------------------------------


class Batch(NamedTuple):
    """Rows that a core renders at a time."""

    source: int
    # (number of the row, its place in words, what `Renderer.read` made of it, or Unusable)
    rows: Sequence[tuple[int, str, Any]]
    num_bytes: int


def read_batches(renderer, downloads, begin):
    """The rows of the files of `downloads` in batches; of the first file, from the row at which this run begins."""
    for number, source in downloads:
        needed = renderer.needed if number == 0 else ()
        rows = read_rows(source, renderer.columns, separator=renderer.separator, needed=needed)
        first = begin.row if number == begin.source else 0
        batch, batch_bytes = [], 0
        for row_number, row in itertools.islice(enumerate(rows), first, None):
            try:
                entry, num_bytes = renderer.read(row)
            except Unusable as error:
                entry, num_bytes = error, 0
                error.values = row.values
            batch.append((row_number, row.place, entry))
            batch_bytes += num_bytes
            if batch_bytes >= BATCH_BYTES:
                yield Batch(number, batch, batch_bytes)
                batch, batch_bytes = [], 0
        yield Batch(number, batch, batch_bytes)


def encode_all(renderer, enc, batches, num_threads):
    """Yield (batch, what becomes of each row that can be used) of the batches in order, in `num_threads` threads.

    This thread reads, and the others tokenize, as tiktoken releases Python's lock meanwhile.
    """
    worker = threading.local()

    def start():
        # subtle: each thread gets a copy, as sharing one costs a tenth more CPU time
        worker.enc = tokenizers.copy_encoding(enc, enc.name, enc._special_tokens)

    def encode(batch):
        usable = [entry for _, _, entry in batch.rows if not isinstance(entry, Unusable)]
        return renderer.encode(worker.enc, usable)

    executor = ThreadPoolExecutor(num_threads, initializer=start)
    pending, most, num_bytes, failure = collections.deque(), QUEUE * num_threads, 0, None
    try:
        while True:
            try:
                while num_bytes < QUEUE_BYTES and len(pending) < most and (batch := next(batches, None)):
                    pending.append((batch, executor.submit(encode, batch)))
                    num_bytes += batch.num_bytes
            except (UserError, OSError) as error:  # of a file: what is before it goes into the shards
                failure = error
            if not pending:
                break
            batch, future = pending.popleft()
            num_bytes -= batch.num_bytes
            yield batch, future.result()
        if failure:
            raise failure
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


def number_units(encoded, names, counts):
    """The Units of batches of files with these `names`; rows that cannot be used are only counted."""
    for batch, rendered in encoded:
        coming = iter(rendered)
        for row, place, entry in batch.rows:
            tokens, more = Rendered(entry) if isinstance(entry, Unusable) else next(coming)
            if isinstance(tokens, Unusable):
                counts.leave_out(place, names[batch.source], tokens)
                continue
            yield Unit(batch.source, row, 0, tokens, counts.numbers)
            if more:
                counts.numbers = (counts.numbers[0], *map(operator.add, counts.numbers[1:], more))


def limit_tokens(units, limit, bar, sizes):
    """The first `limit` tokens of units, counted on a progress bar.

    sizes: those of the files in bytes. If the bar has no total, it is estimated from the files that were read.
    """
    is_known, current, before = bar.total is not None, None, [0, *itertools.accumulate(sizes)]
    for unit in units:
        if unit.source != current and len(sizes) > 1:
            current = unit.source
            bar.set_postfix_str(f"file {current + 1} of {len(sizes)}", refresh=False)
            if before[current] and not is_known:
                bar.total = bar.n * before[-1] // before[current]
        length = unit.tokens.shape[-1]
        if length > limit:
            unit = unit._replace(tokens=unit.tokens[..., :limit])
        yield unit
        bar.update(min(length, limit))
        limit -= length
        if limit <= 0:
            break


# ----- Two splits, and shards ---------------------------------------------------------------------------


class ValidationSample:
    """Takes every `every`-th unit of the input (0: none) that still fits in a tenth of the input and in one shard."""

    def __init__(self, every, shape, num_seen):
        self.every, self.num_seen = every, num_seen  # tokens of both splits so far
        self.buffer, self.num_tokens = np.empty(shape, np.uint16), 0

    def add(self, tokens):
        self.buffer[..., self.num_tokens : self.num_tokens + tokens.shape[-1]] = tokens
        self.num_tokens += tokens.shape[-1]

    def tokens(self):
        return self.buffer[..., : self.num_tokens]

    def remove_from(self, units):
        """Keep the chosen ones of the units, and yield the others."""
        for unit in units:
            length = unit.tokens.shape[-1]
            self.num_seen += length
            # the choice depends only on a unit's place in the input and the lengths of those up to it
            largest = min(self.buffer.shape[-1], self.num_seen // 10)
            fits = self.num_tokens + length <= largest
            if fits and self.every and (unit.source + unit.row + unit.part + 1) % self.every == 0:
                self.add(unit.tokens)
            else:
                yield unit

    def top_up(self, last, block):
        """If the input had few units, take what is missing from the end of the last shard. Returns the rest of it."""
        wanted = min(self.buffer.shape[-1], self.num_seen // self.every)
        missing = max(1, wanted) - self.num_tokens
        if missing <= self.num_tokens:  # half of what is wanted is enough
            return last
        cut = max(0, last.shape[-1] - math.ceil(missing / block) * block)
        self.add(last[..., cut:])
        return last[..., :cut]


def cut_into_shards(units, shape, skip=0):
    """Cut units into shards of this shape, skipping the first `skip` tokens.

    Yields (tokens, end): `end` is the Position in the input at which the next shard starts, None after the last. The
    next shard overwrites `tokens`. Documents of 3, 5 and 1 tokens in shards of 4:

        aaab | bbbb | c     ending at row 1, token 1; row 2, token 0; None
    """
    shard, filled = np.empty(shape, np.uint16), 0
    size = shard.shape[-1]
    for source, row, part, tokens, counts in units:
        position, skip = skip, 0
        length = tokens.shape[-1]
        while position < length:
            if filled == size:  # as another token follows, this is not the last shard
                yield shard, Position(source, row, part, position, counts=counts)
                filled = 0
            end = min(length, position + size - filled)
            shard[..., filled : filled + end - position] = tokens[..., position:end]
            filled += end - position
            position = end
    yield shard[..., :filled], None


def make_shards(
    writer: "ShardWriter",
    found: list[sources.Source],
    options: DataOptions,
    *,
    max_tokens: int = 0,
    expected: int = 0,
) -> None:
    """Read, render, cut and write, from where an earlier run ended to the end of the input or to `max_tokens`.

    expected: about how many tokens there will be; 0 if that is not known.
    """
    with contextlib.ExitStack() as stack:
        is_complete = writer.is_complete()
        if not is_complete:  # several processes may use complete shards at once
            stack.enter_context(lock_folder(writer.folder))
            writer.load()  # another process may have worked on it until now
            is_complete = writer.is_complete()
        meta, renderer = writer.meta, writer.renderer
        if is_complete:
            print(f"{writer.title} is complete: {meta.tokens:,} tokens in {len(meta.shards)} shards")
            return
        begin, size = writer.resume(), max(1, options.shard_size // renderer.block) * renderer.block
        shape = (size,) if renderer.pad is None else (2, size)
        # before the unit at which this run begins, and without what is behind the last blocks of the shards
        num_seen = meta.tokens - len(meta.shards) * writer.padding - begin.token
        sample = ValidationSample(meta.validation_every, shape, num_seen)
        if begin.sampled:
            sample.add(writer.read(writer.validation_file, begin.sampled))
        total, sizes = max_tokens or expected or None, [source.size for source in found]
        if found[0].repo:
            # a shard has about as many bytes as the files, which are compressed. Beside a few shards' text, three files
            # may be on disk: one is finished, one is being read, one is being downloaded
            check_disk_space(writer.folder, (2 * (total - num_seen) if total else sum(sizes)) + 3 * max(sizes))
            writer.save()  # so that the files that are on disk can be found again without a network
        ahead = not max_tokens  # with a limit, the next file may not be needed
        downloads = sources.Downloads(found, writer.path(".download"), begin.source, ahead)
        num_threads = min(options.num_proc or num_cores(), MAX_THREADS)
        encoded = encode_all(renderer, writer.enc, read_batches(renderer, downloads, begin), num_threads)
        counts = Counts(begin.counts, meta.left_out, others=renderer.counted)
        bar = tqdm(total=total, initial=num_seen, unit="tok", unit_scale=True, desc=writer.title, delay=0.5)
        tokens = None
        with bar, contextlib.closing(encoded):
            units = renderer.pack(number_units(encoded, [source.name for source in found], counts))
            units = itertools.dropwhile(lambda unit: unit[:3] < begin[:3], units)
            units = sample.remove_from(limit_tokens(units, (max_tokens or sys.maxsize) - num_seen, bar, sizes))
            for tokens, end in cut_into_shards(units, shape, begin.token):
                if end:
                    writer.write_both(tokens, sample, end, counts)
                    downloads.remove_before(end.source)  # not earlier: what is not in a shard will be read again
        writer.write_rest(tokens, sample, counts)
        downloads.close()  # before the end is recorded: what is complete is not looked at again
        writer.finish()
        counts.note()


def check_disk_space(folder: str, size: int) -> None:
    """Raise UserError if the disk that `folder` is on has less than `size` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < size:
        raise UserError(
            f"The shards need {size / 1e9:.1f} GB, but the disk of {folder} has {free / 1e9:.1f} GB free. Make room, "
            "choose another --out-dir, or ask for fewer tokens with --max-tokens or --pretokenized."
        )


# ----- Writing ------------------------------------------------------------------------------------------


def shard_name(prefix, number):
    """("books", 12) -> "books_train_000012.npy"; number 0 is the validation split."""
    return f"{prefix}_{'train' if number else 'val'}_{number:06d}.npy"


def write_array(path, array):
    """Write tokens or a mask as np.save does, which would hide why a write failed."""
    with atomic_write(path) as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(array.data)


class ShardWriter:
    """Writes the shards of a folder and their meta.json; continues or refuses those that are there."""

    def __init__(self, folder: str, meta: Meta, enc: Any, *, renderer: Renderer, prefix: str = ""):
        if enc.n_vocab > 2**16:
            raise UserError(
                f"Tokenizer {enc.name} has {enc.n_vocab:,} ids, but shards can hold 65,536. Use a smaller one."
            )
        self.folder, self.enc, self.renderer = folder, enc, renderer
        has_masks = renderer.pad is not None
        self.padding = int(has_masks)  # tokens behind the last block of a shard: the target of its last position
        self.new_meta = replace(meta, tokenizer=enc.name, vocab_size=enc.n_vocab, masks=has_masks)
        self.title = console.plain(folder)  # to be printed
        name = os.path.basename(os.path.abspath(folder))
        self.prefix = prefix or re.sub(r"[^A-Za-z0-9]+", "-", name)
        self.load()

    def load(self):
        self.meta = continue_meta(self.folder, self.new_meta)
        for file in self.meta.shards:  # the folder may have had another name when they were begun
            self.prefix = re.sub(r"_(train|val)_\d+\.\w+$", "", file)
        # sampled from all of the input, it grows with every training shard
        self.validation_file = shard_name(self.prefix, 0) if self.meta.validation_every else None

    def is_complete(self):
        shards = self.meta.shards
        return self.meta.complete and shards and all(self.is_whole(file) for file in shards)

    def is_whole(self, file):
        """Whether a shard, and its mask, can be read and have as many entries as meta.json says."""
        return set(self.lengths(file)) == {self.meta.shards.get(file)}

    def lengths(self, file):
        """Those of a shard and of its mask, if there are masks; [0] if one of them is missing or damaged."""
        try:
            return list(map(len, self.open(file)))
        except (UserError, OSError):
            return [0]

    def open(self, file):
        """A shard and, if there are masks, its mask; of other lengths if this was killed while both were replaced."""
        opened = [shards.open_shard(self.path(file))]
        if self.meta.masks:
            opened.append(shards.open_shard(self.path(file.replace(".npy", ".mask")), dtype=np.uint8))
        return opened

    def resume(self) -> Position:
        """Keep the shards before the first damaged one; return the position in the input at which they end."""
        meta, kept, end = self.meta, {}, Position()
        for file, recorded in meta.ends.items():
            if not self.is_whole(file):
                break
            kept[file] = meta.shards[file]
            end = Position(*recorded[:6], counts=tuple(recorded[6:]))
        if self.validation_file in meta.shards:
            if min(self.lengths(self.validation_file)) < end.sampled:  # damaged: nothing can be kept
                kept, end = {}, Position()
            kept = {self.validation_file: end.sampled + self.padding} | kept
        meta.shards, meta.tokens, meta.documents = kept, sum(kept.values()), end.documents
        meta.complete = False
        return end

    def path(self, file):
        return os.path.join(self.folder, file)

    def read(self, file, count):
        """The first `count` tokens of a shard, with their mask if there are masks."""
        arrays = [each.read(0, count) for each in self.open(file)]
        return np.stack(arrays) if self.meta.masks else arrays[0]

    def write(self, file: str, tokens: np.ndarray) -> None:
        """Write a shard, and before it its mask: without one, every token would count as a target."""
        if self.renderer.pad is not None:
            tokens, mask = np.hstack([tokens, self.renderer.pad])
            write_array(self.path(file.replace(".npy", ".mask")), mask.astype(np.uint8))
        write_array(self.path(file), tokens)
        self.meta.shards[file] = len(tokens)

    def write_both(self, tokens, sample, end, counts):
        """Write the sample and then the next shard, if it has tokens, then meta.json, which says where the next begins.

        The first call writes the tokenizer before them. If killed in between, the shard is written again.
        """
        meta = self.meta
        if not meta.shards:
            tokenizers.save_for_folder(self.enc, self.folder)
            self.save()
        if self.validation_file:
            self.write(self.validation_file, sample.tokens())
        if tokens.shape[-1]:
            file = shard_name(self.prefix, len(meta.shards))
            self.write(file, tokens)
            meta.documents += self.count_documents(tokens)
            if end:
                end = end._replace(sampled=sample.num_tokens, documents=meta.documents)
                meta.ends[file] = [*end[:-1], *end.counts]
                meta.left_out = counts.sentences
                self.save()

    def write_rest(self, rest, sample, counts):
        """Write what is left at the end, so that there is something to train on and to validate on."""
        is_first, size, block = not self.meta.shards, rest.shape[-1], self.renderer.block
        if is_first and counts.first and not size + sample.num_tokens:
            raise UserError(f"No row can be used. {self.renderer.explain(*counts.first)}")
        if is_first and not self.has_text(rest) and not self.has_text(sample.tokens()):
            raise UserError("The input contains no text. Check --input and --text-column.")
        if self.validation_file:
            rest = sample.top_up(rest, block)
        elif is_first:  # the first shard would be all validation: cut it into tenths
            size = math.ceil(size / 10)
        if is_first and not rest.shape[-1]:
            documents = console.count(self.count_documents(sample.tokens()), self.renderer.noun)
            raise UserError(
                f"{documents} fill {sample.num_tokens // block} of the two blocks of {block} tokens needed. Add more,"
                " or lower --max-length."
            )
        for start in range(0, max(1, rest.shape[-1]), max(1, size)):
            self.write_both(rest[..., start : start + size], sample, None, counts)
        self.meta.documents += self.count_documents(sample.tokens())
        self.meta.rows_left_out, self.meta.left_out = counts.numbers[0], counts.sentences

    def has_text(self, tokens):
        return self.count_documents(tokens) < tokens.size

    def count_documents(self, tokens):
        ids = tokens if tokens.ndim == 1 else tokens[0]
        return int(np.count_nonzero(ids == self.enc.eot_token))

    def save(self):
        self.meta.tokens = sum(self.meta.shards.values())
        with atomic_write(self.path("meta.json"), "w", encoding="utf-8") as file:
            json.dump(vars(self.meta), file, indent=1)

    def finish(self):
        self.meta.complete = True
        self.save()
        train, val = (sum(self.meta.lengths(split)) for split in ("train", "val"))
        print(f"{self.title}: {train:,} tokens to train on, {val:,} to validate on")
        num_shards = console.count(len(self.meta.shards), "shard")
        print(f"in {num_shards}, from {console.count(self.meta.documents, self.renderer.noun)}")
        if self.meta.masks:
            num_targets = sum(int(self.open(file)[1].read().sum()) for file in self.meta.shards)
            print(f"{num_targets:,} tokens are targets")
