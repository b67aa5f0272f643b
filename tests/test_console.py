"""What a run tells whoever watches it: its data at the start, the time left, and bars while it evaluates."""

import io
import json
import shlex
import sys

import pytest
import torch
import tqdm.std
from conftest import tiny_model, train

from plumbing import runs
from plumbing.distributed import World
from train_gpt2 import DataLoaderLite, TrainConfig


@pytest.mark.parametrize("val_tokens, validated", [(512, "512"), (10**6, "1,984")])
def test_the_start_says_epochs_and_validation_tokens(data, tmp_path, capsys, val_tokens, validated):
    """12 steps of 128 tokens are a third of the 4,688 in whole windows; validation has at most all of its split's."""
    assert train(data, tmp_path / "run", val_tokens=val_tokens) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("data: ")]
    assert "4,688 training tokens in 2 shards, of which the run makes 0.33 epochs" in line
    assert f"; {validated} validation tokens;" in line


def test_the_time_left_counts_evaluations_and_checkpoints_and_is_smooth(monkeypatch):
    """A resumed run of steps that take 1 s, with 5 s of evaluation every 10 steps and 3 s of checkpoint every 50."""
    now, estimates, ends = 0.0, {}, {}
    monkeypatch.setattr(runs.time, "perf_counter", lambda: now)
    run = object.__new__(runs.Run)
    run.start_step, run.max_steps = 1000, 2000
    for step in range(1000, 2000):
        now += 5 * (step % 10 == 0) + 3 * (step % 50 == 0)
        now += 100 if step == 1000 else 1  # the first one compiles
        estimates[step], ends[step] = run.seconds_left(step, seconds=1), now
    assert estimates[1999] == 0
    for step in range(1200, 2000):
        truth = ends[1999] - ends[step]
        assert estimates[step] == pytest.approx(truth, rel=0.02, abs=8)
        # from one step to the next it falls by about what a step takes; a single evaluation moves it little
        assert abs(estimates[step - 1] - estimates[step] - 1.56) < 40


def test_mfu_is_the_share_of_the_peak_of_all_gpus(data, monkeypatch):
    """28,311,552 FLOPs in a second, on two GPUs that can do 100 million each.

    6 * (2 blocks of 12 * 32^2 weights + 320 * 32 of the output layer) + 12 * 2 layers * 16 tokens * 32 channels are
    221,184 for each of 128 tokens.
    """
    monkeypatch.setattr(runs, "peak_flops", lambda device: 1e8)
    run, said = object.__new__(runs.Run), []
    run.world, run.config, run.metadata = World(size=2), TrainConfig(total_batch_size=128), {"tokenizer": "bytes"}
    run.out_dir, run.branched, run.start_step, run.max_steps = "log", None, 0, 10
    run.print_summary(tiny_model(), torch.float32, DataLoaderLite(data, "train", 4, 16), 8, 4, [])
    run.report = lambda step, text, **streams: said.append(text)
    run.log_step(0, loss=1.0, lr=1e-3, norm=1.0, tokens=128, seconds=1.0)
    assert " 14.2% MFU | " in said[0]


@pytest.mark.parametrize(
    "local_ranks, ranks, launcher",
    [
        (None, None, "python"),
        (8, 8, "torchrun --standalone --nproc_per_node=8"),
        (8, 16, "torchrun --nnodes=2 --nproc_per_node=8"),
    ],
)
def test_run_txt_has_the_command_for_a_shell(monkeypatch, local_ranks, ranks, launcher):
    monkeypatch.setattr(sys, "argv", ["train_gpt2.py", "--sample-prompt", "It's"])
    if ranks:
        for name, value in (("LOCAL_WORLD_SIZE", local_ranks), ("WORLD_SIZE", ranks), ("TORCHELASTIC_RUN_ID", "none")):
            monkeypatch.setenv(name, str(value))
    command = runs.describe_command()
    assert command.startswith(f"{launcher} train_gpt2.py ")
    assert shlex.split(command)[-2:] == ["--sample-prompt", "It's"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def clock(monkeypatch, seconds):
    """A clock for the bars, which advances by so many seconds whenever they look at it."""
    now = 0.0

    def time():
        nonlocal now
        now += seconds
        return now

    monkeypatch.setattr(tqdm.std, "time", time)


@pytest.mark.parametrize(
    "stderr, rank, seconds, shown",
    [
        (Terminal(), 0, 1.0, True),
        (Terminal(), 0, 0.1, False),  # over before anybody would wonder
        (Terminal(), 1, 1.0, False),
        (io.StringIO(), 0, 1.0, False),  # a log file
    ],
    ids=["long", "short", "rank 1", "no terminal"],
)
def test_a_bar_is_for_rank_0_on_a_terminal_if_it_takes_seconds(monkeypatch, stderr, rank, seconds, shown):
    monkeypatch.setattr(sys, "stderr", stderr)
    clock(monkeypatch, seconds)
    assert list(World(rank=rank, size=2).progress_bar(range(10), "validation")) == list(range(10))
    assert ("validation" in stderr.getvalue()) == shown
    assert stderr.getvalue().split("\r")[-1].strip() == "", "nothing of it stays"


def test_validation_and_hellaswag_have_bars(data, tmp_path, monkeypatch):
    example = {"activity_label": "Roof", "ctx": "A man is on a roof. he", "endings": ["a", "b", "c", "d"], "label": 0}
    (tmp_path / "examples.jsonl").write_text(8 * (json.dumps(example) + "\n"))
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    clock(monkeypatch, 5.0)
    options = dict(hellaswag_every=2, hellaswag_data=tmp_path / "examples.jsonl")
    assert train(data, tmp_path / "run", max_steps=2, warmup_steps=1, **options) == 0
    assert "validation: " in terminal.getvalue() and "HellaSwag: " in terminal.getvalue()
