"""A run equals a plain loop with transformers' GPT-2, on any number of processes and with any accumulation."""

import hashlib
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import train_gpt2
from plumbing.data import tokenizers
from plumbing.run.huggingface import export_huggingface
from plumbing.system import memory
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional as F
from train_gpt2 import IGNORE_INDEX
from transformers import GPT2LMHeadModel

from harness import (
    at_steps,
    error_in,
    losses,
    make_shards,
    run,
    steps_of,
    tiny_flags,
    tiny_model,
    train,
    windows,
)

# a run of ten steps of 8 windows, with a validation in the middle. Of 35 windows, two ranks with B = 2 have unequal
# shares in the last batch, which shows whose rows are left out
PLAIN = dict(max_steps=10, warmup_steps=2, max_lr=2e-3, min_lr=2e-4, shuffle=False, checkpoint_every=0)
PLAIN |= dict(val_every=5, val_tokens=35 * 16 + 5)
# after the warmup, progress goes by eighths of the cosine
cosine = (1 + np.cos(np.pi * np.arange(8) / 8)) / 2
RATES = [1e-3, 2e-3, *(2e-4 + 1.8e-3 * cosine)]


def plain_loop(hf_directory, folder, masks):
    """What the log of the run PLAIN should say, by transformers and torch's own AdamW."""
    model = GPT2LMHeadModel.from_pretrained(hf_directory).eval()
    model.resize_token_embeddings(320, mean_resizing=False)  # as many ids as ours: new ones have the others' mean
    wte = model.transformer.wte.weight.data
    wte[257:] = wte[:257].mean(0)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    spared = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": spared, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95))

    def mean_loss(x, y):
        return F.cross_entropy(model(x).logits.mT, y, ignore_index=IGNORE_INDEX)

    val_x, val_y = windows(folder, "val", 16, masks)
    x, y = windows(folder, "train", 16, masks)
    expected = SimpleNamespace(train=[], norm=[])
    for step, rate in enumerate(RATES):
        if step == 5:
            expected.val = mean_loss(val_x[:35], val_y[:35]).item()
        batch = slice(8 * step, 8 * step + 8)
        loss = mean_loss(x[batch], y[batch])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        expected.train.append(loss.item())
        expected.norm.append(norm.item())
        for group in adamw.param_groups:
            group["lr"] = rate
        adamw.step()
        adamw.zero_grad()
    return expected


@pytest.fixture(scope="module", params=[False, True], ids=["all targets", "masked targets"])
def plain(request, tmp_path_factory):
    """A folder of shards, an initial model, and what a plain loop makes of the two."""
    folder = make_shards(tmp_path_factory.mktemp("plain") / "data", masks=request.param)
    start = folder.parent / "start"
    export_huggingface(tiny_model(vocab_size=257), tokenizers.get_encoding("bytes"), start)
    return folder, start, plain_loop(start, folder, request.param)


def assert_equals_plain_loop(out_dir, expected):
    assert losses(out_dir) == pytest.approx(expected.train, abs=2e-5)
    assert losses(out_dir, "norm") == pytest.approx(expected.norm, rel=1e-4)
    assert losses(out_dir, "lr") == pytest.approx(RATES)
    assert losses(out_dir, "val")[1] == pytest.approx(expected.val, abs=1e-5)


@pytest.mark.gpt2
@pytest.mark.parametrize("batch_size", [1, 8])
def test_a_run_equals_a_plain_loop_with_transformers_whatever_the_accumulation(plain, batch_size, out):
    folder, start, expected = plain
    train(folder, out, init_from=start, batch_size=batch_size, **PLAIN)
    assert_equals_plain_loop(out, expected)


def train_with_less_memory_on_rank_0(args):
    room = {"0": 1, "1": 4}[os.environ["RANK"]]
    memory.bound_on_B = lambda *args: room
    train_gpt2.main(args)


def test_two_ranks_of_which_one_has_less_memory_take_the_same_batch_size(data):
    """Otherwise they would read some windows twice and others never."""
    options = dict(max_steps=4, val_every=0)
    train(data, "one", **options)
    run(train_with_less_memory_on_rank_0, tiny_flags(data, "two", **options), ranks=2)
    assert losses("two") == pytest.approx(losses("one"), abs=2e-5)


def test_ranks_share_a_batch_smaller_than_their_loaders(data):
    """As at the start of a batch ramp."""
    loaders = [train_gpt2.DataLoaderLite(data, "train", 8, 16, rank, 2) for rank in range(2)]
    rows = [loader.next_batch(3)[0] for loader in loaders]
    assert torch.equal(torch.cat(rows), windows(data, "train", 16, False)[0][:6])


def train_and_report(args):
    """Train, and print this rank's weights after each step as a digest, the seeds, and the number of all-reduces."""
    report = {"weights": [], "seeds": [], "reductions": 0}
    DDP = train_gpt2.DDP

    def note(step, parts, done):
        digest = hashlib.sha256()
        for tensor in parts.raw_model.state_dict().values():
            digest.update(tensor.numpy())
        report["weights"].append(digest.hexdigest())
        report["seeds"].append(torch.initial_seed())

    def reduce(state, bucket):
        report["reductions"] += 1
        return allreduce_hook(state, bucket)

    def counting_ddp(*args, **options):
        model = DDP(*args, **options)
        model.register_comm_hook(None, reduce)
        return model

    train_gpt2.DDP = counting_ddp
    with at_steps(after=note):
        train_gpt2.main(args)
    print(json.dumps(report), flush=True)


def check_ranks_agree(said, steps):
    """The weights are the same on all ranks after each step, and the gradients were reduced once in each."""
    reports = [json.loads(text.splitlines()[-1]) for text in said]
    seeds = set()
    for report in reports:
        seeds.update(report["seeds"])
        assert report["weights"] == reports[0]["weights"]
        assert report["reductions"] == steps  # the tiny model's gradients fit in one bucket
    assert len(set(reports[0]["weights"])) == steps
    assert len(seeds) == steps * len(said), "dropout draws other numbers in each step and on each rank"


@pytest.mark.gpt2
def test_two_processes_equal_a_plain_loop(plain, out):
    """Two micro-steps on each of two ranks, as the plain loop's one batch of eight.

    Fails (each was tried) if all micro-steps all-reduce, or none; if the loss is one rank's; if masked targets are
    averaged by micro-step.
    """
    folder, start, expected = plain
    args = tiny_flags(folder, out, init_from=start, **PLAIN | {"batch_size": 2})
    said = run(train_and_report, args, ranks=2)
    assert_equals_plain_loop(out, expected)
    check_ranks_agree(said, 10)
    assert said[1].count("\n") == 1, "rank 1 prints its report and nothing else"


def test_three_processes_equal_one_with_muon(data):
    """Of 4 matrices, 3 ranks orthogonalize 2, 2 and none: the last one's share is padding."""
    options = dict(optimizer="muon", n_layer=4, total_batch_size=192, val_every=3, max_steps=3)
    train(data, "one", batch_size=12, **options)
    said = run(train_and_report, tiny_flags(data, "more", batch_size=2, **options), ranks=3)
    for stream in ("train", "val"):
        assert losses("more", stream) == pytest.approx(losses("one", stream), abs=2e-5)
    check_ranks_agree(said, 3)


class Centered(train_gpt2.MLP):
    """Its forward pass writes to a buffer, on each rank the mean of what that rank reads."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("mean", torch.zeros(config.n_embd))

    def forward(self, x):
        if self.training:
            mean = x.detach().mean((0, 1))
            self.mean.lerp_(mean, 0.1)
        return super().forward(x - self.mean)


def train_centered_and_report(args):
    train_gpt2.MLP = Centered
    train_and_report(args)


def test_a_buffer_that_the_forward_pass_writes_is_the_same_on_all_ranks_after_each_step(data, out):
    args = tiny_flags(data, out, batch_size=2, max_steps=4)
    check_ranks_agree(run(train_centered_and_report, args, ranks=2), 4)


def train_until_rank_1_differs(args):
    """Train, and in step 5 change a weight on rank 1."""

    def change(step, parts, done):
        if step == 5 and parts.world.rank == 1:
            parts.raw_model.transformer.wpe.weight.data[3, 3] += 1e-3

    with at_steps(after=change):
        train_gpt2.main(args)


def test_ranks_that_begin_to_differ_in_a_later_step_are_told_at_the_next_checkpoint(data, out):
    args = tiny_flags(data, out, batch_size=2)
    said, _ = run(train_until_rank_1_differs, args, ranks=2, ends=[2, 2])
    assert "transformer.wpe.weight is not the same on all ranks" in error_in(said)
    assert steps_of(out) == [4]
