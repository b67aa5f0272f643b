"""Tokenizers: GPT-2's, plain bytes, or one trained here. Each of them is a `tiktoken.Encoding`.

    enc = get_encoding("gpt2")          # OpenAI's 50,257 ids; the tables are downloaded once
    enc = get_encoding("bytes")         # 256 bytes and <|endoftext|>; needs no network
    enc = get_encoding("my.tiktoken")   # what this file trained
    enc = get_encoding("gpt2+chat")     # any of them and the role markers of a conversation

Training your own, byte-level BPE:

    python tokenizer.py --input docs/*.parquet --vocab-size 32768 --out my.tiktoken

A `.tiktoken` file here holds all that there is to know: one line of JSON with the name, the
pattern that splits text before merging and the special tokens, then tiktoken's own
`base64-of-the-token rank` lines. Nothing is guessed when it is read.
"""

import base64
import binascii
import glob
import hashlib
import json
import os

import tiktoken

import cli

EOT = "<|endoftext|>"  # stands before every document
# who speaks, and where a message ends; they take the ids after the tokenizer's own, which are
# padding in the model's embedding: GPT-2's 50257..50260 of 50304
CHAT_TOKENS = ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
MAX_VOCAB = 2**16  # shards hold uint16

# -----------------------------------------------------------------------------
# Opening a tokenizer


def get_encoding(name_or_path):
    """The tokenizer called "gpt2" or "bytes", or in a `.tiktoken` file; each also with "+chat"."""
    base, plus, rest = str(name_or_path).rpartition("+chat")
    if plus and not rest:
        return with_chat(get_encoding(base))
    if name_or_path == "bytes":
        return bytes_encoding()
    if name_or_path == "gpt2":
        return gpt2_encoding()
    try:
        with open(name_or_path, encoding="ascii") as file:
            return loads(file.read())
    except (OSError, UnicodeDecodeError):
        known = ["gpt2", "bytes"]
        hint = cli.nearest(str(name_or_path), known)
        raise cli.UserError(
            f"got tokenizer {name_or_path}, needed gpt2, bytes or the path of a .tiktoken file, {hint}"
        ) from None
    except ValueError as error:
        raise cli.UserError(
            f"got {name_or_path} ({error}), needed a whole .tiktoken file, make it with python tokenizer.py"
        ) from None


def gpt2_encoding():
    """OpenAI's tables, from tiktoken's cache or the network."""
    try:
        return tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:  # requests' errors are OSErrors; a bad hash is a ValueError
        raise cli.UserError(
            f"got no GPT-2 tokenizer ({type(error).__name__}: its tables are not in tiktoken's cache and "
            "could not be downloaded), needed a network once or TIKTOKEN_CACHE_DIR set to a folder with the "
            "tables, do so, or use the tokenizer that needs neither: --tokenizer bytes"
        ) from None


def bytes_encoding():
    """Ids 0..255 are the bytes of UTF-8, 256 is <|endoftext|>: BPE without a single merge."""
    return tiktoken.Encoding(
        "bytes",
        # no merge crosses anything, so any split will do: 64 characters at a time was the fastest
        pat_str=r"(?s:.{1,64})",
        mergeable_ranks={bytes([i]): i for i in range(256)},
        special_tokens={EOT: 256},
    )


def with_chat(enc):
    """The same tokenizer with CHAT_TOKENS appended: "gpt2" -> "gpt2+chat", ids 50257..50260."""
    markers = {token: enc.n_vocab + i for i, token in enumerate(CHAT_TOKENS)}
    return tiktoken.Encoding(
        enc.name + "+chat",
        pat_str=enc._pat_str,
        mergeable_ranks=enc._mergeable_ranks,
        special_tokens={**enc._special_tokens, **markers},
    )


def folder_encoding(folder):
    """The tokenizer that a folder of shards was written with (GPT-2's if it has no meta.json)."""
    metas = sorted(glob.glob(os.path.join(glob.escape(str(folder)), "meta*.json")))
    if not metas:
        return get_encoding("gpt2")
    with open(metas[0], encoding="utf-8") as file:
        name = json.load(file)["tokenizer"]
    base = name.removesuffix("+chat")
    if base not in ("gpt2", "bytes"):
        name = os.path.join(str(folder), base + ".tiktoken") + name[len(base) :]
    return get_encoding(name)


# -----------------------------------------------------------------------------
# One file per tokenizer


def dumps(enc):
    """The text of a `.tiktoken` file: one line of JSON, then a `base64 rank` line per token."""
    head = {"name": enc.name, "pat_str": enc._pat_str, "special_tokens": enc._special_tokens}
    ranks = sorted(enc._mergeable_ranks.items(), key=lambda item: item[1])
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks]
    return "\n".join([json.dumps(head), *lines]) + "\n"


def loads(text):
    """The tokenizer in `text` (see `dumps`). Raises ValueError where text is not a whole one."""
    head, *lines = text.split("\n")
    try:
        head = json.loads(head)
        pairs = [line.split() for line in lines if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
        special_tokens = head["special_tokens"]
        ids = sorted([*ranks.values(), *special_tokens.values()])
    except (ValueError, KeyError, TypeError, AttributeError, binascii.Error):
        raise ValueError("no line of JSON with name, pat_str and special_tokens, then `base64 rank` lines") from None
    # subtle: a file cut short shows as a hole between its last rank and the special tokens' ids
    if ids != list(range(len(ids))) or EOT not in special_tokens or any(bytes([i]) not in ranks for i in range(256)):
        raise ValueError(f"{len(ids)} tokens that are not 0, 1, 2 ... with all bytes and {EOT} among them")
    return tiktoken.Encoding(
        head["name"], pat_str=head["pat_str"], mergeable_ranks=ranks, special_tokens=special_tokens
    )
