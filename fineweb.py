"""Turn documents into token shards: any data set of the hub by its name, your own text, or Python's documentation.

    python fineweb.py                        10B tokens of FineWeb-Edu
    python fineweb.py --pretokenized 10      1B of them, ready-made
    python fineweb.py --dataset python-docs --tokenizer bytes  offline
    python fineweb.py --dataset HuggingFaceFW/fineweb --config sample-10BT
    python fineweb.py --input books/*.txt --out-dir books

A document becomes <|endoftext|> followed by its tokens (a literal <|endoftext|> in the text is treated
as text). The tokens of all documents, in input order, are cut into shards of `--shard-size` tokens,
`<name>_<split>_<6 digits>.npy` of uint16; the last one has the rest. Shard 0 is the validation split.
It takes every 11th document (or every 11th piece of a long one; fewer of a large text), at most a tenth
of the text and one shard; of FineWeb-Edu and Python's documentation it is the first shard.

Memory use does not depend on the size of the corpus: a few shards and some 10 MB of text per core. The
same command resumes after the last complete shard, as meta.json records it, and produces the same bytes,
whenever it was killed and on any number of cores. A data set of the hub stays at the commit that it had
at first.
"""

import os
import sys
from dataclasses import dataclass
from typing import Annotated

sys.path.append(os.path.dirname(__file__))  # which python -P and -I leave out

from plumbing.cli import console, flags


@dataclass
class Options:
    # The text
    dataset: str = "fineweb-edu"  # OWNER/NAME on the hub, fineweb-edu, or python-docs, which Python has
    config: str = ""  # which of the data set's configs, if it has several
    split: str = "train"  # which of its splits
    revision: str = ""  # its commit, branch or tag; by default the newest commit, when the shards are begun
    # your own files, folders or globs: .jsonl, .json, .csv, .parquet or text such as .txt, .md or .py, also .gz or
    # .zst; a clone of a data set, or a folder of save_to_disk
    input: tuple[str, ...] = ()
    # the column or key of the text: title,body joins two by a blank line, doc.text is the text in an object doc
    text_column: str = "text"
    # what stands between a text file's documents, such as <|endoftext|>; by default a file is one document
    separator: Annotated[str, "may be empty"] = ""
    pretokenized: int = 0  # fetch this many ready-made training shards of FineWeb-Edu instead

    # The shards
    out_dir: str | None = None  # their folder; by default named after the data set or the first file
    tokenizer: str = "gpt2"  # gpt2, bytes, or the path of a .tiktoken file
    shard_size: flags.Positive[int] = 100_000_000  # tokens per shard, 200 MB; also the largest validation split
    max_tokens: int = 0  # stop after this many tokens, such as 1e9, validation shard included; 0: all

    # The work
    num_proc: int = 0  # cores to tokenize on; 0: all; affects only the speed


if __name__ == "__main__":
    console.run(lambda: flags.parse(Options))  # --help and a mistyped flag need not wait for the imports

import collections
import contextlib
import itertools
import math
import shutil
import threading
import types
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from tqdm import tqdm

from plumbing.cli.console import UserError
from plumbing.data import readers, shards, sources, tokenizers
from plumbing.files import atomic_write, lock_folder, open_regular

# {--dataset: (default of --out-dir, beginning of the shards' names)}; their first shard is for validation
DATASETS = {"fineweb-edu": ("edu_fineweb10B", "edufineweb"), "python-docs": ("python_docs", "pythondocs")}
# in GPT-2's tokens with <|endoftext|>, for the progress bar and the check of the free disk space
EDU_TOKENS = 9_953_989_344
READY_REPO, READY_SHARDS = "kjj0/finewebedu10B-gpt2", 99  # for training, beside one for validation
QUEUE = 16  # batches per core that wait or are done: enough to keep all cores busy while a shard is written
SAMPLE_EVERY = 11  # every 11th piece is for validation, fewer of a large text: under a tenth


def check_options(options):
    """Raise one UserError listing everything that is wrong with the flags."""
    complaints = []
    changed = [name for name, value in vars(options).items() if value != getattr(Options, name)]
    unused = [flags.flag_of(name) for name in changed if name not in ("pretokenized", "out_dir")]
    if options.pretokenized and unused:
        complaints.append(f"--pretokenized fetches shards that are ready: leave {', '.join(unused)} out.")
    if options.pretokenized > READY_SHARDS:
        complaints.append(
            f"--pretokenized is {options.pretokenized}, but it must be at most {READY_SHARDS}, the shards there are."
        )
    if options.input:
        extra = [flags.flag_of(name) for name in ("dataset", "revision") if name in changed]
        if extra:
            complaints.append(f"--input is a data set of its own: leave {' and '.join(extra)} out.")
    elif options.dataset in DATASETS and {"config", "split"} & set(changed):
        complaints.append(f"{options.dataset} has neither configs nor splits. Give OWNER/NAME with --dataset.")
    elif options.dataset not in DATASETS and "/" not in options.dataset:
        meant = flags.closest(options.dataset, {name: name for name in DATASETS})
        if meant:
            complaints.append(f"There is no data set {options.dataset!r}. {meant} Others are OWNER/NAME.")
    types = {sources.file_type(name) for name in options.input}
    if options.separator and options.input and types.isdisjoint({"", ".txt"}):
        complaints.append("--separator only divides text files, and there are none in --input: leave it out.")
    flags.check(options, complaints)


# ----- Tokens -------------------------------------------------------------------------------------------


def encode_pieces(enc, pieces):
    """Tokenize pieces into arrays of uint16: <|endoftext|> if a document starts, then its ids."""
    joined = "".join(tokenizers.EOT + text for text, _ in pieces)
    if pieces and all(starts for _, starts in pieces) and joined.count(tokenizers.EOT) == len(pieces):
        # one call for all documents: Python's lock is taken and released once, and not for each of them
        with contextlib.suppress(ValueError):  # half a surrogate pair, or a million blanks
            ids = enc.encode_to_numpy(joined, allowed_special={tokenizers.EOT}, disallowed_special=())
            ids = ids.astype(np.uint16)
            return np.split(ids, np.flatnonzero(ids == enc.eot_token)[1:])
    arrays, eot = [], np.array([enc.eot_token], np.uint16)
    for text, starts in pieces:
        ids = tokenizers.encode_text(enc, text).astype(np.uint16)
        arrays.append(np.append(eot, ids) if starts else ids)
    return arrays


def encode_all(enc, batches, num_proc):
    """Yield (number of the file, of the piece, tokens) for each piece of the batches in order, on `num_proc` cores.

    This thread reads, and the others tokenize, as tiktoken releases Python's lock meanwhile.
    """
    worker = threading.local()

    def start():
        # subtle: each thread gets a copy, as sharing one costs a tenth more CPU time
        worker.enc = tokenizers.copy_encoding(enc, enc.name, enc._special_tokens)

    def submit():
        try:
            for batch in batches:
                yield batch, executor.submit(lambda pieces: encode_pieces(worker.enc, pieces), batch.pieces)
        except (UserError, OSError) as error:  # of the file that is read: what is before it goes into the shards
            failed = Future()
            failed.set_exception(error)
            yield readers.Batch(0, 0, []), failed

    executor = ThreadPoolExecutor(num_proc, initializer=start)
    coming = submit()
    try:
        pending = collections.deque(itertools.islice(coming, QUEUE * num_proc))
        while pending:
            batch, future = pending.popleft()
            for piece, tokens in enumerate(future.result(), batch.first_piece):
                yield batch.source, piece, tokens
            pending.extend(itertools.islice(coming, 1))
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


# ----- Shards -------------------------------------------------------------------------------------------


def limit_tokens(stream, limit, bar, sizes=()):
    """The first `limit` tokens of a stream of (source, piece, tokens), counted on a progress bar.

    sizes: those of the files in bytes. If the bar has no total, it is estimated from the files that were read.
    """
    is_known, current = bar.total is not None, None
    for source, piece, tokens in stream:
        if source != current and len(sizes) > 1:
            current, num_read = source, sum(sizes[:source])
            bar.set_postfix_str(f"file {source + 1} of {len(sizes)}", refresh=False)
            if num_read and not is_known:
                bar.total = bar.n * sum(sizes) // num_read
        tokens = tokens[:limit]
        yield source, piece, tokens
        bar.update(len(tokens))
        limit -= len(tokens)
        if limit <= 0:
            break


class ValidationSample:
    """Takes every `every`-th piece of the input (0: none) that still fits in a tenth of the input and in one shard."""

    def __init__(self, every, shard_size, num_seen, eot_token):
        self.every, self.eot_token = every, eot_token
        self.num_seen, self.num_empty = num_seen, 0  # tokens of both splits so far, and documents without a text
        self.buffer, self.num_tokens = np.empty(shard_size, np.uint16), 0

    def add(self, tokens):
        self.buffer[self.num_tokens : self.num_tokens + len(tokens)] = tokens
        self.num_tokens += len(tokens)

    def tokens(self):
        return self.buffer[: self.num_tokens]

    def remove_from(self, stream):
        """Keep the chosen pieces of a stream of (source, piece, tokens), and yield the others."""
        for source, piece, tokens in stream:
            self.num_seen += len(tokens)
            self.num_empty += len(tokens) == 1 and tokens[0] == self.eot_token
            # the choice depends only on a piece's place in the input and the lengths of the pieces up to it
            largest = min(len(self.buffer), self.num_seen // 10)
            fits = self.num_tokens + len(tokens) <= largest
            if fits and self.every and (source + piece + 1) % self.every == 0:
                self.add(tokens)
            else:
                yield source, piece, tokens

    def top_up(self, last):
        """If the input had few pieces, take what is missing from the end of the last shard. Returns the rest of it."""
        wanted = min(len(self.buffer), self.num_seen // self.every)
        missing = max(1, wanted) - self.num_tokens
        if missing <= self.num_tokens:  # half of what is wanted is enough
            return last
        cut = max(0, len(last) - missing)
        self.add(last[cut:])
        return last[:cut]


def cut_into_shards(stream, shard_size, skip=0):
    """Cut a stream of (source, piece, tokens) into shards, skipping the first `skip` tokens.

    Yields (tokens, end): `end` is the Position in the input at which the next shard starts, None after the
    last. The next shard overwrites `tokens`. Documents of 3, 5 and 1 tokens in shards of 4:

        aaab | bbbb | c     ending at piece 1, token 1; piece 2, token 0; None
    """
    shard, filled = np.empty(shard_size, np.uint16), 0
    for source, piece, tokens in stream:
        position, skip = skip, 0
        while position < len(tokens):
            if filled == shard_size:  # as another token follows, this is not the last shard
                yield shard, shards.Position(source, piece, position)
                filled = 0
            part = tokens[position : position + shard_size - filled]
            shard[filled : filled + len(part)] = part
            position += len(part)
            filled += len(part)
    yield shard[:filled], None


# ----- From the options to a folder of shards -----------------------------------------------------------


def prepare(options):
    """Make the shards that `options` describe, or those of them that are missing. Returns their folder."""
    check_options(options)
    if options.pretokenized:
        return fetch_pretokenized(options)
    default, prefix = DATASETS.get(options.dataset, ("", ""))
    settings = {
        name: getattr(options, name) for name in ("text_column", "shard_size", "max_tokens", "separator")
    }
    folder, found, meta = shards.plan(options, settings, default=default)
    enc = tokenizers.get_encoding(options.tokenizer)
    if meta.dataset not in DATASETS:
        num_bytes = sum(source.size for source in found)
        # a large corpus needs fewer pieces
        meta.validation_every = max(SAMPLE_EVERY, math.ceil(num_bytes / options.shard_size))
    writer = shards.ShardWriter(folder, meta, enc, prefix if not options.input else "")
    writer.make_once(make_shards, options, enc, found)
    return folder


def make_python_docs(folder):
    """Make the data of preset quickstart, Python's documentation as bytes, unless there are complete shards."""
    meta = shards.read_meta(folder)
    if not (meta.complete and meta.shards):
        prepare(Options(dataset="python-docs", tokenizer="bytes", out_dir=folder))


def make_shards(writer, options, enc, found):
    """Read, tokenize, cut and write, from where an earlier run ended to the end of the input."""
    meta, begin = writer.meta, writer.resume()
    num_seen = meta.tokens - begin.token  # before the piece at which this run begins
    sample = ValidationSample(meta.validation_every, options.shard_size, num_seen, enc.eot_token)
    num_sampled = meta.shards.get(writer.validation_file, 0)
    if num_sampled:
        shard = shards.open_shard(writer.path(writer.validation_file))
        sample.add(shard.read(0, num_sampled))
    total, sizes = options.max_tokens or None, [source.size for source in found]
    if meta.dataset == "fineweb-edu":
        total = total or EDU_TOKENS
    if found[0].repo:
        # a shard has about as many bytes as the files, which are compressed. Beside a few shards' text, three files may
        # be on disk: one is finished, one is being read, one is being downloaded
        check_disk_space(writer.folder, (2 * (total - num_seen) if total else sum(sizes)) + 3 * max(sizes))
    ahead = not options.max_tokens  # with a limit, the next file may not be needed
    downloads = sources.Downloads(found, writer.path(".download"), begin.source, ahead)
    batches = readers.read_batches(downloads, options.text_column, begin.piece, options.separator)
    encoded = encode_all(enc, batches, options.num_proc or readers.num_cores())
    limit = (options.max_tokens or sys.maxsize) - num_seen
    bar = tqdm(total=total, initial=num_seen, unit="tok", unit_scale=True, desc=writer.title, delay=0.5)
    with bar, contextlib.closing(encoded):
        stream = sample.remove_from(limit_tokens(encoded, limit, bar, sizes))
        for tokens, end in cut_into_shards(stream, options.shard_size, begin.token):
            if end:
                write_shard(writer, enc, tokens, end, sample)
                downloads.remove_before(end.source)  # not earlier: what is not in a shard yet will be read again
    write_rest(writer, enc, tokens, sample)
    writer.finish()
    downloads.close()
    if sample.num_empty:
        print(f"note: {console.count(sample.num_empty, 'row')} without a text became empty documents.")


def check_disk_space(folder, size):
    """Raise UserError if the disk that `folder` is on has less than `size` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < size:
        raise UserError(
            f"The shards need {size / 1e9:.1f} GB, but the disk of {folder} has {free / 1e9:.1f} GB free. Make room, "
            "choose another --out-dir, or ask for fewer tokens with --max-tokens or --pretokenized."
        )


def write_shard(writer, enc, tokens, end, sample):
    """Write the sample and then the next shard, if it has tokens, then meta.json: it says where the next one begins.

    The first call writes the tokenizer before them. If killed in between, the shard is written again.
    """
    meta = writer.meta
    if not meta.shards:
        tokenizers.save_for_folder(enc, writer.folder)
        writer.save()
    if writer.validation_file:
        writer.write(writer.validation_file, sample.tokens())
    if len(tokens):
        file = shards.shard_name(writer.prefix, len(meta.shards))
        writer.write(file, tokens)
        meta.documents += writer.count_documents(tokens)
        if end:
            meta.ends[file] = end._replace(sampled=sample.num_tokens, documents=meta.documents)
            writer.save()


def write_rest(writer, enc, rest, sample):
    """Write what is left at the end, so that there is something to train on and to validate on."""
    is_first, size = not writer.meta.shards, len(rest)
    if is_first and all((tokens == enc.eot_token).all() for tokens in (rest, sample.tokens())):
        raise UserError("The input contains no text. Check --input and --text-column.")
    if writer.validation_file:
        rest = sample.top_up(rest)
    elif is_first:  # the first shard would be all validation: cut it into tenths
        size = math.ceil(size / 10)
    for start in range(0, max(1, len(rest)), max(1, size)):
        write_shard(writer, enc, rest[start : start + size], None, sample)
    writer.meta.documents += writer.count_documents(sample.tokens())


def fetch_pretokenized(options):
    """Download FineWeb-Edu's validation shard and its first `--pretokenized` training shards, as published."""
    folder = options.out_dir or DATASETS["fineweb-edu"][0]
    files = [f"finewebedu_{'train' if i else 'val'}_{i:06d}.bin" for i in range(options.pretokenized + 1)]
    enc = types.SimpleNamespace(name="gpt2", n_vocab=50257, eot_token=50256)  # its tables are not needed
    with lock_folder(folder):
        meta = shards.Meta(READY_REPO, complete=False, made_from={"sources": []})
        writer = shards.ShardWriter(folder, meta, enc)
        writer.meta.complete = False  # which fewer shards may have been
        missing = [
            sources.Source(file, repo=READY_REPO, commit="main") for file in files if not writer.is_whole(file)
        ]
        check_disk_space(folder, 200_001_024 * len(missing))
        downloads = sources.Downloads(missing, writer.path(".download"))
        for number, source in tqdm(downloads, total=len(missing), unit="shard", desc=writer.title, delay=0.5):
            downloads.remove_before(number)
            tokens = shards.open_shard(source.path).read()
            if source.name not in writer.meta.shards:  # a damaged one that is fetched again was counted before
                writer.meta.documents += writer.count_documents(tokens)
            writer.meta.shards[source.name] = len(tokens)
            writer.save()  # first: if this is killed in between, the shard is known to be missing
            with open_regular(source.path) as fetched, atomic_write(writer.path(source.name)) as file:
                shutil.copyfileobj(fetched, file)  # and not moved: it may lie in the user's cache of the hub
        downloads.close()
        try:  # so that a machine without a network can train on them
            tokenizers.save_for_folder(tokenizers.get_encoding("gpt2"), folder)
        except UserError as error:  # the shards can be used without it
            print(f"note: The tokenizer could not be saved with the shards, so training will fetch it. {error}")
        writer.finish()
    return folder


def main(args=None):
    """Make shards of documents, and print the command that trains on them."""
    folder = prepare(flags.parse(Options, args))
    meta = shards.read_meta(folder)
    command = training_command(folder, meta.lengths("train"), meta.lengths("val"))
    if command:
        console.print_next(command)


def training_command(folder, train, val):
    """The command that trains on shards of these lengths; None if they are too short.

    With a GPU and 100M tokens or more, it trains a GPT-2; otherwise the quickstart's small model.
    """
    command = ["python", "train_gpt2.py", ("--data", folder)]
    steps = sum(train) // 2**19
    has_gpu = any(map(shutil.which, ("nvidia-smi", "rocm-smi")))  # it seems; asking torch would take seconds
    if has_gpu and steps >= 190:  # 100M tokens are enough to be worth training GPT-2 on
        if steps > 18_000:  # the preset's 10B tokens
            return command
        # one pass over the data, with the preset's share of warmup
        return [*command, ("--max-steps", steps), ("--warmup-steps", steps // 27)]
    T = min(128, *(max(split, default=0) - 1 for split in (train, val)))
    if T < 1:
        return None
    command += [("--preset", "quickstart"), ("--out-dir", "log/" + os.path.basename(os.path.abspath(folder)))]
    windows = sum((length - 1) // T for length in train)
    if T < 128 or windows < 16:  # shorter than the preset's 16 sequences of 128 tokens
        command += [("--sequence-length", T), ("--total-batch-size", T * min(16, windows))]
    return command


if __name__ == "__main__":
    console.run(main)
