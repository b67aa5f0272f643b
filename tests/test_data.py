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
from train_gpt2 import IGNORE_INDEX, DataLoaderLite

from harness import make_shards, windows


def counting_shards(lengths):
    """Train shards of these lengths, of consecutive numbers from 0 on."""
    first = 0
    for number, length in enumerate(lengths, 1):
        tokens = np.arange(first, first + length, dtype=np.uint16)
        np.save(f"count_train_{number:06d}.npy", tokens)
        first += length
    return "."


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


def read_steps(folder, layout, steps, *, T, S, **options):
    """The first tokens of the windows in `steps` steps of S windows, in the order (step, micro-step, rank, row).

    layout: (B, number of ranks)
    """
    B, world_size = layout
    loaders = []
    for rank in range(world_size):
        loaders.append(DataLoaderLite(folder, "train", B, T, rank, world_size, **options))
    seen = []
    for _ in range(steps * S // (B * world_size)):
        for loader in loaders:
            x, y = loader.next_batch()
            assert x.shape == y.shape == (B, T)
            assert torch.equal(x[:, 1:], y[:, :-1])
            assert torch.equal(y, x + 1)
            seen += x[:, 0].tolist()
    return seen


@pytest.mark.parametrize("seed", range(6))
def test_the_windows_of_a_step_are_the_same_in_every_layout(seed):
    """In file order, every window of every shard in turn."""
    rng = random.Random(seed)
    T = rng.randint(1, 16)
    lengths = [rng.randint(1, 40 * T) for _ in range(3)] + [9 * T]
    folder = counting_shards(lengths)
    order = itertools.cycle(windows_by_hand(lengths, T))
    expected = list(itertools.islice(order, 6 * 12))
    shuffled = read_steps(folder, (4, 3), 9, T=T, S=12, shuffle=True)
    for layout in rng.sample([(1, 1), (2, 1), (3, 4), (6, 2), (12, 1)], 3):
        assert read_steps(folder, layout, 6, T=T, S=12) == expected, layout
        assert read_steps(folder, layout, 9, T=T, S=12, shuffle=True) == shuffled, layout


def test_batches_of_any_size_continue_where_the_last_one_ended():
    """As in a batch ramp."""
    loader = DataLoaderLite(counting_shards([91]), "train", 4, 3)
    seen = []
    for B in (4, 2, 5):
        x, _ = loader.next_batch(B)
        seen += x[:, 0].tolist()
    assert seen == list(range(0, 33, 3))


def test_each_epoch_has_each_window_once_in_another_order():
    """And so has each seed."""
    folder = counting_shards([181])
    epochs = []
    for seed in (0, 1):
        seen = np.array(read_steps(folder, (4, 1), 45, T=3, S=4, shuffle=True, seed=seed))
        epochs += (seen // 3).reshape(3, 60).tolist()  # three, of 60 windows
    assert len(set(map(tuple, epochs))) == 6
    for epoch in epochs:
        assert sorted(epoch) == list(range(60))


def test_permute_puts_each_number_on_each_place_as_often():
    counts = np.zeros((5, 5))
    for seed in range(400):
        counts[np.arange(5), permute(np.arange(5), 5, [seed])] += 1
    # binomial with mean 80 and standard deviation 8
    assert counts.min() > 40
    assert counts.max() < 120


def test_permute_parts_neighbours():
    n = 10_000
    places = permute(np.arange(n), n, [3, 0])
    distances = np.diff(places)
    assert abs(np.corrcoef(np.arange(n), places)[0, 1]) < 0.05
    assert np.abs(distances).mean() == pytest.approx(n / 3, rel=0.05)  # as of independent draws
    assert np.count_nonzero(distances == 1) < 10  # a random permutation has one such pair on average


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


def test_targets_that_the_mask_leaves_out_are_ignored_and_not_counted():
    folder = make_shards("data", masks=True)
    loader = DataLoaderLite(folder, "train", B=2, T=16)
    all_x, all_y = windows(folder, "train", 16, masks=True)
    for start in range(0, 50, 2):
        expected = all_y[start : start + 2]
        assert loader.count_targets(2) == torch.count_nonzero(expected != IGNORE_INDEX)
        x, y = loader.next_batch()
        assert torch.equal(x, all_x[start : start + 2])
        assert torch.equal(y, expected)


def test_shards_shorter_than_a_window_are_refused():
    with pytest.raises(UserError, match="only 0 tokens in whole sequences of 4, but 4 are needed"):
        DataLoaderLite(counting_shards([4]), "train", 2, 4)
