"""What is in the files of a data set: the rows of tables and of JSON, and texts in pieces."""

import ast
import contextlib
import csv
import hashlib
import io
import itertools
import json
import os
import re
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from plumbing.cli import console
from plumbing.cli.console import UserError
from plumbing.data.sources import COMPRESSIONS, PYTHON_DOCS, Source, file_type, suffix_of
from plumbing.files import open_regular

BLOCK_CHARS = 2**13  # .txt files are read in pieces of about this many characters; positions count in pieces
MAX_PIECE = 2**17  # characters; longer text without a token boundary, such as one repeated letter, is cut anyway
JSON_BLOCK = 2**18  # characters
MAX_SEARCHED = 10_000  # rows of the first file, of which one must have the column
LONGEST_WORD = 10  # of JSON, such as -Infinity, which a block may end in


class Unusable(NamedTuple):
    """Why a row is left out: "has no text under 'text'"."""

    reason: str
    values: Any = None  # of the row


class Row(NamedTuple):
    place: str  # in its file: "Line 3"
    values: Any  # a dict by column, a list of JSON's, a piece of a text; Unusable if it would be read wrongly
    starts: bool = True  # False if it continues the document before it, as a long text is read in pieces


class Counts:
    """Counts the rows that cannot be used, and `others`: (noun, what happened to it). Names the first three rows."""

    def __init__(self, others: Sequence[tuple[str, str]] = (), numbers: Sequence[int] = ()):
        self.nouns = [("row", "left out"), *others]
        self.numbers = [*numbers] or [0] * len(self.nouns)
        self.sentences, self.first = [], None

    def leave_out(self, place: str, name: str, unusable: Unusable) -> None:
        self.numbers[0] += 1
        if len(self.sentences) < 3:
            self.sentences.append(f"{place} of {console.plain(name)} {console.plain(unusable.reason)}.")
            self.first = self.first or (f"{place} of {name}", unusable)

    def add(self, more: Sequence[int]) -> None:
        """Count what happened to the others in a row that is used."""
        for i, number in enumerate(more, 1):
            self.numbers[i] += number

    def note(self) -> None:
        examples = " ".join(self.sentences)  # of the first, the rows left out
        for number, (noun, participle) in zip(self.numbers, self.nouns):
            if number:
                print(f"note: {console.count(number, noun)} {participle}. {examples}".rstrip())
            examples = ""


# ----- The rows of a file -------------------------------------------------------------------------------


def read_rows(
    source: Source, columns: Sequence[str], *, separator: str = "", needed: Sequence[str] = ()
) -> Iterator[Row]:
    """The rows of a file; of a table, with those of the `columns` it has. UserError if it has no text in `needed`.

    A document in a text file is one row, or one for each piece of a long one: it need not fit in memory, and several
    cores can share it.
    """
    kind = file_type(source.name)
    with explain_errors(source.name):
        if source.name == PYTHON_DOCS:
            yield from (Row("A text", text) for text in python_docs())
        elif kind == ".txt":
            yield from read_txt(source, separator)
        elif kind == ".jsonl":
            yield from check_needed(read_json(source), source.name, needed)
        elif kind == ".csv":
            yield from check_needed(read_csv(source, columns), source.name, needed)
        else:
            yield from read_parquet(source, columns, needed)


@contextlib.contextmanager
def explain_errors(name):
    """Turn an error while the file that the user calls `name` is read into a UserError."""
    try:
        yield
    except (OSError, ValueError, LookupError, NotImplementedError) as error:  # includes pyarrow's own
        if isinstance(error, OSError) and error.errno:
            raise OSError(error.errno, os.strerror(error.errno), name) from None
        if isinstance(error, UnicodeDecodeError):
            raise UserError(f"{name} {explain_bytes(error, suffix_of(name))}") from None
        wrong = f"is damaged, or not what its name says: {console.first_line(error)}"
        raise UserError(f"{name} {wrong}. Replace it, and run this command again.") from None


def explain_bytes(error, suffix):
    """What the bytes around one that is no UTF-8 seem to be, and the command that makes UTF-8 of them."""
    text = error.object.decode("utf-8", "replace")  # a few kilobytes
    wrong = f"a byte 0x{error.object[error.start]:02x}, which grep -naxv '.*' FILE shows"
    maybe, command = "It may be Windows' or Latin-1", "iconv -f WINDOWS-1252 -t UTF-8"
    # beside bytes that are wrong there are letters that are right only where all others are UTF-8
    if sum(char > "\x7f" for char in text) > 2 * text.count("\ufffd"):
        maybe, command = "The rest is", "iconv -f UTF-8 -t UTF-8 -c"
    return f"is not UTF-8 text: it has {wrong}. {maybe}. Convert it, unpacked: {command} FILE > NEW{suffix}"


# ----- Columns ------------------------------------------------------------------------------------------


def find(row, column):
    """What is in a row under the name of a column, or under text in its object doc for "doc.text"; None if nothing."""
    if column in row:
        return row[column]
    for key in column.split("."):
        row = row.get(key) if isinstance(row, dict) else None
    return row


def root_of(column, fields):
    """The column of a table in which the one called so is: doc for "doc.text", unless there is one of that name."""
    return column if column in fields else column.split(".")[0]


def text_of(values: Any, columns: Sequence[str]) -> str | Unusable:
    """One text of the columns of a row, of which some may be null; a blank line stands between two of them."""
    if isinstance(values, (str, Unusable)):
        return values
    if not isinstance(values, dict):
        return Unusable(f"is no object with columns, but {console.plain(values, 60)}")
    texts: list[Any] = [find(values, column) for column in columns]
    for column, text in zip(columns, texts):
        if not (text is None or isinstance(text, str)):
            return Unusable(f"has no text under {column!r}, but {console.plain(text, 60)}")
    text = "\n\n".join(filter(None, texts))
    return text or Unusable(f"has no text under {','.join(columns)!r}")


def check_needed(rows, name, needed, most=MAX_SEARCHED):
    """Yield rows; UserError unless each of the `needed` columns is in one of the first, with a text or null."""
    missing, first = list(needed), None
    for number, row in enumerate(rows):
        if missing and isinstance(row.values, dict):
            first = first or row
            missing = [column for column in missing if not may_have_text(row.values, column)]
        if missing and number == most:
            break
        yield row
    if missing and first:
        unusable = Unusable(f"has no text under {missing[0]!r}", first.values)
        raise UserError(explain(f"{first.place} of {name}", unusable, COLUMN_ADVICE))


def may_have_text(row, column):
    value = find(row, column)
    return isinstance(value, str) or (value is None and root_of(column, row) in row)


def explain(place: str, unusable: Unusable, advice: str) -> str:
    """What is wrong with a row, what it holds, and what to do."""
    held = ""
    if isinstance(unusable.values, dict):
        held = f" Its columns are {', '.join(unusable.values)}: {console.plain(unusable.values, 300)}."
    return f"{place} {unusable.reason}.{held} {advice}"


COLUMN_ADVICE = (
    "Name the column of the text with --text-column (doc.text is the text in an object doc). If the rows are a list in"
    " a larger object, write them one a line: jq -c '.KEY[]' FILE > NEW.jsonl"
)


# ----- Tables -------------------------------------------------------------------------------------------


def read_csv(source, columns):
    """The rows of a file whose first line names its columns. A row with more or fewer fields would be read wrongly."""
    csv.field_size_limit(2**27)  # a text may exceed Python's default, and a quote may be left open
    delimiters = "\t,;" if suffix_of(source.name) == ".tsv" else ",;\t"
    with open_text(source.path) as file:
        header = next(file, "")
        # a program may write semicolons where numbers have commas
        delimiter = next((char for char in delimiters if char in header), delimiters[0])
        rows: Any = csv.reader(itertools.chain([header], file), delimiter=delimiter, strict=True)
        names = next(rows, [])
        for column in columns:
            if names.count(column) > 1:
                raise UserError(
                    f"{source.name} has {names.count(column)} columns called {column!r}. Rename all but one."
                )
        while True:
            begin, wrong = rows.line_num + 1, ""
            try:
                fields = next(rows, None)
            except csv.Error as error:
                fields, wrong = [], f"is no row of CSV: {error}"
            if fields is None:
                return
            place = f"Line {begin}" if rows.line_num <= begin else f"Lines {begin} to {rows.line_num}"
            if wrong and (rows.line_num > begin or "end of data" in wrong):  # an open quote swallows rows
                raise UserError(
                    f"Line {begin} of {source.name} {wrong}. Close its quotes, and write those in a text twice."
                )
            if fields and len(fields) != len(names):
                wrong = f"has {console.count(len(fields), 'field')}, but the header has {len(names)}"
                wrong += f": a text with {delimiter!r} needs quotes around it"
            if fields or wrong:
                yield Row(place, Unusable(wrong) if wrong else dict(zip(names, fields)))


def read_parquet(source, columns, needed):
    """The rows of a Parquet file, with those of the columns that it has."""
    import pyarrow.parquet  # slow to import

    with pyarrow.parquet.ParquetFile(source.path) as table:
        fields = table.schema_arrow.names
        roots = {column: root_of(column, fields) for column in columns}
        names = [name for name in dict.fromkeys(roots.values()) if name in fields]
        missing = [column for column in needed if roots[column] not in fields] if names else columns[:1]
        if missing:
            advice = COLUMN_ADVICE if needed else "Use another data set."
            raise UserError(
                f"{source.name} has no column called {missing[0]!r}, but {', '.join(fields) or 'none'}. {advice}"
            )
        # a.b may be a column, or a field of a: Parquet has one name for both
        batches = (batch.select(names) for batch in table.iter_batches(256, columns=names))
        rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
        rows = (Row(f"Row {number}", row) for number, row in enumerate(rows, 1))
        yield from check_needed(rows, source.name, needed, most=0)  # all rows have the types of the first


# ----- JSON ---------------------------------------------------------------------------------------------


def read_json(source):
    """The rows of a file of JSON lines, of an array, or of values over several lines."""
    for place, value in read_values(source.path, source.name):
        is_row = isinstance(value, (dict, list))
        yield Row(place, value if is_row else Unusable(f"is no object, but {console.plain(repr(value), 60)}"))


def read_records(path: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(number, its place in words, object) for each line with JSON, or entry of an array; UserError if one is none."""
    with explain_errors(path):
        for place, record in read_values(path, path):
            if not isinstance(record, dict):
                raise UserError(
                    f"{place} of {path} is not a valid JSON object: it is another JSON value. Fix or remove it."
                )
            yield int(place.split()[-1]), f"{place} of {path}", record


def read_values(path, name):
    """Yield (place, value) for each value in a file, one on each line or several, or for each entry of its array.

    Only a few blocks are in memory. As a conversation in JSON lines may be a list, an array there is on several lines.
    """
    decoder, number, line, start = json.JSONDecoder(), 0, 1, 0
    with open_text(path) as file:
        held = file.read(JSON_BLOCK)
        array = re.match(r"\s*\[" if suffix_of(path) == ".json" else r"\s*\[\s*[\r\n]", held)
        start = array.end() if array else 0
        while True:
            gap: Any = re.compile(r"[\s,\ufeff]*").match(held, start)
            line, start = line + held.count("\n", start, gap.end()), gap.end()
            place = f"Entry {number + 1}" if array else f"Line {line}"
            try:
                value, end = decoder.raw_decode(held, start)
            except (ValueError, RecursionError) as error:
                # it may only be incomplete, or this is the end
                reason, position = getattr(error, "msg", str(error)), getattr(error, "pos", 0)
                is_cut = reason.startswith("Unterminated") or position >= len(held) - LONGEST_WORD
                # twice as much each time, so that a long value is not parsed often
                block = file.read(max(JSON_BLOCK, len(held) - start)) if is_cut else ""
                held, start = held[start:] + block, 0
                if block:
                    continue
                if held.rstrip() != ("]" if array else ""):
                    raise UserError(
                        f"{place} of {name} is not a valid JSON object: {reason}. Fix or remove it."
                    ) from None
                return
            yield place, value
            line, number, start = line + held.count("\n", start, end), number + 1, end


# {how a file begins that is no text: the command that makes some of it}
STARTS = {b"\x1f\x8b": "gzip -dc", b"\x28\xb5\x2f\xfd": "zstd -dc", b"PK\x03\x04": "unzip -p"}
STARTS |= dict.fromkeys([b"\xff\xfe", b"\xfe\xff"], "iconv -f UTF-16 -t UTF-8")


def open_text(path):
    """Open a plain, .gz or .zst file as UTF-8 text; ValueError at once if it begins as another kind of file does."""
    stream: Any = open_regular(path)
    suffix = os.path.splitext(path)[1].lower()
    if suffix in COMPRESSIONS:
        import pyarrow  # slow to import

        stream = io.BufferedReader(pyarrow.CompressedInputStream(stream, COMPRESSIONS[suffix]))
    start = stream.peek(4)[:4]
    if b"\0" in start[:2]:  # UTF-16 without a mark of the byte order, which is UTF-8, too
        start = b"\xff\xfe"
    if command := next((STARTS[known] for known in STARTS if start.startswith(known)), ""):
        raise ValueError(f"it is no plain text in UTF-8. Make some of it: {command} FILE > NEW")
    return io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")


# ----- Texts --------------------------------------------------------------------------------------------


def read_txt(source, separator=""):
    """A document, or one per `separator`, in pieces of about BLOCK_CHARS characters."""
    with open_text(source.path) as file:
        pieces = split_text(iter(lambda: file.read(BLOCK_CHARS), ""), separator, source.name)
        for number, (text, starts) in enumerate(pieces, 1):
            if starts and not separator and "\n<|endoftext|>" in text:
                print(f"note: {source.name} has lines with <|endoftext|>, which are treated as text.")
                print('If they separate documents, give fineweb.py --separator "<|endoftext|>".')
            yield Row(f"Piece {number}", text, starts)


def split_text(blocks, separator="", name=""):
    """Yield (piece, whether a document starts there): at each `separator`, and where no token crosses the boundary.

    Line ends around a separator and empty documents are left out: "One.\n<|endoftext|>\nTwo." -> "One.", "Two."
    """
    line_ends = "\r\n" if separator else ""
    blocks = iter(blocks)
    start = list(itertools.islice(blocks, 3))
    # a document of at most two blocks is one piece. A longer text without separators is cut behind every block
    whole = 0 if len(start) > 2 and not separator else 2 * BLOCK_CHARS
    held, starts, found = "", True, False  # text read but not yet yielded, and whether a document starts there
    for block in itertools.chain(start, blocks, [""]):
        held = (held + block).lstrip(line_ends if starts else "")
        texts = held.split(separator) if separator else [held]
        found = found or len(texts) > 1
        held = texts.pop() if block else ""
        for text in texts:  # each up to the end of a document
            text = text.lstrip(line_ends if starts else "").rstrip(line_ends)
            if text:
                yield text, starts
            starts = True
        if len(held) > whole:
            stop = len(held.rstrip(line_ends)) - len(separator)  # it may have begun in the last characters
            # what is before the last two blocks was searched before
            cut = find_token_boundary(held, max(0, len(held) - 2 * BLOCK_CHARS), stop)
            if len(held) > MAX_PIECE:
                cut = cut or len(held) - len(separator)
            if cut:
                yield held[:cut], starts
                held, starts = held[cut:], False
    if separator and not found:
        print(f"note: {name} does not contain --separator {separator!r}, so it is one document.")


# line ends and punctuation: ASCII, Chinese and Japanese, Arabic and Urdu, Devanagari, Burmese, Khmer
AFTER_A_LETTER = (
    "\n\r\t.,;:!?\u3001\u3002\uff0c\uff0e\uff01\uff1a\uff1b\uff1f\u060c\u061b\u061f\u06d4\u0964\u104b\u17d4"
)


def find_token_boundary(text, start, stop):
    """The last position between `start` and `stop` that no token of the patterns in tokenizer.py crosses, else 0.

    That is before a space that follows anything but white space or, as not all scripts have spaces, between a letter
    and a line end or punctuation. subtle: GPT-4's pattern joins punctuation and a line end, letters and an apostrophe.
    """
    for position in range(stop - 1, start, -1):
        before, after = text[position - 1], text[position]
        if after == " " and not before.isspace():
            return position
        if after in AFTER_A_LETTER and before.isalpha():
            return position
    return 0


def python_docs():
    """The language reference and the standard library's docstrings: a document per topic and per module.

    They are ordered by a hash of their names: a fixed order, but the first tenth is representative of the rest.
    """
    import pydoc_data.topics

    documents = dict(pydoc_data.topics.topics)
    root = sysconfig.get_paths()["stdlib"]
    for folder, folders, _ in os.walk(root):
        folders[:] = set(folders) - {"site-packages", "dist-packages", "test", "tests", "idle_test"}
        for path in Path(folder).glob("*.py"):
            module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            documents[module + ".py"] = docstrings(path, module)
    keys = sorted(documents, key=lambda key: hashlib.sha256(key.encode()).digest())
    return [documents[key] for key in keys if documents[key]]


DOCUMENTED = {ast.Module: "module", ast.ClassDef: "class", ast.FunctionDef: "def", ast.AsyncFunctionDef: "def"}


def docstrings(path, module):
    """The docstrings of one source file, each after the line that declares what it documents."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # lib2to3 and others ship files that are not Python 3
        return ""
    parts = []
    nodes: list[Any] = sorted(ast.walk(tree), key=lambda node: getattr(node, "lineno", 0))
    for node in nodes:
        kind = DOCUMENTED.get(type(node))
        text = ast.get_docstring(node) if kind else None
        if text:
            arguments = f"({ast.unparse(node.args)})" if kind == "def" else ""
            parts += [f"{kind} {getattr(node, 'name', module)}{arguments}", text]
    return "\n\n".join(parts)
