"""The output layer and its loss in float8, compared with F.cross_entropy in float64; GPUs and their errors by name."""

import functools

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from plumbing.cli.console import is_out_of_memory
from plumbing.system import kernels
from plumbing.system.devices import peak_flops
from plumbing.system.float8 import Float8Linear

from harness import needs


@needs("float8")
@pytest.mark.parametrize("share, size", [(2.0**-40, 1e-9), (1 / 4096, 1.0), (2.0**10, 1e9)])
def test_the_output_layer_and_its_loss_agree_with_float64_whatever_their_share_in_the_step(share, size):
    """The loss is a `share` of a larger one, as in gradient accumulation; not even float8's gradient goes under."""
    x, weight, targets = torch.randn(64, 32) * size, torch.randn(320, 32) * 0.3 / size, torch.randint(320, (64,))
    targets[::5] = -100
    layer = nn.Linear(32, 320, bias=False)
    layer.weight.data = weight
    x64, weight64 = x.double().requires_grad_(), weight.double().requires_grad_()
    expected = F.cross_entropy(x64 @ weight64.T, targets, reduction="sum")
    (expected * share).backward()
    loss = plain_loss(Float8Linear(layer)(x.requires_grad_()), targets)
    (loss * share).backward()
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(expected.item(), rel=0.01)
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


def plain_loss(logits, targets, **options):
    """As people write it."""
    return F.cross_entropy(logits.float(), targets, reduction="sum", **options)


TEMPERATURE = torch.ones(1, requires_grad=True)
LOSSES = {  # as it is, and as people change it
    "plain": plain_loss,
    "a z-loss": lambda logits, targets: plain_loss(logits, targets) + 1e-2 * logits.logsumexp(1).square().sum(),
    "a temperature that is trained": lambda logits, targets: plain_loss(logits * TEMPERATURE * 1.1, targets),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("chunk", [1, 3 * 48, 2**20])
@pytest.mark.parametrize("dtype, error", [(torch.float32, 1e-5), (torch.bfloat16, 2**-6)])
def test_any_loss_is_computed_in_chunks(name, chunk, dtype, error, monkeypatch):
    """Of 7 rows: one at a time, three, all. A penalty beside it sees the same logits; what differs are roundings."""
    monkeypatch.setattr(kernels, "LOGITS_IN_CHUNK", chunk)
    loss, targets = LOSSES[name], torch.tensor([0, 47, -100, 7, -100, 9, 10])
    logits = (torch.randn(7, 48) * 5).to(dtype)
    values, gradients = [], []
    for compute, leaf in ((functools.partial(kernels.in_chunks, loss), logits.clone()), (loss, logits.double())):
        values.append(compute(leaf.requires_grad_(), targets))
        total = values[-1] / 3 + 1e-2 * leaf.double().logsumexp(1).square()[:2].sum()
        leaves = [leaf, TEMPERATURE] if "temperature" in name else [leaf]
        gradients.append([gradient.double() for gradient in torch.autograd.grad(total, leaves)])
    assert values[0].dtype == torch.float32
    torch.testing.assert_close(values[0].double(), values[1].double(), rtol=error, atol=0)
    torch.testing.assert_close(*gradients, rtol=error, atol=error / 10)


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
    targets = torch.randint(48, (7,))
    x, weight = torch.randn(7, 32, requires_grad=True), torch.randn(32, 48, requires_grad=True)
    expected = second(lambda logits: plain_loss(logits, targets), x, weight)
    monkeypatch.setattr(kernels, "LOGITS_IN_CHUNK", 3 * 48)
    found = second(lambda logits: kernels.in_chunks(plain_loss, logits, targets), x, weight)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("outer", [torch.bfloat16, torch.float16, None])
@pytest.mark.parametrize("twice", [False, True], ids=["gradient", "second derivative"])
def test_a_loss_in_chunks_has_the_forward_passs_autocast_in_its_backward_pass(twice, outer, monkeypatch):
    """A matrix in the loss that is no parameter, such as one that groups the ids, is multiplied as in forward."""
    groups = torch.randn(48, 16)

    def loss(logits, targets):
        return plain_loss(logits.to(outer or torch.float32) @ groups, targets)

    def gradient_of(logits):
        with torch.autocast("cpu", outer, enabled=outer is not None):
            value = kernels.in_chunks(loss, logits, targets)
        return torch.autograd.grad(value, logits, create_graph=twice)[0]

    logits, targets = torch.randn(7, 48, requires_grad=True), torch.randint(16, (7,))
    expected = gradient_of(logits)
    monkeypatch.setattr(kernels, "LOGITS_IN_CHUNK", 3 * 48)
    torch.testing.assert_close(gradient_of(logits), expected)


def test_attention_on_a_cpu_takes_a_mask_of_numbers_in_the_models_dtype():
    q, k, v = torch.randn(3, 1, 2, 8, 4).bfloat16()
    mask = torch.full((8, 8), -torch.inf, dtype=torch.bfloat16).triu(1)
    expected = kernels.attention(q, k, v, is_causal=True)
    torch.testing.assert_close(kernels.attention(q, k, v, attn_mask=mask), expected)


def test_out_of_memory_is_known_in_whatever_it_is_wrapped():
    cuda = "CUDA out of memory. Tried to allocate 12.00 GiB. GPU 0 has a total capacity of 79.10 GiB"
    wrapped = RuntimeError("the compiler failed")
    wrapped.__context__ = torch.OutOfMemoryError("")
    for error in [
        RuntimeError(f"OutOfMemoryError: {cuda}\n\nSet TORCHDYNAMO_VERBOSE=1 for the internal stack trace"),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to"),
        MemoryError(),
        wrapped,
    ]:
        assert is_out_of_memory(error), error
    for text in ("out of resource: shared memory, Required: 262144", "CUDA error: an illegal memory access"):
        assert not is_out_of_memory(RuntimeError(text)), text


def test_a_gpu_is_known_by_its_whole_name():
    """As torch.cuda.get_device_name gives it, with the dense TFLOP/s of its datasheet; a near miss has none."""
    known = {"Tesla V100-SXM2-16GB": 125, "NVIDIA A100-SXM4-40GB": 312, "NVIDIA GeForce RTX 4090": 165.2}
    assert {name: peak_flops(name) for name in known} == pytest.approx({name: 1e12 * known[name] for name in known})
    for name in ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "cpu"):
        assert peak_flops(name) is None
