"""The output layer in float8 and the loss in chunks, compared with float64; GPUs and their errors by name."""

import functools
import itertools

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from plumbing.cli.console import is_out_of_memory
from plumbing.system import kernels
from plumbing.system.devices import peak_flops
from plumbing.system.float8 import Float8Linear
from train_gpt2 import GPT

from harness import needs

# roundings are off by at most 1/16 in e4m3 and 1/8 in e5m2; uniform between, a product's mean square is a third
FLOAT8_ERROR = ((1 / 16**2 + 1 / 8**2) / 3) ** 0.5


def relative_error(found, expected):
    assert found.dtype == torch.float32
    return (found - expected).norm() / expected.norm()


@needs("float8")
@pytest.mark.parametrize("share, size", [(2.0**-40, 1e-9), (1 / 4096, 1.0), (2.0**10, 1e9)])
def test_a_float8_layer_agrees_with_float64_whatever_the_losss_share_in_the_step(share, size):
    """As in gradient accumulation; not even float8's gradient underflows."""
    x = torch.randn(64, 32) * size
    x.requires_grad_()
    targets = torch.randint(320, (64,))
    targets[::5] = -100
    layer = nn.Linear(32, 320, bias=False)
    layer.weight.data = torch.randn(320, 32) * 0.3 / size
    loss = plain_loss(Float8Linear(layer)(x), targets)
    (loss * share).backward()
    x64 = x.detach().double().requires_grad_()
    weight64 = layer.weight.detach().double().requires_grad_()
    expected = F.cross_entropy(x64 @ weight64.T, targets, reduction="sum")
    (expected * share).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=0.01)
    assert relative_error(x.grad, x64.grad) < FLOAT8_ERROR
    assert relative_error(layer.weight.grad, weight64.grad) < FLOAT8_ERROR
    assert not x.grad[::5].any()


@needs("float8")
def test_a_float8_layer_adds_its_bias_and_takes_weights_of_zero():
    layer = nn.Linear(32, 48)
    nn.init.zeros_(layer.weight)
    output = Float8Linear(layer)(torch.randn(2, 8, 32))
    expected = layer.bias.expand(2, 8, 48).bfloat16()
    torch.testing.assert_close(output, expected)


@needs("float8")
def test_a_second_derivative_through_a_float8_layer_is_an_error_and_not_wrong():
    x = torch.randn(16, 32, requires_grad=True)
    layer = Float8Linear(nn.Linear(32, 48, bias=False))
    loss = layer(x).square().sum()
    with pytest.raises((RuntimeError, NotImplementedError)):
        gradient_in(x, gradient_in(x, loss).sum())


def gradient_in(x, value):
    """With a graph of its own, for a second derivative."""
    return torch.autograd.grad(value, x, create_graph=True)[0]


def plain_loss(logits, targets):
    return F.cross_entropy(logits.float(), targets, reduction="sum")


def with_soft_cap(logits, targets):
    return plain_loss(30 * (logits / 30).tanh(), targets)


def of_the_trainer(logits, targets):
    return GPT.cross_entropy(None, logits, targets)


TARGETS = torch.tensor([0, 47, -100, 7, -100, 9, 10])


def loss_and_gradient(loss, logits):
    """Of a third of the loss, and a penalty on two rows of the same logits beside it."""
    logits.requires_grad_()
    value = loss(logits, TARGETS)
    penalty = logits.double().logsumexp(1).square()[:2].sum()
    total = value / 3 + 1e-2 * penalty
    (gradient,) = torch.autograd.grad(total, logits)
    return value, gradient


@pytest.mark.parametrize("loss", [plain_loss, with_soft_cap, of_the_trainer])
@pytest.mark.parametrize("chunk", [1, 3 * 48, 2**20])
@pytest.mark.parametrize("dtype, error", [(torch.float32, 1e-5), (torch.bfloat16, 2**-6)])
def test_any_loss_is_computed_in_chunks(loss, chunk, dtype, error, monkeypatch):
    """Of 7 rows: one at a time, three, all."""
    monkeypatch.setattr(kernels, "LOGITS_IN_CHUNK", chunk)
    logits = (torch.randn(7, 48) * 5).to(dtype)
    in_chunks = functools.partial(kernels.in_chunks, loss)
    value, gradient = loss_and_gradient(in_chunks, logits.clone())
    exact, exact_gradient = loss_and_gradient(loss, logits.double())
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), exact.double(), rtol=error, atol=0)
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=error, atol=error / 10)


def in_a_parameter(in_chunks):
    """Of the loss itself."""
    temperature = torch.ones(1, requires_grad=True)
    loss = in_chunks(lambda logits, targets: plain_loss(logits * temperature, targets))
    return gradient_in(temperature, loss(torch.randn(7, 48), TARGETS))


def of_rows(in_chunks):
    """By torch.func: gradients of single rows, as for their norms, and a derivative in forward mode."""
    loss = in_chunks(plain_loss)
    logits, tangent = torch.randn(2, 7, 48)

    def of_row(row, target):
        return loss(row[None].expand(7, 48), target.expand(7))

    rows = torch.func.vmap(torch.func.grad(of_row))(logits, TARGETS.clamp(min=0))
    return rows, torch.func.jvp(lambda x: loss(x, TARGETS), (logits,), (tangent,))


def through_a_step(in_chunks):
    """Second derivatives, as in MAML: the loss after a step, and how it depends on the weights before it."""
    loss = in_chunks(plain_loss)
    x, weight = torch.randn(7, 32), torch.randn(32, 48, requires_grad=True)
    later = weight - 0.1 * gradient_in(weight, loss(x @ weight, TARGETS))
    return gradient_in(weight, loss(x.flip(0) @ later, TARGETS))


def in_autocast(in_chunks):
    """And second ones. The loss has a matrix that is no parameter, such as one that groups the ids."""
    logits = torch.randn(7, 48, requires_grad=True)
    groups = torch.linspace(-1, 1, 48 * 16).view(48, 16)
    loss = in_chunks(lambda logits, targets: plain_loss(logits @ groups, targets % 16))
    gradients = []
    for dtype, twice in itertools.product([torch.bfloat16, torch.float16], [False, True]):
        with torch.autocast("cpu", dtype):
            value = loss(logits, TARGETS)
        gradients += torch.autograd.grad(value, logits, create_graph=twice)
    return gradients


@pytest.mark.parametrize("derivatives", [in_a_parameter, of_rows, through_a_step, in_autocast])
def test_derivatives_of_a_loss_in_chunks_are_those_of_the_whole_loss(derivatives, monkeypatch):
    expected = derivatives(lambda loss: loss)
    monkeypatch.setattr(kernels, "LOGITS_IN_CHUNK", 3 * 48)
    torch.manual_seed(0)
    found = derivatives(lambda loss: functools.partial(kernels.in_chunks, loss))
    torch.testing.assert_close(found, expected)


def test_a_loss_is_called_once_for_each_chunk_and_draws_the_same_numbers_in_both_passes(monkeypatch):
    """As a sampled softmax does. The gradient is then that of the loss that was logged."""
    monkeypatch.setattr(kernels, "LOGITS_IN_CHUNK", 3 * 48)
    noise, calls = [], []

    def loss(logits, targets):
        calls.append(len(logits))
        noise.append(torch.randn(logits.shape))
        return (logits * noise[-1]).sum()

    logits = torch.randn(7, 48, requires_grad=True)
    value = kernels.in_chunks(loss, logits, TARGETS)
    assert calls == [3, 3, 1]
    drawn = torch.cat(noise)
    after = torch.get_rng_state()
    value.backward()
    torch.testing.assert_close(value.detach(), (logits.detach() * drawn).sum())
    assert torch.equal(logits.grad, drawn)
    assert torch.equal(torch.get_rng_state(), after)


def test_attention_on_a_cpu_takes_a_mask_of_numbers_in_the_models_dtype():
    qkv = torch.randn(3, 1, 2, 8, 4).bfloat16()
    mask = torch.full((8, 8), -torch.inf).triu(1)
    expected = kernels.attention(*qkv, is_causal=True)
    found = kernels.attention(*qkv, attn_mask=mask.bfloat16())
    torch.testing.assert_close(found, expected)


WRAPPED = RuntimeError("the compiler failed")
WRAPPED.__context__ = torch.OutOfMemoryError("")
CUDA = "CUDA out of memory. Tried to allocate 12.00 GiB. GPU 0 has a total capacity of 79.10 GiB"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(f"OutOfMemoryError: {CUDA}\n\nSet TORCHDYNAMO_VERBOSE=1 for the internal stack trace"),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MemoryError(),
        WRAPPED,
    ],
)
def test_out_of_memory_is_known_in_whatever_it_is_wrapped(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize("text", ["out of resource: shared memory, Required: 262144", "an illegal memory access"])
def test_other_errors_about_memory_are_not_out_of_memory(text):
    assert not is_out_of_memory(RuntimeError(text))


PEAKS = {  # as torch.cuda.get_device_name gives it: the dense FLOP/s of its datasheet; a near miss has none
    "Tesla V100-SXM2-16GB": 125e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A10": 125e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA A100-SXM4-80GB MIG 1g.10gb": None,
    "cpu": None,
}


def test_a_gpu_is_known_by_its_whole_name():
    assert {name: peak_flops(name) for name in PEAKS} == PEAKS
