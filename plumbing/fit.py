"""Fitting a run to the machine: its settings are checked before anything is loaded, and its first step is tried."""

import gc
import math
import os
import traceback

import torch

from plumbing import distributed, mirror
from plumbing.cli import UserError, check_numbers, count, first_line, flag_of
from plumbing.distributed import print0

# ----------------------------------------------------------------------------------------------------------
# Before anything is loaded


def check_config(config, world_size):
    """Raise one UserError with everything that is wrong with `config` on `world_size` ranks."""
    above_0 = "n_layer n_head n_embd block_size batch_size sequence_length total_batch_size"
    above_0 += " max_steps max_lr val_tokens keep_checkpoints"
    errors = check_numbers(config, above_0.split(), below_1=["beta1", "beta2", "muon_momentum"])
    errors += check_machine(config)
    if not config.out_dir:
        errors.append("--out-dir is empty. Give the folder in which the run is to be kept.")
    # at least 1, so that a bad value reported above cannot cause a division by zero in the checks below
    T, n_head, total = (max(1, n) for n in (config.sequence_length, config.n_head, config.total_batch_size))
    if config.n_embd % n_head:
        nearest = n_head * max(1, round(config.n_embd / n_head))
        errors.append(f"--n-embd {config.n_embd} is not a multiple of --n-head {n_head}. Try --n-embd {nearest}.")
    if T > config.block_size:
        advice = "Lower the first or raise the second."
        errors.append(f"--sequence-length {T} is longer than --block-size {config.block_size}. {advice}")
    errors += check_batch(total, T, world_size, config.batch_ramp)
    if config.val_tokens < T:
        errors.append(f"--val-tokens is {config.val_tokens}, but it must be {T} or more, the length of one sequence.")
    if config.decay_fraction > 1:
        errors.append(f"--decay-fraction is {config.decay_fraction}, but it must be between 0 and 1.")
    if config.init_from == "resume":  # nanoGPT's word
        errors.append("--init-from names a model. To resume a run, repeat its command without that flag.")
    if errors:
        raise UserError(" ".join(errors))


def check_machine(config):
    """A sentence for each thing that the run asks for and this machine does not have."""
    errors, device = [], "cpu"
    try:
        device = distributed.choose_device(config.device)
        distributed.choose_dtype(config.dtype, device, config.n_embd)
    except UserError as error:
        errors.append(str(error))
    uneven = [name for name in ("sequence_length", "n_embd", "vocab_size") if getattr(config, name) % 16]
    if config.dtype == "fp8" and uneven:
        flags = " and ".join(f"{flag_of(name)} {getattr(config, name)}" for name in uneven)
        errors.append(f"--dtype fp8 needs sizes that are multiples of 16, and {flags} is not. Change it, or the dtype.")
    local_ranks, gpus = distributed.environment_number("LOCAL_WORLD_SIZE", 1), torch.cuda.device_count()
    if device == "cuda" and local_ranks > gpus:
        advice = f"Start it with --nproc_per_node={gpus}."
        errors.append(
            f"torchrun started {local_ranks} processes on this machine, which has {count(gpus, 'GPU')}. {advice}"
        )
    if config.wandb and not mirror.is_installed():
        errors.append("--wandb needs a package that is not installed. Install it with: pip install wandb")
    return errors or check_memory(config, device)


def check_memory(config, device):
    """A list with one sentence if a model of this config needs more memory than the device has, else an empty one.

    Only weights, gradients and Adam's two moments count, all float32, so that nothing that could fit is refused.
    """
    c = config
    num_params = c.n_layer * (12 * c.n_embd**2 + 13 * c.n_embd) + (c.vocab_size + c.block_size + 2) * c.n_embd
    needed = 16 * num_params
    place, available = "machine", math.inf
    if device.startswith("cuda"):
        place, available = "GPU", torch.cuda.get_device_properties(device).total_memory
    elif hasattr(os, "sysconf"):  # not on Windows
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        needed += c.n_layer * 2**16  # Python's objects for a block, whatever its size
    if needed <= available:
        return []
    return [
        f"This model has {num_params:,} parameters and needs {needed / 2**30:,.0f} GiB to be trained, but this {place} "
        f"has {available / 2**30:,.0f} GiB. Lower --n-layer, --n-embd, --vocab-size or --block-size."
    ]


def check_batch(total, T, world_size, batch_ramp):
    """A sentence for each way in which a step of `total` tokens cannot be split over the ranks."""
    errors = []
    tokens = T * world_size  # in the smallest possible micro-step, with B = 1
    what = f"--sequence-length {T} x {count(world_size, 'rank')}"
    if total % tokens:
        nearest = tokens * max(1, round(total / tokens))
        advice = "Try" if total % T else f"Start a number of ranks that divides {total // T}, or try"
        errors.append(
            f"--total-batch-size {total} is not a multiple of {tokens}, which is {what}. {advice} "
            f"--total-batch-size {nearest}."
        )
    if batch_ramp and (total % 2**15 or 2**15 % tokens):
        errors.append(
            f"--batch-ramp starts at 32,768 tokens, which must be a multiple of {tokens}, which is {what}, and divide "
            f"--total-batch-size {total}. Change these, or use --batch-ramp 0."
        )
    return errors


# ----------------------------------------------------------------------------------------------------------
# Before the first step

FITS, FAILED, OUT_OF_MEMORY = range(3)  # outcomes of a trial; all ranks act on the worst one


def find_what_fits(raw_model, wrap, config, world):
    """Try a training step, and do without whatever fails on this machine. Returns (model to train, B).

    wrap(raw_model, compiled, world) makes the model to train. If memory runs out, B is halved. If the compiler or an
    attention kernel fails, the run continues without it, after a warning. All ranks take the same fallback; an error
    that remains without both is raised.
    """
    T, compiled, fused_attention = config.sequence_length, config.compile, True
    windows_per_rank = config.total_batch_size // (T * world.size)
    B = largest_divisor(windows_per_rank, at_most=config.batch_size)
    while True:
        outcome, reason = FITS, "on another rank"
        try:
            model = wrap(raw_model, compiled, world)
            try_step(model, raw_model, B, T, min(2, windows_per_rank // B), world)
        except Exception as error:
            # torch.compile may raise anything. An error that it did not cause comes back in the try without it, and
            # is raised there
            outcome = OUT_OF_MEMORY if is_out_of_memory(error) else FAILED
            if outcome == FAILED and not compiled and not fused_attention:
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
        if outcome == OUT_OF_MEMORY:
            if B == 1:
                raise UserError(f"{T} tokens do not fit in memory. Try --activation-checkpointing or a smaller model.")
            B = largest_divisor(windows_per_rank, at_most=B // 2)
            print0(f"warning: Out of memory. Continuing with --batch-size {B}.")
        elif compiled:
            print0(f"warning: torch.compile failed ({reason}). Continuing without it.")
            compiled = False
        else:
            print0(f"warning: Fused attention failed ({reason}). Continuing without it.")
            fused_attention = False
            distributed.enable_fused_attention(False)


def try_step(model, raw_model, B, T, micro_steps, world):
    """Forward and backward passes on random tokens, with the memory of a training step.

    If a step has two micro-steps or more, so has the trial, because the second one starts with gradients in memory.
    """
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
    """Whether an exception, or one that led to it, says that memory ran out.

    torch.compile wraps torch.OutOfMemoryError in exceptions of its own, some of which keep only its text.
    """
    said = "".join(traceback.format_exception(error, limit=0))  # types and texts, those of its causes included
    words = ("MemoryError", "out of memory", "ALLOC_FAILED", "can't allocate memory", "not enough memory")
    return any(word in said for word in words)
