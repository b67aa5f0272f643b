"""Documents: inputs listed, downloaded, decompressed and read, for every program that takes --input."""

import ast
import contextlib
import glob
import hashlib
import http.client
import io
import itertools
import json
import os
import platform
import re
import sysconfig
import threading
import time
import urllib.parse
import urllib.request
import warnings
from concurrent.futures import Future
from typing import NamedTuple

from tqdm import tqdm

from plumbing import cli
from plumbing.cli import UserError
from plumbing.files import atomic_write, open_regular
from plumbing.shards import sample

PYTHON_DOCS = f"the documentation of Python {platform.python_version()}"
RETRY_SECONDS = 1.0  # before the second attempt; doubles with each further one
BLOCK_CHARS = 2**13  # .txt files are read in pieces of about this many characters; positions count in pieces
MAX_PIECE = 2**17  # characters; a longer text without a token boundary, such as one repeated letter, is cut anyway
BATCH_CHARS = 2**19  # characters given to a core at a time: 0.1 s of work, so that the overhead is negligible
# bytes; a core reads a parquet row group of at most this size as a whole. datatrove, which wrote FineWeb-Edu,
# puts 1,000 documents, some 5 MB, into one
MAX_ROW_GROUP = 2**26
MAX_HASHED = 2**22  # bytes; only a sample of a larger input is hashed


class Source(NamedTuple):
    name: str  # a path, a URL, or a path in a repository on the hub
    size: int  # bytes, to recognize another file of the same name; 0 if unknown
    repo: str = ""  # on the hub: the data set
    revision: str = ""  # on the hub: the commit
    sampled_hash: str = ""  # recognizes other contents of the same size in a local file

    def recorded(self):
        """The source's entry in meta.json: [name, size, hash]; a local file has no folder there, so it may move."""
        is_local = not self.repo and not is_url(self.name)
        return [os.path.basename(self.name) if is_local else self.name, self.size, self.sampled_hash]


class Piece(NamedTuple):
    text: str
    starts: bool  # whether a document starts here


class RowGroup(NamedTuple):
    """Rows of a parquet file, read by the core that tokenizes them, so that no single core reads for all."""

    path: str
    name: str  # the user's name for the file
    text_column: str
    number: int
    num_rows: int
    skip: int = 0  # rows that are left out at its beginning


class Batch(NamedTuple):
    source: int  # the number of the file it is from
    first_piece: int  # the number of its first piece in that file
    pieces: list[Piece] | RowGroup
    finished_download: str = ""  # with a file's last batch: the download to remove once all batches are read


# -----------------------------------------------------------------------------
# Inputs


def list_inputs(patterns, types=(".parquet", ".jsonl", ".txt")):
    """List the files and URLs named by `patterns`: a folder's files, a glob's matches, sorted by name."""
    sources = []
    for pattern in patterns:
        names = [pattern]
        if os.path.isdir(pattern):
            files = [file for file in sorted(os.listdir(pattern)) if file_type(file) and not OURS.match(file)]
            names = [os.path.join(pattern, file) for file in files]
        elif not is_url(pattern) and not os.path.lexists(pattern):
            names = sorted(glob.glob(pattern, recursive=True))
        if not names:
            raise UserError(f"No file matches {pattern}. Check the path. {SUPPORTED}")
        for name in names:
            if file_type(name) not in types:
                raise UserError(f"{name} is not one of {', '.join(types)}, which can be read here. {SUPPORTED}")
            sources.append(Source(name, 0) if is_url(name) else local_source(name))
    return sources


SUPPORTED = "Text is read from .parquet, .jsonl (or .json) and .txt; the last two may be compressed (.gz, .zst)."
OURS = re.compile(r"\.|meta(\.part-.*)?\.json$|tokenizer\.tiktoken\.json$")  # never input


def local_source(name):
    """A local file with hashes of its first bytes and of its contents; of a large file, only a sample is hashed."""
    with open_regular(name) as file:
        size, start = os.fstat(file.fileno()).st_size, file.read(4096)
        contents = start + file.read() if size <= MAX_HASHED else sample(name)
    hashes = [hashlib.sha256(part).hexdigest()[:8] for part in (start, contents)]
    return Source(name, size, sampled_hash="".join(hashes))


def is_url(name):
    return name.startswith(("http://", "https://"))


def file_type(name):
    """ "a/b.jsonl.gz" -> ".jsonl", "a.csv" -> ""; a .json file is read as JSON lines, as in C4."""
    path = urllib.parse.urlsplit(name).path if is_url(name) else name
    match = re.search(r"\.(parquet|(?:(jsonl?)|(txt))(?:\.gz|\.zst)?)$", path)
    return (".jsonl" if match[2] else ".txt" if match[3] else ".parquet") if match else ""


# -----------------------------------------------------------------------------
# Documents are read as pieces. Most are a single piece; a long .txt file is one document, split where
# no token can cross the boundary, so that it need not fit in memory and several cores can share it.


def read_pieces(path, name, text_column, skip=0, separator="", notes=False):
    """Read the file at `path` as pieces, skipping the first `skip`; `name` is the user's name for it."""
    if name == PYTHON_DOCS:
        pieces = (Piece(text, True) for text in python_docs())
    elif file_type(name) == ".parquet":
        pieces = read_parquet(path, name, text_column)
    elif file_type(name) == ".jsonl":
        pieces = read_jsonl(path, name, text_column)
    else:
        pieces = read_txt(path, separator, name if notes else "")
    with explain_errors(name):
        yield from itertools.islice(pieces, skip, None)


@contextlib.contextmanager
def explain_errors(name):
    """Turn an error while the file that the user calls `name` is read into a UserError."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name} is not UTF-8 text ({error.reason}). Convert it, for example with iconv -t UTF-8."
        ) from None
    except (OSError, ValueError, LookupError, NotImplementedError) as error:  # includes pyarrow's own errors
        if getattr(error, "errno", None):
            raise OSError(error.errno, os.strerror(error.errno), name) from None
        raise UserError(
            f"{name} is damaged, or not of the type that its name says: {cli.first_line(error)}. Replace it and run "
            "the same command again."
        ) from None


def open_parquet(path, name, text_column):
    """Open a parquet file that has a column of text called `text_column`."""
    import pyarrow.parquet  # slow to import, and only needed here

    file = pyarrow.parquet.ParquetFile(path)
    columns = {field.name: field.type for field in file.schema_arrow}
    strings = ", ".join(column for column, column_type in columns.items() if is_string(column_type)) or "there is none"
    if text_column not in strings.split(", "):
        found = f"holds {columns[text_column]}" if text_column in columns else "is not there"
        raise UserError(
            f"Column {text_column!r} of {name} {found}. Choose a column of text with --text-column: {strings}."
        )
    return file


def read_parquet(path, name, text_column, row_groups=None):
    """One Piece per row, of all row groups or of those with the numbers `row_groups`."""
    file = open_parquet(path, name, text_column)
    for batch in file.iter_batches(batch_size=256, row_groups=row_groups, columns=[text_column]):
        for text in batch.column(text_column).to_pylist():  # by name: in a nested schema, its number is unknown
            yield Piece(text or "", True)


def list_row_groups(path, name, text_column):
    """The row groups of a parquet file if each can be given to a core as a whole, otherwise [].

    Smaller ones would be more work to find than to tokenize, and larger ones take too much memory.
    """
    if name == PYTHON_DOCS or file_type(name) != ".parquet":
        return []
    with explain_errors(name):
        metadata = open_parquet(path, name, text_column).metadata
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        column = [metadata.schema.column(i).path for i in range(metadata.num_columns)].index(text_column)
        sizes = [group.column(column).total_uncompressed_size for group in groups]
    if not groups or sum(sizes) < BATCH_CHARS * len(sizes) or max(sizes) > MAX_ROW_GROUP:
        return []
    return [RowGroup(path, name, text_column, i, group.num_rows) for i, group in enumerate(groups)]


def is_string(column_type):
    """Whether a parquet column holds plain strings; lists and maps of strings are not text."""
    from pyarrow import types

    if types.is_dictionary(column_type):
        column_type = column_type.value_type
    return str(column_type) in ("string", "large_string", "string_view")


def read_jsonl(path, name, text_column):
    """One Piece per line."""
    for number, record in read_json_lines(path, name):
        if not isinstance(record.get(text_column), str):
            raise UserError(
                f"Line {number} of {name} has no text under {text_column!r}; its keys are {', '.join(record)}. Choose "
                "one of them with --text-column, or fix or remove that line."
            )
        yield Piece(record[text_column], True)


def read_json_lines(path, name=None):
    """Yield (line number, object) for each line of a file of JSON lines; blank lines are skipped."""
    name = name or path
    with explain_errors(name), open_text(path) as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            try:
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise ValueError("it is not a JSON object")
            except (ValueError, RecursionError) as error:  # RecursionError: brackets nested too deeply
                reason = f"{error.msg} at column {error.colno}" if hasattr(error, "colno") else str(error)
                raise UserError(
                    f"Line {number} of {name} is not valid JSON: {reason}. Fix or remove that line."
                ) from None
            yield number, record


def open_text(path):
    """Open a plain, .gz or .zst file as UTF-8 text, dropping a byte-order mark."""
    stream = open_regular(path)
    compression = {".gz": "gzip", ".zst": "zstd"}.get(os.path.splitext(path)[1])
    if compression:
        import pyarrow  # slow to import

        stream = pyarrow.CompressedInputStream(stream, compression)
    return io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")


def read_txt(path, separator="", name=""):
    """One document, or one per `separator`, in pieces of about BLOCK_CHARS characters; with a `name`, prints notes."""
    with open_text(path) as file:
        blocks = iter(lambda: file.read(BLOCK_CHARS), "")
        if separator:
            yield from split_at_separator(blocks, separator, name)
            return
        for i, text in enumerate(split_between_tokens(blocks)):
            if name and "\n<|endoftext|>" in text:
                print(f"note: {name} has lines with <|endoftext|>, which are treated as text.")
                print('      If they separate documents, add --separator "<|endoftext|>".')
                name = ""
            yield Piece(text, starts=i == 0)


def split_at_separator(blocks, separator, name=""):
    """The pieces of documents with `separator` between them, without the line ends around it; empty ones are skipped.

    "One.\n<|endoftext|>\nTwo." -> "One.", "Two."
    """
    held, starts = "", True  # text read but not yet yielded, and whether a document starts there
    searched = num_documents = 0  # `searched`: up to here, no token boundary was found in `held`
    for block in itertools.chain(blocks, [separator]):
        *texts, held = (held + block).split(separator)
        for text in texts:
            text = text.lstrip("\r\n") if starts else text
            text = text.rstrip("\r\n")
            if text:
                yield Piece(text, starts)
            starts, searched = True, 0
        num_documents += len(texts)
        if len(held) > 2 * BLOCK_CHARS:  # a long document: the separator may have begun in the last characters
            stop = len(held.rstrip("\r\n")) - len(separator)
            cut = find_token_boundary(held, searched, stop)
            if len(held) > MAX_PIECE:
                cut = cut or len(held) - len(separator)
            text = held[:cut].lstrip("\r\n") if starts else held[:cut]
            if text:
                yield Piece(text, starts)
                starts = False
            held, searched = held[cut:], 0 if cut else max(0, stop - 1)
    if name and num_documents == 1:
        print(f"note: {name} does not contain --separator {separator!r}, so it is one document.")


def split_between_tokens(blocks):
    """Re-split blocks of text at boundaries that no token crosses: "one two t", "hree" -> "one two", " three".

    Tokenizing the pieces gives the same tokens as the whole text.
    """
    held = []
    for block in blocks:
        cut = find_token_boundary(block, 0, len(block))
        if sum(map(len, held)) > MAX_PIECE:
            cut = cut or len(block)
        if cut:
            yield "".join([*held, block[:cut]])
            held = [block[cut:]]
        else:
            held.append(block)
    if any(held):
        yield "".join(held)


# line ends and punctuation: ASCII, Chinese and Japanese, Arabic and Urdu, Devanagari, Burmese, Khmer
AFTER_A_LETTER = (
    "\n\r\t.,;:!?\u3001\u3002\uff0c\uff0e\uff01\uff1a\uff1b\uff1f\u060c\u061b\u061f\u06d4\u0964\u104b\u17d4"
)


def find_token_boundary(text, start, stop):
    """The last position between `start` and `stop` that no token of the patterns in tokenizer.py crosses, else 0.

    That is (1) before a space that follows anything but white space, or (2), as not all scripts have spaces,
    between a letter and a line end or punctuation: no pattern has a token in which these follow each other.
    subtle: an apostrophe is left out, and so is a line end after punctuation, which GPT-4's pattern joins.
    """
    for position in range(stop - 1, start, -1):
        before, after = text[position - 1], text[position]
        if after == " " and not before.isspace():
            return position
        if after in AFTER_A_LETTER and before.isalpha():
            return position
    return 0


def python_docs():
    """Documentation that ships with Python: the language reference and the standard library's docstrings.

    One document per topic and per module, parsed with `ast`, not imported. They are ordered by a hash
    of their names: a fixed order, but the first tenth is representative of the rest.
    """
    import pydoc_data.topics

    documents = dict(pydoc_data.topics.topics)
    root = sysconfig.get_paths()["stdlib"]
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in ("site-packages", "dist-packages", "test", "tests", "idle_test")]
        for file in files:
            path = os.path.join(folder, file)
            module = os.path.relpath(path, root).removesuffix(".py").replace(os.sep, ".").removesuffix(".__init__")
            text = docstrings(path, module) if file.endswith(".py") else ""
            if text:
                documents[module + ".py"] = text
    return [documents[key] for key in sorted(documents, key=lambda key: hashlib.sha256(key.encode()).digest())]


def docstrings(path, module):
    """The docstrings of one source file, each after the line that declares what it documents."""
    try:
        with open(path, "rb") as file, warnings.catch_warnings(action="ignore"):
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):  # lib2to3 and others ship files that are not Python 3
        return ""
    parts = []
    for node in sorted(ast.walk(tree), key=lambda node: getattr(node, "lineno", 0)):
        if isinstance(node, ast.Module):
            declared = f"module {module}"
        elif isinstance(node, ast.ClassDef):
            declared = f"class {node.name}"
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            declared = f"def {node.name}({ast.unparse(node.args)})"
        else:
            continue
        text = ast.get_docstring(node)
        if text:
            parts += [declared, text]
    return "\n\n".join(parts)


# -----------------------------------------------------------------------------
# Downloads


def run_in_background(function, *args):
    """Run `function(*args)` in a daemon thread; returns a Future."""
    future = Future()

    def work():
        try:
            future.set_result(function(*args))
        except BaseException as error:  # raised again by future.result()
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def retry(name, advice, function, attempts=3):
    """Call `function()`, retrying after 1, 2, 4 ... seconds on network errors; `name` is what it fetches.

    The first download gives up after 3 seconds, so that a user without a network finds out soon; later
    ones make 9 attempts, which survives an outage of 4 minutes.
    """
    for attempt in range(attempts):
        try:
            return function()
        except UserError:
            raise
        except Exception as error:  # the hub's client has renamed its network errors from version to version
            reason = cli.plain(f"{type(error).__name__} {error}".splitlines()[0])
            status = getattr(error, "code", None) or getattr(getattr(error, "response", None), "status_code", None)
            if status in (401, 403, 404):
                raise UserError(
                    f"Could not download {name}: {reason}. The server does not have it or does not let you have "
                    "it; check the address and your access."
                ) from None
            if not status and getattr(error, "errno", None) in cli.ADVICE:  # an error from the disk
                raise UserError(f"Could not save {name}: {reason}. {cli.ADVICE[error.errno]}") from None
            if "Offline" in type(error).__name__:  # asking again would not help
                break
            if attempt < attempts - 1:
                time.sleep(RETRY_SECONDS * 2**attempt)
    raise UserError(f"Could not download {name}: {reason}. {advice}")


def download(url, path, advice, attempts=9):
    """Download `url` to `path`, whole or not at all; `advice` is what to do if that fails after all attempts."""

    def attempt():
        with urllib.request.urlopen(url, timeout=60) as response, atomic_write(path) as file:
            size = int(response.headers.get("Content-Length") or 0)
            name = os.path.basename(path)
            with tqdm(total=size or None, unit="B", unit_scale=True, desc=name, delay=0.5) as bar:
                for block in read_blocks(response, size):
                    file.write(block)
                    bar.update(len(block))

    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    retry(url, advice, attempt, attempts)


def read_blocks(response, size):
    """Yield a response's content in blocks. A broken connection is an HTTPException, unlike an error from the disk."""
    received = 0
    try:
        for block in iter(lambda: response.read(2**20), b""):
            received += len(block)
            yield block
    except OSError as error:
        raise http.client.HTTPException(f"the connection broke: {error}") from None
    if received < size:
        raise http.client.HTTPException(f"the connection ended after {received:,} of {size:,} bytes")


HUB_ADVICE = "Check the network and try again. Without a network, use --dataset python-docs or --input."


def list_hub(repo, folder):
    """List the parquet files in a folder of a data set on the hub, at its newest commit."""
    import huggingface_hub  # slow to import

    def ask():
        api = huggingface_hub.HfApi()
        revision = api.dataset_info(repo).sha
        tree = api.list_repo_tree(repo, folder, repo_type="dataset", revision=revision)
        files = [file for file in tree if file.path.endswith(".parquet")]
        return sorted(Source(file.path, file.size, repo, revision) for file in files)

    return retry(repo, HUB_ADVICE, ask)


def fetch_hub(repo, file, revision, folder, attempts):
    """The path of a data set's file from the hub, downloaded into `folder`."""
    import huggingface_hub  # slow to import

    args = {"repo_type": "dataset", "revision": revision, "local_dir": folder}
    return retry(file, HUB_ADVICE, lambda: huggingface_hub.hf_hub_download(repo, file, **args), attempts)


def fetch(source, folder, attempts=9):
    """The path of a local copy of `source`, downloaded into `folder` unless it is local already."""
    if source.repo:
        return fetch_hub(source.repo, source.name, source.revision, folder, attempts)
    if not is_url(source.name):
        return source.name
    digest = hashlib.sha256(source.name.encode()).hexdigest()[:8]  # two URLs may end in the same name
    path = os.path.join(folder, digest + os.path.basename(urllib.parse.urlsplit(source.name).path))
    download(source.name, path, "Check the network and run the same command again, or give a local file.", attempts)
    return path


def read_batches(sources, text_column, folder, first_source=0, skip=0, prefetch=True, separator=""):
    """Batches of about BATCH_CHARS of text: all pieces of `sources` from piece `skip` of `first_source` on.

    While a file is read, the next one is downloaded into `folder`. The caller reads each batch with
    `load_pieces`, and removes its finished download once it has read this batch and those before it.
    """
    next_download = None
    for number in range(first_source, len(sources)):
        source = sources[number]
        attempts = 3 if number == first_source else 9
        path = next_download.result() if next_download else fetch(source, folder, attempts)
        if prefetch and number + 1 < len(sources):
            next_download = run_in_background(fetch, sources[number + 1], folder)
        row_groups = list_row_groups(path, source.name, text_column)
        if row_groups:
            yield from batch_row_groups(number, row_groups, skip)
        else:
            notes = number == first_source  # once, not for each of many files
            pieces = read_pieces(path, source.name, text_column, skip, separator, notes)
            yield from batch_pieces(number, pieces, skip)
        skip = 0
        if path != source.name:
            yield Batch(number, 0, [], finished_download=path)


def batch_row_groups(source, row_groups, skip):
    """A batch per row group, without the first `skip` rows."""
    first_row = 0
    for group in row_groups:
        skipped = min(max(0, skip - first_row), group.num_rows)
        if skipped < group.num_rows:
            yield Batch(source, first_row + skipped, group._replace(skip=skipped))
        first_row += group.num_rows


def batch_pieces(source, pieces, first_piece):
    """Group pieces into batches of about BATCH_CHARS; `first_piece` is the number of the first one in its file."""
    held, num_chars = [], 0
    for piece in pieces:
        held.append(piece)
        num_chars += len(piece.text)
        if num_chars >= BATCH_CHARS:
            yield Batch(source, first_piece, held)
            first_piece += len(held)
            held, num_chars = [], 0
    if held:
        yield Batch(source, first_piece, held)


def load_pieces(pieces):
    """A batch's pieces: read now if they are still in a parquet file."""
    if not isinstance(pieces, RowGroup):
        return pieces
    with explain_errors(pieces.name):
        rows = read_parquet(pieces.path, pieces.name, pieces.text_column, [pieces.number])
        return list(itertools.islice(rows, pieces.skip, None))


# -----------------------------------------------------------------------------


def num_cores():
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
