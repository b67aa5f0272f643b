"""plumbing/shards.py: the format on disk, what is refused, and what a folder of shards is known by."""

import errno
import json
import os
import random
import resource
import time

import numpy as np
import pytest
from conftest import make_shards, patched

from plumbing import shards
from plumbing.cli import UserError
from plumbing.shards import check_masks, check_meta, find_shards, fingerprint, open_mask, open_shard, read_meta


def all_paths(folder):
    return find_shards(folder, "val") + find_shards(folder, "train")


def write_bin(path, tokens, magic=20240520):
    header = np.zeros(256, np.int32)
    header[:3] = magic, 1, len(tokens)
    path.write_bytes(header.tobytes() + np.array(tokens, np.uint16).tobytes())
    return path


# -----------------------------------------------------------------------------
# Reading


def test_a_shard_reads_like_its_array_and_holds_no_file(tmp_path):
    tokens = np.arange(1000, dtype=np.uint16)
    np.save(tmp_path / "a_train_000001.npy", tokens)
    before = os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd") else []
    for path in (tmp_path / "a_train_000001.npy", write_bin(tmp_path / "b_train_000001.bin", tokens)):
        shard = open_shard(path)
        assert len(shard) == 1000 and shard.read().tolist() == tokens.tolist()
        for start, count in ((0, 10), (5, 0), (990, 100), (1000, 5), (7, None)):
            stop = None if count is None else start + count
            assert shard.read(start, count).tolist() == tokens[start:stop].tolist()
    assert not before or len(os.listdir("/proc/self/fd")) == len(before)


def test_more_shards_than_file_descriptors_can_be_open(tmp_path):
    np.save(tmp_path / "x_train_000000.npy", np.arange(50, dtype=np.uint16))
    for number in range(1, 300):
        os.link(tmp_path / "x_train_000000.npy", tmp_path / f"x_train_{number:06d}.npy")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        opened = [open_shard(path) for path in find_shards(tmp_path, "train")]
        assert sum(int(shard.read(3, 1)[0]) for shard in opened) == 900
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE])
def test_what_the_system_refuses_is_not_called_damage(tmp_path, number):
    np.save(tmp_path / "x_train_000001.npy", np.arange(50, dtype=np.uint16))
    shard = open_shard(tmp_path / "x_train_000001.npy")

    def refuse(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    with patched(shards.np, "fromfile", refuse), pytest.raises(UserError) as refusal:
        shard.read()
    assert os.strerror(number) in str(refusal.value) and "damage" not in str(refusal.value)
    with patched(shards.np.lib.format, "read_magic", refuse), pytest.raises(UserError) as refusal:
        open_shard(tmp_path / "x_train_000001.npy")
    assert os.strerror(number) in str(refusal.value) and "damage" not in str(refusal.value)


def test_a_shard_that_is_cut_short_while_it_is_in_use_is_one_line(tmp_path):
    np.save(tmp_path / "x_train_000001.npy", np.arange(50, dtype=np.uint16))
    shard = open_shard(tmp_path / "x_train_000001.npy")
    os.truncate(tmp_path / "x_train_000001.npy", 150)
    with pytest.raises(UserError, match="became shorter"):
        shard.read(0, 50)


def test_shards_of_the_peers_are_found_and_read(tmp_path):
    for name in ("llmc", "nanogpt"):
        (tmp_path / name).mkdir()
    write_bin(tmp_path / "llmc" / "tiny_shakespeare_train.bin", range(100))
    write_bin(tmp_path / "llmc" / "tiny_shakespeare_val.bin", range(30))
    np.arange(200, dtype=np.uint16).tofile(tmp_path / "nanogpt" / "train.bin")
    np.arange(20, dtype=np.uint16).tofile(tmp_path / "nanogpt" / "val.bin")
    for name, lengths in (("llmc", (100, 30)), ("nanogpt", (200, 20))):
        for split, length in zip(("train", "val"), lengths):
            (path,) = find_shards(tmp_path / name, split)
            assert open_shard(path).read().tolist() == list(range(length))
        check_meta(tmp_path / name, all_paths(tmp_path / name))
    # of characters, whose ids would be taken for GPT-2's
    (tmp_path / "nanogpt" / "meta.pkl").write_bytes(b"")
    with pytest.raises(UserError, match="nanoGPT's shards of characters"):
        check_meta(tmp_path / "nanogpt", all_paths(tmp_path / "nanogpt"))


def test_llama_3_shards_are_named_as_what_they_are(tmp_path):
    with pytest.raises(UserError, match="Llama 3's tokens"):
        open_shard(write_bin(tmp_path / "x_train.bin", range(100), magic=20240801))


# -----------------------------------------------------------------------------
# Masks


@pytest.mark.parametrize(
    "values, words", [([0, 255, 1], "has the value 255"), ([0, 1, 2], "has the value 2"), ([0, 0, 0], "0 everywhere")]
)
def test_masks_that_mean_nothing_are_refused(tmp_path, values, words):
    path = tmp_path / "x_train_000001.mask"
    with open(path, "wb") as file:
        np.save(file, np.array(values, np.uint8))
    with patched(shards, "MASK_BLOCK", 2), pytest.raises(UserError, match=words):
        check_masks([open_mask(path, 3)])
    with open(path, "wb") as file:
        np.save(file, np.array([0, 1, 1], np.uint8))
    with patched(shards, "MASK_BLOCK", 2):
        check_masks([open_mask(path, 3)])


def test_a_mask_of_another_type_is_refused(tmp_path):
    for dtype in (np.float32, np.int64, np.uint16):
        with open(tmp_path / "x_train_000001.mask", "wb") as file:
            np.save(file, np.ones(3, dtype))
        with pytest.raises(UserError, match="holds"):
            open_mask(tmp_path / "x_train_000001.mask", 3)


# -----------------------------------------------------------------------------
# Fingerprints


def test_other_data_of_the_same_length_have_another_fingerprint(tmp_path):
    folder = make_shards(tmp_path / "a", masks=True)
    expected = fingerprint(all_paths(folder))
    assert fingerprint(all_paths(make_shards(tmp_path / "copy", masks=True))) == expected
    assert fingerprint(all_paths(make_shards(tmp_path / "seed", masks=True, seed=1))) != expected
    assert fingerprint(all_paths(make_shards(tmp_path / "plain"))) != expected
    assert fingerprint(all_paths(make_shards(tmp_path / "size", (2000, 3001, 1700), masks=True))) != expected
    assert fingerprint(all_paths(folder)[::-1]) != expected


def test_a_fingerprint_reads_little(tmp_path):
    for number in range(100):  # 200 MB each, most of it a hole in the file
        path = tmp_path / f"x_train_{number:06d}.npy"
        path.write_bytes(b"x" * 8192)
        os.truncate(path, 200_000_128)
    start = time.perf_counter()
    first = fingerprint(find_shards(tmp_path, "train"))
    assert time.perf_counter() - start < 1
    with open(path, "r+b") as file:
        file.seek(200_000_000)
        file.write(b"y")
    assert fingerprint(find_shards(tmp_path, "train")) != first


# -----------------------------------------------------------------------------
# meta.json


def change_meta(folder, change):
    meta = json.loads((folder / "meta.json").read_text())
    change(meta)
    (folder / "meta.json").write_text(json.dumps(meta))


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda meta: meta.update(complete=False), "not complete"),
        (lambda meta: meta["shards"].pop("tiny_train_000001.npy"), "no entry"),
        (lambda meta: meta["shards"].update({"tiny_train_000009.npy": 5}), "tiny_train_000009.npy has 5 tokens in"),
        (
            lambda meta: meta["shards"].update({"tiny_train_000001.npy": 5}),
            "5 tokens in meta.json and 3,000 tokens on disk",
        ),
    ],
)
def test_a_meta_that_does_not_describe_its_folder_is_refused(tmp_path, change, words):
    folder = make_shards(tmp_path / "data")
    check_meta(folder, all_paths(folder))
    change_meta(folder, change)
    with pytest.raises(UserError, match=words):
        check_meta(folder, all_paths(folder))
    (folder / "meta.json").unlink()  # as build-nanogpt's have none
    check_meta(folder, all_paths(folder))


def test_a_malformed_meta_is_one_line_whatever_is_in_it(tmp_path):
    """Every value of a meta.json, at any depth, is replaced by values of other types or left out."""
    end = [0, 3, 1, 2]
    whole = {"dataset": "input", "tokenizer": "bytes", "vocab_size": 257, "complete": True}
    whole |= {"documents": 2, "tokens": 9}
    whole |= {"shards": {"x_val_000000.npy": 9}, "ends": {"x_val_000000.npy": end}, "validation_every": 0}
    whole |= {"made_from": {"sources": [["a.txt", 7]], "revision": ""}}
    path = tmp_path / "meta.json"
    path.write_text(json.dumps(whole))
    read_meta(path)
    tried = 0
    for keys in [[key] for key in whole] + [
        ["shards", "x_val_000000.npy"],
        ["ends", "x_val_000000.npy"],
        ["made_from", "sources"],
        ["made_from", "revision"],
    ]:
        for value in (None, -1, 1.5, "../x", [], {}, [[]], {"a": None}, {"../a": 3}, True, 10**400):
            meta = json.loads(json.dumps(whole))
            owner = meta
            for key in keys[:-1]:
                owner = owner[key]
            if type(owner[keys[-1]]) is type(value) or keys[-1] == "made_from" and value == {}:
                continue
            owner[keys[-1]] = value
            path.write_text(json.dumps(meta))
            tried += 1
            with pytest.raises(UserError, match="is damaged, or was not written by"):
                read_meta(path)
    assert tried > 100
    rng = random.Random(0)
    text = json.dumps(whole).encode()
    for _ in range(200):  # cut, or with bytes changed: a meta, or one line
        damaged = bytearray(text[: rng.randrange(len(text))] if rng.random() < 0.5 else text)
        for _ in range(rng.randrange(4)):
            if damaged:
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            read_meta(path)
        except UserError:
            pass
    for content in (b"", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b"\x00" * 10):
        path.write_bytes(content)
        with pytest.raises(UserError):
            read_meta(path)


def test_a_damaged_shard_is_one_line_whatever_is_in_it(tmp_path):
    rng = random.Random(0)
    np.save(tmp_path / "x_train_000001.npy", np.arange(100, dtype=np.uint16))
    write_bin(tmp_path / "x_train_000001.bin", range(100))
    for path in (tmp_path / "x_train_000001.npy", tmp_path / "x_train_000001.bin"):
        whole = path.read_bytes()
        for _ in range(300):
            damaged = bytearray(whole[: rng.randrange(len(whole))] if rng.random() < 0.3 else whole)
            for _ in range(rng.randrange(1, 6)):
                if damaged:
                    damaged[rng.randrange(min(140, len(damaged)))] = rng.randrange(256)
            path.write_bytes(damaged)
            try:
                assert len(open_shard(path).read()) * 2 <= len(damaged)
            except UserError:
                pass
