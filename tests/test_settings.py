"""What is typed, taken over and completed: the settings of a run."""

import pytest
import train_gpt2
from plumbing.run.checkpoint import newest_checkpoint
from plumbing.system.distributed import World

from harness import make_shards, printed_commands, status_of, tiny_flags, train

TYPED = [  # each setting of a preset that can be typed, with the preset's own value
    (preset, name, value)
    for preset in ("gpt2", "quickstart")
    for name, value in vars(train_gpt2.PRESETS[preset]).items()
    if value not in (None, "", ())
]


@pytest.mark.parametrize("preset, name, value", TYPED, ids=lambda part: str(part))
def test_a_default_that_is_typed_is_the_default(preset, name, value, data):
    """And 0 ids are the tokenizer's, as without the flag."""
    typed = {"preset": preset, "data": (str(data),), "sequence_length": 128, "block_size": 128}
    if preset == "gpt2":  # of its own size there is not enough
        typed |= {"total_batch_size": 1024, "val_tokens": 1024}
    default = train_gpt2.make_config({}, typed, World())
    value = 0 if (preset, name) == ("gpt2", "vocab_size") else value  # these data have fewer ids
    assert train_gpt2.make_config({}, {name: value} | typed, World()) == default


def test_a_vocabulary_of_0_is_that_of_the_weights_in_an_evaluation(data):
    inherited = vars(train_gpt2.GPTConfig(vocab_size=384, block_size=16))
    typed = {"data": (str(data),), "max_steps": 0, "total_batch_size": 1024, "val_tokens": 1024}
    for vocab_size in ({}, {"vocab_size": 0}):
        assert train_gpt2.make_config(inherited, typed | vocab_size, World()).vocab_size == 384


def test_a_run_with_as_many_rows_as_ids_continues_by_its_folder_and_is_branched_as_it_says(data, tmp_path):
    said = train(data, tmp_path / "out", vocab_size=257)
    (tmp_path / "out" / "model_00012.pt").unlink()
    assert status_of(train_gpt2.main, ["--out-dir", str(tmp_path / "out"), "--device", "cpu"]) == 0
    assert status_of(train_gpt2.main, [*printed_commands(said)[-1][2:], "--device", "cpu"]) == 0
    assert newest_checkpoint(tmp_path / "out-longer")["config"]["vocab_size"] == 257


def test_a_branch_keeps_the_shares_of_folders_that_are_typed_in_another_way(data, tmp_path):
    other = make_shards(tmp_path / "other", seed=1)
    options = tiny_flags(str(data), tmp_path / "parent")
    mixture = ["--data", str(data), str(other), "--data-weights", "1", "3"]
    assert status_of(train_gpt2.main, [*mixture, *options[2:]]) == 0
    branch = ["--branch-from", str(tmp_path / "parent"), "--out-dir", str(tmp_path / "branch"), "--max-steps", "14"]
    typed = ["--data", f"{data}/", f"{other}/", "--device", "cpu"]
    assert status_of(train_gpt2.main, [*branch, *typed]) == 0
    assert tuple(newest_checkpoint(tmp_path / "branch")["config"]["data_weights"]) == (1.0, 3.0)
