"""Import and export tokenizers in Hugging Face's format: tokenizer.json, tokenizer_config.json and a chat template."""

import json
from pathlib import Path

import tiktoken

import tokenizer
from plumbing.cli import UserError, first_line

# digest of GPT-2's tokenizer, by which a copy of it is recognized
GPT2_DIGEST = "52a999460b5b5ff4791c879ebb457e2c72df96e811a1502602bde18dec758a1a"
# many kinds of text, to test a tokenizer
PROBE = "".join(chr(i) for i in range(0x250)) + "\r\n\n  12345 I'll  \u4e2d\u6587 \U0001f600  "
# for apply_chat_template: a conversation as smoltalk.py renders it
CHAT_TEMPLATE = (
    "{{ '<|endoftext|>' }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['user', 'assistant', 'system'] %}"
    "{{ raise_exception('The role ' + message['role'] + ' is not user, assistant or system.') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def export_tokenizer(enc, directory, max_length=None):
    """Write `enc` so that `transformers.AutoTokenizer.from_pretrained(directory)` gives the same ids.

    max_length: how many tokens the model reads.
    """
    from tokenizers import AddedToken

    directory = Path(directory)
    ranks, chars = enc._mergeable_ranks, tokenizer.byte_chars()
    tokens = sorted(ranks, key=ranks.get)
    spelled = {token: "".join(chars[byte] for byte in token) for token in tokens}
    merges = []
    for token in tokens:
        parts = tokenizer.last_merge(token, ranks) if len(token) > 1 else ()
        if not all(part in ranks for part in parts):
            raise UserError(
                f"Tokenizer {enc.name} cannot be exported: its token {token!r} is not made of two shorter ones."
            )
        if parts:
            merges.append(tuple(spelled[part] for part in parts))
    vocab = {spelled[token]: ranks[token] for token in tokens}
    both = vocab.keys() & enc._special_tokens.keys()
    if both:
        raise UserError(f"Tokenizer {enc.name} cannot be exported: {min(both)!r} is both a special token and a word.")
    model = tokenizer.huggingface_model(enc._pat_str, vocab | enc._special_tokens, merges)
    special_tokens = sorted(enc._special_tokens, key=enc._special_tokens.get)
    model.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    config = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), tokenizer.EOT)
    config |= dict(tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=False)
    if max_length:
        config["model_max_length"] = max_length
    if tokenizer.has_chat_tokens(enc):
        config["chat_template"] = CHAT_TEMPLATE
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(model.to_str(), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer.write_encoding(enc, directory / "tokenizer.tiktoken")


def import_tokenizer(directory):
    """Return the byte-level BPE in a Hugging Face folder: tokenizer.json, or vocab.json and merges.txt.

    Raises UserError if it is of another kind, or if tiktoken gives other ids.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    directory = Path(directory)
    try:
        if (directory / "tokenizer.json").exists():
            theirs = Tokenizer.from_file(str(directory / "tokenizer.json"))
        else:
            theirs = Tokenizer(models.BPE.from_file(str(directory / "vocab.json"), str(directory / "merges.txt")))
            theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        fields = json.loads(theirs.to_str())
    except Exception as error:  # the library raises nothing more specific
        raise UserError(
            f"Could not read the tokenizer in {directory}: {first_line(error)}. "
            "Its tokenizer.json, or its vocab.json and merges.txt, must be whole; copy them again."
        ) from None
    try:
        enc = encoding_from_fields(fields)
        tokens = list(enc._mergeable_ranks)
        sample = b"".join(tokens[:: len(tokens) // 5000 + 1])
        text = PROBE + sample.decode("utf-8", "replace")
        if enc.encode_ordinary(text) != theirs.encode(text, add_special_tokens=False).ids:
            raise ValueError("tiktoken gives the same text other ids")
    except ValueError as error:
        raise UserError(
            f"The tokenizer in {directory} is not supported: {error}. Use a model with a tokenizer like GPT-2's."
        ) from None
    return enc


def encoding_from_fields(fields):
    """Return the tokenizer that the fields of a tokenizer.json describe. Raises ValueError if it is of another kind."""
    model = fields["model"]
    if model["type"] != "BPE":
        raise ValueError(f"it is of type {model['type']}, not BPE")
    pat_str = pattern_from_fields(fields["pre_tokenizer"])
    if pat_str == tokenizer.BYTES and model["merges"]:
        raise ValueError("it merges without splitting the text first")
    merged = dict.fromkeys(left + right for left, right in model["merges"])  # in order, each token once
    merged_ids = [model["vocab"][token] for token in merged]
    if merged_ids != sorted(merged_ids):  # tiktoken merges in the order of the ids
        raise ValueError("its ids are not in the order of its merges")
    special_tokens = {token["content"]: token["id"] for token in fields["added_tokens"]}
    ranks = {}
    char_bytes = {char: byte for byte, char in tokenizer.byte_chars().items()}
    for token, i in sorted(model["vocab"].items(), key=lambda item: item[1]):
        if token in special_tokens:
            continue
        if len(token) > 1 and token not in merged:  # no text ever becomes this token
            special_tokens[token] = i
            continue
        if not all(char in char_bytes for char in token):
            raise ValueError(f"its token {token!r} is not spelled in bytes")
        ranks[bytes(char_bytes[char] for char in token)] = i
    tokenizer.check_ids(ranks, special_tokens)
    enc = tiktoken.Encoding("", pat_str=pat_str, mergeable_ranks=ranks, special_tokens=special_tokens)
    name = "gpt2" if tokenizer.digest(enc) == GPT2_DIGEST else f"hf-{tokenizer.digest(enc)[:8]}"
    return tokenizer.copy_encoding(enc, name, special_tokens)


def pattern_from_fields(pre_tokenizer):
    """Return the pattern by which a tokenizer.json's pre_tokenizer splits text."""
    steps = [pre_tokenizer]
    if pre_tokenizer and pre_tokenizer["type"] == "Sequence":
        steps = pre_tokenizer["pretokenizers"]
    *splits, last = steps or [None]
    if last is None or last["type"] != "ByteLevel":
        raise ValueError("it is not byte-level")
    if last["use_regex"] and not splits:
        return tokenizer.FAST_GPT2
    if not last["use_regex"] and not splits:
        return tokenizer.BYTES
    pattern = splits[0].get("pattern", {}).get("Regex")
    if last["use_regex"] or len(splits) > 1 or pattern is None or splits[0]["behavior"] != "Isolated":
        raise ValueError("it splits text in another way")
    return tokenizer.FAST_GPT2 if pattern == tokenizer.PATTERNS["gpt2"] else pattern
