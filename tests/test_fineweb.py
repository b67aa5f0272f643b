"""fineweb.py: what it writes is what a plain loop over the documents gives, whatever happens on the way."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import fineweb
import numpy as np
import pytest
import train_gpt2
from plumbing.cli.console import UserError
from plumbing.data import downloads, preparation, python_docs, readers
from plumbing.files import lock_folder

from corpora import (
    TABLES,
    as_bytes,
    documents,
    holds,
    kill_again_and_again,
    make_here,
    random_texts,
    read,
    read_meta,
    write,
    write_rows,
    write_texts,
)
from harness import change_meta, full_disk, listing, patched, printed_commands, refused, run, status_of

TEXTS = random_texts(60)


@pytest.fixture
def path():
    """A file with TEXTS."""
    return write_texts("a.jsonl", TEXTS)


def make_small(path, **options):
    """Make some ten shards."""
    return make_here(path, **{"shard_size": 5000} | options)


# ----- Shards -------------------------------------------------------------------------------------------


def test_meta_json_and_the_last_lines_describe_the_shards(path, output):
    folder = make_small(path)
    lengths = {path.name: len(np.load(path)) for path in folder.glob("*.npy")}
    assert len(lengths) > 3
    assert sorted(os.listdir(folder)) == sorted([*lengths, "meta.json", *TABLES])
    meta = read_meta(folder)
    assert meta == meta | {
        "dataset": "input",
        "tokenizer": "bytes",
        "vocab_size": 257,
        "documents": 60,
        "tokens": len(as_bytes(TEXTS)),
        "shards": lengths,
        "complete": True,
    }
    train = len(read(folder, "*_train_*"))
    said = output()
    assert f"{train:,} tokens to train on, {meta['tokens'] - train:,} to validate on" in said
    assert "from 60 documents" in said


@pytest.mark.parametrize("longest", [30, 3000])  # the second: most documents are longer than a shard
def test_shards_hold_whole_documents_up_to_their_size(longest):
    texts = random_texts(60, longest=longest)
    folder = make_here(write_texts("a.jsonl", texts), shard_size=1000)
    assert holds(folder, texts)
    shards = [np.load(path) for path in folder.glob("*.npy")]
    assert len(shards) > 4
    for shard in shards:
        assert len(shard) <= 1000 or np.count_nonzero(shard == 256) == 1


def test_max_tokens_ends_with_a_document():
    texts = random_texts(400, longest=30)
    path = write_texts("a.jsonl", texts)
    folder = make_here(path, shard_size=1000, max_tokens=2345)
    last = np.count_nonzero(read(folder) == 256) - 1
    assert holds(folder, texts[: last + 1])
    num_tokens = len(read(folder))
    assert num_tokens - len(as_bytes([texts[last]])) < 2345 <= num_tokens


# ----- Two splits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("texts", [["x" * 100], ["x" * 9, "y" * 99], ["x" * 99, "y" * 9]])
def test_every_input_has_two_splits(texts):
    folder = make_here(write_texts("a.jsonl", texts))
    val = read(folder, "*_val_*")
    train = read(folder, "*_train_*")
    assert 0 < len(val) < 0.2 * len(train)
    assert sorted([*val, *train]) == sorted(as_bytes(texts))


def numbers_for_validation(folder):
    """The numbers that the texts in the validation split end with."""
    return [int(text.split()[-1]) for text in documents(folder, "val")]


def test_one_document_in_eleven_is_for_validation_whatever_the_lengths():
    """They are from all parts of the input. The size of a shard does not matter either."""
    texts = [f"Document {n}" for n in range(660)]
    numbers = numbers_for_validation(make_here(write_texts("a.jsonl", texts), name="short"))
    assert len(numbers) == 60
    assert np.histogram(numbers, 10, (0, 660))[0].min() >= 4
    for number in numbers:
        texts[number] = "long " * 140 + texts[number]
    folder = make_here(write_texts("a.jsonl", texts), name="long", shard_size=6000)
    assert len(list(folder.glob("*_val_*"))) > 3
    assert numbers_for_validation(folder) == numbers


def test_of_a_large_text_fewer_documents_are_for_validation():
    """But it is only as large as max_tokens."""
    path = write_texts("a.jsonl", random_texts(400, longest=3))
    assert 0 < len(documents(make_here(path, shard_size=30), "val")) < 8
    folder = make_here(path, name="begin", shard_size=300, max_tokens=3000)
    val = len(documents(folder, "val"))
    assert val / (val + len(documents(folder, "train"))) == pytest.approx(1 / 11, rel=0.2)


def test_of_many_files_those_for_validation_are_from_all_of_them():
    for number in range(66):
        write(f"{number:02d}.txt", f"File {number}")
    numbers = numbers_for_validation(make_here("*.txt"))
    assert np.histogram(numbers, 3, (0, 66))[0].tolist() == [2, 2, 2]


# ----- The command that comes next ----------------------------------------------------------------------


@pytest.mark.parametrize("length", [40, 30_000])
def test_the_command_that_comes_next_trains_on_the_shards(length, output):
    write("a b.md", "To be. " * (length // 7))
    fineweb.main(["--input", "a b.md", "--tokenizer", "bytes"])
    command = printed_commands(output())[-1]
    assert Path(command[1]).name == "train_gpt2.py"
    small = "--max-steps 1 --device cpu --n-layer 1 --n-embd 32 --n-head 1"
    assert status_of(train_gpt2.main, [*command[2:], *small.split()]) == 0


@pytest.mark.parametrize("name", [".notes.txt", "-x.txt", "\x1b[31m.txt"])
def test_the_folder_is_named_after_the_first_file(name, output):
    """A hidden file's shards were strewn over the current folder, and the next command was --data ""."""
    write(name, "To be. " * 100)
    fineweb.main([f"--input={name}", "--tokenizer", "bytes"])
    folder = name.strip(".").removesuffix(".txt")
    assert sorted(os.listdir()) == sorted([name, folder])
    assert "\x1b" not in output()


@pytest.mark.parametrize(
    "gpu, lengths, words",
    [
        (None, [10**8], "--preset quickstart --data x/ --out-dir log/x"),  # it was that of a GPT-2 of 124M
        ("here", [10**8], "--preset gpt2 --data x/ --out-dir log/x --passes 1"),
        # 128 tokens and their targets are cut from each of these shards
        (
            "",
            [200] * 19,
            "--preset quickstart --data x/ --out-dir log/x --sequence-length 128 --total-batch-size 256",
        ),
    ],
)
def test_the_model_that_comes_next_suits_the_machine(monkeypatch, gpu, lengths, words):
    monkeypatch.setattr(shutil, "which", lambda name: gpu)
    command = fineweb.training_command("x/", lengths, [10**5])
    assert " ".join(str(word) for group in command[2:] for word in group) == words


# ----- Cores and memory ---------------------------------------------------------------------------------


def test_neither_cores_nor_batches_change_a_byte(path, monkeypatch):
    monkeypatch.setattr(preparation, "num_cores", lambda: 0)  # which is not asked for
    one = listing(make_small(path, name="one/out", num_proc=1))
    monkeypatch.setattr(preparation, "BATCH_BYTES", 100)
    monkeypatch.setattr(preparation, "QUEUE_BYTES", 1000)
    assert listing(make_small(path, name="more/out", num_proc=5)) == one


def measure_memory():
    """Print the peak of memory for inputs of 2, 2 and 10 MB: the first one also imports what is imported late."""
    preparation.BATCH_BYTES = 100_000
    preparation.QUEUE_BYTES = 400_000
    for number, count in enumerate((10, 10, 50)):
        rows = [{"text": "A text."}, *[{"text": "x" * 100_000}, {"other": "x" * 100_000}] * count]
        path = write_rows(f"{count}.jsonl", rows)
        tracemalloc.start()
        make_here(path, name=f"out{number}", shard_size=200_000, num_proc=4)
        print("peak", tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_input():
    """Neither that of texts nor that of rows that are left out. No other test's threads are in that process."""
    [said] = run(measure_memory)
    _, small, large = map(int, re.findall(r"peak (\d+)", said))
    assert large < small + 3_000_000


# ----- The same command again ---------------------------------------------------------------------------


def make_in_small_blocks(name, path, max_tokens):
    with patched(preparation, "BATCH_BYTES", 1000), patched(readers, "BLOCK_CHARS", 1000):
        return make_here(path, name=f"{name}/out", shard_size=2000, max_tokens=max_tokens)


@pytest.mark.parametrize("name, max_tokens", [("a.jsonl", 30_000), ("a.txt", 0)])
def test_after_kills_the_same_command_ends_with_the_same_bytes(path, name, max_tokens):
    write("a.txt", "\n".join(TEXTS))
    whole = listing(make_in_small_blocks("whole", name, max_tokens))
    assert len(whole) > 8
    kill_again_and_again(make_in_small_blocks, "killed", name, max_tokens)
    assert listing(make_in_small_blocks("killed", name, max_tokens)) == whole


def test_a_folder_is_locked_only_while_what_is_missing_is_made(path, output):
    """Several processes can use a finished one. What is damaged, or not in meta.json, is missing."""
    folder = make_small(path)
    before = listing(folder)
    with lock_folder(folder):
        make_small(path)
        assert "is complete" in output()
        os.truncate(folder / "out_train_000002.npy", 2000)
        with pytest.raises(UserError, match="in use by another process"):
            make_small(path)
    make_small(path)
    assert listing(folder) == before
    change_meta(folder, shards={})
    make_small(path)
    assert listing(folder) == before


def write_lines(path, lines):
    write(path, "\n".join(lines))


def test_after_a_bad_line_is_repaired_the_same_command_makes_the_rest(path, output):
    """Unless rows in shards have changed: some were missing or there twice, and the shards said to be complete."""
    lines = path.read_text(encoding="utf-8").splitlines()
    write_lines(path, [*lines[:50], "{", *lines[51:]])
    with patched(preparation, "BATCH_BYTES", 1000):
        with pytest.raises(UserError, match="Line 51 of .* is not a valid JSON object"):
            make_small(path, num_proc=1)
    before = listing("out")
    start = lines[:15]  # it stays: the file's beginning is compared in another way
    for changed in (start, [*start, *lines[18:]], [*start, lines[14], *lines[16:]]):
        write_lines(path, changed)
        with pytest.raises(UserError, match="a.jsonl has changed: rows of it are in the shards, but they are"):
            make_small(path)
        assert listing("out") == before
    first = Path("out/out_train_000001.npy")
    written = first.stat().st_mtime_ns
    write_lines(path, [*lines, '{"text": "more"}'])
    assert holds(make_small(path), [*TEXTS, "more"])
    assert first.stat().st_mtime_ns == written
    make_small(path)  # and knows the file afterwards
    assert "is complete" in output()


def test_a_file_that_changed_behind_its_beginning_is_named(path, output):
    """It had been read to its end: the shards were of two versions. Complete ones say that it was not read again."""
    other = write_texts("b.jsonl", TEXTS)
    folder = make_here(path, other, shard_size=5000)
    content = path.read_bytes()
    path.write_bytes(content[:4096] + content[4096:].replace(b"the", b"her"))
    make_here(path, other, shard_size=5000)
    assert "The input was not read again" in output()
    change_meta(folder, complete=False)
    with pytest.raises(UserError, match="a.jsonl has changed: rows of it"):
        make_here(path, other, shard_size=5000)


def test_an_input_that_is_another_text_is_refused(path):
    """Also one with more text, which may be added while not all is read."""
    folder = make_small(path)
    other = ["other", *TEXTS[1:]]
    for complete, texts in ((True, [*TEXTS, "more"]), (True, other), (False, other)):
        change_meta(folder, complete=complete)
        write_texts(path, texts)
        with pytest.raises(UserError, match=r"file 1 of the input .* was \['a.jsonl', .* and is now \['a.jsonl', "):
            make_small(path)


def test_in_a_folder_that_was_renamed_the_names_of_shards_stay(path):
    folder = make_small(path)
    change_meta(folder, complete=False)
    folder.rename("renamed")
    make_small(path.absolute(), name="renamed")
    assert {file.name[:4] for file in Path("renamed").glob("*.npy")} == {"out_"}


def test_a_disk_that_fills_up_keeps_the_shards_before(path):
    def replace_until_full(part, name):
        (full_disk if Path(name).name == "out_train_000003.npy" else replace)(part, name)

    with patched(os, "replace", replace_until_full) as replace:
        with pytest.raises(UserError, match="No space left"):
            make_small(path)
    kept = listing("out")
    assert "out_train_000002.npy" in kept
    del kept["meta.json"]
    whole = listing(make_small(path, name="other/out"))
    assert kept.items() < whole.items()
    assert listing(make_small(path)) == whole


@pytest.mark.parametrize("name", ["bytes", "small-gpt2"])
def test_the_quick_start_takes_the_shards_that_are_there(name, path, output):
    """Made with another tokenizer, by another Python."""
    folder = make_small(path)
    change_meta(folder, tokenizer=name)
    before = listing(folder)
    fineweb.make_python_docs(str(folder))
    assert listing(folder) == before
    assert ("has tokenizer small-gpt2, not the bytes that" in output()) == (name != "bytes")


def test_a_quick_start_whose_shards_are_half_made_finishes_them(monkeypatch):
    """They are bytes of Python's documentation, the first part of it for validation."""
    texts = random_texts(40)
    monkeypatch.setattr(python_docs, "python_docs", lambda: texts)
    fineweb.prepare(fineweb.Options(dataset="python-docs", out_dir="docs"))
    assert documents("docs", "val") + documents("docs", "train") == texts
    whole = listing("docs")
    change_meta("docs", complete=False)
    Path("docs/pythondocs_val_000000.npy").unlink()
    fineweb.make_python_docs("docs")
    assert listing("docs") == whole


# ----- Importing ----------------------------------------------------------------------------------------


def test_importing_runs_nothing_and_a_text_needs_no_large_library():
    """They take seconds, and of the addresses that a cluster allows (ulimit -v) more than there may be."""
    code = (
        "import os, socket, sys\n"
        "def refuse(*args): raise OSError('no network')\n"
        "socket.socket.connect = socket.create_connection = refuse\n"
        "import fineweb, smoltalk, tokenizer\n"
        "print(os.listdir())\n"
        "open('a.txt', 'w').write('A text.')\n"
        "fineweb.main(['--input', 'a.txt', '--tokenizer', 'bytes'])\n"
        "slow = {'datasets', 'transformers', 'torch', 'pyarrow', 'huggingface_hub', 'tokenizers'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("[]\n")


# ----- Bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"shards": {"../v/v_train_000001.npy": 5}},  # someone else's led to shards of another folder
        {"ends": {"x": {"row": 3, "hash": 1}}},
        {"made_from": {"sources": None}},
    ],
)
def test_a_meta_json_that_is_damaged_or_of_another_version_is_refused(path, changes):
    change_meta(make_small(path), complete=False, **changes)
    before = listing(".")
    with pytest.raises(UserError, match="meta.json is damaged(: its shards cannot be|, or of another version)"):
        make_small(path)
    assert listing(".") == before


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv"])
def test_values_that_are_not_read_are_counted_in_the_last_line(kind, output):
    """Of a Parquet file, it counted rows, also those without a value."""
    rows = [
        {"title": f"T{n}", "text": f"D{n}", "label": False, "none": None, "few": "x" * (n < 3)} for n in range(24)
    ]
    make_here(write_rows(f"a.{kind}", rows))
    said = output().splitlines()[-1]
    assert said == "not read: title (24 values), label (24 values), few (3 values)"


@pytest.mark.parametrize(
    "name, content, names",
    [
        ("a.jsonl", '{"title": "T", "doc": {"text": "D", "id": 1, "to": {"n": 0}}}\n', "title, doc.id, doc.to"),
        ("a.jsonl", '{"doc.text": "D", "doc": {"text": "T"}}\n', "doc"),
        ("a.jsonl", '{"doc": {"text": "T", "text": "D"}}\n', "doc.text given twice"),
        ("a.csv", "doc.text,id,doc.text\nT,,D\n", "doc.text given twice"),
    ],
)
def test_what_stands_beside_the_text_is_named(name, content, names, output):
    """Neither what stands in its object, nor the first of two values of one name, was read or named."""
    write(name, content)
    folder = make_here(name, text_column="doc.text")
    assert sorted(read(folder)) == sorted(as_bytes(["D"]))
    named = ", ".join(f"{each} (1 value)" for each in names.split(", "))
    assert output().endswith(f"\nnot read: {named}\n")


# {arguments: words that the line must have}; --tokenizer is bytes and --out-dir a new folder unless they are given
BAD_INPUTS = {
    "--input keys.json": "Its columns are data: {'data': [{'text': 'a'}]} & jq -c '.data[]' FILE > NEW.jsonl",
    "--input good.jsonl --tokenizer char": "There is no tokenizer 'char'. Use gpt2, bytes & or a folder",
    # what is wrong with the input is said before what is wrong with the tokenizer
    "--input none*.txt --tokenizer nowhere": "none*.txt & --dataset OWNER/NAME",
    "--input good.jsonl --separator x --shard-size 0": "--separator only & --shard-size is 0",
    "--dataset python-docs --input good.jsonl": "leave --dataset out",
    "--pretokenized 100": "at most 99: there are no more",
    "--pretokenized 1 --max-tokens 9 --shard-size 9": "leave --tokenizer, --shard-size, --max-tokens out",
    "--input clone": "clone is a whole data set. If it is a clone, name the files",
    "--input saved": "If save_to_disk wrote it & to_parquet('train.parquet')",
    "good.jsonl --tokenizer bytes": "Use --input good.jsonl.",
    "--pretokenized 1 --tokenizer gpt2": "val_000000.bin",
    "--input http://host/a.txt": "No file matches http://host/a.txt & curl -LO",
    "--dataset ./good.jsonl": "--input FILES",
    "--input good.jsonl --config en --split test --revision v1": "leave --config and --split and --revision out",
    "--dataset python-docs --split test": "neither configs nor splits",
    "--input doc.json --text-column titel,body": "has no text under 'titel'. Its columns are title, body, doc",
    "--input doc.json --text-column doc.content": "has no text under 'doc.content', but {'text'",
    "--input doc.json --text-column doc.text": "under 'doc.text'",
    "--input doc.json --text-column doc.content.text.x": "under 'doc.content.text.x'",
}


@pytest.mark.parametrize("words", BAD_INPUTS)
def test_bad_input_is_refused_in_one_line(words, monkeypatch):
    monkeypatch.setattr(downloads, "RETRY_SECONDS", 0)
    write_texts("good.jsonl", TEXTS)
    contents = {
        "keys.json": '{"data": [{"text": "a"}]}',
        "doc.json": '{"title": "T", "body": "B", "doc": {"content": {"text": "D"}}}',
        "clone/README.md": "---\nlicense: mit\n---\n",
        "clone/test.jsonl": '{"text": "not this"}',
        "saved/state.json": "{}",
    }
    for name, content in contents.items():
        Path(name).parent.mkdir(exist_ok=True)
        write(name, content)
    before = listing(".")
    defaults = ["--tokenizer", "bytes"] * ("--tokenizer" not in words)
    defaults += ["--out-dir", "out"] * ("--out-dir" not in words)
    line = refused(fineweb.main, *shlex.split(words), *defaults)
    assert all(said in line for said in BAD_INPUTS[words].split(" & ")), line
    assert listing(".") == before
