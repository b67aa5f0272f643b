"""Train a byte-level BPE tokenizer for fineweb.py and smoltalk.py.

    python tokenizer.py --input docs --vocab-size 32768 --out my.tiktoken

`my.tiktoken` is in tiktoken's format, a `base64-of-the-token rank` line per
token. That format has no place for the name, the pre-tokenization pattern and
the special tokens: they are in `my.tiktoken.json`.

In Python, open a tokenizer with `get_encoding`. Each is a `tiktoken.Encoding`.

    enc = get_encoding("gpt2")         # OpenAI's 50,257 ids, downloaded once
    enc = get_encoding("bytes")        # 256 bytes and <|endoftext|>; no network
    enc = get_encoding("my.tiktoken")  # trained with the command above
    enc = get_encoding("gpt2+chat")    # any of them with the markers of a chat
"""

import os
import sys
from dataclasses import dataclass

sys.path.append(os.path.dirname(__file__))  # python -P and -I leave this folder out

from plumbing.cli import console, flags


@dataclass
class Options:
    input: tuple[str, ...] = ()  # files, folders or globs to learn from, of the types that fineweb.py reads
    # the .tiktoken file to write; a second file, with .json added, holds the pattern and the special token
    out: str = ""
    vocab_size: int = 32768  # number of ids, <|endoftext|> included; 257 to 65536
    text_column: str = "text"  # the column or key of the text in .csv, .parquet and JSON files


if __name__ == "__main__":
    console.run(lambda: flags.parse(Options))  # --help and a mistyped flag need not wait for the imports

from pathlib import Path

import tiktoken
from tqdm import tqdm

from plumbing.cli.console import UserError
from plumbing.data import inputs, readers, tokenizers
from plumbing.data.tokenizers import get_encoding as get_encoding  # people's scripts import it from here
from plumbing.files import check_new_output

# ----- Training with Hugging Face's `tokenizers` --------------------------------------------------------


def train(texts, vocab_size, name="tokenizer"):
    """Train byte-level BPE to `vocab_size` ids, <|endoftext|> included; fewer if the text runs out of pairs."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # splits by GPT-2's pattern
    char_bytes = {char: byte for byte, char in tokenizers.byte_chars().items()}
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=list(char_bytes),  # all 256, seen or not: any text can be encoded
        show_progress=False,  # its bar for an unknown number of texts says "242 / 0"
    )
    model.train_from_iterator(texts, trainer)
    vocab = model.get_vocab().items()
    ranks = {bytes(char_bytes[char] for char in token): rank for token, rank in vocab}
    special = {tokenizers.EOT: len(ranks)}
    enc = tiktoken.Encoding("", pat_str=tokenizers.FAST_GPT2, mergeable_ranks=ranks, special_tokens=special)
    digest = tokenizers.sha256(tokenizers.dumps(enc))[:8]  # tells tokenizers apart
    return tokenizers.copy_encoding(enc, f"{name}-{digest}", special)


def read_texts(patterns, text_column):
    """Yield the texts of the inputs that match `patterns`, except empty ones. UserError if all are empty."""
    columns = text_column.split(",")
    counts = readers.Counts()
    is_empty = True
    for number, source in enumerate(inputs.list_inputs(patterns)):
        for row in readers.read_rows(source, needed=columns if number == 0 else ()):
            text = readers.text_of(row.values, columns)
            if isinstance(text, readers.Unusable):
                counts.leave_out(row.place, source.name, text)
            else:
                yield tokenizers.whole_characters(text)
                is_empty = False
    if is_empty:
        raise UserError(f"There is no text in {', '.join(patterns)}. Check the files and --text-column.")
    counts.note()


def check_options(options):
    """Raise one UserError that lists everything that is wrong with the flags."""
    complaints = []
    out = options.out
    if not options.input:
        complaints.append("--input is missing. Give the files to learn from.")
    is_name = out.endswith(".tiktoken") and out.isprintable()
    if not out:
        complaints.append("--out is missing. Name the .tiktoken file to write.")
    elif not is_name or not os.access(os.path.dirname(out) or ".", os.W_OK):
        complaints.append(
            f"--out is {out!r}, but it must be a new .tiktoken file in an existing, writable folder."
        )
    if not 257 <= options.vocab_size <= tokenizers.MAX_VOCAB:
        complaints.append(
            f"--vocab-size is {options.vocab_size}, but it must be from 257 (the bytes and {tokenizers.EOT}) to "
            f"{tokenizers.MAX_VOCAB}."
        )
    flags.check(options, complaints)
    check_new_output(out)  # its .json may be there: `write_encoding` may have been killed between the two


def main(args=None):
    options = flags.parse(Options, args)
    check_options(options)
    column = options.text_column
    texts = tqdm(read_texts(options.input, column), unit=" texts", desc="learning", delay=0.5)
    enc = train(texts, options.vocab_size, Path(options.out).stem)
    tokenizers.write_encoding(enc, options.out)
    print(f"{options.out}: {enc.name}, {enc.n_vocab:,} ids")
    inputs = (f"./{name}" if name[0] == "-" else name for name in options.input)
    command = ["python", "fineweb.py", ("--input", *inputs), ("--tokenizer", options.out)]
    if column != "text":
        command.append(("--text-column", column))
    console.print_next(command)


if __name__ == "__main__":
    console.run(main)
