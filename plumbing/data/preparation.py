"""Turn the files of a data set into token shards: read and tokenize rows, split them, write shards and meta.json.

Each script has a Renderer that turns rows into tokens. Everything else is the same for documents and conversations. A
row is a whole document, or a piece of a long text. A shard holds whole rows, so a position in the input is two numbers:
that of the file, and that of the row in it. They also decide whether the row is for validation.

After each run of rows, meta.json records where the next one begins. If the command is killed, the same command
continues from there, and on any number of cores it writes the same bytes.
"""

import array
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
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiktoken
from tqdm import tqdm

from plumbing.cli import console
from plumbing.cli.console import UserError
from plumbing.data import downloads, hub, shards, tokenizers
from plumbing.data.inputs import Source
from plumbing.data.options import DataOptions
from plumbing.data.readers import Counts, Row, Unusable, read_rows
from plumbing.data.shards import Meta, read_meta
from plumbing.files import atomic_write, lock_folder, remove_folder
from plumbing.system.limits import num_cores

BATCH_BYTES = 2**19  # of text per task of a core: 0.04 s of work, so that the overhead is negligible
QUEUE_BYTES = 2**26  # of text in the queue: enough to keep all cores busy while a shard is written
MAX_THREADS = 32  # more than the reading thread keeps busy; each has its own copy of the tokenizer, 4 MB
VALIDATE_EVERY = 11  # one row in 11 is for validation, fewer in a large text
# flags that do not change the tokens, or are recorded under another name
UNRECORDED = ("input", "dataset", "tokenizer", "out_dir", "num_proc", "pretokenized", "init_from")


class Tokens(NamedTuple):
    ids: np.ndarray  # (n,) of uint16
    mask: np.ndarray = np.empty(0, np.uint8)  # (n,); or (0,): all tokens are targets


class Rendered(NamedTuple):
    """What a Renderer makes of a row."""

    tokens: Tokens | Unusable
    counts: Mapping[str, int] = {}  # what happened in it: {"message to and from tools left out": 2}
    unread: Sequence[str] = ()  # the name of each value that is not read


class End(NamedTuple):
    """Where a run of rows ends, and counts up to there: an entry in meta.json's `ends`."""

    file: int = 0  # the number of the next row's file
    row: int = 0  # the number of the next row in it
    row_hash: int = 0  # of the rows before it in its file
    documents: int = 0
    counts: Mapping[str, int] = {}
    unread: Mapping[str, int] = {}


class Renderer:
    """Turns rows into tokens, in several threads at once."""

    needed: Sequence[str] = ()  # columns that the first file must have
    separator = ""  # between the documents of a text file
    prefix = ""  # of the shards' names; by default the folder's name
    noun = "document"
    masks = False

    def render(self, enc: tiktoken.Encoding, rows: list[Row]) -> list[Rendered]:
        raise NotImplementedError

    def arrange(self, tokens: Tokens) -> Tokens:
        """The tokens of a shard, in the order to write them."""
        return tokens


# ----- The shards to make -------------------------------------------------------------------------------


def data_set_complaints(options: DataOptions) -> list[str]:
    """Complaints about the flags that name a data set."""
    names = ("dataset", "config", "split", "revision")
    changed = [name for name in names if getattr(options, name) != getattr(type(options), name)]
    if options.input and changed:
        return [f"--input reads your own files, so leave {' and '.join(f'--{name}' for name in changed)} out."]
    return []


def plan(options: DataOptions, *, default: str = "") -> tuple[str, list[Source], Meta]:
    """(folder, files, initial Meta) for the shards that a script's options describe.

    default: the default of --out-dir, if the folder is not named after the data set. For each folder, the hub is asked
    for its files only once.
    """
    if options.input:
        files = hub.find_files(options)
        default = os.path.basename(files.sources[0].name).lstrip(".").split(".")[0]  # books.jsonl.gz: books
        if os.path.isdir(options.input[0]):
            default = os.path.basename(os.path.abspath(options.input[0])) + "_shards"
        folder = options.out_dir or default
    else:
        folder = options.out_dir or default or os.path.basename(options.dataset)
        meta = read_meta(folder)
        with shards.damage_named(folder):
            files = hub.recorded_files(meta, options)
        files = files or hub.find_files(options)
    meta = Meta(files.dataset, complete=False)
    meta.made_from = {name: value for name, value in vars(options).items() if name not in UNRECORDED}
    meta.made_from |= {"config": files.config, "split": files.split, "revision": files.commit}
    meta.made_from["sources"] = [source.recorded() for source in files.sources]
    num_bytes = sum(source.size for source in files.sources)
    if most := meta.made_from.get("max_tokens"):
        num_bytes = min(num_bytes, most)  # a token has one byte or more
    meta.validation_every = max(VALIDATE_EVERY, math.ceil(num_bytes / options.shard_size))
    if files.commit:
        meta.asked = {name: getattr(options, name) for name in ("dataset", "config", "revision")}
    return folder, files.sources, meta


def existing_meta(folder: str, new: Meta) -> Meta:
    """The Meta of a folder that has shards of the same data, else `new`. UserError if its shards are of other data.

    A file that was not read to its end may have been fixed since, but not at its beginning.
    """
    old = read_meta(folder)
    has_shards = shards.has_shards(folder)
    is_used = has_shards or Path(folder, "meta.json").exists()
    if is_used and "sources" not in old.made_from:
        raise UserError(
            f"{folder} has files that fineweb.py and smoltalk.py did not write. Choose another --out-dir."
        )
    if not has_shards:
        return new
    with shards.damage_named(folder):
        num_read = sys.maxsize
        if not old.complete:
            num_read = max((End(**end).file for end in old.ends.values()), default=0)
        before = recorded_input(old, num_read)
    now = recorded_input(new, num_read)
    for key in before | now:
        if before.get(key, "") != now.get(key, ""):
            shown = [console.plain(repr(record.get(key, ""))) for record in (before, now)]
            raise UserError(
                f"{folder} has shards of other data: {key} was {shown[0]} and is now {shown[1]}. Move it away, or"
                " choose another --out-dir."
            )
    return dataclasses.replace(old, made_from=new.made_from)  # with the new sizes of fixed files


def recorded_input(meta: Meta, num_read: int) -> dict[str, Any]:
    """The settings and files that determine the tokens of shards. Sizes count only for the first `num_read` files."""
    record = {"dataset": meta.dataset, "tokenizer": meta.tokenizer} | meta.made_from
    for number, (name, size, digest) in enumerate(record.pop("sources")):
        key = f"file {number + 1} of the input (name, bytes, hash)"
        record[key] = [name, size, digest] if number < num_read else [name, digest]
    return record


def make_shards(
    folder: str,
    new: Meta,
    renderer: Renderer,
    *,
    enc: tiktoken.Encoding,
    sources: list[Source],
    options: DataOptions,
) -> Meta:
    """Make the shards that `new` describes, or the missing ones, in `folder`. Returns its Meta."""
    if enc.n_vocab > 2**16:
        raise UserError(
            f"Tokenizer {enc.name} has {enc.n_vocab:,} ids, but shards hold at most 65,536. Use a smaller one."
        )
    new = dataclasses.replace(new, tokenizer=enc.name, vocab_size=enc.n_vocab, masks=renderer.masks)
    meta = existing_meta(folder, new)
    if not is_complete(folder, meta):  # several processes may use complete shards at once
        with lock_folder(folder):
            meta = existing_meta(folder, new)  # another process may have finished it just now
            if not is_complete(folder, meta):
                write_shards(folder, meta, renderer, enc=enc, sources=sources, options=options)
                return meta
    print(f"{console.plain(folder)} is complete: {meta.tokens:,} tokens in {len(meta.shards)} shards")
    if options.input:
        print("The input was not read again: names, sizes and the first 4 KB of its files are the same.")
    return meta


def write_shards(
    folder: str,
    meta: Meta,
    renderer: Renderer,
    *,
    enc: tiktoken.Encoding,
    sources: list[Source],
    options: DataOptions,
) -> None:
    """Write the shards that are still missing."""
    end = keep_whole(folder, meta)
    meta.documents = end.documents
    counts = Counts(end.counts, end.unread, meta.left_out)
    most = meta.made_from.get("max_tokens", 0)
    download_folder = os.path.join(folder, ".download")
    first = 0
    if sources[0].repo:
        first = end.file  # those before it are the same: they are of one commit
        prepare_downloads(folder, meta, [source.size for source in sources])
    # with a limit, the next file may not be needed
    files = downloads.fetch_all(sources, download_folder, first=first, ahead=not most)
    rows = read_files(renderer, files, end, meta.hashes)
    num_threads = min(options.num_proc or num_cores(), MAX_THREADS)
    title = console.plain(folder)
    bar = tqdm(total=most or None, initial=meta.tokens, unit="tok", unit_scale=True, desc=title, delay=0.5)
    run = Run()
    with bar, contextlib.closing(render_all(renderer, enc, rows, num_threads=num_threads)) as rendered:
        for row, (tokens, happened, unread) in rendered:
            if isinstance(tokens, Unusable):
                counts.leave_out(row.place, sources[row.file].name, tokens)
            else:
                if run.is_full(split_for(row, meta), tokens, options.shard_size):
                    write(folder, meta, run.tokens(), counts=counts, renderer=renderer, enc=enc)
                    record_end(folder, meta, row, counts=counts)
                    # a file stays until all its rows are in shards: after a kill, it is read again
                    downloads.remove_fetched(sources[: row.file], download_folder)
                    run = Run()
                run.add(split_for(row, meta), tokens)
                bar.set_postfix_str(f"file {row.file + 1} of {len(sources)}", refresh=False)
                bar.update(len(tokens.ids))
            counts.add(happened, unread)
            meta.hashes[str(row.file)] = row.hash
            if most and bar.n >= most:
                break
    last = run.tokens()
    if not all(meta.lengths(split) or len(last[split].ids) for split in last):
        last = in_two(last, enc.eot_token, renderer, counts=counts)
    write(folder, meta, last, counts=counts, renderer=renderer, enc=enc)
    remove_folder(download_folder)  # before the end is recorded: complete folders are not looked at again
    finish(folder, meta, renderer.noun)
    counts.note()


def record_end(folder: str, meta: Meta, following: Row, *, counts: Counts) -> None:
    """Record that the rows before this one are in shards."""
    end = End(
        file=following.file,
        row=following.number,
        row_hash=meta.hashes.get(str(following.file), 0),
        documents=meta.documents,
        counts=dict(counts.numbers),
        unread=dict(counts.unread),
    )
    meta.ends[list(meta.shards)[-1]] = end._asdict()
    save(folder, meta)


def prepare_downloads(folder: str, meta: Meta, sizes: list[int]) -> None:
    """Raise UserError if files of these sizes and their shards do not fit on the disk."""
    most = meta.made_from.get("max_tokens", 0)
    # shards of whole files take about as many bytes as the files, which are compressed
    shard_bytes = 2 * (most - meta.tokens) if most else sum(sizes)
    # three files may be on disk: one is finished, one is being read, one is being downloaded
    check_disk_space(folder, shard_bytes + 3 * max(sizes))
    save(folder, meta)  # so that downloaded files can be found again offline


def check_disk_space(folder: str, size: int) -> None:
    """Raise UserError if the disk of `folder` has less than `size` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < size:
        raise UserError(
            f"The shards need {size / 1e9:.1f} GB, but the disk of {folder} has {free / 1e9:.1f} GB free. Make room, "
            "choose another --out-dir or, in fineweb.py, ask for less with --max-tokens or --pretokenized."
        )


# ----- Rows to tokens -----------------------------------------------------------------------------------


def read_files(
    renderer: Renderer, files: Iterable[tuple[int, Source]], end: End, hashes: Mapping[str, int]
) -> Iterator[Row]:
    """Yield the rows after `end`. UserError if those before it have changed. files: (number, source) of each file."""
    for number, source in files:
        needed = renderer.needed if number == 0 else ()
        rows = read_rows(source, separator=renderer.separator, needed=needed)
        rows = number_rows(rows, number)
        row_hash = 0
        if number <= end.file:
            for row in itertools.islice(rows, end.row if number == end.file else None):
                row_hash = row.hash
        if row_hash != hashes.get(str(number), 0):
            raise UserError(
                f"{source.name} has changed: rows of it are in the shards, but they are different now. Restore the "
                "file, or make the shards again in another folder."
            )
        yield from rows


def number_rows(rows: Iterable[Row], file: int) -> Iterator[Row]:
    """Set the fields that tell where a row is, and what its file has up to it."""
    total = 0
    for number, row in enumerate(rows):
        fields = row.values.values() if isinstance(row.values, dict) else [row.values]
        # repr of a long text would be slow
        content = "\n".join(map(str, fields)).encode("utf-8", "surrogatepass")
        total = zlib.crc32(content, total)
        yield row._replace(file=file, number=number, size=len(content), hash=total)


def render_all(
    renderer: Renderer, enc: tiktoken.Encoding, rows: Iterator[Row], *, num_threads: int
) -> Generator[tuple[Row, Rendered], None, None]:
    """Yield (row, what it became) in order. Batches of rows are rendered in `num_threads` threads.

    This thread reads the files. tiktoken releases the GIL, so the others tokenize at the same time.
    """
    worker = threading.local()
    failures = []

    def render(batch: list[Row]) -> Iterable[tuple[Row, Rendered]]:
        if not hasattr(worker, "enc"):
            # subtle: each thread gets a copy, because sharing one costs a tenth more CPU time
            worker.enc = tokenizers.copy_encoding(enc, enc.name, enc._special_tokens)
        return zip(batch, renderer.render(worker.enc, batch))

    def until_failure():
        try:
            yield from rows
        except (UserError, OSError) as error:  # in a file: the rows before it still go into shards
            failures.append(error)

    executor = ThreadPoolExecutor(num_threads)
    pending: collections.deque[tuple[int, Future]] = collections.deque()
    waiting = 0
    try:
        for batch, num_bytes in batches_of(until_failure()):
            pending.append((num_bytes, executor.submit(render, batch)))
            waiting += num_bytes
            while waiting >= QUEUE_BYTES:
                num_bytes, future = pending.popleft()
                waiting -= num_bytes
                yield from future.result()
        while pending:
            _, future = pending.popleft()
            yield from future.result()
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
    if failures:
        raise failures[0]


def batches_of(rows: Iterable[Row]) -> Iterator[tuple[list[Row], int]]:
    """Yield (rows, bytes) with at least BATCH_BYTES in each batch but the last."""
    batch = []
    num_bytes = 0
    for row in rows:
        batch.append(row)
        num_bytes += row.size
        if num_bytes >= BATCH_BYTES:
            yield batch, num_bytes
            batch = []
            num_bytes = 0
    yield batch, num_bytes


# ----- Splits and shards --------------------------------------------------------------------------------


def split_for(row: Row, meta: Meta) -> str:
    """The split of a row. One in `validation_every` is for validation, at a pseudorandom place among the first eleven.

    0: the first run of rows is for validation. The file's number and the row's number are added, so that files with a
    single row are sampled as well.
    """
    if not meta.validation_every:
        return "train" if meta.shards else "val"
    group, number = divmod(row.file + row.number, meta.validation_every)
    return "val" if number == zlib.crc32(b"%d" % group) % VALIDATE_EVERY else "train"


class Run:
    """A run of rows, which becomes a shard for each split."""

    def __init__(self):
        self.ids = {"val": array.array("H"), "train": array.array("H")}
        self.masks = {"val": array.array("B"), "train": array.array("B")}

    def is_full(self, split: str, tokens: Tokens, size: int) -> bool:
        """Whether a row does not fit into a shard of `size` tokens. A longer row is a shard by itself."""
        length = len(self.ids[split])
        return length > 0 and length + len(tokens.ids) > size

    def add(self, split: str, tokens: Tokens) -> None:
        self.ids[split].frombytes(tokens.ids.tobytes())
        self.masks[split].frombytes(tokens.mask.tobytes())

    def tokens(self) -> dict[str, Tokens]:
        return {split: Tokens(np.asarray(ids), np.asarray(self.masks[split])) for split, ids in self.ids.items()}


def in_two(parts: dict[str, Tokens], eot: int, renderer: Renderer, *, counts: Counts) -> dict[str, Tokens]:
    """Split the last rows if all rows of the input were for one split: about a tenth goes to the other one.

    A single document is cut in two. A single conversation is a UserError, and so is an input without any text.
    """
    whole = max(parts.values(), key=lambda tokens: len(tokens.ids))
    if not len(whole.ids):
        if counts.examples:
            raise UserError(f"No row can be used. {counts.examples[0]} {counts.advice}")
        raise UserError("The input contains no text. Check --input and, in fineweb.py, --text-column.")
    tenth = math.ceil(len(whole.ids) / 10)
    starts = np.flatnonzero(whole.ids == eot)[1:]
    if not len(starts) and renderer.masks:
        raise UserError(f"One {renderer.noun} is not enough: another is needed to validate on. Add more.")
    middle = int(min(starts, key=lambda start: abs(start - tenth), default=tenth))
    halves = [
        Tokens(whole.ids[:middle], whole.mask[:middle]),
        Tokens(whole.ids[middle:], whole.mask[middle:]),
    ]
    val, train = sorted(halves, key=lambda tokens: len(tokens.ids))
    return {"val": val, "train": train}


# ----- Writing ------------------------------------------------------------------------------------------


def write(
    folder: str,
    meta: Meta,
    parts: dict[str, Tokens],
    *,
    counts: Counts,
    renderer: Renderer,
    enc: tiktoken.Encoding,
) -> None:
    """Write a shard for each split that has tokens. Before the first ones, write the tokenizer and meta.json.

    A shard counts when meta.json lists it. After a kill before that, it is written again.
    """
    if not meta.shards:
        tokenizers.save_for_folder(enc, folder)
        save(folder, meta)
    prefix = renderer.prefix or re.sub(r"[^A-Za-z0-9]+", "-", os.path.basename(os.path.abspath(folder)))
    for file in meta.shards:  # the folder may have been renamed since the first one
        prefix = file.rsplit("_", 2)[0]
    first_numbers = {"val": 0, "train": 1}
    for split, tokens in parts.items():
        if not len(tokens.ids):
            continue
        meta.documents += int(np.count_nonzero(tokens.ids == enc.eot_token))
        arranged = renderer.arrange(tokens)
        number = first_numbers[split] + len(meta.lengths(split))
        path = Path(folder, f"{prefix}_{split}_{number:06d}.npy")
        if meta.masks:  # before the shard: without a mask, all its tokens would be targets
            write_array(path.with_suffix(".mask"), arranged.mask)
        write_array(path, arranged.ids)
        meta.shards[path.name] = len(arranged.ids)
    meta.rows_left_out = counts.numbers[Counts.LEFT_OUT]
    meta.left_out = counts.examples


def write_array(path: Path, array: np.ndarray) -> None:
    """Write an array in np.save's format. np.save itself would hide why a write failed."""
    with atomic_write(path) as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(array.data)


def is_whole(folder: str, meta: Meta, file: str) -> bool:
    """Whether a shard and its mask can be read, and are as long as meta.json says."""
    path = Path(folder, file)
    length = meta.shards.get(file, -1)
    try:
        shards.open_shard(path, length=length)
        if meta.masks:
            shards.open_shard(path.with_suffix(".mask"), dtype=np.uint8, length=length)
        return True
    except (UserError, OSError):
        return False


def is_complete(folder: str, meta: Meta) -> bool:
    return meta.complete and bool(meta.shards) and all(is_whole(folder, meta, file) for file in meta.shards)


def keep_whole(folder: str, meta: Meta) -> End:
    """Keep the runs of rows before the first damaged shard, and return where the last of them ends."""
    kept = list(itertools.takewhile(lambda name: is_whole(folder, meta, name), meta.shards))
    while kept and kept[-1] not in meta.ends:
        kept.pop()
    meta.shards = {name: meta.shards[name] for name in kept}
    meta.ends = {name: end for name, end in meta.ends.items() if name in kept}
    meta.tokens = sum(meta.shards.values())
    meta.complete = False
    end = End()
    with shards.damage_named(folder):
        if kept:
            end = End(**meta.ends[kept[-1]])
        meta.hashes = {file: value for file, value in meta.hashes.items() if int(file) < end.file}
    meta.hashes[str(end.file)] = end.row_hash
    return end


def save(folder: str, meta: Meta) -> None:
    meta.tokens = sum(meta.shards.values())
    with atomic_write(Path(folder, "meta.json"), "w", encoding="utf-8") as file:
        json.dump(vars(meta), file, indent=1)


def finish(folder: str, meta: Meta, noun: str) -> None:
    """Record that the shards are complete, and print a summary."""
    meta.complete = True
    save(folder, meta)
    train = sum(meta.lengths("train"))
    val = sum(meta.lengths("val"))
    print(f"{console.plain(folder)}: {train:,} tokens to train on, {val:,} to validate on")
    print(f"in {console.count(len(meta.shards), 'shard')}, from {console.count(meta.documents, noun)}")
    if meta.masks:
        num_targets = 0
        for file in meta.shards:
            mask = shards.open_shard(Path(folder, file).with_suffix(".mask"), dtype=np.uint8)
            num_targets += int(mask.read().sum())
        print(f"{num_targets:,} tokens are targets")


# ----- The next command ---------------------------------------------------------------------------------


def training_command(preset: str, folder: str, *groups: tuple[str, Any]) -> list[Any]:
    """The command to train with a preset on the shards in a folder. groups: more flags with their values."""
    out_dir = f"log/{os.path.basename(os.path.abspath(folder))}"
    return ["python", "train_gpt2.py", ("--preset", preset), ("--data", folder), ("--out-dir", out_dir), *groups]


def batch_flags(lengths: list[int], T: int, *, most: int) -> list[tuple[str, int]]:
    """Flags for sequences of T tokens, in steps of at most `most` tokens. A pass takes at least 8 steps."""
    windows = sum((length - 1) // T for length in lengths)
    batch = max(1, min(most // T, windows // 8))
    batch = 2 ** (batch.bit_length() - 1)
    return [("--sequence-length", T), ("--total-batch-size", batch * T)]
