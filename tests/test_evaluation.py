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
from plumbing.data.windows import Folder
from plumbing.run.huggingface import export_huggingface
from plumbing.run.start import Start
from plumbing.system.distributed import World
from plumbing.system.layout import Whole
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
    patched,
    printed_commands,
    read_log,
    refusal_of,
    refused_run,
    run,
    samples,
    status_of,
    tiny_flags,
    tiny_model,
    train,
    windows,
)


@pytest.fixture(params=[False, True], ids=["all targets", "masked targets"])
def validated(request, out, tmp_path):
    """(the folder of a run whose best weights are the initial ones, x and y of its validation)."""
    masks = request.param
    lengths = (2000, 3000, 1700, 900)
    folder = make_shards(tmp_path / "more", lengths, masks=masks)
    path = folder / "tiny_val_000000.npy"
    tokens = np.load(path)
    tokens[100:600:10] = 256  # more documents
    np.save(path, tokens)
    export_huggingface(tiny_model(vocab_size=257), tokenizers.get_encoding("bytes"), tmp_path / "start")
    options = dict(max_steps=1, max_lr=100.0, shuffle=False)
    options |= dict(val_tokens=37 * 16, val_every=1, keep_best=True)
    batch_size = 5 if masks else 64  # neither divides 37
    options["batch_size"] = batch_size
    options["total_batch_size"] = 16 * batch_size
    train(folder, out, init_from=tmp_path / "start", **options)
    x, y = windows(folder, "val", 16, masks)
    return out, x[:37], y[:37]


def mean_loss(logits, y):
    loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=IGNORE_INDEX)
    return loss.item()


@pytest.mark.gpt2
def test_validation_is_the_mean_over_its_targets_whatever_the_batch_size(validated):
    """Of 37 windows of the validation split, compared with one batch of 37 rows."""
    out_dir, x, y = validated
    best = torch.load(out_dir / "model_best.pt", weights_only=True)
    model, _ = train_gpt2.load_model(out_dir / "model_best.pt")
    with torch.no_grad():
        expected = mean_loss(model(x)[0], y)
    assert losses(out_dir, "val")[0] == pytest.approx(expected, abs=1e-5)
    assert best["val_loss"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.gpt2
def test_bits_per_byte_are_those_of_the_targets_text(validated):
    """A byte each, <|endoftext|> none."""
    out_dir, _, y = validated
    targets = y[y != IGNORE_INDEX]
    num_bytes = (targets < 256).sum().item()
    assert num_bytes < len(targets)
    nats = losses(out_dir, "val")[0] * len(targets)
    assert losses(out_dir, "val_bpb")[0] == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-5)


@pytest.mark.gpt2
def test_an_evaluation_has_as_many_ids_as_the_weights(data, tmp_path):
    """257 in the export of a run that trained with 320; compared with transformers."""
    train(data, tmp_path / "run")
    hf = tmp_path / "run" / "hf"
    options = dict(max_steps=0, shuffle=False, val_tokens=40 * 16)
    train(data, tmp_path / "eval", init_from=hf, **options)
    x, y = windows(data, "val", 16, False)
    with torch.no_grad():
        theirs = GPT2LMHeadModel.from_pretrained(hf)
        expected = mean_loss(theirs(x[:40]).logits, y[:40])
    assert losses(tmp_path / "eval", "val")[0] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("stream", ["val", "val_bpb"])
def test_more_validation_tokens_than_the_split_has_count_each_window_once(stream, data, tmp_path):
    """It has 124 windows of 16; 50 more would be some of them again."""
    for name, num_windows in (("all", 124), ("more", 174)):
        train(data, tmp_path / name, val_tokens=num_windows * 16, max_steps=1)
    assert read_log(tmp_path / "more", stream) == read_log(tmp_path / "all", stream)


@pytest.fixture
def places(data):
    """A function that returns where the 40 windows begin that a run with these settings is validated on, of 124."""
    np.save(data / "tiny_val_000000.npy", np.arange(2000, dtype=np.uint16))  # a token is its position

    def find_places(**changes):
        settings = dict(data=(str(data),), sequence_length=16, total_batch_size=128) | changes
        config = train_gpt2.TrainConfig(**settings)
        start = Start("new run", config, {}, layout=Whole(World()), folders=[Folder(data)])
        _, loaders = train_gpt2.load_data(start)
        x, _ = loaders[0].next_batch(40)
        return x[:, 0].tolist()

    return find_places


def test_validation_is_a_sample_of_all_parts_of_the_split(places):
    drawn = places()
    assert len(set(drawn)) == 40
    eighths = {place // 250 for place in drawn}
    assert eighths == set(range(8))


def test_validation_is_the_same_sample_for_all_runs(places):
    assert places(seed=1) == places(seed=2, batch_size=3)


def test_validation_without_shuffling_is_in_file_order(places):
    assert places(shuffle=False) == list(range(0, 640, 16))


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
def evaluate(folder, trained, tmp_path, monkeypatch):
    """A function that evaluates the run "log", a copy of `trained` in the working folder."""
    shutil.copytree(trained, tmp_path / "log")
    monkeypatch.chdir(tmp_path)

    def main(*words, **changes):
        options = dict(data=folder, init_from="log", max_steps=0)
        options = TINY | evaluating(folder) | options | changes
        assert status_of(train_gpt2.main, [*flags(**options), *words]) == 0

    return main


def test_an_evaluation_has_the_losses_samples_and_scores_of_the_runs_last_step(evaluate, tmp_path):
    evaluate()
    out, found = tmp_path / "log", tmp_path / "log" / "eval"
    for stream in ("val", "val_bpb", "hella"):
        assert list(read_log(found, stream).values()) == [read_log(out, stream)[12]]
    assert samples(found)[0] == samples(out)[12]


def test_an_evaluation_writes_no_weights_and_nothing_into_the_run(evaluate, trained, tmp_path):
    evaluate(keep_best=True)
    found = tmp_path / "log" / "eval"
    files = {path.suffix for path in found.iterdir() if path.name != ".lock"}
    assert files == {".py", ".txt"}
    shutil.rmtree(found)
    assert listing(tmp_path / "log") == listing(trained)


@pytest.mark.parametrize("lengths", [(2000, 3000), (2000, 50), (2000,)], ids=["enough", "few", "none"])
def test_an_evaluation_in_a_folder_that_was_typed_needs_no_training_data(lengths, evaluate, tmp_path):
    evaluate(data=make_shards(tmp_path / "data", lengths), out_dir="mine")
    assert [path.parent for path in Path("mine").rglob("log.txt")] == [Path("mine")]


def test_an_evaluation_of_another_model_beside_a_run_takes_nothing_from_that_run(evaluate, folder):
    """The default folder, log, has a run of another width."""
    train(folder, "wide", n_embd=48, max_steps=1)
    options = TINY | dict(data=folder, init_from="wide", max_steps=0)
    del options["n_embd"]
    assert status_of(train_gpt2.main, flags(**options)) == 0


def test_an_evaluation_in_the_runs_folder_is_refused(evaluate, folder):
    refused_run(dict(data=folder, out_dir="log", max_steps=0), "add --init-from log --out-dir NEW")


def test_an_evaluation_is_no_branch(evaluate, folder):
    changes = dict(data=folder, out_dir="new", branch_from="log", max_steps=0)
    refused_run(changes, "use --init-from instead of --branch-from")


@pytest.fixture
def masked(tmp_path):
    """Shards whose mask leaves out all targets of validation."""
    folder = make_shards(tmp_path / "masked", masks=True)
    mask = np.zeros(2000, np.uint8)
    mask[1999] = 1  # a target that no window has, as it ends before
    with open(folder / "tiny_val_000000.mask", "wb") as file:
        np.save(file, mask)
    return folder


def test_a_run_ends_though_a_mask_leaves_out_all_validation_targets(data, masked, out):
    train((data, masked), out)
    assert set(read_log(out, "val/masked").values()) == {"nan"}
    assert set(read_log(out, "val").values()) == {"nan"}
    assert "nan" not in read_log(out, "val/data").values()


def test_a_folder_without_a_share_and_without_targets_leaves_the_mean_alone(data, masked, out):
    train((data, masked), out, data_weights=(1, 0))
    assert read_log(out, "val") == read_log(out, "val/data")


def test_a_dry_run_writes_nothing(data, out):
    before = listing(data.parent)
    train(data, out, dry_run=True)
    assert listing(data.parent) == before


def test_a_dry_run_prints_the_account_of_the_run_and_then_its_command(data, out):
    """3 does not divide a step's 8 sequences, and validation has at most all of its split's."""
    args = tiny_flags(data, out, val_tokens=10**6, batch_size=3)
    _, printed, _ = refusal_of(train_gpt2.main, *args, "--dry_run=TRUE", "--dry-run=true")
    assert "\nvalidation: 1,984 of 1,984 tokens, drawn from all of them" in printed
    assert "\nstep:       128 tokens = B 2 * T 16 *" in printed
    assert printed_commands(printed)[-1][2:] == args


@pytest.mark.parametrize(
    "words, said",
    [
        (tiny_flags("none", "new/log"), "\nassumed:    a tokenizer of at most 50,304 ids, and enough data\n"),
        # 2 * 12,704 in the blocks, 64 in ln_f, 32 * (50,304 + 32)
        (tiny_flags("none", "new/log"), "model:      1,636,224 parameters"),
        (tiny_flags("none", "new/log"), "\ndata:       none yet in none; the run reads 1,536 tokens\n"),
        # bytes, which are made where the preset's own folder is missing
        (["--preset", "quickstart", "--out-dir", "new"], "a tokenizer of at most 320 ids"),
    ],
)
def test_a_dry_run_without_data_says_what_it_assumes(words, said, tmp_path, monkeypatch):
    """Before 27 GB are fetched: neither shards nor GPT-2's tables are there."""
    monkeypatch.setattr(tokenizers, "get_encoding", lambda name: pytest.fail("it may have to be downloaded"))
    monkeypatch.chdir(tmp_path)
    status, printed, _ = refusal_of(train_gpt2.main, *words, "--dry-run")
    assert status == 0
    assert said in printed
    assert not list(tmp_path.iterdir())


OFTEN = dict(val_every=1, sample_every=2, hellaswag_every=5, checkpoint_every=3)
NEVER = dict.fromkeys(OFTEN, 0)


@pytest.fixture(scope="module")
def evaluated(folder):
    """The folder of a run that evaluates often, and in which dropout would show."""
    out = folder.parent / "often"
    train(folder, out, hellaswag_data=evaluating(folder)["hellaswag_data"], **OFTEN)
    return out


def test_evaluation_leaves_the_training_losses_alone_bit_for_bit(evaluated, folder, out):
    train(folder, out, **NEVER)
    assert read_log(out) == read_log(evaluated)
    assert read_log(out, "val") == {}


@pytest.mark.parametrize(
    "stream, steps", [("val", [*range(13)]), ("hella", [0, 5, 10, 12])], ids=["validation", "HellaSwag"]
)
def test_an_evaluation_is_at_each_step_that_is_due_and_after_the_last_update(stream, steps, evaluated):
    assert list(read_log(evaluated, stream)) == steps


@pytest.mark.parametrize("phase, is_training", [("step", True), ("evaluation", False)])
def test_dropout_is_on_in_training_alone(phase, is_training, data, out):
    """In the passes through the model while it is trained and validated in turn."""
    modes = {}
    now = "setup"

    def forward(self, x):
        modes.setdefault(now, set()).add(self.training)
        return plain(self, x)

    def begin(step, parts):
        nonlocal now
        now = "step"

    def end(step, parts, done):
        nonlocal now
        now = "evaluation" if step < 2 else "export"

    with patched(train_gpt2.MLP, "forward", forward) as plain, at_steps(begin, end):
        train(data, out, max_steps=3, val_every=1)
    assert modes[phase] == {is_training}


@pytest.fixture(scope="module")
def scores(folder):
    """The scores of 13 of 14 examples on one rank, and those flags of the run."""
    contexts = ["ab " * n + "c" for n in range(1, 15)]
    file = examples_file(folder.parent, contexts, [*LABELS, 1])
    options = dict(max_steps=6, val_every=0, checkpoint_every=0)
    options |= dict(hellaswag_every=6, hellaswag_data=file, hellaswag_limit=13)
    train(folder, folder.parent / "one", **options)
    model, enc = train_gpt2.load_model(str(folder.parent / "one"))
    examples = hellaswag.load_examples(file, enc)[:13]
    return hellaswag.score(model, examples, enc.n_vocab), options


LABELS = [0, 0, 0, 0, 1, 0, 1, 2, 1, 2, 1, 3, 0]  # whichever ending a rule prefers, its count is its own


def test_hellaswags_score_is_acc_norm_over_all_ranks(scores, folder, out):
    """The first 13 of 14 examples on 2 ranks score as on one: as acc_norm, not acc, of the exported model."""
    (total, mean, _), options = scores
    is_right = mean.argmax(1) == LABELS
    acc_norm = is_right.mean()
    acc = (total.argmax(1) == LABELS).mean()
    assert acc_norm not in (acc, is_right[0::2].mean(), is_right[1::2].mean()), "each rank's own"
    run(train_gpt2.main, tiny_flags(folder, out, **options), ranks=2)
    for each in (folder.parent / "one", out):
        assert float(read_log(each, "hella")[6]) == pytest.approx(acc_norm)


def test_the_padding_of_the_vocabulary_has_no_part_in_hellaswags_score(data, out, tmp_path):
    """Of a run's model whose 63 ids of padding have by far the largest logits."""
    model = tiny_model()
    with torch.no_grad():
        model.transformer.wte.weight[257:] *= 30
    train(data, tmp_path / "run", max_steps=1)
    weights = model.state_dict()
    change_checkpoint(tmp_path / "run" / "model_00001.pt", lambda content: content.update(model=weights))
    file = examples_file(tmp_path, ["ab " * n for n in range(1, 7)], [2, 1, 0, 2, 1, 0])
    train(data, out, init_from=tmp_path / "run", max_steps=0, hellaswag_every=1, hellaswag_data=file)
    examples = hellaswag.load_examples(file, tokenizers.get_encoding("bytes"))
    means = four_rows(model, examples) / [len(ending) for ending in examples[0].endings]
    right = means.argmax(1) == [2, 1, 0, 2, 1, 0]
    assert float(read_log(out, "hella")[0]) == pytest.approx(right.mean())


def test_samples_of_a_chat_model_are_answers_with_role_markers(data, out, tmp_path):
    model = parrot_model(text="Yes!")
    with torch.no_grad():
        model.transformer.ln_f.weight *= 9  # drawn at random, it would say something else now and then
    change_meta(data, tokenizer="bytes+chat")
    export_huggingface(model, tokenizers.get_encoding("bytes+chat"), tmp_path / "model")
    shape = dict(n_layer=1, block_size=256, vocab_size=320)
    options = dict(max_steps=0, sample_every=1, sample_prompt="Hi")
    train(data, out, init_from=tmp_path / "model", **shape, **options)
    assert samples(out) == {0: ["<|user|>Hi<|end|><|assistant|>Yes!"] * 4}


def test_samples_of_the_same_weights_are_the_same_in_each_step(data, out):
    """At a rate at which nothing is learned."""
    train(data, out, max_lr=1e-30, min_lr=0, sample_every=2, max_steps=4)
    texts = samples(out)
    assert texts[2] == texts[4]


@pytest.mark.gpt2
def test_samples_are_of_the_50_likeliest_ids(data, out, tmp_path):
    """Of a model for which each id is a little less likely than the one before it, whatever the text."""
    model = tiny_model(vocab_size=257)
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.zero_()
        model.transformer.ln_f.bias[0] = 1.0
        model.transformer.wte.weight[:, 0] = -torch.arange(257) / 1000
    export_huggingface(model, tokenizers.get_encoding("bytes"), tmp_path / "model")
    options = dict(max_steps=0, sample_every=1, sample_prompt="x")
    train(data, out, init_from=tmp_path / "model", **options)
    text = "".join(samples(out)[0])
    ids = text.replace("x", "").encode()
    assert max(ids) < 50
    assert len(set(ids)) > 30
