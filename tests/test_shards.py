"""plumbing/data/shards.py: the format on disk, what is refused, and what a folder of shards is known by."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from plumbing import files
from plumbing.cli.console import UserError
from plumbing.data import shards

from corpora import write
from harness import change_meta, make_shards, refused_run


def write_shard(name, tokens, *, magic=20240520, version=1, count=None, end=b""):
    """A shard of the kind that its name says. The header of a .bin may be another one, and `end` comes behind it."""
    path = Path(name)
    tokens = np.array(tokens, np.uint16)
    if path.suffix == ".npy":
        np.save(path, tokens)
    else:
        header = np.zeros(256, np.int32)
        header[:3] = magic, version, count or len(tokens)
        path.write_bytes(header.tobytes() + tokens.tobytes() + end)
    return path


def write_mask(path, values):
    with open(path, "wb") as file:  # np.save would add .npy to the name
        np.save(file, values)


both_kinds = pytest.mark.parametrize("name", ["x_train_000001.npy", "x_train_000001.bin"])


@both_kinds
@pytest.mark.parametrize("start, count", [(0, 10), (5, 0), (990, 100), (1000, 5)])
def test_a_shard_reads_like_its_array(name, start, count):
    tokens = list(range(1000))
    shard = shards.open_shard(write_shard(name, tokens))
    assert len(shard) == 1000
    assert shard.read().tolist() == tokens
    assert shard.read(start, count).tolist() == tokens[start : start + count]


@both_kinds
def test_a_shard_that_is_cut_short_while_it_is_in_use_is_one_line(name):
    path = write_shard(name, range(1000))
    shard = shards.open_shard(path)
    os.truncate(path, 1500)
    with pytest.raises(UserError, match="became shorter"):
        shard.read()


@pytest.fixture
def few_files():
    """A process may open 256 files."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_no_more_files_stay_open_than_a_system_allows(few_files):
    """300 shards are read in random order by several threads."""
    for number in range(300):
        write_shard(f"x_train_{number:06d}.npy", [number] * 20)
    found = shards.open_shards(".", "train")
    order = np.random.default_rng(0).permutation(np.repeat(np.arange(300), 3)).tolist()
    with ThreadPoolExecutor(7) as executor:
        results = executor.map(lambda number: found[number].read(3, 10).tolist(), order)
        assert list(results) == [[number] * 10 for number in order]


@pytest.mark.parametrize("split, length", [("train", 2000), ("val", 30)])
def test_shards_of_llmc_are_found(split, length):
    """But not hidden files, such as macOS makes on other disks."""
    for beginning in ("", "._"):
        write_shard(f"{beginning}tiny_shakespeare_train.bin", range(2000))
        write_shard(f"{beginning}tiny_shakespeare_val.bin", range(30))
    [path] = shards.find_shards(".", split)
    assert shards.open_shard(path).read().tolist() == list(range(length))


@pytest.mark.parametrize(
    "change",
    [
        {"magic": 20240801},  # Llama 3's shards, of uint32
        {"version": 2},
        {"count": 999},
        {"count": 1001},
        {"end": b"x"},
    ],
)
def test_a_shard_with_another_header_is_refused(change):
    """nanoGPT's have none."""
    write_shard("train.bin", range(1000), **change)
    words = "bytes begin with .* not with 20240520, 1 and the number .* nanoGPT's, .* make shards of its text"
    with pytest.raises(UserError, match=words):
        shards.open_shards(".", "train")


@pytest.mark.parametrize("split", ["val", "train"])
@pytest.mark.parametrize("value", [0, 2, 255])
def test_the_trainer_refuses_masks_that_mean_nothing(out, split, value):
    """It trained at a loss of 0 where a mask left out everything."""
    folder = make_shards("data", lengths=(2000, 3000), masks=True)
    [mask] = folder.glob(f"*_{split}_*.mask")
    values = np.zeros_like(np.load(mask))
    values[100] = value
    write_mask(mask, values)
    refused_run(dict(data=folder, out_dir=out), f"The largest value in loss mask {mask} is {value}, not 1")


@pytest.mark.parametrize("shape, dtype", [(3, np.int64), (4, np.uint8), ((3, 1), np.uint8)])
def test_a_mask_of_another_type_or_length_than_its_shard_is_refused(shape, dtype):
    path = write_shard("x_train_000001.npy", range(3))
    write_mask(path.with_suffix(".mask"), np.ones(shape, dtype))
    with pytest.raises(UserError, match=r"holds .* not uint8 of shape \(3,\)"):
        shards.open_masks([shards.open_shard(path)])


def test_a_fingerprint_is_of_shards_and_masks_and_stays_as_it_is_in_the_checkpoints_of_runs_to_be_resumed():
    path = Path("x_train_000001.npy")
    path.write_bytes(b"x" * 8192)
    found = [shards.fingerprint([path])]
    assert found[0].startswith("3b15c9cf28b0")
    for mask in (b"\0\0", b"\0\1"):
        path.with_suffix(".mask").write_bytes(mask)
        found.append(shards.fingerprint([path]))
    assert len(set(found)) == 3


def test_a_fingerprint_reads_little_of_a_large_file():
    path = Path("x_train_000001.npy")
    path.touch()
    os.truncate(path, 200_000_128)  # a hole in the file
    assert len(files.file_sample(path)) < 2**15
    before = shards.fingerprint([path])
    with open(path, "r+b") as file:
        file.seek(66_666_000)
        file.write(b"y")
    assert shards.fingerprint([path]) != before


def test_a_shard_that_meta_json_does_not_list_is_refused(data, out):
    change_meta(data, shards={"tiny_train_000009.npy": 3000})
    words = "tiny_train_000001.npy has 0 tokens in meta.json and 3,000 on disk"
    refused_run(dict(data=data, out_dir=out), words)


def test_shards_without_a_meta_json_are_complete(data):
    """As build-nanogpt's."""
    (data / "meta.json").unlink()
    shards.check_meta(data, shards.read_meta(data), shards.open_shards(data, "train"))


MALFORMED = ["", "[]", "{}", '{"tokenizer": "byt', "[" * 100_000, '{"tokenizer": "bytes", "shards": []}']
for name in ("/v_train_000001.npy", "..\\v_train_000001.npy", "a.txt"):  # files elsewhere, and no shard
    MALFORMED.append(json.dumps({"tokenizer": "bytes", "shards": {name: 5}}))


@pytest.mark.parametrize("content", MALFORMED)
def test_a_malformed_meta_json_is_one_line(content):
    write("meta.json", content)
    with pytest.raises(UserError, match="meta.json is damaged") as refusal:
        shards.read_meta(".")
    assert "\n" not in str(refusal.value)


@both_kinds
def test_a_damaged_shard_is_refused(name):
    """Cut in its header or at its end, or with another header: of Python in an .npy, of numbers in a .bin."""
    path = write_shard(name, range(100))
    content = path.read_bytes()
    for damaged in (b"", content[:50], content[:-1], content[:10] + b"(" + content[11:]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="damaged"):
            shards.open_shard(path)


@pytest.mark.parametrize(
    "folder, command",
    [
        ("-x.txt", "python fineweb.py --input=-x.txt (for conversations: python smoltalk.py --input=-x.txt)"),
        ("edu_fineweb10B", "python fineweb.py"),
    ],
)
def test_data_that_are_no_shards_are_answered_with_the_command_that_makes_some(folder, command):
    write("-x.txt", "x")
    with pytest.raises(UserError, match="There are no train shards in .* Name another folder ") as caught:
        shards.find_shards(folder, "train")
    assert str(caught.value).endswith(f": {command}")
