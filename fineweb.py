"""Turn documents into token shards: a data set on the Hub, your own files, or
Python's documentation.

    python fineweb.py                        10B tokens of FineWeb-Edu
    python fineweb.py --pretokenized 10      1B of them, ready-made
    python fineweb.py --dataset python-docs  as bytes; needs no network
    python fineweb.py --dataset HuggingFaceFW/fineweb --config sample-10BT
    python fineweb.py --input books/*.txt --out-dir books

Each document becomes <|endoftext|> followed by its tokens. If a text contains
<|endoftext|>, it is treated as text. Rows without text are left out. At the
end, notes count both, and the values that were not read.

A shard, `<name>_<split>_<6 digits>.npy`, is an array of about `--shard-size`
uint16 tokens: whole documents in the order of the input.

One document in 11 is for validation, fewer if the input is large. FineWeb-Edu and
Python's documentation use their first shard instead. In a text file, a document
of more than 16,000 characters is cut into pieces, and one piece in 11 is for
validation. If there is only one document, it is cut in two.

If the command is stopped, run it again: it resumes after the last shard in
meta.json. It writes the same bytes wherever it stopped, and on any number of
cores. A data set on the Hub stays at the commit it had at first. Memory use
depends neither on the corpus nor on the cores: it is a few shards, and up to
64 MB of text in the queue.
"""

import os
import sys
from dataclasses import dataclass
from typing import Annotated

sys.path.append(os.path.dirname(__file__))  # python -P and -I leave this folder out

from plumbing.cli import console, flags
from plumbing.data.options import DataOptions


@dataclass
class Options(DataOptions):
    # OWNER/NAME on the Hugging Face Hub, fineweb-edu, or python-docs (the documentation that comes with Python)
    dataset: str = "fineweb-edu"
    # the column or key of the text; title,body joins two with a blank line; doc.text is the key text in an object doc
    text_column: str = "text"
    # the text between documents in a text file, such as <|endoftext|>; by default each file is one document
    separator: Annotated[str, "may be empty"] = ""
    # download this many ready-made shards of FineWeb-Edu instead: 100M tokens each, at most 99
    pretokenized: int = 0
    max_tokens: int = 0  # stop after about this many tokens, such as 1e9, validation included; 0: use all


if __name__ == "__main__":
    console.run(lambda: flags.parse(Options))  # --help and a mistyped flag need not wait for the imports

import contextlib
import shutil
from typing import Any

import numpy as np
import tiktoken
from tqdm import tqdm

from plumbing.cli.console import UserError
from plumbing.data import downloads, inputs, preparation, readers, shards, tokenizers
from plumbing.data.preparation import Rendered, Tokens
from plumbing.files import atomic_write, lock_folder, open_regular, remove_folder

# {--dataset: (default of --out-dir, beginning of the shards' names)}. Their first shard is for validation; if it is the
# only one, it is cut in two
DATASETS = {"fineweb-edu": ("edu_fineweb10B", "edufineweb"), "python-docs": ("python_docs", "pythondocs")}
TOKENIZERS = {"python-docs": "bytes"}  # {--dataset: default of --tokenizer}; all others: gpt2
# {what other programs put between documents: a phrase that counts how often a text has it}
MARKERS = {
    marker: f'marker {marker} read as text. In a text file, --separator "{marker}" ends a document at each'
    for marker in ("<|endoftext|>", "<|startoftext|>", "<s>")
}
READY_REPO = "kjj0/finewebedu10B-gpt2"
READY_SHARDS = 99  # for training; one more is for validation
READY_BYTES = 200_001_024  # of each


def check_options(options: Options) -> None:
    """Raise one UserError that lists everything that is wrong with the flags."""
    complaints = preparation.data_set_complaints(options)
    changed = [name for name, value in vars(options).items() if value not in (getattr(Options, name), "gpt2")]
    unused = [flags.flag_of(name) for name in changed if name not in ("pretokenized", "out_dir")]
    if options.pretokenized and unused:
        complaints.append(f"--pretokenized downloads ready-made shards, so leave {', '.join(unused)} out.")
    if options.pretokenized > READY_SHARDS:
        complaints.append(
            f"--pretokenized is {options.pretokenized}, but it must be at most {READY_SHARDS}: there are no more."
        )
    if not options.input and options.dataset in DATASETS and {"config", "split"} & set(changed):
        complaints.append(
            f"{options.dataset} has neither configs nor splits. Leave them out, or change --dataset."
        )
    types = {inputs.file_type(name) for name in options.input}
    if options.separator and options.input and types.isdisjoint({"", ".txt"}):
        complaints.append("--separator only divides text files, and there are none in --input: leave it out.")
    flags.check(options, complaints)


class Documents(preparation.Renderer):
    """A document becomes <|endoftext|> followed by its tokens."""

    def __init__(self, text_column: str, separator: str = "", prefix: str = ""):
        self.needed = text_column.split(",")
        self.separator = separator
        self.prefix = prefix

    def render(self, enc: tiktoken.Encoding, rows: list[readers.Row]) -> list[Rendered]:
        texts = [readers.text_of(row.values, self.needed) for row in rows]
        pieces = [(text, row.starts) for text, row in zip(texts, rows) if isinstance(text, str)]
        arrays = iter(encode_pieces(enc, pieces))
        rendered = []
        for text, row in zip(texts, rows):
            counts = {}
            unread = []
            if isinstance(text, str):
                tokens = Tokens(next(arrays))
                counts = {MARKERS[marker]: text.count(marker) for marker in MARKERS if marker in text}
            else:
                tokens = text
            if isinstance(row.values, dict):
                fields = readers.fields_of(row.values, self.needed)
                unread = readers.unread_in(fields, read=self.needed)
            rendered.append(Rendered(tokens, counts, unread))
        return rendered


def encode_pieces(enc: tiktoken.Encoding, pieces: list[tuple[str, bool]]) -> list[np.ndarray]:
    """Tokenize pieces into arrays of uint16. <|endoftext|> comes first where a document starts."""
    joined = "".join(tokenizers.EOT + text for text, _ in pieces)
    num_documents = sum(starts for _, starts in pieces)
    if 0 < num_documents == len(pieces) == joined.count(tokenizers.EOT):
        # one call for all documents takes the GIL once instead of once per document
        with contextlib.suppress(ValueError):  # half a surrogate pair, or a million blanks
            ids = enc.encode_to_numpy(joined, allowed_special={tokenizers.EOT}, disallowed_special=())
            ids = ids.astype(np.uint16)
            return np.split(ids, np.flatnonzero(ids == enc.eot_token)[1:])
    arrays = []
    eot = np.array([enc.eot_token], np.uint16)
    for text, starts in pieces:
        ids = tokenizers.encode_text(enc, text).astype(np.uint16)
        arrays.append(np.append(eot, ids) if starts else ids)
    return arrays


def prepare(options: Options) -> str:
    """Make the shards that `options` describe, or the missing ones. Returns their folder."""
    check_options(options)
    if options.pretokenized:
        return fetch_pretokenized(options)
    default, prefix = DATASETS.get(options.dataset, ("", ""))
    folder, sources, meta = preparation.plan(options, default=default)
    if meta.dataset in DATASETS:
        meta.validation_every = 0
    enc = tokenizers.get_encoding(options.tokenizer or TOKENIZERS.get(meta.dataset, "gpt2"))
    documents = Documents(options.text_column, options.separator, prefix="" if options.input else prefix)
    preparation.make_shards(folder, meta, documents, enc=enc, sources=sources, options=options)
    return folder


def make_python_docs(folder: str) -> None:
    """Make the data of preset quickstart (Python's documentation as bytes) unless it is complete."""
    meta = shards.read_meta(folder)
    if not (meta.complete and meta.shards):
        prepare(Options(dataset="python-docs", out_dir=folder))
    elif meta.tokenizer != "bytes":
        console.note(
            f"{folder} has tokenizer {meta.tokenizer}, not the bytes that presets quickstart and baby are made for: "
            "their models become larger. For bytes, move that folder away."
        )


def fetch_pretokenized(options: Options) -> str:
    """Download FineWeb-Edu's validation shard and its first `--pretokenized` training shards, as published."""
    folder = options.out_dir or DATASETS["fineweb-edu"][0]
    numbers = range(1, options.pretokenized + 1)
    files = ["finewebedu_val_000000.bin", *(f"finewebedu_train_{number:06d}.bin" for number in numbers)]
    with lock_folder(folder):
        new = shards.Meta(READY_REPO, "gpt2", vocab_size=50257, made_from={"sources": []})
        meta = preparation.existing_meta(folder, new)
        meta.complete = False  # it may have been complete with fewer shards
        missing = [file for file in files if not preparation.is_whole(folder, meta, file)]
        preparation.check_disk_space(folder, READY_BYTES * len(missing))
        for name in tqdm(missing, unit="shard", desc=folder, delay=0.5):
            fetch_shard(folder, name, meta)
        try:  # so that a machine without a network can train on them
            tokenizers.save_for_folder(tokenizers.get_encoding("gpt2"), folder)
        except UserError as error:  # the shards can be used without it
            console.note(f"The tokenizer could not be saved with the shards, so training downloads it. {error}")
        preparation.finish(folder, meta, "document")
    return folder


def fetch_shard(folder: str, name: str, meta: shards.Meta) -> None:
    """Download one ready-made shard into `folder`, and record it in `meta`."""
    download_folder = os.path.join(folder, ".download")
    path = downloads.fetch(inputs.Source(name, repo=READY_REPO, commit="main"), download_folder)
    tokens = shards.open_shard(path).read()
    if name not in meta.shards:  # a damaged one was counted before
        meta.documents += int(np.count_nonzero(tokens == 50256))
    meta.shards[name] = len(tokens)
    preparation.save(folder, meta)  # first: if this is killed in between, the shard counts as missing
    with open_regular(path) as fetched, atomic_write(os.path.join(folder, name)) as file:
        shutil.copyfileobj(fetched, file)  # copied, not moved: it may be in the hub's cache
    remove_folder(download_folder)


def main(args: list[str] | None = None) -> None:
    """Make shards of documents, and print the command that trains on them."""
    folder = prepare(flags.parse(Options, args))
    meta = shards.read_meta(folder)
    command = training_command(folder, meta.lengths("train"), meta.lengths("val"))
    if command:
        console.print_next(command)


def training_command(folder: str, train: list[int], val: list[int]) -> list[Any] | None:
    """The command that trains on shards of these lengths; None if they are too short.

    With a GPU and at least 100M tokens it trains GPT-2, in one pass, and otherwise the quickstart's small model.
    """
    # looks for the GPU's tools, because importing torch takes seconds
    has_gpu = any(map(shutil.which, ("nvidia-smi", "rocm-smi")))
    if has_gpu and sum(train) >= 10**8:  # enough to be worth training GPT-2 on
        return preparation.training_command("gpt2", folder, ("--passes", 1))
    longest = min(max(split, default=0) for split in (train, val))
    T = min(128, longest - 1)
    if T <= 0:
        return None
    groups = []
    if T < 128 or sum(train) < 2**15:  # too few for the preset's own
        groups = preparation.batch_flags(train, T, most=2**11)
    return preparation.training_command("quickstart", folder, *groups)


if __name__ == "__main__":
    console.run(main)
