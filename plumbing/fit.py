"""Fitting a run to the machine: its settings are checked before anything is loaded, and its first step is tried."""

import gc
import math
import os
import traceback

import torch

from plumbing import distributed, mirror
from plumbing.cli import UserError, check, count, first_line, flag_of
from plumbing.distributed import print0

# ----- Before anything is loaded ------------------------------------------------------------------------


def check_config(config, world_size):
    """Raise one UserError with everything that is wrong with `config` on `world_size` ranks."""
    c, device, refused = config, "cpu", ""
    try:
        device = distributed.choose_device(c.device)
        distributed.choose_dtype(c.dtype, device, c.n_embd)
    except UserError as error:
        refused = str(error)
    # at least 1, so that a bad value reported above cannot cause a division by zero
    T, n_head, total = max(1, c.sequence_length), max(1, c.n_head), c.total_batch_size
    tokens = T * world_size  # in the smallest possible micro-step, with B = 1
    smallest = f"{tokens}, which is --sequence-length {T} x {count(world_size, 'rank')}"
    advice = "Try" if total % T else f"Start a number of ranks that divides {total // T}, or try"
    uneven_ramp = c.batch_ramp and (total % 2**15 or 2**15 % tokens)
    ranks, gpus = distributed.environment_number("LOCAL_WORLD_SIZE", 1), torch.cuda.device_count()
    too_many = device == "cuda" and ranks > gpus
    complaints = [
        (refused, refused),
        not_a_multiple(c, "n_embd", n_head, f"--n-head {n_head}"),
        not_a_multiple(c, "total_batch_size", tokens, smallest, advice),
        not_enough_memory(c, device),
        (
            uneven_ramp,
            f"--batch-ramp starts at 32,768 tokens, no multiple of {tokens} that divides {total}. Use 0.",
        ),
        (
            too_many,
            f"{ranks} processes on this machine share {count(gpus, 'GPU')}. Use --nproc_per_node={gpus}.",
        ),
        (not c.out_dir, "--out-dir is empty. Give the folder in which the run is to be kept."),
        (
            T > c.block_size,
            f"--sequence-length {T} is above --block-size {c.block_size}. Lower it, or raise that.",
        ),
        (
            c.val_tokens < T,
            f"--val-tokens is {c.val_tokens}, but it must be {T} or more, the length of one sequence.",
        ),
        (c.decay_fraction > 1, f"--decay-fraction is {c.decay_fraction}, but it must be between 0 and 1."),
        (
            c.init_from == "resume",  # nanoGPT's word
            "--init-from names a model. To resume a run, repeat its command without that flag.",
        ),
        (c.wandb and not mirror.is_installed(), "--wandb needs a package. Install it with: pip install wandb"),
    ]
    if c.dtype == "fp8":
        sizes = ("sequence_length", "n_embd", "vocab_size")
        complaints += [not_a_multiple(c, name, 16, "16, as --dtype fp8 needs") for name in sizes]
    above_0 = "n_layer n_head n_embd block_size batch_size sequence_length total_batch_size"
    above_0 += " max_steps max_lr val_tokens keep_checkpoints"
    check(c, complaints, above_0, below_1="beta1 beta2 muon_momentum")


def not_a_multiple(config, name, unit, what, advice="Try"):
    """The complaint that the setting `name` is not a multiple of `unit`, which is `what`."""
    flag, value = flag_of(name), getattr(config, name)
    nearest = max(unit, (value + (unit - 1) // 2) // unit * unit)
    return value % unit, f"{flag} {value} is not a multiple of {what}. {advice} {flag} {nearest}."


def not_enough_memory(c, device):
    """The complaint that a model of this config needs more memory than the device has."""
    # weights, gradients and Adam's two moments in float32, and 64 KB of Python's objects per block: never too much
    num_params = c.n_layer * (12 * c.n_embd**2 + 13 * c.n_embd)
    num_params += (c.vocab_size + c.block_size + 2) * c.n_embd
    needed, available = 16 * num_params + c.n_layer * 2**16, math.inf
    if device.startswith("cuda"):
        available = torch.cuda.get_device_properties(device).total_memory
    elif hasattr(os, "sysconf"):  # not on Windows
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return needed > available, (
        f"This model has {num_params:,} parameters and needs {needed // 2**30:,} GiB to be trained, but there are "
        f"{available / 2**30:,.0f} GiB. Lower --n-layer, --n-embd, --vocab-size or --block-size."
    )


# ----- Before the first step ----------------------------------------------------------------------------

FITS, FAILED, OUT_OF_MEMORY = range(3)  # outcomes of a trial; all ranks act on the worst one


def find_what_fits(raw_model, wrap, config, world):
    """Try a training step, and do without whatever fails on this machine. Returns (model to train, B).

    wrap(raw_model, compiled, world) makes the model. If memory runs out, B is halved. All ranks take the same fallback.
    """
    optional = ["Fused attention", "torch.compile"] if config.compile else ["Fused attention"]
    T = config.sequence_length
    windows_per_rank = config.total_batch_size // (T * world.size)
    B = largest_divisor(windows_per_rank, at_most=config.batch_size)
    while True:
        outcome, reason = FITS, "on another rank"
        try:
            model = wrap(raw_model, "torch.compile" in optional, world)
            try_step(model, raw_model, B, T, min(2, windows_per_rank // B), world)
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
            distributed.enable_fused_attention("Fused attention" in optional)
        elif B == 1:
            raise UserError(
                f"{T} tokens do not fit in memory. Try --activation-checkpointing or a smaller model."
            )
        else:
            B = largest_divisor(windows_per_rank, at_most=B // 2)
            print0(f"warning: Out of memory. Continuing with --batch-size {B}.")


def try_step(model, raw_model, B, T, micro_steps, world):
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


def largest_divisor(number, at_most):
    """The largest divisor of `number` that is not above `at_most`: 96, 64 -> 48."""
    return max(d for d in range(1, min(number, at_most) + 1) if number % d == 0)


def is_out_of_memory(error):
    """Whether an exception, or one that led to it, says that memory ran out: torch.compile may keep only the text."""
    said = "".join(traceback.format_exception(error, limit=0))  # types and texts, those of its causes included
    words = ("MemoryError", "out of memory", "ALLOC_FAILED", "can't allocate memory", "not enough memory")
    return any(word in said for word in words)
