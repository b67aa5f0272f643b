"""Tokenizers: GPT-2's, plain bytes, one trained with tokenizer.py, or a byte-level BPE in Hugging Face format.

Each is a `tiktoken.Encoding`. A `.tiktoken` file is in tiktoken's format, a `base64-of-the-token rank` line per token.
It has no place for the name, the pre-tokenization pattern, the special tokens and the original's files. They are in a
second file, with .json added to the name.
"""

import base64
import functools
import hashlib
import itertools
import json
import string
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from plumbing.cli.console import UserError, first_line, plain
from plumbing.data import downloads
from plumbing.files import atomic_write, open_regular

EOT = "<|endoftext|>"  # the first token of every document
ROLES = ("user", "assistant", "system")
# their ids follow the tokenizer's own, in the padding of the embedding: for GPT-2, 50257..50260 of 50304
CHAT_TOKENS = ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
MAX_VOCAB = 2**16  # shards hold uint16
# many kinds of text, to test a pattern
PROBE = "".join(chr(i) for i in range(0x250)) + "\r\n\n  12345 I'll  \u4e2d\u6587 \U0001f600  "

# GPT-2's pattern: no token crosses a split
GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
# tiktoken's faster equivalent; in Hugging Face's engine, `$` differs
FAST_GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
BYTES = r"(?s:.{1,64})"  # without merges, any split is correct; this one was the fastest
FOR_HUGGINGFACE = {FAST_GPT2: GPT2, BYTES: r"[\s\S]{1,64}"}  # its engine has no (?s:)
GPT2_RANKS = (
    "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"  # sha256 of its tokens in `dumps`
)
# the files of a tokenizer in Hugging Face format
FILES = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json", "special_tokens_map.json")
FILES += ("added_tokens.json", "chat_template.jinja")

# ----- Open a tokenizer by its name, or the one of a folder of shards -----------------------------------


def get_encoding(name_or_path):
    """Return the tokenizer called "gpt2" or "bytes", or that in a `.tiktoken` file or a folder in Hugging Face format.

    OWNER/NAME is a model on the Hub. Each tokenizer is also there with "+chat".
    """
    name = str(name_or_path)
    if name.endswith("+chat"):
        return with_chat(get_encoding(name.removesuffix("+chat")))
    if name == "bytes":  # no merges: ids 0..255 are the bytes of UTF-8
        ranks = {bytes([i]): i for i in range(256)}
        return tiktoken.Encoding("bytes", pat_str=BYTES, mergeable_ranks=ranks, special_tokens={EOT: 256})
    if name == "gpt2":
        advice = "Set TIKTOKEN_CACHE_DIR to a folder that has it, or make new shards with --tokenizer bytes."
        # tiktoken pins the vocabulary by its hash
        return downloads.retry("GPT-2's tokenizer", advice, lambda: tiktoken.get_encoding("gpt2"))
    path = downloads.find_model(name)
    if path.is_dir():
        return read_folder(path)
    if path.suffix != ".tiktoken" and not path.exists():
        raise UserError(
            f"There is no tokenizer {name!r}. Use gpt2, bytes (also for characters), a .tiktoken file, or a folder in "
            "Hugging Face format."
        )
    return read_encoding(path)


def stand_in(name, num_ids):
    """Return a tokenizer of bytes that is called `name` and has num_ids ids, for an account before there are data."""
    ranks = {bytes([i]): i for i in range(min(256, num_ids - 1))}
    return tiktoken.Encoding(name, pat_str=BYTES, mergeable_ranks=ranks, special_tokens={EOT: num_ids - 1})


def copy_encoding(enc, name, special_tokens):
    ranks = enc._mergeable_ranks
    copied = tiktoken.Encoding(name, pat_str=enc._pat_str, mergeable_ranks=ranks, special_tokens=special_tokens)
    vars(copied)["files"] = files_of(enc)  # the class has no place for them
    return copied


def files_of(enc):
    """{name: text} of the files in Hugging Face format that a tokenizer was read from."""
    return vars(enc).get("files", {})


def with_chat(enc):
    """Return the same tokenizer with CHAT_TOKENS appended: "gpt2" -> "gpt2+chat", ids 50257..50260."""
    markers = {token: enc.n_vocab + i for i, token in enumerate(CHAT_TOKENS)}
    return copy_encoding(enc, enc.name + "+chat", enc._special_tokens | markers)


def has_chat_tokens(enc):
    """Whether the tokenizer has role markers, that is, whether its model was fine-tuned on conversations."""
    return set(CHAT_TOKENS) <= enc._special_tokens.keys()


def folder_encoding(folder, recorded):
    """Return the tokenizer of a folder of shards. recorded: its name in meta.json; None: GPT-2's."""
    path = Path(folder, "tokenizer.tiktoken")
    name = recorded or "gpt2"
    base = name.removesuffix("+chat")
    is_built_in = base in ("gpt2", "bytes") and not path.exists()
    enc = get_encoding(base) if is_built_in else read_encoding(path)
    if recorded and enc.name != base:
        raise UserError(
            f"{path} holds tokenizer {enc.name}, but the meta.json beside it names {base}. Make the shards again in a "
            "new folder."
        )
    return enc if name == base else with_chat(enc)


def save_for_folder(enc, folder):
    """Save the tokenizer, without chat markers, in a folder of shards, where `folder_encoding` finds it."""
    if enc.name.endswith("+chat"):
        special_tokens = {token: i for token, i in enc._special_tokens.items() if token not in CHAT_TOKENS}
        enc = copy_encoding(enc, enc.name.removesuffix("+chat"), special_tokens)
    write_encoding(enc, Path(folder, "tokenizer.tiktoken"))


# ----- Tokenizers in files and in checkpoints -----------------------------------------------------------


def write_encoding(enc, path):
    """Write `enc` to the `.tiktoken` file `path`, after its JSON file. An existing file must be the same."""
    header, ranks = dumps(enc).split("\n", 1)
    fields = json.dumps(json.loads(header) | {"sha256": sha256(ranks)}, indent=2) + "\n"
    texts = {Path(f"{path}.json"): fields, Path(path): ranks}
    for name, text in texts.items():
        if name.is_file() and name.read_text(encoding="ascii", errors="replace") != text:
            raise UserError(f"{name} exists already, with other contents. Choose another name or folder.")
    for name, text in texts.items():
        with atomic_write(name) as file:
            file.write(text.encode())


def read_encoding(path):
    """Return the tokenizer in the `.tiktoken` file `path` (see `write_encoding`)."""
    try:
        with open_regular(path, "r", encoding="ascii") as file:
            ranks = file.read()
        with open_regular(f"{path}.json", "r", encoding="ascii") as file:
            fields = json.load(file)
        if fields["sha256"] != sha256(ranks):
            raise ValueError("its tokens do not match the checksum in its .json")
        return loads(json.dumps(fields) + "\n" + ranks)
    except (ValueError, LookupError, TypeError, RecursionError, FileNotFoundError) as error:
        reason = plain(error)
        raise UserError(
            f"Tokenizer {path} is missing or damaged: {reason}. Restore it and its .json, or use another."
        ) from None


def sha256(text):
    return hashlib.sha256(text.encode()).hexdigest()


def dumps(enc):
    """Return all of a tokenizer as text: one line of JSON, then a `base64 rank` line per token."""
    header = {"name": enc.name, "pat_str": enc._pat_str, "special_tokens": enc._special_tokens}
    if files := files_of(enc):
        header["files"] = files
    ranks = enc._mergeable_ranks
    lines = [f"{base64.b64encode(token).decode()} {ranks[token]}" for token in sorted(ranks, key=ranks.get)]
    return "\n".join([json.dumps(header), *lines]) + "\n"


@functools.lru_cache(2)  # a run reads the same one several times
def loads(text):
    """Return the tokenizer in `text` (see `dumps`). Raises ValueError if it is damaged.

    Its name is printed in many places, so it must not hold control characters that a terminal obeys.
    """
    try:
        header, *lines = text.splitlines()
        fields = json.loads(header)
        ranks = {}
        for line in lines:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        name = fields["name"]
        special_tokens = fields["special_tokens"]
        ids = sorted([*ranks.values(), *special_tokens.values()])
        has_bytes = all(bytes([i]) in ranks for i in range(256))
        if ids != list(range(len(ids))) or not has_bytes or EOT not in special_tokens:
            raise ValueError(f"its {len(ids)} ids must count up from 0 and include all 256 bytes and {EOT}")
        enc = tiktoken.Encoding(
            name, pat_str=fields["pat_str"], mergeable_ranks=ranks, special_tokens=special_tokens
        )
        if not name.isprintable() or enc.decode(enc.encode_ordinary(PROBE)) != PROBE:
            raise ValueError("its name cannot be printed, or its pattern skips a part of the text")
        files = fields.get("files", {})
        vars(enc)["files"] = {name: files[name] for name in FILES if name in files}
        return enc
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"its fields cannot be used: {first_line(error)}") from None


def whole_characters(text):
    """Replace the lone halves of surrogate pairs that JSON can hold, as tiktoken's `encode` does."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def encode_text(enc, text):
    """The ids of `text` as uint32, with special tokens treated as plain text. Avoids a Python list of ints."""
    try:
        return enc.encode_to_numpy(text, disallowed_special=())
    except UnicodeEncodeError:
        return encode_text(enc, whole_characters(text))
    except ValueError:  # tiktoken's regex fails on a million blanks, but not on parts of them
        middle = len(text) // 2
        if middle < 5000:
            raise
        halves = encode_text(enc, text[:middle]), encode_text(enc, text[middle:])
        return np.concatenate(halves)


def token_bytes(enc):
    """(n_vocab,): how many bytes each token has, 0 for special ones, to convert losses to bits per byte."""
    num_bytes = np.zeros(enc.n_vocab, dtype=np.int64)
    for token, i in enc._mergeable_ranks.items():
        num_bytes[i] = len(token)
    return num_bytes


# ----- Tokenizers in Hugging Face format ----------------------------------------------------------------


def byte_chars():
    """GPT-2's mapping of the 256 bytes to printable characters: the same code point, or one from U+0100 on."""
    from tokenizers.pre_tokenizers import ByteLevel  # slow to import

    chars = sorted(ByteLevel.alphabet())
    own_first = sorted(range(256), key=lambda byte: chr(byte) not in chars)
    return dict(zip(own_first, chars))


def read_folder(folder):
    """Return the byte-level BPE in a folder in Hugging Face format; UserError if its tokenizer is none.

    <|endoftext|> is the token of that name or, if there is none, the one that ends a text there.
    """
    from transformers import AutoTokenizer, logging  # slow to import

    logging.set_verbosity_error()
    folder = Path(folder)
    if (folder / "tokenizer.tiktoken").exists():
        return read_encoding(folder / "tokenizer.tiktoken")
    try:
        files = {name: (folder / name).read_text(encoding="utf-8") for name in FILES if (folder / name).exists()}
        theirs: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        fields = json.loads(theirs.backend_tokenizer.to_str())
        enc = as_encoding(fields, theirs.eos_token, "".join(files.values()))
        compare_ids(enc, theirs.backend_tokenizer)
    except Exception as error:  # of many kinds
        raise UserError(
            f"The tokenizer in {folder} cannot be used: {first_line(error)}. This program reads GPT-2's, its own, and "
            "byte-level BPE in Hugging Face format. Use another one."
        ) from None
    text = dumps(enc)
    if sha256(text.partition("\n")[2]) == GPT2_RANKS:
        return get_encoding("gpt2")
    named = copy_encoding(enc, f"bpe-{sha256(text)[:8]}", enc._special_tokens)
    vars(named)["files"] = files
    return named


def as_encoding(fields, eos_token, files):
    """The tokenizer in the content of a tokenizer.json, without the special tokens that its `files` do not have.

    ValueError, with the reason, if it is not a byte-level BPE whose ids are ranks, as tiktoken's are.
    """
    model, normalizer = fields["model"], fields["normalizer"]
    if model["type"] != "BPE" or normalizer:
        raise ValueError(f"it is a {model['type']} with normalizer {plain(json.dumps(normalizer), 80)}")
    pattern = pattern_of(fields["pre_tokenizer"])
    merged = ["".join(pair) for pair in model["merges"]]
    ids = [model["vocab"][token] for token in merged]
    if ids != sorted(set(ids)):
        raise ValueError("its ids do not rise with its merges")
    char_bytes = {char: byte for byte, char in byte_chars().items()}
    special = model["vocab"] | {added["content"]: added["id"] for added in fields["added_tokens"]}
    ranks = {}
    for token in [*char_bytes, *merged]:  # no text becomes one of the others
        if token in special:
            ranks[bytes(map(char_bytes.__getitem__, token))] = special.pop(token)
    special = {token: i for token, i in special.items() if token in files}  # transformers may have added others
    for name in (eos_token, "</s>"):
        if EOT not in special and name in special:
            special[EOT] = special.pop(name)
    enc = tiktoken.Encoding("bpe", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    return loads(dumps(enc))  # checks the ids


def pattern_of(pre_tokenizer: Any) -> str:
    """The pattern by which the pre-tokenizer of a tokenizer.json splits texts; ValueError if it does more."""
    match (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer]):
        case [{"type": "ByteLevel", "add_prefix_space": False}]:
            return FAST_GPT2
        case [
            {"type": "Split", "pattern": {"Regex": pattern}},
            {"type": "ByteLevel", "add_prefix_space": False},
        ]:
            return pattern
    raise ValueError(f"it splits texts by {plain(json.dumps(pre_tokenizer), 100)}")


def compare_ids(enc, original):
    """Raise ValueError unless a tokenizer of the package tokenizers gives the same ids for many texts."""
    original.encode_special_tokens = True  # as text
    texts = [added.content for added in original.get_added_tokens_decoder().values()]
    texts += [token.decode(errors="ignore") for token in enc._mergeable_ranks]
    texts += [*Path(__file__).read_text(encoding="utf-8").split("\n\n"), *probes()]
    for text, expected in zip(texts, original.encode_batch(texts, add_special_tokens=False)):
        if enc.encode_ordinary(text) != expected.ids:
            raise ValueError(f"as a tiktoken.Encoding it gives other ids for {text[:40]!r}")


def probes():
    """Texts in which much comes together: all pairs of ASCII's printable characters, blanks in a row, and PROBE."""
    # 00 01 02: the 0 is before and after each of the others
    pairs = itertools.combinations_with_replacement(string.printable, 2)
    return ["".join(map("".join, pairs)), "x".join(" " * n for n in range(32)), PROBE]


# ----- The chat format ----------------------------------------------------------------------------------


def render_conversation(
    messages: list[dict[str, Any]], enc: tiktoken.Encoding, max_length: int = sys.maxsize
) -> tuple[list[int], list[int], int]:
    """(ids, mask, number of tokens up to the end of the last answer within `max_length`, or 0 without one).

    `enc` needs role markers, as in "gpt2+chat". The mask is 1 on the assistant's text and the <|end|> that closes it,
    unless the message has "weight": 0.
    """
    ids = [enc.eot_token]
    mask = [0]
    stop = 0
    end = enc.encode_single_token("<|end|>")
    for message in messages:
        is_answer = message["role"] == "assistant"
        is_target = is_answer and message.get("weight") != 0
        body = [*encode_text(enc, message["content"]).tolist(), end]
        ids += [enc.encode_single_token(f"<|{message['role']}|>"), *body]
        mask += [0] + [int(is_target)] * len(body)
        if is_answer and len(ids) <= max_length:
            stop = len(ids)
    return ids, mask, stop


def render_question(messages: list[dict[str, str]], enc: tiktoken.Encoding) -> list[int]:
    """The ids of a conversation up to the assistant's next answer."""
    return render_conversation(messages, enc)[0] + [enc.encode_single_token("<|assistant|>")]


def render_prompt(text: str, enc: tiktoken.Encoding) -> tuple[str, list[int]]:
    """(text to show, its ids) for a text to continue or, if `enc` has role markers, a question to answer."""
    if not has_chat_tokens(enc):
        return text, enc.encode_ordinary(text) or [enc.eot_token]
    ids = render_question([{"role": "user", "content": text}], enc)
    return enc.decode(ids[1:]), ids
