"""The loader: which windows a step reads, on any layout, in any epoch, and what it refuses.

The shards here count: token i of the whole split is the number i, so that a batch shows where it was read.
"""

import itertools
import random
import tracemalloc

import numpy as np
import pytest
import torch
from plumbing.cli.console import UserError
from plumbing.data.windows import permute
from train_gpt2 import DataLoaderLite

from harness import make_shards


def counting_shards(folder, lengths):
    """Train shards of these lengths, of consecutive numbers from 0 on."""
    folder.mkdir(exist_ok=True)
    first = np.cumsum([0, *lengths])
    for number, (start, length) in enumerate(zip(first, lengths), 1):
        np.save(folder / f"count_train_{number:06d}.npy", np.arange(start, start + length).astype(np.uint16))
    return folder


def windows_by_hand(lengths, T):
    """The first token of each window: at multiples of T in a shard, where T + 1 tokens are left."""
    starts = []
    first = 0
    for length in lengths:
        offset = 0
        while offset + T + 1 <= length:
            starts.append(first + offset)
            offset += T
        first += length
    return starts


def read_steps(folder, T, S, B, world_size, steps, **options):
    """For each step of S windows, the windows' first tokens in the order (micro-step, rank, row)."""
    loaders = [DataLoaderLite(folder, "train", B, T, rank, world_size, **options) for rank in range(world_size)]
    for _ in range(steps):
        seen = []
        for _ in range(S // (B * world_size)):
            for loader in loaders:
                x, y = loader.next_batch()
                assert x.shape == y.shape == (B, T)
                assert torch.equal(x[:, 1:], y[:, :-1])
                assert torch.equal(y, x + 1)
                seen += x[:, 0].tolist()
        yield seen


def random_cases(n, seed=0):
    """n times (lengths of shards, T, windows per step, [(B, world_size)] that divide a step)."""
    rng = random.Random(seed)
    for _ in range(n):
        T = rng.choice([1, 2, 3, 5, 8, 16])
        lengths = [rng.randint(1, 40 * T) for _ in range(rng.randint(1, 4))]
        S = rng.choice([4, 6, 8, 12])
        layouts = [(B, N) for B in range(1, S + 1) for N in (1, 2, 3, 4) if S % (B * N) == 0]
        if len(windows_by_hand(lengths, T)) > 0:
            yield lengths, T, S, rng.sample(layouts, 3)


def test_file_order_is_every_window_of_every_shard_in_turn(tmp_path):
    for case, (lengths, T, S, layouts) in enumerate(random_cases(8)):
        folder = counting_shards(tmp_path / str(case), lengths)
        order = itertools.cycle(windows_by_hand(lengths, T))
        expected = [list(itertools.islice(order, S)) for _ in range(6)]
        for B, world_size in layouts:
            assert list(read_steps(folder, T, S, B, world_size, 6)) == expected, (lengths, T, S, B, world_size)


def test_shuffled_steps_hold_the_same_windows_for_every_layout_and_each_epoch_each_window_once(tmp_path):
    for case, (lengths, T, S, layouts) in enumerate(random_cases(5, seed=1)):
        folder = counting_shards(tmp_path / str(case), lengths)
        starts = windows_by_hand(lengths, T)
        options = dict(steps=3 * len(starts) // S + 1, shuffle=True)
        streams = [list(read_steps(folder, T, S, *layout, seed=case, **options)) for layout in layouts]
        assert streams[0] == streams[1] == streams[2]
        stream = sum(streams[0], [])
        epochs = [stream[number * len(starts) :][: len(starts)] for number in range(3)]
        assert all(sorted(epoch) == starts for epoch in epochs)
        # the order differs between epochs and seeds
        other = sum(read_steps(folder, T, S, S, 1, seed=99, **options), [])[: len(starts)]
        assert len(starts) < 8 or len(set(map(tuple, [*epochs, other]))) == 4


def test_permute_shuffles_well():
    """Over 400 seeds each of 5 numbers lands about as often on each place; neighbours part in a large range."""
    counts = np.zeros((5, 5))
    for seed in range(400):
        counts[np.arange(5), permute(np.arange(5), 5, [seed])] += 1
    # binomial with mean 80 and standard deviation 8
    assert counts.min() > 40
    assert counts.max() < 120
    n = 10_000
    places = permute(np.arange(n), n, [3, 0])
    assert abs(np.corrcoef(np.arange(n), places)[0, 1]) < 0.05
    assert np.abs(np.diff(places)).mean() == pytest.approx(n / 3, rel=0.05)  # as of independent draws
    assert (np.diff(places) == 1).sum() < 10  # a random permutation has one such pair on average


def test_permute_needs_no_memory_for_the_1_3_billion_windows_of_a_large_corpus():
    n = 1_300_000_000
    tracemalloc.start()
    places = permute(np.arange(n - 64, n), n, [0, 0])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(places.tolist())) == 64
    assert 0 <= places.min()
    assert places.max() < n
    assert peak < 100_000


def test_a_mask_that_is_missing_and_shards_shorter_than_a_window_are_refused(tmp_path):
    folder = make_shards(tmp_path / "masks", lengths=(100, 90, 70), masks=True)
    (folder / "tiny_train_000001.mask").unlink()
    with pytest.raises(UserError, match="tiny_train_000001.mask is missing"):
        DataLoaderLite(folder, "train", 2, 4)
    with pytest.raises(UserError, match="only 0 tokens in whole sequences of 4, but 4 are needed"):
        DataLoaderLite(counting_shards(tmp_path / "short", [4]), "train", 2, 4)
