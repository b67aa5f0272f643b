"""--shard: a model whose weights and optimizer state are split across the ranks trains as DDP's does."""

import re

import numpy as np
import pytest
import torch
import train_gpt2
from plumbing.run.checkpoint import load_checkpoint
from plumbing.system import devices, memory
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule

from edits import BLOCKS, HIDDEN_STATES, OPTIMIZERS, POSITIONS, PROJECTION, SCALER, adamw_as, in_changed
from harness import (
    KILLED,
    assert_same_run,
    error_in,
    examples_file,
    killed_at,
    log_lines,
    losses,
    patched,
    run,
    samples,
    tiny_flags,
    train,
)

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")

OPTIONS = dict(max_steps=6, val_every=3, checkpoint_every=2, keep_checkpoints=9, sample_every=3, keep_best=True)
OPTIONS |= dict(grad_clip=0.5)  # which every gradient here reaches


def train_on(ranks, data, out_dir, **changes):
    args = tiny_flags(data, out_dir, **OPTIONS | changes)
    run(train_gpt2.main, args, ranks=ranks, ends=[0] * max(1, ranks), timeout=100)
    return out_dir


def weights(out_dir):
    return load_checkpoint(out_dir / "model_00006.pt")["model"]


def assert_close_runs(ours, theirs, atol=1e-5):
    for stream in ("train", "val", "norm"):
        np.testing.assert_allclose(losses(ours, stream), losses(theirs, stream), rtol=0, atol=atol)
    one, other = (torch.cat([tensor.flatten() for tensor in weights(out).values()]) for out in (ours, theirs))
    # on average: AdamW takes whole steps even where a gradient is nothing but rounding
    assert (one - other).abs().mean() <= atol


@pytest.fixture(scope="module")
def ddp(folder):
    return train_on(2, folder, folder.parent / "ddp")


@pytest.fixture(scope="module")
def sharded(folder):
    return train_on(2, folder, folder.parent / "sharded", shard=True)


@pytest.fixture(scope="module")
def sharded_in_96(folder):
    """With steps that two and three ranks can share."""
    return train_on(2, folder, folder.parent / "sharded_in_96", shard=True, total_batch_size=96)


def test_losses_are_those_of_ddp(ddp, sharded):
    assert min(losses(ddp, "norm")) > OPTIONS["grad_clip"]
    assert_close_runs(sharded, ddp)


CASES = {
    "Muon and accumulation": dict(optimizer="muon", batch_size=1),
    "bfloat16 and activation checkpointing": dict(dtype="bfloat16", activation_checkpointing=True),
    "float16": dict(dtype="float16"),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_ddp_with(name, folder, tmp_path):
    ours = train_on(2, folder, tmp_path / "sharded", shard=True, **CASES[name])
    theirs = train_on(2, folder, tmp_path / "ddp", **CASES[name])
    assert_close_runs(ours, theirs, atol=1e-3 if "float" in name else 1e-5)


@pytest.mark.parametrize("name", ["model_00006.pt", "model_best.pt"])
def test_its_checkpoints_are_those_of_ddp(name, ddp, sharded):
    ours = torch.load(sharded / name, weights_only=True)
    theirs = torch.load(ddp / name, weights_only=True)
    assert ours.keys() == theirs.keys()
    assert ours["model"].keys() == theirs["model"].keys()
    assert {type(value) for value in ours["model"].values()} == {torch.Tensor}


def test_its_export_is_that_of_ddp(ddp, sharded):
    ours = load_file(sharded / "hf" / "model.safetensors")
    for name, weight in load_file(ddp / "hf" / "model.safetensors").items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=1e-4)


def test_its_samples_are_those_of_ddp(ddp, sharded):
    assert samples(sharded) == samples(ddp)


def test_a_run_that_is_killed_and_resumed_is_the_same_bit_for_bit(sharded, folder, out):
    args = tiny_flags(folder, out, **OPTIONS | dict(shard=True))
    run(killed_at, 4, 4, args, ranks=2, ends=[KILLED, KILLED])
    run(train_gpt2.main, args, ranks=2)
    assert_same_run(out, sharded)


def train_with_less_memory(largest_B, args):
    """Memory for so many rows on both ranks: otherwise it runs out in the first forward pass, then in backward."""
    MLP = train_gpt2.MLP.forward
    failures = []

    def limited(self, x):
        x = MLP(self, x)
        if self.training and x.requires_grad and len(x) > largest_B:
            if failures:
                x.register_hook(fail)
            else:
                fail(x)
        return x

    def fail(x):
        failures.append(x)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    with patched(train_gpt2.MLP, "forward", limited), patched(memory, "bound_on_B", lambda *args: 4):
        train_gpt2.main(args)


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="needs torch 2.13")
def test_a_batch_that_is_too_large_is_halved(sharded, folder, out):
    """The losses are those of any batch."""
    args = tiny_flags(folder, out, **OPTIONS | dict(shard=True, batch_size=4))
    said = run(train_with_less_memory, 1, args, ranks=2)[0]
    assert re.findall("Out of memory. Continuing with --batch-size (.*).", said) == ["2", "1"]
    assert_close_runs(out, sharded)


MOVES = {  # ranks and --shard, before a kill and after it
    "from DDP": ((2, False), (2, True)),
    "to one process": ((2, True), (0, False)),
    "to three ranks": ((2, True), (3, True)),
}


@pytest.mark.parametrize("name", MOVES)
def test_a_run_continues_however_its_model_is_shared_out(name, sharded_in_96, folder, out):
    (ranks, shard), (later_ranks, later_shard) = MOVES[name]
    args = tiny_flags(folder, out, **OPTIONS | dict(shard=shard, total_batch_size=96))
    run(killed_at, 4, 4, args, ranks=ranks, ends=[KILLED] * ranks)
    train_on(later_ranks, folder, out, shard=later_shard, total_batch_size=96)
    assert_close_runs(out, sharded_in_96)


def test_a_branch_of_a_sharded_run_is_that_of_ddp(sharded, ddp, folder, tmp_path):
    changes = dict(max_steps=8, max_lr=1e-3)
    train_on(2, folder, tmp_path / "sharded", branch_from=sharded / "model_00004.pt", shard=True, **changes)
    train_on(2, folder, tmp_path / "ddp", branch_from=ddp / "model_00004.pt", **changes)
    np.testing.assert_allclose(losses(tmp_path / "sharded"), losses(tmp_path / "ddp"), rtol=0, atol=1e-5)


def test_an_evaluation_alone_is_that_of_one_process(sharded, folder, tmp_path):
    path = examples_file(tmp_path, ["abc" * n for n in range(1, 6)])
    options = dict(init_from=sharded, max_steps=0, hellaswag_every=1, hellaswag_data=path, sample_every=0)
    ours = train_on(2, folder, tmp_path / "two", shard=True, **options)
    theirs = train_on(0, folder, tmp_path / "one", **options)
    for stream in ("val", "hella"):
        np.testing.assert_allclose(losses(ours, stream), losses(theirs, stream), rtol=0, atol=1e-6)


ODD = {  # a frozen weight, buffers in no checkpoint, one block that is used twice, positions that no cache allows
    PROJECTION: PROJECTION + "        self.norm = nn.BatchNorm1d(config.n_embd)\n"
    '        self.register_buffer("table", torch.linspace(0, 1, config.n_embd), persistent=False)\n',
    "    def forward(self, x):\n": "    def forward(self, x):\n"
    "        x = self.norm(x.flatten(0, 1)).view(x.shape) + self.table\n",
    BLOCKS: "nn.ModuleList([Block(config, 0)] * config.n_layer)",
    HIDDEN_STATES: "        self.transformer.wpe.requires_grad_(False)\n" + HIDDEN_STATES,
    POSITIONS: f"{POSITIONS}.flip(0).cumsum(0)",
}


def test_an_odd_model_trains_as_in_ddp(changed, tmp_path):
    trainer = changed(ODD)
    for name in ("sharded", "ddp"):
        trainer.train(name, ranks=2, **OPTIONS, shard=name == "sharded")
    assert_close_runs(tmp_path / "sharded", tmp_path / "ddp")
    assert samples(tmp_path / "sharded") == samples(tmp_path / "ddp")


# AdamW that divides a gradient by averages of its own: of all its squares, and of the columns' squares
AVERAGED = adamw_as(
    "Averaged",
    """

class Averaged(torch.optim.AdamW):
    def step(self):
        kept = {}
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                square = p.grad.square().sum()
                columns = p.grad.square().mean(0)
                if "square" in state:
                    square = 0.5 * state["square"] + 0.5 * square
                    columns = 0.5 * state["columns"] + 0.5 * columns
                kept[p] = square, columns
                p.grad = p.grad / (square.sqrt() + columns.sqrt() + 1e-8)
        super().step()
        for p, (square, columns) in kept.items():
            self.state[p] |= dict(square=square, columns=columns)
""",
)


def test_state_that_is_not_by_rows_is_split_again_as_it_was(changed, tmp_path):
    """A column average of a square matrix is as long as the matrix."""
    trainer = changed(AVERAGED)
    options = dict(max_steps=6, checkpoint_every=2, shard=True, ranks=2)
    trainer.train("whole", **options)
    args = trainer.flags("resumed", max_steps=6, checkpoint_every=2, shard=True)
    run(in_changed, trainer.path, killed_at, 4, 4, args, ranks=2, ends=[KILLED, KILLED])
    trainer.train("resumed", **options)
    np.testing.assert_allclose(losses(tmp_path / "resumed"), losses(tmp_path / "whole"), rtol=0, atol=1e-5)


# an optimizer that keeps state of this rank's rows, or of this rank's numbers
LOCAL = """

class Local(torch.optim.AdamW):
    def step(self):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                rows = p.to_local() if hasattr(p, "to_local") else p * (-1) ** dist.get_rank()
                self.state[p]["kept"] = rows.detach().clone()
"""


@pytest.mark.parametrize("shard", [False, True])
def test_state_that_differs_between_ranks_is_one_line_before_the_first_checkpoint(shard, changed):
    said = changed(adamw_as("Local", LOCAL)).error(ranks=2, shard=shard)
    assert "the state of Local is not the same on all ranks" in said


HOOK = """        keep = torch.arange(config.vocab_size)[:, None] >= 100
        self.lm_head.weight.register_hook(lambda gradient: gradient * keep)
"""
MARK = "        self.transformer.wpe.weight.rate = 0.1\n"
BY_MARK = {"lr=config.max_lr, betas": "lr=config.max_lr * getattr(rest[1][1], 'rate', 1), betas"}


def test_a_mark_on_a_parameter_is_there_as_in_ddp(changed, tmp_path):
    trainer = changed({HIDDEN_STATES: MARK + HIDDEN_STATES} | BY_MARK)
    for name in ("sharded", "ddp"):
        trainer.train(name, ranks=2, **OPTIONS, shard=name == "sharded")
    assert_close_runs(tmp_path / "sharded", tmp_path / "ddp")


NORMALIZED = "        with torch.no_grad():\n            self.c_fc.weight.copy_(F.normalize(self.c_fc.weight))\n"
REFUSED = {
    "a number alone": ({PROJECTION: PROJECTION + "        self.gain = nn.Parameter(torch.ones(()))\n"}, "scalar"),
    "a block's weight outside of it": (
        {
            "        return self.transformer.ln_f(x)\n": "        return self.transformer.ln_f(x)"
            " + self.transformer.h[0].ln_1.weight\n"
        },
        "DTensor",
    ),
    "weights that the forward pass writes": (
        {"    def forward(self, x):\n": "    def forward(self, x):\n" + NORMALIZED},
        "writes into transformer.h.0.mlp.c_fc.weight",
    ),
    "a hook that freezes rows": (
        {HIDDEN_STATES: HOOK + HIDDEN_STATES},
        "transformer.wte.weight gets another gradient",
    ),
    "a copy of the model": (
        {SCALER: '    own["ema"] = torch.optim.swa_utils.AveragedModel(raw_model)\n' + SCALER},
        "does not support deepcopy",
    ),
    "a part of the model": (
        {SCALER: '    own["norm"] = raw_model.transformer.ln_f\n' + SCALER},
        "Parts.own['norm'] has shards of the model's weights",
    ),
    "an optimizer inside another one": (OPTIMIZERS["Inside"], "needs optimizers whose state_dict() has state"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_shared_out_is_one_line_before_the_first_step(name, changed, out):
    edits, words = REFUSED[name]
    assert words in changed(edits).error(ranks=2, shard=True)
    assert not list(out.glob("*"))


def test_one_process_has_nothing_to_split(data, tmp_path):
    """It trains."""
    said = train(data, tmp_path / "out", shard=True)
    train(data, tmp_path / "plain")
    assert "With a single process there is nothing to split" in said
    assert log_lines(tmp_path / "out") == log_lines(tmp_path / "plain")


@pytest.mark.parametrize(
    "shard, size, advice",
    [
        (False, "30,720.9 GiB here", "Add --shard: then each of the 2 ranks needs 15,360.5 GiB."),
        (True, "15,360.5 GiB here", "Use a smaller model"),
    ],
)
def test_a_model_that_is_too_large_for_a_rank_is_told_of_shard(shard, size, advice, data, out):
    """Its 10 layers have 12 * 131,072**2 weights each, and 484 * 131,072 others; each takes 16 bytes."""
    args = tiny_flags(data, out, n_embd=2**17, n_head=1, n_layer=10, shard=shard)
    error = error_in(run(train_gpt2.main, args, ranks=2, ends=[2, 2])[0])
    assert size in error
    assert advice in error


def plan_on_cards(free, args):
    """A dry run as on cards with so many free bytes, each for one rank."""
    with patched(devices, "free_memory", lambda *args: free):
        train_gpt2.main([*args, "--dry-run"])


@pytest.mark.parametrize(
    "ranks, shard, memory, advice",
    [
        (0, False, "25 GB", "With --shard, several GPUs share it."),
        (2, False, "25 GB", "With --shard, each of 2 ranks needs 12 GB for the first."),
        (2, True, "12 GB", ""),
    ],
)
def test_a_dry_run_says_whether_gpt2_xl_fits_on_cards_of_24_gb(ranks, shard, memory, advice, tmp_path, monkeypatch):
    """Its 1.56 billion parameters take 16 bytes each: 24.9 GB."""
    monkeypatch.chdir(tmp_path)
    args = ["--preset", "gpt2-xl", "--device", "cpu", "--shard" if shard else "--no-shard"]
    said = run(plan_on_cards, 24e9, args, ranks=ranks)[0]
    assert f"memory:     {memory} for weights, gradients and optimizer" in said
    assert advice in said
    assert ("more than the 24 GB" in said) == bool(advice)


@pytest.mark.parametrize("shard, B", [(False, 1), (True, 4)])
def test_a_rank_has_room_for_more_sequences_beside_a_share_of_the_optimizer_state(shard, B, data, out):
    """On cards of 28 MB: weights, gradients and moments of 1.7M parameters are 27 MB, and 13 in shares."""
    said = train(data, out, n_embd=256, shard=shard, gpus=2, gpu_memory=0.028, dry_run=True)
    assert re.findall(r"B (\d+) \*", said) == [str(B)]
