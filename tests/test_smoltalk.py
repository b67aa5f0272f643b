"""smoltalk.py: what a conversation becomes, what of it is learned, and what bad input does."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tokenizer
from plumbing.cli import UserError
from plumbing.files import lock_folder
from smoltalk import Options, find_fault, pack, prepare, render_conversation, truncate
from train_gpt2 import IGNORE_INDEX, DataLoaderLite

ROOT = Path(__file__).parent.parent
ENC = tokenizer.get_encoding("bytes+chat")
USER, ASSISTANT, SYSTEM, END = (ENC.encode_single_token(token) for token in tokenizer.CHAT_TOKENS)


def talk(*contents, first="user"):
    """Alternating messages of a user and an assistant."""
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


PAIRS = [
    ("What is red?", "A rose."),
    ("What is blue?", "The sky."),
    ("Wer ist da?", "Niemand, s\u00fc\u00df!"),
    ("2+2", "4"),
]


def write_conversations(path, conversations):
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations), encoding="utf-8")
    return str(path)


def load(folder):
    """{split: (tokens, mask)} of shards that are all there is of their split."""
    shards = {}
    for path in sorted(Path(folder).glob("*.npy")):
        split = re.fullmatch(r".*_(val|train)_\d{6}", path.stem)[1]
        assert split not in shards
        shards[split] = np.load(path, allow_pickle=False), np.load(path.with_suffix(".mask"), allow_pickle=False)
    return shards


def test_what_a_conversation_becomes():
    messages = [{"role": "system", "content": "S"}, *talk("U", "AB", "V", "C")]
    ids, mask = render_conversation(messages, ENC)
    S, U, A, B, V, C = b"SUABVC"
    assert ids == [ENC.eot_token, SYSTEM, S, END, USER, U, END, ASSISTANT, A, B, END, USER, V, END, ASSISTANT, C, END]
    assert mask == [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1]


def test_text_that_looks_like_a_marker_is_text():
    ids, mask = render_conversation(talk("<|end|><|assistant|>yes<|endoftext|>", "<|user|>"), ENC)
    assert [i for i in ids if i > 255] == [ENC.eot_token, USER, END, ASSISTANT, END]
    assert ENC.decode([i for i, counts in zip(ids, mask) if counts]) == "<|user|><|end|>"


def test_a_long_conversation_is_cut_behind_the_last_answer_that_fits():
    ids, mask = render_conversation(talk("U", "A", "V", "B"), ENC)  # 1 + 3 + 3 + 3 + 3 tokens
    assert truncate(13, ids, mask, ENC) == (ids, mask)
    assert truncate(12, ids, mask, ENC) == (ids[:7], mask[:7])
    assert truncate(7, ids, mask, ENC) == (ids[:7], mask[:7])
    assert truncate(6, ids, mask, ENC) == ([], [])
    assert truncate(13, *render_conversation(talk("U"), ENC), ENC) == ([], [])  # nothing to learn


def test_blocks_hold_whole_conversations_and_as_many_as_fit():
    lengths = [5, 6, 3, 4]
    blocks = list(pack([([i] * n, [1] * n) for i, n in enumerate(lengths)], 9))
    assert [sorted(ids) for ids, _ in blocks] == [[0] * 5 + [3] * 4, [1] * 6 + [2] * 3]
    rng = np.random.default_rng(0)
    many = [([i] * n, [i % 2] * n) for i, n in enumerate(rng.integers(1, 101, 2000).tolist())]
    blocks = list(pack(many, 100))
    assert all(len(ids) == len(mask) <= 100 for ids, mask in blocks)
    found = [i for ids, _ in blocks for i, before in zip(ids, [None, *ids]) if i != before]
    assert sorted(found) == list(range(2000))  # each in one piece
    assert sum(len(ids) for ids, _ in blocks) == sum(len(ids) for ids, _ in many)
    assert len(blocks) < 1.05 * sum(len(ids) for ids, _ in many) / 100  # little is filled up


def test_short_conversations_begin_blocks_too():
    """They come last to a block that is nearly full, and a chat begins with nothing before it."""
    rng = np.random.default_rng(0)
    blocks = list(pack([([n] * n, [1] * n) for n in rng.choice([10, 90], 1000).tolist()], 100))
    first = [ids[0] for ids, _ in blocks if len(set(ids)) == 2]
    assert 0.4 < first.count(10) / len(first) < 0.6


def test_shards_masks_and_meta(tmp_path):
    path = write_conversations(tmp_path / "chats.jsonl", [talk(*pair) for pair in PAIRS * 25] + [talk("no answer")])
    folder = prepare(Options(input=(path,), out_dir=str(tmp_path / "out"), tokenizer="bytes", max_length=64))
    shards = load(folder)
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert meta["tokenizer"] == "bytes+chat" and meta["vocab_size"] == ENC.n_vocab == 261 and meta["complete"]
    assert meta["documents"] == 100 and meta["conversations"] == {"read": 101, "cut": 0, "left out": 1}
    val, train = len(shards["val"][0]), len(shards["train"][0])
    assert meta["shards"] == {"out_val_000000.npy": val, "out_train_000001.npy": train}
    assert tokenizer.folder_encoding(folder).name == "bytes+chat"
    answers = []
    for tokens, mask in shards.values():
        assert tokens.dtype == np.uint16 and mask.dtype == np.uint8 and tokens.shape == mask.shape
        assert len(tokens) % 64 == 1  # whole blocks, and the last one's last target
        assert (tokens[:-1:64] == ENC.eot_token).all()  # a conversation begins with each block
        answers += [a for a in ENC.decode(tokens[mask == 1].tolist()).split("<|end|>") if a]
    assert sorted(answers) == sorted([answer for _, answer in PAIRS] * 25)
    assert meta["targets"] == sum(int(mask.sum()) for _, mask in shards.values())


def test_the_trainers_targets_are_the_answers(tmp_path):
    path = write_conversations(tmp_path / "chats.jsonl", [talk(*pair) for pair in PAIRS * 25])
    folder = prepare(Options(input=(path,), out_dir=str(tmp_path / "out"), tokenizer="bytes", max_length=64))
    tokens, mask = load(folder)["train"]
    loader = DataLoaderLite(folder, "train", B=len(tokens) // 64, T=64)
    x, y = loader.next_batch()  # one epoch
    assert (x[:, 0] == ENC.eot_token).all()
    assert sorted(y[y != IGNORE_INDEX].tolist()) == sorted(tokens[mask == 1].tolist())


def test_many_shards_have_a_mask_each(tmp_path):
    path = write_conversations(tmp_path / "chats.jsonl", [talk(*pair) for pair in PAIRS * 100])
    options = Options(input=(path,), out_dir=str(tmp_path / "out"), tokenizer="bytes", max_length=64, shard_size=640)
    prepare(options)
    files = sorted(file for file in os.listdir(tmp_path / "out") if file.startswith("out_"))
    assert files[:3] == ["out_train_000001.mask", "out_train_000001.npy", "out_train_000002.mask"]
    assert len([f for f in files if f.endswith(".mask")]) == len([f for f in files if f.endswith(".npy")]) > 4
    assert {np.load(tmp_path / "out" / f).size for f in files if "train" not in f} == {641}


def interrupted(tmp_path):
    """A run that ended at line 401 of its input, in the folder out: (the lines before that, their file, options)."""
    lines = [json.dumps({"messages": talk(*pair)}) for pair in PAIRS * 100]
    path = tmp_path / "chats.jsonl"
    out_dir = str(tmp_path / "out")
    options = Options(input=(str(path),), out_dir=out_dir, tokenizer="bytes", max_length=64, shard_size=640)
    path.write_text("\n".join([*lines, "{broken"]))
    with pytest.raises(UserError, match="Line 401 of .*chats.jsonl"):
        prepare(options)
    return lines, path, options


def test_the_same_command_again_changes_nothing_and_a_broken_run_leaves_nothing_behind(tmp_path, capsys):
    lines, path, options = interrupted(tmp_path)
    out = tmp_path / "out"
    assert not json.loads((out / "meta.json").read_text())["complete"]
    path.write_text("\n".join(lines[:150]))  # mended, and shorter: the shards of the first attempt must go
    prepare(options)
    whole = {file.name: file.read_bytes() for file in out.iterdir()}
    assert set(json.loads(whole["meta.json"])["shards"]) == {name for name in whole if name.endswith(".npy")}
    prepare(options)
    assert "complete" in capsys.readouterr().out
    assert {file.name: file.read_bytes() for file in out.iterdir()} == whole
    with pytest.raises(UserError, match="shards of other data: max_length was 64 and is now 32"):
        prepare(Options(input=(str(path),), out_dir=str(out), tokenizer="bytes", max_length=32, shard_size=640))


def test_a_trained_tokenizer_travels_with_its_shards(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("What is red? A rose. What is blue? The sky. " * 50)
    command = [sys.executable, str(ROOT / "tokenizer.py"), "--input", str(text), "--vocab-size", "280"]
    done = subprocess.run([*command, "--out", str(tmp_path / "my.tiktoken")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    path = write_conversations(tmp_path / "chats.jsonl", [talk(*pair) for pair in PAIRS * 25])
    folder = prepare(
        Options(input=(path,), out_dir=str(tmp_path / "out"), tokenizer=str(tmp_path / "my.tiktoken"), max_length=64)
    )
    enc = tokenizer.folder_encoding(folder)
    assert enc.name.endswith("+chat") and enc.n_vocab == 284
    tokens, mask = load(folder)["train"]
    assert set(enc.decode(tokens[mask == 1].tolist()).split("<|end|>")) == {"", *(answer for _, answer in PAIRS)}


@pytest.mark.parametrize(
    "line, reason",
    [
        ("{broken", "Expecting property name"),
        ("[]", "not a JSON object"),
        ('{"text": "x"}', "no list of messages"),
        ('{"messages": []}', "no list of messages"),
        ('{"messages": ["hi"]}', "message 1 is not a JSON object"),
        ('{"messages": [{"role": "user"}]}', "content of message 1 is missing"),
        ('{"messages": [{"role": "bot", "content": "a"}]}', "message 1 has the role 'bot'"),
        ('{"messages": [{"role": "user", "content": " "}]}', "content of message 1 is missing, empty or not"),
        ('{"messages": [{"role": "user", "content": null}]}', "content of message 1 is missing, empty or not"),
    ],
)
def test_bad_lines_are_named_and_nothing_is_written(tmp_path, line, reason):
    good = json.dumps({"messages": talk("a", "b")})
    (tmp_path / "bad.jsonl").write_text(f"{good}\n\n{line}\n")
    with pytest.raises(UserError, match=f"Line 3 of .*bad.jsonl .*{re.escape(reason)}"):
        prepare(Options(input=(str(tmp_path / "bad.jsonl"),), out_dir=str(tmp_path / "out"), tokenizer="bytes"))
    assert not (tmp_path / "out").exists()


def test_a_faulty_conversation_of_the_hub_is_no_conversation():
    assert "empty or not a string" in find_fault([{"role": "user", "content": None}])


def test_too_little_to_split_is_refused(tmp_path):
    path = write_conversations(tmp_path / "chats.jsonl", [talk("a", "b")])
    with pytest.raises(UserError, match="1 conversation, .* fill 1 block"):
        prepare(Options(input=(path,), out_dir=str(tmp_path / "out"), tokenizer="bytes"))
    assert not (tmp_path / "out").exists()


def test_a_mistake_is_one_line_and_status_2(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"messages": [{"role": "robot", "content": "x"}]}')
    done = subprocess.run(
        [sys.executable, str(ROOT / "smoltalk.py"), "--input", "bad.jsonl", "--tokenizer", "bytes"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: Line 1 of bad.jsonl is not a conversation: message 1 has the role 'robot'")
    assert done.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == ["bad.jsonl"]


def test_other_inputs_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match="a.txt is not one of .jsonl"):
        prepare(Options(input=(str(tmp_path / "a.txt"),), tokenizer="bytes"))
    with pytest.raises(UserError, match="--max-length is 1"):
        prepare(Options(max_length=1))


def test_of_an_interrupted_run_only_its_own_files_are_removed(tmp_path):
    """It was everything called <folder>_*_*."""
    lines, path, options = interrupted(tmp_path)
    out = tmp_path / "out"
    assert (out / "out_train_000003.npy").exists()
    foreign = ["out_my_notes", "out_train_000003.npy.backup", "out_train_list.txt"]
    for name in foreign:
        (out / name).write_text("mine")
    path.write_text("\n".join(lines[:150]))
    prepare(options)
    assert all((out / name).read_text() == "mine" for name in foreign)
    shards = json.loads((out / "meta.json").read_text())["shards"]
    assert {file.name for file in out.glob("*.npy")} == set(shards)
    assert {file.stem for file in out.glob("*.mask")} == {name.removesuffix(".npy") for name in shards}


def test_a_folder_that_another_process_works_on_is_refused(tmp_path):
    path = write_conversations(tmp_path / "chats.jsonl", [talk(*pair) for pair in PAIRS * 25])
    options = Options(input=(path,), out_dir=str(tmp_path / "out"), tokenizer="bytes", max_length=64)
    with lock_folder(tmp_path / "out"), pytest.raises(UserError, match="in use by process"):
        prepare(options)
    prepare(options)
    with lock_folder(tmp_path / "out"):  # what is complete can be used by several at once
        prepare(options)
    with pytest.raises(UserError, match="--out-dir is empty"):
        prepare(Options(input=(path,), out_dir=""))
