"""The machine and the ranks: devices, dtypes, attention kernels, and the processes of one run."""

import contextlib
import datetime
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only
from tqdm import tqdm

from plumbing.cli import UserError, first_line, is_rank_0

# ----- The device ---------------------------------------------------------------------------------------


def output_of(*command):
    """What a command prints; "" if it is not installed."""
    if not shutil.which(command[0]):
        return ""
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def git_commit():
    """The commit of this program, with "-dirty" if it was changed since; "" if that is not known."""
    return output_of("git", "-C", os.path.dirname(__file__), "describe", "--always", "--dirty", "--abbrev=40")


def choose_device(name):
    """The device called `name`, or for "auto" the best on this machine. Raises UserError if there is none."""
    known = ["cpu"]
    if torch.backends.mps.is_available():
        known = ["mps", *known]
    if torch.cuda.is_available():
        known = ["cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count())), *known]
    if name == "auto":
        return known[0]
    if name not in known:
        raise UserError(
            f"There is no device {name!r} here. Leave --device out, or choose from {', '.join(known)}."
        )
    return name


def choose_dtype(name, device, n_embd):
    """The dtype called `name` as (torch dtype of activations, name); for "auto" the best for this device and width."""
    is_gpu = device.startswith("cuda")
    # NVIDIA's GPUs have it since Ampere; other devices can at least emulate it
    has_bfloat16 = not is_gpu or torch.version.hip or torch.cuda.get_device_capability(device) >= (8, 0)
    if name == "auto" and is_gpu:
        name = "bfloat16" if has_bfloat16 else "float16"
    elif name == "auto":
        # CPUs with bfloat16 instructions are faster with them unless the matrices are tiny
        is_faster = device == "cpu" and n_embd >= 128 and torch.cpu._is_avx512_bf16_supported()
        name = "bfloat16" if is_faster else "float32"
    if (name == "bfloat16" and not has_bfloat16) or (name == "fp8" and not has_float8(device)):
        raise UserError(
            f"This device does not support --dtype {name}. NVIDIA's GPUs have bfloat16 since the Ampere generation and "
            "fp8 since Ada and Hopper. Leave --dtype out to use the best it has."
        )
    return torch.bfloat16 if name == "fp8" else getattr(torch, name), name  # fp8 is for the output layer only


def has_float8(device):
    """Whether a device can multiply float8 matrices. On a CPU, this is found out by calling torch's kernel."""
    if device != "cpu":
        return device.startswith("cuda") and torch.cuda.get_device_capability(device) >= (8, 9)
    ones, scale = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(())
    try:
        torch._scaled_mm(ones, ones.T, scale, scale, out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


def flops_per_token(c, T):
    """Training FLOPs per token of a GPTConfig, by PaLM's convention (Chowdhery et al. 2022, appendix B)."""
    # 6 per weight of every matmul, and 12 * L * T * C for attention, which counts the full square of scores
    num_weights = 12 * c.n_layer * c.n_embd**2 + c.vocab_size * c.n_embd
    return 6 * num_weights + 12 * c.n_layer * T * c.n_embd


# TFLOP/s of dense matmuls on tensor cores, in bfloat16 (on V100 and T4, which lack it, float16) with float32
# accumulation, by PyTorch's names for the GPUs without the brand. Most are from NVIDIA's datasheet of that GPU, which
# prints twice as much where it counts sparse matrices or, for GeForce cards, accumulation in float16
PEAK_TFLOPS = {
    "V100-SXM2-16GB, V100-SXM2-32GB": 125,
    "V100-PCIE-16GB, V100-PCIE-32GB": 112,
    "V100S-PCIE-32GB": 130,
    "T4": 65,
    "A100-SXM4-40GB, A100-SXM4-80GB, A100-PCIE-40GB, A100 80GB PCIe": 312,
    "A10": 125,
    "A10G": 70,
    "A40": 149.7,
    "RTX A6000": 154.8,  # this and the next: whitepaper "NVIDIA Ampere GA102 GPU Architecture"
    "RTX 3090": 71,
    "L4": 121,
    "L40": 181.05,
    "L40S": 362.05,
    "RTX 4090": 165.2,  # whitepaper "NVIDIA Ada GPU Architecture", appendix A
    "RTX 5090": 209.5,  # whitepaper "NVIDIA RTX Blackwell GPU Architecture", appendix A
    "H20": 148,
    "H100 80GB HBM3, H200, GH200 120GB, GH200 480GB, GH200 144G HBM3e": 989.4,
    "H100 PCIe": 756,
    "H100 NVL, H200 NVL": 835.5,
    "B200": 2250,  # "NVIDIA HGX B200" datasheet: 36 PFLOP/s with sparsity for eight
    "GB200": 2500,  # "NVIDIA GB200 NVL72" datasheet: 360 PFLOP/s with sparsity for 72
}


def peak_flops(device_name):
    """The peak in FLOP/s of a GPU, by its name as torch.cuda.get_device_name gives it; None if it is not known."""
    # names must match exactly: an L40 is not an L4, and a MIG slice is only a part of a GPU
    name = re.sub(r"^((NVIDIA|Tesla|GeForce) )+", "", device_name)
    return next((1e12 * peak for names, peak in PEAK_TFLOPS.items() if name in names.split(", ")), None)


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


# ----- The ranks ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """This process's place among the ranks of the run, which torchrun puts in the environment."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"  # cpu, mps or cuda:<local rank>
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

    def gather(self, value):
        """The values of all ranks, on every rank."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def max_over_ranks(self, number):
        """The largest of the ranks' numbers, for decisions that all ranks must make alike."""
        return max(self.gather(number))

    def find_not_finite(self, losses):
        """The numbers of the micro-batches without a finite loss, or of all; `losses`: this rank's in a step."""
        finite = torch.tensor(self.gather(losses.isfinite().tolist())).T.flatten()
        return (~finite).nonzero().flatten().tolist() or range(len(finite))

    def check_agreement(self, facts):
        """Raise UserError, on all ranks, unless they all call this with the same `facts`: {what: its value}."""
        gathered = self.gather(facts)
        expected = gathered[0]
        for rank, theirs in enumerate(gathered):
            names = [name for name in expected if theirs.get(name) != expected[name]]
            if names:
                differences = "; ".join(
                    f"{name} is {theirs.get(name)} instead of {expected[name]}" for name in names
                )
                advice = "Start all ranks with the same program, flags and data."
                raise UserError(f"Rank {rank} does not agree with rank 0: {differences}. {advice}")

    def broadcast_from_master(self, action, *args):
        """Run action(*args) on rank 0 and return its result on every rank; its error is raised on every rank."""
        if self.size == 1:
            return action(*args)
        result, error = None, None
        if self.is_master:
            try:
                result = action(*args)
            except (UserError, OSError) as caught:
                error = caught
        # a dict's tensors are broadcast one by one. HellaSwag's lists have none, and a search for them would be slow
        message = [result, error]
        if isinstance(result, dict):
            message[0] = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), result)
        dist.broadcast_object_list(message)
        if message[1]:
            raise message[1]
        if not self.is_master:
            result = message[0]
        return tree_map_only(torch.Tensor, self.broadcast, result) if isinstance(result, dict) else result

    def broadcast(self, tensor):
        """Rank 0's tensor on every rank, on the CPU; the other ranks pass one of the same shape and dtype."""
        shared = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        if self.is_master:
            shared.copy_(tensor)
        dist.broadcast(shared, 0)
        return tensor if self.is_master else shared.cpu()


CONNECT_SECONDS = 60  # how long a rank tries to reach the others
TIMEOUT = datetime.timedelta(minutes=30)  # how long ranks that are connected wait for each other


def create_store(rank, world_size):
    """The store through which the ranks find each other, created afresh by rank 0 on every start."""
    # torchrun's own store survives a restart and would then point ranks to dead peers (pytorch issue 135712)
    connect = datetime.timedelta(seconds=CONNECT_SECONDS / (1 if rank == 0 else 2))  # torch's clients try twice
    shared = next(dist.rendezvous("env://", timeout=connect))[0]
    shared.set_timeout(TIMEOUT)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return shared  # not from torchrun's agent: rank 0 has just created this store
    host, options = os.environ["MASTER_ADDR"], dict(world_size=world_size, wait_for_workers=False)
    if rank == 0:
        store = dist.TCPStore(host, 0, is_master=True, timeout=TIMEOUT, **options)
        shared.set("port", str(store.port))
        return store
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:  # until rank 0 has published its port: one from before a restart refuses the connection
        try:
            port = int(shared.get("port"))
            store = dist.TCPStore(host, port, timeout=datetime.timedelta(seconds=2), **options)
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
            "Start the ranks with torchrun, which sets it, or unset it."
        )
    return int(text)


def setup_distributed(device):
    """Join the process group that torchrun started, or run as a single process. Selects this rank's GPU."""
    rank, world_size = environment_number("RANK", 0), environment_number("WORLD_SIZE", 1)
    device = choose_device(device)
    if device == "cuda":
        device = f"cuda:{environment_number('LOCAL_RANK', 0)}"
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    if "RANK" in os.environ or world_size > 1:
        try:
            if rank >= world_size:
                raise ValueError("ranks count from 0")
            store = create_store(rank, world_size)
        except (RuntimeError, ValueError) as error:  # torch's: addresses, ports, time-outs, what is not set
            raise UserError(
                f"Rank {rank} of {world_size} cannot join the others: {first_line(error)}. Start all ranks "
                "within a minute, with torchrun or with one MASTER_ADDR that they can reach and a free MASTER_PORT; or "
                "unset RANK and WORLD_SIZE for a single process."
            ) from None
        backend = "nccl" if device.startswith("cuda") else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    return World(rank, world_size, device)


def cleanup_distributed():
    if dist.is_initialized():
        # subtle: gloo's thread needs the GIL to release its last tensor, but destroy_process_group holds the GIL
        # while it waits for that thread. Sleeping first lets the thread take the GIL and finish
        time.sleep(0.1)
        dist.destroy_process_group()


def print0(*args):
    if is_rank_0():
        print(*args, flush=True)
