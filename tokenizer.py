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
import hashlib
import itertools
import json
import os
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken

from plumbing import cli, documents

EOT = "<|endoftext|>"  # stands before every document
# who speaks, and where a message ends; they take the ids after the tokenizer's own, which are
# padding in the model's embedding: GPT-2's 50257..50260 of 50304
CHAT_TOKENS = ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
MAX_VOCAB = 2**16  # shards hold uint16

# How text is split before merging: no token crosses a split. GPT-2's as in OpenAI's release, and
# GPT-4's, which lets any one sign stand before a word and takes digits by three.
PATTERNS = {
    "gpt2": r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""",
    "gpt4": r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"""
    r"""| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
}
# tiktoken's spelling of GPT-2's, the same splits in less time; Hugging Face's regex engine reads
# `$` differently and must be given the one above
FAST_GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
BYTES = r"(?s:.{1,64})"  # no merge crosses anything, so any split will do: this was the fastest

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
        needed = f"gpt2, bytes or the path of a .tiktoken file, {cli.suggest(str(name_or_path), ['gpt2', 'bytes'])}"
        raise cli.UserError(f"got tokenizer {name_or_path}, needed {needed}") from None
    except ValueError as error:
        needed = "a whole .tiktoken file, make it with python tokenizer.py"
        raise cli.UserError(f"got {name_or_path} ({error}), needed {needed}") from None


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
    ranks = {bytes([i]): i for i in range(256)}
    return tiktoken.Encoding("bytes", pat_str=BYTES, mergeable_ranks=ranks, special_tokens={EOT: 256})


def remake(enc, name, special_tokens):
    """`enc` under another name and with other special tokens; with its own, a second copy of it."""
    parts = {"pat_str": enc._pat_str, "mergeable_ranks": enc._mergeable_ranks}
    return tiktoken.Encoding(name, **parts, special_tokens=special_tokens)


def with_chat(enc):
    """The same tokenizer with CHAT_TOKENS appended: "gpt2" -> "gpt2+chat", ids 50257..50260."""
    markers = {token: enc.n_vocab + i for i, token in enumerate(CHAT_TOKENS)}
    return remake(enc, enc.name + "+chat", enc._special_tokens | markers)


def folder_encoding(folder):
    """The tokenizer that a folder of shards was written with (GPT-2's if it has no meta.json)."""
    metas = sorted(Path(folder).glob("meta*.json"))
    if not metas:
        return get_encoding("gpt2")
    try:
        name = json.loads(metas[0].read_text(encoding="utf-8"))["tokenizer"]
        base = name.removesuffix("+chat")
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        needed = "the meta.json that fineweb.py writes, with the tokenizer's name"
        raise cli.UserError(f"got {metas[0]} that names no tokenizer, needed {needed}, make them again") from None
    if base not in ("gpt2", "bytes"):
        name = os.path.join(folder, base + ".tiktoken") + name[len(base) :]
    return get_encoding(name)


def save_beside(enc, folder):
    """Put what `folder_encoding` needs into a folder of shards: a trained tokenizer, without chat markers."""
    base = enc.name.removesuffix("+chat")
    if base not in ("gpt2", "bytes"):
        own = {token: i for token, i in enc._special_tokens.items() if base == enc.name or token not in CHAT_TOKENS}
        with cli.atomic_write(os.path.join(folder, base + ".tiktoken"), "w", encoding="ascii") as file:
            file.write(dumps(remake(enc, base, own)))


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
        name, pat_str, special = head["name"], head["pat_str"], head["special_tokens"]
        pairs = [line.split() for line in lines if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
        ids = sorted([*ranks.values(), *special.values()])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError("no line of JSON with name, pat_str and special_tokens, then `base64 rank` lines") from None
    # subtle: a file cut short shows as a hole between its last rank and the special tokens' ids
    if ids != list(range(len(ids))) or EOT not in special or any(bytes([i]) not in ranks for i in range(256)):
        raise ValueError(f"{len(ids)} tokens that are not 0, 1, 2 ... with all bytes and {EOT} among them")
    return tiktoken.Encoding(name, pat_str=pat_str, mergeable_ranks=ranks, special_tokens=special)


# -----------------------------------------------------------------------------
# Encoding


def encode_text(enc, text):
    """The ids of `text` as uint32, with special tokens treated as plain text. Avoids a Python list of ints."""
    try:
        return enc.encode_to_numpy(text, disallowed_special=())
    except UnicodeEncodeError:  # half a surrogate pair, as JSON can spell one: replaced, as in tiktoken's `encode`
        return encode_text(enc, text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    except ValueError:
        # tiktoken's regex fails on a million blanks before a word. subtle: the patterns treat all blanks
        # but the last as one piece, so cutting there changes nothing; GPT-4's includes line ends as well
        blank = r"[^\S\x1c-\x1f]"  # those four are blanks to Python but not to tiktoken
        last = r"[^\S\r\n\x1c-\x1f]" if r"[\r\n]" in enc._pat_str else blank
        cuts = [match.end() for match in re.finditer(rf"(?<!{blank}){blank}{{9999,}}(?={last}[\S\x1c-\x1f])", text)]
        if not cuts:
            raise
        parts = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
        return np.concatenate([enc.encode_to_numpy(part, disallowed_special=()) for part in parts])


# -----------------------------------------------------------------------------
# Hugging Face's `tokenizers`: it trains, and it is what others read


def byte_chars():
    """GPT-2's spelling of the 256 bytes as printable characters: itself, or one from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def huggingface_model(pat_str, vocab=None, merges=None):
    """A byte-level BPE `tokenizers.Tokenizer` that splits by `pat_str`; untrained without vocab and merges."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers  # slow to import, rarely used

    model = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    if pat_str != BYTES:
        plain = PATTERNS["gpt2"] if pat_str == FAST_GPT2 else pat_str
        steps.insert(0, pre_tokenizers.Split(Regex(plain), "isolated"))
    model.pre_tokenizer = pre_tokenizers.Sequence(steps)
    model.decoder = decoders.ByteLevel()
    return model


def train(texts, vocab_size, name="tokenizer", pattern="gpt2", special_tokens=()):
    """Train byte-level BPE on an iterable of strings; `vocab_size` counts the special tokens, <|endoftext|> first.

    The result's name ends in a digest of all that it is made of, so that two tokenizers of one
    name are one tokenizer. It has fewer than `vocab_size` ids if the text runs out of pairs.
    """
    from tokenizers import pre_tokenizers, trainers

    pat_str = FAST_GPT2 if pattern == "gpt2" else PATTERNS[pattern]
    special_tokens = [EOT, *special_tokens]
    model = huggingface_model(pat_str)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all 256, seen or not: any text can be encoded
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    char_bytes = {char: byte for byte, char in byte_chars().items()}
    ranks = {bytes(char_bytes[char] for char in token): rank for token, rank in model.get_vocab().items()}
    special = {token: len(ranks) + i for i, token in enumerate(special_tokens)}
    enc = tiktoken.Encoding("", pat_str=pat_str, mergeable_ranks=ranks, special_tokens=special)
    return remake(enc, f"{name}-{hashlib.sha256(dumps(enc).encode()).hexdigest()[:8]}", special)


def last_merge(token, ranks):
    """The two tokens that `token` is merged from: b"the" -> (b"t", b"he") if "he" came before "th"."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, MAX_VOCAB) for a, b in zip(parts, parts[1:])]
        i = pairs.index(min(pairs))
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def export_huggingface(enc, directory):
    """Write `enc` so that `transformers.AutoTokenizer.from_pretrained(directory)` gives the same ids."""
    from tokenizers import AddedToken

    chars, ranks = byte_chars(), enc._mergeable_ranks
    spell = {token: "".join(chars[byte] for byte in token) for token in sorted(ranks, key=ranks.get)}
    merges = [last_merge(token, ranks) for token in spell if len(token) > 1]
    vocab = {spell[token]: ranks[token] for token in spell}
    model = huggingface_model(enc._pat_str, vocab, [(spell[a], spell[b]) for a, b in merges])
    special = sorted(enc._special_tokens, key=enc._special_tokens.get)
    model.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {"bos_token": EOT, "eos_token": EOT, "unk_token": EOT}
    texts = {"tokenizer.json": model.to_str(), "tokenizer_config.json": json.dumps(config)}
    texts["tokenizer.tiktoken"] = dumps(enc)
    os.makedirs(directory, exist_ok=True)
    for name, text in texts.items():
        with cli.atomic_write(os.path.join(directory, name), "w", encoding="utf-8") as file:
            file.write(text)


# -----------------------------------------------------------------------------
# Command line


@dataclass
class Options:
    input: tuple[str, ...] = ()  # files, globs or URLs to learn from, as fineweb.py takes them
    out: str = ""  # where to write the tokenizer, a .tiktoken file
    vocab_size: int = 32768  # ids in all, special tokens included; 257 to 65536
    pattern: str = "gpt2"  # how text is split before merging, gpt2 or gpt4
    special_tokens: tuple[str, ...] = ()  # further special tokens beside <|endoftext|>
    text_column: str = "text"  # the column of a parquet file, the key of a JSON line
    compare: tuple[str, ...] = ()  # text not trained on, to measure compression beside GPT-2's


def read_texts(patterns, text_column):
    """The text of all that `patterns` mean."""
    sources = documents.list_inputs(patterns)
    with tempfile.TemporaryDirectory() as folder:
        for batch in documents.read_batches(sources, text_column, folder):
            yield from (piece.text for piece in batch.pieces if piece.text)


def check_options(options):
    complaints, special, least = [], options.special_tokens, 257 + len(options.special_tokens)
    if not options.input:
        complaints.append("got no --input, needed files to learn from, do give some")
    if not options.out.endswith(".tiktoken") or os.path.exists(options.out):
        complaints.append(f"got --out {options.out or 'nothing'}, needed a new file .tiktoken, do give another")
    if not least <= options.vocab_size <= MAX_VOCAB:
        needed = f"{least} (the bytes and the special tokens) to {MAX_VOCAB} (shards are uint16)"
        complaints.append(f"got --vocab-size {options.vocab_size}, needed {needed}, do choose one between")
    if options.pattern not in PATTERNS:
        hint = cli.suggest(options.pattern, list(PATTERNS))
        complaints.append(f"got --pattern {options.pattern}, needed a known one, {hint}")
    if len({EOT, "", *special}) < len(special) + 2:
        got = " ".join(special)
        complaints.append(f"got --special-tokens {got}, needed each once and none {EOT} or empty, do drop some")
    if complaints:
        raise cli.UserError("; ".join(complaints))


def main(args=None):
    options = cli.parse(Options, args)
    check_options(options)
    start = time.perf_counter()
    texts = read_texts(options.input, options.text_column)
    first = next(texts, None)
    if first is None:
        raise cli.UserError("got --input without any text, needed some to learn from, do give other files")
    stem = os.path.basename(options.out).removesuffix(".tiktoken")
    with cli.atomic_write(options.out, "w", encoding="ascii") as file:
        texts = itertools.chain([first], texts)
        enc = train(texts, options.vocab_size, stem, options.pattern, options.special_tokens)
        file.write(dumps(enc))
    print(f"{options.out}: {enc.name}, {enc.n_vocab:,} ids in {time.perf_counter() - start:.1f} s")
    if enc.n_vocab < options.vocab_size:
        print(f"fewer than --vocab-size {options.vocab_size}: the text has no more pairs to merge")
    if options.compare:
        texts = list(read_texts(options.compare, options.text_column))
        size = sum(len(text.encode("utf-8", "replace")) for text in texts)
        for other in (enc, gpt2_encoding()):
            num_tokens = sum(len(other.encode_ordinary(text)) for text in texts)
            print(f"{other.name}: {size / num_tokens:.3f} bytes per token on {size:,} bytes")


if __name__ == "__main__":
    cli.run(main)
