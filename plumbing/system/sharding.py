"""A model whose weights, gradients and optimizer state are split across the ranks, by torch's FSDP2.

Rank 0 makes the whole model in its main memory and hands each rank its rows. A checkpoint has whole tensors, so that a
run can continue sharded, on another number of ranks, or in DDP. All of this leaves an unsharded model unchanged.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from plumbing.cli.console import UserError, first_line, is_out_of_memory, note
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
        if torch.__version__ < "2.10":  # later ones raise an error
            note(
                "Before torch 2.10, an optimizer that changes sums or norms of rows and columns in place, as Adafactor "
                "does, computes other updates with --shard than without it. AdamW and Muon are right."
            )

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
        self.world.run_on_master(check_weights_stay, whole)
        expected = self.world.run_on_master(steady_sums, whole)
        has_cache = self.world.broadcast_from_master(examine, whole)
        extra = self.world.broadcast_from_master(trial.extra_state, whole)
        tensors = self.world.run_on_master(trial.named_tensors, whole) or {}
        del whole  # its tensors are freed as they are handed out

        def hand_out(name: str, tensor: Any) -> torch.Tensor:
            placements = getattr(tensor, "placements", None)
            return shard_tensor(tensors.pop(name, None), tensor, placements, world=self.world)

        with self.explained(words=""):
            model = self.split(empty, shard, exact, hand_out)
            trial.load_extra_state(model, extra)
            with exact_matmuls():
                found = sums_of_gradients(model)
            self.world.run_on_master(check_gradients, found, expected)
            if config != exact:
                shares = trial.named_tensors(model)
                model = self.split(empty, shard, config, lambda name, tensor: shares[name].detach())
                trial.load_extra_state(model, extra)
        model.has_cache = has_cache
        return model

    def split(self, empty: Make, shard: Callable[..., None], config: Any, hand_out: Callable[..., Any]) -> Any:
        """A model that is shared out. hand_out(name, tensor): the share for this parameter or buffer."""
        with torch.device("meta"), SkipInit():
            model = empty(config)
        marks = {name: dict(vars(p)) for name, p in model.named_parameters()}
        shard(model, self.world, config)
        for module in model.modules():
            if isinstance(module, FSDPModule) and dist.get_backend() == "gloo":
                module.set_force_sum_reduction_for_comms(True)  # in torch 2.8, gloo returns a sum for an average
        for name, tensor in trial.named_tensors(model).items():
            value = hand_out(name, tensor)
            if name in marks:
                value = nn.Parameter(value, tensor.requires_grad)
                vars(value).update(marks[name])
            torch.utils.swap_tensors(tensor, value)  # also where it is tied
        return model

    def try_out(self, attempt: trial.Trial, examine: Any) -> trial.Fit:
        with self.explained(words=""), trial.undone(attempt.raw_model, weights=False):
            torch.manual_seed(0)  # ranks that try other ids might use other parameters, and wait for each other
            return trial.find_what_fits(attempt)

    def recover(self, model: Any) -> None:
        if not hasattr(model, "reset_iter_state"):
            raise UserError(
                "A training step failed, perhaps for lack of memory. Before torch 2.13, --shard tries no other one. "
                "Halve --batch-size."
            )
        model.reset_iter_state()

    def whole_model(self, model: Any) -> Any:
        return whole_copy(model, self.world.device)

    def model_to_export(self, model: Any) -> Any:
        return whole_copy(model, "cpu" if self.world.is_master else "meta")

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
        """See Whole. What was whole is split like its parameter if it has as many rows. An average over columns has."""
        shapes = self.world.broadcast_shapes(state)
        source = state if self.world.is_master else shapes
        shared = tree_map_only(torch.Tensor, self.world.broadcast, {**source, "state": {}})
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
                elif number not in splits and isinstance(p, DTensor) and value.shape[:1] == p.shape[:1]:
                    placements = p.placements
                if placements:
                    value = shard_tensor(value, p, placements, world=self.world)
                else:
                    value = self.world.broadcast(value)
                shared["state"][number][name] = value
        return shared

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
    def explained(self, words: str = "FSDP|DTensor|placement") -> Iterator[None]:
        try:
            yield
        except (AssertionError, RuntimeError, ValueError) as error:
            if is_out_of_memory(error):
                raise UserError(
                    "Memory runs out. Halve --batch-size or, if a whole copy of the model does not fit, add "
                    "--hellaswag-every 0 --sample-every 0."
                ) from None
            if not re.search(words, str(error)):
                raise
            raise UserError(
                "--shard makes DTensors of weights, gradients and optimizer state, and a block's weights are whole in "
                f"its own forward pass only. This fails: {first_line(error)}. Change the code that needs more, or "
                "leave --shard out."
            ) from None


def check_weights_stay(model: Any) -> None:
    """Raise UserError if a forward pass in training writes into the weights: FSDP would drop what it writes."""
    before = {name: p.detach().norm() for name, p in model.named_parameters()}
    with trial.undone(model, weights=False), torch.no_grad():
        model(torch.zeros(1, min(16, model.config.block_size), dtype=torch.long))
    for name, p in model.named_parameters():
        if p.norm() != before[name]:
            raise UserError(
                f"The model writes into {name} in its forward pass, and --shard would lose that. Leave --shard out."
            )


def sums_of_gradients(model: Any) -> dict[str, torch.Tensor]:
    """Sum and norm (2, rows) of each row of the gradients of a short text, by parameter; a vector is one row.

    The model is left without gradients, and these numbers take no memory.
    """
    device = next(model.parameters()).device
    idx = torch.arange(min(16, model.config.block_size), device=device)[None] % 8
    trial.loss_of(model.eval()(idx, idx.flip(1))).backward()
    model.train()
    sums = {}
    for name, p in model.named_parameters():
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        rows = gradient.flatten(1) if p.dim() > 1 else gradient.reshape(1, -1)
        both: list[Any] = [rows.sum(1), rows.square().sum(1).sqrt()]
        if isinstance(p, DTensor):
            both = [each.full_tensor() for each in both]
        sums[name] = torch.stack(both).detach().cpu()
    model.zero_grad(set_to_none=True)
    return sums


def steady_sums(model: Any) -> dict[str, torch.Tensor]:
    """Those sums that are the same the next time: a model may draw random numbers."""
    again = sums_of_gradients(model)
    return {name: sums for name, sums in sums_of_gradients(model).items() if is_close(again[name], sums)}


def check_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Raise UserError if a parameter gets another gradient than in the whole model: FSDP loses hooks, say."""
    for name, sums in expected.items():
        if not is_close(found[name], sums):
            raise UserError(
                f"With --shard, {name} gets another gradient than in the whole model: FSDP loses hooks on parameters, "
                "for example. Change that in the model, or leave --shard out."
            )


def is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether sums and norms of rows are the same but for rounding."""
    norms = expected[1]
    return bool(((found - expected).abs() <= 1e-2 * norms + 1e-5 * norms.norm()).all())


def shard_tensor(tensor: torch.Tensor | None, p: Any, placements: Any, *, world: World) -> torch.Tensor:
    """Split rank 0's whole tensor over the ranks of the parameter p; without placements, give it to all.

    The other ranks read only its shape and dtype.
    """
    like = p if tensor is None else tensor
    full = torch.empty(like.shape, dtype=like.dtype, device=world.device)
    if world.is_master:
        full.copy_(like.detach())
    if placements:
        return distribute_tensor(full, p.device_mesh, placements)
    dist.broadcast(full, 0)
    return full.detach()  # gloo's thread may still hold `full`, so that it could not be swapped


def whole_copy(model: Any, device: torch.device | str) -> Any:
    """A whole copy of a sharded model on a device, in evaluation mode. All ranks must call this."""
    with torch.device("meta"), SkipInit():
        # fully_shard has replaced GPT with FSDPGPT, a subclass of FSDPModule and GPT
        copy = type(model).__bases__[1](model.config)
    tensors = trial.named_tensors(model, remove_duplicate=False)
    # not by the model's state dict, which may be its own and have a part of them
    for name, tensor in copied(tensors, device).items():
        owner, _, attribute = name.rpartition(".")
        if isinstance(tensors[name], nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=False)
        setattr(copy.get_submodule(owner), attribute, tensor)
    trial.load_extra_state(copy, trial.extra_state(model))
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
