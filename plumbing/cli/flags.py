"""Flags from a dataclass, by argparse: one per field, with the field's comment as its help text.

That is the comment at the end of the field's line or, if there is none, the comment above it; any other comment is a
heading. Fields that a class inherits come after its own. Annotated[str, "-m"] gives a flag a second name, and
Annotated[str, "positional"] makes it an argument without a flag. An empty value, as of a shell variable that is not
set, is refused except with Annotated[str, "may be empty"]. In other texts a leading ~ becomes the home folder: shells
leave it as it is in --out-dir=~/run. Whole numbers may be written as 1e9. The range of a number is written at its
field, as Positive[int].
"""

import argparse
import dataclasses
import difflib
import functools
import inspect
import os
import re
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from plumbing.cli.console import UserError

Config = TypeVar("Config")
Number = TypeVar("Number")
ABOVE_0 = "above 0"
Positive = Annotated[Number, ABOVE_0]  # Positive[int]: 1 or more
SEE_HELP = "Run with --help to see all flags."
SWITCH = {"true": True, "false": False}


class Parser(argparse.ArgumentParser):
    def error(self, message):
        message = message.removeprefix("argument ")
        raise UserError(message if message.endswith((".", "?")) else f"{message}. {SEE_HELP}")


def parse(config_class: type[Config], args: Sequence[str] | None = None, **options: Any) -> Config:
    """Parse the command line into the dataclass `config_class`; for the options see `read`."""
    presets: Any = options.get("presets") or {"": config_class()}
    values = read(config_class, args, **options)
    return dataclasses.replace(presets[values.get("preset", next(iter(presets)))], **values)


def read(
    config_class: type,
    args: Sequence[str] | None = None,
    *,
    presets: Mapping[str, Any] | None = None,
    synonyms: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What was typed, {field of `config_class`: value}; --help prints the help text and exits.

    presets: {name: an instance with the defaults} for --preset, the first one by default; synonyms: other programs'
    names for the flags, {flag: names}.
    """
    default: Any = config_class()
    parser = make_parser(config_class, default)
    words = spell_as_argparse(parser._actions, list(sys.argv[1:] if args is None else args))
    found, unknown = parser.parse_known_args(words)
    if unknown:
        raise UserError(explain(unknown, parser._actions, synonyms or {}, presets or {}))
    values = vars(found)
    if values.pop("help"):
        shown = presets[values.get("preset", next(iter(presets)))] if presets else default
        make_parser(config_class, shown).print_help()
        sys.exit(0)
    for field in dataclasses.fields(default):
        if field.name in values and get_origin(kind_of(field)[0]) is tuple:
            values[field.name] = tuple(values[field.name])
    return values


def make_parser(config_class, default):
    """The parser of a dataclass's flags. It returns what was typed, and its help shows the values of `default`."""
    program = Path(sys.argv[0])
    parser = Parser(
        prog=f"python -m {program.parent.name}" if program.name == "__main__.py" else program.name,
        description=sys.modules[config_class.__module__].__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        add_help=False,
        allow_abbrev=False,
    )
    group = parser.add_argument_group("flags")
    group.add_argument("-h", "--help", action="store_true", default=False, help="show this text")
    comments, arguments = comments_of(config_class), []
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    for name in dict.fromkeys([*filter(fields.get, config_class.__annotations__), *fields]):
        field, (heading, text) = fields[name], comments.get(name, ("", ""))
        if heading:
            group = parser.add_argument_group(heading)
        value = getattr(default, name)
        if value not in ("", None, (), []):
            shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
            text += f" (default: {['off', 'on'][value] if isinstance(value, bool) else shown})"
        kind, notes = kind_of(field)
        options: dict[str, Any] = dict(help=text.replace("%", "%%"))
        is_several = get_origin(kind) in (tuple, list)
        if is_several:
            options |= dict(nargs="+", action="extend")
            kind = get_args(kind)[0]
        if kind is bool and not is_several:
            options["action"] = argparse.BooleanOptionalAction
        elif get_origin(kind) is Literal:
            choices = {str(choice): choice for choice in get_args(kind)}
            options |= dict(type=functools.partial(read_choice, choices), metavar=f"{{{','.join(choices)}}}")
        elif kind in READERS:
            read, metavar = READERS[kind]
            if "may be empty" in notes:
                read = str
            options |= dict(type=read, metavar=metavar)
        else:
            named = getattr(kind, "__name__", kind)
            raise UserError(
                f"The field {name} of {config_class.__name__} has the type {named!r}, of which there are no flags. Use "
                "int, float, str, bool, Literal, or a tuple of numbers or texts, without quotes."
            )
        if "positional" in notes:
            arguments.append(name.upper())
            # of one value that is not typed, argparse would read the mark that it is missing
            options |= {"nargs": "*"} if is_several else {"nargs": "?", "default": value}
            options["metavar"] = arguments[-1]
            parser.add_argument(name, **options)
        else:
            synonyms = [note for note in notes if note.startswith("-")]
            group.add_argument(*synonyms, flag_of(name), dest=name, **options)
    parser.usage = " ".join([parser.prog, *arguments, "[flags]"])
    return parser


def kind_of(field):
    """A field's type without `| None`, and the notes in its Annotated."""
    kind, notes = field.type, []
    if get_origin(kind) is Annotated:
        kind, *notes = get_args(kind)
    if get_origin(kind) in (types.UnionType, Union):  # bool | None
        kind = next(each for each in get_args(kind) if each is not type(None))
    return kind, notes


@functools.cache
def comments_of(config_class):
    """{field: (the heading above it or "", its help text)}, from the source of the dataclass."""
    comments = {}
    sources = [inspect.getsource(each) for each in reversed(config_class.__mro__) if each is not object]
    for above, name, own in re.findall(r"(?m)^((?: +# .+\n)*)    (\w+): .+?(?:  # (.+))?\n", "".join(sources)):
        above = " ".join(re.findall("# (.+)", above))
        comments[name] = (above, own) if own else ("", above)
    return comments


def spell_as_argparse(actions, words):
    """--max_steps as --max-steps, --compile=False and --compile False as --no-compile; words after "--" as they are."""
    switches = [each.option_strings for each in actions if isinstance(each, argparse.BooleanOptionalAction)]
    opposites = {flag: other for yes, no in switches for flag, other in ((yes, no), (no, yes))}
    spelled = []
    while words and words[0] != "--":
        word = words.pop(0)
        if re.search("[\ud800-\udfff]", word):
            raise UserError(f"The argument {word!r} is not UTF-8 text. Type it in a UTF-8 terminal.")
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            flag = flag.replace("_", "-")
            word = flag + equals + value
        if flag in opposites and (equals or (words and words[0].lower() in SWITCH)):
            value = value if equals else words.pop(0)
            if value.lower() not in SWITCH:
                raise UserError(f"{flag} is {value!r}, but it must be true or false.")
            word = flag if SWITCH[value.lower()] else opposites[flag]
        spelled.append(word)
    return spelled + words


def read_text(word):
    if not word:
        raise argparse.ArgumentTypeError("its value is empty. Give one, or leave the flag out.")
    return os.path.expanduser(word)


def integer(word):
    """A whole number, also as 1e9."""
    is_power = "e" in word.lower() and float(word).is_integer()
    return int(float(word)) if is_power else int(word)


# {the type of a field: (its reader, what stands for a value in the help text)}
READERS = {int: (integer, "INT"), float: (float, "FLOAT"), str: (read_text, "TEXT")}


def read_choice(choices, word):
    if word.lower() not in choices:
        raise argparse.ArgumentTypeError(f"there is no {word!r}. {suggest(word, choices)}")
    return choices[word.lower()]


# ----- Mistyped flags -----------------------------------------------------------------------------------


def explain(unknown, actions, synonyms, presets):
    """A sentence for each flag of `unknown` that does not exist, or else for its first word."""
    others = synonyms | {f"--preset {name}": name for name in presets}
    meanings = {name.strip("-"): name for action in actions for name in action.option_strings}
    meanings |= {theirs: ours for ours, names in others.items() for theirs in names.split()}
    mistakes = [word.partition("=")[0] for word in unknown if re.match("--?[A-Za-z]", word)]
    if mistakes:
        return " ".join(
            f"There is no flag called {flag}. {closest(flag.strip('-').lower(), meanings) or SEE_HELP}"
            for flag in mistakes
        )
    word = unknown[0]
    if "input" in meanings:
        meanings[word] = f"--input {word}"
    if word.endswith(".py") and presets:  # nanoGPT's config/train_shakespeare_char.py
        meanings[word] = "--preset, which names a set of flags"
    # perhaps a flag without its dashes, as in lr=3e-4
    advice = closest(word.partition("=")[0], meanings)
    quotes = "Put quotes around a text of several words; --help shows all flags."
    return f"The argument {word!r} was not expected. {advice or quotes}"


def suggest(name: str, known: Iterable[str]) -> str:
    """A sentence that names the entry of `known` closest to `name`, or lists them all."""
    return closest(name, {entry: entry for entry in known}) or f"Choose from {', '.join(known)}."


def closest(name, meanings):
    """A sentence that offers the meaning of the key of `meanings` closest to `name`; "" if none is close."""
    for nearest in difflib.get_close_matches(name, meanings, n=1):
        meaning = meanings[nearest]
        if meaning.endswith("."):
            return meaning
        return f"Use {meaning}." if nearest == name else f"Did you mean {meaning}?"
    return ""


def flag_of(name):
    """The flag of a field: "max_steps" -> "--max-steps"."""
    return "--" + name.replace("_", "-")


def check(options: Any, complaints: Iterable[str] = ()) -> None:
    """Raise one UserError with all `complaints`, and with each number that is infinite, nan or out of its range.

    Numbers are 0 or more, unless the field is Positive. A field's own default is legal, and if that is negative, so are
    other negative numbers.
    """
    errors = list(complaints)
    for field in dataclasses.fields(options):
        value, default, notes = getattr(options, field.name), field.default, kind_of(field)[1]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value == default:
            continue
        if any(f"{flag_of(field.name)} is {value}, but" in error for error in errors):
            continue  # a complaint says more
        least = "0 or more"
        if ABOVE_0 in notes:
            least = "1 or more" if isinstance(value, int) else "above 0"
        if not value < 1e18:
            least += " and below 1e+18"
        may_be_negative = isinstance(default, (int, float)) and default < 0
        if (value < 0 and not may_be_negative) or (value == 0 and ABOVE_0 in notes) or not abs(value) < 1e18:
            errors.append(f"{flag_of(field.name)} is {value}, but it must be {least}.")
    if errors:
        raise UserError(" ".join(errors))
