"""Token shards: the format on disk, in and out, for every program that reads or writes it."""

from pathlib import Path

import numpy as np

from plumbing.cli import UserError


def open_tokens(path):
    """The token ids of a shard as a one-dimensional, memory-mapped uint16 array.

    Reads .npy and llm.c's .bin: 256 int32 of header (20240520, version 1, number of tokens), then uint16.
    """
    try:
        if path.suffix == ".bin":
            magic, version, length = np.fromfile(path, np.int32, 3)
            if (magic, version) != (20240520, 1):
                raise ValueError(f"header {magic}, {version}")
            tokens = np.memmap(path, np.uint16, "r", offset=256 * 4)
            if len(tokens) != length:
                raise ValueError(f"{len(tokens)} tokens where the header says {length}")
        else:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise UserError(f"got a damaged shard {path} ({error}), needed a whole one, delete it and make it again")
    if tokens.dtype != np.uint16 or tokens.ndim != 1:
        raise UserError(f"got {tokens.dtype} of {tokens.ndim} dimensions in {path}, needed one-dimensional uint16")
    return tokens


def open_mask(path, length):
    """The mask of a shard of `length` tokens, memory-mapped: not 0 where a token counts as a target."""
    try:
        mask = np.load(path, mmap_mode="r", allow_pickle=False)
        if mask.shape != (length,):
            raise ValueError(f"shape {mask.shape} beside {length} tokens")
    except (ValueError, EOFError, OSError) as error:
        raise UserError(f"got a damaged or missing mask {path} ({error}), needed one per shard, make the shards again")
    return mask


def open_masks(paths, shards):
    """The masks beside the shards at `paths`, or None if there are none at all."""
    masks = [path.with_suffix(".mask") for path in paths]
    if not any(path.exists() for path in masks):
        return None
    return [open_mask(path, len(shard)) for path, shard in zip(masks, shards)]


def find_shards(folder, split):
    """The paths of a split's shards in order. Raises UserError, with the remedy, where there are none."""
    paths = sorted(p for p in Path(folder).glob(f"*_{split}_*") if p.suffix in (".npy", ".bin"))
    if not paths:
        remedy = "make them with `python fineweb.py` (of your own text with --input) and name their folder by --data"
        raise UserError(f"got no {split} shards in {folder}, needed files like edufineweb_{split}_000001.npy, {remedy}")
    return paths


def check_token_ids(paths, shards, tokenizer, n_vocab):
    """Raise UserError if a shard has ids >= n_vocab: checks 128M ids, spread evenly over the shards."""
    for path, tokens in zip(paths, shards):
        largest = int(tokens[: 2**27 // len(paths)].max(initial=0))
        if largest >= n_vocab:
            raise UserError(
                f"Shard {path} contains token id {largest}, but tokenizer {tokenizer} has only {n_vocab} ids. The "
                "folder's meta.json is missing or belongs to other shards; make the shards again in a new folder."
            )
