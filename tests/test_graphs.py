"""torch.compile compiles the model once per shape of a micro-batch, and nothing else in a run."""

import collections
import functools
import os
import signal

import numpy as np
import pytest
import torch
import torch._dynamo
import train_gpt2
from plumbing.run.checkpoint import load_checkpoint

from harness import examples_file, losses, train

COUNTERS = torch._dynamo.utils.counters
STAGES = {"try_out": train_gpt2}
STAGES |= dict.fromkeys("train_step evaluate_val_loss evaluate_hellaswag generate_samples".split(), train_gpt2)


def count_graphs(run, backend, stop_after=0):
    """{stage: graphs that are compiled in it} of run(); SIGTERM comes after so many steps."""
    torch._dynamo.reset()
    COUNTERS.clear()
    found, calls = collections.Counter(), collections.Counter()

    def counting(name, function):
        def call(*args, **options):
            before = COUNTERS["stats"]["unique_graphs"]
            result = function(*args, **options)
            found[name] += COUNTERS["stats"]["unique_graphs"] - before
            calls[name] += 1
            if name == "train_step" and calls[name] == stop_after:
                os.kill(os.getpid(), signal.SIGTERM)
            return result

        return call

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
        for name, owner in STAGES.items():
            monkeypatch.setattr(owner, name, counting(name, getattr(owner, name)))
        run()
    assert sum(found.values()) == COUNTERS["stats"]["unique_graphs"] and calls.keys() == STAGES.keys()
    return {name: number for name, number in found.items() if number}


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
    run = functools.partial(train, data, tmp_path / "out", **options)
    assert count_graphs(run, backend, stop_after=2) == {"try_out": 1, "train_step": 1}
    assert count_graphs(run, backend) == {"try_out": 1}
    assert not COUNTERS["graph_break"]
    train(data, tmp_path / "plain", **options | {"compile": False})
    for stream in ("train", "val"):
        assert np.allclose(losses(tmp_path / "plain", stream), losses(tmp_path / "out", stream), atol=1e-4)
    names = load_checkpoint(tmp_path / "out" / "model_00004.pt")["model"]
    assert not any("_orig_mod" in name or "module." in name for name in names)
