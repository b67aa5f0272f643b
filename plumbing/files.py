"""Files read and written safely, and folders locked; a killed process leaves neither half a file nor a lock."""

import contextlib
import json
import os
import socket
import time
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

from plumbing.cli import UserError

STREAM = "a pipe or a device"


def kind_of(path):
    """What is at a path, or where the link at it leads: "a file" (also if there is nothing), "a folder" or STREAM."""
    if os.path.isdir(path):
        return "a folder"
    return "a file" if os.path.isfile(path) or not os.path.exists(path) else STREAM


def open_regular(path, mode="rb", **kwargs):
    """Like open(), for reading regular files only: a folder is a UserError, and so is a pipe, which might block."""
    kind = kind_of(path)
    if kind != "a file":
        raise UserError(f"{path} is {kind}, but it should be a file. Give a regular file in its place.")
    return open(path, mode, **kwargs)


def read_json(path, remedy):
    """Read the JSON object in a file. Raises a UserError that ends in `remedy` if the file holds none."""
    try:
        with open_regular(path) as file:
            content = json.load(file)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: it is not a JSON object. {remedy}")
    return content


def check_replaceable(path):
    """Raise UserError if a folder, a link, a pipe or a device is at `path`."""
    kind = "a link" if os.path.islink(path) else kind_of(path)
    if kind != "a file":
        raise UserError(f"{path} is {kind}, so it is not replaced. Move it away, or choose another name.")


@contextlib.contextmanager
def atomic_write(path, mode="wb", **kwargs):
    """Open `path` for writing atomically: readers see the complete file or none at all, never half a file.

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
            if not is_same_file(file.fileno(), part):
                raise UserError(
                    f"Another process is writing {path}, too. Wait until it has ended, and try again."
                )
        check_replaceable(path)
        os.replace(part, path)
    except BaseException as error:
        if file:  # and not one that another process has just opened
            with contextlib.suppress(OSError):  # a read-only file system refuses this, too
                part.unlink()
        if isinstance(error, OSError):
            reason = error.strerror or error
            raise UserError(
                f"Could not write {path}: {reason}. Check its folder and the room on its disk."
            ) from error
        raise


def is_stream(path):
    """Whether a path is a pipe, a device, or a stream that this process has open, which may be a regular file."""
    return str(path).startswith(("/dev/stdout", "/dev/stderr", "/dev/fd/")) or kind_of(path) == STREAM


def check_new_output(path):
    """Raise UserError if an output file named by the user exists. Pipes and devices, such as /dev/stdout, may exist."""
    if os.path.lexists(path) and not is_stream(path):
        raise UserError(f"{path} exists already. Choose another name, or delete it first.")


def new_output(path):
    """Open a text file that the user names for output: a new one, written atomically, or a pipe or device as it is."""
    check_new_output(path)
    if is_stream(path):
        return open(path, "a", encoding="utf-8")
    return atomic_write(path, "w", encoding="utf-8")


def free_name(path):
    """`path`.1 or, if that exists, `path`.2 and so on: the place to which what is at `path` is moved aside."""
    number = 1
    while os.path.lexists(f"{path}.{number}"):
        number += 1
    return Path(f"{path}.{number}")


class FolderLock(contextlib.AbstractContextManager):
    """A lock on a folder, which this process holds until it leaves the `with` statement or ends."""

    def __init__(self, path, descriptor, created):
        self.path, self.folder, self.descriptor, self.created = path, path.parent, descriptor, created

    def check(self):
        """Raise UserError if the locked folder is no longer the one at its path."""
        if not is_same_file(self.descriptor, self.path):
            raise UserError(
                f"{self.folder} has been moved or replaced. Put it back and run the same command again."
            )

    def __exit__(self, *exception):
        """Release the lock, and remove the folders that it created and that are still empty."""
        with contextlib.suppress(OSError):
            self.path.unlink()  # while nobody else can lock it
        os.close(self.descriptor)
        with contextlib.suppress(OSError):  # not empty
            for folder in self.created:
                folder.rmdir()


def lock_folder(folder, name=".lock"):
    """Lock `folder`, creating it, so that two processes cannot write to it at once. UserError if another has it.

    The kernel holds the lock (flock on the file `name`), so it ends with the process; the file says which process
    has it. Windows and some network file systems have no such lock: then a note says so.
    """
    path = Path(folder) / name
    created = [parent for parent in path.parents if not parent.exists()]
    check_replaceable(path)  # a pipe in its place could be locked, but reading it would wait for ever
    path.parent.mkdir(parents=True, exist_ok=True)
    is_anothers = path.exists() and not os.access(path, os.W_OK)  # another user's, which can only be locked
    flags = os.O_RDONLY if is_anothers else os.O_RDWR | os.O_CREAT
    descriptor = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
    owner = os.read(descriptor, 1000).decode(errors="replace")
    try:
        if fcntl is None:
            raise OSError("this system has no flock")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        user = owner or "another process"
        raise UserError(
            f"{folder} is in use by {user}. Wait until it has ended, or choose another folder."
        ) from None
    except OSError as error:
        print(f"note: {folder} cannot be locked ({error}). Do not start a second program that writes to it.")
    # subtle: the previous owner may have deleted the file after we opened it, and then nobody else sees our lock
    if not is_same_file(descriptor, path):
        os.close(descriptor)
        return lock_folder(folder, name)
    if owner and not owner.startswith("process "):
        os.close(descriptor)
        raise UserError(f"{path} is not a lock of this program. Move it away, or choose another folder.")
    owner = f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}"
    with contextlib.suppress(OSError):  # on a full disk the lock holds without this
        os.truncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.write(descriptor, owner.encode())
    return FolderLock(path, descriptor, created)


def is_same_file(descriptor, path):
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
