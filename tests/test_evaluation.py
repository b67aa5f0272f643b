"""Evaluation does not disturb training, nor does it depend on the batch size, the number of ranks or the compiler."""

import json
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
from plumbing.system.distributed import World
from torch.nn import functional as F
from train_gpt2 import IGNORE_INDEX

from harness import (
    TINY,
    at_steps,
    examples_file,
    flags,
    listing,
    log_lines,
    losses,
    make_shards,
    parrot_model,
    printed_commands,
    read_log,
    refusal_of,
    refused,
    run,
    status_of,
    tiny_flags,
    tiny_model,
    train,
    windows,
)


def samples_of(folder):
    lines = (folder / "samples.txt").read_text(encoding="utf-8").splitlines()
    return [json.loads(line.partition(" ")[2]) for line in lines]


@pytest.mark.gpt2
@pytest.mark.parametrize("masks, batch_size", [(False, 64), (True, 5)])
def test_validation_does_not_depend_on_the_batch_size_or_on_train_shards(masks, batch_size, tmp_path):
    """37 windows, which no B here divides, of the validation split, compared with one batch of 37 rows."""
    start = tmp_path / "start"
    export_huggingface(tiny_model(vocab_size=257), tokenizers.get_encoding("bytes"), start)
    more = make_shards(tmp_path / "more", lengths=(2000, 3000, 1700, 900), masks=masks)
    (path,) = more.glob("*_val_*.npy")
    tokens = np.load(path)
    tokens[100:600:10] = 256  # more documents
    np.save(path, tokens)
    options = dict(init_from=start, batch_size=batch_size, total_batch_size=16 * batch_size, shuffle=False)
    options |= dict(val_tokens=37 * 16, val_every=1, keep_best=True, max_lr=100.0)  # the best weights are the first
    train(more, tmp_path / "out", **options | {"max_steps": 1})
    model = train_gpt2.load_model(tmp_path / "out" / "model_00001.pt")[0]  # with more ids
    best = torch.load(tmp_path / "out" / "model_best.pt", weights_only=True)
    model.load_state_dict(best["model"])  # at step 0
    x, y = windows(more, "val", 16, masks)
    with torch.no_grad():
        expected = F.cross_entropy(model(x[:37])[0].flatten(0, 1), y[:37].flatten(), ignore_index=IGNORE_INDEX).item()
    assert [losses(tmp_path / "out", "val")[0], best["val_loss"]] == pytest.approx([expected] * 2, abs=1e-5)
    targets = y[:37][y[:37] != IGNORE_INDEX]
    num_bytes = (targets < 256).sum().item()  # a byte each, <|endoftext|> none
    bits_per_byte = expected * len(targets) / math.log(2) / num_bytes
    assert num_bytes < len(targets)
    assert losses(tmp_path / "out", "val_bpb")[0] == pytest.approx(bits_per_byte, rel=1e-5)


def test_validation_is_one_sample_of_the_whole_split_for_all_runs(tmp_path):
    """40 of 124 windows: none twice, from all parts, the same with another seed; in file order only on request."""
    folder = make_shards(tmp_path)
    np.save(folder / "tiny_val_000000.npy", np.arange(2000, dtype=np.uint16))  # a token says where it stands

    def places(**changes):
        config = train_gpt2.TrainConfig(data=(str(folder),), sequence_length=16, total_batch_size=128, **changes)
        [loader] = train_gpt2.load_data(config, World())[1]
        return loader.next_batch(40)[0][:, 0].tolist()

    drawn = places(seed=1)
    assert places(seed=2, batch_size=3) == drawn and len(set(drawn)) == 40
    assert max(np.diff(sorted(drawn))) < 2000 // 8 and max(drawn) > 1750 > 250 > min(drawn)
    assert places(shuffle=False) == list(range(0, 640, 16))


def test_nothing_but_an_evaluation_with_max_steps_0(data, tmp_path, monkeypatch):
    """The losses, samples and scores of the last step of a run, in a folder of its own without weights."""
    monkeypatch.chdir(tmp_path)
    examples = examples_file(tmp_path, ["abc", "bcde", "cd"])
    options = dict(hellaswag_every=12, hellaswag_data=examples, sample_every=12)
    train(data, "log", **options)
    before = listing(tmp_path / "log")
    evaluate = flags(**TINY | options | {"data": data, "init_from": "log", "max_steps": 0, "keep_best": True})
    assert status_of(train_gpt2.main, evaluate) == 0
    found = tmp_path / "log" / "eval"
    last = {line.split()[1]: line.split()[2] for line in log_lines(tmp_path / "log")}
    assert log_lines(found) == [f"0 {stream} {last[stream]}" for stream in ("val", "val_bpb", "hella")]
    assert sorted(path.suffix for path in found.iterdir() if path.name != ".lock") == [".py", ".txt", ".txt", ".txt"]
    assert samples_of(found) == samples_of(tmp_path / "log")[-4:]
    shutil.rmtree(found)
    assert listing(tmp_path / "log") == before
    # a folder that was typed is the folder; training data, if there are any, are not asked for
    few = make_shards(tmp_path / "few", lengths=(2000, 50)), make_shards(tmp_path / "none", lengths=(2000,))
    for number, folder in enumerate((data, *few)):
        args = [word.replace(str(data), str(folder)) for word in [*evaluate, "--out-dir", f"mine{number}"]]
        assert status_of(train_gpt2.main, args) == 0
        assert {path.parent for path in Path(f"mine{number}").rglob("log.txt")} == {Path(f"mine{number}")}
    # another model, of which the folder's own run says nothing
    train(data, "wide", n_embd=48, max_steps=1)
    shape = {name: value for name, value in TINY.items() if name != "n_embd"}
    assert status_of(train_gpt2.main, flags(**shape | {"data": data, "init_from": "wide", "max_steps": 0})) == 0
    assert "add --init-from log --out-dir NEW" in refused(train_gpt2.main, *tiny_flags(data, "log", max_steps=0))
    branch = tiny_flags(data, "new", branch_from="log", max_steps=0)
    assert "use --init-from instead of --branch-from" in refused(train_gpt2.main, *branch)


def test_validation_data_of_which_a_mask_leaves_out_every_target_have_no_loss_and_the_run_ends(data, tmp_path):
    masked = make_shards(tmp_path / "masked", masks=True)
    with open(masked / "tiny_val_000000.mask", "wb") as file:
        mask = np.zeros(2000, np.uint8)
        mask[1999] = 1  # a target that no window has, as it ends before
        np.save(file, mask)
    args = tiny_flags(data, tmp_path / "out")
    assert status_of(train_gpt2.main, [*args, "--data", str(masked)]) == 0
    streams = {name: list(read_log(tmp_path / "out", name).values()) for name in ("val/masked", "val", "val/data")}
    assert streams["val/masked"] == streams["val"] == ["nan"] * 4 and "nan" not in streams["val/data"]


def test_a_dry_run_says_what_the_run_would_be_and_writes_nothing(data, tmp_path):
    """3 does not divide a step's 8 sequences, and validation has at most all of its split's."""
    before = listing(tmp_path)
    args = tiny_flags(data, tmp_path / "new" / "log", max_steps=24, val_tokens=10**6, batch_size=3)
    status, printed, _ = refusal_of(train_gpt2.main, *args, "--dry_run=TRUE", "--dry-run=true")
    assert status == 0 and listing(tmp_path) == before
    for row in (
        "data:       4,688 training tokens; the run reads 3,072: 0.66 passes\n",
        "validation: 1,984 of 1,984 tokens, from all of the split; tokenizer bytes\n",
        "step:       128 tokens = B 2 * T 16 *",
    ):
        assert f"\n{row}" in printed
    assert printed_commands(printed)[-1][2:] == args


def test_a_dry_run_needs_no_data_and_says_what_it_assumes(tmp_path, monkeypatch):
    """Before 27 GB are fetched: neither shards nor GPT-2's tables are there."""
    monkeypatch.setattr(tokenizers, "get_encoding", lambda name: pytest.fail("it may have to be downloaded"))
    monkeypatch.chdir(tmp_path)
    status, printed, _ = refusal_of(train_gpt2.main, *tiny_flags("none", "new/log", dry_run=True))
    assert status == 0 and "\ndata:       none yet in none; the run reads 1,536 tokens\n" in printed
    assert "\nassumed:    a tokenizer of at most 50,304 ids, and data enough\n" in printed
    # 2 * 12,704 in the blocks, 64 in ln_f, 32 * (50,304 + 32)
    assert printed.startswith("model:      1,636,224 parameters")
    # bytes, which are made where the preset's own folder is missing
    printed = refusal_of(train_gpt2.main, "--preset", "quickstart", "--dry-run", "--out-dir", "new")[1]
    assert "a tokenizer of at most 320 ids" in printed and not list(tmp_path.iterdir())


def test_evaluation_leaves_the_training_losses_and_the_training_mode_alone(data, tmp_path):
    """The losses bit for bit; and dropout would be on in every step."""

    seen, hellaswag_data = [], examples_file(tmp_path, [f"A man is on roof {n}. he" for n in range(6)])
    off = dict(val_every=0, sample_every=0, hellaswag_every=0, checkpoint_every=0)
    on = dict(val_every=1, sample_every=2, hellaswag_every=5, hellaswag_data=hellaswag_data, checkpoint_every=3)
    train(data, tmp_path / "off", **off)
    with at_steps(lambda step, parts: seen.append(parts.model.training)):
        train(data, tmp_path / "on", **on)
    assert seen == [True] * 12 and read_log(tmp_path / "off") == read_log(tmp_path / "on")
    assert sorted(read_log(tmp_path / "on", "hella")) == [0, 5, 10, 12]  # the last update is evaluated too
    assert sorted(read_log(tmp_path / "on", "val")) == list(range(13))
    assert sorted(read_log(tmp_path / "off", "val")) == []


def test_hellaswags_score_is_acc_norm_over_all_ranks(data, tmp_path):
    """The first 13 of 14 examples on 2 ranks score as on one: as acc_norm, not acc, of the exported model."""
    labels = [0, 0, 0, 0, 1, 0, 1, 2, 1, 2, 1, 3, 0]  # whichever ending a rule prefers, its count is its own
    hellaswag_data = examples_file(tmp_path, ["ab " * n + "c" for n in range(1, 15)], [*labels, 1])
    options = dict(hellaswag_every=6, hellaswag_data=hellaswag_data, max_steps=6, val_every=0, checkpoint_every=0)
    options |= dict(hellaswag_limit=13)
    train(data, tmp_path / "one", **options)
    args = tiny_flags(data, tmp_path / "two", **options)
    run(train_gpt2.main, args, ranks=2)
    assert "is finished" in run(train_gpt2.main, args, ranks=2)[0]
    model, enc = train_gpt2.load_model(str(tmp_path / "one"))
    examples = hellaswag.load_examples(hellaswag_data, enc)[:13]
    total, mean, _ = hellaswag.score(model, examples, enc.n_vocab)
    acc, acc_norm = ((values.argmax(1) == labels).mean() for values in (total, mean))
    shares = [(mean.argmax(1) == labels)[rank::2].mean() for rank in (0, 1)]
    assert acc_norm not in (acc, *shares), "or this test could not tell them apart"
    for folder in ("one", "two"):
        assert float(read_log(tmp_path / folder, "hella")[6]) == pytest.approx(acc_norm)


def test_samples_of_a_chat_model_are_answers_with_role_markers(data, tmp_path):
    model = parrot_model(text="Yes!")
    with torch.no_grad():
        model.transformer.ln_f.weight *= 9  # drawn at random, it would say something else now and then
    meta = json.loads((data / "meta.json").read_text(encoding="utf-8"))
    (data / "meta.json").write_text(json.dumps(meta | {"tokenizer": "bytes+chat"}), encoding="utf-8")
    export_huggingface(model, tokenizers.get_encoding("bytes+chat"), tmp_path / "model")
    options = dict(init_from=tmp_path / "model", n_layer=1, block_size=256, vocab_size=320, sample_prompt="Hi")
    train(data, tmp_path / "out", max_steps=0, sample_every=1, **options)
    assert samples_of(tmp_path / "out") == ["<|user|>Hi<|end|><|assistant|>Yes!"] * 4


def test_samples_differ_by_the_seed_and_not_from_step_to_step(data, tmp_path):
    """At a rate at which nothing is learned."""
    for seed in (1, 2):
        train(data, tmp_path / f"{seed}", seed=seed, max_lr=1e-30, min_lr=0, sample_every=2, max_steps=4)
    ours, theirs = samples_of(tmp_path / "1"), samples_of(tmp_path / "2")
    assert ours[:4] == ours[4:] and len({*ours, *theirs}) == 8
