"""A trial of the first training step: what fails on this machine is done without, and B is lowered until it fits."""

import gc
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from plumbing import machine
from plumbing.distributed import World, environment_number
from plumbing.program import UserError, count, first_line, print0

FITS, FAILED, OUT_OF_MEMORY = range(3)  # outcomes of a trial; all ranks act on the worst one
# what is given up if a trial fails, the last first, and the attention kernels to disable. torch prefers cuDNN's
KERNELS = {"fused attention": machine.FUSED_ATTENTION, "torch.compile": (), "cuDNN's attention": ("cudnn",)}
FLOPS_OF_SECONDS = 1e12  # a CPU works on them for ten seconds or more


def find_what_fits(raw_model: Any, wrap: Callable[..., Any], config: Any, *, world: World) -> tuple[Any, int]:
    """Try a training step, and do without whatever fails on this machine. Returns (model to train, B).

    wrap(raw_model, compiled, world) makes the model. If memory runs out, B is halved. All ranks take the same fallback.
    """
    T = config.sequence_length
    if world.device_type == "cuda":
        prepare_gpu(T, world)
    has_cudnn = world.device_type == "cuda" and torch.backends.cuda.cudnn_sdp_enabled()
    optional = [name for name, used in zip(KERNELS, (True, config.compile, has_cudnn)) if used]
    windows_per_rank = config.total_batch_size // (T * world.size)
    with_room = min(world.gather(bound_on_B(raw_model, T, world=world)))
    B = largest_divisor(windows_per_rank, at_most=min(config.batch_size, with_room))
    while True:
        micro_steps = min(2, windows_per_rank // B)
        flops = micro_steps * B * T * machine.flops_per_token(raw_model.config, T)
        if config.compile or (world.device_type == "cpu" and flops > FLOPS_OF_SECONDS):
            print0(f"Trying B = {B}, which may take minutes.")
        outcome, reason = FITS, "on another rank"
        try:
            model = wrap(raw_model, "torch.compile" in optional, world)
            seconds = try_step(model, raw_model, B, T=T, micro_steps=micro_steps, world=world)
        except Exception as error:
            # torch.compile may raise anything. An error that it did not cause comes back without it, and is raised
            outcome = OUT_OF_MEMORY if is_out_of_memory(error) else FAILED
            if outcome == FAILED and not optional:
                raise
            reason = f"{type(error).__name__}: {first_line(error)}"
        raw_model.zero_grad(set_to_none=True)
        outcome = world.max_over_ranks(outcome)
        if outcome == FITS:
            if world.device_type == "cuda":
                torch.cuda.reset_peak_memory_stats()  # failed trials do not count
            elif world.device_type == "cpu":
                warn_of_days(config, seconds / (B * T * world.size))
            return model, B
        model = None  # frees DDP's buckets as well
        if config.compile:
            torch._dynamo.reset()  # it gives up after 8 compilations of a function, and those that failed count
        gc.collect()
        torch.cuda.empty_cache()  # does nothing without CUDA
        if outcome == FAILED:
            failed = optional.pop()
            print0(f"warning: A training step failed ({reason}). Trying again without {failed}.")
            machine.disable_attention(*KERNELS[failed])
        elif B == 1:
            raise UserError(
                f"Even one sequence of {T:,} tokens does not fit in memory. Lower --sequence-length or the model's "
                "size, or add --activation-checkpointing."
            )
        else:
            B = largest_divisor(windows_per_rank, at_most=B // 2)
            print0(f"warning: Out of memory. Continuing with --batch-size {B}.")


def prepare_gpu(T: int, world: World) -> None:
    """Leave memory for what torch does not allocate itself, before the trial fills the GPU; choose attention for T."""
    # Not tried on a GPU yet. NCCL takes hundreds of MB, at the first large all-reduce. On Windows, the driver does not
    # fail when the GPU is full: it moves tensors to main memory, and steps take several times as long
    torch.cuda.set_per_process_memory_fraction(0.95)
    if world.size > 1:
        world.all_reduce_sum(torch.zeros(25 * 2**20, device=world.device))
    if T % 128:  # for such T, cuDNN's backward pass has given NaN (pytorch issue 196678)
        machine.disable_attention("cudnn")


def bound_on_B(raw_model: Any, T: int, *, world: World) -> int:
    """A bound on B, because trying a B that cannot fit costs a compilation or, on a CPU, may end the process."""
    c, itemsize = raw_model.config, world.dtype.itemsize
    kept = 1 if raw_model.activation_checkpointing else 16  # per channel and block, what the backward pass needs
    bytes_per_token = itemsize * (kept * c.n_embd * c.n_layer + c.vocab_size)
    # gradients and the optimizer's two moments; the weights are there already
    free = machine.free_memory(world.device) - 12 * sum(p.numel() for p in raw_model.parameters())
    if world.device_type != "cuda" or torch.cuda.get_device_properties(world.device).is_integrated:
        # main memory runs out without an error, and models that are not compiled keep more than twice as much
        free /= 4 * environment_number("LOCAL_WORLD_SIZE", 1)
    return max(1, int(min(free / (bytes_per_token * T), 2**30)))  # it may be infinite


def warn_of_days(config: Any, seconds_per_token: float) -> None:
    """Say how long the run would take, if that is more than a day."""
    tokens = config.max_steps * config.total_batch_size
    days = tokens * seconds_per_token / (24 * 60 * 60)
    if days > 1:
        print0(
            f"note: The {tokens:,} tokens of this run would take about {count(round(days), 'day')} on this machine. "
            "Use --preset quickstart or a smaller model here, or a GPU."
        )


def try_step(model: Any, raw_model: Any, B: int, *, T: int, micro_steps: int, world: World) -> float:
    """Forward and backward passes on random tokens; from the second one on, gradients are in memory.

    Returns the seconds of the last one, as a CPU takes them; a GPU is still at work then.
    """
    # reserve memory for the optimizer state, which is allocated later: two numbers per weight
    reserved = [torch.empty_like(p) for p in raw_model.parameters() for _ in range(2)]
    x, y = torch.randint(raw_model.config.vocab_size, (2, B, T), device=world.device).unbind()
    for _ in range(micro_steps):
        began = time.perf_counter()
        # no_sync: a rank that fails here would leave the others waiting in the all-reduce
        with world.no_sync(model):
            with world.autocast():
                loss = model(x, y, return_logits=False)[1]
            loss.backward()
    del reserved
    return time.perf_counter() - began


def largest_divisor(number: int, at_most: int) -> int:
    """The largest divisor of `number` that is not above `at_most`: 96, 64 -> 48."""
    return max(d for d in range(1, min(number, at_most) + 1) if number % d == 0)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception, or one that led to it, says that memory ran out: torch.compile may keep only the text."""
    said = "".join(traceback.format_exception(error, limit=0))  # types and texts, those of its causes included
    words = ("MemoryError", "out of memory", "ALLOC_FAILED", "can't allocate memory", "not enough memory")
    return any(word in said for word in words)
