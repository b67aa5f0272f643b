"""plumbing/files.py: files that appear whole or not at all, and folders that belong to one process."""

import errno
import os
import re
import shutil
import stat
import subprocess
import sys

import pytest
from plumbing.cli.console import UserError
from plumbing.files import atomic_write, lock_folder, new_output, open_regular, remove_folder

from harness import ROOT, needs, patched


def lock_elsewhere(folder):
    """Another process, which has locked a folder and keeps it until its input ends."""
    code = "import sys; from plumbing.files import lock_folder; lock = lock_folder(sys.argv[1]); "
    command = [sys.executable, "-c", code + "print('locked', flush=True); sys.stdin.read()", folder]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "locked\n"
    return process


def test_a_folder_belongs_to_one_process_until_it_is_killed(tmp_path):
    """Its file stays behind, and on a shared disk all users may lock it."""
    process = lock_elsewhere(tmp_path / "run")
    with pytest.raises(UserError, match=f"{tmp_path / 'run'} is in use by another process. Wait until it has ended"):
        lock_folder(tmp_path / "run")
    process.kill()
    process.wait()
    lock = tmp_path / "run" / ".lock"
    assert os.name == "nt" or lock.stat().st_mode & 0o777 == 0o666
    with lock_folder(tmp_path / "run"):
        pass
    assert not lock.exists()
    lock.write_text("a file of the user's own", encoding="utf-8")
    with lock_folder(tmp_path / "run"):
        pass
    assert lock.read_text(encoding="utf-8") == "a file of the user's own"


@pytest.mark.parametrize(
    "leave", [lambda folder: folder.rename(f"{folder}.old"), shutil.rmtree], ids=["moved", "deleted"]
)
def test_a_folder_that_was_moved_or_deleted_is_left_to_the_run_that_is_there_now(leave, tmp_path):
    """The end of the first one leaves the second one's folder and lock alone."""
    with lock_folder(tmp_path / "out") as first:
        first.check()
        leave(tmp_path / "out")
        second = lock_elsewhere(tmp_path / "out")
        if (tmp_path / "out.old").exists():  # the lock has moved, too
            with pytest.raises(UserError, match="out.old is in use by another process"):
                lock_folder(tmp_path / "out.old")
        with pytest.raises(UserError, match="has been moved or replaced"):
            first.check()
    with pytest.raises(UserError, match="in use by another process"):
        lock_folder(tmp_path / "out")
    second.communicate("")
    assert second.returncode == 0


def test_where_nothing_can_be_locked_a_note_says_so(tmp_path, capsys):
    """As on some network file systems. A lock that outlives a killed process is none."""

    def refuse(*args):
        raise OSError(errno.ENOSYS, "Function not implemented")

    with patched(pytest.importorskip("fcntl"), "flock", refuse), lock_folder(tmp_path / "run"):
        pass
    assert capsys.readouterr().out.startswith("note: ") and not (tmp_path / "run").exists()


@needs("mkfifo")
def test_only_regular_files_are_read_and_replaced_and_a_pipe_is_not_waited_for(tmp_path):
    (tmp_path / "file").write_text("x", encoding="utf-8")
    (tmp_path / "link").symlink_to("file")
    with open_regular(tmp_path / "link", "r", encoding="utf-8") as file:
        assert file.read() == "x"
    with pytest.raises(UserError, match="is a folder, but it should be a file"):
        open_regular(tmp_path)
    pipe = tmp_path / ".lock"
    os.mkfifo(pipe)
    for use in (open_regular, lambda path: atomic_write(path).__enter__(), lambda path: lock_folder(path.parent)):
        with pytest.raises(UserError, match="is a pipe or a device, (but it should be a file|so it is not replaced)"):
            use(pipe)
    remove_folder(pipe)
    assert {"file", "link", ".lock"} == set(os.listdir(tmp_path))


@pytest.mark.parametrize("name", ["x", ".x.part", "x.part", ".lock"])
def test_nothing_is_written_through_a_link_and_no_file_of_the_users_own_is_removed(tmp_path, name):
    (tmp_path / "theirs").write_text("theirs", encoding="utf-8")
    (tmp_path / name).symlink_to("theirs")
    try:
        with lock_folder(tmp_path), new_output(tmp_path / "x") as file:
            file.write("ours")
    except UserError as error:
        assert re.search("is a link, so it is not replaced|exists already", str(error)) and name in ("x", ".lock")
    else:
        assert (tmp_path / "x").read_text() == "ours" and not (tmp_path / "x").is_symlink()
        with pytest.raises(UserError, match="exists already"):
            new_output(tmp_path / "x")
    assert (tmp_path / name).is_symlink() == (name != ".x.part")
    assert (tmp_path / "theirs").read_text(encoding="utf-8") == "theirs"


def test_a_file_is_on_disk_before_it_has_its_name_and_then_the_folder_is(tmp_path):
    """After a power cut there is the old file or the new one, and once the write has ended, the new one."""
    flushed = []

    def note(descriptor):
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else os.fstat(descriptor).st_size
        flushed.append((kind, (tmp_path / "x").read_bytes()))

    (tmp_path / "x").write_bytes(b"old")
    with patched(os, "fsync", note), atomic_write(tmp_path / "x") as file:
        file.write(b"newer")
    assert flushed == [(5, b"old"), ("folder", b"newer")][: 1 if os.name == "nt" else 2]


def test_two_writers_of_one_file_do_not_mix(tmp_path):
    with pytest.raises(UserError, match="Another process is writing"):
        with atomic_write(tmp_path / "x") as first:
            first.write(b"half")
            with atomic_write(tmp_path / "x") as second:
                second.write(b"whole")
    assert (tmp_path / "x").read_bytes() == b"whole"
