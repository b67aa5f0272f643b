"""What a run tells whoever watches it: its data, a line of 80 columns for each step, log.txt, the time left, bars."""

import contextlib
import errno
import functools
import io
import itertools
import json
import os
import re
import shlex
import sys
from concurrent import futures
from pathlib import Path

import pytest
import torch
import tqdm.std
import train_gpt2
from plumbing.cli import console
from plumbing.run import commands, logs, source_code
from plumbing.run import run as run_folder
from plumbing.system import devices

from harness import (
    examples_file,
    full_disk,
    patched,
    read_log,
    refusal_of,
    refused,
    run,
    status_of,
    tiny_flags,
    train,
)


def test_the_account_of_a_run_is_what_the_run_then_is(data, tmp_path):
    out = tmp_path / "out"
    said = dict(re.findall(r"(?m)^(\w+): +(.+)$", train(data, out)))
    model, _ = train_gpt2.load_model(str(out))
    assert said["model"].startswith(f"{sum(p.numel() for p in model.parameters()):,} parameters on 1 x ")
    # windows of 16 tokens and a target: 187 and 106 in the training shards, 124 in the other
    assert said["data"].startswith("4,688 training tokens; the run reads 1,536: 0.33 passes")
    assert said["validation"].startswith("512 of 1,984 tokens") and said["validation"].endswith("tokenizer bytes")
    assert said["step"] == "128 tokens = B 4 * T 16 * ranks 1 * micro-steps 2"
    checkpoints = [path.stat().st_size for path in out.glob("model_*.pt")]
    number, size, export = re.findall(r"^(\d+) checkpoints of (\d+) KB, (\d+) KB for hf/", said["disk"])[0]
    assert int(number) == len(checkpoints) and checkpoints[0] == pytest.approx(1e3 * float(size), rel=0.2)
    assert (out / "hf" / "model.safetensors").stat().st_size == pytest.approx(1e3 * float(export), rel=0.2)
    assert said["run"] == f"{out}, from step 0 to 12"

    def stop(*args):
        raise console.UserError("That is enough.")

    with patched(train_gpt2, "train_step", stop):
        said = refusal_of(train_gpt2.main, *tiny_flags(data, tmp_path / "long", max_steps=10**9))[1]
    assert "note: That is long. Use --preset quickstart" in said


@contextlib.contextmanager
def timed_run(step_seconds, evaluation_seconds=lambda step: 0.0, peak=None):
    """Context in which a run computes nothing: a step and an evaluation take so long, functions of the step.

    Yields {step: when it ended}.
    """
    now, ends = 0.0, {}

    def train_step(step, parts, signals):
        nonlocal now
        ends[step] = now = now + step_seconds(step)
        return train_gpt2.Step(10.98123, 12.3456, 1.2e-3, 128, False, {})

    def evaluate(step, *args, **options):
        nonlocal now
        now += evaluation_seconds(step)

    with (
        patched(train_gpt2.time, "perf_counter", lambda: now),
        patched(train_gpt2, "train_step", train_step),
        patched(train_gpt2, "evaluate", evaluate),
        patched(devices, "peak_flops", lambda device: peak),
    ):
        yield ends


NO_FILES = dict(val_every=0, checkpoint_every=0)


def test_the_time_left_counts_evaluations_and_is_smooth_and_readable(data, tmp_path):
    """Of steps that take 1 s, the first one 100 s, and 5 s of evaluation every 10 steps."""
    with timed_run(lambda step: 100 if step == 0 else 1, lambda step: 5 * (step % 10 == 0)) as ends:
        said = train(data, tmp_path / "out", max_steps=300, **NO_FILES)
    assert float(read_log(tmp_path / "out", "tok/s")[0]) == pytest.approx(128 / 100)
    left = {int(step): 60 * int(m) + int(s) for step, m, s in re.findall(r"step +(\d+) .* (\d):(\d\d) left", said)}
    assert left[299] == 0 and set(left) == set(range(1, 300))
    for step in range(60, 300):
        assert left[step] == pytest.approx(ends[299] - ends[step], rel=0.05, abs=8)
        # from one step to the next it falls by about what a step takes; a single evaluation moves it little
        assert abs(left[step - 1] - left[step] - 1.5) < 20


STEP = train_gpt2.Step(
    loss=10.98123,
    norm=12.3456,
    lr=1.2e-3,
    tokens=128,
    stop=False,
    scalars={},
)


@pytest.mark.parametrize("mfu", [0.0, 0.47])
def test_the_lines_of_steps_line_up_within_80_columns(mfu):
    """On fast and slow machines, and if a clock stands still."""
    lines = []
    for seconds in (0.0, 0.0852, 0.852, 9.99, 99.9):
        lines.append(f"step 19072 | {run_folder.step_line(STEP, seconds=seconds, mfu=mfu, left=1e4 * seconds)}")
    assert max(map(len, lines)) <= 80
    assert len({line.index(" left") for line in lines}) == 1


@pytest.mark.parametrize(
    "mfu, line",
    [
        (0.0, "loss 10.9812  lr 1.2e-3  norm 12.35   85 ms  1.5K tok/s  2:36 left"),
        (0.47, "loss 10.981 lr 1.2e-3 norm 12.3  85 ms 1.5K tok/s 47% MFU 2:36 left"),
    ],
)
def test_the_line_of_a_step(mfu, line):
    assert run_folder.step_line(STEP, seconds=0.0852, mfu=mfu, left=156) == line


@pytest.mark.parametrize(
    "seconds, text",
    [(0, "0:00"), (156, "2:36"), (599, "9:59"), (1000, "16m"), (16300, "4.5h"), (90000, "25h"), (400000, "4d")],
)
def test_a_time_is_readable(seconds, text):
    assert console.duration(seconds) == text


def train_at_half_of_the_peak(args):
    """On each of two ranks: the step's FLOPs, counted by hand, in the time that two GPUs of this peak would halve."""
    weights = (
        2 * 12 * 32**2 + 320 * 32
    )  # of the matrices that each token is multiplied by: 2 FLOPs forward, 4 backward
    attention = 2 * 2 * 2 * 16 * 32  # of 2 layers: scores and their sum, over 16 tokens
    flops = 128 * (6 * weights + 3 * attention)
    with timed_run(lambda step: 0.25, peak=flops / 0.25):
        train_gpt2.main(args)


def test_mfu_is_the_share_of_the_peak_of_all_gpus(data, tmp_path):
    said, _ = run(train_at_half_of_the_peak, tiny_flags(data, tmp_path / "out", max_steps=3, **NO_FILES), ranks=2)
    assert float(re.findall(r" (\d+)% MFU ", said)[0]) == pytest.approx(50, abs=3)


def test_run_txt_has_the_command_that_was_typed(data, tmp_path, monkeypatch):
    args = tiny_flags(data, tmp_path / "out", max_steps=1, warmup_steps=1, sample_prompt='It\'s "quoted"')
    assert status_of(train_gpt2.main, args) == 0
    [command] = re.findall("(?m)^command: (.+)$", (tmp_path / "out" / "run.txt").read_text(encoding="utf-8"))
    python, script, *words = shlex.split(command)
    assert python == "python" and Path(script).samefile(train_gpt2.__file__)
    read = functools.partial(train_gpt2.read_flags, train_gpt2.TrainConfig, train_gpt2.PRESETS)
    assert read(words) == read(args)
    for name, value in dict(MASTER_ADDR="node1", WORLD_SIZE="16", LOCAL_WORLD_SIZE="8").items():
        monkeypatch.setenv(name, value)
    nodes = "--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=node1:29500 --nproc_per_node=8"
    assert commands.launcher() == ["torchrun", *nodes.split()]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def clock(seconds):
    """A clock that advances by so many seconds whenever somebody looks at it."""
    return itertools.count(0, seconds).__next__


@pytest.mark.parametrize("stderr", [Terminal(), io.StringIO()], ids=["terminal", "log file"])
def test_validation_and_hellaswag_have_bars_on_a_terminal_of_which_nothing_stays(stderr, data, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(tqdm.std, "time", clock(5.0))
    options = dict(hellaswag_every=2)
    options["hellaswag_data"] = examples_file(tmp_path, ["A man is on a roof. he"] * 8)
    args = tiny_flags(data, tmp_path / "run", max_steps=2, warmup_steps=1, **options)
    assert status_of(train_gpt2.main, args) == 0
    said = stderr.getvalue()
    for bar in ("validation: ", "HellaSwag: "):
        assert (bar in said) == stderr.isatty()
    assert said.split("\r")[-1].strip() == ""


def test_log_txt_has_a_step_a_stream_and_a_value_per_line_and_the_console_two_lines_a_second(data, tmp_path):
    said = {"describe": "0123abc-dirty", "diff": "-a\n+b\n\n+c"}  # by git, of what is not committed
    with patched(source_code, "git", lambda command, *words: said[command]):
        printed = train(data, tmp_path / "out", sample_every=6, sample_prompt="ab\ncd")
    lines = (tmp_path / "out" / "log.txt").read_text(encoding="utf-8").splitlines()
    assert all(re.fullmatch(r"\d+ (train|val|val_bpb|hella|lr|norm|tok/s) -?[\d.e+-]+", line) for line in lines)
    for stream in ("train", "lr", "norm", "tok/s"):
        assert sorted(read_log(tmp_path / "out", stream)) == list(range(12))
    assert sorted(read_log(tmp_path / "out", "val")) == [0, 4, 8, 12]
    assert 1 <= printed.count("tok/s") < 12 and printed.count("val loss") == 4
    [start] = logs.read_starts(tmp_path / "out" / "run.txt")
    assert {"command", "config", "versions", "machine"} <= start.keys()
    assert start["commit"] == "0123abc-dirty" and json.loads(start["changes"]) == said["diff"]
    samples = [line.partition(" ") for line in (tmp_path / "out" / "samples.txt").read_text().splitlines()]
    assert [step for step, _, _ in samples] == ["6"] * 4 + ["12"] * 4
    assert all(json.loads(text).startswith("ab\ncd") for _, _, text in samples)


def test_a_disk_that_is_full_ends_the_run_at_the_next_step(data, tmp_path):
    """And not at the next checkpoint, which may be hours away."""

    def log_step(self, *args, **options):
        futures.wait(self.files.writer.pending)
        original(self, *args, **options)

    with patched(torch, "save", full_disk), patched(run_folder.Run, "log_step", log_step) as original:
        args = tiny_flags(data, tmp_path / "out", max_steps=60, val_every=0, checkpoint_every=4)
        assert os.strerror(errno.ENOSPC) in refused(train_gpt2.main, *args)
    assert max(read_log(tmp_path / "out")) == 3
