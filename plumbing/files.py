"""Safe reading and writing of files, and locks on folders. A killed process leaves neither half a file nor a lock."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from plumbing.cli.console import UserError, note

Name = str | os.PathLike[str]
SAMPLE_BLOCK = 4096  # bytes in a block of `file_sample`
SAMPLE_BLOCKS = 4


def kind_of(path: Name) -> str:
    """The kind of thing at a path, behind any link: "a file" (also if there is nothing), "a folder" and so on."""
    if os.path.isdir(path):
        return "a folder"
    if os.path.isfile(path) or not os.path.exists(path):
        return "a file"
    return "a pipe or a device"


def open_regular(path: Name, mode: str = "rb", **kwargs: Any) -> IO[Any]:
    """Like open(), for reading regular files only: a folder is a UserError, and so is a pipe, which might block."""
    kind = kind_of(path)
    if kind != "a file":
        raise UserError(f"{path} is {kind}, but it should be a file. Give a regular file instead.")
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
    """Context that adds the file's name to errors of the disk, such as EIO: only errors of open() come with a name."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or path
        raise


def file_sample(path: Name) -> bytes:
    """The size of a file and a fixed sample of its bytes. Changes between the sampled blocks are not seen."""
    with named_errors(path), open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        sampled = size.to_bytes(8, "big")
        for i in range(SAMPLE_BLOCKS):
            file.seek(max(0, size - SAMPLE_BLOCK) * i // (SAMPLE_BLOCKS - 1))
            sampled += file.read(SAMPLE_BLOCK)
    return sampled


def remove_folder(path: Name) -> None:
    """Delete a folder, but no link to one, and no pipe, for which rmtree would wait. Errors are ignored."""
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

    Writes to the hidden `.<name>.part` in the same folder, flushes it to disk, renames it and flushes the folder.
    Nothing but a regular file is replaced, and no link is followed.
    """
    path = Path(path)
    part, file = path.with_name(f".{path.name}.part"), None
    check_replaceable(path)
    try:
        part.unlink(missing_ok=True)  # a killed process may have left it; of a link, the target stays
        with open(part, mode.replace("w", "x"), **kwargs) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if os.fstat(file.fileno()).st_nlink == 0:  # another process has deleted it to write its own
                raise UserError(
                    f"Another process is writing {path} as well. Wait until it has ended, and try again."
                )
        os.replace(part, path)
        flush_folder(path.parent)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"Could not write {path}: {reason}. Check its folder and the free space on its disk."
        ) from error
    finally:
        if file and os.path.lexists(part):  # it was not renamed
            with contextlib.suppress(OSError):  # a read-only file system refuses this, too
                part.unlink()


def flush_folder(path: Name) -> None:
    """Flush the names in a folder to disk. Windows cannot."""
    with contextlib.suppress(OSError):
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def check_new_output(path: Name) -> None:
    """Raise UserError if the output file that the user names exists."""
    if os.path.lexists(path):
        raise UserError(f"{path} exists already. Choose another name, or delete it first.")


def new_output(path: Name) -> contextlib.AbstractContextManager[IO[Any]]:
    """Open the new text file that the user names for output, and write it atomically."""
    check_new_output(path)
    return atomic_write(path, "w", encoding="utf-8")


def free_name(path: Name) -> Path:
    """`path`.1 or, if that exists, `path`.2 and so on: a free name for what is at `path`, which makes room."""
    number = 1
    while os.path.lexists(f"{path}.{number}"):
        number += 1
    return Path(f"{path}.{number}")


class FolderLock(contextlib.AbstractContextManager["FolderLock"]):
    """A lock on a folder. This process holds it until it leaves the `with` statement or ends."""

    def __init__(self, path: Path, lock: Any, created: list[Path]):
        """path: the lock file; lock: filelock's, already acquired; created: the folders that were made for it."""
        self.path = path
        self.folder = path.parent
        self.lock = lock
        self.created = created
        self.file = os.stat(path)  # filelock keeps it open, so no other file gets its number meanwhile

    def is_there(self) -> bool:
        """Whether the lock's path still leads to this file: someone may have moved its folder away."""
        return self.path.exists() and os.path.samestat(os.stat(self.path), self.file)

    def check(self) -> None:
        """Raise UserError if the locked folder is no longer the one at its path."""
        if not self.is_there():
            raise UserError(
                f"{self.folder} has been moved or replaced. Put it back and run the same command again."
            )

    def __exit__(self, *exception):
        """Release the lock; remove its file and, if nothing else was written, the folders that were made for it."""
        with contextlib.suppress(OSError):  # on Windows, filelock itself removes the file
            if self.is_there() and self.file.st_size == 0:  # a file with content is the user's
                self.path.unlink()  # others who wait for it notice that, and filelock starts them again
        self.lock.release()
        with contextlib.suppress(OSError):  # not empty
            for folder in self.created:
                folder.rmdir()


def lock_folder(folder: Name) -> FolderLock:
    """Make and lock `folder`, so that no two processes write to it at once. UserError if another one has locked it.

    The system locks the file .lock in it until the process ends. Some network file systems have no such locks: then a
    note says so.
    """
    import filelock  # takes a while

    path = Path(folder) / ".lock"
    created = [parent for parent in path.parents if not parent.exists()]
    check_replaceable(path)  # filelock would lock a pipe
    # 0o666: on a shared disk other users can lock it as well. No fallback: such locks would outlive a killed process
    lock = filelock.FileLock(path, mode=0o666, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(timeout=0.2)  # a second attempt, in case the file is deleted during the first one
    except filelock.Timeout:
        raise UserError(
            f"{folder} is in use by another process. Wait until it has ended, or choose another folder."
        ) from None
    except OSError as error:
        if error.filename:  # the file could not be made, for example on a full disk
            raise
        note(f"{folder} cannot be locked ({error}). Do not start a second program that writes to it.")
    return FolderLock(path, lock, created)
