"""A model whose weights, gradients and optimizer state are split across the ranks, by torch's FSDP2.

Rank 0 makes the whole model in its main memory and hands each rank its rows. A checkpoint has whole tensors, so that a
run can continue sharded, on another number of ranks, or in DDP. All of this leaves an unsharded model unchanged.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._pytree import tree_map_only

from plumbing.system.distributed import World
from plumbing.system.memory import SkipInit


def fill(model: nn.Module, whole: nn.Module | None, world: World) -> None:
    """Give a sharded model, which is on the meta device, the weights and buffers of rank 0's `whole` model."""
    aliases: dict[int, list[str]] = {}  # to_empty would make two tensors of tied weights
    for name, p in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(p), []).append(name)
    for module in model.modules():
        if isinstance(module, FSDPModule) and dist.get_backend() == "gloo":
            module.set_force_sum_reduction_for_comms(True)  # before torch 2.9, gloo returns a sum for an average
    model.to_empty(device=world.device)
    for first, *others in aliases.values():
        for other in others:
            owner, _, attribute = other.rpartition(".")
            setattr(model.get_submodule(owner), attribute, model.get_parameter(first))
    with torch.no_grad():
        for name, p in model.named_parameters():
            source = whole.get_parameter(name).detach() if whole else None
            p.copy_(shard_tensor(source, p, world))
        for name, buffer in model.named_buffers():
            if whole:
                buffer.copy_(whole.get_buffer(name))
            dist.broadcast(buffer, 0)
    extra = world.broadcast_from_master(extra_state, whole)
    if extra:
        model.load_state_dict(extra, strict=False)


def extra_state(whole: nn.Module) -> dict[str, Any]:
    """The entries of a state dict that are not tensors: see torch's get_extra_state."""
    return {name: value for name, value in whole.state_dict().items() if not isinstance(value, torch.Tensor)}


def shard_tensor(tensor: torch.Tensor | None, p: Any, world: World) -> torch.Tensor:
    """Split rank 0's whole tensor like the sharded parameter p. The other ranks read only its shape and dtype."""
    like = p if tensor is None else tensor
    if world.is_master:
        full = like.to(world.device)
    else:
        full = torch.empty(like.shape, dtype=like.dtype, device=world.device)
    if isinstance(p, DTensor):
        return distribute_tensor(full, p.device_mesh, p.placements)
    dist.broadcast(full, 0)  # a parameter that FSDP ignores
    return full


def shard_state(state: dict[str, Any], parameters: list[torch.Tensor], world: World) -> dict[str, Any]:
    """Split an optimizer's state dict like its parameters. Only rank 0 has the large tensors in it.

    A tensor is split by rows if it has as many rows as its parameter. An average over columns has.
    """
    shared = {}
    for number, values in state["state"].items():
        shared[number] = dict(values)
        p = parameters[number] if isinstance(number, int) else None
        for name, value in values.items():
            if not isinstance(value, torch.Tensor):
                continue
            if isinstance(p, DTensor) and value.dim() > 0 and value.size(0) == p.size(0):
                shared[number][name] = shard_tensor(value, p, world)
            else:
                shared[number][name] = world.fetch(value)
    others = {name: value for name, value in state.items() if name != "state"}
    return world.fetch(others) | {"state": shared}


def gathered(state: Any, device: torch.device | str) -> Any:
    """`state` with whole tensors on this device instead of sharded ones. All ranks must call this."""
    copies: dict[Any, torch.Tensor] = {}  # tied weights are gathered once

    def gather(tensor: Any) -> torch.Tensor:
        memory = (tensor.to_local().untyped_storage()._cdata, tensor.shape)
        if memory not in copies:
            copies[memory] = tensor.full_tensor().to(device)
        return copies[memory]

    return tree_map_only(DTensor, gather, state)


def gathered_on_master(state: Any, world: World) -> Any:
    """`state` with whole tensors in rank 0's main memory instead of sharded ones. All ranks must call this."""
    return gathered(state, "cpu" if world.is_master else "meta")


def whole_copy(model: Any, model_class: type) -> Any:
    """A whole copy of a sharded model, in evaluation mode. All ranks must call this."""
    with torch.device("meta"), SkipInit():
        copy = model_class(model.config)
    device = next(model.parameters()).device
    with torch.no_grad():
        # the model's own load_state_dict may take other arguments
        nn.Module.load_state_dict(copy, gathered(model.state_dict(), device), strict=False, assign=True)
    for name, buffer in model.named_buffers():  # also those that no state dict has
        owner, _, attribute = name.rpartition(".")
        copy.get_submodule(owner)._buffers[attribute] = buffer
    copy.has_cache = model.has_cache
    return copy.eval()


def map_over_ranks(function: Callable[[torch.Tensor], torch.Tensor], stacks: Any, *, rows: int) -> torch.Tensor:
    """collectives.map_over_ranks for a DTensor.

    An all-to-all gives each rank whole stacks, and a second one returns its rows to it.
    """
    entries = stacks.redistribute(placements=[Shard(0)])
    local = entries.to_local()
    mapped = function(local.reshape(-1, rows, stacks.size(-1))).to(local.dtype).reshape(local.shape)
    whole = DTensor.from_local(
        mapped, stacks.device_mesh, [Shard(0)], run_check=False, shape=stacks.shape, stride=entries.stride()
    )
    return whole.redistribute(placements=stacks.placements)
