"""Learning rate, batch size and momentum compared with values worked by hand."""

import pytest
import torch
import train_gpt2
from plumbing import distributed, fit
from plumbing.cli import UserError
from train_gpt2 import PRESETS, TrainConfig, get_batch_size, get_lr


def test_without_a_flag_the_recipe_is_gpt3s_for_its_small_model():
    """What the README's first figures and all comparisons rest on: it changes with a new version only on purpose."""
    recipe = dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=0, init_from="", branch_from="")
    recipe |= dict(data="edu_fineweb10B", sequence_length=1024, shuffle=True, seed=1337, val_tokens=10_485_760)
    recipe |= dict(total_batch_size=524_288, batch_ramp=0, max_steps=19_073, warmup_steps=715, schedule="cosine")
    recipe |= dict(
        optimizer="adamw", max_lr=6e-4, min_lr=6e-5, weight_decay=0.1, beta1=0.9, beta2=0.95, grad_clip=1.0
    )
    recipe |= dict(dtype="auto")
    config = train_gpt2.parse_args([])
    assert {name: getattr(config, name) for name in recipe} == recipe


def test_gpt2s_learning_rate_at_the_steps_that_matter():
    config = PRESETS["gpt2"]
    assert get_lr(0, config) == pytest.approx(6e-4 / 715)  # the first step learns already
    assert get_lr(356, config) == pytest.approx(6e-4 * 357 / 715)
    assert get_lr(714, config) == pytest.approx(6e-4)  # warm-up ends at the peak
    assert get_lr(715, config) == pytest.approx(6e-4)
    assert get_lr(9894, config) == pytest.approx(3.3e-4)  # halfway from 715 to 19073: the mean of the two ends
    assert get_lr(19073, config) == pytest.approx(6e-5)
    assert get_lr(30000, config) == pytest.approx(6e-5)


def test_the_cosine_at_its_quarters():
    """min + (max - min) * (1 + cos(pi/4)) / 2 = 0.1 + 0.9 * 0.853553 = 0.868198, and 0.1 + 0.9 * 0.146447."""
    config = TrainConfig(warmup_steps=10, max_steps=110, max_lr=1.0, min_lr=0.1)
    assert get_lr(35, config) == pytest.approx(0.8681981)
    assert get_lr(60, config) == pytest.approx(0.55)
    assert get_lr(85, config) == pytest.approx(0.2318019)


def test_wsd_stays_at_the_peak_and_falls_in_a_line_to_zero():
    """100 steps, the last 40% decay: step 60 is the last at the peak, each after it loses 1/40."""
    config = TrainConfig(warmup_steps=10, max_steps=100, max_lr=1.0, schedule="wsd", decay_fraction=0.4)
    assert get_lr(4, config) == pytest.approx(0.5)
    assert [get_lr(step, config) for step in (9, 10, 30, 60)] == pytest.approx([1.0] * 4)
    assert get_lr(61, config) == pytest.approx(39 / 40)
    assert get_lr(80, config) == pytest.approx(0.5)
    assert get_lr(99, config) == pytest.approx(1 / 40)
    assert get_lr(100, config) == 0


def test_schedules_of_odd_lengths_work():
    one_step = dict(warmup_steps=0, max_steps=1)
    assert get_lr(0, TrainConfig(**one_step)) == pytest.approx(6e-4)
    assert get_lr(0, TrainConfig(**one_step, schedule="wsd", decay_fraction=0)) == pytest.approx(6e-4)
    longer = TrainConfig(warmup_steps=10, max_steps=5)  # ends in its warm-up
    assert [get_lr(step, longer) for step in range(5)] == pytest.approx([6e-4 * (s + 1) / 10 for s in range(5)])


def test_the_batch_grows_in_steps_of_32k_over_the_ramp():
    """GPT-3's 13B: from 32K to full over the first 4 billion tokens. 2^19 is 16 times 32K."""
    config = TrainConfig(batch_ramp=4 * 10**9)
    seen = [0, 10**9, 2 * 10**9, 3 * 10**9, 4 * 10**9 - 1, 4 * 10**9, 10**10]
    sizes = [get_batch_size(tokens, config) for tokens in seen]
    assert sizes == [2**15, 4 * 2**15, 8 * 2**15, 12 * 2**15, 15 * 2**15, 2**19, 2**19]
    assert get_batch_size(0, TrainConfig()) == 2**19


def test_apply_schedules_moves_every_group_in_proportion():
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    config = TrainConfig(warmup_steps=10, max_steps=100, max_lr=1e-3, muon_lr=0.02)
    muon = train_gpt2.Muon([{"params": [matrix]}], 0.02, 0.95, 0.0)
    adamw = torch.optim.AdamW([{"params": [vector]}])
    assert train_gpt2.apply_schedules([muon, adamw], 4, config) == pytest.approx(5e-4)
    assert adamw.param_groups[0]["lr"] == pytest.approx(5e-4)
    assert muon.param_groups[0]["lr"] == pytest.approx(0.01)
    # momentum from 0.85 to 0.95 over 300 steps
    for step, momentum in ((0, 0.85), (150, 0.90), (300, 0.95), (5000, 0.95)):
        train_gpt2.apply_schedules([muon], step, config)
        assert muon.param_groups[0]["momentum"] == pytest.approx(momentum)


def test_is_due_counts_multiples_and_the_last_step():
    due = [step for step in range(12) if train_gpt2.is_due(step, 4, 11)]
    assert due == [0, 4, 8, 11]
    assert not any(train_gpt2.is_due(step, 0, 11) for step in range(12))


def test_flops_per_token_of_gpt2_by_the_palm_convention():
    """Weights in matmuls: 12 blocks of 12 * 768^2, and the head's 50304 * 768; 123,568,128 in all.

    6 * 123,568,128 + 12 * 12 layers * 1024 tokens * 768 channels = 741,408,768 + 113,246,208.
    """
    assert distributed.flops_per_token(train_gpt2.GPTConfig(), 1024) == 741_408_768 + 113_246_208


# ----- Presets on any number of ranks -------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_runs_on_every_number_of_ranks_that_divides_its_step(preset):
    """B is at most --batch-size: 16 ranks take 32 sequences each of the 64, and the recipe stays as it is."""
    config = PRESETS[preset]
    windows = config.total_batch_size // config.sequence_length
    refused = []
    for ranks in range(1, 65):
        try:
            fit.check_config(config, ranks)
        except UserError as error:
            refused.append(ranks)
            advice = str(error).split(". ")[1]
            assert advice.startswith(f"Start a number of ranks that divides {windows}"), (
                "before the recipe is changed"
            )
            continue
        B = fit.largest_divisor(windows // ranks, config.batch_size)
        assert 1 <= B <= config.batch_size and windows % (B * ranks) == 0
        if windows // ranks >= config.batch_size and (windows // ranks) % config.batch_size == 0:
            assert B == config.batch_size
    assert refused == [ranks for ranks in range(1, 65) if windows % ranks]
