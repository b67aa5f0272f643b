"""--shard: a model whose weights and optimizer state are shared out over the ranks trains as DDP's does."""

import numpy as np
import pytest
import torch
import train_gpt2
from plumbing.run.checkpoint import load_checkpoint
from plumbing.system import devices
from safetensors.torch import load_file

from edits import PROJECTION, changed_trainer, train_changed
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
    tiny_flags,
    train,
)

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")

OPTIONS = dict(max_steps=6, val_every=3, checkpoint_every=2, keep_checkpoints=9, sample_every=3, keep_best=True)


def train_on(ranks, data, out_dir, **changes):
    args = tiny_flags(data, out_dir, **OPTIONS | changes)
    run(train_gpt2.main, args, ranks=ranks, ends=[0] * max(1, ranks), timeout=100)
    return out_dir


def weights(out_dir, step=6):
    return load_checkpoint(out_dir / f"model_{step:05d}.pt")["model"]


def assert_close_runs(ours, theirs, atol=1e-5):
    for stream in ("train", "val"):
        np.testing.assert_allclose(losses(ours, stream), losses(theirs, stream), rtol=0, atol=atol)
    for one, other in zip(weights(ours).values(), weights(theirs).values(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=20 * atol)


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


CASES = {
    "Muon": dict(optimizer="muon"),
    "bfloat16": dict(dtype="bfloat16"),
    "float16": dict(dtype="float16"),
    "activation checkpointing": dict(activation_checkpointing=True),
    "accumulation": dict(batch_size=1),
    "clipping": dict(grad_clip=0.1),
}


def test_losses_are_those_of_ddp(ddp, sharded):
    assert_close_runs(sharded, ddp)


@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_ddp_with(name, folder, tmp_path):
    ours = train_on(2, folder, tmp_path / "sharded", shard=True, **CASES[name])
    theirs = train_on(2, folder, tmp_path / "ddp", **CASES[name])
    assert_close_runs(ours, theirs, atol=1e-3 if "float" in name else 1e-5)


def test_its_files_are_those_of_ddp(ddp, sharded):
    for name in ("model_00006.pt", "model_best.pt"):
        ours, theirs = (torch.load(out / name, weights_only=True) for out in (sharded, ddp))
        assert ours.keys() == theirs.keys() and ours["model"].keys() == theirs["model"].keys()
        assert all(type(value) is torch.Tensor for value in ours["model"].values())
    ours, theirs = (load_file(out / "hf" / "model.safetensors") for out in (sharded, ddp))
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-4)
    assert (sharded / "samples.txt").read_text() == (ddp / "samples.txt").read_text()


def test_a_run_that_is_killed_and_resumed_is_the_same_bit_for_bit(sharded, folder, tmp_path):
    args = tiny_flags(folder, tmp_path / "out", **OPTIONS | dict(shard=True))
    run(killed_at, 4, 4, args, ranks=2, ends=[KILLED, KILLED])
    run(train_gpt2.main, args, ranks=2, ends=[0, 0])
    assert_same_run(tmp_path / "out", sharded)


@pytest.mark.parametrize(
    "ranks, shard, later_ranks, later_shard",
    [(2, True, 2, False), (2, False, 2, True), (2, True, 0, False), (0, False, 2, True), (2, True, 3, True)],
    ids=["to DDP", "from DDP", "to one process", "from one process", "to three ranks"],
)
def test_a_run_continues_however_its_model_is_shared_out(
    ranks, shard, later_ranks, later_shard, sharded_in_96, folder, tmp_path
):
    args = tiny_flags(folder, tmp_path / "out", **OPTIONS | dict(shard=shard, total_batch_size=96))
    run(killed_at, 4, 4, args, ranks=ranks, ends=[KILLED] * max(1, ranks))
    train_on(later_ranks, folder, tmp_path / "out", shard=later_shard, total_batch_size=96)
    assert_close_runs(tmp_path / "out", sharded_in_96)


def test_a_branch_of_a_sharded_run_is_that_of_ddp(sharded, ddp, folder, tmp_path):
    changes = dict(max_steps=8, max_lr=1e-3)
    for name, parent in (("sharded", sharded), ("ddp", ddp)):
        branch = dict(branch_from=parent / "model_00004.pt", shard=name == "sharded")
        train_on(2, folder, tmp_path / name, **changes | branch)
    np.testing.assert_allclose(losses(tmp_path / "sharded"), losses(tmp_path / "ddp"), rtol=0, atol=1e-5)


def test_hellaswag_and_an_evaluation_alone_are_those_of_one_process(sharded, folder, tmp_path):
    path = examples_file(tmp_path, ["abc" * n for n in range(1, 6)])
    options = dict(init_from=sharded, max_steps=0, hellaswag_every=1, hellaswag_data=path, sample_every=0)
    for ranks, shard in ((0, False), (2, True)):
        train_on(ranks, folder, tmp_path / str(ranks), shard=shard, **options)
    for stream in ("val", "hella"):
        np.testing.assert_allclose(losses(tmp_path / "2", stream), losses(tmp_path / "0", stream), rtol=0, atol=1e-6)


def test_frozen_weights_buffers_and_a_block_that_is_used_three_times_train_as_in_ddp(folder, tmp_path):
    edits = {
        PROJECTION: PROJECTION + "        self.norm = nn.BatchNorm1d(config.n_embd)\n"
        '        self.register_buffer("table", torch.linspace(0, 1, config.n_embd), persistent=False)\n',
        "    def forward(self, x):\n": "    def forward(self, x):\n"
        "        x = self.norm(x.flatten(0, 1)).view(x.shape) + self.table\n",
        "        for block in self.transformer.h:\n": "        first, *others = self.transformer.h\n"
        "        for block in (first, *others, first, first):\n",
        "\n    def hidden_states(": "        self.transformer.wpe.requires_grad_(False)\n\n    def hidden_states(",
    }
    path = changed_trainer(tmp_path / "train_gpt2.py", edits)
    for name in ("sharded", "ddp"):
        args = tiny_flags(folder, tmp_path / name, **OPTIONS | dict(shard=name == "sharded"))
        run(train_changed, path, args, ranks=2, ends=[0, 0])
    assert_close_runs(tmp_path / "sharded", tmp_path / "ddp")


REFUSED = {
    "a number alone": ({PROJECTION: PROJECTION + "        self.gain = nn.Parameter(torch.ones(()))\n"}, "scalar"),
    "a block's weight outside of it": (
        {
            "        return self.transformer.ln_f(x)\n": "        return self.transformer.ln_f(x)"
            " + self.transformer.h[0].ln_1.weight\n"
        },
        "DTensor",
    ),
}


NORMALIZED = "        with torch.no_grad():\n            self.c_fc.weight.copy_(F.normalize(self.c_fc.weight))\n"
REFUSED["weights that the forward pass writes"] = (
    {"    def forward(self, x):\n": "    def forward(self, x):\n" + NORMALIZED},
    "writes into transformer.h.0.mlp.c_fc.weight",
)
OWN = "    scaler = torch.amp"
REFUSED["a copy of the model"] = (
    {OWN: '    own["ema"] = torch.optim.swa_utils.AveragedModel(raw_model)\n' + OWN},
    "does not support deepcopy",
)


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_cannot_share_out_is_one_line_before_the_first_step(name, folder, tmp_path):
    edits, words = REFUSED[name]
    path = changed_trainer(tmp_path / "train_gpt2.py", edits)
    said, _ = run(train_changed, path, tiny_flags(folder, tmp_path / "out", shard=True), ranks=2, ends=[2, 2])
    assert words in error_in(said) and "eave --shard out" in error_in(said)
    assert not list((tmp_path / "out").glob("*"))


def test_one_process_has_nothing_to_share_out_and_trains(data, tmp_path):
    said = train(data, tmp_path / "out", shard=True)
    train(data, tmp_path / "plain")
    assert "A single process has nobody to share with" in said
    assert log_lines(tmp_path / "out") == log_lines(tmp_path / "plain")


@pytest.mark.parametrize(
    "shard, words", [(False, "Add --shard: then each of the 2 ranks needs"), (True, "Use a smaller model")]
)
def test_a_model_that_is_too_large_for_a_rank_is_told_of_shard(shard, words, data, tmp_path):
    args = tiny_flags(data, tmp_path / "out", n_embd=2**17, n_head=1, n_layer=10, shard=shard)
    said, _ = run(train_gpt2.main, args, ranks=2, ends=[2, 2])
    assert "training takes 16 bytes for each parameter" in error_in(said) and words in error_in(said)


CARD = 24e9  # bytes


def plan_on_cards(args):
    """A dry run as on cards of 24 GB, each for one rank."""
    with patched(devices, "free_memory", lambda *args: CARD):
        train_gpt2.main(args)


@pytest.mark.parametrize(
    "ranks, shard, memory, advice",
    [
        (0, False, "25 GB", "With --shard and several GPUs, each has its share."),
        (2, False, "25 GB", "With --shard, each of 2 ranks needs 12 GB."),
        (2, True, "12 GB", ""),
    ],
)
def test_a_dry_run_says_whether_gpt2_xl_fits_on_cards_of_24_gb(ranks, shard, memory, advice, tmp_path, monkeypatch):
    """Its 1.56 billion parameters take 16 bytes each: 24.9 GB."""
    monkeypatch.chdir(tmp_path)
    args = ["--preset", "gpt2-xl", "--device", "cpu", "--dry-run", *(["--shard"] if shard else [])]
    said = run(plan_on_cards, args, ranks=ranks, ends=[0] * max(1, ranks))[0]
    assert f"memory:     {memory} for weights, gradients and optimizer" in said
    assert advice in said and ("more than the 24 GB" in said) == bool(advice)
