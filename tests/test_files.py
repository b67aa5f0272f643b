"""plumbing/files.py: files that appear whole or not at all, and folders that belong to one process."""

import errno
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from plumbing.cli.console import UserError
from plumbing.files import atomic_write, lock_folder, new_output, open_regular, remove_folder

from harness import needs, patched


def lock_elsewhere(folder):
    """Another process, which has locked a folder and keeps it until its input ends."""
    code = "import sys; from plumbing.files import lock_folder; lock = lock_folder(sys.argv[1]); "
    command = [sys.executable, "-c", code + "print('locked', flush=True); sys.stdin.read()", folder]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "locked\n"
    return process


def test_a_folder_belongs_to_one_process_until_it_is_killed():
    """Its file stays behind, and on a shared disk all users may lock it."""
    process = lock_elsewhere("run")
    with pytest.raises(UserError, match="run is in use by another process. Wait until it has ended"):
        lock_folder("run")
    process.kill()
    process.wait()
    lock = Path("run/.lock")
    assert os.name == "nt" or lock.stat().st_mode & 0o777 == 0o666
    with lock_folder("run"):
        pass
    assert not lock.exists()
    lock.write_text("a file of the user's own", encoding="utf-8")
    with lock_folder("run"):
        pass
    assert lock.read_text(encoding="utf-8") == "a file of the user's own"


@pytest.mark.parametrize("leave", [lambda: os.rename("out", "old"), lambda: shutil.rmtree("out")])
def test_a_folder_that_was_moved_or_deleted_is_left_to_the_run_that_is_there_now(leave):
    """The end of the first one leaves the second one's folder and lock alone."""
    with lock_folder("out") as first:
        first.check()
        leave()
        second = lock_elsewhere("out")
        if os.path.exists("old"):  # the lock has moved, too
            with pytest.raises(UserError, match="old is in use by another process"):
                lock_folder("old")
        with pytest.raises(UserError, match="has been moved or replaced"):
            first.check()
    with pytest.raises(UserError, match="in use by another process"):
        lock_folder("out")
    second.communicate("")
    assert second.returncode == 0


def test_where_nothing_can_be_locked_a_note_says_so(output):
    """As on some network file systems. A lock that outlives a killed process is none."""

    def refuse(*args):
        raise OSError(errno.ENOSYS, "Function not implemented")

    with patched(pytest.importorskip("fcntl"), "flock", refuse), lock_folder("run"):
        pass
    assert output().startswith("note: ") and not os.path.exists("run")


@needs("mkfifo")
def test_only_regular_files_are_read_and_replaced_and_a_pipe_is_not_waited_for():
    Path("file").write_text("x", encoding="utf-8")
    os.symlink("file", "link")
    with open_regular("link") as file:
        assert file.read() == b"x"
    with pytest.raises(UserError, match="is a folder, but it should be a file"):
        open_regular(".")
    os.mkfifo(".lock")
    for use in (open_regular, lambda path: atomic_write(path).__enter__(), lambda path: lock_folder(".")):
        with pytest.raises(UserError, match="is a pipe or a device, (but it should be a file|so it is not replaced)"):
            use(".lock")
    remove_folder(".lock")
    assert {"file", "link", ".lock"} == set(os.listdir())


@pytest.mark.parametrize("name", ["x", ".x.part", "x.part", ".lock"])
def test_nothing_is_written_through_a_link_and_no_file_of_the_users_own_is_removed(name):
    Path("theirs").write_text("theirs", encoding="utf-8")
    os.symlink("theirs", name)
    try:
        with lock_folder("."), new_output("x") as file:
            file.write("ours")
    except UserError as error:
        assert re.search("is a link, so it is not replaced|exists already", str(error)) and name in ("x", ".lock")
    else:
        assert Path("x").read_text() == "ours" and not os.path.islink("x")
        with pytest.raises(UserError, match="exists already"):
            new_output("x")
    assert os.path.islink(name) == (name != ".x.part")
    assert Path("theirs").read_text(encoding="utf-8") == "theirs"


def test_a_file_is_on_disk_before_it_has_its_name_and_then_the_folder_is():
    """After a power cut there is the old file or the new one, and once the write has ended, the new one."""
    flushed = []

    def note(descriptor):
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else os.fstat(descriptor).st_size
        flushed.append((kind, Path("x").read_bytes()))

    Path("x").write_bytes(b"old")
    with patched(os, "fsync", note), atomic_write("x") as file:
        file.write(b"newer")
    assert flushed == [(5, b"old"), ("folder", b"newer")][: 1 if os.name == "nt" else 2]


def test_two_writers_of_one_file_do_not_mix():
    with pytest.raises(UserError, match="Another process is writing"):
        with atomic_write("x") as first:
            first.write(b"half")
            with atomic_write("x") as second:
                second.write(b"whole")
    assert Path("x").read_bytes() == b"whole"
