"""Data sets of the hub by name: the right files, whole or not there, asked for once, and one line for each fault."""

import hashlib
import io
import itertools
import json
import os
import re
import socket
import time
import types
from pathlib import Path

import fineweb
import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import smoltalk
from plumbing.cli.console import UserError
from plumbing.data import downloads, preparation, shards, tokenizers
from plumbing.data import hub as hub_files

from corpora import (
    TABLES,
    as_bytes,
    die_at_rename,
    holds,
    make,
    random_texts,
    read,
    read_meta,
    renamed_by,
    train_small,
)
from harness import KILLED, error_in, full_disk, listing, patched, refusal_of, refused, run, talk
from hub import Server

BYTES = ["--tokenizer", "bytes"]
CONFIGS = """---
license: mit
configs:
- config_name: en
  data_files:
  - split: train
    path: en/a.jsonl
  - split: test
    path: en/test.jsonl
- config_name: de
  data_files: de/*.jsonl
---
Two languages.
"""


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """What this process takes for the hub, in whose place it works."""
    # its listings are kept by address, and a server of an earlier test may have had the same port
    huggingface_hub.HfFileSystem.clear_instance_cache()
    monkeypatch.setattr(downloads, "RETRY_SECONDS", 0)
    monkeypatch.setattr(downloads, "TIMEOUT", 0.3)
    monkeypatch.chdir(tmp_path)
    server = Server()
    server.configure(monkeypatch, tmp_path / ".hf")
    yield server
    server.stop()


def parquet(**columns):
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file, row_group_size=7)
    return file.getvalue()


def jsonl(texts, **more):
    return "".join(json.dumps({"text": text, **more}) + "\n" for text in texts)


def add_stories(hub, texts, name="OWNER/stories"):
    """Three files of a training split, and one to test on, for those who may read them."""
    files = {f"data/train-{i}.parquet": parquet(text=texts[10 * i : 10 * i + 10]) for i in range(3)}
    card = "---\ndataset_info:\n  config_name: plain_text\n---\nStories."  # its only config, which it calls default
    files |= {"README.md": card, "data/test-0.parquet": parquet(text=["not this"])}
    return hub.add(name, files, private=True)


def prepare(dataset="OWNER/stories", **options):
    defaults = {"dataset": dataset, "tokenizer": "bytes", "out_dir": "out"}
    return fineweb.prepare(fineweb.Options(**defaults | options))


def fetched(hub):
    """The data files that were asked for."""
    return re.findall(r"GET \S+/(\S+-\d\.parquet)", "\n".join(hub.asked))


def test_a_data_set_by_its_name_gives_the_shards_of_its_files(hub, tmp_path, capsys):
    texts = random_texts(30)
    first = add_stories(hub, texts)
    prepare(shard_size=5000)
    (tmp_path / "local").mkdir()
    for i in range(3):
        (tmp_path / "local" / f"train-{i}.parquet").write_bytes(parquet(text=texts[10 * i : 10 * i + 10]))
    make(tmp_path, "local", name="copy/out", shard_size=5000)
    ours = listing(tmp_path / "out")
    theirs = listing(tmp_path / "copy" / "out")
    assert ours.pop("meta.json")
    assert theirs.pop("meta.json")
    assert ours == theirs
    assert len(ours) > 5
    assert shards.origin("out") == f"OWNER/stories, default, train, {first}"
    # the branch moves, and what was begun stays where it was
    second = add_stories(hub, random_texts(30, seed=1))
    prepare(shard_size=5000)
    prepare(shard_size=5000, revision=first)
    with pytest.raises(UserError, match=f"revision was '{first}' and is now '{second}'"):
        prepare(shard_size=5000, revision="main")
    prepare(out_dir="second", revision="main")
    assert read_meta("second")["made_from"]["revision"] == second
    # what is complete does not need the hub
    hub.lasting["ANY /"], hub.asked[:] = "500", []
    capsys.readouterr()
    prepare(shard_size=5000)
    assert "is complete" in capsys.readouterr().out
    assert not hub.asked


def test_configs_splits_and_revisions_are_named_when_one_is_missing(hub, tmp_path):
    hub.add(
        "OWNER/two",
        {
            "README.md": CONFIGS,
            **dict.fromkeys(["de/a.jsonl", "en/a.jsonl", "en/test.jsonl"], jsonl(random_texts(20))),
        },
    )
    hub.renamed["two"] = "OWNER/two"
    args = ["--dataset", "OWNER/two", *BYTES]
    cases = {
        "": "several configs. Choose one with --config: en, de.",
        "--config fr": "no config 'fr'. Choose one with --config: en, de.",
        "--config en --split dev": "no split 'dev'. Choose one with --split: train, test.",
        "--revision v9": "OWNER/two: it has no such revision. Choose a commit, branch or tag",
    }
    for words, said in cases.items():
        assert said in refused(fineweb.main, *args, *words.split())
    # a folder of the same name is not what is asked for, and a data set may have been renamed
    (tmp_path / "OWNER" / "two").mkdir(parents=True)
    for name in ("OWNER/two", "two"):
        prepare(name, config="en", out_dir=name.replace("/", "-"))
        assert np.count_nonzero(read(name.replace("/", "-")) == 256) == 20
        assert read_meta(name.replace("/", "-"))["dataset"] == "OWNER/two"
    hub.asked.clear()
    prepare("two", config="en", out_dir="two")
    assert not hub.asked
    prepare("OWNER/two", config="en", out_dir="two")


# another value of each flag that changes the tokens: (flags of the folder, another one, what is said)
OTHER_FLAGS = [
    ("--input a.jsonl", "--input b.jsonl", "file 1 of the input .* was .*a.jsonl.* and is now .*b.jsonl"),
    ("--input a.jsonl", "--text-column title", "text_column was 'text' and is now 'title'"),
    ("--input a.txt --separator x", "--separator y", "separator was 'x' and is now 'y'"),
    ("--input a.jsonl", "--tokenizer small.tiktoken", "tokenizer was 'bytes' and is now 'small-gpt2'"),
    ("--input a.jsonl", "--shard-size 999", "shard_size was 500 and is now 999"),
    ("--input a.jsonl --max-tokens 4000", "--max-tokens 5000", "max_tokens was 4000 and is now 5000"),
    ("--input a.jsonl", "--dataset OWNER/two --config en", "dataset was 'input' and is now 'OWNER/two'"),
    ("--dataset OWNER/two --config en", "--config de", "config was 'en' and is now 'de'"),
    ("--dataset OWNER/two --config en", "--split test", "split was 'train' and is now 'test'"),
    ("--dataset OWNER/two --config en", "--revision v1", "revision was '.*' and is now '.*'"),
    ("--input chats.jsonl --max-length 64", "--max-length 32", "max_length was 64 and is now 32"),
]


@pytest.mark.parametrize("state", ["begun", "complete"])
def test_another_value_of_a_flag_that_changes_the_tokens_is_refused(hub, state):
    """Both values are named. Only one flag differs, and nothing is written."""
    texts = random_texts(60)
    for name in ("a", "b"):
        Path(f"{name}.jsonl").write_text(jsonl(texts, title=name), encoding="utf-8")
    Path("a.txt").write_text("x y ".join(texts), encoding="utf-8")
    tokenizers.write_encoding(train_small("gpt2"), "small.tiktoken")
    chats = [{"messages": talk(f"Q{i}", "A" * 20)} for i in range(60)]
    Path("chats.jsonl").write_text("\n".join(map(json.dumps, chats)), encoding="utf-8")
    files = dict.fromkeys(["en/a.jsonl", "en/test.jsonl", "de/a.jsonl"], jsonl(texts))
    first = hub.add("OWNER/two", files | {"README.md": CONFIGS})
    hub.add("OWNER/two", files | {"README.md": CONFIGS + "New."})
    hub.data_sets["OWNER/two"]["refs"]["v1"] = first
    for number, (words, change, said) in enumerate(OTHER_FLAGS):
        program = smoltalk if "chats" in words else fineweb
        flags = ["--shard-size", "500", "--out-dir", f"out{number}", *BYTES]
        program.main([*words.split(), *flags])
        if state == "begun":
            meta = read_meta(f"out{number}") | {"complete": False}
            meta["shards"].popitem()
            Path(f"out{number}", "meta.json").write_text(json.dumps(meta), encoding="utf-8")
        before = listing(f"out{number}")
        if not change.startswith(("--input", "--dataset")):
            flags = [*words.split(), *flags]
        assert re.search(said, refused(program.main, *flags, *change.split())), change
        assert listing(f"out{number}") == before, change


def test_the_converted_branch_is_read_by_config(hub):
    commit = hub.add("OWNER/old", {"old.py": "print('a script')"})
    line = refused(fineweb.main, "--dataset", "OWNER/old", *BYTES)
    assert "only a script" in line
    assert "--revision refs/convert/parquet" in line
    files = {f"{config}/train/0000.parquet": parquet(text=[config] * 40) for config in ("en", "de")}
    converted = hub.add("OWNER/old", files)
    hub.data_sets["OWNER/old"]["refs"] = {"main": commit, "refs/convert/parquet": converted}
    line = refused(fineweb.main, "--dataset", "OWNER/old", "--revision", "refs/convert/parquet", *BYTES)
    assert "Choose one with --config: de, en." in line
    prepare("OWNER/old", revision="refs/convert/parquet", config="en")
    assert bytes(read("out")[1:3].astype(np.uint8)) == b"en"


CARD = "---\nconfigs: {}\n---"
LINE = '{"text": "a"}\n'


def naming(pattern):
    """Files of a data set whose card has this pattern."""
    return {"README.md": CARD.format(json.dumps([{"config_name": "a", "data_files": pattern}])), "a.jsonl": LINE}


@pytest.mark.parametrize(
    "files, settings, words",
    [
        ({"data/train.parquet": b"x"}, {"gated": True}, "it is gated. Accept its conditions & hf auth login"),
        ({"data/train.parquet": b"x"}, {"private": True}, "it is private or does not exist & hf auth login"),
        ({"a.png": "x", "b.png": "x"}, {}, "no program here reads .png files & .parquet, .jsonl"),
        ({"README.md": CARD.format("["), "a.jsonl": LINE}, {}, "is not clear & --input"),
        (naming("de/b.jsonl"), {}, "is not clear & de/b.jsonl"),
        (naming("/etc/passwd"), {}, "its card names /etc/passwd, which is not in the data set"),
        ({"../../x.jsonl": LINE}, {}, "error: OWNER/x lists a file '../../x.jsonl', which would be written outside"),
        ({"a\\..\\..\\x.jsonl": LINE}, {}, "which would be written outside of its folder"),
    ],
)
def test_what_cannot_be_had_is_one_line(hub, files, settings, words, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN")
    hub.add("OWNER/x", files, **settings)
    line = refused(fineweb.main, "--dataset", "OWNER/x", *BYTES)
    assert all(word in line for word in words.split(" & ")), line
    assert not list(tmp_path.rglob("*.npy"))
    assert not list(tmp_path.parent.glob("x.jsonl"))


def test_a_script_and_older_descriptions_beside_the_data_do_not_matter(hub, capsys):
    texts = random_texts(30)
    infos = json.dumps({"default": {"description": "", "features": {"text": {"dtype": "string"}}}})
    files = {"old.py": "raise SystemExit", "dataset_infos.json": infos, "README.md": "---\nlicense: mit\n---\n"}
    files |= dict.fromkeys(["LICENSE.txt", "requirements.txt", "data/readme-en.txt", "notes.md"], "not this")
    hub.add("OWNER/old", files | {"data/stories.jsonl": jsonl(texts), "more.csv": "text\nnot this"})
    prepare("OWNER/old")
    assert sorted(read("out")) == sorted(as_bytes(texts))
    assert "note: 1 file of OWNER/old left out, such as more.csv." in capsys.readouterr().out
    hub.add("OWNER/mixed", naming("*") | {"b.csv": "text\nnot this"})
    found = hub_files.find_files(fineweb.Options(dataset="OWNER/mixed"))
    assert [source.name for source in found.sources] == ["a.jsonl"]
    assert "note: 1 file of OWNER/mixed left out, such as b.csv." in capsys.readouterr().out


@pytest.mark.parametrize("entry", [{"data_dir": "c{}"}, {"data_files": "c{}/*"}])
def test_of_thousands_of_configs_one_is_looked_at(hub, entry):
    (field, value), names = *entry.items(), [f"c{i}" for i in range(3000)]
    card = json.dumps({"configs": [{"config_name": name, field: value.format(name[1:])} for name in names]})
    hub.add("OWNER/many", {f"{name}/a.jsonl": name for name in names} | {"README.md": f"---\n{card}\n---\n"})
    found = hub_files.find_files(fineweb.Options(dataset="OWNER/many", config="c7"))
    assert [source.name for source in found.sources] == ["c7/a.jsonl"]
    assert len(hub.asked) < 20  # the builder of `datasets` takes 3,000 requests
    with pytest.raises(UserError, match="several configs. Choose one with --config: c0, c1, .* and 2,950 more"):
        hub_files.find_files(fineweb.Options(dataset="OWNER/many"))


FAULTS = [*itertools.product(["500"], ["GET OWNER/stories", "GET tree", "HEAD train-1", "GET train-1", "GET README"])]
FAULTS += [*itertools.product(["reset", "hang"], ["GET tree", "GET train-1"]), ("hang", "GET OWNER/stories")]
FAULTS += [("429", "GET tree"), ("504", "GET train-1"), ("short", "GET train-1"), ("wrong", "GET train-1")]


@pytest.mark.parametrize("fault, place", FAULTS)
def test_a_passing_fault_is_survived(hub, fault, place, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    monkeypatch.setattr("huggingface_hub.constants.DEFAULT_REQUEST_TIMEOUT", 0.3)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    texts = random_texts(30)
    add_stories(hub, texts)
    hub.faults[place] = fault
    prepare()
    assert sorted(read("out")) == sorted(as_bytes(texts))
    assert not hub.faults


@pytest.mark.parametrize("fault, said", [("500", "500"), ("wrong", "bytes that the hub lists")])
def test_a_lasting_fault_is_one_line_and_what_is_prepared_stays(hub, fault, said):
    texts = random_texts(30)
    add_stories(hub, texts)
    hub.lasting["GET train-2" if fault == "wrong" else "ANY train-2"] = fault
    args = ["--dataset", "OWNER/stories", "--shard-size", "3000", "--out-dir", "out", *BYTES]
    status, _, stderr = refusal_of(fineweb.main, *args)
    line = error_in(stderr)  # there is a bar before it
    assert status == 2
    assert "train-2.parquet" in line
    assert said in line
    before = listing("out")
    assert len(list(Path("out").glob("*_train_*"))) > 1
    hub.lasting.clear()
    hub.asked.clear()
    prepare(shard_size=3000)
    assert "train-0.parquet" not in fetched(hub)  # it is in the shards
    after = listing("out")
    assert all(after[name] == before[name] for name in before if "_train_" in name)
    prepare(shard_size=3000, out_dir="whole/out")
    whole = listing("whole/out")
    assert after.pop("meta.json")
    assert whole.pop("meta.json")
    assert after == whole


def test_one_file_is_fetched_ahead_and_those_that_were_read_are_removed(hub):
    add_stories(hub, random_texts(30))
    found = hub_files.find_files(fineweb.Options(dataset="OWNER/stories")).sources
    paths = [Path("folder", source.name) for source in found]
    for number, _ in downloads.fetch_all(found, "folder", first=0, ahead=True):
        downloads.remove_fetched(found[:number], "folder")
        deadline = time.monotonic() + 30
        while not paths[min(2, number + 1)].exists():  # it comes without being asked for
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert sorted(Path("folder").rglob("*.parquet")) == paths[number : number + 2]


def prepare_and_die(url, folder, renames):
    Server.configure(types.SimpleNamespace(url=url), pytest.MonkeyPatch(), folder / ".hf")
    with die_at_rename(renames):
        prepare(shard_size=3000, out_dir=str(folder / "out"))


@pytest.mark.parametrize("renames, has_network", [(2, False), (13, True), (0, True)])
def test_killed_it_continues_with_the_files_on_disk(hub, tmp_path, renames, has_network, monkeypatch):
    """Killed when only the list of files is recorded, later, and where the shards become complete."""
    add_stories(hub, random_texts(30))
    all_renames = renamed_by(prepare, shard_size=3000, out_dir="whole/out")
    run(prepare_and_die, hub.url, tmp_path, renames or len(all_renames), ends=[KILLED])
    Path("out/.lock").unlink()
    if not has_network:
        for path in Path("out/.download/data").glob("train-[12].parquet"):
            path.unlink()
        assert not list(Path("out").glob("*.npy"))
        hub.lasting["ANY /"] = "500"
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        args = ["--dataset", "OWNER/stories", "--shard-size", "3000", "--out-dir", "out", *BYTES]
        assert "Could not download data/train-1" in error_in(refusal_of(fineweb.main, *args)[2])
        assert list(Path("out").glob("*_train_*.npy"))  # of what was there
        hub.lasting.clear()
    there = {path.name for path in Path("out").glob(".download/data/*.parquet")}
    assert bool(there) == bool(renames)
    assert ("train-0.parquet" in there) == (renames == 2)  # later it has been read
    hub.asked.clear()
    prepare(shard_size=3000)
    assert not set(fetched(hub)) & there
    assert not list(Path("out").glob(".download*"))
    assert listing("out") == listing("whole/out")


def test_the_users_cache_is_used_and_left_alone(hub, tmp_path, monkeypatch):
    import huggingface_hub

    commit = add_stories(hub, random_texts(30))
    huggingface_hub.snapshot_download("OWNER/stories", repo_type="dataset")
    before, hub.asked[:] = listing(tmp_path / ".hf"), []
    prepare()
    assert not fetched(hub)
    assert listing(tmp_path / ".hf") == before
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hub.asked.clear()
    tokens = read("out")
    Path("out/out_train_000001.npy").unlink()  # made again of what meta.json and the cache know
    prepare()
    assert not hub.asked
    assert np.array_equal(read("out"), tokens)
    assert read_meta("out")["made_from"]["revision"] == commit
    line = refused(fineweb.main, "--dataset", "OWNER/other", *BYTES)
    assert "offline mode is enabled" in line
    assert "--input" in line


def test_columns_are_joined_and_objects_walked_into(tmp_path):
    rows = [
        {"title": f"T{i}", "body": None if i == 3 else f"B{i}", "doc": {"content": {"text": f"D{i}"}}}
        for i in range(40)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    joined = [f"T{i}" if i == 3 else f"T{i}\n\nB{i}" for i in range(40)]
    columns = {"title,body": joined, "doc.content.text": [f"D{i}" for i in range(40)]}
    columns["title,doc.content.text"] = [f"T{i}\n\nD{i}" for i in range(40)]
    for name in ("a.jsonl", "a.parquet"):
        path = str(tmp_path / name)
        for column, texts in columns.items():
            assert holds(make(tmp_path, path, name=f"{name}-{column}", text_column=column), texts)
        for column in ("titel,body", "doc.content", "doc.text", "doc.content.text.x"):
            with pytest.raises(UserError, match="title, body, doc|under 'doc"):
                make(tmp_path, path, name="wrong", text_column=column)
    with pytest.raises(UserError, match="--text-column"):
        make(tmp_path, path, name="wrong")


def test_what_stands_for_a_file_that_git_lfs_keeps_is_not_read(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid", encoding="utf-8")
    with pytest.raises(UserError, match="train.txt is only a pointer to a file in Git LFS. Run git lfs pull"):
        make(tmp_path, str(path))


def test_conversations_of_the_hub(hub):
    chats = [talk(f"Q{i}", f"A{i}") for i in range(100)] + [talk("no answer", None)]
    splits = ("train_sft", "test_sft")
    hub.add("OWNER/chats", {f"data/{split}-00000-of-00001.parquet": parquet(messages=chats) for split in splits})
    args = ["--dataset", "OWNER/chats", "--max-length", "64", *BYTES]
    assert "Choose one with --split: " in refused(smoltalk.main, *args)
    for _ in range(2):
        smoltalk.main([*args, "--split", "train_sft"])
        assert read_meta("chats")["dataset"] == "OWNER/chats"
        assert not list(Path("chats").glob(".download*"))
        hub.lasting["ANY /"] = "500"  # what is complete does not need the hub
    assert read_meta("chats")["documents"] == 100


def test_smoltalk_is_read_in_the_config_that_has_all_of_it(hub):
    configs = [{"config_name": name, "data_files": f"{name}/*"} for name in ("all", "math")]
    files = {f"{name}/train.parquet": parquet(messages=[talk("Q", name)] * 30) for name in ("all", "math")}
    hub.add("HuggingFaceTB/smoltalk", files | {"README.md": CARD.format(json.dumps(configs))})
    smoltalk.main(["--max-length", "64", *BYTES])
    assert read_meta("smoltalk")["made_from"]["config"] == "all"


def test_a_data_set_that_is_larger_than_the_disk_is_refused(hub):
    add_stories(hub, random_texts(30))
    usage = types.SimpleNamespace(free=1000)
    with patched(preparation.shutil, "disk_usage", lambda folder: usage):
        line = refused(fineweb.main, "--dataset", "OWNER/stories", *BYTES)
    assert "has 0.0 GB free. Make room, choose another --out-dir or, in fineweb.py, ask for less" in line
    assert not fetched(hub)
    assert not list(Path("stories").glob("*.npy"))


def test_the_first_shard_of_fineweb_edu_is_for_validation(hub, capsys):
    """As build-nanogpt has it; each holds whole documents."""
    texts = random_texts(60)
    places = {"default": "data", "sample-10BT": "sample/10BT", "sample-100BT": "sample/100BT"}
    configs = [{"config_name": name, "data_files": f"{place}/*"} for name, place in places.items()]
    files = {f"sample/10BT/{i:03d}_00000.parquet": parquet(text=texts[20 * i : 20 * i + 20]) for i in range(3)}
    files |= {"sample/100BT/000_00000.parquet": b"not this", "data/a.parquet": b"not this"}
    hub.add("HuggingFaceFW/fineweb-edu", files | {"README.md": CARD.format(json.dumps(configs))})
    args = ["--shard-size", "7000", *BYTES]
    fineweb.main(args)
    assert "left out" not in capsys.readouterr().out  # the files of other configs are not missed
    expected = [[]]
    for text in texts:
        if len(expected[-1]) + len(as_bytes([text])) > 7000:
            expected.append([])
        expected[-1] += as_bytes([text]).tolist()
    names = ["edufineweb_val_000000.npy"] + [f"edufineweb_train_{i:06d}.npy" for i in range(1, len(expected))]
    assert sorted(os.listdir("edu_fineweb10B")) == sorted([*names, "meta.json", *TABLES])
    assert len(names) > 3
    assert [np.load(Path("edu_fineweb10B", name)).tolist() for name in names] == expected
    hub.lasting["ANY /"] = "500"  # what is complete does not need the hub
    fineweb.main(args)
    assert "is complete" in capsys.readouterr().out


def test_ready_made_shards_come_whole_or_again(hub):
    header = np.zeros(256, dtype="<i4")
    files = {}
    header[:3] = 20240520, 1, 1000
    for i, file in enumerate(["val_000000", "train_000001", "train_000002"]):
        tokens = np.arange(50257 - 1000 * i, 49257 - 1000 * i, -1, dtype=np.uint16) - 1
        files[f"finewebedu_{file}.bin"] = header.tobytes() + tokens.tobytes()
    hub.add("kjj0/finewebedu10B-gpt2", files)
    hub.faults["GET train_000001"] = "short"
    prepare("fineweb-edu", tokenizer="gpt2", pretokenized=2, out_dir=None)
    folder = Path("edu_fineweb10B")
    assert set(os.listdir(folder)) - set(TABLES) == {*files, "meta.json"}
    meta = read_meta(folder)
    assert meta["shards"] == dict.fromkeys(files, 1000)
    assert meta["tokens"] == 3000
    assert meta["complete"]
    # one more shard than there is: said, and what is there stays
    assert "finewebedu_train_000003.bin" in refused(fineweb.main, "--pretokenized", 3)
    assert {path.name: path.read_bytes() for path in folder.glob("*.bin")} == files
    # nor is it whole while more are fetched
    hub.add("kjj0/finewebedu10B-gpt2", {"finewebedu_train_000003.bin": files["finewebedu_train_000001.bin"]})
    with patched(fineweb.shutil, "copyfileobj", full_disk), pytest.raises(UserError, match="No space left"):
        prepare("fineweb-edu", tokenizer="gpt2", pretokenized=3, out_dir=None)
    assert not read_meta(folder)["complete"]


def test_a_download_is_whole_or_not_there(tmp_path, hub):
    content = b"content" * 1000
    path = tmp_path / "a.bin"
    digest = hashlib.sha1(b"blob 7000\0" + content).hexdigest()  # as git has it, and hellaswag.py
    hub.files, url = {"/a.bin": content}, f"{hub.url}/a.bin"
    hub.lasting["GET a.bin"] = "short"
    with pytest.raises(UserError, match="IncompleteRead.* Call a friend."):
        downloads.download(url, str(path), digest, advice="Call a friend.")
    hub.lasting["GET a.bin"] = "wrong"
    with pytest.raises(UserError, match="the 7,000 bytes that came are not the expected file. Call a friend."):
        downloads.download(url, str(path), digest, advice="Call a friend.")
    assert not path.exists()
    assert len(hub.asked) == 4
    hub.lasting.clear()
    hub.faults["GET a.bin"] = "503"
    downloads.download(url, str(path), digest, advice="")
    assert path.read_bytes() == content
    # what the disk refuses is not asked for again
    hub.asked.clear()
    with patched(os, "fsync", full_disk), pytest.raises(UserError, match="No space left"):
        downloads.download(url, str(path), digest, advice="")
    assert len(hub.asked) == 1
    assert path.read_bytes() == content


@pytest.mark.parametrize("words", ["--pretokenized 1", "--tokenizer bytes", "--tokenizer bytes --max-length 64"])
def test_without_a_network_a_download_ends_in_one_line_within_seconds(tmp_path, words, monkeypatch):
    def refuse(*args, **options):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    slept = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("time.sleep", slept.append)
    Server.configure(types.SimpleNamespace(url="https://huggingface.co"), monkeypatch, tmp_path / ".hf")
    line = refused(smoltalk.main if "--max-length" in words else fineweb.main, *words.split())
    assert line.startswith("error: Could not download ")
    assert "Name or service not known. Check the network" in line
    # nothing is left of what never began
    assert sum(slept) < 5
    assert [path.name for path in tmp_path.iterdir()] in ([], [".hf"])
