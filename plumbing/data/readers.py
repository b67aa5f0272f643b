"""Documents: what is in the files of a data set, read in pieces by the standard library and pyarrow."""

import ast
import codecs
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
from pathlib import Path
from typing import Any, NamedTuple

from plumbing.cli import console
from plumbing.cli.console import UserError
from plumbing.data.sources import COMPRESSIONS, PYTHON_DOCS, example, file_type, suffix_of
from plumbing.files import open_regular

BLOCK_CHARS = 2**13  # .txt files are read in pieces of about this many characters; positions count in pieces
MAX_PIECE = 2**17  # characters; longer text without a token boundary, such as one repeated letter, is cut anyway
BATCH_CHARS = 2**19  # characters given to a core at a time: 0.04 s of work, so that the overhead is negligible


class Piece(NamedTuple):
    text: str
    starts: bool  # whether a document starts here


class Batch(NamedTuple):
    source: int  # the number of the file it is from
    first_piece: int  # the number of its first piece in that file
    pieces: list[Piece]


# ----- Reading ------------------------------------------------------------------------------------------
# Documents are read as pieces. Most are a single piece; a long .txt file is one document, which is split, so that
# it need not fit in memory and several cores can share it.


def read_pieces(source, text_column, skip=0, separator=""):
    """Read the pieces of a file, without the first `skip`."""
    if file_type(source.name) == ".txt":
        pieces = read_txt(source, separator)
    else:
        texts = python_docs() if source.name == PYTHON_DOCS else read_texts(source, text_column)
        pieces = (Piece(text, True) for text in texts)
    with explain_errors(source.name):
        yield from itertools.islice(pieces, skip, None)


@contextlib.contextmanager
def explain_errors(name):
    """Turn an error while the file that the user calls `name` is read into a UserError."""
    try:
        yield
    except (OSError, ValueError, LookupError, NotImplementedError, csv.Error) as error:  # includes pyarrow's own
        if isinstance(error, OSError) and error.errno:
            raise OSError(error.errno, os.strerror(error.errno), name) from None
        wrong = f"is damaged, or not what its name says: {console.first_line(error)}"
        advice = "Replace it, and run this command again."
        if isinstance(error, UnicodeError):
            wrong = f"is not UTF-8 text: {console.first_line(error)}"
            new = f"NEW{suffix_of(name)}"
            advice = f"If it is Latin-1, convert it, unpacked: iconv -f LATIN1 -t UTF-8 FILE > {new}"
        raise UserError(f"{name} {wrong}. {advice}") from None


# ----- Rows and columns ---------------------------------------------------------------------------------


def read_texts(source, text_column):
    """The text of each row of a table, or of each object of JSON, in these columns, such as "title,doc.text"."""
    columns = text_column.split(",")
    if file_type(source.name) == ".jsonl":
        for number, place, record in read_records(source.path, source.name):
            check_columns(place, record, columns, record, number)
            yield join(record, columns)
        return
    with open_rows(source) as (fields, read_columns):
        if not all(isinstance(find(fields, column), str) for column in columns):
            check_columns(source.name, fields, columns, next(read_columns(text_columns(fields)), {}))
        for row in read_columns(columns):
            yield join(row, columns)


def read_rows(source, columns):
    """Yield (place, row) for each row of a table or entry of JSON; of a table, with those of the `columns` it has."""
    if file_type(source.name) == ".jsonl":
        for _, place, record in read_records(source.path, source.name, kinds=(dict, list)):
            yield place, record
        return
    with explain_errors(source.name), open_rows(source) as (fields, read_columns):
        found = [column for column in columns if column in fields]
        if not found:
            raise UserError(
                f"{source.name} has no column called {columns[0]}, but {', '.join(fields)}. Use another data set."
            )
        for number, row in enumerate(read_columns(found), 1):
            yield f"Row {number} of {source.name}", row


@contextlib.contextmanager
def open_rows(source):
    """(fields, function from names of columns to rows with these) of a table; the fields are like a row of it.

    A text is "" there, an object is a dict, and anything else is its type.
    """
    if file_type(source.name) == ".csv":
        csv.field_size_limit(2**27)  # a text may exceed Python's default, and a quote may be left open
        dialect = "excel-tab" if suffix_of(source.name) == ".tsv" else "excel"
        with open_text(source.path) as file:
            rows = csv.DictReader(file, dialect=dialect, strict=True)
            yield dict.fromkeys(rows.fieldnames or [], ""), lambda columns: rows
        return
    import pyarrow.parquet  # slow to import

    table: Any
    if source.name.endswith(".arrow"):
        table = pyarrow.ipc.open_stream(pyarrow.memory_map(source.path))
        schema, read_batches = table.schema, lambda columns: table
    else:
        table = pyarrow.parquet.ParquetFile(source.path)
        schema, read_batches = table.schema_arrow, lambda columns: table.iter_batches(256, columns=columns)
    fields = {field.name: shape_of(field.type) for field in schema}

    def read_columns(columns):
        # doc.text may be called so, too, and is read then: Parquet has one name for both
        names = dict.fromkeys(column if column in fields else column.split(".")[0] for column in columns)
        for batch in read_batches(columns):
            yield from batch.select(list(names)).to_pylist()

    with table:
        yield fields, read_columns


def shape_of(kind):
    """A type as it stands in the fields of a table: "" for text; lists and maps of strings are not text."""
    if str(kind).startswith("struct<"):
        return {field.name: shape_of(field.type) for field in kind}
    return "" if re.match("(dictionary<values=)?(large_)?string", str(kind)) else kind


def find(row, column):
    """What is in a row under the name of a column, or under text in its object doc for "doc.text"; None if nothing."""
    if column in row:
        return row[column]
    for key in column.split("."):
        row = row.get(key) if isinstance(row, dict) else None
    return row


def join(row, columns):
    """One text of the columns of a row; a blank line stands between two of them."""
    return "\n\n".join(filter(None, (find(row, column) for column in columns)))


def text_columns(fields, prefix=""):
    """The names of all strings in a row: ["title", "doc.text"]; not those of images, which are objects with bytes."""
    names = []
    for key, value in fields.items():
        if isinstance(value, dict) and "bytes" not in value:
            names += text_columns(value, f"{prefix}{key}.")
        elif isinstance(value, str):
            names.append(prefix + key)
    return names


def check_columns(place, fields, columns, row, number=0):
    """Raise UserError unless there is text in these columns, of an object of JSON or, by its fields, of a table.

    number: of an object, 0 for a table. Some of several columns of an object may be null or, after the first, missing.
    """
    has_text = any(isinstance(find(fields, column), str) for column in columns)
    for column in columns:
        found = find(fields, column)
        is_there = number and (column.split(".")[0] in fields or column in fields)
        may_lack = found is None and has_text and (is_there or number > 1)
        if isinstance(found, str) or may_lack:
            continue
        held = "" if found is None else f", but {console.plain(found, 60)}"
        wrong = f"{place} has no text under {column!r}{held}."
        if is_there:
            raise UserError(f"{wrong} Fix or remove it, or choose another with --text-column.")
        others = text_columns(fields)
        if not others:
            raise UserError(f"{place} has no column of strings, so there is no text in it. Use another file.")
        texts = {other: console.plain(find(row, other) or "", 40) for other in others}
        examples = "; ".join(f"{other}: {text}" for other, text in texts.items() if text)
        advice = f"Choose text with --text-column: {', '.join(others)}."
        if examples:
            advice += f" A row has {examples}."
        raise UserError(f"{wrong} {advice} {example('--text-column', others[0])}")


# ----- JSON ---------------------------------------------------------------------------------------------


def read_records(path, name=None, kinds=(dict,)):
    """Yield (number, its place in words, record) for each line with JSON, or entry of a .json file with an array."""
    name = name or path
    with explain_errors(name), open_text(path) as file:
        start = file.read(BLOCK_CHARS)
        # other .json files are read as JSON lines, as C4's are
        if suffix_of(path) == ".json" and start.lstrip().startswith("["):
            noun, texts = "Entry", read_array(start, file)
        else:
            noun, texts = "Line", itertools.chain(io.StringIO(start + file.readline(), newline=""), file)
        for number, text in enumerate(texts, 1):
            if text.isspace():
                continue
            place = f"{noun} {number} of {name}"
            try:
                record = json.loads(text)
                if not isinstance(record, kinds):
                    raise ValueError("it is another JSON value")
            except (ValueError, RecursionError) as error:  # RecursionError: brackets nested too deeply
                reason = getattr(error, "msg", error)
                raise UserError(f"{place} is not a valid JSON object: {reason}. Fix or remove it.") from None
            yield number, place, record


def read_array(held, file):
    """Yield the text of each entry of a JSON array, of which only a few blocks are in memory; `held` is the first."""
    decoder, start = json.JSONDecoder(), held.index("[") + 1
    while True:
        between: Any = re.compile(r"[\s,]*").match(held, start)
        start = between.end()
        try:
            end = decoder.raw_decode(held, start)[1]
        except (ValueError, RecursionError):  # it may only be incomplete, or this is the end
            # twice as much each time, so that a long entry is not parsed often
            block = file.read(max(BLOCK_CHARS, len(held) - start))
            held, start = held[start:] + block, 0
            if not block:
                if held.rstrip() != "]":
                    yield held  # the caller says what is wrong with it
                return
        else:
            yield held[start:end]
            start = end


def open_text(path):
    """Open a plain, .gz or .zst file as text: UTF-8, or UTF-16 if it begins with that byte-order mark."""
    stream: Any = open_regular(path)
    suffix = os.path.splitext(path)[1].lower()
    if suffix in COMPRESSIONS:
        import pyarrow  # slow to import

        stream = io.BufferedReader(pyarrow.CompressedInputStream(stream, COMPRESSIONS[suffix]))
    is_utf16 = stream.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    return io.TextIOWrapper(stream, encoding="utf-16" if is_utf16 else "utf-8-sig", newline="")


def read_txt(source, separator=""):
    """One document, or one per `separator`, in pieces of about BLOCK_CHARS characters."""
    with open_text(source.path) as file:
        for piece in split_text(iter(lambda: file.read(BLOCK_CHARS), ""), separator, source.name):
            if piece.starts and not separator and "\n<|endoftext|>" in piece.text:
                print(f"note: {source.name} has lines with <|endoftext|>, which are treated as text.")
                print('If they separate documents, give fineweb.py --separator "<|endoftext|>".')
            yield piece


def split_text(blocks, separator="", name=""):
    """Split text into pieces: at each `separator`, and long documents where no token crosses the boundary.

    Line ends around a separator and empty documents are left out: "One.\n<|endoftext|>\nTwo." -> "One.", "Two."
    """
    # a document that has more characters than `whole` is split
    line_ends, whole = ("\r\n", 2 * BLOCK_CHARS) if separator else ("", 0)
    held, starts, found = "", True, False  # text read but not yet yielded, and whether a document starts there
    for block in itertools.chain(blocks, [""]):
        held = (held + block).lstrip(line_ends if starts else "")
        texts = held.split(separator) if separator else [held]
        found = found or len(texts) > 1
        held = texts.pop() if block else ""
        for text in texts:  # each up to the end of a document
            text = text.lstrip(line_ends if starts else "").rstrip(line_ends)
            if text:
                yield Piece(text, starts)
            starts = True
        if len(held) > whole:
            stop = len(held.rstrip(line_ends)) - len(separator)  # it may have begun in the last characters
            # what is before the last two blocks was searched before
            cut = find_token_boundary(held, max(0, len(held) - 2 * BLOCK_CHARS), stop)
            if len(held) > MAX_PIECE:
                cut = cut or len(held) - len(separator)
            if cut:
                yield Piece(held[:cut], starts)
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


# ----- Batches ------------------------------------------------------------------------------------------


def read_batches(downloads, text_column, skip=0, separator=""):
    """Batches of about BATCH_CHARS of text of the files of `downloads`; of the first one without `skip` pieces."""
    for number, source in downloads:
        held, num_chars = [], 0
        for piece in read_pieces(source, text_column, skip, separator):
            held.append(piece)
            num_chars += len(piece.text)
            if num_chars >= BATCH_CHARS:
                yield Batch(number, skip, held)
                skip += len(held)
                held, num_chars = [], 0
        yield Batch(number, skip, held)
        skip = 0


def num_cores():
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
