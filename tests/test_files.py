"""plumbing/files.py: files that appear whole or not at all, and folders that belong to one process."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, patched

from plumbing import files
from plumbing.cli import UserError
from plumbing.files import atomic_write, lock_folder


def hold(folder):
    """Another process that has locked `folder`."""
    code = f"import time; from plumbing.files import lock_folder; lock = lock_folder({str(folder)!r}); print('locked')"
    command = [sys.executable, "-c", code + "; import sys; sys.stdout.flush(); time.sleep(60)"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "locked\n"
    return process


def test_a_folder_belongs_to_one_process_until_it_is_killed(tmp_path):
    process = hold(tmp_path / "run")
    with pytest.raises(UserError, match=f"in use by process {process.pid} on {os.uname().nodename}, since 2"):
        lock_folder(tmp_path / "run")
    lock_folder(tmp_path / "run", ".lock-part-1-of-2").close()  # the parts of a data set share a folder
    process.send_signal(signal.SIGKILL)
    process.wait()
    with lock_folder(tmp_path / "run"):
        assert str(os.getpid()) in (tmp_path / "run" / ".lock").read_text()
    assert not (tmp_path / "run" / ".lock").exists()


def test_a_lock_leaves_no_trace_of_a_folder_in_which_nothing_was_written(tmp_path):
    lock_folder(tmp_path / "a" / "b").close()
    assert list(tmp_path.iterdir()) == []
    with lock_folder(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "file").write_text("x")
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["file"]


def test_a_lock_on_a_file_that_its_owner_deletes_meanwhile_is_taken_again(tmp_path):
    flock, calls = files.fcntl.flock, []

    def flock_after_owner_left(descriptor, operation):
        calls.append(descriptor)
        if len(calls) == 1:
            (tmp_path / ".lock").unlink()
        flock(descriptor, operation)

    with patched(files.fcntl, "flock", flock_after_owner_left), lock_folder(tmp_path):
        assert len(calls) == 2
        with pytest.raises(UserError, match="in use"):
            lock_folder(tmp_path)


@pytest.mark.parametrize("name, value", [("fcntl", None), ("flock", OSError(errno.ENOLCK, "No locks available"))])
def test_where_nothing_can_be_locked_a_note_says_so(tmp_path, capsys, name, value):
    def refuse(*args):
        raise value

    owner = files if name == "fcntl" else files.fcntl
    with patched(owner, name, value and refuse), lock_folder(tmp_path / "run"):
        pass
    assert capsys.readouterr().out.startswith("note: ") and not (tmp_path / "run").exists()


def test_a_file_system_that_refuses_the_clean_up_too_is_one_line(tmp_path):
    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with patched(Path, "unlink", refuse), patched(os, "fsync", refuse):
        with pytest.raises(UserError, match="Read-only file system"):
            with atomic_write(tmp_path / "x") as file:
                file.write(b"x")
