"""The output layer in float8 and the loss in chunks, compared with float64; GPUs and their errors by name."""

import functools

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


@needs("float8")
@pytest.mark.parametrize("share, size", [(2.0**-40, 1e-9), (1 / 4096, 1.0), (2.0**10, 1e9)])
def test_a_float8_layer_agrees_with_float64_whatever_the_losss_share_in_the_step(share, size):
    """The loss is a `share` of a larger one, as in gradient accumulation; not even float8's gradient underflows."""
    x = torch.randn(64, 32) * size
    targets = torch.randint(320, (64,))
    targets[::5] = -100
    layer = nn.Linear(32, 320, bias=False)
    layer.weight.data = torch.randn(320, 32) * 0.3 / size
    weight64 = layer.weight.detach().double().requires_grad_()
    x64 = x.double().requires_grad_()
    expected = F.cross_entropy(x64 @ weight64.T, targets, reduction="sum")
    (expected * share).backward()
    loss = plain_loss(Float8Linear(layer)(x.requires_grad_()), targets)
    (loss * share).backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=0.01)
    # roundings are off by at most 1/16 in e4m3 and 1/8 in e5m2; uniform between, a product's mean square is a third
    error = ((1 / 16**2 + 1 / 8**2) / 3) ** 0.5
    for gradient, exact in [(x.grad, x64.grad), (layer.weight.grad, weight64.grad)]:
        assert gradient.dtype == torch.float32
        assert (gradient - exact).norm() / exact.norm() < error
    assert not x.grad[::5].any()


@needs("float8")
def test_a_float8_layer_adds_its_bias_and_takes_weights_of_zero():
    layer = nn.Linear(32, 48)
    nn.init.zeros_(layer.weight)
    output = Float8Linear(layer)(torch.randn(2, 8, 32))
    torch.testing.assert_close(output, layer.bias.expand(2, 8, 48).bfloat16())


@needs("float8")
def test_a_second_derivative_through_a_float8_layer_is_an_error_and_not_wrong():
    x = torch.randn(16, 32, requires_grad=True)
    loss = plain_loss(Float8Linear(nn.Linear(32, 48, bias=False))(x), torch.randint(48, (16,)))
    with pytest.raises((RuntimeError, NotImplementedError)):
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        gradient.square().sum().backward()


def plain_loss(logits, targets):
    return F.cross_entropy(logits.float(), targets, reduction="sum")


def with_z_loss(logits, targets):
    return plain_loss(logits, targets) + 1e-2 * logits.logsumexp(1).square().sum()


def with_soft_cap(logits, targets):
    return plain_loss(30 * (logits / 30).tanh(), targets)


def of_the_trainer(logits, targets):
    return GPT.cross_entropy(None, logits, targets)


TARGETS = torch.tensor([0, 47, -100, 7, -100, 9, 10])


def loss_and_gradient(loss, logits):
    """Of a third of the loss, and a penalty on two rows of the same logits beside it."""
    logits.requires_grad_()
    value = loss(logits, TARGETS)
    total = value / 3 + 1e-2 * logits.double().logsumexp(1).square()[:2].sum()
    (gradient,) = torch.autograd.grad(total, logits)
    return value, gradient


@pytest.mark.parametrize("loss", [plain_loss, with_z_loss, with_soft_cap, of_the_trainer])
@pytest.mark.parametrize("chunk", [1, 3 * 48, 2**20])
@pytest.mark.parametrize("dtype, error", [(torch.float32, 1e-5), (torch.bfloat16, 2**-6)])
def test_any_loss_is_computed_in_chunks(loss, chunk, dtype, error, monkeypatch):
    """Of 7 rows: one at a time, three, all."""
    monkeypatch.setattr(kernels, "LOGITS_IN_CHUNK", chunk)
    logits = (torch.randn(7, 48) * 5).to(dtype)
    value, gradient = loss_and_gradient(functools.partial(kernels.in_chunks, loss), logits.clone())
    exact, exact_gradient = loss_and_gradient(loss, logits.double())
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), exact.double(), rtol=error, atol=0)
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=error, atol=error / 10)


def test_a_loss_with_parameters_trains_them_however_many_logits_there_are(monkeypatch):
    temperature = torch.ones(1, requires_grad=True)

    def loss(logits, targets):
        return plain_loss(logits * temperature, targets)

    logits = torch.randn(7, 48)
    (expected,) = torch.autograd.grad(loss(logits, TARGETS), temperature)
    monkeypatch.setattr(kernels, "LOGITS_IN_CHUNK", 3 * 48)
    (gradient,) = torch.autograd.grad(kernels.in_chunks(loss, logits, TARGETS), temperature)
    torch.testing.assert_close(gradient, expected)


def gradient_penalty(loss, x, weight):
    """As in WGAN-GP: the size of the gradient in the inputs, and how it depends on the weights."""
    (gradient,) = torch.autograd.grad(loss(x @ weight), x, create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), weight)[0]


def hessian_times_vector(loss, x, weight):
    """As in Sophia or influence functions."""
    (gradient,) = torch.autograd.grad(loss(x @ weight), weight, create_graph=True)
    return torch.autograd.grad((gradient * weight.detach().cos()).sum(), weight)[0]


def through_a_step(loss, x, weight):
    """As in MAML: the loss after a step, and how it depends on the weights before it."""
    (gradient,) = torch.autograd.grad(loss(x @ weight), weight, create_graph=True)
    return torch.autograd.grad(loss(x.flip(0) @ (weight - 0.1 * gradient)), weight)[0]


@pytest.mark.parametrize("second", [gradient_penalty, hessian_times_vector, through_a_step])
def test_second_derivatives_of_a_loss_in_chunks_are_those_of_the_whole_loss(second, monkeypatch):
    x = torch.randn(7, 32, requires_grad=True)
    weight = torch.randn(32, 48, requires_grad=True)
    expected = second(lambda logits: plain_loss(logits, TARGETS), x, weight)
    monkeypatch.setattr(kernels, "LOGITS_IN_CHUNK", 3 * 48)
    found = second(lambda logits: kernels.in_chunks(plain_loss, logits, TARGETS), x, weight)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("twice", [False, True], ids=["gradient", "second derivative"])
def test_the_backward_pass_of_a_loss_in_chunks_has_the_autocast_of_its_forward_pass(twice, dtype, monkeypatch):
    """A matrix in the loss that is no parameter, such as one that groups the ids, is multiplied as in forward."""
    groups = torch.randn(48, 16)
    logits = torch.randn(7, 48, requires_grad=True)

    def loss(logits, targets):
        return plain_loss(logits.to(dtype) @ groups, targets % 16)

    def gradient():
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            value = kernels.in_chunks(loss, logits, TARGETS)
        return torch.autograd.grad(value, logits, create_graph=twice)[0]

    expected = gradient()
    monkeypatch.setattr(kernels, "LOGITS_IN_CHUNK", 3 * 48)
    torch.testing.assert_close(gradient(), expected)


def test_attention_on_a_cpu_takes_a_mask_of_numbers_in_the_models_dtype():
    q, k, v = torch.randn(3, 1, 2, 8, 4).bfloat16()
    mask = torch.full((8, 8), -torch.inf, dtype=torch.bfloat16).triu(1)
    expected = kernels.attention(q, k, v, is_causal=True)
    torch.testing.assert_close(kernels.attention(q, k, v, attn_mask=mask), expected)


WRAPPED = RuntimeError("the compiler failed")
WRAPPED.__context__ = torch.OutOfMemoryError("")
CUDA = "CUDA out of memory. Tried to allocate 12.00 GiB. GPU 0 has a total capacity of 79.10 GiB"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(f"OutOfMemoryError: {CUDA}\n\nSet TORCHDYNAMO_VERBOSE=1 for the internal stack trace"),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to"),
        MemoryError(),
        WRAPPED,
    ],
)
def test_out_of_memory_is_known_in_whatever_it_is_wrapped(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize("text", ["out of resource: shared memory, Required: 262144", "an illegal memory access"])
def test_other_errors_about_memory_are_not_out_of_memory(text):
    assert not is_out_of_memory(RuntimeError(text))


def test_a_gpu_is_known_by_its_whole_name():
    """As torch.cuda.get_device_name gives it, with the dense TFLOP/s of its datasheet; a near miss has none."""
    known = {"Tesla V100-SXM2-16GB": 125, "NVIDIA A100-SXM4-40GB": 312, "NVIDIA GeForce RTX 4090": 165.2}
    assert {name: peak_flops(name) for name in known} == pytest.approx({name: 1e12 * known[name] for name in known})
    for name in ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "cpu"):
        assert peak_flops(name) is None
