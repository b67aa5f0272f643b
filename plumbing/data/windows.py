"""Windows: what a run reads of a split of shards, and a permutation of them that is computed and not stored."""

from collections.abc import Iterable

import numpy as np
import tiktoken

from plumbing.data import shards, tokenizers
from plumbing.files import Name


class Windows:
    """A split's windows of T tokens, at multiples of T within a shard; up to T tokens at a shard's end are dropped."""

    def __init__(self, folder: Name, split: str, T: int):
        self.T = T
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

    def locate(self, numbers: np.ndarray) -> Iterable[tuple[int, int]]:
        """(index of the shard, offset of its first token) of each of these windows."""
        indices = np.searchsorted(self.first, numbers, side="right") - 1
        return zip(indices.tolist(), ((numbers - self.first[indices]) * self.T).tolist())

    def read(self, numbers: np.ndarray) -> list[np.ndarray]:
        """[tokens (n, T + 1)] of these n windows, and their mask of the same shape if the split has one."""
        places = list(self.locate(numbers))
        both = [self.shards, self.masks] if self.masks else [self.shards]
        return [np.stack([arrays[i].read(offset, self.T + 1) for i, offset in places]) for arrays in both]


def data_tokenizer(folder: Name) -> tiktoken.Encoding:
    """The tokenizer of a folder of shards; UserError, with the remedy, if it has none to train on."""
    shards.find_shards(folder, "train")
    return tokenizers.folder_encoding(folder)


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
