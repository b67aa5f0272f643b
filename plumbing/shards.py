"""Token shards: the one reader and writer of the format, and of the meta.json that describes a folder of them.

A shard is `<prefix>_<split>_<6 digits>.npy`, a one-dimensional uint16 array as np.save writes it. Shard 0
is the validation split. A mask lies next to its shard, with the suffix .mask: uint8, 1 where a token
counts as a target. Shards of two other programs are read, too: llm.c's .bin (a header of 256 int32:
20240520, version 1, number of tokens; then uint16), also without a number in the name
(tiny_shakespeare_train.bin), and nanoGPT's train.bin and val.bin, which are plain uint16.
"""

import functools
import hashlib
import itertools
import json
import os
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from plumbing import cli
from plumbing.cli import UserError
from plumbing.files import atomic_write, lock_folder, open_regular, read_json

BIN_MAGIC, BIN_VERSION = 20240520, 1
BIN_HEADER = 256  # int32
NANOGPT_NAMES = ("train.bin", "val.bin")
MAX_OPEN = 64  # files that a folder's shards keep open; many systems allow a process 1,024, some 256
SAMPLE_BLOCK, SAMPLE_BLOCKS = 4096, 4  # a fingerprint reads this many bytes per block, and blocks per file

# -----------------------------------------------------------------------------
# Reading


@dataclass
class Shard:
    """An array on disk, checked once. Its file is opened when it is read, by a function that may keep it open."""

    path: Path
    dtype: type
    length: int
    offset: int  # bytes before the first entry
    open_file: Callable
    lock: threading.Lock = field(default_factory=threading.Lock)  # reading moves the file's position

    def __len__(self):
        return self.length

    def read(self, start=0, count=sys.maxsize):
        """The `count` entries from `start`, or fewer at the shard's end; by default all of them."""
        entries = np.empty(min(count, self.length - start), self.dtype)
        with self.lock:
            file = self.open_file(self.path)
            file.seek(self.offset + start * entries.itemsize)
            num_bytes = file.readinto(entries)
        if num_bytes < entries.nbytes:
            raise UserError(f"Shard {self.path} became shorter while it was in use. Make it again.")
        return entries


def open_shards(folder, split):
    """A split's shards, for random reads by several threads: the MAX_OPEN files that were read last stay open.

    On some network file systems, opening a file for each read would take as long as a step.
    """
    keep_open = functools.lru_cache(MAX_OPEN)(open_regular)
    return [open_shard(path, keep_open) for path in find_shards(folder, split)]


def open_masks(shards):
    """The masks next to a split's shards; an empty list if there are none at all."""
    paths = [shard.path.with_suffix(".mask") for shard in shards]
    if not any(path.exists() for path in paths):
        return []
    return [open_shard(path, shard.open_file, np.uint8, len(shard)) for path, shard in zip(paths, shards)]


def open_shard(path, open_file=open_regular, dtype=np.uint16, length=None):
    """The shard at `path`, or a mask as long as its shard; UserError unless its header, type and size are right."""
    path = Path(path)
    try:
        found, shape, offset = open_bin(path) if path.suffix == ".bin" else open_npy(path)
        if found != dtype or len(shape) != 1 or length not in (None, *shape):
            raise ValueError(f"it holds {found} of shape {shape}, not {dtype.__name__} of shape ({length or 'n'},)")
    except (ValueError, FileNotFoundError) as error:
        raise UserError(
            f"{path} is missing or damaged: {cli.first_line(error)}. Delete {path.stem}.* and rerun the command that "
            "made it."
        ) from None
    return Shard(path, dtype, shape[0], offset, open_file)


def open_npy(path):
    """(dtype, shape, offset of the data in bytes) of a file as np.save writes it; ValueError unless it is whole."""
    open_regular(path).close()
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        return array.dtype, array.shape, array.offset
    except OSError:
        raise
    except Exception as error:  # numpy parses the header as Python, which may raise anything; a zip has no shape
        raise ValueError(cli.first_line(error).rstrip(".")) from None


def open_bin(path):
    """(dtype, shape, offset of the data in bytes) of a shard from llm.c or nanoGPT; ValueError unless it is whole."""
    with open_regular(path) as file:
        header = np.fromfile(file, np.int32, BIN_HEADER)
        num_bytes = os.fstat(file.fileno()).st_size
    start, num_tokens = header[:3].tolist(), num_bytes / 2 - 2 * BIN_HEADER
    if start == [BIN_MAGIC, BIN_VERSION, num_tokens]:
        return np.uint16, (int(num_tokens),), header.nbytes
    if path.name in NANOGPT_NAMES and start[:1] != [BIN_MAGIC] and num_bytes % 2 == 0:
        return np.uint16, (num_bytes // 2,), 0
    raise ValueError(
        f"its {num_bytes:,} bytes begin with {start}, not with {BIN_MAGIC}, {BIN_VERSION} and the number of its tokens"
    )


def find_shards(folder, split):
    """The paths of a split's shards in order. Raises UserError, with the remedy, if there are none."""
    paths = [path for path in Path(folder).glob("*") if split_of(path.name) == split]
    if not paths:
        raise UserError(
            f"There are no {split} shards in {folder}. Make them with fineweb.py (conversations: smoltalk.py), "
            "or give the folder that has them with --data."
        )
    return sorted(paths)


def split_of(name):
    """The split of a file by its name: "books_val_000000.npy" -> "val", "meta.json" -> None."""
    match = re.search(r"_(train|val)_.*\.(?:npy|bin)$|(?:^|_)(train|val)\.bin$", name)
    return (match[1] or match[2]) if match else None


def fingerprint(paths):
    """A hash of shards and their masks, in order: each file's size and a fixed sample of its blocks.

    Other data of the same length almost always have another hash, although only four blocks of 4 KB per file are
    read. Names do not count, so a folder may be moved.
    """
    digest = hashlib.sha256()
    for path in paths:
        digest.update(sample(path))
        if path.with_suffix(".mask").exists():
            digest.update(sample(path.with_suffix(".mask")))
    return digest.hexdigest()


def sample(path):
    """The size of a file and a fixed sample of its bytes, from the first block to the last."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        sampled = size.to_bytes(8, "big")
        for i in range(SAMPLE_BLOCKS):
            file.seek(max(0, size - SAMPLE_BLOCK) * i // (SAMPLE_BLOCKS - 1))
            sampled += file.read(SAMPLE_BLOCK)
    return sampled


# -----------------------------------------------------------------------------
# What a run checks before it trains


def check_size(loader, folder, split, num_tokens):
    """Raise UserError if the loader's windows have fewer than `num_tokens` tokens."""
    found = loader.num_windows * loader.T
    if found < num_tokens:
        raise UserError(
            f"The {split} shards in {folder} have {found:,} tokens in sequences of {loader.T} and one more, but "
            f"{num_tokens:,} are needed. Add shards, or lower --sequence-length or --total-batch-size."
        )


def check_folder(folder, train_loader, val_loader, enc):
    """Raise UserError unless the loaders' shards are those in meta.json, with ids of `enc` and valid masks."""
    shards = train_loader.shards + val_loader.shards
    check_token_ids(shards, enc.name, enc.n_vocab)
    check_meta(folder, shards)
    check_masks(train_loader.masks)
    check_masks(val_loader.masks)


def find_largest(arrays, count=sys.maxsize):
    """(largest entry, path) of the array with the largest one among its first `count` entries."""
    return max((int(array.read(0, count).max(initial=0)), array.path) for array in arrays)


def check_token_ids(shards, tokenizer, n_vocab):
    """Raise UserError if a shard has ids >= n_vocab: checks 128M ids, spread evenly over the shards."""
    largest, path = find_largest(shards, 2**27 // len(shards))
    if largest >= n_vocab:
        raise UserError(
            f"Shard {path} contains token id {largest}, but tokenizer {tokenizer} has only {n_vocab} ids. "
            "The folder's meta.json is missing or belongs to other shards; make the shards again in a new folder."
        )
    if path.name in NANOGPT_NAMES and largest < 1000 <= n_vocab and cli.is_rank_0():
        print(
            f"note: All ids in {path.parent} are below 1,000, as in nanoGPT's shards of characters, but they are read "
            f"as {tokenizer}'s. If they are characters, make shards of the text with fineweb.py --input."
        )


def check_masks(masks):
    """Raise UserError unless the masks of a split are all 0 or 1, and 1 somewhere.

    Reads all of them, because a wrong value would go unnoticed: SmolTalk's 0.8 GB take about half a second.
    """
    largest, path = find_largest(masks) if masks else (1, None)
    if largest != 1:
        raise UserError(
            f"The largest value in loss mask {path} is {largest}, but a mask is 1 where a token is a target and 0 "
            "elsewhere. Move its folder away and make the shards again with smoltalk.py."
        )


def check_meta(folder, shards):
    """Raise UserError unless each meta.json in `folder` is complete and together they list the shards.

    A folder without one, as written by other programs, is accepted.
    """
    if (Path(folder) / "meta.pkl").exists():
        raise UserError(
            f"{folder} has a meta.pkl: these are nanoGPT's shards of characters, whose tokenizer is not supported. "
            "Make shards of the text with fineweb.py --input."
        )
    metas = read_metas(folder).values()
    if not all(meta["complete"] and meta["tokens"] in (0, sum(meta["shards"].values())) for meta in metas):
        raise UserError(f"The shards in {folder} are not complete. Rerun the command that makes them: it continues.")
    listed = {name: length for meta in metas for name, length in meta["shards"].items()}
    found = {shard.path.name: len(shard) for shard in shards}
    if listed and listed != found:
        name = min(dict(listed.items() ^ found.items()))
        raise UserError(
            f"meta.json in {folder} does not describe its shards: {name} has {listed.get(name, 0):,} tokens in "
            f"meta.json and {found.get(name, 0):,} on disk. Rerun the command that made them."
        )


# -----------------------------------------------------------------------------
# Writing


def shard_name(prefix, number):
    """("books", 12) -> "books_train_000012.npy"; number 0 is the validation split."""
    return f"{prefix}_{'train' if number else 'val'}_{number:06d}.npy"


def output_folder(out_dir, sources, default):
    """--out-dir, or else a folder named after the first input: "texts/books.jsonl.gz" -> "books"."""
    if out_dir == "":
        raise UserError("--out-dir is empty. Give the name of a folder, or leave the flag out.")
    return out_dir or (os.path.basename(sources[0].name).split(".")[0] if sources else default)


def write_shard(path, array):
    """Write tokens (uint16) or a mask (uint8) to `path` atomically, byte for byte as np.save does."""
    with atomic_write(path) as file:
        # header and data in two steps, because np.save would hide why a write failed
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(array.data)


def make_once(open_writer, make, lock_name=".lock"):
    """Call `make(writer)` with the `open_writer()` of a folder, unless its shards are complete. Returns the folder.

    Several processes may use complete shards at once; the lock is only for writing.
    """
    writer = open_writer()
    if not writer.is_complete():
        with lock_folder(writer.folder, lock_name):
            writer = open_writer()  # another process may have worked on it until now
            if not writer.is_complete():
                make(writer)
                return writer.folder
    print(f"{writer.folder} is complete: {writer.meta['tokens']:,} tokens in {len(writer.meta['shards'])} shards")
    return writer.folder


class ShardWriter:
    """Writes the shards of a folder, or of one part of it, and the meta.json that describes them."""

    def __init__(self, folder, meta, enc, prefix="", part=0, num_parts=1):
        """`meta` describes the shards to be made: those in `folder` are continued, or refused if they do not match."""
        self.folder, self.part, self.num_parts, self.eot_token = folder, part, num_parts, enc.eot_token
        self.meta_path = meta_path(folder, part, num_parts)
        self.meta = continue_meta(folder, self.meta_path, meta)
        self.prefix = prefix or re.sub(r"[^A-Za-z0-9]+", "-", os.path.basename(os.path.abspath(folder)))
        for file in self.meta["shards"]:  # the folder may have had another name when they were begun
            self.prefix = re.sub(r"_(train|val)_\d+\.\w+$", "", file)
        # a validation split that is sampled from all of the input grows with every training shard
        self.validation_file = shard_name(self.prefix, 0) if self.meta.get("validation_every") else None

    def is_complete(self):
        shards = self.meta["shards"]
        adds_up = 0 < self.meta["tokens"] == sum(shards.values())
        return self.meta["complete"] and adds_up and all(self.is_whole(file) for file in shards)

    def is_whole(self, file):
        """Whether a shard can be read and has as many tokens as meta.json says."""
        try:
            return len(open_shard(self.path(file))) == self.meta["shards"].get(file)
        except (UserError, OSError):
            return False

    def resume(self):
        """Keep the shards before the first damaged one; return the position in the input at which they end."""
        meta, kept = self.meta, {}
        end, documents = [0, 0, 0, 0], 0
        for file, (*file_end, num_documents) in meta["ends"].items():
            if not self.is_whole(file):
                break
            kept[file] = meta["shards"][file]
            end, documents = file_end, num_documents
        if self.validation_file in meta["shards"]:
            kept = {self.validation_file: end[3]} | kept
            if len(self.read_validation(end[3])) < end[3]:  # damaged: nothing can be kept
                kept, end, documents = {}, [0, 0, 0, 0], 0
        meta |= {"shards": kept, "tokens": sum(kept.values()), "documents": documents, "complete": False}
        return end

    def read_validation(self, num_tokens):
        """The first `num_tokens` tokens of the sampled validation split; fewer if they are not there."""
        try:
            return open_shard(self.path(self.validation_file)).read(0, num_tokens)
        except (UserError, OSError):
            return np.empty(0, dtype=np.uint16)

    def path(self, file):
        return os.path.join(self.folder, file)

    def next_name(self):
        """The file name of the next shard; no two parts share a number."""
        return shard_name(self.prefix, len(self.meta["shards"]) * self.num_parts + self.part)

    def write(self, tokens, end):
        """Write a shard, then meta.json: if killed in between, the same shard is written again."""
        file = self.next_name()
        self.write_file(file, tokens)
        self.meta["documents"] += self.count_documents(tokens)
        if end:
            self.meta["ends"][file] = [*end, self.meta["documents"]]
            self.save()

    def write_file(self, file, tokens):
        write_shard(self.path(file), tokens)
        self.meta["shards"][file] = len(tokens)
        self.meta["tokens"] = sum(self.meta["shards"].values())

    def count_documents(self, tokens):
        return int(np.count_nonzero(tokens == self.eot_token))

    def save(self):
        with atomic_write(self.meta_path, "w", encoding="utf-8") as file:
            json.dump(self.meta, file, indent=1)

    def finish(self, noun="document"):
        """Mark the data set complete and print its totals."""
        meta = self.meta
        meta["complete"] = True
        self.save()
        lengths = split_lengths([meta])
        num_train = cli.count(sum(lengths["train"]), "token")
        print(f"{self.folder}: {num_train} to train on, {sum(lengths['val']):,} to validate on")
        num_shards = cli.count(len(meta["shards"]), "shard")
        print(f"in {num_shards}, the last one with what was left, from {cli.count(meta['documents'], noun)}")


def split_lengths(metas):
    """{"train": lengths of the shards, "val": lengths of the shards} of one meta.json, or one per part."""
    lengths = {"train": [], "val": []}
    for meta in metas:
        for name, length in meta["shards"].items():
            lengths[split_of(name)].append(length)
    return lengths


# -----------------------------------------------------------------------------
# meta.json


def meta_path(folder, part, num_parts):
    return Path(folder, f"meta.part-{part}-of-{num_parts}.json" if num_parts > 1 else "meta.json")


def num_parts_of(path):
    """ "data/meta.part-1-of-4.json" -> 4, "data/meta.json" -> 1"""
    match = re.search(r"-of-(\d+)\.json$", str(path))
    return int(match[1]) if match else 1


# ends: for each shard, the position in the input at which it ends (source, piece, token; with a sampled validation
# split, also the tokens sampled so far), and the number of documents so far
META_TYPES = dict(dataset=str, tokenizer=str, vocab_size=int, documents=int, tokens=int, shards=dict, complete=bool)
META_TYPES |= dict(made_from=dict, ends=dict)


def new_meta(dataset, enc, made_from):
    """The contents of a new meta.json. Raises UserError if shards cannot hold the ids of the tokenizer `enc`."""
    if enc.n_vocab > 2**16:
        raise UserError(f"Tokenizer {enc.name} has {enc.n_vocab:,} ids, but shards can hold 65,536. Use a smaller one.")
    empty = {key: kind() for key, kind in META_TYPES.items()}
    return empty | {"dataset": dataset, "tokenizer": enc.name, "vocab_size": enc.n_vocab, "made_from": made_from}


def read_metas(folder):
    """{path: contents} of the meta.json in `folder`, or of one per part.

    People also write short ones by hand, with only the tokenizer's name.
    """
    metas = {}
    remedy = "Move its folder away, or make the shards again in another folder."
    defaults = {key: kind() for key, kind in META_TYPES.items()} | {"tokenizer": None, "complete": True}
    for path in sorted(Path(folder).glob("meta*.json")):
        metas[path] = meta = defaults | read_json(path, remedy)
        for key, kind in META_TYPES.items():
            if type(meta[key]) is not kind:
                raise UserError(f"{path} is damaged: its {key} is missing or not of type {kind.__name__}. {remedy}")
    return metas


def continue_meta(folder, path, meta):
    """The meta at `path` if it continues `meta`, else `meta` itself; refuses a folder with a different data set."""
    metas = read_metas(folder)
    is_ours = all("sources" in old["made_from"] for old in metas.values())
    if not is_ours or (not metas and any(split_of(file.name) for file in Path(folder).glob("*"))):
        raise UserError(
            f"{folder} has shards or a meta.json that fineweb.py and smoltalk.py did not write. Choose another output "
            "folder."
        )
    for other_path, old in metas.items():
        was, now = settings(other_path, old), settings(path, meta)
        changes = [(key, was.get(key, ""), now.get(key, "")) for key in was | now]
        if other_path == path:  # the parts of a data set differ in their files
            changes += compare_sources(old, meta)
        for key, before, after in changes:
            if before != after:
                raise UserError(
                    f"{folder} has shards of other data: {key} was {cli.plain(repr(before))} and is now "
                    f"{cli.plain(repr(after))}. Move the folder away, or choose another output folder."
                )
    return metas.get(path, meta) | {"made_from": meta["made_from"]}  # with the present sizes of files that were fixed


def settings(path, meta):
    """What must be the same in meta.json, besides the sources, if one run continues another."""
    named = {"the number of parts": num_parts_of(path), "dataset": meta["dataset"], "tokenizer": meta["tokenizer"]}
    return named | meta["made_from"] | {"sources": None}


def compare_sources(old, meta):
    """[("the input", before, now)] for each file, as far as it must be the same to go on where `old` ends.

    A file that was not read to its end may differ after its start: its bad lines may have been fixed.
    """
    then, now = old["made_from"]["sources"], meta["made_from"]["sources"]
    last = max((end[0] for end in old["ends"].values()), default=-1)
    num_read = len(then) if old["complete"] else last
    pairs = []
    for i, (before, after) in enumerate(itertools.zip_longest(then, now, fillvalue=["no file", 0])):
        if i == num_read and before[1] != after[1]:
            before, after = ([name, *(digest[:8] for digest in digests)] for name, _, *digests in (before, after))
        length = 1 if i > num_read else len(before)  # older runs recorded no hash
        pairs.append(("the input (name, bytes, hash)", before[:length], after[:length]))
    return pairs
