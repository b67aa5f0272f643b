"""contamination.py: what it finds is what a comparison of all 13-grams finds, wherever the shards begin and end."""

import random
import re
from pathlib import Path

import contamination
import numpy as np
import pytest
from plumbing.data import tokenizers

from corpora import corpus, make_here, read, train_small, write, write_rows, write_texts
from harness import change_meta, make_shards, refused


def grams(tokens):
    """All runs of 13 tokens."""
    return {tuple(tokens[i : i + 13]) for i in range(len(tokens) - 12)}


# of shards of 20 tokens, most of the quoted runs begin in one shard and end in another
@pytest.mark.parametrize("shard_size", [10**6, 20])
def test_what_is_found_is_what_a_comparison_of_all_runs_finds(shard_size, monkeypatch):
    """Some texts quote an example, whole or in part."""
    monkeypatch.setattr(contamination, "TABLE_BITS", 12)  # nearly every token gets a second look
    monkeypatch.setattr(contamination, "BLOCK", 50)
    enc = train_small("gpt2")
    tokenizers.write_encoding(enc, "small.tiktoken")
    rng = random.Random(0)
    words = sorted(filter(str.isalpha, " ".join(corpus()).split()))

    def nonsense(count):
        """Words in an order that does not occur twice."""
        return " ".join(rng.choice(words) for _ in range(count))

    texts = [nonsense(30) for _ in range(60)]
    examples = [{"ctx": nonsense(20), "endings": [nonsense(9) for _ in range(4)]} for _ in range(60)]
    for i in range(0, 58, 7):
        whole = f"{examples[i]['ctx']} {examples[i]['endings'][i % 4]}"
        texts[i] += f" {whole} {nonsense(9)}"
        part = " ".join(examples[i + 2]["ctx"].split()[:5])  # some 16 tokens
        texts[i + 2] += f" {part} {nonsense(9)}"
    path = write_texts("texts.jsonl", texts)
    shards = make_here(path, tokenizer="small.tiktoken", shard_size=shard_size)
    found = set(contamination.report(shards, write_rows("eval.jsonl", examples)))
    known = grams(read(shards).tolist())
    expected = set()
    for number, example in enumerate(examples, 1):
        for ending in example["endings"]:
            ids = enc.encode_ordinary(f"{example['ctx']} {ending}")
            if known & grams(ids):
                expected.add(number)
    assert found == expected
    assert found >= set(range(1, 59, 7))


@pytest.fixture
def byte_shards():
    """Three shards of bytes in the current folder."""
    texts = {
        "val_000000": b"It is the same fou",
        "train_000001": b"rteen letters, rteen letters",
        "train_000002": b"the same four, the same fourteen",
    }
    for name, text in texts.items():
        np.save(f"x_{name}.npy", np.frombuffer(text, np.uint8).astype(np.uint16))
    write("meta.json", '{"tokenizer": "bytes"}')


def test_the_longest_overlaps_are_shown_first_and_where_each_begins(byte_shards, output, monkeypatch):
    monkeypatch.setattr(contamination, "BLOCK", 4)
    examples = [
        {"ctx": "the same", "endings": ["four cats", "fourteen hats"]},
        {"ctx": "rteen", "endings": ["letters"]},
        {"ctx": "It is the same", "endings": ["fourteen letters"]},
        {"ctx": "Another", "endings": ["example"]},
    ]
    Path("hellaswag").mkdir()
    write_rows("hellaswag/hellaswag_val.jsonl", examples)  # where the program looks for itself
    contamination.main(["--data", "."])
    said = output()
    assert "\n3 of 4 examples (75.00%) share 13 or more" in said
    assert re.findall(r"line (\d): (\d+) tokens", said) == [("3", "31"), ("1", "18"), ("2", "13")]
    assert "13 tokens, the first 13 of them in x_train_000001.npy at 0: 'rteen letters'" in said
    assert "18 tokens, the first 13 of them in x_val_000000.npy at 6: 'the same fourteen '" in said
    assert "note: 13 bytes in a row are often the same by chance" in said


@pytest.mark.parametrize("split, length", [("train", 18), ("val", 14)])
def test_a_folder_may_lack_a_split(split, length, byte_shards):
    """Of "It is the same four cats", the other one has "It is the same fou" or " the same four"."""
    for path in Path().glob(f"x_{split}_*"):
        path.unlink()
    path = write_rows("eval.jsonl", [{"ctx": "It is the", "endings": ["same four cats"]}])
    assert contamination.report(".", path) == {1: length}


# {arguments: words that the line must have}
BAD_INPUTS = {
    "--data none --eval text.jsonl": "no val shards in",
    "--data half --eval text.jsonl": "are not complete",
    "--data . --eval text.jsonl": "Line 1 of",
    "--data . --eval short.jsonl": "has 13 tokens",
    "--data .": "Download HellaSwag's examples with hellaswag.py",
}


@pytest.mark.parametrize("words", BAD_INPUTS)
def test_bad_input_is_refused_in_one_line(byte_shards, words):
    change_meta(make_shards("half"), complete=False)
    write_rows("text.jsonl", [{"text": "a"}])
    write_rows("short.jsonl", [{"ctx": "a", "endings": ["b"]}])
    assert BAD_INPUTS[words] in refused(contamination.main, *words.split())
