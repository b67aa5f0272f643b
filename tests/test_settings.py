"""What is typed, taken over and completed: the settings of a run."""

import pytest
import train_gpt2
from plumbing.system.distributed import World

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
