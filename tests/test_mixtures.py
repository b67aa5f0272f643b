"""Several folders of data: exact shares in an order that is computed, a loss for each, and exact resumes."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from plumbing.data.windows import mix, stream_names
from plumbing.run.checkpoint import newest_checkpoint
from train_gpt2 import DataLoaderLite

from harness import (
    KILLED,
    assert_same_run,
    change_meta,
    killed_at,
    log_lines,
    losses,
    make_shards,
    refused_run,
    run,
    tiny_flags,
    train,
    windows,
)


@pytest.mark.parametrize("weights", [(0.7, 0.29, 0.01), (7, 3, 0), (0.001, 0.999), tuple(range(1, 8))])
def test_every_thousand_positions_of_a_mixture_have_the_exact_shares(weights):
    which, _ = mix(np.arange(20_000), weights)
    for folder, weight in enumerate(weights):
        counts = np.convolve(which == folder, np.ones(1000), "valid")
        assert abs(counts - 1000 * weight / sum(weights)).max() <= 2


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Three folders; the second has masks, and is small, so that it is read more than once."""
    root = tmp_path_factory.mktemp("mixtures")
    docs = make_shards(root / "docs", (1000, 3000, 1700), seed=1)
    chats = make_shards(root / "chats", (700, 900), seed=2, masks=True)
    code = make_shards(root / "code", (800, 400), seed=3)
    return docs, chats, code


def rows_of(x, y):
    """A batch as a list of (x, y), which can be compared and sorted."""
    rows = torch.stack([x, y], 1).tolist()
    return [(tuple(ids), tuple(targets)) for ids, targets in rows]


def rows_in(folder):
    """The windows of a folder in file order."""
    x, y = windows(folder, "train", 16, masks=folder.name == "chats")
    return rows_of(x, y)


def rows_read(loader, batches):
    rows = []
    for _ in range(batches):
        rows += rows_of(*loader.next_batch())
    return rows


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_folder_is_read_without_replacement_over_its_own_epochs(shuffle, folders):
    """Half of 168 windows are of the second folder, which has 56: its first epoch and half of its next one."""
    docs, chats = rows_in(folders[0]), rows_in(folders[1])
    loader = DataLoaderLite(folders, "train", 6, 16, weights=(1, 1, 0), seed=5, shuffle=shuffle)
    found = rows_read(loader, 28)
    of_chats = [row for row in found if row in chats]
    of_docs = [row for row in found if row in docs]
    epoch = of_chats[:56]
    assert sorted(epoch) == sorted(chats)
    assert (epoch == chats) == (not shuffle)
    assert len(of_chats[56:]) == len(set(of_chats[56:])) == 28
    assert len(of_docs) == len(set(of_docs)) == 84


def test_folders_of_one_size_are_read_in_different_orders():
    """As two languages of one text may be."""
    folders = [make_shards(name, (2000, 1000)) for name in ("en", "de")]
    rows = rows_read(DataLoaderLite(folders, "train", 2, 16, weights=(1, 1), seed=5, shuffle=True), 62)
    first, second = rows[0::2], rows[1::2]
    assert first != second
    assert sorted(first) == sorted(second)


def test_without_weights_every_window_of_all_folders_is_read_once_per_epoch(folders):
    loader = DataLoaderLite(folders, "train", 1, 16, seed=5, shuffle=True)
    everything = sum(map(rows_in, folders), [])
    first = rows_read(loader, len(everything))
    second = rows_read(loader, len(everything))
    assert sorted(first) == sorted(second) == sorted(everything)
    assert first != everything
    assert first != second, "another order in each epoch"


WEIGHTS = (0.5, 0.3, 0.2)
OPTIONS = dict(max_steps=12, checkpoint_every=4, keep_checkpoints=9, val_every=6, data_weights=WEIGHTS)


@pytest.fixture(scope="module")
def whole(folders):
    """The folder of a run on the mixture that nothing interrupts."""
    out_dir = folders[0].parent / "whole"
    train(folders, out_dir, **OPTIONS)
    return out_dir


def test_a_dry_run_says_how_often_each_folder_is_read(folders, out):
    """The run reads 12 * 128 tokens, by the shares; the folders have 187 + 106, 56 and 24 windows of 16."""
    said = train(folders, out, dry_run=True, **OPTIONS)
    assert "/docs: 4,688 tokens, 50.0% of the run, 0.16 passes" in said
    assert "/chats: 896 tokens, 30.0% of the run, 0.51 passes" in said
    assert "/code: 384 tokens, 20.0% of the run, 0.8 passes" in said


def test_a_run_on_a_mixture_ends_after_a_kill_as_if_never_interrupted(folders, whole, out):
    run(killed_at, 7, 4, tiny_flags(folders, out, **OPTIONS), ends=[KILLED])
    train(folders, out, **OPTIONS)
    assert_same_run(out, whole)


def assert_is_mean(out_dir, stream, weights):
    """The losses of this stream are the mean of the folders', all of which differ."""
    folders = [losses(out_dir, f"{stream}/{name}") for name in ("docs", "chats", "code")]
    assert len(np.unique(folders)) == np.size(folders)
    mean = np.average(folders, axis=0, weights=weights)
    assert losses(out_dir, stream) == pytest.approx(mean, rel=1e-6)


def test_the_loss_of_a_mixture_is_the_mean_by_its_shares(whole):
    for stream in ("val", "val_bpb"):
        assert_is_mean(whole, stream, WEIGHTS)


def test_the_loss_of_folders_without_shares_is_the_mean_by_their_training_windows(folders, out):
    """Of 187 + 106, 56 and 24 windows. The console shows each folder's."""
    said = train(folders, out, val_every=1, max_steps=1)
    assert_is_mean(out, "val", (293, 56, 24))
    shown = [f"{name} {losses(out, f'val/{name}')[1]:.4f}" for name in ("docs", "chats", "code")]
    assert f"step     1 | val loss {losses(out, 'val')[1]:.4f} | {', '.join(shown)}\n" in said
    assert ": 384 tokens, 6.4% of the run" in said


def test_the_loss_of_folders_in_an_evaluation_is_the_mean_by_their_validation_windows(folders, whole):
    """Of 62, 43 and 49 windows. Each folder's is its loss alone."""
    train(folders, "all", init_from=whole, max_steps=0)
    assert_is_mean("all", "val", (62, 43, 49))
    train(folders[1], "one", init_from=whole, max_steps=0)
    assert losses("one", "val") == pytest.approx(losses("all", "val/chats"), abs=1e-4)


def test_a_branch_on_other_folders_ends_after_a_kill_as_if_never_interrupted(folders, whole):
    changes = dict(data_weights=(0, 1), branch_from=whole / "model_00008.pt", checkpoint_every=2)
    options = OPTIONS | changes
    train(folders[:2], "branch", **options)
    run(killed_at, 11, 10, tiny_flags(folders[:2], "again", **options), ends=[KILLED])
    train(folders[:2], "again", **options)
    assert log_lines("again") == log_lines("branch")


def test_a_folder_that_is_named_twice_is_refused(folders, out):
    docs, chats, _ = folders
    Path("link").symlink_to(docs)
    for again in (docs, f"{docs}/", f"{chats}/../docs", "link"):
        refused_run(dict(data=(docs, chats, again), out_dir=out), "names a folder twice")


@pytest.fixture
def two(folders):
    """A folder, and a copy of another one, to be changed."""
    return folders[0], shutil.copytree(folders[2], Path("other"))


def test_folders_of_other_tokenizers_are_refused(two, out):
    docs, other = two
    change_meta(other, tokenizer="bytes+chat")
    words = f"The shards in {other} have tokenizer bytes+chat, but those in {docs} have bytes."
    refused_run(dict(data=two, out_dir=out), words)


@pytest.mark.parametrize("share", [0, 1])
def test_a_folder_without_a_validation_split_is_refused(share, two, out):
    (two[1] / "tiny_val_000000.npy").unlink()
    refused_run(dict(data=two, out_dir=out, data_weights=(1, share)), f"There are no val shards in {two[1]}")


def test_a_folder_without_a_training_split_may_have_a_share_of_0(two, out):
    (two[1] / "tiny_train_000001.npy").unlink()
    change_meta(two[1], shards={"tiny_val_000000.npy": 800})
    train(two, out, data_weights=(1, 0), max_steps=1)
    assert losses(out, "val/other").all()


def test_folders_have_different_streams():
    assert stream_names(["a/code", "b/code", "docs"]) == ["a-code", "b-code", "docs"]
    assert stream_names(["/x/my texts", "\u00e9", "\u00fc"]) == ["my_texts", "_.2", "_.3"]


@pytest.mark.parametrize("number, shares", [(3, WEIGHTS), (2, ())])
def test_a_branch_keeps_its_parents_shares_unless_it_names_other_folders(number, shares, folders, whole, out):
    """The same ones may be typed in another way."""
    typed = tuple(f"{folder}/" for folder in folders[:number])
    train(typed, out, branch_from=whole / "model_00008.pt", max_steps=9)
    assert tuple(newest_checkpoint(out)["config"]["data_weights"]) == shares
