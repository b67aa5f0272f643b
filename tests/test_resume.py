"""A run cannot be lost: killed anywhere, stopped by signals, moved to other ranks, its files torn or not its own.

What a run must give is what an uninterrupted run of the same command gave: bit for bit on one process.
It is finished when its export holds the weights of its last checkpoint, and otherwise exported again.
"""

import errno
import functools
import itertools
import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import train_gpt2
from plumbing.data import tokenizers
from plumbing.files import lock_folder
from plumbing.run import checkpoint as checkpoints
from plumbing.run.checkpoint import load_checkpoint, newest_checkpoint
from plumbing.run.huggingface import export_huggingface
from plumbing.run.signals import Signals
from plumbing.system import devices

from harness import (
    KILLED,
    assert_same_run,
    assert_same_tensors,
    at_steps,
    change_checkpoint,
    die_at,
    examples_file,
    forked_torchrun,
    killed_at,
    listing,
    losses,
    needs,
    patched,
    printed_commands,
    read_log,
    refusal_of,
    refused,
    refused_run,
    run,
    samples,
    signalled,
    signalled_in,
    steps_of,
    tiny_flags,
    tiny_model,
    train,
    wait_for_checkpoint,
    write_half,
)

OPTIONS = dict(max_steps=12, val_every=2, checkpoint_every=4)
SAMPLES = dict(sample_every=2, sample_prompt="abc")  # also where a checkpoint is due, and between checkpoints


@pytest.fixture(scope="module")
def straight(folder):
    """The folder of a run of OPTIONS that nothing interrupts."""
    train(folder, folder.parent / "straight", **OPTIONS | SAMPLES)
    return folder.parent / "straight"


@pytest.fixture
def continued(folder, straight):
    """continued(out): what the command prints that continues the run in `out`, which then is the same."""

    def train_on(out, **changes):
        said = train(folder, out, **OPTIONS | changes)
        assert_same_run(out, straight)
        return said

    return train_on


# {when a process is killed: (the steps of its checkpoints, its last call: of what, with which arguments, how it ends)}.
# It waits for what is written meanwhile
MOMENTS = {
    "before the first step": ([], train_gpt2, "train_step", lambda *args: True),
    "in the validation of step 6": (
        [4],
        train_gpt2,
        "evaluate_val_loss",
        lambda *args: args[-1].loader.position == 48,
        wait_for_checkpoint("out", 4),
    ),
    "half of checkpoint 8 written": ([4], torch, "save", lambda state, file: state["step"] == 8, write_half),
    "checkpoint 12 there, 4 not deleted": (
        [4, 8, 12],
        checkpoints,
        "list_checkpoints",
        lambda folder: Path(folder, "model_00012.pt").exists(),
    ),
    "in the export at the end": (
        [8, 12],
        tokenizers,
        "write_encoding",
        lambda *args: True,
        wait_for_checkpoint("out", 12),
    ),
}


def train_until(name, args):
    """Train, and be killed at this moment."""
    with die_at(*MOMENTS[name][1:]):
        train_gpt2.main(args)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_killed_at_any_moment_ends_bit_for_bit_as_if_never_interrupted(
    moment, folder, straight, continued, out
):
    run(train_until, moment, tiny_flags(folder, out, **OPTIONS | SAMPLES), ends=[KILLED])
    assert steps_of(out) == MOMENTS[moment][0]
    assert (out / ".model_00008.pt.part").exists() == ("half" in moment)
    continued(out, **SAMPLES)
    assert samples(out) == samples(straight)


def test_each_step_has_its_samples_once(straight):
    """But step 0, where a new model's would be noise."""
    assert {step: len(texts) for step, texts in samples(straight).items()} == dict.fromkeys(range(2, 13, 2), 4)


@pytest.fixture(scope="module")
def killed(folder):
    """The folder of a run of --dtype auto that was killed in step 9, with checkpoints 4 and 8."""
    killed = folder.parent / "killed"
    args = tiny_flags(folder, killed, **OPTIONS | SAMPLES | {"dtype": "auto"})
    run(killed_at, 9, 8, args, ends=[KILLED])
    assert steps_of(killed) == [4, 8]
    (killed / ".lock").unlink()  # a killed process leaves the file, without the lock
    return killed


@pytest.fixture
def stopped(killed, out):
    return shutil.copytree(killed, out)


def test_a_damaged_checkpoint_is_skipped_and_named(continued, stopped):
    """With --keep-checkpoints 1 the damaged newer one must not push out the good ones that follow."""
    path = stopped / "model_00008.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    printed = continued(stopped, keep_checkpoints=1, checkpoint_every=3)
    assert "model_00008.pt cannot be read" in printed
    assert "from step 4 to 12" in printed
    assert steps_of(stopped) == [12]
    assert Path("out.1/model_00008.pt").exists()


def test_what_a_killed_process_leaves_is_swept_away_and_a_line_of_the_users_stays(continued, stopped):
    """Also in a run from before a setting existed."""
    change_checkpoint(stopped / "model_00008.pt", lambda content: content["config"].pop("muon_momentum_warmup"))
    for name, text in (("log.txt", "9 tra"), ("samples.txt", "a note of the user's\n")):
        with open(stopped / name, "a") as file:
            file.write(text)
    (stopped / ".model_00010.pt.part").write_bytes(b"half a checkpoint")
    (stopped / ".hf.part").mkdir()
    (stopped / ".hf.part" / "config.json").write_text("{")
    continued(stopped, **SAMPLES)
    assert "a note of the user's\n" in (stopped / "samples.txt").read_text()


def test_a_checkpoint_that_is_deleted_meanwhile_gives_way_to_the_newest(straight):
    """By a run in progress, which has written others."""
    Path("model_00004.pt").touch()

    def list_then_change(folder):
        paths = whole_list(folder)
        Path("model_00004.pt").unlink(missing_ok=True)
        shutil.copy(straight / "model_00012.pt", ".")
        return paths

    with patched(checkpoints, "list_checkpoints", list_then_change) as whole_list:
        assert newest_checkpoint(".")["step"] == 12


def test_in_a_thread_a_run_trains_without_signals(data, out):
    with ThreadPoolExecutor(1) as executor:
        ended = executor.submit(train_gpt2.main, tiny_flags(data, out, max_steps=1)).result()
    assert ended.step == 1


def test_checkpoints_beyond_step_99999_are_newer():
    """model_100000.pt sorts before model_99999.pt as text."""
    for step in (99_999, 100_000):
        Path(f"model_{step}.pt").touch()
    assert steps_of(".") == [99_999, 100_000]


@pytest.mark.gpt2
def test_a_finished_run_says_so_and_changes_nothing(folder, straight):
    """Also where its data are gone."""
    before = listing(straight)
    for data in (folder, "gone"):
        assert "is finished" in train(data, straight, **OPTIONS)
    assert listing(straight) == before


def test_a_changed_flag_is_refused_with_advice_to_continue_only_an_unfinished_run(folder, straight, stopped):
    options = dict(data=folder, **OPTIONS | {"max_lr": 0.1})
    refused_run(options | {"out_dir": stopped}, "has a run", "Leave these flags out to continue it")
    finished = refused_run(options | {"out_dir": straight}, "has a finished run", "in another --out-dir")
    assert "continue" not in finished
    assert "under --no-resume. Give" in refused(train_gpt2.main, "--out-dir", stopped, "--no-resume")


@pytest.mark.gpt2
def test_a_finished_run_is_exported_again_where_hf_holds_another_model(folder, straight, continued, out):
    """But not by a dry run."""
    shutil.copytree(straight, out)
    export_huggingface(tiny_model(vocab_size=320), tokenizers.get_encoding("bytes"), out / "hf")
    before = listing(out)
    train(folder, out, dry_run=True, **OPTIONS)
    assert listing(out) == before
    continued(out)


def test_no_resume_sets_the_old_run_aside_each_time(folder, straight):
    """With what the package wandb keeps there, so that the new run's curve is another one."""
    shutil.copytree(straight, "gpt.v3")
    Path("gpt.v3/wandb/run-20261127-abc").mkdir(parents=True)
    before = listing("gpt.v3")
    for seed in (1, 2):
        train(folder, "gpt.v3", resume=False, seed=seed, max_steps=1)
    assert listing("gpt.v3.1") == before
    assert read_log("gpt.v3.2")[0] != read_log("gpt.v3")[0]
    assert not Path("gpt.v3/wandb").exists()


def killed_while_moving(number, args):
    """Train, and be killed when so many files of the old run have been moved aside."""
    moved = itertools.count()
    with die_at(Path, "rename", lambda *args: next(moved) == number):
        train_gpt2.main(args)


@pytest.mark.parametrize("moved", [1, 2])
def test_a_run_of_which_half_is_moved_aside_is_never_continued_with_half_of_its_log(
    moved, folder, straight, continued, out
):
    """Until its last checkpoint is moved it is the run at an earlier step, with the log of all steps before that."""
    shutil.copytree(straight, out)
    run(killed_while_moving, moved, tiny_flags(folder, out, resume=False, **OPTIONS), ends=[KILLED])
    continued(out)


@needs("SIGHUP")
@pytest.mark.parametrize("name, times, status, first", [("SIGUSR2", 3, 0, ["--no_resume"]), ("SIGINT", 1, 130, [])])
def test_a_signal_ends_the_step_and_writes_a_checkpoint(name, times, status, first, folder, straight, out):
    """In step 5, which is no step for a checkpoint: step 5 is finished, 6 steps are in the checkpoint."""
    args = [*first, *tiny_flags(folder, out, **OPTIONS)]
    [said] = run(signalled, 5, name, times, 0, args, ends=[status])
    assert "Stopped after 6 steps" in said and ("without --no-resume continues" in said) == bool(first)
    assert "Traceback" not in said and "Stopping after this evaluation" not in said
    assert sorted(read_log(out)) == list(range(8)), "two more, for the next start to compare"
    assert newest_checkpoint(out)["step"] == 6
    [words] = printed_commands(said)
    assert ", from step 6 to " in refusal_of(train_gpt2.main, *words[2:])[1], "it does not start over"
    assert_same_run(out, straight)


def numbers_of(names):
    return [signal.Signals[f"SIG{name}"] for name in names.split()]


@needs("SIGHUP")
def test_whatever_a_scheduler_can_be_told_to_send_stops_a_run_and_crashes_timers_and_news_do_not():
    """By signal(7), these end a process that does not catch them. Later they do so again."""
    numbers = numbers_of("HUP INT QUIT USR1 USR2 TERM XCPU")
    others = numbers_of("SEGV BUS ABRT PROF ALRM PIPE CHLD WINCH TSTP CONT")
    before = list(map(signal.getsignal, others))
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)  # the tests may run under nohup
    with Signals() as signals:
        assert list(map(signal.getsignal, others)) == before
        for number in numbers:
            os.kill(os.getpid(), number)
    assert signals == numbers
    assert set(map(signal.getsignal, numbers)) == {signal.SIG_DFL}


@needs("SIGHUP")
def test_where_both_are_ignored_a_closed_terminal_stops_nothing_and_sigint_does():
    """nohup ignores the one, a script the other in what it starts with an ampersand."""
    numbers = numbers_of("HUP INT")
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
    with Signals() as signals:
        for number in numbers:
            os.kill(os.getpid(), number)
    assert signals == [signal.SIGINT]


def test_the_dtype_that_was_chosen_belongs_to_the_run(continued, stopped):
    """Where auto means float16 now, a float32 run stays one."""

    def choose(name, *args, **options):
        return choose_dtype("float16" if name == "auto" else name, *args, **options)

    with patched(devices, "choose_dtype", choose) as choose_dtype:
        continued(stopped, dtype="auto")


def test_a_second_sigint_leaves_at_once(folder, out):
    run(signalled, 5, "SIGINT", 2, 0, tiny_flags(folder, out), ends=[130])
    assert not (out / "model_00006.pt").exists()
    assert sorted(read_log(out)) == list(range(5))


def test_a_signal_to_one_rank_stops_all_at_the_same_step(folder, straight, out):
    run(signalled, 5, "SIGTERM", 1, 1, tiny_flags(folder, out, **OPTIONS), ranks=2)
    assert sorted(read_log(out)) == list(range(8)), "two more, for the next start to compare"
    assert newest_checkpoint(out)["step"] == 6
    train(folder, out, **OPTIONS)
    assert_close_losses(out, straight)


def assert_close_losses(out_dir, straight):
    assert losses(out_dir) == pytest.approx(losses(straight), abs=1e-5, rel=0)


def test_a_run_moves_to_two_processes_of_a_smaller_batch_size(folder, out):
    """One process with B = 8 to step 4, two with B = 2 to step 8, one with B = 4 to the end; with both optimizers."""
    options = dict(checkpoint_every=4, val_every=0, optimizer="muon")
    train(folder, "straight", batch_size=8, **options)
    run(killed_at, 5, 4, tiny_flags(folder, out, batch_size=8, **options), ends=[KILLED])
    as_two = tiny_flags(folder, out, batch_size=2, **options)
    said, _ = run(killed_at, 9, 8, as_two, ranks=2, ends=[KILLED, None])
    assert "from step 4 to 12" in said
    assert "from step 8 to 12" in train(folder, out, batch_size=4, **options)
    assert_close_losses(out, "straight")


def train_killed_once(args):
    def kill(step, parts):
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and step == 6 and parts.world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with at_steps(kill):
        train_gpt2.main(args)


@needs("SIGKILL")
def test_torchrun_restarts_after_kill_9_of_a_rank_and_resumes_by_itself(folder, straight, stopped):
    """Also under --no-resume: the run that is continued is the one that this torchrun began, and not an older one."""
    args = tiny_flags(folder, stopped, resume=False, **OPTIONS | {"batch_size": 2})
    [said] = run(forked_torchrun, train_killed_once, args, 2, 1)
    assert "from step 0 to 12" in said
    assert "from step 4 to 12" in said
    assert_close_losses(stopped, straight)
    assert Path("out.1/model_00008.pt").exists()
    assert not Path("out.2").exists()


@pytest.mark.gpt2
def test_a_restart_by_torchrun_continues_no_run_but_its_own(folder, stopped, monkeypatch):
    """Under --no-resume: its first start had ended before it set the old run aside. Both have no id but the process."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert "from step 0 to 1" in train(folder, stopped, resume=False, max_steps=1)
    assert Path("out.1/model_00008.pt").exists()


def test_the_scaler_and_muons_momentum_survive_a_kill(folder, out):
    options = dict(checkpoint_every=4, optimizer="muon", dtype="float16", val_every=0)
    train(folder, "straight", **options)
    run(killed_at, 9, 8, tiny_flags(folder, out, **options), ends=[KILLED])
    # the scale in the checkpoint counts, and not the one that a scaler begins with
    with patched(torch.amp, "GradScaler", functools.partial(torch.amp.GradScaler, init_scale=1.0)):
        train(folder, out, **options)
    assert_same_run(out, "straight")


def test_a_checkpoint_is_of_its_step_and_waits_alone_for_a_slow_disk(folder, straight, out):
    """Each is written when one more step is done. At the next one training waits, so that copies do not pile up."""
    done = [threading.Event() for _ in range(12)]
    begun, steps_ahead = [], []

    def slow_save(checkpoint, file):
        step = checkpoint["step"]
        if step < 12:
            assert done[step].wait(60)
            time.sleep(0.05)
            steps_ahead.append(begun[-1] - step)
        return save(checkpoint, file)

    options = OPTIONS | dict(checkpoint_every=1, keep_checkpoints=9, val_every=0)
    with patched(torch, "save", slow_save) as save:
        with at_steps(lambda step, parts: begun.append(step), lambda step, parts, _: done[step].set()):
            train(folder, out, **options)
    assert steps_ahead == [0] * 11
    ours, theirs = load_checkpoint(out / "model_00008.pt"), load_checkpoint(straight / "model_00008.pt")
    for part in ("model", "optimizer"):
        assert_same_tensors(ours[part], theirs[part])


@pytest.mark.parametrize("name, stream", [("evaluate_val_loss", "val"), ("evaluate_hellaswag", "hella")])
def test_a_signal_in_an_evaluation_stops_all_ranks_when_it_is_done(name, stream, data, out):
    """And the evaluations behind it are left out. Only rank 0 has the examples."""
    examples = examples_file(Path(), ["ab c", "abc"])
    options = dict(batch_size=2, max_steps=6, hellaswag_every=4, hellaswag_data=examples)
    first, second = run(signalled_in, name, 2, 1, tiny_flags(data, out, **options), ranks=2)
    assert "Stopping after this evaluation.\n" in second
    assert "Stopped after 4 steps" in first
    assert newest_checkpoint(out)["step"] == 4
    assert sorted(read_log(out, stream)) == [0, 4]
    assert (4 in read_log(out, "hella")) == (stream == "hella")
    train(data, out, **options)
    assert sorted(read_log(out, stream)) == [0, 4, 6]


def test_what_a_signal_in_the_last_evaluation_leaves_undone_the_same_command_does(folder, straight, continued, out):
    [said] = run(signalled_in, "evaluate_val_loss", 7, 0, tiny_flags(folder, out, **OPTIONS | SAMPLES))
    assert "Stopped after 12 steps" in said
    assert not (out / "hf").exists()
    continued(out, **SAMPLES)
    assert samples(out) == samples(straight)
    assert newest_checkpoint(out)["finished"]


def test_a_run_that_ends_with_a_validation_loss_that_is_no_number_keeps_the_checkpoint_before(folder, out):
    """The last update spoils the weights, which no later step shows."""

    def spoil(step, parts, done):
        if step == 11:
            torch.nn.init.constant_(parts.raw_model.lm_head.weight, torch.nan)

    with at_steps(after=spoil):
        train(folder, out, keep_checkpoints=1)
    assert steps_of(out) == [8, 12]
    assert load_checkpoint(out / "model_00008.pt")["model"]["lm_head.weight"].isfinite().all()


@pytest.mark.parametrize("changes", [{}, {"resume": False}, {"seed": 7}])
def test_a_folder_belongs_to_one_process(changes, folder, stopped):
    """Nothing is looked at before the folder is locked."""
    with lock_folder(stopped):
        before = listing(".")
        refused_run(OPTIONS | dict(data=folder, out_dir=stopped) | changes, f"{stopped} is in use by another process")
        assert listing(".") == before


def test_a_folder_that_becomes_another_one_meanwhile_is_written_no_more(folder, straight, stopped):
    shutil.copytree(straight, "others")

    def replace(step, parts):
        if not stopped.is_symlink():
            stopped.rename("moved")
            stopped.symlink_to("others")

    with at_steps(replace):
        refused_run(OPTIONS | dict(data=folder, out_dir=stopped), "has been moved or replaced")
    assert listing("others") == listing(straight)


def test_what_a_run_does_not_continue_is_moved_aside(folder, straight, stopped):
    """The log of a run that was stopped before its first checkpoint, and best weights, of another run or not."""
    for path in stopped.glob("model_*.pt"):
        path.unlink()
    shutil.copy(straight / "model_00008.pt", stopped / "model_best.pt")
    before = listing(stopped)
    said = train(folder, stopped, seed=7, **OPTIONS)
    assert listing("out.1") == before
    assert read_log(stopped, "val")[0] != read_log(straight, "val")[0]  # a seed has its own weights
    assert "Moved log.txt, model_best.pt, run.txt, samples.txt, train_gpt2-" in said


def test_files_of_others_survive_a_run_in_their_folder(folder, monkeypatch):
    """--out-dir . in a folder full of other things, with and without --no-resume.

    A run that has logged nothing leaves nothing that the first one would move aside.
    """
    os.makedirs("mine/film.part")
    monkeypatch.chdir("mine")
    for name in ("film.part/reel", "disk.part", "meta.json", "model_5.pt", "other.pt", "shard_train_000001.npy"):
        Path(name).write_text("dear", encoding="utf-8")
    before = listing(".")
    Path("log.txt").touch()
    Path("run.txt").write_bytes(b"caf\xe9\n")  # notes of the user's
    for changes in ({}, {"resume": False}):
        train(folder, ".", max_steps=1, **changes)
        after = listing(".")
        assert {name: after.get(name) for name in before} == before
    assert Path("../mine.1/model_00001.pt").exists()
    assert Path("../mine.1/run.txt").read_bytes().startswith(b"caf\xe9\n")


def test_damaged_lines_of_a_log_are_counted(folder, straight, stopped):
    log = stopped / "log.txt"
    lines = log.read_bytes().splitlines(keepends=True)
    odd = [b"\n", b"\0" * 50 + b"\n", "0 caf\u00e9 1\n".encode("latin-1"), b"1 train 0.1 0.2\n"]
    log.write_bytes(b"".join([*odd, b"0 norm inf\n", *lines]))  # float16 skips a step whose norm is infinite
    assert f"{len(odd)} damaged lines" in train(folder, stopped, **OPTIONS)
    assert log.read_text(encoding="utf-8").startswith("0 norm inf\n")
    log.write_bytes(log.read_bytes().removeprefix(b"0 norm inf\n"))
    assert_same_run(stopped, straight)


@needs("mkfifo")
@pytest.mark.parametrize("name", ["run.txt", "log.txt", "samples.txt", "model_00008.pt"])
def test_what_is_no_regular_file_is_one_line(name, folder, stopped):
    """It is not waited for, nor replaced: the run goes on before such a checkpoint, and cannot write its own."""
    (stopped / name).unlink()
    os.mkfifo(stopped / name)
    refused_run(OPTIONS | dict(data=folder, out_dir=stopped), f"{name} is a")


@pytest.mark.gpt2
@pytest.mark.parametrize("refuses", ["mkdir", "rename"])
def test_where_nothing_can_be_moved_out_of_a_folder_it_is_moved_aside_inside(refuses, folder, stopped, monkeypatch):
    """The folder is a mount point, so that a rename crosses to another disk, or its parent belongs to someone else."""
    outside, original = stopped.resolve().with_name("out.1"), getattr(Path, refuses)
    moved = []  # the first file can be moved

    def refuse_outside(path, *args, **options):
        leaves = outside in Path(*args).parents
        if path == outside or (leaves and moved):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        if leaves:
            moved.append(path)
        return original(path, *args, **options)

    monkeypatch.setattr(Path, refuses, refuse_outside)
    train(folder, stopped, resume=False, **OPTIONS)
    assert (stopped / "old.1" / "log.txt").exists()
    assert (stopped / "hf").exists()
    assert not outside.exists()
