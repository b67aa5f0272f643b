"""bench/ on tiny shapes: the sides do the same work, the numbers are what they are called, a run on a GPU goes on."""

import functools
import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, flags, refusal_of, status_of, tiny_model

import hellaswag
import tokenizer
import train_gpt2
from bench import gpu, programs, steps
from bench.__main__ import Options, main, parse_args
from plumbing.huggingface import MATRICES

SHAPE = dict(n_layer=1, n_head=2, n_embd=32, device="cpu", dtype="float32")
TINY = SHAPE | dict(vocab_size=320, batch_size=2, sequence_length=16, total_batch_size=64)
# a nanoGPT checkout as far as bench/ knows one, with our own model
PEER = """
import torch, train_gpt2
from dataclasses import dataclass

@dataclass
class GPTConfig:
    block_size: int; vocab_size: int; n_layer: int; n_head: int; n_embd: int; dropout: float; bias: bool

class GPT(torch.nn.Module):
    def __init__(self, c):
        super().__init__()
        assert c.dropout == 0.0 and c.bias
        self.gpt = train_gpt2.GPT(train_gpt2.GPTConfig(c.block_size, c.vocab_size, c.n_layer, c.n_head, c.n_embd))

    def forward(self, idx, targets):
        return self.gpt(idx, targets)

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), learning_rate, betas, weight_decay=weight_decay)
"""
# build-nanogpt as far as bench/ knows it: where it looks for data, what it prints
BUILD_NANOGPT = """
import json, os
import numpy as np
max_steps = 19073
for split in ("train", "val"):
    (shard,) = (name for name in os.listdir("edu_fineweb10B") if split in name)
    assert len(np.load("edu_fineweb10B/" + shard)) > 20 * 64 * 1024
assert all(json.loads(line)["label"] == 0 for line in open("hellaswag/hellaswag_val.jsonl"))
for step in range(max_steps):
    print(f"step {step:5d} | loss: 9.0 | dt: 1.00ms | tok/sec: {1000.0 if 2 <= step < max_steps - 1 else 1.0:.2f}")
"""


def measure(tmp_path, what, **options):
    """The numbers that `python -m bench WHAT --json` writes."""
    file = tmp_path / "numbers.json"
    assert status_of(main, [what, *flags(json=file, **dict(rounds=1) | options)]) == 0
    numbers = json.loads(file.read_text(encoding="utf-8"))
    assert {"ratio", "ratios", "seconds", "device", "versions", "commit", "command", "options"} <= set(numbers)
    return numbers


def test_train_is_compared_with_transformers_a_peer_and_variants(tmp_path):
    (tmp_path / "model.py").write_text(PEER, encoding="utf-8")
    variants = ["batch_size=4", "plain_attention=True", "compile=False,optimizer=muon"]
    file = tmp_path / "numbers.json"
    args = flags(peer=tmp_path, steps=1, rounds=3, json=file, **TINY)
    assert status_of(main, ["train", *args, "--variants", *variants]) == 0
    numbers = json.loads(file.read_text(encoding="utf-8"))
    references = ["transformers", "transformers, fused AdamW", "nanoGPT"]
    assert list(numbers["ratios"]) == [*references, *(f"train_gpt2 {variant}" for variant in variants)]
    assert numbers["tok_per_s"] == pytest.approx(64 / np.median(numbers["seconds"]["train_gpt2"]))
    theirs, ours = numbers["seconds"]["transformers"], numbers["seconds"]["train_gpt2"]
    assert numbers["ratio"] == pytest.approx(np.median(np.divide(theirs, ours)))
    losses = numbers["losses"]
    assert all(loss == pytest.approx(np.log(320), abs=0.5) for loss in losses.values()), "losses of random ids"
    for variant in variants[:2]:  # the same windows: sums of float32 in another order
        assert losses[f"train_gpt2 {variant}"] == pytest.approx(losses["train_gpt2"], abs=1e-4)
    assert all(numbers["families"][name] > 0 for name in ("matmul", "loss", "optimizer", "GELU", "other"))


def test_the_references_of_train_do_our_training(tmp_path):
    """transformers with our weights, on our batch: the loss and the weights after a step are ours, too."""
    config = steps.make_settings(parse_args(["train", *flags(**TINY)]))
    steps.random_shards(tmp_path, config)
    theirs = steps.make_transformers(config, tmp_path)
    model = train_gpt2.GPT(train_gpt2.GPTConfig(config.block_size, 320, 1, 2, 32))
    weights = dict(theirs.model.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name].T if name.endswith(MATRICES) else weights[name])
    (optimizer,) = train_gpt2.configure_optimizers(model, config)
    micro_batches = [x for x, _ in theirs.batches[:2]]
    # transformers leaves out the last target of each sequence, because there is none
    targets = [F.pad(x[:, 1:], (0, 1), value=train_gpt2.IGNORE_INDEX) for x in micro_batches]
    loss = sum(model(x, y)[1] / 2 for x, y in zip(micro_batches, targets))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
    train_gpt2.apply_schedules([optimizer], 0, config)
    optimizer.step()
    assert theirs() == pytest.approx(loss.item(), abs=1e-5)
    for name, parameter in model.named_parameters():
        weight = weights[name].T if name.endswith(MATRICES) else weights[name]
        assert torch.allclose(parameter, weight, atol=1e-5), name


def write_examples(path, num_examples=5):
    example = {"activity_label": "a", "endings": ["goes.", "stays on.", "sits.", "is"], "label": 1}
    lines = [json.dumps(example | {"ctx": f"A man {i}."}) for i in range(num_examples)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_hellaswag_in_four_rows_chooses_what_packed_rows_choose(tmp_path):
    file, model = write_examples(tmp_path / "h.jsonl", 12), tiny_model(block_size=256).eval()
    enc = tokenizer.get_encoding("bytes")
    examples = [hellaswag.render_example(line, enc) for line in hellaswag.iterate_examples(file)]
    chosen = hellaswag.score(model, examples, 257).argmax(2)[:2].T
    assert np.array_equal(programs.four_rows(model, examples, 257), chosen)
    numbers = measure(tmp_path, "hellaswag", data=file, tokenizer="bytes", **SHAPE)
    assert numbers["examples"] == numbers["same_by_sum"] == numbers["same_by_mean"] == 12
    assert numbers["examples_per_s"] > 0


def test_sample_gives_the_same_tokens_on_every_side(tmp_path):
    numbers = measure(tmp_path, "sample", max_new_tokens=12, batch_size=2, tokenizer="bytes", **SHAPE)
    assert numbers["same_tokens"] == {"sample.py": True, "without a cache": True, "transformers": True}
    assert set(numbers["ratios"]) == {"without a cache", "transformers"} and numbers["tok_per_s"] > 0


def test_data_counts_the_tokens_that_tiktoken_counts(tmp_path, capsys):
    texts = [f"Document {i}. " * 50 for i in range(20)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    numbers = measure(tmp_path, "data", input=tmp_path / "*.jsonl", tokenizer="bytes", device="cpu")
    assert numbers["tokens"] == sum(len(text) + 1 for text in texts)
    assert numbers["tok_per_s"] > 0 and "warning" not in capsys.readouterr().out


def test_the_ladder_adds_one_optimization_at_a_time(tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: compiled.append(model) or torch.nn.Sequential(model))
    monkeypatch.setattr(torch.nn.Sequential, "forward", lambda self, *args, **options: self[0](*args, **options))
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    shape = dict(n_layer=1, n_head=2, n_embd=32, batch_size=1, sequence_length=16, device="cpu")
    numbers = measure(tmp_path, "ladder", **shape)
    names = [name for name in steps.RUNGS if name != "TF32"]
    assert list(numbers["rungs"]) == names and len(compiled) == 5
    # weights and data are the same in all rungs, but for the vocabulary's size
    assert all(loss == pytest.approx(np.log(50257), abs=0.2) for loss in numbers["rungs"].values())
    assert numbers["tok_per_s"] == pytest.approx(numbers["rates"]["this program"])
    assert numbers["ratio"] == pytest.approx(numbers["tok_per_s"] / numbers["rates"]["float32"])
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    on_this_processor = steps.make_rungs(Options("ladder", **shape))
    assert list(on_this_processor) == [name for name in names if name != "bfloat16 autocast"]


def test_mistakes_are_one_line(tmp_path):
    mistakes = {
        "There is no model.py in": ["train", "--peer", tmp_path, *flags(**TINY)],
        "quickstart": ["train", "--preset", "quickstar"],
        "--rounds": ["train", "--round", "3"],
        "There is no flag called --plain": ["train", "--variants", "plain_atention=True", *flags(**TINY)],
        "--max-new-tokens is 0": ["sample", "--max-new-tokens", "0"],
        "--n-embd is -4": ["sample", "--n-embd", "-4"],
        "no-such.jsonl": ["hellaswag", "--data", tmp_path / "no-such.jsonl", *flags(tokenizer="bytes", **SHAPE)],
        "tpu": ["train", "--device", "tpu"],
    }
    for part, args in mistakes.items():
        status, _, error = refusal_of(main, *args)
        assert status == 2 and error.startswith("error: ") and part in error and error.count("\n") == 1, error


# -----------------------------------------------------------------------------
# What a GPU is asked, as far as a CPU goes


@pytest.fixture
def ask(tmp_path, data):
    """A call of `python -m bench gpu` with tiny settings that returns the answers."""
    (tmp_path / "model.py").write_text(PEER, encoding="utf-8")
    (tmp_path / "train_gpt2.py").write_text(BUILD_NANOGPT, encoding="utf-8")
    (tmp_path / "hellaswag.py").write_text("", encoding="utf-8")
    peers = dict(peer=tmp_path, build_nanogpt=tmp_path, hellaswag=write_examples(tmp_path / "h.jsonl"))
    tiny = TINY | peers | dict(preset="gpt2", out=tmp_path / "out", shards=data, tokenizer="bytes")

    def call(**options):
        assert status_of(main, ["gpu", *flags(**tiny | options)]) == 0
        log = tmp_path / "out" / "answers.jsonl"
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        return {answer["benchmark"]: answer for answer in map(json.loads, lines)}

    return call


def test_every_question_is_answered_as_far_as_a_cpu_goes(ask, monkeypatch):
    trained, run_trainer = [], gpu.Questions.trainer

    def trainer(q, name, **changes):
        trained.append(changes)
        return run_trainer(q, name, **changes) if len(trained) == 1 else {}

    monkeypatch.setattr(gpu.Questions, "trainer", trainer)
    monkeypatch.setattr(steps, "ladder", lambda options: {"rungs": {}})  # has a test of its own
    monkeypatch.setattr(torch, "_scaled_mm", None)  # not on every processor
    answers = ask()
    errors = {name: answer["error"] for name, answer in answers.items() if "error" in answer}
    assert errors.keys() <= {"fp8 output layer"}
    assert list(answers)[:4] == ["machine", "60 steps of train_gpt2.py", "train_gpt2", "matmuls"]
    assert list(answers)[-1] == "ladder" and [changes["max_steps"] for changes in trained] == [4, 300, 300, 1000, 1000]
    headline = answers["60 steps of train_gpt2.py"]
    assert len(headline["train"]) == 4 and headline["tok_per_s"] > 0 and headline["B"] == 2
    assert answers["build-nanogpt as published"]["tok_per_s"] == 1000
    assert all(rate > 0 for rate in answers["matmuls"]["flops_per_s"].values())
    assert answers["HellaSwag"]["same_by_mean"] == 5 and answers["train_gpt2"]["families"]["matmul"] > 0
    assert answers["train_gpt2, B=1"]["B"] == 1
    for name in ("not compiled, B=1", "train_gpt2, B=1"):
        assert answers[name]["loss"] == pytest.approx(answers["train_gpt2"]["loss"], abs=1e-4), name


def test_a_run_that_was_cut_short_goes_on(ask, tmp_path, monkeypatch, capsys):
    assert ask(minutes=0) == {} and "to measure the rest: machine, 60 steps" in capsys.readouterr().out
    asked = []
    entries = {name: (1, functools.partial(lambda name: asked.append(name) or {}, name)) for name in ("a", "b", "c")}
    monkeypatch.setattr(gpu, "questions", lambda q: {"a": entries["a"]})
    assert list(ask()) == ["a"]
    (tmp_path / "out" / "running.txt").write_text("b")  # the process ended in the middle of this one
    monkeypatch.setattr(gpu, "questions", lambda q: entries)
    answers = ask()
    assert asked == ["a", "c"] and "The program ended before" in answers["b"]["error"]


def test_an_error_is_an_answer_and_a_lost_gpu_a_new_process(ask, monkeypatch):
    def fail(message):
        torch.backends.cuda.enable_flash_sdp(False)
        raise RuntimeError(message)

    started, message = [], "CUDA error: an illegal memory access was encountered"
    entries = {"a": (1, lambda: fail("a")), "b": (1, lambda: {"flash": torch.backends.cuda.flash_sdp_enabled()})}
    monkeypatch.setattr(gpu, "questions", lambda q: entries | {"c": (1, lambda: fail(message))})
    monkeypatch.setattr(os, "execv", lambda program, args: started.append(args))
    answers = ask()
    assert answers["a"]["error"] == "RuntimeError: a" and answers["b"]["flash"], "kernels are allowed again"
    assert message in answers["c"]["error"] and len(started) == 1 and started[0][-1].startswith("--minutes=")


def test_what_was_not_measured_as_asked_is_an_error_not_a_number(ask, data, monkeypatch):
    """A compiler that fails, a B that does not fit, a trainer that ends with an error."""

    def no_compiler(model, **options):
        raise RuntimeError("no C++ compiler found")

    def fit_half(raw_model, config, *rest, fit=train_gpt2.fit_to_machine):
        model, B = fit(raw_model, config, *rest)
        return model, B // 2

    monkeypatch.setattr(torch, "compile", no_compiler)
    questions = {
        "compiled": lambda q: (1, lambda: q.step("compile=True")),
        "trainer": lambda q: (1, lambda: q.trainer("bad", max_lr=-1.0)),
        "B": lambda q: (1, lambda: monkeypatch.setattr(train_gpt2, "fit_to_machine", fit_half) or q.step()),
    }
    monkeypatch.setattr(gpu, "questions", lambda q: {name: make(q) for name, make in questions.items()})
    answers = ask()
    assert "torch.compile failed" in answers["compiled"]["error"]
    assert "Only 1 of 2 sequences fit in memory" in answers["B"]["error"]
    assert "status 2: error:" in answers["trainer"]["error"] and "-1.0" in answers["trainer"]["error"]


# -----------------------------------------------------------------------------
# The Triton kernel. Triton decides when it is imported whether its kernels run in its interpreter, that is, on a CPU


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs triton, which CUDA builds of torch bring")
def test_the_triton_kernel_computes_losses_and_gradients_in_its_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", "import test_bench; test_bench.check_triton_kernel()"]
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr


def check_triton_kernel():
    """In float32, with rows that end inside the first and inside the third block of 8,192 logits."""
    from bench.triton_cross_entropy import launch

    for V, scale in ((320, 1.0), (2 * 8192 + 48, 2.0**15)):
        logits = torch.randn(6, V) * torch.logspace(-1, 1.5, 6)[:, None] + torch.randn(6, 1) * 20
        targets = torch.tensor([0, V - 48, -100, 7, 8, 9])
        exact = logits.double().requires_grad_()
        expected = F.cross_entropy(exact, targets, reduction="none")
        expected.sum().backward()
        gradient = logits.clone() if scale == 1 else torch.full_like(logits, torch.nan)
        losses = launch(gradient if scale == 1 else logits, targets, gradient, scale, -100)
        torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(gradient.double() / scale, exact.grad, rtol=2e-5, atol=1e-9)
        assert losses[2] == 0 and not gradient[2].any(), "the target that is ignored"
        logits[1, 100] = torch.nan
        assert launch(logits, targets, logits, 1.0, -100).isfinite().tolist() == [True, False, True, True, True, True]
