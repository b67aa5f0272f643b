"""Turn documents into token shards: FineWeb-Edu from the hub, your own text, or Python's documentation.

    python fineweb.py                        10B tokens of FineWeb-Edu
    python fineweb.py --pretokenized 10      1B of them, ready-made
    python fineweb.py --dataset python-docs  a few MB without a network
    python fineweb.py --input books/*.txt --out-dir books
    python fineweb.py --input https://host/a.jsonl.gz --tokenizer my.tiktoken

A document becomes <|endoftext|> followed by its tokens (a literal <|endoftext|> in the text is treated
as text). The documents' tokens, in input order, form one stream, which is cut into shards of
`--shard-size` tokens, `<name>_<split>_<6 digits>.npy` of uint16; the last one has the rest. Shard 0 is
the validation split. For FineWeb-Edu it is the first shard, as published; for your own text it is a
sample of the whole: every 11th document (or piece of a long text), or fewer, so that it is less than a
tenth and fits into a shard.

Memory use is a few shards and a few texts per core, whatever the size of the corpus. meta.json describes
the shards and records where in the input each one ends: the same command resumes after the last complete
shard and produces the same bytes, whenever it was killed and on any number of cores. On several machines,
run parts at the same time, --part 0/4 to --part 3/4: each takes every fourth input file.
"""

from dataclasses import dataclass

from plumbing import cli


@dataclass
class Options:
    # The text
    dataset: str = "fineweb-edu"  # fineweb-edu (the hub's sample-10BT) or python-docs (needs no network)
    input: tuple[str, ...] = ()  # your own files, folders, globs or URLs: .parquet, .jsonl, .txt, also .gz or .zst
    text_column: str = "text"  # the column of a parquet file, the key of a JSON line
    separator: str = ""  # text between a .txt's documents, such as <|endoftext|>; by default a file is one document
    pretokenized: int = 0  # fetch this many ready-made training shards of FineWeb-Edu instead

    # The shards
    out_dir: str | None = None  # folder of the shards; by default edu_fineweb10B, python_docs or the first file's name
    tokenizer: str = "gpt2"  # gpt2, bytes, or the path of a .tiktoken file
    shard_size: int = 100_000_000  # tokens per shard, 200 MB; also the largest validation split
    max_tokens: int = 0  # stop after this many tokens, validation shard included; 0: all

    # The work
    num_proc: int = 0  # cores to tokenize on; 0: all; affects only the speed
    part: str = ""  # I/N: only every N-th input file, from the I-th; the parts share one --out-dir


def parse_args(args=None):
    return cli.parse(Options, args)


if __name__ == "__main__":
    cli.run(parse_args)  # --help and a mistyped flag need not wait for the imports

import collections
import contextlib
import functools
import hashlib
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

import tokenizer
from plumbing import documents, shards
from plumbing.cli import UserError
from plumbing.files import FolderInUse, lock_folder

# -----------------------------------------------------------------------------
# Options

DATASETS = {"fineweb-edu": ("edu_fineweb10B", "edufineweb"), "python-docs": ("python_docs", "pythondocs")}
EDU_REPO, EDU_FOLDER = "HuggingFaceFW/fineweb-edu", "sample/10BT"
EDU_TOKENS = 9_953_989_344  # in GPT-2's tokens with <|endoftext|>; used only to estimate the time
READY_REPO = "kjj0/finewebedu10B-gpt2"
MAX_THREADS = 8  # up to this many threads tokenize directly; with more, each gets a process
MUCH_TEXT = 100_000_000  # with this many training tokens or more, GPT-2 124M is worth its time
SAMPLE_EVERY = 11  # every 11th piece of your own text is for validation: a little less than a tenth


def check_options(options):
    """Raise one UserError listing everything that is wrong with the flags."""
    errors = []
    if options.dataset not in DATASETS:
        hint = cli.suggest(options.dataset, list(DATASETS))
        errors.append(f"There is no data set called {options.dataset!r}. {hint}")
    errors += cli.check_numbers(options, above_0=["shard_size"])
    if options.shard_size > 2**31:  # two are held in memory, of up to 4 GB each
        errors.append(f"--shard-size is {options.shard_size:,}, but it must be at most {2**31:,}.")
    if options.pretokenized and (options.input or options.part or options.tokenizer != "gpt2"):
        errors.append(
            "--pretokenized fetches shards that are ready, so it does not go with --input, --part or --tokenizer. "
            "Leave those out."
        )
    if errors:
        raise UserError(" ".join(errors))


def parse_part(part):
    """ "1/4" -> (1, 4). Counting from 1 works as well as from 0: "4/4" is "0/4"."""
    match = re.fullmatch(r"(\d{1,9})/([1-9]\d{0,8})", part or "0/1")
    if not match or int(match[1]) > int(match[2]):
        raise UserError(
            f"--part {cli.plain(part)} is not of the form I/N, with I from 0 to N-1 (or from 1 to N). For example, "
            "--part 0/4 is the first of four parts."
        )
    return int(match[1]) % int(match[2]), int(match[2])


# -----------------------------------------------------------------------------
# Tokens


def encode_pieces(enc, read):
    """Tokenize what `read()` returns to (tokens, ends): per document one <|endoftext|>, then the ids of its text.

    tokens (n,) uint16; ends (pieces,): the offset in tokens at which each piece ends.
    """
    eot = np.array([enc.eot_token], dtype=np.uint32)
    arrays, lengths = [eot[:0]], []
    for text, starts in read():
        ids = tokenizer.encode_text(enc, text)
        arrays += [eot, ids] if starts else [ids]
        lengths.append(len(ids) + starts)
    return np.concatenate(arrays, dtype=np.uint16, casting="unsafe"), np.cumsum(lengths, dtype=np.int64)


def encode_all(enc, batches, num_proc):
    """Yield (batch, tokens, ends) for each batch, in order, tokenized on `num_proc` cores.

    A few threads tokenize themselves, because tiktoken releases the interpreter's lock. A larger number would mostly
    wait for this lock (records/2026-11-21-data-preparation), so each of them has a process tokenize for it.
    """
    worker = threading.local()  # each thread's own function

    def encode(read):
        if not hasattr(worker, "encode"):
            # subtle: threads that share a tokenizer take a tenth more CPU time, and tiktoken pickles its own GPT-2
            # by name, which takes a process a second to load; a copy has neither fault
            own = tokenizer.copy_encoding(enc, enc.name, enc._special_tokens)
            worker.encode = functools.partial(encode_pieces, own) if num_proc <= MAX_THREADS else start_process(own)
        return worker.encode(read)

    def next_result():
        batch, future = pending.popleft()
        tokens, ends = future.result()
        if batch.finished_download:
            os.remove(batch.finished_download)
        return batch, tokens, ends

    executor, pending = ThreadPoolExecutor(num_proc), collections.deque()
    try:
        for batch in batches:
            pending.append((batch, executor.submit(encode, batch.read)))
            if len(pending) > 4 * num_proc:  # enough to keep all cores busy while a shard is written
                yield next_result()
        while pending:
            yield next_result()
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


# errors from reading or writing to a process that is gone, perhaps since the middle of a message
ENDED = EOFError, BrokenPipeError, pickle.UnpicklingError


def start_process(enc):
    """Return a function that calls encode_pieces(enc, read) in a process of its own.

    multiprocessing is not used: Ctrl-C reaches its processes while they start, and then the parent waits forever.
    """
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import fineweb; fineweb.serve()"
    command = [sys.executable, "-P", "-c", code]  # -P: import nothing from the current folder
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)

    def ask(question):
        try:
            pickle.dump(question, process.stdin)
            process.stdin.flush()
            answer = pickle.load(process.stdout)
        except ENDED:
            raise UserError(
                "A process that tokenizes came to an end, perhaps because there was not enough memory. Run the same "
                "command again with a smaller --num-proc."
            ) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    ask(enc)
    return ask


def serve():
    """The process behind start_process: answer pieces with their tokens until the parent closes the pipe or is gone."""

    def say(answer):
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.buffer.flush()

    with contextlib.suppress(*ENDED):
        enc = pickle.load(sys.stdin.buffer)
        say(None)
        while True:
            read = pickle.load(sys.stdin.buffer)
            try:
                say(encode_pieces(enc, read))
            except (UserError, OSError) as error:
                say(error)
    os._exit(0)  # another end would try once more to send what was left, and report a broken pipe


# -----------------------------------------------------------------------------
# Shards


def limit_tokens(stream, limit, bar):
    """The first `limit` tokens of a stream of (batch, tokens, ends), counted on a progress bar."""
    for batch, tokens, ends in stream:
        tokens = tokens[:limit]
        yield batch, tokens, np.minimum(ends, len(tokens))
        bar.update(len(tokens))
        limit -= len(tokens)
        if limit <= 0:
            break


class ValidationSample:
    """Every `every`-th piece of the input, while these are at most a tenth of it and at most `max_tokens`.

    The choice depends only on a piece's place in the input and the lengths of the pieces before it, not on the
    number of cores or on where a run was stopped.
    """

    def __init__(self, every, max_tokens, tokens, num_train):
        self.every, self.max_tokens = every, max_tokens
        self.arrays, self.num_tokens = [tokens], len(tokens)
        self.num_seen = num_train + len(tokens)  # tokens of both splits, up to the current batch

    def remove_from(self, stream):
        """Keep the chosen pieces of a stream of (batch, tokens, ends), and yield the others."""
        for batch, tokens, ends in stream:
            num_yielded = 0  # pieces
            first_candidate = -(batch.source + batch.first_piece + 1) % self.every
            for i in range(first_candidate, len(ends), self.every):
                start, end = int(ends[i - 1]) if i else 0, int(ends[i])
                if self.num_tokens + end - start <= min(self.max_tokens, (self.num_seen + end) // 10):
                    yield cut_batch(batch, tokens, ends, num_yielded, i)
                    self.arrays.append(tokens[start:end].copy())  # not a view, which would keep all of the batch
                    self.num_tokens += end - start
                    num_yielded = i + 1
            yield cut_batch(batch, tokens, ends, num_yielded, len(ends))
            self.num_seen += len(tokens)

    def top_up(self, last):
        """If the input had few pieces, take what is missing from the end of the last shard. Returns the rest of it."""
        expected = max(1, min(self.max_tokens, self.num_seen // self.every))
        if self.num_tokens >= expected / 2:
            return last
        rest = max(0, len(last) - (expected - self.num_tokens))
        self.arrays.append(last[rest:])
        return last[:rest]

    def tokens(self):
        self.arrays = [np.concatenate(self.arrays)]
        return self.arrays[0]


def cut_batch(batch, tokens, ends, first, stop):
    """(batch, tokens, ends) of the pieces from `first` up to, but not including, `stop`."""
    start, end = (int(ends[i - 1]) if i else 0 for i in (first, stop))
    return batch._replace(first_piece=batch.first_piece + first), tokens[start:end], ends[first:stop] - start


def cut_into_shards(stream, shard_size, skip=0):
    """Cut a stream of (batch, tokens, ends) into shards, skipping the first `skip` tokens.

    Yields (tokens, end): `end` = [source, piece, token] is where in the input the next shard starts,
    None after the last. Documents of 3, 5 and 1 tokens in shards of 4:

        aaab | bbbb | c     with the ends [0, 1, 1], [0, 2, 0], None
    """
    shard, filled = np.empty(shard_size, dtype=np.uint16), 0
    for batch, tokens, ends in stream:
        position, skip = skip, 0
        while position < len(tokens):
            if filled == shard_size:  # only now that another token follows do we know that this is not the last shard
                piece = int(np.searchsorted(ends, position, side="right"))
                piece_start = int(ends[piece - 1]) if piece else 0
                yield shard, [batch.source, batch.first_piece + piece, position - piece_start]
                shard, filled = np.empty(shard_size, dtype=np.uint16), 0
            n = min(len(tokens) - position, shard_size - filled)
            shard[filled : filled + n] = tokens[position : position + n]
            position, filled = position + n, filled + n
    yield shard[:filled], None


# -----------------------------------------------------------------------------
# From the options to a folder of shards


def prepare(options):
    """Make the shards that `options` describe, or those of them that are missing. Returns their folder."""
    check_options(options)
    if options.pretokenized:
        return fetch_pretokenized(options)
    part, num_parts = parse_part(options.part)
    folder, sources, all_inputs = plan(options, part, num_parts)
    enc = tokenizer.get_encoding(options.tokenizer)

    def open_writer():
        """The writer of the folder's shards, with the meta.json of an earlier run if this one continues it."""
        made_from = {key: getattr(options, key) for key in ("text_column", "shard_size", "max_tokens")}
        if options.separator:
            made_from["separator"] = options.separator
        if num_parts > 1 and all_inputs:
            made_from["all_inputs"] = all_inputs
        made_from |= {"revision": sources[0].revision, "sources": [source.recorded() for source in sources]}
        meta = shards.new_meta("input" if options.input else options.dataset, enc, made_from)
        if options.input:
            # a large corpus needs fewer pieces; with --part only the first part has a validation split
            every = max(SAMPLE_EVERY, math.ceil(sum(s.size for s in sources) / options.shard_size))
            meta["validation_every"] = every if part == 0 else 0
        prefix = "" if options.input else DATASETS[options.dataset][1]
        return shards.ShardWriter(folder, meta, enc, prefix, part, num_parts)

    def make(writer):
        make_shards(options, enc, writer, sources)

    return shards.make_once(open_writer, make, f".lock-part-{part}-of-{num_parts}" if num_parts > 1 else ".lock")


def plan(options, part, num_parts):
    """(folder of the shards, sources of this part, hash of all sources' names, which the parts must share)."""
    sources = documents.list_inputs(options.input)
    out_dir = options.out_dir
    if out_dir is None and options.input and os.path.isdir(options.input[0]):
        out_dir = os.path.basename(os.path.abspath(options.input[0])) + "_shards"
    folder = shards.output_folder(out_dir, sources, DATASETS[options.dataset][0])
    if options.dataset == "python-docs" and not options.input:
        sources = [documents.Source(documents.PYTHON_DOCS)]
    if options.dataset == "fineweb-edu" and not options.input:
        old = shards.read_metas(folder).get(shards.meta_path(folder, part, num_parts))
        if old and old["made_from"]:  # resume with the same files
            revision = old["made_from"].get("revision", "")
            sources = [documents.Source(*source[:2], EDU_REPO, revision) for source in old["made_from"]["sources"]]
            return folder, sources, old["made_from"].get("all_inputs")
        sources = documents.list_hub(EDU_REPO, EDU_FOLDER)
    if num_parts > len(sources):
        raise UserError(
            f"--part {options.part} makes {num_parts} parts, but there are only {len(sources)} input files. Use "
            f"{len(sources)} parts or fewer."
        )
    names = "\n".join(source.recorded()[0] for source in sources)
    return folder, sources[part::num_parts], hashlib.sha256(names.encode()).hexdigest()[:16]


def make_shards(options, enc, writer, sources):
    """Read, tokenize, cut and write, from where an earlier run ended to the end of the input."""
    folder, meta = writer.folder, writer.meta
    source, piece, skip, *_ = writer.resume()
    num_proc = options.num_proc or documents.num_cores()
    limit = (options.max_tokens or sys.maxsize) - meta["tokens"]
    if sources[0].repo:
        announce_download(options, writer, sources[source:], limit, num_proc)

    sample = None
    if writer.validation_file:
        num_validation = meta["shards"].get(writer.validation_file, 0)
        num_train = meta["tokens"] - num_validation - skip  # before the piece at which this run begins
        tokens = writer.read_validation(num_validation)
        sample = ValidationSample(meta["validation_every"], options.shard_size, tokens, num_train)

    downloads = os.path.join(folder, f".download-{writer.part}-of-{writer.num_parts}")
    prefetch = not options.max_tokens  # with a limit, the next file may not be needed
    column, separator = options.text_column, options.separator
    batches = documents.read_batches(sources, column, downloads, source, piece, prefetch, separator)
    encoded = encode_all(enc, batches, num_proc)
    writing = None
    with tqdm(initial=meta["tokens"] - skip, unit="tok", unit_scale=True, desc=folder, delay=0.5) as bar:
        try:
            stream = limit_tokens(encoded, limit + skip, bar)
            if sample:
                stream = sample.remove_from(stream)
            for last, end in cut_into_shards(stream, options.shard_size, skip):
                if writing:
                    writing.result()
                if end and sample:
                    end.append(sample.num_tokens)
                if end:  # goes to disk while the next one fills
                    validation = sample.tokens() if sample else None
                    writing = documents.run_in_background(write_shard, writer, enc, last, end, validation)
        finally:  # however the reading ends, finish a shard that was begun
            encoded.close()
            if writing:
                writing.result()
            shutil.rmtree(downloads, ignore_errors=True)
    write_last_shard(writer, enc, last, sample)
    writer.finish()


def write_shard(writer, enc, tokens, end, validation=None):
    """Write the next shard; before the first one, the tokenizer and meta.json."""
    if not writer.meta["shards"]:
        # unless another part is doing so: it writes the same
        with contextlib.suppress(FolderInUse), lock_folder(writer.folder, ".lock-tokenizer"):
            tokenizer.save_for_folder(enc, writer.folder)
        writer.save()
    if validation is not None:
        writer.write_file(writer.validation_file, validation)
    if len(tokens):
        writer.write(tokens, end)


def write_last_shard(writer, enc, last, sample):
    """Write what is left at the end of the input, so that there is something to train on and to validate on."""
    if sample:
        last = sample.top_up(last)
    tokens = np.concatenate([last, sample.tokens()]) if sample else last
    if not writer.meta["shards"] and (tokens == enc.eot_token).all():
        raise UserError(
            f"The input contains no text (documents: {len(tokens)}, all empty). Check --input and --text-column."
        )
    if sample:
        write_shard(writer, enc, last, None, sample.tokens())
        writer.meta["documents"] += writer.count_documents(sample.tokens())
    elif writer.meta["shards"] or writer.part:
        write_shard(writer, enc, last, None)
    else:  # a corpus that fits into the first shard would be all validation: cut it into tenths
        size = math.ceil(len(last) / 10)
        for i in range(0, len(last), size):
            write_shard(writer, enc, last[i : i + size], None)


def announce_download(options, writer, sources, limit, num_proc):
    """Print how much FineWeb-Edu is still to come and how long it takes. Raises UserError if the disk is too small."""
    tokens_left = min(limit, EDU_TOKENS // writer.num_parts - writer.meta["tokens"])
    # besides the shards, up to three files are on disk: one whose last rows are being tokenized, one that is
    # being read, and one that is being downloaded
    largest = max(source.size for source in sources)
    check_disk_space(writer.folder, 2 * tokens_left + 3 * largest)
    minutes = f"about {tokens_left / num_proc / 60e6:.0f} minutes on {num_proc} cores"
    download = sum(source.size for source in sources) / 1e9
    print(
        f"{tokens_left / 1e9:.1f}B tokens to {writer.folder}: {minutes} (a million tokens a second each), "
        f"if the network downloads {download:.0f} GB in that time"
    )


def check_disk_space(folder, size):
    """Raise UserError if the disk has less than `size` bytes free."""
    path = Path(folder).absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < size:
        raise UserError(
            f"The shards for {folder} need {size / 1e9:.1f} GB, but the disk has {free / 1e9:.1f} GB free. Free some "
            "space, choose another --out-dir, or lower --max-tokens (or --pretokenized)."
        )


# -----------------------------------------------------------------------------
# Ready-made shards


def fetch_pretokenized(options):
    """Download FineWeb-Edu's validation shard and its first `--pretokenized` training shards, as published."""
    folder = shards.output_folder(options.out_dir, [], DATASETS["fineweb-edu"][0])
    files = [f"finewebedu_{'train' if i else 'val'}_{i:06d}.bin" for i in range(options.pretokenized + 1)]
    with lock_folder(folder):
        enc = types.SimpleNamespace(name="gpt2", n_vocab=50257, eot_token=50256)  # its tables are not needed
        meta = shards.new_meta(READY_REPO, enc, {"sources": []})
        writer = shards.ShardWriter(folder, meta, enc, "finewebedu")
        missing = [file for file in files if not writer.is_whole(file)]
        check_disk_space(folder, 200_001_024 * len(missing))
        print(f"{len(missing)} shards of 200 MB to {folder}: about {2 * len(missing)} s at 100 MB/s")
        downloads = os.path.join(folder, ".download")
        try:
            for file in tqdm(missing, unit="shard", desc=folder, delay=0.5):
                source = documents.fetch(documents.Source(file, repo=READY_REPO), downloads)
                add_shard(writer, source.path, file)
        finally:
            shutil.rmtree(downloads, ignore_errors=True)
        try:  # so that a machine without a network can train on them
            tokenizer.save_for_folder(tokenizer.get_encoding("gpt2"), folder)
        except UserError as error:  # the shards can be used without it
            print(f"note: The tokenizer could not be saved with the shards, so training will fetch it. {error}")
        writer.finish()
    return folder


def add_shard(writer, path, file):
    """Move a shard that was downloaded to `path` into the writer's folder as `file`."""
    meta = writer.meta
    tokens = shards.open_shard(path).read()
    writer.save()  # before the shard, so that the folder is recognized as ours if this is killed in between
    os.replace(path, os.path.join(writer.folder, file))
    if file not in meta["shards"]:  # a damaged one that is fetched again was counted before
        meta["documents"] += writer.count_documents(tokens)
    meta["shards"][file] = len(tokens)
    meta["tokens"] = sum(meta["shards"].values())
    writer.save()


# -----------------------------------------------------------------------------


def main(args=None):
    """Make shards of documents, and print the command that trains on them."""
    folder = prepare(parse_args(args))
    metas = shards.read_metas(folder)
    num_parts = max(map(shards.num_parts_of, metas))
    if len(metas) < num_parts or not all(meta["complete"] for meta in metas.values()):
        print(f"note: {folder} has {len(metas)} of {num_parts} parts. Make the others with --part, too.")
        return
    command = training_command(folder, shards.split_lengths(metas.values()))
    if command:
        cli.print_next(command)


def training_command(folder, lengths):
    """The command that trains on shards of these lengths: GPT-2 on much text, else a small model; None if too short."""
    command = ["python", "train_gpt2.py"] + (["--data", folder] if folder != DATASETS["fineweb-edu"][0] else [])
    steps = sum(lengths["train"]) // 2**19
    if steps > 18_000:  # the preset's 10B tokens
        return command
    if sum(lengths["train"]) >= MUCH_TEXT:  # one pass over the text, with the preset's share of warmup
        return [*command, "--max-steps", steps, "--warmup-steps", steps // 27]
    command += ["--preset", "quickstart", "--out-dir", "log/" + os.path.basename(os.path.abspath(folder))]
    T = min(128, *(max(lengths[split], default=0) - 1 for split in ("train", "val")))
    windows = sum((length - 1) // T for length in lengths["train"]) if T > 0 else 0
    if T < 128 or windows < 16:  # shorter than the preset's 16 sequences of 128 tokens
        command += ["--sequence-length", T, "--total-batch-size", T * min(16, windows)]
    return command if windows else None


if __name__ == "__main__":
    cli.run(main)
