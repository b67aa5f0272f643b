"""A failure on one rank ends all of them with its message, and ranks that do not agree or meet do not train."""

import datetime
import itertools
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

import edits
from edits import train_changed
from harness import (
    at_steps,
    change_meta,
    error_in,
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


def train_as(args_of_ranks):
    """Each rank has its own flags."""
    train_gpt2.main(args_of_ranks[int(os.environ["RANK"])])


@pytest.fixture
def refusal_of_two(folder, out):
    """refusal_of_two(**changes): the error where rank 1 has these settings and rank 0 does not; neither trains."""

    def refuse(**changes):
        args = [tiny_flags(folder, out), tiny_flags(**dict(data=folder, out_dir=out) | changes)]
        said, _ = run(train_as, args, ranks=2, ends=[2, 2])
        assert not out.exists()
        return error_in(said)

    return refuse


def test_a_flag_that_rank_0_does_not_have_is_refused(refusal_of_two):
    assert "Rank 1 does not agree with rank 0: --weight-decay is 0.5 instead of" in refusal_of_two(weight_decay=0.5)


@pytest.mark.parametrize("name, kind", [("train_000001", "training"), ("val_000000", "validation")])
def test_ranks_with_different_data_are_refused(name, kind, refusal_of_two, folder, tmp_path):
    mixed = shutil.copytree(folder, tmp_path / "mixed")
    other = make_shards(tmp_path / "other", seed=1)
    shutil.copy(other / f"tiny_{name}.npy", mixed)
    assert f"Rank 1 does not agree with rank 0: the {kind} data is " in refusal_of_two(data=mixed)


def test_ranks_whose_data_have_different_tokenizers_are_refused(refusal_of_two, folder, tmp_path):
    chats = shutil.copytree(folder, tmp_path / "chats")
    change_meta(chats, tokenizer="bytes+chat")
    said = refusal_of_two(data=chats)
    assert "Rank 1 does not agree with rank 0: the tokenizer is bytes+chat instead of bytes." in said


def train_own_file(paths, args):
    train_changed(paths[int(os.environ["RANK"])], args)


def test_ranks_with_different_code_are_refused(folder, out, tmp_path):
    paths = []
    for name, edit in (("ours", {}), ("theirs", {edits.GELU: "self.c_proj(self.c_fc(x))"})):
        (tmp_path / name).mkdir()
        paths.append(edits.write_trainer(tmp_path / name / "train_gpt2.py", edit))
    said, _ = run(train_own_file, paths, tiny_flags(folder, out), ranks=2, ends=[2, 2])
    assert "Rank 1 does not agree with rank 0: the version of train_gpt2.py is" in error_in(said)


def train_with_an_older_torch_on_rank_1(args):
    if os.environ["RANK"] == "1":
        torch.__version__ = "2.0"
    train_gpt2.main(args)


def test_ranks_with_different_versions_of_torch_are_refused(folder, out):
    said, _ = run(train_with_an_older_torch_on_rank_1, tiny_flags(folder, out), ranks=2, ends=[2, 2])
    assert "Rank 1 does not agree with rank 0: the version of torch is 2.0 instead" in error_in(said)


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


@pytest.mark.parametrize("when", ["before the first step", "in a step"])
def test_a_rank_that_is_not_at_fault_says_so_in_one_line(when, folder, out):
    """As where one node lacks the data."""
    function, args = fail_on_rank_1, tiny_flags(folder, out)
    if when == "before the first step":
        function, args = train_as, [args, tiny_flags(folder.parent / "missing", out)]
    first, second = run(function, args, ranks=2, ends=[2, 2])
    assert first.splitlines()[-1] == "error: Another rank has ended. Its own output says why."
    assert "missing" in error_in(second) or "The disk is gone." in error_in(second)
    assert "Traceback" not in first + second


def train_on_a_gpu_before_ampere_on_rank_1(args):
    """As far as dtypes are concerned."""
    choose_dtype = devices.choose_dtype

    def choose(name, device, is_wide=False):
        with patched(torch.cuda, "get_device_capability", lambda device: (7, 5)):
            return choose_dtype(name, torch.device("cuda"), is_wide)

    if os.environ["RANK"] == "1":
        devices.choose_dtype = choose
    train_gpt2.main(args)


def test_a_dtype_that_one_rank_lacks_is_refused(folder, out):
    args = tiny_flags(folder, out, dtype="bfloat16")
    _, said = run(train_on_a_gpu_before_ampere_on_rank_1, args, ranks=2, ends=[None, 2])
    assert "does not support --dtype bfloat16" in error_in(said)
    assert not out.exists()


def test_all_ranks_train_in_the_dtype_of_rank_0(folder, out, tmp_path):
    """The mean of their gradients would be wrong, as float16's are scaled."""
    run(train_on_a_gpu_before_ampere_on_rank_1, tiny_flags(folder, out, dtype="auto", max_steps=2), ranks=2)
    train(folder, tmp_path / "one", max_steps=2)
    assert np.allclose(losses(out), losses(tmp_path / "one"), atol=2e-5, rtol=0)


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
    """Rank 1 fails alone after its trial, in its fifth pass; shutting down waits for the other, as NCCL's does."""
    passes = itertools.count()

    def forward(self, *args, **options):
        if os.environ["RANK"] == "1" and next(passes) == 6:
            raise ValueError("a defect")
        return whole_forward(self, *args, **options)

    with patched(train_gpt2.GPT, "forward", forward) as whole_forward:
        with patched(torch.distributed, "destroy_process_group", lambda: threading.Event().wait()):
            train_gpt2.main(args)


def test_a_rank_that_fails_alone_ends_at_once_with_its_error(data, out):
    args = tiny_flags(data, out, batch_size=2)
    _, said = run(train_with_a_defect_on_rank_1, args, ranks=2, ends=[None, 1])
    assert "ValueError: a defect" in said


def train_with_blocks_skipped_on_rank_1(args):
    """Rank 1 leaves the blocks out from its step 3 on, as stochastic depth may, and rank 0 waits for them."""

    def skip(step, parts):
        if os.environ["RANK"] == "1" and step == 3:
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

    with patched(distributed, "STEP_TIMEOUT", datetime.timedelta(seconds=1)), at_steps(pause):
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
