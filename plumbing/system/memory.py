"""What fits into memory: models made without weights, the activations of a sequence, and a bound on the batch."""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from plumbing.cli.console import UserError
from plumbing.system.distributed import World, environment_number


class SkipInit(TorchFunctionMode):
    """Context in which torch.nn.init does nothing. A model whose weights are loaded next is made seconds faster."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def new_model(model_class: Callable[[Any], Any], config: Any) -> Any:
    """Make a model whose buffers are contiguous: an expanded one could be neither written to nor broadcast."""
    model = model_class(config)
    for buffer in model.buffers():
        buffer.data = buffer.data.contiguous()
    return model


def count_parameters(model: Any) -> int:
    return sum(p.numel() for p in model.parameters())


def imagine(make_model: Callable[[], Any]) -> Any:
    """Make a model that takes no memory, unless it reads its initial values, which must be real."""
    with contextlib.suppress(Exception), torch.device("meta"), SkipInit():
        return make_model()
    return make_model()


def check_memory(make_model: Callable[[], Any], world: World, *, shares: int) -> None:
    """Raise UserError if a model is too large to train. The check takes no memory for its weights.

    shares: the number of ranks across which the model is split.
    """
    try:
        with torch.device("meta"), SkipInit():
            parameters = count_parameters(make_model())
    except Exception:  # a model that reads its initial values cannot be made on the meta device
        return
    available = world.free_memory()
    needed = 16 * parameters / shares
    if needed > available:
        raise UserError(
            f"This model is too large: training takes 16 bytes for each parameter, {needed / 2**30:,.1f} GiB here, but "
            f"{available / 2**30:,.1f} GiB are free. Use a smaller model, a larger device, or more GPUs with --shard."
        )


def state_bytes(optimizer: Any) -> float:
    """A guess at the bytes of an optimizer's state: two numbers per parameter, as AdamW has, unless its class has
    numbers_per_parameter.
    """
    total = 0
    for group in optimizer.param_groups:
        total += sum(p.nbytes for p in group["params"])
    return getattr(optimizer, "numbers_per_parameter", 2) * total


def training_bytes(model: Any, optimizers: list[Any]) -> float:
    """The bytes of a model's weights, their gradients and the optimizers' state, before it is split over ranks."""
    weights = sum(p.nbytes for p in model.parameters())
    gradients = weights if optimizers else 0
    return weights + gradients + sum(map(state_bytes, optimizers))


class Account(NamedTuple):
    """The bytes that training takes on each rank, counted without torch.compile, which takes a little less."""

    state: float = 0.0  # weights, gradients and optimizer state
    moment: float = 0.0  # for a moment, whatever B: weights in 16 bits or gathered, a chunk of the loss
    sequence: float = 0.0  # of each sequence: what its forward pass keeps, and gradients of that

    def beside_state(self, B: int) -> float:
        return self.moment + B * self.sequence

    def total(self, B: int) -> float:
        """The bytes at the peak of a micro-step of B sequences."""
        return self.state + self.beside_state(B)


class LiveBytes(TorchDispatchMode):
    """Context that counts the bytes of tensors that are made in it and live. What the model has now does not count."""

    def __init__(self, model: Any):
        super().__init__()
        self.now = self.peak = self.kept = 0
        self.sizes = {}
        for tensor in (*model.parameters(), *model.buffers()):
            self.sizes[tensor.untyped_storage()._cdata] = 0
            if tensor.grad is not None:
                self.sizes[tensor.grad.untyped_storage()._cdata] = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor.untyped_storage())
        return result

    def see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.release, key)

    def release(self, key: int) -> None:
        self.now -= self.sizes.pop(key)


def add_gradients(model: Any) -> None:
    """Give each weight a gradient, as it has from the second micro-step on."""
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p)


def gather_blocks(model: Any, dtype: torch.dtype) -> None:
    """Give a fake model's blocks weights in this dtype, as FSDP gathers them, and gradients. The others have none."""
    for block in model.blocks:
        for module in block.modules():
            for name, p in [*module.named_parameters(recurse=False)]:
                setattr(module, name, torch.nn.Parameter(p.detach().to(dtype), p.requires_grad))
        add_gradients(block)


def gathered_bytes(model: Any, dtype: torch.dtype) -> float:
    """The bytes of weights that a rank has whole at a time with --shard, if blocks are gathered in this dtype."""
    sizes = [count_parameters(block) for block in model.blocks] or [0]
    # of the blocks: one in use, the next one, and gradients of one
    return 4 * (count_parameters(model) - sum(sizes)) + 3 * max(sizes) * dtype.itemsize


def bound_on_B(account: Account, held: float, world: World) -> int:
    """A bound on B, because trying a B that cannot fit costs a compilation or, on a CPU, may end the process.

    held: bytes of the account that are taken already.
    """
    free = world.free_memory() + held - account.total(0)
    if not world.has_own_memory:  # main memory runs out without an error, and not all of a step is counted
        free /= 2 * environment_number("LOCAL_WORLD_SIZE", 1)
    return max(1, int(min(free / max(1, account.sequence), 2**30)))  # free may be infinite
