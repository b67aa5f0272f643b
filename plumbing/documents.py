"""Documents: inputs listed, downloaded, decompressed and read, for every program that takes --input."""

import ast
import base64
import codecs
import contextlib
import csv
import functools
import glob
import hashlib
import http.client
import io
import itertools
import json
import os
import platform
import re
import shutil
import string
import sysconfig
import time
import urllib.parse
import urllib.request
import warnings
from collections.abc import Callable
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from plumbing import program
from plumbing.files import atomic_write, file_sample, named_errors, open_regular
from plumbing.program import UserError

PYTHON_DOCS = f"the documentation of Python {platform.python_version()}"
OURS = re.compile(r"(^|[/\\])(meta(\.part-[^/]*)?|tokenizer\.tiktoken)\.json$")  # beside shards, and never input
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
TYPES = {  # how a file is read: the ends of the names of such files; HTML and source code are text as they are
    ".parquet": ".parquet",
    ".jsonl": ".jsonl .json .ndjson",
    ".csv": ".csv .tsv",
    ".txt": ".txt .md .html .py .text .markdown .rst .org .adoc .tex .htm .xml .pyi .js .jsx .ts .tsx .c .h .cc"
    " .cpp .hpp .cu .cs .java .go .rs .rb .php .swift .kt .scala .lua .jl .pl .r .sql .sh .css",
}
RETRY_SECONDS = 1.0  # before the second attempt; doubles with each further one
BLOCK_CHARS = 2**13  # .txt files are read in pieces of about this many characters; positions count in pieces
MAX_PIECE = 2**17  # characters; longer text without a token boundary, such as one repeated letter, is cut anyway
BATCH_CHARS = 2**19  # characters given to a core at a time: 0.04 s of work, so that the overhead is negligible
MAX_ROW_GROUP = 2**26  # bytes; a core reads a smaller one whole. FineWeb-Edu's have 1,000 documents, some 5 MB
MAX_HASHED = 2**22  # bytes; only a sample of a larger input is hashed


class Source(NamedTuple):
    name: str  # a path, a URL as `public_name` shows it, or a path in a repository on the hub
    size: int = 0  # bytes, to recognize another file of the same name; 0 if unknown
    repo: str = ""  # on the hub: the data set
    revision: str = ""  # on the hub: the commit or branch
    sampled_hash: str = ""  # recognizes other contents of the same size in a local file
    path: str = ""  # of the file on this machine; `fetch` fills it in for the others
    url: str = ""  # only for the request: it may hold a password or a signature

    def recorded(self):
        """[name, size, hash] for meta.json; a local file is recorded without its folder, so it may be moved."""
        name = os.path.basename(self.name) if self.path == self.name else self.name
        return [name, self.size, self.sampled_hash]


class Piece(NamedTuple):
    text: str
    starts: bool  # whether a document starts here


class Batch(NamedTuple):
    source: int  # the number of the file it is from
    first_piece: int  # the number of its first piece in that file
    read: Callable  # returns the pieces; can be pickled
    finished_download: str = ""  # with a file's last batch: the download to remove once all batches are read


def list_inputs(patterns, types=tuple(TYPES)):
    """List the files and URLs named by `patterns`: a folder's files, a glob's matches, sorted by name."""
    sources = []
    for pattern in patterns:
        if is_url(pattern) or (os.path.lexists(pattern) and not os.path.isdir(pattern)):
            found = [pattern]
        else:
            folder = os.path.join(glob.escape(pattern), "*") if os.path.isdir(pattern) else pattern
            found = sorted(glob.glob(folder, recursive=True))
            if "**" in pattern:  # it also matches the folders whose files it takes
                found = [name for name in found if not os.path.isdir(name)]
        faults = [(name, find_fault(public_name(name), types)) for name in found]
        left_out = [f"{program.plain(public_name(name))} {fault}" for name, fault in faults if fault]
        if len(left_out) == len(found):
            nothing = "There is no file in" if os.path.isdir(pattern) else "No file matches"
            wrong = left_out[0] if found else f"{nothing} {public_name(pattern)}"
            ends = ", ".join(end for kind in types for end in TYPES[kind].split()[:4])
            others = " and other text and source code" if ".txt" in types else ""
            raise UserError(f"{wrong}. Give files that end in {ends}{others} (.gz and .zst are unpacked).")
        if left_out:
            share = f"{len(left_out)} of {len(found)} names"
            print(f"note: {share} in {program.plain(pattern)} are left out: {left_out[0]}.")
        for name, fault in faults:
            if not fault:
                sources.append(Source(public_name(name), url=name) if is_url(name) else local_source(name))
    return sources


def find_fault(name, types):
    """Why a file is not read as one of these types, to follow its name in a sentence; "" if it is."""
    if os.path.isdir(name):
        return "is a folder. Add /* to take its files"
    if OURS.search(name):
        return "belongs to a folder of shards"
    return "" if file_type(name) in types else "is not of a type that is read here"


def local_source(name):
    """A local file with hashes of its first bytes and of its contents, or of a sample of a large file."""
    with named_errors(name), open_regular(name) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(4096)
        contents = start + file.read() if size <= MAX_HASHED else file_sample(name)
    return Source(name, size, sampled_hash=short_hash(start) + short_hash(contents), path=name)


def short_hash(content):
    return hashlib.sha256(content).hexdigest()[:8]


def is_url(name):
    return name.startswith(("http://", "https://"))


def public_name(name):
    """A URL, of any scheme, without what may be secret: the user, the password and the query; others as they are."""
    return re.sub(r"(?si)^(\s*[a-z][a-z0-9+.-]+:/+)(?:[^/?#]*@)?([^?#]*).*", r"\1\2", name)


def file_type(name):
    """The key of TYPES for a file's name, "" if there is none: "a/b.json.gz" -> ".jsonl"."""
    ending = suffix_of(name)
    return next((kind for kind, endings in TYPES.items() if ending and ending in endings.split()), "")


def suffix_of(name):
    """The end of a file's name, without that of its compression: "a/B.TXT.gz" -> ".txt"."""
    stem, suffix = os.path.splitext(str(name).lower())
    return os.path.splitext(stem)[1] if suffix in COMPRESSIONS else suffix


# ----- Reading ------------------------------------------------------------------------------------------
# Documents are read as pieces. Most are a single piece; a long .txt file is one document, which is split, so that
# it need not fit in memory and several cores can share it.


def read_pieces(source, text_column, skip=0, separator="", row_groups=None):
    """Read the pieces of a file, or of these row groups of it, without the first `skip`."""
    kind = file_type(source.name)
    if kind == ".parquet":
        pieces = read_parquet(source, text_column, row_groups)
    elif kind == ".jsonl":
        pieces = read_jsonl(source, text_column)
    elif kind == ".csv":
        pieces = read_csv(source, text_column)
    elif kind == ".txt":
        pieces = read_txt(source, separator)
    else:  # PYTHON_DOCS
        pieces = (Piece(text, True) for text in python_docs())
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
        wrong = f"is damaged, or not what its name says: {program.first_line(error)}"
        advice = "Replace it, and run this command again."
        if isinstance(error, UnicodeError):
            wrong = f"is not UTF-8 text: {program.first_line(error)}"
            new = f"NEW{suffix_of(name)}"
            advice = f"If it is Latin-1, convert it, unpacked: iconv -f LATIN1 -t UTF-8 FILE > {new}"
        raise UserError(f"{name} {wrong}. {advice}") from None


def open_parquet(source, text_column):
    import pyarrow.parquet  # slow to import, and only needed here

    file = pyarrow.parquet.ParquetFile(source.path)
    types = {field.name: str(field.type) for field in file.schema_arrow}
    # plain strings: lists and maps of strings are not text
    texts = [column for column in types if re.match("(dictionary<values=)?(large_)?string", types[column])]
    check_column(source.name, text_column, texts, types.get(text_column, "missing"))
    return file


def check_column(name, text_column, texts, found="missing"):
    """Raise UserError unless the column is one of the file's columns of text, `texts`; `found` is what it is."""
    if not texts:
        raise UserError(f"{name} has no column of strings, so there is no text in it. Use another file.")
    if text_column not in texts:
        raise UserError(
            f"Column {text_column!r} of {name} is {found}. Choose text with --text-column: {', '.join(texts)}."
        )


def read_parquet(source, text_column, row_groups=None):
    file = open_parquet(source, text_column)
    for batch in file.iter_batches(batch_size=256, row_groups=row_groups, columns=[text_column]):
        for text in batch.column(text_column).to_pylist():  # by name: in a nested schema, its number is unknown
            yield Piece(text or "", True)


def list_row_groups(source, text_column):
    """[(number of the first row, function that reads it)] of a parquet file's row groups, to be read on all cores.

    [] where that does not pay: small ones are more work to find than to tokenize, large ones take too much memory.
    """
    if file_type(source.name) != ".parquet":
        return []
    with explain_errors(source.name):
        metadata = open_parquet(source, text_column).metadata
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    sizes = [group.total_byte_size for group in groups]
    if max(sizes, default=0) > MAX_ROW_GROUP or sum(sizes) < BATCH_CHARS * len(sizes):
        return []
    batches, first = [], 0
    for number, group in enumerate(groups):
        batches.append((first, functools.partial(read_pieces, source, text_column, row_groups=[number])))
        first += group.num_rows
    return batches


def read_csv(source, text_column):
    csv.field_size_limit(2**27)  # characters: a text may exceed Python's default, and a quote may be left open
    with open_text(source.path) as file:
        dialect = "excel-tab" if suffix_of(source.name) == ".tsv" else "excel"
        rows = csv.DictReader(file, dialect=dialect, strict=True)
        check_column(source.name, text_column, rows.fieldnames or [])
        for row in rows:
            yield Piece(row[text_column] or "", True)


def read_jsonl(source, text_column):
    for _, place, record in read_records(source.path, source.name):
        text = record.get(text_column)
        if not isinstance(text, str):
            raise UserError(
                f"{place} has no text under {text_column!r}; its keys are {', '.join(record)}. Choose one of them with "
                "--text-column, or fix or remove it."
            )
        yield Piece(text, True)


def read_records(path, name=None, kinds=(dict,)):
    """Yield (number, place, record) for each line of a file of JSON lines, or entry of a .json file with an array.

    `place` names it in messages; blank lines are skipped.
    """
    name = name or path
    with explain_errors(name), open_text(path) as file:
        noun, texts = ("Entry", read_array(file)) if holds_array(path) else ("Line", file)
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


def holds_array(path):
    """Whether a file is a .json file that holds an array. Others are read as JSON lines, as C4's .json files are."""
    if suffix_of(path) != ".json":
        return False
    with open_text(path) as file:
        return file.read(BLOCK_CHARS).lstrip().startswith("[")


def read_array(file):
    """Yield the text of each entry of a JSON array, of which only a few blocks are in memory at a time."""
    decoder, held, start = json.JSONDecoder(), file.read(BLOCK_CHARS).lstrip(), 1
    while True:
        between: Any = re.compile(r"[\s,]*").match(held, start)
        start = between.end()
        try:
            if held[start : start + 1] == "]":
                rest = (held[start + 1 :] + file.read(BLOCK_CHARS)).strip()
                if rest:
                    yield "]" + rest
                return
            end = decoder.raw_decode(held, start)[1]
        except (ValueError, RecursionError):  # it may only be incomplete
            # twice as much each time, so that a long entry is not parsed often
            block = file.read(max(BLOCK_CHARS, len(held) - start))
            if not block:
                yield held[start:]  # the caller says what is wrong with it
                return
            held, start = held[start:] + block, 0
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
    name = program.plain(source.name)
    with open_text(source.path) as file:
        for piece in split_text(iter(lambda: file.read(BLOCK_CHARS), ""), separator, name):
            if piece.starts and not separator and "\n<|endoftext|>" in piece.text:
                print(f"note: {name} has lines with <|endoftext|>, which are treated as text.")
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


# ----- Downloads ----------------------------------------------------------------------------------------


def retry(name, advice, function, attempts=3):
    """Call `function()`, which downloads `name`, again after 1, 2, 4 ... seconds if it fails; `advice` is for the user.

    A user without a network finds out after 3 seconds; 9 attempts, for later downloads, survive an outage of 4 minutes.
    """
    for attempt in range(attempts):
        time.sleep(RETRY_SECONDS * (2**attempt // 2))
        try:
            return function()
        except Exception as error:  # the hub's client has renamed its network errors from version to version
            cause = error.__cause__ or error  # atomic_write turns the connection's errors, too, into a UserError
            if isinstance(cause, UserError):
                raise
            response = getattr(cause, "response", None)
            status = getattr(cause, "code", None) or getattr(response, "status_code", None)
            number = getattr(cause, "errno", None)
            if status in (401, 403, 404):
                advice = "The file is not there, or you may not read it: check the address and your access."
                break
            if number in program.ADVICE:  # an error from the disk
                advice = program.ADVICE[number]
                break
    raise UserError(f"Could not download {name}: {program.plain(program.first_line(cause))}. {advice}")


def download(url, path, advice, attempts=3):
    """Download `url` to `path`, whole or not at all; `advice` is what to do if that fails."""
    address, user = public_name(url), re.match("https?://([^/?#]*)@", url)

    # The hub's http_get could continue a broken download, but obeys HF_HUB_OFFLINE for all servers, and repeats a
    # refused connection for 5 seconds in each of our attempts
    def attempt():
        try:  # urllib accepts neither a user name nor blanks in a URL
            plain_url = re.sub("//[^/?#]*@", "//", url, count=1)
            request = urllib.request.Request(urllib.parse.quote(plain_url, safe=string.punctuation))
            if user:
                code = base64.b64encode(urllib.parse.unquote_to_bytes(user[1])).decode()
                request.add_unredirected_header("Authorization", f"Basic {code}")
            response = urllib.request.urlopen(request, timeout=60)
        except (ValueError, http.client.InvalidURL):  # brackets around no IPv6 address, a port that is no number
            raise UserError(f"{address} is not a valid address. Check its host and port.") from None
        with response:
            # not before: a download that cannot begin leaves nothing
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            size = int(response.headers.get("Content-Length") or 0)
            name = os.path.basename(path)
            with atomic_write(path) as file:
                bar: Any = tqdm.wrapattr(file, "write", total=size or None, desc=name, delay=0.5)
                with bar as output:
                    shutil.copyfileobj(response, output)
                if file.tell() < size:
                    raise ConnectionError(f"the connection ended after {file.tell():,} of {size:,} bytes")

    retry(address, advice, attempt, attempts)


HUB_ADVICE = "Check the network and try again. Without a network, use --dataset python-docs or --input."


def list_hub(repo, folder):
    """List the parquet files in a folder of a data set on the hub, at its newest commit."""
    import huggingface_hub  # slow to import

    def ask():
        api = huggingface_hub.HfApi()
        revision = api.dataset_info(repo).sha or ""
        tree: Any = api.list_repo_tree(repo, folder, repo_type="dataset", revision=revision)
        files = [file for file in tree if file.path.endswith(".parquet")]
        return sorted(Source(file.path, file.size, repo, revision) for file in files)

    return retry(repo, HUB_ADVICE, ask)


def fetch(source, folder, attempts=3):
    """The source with the path of its file, which is downloaded into `folder` unless it is local."""
    name, path = source.name, source.path
    if source.repo:
        import huggingface_hub  # slow to import

        place: Any = dict(repo_id=source.repo, filename=name, repo_type="dataset", revision=source.revision)

        def load():
            # without a network this fails at once; hf_hub_download repeats the same request for 23 seconds
            huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(**place), timeout=60)
            return huggingface_hub.hf_hub_download(**place, local_dir=folder)

        path = retry(name, HUB_ADVICE, load, attempts)
    elif source.url:
        # two URLs may end in the same name
        path = os.path.join(folder, short_hash(source.url.encode()) + os.path.basename(name))
        advice = "Check the network and run the same command again, or give a local file."
        download(source.url, path, advice, attempts)
    return source._replace(path=path)


def read_batches(sources, text_column, folder, first_source=0, skip=0, prefetch=True, separator=""):
    """Batches of about BATCH_CHARS of text: all pieces of `sources` from piece `skip` of `first_source` on.

    While a file is read, the next one is downloaded into `folder`; the caller removes each finished download.
    """
    next_download = None
    with ThreadPool(1) as pool:  # unlike an executor, it does not make an exit wait for the download
        for number in range(first_source, len(sources)):
            attempts = 3 if number == first_source else 9
            source = next_download.get() if next_download else fetch(sources[number], folder, attempts)
            if prefetch and number + 1 < len(sources):
                next_download = pool.apply_async(fetch, (sources[number + 1], folder, 9))
            batches = [] if skip else list_row_groups(source, text_column)  # a file that was begun is read here
            for first, read in batches or batch_pieces(read_pieces(source, text_column, skip, separator), skip):
                yield Batch(number, first, read)
            skip = 0
            if source.path != sources[number].path:
                yield Batch(number, 0, list, finished_download=source.path)


def batch_pieces(pieces, first):
    """Yield (number of the first piece, function that returns the pieces) for each BATCH_CHARS or so."""
    held, num_chars = [], 0
    for piece in pieces:
        held.append(piece)
        num_chars += len(piece.text)
        if num_chars >= BATCH_CHARS:
            yield first, functools.partial(iter, held)
            first += len(held)
            held, num_chars = [], 0
    yield first, functools.partial(iter, held)


def num_cores():
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
