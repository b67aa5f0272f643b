"""The ranks of a run: how they meet and exchange values."""

import contextlib
import datetime
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from plumbing.cli.console import UserError, count, first_line
from plumbing.system import devices
from plumbing.system.devices import check_kernels, choose_device, process_restored

Result = TypeVar("Result")


@dataclass(frozen=True)
class World:
    """This process's place among the ranks of the run, which torchrun puts in the environment."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")  # cpu, mps or cuda:<local rank>

    @property
    def is_master(self) -> bool:
        return self.rank == 0

    @property
    def device_name(self) -> str:
        """The GPU's name, such as "NVIDIA H100 80GB HBM3", or another device's type."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name()
        return str(self.device)

    def free_memory(self) -> float:
        """Free bytes for this rank; infinite if unknown."""
        return devices.free_memory(self.device)

    def choose_dtype(self, name: str, is_wide: bool) -> str:
        """See devices.choose_dtype."""
        return devices.choose_dtype(name, self.device, is_wide)

    @property
    def has_own_memory(self) -> bool:
        """Whether the device has memory of its own, which runs out with an error."""
        return self.device.type == "cuda" and not torch.cuda.get_device_properties(self.device).is_integrated

    def gather(self, value: Result) -> list[Result]:
        """The values of all ranks, on every rank."""
        values = [value] * started_ranks()
        if len(values) > 1:
            dist.all_gather_object(values, value)
        return values

    def max_over_ranks(self, number: int) -> int:
        """The largest of the ranks' numbers, for decisions that must be the same on all ranks."""
        return max(self.gather(number))

    def check_agreement(self, facts: dict[str, Any]) -> None:
        """Raise UserError, on all ranks, unless they all call this with the same `facts`: {name: value}."""
        gathered = self.gather(facts)
        expected = gathered[0]
        for rank, theirs in enumerate(gathered):
            differences = [
                f"{name} is {theirs.get(name)} instead of {expected.get(name)}"
                for name in dict.fromkeys([*expected, *theirs])
                if repr(theirs.get(name)) != repr(expected.get(name))  # nan is not nan
            ]
            if differences:
                raise UserError(
                    f"Rank {rank} does not agree with rank 0: {'; '.join(differences)}. Start all ranks with the same "
                    "program, flags and data."
                )

    def shorten_timeout(self) -> None:
        """Let ranks wait for each other no longer than STEP_TIMEOUT. torch 2.8 cannot change that."""
        ranks = dist.group.WORLD  # None for a single process
        if ranks and hasattr(ranks, "set_timeout"):
            ranks.set_timeout(STEP_TIMEOUT)

    def run_on_master(self, action: Callable[..., Result], *args: Any) -> Result | None:
        """Run action(*args) on rank 0. Returns its result there and None elsewhere; all ranks raise its error."""
        result = error = None
        if self.is_master:
            try:
                result = action(*args)
            except (UserError, OSError) as caught:
                error = caught
        errors = [error]
        if started_ranks() > 1:
            dist.broadcast_object_list(errors)
        if errors[0]:
            raise errors[0]
        return result

    def broadcast_from_master(self, action: Callable[..., Result], *args: Any) -> Result:
        """Run action(*args) on rank 0 and return its result on every rank. All ranks raise its error."""
        result: Any = self.run_on_master(action, *args)
        if started_ranks() == 1:
            return result
        shapes = self.broadcast_shapes(result)
        # its tensors, also those in tuples, lists and dicts, are broadcast one by one afterwards
        return tree_map_only(torch.Tensor, self.broadcast, result if self.is_master else shapes)

    def broadcast_shapes(self, value: Any) -> Any:
        """Rank 0's `value` on every rank, with its tensors on the meta device."""
        message = [tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), value)]
        dist.broadcast_object_list(message)
        return message[0]

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's tensor on every rank, on the CPU; the other ranks pass one of the same shape and dtype."""
        shared = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        if self.is_master:
            shared.copy_(tensor)
        dist.broadcast(shared, 0)
        return tensor if self.is_master else shared.cpu()


def started_ranks() -> int:
    """The number of ranks that exchange values. A dry run may be about more."""
    return dist.get_world_size() if dist.is_initialized() else 1


@dataclass(frozen=True)
class ImaginedWorld(World):
    """The ranks of another machine, of which a dry run gives an account: each does what this process would do."""

    gpu_memory: float = 0.0  # of each, in bytes; 0: this machine's

    @property
    def device_name(self) -> str:
        if self.gpu_memory:
            return f"GPU of {self.gpu_memory / 1e9:g} GB"
        return super().device_name

    def free_memory(self) -> float:
        return self.gpu_memory or super().free_memory()

    def choose_dtype(self, name: str, is_wide: bool) -> str:
        if self.gpu_memory:
            return "bfloat16" if name == "auto" else name
        return super().choose_dtype(name, is_wide)

    @property
    def has_own_memory(self) -> bool:
        return self.gpu_memory > 0 or super().has_own_memory


# srun and mpirun say in these how many processes they have started, but not where those can meet
LAUNCHERS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
CONNECT_SECONDS = 60  # how long a rank tries to reach the others
TIMEOUT = datetime.timedelta(minutes=30)  # how long ranks that are connected wait for each other
STEP_TIMEOUT = datetime.timedelta(minutes=10)  # from the second step on, when nothing is downloaded or compiled


def create_store(rank: int) -> Any:
    """Make the store through which the ranks find each other, a new one on every start."""
    connect = datetime.timedelta(seconds=CONNECT_SECONDS / 2)  # torch tries twice
    store = next(dist.rendezvous("env://", timeout=connect))[0]
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # subtle: since torch 2.5, torchrun keeps its store over restarts, and ranks find dead ranks' addresses in it
        # (pytorch issue 135712). A prefix would not help, because nodes count restarts differently. So rank 0 makes a
        # new store on each start, always at the port of the first one, where the others can connect
        shared = store
        shared.set_timeout(TIMEOUT)  # torchrun has started rank 0, whose imports may take longer than `connect`
        port = 0  # any free one
        if rank > 0 or shared.check(["port"]):
            port = int(shared.get("port"))
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            port,
            is_master=rank == 0,
            timeout=connect,
            wait_for_workers=False,
            use_libuv=sys.platform != "win32",  # torch's builds for Windows lack it
        )
        shared.set("port", str(store.port))
    store.set_timeout(TIMEOUT)
    return store


def environment_number(name: str, default: int) -> int:
    """The number in an environment variable that torchrun sets. UserError unless it is whole and `default` or more."""
    text = os.environ.get(name, str(default))
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < default:
        raise UserError(
            f"The environment variable {name} is {text!r}, but it must be a whole number, {default} or more. "
            "Start the ranks with torchrun, which sets it, or unset it."
        )
    return int(text)


@contextlib.contextmanager
def join_ranks(typed: dict[str, Any]) -> Iterator[World]:
    """Context in which this process is one of the ranks, on the typed device. It restores torch's settings."""
    with process_restored():
        yield setup_distributed(typed.get("device", "auto"))
    if dist.is_initialized():  # not after an error, because other ranks may be waiting for this one
        # subtle: gloo's thread needs the GIL to release its last tensor, but destroy_process_group holds the GIL
        # while it waits for that thread. Sleeping first lets the thread take the GIL and finish
        time.sleep(0.1)
        dist.destroy_process_group()


def device_of_rank(device: str, world_size: int) -> str:
    """The device of this process: each of several ranks has its own GPU."""
    if ":" in device and world_size > 1:
        raise UserError(f"--device is {device}, but several ranks need a GPU each. Use --device cuda.")
    if device != "cuda":
        return device
    local_ranks = environment_number("LOCAL_WORLD_SIZE", 1)
    gpus = torch.cuda.device_count()
    if local_ranks > gpus:
        raise UserError(
            f"{local_ranks} processes on this machine share {count(gpus, 'GPU')}. Use --nproc-per-node={gpus}."
        )
    device = f"cuda:{environment_number('LOCAL_RANK', 0)}"
    check_kernels(device)  # the machine's GPUs may differ
    return device


def setup_distributed(device: str) -> World:
    """Join the process group that torchrun started, or run as a single process. Selects this rank's GPU."""
    for name in LAUNCHERS:
        if "RANK" not in os.environ and environment_number(name, 1) > 1:
            raise UserError(
                f"{name} is {os.environ[name]}, but without torchrun each process would train by itself. Start one "
                f"torchrun on each node: OPERATIONS.md has a script for Slurm. For a single process, unset {name}."
            )
    rank = environment_number("RANK", 0)
    world_size = environment_number("WORLD_SIZE", 1)
    device = device_of_rank(choose_device(device), world_size)
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    if "RANK" in os.environ or world_size > 1:
        try:
            if rank >= world_size:
                raise ValueError("ranks count from 0")
            store = create_store(rank)
        except (RuntimeError, ValueError) as error:  # torch's: addresses, ports, time-outs, missing variables
            raise UserError(
                f"Rank {rank} of {world_size} cannot join the others: {first_line(error)}. Start all ranks "
                "within a minute, with torchrun or with one MASTER_ADDR that they can reach and a free MASTER_PORT. "
                "For a single process, unset RANK and WORLD_SIZE."
            ) from None
        options: dict[str, Any] = dict(backend="gloo")
        if device.startswith("cuda") and dist.is_nccl_available():
            # NCCL connects now if the GPU is named, and a barrier need not guess which GPU to use
            options = dict(backend="nccl", device_id=torch.device(device))
        dist.init_process_group(store=store, rank=rank, world_size=world_size, timeout=TIMEOUT, **options)
    return World(rank, world_size, torch.device(device))
