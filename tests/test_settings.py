"""What is typed, what is inherited from a run or a model, and what may differ between ranks."""

import functools

import pytest
import train_gpt2
from plumbing.cli.console import UserError
from plumbing.run.start import TUNED, begin
from plumbing.system.distributed import World, join_ranks
from train_gpt2 import PRESETS, TrainConfig, make_config

from harness import make_shards, run

SETTINGS = vars(TrainConfig())
CAN_BE_TYPED = [name for name, value in SETTINGS.items() if value not in (None, "", ())]


@pytest.mark.parametrize("preset", ["gpt2", "quickstart"])
@pytest.mark.parametrize("name", CAN_BE_TYPED)
def test_a_default_that_is_typed_is_the_default(name, preset, data):
    """A vocabulary of 0 is the tokenizer's, as without the flag."""
    typed = dict(preset=preset, data=(str(data),))
    value = 0 if name == "vocab_size" else getattr(PRESETS[preset], name)
    assert make_config({}, {name: value} | typed, World())[0] == make_config({}, typed, World())[0]


@pytest.mark.parametrize("typed", [{}, {"vocab_size": 0}])
def test_a_vocabulary_of_0_is_that_of_the_weights_in_an_evaluation(typed, data):
    inherited = vars(train_gpt2.GPTConfig(vocab_size=384, block_size=16))
    typed = typed | dict(data=(str(data),), max_steps=0, total_batch_size=1024)
    assert make_config(inherited, typed, World())[0].vocab_size == 384


@pytest.mark.parametrize("block_size, sequence_length", [(32, 32), (200, 128)])
def test_fine_tuning_takes_the_block_size_of_the_model(block_size, sequence_length, data):
    """And sequences as long, but no longer than the preset's."""
    inherited = vars(train_gpt2.GPTConfig(block_size=block_size))
    config, _ = make_config(inherited, dict(preset="quickstart", data=(str(data),)), World(), kind=TUNED)
    assert (config.block_size, config.sequence_length) == (block_size, sequence_length)


@pytest.mark.parametrize("name, choices", [("schedule", "cosine, wsd"), ("optimizer", "adamw, muon")])
def test_a_value_of_other_code_is_not_taken_for_one_of_this_code(name, choices, data):
    """As of a run whose trainer had one schedule more."""
    words = f"--{name} is 'flat', but here it can be only {choices}."
    with pytest.raises(UserError, match=words):
        make_config({name: "flat"}, {"data": (str(data),)}, World())


def start_with_different():
    """Start as a rank on a node that has other paths and another device. Then with the rank as the value of one setting
    after the other, and print those that are refused.
    """
    with join_ranks({"device": "cpu"}) as world:
        rank = world.rank
        start_with = functools.partial(begin, make_config=make_config, model_class=train_gpt2.GPT, world=world)
        paths = dict(data=(f"data{rank}",), out_dir=f"out{rank}", hellaswag_data=f"{rank}")
        typed = paths | {"device": f"cuda:{rank}"}
        with start_with(PRESETS, typed) as start:
            assert typed.items() <= vars(start.config).items()
        for name in SETTINGS:
            if name in typed:
                continue
            try:
                with start_with(dict.fromkeys([0, 1], TrainConfig()), {name: rank}):
                    pass
            except UserError as error:
                if "Rank 1 does not agree with rank 0" in str(error):
                    print(name)


def test_each_node_may_have_its_own_paths_and_device_and_no_other_setting_may_differ():
    make_shards("data0")
    make_shards("data1")
    names = SETTINGS.keys() - {"data", "out_dir", "hellaswag_data", "device"}
    said = run(start_with_different, ranks=2)
    assert set(said[0].split()) == set(said[1].split()) == names
