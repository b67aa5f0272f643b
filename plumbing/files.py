"""Atomic writes of files, and locks of folders; both hold however the program ends."""

import contextlib
import os
import socket
import time
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

from plumbing.cli import UserError


@contextlib.contextmanager
def atomic_write(path, mode="wb", **kwargs):
    """Open `path` for writing atomically: readers see the complete file or none at all, never half a file.

    Writes to `<path>.part` in the same folder, flushes it to disk and renames it. If anything fails,
    an existing file at `path` is left untouched; a full disk, a file-size limit or a read-only folder
    is a UserError.
    """
    path = Path(path)
    part = path.with_name(path.name + ".part")
    try:
        with open(part, mode, **kwargs) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        with contextlib.suppress(OSError):  # a read-only file system refuses this, too
            part.unlink()
        if isinstance(error, OSError):
            raise UserError(
                f"Could not write {path}: {error.strerror or error}. Check that its folder exists, is writable "
                "and has free space, then run the same command again."
            ) from error
        raise


class FolderInUse(UserError):
    """Another process has locked the folder."""


class FolderLock:
    """A lock on a folder, which this process holds until it closes the lock or ends."""

    def __init__(self, folder, name, descriptor, created):
        self.path, self.descriptor, self.created = Path(folder) / name, descriptor, created

    def close(self):
        """Release the lock, and remove the folders that it created and that are still empty."""
        if self.descriptor is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()
            os.close(self.descriptor)
            self.descriptor = None
        with contextlib.suppress(OSError):  # not empty
            for folder in self.created:
                folder.rmdir()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()


def lock_folder(folder, name=".lock"):
    """Lock `folder`, creating it, so that two processes cannot write to it at once. FolderInUse if another has it.

    The kernel holds the lock (flock on the file `name`), so it ends with the process; the file says which process
    has it. Close the lock, or use it in a `with` statement. On Windows and some network file systems there is no
    such lock: a note says so, and the folder is not protected.
    """
    folder = Path(folder)
    path = folder / name
    created = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:  # nothing can be written here, as the first write will report
            return FolderLock(folder, name, None, created)
        try:
            if fcntl is None:
                raise OSError("this system has no flock")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 1000).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            raise FolderInUse(
                f"{folder} is in use by {owner}. Wait until it has ended, or choose another folder."
            ) from None
        except OSError as error:
            print(f"note: {folder} cannot be locked ({error}). Do not start a second program that writes to it.")
            break
        # subtle: the previous owner may have deleted the file after we opened it, and then nobody else sees our lock
        if is_same_file(descriptor, path):
            break
        os.close(descriptor)
    owner = f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}"
    with contextlib.suppress(OSError):  # on a full disk the lock holds without this
        os.truncate(descriptor, 0)
        os.write(descriptor, owner.encode())
    return FolderLock(folder, name, descriptor, created)


def is_same_file(descriptor, path):
    """Whether the open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
