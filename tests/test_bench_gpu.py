"""bench_gpu.py as far as a CPU can answer it: every question runs, and a run that was cut short goes on."""

import functools
import json
import os

import pytest
import torch
from conftest import flags, status_of
from test_bench import PEER

import bench
import bench_gpu

SETTINGS = (
    "n_layer=1,n_head=2,n_embd=32,vocab_size=320,block_size=128,batch_size=2,sequence_length=16,total_batch_size=64,"
    "device=cpu,dtype=float32,compile=False"
)
# build-nanogpt as far as bench_gpu.py knows it: where it looks for data, what it prints
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


@pytest.fixture
def ask(tmp_path, data):
    """A call of bench_gpu.main with tiny settings that returns the answers by question."""
    (tmp_path / "model.py").write_text(PEER)
    (tmp_path / "train_gpt2.py").write_text(BUILD_NANOGPT)
    (tmp_path / "hellaswag.py").write_text("")
    tiny = dict(settings=SETTINGS, out=tmp_path / "out", shards=data, peer=tmp_path, build_nanogpt=tmp_path)

    def run(**options):
        assert status_of(bench_gpu.main, flags(**tiny | options)) == 0
        log = tmp_path / "out" / "answers.jsonl"
        return {a["question"]: a for a in map(json.loads, log.read_text().splitlines())} if log.exists() else {}

    return run


def test_every_question_is_answered_as_far_as_a_cpu_can(ask, tmp_path, capsys, monkeypatch):
    real, sampled = [], []
    monkeypatch.setattr(bench_gpu.Bench, "real_run", lambda b, *args, **changes: real.append((args, changes)) or {})
    rates = dict(rates={}, ratios={}, same_tokens={})
    monkeypatch.setattr(bench, "bench_sample", lambda options, device: sampled.append(options) or rates)
    monkeypatch.setattr(bench_gpu.Bench, "autotuned", lambda b: {})  # minutes of compiling
    answers = ask()
    errors = {name: a["error"] for name, a in answers.items() if "error" in a}
    assert not errors
    assert len(real) == 3 and [options.batch_size for options in sampled] == [1, 8]
    assert answers["recompiles"]["recompiled"] is False and answers["HellaSwag"]["hellaswag_s"] > 0
    assert answers["build-nanogpt as published"]["tok_per_s"] == 1000
    one, two = answers["train_gpt2, B=1"], answers["train_gpt2, B=2"]
    assert (one["B"], two["B"]) == (1, 2) and two["families"]["matmul"] > 0
    for name in ("MATH", "logits returned, too", "not compiled", "train_gpt2, B=1"):
        assert answers[name]["loss"] == pytest.approx(two["loss"], abs=1e-5), name
    alone = answers["one micro-step a step"]
    for parts in ("one graph", "a graph per bucket", "no bucket views"):
        assert answers[f"one micro-step, DDP, {parts}"]["loss"] == pytest.approx(alone["loss"], abs=1e-6)
    # the table has a line for each, with ours as 1.00
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("train_gpt2, B=2 ") and line.endswith("1.00") for line in lines)
    for name in answers.keys() - {"machine"}:
        assert any(line.startswith((f"{name} ", f"{name}: ")) for line in lines), name


def test_a_run_that_was_cut_short_goes_on(ask, capsys, monkeypatch):
    assert ask(minutes=0) == {} and "asks what is left, machine" in capsys.readouterr().out
    asked = []

    def questions(b):
        return {name: lambda name=name: asked.append(name) or {"ms": 1.0, "tok_per_s": 2.0} for name in ("a", "b", "c")}

    monkeypatch.setattr(bench_gpu, "questions", lambda b: dict(list(questions(b).items())[:1]))
    assert list(ask()) == ["a"]
    monkeypatch.setattr(bench_gpu, "questions", questions)
    assert list(ask()) == asked == ["a", "b", "c"]


def test_an_error_is_an_answer_and_a_lost_gpu_a_new_process(ask, monkeypatch):
    def fail():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    started = []
    monkeypatch.setattr(bench_gpu, "questions", lambda b: {"a": lambda: 1 / 0, "b": fail})
    monkeypatch.setattr(os, "execv", lambda program, args: started.append(args))
    answers = ask()
    assert answers["a"]["error"] == "ZeroDivisionError: division by zero"
    assert "illegal memory access" in answers["b"]["error"] and len(started) == 1
    assert started[0][-1].startswith("--minutes=") and 8 < float(started[0][-1].split("=")[1]) < 9


def test_a_question_that_ended_the_process_is_not_asked_again(ask, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "asking.txt").write_text("a")
    asked = {"a": lambda: 1 / 0, "b": lambda: {"ms": 1.0, "tok_per_s": 2.0}}
    monkeypatch.setattr(bench_gpu, "questions", lambda b: asked)
    answers = ask()
    assert answers["a"]["error"] == "the process ended while this was asked" and answers["b"]["ms"] == 1.0
    assert not (tmp_path / "out" / "asking.txt").exists()


def test_a_question_that_fails_leaves_the_next_one_all_kernels(ask, monkeypatch):
    def give_up():
        torch.backends.cuda.enable_flash_sdp(False)
        raise RuntimeError("as the trainer does where a kernel fails")

    flash = lambda: {"flash": torch.backends.cuda.flash_sdp_enabled()}  # noqa: E731
    monkeypatch.setattr(bench_gpu, "questions", lambda b: {"a": give_up, "b": flash})
    assert ask()["b"]["flash"] is True


def test_a_compiler_that_fails_is_an_error_not_a_number(ask, monkeypatch):
    def broken_compile(model, **options):
        def fail(*args, **kwargs):
            raise RuntimeError("no C++ compiler found")

        return fail

    monkeypatch.setattr(torch, "compile", broken_compile)
    monkeypatch.setattr(bench_gpu, "questions", lambda b: {"ours": lambda: bench_gpu.rate(b.ours("compile=True"))})
    assert "torch.compile failed" in ask()["ours"]["error"]


@pytest.mark.slow
def test_each_attention_backend_is_compiled_for_itself(ask, monkeypatch):
    """The second is not served with the graph that was cached for the first."""
    backends = {name: getattr(bench_gpu.SDPBackend, name) for name in ("FLASH_ATTENTION", "MATH")}
    compile_with = functools.partial(torch.compile, backend="inductor")
    monkeypatch.setattr(torch, "compile", compile_with)
    monkeypatch.setattr(
        bench_gpu, "questions", lambda b: {name: functools.partial(b.with_attention, x) for name, x in backends.items()}
    )
    answers = ask(settings=SETTINGS.replace("compile=False", "compile=True"))
    assert any("flash" in kernel for kernel in answers["FLASH_ATTENTION"]["kernels"])
    assert answers["MATH"]["kernels"] == []


def test_a_real_run_tells_its_losses_and_leaves_no_checkpoints(ask, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_gpu, "questions", lambda b: {"run": lambda: b.real_run("run", 4, 2, dtype="bfloat16")})
    answer = ask()["run"]
    assert set(answer["val"]) == {"0", "1", "2", "3", "4"} and answer["tok_per_s"] > 0 and answer["hella"] == {}
    assert answer["val"]["4"] < answer["val"]["0"]
    assert {path.name for path in (tmp_path / "out" / "run").iterdir()} == {"log.txt", "run.txt"}
    assert "'bfloat16'" not in (tmp_path / "out" / "run" / "run.txt").read_text()
    assert '"dtype": "bfloat16"' in (tmp_path / "out" / "run" / "run.txt").read_text()
    monkeypatch.setattr(bench_gpu, "questions", lambda b: {"bad": lambda: b.real_run("bad", 4, 2, max_lr=-1.0)})
    assert "got max_lr -1.0" in ask()["bad"]["error"]


def test_hellaswags_length_is_imitated():
    """5,000 examples of the real file take 157.6 tokens each to read, of which 116.4 are predicted."""
    examples = bench_gpu.synthetic_examples(2000)
    predicted = [sum(map(len, example.endings)) for example in examples]
    read = [len(example.context) + sum(map(len, example.endings)) - 4 for example in examples]
    assert torch.tensor(read).float().mean() == pytest.approx(157.6, rel=0.03)
    assert torch.tensor(predicted).float().mean() == pytest.approx(116.4, rel=0.03)
