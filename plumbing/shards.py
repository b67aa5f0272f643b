"""Token shards: the one reader and writer of the format, and of the meta.json that describes a folder of them.

A shard is `<prefix>_<split>_<6 digits>.npy`, a one-dimensional uint16 array as np.save writes it. Shard 0
is the validation split. A mask lies next to its shard, with the suffix .mask: uint8, 1 where a token
counts as a target. Shards of two other programs are read, too: llm.c's .bin (a header of 256 int32:
20240520, version 1, number of tokens; then uint16), also without a number in the name
(tiny_shakespeare_train.bin), and nanoGPT's train.bin and val.bin, which are plain uint16.
"""

import fnmatch
import functools
import hashlib
import itertools
import json
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from plumbing import cli
from plumbing.cli import UserError
from plumbing.files import atomic_write, lock_folder, open_regular

BIN_MAGIC, BIN_VERSION = 20240520, 1
BIN_HEADER = 256  # int32
LLAMA3_MAGIC = 20240801  # llm.c's shards of Llama 3's tokens, which are uint32
NANOGPT_NAMES = ("train.bin", "val.bin")
MAX_OPEN = 64  # files that a folder's shards keep open; many systems allow a process 1,024, some 256
MASK_BLOCK = 2**24  # entries of a mask that are checked at a time
SAMPLE_BLOCK, SAMPLE_BLOCKS = 4096, 4  # a fingerprint reads this many bytes per block, and blocks per file

# -----------------------------------------------------------------------------
# Reading


@dataclass
class OpenFile:
    """A file that several threads may read from. It is closed when nobody refers to it any more."""

    file: BinaryIO
    lock: threading.Lock = field(default_factory=threading.Lock)  # reading moves the file's position

    def read_into(self, array, offset):
        """Fill `array` from byte `offset` of the file on; return the number of bytes read."""
        with self.lock:
            self.file.seek(offset)
            return self.file.readinto(array)

    def __del__(self):
        self.file.close()


def open_file(path):
    return OpenFile(open_regular(path))


@dataclass
class Shard:
    """An array on disk, checked once. Its file is opened when it is read, by a function that may keep it open."""

    path: Path
    dtype: np.dtype
    length: int
    offset: int  # bytes before the first entry
    open_file: Callable = open_file

    def __len__(self):
        return self.length

    def read(self, start=0, count=None):
        """The `count` entries from `start`, or fewer at the shard's end; by default all of them."""
        available = max(0, self.length - start)
        entries = np.empty(available if count is None else min(count, available), self.dtype)
        if self.open_file(self.path).read_into(entries, self.offset + start * self.dtype.itemsize) < entries.nbytes:
            raise UserError(f"Shard {self.path} became shorter while it was in use. Make it again.")
        return entries


def open_shards(folder, split):
    """A split's shards, for random reads by several threads: the MAX_OPEN files that were read last stay open.

    On some network file systems, opening a file for each read would take as long as a step.
    """
    keep_open = functools.lru_cache(MAX_OPEN)(open_file)
    return [open_shard(path, keep_open) for path in find_shards(folder, split)]


def open_masks(shards):
    """The masks next to a split's shards; an empty list if there are none at all."""
    paths = [shard.path.with_suffix(".mask") for shard in shards]
    if not any(path.exists() for path in paths):
        return []
    return [open_mask(path, len(shard), shard.open_file) for path, shard in zip(paths, shards)]


def open_shard(path, open_file=open_file):
    """The shard at `path`; UserError unless its header, type, dimensions and size are right."""
    path = Path(path)
    try:
        dtype, shape, offset = open_bin(path) if path.suffix == ".bin" else open_npy(path)
    except ValueError as error:
        raise UserError(
            f"Shard {path} is damaged: {error}. Rerun the command that made it; damaged shards are replaced."
        ) from None
    if dtype != np.uint16 or len(shape) != 1:
        raise UserError(
            f"Shard {path} holds {dtype} in {len(shape)} dimensions, but a shard is a one-dimensional array of "
            "uint16. Remove it from the folder, or delete it and make it again with fineweb.py."
        )
    return Shard(path, dtype, shape[0], offset, open_file)


def open_mask(path, length, open_file=open_file):
    """The mask at `path` of a shard of `length` tokens: 1 where a token counts as a target, see `check_masks`."""
    path = Path(path)
    try:
        if not path.exists():
            raise ValueError("it is missing, though other shards in that folder have one")
        dtype, shape, offset = open_npy(path)
        if shape != (length,) or dtype not in (np.uint8, np.bool_):
            raise ValueError(f"it holds {dtype} of shape {shape}, but its shard has {length:,} tokens")
    except ValueError as error:
        raise UserError(
            f"Loss mask {path} is damaged: {error}. Delete it and its shard, and run smoltalk.py again."
        ) from None
    return Shard(path, dtype, length, offset, open_file)


def open_npy(path):
    """(dtype, shape, offset of the data in bytes) of a file as np.save writes it; ValueError unless it is whole."""
    open_regular(path).close()
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # numpy parses the header as Python, which may raise anything
        raise ValueError(cli.first_line(error).rstrip(".")) from None
    if not isinstance(array, np.memmap):
        raise ValueError("it is a zip archive, not a single array")
    return array.dtype, array.shape, array.offset


def open_bin(path):
    """(dtype, shape, offset of the data in bytes) of a shard from llm.c or nanoGPT; ValueError unless it is whole."""
    with open_regular(path) as file:
        header = np.fromfile(file, np.int32, BIN_HEADER)
        num_bytes = os.fstat(file.fileno()).st_size
    magic = header[0] if len(header) else None
    if magic == LLAMA3_MAGIC:
        raise ValueError("it holds Llama 3's tokens (uint32), and only GPT-2's format (uint16) can be read")
    if path.name in NANOGPT_NAMES and magic != BIN_MAGIC:
        if num_bytes % 2:
            raise ValueError("its size is odd, but its tokens have two bytes each")
        return np.dtype(np.uint16), (num_bytes // 2,), 0
    if len(header) < BIN_HEADER:
        raise ValueError("it ends within its header")
    magic, version, num_tokens = header[:3].tolist()
    if (magic, version) != (BIN_MAGIC, BIN_VERSION):
        raise ValueError(f"its header starts with {magic}, {version} instead of {BIN_MAGIC}, {BIN_VERSION}")
    if num_bytes - header.nbytes != 2 * num_tokens:
        raise ValueError(f"it has {num_bytes:,} bytes, but its header says {num_tokens:,} tokens of two bytes")
    return np.dtype(np.uint16), (num_tokens,), header.nbytes


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
        for file_path in (Path(path), Path(path).with_suffix(".mask")):
            if file_path.exists():
                digest.update(sample(file_path))
    return digest.hexdigest()


def sample(path):
    """The size of a file and a fixed sample of its bytes, from the first block to the last."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        parts = [size.to_bytes(8, "big")]
        for i in range(SAMPLE_BLOCKS):
            file.seek(max(0, size - SAMPLE_BLOCK) * i // (SAMPLE_BLOCKS - 1))
            parts.append(file.read(SAMPLE_BLOCK))
    return b"".join(parts)


# -----------------------------------------------------------------------------
# What a run checks before it trains


def check_size(folder, train_loader, tokens_per_step):
    """Raise UserError if the training shards have fewer tokens than one step takes."""
    num_tokens = train_loader.num_windows * train_loader.T
    if num_tokens < tokens_per_step:
        raise UserError(
            f"{folder} has {num_tokens:,} training tokens, but one step takes {tokens_per_step:,}. "
            "Lower --total-batch-size, or add shards."
        )


def check_same_data(then, now):
    """Raise UserError unless a loader's state in a checkpoint, `then`, has the same data and T as its state `now`."""
    if (then["num_windows"], then["T"]) != (now["num_windows"], now["T"]):
        raise UserError(
            f"The run was started on {then['num_windows']:,} sequences of {then['T']} tokens, but the data now gives "
            f"{now['num_windows']:,} of {now['T']}. Give the original shards with --data, or start over with "
            "--no-resume."
        )


def check_not_empty(num_windows, folder, split, T):
    """Raise UserError if a split has no window of T + 1 tokens, inputs and targets."""
    if not num_windows:
        raise UserError(
            f"Every {split} shard in {folder} is shorter than the {T + 1} tokens that one sequence needs. "
            "Lower --sequence-length, or make the shards from more text."
        )


def check_folder(folder, train_loader, val_loader, enc):
    """Raise UserError unless the loaders' shards are those in meta.json, with ids of `enc` and valid masks."""
    shards = train_loader.shards + val_loader.shards
    check_token_ids(shards, enc.name, enc.n_vocab)
    check_meta(folder, [shard.path for shard in shards])
    check_masks(train_loader.masks)
    check_masks(val_loader.masks)


def check_token_ids(shards, tokenizer, n_vocab):
    """Raise UserError if a shard has ids >= n_vocab: checks 128M ids, spread evenly over the shards."""
    largest = {shard.path: int(shard.read(0, 2**27 // len(shards)).max(initial=0)) for shard in shards}
    for path, token in largest.items():
        if token >= n_vocab:
            raise UserError(
                f"Shard {path} contains token id {token}, but tokenizer {tokenizer} has only {n_vocab} ids. "
                "The folder's meta.json is missing or belongs to other shards; make the shards again in a new folder."
            )
    is_nanogpts = all(path.name in NANOGPT_NAMES for path in largest)
    if is_nanogpts and max(largest.values()) < 1000 <= n_vocab and cli.is_rank_0():
        print(
            f"note: All ids in {shards[0].path.parent} are below 1,000, as in nanoGPT's shards of characters, but they "
            f"are read as {tokenizer}'s. If they are characters, make shards of the text with fineweb.py --input."
        )


def check_masks(masks):
    """Raise UserError unless the masks of a split are all 0 or 1, and 1 somewhere.

    Reads all of them, because a wrong value would go unnoticed: SmolTalk's 0.8 GB take about half a second.
    """
    num_targets = 0
    for mask in masks:
        for start in range(0, len(mask), MASK_BLOCK):
            entries = mask.read(start, MASK_BLOCK).view(np.uint8)
            largest = int(entries.max(initial=0))
            if largest > 1:
                raise UserError(
                    f"Loss mask {mask.path} has the value {largest}, but every value must be 0 or 1. Delete it and "
                    "its shard, and run smoltalk.py again."
                )
            num_targets += int(np.count_nonzero(entries))
    if masks and not num_targets:
        raise UserError(
            f"The loss masks in {masks[0].path.parent} are 0 everywhere, so no token counts as a target and nothing "
            "can be learned. Make the shards again with smoltalk.py."
        )


def check_meta(folder, paths):
    """Raise UserError unless each meta.json in `folder` is complete and together they list the shards `paths`.

    A folder without one, as written by other programs, is accepted.
    """
    if (Path(folder) / "meta.pkl").exists():
        raise UserError(
            f"{folder} has a meta.pkl: these are nanoGPT's shards of characters, whose tokenizer is not supported. "
            "Make shards of the text with fineweb.py --input."
        )
    metas = {path: read_meta(path) for path in sorted(Path(folder).glob("meta*.json"))}
    for path, meta in metas.items():
        if not is_finished(meta):
            raise UserError(
                f"The shards in {folder} are not complete, as {path.name} says. Run the command that makes them "
                "again; it continues where it stopped."
            )
    listed = {name: length for meta in metas.values() for name, length in meta["shards"].items()}
    found = {Path(path).name: len(open_shard(path)) for path in paths if listed}
    for name in sorted(listed.keys() | found.keys()):
        if listed.get(name) != found.get(name):
            said, there = (f"{each[name]:,} tokens" if name in each else "no entry" for each in (listed, found))
            raise UserError(
                f"meta.json in {folder} does not describe its shards: {name} has {said} in meta.json and {there} on "
                "disk. Rerun the command that made them."
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
                os.makedirs(writer.folder, exist_ok=True)  # the lock has made it, or the disk's error is raised here
                make(writer)
                return writer.folder
    print(f"{writer.folder} is complete: {writer.meta['tokens']:,} tokens in {len(writer.meta['shards'])} shards")
    return writer.folder


class ShardWriter:
    """Writes the shards of a folder, or of one part of it, and the meta.json that describes them."""

    def __init__(self, folder, meta, enc, prefix="", part=0, num_parts=1):
        """`meta` describes the shards to be made: those in `folder` are continued, or refused if they do not match."""
        self.folder, self.part, self.num_parts, self.eot_token = folder, part, num_parts, enc.eot_token
        self.meta = check_same_dataset(folder, meta_path(folder, part, num_parts), meta)
        self.prefix = prefix or re.sub(r"[^A-Za-z0-9]+", "-", os.path.basename(os.path.abspath(folder)))
        for file in self.meta["shards"]:  # the folder may have had another name when they were begun
            self.prefix = re.sub(r"_(train|val)_\d+\.\w+$", "", file)
        # a validation split that is sampled from all of the input grows with every training shard
        self.validation_file = shard_name(self.prefix, 0) if self.meta.get("validation_every") else None

    def is_complete(self):
        files = self.meta["shards"]
        return bool(files) and is_finished(self.meta) and all(self.is_whole(file) for file in files)

    def is_whole(self, file):
        """Whether a shard can be read and has as many tokens as meta.json says."""
        try:
            return len(open_shard(self.path(file))) == self.meta["shards"].get(file)
        except (UserError, OSError):
            return False

    def resume(self):
        """Keep the shards before the first damaged one; return the position in the input at which they end."""
        meta, kept = self.meta, {}
        end, meta["documents"] = [0, 0, 0, 0], 0
        for file, num_tokens in meta["shards"].items():
            if file == self.validation_file:
                kept[file] = 0
                continue
            if file not in meta["ends"] or not self.is_whole(file):
                break
            kept[file] = num_tokens
            *end, meta["documents"] = meta["ends"][file]
        if self.validation_file in kept:
            kept[self.validation_file] = end[3]
            if len(self.read_validation(end[3])) < end[3]:  # damaged: nothing can be kept
                kept, end, meta["documents"] = {}, [0, 0, 0, 0], 0
        meta["shards"], meta["tokens"], meta["complete"] = kept, sum(kept.values()), False
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
        write_shard(self.path(file), tokens)
        self.meta["shards"][file] = len(tokens)
        self.meta["tokens"] += len(tokens)
        self.meta["documents"] += self.count_documents(tokens)
        if end:
            self.meta["ends"][file] = [*end, self.meta["documents"]]
            self.save()

    def write_validation(self, tokens):
        """Write the validation split that is sampled from all of the input, as far as it has been sampled."""
        write_shard(self.path(self.validation_file), tokens)
        self.meta["tokens"] += len(tokens) - self.meta["shards"].get(self.validation_file, 0)
        self.meta["shards"][self.validation_file] = len(tokens)

    def count_documents(self, tokens):
        return int(np.count_nonzero(tokens == self.eot_token))

    def save(self):
        """Write meta.json, creating the folder."""
        os.makedirs(self.folder, exist_ok=True)
        with atomic_write(meta_path(self.folder, self.part, self.num_parts), "w", encoding="utf-8") as file:
            json.dump(self.meta, file, indent=1)

    def finish(self, noun="document"):
        """Mark the data set complete and print its totals."""
        meta = self.meta
        meta["complete"] = True
        self.save()
        lengths = split_lengths([meta])
        num_train = cli.count(sum(lengths["train"]), "token")
        print(f"{self.folder}: {num_train} to train on, {sum(lengths['val']):,} to validate on")
        print(f"in {cli.count(len(meta['shards']), 'shard')}, from {cli.count(meta['documents'], noun)}")


def split_lengths(metas):
    """{"train": lengths of the shards, "val": lengths of the shards} of one meta.json, or one per part."""
    shards = [item for meta in metas for item in meta["shards"].items()]
    return {split: [length for name, length in shards if split_of(name) == split] for split in ("train", "val")}


# -----------------------------------------------------------------------------
# meta.json


def meta_path(folder, part, num_parts):
    return os.path.join(folder, f"meta.part-{part}-of-{num_parts}.json" if num_parts > 1 else "meta.json")


def num_parts_of(path):
    """ "data/meta.part-1-of-4.json" -> 4, "data/meta.json" -> 1"""
    match = re.search(r"-of-(\d+)\.json$", str(path))
    return int(match[1]) if match else 1


def new_meta(dataset, enc, made_from):
    """The contents of a new meta.json.

    `ends`: for each shard, the position in the input at which it ends (source, piece, token; with a sampled
    validation split, also the tokens sampled so far), and the number of documents so far.
    """
    meta = {"dataset": dataset, "tokenizer": enc.name, "vocab_size": enc.n_vocab, "documents": 0, "tokens": 0}
    return meta | {"shards": {}, "complete": False, "made_from": made_from, "ends": {}}


META_TYPES = dict(dataset=str, tokenizer=str, vocab_size=int, documents=int, tokens=int, targets=int, shards=dict)
META_TYPES |= dict(complete=bool, made_from=dict, ends=dict, validation_every=int)


def read_meta(path):
    """The contents of one meta.json; UserError unless they have the form that fineweb.py and smoltalk.py write.

    People also write short ones by hand, with only the tokenizer's name.
    """
    try:
        with open_regular(path, "r", encoding="utf-8") as file:
            meta = json.load(file)
        if type(meta) is not dict or "tokenizer" not in meta:
            raise ValueError("it names no tokenizer")
        for key, value in dict(dataset="unknown", shards={}, complete=True).items():
            meta.setdefault(key, value)  # last, so that a resumed run writes the keys in the same order
        for key, expected_type in META_TYPES.items():
            if type(meta.get(key, expected_type())) is not expected_type:
                raise ValueError(f"its {key} is not of type {expected_type.__name__}")
        if not all(type(length) is int for length in meta["shards"].values()):
            raise ValueError("its shards are not file names with numbers of tokens")
        length = 5 if meta.get("validation_every") else 4
        if any(len(end) != length for end in meta.get("ends", {}).values()):
            raise ValueError(f"its ends do not have {length} numbers")
    except (ValueError, TypeError, RecursionError) as error:  # RecursionError: brackets nested too deeply
        raise UserError(
            f"{path} is damaged, or was not written by fineweb.py or smoltalk.py: {cli.first_line(error)}. Move its "
            "folder away, or make the shards again in another folder."
        ) from None
    return meta


def is_finished(meta):
    """Whether all shards were written: their lengths add up to the tokens, which a short meta.json does not give."""
    total = sum(meta["shards"].values())
    is_short = "tokens" not in meta
    return meta["complete"] and (is_short or 0 < total == meta["tokens"])


def read_metas(folder):
    """{path: contents} of the meta.json in `folder`, or of one per part; refuses a folder written by other programs."""
    files = os.listdir(folder) if os.path.lexists(folder) else []
    paths = [os.path.join(folder, file) for file in fnmatch.filter(files, "meta*.json")]
    metas = {path: read_meta(path) for path in paths}
    is_ours = all("ends" in meta and "sources" in meta.get("made_from", {}) for meta in metas.values())
    if not is_ours or (not metas and any(split_of(file) for file in files)):
        raise UserError(
            f"{folder} has shards or a meta.json that fineweb.py and smoltalk.py did not write. Move the folder away, "
            "or choose another output folder."
        )
    return metas


def check_same_dataset(folder, path, meta):
    """The meta at `path` if it continues `meta`, else `meta` itself; refuses a folder with a different data set."""
    metas = read_metas(folder)
    for other_path, old in metas.items():
        if num_parts_of(other_path) != num_parts_of(path):
            raise UserError(
                f"{folder} has shards that were made in {num_parts_of(other_path)} part(s), and --part now asks for "
                f"{num_parts_of(path)}: the file names would be the same. Choose another output folder."
            )
        was, now = settings(old), settings(meta)
        changes = [(key, repr(was[key]), repr(now[key])) for key in now if key in was and was[key] != now[key]]
        if other_path == path:  # the parts of a data set differ in their files
            changes += changed_sources(old, meta)
        for key, before, after in changes:
            raise UserError(
                f"{folder} has shards of other data: {key} was {cli.plain(before)} and is now {cli.plain(after)}. "
                "Move the folder away, or choose another output folder."
            )
    return metas.get(path, meta) | {"made_from": meta["made_from"]}  # with the present sizes of files that were fixed


def settings(meta):
    """The settings, besides the sources, that must be the same in meta.json if one run continues another."""
    made_from = {key: value for key, value in meta["made_from"].items() if key != "sources"}
    older = {"separator": ""}  # older runs did not record it
    return {"dataset": meta["dataset"], "tokenizer": meta["tokenizer"]} | older | made_from


def changed_sources(old, meta):
    """[("the input", before, now)] for each file that is no longer what it was when `old`'s run read it.

    A file that was not read to its end may differ after its start: its bad lines may have been fixed.
    """
    then, now = (m["made_from"]["sources"] for m in (old, meta))
    ends = list(old["ends"].values())
    num_read = len(then) if old["complete"] else ends[-1][0] if ends else -1
    changes = []
    for i, (before, after) in enumerate(itertools.zip_longest(then, now, fillvalue=["no file", 0])):
        (name, size, *old_hash), (new_name, new_size, *new_hash) = before, after
        if old_hash and i == num_read and size != new_size:
            is_same = old_hash[0][:8] == new_hash[0][:8]  # the hash of its start
        else:  # older runs recorded no hash
            is_same = i > num_read or (size == new_size and (not old_hash or old_hash == new_hash))
        if name != new_name:
            changes.append(("the input", name, new_name))
        elif not is_same:
            texts = (f"{name} ({source[1]:,} bytes, hash {' '.join(source[2:])})" for source in (before, after))
            changes.append(("the input", *texts))
    return changes
