"""A trial of the first training step: what fails on this machine is done without, and B is lowered until it fits."""

import gc
import traceback
from collections.abc import Callable
from typing import Any

import torch

from plumbing import machine
from plumbing.distributed import World
from plumbing.program import UserError, first_line, print0

FITS, FAILED, OUT_OF_MEMORY = range(3)  # outcomes of a trial; all ranks act on the worst one


def find_what_fits(raw_model: Any, wrap: Callable[..., Any], config: Any, *, world: World) -> tuple[Any, int]:
    """Try a training step, and do without whatever fails on this machine. Returns (model to train, B).

    wrap(raw_model, compiled, world) makes the model. If memory runs out, B is halved. All ranks take the same fallback.
    """
    optional = ["Fused attention", "torch.compile"] if config.compile else ["Fused attention"]
    T = config.sequence_length
    windows_per_rank = config.total_batch_size // (T * world.size)
    B = largest_divisor(windows_per_rank, at_most=config.batch_size)
    while True:
        outcome, reason = FITS, "on another rank"
        model = None
        try:
            model = wrap(raw_model, "torch.compile" in optional, world)
            try_step(model, raw_model, B, T=T, micro_steps=min(2, windows_per_rank // B), world=world)
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
            return model, B
        model = None  # frees DDP's buckets as well
        gc.collect()
        torch.cuda.empty_cache()  # does nothing without CUDA
        if outcome == FAILED:
            failed = optional.pop()
            print0(f"warning: {failed} failed ({reason}). Continuing without it.")
            machine.enable_fused_attention("Fused attention" in optional)
        elif B == 1:
            raise UserError(
                f"Even one sequence of {T:,} tokens does not fit in memory. Lower --sequence-length or the model's "
                "size, or add --activation-checkpointing."
            )
        else:
            B = largest_divisor(windows_per_rank, at_most=B // 2)
            print0(f"warning: Out of memory. Continuing with --batch-size {B}.")


def try_step(model: Any, raw_model: Any, B: int, *, T: int, micro_steps: int, world: World) -> None:
    """Forward and backward passes on random tokens; from the second one on, gradients are in memory."""
    # reserve memory for the optimizer state, which is allocated later: two numbers per weight
    reserved = [torch.empty_like(p) for p in raw_model.parameters() for _ in range(2)]
    x, y = torch.randint(raw_model.config.vocab_size, (2, B, T), device=world.device).unbind()
    for _ in range(micro_steps):
        # no_sync: a rank that fails here would leave the others waiting in the all-reduce
        with world.no_sync(model):
            with world.autocast():
                loss = model(x, y, return_logits=False)[1]
            loss.backward()
    del reserved


def largest_divisor(number: int, at_most: int) -> int:
    """The largest divisor of `number` that is not above `at_most`: 96, 64 -> 48."""
    return max(d for d in range(1, min(number, at_most) + 1) if number % d == 0)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception, or one that led to it, says that memory ran out: torch.compile may keep only the text."""
    said = "".join(traceback.format_exception(error, limit=0))  # types and texts, those of its causes included
    words = ("MemoryError", "out of memory", "ALLOC_FAILED", "can't allocate memory", "not enough memory")
    return any(word in said for word in words)
