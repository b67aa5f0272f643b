"""Token shards: the one reader and writer of the format, and of the meta.json that describes a folder of them.

A shard is `<prefix>_<split>_<6 digits>.npy`, a one-dimensional uint16 array as np.save writes it. Shard 0
is the validation split. A mask lies next to its shard, with the suffix .mask: uint8, 1 where a token
counts as a target. llm.c's .bin shards are read as well: 256 int32 of header (20240520, version 1, number
of tokens), then uint16.
"""

import contextlib
import fnmatch
import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plumbing.cli import UserError
from plumbing.files import atomic_write

BIN_MAGIC, BIN_VERSION = 20240520, 1
BIN_HEADER = 256  # int32

# -----------------------------------------------------------------------------
# Reading


@dataclass
class Shard:
    """An array on disk, checked once. It is opened for each read, so that no shard holds a file descriptor."""

    path: Path
    dtype: np.dtype
    length: int
    offset: int  # bytes before the first entry

    def __len__(self):
        return self.length

    def read(self, start=0, count=None):
        """The `count` entries from `start`, or fewer at the shard's end; by default all of them."""
        available = max(0, self.length - start)
        count = available if count is None else min(count, available)
        offset = self.offset + start * self.dtype.itemsize
        try:
            entries = np.fromfile(self.path, self.dtype, count, offset=offset)
        except OSError as error:
            raise could_not_open("shard", self.path, error) from None
        if len(entries) < count:
            raise UserError(f"Shard {self.path} became shorter while it was in use. Make it again.")
        return entries


def could_not_open(kind, path, error):
    return UserError(
        f"Could not open {kind} {path}: {error.strerror or error}. Check that it exists and that you have "
        "permission to read it."
    )


def open_shard(path):
    """The shard at `path`; UserError unless its header, type, dimensions and size are right."""
    path = Path(path)
    try:
        dtype, shape, offset = open_bin(path) if path.suffix == ".bin" else open_npy(path)
    except OSError as error:  # the system's refusal says nothing about the contents
        raise could_not_open("shard", path, error) from None
    except ValueError as error:
        raise UserError(
            f"Shard {path} is damaged: {error}. Run the command that made it again; damaged shards are replaced."
        ) from None
    if dtype != np.uint16 or len(shape) != 1:
        raise UserError(
            f"Shard {path} holds {dtype} in {len(shape)} dimensions, but a shard is a one-dimensional array of "
            "uint16. Remove it from the folder, or delete it and make it again with fineweb.py."
        )
    return Shard(path, dtype, shape[0], offset)


def open_mask(path, length):
    """The mask at `path` of a shard of `length` tokens: not 0 where a token counts as a target."""
    path = Path(path)
    try:
        dtype, shape, offset = open_npy(path)
        if shape != (length,):
            raise ValueError(f"its shape is {shape}, but its shard has {length:,} tokens")
    except FileNotFoundError:
        raise UserError(
            f"The loss mask {path} is missing, though other shards in that folder have one. Delete the shard it "
            "belongs to and run smoltalk.py again."
        ) from None
    except OSError as error:
        raise could_not_open("loss mask", path, error) from None
    except ValueError as error:
        raise UserError(
            f"Loss mask {path} is damaged: {error}. Delete it and its shard, and run smoltalk.py again."
        ) from None
    return Shard(path, dtype, length, offset)


def open_npy(path):
    """(dtype, shape, offset of the data in bytes) of a file as np.save writes it; ValueError unless it is whole."""
    with open(path, "rb") as file:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        elif version == (2, 0):
            shape, _, dtype = np.lib.format.read_array_header_2_0(file)
        else:
            raise ValueError(f"its format is version {version}, not one of np.save's")
        offset, num_bytes = file.tell(), os.fstat(file.fileno()).st_size
    expected = offset + math.prod(shape) * dtype.itemsize
    if num_bytes < expected:
        raise ValueError(f"it has {num_bytes:,} bytes, but its header says {expected:,}")
    return dtype, shape, offset


def open_bin(path):
    """(dtype, shape, offset of the data in bytes) of a shard of llm.c's; ValueError unless it is whole."""
    header = np.fromfile(path, np.int32, BIN_HEADER)
    if len(header) < BIN_HEADER:
        raise ValueError("it ends within its header")
    magic, version, num_tokens = header[:3].tolist()
    if (magic, version) != (BIN_MAGIC, BIN_VERSION):
        raise ValueError(f"its header starts with {magic}, {version} instead of {BIN_MAGIC}, {BIN_VERSION}")
    num_bytes = os.path.getsize(path) - header.nbytes
    if num_bytes != 2 * num_tokens:
        raise ValueError(f"it has {num_bytes:,} bytes of tokens, but its header says {num_tokens:,} tokens")
    return np.dtype(np.uint16), (num_tokens,), header.nbytes


def open_masks(shards):
    """The masks beside the shards, or None if there are none at all."""
    paths = [shard.path.with_suffix(".mask") for shard in shards]
    if not any(path.exists() for path in paths):
        return None
    return [open_mask(path, len(shard)) for path, shard in zip(paths, shards)]


def check_token_ids(shards, tokenizer, n_vocab):
    """Raise UserError if a shard has ids >= n_vocab: checks 128M ids, spread evenly over the shards."""
    for shard in shards:
        largest = int(shard.read(0, 2**27 // len(shards)).max(initial=0))
        if largest >= n_vocab:
            raise UserError(
                f"Shard {shard.path} contains token id {largest}, but tokenizer {tokenizer} has only {n_vocab} ids. "
                "The folder's meta.json is missing or belongs to other shards; make the shards again in a new folder."
            )


def find_shards(folder, split):
    """The paths of a split's shards in order. Raises UserError, with the remedy, if there are none."""
    paths = sorted(p for p in Path(folder).glob(f"*_{split}_*") if p.suffix in (".npy", ".bin"))
    if not paths:
        raise UserError(
            f"There are no {split} shards in {folder}. Make them with fineweb.py (conversations: smoltalk.py), "
            "or give the folder that has them with --data."
        )
    return paths


def is_whole(path, num_tokens):
    """Whether the shard at `path` can be read and has `num_tokens` tokens."""
    try:
        return len(open_shard(path)) == num_tokens
    except UserError:
        return False


# -----------------------------------------------------------------------------
# Writing


def shard_name(prefix, number):
    """("books", 12) -> "books_train_000012.npy"; number 0 is the validation split."""
    return f"{prefix}_{'train' if number else 'val'}_{number:06d}.npy"


def write_shard(path, array):
    """Write tokens (uint16) or a mask (uint8) to `path`, to the byte what np.save writes, atomically."""
    with atomic_write(path) as file:
        # np.save in two steps, because numpy's own write hides why the disk refused it
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(array.data)


class ShardWriter:
    """Writes the shards of a folder, or of one part of it, and the meta.json that describes them."""

    def __init__(self, folder, prefix, part, num_parts, meta, eot_token):
        self.folder, self.prefix, self.part, self.num_parts = folder, prefix, part, num_parts
        self.meta, self.eot_token = meta, eot_token

    def resume(self):
        """Resume after the last intact shard: returns its end position in the input, or None if all are complete."""
        meta, files = self.meta, list(self.meta["shards"])
        num_whole = 0
        while num_whole < len(files) and self.is_whole(files[num_whole]):
            num_whole += 1
        if meta["complete"] and num_whole == len(files):
            return None
        kept = [file for file in files[:num_whole] if file in meta["ends"]]
        *end, meta["documents"] = meta["ends"][kept[-1]] if kept else (0, 0, 0, 0)
        meta["shards"] = {file: meta["shards"][file] for file in kept}
        meta["tokens"] = sum(meta["shards"].values())
        meta["complete"] = False
        return end

    def is_whole(self, file):
        return is_whole(os.path.join(self.folder, file), self.meta["shards"][file])

    def next_name(self):
        """The file name of the next shard; no two parts have a number in common."""
        return shard_name(self.prefix, len(self.meta["shards"]) * self.num_parts + self.part)

    def write(self, tokens, end):
        """Write a shard, then meta.json: if killed in between, the same shard is written again."""
        file = self.next_name()
        write_shard(os.path.join(self.folder, file), tokens)
        self.meta["shards"][file] = len(tokens)
        self.meta["tokens"] += len(tokens)
        self.meta["documents"] += int(np.count_nonzero(tokens == self.eot_token))
        if end:
            self.meta["ends"][file] = [*end, self.meta["documents"]]
            self.save()

    def save(self):
        """Write meta.json, creating the folder."""
        with contextlib.suppress(OSError):  # if the folder cannot be made, the write below reports it
            os.makedirs(self.folder, exist_ok=True)
        with atomic_write(meta_path(self.folder, self.part, self.num_parts), "w", encoding="utf-8") as file:
            json.dump(self.meta, file, indent=1)

    def finish(self):
        """Mark the data set complete and print its totals."""
        meta = self.meta
        meta["complete"] = True
        self.save()
        counts = f"{meta['tokens']:,} tokens, {meta['documents']:,} documents, {len(meta['shards'])} shards"
        print(f"{self.folder}: {counts} (the last one is shorter than the others)")


# -----------------------------------------------------------------------------
# meta.json


def meta_path(folder, part, num_parts):
    return os.path.join(folder, f"meta.part-{part}-of-{num_parts}.json" if num_parts > 1 else "meta.json")


def new_meta(dataset, enc, made_from):
    """An initial meta.json. `ends`: for each shard, where in the input it ends and the number of documents so far."""
    meta = {"dataset": dataset, "tokenizer": enc.name, "vocab_size": enc.n_vocab, "documents": 0, "tokens": 0}
    return meta | {"shards": {}, "complete": False, "made_from": made_from, "ends": {}}


def read_meta(path):
    """The contents of one meta.json; UserError unless it is whole and has the keys that resuming needs."""
    try:
        with open(path, encoding="utf-8") as file:
            meta = json.load(file)
        for key in ("dataset", "tokenizer", "ends", "shards"):
            meta[key]
        meta["made_from"]["sources"]
    except OSError as error:
        raise could_not_open("file", path, error) from None
    except (ValueError, LookupError, TypeError):
        raise UserError(
            f"{path} is damaged, or was not written by fineweb.py or smoltalk.py. Move its folder away, or choose "
            "another output folder."
        ) from None
    return meta


def read_metas(folder):
    """{path: contents} of the meta.json in `folder`, or of one per part; refuses a folder that cannot be ours."""
    try:
        files = os.listdir(folder)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(
            f"Could not open the output folder {folder}: {error.strerror}. Choose another folder."
        ) from None
    paths = [os.path.join(folder, file) for file in fnmatch.filter(files, "meta*.json")]
    if not paths and any(re.search(r"_(train|val)_.*\.(npy|bin)$", file) for file in files):
        raise UserError(
            f"{folder} has shards but no meta.json, so it is unknown what they were made from. Move the folder "
            "away, or choose another output folder."
        )
    return {path: read_meta(path) for path in paths}


def check_same_dataset(folder, metas, path, meta):
    """The meta at `path` if it continues `meta`, else `meta` itself; refuses a folder with a different data set."""
    for other_path, old in metas.items():
        was, now = identity(old, old), identity(meta, old)
        for key in now:
            if key == "sources" and other_path != path:
                continue  # the parts of a data set differ in their files
            if was.get(key) != now[key]:
                raise UserError(
                    f"{folder} has shards of other data: {key} was {str(was.get(key))[:90]} and is now "
                    f"{str(now[key])[:90]}. Move the folder away, or choose another output folder."
                )
    return metas.get(path, meta) | {"made_from": meta["made_from"]}  # of a fixed file, the size that it has now


def identity(meta, old):
    """What must not differ between `meta` and the run `old` that it continues.

    Only the name of a file that `old` has not fully read counts: its bad lines may since have been fixed.
    """
    ends = list(old["ends"].values())
    num_read = ends[-1][0] if ends else 0
    sources = []
    for i, (name, size) in enumerate(meta["made_from"]["sources"]):
        is_read = old["complete"] or i < num_read
        sources.append([name, size if is_read else 0])
    return {"dataset": meta["dataset"], "tokenizer": meta["tokenizer"], **meta["made_from"], "sources": sources}
