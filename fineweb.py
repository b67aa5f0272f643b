"""Turn documents into token shards: any data set of the hub by its name, your own text, or Python's documentation.

    python fineweb.py                        10B tokens of FineWeb-Edu
    python fineweb.py --pretokenized 10      1B of them, ready-made
    python fineweb.py --dataset python-docs --tokenizer bytes  offline
    python fineweb.py --dataset HuggingFaceFW/fineweb --config sample-10BT
    python fineweb.py --input books/*.txt --out-dir books

A document becomes <|endoftext|> followed by its tokens (a literal <|endoftext|> in the text is treated
as text). A shard, `<name>_<split>_<6 digits>.npy` of uint16, holds whole documents in the order of the
input, about `--shard-size` tokens of them; the last one has the rest. One document in 11 is for validation
(one piece in 11 of a long one; fewer of a large text); of FineWeb-Edu it is the first shard. The two
splits of a short text are parts of it.

A row without a text is left out and counted. Memory use depends neither on the size of the corpus nor on
the number of cores: a few shards, and up to 64 MB of text with the threads that tokenize it. The same
command resumes after the last complete shard, as meta.json records it, and produces the same bytes,
whenever it was killed and on any number of cores. A data set of the hub stays at the commit that it had
at first.
"""

import os
import sys
from dataclasses import dataclass
from typing import Annotated

sys.path.append(os.path.dirname(__file__))  # which python -P and -I leave out

from plumbing.cli import console, flags
from plumbing.data.options import DataOptions


@dataclass
class Options(DataOptions):
    dataset: str = "fineweb-edu"  # OWNER/NAME on the hub, fineweb-edu, or python-docs, which Python has
    # the column or key of the text: title,body joins two by a blank line, doc.text is the text in an object doc
    text_column: str = "text"
    # what stands between a text file's documents, such as <|endoftext|>; by default a file is one document
    separator: Annotated[str, "may be empty"] = ""
    pretokenized: int = 0  # fetch this many ready-made training shards of FineWeb-Edu instead
    max_tokens: int = 0  # stop after about this many tokens, such as 1e9, for validation included; 0: all


if __name__ == "__main__":
    console.run(lambda: flags.parse(Options))  # --help and a mistyped flag need not wait for the imports

import contextlib
import shutil

import numpy as np
from tqdm import tqdm

from plumbing.cli.console import UserError
from plumbing.data import preparation, readers, shards, sources, tokenizers
from plumbing.files import atomic_write, lock_folder, open_regular, remove_folder

# {--dataset: (default of --out-dir, beginning of the shards' names)}; their first shard is for validation or, of a
# single one, its beginning
DATASETS = {"fineweb-edu": ("edu_fineweb10B", "edufineweb"), "python-docs": ("python_docs", "pythondocs")}
READY_REPO, READY_SHARDS = "kjj0/finewebedu10B-gpt2", 99  # for training, beside one for validation


def check_options(options):
    """Raise one UserError listing everything that is wrong with the flags."""
    complaints = preparation.complaints_of(options)
    changed = [name for name, value in vars(options).items() if value != getattr(Options, name)]
    unused = [flags.flag_of(name) for name in changed if name not in ("pretokenized", "out_dir")]
    if options.pretokenized and unused:
        complaints.append(f"--pretokenized fetches shards that are ready: leave {', '.join(unused)} out.")
    if options.pretokenized > READY_SHARDS:
        complaints.append(
            f"--pretokenized is {options.pretokenized}, but it must be at most {READY_SHARDS}, the shards there are."
        )
    if not options.input and options.dataset in DATASETS and {"config", "split"} & set(changed):
        complaints.append(f"{options.dataset} has neither configs nor splits. Give OWNER/NAME with --dataset.")
    types = {sources.file_type(name) for name in options.input}
    if options.separator and options.input and types.isdisjoint({"", ".txt"}):
        complaints.append("--separator only divides text files, and there are none in --input: leave it out.")
    flags.check(options, complaints)


class Documents(preparation.Renderer):
    """A document becomes <|endoftext|> followed by its tokens."""

    def __init__(self, text_column, separator="", prefix=""):
        self.columns = self.needed = text_column.split(",")
        self.separator, self.prefix = separator, prefix

    def read(self, row):
        text = readers.text_of(row.values, self.columns)
        return (text if isinstance(text, readers.Unusable) else (text, row.starts)), sys.getsizeof(text)

    def encode(self, enc, entries):
        return [((ids, None), ()) for ids in encode_pieces(enc, entries)]


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


def prepare(options):
    """Make the shards that `options` describe, or those of them that are missing. Returns their folder."""
    check_options(options)
    if options.pretokenized:
        return fetch_pretokenized(options)
    default, prefix = DATASETS.get(options.dataset, ("", ""))
    folder, found, meta = preparation.plan(options, default=default)
    if meta.dataset in DATASETS:
        meta.validation_every = 0
    enc = tokenizers.get_encoding(options.tokenizer)
    renderer = Documents(options.text_column, options.separator, prefix="" if options.input else prefix)
    preparation.make_shards(folder, meta, renderer, enc, found, options)
    return folder


def make_python_docs(folder):
    """Make the data of preset quickstart, Python's documentation as bytes, unless there are complete shards."""
    meta = shards.read_meta(folder)
    if not (meta.complete and meta.shards):
        prepare(Options(dataset="python-docs", tokenizer="bytes", out_dir=folder))


def fetch_pretokenized(options):
    """Download FineWeb-Edu's validation shard and its first `--pretokenized` training shards, as published."""
    folder = options.out_dir or DATASETS["fineweb-edu"][0]
    files = [f"finewebedu_{'train' if i else 'val'}_{i:06d}.bin" for i in range(options.pretokenized + 1)]
    with lock_folder(folder):
        new = shards.Meta(READY_REPO, "gpt2", vocab_size=50257, made_from={"sources": []})
        meta = preparation.continued(folder, new)
        meta.complete = False  # which fewer shards may have been
        missing = [file for file in files if not preparation.is_whole(folder, meta, file)]
        preparation.check_disk_space(folder, 200_001_024 * len(missing))
        downloads = os.path.join(folder, ".download")
        for name in tqdm(missing, unit="shard", desc=folder, delay=0.5):
            path = sources.fetch(sources.Source(name, repo=READY_REPO, commit="main"), downloads)
            tokens = shards.open_shard(path).read()
            if name not in meta.shards:  # a damaged one that is fetched again was counted before
                meta.documents += int(np.count_nonzero(tokens == 50256))
            meta.shards[name] = len(tokens)
            preparation.save(folder, meta)  # first: if this is killed in between, it is known to be missing
            with open_regular(path) as fetched, atomic_write(os.path.join(folder, name)) as file:
                shutil.copyfileobj(fetched, file)  # and not moved: it may lie in the user's cache of the hub
            remove_folder(downloads)
        try:  # so that a machine without a network can train on them
            tokenizers.save_for_folder(tokenizers.get_encoding("gpt2"), folder)
        except UserError as error:  # the shards can be used without it
            print(f"note: The tokenizer could not be saved with the shards, so training will fetch it. {error}")
        preparation.finish(folder, meta, "document")
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
    has_gpu = any(map(shutil.which, ("nvidia-smi", "rocm-smi")))  # it seems; asking torch would take seconds
    if has_gpu and sum(train) >= 10**8:  # enough to be worth training GPT-2 on
        # one pass over the data, unless they are the preset's 10B tokens
        return preparation.training_command("gpt2", folder, train, 1024, passes=1)
    T = min(128, *(max(split, default=0) - 1 for split in (train, val)))
    return preparation.training_command("quickstart", folder, train, T) if T > 0 else None


if __name__ == "__main__":
    console.run(main)
