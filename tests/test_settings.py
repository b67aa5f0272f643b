"""What is typed, what is inherited from a run or a model, and what may differ between ranks."""

import pytest
import train_gpt2
from plumbing.cli.console import UserError
from plumbing.run.checkpoint import newest_checkpoint
from plumbing.run.start import begin
from plumbing.system.distributed import World, join_ranks
from train_gpt2 import PRESETS, TrainConfig, make_config

from harness import flags, make_shards, run, status_of, train

SETTINGS = vars(TrainConfig())
CAN_BE_TYPED = [name for name, value in SETTINGS.items() if value not in (None, "", ())]


@pytest.mark.parametrize("preset", ["gpt2", "quickstart"])
@pytest.mark.parametrize("name", CAN_BE_TYPED)
def test_a_default_that_is_typed_is_the_default(name, preset, data):
    """A vocabulary of 0 is the tokenizer's, as without the flag."""
    typed = {
        "preset": preset,
        "data": (str(data),),
    }
    default = make_config({}, typed, World())[0]
    typed.setdefault(name, getattr(PRESETS[preset], name))
    if name == "vocab_size":
        typed[name] = 0
    assert make_config({}, typed, World())[0] == default


@pytest.mark.parametrize("typed", [{}, {"vocab_size": 0}])
def test_a_vocabulary_of_0_is_that_of_the_weights_in_an_evaluation(typed, data):
    inherited = vars(train_gpt2.GPTConfig(vocab_size=384, block_size=16))
    typed = typed | {
        "data": (str(data),),
        "max_steps": 0,
        "total_batch_size": 1024,
    }
    assert make_config(inherited, typed, World())[0].vocab_size == 384


@pytest.mark.parametrize("name, choices", [("schedule", "cosine, wsd"), ("optimizer", "adamw, muon")])
def test_a_value_of_other_code_is_not_taken_for_one_of_this_code(name, choices, data):
    """As of a run whose trainer had one schedule more."""
    words = f"--{name} is 'flat', but here it can be only {choices}."
    with pytest.raises(UserError, match=words):
        make_config({name: "flat"}, {"data": (str(data),)}, World())


@pytest.fixture
def main():
    """The trainer on a CPU."""

    def run_main(*words):
        assert status_of(train_gpt2.main, [*words, "--device", "cpu"]) == 0

    return run_main


def test_a_branch_keeps_a_vocabulary_that_is_not_padded(data, tmp_path, main):
    train(data, tmp_path / "parent", vocab_size=257, max_steps=1)
    main(*flags(branch_from=tmp_path / "parent", out_dir=tmp_path / "out", max_steps=2))
    assert newest_checkpoint(tmp_path / "out")["config"]["vocab_size"] == 257


def test_a_folder_alone_continues_a_run_whose_vocabulary_is_not_padded(data, out, main, capsys):
    """And lists none of the settings, for which the command asks."""
    train(data, out, vocab_size=257, max_steps=2, checkpoint_every=1)
    (out / "model_00002.pt").unlink()
    capsys.readouterr()
    main("--out-dir", str(out))
    assert newest_checkpoint(out)["step"] == 2
    assert "Settings" not in capsys.readouterr().out


def test_a_branch_keeps_the_shares_of_folders_that_are_typed_in_another_way(data, tmp_path, main):
    other = make_shards(tmp_path / "other", seed=1)
    train((data, other), tmp_path / "parent", data_weights=(1, 3), max_steps=1)
    typed = {
        "branch_from": tmp_path / "parent",
        "out_dir": tmp_path / "branch",
        "max_steps": 2,
        "data": (f"{data}/", f"{other}/"),
    }
    main(*flags(**typed))
    assert tuple(newest_checkpoint(tmp_path / "branch")["config"]["data_weights"]) == (1.0, 3.0)


def start_with_own_paths(folder):
    """Start as a rank on a node that has other paths and another device."""
    with join_ranks({"device": "cpu"}) as world:
        rank = world.rank
        typed = {
            "data": (f"{folder}/data{rank}",),
            "out_dir": f"{folder}/out{rank}",
            "hellaswag_data": f"{folder}/{rank}.jsonl",
            "device": f"cuda:{rank}",
        }
        with begin(PRESETS, typed, make_config, model_class=train_gpt2.GPT, world=world) as start:
            assert typed.items() <= vars(start.config).items()


def test_each_node_may_have_its_own_paths_and_device(tmp_path):
    make_shards(tmp_path / "data0")
    make_shards(tmp_path / "data1")
    run(start_with_own_paths, tmp_path, ranks=2)


def start_with_different(names):
    """Start with the rank as the value of one setting after the other, and print those that are refused."""
    presets = dict.fromkeys([0, 1], TrainConfig())
    with join_ranks({"device": "cpu"}) as world:
        for name in names:
            try:
                with begin(presets, {name: world.rank}, make_config, model_class=train_gpt2.GPT, world=world):
                    pass
            except UserError as error:
                if "Rank 1 does not agree with rank 0" in str(error):
                    print(name)


def test_no_other_setting_may_differ_between_ranks():
    per_node = {"data", "out_dir", "hellaswag_data", "device"}
    names = set(SETTINGS) - per_node
    said = run(start_with_different, names, ranks=2)
    assert set(said[0].split()) == set(said[1].split()) == names
