"""What a run tells whoever watches it: a line of 80 columns for each step, the time left, bars, log.txt and run.txt."""

import contextlib
import errno
import functools
import io
import itertools
import json
import os
import re
import sys
import time
from concurrent import futures
from pathlib import Path

import pytest
import torch
import tqdm.std
import train_gpt2
from plumbing.cli import console
from plumbing.run import logs, source_code
from plumbing.run import run as run_folder
from plumbing.system import devices

from harness import (
    at_steps,
    examples_file,
    full_disk,
    losses,
    patched,
    read_log,
    refused,
    run,
    samples,
    status_of,
    tiny_flags,
    train,
)

# ----- The line of a step ---------------------------------------------------------------------------------


def test_the_time_left_is_by_the_average_since_the_first_step_of_the_last_start(data, monkeypatch):
    """The first step, which may compile, takes 100 s; the others take 1 s and 3 s in turn.

    A branch starts at step 4, as a run does that is continued there.
    """
    seconds = [0] * 4 + [100, *[1, 3] * 18]
    now = 0.0

    def take_time(step, parts):
        nonlocal now
        now += seconds[step]

    train(data, "parent", max_steps=4)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    with at_steps(take_time):
        said = train(data, "out", branch_from="parent", max_steps=41, val_every=0, checkpoint_every=0)
    left = dict(re.findall(r"(?m)^step +(\d+) .* 0:(\d\d) left$", said))
    for step in range(14, 41):  # before, it is more than a minute
        assert int(left[str(step)]) == pytest.approx(sum(seconds[step + 1 :]), abs=4)


@pytest.mark.parametrize(
    "mfu, line",
    [
        (0.0, "loss 10.9812  lr 1.2e-3  norm 12.35   85 ms  1.5K tok/s  2:36 left"),
        (0.47, "loss 10.981 lr 1.2e-3 norm 12.3  85 ms 1.5K tok/s 47% MFU 2:36 left"),
    ],
)
def test_the_lines_of_steps_line_up_within_80_columns(mfu, line):
    """On fast and slow machines, and if a clock stands still."""
    step = train_gpt2.Step(loss=10.98123, norm=12.3456, lr=1.2e-3, tokens=128, stop=False, scalars={})
    line_of = functools.partial(run_folder.step_line, step, mfu=mfu)
    assert line_of(seconds=0.0852, left=156) == line
    assert len(f"step 19072 | {line}") <= 80
    for seconds in (0.0, 0.852, 9.99, 99.9):
        other = line_of(seconds=seconds, left=1e4 * seconds)
        assert (len(other), other.index(" left")) == (len(line), line.index(" left"))


@pytest.mark.parametrize(
    "seconds, text",
    [(0, "0:00"), (156, "2:36"), (599, "9:59"), (1000, "16m"), (16300, "4.5h"), (90000, "25h"), (400000, "4d")],
)
def test_a_time_is_readable(seconds, text):
    assert console.duration(seconds) == text


def train_on_gpus_of_a_gigaflop(args):
    with patched(devices, "peak_flops", lambda device: 1e9):
        train_gpt2.main(args)


def test_mfu_is_the_share_of_the_peak_of_all_gpus(data):
    """FLOPs by hand, for a token: 2 forward and 4 backward for each weight, and for attention to 16 tokens."""
    weights = 2 * 12 * 32**2 + 320 * 32  # in the matrices of two blocks and of the output
    attention = 2 * 2 * 16 * 32  # scores, and the sum of the values
    args = tiny_flags(data, "out", max_steps=1, warmup_steps=1, val_every=0)
    said, _ = run(train_on_gpus_of_a_gigaflop, args, ranks=2)
    speed = float(read_log("out", "tok/s")[0])
    expected = speed * 6 * (weights + attention) / 2e9
    assert float(re.findall(r" (\d+)% MFU ", said)[0]) == pytest.approx(100 * expected, abs=0.6)


# ----- run.txt and log.txt --------------------------------------------------------------------------------


def train_as_on_two_nodes(args):
    """From the first write on, this process says that it is one of 16 on two nodes."""
    nodes = dict(MASTER_ADDR="node1", WORLD_SIZE="16", LOCAL_WORLD_SIZE="8")
    with patched(source_code, "git", lambda *words: os.environ.update(nodes) or ""):
        train_gpt2.main(args)


def test_run_txt_has_the_ranks_and_the_command_of_all_nodes(data):
    run(train_as_on_two_nodes, tiny_flags(data, "out", max_steps=1, val_every=0))
    text = Path("out/run.txt").read_text(encoding="utf-8")
    assert "\nranks: 16\n" in text
    nodes = "--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=node1:29500 --nproc-per-node=8"
    assert f"\ncommand: torchrun {nodes} " in text


def test_run_txt_has_a_block_for_each_start_with_what_was_not_committed(data):
    said = {"describe --always --dirty --abbrev=40": "0123abc-dirty", "diff HEAD": "-a\n+b\n\n+c"}  # by git

    def stop(step, parts):
        if step == 5:
            raise console.UserError("That is enough.")

    with patched(source_code, "git", lambda *words: said[" ".join(words)]), at_steps(stop):
        refused(train_gpt2.main, *tiny_flags(data, "out"))
    train(data, "out")
    first, second = logs.read_starts(Path("out/run.txt"))
    assert {"command", "config", "versions", "machine"} <= first.keys() & second.keys()
    assert first["commit"] == "0123abc-dirty"
    assert json.loads(first["changes"]) == said["diff HEAD"]


def test_log_txt_has_a_line_for_each_step_and_stream_and_the_console_few(data):
    """Of steps that take milliseconds; each validation has a line."""
    said = train(data, "out")
    lines = Path("out/log.txt").read_text(encoding="utf-8").splitlines()
    for line in lines:
        assert re.fullmatch(r"\d+ (train|val|val_bpb|lr|norm|tok/s) -?[\d.e+-]+", line)
    for stream in ("train", "lr", "norm", "tok/s"):
        assert sorted(read_log("out", stream)) == list(range(12))
    assert sorted(read_log("out", "val")) == [0, 4, 8, 12]
    assert said.count("val loss") == 4
    assert 1 <= said.count("tok/s") < 12


def test_a_name_that_log_txt_cannot_have_is_written_with_underscores():
    with open("log.txt", "w") as file:
        logs.write_log(file, 3, {"val/my data": 1.5})
    assert read_log(".", "val/my_data") == {3: "1.5"}


def test_steps_and_samples_are_printed_in_80_columns_that_steer_no_terminal(data):
    """And returns to Python what it ended with, as it does again when it is finished."""
    prompt = "\x1b[2Jabcd\nefgh\r" * 2
    printed = io.StringIO()
    for _ in range(2):
        with contextlib.redirect_stdout(printed):
            ended = train_gpt2.main(tiny_flags("data", "out", sample_every=6, sample_prompt=prompt, block_size=64))
        assert ended.step == 12
        last = {stream: losses("out", stream)[-1] for stream in ended.losses}
        assert ended.losses == pytest.approx(last)
        assert {"train", "val"} <= ended.losses.keys()
    texts = samples("out")
    assert list(texts) == [6, 12]
    for four in texts.values():
        assert [text.startswith(prompt) for text in four] == [True] * 4
    lines = [line for line in printed.getvalue().split("\n") if line.startswith(("step ", " " * 20))]
    assert max(map(len, lines)) == 80
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", printed.getvalue())
    card = Path("out/hf/README.md").read_text(encoding="utf-8")
    assert f"| {losses('out', 'val')[-1]:.4f} |" in card


# ----- Bars and errors ------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


def clock(seconds):
    """A clock that advances by so many seconds whenever somebody looks at it."""
    return itertools.count(0, seconds).__next__


@pytest.mark.parametrize("stderr", [Terminal(), io.StringIO()], ids=["terminal", "log file"])
def test_an_evaluation_has_a_bar_on_a_terminal_of_which_nothing_stays(stderr, data, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(tqdm.std, "time", clock(5.0))
    examples = examples_file(tmp_path, ["A man is on a roof. he"] * 8)
    options = dict(hellaswag_every=2, hellaswag_data=examples)
    assert status_of(train_gpt2.main, tiny_flags(data, "out", max_steps=2, warmup_steps=1, **options)) == 0
    said = stderr.getvalue()
    for bar in ("validation: ", "HellaSwag: "):
        assert (bar in said) == stderr.isatty()
    assert said.split("\r")[-1].strip() == ""


def test_a_disk_that_is_full_ends_the_run_at_the_next_step(data, monkeypatch):
    """And not at the next checkpoint, which may be hours away."""

    def log_step(self, *args, **options):
        futures.wait(self.files.writer.pending)
        original(self, *args, **options)

    monkeypatch.setattr(torch, "save", full_disk)
    with patched(run_folder.Run, "log_step", log_step) as original:
        said = refused(train_gpt2.main, *tiny_flags(data, "out", max_steps=60, val_every=0))
    assert os.strerror(errno.ENOSPC) in said
    assert max(read_log("out")) == 3
