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
there is always something to train on. meta.json beside the shards says what they are and where in
the input each one ends: the same command goes on after the last whole shard, and ends with the same
bytes, whenever it was killed and on however many cores it runs.
"""

import ast
import collections
import errno
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
import sysconfig
import threading
import time
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


DATASETS = {"fineweb-edu": ("edu_fineweb10B", "edufineweb"), "python-docs": ("python_docs", "pythondocs")}
EDU_REPO, EDU_FOLDER, EDU_TOKENS = "HuggingFaceFW/fineweb-edu", "sample/10BT", 9_953_989_344
READY_REPO = "kjj0/finewebedu10B-gpt2"
PYTHON_DOCS = f"the documentation of Python {platform.python_version()}"
RETRY_SECONDS = 1.0  # before the second attempt; it doubles with each
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
    stem, suffix = os.path.splitext(re.sub(r"\.(gz|zst)$", "", path))
    if suffix not in (".parquet", ".jsonl", ".txt") or path.endswith((".parquet.gz", ".parquet.zst")):
        raise UserError(f"got {name}, needed .parquet, .jsonl, .txt, or .gz or .zst of the last two, do convert it")
    return suffix


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
    except (OSError, ValueError) as error:  # pyarrow's own errors are among the two
        raise UserError(f"got {name} that cannot be read ({error}), needed a whole file, do fetch it again") from None


def read_parquet(path, name, text_column, skip):
    import pyarrow as pa  # slow to import: only where files are read
    import pyarrow.parquet

    file = pa.parquet.ParquetFile(path)
    columns = file.schema_arrow.names
    if text_column not in columns:
        raise UserError(
            f"got no column {text_column} in {name}, needed the one with the text, "
            f"do give --text-column, one of: {', '.join(columns)}"
        )
    if not pa.types.is_string(field := file.schema_arrow.field(text_column).type) and not pa.types.is_large_string(field):
        raise UserError(f"got column {text_column} of {name} with {field}, needed text, do give another --text-column")
    groups = range(file.num_row_groups)
    while groups and skip >= (rows := file.metadata.row_group(groups[0]).num_rows):
        groups, skip = groups[1:], skip - rows  # whole row groups are skipped unread
    for batch in file.iter_batches(batch_size=256, row_groups=groups, columns=[text_column]):
        for text in batch.column(0).to_pylist()[skip:]:
            yield Piece(text or "", True)
        skip = max(0, skip - len(batch))


def open_text(path):
    import pyarrow as pa

    compression = {".gz": "gzip", ".zst": "zstd"}.get(os.path.splitext(path)[1])
    return io.TextIOWrapper(pa.input_stream(path, compression=compression), encoding="utf-8-sig", newline="")


def read_jsonl(path, name, text_column, skip):
    with open_text(path) as file:
        documents = ((number, line) for number, line in enumerate(file, 1) if not line.isspace())
        for number, line in itertools.islice(documents, skip, None):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"got {name} line {number}: {error}, needed one JSON object, do mend it") from None
            text = record.get(text_column) if isinstance(record, dict) else None
            if not isinstance(text, str):
                keys = ", ".join(record) if isinstance(record, dict) else "no object"
                raise UserError(
                    f"got {name} line {number} without text under {text_column} ({keys}), "
                    "needed a string there, do give --text-column or mend the line"
                )
            yield Piece(text, True)


def read_txt(path, name, text_column, skip):
    with open_text(path) as file:
        pieces = cut(iter(lambda: file.read(BATCH_CHARS), ""))
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


def retry(name, function, attempts=6):
    """`function()`, again after 1, 2, 4 ... seconds if the network fails it; `name` is what it fetches."""
    for attempt in range(attempts):
        try:
            return function()
        except Exception as error:  # the hub's client has renamed its network errors from version to version
            status = getattr(error, "code", None) or getattr(getattr(error, "response", None), "status_code", None)
            if isinstance(error, UserError) or (isinstance(error, OSError) and error.errno == errno.ENOSPC):
                raise
            if status in (401, 403, 404) or attempt == attempts - 1:
                break
            time.sleep(RETRY_SECONDS * 2**attempt)
    raise UserError(
        f"got {status or type(error).__name__} for {name} ({str(error).splitlines()[0][:200] if str(error) else 'no answer'}), "
        "needed a network that reaches it, do run the same command again later, or work without one: "
        "--dataset python-docs, or --input with files of yours"
    ) from None


def fetch_url(url, path):
    """Download `url` to `path`, whole or not at all."""
    with urllib.request.urlopen(url, timeout=60) as response, cli.atomic_write(path) as file:
        shutil.copyfileobj(response, file, 2**20)
        expected = int(response.headers.get("Content-Length") or file.tell())
        if file.tell() != expected:
            raise ConnectionError(f"{file.tell():,} bytes came of {expected:,}")


def fetch(source, folder, revision):
    """The path of a local copy of `source`: itself if it is a file here."""
    if revision:
        import huggingface_hub  # slow to import

        download = huggingface_hub.hf_hub_download
        return retry(
            source.name,
            lambda: download(EDU_REPO, source.name, repo_type="dataset", revision=revision, local_dir=folder),
        )
    if not is_url(source.name):
        return source.name
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, os.path.basename(urllib.parse.urlsplit(source.name).path))
    retry(source.name, lambda: fetch_url(source.name, path))
    return path


def list_hub():
    """The files of FineWeb-Edu's sample-10BT, and the commit that they are from."""
    import huggingface_hub

    api = huggingface_hub.HfApi()
    revision = retry(EDU_REPO, lambda: api.dataset_info(EDU_REPO).sha)
    tree = retry(
        EDU_REPO, lambda: list(api.list_repo_tree(EDU_REPO, EDU_FOLDER, repo_type="dataset", revision=revision))
    )
    files = [Source(file.path, file.size) for file in tree if file.path.endswith(".parquet")]
    return sorted(files), revision


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
        path = coming.result() if coming else fetch(sources[number], folder, revision)
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
        cuts = [match.end() for match in re.finditer(rf"{blank}{{9999,}}(?={last}[\S\x1c-\x1f])", text)]
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


# -----------------------------------------------------------------------------
# Shards


def save_shard(path, tokens):
    """np.save, whole or not at all. Written by Python, as numpy's own writer hides why a disk refuses."""
    with cli.atomic_write(path) as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(tokens))
        file.write(tokens.data)


def is_whole(path, num_tokens):
    """Whether the shard at `path` can be read and has so many tokens."""
    try:
        if path.endswith(".bin"):
            return check_bin(path) == num_tokens
        return np.load(path, mmap_mode="r", allow_pickle=False).shape == (num_tokens,)
    except (OSError, ValueError, UserError):
        return False


def save_meta(path, meta):
    with cli.atomic_write(path, "w", encoding="utf-8") as file:
        json.dump(meta, file, indent=1)


def load_meta(folder, meta, path):
    """The meta.json at `path` if it is of the run that `meta` describes; `meta` if `folder` is free.

    Anything else in the folder is somebody's data set, and refused.
    """
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise UserError(f"got --out-dir {folder}, needed a folder, do give another")
    found = meta
    metas = glob.glob(os.path.join(glob.escape(folder), "meta*.json"))
    for other in metas:
        try:
            with open(other, encoding="utf-8") as file:
                old = json.load(file)
            pairs = [(key, old[key], meta[key]) for key in ("dataset", "tokenizer")]
            if other == path:
                # the files that are not read to the end yet may change: that is how bad lines are mended
                known = list(old["ends"].values())[-1][0] if old["ends"] and not old["complete"] else None
                names = [[source[0] for source in one["made_from"]["sources"]] for one in (old, meta)]
                sources = [one["made_from"]["sources"][:known] for one in (old, meta)]
                pairs += [("input", *names), ("input", *sources)]
                keys = [key for key in meta["made_from"] if key != "sources"]
                pairs += [(key, old["made_from"][key], meta["made_from"][key]) for key in keys]
                found = old
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            raise UserError(f"got {other} that is no meta.json of ours, needed a free folder, do give another --out-dir")
        for key, was, now in pairs:
            if was != now:
                was, now = [str(value) if len(str(value)) < 80 else "other files" for value in (was, now)]
                raise UserError(
                    f"got {folder} that holds another data set ({key} {was}, now {now}), "
                    "needed a free folder or the same options, do give another --out-dir"
                )
    shards = [file for file in glob.glob(os.path.join(glob.escape(folder), "*_*_*")) if file.endswith((".npy", ".bin"))]
    if shards and not metas:
        raise UserError(f"got {folder} with shards and no meta.json, needed a free folder, do give another --out-dir")
    return found


def prepare(options=Options()):
    """Make the shards that `options` describe, or what is missing of them. Returns their folder."""
    check_options(options)
    if options.pretokenized:
        return fetch_pretokenized(options)
    enc = tokenizer.get_encoding(options.tokenizer)
    if enc.n_vocab > tokenizer.MAX_VOCAB:
        raise UserError(f"got a tokenizer of {enc.n_vocab:,} ids, needed at most 65,536 (shards are uint16), do train a smaller one")
    part, num_parts = parse_part(options.part)
    num_proc = options.num_proc or len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count()))
    shard_size = options.shard_size

    # what there is to read, and where it goes
    revision = ""
    if options.input:
        sources = list_inputs(options.input)
        dataset = "input"
        folder = options.out_dir or re.sub(r"\..*", "", os.path.basename(sources[0].name)) or "shards"
        stem = re.sub(r"[^A-Za-z0-9]+", "-", os.path.basename(os.path.abspath(folder)))
    else:
        dataset, (folder, stem) = options.dataset, DATASETS[options.dataset]
        folder = options.out_dir or folder
        sources, revision = list_hub() if dataset == "fineweb-edu" else ([Source(PYTHON_DOCS, 0)], "")
    if num_parts > len(sources):
        raise UserError(f"got --part {options.part} of {len(sources)} input files, needed a file for each part, do make fewer")
    sources = sources[part::num_parts]
    suffix = f".part-{part}-of-{num_parts}" if num_parts > 1 else ""
    meta_path, downloads = os.path.join(folder, f"meta{suffix}.json"), os.path.join(folder, f"download{suffix}")
    names = [[source.name if is_url(source.name) else os.path.basename(source.name), source.size] for source in sources]
    made_from = {
        "text_column": options.text_column,
        "shard_size": shard_size,
        "max_tokens": options.max_tokens,
        "part": f"{part}/{num_parts}",
        "revision": revision,
        "sources": names,
    }
    meta = {"dataset": dataset, "tokenizer": enc.name, "vocab_size": enc.n_vocab, "documents": 0, "tokens": 0}
    # ends: where in the input each shard ends, and the documents so far
    meta |= {"shards": {}, "complete": False, "made_from": made_from, "ends": {}}
    meta = load_meta(folder, meta, meta_path)

    # the shards that are there and whole are kept, up to the first that is not
    kept = list(
        itertools.takewhile(lambda file: is_whole(os.path.join(folder, file), meta["shards"][file]), meta["shards"])
    )
    if meta["complete"] and len(kept) == len(meta["shards"]):
        print(f"{folder} is complete: {meta['tokens']:,} tokens in {len(kept)} shards")
        return folder
    kept = [file for file in kept if file in meta["ends"]]
    source, skip, skip_tokens, meta["documents"] = meta["ends"][kept[-1]] if kept else (0, 0, 0, 0)
    meta["shards"] = {file: meta["shards"][file] for file in kept}
    meta["tokens"], meta["complete"] = sum(meta["shards"].values()), False

    def shard_path(index):
        number = index * num_parts + part  # no two parts have a number in common
        return os.path.join(folder, f"{stem}_{'train' if number else 'val'}_{number:06d}.npy")

    def write(path, tokens, end):
        """Shard, then meta.json: killed in between, the shard is made again, of the same bytes."""
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise UserError(f"got --out-dir {folder} ({error.strerror}), needed a folder to write to, do give another") from None
        if not meta["shards"]:
            save_meta(meta_path, meta)
            base = options.tokenizer.removesuffix("+chat")
            if base not in ("gpt2", "bytes"):
                enc_base = tokenizer.get_encoding(base)
                with cli.atomic_write(os.path.join(folder, enc_base.name + ".tiktoken"), "w") as file:
                    file.write(tokenizer.dumps(enc_base))
        save_shard(path, tokens)
        meta["shards"][os.path.basename(path)] = len(tokens)
        meta["tokens"] += len(tokens)
        meta["documents"] += int(np.count_nonzero(tokens == enc.eot_token))
        if end:
            meta["ends"][os.path.basename(path)] = [*end, meta["documents"]]
            save_meta(meta_path, meta)

    total = None
    if dataset == "fineweb-edu":
        total = min(options.max_tokens or EDU_TOKENS, EDU_TOKENS) // num_parts
        left = max(total - meta["tokens"], 0)
        need_disk(folder, 2 * left + 2 * max(source.size for source in sources))
        print(
            f"{left / 1e9:.1f}B tokens of FineWeb-Edu to {folder}: about {left / num_proc / 60e6:.0f} minutes on "
            f"{num_proc} cores, a million tokens a second each, while {sum(s.size for s in sources) / 1e9:.0f} GB come in"
        )
    limit = (options.max_tokens or math.inf) - meta["tokens"]
    index, buffer, filled, writing = len(kept), np.empty(shard_size, dtype=np.uint16), 0, None
    bar = tqdm(total=total, initial=meta["tokens"], unit="tok", unit_scale=True, desc=folder)
    batches = read_batches(sources, options, downloads, revision, source, skip)
    stream = encode_all(enc, batches, num_proc)
    try:
        for batch, tokens, ends in stream:
            at, skip_tokens = skip_tokens, 0
            while at < len(tokens) and limit > 0:
                # a full shard is written when there is a token after it, so that one is left to train on
                if filled == shard_size:
                    piece = int(np.searchsorted(ends, at, side="right"))
                    end = [batch.source, batch.first + piece, at - int(ends[piece - 1] if piece else 0)]
                    if writing:
                        writing.result()
                    writing = background(write, shard_path(index), buffer, end)  # while the next one fills
                    index, buffer, filled = index + 1, np.empty(shard_size, dtype=np.uint16), 0
                n = int(min(len(tokens) - at, shard_size - filled, limit))
                buffer[filled : filled + n] = tokens[at : at + n]
                at, filled, limit = at + n, filled + n, limit - n
                bar.update(n)
            if limit <= 0:
                break
    finally:
        stream.close()
        batches.close()
        bar.close()
        if writing:
            writing.result()
    # the last shard, or a small corpus
    rest = buffer[:filled]
    if not index and (rest == enc.eot_token).all():
        raise UserError(f"got an empty corpus ({len(rest)} documents without text), needed text, do check the input")
    if index or part:
        write(shard_path(index), rest, None)
    else:
        for i, start in enumerate(range(0, filled, tenth := -(-filled // 10))):
            write(shard_path(i), rest[start : start + tenth], None)
    meta["complete"] = True
    save_meta(meta_path, meta)
    shutil.rmtree(downloads, ignore_errors=True)
    print(
        f"{folder}: {meta['tokens']:,} tokens, {meta['documents']:,} documents, {len(meta['shards'])} shards "
        "(the last one is meant to be short)"
    )
    return folder


def check_options(options):
    complaints = []
    if options.dataset not in DATASETS:
        complaints.append(f"got --dataset {options.dataset}, needed a known one, {cli.nearest(options.dataset, list(DATASETS))}")
    for flag, least in (("shard_size", 1), ("max_tokens", 0), ("num_proc", 0), ("pretokenized", 0)):
        if getattr(options, flag) < least:
            complaints.append(f"got --{flag.replace('_', '-')} {getattr(options, flag)}, needed {least} or more")
    if options.pretokenized and (options.input or options.part or options.tokenizer != "gpt2"):
        complaints.append("got --pretokenized with --input, --part or --tokenizer, needed it alone, do drop the others")
    if complaints:
        raise UserError("; ".join(complaints))
    parse_part(options.part)


def parse_part(part):
    """"1/4" -> (1, 4). Counting from 1 works as well as from 0: "4/4" is "0/4"."""
    if not part:
        return 0, 1
    match = re.fullmatch(r"(\d+)/(\d+)", part)
    if not match or not 0 < int(match[2]) or int(match[1]) > int(match[2]):
        raise UserError(f"got --part {part}, needed I/N with I from 0 to N-1 (or 1 to N), do give for example 0/4")
    return int(match[1]) % int(match[2]), int(match[2])


def need_disk(folder, size):
    """Refuse to begin what the disk cannot hold."""
    parent = os.path.abspath(folder)
    while not os.path.exists(parent):
        parent = os.path.dirname(parent)
    free = shutil.disk_usage(parent).free
    if free < size:
        raise UserError(f"got {free / 1e9:.1f} GB free for {folder}, needed {size / 1e9:.1f} GB, do make room or lower --max-tokens")


def check_bin(path):
    """The token count of an llm.c shard: 256 int32 (20240520, version 1, count), then uint16."""
    header = np.fromfile(path, dtype="<i4", count=256)
    if len(header) < 256 or header[0] != 20240520 or header[1] != 1:
        raise UserError(f"got {path} without the header of a .bin shard, needed 20240520 and version 1, do fetch it again")
    if os.path.getsize(path) != 1024 + 2 * int(header[2]):
        raise UserError(f"got {path} of {os.path.getsize(path):,} bytes, needed {1024 + 2 * int(header[2]):,}, do fetch it again")
    return int(header[2])


def fetch_pretokenized(options):
    """The validation shard and the first `--pretokenized` training shards of FineWeb-Edu, as published."""
    import huggingface_hub  # slow to import

    folder = options.out_dir or DATASETS["fineweb-edu"][0]
    files = ["finewebedu_val_000000.bin"] + [f"finewebedu_train_{i:06d}.bin" for i in range(1, options.pretokenized + 1)]
    meta = {"dataset": READY_REPO, "tokenizer": "gpt2", "vocab_size": 50257, "documents": 0, "tokens": 0}
    meta |= {"shards": {}, "complete": False, "made_from": {"sources": []}, "ends": {}}
    path = os.path.join(folder, "meta.json")
    meta = load_meta(folder, meta, path)
    missing = [file for file in files if not is_whole(os.path.join(folder, file), meta["shards"].get(file))]
    need_disk(folder, 200_001_024 * len(missing))
    print(f"{len(missing)} shards of 200 MB to {folder}, {len(missing) * 0.2:.1f} GB: about {len(missing) * 2} s at 100 MB/s")
    downloads = os.path.join(folder, "download")
    for file in tqdm(missing, unit="shard", desc=folder):
        def download():
            got = huggingface_hub.hf_hub_download(READY_REPO, file, repo_type="dataset", local_dir=downloads)
            try:
                return got, check_bin(got)
            except UserError as error:
                os.remove(got)
                raise ConnectionError(str(error)) from None  # cut short on the way: once more
        got, num_tokens = retry(file, download)
        tokens = np.memmap(got, dtype="<u2", mode="r", offset=1024)
        documents = int(np.count_nonzero(tokens == 50256))
        save_meta(path, meta)
        os.replace(got, os.path.join(folder, file))
        meta["shards"][file] = num_tokens
        meta["documents"] += documents
        meta["tokens"] = sum(meta["shards"].values())
        save_meta(path, meta)
    shutil.rmtree(downloads, ignore_errors=True)
    meta["complete"] = True
    save_meta(path, meta)
    print(f"{folder}: {meta['tokens']:,} tokens, {len(meta['shards'])} shards")
    return folder


def main():
    prepare(cli.parse(Options))


if __name__ == "__main__":
    cli.run(main)
