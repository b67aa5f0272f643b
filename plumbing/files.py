"""Files and folders that survive whatever ends the program."""

import contextlib
import os
from pathlib import Path

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
