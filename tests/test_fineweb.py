"""fineweb.py: what it writes is what a plain loop over the documents gives, whatever happens on the way."""

import io
import itertools
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
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
from plumbing.data import preparation, readers, sources, tokenizers
from plumbing.files import lock_folder
from tqdm import tqdm

from corpora import (
    TABLES,
    as_bytes,
    is_split,
    make,
    random_texts,
    read,
    read_meta,
    split_texts,
    write_jsonl,
    write_parquet,
)
from harness import KILLED, ROOT, die_at, full_disk, listing, patched, printed_commands, refused, run, status_of


def test_the_time_left_comes_from_the_share_of_bytes_that_were_read():
    """50 tokens from the first 100 of 400 bytes: 200 in all, of which the second file may have any number."""
    lengths = [(0, 0, 20), (0, 1, 30), (1, 0, 7)]
    units = [preparation.Unit(source, row, 0, np.zeros(length), (0,)) for source, row, length in lengths]
    with tqdm(file=io.StringIO()) as bar:
        assert len(list(preparation.limit_tokens(units, 99, bar, [100, 300]))) == 3
        assert bar.total == 200 and bar.n == 57 and "file 2 of 2" in str(bar)


def test_names_meta_json_and_the_last_lines_say_what_is_there(tmp_path, capsys):
    texts = random_texts(30)
    folder = make(tmp_path, write_parquet(tmp_path / "a.parquet", texts), shard_size=6000)
    validation, training = split_texts([texts], os.path.getsize(tmp_path / "a.parquet"), 6000)
    tokens = as_bytes(texts)
    files = ["out_val_000000.npy"] + [f"out_train_{i:06d}.npy" for i in range(1, -(-len(training) // 6000) + 1)]
    assert sorted(os.listdir(folder)) == sorted([*files, "meta.json", *TABLES])
    meta = read_meta(folder)
    lengths = [len(validation)] + [6000] * (len(files) - 2) + [len(training) % 6000]
    assert meta["shards"] == dict(zip(files, lengths)) and list(meta["shards"]) == files
    assert (meta["dataset"], meta["tokenizer"], meta["vocab_size"]) == ("input", "bytes", 257)
    assert (meta["documents"], meta["tokens"], meta["complete"]) == (30, len(tokens), True)
    counts = f"{len(training):,} tokens to train on, {len(validation):,} to validate on"
    assert counts in capsys.readouterr().out
    # each is what np.save writes, to the byte
    np.save(tmp_path / "saved.npy", training[:6000])
    assert (tmp_path / "saved.npy").read_bytes() == (tmp_path / "out" / files[1]).read_bytes()


@pytest.mark.parametrize(
    "dataset, length, lengths",
    [
        ("python-docs", 101, [11] * 9 + [2]),  # their order is random, so the first tenth is like the rest
        ("", 101, [9, 92]),
        ("", 2, [1, 1]),
        ("", 2000, [181, 1000, 819]),
    ],
)
def test_one_document_is_cut_into_two_splits(tmp_path, dataset, length, lengths):
    text = "x" * (length - 1)
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    source = {"dataset": dataset} if dataset else {"input": (str(tmp_path / "a.txt"),)}
    with patched(readers, "python_docs", lambda: [text]):
        folder = make(tmp_path, shard_size=1000, **source)
    assert list(read_meta(folder)["shards"].values()) == lengths and len(read(folder, "*_val_*")) == lengths[0]


def test_no_more_than_a_shard_validates_and_max_tokens_may_end_in_a_document(tmp_path):
    texts = random_texts(400, longest=30)
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    folder = make(tmp_path, path, shard_size=1000)
    assert is_split(folder, [texts], [path], shard_size=1000) and len(read(folder, "*_val_*")) <= 1000
    folder = make(tmp_path, path, name="limited", shard_size=1000, max_tokens=2345)
    assert is_split(folder, [texts], [path], shard_size=1000, limit=2345) and len(read(folder)) == 2345
    texts = ["once upon a time"] * 1000  # its tenth is more than a shard, though its file is small
    path = write_jsonl(tmp_path / "b.jsonl.gz", texts)
    folder = make(tmp_path, path, name="packed", shard_size=1000)
    assert is_split(folder, [texts], [path], shard_size=1000) and 900 < len(read(folder, "*_val_*")) <= 1000


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
    assert "\x1b" not in said and sorted(os.listdir(tmp_path)) == sorted([name, folder])
    if "\x1b" not in name:  # a shell other than this test's reads it
        command = printed_commands(said)[-1]
        assert Path(command[1]).name == "train_gpt2.py"
        assert status_of(train_gpt2.main, [*command[2:], "--max-steps", "1", "--device", "cpu"]) == 0


SMALL = [("--preset", "quickstart"), ("--out-dir", "log/x")]


@pytest.mark.parametrize(
    "gpu, lengths, words",
    [
        (None, [10**8], SMALL),  # it was that of a GPT-2 of 124M
        ("here", [10**6], SMALL),
        ("here", [10**8] * 10, [("--max-steps", 1907), ("--warmup-steps", 70)]),
        ("here", [10**8] * 99, []),
        # 128 tokens and their targets are cut from each of these shards
        (None, [200] * 11, [*SMALL, ("--sequence-length", 128), ("--total-batch-size", 128 * 11)]),
    ],
)
def test_the_model_that_comes_next_suits_the_machine(monkeypatch, gpu, lengths, words):
    monkeypatch.setattr(shutil, "which", lambda name: gpu)
    assert fineweb.training_command("x", lengths, [10**5])[2:] == [("--data", "x"), *words]


def test_neither_cores_nor_batches_change_a_byte(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", random_texts(200))
    for name, num_proc, chars in (("one", 1, 2**19), ("two", 2, 5000), ("five", 5, 100)):
        with patched(preparation, "BATCH_BYTES", chars):
            make(tmp_path, path, name=f"{name}/out", num_proc=num_proc, shard_size=7000)
    one = listing(tmp_path / "one")
    assert len(one) > 5 and listing(tmp_path / "two") == one and listing(tmp_path / "five") == one


def test_what_waits_to_be_tokenized_is_bounded_by_bytes_and_not_by_cores(monkeypatch):
    monkeypatch.setattr(preparation, "QUEUE_BYTES", 1000)
    renderer, num_read = fineweb.Documents("text", ""), 0

    def batches():
        nonlocal num_read
        for number in range(100):
            num_read += 1
            yield preparation.Batch(0, [(number, "Line 1", ("x" * 100, True))], 100)

    encoded = preparation.encode_all(renderer, tokenizers.get_encoding("bytes"), batches(), 32)
    for number, _ in enumerate(encoded):
        assert num_read <= number + 11
    assert num_read == 100


def make_and_die(tmp_path, paths, name, renames, after):
    """Make shards, and die by SIGKILL at the N-th file that gets its name, before or after it has."""
    preparation.BATCH_BYTES = readers.BLOCK_CHARS = 1000
    count = itertools.count(1)
    last_act = (lambda replace, *args: replace(*args)) if after else (lambda *args: None)
    with die_at(os, "replace", lambda *args: next(count) == renames, last_act):
        make(tmp_path, *paths, name=name, shard_size=16_000)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "txt"])
def test_killed_at_any_rename_the_same_command_ends_with_the_same_bytes(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(readers, "BLOCK_CHARS", 1000)
    texts = random_texts(40) + ["one long document " * 300]
    if kind == "txt":
        (tmp_path / "a.txt").write_text("\n".join(texts), encoding="utf-8")
        paths = [str(tmp_path / "a.txt")]
    else:
        writer = write_jsonl if kind == "jsonl" else write_parquet
        paths = [writer(tmp_path / f"{i}.{kind}", texts[20 * i : 20 * i + 20]) for i in range(3)]
    whole = listing(make(tmp_path, *paths, name="whole/out", shard_size=16_000))
    # meta.json and the tokenizer's two files, then for every training shard the validation sample, itself and meta.json
    renames = 3 * (len(whole) - 4) + 3
    for count in range(1, renames + 1, 1 if kind == "jsonl" else 3):
        after = count % 2 == 0 and count < renames
        run(make_and_die, tmp_path, paths, f"{count}/out", count, after, ends=[KILLED])
        assert listing(make(tmp_path, *paths, name=f"{count}/out", shard_size=16_000)) == whole


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
    assert is_split(folder, [texts], [path], shard_size=5000)
    # meta.json tells of the file as it is now, else the same command would take it for another one
    before = listing(folder)
    make(tmp_path, str(path), shard_size=5000)
    assert "is complete" in capsys.readouterr().out and listing(folder) == before


@pytest.mark.parametrize("begun", [True, False])
def test_an_input_that_is_another_text_is_refused(tmp_path, begun, capsys):
    path = Path(write_jsonl(tmp_path / "a.jsonl", random_texts(60)))
    folder = Path(make(tmp_path, str(path), shard_size=5000))
    meta = read_meta(folder) | {"complete": not begun}
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    text, middle = path.read_bytes(), path.stat().st_size // 2
    refusal = r"the input \(name, bytes, hash\) was \['a.jsonl', .* and is now \['a.jsonl', "
    # of the same size, with a change in the middle; of another size, with another start
    for other in (text[:middle] + text[middle:].replace(b"the", b"two", 1), text.replace(b"the", b"those")):
        path.write_bytes(other)
        with pytest.raises(UserError, match=refusal):
            make(tmp_path, str(path), shard_size=5000)
    path.write_bytes(text)
    folder.rename(tmp_path / "renamed")  # the names of its shards stay
    make(tmp_path, str(path), name="renamed", shard_size=5000)
    assert ("is complete" in capsys.readouterr().out) != begun
    assert {file.name[:4] for file in (tmp_path / "renamed").glob("*.npy")} == {"out_"}


def test_a_disk_that_fills_up_keeps_the_shards_before(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", random_texts(60))
    fsync, calls = os.fsync, []

    def full(number):
        if stat.S_ISREG(os.fstat(number).st_mode):  # a full disk can still flush a folder
            calls.append(number)
        # meta.json, the tokenizer's two files (one twice), then three files for each training shard
        (full_disk if len(calls) > 10 else fsync)(number)

    with patched(os, "fsync", full), pytest.raises(UserError, match="No space left"):
        make(tmp_path, path, shard_size=4000)
    before = listing(tmp_path / "out")
    assert len(before) == 6 and not any(name.endswith(".part") for name in before)
    make(tmp_path, path, shard_size=4000)
    after = listing(tmp_path / "out")
    assert after == listing(make(tmp_path, path, name="other/out", shard_size=4000))
    assert all(after[name] == digest for name, digest in before.items() if "_train_" in name)


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
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "") and not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_the_limit_on_addresses_that_a_cluster_may_set_is_enough(tmp_path):
    """Which is 2 GB with ulimit -v 2000000: this tokenizer leaves what the real ones need."""
    pq.write_table(pa.table({"text": random_texts(30)}), tmp_path / "a.parquet")
    code = "import fineweb; from plumbing.cli import console; console.run(fineweb.main); "
    code += "print(open('/proc/self/status').read())"
    args = [
        "--input",
        tmp_path / "a.parquet",
        "--num-proc",
        "2",
        "--tokenizer",
        "bytes",
        "--out-dir",
        tmp_path / "out",
    ]
    command = [sys.executable, "-c", code, *args]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
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
    assert "need 0.4 GB" in line and "has 0.1 GB free" in line


# {arguments: words that the line must have}; --tokenizer is bytes and --out-dir a new folder unless they are given
BAD_INPUTS = {
    "--input p.parquet": "p.parquet has no text under 'text'. Choose text with --text-column: a.b, content",
    "--input empty.jsonl": "contains no text",
    "--input cut.parquet": "is damaged",
    "--input a.pdf": "a.pdf is not of a type that is read here. Give files that end in .parquet",
    "--input numbers.parquet": "numbers.parquet has no column of strings, so there is no text in it",
    "--input good.jsonl --tokenizer a.tiktoken": "a.tiktoken",
    "--input good.jsonl --tokenizer char": "There is no tokenizer 'char'. Use gpt2, bytes & or a .tiktoken file",
    "--input good.jsonl --out-dir trained": "other contents",
    "--input good.jsonl --out-dir file": "file",
    # what is wrong with the input is said before what is wrong with the tokenizer
    "--input none*.txt --tokenizer nowhere": "none*.txt",
    "--input good.jsonl --tokenizer big.tiktoken": "65,537 & 65,536",
    "--input good.jsonl --tokenizer bytes+chat --out-dir taken": "+chat",
    "--input good.jsonl --separator x --shard-size 0": "--separator only & --shard-size is 0",
    "--input good.jsonl --shard-size 7 --out-dir taken": "shard_size was 100000000 and is now 7",
    "--input other.jsonl --out-dir taken": "good.jsonl & other.jsonl",
    "--input good.jsonl --out-dir foreign": "did not write",
    "--input good.jsonl --out-dir strange": "strange",
    "--input p.parquet --text-column id": "int64",
    "--dataset python-docs --out-dir taken": "input & python-docs",
    "--dataset python-docs --input good.jsonl": "leave --dataset out",
    "--pretokenized 100": "at most 99, the shards there are",
    "good.jsonl --tokenizer bytes": "Use --input good.jsonl.",
    "--dataset python-doc": "Did you mean python-docs?",
    "": "--dataset python-docs & --input",  # no network
    "--pretokenized 1 --tokenizer gpt2": "val_000000.bin",
    "--input http://me:secret@host/a.txt?key=secret": "Addresses are not read here & curl -LO http://host/a.txt",
    "--input OWNER/NAME": "--dataset OWNER/NAME",
    "--dataset ./good.jsonl": "--input FILES",
    "--dataset hf://datasets/OWNER/NAME": "OWNER/NAME & --input FILES",
    "--input good.jsonl --config en": "good.jsonl is no data set with splits",
    "--dataset python-docs --split test": "neither configs nor splits",
}


def test_bad_input_is_one_line_and_status_2_and_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "RETRY_SECONDS", 0)
    texts = random_texts(5)
    for name in ("good", "other"):
        write_jsonl(tmp_path / f"{name}.jsonl", texts)
    parquet = write_parquet(tmp_path / "p.parquet", texts, column="content")
    pq.write_table(pa.table({"id": [1, 2]}), "numbers.parquet")
    contents = {
        "empty.jsonl": b"\n",
        "cut.parquet": Path(parquet).read_bytes()[:-20],
        "a.pdf": b"text\n",
        "a.tiktoken": b"hello",
        "file": b"",
        "foreign/x_train_000001.npy": b"",
        "trained/tokenizer.tiktoken": b"by the user",
        "strange/meta.json": b'{"tokenizer": "bytes"}',
    }
    for name, content in contents.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content)
    ranks = {bytes([i]): i for i in range(256)} | {i.to_bytes(4, "big"): i for i in range(256, 65536)}
    parts = dict(pat_str="(?s:.)", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 65536})
    tokenizers.write_encoding(tiktoken.Encoding("big", **parts), "big.tiktoken")
    make(tmp_path, "good.jsonl", name="taken")
    before = listing(tmp_path)
    for number, (words, said) in enumerate(BAD_INPUTS.items()):
        args = shlex.split(words)
        args += [] if "--tokenizer" in args else ["--tokenizer", "bytes"]
        args += [] if "--out-dir" in args else ["--out-dir", f"out{number}"]
        line = refused(fineweb.main, *args)
        assert all(word in line for word in said.split(" & ")) and "secret" not in line, (args, line)
        assert listing(tmp_path) == before, args
