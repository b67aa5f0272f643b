"""plumbing/data/shards.py: the format on disk, what is refused, and what a folder of shards is known by."""

import errno
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest
import train_gpt2
from plumbing import files
from plumbing.cli.console import UserError
from plumbing.data import shards

from harness import make_shards, read_log, refused, status_of, tiny_flags


def all_shards(folder):
    return [shards.open_shard(path) for split in ("val", "train") for path in shards.find_shards(folder, split)]


def open_mask(values, folder):
    """The mask with these values next to a shard of three tokens, as a list."""
    np.save(folder / "x_train_000001.npy", np.arange(3, dtype=np.uint16))
    with open(folder / "x_train_000001.mask", "wb") as file:
        np.save(file, values)
    return shards.open_masks([shards.open_shard(folder / "x_train_000001.npy")])


def write_bin(path, tokens, end=b"", **changes):
    header = np.zeros(256, np.int32)
    header[:3] = list((dict(magic=20240520, version=1, count=len(tokens)) | changes).values())
    path.write_bytes(header.tobytes() + np.array(tokens, np.uint16).tobytes() + end)
    return path


def test_a_shard_reads_like_its_array_and_one_that_is_cut_short_meanwhile_is_one_line(tmp_path):
    tokens = np.arange(1000, dtype=np.uint16)
    np.save(tmp_path / "a_train_000001.npy", tokens)
    for path in (tmp_path / "a_train_000001.npy", write_bin(tmp_path / "b_train_000001.bin", tokens)):
        shard = shards.open_shard(path)
        assert len(shard) == 1000
        assert shard.read().tolist() == tokens.tolist()
        for start, count in ((0, 10), (5, 0), (990, 100), (1000, 5)):
            assert shard.read(start, count).tolist() == tokens[start : start + count].tolist()
        os.truncate(path, 1500)
        with pytest.raises(UserError, match="became shorter"):
            shard.read(0, 1000)


def test_an_error_of_the_disk_while_a_shard_is_read_has_the_shards_name(tmp_path):
    """That of a read has none, as when a network disk fails in the middle of a run."""
    np.save(tmp_path / "x_train_000001.npy", np.arange(50, dtype=np.uint16))
    failing = mock.Mock(**{"return_value.readinto.side_effect": OSError(errno.EIO, os.strerror(errno.EIO))})
    with pytest.raises(OSError, match="x_train_000001.npy"):
        shards.open_shard(tmp_path / "x_train_000001.npy", failing).read()


def test_no_more_files_stay_open_than_a_system_allows(tmp_path):
    """600 shards are read in random order by several threads, where a process may open 256 files."""
    resource = pytest.importorskip("resource")
    for number in range(600):
        np.save(tmp_path / f"x_train_{number:06d}.npy", np.full(20, number, np.uint16))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        found = shards.open_shards(tmp_path, "train")
        order = np.random.default_rng(0).permutation(np.repeat(np.arange(600), 3)).tolist()
        with ThreadPoolExecutor(7) as executor:
            for number, tokens in zip(order, executor.map(lambda number: found[number].read(3, 10), order)):
                assert tokens.tolist() == [number] * 10
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_shards_of_llmc_are_found_and_others_are_refused_with_what_to_do(tmp_path):
    write_bin(tmp_path / "tiny_shakespeare_train.bin", range(2000))
    write_bin(tmp_path / "tiny_shakespeare_val.bin", range(30))
    for split, length in (("train", 2000), ("val", 30)):
        (path,) = shards.find_shards(tmp_path, split)
        assert shards.open_shard(path).read().tolist() == list(range(length))
    np.arange(2000, dtype=np.uint16).tofile(tmp_path / "train.bin")
    with pytest.raises(UserError, match="nanoGPT's, .* make shards of its text with fineweb.py --input"):
        shards.open_shards(tmp_path, "train")
    # the first is Llama 3's shards, of uint32
    for change in (dict(magic=20240801), dict(version=2), dict(count=999), dict(count=1001), dict(end=b"x")):
        with pytest.raises(
            UserError, match="damaged: its .* bytes begin with .* not with 20240520, 1 and the number"
        ):
            shards.open_shard(write_bin(tmp_path / "train.bin", range(1000), **change))


@pytest.mark.parametrize("split", ["val", "train"])
@pytest.mark.parametrize("value", [0, 2, 255])
def test_the_trainer_refuses_masks_that_mean_nothing(tmp_path, split, value):
    """It trained at a loss of 0 where a mask left out everything."""
    folder = make_shards(tmp_path / "data", lengths=(2000, 3000), masks=True)
    [mask] = folder.glob(f"*_{split}_*.mask")
    values = np.zeros_like(np.load(mask))
    values[100] = value
    with open(mask, "wb") as file:
        np.save(file, values)
    line = refused(train_gpt2.main, *tiny_flags(folder, tmp_path / "log"))
    assert re.search(f"The largest value in loss mask .*{mask.name} is {value}, not 1", line)


@pytest.mark.parametrize("shape, dtype", [(3, np.float32), (3, np.int64), (4, np.uint8), ((3, 1), np.uint8)])
def test_a_mask_of_another_type_or_length_than_its_shard_is_refused(tmp_path, shape, dtype):
    with pytest.raises(UserError, match=r"holds .* not uint8 of shape \(3,\)"):
        open_mask(np.ones(shape, dtype), tmp_path)


def test_a_folder_of_weight_0_needs_only_a_validation_split(tmp_path):
    make_shards(tmp_path / "data")
    make_shards(tmp_path / "other", lengths=(2000,), seed=1)
    typed = tiny_flags(tmp_path / "data", tmp_path / "log", max_steps=1, warmup_steps=0)
    mixed = ["--data", tmp_path / "other", "--data-weights", "1", "0"]
    assert status_of(train_gpt2.main, [str(word) for word in [*typed, *mixed]]) == 0
    assert len(read_log(tmp_path / "log", "val/other")) > 0
    line = refused(train_gpt2.main, *tiny_flags(tmp_path / "other", tmp_path / "log2"))
    assert "There are no train shards in" in line


def test_a_fingerprint_reads_little_of_a_large_file(tmp_path):
    path = tmp_path / "x_train_000001.npy"
    path.write_bytes(b"x" * 8192)
    assert shards.fingerprint([path]).startswith("3b15c9cf28b0")  # as in the checkpoints of runs to be resumed
    os.truncate(path, 200_000_128)  # most of it a hole in the file
    found = [shards.fingerprint([path])]
    assert len(files.file_sample(path)) < 2**15
    with open(path, "r+b") as file:
        file.seek(200_000_000)
        file.write(b"y")
    found.append(shards.fingerprint([path]))
    for mask in (b"\0\0", b"\0\1"):  # what counts is a part of the data
        path.with_suffix(".mask").write_bytes(mask)
        found.append(shards.fingerprint([path]))
    assert len(set(found)) == 4


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda meta: meta.update(complete=False), "not complete"),
        (lambda meta: meta["shards"].update({"tiny_train_000009.npy": 5}), "000009.npy has 5 tokens in .* and 0 on"),
        (lambda meta: meta["shards"].update({"tiny_train_000001.npy": 5}), "5 tokens in meta.json and 3,000 on disk"),
    ],
)
def test_a_meta_that_does_not_describe_its_folder_is_refused(tmp_path, change, words):
    folder = make_shards(tmp_path / "data")
    shards.check_meta(folder, all_shards(folder))
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    change(meta)
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    with pytest.raises(UserError, match=words):
        shards.check_meta(folder, all_shards(folder))
    (folder / "meta.json").unlink()  # as build-nanogpt's have none
    shards.check_meta(folder, all_shards(folder))


def test_a_malformed_meta_is_one_line_and_another_programs_is_not_read(tmp_path):
    path = tmp_path / "meta.json"
    (tmp_path / "meta.backup.json").write_text('{"tokenizer": 3}', encoding="utf-8")
    path.write_text('{"tokenizer": "bytes"}', encoding="utf-8")
    assert shards.read_meta(tmp_path).complete  # people write short ones by hand
    for content in ('{"tokenizer": "bytes", "shards": []}', "", "[]", "{}", '{"tokenizer": "byt', "[" * 100_000):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(UserError, match="meta.json is damaged") as refusal:
            shards.read_meta(tmp_path)
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["x_train_000001.npy", "x_train_000001.bin"])
def test_a_damaged_shard_is_one_line(tmp_path, name):
    path = tmp_path / name
    np.save(tmp_path / "x_train_000001.npy", np.arange(100, dtype=np.uint16))
    write_bin(tmp_path / "x_train_000001.bin", range(100))
    whole = path.read_bytes()
    np.savez(tmp_path / "zip.npz", np.arange(100, dtype=np.uint16))
    damaged_header = whole[:10] + b"(" + whole[11:]  # of Python in an .npy, of numbers in a .bin
    for content in (b"", whole[:50], whole[:-1], bytes(300), damaged_header, (tmp_path / "zip.npz").read_bytes()):
        path.write_bytes(content)
        with pytest.raises(UserError, match="damaged"):
            shards.open_shard(path)


def test_data_that_are_no_shards_are_answered_with_the_command_that_makes_some(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shards.split_of("._x_train_000001.npy") is None, "as macOS makes them on other disks"
    (tmp_path / "-x.txt").write_text("x", encoding="utf-8")
    commands = {
        "-x.txt": "python fineweb.py --input=-x.txt (for conversations: python smoltalk.py --input=-x.txt)",
        "edu_fineweb10B": "python fineweb.py",
    }
    for folder, command in commands.items():
        with pytest.raises(UserError, match="There are no train shards in .* Name another folder ") as caught:
            shards.find_shards(folder, "train")
        assert str(caught.value).endswith(f": {command}")
