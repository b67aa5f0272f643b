"""What every script here does alike: flags from a dataclass, errors in one line, files written whole.

A script declares its options as a dataclass, one commented line per field (the comment is the
flag's help text), and ends in

    if __name__ == "__main__":
        cli.run(main)

A mistake that the user can mend is raised as a `UserError`; `run` prints it as one line,
`error: got ..., needed ..., do ...`, and leaves with status 2. Anything else keeps its traceback.
Files that must never be seen half-written are opened by `atomic_write`.
"""

import contextlib
import dataclasses
import difflib
import io
import itertools
import os
import sys
import time

# subtle: OpenMP's threads wait by spinning unless told otherwise before torch loads them, and two spinning threads
# on a core that is also wanted elsewhere can make a small training step 20 times slower
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import tyro


class UserError(Exception):
    """A mistake that the user can mend. The text says what was got, what was needed, what to do."""


def suggest(name, known):
    """The hint that names the entry of `known` closest to `name`, or lists them all."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"choose from {', '.join(known)}"


def parse(config_class, args=None, default=None):
    """An instance of the dataclass `config_class` from the command line; `default` sets its defaults.

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
        # tyro draws a box: a title, the message, and from "Argument helptext" or "For full helptext" on its help
        lines = [line.strip("│╭╮╰╯─ ") for line in console.getvalue().splitlines()]
        lines = [line for line in lines if line.strip("-")]  # without rules, which are dashes on an ASCII console
        message = " ".join(itertools.takewhile(lambda line: " helptext" not in line, lines[1:])).strip(" .")
        raise UserError(f"got flags that don't parse ({message}), needed them as in --help") from None
    if unknown:
        flags = ["--" + field.name.replace("_", "-") for field in dataclasses.fields(config_class)]
        got = unknown[0].split("=")[0]
        raise UserError(f"got {got}, needed a flag that exists, {suggest(got, flags)}")
    return config


RANK_GRACE_SECONDS = 10  # seconds that ranks other than 0 leave to rank 0 for saying what is wrong


def run(main):
    """Run `main()`; a UserError becomes one line on stderr (under torchrun, rank 0's) and status 2."""
    try:
        main()
    except UserError as error:
        if os.environ.get("RANK", "0") != "0":
            # most mistakes are seen by all ranks: rank 0 says so, and torchrun ends the others meanwhile
            time.sleep(RANK_GRACE_SECONDS)
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


def atomic_write(*args, **kwargs):
    """plumbing.files.atomic_write, for callers that have not moved yet."""
    from plumbing import files  # imports this file

    return files.atomic_write(*args, **kwargs)
