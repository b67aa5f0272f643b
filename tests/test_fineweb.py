"""fineweb.py: what it writes is what a plain loop over the documents gives, whatever happens on the way."""

import functools
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tracemalloc
import types
from pathlib import Path

import fineweb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiktoken
import train_gpt2
from plumbing.cli.console import UserError
from plumbing.data import downloads, preparation, python_docs, readers, tokenizers
from plumbing.files import lock_folder

from corpora import (
    TABLES,
    as_bytes,
    die_at_rename,
    documents,
    holds,
    kills,
    make,
    random_texts,
    read,
    read_meta,
    renamed_by,
    write_jsonl,
    write_parquet,
)
from harness import KILLED, ROOT, full_disk, listing, patched, printed_commands, refused, run, status_of


def test_names_meta_json_and_the_last_lines_say_what_is_there(tmp_path, capsys):
    texts = random_texts(30)
    path = write_parquet(tmp_path / "a.parquet", texts)
    folder = Path(make(tmp_path, path, shard_size=6000))
    assert holds(folder, texts)
    arrays = {path.name: np.load(path) for path in folder.glob("*.npy")}
    assert len(arrays) > 3
    assert sorted(os.listdir(folder)) == sorted([*arrays, "meta.json", *TABLES])
    meta = read_meta(folder)
    assert meta["shards"] == {name: len(array) for name, array in arrays.items()}
    assert (meta["dataset"], meta["tokenizer"], meta["vocab_size"]) == ("input", "bytes", 257)
    assert (meta["documents"], meta["tokens"], meta["complete"]) == (30, len(as_bytes(texts)), True)
    train, val = (len(read(folder, f"*_{split}_*")) for split in ("train", "val"))
    assert f"{train:,} tokens to train on, {val:,} to validate on" in capsys.readouterr().out
    for name, array in arrays.items():  # each is what np.save writes, to the byte
        np.save(tmp_path / "saved.npy", array)
        assert (tmp_path / "saved.npy").read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize(
    "dataset, texts, lengths",
    [
        ("", ["x" * 100], [11, 90]),  # a single document is cut
        ("", ["x" * 9, "y" * 99], [10, 100]),
        ("", ["x" * 99, "y" * 9], [10, 100]),
        ("python-docs", ["x" * 99] * 20, [200, 800, 1000]),
        ("python-docs", ["x" * 900, "y"], [2, 901]),
    ],
)
def test_every_input_has_two_splits(tmp_path, dataset, texts, lengths, monkeypatch):
    """Of Python's documentation, in an order that is random, the first shard is for validation, or the first tenth."""
    monkeypatch.setattr(python_docs, "python_docs", lambda: texts)
    source = {"dataset": dataset} if dataset else {"input": (write_jsonl(tmp_path / "a.jsonl", texts),)}
    if dataset and len(texts[0]) == 99:
        lengths = [1000, 1000]
    folder = make(tmp_path, shard_size=1000, **source)
    assert list(read_meta(folder)["shards"].values()) == lengths
    assert len(read(folder, "*_val_*")) == lengths[0]
    assert sorted(read(folder)) == sorted(as_bytes(texts))


@pytest.mark.parametrize("longest", [3, 30, 3000])  # the last: most documents are longer than a shard
def test_shards_hold_whole_documents_up_to_their_size(tmp_path, longest):
    texts = random_texts(300, longest=longest)
    folder = Path(make(tmp_path, write_jsonl(tmp_path / "a.jsonl", texts), shard_size=1000))
    assert holds(folder, texts)
    shards = [np.load(path) for path in folder.glob("*.npy")]
    assert all(len(shard) <= 1000 or np.count_nonzero(shard == 256) == 1 for shard in shards)
    assert len(shards) > 2


def test_max_tokens_ends_with_a_document(tmp_path):
    texts = random_texts(400, longest=30)
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    folder = make(tmp_path, path, shard_size=1000, max_tokens=2345)
    num_documents = np.count_nonzero(read(folder) == 256)
    assert holds(folder, texts[:num_documents])
    assert 2345 <= len(read(folder)) < 2345 + len(texts[num_documents - 1].encode()) + 1


@pytest.mark.parametrize("shard_size", [3000, 100_000])
def test_one_document_in_eleven_is_for_validation_whatever_the_size_of_a_shard(tmp_path, shard_size):
    """They are from all parts of the input."""
    texts = [f"Document {n}." for n in range(660)]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    chosen = [
        documents(make(tmp_path, path, name=f"out{size}", shard_size=size), "val") for size in (shard_size, 10_000)
    ]
    assert chosen[0] == chosen[1]
    assert len(chosen[0]) == 60
    numbers = [int(text.split()[1].rstrip(b".")) for text in chosen[0]]
    assert np.histogram(numbers, 10, (0, 660))[0].min() >= 4


def test_of_a_large_text_fewer_documents_are_for_validation(tmp_path):
    texts = random_texts(400, longest=3)
    folder = make(tmp_path, write_jsonl(tmp_path / "a.jsonl", texts), shard_size=30)
    assert 0 < len(documents(folder, "val")) < 0.02 * len(texts)


def test_of_a_folder_of_files_those_for_validation_are_from_all_of_it(tmp_path):
    (tmp_path / "texts").mkdir()
    for number in range(66):
        (tmp_path / "texts" / f"{number:02d}.txt").write_text(f"File {number}", encoding="utf-8")
    numbers = [int(text.split()[1]) for text in documents(make(tmp_path, tmp_path / "texts"), "val")]
    assert np.histogram(numbers, 3, (0, 66))[0].tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "name, length",
    [("a b.md", 40), (".notes.txt", 30_000), ("-x.txt", 900), ("\x1b[31m.txt", 7000)],
)
def test_the_command_that_comes_next_trains_on_the_shards(tmp_path, name, length, monkeypatch, capsys):
    """A hidden file strewed its shards over the current folder, and the next command was --data ""."""
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("To be. " * (length // 7), encoding="utf-8")
    fineweb.main([f"--input={name}", "--tokenizer", "bytes"])
    said = capsys.readouterr().out
    folder = name.lstrip(".").split(".")[0]
    assert "\x1b" not in said
    assert sorted(os.listdir(tmp_path)) == sorted([name, folder])
    if "\x1b" not in name:  # a shell other than this test's reads it
        command = printed_commands(said)[-1]
        assert Path(command[1]).name == "train_gpt2.py"
        assert status_of(train_gpt2.main, [*command[2:], "--max-steps", "1", "--device", "cpu"]) == 0


@pytest.mark.parametrize(
    "gpu, lengths, words",
    [
        (None, [10**8], "--preset quickstart --data x --out-dir log/x"),  # it was that of a GPT-2 of 124M
        ("here", [10**8] * 10, "--preset gpt2 --data x --out-dir log/x --passes 1"),
        ("here", [10**8] * 99, "--preset gpt2 --data x --out-dir log/x"),
        # 128 tokens and their targets are cut from each of these shards
        ("", [200] * 19, "--preset quickstart --data x --out-dir log/x --sequence-length 128 --total-batch-size 256"),
    ],
)
def test_the_model_that_comes_next_suits_the_machine(monkeypatch, gpu, lengths, words):
    monkeypatch.setattr(shutil, "which", lambda name: gpu)
    command = fineweb.training_command("x", lengths, [10**5])
    assert " ".join(str(word) for group in command[2:] for word in group) == words


def test_what_comes_next_knows_the_presets_of_the_trainer():
    for name, suited in preparation.PRESETS.items():
        preset = train_gpt2.PRESETS[name]
        assert (preset.sequence_length, preset.total_batch_size) == (suited.sequence_length, suited.batch_tokens)
        assert suited.least_steps <= preset.max_steps
        assert 0.9 * preset.max_steps < suited.most_steps or name == "quickstart"


def test_neither_cores_nor_batches_change_a_byte(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", random_texts(200))
    for name, num_proc, chars in (("one", 1, 2**19), ("two", 2, 5000), ("five", 5, 100)):
        with patched(preparation, "BATCH_BYTES", chars):
            make(tmp_path, path, name=f"{name}/out", num_proc=num_proc, shard_size=7000)
    one = listing(tmp_path / "one")
    assert len(one) > 5
    assert listing(tmp_path / "two") == one
    assert listing(tmp_path / "five") == one


def measure_memory(tmp_path, key):
    """Print the peak of memory for inputs of 2, 2 and 20 MB: the first one also imports what is imported late."""
    preparation.BATCH_BYTES = 100_000
    preparation.QUEUE_BYTES = 400_000
    for number, count in enumerate((20, 20, 200)):
        rows = [{"text": "A text."}, *[{key: "x" * 100_000}] * count, {"text": "Another."}]
        path = tmp_path / f"{count}.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        tracemalloc.start()
        make(tmp_path, path, name=f"out{number}", shard_size=200_000, num_proc=4)
        print("peak", tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()


@pytest.mark.parametrize("key", ["text", "other"])
def test_memory_does_not_grow_with_the_input(tmp_path, key):
    """Neither that of texts nor that of rows that are left out. No other test's threads are in that process."""
    [said] = run(measure_memory, tmp_path, key)
    _, small, large = map(int, re.findall(r"peak (\d+)", said))
    assert large < small + 3_000_000


def make_and_die(tmp_path, paths, name, *, number, after, options):
    preparation.BATCH_BYTES = readers.BLOCK_CHARS = 1000
    with die_at_rename(number, after):
        make(tmp_path, *paths, name=name, **options)


@pytest.mark.parametrize("kind, limit", [("jsonl", 0), ("jsonl", 30_000), ("txt", 0)])
def test_killed_at_a_rename_the_same_command_ends_with_the_same_bytes(tmp_path, kind, limit, monkeypatch):
    monkeypatch.setattr(readers, "BLOCK_CHARS", 1000)
    texts = random_texts(40) + ["one long document " * 300]
    paths = [write_jsonl(tmp_path / f"{i}.jsonl", texts[20 * i : 20 * i + 20]) for i in range(3)]
    if kind == "txt":
        paths = [tmp_path / "a.txt"]
        paths[0].write_text("\n".join(texts), encoding="utf-8")
    options = dict(shard_size=9000, max_tokens=limit)
    renames = renamed_by(make, tmp_path, *paths, name="whole/out", **options)
    whole = listing(tmp_path / "whole" / "out")
    assert sum("_train_" in name for name in whole) > 3
    for number in kills(renames):
        after = number % 2 == 0 and number < len(renames)
        die = functools.partial(make_and_die, number=number, after=after, options=options)
        run(die, tmp_path, paths, f"{number}/out", ends=[KILLED])
        assert listing(make(tmp_path, *paths, name=f"{number}/out", **options)) == whole


def test_a_finished_folder_is_left_alone_and_a_damaged_shard_made_again_by_one_process(tmp_path, capsys):
    path = write_jsonl(tmp_path / "a.jsonl", random_texts(60))
    folder = make(tmp_path, path, shard_size=5000)
    before = listing(folder)
    with lock_folder(folder):  # what is complete can be used by several at once
        make(tmp_path, path, shard_size=5000)
    assert "is complete" in capsys.readouterr().out

    def lose_shards(shard):
        meta = read_meta(shard.parent) | {"shards": {}}
        (shard.parent / "meta.json").write_text(json.dumps(meta), encoding="utf-8")

    for damage in (lambda file: os.truncate(file, 5000), lambda file: os.truncate(file, 0), os.remove, lose_shards):
        damage(Path(folder) / "out_train_000002.npy")
        with lock_folder(folder), pytest.raises(UserError, match="in use by another process"):
            make(tmp_path, path, shard_size=5000)
        make(tmp_path, path, shard_size=5000)
        assert listing(folder) == before


def test_bad_lines_can_be_mended_and_the_run_goes_on(tmp_path, capsys):
    texts = random_texts(60)
    path = Path(write_jsonl(tmp_path / "a.jsonl", texts))
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([*lines[:50], lines[50][:-3], *lines[51:]]), encoding="utf-8")
    with patched(preparation, "BATCH_BYTES", 1000), pytest.raises(UserError, match="Line 51"):
        make(tmp_path, str(path), shard_size=5000, num_proc=1)
    assert (tmp_path / "out" / "out_val_000000.npy").exists()
    path.write_text("\n".join(lines), encoding="utf-8")
    folder = make(tmp_path, str(path), shard_size=5000)
    assert holds(folder, texts)
    # meta.json tells of the file as it is now, else the same command would take it for another one
    before = listing(folder)
    make(tmp_path, str(path), shard_size=5000)
    assert "is complete" in capsys.readouterr().out
    assert listing(folder) == before


def write_until(path, texts, bad_line):
    """Make shards of `texts` up to a line that is damaged, as a kill would leave them; the lines of the whole file."""
    lines = Path(write_jsonl(path, texts)).read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([*lines[:bad_line], "{", *lines[bad_line + 1 :]]), encoding="utf-8")
    with patched(preparation, "BATCH_BYTES", 1000), pytest.raises(UserError, match="is not a valid JSON object"):
        make(path.parent, str(path), shard_size=5000, num_proc=1)
    return lines


# the first rows stay: the file's beginning is compared in another way
CHANGES = {
    "cut": lambda lines: lines[:15],
    "cut at the place": lambda lines: lines[:-10],
    "removed": lambda lines: lines[:15] + lines[18:],
    "inserted": lambda lines: lines[:15] + lines[:3] + lines[15:],
    "replaced": lambda lines: [*lines[:15], lines[14], *lines[16:]],
    "swapped": lambda lines: [*lines[:15], lines[16], lines[15], *lines[17:]],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_whose_rows_in_shards_have_changed_is_named(tmp_path, change):
    """Rows were missing or there twice, and the shards said to be complete."""
    path = tmp_path / "a.jsonl"
    lines = write_until(path, random_texts(60), bad_line=50)
    row = list(read_meta(tmp_path / "out")["ends"].values())[-1]["row"]
    if change == "cut at the place":
        lines = lines[: row + 10]
    path.write_text("\n".join(CHANGES[change](lines)), encoding="utf-8")
    before = listing(tmp_path / "out")
    with pytest.raises(UserError, match=f"a.jsonl has changed: its first {row} rows are in the shards, but "):
        make(tmp_path, str(path), shard_size=5000)
    assert listing(tmp_path / "out") == before


def test_rows_of_a_table_that_have_changed_are_seen_as_well(tmp_path):
    texts = [*random_texts(50), None, *random_texts(50, seed=1)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": texts}), path, row_group_size=7)
    folder = Path(make(tmp_path, path, shard_size=5000))
    meta = read_meta(folder) | {"complete": False}
    meta["shards"] = dict(list(meta["shards"].items())[:-4])
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    pq.write_table(pa.table({"text": [*texts[:20], "other", *texts[21:]]}), path, row_group_size=7)
    with pytest.raises(UserError, match="a.parquet has changed: its first"):
        make(tmp_path, path, shard_size=5000)


@pytest.mark.parametrize(
    "name", ["../v/v_train_000001.npy", "/v_train_000001.npy", "..\\v_train_000001.npy", "a.txt"]
)
def test_a_meta_json_that_names_files_elsewhere_is_refused(tmp_path, name):
    """Someone else's led to shards of another folder, which were written over."""
    path = write_jsonl(tmp_path / "a.jsonl", random_texts(60))
    folder = Path(make(tmp_path, path, shard_size=5000))
    meta = read_meta(folder)
    end = meta["ends"].popitem()[1]
    meta |= {"complete": False, "shards": {name: 5}, "ends": {name: end}}
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    before = listing(tmp_path)
    with pytest.raises(UserError, match="meta.json is damaged: its shards cannot be"):
        make(tmp_path, path, shard_size=5000)
    assert listing(tmp_path) == before


@pytest.mark.parametrize("field, value", [("ends", [7, 3, 1]), ("ends", {"row": 1, "x": 2}), ("sources", None)])
def test_a_meta_json_of_another_version_is_one_line(tmp_path, field, value):
    path = write_jsonl(tmp_path / "a.jsonl", random_texts(60))
    folder = Path(make(tmp_path, path, shard_size=5000))
    meta = read_meta(folder) | {"complete": False}
    if field == "ends":
        meta["ends"] = dict.fromkeys(meta["ends"], value)
    else:
        meta["made_from"][field] = value
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    with pytest.raises(UserError, match="meta.json is damaged, or of another version"):
        make(tmp_path, path, shard_size=5000)


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv"])
def test_columns_that_are_not_read_are_named_in_the_last_line(tmp_path, kind, capsys):
    records = [{"title": f"T{n}", "doc": {"text": f"D{n}"}, "label": False, "none": None} for n in range(24)]
    path = tmp_path / f"a.{kind}"
    column = "doc.text"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    elif kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    else:
        path.write_text("title,text,label\n" + "a,b,0\n" * 24, encoding="utf-8")
        column = "text"
    make(tmp_path, path, text_column=column)
    said = capsys.readouterr().out.splitlines()[-1]
    assert "not read: title (24 rows)" in said
    assert "label (24 rows)" in said
    assert "doc" not in said


@pytest.mark.parametrize("begun", [True, False])
def test_an_input_that_is_another_text_is_refused(tmp_path, begun, capsys):
    path = Path(write_jsonl(tmp_path / "a.jsonl", random_texts(60)))
    folder = Path(make(tmp_path, str(path), shard_size=5000))
    meta = read_meta(folder) | {"complete": not begun}
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    text = path.read_bytes()
    # with another start; with more at its end, which may be mended while not all is read
    for other in [text.replace(b"the", b"two"), text + text[:-1]][: 1 if begun else 2]:
        path.write_bytes(other)
        with pytest.raises(UserError, match=r"file 1 of the input .* was \['a.jsonl', .* and is now \['a.jsonl', "):
            make(tmp_path, str(path), shard_size=5000)
    path.write_bytes(text)
    folder.rename(tmp_path / "renamed")  # the names of its shards stay
    make(tmp_path, str(path), name="renamed", shard_size=5000)
    assert ("is complete" in capsys.readouterr().out) != begun
    assert {file.name[:4] for file in (tmp_path / "renamed").glob("*.npy")} == {"out_"}


def test_a_disk_that_fills_up_keeps_the_shards_before(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", random_texts(60))
    fsync = os.fsync
    calls = []

    def full(number):
        if stat.S_ISREG(os.fstat(number).st_mode):  # a full disk can still flush a folder
            calls.append(number)
        # meta.json and the tokenizer's two files, one of them twice, then two or three files for each run of rows
        (full_disk if len(calls) > 10 else fsync)(number)

    with patched(os, "fsync", full), pytest.raises(UserError, match="No space left"):
        make(tmp_path, path, shard_size=4000)
    before = listing(tmp_path / "out")
    assert len(before) > 5
    assert not any(name.endswith(".part") for name in before)
    make(tmp_path, path, shard_size=4000)
    after = listing(tmp_path / "out")
    assert after == listing(make(tmp_path, path, name="other/out", shard_size=4000))
    assert all(after[name] == digest for name, digest in before.items() if name.endswith(".npy"))


def test_importing_runs_nothing(tmp_path):
    code = (
        "import socket, sys\n"
        "def refuse(*args): raise OSError('no network')\n"
        "socket.socket.connect = socket.create_connection = refuse\n"
        "import fineweb, smoltalk, tokenizer\n"
        "slow = {'datasets', 'transformers', 'torch', 'pyarrow', 'huggingface_hub', 'tokenizers'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, encoding="utf-8")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_the_limit_on_addresses_that_a_cluster_may_set_is_enough(tmp_path):
    """Which is 2 GB with ulimit -v 2000000: this tokenizer leaves what the real ones need."""
    pq.write_table(pa.table({"text": random_texts(30)}), tmp_path / "a.parquet")
    code = "import fineweb; from plumbing.cli import console; console.run(fineweb.main); "
    code += "print(open('/proc/self/status').read())"
    args = ["--input", tmp_path / "a.parquet", "--num-proc=2", "--tokenizer=bytes", "--out-dir", tmp_path / "out"]
    done = subprocess.run([sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, text=True)
    assert int(re.search(r"VmPeak:\s+(\d+) kB", done.stdout)[1]) < 1_500_000, done


def test_the_quick_start_takes_the_shards_that_are_there(tmp_path):
    """Made with another tokenizer, by another Python."""
    folder = make(tmp_path, write_jsonl(tmp_path / "a.jsonl", random_texts(9)), name="python_docs")
    before = listing(folder)
    fineweb.make_python_docs(str(folder))
    assert listing(folder) == before


def test_a_disk_that_is_too_small_is_refused_before_the_download(tmp_path):
    usage = types.SimpleNamespace(free=10**8)
    with patched(shutil, "disk_usage", lambda folder: usage):
        line = refused(fineweb.main, "--pretokenized", 1, "--out-dir", tmp_path / "out")
    assert "need 0.4 GB" in line
    assert "has 0.1 GB free" in line


# {arguments: words that the line must have}; --tokenizer is bytes and --out-dir a new folder unless they are given
BAD_INPUTS = {
    "--input p.parquet": "p.parquet has no column called 'text', but id, a, content. Name the column & --text-column",
    "--input empty.jsonl": "contains no text",
    "--input cut.parquet": "is damaged",
    "--input a.pdf": "a.pdf is not read as input. Give files that end in .parquet",
    "--input keys.json": "Its columns are data: {'data': [{'text': 'a'}]} & jq -c '.KEY[]' FILE > NEW.jsonl",
    "--input good.jsonl --tokenizer char": "There is no tokenizer 'char'. Use gpt2, bytes & or a .tiktoken file",
    # what is wrong with the input is said before what is wrong with the tokenizer
    "--input none*.txt --tokenizer nowhere": "none*.txt & --dataset OWNER/NAME",
    "--input good.jsonl --tokenizer big.tiktoken": "65,537 & 65,536",
    "--input good.jsonl --separator x --shard-size 0": "--separator only & --shard-size is 0",
    "--input good.jsonl --out-dir foreign": "did not write",
    "--input good.jsonl --out-dir strange": "strange",
    "--dataset python-docs --input good.jsonl": "leave --dataset out",
    "--pretokenized 100": "at most 99: there are no more",
    "--pretokenized 1 --max-tokens 9 --shard-size 9": "leave --tokenizer, --shard-size, --max-tokens out",
    "--input clone": "clone is a whole data set. If it is a clone, name the files",
    "--input saved": "If save_to_disk wrote it & to_parquet('train.parquet')",
    "good.jsonl --tokenizer bytes": "Use --input good.jsonl.",
    "": "--dataset python-docs & --input",  # no network
    "--pretokenized 1 --tokenizer gpt2": "val_000000.bin",
    "--input http://host/a.txt": "No file matches http://host/a.txt & curl -LO",
    "--dataset ./good.jsonl": "--input FILES",
    "--input good.jsonl --config en": "leave --config out",
    "--dataset python-docs --split test": "neither configs nor splits",
}


def test_bad_input_is_one_line_and_status_2_and_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(downloads, "RETRY_SECONDS", 0)
    texts = random_texts(5)
    write_jsonl(tmp_path / "good.jsonl", texts)
    parquet = write_parquet(tmp_path / "p.parquet", texts, column="content")
    contents = {
        "empty.jsonl": b"\n",
        "keys.json": b'{"data": [{"text": "a"}]}',
        "cut.parquet": Path(parquet).read_bytes()[:-20],
        "a.pdf": b"text\n",
        "foreign/x_train_000001.npy": b"",
        "strange/meta.json": b'{"tokenizer": "bytes"}',
        "clone/README.md": b"---\nlicense: mit\n---\n",
        "clone/test.jsonl": b'{"text": "not this"}',
        "saved/state.json": b"{}",
    }
    for name, content in contents.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content)
    ranks = {bytes([i]): i for i in range(256)} | {i.to_bytes(4, "big"): i for i in range(256, 65536)}
    parts = dict(pat_str="(?s:.)", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 65536})
    tokenizers.write_encoding(tiktoken.Encoding("big", **parts), "big.tiktoken")
    before = listing(tmp_path)
    for number, (words, said) in enumerate(BAD_INPUTS.items()):
        args = shlex.split(words)
        args += [] if "--tokenizer" in args else ["--tokenizer", "bytes"]
        args += [] if "--out-dir" in args else ["--out-dir", f"out{number}"]
        line = refused(fineweb.main, *args)
        assert all(word in line for word in said.split(" & ")), (args, line)
        assert listing(tmp_path) == before, args
