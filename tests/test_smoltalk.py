"""smoltalk.py: what a conversation becomes, what of it is learned, and what bad input does."""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import smoltalk
import train_gpt2
from plumbing.cli.console import UserError
from plumbing.data import sources, tokenizers
from plumbing.data.tokenizers import render_conversation
from smoltalk import Options, pack, prepare
from train_gpt2 import IGNORE_INDEX, DataLoaderLite

from corpora import read, read_meta
from harness import TINY, flags, printed_commands, refused, status_of, talk

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


def pack_numbers(lengths, max_length):
    """The numbers of the conversations in each block, whose tokens are the numbers, and the tokens of the blocks."""
    conversations = (np.full((2, length), number) for number, length in enumerate(lengths))
    blocks = [block[0].tolist() for block in pack(conversations, max_length, np.array([[-1], [0]]))]
    return [[number for number, _ in itertools.groupby(block) if number != -1] for block in blocks], blocks


def test_blocks_hold_whole_conversations_and_as_many_as_fit():
    assert [sorted(block) for block in pack_numbers([5, 6, 3, 4], 9)[0]] == [[0, 3], [1, 2]]
    lengths = np.random.default_rng(0).integers(1, 101, 2000).tolist()
    found, blocks = pack_numbers(lengths, 100)
    assert sorted(sum(found, [])) == list(range(2000)) and all(len(block) == 100 for block in blocks)
    assert all(block.count(number) == lengths[number] for block in blocks for number in set(block) - {-1})
    assert len(blocks) < 1.05 * sum(lengths) / 100  # little is filled up


def test_short_conversations_begin_blocks_too():
    """They come last to a block that is nearly full, and a chat begins with nothing before it."""
    lengths = np.random.default_rng(0).choice([10, 90], 1000).tolist()
    first = [lengths[block[0]] for block in pack_numbers(lengths, 100)[0] if len(block) == 2]
    assert 0.4 < first.count(10) / len(first) < 0.6


def test_shards_masks_and_meta(tmp_path, capsys):
    pairs = [*PAIRS * 25, ("a", "b" * 64), ("a", "b", "c", "d" * 64)]
    folder = prepare(options_for(tmp_path, pairs))
    masks = {split: next(Path(folder).glob(f"*_{split}_*.mask")) for split in ("val", "train")}
    shards = {split: (read(folder, f"*_{split}_*.npy"), np.load(path)) for split, path in masks.items()}
    meta = read_meta(folder)
    assert meta["tokenizer"] == "bytes+chat" and meta["vocab_size"] == ENC.n_vocab == 261 and meta["complete"]
    assert meta["documents"] == 101
    said = capsys.readouterr().out
    num_targets = sum(int(mask.sum()) for _, mask in shards.values())
    assert f"{num_targets:,} tokens are targets; of 102 conversations, 1 were cut" in said
    assert "1 without one were left out" in said
    val, train = len(shards["val"][0]), len(shards["train"][0])
    assert meta["shards"] == {"out_val_000000.npy": val, "out_train_000001.npy": train}
    assert tokenizers.folder_encoding(folder).name == "bytes+chat"
    answers = []
    for tokens, mask in shards.values():
        assert tokens.dtype == np.uint16 and mask.dtype == np.uint8 and tokens.shape == mask.shape
        assert len(tokens) % 64 == 1  # whole blocks, and the last one's last target
        assert (tokens[:-1:64] == ENC.eot_token).all()  # a conversation begins with each block
        answers += [a for a in ENC.decode(tokens[mask == 1].tolist()).split("<|end|>") if a]
    assert sorted(answers) == sorted([answer for _, answer in PAIRS] * 25 + ["b"])
    tokens, mask = shards["train"]
    x, y = DataLoaderLite(folder, "train", B=train // 64, T=64).next_batch()  # one epoch
    assert (x[:, 0] == ENC.eot_token).all()
    assert sorted(y[y != IGNORE_INDEX].tolist()) == sorted(tokens[mask == 1].tolist())


def test_an_interrupted_run_starts_over_and_removes_only_its_own_files(tmp_path, capsys):
    options = options_for(tmp_path, PAIRS * 100, shard_size=640)
    path, out = tmp_path / "chats.jsonl", tmp_path / "out"
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([*lines, "{broken"]), encoding="utf-8")
    with pytest.raises(UserError, match="Line 401 of .*chats.jsonl"):
        prepare(options)
    assert not read_meta(out)["complete"] and (out / "out_train_000003.npy").exists()
    notes = out / "out_train_000003.npy.backup"
    notes.write_text("mine", encoding="utf-8")
    path.write_text("\n".join(lines[:150]), encoding="utf-8")  # mended, and shorter
    prepare(options)
    assert notes.read_text(encoding="utf-8") == "mine"
    shards = read_meta(out)["shards"]
    *full, last = [length for name, length in shards.items() if "train" in name]
    assert len(full) > 2 and set(full) == {641} and last <= 641
    assert {file.name for file in out.glob("*.npy")} == set(shards)
    assert {file.stem for file in out.glob("*.mask")} == {name.removesuffix(".npy") for name in shards}
    whole = {file.name: file.read_bytes() for file in out.iterdir()}
    prepare(options)
    assert "complete" in capsys.readouterr().out
    assert {file.name: file.read_bytes() for file in out.iterdir()} == whole
    with pytest.raises(UserError, match="shards of other data: max_length was 64 and is now 32"):
        prepare(options_for(tmp_path, PAIRS * 100, shard_size=640, max_length=32))


@pytest.mark.gpt2
def test_the_command_that_is_printed_fine_tunes_the_model(tmp_path, capsys, data, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert status_of(train_gpt2.main, flags(data=data, out_dir="start", **TINY)) == 0
    capsys.readouterr()
    meta = read_meta(prepare(options_for(tmp_path, out_dir="chats", tokenizer="", init_from="start", max_length=0)))
    assert meta["tokenizer"] == "bytes+chat" and meta["made_from"]["max_length"] == TINY["block_size"]
    [words] = printed_commands(capsys.readouterr().out)
    assert Path(words[1]).name == "train_gpt2.py"
    assert words[2:6] == ["--preset", "quickstart", "--init-from", "start"]
    assert status_of(train_gpt2.main, [*words[2:], "--max-steps", "2", "--warmup-steps", "0"]) == 0
    assert (tmp_path / "log" / "chats" / "hf").exists()


@pytest.mark.parametrize(
    "line, reason",
    [
        ("{broken", "Expecting property name"),
        ('{"text": "x"}', "no list of messages"),
        (
            '{"messages": ["hi"]}',
            "message 1 needs a role (user, assistant, system) and content, but is {'role': '', 'content': 'hi'",
        ),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "message 1 needs a role"),
        ('{"instruction": "a"}', "message 2 needs a role"),
        ("3", "not a valid JSON object: it is another JSON value"),
    ],
)
def test_bad_lines_are_named_and_nothing_is_written(tmp_path, line, reason):
    options = options_for(tmp_path, PAIRS[:1])
    with open(tmp_path / "chats.jsonl", "a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")
    with pytest.raises(UserError, match=f"Line 3 of .*chats.jsonl .*{re.escape(reason)}"):
        prepare(options)
    assert not (tmp_path / "out").exists()


def read_conversations(path, records):
    """The conversations that are read from a file of JSON lines, or one with an array."""
    lines = "\n".join(map(json.dumps, records))
    path.write_text(lines if path.suffix == ".jsonl" else json.dumps(records), encoding="utf-8")
    found = sources.list_inputs([str(path)], types=(".jsonl",))
    return list(smoltalk.read_conversations(sources.Downloads(found, "")))


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.json"])
def test_every_format_gives_the_same_conversations(tmp_path, name):
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "red?"}]
    system = {"role": "system", "content": "S"}
    sharegpt = [{"from": "system", "value": "S"}, {"from": "human", "value": "U"}, {"from": "gpt", "value": "A"}]
    formats = [
        ({"messages": talk(parts, "A rose.")}, talk("What is red?", "A rose.")),
        (talk("U", "A"), talk("U", "A")),
        ({"conversations": sharegpt}, [system, *talk("U", "A")]),
        ({"messages": [{"role": "developer", "content": "S"}, *talk("U", "A")]}, [system, *talk("U", "A")]),
        ({"instruction": "U", "input": "", "output": "A"}, talk("U", "A")),
        ({"instruction": "Add.", "input": "2+2", "output": "4"}, talk("Add.\n\n2+2", "4")),
    ]
    records, expected = zip(*formats)
    assert read_conversations(tmp_path / name, records) == list(expected)


def test_messages_to_and_from_tools_are_left_out_with_a_count(tmp_path, capsys):
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    result = {"role": "tool", "content": "21 degrees", "tool_call_id": "1"}
    [question, answer] = talk("U", "A")
    weather = [question, call, result, answer | {"tool_calls": []}]
    records = {"messages": weather}, {"messages": [call]}, [question, {"from": "observation"}]
    assert read_conversations(tmp_path / "chats.jsonl", records) == [talk("U", "A"), [], talk("U")]
    assert capsys.readouterr().out == "note: 4 messages to and from tools left out.\n"


def test_tables_of_conversations_are_read_too_and_what_is_no_conversation_of_the_hub_is_left_out(tmp_path, capsys):
    chats = [talk("a", "b"), talk("a", None), talk("c", "d"), None]
    pq.write_table(pa.table({"id": range(4), "conversations": chats}), tmp_path / "chats.parquet")
    local = sources.list_inputs([str(tmp_path / "chats.parquet")])
    with pytest.raises(UserError, match="Row 2 of .*chats.parquet is not a conversation: message 2 needs a role"):
        list(smoltalk.read_conversations(sources.Downloads(local, "")))
    of_hub = [source._replace(repo="OWNER/NAME") for source in local]
    assert list(smoltalk.read_conversations(sources.Downloads(of_hub, ""))) == [chats[0], chats[2]]
    assert "note: 2 rows left out, as they are no conversations" in capsys.readouterr().out
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "texts.parquet")
    with pytest.raises(UserError, match="texts.parquet has no column called messages, but text"):
        prepare(options_for(tmp_path, input=(str(tmp_path / "texts.parquet"),)))


def test_all_of_a_corpus_is_sampled_for_validation(tmp_path):
    """It may be ordered by source, and the first shard would be of the first one."""
    options = options_for(tmp_path, [(f"{i:04}", f"{i:04}") for i in range(1200)], shard_size=64 * 100)
    prepare(options)
    files = sorted(Path(options.out_dir).glob("*.npy"), key=lambda path: path.stem[-6:])
    lengths = read_meta(options.out_dir)["shards"]
    assert lengths == {path.name: len(np.load(path)) for path in files} and len(files) > 3
    asked = [re.findall(r"<\|user\|>(\d{4})", ENC.decode(np.load(path).tolist())) for path in files]
    assert np.histogram(list(map(int, asked[0])), 6, (0, 1200))[0].all() and len(asked[0]) < 240
    assert sorted(sum(asked, [])) == [f"{i:04}" for i in range(1200)]
    assert read_meta(options.out_dir)["documents"] == 1200
    masks = [np.load(path.with_suffix(".mask")) for path in files]
    assert [len(mask) for mask in masks] == list(lengths.values())


def test_other_bad_input_is_one_line_and_status_2(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("x", encoding="utf-8")
    Path("one.jsonl").write_text(json.dumps({"messages": talk("a", "b")}), encoding="utf-8")
    cases = [
        ("a.txt", "Give files that end in .jsonl"),
        ("one.jsonl", "1 conversation (0 without an answer that fits) fill 1 of the two blocks of 1024 tokens"),
        (
            "one.jsonl --max-length 1",
            "1 conversation (1 without an answer that fits) fill 0 of the two blocks of 1 token",
        ),
        ("one.jsonl --init-from x", "leave --tokenizer out"),
        ("one.jsonl --out-dir", "--out-dir: its value is empty"),
    ]
    for words, reason in cases:
        args = words.split() + [""] * words.endswith("--out-dir")
        assert reason in refused(smoltalk.main, "--tokenizer", "bytes", "--input", *args)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "one.jsonl"]
