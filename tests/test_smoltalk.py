"""smoltalk.py: what a conversation becomes, what of it is learned, and what bad input does."""

import csv
import dataclasses
import json
import math
import os
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import smoltalk
import train_gpt2
from plumbing.cli.console import UserError
from plumbing.data import inputs, preparation, readers, tokenizers
from plumbing.data.tokenizers import render_conversation
from smoltalk import Options, pack, prepare
from train_gpt2 import IGNORE_INDEX, DataLoaderLite

from corpora import die_at_rename, kills, read, read_meta, renamed_by
from harness import KILLED, TINY, flags, listing, printed_commands, refused, run, status_of, talk

ENC = tokenizers.get_encoding("bytes+chat")
USER, ASSISTANT, SYSTEM, END = (ENC.encode_single_token(token) for token in tokenizers.CHAT_TOKENS)


PAIRS = [
    ("What is red?", "A rose."),
    ("2+2", "4"),
    ("What is blue?", "The sky."),
    ("Wer?", "Niemand, s\u00fc\u00df!"),
]


def options_for(tmp_path, pairs=PAIRS * 25, **changes):
    """Options for making shards in `tmp_path`/out of these pairs of a question and an answer."""
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": talk(*pair)}) + "\n" for pair in pairs), encoding="utf-8")
    settings = dict(input=(str(path),), out_dir=str(tmp_path / "out"), tokenizer="bytes", max_length=64)
    return Options(**settings | changes)


def test_what_a_conversation_becomes():
    """Text that looks like a marker stays text."""
    messages = [{"role": "system", "content": "S"}, *talk("U", "AB", "V", "C")]
    ids, mask, _ = render_conversation(messages, ENC)
    S, U, A, B, V, C = b"SUABVC"
    assert ids == [ENC.eot_token, SYSTEM, S, END, USER, U, END, ASSISTANT, A, B, END, USER, V, END, ASSISTANT, C, END]
    assert mask == [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1]
    ids, mask, _ = render_conversation(talk("<|end|><|assistant|>yes<|endoftext|>", "<|user|>"), ENC)
    assert [i for i in ids if i > 255] == [ENC.eot_token, USER, END, ASSISTANT, END]
    assert ENC.decode([i for i, counts in zip(ids, mask) if counts]) == "<|user|><|end|>"


def test_a_long_conversation_is_cut_behind_the_last_answer_that_fits():
    messages = talk("U", "A", "V", "B", "W")  # 1 + 3 + 3 + 3 + 3 + 3 tokens, and no answer to the last
    stops = [render_conversation(messages, ENC, max_length)[2] for max_length in (16, 13, 12, 7, 6)]
    assert stops == [13, 13, 7, 7, 0]


def test_blocks_hold_whole_conversations_and_as_many_as_fit():
    """Short ones come last to a block that is nearly full, but do not always stand behind the others."""
    assert [sorted(block) for block in pack([5, 6, 3, 4], 9)] == [[0, 3], [1, 2]]
    lengths = np.random.default_rng(0).integers(1, 101, 2000).tolist()
    blocks = list(pack(lengths, 100))
    assert sorted(sum(blocks, [])) == list(range(2000))
    assert all(sum(lengths[number] for number in block) <= 100 for block in blocks)
    assert len(blocks) < 1.05 * sum(lengths) / 100  # little is filled up
    lengths = np.random.default_rng(0).choice([10, 90], 1000).tolist()
    first = [lengths[block[0]] for block in pack(lengths, 100) if len(block) == 2]
    assert 0.4 < first.count(10) / len(first) < 0.6


def read_chats(folder, max_length=64):
    """{split: [its conversations, as texts]} of a folder, whose every window of `max_length` begins with one."""
    chats = {"val": [], "train": []}
    for split, found in chats.items():
        for path in sorted(Path(folder).glob(f"*_{split}_*.npy")):
            tokens = np.load(path)
            mask = np.load(path.with_suffix(".mask"))
            assert tokens.dtype == np.uint16
            assert mask.dtype == np.uint8
            assert tokens.shape == mask.shape
            assert len(tokens) % max_length == 1  # whole blocks, and the last one's last target
            assert (tokens[:-1:max_length] == ENC.eot_token).all()
            text = ENC.decode(tokens.tolist())
            found += [re.sub(r"(<\|end\|>)+$", "<|end|>", chat) for chat in text.split("<|endoftext|>")[1:]]
    return chats


def as_text(*contents):
    """A conversation as `read_chats` returns it."""
    return "".join(f"<|{message['role']}|>{message['content']}<|end|>" for message in talk(*contents))


@pytest.mark.parametrize("count", [2, 11, 1200])
@pytest.mark.parametrize("shard_size", [1000, 20_000_000])
def test_every_conversation_is_in_one_split_and_every_window_begins_with_one(tmp_path, count, shard_size):
    """The validation split is drawn from all of a corpus, which may be ordered by source."""
    pairs = [(f"Q{i:04}", f"A{i:04}") for i in range(count)]
    folder = prepare(options_for(tmp_path, pairs, shard_size=shard_size))
    chats = read_chats(folder)
    assert sorted(sum(chats.values(), [])) == sorted(as_text(*pair) for pair in pairs)
    most = 1 if count < 11 else math.ceil(count / 11)
    assert (most - 1 if shard_size > 1000 and count > 22 else 1) <= len(chats["val"]) <= most
    if count == 1200:
        numbers = [int(re.search(r"Q(\d+)", chat)[1]) for chat in chats["val"]]
        assert np.histogram(numbers, 6, (0, 1200))[0].all()
    assert read_meta(folder)["documents"] == count


def test_shards_masks_and_meta(tmp_path, capsys):
    pairs = [*PAIRS * 25, ("a", "b" * 64), ("a", "b", "c", "d" * 64)]
    folder = prepare(options_for(tmp_path, pairs))
    chats = read_chats(folder)
    meta = read_meta(folder)
    expected = [as_text(*pair) for pair in PAIRS * 25] + [as_text("a", "b")]
    assert sorted(sum(chats.values(), [])) == sorted(expected)
    masks = {split: next(Path(folder).glob(f"*_{split}_*.mask")) for split in ("val", "train")}
    shards = {split: (read(folder, f"*_{split}_*.npy"), np.load(path)) for split, path in masks.items()}
    assert meta["tokenizer"] == "bytes+chat"
    assert meta["vocab_size"] == ENC.n_vocab == 261
    assert meta["complete"]
    assert meta["documents"] == 101
    assert tokenizers.folder_encoding(folder).name == "bytes+chat"
    said = capsys.readouterr().out
    num_targets = sum(int(mask.sum()) for _, mask in shards.values())
    assert f"{num_targets:,} tokens are targets" in said
    assert "note: 1 conversation cut after the last answer that fits." in said
    assert "note: 1 row left out. Line 101 of" in said
    val = len(shards["val"][0])
    train = len(shards["train"][0])
    assert meta["shards"] == {"out_val_000000.npy": val, "out_train_000001.npy": train}
    answers = "".join(learned_in(folder)).removesuffix("<|end|>").split("<|end|>")
    assert sorted(answers) == sorted([answer for _, answer in PAIRS] * 25 + ["b"])
    tokens, mask = shards["train"]
    x, y = DataLoaderLite(folder, "train", B=train // 64, T=64).next_batch()  # one epoch
    assert (x[:, 0] == ENC.eot_token).all()
    assert sorted(y[y != IGNORE_INDEX].tolist()) == sorted(tokens[mask == 1].tolist())


def make_and_die(tmp_path, name, number, after=True):
    preparation.BATCH_BYTES = 1000
    with die_at_rename(number, after):
        prepare(odd_options(tmp_path, name))


def odd_options(tmp_path, name):
    """Conversations of which some are left out, some cut, and some not to be learned, in two files."""
    chats = [{"messages": talk(f"Q{i}", "A" * (i % 40))} for i in range(150)]
    for i in range(0, 150, 7):
        chats[i]["messages"].insert(0, {"role": "tool", "content": "x"})
        chats[i]["mood"] = "bad"
        chats[i + 1]["messages"] += talk("and?", "B" * 60)
        chats[i + 2]["messages"] += [
            {"role": "user", "content": "C"},
            {"role": "assistant", "content": "D", "weight": 0},
        ]
    for number in range(2):
        path = tmp_path / f"{number}.jsonl"
        path.write_text("\n".join(map(json.dumps, chats[75 * number :][:75])), encoding="utf-8")
    inputs = tuple(str(tmp_path / f"{number}.jsonl") for number in range(2))
    return Options(
        input=inputs, out_dir=str(tmp_path / name / "out"), tokenizer="bytes", max_length=64, shard_size=640
    )


def test_killed_at_a_rename_the_same_command_ends_with_the_same_bytes_and_notes(tmp_path, capsys):
    renames = renamed_by(prepare, odd_options(tmp_path, "whole"))
    whole = listing(tmp_path / "whole")
    said = capsys.readouterr().out.partition("\nin ")[2].partition("Next")[0]
    assert "messages to and from tools left out" in said
    assert "answers not learned" in said
    assert "conversations cut after the last answer" in said
    assert "rows left out. Line 1 of" in said
    assert "\nnot read: mood (" in said
    assert sum("_train_" in name and ".npy" in name for name in renames) > 5
    for number in kills(renames):
        after = number % 2 == 0 and number < len(renames)
        run(make_and_die, tmp_path, f"{number}", number, after, ends=[KILLED])
        capsys.readouterr()
        prepare(odd_options(tmp_path, f"{number}"))
        assert listing(tmp_path / f"{number}") == whole, number
        assert said in capsys.readouterr().out


def test_after_a_kill_what_was_complete_is_not_made_again(tmp_path):
    renames = renamed_by(prepare, odd_options(tmp_path, "whole"))
    run(make_and_die, tmp_path, "killed", len(renames) // 2, ends=[KILLED])
    first = tmp_path / "killed" / "out" / "out_train_000001.npy"
    written = first.stat().st_mtime_ns
    prepare(odd_options(tmp_path, "killed"))
    assert first.stat().st_mtime_ns == written


def test_finished_chats_are_left_alone_and_a_damaged_mask_is_made_again(tmp_path, capsys):
    options = odd_options(tmp_path, "one")
    folder = Path(prepare(options))
    whole = listing(folder)
    capsys.readouterr()
    prepare(options)
    assert "complete" in capsys.readouterr().out
    assert listing(folder) == whole
    mask = folder / "out_train_000003.mask"
    for damage in (Path.unlink, lambda path: os.truncate(path, 100), lambda path: path.write_bytes(b"")):
        damage(mask)
        prepare(options)
        assert "complete" not in capsys.readouterr().out
        assert listing(folder) == whole


@pytest.mark.parametrize("gone", ["*.mask", "*_val_*.mask", "*_train_*.mask", "*_train_000002.mask"])
def test_chats_without_their_masks_are_not_trained_on(tmp_path, gone):
    """They were trained on, to say the user's words."""
    folder = prepare(odd_options(tmp_path, "one"))
    for mask in Path(folder).glob(gone):
        mask.unlink()
    if gone == "*_val_*.mask":  # a meta.json of one's own need not tell of masks
        (Path(folder) / "meta.json").write_text('{"tokenizer": "bytes+chat"}', encoding="utf-8")
    line = refused(train_gpt2.main, *flags(data=folder, out_dir=tmp_path / "log", **TINY))
    assert ".mask is missing or damaged" in line
    assert not (tmp_path / "log").exists()


@pytest.mark.gpt2
def test_the_command_that_is_printed_fine_tunes_the_model(tmp_path, capsys, data, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert status_of(train_gpt2.main, flags(data=data, out_dir="start", **TINY)) == 0
    capsys.readouterr()
    meta = read_meta(prepare(options_for(tmp_path, out_dir="chats", tokenizer="", init_from="start", max_length=0)))
    assert meta["tokenizer"] == "bytes+chat"
    assert meta["made_from"]["max_length"] == TINY["block_size"]
    [words] = printed_commands(capsys.readouterr().out)
    assert Path(words[1]).name == "train_gpt2.py"
    assert words[2:4] == ["--preset", "quickstart"]
    assert words[8:10] == ["--init-from", "start"]
    assert status_of(train_gpt2.main, [*words[2:], "--max-steps", "2", "--warmup-steps", "0"]) == 0
    assert (tmp_path / "log" / "chats" / "hf").exists()


@pytest.mark.parametrize(
    "line, reason",
    [
        ('{"text": "x"}', "is not a conversation: it has no list of messages"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            "is not a conversation: message 1 needs",
        ),
        ('{"messages": [{"role": "user", "content": "a"}]}', "has no answer by the assistant"),
        (json.dumps({"messages": talk("a", "b" * 64)}), "needs a --max-length above 64 for its first answer"),
        ('{"messages": [{"role": "assistant", "content": "a", "weight": 0}]}', "has no answer to learn"),
        ('{"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}', "has weight 0.5 in a message"),
        ("3", "is not an object, but 3"),
    ],
)
def test_rows_that_are_no_conversations_are_left_out_and_refused_if_all_are(tmp_path, line, reason, capsys):
    options = options_for(tmp_path)
    with open(tmp_path / "chats.jsonl", "a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")
    assert read_meta(prepare(options))["documents"] == 100
    said = capsys.readouterr().out
    assert f"note: 1 row left out. Line 102 of {tmp_path / 'chats.jsonl'} {reason}" in said
    (tmp_path / "chats.jsonl").write_text(line, encoding="utf-8")
    with pytest.raises(
        UserError, match=f"No row can be used. Line 1 of .* {re.escape(reason)}.*A row needs messages"
    ):
        prepare(dataclasses.replace(options, out_dir=str(tmp_path / "other")))
    assert not (tmp_path / "other").exists()


SHAREGPT = [{"from": "human", "value": "U"}, {"from": "gpt", "value": "A"}]


def test_every_format_gives_the_same_conversations(tmp_path):
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "red?"}]
    system = {"role": "system", "content": "S"}
    alpaca = {"instruction": "U", "input": "", "output": "A"}
    formats = [
        (talk("U", "A"), talk("U", "A")),  # no array of all rows, though the file begins like one
        ({"messages": talk(parts, "A rose.")}, talk("What is red?", "A rose.")),
        ({"conversations": [{"from": "system", "value": "S"}, *SHAREGPT]}, [system, *talk("U", "A")]),
        ([{"role": "User", "content": "U"}, {"role": "model", "content": "A"}], talk("U", "A")),
        ({"messages": [{"role": "developer", "content": "S"}, *talk("U", "A")]}, [system, *talk("U", "A")]),
        (alpaca, talk("U", "A")),
        ({"instruction": "Add.", "input": "2+2", "output": "4"}, talk("Add.\n\n2+2", "4")),
        ([entry | {"role": None, "content": None} for entry in SHAREGPT], talk("U", "A")),  # as tables merge them
        # what stands beside them
        (alpaca | {"system": "", "history": "[]"}, talk("U", "A")),
        ({"conversations": SHAREGPT, "system": "S", "history": None}, [system, *talk("U", "A")]),
        (alpaca | {"system_prompt": "S"}, [system, *talk("U", "A")]),
        ({"messages": [system, *talk("U", "A")], "system": "S"}, [system, *talk("U", "A")]),
        ({"messages": [{"role": "system", "content": ""}, *talk("U", "A")]}, talk("U", "A")),
        # messages and conversations win
        ({"instruction": "x", "response": "y", "conversations": SHAREGPT}, talk("U", "A")),
        ({"messages": None, "conversations": SHAREGPT}, talk("U", "A")),
        ({"messages": None, "conversations": [], **alpaca}, talk("U", "A")),
    ]
    records, expected = zip(*formats)
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    rows = readers.read_rows(inputs.local_source(str(path)), smoltalk.Conversations.columns)
    assert [smoltalk.read_conversation(row.values).value for row in rows] == list(expected)


def rows_of(change):
    """24 rows of {"messages": a question, an answer}, each changed."""
    rows = [{"messages": talk(f"Q{i}", f"A{i}")} for i in range(24)]
    for row in rows:
        change(row)
    return rows


# what a row says that is not read: (change of a row, the names that the last line has)
UNREAD = [
    (lambda row: row.update(deleted=True, id=7, source=""), "deleted (24 rows), id (24 rows)"),
    (lambda row: row.update(label=False, score=0), "label (24 rows), score (24 rows)"),
    (lambda row: row.update(chat_template_kwargs={"custom_instructions": "C"}), "chat_template_kwargs (24 rows)"),
    (lambda row: row.update(instruction="I", output="O"), "instruction (24 rows), output (24 rows)"),
    (lambda row: row.update(conversations=[{"from": "human", "value": "x"}]), "conversations (24 rows)"),
    (lambda row: row.update(system="S", system_prompt="T"), "system_prompt (24 rows)"),
    (lambda row: row.update(history=[["a", "b"]]), "history (24 rows)"),
    (lambda row: row["messages"][1].update(quality="bad", name=None), "quality (24 rows)"),
    (lambda row: row["messages"][0].update(value="Q"), "value (24 rows)"),
    (lambda row: row["messages"][1].update(content=[{"type": "text", "text": "A", "cut": 1}]), "cut (24 rows)"),
]


@pytest.mark.parametrize("change, names", UNREAD)
def test_what_is_not_read_of_a_conversation_is_counted_and_named(tmp_path, change, names, capsys):
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows_of(change))), encoding="utf-8")
    prepare(options_for(tmp_path, input=(str(tmp_path / "a.jsonl"),)))
    said = capsys.readouterr().out
    assert f"\nnot read: {names}\n" in said
    assert "note:" not in said


def test_of_very_many_keys_the_first_are_named(tmp_path, capsys):
    rows = [{"messages": talk("Q", "A"), f"key {i}": 1} for i in range(100)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    prepare(options_for(tmp_path, input=(str(tmp_path / "a.jsonl"),)))
    assert "key 29 (1 row), other keys (70 rows)\n" in capsys.readouterr().out


MARKED = [
    ({"kto_tag": False}, {}),
    ({"loss_mask": [0, 1]}, {}),
    ({}, {"trainable": False}),
    ({}, {"loss_mask": 0}),
    ({}, {"training_detail": [{"begin_offset": 0}]}),
]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.csv"])
@pytest.mark.parametrize("in_row, in_answer", MARKED)
def test_answers_that_are_marked_as_bad_or_masked_are_not_learned(tmp_path, name, in_row, in_answer, capsys):
    """They were learned without a word."""
    rows = rows_of(lambda row: row.update({key: True for key in in_row}))
    for row in rows[::2]:
        row.update(in_row)
        row["messages"][1].update(in_answer)
    path = tmp_path / name
    if name == "a.csv":
        texts = [
            {key: value if key == "kto_tag" else json.dumps(value) for key, value in row.items()} for row in rows
        ]
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(texts)
    elif name == "a.jsonl":
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    elif in_row == {"loss_mask": [0, 1]}:
        pytest.skip("a column of Parquet has one type")
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    folder = prepare(options_for(tmp_path, input=(str(path),)))
    expected = [as_text(f"Q{i}", f"A{i}") for i in range(1, 24, 2)]
    assert sorted(sum(read_chats(folder).values(), [])) == sorted(expected)
    said = capsys.readouterr().out
    mark = [*in_row, *in_answer][0]
    assert "note: 12 rows left out." in said
    assert f"has {mark} " in said
    assert f"\nnot read: {mark} (" in said


def test_a_question_behind_the_last_answer_is_not_said_to_be_too_long(tmp_path, capsys):
    prepare(options_for(tmp_path, [("a", "b", "c")] * 24))
    said = capsys.readouterr().out
    assert "note: 24 messages after the last answer left out.\n" in said
    assert "cut" not in said


def write_chats(path, chats):
    """A file of these lists of messages."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([{"messages": chat} for chat in chats]), path)
    else:
        path.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats), encoding="utf-8")
    return (str(path),)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_what_is_left_out_of_a_conversation_is_counted(tmp_path, name, capsys):
    """Reasoning was gone without a word, and what was to be learned in part was learned."""
    chats = [talk(f"Q{i}", f"A{i}") for i in range(40)]
    for chat, key in zip(chats, ["reasoning_content", "reasoning", "thinking"]):
        chat[1][key] = "because"
    call = {"role": "assistant", "content": None}
    chats[5][1:1] = [call | {"tool_calls": [{"id": "1"}]}, {"role": "tool", "content": "21 degrees"}]
    chats[6][1:1] = [call | {"function_call": {"name": "f"}}, {"role": "function", "content": "21 degrees"}]
    chats[9][1]["train_detail"] = [{"begin_offset": 0, "end_offset": 2, "train": False}]
    folder = prepare(options_for(tmp_path, input=write_chats(tmp_path / name, chats)))
    said = capsys.readouterr().out
    assert "note: 4 messages to and from tools left out.\n" in said
    place = "Row" if "parquet" in name else "Line"
    assert f"note: 1 row left out. {place} 10 of {tmp_path / name} has train_detail [" in said
    assert all(f"{key} (1 row)" in said for key in ("reasoning_content", "reasoning", "thinking", "train_detail"))
    expected = [as_text(f"Q{i}", f"A{i}") for i in range(40) if i != 9]
    assert sorted(sum(read_chats(folder).values(), [])) == sorted(expected)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
@pytest.mark.parametrize("flag, other", [({"weight": 0}, 1), ({"train": False}, True), ({"loss": 0}, 1)])
def test_what_is_not_to_be_learned_is_no_target(tmp_path, name, flag, other, capsys):
    """Flags of the parts of a content were not looked at."""
    learned = {key: other for key in flag}
    parts = [[{"type": "text", "text": text}] for text in ("Q", "wrong", "Q", "right")]
    chats = [talk(*parts) for _ in range(40)]
    for chat in chats:
        chat[1] |= flag
        chat[3] |= learned
    chats[3][3]["content"] = [parts[3][0] | learned, parts[1][0] | flag]
    chats[5][0]["content"] = [parts[0][0] | flag]  # a question is never learned
    folder = prepare(options_for(tmp_path, input=write_chats(tmp_path / name, chats)))
    said = capsys.readouterr().out
    assert "note: 39 answers not learned, as weight or train says." in said
    place = f"{'Row' if 'parquet' in name else 'Line'} 4 of {tmp_path / name} has a message with a part"
    assert f"1 row left out. {place} that is not to be learned." in said
    assert "".join(sum(read_chats(folder).values(), [])).count("wrong") == 39
    assert "".join(learned_in(folder)) == "right<|end|>" * 39


def learned_in(folder):
    """The text that counts in each shard of a folder."""
    shards = [(np.load(path), np.load(path.with_suffix(".mask"))) for path in Path(folder).glob("*.npy")]
    return [ENC.decode(tokens[mask == 1].tolist()) for tokens, mask in shards]


def test_a_table_of_conversations_has_lists_or_their_json(tmp_path):
    chats = [talk(f"a{i}", "b") for i in range(40)]
    pq.write_table(pa.table({"id": range(40), "conversations": chats}), tmp_path / "chats.parquet")
    with open(tmp_path / "chats.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["id", "conversations"], *([0, json.dumps(chat)] for chat in chats)])
    for kind in ("parquet", "csv"):
        out_dir = str(tmp_path / kind)
        folder = prepare(options_for(tmp_path, input=(str(tmp_path / f"chats.{kind}"),), out_dir=out_dir))
        assert sorted(sum(read_chats(folder).values(), [])) == sorted(as_text(f"a{i}", "b") for i in range(40))
    pq.write_table(pa.table({"id": range(40)}), tmp_path / "numbers.parquet")
    with pytest.raises(UserError, match="numbers.parquet has no column called 'messages', but id"):
        prepare(options_for(tmp_path, input=(str(tmp_path / "numbers.parquet"),), out_dir=str(tmp_path / "other")))


def test_other_bad_input_is_one_line_and_status_2(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("x", encoding="utf-8")
    Path("one.jsonl").write_text(json.dumps({"messages": talk("a", "b")}), encoding="utf-8")
    cases = [
        ("a.txt", "Give files that end in .jsonl"),
        ("one.jsonl", "One conversation is not enough: another is needed to validate on. Add more."),
        ("one.jsonl --init-from x", "leave --tokenizer out"),
        ("one.jsonl --out-dir", "--out-dir: its value is empty"),
    ]
    for words, reason in cases:
        args = words.split() + [""] * words.endswith("--out-dir")
        assert reason in refused(smoltalk.main, "--tokenizer", "bytes", "--input", *args)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "one.jsonl"]
