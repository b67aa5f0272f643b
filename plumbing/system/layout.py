"""How the ranks hold the model. Each has all of it or, with --shard, a share; in a dry run, nobody has anything."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map_only

from plumbing.cli.console import UserError
from plumbing.system import memory, trial
from plumbing.system.distributed import ImaginedWorld, World

# {a parameter's number: {name: by which dimension this state of it is split; None: every rank has all of it}}
Splits = dict[int, dict[str, int | None]]
Make = Callable[[Any], Any]  # makes a model for a TrainConfig


class Whole:
    """Each rank holds the whole model. All ranks must call these methods, as some of them exchange tensors."""

    shares = 1  # across so many ranks are weights, gradients and optimizer state split

    def __init__(self, world: World):
        self.world = world
        self.copies = world.size  # of the whole model: with several, DDP averages their gradients

    def make(self, config: Any, first: Make, empty: Make, *, examine: Any, shard: Any) -> Any:
        """The model with its first weights on this rank's device.

        first: makes it on rank 0; empty: makes it elsewhere, with any weights; examine, shard: see `Shared`.
        """
        whole = self.world.run_on_master(first, config)
        model = (whole or empty(config)).to(self.world.device)
        if self.world.size > 1:
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), 0)
            trial.load_extra_state(model, self.world.broadcast_from_master(trial.extra_state, model))
        return model

    def try_out(self, attempt: trial.Trial, examine: Callable[[Any], bool]) -> trial.Fit:
        """Try a step, and examine the model, which stays as it is. examine(model): whether a cache works for it."""
        model = attempt.raw_model
        with trial.undone(model):
            found = trial.find_what_fits(attempt)
        model.has_cache = self.world.broadcast_from_master(examine, model)
        return found

    def recover(self, model: Any) -> None:
        """Prepare a model for another step after one has failed."""

    def whole_model(self, model: Any) -> Any:
        """A model with which a rank can compute without the others."""
        return model

    def model_to_export(self, model: Any) -> Any:
        """A whole model on rank 0, in its main memory if the ranks have no whole one."""
        return model

    def whole_tensor(self, tensor: Any) -> torch.Tensor:
        return tensor

    def copied(self, state: Any) -> Any:
        """On rank 0: a copy of `state` in main memory, with whole tensors."""
        return copied(state, "cpu") if self.world.is_master else None

    def plain_tensors(self, state: Any) -> list[torch.Tensor]:
        """The tensors in `state` that no rank has a share of, so that all should have them alike."""
        return [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]

    def splits_of(self, state: dict[str, Any]) -> Splits:
        """How an optimizer's state dict is split over the ranks."""
        return {}

    def hand_out_optimizer(self, state: Any, parameters: list[Any], splits: Splits) -> dict[str, Any]:
        """Rank 0's state dict of an optimizer, for this rank's parameters. splits: how it was split in its run."""
        return self.world.broadcast_from_master(lambda: state)

    def check(self, state: dict[str, Any]) -> None:
        """Raise UserError if a resume could not give this training state back to the ranks."""

    def explained(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which errors of this layout are explained."""
        return contextlib.nullcontext()


def copied(state: Any, device: torch.device | str) -> Any:
    """A copy of `state` on this device, with whole tensors. Tied weights are copied once, and stay tied in a file."""
    copies: dict[Any, torch.Tensor] = {}

    def copy(tensor: Any) -> torch.Tensor:
        local, whole = tensor, tensor
        if hasattr(tensor, "full_tensor"):  # a share
            local, whole = tensor.to_local(), tensor.full_tensor()
        memory = (local.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if not tensor.numel() or memory not in copies:
            copies[memory] = whole.to(device, copy=True)
        return copies[memory]

    return tree_map_only(torch.Tensor, copy, state)


class Imagined(Whole):
    """A dry run: no tensor takes memory, and what fits is estimated."""

    def __init__(self, world: World, shares: int):
        super().__init__(world)
        self.shares = shares

    def make(self, config: Any, first: Make, empty: Make, *, examine: Any, shard: Any) -> Any:
        return memory.imagine(lambda: empty(config))

    def try_out(self, attempt: trial.Trial, examine: Any) -> trial.Fit:
        account = trial.estimate(attempt)
        return trial.Fit(model=attempt.raw_model, B=attempt.choose_B(account), account=account)


def imagined(asked: Any, world: World) -> World:
    """The ranks that a command is about: in a dry run, --gpus of them, on any machine."""
    if not asked.dry_run:
        if asked.gpus or asked.gpu_memory:
            raise UserError(
                "--gpus and --gpu-memory are about another machine: add --dry-run, or leave them out."
            )
        return world
    return ImaginedWorld(
        rank=world.rank,
        size=asked.gpus or world.size,
        device=world.device,
        gpu_memory=asked.gpu_memory * 1e9,
    )
