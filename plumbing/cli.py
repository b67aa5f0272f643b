"""Shared by all programs here: flags from a dataclass, one-line errors, a console that may fail.

A program declares its options as a dataclass, one line per field, and ends in `cli.run(main)`. Importing torch takes
seconds: a program that needs it runs its parser once above that import, too.
A flag's help text is the comment at the end of its field's line or, if there is none, the comment above it; any other
comment is a heading. Annotated[str, "-m"] gives a field a second name, Annotated[str, "positional"] makes it an
argument without a flag.
"""

import contextlib
import dataclasses
import difflib
import errno
import functools
import inspect
import io
import json
import os
import re
import shlex
import shutil
import signal
import sys
import textwrap
import time
import traceback
import types
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin

# subtle: OpenMP threads spin while they wait unless told otherwise before torch loads OpenMP, and two threads
# spinning on a contended core can make a small training step 20 times slower
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def is_rank_0():
    return os.environ.get("RANK", "0") == "0"


def report_exception(kind, error, traceback):
    """Print a traceback, except for Ctrl-C."""
    if kind is not KeyboardInterrupt:
        sys.__excepthook__(kind, error, traceback)
    elif is_rank_0():
        print("interrupted", file=sys.stderr, flush=True)


# `run` cannot catch Ctrl-C during the imports. Programs in other folders that import this one keep their tracebacks
if Path(sys.argv[0]).resolve().parent == Path(__file__).resolve().parents[1]:
    sys.excepthook = report_exception


class UserError(Exception):
    """A mistake that the user can fix. Its message says in whole sentences what is wrong and what to do."""


# ----- Flags --------------------------------------------------------------------------------------------

FLAG = re.compile("--?[A-Za-z]")  # the beginning of a flag; -1 is a value
SEE_HELP = "Run with --help to see all flags."
PLACEHOLDERS = {int: "INT", float: "FLOAT", str: "STR", tuple: "..."}
SWITCH = {"true": True, "false": False}


def parse(config_class, args=None, default=None, presets=None, synonyms=None):
    """Parse the command line into the dataclass `config_class`. Raises one UserError with all mistakes.

    default: an instance with the defaults, or presets: {name: an instance} for --preset; synonyms: as OTHER_TRAINERS.
    """
    words = list(sys.argv[1:] if args is None else args)
    flags = {}
    for field in dataclasses.fields(config_class):
        kind, names = read_field(field)
        flags |= dict.fromkeys(names, (field.name, kind))
    others = (synonyms or {}) | {f"--preset {name}": name for name in presets or ()}
    meanings = {name.strip("-").lower(): name for name in [*flags, "--help"]}
    meanings |= {theirs: ours for ours, names in others.items() for theirs in names.split()}
    arguments, *groups = split_at_flags(words)
    values, errors = {}, []
    for word, *following in groups:
        flag, equals, text = word.partition("=")
        name = flag.replace("_", "-")
        if name not in flags:
            advice = closest(name.strip("-"), meanings) or SEE_HELP
            errors.append(f"There is no flag called {flag}. {advice}")
            continue
        field, kind = flags[name]
        if equals:
            following.insert(0, text)
        elif kind is SWITCH:
            following.insert(0, "true")
        if kind is tuple:
            values[field] = tuple(following)
            continue
        arguments += following[1:]
        try:
            values[field] = read_value(kind, following)
        except ValueError as error:
            errors.append(f"{name} {error}")
        if name.startswith("--no-"):
            values[field] = not values.get(field)
    positional = [field for name, (field, _) in flags.items() if not FLAG.match(name)]
    values |= zip(positional, arguments)
    for word in arguments[len(positional) :][:1]:
        if word.endswith(".py") and presets:  # nanoGPT's config/train_shakespeare_char.py
            meanings[word] = "--preset, which names a set of flags"
        errors.append(f"The argument {word!r} was not expected. {closest(word, meanings) or SEE_HELP}")
    if presets:
        default = presets[values.get("preset", config_class.preset)]
    default = default or config_class()
    if "-h" in words or "--help" in words:
        print(help_text(config_class, default))
        sys.exit(0)
    if errors:
        raise UserError(" ".join(errors))
    return dataclasses.replace(default, **values)


def read_field(field):
    """Return the kind of a field's values: int, float, str, tuple or {text: value}; and its flags, or ["PROMPT"]."""
    kind, aliases, flag = field.type, [], flag_of(field.name)
    if get_origin(kind) is Annotated:
        kind, *aliases = get_args(kind)
    if "positional" in aliases:
        return kind, [flag[2:].upper()]
    if isinstance(kind, types.UnionType):  # bool | None
        kind = get_args(kind)[0]
    if kind is bool:
        return SWITCH, [flag, f"--no-{flag[2:]}"]
    if get_origin(kind) is Literal:
        kind = {choice: choice for choice in get_args(kind)}
    return get_origin(kind) or kind, [*aliases, flag]


def split_at_flags(words):
    """["a", "--b", "1", "--c"] -> [["a"], ["--b", "1"], ["--c"]]; after "--" there are no flags."""
    groups = [[]]
    for number, word in enumerate(words):
        if re.search("[\ud800-\udfff]", word):
            raise UserError(f"The argument {word!r} is not UTF-8 text. Type it in a UTF-8 terminal.")
        if word == "--":
            groups[0] += words[number + 1 :]
            break
        if FLAG.match(word):
            groups.append([])
        groups[-1].append(word)
    return groups


def read_value(kind, words):
    """The value that the words after a flag give it. A ValueError says what is wrong with them."""
    if not words:
        raise ValueError("needs a value.")
    word = words[0]
    if isinstance(kind, dict):
        if word.lower() in kind:
            return kind[word.lower()]
        raise ValueError(f"cannot be {word!r}. {suggest(word, kind)}")
    try:
        return kind(word)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise ValueError(f"is {word!r}, but it must be {wanted}.") from None


def help_text(config_class, default):
    """The module's docstring, and each flag with its comment and default, under the headings of the groups."""
    width = max(60, min(shutil.get_terminal_size().columns, 100))
    fill = functools.partial(textwrap.fill, width=width, break_on_hyphens=False)
    paragraphs = sys.modules[config_class.__module__].__doc__.strip().split("\n\n")
    # examples and tables, which are indented, stay as they are
    paragraphs = [text if re.search("^ ", text, re.M) else fill(text) for text in paragraphs]
    program = Path(sys.argv[0])
    usage = (
        f"usage: python -m {program.parent.name}" if program.name == "__main__.py" else f"usage: {program.name}"
    )
    entries, column = [], " " * 25
    source = inspect.getsource(config_class)
    for above, field, comment in re.findall(r"((?: +# .+\n)*)    (\w+): .+?(?:  # (.+))?\n", source):
        above = " ".join(re.findall("# (.+)", above))
        if comment and above:
            entries.append("\n" + fill(above, initial_indent=" "))
        kind, names = read_field(config_class.__dataclass_fields__[field])
        flag = ", ".join(names)
        if not FLAG.match(flag):
            usage += f" {flag}"
        elif kind is not SWITCH:
            flag += f" {{{', '.join(kind)}}}" if isinstance(kind, dict) else f" {PLACEHOLDERS[kind]}"
        value = getattr(default, field)
        if isinstance(value, bool):
            value = "on" if value else "off"
        text = comment or above
        if value not in ("", None, ()):
            text += f" (default: {value})"
        text = fill(text, initial_indent=column, subsequent_indent=column)
        entries.append(f"  {flag:23}{text[25:]}" if len(flag) <= 21 else f"  {flag}\n{text}")
    return "\n\n".join([*paragraphs, f"{usage} [flags]", "\n".join(entries).lstrip("\n")])


def suggest(name, known):
    """A sentence that names the entry of `known` closest to `name`, or lists them all."""
    return closest(name, dict(zip(known, known))) or f"Choose from {', '.join(known)}."


def closest(name, meanings):
    """A sentence that offers the meaning of the key of `meanings` closest to `name`; "" if none is close."""
    for nearest in difflib.get_close_matches(name, meanings, n=1):
        meaning = meanings[nearest]
        if meaning.endswith("."):
            return meaning
        return f"Use {meaning}." if nearest == name else f"Did you mean {meaning}?"
    return ""


# the trainer's flags, and the names that nanoGPT, llm.c, transformers and others give to the same settings
OTHER_TRAINERS = {
    "--data": "dataset dataset-name data-dir data-path input-bin train-file",
    "--out-dir": "output-dir save-dir log-dir",
    "--init-from": "model model-name-or-path pretrained checkpoint ckpt resume-from-checkpoint",
    "--no-resume": "overwrite-output-dir",
    "--seed": "random-seed",
    "--dtype": "bf16 fp16 fp32 amp precision mixed-precision",
    "--n-layer": "num-hidden-layers depth",
    "--n-head": "num-attention-heads",
    "--n-embd": "hidden-size d-model embed-dim",
    "--block-size": "n-positions n-ctx",
    "--batch-size": "per-device-train-batch-size device-batch-size micro-batch-size",
    "--sequence-length": "seq-len max-seq-len max-seq-length context-length",
    "--total-batch-size, which counts tokens": "gradient-accumulation-steps grad-accum-steps global-batch-size",
    "--max-steps": "max-iters num-iterations iterations lr-decay-iters",
    "--max-steps, which counts updates": "num-train-epochs num-epochs epochs",
    "--warmup-steps": "warmup-iters warmup-ratio",
    "--max-lr": "learning-rate lr",
    "--min-lr": "learning-rate-decay-frac final-lr",
    "--schedule": "lr-scheduler-type lr-scheduler decay-lr",
    "--weight-decay": "wd",
    "--grad-clip": "max-grad-norm clip-grad-norm gradient-clipping",
    "--val-every": "eval-interval eval-every eval-steps val-loss-every",
    "--val-tokens": "eval-iters val-max-steps",
    "--checkpoint-every": "save-steps save-every save-interval always-save-checkpoint",
    "--keep-checkpoints": "save-total-limit",
    "torchrun --nproc_per_node=N": "n-gpu num-gpus gpus nproc-per-node num-processes",
    "log.txt, which has every step": "log-interval logging-steps log-every",
    "The model has no dropout: in pretraining it sees most texts once.": "dropout attn-pdrop embd-pdrop resid-pdrop",
}


def flag_of(name):
    """The flag of a field: "max_steps" -> "--max-steps"."""
    return "--" + name.replace("_", "-")


def check(options, complaints=(), above_0="", below_1=""):
    """Raise one UserError of the `complaints`, (whether it applies, sentence), and of numbers that are out of range."""
    errors = [sentence for applies, sentence in complaints if applies]
    for name, value in vars(options).items():
        least = "greater than 0" if name in above_0.split() else "0 or more"
        limit = 1 if name in below_1.split() else 1e18
        is_low = name in above_0.split() and value == 0
        if is_low or isinstance(value, (int, float)) and not 0 <= value < limit:
            errors.append(f"{flag_of(name)} is {value}, but it must be finite, {least} and below {limit}.")
    if errors:
        raise UserError(" ".join(errors))


# ----- Messages -----------------------------------------------------------------------------------------


def plain(text, limit=200):
    """Make text safe for one line of a terminal: escape control characters, cut it."""
    text = str(text)
    shown = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text[:limit])
    return shown + "..." if len(text) > limit else shown


def first_line(error):
    """The first line of an exception's text, without its full stop, or its type if it has none."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")


def count(number, noun):
    """(1, "document") -> "1 document", (2000, "document") -> "2,000 documents"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def print_next(*commands):
    """Print the next commands, lists of words, so that they work as printed."""
    print("\nNext:", flush=True)
    for words in commands:
        print("    " + plain(" ".join(quote(str(word)) for word in words), limit=2000), flush=True)


def quote(word):
    """Quote a word for a shell: in double quotes, which cmd.exe has too, if these protect all its characters."""
    if re.fullmatch(r"[\w@%+=:,./\\-]+", word):
        return word
    return shlex.quote(word) if re.search(r'["$`\\!]', word) else f'"{word}"'


# ----- Running a program --------------------------------------------------------------------------------

RANK_GRACE_SECONDS = 10  # how long the other ranks wait for rank 0 to report an error first


def run(main, output_is_product=False):
    """Run `main()`. A mistake that the user can fix becomes one line on stderr and exit status 2.

    Failed output is dropped; with `output_is_product`, a closed pipe ends `main` silently, and a full disk is an error.
    """
    protect_console()
    Console.output_is_product = output_is_product
    try:
        main()
        sys.stdout.flush()  # the last line may have no newline
    except UserError as error:
        fail(str(error))
    except KeyboardInterrupt as error:
        report_exception(KeyboardInterrupt, error, None)
        leave(130)  # 128 + SIGINT
    except MemoryError as error:
        fail(f"There is not enough memory. {error}".strip())
    except Exception as error:
        if isinstance(error, OSError) and error.filename:
            advice = ADVICE.get(error.errno, "Check that it is what you meant.")
            fail(f"Could not open or write {error.filename}: {error.strerror}. {advice}")
        if not has_other_ranks():
            raise
        traceback.print_exc()
        leave(1)


ADVICE = {  # what to do about the operating system's errors
    errno.ENOENT: "Check the path.",
    errno.EACCES: "Check its permissions.",
    errno.EPERM: "Check its permissions.",
    errno.EROFS: "Choose a place that can be written to.",
    errno.ENOSPC: "Make room on that disk and run the same command again.",
    errno.EDQUOT: "Make room within your quota and run the same command again.",
    errno.EMFILE: "Raise the limit on open files with ulimit -n.",
    errno.EIO: "Check that disk.",
}


def has_other_ranks():
    return os.environ.get("WORLD_SIZE", "1") != "1"


def leave(status):
    """End the process; at once if there are other ranks, which shutting down the process group would wait for."""
    sys.stdout.flush()
    sys.stderr.flush()
    if has_other_ranks():
        os._exit(status)
    sys.exit(status)


def fail(message):
    """Print one line on stderr (under torchrun, rank 0's) and exit with status 2."""
    if not is_rank_0() and "TORCHELASTIC_RUN_ID" in os.environ:
        # most mistakes are seen by all ranks: rank 0 reports them, and torchrun ends the others meanwhile
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(RANK_GRACE_SECONDS)
    line = f"error: {plain(message, limit=2000)}"
    print(line, file=sys.stderr, flush=True)
    told = json.dumps({"message": line, "timestamp": int(time.time())})
    # torchrun's own pages about the failed ranks then contain this line
    with contextlib.suppress(KeyError, OSError):
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(told, encoding="utf-8")
    leave(2)


class Console(io.RawIOBase):
    """The raw stream under stdout or stderr: failed output is dropped or, if it is the program's product, an error."""

    output_is_product = False

    def __init__(self, stream, name):
        self.stream, self.name = stream, name  # kept, because deleting the stream would close the file
        self.raw = getattr(stream.buffer, "raw", stream.buffer)  # python -u has no buffer in between
        self.writable, self.fileno, self.isatty = self.raw.writable, self.raw.fileno, self.raw.isatty

    def write(self, data):
        try:
            written = self.raw.write(data)
        except OSError as error:
            written = None
            if Console.output_is_product and self.name == "stdout":
                Console.output_is_product = False  # say so once, and drop what is still buffered
                if isinstance(error, BrokenPipeError):
                    sys.exit(141)  # 128 + SIGPIPE, as a shell shows it
                raise UserError(f"Could not write the output: {error.strerror}.") from None
        return len(data) if written is None else written  # it is also None if writing would block


def protect_console():
    """Put a Console under sys.stdout and sys.stderr; characters that they cannot encode are replaced."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # it was closed before the program began
            stream = open(os.devnull, "w", encoding="utf-8")
        elif stream is not getattr(sys, f"__{name}__"):  # protected already, or a test captures it
            continue
        buffer = io.BufferedWriter(Console(stream, name))
        setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, "replace", line_buffering=True))
