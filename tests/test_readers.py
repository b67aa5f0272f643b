"""Documents: every kind of file is read as a plain loop reads it, and a long text is cut where no token crosses."""

import gzip
import hashlib
import itertools
import json
import random
import shutil
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fineweb import Documents, Options, prepare
from plumbing.cli.console import UserError
from plumbing.data import inputs, python_docs, readers, tokenizers

from corpora import (
    WORDS,
    as_bytes,
    documents,
    holds,
    make_here,
    random_texts,
    read,
    read_meta,
    train_small,
    write,
    write_rows,
    write_texts,
)


@pytest.mark.parametrize("kind", "jsonl jsonl.gz json csv tsv.gz".split())
def test_every_kind_of_rows_gives_the_tokens_of_a_plain_loop(kind, monkeypatch):
    monkeypatch.setattr(readers, "JSON_BLOCK", 100)
    texts = random_texts(40, longest=100)
    texts[7] = "long, " * 30_000  # Python's limit for a field of a CSV file is less
    plain, _, compression = kind.partition(".")
    path = write_rows(f"data.{plain}", [{"n": [1, "]"], "text": text} for text in texts])
    data = b"\xef\xbb\xbf" + path.read_bytes()  # a byte order mark, which some Windows programs write
    if compression:  # in two members, as pigz and cat make them
        data = gzip.compress(data[:1000]) + gzip.compress(data[1000:])
    path = Path(f"data.{kind}")
    path.write_bytes(data)
    assert holds(make_here(path, shard_size=5000), texts)


@pytest.mark.parametrize("kind", "txt txt.zst md PY".split())
def test_every_kind_of_text_is_one_document(kind):
    text = "One\r\n\r\nTwo\rThree\n".join(random_texts(40))
    data = text.encode("utf-8-sig")
    if kind.endswith("zst"):
        data = pa.compress(data, codec="zstd", asbytes=True)
    Path(f"data.{kind}").write_bytes(data)
    assert sorted(read(make_here(f"data.{kind}"))) == sorted(as_bytes([text]))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_columns_are_joined_and_objects_walked_into(kind):
    """One row has no body. The name of a column may have a dot."""
    doc = {"content": {"text": "not this"}, "text": "C"}
    rows = [{"title": f"T{i}", "body": f"B{i}", "doc.content.text": "D", "doc": doc} for i in range(40)]
    rows[3]["body"] = None
    texts = [f"T{i}\n\nB{i}\n\nC\n\nD" for i in range(40)]
    texts[3] = "T3\n\nC\n\nD"
    assert holds(make_here(write_rows(f"a.{kind}", rows), text_column="title,body,doc.text,doc.content.text"), texts)


def test_of_two_columns_of_one_name_the_first_is_named(output):
    pq.write_table(pa.Table.from_arrays([["T"], ["D"]], names=["text", "text"]), "a.parquet")
    assert sorted(read(make_here("a.parquet"))) == sorted(as_bytes(["D"]))
    assert "not read: text given twice (1 value)" in output()


# ----- Texts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3000, 100_000])
def test_a_long_text_is_divided_between_the_splits(size, monkeypatch):
    """Each of its words is in one of them, in the order of the text."""
    monkeypatch.setattr(readers, "BLOCK_CHARS", 500)
    words = [f"word{number:04d}" for number in range(2000)]
    folder = make_here(write("a.txt", " ".join(words)), shard_size=size)
    train = bytes(read(folder, "*_train_*")[1:].tolist()).decode().split()
    val = bytes(read(folder, "*_val_*").tolist()).decode().split()
    assert train == sorted(train)
    assert val == sorted(val)
    assert sorted(train + val) == words
    assert 100 < len(val) < 300


@pytest.mark.parametrize("length", [50, 400, 1000])
def test_a_short_text_is_whole_in_one_split(length, monkeypatch):
    """Each was cut before its last word, and its two parts could be in different splits."""
    monkeypatch.setattr(readers, "BLOCK_CHARS", 500)
    sentence = "The quick brown fox jumps over the lazy dog, "
    texts = [(f"{i:02d} " + sentence * 22)[:length] for i in range(31)]
    for text in texts:
        write(f"{text[:2]}.txt", text)
    folder = make_here("*.txt")
    assert holds(folder, texts)
    assert len(documents(folder, "val")) == 3


@pytest.mark.parametrize("first", ["<|endoftext|>", "a\r\nb"])
def test_tokens_of_odd_texts_are_tiktokens_own(first):
    enc = train_small("gpt2")
    tokenizers.write_encoding(enc, "small.tiktoken")
    texts = [first, " " * 3000 + "x", "half a pair \ud83d", "\x00\x1c\u3000 end"]
    path = write_texts("a.jsonl", texts)
    folder = make_here(path, tokenizer="small.tiktoken", shard_size=100)
    expected = []
    for text in texts:
        expected += [enc.eot_token, *enc.encode_ordinary(text)]
    tokens = [*read(folder, "*_train_*"), *read(folder, "*_val_*")]  # of so few, the last one is for validation
    assert tokens == expected


def test_a_marker_in_a_piece_is_not_taken_for_the_beginning_of_another():
    rows = [readers.Row("", "a<|endoftext|>b"), readers.Row("", "c", starts=False)]
    rendered = Documents("text").render(tokenizers.get_encoding("bytes"), rows)
    assert [each.tokens.ids.tolist() for each in rendered] == [[256, *b"a<|endoftext|>b"], [*b"c"]]


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


def pieces_of(text, size, separator=""):
    """The pieces of a text that is read in blocks of `size` characters."""
    blocks = (text[i : i + size] for i in range(0, len(text), size))
    return [piece for piece, _ in readers.split_text(blocks, separator)]


@pytest.mark.parametrize("size", [1, 50])
@pytest.mark.parametrize("pattern", ["gpt2", "gpt4"])
def test_a_long_text_is_cut_where_no_token_crosses(size, pattern):
    enc = train_small(pattern)
    rng = random.Random(0)
    for _ in range(50):
        scripts = [rng.choice(SCRIPTS) for _ in range(3)]
        text = "".join(rng.choice(rng.choice(scripts)) for _ in range(200))
        pieces = pieces_of(text, size)
        assert "".join(pieces) == text
        ids = itertools.chain.from_iterable(map(enc.encode_ordinary, pieces))
        assert list(ids) == enc.encode_ordinary(text)


# Cyrillic, Chinese, Hindi, Arabic
DIVISIBLE = ["\u0441\u0447\u0430 ", "\u6211\u662f\u3002\n", "\u0939\u093f\u0928 ", "\u0643\u062a\u0627\n"]


@pytest.mark.parametrize("separator", ["", "<|endoftext|>"])
@pytest.mark.parametrize("unit", [*DIVISIBLE, "a", "\x00", "\n", "1,2\n"])
def test_a_long_text_is_not_held_in_memory(unit, separator, monkeypatch):
    """The only places to cut at were after an ASCII letter."""
    monkeypatch.setattr(readers, "BLOCK_CHARS", 1000)
    monkeypatch.setattr(readers, "MAX_PIECE", 10_000)
    text = "x" + unit * (100_000 // len(unit)) + "x"
    pieces = pieces_of(text, 1000, separator)
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= (4000 if unit in DIVISIBLE else 12_000)


@pytest.mark.parametrize("separator", ["<|endoftext|>", "THE END OF IT"])  # the second may be cut after a word
@pytest.mark.parametrize("block", [1, 5, 40, 100_000])
def test_a_separator_ends_a_document(block, separator, monkeypatch):
    monkeypatch.setattr(readers, "BLOCK_CHARS", block)
    texts = ["One day.\n\nThe end.", "Two.", "a long one " * 50 + "x", "four < five " + separator[:7]]
    path = Path("a.txt")
    lines = f"\n{separator}\r\n\n{separator}\n"
    path.write_bytes(f"{lines}{lines.join(texts)}{lines}".encode())
    folder = make_here(path, separator=separator)
    assert sorted(read(folder)) == sorted(as_bytes(texts))


def test_a_document_that_ends_as_the_separator_begins_is_whole():
    assert pieces_of("a---b--", 3, "---") == ["a", "b--"]


@pytest.mark.parametrize(
    "separator, note",
    [
        ("", '40 markers <|endoftext|> read as text. In a text file, --separator "<|endoftext|>" ends a document'),
        ("</s>", "does not contain --separator '</s>'"),
        ("<|endoftext|>", ""),
    ],
)
@pytest.mark.parametrize("text", ["Once upon a time\n<|endoftext|>\n", "Once.<|endoftext|>"])
def test_a_note_says_that_documents_are_not_separated(text, separator, note, output):
    """It looked for a line that begins with the marker."""
    make_here(write("TinyStories-valid.txt", text * 40), separator=separator)
    said = output()
    assert note in said
    assert bool(note) == ("note:" in said)


def test_markers_in_rows_are_counted(output):
    rows = [{"text": "<s>[INST] q [/INST]</s>"}, {"text": "<|startoftext|>One.<|startoftext|>Two."}] * 12
    make_here(write_rows("a.jsonl", rows))
    said = output()
    assert "note: 12 markers <s> read as text." in said
    assert "note: 24 markers <|startoftext|> read as text." in said


# ----- Which files --------------------------------------------------------------------------------------


def test_inputs_are_files_folders_and_globs_in_the_order_given():
    """Of a folder that has shards, too, the texts are read."""
    texts = random_texts(12)
    Path("texts").mkdir()
    names = ["texts/b.json", "texts/a.jsonl", "2.jsonl", "1.jsonl"]  # .json is taken for JSON lines, as in C4
    for i, name in enumerate(names):
        write_texts(name, texts[3 * i : 3 * i + 3])
    make_here("1.jsonl", name="texts")
    folder = prepare(Options(input=("texts", "[12].jsonl"), tokenizer="bytes"))
    assert folder == "texts_shards"
    assert holds(folder, texts[3:6] + texts[:3] + texts[9:] + texts[6:9])
    assert read_meta(folder)["rows_left_out"] == 0


def test_docstrings_stand_under_what_they_document(monkeypatch):
    """The order of the documents is that of a hash of their names, whatever the order in which a disk lists files."""
    for folder in ("pack/tests", "site-packages"):
        Path(folder).mkdir(parents=True)
    files = {
        "pack/__init__.py": '"A package."\nprint("never run")\nclass C:\n  "Its class."\n'
        '  def f(self, *, a=1):\n    "Does."\nasync def g():\n  "W"\n',
        "pack/tests/t.py": '"""left out"""',
        "site-packages/s.py": '"""left out"""',
        "old.py": "print 1",  # not Python 3
    }
    texts = {
        "if": "The if statement.",
        "pack.py": "module pack\n\nA package.\n\nclass C\n\nIts class.\n\ndef f(self, *, a=1)\n\nDoes.\n\ndef g()\n\nW",
    }
    for name in "abcde":
        files[f"{name}.py"] = f'"""Module {name}."""'
        texts[f"{name}.py"] = f"module {name}\n\nModule {name}."
    for name, content in files.items():
        write(name, content)
    monkeypatch.setattr(python_docs.sysconfig, "get_paths", lambda: {"stdlib": "."})
    monkeypatch.setattr("pydoc_data.topics.topics", {"if": "The if statement."})
    order = sorted(texts, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    assert python_docs.python_docs() == [texts[name] for name in order]


def names_of(*patterns):
    return [Path(source.name).name for source in inputs.list_inputs(patterns)]


def test_a_folders_own_texts_are_read_and_others_where_they_are_asked_for(output):
    """Not hidden ones, those in its folders, a README, and what other programs write."""
    Path("texts/sub").mkdir(parents=True)
    for name in ("README.md", "b.md", ".h.md", "sub/c.rst", "d.pdf", "meta.json"):
        write(f"texts/{name}", f"In {name}.")
    assert names_of("texts") == ["b.md"]
    assert "note: 5 of 6 files in texts are left out, such as texts/.h.md." in output()
    for name in ("README.md", "meta.json"):
        assert names_of("texts/**", f"texts/{name}") == ["b.md", "c.rst", name]


# ----- Rows ---------------------------------------------------------------------------------------------

PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x40\x9c"
NO_TEXT = "is not UTF-8 text: it has a byte 0x.*remove NUL bytes"


@pytest.mark.parametrize(
    "name, content, words",
    [
        # the rows between two stray quotes would be one text
        ("a.csv", b'id,text\n1,"a\n2,b\n3,"c" d\n', "Line 2 of .*a.csv is not a valid row of CSV"),
        # the advice belonged to another fault, or a long list of keys cut it off
        (
            "a.csv",
            b'id,text\n1,"a \\"b\\", c"\n',
            r"""Line 2 .*: ',' expected after '"'\. .* sed 's/\\\\"/""/g' FILE > NEW""",
        ),
        ("a.json", json.dumps(dict.fromkeys(range(5000), {"text": "a"})).encode(), r"jq -c '\.\[\]' FILE"),
        ("a.json", b'{"text": ["a", "b"]}', r"""jq -c '{"text": \.text\[\]}' FILE"""),
        ("a.json", b'[{"text": "a"}', "Entry 2 of .*a.json is not a valid JSON object: Expecting value"),
        ("a.jsonl", b'["a"]', "Line 1 of .*a.jsonl is not an object with columns, but \\['a'\\]"),
        # the header is shown as it was read
        (
            "a.csv",
            b"# exported\nid,text\n1,a\n",
            r"Line 2 of .* but the header has 1 \(# exported\): a text with ','",
        ),
        # they were taken for text of Windows, and the command that converts it would have made a text of them
        ("a.txt", PNG, NO_TEXT),
        ("a.jsonl", PNG, NO_TEXT),
        ("a.csv", b'text\n"' + b"plain, " * 9000 + b"\0", NO_TEXT),  # behind what was looked at
        (
            "a.txt",
            b"version https://git-lfs.github.com/spec/v1\noid",
            "only a pointer .* in Git LFS. Run git lfs pull",
        ),
        # a frame of zstd whose window is 2 GB
        ("a.txt.zst", b"(\xb5/\xfd\0\xa81\0\0a text", "a.txt.zst was .* with a long window. .*zstd -d --long=31"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_reason(name, content, words, monkeypatch):
    monkeypatch.setattr(readers, "JSON_BLOCK", 5)
    Path(name).write_bytes(content)
    with pytest.raises(UserError, match=words):
        make_here(name)
    assert not Path("out").exists()


@pytest.mark.parametrize("kind, place", [("parquet", "Row 3"), ("jsonl", "Line 3"), ("csv", "Line 4")])
def test_rows_without_a_text_are_left_out(kind, place, output):
    """They are counted, and the first one is named."""
    texts = [f"Text {n}." for n in range(30)]
    texts[2] = texts[11] = texts[12] = texts[20] = None
    path = write_texts(f"a.{kind}", texts)
    folder = make_here(path)
    assert holds(folder, list(filter(None, texts)))
    said = output()
    assert f"note: 4 rows left out. {place} of {path} has no text under 'text'." in said
    assert said.count("has no text") == 1
    assert read_meta(folder)["rows_left_out"] == 4


LINES_OF_CSV = "text,id\n" + "b,0\n" * 24
LINES_OF_JSON = '{"text":\n "b"}\n' * 12


@pytest.mark.parametrize(
    "name, others, row, place",
    [
        ("a.csv", LINES_OF_CSV, "a, comma,99", "Line 26"),
        ("a.csv", LINES_OF_CSV, "99", "Line 26"),
        ("a.csv", LINES_OF_CSV, '"a" quote,9', "Line 26"),
        ("a.jsonl", LINES_OF_JSON, '{"id": 1}', "Line 25"),
        ("a.jsonl", LINES_OF_JSON, '{"text": 1}', "Line 25"),
        ("a.jsonl", LINES_OF_JSON, "3", "Line 25"),
        ("a.json", "[" + '{"text": "b"},' * 24, '"x"]', "Entry 25"),
    ],
)
def test_a_row_that_is_not_like_the_others_is_left_out(name, others, row, place, output):
    """Fields in a CSV file that are more or fewer than in its header may be parts of a text."""
    make_here(write(name, others + row))
    assert f"note: 1 row left out. {place} of {name} " in output()


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_column_may_be_null_throughout_a_file(kind):
    a = write_rows(f"a.{kind}", [{"title": None, "text": "a"}] * 30)
    b = write_rows(f"b.{kind}", [{"title": "T", "text": "b"}] * 30)
    assert holds(make_here(a, b, text_column="title,text"), ["a"] * 30 + ["T\n\nb"] * 30)
    assert holds(make_here(a, b, text_column="title", name="titles"), ["T"] * 30)


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
def test_other_delimiters_lines_and_marks(name, text):
    write(name, text)
    rows = readers.read_rows(inputs.local_source(name))
    assert [readers.text_of(row.values, ["text"]) for row in rows] == ["a; b", "c, d"]


RUSSIAN = "\u0412\u0441\u0435 \u0441\u0447\u0430 " * 400
GERMAN = "Gr\u00f6\u00dfe, na\u00efve caf\u00e9. " * 400


@pytest.mark.parametrize(
    "content, command, converted",
    [
        (b"plain, " * 900 + b"it\x92s", "iconv -f WINDOWS-1252 -t UTF-8", "plain, " * 900 + "it\u2019s"),
        (GERMAN.encode("latin-1"), "iconv -f WINDOWS-1252 -t UTF-8", GERMAN),
        (GERMAN.encode() + b"\xf6" + GERMAN.encode(), "iconv -f UTF-8 -t UTF-8 -c", GERMAN * 2),
        (GERMAN.encode("utf-16"), "iconv -f UTF-16LE -t UTF-8", "\ufeff" + GERMAN),
        # text without a mark whose first letter is not Latin was taken for text with NUL bytes
        (RUSSIAN.encode("utf-16-be"), "iconv -f UTF-16BE -t UTF-8", RUSSIAN),
        (RUSSIAN.encode("utf-32-le"), "iconv -f UTF-32LE -t UTF-8", RUSSIAN),
        (gzip.compress(GERMAN.encode()), "gzip -dc", GERMAN),
        (b"%PDF-1.7\n%\xe2\xe3\n", "pdftotext", None),
    ],
    ids="Windows Latin-1 bad-byte mark BE 32 gzip PDF".split(),
)
def test_a_file_that_is_not_utf8_is_answered_with_the_command_that_converts_it(content, command, converted):
    """The one for Latin-1 spoiled quotes of Windows, and texts of UTF-8 with a bad byte throughout."""
    Path("a.txt").write_bytes(content)
    with pytest.raises(UserError, match=f" UTF-8.*: {command} FILE.* > NEW"):
        make_here("a.txt")
    program, *args = command.split()
    if converted and shutil.which(program):
        # with -c, it says by its status that it left something out
        done = subprocess.run([program, *args], input=content, capture_output=True)
        assert done.stdout.decode() == converted


@pytest.mark.parametrize("start, between, end", [("[", " ,\n", "]"), ("", "\n", "\n")])
def test_entries_longer_than_a_block_of_json_are_read(start, between, end, monkeypatch):
    """Parsed again with each block, the longest one would take many minutes."""
    monkeypatch.setattr(readers, "JSON_BLOCK", 10)
    entries = [{"n": [-1e5, None, "\u00e9\n"]}] * 300 + ["x" * 5_000_000, {}]
    write("a.json", start + between.join(map(json.dumps, entries)) + end)
    places, found = zip(*readers.read_values("a.json", "a.json"))
    assert list(found) == entries
    assert places[-1].split()[1] == "302"


def test_an_ending_is_read_as_its_type_and_a_part_of_it_is_not():
    for kind, endings in inputs.TYPES.items():
        for ending in endings.split():
            assert inputs.file_type(f"a{ending.upper()}.gz") == kind
    assert inputs.file_type("a.jso") == ""
