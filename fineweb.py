"""Documents to token shards: FineWeb-Edu from the hub, any text of yours, or what Python ships.

    python fineweb.py                                   10B tokens of FineWeb-Edu, 100 shards
    python fineweb.py --pretokenized 10                 10 ready-made shards and the validation one
    python fineweb.py --input books/*.txt --out-dir books
    python fineweb.py --input https://host/a.jsonl.gz --tokenizer my.tiktoken --out-dir mine
    python fineweb.py --dataset python-docs             a few MB of English without a network

A document becomes one <|endoftext|> and its tokens (text that spells <|endoftext|> is only text).
The documents' tokens, in the order of the input, are one stream, and the stream is cut into shards
of `--shard-size` tokens, `<name>_<split>_<6 digits>.npy` of uint16; shard 0 is the validation split,
the last one is short. A corpus that ends within its first shard is cut into tenths instead, so that
there is always something to train on; for one that is not much longer than a shard, choose a smaller
`--shard-size`, or most of it validates. Memory: two shards and a few texts per core, whatever the
size of the corpus. meta.json beside the shards says what they are and where in
the input each one ends: the same command goes on after the last whole shard, and ends with the same
bytes, whenever it was killed and on however many cores it runs.
"""

import ast
import collections
import errno
import fnmatch
import glob
import hashlib
import io
import itertools
import json
import math
import os
import platform
import re
import shutil
import string
import sys
import sysconfig
import threading
import time
import types
import urllib.parse
import urllib.request
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

import cli
import tokenizer
from cli import UserError

# -----------------------------------------------------------------------------
# Options


@dataclass
class Options:
    dataset: str = "fineweb-edu"  # fineweb-edu (the hub's sample-10BT) or python-docs (needs no network)
    input: tuple[str, ...] = ()  # files, globs or URLs instead: .parquet, .jsonl, .txt, the last two also .gz, .zst
    text_column: str = "text"  # the column of a parquet file, the key of a JSON line
    out_dir: str = ""  # where the shards go; by default edu_fineweb10B, python_docs, or the first input's name
    tokenizer: str = "gpt2"  # gpt2, bytes, or the path of a .tiktoken file
    shard_size: int = 100_000_000  # tokens per shard, 200 MB; a corpus smaller than one is cut into tenths
    max_tokens: int = 0  # stop after so many tokens, validation shard included; 0 = all
    num_proc: int = 0  # cores to tokenize on; 0 = all; changes nothing but the speed
    part: str = ""  # I/N: only every N-th input file, from the I-th; the parts share one --out-dir
    pretokenized: int = 0  # fetch so many ready-made training shards of FineWeb-Edu instead
    contamination: str = ""  # report which examples of this HellaSwag file stand in the shards of --out-dir


DATASETS = {"fineweb-edu": ("edu_fineweb10B", "edufineweb"), "python-docs": ("python_docs", "pythondocs")}
EDU_REPO, EDU_FOLDER = "HuggingFaceFW/fineweb-edu", "sample/10BT"
EDU_TOKENS = 9_953_989_344  # of GPT-2 and <|endoftext|>; only to say how long it takes
READY_REPO = "kjj0/finewebedu10B-gpt2"
PYTHON_DOCS = f"the documentation of Python {platform.python_version()}"
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)
RETRY_SECONDS = 1.0  # before the second attempt; it doubles with each
BLOCK_CHARS = 2**20  # a long .txt is read in blocks of so many; where a begun run goes on is counted in them
BATCH_CHARS = 2**19  # text handed to a core at a time: 0.1 s of work, so that the overhead disappears


class Source(NamedTuple):
    name: str  # a path, a URL, or a path in the hub's repository
    size: int  # bytes, to tell another file of the same name; 0 where it is not known


def list_inputs(patterns):
    """The files and URLs that `--input` means, each glob sorted by name."""
    sources = []
    for pattern in patterns:
        if is_url(pattern):
            sources.append(Source(pattern, 0))
            continue
        paths = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        if not paths:
            raise UserError(f"got --input {pattern}, needed files that exist, do check the path")
        sources += [Source(path, os.path.getsize(path)) for path in paths]
    for source in sources:
        if os.path.isdir(source.name):
            raise UserError(f"got the folder {source.name}, needed files, do give --input '{source.name}/*'")
        kind(source.name)
    return sources


def is_url(name):
    return name.startswith(("http://", "https://"))


def kind(name):
    """"a/b.jsonl.gz" -> ".jsonl" """
    path = urllib.parse.urlsplit(name).path if is_url(name) else name
    match = re.search(r"(\.parquet|(\.jsonl|\.txt)(\.gz|\.zst)?)$", path)
    if not match:
        raise UserError(f"got {name}, needed .parquet, .jsonl, .txt, or .gz or .zst of the last two, do convert it")
    return match[2] or match[1]


# -----------------------------------------------------------------------------
# Documents. A document comes as pieces: most are one piece; a long .txt, which is one document,
# is cut where no tokenizer's token crosses, so that it is neither held in memory nor left to one core.


class Piece(NamedTuple):
    text: str
    starts: bool  # whether a document starts here


def read_pieces(path, name, text_column, skip):
    """The pieces of the file at `path` without the first `skip`; `name` is what the user calls it."""
    reader = {".parquet": read_parquet, ".jsonl": read_jsonl, ".txt": read_txt}[kind(name)]
    try:
        yield from reader(path, name, text_column, skip)
    except UnicodeDecodeError as error:
        raise UserError(f"got {name} with {error.reason}, needed UTF-8, do convert it with iconv") from None
    except (OSError, ValueError, LookupError, NotImplementedError) as error:  # pyarrow's own are among them
        raise UserError(f"got {name} that cannot be read ({error}), needed a whole file, do fetch it again") from None


def read_parquet(path, name, text_column, skip):
    import pyarrow.parquet  # slow to import: only where files are read

    file = pyarrow.parquet.ParquetFile(path)
    columns = {field.name: str(field.type) for field in file.schema_arrow}
    if "string" not in columns.get(text_column, ""):
        raise UserError(
            f"got column {text_column} of {name}: {columns.get(text_column, 'not there')}, needed a string column, "
            f"do give --text-column, one of {', '.join(columns)}"
        )
    groups = range(file.num_row_groups)
    while groups and skip >= (rows := file.metadata.row_group(groups[0]).num_rows):
        groups, skip = groups[1:], skip - rows  # whole row groups are skipped unread
    for batch in file.iter_batches(batch_size=256, row_groups=groups, columns=[text_column]):
        for text in batch.column(0).to_pylist()[skip:]:
            yield Piece(text or "", True)
        skip = max(0, skip - len(batch))


def open_text(path):
    import pyarrow

    compression = {".gz": "gzip", ".zst": "zstd"}.get(os.path.splitext(path)[1])
    return io.TextIOWrapper(pyarrow.input_stream(path, compression=compression), encoding="utf-8-sig", newline="")


def read_jsonl(path, name, text_column, skip):
    with open_text(path) as file:
        lines = ((number, line) for number, line in enumerate(file, 1) if not line.isspace())
        for number, line in itertools.islice(lines, skip, None):
            try:
                record = json.loads(line)
                text, found = record.get(text_column), f"keys {', '.join(record)}"
            except (ValueError, RecursionError) as error:
                text, found = None, error
            except AttributeError:
                text, found = None, "no object"
            if not isinstance(text, str):
                raise UserError(
                    f"got {name} line {number}: {found}, needed a JSON object with a string under {text_column}, "
                    "do mend it or give --text-column"
                )
            yield Piece(text, True)


def read_txt(path, name, text_column, skip):
    with open_text(path) as file:
        pieces = cut(iter(lambda: file.read(BLOCK_CHARS), ""))
        yield from itertools.islice((Piece(text, i == 0) for i, text in enumerate(pieces)), skip, None)


def cut(blocks):
    """Re-cut blocks of text where a letter is followed by a space: "one two t", "hree" -> "one two", " three".

    No token of the patterns in tokenizer.py, nor of bytes, crosses such a place, so the pieces'
    tokens are the whole text's.
    """
    held = []
    for block in blocks:
        at = block.rfind(" ")
        while at > 0 and block[at - 1] not in string.ascii_letters:
            at = block.rfind(" ", 0, at)
        if at > 0:
            yield "".join([*held, block[:at]])
            held = [block[at:]]
        else:
            held.append(block)
    if held:
        yield "".join(held)


def python_docs():
    """The documentation in every Python: its language reference, and its library's docstrings.

    One document per topic and per module, read with `ast` and not imported. They come in the
    order of their names' hashes: the same each time, yet the first tenth is like the rest.
    """
    import pydoc_data.topics

    documents = dict(pydoc_data.topics.topics)
    root = sysconfig.get_paths()["stdlib"]
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in ("site-packages", "dist-packages", "test", "tests", "idle_test")]
        for file in files:
            path = os.path.join(folder, file)
            module = os.path.relpath(path, root).removesuffix(".py").replace(os.sep, ".").removesuffix(".__init__")
            if file.endswith(".py") and (text := docstrings(path, module)):
                documents[module + ".py"] = text
    return [documents[key] for key in sorted(documents, key=lambda key: hashlib.sha256(key.encode()).digest())]


def docstrings(path, module):
    """The docstrings of one source file, each under the line that declares what it documents."""
    try:
        with open(path, "rb") as file, warnings.catch_warnings(action="ignore"):
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):  # lib2to3 and the like ship files that are not Python 3
        return ""
    parts = []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
    for node in sorted(nodes, key=lambda node: getattr(node, "lineno", 0)):
        if text := ast.get_docstring(node):
            if isinstance(node, ast.Module):
                parts.append(f"module {module}\n\n{text}")
            elif isinstance(node, ast.ClassDef):
                parts.append(f"class {node.name}\n\n{text}")
            else:
                parts.append(f"def {node.name}({ast.unparse(node.args)})\n\n{text}")
    return "\n\n".join(parts)


# -----------------------------------------------------------------------------
# Downloads


def background(function, *args):
    """`function(*args)` as a Future, on a thread that does not keep the program from ending."""
    future = Future()

    def work():
        try:
            future.set_result(function(*args))
        except BaseException as error:  # handed on: whoever asks for the result gets it
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def retry(name, function, attempts=3):
    """`function()`, again after 1, 2, 4 ... seconds where the network fails it; `name` is what it fetches.

    The first contact fails after 3 seconds, so that who has no network hears of it; in the midst of
    the work 9 attempts sit out 4 minutes.
    """
    for attempt in range(attempts):
        try:
            return function()
        except Exception as error:  # the hub's client has renamed its network errors from version to version
            if isinstance(error, UserError):
                raise
            if getattr(error, "errno", None) in DISK_ERRORS:
                reason = os.strerror(error.errno)
                raise UserError(f"got '{reason}' while downloading {name}, needed room, do make some, run again") from None
            status = getattr(error, "code", None) or getattr(getattr(error, "response", None), "status_code", None)
            reason = f"{type(error).__name__} {error}".splitlines()[0][:200]
            if status in (401, 403, 404) or "Offline" in type(error).__name__:  # asking again would not help
                break
            if attempt < attempts - 1:
                time.sleep(RETRY_SECONDS * 2**attempt)
    raise UserError(
        f"got {reason} for {name}, needed a network that reaches it, do run the same command again later, "
        "or work without one: --dataset python-docs, or --input with files of yours"
    )


def fetch_url(url, path):
    """Download `url` to `path`, whole or not at all."""
    with urllib.request.urlopen(url, timeout=60) as response, open(path + ".part", "wb") as file:
        shutil.copyfileobj(response, file, 2**20)
        expected = int(response.headers.get("Content-Length") or file.tell())
        if file.tell() != expected:
            raise ConnectionError(f"{file.tell():,} bytes of {expected:,}")
    os.replace(path + ".part", path)


def fetch(source, folder, revision, attempts=9):
    """The path of a local copy of `source`: itself if it is a file here."""
    if revision:
        import huggingface_hub  # slow to import

        get = huggingface_hub.hf_hub_download
        args = {"repo_type": "dataset", "revision": revision, "local_dir": folder}
        return retry(source.name, lambda: get(EDU_REPO, source.name, **args), attempts)
    if not is_url(source.name):
        return source.name
    os.makedirs(folder, exist_ok=True)
    digest = hashlib.sha256(source.name.encode()).hexdigest()[:8]  # two URLs may end in the same name
    path = os.path.join(folder, digest + os.path.basename(urllib.parse.urlsplit(source.name).path))
    retry(source.name, lambda: fetch_url(source.name, path), attempts)
    return path


def list_hub():
    """The files of FineWeb-Edu's sample-10BT, and the commit that they are from."""
    import huggingface_hub

    api = huggingface_hub.HfApi()
    revision = retry(EDU_REPO, lambda: api.dataset_info(EDU_REPO).sha)
    args = {"repo_type": "dataset", "revision": revision}
    tree = retry(EDU_REPO, lambda: list(api.list_repo_tree(EDU_REPO, EDU_FOLDER, **args)))
    return sorted(Source(file.path, file.size) for file in tree if file.path.endswith(".parquet")), revision


# -----------------------------------------------------------------------------
# Tokens


class Batch(NamedTuple):
    source: int  # the number of the file it is from
    first: int  # the number of its first piece in that file
    pieces: list[Piece]


class Tokens(NamedTuple):
    batch: Batch
    tokens: np.ndarray  # (n,) uint16, of all its pieces
    ends: np.ndarray  # (pieces,) where each piece ends in `tokens`


def read_batches(sources, options, folder, revision, source=0, skip=0):
    """All pieces of `sources` from piece `skip` of file `source` on, BATCH_CHARS of text at a time.

    While a file is read the next one is downloaded into `folder`; what was downloaded is removed
    as soon as it is read.
    """
    # with --max-tokens the next file may never be wanted
    prefetch = not options.max_tokens
    coming = None
    for number in range(source, len(sources)):
        name = sources[number].name
        path = coming.result() if coming else fetch(sources[number], folder, revision, 9 if number > source else 3)
        if prefetch and number + 1 < len(sources):
            coming = background(fetch, sources[number + 1], folder, revision)
        try:
            if name == PYTHON_DOCS:
                pieces = (Piece(text, True) for text in python_docs()[skip:])
            else:
                pieces = read_pieces(path, name, options.text_column, skip)
            held, chars = [], 0
            for piece in pieces:
                held.append(piece)
                chars += len(piece.text)
                if chars >= BATCH_CHARS:
                    yield Batch(number, skip, held)
                    skip, held, chars = skip + len(held), [], 0
            if held:
                yield Batch(number, skip, held)
        finally:
            if path != name:
                os.remove(path)
        skip = 0


def encode_text(enc, text):
    """The ids of `text` as uint32, special tokens' spellings taken as text. No list of ints on the way."""
    try:
        return enc.encode_to_numpy(text, disallowed_special=())
    except UnicodeEncodeError:  # half a surrogate pair, as JSON can spell one: replaced, as in tiktoken's `encode`
        return encode_text(enc, text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    except ValueError:
        # tiktoken's regex gives up on a million blanks before a word. subtle: the patterns make one
        # piece of the blanks but the last, so cutting there changes nothing; GPT-4's takes line ends too
        blank = r"[^\S\x1c-\x1f]"  # those four are blanks to Python and not to tiktoken
        last = r"[^\S\r\n\x1c-\x1f]" if r"[\r\n]" in enc._pat_str else blank
        cuts = [match.end() for match in re.finditer(rf"(?<!{blank}){blank}{{9999,}}(?={last}[\S\x1c-\x1f])", text)]
        if not cuts:
            raise
        parts = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
        return np.concatenate([enc.encode_to_numpy(part, disallowed_special=()) for part in parts])


def encode_batch(enc, batch):
    """The tokens of a batch: per document one <|endoftext|>, then its text's ids."""
    eot = np.array([enc.eot_token], dtype=np.uint32)
    arrays, lengths = [], []
    for text, starts in batch.pieces:
        ids = encode_text(enc, text)
        arrays += [eot, ids] if starts else [ids]
        lengths.append(len(ids) + starts)
    return Tokens(batch, np.concatenate(arrays, dtype=np.uint16, casting="unsafe"), np.cumsum(lengths))


def encode_all(enc, batches, num_proc):
    """`encode_batch` of each batch, in order, on `num_proc` cores.

    subtle: threads, not processes. tiktoken works outside Python's global lock and gives back one
    buffer per text, so threads scale as processes do, and there is nothing to pickle or to fork.
    """
    with ThreadPoolExecutor(num_proc) as pool:
        ahead = collections.deque()
        try:
            for batch in batches:
                ahead.append(pool.submit(encode_batch, enc, batch))
                if len(ahead) > 4 * num_proc:  # enough work in store while a shard is written
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            batches.close()  # removes what was downloaded


# -----------------------------------------------------------------------------
# Shards


def pack(stream, shard_size, limit=math.inf, skip=0, progress=None):
    """Cut a stream of `Tokens` into shards, `skip` tokens left out in front, `limit` in all.

    Yields (tokens, end): `end` = [source, piece, token] is where in the input the next shard
    starts, None after the last. Documents of 3, 5 and 1 tokens in shards of 4:

        aaab | bbbb | c     with the ends [0, 1, 1], [0, 2, 0], None
    """
    shard, filled = np.empty(shard_size, dtype=np.uint16), 0
    for batch, tokens, ends in stream:
        at, skip = skip, 0
        while at < len(tokens) and limit > 0:
            if filled == shard_size:  # only now that a token follows is it known not to be the last
                piece = int(np.searchsorted(ends, at, side="right"))
                yield shard, [batch.source, batch.first + piece, at - int(ends[piece - 1] if piece else 0)]
                shard, filled = np.empty(shard_size, dtype=np.uint16), 0
            n = int(min(len(tokens) - at, shard_size - filled, limit))
            shard[filled : filled + n] = tokens[at : at + n]
            at, filled, limit = at + n, filled + n, limit - n
            if progress:
                progress(n)
        if limit <= 0:
            break
    yield shard[:filled], None


def meta_path(folder, part, num_parts):
    return os.path.join(folder, f"meta.part-{part}-of-{num_parts}.json" if num_parts > 1 else "meta.json")


def new_meta(dataset, enc):
    """A meta.json before the first shard. `ends`: where in the input each shard ends, and the documents so far."""
    meta = {"dataset": dataset, "tokenizer": enc.name, "vocab_size": enc.n_vocab, "documents": 0, "tokens": 0}
    return meta | {"shards": {}, "complete": False, "made_from": {"sources": []}, "ends": {}}


class Writer:
    """Writes shards and the meta.json that goes with them."""

    def __init__(self, folder, stem, part, num_parts, meta, enc):
        self.folder, self.stem, self.part, self.num_parts = folder, stem, part, num_parts
        self.meta, self.enc = meta, enc

    def keep(self):
        """Go on after the last shard that is there and whole: where in the input that is; None if all are."""
        meta, files = self.meta, list(self.meta["shards"])
        whole = [is_whole(os.path.join(self.folder, file), meta["shards"][file]) for file in files] + [False]
        if meta["complete"] and whole.index(False) == len(files):
            return None
        files = [file for file in files[: whole.index(False)] if file in meta["ends"]]
        *end, meta["documents"] = meta["ends"][files[-1]] if files else (0, 0, 0, 0)
        meta["shards"] = {file: meta["shards"][file] for file in files}
        meta["tokens"], meta["complete"] = sum(meta["shards"].values()), False
        return end

    def write(self, tokens, end):
        """One shard, then meta.json: killed in between, the same shard is made again."""
        if not self.meta["shards"]:
            self.save()
            tokenizer.save_beside(self.enc, self.folder)
        number = len(self.meta["shards"]) * self.num_parts + self.part  # no two parts have one in common
        file = f"{self.stem}_{'train' if number else 'val'}_{number:06d}.npy"
        with cli.atomic_write(os.path.join(self.folder, file)) as out:
            # np.save in two steps, as numpy's own writing of the data hides why a disk refuses
            np.lib.format.write_array_header_1_0(out, np.lib.format.header_data_from_array_1_0(tokens))
            out.write(tokens.data)
        self.meta["shards"][file] = len(tokens)
        self.meta["tokens"] += len(tokens)
        self.meta["documents"] += int(np.count_nonzero(tokens == self.enc.eot_token))
        if end:
            self.meta["ends"][file] = [*end, self.meta["documents"]]
            self.save()

    def save(self):
        try:
            os.makedirs(self.folder, exist_ok=True)
        except OSError as error:
            reason = f"got --out-dir {self.folder} ({error.strerror}), needed a folder to write to, do give another"
            raise UserError(reason) from None
        with cli.atomic_write(meta_path(self.folder, self.part, self.num_parts), "w", encoding="utf-8") as file:
            json.dump(self.meta, file, indent=1)

    def finish(self):
        self.meta["complete"] = True
        self.save()
        print(
            f"{self.folder}: {self.meta['tokens']:,} tokens, {self.meta['documents']:,} documents, "
            f"{len(self.meta['shards'])} shards (the last one is meant to be short)"
        )


def open_shard(path):
    """The tokens of a shard as a memory map; UserError where it is not whole."""
    try:
        if path.endswith(".bin"):
            return np.memmap(path, dtype="<u2", mode="r", offset=1024, shape=(check_bin(path),))
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UserError(f"got {path} that cannot be read ({error}), needed a whole shard, do make it again") from None


def is_whole(path, num_tokens):
    """Whether the shard at `path` can be read and has so many tokens."""
    try:
        return open_shard(path).shape == (num_tokens,)
    except UserError:
        return False


def read_metas(folder):
    """{path: contents} of the meta.json, or one per part, in `folder`; refuses a folder that cannot be ours."""
    listing = []
    if os.path.exists(folder):
        try:
            listing = os.listdir(folder)
        except OSError as error:
            raise UserError(f"got --out-dir {folder} ({error.strerror}), needed a folder, do give another") from None
    metas = {}
    for path in (os.path.join(folder, file) for file in fnmatch.filter(listing, "meta*.json")):
        try:
            with open(path, encoding="utf-8") as file:
                metas[path] = json.load(file)
            identity(metas[path], 0), metas[path]["ends"], metas[path]["shards"]
        except (OSError, ValueError, LookupError, TypeError):
            raise UserError(f"got {path} that fineweb.py did not write, do give another --out-dir") from None
    if not metas and any(re.search(r"_(train|val)_.*\.(npy|bin)$", file) for file in listing):
        raise UserError(f"got {folder} with shards and no meta.json, needed a free folder, do give another --out-dir")
    return metas


def identity(meta, num_read):
    """What two runs must have in common to make one data set: the options, and the files.

    Of files that are not read to their end yet, `num_read` and on, only the names count: bad lines may be mended.
    """
    sources = [name if i >= num_read else [name, size] for i, (name, size) in enumerate(meta["made_from"]["sources"])]
    return {"dataset": meta["dataset"], "tokenizer": meta["tokenizer"], **meta["made_from"], "sources": sources}


def same_data(folder, metas, path, meta):
    """What `metas` holds at `path` if it continues `meta`, or `meta` itself; refuses another data set's folder."""
    for other, old in metas.items():
        ends = list(old["ends"].values())
        num_read = sys.maxsize if old["complete"] else ends[-1][0] if ends else 0
        was, now = identity(old, num_read), identity(meta, num_read)
        for key in now:  # the other parts of a data set differ from this one in their files
            if was.get(key) != now[key] and (other == path or key != "sources"):
                differing = f"{key} {str(was.get(key))[:90]}, now {str(now[key])[:90]}"
                raise UserError(
                    f"got {folder} that holds another data set ({differing}), "
                    "needed a free folder or the same options, do give another --out-dir"
                )
    return metas.get(path, meta)


# -----------------------------------------------------------------------------
# The whole way


def plan(options):
    """(folder, first part of the shards' names, sources, the hub's commit, what was there already)."""
    part, num_parts = parse_part(options.part)
    if options.input:
        sources = list_inputs(options.input)
        folder = options.out_dir or os.path.basename(sources[0].name).split(".")[0]
        stem = re.sub(r"[^A-Za-z0-9]+", "-", os.path.basename(os.path.abspath(folder)))
    else:
        folder, stem = DATASETS[options.dataset]
        folder, sources = options.out_dir or folder, [Source(PYTHON_DOCS, 0)]
    metas, revision = read_metas(folder), ""
    if options.dataset == "fineweb-edu" and not options.input:
        old = metas.get(meta_path(folder, part, num_parts))
        if old:  # what was begun is continued with the same files
            made_from = old["made_from"]
            return folder, stem, [Source(*source) for source in made_from["sources"]], made_from["revision"], metas
        sources, revision = list_hub()
    if num_parts > len(sources):
        raise UserError(f"got --part {options.part} of {len(sources)} files, needed one for each, do make fewer parts")
    return folder, stem, sources[part::num_parts], revision, metas


def prepare(options=Options()):
    """Make the shards that `options` describe, or what is missing of them. Returns their folder."""
    check_options(options)
    if options.pretokenized:
        return fetch_pretokenized(options)
    enc = tokenizer.get_encoding(options.tokenizer)
    if enc.n_vocab > tokenizer.MAX_VOCAB:
        raise UserError(f"got a tokenizer of {enc.n_vocab:,} ids, needed 65,536 at most (uint16), do train another")
    num_proc = options.num_proc or num_cores()
    part, num_parts = parse_part(options.part)
    folder, stem, sources, revision, metas = plan(options)
    meta = new_meta("input" if options.input else options.dataset, enc)
    meta["made_from"] = {
        "text_column": options.text_column,
        "shard_size": options.shard_size,
        "max_tokens": options.max_tokens,
        "revision": revision,
        "sources": [[s.name if revision or is_url(s.name) else os.path.basename(s.name), s.size] for s in sources],
    }
    path = meta_path(folder, part, num_parts)
    meta = same_data(folder, metas, path, meta)

    # go on where an earlier run ended
    writer = Writer(folder, stem, part, num_parts, meta, enc)
    if not (start := writer.keep()):
        print(f"{folder} is complete: {meta['tokens']:,} tokens in {len(meta['shards'])} shards")
        return folder
    source, piece, skip = start
    limit = (options.max_tokens or math.inf) - meta["tokens"]
    if revision:
        left, size = min(limit, EDU_TOKENS // num_parts - meta["tokens"]), sum(s.size for s in sources[source:])
        # beside the shards, one file is on disk while it is tokenized, and the next one as it comes
        need_disk(folder, 2 * left + 2 * max(s.size for s in sources))
        print(
            f"{left / 1e9:.1f}B tokens to {folder}: about {left / num_proc / 60e6:.0f} minutes on {num_proc} cores "
            f"(a million tokens a second each), if the network brings {size / 1e9:.0f} GB in that time"
        )

    # read, tokenize, cut, write: a shard goes to disk while the next one fills
    downloads = os.path.join(folder, f".download-{part}-of-{num_parts}")
    is_new = not os.path.exists(folder)
    stream = encode_all(enc, read_batches(sources, options, downloads, revision, source, piece), num_proc)
    writing = None
    with tqdm(initial=meta["tokens"], unit="tok", unit_scale=True, desc=folder, delay=0.5) as bar:
        try:
            for last, end in pack(stream, options.shard_size, limit, skip, bar.update):
                if writing:
                    writing.result()
                if end:
                    writing = background(writer.write, last, end)
        finally:  # whatever ends the reading, a shard that was begun is finished
            stream.close()
            if writing:
                writing.result()
            shutil.rmtree(downloads, ignore_errors=True)
            if is_new and os.path.exists(folder) and not os.listdir(folder):
                os.rmdir(folder)
    if not meta["shards"] and (last == enc.eot_token).all():
        raise UserError(f"got an empty corpus ({len(last)} documents without text), needed text, do check the input")
    size = len(last) if meta["shards"] or part else -(-len(last) // 10)
    for i in range(0, len(last), size or 1):
        writer.write(last[i : i + size], None)
    writer.finish()
    return folder


def need_disk(folder, size):
    """Refuse to begin what the disk cannot hold."""
    parent = os.path.abspath(folder)
    while not os.path.exists(parent):
        parent = os.path.dirname(parent)
    if (free := shutil.disk_usage(parent).free) < size:
        got, needed = f"{free / 1e9:.1f} GB free for {folder}", f"{size / 1e9:.1f} GB"
        raise UserError(f"got {got}, needed {needed}, do make room or ask for less")


def num_cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def parse_part(part):
    """"1/4" -> (1, 4). Counting from 1 works as well as from 0: "4/4" is "0/4"."""
    match = re.fullmatch(r"(\d+)/([1-9]\d*)", part or "0/1")
    if not match or int(match[1]) > int(match[2]):
        raise UserError(f"got --part {part}, needed I/N with I from 0 to N-1 (or 1 to N), do give for example 0/4")
    return int(match[1]) % int(match[2]), int(match[2])


def check_options(options):
    complaints = []
    if options.dataset not in DATASETS:
        hint = cli.nearest(options.dataset, list(DATASETS))
        complaints.append(f"got --dataset {options.dataset}, needed a known one, {hint}")
    # a shard is held in memory: 2**31 tokens are 4 GB
    for field, least, most in (
        ("shard_size", 1, 2**31), ("max_tokens", 0, 2**63), ("num_proc", 0, 1024), ("pretokenized", 0, 10**6 - 1)
    ):  # fmt: skip
        if not least <= getattr(options, field) <= most:
            complaints.append(f"got --{field.replace('_', '-')} {getattr(options, field)}, needed {least} to {most}")
    if options.pretokenized and (options.input or options.part or options.tokenizer != "gpt2"):
        complaints.append("got --pretokenized with --input, --part or --tokenizer, needed it without, do drop them")
    if complaints:
        raise UserError("; ".join(complaints))


# -----------------------------------------------------------------------------
# Ready-made shards


def check_bin(path):
    """The token count of an llm.c shard: 256 int32 (20240520, version 1, count, zeros), then uint16."""
    header = np.fromfile(path, dtype="<i4", count=256)
    size = os.path.getsize(path)
    if len(header) < 256 or header[0] != 20240520 or header[1] != 1 or size != 1024 + 2 * int(header[2]):
        raise UserError(f"got {path} of {size:,} bytes that is no whole .bin shard, needed one, do fetch it again")
    return int(header[2])


def fetch_pretokenized(options):
    """The validation shard and the first `--pretokenized` training shards of FineWeb-Edu, as published."""
    import huggingface_hub  # slow to import

    def fetch_shard(file):
        path = huggingface_hub.hf_hub_download(READY_REPO, file, repo_type="dataset", local_dir=downloads)
        try:
            check_bin(path)
        except UserError as error:  # cut short on the way: once more
            os.remove(path)
            raise ConnectionError(str(error)) from None
        return path

    folder = options.out_dir or DATASETS["fineweb-edu"][0]
    downloads = os.path.join(folder, ".download")
    files = [f"finewebedu_{'train' if i else 'val'}_{i:06d}.bin" for i in range(options.pretokenized + 1)]
    enc = types.SimpleNamespace(name="gpt2", n_vocab=50257, eot_token=50256)  # its tables are not needed
    meta = same_data(folder, read_metas(folder), meta_path(folder, 0, 1), new_meta(READY_REPO, enc))
    writer = Writer(folder, "finewebedu", 0, 1, meta, enc)
    missing = [file for file in files if not is_whole(os.path.join(folder, file), meta["shards"].get(file))]
    need_disk(folder, 200_001_024 * len(missing))
    print(f"{len(missing)} shards of 200 MB to {folder}: about {2 * len(missing)} s at 100 MB/s")
    for file in tqdm(missing, unit="shard", desc=folder, delay=0.5):
        path = retry(file, lambda: fetch_shard(file), 3 if file == missing[0] else 9)
        writer.save()
        os.replace(path, os.path.join(folder, file))
        tokens = open_shard(os.path.join(folder, file))
        # a damaged one that is fetched again was counted before
        meta["documents"] += int(np.count_nonzero(tokens == enc.eot_token)) if file not in meta["shards"] else 0
        meta["shards"][file] = len(tokens)
        meta["tokens"] = sum(meta["shards"].values())
        writer.save()
    shutil.rmtree(downloads, ignore_errors=True)
    writer.finish()
    return folder


# -----------------------------------------------------------------------------
# Contamination: which examples of an evaluation stand in the training text?

RUN = 13  # tokens in common that count, as in GPT-3's study of contamination
FACTOR = 0x9E3779B97F4A7C15  # odd, so that multiplying by it loses nothing modulo 2**64
TABLE_BITS = 27  # 128 MB of flags: at a million runs looked for, 1 token in 100 needs a second look
SEGMENT = 2**24  # tokens of a shard that a core reads at a time


def run_hashes(tokens):
    """(n,) uint16 -> (n - RUN + 1,) uint64, a polynomial in FACTOR of the RUN tokens from each position."""
    tokens = tokens.astype(np.uint64) + 1  # else leading zeros would not show
    hashes = tokens[: len(tokens) - RUN + 1].copy()
    for i in range(1, RUN):
        hashes *= np.uint64(FACTOR)  # wraps around
        hashes += tokens[i : i + len(hashes)]
    return hashes


def read_examples(path, enc):
    """The lines of a HellaSwag file as [(line number, the tokens of its context and each ending)]."""
    examples = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    example = json.loads(line)
                    texts = [f"{example['ctx']} {ending}" for ending in example["endings"]]
                except (ValueError, KeyError, TypeError) as error:
                    raise UserError(
                        f"got {path} line {number} ({error!r}), needed HellaSwag's ctx and endings, do mend it"
                    ) from None
                examples.append((number, [encode_text(enc, text).astype(np.uint16) for text in texts]))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"got --contamination {path} ({error}), needed a HellaSwag file, do check the path") from None
    return examples


def segments(folder):
    """[(shard, start, stop, shard that follows)] over all the tokens of a folder."""
    numbers = {}
    for file in os.listdir(folder) if os.path.isdir(folder) else []:
        if match := re.search(r"_(?:train|val)_(\d+)\.(npy|bin)$", file):
            numbers[int(match[1])] = os.path.join(folder, file)
    # written in parts, shards follow each other in steps of the number of parts
    steps = [int(match[1]) for path in read_metas(folder) if (match := re.search(r"-of-(\d+)\.json$", path))]
    for number, path in sorted(numbers.items()):
        size = len(open_shard(path))
        for start in range(0, size, SEGMENT):
            stop = min(start + SEGMENT, size)
            yield path, start, stop, numbers.get(number + max(steps, default=1)) if stop == size else None


def contamination(folder, path, num_proc=0):
    """Search the shards in `folder` for runs of RUN tokens of the examples in `path`; prints a report.

    Exact: hashes only say where to look, tokens decide. Memory does not grow with the corpus.
    Returns {line number: longest run in common}.
    """
    work = list(segments(folder))
    if not work:
        raise UserError(f"got {folder} without shards, needed the training text, do make it or give --out-dir")
    enc = tokenizer.folder_encoding(folder)
    examples = read_examples(path, enc)
    texts = [tokens for _, endings in examples for tokens in endings if len(tokens) >= RUN]
    if not texts:
        raise UserError(f"got {path} without an example of {RUN} tokens, needed some, do give HellaSwag's file")
    # every distinct run that is looked for, and the run at each place of each text
    runs = np.concatenate([np.lib.stride_tricks.sliding_window_view(tokens, RUN) for tokens in texts])  # (runs, RUN)
    wanted, first, which = np.unique(
        np.concatenate([run_hashes(tokens) for tokens in texts]), return_index=True, return_inverse=True
    )
    assert (runs[first][which] == runs).all(), "two runs with one hash: choose another FACTOR"
    runs = runs[first]
    shift = np.uint64(64 - TABLE_BITS)
    table = np.zeros(2**TABLE_BITS, dtype=bool)
    table[wanted >> shift] = True

    def search(segment):
        """The wanted runs in a segment, and where each is seen first."""
        shard, start, stop, follower = segment
        tokens = open_shard(shard)[start : stop + RUN - 1]
        if follower:  # a run may begin in one shard and end in the next
            tokens = np.concatenate([tokens, open_shard(follower)[: RUN - 1]])
        seen, places = [], []
        for at in range(0, len(tokens) - RUN + 1, 2**16):  # small enough to stay in the cache
            block = np.asarray(tokens[at : at + 2**16 + RUN - 1])
            hashes = run_hashes(block)
            place = np.flatnonzero(table[hashes >> shift])
            index = np.minimum(np.searchsorted(wanted, hashes[place]), len(wanted) - 1)
            place, index = place[same := wanted[index] == hashes[place]], index[same]
            equal = (block[place[:, None] + np.arange(RUN)] == runs[index]).all(axis=1)
            seen.append(index[equal])
            places.append(start + at + place[equal])
        seen, order = np.unique(np.concatenate(seen or [[]]), return_index=True)
        return stop - start, seen.astype(np.int64), np.concatenate(places or [[]])[order]

    found = {}  # run: (shard, position)
    clock = time.perf_counter()
    num_proc = num_proc or num_cores()
    with ThreadPoolExecutor(num_proc) as pool, tqdm(unit="tok", unit_scale=True, desc=folder, delay=0.5) as bar:
        for (shard, *_), (size, seen, places) in zip(work, pool.map(search, work)):
            for run, place in zip(seen.tolist(), places.tolist()):
                found.setdefault(run, (shard, int(place)))
            bar.update(size)
        num_tokens, seconds = bar.n, time.perf_counter() - clock

    # per example the longest stretch of runs that were all found
    is_found = np.zeros(len(wanted) + 1, dtype=bool)
    is_found[list(found)] = True
    at, worst = 0, {}
    for number, endings in examples:
        for tokens in endings:
            which_here = which[at : at + max(0, len(tokens) - RUN + 1)]
            at += len(which_here)
            for hit, stretch in itertools.groupby(range(len(which_here)), key=lambda i: is_found[which_here[i]]):
                stretch = list(stretch)
                length = len(stretch) + RUN - 1
                if hit and length > worst.get(number, (0,))[0]:
                    worst[number] = length, *found[which_here[stretch[0]]], tokens[stretch[0] : stretch[0] + length]
    short = sum(all(len(tokens) < RUN for tokens in endings) for _, endings in examples)
    rate = num_tokens / seconds
    print(
        f"{len(worst)} of {len(examples)} examples ({len(worst) / len(examples):.2%}) of {path} have {RUN} tokens "
        f"in a row in common with {folder} ({num_tokens:,} tokens of {enc.name}); {short} are shorter than that"
    )
    for number, (length, shard, place, tokens) in sorted(worst.items(), key=lambda item: (-item[1][0], item[0]))[:10]:
        print(f"  line {number}: {length} tokens, {os.path.basename(shard)} at {place:,}: {enc.decode(tokens)[:150]!r}")
    minutes = 1e10 / rate / 60
    print(f"{seconds:.1f} s, {rate / 1e6:.1f}M tokens/s on {num_proc} cores; 10B tokens would take {minutes:.0f} min")
    return {number: length for number, (length, *_) in worst.items()}


def main(args=None):
    options = cli.parse(Options, args)
    if options.contamination:
        contamination(options.out_dir or DATASETS[options.dataset][0], options.contamination, options.num_proc)
    else:
        prepare(options)


if __name__ == "__main__":
    cli.run(main)
