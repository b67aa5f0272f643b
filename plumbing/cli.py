"""Shared by all programs here: flags from a dataclass, one-line errors, a console that may fail.

A program declares its options as a dataclass, one line per field, and ends in

    if __name__ == "__main__":
        cli.run(main)

--help prints the program's docstring and the flags. A flag's help text is the comment at the end of its field's
line or, if there is none, the comment above it. Any other comment is a heading for the fields below it.

A mistake that the user can fix is raised as a `UserError`; `run` prints it as one line, `error: ...`, and
exits with status 2. It does the same for an OSError about a file. Any other exception keeps its traceback.

Importing torch takes seconds. A program that needs it runs its parser once above that import, so that --help and a
mistyped flag are answered at once.
"""

import os
import sys
from pathlib import Path


def is_rank_0():
    return os.environ.get("RANK", "0") == "0"


def report_exception(kind, error, traceback):
    """Replace sys.excepthook: print a traceback, except for Ctrl-C."""
    if kind is KeyboardInterrupt:
        report_interrupt()
    else:
        sys.__excepthook__(kind, error, traceback)


def report_interrupt():
    if is_rank_0():
        print("interrupted", file=sys.stderr, flush=True)


# `run` cannot catch Ctrl-C during the imports. Programs in other folders that import this one keep their tracebacks
if Path(sys.argv[0]).resolve().parent == Path(__file__).resolve().parents[1]:
    sys.excepthook = report_exception

import contextlib
import dataclasses
import difflib
import errno
import inspect
import io
import itertools
import json
import re
import shlex
import shutil
import signal
import textwrap
import time
import traceback
import typing

# subtle: OpenMP threads spin while they wait unless told otherwise before torch loads OpenMP, and two threads
# spinning on a contended core can make a small training step 20 times slower
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


class UserError(Exception):
    """A mistake that the user can fix. Its message says in whole sentences what is wrong and what to do."""


# ----------------------------------------------------------------------------------------------------------
# Flags

SEE_HELP = "Run with --help to see all flags."


def parse(config_class, args=None, default=None, presets=None, synonyms=None):
    """Parse the command line into the dataclass `config_class`; `default`, an instance, holds the defaults.

    presets: {name: an instance}, in place of `default`; --preset chooses one of them, by default the first.
    synonyms: other names for the flags, as in OTHER_TRAINERS.

    Raises one UserError with every unknown flag and every bad value. --help prints the help and exits.
    """
    args = list(sys.argv[1:] if args is None else args)
    if presets:
        default = choose_preset(args, presets)
    if "-h" in args or "--help" in args:
        print(help_text(config_class, default))
        sys.exit(0)
    for word in args:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise UserError(f"The argument {word!r} is not UTF-8 text. Type it in a UTF-8 terminal.") from None
    args = [spell_switch(config_class, word) for word in args]
    config, unknown, complaint = try_parse(config_class, args, default)
    if not unknown and not complaint:
        return config

    meanings = flag_names(config_class, synonyms or {}) | {name: f"--preset {name}" for name in presets or ()}
    # tyro stops at the first mistake, so try each flag by itself, after the words that come before all flags
    first_words, *groups = split_at_flags(args)
    errors = [explain(first_words, *try_parse(config_class, first_words, default)[1:], meanings)]
    for words in groups:
        _, group_unknown, group_complaint = try_parse(config_class, first_words + words, default)
        group_unknown = [word for word in group_unknown if word not in first_words]
        errors.append(explain(words, group_unknown, group_complaint, meanings))
    distinct = [error for error in dict.fromkeys(errors) if error]
    raise UserError(" ".join(distinct) or explain(args, unknown, complaint, meanings))


def choose_preset(args, presets):
    """The preset that --preset names; the first one if it is left out, or unknown, which `parse` reports."""
    name = ""
    for word, following in zip(args, args[1:] + [""]):
        flag, equals, value = word.partition("=")
        if flag == "--preset":
            name = value if equals else following
    return presets.get(name, next(iter(presets.values())))


def spell_switch(config_class, word):
    """A switch as tyro expects it: "--compile=False" -> "--no-compile"; "--compile=True" where it may be None."""
    match = re.fullmatch(r"--(no-)?([\w-]+?)(?:=(True|False))?", word, re.IGNORECASE)
    types = {field.name: field.type for field in dataclasses.fields(config_class)}
    kind = types.get(match[2].replace("-", "_")) if match else None
    if kind not in (bool, bool | None):
        return word
    is_on = (match[3] or "true").lower() == ("false" if match[1] else "true")
    return f"--{'' if is_on else 'no-'}{match[2]}" if kind is bool else f"--{match[2]}={is_on}"


def try_parse(config_class, args, default):
    """Return (config, unexpected words, tyro's complaint)."""
    import tyro  # takes a tenth of a second, during which Ctrl-C should print one line

    errors = io.StringIO()
    defaults = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):  # not a terminal: no boxes
            config, unknown = tyro.cli(config_class, args=args, return_unknown_args=True, **defaults)
    except SystemExit:
        # tyro writes a title, a rule, the complaint and, from the line with "helptext" on, where to find help
        lines = [line.strip() for line in errors.getvalue().splitlines() if line.strip(" -")]
        return None, [], " ".join(itertools.takewhile(lambda line: " helptext" not in line, lines[1:])).strip(" .")
    return config, unknown, ""


def help_text(config_class, default=None):
    """The module's docstring, and each flag with its comment and default, under the headings of the groups."""
    width = max(60, min(shutil.get_terminal_size().columns, 100))
    docstring = sys.modules[config_class.__module__].__doc__ or inspect.getdoc(config_class)
    paragraphs = docstring.strip().split("\n\n")
    # examples and tables, which are indented, stay as they are
    paragraphs = [
        text if re.search("^ ", text, re.M) else textwrap.fill(text, width, break_on_hyphens=False)
        for text in paragraphs
    ]
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    program = Path(sys.argv[0])
    usage = [f"python -m {program.parent.name}" if program.name == "__main__.py" else program.name]
    entries, comments = [], []
    for line in inspect.getsource(config_class).splitlines():
        comment = re.fullmatch(r" +# (.+)", line)
        declared = re.match(r"    (\w+): (?:.*  # (.+))?", line)
        if comment:
            comments.append(comment[1])
        elif declared and declared[1] in fields:
            field = fields[declared[1]]
            if declared[2] and comments:
                entries.append("\n" + textwrap.fill(" ".join(comments), width, initial_indent=" "))
            name, text = describe_flag(field), declared[2] or " ".join(comments)
            if not name.startswith("-"):
                usage.append(name)
            value = getattr(default, field.name, field.default)
            if value not in ("", None, (), dataclasses.MISSING):
                value = {"True": "on", "False": "off"}.get(str(value), value)
                text += f" (default: {value})"
            column = " " * 25  # the text's indentation; a longer flag has a line of its own
            first = f"  {name:21}  " if len(name) <= 21 else f"  {name}\n{column}"
            entries.append(
                first + textwrap.fill(column + text, width, subsequent_indent=column, break_on_hyphens=False).lstrip()
            )
            comments = []
    usage = f"usage: {' '.join(usage)} [flags]"
    return "\n\n".join([*paragraphs, usage, "\n".join(entries).lstrip("\n")])


def describe_flag(field):
    """How a field is given: "--max-steps INT", "-m, --model STR", "--compile, --no-compile", or "PROMPT"."""
    kind, aliases, name = field.type, [], field.name.replace("_", "-")
    for option in getattr(kind, "__metadata__", ()):  # tyro's annotations
        aliases += getattr(option, "aliases", None) or []
    is_positional = "positional" in str(kind).lower()
    kind = getattr(kind, "__origin__", kind) if hasattr(kind, "__metadata__") else kind
    if is_positional:
        return name.upper()
    if kind in (bool, bool | None):
        return f"--{name}, --no-{name}"
    choices = ", ".join(typing.get_args(kind)) if typing.get_origin(kind) is typing.Literal else ""
    words = {int: "INT", float: "FLOAT"}
    value = f"{{{choices}}}" if choices else "..." if typing.get_origin(kind) is tuple else words.get(kind, "STR")
    return ", ".join([*aliases, f"--{name}"]) + f" {value}"


def split_at_flags(args):
    """["a", "--b", "1", "--c"] -> [["a"], ["--b", "1"], ["--c"]]"""
    groups = [[]]
    for word in args:
        if is_flag(word):
            groups.append([])
        groups[-1].append(word)
    return groups


def is_flag(word):
    """Whether a word of the command line is a flag; -1 is a value."""
    return re.match("--?[A-Za-z]", word) is not None


# tyro's messages, and ours for the same mistakes
PLAIN_ENGLISH = [
    (r"Error parsing (\S+): invalid literal for int.+: (.+)", r"\1 is \2, but it must be a whole number."),
    (r"Error parsing (\S+): could not convert string to float: (.+)", r"\1 is \2, but it must be a number."),
    (r"Missing value for argument '(\S+)'\. Expected 1 values", r"\1 needs a value."),
    (r"Missing from \S+: (\S+) (.+) \(required\)", r"The argument \1 is missing: \2."),
    (r"(.+)", rf"The command line is not valid: \1. {SEE_HELP}"),
]


def explain(words, unknown, complaint, meanings):
    """The sentence that says what is wrong with `words`, which are a flag and its values; "" if nothing is."""
    choice = re.fullmatch(r"invalid choice '(.*)' for argument '(\S+)'\. Expected one of \((.+)\)", complaint)
    if choice:
        value, flag, choices = choice.groups()
        nearest = closest(value, {name: name for name in re.findall("'(.*?)'", choices)})
        return f"{flag} is '{value}', but it must be one of {choices}. {nearest}".strip()
    if complaint:
        pattern, sentence = next(row for row in PLAIN_ENGLISH if re.fullmatch(row[0], complaint))
        return re.sub(pattern, sentence, complaint)
    if not unknown:
        return ""
    if is_flag(unknown[0]):
        flag = unknown[0].split("=")[0]
        name = flag.lstrip("-").replace("_", "-")
        return f"There is no flag called {flag}. {closest(name, meanings) or SEE_HELP}"
    if unknown[0].endswith(".py") and "preset" in meanings:  # nanoGPT's config/train_shakespeare_char.py
        return f"{plain(unknown[0])} is not read: the settings are flags, and --preset names a set of them. {SEE_HELP}"
    preset = meanings.get(unknown[0], "")
    hint = f"Did you mean {preset}?" if preset.startswith("--preset ") else SEE_HELP
    return f"The argument {unknown[0]!r} was not expected. {hint}"


def suggest(name, known, synonyms=None):
    """A sentence that names the entry of `known` closest to `name`, or lists them all.

    synonyms: {another program's word: the word used here}.
    """
    meanings = {word: word for word in known} | (synonyms or {})
    return closest(name, meanings) or f"Choose from {', '.join(known)}."


def closest(name, meanings):
    """A sentence that offers the meaning of the key of `meanings` closest to `name`; "" if none is close."""
    if name in meanings:
        return meanings[name] if meanings[name].endswith(".") else f"Use {meanings[name]}."
    matches = difflib.get_close_matches(name, [word for word in meanings if not meanings[word].endswith(".")], n=1)
    return f"Did you mean {meanings[matches[0]]}?" if matches else ""


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
    "--activation-checkpointing": "gradient-checkpointing",
    "--batch-size": "per-device-train-batch-size device-batch-size micro-batch-size",
    "--sequence-length": "seq-len max-seq-len max-seq-length context-length",
    "--total-batch-size, which counts tokens": "gradient-accumulation-steps grad-accum-steps global-batch-size",
    "--max-steps": "max-iters num-iterations iterations lr-decay-iters",
    "--max-steps, which counts updates": "num-train-epochs num-epochs epochs",
    "--warmup-steps": "warmup-iters warmup-ratio",
    "--max-lr": "learning-rate lr",
    "--min-lr": "learning-rate-decay-frac final-lr",
    "--schedule": "lr-scheduler-type lr-scheduler decay-lr",
    "--optimizer": "optim",
    "--weight-decay": "wd",
    "--beta1": "adam-beta1",
    "--beta2": "adam-beta2",
    "--grad-clip": "max-grad-norm clip-grad-norm gradient-clipping",
    "--val-every": "eval-interval eval-every eval-steps val-loss-every",
    "--val-tokens": "eval-iters val-max-steps",
    "--checkpoint-every": "save-steps save-every save-interval always-save-checkpoint",
    "--keep-checkpoints": "save-total-limit",
    "torchrun --nproc_per_node=N": "n-gpu num-gpus gpus nproc-per-node num-processes",
    "log.txt, which has every step": "log-interval logging-steps log-every",
    "The model has no dropout: in pretraining it sees most texts once.": "dropout attn-pdrop embd-pdrop resid-pdrop",
}


def flag_names(config_class, synonyms):
    """{a name without dashes: the flag that it stands for}, for the flags of `config_class` and their synonyms."""
    fields = dataclasses.fields(config_class)
    switches = ["no-" + field.name for field in fields if field.type in (bool, bool | None)]
    names = [field.name for field in fields] + switches
    meanings = {theirs: ours for ours, words in synonyms.items() for theirs in words.split()}
    return {name.replace("_", "-"): flag_of(name) for name in [*names, "help"]} | meanings


def flag_of(name):
    """The flag of a field: "max_steps" -> "--max-steps"."""
    return "--" + name.replace("_", "-")


def check_numbers(config, above_0, below_1=()):
    """A sentence for each number of a dataclass that is out of its range.

    All must be 0 or more and below 2**63, those named in `above_0` more than 0, those in `below_1` below 1.
    """
    errors = []
    for name, value in dataclasses.asdict(config).items():
        if not isinstance(value, (int, float)):
            continue
        if name in above_0 and not 0 < value < 2**63:
            errors.append(f"{flag_of(name)} is {value}, but it must be a finite number greater than 0, below 2**63.")
        elif name in below_1 and not 0 <= value < 1:
            errors.append(f"{flag_of(name)} is {value}, but it must be 0 or more, and below 1.")
        elif not 0 <= value < 2**63:
            errors.append(f"{flag_of(name)} is {value}, but it must be 0 or more, finite and below 2**63.")
    return errors


# ----------------------------------------------------------------------------------------------------------
# Messages


def plain(text, limit=200):
    """Make text from a file or a command line safe for one line of a terminal: escape control characters, cut it."""
    text = str(text)
    text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text[: limit + 1])
    return text if len(text) <= limit else text[:limit] + "..."


def first_line(error):
    """The first line of an exception's text, or its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def count(number, noun):
    """(1, "document") -> "1 document", (2000, "document") -> "2,000 documents"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def print_next(*commands):
    """Print the next commands, given as lists of words, so that they work as printed."""
    print("\nNext:", flush=True)
    for words in commands:
        print("    " + plain(" ".join(quote(str(word)) for word in words), limit=2000), flush=True)


def quote(word):
    """Quote a word for a shell: in double quotes, which every shell has, if these protect all its characters."""
    if re.fullmatch(r"[\w@%+=:,./\\-]+", word):
        return word
    return shlex.quote(word) if re.search(r'["$`\\!]', word) else f'"{word}"'


# ----------------------------------------------------------------------------------------------------------
# Running a program

RANK_GRACE_SECONDS = 10  # how long the other ranks wait for rank 0 to report an error first
CLOSED_PIPE = 141  # the status that a shell shows after a broken pipe: 128 + SIGPIPE
INTERRUPTED = 130  # 128 + SIGINT


def run(main, output_is_product=False):
    """Run `main()`. A mistake that the user can fix becomes one line on stderr and exit status 2.

    A console that fails does not end the program: what cannot be printed is dropped. But if the output is what the
    program is run for (`output_is_product`), a closed pipe ends it silently, and a full disk is an error.
    """
    protect_console(output_is_product)
    try:
        main()
        sys.stdout.flush()  # the last line may have no newline
    except UserError as error:
        fail(str(error))
    except KeyboardInterrupt:
        report_interrupt()
        leave(INTERRUPTED)
    except MemoryError as error:
        fail(f"There is not enough memory. {error}".strip())
    except Exception as error:
        if isinstance(error, OSError) and error.filename:
            fail(str(refusal(error)))
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
    errno.ENAMETOOLONG: "Choose a shorter name.",
    errno.EIO: "Check that disk.",
}


def refusal(error):
    """The UserError for an OSError about a file: what the operating system said, and what to do about it."""
    advice = ADVICE.get(error.errno, "Check that it is what you meant.")
    return UserError(f"Could not open or write {error.filename}: {error.strerror}. {advice}")


def has_other_ranks():
    return os.environ.get("WORLD_SIZE", "1") != "1"


def leave(status):
    """End the process with an exit status.

    With other ranks, end it at once: shutting down the process group would wait for ranks that wait for this one.
    """
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
    summary = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if summary:  # torchrun ends with pages about the failed ranks, which then contain this line
        with contextlib.suppress(OSError):
            Path(summary).write_text(json.dumps({"message": line, "timestamp": int(time.time())}), encoding="utf-8")
    leave(2)


class Console(io.RawIOBase):
    """The raw stream under stdout or stderr: failed output is dropped or, if it is the program's product, an error."""

    def __init__(self, stream, is_product):
        self.stream = stream  # kept, because deleting it would close the file
        self.raw = getattr(stream.buffer, "raw", stream.buffer)  # python -u has no buffer in between
        self.is_product = is_product

    def write(self, data):
        try:
            written = self.raw.write(data)
        except OSError as error:
            if self.is_product:
                self.is_product = False  # say so once, and drop what is still buffered
                if isinstance(error, BrokenPipeError):
                    sys.exit(CLOSED_PIPE)
                raise UserError(f"Could not write the output: {error.strerror}.") from None
            written = None
        return len(data) if written is None else written  # it is also None if writing would block

    def writable(self):
        return True

    def fileno(self):
        return self.raw.fileno()

    def isatty(self):
        return self.raw.isatty()


def protect_console(output_is_product):
    """Put a Console under sys.stdout and sys.stderr; characters that they cannot encode are replaced."""
    for name, is_product, errors in (("stdout", output_is_product, "replace"), ("stderr", False, "backslashreplace")):
        stream = getattr(sys, name)
        if stream is None:  # it was closed before the program began
            stream = open(os.devnull, "w", encoding="utf-8")
        elif stream is not getattr(sys, f"__{name}__"):  # a test captures it
            continue
        buffer = io.BufferedWriter(Console(stream, is_product))
        setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, errors, line_buffering=True))
