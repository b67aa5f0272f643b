"""Read the rows of files: tables, JSON, and texts, long ones in pieces."""

import collections
import contextlib
import csv
import io
import itertools
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

from plumbing.cli import console
from plumbing.cli.console import UserError
from plumbing.data import python_docs
from plumbing.data.inputs import COMPRESSIONS, Source, file_type, suffix_of
from plumbing.files import open_regular

BLOCK_CHARS = 2**13  # characters in a block of a text file. Recorded positions depend on it
MAX_PIECE = 2**17  # characters. A longer text without a token boundary (such as one repeated letter) is cut
JSON_BLOCK = 2**18  # characters
MAX_SEARCHED = 10_000  # the column must be in one of this many rows at the start of the first file
LONGEST_WORD = 10  # characters. A word of JSON (-Infinity) may be incomplete at the end of a block
EMPTY = (None, "", "[]", "{}", [], {})  # values that say nothing; a CSV file holds lists as text
MAX_UNREAD = 30  # keys that are counted by name; the others are counted together


class Unusable(NamedTuple):
    """Why a row is left out."""

    reason: str  # "has no text under 'text'"
    advice: str = ""  # in whole sentences


class Row(NamedTuple):
    place: str  # in its file: "Line 3"
    values: Any  # a dict of columns, a JSON list, or a piece of text; Unusable if it is malformed
    starts: bool = True  # False for a piece of a long text that continues the piece before it
    # for preparation.py, which numbers rows
    file: int = 0
    number: int = 0  # in its file
    size: int = 0  # bytes
    hash: int = 0  # of the rows of its file up to this one


class Counts:
    """How often things happened to rows, by phrases such as "row left out", and which values were not read."""

    LEFT_OUT = "row left out"

    def __init__(
        self,
        numbers: Mapping[str, int] = {},
        unread: Mapping[str, int] = {},
        examples: Sequence[str] = (),
    ):
        self.numbers = collections.Counter({self.LEFT_OUT: 0, **numbers})
        self.unread = collections.Counter(unread)  # values by their names
        # a sentence about the first row left out, if it came before the place where the counts begin
        self.examples = list(examples)[: self.numbers[self.LEFT_OUT]]
        self.advice = ""  # about that row

    def leave_out(self, place: str, name: str, unusable: Unusable) -> None:
        self.numbers[self.LEFT_OUT] += 1
        if not self.examples:
            self.examples.append(f"{place} of {console.plain(name)} {console.plain(unusable.reason)}.")
            self.advice = unusable.advice

    def add(self, numbers: Mapping[str, int], unread: Iterable[str]) -> None:
        """Count what happened in one row. unread: the name of each value that was not read."""
        self.numbers.update(numbers)
        for name in unread:
            is_listed = name in self.unread or len(self.unread) < MAX_UNREAD
            self.unread[name if is_listed else "other keys"] += 1

    def note(self) -> None:
        """Print notes on what happened, and the values that were not read."""
        for phrase, number in self.numbers.items():
            noun, participle = phrase.split(" ", 1)
            examples = self.examples if phrase == self.LEFT_OUT else []
            if number:
                console.note(" ".join([f"{console.count(number, noun)} {participle}.", *examples]))
        named = []
        for name, number in self.unread.items():
            named.append(f"{console.plain(name, 60)} ({console.count(number, 'value')})")
        if named:
            print("not read:", ", ".join(named))


def unread_in(fields: Mapping[str, Any], read: Collection[str]) -> list[str]:
    """The names of the values that are not `read`, except those that say nothing."""
    return [name for name, value in fields.items() if name not in read and value not in EMPTY]


# ----- The rows of a file -------------------------------------------------------------------------------


def read_rows(source: Source, *, separator: str = "", needed: Sequence[str] = ()) -> Iterator[Row]:
    """Yield the rows of a file. UserError if a `needed` column has no text.

    A document in a text file is a row. A long one is a row for each piece, so that it need not fit in memory and
    several cores can share it.
    """
    kind = file_type(source.name)
    with explain_errors(source.name):
        if source.name == python_docs.NAME:
            yield from (Row("A text", text) for text in python_docs.python_docs())
        elif kind == ".txt":
            yield from read_txt(source, separator)
        else:
            read = {".jsonl": read_json, ".csv": read_csv, ".parquet": read_parquet}[kind]
            yield from check_needed(read(source), source.name, needed)


@contextlib.contextmanager
def explain_errors(name: str) -> Iterator[None]:
    """Context that turns errors in reading a file into a UserError. name: what the user calls the file."""
    try:
        yield
    except (OSError, ValueError, LookupError, NotImplementedError) as error:  # pyarrow's errors are among these
        if isinstance(error, OSError) and error.errno:
            raise OSError(error.errno, os.strerror(error.errno), name) from None
        if isinstance(error, UnicodeDecodeError):
            raise UserError(f"{name} {explain_bytes(error, suffix_of(name))}") from None
        reason = console.first_line(error)
        if "too much memory" in reason:  # zstd's error for an unusually long window
            raise UserError(
                f"{name} was compressed with a long window. Unpack it: zstd -d --long=31 FILE"
            ) from None
        raise UserError(
            f"{name} is damaged, or its ending is wrong: {reason}. Replace it, and run this command again."
        ) from None


# {first bytes of a file that is not text: the command that makes one of it}
STARTS = {b"\x1f\x8b": "gzip -dc FILE", b"\x28\xb5\x2f\xfd": "zstd -dc FILE", b"%PDF": "pdftotext FILE -"}


def explain_bytes(error: UnicodeDecodeError, suffix: str) -> str:
    """Guess from the bytes around one that cannot be read what the file is, and say how to convert it."""
    block = error.object  # a few kilobytes
    text = block.decode("utf-8", "replace")
    guess = "It may be Windows-1252 or Latin-1"
    command = "iconv -f WINDOWS-1252 -t UTF-8 FILE"
    # if most characters beyond ASCII were decoded, the rest of the file is UTF-8
    if sum(char > "\x7f" for char in text) > 2 * text.count("\ufffd"):
        guess = "The rest is UTF-8 (to find it: grep -naxv '.*' FILE)"
        command = "iconv -f UTF-8 -t UTF-8 -c FILE"
    if b"\0" in block:
        guess = (
            "If it is no text, give it the ending of its format, such as .parquet. If it is, remove NUL bytes"
        )
        command = "tr -d '\\000' < FILE"
    for encoding in ("UTF-16BE", "UTF-16LE", "UTF-32BE", "UTF-32LE"):
        text = block.decode(encoding, "replace")
        if (
            text.count(" ") + text.count("\n") > len(text) / 100
        ):  # in a wrong encoding, they are other characters
            guess = f"It may be {encoding}"
            command = f"iconv -f {encoding} -t UTF-8 FILE"
    for start, unpack in STARTS.items():
        if block.startswith(start):
            guess = "It is of another format"
            command = unpack
    found = f"a byte 0x{block[error.start]:02x}"
    return f"is not UTF-8 text: it has {found}. {guess}. Convert it (unpacked): {command} > NEW{suffix}"


# ----- Columns ------------------------------------------------------------------------------------------


def fields_of(values: dict[str, Any], columns: Collection[str]) -> dict[str, Any]:
    """The values of a row by their names. An object with one of `columns` in it is taken apart: doc.text, doc.title."""
    columns = [column for column in columns if column not in values]
    fields = {}
    for key, value in values.items():
        prefix = f"{key}."
        inside = [column.removeprefix(prefix) for column in columns if column.startswith(prefix)]
        if isinstance(value, dict) and inside:
            for name, inner in fields_of(value, inside).items():
                fields[prefix + name] = inner
        else:
            fields[key] = value
    return fields


def text_of(values: Any, columns: Sequence[str]) -> str | Unusable:
    """The texts in the columns of a row, joined by blank lines. Some of them may be null."""
    if isinstance(values, (str, Unusable)):
        return values
    if not isinstance(values, dict):
        return Unusable(f"is not an object with columns, but {console.plain(values, 60)}", OBJECT_ADVICE)
    fields = fields_of(values, columns)
    texts = []
    for column in columns:
        text = fields.get(column)
        if not isinstance(text, str | None):
            reason = f"has no text under {column!r}, but {console.plain(text, 60)}"
            return Unusable(reason, advice_for(values, columns))
        if text:
            texts.append(text)
    if not texts:
        return Unusable(f"has no text under {','.join(columns)!r}", advice_for(values, columns))
    return "\n\n".join(texts)


OBJECT_ADVICE = 'Write each row as an object on a line of its own: {"text": "..."}'


def advice_for(values: dict[str, Any], columns: Sequence[str]) -> str:
    """What to do about an object without a text in these columns: name another one, or write the rows inside it."""
    advice = (
        f"Its columns are {console.plain(', '.join(values), 60)}: {console.plain(values, 60)}. Name the column of the"
        " text with --text-column (doc.text is the key text in an object doc)."
    )
    rows = ""
    for key, value in values.items():
        if isinstance(value, list) and dict in map(type, value):
            rows = f".{key}[]"
        elif isinstance(value, (list, dict)) and key in columns:
            rows = f'{{"{key}": .{key}[]}}'
    if all(isinstance(value, dict) for value in values.values()):
        rows = ".[]"
    if rows:
        advice += f" If the rows are inside this object: jq -c '{rows}' FILE > NEW.jsonl"
    return advice


def check_needed(rows: Iterator[Row], name: str, needed: Sequence[str]) -> Iterator[Row]:
    """Yield rows. UserError unless each `needed` column has a text or null in one of the first MAX_SEARCHED rows."""
    missing = needed
    first: Any = None
    for row in itertools.islice(rows, MAX_SEARCHED):
        if isinstance(row.values, dict):
            first = first or row
            missing = [column for column in missing if not may_have_text(row.values, column)]
        yield row
    if missing and first:
        unusable: Any = text_of(first.values, missing[:1])
        raise UserError(f"{first.place} of {name} {unusable.reason}. {unusable.advice}")
    yield from rows


def may_have_text(row: dict[str, Any], column: str) -> bool:
    value = fields_of(row, [column]).get(column)
    if value is None:
        return not {column, column.split(".")[0]}.isdisjoint(row)
    return isinstance(value, str)


# ----- Tables -------------------------------------------------------------------------------------------

QUOTES_ADVICE = (
    'Close its quotes, and double the quotes inside a text. If they are written as \\":'
    ' sed \'s/\\\\"/""/g\' FILE > NEW'
)


def read_csv(source: Source) -> Iterator[Row]:
    """The rows of a file whose first line names its columns. A row with more or fewer fields is Unusable."""
    csv.field_size_limit(2**27)  # a text may be longer than Python's default, and so may an open quote
    # in countries with decimal commas, programs write semicolons
    delimiters = "\t,;" if suffix_of(source.name) == ".tsv" else ",;\t"
    with open_text(source.path) as file:
        header = next(file, "")
        delimiter = next((char for char in delimiters if char in header), delimiters[0])
        rows: Any = csv.reader(itertools.chain([header], file), delimiter=delimiter, strict=True)
        names = next(rows, [])
        while True:
            begin = rows.line_num + 1
            try:
                fields = next(rows, None)
            except csv.Error as error:
                reason = f"is not a valid row of CSV: {error}"
                if rows.line_num > begin or "end of data" in str(error):  # an open quote swallows rows
                    raise UserError(f"Line {begin} of {source.name} {reason}. {QUOTES_ADVICE}") from None
                yield Row(f"Line {begin}", Unusable(reason, QUOTES_ADVICE))
                continue
            if fields is None:
                return
            if not fields:  # an empty line
                continue
            place = f"Line {begin}" if rows.line_num <= begin else f"Lines {begin} to {rows.line_num}"
            if len(fields) == len(names):
                yield Row(place, as_object(list(zip(names, fields))))
                continue
            found = f"has {console.count(len(fields), 'field')}, but the header has {len(names)}"
            shown = console.plain(header.strip(), 60)
            yield Row(place, Unusable(f"{found} ({shown}): a text with {delimiter!r} needs quotes around it"))


def read_parquet(source: Source) -> Iterator[Row]:
    """The rows of a Parquet file."""
    import pyarrow.parquet  # slow to import

    number = 0
    with pyarrow.parquet.ParquetFile(source.path) as table:
        for batch in table.iter_batches(256):
            for values in zip(*[column.to_pylist() for column in batch.columns]):
                number += 1
                yield Row(f"Row {number}", as_object(list(zip(batch.schema.names, values))))


def as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The last value of each key, as in Python. The others get names of their own, so that they count as not read."""
    values = dict(pairs)
    if len(values) < len(pairs):
        for key, value in pairs:
            if value is not values[key]:
                values[f"{key} given twice"] = value
    return values


# ----- JSON ---------------------------------------------------------------------------------------------


def read_json(source: Source) -> Iterator[Row]:
    """The rows of a JSON file: one per line, entries of an array, or values that span lines."""
    for place, value in read_values(source.path, source.name):
        if isinstance(value, (dict, list)):
            yield Row(place, value)
        else:
            reason = f"is not an object, but {console.plain(repr(value), 60)}"
            yield Row(place, Unusable(reason, OBJECT_ADVICE))


def read_records(path: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield (number, place in words, object) for each line or entry of a JSON file. UserError if one is no object."""
    with explain_errors(path):
        for place, record in read_values(path, path):
            if not isinstance(record, dict):
                raise UserError(
                    f"{place} of {path} is not a valid JSON object: it is another JSON value. Fix or remove it."
                )
            yield int(place.split()[-1]), f"{place} of {path}", record


def read_values(path: str, name: str) -> Iterator[tuple[str, Any]]:
    """Yield (place, value) for each value in a file, or for each entry of its array. Only a few blocks are in memory.

    In JSON lines, a conversation may be a list. So there, a list of all rows must have its bracket alone on line 1.
    """
    decoder = json.JSONDecoder(object_pairs_hook=as_object)
    number = 0
    line = 1
    with open_text(path) as file:
        held = file.read(JSON_BLOCK)
        array = re.match(r"\s*\[" if suffix_of(path) == ".json" else r"\s*\[\s*[\r\n]", held)
        start = array.end() if array else 0
        while True:
            gap: Any = re.compile(r"[\s,\ufeff]*").match(held, start)
            line += held.count("\n", start, gap.end())
            start = gap.end()
            place = f"Entry {number + 1}" if array else f"Line {line}"
            try:
                value, end = decoder.raw_decode(held, start)
            except (ValueError, RecursionError) as error:
                reason = getattr(error, "msg", str(error))
                position = getattr(error, "pos", 0)
                is_cut = reason.startswith("Unterminated") or position >= len(held) - LONGEST_WORD
                # twice as much each time, so that a long value is parsed only a few times
                block = file.read(max(JSON_BLOCK, len(held) - start)) if is_cut else ""
                held = held[start:] + block
                start = 0
                if block:
                    continue
                if held.rstrip() != ("]" if array else ""):
                    raise UserError(
                        f"{place} of {name} is not a valid JSON object: {reason}. Fix or remove it."
                    ) from None
                return
            yield place, value
            line += held.count("\n", start, end)
            number += 1
            start = end


class TextBytes(io.BufferedReader):
    """The bytes of a text file. UnicodeDecodeError if one is NUL: the file is in UTF-16, or no text."""

    def read1(self, size: int = -1, /) -> bytes:
        block = super().read1(size)
        if b"\0" in block:
            start = block.index(b"\0")
            raise UnicodeDecodeError("utf-8", block, start, start + 1, "NUL")
        return block


def open_text(path: str) -> IO[str]:
    """Open a plain, .gz or .zst file as UTF-8 text."""
    stream: Any = open_regular(path)
    suffix = os.path.splitext(path)[1].lower()
    if suffix in COMPRESSIONS:
        import pyarrow  # slow to import

        stream = pyarrow.CompressedInputStream(stream, COMPRESSIONS[suffix])
    return io.TextIOWrapper(TextBytes(stream), encoding="utf-8-sig", newline="")


# ----- Texts --------------------------------------------------------------------------------------------


def read_txt(source: Source, separator: str = "") -> Iterator[Row]:
    """The document in a text file, or those between separators, in pieces of about BLOCK_CHARS characters."""
    with open_text(source.path) as file:
        blocks = iter(lambda: file.read(BLOCK_CHARS), "")
        for number, (text, starts) in enumerate(split_text(blocks, separator, source.name), 1):
            yield Row(f"Piece {number}", text, starts)


def split_text(blocks: Iterable[str], separator: str = "", name: str = "") -> Iterator[tuple[str, bool]]:
    """Yield (piece, whether a document starts there). A short document is one piece; no token crosses a cut.

    Line ends around a separator and empty documents are left out: "One.\n<|endoftext|>\nTwo." -> "One.", "Two."
    """
    blocks = iter(blocks)
    start = list(itertools.islice(blocks, 3))
    # a document of at most two blocks is one piece. A longer text without separators is cut once per block
    whole = 0 if len(start) > 2 and not separator else 2 * BLOCK_CHARS
    line_ends = "\r\n" if separator else ""
    held = ""  # text read but not yet yielded
    starts = True  # whether a document starts there
    has_separator = False
    for block in itertools.chain(start, blocks, [""]):
        held = (held + block).lstrip(line_ends if starts else "")
        texts = held.split(separator) if separator else [held]
        has_separator = has_separator or len(texts) > 1
        held = texts.pop() if block else ""
        for text in texts:  # each up to the end of a document
            text = text.lstrip(line_ends if starts else "").rstrip(line_ends)
            if text:
                yield text, starts
            starts = True
        if len(held) > whole:
            stop = len(held.rstrip(line_ends)) - len(separator)  # a separator may begin in the last characters
            # only the last two blocks have not been searched
            cut = find_token_boundary(held, max(0, len(held) - 2 * BLOCK_CHARS), stop)
            if len(held) > MAX_PIECE:
                cut = cut or len(held) - len(separator)
            if cut:
                yield held[:cut], starts
                held = held[cut:]
                starts = False
    if separator and not has_separator:
        console.note(f"{name} does not contain --separator {separator!r}, so it is one document.")


# line ends and punctuation: ASCII, Chinese and Japanese, Arabic and Urdu, Devanagari, Burmese, Khmer
AFTER_A_LETTER = (
    "\n\r\t.,;:!?\u3001\u3002\uff0c\uff0e\uff01\uff1a\uff1b\uff1f\u060c\u061b\u061f\u06d4\u0964\u104b\u17d4"
)


def find_token_boundary(text: str, start: int, stop: int) -> int:
    """The last position between `start` and `stop` that no token of GPT-2's or GPT-4's pattern crosses, else 0.

    It is before a space that does not follow white space. Some scripts have no spaces, so it may also be between a
    letter and a line end or punctuation. subtle: GPT-4's pattern joins punctuation with a line end, and letters with an
    apostrophe.
    """
    for position in range(stop - 1, start, -1):
        before, after = text[position - 1], text[position]
        if after == " " and not before.isspace():
            return position
        if after in AFTER_A_LETTER and before.isalpha():
            return position
    return 0
