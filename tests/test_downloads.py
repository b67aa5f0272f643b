"""Data sets of the hub by name: the right files, whole or not there, asked for once, and one line for each fault."""

import hashlib
import io
import itertools
import json
import os
import re
import shutil
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
from plumbing.data import downloads, shards, tokenizers
from plumbing.data import hub as hub_files

from corpora import (
    TABLES,
    as_bytes,
    die_at_rename,
    documents,
    make_here,
    random_texts,
    read,
    read_meta,
    renamed_by,
    train_small,
    write,
    write_rows,
    write_texts,
)
from harness import KILLED, full_disk, listing, patched, refused, run, talk
from hub import Server, configure

BYTES = ["--tokenizer", "bytes"]
STORIES = random_texts(30)


def card_of(configs):
    """The card of a data set with these {config: its files}."""
    entries = [{"config_name": name, "data_files": files} for name, files in configs.items()]
    return f"---\nlicense: mit\nconfigs: {json.dumps(entries)}\n---\nTexts."


LANGUAGES = card_of(
    {
        "en": [{"split": "train", "path": "en/a.jsonl"}, {"split": "test", "path": "en/test.jsonl"}],
        "de": [{"split": "train", "path": "de/*.jsonl"}, {"split": "test", "path": "/etc/passwd"}],
    }
)


@pytest.fixture
def hub(monkeypatch):
    """What this process takes for the hub, in whose place it works."""
    # its listings are kept by address, and a server of an earlier test may have had the same port
    huggingface_hub.HfFileSystem.clear_instance_cache()
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # before another attempt
    monkeypatch.setattr(downloads, "TIMEOUT", 0.3)
    server = Server()
    configure(server.url, monkeypatch)
    yield server
    server.stop()


def parquet(**columns):
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file, row_group_size=7)
    return file.getvalue()


def jsonl(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def add_stories(hub, texts):
    """Three files of a training split, and one to test on, for those who may read them."""
    files = {f"data/train-{i}.parquet": parquet(text=texts[10 * i : 10 * i + 10]) for i in range(3)}
    card = "---\ndataset_info:\n  config_name: plain_text\n---\nStories."  # its only config, which it calls default
    files |= {"README.md": card, "data/test-0.parquet": parquet(text=["not this"])}
    return hub.add("OWNER/stories", files, private=True)


@pytest.fixture
def commit(hub):
    """That of OWNER/stories with STORIES."""
    return add_stories(hub, STORIES)


def prepare(dataset="OWNER/stories", **options):
    defaults = {"dataset": dataset, "tokenizer": "bytes", "out_dir": "out"}
    return fineweb.prepare(fineweb.Options(**defaults | options))


def failure(dataset="OWNER/stories", **options):
    """The error with which a preparation fails."""
    with pytest.raises(UserError) as caught:
        prepare(dataset, **options)
    return str(caught.value)


def fetched(hub):
    """The data files that were asked for."""
    return re.findall(r"GET \S+/(\S+-\d\.parquet)", "\n".join(hub.asked))


def test_a_data_set_by_its_name_gives_the_shards_of_its_files(commit):
    prepare(shard_size=5000)
    for number in range(3):
        write_texts(f"{number}.parquet", STORIES[10 * number : 10 * number + 10])
    make_here("*.parquet", name="copy/out", shard_size=5000)
    found, expected = listing("out"), listing("copy/out")
    assert found.pop("meta.json") != expected.pop("meta.json")  # it says where they are from
    assert found == expected
    assert len(found) > 5
    assert shards.origin(shards.read_meta("out")) == f"OWNER/stories, default, train, {commit}"


def test_what_was_begun_stays_at_its_commit(commit, hub):
    """What is complete does not need the hub."""
    prepare()
    second = add_stories(hub, random_texts(30, seed=1))  # the branch moves
    hub.asked.clear()
    prepare()
    assert not hub.asked
    assert read_meta("out")["made_from"]["revision"] == commit
    assert f"revision was '{commit}' and is now '{second}'" in failure(revision="main")
    prepare(out_dir="second", revision="main")
    assert read_meta("second")["made_from"]["revision"] == second


@pytest.fixture
def two_configs(hub):
    """OWNER/two, which was called two before, of two languages with 20 texts each."""
    content = jsonl(random_texts(20))
    files = {"README.md": LANGUAGES, "de/a.jsonl": content, "en/a.jsonl": content, "en/test.jsonl": content}
    hub.renamed["two"] = "OWNER/two"
    return hub.add("OWNER/two", files)


@pytest.mark.parametrize(
    "options, said",
    [
        ({}, "several configs. Choose one with --config: en, de."),
        ({"config": "fr"}, "no config 'fr'. Choose one with --config: en, de."),
        ({"config": "en", "split": "dev"}, "no split 'dev'. Choose one with --split: train, test."),
        ({"revision": "v9"}, "OWNER/two: it has no such revision. Choose a commit, branch or tag from its page."),
    ],
)
def test_what_there_is_to_choose_from_is_said(options, said, two_configs):
    assert said in failure("OWNER/two", **options)


def test_a_data_set_is_known_by_its_old_name(two_configs, hub):
    """A folder of that name is not read."""
    Path("two").mkdir()
    hub.faults["GET en/a.jsonl"] = "wrong"
    prepare("two", config="en")
    assert np.count_nonzero(read("out") == 256) == 20
    assert read_meta("out")["dataset"] == "OWNER/two"
    prepare("OWNER/two", config="en")


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


@pytest.mark.parametrize("words, change, said", OTHER_FLAGS)
def test_another_value_of_a_flag_that_changes_the_tokens_is_refused(words, change, said, two_configs, hub):
    """Both values are named. Only one flag differs, and nothing is written."""
    texts = random_texts(40)
    for name in ("a", "b"):
        write_rows(f"{name}.jsonl", [{"text": text, "title": name} for text in texts])
    write("a.txt", "x y ".join(texts))
    tokenizers.write_encoding(train_small("gpt2"), "small.tiktoken")
    write_rows("chats.jsonl", [{"messages": talk(f"Q{i}", "A" * 20)} for i in range(60)])
    two = hub.data_sets["OWNER/two"]
    hub.add("OWNER/two", two["commits"][two_configs] | {"README.md": LANGUAGES + "New."})
    two["refs"]["v1"] = two_configs
    program = smoltalk if "chats" in words else fineweb
    flags = ["--shard-size", "500", "--out-dir", "out", *BYTES]
    program.main([*words.split(), *flags])
    before = listing("out")
    if not change.startswith(("--input", "--dataset")):
        flags = [*words.split(), *flags]
    assert re.search(said, refused(program.main, *flags, *change.split()))
    assert listing("out") == before


def test_the_converted_branch_is_read_by_config(hub):
    """The hub's own copy of a data set, whose files are CONFIG/SPLIT/0000.parquet."""
    files = {f"{config}/partial-train/0000.parquet": parquet(text=[config] * 40) for config in ("en", "de")}
    converted = dict(dataset="OWNER/old", revision="refs/convert/parquet")
    hub.data_sets["OWNER/old"]["refs"] = {"refs/convert/parquet": hub.add("OWNER/old", files)}
    assert "Choose one with --config: de, en." in failure(**converted)
    prepare(**converted, config="en")
    assert bytes(read("out")[1:3].tolist()) == b"en"


LINE = '{"text": "a"}\n'


def naming(pattern):
    """Files of a data set whose card has this pattern."""
    return {"README.md": card_of({"a": pattern}), "a.jsonl": LINE}


@pytest.mark.parametrize(
    "files, settings, words",
    [
        ({"data/train.parquet": b"x"}, {"gated": True}, "it is gated. Accept its conditions & hf auth login"),
        ({"data/train.parquet": b"x"}, {"private": True}, "it is private or does not exist & hf auth login"),
        ({"a.png": "x", "b.png": "x"}, {}, "no program here reads .png files & .parquet, .jsonl"),
        ({"README.md": "---\nconfigs: [\n---", "a.jsonl": LINE}, {}, "is not clear & --input"),
        (naming("de/b.jsonl"), {}, "is not clear & de/b.jsonl"),
        # `datasets` refuses it as well; what lies beside it may be the addresses of the texts
        ({"x.py": "", "data/train.jsonl": LINE}, {}, "it is a script, x.py & --revision refs/convert/parquet"),
        (naming("/etc/passwd"), {}, "its card names /etc/passwd, which is not in the data set"),
        ({"../../x.jsonl": LINE}, {}, "OWNER/x lists a file '../../x.jsonl', which would be written outside"),
        ({"C:\\x.jsonl": LINE}, {}, "which would be written outside of its folder"),
    ],
)
def test_what_cannot_be_had_is_one_line(hub, files, settings, words, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    hub.add("OWNER/x", files, **settings)
    error = failure("OWNER/x")
    for word in words.split(" & "):
        assert word in error
    assert not list(Path().rglob("*.npy"))
    assert not list(Path("..").glob("x.jsonl"))


def test_other_files_beside_the_data_do_not_matter(hub, output):
    """Scripts, older descriptions, and data of a type that fewer files have."""
    texts = random_texts(30)
    infos = json.dumps({"default": {"description": "", "features": {"text": {"dtype": "string"}}}})
    files = {"make.py": "raise SystemExit", "dataset_infos.json": infos, "README.md": "---\nlicense: mit\n---\n"}
    files |= dict.fromkeys(["LICENSE.txt", "requirements.txt", "data/readme-en.txt", "notes.md"], "not this")
    files |= {"data/a.jsonl": jsonl(texts[:20]), "data/b.jsonl": jsonl(texts[20:])}
    hub.add("OWNER/old", files | dict.fromkeys(["data/c.parquet", "more.csv"], "text\nnot this"))
    prepare("OWNER/old")
    assert sorted(read("out")) == sorted(as_bytes(texts))
    assert "note: 2 files of OWNER/old left out, such as data/c.parquet." in output()


def test_of_hundreds_of_configs_one_is_looked_at(hub):
    names = [f"c{i}" for i in range(300)]
    card = json.dumps({"configs": [{"config_name": name, "data_dir": name} for name in names]})
    hub.add("OWNER/many", {f"{name}/a.jsonl": name for name in names} | {"README.md": f"---\n{card}\n---\n"})
    found = hub_files.find_files(fineweb.Options(dataset="OWNER/many", config="c7"))
    assert [source.name for source in found.sources] == ["c7/a.jsonl"]
    assert len(hub.asked) < 20  # the builder of `datasets` takes 300 requests
    assert re.search("several configs. Choose one with --config: c0, c1, .* and 250 more", failure("OWNER/many"))


WITH_HOOKS = pytest.mark.skipif(
    not hasattr(huggingface_hub.get_session(), "event_hooks"), reason="huggingface_hub before version 1"
)
FAULTS = [
    *itertools.product(["500"], ["GET OWNER/stories", "GET tree", "HEAD train-1", "GET train-1", "GET README"]),
    *itertools.product(["reset", "hang", "short", "wrong"], ["GET train-1"]),
    *[pytest.param("hang", place, marks=WITH_HOOKS) for place in ("GET OWNER/stories", "GET tree")],
]


@pytest.mark.parametrize("fault, place", FAULTS)
def test_a_passing_fault_is_survived(commit, hub, fault, place, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    monkeypatch.setattr("huggingface_hub.constants.DEFAULT_REQUEST_TIMEOUT", 0.3, raising=False)
    hub.faults[place] = fault
    prepare()
    assert sorted(read("out")) == sorted(as_bytes(STORIES))
    assert not hub.faults


def test_after_lasting_faults_the_next_start_continues(commit, hub):
    """It asks only for the files that are not on disk, or are damaged there."""
    prepare(shard_size=3000, out_dir="whole/out")
    hub.lasting["GET train-2"] = "wrong"
    assert "train-2.parquet of OWNER/stories: the download differs from the" in failure(shard_size=3000)
    hub.lasting["ANY /"] = "500"
    hub.asked.clear()
    assert "Could not download data/train-2" in failure(shard_size=3000)
    assert all("train-2" in request for request in hub.asked)
    Path("out/.download/data/train-1.parquet").write_bytes(parquet(text=["not this"]))
    hub.lasting.clear()
    hub.asked.clear()
    prepare(shard_size=3000)
    assert {*fetched(hub)} == {"train-1.parquet", "train-2.parquet"}
    assert listing("out") == listing("whole/out")


def prepare_and_die(url, renames):
    configure(url, pytest.MonkeyPatch())
    with die_at_rename(renames):
        prepare(shard_size=3000)


@pytest.mark.parametrize("renames", [2, 13, None], ids=["files are listed", "some are read", "all are read"])
def test_killed_it_continues_with_the_files_on_disk(renames, commit, hub):
    """renames: kill a preparation when so many files have their names, None: all."""
    all_renames = renamed_by(prepare, shard_size=3000, out_dir="whole/out")
    run(prepare_and_die, hub.url, renames or len(all_renames), ends=[KILLED])
    Path("out/.lock").unlink()
    hub.asked.clear()
    there = {path.name for path in Path("out").glob(".download/data/*.parquet")}
    assert bool(there) == bool(renames)
    assert ("train-0.parquet" in there) == (renames == 2)  # later it has been read
    prepare(shard_size=3000)
    assert not set(fetched(hub)) & there
    assert not list(Path("out").glob(".download*"))
    assert listing("out") == listing("whole/out")


def test_the_users_cache_is_used_offline_as_well_and_left_alone(commit, hub, monkeypatch):
    huggingface_hub.snapshot_download("OWNER/stories", repo_type="dataset")
    hub.asked.clear()
    before = listing(".hf")
    prepare()
    assert not fetched(hub)
    tokens = read("out")
    Path("out/out_train_000001.npy").unlink()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hub.asked.clear()
    prepare()
    assert not hub.asked
    assert np.array_equal(read("out"), tokens)
    assert read_meta("out")["made_from"]["revision"] == commit
    assert listing(".hf") == before


def test_offline_another_data_set_is_refused(hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert re.search("offline mode is enabled.*--input", failure("OWNER/other"))


def test_smoltalk_is_read_in_the_config_that_has_all_of_it(hub):
    rows = [*[talk("Q", "A")] * 30, talk("no answer", None)]
    files = {f"{name}/train.parquet": parquet(messages=rows) for name in ("all", "math")}
    files["README.md"] = card_of({"all": "all/*", "math": "math/*"})
    hub.add("HuggingFaceTB/smoltalk", files)
    smoltalk.main(BYTES)
    meta = shards.read_meta("smoltalk")
    assert (meta.dataset, meta.made_from["config"], meta.documents) == ("HuggingFaceTB/smoltalk", "all", 30)
    assert meta.made_from["max_length"] == 1024


def test_what_the_disk_has_no_room_for_is_refused_before_the_download(hub, monkeypatch):
    """Six files need room for their shards and for three at a time, a few of their tokens less."""
    content = parquet(text=random_texts(10))
    hub.add("OWNER/large", {f"data/train-{i}.parquet": content for i in range(6)})
    disk = types.SimpleNamespace(free=10**8)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: disk)
    assert "need 0.4 GB, but the disk of out has 0.1 GB" in refused(
        fineweb.main, "--pretokenized", 1, "--out-dir", "out"
    )
    for max_tokens, room in ((0, 9), (100, 4)):
        disk.free = (room - 1) * len(content)
        error = failure("OWNER/large", max_tokens=max_tokens)
        assert "Make room, choose another --out-dir or, in fineweb.py, ask for less" in error
        assert not fetched(hub)
        disk.free = room * len(content)
        prepare("OWNER/large", max_tokens=max_tokens, out_dir=f"{max_tokens}")
        hub.asked.clear()


def test_the_first_shard_of_fineweb_edu_is_for_validation(hub, output):
    """As build-nanogpt has it."""
    texts = random_texts(60)
    files = {f"sample/10BT/{i:03d}_00000.parquet": parquet(text=texts[20 * i : 20 * i + 20]) for i in range(3)}
    card = card_of({"sample-10BT": "sample/10BT/*", "sample-100BT": "sample/100BT/*"})
    files |= {"sample/100BT/000_00000.parquet": b"not this", "README.md": card}
    hub.add("HuggingFaceFW/fineweb-edu", files)
    fineweb.main(["--shard-size", "7000", *BYTES])
    assert "left out" not in output()  # the files of other configs are not missed
    paths = sorted(path.name for path in Path("edu_fineweb10B").glob("*.npy"))
    train = [f"edufineweb_train_{number:06d}.npy" for number in range(1, len(paths))]
    assert paths == [*train, "edufineweb_val_000000.npy"]
    assert len(paths) > 3
    assert documents("edu_fineweb10B", "val") + documents("edu_fineweb10B", "train") == texts


@pytest.fixture
def ready_made(hub):
    """The three shards of 1,000 tokens that the hub has, in llm.c's format. The first one is of empty documents."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, 1000
    files = {}
    for number, name in enumerate(["val_000000", "train_000001", "train_000002"]):
        tokens = np.full(1000, 50256 - number, dtype=np.uint16)
        files[f"finewebedu_{name}.bin"] = header.tobytes() + tokens.tobytes()
    hub.add("kjj0/finewebedu10B-gpt2", files)
    return files


def read_shards():
    return {path.name: path.read_bytes() for path in Path("edu_fineweb10B").glob("*.bin")}


def test_ready_made_shards_come_whole(ready_made, hub):
    hub.faults["GET train_000001"] = "short"
    enc = tokenizers.get_encoding("bytes")
    with patched(tokenizers, "get_encoding", lambda name: enc):  # GPT-2's tables may not be here
        fineweb.main(["--pretokenized", "2"])
    assert read_shards() == ready_made
    assert {*os.listdir("edu_fineweb10B")} == {*ready_made, *TABLES, "meta.json"}
    meta = shards.read_meta("edu_fineweb10B")
    assert meta.shards == dict.fromkeys(ready_made, 1000)
    assert (meta.tokens, meta.documents, meta.vocab_size, meta.complete) == (3000, 1000, 50257, True)
    assert "finewebedu_train_000003.bin" in refused(fineweb.main, "--pretokenized", 3)
    assert read_shards() == ready_made


def test_ready_made_shards_are_not_complete_while_more_are_fetched(ready_made):
    fineweb.main(["--pretokenized", "1"])
    with patched(fineweb.shutil, "copyfileobj", full_disk):
        assert "No space left" in refused(fineweb.main, "--pretokenized", 2)
    assert not read_meta("edu_fineweb10B")["complete"]


@pytest.mark.parametrize(
    "fault, said",
    [("short", "IncompleteRead.*"), ("wrong", "the 7,000 bytes that came are not the expected file.")],
)
def test_a_download_that_is_not_whole_is_not_there(fault, said, hub):
    content = b"content" * 1000
    digest = hashlib.sha1(b"blob 7000\0" + content).hexdigest()  # as git has it, and hellaswag.py
    hub.add("OWNER/plain", {"a.bin": content})
    hub.lasting["GET a.bin"] = fault
    url = f"{hub.url}/datasets/OWNER/plain/resolve/main/a.bin"
    with pytest.raises(UserError, match=f"{said} Call a friend."):
        downloads.download(url, "a.bin", digest, advice="Call a friend.")
    assert not Path("a.bin").exists()
    assert len(hub.asked) == 2
    hub.lasting.clear()
    downloads.download(url, "new/a.bin", digest, advice="")
    assert Path("new/a.bin").read_bytes() == content


@WITH_HOOKS
@pytest.mark.parametrize("words", ["--pretokenized 1", "--tokenizer bytes"])
def test_without_a_network_a_download_ends_in_one_line_within_seconds(words, monkeypatch):
    def refuse(*args, **options):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    slept = []
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("time.sleep", slept.append)
    configure("https://huggingface.co", monkeypatch)
    line = refused(fineweb.main, *words.split())
    assert line.startswith("error: Could not download ")
    assert "Name or service not known. Check the network" in line
    # nothing is left of what never began
    assert sum(slept) < 5
    assert os.listdir() in ([], [".hf"])


def test_neither_a_full_disk_nor_a_failure_that_took_long_is_tried_again(monkeypatch):
    """For so long, the hub's client has tried again already."""
    tries = []
    with pytest.raises(OSError, match="No space left"):
        downloads.retry("it", "Wait.", lambda: tries.append(1) or full_disk())
    monkeypatch.setattr(time, "monotonic", itertools.count(step=21).__next__)
    with pytest.raises(UserError, match="Could not download it: division by zero. Wait."):
        downloads.retry("it", "Wait.", lambda: tries.append(1) or 1 / len(tries[:0]))
    assert len(tries) == 2


def test_of_a_model_on_the_hub_its_config_weights_and_tokenizer_are_fetched(monkeypatch):
    names = "config.json model.safetensors tokenizer.json vocab.json merges.txt pytorch_model.bin onnx/a.json".split()

    fetched = []

    def fetch(name, **patterns):
        fetched.extend(huggingface_hub.utils.filter_repo_objects(names, **patterns))
        return "here"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert downloads.find_model("OWNER/german") == Path("here")
    assert fetched == names[:5]
