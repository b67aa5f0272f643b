"""A model whose weights, gradients and optimizer state are split across the ranks, by torch's FSDP2.

Rank 0 makes the whole model in its main memory and hands each rank its rows. A checkpoint has whole tensors, so that a
run can continue sharded, on another number of ranks, or in DDP. All of this leaves an unsharded model unchanged.
"""

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from plumbing.cli.console import UserError, first_line, is_out_of_memory
from plumbing.system import trial
from plumbing.system.devices import exact_matmuls
from plumbing.system.distributed import World
from plumbing.system.layout import Make, Splits, Whole, copied
from plumbing.system.memory import SkipInit


class Shared(Whole):
    """Each rank holds its share of the weights, and so of the gradients and the optimizer state."""

    def __init__(self, world: World):
        super().__init__(world)
        self.shares = world.size
        self.copies = 1

    def make(
        self,
        config: Any,
        first: Make,
        empty: Make,
        *,
        examine: Callable[[Any], bool],
        shard: Callable[[Any, World, Any], None],
    ) -> Any:
        """See Whole. Rank 0 makes the whole model in its main memory, where examine(model) says whether a cache works
        for it; shard(model, world, config) splits it with FSDP.
        """
        exact = dataclasses.replace(config, dtype="float32")
        whole = self.world.run_on_master(first, exact)
        has_cache = self.world.broadcast_from_master(examine, whole)
        self.world.run_on_master(check_weights_stay, whole)
        try:
            model = split(empty, shard, whole, exact, self.world)
            check_gradients(model, whole, self.world)
            del model
            gc.collect()  # FSDP's hooks and modules hold each other
            model = split(empty, shard, whole, config, self.world)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            raise UserError(
                f"--shard cannot split this model: {first_line(error)}. Change that in the model, or leave "
                "--shard out."
            ) from None
        model.has_cache = has_cache
        return model

    def try_out(self, attempt: trial.Trial, examine: Any) -> trial.Fit:
        return trial.try_sharded(attempt)

    def recover(self, model: Any) -> None:
        if not hasattr(model, "reset_iter_state"):  # before torch 2.13
            raise UserError(
                "Memory runs out. Halve --batch-size, or use a newer torch, with which this program does so."
            )
        model.reset_iter_state()

    def whole_model(self, model: Any) -> Any:
        return whole_copy(model, class_of(model), self.world.device)

    def model_to_export(self, model: Any) -> Any:
        return whole_copy(model, class_of(model), "cpu" if self.world.is_master else "meta")

    def whole_tensor(self, tensor: Any) -> torch.Tensor:
        return tensor.full_tensor()

    def copied(self, state: Any) -> Any:
        return copied(state, "cpu" if self.world.is_master else "meta")

    def plain_tensors(self, state: Any) -> list[torch.Tensor]:
        return [tensor for tensor in super().plain_tensors(state) if not isinstance(tensor, DTensor)]

    def splits_of(self, state: dict[str, Any]) -> Splits:
        splits: Splits = {}
        for number, values in state.get("state", {}).items():
            splits[number] = {}
            for name, value in values.items():
                if isinstance(value, DTensor):
                    splits[number][name] = getattr(value.placements[0], "dim", None)
        return splits

    def hand_out_optimizer(self, state: Any, parameters: list[Any], splits: Splits) -> dict[str, Any]:
        return shard_state(state, parameters, splits, world=self.world)

    def check(self, state: dict[str, Any]) -> None:
        for optimizer in state["optimizer"]:
            if "state" not in optimizer:
                raise UserError(
                    "--shard needs optimizers whose state_dict() has state and param_groups, as torch's have. This one "
                    f"has {', '.join(map(str, optimizer))}. Leave --shard out."
                )
        for name, values in state["own"].items():
            if any(isinstance(leaf, DTensor) for leaf in tree_leaves(values)):
                raise UserError(
                    f"Parts.own[{name!r}] has shards of the model's weights, which no resume could split again. "
                    "Leave it out, or train without --shard."
                )

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        try:
            yield
        except AssertionError as error:
            if "FSDP" not in str(error):
                raise
            raise UserError(
                f"--shard: {first_line(error)}. Leave --shard out, or change the code that needs this."
            ) from None
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise UserError(
                "Memory runs out. Halve --batch-size or, if a whole copy of the model does not fit, add "
                "--hellaswag-every 0 --sample-every 0."
            ) from None


def class_of(model: Any) -> type:
    """The model's class without FSDP: fully_shard replaces GPT with FSDPGPT, a subclass of FSDPModule and GPT."""
    return type(model).__bases__[1]


def check_weights_stay(model: Any) -> None:
    """Raise UserError if a forward pass in training writes into the weights: FSDP would drop what it writes."""
    before = {name: p.detach().norm() for name, p in model.named_parameters()}
    idx = torch.zeros(1, min(16, model.config.block_size), dtype=torch.long)
    with trial.undone(model), torch.no_grad():
        model.train()
        model(idx)
        written = [name for name, p in model.named_parameters() if p.norm() != before[name]]
    if written:
        raise UserError(
            f"The model writes into {written[0]} in its forward pass, and --shard would lose that. Leave --shard out."
        )


def split(empty: Make, shard: Callable[..., None], whole: Any, config: Any, world: World) -> Any:
    """A model that is shared out, with the weights, buffers and marks on parameters of rank 0's `whole` model."""
    with torch.device("meta"), SkipInit():
        model = empty(config)
    marks = {name: dict(vars(p)) for name, p in model.named_parameters()}
    shard(model, world, config)
    fill(model, whole, world)
    for name, p in model.named_parameters():
        vars(p).update(marks[name])
    return model


def check_gradients(model: Any, whole: Any, world: World) -> None:
    """Raise UserError if a parameter gets another gradient than in rank 0's whole model: FSDP loses hooks, say."""
    with torch.random.fork_rng([world.device] if world.device.type == "cuda" else []), exact_matmuls():
        expected = world.run_on_master(gradients, whole)
        found = gradients(model)
        differ = []
        for name, gradient in found.items():
            gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            if expected and not is_close_by_rows(gradient.cpu(), expected[name]):
                differ.append(name)
        if expected and differ:  # a model may draw random numbers
            again = gradients(whole)
            differ = [name for name in differ if is_close_by_rows(again[name], expected[name])]
    names = world.broadcast_from_master(lambda: differ)
    if names:
        raise UserError(
            f"With --shard, {names[0]} gets another gradient than in the whole model: FSDP loses hooks on "
            "parameters, for example. Change that in the model, or leave --shard out."
        )


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """The gradients of a short text, by the parameters' names. The model is left without any."""
    device = next(model.parameters()).device
    idx = torch.arange(min(16, model.config.block_size), device=device)[None] % 8
    was_training = model.training
    model.eval()(idx, idx.flip(1))[1].backward()
    model.train(was_training)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def is_close_by_rows(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether all rows of a matrix are the same but for rounding; a vector is one row."""
    rows = len(expected) if expected.dim() > 1 else 1
    expected = expected.reshape(rows, -1)
    difference = (found.reshape(rows, -1) - expected).norm(dim=1)
    return bool((difference <= 1e-2 * expected.norm(dim=1) + 1e-5 * expected.norm()).all())


def fill(model: nn.Module, whole: nn.Module | None, world: World) -> None:
    """Give a sharded model, which is on the meta device, the weights and buffers of rank 0's `whole` model."""
    aliases: dict[int, list[str]] = {}  # to_empty would make two tensors of tied weights
    for name, p in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(p), []).append(name)
    for module in model.modules():
        if isinstance(module, FSDPModule) and dist.get_backend() == "gloo":
            module.set_force_sum_reduction_for_comms(True)  # in torch 2.8, gloo returns a sum for an average
    model.to_empty(device=world.device)
    for first, *others in aliases.values():
        for other in others:
            owner, _, attribute = other.rpartition(".")
            setattr(model.get_submodule(owner), attribute, model.get_parameter(first))
    with torch.no_grad():
        for name, p in model.named_parameters():
            source = whole.get_parameter(name).detach() if whole else None
            p.copy_(shard_tensor(source, p, getattr(p, "placements", None), world=world))
        for name, buffer in model.named_buffers():
            if whole:
                buffer.copy_(whole.get_buffer(name))
            dist.broadcast(buffer, 0)
    extra = world.broadcast_from_master(trial.extra_state, whole)
    if extra:
        model.load_state_dict(extra, strict=False)


def shard_tensor(tensor: torch.Tensor | None, p: Any, placements: Any, *, world: World) -> torch.Tensor:
    """Split rank 0's whole tensor over the ranks of the parameter p; without placements, give it to all.

    The other ranks read only its shape and dtype.
    """
    like = p if tensor is None else tensor
    if world.is_master:
        full = like.to(world.device)
    else:
        full = torch.empty(like.shape, dtype=like.dtype, device=world.device)
    if placements:
        return distribute_tensor(full, p.device_mesh, placements)
    dist.broadcast(full, 0)
    return full


def shard_state(
    state: dict[str, Any] | None, parameters: list[torch.Tensor], splits: Splits, *, world: World
) -> dict[str, Any]:
    """Split rank 0's state dict of an optimizer as it was before or, if it was whole, like its parameters.

    Then a tensor is split by rows if it has as many rows as its parameter. An average over columns has.
    """
    source = state or {}
    shapes = world.broadcast_shapes(source)
    if not world.is_master:
        source = shapes
    shared = tree_map_only(torch.Tensor, world.broadcast, {**source, "state": {}})
    for number, values in source["state"].items():
        shared["state"][number] = dict(values)
        p = parameters[number] if isinstance(number, int) else None
        for name, value in values.items():
            if not isinstance(value, torch.Tensor):
                continue
            placements = None
            if name in splits.get(number, {}):
                dim = splits[number][name]
                placements = [Replicate() if dim is None else Shard(dim)]
            elif (
                number not in splits
                and value.dim() > 0
                and isinstance(p, DTensor)
                and value.size(0) == p.size(0)
            ):
                placements = p.placements
            if placements:
                value = shard_tensor(value, p, placements, world=world)
            else:
                value = world.broadcast(value)
            shared["state"][number][name] = value
    return shared


def whole_copy(model: Any, model_class: type, device: torch.device | str) -> Any:
    """A whole copy of a sharded model on a device, in evaluation mode. All ranks must call this."""
    with torch.device("meta"), SkipInit():
        copy = model_class(model.config)
    with torch.no_grad():
        # the model's own load_state_dict may take other arguments
        nn.Module.load_state_dict(copy, copied(model.state_dict(), device), strict=False, assign=True)
    for name, buffer in model.named_buffers():  # also those that no state dict has
        owner, _, attribute = name.rpartition(".")
        copy.get_submodule(owner)._buffers[attribute] = buffer.to(device)
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
