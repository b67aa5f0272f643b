"""Import and export tokenizers in Hugging Face's format: tokenizer.json, tokenizer_config.json and a chat template."""

import json
from typing import Any

import tokenizer
from plumbing.program import UserError, first_line

GPT2_DIGEST = "52a999460b5b5ff4791c879ebb457e2c72df96e811a1502602bde18dec758a1a"  # recognizes a copy of it
CHAT_TEMPLATE = (  # for apply_chat_template: a conversation as smoltalk.py renders it
    "{{ '<|endoftext|>' }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['user', 'assistant', 'system'] %}"
    "{{ raise_exception('The role ' + message['role'] + ' is not user, assistant or system.') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tokenizer_files(enc, max_length=None):
    """Return {name: content} of the files with which transformers' AutoTokenizer gives the same ids as `enc`."""
    ranks, chars = enc._mergeable_ranks, tokenizer.byte_chars()

    def to_chars(token):
        return "".join(chars[byte] for byte in token)

    vocab, merges = {}, []
    for token in sorted(ranks, key=ranks.get):
        parts, word = tokenizer.last_merge(token, ranks), to_chars(token)
        if word in enc._special_tokens or not all(part in ranks for part in parts):
            raise UserError(
                f"Tokenizer {enc.name} cannot be exported: its token {token!r} is a special token, too, or not made of "
                "two shorter ones. Use another tokenizer."
            )
        vocab[word] = ranks[token]
        if len(token) > 1:
            merges.append(tuple(map(to_chars, parts)))
    model = tokenizer.huggingface_model(enc._pat_str, vocab | enc._special_tokens, merges)
    model.add_special_tokens(list(enc._special_tokens))
    config: dict[str, Any] = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), tokenizer.EOT)
    config |= dict(tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=False)
    config["model_max_length"] = max_length
    if tokenizer.has_chat_tokens(enc):
        config["chat_template"] = CHAT_TEMPLATE
    return {"tokenizer.json": model.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}


def import_tokenizer(directory):
    """Return the byte-level BPE in a Hugging Face folder: tokenizer.json, or vocab.json and merges.txt."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    try:
        if (directory / "tokenizer.json").exists():
            theirs = Tokenizer.from_file(f"{directory}/tokenizer.json")
        else:
            theirs = Tokenizer(models.BPE.from_file(f"{directory}/vocab.json", f"{directory}/merges.txt"))
            theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        enc = encoding_from_fields(json.loads(theirs.to_str()))
        tokens = list(enc._mergeable_ranks)
        sample = b"".join(tokens[:: len(tokens) // 5000 + 1])
        text = tokenizer.PROBE + sample.decode("utf-8", "replace")
        if enc.encode_ordinary(text) != theirs.encode(text, add_special_tokens=False).ids:
            raise ValueError("tiktoken gives the same text different ids")
    except Exception as error:  # the library raises nothing more specific
        problem = f"The tokenizer in {directory} is damaged or not supported: {first_line(error)}"
        raise UserError(
            f"{problem}. Copy its files again, or use a model with a tokenizer like GPT-2's."
        ) from None
    return enc


def encoding_from_fields(fields):
    """Return the tokenizer that the fields of a tokenizer.json describe. Raises ValueError if it is of another kind."""
    model = fields["model"]
    if model["type"] != "BPE":
        raise ValueError(f"it is of type {model['type']}, not BPE")
    if fields["normalizer"]:  # such as NFC, which leaves the sample as it is
        raise ValueError("it changes the text before it splits it")
    vocab = model["vocab"]
    merged = dict.fromkeys(left + right for left, right in model["merges"])  # in order, each token once
    pat_str = pattern_from_fields(fields["pre_tokenizer"] or {}, merged)
    if list(merged) != sorted(merged, key=vocab.get):  # tiktoken merges in the order of the ids
        raise ValueError("its ids are not in the order of its merges")
    special_tokens = {token["content"]: token["id"] for token in fields["added_tokens"]}
    # no text ever becomes a token that is longer than a byte and not merged
    special_tokens |= {token: i for token, i in vocab.items() if len(token) > 1 and token not in merged}
    char_bytes = {char: byte for byte, char in tokenizer.byte_chars().items()}
    words = sorted(vocab.keys() - special_tokens.keys(), key=vocab.get)
    ranks = {bytes(char_bytes[char] for char in word): vocab[word] for word in words}
    enc = tokenizer.make_encoding("", pat_str, ranks, special_tokens)
    digest = tokenizer.digest(enc)
    return tokenizer.copy_encoding(enc, "gpt2" if digest == GPT2_DIGEST else f"hf-{digest[:8]}", special_tokens)


def pattern_from_fields(pre_tokenizer, merged):
    """Return the pattern by which a tokenizer.json's pre_tokenizer splits text before anything is `merged`."""
    match pre_tokenizer.get("pretokenizers", [pre_tokenizer]):
        case [{"type": "ByteLevel", "use_regex": True}]:
            return tokenizer.FAST_GPT2
        case [{"type": "ByteLevel"}] if not merged:
            return tokenizer.BYTES
        case [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}, {"use_regex": False}]:
            return tokenizer.FAST_GPT2 if pattern == tokenizer.PATTERNS["gpt2"] else pattern
    raise ValueError("it is not byte-level, or does not split text by one pattern")
