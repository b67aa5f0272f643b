"""A run cannot be lost: killed anywhere, stopped by signals, moved to other ranks, its files torn.

What a run must give is what an uninterrupted run of the same command gave: bit for bit on one process.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import faults
import pytest
import torch
from conftest import (
    die,
    die_at,
    listing,
    make_shards,
    patched,
    read_log,
    run,
    start,
    tiny_flags,
    train,
    wait_for_checkpoint,
    write_half,
)

import train_gpt2
from plumbing import checkpoint as checkpoints
from plumbing import huggingface
from plumbing.checkpoint import delete_checkpoints, list_checkpoints, newest_checkpoint, write_checkpoint
from plumbing.runs import Run

OPTIONS = dict(max_steps=12, val_every=2, checkpoint_every=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("resume") / "data")


@pytest.fixture(scope="module")
def straight(folder):
    """The folder of a run of OPTIONS that nothing interrupts."""
    assert train(folder, folder.parent / "straight", **OPTIONS) == 0
    return folder.parent / "straight"


def assert_same_run(out_dir, straight, val_loss=True):
    """Every step once, every train and val value bit for bit, and the same weights in the end."""
    for stream in ("train", "val", "lr", "norm"):
        assert read_log(out_dir, stream) == read_log(straight, stream)
    ours, theirs = newest_checkpoint(out_dir), newest_checkpoint(straight)
    assert ours["step"] == theirs["step"] and (not val_loss or ours["val_loss"] == theirs["val_loss"])
    assert all(torch.equal(ours["model"][name], theirs["model"][name]) for name in theirs["model"])
    exports = [Path(folder) / "hf" / "model.safetensors" for folder in (out_dir, straight)]
    assert exports[0].read_bytes() == exports[1].read_bytes()
    assert not list(Path(out_dir).glob("*.part"))


# ----------------------------------------------------------------------------------------------------------
# kill -9 at chosen moments


def train_until(moment, args):
    """Train, and be killed with -9 at `moment`. Steps 4, 8 and 12 write checkpoints."""
    out_dir = Path(args[args.index("--out-dir") + 1])
    wait_for_4, wait_for_8 = (wait_for_checkpoint(out_dir, step) for step in (4, 8))

    def in_step_9(*args_of_call):
        return "\n8 train " in (out_dir / "log.txt").read_text()

    patch = {
        "before the first step": lambda: die_at(train_gpt2, "train_step", lambda *args: True),
        "after the log line of step 6": lambda: die_at(Run, "report", lambda run, step, *rest: step == 7, wait_for_4),
        "in the validation of step 6": lambda: die_at(Run, "report", lambda run, step, *rest: step == 6, wait_for_4),
        "in step 9": lambda: die_at(torch.nn.utils, "clip_grad_norm_", in_step_9, wait_for_8),
        "half of checkpoint 8 written": lambda: die_at(torch, "save", lambda state, _: state["step"] == 8, write_half),
        "checkpoint 8 written, not renamed": lambda: die_at(os, "replace", lambda a, b: b.name == "model_00008.pt"),
        "checkpoint 8 there, nothing deleted": lambda: die_at(
            checkpoints, "list_checkpoints", lambda path: (path / "model_00008.pt").exists()
        ),
        "in the export at the end": lambda: die_at(huggingface, "export_tokenizer", lambda *args: True),
    }[moment]
    with patch():
        train_gpt2.main(args)


# the steps of the checkpoints that a process leaves which is killed at that moment; the newest 2 are kept
MOMENTS = {
    "before the first step": [],
    "after the log line of step 6": [4],
    "in the validation of step 6": [4],
    "half of checkpoint 8 written": [4],  # never under the real name
    "checkpoint 8 written, not renamed": [4],
    "checkpoint 8 there, nothing deleted": [4, 8],
    "in step 9": [4, 8],
    "in the export at the end": [8, 12],
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_killed_at_any_moment_ends_bit_for_bit_as_if_never_interrupted(moment, folder, straight, tmp_path):
    args = tiny_flags(folder, tmp_path / "out", **OPTIONS)
    output = tmp_path / "output"
    assert run(train_until, moment, args, output=output) == [-signal.SIGKILL], output.read_text()
    steps = [int(path.stem[6:]) for path in list_checkpoints(tmp_path / "out")]
    assert steps == MOMENTS[moment]
    halves = [path.name for path in (tmp_path / "out").glob("model_*.part")]
    assert halves == (["model_00008.pt.part"] if "checkpoint 8 written" in moment else [])
    assert run(train_gpt2.main, args, output=output) == [0], output.read_text()
    assert_same_run(tmp_path / "out", straight)


def test_a_run_killed_again_and_again_ends_the_same(folder, straight, tmp_path):
    args = tiny_flags(folder, tmp_path / "out", **OPTIONS)
    for moment in MOMENTS:
        assert run(train_until, moment, args, output=tmp_path / "output") == [-signal.SIGKILL], moment
    assert run(train_gpt2.main, args, output=tmp_path / "output") == [0]
    assert_same_run(tmp_path / "out", straight)


class Forked:
    """What `faults.launch` returns, for the trainer: as a new process, without the seconds that its imports take."""

    def __init__(self, command, output):
        (self.process,) = start(play, command[1:], output=output)
        self.pid = self.process.pid

    def poll(self):
        return self.process.exitcode

    def wait(self, timeout=None):
        self.process.join(timeout)
        if self.process.is_alive():
            raise subprocess.TimeoutExpired("train_gpt2.py", timeout)
        return self.process.exitcode

    def terminate(self):
        self.process.terminate()


def play(argv):
    os.setsid()
    sys.argv = argv
    train_gpt2.main()


@pytest.fixture
def forked(monkeypatch):
    launch = faults.launch
    monkeypatch.setattr(
        faults, "launch", lambda command, output: (Forked if "train_gpt2.py" in command[1] else launch)(command, output)
    )


def test_kills_at_random_moments_change_nothing(forked, tmp_path):
    """The short form of tests/faults.py: three kills of the trainer, one of fineweb.py."""
    report = faults.inject(tmp_path, kills=3, fineweb_kills=1, seed=0)
    assert report["training"]["kills"] == 3 and report["training"]["different"] == 0
    assert report["fineweb"]["kills"] == 1 and report["fineweb"]["different"] == 0


@pytest.mark.slow
def test_fifty_kills_at_random_moments_change_nothing(tmp_path):
    report = faults.inject(tmp_path, kills=50, fineweb_kills=20, seed=1)
    assert report["training"]["kills"] == 50 and report["training"]["different"] == 0
    assert report["fineweb"]["kills"] == 20 and report["fineweb"]["different"] == 0


# ----------------------------------------------------------------------------------------------------------
# Torn files


@pytest.fixture(scope="module")
def killed(folder):
    """The folder of a run that was killed in step 9, with checkpoints 4 and 8."""
    args = tiny_flags(folder, folder.parent / "killed", **OPTIONS)
    assert run(train_until, "in step 9", args, output=folder.parent / "output") == [-signal.SIGKILL]
    assert [path.name for path in list_checkpoints(folder.parent / "killed")] == ["model_00004.pt", "model_00008.pt"]
    return folder.parent / "killed"


@pytest.fixture
def stopped(killed, tmp_path):
    return shutil.copytree(killed, tmp_path / "out")


def test_a_torn_log_line_is_cut_off(folder, straight, stopped):
    with open(stopped / "log.txt", "a") as file:
        file.write("9 tra")
    assert train(folder, stopped, **OPTIONS) == 0
    assert_same_run(stopped, straight)


def test_a_missing_log_is_no_obstacle(folder, straight, stopped):
    (stopped / "log.txt").unlink()
    assert train(folder, stopped, **OPTIONS) == 0
    assert list(read_log(stopped).items()) == list(read_log(straight).items())[8:]


@pytest.mark.parametrize("damage", ["cut to half", "emptied", "zeroed at the end", "deleted"])
@pytest.mark.parametrize("keep_checkpoints", [1, 2])
def test_a_damaged_checkpoint_is_skipped_with_a_word(damage, keep_checkpoints, folder, straight, stopped, capsys):
    """--keep-checkpoints 1 too: the damaged newer one must not push out the good ones that follow."""
    path = stopped / "model_00008.pt"
    whole = path.read_bytes()
    if damage == "deleted":
        path.unlink()
    else:
        half = len(whole) // 2
        left = {"cut to half": whole[:half], "emptied": b"", "zeroed at the end": whole[:half] + bytes(half)}
        path.write_bytes(left[damage])
    assert train(folder, stopped, keep_checkpoints=keep_checkpoints, **OPTIONS | {"checkpoint_every": 3}) == 0
    printed = capsys.readouterr().out
    assert ("warning: " in printed and "model_00008.pt is damaged" in printed) == (damage != "deleted")
    assert "from step 4 to 12" in printed
    assert_same_run(stopped, straight)
    assert [path.name for path in list_checkpoints(stopped)] == ["model_00009.pt", "model_00012.pt"][-keep_checkpoints:]


def test_where_no_checkpoint_is_whole_nothing_is_touched(folder, stopped, capsys):
    for path in list_checkpoints(stopped):
        path.write_bytes(path.read_bytes()[:1000])
    before = listing(stopped)
    assert train(folder, stopped, **OPTIONS) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith(f"error: None of the checkpoints in {stopped} can be read") and "--no-resume" in line
    assert printed.out.count("is damaged") == printed.out.count("warning: ") == 2
    assert listing(stopped) == before


def test_checkpoints_beyond_step_99999_are_newer(straight, tmp_path):
    """model_100000.pt sorts before model_99999.pt as text."""
    checkpoint = newest_checkpoint(straight)
    for step in (99_998, 99_999, 100_000):
        path = tmp_path / f"model_{step:05d}.pt"
        write_checkpoint(path, checkpoint | {"step": step})
        delete_checkpoints(path, keep=2, milestone_every=0)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["model_99999.pt", "model_100000.pt"]
    assert newest_checkpoint(tmp_path)["step"] == 100_000


def test_leftovers_of_a_killed_process_are_swept_away(folder, straight, stopped):
    (stopped / "model_00010.pt.part").write_bytes(b"half a checkpoint")
    (stopped / "hf.part").mkdir()
    (stopped / "hf.part" / "config.json").write_text("{")
    assert train(folder, stopped, **OPTIONS) == 0
    assert_same_run(stopped, straight)


# ----------------------------------------------------------------------------------------------------------
# What the same command does in a folder that holds a run


def test_a_finished_run_says_so_and_changes_nothing(folder, straight, tmp_path, capsys):
    shutil.copytree(straight, tmp_path / "out")
    before = listing(tmp_path / "out")
    assert train(folder, tmp_path / "out", **OPTIONS) == 0
    assert "is finished" in capsys.readouterr().out
    assert listing(tmp_path / "out") == before


def test_a_finished_run_whose_export_is_missing_makes_it(folder, straight, tmp_path):
    shutil.copytree(straight, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "hf")
    assert train(folder, tmp_path / "out", **OPTIONS) == 0
    assert_same_run(tmp_path / "out", straight)


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"max_lr": 1e-2, "seed": 7}, ["max_lr was 0.003, now 0.01", "seed was 1337, now 7"]),
        ({"n_layer": 3}, ["n_layer was 2, now 3"]),
        ({"optimizer": "muon"}, ["optimizer was adamw, now muon"]),
        ({"shuffle": False}, ["shuffle was True, now False"]),
    ],
)
def test_a_folder_of_a_different_run_is_refused_with_what_differs(changes, named, folder, straight, tmp_path, capsys):
    shutil.copytree(straight, tmp_path / "out")
    before = listing(tmp_path)
    assert train(folder, tmp_path / "out", **OPTIONS | changes) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and all(text in line for text in named) and "--no-resume" in line
    assert listing(tmp_path) == before


def test_a_folder_of_another_program_is_refused(folder, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "log.txt").write_text("0 train 10.9\n")
    before = listing(tmp_path)
    assert train(folder, tmp_path / "out", **OPTIONS) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and str(tmp_path / "out") in line and "--out-dir" in line
    assert listing(tmp_path) == before


def test_no_resume_sets_the_old_run_aside_and_starts_afresh(folder, straight, tmp_path, capsys):
    shutil.copytree(straight, tmp_path / "out")
    before = listing(straight)
    for number in (1, 2):
        assert train(folder, tmp_path / "out", resume=False, seed=number, **OPTIONS) == 0
        assert f"to {tmp_path / 'out'}.{number}." in capsys.readouterr().out
    assert listing(tmp_path / "out.1") == before
    assert sorted(read_log(tmp_path / "out")) == sorted(read_log(tmp_path / "out.2")) == list(range(12))
    assert read_log(tmp_path / "out") != read_log(tmp_path / "out.2") != read_log(straight)


def test_run_txt_keeps_the_history_of_starts(folder, stopped):
    assert train(folder, stopped, **OPTIONS) == 0
    text = (stopped / "run.txt").read_text()
    assert len(re.findall(r"^started: ", text, re.M)) == 2 == len(re.findall(r"^command: ", text, re.M))


# ----------------------------------------------------------------------------------------------------------
# Signals


def signalled(step, number, times, rank, args):
    """Train, and on `rank` send this process a signal in the middle of a step."""
    steps = []

    def step_and_signal(*args):
        steps.append(1)
        if len(steps) == step + 1 and os.environ.get("RANK", "0") == str(rank):
            for _ in range(times):
                os.kill(os.getpid(), number)
        return train_step(*args)

    with patched(train_gpt2, "train_step", step_and_signal) as train_step:
        train_gpt2.main(args)


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_the_step_and_writes_a_checkpoint(number, status, folder, straight, tmp_path):
    """In step 5, which is no step for a checkpoint: step 5 is finished, 6 steps are in the checkpoint."""
    args = tiny_flags(folder, tmp_path / "out", **OPTIONS)
    output = tmp_path / "output"
    assert run(signalled, 5, number, 1, 0, args, output=output) == [status], output.read_text()
    assert "Stopped after 6 steps" in output.read_text() and "Traceback" not in output.read_text()
    assert sorted(read_log(tmp_path / "out")) == list(range(6))
    assert newest_checkpoint(tmp_path / "out")["step"] == 6
    assert run(train_gpt2.main, args, output=output) == [0], output.read_text()
    assert_same_run(tmp_path / "out", straight)


def test_a_signal_in_the_last_step_leaves_a_run_that_the_same_command_ends(folder, straight, tmp_path):
    args = tiny_flags(folder, tmp_path / "out", **OPTIONS)
    assert run(signalled, 11, signal.SIGTERM, 1, 0, args, output=tmp_path / "output") == [0]
    assert run(train_gpt2.main, args, output=tmp_path / "output") == [0]
    assert_same_run(tmp_path / "out", straight, val_loss=False)  # the checkpoint was there before the last validation


def test_a_second_sigint_leaves_at_once(folder, tmp_path):
    args = tiny_flags(folder, tmp_path / "out", **OPTIONS)
    assert run(signalled, 5, signal.SIGINT, 2, 0, args, output=tmp_path / "output") == [130]
    assert not (tmp_path / "out" / "model_00006.pt").exists()
    assert sorted(read_log(tmp_path / "out")) == list(range(5))


def test_a_signal_to_one_rank_stops_all_at_the_same_step_and_one_process_goes_on(folder, straight, tmp_path):
    args = tiny_flags(folder, tmp_path / "out", **OPTIONS)
    output = tmp_path / "output"
    assert run(signalled, 5, signal.SIGTERM, 1, 1, args, output=output, ranks=2) == [0, 0], output.read_text()
    assert sorted(read_log(tmp_path / "out")) == list(range(6)) and newest_checkpoint(tmp_path / "out")["step"] == 6
    assert train(folder, tmp_path / "out", **OPTIONS) == 0
    assert largest_difference(tmp_path / "out", straight) < 1e-5


# ----------------------------------------------------------------------------------------------------------
# Other numbers of ranks, other batch sizes


def largest_difference(out_dir, straight, steps=None):
    ours, theirs = (read_log(folder) for folder in (out_dir, straight))
    assert list(ours) == list(theirs)
    return max(abs(float(ours[step]) - float(theirs[step])) for step in list(theirs)[:steps])


def killed_at(step, checkpoint, args):
    """Train, and be killed after that step, when that checkpoint, which is written meanwhile, is there."""

    def report_and_die(self, now, *rest, **streams):
        report(self, now, *rest, **streams)
        if now == step:
            while not checkpoint.exists():
                time.sleep(0.01)
            die()

    with patched(Run, "report", report_and_die) as report:
        train_gpt2.main(args)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_moves_to_two_processes_and_back_and_to_another_batch_size(optimizer, folder, tmp_path):
    """One process with B = 8 to step 20, two with B = 2 to 40, one with B = 4 to 60."""
    options = dict(max_steps=60, checkpoint_every=20, val_every=20, optimizer=optimizer)
    assert train(folder, tmp_path / "straight", batch_size=8, **options) == 0
    output = tmp_path / "output"
    first, second, third = (tiny_flags(folder, tmp_path / "out", batch_size=B, **options) for B in (8, 2, 4))
    checkpoint_20, checkpoint_40 = (tmp_path / "out" / f"model_000{step}.pt" for step in (20, 40))
    assert run(killed_at, 22, checkpoint_20, first, output=output) == [-signal.SIGKILL], output.read_text()
    statuses = run(killed_at, 41, checkpoint_40, second, output=output, ranks=2)
    assert statuses[0] == -signal.SIGKILL and statuses[1] != 0, output.read_text()
    assert run(train_gpt2.main, third, output=output) == [0], output.read_text()
    assert "from step 20 to 60" in output.read_text() and "from step 40 to 60" in output.read_text()
    assert largest_difference(tmp_path / "out", tmp_path / "straight", 30) < 1e-5
    assert largest_difference(tmp_path / "out", tmp_path / "straight") < 1e-4


def test_torchrun_restarts_after_kill_9_of_a_rank_and_resumes_by_itself(forked, tmp_path):
    """SIGTERM on one process, then two under torchrun --max-restarts=2, one of which is killed with -9."""
    found = faults.elastic(tmp_path, steps=150)
    assert found["restarts"] == 1
    assert found["first steps"] < 1e-5 and found["largest"] < 1e-4


@pytest.mark.slow
def test_two_agents_with_a_rendezvous_train_as_one(folder, tmp_path):
    """torchrun --nnodes=2 twice on this machine, as on two; the losses are those of one process."""
    options = dict(max_steps=10, checkpoint_every=5, batch_size=2)
    assert train(folder, tmp_path / "one", **options) == 0
    args = tiny_flags(folder, tmp_path / "two", **options)
    agents = faults.start_agents(args, tmp_path)
    assert [agent.wait(120) for agent in agents] == [0, 0], (tmp_path / "agent0").read_text()
    assert largest_difference(tmp_path / "two", tmp_path / "one") < 1e-5


# ----------------------------------------------------------------------------------------------------------
# Parts


def test_the_scaler_and_muons_momentum_survive_a_kill(folder, tmp_path):
    options = OPTIONS | dict(optimizer="muon", dtype="float16")
    assert train(folder, tmp_path / "straight", **options) == 0
    args = tiny_flags(folder, tmp_path / "out", **options)
    assert run(train_until, "in step 9", args, output=tmp_path / "output") == [-signal.SIGKILL]
    assert train(folder, tmp_path / "out", **options) == 0
    assert_same_run(tmp_path / "out", tmp_path / "straight")


def test_a_checkpoint_is_of_its_step_though_training_goes_on_while_it_is_written(folder, straight, tmp_path):
    """A slow disk: the file of step 4 is written while the steps after it run."""

    def slow_save(checkpoint, file):
        time.sleep(0.3)
        return save(checkpoint, file)

    with patched(torch, "save", slow_save) as save:
        assert train(folder, tmp_path / "slow", keep_checkpoints=9, **OPTIONS) == 0
    assert train(folder, tmp_path / "fast", keep_checkpoints=9, **OPTIONS) == 0
    for name in ("model_00004.pt", "model_00008.pt", "model_00012.pt"):
        slow, fast = (torch.load(tmp_path / folder / name, weights_only=True) for folder in ("slow", "fast"))
        assert all(torch.equal(slow["model"][key], fast["model"][key]) for key in fast["model"])
        states = [[t for s in c["optimizer"][0]["state"].values() for t in s.values()] for c in (slow, fast)]
        assert len(states[0]) == 28 * 3 and all(map(torch.equal, *states))
