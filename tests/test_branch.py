"""A run is never a dead end: it is branched, extended and decayed from any checkpoint, and its best weights stay.

What a branch without changes must give is what its parent gave, bit for bit, whatever kills it.
"""

import os
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import train_gpt2
from plumbing.run import logs
from plumbing.run.checkpoint import load_checkpoint, newest_checkpoint

from harness import (
    KILLED,
    assert_same_run,
    assert_same_tensors,
    die_at,
    examples_file,
    flags,
    killed_at,
    listing,
    losses,
    make_shards,
    printed_commands,
    read_log,
    refusal_of,
    refused,
    refused_run,
    run,
    signalled_in,
    status_of,
    steps_of,
    tiny_flags,
    train,
    write_half,
)

# with a vocabulary that is not padded
OPTIONS = dict(max_steps=12, val_every=4, checkpoint_every=4, keep_checkpoints=9, vocab_size=257)


@pytest.fixture(scope="module")
def parent(folder):
    """The folder of a finished run of OPTIONS, with the checkpoints of steps 4, 8 and 12."""
    train(folder, folder.parent / "parent", **OPTIONS)
    return folder.parent / "parent"


def branched(out_dir):
    """What run.txt says of the branch, in the last start that says something."""
    starts = logs.read_starts(Path(out_dir, "run.txt"))
    return [start["branched"] for start in starts if "branched" in start][-1]


EPOCHS = dict(total_batch_size=1024, batch_size=32)  # 64 of 293 windows a step: step 6 is in the second epoch
RAMP = dict(total_batch_size=384, max_steps=6)


def train_in_a_ramp(args):
    """128 tokens in the first steps, in step 4 twice and from step 5 on three times as many; the real one has 32K."""
    train_gpt2.get_batch_size = lambda seen, config: 128 * min(max(1, seen // 256), 3)
    train_gpt2.main(args)


@pytest.mark.parametrize(
    "ranks, train, options, step", [(0, train_gpt2.main, EPOCHS, 6), (2, train_in_a_ramp, RAMP, 4)]
)
def test_a_branch_without_changes_is_its_parent_bit_for_bit(ranks, train, options, step, folder):
    """With Muon, and so with AdamW for the rest. One begins in the second epoch, one before the batch grows.

    Its data were moved.
    """
    options = OPTIONS | dict(optimizer="muon", checkpoint_every=2) | options
    run(train, tiny_flags(folder, "parent", **options), ranks=ranks)
    shutil.copytree(folder, "moved")
    args = tiny_flags("moved", "out", branch_from=f"parent/model_{step:05d}.pt", **options)
    said = run(train, args, ranks=ranks)[0]
    assert f"a branch of parent, from step {step} to {options['max_steps']}" in said
    assert_same_run("out", "parent")


def die_in_the_first_checkpoint(args):
    with die_at(torch, "save", lambda *args: True, write_half):
        train_gpt2.main(args)


@pytest.mark.parametrize("fate_of_parent", ["stays", "gone on", "deleted"])
def test_a_branch_killed_at_any_moment_ends_bit_for_bit_as_its_parent(fate_of_parent, folder, parent, out):
    """The parent is given as a folder: its newest checkpoint may be of another step when the branch is resumed.

    Once the branch has a checkpoint, it no longer needs its parent.
    """
    later = shutil.ignore_patterns("model_00008.pt", "model_00012.pt")
    family = shutil.copytree(parent, "family", ignore=later)
    args = tiny_flags(folder, out, branch_from=family, **OPTIONS)
    killed = [die_in_the_first_checkpoint] if fate_of_parent == "stays" else [killed_at, 5, 4]
    run(*killed, args, ends=[KILLED])
    assert steps_of(out) == ([] if fate_of_parent == "stays" else [4])
    if fate_of_parent == "gone on":
        shutil.copytree(parent, family, dirs_exist_ok=True)
    if fate_of_parent == "deleted":
        shutil.rmtree(family)
    train(folder, out, branch_from=family, **OPTIONS)
    assert_same_run(out, parent)
    assert branched(out)["step"] == 4


# {what is wrong: (settings, words of the refusal)}
REFUSED = {
    "another shape": (dict(vocab_size=384), ["has 384 rows instead of 257, and a branch keeps the shapes"]),
    "two sources": (dict(init_from="gpt2"), ["--branch-from and --init-from both name the weights to start from"]),
    "no step left": (dict(max_steps=8), ["8 steps already", "use --init-from instead of --branch-from"]),
    "an export": (dict(branch_from="parent/hf"), ["There is no checkpoint in parent/hf"]),
    "weights alone": (dict(branch_from="best/model_best.pt"), ["best/model_best.pt has", "--init-from"]),
    "half a file": (dict(branch_from="half.pt"), ["half.pt cannot be read"]),
    "its own folder": (dict(out_dir="parent", branch_from="parent"), ["--branch-from", "--out-dir"]),
    # --no-resume would move the parent aside
    "its own checkpoint": (dict(out_dir="parent", resume=False), ["--branch-from", "--out-dir"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_branched_is_refused_and_nothing_is_written(name, folder, parent, best):
    shutil.copytree(parent, "parent")
    Path("best").symlink_to(best)
    Path("half.pt").write_bytes((parent / "model_00008.pt").read_bytes()[:1000])
    settings, words = REFUSED[name]
    before = listing(".")
    usual = dict(data=folder, out_dir="out", branch_from="parent/model_00008.pt")
    refused_run(OPTIONS | usual | settings, *words)
    assert listing(".") == before


# {name: (a branch's changes, its notes about them, the steps that it reads of one order)}
FRESH = {
    "order": (
        dict(seed=7, shuffle=False, sequence_length=32),
        ["differs from its parent in sequence_length, seed, shuffle, so it starts at the beginning"],
        8,
    ),
    "data": (
        dict(data="other", data_weights=2.0),
        ["differs from its parent in training data, data_weights,", "The validation data are not the parent's"],
        8,
    ),
    "optimizer": (
        dict(optimizer="muon"),
        ["the parent's optimizer state: it has group 0 of AdamW instead of group 0 of Muon"],
        16,
    ),
}


@pytest.mark.parametrize("name", FRESH)
def test_a_branch_says_which_state_it_starts_without_and_ends_as_if_never_stopped(name, folder, parent):
    """Also where it is stopped before its first step, and continued by its folder alone, then by the command that it
    prints.
    """
    changes, notes, steps = FRESH[name]
    make_shards("other", seed=1)
    options = OPTIONS | dict(data=folder, branch_from=parent / "model_00008.pt", max_steps=16) | changes
    said = train(out_dir="out", **options)
    found = [line for line in said.splitlines() if line.startswith("note: ") and "learning rate" not in line]
    for note, line in zip(notes, found, strict=True):
        assert note in line and "ramp" not in line
    assert f"the run reads {128 * steps:,}" in said
    weights = load_checkpoint(parent / "model_00008.pt")
    assert_same_tensors(load_checkpoint("out/model_00008.pt")["model"], weights["model"])
    run(killed_at, 8, 8, tiny_flags(out_dir="stopped", **options), ends=[KILLED])
    [said] = run(signalled_in, "evaluate_val_loss", 1, 0, ["--out-dir", "stopped"])
    assert "Stopped after 8 steps." in said
    assert status_of(train_gpt2.main, printed_commands(said)[-1][2:]) == 0
    assert_same_run("stopped", "out")


def test_a_branch_is_continued_without_its_flag_and_not_by_one_at_another_step(parent, folder, out):
    """It begins at the rate of its step, which is no jump, although the parent ended at a tenth of it.

    It leaves its parent alone.
    """
    before = listing(parent)
    said = train(folder, out, branch_from=parent / "model_00004.pt", **OPTIONS)
    assert "note: The learning rate" not in said
    assert "is finished" in train(folder, out, **OPTIONS)
    another = dict(data=folder, out_dir=out, branch_from=parent / "model_00008.pt")
    refused_run(OPTIONS | another, f"{out} has a finished run", "branch_from was", "--no-resume")
    assert listing(parent) == before


def test_a_branch_may_change_batch_size_rates_and_dtype_and_says_so_in_run_txt(parent, folder, out, tmp_path):
    """Of a checkpoint alone: steps of 8 windows, then of 16. Which weights are kept is no part of the recipe.

    The parent's checkpoint of step 8 was temporary there, and is a milestone here.
    """
    alone = shutil.copy(parent / "model_00008.pt", tmp_path)
    changes = dict(total_batch_size=256, max_lr=1e-2, schedule="wsd", dtype="float16")
    kept = dict(keep_best=True, milestone_every=8, keep_checkpoints=1)
    train(folder, out, branch_from=alone, **OPTIONS | changes | kept)
    assert steps_of(out) == [8, 12]
    assert list(read_log(out)) == [8, 9, 10, 11]
    changed = dict(dtype=["float32", "float16"], total_batch_size=[128, 256])
    changed |= dict(max_lr=[3e-3, 1e-2], schedule=["cosine", "wsd"])
    assert branched(out) == {"parent": str(tmp_path), "step": 8, "changed": changed}
    last = newest_checkpoint(out)
    assert last["loader"]["position"] == 8 * 8 + 4 * 16
    assert last["optimizer"][0]["param_groups"][0]["initial_lr"] == 1e-2
    assert last["scaler"]["scale"] == 2.0**16  # which a scaler begins with


CONSTANT = OPTIONS | dict(schedule="wsd", decay_fraction=0)


@pytest.fixture(scope="module")
def constant(folder):
    """The folder of a finished run at a constant rate."""
    train(folder, folder.parent / "constant", **CONSTANT)
    return folder.parent / "constant"


def test_a_finished_run_is_extended_by_its_name_and_a_number_of_steps(constant, folder, out):
    """At a constant rate that is the run of this length from scratch, bit for bit. It says whose settings it has."""
    train(folder, "long", **CONSTANT | {"max_steps": 24})
    words = flags(branch_from=constant, out_dir=out, max_steps=24, device="cpu", preset="speedrun")
    said = " ".join(refusal_of(train_gpt2.main, *words)[1].split())
    assert_same_run(out, "long")
    assert "A branch keeps its parent's settings, not those of --preset speedrun." in said
    assert f"Settings inherited from {constant}: data {folder}, " in said
    assert " block_size 32, " in said


@pytest.mark.parametrize(
    "typed",
    [
        dict(data="other", max_lr=1e-3, val_every=7, max_steps=16),
        dict(max_steps=9),  # fewer than the run has done
        dict(max_steps=0),
        dict(block_size=64, passes=0.5),
    ],
)
def test_the_refusal_of_other_settings_names_the_flags_with_which_they_are_trained(typed, folder, parent):
    make_shards("other", seed=1)
    shutil.copytree(parent, "out")
    command = tiny_flags(out_dir="out", **dict(data=folder) | OPTIONS | typed)
    line = refused(train_gpt2.main, *command)
    added = shlex.split(line.rpartition(", add ")[2].rstrip("."))
    assert status_of(train_gpt2.main, [*command, *added]) == 0
    assert Path("NEW", "log.txt").exists()


# validation losses that fall, rise, and fall again; in a branch at step 4 all are above the parent's best
SCRIPT = {0: 5.0, 2: 3.0, 4: 3.5, 6: 3.3, 8: 2.5, 10: 2.5, 12: 2.6}  # of two equal ones the first is the best
BRANCH_SCRIPT = {4: 3.5, 6: 3.1, 8: 3.4, 10: 3.2, 12: 3.3}
BEST = dict(max_steps=12, val_every=2, checkpoint_every=2, keep_checkpoints=99, keep_best=True)


def train_with(script, args, step=None, checkpoint=None):
    """Train, with validation losses from `script`; be killed at that step, once that checkpoint is there."""

    def scripted(model, loader, parts):
        return train_gpt2.ValLoss(script[parts.loader.position // 8], 1.0)

    train_gpt2.evaluate_val_loss = scripted
    killed_at(step, checkpoint, args)


def assert_best_is(out_dir, step, loss):
    """model_best.pt is of this step, bit for bit the weights of that step's checkpoint; it makes a model alone."""
    best = load_checkpoint(out_dir / "model_best.pt")
    checkpoint = load_checkpoint(out_dir / f"model_{step:05d}.pt")
    assert (best["step"], best["val_loss"]) == (step, loss)
    assert_same_tensors(best["model"], checkpoint["model"])
    model, _ = train_gpt2.load_model(out_dir / "model_best.pt")
    assert_same_tensors(model.state_dict(), checkpoint["model"])


@pytest.fixture(scope="module")
def best(folder):
    """The folder of a run whose best validation loss is that of step 8."""
    [said] = run(train_with, SCRIPT, tiny_flags(folder, folder.parent / "best", **BEST))
    assert "\nThe lowest validation loss was 2.5000; its weights are in model_best.pt.\n" in said
    return folder.parent / "best"


def test_a_branch_keeps_its_best_weights_apart_from_its_parents_however_often_it_is_resumed(folder, best, out):
    """The parent's 3.0 in step 2 is in the branch's log, and lower than all that the branch reaches.

    After it was killed, the branch reaches 3.2, which is not its best, either.
    """
    args = tiny_flags(folder, out, branch_from=best / "model_00004.pt", **BEST)
    run(train_with, BRANCH_SCRIPT, args, 9, 8, ends=[KILLED])
    run(train_with, BRANCH_SCRIPT, args)
    assert_best_is(best, 8, 2.5)
    assert_best_is(out, 6, 3.1)


MILESTONES = dict(max_steps=14, checkpoint_every=2, milestone_every=6, val_every=7)


def test_milestones_stay_for_good_while_other_checkpoints_go(folder, out):
    """They are written also where no other checkpoint is due. At the end 8 goes, though nothing was validated."""
    train(folder, out, **MILESTONES | dict(keep_checkpoints=2, checkpoint_every=4, val_every=0))
    assert steps_of(out) == [6, 12, 14]


def test_a_run_that_was_killed_keeps_milestones_what_it_did_not_write_and_its_last_validation_loss(folder, out):
    """Whether a checkpoint is one is decided when it is written. The loss is step 7's: the next is step 14's."""
    options = MILESTONES | dict(keep_checkpoints=1)
    run(killed_at, 9, 8, tiny_flags(folder, out, **options), ends=[KILLED])
    assert steps_of(out) == [6, 8]
    shutil.copy(out / "model_00006.pt", out / "model_00003.pt")
    train(folder, out, **options | {"milestone_every": 4})
    assert steps_of(out) == [3, 6, 12, 14]
    loss = load_checkpoint(out / "model_00012.pt")["val_loss"]
    assert loss == pytest.approx(losses(out, "val")[1], abs=1e-6)


def train_on_node(args):
    """Train as a rank on a node with another disk: the same paths are below another root."""
    os.chdir(f"node{os.environ['RANK']}")
    train_gpt2.main(args)


def test_parent_and_hellaswag_need_be_on_the_first_nodes_disk_only():
    for node in ("node0", "node1"):
        make_shards(f"{node}/data")
    train("node0/data", "node0/parent", max_steps=1)
    file = examples_file(Path("node0"), ["A man"]).name
    args = tiny_flags("data", "out", branch_from="parent", max_steps=2, hellaswag_every=2, hellaswag_data=file)
    run(train_on_node, args, ranks=2)
    assert newest_checkpoint("node0/out")["step"] == 2


@pytest.mark.parametrize(
    "branch_has, said",
    [
        (dict(max_steps=16, decay_fraction=1.0), ["0.003 before", "0.0015 now."]),
        (dict(max_steps=10), ["0.003 before", "0.003 now", "to the end", "fraction 0.2 "]),
        (dict(max_steps=10, decay_fraction=0.2), []),
    ],
)
def test_a_branch_says_if_its_learning_rate_jumps_or_never_decays(constant, folder, branch_has, said):
    """The parent's 3e-3 is constant to step 8."""
    printed = train(folder, "branch", **CONSTANT | branch_has, branch_from=constant / "model_00008.pt")
    notes = [line for line in printed.splitlines() if "note: The learning rate" in line]
    assert len(notes) == bool(said)
    for words in said:
        assert words in notes[0]


def test_a_branch_behind_a_decay_is_given_no_advice_that_raises_its_rate(folder):
    """Nor is it what a finished run names as the next command: it would be worse first."""
    said = train(folder, "parent", **OPTIONS | dict(schedule="wsd", decay_fraction=0.5))
    assert [Path(words[1]).name for words in printed_commands(said)] == ["sample.py"]
    said = train(folder, "out", branch_from="parent", max_steps=24, val_every=0)
    assert "note: The learning rate was 0.0005 before the branch and is 0.003 now.\n" in said
    assert "Settings" not in said, "the command asks for them"
