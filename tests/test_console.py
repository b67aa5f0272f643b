"""What a run tells whoever watches it: its data, a line of 80 columns for each step, log.txt, the time left, bars."""

import errno
import functools
import io
import itertools
import json
import math
import os
import re
import sys
import types
from concurrent import futures
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import tqdm.std
import train_gpt2
from plumbing.cli import console
from plumbing.cli.console import UserError
from plumbing.run import logs, source_code, summary
from plumbing.run import run as run_folder
from plumbing.system import autofit, devices
from plumbing.system.distributed import World
from train_gpt2 import TrainConfig

from harness import examples_file, full_disk, patched, read_log, refused, run, status_of, tiny_flags, train


def test_the_account_of_a_run(capsys):
    """Of a model of 100 weights, half of them with a rate of their own, which sees 1,000 times 128 tokens."""
    model = torch.nn.ParameterList([torch.zeros(5, 10), torch.zeros(50)])
    groups = [{"params": [model[0]]}, {"params": [model[1]], "lr": 0.5}]
    optimizers = [torch.optim.SGD(groups, lr=6e-4), torch.optim.Adagrad([torch.zeros(7)], lr=0.02)]
    config = TrainConfig(
        sequence_length=16, total_batch_size=128, max_steps=1000, val_tokens=600, milestone_every=300, min_lr=6e-4
    )
    parts = SimpleNamespace(raw_model=model, optimizers=optimizers, enc=SimpleNamespace(name="bytes"))
    parts.loader, parts.val_loaders = SimpleNamespace(num_windows=500, position=0), [SimpleNamespace(num_windows=60)]
    for seconds in (67, 135):  # a step
        fit = autofit.Fit(
            None, 4, False, [], [], flops_per_token=600, kept_bytes=10_000, seconds_per_token=seconds / 128
        )
        summary.print_summary(run_folder.Beginning(config), parts, fit, World())
        said = capsys.readouterr().out
        assert ("Use --preset quickstart" in said) == (seconds > 86), "more than a day"
    assert said.splitlines()[:-1] == [
        "model:      100 parameters on 1 x cpu, auto",
        "optimizer:  SGD for 50 parameters, --max-lr 0.0006",
        "optimizer:  SGD for 50 parameters, rate 0.5",
        "optimizer:  Adagrad for 7 parameters, --muon-lr 0.02",
        "data:       8,000 training tokens; the run reads 128,000: 16 passes",
        "            (compute-optimal for this size: 2.0K, by Hoffmann et al. 2022)",
        "validation: 592 of 960 tokens, from all of the split; tokenizer bytes",
        "step:       128 tokens = B 4 * T 16 * ranks 1 * micro-steps 2",
        "compute:    7.7e+07 FLOPs, about 38h here",
        "memory:     1.6 KB for weights and optimizer, at most 40 KB for activations",
        "disk:       5 checkpoints of 1.2 KB, 400 B for hf/",
        "run:        log, from step 0 to 1000",
    ]
    resumed: Any = run_folder.Beginning(config, {"step": 700})
    summary.print_summary(resumed, parts, fit._replace(seconds_per_token=1 / 128), World())
    # 300 steps are left, of 128 tokens and a second each
    assert "\ncompute:    2.3e+07 FLOPs, about 5:00 here\n" in capsys.readouterr().out


def test_the_time_left_counts_evaluations_and_is_smooth_and_readable(monkeypatch):
    """A resumed run of steps that take 1 s, with 5 s of evaluation every 10 steps and 3 s of checkpoint every 50."""
    now, estimates, ends = 0.0, {}, {}
    monkeypatch.setattr(run_folder.time, "perf_counter", lambda: now)
    run = object.__new__(run_folder.Run)
    run.start_step, run.max_steps, run.first_step_ended = 1000, 2000, None
    for step in range(1000, 2000):
        now += 5 * (step % 10 == 0) + 3 * (step % 50 == 0)
        now += 100 if step == 1000 else 1  # the first one compiles
        run.first_step_ended = run.first_step_ended or now
        estimates[step], ends[step] = run.seconds_left(step, seconds=1), now
    assert estimates[1999] == 0
    for step in range(1200, 2000):
        truth = ends[1999] - ends[step]
        assert estimates[step] == pytest.approx(truth, rel=0.02, abs=8)
        # from one step to the next it falls by about what a step takes; a single evaluation moves it little
        assert abs(estimates[step - 1] - estimates[step] - 1.56) < 40
    texts = {0: "0:00", 156: "2:36", 3599: "59m", 16_300: "4.5h", 40 * 86400: "40d"}
    assert {seconds: console.duration(seconds) for seconds in texts} == texts


@pytest.mark.parametrize("peak", [None, 1e13])
def test_a_steps_line_fits_into_80_columns_and_mfu_is_the_share_of_the_peak_of_all_gpus(peak, monkeypatch):
    """Of two ranks; also at the start, when loss and norm are large, on slow machines, and if a clock stands still."""
    said = []
    monkeypatch.setattr(devices, "peak_flops", lambda device: peak)
    monkeypatch.setattr(World, "broadcast_from_master", lambda world, *action: None)  # there is no folder
    monkeypatch.setattr(run_folder, "SECONDS_PER_LINE", 0)
    config = TrainConfig(total_batch_size=128, max_steps=20_000)
    fit = autofit.Fit(None, 4, False, [], [], flops_per_token=221_184, kept_bytes=0, seconds_per_token=0.0)
    saved: Any = dict(step=19072, val_loss=None, best_val_loss=math.inf)
    run = run_folder.Run(
        run_folder.Beginning(config, saved), World(size=2), None, metadata={}, fit=fit, shares=[1.0], splits=[]
    )
    run.writer = mock.Mock()
    run.report = lambda step, text, streams: said.append((f"step {step:5d} | {text}", streams))
    large = functools.partial(run.log_step, 19072, train_gpt2.Step(10.98123, 12.3456, False, {}), lr=1.2e-3)
    for seconds in (0.0852, 0.852, 9.99, 99.9):
        large(tokens=2**19, seconds=seconds)
    assert len({line.index(" left") for line, _ in said}) == 1, "the columns line up"
    for line, streams in said:
        assert len(line) <= 80, line
        assert all(word in line for word in ("loss 10.98", "lr 1.2e-3", "norm 12.3", "tok/s", "left")), line
        assert streams["train"] == 10.98123
    large(tokens=12_800_000, seconds=1.0)  # 2.8e12 FLOPs, on two GPUs that can do 1e13 each
    assert (" 14% MFU " in said[-1][0]) == (peak is not None)
    large(tokens=128, seconds=0.0)
    assert math.isfinite(said[-1][1]["tok/s"]) and "left" in said[-1][0]


def test_run_txt_has_the_command(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_gpt2.py", "--sample-prompt", "It's"])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # which also tools other than torchrun set
    assert logs.command() == ["python", *sys.argv]
    nodes = "--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=node1:29500 --nproc_per_node=8"
    for ranks, launcher in ((8, "--standalone --nproc_per_node=8"), (16, nodes)):
        for name, value in dict(MASTER_ADDR="node1", WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE="8").items():
            monkeypatch.setenv(name, value)
        assert logs.command() == ["torchrun", *launcher.split(), *sys.argv]


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


def test_fast_steps_are_printed_twice_a_second_at_most_and_logged_all_the_same(data, tmp_path):
    printed = train(data, tmp_path / "out", max_steps=40).splitlines()
    shown, losses = sum("tok/s" in line for line in printed), sum("val loss" in line for line in printed)
    assert 1 <= shown < 20 and losses == 11 and sorted(read_log(tmp_path / "out", "train")) == list(range(40))


def test_log_txt_has_a_step_a_stream_and_a_value_per_line_and_the_console_80_columns(data, tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "SECONDS_PER_LINE", 0)
    said = {"describe": "0123abc-dirty", "diff": "-a\n+b\n\n+c"}  # by git, of what is not committed
    with patched(source_code, "git", lambda command, *words: said[command]):
        printed = train(data, tmp_path / "out", sample_every=6, sample_prompt="ab\ncd")
    lines = (tmp_path / "out" / "log.txt").read_text(encoding="utf-8").splitlines()
    assert all(re.fullmatch(r"\d+ (train|val|val_bpb|hella|lr|norm|tok/s) -?[\d.e+-]+", line) for line in lines)
    for stream in ("train", "lr", "norm", "tok/s"):
        assert sorted(read_log(tmp_path / "out", stream)) == list(range(12))
    assert sorted(read_log(tmp_path / "out", "val")) == [0, 4, 8, 12]
    printed = printed.partition("step ")[2].partition("Exporting")[0].splitlines()
    assert max(map(len, printed)) <= 80
    updates = [line for line in printed if "norm" in line]
    for step, line in enumerate(updates):
        assert re.match(rf"step +{step} \| loss +\d.*lr .*norm .* ms.* tok/s.* left$", line), line
    assert len(updates) == 12
    [start] = logs.read_starts(tmp_path / "out" / "run.txt")
    assert {"command", "config", "versions", "machine"} <= start.keys()
    assert start["commit"] == "0123abc-dirty" and json.loads(start["changes"]) == said["diff"]
    samples = [line.partition(" ") for line in (tmp_path / "out" / "samples.txt").read_text().splitlines()]
    assert [step for step, _, _ in samples] == ["6"] * 4 + ["12"] * 4
    assert all(json.loads(text).startswith("ab\ncd") for _, _, text in samples)


def test_tok_per_s_counts_the_tokens_of_all_ranks_by_the_steps_time(data, tmp_path):
    """128 tokens in a step that takes a quarter of a second are 512 a second."""
    with patched(train_gpt2.time, "perf_counter", clock(0.25)):
        with patched(
            train_gpt2, "train_step", lambda *args, **options: train_gpt2.Step(1.0, 1.0, 1e-3, 128, False, {})
        ):
            train(data, tmp_path / "out", max_steps=2, val_every=0, checkpoint_every=0)
    assert {float(value) for value in read_log(tmp_path / "out", "tok/s").values()} == {512.0}


def test_a_disk_that_is_full_ends_the_run_at_the_next_step(data, tmp_path):
    """And not at the next checkpoint, which may be hours away."""

    def log_step(self, *args, **options):
        futures.wait(self.writer.pending)
        original(self, *args, **options)

    with patched(torch, "save", full_disk), patched(run_folder.Run, "log_step", log_step) as original:
        args = tiny_flags(data, tmp_path / "out", max_steps=60, val_every=0, checkpoint_every=4)
        assert os.strerror(errno.ENOSPC) in refused(train_gpt2.main, *args)
    assert max(read_log(tmp_path / "out")) == 3


ADDRESS = "https://me:SECRET@host:8080/a/b.txt?sig=SECRET&x=SECRET#SECRET"


@pytest.mark.parametrize(
    "text, shown",
    [
        (ADDRESS, "https://host:8080/a/b.txt"),
        (f"No file matches '{ADDRESS}'. Use another.", "No file matches 'https://host:8080/a/b.txt'. Use another."),
        (f"train_gpt2.py --data={ADDRESS} --seed 1", "train_gpt2.py --data=https://host:8080/a/b.txt --seed 1"),
        ("log/https:/me:SECRET@host/x", "log/https:/host/x"),  # as a path
        ("s3://SECRET@bucket/x and hf://me:SECRET@host", "s3://bucket/x and hf://host"),
        ("s3://me:SEC/RET'SEC\"RET@bucket/x?y=SEC'RET", "s3://bucket/x"),
        ("'http://host:80/a@b', 'https://host/a@b' me@host", "'http://host:80/a@b', 'https://host/a@b' me@host"),
        ("C:/Users/me?, note: http and a@b", "C:/Users/me?, note: http and a@b"),
    ],
)
def test_what_is_printed_loses_the_secrets_of_its_urls(text, shown, monkeypatch):
    """Whoever prints it, an error of a library with a signed address too; and what plain() writes to a file."""
    assert console.plain(text) == shown
    raw = io.BytesIO()
    for name in ("stdout", "stderr"):
        stream = console.SafeText(types.SimpleNamespace(buffer=raw_stream(raw), encoding="utf-8"), name)
        print(text, file=stream, flush=True)
    assert raw.getvalue().decode() == 2 * f"{shown}\n"

    def fail(args):
        raise UserError(text)

    assert refused(fail) == f"error: {shown}"


def test_no_file_of_a_run_has_the_secrets_of_an_address_that_was_typed(data, tmp_path, monkeypatch):
    args = tiny_flags(data, tmp_path / "out", hellaswag_data=ADDRESS, hellaswag_every=0, max_steps=1)
    monkeypatch.setattr(sys, "argv", ["train_gpt2.py", *args])
    run(train_gpt2.main, args)
    assert "https://host:8080/a/b.txt" in (tmp_path / "out" / "run.txt").read_text(encoding="utf-8")
    assert not [path for path in (tmp_path / "out").rglob("*.*") if b"SECRET" in path.read_bytes()]


def raw_stream(raw):
    """A raw stream that writes to `raw`."""
    return types.SimpleNamespace(
        raw=types.SimpleNamespace(write=raw.write, writable=lambda: True, fileno=lambda: 1, isatty=lambda: False)
    )
