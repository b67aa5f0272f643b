"""What all programs here share: flags from a dataclass, one-line errors, atomic file writes.

A program declares its options as a dataclass, one commented line per field (the comment is the
flag's help text), and ends in

    if __name__ == "__main__":
        cli.run(main)

A mistake that the user can fix is raised as a `UserError`; `run` prints it as one line, `error: ...`, and
exits with status 2. Any other exception keeps its traceback. `atomic_write` opens files that must never be
seen half-written.
"""

import contextlib
import dataclasses
import difflib
import io
import itertools
import os
import sys
import time
from pathlib import Path

# subtle: OpenMP threads spin while they wait unless told otherwise before torch loads OpenMP, and two threads
# spinning on a contended core can make a small training step 20 times slower
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import tyro


class UserError(Exception):
    """A mistake that the user can fix. The message says in whole sentences what is wrong, what is right, what to do."""


def closest(name, known):
    """A question that names the entry of `known` closest to `name`; an empty string if none is close."""
    matches = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {matches[0]}?" if matches else ""


def suggest(name, known):
    """A sentence that names the entry of `known` closest to `name`, or lists them all."""
    return closest(name, known) or f"Choose from {', '.join(known)}."


def parse(config_class, args=None, default=None):
    """Parse the command line into the dataclass `config_class`; `default`, an instance, holds the defaults.

    Raises UserError for an unknown flag (with the nearest known one) or a value of the wrong type.
    """
    console = io.StringIO()
    try:
        with contextlib.redirect_stderr(console):
            kwargs = {} if default is None else {"default": default}
            config, unknown = tyro.cli(config_class, args=args, return_unknown_args=True, **kwargs)
    except SystemExit as leaving:
        if not leaving.code:  # --help has been printed
            raise
        # tyro draws a box: a title, the message and, from "Argument helptext" or "For full helptext" on, the help text
        lines = [line.strip("│╭╮╰╯─ ") for line in console.getvalue().splitlines()]
        lines = [line for line in lines if line.strip("-")]  # without rules, which are dashes on an ASCII console
        message = " ".join(itertools.takewhile(lambda line: " helptext" not in line, lines[1:])).strip(" .")
        raise UserError(f"The command line is not valid: {message}. Run with --help to see all flags.") from None
    if unknown:
        flags = ["--" + field.name.replace("_", "-") for field in dataclasses.fields(config_class)]
        word = unknown[0].split("=")[0]
        help_text = "Run with --help to see all flags."
        if not word.startswith("-"):
            raise UserError(f"The argument {word!r} was not expected. {help_text}")
        raise UserError(f"There is no flag called {word}. {closest(word, flags) or help_text}")
    return config


RANK_GRACE_SECONDS = 10  # how long the other ranks wait for rank 0 to report an error first


def run(main):
    """Run `main()`; a UserError becomes one line on stderr (under torchrun, rank 0's) and exit status 2."""
    try:
        main()
    except UserError as error:
        if os.environ.get("RANK", "0") != "0":
            # most mistakes are seen by all ranks: rank 0 reports them, and torchrun ends the others meanwhile
            time.sleep(RANK_GRACE_SECONDS)
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


@contextlib.contextmanager
def atomic_write(path, mode="wb", **kwargs):
    """Open `path` for writing so that it appears whole or not at all: a reader never sees half a file.

    Writes to `<path>.part` in the same folder, flushes it to disk and renames it. When anything
    fails, what stood at `path` before stands there still; a full disk, a file-size limit or a
    read-only folder is a UserError.
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
        part.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise UserError(
                f"got '{error.strerror or error}' while writing {path}, needed a folder with room that "
                "may be written, make room (earlier files are whole) and run the same command again"
            ) from error
        raise
