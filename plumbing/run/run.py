"""A run in progress: its folder, its lines on the console, its log and checkpoints, and its end."""

import contextlib
import functools
import gc
import json
import math
import os
import re
import signal
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from plumbing.cli.console import (
    UserError,
    count,
    duration,
    first_line,
    is_out_of_memory,
    print0,
    print_next,
    short,
)
from plumbing.data.windows import stream_names
from plumbing.files import atomic_write, free_name, open_regular
from plumbing.run import checkpoint as checkpoints
from plumbing.run import logs, source_code
from plumbing.run.checkpoint import training_state
from plumbing.run.commands import print_next_commands, train_command
from plumbing.run.huggingface import export_huggingface
from plumbing.run.model_card import make_card
from plumbing.run.summary import print_summary
from plumbing.run.wandb_log import WandbLog
from plumbing.system import devices
from plumbing.system.distributed import World

# the names of what a run writes into its folder
OURS = re.compile(
    rf"(run|log|samples)\.txt|hf|wandb|{source_code.COPY.pattern}|{checkpoints.BEST}|{checkpoints.CHECKPOINT_NAME.pattern}"
)
SECONDS_PER_LINE = 0.5  # of the console, about steps
STREAMS = re.compile(r"train|lr|norm|tok/s|val|val_bpb|hella|val/.*|val_bpb/.*")  # the program's own


class Ended(NamedTuple):
    """What a run ended with."""

    step: int  # updates so far
    losses: dict[str, float]  # the last value of each stream of log.txt, such as "train" and "val"
    status: int = 0  # the process's exit status


# ----- Its folder at the start --------------------------------------------------------------------------


def prepare_folder(start: Any, parts: Any) -> None:
    """Describe the start in run.txt; move aside an old run, or the damaged checkpoints of a run that continues."""
    config, out_dir = start.config, Path(start.config.out_dir)
    if start.saved and not start.branched:
        found = checkpoints.list_checkpoints(out_dir)
        stale = [path for path in found if checkpoints.step_of(path) > start.step]
    else:
        ours = [path for path in out_dir.iterdir() if OURS.fullmatch(path.name)]
        results = [path for path in ours if path.name != "run.txt" and not source_code.COPY.fullmatch(path.name)]
        stale = ours if any(path.is_dir() or path.stat().st_size for path in results) else []
    if stale:
        # Checkpoints first, the newest before the others: if this is cut short, what is left is the run at an earlier
        # step, or none
        stale.sort(key=lambda path: (path.suffix == ".pt", path.name), reverse=True)
        aside = move_aside(stale, out_dir)
        names = ", ".join(sorted(path.name for path in stale))
        print(f"Moved {names} from {out_dir} to {aside}.", flush=True)
    for leftover in out_dir.glob(".*.part"):  # left by a process that was killed while writing
        if OURS.fullmatch(leftover.stem[1:]) and leftover.is_file():
            leftover.unlink()
    ran = {name: value for name, value in parts.found._asdict().items() if name != "model"}
    logs.write_start(config, start, ran=ran, fingerprints=fingerprints(parts))
    source_code.keep_copies(config)


def fingerprints(parts: Any) -> dict[str, list[str]]:
    """{a folder's name in log.txt: short fingerprints of its training and validation data}; "" for what is not read."""
    folders = parts.config.data
    train = {
        split.folder: split.fingerprint[:16] for split in (parts.loader.order.splits if parts.loader else ())
    }
    val = [loader.order.splits[0].fingerprint[:16] for loader in parts.val_loaders]
    return {
        name: [train.get(folder, ""), of_val]
        for name, folder, of_val in zip(stream_names(folders), folders, val)
    }


def move_aside(paths: list[Path], out_dir: Path) -> Path:
    """Move files of `out_dir` to a new folder beside it, or inside of it where nothing can be moved out of it."""
    for aside in (free_name(out_dir.resolve()), free_name(out_dir / "old")):
        try:
            aside.mkdir()
            for path in paths:
                path.rename(aside / path.name)
            return aside
        except OSError as caught:  # out_dir is a mount point, or its parent belongs to someone else
            error = caught
            with contextlib.suppress(OSError):
                for path in aside.iterdir():
                    path.rename(out_dir / path.name)
                aside.rmdir()
    raise error


class Signals(list[int]):
    """Those signals to stop that were received, so that what is under way can finish. A second SIGINT exits at once."""

    def __init__(self):
        super().__init__()
        self.evaluating = False  # which takes longer than a step, so it is said that this is finished first
        self.before: dict[int, Any] = {}

    def __enter__(self):
        if threading.current_thread() is not threading.main_thread():
            return self  # Python lets only the main thread handle signals
        numbers = [signal.SIGTERM, signal.SIGINT]
        # SIGHUP when a terminal closes, SIGUSR1 from Slurm (--signal=USR1@90). Windows has neither, and under nohup
        # SIGHUP is ignored
        others = [getattr(signal, name) for name in ("SIGHUP", "SIGUSR1") if hasattr(signal, name)]
        numbers += [number for number in others if signal.getsignal(number) != signal.SIG_IGN]
        self.before = {number: signal.signal(number, self.record) for number in numbers}
        return self

    def __exit__(self, *exception):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def record(self, number, frame):
        if number == signal.SIGINT and number in self:
            os._exit(128 + number)
        if self.evaluating and not self:
            with contextlib.suppress(OSError):  # a stream of Python's may be in the middle of a write
                os.write(1, b"Stopping after this evaluation.\n")
        self.append(number)


def keep_samples_before(path: Path, step: int) -> None:
    """Leave out of samples.txt what a run that was killed wrote at `step` or later, and will write again."""
    if os.path.lexists(path):  # a link is refused, as it would be followed
        with open_regular(path, "r", encoding="utf-8", errors="replace") as file:
            # a line of the user's own has no number
            lines = [line for line in file if int((re.match(r"\d+ ", line) or ["0"])[0]) < step]
        with atomic_write(path, "w", encoding="utf-8") as file:
            file.writelines(lines)


# ----- A run in progress --------------------------------------------------------------------------------


@contextlib.contextmanager
def open_run(start: Any, parts: Any) -> Iterator["Run | None"]:
    """Context of a run that goes on from its checkpoint, in its open folder: signals stop it at the end of a step, and
    in the end, however that comes, the newest checkpoint is on disk. Ranks other than 0 write nothing.

    What the run will do and cost is said before; in a dry run that is all, and there is no run.
    """
    made = checkpoints.settings_of_groups(parts.optimizers)
    if parts.loader:
        checkpoints.check_own(parts.own)
        checkpoints.check_readable(training_state(parts) | {"made": made})
        if start.saved:
            checkpoints.restore_state(start.saved, parts, start.branched, made)
    print_summary(start, parts)
    if start.config.dry_run:
        yield None
        return
    with Signals() as signals, contextlib.ExitStack() as stack:
        run = Run(start, parts, signals, made)
        parts.world.broadcast_from_master(run.open, start, stack)
        if start.branched:
            run.write_checkpoint(start.step, finished=False)  # from here on, the branch needs its parent no more
        for held in (start.saved, start.weights):  # gigabytes, which the parts have taken over
            if held:
                held.clear()
        gc.collect()
        gc.freeze()  # what exists now lives to the end: exclude it from garbage collection
        stack.callback(gc.unfreeze)  # else triton's bindings report at the exit that their objects still live
        yield run


class Run:
    """What is said and written of a run."""

    def __init__(self, start: Any, parts: Any, signals: Signals, made: list[list[dict[str, Any]]]):
        config, saved = start.config, start.saved or {}
        self.config, self.typed, self.parts, self.signals = config, start.typed, parts, signals
        self.world = parts.world
        self.start_step, self.out_dir = start.step, Path(config.out_dir)
        self.val_loss = saved.get("val_loss")  # the last one measured
        self.best_val_loss = saved.get("best_val_loss", math.inf)  # that of model_best.pt
        self.stopping = False  # whether some rank has received a signal to stop
        self.losses: dict[str, float] = {}  # the last value of each stream
        self.sample = ""
        self.lr_before = None  # a new branch: that of its parent's last step
        # losses of steps that an earlier start has done after its last checkpoint
        self.redone: dict[int, float] = {}
        self.flops_per_token = parts.raw_model.flops_per_token(config.sequence_length)
        self.peak = devices.peak_flops(parts.world.device_name)
        self.names = stream_names(config.data)
        self.metadata = checkpoints.metadata(config, parts.enc)
        self.metadata["launch"] = logs.launch()
        self.made = made
        self.log: Any = None  # these three exist on rank 0 only
        self.writer: Any = None
        self.wandb: WandbLog | None = None
        self.started = self.first_step_ended = time.perf_counter()
        self.step_printed = -math.inf  # when

    def open(self, start: Any, stack: contextlib.ExitStack) -> None:
        """Open what rank 0 writes to, until the end of `stack`."""
        c, saved, path = self.config, start.saved or {}, self.out_dir / "log.txt"
        prepare_folder(start, self.parts)
        if start.saved and not start.branched and path.exists():
            done = [(at, value) for at, stream, value in logs.read_log(path) if stream == "train"]
            self.redone = {at: value for at, value in done if at >= start.step}
        parent = Path(start.branched["parent"]) if start.branched else self.out_dir
        self.log = logs.open_log(self.out_dir, parent, self.start_step)
        self.lr_before = logs.last_values(path).get("lr") if start.branched else None
        stack.callback(self.close_log)
        keep_samples_before(self.out_dir / "samples.txt", self.start_step)
        kept = c.keep_checkpoints, c.milestone_every, saved.get("temporary", [])
        self.writer = checkpoints.CheckpointWriter(start.lock, *kept)
        stack.callback(self.writer.wait)
        if c.wandb:
            self.wandb = wandb = WandbLog(c, logs.read_log(path))
            stack.push(lambda kind, *_: wandb.finish(status=1 if kind else 0))

    def close_log(self) -> None:
        with contextlib.suppress(OSError):  # a full disk was reported by the write that found it
            self.log.close()

    def report(self, step: int, text: str, streams: dict[str, float]) -> None:
        """Print a line about a step, unless `text` is empty, and log its values, {stream: value}."""
        self.losses |= streams
        if not self.world.is_master:
            return
        self.writer.raise_error()  # a full disk ends the run now, not at the next checkpoint
        if text:
            print(f"step {step:5d} | {text}", flush=True)
        logs.write_log(self.log, step, streams)
        if self.wandb:
            self.wandb.log(step, streams)

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Context of an evaluation, which is finished even if a signal to stop arrives; then all ranks know of that."""
        self.signals.evaluating = True
        yield
        self.signals.evaluating = False
        self.stopping = self.world.max_over_ranks(len(self.signals)) > 0

    def log_val_loss(self, step: int, losses: list[tuple[float, float]]) -> None:
        """Log each folder's (validation loss, bits per byte) and their mean by the shares; with keep_best, keep the
        weights of the lowest mean so far.
        """
        config, loader = self.config, self.parts.loader
        sizes = [each.num_windows for each in self.parts.val_loaders]  # which count where nothing is trained
        weights = config.data_weights or (loader.order.shares if loader else sizes)
        shares = [weight / sum(weights) for weight in weights]
        loss, bpb = (sum(share * each[i] for share, each in zip(shares, losses)) for i in (0, 1))
        self.val_loss = loss
        streams: dict[str, float] = {"val": loss, "val_bpb": bpb}
        text = f"val loss {loss:.6f} | {bpb:.4f} bits per byte"
        if len(losses) > 1:
            text = f"val loss {loss:.4f} | " + ", ".join(
                f"{n} {each[0]:.4f}" for n, each in zip(self.names, losses)
            )
            for name, each in zip(self.names, losses):
                streams |= {f"val/{name}": each[0], f"val_bpb/{name}": each[1]}
        self.report(step, text if len(text) <= 67 else f"{text[:64]}...", streams)
        is_best = config.keep_best and config.max_steps and loss < self.best_val_loss
        if is_best and self.world.is_master:
            self.best_val_loss = loss
            model = self.parts.raw_model.state_dict()
            self.writer.submit(
                checkpoints.BEST, {"step": step, "val_loss": loss, "model": model, **self.metadata}
            )

    def log_samples(self, step: int, texts: list[str]) -> None:
        """Print samples in lines of 80 columns, and keep them; the model card shows the last one."""
        self.sample = texts[-1]
        first, rest = f"step {step:5d} | sample | ", f"{'':10} | {'':6} | "
        wrapper = textwrap.TextWrapper(80, first, rest, drop_whitespace=False, break_on_hyphens=False)
        for text in texts:
            print(wrapper.fill(repr(text)), flush=True)
        with open(self.out_dir / "samples.txt", "a", encoding="utf-8", errors="replace") as file:
            file.writelines(f"{step} {json.dumps(text)}\n" for text in texts)

    def log_step(self, step: int, done: Any, *, seconds: float) -> None:
        """Report the update of `step`, the trainer's Step `done`, which took so many seconds:

        step     7 | loss  5.3102  lr 1.6e-03  norm  0.98   46 ms   45K tok/s  0:18 left

        norm is that of the gradient before it was clipped; MFU is the share of the device's peak, where that is known.
        """
        now, loss, norm, lr = time.perf_counter(), done.loss, done.norm, done.lr
        self.stopping = done.stop
        if step == self.start_step:
            self.first_step_ended = now
            self.note_rate(lr)
            if self.world.size > 1:
                check_ranks(self.parts.raw_model, step, self.world)
        self.compare_with_before(step, loss)
        rate = done.tokens / max(seconds, 1e-6)  # a clock may stand still
        lr_text = f"{lr:.1e}".replace("e-0", "e-")
        took = f"{1e3 * seconds:3.0f} ms" if seconds < 0.9995 else f"{short(seconds):>4} s"
        speed = f"{short(rate):>4} tok/s"
        left = f"{duration(self.seconds_left(step, seconds)):>4} left"
        # the columns line up and fit into 80 characters; with MFU, there is room for fewer digits
        if self.peak and self.flops_per_token:
            mfu = rate * self.flops_per_token / (self.peak * self.world.size)
            text = f"loss {loss:6.3f} lr {lr_text} norm {norm:4.1f} {took} {speed} {mfu:3.0%} MFU {left}"
        else:
            text = f"loss {loss:7.4f}  lr {lr_text}  norm {norm:5.2f}  {took}  {speed}  {left}"
        # log.txt has every step; on the console, faster lines could not be read
        is_shown = now - self.step_printed >= SECONDS_PER_LINE
        self.step_printed = now if is_shown else self.step_printed
        streams = {"train": loss, "lr": lr, "norm": norm, "tok/s": rate}
        for name, value in done.scalars.items():
            # val bpb would be written as val_bpb, among the program's own values
            if STREAMS.fullmatch(name) or logs.NO_NAME.search(name) or not name:
                raise UserError(
                    f"{name!r} cannot be the name of a scalar: it is empty, one of the program's own, or has other "
                    "characters than letters, digits, and . _ - / in it."
                )
            streams[name] = float(value.detach() if isinstance(value, torch.Tensor) else value)
        self.report(step, text if is_shown else "", streams)
        if self.world.is_master:
            self.writer.delete_old()  # this step was finite, so what it began from is a good checkpoint

    def compare_with_before(self, step: int, loss: float) -> None:
        """Say so if a step that is done again, as its checkpoint was not reached, has another loss than before.

        Rounding, which differs on other ranks, grows from step to step: the first ones tell.
        """
        before = self.redone.pop(step, loss) if step < self.start_step + 10 else loss
        if abs(loss - before) > (1e-5 if self.config.dtype == "float32" else 1e-2) * abs(before):
            self.redone = {}  # once
            print0(
                f"note: The loss of step {step} was {before:.6f} before the run was stopped, and is {loss:.6f} now. "
                "Perhaps the training computes with something that is in no checkpoint: see Parts.own in the trainer."
            )

    def note_rate(self, lr: float) -> None:
        """Say so if the learning rate jumps where a branch begins, or never decays although its schedule could."""
        c, before = self.config, self.lr_before
        never_decays = c.schedule == "wsd" and c.decay_fraction == 0
        if before is None or (not never_decays and 0.5 < lr / before < 2):
            return
        text = f"note: The learning rate was {before:.2g} before the branch and is {lr:.2g} now"
        if never_decays:
            text += ", and stays so to the end"
        if c.schedule == "wsd":
            fraction = (c.max_steps - self.start_step) / c.max_steps
            text += f". With --decay-fraction {fraction:.4g} it would decay from here on"
        print0(f"{text}.")

    def seconds_left(self, step: int, seconds: float) -> float:
        """How long the remaining steps take at the average since the first one, which compiles."""
        if step > self.start_step:
            seconds = (time.perf_counter() - self.first_step_ended) / (step - self.start_step)
        return seconds * (self.config.max_steps - step - 1)

    def save(self, step: int, *, finished: bool) -> None:
        """Write a checkpoint if anything is new since the start. finished: whether the last evaluation is done."""
        if step > self.start_step or (finished and step > 0):
            self.write_checkpoint(step, finished=finished)

    def write_checkpoint(self, step: int, *, finished: bool) -> None:
        """Write a checkpoint of the parts as they stand, in the background."""
        if self.world.size > 1:
            check_ranks(self.parts.raw_model, step, self.world)
        note_gradients(self.parts.raw_model, step)
        if self.world.is_master:
            splits = [
                split for loader in (self.parts.loader, *self.parts.val_loaders) for split in loader.order.splits
            ]
            changed = [split.folder for split in splits if split.fingerprint_now() != split.fingerprint]
            if changed:
                raise UserError(
                    f"The shards in {changed[0]} have changed since the run began to read them, so this is no "
                    "longer that run. Restore them, and repeat the command to continue from the last checkpoint."
                )
            losses = {"val_loss": self.val_loss, "best_val_loss": self.best_val_loss}
            state = training_state(self.parts) | {"made": self.made}
            self.writer.write({"step": step, "finished": finished, **losses, **state, **self.metadata})

    def finish(self, step: int) -> Ended:
        """End the run after `step` steps: export the model, unless the run was stopped."""
        status = 128 + signal.SIGINT if self.stopping and signal.SIGINT in self.signals else 0
        ended = Ended(step, self.losses, status)
        if not self.world.is_master:
            return ended
        self.writer.wait()
        if self.stopping:
            again = "The same command" if self.config.resume else "The same command without --no-resume"
            print(f"Stopped after {count(step, 'step')}. {again} continues the run.")
            typed = {name: value for name, value in self.typed.items() if name != "resume"}
            print_next(train_command(type(self.config), typed))
            return ended
        if self.config.max_steps:
            if self.val_loss is None or math.isfinite(self.val_loss):
                self.writer.delete_old()
            export(self.out_dir, step, self.parts.raw_model, self.parts.enc, self.sample)
        took = duration(time.perf_counter() - self.started)
        if self.world.device.type == "cuda":
            took += f"; peak GPU memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
        print(f"Done in {took}. The notebook play.ipynb plots this run's log.")
        if self.best_val_loss < math.inf and (self.out_dir / checkpoints.BEST).exists():
            lowest = f"{self.best_val_loss:.4f}"
            print(f"The lowest validation loss was {lowest}; its weights are in {checkpoints.BEST}.")
        if self.config.max_steps:
            print_next_commands(self.config, self.parts.enc)
        return ended


def check_ranks(model: torch.nn.Module, step: int, world: World) -> None:
    """Raise UserError, on all ranks, if the ranks' parameters differ by more than rounding, with what differs most."""
    norms = {
        name: torch.linalg.vector_norm(torch.view_as_real(p) if p.is_complex() else p, 1, dtype=torch.float64)
        for name, p in model.named_parameters()
        if p.is_floating_point() or p.is_complex()
    }
    gathered = torch.tensor(world.gather(torch.stack([*norms.values()]).tolist()))
    differs = ((gathered - gathered[0]).abs() / gathered[0].clamp(min=1e-30)).amax(0)
    if differs.max() > 1e-6:
        raise UserError(
            f"After step {step}, {list(norms)[int(differs.argmax())]} is not the same on all ranks, so each trains a "
            "model of its own. DDP averages gradients while the same parameters require one as when the run began and "
            "each gets one in every step, and random numbers are each rank's own. No checkpoint was written."
        )


def note_gradients(model: torch.nn.Module, step: int) -> None:
    """Say so if a checkpoint is written while there are gradients, which it does not hold."""
    left = [name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()]
    if left:
        print0(
            f"note: After step {step} there are gradients, such as that of {left[0]}. No checkpoint has them, so a run "
            "that is resumed here computes other updates."
        )


def diverged(step: int, parts: Any, loss: float, norm: float, *, start: int, batch_losses: Any) -> UserError:
    """The error for a loss or gradient norm that is not finite, in a step whose windows begin at position `start`.

    batch_losses: this rank's losses of its micro-batches, which have equally many windows.
    """
    config, gathered = parts.config, parts.world.gather(batch_losses.tolist())
    losses = np.array(gathered).T.flatten()  # in the order of the micro-batches
    B = (parts.loader.position - start) // len(losses)
    bad = np.flatnonzero(~np.isfinite(losses)).tolist() or range(len(losses))
    positions = [start + number * B + row for number in bad for row in range(B)][:4]
    where = parts.loader.order.describe(np.array(positions))
    rates = "--max-lr LOWER --muon-lr LOWER" if config.optimizer == "muon" else "--max-lr LOWER"
    # from the checkpoint of this very step, no step has succeeded
    good = [path for path in checkpoints.list_checkpoints(config.out_dir) if checkpoints.step_of(path) < step]
    remedy = f"--branch-from {good[-1]} {rates} --out-dir NEW" if good else f"--no-resume {rates}"
    return UserError(
        f"Training diverged in step {step}: the loss is {loss}, the gradient norm {norm}. The batch includes the "
        f"sequences at {where}. Train at a lower rate: {remedy}."
    )


def export(out_dir: Path, step: int, raw_model: Any, enc: Any, sample: str = "") -> None:
    """Write hf/, if the model is a GPT-2. What else fails here does not end the run: it is said."""
    hf = out_dir / "hf"
    print(f"Exporting the model to {hf}.", flush=True)
    card = functools.partial(make_card, run_folder=out_dir, sample=sample)
    try:
        export_huggingface(raw_model.eval(), enc, hf, step=step, make_card=card)
    except Exception as error:  # of a large package, say, or because the model was changed
        # a full disk or GPU: the same command tries again
        if isinstance(error.__cause__ or error, OSError) or is_out_of_memory(error):
            raise
        print(
            f"note: There is no {hf}. {first_line(error)}. The checkpoints have the model, for sample.py, too."
        )
