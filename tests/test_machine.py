"""What the machine cannot do costs a warning or one line, for all ranks: precision, compiler, attention, memory."""

import contextlib
import os
import weakref

import numpy as np
import pytest
import torch
import train_gpt2
from plumbing import trial
from plumbing.checkpoint import load_checkpoint
from plumbing.distributed import World
from plumbing.kernels import attention_on_cpu
from plumbing.machine import has_float8
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness import losses, patched, read_log, refused, succeed, tiny_flags, tiny_model, train

needs_float8 = pytest.mark.skipif(not has_float8("cpu"), reason="this processor does not multiply float8 matrices")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", pytest.param("fp8", marks=needs_float8)])
def test_half_precision_trains_and_keeps_float32_weights(data, tmp_path, dtype):
    options = dict(max_steps=24, max_lr=1e-2)
    assert train(data, tmp_path / "half", dtype=dtype, **options) == 0
    assert train(data, tmp_path / "full", dtype="float32", **options) == 0
    half, full = losses(tmp_path / "half"), losses(tmp_path / "full")
    assert len(half) == 24 and np.isfinite(half).all()
    assert half[0] == pytest.approx(full[0], abs=0.02) and (half != full).any()
    assert half[-1] < half[0] - 1
    checkpoint = load_checkpoint(tmp_path / "half" / "model_00024.pt")
    assert all(tensor.dtype == torch.float32 for tensor in checkpoint["model"].values())
    assert bool(checkpoint["scaler"]) == (dtype == "float16")


def test_fp8_is_refused_in_one_line_where_torch_cannot_multiply_it(data, tmp_path):
    def missing(*args, **options):
        raise NotImplementedError("Could not run 'aten::_scaled_mm'")

    with patched(torch, "_scaled_mm", missing):
        line = refused(train_gpt2.main, *tiny_flags(data, tmp_path / "out", dtype="fp8"))
    assert "does not support --dtype fp8" in line and not (tmp_path / "out").exists()


def test_attention_on_a_cpu_is_in_float32_even_under_autocast():
    """The result is that of float32 attention on the bfloat16 queries, keys and values, rounded once."""
    q, k, v = torch.randn(3, 2, 4, 16, 8).bfloat16()
    expected = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attention_on_cpu(q, k, v, is_causal=True), expected)


@needs_float8
def test_only_training_computes_the_logits_in_8_bits():
    model, idx = tiny_model(), torch.randint(320, (2, 16))
    logits = model(idx)[0]
    exact = model(idx, idx, return_logits=False)[1]
    model.float8_lm_head = True
    assert torch.equal(model(idx)[0], logits)
    rough = model(idx, idx, return_logits=False)[1]
    assert rough != exact
    torch.testing.assert_close(rough, exact, rtol=0.02, atol=0)


def test_a_compiler_that_fails_at_its_first_call_costs_one_warning(data, tmp_path, capsys):
    def broken_compile(model, **options):
        def fail(*args, **kwargs):
            raise RuntimeError("no C++ compiler found\nand much more")

        return fail

    assert train(data, tmp_path / "plain", max_steps=4) == 0
    capsys.readouterr()
    with patched(torch, "compile", broken_compile):
        assert train(data, tmp_path / "broken", max_steps=4, compile=True) == 0
    printed = capsys.readouterr()
    warnings = [line for line in (printed.out + printed.err).splitlines() if "warning" in line]
    assert len(warnings) == 1 and "no C++ compiler found" in warnings[0]
    assert read_log(tmp_path / "plain") == read_log(tmp_path / "broken")


def test_a_batch_ramp_compiles_for_few_shapes(data):
    """torch.compile gives up after 8. 8 ranks' shares of a ramp to 96 windows, with B = 48: 1, 2, ... 12 windows."""
    import torch._dynamo

    torch._dynamo.reset()
    model = torch.compile(tiny_model(), backend="aot_eager", dynamic=False)
    loader, config = train_gpt2.DataLoaderLite(data, "train", 6, 16), train_gpt2.TrainConfig()
    optimizers = [torch.optim.SGD(model.parameters())]
    torch._dynamo.utils.counters.clear()
    for num_windows in range(1, 13):
        options = dict(optimizers=optimizers, scaler=torch.amp.GradScaler("cpu", enabled=False), world=World())
        train_gpt2.train_step(model, loader, num_windows, step=0, config=config, signals=[], **options)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 5


def test_a_defect_in_the_model_is_raised_and_not_explained_away(data, tmp_path):
    def broken(*args, **options):
        raise ValueError("a defect")

    with patched(train_gpt2.GPT, "forward", broken), pytest.raises(ValueError, match="a defect"):
        train(data, tmp_path / "out", max_steps=2)


def no_flash():
    """Flash attention raises; the plain kernel, which is what is left, does not."""
    sdpa = F.scaled_dot_product_attention

    def attention(q, k, v, **options):
        if torch.backends.cuda.flash_sdp_enabled():
            raise RuntimeError("no kernel for this device")
        return sdpa(q, k, v, **options)

    return patched(F, "scaled_dot_product_attention", attention)


def test_a_fused_attention_that_fails_costs_one_warning(data, tmp_path, capsys):
    with no_flash():
        assert train(data, tmp_path / "out", max_steps=2) == 0
    warnings = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert len(warnings) == 1 and "Fused attention failed" in warnings[0]


def train_without_flash_on_rank_1(args):
    with no_flash() if os.environ.get("RANK") == "1" else contextlib.nullcontext():
        train_gpt2.main(args)


def no_room(largest_B):
    """A GPT.forward that has memory for so many rows."""
    forward = train_gpt2.GPT.forward

    def limited(self, idx, *args, **options):
        if len(idx) > largest_B:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return forward(self, idx, *args, **options)

    return patched(train_gpt2.GPT, "forward", limited)


def test_out_of_memory_at_the_first_step_halves_the_batch_and_leaves_the_losses(data, tmp_path, capsys):
    assert train(data, tmp_path / "small", batch_size=2) == 0
    capsys.readouterr()
    with no_room(2):
        assert train(data, tmp_path / "large", batch_size=8) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "Out of memory" in line]
    assert len(said) == 2 and "--batch-size 4" in said[0] and "--batch-size 2" in said[1]
    assert read_log(tmp_path / "small") == read_log(tmp_path / "large")
    assert read_log(tmp_path / "small", "val") == read_log(tmp_path / "large", "val")


def train_with_little_room_on_rank_1(args):
    with no_room(2) if os.environ["RANK"] == "1" else no_room(100):
        train_gpt2.main(args)


@pytest.mark.parametrize(
    "train_on_both, said",
    [
        (train_with_little_room_on_rank_1, "warning: Out of memory. Continuing with --batch-size 2"),
        (train_without_flash_on_rank_1, "warning: Fused attention failed"),
    ],
)
def test_what_one_rank_cannot_do_all_give_up(train_on_both, said, data, tmp_path):
    """And what DDP had set up for the failed try doesn't sum gradients any more."""
    output = tmp_path / "output"
    args = tiny_flags(data, tmp_path / "two", batch_size=4, max_steps=5)
    succeed(train_on_both, args, output=output, ranks=2)
    assert output.read_text(encoding="utf-8").count(said) == 1
    assert train(data, tmp_path / "one", batch_size=4, max_steps=5) == 0
    assert np.allclose(losses(tmp_path / "one"), losses(tmp_path / "two"), atol=2e-5, rtol=0)


class PeakMemory(TorchDispatchMode):
    """The most bytes that tensors made in this context held at a time."""

    def __init__(self):
        super().__init__()
        self.peak, self.storages = 0, weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self.storages:
                storage = tensor.untyped_storage()
                self.storages[storage] = storage.nbytes()
        self.peak = max(self.peak, sum(self.storages.values()))
        return result


def test_the_trial_takes_as_much_memory_as_the_steps_after_it(data):
    """Two micro-steps: in the second one there are gradients from the start, and later Adam's two moments."""
    options = dict(batch_size=2, total_batch_size=64, sequence_length=16, compile=False, optimizer="adamw")
    config, world, model = train_gpt2.TrainConfig(**options), World(), tiny_model()
    with PeakMemory() as trial:
        _, B = train_gpt2.fit_to_machine(model, config, world)
    loader = train_gpt2.DataLoaderLite(data, "train", B, 16)
    with PeakMemory() as steps:
        optimizers = train_gpt2.configure_optimizers(model, config)
        options = dict(scaler=torch.amp.GradScaler("cpu", enabled=False), config=config, signals=[], world=world)
        for _ in range(2):
            train_gpt2.train_step(model, loader, 4, step=0, optimizers=optimizers, **options)
    assert 0.97 * steps.peak < trial.peak  # but for small tensors, such as losses and indices


def test_what_failed_trials_took_does_not_count_as_the_runs_memory():
    resets = []
    with patched(torch.cuda, "reset_peak_memory_stats", lambda: resets.append(len(failed))), no_room(2):
        failed, wrap = [], lambda model, *rest: failed.append(model) or model
        world, config = World(device="cpu"), train_gpt2.TrainConfig(total_batch_size=128, sequence_length=16)
        with patched(World, "device_type", "cuda"), patched(World, "autocast", lambda self: contextlib.nullcontext()):
            assert trial.find_what_fits(tiny_model(), wrap, config, world=world)[1] == 2
    assert resets == [3]  # B = 8, 4, 2


def test_too_little_memory_for_one_sequence_is_an_error(data, tmp_path):
    with no_room(0):
        line = refused(train_gpt2.main, *tiny_flags(data, tmp_path / "out", batch_size=4))
    assert "memory" in line and "--activation-checkpointing" in line
    assert not (tmp_path / "out").exists()
