"""torch.compile compiles the model once per shape of a micro-batch, and nothing else in a run."""

import functools
import sys

import numpy as np
import pytest
import torch
import torch._dynamo
import train_gpt2
from plumbing.run.checkpoint import load_checkpoint

from harness import examples_file, losses, signalled, tiny_flags, train

COUNTERS = torch._dynamo.utils.counters


def graphs_of(run, *args, **options):
    """How many graphs are compiled in run(...)."""
    torch._dynamo.reset()
    COUNTERS.clear()
    run(*args, **options)
    assert not COUNTERS["graph_break"]
    return COUNTERS["stats"]["unique_graphs"]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_graph_for_the_batch_one_for_the_ramps_and_none_for_evaluations_or_after_a_resume(
    backend, data, tmp_path, monkeypatch
):
    """The ramp has half of the step's windows. A resumed run, which is past it, compiles for the trial's alone.

    The losses are those without a compiler.
    """
    options = dict(n_layer=1, n_embd=16, sequence_length=32, max_steps=4, compile=True, checkpoint_every=0)
    options |= dict(total_batch_size=1024, batch_size=32, val_every=1, val_tokens=1024, hellaswag_every=1)
    options |= dict(sample_every=1, hellaswag_data=examples_file(tmp_path, ["a cat", "The dog sat", "hi"]))
    ramp = lambda tokens_seen, config: 1024 if tokens_seen > 512 else 512  # noqa: E731 - in place of one of 32K
    monkeypatch.setattr(train_gpt2, "get_batch_size", ramp)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    args = tiny_flags(data, tmp_path / "out", **options)
    assert graphs_of(signalled, 1, "SIGTERM", 1, 0, args) == 2
    assert graphs_of(train, data, tmp_path / "out", **options) == 1
    train(data, tmp_path / "plain", **options | {"compile": False})
    for stream in ("train", "val"):
        assert np.allclose(losses(tmp_path / "plain", stream), losses(tmp_path / "out", stream), atol=1e-4)
    names = load_checkpoint(tmp_path / "out" / "model_00004.pt")["model"]
    assert not any("_orig_mod" in name or "module." in name for name in names)


def test_a_batch_ramp_compiles_for_few_shapes(data, tmp_path, monkeypatch):
    """torch.compile gives up after 8. Steps of 1, 2, ... 12 windows, with B = 6, have micro-batches of 1, 2, 3 or 6."""

    def ramp(tokens_seen, config):
        return next(16 * n for n in range(1, 13) if 16 * n * (n - 1) // 2 >= tokens_seen)

    monkeypatch.setattr(train_gpt2, "get_batch_size", ramp)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    options = dict(
        compile=True, total_batch_size=12 * 16, batch_size=6, max_steps=12, val_every=0, checkpoint_every=0
    )
    assert graphs_of(train, data, tmp_path / "out", **options) == 4
