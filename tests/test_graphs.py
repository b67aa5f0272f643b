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


def graphs_of(run, *args):
    """How many graphs are compiled in run(*args)."""
    torch._dynamo.reset()
    COUNTERS.clear()
    run(*args)
    assert not COUNTERS["graph_break"]
    return COUNTERS["stats"]["unique_graphs"]


OPTIONS = dict(
    n_layer=1,
    n_embd=16,
    sequence_length=32,
    batch_size=32,
    total_batch_size=1024,
    max_steps=4,
    checkpoint_every=0,
    val_every=1,
    val_tokens=1024,
    hellaswag_every=1,
    sample_every=1,
)
RAMP = {0: 4, 4 * 32: 12, 16 * 32: 20}  # {tokens seen: windows of a step}, one of 32K tokens being too long here


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_run_compiles_a_graph_for_its_batch_and_one_for_a_whole_ramp(backend, data, tmp_path, monkeypatch):
    """The ramp's steps have 4, 12 and 20 windows, of which B = 4 divides all: torch.compile gives up after 8 shapes.

    Evaluations compile nothing, and a resumed run, which is past the ramp, compiles for the trial's batch alone. The
    losses are those without a compiler.
    """
    options = OPTIONS | dict(hellaswag_data=examples_file(tmp_path, ["a cat", "The dog sat", "hi"]))
    monkeypatch.setattr(train_gpt2, "get_batch_size", lambda tokens_seen, config: 32 * RAMP.get(tokens_seen, 32))
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    args = tiny_flags(data, tmp_path / "out", compile=True, **options)
    assert graphs_of(signalled, 2, "SIGTERM", 1, 0, args) == 2
    assert graphs_of(train_gpt2.main, args) == 1
    train(data, tmp_path / "plain", **options)
    for stream in ("train", "val"):
        assert np.allclose(losses(tmp_path / "plain", stream), losses(tmp_path / "out", stream), atol=1e-4)
    names = load_checkpoint(tmp_path / "out" / "model_00004.pt")["model"]
    assert not any("_orig_mod" in name for name in names)
