"""contamination.py: what it finds is what a comparison of all 13-grams finds, wherever the shards begin and end."""

import json
import random

import contamination
import numpy as np
from fineweb import Options, prepare
from plumbing.data import tokenizers

from corpora import corpus, read, train_small
from harness import refused


def nonsense(rng, words, count):
    """Words in an order that does not occur twice."""
    return " ".join(rng.choice(words) for _ in range(count))


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def naive_contamination(examples, tokens, enc):
    """The examples that have 13 tokens in a row in common with `tokens`, by comparing Python tuples."""
    runs = {tuple(tokens[i : i + 13]) for i in range(len(tokens) - 12)}
    found = set()
    for number, example in enumerate(examples, 1):
        for ending in example["endings"]:
            ids = enc.encode_ordinary(f"{example['ctx']} {ending}")
            if any(tuple(ids[i : i + 13]) in runs for i in range(len(ids) - 12)):
                found.add(number)
    return found


def test_planted_contamination_is_found_and_clean_text_is_not(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(contamination, "TABLE_BITS", 12)  # nearly every token gets a second look
    monkeypatch.setattr(contamination, "BLOCK", 50)
    enc = train_small("gpt2")
    rng = random.Random(0)
    tokenizers.write_encoding(enc, tmp_path / "small.tiktoken")
    words = sorted({word for text in corpus() for word in text.split() if word.isalpha()})
    texts = [{"text": nonsense(rng, words, 30)} for _ in range(60)]
    clean = write_lines(tmp_path / "clean.jsonl", texts)
    examples = [{"ctx": nonsense(rng, words, 20), "endings": [nonsense(rng, words, 9)] * 4} for _ in range(60)]
    for i in range(0, 58, 7):  # a whole example, in the middle of a document
        texts[i]["text"] += f" {examples[i]['ctx']} {examples[i]['endings'][0]} {nonsense(rng, words, 9)}"
        part = " ".join(examples[i + 2]["ctx"].split()[:5])  # some 16 tokens
        texts[i + 2]["text"] += f" {part} {nonsense(rng, words, 9)}"
    almost = enc.decode(enc.encode_ordinary(" " + examples[1]["ctx"])[:12])  # twelve are too few
    texts[1]["text"] += f"{almost} ~ {nonsense(rng, words, 9)}"
    paths = [write_lines(tmp_path / f"{i}.jsonl", texts[i::2]) for i in range(2)]
    evaluation = write_lines(tmp_path / "eval.jsonl", examples)
    # shards of 20 tokens: most of the planted runs begin in one shard and end in another
    cases = [("one", paths, 10**6), ("many", paths, 20), ("clean", [clean], 10**6)]
    for name, inputs, size in cases:
        options = dict(tokenizer=str(tmp_path / "small.tiktoken"), shard_size=size, out_dir=str(tmp_path / name))
        folder = prepare(Options(input=tuple(inputs), **options))
        found = contamination.report(folder, evaluation)
        assert set(found) == set(naive_contamination(examples, read(folder, "*.npy").tolist(), enc))
        assert not found if name == "clean" else set(found) > set(range(1, 59, 7)) and 2 not in found
    (tmp_path / "one" / "meta.json").unlink()  # as build-nanogpt's shards have none
    capsys.readouterr()
    contamination.main(["--data", str(tmp_path / "one"), "--eval", evaluation])
    said = capsys.readouterr().out
    assert " of 60 examples (" in said
    assert "line 1:" in said
    assert "note: " not in said


def test_bad_input_is_one_line_and_status_2(tmp_path):
    np.save(tmp_path / "x_val_000000.npy", np.zeros(20, np.uint16))
    (tmp_path / "meta.json").write_text('{"tokenizer": "bytes"}', encoding="utf-8")
    write_lines(tmp_path / "text.jsonl", [{"text": "a"}])
    cases = [
        (tmp_path / "none", "text.jsonl", "no shards in"),
        (tmp_path, "text.jsonl", "Line 1 of"),
        (tmp_path, "missing.jsonl", "Download HellaSwag's examples with hellaswag.py"),
    ]
    for folder, name, words in cases:
        assert words in refused(contamination.main, "--data", folder, "--eval", tmp_path / name)


def test_a_match_of_bytes_tells_little_and_a_note_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(contamination, "BLOCK", 4)
    texts = {"val_000000": b"It is the same fou", "train_000001": b"rteen letters", "train_000002": b"the same four"}
    for name, text in texts.items():
        np.save(tmp_path / f"x_{name}.npy", np.frombuffer(text, np.uint8).astype(np.uint16))
    (tmp_path / "meta.json").write_text('{"tokenizer": "bytes"}', encoding="utf-8")
    evaluation = write_lines(tmp_path / "eval.jsonl", [{"ctx": "the same", "endings": ["fourteen hats"]}])
    assert contamination.report(tmp_path, evaluation) == {1: 18}
    said = capsys.readouterr().out
    assert "note: 13 bytes in a row are often the same by chance" in said
    assert "18 tokens, the first 13 of them in x_val_000000.npy at 6: 'the same fourteen '" in said
