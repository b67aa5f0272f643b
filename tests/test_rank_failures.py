"""A failure on one rank ends all of them with its message, and ranks that do not agree or meet do not train."""

import datetime
import os
import shutil
import threading
import time

import numpy as np
import pytest
import torch
import train_gpt2
from plumbing.cli.console import UserError
from plumbing.system import devices, distributed

from edits import GELU, train_changed, write_trainer
from harness import (
    at_steps,
    change_meta,
    error_in,
    forked_torchrun,
    losses,
    read_log,
    run,
    steps_of,
    tiny_flags,
    train,
)


def train_as(args_of_ranks):
    """Each rank has its own flags."""
    train_gpt2.main(args_of_ranks[int(os.environ["RANK"])])


def check_disagreement(said, out, *words):
    """Rank 1 differs in each of these, says rank 0, and nothing is written."""
    error = error_in(said[0])
    assert error.startswith("error: Rank 1 does not agree with rank 0: ")
    for each in words:
        assert each in error
    assert not out.exists()


def test_ranks_with_different_data_are_refused(folder, out, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    for path in copy.glob("*.npy"):
        np.save(path, np.load(path)[::-1])
    change_meta(copy, tokenizer="bytes+chat")
    said = run(train_as, [tiny_flags(data, out) for data in (folder, copy)], ranks=2, ends=[2, 2])
    check_disagreement(
        said, out, "the training data is ", "the validation data is ", "the tokenizer is bytes+chat instead of bytes."
    )


def train_with_other_versions_on_rank_1(paths, args):
    rank = int(os.environ["RANK"])
    if rank == 1:
        torch.__version__ = "2.0"
        args = [*args, "--weight-decay", "0.5"]
    train_changed(paths[rank], args)


def test_ranks_with_different_flags_and_versions_are_refused(folder, out, tmp_path):
    paths = []
    for activation in ("relu", "tanh"):
        (tmp_path / activation).mkdir()
        edit = {GELU: f"self.c_proj(torch.{activation}(self.c_fc(x)))"}
        paths.append(write_trainer(tmp_path / activation / "train_gpt2.py", edit))
    said = run(train_with_other_versions_on_rank_1, paths, tiny_flags(folder, out), ranks=2, ends=[2, 2])
    check_disagreement(
        said, out, "--weight-decay is 0.5 instead of", "version of train_gpt2.py is ", "torch is 2.0 instead"
    )


def test_windows_that_ranks_cannot_share_are_refused(folder, out):
    said, _ = run(train_gpt2.main, tiny_flags(folder, out, total_batch_size=9 * 16), ranks=2, ends=[2, 2])
    error = error_in(said)
    assert "Use a number of ranks that divides 9 or, in a new run or a branch, --total-batch-size 128." in error


def fail_on_rank_1(args):
    def fail(step, parts):
        if step == 3 and parts.world.rank == 1:
            raise UserError("The disk is gone.")

    with at_steps(fail):
        train_gpt2.main(args)


@pytest.mark.parametrize("fault", ["missing", "The disk is gone."])
def test_a_rank_that_is_not_at_fault_says_so_in_one_line(fault, folder, out):
    """As where one node lacks the data, or in a step."""
    function, args = fail_on_rank_1, tiny_flags(folder, out)
    if fault == "missing":
        function, args = train_as, [args, tiny_flags(folder.parent / "missing", out)]
    first, second = run(function, args, ranks=2, ends=[2, 2])
    assert first.splitlines()[-1] == "error: Another rank has ended. Its own output says why."
    assert fault in error_in(second)
    assert "Traceback" not in first + second


def train_on_a_gpu_before_ampere_on_rank_1(args):
    """As far as dtypes are concerned."""
    choose_dtype = devices.choose_dtype
    if os.environ["RANK"] == "1":
        torch.cuda.get_device_capability = lambda device: (7, 5)
        devices.choose_dtype = lambda name, device, is_wide=False: choose_dtype(name, torch.device("cuda"), is_wide)
    train_gpt2.main(args)


def test_a_dtype_that_one_rank_lacks_is_refused(folder, out):
    args = tiny_flags(folder, out, dtype="bfloat16")
    _, said = run(train_on_a_gpu_before_ampere_on_rank_1, args, ranks=2, ends=[None, 2])
    assert "does not support --dtype bfloat16" in error_in(said)
    assert not out.exists()


def test_all_ranks_train_in_the_dtype_of_rank_0(folder, out):
    """The mean of their gradients would be wrong, as float16's are scaled."""
    options = dict(max_steps=2, val_every=0)
    run(train_on_a_gpu_before_ampere_on_rank_1, tiny_flags(folder, out, dtype="auto", **options), ranks=2)
    train(folder, "one", **options)
    assert losses(out) == pytest.approx(losses("one"), abs=2e-5)


# rank 1 of 2, and nobody listens where it looks for rank 0
ALONE = dict(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")


@pytest.mark.parametrize(
    "environment, words",
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', but it must be a whole number, 1 or more"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0', but it must be a whole number, 1 or more"),
        ({"RANK": "0"}, "WORLD_SIZE expe"),
        ({"SLURM_NTASKS": "2"}, "SLURM_NTASKS is 2, but without torchrun each process would train by itself"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "WORLD_SIZE": "1"}, "OMPI_COMM_WORLD_SIZE is 2"),
        ({"PMI_SIZE": "2"}, "PMI_SIZE is 2"),
        (ALONE, "127.0.0.1, 1.* Start all ranks within a minute"),
    ],
)
def test_ranks_that_cannot_meet_do_not_train(environment, words, folder, out, monkeypatch):
    monkeypatch.setattr(distributed, "CONNECT_SECONDS", 0.5)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=words):
        train_gpt2.main(tiny_flags(folder, out))
    assert not out.exists()


def train_with_a_defect_on_rank_1(args):
    """Rank 1 fails alone in its step 2; shutting down waits for the other, as NCCL's does."""

    def fail(step, parts):
        if step == 2 and parts.world.rank == 1:
            raise ValueError("a defect")

    torch.distributed.destroy_process_group = threading.Event().wait
    with at_steps(fail):
        train_gpt2.main(args)


def test_a_rank_that_fails_alone_ends_at_once_with_its_error(data, out):
    args = tiny_flags(data, out, batch_size=2)
    _, said = run(train_with_a_defect_on_rank_1, args, ranks=2, ends=[None, 1])
    assert "ValueError: a defect" in said


def train_with_blocks_skipped_on_rank_1(args):
    """Rank 1 leaves the blocks out from its step 3 on, as stochastic depth may, and rank 0 waits for them."""

    def skip(step, parts):
        if step == 3 and parts.world.rank == 1:
            train_gpt2.Block.forward = lambda self, x, cache: x

    with at_steps(skip):
        train_gpt2.main(args)


def test_a_parameter_without_a_gradient_on_one_rank_ends_all_ranks(data, out):
    args = tiny_flags(data, out, checkpoint_every=1, keep_checkpoints=9)
    run(train_with_blocks_skipped_on_rank_1, args, ranks=2, ends=[None, None])
    assert sorted(read_log(out)) == [0, 1, 2]
    assert steps_of(out) == [1, 2, 3]


def train_with_a_pause_on_rank_1(args):
    def pause(step, parts):
        if step == 2 and parts.world.rank == 1:
            time.sleep(3)

    distributed.STEP_TIMEOUT = datetime.timedelta(seconds=1)
    with at_steps(pause):
        train_gpt2.main(args)


@pytest.mark.skipif(not hasattr(torch.distributed.ProcessGroup, "set_timeout"), reason="an older torch")
def test_from_the_second_step_on_ranks_do_not_wait_long_for_one_that_hangs(data, out):
    first, _ = run(train_with_a_pause_on_rank_1, tiny_flags(data, out), ranks=2, ends=[None, None])
    assert "Timed out waiting 1000ms" in first
    assert len(read_log(out)) <= 2


def train_on_slow_data(args):
    def wait(step, parts):
        parts.loader.seconds_waited = 100.0 * parts.world.rank

    with at_steps(wait):
        train_gpt2.main(args)


def test_the_rank_that_waits_longest_for_its_data_is_named(data, out):
    said, _ = run(train_on_slow_data, tiny_flags(data, out, max_steps=1), ranks=2)
    assert "note: Rank 1 has waited for its data, 1:40 so far." in said


def train_late_on_rank_0(args):
    if os.environ["RANK"] == "0":
        time.sleep(1)  # imports take longer here
    train_gpt2.main(args)


def test_under_torchrun_one_rank_prints_the_line(data, out):
    """Rank 0, even where it comes later than the others, whose end makes torchrun end it."""
    args = tiny_flags(data, out, n_layer=0)
    [said] = run(forked_torchrun, train_late_on_rank_0, args, ends=[None])
    assert "--n-layer is 0" in error_in(said), said
    assert not out.exists()
