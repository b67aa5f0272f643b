"""contamination.py: what it finds is what a comparison of all 13-grams finds, wherever the shards begin and end."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from conftest import ROOT, SHARED, refusal_of

import contamination
from fineweb import Options, prepare

needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="no ../shared/data beside the repository")


def script(*args):
    """`python contamination.py ...` as a user runs it."""
    command = [sys.executable, str(ROOT / "contamination.py"), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def make(tmp_path, path, name, **options):
    return prepare(Options(input=(path,), out_dir=str(tmp_path / name), tokenizer="gpt2", **options))


def read(folder):
    """All tokens of a folder in the order of the shards' numbers, read with numpy and nothing of ours."""
    files = sorted(Path(folder).glob("*.npy"), key=lambda path: path.stem[-6:])
    return np.concatenate([np.load(file, allow_pickle=False) for file in files])


def naive_contamination(examples, tokens):
    """The examples that have 13 tokens in a row in common with `tokens`, by comparing Python tuples."""
    runs = {tuple(tokens[i : i + 13]) for i in range(len(tokens) - 12)}
    enc = tiktoken.get_encoding("gpt2")
    found = set()
    for number, example in enumerate(examples, 1):
        for ending in example["endings"]:
            ids = enc.encode_ordinary(f"{example['ctx']} {ending}")
            if any(tuple(ids[i : i + 13]) in runs for i in range(len(ids) - 12)):
                found.add(number)
    return found


@needs_shared
def test_planted_contamination_is_found_and_clean_text_is_not(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(contamination, "TABLE_BITS", 12)  # nearly every token gets a second look
    with open(SHARED / "hellaswag_val.jsonl", encoding="utf-8") as file:
        examples = [json.loads(line) for _, line in zip(range(60), file)]
    play = (SHARED / "tinyshakespeare.txt").read_text()
    texts = [play[1000 * i : 1000 * i + 1000] for i in range(60)]
    for i in range(0, 60, 7):  # a whole example, in the middle of a document
        texts[i] += f" {examples[i]['ctx']} {examples[i]['endings'][examples[i]['label']]} {play[-500:]}"
    enc = tiktoken.get_encoding("gpt2")
    texts[1] += " " + enc.decode(enc.encode_ordinary(" " + examples[1]["ctx"])[:12]) + " ~ "  # twelve are too few
    evaluation = tmp_path / "eval.jsonl"
    evaluation.write_text("".join(json.dumps(example) + "\n" for example in examples))
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    # shards of 40 tokens: nearly every planted run begins in one shard and ends in the next
    for name, size in (("one", 10**6), ("many", 40)):
        folder = make(tmp_path, path, name, shard_size=size)
        found = contamination.report(folder, evaluation)
        # neighbours in the file often have their context in common, hence more than were planted
        assert set(found) == naive_contamination(examples, read(folder).tolist()) >= set(range(1, 61, 7))
        assert 2 not in found and len(found) < 20
        assert f"{len(found)} of 60 examples ({len(found) / 60:.2%})" in capsys.readouterr().out
    clean = make(tmp_path, write_jsonl(tmp_path / "clean.jsonl", [play[:200_000]]), "clean")
    assert contamination.report(clean, evaluation) == {}
    (Path(clean) / "meta.json").unlink()  # as build-nanogpt's shards have none
    assert contamination.report(clean, evaluation) == {}
    # the words of the report come from the real command
    done = script("--data", tmp_path / "one", "--eval", evaluation)
    assert done.returncode == 0 and "line 1:" in done.stdout and "10B tokens would take" in done.stdout


def test_bad_input_is_one_line_and_status_2(tmp_path):
    np.save(tmp_path / "x_val_000000.npy", np.zeros(20, np.uint16))
    (tmp_path / "meta.json").write_text('{"tokenizer": "bytes"}')
    lines = {"text.jsonl": '{"text": "a"}', "short.jsonl": '{"ctx": "a", "endings": ["b"]}', "broken.jsonl": "{"}
    for name, line in lines.items():
        (tmp_path / name).write_text(line + "\n")
    cases = [
        (tmp_path / "none", "text.jsonl", "no shards in"),
        (tmp_path, "text.jsonl", "Line 1 of"),
        (tmp_path, "broken.jsonl", "is not valid JSON"),
        (tmp_path, "short.jsonl", "13 tokens"),
        (tmp_path, "missing.jsonl", "missing.jsonl"),
    ]
    for folder, name, words in cases:
        status, stdout, stderr = refusal_of(contamination.main, "--data", folder, "--eval", tmp_path / name)
        assert (status, stdout) == (2, ""), stderr
        assert stderr.startswith("error: ") and stderr.count("\n") == 1 and words in stderr, stderr
