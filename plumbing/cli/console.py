"""Console output of every program: messages, errors in one line, the next commands, and `run`, which calls its main.

Importing torch takes seconds, so a program parses its flags before that: --help and mistyped flags need not wait.
"""

import errno
import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]  # the folder of the programs
SCRIPTS = {path.name for path in ROOT.glob("*.py")}


def output_of(*command: str) -> str:
    """The output of a command; "" if it is not installed."""
    if not shutil.which(command[0]):
        return ""
    return subprocess.run(command, capture_output=True, text=True, errors="replace").stdout.strip()


class UserError(Exception):
    """A mistake that the user can fix. Its message says in full sentences what is wrong and how to fix it."""


# ----- Messages -----------------------------------------------------------------------------------------


# characters that must not reach a terminal: controls, changes of the writing direction and lone surrogates
CONTROL = r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"


def plain(text: object, limit: int = 200) -> str:
    """A text of a file, a name or a model in one line: cut to `limit` characters, with control characters escaped."""
    text = str(text)
    shown = re.sub(CONTROL, escape, text[:limit])
    if len(text) > limit:
        shown += "..."
    return shown


def harmless(text: str) -> str:
    """A text of any length with its control characters escaped, except line ends and tabs."""
    return re.sub(rf"(?![\n\t]){CONTROL}", escape, text)


def escape(match):
    return repr(match[0])[1:-1]


def first_line(error: BaseException) -> str:
    """The first line of an exception's text without its full stop, or its type if it has no text."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")


def count(number: int, noun: str) -> str:
    """(1, "document") -> "1 document", (2000, "document") -> "2,000 documents"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def short(number: float) -> str:
    """A positive number in at most four characters: 1.234 -> "1.2", 58234 -> "58K", 2.5e9 -> "2.5B"."""
    unit = ""
    for larger in "KMBT":
        if number >= 999.5:
            number, unit = number / 1000, larger
    return f"{number:.0f}{unit}" if number >= 9.95 else f"{number:.1f}{unit}"


def duration(seconds: float) -> str:
    """A time in at most four characters: 156 -> "2:36", 1000 -> "16m", 16300 -> "4.5h", 400000 -> "4d"."""
    minutes = int(seconds) // 60
    if minutes < 10:
        return f"{minutes}:{int(seconds) % 60:02d}"
    if minutes < 100:
        return f"{minutes}m"
    if minutes < 6000:
        return f"{short(minutes / 60)}h"
    return f"{minutes // 1440}d"


def print_next(*commands: Sequence[object]) -> None:
    """Print the commands to run next, quoted so that they work as printed.

    A command is a list of words and of tuples (flag, value, ...): ["python", "sample.py", ("-m", "log")].
    """
    print("\nNext:")
    for command in commands:
        print("   ", *map(quote_group, command), flush=True)


def quote_group(group):
    """Quote a word, or a flag with its values, for a shell. A program's name becomes its path from here."""
    if not isinstance(group, tuple):
        word = str(group)
        if word in SCRIPTS:
            word = os.path.relpath(ROOT / word)
        return quote(word)
    flag, *values = group
    if len(values) == 1 and str(values[0]).startswith("-"):  # it would be read as a flag
        return f"{flag}={quote(str(values[0]))}"
    return " ".join([flag, *(quote(str(value)) for value in values)])


def quote(word: str) -> str:
    """Quote a word for a shell, with double quotes where they are enough: cmd.exe knows no others."""
    separators = "/" if os.name != "nt" else r"/\\"
    if re.fullmatch(rf"[\w@%+=:,.{separators}-]+", word):
        return word
    if not word.isprintable():
        escaped = [char if char.isprintable() and char not in "\\'" else f"\\U{ord(char):08x}" for char in word]
        return f"$'{''.join(escaped)}'"
    if re.search(r'["$`\\!]', word):
        return shlex.quote(word)
    return f'"{word}"'


# ----- Running a program --------------------------------------------------------------------------------

RANK_GRACE_SECONDS = 10  # how long the other ranks wait for rank 0 to report an error first


def run(main: Callable[..., Any], *args: Any, output_is_product: bool = False) -> Any:
    """Run `main(*args)` and return its result. If the result has a `status` other than 0, exit with that.

    A mistake that the user can fix becomes one line on stderr and exit status 2. When output can no longer be written,
    the program continues without it. With `output_is_product`, a closed pipe ends `main` silently, and a full disk is
    an error.
    """
    # subtle: OpenMP's threads spin while they wait, unless this is set before torch loads OpenMP. Two threads spinning
    # on one core can make a small training step 20 times slower
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # the hub's client prints two lines each time it repeats a request, and tries a hanging download six times.
    # With these settings, `downloads.retry` reports a failure within a minute
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", "7")  # seconds
    # pyarrow's own allocator reserves 1 GB of address space, and a cluster may allow only 2 GB (ulimit -v)
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    sys.excepthook = report_exception  # for exceptions outside of `run`, such as Ctrl-C during the imports
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # it was closed before the program began
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8", errors="replace"))
        elif stream is getattr(sys, f"__{name}__"):  # not a stream that a test or a notebook put there
            outlive(stream, is_product=output_is_product and name == "stdout")
    try:
        result = main(*args)
        sys.stdout.flush()  # the last line may have no newline
        if status := getattr(result, "status", 0):
            sys.exit(status)
        return result
    except KeyboardInterrupt as error:
        report_exception(type(error), error, error.__traceback__)
        leave(130)  # 128 + SIGINT
    except Exception as error:
        report_exception(type(error), error, error.__traceback__)
        leave(1)


ADVICE = {  # for errors of the operating system
    errno.ENOENT: "Check the path.",
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "Check its permissions."),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "Free some space there and run the same command again."),
    **dict.fromkeys((errno.EIO, errno.ESTALE, errno.ETIMEDOUT), "Check that disk or file server."),
    **dict.fromkeys((errno.EMFILE, errno.EAGAIN), "Raise the limits on open files and processes with ulimit."),
}


def explain(error: BaseException) -> str:
    """One line that explains an error of the user, the machine or the installation, from any library; "" for a bug."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        return (
            f"The package {error.name} is not installed for {sys.executable}. Activate the virtual environment (source "
            ".venv/bin/activate), or install the packages: pip install -r requirements.txt"
        )
    if is_out_of_memory(error):
        return (
            f"There is not enough memory. {first_line(error)}. Close other programs and run the same command again. "
            "Training needs less with a lower --batch-size."
        )
    if isinstance(error, RuntimeError) and re.search("(closed|reset) by peer|remote process exit", str(error)):
        return "Another rank has ended. Its own output says why."  # gloo's error, or NCCL's
    if isinstance(error, OSError) and (error.filename or error.errno in ADVICE):
        advice = ADVICE.get(error.errno or 0, "Check that this is the path you meant.")
        return f"Could not open, read or write {error.filename or 'a file'}: {error.strerror}. {advice}"
    return ""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception or one of its causes says that memory ran out. Libraries may keep only the text."""
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    said = "".join(traceback.format_exception(error, limit=0))  # types and texts of the error and its causes
    words = "MemoryError|out of memory|not enough memory|ALLOC_FAILED|[Cc]an(not|'t) allocate memory"
    words += "|failed to map segment|overflowed"  # a size beyond any memory overflows
    return re.search(words, said) is not None


def report_exception(kind, error, trace):
    """Print one line for Ctrl-C, one line (and exit with 2) for an error that the user can fix, else a traceback."""
    if kind is KeyboardInterrupt:
        print0("interrupted", file=sys.stderr)
    elif message := explain(error):
        fail(message)
    else:
        sys.__excepthook__(kind, error, trace)


def is_rank_0() -> bool:
    """Whether this process is rank 0 or the only one. Works before the ranks are connected."""
    return os.environ.get("RANK", "0") == "0"


def progress_bar(*args: Any, **options: Any) -> Any:
    """tqdm's bar, only on rank 0 and in a terminal, because it would fill a log file. It disappears when done."""
    from tqdm import tqdm  # slow to import

    disable = None if is_rank_0() else True  # None: disabled unless stderr is a terminal
    return tqdm(*args, leave=False, disable=disable, **options)


def print0(*args: object, file: Any = None) -> None:
    """Print on rank 0 only. All that others wrote goes through here: `harmless` keeps it from steering the terminal."""
    if is_rank_0():
        print(*[harmless(str(arg)) for arg in args], file=file, flush=True)


def note(text: str, file: Any = None) -> None:
    """Print a note in one line, on rank 0 only. `plain` makes it safe to quote a file or a model."""
    print0(f"note: {plain(text, limit=2000)}", file=file)


def leave(status):
    """Exit. With other ranks, exit without any cleanup, because closing the process group would wait for them."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        os._exit(status)
    sys.exit(status)


def fail(message):
    """Print an error in one line on stderr and exit with status 2. Under torchrun, the other ranks let rank 0 do it."""
    if not is_rank_0() and "TORCHELASTIC_RUN_ID" in os.environ:
        # all ranks see most mistakes. Rank 0 reports them, and torchrun ends the others while they wait here
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(RANK_GRACE_SECONDS)
    print(f"error: {plain(message, limit=2000)}", file=sys.stderr, flush=True)
    leave(2)


def outlive(stream: Any, is_product: bool) -> None:
    """Let the program continue when stdout or stderr cannot be written, because the disk is full or the reader gone.

    is_product: whether this output is the reason to run the program. Then the first failure ends it.
    """
    stream.reconfigure(errors="replace", line_buffering=True)  # its encoding may lack characters

    def attempt(method, *args):
        nonlocal is_product
        try:
            return method(stream, *args)
        except OSError as error:
            if not is_product:
                return None
            is_product = False  # report it once: the rest of the buffer fails again at exit
            if isinstance(error, BrokenPipeError):
                sys.exit(141)  # 128 + SIGPIPE, as a shell shows it
            raise UserError(f"Could not write the output: {error.strerror}.") from None

    for name in ("write", "flush"):
        setattr(stream, name, functools.partial(attempt, getattr(type(stream), name)))
