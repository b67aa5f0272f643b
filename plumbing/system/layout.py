"""How the ranks hold the model. Each has all of it or, with --shard, a share; in a dry run, nobody has anything."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from plumbing.cli.console import UserError
from plumbing.system import memory, trial
from plumbing.system.distributed import ImaginedWorld, World

Make = Callable[[Any], Any]  # makes a model for a TrainConfig


class Whole:
    """Each rank holds the whole model. All ranks must call each of these methods."""

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
            extra = self.world.broadcast_from_master(trial.extra_state, model)
            if extra:
                model.load_state_dict(extra, strict=False)
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

    def gathered(self, state: Any) -> Any:
        """`state` with whole tensors on rank 0."""
        return state

    def hand_out_optimizer(self, state: Any, parameters: list[Any]) -> dict[str, Any]:
        """Rank 0's state dict of an optimizer, for this rank's parameters."""
        return self.world.broadcast_from_master(lambda: state)

    def check(self, state: dict[str, Any]) -> None:
        """Raise UserError if a resume could not give this training state back to the ranks."""

    def explained(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which errors of this layout are explained."""
        return contextlib.nullcontext()


class Imagined(Whole):
    """A dry run: no tensor takes memory, and what fits is estimated."""

    def __init__(self, world: World, shares: int):
        super().__init__(world)
        self.shares = shares

    def make(self, config: Any, first: Make, empty: Make, *, examine: Any, shard: Any) -> Any:
        return memory.imagine(lambda: empty(config))

    def try_out(self, attempt: trial.Trial, examine: Any) -> trial.Fit:
        return trial.estimate(attempt)


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
        real=world,
        gpu_memory=asked.gpu_memory * 1e9,
    )
