"""bench/ on tiny shapes: the sides do the same work, and the numbers are what they are called."""

import json

import bench.measure
import numpy as np
import pytest
import torch
import torch.nn.functional as F
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
    examples, file = examples_file(tmp_path, [f"A man stands {i}" for i in range(12)]), tmp_path / "numbers.json"
    common = dict(
        settings=TINY,
        device="cpu",
        rounds=1,
        json=file,
        tokenizer="bytes",
        hellaswag=examples,
    )

    def call(what, *args, **options):
        file.unlink(missing_ok=True)
        assert status_of(main, [what, *flags(**common | options), *args]) == 0
        numbers = json.loads(file.read_text(encoding="utf-8"))
        assert {"device", "versions", "commit", "command", "options"} <= set(numbers)
        return numbers

    return call


@pytest.mark.gpt2
def test_train_is_compared_with_transformers_a_peer_and_variants(measure, tmp_path):
    variants = ["batch_size=4", "plain_attention=True", "compile=False,optimizer=muon"]
    numbers = measure("train", "--variants", *variants, peer=tmp_path, rounds=3)
    sides, ours = numbers["sides"], numbers["sides"]["train_gpt2"]
    references = ["transformers", "transformers, fused AdamW", "nanoGPT"]
    assert list(sides) == ["train_gpt2", *references, *(f"train_gpt2 {variant}" for variant in variants)]
    assert numbers["tok_per_s"] == pytest.approx(64 / np.median(ours["seconds"])) and len(ours["seconds"]) == 3
    ratio = np.median(np.divide(sides["transformers"]["seconds"], ours["seconds"]))
    assert numbers["ratio"] == sides["transformers"]["ratio"] == pytest.approx(ratio)
    losses = numbers["losses"]
    assert list(losses.values()) == pytest.approx([np.log(320)] * 7, abs=0.5), "losses of random ids"
    for variant in variants[:2]:  # the same windows: sums of float32 in another order
        assert losses[f"train_gpt2 {variant}"] == pytest.approx(losses["train_gpt2"], abs=1e-4)
    assert numbers["mfu"] > 0


@pytest.mark.gpt2
def test_the_references_of_train_do_our_training(tmp_path):
    """transformers with our weights, on our batches: the losses of two steps are ours, too."""
    config = steps.configure(Options("train", "cpu", settings=f"{TINY},warmup_steps=1,max_lr=0.1"))
    steps.random_shard(tmp_path, 320)
    torch.manual_seed(0)
    step = steps.make_transformers(config, tmp_path)
    model = train_gpt2.GPT(config.model_config)
    torch.manual_seed(0)
    model.load_state_dict(transposed(steps.transformers_model(config).state_dict()))
    (optimizer,) = train_gpt2.configure_optimizers(model, config)
    train_gpt2.keep_peak_rates([optimizer])
    loader = train_gpt2.DataLoaderLite(tmp_path, "train", 2, 16)
    for number in range(2):
        # transformers leaves out the last target of each sequence, because there is none
        batches = [loader.next_batch() for _ in range(2)]
        padded = [(x, F.pad(y[:, :-1], (0, 1), value=train_gpt2.IGNORE_INDEX)) for x, y in batches]
        loss = sum(model(x, y)[1] / 2 for x, y in padded)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        train_gpt2.apply_schedules([optimizer], number, config)
        optimizer.step()
        assert step() == pytest.approx(loss.item(), abs=1e-5)


def test_hellaswag_in_four_rows_chooses_what_packed_rows_choose(measure):
    numbers = measure("hellaswag", settings=f"{TINY},n_embd=64,vocab_size=64,block_size=16")  # longer examples
    assert numbers["examples"] == numbers["same_by_sum"] == numbers["same_by_mean"] == 12
    assert numbers["examples_per_s"] > 0


@pytest.mark.gpt2
def test_sample_gives_the_same_tokens_on_every_side(measure):
    numbers = measure("sample", settings=f"{TINY},block_size=16", max_new_tokens=12, num_samples=2)
    assert numbers["same_tokens"] == {
        "sample.py": True,
        "without a cache": True,
        "transformers": True,
    }
    assert numbers["tok_per_s"] > 0


def test_a_side_that_does_twice_the_work_in_the_same_time_has_a_ratio_of_a_half(monkeypatch, capsys):
    """A ratio is of times per token; and it is the median of the rounds, in which a third side is ever slower."""
    monkeypatch.setattr(bench.measure, "timed", lambda side: (side(), None))  # what a side returns is its time
    # the first of the times is the warm-up's
    times = {
        "ours": [9, 2, 4, 6],
        "twice": [9, 2, 4, 6],
        "slower": [9, 2, 12, 36],
    }
    sides = {name: iter(each).__next__ for name, each in times.items()}
    work = {
        "ours": 8,
        "twice": 16,
        "slower": 8,
    }
    numbers, _ = bench.measure.measure(sides, 3, work, unit="tok")
    assert {name: side["ratio"] for name, side in numbers["sides"].items()} == dict(ours=1, twice=0.5, slower=3)
    assert numbers["ratio"] == 0.5 and numbers["tok_per_s"] == 8 / 4
    assert numbers["sides"]["twice"]["tok_per_s"] == 16 / 4 and numbers["sides"]["slower"]["seconds"] == [2, 12, 36]
    assert capsys.readouterr().out.splitlines()[-2].split() == ["twice", "4.0", "4000.00", "0.50"]


@pytest.mark.gpt2
def test_the_ladder_adds_one_optimization_at_a_time(measure, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda m, **options: compiled.append(m) or torch.nn.Sequential(m))
    monkeypatch.setattr(torch.nn.Sequential, "forward", lambda self, *args, **options: self[0](*args, **options))
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    numbers = measure("ladder", settings=f"{SHAPE},batch_size=1,sequence_length=16,total_batch_size=16")
    sides, missing = numbers["sides"], ["TF32", "this program, B 64", "bfloat16 autocast"]
    assert list(sides) == [name for name in steps.RUNGS if name not in missing] and len(compiled) == 5
    # weights and data are the same in all rungs, but for the vocabulary's size
    assert all(loss == pytest.approx(np.log(50257), abs=0.2) for loss in numbers["losses"].values())
    assert numbers["tok_per_s"] == sides["this program"]["tok_per_s"] and sides["this program"]["ratio"] == 1
    assert numbers["ratio"] == pytest.approx(numbers["tok_per_s"] / sides["float32"]["tok_per_s"])


def test_mistakes_are_one_line_and_what_cannot_be_measured_as_asked_is_no_number(tmp_path, monkeypatch):
    """A compiler that fails, and a B that does not fit, too."""
    mistakes = {
        "There is no model.py in": ["train", "--peer", tmp_path],
        "quickstart": ["train", "--settings", "preset=quickstar"],
        "Only 2 of 3 sequences fit in memory and divide a step": ["train", "--settings", f"{TINY},batch_size=3"],
    }
    for part, args in mistakes.items():
        assert part in refused(main, *args)

    def no_compiler(model, **options):
        raise RuntimeError("no C++ compiler found")

    monkeypatch.setattr(torch, "compile", no_compiler)
    assert "torch.compile failed" in refused(main, "train", *flags(settings=f"{TINY},compile=True", device="cpu"))
