"""A user's mistakes: one line `error: ...` in plain English, exit status 2, no traceback, nothing changed on disk.

    python tests/test_bad_input.py          prints a table of what each of them gives

A case is a function that makes the mistake in a folder which already holds good data and a finished
run, and returns the command line, as flags to add to a good one or as a list that is all there is.
"""

import ast
import contextlib
import importlib
import io
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import tiktoken
import torch
from conftest import ROOT, listing, make_shards, patched, read_log, run, status_of, tiny_flags, train

import train_gpt2
from plumbing import checkpoint, distributed, fit, runs
from plumbing.cli import UserError

OPTIONS = dict(max_steps=4, val_every=2, checkpoint_every=2)


class Case(NamedTuple):
    group: str
    name: str
    prepare: object
    expected: tuple  # what the line must say


CASES = []


def case(group, name, *expected):
    """Make a case of a function, or, where it has no name to speak of, of a dictionary of flags."""

    def add(prepare):
        CASES.append(Case(group, name, prepare if callable(prepare) else lambda folder: prepare, expected))
        return prepare

    return add


# ----------------------------------------------------------------------------------------------------------
# Configuration

for name, flags, *expected in [
    ("an unknown flag", ["--max-step", "3"], "--max-step", "Did you mean --max-steps?"),
    ("an unknown flag with =", ["--lerning-rate=3"], "--lerning-rate", "Did you mean --max-lr?"),
    ("a flag of another trainer", ["--n_layers", "3"], "Did you mean --n-layer?"),
    ("an unknown preset", ["--preset", "gpt2-medum"], "gpt2-medum", "Did you mean gpt2-medium?"),
    ("a preset without a name", ["--preset"], "--preset needs a value."),
    ("a word for a number", ["--max-steps", "many"], "many"),
    ("a flag without its value", ["--max-steps"], "max-steps"),
    ("an unknown optimizer", ["--optimizer", "sgd"], "sgd", "adamw"),
    ("an unknown dtype", ["--dtype", "float8"], "float8", "bfloat16"),
    ("a word too many", ["train"], "train"),
    (
        "a batch that does not divide",
        dict(total_batch_size=1000),
        "--total-batch-size 1000",
        "multiple of 16",
        "ranks. Try --total-batch-size 992",
    ),
    ("heads that do not divide the width", dict(n_embd=33), "--n-embd 33", "--n-head 2", "Try --n-embd 32"),
    ("T beyond the block size", dict(sequence_length=64, batch_size=2), "--sequence-length 64", "--block-size 32"),
    ("a negative count", dict(n_layer=-1), "--n-layer is -1", "greater than 0"),
    ("no steps", dict(max_steps=0), "--max-steps is 0", "greater than 0"),
    ("a batch of nothing", dict(batch_size=0), "--batch-size is 0", "greater than 0"),
    ("an interval below zero", dict(val_every=-5), "--val-every is -5", "0 or more"),
    ("a learning rate that is no number", dict(max_lr="nan"), "--max-lr is nan", "finite"),
    ("an infinite learning rate", dict(max_lr="inf"), "--max-lr is inf", "finite"),
    ("no checkpoints to keep", dict(keep_checkpoints=0), "--keep-checkpoints is 0", "greater than 0"),
    (
        "a decay of more than the run",
        dict(schedule="wsd", decay_fraction=1.5),
        "--decay-fraction is 1.5",
        "between 0 and 1",
    ),
    (
        "fp8 at a width that it can't tile",
        dict(dtype="fp8", n_embd=40),
        "--dtype fp8",
        "multiples of 16",
        "--n-embd 40",
    ),
    ("fewer validation tokens than a window", dict(val_tokens=15), "--val-tokens is 15", "16 or more"),
    (
        "a vocabulary below the tokenizer's",
        dict(vocab_size=200),
        "room for 200 token ids",
        "--vocab-size",
        "to 257 or more",
    ),
    ("a ramp whose steps do not divide", dict(batch_ramp=10**6), "--batch-ramp", "32,768"),
    ("a device that does not exist", dict(device="gpu"), "device called 'gpu'"),
    (
        "three mistakes at once",
        dict(n_embd=33, sequence_length=64, total_batch_size=1000, batch_size=2),
        "--n-embd 33",
        "--sequence-length 64",
        "--total-batch-size 1000",
    ),
]:
    case("configuration", name, *expected)(flags)

if not torch.cuda.is_available():
    case("configuration", "a GPU that is not there", "no cuda device", "--device", "cpu")(dict(device="cuda"))


# ----------------------------------------------------------------------------------------------------------
# Data


def break_shard(folder, content, split="train"):
    """A copy of the good data whose last shard of a split holds `content`."""
    data = shutil.copytree(folder / "data", folder / "broken")
    path = sorted(data.glob(f"*_{split}_*.npy"))[-1]
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content, allow_pickle=True)
    return dict(data=data)


case("data", "a folder that is not there", "no train shards in nowhere", "fineweb.py", "--data")(dict(data="nowhere"))


@case("data", "no validation shards", "no val shards", "fineweb.py", "--data")
def no_val(folder):
    data = shutil.copytree(folder / "data", folder / "broken")
    (data / "tiny_val_000000.npy").unlink()
    return dict(data=data)


@case("data", "a truncated shard", "damaged", "tiny_train_000002.npy")
def truncated_shard(folder):
    return break_shard(folder, (folder / "data" / "tiny_train_000002.npy").read_bytes()[:1000])


@case("data", "a shard of another dtype", "int64", "uint16")
def other_dtype(folder):
    return break_shard(folder, np.arange(1000))


@case("data", "a pickled array", "damaged", "tiny_train_000002.npy")
def pickled_array(folder):
    return break_shard(folder, np.array([{"a": 1}] * 500, dtype=object))


@case("data", "a shard with code inside", "damaged", "tiny_train_000002.npy")
def shard_with_code(folder):
    return break_shard(folder, pickle.dumps(Touch(folder / "touched")))


@case("data", "ids beyond the vocabulary", "token id 40000", "257", "bytes")
def large_ids(folder):
    return break_shard(folder, np.full(1000, 40_000, np.uint16))


case("data", "less data than a step", "4,688 training tokens", "10,240", "--total-batch-size")(
    dict(total_batch_size=10_240)
)


def break_meta(folder, text):
    """The good data with another meta.json."""
    data = shutil.copytree(folder / "data", folder / "broken")
    (data / "meta.json").write_text(text)
    return dict(data=data)


@case("data", "a meta.json that is no JSON", "meta.json")
def torn_meta(folder):
    return break_meta(folder, '{"tokenizer": "byt')


@case("data", "a meta.json without a tokenizer", "meta.json", "tokenizer")
def empty_meta(folder):
    return break_meta(folder, "{}")


@case("data", "a tokenizer whose file is not there", "tokenizer.tiktoken")
def missing_tokenizer(folder):
    return break_meta(folder, '{"tokenizer": "my-1a2b3c4d"}')


@case("data", "GPT-2's shards, no tables, no network", "TIKTOKEN_CACHE_DIR", "bytes")
def no_tables(folder):
    data = shutil.copytree(folder / "data", folder / "broken")
    (data / "meta.json").unlink()
    (folder / "empty").mkdir()
    os.environ["TIKTOKEN_CACHE_DIR"] = str(folder / "empty")
    tiktoken.registry.ENCODINGS.pop("gpt2", None)
    return dict(data=data)


# ----------------------------------------------------------------------------------------------------------
# Checkpoints


class Touch:
    """An object whose unpickling makes a file: what a hostile checkpoint does."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def checkpoint_of(folder):
    return torch.load(folder / "run" / "model_00004.pt", weights_only=True)


def from_bytes(folder, content):
    (folder / "bad.pt").write_bytes(content)
    return dict(init_from=folder / "bad.pt")


def from_state(folder, state):
    torch.save(state, folder / "bad.pt")
    return dict(init_from=folder / "bad.pt")


@case("checkpoints", "--init-from half a checkpoint", "bad.pt is damaged")
def half_checkpoint(folder):
    whole = (folder / "run" / "model_00004.pt").read_bytes()
    return from_bytes(folder, whole[: len(whole) // 2])


case("checkpoints", "--init-from an empty file", "bad.pt is damaged")(lambda folder: from_bytes(folder, b""))
case("checkpoints", "--init-from a text", "bad.pt")(lambda folder: from_bytes(folder, b"To be, or not to be\n" * 9))
case("checkpoints", "--init-from noise", "bad.pt")(lambda folder: from_bytes(folder, bytes(range(256)) * 99))
case("checkpoints", "--init-from a tensor", "bad.pt")(lambda folder: from_state(folder, torch.zeros(3)))
case("checkpoints", "--init-from a number", "bad.pt")(lambda folder: from_state(folder, 3))
case("checkpoints", "--init-from bare weights", "bad.pt", "it has no")(
    lambda folder: from_state(folder, checkpoint_of(folder)["model"])
)


@case("checkpoints", "--init-from a checkpoint without its tokenizer", "bad.pt", "tokenizer_file")
def without_tokenizer(folder):
    state = checkpoint_of(folder)
    return from_state(folder, {name: state[name] for name in ("model", "config", "step", "tokenizer")})


@case("checkpoints", "--init-from a checkpoint whose config is not whole", "bad.pt", "its config has no block_size")
def without_config(folder):
    return from_state(folder, checkpoint_of(folder) | {"config": {"n_layer": 2}})


@case("checkpoints", "--init-from weights of another shape", "(320, 32) instead of (320, 64)")
def other_shape(folder):
    state = checkpoint_of(folder)
    return from_state(folder, state | {"config": state["config"] | {"n_embd": 64}})


@case("checkpoints", "--init-from a checkpoint with code inside", "bad.pt", "code")
def hostile_checkpoint(folder):
    return from_state(folder, checkpoint_of(folder) | {"val_loss": Touch(folder / "touched")})


@case("checkpoints", "--init-from an old pickle with code inside", "bad.pt", "code")
def hostile_pickle(folder):
    return from_bytes(folder, pickle.dumps({"model": Touch(folder / "touched")}))


case("checkpoints", "--init-from nothing", "no-such-model")(dict(init_from="no-such-model"))
case("checkpoints", "--init-from a misspelt name", "Did you mean gpt2-medium?")(dict(init_from="gpt2-medim"))
case("checkpoints", "--init-from OpenAI's, no network", "gpt2-large", "network")(dict(init_from="gpt2-large"))


@case("checkpoints", "--init-from a folder without a model", "empty")
def empty_folder(folder):
    (folder / "empty").mkdir()
    return dict(init_from=folder / "empty")


@case("checkpoints", "--init-from half a Hugging Face folder", "hf")
def half_hf(folder):
    path = shutil.copytree(folder / "run" / "hf", folder / "hf") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:2000])
    return dict(init_from=folder / "hf")


@case("checkpoints", "--init-from a Hugging Face folder of another family", "hf")
def other_family(folder):
    path = shutil.copytree(folder / "run" / "hf", folder / "hf") / "config.json"
    path.write_text(path.read_text().replace("gelu_new", "relu"))
    return dict(init_from=folder / "hf")


@case("checkpoints", "--init-from a model of another tokenizer", "tokenizer bytes", "my-1a2b3c4d", "--data")
def other_tokenizer(folder):
    state = checkpoint_of(folder)
    enc = tiktoken.Encoding(
        "my-1a2b3c4d",
        pat_str=r"(?s:.)",
        special_tokens={"<|endoftext|>": 257},
        mergeable_ranks={bytes([i]): i for i in range(256)} | {b"ab": 256},
    )
    return from_state(folder, state | {"tokenizer": enc.name, "tokenizer_file": train_gpt2.tokenizer.dumps(enc)})


@case("checkpoints", "--init-from a model shorter than T", "--sequence-length 64", "the 32 tokens")
def short_model(folder):
    return dict(init_from=folder / "run", block_size=64, sequence_length=64, batch_size=2)


@case("checkpoints", "a run without a whole checkpoint", "None of the checkpoints", "--no-resume")
def no_whole_checkpoint(folder):
    for path in (folder / "run").glob("model_*.pt"):
        path.write_bytes(path.read_bytes()[:1000])
    return dict(out_dir=folder / "run")


@case("checkpoints", "a run whose checkpoints hold code", "None of the checkpoints", "--no-resume")
def hostile_run(folder):
    for path in (folder / "run").glob("model_*.pt"):
        torch.save(torch.load(path, weights_only=True) | {"rng": Touch(folder / "touched")}, path)
    return dict(out_dir=folder / "run")


@case("checkpoints", "a folder of a different run", "max_lr was 0.003, now 0.1", "--out-dir", "--no-resume")
def different_run(folder):
    return dict(out_dir=folder / "run", max_lr=0.1)


@case(
    "checkpoints", "a run whose data has changed", "not those that the run was started on", "original shards", "--data"
)
def other_data(folder):
    (folder / "run" / "model_00004.pt").unlink()
    return dict(out_dir=folder / "run", data=make_shards(folder / "more", lengths=(2000, 3000, 2700)))


# ----------------------------------------------------------------------------------------------------------
# Environment


@case("environment", "HellaSwag is not there and there is no network", "hellaswag.jsonl", "--hellaswag-every 0")
def no_hellaswag(folder):
    return dict(hellaswag_every=2, hellaswag_data=folder / "hellaswag.jsonl")


@case("environment", "a HellaSwag file with a bad line", "Line 1 of", "hellaswag.jsonl")
def bad_hellaswag(folder):
    (folder / "hellaswag.jsonl").write_text('{"ctx": "a"}\n')
    return dict(hellaswag_every=2, hellaswag_data=folder / "hellaswag.jsonl")


@case("environment", "an out-dir below a file", "afile", "--out-dir")
def below_a_file(folder):
    (folder / "afile").write_text("something dear")
    return dict(out_dir=folder / "afile" / "out")


@case("environment", "an out-dir that is a file", "afile", "--out-dir")
def is_a_file(folder):
    (folder / "afile").write_text("something dear")
    return dict(out_dir=folder / "afile")


@case("environment", "an out-dir that may not be written", "/proc/1/out", "--out-dir")
def not_writable(folder):
    return dict(out_dir="/proc/1/out")


# ----------------------------------------------------------------------------------------------------------
# Running them


def make_good(folder):
    """Good data and a finished run, beside which every mistake is made."""
    make_shards(folder / "data")
    with contextlib.redirect_stdout(io.StringIO()):
        assert train(folder / "data", folder / "run", **OPTIONS) == 0
    return folder


@contextlib.contextmanager
def quiet_download():
    """Downloads that fail at once: no second attempts, which wait."""
    download = train_gpt2.hellaswag.download

    def once(path, *args, **options):
        return download(path, attempts=1)

    with patched(train_gpt2.hellaswag, "download", once):
        yield


def try_case(one, folder):
    """Make the mistake in `folder`; (exit status, stdout, stderr, whether the folder is as it was)."""
    environment = dict(os.environ)
    try:
        args = one.prepare(folder)
        if isinstance(args, dict):
            args = dict(args)
            out_dir = args.pop("out_dir", folder / "out")
            data = args.pop("data", folder / "data")
            args = tiny_flags(data, out_dir, **OPTIONS | args)
        else:
            args = tiny_flags(folder / "data", folder / "out", **OPTIONS) + args
        before = listing(folder)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), quiet_download():
            here = os.getcwd()
            os.chdir(folder)
            try:
                status = status_of(train_gpt2.main, args)
            finally:
                os.chdir(here)
        return status, out.getvalue(), err.getvalue(), listing(folder) == before
    finally:
        os.environ.clear()
        os.environ.update(environment)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return make_good(tmp_path_factory.mktemp("good"))


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_a_mistake_gives_one_line_and_changes_nothing(one, good, tmp_path):
    folder = shutil.copytree(good, tmp_path / "folder")
    status, out, err, unchanged = try_case(one, folder)
    assert status == 2
    assert "Traceback" not in out + err
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, err
    for text in one.expected:
        assert text in lines[0]
    # transformers has a bar of its own for loading; nothing else speaks on stderr
    others = [line for line in err.splitlines() if line != lines[0] and "Loading weights" not in line and line.strip()]
    assert not others, others
    assert unchanged
    assert not (folder / "touched").exists()


def test_a_checkpoint_cut_at_any_place_or_with_any_byte_changed_is_no_traceback(good, tmp_path, capsys):
    """Thirty damages: each is refused by a UserError, or, where no one can tell, loads."""
    whole = (good / "run" / "model_00004.pt").read_bytes()
    rng = np.random.default_rng(0)
    path, refused = tmp_path / "bad.pt", 0
    for number in range(30):
        place = int(rng.integers(0, len(whole)))
        if number % 2:
            path.write_bytes(whole[:place])
        else:
            path.write_bytes(whole[:place] + bytes(rng.integers(0, 256, 20, dtype=np.uint8)) + whole[place + 20 :])
        try:
            checkpoint.load_checkpoint(path)
        except UserError:
            refused += 1
    assert refused >= 15  # every cut at least


@pytest.mark.parametrize("script", ["sample", "hellaswag"])
def test_a_hostile_checkpoint_is_refused_by_every_script(script, good, tmp_path, monkeypatch, capsys):
    """Through -m, as the file itself and as the folder of a run; its code would make the file `touched`."""
    folder = shutil.copytree(good, tmp_path / "folder")
    hostile_checkpoint(folder)
    hostile_run(folder)
    example = dict(activity_label="a", ctx="b", endings=list("cdef"), label=0)
    (tmp_path / "examples.jsonl").write_text(json.dumps(example))
    module = importlib.import_module(script)
    for source in (folder / "bad.pt", folder / "run"):
        rest = ["To be"] if script == "sample" else ["--data", str(tmp_path / "examples.jsonl")]
        monkeypatch.setattr(sys, "argv", [script, *rest, "-m", str(source)])
        assert status_of(module.main) == 2
        assert capsys.readouterr().err.count("error: ") == 1
    assert not (folder / "touched").exists()
    with pytest.raises(Exception):  # the file does hold code: a loader without weights_only runs it
        torch.load(folder / "bad.pt", weights_only=True)
    torch.load(folder / "bad.pt", weights_only=False)
    assert (folder / "touched").exists()


def test_more_ranks_than_gpus_is_said_before_the_process_group(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: types.SimpleNamespace(total_memory=80 * 2**30))
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="2 processes on this machine.* 1 GPU.*--nproc_per_node=1"):
        fit.check_config(train_gpt2.TrainConfig(device="cuda"), 2)


def test_a_batch_that_the_ranks_do_not_divide_is_answered_with_a_number_of_ranks_if_there_is_one():
    with pytest.raises(UserError, match="of 3072.* 3 ranks. Start a number of ranks that divides 512, or"):
        fit.check_config(train_gpt2.TrainConfig(), 3)
    with pytest.raises(UserError, match="multiple of 2048.* 2 ranks. Try --total-batch-size 4096"):
        fit.check_config(train_gpt2.TrainConfig(total_batch_size=5000), 2)


def test_bfloat16_on_a_gpu_without_it_is_refused_and_auto_takes_float16(monkeypatch):
    """On a CPU auto is float32 for tiny models, whatever its instructions."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(UserError, match="--dtype bfloat16.* Use --dtype float16"):
        distributed.choose_dtype("bfloat16", "cuda", 768)
    assert distributed.choose_dtype("auto", "cuda", 768) == (torch.float16, "float16")
    assert distributed.choose_dtype("auto", "cpu", 64) == (torch.float32, "float32")


def test_fp8_on_a_device_without_it_is_refused(monkeypatch):
    for device, capability in [("cuda", (8, 0)), ("cuda", (8, 6)), ("mps", None)]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        with pytest.raises(UserError, match="does not support --dtype fp8.* Leave --dtype out"):
            distributed.choose_dtype("fp8", device, 768)
    for capability in [(8, 9), (9, 0), (10, 0)]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert distributed.choose_dtype("fp8", "cuda", 768) == (torch.bfloat16, "fp8"), "but for the output layer"


@pytest.mark.parametrize("prompt", ["x" * 100, "a<|endoftext|>b", "\u00e9\U0001f600", ""])
def test_odd_prompts_are_only_text(prompt, data, tmp_path, capsys):
    """Longer than the block size of 32; with the text of a special token; beyond ASCII; the start of a document."""
    assert train(data, tmp_path / "out", sample_prompt=prompt, sample_every=2, max_steps=2) == 0
    lines = [line.split(" | sample | ") for line in capsys.readouterr().out.splitlines() if " | sample | " in line]
    assert [start for start, _ in lines] == ["step     0"] * 4 + ["step     2"] * 4
    texts = [ast.literal_eval(text) for _, text in lines]
    assert all(text.startswith(prompt) and len(text) > len(prompt) for text in texts)
    assert len(set(texts)) == 8


def test_the_real_script_leaves_with_status_2_and_one_line(tmp_path):
    command = [sys.executable, str(ROOT / "train_gpt2.py"), "--data", "nowhere", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
    assert "no train shards in nowhere" in done.stderr
    assert not any(tmp_path.iterdir())


LATE_RANK_0 = """
import os, sys, time
import train_gpt2
from plumbing import cli
if os.environ["RANK"] == "0":
    time.sleep(float(sys.argv.pop(1)))
cli.run(train_gpt2.main)
"""


def test_under_torchrun_one_rank_prints_the_line(data, tmp_path):
    """Rank 0, even where it comes later than the others, whose end makes torchrun end it."""
    (tmp_path / "late.py").write_text(LATE_RANK_0)
    args = tiny_flags(data, tmp_path / "out", n_layer=0)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*torchrun, str(tmp_path / "late.py"), "3", *args]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "--n-layer is 0" in lines[0], done.stderr
    assert not (tmp_path / "out").exists()


def test_a_mistake_that_only_the_data_shows_is_said_once_by_two_ranks(data, tmp_path):
    (data / "tiny_train_000002.npy").write_bytes(b"torn")
    args = tiny_flags(data, tmp_path / "out")
    assert run(train_gpt2.main, args, output=tmp_path / "output", ranks=2) == [2, 2]
    text = (tmp_path / "output").read_text()
    assert text.count("error: ") == 1 and "Traceback" not in text
    assert not (tmp_path / "out").exists()


# ----------------------------------------------------------------------------------------------------------
# A full disk


def train_with_limit(args, num_bytes):
    """Train where no file may grow beyond so many bytes, as on a disk that fills up."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # Python's own setting; what comes is an error, no signal
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
    train_gpt2.main(args)


@pytest.fixture
def straight(good):
    return good / "run"


def error_of_limited_run(args, num_bytes, tmp_path):
    """The one line that a run prints which the limit ends with status 2. It prints to a pipe, which has no limit."""
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDWR | os.O_NONBLOCK)
    status = run(train_with_limit, args, num_bytes, output=tmp_path / "pipe")
    text = os.read(pipe, 2**16).decode()  # as much as a pipe holds
    os.close(pipe)
    lines = [line for line in text.splitlines() if line.startswith("error: ")]
    assert status == [2] and len(lines) == 1, text
    assert "Traceback" not in text and "Exception ignored" not in text, text
    return lines[0]


def test_a_full_disk_while_a_checkpoint_is_written_costs_one_line_and_no_file(good, straight, tmp_path):
    """The first checkpoint does not fit: nothing of it stays. With free space the same command continues."""
    args = tiny_flags(good / "data", tmp_path / "out", **OPTIONS)
    output = tmp_path / "output"
    line = error_of_limited_run(args, 100_000, tmp_path)
    assert "Could not write" in line and "model_00002.pt" in line and "free space" in line
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"log.txt", "run.txt"}
    assert run(train_gpt2.main, args, output=output) == [0]
    assert read_log(tmp_path / "out") == read_log(straight)


def test_a_disk_that_fills_up_leaves_the_earlier_checkpoints_whole(good, straight, tmp_path):
    """The first run ends after step 2 (by a signal); the second has no room for the next checkpoint."""
    args = tiny_flags(good / "data", tmp_path / "out", **OPTIONS)
    output = tmp_path / "output"
    assert run(stop_after_two_steps, args, output=output) == [0], output.read_text()
    before = listing(tmp_path / "out")
    assert "model_00004.pt" in error_of_limited_run(args, 100_000, tmp_path)
    after = listing(tmp_path / "out")
    assert after["model_00002.pt"] == before["model_00002.pt"] and set(after) == set(before)
    assert run(train_gpt2.main, args, output=output) == [0]
    assert read_log(tmp_path / "out") == read_log(straight)
    assert read_log(tmp_path / "out", "val") == read_log(straight, "val")


def stop_after_two_steps(args):
    def report_and_stop(self, step, text, **streams):
        report(self, step, text, **streams)
        if "train" in streams and step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with patched(runs.Run, "report", report_and_stop) as report:
        train_gpt2.main(args)


def test_a_full_disk_while_the_log_is_written_costs_one_line_and_the_same_command_goes_on(data, tmp_path):
    """run.txt still fits into 3,000 bytes, the log of 40 steps does not."""
    options = dict(max_steps=40, val_every=0, checkpoint_every=0)
    assert train(data, tmp_path / "straight", **options) == 0
    args = tiny_flags(data, tmp_path / "out", **options)
    output = tmp_path / "output"
    assert "log.txt" in error_of_limited_run(args, 3000, tmp_path)
    assert run(train_gpt2.main, args, output=output) == [0], output.read_text()
    assert read_log(tmp_path / "out") == read_log(tmp_path / "straight")


def test_a_full_disk_while_the_model_is_exported_costs_one_line_and_the_same_command_goes_on(good, straight, tmp_path):
    out = shutil.copytree(straight, tmp_path / "out")
    shutil.rmtree(out / "hf")
    args = tiny_flags(good / "data", out, **OPTIONS)
    output = tmp_path / "output"
    assert "hf" in error_of_limited_run(args, 50_000, tmp_path)
    assert not (out / "hf").exists()
    assert run(train_gpt2.main, args, output=output) == [0], output.read_text()
    assert (out / "hf" / "model.safetensors").read_bytes() == (straight / "hf" / "model.safetensors").read_bytes()


# ----------------------------------------------------------------------------------------------------------
# The table


def main():
    with tempfile.TemporaryDirectory() as place:
        good = make_good(Path(place) / "good")
        group = ""
        print("What the trainer prints for each mistake: one line, exit status 2, nothing changed on disk.\n")
        for number, one in enumerate(CASES):
            folder = shutil.copytree(good, Path(place) / f"case{number}")
            try:
                status, _, err, unchanged = try_case(one, folder)
            except Exception as error:
                status, err, unchanged = 1, f"error: TRACEBACK {type(error).__name__}: {error}", False
            lines = [line for line in err.splitlines() if line.startswith("error: ")]
            fine = status == 2 and len(lines) == 1 and unchanged and not (folder / "touched").exists()
            if one.group != group:
                group = one.group
                print(f"\n## {group}\n\n| mistake | what is printed | as promised |\n|---|---|---|")
            line = " ".join(lines).replace(str(folder), "DIR").replace("|", "\\|")
            print(f"| {one.name} | `{line}` | {'yes' if fine else f'NO: status {status}, unchanged {unchanged}'} |")


if __name__ == "__main__":
    main()
