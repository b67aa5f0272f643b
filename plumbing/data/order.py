"""The order in which a run reads its data: computed from a position, so that nothing has to be stored."""

import numpy as np


def permute(index, n, keys):
    """Apply a pseudorandom permutation of range(n) to each element of the array `index`; keys: a uint64 per round.

    It is computed, not stored: a Feistel network (Luby and Rackoff 1988) permutes range(4**half), which holds range(n);
    values outside range(n) are permuted again until they are inside (cycle walking).
    """
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
