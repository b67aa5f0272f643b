"""The recipe: the sizes and initial weights of GPT-2, GPT-3's schedules, weight decay where it belongs, and Muon."""

import dataclasses
import functools
import itertools
import math
import time

import numpy as np
import pytest
import torch
import train_gpt2
from plumbing.run.checkpoint import newest_checkpoint
from plumbing.run.logs import read_starts
from plumbing.run.start import EVALUATION
from plumbing.system.distributed import World
from torch.nn import functional as F
from train_gpt2 import GPT, PRESETS, GPTConfig, TrainConfig, get_batch_size, get_lr

from harness import (
    at_steps,
    flags,
    listing,
    log_lines,
    losses,
    make_shards,
    read_log,
    refused_run,
    samples,
    status_of,
    tiny_model,
    train,
)


def test_without_a_flag_the_recipe_is_gpt3s_for_its_small_model():
    """Its shape, rates, decay and batch are in the tests below."""
    config = TrainConfig()
    assert config == PRESETS["gpt2"]
    assert (config.n_head, config.sequence_length, config.grad_clip) == (12, 1024, 1.0)
    assert config.val_tokens == 10_485_760
    assert get_batch_size(0, config) == 2**19


RATES = {  # {step: learning rate}
    # the first step learns already, the warm-up ends at the peak, and half way down is the mean of the two ends
    "GPT-2's": (
        PRESETS["gpt2"],
        {0: 6e-4 / 715, 356: 6e-4 * 357 / 715, 714: 6e-4, 715: 6e-4, 9894: 3.3e-4, 19073: 6e-5, 30000: 6e-5},
    ),
    # min + (max - min) * (1 + cos(pi/4)) / 2 = 0.1 + 0.9 * 0.853553 = 0.868198, and 0.1 + 0.9 * 0.146447
    "the cosine at its quarters": (
        TrainConfig(warmup_steps=10, max_steps=110, max_lr=1.0, min_lr=0.1),
        {35: 0.8681981, 60: 0.55, 85: 0.2318019},
    ),
    # of 100 steps, the last 40% decay: step 60 is the last at the peak, each after it loses 1/40
    "wsd": (
        TrainConfig(warmup_steps=10, max_steps=100, max_lr=1.0, schedule="wsd", decay_fraction=0.4),
        {4: 0.5, 9: 1.0, 10: 1.0, 30: 1.0, 60: 1.0, 61: 39 / 40, 80: 0.5, 99: 1 / 40, 100: 0.0},
    ),
    "one step": (TrainConfig(warmup_steps=0, max_steps=1), {0: 6e-4}),
    "one step of wsd": (TrainConfig(warmup_steps=0, max_steps=1, schedule="wsd", decay_fraction=0), {0: 6e-4}),
    "an end in the warm-up": (
        TrainConfig(warmup_steps=10, max_steps=5),
        {step: 6e-5 * (step + 1) for step in range(5)},
    ),
}


@pytest.mark.parametrize("name", RATES)
def test_the_learning_rate_at_the_steps_that_matter(name):
    config, rates = RATES[name]
    assert {step: get_lr(step, config) for step in rates} == pytest.approx(rates)


def test_the_batch_grows_in_steps_of_32k_over_the_ramp():
    """GPT-3's 13B: from 32K to full over the first 4 billion tokens. 2^19 is 16 times 32K."""
    config = TrainConfig(batch_ramp=4 * 10**9)
    sizes = {0: 1, 1: 4, 2: 8, 3: 12, 3.999: 15, 4: 16, 10: 16}
    assert {billions: get_batch_size(billions * 10**9, config) / 2**15 for billions in sizes} == sizes


def test_steps_of_a_ramp_read_all_of_their_windows_and_the_speed_is_theirs(large, out, monkeypatch):
    """32K tokens of 96K at first and, as it grows in steps of 32K, at half of the ramp. Each step takes a second.

    1,024 windows are no multiple of 192, which divides the 3,072 of a full step.
    """
    taken = []
    monkeypatch.setattr(time, "perf_counter", lambda: len(taken))
    shape = dict(n_layer=1, n_head=1, n_embd=8, sequence_length=32)
    ramp = dict(total_batch_size=3 * 2**15, batch_ramp=2**16, batch_size=192)
    with at_steps(after=lambda step, parts, done: taken.append(step)):
        said = train(large, out, max_steps=3, val_every=0, checkpoint_every=0, **shape, **ramp)
    assert "the run reads at most 294,912" in said
    assert losses(out, "tok/s") / 2**15 == pytest.approx([1, 1, 3])
    assert newest_checkpoint(out)["loader"]["position"] == (1 + 1 + 3) * 2**15 // 32


# every setting of the recipe, with another value
OTHER_VALUES = dict(
    preset="quickstart",
    block_size=64,
    vocab_size=384,
    n_layer=3,
    n_head=4,
    n_embd=48,
    init_from="OTHER RUN",
    branch_from="OTHER RUN",
    seed=2,
    dtype="bfloat16",
    sequence_length=8,
    total_batch_size=64,
    batch_ramp=2**17,
    data_weights=(1.0, 3.0),
    shuffle=False,
    val_tokens=256,
    max_steps=5,
    passes=0.2,
    tokens_per_parameter=0.02,
    warmup_steps=2,
    max_lr=2e-3,
    min_lr=1e-3,
    schedule="wsd",
    decay_fraction=0.5,
    optimizer="muon",
    weight_decay=0.2,
    beta1=0.8,
    beta2=0.9,
    grad_clip=0.5,
    muon_lr=0.03,
    muon_momentum=0.9,
    muon_momentum_warmup=10,
    muon_weight_decay=0.1,
)
USUAL = dict(data="data", max_steps=4, warmup_steps=1, val_every=2, checkpoint_every=2)
MUON = dict(optimizer="muon")
MATTERS_WITH = dict(  # settings without which it makes no difference
    batch_ramp=dict(data="large", total_batch_size=2**16, batch_size=256, max_steps=1, n_layer=1, n_embd=8),
    data_weights=dict(data=("data", "second")),
    decay_fraction=dict(schedule="wsd"),
    muon_lr=MUON,
    muon_momentum=MUON,
    muon_momentum_warmup=MUON,
    muon_weight_decay=MUON,
)
RECIPE = [field.name for field in dataclasses.fields(train_gpt2.Recipe)]


@pytest.fixture(scope="module")
def large(folder):
    return make_shards(folder.parent / "large", (2000, 2**17 + 1, 2**16 + 1))


@pytest.fixture(scope="module")
def run_of(folder, large):
    """run_of(**changes): the folder of a run of USUAL with these changes, in a folder with the data. It is trained once
    for all tests of this file.
    """
    make_shards(folder.parent / "second", seed=1)
    numbers = itertools.count()

    @functools.cache
    def find(**changes):
        out_dir = folder.parent / f"{next(numbers)}"
        train(out_dir=out_dir, **USUAL | changes)
        return out_dir

    return find


def differ(ours, theirs):
    """Whether two streams have other values at a step that both have."""
    return any(ours[step] != theirs[step] for step in ours.keys() & theirs.keys())


# where it is not "... was 0.1, now 0.2": the weights say so first, and two settings are a number of steps
REFUSED_AS = {
    "n_layer": "--n-layer is 3",
    "n_head": "--n-head is 4",
    "n_embd": "--n-embd is 48",
    "passes": "max_steps was",
    "tokens_per_parameter": "max_steps was",
}


@pytest.mark.parametrize("name", RECIPE)
def test_a_setting_of_the_recipe_changed_alone_continues_no_run_and_changes_the_losses(
    name, run_of, folder, monkeypatch
):
    monkeypatch.chdir(folder.parent)
    value = OTHER_VALUES[name]
    if value == "OTHER RUN":
        value = run_of(seed=3, max_steps=2)
    alone = MATTERS_WITH.get(name, {})
    changed = alone | {name: value}
    out_dir = run_of(**alone)
    before = listing(out_dir)
    refused_run(USUAL | changed | {"out_dir": out_dir}, REFUSED_AS.get(name, f"{name} was"))
    assert listing(out_dir) == before
    other_dir = run_of(**changed)
    assert any(differ(read_log(out_dir, stream), read_log(other_dir, stream)) for stream in ("train", "val"))


@pytest.mark.parametrize("name, values", [("grad_clip", (0, 9999)), ("activation_checkpointing", (False, True))])
def test_a_limit_that_no_gradient_reaches_and_recomputing_activations_change_no_loss(name, values, data):
    logs = []
    for value in values:
        train(data, f"{value}", max_steps=3, **{name: value})
        logs.append(log_lines(f"{value}"))
    assert logs[0] == logs[1]


class Dropping(train_gpt2.MLP):
    """An MLP with dropout."""

    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, self.training)


@pytest.mark.parametrize("shuffle, mlp", [(True, train_gpt2.MLP), (False, Dropping)])
def test_another_seed_has_another_order_or_dropout_and_other_samples(shuffle, mlp, folder, run_of, monkeypatch):
    """From the same weights, at a rate at which nothing is learned. The validation before each step has no dropout."""
    monkeypatch.setattr(train_gpt2, "MLP", mlp)
    still = dict(init_from=run_of(), max_lr=1e-30, min_lr=0, max_steps=1, sample_every=1, shuffle=shuffle)
    train(folder, "1", seed=1, **still)
    train(folder, "2", seed=2, **still)
    assert read_log("1", "val") == read_log("2", "val")
    assert read_log("1") != read_log("2")
    assert len({*samples("1")[1], *samples("2")[1]}) == 8


def test_a_step_whose_targets_are_all_masked_learns_nothing(out):
    """The first step's 8 windows of 16."""
    folder = make_shards("data", masks=True)
    np.load(folder / "tiny_train_000001.mask", mmap_mode="r+")[: 8 * 16 + 1] = 0
    train(folder, out, shuffle=False, weight_decay=0, val_every=1, max_steps=2)
    before, after_masked, after_other = losses(out, "val")
    assert losses(out)[0] == 0
    assert before == after_masked != after_other


def at_step(step, **settings):
    """The groups of Muon and of AdamW at a step of such a run."""
    config = TrainConfig(optimizer="muon", **settings)
    optimizers = train_gpt2.configure_optimizers(tiny_model(), config)
    train_gpt2.keep_peak_rates(optimizers)
    train_gpt2.apply_schedules(optimizers, step, config)
    return [optimizer.param_groups for optimizer in optimizers]


def test_the_rate_of_every_group_follows_the_schedule():
    muon, adamw = at_step(4, warmup_steps=10, max_lr=1e-3, muon_lr=0.02)
    assert [group["lr"] for group in adamw] == pytest.approx([5e-4] * 2)
    assert [group["lr"] for group in muon] == pytest.approx([0.01] * 4)
    assert all(group["fused"] and group["eps"] == 1e-8 for group in adamw)


@pytest.mark.parametrize(
    "warmup, step, momentum", [(300, 0, 0.85), (300, 150, 0.90), (300, 5000, 0.95), (200, 150, 0.925), (0, 0, 0.95)]
)
def test_muons_momentum_grows_over_its_warm_up(warmup, step, momentum):
    muon, _ = at_step(step, muon_momentum_warmup=warmup)
    assert muon[0]["momentum"] == pytest.approx(momentum)


def GPT_on_meta(config):
    """A model that takes no memory, whatever its size."""
    with torch.device("meta"):
        return GPT(config)


def total(parameters):
    return sum(p.numel() for p in parameters)


def test_presets_are_what_the_help_says():
    gpt2, speedrun, baby = PRESETS["gpt2"], PRESETS["speedrun"], PRESETS["baby"]
    assert speedrun.model_config == gpt2.model_config and (speedrun.optimizer, speedrun.schedule) == ("muon", "wsd")
    assert speedrun.max_steps == gpt2.max_steps // 2
    assert (baby.n_layer, baby.n_head, baby.n_embd, baby.block_size) == (6, 6, 384, 256)
    assert {each.out_dir for each in PRESETS.values()} == {"log", "log/quickstart", "log/baby", "log/chat"}
    assert (gpt2.checkpoint_every, gpt2.keep_checkpoints) == (500, 2)


SIZES = {"gpt2": (124, 6e-4), "gpt2-medium": (355, 3e-4), "gpt2-large": (774, 2.5e-4), "gpt2-xl": (1558, 2e-4)}


@pytest.mark.gpt2
@pytest.mark.parametrize("preset", SIZES)
def test_presets_have_the_sizes_of_openais_models_and_gpt3s_recipes_for_them(preset):
    """In millions, as the GPT-2 release has them, embeddings included. GPT-3, table 2.1; appendix B: to a tenth of the
    rate, after a warm-up over 375M tokens. GPT-3 XL has batches of 1M tokens, gpt2-xl of 0.5M.
    """
    config = PRESETS[preset]
    millions, rate = SIZES[preset]
    model = GPT_on_meta(dataclasses.replace(config.model_config, vocab_size=50257))
    assert round(total(model.parameters()) / 1e6) == millions
    assert config.n_embd // config.n_head == 64
    assert (config.max_lr, config.min_lr) == (rate, pytest.approx(rate / 10))
    assert config.total_batch_size == 2**19
    assert config.warmup_steps * 2**19 == pytest.approx(375e6, rel=1e-3)


def test_initial_weights_are_gpt2s():
    """std 0.02, residual projections 0.02 / sqrt(2 * 8 layers) = 0.005; zero biases, unit norms."""
    model = GPT(GPTConfig(block_size=256, vocab_size=1024, n_layer=8, n_head=4, n_embd=128))
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert not p.any(), name
        elif ".ln_" in name:
            assert (p == 1).all(), name
        else:
            std = 0.005 if name.endswith("c_proj.weight") else 0.02
            # the standard error of a std of n numbers is std / sqrt(2n): under 0.6% from 16,384 on
            assert p.std().item() == pytest.approx(std, rel=0.03), name
            assert p.mean().item() == pytest.approx(0, abs=5 * std / math.sqrt(p.numel())), name


@pytest.mark.gpt2
@pytest.mark.parametrize("optimizer, of_muon", [("adamw", 0), ("muon", 12 * 12 * 768**2)])
def test_muon_takes_the_matrices_of_the_blocks_and_weight_decay_spares_98_tensors(optimizer, of_muon):
    *muon, adamw = train_gpt2.configure_optimizers(GPT_on_meta(GPTConfig()), TrainConfig(optimizer=optimizer))
    groups = sum((each.param_groups for each in muon), [])
    assert sum(total(group["params"]) for group in groups) == of_muon
    decayed, spared = adamw.param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert total(decayed["params"]) == 124_354_560 - of_muon
    assert (len(spared["params"]), total(spared["params"])) == (98, 121_344)


def newton_schulz_by_hand(G):
    """The iteration of Jordan et al. 2024 on one matrix in float64."""
    X = G / np.linalg.norm(G)
    for _ in range(5):
        A = X @ X.T
        X = 3.4445 * X - 4.7750 * A @ X + 2.0315 * A @ A @ X
    return X


@pytest.mark.parametrize(
    "shape, split, scale", [((48, 16), 3, 1.0), ((64, 16), 1, 2.0), ((16, 64), 1, 1.0), ((48, 4), 3, 2.0)]
)
def test_a_muon_step_equals_one_worked_matrix_by_matrix(shape, split, scale):
    """Nesterov momentum, orthogonalized per query, key and value, scaled by sqrt(rows/columns) if tall, decayed.

    Tall ones on top of each other are as of a gate and an up projection in one layer, or of stacked experts.
    """
    params = [torch.nn.Parameter(torch.randn(shape)) for _ in range(2)]  # of the same shape, updated together
    muon = train_gpt2.Muon([{"params": params, "split": split}], 0.02, momentum=0.9, weight_decay=0.1)
    expected = params[0].detach().double().numpy().copy()
    momentum = np.zeros(shape)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn(shape)
        gradient = params[0].grad.numpy()
        momentum = 0.9 * momentum + 0.1 * gradient
        parts = np.split(0.9 * momentum + 0.1 * gradient, split)
        update = np.concatenate([newton_schulz_by_hand(part) for part in parts])
        expected = expected * (1 - 0.02 * 0.1) - 0.02 * scale * update
        muon.step()
    np.testing.assert_allclose(params[0].detach(), expected, atol=1e-3, rtol=0)


@pytest.fixture(scope="module")
def small(folder):
    """1,552 tokens to train on in 62 and 35 windows of 16. A step reads 8 of them, so that a pass has 12.1 steps."""
    return make_shards(folder.parent / "small", (2000, 1000, 565))


@pytest.fixture(scope="module")
def two_passes(small):
    """The folder of a run that reads the data twice."""
    train(small, small.parent / "passes", passes=2, warmup_steps=50, val_every=0, checkpoint_every=0)
    return small.parent / "passes"


def settings_of(out_dir):
    """The steps of a run and of its warm-up, as run.txt has them."""
    config = read_starts(out_dir / "run.txt")[0]["config"]
    return config["max_steps"], config["warmup_steps"]


def test_passes_count_the_steps(two_passes):
    """The warm-up is at most a tenth of them."""
    assert settings_of(two_passes) == (len(losses(two_passes)), 2) == (24, 2)


@pytest.mark.parametrize("changes, steps", [(dict(max_steps=30), 30), (dict(passes=3, warmup_steps=3), 36)])
def test_a_run_of_passes_may_have_a_branch_of_steps_or_other_passes(changes, steps, two_passes, out):
    words = flags(branch_from=two_passes, out_dir=out, device="cpu", **changes)
    assert status_of(train_gpt2.main, words) == 0
    assert settings_of(out)[0] == len(losses(out)) == steps


def test_the_steps_of_passes_over_all_folders_and_of_tokens_for_each_parameter(small):
    """97 windows in one folder, 62 in the other: 159 are 19.9 steps of 8. There is at least one step.

    2,489,518,080 tokens for GPT-2's 124,475,904 parameters, with 50,304 rows in the embedding: 4,748.4 steps.
    """
    other = make_shards("other", (2000, 1000))
    of_8 = TrainConfig(sequence_length=16, total_batch_size=128, passes=1)
    assert train_gpt2.count_steps(of_8, [small, other]) == 20
    assert train_gpt2.count_steps(dataclasses.replace(of_8, passes=0.001), [small]) == 1
    assert train_gpt2.count_steps(TrainConfig(tokens_per_parameter=20), []) == 4748


@pytest.mark.parametrize("passes", [0.1, 0.25, 0.5, 1, 3])
@pytest.mark.parametrize("batch_ramp", [0, 2**15, 2**17, 2**19])
def test_passes_read_as_many_tokens_as_they_say_also_where_they_end_in_a_batch_ramp(batch_ramp, passes, large):
    """To a step, whose size has four rungs."""
    config = TrainConfig(sequence_length=32, total_batch_size=2**17, batch_ramp=batch_ramp, passes=passes)
    read = 0
    for _ in range(train_gpt2.count_steps(config, [large])):
        read += get_batch_size(read, config)
    assert abs(read - passes * 3 * 2**16) <= 2**17


def test_an_evaluation_has_no_use_for_passes(folder):
    typed = dict(data=(str(folder),), max_steps=0, passes=0.1)
    config, _ = train_gpt2.make_config({}, typed, World(), kind=EVALUATION)
    assert config.max_steps == 0
