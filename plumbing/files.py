"""Files read and written safely, and folders locked; a killed process leaves neither half a file nor a lock."""

import contextlib
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from plumbing.program import UserError

Name = str | os.PathLike[str]
STREAM = "a pipe or a device"
SAMPLE_BLOCK, SAMPLE_BLOCKS = 4096, 4  # `file_sample` reads this many bytes per block, and blocks per file


def kind_of(path: Name) -> str:
    """What is at a path, or where the link at it leads: "a file" (also if there is nothing), "a folder" or STREAM."""
    if os.path.isdir(path):
        return "a folder"
    return "a file" if os.path.isfile(path) or not os.path.exists(path) else STREAM


def open_regular(path: Name, mode: str = "rb", **kwargs: Any) -> IO[Any]:
    """Like open(), for reading regular files only: a folder is a UserError, and so is a pipe, which might block."""
    kind = kind_of(path)
    if kind != "a file":
        raise UserError(f"{path} is {kind}, but it should be a file. Give a regular file in its place.")
    return open(path, mode, **kwargs)


def read_json(path: Name, remedy: str) -> dict[str, Any]:
    """Read the JSON object in a file. Raises a UserError that ends in `remedy` if the file holds none."""
    try:
        with open_regular(path) as file:
            content = json.load(file)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: it is not a JSON object. {remedy}")
    return content


@contextlib.contextmanager
def named_errors(path: Name) -> Iterator[None]:
    """Add the name of the file to an error of the disk, such as EIO or ESTALE: only errors of open() come with one."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or path
        raise


def file_sample(path: Name) -> bytes:
    """The size of a file and a fixed sample of its bytes; changes between the sampled ones are not seen."""
    with named_errors(path), open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        sampled = size.to_bytes(8, "big")
        for i in range(SAMPLE_BLOCKS):
            file.seek(max(0, size - SAMPLE_BLOCK) * i // (SAMPLE_BLOCKS - 1))
            sampled += file.read(SAMPLE_BLOCK)
    return sampled


def remove_folder(path: Name) -> None:
    """Delete a folder, but no link to one, and no pipe of that name: rmtree would wait for it. Errors are ignored."""
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)


def check_replaceable(path: Name) -> None:
    """Raise UserError if a folder, a link, a pipe or a device is at `path`."""
    kind = "a link" if os.path.islink(path) else kind_of(path)
    if kind != "a file":
        raise UserError(f"{path} is {kind}, so it is not replaced. Move it away, or choose another name.")


@contextlib.contextmanager
def atomic_write(path: Name, mode: str = "wb", **kwargs: Any) -> Iterator[IO[Any]]:
    """Open `path` for writing atomically: readers see what was there before or the complete file, never half a file.

    Writes to the hidden `.<name>.part` in the same folder, flushes it to disk and renames it. Nothing but a regular
    file is replaced, and no link is followed.
    """
    path = Path(path)
    part, file = path.with_name(f".{path.name}.part"), None
    check_replaceable(path)
    try:
        part.unlink(missing_ok=True)  # left by a killed process; a link is removed, not what it points to
        with open(part, mode.replace("w", "x"), **kwargs) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if os.fstat(file.fileno()).st_nlink == 0:  # another process has deleted it, to begin its own
                raise UserError(
                    f"Another process is writing {path}, too. Wait until it has ended, and try again."
                )
        check_replaceable(path)
        os.replace(part, path)
    except BaseException as error:
        if file:  # only if it was created here: otherwise it belongs to another process
            with contextlib.suppress(OSError):  # a read-only file system refuses this, too
                part.unlink()
        if isinstance(error, OSError):
            reason = error.strerror or error
            raise UserError(
                f"Could not write {path}: {reason}. Check its folder and the free space on its disk."
            ) from error
        raise


def is_stream(path: Name) -> bool:
    """Whether a path is a pipe, a device, or a stream that this process has open, which may be a regular file."""
    return str(path).startswith(("/dev/stdout", "/dev/stderr", "/dev/fd/")) or kind_of(path) == STREAM


def check_new_output(path: Name) -> None:
    """Raise UserError if an output file named by the user exists. Pipes and devices, such as /dev/stdout, may exist."""
    if os.path.lexists(path) and not is_stream(path):
        raise UserError(f"{path} exists already. Choose another name, or delete it first.")


def new_output(path: Name) -> contextlib.AbstractContextManager[IO[Any]]:
    """Open a text file that the user names for output: a new one, written atomically, or a pipe or device as it is."""
    check_new_output(path)
    if is_stream(path):
        return open(path, "a", encoding="utf-8")
    return atomic_write(path, "w", encoding="utf-8")


def free_name(path: Name) -> Path:
    """`path`.1 or, if that exists, `path`.2 and so on: the place to which what is at `path` is moved aside."""
    number = 1
    while os.path.lexists(f"{path}.{number}"):
        number += 1
    return Path(f"{path}.{number}")


class FolderLock(contextlib.AbstractContextManager["FolderLock"]):
    """A lock on a folder, which this process holds until it leaves the `with` statement or ends."""

    def __init__(self, path: Path, lock: Any, created: list[Path]):
        """path: of the lock file; lock: filelock's, taken; created: the folders that were made for it."""
        self.path, self.folder, self.lock, self.created = path, path.parent, lock, created
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        with contextlib.suppress(OSError):  # a full disk; Windows, where nobody writes to a locked file
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {since}", encoding="utf-8")
        self.owner = read_owner(path)

    def is_ours(self) -> bool:
        """Whether the lock at its path is still this one: its folder may have been moved, and another made there."""
        # not by its inode, whose number some network file systems change
        return self.path.exists() and read_owner(self.path) == self.owner

    def check(self) -> None:
        """Raise UserError if the locked folder is no longer the one at its path."""
        if not self.is_ours():
            raise UserError(
                f"{self.folder} has been moved or replaced. Put it back and run the same command again."
            )

    def __exit__(self, *exception):
        """Release the lock, and remove the folders that it created and that are still empty."""
        is_ours = self.is_ours()
        with contextlib.suppress(OSError):
            if is_ours:
                self.path.unlink()  # filelock lets those who wait for a deleted file begin again
        self.lock.release()
        with contextlib.suppress(OSError):  # not empty
            for folder in self.created if is_ours else ():
                folder.rmdir()


def read_owner(path: Path) -> str:
    """What a lock file says of the process that has it; "" if it cannot be read, as on Windows."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")[:1000]
    except OSError:
        return ""


def lock_folder(folder: Name, name: str = ".lock") -> FolderLock:
    """Lock `folder`, creating it, so that two processes cannot write to it at once. UserError if another has it.

    The system holds the lock on the file `name`, so it ends with the process. Some network file systems have no such
    locks: then a note says so.
    """
    import filelock  # takes a while

    path = Path(folder) / name
    created = [parent for parent in path.parents if not parent.exists()]
    check_replaceable(path)  # a pipe in its place could be locked, but reading it would wait for ever
    owner = read_owner(path)
    if owner and not owner.startswith("process "):
        raise UserError(f"{path} is not a lock of this program. Move it away, or choose another folder.")
    path.parent.mkdir(parents=True, exist_ok=True)
    # 0o666: on a shared disk the next user can lock it, too. No fallback: such locks would outlive a killed process
    options: dict[str, Any] = dict(mode=0o666, thread_local=False)
    try:
        lock = filelock.FileLock(path, **options, fallback_to_soft=False)
    except TypeError:  # an older version, which has no such fallback
        lock = filelock.FileLock(path, **options)
    try:
        lock.acquire(timeout=0.2)  # a second attempt, in case the file is deleted during the first one
    except filelock.Timeout:
        user = read_owner(path) or "another process"
        raise UserError(
            f"{folder} is in use by {user}. Wait until it has ended, or choose another folder."
        ) from None
    except PermissionError as error:
        raise UserError(f"{path} cannot be locked: {error.strerror}. Choose another folder.") from None
    except (OSError, NotImplementedError) as error:
        print(f"note: {folder} cannot be locked ({error}). Do not start a second program that writes to it.")
    return FolderLock(path, lock, created)
