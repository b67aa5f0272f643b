"""--wandb mirrors the log at Weights & Biases, and whatever fails there leaves the training alone."""

import importlib.util
import os
import shutil
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import train_gpt2
from plumbing.run import wandb_log

from harness import listing, read_log, refused, tiny_flags, train

OPTIONS = dict(wandb="gpt2", max_steps=6, val_every=2, checkpoint_every=2)


@pytest.fixture
def wandb(monkeypatch):
    """Stands for the package; next_step: of the run, as the server knows it."""
    wandb = mock.MagicMock(next_step=0)

    def init(mode, id, dir, **options):
        run = wandb.run
        id = id or f"new{time.time_ns()}"
        is_online = mode == "online"
        run.url = f"https://wandb.example/{id}" if is_online else None
        run.starting_step = wandb.next_step if is_online else 0
        # wandb names its folders so
        name = f"run-{time.time_ns()}-{id}" if is_online else f"offline-run-{time.time_ns()}-{id}"
        run.dir = Path(dir, "wandb", name, "files")
        run.dir.mkdir(parents=True)
        return run

    wandb.init.side_effect = init
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(wandb_log, "is_installed", lambda: True)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return wandb


def logged(wandb):
    """{(step, stream): value as log.txt has it} of calls of log; a stream's step that comes twice is an error."""
    values = {}
    steps = []
    for call in wandb.run.log.call_args_list:
        step = call.kwargs["step"]
        steps.append(step)
        for stream, value in call.args[0].items():
            assert (step, stream) not in values
            values[step, stream] = f"{value:.9g}"
    assert steps == sorted(steps)
    wandb.run.log.reset_mock()
    return values


def log_of(out_dir, first=0):
    values = {}
    for stream in ("train", "val", "val_bpb", "lr", "norm", "tok/s"):
        for step, value in read_log(out_dir, stream).items():
            if step >= first:
                values[step, stream] = value
    return values


def lose_the_last_steps(out_dir):
    """Leave a finished run as a crash after step 5 would, whose newest checkpoint is of step 4."""
    (out_dir / "model_00006.pt").unlink()
    shutil.rmtree(out_dir / "hf", ignore_errors=True)


def identity_of(wandb):
    return Path(wandb.run.dir).parent.name.rpartition("-")[2]


def test_the_log_is_mirrored_also_of_a_branch_with_its_parents_curve(data, out, wandb):
    said = train(data, out, **OPTIONS)
    assert logged(wandb) == log_of(out)
    init = wandb.init.call_args.kwargs
    assert init["mode"] == "online" and init["project"] == "gpt2"
    assert init["config"]["vocab_size"] == 320
    assert wandb.run.finish.call_args_list == [mock.call(exit_code=0)]
    assert f"mirrored at https://wandb.example/{identity_of(wandb)}" in said
    train(data, "branch", **OPTIONS, branch_from=out / "model_00004.pt", max_lr=1e-3)
    assert wandb.init.call_args.kwargs["id"] is None
    assert logged(wandb) == log_of("branch")


@pytest.mark.parametrize(
    "begun, now, first", [("online", "online", 5), ("online", "offline", 0), ("offline", "offline", 0)]
)
def test_a_resumed_run_goes_on_in_the_same_curve(begun, now, first, data, out, wandb):
    """The server has the steps up to 4, the checkpoint is of step 4, and the new process repeats all from there.

    Offline it has all steps, because its upload replaces what the server had.
    """
    wandb.login.return_value = begun == "online"
    train(data, out, **OPTIONS)
    logged(wandb)
    identity = identity_of(wandb)
    lose_the_last_steps(out)
    wandb.next_step = 5
    wandb.login.return_value = now == "online"
    said = train(data, out, **OPTIONS, batch_size=2)
    again = wandb.init.call_args.kwargs
    assert again["mode"] == now and again["resume"] == "allow" and again["allow_val_change"]
    assert again["id"] == identity_of(wandb) == identity
    assert logged(wandb) == log_of(out, first=first)
    assert (f"wandb sync {out / 'wandb' / 'offline-run-'}" in said) == (now == "offline")


@pytest.mark.parametrize("mode, has_login", [("online", False), ("disabled", True)])
def test_wandb_mode_is_obeyed(mode, has_login, data, wandb, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", mode)
    wandb.login.return_value = has_login
    train(data, "out", **OPTIONS | dict(max_steps=1))
    assert wandb.init.call_args.kwargs["mode"] == mode


@pytest.mark.parametrize("trouble", ["init", "run.log", "run.finish"])
def test_training_goes_on_without_wandb_after_any_error(trouble, data, wandb):
    wandb.configure_mock(**{f"{trouble}.side_effect": RuntimeError("no more space\nat the server")})
    said = train(data, "out", **OPTIONS)
    assert said.count("warning: ") == 1 and "failed (RuntimeError: no more space)." in said
    assert len(read_log("out")) == 6


def test_a_run_that_ends_in_an_error_is_failed_there_too(data, wandb):
    refused(train_gpt2.main, *tiny_flags(data, "out", wandb="gpt2", max_lr=1e17, grad_clip=0))
    assert wandb.run.finish.call_args_list == [mock.call(exit_code=1)]


def test_without_the_package_it_is_an_error_before_anything_is_written(data, monkeypatch):
    os.makedirs("packages/wandb")  # what wandb leaves in a working directory is no package
    monkeypatch.syspath_prepend("packages")
    if importlib.util.find_spec("wandb").origin:
        monkeypatch.setattr(wandb_log, "is_installed", lambda: False)
    before = listing(".")
    args = tiny_flags(data, "out", wandb="gpt2")
    assert "pip install wandb" in refused(train_gpt2.main, *args)
    assert listing(".") == before


@pytest.mark.skipif(not wandb_log.is_installed(), reason="wandb is optional and not installed")
def test_the_real_wandb_writes_its_offline_run(data, out, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    said = train(data, out, **OPTIONS)
    assert "warning" not in said
    [folder] = (out / "wandb").glob("offline-run-*")
    [file] = folder.glob("run-*.wandb")
    assert f"wandb sync {folder}" in said
    content = file.read_bytes()
    assert all(stream in content for stream in (b"train", b"val", b"lr", b"max_lr"))
    lose_the_last_steps(out)
    train(data, out, **OPTIONS)
    assert len(list((out / "wandb").glob(f"offline-run-*/{file.name}"))) == 2, "the same run"
