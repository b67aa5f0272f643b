"""A run in progress: its console lines, its log and checkpoints, and its end."""

import contextlib
import copy
import gc
import json
import math
import re
import signal
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from plumbing.cli.console import (
    UserError,
    count,
    duration,
    first_line,
    is_out_of_memory,
    note,
    print_next,
    short,
)
from plumbing.data import shards
from plumbing.data.windows import stream_names
from plumbing.run import checkpoint as checkpoints
from plumbing.run import checks, logs
from plumbing.run.checkpoint import CheckpointWriter, training_state
from plumbing.run.commands import print_next_command, training_command
from plumbing.run.folder import keep_samples_before, prepare_folder
from plumbing.run.huggingface import export_huggingface
from plumbing.run.signals import Signals
from plumbing.run.summary import note_state, print_evaluation, print_summary
from plumbing.system import devices

SECONDS_PER_LINE = 0.5  # the least time between the console's lines about steps
STREAMS = re.compile(r"train|lr|norm|tok/s|val|val_bpb|hella|val/.*|val_bpb/.*")  # the program's own


class Ended(NamedTuple):
    """How a run ended."""

    step: int  # updates so far
    losses: dict[str, float]  # the last value of each stream of log.txt, such as "train" and "val"
    status: int = 0  # the process's exit status


# ----- Opening a run ------------------------------------------------------------------------------------


@dataclass
class Files:
    """Rank 0's open files."""

    log: IO[str]
    wandb: Any  # a WandbLog or None


@dataclass
class RunFiles(Files):
    """Rank 0's open files, and numbers that it has read from earlier logs."""

    writer: CheckpointWriter
    # {(step, stream): value} of the first steps and validations from the checkpoint on that an earlier start has done
    earlier_losses: dict[tuple[int, str], float]
    parents_lr: float | None  # for a new branch: the learning rate of its parent's last step


@contextlib.contextmanager
def open_run(start: Any, parts: Any) -> Iterator["Run"]:
    """Restore the checkpoint, open the run's files and catch stop signals.

    On exit, however it happens, the newest checkpoint is on disk. Before it opens anything, it prints what the run will
    do and cost.
    """
    made = checkpoints.settings_of_groups(parts.optimizers)
    checkpoints.check_own(parts.own)
    state = training_state(parts)
    parts.layout.check(state)
    checkpoints.check_readable(state | {"made": made})
    if start.saved:
        checkpoints.restore_state(start, parts, made=made, now=state)
    del state  # it holds tensors that the optimizers may have replaced
    print_summary(start, parts)
    with Signals() as signals, contextlib.ExitStack() as stack:
        files = parts.world.run_on_master(open_run_files, start, parts, stack)
        run = Run(start, parts, signals, files=files, made=made)
        if start.branched:
            run.write_checkpoint(start.step, finished=False)  # from here on, the branch does not need its parent
        for held in (start.saved, start.weights):  # gigabytes that the parts hold now
            if held:
                held.clear()
        gc.collect()
        gc.freeze()  # these objects live to the end: skip them in garbage collection
        stack.callback(gc.unfreeze)  # otherwise triton's bindings report live objects at exit
        yield run


@contextlib.contextmanager
def open_report(start: Any, parts: Any) -> Iterator["Report"]:
    """Open the files of an evaluation and catch stop signals. Before, it prints what is evaluated."""
    print_evaluation(start, parts)
    with Signals() as signals, contextlib.ExitStack() as stack:
        files = parts.world.run_on_master(open_files, start, parts, stack)
        yield Report(start, parts, signals, files=files)


def open_files(start: Any, parts: Any, stack: contextlib.ExitStack) -> Files:
    """Prepare the run's folder and open rank 0's files. `stack` closes them."""
    config = start.config
    out_dir = Path(config.out_dir)
    prepare_folder(start, parts)
    parent = Path(start.branched["parent"]) if start.branched else out_dir
    log = logs.open_log(out_dir, parent, start.step)
    stack.callback(close_log, log)
    keep_samples_before(out_dir / "samples.txt", start.step)
    wandb = None
    if config.wandb:
        from plumbing.run.wandb_log import WandbLog

        wandb = WandbLog(config, logs.read_log(out_dir / "log.txt"))
        stack.push(lambda kind, *_: wandb.finish(status=1 if kind else 0))  # kind: of an exception
    return Files(log=log, wandb=wandb)


def open_run_files(start: Any, parts: Any, stack: contextlib.ExitStack) -> RunFiles:
    """As `open_files`, and read what earlier starts have logged."""
    config = start.config
    out_dir = Path(config.out_dir)
    path = out_dir / "log.txt"
    # another number of ranks rounds in another order, and each rank draws its own numbers, for dropout for example
    same_ranks = logs.read_run(out_dir).fact("ranks", "") == str(parts.world.size)
    earlier_losses = {}
    if same_ranks and start.saved and not start.branched and path.exists():
        steps = range(start.step, start.step + 10)  # on a GPU, the rounding differs more with each step
        for at, stream, loss in logs.read_log(path):
            if stream in ("train", "val") and at in steps:
                earlier_losses[at, stream] = loss
    files = open_files(start, parts, stack)
    writer = CheckpointWriter(
        start.lock,
        keep=config.keep_checkpoints,
        milestone_every=config.milestone_every,
        deletable=start.saved.get("temporary", []) if start.saved else [],
    )
    stack.callback(writer.wait)
    return RunFiles(
        **vars(files),
        writer=writer,
        earlier_losses=earlier_losses,
        parents_lr=logs.last_values(path).get("lr") if start.branched else None,
    )


def close_log(log: IO[str]) -> None:
    with contextlib.suppress(OSError):  # the write that met a full disk has reported it
        log.close()


# ----- A run in progress --------------------------------------------------------------------------------


class Report:
    """The console lines and the log of a run or an evaluation. Ranks other than 0 have no files and write nothing."""

    def __init__(self, start: Any, parts: Any, signals: Signals, *, files: Any):
        self.config = start.config
        self.parts = parts
        self.world = parts.world
        self.signals = signals
        self.files = files
        self.out_dir = Path(start.config.out_dir)
        self.stopping = False  # whether some rank has received a signal to stop
        self.losses: dict[str, float] = {}  # the last value of each stream
        self.started = time.perf_counter()

    def report(self, step: int, text: str, streams: dict[str, float]) -> None:
        """Print a line about a step, unless `text` is empty, and log its values, {stream: value}."""
        self.losses |= streams
        if not self.files:
            return
        if text:
            print(f"step {step:5d} | {text}", flush=True)
        logs.write_log(self.files.log, step, streams)
        if self.files.wandb:
            self.files.wandb.log(step, streams)

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Context for an evaluation. A signal to stop does not cut it short; then all ranks learn of the signal."""
        self.signals.evaluating = True
        yield
        self.signals.evaluating = False
        self.stopping = self.world.max_over_ranks(len(self.signals)) > 0

    def log_val_loss(self, step: int, mean: Any, *, by_folder: list[Any]) -> None:
        """Log the validation loss: the mean over the folders and, if there are several, each folder's loss."""
        streams: dict[str, float] = {"val": mean.loss, "val_bpb": mean.bits_per_byte}
        text = f"val loss {mean.loss:.6f} | {mean.bits_per_byte:.4f} bits per byte"
        if len(by_folder) > 1:
            named = dict(zip(stream_names(self.config.data), by_folder))
            shown = ", ".join(f"{name} {each.loss:.4f}" for name, each in named.items())
            text = f"val loss {mean.loss:.4f} | {shown}"
            for name, each in named.items():
                streams[f"val/{name}"] = each.loss
                streams[f"val_bpb/{name}"] = each.bits_per_byte
        self.report(step, text if len(text) <= 67 else f"{text[:64]}...", streams)

    def log_samples(self, step: int, texts: list[str]) -> None:
        """Print samples in lines of 80 columns, and add them to samples.txt."""
        first = f"step {step:5d} | sample | "
        wrapper = textwrap.TextWrapper(
            80, first, " " * len(first), drop_whitespace=False, break_on_hyphens=False
        )
        for text in texts:
            print(wrapper.fill(repr(text)), flush=True)
        with open(self.out_dir / "samples.txt", "a", encoding="utf-8", errors="replace") as file:
            file.writelines(f"{step} {json.dumps(text)}\n" for text in texts)

    def ended(self, step: int) -> Ended:
        """How it ends: status 130 after Ctrl-C."""
        interrupted = self.stopping and signal.SIGINT in self.signals
        return Ended(step, self.losses, 128 + signal.SIGINT if interrupted else 0)

    def print_duration(self) -> None:
        took = duration(time.perf_counter() - self.started)
        if self.world.device.type == "cuda":
            took += f"; peak GPU memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
            # each frees the cache, which is slow
            retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
            if retries:
                took += f", {count(retries, 'allocation')} tried again: a smaller --batch-size may be faster"
        print(f"Done in {took}. The notebook play.ipynb plots this run's log.")

    def finish(self, step: int) -> Ended:
        """End an evaluation."""
        if self.files:
            self.print_duration()
        return self.ended(step)


class Run(Report):
    """A run's console lines, log and checkpoints."""

    def __init__(
        self, start: Any, parts: Any, signals: Signals, *, files: RunFiles | None, made: checkpoints.Made
    ):  # fmt: skip
        super().__init__(start, parts, signals, files=files)
        self.typed = start.typed
        self.made = made  # the settings of the optimizers' groups as they were made
        # the state before this step's evaluations, if there are any
        self.before_evaluations: dict[str, Any] = {}
        self.start_step = start.step
        saved = start.saved or {}
        self.val_loss = saved.get("val_loss")  # the last one measured
        self.best_val_loss = saved.get("best_val_loss", math.inf)  # the validation loss of model_best.pt
        self.metadata = checkpoints.metadata(start.config, parts.enc) | {"launch": logs.torchrun_id()}
        self.first_step_ended = self.started
        self.step_printed = -math.inf  # when the console last showed a step

    def report(self, step: int, text: str, streams: dict[str, float]) -> None:
        if self.files:
            self.files.writer.raise_error()  # a full disk ends the run now, not at the next checkpoint
            self.compare_with_before(step, streams)
        super().report(step, text, streams)

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """See Report. What is saved after an evaluation is from before it, because the next start repeats it."""
        if not self.before_evaluations:
            state = training_state(self.parts)
            own = copy.deepcopy(tree_map_only(torch.Tensor, torch.Tensor.cpu, state["own"]))
            self.before_evaluations = state | {"own": own}
        with super().evaluation():
            yield

    def log_val_loss(self, step: int, mean: Any, *, by_folder: list[Any]) -> None:
        """With keep_best, also keep the weights of the lowest mean so far as model_best.pt."""
        super().log_val_loss(step, mean, by_folder=by_folder)
        self.val_loss = mean.loss
        if self.config.keep_best and mean.loss < self.best_val_loss:
            self.best_val_loss = mean.loss
            weights = self.copied(self.parts.raw_model.state_dict())
            if self.files:
                best = {"step": step, "val_loss": mean.loss, "model": weights}
                self.files.writer.submit(checkpoints.BEST, best | self.metadata)

    def log_step(self, step: int, done: Any, *, seconds: float) -> None:
        """Report a step. done: the trainer's Step; seconds: how long it took."""
        now = time.perf_counter()
        self.stopping = done.stop
        self.before_evaluations = {}
        if step == self.start_step:
            self.first_step_ended = now
            self.world.shorten_timeout()
            if math.isfinite(done.norm):  # otherwise no optimizer has taken a step yet
                note_state(self.parts.optimizers)
            checks.note_gradients(self.parts.raw_model, step)
            if self.files and self.files.parents_lr:
                note_jump_of_rate(step, done.lr, self.files.parents_lr, config=self.config)
            self.check_ranks(step)
        rate = done.tokens / max(seconds, 1e-6)  # a clock may stand still
        text = ""
        # nobody could read faster lines; log.txt has every step
        if now - self.step_printed >= SECONDS_PER_LINE:
            self.step_printed = now
            text = step_line(done, seconds=seconds, mfu=self.mfu(rate), left=self.seconds_left(step, seconds))
        streams = {"train": done.loss, "lr": done.lr, "norm": done.norm, "tok/s": rate}
        self.report(step, text, streams | checked_scalars(done.scalars))
        if self.files:
            self.files.writer.delete_old()  # this step was finite, so it started from a good checkpoint

    def compare_with_before(self, step: int, streams: dict[str, float]) -> None:
        """Note if a step or a validation that an earlier start has done has another loss now."""
        assert self.files
        limit = 1e-5 if self.config.dtype == "float32" else 1e-2
        for stream, value in streams.items():
            before = self.files.earlier_losses.get((step, stream), value)
            if abs(value - before) > limit * abs(before):
                self.files.earlier_losses.clear()  # one note is enough
                note(
                    f"The {stream} loss of step {step} was {before:.6f} before the run was stopped, and is "
                    f"{value:.6f} now. Perhaps the training uses a state that no checkpoint holds: see Parts.own in "
                    "the trainer. Or setup() changes weights."
                )

    def mfu(self, rate: float) -> float:
        """The share of the devices' peak FLOP/s that so many tokens per second use; 0 if the peak is not known."""
        peak = devices.peak_flops(self.world.device_name)
        if not peak:
            return 0.0
        return rate * self.parts.flops_per_token / (peak * self.world.size)

    def seconds_left(self, step: int, seconds: float) -> float:
        """How long the remaining steps take at the average since the first one, which compiles."""
        if step > self.start_step:
            seconds = (time.perf_counter() - self.first_step_ended) / (step - self.start_step)
        return seconds * (self.config.max_steps - step - 1)

    def save(self, step: int, *, finished: bool) -> None:
        """Write a checkpoint if anything is new since the start. finished: whether the last evaluation is done."""
        if step > self.start_step or (finished and step > 0):
            self.write_checkpoint(step, finished=finished)
        if self.files and self.stopping:
            self.files.writer.wait()  # whoever sends signals may soon kill the process

    def note_slow_data(self) -> None:
        """Name the rank that waits longest for its data, if that is a tenth of the run."""
        waited = self.world.gather(self.parts.loader.seconds_waited)
        longest = max(waited)
        if longest > max(60, 0.1 * (time.perf_counter() - self.started)):
            note(
                f"Rank {waited.index(longest)} has waited for its data, {duration(longest)} so far. Put them on a "
                "faster disk."
            )

    def write_checkpoint(self, step: int, *, finished: bool) -> None:
        """Write a checkpoint of the parts in their current state, in the background."""
        self.check_ranks(step)
        self.note_slow_data()
        state = self.before_evaluations or training_state(self.parts)
        state = self.copied(state | {"made": self.made})
        if not self.files:
            return
        for loader in (self.parts.loader, *self.parts.val_loaders):
            for split in loader.order.splits:
                if shards.fingerprint([shard.path for shard in split.shards]) != split.fingerprint:
                    raise UserError(
                        f"The shards in {split.folder.path} have changed since the run began to read them. Restore "
                        "them, and repeat the command to continue from the last checkpoint."
                    )
        losses = {"val_loss": self.val_loss, "best_val_loss": self.best_val_loss}
        progress = {"step": step, "finished": finished}
        self.files.writer.write({**progress, **losses, **state, **self.metadata})

    def copied(self, state: Any) -> Any:
        """On rank 0: a copy in main memory, once the one before is on disk."""
        if self.files:
            self.files.writer.wait()
        return self.parts.layout.copied(state)

    def check_ranks(self, step: int) -> None:
        """Raise UserError if the ranks train different models, or have different state.

        A trainer in which they are meant to differ, as in DiLoCo, says so with ranks_differ.
        """
        if self.world.size > 1 and not getattr(self.parts.raw_model, "ranks_differ", False):
            checks.check_ranks(self.parts, step)

    def finish(self, step: int) -> Ended:
        """End the run after `step` steps: export the model, unless the run was stopped."""
        ended = self.ended(step)
        raw_model = None
        if not self.stopping:
            raw_model = self.parts.layout.model_to_export(self.parts.raw_model)
        if not self.files:
            return ended
        self.files.writer.wait()
        if self.stopping:
            again = "The same command" if self.config.resume else "The same command without --no-resume"
            print(f"Stopped after {count(step, 'step')}. {again} continues the run from there.")
            typed = {name: value for name, value in self.typed.items() if name != "resume"}
            print_next(training_command(type(self.config), typed))
            return ended
        if self.val_loss is None or math.isfinite(self.val_loss):
            self.files.writer.delete_old()
        export(self.out_dir, raw_model, self.parts.enc)
        self.print_duration()
        if self.best_val_loss < math.inf and (self.out_dir / checkpoints.BEST).exists():
            lowest = f"{self.best_val_loss:.4f}"
            print(f"The lowest validation loss was {lowest}; its weights are in {checkpoints.BEST}.")
        print_next_command(self.config, self.parts.enc)
        return ended


# ----- Lines and numbers --------------------------------------------------------------------------------


def note_jump_of_rate(step: int, lr: float, before: float, *, config: Any) -> None:
    """Note if the learning rate jumps where a branch starts, or never decays although its schedule could.

    before: the rate of the parent's last step.
    """
    never_decays = config.schedule == "wsd" and config.decay_fraction == 0
    if 0.5 < lr / before < 2 and not never_decays:
        return
    text = f"The learning rate was {before:.2g} before the branch and is {lr:.2g} now"
    if never_decays:
        fraction = (config.max_steps - step) / config.max_steps
        text += f", and stays there to the end. With --decay-fraction {fraction:.4g} it would decay from here on"
    note(f"{text}.")


def step_line(done: Any, *, seconds: float, mfu: float, left: float) -> str:
    """The console's text about a step, in columns that line up within 80 characters.

    loss  5.3102  lr 1.6e-3  norm  0.98   46 ms   45K tok/s  0:18 left

    norm: the gradient norm before clipping; mfu: 0 if it is not known; left: seconds.
    """
    lr = f"{done.lr:.1e}".replace("e-0", "e-")
    took = f"{1e3 * seconds:3.0f} ms" if seconds < 0.9995 else f"{short(seconds):>4} s"
    speed = f"{short(done.tokens / max(seconds, 1e-6)):>4} tok/s"
    time_left = f"{duration(left):>4} left"
    if mfu:  # leaves room for fewer digits
        return f"loss {done.loss:6.3f} lr {lr} norm {done.norm:4.1f} {took} {speed} {mfu:3.0%} MFU {time_left}"
    return f"loss {done.loss:7.4f}  lr {lr}  norm {done.norm:5.2f}  {took}  {speed}  {time_left}"


def checked_scalars(scalars: dict[str, Any]) -> dict[str, float]:
    """The user's numbers as floats. UserError for a name that log.txt cannot hold, or that the program uses."""
    floats = {}
    for name, value in scalars.items():
        # val bpb would be written as val_bpb, among the program's own values
        if STREAMS.fullmatch(name) or logs.NO_NAME.search(name) or not name:
            raise UserError(
                f"{name!r} cannot be the name of a scalar. Use letters, digits and . _ - /, and no name that the "
                "program itself logs."
            )
        floats[name] = float(value.detach() if isinstance(value, torch.Tensor) else value)
    return floats


def export(out_dir: Path, raw_model: Any, enc: Any) -> None:
    """Write hf/ if the model is a GPT-2. If the export fails, a note says why, and the run ends as usual."""
    hf = out_dir / "hf"
    print(f"Exporting the model to {hf}.", flush=True)
    try:
        export_huggingface(raw_model.eval(), enc, hf, run_folder=out_dir)
    except Exception as error:  # in a large package, say, or because the model was changed
        # a full disk or GPU: running the same command again repeats the export
        if isinstance(error.__cause__ or error, OSError) or is_out_of_memory(error):
            raise
        note(f"No {hf} was written. {first_line(error)}. Your checkpoints and sample.py work as usual.")
