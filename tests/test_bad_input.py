"""A user's mistakes: one line `error: ...` in plain English, exit status 2, no traceback, nothing changed on disk.

Each mistake is made in a folder that holds good data, a finished run, and what others may hold that is damaged.
"""

import contextlib
import importlib
import os
import pickle
import shlex
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch
import train_gpt2
from plumbing.data import downloads, tokenizers
from plumbing.run import run as run_folder
from plumbing.system import devices

from corpora import write, write_rows
from harness import (
    TINY,
    Touch,
    assert_same_run,
    change_checkpoint,
    change_meta,
    error_in,
    flags,
    listing,
    make_shards,
    needs,
    refused,
    run,
    samples,
    tiny_flags,
    train,
)

OPTIONS = dict(max_steps=4, val_every=2, checkpoint_every=2)

# {a command: words that its line must have}. To a command of the trainer, the flags of a tiny run are added
REFUSED = {
    # an unknown flag or preset
    "train_gpt2.py --max-l 3": "There is no flag called --max-l. Did you mean --max-lr?",
    "train_gpt2.py --preset gpt2-medum": "there is no 'gpt2-medum'. Did you mean gpt2-medium?",
    # a batch that does not divide
    "train_gpt2.py --total-batch-size 1000": "not a multiple of 16 & Try --total-batch-size 992",
    "train_gpt2.py --batch-ramp 1000 --total-batch-size 131200": "steps of 32,768 tokens & --total-batch-size",
    # heads that do not divide the channels, and sequences longer than the model's block
    "train_gpt2.py --n-embd 33": "--n-embd 33 is not a multiple of --n-head 2 & --n-head 3 & --n-embd 32",
    "train_gpt2.py --sequence-length 64 --batch-size 2": "--sequence-length 64 & --block-size 32",
    # numbers that are negative, 0, infinite or none
    "train_gpt2.py --val-every -5": "--val-every is -5 & 0 or more",
    "train_gpt2.py --batch-size 0": "--batch-size is 0 & 1 or more",
    "train_gpt2.py --max-lr inf": "--max-lr is inf & above 0 and below 1e+18",
    "train_gpt2.py --beta1 1": "--beta1 is 1.0 & below 1",
    "train_gpt2.py --beta2 -0.5": "--beta2 is -0.5 & 0 or more",
    "train_gpt2.py --muon-momentum 1.5": "--muon-momentum is 1.5",
    "train_gpt2.py --decay-fraction 1.5": "--decay-fraction is 1.5 & between 0 and 1",
    "train_gpt2.py --decay-fraction nan": "--decay-fraction is nan",
    "train_gpt2.py --weight-decay nan": "--weight-decay is nan & 0 or more and below 1e+18",
    "train_gpt2.py --data-weights 1 1": "--data-weights is 1.0 1.0 & a share for each folder",
    "train_gpt2.py --data-weights 0": "not all 0",
    "train_gpt2.py --data-weights -1": "0 or more",
    "train_gpt2.py --data-weights nan": "0 or more",
    "train_gpt2.py --data-weights inf": "0 or more",
    # settings that exclude each other
    "train_gpt2.py --preset chat": "--preset chat fine-tunes a model & --init-from",
    "train_gpt2.py --passes 2 --max-steps 4": "--passes, --tokens-per-parameter and --max-steps & one of them",
    "train_gpt2.py --tokens-per-parameter 20 --max-steps 4": "one of them",
    "train_gpt2.py --passes 2 --data-weights 1": "--max-steps instead",
    "train_gpt2.py --vocab-size 200": "room for 200 token ids & 257 or more",
    "train_gpt2.py --out-dir run --max-lr 0.1 --seed 7": "(seed was 1337, now 7, max_lr was 0.003, now 0.1) & --no-r",
    # what this machine lacks
    "train_gpt2.py --device tpu": "no device 'tpu' & cpu & --device",
    f"train_gpt2.py --n-embd {2**20}": "model is too large & Use a smaller model",
    # shards that are missing, damaged, too few or of another tokenizer
    "train_gpt2.py --data nowhere": "in nowhere, which does not exist & fineweb.py --input FILES",
    "train_gpt2.py --data nowhere --dry-run --passes 2 --max-steps 0": "in nowhere, which does not exist",
    "train_gpt2.py --data no_train": "no train shards in no_train & make them",
    "train_gpt2.py --data no_val": "no val shards in no_val",
    "train_gpt2.py --data cut": "tiny_train_000002.npy is missing or damaged",
    "train_gpt2.py --data int64": "tiny_train_000002.npy & int64",
    "train_gpt2.py --data pickled": "tiny_train_000002.npy is missing or damaged",
    "train_gpt2.py --data beyond": "tiny_train_000002.npy & token id 257",
    "train_gpt2.py --data longer": "tiny_train_000002.npy has 1,705 tokens in meta.json and 1,700 on disk",
    "train_gpt2.py --data unfinished": "not complete",
    "train_gpt2.py --data nameless": "tokenizer.tiktoken",
    "train_gpt2.py --total-batch-size 8192": "train shards in data hold only 4,688 tokens & 8,192 are needed",
    "train_gpt2.py --data other --out-dir stopped": ", but the model uses bytes. ",
    "train_gpt2.py --out-dir data/meta.json": "meta.json",
    "train_gpt2.py --out-dir data/meta.json/out": "meta.json",
    # texts
    "fineweb.py --input torn.parquet --tokenizer bytes": "torn.parquet is damaged",
    "fineweb.py --input a.jsonl --tokenizer bytes --text-column body": "Line 1 of a.jsonl has no text under 'body'",
    "fineweb.py --input bad.jsonl --tokenizer bytes": "Line 2 of bad.jsonl is not a valid JSON object",
    "fineweb.py --input empty.txt --tokenizer bytes": "contains no text",
    "fineweb.py --input a.pdf --tokenizer bytes": "a.pdf is not read & pdftotext",
    "fineweb.py --input a.docx --tokenizer bytes": "a.docx is not read & pandoc",
    "fineweb.py --input a.jsonl --tokenizer big.tiktoken": "65,537 & 65,536",
    "fineweb.py --input a.jsonl --tokenizer bytes --out-dir foreign": "did not write",
    "fineweb.py --input a.jsonl --tokenizer bytes --out-dir data": "data",
    # checkpoints
    "train_gpt2.py --init-from half.pt": "half.pt cannot be read",
    "train_gpt2.py --init-from flipped.pt": "flipped.pt cannot be read: the checksum",
    "train_gpt2.py --init-from tensor.pt": "it has no model",
    "train_gpt2.py --init-from code.pt": "code, which is never run",
    "train_gpt2.py --init-from script.pt": "script.pt cannot be read",
    "train_gpt2.py --init-from gap.pt": "transformer.h.1.ln_2.bias",
    "train_gpt2.py --init-from run --n-embd 64": "--n-embd is 64, but the weights that the run starts from have 32",
    "train_gpt2.py --init-from run --n-layer 3": "--n-layer is 3",
    "train_gpt2.py --init-from run --n-head 4": "--n-head is 4",
    "train_gpt2.py --out-dir coded": "None of the checkpoints in coded & --no-resume",
    "sample.py x -m gpt2": "error: gpt2 is a folder without a model. Name a checkpoint",
    "sample.py x -m gpt3": "error: There is no gpt3. Name a checkpoint",
    # no network
    "train_gpt2.py --init-from gpt2-medim": "Did you mean gpt2-medium?",
    "train_gpt2.py --init-from gpt2-large": "network",
    "train_gpt2.py --data bare": "TIKTOKEN_CACHE_DIR & --tokenizer bytes",
    "train_gpt2.py --hellaswag-every 2": "hellaswag_val.jsonl & network & --hellaswag-every 0",
    "train_gpt2.py --hellaswag-every 2 --hellaswag-data none.jsonl": "no file none.jsonl",
    "train_gpt2.py --hellaswag-every 2 --hellaswag-data a.jsonl": "ine 1",
    "fineweb.py --tokenizer bytes": "--dataset python-docs & --input",
    # prompts
    "sample.py -m run": "prompt",
    f"sample.py -m run {'x' * 33}": "The prompt has 33 tokens",
    "sample.py -m run x --top-p 1.5": "--top-p is 1.5",
    "sample.py -m run '' --top-k -1": "The prompt is empty. & --top-k is -1",
    "sample.py -m run --chat -n 2": "--num-samples and --export",
    "sample.py -m run x --system Kind": "Add --chat",
    # other programs
    "hellaswag.py --limit -1": "--limit is -1",
    "plumbing.run.compare": "pattern in quotes",
    "bench.__main__ train --peer nowhere": "There is no model.py in nowhere",
    "bench.__main__ train --settings preset=quickstar": "quickstart",
    "bench.__main__ train --settings preset=quickstar --json a.jsonl": "exists already",  # before any work
}
# Below are those that are no command or change the machine. Elsewhere: more local ranks than GPUs
# (test_simulated_gpu.py), a text longer than a shard (test_readers.py), a full disk for a shard (test_fineweb.py),
# memory, attention and a compiler that fail (test_devices.py, test_shard.py), sizes that the weights lack
# (test_huggingface.py)


def write_shards():
    """Folders of shards with a mistake each."""
    make_shards("no_train", lengths=(2000,))
    for name in "no_val cut int64 pickled beyond longer unfinished nameless other bare".split():
        make_shards(name)
    os.remove("no_val/tiny_val_000000.npy")
    os.remove("bare/meta.json")
    last = "tiny_train_000002.npy"
    os.truncate(f"cut/{last}", 3500)
    np.save(f"int64/{last}", np.arange(1700))
    np.save(f"pickled/{last}", np.array([Touch("touched")] * 1700), allow_pickle=True)
    np.save(f"beyond/{last}", np.full(1700, 257, np.uint16))
    lengths = change_meta("longer")["shards"]
    change_meta("longer", shards=lengths | {last: 1705})
    change_meta("unfinished", complete=False)
    change_meta("nameless", tokenizer="my-1a2b3c4d")
    path = Path("other/tokenizer.tiktoken")
    write_tokenizer(path, {bytes([255 - i]): i for i in range(256)})
    change_meta("other", tokenizer=tokenizers.read_encoding(path).name)


def write_tokenizer(path, ranks):
    special = {"<|endoftext|>": len(ranks)}
    enc = tiktoken.Encoding("any", pat_str="(?s:.)", mergeable_ranks=ranks, special_tokens=special)
    tokenizers.write_encoding(enc, path)


def write_texts():
    write("a.jsonl", '{"text": "a"}\n')
    write("bad.jsonl", '{"text": "a"}\n{"text": \n')
    write("empty.txt", "")
    write("a.pdf", "%PDF-1.4")
    write("a.docx", "PK")
    os.truncate(write_rows("torn.parquet", [{"text": "a"}]), 100)
    ranks = {bytes([i]): i for i in range(256)}
    ranks |= {i.to_bytes(4, "big"): i for i in range(256, 65536)}
    write_tokenizer(Path("big.tiktoken"), ranks)
    os.mkdir("foreign")
    write("foreign/x_train_000001.npy", "")


def write_checkpoints():
    """Files that are no checkpoints, a run whose checkpoints all hold code, and one that was stopped."""
    good = Path("run/model_00004.pt")
    content = good.read_bytes()
    middle = len(content) // 2
    Path("half.pt").write_bytes(content[:middle])
    Path("flipped.pt").write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    Path("script.pt").write_bytes(pickle.dumps({"model": Touch("touched")}))
    torch.save(torch.zeros(3), "tensor.pt")
    for name in ("coded", "stopped"):
        shutil.copytree("run", name)
    os.remove(f"stopped/{good.name}")
    for path in Path("coded").glob("model_*.pt"):
        change_checkpoint(path, lambda content: content.update(rng=Touch("touched")))
    shutil.copy(f"coded/{good.name}", "code.pt")
    shutil.copy(good, "gap.pt")
    change_checkpoint("gap.pt", lambda content: content["model"].pop("transformer.h.1.ln_2.bias"))


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Good data and a finished run, and beside them everything with a mistake."""
    folder = tmp_path_factory.mktemp("good")
    with contextlib.chdir(folder):
        make_shards("data")
        train("data", "run", **OPTIONS)
        os.mkdir("empty")
        os.mkdir("gpt2")
        write_shards()
        write_texts()
        write_checkpoints()
    return folder


@pytest.fixture
def refuses(good, monkeypatch):
    """refuses(command, words): one line has the words, and nothing changes in the folder. There is no network."""
    monkeypatch.chdir(good)
    monkeypatch.setattr(downloads, "RETRY_SECONDS", 0)  # downloads fail at once
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "empty")
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})

    def check(command, words):
        before = listing(good)
        program, *args = shlex.split(command)
        if program == "train_gpt2.py":
            data = [] if "--data" in args else ["--data", "data"]
            args = [*flags(out_dir="out", **TINY | OPTIONS), *data, *args]
        line = refused(importlib.import_module(program.removesuffix(".py")).main, *args)
        for word in words.split(" & "):
            assert word in line, line
        assert listing(good) == before

    return check


@pytest.mark.parametrize("command", REFUSED)
def test_a_mistake_is_refused_in_one_line_and_changes_nothing(command, refuses):
    refuses(command, REFUSED[command])


def test_all_complaints_are_said_together(refuses, monkeypatch):
    monkeypatch.setattr(devices, "has_float8", lambda device: False)
    refuses(
        "train_gpt2.py --n-embd 33 --val-tokens 1 --total-batch-size 1000 --max-lr 0 --beta2 1 --dtype fp8",
        "--max-lr is 0.0, & --beta2 is 1.0, & --n-embd 33 & --val-tokens & multiple of 16 & --dtype fp8",
    )


@needs("float8")
def test_float8_needs_matrices_of_multiples_of_16(refuses):
    refuses("train_gpt2.py --dtype fp8 --n-embd 40", "multiples of 16 & (320, 40)")


@pytest.mark.parametrize("prompt", ["x" * 100, "a<|endoftext|>b", ""])
def test_odd_prompts_are_only_text(prompt, good):
    """Longer than the block size of 32; with the text of a special token; the start of a document."""
    train(good / "data", "out", sample_prompt=prompt, sample_every=1, max_steps=1, val_every=0)
    texts = samples("out")[1]
    assert len(set(texts)) == 4
    for text in texts:
        assert text.startswith(prompt)
        assert text != prompt


def train_with_limit(args, num_bytes):
    """Train where no file may grow beyond so many bytes, as on a disk that fills up."""
    import resource  # not on Windows

    run_folder.SECONDS_PER_LINE = 1e9  # what is printed goes to a file, too
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # Python's own setting; what comes is an error, no signal
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
    train_gpt2.main(args)


def repeat_on_a_full_disk(lost, num_bytes, args):
    """A run in "out", of which the file `lost` does not fit, and then again where there is room."""
    [said] = run(train_with_limit, args, num_bytes, ends=[2])
    assert lost in error_in(said)
    assert "Traceback" not in said
    left = listing("out")
    run(train_gpt2.main, args)
    return left


@pytest.mark.gpt2
@needs("resource")
@pytest.mark.parametrize("lost", ["model_00004.pt", "hf"])
def test_a_file_that_does_not_fit_on_the_disk_leaves_the_others_alone(lost, good):
    """And the same command continues the run."""
    shutil.copytree(good / "run", "out")
    shutil.rmtree("out/hf")
    Path("out", lost).unlink(missing_ok=True)
    before = listing("out")
    left = repeat_on_a_full_disk(lost, 50_000, tiny_flags(good / "data", "out", **OPTIONS))
    assert left.keys() == before.keys()
    assert left["model_00002.pt"] == before["model_00002.pt"]
    assert_same_run("out", good / "run")


@needs("resource")
def test_a_log_that_does_not_fit_on_the_disk_is_continued(good):
    options = dict(max_steps=60, val_every=0, checkpoint_every=0)
    train(good / "data", "straight", **options)
    os.mkdir("out")
    for copy in (good / "run").glob("train_gpt2-*.py"):  # which is longer than the log
        shutil.copy(copy, "out")
    repeat_on_a_full_disk("log.txt", 4000, tiny_flags(good / "data", "out", **options))
    assert_same_run("out", "straight")
