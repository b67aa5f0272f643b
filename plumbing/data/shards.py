"""Read token shards, and the meta.json that describes a folder of them.

A shard is `<prefix>_<split>_<6 digits>.npy`, a one-dimensional uint16 array as np.save writes it. The numbers begin
with 0 for validation and with 1 for training. A mask is next to its shard, with the suffix .mask: uint8, 1 where a
token counts as a target. The .bin shards of llm.c and modded-nanogpt can also be read, even without a number in the
name (tiny_shakespeare_train.bin). They have a header of 256 int32 (20240520, version 1, number of tokens), then uint16.
"""

import contextlib
import functools
import hashlib
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np

from plumbing.cli import console
from plumbing.cli.console import UserError
from plumbing.files import Name, file_sample, named_errors, open_regular, read_json

BIN_MAGIC, BIN_VERSION = 20240520, 1
BIN_HEADER = 1024  # bytes
MAKE_AGAIN = "Make the shards again in another folder."
MAX_OPEN = 64  # files that a folder's shards keep open; many systems allow a process 1,024, some 256


# np.memmap would be shorter, but a failing disk or a shard cut short would end the process without a word (SIGBUS)
@dataclass
class Shard:
    """An array on disk, checked when it was opened. `open_file` may keep its file open."""

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
        with self.lock, named_errors(self.path):
            file = self.open_file(self.path)
            file.seek(self.offset + start * entries.itemsize)
            num_bytes = file.readinto(entries)
        if num_bytes < entries.nbytes:
            raise UserError(f"Shard {self.path} became shorter while it was in use. Make it again.")
        return entries


class Zeros(Shard):
    """A shard of zeros that is not on disk."""

    def read(self, start=0, count=sys.maxsize):
        return np.zeros(min(count, self.length - start), self.dtype)


def open_shards(folder, split):
    """A split's shards. The MAX_OPEN most recently read files stay open: opening one may take as long as a step."""
    keep_open = functools.lru_cache(MAX_OPEN)(open_regular)
    return [open_shard(path, keep_open) for path in find_shards(folder, split)]


def open_masks(shards, *, recorded=False):
    """The masks next to a split's shards. The list is empty if neither meta.json (`recorded`) nor the folder has any.

    UserError if one is missing, damaged or of another length than its shard.
    """
    if not recorded and not any(shards[0].path.parent.glob("*.mask")):
        return []
    masks = []
    for shard in shards:
        path = shard.path.with_suffix(".mask")
        masks.append(open_shard(path, shard.open_file, dtype=np.uint8, length=len(shard)))
    return masks


def open_shard(
    path: Name, open_file: Any = open_regular, *, dtype: type = np.uint16, length: int | None = None
) -> Shard:
    """The shard at `path`, or a mask as long as its shard; UserError unless its header, type and size are right."""
    path = Path(path)
    read_header = read_bin_header if path.suffix == ".bin" else read_npy_header
    try:
        with named_errors(path):
            actual_dtype, shape, offset = read_header(path)
        if actual_dtype != dtype or len(shape) != 1 or length not in (None, *shape):
            raise ValueError(
                f"it holds {actual_dtype} of shape {shape}, not {dtype.__name__} of shape ({length or 'n'},)"
            )
    except (ValueError, FileNotFoundError) as error:
        reason = console.first_line(error)
        raise UserError(
            f"{path} is missing or damaged: {reason}. Delete {path.stem}.* and make it again."
        ) from None
    return Shard(path, dtype, shape[0], offset, open_file)


def read_npy_header(path):
    """(dtype, shape, offset of the data in bytes) of a file that np.save wrote. ValueError if it is damaged."""
    open_regular(path).close()
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        return array.dtype, array.shape, array.offset
    except OSError:
        raise
    except Exception as error:  # numpy parses the header as Python, which may raise anything; a zip has no shape
        raise ValueError(console.first_line(error)) from None


def read_bin_header(path):
    """(dtype, shape, offset of the data in bytes) of a shard with llm.c's header. UserError if it is damaged."""
    with open_regular(path) as file:
        start = np.fromfile(file, np.int32, 3).tolist()
        num_bytes = os.fstat(file.fileno()).st_size
    num_tokens = (num_bytes - BIN_HEADER) // 2
    if start != [BIN_MAGIC, BIN_VERSION, num_tokens] or num_bytes % 2:
        raise UserError(
            f"{path} has another format or is damaged: its {num_bytes:,} bytes begin with {start}, not with "
            f"{BIN_MAGIC}, {BIN_VERSION} and the number of its tokens. Download it again. If it is nanoGPT's, it "
            "has no header: make shards of its text with fineweb.py --input."
        )
    return np.uint16, (num_tokens,), BIN_HEADER


def find_shards(folder, split):
    """The paths of a split's shards in order. Raises UserError, with the remedy, if there are none."""
    paths = [path for path in Path(folder).glob("*") if split_of(path.name) == split]
    if not paths:
        command = command_for(folder)
        missing = "" if Path(folder).is_dir() else ", which does not exist"
        raise UserError(
            f"There are no {split} shards in {folder}{missing}. Name another folder with --data, try --preset "
            f"quickstart (it makes its own), or make them: {command}"
        )
    return sorted(paths)


# the commands that make the folders whose names are the trainer's defaults
OWN_FOLDERS = {
    "edu_fineweb10B": "python fineweb.py",
    "smoltalk": "python smoltalk.py",
    "python_docs": "python fineweb.py --dataset python-docs",
}


def command_for(folder):
    """The command to make shards from the documents at `folder` or, if nothing is there, to make shards in it."""
    if str(folder) in OWN_FOLDERS:
        return OWN_FOLDERS[str(folder)]
    flags = [("--input", "FILES"), ("--out-dir", folder)]
    if os.path.exists(folder):
        flags = [("--input", folder)]
    typed = " ".join(map(console.quote_group, flags))
    return f"python fineweb.py {typed} (for conversations: python smoltalk.py {typed})"


def has_shards(folder):
    return any(split_of(path.name) for path in Path(folder).glob("*"))


def split_of(name):
    """The split of a file by its name: "books_val_000000.npy" -> "val", "meta.json" and hidden files -> None."""
    match = re.match(r"(?!\.)(?:.*_)?(train|val)(?:_.*\.npy|(?:_.*)?\.bin)$", name)
    return match[1] if match else None


def fingerprint(paths):
    """A hash of the sizes and samples of shards and their masks, in order, but not of names: a folder may be moved.

    A sample is 16 KB of a file: a change between the sampled bytes, such as one token in the middle, is not seen.
    """
    digest = hashlib.sha256()
    for path in paths:
        digest.update(file_sample(path))
        mask = path.with_suffix(".mask")
        if mask.exists():
            digest.update(file_sample(mask))
    return digest.hexdigest()


# ----- Checks before training ---------------------------------------------------------------------------


def check_size(folder: Name, split: str, T: int, *, num_windows: int, at_least: int) -> None:
    """Raise UserError if `num_windows` windows of T tokens have fewer than `at_least` tokens."""
    num_tokens = num_windows * T
    if num_tokens < at_least:
        raise UserError(
            f"The {split} shards in {folder} hold only {num_tokens:,} tokens in whole sequences of {T}, but "
            f"{at_least:,} are needed. Add shards, or lower --sequence-length or --total-batch-size."
        )


def check_folder(folder: Any) -> None:
    """UserError unless a Folder's open shards are those in meta.json, with ids of its tokenizer and valid masks."""
    shards, enc = [], folder.enc
    for split in folder.opened.values():
        shards += split.shards
    largest, path = find_largest(shards, 2**27 // len(shards))  # 128M ids, spread evenly over the shards
    if largest >= enc.n_vocab:
        raise UserError(
            f"Shard {path} contains token id {largest}, but tokenizer {enc.name} has only {enc.n_vocab} ids. The "
            "meta.json is missing or wrong: make the shards again in a new folder."
        )
    check_meta(folder.path, folder.meta, shards)
    for split in folder.opened.values():
        check_masks(split.masks)


def find_largest(arrays, count=sys.maxsize):
    """(value, path of its array) of the largest entry among the first `count` of each array."""
    return max((int(array.read(0, count).max(initial=0)), array.path) for array in arrays)


def check_masks(masks):
    """Raise UserError unless a split's masks, if any, are all 0 or 1, and 1 somewhere. For SmolTalk it takes 0.5 s."""
    if not masks:
        return
    largest, path = find_largest(masks)
    if largest != 1:
        raise UserError(
            f"The largest value in loss mask {path} is {largest}, not 1. Make it again with smoltalk.py."
        )


def check_meta(folder, meta, shards):
    """Raise UserError unless the meta.json in `folder`, if it has one, is complete and lists the shards."""
    if not meta.complete:
        raise UserError(
            f"The shards in {folder} are not complete. Rerun the command that makes them: it continues."
        )
    on_disk = {shard.path.name: len(shard) for shard in shards}
    splits = set(map(split_of, on_disk))  # a folder used only for validation may have training shards as well
    listed = {name: length for name, length in meta.shards.items() if split_of(name) in splits}
    if listed and listed != on_disk:
        name = min(dict(listed.items() ^ on_disk.items()))
        raise UserError(
            f"{folder} has changed: {name} has {listed.get(name, 0):,} tokens in meta.json and "
            f"{on_disk.get(name, 0):,} on disk. Make the shards again."
        )


# ----- meta.json ----------------------------------------------------------------------------------------


@dataclass
class Meta:
    """The contents of a folder's meta.json. One written by hand may have only a tokenizer."""

    dataset: str = ""
    tokenizer: str | None = None
    vocab_size: int = 0
    documents: int = 0
    tokens: int = 0
    shards: dict[str, int] = field(default_factory=dict)  # the length of each
    complete: bool = True
    masks: bool = False  # whether each shard has one
    rows_left_out: int = 0
    left_out: list[str] = field(default_factory=list)  # a sentence about the first
    # the settings, and as "sources" the name, size and digest of each file
    made_from: dict[str, Any] = field(default_factory=dict)
    ends: dict[str, dict[str, Any]] = field(default_factory=dict)  # {last shard of a run of rows: its End}
    # {number of a file: hash of its rows that are in shards}
    hashes: dict[str, int] = field(default_factory=dict)
    asked: dict[str, Any] = field(default_factory=dict)  # the flags that named a data set on the hub
    validation_every: int = 0  # as in preparation.is_validation

    def lengths(self, split: str) -> list[int]:
        return [length for name, length in self.shards.items() if split_of(name) == split]


def read_meta(folder: Name) -> Meta:
    """Read the meta.json in `folder`. Without one, the tokenizer is None."""
    path = Path(folder, "meta.json")
    if not path.exists():
        return Meta()
    defaults = vars(Meta(tokenizer=""))
    content = read_json(path, MAKE_AGAIN)
    fields: dict[str, Any] = {"tokenizer": None}
    fields |= {key: content[key] for key in defaults if key in content}
    for key, value in fields.items():
        if type(value) is not type(defaults[key]):
            shown = console.plain(repr(value), 60)
            raise UserError(f"{path} is damaged: its {key} cannot be {shown}. {MAKE_AGAIN}")
    meta = Meta(**fields)
    for name, length in meta.shards.items():
        # someone else's meta.json must not lead to a file in another folder
        if PureWindowsPath(name).name != name or not split_of(name) or type(length) is not int:
            shown = console.plain(repr({name: length}), 100)
            raise UserError(f"{path} is damaged: its shards cannot be {shown}. {MAKE_AGAIN}")
    return meta


@contextlib.contextmanager
def damage_named(folder: Name) -> Iterator[None]:
    """Context that turns Python's errors about wrong values in a meta.json into a UserError."""
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        reason = console.plain(console.first_line(error))
        path = Path(folder, "meta.json")
        raise UserError(f"{path} is damaged, or of another version: {reason}. {MAKE_AGAIN}") from None


def origin(meta: Meta) -> str:
    """The data set, config, split and commit that a folder's shards were made from; "" if unknown."""
    words = [meta.made_from.get(key) for key in ("config", "split", "revision")]
    return ", ".join(filter(None, [meta.dataset, *words]))
