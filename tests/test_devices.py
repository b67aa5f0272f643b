"""What the machine cannot do costs a warning or one line, for all ranks: precision, compiler, attention, memory."""

import contextlib
import os
import re

import numpy as np
import pytest
import torch
import train_gpt2
from plumbing.cli.console import UserError
from plumbing.run.checkpoint import load_checkpoint
from plumbing.run.logs import read_starts
from plumbing.system import devices, limits
from plumbing.system.devices import has_float8
from plumbing.system.float8 import Float8Linear
from torch.nn import functional as F

from harness import losses, needs, patched, read_log, refused, run, tiny_flags, tiny_model, train


@pytest.fixture(scope="module")
def full(folder):
    """The losses of a run in float32."""
    train(folder, folder.parent / "full", dtype="float32", max_steps=24, max_lr=1e-2, val_every=0)
    return losses(folder.parent / "full")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", pytest.param("fp8", marks=needs("float8"))])
def test_half_precision_trains_and_keeps_float32_weights(dtype, folder, full, tmp_path):
    train(folder, tmp_path / "half", dtype=dtype, max_steps=24, max_lr=1e-2, val_every=0)
    half = losses(tmp_path / "half")
    assert len(half) == 24 and np.isfinite(half).all()
    assert half[0] == pytest.approx(full[0], abs=0.02) and (half != full).any()
    assert half[-1] < half[0] - 1
    checkpoint = load_checkpoint(tmp_path / "half" / "model_00024.pt")
    assert all(tensor.dtype == torch.float32 for tensor in checkpoint["model"].values())
    assert bool(checkpoint["scaler"]) == (dtype == "float16")


@pytest.mark.gpt2
@pytest.mark.parametrize("dtype, expected", [(torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_the_residual_stream_is_in_bfloat16_or_float32(dtype, expected):
    """float16's numbers end at 65,504, which the sums of many blocks may reach."""
    model, seen = tiny_model(), []
    model.transformer.h[1].register_forward_pre_hook(lambda block, args: seen.append(args[0].dtype))
    with torch.autocast("cpu", dtype):
        model(torch.tensor([[1, 2, 3]]))
    assert seen == [expected]


@needs("float8")
def test_samples_and_hellaswag_have_logits_in_full_precision():
    """They compute without gradients, and training and validation with them: one compiled graph serves both."""
    model, idx = tiny_model(), torch.randint(320, (2, 16))
    exact, loss = model(idx, idx)
    model.lm_head = Float8Linear(model.lm_head)
    assert model.lm_head.weight is model.transformer.wte.weight
    with torch.no_grad():
        assert torch.equal(model(idx)[0], exact)
    rough = model(idx, idx, return_logits=False)[1]
    assert rough != loss
    torch.testing.assert_close(rough, loss, rtol=0.02, atol=0)


@needs("float8")
def test_float8_trains_with_the_trainers_loss_whatever_it_is(data, tmp_path):
    """Such as one of logits with a cap, which is far below the plain one."""

    def capped(self, logits, targets):
        return plain(self, logits.float().tanh() / 100, targets)

    with patched(train_gpt2.GPT, "cross_entropy", capped) as plain:
        for dtype in ("bfloat16", "fp8"):
            train(data, tmp_path / dtype, dtype=dtype, max_steps=2, max_lr=0.1)
    expected = losses(tmp_path / "bfloat16")
    assert losses(tmp_path / "fp8") == pytest.approx(expected, rel=1e-3)
    assert expected[0] == pytest.approx(np.log(320), abs=0.01)


def no_flash():
    """Flash attention raises; the plain kernel, which is what is left, does not."""
    sdpa = F.scaled_dot_product_attention

    def attention(q, k, v, **options):
        if torch.backends.cuda.flash_sdp_enabled():
            raise RuntimeError("no kernel for this device")
        return sdpa(q, k, v, **options)

    return patched(F, "scaled_dot_product_attention", attention)


def no_room(largest_B):
    """A GPT.forward that has memory for so many rows in training."""
    forward = train_gpt2.GPT.forward

    def limited(self, idx, *args, **options):
        if self.training and len(idx) > largest_B:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return forward(self, idx, *args, **options)

    return patched(train_gpt2.GPT, "forward", limited)


def broken_compile(model, **options):
    def fail(*args, **kwargs):
        raise RuntimeError("no C++ compiler found\nand much more")

    return fail


def test_a_compiler_that_fails_and_a_batch_that_is_too_large_cost_warnings_and_leave_the_losses(data, tmp_path):
    train(data, tmp_path / "small", batch_size=2)
    with patched(torch, "compile", broken_compile), no_room(2):
        printed = train(data, tmp_path / "large", batch_size=8, compile=True)
    warnings = [line for line in printed.splitlines() if "warning" in line]
    said = ["no C++ compiler found", "Out of memory. Continuing with --batch-size 4", "--batch-size 2"]
    assert len(warnings) == 3 and all(any(words in line for line in warnings) for words in said)
    for stream in ("train", "val"):
        assert read_log(tmp_path / "small", stream) == read_log(tmp_path / "large", stream)


def no_float8(*args, **options):
    raise NotImplementedError("Could not run 'aten::_scaled_mm'")


@pytest.mark.parametrize(
    "broken, dtype, said",
    [
        (patched(torch, "_scaled_mm", no_float8), "fp8", "does not support --dtype fp8"),
        (no_room(0), "float32", "does not fit in memory.*--activation-checkpointing"),
    ],
)
def test_what_the_machine_cannot_do_at_all_is_refused_in_one_line(broken, dtype, said, data, tmp_path):
    with broken:
        line = refused(train_gpt2.main, *tiny_flags(data, tmp_path / "out", dtype=dtype))
    assert re.search(said, line) and not (tmp_path / "out").exists()


def train_on_a_machine_that_can_do_less_on_rank_1(args):
    with contextlib.ExitStack() as stack:
        if os.environ["RANK"] == "1":
            stack.enter_context(no_flash())
            stack.enter_context(no_room(3))
        train_gpt2.main(args)


def test_what_one_rank_cannot_do_all_give_up(data, tmp_path):
    """Of its 4 sequences in a step, one rank has memory for 3 at a time: all take 2."""
    args = tiny_flags(data, tmp_path / "two", batch_size=4, max_steps=5)
    said, _ = run(train_on_a_machine_that_can_do_less_on_rank_1, args, ranks=2)
    assert "B 2 * T 16 * ranks 2" in said
    assert said.count("warning: A training step failed with fused attention (on another rank)") == 1
    train(data, tmp_path / "one", batch_size=4, max_steps=5)
    assert np.allclose(losses(tmp_path / "one"), losses(tmp_path / "two"), atol=2e-5, rtol=0)


@pytest.mark.gpt2
def test_recomputing_keeps_less_than_a_third(data, tmp_path):
    kept = []
    for recomputes in (False, True):
        out = tmp_path / f"{recomputes}"
        train(data, out, n_layer=6, n_embd=48, activation_checkpointing=recomputes, max_steps=1)
        kept.append(read_starts(out / "run.txt")[0]["ran"]["kept_bytes"])
    assert 0 < kept[1] < kept[0] / 3


@pytest.fixture
def planned_B(data, tmp_path, monkeypatch):
    """planned_B(megabytes, **options): B in a dry run on a machine with this memory."""

    def plan(megabytes, **options):
        monkeypatch.setattr(devices, "free_memory", lambda device: megabytes * 1e6)
        said = train(data, tmp_path / "out", batch_size=8, dry_run=True, **options)
        return int(re.findall(r"B (\d+) \*", said)[0])

    return plan


def test_more_memory_never_lowers_b(planned_B):
    found = [planned_B(megabytes) for megabytes in (0.01, 0.6, 0.8, 1, 1.5, 2, 100)]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (1, 8)
    assert len(set(found)) > 2


def test_ranks_on_a_machine_share_its_memory(planned_B, monkeypatch):
    alone = planned_B(1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert planned_B(1) < alone


def test_a_dry_run_plans_for_the_compiler_that_the_run_will_use(planned_B):
    assert planned_B(0.8, compile=True) > planned_B(0.8)


def test_a_batch_that_cannot_fit_is_not_tried(data, tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "free_memory", lambda device: 7e5)
    said = train(data, tmp_path / "out", max_steps=1, batch_size=8)
    assert "B 1 *" in said and "Out of memory" not in said


GROUPS, JOB = "sys/fs/cgroup", "system.slice/job_1/step_0"
OLD = {
    "proc/self/cgroup": f"3:cpu,cpuacct:/{JOB}\n4:memory:/{JOB}\n1:name=x:/",
    f"{GROUPS}/memory/{JOB}/memory.limit_in_bytes": 4096,
    f"{GROUPS}/memory/memory.limit_in_bytes": 2**63 - 4096,
    f"{GROUPS}/cpu/{JOB}/cpu.cfs_period_us": 100000,
}
# what Linux says of control groups, and how many bytes and cores that leaves of 5 KB and 192
SYSTEMS = {
    "no limits": ({f"{GROUPS}/memory.max": 999999, f"{GROUPS}/cpu.max": "max 9"}, 5120, 192),  # that count
    # whose name is the host's, and not there
    "a container's own group": (
        {"proc/self/cgroup": "0::/../x", f"{GROUPS}/memory.max": 4096, f"{GROUPS}/cpu.max": "150000 100000"},
        4096,
        2,
    ),
    "the smallest of those around it": (
        {"proc/self/cgroup": f"0::/{JOB}"}
        | {f"{GROUPS}/{JOB}/memory.max": "max", f"{GROUPS}/system.slice/memory.max": 4096}
        | {f"{GROUPS}/{JOB}/cpu.max": "900000 100000", f"{GROUPS}/system.slice/cpu.max": "300000 100000"}
        | {f"{GROUPS}/another/memory.max": 1, f"{GROUPS}/another/cpu.max": "1 1"},
        4096,
        3,
    ),
    "a line that is none, and a name beyond ASCII": (
        {"proc/self/cgroup": "what\n0::/gr\u00f6\u00dfe", f"{GROUPS}/gr\u00f6\u00dfe/memory.max": 4096},
        4096,
        192,
    ),
    "version 1": (OLD | {f"{GROUPS}/cpu/{JOB}/cpu.cfs_quota_us": 10000}, 4096, 1),  # a part of a core
    "version 1 without a quota": (OLD | {f"{GROUPS}/cpu/{JOB}/cpu.cfs_quota_us": -1}, 4096, 192),
    "both versions": (
        {"proc/self/cgroup": f"2:cpu:/a\n0::/{JOB}", f"{GROUPS}/unified/system.slice/memory.max": 4096},
        4096,
        192,
    ),
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_memory_and_cores_are_what_the_control_groups_of_the_process_leave(name, tmp_path, monkeypatch):
    files, memory, cores = SYSTEMS[name]
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(192), raising=False)
    meminfo = {"proc/meminfo": "MemTotal:  9 kB\nMemFree:   1 kB\nMemAvailable:    5 kB"}
    for path, text in (meminfo | files).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{text}\n", encoding="utf-8")
    assert (devices.free_memory(torch.device("cpu"), tmp_path), limits.num_cores(tmp_path)) == (memory, cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3}, raising=False)
    assert limits.num_cores(tmp_path) == 1


def test_torch_has_no_more_threads_than_the_quota_has_cores(monkeypatch):
    torch.set_num_threads(3)
    for cores, threads in ((8, 3), (2, 2)):
        monkeypatch.setattr(devices, "num_cores", lambda cores=cores: cores)
        devices.choose_device("cpu")
        assert torch.get_num_threads() == threads


def test_a_gpu_that_torch_cannot_use_is_not_passed_over_in_silence(monkeypatch, capsys):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for listed, lines in (("NVIDIA-SMI has failed", 0), ("GPU 0: NVIDIA L4 (UUID: GPU-1)", 1)):
        monkeypatch.setattr(devices, "output_of", lambda *command, listed=listed: listed)
        assert devices.choose_device("auto") == devices.choose_device("cpu") == "cpu"
        assert capsys.readouterr().err.count(f"PyTorch {torch.__version__} cannot use it") == lines
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the user hides it
    assert devices.choose_device("auto") == "cpu" and not capsys.readouterr().err
    for name in ("cuda", "gpu", "gpu:1"):
        with pytest.raises(UserError, match=f"PyTorch .* finds no device '{name}'.* requirements.txt"):
            devices.choose_device(name)


def test_amds_float8_is_another_format(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda name: (9, 4))
    for hip in (None, "6.4"):
        monkeypatch.setattr(torch.version, "hip", hip)
        assert has_float8(torch.device("cuda")) == (hip is None)
