"""What the machine cannot do costs a warning or one line, for all ranks: precision, compiler, attention, memory."""

import os
import re
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import train_gpt2
from plumbing.cli.console import UserError
from plumbing.run.checkpoint import load_checkpoint
from plumbing.run.logs import read_starts
from plumbing.system import devices, limits
from plumbing.system.float8 import Float8Linear
from torch.nn import functional as F

from harness import log_lines, losses, needs, patched, refused, run, tiny_flags, tiny_model, train

OPTIONS = dict(batch_size=3, total_batch_size=18 * 16, max_steps=8, max_lr=1e-2, val_every=0)


@pytest.fixture(scope="module")
def plain(folder):
    """A run in float32 on a machine that can do all."""
    train(folder, folder.parent / "plain", **OPTIONS)
    return folder.parent / "plain"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", pytest.param("fp8", marks=needs("float8"))])
def test_half_precision_trains_and_keeps_float32_weights(dtype, plain, folder, out):
    train(folder, out, dtype=dtype, **OPTIONS)
    half, full = losses(out), losses(plain)
    assert half[0] == pytest.approx(full[0], abs=0.02)
    assert (half != full).any()
    assert half[-1] < half[0] - 1
    weights = load_checkpoint(out / "model_00008.pt")["model"]
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


@pytest.mark.gpt2
@pytest.mark.parametrize("dtype, expected", [(torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_the_residual_stream_is_in_bfloat16_or_float32(dtype, expected):
    """float16's numbers end at 65,504, which the sums of many blocks may reach."""
    seen = []
    model = tiny_model()
    model.transformer.h[0].register_forward_pre_hook(lambda block, args: seen.append(args[0].dtype))
    with torch.autocast("cpu", dtype):
        model(torch.tensor([[1, 2, 3]]))
    assert seen == [expected]


@needs("float8")
def test_samples_and_hellaswag_have_logits_in_full_precision():
    """They compute without gradients, and training and validation with them: one compiled graph serves both."""
    idx = torch.randint(320, (2, 16))
    model = tiny_model()
    exact, loss = model(idx, idx)
    model.lm_head = Float8Linear(model.lm_head)
    assert model.lm_head.weight is model.transformer.wte.weight
    with torch.no_grad():
        assert torch.equal(model(idx)[0], exact)
    rough = model(idx, idx)[1]
    assert rough != loss
    torch.testing.assert_close(rough, loss, rtol=0.02, atol=0)


@needs("float8")
def test_float8_trains_with_the_trainers_loss_whatever_it_is(data):
    """Such as one of logits with a cap, which is far below the plain one."""

    def capped(self, logits, targets):
        return plain(self, logits.float().tanh() / 100, targets)

    with patched(train_gpt2.GPT, "cross_entropy", capped) as plain:
        for dtype in ("bfloat16", "fp8"):
            train(data, dtype, dtype=dtype, max_steps=2, max_lr=0.1, val_every=0)
    expected = losses("bfloat16")
    assert losses("fp8") == pytest.approx(expected, rel=1e-3)
    assert expected[0] == pytest.approx(np.log(320), abs=0.01)


def no_flash():
    """Flash attention raises an error; the plain kernel does not."""
    sdpa = F.scaled_dot_product_attention

    def attention(*args, **options):
        if torch.backends.cuda.flash_sdp_enabled():
            raise RuntimeError("no kernel for this device")
        return sdpa(*args, **options)

    return patched(F, "scaled_dot_product_attention", attention)


def no_room(largest_B):
    """A GPT.forward with memory for the backward pass of so many rows."""
    forward = train_gpt2.GPT.forward

    def fail(grad):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    def limited(self, idx, *args, **options):
        logits, loss = forward(self, idx, *args, **options)
        if self.training and len(idx) > largest_B:
            loss.register_hook(fail)
        return logits, loss

    return patched(train_gpt2.GPT, "forward", limited)


def broken_compile(model, **options):
    def fail(*args, **kwargs):
        raise RuntimeError("no C++ compiler found\nand much more")

    return fail


def test_a_compiler_that_fails_costs_a_warning(plain, folder, out):
    with patched(torch, "compile", broken_compile):
        said = train(folder, out, **OPTIONS, compile=True)
    assert "warning: A training step failed with torch.compile (RuntimeError: no C++ compiler found)" in said
    assert log_lines(out) == log_lines(plain)


def test_a_batch_that_is_too_large_is_halved_with_warnings(plain, folder, out):
    """And lowered to what divides the 18 windows of a step."""
    with no_room(4):
        said = train(folder, out, **OPTIONS | dict(batch_size=18))
    assert re.findall("Out of memory. Continuing with --batch-size (.*).", said) == ["9", "3"]
    assert log_lines(out) == log_lines(plain)


def no_float8(*args, **options):
    raise NotImplementedError("Could not run 'aten::_scaled_mm'")


@pytest.mark.parametrize(
    "broken, dtype, said",
    [
        (patched(torch, "_scaled_mm", no_float8), "fp8", "does not support --dtype fp8"),
        (no_room(0), "float32", "does not fit in memory.*--activation-checkpointing"),
    ],
)
def test_what_the_machine_cannot_do_at_all_is_refused_in_one_line(broken, dtype, said, data, out):
    with broken:
        line = refused(train_gpt2.main, *tiny_flags(data, out, dtype=dtype))
    assert re.search(said, line)
    assert not out.exists()


def train_on_a_machine_that_can_do_less_on_rank_1(args):
    if os.environ["RANK"] == "0":
        train_gpt2.main(args)
        return
    with no_flash(), no_room(3):
        train_gpt2.main(args)


def test_what_one_rank_cannot_do_all_give_up(data, out):
    """Of its 4 sequences in a step, one rank has memory for 3 at a time: all take 2."""
    args = tiny_flags(data, out, batch_size=4, max_steps=1)
    said, _ = run(train_on_a_machine_that_can_do_less_on_rank_1, args, ranks=2)
    assert "B 2 * T 16 * ranks 2" in said
    assert said.count("warning: A training step failed with fused attention (on another rank)") == 1


@pytest.mark.gpt2
def test_recomputing_keeps_less_than_a_third(data, tmp_path):
    kept = []
    for recomputes in (False, True):
        out = tmp_path / f"{recomputes}"
        train(data, out, n_layer=6, n_embd=48, activation_checkpointing=recomputes, max_steps=1, val_every=0)
        kept.append(read_starts(out / "run.txt")[0]["ran"]["account"]["sequence"])
    assert 0 < kept[1] < kept[0] / 3


def test_more_memory_never_lowers_b_and_ranks_on_a_machine_share_it(data, out, monkeypatch):
    def planned_B(megabytes):
        monkeypatch.setattr(devices, "free_memory", lambda device: megabytes * 1e6)
        said = train(data, out, batch_size=8, dry_run=True)
        return int(re.findall(r"B (\d+) \*", said)[0])

    found = [planned_B(megabytes) for megabytes in (0.01, 1.5, 2, 100)]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (1, 8)
    assert len(set(found)) > 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert planned_B(2) < found[2]


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
    "version 1": (OLD | {f"{GROUPS}/cpu/{JOB}/cpu.cfs_quota_us": 10000}, 4096, 1),  # a part of a core
    "version 1 without a quota": (OLD | {f"{GROUPS}/cpu/{JOB}/cpu.cfs_quota_us": -1}, 4096, 192),
    "both versions, a line that is none, and a name beyond ASCII": (
        {
            "proc/self/cgroup": "what\n2:cpu:/a\n0::/gr\u00f6\u00dfe/b",
            f"{GROUPS}/unified/gr\u00f6\u00dfe/memory.max": 4096,
        },
        4096,
        192,
    ),
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_memory_and_cores_are_what_the_control_groups_of_the_process_leave(name, monkeypatch):
    files, memory, cores = SYSTEMS[name]
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(192), raising=False)
    meminfo = {"proc/meminfo": "MemTotal:  9 kB\nMemFree:   1 kB\nMemAvailable:    5 kB"}
    for path, text in (meminfo | files).items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(f"{text}\n", encoding="utf-8")
    assert devices.free_memory(torch.device("cpu"), Path()) == memory
    assert limits.num_cores(Path()) == cores


@pytest.mark.parametrize("cores, threads", [(8, 3), (2, 2)])
def test_torch_has_no_more_threads_than_the_quota_has_cores(cores, threads, monkeypatch):
    torch.set_num_threads(3)
    monkeypatch.setattr(devices, "num_cores", lambda: cores)
    devices.choose_device("cpu")
    assert torch.get_num_threads() == threads


@pytest.fixture
def machine(monkeypatch):
    """A machine on which torch finds no GPU. machine(listed): nvidia-smi prints this there."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return lambda listed: monkeypatch.setattr(devices, "output_of", lambda *command: listed)


GPU_LISTED = "GPU 0: NVIDIA L4 (UUID: GPU-1)"


@pytest.mark.parametrize(
    "listed, variables, asked, lines",
    [
        (GPU_LISTED, {}, "auto", 1),
        ("NVIDIA-SMI has failed", {}, "auto", 0),
        (GPU_LISTED, {"CUDA_VISIBLE_DEVICES": ""}, "auto", 0),
        (GPU_LISTED, {}, "cpu", 0),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_named(listed, variables, asked, lines, machine, capsys):
    """Unless the user hides it, or asks for another device."""
    machine(listed)
    with mock.patch.dict(os.environ, variables):
        assert devices.choose_device(asked) == "cpu"
    assert capsys.readouterr().err.count(f"PyTorch {torch.__version__} cannot use it") == lines


@pytest.mark.parametrize("name", ["cuda", "gpu", "gpu:1"])
def test_a_device_that_torch_does_not_find_is_refused(name, machine):
    with pytest.raises(UserError, match=f"PyTorch .* finds no device '{name}'.* requirements.txt"):
        devices.choose_device(name)


@pytest.mark.parametrize("capability, hip", [((8, 9), None), ((9, 4), "6.4")])
def test_amds_float8_is_another_format_than_that_of_ada_and_later(capability, hip, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda name: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert devices.has_float8(torch.device("cuda")) == (hip is None)


@pytest.mark.parametrize("is_fast, dtype", [(True, "bfloat16"), (False, "float32")])
def test_auto_is_bfloat16_on_a_cpu_that_computes_it_fast(is_fast, dtype, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: is_fast)
    assert devices.choose_dtype("auto", torch.device("cpu"), is_wide=True) == dtype
