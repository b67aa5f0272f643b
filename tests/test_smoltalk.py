"""smoltalk.py: what a conversation becomes, what of it is learned, and what bad input does."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
import smoltalk
import torch
import train_gpt2
from plumbing.data import preparation, tokenizers
from plumbing.data.tokenizers import render_conversation
from plumbing.data.windows import Folder
from plumbing.run import models
from smoltalk import Options, pack, prepare

from corpora import kill_again_and_again, read_meta, write, write_rows
from harness import (
    TINY,
    change_meta,
    listing,
    patched,
    printed_commands,
    refused,
    refused_run,
    status_of,
    talk,
    tiny_flags,
)

ENC = tokenizers.get_encoding("bytes+chat")
USER, ASSISTANT, SYSTEM, END = range(257, 261)


def prepare_rows(rows, name="chats.jsonl", **changes):
    """Make shards of a file with these rows. Returns the folder."""
    settings = dict(input=(str(write_rows(name, rows)),), out_dir="out", tokenizer="bytes", max_length=64)
    return Path(prepare(Options(**settings | changes)))


def chats_of(count):
    """So many rows of a question and an answer."""
    return [{"messages": talk(f"Q{i}", f"A{i}")} for i in range(count)]


def read_chats(folder, split):
    """The conversations in a split, as texts. Every window of 64 tokens must begin with one."""
    chats = []
    for path in sorted(folder.glob(f"*_{split}_*.npy")):
        tokens = np.load(path)
        assert len(tokens) % 64 == 1  # whole blocks, and the last one's last target
        assert (tokens[:-1:64] == ENC.eot_token).all()
        text = ENC.decode(tokens.tolist())
        for chat in text.split("<|endoftext|>")[1:]:
            chats.append(re.sub(r"(<\|end\|>)+$", "<|end|>", chat))
    return chats


def all_chats(folder):
    """The conversations in both splits, sorted."""
    return sorted(read_chats(folder, "val") + read_chats(folder, "train"))


def message(role, content, **keys):
    return {"role": role, "content": content, **keys}


def as_text(*contents):
    """A conversation as `read_chats` returns it."""
    return "".join(f"<|{message['role']}|>{message['content']}<|end|>" for message in talk(*contents))


def texts_of(numbers):
    """These conversations of `chats_of`, as `all_chats` returns them."""
    return sorted(as_text(f"Q{i}", f"A{i}") for i in numbers)


def learned_in(folder):
    """The texts that count, each up to the end of an answer, sorted."""
    texts = []
    for path in folder.glob("*.npy"):
        tokens = np.load(path)
        mask = np.load(path.with_suffix(".mask"))
        learned = ENC.decode(tokens[mask == 1].tolist())
        texts += learned.split("<|end|>")[:-1]
    return sorted(texts)


# ----- A conversation -----------------------------------------------------------------------------------


def test_what_a_conversation_becomes():
    """Text that looks like a marker stays text."""
    messages = [message("system", "S"), *talk("<|end|><|assistant|>yes<|endoftext|>", "AB", "V", "<|user|>")]
    ids, mask, _ = render_conversation(messages, ENC)
    assert ENC.decode(ids) == (
        "<|endoftext|><|system|>S<|end|><|user|><|end|><|assistant|>yes<|endoftext|><|end|><|assistant|>AB<|end|>"
        "<|user|>V<|end|><|assistant|><|user|><|end|>"
    )
    markers = [SYSTEM, END, USER, END, ASSISTANT, END, USER, END, ASSISTANT, END]
    assert [i for i in ids if i > 255] == [ENC.eot_token, *markers]
    learned = np.array(ids)[np.array(mask) == 1]
    assert ENC.decode(learned.tolist()) == "AB<|end|><|user|><|end|>"


@pytest.mark.parametrize("most, stop", [(6, 0), (7, 7), (12, 7), (13, 13)])
def test_a_long_conversation_is_cut_behind_the_last_answer_that_fits(most, stop):
    messages = talk("U", "A", "V", "B", "W", "C")  # the first token, and 3 for each
    assert render_conversation(messages, ENC, most)[2] == stop


def test_blocks_hold_whole_conversations_and_little_is_filled_up():
    lengths = np.random.default_rng(0).integers(1, 101, 2000)
    blocks = list(pack(lengths.tolist(), 100))
    assert sorted(sum(blocks, [])) == list(range(2000))
    assert all(lengths[block].sum() <= 100 for block in blocks)
    assert len(blocks) < 1.05 * lengths.sum() / 100


def test_short_conversations_also_begin_blocks():
    lengths = [10, 90] * 500
    blocks = list(pack(lengths, 100))
    assert len(blocks) == 500
    first = [lengths[block[0]] for block in blocks]
    assert 200 < first.count(10) < 300


# ----- Shards -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 11, 300])
@pytest.mark.parametrize("shard_size", [1000, 20_000_000])
def test_every_conversation_is_whole_in_one_split_and_its_answer_learned(count, shard_size, output):
    folder = prepare_rows(chats_of(count), shard_size=shard_size)
    assert all_chats(folder) == texts_of(range(count))
    assert 1 <= len(read_chats(folder, "val")) <= max(1, count / 10)
    answers = [f"A{i}" for i in range(count)]
    assert learned_in(folder) == sorted(answers)
    assert f"{len(''.join(answers)) + count:,} tokens are targets" in output()
    meta = read_meta(folder)
    assert meta == meta | dict(documents=count, tokenizer="bytes+chat", vocab_size=261, complete=True)
    assert Folder(folder).enc.name == "bytes+chat"


def prepare_odd(name):
    """Shards of conversations of which some are left out, some cut, and some not to be learned, in two files."""
    rows = chats_of(130)
    for i in range(0, 127, 7):
        rows[i]["messages"].insert(0, message("tool", "x"))
        rows[i]["mood"] = "bad"
        rows[i + 1]["messages"] += talk("and?", "B" * 60)
        rows[i + 2]["messages"].append(message("assistant", "C", weight=0))
        rows[i + 3]["messages"].pop()
    write_rows("b.jsonl", rows[65:])
    with patched(preparation, "BATCH_BYTES", 1000):
        return prepare_rows(rows[:65], "a.jsonl", input=("[ab].jsonl",), out_dir=f"{name}/out", shard_size=200)


def test_after_kills_the_same_command_ends_with_the_same_bytes_and_notes(output):
    whole = listing(prepare_odd("whole"))
    _, said = output().split("\nin ")
    said = said.partition("Next")[0]
    assert "messages to and from tools left out" in said
    assert "answers not learned" in said
    assert "conversations cut after the last answer that fits" in said
    assert "rows left out. Line 4 of" in said
    assert "\nnot read: mood (" in said
    kill_again_and_again(prepare_odd, "killed")
    assert listing(prepare_odd("killed")) == whole
    assert said in output()
    os.truncate("killed/out/out_train_000003.mask", 100)
    assert listing(prepare_odd("killed")) == whole


@pytest.mark.parametrize("gone", ["*.mask", "*_val_*.mask", "*_train_000002.mask"])
def test_chats_without_their_masks_are_not_trained_on(gone):
    """They were trained on, to say the user's words."""
    folder = prepare_odd("one")
    for mask in folder.glob(gone):
        mask.unlink()
    if gone == "*_val_*.mask":  # a meta.json made by hand need not mention masks
        change_meta(folder, masks=False)
    refused_run(dict(data=folder, out_dir="log"), ".mask is missing or damaged")
    assert not Path("log").exists()


@pytest.mark.gpt2
def test_the_command_that_is_printed_fine_tunes_the_model(output, data):
    assert status_of(train_gpt2.main, tiny_flags(data, "start", max_steps=4)) == 0
    folder = prepare_rows(chats_of(100), out_dir="chats", tokenizer="", init_from="start", max_length=0)
    assert read_meta(folder)["made_from"]["max_length"] == TINY["block_size"]
    words = printed_commands(output())[-1]
    assert words[2:4] == ["--preset", "quickstart"]
    assert status_of(train_gpt2.main, [*words[2:], "--max-steps", "2", "--warmup-steps", "0"]) == 0
    assert Path("log/chats/hf").exists()


def test_gpt2_is_fine_tuned_at_chats_rate(output, monkeypatch):
    weights = {"w": torch.zeros(1).expand(124_439_808)}
    model = models.SavedModel({"block_size": 64}, weights, lambda: ENC)
    monkeypatch.setattr(models, "load_saved_model", lambda source: model)
    prepare_rows(chats_of(20), tokenizer="", init_from="model")
    assert printed_commands(output())[-1][2:4] == ["--preset", "chat"]


# ----- What is read of a row ----------------------------------------------------------------------------

NO_MESSAGES = "is not a conversation: it has no list of messages or conversations, and no instruction."
NO_CONTENT = "is not a conversation: message 1 needs"
UNUSABLE = [
    ({"text": "x"}, NO_MESSAGES),
    ({"messages": "no JSON"}, NO_MESSAGES),
    ([message("user", [{"type": "image_url"}])], NO_CONTENT),
    ([message("user", " ")], NO_CONTENT),
    (talk("a"), "has no answer by the assistant"),
    (talk("a", "b" * 64), "needs a --max-length above 64 for its first answer"),
    ([message("assistant", "a", weight=0)], "has no answer to learn"),
    ([message("assistant", "a", weight=0.5)], "has weight 0.5 in a message"),
    (3, "is not an object, but 3"),
]
for flag in smoltalk.FLAGS:
    part = {"type": "text", "text": "wrong", flag: 0}
    UNUSABLE.append((talk("a", [part]), "has a message with a part that is not to be learned."))


@pytest.mark.parametrize("row, reason", UNUSABLE)
def test_a_row_that_is_no_conversation_is_left_out(row, reason, output):
    folder = prepare_rows([*chats_of(24), row])
    assert read_meta(folder)["documents"] == 24
    assert f"note: 1 row left out. Line 25 of chats.jsonl {reason}" in output()


UA = talk("U\n\nV", "A")
SUA = [message("system", "S"), *UA]
PARTS = [{"type": "text", "text": "U\n\n"}, {"type": "text", "text": "V"}]
SHAREGPT = [{"from": "human", "value": "U\n\nV"}, {"from": "gpt", "value": "A"}]
ALPACA = {"instruction": "U", "input": "V", "output": "A"}
WITHOUT_SYSTEM = [
    UA,
    [message("User", "U\n\nV"), message("model", "A")],
    {"messages": talk(PARTS, "A")},
    [message("system", ""), *UA],
    {"messages": None, "conversations": [], **ALPACA},
    {"messages": None, "conversations": SHAREGPT},
    {"messages": UA, "conversations": talk("x", "y")},
    {"instruction": "x", "response": "y", "conversations": SHAREGPT},
    [message(None, None, **each) for each in SHAREGPT],  # as tables merge them
    ALPACA | {"system": "", "history": "[]"},
    {"instruction": "U\n\nV", "input": "", "output": "A"},
]
WITH_SYSTEM = [
    {"conversations": [{"from": "system", "value": "S"}, *SHAREGPT]},
    [message("developer", "S"), *UA],
    {"conversations": SHAREGPT, "system": "S", "history": None},
    ALPACA | {"system_prompt": "S"},
    {"messages": SUA, "system": "S"},
]


@pytest.mark.parametrize("row", WITHOUT_SYSTEM + WITH_SYSTEM)
def test_every_format_is_read(row):
    folder = prepare_rows([row, row])
    system = "<|system|>S<|end|>" * (row in WITH_SYSTEM)
    assert set(all_chats(folder)) == {system + as_text("U\n\nV", "A")}


# what is not read: (keys of a row, keys of its answer, the names in the last line)
UNREAD = [
    ({"deleted": True, "id": 7, "source": "", "label": False, "score": 0}, {}, "deleted id label score"),
    ({"instruction": "I", "output": "O", "conversations": SHAREGPT}, {}, "instruction output conversations"),
    ({"system": "S", "system_prompt": "T"}, {}, "system_prompt"),
    ({}, {"quality": "bad", "name": None, "value": "Q"}, "quality value"),
    ({}, {"content": [{"type": "text", "text": "A", "cut": 1}]}, "cut"),
]


@pytest.mark.parametrize("in_row, in_answer, names", UNREAD)
def test_what_is_not_read_of_a_conversation_is_counted(in_row, in_answer, names, output):
    rows = chats_of(24)
    for row in rows:
        row.update(in_row)
        row["messages"][1].update(in_answer)
    prepare_rows(rows)
    said = output()
    counted = ", ".join(f"{name} (24 values)" for name in names.split())
    assert f"\nnot read: {counted}\n" in said
    assert "note:" not in said


def test_of_very_many_keys_the_first_are_named(output):
    rows = chats_of(100)
    for number, row in enumerate(rows):
        row[f"key {number}"] = 1
    prepare_rows(rows)
    assert "key 29 (1 value), other keys (70 values)\n" in output()


# marks of a bad or masked answer: (its place, its name, its value, the value that says nothing)
MARKS = [
    ("row", "kto_tag", False, True),
    ("row", "loss_mask", [0, 1], [1, 1]),
    ("answer", "trainable", False, True),
    ("answer", "loss_mask", 0, 1),
    ("answer", "train_detail", [{"begin_offset": 0}], None),
    ("answer", "training_detail", [{"begin_offset": 0}], None),
]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.csv"])
@pytest.mark.parametrize("place, mark, bad, good", MARKS)
def test_rows_whose_answers_are_marked_as_bad_are_left_out(name, place, mark, bad, good, output):  # fmt: skip
    """They were learned without a word."""
    rows = chats_of(24)
    for number, row in enumerate(rows):
        marked = row if place == "row" else row["messages"][1]
        marked[mark] = good if number % 2 else bad
    folder = prepare_rows(rows, name)
    assert all_chats(folder) == texts_of(range(1, 24, 2))
    said = output()
    assert "note: 12 rows left out." in said
    assert f"has {mark} " in said
    assert "not read" not in said


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
@pytest.mark.parametrize(
    "key, role", [("tool_calls", "tool"), ("function_call", "function"), ("tool_calls", "observation")]
)
def test_messages_to_and_from_tools_and_without_an_answer_are_left_out(name, key, role, output):
    rows = chats_of(24)
    call = message("assistant", None, **{key: [{"name": "f"}]})
    rows[5]["messages"][1:] = [call, message(role, "21 degrees"), message("assistant", "A5"), message("user", "?")]
    folder = prepare_rows(rows, name)
    assert all_chats(folder) == texts_of(range(24))
    said = output()
    assert "note: 2 messages to and from tools left out.\n" in said
    assert "note: 1 message after the last answer left out.\n" in said
    assert "cut" not in said


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
@pytest.mark.parametrize("flag", smoltalk.FLAGS)
@pytest.mark.parametrize("no", [0, False])
def test_an_answer_that_is_not_to_be_learned_is_no_target(name, flag, no, output):
    chat = talk("Q", "wrong", "Q", "right")
    chat[1][flag] = no
    chat[2][flag] = no  # a question is never learned
    chat[3][flag] = type(no)(1)
    folder = prepare_rows([{"messages": chat}] * 24, name)
    assert all_chats(folder) == [as_text("Q", "wrong", "Q", "right")] * 24
    assert learned_in(folder) == ["right"] * 24
    assert "note: 24 answers not learned, as weight or train says." in output()


@pytest.mark.parametrize(
    "words, reason",
    [
        (["a.txt"], f"No row can be used. Piece 1 of a.txt {NO_MESSAGES} A row needs messages (role and content)"),
        (["one.jsonl"], "One conversation is not enough: another is needed to validate on. Add more."),
        (["one.jsonl", "--init-from", "x"], "leave --tokenizer out"),
        (["one.jsonl", "--out-dir", ""], "--out-dir: its value is empty"),
    ],
)
def test_bad_input_is_refused_in_one_line(words, reason):
    write("a.txt", "x")
    write_rows("one.jsonl", chats_of(1))
    assert reason in refused(smoltalk.main, "--tokenizer", "bytes", "--input", *words)
    assert sorted(os.listdir()) == ["a.txt", "one.jsonl"]
