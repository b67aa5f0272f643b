"""bench_gpu.py as far as a CPU goes: every benchmark runs, and a run that was cut short continues."""

import functools
import json
import os
import shutil
import time

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
def measure(tmp_path, data):
    """A call of bench_gpu.main with tiny settings that returns the results by benchmark."""
    (tmp_path / "model.py").write_text(PEER)
    (tmp_path / "train_gpt2.py").write_text(BUILD_NANOGPT)
    (tmp_path / "hellaswag.py").write_text("")
    tiny = dict(settings=SETTINGS, out=tmp_path / "out", shards=data, peer=tmp_path, build_nanogpt=tmp_path)

    def run(**options):
        assert status_of(bench_gpu.main, flags(**tiny | options)) == 0
        log = tmp_path / "out" / "answers.jsonl"
        return {a["benchmark"]: a for a in map(json.loads, log.read_text().splitlines())} if log.exists() else {}

    return run


def test_every_benchmark_runs_as_far_as_a_cpu_goes(measure, tmp_path, capsys, monkeypatch):
    real, sampled = [], []
    monkeypatch.setattr(bench_gpu.Bench, "real_run", lambda b, *args, **changes: real.append((args, changes)) or {})
    rates = dict(rates={}, ratios={}, same_tokens={}, seconds={}, cpu_seconds={})
    monkeypatch.setattr(bench, "bench_sample", lambda options, device: sampled.append(options) or rates)
    monkeypatch.setattr(bench_gpu.Bench, "ladder", lambda b: {"rungs": {}})  # minutes of compiling
    results = measure()
    errors = {name: a["error"] for name, a in results.items() if "error" in a}
    assert not errors
    assert list(results)[:3] == ["machine", "60 steps of train_gpt2.py", "nanoGPT"], "the result comes first"
    assert len(real) == 3 and [options.batch_size for options in sampled] == [1, 8]
    assert results["recompiles"]["recompiled"] is False and results["HellaSwag"]["hellaswag_s"] > 0
    assert results["build-nanogpt as published"]["tok_per_s"] == 1000
    assert results["matmuls"]["flops_per_s"].keys() == {"c_attn", "attn.c_proj", "c_fc", "mlp.c_proj", "lm_head"}
    assert all(rate > 0 for rates in results["matmuls"]["flops_per_s"].values() for rate in rates.values())
    one, two = results["train_gpt2, B=1"], results["train_gpt2"]
    assert (one["B"], two["B"]) == (1, 2) and two["families"]["matmul"] > 0
    for name in ("MATH", "logits returned, too", "not compiled, B=2", "train_gpt2, B=1", "GELU by a sigmoid"):
        assert results[name]["loss"] == pytest.approx(two["loss"], abs=1e-5), name
    assert results["loss fused by torch"]["loss"] == pytest.approx(two["loss"], abs=0.01)
    plain = results["one micro-step a step"]
    for graphs in ("one graph", "a graph per bucket", "no bucket views"):
        assert results[f"one micro-step, DDP, {graphs}"]["loss"] == pytest.approx(plain["loss"], abs=1e-6)
    # the table has a line for each, relative to the trainer itself
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("60 steps of train_gpt2.py ") and line.endswith("1.00") for line in lines)
    for name in results.keys() - {"machine"}:
        assert any(line.startswith((f"{name} ", f"{name}: ")) for line in lines), name


def test_a_run_that_was_cut_short_goes_on(measure, capsys, monkeypatch):
    assert measure(minutes=0) == {} and "to measure the rest: machine, 60 steps" in capsys.readouterr().out
    measured = []

    def measure_one(name):
        measured.append(name)
        return {"ms": 1.0, "tok_per_s": 2.0}

    entries = {name: (1, functools.partial(measure_one, name)) for name in ("a", "b", "c")}
    monkeypatch.setattr(bench_gpu, "benchmarks", lambda b: {"a": entries["a"]})
    assert list(measure()) == ["a"]
    monkeypatch.setattr(bench_gpu, "benchmarks", lambda b: entries)
    assert list(measure()) == measured == ["a", "b", "c"]


def test_an_error_is_a_result_and_a_lost_gpu_a_new_process(measure, monkeypatch):
    def fail():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    started = []
    monkeypatch.setattr(bench_gpu, "benchmarks", lambda b: {"a": (1, lambda: 1 / 0), "b": (1, fail)})
    monkeypatch.setattr(os, "execv", lambda program, args: started.append(args))
    results = measure()
    assert results["a"]["error"] == "ZeroDivisionError: division by zero"
    assert "illegal memory access" in results["b"]["error"] and len(started) == 1
    assert started[0][-1].startswith("--minutes=") and 8 < float(started[0][-1].split("=")[1]) < 9


def test_a_benchmark_that_ended_the_process_is_not_started_again(measure, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "running.txt").write_text("a")
    entries = {"a": (1, lambda: 1 / 0), "b": (1, lambda: {"ms": 1.0, "tok_per_s": 2.0})}
    monkeypatch.setattr(bench_gpu, "benchmarks", lambda b: entries)
    results = measure()
    assert "The program ended before this was measured" in results["a"]["error"] and results["b"]["ms"] == 1.0
    assert not (tmp_path / "out" / "running.txt").exists()


def test_a_benchmark_that_fails_leaves_the_next_one_all_kernels(measure, monkeypatch):
    def give_up():
        torch.backends.cuda.enable_flash_sdp(False)
        raise RuntimeError("as the trainer does where a kernel fails")

    flash = lambda: {"flash": torch.backends.cuda.flash_sdp_enabled()}  # noqa: E731
    monkeypatch.setattr(bench_gpu, "benchmarks", lambda b: {"a": (1, give_up), "b": (1, flash)})
    assert measure()["b"]["flash"] is True


def test_a_compiler_that_fails_is_an_error_not_a_number(measure, monkeypatch):
    def broken_compile(model, **options):
        def fail(*args, **kwargs):
            raise RuntimeError("no C++ compiler found")

        return fail

    monkeypatch.setattr(torch, "compile", broken_compile)
    ours = lambda b: bench_gpu.rate(b.ours("compile=True"))  # noqa: E731
    monkeypatch.setattr(bench_gpu, "benchmarks", lambda b: {"ours": (1, lambda: ours(b))})
    assert "torch.compile failed" in measure()["ours"]["error"]


@pytest.mark.slow
def test_each_attention_backend_is_compiled_for_itself(measure, monkeypatch):
    """The second is not served with the graph that was cached for the first."""
    backends = {name: getattr(bench_gpu.SDPBackend, name) for name in ("FLASH_ATTENTION", "MATH")}
    compile_with = functools.partial(torch.compile, backend="inductor")
    monkeypatch.setattr(torch, "compile", compile_with)

    def benchmarks(b):
        return {name: (1, functools.partial(b.with_attention, backend)) for name, backend in backends.items()}

    monkeypatch.setattr(bench_gpu, "benchmarks", benchmarks)
    results = measure(settings=SETTINGS.replace("compile=False", "compile=True"))
    assert any("flash" in kernel for kernel in results["FLASH_ATTENTION"]["kernels"])
    assert results["MATH"]["kernels"] == []


def test_a_real_run_tells_its_losses_and_leaves_no_checkpoints(measure, tmp_path, monkeypatch):
    good = lambda b: b.real_run("run", 4, 2, dtype="bfloat16")  # noqa: E731
    monkeypatch.setattr(bench_gpu, "benchmarks", lambda b: {"run": (1, lambda: good(b))})
    answer = measure()["run"]
    assert set(answer["val"]) == {"0", "1", "2", "3", "4"} and answer["tok_per_s"] > 0 and answer["hella"] == {}
    assert answer["val"]["4"] < answer["val"]["0"]
    out = tmp_path / "out"
    assert sorted(path.name for path in out.glob("run*")) == ["run.log.txt", "run.run.txt", "run.txt"]
    assert "4 val" in (out / "run.log.txt").read_text() and '"dtype": "bfloat16"' in (out / "run.run.txt").read_text()
    bad = lambda b: b.real_run("bad", 4, 2, max_lr=-1.0)  # noqa: E731
    monkeypatch.setattr(bench_gpu, "benchmarks", lambda b: {"bad": (1, lambda: bad(b))})
    error = measure()["bad"]["error"]
    assert "train_gpt2.py failed with status 2: error:" in error and "-1.0" in error and "bad.txt" in error


def test_a_smaller_batch_than_asked_for_is_an_error_not_a_number(measure, monkeypatch):
    fit = bench.fit_to_machine

    def fit_half(raw_model, config, *rest):
        model, B = fit(raw_model, config, *rest)
        return model, B // 2

    monkeypatch.setattr(bench, "fit_to_machine", fit_half)
    monkeypatch.setattr(bench_gpu, "benchmarks", lambda b: {"ours": (1, lambda: bench_gpu.rate(b.ours()))})
    assert "Only 1 of 2 sequences fit in memory" in measure()["ours"]["error"]


def test_clocks_and_power_are_medians_of_the_busy_seconds(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    rows = ["210, 3201, 80.0, 30, 0", "1900, 3201, 600.0, 60, 100", "1800, 3201, 700.0, 62, 99"]
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in rows))
    program.chmod(0o755)
    if not shutil.which("nvidia-smi"):
        with bench_gpu.sampled_clocks(tmp_path / "smi.csv") as nothing:
            pass
        assert nothing == {}
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with bench_gpu.sampled_clocks(tmp_path / "smi.csv") as clocks:
        time.sleep(0.5)
    assert clocks["clocks.sm"] == 1850 and clocks["power.draw"] == 650


def test_hellaswags_length_is_imitated():
    """5,000 examples of the real file take 157.6 tokens each to read, of which 116.4 are predicted."""
    examples = bench_gpu.synthetic_examples(2000)
    predicted = [sum(map(len, example.endings)) for example in examples]
    read = [len(example.context) + sum(map(len, example.endings)) - 4 for example in examples]
    assert torch.tensor(read).float().mean() == pytest.approx(157.6, rel=0.03)
    assert torch.tensor(predicted).float().mean() == pytest.approx(116.4, rel=0.03)


def test_the_trainers_peak_memory_is_read_from_its_last_lines(data, tmp_path, monkeypatch):
    def run_child(b, name, command, output, cwd=None):
        (tmp_path / "short").mkdir()
        (tmp_path / "short" / "log.txt").write_text("0 train 5.5\n0 tok/s 1000\n1 train 5.4\n1 tok/s 2000\n")
        output.write_text("Done in 1.2 minutes, at most 34.5 GiB, 0.6 s of it for checkpoints.\n")

    monkeypatch.setattr(bench_gpu.Bench, "run_child", run_child)
    options = bench_gpu.Options(out=str(tmp_path), shards=str(data))
    benchmarks = bench_gpu.Bench(options, bench_gpu.PRESETS["gpt2"], place=None, deadline=0)
    assert benchmarks.run_trainer("short", max_steps=2)["peak_gib"] == 34.5
