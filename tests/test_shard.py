"""--shard: a model whose weights and optimizer state are split across the ranks trains as DDP's does."""

import re
import shutil

import numpy as np
import pytest
import torch
import train_gpt2
from plumbing.run.checkpoint import list_checkpoints, load_checkpoint
from plumbing.system import memory
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule

from edits import ADAMW, BLOCKS, GELU, HIDDEN_STATES, OPTIMIZERS, POSITIONS, PROJECTION, SCALER, adamw_as
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

# 12 sequences, which one, two and three ranks can share
OPTIONS = dict(max_steps=6, val_every=3, checkpoint_every=2, keep_checkpoints=9, total_batch_size=192)
# a norm which every gradient here reaches
OPTIONS |= dict(sample_every=3, keep_best=True, grad_clip=0.5)
SHORT = OPTIONS | dict(max_steps=3, checkpoint_every=0)


def train_on(ranks, data, out_dir, **changes):
    args = tiny_flags(data, out_dir, **OPTIONS | changes)
    run(train_gpt2.main, args, ranks=ranks, timeout=100)
    return out_dir


def weights(out_dir):
    return torch.cat(
        [tensor.flatten() for tensor in load_checkpoint(list_checkpoints(out_dir)[-1])["model"].values()]
    )


def assert_close_runs(ours, theirs, atol=1e-5):
    """In the steps that both have."""
    for stream in ("train", "val", "norm"):
        found = losses(ours, stream)
        np.testing.assert_allclose(found, losses(theirs, stream)[-len(found) :], rtol=0, atol=atol)
    # on average: AdamW takes whole steps even where a gradient is nothing but rounding
    assert (weights(ours) - weights(theirs)).abs().mean() <= atol


@pytest.fixture(scope="module")
def ddp(folder):
    return train_on(2, folder, folder.parent / "ddp")


@pytest.fixture(scope="module")
def sharded(folder):
    return train_on(2, folder, folder.parent / "sharded", shard=True)


@pytest.fixture(scope="module")
def killed(folder):
    args = tiny_flags(folder, folder.parent / "killed", **OPTIONS, shard=True)
    run(killed_at, 4, 4, args, ranks=2, ends=[KILLED, KILLED])
    return folder.parent / "killed"


def cut(out_dir):
    """Take away the last checkpoint, so that the run continues from the one before."""
    list_checkpoints(out_dir)[-1].unlink()


def test_losses_are_those_of_ddp(ddp, sharded):
    assert min(losses(ddp, "norm")) > OPTIONS["grad_clip"]
    assert_close_runs(sharded, ddp)


CASES = {
    "Muon and accumulation": dict(optimizer="muon", batch_size=1),
    "bfloat16 and activation checkpointing": dict(dtype="bfloat16", activation_checkpointing=True),
    "float16": dict(dtype="float16"),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_one_process_with(name, folder):
    options = SHORT | CASES[name]
    ours = train_on(2, folder, "sharded", shard=True, **options)
    train(folder, "whole", **options)
    assert_close_runs(ours, "whole", atol=1e-3 if "float" in name else 1e-5)


def test_its_checkpoints_export_and_samples_are_those_of_ddp(ddp, sharded):
    for name in ("model_00006.pt", "model_best.pt"):
        ours, theirs = [torch.load(out / name, weights_only=True) for out in (sharded, ddp)]
        assert ours.keys() == theirs.keys()
        assert ours["model"].keys() == theirs["model"].keys()
        assert {type(value) for value in ours["model"].values()} == {torch.Tensor}
    ours, theirs = [load_file(out / "hf" / "model.safetensors") for out in (sharded, ddp)]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    assert samples(sharded) == samples(ddp)


def test_a_run_that_is_killed_and_resumed_is_the_same_bit_for_bit(sharded, killed, folder, out):
    shutil.copytree(killed, out)
    train_on(2, folder, out, shard=True)
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

    with patched(train_gpt2.MLP, "forward", limited), patched(memory, "bound_on_B", lambda *args: 6):
        train_gpt2.main(args)


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="needs torch 2.13")
def test_a_batch_that_is_too_large_is_halved(sharded, folder, out):
    """The losses are those of any batch."""
    args = tiny_flags(folder, out, **OPTIONS, shard=True, batch_size=6)
    said = run(train_with_less_memory, 1, args, ranks=2)[0]
    assert re.findall("Out of memory. Continuing with --batch-size (.*).", said) == ["3", "1"]
    assert_close_runs(out, sharded)


MOVES = {"from DDP": ("ddp", 2, True), "to one process": ("killed", 0, False), "to three ranks": ("killed", 3, True)}


@pytest.mark.parametrize("name", MOVES)
def test_a_run_continues_however_its_model_is_shared_out(name, sharded, folder, out, request):
    before, ranks, shard = MOVES[name]
    shutil.copytree(request.getfixturevalue(before), out)
    if before == "ddp":
        cut(out)
    train_on(ranks, folder, out, shard=shard)
    assert_close_runs(out, sharded)


def test_a_branch_is_its_parent(sharded, folder, out):
    train_on(2, folder, out, shard=True, branch_from=sharded / "model_00004.pt")
    assert_close_runs(out, sharded)


def test_an_evaluation_alone_is_that_of_one_process(sharded, folder, tmp_path):
    path = examples_file(tmp_path, ["abc" * n for n in range(1, 6)])
    options = dict(init_from=sharded, max_steps=0, hellaswag_every=1, hellaswag_data=path, sample_every=0)
    ours = train_on(2, folder, "two", shard=True, **options)
    theirs = train_on(0, folder, "one", **options)
    for stream in ("val", "hella"):
        np.testing.assert_allclose(losses(ours, stream), losses(theirs, stream), rtol=0, atol=1e-6)


OWN_STATE = """        self.transformer.wpe.requires_grad_(False)
        self.transformer.wte.weight.rate = 0.1

    def state_dict(self, *args, **options):
        weights = super().state_dict(*args, **options)
        return {name: weights[name] for name in weights if "wpe" not in name}

    def load_state_dict(self, weights, strict=True):
        return super().load_state_dict(weights, strict=False)
"""
# a frozen weight, which no state dict has, a mark that the optimizer reads, buffers in no checkpoint, one block that is
# used twice, positions that no cache allows
ODD = {
    PROJECTION: PROJECTION + "        self.norm = nn.BatchNorm1d(config.n_embd)\n"
    '        self.register_buffer("table", torch.linspace(0, 1, config.n_embd), persistent=False)\n',
    "    def forward(self, x):\n": "    def forward(self, x):\n"
    "        x = self.norm(x.flatten(0, 1)).view(x.shape) + self.table\n",
    BLOCKS: "nn.ModuleList([Block(config, 0)] * config.n_layer)",
    HIDDEN_STATES: OWN_STATE + HIDDEN_STATES,
    POSITIONS: f"{POSITIONS}.flip(0).cumsum(0)",
    "lr=config.max_lr, betas": "lr=config.max_lr * getattr(rest[0][1], 'rate', 1), betas",
}


def test_an_odd_model_trains_as_in_ddp(changed):
    trainer = changed(ODD)
    for name in ("sharded", "ddp"):
        trainer.train(name, ranks=2, **SHORT, shard=name == "sharded")
    assert_close_runs("sharded", "ddp")
    assert samples("sharded") == samples("ddp")


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


def test_state_that_is_not_by_rows_is_split_again_as_it_was(changed, out):
    """A column average of a square matrix is as long as the matrix."""
    trainer = changed(AVERAGED)
    options = dict(n_layer=1, max_steps=3, checkpoint_every=2, val_every=0, shard=True, ranks=2)
    trainer.train(**options)
    whole = losses(out)
    cut(out)
    trainer.train(**options)
    np.testing.assert_allclose(losses(out), whole, rtol=0, atol=1e-5)


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
    said = changed(adamw_as("Local", LOCAL)).error(n_layer=1, ranks=2, shard=shard)
    assert "the state of Local is not the same on all ranks" in said


HOOK = """        keep = torch.arange(config.vocab_size)[:, None] >= 100
        self.lm_head.weight.register_hook(lambda gradient: gradient * keep)
"""
NORMALIZED = "        with torch.no_grad():\n            self.c_fc.weight.copy_(F.normalize(self.c_fc.weight))\n"
REFUSED = {
    "a number alone": ({PROJECTION: PROJECTION + "        self.gain = nn.Parameter(torch.ones(()))\n"}, "scalar"),
    "a block's weight outside of it": (
        {
            "        return self.transformer.ln_f(x)\n": "        return self.transformer.ln_f(x)"
            " + self.transformer.h[0].ln_1.weight\n"
        },
        "mixed torch.Tensor and DTensor",
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
        {SCALER: '    own["norm"] = nn.ModuleList([raw_model.transformer.ln_f, nn.Linear(1, 1)])\n' + SCALER},
        "Parts.own['norm'] has shards of the model's weights",
    ),
    "an optimizer inside another one": (OPTIMIZERS["Inside"], "needs optimizers whose state_dict() has state"),
    "a dict": (
        {"return logits if return_logits else None, loss / num_targets": "return dict(loss=loss / num_targets)"},
        "forward() returns a dict",
    ),
    "experts that the data choose": (
        {
            PROJECTION: PROJECTION + "        self.other = copy.deepcopy(self.c_proj)\n",
            GELU: GELU.replace("self.c_proj", "(self.other if x.sum() > 0 else self.c_proj)"),
            "import hellaswag\n": "import copy\n\nimport hellaswag\n",
        },
        "A step does not use",
    ),
    "an optimizer that computes with columns": (
        {ADAMW: "torch.optim.Adafactor(groups, lr=config.max_lr)"},
        "in-place operations that require placement changes",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_shared_out_is_one_line_before_the_first_step(name, changed, out):
    edits, words = REFUSED[name]
    if "optim.Adafactor" in str(edits) and torch.__version__ < "2.10":
        assert "as Adafactor does" in changed(edits).train(ranks=2, shard=True, max_steps=1)
        return
    assert words in changed(edits).error(n_layer=1, ranks=2, shard=True)
    assert not any(losses(path.parent).size for path in out.glob("log.txt"))


def test_one_process_has_nothing_to_split(data):
    """It trains."""
    said = train(data, "out", shard=True, max_steps=2)
    train(data, "plain", max_steps=2)
    assert "With a single process there is nothing to split" in said
    assert log_lines("out") == log_lines("plain")


@pytest.mark.parametrize("shard, size", [(False, "30,720.9"), (True, "15,360.5")])
def test_a_model_that_is_too_large_for_a_rank_is_told_of_shard(shard, size, data, out):
    """Its 10 layers have 12 * 131,072**2 weights each, and 484 * 131,072 others; each takes 16 bytes."""
    args = tiny_flags(data, out, n_embd=2**17, n_head=1, n_layer=10, shard=shard)
    error = error_in(run(train_gpt2.main, args, ranks=2, ends=[2, 2])[0])
    assert f"{size} GiB here" in error
    assert "or more GPUs with --shard" in error


@pytest.mark.parametrize(
    "gpus, shard, memory, B, advice",
    [
        (1, False, "27 MB", 1, "With --shard, several GPUs share it."),
        (2, False, "27 MB", 1, "With --shard, each of 2 ranks needs 13 MB for the first."),
        (2, True, "13 MB", 4, ""),
    ],
)
def test_a_dry_run_says_what_fits_on_cards_of_28_mb(gpus, shard, memory, B, advice, data, out):
    """Weights, gradients and moments of 1.7M parameters are 16 bytes each: a share leaves room for more sequences."""
    said = train(data, out, n_embd=256, shard=shard, gpus=gpus, gpu_memory=0.028, dry_run=True)
    assert f"memory:     {memory} for weights, gradients and optimizer" in said
    assert re.findall(r"B (\d+) \*", said) == [f"{B}"]
    assert advice in said
    assert ("more than the 28 MB" in said) == bool(advice)
