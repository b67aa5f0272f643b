"""Token shards: the one reader and writer of the format, and of the meta.json that describes a folder of them.

A shard is `<prefix>_<split>_<6 digits>.npy`, a one-dimensional uint16 array as np.save writes it. Shard 0
is the validation split. A mask lies next to its shard, with the suffix .mask: uint8, 1 where a token
counts as a target. Shards of two other programs are read, too: llm.c's .bin (a header of 256 int32:
20240520, version 1, number of tokens; then uint16), also without a number in the name
(tiny_shakespeare_train.bin), and nanoGPT's train.bin and val.bin, which are plain uint16.
"""

import contextlib
import fnmatch
import hashlib
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
LLAMA3_MAGIC = 20240801  # llm.c's shards of Llama 3's tokens, which are uint32
NANOGPT_NAMES = ("train.bin", "val.bin")
MASK_BLOCK = 2**24  # entries of a mask that are checked at a time
SAMPLE_BLOCK, SAMPLE_BLOCKS = 4096, 4  # a fingerprint reads this many bytes per block, and blocks per file

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
    """The mask at `path` of a shard of `length` tokens: 1 where a token counts as a target, see `check_masks`."""
    path = Path(path)
    try:
        dtype, shape, offset = open_npy(path)
        if shape != (length,) or dtype not in (np.uint8, np.bool_):
            raise ValueError(f"it holds {dtype} of shape {shape}, but its shard has {length:,} tokens")
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
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"its format is version {version}, not one of np.save's")
        try:
            if version == (1, 0):
                shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            else:
                shape, _, dtype = np.lib.format.read_array_header_2_0(file)
        except OSError:
            raise
        except Exception as error:  # numpy parses the header as Python, which may raise anything
            raise ValueError("its header cannot be read") from error
        offset, num_bytes = file.tell(), os.fstat(file.fileno()).st_size
    expected = offset + math.prod(shape) * dtype.itemsize
    if num_bytes < expected or min(shape, default=0) < 0:
        raise ValueError(f"it has {num_bytes:,} bytes, but its header says {expected:,}")
    return dtype, shape, offset


def open_bin(path):
    """(dtype, shape, offset of the data in bytes) of a shard of llm.c's or nanoGPT's; ValueError unless it is whole."""
    header = np.fromfile(path, np.int32, BIN_HEADER)
    magic = header[0] if len(header) else None
    if magic == LLAMA3_MAGIC:
        raise ValueError("it holds Llama 3's tokens (uint32), and only GPT-2's format (uint16) can be read")
    if path.name in NANOGPT_NAMES and magic != BIN_MAGIC:
        num_tokens, odd_byte = divmod(os.path.getsize(path), 2)
        if odd_byte:
            raise ValueError("its size is odd, but its tokens have two bytes each")
        return np.dtype(np.uint16), (num_tokens,), 0
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
    """The masks next to the shards; an empty list if there are none at all."""
    paths = [shard.path.with_suffix(".mask") for shard in shards]
    if not any(path.exists() for path in paths):
        return []
    return [open_mask(path, len(shard)) for path, shard in zip(paths, shards)]


def check_size(folder, train_loader, tokens_per_step):
    """Raise UserError if the training shards have fewer tokens than one step takes."""
    num_tokens = train_loader.num_windows * train_loader.T
    if num_tokens < tokens_per_step:
        raise UserError(
            f"{folder} has {num_tokens:,} training tokens, but one step takes {tokens_per_step:,}. "
            "Lower --total-batch-size, or add shards."
        )


def check_same_data(then, now):
    """Raise UserError if `then`, a loader's state in a checkpoint, is of other data than `now`, its state."""
    for name in ("num_windows", "T"):
        if then[name] != now[name]:
            raise UserError(
                f"The run was started on {then['num_windows']:,} sequences of {then['T']} tokens, but the data now "
                f"gives {now['num_windows']:,} of {now['T']}. Give the original shards with --data, or start over "
                "with --no-resume."
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
    for shard in shards:
        largest = int(shard.read(0, 2**27 // len(shards)).max(initial=0))
        if largest >= n_vocab:
            raise UserError(
                f"Shard {shard.path} contains token id {largest}, but tokenizer {tokenizer} has only {n_vocab} ids. "
                "The folder's meta.json is missing or belongs to other shards; make the shards again in a new folder."
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


def fingerprint(paths):
    """A hash of shards and their masks, in order: of each file, its size and a fixed sample of blocks.

    Other data of the same length have another fingerprint. Names do not count, so a folder may be moved. 100
    shards of 200 MB take a few hundredths of a second.
    """
    digest = hashlib.sha256()
    for path in paths:
        for file_path in (Path(path), Path(path).with_suffix(".mask")):
            if not file_path.exists():
                continue
            with open(file_path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(size.to_bytes(8, "big"))
                for i in range(SAMPLE_BLOCKS):  # from the first block to the last
                    file.seek(max(0, size - SAMPLE_BLOCK) * i // (SAMPLE_BLOCKS - 1))
                    digest.update(file.read(SAMPLE_BLOCK))
    return digest.hexdigest()


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
    """Write tokens (uint16) or a mask (uint8) to `path` atomically, byte for byte as np.save does."""
    with atomic_write(path) as file:
        # header and data in two steps, because np.save would hide why a write failed
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(array.data)


class ShardWriter:
    """Writes the shards of a folder, or of one part of it, and the meta.json that describes them."""

    def __init__(self, folder, prefix, part, num_parts, meta, eot_token):
        self.folder, self.prefix, self.part, self.num_parts = folder, prefix, part, num_parts
        self.meta, self.eot_token = meta, eot_token
        # a validation split that is sampled from all of the input grows with every training shard
        self.validation_file = shard_name(prefix, 0) if meta.get("validation_every") else None

    def is_complete(self):
        files = self.meta["shards"]
        return self.meta["complete"] and all(is_whole(self.path(file), files[file]) for file in files)

    def resume(self):
        """Keep the shards up to the last intact one; return the position in the input at which that ends."""
        meta, kept = self.meta, {}
        end, meta["documents"] = [0, 0, 0, 0], 0
        for file, num_tokens in meta["shards"].items():
            if file == self.validation_file:
                kept[file] = 0
                continue
            if file not in meta["ends"] or not is_whole(self.path(file), num_tokens):
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
        except UserError:
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
        with contextlib.suppress(OSError):  # if the folder cannot be made, the write below reports it
            os.makedirs(self.folder, exist_ok=True)
        with atomic_write(meta_path(self.folder, self.part, self.num_parts), "w", encoding="utf-8") as file:
            json.dump(self.meta, file, indent=1)

    def finish(self):
        """Mark the data set complete and print its totals."""
        meta = self.meta
        meta["complete"] = True
        self.save()
        counts = {"train": 0, "val": 0}
        for file, num_tokens in meta["shards"].items():
            counts[split_of(file)] += num_tokens
        *others, last = meta["shards"].values()
        shorter = ", the last one with what was left" if others and last < max(others) else ""
        print(
            f"{self.folder}: {counts['train']:,} tokens to train on and {counts['val']:,} to validate on, in "
            f"{len(meta['shards'])} shards{shorter}; {meta['documents']:,} documents"
        )


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


META_TYPES = {
    "dataset": str,
    "tokenizer": str,
    "vocab_size": int,
    "documents": int,
    "tokens": int,
    "targets": int,
    "shards": dict,
    "complete": bool,
    "made_from": dict,
    "ends": dict,
    "validation_every": int,
}
META_KEYS = ("tokenizer",)  # the keys without a default: people write short ones by hand


def read_meta(path):
    """The contents of one meta.json; UserError unless they are of the form that fineweb.py and smoltalk.py write."""
    try:
        with open(path, encoding="utf-8") as file:
            meta = json.load(file)
        if isinstance(meta, dict):
            for key, value in {"dataset": "unknown", "shards": {}, "complete": True}.items():
                meta.setdefault(key, value)  # last, so that a resumed run writes the keys in the same order
        check_meta_form(meta)
    except OSError as error:
        raise could_not_open("file", path, error) from None
    except (ValueError, RecursionError) as error:  # RecursionError: brackets nested too deeply
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{path} is damaged, or was not written by fineweb.py or smoltalk.py: {reason}. Move its folder away, "
            "or make the shards again in another folder."
        ) from None
    return meta


def check_meta_form(meta):
    """Raise ValueError unless `meta` has the keys and types of a meta.json."""
    if not isinstance(meta, dict):
        raise ValueError("it is not a JSON object")
    for key in META_KEYS:
        if key not in meta:
            raise ValueError(f"it has no {key}")
    for key, expected_type in META_TYPES.items():
        if key in meta and type(meta[key]) is not expected_type:
            raise ValueError(f"its {key} is not of type {expected_type.__name__}")
    for name in (*meta["shards"], meta["tokenizer"]):
        if not name or os.path.basename(name) != name or "\\" in name:  # only files of this folder
            raise ValueError(f"it names {name!r}, which is not the name of a file in its folder")
    for key in ("shards", "ends"):
        numbers = meta.get(key, {}).values()
        lists = numbers if key == "ends" else [list(numbers)]
        for entries in lists:
            if type(entries) is not list or any(type(n) is not int or n < 0 for n in entries):
                raise ValueError(f"its {key} are not counts")
    sources = meta.get("made_from", {}).get("sources", [])
    if type(sources) is not list or any(not is_named_size(source) for source in sources):
        raise ValueError("its sources are not pairs of name and size")
    for end in meta.get("ends", {}).values():
        if not 4 <= len(end) <= 5 or end[0] >= len(sources):
            raise ValueError("its ends are not positions in its sources")
    if type(meta.get("made_from", {}).get("revision", "")) is not str:
        raise ValueError("its revision is not a string")


def is_named_size(source):
    return type(source) is list and [type(entry) for entry in source] == [str, int]


def check_meta(folder, paths):
    """Raise UserError unless each meta.json in `folder` is complete and together they list the shards `paths`.

    A folder without one, as other programs write it, is accepted.
    """
    if (Path(folder) / "meta.pkl").exists():
        raise UserError(
            f"{folder} has a meta.pkl: these are nanoGPT's shards of characters, whose tokenizer is not supported. "
            "Make shards of the text with fineweb.py --input."
        )
    listed = {}
    for path in sorted(Path(folder).glob("meta*.json")):
        meta = read_meta(path)
        if not meta["complete"]:
            raise UserError(
                f"The shards in {folder} are not complete, as {path.name} says. Run the command that makes them "
                "again; it continues where it stopped."
            )
        listed |= meta["shards"]
    if not listed:
        return
    found = {Path(path).name: len(open_shard(path)) for path in paths}
    for name in sorted(listed.keys() | found.keys()):
        if listed.get(name) != found.get(name):
            raise UserError(
                f"meta.json in {folder} does not describe its shards: {name} has {describe(listed.get(name))} in "
                f"meta.json and {describe(found.get(name))} on disk. Run the command that made them again."
            )


def describe(num_tokens):
    return "no entry" if num_tokens is None else f"{num_tokens:,} tokens"


def read_metas(folder):
    """{path: contents} of the meta.json in `folder`, or of one per part; refuses a folder of other origin."""
    try:
        files = os.listdir(folder)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(
            f"Could not open the output folder {folder}: {error.strerror}. Choose another folder."
        ) from None
    paths = [os.path.join(folder, file) for file in fnmatch.filter(files, "meta*.json")]
    if not paths and any(split_of(file) for file in files):
        raise UserError(
            f"{folder} has shards but no meta.json, so it is unknown what they were made from. Move the folder "
            "away, or choose another output folder."
        )
    metas = {path: read_meta(path) for path in paths}
    for path, meta in metas.items():
        if "ends" not in meta or "sources" not in meta.get("made_from", {}):
            raise UserError(
                f"{path} was not written by fineweb.py or smoltalk.py. Move its folder away, or choose another "
                "output folder."
            )
    return metas


def check_same_dataset(folder, metas, path, meta):
    """The meta at `path` if it continues `meta`, else `meta` itself; refuses a folder with a different data set."""
    for other_path, old in metas.items():
        if num_parts_of(other_path) != num_parts_of(path):
            raise UserError(
                f"{folder} has shards that were made in {num_parts_of(other_path)} part(s), and --part now asks for "
                f"{num_parts_of(path)}: the file names would be the same. Choose another output folder."
            )
        was, now = identity(old, old), identity(meta, old)
        for key in now:
            if key == "sources" and other_path != path:
                continue  # the parts of a data set differ in their files
            if was.get(key) != now[key]:
                raise UserError(
                    f"{folder} has shards of other data: {key} was {str(was.get(key))[:90]} and is now "
                    f"{str(now[key])[:90]}. Move the folder away, or choose another output folder."
                )
    return metas.get(path, meta) | {"made_from": meta["made_from"]}  # with the present sizes of files that were fixed


def identity(meta, old):
    """What must be the same in `meta` and in `old`, the meta.json of the run that it continues.

    Only the name of a file that `old` has not fully read counts: its bad lines may since have been fixed.
    """
    ends = list(old["ends"].values())
    num_read = ends[-1][0] if ends else 0
    sources = []
    for i, (name, size) in enumerate(meta["made_from"]["sources"]):
        is_read = old["complete"] or i < num_read
        sources.append([name, size if is_read else 0])
    made_from = {"separator": ""} | meta["made_from"]  # older runs did not have this flag
    return {"dataset": meta["dataset"], "tokenizer": meta["tokenizer"], **made_from, "sources": sources}
