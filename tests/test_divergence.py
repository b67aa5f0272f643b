"""A loss or a gradient norm that is not finite stops all ranks before the update; only float16 skips such a step."""

import contextlib
import math
import os

import numpy as np
import pytest
import train_gpt2
from plumbing.run.checkpoint import load_checkpoint, newest_checkpoint

from harness import (
    at_steps,
    error_in,
    losses,
    make_shards,
    patched,
    read_log,
    refused_run,
    run,
    steps_of,
    tiny_flags,
    train,
)


@contextlib.contextmanager
def spoiled(steps, spoil):
    """spoil(model, loss) replaces the loss in the first micro-step of these steps."""
    now = None

    def begin(step, parts):
        nonlocal now
        now = step

    def forward(self, *args, **options):
        nonlocal now
        logits, loss = whole_forward(self, *args, **options)
        if now in steps:
            now = None
            loss = spoil(self, loss)
        return logits, loss

    with at_steps(begin), patched(train_gpt2.GPT, "forward", forward) as whole_forward:
        yield


def train_with_a_nan_on_rank_1(args):
    """In the first micro-step of step 3."""
    steps = [3] if os.environ["RANK"] == "1" else []
    with spoiled(steps, lambda model, loss: loss * math.nan):
        train_gpt2.main(args)


def test_a_nan_on_one_rank_stops_both_before_the_update(data, out):
    """Step 3 of 8 windows, micro-step 0 of B = 2 on rank 1: windows 24 + (0 * 2 + 1) * 2 = 26, 27; tokens 416, 432."""
    args = tiny_flags(data, out, shuffle=False, batch_size=2, checkpoint_every=1, keep_checkpoints=9)
    text, text_of_rank_1 = run(train_with_a_nan_on_rank_1, args, ranks=2, ends=[2, 2])
    error = error_in(text)
    assert "Training diverged in step 3: the loss is nan" in error
    # and not token 384, rank 0's in that micro-step
    assert " tiny_train_000001.npy token 416, tiny_train_000001.npy token 432." in error
    # without a torchrun that ends it, rank 1 waits for rank 0 to speak and then says the same
    assert text_of_rank_1 == error + "\n"
    assert sorted(read_log(out)) == [0, 1, 2]
    assert steps_of(out) == [1, 2, 3]


def infinite(model, loss):
    """The same loss; the gradient of the embedding, which is AdamW's, becomes infinite, once."""

    def hook(grad):
        handle.remove()
        return grad * math.inf

    handle = model.transformer.wte.weight.register_hook(hook)
    return loss


def test_a_checkpoint_from_which_a_step_was_finite_outlives_one_from_which_none_was(data, out):
    """One is kept: the checkpoint of step 4 would be deleted after step 5, which fails.

    The checkpoint of step 3 is deleted after step 4, or a step later if that of step 4 is still being written.
    """
    options = dict(checkpoint_every=1, keep_checkpoints=1, optimizer="muon")
    branch = f"--branch-from {out / 'model_00004.pt'} --muon-lr LOWER --max-lr LOWER"
    with spoiled([5], infinite):
        refused_run(dict(data=data, out_dir=out, **options), "step 5", "gradient norm inf", ".npy token", branch)
    newest = newest_checkpoint(out)["model"]
    assert all(tensor.isfinite().all() for tensor in newest.values()), "it was stopped before the update"
    assert steps_of(out)[-2:] == [4, 5]
    train(data, out, **options)
    assert steps_of(out) == [12]


@pytest.mark.parametrize(
    "name, kind",
    [("train_000001.npy", "training"), ("train_000001.mask", "training"), ("val_000000.npy", "validation")],
)
def test_shards_and_masks_that_change_under_a_run_end_it_before_its_next_checkpoint(name, kind, out):
    data = make_shards("data", masks=True)

    def exchange(step, parts):
        if step == 5:
            # in place: np.save would cut the file to nothing first, under the threads that read ahead
            np.load(data / f"tiny_{name}", mmap_mode="r+")[:] = 1

    changes = dict(data=data, out_dir=out)
    with at_steps(exchange):
        refused_run(changes, f"The shards in {data} have changed")
    assert steps_of(out) == [4]
    refused_run(changes, f"The run in {out} cannot continue with", f"{kind} data", "start a branch")


def test_an_overflow_in_float16_skips_the_step_of_every_optimizer(data, out):
    options = dict(optimizer="muon", max_steps=3, val_every=1)
    train(data, "exact", **options)
    with spoiled([1], infinite):
        train(data, out, dtype="float16", **options)
    assert losses(out, "norm")[0] == pytest.approx(losses("exact", "norm")[0], rel=0.02)
    val = losses(out, "val")
    assert val[0] != val[1] == val[2] != val[3]
    # the scaler begins at 65,536
    assert load_checkpoint(out / "model_00003.pt")["scaler"]["scale"] == 2.0**15


def test_gradients_that_always_overflow_in_float16_stop_the_run(data, out):
    """After 16 steps, each of which halves the scale, it is no longer the scale that makes them overflow."""
    changes = dict(data=data, out_dir=out, dtype="float16", max_steps=30)
    with spoiled(range(30), infinite):
        refused_run(changes, "Training diverged in step 16: ")
