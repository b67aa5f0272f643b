"""What the machine cannot do costs a warning or one line, for all ranks: precision, compiler, attention, memory."""

import contextlib
import math
import os
import re
import types

import numpy as np
import pytest
import torch
import train_gpt2
from plumbing.cli.console import UserError
from plumbing.run.checkpoint import load_checkpoint
from plumbing.system import autofit, devices
from plumbing.system.devices import has_float8
from plumbing.system.distributed import World
from torch.nn import functional as F

from harness import losses, patched, read_log, refused, run, tiny_flags, tiny_model, train

needs_float8 = pytest.mark.skipif(
    not has_float8(torch.device("cpu")), reason="this processor does not multiply float8 matrices"
)


@pytest.fixture(scope="module")
def full(folder):
    """The losses of a run in float32."""
    train(folder, folder.parent / "full", dtype="float32", max_steps=24, max_lr=1e-2, val_every=0)
    return losses(folder.parent / "full")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", pytest.param("fp8", marks=needs_float8)])
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


@needs_float8
def test_only_training_computes_the_logits_in_8_bits():
    model, idx = tiny_model(), torch.randint(320, (2, 16))
    logits = model(idx)[0]
    exact = model(idx, idx, return_logits=False)[1]
    model.float8 = True
    assert torch.equal(model(idx)[0], logits)
    rough = model(idx, idx, return_logits=False)[1]
    assert rough != exact
    torch.testing.assert_close(rough, exact, rtol=0.02, atol=0)


def test_a_batch_ramp_compiles_for_few_shapes(data):
    """torch.compile gives up after 8, whatever compiles its graphs.

    8 ranks' shares of a ramp to 96 windows, with B = 48: 1, 2, ... 12 windows.
    """
    import torch._dynamo

    torch._dynamo.reset()
    raw_model, config = tiny_model(), train_gpt2.TrainConfig(dtype="float32", sequence_length=16)
    parts: dict = dict.fromkeys(train_gpt2.Parts._fields) | dict(raw_model=raw_model, config=config, world=World())
    parts |= dict(model=torch.compile(raw_model, backend="eager", dynamic=False))
    parts |= dict(loader=train_gpt2.DataLoaderLite(data, "train", 6, 16))
    parts |= dict(scaler=torch.amp.GradScaler("cpu", enabled=False), optimizers=[])
    torch._dynamo.utils.counters.clear()
    for num_windows in range(1, 13):
        with patched(train_gpt2, "get_batch_size", lambda *args, n=num_windows: 16 * n):
            train_gpt2.train_step(0, train_gpt2.Parts(**parts), [])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 5


def no_flash():
    """Flash attention raises; the plain kernel, which is what is left, does not."""
    sdpa = F.scaled_dot_product_attention

    def attention(q, k, v, **options):
        if torch.backends.cuda.flash_sdp_enabled():
            raise RuntimeError("no kernel for this device")
        return sdpa(q, k, v, **options)

    return patched(F, "scaled_dot_product_attention", attention)


def no_room(largest_B):
    """A GPT.forward that has memory for so many rows."""
    forward = train_gpt2.GPT.forward

    def limited(self, idx, *args, **options):
        if len(idx) > largest_B:
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
            stack.enter_context(patched(autofit, "bound_on_B", lambda *args, **options: 3))
        train_gpt2.main(args)


def test_what_one_rank_cannot_do_all_give_up(data, tmp_path):
    """B = 3, for which one has memory, does not divide the 4 sequences of each."""
    args = tiny_flags(data, tmp_path / "two", batch_size=4, max_steps=5)
    said, _ = run(train_on_a_machine_that_can_do_less_on_rank_1, args, ranks=2)
    assert "B 2 * T 16 * ranks 2" in said
    assert said.count("warning: A training step failed with fused attention (on another rank)") == 1
    train(data, tmp_path / "one", batch_size=4, max_steps=5)
    assert np.allclose(losses(tmp_path / "one"), losses(tmp_path / "two"), atol=2e-5, rtol=0)


@pytest.fixture
def as_on_cuda(monkeypatch):
    """A World whose CPU the trial takes for a GPU."""
    monkeypatch.setattr(devices, "free_memory", lambda device: math.inf)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda name: types.SimpleNamespace(is_integrated=False))
    for name in ("set_per_process_memory_fraction", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: None)
    return World(device=types.SimpleNamespace(type="cuda"))


def find_what_fits(wrap, world, **changes):
    options = dict(total_batch_size=128, sequence_length=16, compile=False) | changes
    model = tiny_model(block_size=max(32, options["sequence_length"]))
    return autofit.find_what_fits(trial_of(model, world, wrap, **options))


def trial_of(model, world=None, wrap=None, **settings):
    config = train_gpt2.TrainConfig(dtype="float32", **settings)
    return CPUTrial(model, wrap, lambda *args: contextlib.nullcontext(), 320, config, world or World())


class CPUTrial(autofit.Trial):
    def random_batch(self, B):
        return torch.randint(320, (2, B, self.config.sequence_length))


def kernels_enabled():
    cuda = torch.backends.cuda
    return [cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled()]


@pytest.mark.parametrize("has_cudnn", [True, False])
def test_one_kernel_is_given_up_before_the_compiler_and_the_compiler_before_all_kernels(
    as_on_cuda, has_cudnn, capsys
):
    """And what torch has disabled, as it does with cuDNN's attention in old versions, is not enabled by the way."""
    tried = []

    def wrap(model, compiled, world):
        tried.append([compiled, *kernels_enabled()])
        if any(tried[-1]):
            raise RuntimeError("no kernel")
        return model

    torch.backends.cuda.enable_cudnn_sdp(has_cudnn)
    find_what_fits(wrap, as_on_cuda, compile=True, sequence_length=128, total_batch_size=512)
    order = [[True, False, True, True], [False, False, True, True], [False] * 4]
    assert tried == ([[True] * 4] if has_cudnn else []) + order
    said = re.findall(r"step failed with (.*) \(RuntimeError: no kernel\)", capsys.readouterr().out)
    order = ["cuDNN's attention", "torch.compile", "fused attention"]
    assert said == (order if has_cudnn else order[1:])


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("no C++ compiler found")])
def test_a_missing_compiler_costs_torch_compile_alone(as_on_cuda, error, capsys):
    """Whatever fails inside of torch.compile says nothing about cuDNN's attention, which stays enabled."""

    def fail(graph, inputs):
        raise error

    def wrap(model, compiled, world):
        return torch.compile(model, backend=fail) if compiled else model

    torch.backends.cuda.enable_cudnn_sdp(True)
    options = dict(compile=True, sequence_length=128, total_batch_size=512)
    found = find_what_fits(wrap, as_on_cuda, **options)
    assert not found.compiled and found.given_up == ["torch.compile"] and found.attention[0] == "cudnn"
    assert capsys.readouterr().out.count("warning") == 1


def test_cudnns_attention_which_has_given_nan_at_some_lengths_is_not_used_for_them(as_on_cuda):
    for T in (128, 192):
        autofit.prepare_gpu(T, World())
        assert kernels_enabled() == [T == 128, True, True]


def test_the_screens_part_of_a_gpu_is_left_alone_on_windows(as_on_cuda, monkeypatch):
    """There a full GPU is no error but slow. Others have 4 of its 10 GiB, this process 1, and 5 are free: 6 are its."""
    parts = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", parts.append)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (5 * 2**30, 10 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2**30)
    for platform in ("linux", "win32"):
        monkeypatch.setattr(autofit.sys, "platform", platform)
        autofit.prepare_gpu(128, as_on_cuda)
    assert parts == pytest.approx([0.95, 0.95 * 0.6])


@pytest.mark.gpt2
@pytest.mark.parametrize("recomputes", [False, True])
def test_what_a_sequence_keeps_is_counted(recomputes):
    """In float32, bytes per token. Each block: the inputs of its norms, projections and attention, and of GELU.

    Recomputed, a block keeps its input alone.
    """
    model = tiny_model(n_layer=3, n_embd=48, block_size=80, vocab_size=320)
    model.activation_checkpointing = recomputes
    kept = [autofit.try_sequence(trial_of(model, sequence_length=T))[0] for T in (40, 80)]
    # x, ln_1, q, k, v (in one), attention's output, x, ln_2, c_fc and its GELU; small ones: norms' and attention's sums
    block = 48 if recomputes else 48 * (1 + 1 + 3 + 1 + 1 + 1 + 4 + 4)
    per_token = 4 * (3 * block + 2 * 48 + 320)  # and the last norm's input and output, and the log-probabilities
    assert per_token < (kept[1] - kept[0]) / 40 < per_token * 1.1


def test_a_batch_that_cannot_fit_is_not_tried(as_on_cuda, monkeypatch):
    """A compiled model may keep a third. Of memory that is the CPU's, too, half is used, and ranks share it."""
    model = tiny_model()
    enough = 12 * sum(p.numel() for p in model.parameters()) + 6 * 1000
    cases = [(enough, False, False, 1, 6), (enough - 1, False, False, 1, 5), (0, False, False, 1, 1)]
    cases += [(enough, True, False, 1, 18), (enough, False, True, 1, 3), (enough, False, True, 3, 1)]
    for free, compiles, is_integrated, local_ranks, B in cases:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", f"{local_ranks}")
        monkeypatch.setattr(devices, "free_memory", lambda device, free=free: free)
        properties = types.SimpleNamespace(is_integrated=is_integrated)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda name, properties=properties: properties)
        assert autofit.bound_on_B(trial_of(model, as_on_cuda), 1000, compiles) == B


V1, JOB = "memory.limit_in_bytes", "system.slice/slurm/job_1/step_0"
OLD = f"12:cpu,cpuacct:/elsewhere\n4:memory:/{JOB}\n1:name=systemd:/{JOB}\n"
NO_LIMIT = 2**63 - 4096  # as version 1 says it


@pytest.mark.parametrize(
    "groups, limits, free",
    [
        ("0::/\n", {"memory.max": "max"}, 5 * 1024),
        ("0::/\n", {"memory.max": 4096}, 4096),
        ("0::/\n", {"memory.max": 999999}, 5 * 1024),
        (f"0::/{JOB}\n", {f"{JOB}/memory.max": "max", "system.slice/slurm/memory.max": 4096}, 4096),
        (f"0::/{JOB}\n", {f"{JOB}/memory.max": 4095, "system.slice/memory.max": 4096}, 4095),
        (f"0::/{JOB}\n", {"another/memory.max": 1, "memory.max": "max"}, 5 * 1024),
        ("0::/docker/0123abc\n", {"memory.max": 4096}, 4096),
        ("0::/pods/cri:containerd:0123abc\n", {"pods/memory.max": 4096}, 4096),
        (OLD, {f"memory/{JOB}/{V1}": 4096, f"memory/{V1}": NO_LIMIT}, 4096),
        (OLD, {f"memory/{JOB}/{V1}": NO_LIMIT, f"memory/system.slice/{V1}": 4096}, 4096),
        (OLD, {f"memory/elsewhere/{V1}": 1, f"memory/{V1}": NO_LIMIT}, 5 * 1024),
        ("3:memory:/docker/0123abc\n", {f"memory/{V1}": 4096}, 4096),
        (f"{OLD}0::/{JOB}\n", {f"memory/{JOB}/{V1}": 4096, f"unified/{JOB}/cgroup.procs": 1}, 4096),
        (f"2:cpu:/a\n0::/{JOB}\n", {"unified/system.slice/memory.max": 4096, "cpu/a/cpu.shares": 1}, 4096),
    ],
)
def test_free_memory_is_what_linux_and_the_groups_of_the_process_leave(groups, limits, free, tmp_path):
    """Control groups of version 2, of version 1, and of both; the process's own, and those above it."""
    (tmp_path / "proc/self").mkdir(parents=True)
    meminfo = "MemTotal:  9 kB\nMemFree:   1 kB\nMemAvailable:    5 kB\n"
    (tmp_path / "proc/meminfo").write_text(meminfo, encoding="utf-8")
    assert devices.free_memory(torch.device("cpu"), tmp_path) == 5 * 1024
    (tmp_path / "proc/self/cgroup").write_text(groups, encoding="utf-8")
    for place, text in limits.items():
        file = tmp_path / "sys/fs/cgroup" / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n", encoding="utf-8")
    assert devices.free_memory(torch.device("cpu"), tmp_path) == free


def test_torch_has_no_more_threads_than_the_quota_has_cores(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(devices, "num_cores", lambda: before + 5)
    try:
        devices.choose_device("cpu")
        assert torch.get_num_threads() == before
        torch.set_num_threads(3)
        monkeypatch.setattr(devices, "num_cores", lambda: 2)
        devices.choose_device("cpu")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


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
    for name, device in (("cuda", "cuda"), ("gpu", "cuda"), ("gpu:1", "cuda:1")):
        with pytest.raises(UserError, match=f"PyTorch .* finds no device '{device}'.* requirements.txt"):
            devices.choose_device(name)


@pytest.mark.parametrize(
    "built, capability, runs",
    [
        (["sm_80", "sm_90", "compute_90"], (12, 0), True),  # what the simulated GPU does not show (test_card.py)
        (["sm_80", "sm_120", "compute_120"], (10, 0), False),
        (["gfx90a", "gfx942"], (9, 4), True),
    ],
)
def test_a_gpu_for_which_torch_has_no_kernels_is_refused(built, capability, runs, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda name: "Tesla X")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda name: capability)
    for name in ("auto", "gpu", "cuda"):
        refusal = pytest.raises(UserError, match=f"for this machine's Tesla X.*sm_{capability[0]}.* requirements.txt")
        with contextlib.nullcontext() if runs else refusal:
            assert devices.choose_device(name) == "cuda"


def test_amds_float8_is_another_format(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda name: (9, 4))
    for hip in (None, "6.4"):
        monkeypatch.setattr(torch.version, "hip", hip)
        assert has_float8(torch.device("cuda")) == (hip is None)
