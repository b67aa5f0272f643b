"""Windows: the sequences that a run reads from shards, and the order in which it reads them."""

import functools
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiktoken

from plumbing.cli.console import UserError
from plumbing.data import shards, tokenizers
from plumbing.data.shards import Shard
from plumbing.files import Name, open_regular

READERS = 8  # threads, because a network disk may take long to answer


class Split(NamedTuple):
    """A split's shards, their masks (none if every token is a target), and a hash of samples of their files."""

    shards: list[Shard]
    masks: list[Shard]
    fingerprint: str


class Folder:
    """A folder of shards. Its meta.json, tokenizer and shards are read when they are first asked for, and only once."""

    is_assumed = False

    def __init__(self, path: Name):
        self.path = path
        self.opened: dict[str, Split] = {}

    @functools.cached_property
    def meta(self) -> shards.Meta:
        return shards.read_meta(self.path)

    @functools.cached_property
    def enc(self) -> tiktoken.Encoding:
        return tokenizers.folder_encoding(self.path, self.meta.tokenizer)

    def split(self, name: str) -> Split:
        """The split of this name. UserError, with the remedy, if it has no shards."""
        if name not in self.opened:
            found = shards.open_shards(self.path, name)
            masks = shards.open_masks(found, recorded=self.meta.masks)
            self.opened[name] = Split(found, masks, shards.fingerprint([shard.path for shard in found]))
        return self.opened[name]


class StandIn(Folder):
    """Stands in for a folder that a dry run does not find: zeros for a step, and a tokenizer of num_ids ids."""

    is_assumed = True

    def __init__(self, path: Name, *, num_ids: int, num_tokens: int, name: str):
        super().__init__(path)
        self.meta = shards.Meta(tokenizer=name)
        self.enc = tokenizers.stand_in(name, num_ids)
        for split in ("train", "val"):
            zeros = shards.Zeros(Path(path, split), np.uint16, num_tokens, 0, open_regular)
            self.opened[split] = Split([zeros], [], "")


class Windows:
    """A split's windows of T tokens, at multiples of T within a shard; up to T tokens at a shard's end are dropped."""

    def __init__(self, folder: Folder, split: str, T: int):
        self.folder = folder
        self.name = split
        self.T = T
        self.shards, self.masks, self.fingerprint = folder.split(split)
        self.first = np.zeros(len(self.shards) + 1, np.int64)  # the number of each shard's first window
        for i, shard in enumerate(self.shards):
            self.first[i + 1] = self.first[i] + max(0, len(shard) - 1) // T  # T targets take T + 1 tokens
        self.num_windows = int(self.first[-1])
        shards.check_size(folder.path, split, T, num_windows=self.num_windows, at_least=T)

    def locate(self, number: int) -> tuple[int, int]:
        """(index of the shard, offset of the first token) of a window."""
        shard = int(np.searchsorted(self.first, number, side="right")) - 1
        return shard, (number - int(self.first[shard])) * self.T

    def describe(self, number: int) -> str:
        """Where a window is, in words."""
        shard, offset = self.locate(number)
        return f"{self.shards[shard].path.name} token {offset}"

    def count_targets(self, number: int) -> int:
        """How many of a window's T targets the mask keeps."""
        if not self.masks:
            return self.T
        shard, offset = self.locate(number)
        mask = self.masks[shard].read(offset + 1, self.T)
        return int(np.count_nonzero(mask))

    def read(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """A window's tokens (T + 1,) and their mask, of ones if the split has none."""
        shard, offset = self.locate(number)
        tokens = self.shards[shard].read(offset, self.T + 1)
        if not self.masks:
            return tokens, np.ones(self.T + 1, np.uint8)
        return tokens, self.masks[shard].read(offset, self.T + 1)


class Order:
    """The windows of one or several folders in the order that DataLoaderLite describes. It is computed, not stored.

    folders: one or several paths or Folders.
    """

    def __init__(
        self,
        folders: Name | Sequence[Name | Folder],
        split: str,
        T: int,
        *,
        weights: Sequence[float],
        seed: int,
        shuffle: bool,
    ):
        if isinstance(folders, (str, os.PathLike)):
            folders = [folders]
        self.name = split
        self.T = T
        self.seed = seed
        self.shuffle = shuffle
        self.weights = [weight for weight in weights if weight]
        self.splits: list[Windows] = []
        for folder, weight in zip(folders, weights or [1] * len(folders)):
            if weight:  # a folder of weight 0 is not read
                opened = folder if isinstance(folder, Folder) else Folder(folder)
                self.splits.append(Windows(opened, split, T))
        self.has_masks = any(windows.masks for windows in self.splits)
        self.fingerprint = " ".join(windows.fingerprint for windows in self.splits)
        sizes = [windows.num_windows for windows in self.splits]
        self.num_windows = sum(sizes)
        self.first = np.cumsum([0, *sizes])  # windows are numbered through all folders
        shares = self.weights or sizes
        self.shares = [share / sum(shares) for share in shares]
        self.pool = ThreadPoolExecutor(READERS)

    def shuffle_epochs(self, positions: np.ndarray, num_windows: int, *folder: int) -> np.ndarray:
        """Map positions to windows, epoch by epoch. If shuffled, seed, epoch and folder set the permutation."""
        epochs, numbers = np.divmod(positions, num_windows)
        if not self.shuffle:
            return numbers
        for epoch in np.unique(epochs).tolist():
            in_epoch = epochs == epoch
            numbers[in_epoch] = permute(numbers[in_epoch], num_windows, [self.seed, epoch, *folder])
        return numbers

    def locate(self, positions: np.ndarray) -> list[tuple[Windows, int]]:
        """[(split of a folder, number of the window in it)] for these positions in the order."""
        if self.weights:
            folders, numbers = mix(positions, self.weights)
            for folder in np.unique(folders).tolist():
                chosen = folders == folder
                size = self.splits[folder].num_windows
                numbers[chosen] = self.shuffle_epochs(numbers[chosen], size, folder)
        else:
            numbers = self.shuffle_epochs(positions, self.num_windows)
            folders = np.searchsorted(self.first, numbers, side="right") - 1
            numbers -= self.first[folders]
        splits = [self.splits[folder] for folder in folders]
        return list(zip(splits, numbers.tolist()))

    def read(self, positions: np.ndarray) -> list[np.ndarray]:
        """[tokens] of shape (n, T + 1) at n positions; [tokens, masks] if a split has masks (ones for the others)."""
        windows = self.locate(positions)
        # each thread reads every READERS-th window
        groups = [windows[first::READERS] for first in range(min(READERS, len(windows)))]
        tokens = np.empty((len(windows), self.T + 1), np.uint16)
        masks = np.empty(tokens.shape, np.uint8)
        read = self.pool.map(lambda group: [split.read(number) for split, number in group], groups)
        for first, rows in enumerate(read):
            tokens[first::READERS] = [ids for ids, _ in rows]
            masks[first::READERS] = [mask for _, mask in rows]
        return [tokens, masks] if self.has_masks else [tokens]

    def count_targets(self, positions: np.ndarray) -> int:
        """The number of targets in the windows at these positions: T in each, but for those that masks leave out."""
        if not self.has_masks:
            return len(positions) * self.T
        return sum(split.count_targets(number) for split, number in self.locate(positions))

    def describe(self, positions: np.ndarray) -> str:
        """Where the windows at these positions are, in words."""
        return ", ".join(split.describe(number) for split, number in self.locate(positions))

    def settings(self) -> dict[str, Any]:
        """The settings that determine the order."""
        return {
            "training data": self.fingerprint,
            "data_weights": self.weights,
            "sequence_length": self.T,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }


def stream_names(folders: Sequence[Name]) -> list[str]:
    """A short name for each folder, for log.txt: the last part of its path, or more parts if two would be the same."""
    paths = [Path(os.path.abspath(folder)).parts for folder in folders]
    names = [re.sub(r"[^A-Za-z0-9_.-]", "_", distinct_end(path, paths)) for path in paths]
    while len(set(names)) < len(names):
        names = [f"{name}.{i}" if names.count(name) > 1 else name for i, name in enumerate(names, 1)]
    return names


def distinct_end(path: tuple[str, ...], paths: Sequence[tuple[str, ...]]) -> str:
    """The last parts of a path, as few as no other path ends in; all of them if the path is there twice."""
    for count in range(1, len(path)):
        ends = [other[-count:] for other in paths]
        if ends.count(path[-count:]) == 1:
            return "-".join(path[-count:])
    return "-".join(path)


def open_folders(config: Any, split: str, *, num_ids: int, tokenizer: str) -> Sequence[Folder]:
    """The folders of shards that a run reads: `split` of those that have a share, and "val" of all.

    UserError, with the remedy, if a split is missing, or if the folders have different tokenizers. A dry run that finds
    none gets stand-ins with num_ids ids; tokenizer: the name of theirs.
    """
    # how long --passes are, only the data can tell
    if config.dry_run and not config.passes and not any(map(shards.has_shards, config.data)):
        num_tokens = config.total_batch_size + config.sequence_length
        return [StandIn(path, num_ids=num_ids, num_tokens=num_tokens, name=tokenizer) for path in config.data]
    folders = [Folder(path) for path in config.data]
    for folder, weight in zip(folders, config.data_weights or [1] * len(folders)):
        if weight:
            folder.split(split)
        folder.split("val")
        first = folders[0]
        if folder.enc.name != first.enc.name:
            raise UserError(
                f"The shards in {folder.path} have tokenizer {folder.enc.name}, but those in {first.path} have "
                f"{first.enc.name}. To train on both, make them with the same tokenizer."
            )
    return folders


def mix(positions: np.ndarray, weights: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """For each position in a mixture: (index of its folder, how many of that folder's windows come before).

    The weights are the folders' shares. A position belongs to the folder whose rounded share of the positions so far
    grows there. So every stretch of the order has the exact shares, but for a window or two.
    """
    before = shares_of(positions, weights)
    folders = (shares_of(positions + 1, weights) - before).argmax(0)
    return folders, before[folders, np.arange(len(positions))]


def shares_of(n: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """How many of the first n positions each folder has (folders, len(n)): rounded, so that they add up to n."""
    shares = []
    left = n
    for i, weight in enumerate(weights):
        # its share of the rest
        part = min(1.0, weight / sum(weights[i:])) if weight else 0.0
        shares.append(np.floor(left * part + 0.5).astype(np.int64))
        left = left - shares[-1]
    return np.stack(shares)


def permute(index: np.ndarray, n: int, seed: list[int]) -> np.ndarray:
    """Apply a pseudorandom permutation of range(n), which depends on `seed`, to each element of the array `index`.

    It is computed, not stored. A Feistel network (Luby and Rackoff 1988) permutes range(4**half), which contains
    range(n). Values outside range(n) are permuted again until they are inside (cycle walking).
    """
    keys = np.random.SeedSequence(seed).generate_state(4, np.uint64)  # one per round
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = 2**half - 1
    index = index.astype(np.uint64)
    outside = np.ones(len(index), bool)
    while outside.any():
        left, right = index[outside] >> half, index[outside] & mask
        for key in keys:
            # multiply and xor-shift as in splitmix64, whose upper 32 bits are mixed best
            mixed = (right + key) * 0x9E3779B97F4A7C15
            mixed = (mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9
            left, right = right, left ^ ((mixed >> 32) & mask)
        index[outside] = (left << half) | right
        outside = index >= n
    return index.astype(np.int64)
