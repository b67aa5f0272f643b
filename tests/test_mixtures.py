"""Several folders of data: exact shares in an order that is computed, a loss for each, and runs that go on exactly."""

import json
import shutil

import numpy as np
import pytest
import train_gpt2
from plumbing.data.windows import mix, stream_names
from plumbing.run.checkpoint import load_checkpoint
from train_gpt2 import IGNORE_INDEX, DataLoaderLite

from harness import KILLED, assert_same_run, killed_at, losses, make_shards, refused, run, tiny_flags, train, windows


@pytest.mark.parametrize("weights", [(0.7, 0.29, 0.01), (7, 3, 0), (0.001, 0.999), tuple(range(1, 8))])
def test_every_stretch_of_a_mixture_has_the_exact_shares_and_no_window_is_left_out(weights):
    """Of any thousand positions; and a position says itself what stands there."""
    n = 20_000
    which, numbers = mix(np.arange(n), weights)
    shares = np.array(weights) / sum(weights)
    for folder, share in enumerate(shares):
        assert (numbers[which == folder] == np.arange((which == folder).sum())).all()
        counts = np.convolve(which == folder, np.ones(1000), "valid")
        assert abs(counts - 1000 * share).max() <= (1 if len(weights) <= 3 else 2) + 1e-6
    at = np.array([7, 19_999, 3, 12_345])
    assert [part.tolist() for part in mix(at, weights)] == [which[at].tolist(), numbers[at].tolist()]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Three folders; the second has masks, and is small, so that it is read more than once."""
    root = tmp_path_factory.mktemp("mixtures")
    make_shards(root / "docs", (1000, 3000, 1700), seed=1)
    make_shards(root / "chats", (700, 900), seed=2, masks=True)
    make_shards(root / "code", (800, 400), seed=3)
    return [str(root / name) for name in ("docs", "chats", "code")]


def rows_of(x, y):
    return [tuple(map(tuple, row)) for row in zip(x.tolist(), y.tolist())]


def rows_in(folder):
    """What the windows of a folder are, in file order."""
    return rows_of(*windows(folder, "train", 16, masks=folder.endswith("chats")))


def rows_read(loader, batches):
    return [row for _ in range(batches) for row in rows_of(*loader.next_batch())]


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_folder_is_read_without_replacement_over_its_own_epochs(shuffle, folders):
    """Half of 3 * 56 windows are of the folder that has 56: one and a half times all of it."""
    loader = DataLoaderLite(folders, "train", 6, 16, weights=(1, 1, 0), seed=5, shuffle=shuffle)
    found, own, others = rows_read(loader, 28), rows_in(folders[1]), rows_in(folders[0])
    of_docs, of_chats = (found[0::2], found[1::2]) if found[1] in own else (found[1::2], found[0::2])
    assert len(own) == 56 and sorted(of_chats[:56]) == sorted(own) and len(of_chats) == 84
    assert len(set(of_chats[56:])) == 28 and set(of_chats[56:]) <= set(own)
    assert (of_chats[:56] == own) == (not shuffle)
    assert set(of_docs) <= set(others) and len(set(of_docs)) == 84
    assert any(IGNORE_INDEX in y for _, y in of_chats) and not any(IGNORE_INDEX in y for _, y in of_docs)


def test_a_folder_whose_share_is_0_is_not_read_wherever_it_stands(folders):
    """The first: each sequence is one of the second folder, or of the third."""
    loader = DataLoaderLite(folders, "train", 6, 16, weights=(0, 1, 3), seed=5, shuffle=True)
    assert set(rows_read(loader, 20)) <= {*rows_in(folders[1]), *rows_in(folders[2])}


def test_without_weights_every_window_of_all_folders_is_read_once_per_epoch(folders):
    loader = DataLoaderLite(folders, "train", 1, 16, seed=5, shuffle=True)
    everything = [row for folder in folders for row in rows_in(folder)]
    for _ in range(2):
        found = rows_read(loader, len(everything))
        assert sorted(found) == sorted(everything) and found != everything


OPTIONS = dict(max_steps=12, checkpoint_every=4, keep_checkpoints=9, keep_best=True, val_every=6)


def mixed(folders, out_dir, weights=(0.5, 0.3, 0.2), **changes):
    args = tiny_flags("DATA", out_dir, **OPTIONS | changes)
    at = args.index("DATA")
    return [*args[:at], *folders, *args[at + 1 :], "--data-weights", *map(str, weights)]


def test_a_mixture_is_killed_resumed_branched_and_has_a_loss_for_each_folder(folders, tmp_path):
    [said] = run(train_gpt2.main, mixed(folders, tmp_path / "whole"))
    # of 12 * 128 tokens, by the shares; the folders have 187 + 106, 56 and 24 windows of 16
    passes = {"docs": "4,688 tokens, 50.0% of the run, 0.16", "chats": "896 tokens, 30.0% of the run, 0.51"}
    for name, of_it in {**passes, "code": "384 tokens, 20.0% of the run, 0.8"}.items():
        assert f"/{name}: {of_it} passes" in said
    args = mixed(folders, tmp_path / "killed")
    run(killed_at, 7, 4, args, ends=[KILLED])
    run(train_gpt2.main, args)
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    run(train_gpt2.main, mixed(folders, tmp_path / "two", batch_size=2), ranks=2)
    assert abs(losses(tmp_path / "two") - losses(tmp_path / "whole")).max() < 1e-5
    for stream in ("val", "val_bpb"):
        each = [losses(tmp_path / "whole", f"{stream}/{name}") for name in ("docs", "chats", "code")]
        assert len({*each[0], *each[1], *each[2]}) == 9, "another loss for each folder and step"
        mean = np.average(each, axis=0, weights=(0.5, 0.3, 0.2))
        np.testing.assert_allclose(losses(tmp_path / "whole", stream), mean, rtol=1e-6)
    alone = train(folders[1], tmp_path / "alone", init_from=tmp_path / "whole", max_steps=0)
    assert f"val loss {losses(tmp_path / 'whole', 'val/chats')[-1]:.4f}"[:-1] in alone
    # a decay on other data, exact after a kill
    source = tmp_path / "whole" / "model_00008.pt"
    for out in ("branch", "again"):
        args = mixed(folders[:2], tmp_path / out, (0, 1), branch_from=source, max_steps=16)
        run(killed_at, 13, 12, args, ends=[KILLED]) if out == "again" else None
        [said] = run(train_gpt2.main, args)
    assert ", from step 12 to 16" in said
    assert_same_run(tmp_path / "again", tmp_path / "branch")


def test_what_a_mixture_cannot_be_is_one_line(folders, tmp_path):
    def refusal(folders, *weights):
        return refused(train_gpt2.main, *mixed(folders, tmp_path / "out", weights))

    for weights in ((-1, 1, 1), (0, 0, 0), (1, 1), ("nan", 1, 1), ("inf", 1, 1)):
        assert "Give a share for each folder: 0 or more, and not all 0." in refusal(folders, *weights)
    (tmp_path / "link").symlink_to(folders[0])
    for again in (folders[0], f"{folders[0]}/", f"{folders[1]}/../docs", tmp_path / "link"):
        assert "names a folder twice" in refusal([folders[0], folders[1], str(again)], 1, 1, 1)
    line = refused(train_gpt2.main, *mixed(folders, tmp_path / "out", (1, 1, 1), passes=1))
    assert "--passes counts all windows of all folders, which shares of them do not" in line
    other = shutil.copytree(folders[2], tmp_path / "other")
    meta = json.loads((other / "meta.json").read_text())
    (other / "meta.json").write_text(json.dumps(meta | {"tokenizer": "bytes+chat"}))
    line = refusal([folders[0], str(other)], 1, 1)
    assert f"The shards in {other} have tokenizer bytes+chat, but those in {folders[0]} have bytes." in line
    for path in other.glob("*_val_*"):
        path.unlink()
    assert f"There are no val shards in {other}" in refusal([folders[0], str(other)], 1, 1)
    assert not (tmp_path / "out").exists()


def test_folders_of_one_name_have_streams_of_their_own():
    assert stream_names(["a/code", "b/code", "docs"]) == ["a-code", "b-code", "docs"]
    assert stream_names(["/x/my texts", "\u00e9", "\u00fc"]) == ["my_texts", "_.2", "_.3"]
    assert len(set(stream_names(["a b", "a_b", "a_b.1"]))) == 3


@pytest.mark.parametrize("number, shares", [(3, [0.5, 0.3, 0.2]), (2, [])])
def test_a_branch_keeps_its_parents_shares_unless_it_names_other_folders(number, shares, folders, tmp_path):
    run(train_gpt2.main, mixed(folders, tmp_path / "parent", max_steps=4))
    args = mixed(folders[:number], tmp_path / "branch", branch_from=tmp_path / "parent", max_steps=8)
    run(train_gpt2.main, args[: args.index("--data-weights")])
    assert list(load_checkpoint(tmp_path / "branch" / "model_00008.pt")["config"]["data_weights"]) == shares
