"""The machine and the ranks: devices, dtypes, attention kernels, and the processes of one run."""

import contextlib
import datetime
import os
import re
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only
from tqdm import tqdm

from plumbing.cli import UserError, first_line, is_rank_0, refusal

# ----------------------------------------------------------------------------------------------------------
# The device


def choose_device(name):
    """The device called `name`, or for "auto" the best on this machine. Raises UserError if there is none."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    here = [device for device in available if available[device]]
    if name == "auto":
        return here[0]
    device_type, colon, index = name.partition(":")
    if device_type not in here or (colon and not re.fullmatch("[0-9]{1,4}", index)):
        raise UserError(
            f"PyTorch finds no device {name!r} on this machine. Leave --device out, or choose {' or '.join(here)}."
        )
    gpus = torch.cuda.device_count()
    if device_type == "cuda" and index and int(index) >= gpus:
        raise UserError(f"There is no {name} on this machine. Choose from cuda:0 to cuda:{gpus - 1}.")
    return name


def choose_dtype(name, device, n_embd):
    """The dtype called `name` as (torch dtype of activations, name); for "auto" the best for this device and width."""
    device_type = device.split(":")[0]
    # NVIDIA's GPUs have it since Ampere; other devices can at least emulate it
    has_bfloat16 = device_type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) >= (8, 0)
    if name == "auto" and device_type == "cuda":
        name = "bfloat16" if has_bfloat16 else "float16"
    elif name == "auto":
        # CPUs with bfloat16 instructions are faster with them unless the matrices are tiny
        is_faster = device_type == "cpu" and n_embd >= 128 and torch.cpu._is_avx512_bf16_supported()
        name = "bfloat16" if is_faster else "float32"
    if name == "bfloat16" and not has_bfloat16:
        raise UserError("This GPU has no bfloat16, which came with the Ampere generation. Use --dtype float16.")
    if name == "fp8" and not has_float8(device):
        raise UserError(
            "This device does not support --dtype fp8, which needs an NVIDIA GPU of the Ada or Hopper generation or "
            "newer, or a CPU with AVX-512. Leave --dtype out to use the best it has."
        )
    # fp8: everything but the output layer is in bfloat16
    return torch.bfloat16 if name == "fp8" else getattr(torch, name), name


def has_float8(device):
    """Whether a device can multiply float8 matrices. On a CPU, this is found out by calling torch's kernel."""
    if not device.startswith("cpu"):
        return device.startswith("cuda") and torch.cuda.get_device_capability(device) >= (8, 9)
    ones, scale = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(())
    try:
        torch._scaled_mm(ones, ones.T, scale, scale, out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


def flops_per_token(c, T):
    """Training FLOPs per token of a GPTConfig: 6 per weight of every matmul, and 12 * L * T * C for attention.

    The convention of PaLM (Chowdhery et al. 2022, appendix B): attention counts the full square of scores.
    """
    return 6 * (12 * c.n_layer * c.n_embd**2 + c.vocab_size * c.n_embd) + 12 * c.n_layer * T * c.n_embd


@contextlib.contextmanager
def disable_cudnn_attention():
    """Disable cuDNN attention, for inputs of many shapes: it would build a kernel for each of them."""
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)


def enable_fused_attention(enabled):
    """Allow or forbid fused attention kernels in this process; the unfused one is always available."""
    torch.backends.cuda.enable_cudnn_sdp(enabled)
    torch.backends.cuda.enable_flash_sdp(enabled)
    torch.backends.cuda.enable_mem_efficient_sdp(enabled)


# ----------------------------------------------------------------------------------------------------------
# The ranks


@dataclass(frozen=True)
class World:
    """This process's place among the ranks of the run, which torchrun puts in the environment."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    device: str = "cpu"  # cpu, mps or cuda:<local_rank>
    dtype: torch.dtype = torch.float32  # the activations' dtype; the weights stay float32

    @property
    def is_master(self):
        return self.rank == 0

    @property
    def device_type(self):
        return self.device.split(":")[0]

    @property
    def shows_progress(self):
        """Whether this rank shows progress bars: only rank 0, and only on a terminal, as they would fill a log file."""
        return self.is_master and sys.stderr.isatty()

    def progress_bar(self, steps, description):
        """Iterate over `steps`, with a progress bar if that takes more than a few seconds."""
        return tqdm(steps, description, leave=False, delay=3, disable=not self.shows_progress)

    def autocast(self):
        """Context in which matmuls and attention are in the run's dtype."""
        return torch.autocast(self.device_type, self.dtype, enabled=self.dtype != torch.float32)

    def no_sync(self, model):
        """Context in which the backward pass skips the all-reduce, so that each rank accumulates its own gradients."""
        return model.no_sync() if self.size > 1 else contextlib.nullcontext()

    def all_reduce_sum(self, tensor):
        """All-reduce: sum over the ranks, in place. For a mean, divide by the size: gloo has no average."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def max_over_ranks(self, number):
        """The largest of the ranks' numbers, for decisions that all ranks must make alike."""
        if self.size == 1:
            return number
        tensor = torch.tensor(number, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.item()

    def find_not_finite(self, losses):
        """The numbers, in the global order, of a step's micro-batches without a finite loss; if there are none, of all.

        losses: this rank's, one per micro-step. Each micro-step has a micro-batch from every rank in turn.
        """
        table = torch.zeros(len(losses), self.size, device=self.device)
        table[:, self.rank] = (~losses.isfinite()).float()
        bad = self.all_reduce_sum(table).flatten().tolist()
        return [number for number, is_bad in enumerate(bad) if is_bad] or range(len(bad))

    def check_agreement(self, facts):
        """Raise UserError, on all ranks, unless they all call this with the same `facts`: {what: its value}."""
        if self.size == 1:
            return
        facts_of_ranks = [None] * self.size
        dist.all_gather_object(facts_of_ranks, facts)
        expected, ranks = facts_of_ranks[0], {}
        for rank, theirs in enumerate(facts_of_ranks):
            for name in expected | theirs:
                if theirs.get(name) != expected.get(name):
                    difference = f"{name} is {theirs.get(name)} instead of {expected.get(name)}"
                    ranks.setdefault(difference, []).append(str(rank))
        if ranks:
            differences = "; ".join(f"on rank {', '.join(numbers)} {what}" for what, numbers in ranks.items())
            advice = "Start all of them with the same program, flags and data."
            raise UserError(f"The ranks do not agree with rank 0: {differences}. {advice}")

    def broadcast_from_master(self, action, *args):
        """Run action(*args) on rank 0 and return its result on every rank; its UserError is raised on every rank."""
        if self.size == 1:
            return action(*args)
        result, error = None, None
        if self.is_master:
            try:
                result = action(*args)
            except UserError as user_error:
                error = user_error
            except OSError as os_error:
                if not os_error.filename:
                    raise
                error = refusal(os_error)
        # the tensors in a checkpoint's dict are broadcast one by one, and only the structure around them is pickled.
        # HellaSwag's lists have none, and searching their million numbers for tensors would be slow
        has_tensors = isinstance(result, dict)
        skeleton = tree_map_only(torch.Tensor, lambda t: t.to("meta"), result) if has_tensors else result
        message = [skeleton, has_tensors, error]
        dist.broadcast_object_list(message)
        skeleton, has_tensors, error = message
        if error:
            raise error
        result = result if self.is_master else skeleton
        return tree_map_only(torch.Tensor, self.broadcast, result) if has_tensors else result

    def broadcast(self, tensor):
        """Rank 0's tensor on every rank, on the CPU; the other ranks pass one of the same shape and dtype."""
        if self.is_master:
            dist.broadcast(tensor.to(self.device).contiguous(), 0)
            return tensor
        received = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        dist.broadcast(received, 0)
        return received.cpu()


CONNECT_SECONDS = 60  # how long a rank tries to reach the others
TIMEOUT = datetime.timedelta(minutes=30)  # how long ranks that are connected wait for each other


def create_store(rank, world_size):
    """The store through which the ranks find each other, created afresh by rank 0 on every start.

    torchrun's own store survives a restart and would then point ranks to dead peers (pytorch issue 135712).
    """
    host = os.environ["MASTER_ADDR"]
    connect = datetime.timedelta(seconds=CONNECT_SECONDS / (1 if rank == 0 else 2))  # torch's clients try twice
    shared = next(dist.rendezvous("env://", timeout=connect))[0]
    shared.set_timeout(TIMEOUT)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return shared  # not from torchrun's agent: rank 0 has just created this store
    if rank == 0:
        store = dist.TCPStore(host, 0, world_size, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
        shared.set("port", str(store.port))
        return store
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:  # until rank 0 has published its port: one from before a restart refuses the connection
        port, attempt = int(shared.get("port")), datetime.timedelta(seconds=2)
        try:
            store = dist.TCPStore(host, port, world_size, timeout=attempt, wait_for_workers=False)
            store.set_timeout(TIMEOUT)
            return store
        except dist.DistNetworkError:
            if time.monotonic() > deadline:
                raise


def is_restart():
    """Whether torchrun has restarted this process after a crash."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def environment_number(name, default):
    """The number in an environment variable that torchrun sets. UserError unless it is whole and `default` or more."""
    text = os.environ.get(name, str(default))
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < default:
        raise UserError(
            f"The environment variable {name} is {text!r}, but it must be a whole number, {default} or more. "
            "Unset it, or start the ranks with torchrun, which sets it."
        )
    return int(text)


def setup_distributed(device):
    """Join the process group that torchrun started, or run as a single process. Selects this rank's GPU."""
    rank, local_rank = environment_number("RANK", 0), environment_number("LOCAL_RANK", 0)
    world_size = environment_number("WORLD_SIZE", 1)
    device = choose_device(device)
    if device == "cuda":
        device = f"cuda:{local_rank}"
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    if "RANK" in os.environ or world_size > 1:
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing or rank >= world_size:
            problem = f"{missing[0]} is not set" if missing else "ranks count from 0"
            raise UserError(
                f"The environment says that this is rank {rank} of {world_size}, but {problem}. Start the ranks with "
                "torchrun, or unset RANK and WORLD_SIZE for a single process."
            )
        place = f"{os.environ['MASTER_ADDR']}, port {os.environ['MASTER_PORT']}"
        try:
            store = create_store(rank, world_size)
        except (RuntimeError, ValueError) as error:  # torch's errors for addresses, ports and time-outs
            raise UserError(
                f"Rank {rank} cannot reach the others at {place}: {first_line(error).rstrip('.')}. Start all ranks "
                "within a minute, with one MASTER_ADDR that they can reach and a free MASTER_PORT, or with torchrun."
            ) from None
        backend = "nccl" if device.startswith("cuda") else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    return World(rank, local_rank, world_size, device)


def cleanup_distributed():
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        # subtle: gloo's thread needs the GIL to release its last tensor, but destroy_process_group holds the GIL
        # while it waits for that thread. Sleeping first lets the thread take the GIL and finish
        time.sleep(0.1)
        dist.destroy_process_group()


def print0(*args):
    """Print on rank 0."""
    if is_rank_0():
        print(*args, flush=True)
