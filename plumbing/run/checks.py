"""What the program needs of a model, and whether the model as it stands does it: one examination, in exact matmuls.

A run's model is examined before its first step, and what is found is kept in the checkpoints; a model that is loaded
is examined unless its code is the one that was.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from plumbing.cli.console import UserError, is_out_of_memory, print0
from plumbing.system.autofit import SkipInit, make, unchanged
from plumbing.system.devices import exact_matmuls
from plumbing.system.distributed import World
from plumbing.system.kernels import KVCache

# parameters times tokens of a forward pass that takes a CPU a tenth of a second; a GPU does thousands of times more
CPU_WORK, GPU_WORK = 4e9, 1e13
LEAST_TOKENS = 24
COPIED_PARAMETERS = 10_000_000  # up to this size a second model is made on a CPU, too


def examine(model: Any, num_ids: int, longest: int, *, is_new: bool = True) -> dict[str, Any]:
    """What is found out about a model that reads up to `longest` ids below num_ids: {"has_cache": ...}.

    is_new: whether a run begins with the model; else it is only used, and whether that was sound is not asked again.
    """
    parameters = sum(p.numel() for p in model.parameters())
    is_cpu = next(model.parameters()).is_cpu
    work = CPU_WORK if is_cpu else GPU_WORK
    T = min(longest, max(LEAST_TOKENS, int(work / parameters)))
    with quiet(model):
        idx = torch.randint(num_ids, (1, T), device=next(model.parameters()).device)
        hidden = model.hidden_states(idx)
        if is_new and not is_causal(model, idx, hidden):
            print0(
                "warning: A token's logits depend on later tokens, so the loss says little and samples are worthless."
            )
        if is_new and (parameters <= COPIED_PARAMETERS or not is_cpu) and not is_saved_whole(model, idx):
            print0(
                "warning: A second model with the saved weights computes other logits, so a resumed run will not be the"
                " same. Keep all that the model computes with in its parameters and buffers."
            )
        has_cache = is_cache_right(model, idx, hidden)
    if not has_cache and T > 1:
        note = "note: With a cache this model computes something else, so samples and HellaSwag do without."
        print0(note, file=sys.stderr)
    return {"has_cache": has_cache}


@contextlib.contextmanager
def quiet(model: Any) -> Iterator[None]:
    """Context for trying a model out: in float32 and without gradients; afterwards all is as before."""
    was_training, device = model.training, next(model.parameters()).device
    with unchanged(model), torch.no_grad(), exact_matmuls(), torch.autocast(device.type, enabled=False):
        model.eval()
        try:
            yield
        finally:
            model.train(was_training)


def is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    limit = 1e-3 if expected.dtype == torch.float32 else 0.05
    return bool((found - expected).abs().max() <= limit * expected.std())


def is_causal(model: Any, idx: torch.Tensor, hidden: torch.Tensor) -> bool:
    """Whether the first half stays as it is if the second half of the text is another."""
    half = max(1, idx.size(1) // 2)
    other = torch.cat([idx[:, :half], idx[:, half:].flip(1)], 1)
    return is_close(model.hidden_states(other)[:, :half], hidden[:, :half])


def is_saved_whole(model: Any, idx: torch.Tensor) -> bool:
    """Whether a second model with this one's state dict computes the same logits."""
    try:
        with SkipInit():
            second = make(type(model), model.config)
        try:
            second.load_state_dict(model.state_dict())
        except RuntimeError as error:
            raise UserError(
                "A second model cannot load the state dict of the first one, so no checkpoint of this run could be "
                f"used: {' '.join(str(error).split())}"
            ) from None
        return is_close(second.to(idx.device).eval()(idx)[0], model(idx)[0])
    except RuntimeError as error:
        if is_out_of_memory(error):
            return True  # it was not tried
        raise


def is_cache_right(model: Any, idx: torch.Tensor, hidden: torch.Tensor) -> bool:
    """Whether a cache gives what the whole text gives, however the text is split: a first token alone or a long prompt,
    then single tokens and several at once.
    """
    T = idx.size(1)
    for sizes in ([1, 2], [T - 3, 1]):  # and the rest at once
        sizes = [size for size in sizes if size > 0]
        while sum(sizes) > T:
            sizes.pop()
        sizes += [T - sum(sizes)] if sum(sizes) < T else []
        cache = KVCache(T)
        try:
            found = [model.hidden_states(part, cache) for part in idx.split(sizes, 1)]
        except Exception as error:  # a changed model may not take a cache at all
            if is_out_of_memory(error):
                raise
            return False
        if not is_close(torch.cat(found, 1), hidden):
            return False
    return True


def check_ranks(model: torch.nn.Module, step: int, world: World) -> None:
    """Raise UserError, on all ranks, if the ranks' parameters differ by more than rounding, with the first name."""
    norms = {
        name: torch.linalg.vector_norm(torch.view_as_real(p) if p.is_complex() else p, 1, dtype=torch.float64)
        for name, p in model.named_parameters()
        if p.is_floating_point() or p.is_complex()
    }
    gathered = torch.tensor(world.gather(torch.stack([*norms.values()]).tolist()))
    differs = ((gathered - gathered[0]).abs() > 1e-6 * gathered[0]).any(0)
    if differs.any():
        name = list(norms)[int(differs.nonzero()[0])]
        raise UserError(
            f"After step {step}, {name} is not the same on all ranks, so each trains a model of its own. A gradient is "
            "averaged over the ranks if its parameter requires one from the start of the run on, and random numbers "
            "are each rank's own. No checkpoint was written."
        )


def check_groups(model: torch.nn.Module, optimizers: list[Any]) -> None:
    """Raise UserError if two optimizers have the same parameter; say which trainable ones are in no group."""
    updated = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    counts = {name: sum(p is other for other in updated) for name, p in model.named_parameters()}
    twice = [name for name in names if counts[name] > 1]
    if twice:
        raise UserError(f"Two optimizers have the parameter {twice[0]}. Leave it in one of them.")
    missing = [name for name in names if not counts[name]]
    if missing:
        print0(f"note: No optimizer has {', '.join(missing[:3])}, so what that holds stays as it is.")
