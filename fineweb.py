"""Turn documents into token shards: FineWeb-Edu from the hub, your own text, or Python's documentation.

    python fineweb.py                                   10B tokens of FineWeb-Edu, 100 shards
    python fineweb.py --pretokenized 10                 10 ready-made shards and the validation shard
    python fineweb.py --input books/*.txt --out-dir books
    python fineweb.py --input https://host/a.jsonl.gz --tokenizer my.tiktoken --out-dir mine
    python fineweb.py --dataset python-docs             a few MB of English without a network

A document becomes <|endoftext|> followed by its tokens (a literal <|endoftext|> in the text is treated
as text). The documents' tokens, in input order, form one stream, which is cut into shards of
`--shard-size` tokens, `<name>_<split>_<6 digits>.npy` of uint16; shard 0 is the validation split, and
the last shard is shorter. A corpus smaller than one shard is cut into tenths instead, so that there is
always something to train on; for one not much longer than a shard choose a smaller `--shard-size`, or
most of it goes to validation. Memory use is two shards and a few texts per core, whatever the size of
the corpus. meta.json describes the shards and records where in the input each one ends: the same
command resumes after the last complete shard and produces the same bytes, whenever it was killed and
on any number of cores.
"""

import collections
import contextlib
import math
import os
import re
import shutil
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from plumbing import cli
import tokenizer
from plumbing.cli import UserError
from plumbing.documents import (
    PYTHON_DOCS, Source, fetch_hub, is_url, list_hub, list_inputs, num_cores, read_batches,
    run_in_background,
)  # fmt: skip
from plumbing.shards import ShardWriter, check_same_dataset, is_whole, meta_path, new_meta, open_shard, read_metas

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
    max_tokens: int = 0  # stop after this many tokens, validation shard included; 0: all
    num_proc: int = 0  # cores to tokenize on; 0: all; affects only the speed
    part: str = ""  # I/N: only every N-th input file, from the I-th; the parts share one --out-dir
    pretokenized: int = 0  # fetch this many ready-made training shards of FineWeb-Edu instead


DATASETS = {"fineweb-edu": ("edu_fineweb10B", "edufineweb"), "python-docs": ("python_docs", "pythondocs")}
EDU_REPO, EDU_FOLDER = "HuggingFaceFW/fineweb-edu", "sample/10BT"
EDU_TOKENS = 9_953_989_344  # in GPT-2's tokens with <|endoftext|>; used only to estimate the time
READY_REPO = "kjj0/finewebedu10B-gpt2"


def check_options(options):
    """Raise one UserError listing everything that is wrong with the flags."""
    errors = []
    if options.dataset not in DATASETS:
        hint = cli.suggest(options.dataset, list(DATASETS))
        errors.append(f"There is no data set called {options.dataset!r}. {hint}")
    for name in ("max_tokens", "num_proc", "pretokenized"):
        value = getattr(options, name)
        if value < 0:
            errors.append(f"--{name.replace('_', '-')} is {value}, but it must be 0 or more.")
    if not 1 <= options.shard_size <= 2**31:  # two are held in memory, of 4 GB then
        errors.append(f"--shard-size is {options.shard_size:,}, but it must be from 1 to {2**31:,}.")
    if options.pretokenized and (options.input or options.part or options.tokenizer != "gpt2"):
        errors.append(
            "--pretokenized fetches shards that are ready, so it does not go with --input, --part or --tokenizer. "
            "Leave those out."
        )
    if errors:
        raise UserError(" ".join(errors))


def parse_part(part):
    """"1/4" -> (1, 4). Counting from 1 works as well as from 0: "4/4" is "0/4"."""
    match = re.fullmatch(r"(\d+)/([1-9]\d*)", part or "0/1")
    if not match or int(match[1]) > int(match[2]):
        raise UserError(
            f"--part {part} is not of the form I/N, with I from 0 to N-1 (or from 1 to N). For example, --part 0/4 "
            "is the first of four parts."
        )
    return int(match[1]) % int(match[2]), int(match[2])


# -----------------------------------------------------------------------------
# Tokens


def encode_batch(enc, batch):
    """Tokenize a batch to (tokens, ends): per document one <|endoftext|>, then the ids of its text.

    tokens (n,) uint16; ends (pieces,): the offset in tokens at which each piece ends.
    """
    eot = np.array([enc.eot_token], dtype=np.uint32)
    arrays, lengths = [], []
    for text, starts in batch.pieces:
        ids = tokenizer.encode_text(enc, text)
        arrays += [eot, ids] if starts else [ids]
        lengths.append(len(ids) + starts)
    return np.concatenate(arrays, dtype=np.uint16, casting="unsafe"), np.cumsum(lengths)


def encode_all(enc, batches, num_proc):
    """(batch, tokens, ends) of each batch, in order, tokenized on `num_proc` cores.

    Threads rather than processes: tiktoken releases the GIL and returns one buffer per text, and nothing
    has to be pickled or forked. subtle: each thread has its own copy of the tokenizer, as sharing one
    costs about a tenth more CPU time.
    """
    local = threading.local()

    def copy_tokenizer():
        local.enc = tokenizer.copy_encoding(enc, enc.name, enc._special_tokens)

    def encode(batch):
        return batch, *encode_batch(local.enc, batch)

    executor, pending = ThreadPoolExecutor(num_proc, initializer=copy_tokenizer), collections.deque()
    try:
        for batch in batches:
            pending.append(executor.submit(encode, batch))
            if len(pending) > 4 * num_proc:  # enough to keep all cores busy while a shard is written
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


# -----------------------------------------------------------------------------
# Shards


def cut_into_shards(stream, shard_size, limit=math.inf, skip=0, progress=lambda num_tokens: None):
    """Cut a stream of (batch, tokens, ends) into shards, skipping the first `skip` tokens, stopping after `limit`.

    Yields (tokens, end): `end` = [source, piece, token] is where in the input the next shard starts,
    None after the last. Documents of 3, 5 and 1 tokens in shards of 4:

        aaab | bbbb | c     with the ends [0, 1, 1], [0, 2, 0], None
    """
    shard, filled = np.empty(shard_size, dtype=np.uint16), 0
    for batch, tokens, ends in stream:
        position, skip = skip, 0
        while position < len(tokens) and limit > 0:
            if filled == shard_size:  # only now that another token follows do we know that this is not the last shard
                piece = int(np.searchsorted(ends, position, side="right"))
                piece_start = int(ends[piece - 1]) if piece else 0
                yield shard, [batch.source, batch.first_piece + piece, position - piece_start]
                shard, filled = np.empty(shard_size, dtype=np.uint16), 0
            n = int(min(len(tokens) - position, shard_size - filled, limit))
            shard[filled : filled + n] = tokens[position : position + n]
            position, filled, limit = position + n, filled + n, limit - n
            progress(n)
        if limit <= 0:
            break
    yield shard[:filled], None


def write_shard(writer, enc, tokens, end):
    """Write the next shard; before the first one, what describes it: meta.json and the tokenizer."""
    if not writer.meta["shards"]:
        writer.save()
        tokenizer.save_for_folder(enc, writer.folder)
    writer.write(tokens, end)


# -----------------------------------------------------------------------------
# From the options to a folder of shards


def plan(options, part, num_parts):
    """(folder, prefix of the shard names, existing metas, sources)."""
    folder, prefix = DATASETS[options.dataset]
    sources = [Source(PYTHON_DOCS, 0)]
    if options.input:
        sources = list_inputs(options.input)
        folder = os.path.basename(sources[0].name).split(".")[0]
    folder = options.out_dir or folder
    if options.input:
        prefix = re.sub(r"[^A-Za-z0-9]+", "-", os.path.basename(os.path.abspath(folder)))
    metas = read_metas(folder)
    if options.dataset == "fineweb-edu" and not options.input:
        old = metas.get(meta_path(folder, part, num_parts))
        if old:  # resume with the same files
            made_from = old["made_from"]
            sources = [Source(name, size, EDU_REPO, made_from["revision"]) for name, size in made_from["sources"]]
            return folder, prefix, metas, sources
        sources = list_hub(EDU_REPO, EDU_FOLDER)
    if num_parts > len(sources):
        raise UserError(
            f"--part {options.part} makes {num_parts} parts, but there are only {len(sources)} input files. Use "
            f"{len(sources)} parts or fewer."
        )
    return folder, prefix, metas, sources[part::num_parts]


def prepare(options=Options()):
    """Make the shards that `options` describe, or what is missing of them. Returns their folder."""
    check_options(options)
    if options.pretokenized:
        return fetch_pretokenized(options)
    enc = tokenizer.get_encoding(options.tokenizer)
    if enc.n_vocab > tokenizer.MAX_VOCAB:
        raise UserError(
            f"Tokenizer {enc.name} has {enc.n_vocab:,} ids, but shards can store only 65,536. Use a smaller one, "
            "for example from tokenizer.py --vocab-size 32768."
        )
    num_proc = options.num_proc or num_cores()
    part, num_parts = parse_part(options.part)
    folder, prefix, metas, sources = plan(options, part, num_parts)
    made_from = {key: getattr(options, key) for key in ("text_column", "shard_size", "max_tokens")}
    names = [s.name if s.repo or is_url(s.name) else os.path.basename(s.name) for s in sources]
    made_from["revision"] = sources[0].revision
    made_from["sources"] = [[name, source.size] for name, source in zip(names, sources)]
    meta = new_meta("input" if options.input else options.dataset, enc, made_from)
    meta = check_same_dataset(folder, metas, meta_path(folder, part, num_parts), meta)

    # resume where an earlier run ended
    writer = ShardWriter(folder, prefix, part, num_parts, meta, enc.eot_token)
    start = writer.resume()
    if not start:
        print(f"{folder} is complete: {meta['tokens']:,} tokens in {len(meta['shards'])} shards")
        return folder
    source, piece, skip = start
    limit = (options.max_tokens or math.inf) - meta["tokens"]
    if sources[0].repo:
        tokens_left = min(limit, EDU_TOKENS // num_parts - meta["tokens"])
        # besides the shards, one file is on disk while it is tokenized, and the next one as it is downloaded
        check_disk_space(folder, 2 * tokens_left + 2 * max(s.size for s in sources))
        minutes = f"about {tokens_left / num_proc / 60e6:.0f} minutes on {num_proc} cores"
        download = sum(s.size for s in sources[source:]) / 1e9
        print(f"{tokens_left / 1e9:.1f}B tokens to {folder}: {minutes} (a million tokens a second each), "
              f"if the network downloads {download:.0f} GB in that time")  # fmt: skip

    # read, tokenize, cut, write: a shard goes to disk while the next one fills
    downloads = os.path.join(folder, f".download-{part}-of-{num_parts}")
    prefetch = not options.max_tokens  # with a limit, the next file may not be needed
    batches = read_batches(sources, options.text_column, downloads, source, piece, prefetch)
    stream = encode_all(enc, batches, num_proc)
    writing = None
    with tqdm(initial=meta["tokens"], unit="tok", unit_scale=True, desc=folder, delay=0.5) as bar:
        try:
            for last, end in cut_into_shards(stream, options.shard_size, limit, skip, bar.update):
                if writing:
                    writing.result()
                if end:
                    writing = run_in_background(write_shard, writer, enc, last, end)
        finally:  # whatever ends the reading, a shard that was begun is finished
            stream.close()
            if writing:
                writing.result()
            clean_up(folder, downloads)
    if not meta["shards"] and (last == enc.eot_token).all():
        raise UserError(
            f"The input contains no text (documents: {len(last)}, all empty). Check --input and --text-column."
        )
    size = len(last) if meta["shards"] or part else -(-len(last) // 10)
    for i in range(0, len(last), size or 1):
        write_shard(writer, enc, last[i : i + size], None)
    writer.finish()
    return folder


def check_disk_space(folder, size):
    """Refuse to begin what does not fit on the disk."""
    path = Path(folder).absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < size:
        raise UserError(
            f"The shards for {folder} need {size / 1e9:.1f} GB, but the disk has {free / 1e9:.1f} GB free. Free some "
            "space, choose another --out-dir, or lower --max-tokens (or --pretokenized)."
        )


def clean_up(folder, downloads):
    """Remove the downloads, and `folder` too if it is empty."""
    shutil.rmtree(downloads, ignore_errors=True)
    with contextlib.suppress(OSError):  # it has shards
        os.rmdir(folder)


# -----------------------------------------------------------------------------
# Ready-made shards


def fetch_pretokenized(options):
    """The validation shard and the first `--pretokenized` training shards of FineWeb-Edu, as published."""
    folder = options.out_dir or DATASETS["fineweb-edu"][0]
    downloads = os.path.join(folder, ".download")
    files = [f"finewebedu_{'train' if i else 'val'}_{i:06d}.bin" for i in range(options.pretokenized + 1)]
    enc = types.SimpleNamespace(name="gpt2", n_vocab=50257, eot_token=50256)  # its tables are not needed
    meta = new_meta(READY_REPO, enc, {"sources": []})
    meta = check_same_dataset(folder, read_metas(folder), meta_path(folder, 0, 1), meta)
    writer = ShardWriter(folder, "finewebedu", 0, 1, meta, enc.eot_token)
    missing = [file for file in files if not is_whole(os.path.join(folder, file), meta["shards"].get(file))]
    check_disk_space(folder, 200_001_024 * len(missing))
    print(f"{len(missing)} shards of 200 MB to {folder}: about {2 * len(missing)} s at 100 MB/s")
    try:
        for file in tqdm(missing, unit="shard", desc=folder, delay=0.5):
            path = fetch_hub(READY_REPO, file, None, downloads, 3 if file == missing[0] else 9)
            tokens = open_shard(path).read()
            writer.save()  # before the first shard, so that the folder is still known as ours if killed in between
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
    """Documents to shards."""
    prepare(cli.parse(Options, args))


if __name__ == "__main__":
    cli.run(main)
