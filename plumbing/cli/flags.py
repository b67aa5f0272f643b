"""Makes argparse flags from a dataclass: one flag per field. The field's comment becomes the flag's help.

That is the comment at the end of the field's line or, if there is none, the comment above it. If there are both, the
comment above is the heading of a new group. The help lists `preset`, then a class's own fields, then inherited ones.

A field may be Annotated with "-m", a second name for the flag; "positional", an argument without a flag; or "may be
empty". Other texts must not be empty, because the value of an unset shell variable is. They may begin with ~ for the
home folder, because a shell does not replace it in --out-dir=~/run. Positive[int] and Positive[float] exclude 0. Whole
numbers may be written as 1e9.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from plumbing.cli.console import UserError

Config = TypeVar("Config")
Number = TypeVar("Number")
ABOVE_0 = "above 0"
Positive = Annotated[Number, ABOVE_0]  # Positive[int]: 1 or more
SEE_HELP = "Run with --help to see all flags."
SWITCH = {"true": True, "false": False}
LIMIT = 1e18  # numbers must be below it


class Parser(argparse.ArgumentParser):
    def error(self, message):
        message = message.removeprefix("argument ")
        raise UserError(message if message.endswith((".", "?")) else f"{message}. {SEE_HELP}")


def parse(config_class: type[Config], args: Sequence[str] | None = None, **options: Any) -> Config:
    """Parse the command line into the dataclass `config_class`; for the options see `read`."""
    presets: Any = options.get("presets") or {"": config_class()}
    values = read(config_class, args, **options)
    return dataclasses.replace(preset_of(values, presets), **values)


def preset_of(values, presets):
    """The typed preset, by default the first one."""
    return presets[values.get("preset", next(iter(presets)))]


def read(
    config_class: type,
    args: Sequence[str] | None = None,
    *,
    presets: Mapping[str, Any] | None = None,
    synonyms: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The typed values, {field of `config_class`: value}. --help prints the help and exits.

    presets: {name: an instance with the defaults} for --preset, the first one by default; synonyms: other programs'
    names for the flags, {flag: names}.
    """
    default: Any = config_class()
    parser = make_parser(config_class, default)
    words = spell_as_argparse(parser._actions, list(sys.argv[1:] if args is None else args))
    namespace, unknown = parser.parse_known_args(words)
    if unknown:
        raise UserError(explain(unknown, parser._actions, synonyms or {}, presets=presets or {}))
    values = vars(namespace)
    if values.pop("help"):
        shown = preset_of(values, presets) if presets else default
        make_parser(config_class, shown).print_help()
        sys.exit(0)
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = tuple(value)
    return values


def make_parser(config_class, default):
    """The parser of a dataclass's flags. It returns only typed values; its help shows the defaults in `default`."""
    module = sys.modules["__main__"].__spec__  # None for a script
    parser = Parser(
        prog=f"python -m {module.name.removesuffix('.__main__')}" if module else Path(sys.argv[0]).name,
        description=sys.modules[config_class.__module__].__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        add_help=False,
        allow_abbrev=False,
    )
    group = parser.add_argument_group("flags")
    group.add_argument("-h", "--help", action="store_true", default=False, help="show this help")
    comments = comments_of(config_class)
    arguments = []
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    # `preset`, then the class's own fields, then inherited ones
    for name in dict.fromkeys(["preset", *config_class.__annotations__, *fields]):
        if name not in fields:
            continue
        field = fields[name]
        heading, text = comments.get(field.name, ("", ""))
        if heading:
            group = parser.add_argument_group(heading)
        options = options_of(field, config_class)
        options["help"] = help_text(text, getattr(default, field.name))
        _, notes = kind_of(field)
        if "positional" in notes:
            options["metavar"] = field.name.upper()
            arguments.append(options["metavar"])
            parser.add_argument(field.name, **as_positional(options, default=getattr(default, field.name)))
        else:
            synonyms = [each for each in notes if each.startswith("-")]
            group.add_argument(*synonyms, flag_of(field.name), dest=field.name, **options)
    parser.usage = " ".join([parser.prog, *arguments, "[flags]"])
    return parser


def options_of(field, config_class) -> dict[str, Any]:
    """How argparse reads a field's value."""
    kind, notes = kind_of(field)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    options: dict[str, Any] = {}
    if get_origin(kind) in (tuple, list):
        options = {"nargs": "+", "action": "extend"}
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        choices = {str(choice): choice for choice in get_args(kind)}
        read, metavar = functools.partial(read_choice, choices), f"{{{','.join(choices)}}}"
    elif kind in READERS:
        read, metavar = READERS[kind]
    else:
        named = getattr(kind, "__name__", kind)
        raise UserError(
            f"The field {field.name} of {config_class.__name__} has the type {named!r}, which no flag can have. Use "
            "int, float, str, bool, Literal, or a tuple of numbers or texts, and write it without quotes."
        )
    if "may be empty" in notes:
        read = str
    return options | {"type": read, "metavar": metavar}


def as_positional(options, default) -> dict[str, Any]:
    """The options of an argument without a flag. People may leave it out."""
    if "nargs" in options:
        return options | {"nargs": "*"}
    # with a default of SUPPRESS, argparse would parse that word as if it had been typed
    return options | {"nargs": "?", "default": default}


def help_text(text, value):
    """A flag's comment and its default, with % escaped for argparse."""
    if value not in ("", None, (), []):
        shown = value
        if isinstance(value, bool):
            shown = "on" if value else "off"
        elif isinstance(value, tuple):
            shown = " ".join(map(str, value))
        text += f" (default: {shown})"
    return text.replace("%", "%%")


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
    for above, name, beside in re.findall(
        r"(?m)^((?: +# .+\n)*)    (\w+): .+?(?:  # (.+))?\n", "".join(sources)
    ):
        above = " ".join(re.findall("# (.+)", above))
        comments[name] = (above, beside) if beside else ("", above)
    return comments


def spell_as_argparse(actions, words):
    """Spell --max_steps as --max-steps, and --compile False (or =False) as --no-compile, in the words before "--"."""
    opposites = {}
    for action in actions:
        if isinstance(action, argparse.BooleanOptionalAction):
            yes, no = action.option_strings
            opposites |= {yes: no, no: yes}
    spelled = []
    while words and words[0] != "--":
        word = words.pop(0)
        if re.search("[\ud800-\udfff]", word):
            raise UserError(f"The argument {word!r} is not UTF-8 text. Type it in a UTF-8 terminal.")
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            flag = flag.replace("_", "-")
            word = flag + equals + value
        if flag in opposites:
            if not equals and words and words[0].lower() in SWITCH:
                value = words.pop(0)
            if equals or value:
                word = flag if read_switch(flag, value) else opposites[flag]
        spelled.append(word)
    return spelled + words


def read_switch(flag, value):
    if value.lower() not in SWITCH:
        raise UserError(f"{flag} is {value!r}, but it must be true or false.")
    return SWITCH[value.lower()]


def read_text(word):
    if not word:
        raise argparse.ArgumentTypeError("its value is empty. Give one, or leave the flag out.")
    return os.path.expanduser(word)


def integer(word):
    """A whole number, which may be written as 1e9."""
    is_power = "e" in word.lower() and float(word).is_integer()
    return int(float(word)) if is_power else int(word)


# {type of a field: (its reader, the word for a value in the help)}
READERS = {int: (integer, "INT"), float: (float, "FLOAT"), str: (read_text, "TEXT")}


def read_choice(choices, word):
    if word.lower() not in choices:
        raise argparse.ArgumentTypeError(f"there is no {word!r}. {suggest(word, choices)}")
    return choices[word.lower()]


# ----- Mistyped flags -----------------------------------------------------------------------------------


def explain(unknown, actions, synonyms, *, presets):
    """A sentence for each flag in `unknown` or, if there are only words, for the first of them."""
    meanings = {}
    for action in actions:
        meanings |= {name.strip("-"): name for name in action.option_strings}
    for ours, theirs in synonyms.items():
        meanings |= dict.fromkeys(theirs.split(), ours)
    meanings |= {name: f"--preset {name}" for name in presets}
    mistakes = [word.partition("=")[0] for word in unknown if re.match("--?[A-Za-z]", word)]
    if mistakes:
        return " ".join(
            f"There is no flag called {flag}. {closest(flag.strip('-').lower(), meanings) or SEE_HELP}"
            for flag in mistakes
        )
    word = unknown[0]
    takes_text = any(not action.option_strings and action.type in (str, read_text) for action in actions)
    advice = f"Which flag is it for? {SEE_HELP}"
    if "=" in word:  # perhaps a flag without its dashes, as in lr=3e-4
        advice = closest(word.partition("=")[0], meanings) or advice
    elif "input" in meanings:
        advice = f"Use --input {word}."
    elif word in presets:
        advice = closest(word, meanings)
    elif word.endswith(".py") and presets:  # nanoGPT's config/train_shakespeare_char.py
        advice = "Use --preset, which names a set of flags."
    elif takes_text:
        advice = f"Put quotes around a text of several words. {SEE_HELP}"
    return f"The argument {word!r} was not expected. {advice}"


def suggest(name: str, known: Iterable[str]) -> str:
    """A sentence that names the entry of `known` closest to `name`, or lists them all."""
    return closest(name, {entry: entry for entry in known}) or f"Choose from {', '.join(known)}."


def closest(name, meanings):
    """A sentence that offers the meaning of the key in `meanings` closest to `name`; "" if none is close."""
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
    """Raise one UserError that lists all `complaints`, all numbers that are out of range, infinite or nan, and all
    values that other code has and a field's choices lack.

    Numbers must be 0 or more, and above 0 if the field is Positive. A field's default is always valid; if it is
    negative, other negative numbers are valid as well.
    """
    errors = list(complaints)
    for flag, value, error in range_errors(options):
        if not any(f"{flag} is {value}, but" in complaint for complaint in errors):  # the complaint says more
            errors.append(error)
    if errors:
        raise UserError(" ".join(errors))


def range_errors(options: Any) -> Iterator[tuple[str, Any, str]]:
    """(flag, value, a sentence) for each value that its field does not have."""
    for field in dataclasses.fields(options):
        value: Any = getattr(options, field.name)
        default: Any = field.default
        flag = flag_of(field.name)
        kind, notes = kind_of(field)
        if get_origin(kind) is Literal and value not in get_args(kind):
            known = ", ".join(map(str, get_args(kind)))
            yield flag, value, f"{flag} is {value!r}, but here it can be only {known}. Use its own code."
        if type(value) not in (int, float) or value == default:
            continue
        least, range_name = 0, "0 or more"
        if ABOVE_0 in notes:
            least, range_name = sys.float_info.min, "above 0"
            if isinstance(value, int):
                range_name = "1 or more"
        elif type(default) in (int, float) and default < 0:
            least = -LIMIT
        if not value < LIMIT:
            range_name += f" and below {LIMIT:g}"
        if not least <= value < LIMIT:
            yield flag, value, f"{flag} is {value}, but it must be {range_name}."
