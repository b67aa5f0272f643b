"""Evaluation does not disturb training, nor does it depend on the batch size, the number of ranks or the compiler."""

import math
import shutil
from pathlib import Path

import hellaswag
import numpy as np
import pytest
import torch
import train_gpt2
from plumbing.data import tokenizers
from plumbing.run.huggingface import export_huggingface
from torch.nn import functional as F
from train_gpt2 import IGNORE_INDEX
from transformers import GPT2LMHeadModel

from harness import (
    TINY,
    at_steps,
    change_checkpoint,
    change_meta,
    examples_file,
    flags,
    four_rows,
    listing,
    losses,
    make_shards,
    parrot_model,
    printed_commands,
    read_log,
    refusal_of,
    run,
    samples,
    status_of,
    tiny_flags,
    train,
    windows,
)


def test_bits_per_byte_are_those_of_the_targets_text(out):
    """A byte each, <|endoftext|> none, and what a mask leaves out is no target."""
    folder = make_shards("data", masks=True)
    np.load(folder / "tiny_val_000000.npy", mmap_mode="r+")[100:600:10] = 256  # more documents
    train(folder, out, max_steps=1, shuffle=False, val_tokens=37 * 16)
    _, y = windows(folder, "val", 16, masks=True)
    targets = y[:37][y[:37] != IGNORE_INDEX]
    num_bytes = (targets < 256).sum().item()
    assert num_bytes < len(targets)
    nats = losses(out, "val") * len(targets)
    assert losses(out, "val_bpb") == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-5)


@pytest.mark.gpt2
def test_an_evaluation_has_as_many_ids_as_the_weights(trained, folder, out):
    """257 in the export of a run that trained with 320; compared with transformers."""
    changes = dict(init_from=trained / "hf", max_steps=0, shuffle=False, val_tokens=40 * 16)
    ended = train_gpt2.main(tiny_flags(folder, out, **changes))
    x, y = windows(folder, "val", 16, masks=False)
    with torch.no_grad():
        logits = GPT2LMHeadModel.from_pretrained(trained / "hf")(x[:40]).logits
    expected = pytest.approx(F.cross_entropy(logits.mT, y[:40]).item(), abs=1e-5)
    assert losses(out, "val")[0] == expected == ended.losses["val"] and ended.step == 0


def test_more_validation_tokens_than_the_split_has_count_each_window_once(data):
    """It has 124 windows of 16; 50 more would be some of them again."""
    for num_windows in (124, 174):
        train(data, f"{num_windows}", val_tokens=num_windows * 16, max_steps=1)
    for stream in ("val", "val_bpb"):
        assert read_log("124", stream) == read_log("174", stream)


def test_validation_is_a_sample_of_all_parts_of_the_split(data, out):
    """The next 40 of its 124 windows, of which no two are equal."""
    found = []
    with at_steps(lambda step, parts: found.extend(parts.val_loaders[0].next_batch(40)[0])):
        train(data, out, max_steps=1)
    x, _ = windows(data, "val", 16, masks=False)
    places = {(x == row).all(1).nonzero().item() for row in found}
    assert len(places) == 40
    assert {place // 16 for place in places} == set(range(8))


@pytest.fixture(scope="module")
def trained(folder):
    """The folder of a run that validates, scores and samples after its last step."""
    out = folder.parent / "trained"
    train(folder, out, **evaluating(folder))
    return out


def evaluating(folder):
    examples = examples_file(folder.parent, ["abc", "bcde", "cd"])
    return dict(hellaswag_every=12, hellaswag_data=examples, sample_every=12)


@pytest.fixture
def evaluate(folder, trained):
    """A function that evaluates the run "log", a copy of `trained` in the working folder. It types no width."""
    shutil.copytree(trained, "log")

    def main(**changes):
        options = TINY | evaluating(folder) | dict(data=folder, init_from="log", max_steps=0) | changes
        del options["n_embd"]
        assert status_of(train_gpt2.main, flags(**options)) == 0

    return main


def test_an_evaluation_has_the_losses_samples_and_scores_of_the_runs_last_step(evaluate, trained):
    """It writes no weights, and nothing into the run."""
    evaluate(keep_best=True)
    found = Path("log/eval")
    for stream in ("val", "val_bpb", "hella"):
        assert list(read_log(found, stream).values()) == [read_log(trained, stream)[12]]
    assert samples(found)[0] == samples(trained)[12]
    assert {path.suffix for path in found.iterdir() if path.name != ".lock"} == {".py", ".txt"}
    shutil.rmtree(found)
    assert listing("log") == listing(trained)


def test_an_evaluation_in_a_folder_that_was_typed_needs_no_training_data(evaluate):
    evaluate(data=make_shards("data", lengths=(2000,)), out_dir="mine")
    assert [path.parent for path in Path("mine").rglob("log.txt")] == [Path("mine")]


def test_an_evaluation_of_another_model_beside_a_run_takes_nothing_from_that_run(evaluate, folder):
    """The default folder, log, has a run of another width."""
    train(folder, "wide", n_embd=48, max_steps=1)
    evaluate(init_from="wide")


def test_a_run_ends_though_a_mask_leaves_out_all_validation_targets(data, out):
    """But one that no window has, as it ends before. In a folder without a share they leave the mean alone."""
    masked = make_shards("masked", masks=True)
    np.load(masked / "tiny_val_000000.mask", mmap_mode="r+")[:] = np.arange(2000) == 1999
    train((data, masked), out, max_steps=1)
    for stream, is_nan in {"val/masked": True, "val": True, "val/data": False}.items():
        assert set(np.isnan(losses(out, stream))) == {is_nan}, stream
    train((data, masked), "weighted", data_weights=(1, 0), max_steps=1)
    assert read_log("weighted", "val") == read_log("weighted", "val/data")


def test_a_dry_run_prints_the_account_of_the_run_and_then_its_command_and_writes_nothing(data, out):
    """3 does not divide a step's 8 sequences, and validation has at most all of its split's."""
    before = listing(".")
    args = tiny_flags(data, out, val_tokens=10**6, batch_size=3)
    _, printed, _ = refusal_of(train_gpt2.main, *args, "--dry_run=TRUE", "--dry-run=true")
    assert "\nvalidation: 1,984 of 1,984 tokens, drawn from all of them" in printed
    assert "\nstep:       128 tokens = B 2 * T 16 *" in printed
    assert printed_commands(printed)[-1][2:] == args
    assert listing(".") == before


WITHOUT_DATA = [
    # 2 * 12,704 in the blocks, 64 in ln_f, 32 * (50,304 + 32)
    (
        tiny_flags("none", "new/log"),
        "model:      1,636,224 parameters",
        "\ndata:       none yet in none; the run reads 1,536 tokens\n",
        "\nassumed:    a tokenizer of at most 50,304 ids, and enough data\n",
    ),
    # bytes, which are made where the preset's own folder is missing
    (["--preset", "quickstart", "--out-dir", "new"], "a tokenizer of at most 320 ids"),
]


@pytest.mark.parametrize("typed", WITHOUT_DATA)
def test_a_dry_run_without_data_says_what_it_assumes(typed, monkeypatch):
    """Before 27 GB are fetched: neither shards nor GPT-2's tables are there."""
    monkeypatch.setattr(tokenizers, "get_encoding", lambda name: pytest.fail("it may have to be downloaded"))
    words, *said = typed
    status, printed, _ = refusal_of(train_gpt2.main, *words, "--dry-run")
    assert status == 0
    for text in said:
        assert text in printed
    assert listing(".") == {}


OFTEN = dict(val_every=1, sample_every=5, hellaswag_every=5, checkpoint_every=3)


def test_evaluation_leaves_the_training_losses_alone_bit_for_bit(folder, out):
    """It is at each step that is due, and after the last update."""
    train(folder, out, **evaluating(folder) | OFTEN)
    train(folder, "never", **dict.fromkeys(OFTEN, 0))
    assert read_log("never") == read_log(out)
    assert read_log("never", "val") == {}
    assert list(read_log(out, "val")) == [*range(13)]
    assert list(read_log(out, "hella")) == [0, 5, 10, 12]


LABELS = [0, 0, 0, 0, 1, 0, 1, 2, 1, 2, 1, 3, 0]  # whichever ending a rule prefers, its count is its own


def test_hellaswags_score_is_acc_norm_over_all_ranks_without_the_padding(trained, folder, out):
    """Of the first 13 of 14 examples, by a model whose 63 ids of padding have by far the largest logits."""
    path = shutil.copy(trained / "model_00012.pt", ".")
    change_checkpoint(path, lambda content: content["model"]["lm_head.weight"][257:].normal_(std=9))
    file = examples_file(Path(), ["ab" * n + "c" for n in range(1, 15)], [*LABELS, 1])
    options = dict(init_from=path, max_steps=0, hellaswag_every=1, hellaswag_data=file, hellaswag_limit=13)
    run(train_gpt2.main, tiny_flags(folder, out, **options), ranks=2)
    model, enc = train_gpt2.load_model(path)
    examples = hellaswag.load_examples(file, enc)[:13]
    lengths = [len(ending) for ending in examples[0].endings]
    sums, with_padding = four_rows(model, examples), four_rows(model, examples, n_vocab=320)
    scores = [sums / lengths, sums, with_padding / lengths]
    right, by_sums, by_padding = [each.argmax(1) == LABELS for each in scores]
    acc_norm = right.mean()
    assert acc_norm not in [each.mean() for each in (by_sums, by_padding, right[0::2], right[1::2])]
    assert float(read_log(out, "hella")[0]) == pytest.approx(acc_norm)


def test_samples_of_a_chat_model_are_answers_with_role_markers(data, out):
    model = parrot_model(text="Yes!")
    with torch.no_grad():
        model.transformer.ln_f.weight *= 9  # drawn at random, it would say something else now and then
    change_meta(data, tokenizer="bytes+chat")
    export_huggingface(model, tokenizers.get_encoding("bytes+chat"), Path("model"))
    options = dict(n_layer=1, block_size=256, max_steps=0, sample_every=1, sample_prompt="Hi")
    train(data, out, init_from="model", **options)
    assert samples(out) == {0: ["<|user|>Hi<|end|><|assistant|>Yes!"] * 4}


@pytest.mark.gpt2
def test_samples_are_of_the_50_likeliest_ids(trained, folder, out):
    """Of a model for which each id is a little less likely than the one before it, whatever the text."""

    def order(content):
        weights = content["model"]
        weights["transformer.ln_f.weight"].zero_()
        weights["transformer.ln_f.bias"].copy_(torch.eye(32)[0])
        weights["lm_head.weight"][:, 0] = -torch.arange(320) / 1000

    path = shutil.copy(trained / "model_00012.pt", ".")
    change_checkpoint(path, order)
    train(folder, out, init_from=path, max_steps=0, sample_every=1, sample_prompt="x")
    text = "".join(samples(out)[0])
    ids = text.replace("x", "").encode()
    assert max(ids) < 50
    assert len(set(ids)) > 30
