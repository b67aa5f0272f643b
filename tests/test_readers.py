"""Documents: every kind of file is read as a plain loop reads it, and a long text is cut where no token crosses."""

import csv
import gzip
import hashlib
import io
import itertools
import json
import os
import random
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fineweb import Options, prepare
from plumbing.cli.console import UserError
from plumbing.data import inputs, python_docs, readers, tokenizers

from corpora import (
    WORDS,
    as_bytes,
    documents,
    holds,
    make,
    random_texts,
    read,
    read_meta,
    train_small,
    write_jsonl,
    write_parquet,
)

KINDS = "parquet jsonl jsonl.gz json csv tsv.gz txt txt.zst md PY".split()


def written(kind, texts):
    """(the content of a file of this kind, the documents in it)"""
    if "jsonl" in kind:
        return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts), texts
    if "json" in kind:
        return json.dumps([{"n": [n, "]"], "text": text} for n, text in enumerate(texts)], indent=1), texts
    if "csv" in kind or "tsv" in kind:
        rows = io.StringIO(newline="")
        csv.writer(rows, "excel-tab" if "tsv" in kind else "excel").writerows([("id", "text"), *enumerate(texts)])
        return rows.getvalue(), texts
    return "\n".join(texts), ["\n".join(texts)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_input_gives_the_tokens_of_a_plain_loop(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(readers, "JSON_BLOCK", 100)
    texts = random_texts(40, longest=100)
    if "sv" in kind:
        texts[7] = "long, " * 30_000  # Python's default is less
    path = tmp_path / f"data.{kind}"
    column = "text"
    if kind == "parquet":
        write_parquet(path, texts, column := "a.b")
    else:
        content, texts = written(kind, texts)
        data = content.encode("utf-8-sig")  # a byte order mark, as some Windows programs write it, is no text
        if kind.endswith("gz"):  # of two members, as pigz and cat make them
            data = gzip.compress(data[:1000]) + gzip.compress(data[1000:])
        elif kind.endswith("zst"):
            data = pa.compress(data, codec="zstd", asbytes=True)
        path.write_bytes(data)
    folder = make(tmp_path, path, text_column=column, shard_size=5000)
    if len(texts) > 1:
        assert holds(folder, texts)
    else:  # each split has a part of it
        parts = [read(folder, f"*_{split}_*") for split in ("val", "train")]
        assert np.concatenate(parts).tolist() == as_bytes(texts).tolist()


@pytest.mark.parametrize("size", [3000, 100_000])
def test_a_long_text_is_divided_piece_by_piece(tmp_path, size, monkeypatch):
    """Each is in one of the splits, in the order of the text."""
    monkeypatch.setattr(readers, "BLOCK_CHARS", 500)
    text = "\n".join(random_texts(40))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8", newline="")
    folder = make(tmp_path, str(tmp_path / "a.txt"), shard_size=size)
    parts = {split: read(folder, f"*_{split}_*").tolist() for split in ("val", "train")}
    for piece, starts in readers.split_text(text[i : i + 500] for i in range(0, len(text), 500)):
        ids = [256] * starts + list(piece.encode())
        split = next(split for split in parts if parts[split][: len(ids)] == ids)
        del parts[split][: len(ids)]
    assert parts == {"val": [], "train": []}


@pytest.mark.parametrize("length", [50, 400, 1000])
def test_a_short_text_is_whole_in_one_split(tmp_path, length, monkeypatch):
    """Each was cut before its last word, and its two parts could be in different splits."""
    monkeypatch.setattr(readers, "BLOCK_CHARS", 500)
    texts = [f"{i:02d} " + "The quick brown fox jumps over the lazy dog, " * 22 for i in range(31)]
    texts = [text[:length] for text in texts]
    for i, text in enumerate(texts):
        (tmp_path / f"{i:02d}.txt").write_text(text, encoding="utf-8")
    folder = make(tmp_path, str(tmp_path / "*.txt"))
    found = {split: documents(folder, split) for split in ("train", "val")}
    assert len(found["val"]) == 3
    assert sorted(found["train"] + found["val"]) == [text.encode() for text in texts]


def test_a_text_keeps_its_line_ends(tmp_path):
    texts = [f"One{n}\r\n\r\nTwo\rThree\n" for n in range(20)]
    for n, text in enumerate(texts):
        (tmp_path / f"{n:02d}.txt").write_bytes(text.encode())
    assert holds(make(tmp_path, tmp_path / "*.txt"), texts)


def test_tokens_of_odd_texts_are_tiktokens_own(tmp_path):
    enc = train_small("gpt2")
    tokenizers.write_encoding(enc, tmp_path / "small.tiktoken")
    texts = ["<|endoftext|>", "a\r\nb", " " * 3000 + "x", "half a pair \ud83d", "\x00\x1c\u3000 end"]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    folder = make(tmp_path, path, tokenizer=str(tmp_path / "small.tiktoken"), shard_size=100)
    tokens = [*read(folder, "*_train_*"), *read(folder, "*_val_*")]  # of so few, the last one is for validation
    assert tokens == [i for text in texts for i in [enc.eot_token, *enc.encode_ordinary(text)]]


# what a text is made of: words, white space and signs, and scripts with and without spaces, with marks that are no
# letters: Russian, Chinese, Arabic, Hindi, Thai
SCRIPTS = [
    WORDS,
    [" ", "  ", "\n", "\r\n", "\n\n", "\t", "\u00a0", "\u3000", "\x1c", "\u2028", "\x85"],
    ". ... , 's ' \u2019s 3.14 1234567 \u00b2 _ <|endoftext|> \U0001f642 \u200b".split(" "),
    "\u0412\u0441\u0435 \u0441\u0447\u0430".split(),
    "\u6211\u662f \u4eba \u3002 \uff0c \u300c \u300d \uff12".split(),
    "\u0643\u062a\u0627\u0628 \u060c".split(),
    "\u0939\u093f\u0928\u094d \u0964".split(),
    "\u0e44\u0e17\u0e22 \u0e20\u0e32".split(),
]


def test_a_long_text_is_cut_where_no_token_crosses():
    rng = random.Random(0)
    encs = [train_small("gpt2"), train_small("gpt4")]
    texts = ["\n".join(random_texts(30, seed=1))]
    for _ in range(100):
        scripts = [rng.choice(SCRIPTS) for _ in range(3)]
        texts.append("".join(rng.choice(rng.choice(scripts)) for _ in range(300)))
    for text in texts:
        for size in (1, 7, 50):
            blocks = (text[i : i + size] for i in range(0, len(text), size))
            pieces = [piece for piece, _ in readers.split_text(blocks)]
            assert "".join(pieces) == text
            for enc in encs:
                assert [i for piece in pieces for i in enc.encode_ordinary(piece)] == enc.encode_ordinary(text)


CYRILLIC = "\u0441\u0447\u0430 "
CHINESE = "\u6211\u662f\u3002\n"
HINDI = "\u0939\u093f\u0928 "
ARABIC = "\u0643\u062a\u0627\n"


@pytest.mark.parametrize("separator", ["", "<|endoftext|>"])
@pytest.mark.parametrize("unit", [CYRILLIC, CHINESE, HINDI, ARABIC, "a", "\x00", "\n", "1,2\n"])
def test_a_long_text_is_not_held_in_memory(unit, separator, monkeypatch):
    """The only places to cut at were after an ASCII letter."""
    monkeypatch.setattr(readers, "BLOCK_CHARS", 1000)
    monkeypatch.setattr(readers, "MAX_PIECE", 10_000)
    text = "x" + unit * (100_000 // len(unit)) + "x"
    blocks = (text[i : i + 1000] for i in range(0, len(text), 1000))
    pieces = [text for text, _ in readers.split_text(blocks, separator)]
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 12_000


@pytest.mark.parametrize("separator", ["<|endoftext|>", "THE END OF IT"])  # the second may be cut after a word
@pytest.mark.parametrize("block", [1, 5, 40, 100_000])
def test_a_separator_ends_a_document(block, separator, capsys, monkeypatch):
    monkeypatch.setattr(readers, "BLOCK_CHARS", block)
    texts = ["One day.\n\nThe end.", "Two.", "a long one " * 50 + "x", "four < five " + separator[:7]]
    joined = f"\n{separator}\n".join(texts[:2]) + f"\n{separator}\r\n\n{separator}"
    joined += f"{separator}\n".join(texts[2:]) + f"\n{separator}\n"
    found = []
    for text, starts in readers.split_text((joined[i : i + block] for i in range(0, len(joined), block)), separator):
        found += [""] if starts else []
        found[-1] += text
    assert found == texts
    # what ends as the separator begins is whole, and a single document that ends with it needs no note
    assert list(readers.split_text(["a---b--"], "---")) == [("a", True), ("b--", True)]
    assert list(readers.split_text(["a\n---\n"], "---")) == [("a", True)]
    assert not capsys.readouterr().out


def test_notes_say_how_a_separator_was_taken(tmp_path, capsys):
    stories = [f"Once upon a time there were {i} bears." for i in range(40)]
    path = tmp_path / "TinyStories-valid.txt"
    path.write_text("\n<|endoftext|>\n".join(stories), encoding="utf-8")
    notes = {"": '--separator "<|endoftext|>"', "</s>": "does not contain --separator '</s>'"}
    for separator, note in (notes | {"<|endoftext|>": ""}).items():
        folder = make(tmp_path, str(path), name=f"out{len(separator)}", separator=separator)
        said = capsys.readouterr().out
        assert note in said
        assert bool(note) == ("note:" in said)
    assert holds(folder, stories)


def test_inputs_are_files_folders_and_globs_in_the_order_given(tmp_path, monkeypatch):
    texts = random_texts(12)
    (tmp_path / "texts").mkdir()
    names = ["texts/b.json", "texts/a.jsonl.gz", "2.jsonl", "1.jsonl"]  # .json is taken for JSON lines, as in C4
    for i, name in enumerate(names):
        write_jsonl(tmp_path / name, texts[3 * i : 3 * i + 3])
    make(tmp_path, str(tmp_path / "1.jsonl"), name="texts")  # writes meta.json and more into that folder
    (tmp_path / "texts" / "notes.pdf").write_text("not a text to train on", encoding="utf-8")
    folder = make(tmp_path, tmp_path / "texts", tmp_path / "[12].jsonl")
    assert holds(folder, texts[3:6] + texts[:3] + texts[9:] + texts[6:9])
    monkeypatch.chdir(tmp_path)
    assert prepare(Options(input=("texts",), tokenizer="bytes")) == "texts_shards"


def test_python_docs_are_the_documentation_of_this_python(tmp_path, monkeypatch):
    """Of its top folder here, as all of it takes seconds."""
    monkeypatch.setattr(os, "walk", lambda root, walk=os.walk: itertools.islice(walk(root), 1))
    tokens = read(prepare(Options(dataset="python-docs", tokenizer="bytes", out_dir=str(tmp_path / "docs"))))
    assert len(tokens) > 1e6
    assert np.count_nonzero(tokens == 256) > 200
    text = bytes(np.where(tokens == 256, 0, tokens).astype(np.uint8)).decode()
    # a piece of the language reference, and a docstring of the library
    assert "statement is used for conditional execution" in text
    assert random.Random.seed.__doc__.splitlines()[0] in text


def test_docstrings_stand_under_what_they_document_in_an_order_of_their_own(tmp_path, monkeypatch):
    (tmp_path / "pack" / "tests").mkdir(parents=True)
    source = '"A package."\nprint("never run")\nclass C:\n  "Its class."\n  def f(self, *, a=1):\n    "Does."\n'
    files = {"pack/__init__.py": source, "pack/tests/t.py": '"""left out"""', "old.py": "print 1"}  # not Python 3
    files |= {f"m{i}.py": f'"""Module {i}."""' for i in range(5)}
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    monkeypatch.setattr(python_docs.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    monkeypatch.setattr("pydoc_data.topics.topics", {"if": "The if statement."})
    package = "module pack\n\nA package.\n\nclass C\n\nIts class.\n\ndef f(self, *, a=1)\n\nDoes."
    texts = {f"m{i}.py": f"module m{i}\n\nModule {i}." for i in range(5)} | {
        "if": "The if statement.",
        "pack.py": package,
    }
    # whatever the order in which a disk lists its files
    order = sorted(texts, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    assert python_docs.python_docs() == [texts[name] for name in order]


def test_a_note_says_what_is_left_out(tmp_path, capsys):
    (tmp_path / "texts" / "sub").mkdir(parents=True)
    for name in ("README.md", "b.md", "sub/c.rst", "d.pdf"):
        (tmp_path / "texts" / name).write_text(f"In {name}.", encoding="utf-8")
    folder = str(tmp_path / "texts")

    def listed(*patterns):
        return [Path(source.name).name for source in inputs.list_inputs(patterns)]

    assert listed(folder) == ["b.md"]
    said = capsys.readouterr().out
    assert f"note: 2 of 3 files in {folder} are left out, such as {folder}/README.md." in said
    # a README is text only where it is asked for
    assert listed(f"{folder}/**", f"{folder}/README.md") == ["b.md", "c.rst", "README.md"]
    assert "2 of 4 files" in capsys.readouterr().out
    for pattern, said in (("/sub/*.txt", "No file matches .*txt"), ("/d*", "d.pdf is not read as input")):
        with pytest.raises(UserError, match=f"{said}.*. Give files that end in .parquet, .jsonl, "):
            listed(folder + pattern)


@pytest.mark.parametrize(
    "name, content, words",
    [
        # the rows between two stray quotes would be one text
        ("a.csv", b'id,text\n1,"a\n2,b\n3,"c" d\n', "Line 2 of .*a.csv is not a valid row of CSV"),
        ("a.csv", b"text,id,text\na,b,c", "has 2 columns called 'text'. Rename"),
        (
            "a.csv",
            b"id;body\n1;a, b\n",
            "Line 2 of .* has no text under 'text'. Its columns are id, body: .*--text-column",
        ),
        ("a.json", b'[{"text": "a"}', "Entry 2 of .*a.json is not a valid JSON object: Expecting value"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "Line 2 of .*a.jsonl is not a valid JSON object: Expecting value"),
        ("a.jsonl", b'["a"]', "Line 1 of .*a.jsonl is not an object with columns, but \\['a'\\]"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_reason(tmp_path, name, content, words, monkeypatch):
    monkeypatch.setattr(readers, "JSON_BLOCK", 5)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=words):
        make(tmp_path, str(tmp_path / name))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "kind, place, number",
    [("parquet", "Row 3", 4), ("jsonl", "Line 3", 5), ("json", "Entry 3", 5), ("csv", "Line 4", 7)],
)
def test_rows_without_a_text_are_left_out_counted_and_the_first_three_named(tmp_path, kind, place, number, capsys):
    """So are those of a CSV file with more or fewer fields than the header, or wrong quotes: they may be cut."""
    texts = [f"Text {n}." for n in range(30)]
    texts[2] = texts[11] = texts[12] = texts[20] = None
    path = tmp_path / f"a.{kind}"
    records = [{"text": text, "id": n} for n, text in enumerate(texts)]
    del records[20]["text"]
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    else:
        rows = [f'"{text or ""}",{n}' for n, text in enumerate(texts)]
        lines = {"csv": ["text,id", *rows, "a, comma,99", "99", '"a" quote,9'], "json": [json.dumps([*records, "x"])]}
        path.write_text("\n".join(lines.get(kind, map(json.dumps, [*records, 3]))), encoding="utf-8")
    folder = make(tmp_path, str(path))
    assert sorted(read(folder)) == sorted(as_bytes(filter(None, texts)))
    word, first = place.split()
    said = " ".join(f"{word} {int(first) + i} of {path} has no text under 'text'." for i in (0, 9, 10))
    assert f"note: {number} rows left out. {said}" in capsys.readouterr().out
    meta = read_meta(folder)
    assert (meta["documents"], meta["rows_left_out"], len(meta["left_out"])) == (26, number, 3)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_column_may_be_null_throughout_a_file(tmp_path, kind):
    paths = [tmp_path / f"{name}.{kind}" for name in "ab"]
    for path, title in zip(paths, (None, "T")):
        rows = [{"title": title, "text": f"{path.stem}{n}"} for n in range(30)]
        if kind == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    texts = [f"a{n}" for n in range(30)] + [f"T\n\nb{n}" for n in range(30)]
    for columns, expected in (("title,text", texts), ("title", ["T"] * 30)):
        folder = make(tmp_path, *map(str, paths), name=columns, text_column=columns)
        assert sorted(read(folder)) == sorted(as_bytes(expected))


@pytest.mark.parametrize(
    "name, text",
    [
        ("a.csv", 'id;text\n1;"a; b"\n\n2;c, d\n'),
        ("a.tsv", 'id,text\n1,a; b\n2,"c, d"\n'),
        ("a.tsv", "id, or number\ttext\n1\ta; b\n2\tc, d\n"),
        ("a.json", '{\n "text": "a; b"\n}\n{\n "text": "c, d"\n}\n'),
        ("a.jsonl", '[\n {"text": "a; b"},\n {"text": "c, d"}\n]\n'),
        ("a.jsonl", '\ufeff{"text": "a; b"}\n\ufeff{"text": "c, d"}\n'),  # of files that were joined
    ],
)
def test_other_delimiters_lines_and_marks(tmp_path, name, text):
    (tmp_path / name).write_text(text, encoding="utf-8")
    rows = readers.read_rows(inputs.local_source(str(tmp_path / name)), ["text"])
    assert [readers.text_of(row.values, ["text"]) for row in rows] == ["a; b", "c, d"]


GERMAN = "Gr\u00f6\u00dfe, na\u00efve caf\u00e9. " * 400


@pytest.mark.parametrize(
    "content, command, converted",
    [
        (b"plain, " * 900 + b"it\x92s", "iconv -f WINDOWS-1252 -t UTF-8", "plain, " * 900 + "it\u2019s"),
        (GERMAN.encode("latin-1"), "iconv -f WINDOWS-1252 -t UTF-8", GERMAN),
        (GERMAN.encode() + b"\xf6" + GERMAN.encode(), "iconv -f UTF-8 -t UTF-8 -c", GERMAN * 2),
        (GERMAN.encode("utf-16"), "iconv -f UTF-16 -t UTF-8", GERMAN),
        (GERMAN.encode("utf-16-le"), "iconv -f UTF-16 -t UTF-8", None),
        (gzip.compress(GERMAN.encode()), "gzip -dc", GERMAN),
    ],
    ids="Windows Latin-1 bad-byte UTF-16 no-mark gzip".split(),
)
def test_a_file_that_is_not_utf8_is_answered_with_the_command_that_converts_it(tmp_path, content, command, converted):
    """The one for Latin-1 spoiled quotes of Windows, and texts of UTF-8 with a bad byte throughout."""
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f" UTF-8.*: {command} FILE > NEW"):
        make(tmp_path, str(path))
    program, *args = command.split()
    if converted and shutil.which(program):
        # with -c, it says by its status that it left something out
        done = subprocess.run([program, *args], input=content, capture_output=True)
        assert done.stdout.decode() == converted


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv"])
@pytest.mark.parametrize("kind", ["parquet", "arrow", "picture"])
def test_a_binary_file_is_not_taken_for_text_of_windows(tmp_path, name, kind):
    """The command that converts Latin-1 would have made a text of it."""
    table = pa.table({"text": random_texts(9)})
    if kind == "parquet":
        pq.write_table(table, tmp_path / name)
    elif kind == "arrow":
        with pa.OSFile(str(tmp_path / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    else:
        (tmp_path / name).write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x40\x9c")
    with pytest.raises(UserError, match="is not text: it has a byte 0x.. .*, and NUL bytes") as caught:
        make(tmp_path, tmp_path / name)
    assert "WINDOWS" not in str(caught.value)


@pytest.mark.parametrize(
    "content, shown",
    [("# exported\nid,text\n1,a\n", r"\(# exported\)"), ("id|text\n1|a, b\n", r"\(id\|text\)")],
)
def test_the_header_is_shown_as_it_was_read(tmp_path, content, shown):
    (tmp_path / "a.csv").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=f"Line 2 of .* has 2 fields, but the header has 1 {shown}: a text with ','"):
        make(tmp_path, tmp_path / "a.csv")


@pytest.mark.skipif(not shutil.which("zstd"), reason="needs zstd")
def test_a_zstd_file_with_a_long_window_is_answered_with_the_command_that_unpacks_it(tmp_path):
    packed = subprocess.run(["zstd", "-q", "--long=31"], input=b"a text", capture_output=True).stdout
    (tmp_path / "a.txt.zst").write_bytes(packed)
    with pytest.raises(UserError, match="a.txt.zst was compressed with a long window. .*zstd -d --long=31"):
        make(tmp_path, tmp_path / "a.txt.zst")


@pytest.mark.parametrize("start, between, end", [("[", " ,\n", "]"), ("", "\n", "\n")])
def test_json_larger_than_memory_is_read_in_blocks(start, between, end, monkeypatch):
    """Entries far longer than a block, too: none is read more than a few times."""
    monkeypatch.setattr(readers, "JSON_BLOCK", 100)
    entries = [{"text": "x" * (50_000 if n == 7 else 30), "n": [-1e5, None, "\u00e9\n"]} for n in range(3000)]

    class File(io.StringIO):
        largest = 0

        def read(self, size):
            File.largest = max(File.largest, size)
            return super().read(size)

    monkeypatch.setattr(readers, "open_text", lambda path: File(start + between.join(map(json.dumps, entries)) + end))
    places, found = zip(*readers.read_values("a.json", "a.json"))
    assert list(found) == entries
    assert places[2999] == f"{'Entry' if start else 'Line'} 3000"
    assert 50_000 < 2 * File.largest < 200_000
