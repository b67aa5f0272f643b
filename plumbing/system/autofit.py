"""A trial of the first training step: what fails on this machine is done without, and B is lowered until it fits."""

import contextlib
import copy
import functools
import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from plumbing.cli.console import UserError, count, first_line, is_out_of_memory, print0
from plumbing.system import devices
from plumbing.system.distributed import World, environment_number

FITS, FAILED, NOT_COMPILED, OUT_OF_MEMORY = range(4)  # outcomes of a trial; all ranks act on the worst one
COMPILED = "torch.compile"
# what is given up if a trial fails, the last first, and the attention kernels to disable. torch prefers cuDNN's
KERNELS = {"fused attention": devices.FUSED_ATTENTION, COMPILED: (), "cuDNN's attention": ("cudnn",)}
SLOW_WORK = 3e11  # parameters times tokens of a step that takes a CPU ten seconds or more
TOO_LARGE = (
    "Even one sequence does not fit in memory. Lower --sequence-length or the model's size, or add "
    "--activation-checkpointing."
)


class Trial(NamedTuple):
    """What is tried: a step of training or, in an evaluation, of that."""

    raw_model: Any
    wrap: Callable[..., Any]  # wrap(raw_model, config, world, compiled=) makes the model to train
    autocast: Callable[..., Any]  # autocast(config, world) is the context of a forward pass
    num_ids: int
    config: Any
    world: World

    @property
    def trains(self) -> bool:
        return self.config.max_steps > 0

    @property
    def compiles(self) -> bool:
        """Whether torch.compile is to be used: by default on CUDA."""
        asked = self.config.compile
        return self.world.device.type == "cuda" if asked is None else asked

    @property
    def windows_per_rank(self) -> int:
        """The windows of a step that a rank takes, of which B is a divisor."""
        return self.config.total_batch_size // (self.config.sequence_length * self.world.size)

    def random_batch(self, B: int) -> torch.Tensor:
        """x and y of random ids, (2, B, T)."""
        return torch.randint(self.num_ids, (2, B, self.config.sequence_length), device=self.world.device)

    def loss(self, model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with self.autocast(self.config, self.world):
            return model(x, y, return_logits=False)[1]


class Fit(NamedTuple):
    """What works on this machine, and so is what really runs: run.txt says it, but for the model."""

    model: Any  # the model to train, compiled and in DDP where that is asked for
    B: int
    compiled: bool
    attention: list[str]  # the fused kernels that may be used
    given_up: list[str]  # of KERNELS
    kept_bytes: int  # of a sequence: what the forward pass keeps for the backward pass, without torch.compile
    seconds_per_token: float  # of the trial on a CPU; a GPU is still at work when it ends


def find_what_fits(trial: Trial) -> Fit:
    """Try a step on random ids, and do without whatever fails on this machine; if memory runs out, B is halved.

    All ranks take the same fallback. The model may be written to: see `undone`.
    """
    config, world, raw_model = trial.config, trial.world, trial.raw_model
    T, compiles, windows_per_rank = config.sequence_length, trial.compiles, trial.windows_per_rank
    if world.device.type == "cuda":
        prepare_gpu(T, world)
    has_cudnn = world.device.type == "cuda" and torch.backends.cuda.cudnn_sdp_enabled()
    optional = [name for name, used in zip(KERNELS, (True, compiles, has_cudnn)) if used]
    given_up: dict[str, str] = {}  # of these: why
    # one sequence first, as the model is written: a mistake in it then shows as itself, and not as torch.compile's
    eager = [name for name in optional if name != COMPILED]
    found = attempt(functools.partial(try_sequence, trial), raw_model, eager, given_up, world)
    if not found:
        raise UserError(TOO_LARGE)
    kept_bytes, unused = found
    optional = [name for name in optional if name not in given_up]
    with_room = min(world.gather(bound_on_B(trial, kept_bytes)))
    B = largest_divisor(windows_per_rank, at_most=min(config.batch_size, with_room))
    while True:
        work = sum(p.numel() for p in raw_model.parameters()) * B * T
        if compiles or (world.device.type == "cpu" and work > SLOW_WORK):
            print0(f"Trying B = {B}, which may take minutes.")
        tried = attempt(functools.partial(try_step, trial, optional, B), raw_model, optional, given_up, world)
        if tried:
            break
        if B == 1:
            raise UserError(TOO_LARGE)
        B = largest_divisor(windows_per_rank, at_most=B // 2)
        print0(f"warning: Out of memory. Continuing with --batch-size {B}.")
    for name, reason in given_up.items():
        print0(f"warning: A training step failed with {name} ({reason}). Training goes on without it.")
    model, seconds = tried
    if not getattr(model, "find_unused_parameters", True):  # DDP's
        check_unused(unused, world)
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # failed trials do not count
    attention = devices.enabled_attention(world.device.type)
    return Fit(
        model, B, COMPILED in optional, attention, [*given_up], kept_bytes, seconds / (B * T * world.size)
    )


def attempt(
    action: Callable[[], Any], raw_model: Any, optional: list[str], given_up: dict[str, str], world: World
) -> Any:
    """Return action(), done without the last of `optional` as often as it fails; None if memory runs out on any rank.

    What fails without all of `optional`, too, is the model's own error, and is raised.
    """
    while True:
        result = error = None
        try:
            result = action()
        except UserError:
            raise
        except Exception as caught:  # torch.compile may raise anything
            error = caught
            traceback.clear_frames(error.__traceback__)  # frees the memory that the failed try has taken
        raw_model.zero_grad(set_to_none=True)
        outcome = world.max_over_ranks(outcome_of(error))
        if outcome == FITS:
            return result
        result = None  # frees DDP's buckets as well
        torch._dynamo.reset()  # it gives up after 8 compilations of a function, and those that failed count
        gc.collect()
        torch.cuda.empty_cache()  # does nothing without CUDA
        if outcome == OUT_OF_MEMORY:
            return None
        if not optional:
            raise error or UserError("A training step failed on another rank, which says why.")
        name = COMPILED if outcome == NOT_COMPILED and COMPILED in optional else optional[-1]
        optional.remove(name)
        given_up[name] = f"{type(error).__name__}: {first_line(error)}" if error else "on another rank"
        devices.disable_attention(*KERNELS[name])


def outcome_of(error: Exception | None) -> int:
    if not error:
        return FITS
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    from torch._dynamo.exc import TorchDynamoException  # takes a second

    # the compiler's own: no triton, no C compiler, a GPU that it does not know
    return NOT_COMPILED if isinstance(error, TorchDynamoException) else FAILED


def prepare_gpu(T: int, world: World) -> None:
    """Leave memory for what torch does not allocate itself, before the trial fills the GPU; choose attention for T."""
    # This function has not been tried on a GPU yet. NCCL takes hundreds of MB, at the first large all-reduce. On
    # Windows, where the screen has a part of the GPU, the driver does not fail when that is full: it moves tensors to
    # main memory, and steps take several times as long
    share = 0.95
    if sys.platform == "win32":
        free, total = torch.cuda.mem_get_info()
        share *= (free + torch.cuda.memory_reserved()) / total  # the model is there already
    torch.cuda.set_per_process_memory_fraction(share)
    if world.size > 1:
        dist.all_reduce(torch.zeros(25 * 2**20, device=world.device))
    if T % 128:  # for such T, cuDNN's backward pass has given NaN (pytorch issue 196678)
        devices.disable_attention("cudnn")


@contextlib.contextmanager
def undone(model: Any) -> Iterator[None]:
    """Afterwards the model and the random numbers are as before, whatever a forward pass writes to.

    What is to be restored is kept in main memory: weights, buffers, and what get_extra_state adds.
    """

    def on_cpu(value: Any) -> Any:
        return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)

    state, buffers = tree_map(on_cpu, model.state_dict()), tree_map(on_cpu, dict(model.named_buffers()))
    device = next(model.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            try:
                model.load_state_dict(state)
            except RuntimeError as error:
                raise UserError(
                    "The model cannot load its own state dict, so no checkpoint of this run could be used: "
                    f"{' '.join(str(error).split())}"
                ) from None
            with torch.no_grad():
                for name, buffer in model.named_buffers():  # those that no state dict has, too
                    buffer.copy_(buffers[name])


def try_sequence(trial: Trial) -> tuple[int, list[str]]:
    """(the bytes that the forward pass of a sequence keeps for the backward pass, weights aside; with several ranks,
    the names of the parameters on which the loss does not depend).
    """
    model, device = trial.raw_model, trial.world.device
    batch = trial.random_batch(1)
    before = devices.random_state(device)
    kept_bytes, loss = count_kept_bytes(trial, model, batch)
    if trial.world.size == 1 or not trial.trains:
        return kept_bytes, []
    draws = not torch.equal(before, devices.random_state(device))
    unused = unused_parameters(model, loss)
    if draws:  # a model may leave out other blocks each time, and one forward pass does not show them all
        for _ in range(7):
            unused |= unused_parameters(model, trial.loss(model, *batch))
    return kept_bytes, sorted(unused)


def unused_parameters(model: Any, loss: torch.Tensor) -> set[str]:
    """The names of the parameters that get no gradient of this loss."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name for name, p in model.named_parameters() if p.requires_grad and p.grad is None}


def check_unused(names: list[str], world: World) -> None:
    """Raise UserError, on all ranks, if DDP would wait for the gradient of a parameter that has none."""
    unused = sorted({name for of_rank in world.gather(names) for name in of_rank})
    if unused:
        raise UserError(
            f"A step does not use {count(len(unused), 'parameter')}, such as {unused[0]}, but with several ranks DDP "
            "needs a gradient of each in every step. Delete them from the model, set their requires_grad to False, or, "
            "if steps use others at random, add find_unused_parameters=True to DDP in wrap()."
        )


def count_kept_bytes(trial: Trial, model: Any, batch: torch.Tensor) -> tuple[int, torch.Tensor]:
    """(the bytes that the forward pass of a sequence keeps for the backward pass, weights aside; its loss)."""
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor.detach()  # subtle: with the tensor itself, graph and tensor would keep one another alive

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = trial.loss(model, *batch)
    weights = list(model.parameters())
    for weight in weights:
        kept.pop(weight.untyped_storage()._cdata, None)
    # autocast keeps weights in 16 bits, however many sequences there are, unless it converts them again
    converts = trial.config.dtype != "float32" and not trial.config.activation_checkpointing
    casts = 2 * sum(p.numel() for p in weights) if converts else 0
    return max(0, sum(kept.values()) - casts), loss


def estimate(trial: Trial) -> Fit:
    """What a dry run says in the place of a trial: nothing is computed, on tensors without memory."""
    config, model = trial.config, trial.raw_model
    try:
        with FakeTensorMode(), SkipInit(), trial.world.device:
            new = type(model)(model.config)
            new.activation_checkpointing = config.activation_checkpointing
            kept_bytes, _ = count_kept_bytes(trial, new, trial.random_batch(1))
    except Exception:  # a model that reads what it computes; then its activations are left out of the account
        kept_bytes = 0
    with_room = min(trial.world.gather(bound_on_B(trial, kept_bytes)))
    B = largest_divisor(trial.windows_per_rank, at_most=min(config.batch_size, with_room))
    return Fit(model, B, False, [], [], kept_bytes, 0.0)


def try_sharded(trial: Trial) -> Fit:
    """Estimate B for a sharded model, and try one sequence: the ranks would hang if one of them ran out of memory."""
    found = estimate(trial)
    model = trial.wrap(trial.raw_model, trial.config, trial.world, compiled=trial.compiles)
    buffers = {name: buffer.clone() for name, buffer in trial.raw_model.named_buffers()}
    try:
        loss = trial.loss(trial.raw_model, *trial.random_batch(1))
        if trial.trains:
            loss.backward()
    except (RuntimeError, ValueError, AssertionError, NotImplementedError) as error:
        if is_out_of_memory(error):
            raise UserError(TOO_LARGE) from None
        raise UserError(
            f"--shard cannot train this model: {first_line(error)}. A block's parameters must be used in its own "
            "forward pass only. Change that in the model, or leave --shard out."
        ) from None
    trial.raw_model.zero_grad(set_to_none=True)
    for name, buffer in trial.raw_model.named_buffers():
        buffer.copy_(buffers[name])
    attention = devices.enabled_attention(trial.world.device.type)
    return found._replace(model=model, compiled=trial.compiles, attention=attention)


def try_step(trial: Trial, optional: list[str], B: int) -> tuple[Any, float]:
    """(the model to train, which is compiled if that is in `optional`; the seconds of a micro-step on a CPU)."""
    world, began = trial.world, 0.0
    model = trial.wrap(trial.raw_model, trial.config, world, compiled=COMPILED in optional)
    # Reserve memory for the optimizer state, which is allocated later: two numbers per weight. With several ranks,
    # gradients and DDP's buckets are here at once, which in a step are one
    numbers = (1 if world.size > 1 else 2) if trial.trains else 0
    reserved = [torch.empty_like(p) for p in trial.raw_model.parameters() for _ in range(numbers)]
    x, y = trial.random_batch(B)
    for _ in range(min(2, trial.windows_per_rank // B)):  # in the second one, there are gradients from the start
        began = time.perf_counter()
        # no_sync: a rank that fails here would leave the others waiting in the all-reduce
        with model.no_sync() if world.size > 1 else contextlib.nullcontext():
            loss = trial.loss(model, x, y)
            if trial.trains:
                loss.backward()
            del loss
    del reserved
    return model, time.perf_counter() - began


def bound_on_B(trial: Trial, kept_bytes: int) -> int:
    """A bound on B, because trying a B that cannot fit costs a compilation or, on a CPU, may end the process."""
    device = trial.world.device
    # compiled, GPT-2 keeps less than half as much
    kept_bytes = max(1, kept_bytes // (3 if trial.compiles else 1))
    # gradients and the optimizer's two moments; the weights are there already
    needed = 12 * sum(p.numel() for p in trial.raw_model.parameters()) if trial.trains else 0
    if trial.config.shard:
        needed /= trial.world.size
    free = devices.free_memory(device) - needed
    if device.type != "cuda" or torch.cuda.get_device_properties(device).is_integrated:
        # main memory runs out without an error, and a step needs more than what it keeps
        free /= 2 * environment_number("LOCAL_WORLD_SIZE", 1)
    return max(1, int(min(free / kept_bytes, 2**30)))  # it may be infinite


def new_model(model_class: Callable[[Any], Any], config: Any) -> Any:
    """A model whose buffers have memory of their own: one that is expanded could not be written to, nor broadcast."""
    model = model_class(config)
    for buffer in model.buffers():
        buffer.data = buffer.data.contiguous()
    return model


class SkipInit(TorchFunctionMode):
    """Context in which torch.nn.init does nothing: for a model whose weights are loaded next, seconds are saved."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def check_memory(make_model: Callable[[], Any], device: torch.device, *, ranks: int, shares: int = 1) -> None:
    """Raise UserError if a model is too large to be trained on a device, without taking memory for its weights.

    ranks: of the run; shares: over how many of them the model is shared out.
    """
    try:
        with torch.device("meta"), SkipInit():
            parameters = sum(p.numel() for p in make_model().parameters())
    except Exception:  # a model that reads its first values is not made without them: torch says what is wrong
        return
    available = devices.free_memory(device)
    needed = 16 * parameters / shares
    if needed > available:
        advice = "Use a smaller model, or a larger device."
        if shares < ranks:
            advice = f"Add --shard: then each of the {ranks} ranks needs {needed / ranks / 2**30:,.1f} GiB."
        raise UserError(
            f"This model is too large: training takes 16 bytes for each parameter, {needed / 2**30:,.1f} GiB here, but "
            f"{available / 2**30:,.1f} GiB are free. {advice}"
        )


def largest_divisor(number: int, at_most: int) -> int:
    """The largest divisor of `number` that is not above `at_most`: 96, 64 -> 48."""
    return max(d for d in range(1, min(number, at_most) + 1) if number % d == 0)
