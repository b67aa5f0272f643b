"""What is there is never replaced unasked, and one process at a time owns a run's folder.

What lies there and is not the run's own is refused, moved aside or left alone, and the run is right in the end.
"""

import errno
import os
import shutil
from pathlib import Path

import pytest
import train_gpt2
from plumbing.files import lock_folder

from harness import (
    KILLED,
    assert_same_run,
    at_steps,
    killed_at,
    listing,
    make_shards,
    needs,
    read_log,
    refused,
    run,
    tiny_flags,
    train,
)

OPTIONS = dict(max_steps=6, checkpoint_every=2, keep_checkpoints=3, val_every=3)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A folder with data/, straight/, a finished run, and run/, which was killed after 4 of its 6 steps."""
    folder = tmp_path_factory.mktemp("good")
    make_shards(folder / "data")
    train(folder / "data", folder / "straight", **OPTIONS)
    args = tiny_flags(folder / "data", folder / "run", **OPTIONS)
    run(killed_at, 5, 4, args, ends=[KILLED])
    (folder / "run" / ".lock").unlink()
    return folder


@pytest.fixture
def folder(good, tmp_path):
    return shutil.copytree(good, tmp_path / "folder")


def resume(folder, **changes):
    return train(folder / "data", folder / "run", **OPTIONS | changes)


def refused_resume(folder, **changes):
    args = tiny_flags(folder / "data", folder / "run", **OPTIONS | changes)
    return refused(train_gpt2.main, *args)


@pytest.mark.parametrize("changes", [{}, {"resume": False}, {"seed": 7}])
def test_a_folder_belongs_to_one_process(changes, folder):
    """Nothing is looked at before the folder is locked."""
    with lock_folder(folder / "run"):
        before = listing(folder)
        assert f"{folder / 'run'} is in use by another process" in refused_resume(folder, **changes)
        assert listing(folder) == before


def test_a_folder_that_becomes_another_one_meanwhile_is_written_no_more(folder):
    others = shutil.copytree(folder / "straight", folder / "others")
    before = listing(others)

    def replace(step, parts):
        if not (folder / "run").is_symlink():
            (folder / "run").rename(folder / "moved")
            (folder / "run").symlink_to(others)

    with at_steps(replace):
        assert "has been moved or replaced" in refused_resume(folder)
    assert listing(others) == before


def test_what_a_run_does_not_continue_is_moved_aside(folder):
    """The log of a run that was stopped before its first checkpoint, and best weights, of another run or not."""
    for path in (folder / "run").glob("model_*.pt"):
        path.unlink()
    shutil.copy(folder / "straight" / "model_00004.pt", folder / "run" / "model_best.pt")
    before = listing(folder / "run")
    said = resume(folder, seed=7)
    assert listing(folder / "run.1") == before
    assert read_log(folder / "run", "val")[0] != read_log(folder / "straight", "val")[0]  # a seed has its own weights
    assert "Moved log.txt, model_best.pt, run.txt, train_gpt2-" in said


def test_files_of_others_survive_a_run_in_their_folder(folder, monkeypatch):
    """--out-dir . in a folder full of other things, with and without --no-resume.

    A run that has logged nothing leaves nothing that the first one would move aside.
    """
    place = folder / "mine"
    (place / "film.part").mkdir(parents=True)
    for name in ("film.part/reel", "disk.part", "meta.json", "model_5.pt", "other.pt", "shard_train_000001.npy"):
        (place / name).write_text("dear", encoding="utf-8")
    before = listing(place)
    (place / "log.txt").touch()
    (place / "run.txt").write_bytes(b"caf\xe9\n")  # notes of the user's
    monkeypatch.chdir(place)
    for changes in ({}, {"resume": False}):
        train(folder / "data", ".", max_steps=1, **changes)
        after = listing(place)
        assert {name: after.get(name) for name in before} == before
    assert (folder / "mine.1" / "model_00001.pt").exists()
    assert (folder / "mine.1" / "run.txt").read_bytes().startswith(b"caf\xe9\n")


def test_damaged_lines_of_a_log_are_counted(folder):
    log = folder / "run" / "log.txt"
    lines = log.read_bytes().splitlines(keepends=True)
    odd = [b"\n", b"\0" * 50 + b"\n", "0 caf\u00e9 1\n".encode("latin-1"), b"1 train 0.1 0.2\n"]
    log.write_bytes(b"".join([*odd, b"0 norm inf\n", *lines]))  # float16 skips a step whose norm is infinite
    said = resume(folder)
    assert f"{len(odd)} damaged lines" in said
    assert log.read_text(encoding="utf-8").startswith("0 norm inf\n")
    log.write_bytes(log.read_bytes().removeprefix(b"0 norm inf\n"))
    assert_same_run(folder / "run", folder / "straight")


@needs("mkfifo")
@pytest.mark.parametrize("name", ["run.txt", "log.txt", "samples.txt", "model_00004.pt"])
def test_what_is_no_regular_file_is_one_line(name, folder):
    """It is not waited for, nor replaced: the run goes on before such a checkpoint, and cannot write its own."""
    path = folder / "run" / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    assert f"{name} is a" in refused_resume(folder)


@pytest.mark.gpt2
@pytest.mark.parametrize("refuses", ["mkdir", "rename"])
def test_where_nothing_can_be_moved_out_of_a_folder_it_is_moved_aside_inside(refuses, folder, monkeypatch):
    """The folder is a mount point, so that a rename crosses to another disk, or its parent belongs to someone else."""
    run, outside, original = folder / "run", folder.resolve() / "run.1", getattr(Path, refuses)
    moved = []  # the first file can be moved

    def refuse_outside(path, *args, **options):
        leaves = outside in Path(*args).parents
        if path == outside or (leaves and moved):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        if leaves:
            moved.append(path)
        return original(path, *args, **options)

    monkeypatch.setattr(Path, refuses, refuse_outside)
    resume(folder, resume=False)
    assert (run / "old.1" / "log.txt").exists()
    assert (run / "hf").exists()
    assert not (folder / "run.1").exists()
