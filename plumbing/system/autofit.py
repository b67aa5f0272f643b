"""A trial of the first training step: what fails on this machine is done without, and B is lowered until it fits."""

import contextlib
import functools
import gc
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from plumbing.cli.console import UserError, count, first_line, is_out_of_memory, print0
from plumbing.system import devices
from plumbing.system.distributed import World, environment_number

FITS, FAILED, OUT_OF_MEMORY = range(3)  # outcomes of a trial; all ranks act on the worst one
# what is given up if a trial fails, the last first, and the attention kernels to disable. torch prefers cuDNN's
KERNELS = {"fused attention": devices.FUSED_ATTENTION, "torch.compile": (), "cuDNN's attention": ("cudnn",)}
FLOPS_OF_SECONDS = 1e12  # a CPU works on them for ten seconds or more
ATTENTION_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
# torch's counter lacks it; and if the loss is computed in float8, the product that this stands for is counted already
FLOPS_OF = {
    ATTENTION_ON_CPU: lambda q, k, v, *_, **_more: sdpa_flop_count(q, k, v),
    torch.ops.aten._scaled_mm: lambda *_, **_more: 0,
}
TOO_LARGE = (
    "Even one sequence does not fit in memory. Lower --sequence-length or the model's size, or add "
    "--activation-checkpointing."
)


class Sequence(NamedTuple):
    """What one sequence costs in training, without torch.compile."""

    flops: int  # of the forward pass; 0 if they could not be counted
    kept_bytes: int  # what the forward pass keeps for the backward pass, weights aside
    unused: list[str]  # with several ranks: names of the parameters that the loss does not depend on


class Fit(NamedTuple):
    """What works on this machine, and so is what really runs: run.txt says it, but for the model."""

    model: Any  # the model to train, compiled and in DDP where that is asked for
    B: int
    compiled: bool
    attention: list[str]  # the fused kernels that may be used
    given_up: list[str]  # of KERNELS
    flops_per_token: int  # of a training step, by PaLM's convention (Chowdhery et al. 2022, appendix B)
    kept_bytes: int  # of a sequence: what the forward pass keeps for the backward pass, without torch.compile
    seconds_per_token: float  # of the trial on a CPU; a GPU is still at work when it ends


def find_what_fits(raw_model: Any, wrap: Callable[..., Any], config: Any, *, num_ids: int, world: World) -> Fit:
    """Try a training step on random ids below num_ids, and do without whatever fails on this machine.

    wrap(raw_model, compiled, world) makes the model. If memory runs out, B is halved. All ranks take the same fallback.
    """
    T, compiles = config.sequence_length, config.compile
    if compiles is None:
        compiles = world.device_type == "cuda"
    if world.device_type == "cuda":
        prepare_gpu(T, world)
    has_cudnn = world.device_type == "cuda" and torch.backends.cuda.cudnn_sdp_enabled()
    optional = [name for name, used in zip(KERNELS, (True, compiles, has_cudnn)) if used]
    given_up: dict[str, str] = {}  # of these: why
    # one sequence first, as the model is written: a mistake in it then shows as itself, and not as torch.compile's
    try_it = functools.partial(try_sequence, raw_model, num_ids, T=T, world=world)
    attention = [name for name in optional if KERNELS[name]]
    sequence = attempt(try_it, raw_model, attention, given_up, world)
    if not sequence:
        raise UserError(TOO_LARGE)
    check_unused(sequence, world)
    optional = [name for name in optional if name not in given_up]
    windows_per_rank = config.total_batch_size // (T * world.size)
    with_room = min(world.gather(bound_on_B(raw_model, sequence, compiles, world=world)))
    B, tried = largest_divisor(windows_per_rank, at_most=min(config.batch_size, with_room)), None
    while not tried:
        micro_steps = min(2, windows_per_rank // B)
        flops = 3 * sequence.flops * micro_steps * B
        if compiles or (world.device_type == "cpu" and flops > FLOPS_OF_SECONDS):
            print0(f"Trying B = {B}, which may take minutes.")

        def step(B=B, micro_steps=micro_steps):
            model = wrap(raw_model, "torch.compile" in optional, world)
            return model, try_step(model, raw_model, num_ids, B=B, T=T, micro_steps=micro_steps, world=world)

        tried = attempt(step, raw_model, optional, given_up, world)
        if not tried and B == 1:
            raise UserError(TOO_LARGE)
        if not tried:
            B = largest_divisor(windows_per_rank, at_most=B // 2)
            print0(f"warning: Out of memory. Continuing with --batch-size {B}.")
    for name, reason in given_up.items():
        print0(f"warning: A training step failed with {name} ({reason}). Training goes on without it.")
    model, seconds = tried
    seconds_per_token = seconds / (B * T * world.size)
    if world.device_type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # failed trials do not count
    found = "torch.compile" in optional, devices.enabled_attention(world.device_type), list(given_up)
    return Fit(model, B, *found, 3 * sequence.flops // T, sequence.kept_bytes, seconds_per_token)


def attempt(
    action: Callable[[], Any], raw_model: Any, optional: list[str], given_up: dict[str, str], world: World
) -> Any:
    """Return action(), done without the last of `optional` as often as it fails; None if memory runs out on any rank.

    The model stays as it was. What fails without all of `optional`, too, is the model's own error, and is raised.
    """
    while True:
        result = error = None
        try:
            with unchanged(raw_model):
                result = action()
        except UserError:
            raise
        except Exception as caught:  # torch.compile may raise anything
            error = caught
            traceback.clear_frames(error.__traceback__)  # frees the memory that the failed try has taken
        outcome = FITS if not error else OUT_OF_MEMORY if is_out_of_memory(error) else FAILED
        outcome = world.max_over_ranks(outcome)
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
        name = optional.pop()
        given_up[name] = f"{type(error).__name__}: {first_line(error)}" if error else "on another rank"
        devices.disable_attention(*KERNELS[name])


def prepare_gpu(T: int, world: World) -> None:
    """Leave memory for what torch does not allocate itself, before the trial fills the GPU; choose attention for T."""
    # This function has not been tried on a GPU yet. NCCL takes hundreds of MB, at the first large all-reduce. On
    # Windows, the driver does not fail when the GPU is full: it moves tensors to main memory, and steps take several
    # times as long
    torch.cuda.set_per_process_memory_fraction(0.95)
    if world.size > 1:
        world.all_reduce_sum(torch.zeros(25 * 2**20, device=world.device))
    if T % 128:  # for such T, cuDNN's backward pass has given NaN (pytorch issue 196678)
        devices.disable_attention("cudnn")


def check_unused(sequence: Sequence, world: World) -> None:
    """Raise UserError, on all ranks, if DDP would fail because it has parameters on which the loss does not depend."""
    unused = sorted({name for names in world.gather(sequence.unused) for name in names})
    if unused:
        raise UserError(
            f"The loss does not depend on {count(len(unused), 'parameter')}, such as {unused[0]}, but with several "
            "ranks DDP needs a gradient of each. Delete them from the model, or set their requires_grad to False."
        )


@contextlib.contextmanager
def unchanged(raw_model: Any) -> Iterator[None]:
    """Afterwards, the model's buffers and the random numbers are as before, and there are no gradients."""
    before = {name: buffer.clone() for name, buffer in raw_model.named_buffers()}
    device = next(raw_model.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            raw_model.zero_grad(set_to_none=True)
            with torch.no_grad():
                for name, buffer in raw_model.named_buffers():
                    buffer.copy_(before[name])


def samples_of(model: Any) -> list[torch.Tensor]:
    """Some numbers of each parameter, which tell whether it was written to; a copy of all would take as much memory."""
    return [p.detach().flatten()[:: max(1, p.numel() // 4096)].clone() for p in model.parameters()]


def random_batch(num_ids: int, B: int, T: int, world: World) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.randint(num_ids, (2, B, T), device=world.device).unbind()
    return x, y


def try_sequence(raw_model: Any, num_ids: int, *, T: int, world: World) -> Sequence:
    """The forward pass of a sequence, which is counted."""
    kept, weights = {}, list(raw_model.parameters())

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x, y = random_batch(num_ids, 1, T, world)
    counter: Any = FlopCounterMode(display=False, custom_mapping=FLOPS_OF)
    with world.autocast(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss: Any = None
        flops = 0
        # the counter fails at flex_attention, for example; what the model fails at comes again
        with contextlib.suppress(Exception), counter:
            loss = raw_model(x, y, return_logits=False)[1]
            flops = counter.get_total_flops()
        if loss is None:
            torch._dynamo.reset()
            kept.clear()
            loss = raw_model(x, y, return_logits=False)[1]
    unused = []
    if world.size > 1:
        loss.backward()
        unused = [name for name, p in raw_model.named_parameters() if p.requires_grad and p.grad is None]
    for weight in weights:
        kept.pop(weight.untyped_storage().data_ptr(), None)
    # autocast keeps weights in its own dtype, however many sequences there are
    casts = 0 if world.dtype == torch.float32 else world.dtype.itemsize * sum(p.numel() for p in weights)
    return Sequence(flops, max(0, sum(kept.values()) - casts), unused)


def try_step(
    model: Any, raw_model: Any, num_ids: int, *, B: int, T: int, micro_steps: int, world: World
) -> float:
    """Forward and backward passes on random tokens; the seconds of the last one, as a CPU takes them."""
    began = 0.0
    # reserve memory for the optimizer state, which is allocated later: two numbers per weight
    reserved = [torch.empty_like(p) for p in raw_model.parameters() for _ in range(2)]
    x, y = random_batch(num_ids, B, T, world)
    for _ in range(micro_steps):  # in the second one, there are gradients from the start
        began = time.perf_counter()
        # no_sync: a rank that fails here would leave the others waiting in the all-reduce
        with world.no_sync(model):
            with world.autocast():
                loss = model(x, y, return_logits=False)[1]
            loss.backward()
    del reserved
    return time.perf_counter() - began


def bound_on_B(raw_model: Any, sequence: Sequence, compiles: bool, *, world: World) -> int:
    """A bound on B, because trying a B that cannot fit costs a compilation or, on a CPU, may end the process."""
    # compiled, GPT-2 keeps less than half as much
    kept_bytes = max(1, sequence.kept_bytes / (3 if compiles else 1))
    # gradients and the optimizer's two moments; the weights are there already
    free = devices.free_memory(world.device) - 12 * sum(p.numel() for p in raw_model.parameters())
    if world.device_type != "cuda" or torch.cuda.get_device_properties(world.device).is_integrated:
        # main memory runs out without an error, and a step needs more than what it keeps
        free /= 2 * environment_number("LOCAL_WORLD_SIZE", 1)
    return max(1, int(min(free / kept_bytes, 2**30)))  # it may be infinite


def make(model_class: Callable[[Any], Any], config: Any) -> Any:
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


def check_memory(make_model: Callable[[], Any], device: str) -> None:
    """Raise UserError if a model is too large to be trained on a device, without taking memory for its weights."""
    available, most = devices.free_memory(device), 0
    too_large = UserError(
        "This model is too large: training takes 16 bytes for each parameter, more than the "
        f"{available / 2**30:,.1f} GiB that are free. Use a smaller model, or a larger device."
    )

    def add(module, name, parameter):
        nonlocal most
        most += 0 if parameter is None else 16 * parameter.numel() + 2**18  # Python's objects add up, too
        if most > 2 * available:  # twice, because this counts each place of a tied weight
            raise too_large

    hook = torch.nn.modules.module.register_module_parameter_registration_hook(add)
    try:
        with SkipInit():  # what is never written takes no memory
            model = make_model()
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise too_large from None
        raise
    finally:
        hook.remove()
    if 16 * sum(p.numel() for p in model.parameters()) > available:
        raise too_large


def largest_divisor(number: int, at_most: int) -> int:
    """The largest divisor of `number` that is not above `at_most`: 96, 64 -> 48."""
    return max(d for d in range(1, min(number, at_most) + 1) if number % d == 0)
