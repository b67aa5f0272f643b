"""plumbing/kernels.py: the output layer and its loss, compared with F.cross_entropy in float64.

Triton decides when it is imported whether its kernels run in the interpreter, that is, on a CPU. So one test runs this
file once more in a process of its own, with TRITON_INTERPRET=1, and what needs the kernel is left to that process.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_model

from plumbing import kernels
from plumbing.distributed import is_out_of_memory
from plumbing.kernels import LinearCrossEntropy, linear_cross_entropy, to_float8

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# `triton` as linear_cross_entropy takes it: False here, True in the process with the interpreter
both_ways = pytest.mark.parametrize("triton", [INTERPRETED], ids=lambda triton: "triton" if triton else "torch")
only_interpreted = pytest.mark.skipif(not INTERPRETED, reason="the test of the interpreter runs this")
# the kernel takes 8,192 logits at a time: rows that end inside the first such block, and inside the third
vocabularies = pytest.mark.parametrize("V", [320, 2 * 8192 + 48])


@pytest.mark.skipif(INTERPRETED, reason="this is the process that it starts")
@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs triton, which CUDA builds of torch bring")
def test_the_triton_kernel_passes_these_tests_in_its_interpreter():
    needed = "triton or exact_in_float32 or not_finite"  # the names of what only this process can run
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", needed, __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    folder = Path(__file__).parent.parent
    run = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr


def logits_and_targets(V, num_rows=6, dtype=torch.bfloat16):
    """Logits of very different sizes, the last 47 those of padding ids, which no target has; one target is ignored."""
    torch.manual_seed(V)
    logits = torch.randn(num_rows, V) * torch.logspace(-1, 1.5, num_rows)[:, None] + torch.randn(num_rows, 1) * 20
    targets = torch.randint(V - 47, (num_rows,))
    targets[:4] = torch.tensor([0, V - 48, -100, 7])
    return logits.to(dtype), targets


def reference(logits, targets):
    """Losses and gradient by F.cross_entropy in float64."""
    logits = logits.double().requires_grad_()
    losses = F.cross_entropy(logits, targets, reduction="none", ignore_index=-100)
    return losses.detach(), torch.autograd.grad(losses.sum(), logits)[0]


@vocabularies
@both_ways
def test_losses_and_gradient_are_those_of_float64(triton, V):
    logits, targets = logits_and_targets(V)
    expected, expected_gradient = reference(logits, targets)
    compute = kernels.cross_entropy_triton if triton else kernels.cross_entropy
    losses, gradient = compute(logits.clone(), targets, False, -100)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=1e-5)
    # bfloat16's 8 bits: a relative error of at most 2**-8, twice that in the interpreter, which truncates
    error = 2**-6.9 if triton else 2**-7.9
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=error, atol=1e-9)
    assert losses[2] == 0 and not gradient[2].any(), "the target that is ignored"
    assert (gradient[0, -47:] > 0).all(), "padding ids belong to the softmax, as in F.cross_entropy"


@vocabularies
def test_a_float8_gradient_keeps_two_bits_of_mantissa(V):
    logits, targets = logits_and_targets(V)
    expected, expected_gradient = reference(logits, targets)
    losses, gradient = kernels.cross_entropy(logits, targets, True, -100)
    assert gradient.dtype == torch.float8_e5m2
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=1e-5)
    # rounded to 3 bits; the smallest number is 2**-16, here divided by 2**15
    scaled = gradient.double() / kernels.GRADIENT_SCALE
    torch.testing.assert_close(scaled, expected_gradient, rtol=2**-2.99, atol=2**-31)
    assert not gradient[2].float().any()


@only_interpreted
@vocabularies
@pytest.mark.parametrize("scale", [1.0, kernels.GRADIENT_SCALE])
def test_the_kernel_is_exact_in_float32(V, scale):
    """In place, and into another tensor with the scale of float8, which the interpreter itself rounds wrongly."""
    from plumbing.triton_cross_entropy import launch

    logits, targets = logits_and_targets(V, dtype=torch.float32)
    expected, expected_gradient = reference(logits, targets)
    gradient = logits if scale == 1 else torch.full_like(logits, torch.nan)
    losses = launch(logits, targets, gradient, scale, -100)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(gradient.double() / scale, expected_gradient, rtol=2e-5, atol=1e-9)


@only_interpreted
def test_a_row_that_is_not_finite_shows_in_its_loss():
    from plumbing.triton_cross_entropy import launch

    for bad in (float("nan"), float("inf")):
        logits, targets = logits_and_targets(320)
        logits[1, 100] = bad
        losses = launch(logits, targets, logits, 1.0, -100)
        assert losses.isfinite().tolist() == [True, False, True, True, True, True]


def gradients(x, weight, targets, share, **options):
    """The loss and its gradients, where the loss is a `share` of a larger one, as in gradient accumulation."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = linear_cross_entropy(x, weight, targets, **options)
    assert loss.dtype == torch.float32
    (loss * share).backward()
    return loss.detach(), x.grad, weight.grad


@pytest.mark.parametrize("float8", [False, True])
@both_ways
def test_the_output_layer_and_its_loss_agree_with_float64(triton, float8):
    if triton and float8:
        pytest.skip("Triton's interpreter rounds float8 wrongly")
    torch.manual_seed(0)
    N, C, V = 64, 32, 320
    x, weight, share = torch.randn(N, C), torch.randn(V, C) * 0.3, 1 / 4096
    targets = torch.randint(V, (N,))
    targets[::5] = -100
    loss, grad_x, grad_weight = gradients(x, weight, targets, share, float8=float8, triton=triton)
    x64, weight64 = x.double().requires_grad_(), weight.double().requires_grad_()
    expected = F.cross_entropy(x64 @ weight64.T, targets, reduction="sum")
    (expected * share).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=0.01 if float8 else 1e-3)
    for gradient, exact in [(grad_x, x64.grad), (grad_weight, weight64.grad)]:
        assert gradient.dtype == torch.float32
        error = (gradient - exact).norm() / exact.norm()
        assert error < (0.06 if float8 else 0.006), "3 bits of mantissa in each operand, or 8"
    assert not grad_x[::5].any()


@pytest.mark.parametrize("float8", [False, True])
def test_the_share_in_the_step_scales_the_gradients_and_nothing_else(float8):
    """A power of two changes no digit, however small: not even float8's gradient goes under."""
    x, weight, targets = torch.randn(32, 16), torch.randn(48, 16), torch.randint(48, (32,))
    loss, *whole = gradients(x, weight, targets, 1.0, float8=float8)
    for share in (2.0**-20, 2.0**10):
        same_loss, *scaled = gradients(x, weight, targets, share, float8=float8)
        assert torch.equal(loss, same_loss)
        for gradient, scaled_gradient in zip(whole, scaled):
            assert torch.equal(gradient * share, scaled_gradient)


def test_float8_matmuls_are_exact_where_8_bits_suffice():
    """Powers of two up to 4 keep their value in both formats, and sums of them under 256 theirs in bfloat16."""
    numbers = torch.tensor([0, 1, 2, 4, -1, -2, -4])
    x, weight, gradient = (numbers[torch.randint(7, shape)].float() for shape in [(32, 16), (48, 16), (32, 48)])

    class Context:
        def save_for_backward(self, *tensors):
            x8, x_scale, weight8, weight_scale, _ = tensors
            self.saved_tensors = x8, x_scale, weight8, weight_scale, gradient.to(torch.float8_e5m2)

    def take_logits(logits, *_):
        assert torch.equal(logits, (x @ weight.T).bfloat16())
        return torch.zeros(32), None

    context = Context()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "cross_entropy", take_logits)
        LinearCrossEntropy.forward(context, x.bfloat16(), weight, None, True, False, -100)
    scale = torch.tensor(kernels.GRADIENT_SCALE)
    grad_x, grad_weight, *_ = LinearCrossEntropy.backward(context, scale)
    assert torch.equal(grad_x, (gradient @ weight).bfloat16()) and torch.equal(grad_weight, gradient.T @ x)
    assert grad_x.dtype == torch.bfloat16 and grad_weight.dtype == torch.float32


def test_float8_keeps_numbers_of_any_size():
    """At most 1/16 off with 3 bits of mantissa, even a factor of 1,000 below the largest."""
    for size in (1e-9, 1.0, 1e9):
        tensor = torch.logspace(-3, 0, 100) * size
        small, scale = to_float8(tensor)
        assert small.dtype == torch.float8_e4m3fn
        torch.testing.assert_close(small.float() * scale, tensor, rtol=1 / 16, atol=0)
    small, scale = to_float8(torch.zeros(3))
    assert not (small.float() * scale).any()


@both_ways
def test_the_compiler_takes_it_in_one_graph(triton):
    """In training, and in validation, where no gradient is wanted: the numbers are those without the compiler."""
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", dynamic=False, fullgraph=True)
    x, weight, targets = torch.randn(32, 16), torch.randn(48, 16), torch.randint(48, (32,))
    for float8 in (False, True):
        x.requires_grad_()
        expected = linear_cross_entropy(x, weight, targets, float8, triton)
        loss = compiled(x, weight, targets, float8, triton)
        assert torch.equal(loss, expected)
        assert torch.equal(torch.autograd.grad(loss / 7, x)[0], torch.autograd.grad(expected / 7, x)[0])
        with torch.no_grad():
            assert torch.equal(compiled(x, weight, targets, float8, triton), expected)


@both_ways
def test_the_loss_is_that_of_the_plain_output_layer(triton):
    model, idx, targets = tiny_model(), torch.randint(320, (2, 16)), torch.randint(300, (2, 16))
    targets[0, :9] = -100
    plain = model(idx, targets, return_logits=False)[1].item()
    model.fused_loss = "triton" if triton else "torch"
    logits, loss = model(idx, targets, return_logits=False)
    assert logits is None and loss.item() == pytest.approx(plain, rel=2e-3)
    assert model(idx, targets)[1].item() == plain, "whoever wants logits gets those of the plain layer"
    targets[:] = -100
    assert model(idx, targets, return_logits=False)[1] == 0


def chain(*errors):
    """The first error, raised while the second was handled, and so on."""
    for error, context in zip(errors, errors[1:]):
        error.__context__ = context
    return errors[0]


def test_out_of_memory_is_known_in_whatever_it_is_wrapped():
    cuda = "CUDA out of memory. Tried to allocate 12.00 GiB. GPU 0 has a total capacity of 79.10 GiB"
    for error in [
        torch.OutOfMemoryError(cuda),
        RuntimeError(f"OutOfMemoryError: {cuda}\n\nSet TORCHDYNAMO_VERBOSE=1 for the internal stack trace"),
        chain(RuntimeError("backend='inductor' raised:"), ValueError("x"), torch.OutOfMemoryError(cuda)),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to"),
        MemoryError(),
    ]:
        assert is_out_of_memory(error), error
    wrapped = RuntimeError("the compiler failed")
    wrapped.__cause__ = torch.OutOfMemoryError(cuda)
    assert is_out_of_memory(wrapped)
    wrapped.__cause__ = wrapped  # a circle ends, too
    assert not is_out_of_memory(wrapped)


def test_other_errors_of_the_compiler_are_not_out_of_memory():
    for error in [
        RuntimeError("out of resource: shared memory, Required: 262144, Hardware limit: 232448. Reducing block sizes"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("no C++ compiler found"),
        chain(RuntimeError("a"), ValueError("b")),
    ]:
        assert not is_out_of_memory(error), error
