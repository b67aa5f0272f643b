"""Promises of a run that belong to no one part of the program, each stated by real runs."""

import gc
import os
import random
import shlex
import signal

import numpy as np
import torch
import train_gpt2
from plumbing.run.checkpoint import load_checkpoint

from harness import (
    assert_same_run,
    at_steps,
    patched,
    printed_commands,
    read_log,
    refused,
    run,
    signalled,
    tiny_flags,
    train,
)


def train_with_random_numbers(function, *args):
    """The model draws from torch, numpy and Python in each step."""

    def forward(self, x):
        noise = torch.rand(1).item() + np.random.rand() + random.random() if self.training else 1.0
        return whole_forward(self, x) * noise

    with patched(train_gpt2.MLP, "forward", forward) as whole_forward:
        function(*args)


def test_what_a_model_draws_in_a_step_is_the_same_whether_or_not_the_run_was_resumed_before_it(data, tmp_path):
    run(train_with_random_numbers, train_gpt2.main, tiny_flags(data, tmp_path / "straight"))
    args = tiny_flags(data, tmp_path / "out")
    run(train_with_random_numbers, signalled, 5, "SIGTERM", 1, 0, args)
    run(train_with_random_numbers, train_gpt2.main, args)
    assert_same_run(tmp_path / "out", tmp_path / "straight")
    assert len(set(read_log(tmp_path / "straight").values())) == 12


def test_nothing_of_a_run_stays_in_the_process_that_has_called_main(data, tmp_path, monkeypatch):
    """No tensor, no handler of signals; an error while the folder is opened leaves nothing behind, either."""
    monkeypatch.setattr(gc, "freeze", lambda: None)  # in the tests what is frozen stays so
    numbers, alive, handlers = (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGINT)), [], []
    (tmp_path / "run" / "run.txt").mkdir(parents=True)
    (tmp_path / "samples").mkdir()
    (tmp_path / "mine.txt").touch()
    (tmp_path / "samples" / "samples.txt").symlink_to(tmp_path / "mine.txt")
    for out in ("first", "second", "run", "samples", "third"):
        args = tiny_flags(data, tmp_path / out, max_steps=2, val_every=1)
        refused(train_gpt2.main, *args) if out in ("run", "samples") else train_gpt2.main(args)
        gc.collect()
        alive.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
        handlers.append([signal.getsignal(number) for number in numbers])
    assert len(set(alive)) == 1 and handlers == handlers[:1] * 5
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_from_python_the_command_is_that_of_what_was_passed(data, tmp_path, monkeypatch):
    """In run.txt and after a stop, whatever the process was started with."""
    monkeypatch.setattr("sys.argv", ["a_notebook.py", "--its-own", "7"])
    args = tiny_flags(data, tmp_path / "out", sample_prompt="It's")

    with at_steps(lambda step, parts: os.kill(os.getpid(), signal.SIGTERM)):
        said = train(data, tmp_path / "out", sample_prompt="It's")
    command = ["python", os.path.relpath(train_gpt2.__file__), *args]
    assert printed_commands(said) == [command]
    [line] = [
        line for line in (tmp_path / "out" / "run.txt").read_text().splitlines() if line.startswith("command: ")
    ]
    assert shlex.split(line)[1:] == command


def test_a_vocabulary_that_was_typed_is_not_another_one(data, tmp_path):
    train(data, tmp_path / "first", max_steps=1, val_every=0)
    for number, sizes in enumerate([dict(vocab_size=258), dict(vocab_size=258, init_from=tmp_path / "first")]):
        train(data, tmp_path / str(number), max_steps=1, val_every=0, **sizes)
        saved = load_checkpoint(tmp_path / str(number) / "model_00001.pt")
        assert saved["config"]["vocab_size"] == len(saved["model"]["lm_head.weight"]) == 258
