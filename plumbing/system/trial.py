"""A trial of the first training step, which finds what works on this machine and the largest B that fits."""

import contextlib
import copy
import dataclasses
import gc
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from plumbing.cli.console import UserError, count, first_line, is_out_of_memory, print0
from plumbing.system import devices, kernels, memory
from plumbing.system.distributed import World

FITS, FAILED, NOT_COMPILED, OUT_OF_MEMORY = range(4)  # outcomes of a trial; all ranks act on the worst one
COMPILED = "torch.compile"
# {what to give up if a trial fails, the last first: the attention kernels to disable}. torch prefers cuDNN's attention
KERNELS = {"fused attention": devices.FUSED_ATTENTION, COMPILED: (), "cuDNN's attention": ("cudnn",)}
SLOW_WORK = 3e11  # parameters times tokens of a step that takes a CPU ten seconds or more
TOO_LARGE = (
    "Even one sequence does not fit in memory. Lower --sequence-length or the model's size, or add "
    "--activation-checkpointing."
)


class Trial(NamedTuple):
    """Everything that a trial step needs. Without optimizers, only the forward pass is tried."""

    raw_model: Any
    optimizers: list[Any]
    make: Callable[[Any], Any]  # make(config) makes a new model
    wrap: Callable[..., Any]  # wrap(raw_model, config, layout) makes the model to train
    autocast: Callable[..., Any]  # autocast(config, world) is the context of a forward pass
    matmul_dtype: torch.dtype  # in which --shard gathers the weights of blocks
    num_ids: int
    config: Any
    layout: Any  # a Whole

    @property
    def world(self) -> World:
        return self.layout.world

    @property
    def compiles(self) -> bool:
        """Whether to use torch.compile: by default on CUDA."""
        if self.config.compile is None:
            return self.world.device.type == "cuda"
        return self.config.compile

    @property
    def windows_per_rank(self) -> int:
        """Each rank's windows in a step: a multiple of B."""
        return self.config.total_batch_size // (self.config.sequence_length * self.world.size)

    def random_batch(self, B: int) -> torch.Tensor:
        """x and y of random ids, (2, B, T)."""
        shape = (2, B, self.config.sequence_length)
        return torch.randint(self.num_ids, shape, device=self.world.device)

    def loss(self, model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with self.autocast(self.config, self.world):
            return loss_of(model(x, y, return_logits=False))

    def account(self, make: Callable[[], Any], larger: int, *, room: float = math.inf) -> memory.Account:
        """Count what a micro-step of one sequence and, if there is room for it, of a larger B take.

        make(): this trial's model, or a fake one, with gradients.
        """
        kept, peaks = [], []
        try:
            for B in (1, larger):
                if B == 1 or B * peaks[0] < room:
                    model = make()
                    with memory.LiveBytes(model) as live:
                        loss = self.loss(model, *self.random_batch(B))
                        kept.append(live.now)
                        if self.optimizers:
                            loss.backward()
                        del loss
                    peaks.append(live.peak)
        except Exception as error:  # a changed model may do what cannot be counted
            if not peaks and is_out_of_memory(error):
                raise
        state = memory.training_bytes(self.raw_model, self.optimizers) / self.layout.shares
        gathered = 0.0
        if self.layout.shares > 1:
            gathered = memory.gathered_bytes(self.raw_model, self.matmul_dtype)
        if len(peaks) < 2:
            return memory.Account(state, gathered, sum(peaks))
        # gradients of large weights may be the peak for few sequences, but not for more
        sequence = max(peaks[1] - peaks[0], kept[1] - kept[0]) / (larger - 1)
        return memory.Account(state, gathered + peaks[0] - sequence, sequence)

    def choose_B(self, account: memory.Account) -> int:
        """The largest B that may fit on each rank, up to --batch-size."""
        held = sum(p.nbytes for p in self.raw_model.parameters() if not p.is_meta) / self.layout.shares
        bounds = self.world.gather(memory.bound_on_B(account, held, self.world))
        return largest_divisor(self.windows_per_rank, at_most=min(self.config.batch_size, *bounds))


class Fit(NamedTuple):
    """The result of a trial: what works on this machine. run.txt shows all but the model."""

    model: Any  # the model to train, compiled and in DDP where that is asked for
    B: int
    account: memory.Account
    compiled: bool = False
    attention: Sequence[str] = ()  # the fused kernels that may be used
    given_up: Sequence[str] = ()  # names in KERNELS
    seconds_per_token: float = 0.0  # measured on a CPU; a GPU is still busy when the trial ends


def loss_of(outputs: Any) -> torch.Tensor:
    """The loss in what a model returns."""
    if not isinstance(outputs, tuple):
        kind = type(outputs).__name__
        raise UserError(f"forward() returns a {kind}. Return (logits, loss), and what else you like.")
    return outputs[1]


def find_what_fits(trial: Trial) -> Fit:
    """Try a step on random ids, give up what fails on this machine, and halve B while memory runs out.

    All ranks give up the same. The trial may write to the model: see `undone`.
    """
    config, world = trial.config, trial.world
    optional = ["fused attention"]
    if trial.compiles and trial.layout.shares == 1:  # blocks that have been compiled stay so
        optional.append(COMPILED)
    if world.device.type == "cuda":
        prepare_gpu(config.sequence_length, world)
        if torch.backends.cuda.cudnn_sdp_enabled():
            optional.append("cuDNN's attention")
    given_up: dict[str, str] = {}
    # one sequence without torch.compile first, so that torch.compile does not hide a mistake in the model
    tried = attempt(try_sequence, trial, [name for name in optional if name != COMPILED], given_up)
    if not tried:
        raise UserError(TOO_LARGE)
    account, unused = tried
    B = trial.choose_B(account)
    while True:
        work = memory.count_parameters(trial.raw_model) * B * config.sequence_length
        if trial.compiles or (world.device.type == "cpu" and work > SLOW_WORK):
            print0(f"Trying B = {B}, which may take minutes.")
        tried = attempt(try_step, trial, optional, given_up, B)
        if tried:
            break
        if B == 1:
            raise UserError(TOO_LARGE)
        B = largest_divisor(trial.windows_per_rank, at_most=B // 2)
        print0(f"warning: Out of memory. Continuing with --batch-size {B}.")
    for name, reason in given_up.items():
        print0(f"warning: A training step failed with {name} ({reason}). Training continues without it.")
    model, seconds = tried
    if not getattr(model, "find_unused_parameters", False):  # DDP's
        check_unused(unused, world)
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # failed trials do not count
    return Fit(
        model=model,
        B=B,
        account=account,
        compiled=trial.compiles and COMPILED not in given_up,
        attention=devices.enabled_attention(world.device.type),
        given_up=list(given_up),
        seconds_per_token=seconds / (B * config.sequence_length * world.size),
    )


def attempt(
    action: Callable[..., Any], trial: Trial, optional: list[str], given_up: dict[str, str], *args: Any
) -> Any:
    """The result of action(trial, given_up, *args), or None if memory runs out on any rank.

    Whenever it fails, the last name in `optional` is given up: {name: the reason}. If it still fails when none is left,
    the error is the model's, and is raised.
    """
    world = trial.world
    while True:
        result = error = None
        try:
            result = action(trial, given_up, *args)
        except UserError:
            raise
        except Exception as caught:  # torch.compile may raise anything
            error = caught
            traceback.clear_frames(error.__traceback__)  # frees the memory of the failed try
        trial.raw_model.zero_grad(set_to_none=True)
        outcome = world.max_over_ranks(outcome_of(error))
        if outcome == FITS:
            return result
        result = None  # frees DDP's buckets as well
        torch._dynamo.reset()  # it gives up after 8 compilations of a function, failed ones included
        gc.collect()
        torch.cuda.empty_cache()  # does nothing without CUDA
        if outcome == OUT_OF_MEMORY:
            trial.layout.recover(trial.raw_model)
            return None
        left = [name for name in optional if name not in given_up]
        if not left:
            raise error or UserError("A training step failed on another rank, which says why.")
        name = left[-1]
        if outcome == NOT_COMPILED and COMPILED in left:
            name = COMPILED
        given_up[name] = "on another rank"
        if error:
            given_up[name] = f"{type(error).__name__}: {first_line(error)}"
        devices.disable_attention(*KERNELS[name])
        trial.layout.recover(trial.raw_model)


def outcome_of(error: Exception | None) -> int:
    if not error:
        return FITS
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    from torch._dynamo.exc import TorchDynamoException  # takes a second to import

    if isinstance(error, TorchDynamoException):  # no triton, no C compiler, a GPU that it does not know
        return NOT_COMPILED
    return FAILED


def prepare_gpu(T: int, world: World) -> None:
    """Leave memory for other users of the GPU before the trial fills it, and choose attention for T."""
    # This function has not been tried on a GPU yet. NCCL takes hundreds of MB at the first large all-reduce. On Windows
    # the screen uses the GPU as well, and a full GPU raises no error: the driver moves tensors to main memory, and a
    # step takes several times as long
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
def undone(model: Any, *, weights: bool = True) -> Iterator[None]:
    """Context that restores the model's weights, buffers and extra state, and the random state, when it ends.

    Meanwhile main memory holds a copy of them. weights: False where nothing writes into the weights.
    """
    kept = {}
    for name, tensor in named_tensors(model).items():
        if weights or not isinstance(tensor, torch.nn.Parameter):
            kept[name] = tensor.detach().to("cpu", copy=True)
    extra = copy.deepcopy(extra_state(model))
    device = next(model.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            try:
                model.load_state_dict(model.state_dict())
            except RuntimeError as error:
                raise UserError(
                    "The model cannot load its own state dict, so no checkpoint of this run could be used: "
                    f"{' '.join(str(error).split())}"
                ) from None
            load_extra_state(model, extra)
            with torch.no_grad():
                for name, tensor in named_tensors(model).items():
                    if name in kept:
                        tensor.copy_(kept[name])


def named_tensors(model: torch.nn.Module, **options: Any) -> dict[str, torch.Tensor]:
    """The model's parameters and buffers, also those that no state dict has."""
    return {**dict(model.named_parameters(**options)), **dict(model.named_buffers(**options))}


def extra_state(model: torch.nn.Module) -> dict[str, Any]:
    """The entries of a state dict that are no parameters or buffers: see torch's get_extra_state."""
    tensors = named_tensors(model, remove_duplicate=False)
    return {name: value for name, value in model.state_dict().items() if name not in tensors}


def load_extra_state(model: torch.nn.Module, extra: dict[str, Any]) -> None:
    torch.nn.Module.load_state_dict(model, extra, strict=False)  # the model's own may take other arguments


def try_sequence(trial: Trial, given_up: Any) -> tuple[memory.Account, list[str]]:
    """Try one sequence without torch.compile. Returns (what training takes, unused parameters).

    The latter are the names of parameters on which the loss does not depend, if there are several ranks.
    """
    model, device = trial.raw_model, trial.world.device
    batch = trial.random_batch(1)
    before = devices.random_state(device)
    loss = trial.loss(model, *batch)
    unused = set()
    if trial.world.size > 1 and trial.optimizers:
        draws = not torch.equal(before, devices.random_state(device))
        unused = unused_parameters(model, loss)
        if draws:  # a model may leave out other blocks each time, so one forward pass does not show them all
            for _ in range(7):
                unused |= unused_parameters(model, trial.loss(model, *batch))
    del loss
    if trial.layout.shares > 1:
        return estimate(trial), sorted(unused)
    memory.add_gradients(model)
    return trial.account(lambda: model, larger=2, room=trial.world.free_memory()), sorted(unused)


def unused_parameters(model: Any, loss: torch.Tensor) -> set[str]:
    """The names of the parameters that get no gradient from this loss."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name for name, p in model.named_parameters() if p.requires_grad and p.grad is None}


def check_unused(names: list[str], world: World) -> None:
    """Raise UserError, on all ranks, if DDP would wait for the gradient of a parameter that has none."""
    unused = sorted(set().union(*world.gather(names)))
    if unused:
        raise UserError(
            f"A step does not use {count(len(unused), 'parameter')}, such as {unused[0]}, but several ranks need a "
            "gradient of each in every step. Delete them from the model, or set their requires_grad to False. If each "
            "step uses others, leave --shard out and add find_unused_parameters=True to DDP in wrap()."
        )


def estimate(trial: Trial) -> memory.Account:
    """Estimate what training takes, on tensors without memory."""
    world = trial.world

    def fake() -> Any:
        with memory.SkipInit(), world.device:
            model = trial.make(trial.config)
        if trial.layout.shares > 1:
            memory.gather_blocks(model, trial.matmul_dtype)
        else:
            memory.add_gradients(model)
        return model

    with without_memory(world):
        return trial.account(fake, larger=max(2, trial.config.batch_size))


@contextlib.contextmanager
def without_memory(world: World) -> Iterator[None]:
    """Context in which new tensors have shapes and no numbers, so that no random state can be set either."""
    layer_norm = F.layer_norm

    def in_float32(*args: Any, **options: Any) -> torch.Tensor:  # as under a GPU's autocast
        return layer_norm(*tree_map_only(torch.Tensor, torch.Tensor.float, args), **options)

    changes: list[Any] = [(owner, "set_rng_state", mock.DEFAULT) for owner in (torch, torch.cuda)]
    changes.append((kernels, "LOGITS_IN_CHUNK", kernels.LOGITS_IN_CHUNK_ON_GPU))  # few chunks are counted sooner
    if world.has_own_memory and world.device.type == "cpu":  # an imagined GPU, which keeps other tensors
        changes.append((F, "layer_norm", in_float32))
        changes.append((kernels, "attention", F.scaled_dot_product_attention))
    with FakeTensorMode(), contextlib.ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def try_step(trial: Trial, given_up: dict[str, str], B: int) -> tuple[Any, float]:
    """Try a step. Returns (the model to train, compiled if that is not given up; a micro-step's seconds on a CPU)."""
    began = 0.0
    config = dataclasses.replace(trial.config, compile=trial.compiles and COMPILED not in given_up)
    model = trial.wrap(trial.raw_model, config, trial.layout)
    reserved = []
    if trial.optimizers:
        # Memory for the optimizer state, which is allocated later: two numbers per weight. With several ranks, the
        # trial's gradients and DDP's buckets take one of them; in a step these share their memory
        reserved += [torch.empty_like(p) for p in trial.raw_model.parameters()]
        if trial.layout.copies == 1:
            reserved += [torch.empty_like(p) for p in trial.raw_model.parameters()]
    x, y = trial.random_batch(B)
    for _ in range(min(2, trial.windows_per_rank // B)):  # the second one starts with gradients
        began = time.perf_counter()
        # no_sync: a rank that fails here would leave the others waiting in the all-reduce
        with model.no_sync() if trial.layout.copies > 1 else contextlib.nullcontext():
            loss = trial.loss(model, x, y)
            if trial.optimizers:
                loss.backward()
            del loss  # frees the activations of an evaluation
    del reserved
    return model, time.perf_counter() - began


def largest_divisor(number: int, at_most: int) -> int:
    """The largest divisor of `number` up to `at_most`: 96, 64 -> 48."""
    return max(d for d in range(1, min(number, at_most) + 1) if number % d == 0)
