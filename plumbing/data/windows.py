"""Windows: what a run reads of shards, and the order in which it reads them."""

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from plumbing.cli.console import UserError
from plumbing.data import shards, tokenizers
from plumbing.files import Name

AT_A_TIME = 8  # windows that are read at once


class Windows:
    """A split's windows of T tokens, at multiples of T within a shard; up to T tokens at a shard's end are dropped."""

    def __init__(self, folder: Name, split: str, T: int):
        self.folder, self.T = folder, T
        self.shards = shards.open_shards(folder, split)
        self.masks = shards.open_masks(self.shards)  # empty if every token is a target
        self.fingerprint = self.fingerprint_now()
        counts = [max(0, len(shard) - 1) // T for shard in self.shards]  # T targets take T + 1 tokens
        self.first = np.cumsum([0, *counts])  # the number of each shard's first window
        self.num_windows = int(self.first[-1])
        shards.check_size(folder, split, T, num_windows=self.num_windows, at_least=T)

    def fingerprint_now(self) -> str:
        """A hash of samples of the files as they are on the disk at this moment."""
        return shards.fingerprint([shard.path for shard in self.shards])

    def place(self, number: int) -> tuple[int, int]:
        """(index of the shard, offset of the first token) of a window."""
        i = int(np.searchsorted(self.first, number, side="right")) - 1
        return i, (number - int(self.first[i])) * self.T

    def describe(self, number: int) -> str:
        """Where a window is, in words."""
        i, offset = self.place(number)
        return f"{self.shards[i].path.name} token {offset}"

    def count_targets(self, number: int) -> int:
        """How many of a window's T targets are not left out by the mask."""
        i, offset = self.place(number)
        return int(np.count_nonzero(self.masks[i].read(offset + 1, self.T))) if self.masks else self.T

    def read(self, number: int) -> tuple[np.ndarray, np.ndarray | None]:
        """A window's tokens (T + 1,) and, if the split has masks, their mask."""
        i, offset = self.place(number)
        mask = self.masks[i].read(offset, self.T + 1) if self.masks else None
        return self.shards[i].read(offset, self.T + 1), mask


class Order:
    """The windows of one or several folders in the order that DataLoaderLite describes: it is computed, not stored."""

    def __init__(
        self, folders: Name | Sequence[Name], split: str, T: int, *, weights: Sequence[float], seed: int, shuffle: bool
    ):  # fmt: skip
        folders = [folders] if isinstance(folders, (str, os.PathLike)) else folders
        self.T, self.seed, self.shuffle = T, seed, shuffle
        self.weights = [weight for weight in weights if weight]  # what has none is not read
        self.splits = [
            Windows(folder, split, T) for i, folder in enumerate(folders) if not weights or weights[i]
        ]
        self.fingerprint = " ".join(windows.fingerprint for windows in self.splits)
        sizes = [windows.num_windows for windows in self.splits]
        self.num_windows, self.first = sum(sizes), np.cumsum([0, *sizes])  # numbered through all folders
        shares = self.weights or sizes
        self.shares = [share / sum(shares) for share in shares]
        # a disk behind a network may take long to answer: windows are read several at a time
        self.pool = ThreadPoolExecutor(AT_A_TIME)

    def shuffle_epochs(self, places: np.ndarray, num_windows: int, *folder: int) -> np.ndarray:
        """The windows at these places of epoch after epoch of num_windows: a permutation by seed, epoch and folder."""
        epochs, numbers = np.divmod(places, num_windows)
        for epoch in np.unique(epochs) if self.shuffle else ():
            in_epoch = epochs == epoch
            numbers[in_epoch] = permute(numbers[in_epoch], num_windows, [self.seed, int(epoch), *folder])
        return numbers

    def locate(self, positions: np.ndarray) -> list[tuple[Windows, int]]:
        """[(a folder's split, number of a window in it)] at these positions of the order."""
        if not self.weights:
            numbers = self.shuffle_epochs(positions, self.num_windows)
            folders = np.searchsorted(self.first, numbers, side="right") - 1
            numbers -= self.first[folders]
        else:
            folders, numbers = mix(positions, self.weights)
            for folder in np.unique(folders).tolist():
                of_it, size = folders == folder, self.splits[folder].num_windows
                numbers[of_it] = self.shuffle_epochs(numbers[of_it], size, folder)
        return [(self.splits[folder], number) for folder, number in zip(folders.tolist(), numbers.tolist())]

    def read(self, positions: np.ndarray) -> list[np.ndarray]:
        """[tokens (n, T + 1)] at n positions and, if one of the splits has masks, [their mask], of ones elsewhere."""
        windows = self.locate(positions)
        parts = [windows[i::AT_A_TIME] for i in range(min(AT_A_TIME, len(windows)))]
        rows: list[Any] = [None] * len(windows)
        for i, part in enumerate(self.pool.map(lambda part: [split.read(n) for split, n in part], parts)):
            rows[i::AT_A_TIME] = part
        tokens = np.stack([row for row, _ in rows])
        if not self.has_masks:
            return [tokens]
        ones = np.ones(tokens.shape[1], np.uint8)
        return [tokens, np.stack([ones if mask is None else mask for _, mask in rows])]

    @property
    def has_masks(self) -> bool:
        return any(split.masks for split in self.splits)

    def count_targets(self, positions: np.ndarray) -> int:
        """The targets in the windows at these positions: T in each, less what masks leave out."""
        if not self.has_masks:
            return len(positions) * self.T
        return sum(split.count_targets(number) for split, number in self.locate(positions))

    def describe(self, positions: np.ndarray) -> str:
        """Where the windows at these positions are, in words."""
        return ", ".join(split.describe(number) for split, number in self.locate(positions))

    def settings(self) -> dict[str, Any]:
        """What fixes the order."""
        data = {"training data": self.fingerprint, "data_weights": self.weights}
        return data | {"sequence_length": self.T, "seed": self.seed, "shuffle": self.shuffle}


def stream_names(folders: Sequence[Name]) -> list[str]:
    """A short name for each folder, for log.txt: the last part of its path or, where two have the same, more of it."""
    paths = [Path(os.path.abspath(folder)) for folder in folders]
    names = ["/".join(path.parts[-1:]) for path in paths]
    for number, path in enumerate(paths):
        parts = 1
        while sum(other.parts[-parts:] == path.parts[-parts:] for other in paths) > 1 and parts < len(
            path.parts
        ):
            parts += 1
        names[number] = "-".join(path.parts[-parts:])
    names = [re.sub(r"[^A-Za-z0-9_.-]", "_", name) for name in names]
    while len(set(names)) < len(names):
        names = [f"{name}.{i}" if names.count(name) > 1 else name for i, name in enumerate(names, 1)]
    return names


def data_tokenizer(config: Any) -> tiktoken.Encoding | None:
    """The tokenizer of the data of a run, whose TrainConfig this is; None in a dry run, if there are none yet.

    UserError, with the remedy, if a folder lacks a split that is read of it, or has another tokenizer.
    """
    names = [path.name for folder in config.data for path in Path(folder).glob("*")]
    if config.dry_run and not any(map(shards.split_of, names)):
        return None
    encs = []
    for i, folder in enumerate(config.data):
        # an evaluation needs no training data, and a share of 0 is not trained on
        if config.max_steps and (not config.data_weights or config.data_weights[i]):
            shards.find_shards(folder, "train")
        shards.find_shards(folder, "val")
        encs.append(tokenizers.folder_encoding(folder))
        if encs[-1].name != encs[0].name:
            raise UserError(
                f"The shards in {folder} have tokenizer {encs[-1].name}, but those in {config.data[0]} have "
                f"{encs[0].name}. Make them with one tokenizer, to train on both."
            )
    return encs[0]


def mix(positions: np.ndarray, weights: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """(which of the folders, how many windows of it came before) at each of these positions of a mixture.

    The weights are the folders' shares. Each position belongs to the folder whose rounded share of all positions up to
    it grows there, so that every stretch of the order has the exact shares but for a window or two.
    """
    before = shares_of(positions, weights)
    which = (shares_of(positions + 1, weights) - before).argmax(0)
    return which, before[which, np.arange(len(positions))]


def shares_of(n: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """How many of the first n positions each folder has (folders, len(n)): rounded, so that they still add up to n."""
    shares, left = [], n
    for i, weight in enumerate(weights):
        # of what the folders before it have left, its part of the weights that are left
        part = min(1.0, weight / sum(weights[i:])) if weight else 0.0
        shares.append(np.floor(left * part + 0.5).astype(np.int64))
        left = left - shares[-1]
    return np.stack(shares)


def permute(index: np.ndarray, n: int, seed: list[int]) -> np.ndarray:
    """Apply a pseudorandom permutation of range(n), which depends on `seed`, to each element of the array `index`.

    It is computed, not stored: a Feistel network (Luby and Rackoff 1988) permutes range(4**half), which holds range(n);
    values outside range(n) are permuted again until they are inside (cycle walking).
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
