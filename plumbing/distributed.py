"""The machine and the ranks: devices, dtypes, attention kernels, and the processes of one run."""

import contextlib
import datetime
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only
from tqdm import tqdm

from plumbing import mirror
from plumbing.cli import UserError, flag_of, is_rank_0, suggest

# ----------------------------------------------------------------------------------------------------------
# The device


def choose_device(name):
    """The device called `name`, or for "auto" the best of this machine. Raises UserError if there is none."""
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        return next(device for device in available if available[device])
    device_type, colon, index = name.partition(":")
    if device_type not in available or (colon and not re.fullmatch("[0-9]{1,4}", index)):
        raise UserError(f"There is no device called {name!r}. {suggest(device_type, available, {'gpu': 'cuda'})}")
    if not available[device_type]:
        choices = " or ".join(device for device in available if available[device])
        raise UserError(
            f"PyTorch finds no {device_type} device on this machine. Leave --device out, or choose {choices}."
        )
    gpus = torch.cuda.device_count()
    if device_type == "cuda" and index and int(index) >= gpus:
        raise UserError(
            f"There is no {name} on this machine, which has {gpus} GPU(s). Choose from cuda:0 to cuda:{gpus - 1}."
        )
    return name


def choose_dtype(name, device, n_embd):
    """The dtype called `name` as (torch dtype of activations, name); for "auto" the best for this device and width."""
    device_type = device.split(":")[0]
    has_bfloat16 = device_type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    if name == "auto" and device_type == "cuda":
        name = "bfloat16" if has_bfloat16 else "float16"
    elif name == "auto":
        # CPUs with bfloat16 instructions are faster with them unless the matrices are tiny
        is_faster = device_type == "cpu" and n_embd >= 128 and torch.cpu._is_avx512_bf16_supported()
        name = "bfloat16" if is_faster else "float32"
    if name == "bfloat16" and not has_bfloat16:
        raise UserError(
            "This GPU does not support --dtype bfloat16, which needs the Ampere generation or newer. "
            "Use --dtype float16."
        )
    if name == "fp8" and (
        device_type == "mps" or device_type == "cuda" and torch.cuda.get_device_capability() < (8, 9)
    ):
        raise UserError(
            "This device does not support --dtype fp8, which needs an NVIDIA GPU of the Ada or Hopper "
            "generation or newer. Leave --dtype out to use the best it has."
        )
    # fp8: everything but the output layer is in bfloat16
    return torch.bfloat16 if name == "fp8" else getattr(torch, name), name


def check_machine(config):
    """A sentence for each thing that the run asks for and this machine does not have."""
    errors, device = [], "cpu"
    try:
        device = choose_device(config.device)
        choose_dtype(config.dtype, device, config.n_embd)
    except UserError as error:
        errors.append(str(error))
    uneven = [name for name in ("sequence_length", "n_embd", "vocab_size") if getattr(config, name) % 16]
    if config.dtype == "fp8" and uneven:
        flags = " and ".join(f"{flag_of(name)} {getattr(config, name)}" for name in uneven)
        errors.append(f"--dtype fp8 needs multiples of 16, unlike {flags}. Change that, or leave --dtype out.")
    local_ranks, gpus = environment_number("LOCAL_WORLD_SIZE", 1), torch.cuda.device_count()
    if device == "cuda" and local_ranks > gpus:
        errors.append(
            f"torchrun started {local_ranks} processes on this machine, but PyTorch sees {gpus} GPU(s). "
            f"Start it with --nproc_per_node={gpus}."
        )
    if config.wandb and not mirror.is_installed():
        errors.append("--wandb needs a package that is not installed. Install it with: pip install wandb")
    lack_of_memory = "" if errors else describe_lack_of_memory(config)  # of a device that is known to be there
    return errors + [lack_of_memory] if lack_of_memory else errors


def check_batch(total_batch_size, T, world_size, batch_ramp):
    """A sentence for each way in which a step of so many tokens cannot be split over the ranks."""
    errors = []
    tokens = T * world_size  # of the smallest possible micro-step, with B = 1
    if total_batch_size % tokens:
        windows, nearest = total_batch_size // T, tokens * max(1, round(total_batch_size / tokens))
        remedy = "Try" if total_batch_size % T else f"Start a number of ranks that divides {windows}, or try"
        errors.append(
            f"--total-batch-size {total_batch_size} is not a multiple of {tokens}, which is --sequence-length {T} x "
            f"{world_size} ranks. {remedy} --total-batch-size {nearest}."
        )
    if batch_ramp and (total_batch_size % 2**15 or 2**15 % tokens):
        errors.append(
            "--batch-ramp starts at 32,768 tokens, which must be a multiple of --sequence-length x ranks "
            f"({tokens}) and divide --total-batch-size ({total_batch_size}). Change these, or use --batch-ramp 0."
        )
    return errors


def flops_per_token(c, T):
    """Training FLOPs per token of a GPTConfig: 6 per weight of every matmul, and 12 * L * T * C for attention.

    The convention of PaLM (Chowdhery et al. 2022, appendix B): attention counts the full square of scores.
    """
    return 6 * (12 * c.n_layer * c.n_embd**2 + c.vocab_size * c.n_embd) + 12 * c.n_layer * T * c.n_embd


def is_out_of_memory(error):
    """Whether an exception, or one that led to it, says that memory ran out.

    torch.compile wraps torch.OutOfMemoryError in exceptions of its own, some of which keep no more than its text.
    """
    texts = ("out of memory", "ALLOC_FAILED", "can't allocate memory", "not enough memory")
    seen = []
    while error is not None and error not in seen:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(text in str(error) for text in texts):
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


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


BYTES_PER_PARAMETER = 16  # float32: the weight, its gradient and Adam's two moments
BYTES_PER_BLOCK = 2**16  # what Python's objects for a block take, whatever its size


def describe_lack_of_memory(config):
    """A sentence that says why a model of this config needs more memory than this machine has; "" if it does not.

    Activations are left out, so that only what could never fit is refused.
    """
    c = config
    num_params = c.n_layer * (12 * c.n_embd**2 + 13 * c.n_embd) + (c.vocab_size + c.block_size + 2) * c.n_embd
    needed = num_params * BYTES_PER_PARAMETER
    if torch.cuda.is_available() and c.device.split(":")[0] in ("auto", "cuda"):
        place, available = "GPU", torch.cuda.get_device_properties(0).total_memory
    elif hasattr(os, "sysconf"):  # not on Windows
        place, available = "machine", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        needed += c.n_layer * BYTES_PER_BLOCK
    else:
        return ""
    if needed <= available:
        return ""
    return (
        f"This model has {num_params:,} parameters and needs {needed / 2**30:,.0f} GiB to be trained, but this {place} "
        f"has {available / 2**30:,.0f} GiB. Lower --n-layer, --n-embd, --vocab-size or --block-size."
    )


# ----------------------------------------------------------------------------------------------------------
# The ranks


@dataclass(frozen=True)
class World:
    """This process's place among the ranks of the run, which torchrun puts in the environment."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    device: str = "cpu"  # cpu, mps or cuda:<local_rank>

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

    def check_agreement(self, facts):
        """Raise UserError, on all ranks, unless they all call this with the same `facts`: {what: its value}."""
        if self.size == 1:
            return
        facts_of_ranks = [None] * self.size
        dist.all_gather_object(facts_of_ranks, facts)
        ranks_by_difference = {}
        for rank, theirs in enumerate(facts_of_ranks):
            for name in facts_of_ranks[0] | theirs:
                value, expected = theirs.get(name), facts_of_ranks[0].get(name)
                if value != expected:
                    difference = f"{name} is {value} instead of {expected}"
                    ranks_by_difference.setdefault(difference, []).append(rank)
        if ranks_by_difference:
            differences = "; ".join(
                f"on {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} {difference}"
                for difference, ranks in ranks_by_difference.items()
            )
            raise UserError(
                f"The ranks do not agree with rank 0: {differences}. Start all of them with the same program, flags "
                "and data."
            )

    def run_on_master(self, action, *args):
        """Run action(*args) on rank 0 and return its result on every rank; a UserError is raised on every rank."""
        if self.size == 1:
            return action(*args)
        result, error = None, None
        if self.is_master:
            try:
                result = action(*args)
            except UserError as user_error:
                error = user_error
        # tensors are broadcast one by one, and only the structure that holds them is pickled
        skeleton = [tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), result), error]
        dist.broadcast_object_list(skeleton)
        if skeleton[1]:
            raise skeleton[1]
        return tree_map_only(torch.Tensor, self.broadcast, result if self.is_master else skeleton[0])

    def broadcast(self, tensor):
        """Rank 0's tensor on every rank, on the CPU; the other ranks give one of its shape and dtype."""
        if self.is_master:
            dist.broadcast(tensor.to(self.device).contiguous(), 0)
            return tensor
        received = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        dist.broadcast(received, 0)
        return received.cpu()


def create_store(rank, world_size):
    """The store through which the ranks find each other, created afresh by rank 0 on every start.

    torchrun's own store survives a restart and would then point ranks to dead peers (pytorch issue 135712).
    """
    shared, host = next(dist.rendezvous("env://"))[0], os.environ["MASTER_ADDR"]
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return shared  # not from torchrun's agent: rank 0 has just created this store
    if rank == 0:
        store = dist.TCPStore(host, 0, world_size, is_master=True, wait_for_workers=False)
        shared.set("port", str(store.port))
        return store
    while True:  # until rank 0 has published its port: nobody listens on one from before a restart
        with contextlib.suppress(dist.DistNetworkError):
            timeout = datetime.timedelta(seconds=2)
            store = dist.TCPStore(host, int(shared.get("port")), world_size, timeout=timeout, wait_for_workers=False)
            store.set_timeout(datetime.timedelta(minutes=30))
            return store


def is_restart():
    """Whether torchrun has restarted this process after a crash."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def launch_time():
    """When torchrun, the parent of this process, was started, in seconds since the epoch; None if unknown."""
    try:
        ticks = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:  # only Linux has /proc
        return None
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")


def environment_number(name, default):
    """The number in an environment variable that torchrun sets. UserError unless it is whole and `default` or more."""
    text = os.environ.get(name, str(default))
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < default:
        raise UserError(
            f"The environment variable {name} is {text!r}, but it must be a whole number, {default} or more. "
            "Unset it, or start the ranks with torchrun, which sets it."
        )
    return int(text)


def get_world_size():
    """The number of ranks that torchrun has started; they need not be connected yet."""
    return environment_number("WORLD_SIZE", 1)


def setup_distributed(device):
    """Join the process group that torchrun started, or run as a single process. Selects this rank's GPU."""
    rank, local_rank = environment_number("RANK", 0), environment_number("LOCAL_RANK", 0)
    world_size = get_world_size()
    device = choose_device(device)
    if device == "cuda":
        device = f"cuda:{local_rank}"
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    if "RANK" in os.environ or world_size > 1:
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing or rank >= world_size:
            raise UserError(
                f"The environment says that this is rank {rank} of {world_size}, but "
                f"{missing[0] + ' is not set' if missing else 'ranks count from 0'}. Start the ranks with torchrun, or "
                "unset RANK and WORLD_SIZE for a single process."
            )
        backend = "nccl" if device.startswith("cuda") else "gloo"
        store = create_store(rank, world_size)
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
