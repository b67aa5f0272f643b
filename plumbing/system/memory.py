"""What fits into memory: models made without weights, the activations of a sequence, and a bound on the batch."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

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
        advice = "Use a smaller model, or a larger device."
        if shares < world.size:
            advice = (
                f"Add --shard: then each of the {world.size} ranks needs {needed / world.size / 2**30:,.1f} GiB."
            )
        raise UserError(
            f"This model is too large: training takes 16 bytes for each parameter, {needed / 2**30:,.1f} GiB here, but "
            f"{available / 2**30:,.1f} GiB are free. {advice}"
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
    """The bytes of a model's weights, their gradients and the optimizers' state, on all ranks together."""
    weights = sum(p.nbytes for p in model.parameters())
    gradients = weights if optimizers else 0
    return weights + gradients + sum(map(state_bytes, optimizers))


def count_kept_bytes(
    forward: Callable[[], torch.Tensor], model: Any, *, keeps_casts: bool
) -> tuple[int, torch.Tensor]:
    """(the bytes that forward() keeps for the backward pass besides the weights, its result).

    keeps_casts: whether autocast keeps the weights in 16 bits, whatever the number of sequences.
    """
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor.detach()  # subtle: with the tensor itself, graph and tensor would keep each other alive

    result = None
    with (
        contextlib.suppress(RuntimeError),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        result = forward()
    if result is None:  # torch.func in the model allows no hooks, so nothing is counted
        kept.clear()
        result = forward()
    for weight in model.parameters():
        kept.pop(weight.untyped_storage()._cdata, None)
    num_bytes = sum(kept.values())
    if keeps_casts:
        num_bytes -= 2 * count_parameters(model)
    return max(0, num_bytes), result


def bound_on_B(kept_bytes: int, state_bytes: float, world: World) -> int:
    """A bound on B, because trying a B that cannot fit costs a compilation or, on a CPU, may end the process.

    kept_bytes: for each sequence; state_bytes: for gradients and optimizer state, and weights that are not there yet.
    """
    free = world.free_memory() - state_bytes
    if not world.has_own_memory:  # main memory runs out without an error, and a step needs more than it keeps
        free /= 2 * environment_number("LOCAL_WORLD_SIZE", 1)
    return max(1, int(min(free / max(1, kept_bytes), 2**30)))  # free may be infinite
