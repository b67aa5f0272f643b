"""A user's mistakes: one line `error: ...` in plain English, exit status 2, no traceback, nothing changed on disk.

Each mistake is made in a folder that already holds good data and a finished run.
"""

import pickle
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

from harness import (
    Touch,
    assert_same_run,
    change_checkpoint,
    change_meta,
    error_in,
    listing,
    make_shards,
    needs,
    refused,
    run,
    samples,
    tiny_flags,
    train,
)

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
OPTIONS = dict(max_steps=4, val_every=2, checkpoint_every=2)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Good data and a finished run, beside which every mistake is made."""
    folder = tmp_path_factory.mktemp("good")
    make_shards(folder / "data")
    train(folder / "data", folder / "run", **OPTIONS)
    return folder


@pytest.fixture
def folder(good, tmp_path, monkeypatch):
    """A copy of it that is the current folder."""
    shutil.copytree(good, tmp_path / "folder")
    monkeypatch.chdir(tmp_path / "folder")
    monkeypatch.setattr(downloads, "RETRY_SECONDS", 0)  # downloads fail at once
    return tmp_path / "folder"


def error_of_run(folder, *words, **changes):
    """The one line of a run that is refused and leaves everything as it is."""
    before = listing(folder)
    options = dict(data="data", out_dir="out") | OPTIONS | changes
    line = refused(train_gpt2.main, *tiny_flags(**options), *words)
    assert listing(folder) == before and not (folder / "touched").exists()
    return line


# what is typed, and what is said of it
CONFIGURATIONS = [
    ("--sequence-length 64 --batch-size 2", "--sequence-length 64", "--block-size 32"),
    ("--val-every -5", "--val-every is -5", "0 or more"),
    ("--n-embd 33", "--n-embd 33 is not a multiple of --n-head 2", "--n-head 3", "--n-embd 32"),
    ("--beta1 1", "--beta1 is 1.0", "below 1"),
    ("--beta2 -0.5", "--beta2 is -0.5", "0 or more"),
    ("--muon-momentum 1.5", "--muon-momentum is 1.5"),
    ("--decay-fraction 1.5", "--decay-fraction is 1.5", "between 0 and 1"),
    ("--decay-fraction nan", "--decay-fraction is nan"),
    ("--weight-decay nan", "--weight-decay is nan", "0 or more and below 1e+18"),
    ("--preset chat", "--preset chat fine-tunes a model", "--init-from"),
    ("--batch-ramp 1000 --total-batch-size 131200", "steps of 32,768 tokens", "--total-batch-size"),
    ("--data-weights 1 1", "--data-weights is 1.0 1.0", "a share for each folder"),
    ("--data-weights 0", "not all 0"),
    ("--data-weights -1", "0 or more"),
    ("--data-weights nan", "0 or more"),
    ("--data-weights inf", "0 or more"),
    ("--passes 2", "--passes, --tokens-per-parameter and --max-steps", "one of them"),
    ("--tokens-per-parameter 20", "--passes, --tokens-per-parameter and --max-steps", "one of them"),
    ("--passes 2 --data-weights 1", "--max-steps instead"),
    ("--init-from run --n-embd 64", "--n-embd is 64, but the weights that the run starts from have 32"),
    ("--init-from run --n-layer 3", "--n-layer is 3"),
    ("--init-from run --n-head 4", "--n-head is 4"),
    ("--total-batch-size 8192 --batch-size 512", "train shards in data hold only 4,688 tokens", "8,192 are needed"),
    ("--vocab-size 200", "room for 200 token ids", "257 or more"),
    ("--device tpu", "no device 'tpu'"),
    (
        "--data nowhere",
        "no train shards in nowhere, which does not exist. ",
        "make them: python fineweb.py --input FILES",
    ),
    ("--init-from gpt2-medim", "Did you mean gpt2-medium?"),
    ("--init-from gpt2-large", "network"),
    ("--out-dir run --max-lr 0.1 --seed 7", "(seed was 1337, now 7, max_lr was 0.003, now 0.1)", "--no-resume"),
    (f"--n-embd {2**20}", "model is too large", "Use a smaller model"),
    pytest.param(("--dtype fp8 --n-embd 40", "multiples of 16", "(320, 40)"), marks=needs("float8")),
    pytest.param(("--device cuda", "no device 'cuda'", "--device"), marks=needs_no_gpu),
]


@pytest.mark.parametrize("typed_and_said", CONFIGURATIONS, ids=lambda texts: texts[0])
def test_a_configuration_that_cannot_be(typed_and_said, folder):
    typed, *said = typed_and_said
    line = error_of_run(folder, *typed.split())
    assert all(text in line for text in said), line


def test_all_complaints_are_said_together(folder, monkeypatch):
    monkeypatch.setattr(devices, "has_float8", lambda device: False)
    wrong = dict(n_embd=33, val_tokens=1, total_batch_size=1000, max_lr=0.0, beta2=1.0, dtype="fp8")
    line = error_of_run(folder, **wrong)
    for text in (
        "--max-lr is 0.0,",
        "--beta2 is 1.0,",
        "--n-embd 33",
        "--val-tokens",
        "multiple of 16",
        "--dtype fp8",
    ):
        assert text in line


@pytest.mark.parametrize(
    "content, said",
    [
        (np.arange(1000), "int64"),
        (np.array([Touch(Path("touched"))] * 500), "damaged"),
        (np.full(1000, 257, np.uint16), "token id 257"),
    ],
    ids=["another dtype", "code", "ids beyond the vocabulary"],
)
def test_a_shard_that_is_none(content, said, folder):
    path = folder / "data" / "tiny_train_000002.npy"
    np.save(path, content, allow_pickle=True)
    line = error_of_run(folder)
    assert said in line and path.name in line, line


METAS = {
    '{"tokenizer": "bytes", "complete": false}': "not complete",
    '{"tokenizer": "my-1a2b3c4d"}': "tokenizer.tiktoken",
}


@pytest.mark.parametrize("meta", METAS)
def test_shards_that_are_not_complete_or_lack_their_tokenizer(meta, folder):
    (folder / "data" / "meta.json").write_text(meta, encoding="utf-8")
    assert METAS[meta] in error_of_run(folder)


def test_a_shard_of_another_length_than_meta_json_says(folder):
    lengths = change_meta(folder / "data")["shards"]
    change_meta(folder / "data", shards=lengths | {"tiny_train_000002.npy": 1705})
    assert "tiny_train_000002.npy has 1,705 tokens in meta.json and 1,700 on disk" in error_of_run(folder)


def test_shards_of_another_tokenizer_than_the_run_has(folder):
    """Their ids are the same."""
    enc = tokenizers.get_encoding("bytes")
    other = tiktoken.Encoding(
        "other",
        pat_str=enc._pat_str,
        mergeable_ranks={bytes([255 - ord(byte)]): i for byte, i in enc._mergeable_ranks.items()},
        special_tokens=enc._special_tokens,
    )
    tokenizers.write_encoding(other, folder / "data" / "tokenizer.tiktoken")
    change_meta(folder / "data", tokenizer=tokenizers.read_encoding(folder / "data" / "tokenizer.tiktoken").name)
    (folder / "run" / "model_00004.pt").unlink()
    assert ", but the model uses bytes. " in error_of_run(folder, out_dir="run")


def test_shards_that_lack_a_split(folder):
    (folder / "data" / "tiny_val_000000.npy").unlink()
    assert "no val shards in data" in error_of_run(folder)


@pytest.mark.parametrize("out_dir", ["data/meta.json", "data/meta.json/out"])
def test_an_out_dir_that_is_a_file(out_dir, folder):
    assert "meta.json" in error_of_run(folder, out_dir=out_dir)


def test_gpt2s_shards_without_tables_and_without_a_network(folder, monkeypatch):
    (folder / "data" / "meta.json").unlink()
    (folder / "empty").mkdir()
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(folder / "empty"))
    tiktoken.registry.ENCODINGS.pop("gpt2", None)
    line = error_of_run(folder)
    assert "TIKTOKEN_CACHE_DIR" in line and "--tokenizer bytes" in line


def without_a_weight(content):
    del content["model"]["transformer.h.1.ln_2.bias"]
    return content


@pytest.mark.parametrize(
    "content, said",
    [
        (lambda content: torch.zeros(3), "it has no model"),
        (lambda content: content | {"val_loss": Touch(Path("touched"))}, "code"),
        (without_a_weight, "transformer.h.1.ln_2.bias"),
        (pickle.dumps({"model": Touch(Path("touched"))}), "bad.pt cannot be read: "),
    ],
)
def test_a_checkpoint_that_is_none(content, said, folder):
    if isinstance(content, bytes):
        (folder / "bad.pt").write_bytes(content)
    else:
        torch.save(content(torch.load(folder / "run" / "model_00004.pt", weights_only=True)), folder / "bad.pt")
    assert said in error_of_run(folder, init_from="bad.pt")


def test_a_run_whose_checkpoints_all_hold_code(folder):
    for path in (folder / "run").glob("model_*.pt"):
        change_checkpoint(path, lambda content: content.update(rng=Touch(folder / "touched")))
    line = error_of_run(folder, out_dir="run")
    assert "None of the checkpoints" in line and "--no-resume" in line


def test_examples_that_are_not_where_the_command_says_are_not_downloaded(folder):
    line = error_of_run(folder, hellaswag_every=2, hellaswag_data="hellaswag.jsonl")
    assert "no file hellaswag.jsonl" in line


def test_examples_without_a_network(folder):
    line = error_of_run(folder, hellaswag_every=2)
    for text in ("hellaswag_val.jsonl", "network", "--hellaswag-every 0"):
        assert text in line


def test_examples_that_are_damaged(folder):
    (folder / "hellaswag.jsonl").write_text('{"ctx": "a"}\n', encoding="utf-8")
    assert "ine 1" in error_of_run(folder, hellaswag_every=2, hellaswag_data="hellaswag.jsonl")


@pytest.mark.parametrize("prompt", ["x" * 100, "a<|endoftext|>b", ""])
def test_odd_prompts_are_only_text(prompt, data, out):
    """Longer than the block size of 32; with the text of a special token; the start of a document."""
    train(data, out, sample_prompt=prompt, sample_every=1, max_steps=1)
    texts = samples(out)[1]
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
    """A run of these words, of which the file `lost` does not fit, and then again where there is room."""
    [said] = run(train_with_limit, args, num_bytes, ends=[2])
    assert lost in error_in(said)
    assert "Traceback" not in said
    left = listing(args[args.index("--out-dir") + 1])
    run(train_gpt2.main, args)
    return left


@pytest.mark.gpt2
@needs("resource")
@pytest.mark.parametrize("lost", ["model_00004.pt", "hf"])
def test_a_file_that_does_not_fit_on_the_disk_leaves_the_others_as_they_were(lost, good, out):
    """And the same command continues the run."""
    shutil.copytree(good / "run", out)
    shutil.rmtree(out / "hf")
    (out / lost).unlink(missing_ok=True)
    before = listing(out)
    left = repeat_on_a_full_disk(lost, 50_000, tiny_flags(good / "data", out, **OPTIONS))
    assert left.keys() == before.keys()
    assert left["model_00002.pt"] == before["model_00002.pt"]
    assert_same_run(out, good / "run")


@needs("resource")
def test_a_log_that_does_not_fit_on_the_disk_is_continued(good, out, tmp_path):
    options = dict(max_steps=60, val_every=0, checkpoint_every=0)
    train(good / "data", tmp_path / "straight", **options)
    out.mkdir()
    for copy in (good / "run").glob("train_gpt2-*.py"):  # which is longer than the log
        shutil.copy(copy, out)
    repeat_on_a_full_disk("log.txt", 4000, tiny_flags(good / "data", out, **options))
    assert_same_run(out, tmp_path / "straight")
