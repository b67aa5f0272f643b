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
size of the corpus. meta.json beside the shards says what they are and where in the input each one
ends: the same command goes on after the last whole shard, and ends with the same bytes, whenever it
was killed and on however many cores it runs.
"""

import ast
import collections
import contextlib
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
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from plumbing import cli
import tokenizer
from plumbing.cli import UserError

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
        is_one = is_url(pattern) or os.path.exists(pattern)
        names = [pattern] if is_one else sorted(glob.glob(pattern, recursive=True))
        if not names:
            raise UserError(f"got --input {pattern}, needed files that exist, do check the path")
        for name in names:
            if os.path.isdir(name):
                raise UserError(f"got the folder {name}, needed files, do give --input '{name}/*'")
            kind(name)
            sources.append(Source(name, 0 if is_url(name) else os.path.getsize(name)))
    return sources


def is_url(name):
    return name.startswith(("http://", "https://"))


def kind(name):
    """"a/b.jsonl.gz" -> ".jsonl" """
    path = urllib.parse.urlsplit(name).path if is_url(name) else name
    match = re.search(r"\.parquet$|(\.jsonl|\.txt)(\.gz|\.zst)?$", path)
    if not match:
        raise UserError(f"got {name}, needed .parquet, .jsonl, .txt, or .gz or .zst of the last two, do convert it")
    return match[1] or match[0]


# -----------------------------------------------------------------------------
# Documents. A document comes as pieces: most are one piece; a long .txt, which is one document,
# is cut where no tokenizer's token crosses, so that it is neither held in memory nor left to one core.


class Piece(NamedTuple):
    text: str
    starts: bool  # whether a document starts here


def read_pieces(path, name, text_column, skip):
    """The pieces of the file at `path` without the first `skip`; `name` is what the user calls it."""
    try:
        if name == PYTHON_DOCS:
            pieces = (Piece(text, True) for text in python_docs())
        else:
            reader = {".parquet": read_parquet, ".jsonl": read_jsonl, ".txt": read_txt}[kind(name)]
            pieces = reader(path, name, text_column)
        yield from itertools.islice(pieces, skip, None)
    except UnicodeDecodeError as error:
        raise UserError(f"got {name} with {error.reason}, needed UTF-8, do convert it with iconv") from None
    except (OSError, ValueError, LookupError, NotImplementedError) as error:  # pyarrow's own are among them
        raise UserError(f"got {name} that cannot be read ({error}), needed a whole file, do fetch it again") from None


def read_parquet(path, name, text_column):
    import pyarrow.parquet  # slow to import: only where files are read

    file = pyarrow.parquet.ParquetFile(path)
    columns = {field.name: str(field.type) for field in file.schema_arrow}
    if "string" not in (got := columns.get(text_column, "not there")):
        needed = f"a string column, do give --text-column, one of {', '.join(columns)}"
        raise UserError(f"got column {text_column} of {name}: {got}, needed {needed}")
    for batch in file.iter_batches(batch_size=256, columns=[text_column]):
        yield from (Piece(text or "", True) for text in batch.column(0).to_pylist())


def open_text(path):
    import pyarrow

    compression = {".gz": "gzip", ".zst": "zstd"}.get(os.path.splitext(path)[1])
    return io.TextIOWrapper(pyarrow.input_stream(path, compression=compression), encoding="utf-8-sig", newline="")


def read_jsonl(path, name, text_column):
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            try:
                record = json.loads(line)
                found = f"keys {', '.join(record)}" if isinstance(record, dict) else "no object"
            except (ValueError, RecursionError) as error:  # the second: brackets in brackets without end
                record, found = None, error
            if not isinstance(record, dict) or not isinstance(record.get(text_column), str):
                needed = f"a JSON object with a string under {text_column}, do mend it or give --text-column"
                raise UserError(f"got {name} line {number}: {found}, needed {needed}")
            yield Piece(record[text_column], True)


def read_txt(path, name, text_column):
    with open_text(path) as file:
        for i, text in enumerate(cut(iter(lambda: file.read(BLOCK_CHARS), ""))):
            yield Piece(text, i == 0)


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
    for node in sorted(ast.walk(tree), key=lambda node: getattr(node, "lineno", 0)):
        if isinstance(node, ast.Module):
            declared = f"module {module}"
        elif isinstance(node, ast.ClassDef):
            declared = f"class {node.name}"
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            declared = f"def {node.name}({ast.unparse(node.args)})"
        else:
            continue
        if text := ast.get_docstring(node):
            parts += [declared, text]
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
            reason = f"{type(error).__name__} {error}".splitlines()[0][:200]
            status = getattr(error, "code", None) or getattr(getattr(error, "response", None), "status_code", None)
            is_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES)
            if status in (401, 403, 404) or "Offline" in type(error).__name__ or is_full:
                break  # asking again would not help
            if attempt < attempts - 1:
                time.sleep(RETRY_SECONDS * 2**attempt)
    raise UserError(
        f"got {reason} for {name}, needed a network that reaches it and room on the disk, do run the same command "
        "again later, or work without a network: --dataset python-docs, or --input with files of yours"
    )


def fetch_hub(repo, file, revision, folder, attempts):
    """The path of a data set's file from the hub, downloaded into `folder`."""
    import huggingface_hub  # slow to import

    args = {"repo_type": "dataset", "revision": revision, "local_dir": folder}
    return retry(file, lambda: huggingface_hub.hf_hub_download(repo, file, **args), attempts)


def fetch_url(url, folder, attempts):
    """The path of what `url` names, downloaded into `folder`."""
    digest = hashlib.sha256(url.encode()).hexdigest()[:8]  # two URLs may end in the same name
    path = os.path.join(folder, digest + os.path.basename(urllib.parse.urlsplit(url).path))

    def download():
        os.makedirs(folder, exist_ok=True)
        with urllib.request.urlopen(url, timeout=60) as response, open(path, "wb") as file:
            shutil.copyfileobj(response, file, 2**20)
            expected = int(response.headers.get("Content-Length") or file.tell())
            if file.tell() != expected:
                raise ConnectionError(f"{file.tell():,} bytes of {expected:,}")
        return path

    return retry(url, download, attempts)


def fetch(source, folder, revision, attempts=9):
    """The path of a local copy of `source`: itself if it is a file here."""
    if revision:
        return fetch_hub(EDU_REPO, source.name, revision, folder, attempts)
    return fetch_url(source.name, folder, attempts) if is_url(source.name) else source.name


def clean_up(folder, downloads):
    """Remove what was downloaded, and `folder` if nothing came of it."""
    shutil.rmtree(downloads, ignore_errors=True)
    with contextlib.suppress(OSError):  # it has shards
        os.rmdir(folder)


def list_hub():
    """The files of FineWeb-Edu's sample-10BT, and the commit that they are from."""
    import huggingface_hub

    def ask():
        api = huggingface_hub.HfApi()
        revision = api.dataset_info(EDU_REPO).sha
        tree = api.list_repo_tree(EDU_REPO, EDU_FOLDER, repo_type="dataset", revision=revision)
        return sorted(Source(file.path, file.size) for file in tree if file.path.endswith(".parquet")), revision

    return retry(EDU_REPO, ask)


# -----------------------------------------------------------------------------
# Tokens


class Batch(NamedTuple):
    source: int  # the number of the file it is from
    first: int  # the number of its first piece in that file
    pieces: list[Piece]


def read_batches(sources, options, folder, revision, source=0, skip=0):
    """All pieces of `sources` from piece `skip` of file `source` on, BATCH_CHARS of text at a time.

    While a file is read the next one is downloaded into `folder`; what was downloaded is removed
    as soon as it is read.
    """
    coming = None
    for number in range(source, len(sources)):
        name = sources[number].name
        path = coming.result() if coming else fetch(sources[number], folder, revision, 9 if number > source else 3)
        if number + 1 < len(sources) and not options.max_tokens:  # which may end before the next file
            coming = background(fetch, sources[number + 1], folder, revision)
        held, chars = [], 0
        for piece in read_pieces(path, name, options.text_column, skip):
            held.append(piece)
            chars += len(piece.text)
            if chars >= BATCH_CHARS:
                yield Batch(number, skip, held)
                skip, held, chars = skip + len(held), [], 0
        if held:
            yield Batch(number, skip, held)
        skip = 0
        if path != name:
            os.remove(path)


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
    """(tokens, ends) of a batch: per document one <|endoftext|>, then its text's ids.

    tokens (n,) uint16; ends (pieces,) is where in them each piece ends.
    """
    eot = np.array([enc.eot_token], dtype=np.uint32)
    arrays, lengths = [], []
    for text, starts in batch.pieces:
        ids = encode_text(enc, text)
        arrays += [eot, ids] if starts else [ids]
        lengths.append(len(ids) + starts)
    return np.concatenate(arrays, dtype=np.uint16, casting="unsafe"), np.cumsum(lengths)


def encode_all(enc, batches, num_proc):
    """(batch, tokens, ends) of each batch, in order, tokenized on `num_proc` cores.

    Threads, not processes: tiktoken works outside Python's global lock and gives back one buffer
    per text, and there is nothing to pickle or to fork. subtle: each thread has a copy of the
    tokenizer: two that share one take about a tenth more of the processor's time.
    """
    own = threading.local()

    def start():
        own.enc = tokenizer.copy_encoding(enc, enc.name, enc._special_tokens)

    def encode(batch):
        return batch, *encode_batch(own.enc, batch)

    pool, ahead = ThreadPoolExecutor(num_proc, initializer=start), collections.deque()
    try:
        for batch in batches:
            ahead.append(pool.submit(encode, batch))
            if len(ahead) > 4 * num_proc:  # enough work in store while a shard is written
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


# -----------------------------------------------------------------------------
# Shards


def pack(stream, shard_size, limit=math.inf, skip=0, progress=lambda num_tokens: None):
    """Cut a stream of (batch, tokens, ends) into shards, `skip` tokens left out in front, `limit` in all.

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
            progress(n)
        if limit <= 0:
            break
    yield shard[:filled], None


def meta_path(folder, part, num_parts):
    return os.path.join(folder, f"meta.part-{part}-of-{num_parts}.json" if num_parts > 1 else "meta.json")


def new_meta(dataset, enc, made_from):
    """A meta.json before the first shard. `ends`: where in the input each shard ends, and the documents so far."""
    meta = {"dataset": dataset, "tokenizer": enc.name, "vocab_size": enc.n_vocab, "documents": 0, "tokens": 0}
    return meta | {"shards": {}, "complete": False, "made_from": made_from, "ends": {}}


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
            tokenizer.save_for_folder(self.enc, self.folder)
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
        with contextlib.suppress(OSError):  # where it cannot be made, what follows says so
            os.makedirs(self.folder, exist_ok=True)
        with cli.atomic_write(meta_path(self.folder, self.part, self.num_parts), "w", encoding="utf-8") as file:
            json.dump(self.meta, file, indent=1)

    def finish(self):
        meta = self.meta
        meta["complete"] = True
        self.save()
        counts = f"{meta['tokens']:,} tokens, {meta['documents']:,} documents, {len(meta['shards'])} shards"
        print(f"{self.folder}: {counts} (the last one is meant to be short)")


def open_shard(path):
    """The tokens of a shard as a memory map; UserError where it is not whole."""
    try:
        if path.endswith(".bin"):
            return np.memmap(path, dtype="<u2", mode="r", offset=1024, shape=(check_bin(path),))
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:  # the last: an empty file
        raise UserError(f"got {path} that cannot be read ({error}), needed a whole shard, do make it again") from None


def is_whole(path, num_tokens):
    """Whether the shard at `path` can be read and has so many tokens."""
    try:
        return open_shard(path).shape == (num_tokens,)
    except UserError:
        return False


def read_metas(folder):
    """{path: contents} of the meta.json, or one per part, in `folder`; refuses a folder that cannot be ours."""
    try:
        files = os.listdir(folder)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"got --out-dir {folder} ({error.strerror}), needed a folder, do give another") from None
    metas = {}
    for path in (os.path.join(folder, file) for file in fnmatch.filter(files, "meta*.json")):
        try:
            with open(path, encoding="utf-8") as file:
                metas[path] = meta = json.load(file)
            meta["dataset"], meta["tokenizer"], meta["made_from"]["sources"], meta["ends"], meta["shards"]
        except (OSError, ValueError, LookupError, TypeError):
            raise UserError(f"got {path} that fineweb.py did not write, do give another --out-dir") from None
    if not metas and any(re.search(r"_(train|val)_.*\.(npy|bin)$", file) for file in files):
        raise UserError(f"got {folder} with shards and no meta.json, needed a free folder, do give another --out-dir")
    return metas


def same_data(folder, metas, path, meta):
    """What `metas` holds at `path` if it continues `meta`, or `meta` itself; refuses another data set's folder."""

    def identity(meta):
        sources = [[name, size * (i < num_read)] for i, (name, size) in enumerate(meta["made_from"]["sources"])]
        return {"dataset": meta["dataset"], "tokenizer": meta["tokenizer"], **meta["made_from"], "sources": sources}

    for other, old in metas.items():
        # of a file that is not read to its end yet only the name counts: bad lines may be mended
        ends = list(old["ends"].values())
        num_read = sys.maxsize if old["complete"] else ends[-1][0] if ends else 0
        was, now = identity(old), identity(meta)
        for key in now:  # the other parts of a data set differ from this one in their files
            if was.get(key) != now[key] and (other == path or key != "sources"):
                got = f"another data set ({key} {str(was.get(key))[:90]}, now {str(now[key])[:90]})"
                raise UserError(f"got {folder} that holds {got}, needed a free folder, do give another --out-dir")
    return metas.get(path, meta) | {"made_from": meta["made_from"]}  # of a mended file, the size that it has now


# -----------------------------------------------------------------------------
# The whole way


def plan(options, part, num_parts):
    """(folder, first part of the shards' names, what is in the folder, sources, the hub's commit)."""
    folder, stem = DATASETS[options.dataset]
    sources, revision = [Source(PYTHON_DOCS, 0)], ""
    if options.input:
        sources = list_inputs(options.input)
        folder = os.path.basename(sources[0].name).split(".")[0]
    folder = options.out_dir or folder
    if options.input:
        stem = re.sub(r"[^A-Za-z0-9]+", "-", os.path.basename(os.path.abspath(folder)))
    metas = read_metas(folder)
    if options.dataset == "fineweb-edu" and not options.input:
        if old := metas.get(meta_path(folder, part, num_parts)):  # what was begun goes on with the same files
            made_from = old["made_from"]
            return folder, stem, metas, [Source(*source) for source in made_from["sources"]], made_from["revision"]
        sources, revision = list_hub()
    if num_parts > len(sources):
        raise UserError(f"got --part {options.part} of {len(sources)} files, needed one each, do make fewer parts")
    return folder, stem, metas, sources[part::num_parts], revision


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
    folder, stem, metas, sources, revision = plan(options, part, num_parts)
    made_from = {key: getattr(options, key) for key in ("text_column", "shard_size", "max_tokens")}
    names = [s.name if revision or is_url(s.name) else os.path.basename(s.name) for s in sources]
    made_from |= {"revision": revision, "sources": [[name, s.size] for name, s in zip(names, sources)]}
    meta = new_meta("input" if options.input else options.dataset, enc, made_from)
    meta = same_data(folder, metas, meta_path(folder, part, num_parts), meta)

    # go on where an earlier run ended
    writer = Writer(folder, stem, part, num_parts, meta, enc)
    if not (start := writer.keep()):
        print(f"{folder} is complete: {meta['tokens']:,} tokens in {len(meta['shards'])} shards")
        return folder
    source, piece, skip = start
    limit = (options.max_tokens or math.inf) - meta["tokens"]
    if revision:
        left, rest = min(limit, EDU_TOKENS // num_parts - meta["tokens"]), sum(s.size for s in sources[source:])
        # beside the shards, one file is on disk while it is tokenized, and the next one as it comes
        need_disk(folder, 2 * left + 2 * max(s.size for s in sources))
        minutes = f"about {left / num_proc / 60e6:.0f} minutes on {num_proc} cores (a million tokens a second each)"
        print(f"{left / 1e9:.1f}B tokens to {folder}: {minutes}, if the network brings {rest / 1e9:.0f} GB meanwhile")

    # read, tokenize, cut, write: a shard goes to disk while the next one fills
    downloads = os.path.join(folder, f".download-{part}-of-{num_parts}")
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
            clean_up(folder, downloads)
    if not meta["shards"] and (last == enc.eot_token).all():
        raise UserError(f"got an empty corpus ({len(last)} documents without text), needed text, do check the input")
    size = len(last) if meta["shards"] or part else -(-len(last) // 10)
    for i in range(0, len(last), size or 1):
        writer.write(last[i : i + size], None)
    writer.finish()
    return folder


def need_disk(folder, size):
    """Refuse to begin what the disk cannot hold."""
    path = Path(folder).absolute()
    free = shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists())).free
    if free < size:
        got = f"{free / 1e9:.1f} GB free for {folder}"
        raise UserError(f"got {got}, needed {size / 1e9:.1f} GB, do make room or ask for less")


def num_cores():
    """The cores that this process may use."""
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
        hint = cli.suggest(options.dataset, list(DATASETS))
        complaints.append(f"got --dataset {options.dataset}, needed a known one, {hint}")
    for flag in ("max_tokens", "num_proc", "pretokenized"):
        if getattr(options, flag) < 0:
            complaints.append(f"got --{flag.replace('_', '-')} {getattr(options, flag)}, needed 0 or more")
    if not 1 <= options.shard_size <= 2**31:  # two are held in memory, of 4 GB then
        complaints.append(f"got --shard-size {options.shard_size}, needed 1 to {2**31:,}")
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
    folder = options.out_dir or DATASETS["fineweb-edu"][0]
    downloads = os.path.join(folder, ".download")
    files = [f"finewebedu_{'train' if i else 'val'}_{i:06d}.bin" for i in range(options.pretokenized + 1)]
    enc = types.SimpleNamespace(name="gpt2", n_vocab=50257, eot_token=50256)  # its tables are not needed
    meta = new_meta(READY_REPO, enc, {"sources": []})
    meta = same_data(folder, read_metas(folder), meta_path(folder, 0, 1), meta)
    writer = Writer(folder, "finewebedu", 0, 1, meta, enc)
    missing = [file for file in files if not is_whole(os.path.join(folder, file), meta["shards"].get(file))]
    need_disk(folder, 200_001_024 * len(missing))
    print(f"{len(missing)} shards of 200 MB to {folder}: about {2 * len(missing)} s at 100 MB/s")
    try:
        for file in tqdm(missing, unit="shard", desc=folder, delay=0.5):
            path = fetch_hub(READY_REPO, file, None, downloads, 3 if file == missing[0] else 9)
            tokens = open_shard(path)
            writer.save()  # before the first shard: killed in between, the folder is still known as ours
            os.replace(path, os.path.join(folder, file))
            if file not in meta["shards"]:  # a damaged one that is fetched again was counted before
                meta["documents"] += int(np.count_nonzero(tokens == enc.eot_token))
            meta["shards"][file] = len(tokens)
            meta["tokens"] = sum(meta["shards"].values())
            writer.save()
    finally:
        clean_up(folder, downloads)
    writer.finish()
    return folder


# -----------------------------------------------------------------------------


def main(args=None):
    options = cli.parse(Options, args)
    if options.contamination:
        import contamination  # imports this file

        contamination.report(options.out_dir or DATASETS[options.dataset][0], options.contamination, options.num_proc)
    else:
        prepare(options)


if __name__ == "__main__":
    cli.run(main)
