"""Checks of the model: whether the program can work with it, and whether all ranks still have the same one.

A run's model is examined before the first step of each start, and a loaded model before it is used.
"""

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from plumbing.cli.console import UserError, is_out_of_memory, note, print0
from plumbing.system.devices import exact_matmuls
from plumbing.system.distributed import World
from plumbing.system.kernels import KVCache
from plumbing.system.memory import SkipInit, count_parameters, new_model
from plumbing.system.trial import undone

# parameters times tokens: a CPU computes such a forward pass in a tenth of a second, a GPU thousands of times more
CPU_WORK, GPU_WORK = 4e9, 1e13
LEAST_TOKENS = 24
COPIED_PARAMETERS = 10_000_000  # up to this size, a second model is made on a CPU


def examine(model: Any, num_ids: int, length: int, text: torch.Tensor | None = None) -> bool:
    """Whether decoding with a cache gives the same as reading the whole text.

    The texts have ids below num_ids and up to `length` tokens, cut to keep this fast. text: a batch of real data (B, T)
    where a run starts. A model that is only used is not checked for training again.
    """
    # in random ids, neighbours are hardly ever of one kind, such as two digits
    rows = [torch.randint(num_ids, (1, length))]
    if text is not None:
        rows.append(text.cpu().repeat(1, length // text.size(1) + 1)[:, :length])
    # texts of a single id, beginning with the last ids, which are often the special ones
    some_ids = torch.cat([torch.arange(num_ids)[-8:], torch.randperm(num_ids)[:1000]])
    parameters = count_parameters(model)
    device = next(model.parameters()).device
    on_gpu = device.type != "cpu"
    most = max(LEAST_TOKENS, int((GPU_WORK if on_gpu else CPU_WORK) / parameters))
    long = torch.cat(rows)[: max(2, most // length), :most].to(device)
    width = min(4, length)
    short = some_ids[: max(1, most // width), None].expand(-1, width).to(device)
    with quiet(model):
        hidden = model.hidden_states(long)
        faults = []
        if text is not None:
            faults = faults_of(model, long[:1], copies=on_gpu or parameters <= COPIED_PARAMETERS)
        T = long.size(1)
        # a long text behind one token, and a token behind that; one token, two and one
        has_cache = is_cache_right(model, long, hidden, places=[1, max(1, T - 1)])
        has_cache = has_cache and is_cache_right(model, short, model.hidden_states(short), places=[1, 3])
        if (faults or not has_cache) and not is_close(model.hidden_states(long), hidden):
            note(
                "The model draws random numbers in evaluation as well, so its losses, scores and samples differ from "
                "one time to the next, and it was not examined. Draw them only `if self.training`.",
                file=sys.stderr,
            )
            return False
    for fault in faults:
        print0(fault)
    if not has_cache:
        note(
            "With a cache this model computes something else, so samples and HellaSwag do not use one.",
            file=sys.stderr,
        )
    return has_cache


def faults_of(model: Any, idx: torch.Tensor, *, copies: bool) -> list[str]:
    """A line for each fault of a run's first model, found on one text (1, T): that it looks ahead, mixes rows, is not
    saved completely, or has another loss.

    copies: whether there is room and time for a second model.
    """
    faults = []
    half = max(1, idx.size(1) // 2)
    other = torch.cat([idx[:, :half], idx[:, half:].flip(1)], 1)  # begins alike
    hidden = model.hidden_states(idx)
    rows = model.hidden_states(torch.cat([idx, other, idx]))
    is_independent = is_close(rows[:1], hidden) and is_close(rows[2:], hidden)
    changed = rows[1:2]
    if not is_independent:
        changed = model.hidden_states(other)
    if not is_close(changed[:, :half], hidden[:, :half]):
        faults.append(
            "warning: A token's logits depend on later tokens, so the loss says little and samples are worthless."
        )
    if not is_independent:
        faults.append(
            "warning: A token's logits depend on the other rows of its batch, so losses and HellaSwag's scores change "
            "with B, which depends on the memory."
        )
    logits = model(idx)[0]
    if copies and not is_saved_whole(model, idx, logits):
        faults.append(
            "warning: A second model with the saved weights computes other logits, so a resumed run will not be the"
            " same. Keep everything that the model computes with in its parameters and buffers."
        )
    # with the likeliest ids as targets, a loss other than cross-entropy shows even in a new model
    likely = logits.argmax(-1)
    logits, loss = model(idx, likely)[:2]  # a changed model may return more
    plain = F.cross_entropy(logits[0].float(), likely[0])
    if not abs(loss - plain) <= 1e-4 * plain:
        faults.append(
            f"note: The loss in validation is not the cross-entropy of the logits ({loss:.4f}, and not {plain:.4f}), "
            "so neither it nor bits per byte can be compared with other models'. Add terms for training only under "
            "`if self.training`."
        )
    return faults


@contextlib.contextmanager
def quiet(model: Any) -> Iterator[None]:
    """Context for trying a model out, in float32 and without gradients. It restores the model at its end."""
    was_training = model.training
    device = next(model.parameters()).device
    with undone(model), torch.no_grad(), exact_matmuls(), torch.autocast(device.type, enabled=False):
        model.eval()
        try:
            yield
        finally:
            model.train(was_training)


def is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    limit = 1e-3 if expected.dtype == torch.float32 else 0.05
    return bool((found - expected).abs().max() <= limit * expected.std())


def is_saved_whole(model: Any, idx: torch.Tensor, logits: torch.Tensor) -> bool:
    """Whether a second model with this one's state dict computes the same logits."""
    try:
        with SkipInit():
            second = new_model(type(model), model.config)
        second.load_state_dict(model.state_dict())
        return is_close(second.to(idx.device).eval()(idx)[0], logits)
    except RuntimeError as error:
        if is_out_of_memory(error):
            return True  # there is no memory to try it
        problem = " ".join(str(error).split())
        raise UserError(
            f"A second {type(model).__name__} with the same config cannot load this model's weights, so no checkpoint "
            f"of the run could be used: {problem}. Make all layers in __init__."
        ) from None


def is_cache_right(model: Any, idx: torch.Tensor, hidden: torch.Tensor, *, places: list[int]) -> bool:
    """Whether a text that is split at these places, and read with a cache, has the same hidden states."""
    cache = KVCache(idx.size(1))
    try:
        found = [model.hidden_states(part, cache) for part in idx.tensor_split(places, 1) if part.size(1)]
    except Exception as error:  # a changed model may not take a cache at all
        if is_out_of_memory(error):
            raise
        return False
    return is_close(torch.cat(found, 1), hidden)


def check_groups(model: torch.nn.Module, optimizers: list[Any]) -> None:
    """Raise UserError if two optimizers have the same parameter. Freeze the parameters that none has, with a note."""
    updated = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            updated += group["params"]
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    counts = {name: sum(p is other for other in updated) for name, p in trainable.items()}
    twice = [name for name in trainable if counts[name] > 1]
    if twice:
        raise UserError(f"Two optimizers have the parameter {twice[0]}. Leave it in one of them.")
    missing = [name for name in trainable if not counts[name]]
    if missing:
        note(f"No optimizer has {', '.join(missing)}, so training does not change that.")
    for name in missing:
        trainable[name].requires_grad_(False)  # its gradient would count in the norm that clips the others


def check_ranks(parts: Any, step: int) -> None:
    """Raise UserError, on all ranks, if what they should have alike differs by more than rounding."""
    end = "If ranks are meant to differ between checkpoints, set raw_model.ranks_differ = True in setup()."
    weights = parts.raw_model.named_parameters() if parts.layout.copies > 1 else []
    worst = different(weights, parts.world, steps=step)
    if worst:
        raise UserError(
            f"After step {step}, {worst} is not the same on all ranks, so each rank trains another model. DDP averages "
            "the gradients only of parameters that required one when the run began, and each must get one in every "
            f"step. Random numbers differ between ranks. No checkpoint was written. {end}"
        )
    owners = {f"the state of {type(each).__name__}": each for each in parts.optimizers}
    owners |= {f"Parts.own[{name!r}]": each for name, each in parts.own.items()}
    state = []
    for name, owner in owners.items():
        state += [(name, tensor) for tensor in parts.layout.plain_tensors(owner.state_dict())]
    worst = different(state, parts.world, steps=step)
    if worst:
        raise UserError(
            f"After step {step}, {worst} is not the same on all ranks, but a checkpoint holds rank 0's alone, so a run "
            "that is resumed would go on with another one. Compute it from what all ranks have or, with --shard, from "
            f"gradients and weights themselves (DTensors), not from this rank's rows. {end}"
        )


def different(tensors: Iterable[tuple[str, torch.Tensor]], world: World, *, steps: int) -> str:
    """The name of the tensor that differs most between the ranks, "" if none does but for the rounding of `steps`."""
    names, sums = [], []
    for name, tensor in tensors:
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        if not tensor.is_floating_point():
            tensor = tensor.double()
        tensor = tensor.flatten()
        # each number counts by another factor, so that other signs and another order show as well
        factors = torch.arange(tensor.numel(), device=tensor.device).cos()
        found = [
            (tensor * factors).sum(dtype=torch.float64),
            torch.linalg.vector_norm(tensor, dtype=torch.float64),
        ]
        names.append(name)
        sums.append(torch.stack(found).to(world.device))
    gathered = world.gather(torch.stack(sums).tolist() if sums else [])
    worst, name_of_worst = 1e-6 * (1 + steps) ** 0.5, ""
    for theirs in gathered:
        if len(theirs) != len(names):
            return names[0] if names else "the state"
        for name, (total, _), (first, norm) in zip(names, theirs, gathered[0]):
            if abs(total - first) > worst * max(norm, 1e-30):
                worst, name_of_worst = abs(total - first) / max(norm, 1e-30), name
    return name_of_worst


def note_gradients(model: torch.nn.Module, step: int) -> None:
    """Note if a step leaves gradients: a checkpoint does not hold them."""
    left = [name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()]
    if left:
        note(
            f"After step {step} there are gradients, for example of {left[0]}. No checkpoint holds them, so a run that "
            "is resumed after such a step computes other updates."
        )
