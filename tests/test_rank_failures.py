"""A failure on one rank ends all of them with its message, and ranks that do not agree or meet do not train."""

import itertools
import os
import shutil
import threading
import time
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import train_gpt2
from plumbing.cli.console import UserError
from plumbing.system import devices, distributed

from harness import (
    error_in,
    flags,
    forked_torchrun,
    losses,
    make_shards,
    patched,
    read_log,
    run,
    steps_of,
    tiny_flags,
    train,
)


def train_alone_otherwise(args, changes, version=torch.__version__, data=None):
    """Train with other flags, another version of torch or other data on rank 1."""
    if os.environ["RANK"] == "1":
        at = args.index("--data") + 1
        args[at] = str(data or args[at])
        args += flags(**changes)
        torch.__version__ = version
    train_gpt2.main(args)


def test_ranks_that_differ_stop_and_say_who_differs_in_what(folder, tmp_path):
    args = tiny_flags(folder, tmp_path / "out", max_steps=6)
    other = make_shards(tmp_path / "other", seed=1)
    flags_differ = "Rank 1 does not agree with rank 0: --max-lr is 0.01 instead of 0.003; the version of torch"
    cases = [(({"max_lr": 0.01}, "2.0"), flags_differ)]
    # also a flag that rank 0 does not have
    cases.append((({"weight_decay": 0.5},), "Rank 1 does not agree with rank 0: --weight-decay is 0.5 instead of"))
    for split, what in (("train_000001", "training"), ("val_000000", "validation")):
        mixed = shutil.copytree(folder, tmp_path / what)
        shutil.copy(other / f"tiny_{split}.npy", mixed)
        cases.append((({}, torch.__version__, mixed), f"Rank 1 does not agree with rank 0: the {what} data is "))
    odd = tiny_flags(folder, tmp_path / "out", total_batch_size=9 * 16)
    said, _ = run(train_gpt2.main, odd, ranks=2, ends=[2, 2])
    assert "Use a number of ranks that divides 9" in error_in(said)
    for otherwise, words in cases:
        said, _ = run(train_alone_otherwise, args, *otherwise, ranks=2, ends=[2, 2])
        assert words in error_in(said) and not (tmp_path / "out").exists()


def train_on_a_gpu_before_ampere_on_rank_1(args):
    """As far as dtypes are concerned."""

    def choose(name, device, is_wide=False):
        with patched(torch.cuda, "get_device_capability", lambda device: (7, 5)):
            return choose_dtype(name, torch.device("cuda"), is_wide)

    choose_dtype = devices.choose_dtype
    with patched(devices, "choose_dtype", choose if os.environ["RANK"] == "1" else choose_dtype):
        train_gpt2.main(args)


def test_ranks_do_not_train_in_two_dtypes(folder, tmp_path):
    """The mean of their gradients would be wrong, as float16's are scaled. Rank 0 chooses; else there is no run."""
    args = tiny_flags(folder, tmp_path / "out", dtype="bfloat16")
    _, said = run(train_on_a_gpu_before_ampere_on_rank_1, args, ranks=2, ends=[None, 2])
    assert "does not support --dtype bfloat16" in error_in(said) and not (tmp_path / "out").exists()
    args = tiny_flags(folder, tmp_path / "out", dtype="auto", max_steps=2)
    run(train_on_a_gpu_before_ampere_on_rank_1, args, ranks=2)
    train(folder, tmp_path / "one", max_steps=2)
    assert np.allclose(losses(tmp_path / "out"), losses(tmp_path / "one"), atol=2e-5, rtol=0)


# rank 1 of 2, and nobody listens where it looks for rank 0
ALONE = dict(RANK="1", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")


@pytest.mark.parametrize(
    "environment, device, words",
    [
        ({"WORLD_SIZE": "two"}, "cpu", "is 'two'"),
        ({"RANK": "0"}, "cpu", "WORLD_SIZE expe"),
        (ALONE, "cpu", "127.0.0.1, 1.* Start all ranks within a minute"),
        # of GPUs, before the ranks wait for each other
        (ALONE, "cuda:1", "--device is cuda:1, but several ranks need a GPU each"),
        (ALONE, "cuda", "2 process.* on this machine.* 1 GPU.*--nproc_per_node=1"),
    ],
)
def test_ranks_that_cannot_meet_do_not_train(environment, device, words, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "choose_device", lambda name: name)
    monkeypatch.setattr(distributed, "CONNECT_SECONDS", 0.5)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=words):
        train_gpt2.main(tiny_flags(folder, tmp_path / "out", device=device))
    assert not (tmp_path / "out").exists()


def train_with_a_defect_on_rank_1(args):
    """Rank 1 fails alone after its trial, in its fifth pass; shutting down waits for the other, as NCCL's does."""
    passes = itertools.count()

    def forward(self, *args, **options):
        if os.environ["RANK"] == "1" and next(passes) == 4:
            raise ValueError("a defect")
        return whole_forward(self, *args, **options)

    with patched(train_gpt2.GPT, "forward", forward) as whole_forward:
        with patched(torch.distributed, "destroy_process_group", lambda: threading.Event().wait()):
            train_gpt2.main(args)


def test_a_rank_that_fails_alone_says_why_and_ends_at_once(data, tmp_path):
    args = tiny_flags(data, tmp_path / "out", batch_size=2)
    _, said = run(train_with_a_defect_on_rank_1, args, ranks=2, ends=[None, 1])
    assert "ValueError: a defect" in said


def train_with_blocks_skipped_on_rank_1(args):
    """Rank 1 leaves the blocks out in its step 3, as stochastic depth does now and then, and rank 0 waits for them."""

    def skip_in_step_3(step, *rest):
        skips = os.environ["RANK"] == "1" and step == 3
        with patched(train_gpt2.Block, "forward", lambda self, x, cache: x) if skips else nullcontext():
            return train_step(step, *rest)

    with patched(train_gpt2, "train_step", skip_in_step_3) as train_step:
        train_gpt2.main(args)


def test_where_a_parameter_has_no_gradient_on_one_rank_all_ranks_end_and_the_run_goes_on_from_its_checkpoint(
    data, tmp_path
):
    args = tiny_flags(data, tmp_path / "out", checkpoint_every=1, keep_checkpoints=9)
    run(train_with_blocks_skipped_on_rank_1, args, ranks=2, ends=[None, None])
    assert steps_of(tmp_path / "out") == [1, 2, 3] and sorted(read_log(tmp_path / "out")) == [0, 1, 2]


def train_late_on_rank_0(args):
    if os.environ["RANK"] == "0":
        time.sleep(1)  # imports take longer here
    train_gpt2.main(args)


def test_under_torchrun_one_rank_prints_the_line(data, tmp_path):
    """Rank 0, even where it comes later than the others, whose end makes torchrun end it."""
    args = tiny_flags(data, tmp_path / "out", n_layer=0)
    [said] = run(forked_torchrun, train_late_on_rank_0, args, ends=[None])
    assert "--n-layer is 0" in error_in(said), said
    assert not (tmp_path / "out").exists()
