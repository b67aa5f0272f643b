"""bench/ on tiny shapes: the sides do the same work, and the numbers are what they are called."""

import json

import bench.measure
import numpy as np
import pytest
import torch
import train_gpt2
from bench import steps
from bench.__main__ import Options, main
from plumbing.run.huggingface import transposed

from harness import examples_file, flags, refused, status_of

SHAPE = "n_layer=1,n_head=2,n_embd=32"
TINY = f"{SHAPE},dtype=float32,vocab_size=320,batch_size=2,sequence_length=16,total_batch_size=64"
# a nanoGPT checkout as far as bench/ knows one, with our own model
PEER = """
import torch, train_gpt2

def GPTConfig(dropout, bias, **shape):
    assert dropout == 0.0 and bias
    return train_gpt2.GPTConfig(**shape)

class GPT(train_gpt2.GPT):
    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), learning_rate, betas, weight_decay=weight_decay)
"""


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """A call of `python -m bench WHAT --json`, on a CPU, that returns the numbers; tmp_path is a peer's folder."""
    monkeypatch.setattr("bench.measure.ROWS_ON_CPU", 48)  # the peak itself is of no interest here
    (tmp_path / "model.py").write_text(PEER, encoding="utf-8")
    examples = examples_file(tmp_path, [f"A man stands {i}" for i in range(12)])
    file = tmp_path / "numbers.json"
    common = dict(settings=TINY, device="cpu", rounds=1, json=file)
    common |= dict(tokenizer="bytes", hellaswag=examples)

    def call(what, *args, **options):
        assert status_of(main, [what, *flags(**common | options), *args]) == 0
        return json.loads(file.read_text(encoding="utf-8"))

    return call


VARIANTS = ["batch_size=4", "plain_attention=True,usual_forward=True", "compile=False,optimizer=muon"]


@pytest.mark.gpt2
def test_train_is_compared_with_transformers_a_peer_and_variants(measure, tmp_path):
    """MFU is the share of the measured peak.

    FLOPs by hand, for a token: 2 forward and 4 backward for each weight, and for attention to 16 tokens.
    """
    numbers = measure("train", "--variants", *VARIANTS, peer=tmp_path)
    references = ["transformers", "transformers, fused AdamW", "nanoGPT"]
    variants = [f"train_gpt2 {variant}" for variant in VARIANTS]
    assert list(numbers["sides"]) == ["train_gpt2", *references, *variants]
    assert {"device", "versions", "commit", "command", "options"} <= set(numbers)
    assert numbers["tok_per_s"] == pytest.approx(64 / numbers["sides"]["train_gpt2"]["seconds"][0])
    assert numbers["ratio"] == numbers["sides"]["transformers"]["ratio"]
    flops = 6 * (12 * 32**2 + 320 * 32 + 2 * 16 * 32)
    assert numbers["mfu"] == pytest.approx(flops * numbers["tok_per_s"] / numbers["peak"])
    losses = numbers["losses"]
    assert list(losses.values()) == pytest.approx([np.log(320)] * 7, abs=0.5), "losses of random ids"
    for variant in variants[:2]:  # the same windows: sums of float32 in another order
        assert losses[variant] == pytest.approx(losses["train_gpt2"], abs=1e-4)


@pytest.mark.gpt2
def test_the_references_of_train_do_our_training(tmp_path):
    """transformers with our weights, on our batches: the losses are ours, with clipping and the schedule."""
    config = steps.configure(
        Options("train", "cpu", settings=f"{TINY},warmup_steps=2,max_steps=4,max_lr=0.01,grad_clip=0.1")
    )
    steps.random_shard(tmp_path, 320)
    torch.manual_seed(0)
    step = steps.make_transformers(config, tmp_path)
    model = train_gpt2.GPT(config.model_config)
    torch.manual_seed(0)
    model.load_state_dict(transposed(steps.transformers_model(config).state_dict()))
    (optimizer,) = train_gpt2.configure_optimizers(model, config)
    train_gpt2.keep_peak_rates([optimizer])
    loader = train_gpt2.DataLoaderLite(tmp_path, "train", 2, 16)
    for number in range(4):
        # transformers leaves out the last target of each sequence, because there is none
        optimizer.zero_grad()
        loss = 0
        for _ in range(2):
            x, y = loader.next_batch()
            y[:, -1] = train_gpt2.IGNORE_INDEX
            loss += model(x, y)[1] / 2
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        train_gpt2.apply_schedules([optimizer], number, config)
        optimizer.step()
        assert step() == pytest.approx(loss.item(), abs=1e-5)


def test_hellaswag_in_four_rows_chooses_what_packed_rows_choose(measure):
    # its examples are longer than a block
    numbers = measure("hellaswag", settings=f"{TINY},n_embd=64,vocab_size=64,block_size=16", limit=7)
    assert numbers["examples"] == numbers["same_by_sum"] == numbers["same_by_mean"] == 7
    assert numbers["examples_per_s"] == pytest.approx(7 / numbers["sides"]["hellaswag.py"]["seconds"][0])


@pytest.mark.gpt2
def test_sample_gives_the_same_tokens_on_every_side(measure):
    numbers = measure("sample", settings=f"{TINY},block_size=16", max_new_tokens=12, num_samples=2)
    assert numbers["same_tokens"] == dict.fromkeys(["sample.py", "without a cache", "transformers"], True)
    assert numbers["tok_per_s"] == pytest.approx(24 / numbers["sides"]["sample.py"]["seconds"][0])


def test_a_side_that_does_twice_the_work_in_the_same_time_has_a_ratio_of_a_half(monkeypatch, output):
    """A ratio is of times per token; and it is the median of the rounds, in which a third side is ever slower."""
    monkeypatch.setattr(bench.measure, "timed", lambda side: (side(), None))  # what a side returns is its time
    # the first of the times is the warm-up's
    times = dict(ours=[9, 2, 4, 6], twice=[9, 2, 4, 6], slower=[9, 2, 12, 36])
    sides = {name: iter(each).__next__ for name, each in times.items()}
    numbers, _ = bench.measure.measure(sides, 3, dict(ours=8, twice=16, slower=8), unit="tok")
    assert {name: side["ratio"] for name, side in numbers["sides"].items()} == dict(ours=1, twice=0.5, slower=3)
    assert numbers["ratio"] == 0.5 and numbers["tok_per_s"] == 8 / 4
    assert numbers["sides"]["twice"]["tok_per_s"] == 16 / 4 and numbers["sides"]["slower"]["seconds"] == [2, 12, 36]
    assert output().splitlines()[-2].split() == ["twice", "4.0", "4000.00", "0.50"]


@pytest.mark.gpt2
def test_the_ladder_adds_one_optimization_at_a_time(measure, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda m, **options: compiled.append(m) or torch.nn.Sequential(m))
    monkeypatch.setattr(torch.nn.Sequential, "forward", lambda self, *args, **options: self[0](*args, **options))
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    changes = "batch_size=1,sequence_length=16,total_batch_size=16,activation_checkpointing=True"
    numbers = measure("ladder", settings=f"{SHAPE},{changes}")
    sides, missing = numbers["sides"], ["TF32", "this program, B 64", "bfloat16 autocast"]
    assert list(sides) == [name for name in steps.RUNGS if name not in missing] and len(compiled) == 5
    first, *_, last = compiled
    assert isinstance(first, steps.UsualGPT) and isinstance(first.transformer.h[0].attn, steps.PlainAttention)
    assert last.activation_checkpointing and numbers["settings"]["n_embd"] == 32
    # weights and data are the same in all rungs, but for the vocabulary's size
    assert all(loss == pytest.approx(np.log(50257), abs=0.2) for loss in numbers["losses"].values())
    assert numbers["tok_per_s"] == sides["this program"]["tok_per_s"] and sides["this program"]["ratio"] == 1
    assert numbers["ratio"] == pytest.approx(numbers["tok_per_s"] / sides["float32"]["tok_per_s"])


def test_a_batch_that_does_not_divide_a_step_is_no_number():
    said = refused(main, "train", "--settings", f"{TINY},batch_size=3")
    assert "Only 2 of 3 sequences fit in memory and divide a step" in said


def test_a_compiler_that_fails_is_no_number(monkeypatch):
    def no_compiler(model, **options):
        raise RuntimeError("no C++ compiler found")

    monkeypatch.setattr(torch, "compile", no_compiler)
    assert "torch.compile failed" in refused(main, "train", *flags(settings=f"{TINY},compile=True", device="cpu"))
