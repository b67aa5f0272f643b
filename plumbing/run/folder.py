"""The folder of a run: what the run begins with, its files while it trains, and its end."""

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
from plumbing.cli.flags import flag_of
from plumbing.data.tokenizers import has_chat_tokens
from plumbing.data.windows import Windows, stream_names
from plumbing.files import FolderLock, atomic_write, check_replaceable, free_name, open_regular
from plumbing.run import checkpoint as checkpoints
from plumbing.run import checks, logs, source_code
from plumbing.run.checkpoint import Checkpoint
from plumbing.run.huggingface import export_huggingface
from plumbing.run.model_card import make_card
from plumbing.run.wandb_log import WandbLog
from plumbing.system import devices
from plumbing.system.autofit import Fit
from plumbing.system.distributed import World

# the names of what a run writes into its folder
OURS = re.compile(
    rf"(run|log|samples)\.txt|hf|wandb|{source_code.COPY.pattern}|{checkpoints.BEST}|{checkpoints.CHECKPOINT_NAME.pattern}"
)

SECONDS_PER_LINE = 0.5  # of the console, about steps


class Beginning(NamedTuple):
    """What a run is, and what it begins with: a checkpoint, initial weights or, if both are None, nothing."""

    config: Any  # the TrainConfig, made once
    saved: Checkpoint | None = None  # the run's newest one or, for a new branch, its parent's
    # settings and weights of --init-from's model
    initial: tuple[dict[str, Any], dict[str, torch.Tensor]] | None = None
    branched: dict[str, Any] | None = None  # of a new branch: its parent, the step and the changes, for run.txt
    tokenizer: str = ""  # the name of the model's own; "" for a new model
    finished_step: int | None = None  # of a run of which nothing is left to do: its last step
    fingerprints: dict[str, list[str]] = {}  # of the data, for run.txt

    @property
    def step(self) -> int:
        return self.saved["step"] if self.saved else 0

    @property
    def model(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | None:
        """(settings, weights) of the model to begin with: GPTConfig's fields and a state dict. None: a new one."""
        if self.saved:
            return checkpoints.model_settings(self.saved), self.saved["model"]
        return self.initial


class Ended(NamedTuple):
    """What a run ended with."""

    step: int  # updates so far
    losses: dict[str, float]  # the last value of each stream of log.txt, such as "train" and "val"
    status: int = 0  # the process's exit status


# ----- Its folder at the start --------------------------------------------------------------------------


def prepare_folder(start: Beginning, ran: dict[str, Any]) -> None:
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
        aside = move_aside(stale, out_dir)
        names = ", ".join(sorted(path.name for path in stale))
        print(f"Moved {names} from {out_dir} to {aside}.", flush=True)
    for leftover in out_dir.glob(".*.part"):  # left by a process that was killed while writing
        if OURS.fullmatch(leftover.stem[1:]) and leftover.is_file():
            leftover.unlink()
    logs.write_start(config, start.step, start.branched, ran=ran, fingerprints=start.fingerprints)
    source_code.keep_copies(config)


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


class Signals(contextlib.AbstractContextManager["Signals"]):
    """Those signals to stop that were received, so that what is under way can finish. A second SIGINT exits at once."""

    def __init__(self):
        self.received: list[int] = []
        self.under_way = ""  # what is said to be finished first; "" for a step, which takes no time to speak of
        self.before: dict[int, Any] = {}

    def __enter__(self):
        if threading.current_thread() is not threading.main_thread():
            return self  # Python lets only the main thread handle signals
        hang_up = getattr(signal, "SIGHUP", signal.SIGINT)  # Windows has none
        is_ignored = signal.getsignal(hang_up) == signal.SIG_IGN  # under nohup
        for number in (signal.SIGTERM, signal.SIGINT, *([] if is_ignored else [hang_up])):
            self.before.setdefault(number, signal.signal(number, self.record))
        return self

    def __exit__(self, *exception):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def record(self, number, frame):
        if number == signal.SIGINT and number in self.received:
            os._exit(128 + number)
        if self.under_way and not self.received:
            with contextlib.suppress(OSError):  # a stream of Python's may be in the middle of a write
                os.write(1, f"Stopping after {self.under_way}.\n".encode())
        self.received.append(number)

    def __len__(self) -> int:
        return len(self.received)

    def __contains__(self, number: object) -> bool:
        return number in self.received


def print_next_commands(config: Any, enc: Any) -> None:
    """Print two commands that come after a run: one to see what it has learned, one to train it for longer."""
    sample = sample_command(config.out_dir, enc, config.sample_prompt, source_code.file_of(type(config)))
    print_next(sample, branch_command(config, {"max_steps": 2 * config.max_steps}))


def branch_command(config: Any, changed: dict[str, Any]) -> list[Any]:
    """The command of a branch of a run that has the settings `changed`."""
    end = "longer" if changed.keys() == {"max_steps"} else "branch"
    flags: list[Any] = [("--branch-from", config.out_dir), ("--out-dir", f"{config.out_dir.rstrip('/')}-{end}")]
    for name, value in changed.items():
        if isinstance(value, bool):
            flags.append(flag_of(name) if value else f"--no-{flag_of(name)[2:]}")
        else:
            flags.append((flag_of(name), *(value if isinstance(value, tuple) else [value])))
    return [*logs.launcher(), os.path.relpath(source_code.file_of(type(config))), *flags]


def sample_command(source: str, enc: Any, prompt: str, code: Path | None = None) -> list[Any]:
    """The command that continues a prompt, or chats, with a model, whose code is in the file `code`."""
    flags: list[Any] = [("-m", source)]
    if code and code.name != source_code.NAME:
        flags += [("--code", os.path.relpath(code))]
    if has_chat_tokens(enc):
        return ["python", "sample.py", "--chat", *flags]
    return ["python", "sample.py", prompt if prompt and not prompt.startswith("-") else "The ", *flags]


def keep_samples_before(path: Path, step: int) -> None:
    """Leave out of samples.txt what a run that was killed wrote at `step` or later, and will write again."""
    if path.exists():
        with open_regular(path, "r", encoding="utf-8", errors="replace") as file:
            # a line of the user's own has no number
            lines = [line for line in file if int((re.match(r"\d+ ", line) or ["0"])[0]) < step]
        with atomic_write(path, "w", encoding="utf-8") as file:
            file.writelines(lines)


# ----- A run in progress --------------------------------------------------------------------------------


class Run(contextlib.AbstractContextManager["Run"]):
    """Writes a run's files and its lines on the console; ranks other than 0 only receive signals."""

    def __init__(
        self,
        start: Beginning,
        world: World,
        lock: FolderLock | None,
        *,
        metadata: dict[str, Any],
        fit: Fit,
        shares: list[float],
        splits: list[Windows],
    ):
        """lock: on its folder; metadata: what every checkpoint holds beside the state; fit: from the trial; shares: the
        folders' shares of the data, for the mean of their validation losses; splits: all data that the run reads.
        """
        config, saved = start.config, start.saved
        self.config, self.world, self.metadata, self.out_dir = config, world, metadata, Path(config.out_dir)
        self.start_step, self.max_steps = start.step, config.max_steps
        self.val_loss = saved["val_loss"] if saved else None  # the last one measured
        self.best_val_loss = saved["best_val_loss"] if saved else math.inf  # that of model_best.pt
        self.stopping = False  # whether some rank has received a signal to stop
        self.losses: dict[str, float] = {}  # the last value of each stream
        self.sample = ""
        self.lr_before = None  # a new branch: that of its parent's last step
        self.flops_per_token = fit.flops_per_token
        self.shares, self.names, self.splits = shares, stream_names(config.data), splits
        self.peak = devices.peak_flops(world.device_name)
        self.log: Any = None  # these three exist on rank 0 only
        self.writer: Any = None
        self.wandb: WandbLog | None = None
        self.started = self.first_step_ended = time.perf_counter()
        self.step_printed = -math.inf  # when
        self.signals = Signals()
        self.signals.__enter__()
        world.broadcast_from_master(self.open, lock, start, fit)
        gc.collect()
        gc.freeze()  # what exists now lives to the end: exclude it from garbage collection

    def open(self, lock: FolderLock, start: Beginning, fit: Fit) -> None:
        """Open what rank 0 writes to."""
        c, saved = self.config, start.saved
        prepare_folder(start, {name: value for name, value in fit._asdict().items() if name != "model"})
        parent = Path(start.branched["parent"]) if start.branched else self.out_dir
        self.log = logs.open_log(self.out_dir, parent, self.start_step)
        check_replaceable(self.out_dir / "samples.txt")  # a link would be followed
        keep_samples_before(self.out_dir / "samples.txt", self.start_step)
        deletable = saved["temporary"] if saved else []
        self.writer = checkpoints.CheckpointWriter(lock, c.keep_checkpoints, c.milestone_every, deletable)
        if c.wandb:
            self.wandb = WandbLog(c, logs.read_log(self.out_dir / "log.txt"))
        if saved and start.branched:
            rates = [value for _, stream, value in logs.read_log(self.out_dir / "log.txt") if stream == "lr"]
            self.lr_before = rates[-1] if rates else None
            # with a checkpoint of its own, a branch no longer depends on its parent
            self.writer.write({**saved, **self.metadata, "finished": False})

    def __exit__(self, kind, error, traceback):
        """Wait until the newest checkpoint is on disk, however the run ends."""
        gc.unfreeze()  # triton's bindings would otherwise report at the exit that their objects still live
        self.signals.__exit__()
        if self.world.is_master:
            try:
                self.writer.wait()
            finally:
                if self.wandb:
                    self.wandb.finish(status=1 if kind else 0)
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
        self.signals.under_way = "this evaluation"
        yield
        self.signals.under_way = ""
        self.stopping = self.world.max_over_ranks(len(self.signals)) > 0

    def log_val_loss(self, step: int, losses: list[tuple[float, float]], raw_model: Any) -> None:
        """Log each folder's (validation loss, bits per byte) and their mean by the shares; with keep_best, keep the
        weights of the lowest mean so far.
        """
        loss, bpb = (sum(share * each[i] for share, each in zip(self.shares, losses)) for i in (0, 1))
        self.val_loss = loss
        streams, text = {"val": loss, "val_bpb": bpb}, f"val loss {loss:.6f} | {bpb:.4f} bits per byte"
        if len(losses) > 1:
            text = f"val loss {loss:.4f} | " + ", ".join(
                f"{n} {each[0]:.4f}" for n, each in zip(self.names, losses)
            )
            for name, each in zip(self.names, losses):
                streams |= {f"val/{name}": each[0], f"val_bpb/{name}": each[1]}
        self.report(step, text if len(text) <= 67 else f"{text[:64]}...", streams)
        if self.config.keep_best and self.world.is_master and self.max_steps and loss < self.best_val_loss:
            self.best_val_loss = loss
            best = {"step": step, "val_loss": loss, "model": raw_model.state_dict(), **self.metadata}
            self.writer.submit(checkpoints.BEST, best)

    def log_samples(self, step: int, texts: list[str]) -> None:
        """Print samples in lines of 80 columns, and keep them; the model card shows the last one."""
        self.sample = texts[-1]
        wrapper = textwrap.TextWrapper(
            width=80,
            initial_indent=f"step {step:5d} | sample | ",
            subsequent_indent=f"{'':10} | {'':6} | ",
            drop_whitespace=False,
            break_on_hyphens=False,
        )
        for text in texts:
            print(wrapper.fill(repr(text)), flush=True)
        with open(self.out_dir / "samples.txt", "a", encoding="utf-8", errors="replace") as file:
            file.writelines(f"{step} {json.dumps(text)}\n" for text in texts)

    def log_hellaswag(self, step: int, counts: Any) -> None:
        """Log HellaSwag's Counts."""
        accuracy = counts.acc_norm / counts.n
        self.report(step, f"HellaSwag {counts.acc_norm}/{counts.n} = {accuracy:.4f}", {"hella": accuracy})

    def log_step(self, step: int, done: Any, *, lr: float, tokens: int, seconds: float) -> None:
        """Report the update of `step`, the trainer's Step `done`, which took `seconds` for `tokens` over all ranks."""
        now, loss, norm = time.perf_counter(), done.loss, done.norm
        self.stopping = done.stop
        if step == self.start_step:
            self.first_step_ended = now
            self.note_rate(lr)
        rate = tokens / max(seconds, 1e-6)  # a clock may stand still
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
        streams = {"train": loss, "lr": lr, "norm": norm, "tok/s": rate} | done.scalars
        self.report(step, text if is_shown else "", streams)
        if self.world.is_master:
            self.writer.delete_old()  # this step was finite, so what it began from is a good checkpoint

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
            fraction = (self.max_steps - self.start_step) / self.max_steps
            text += f". With --decay-fraction {fraction:.4g} it would decay from here on"
        print0(f"{text}.")

    def seconds_left(self, step: int, seconds: float) -> float:
        """How long the remaining steps take at the average since the first one, which compiles."""
        if step > self.start_step:
            seconds = (time.perf_counter() - self.first_step_ended) / (step - self.start_step)
        return seconds * (self.max_steps - step - 1)

    def save(
        self, step: int, raw_model: Any, optimizers: list[Any], scaler: Any, loader: Any, *, finished: bool
    ) -> None:
        """Write a checkpoint of all that is given, in the background, if there is anything new since the start.

        finished: whether the run's last evaluation is done.
        """
        is_new = step > self.start_step or (finished and step > 0)
        if is_new and self.world.size > 1:
            checks.check_ranks(raw_model, step, self.world)
        if self.world.is_master and is_new:
            changed = [split.folder for split in self.splits if split.fingerprint_now() != split.fingerprint]
            if changed:
                raise UserError(
                    f"The shards in {changed[0]} have changed since the run began to read them, so this is no "
                    "longer that run. Restore them, and repeat the command to continue from the last checkpoint."
                )
            state = checkpoints.training_state(raw_model, optimizers, scaler, loader)
            losses = {"val_loss": self.val_loss, "best_val_loss": self.best_val_loss}
            self.writer.write({"step": step, "finished": finished, **losses, **state, **self.metadata})

    def finish(self, step: int, raw_model: Any, enc: Any) -> Ended:
        """End the run after `step` steps: export the model, unless the run was stopped."""
        status = 128 + signal.SIGINT if self.stopping and signal.SIGINT in self.signals else 0
        ended = Ended(step, self.losses, status)
        if not self.world.is_master:
            return ended
        self.writer.wait()
        if self.stopping:
            again = "The same command" if self.config.resume else "The same command without --no-resume"
            print(f"Stopped after {count(step, 'step')}. {again} continues the run.")
            print_next(logs.command(without="resume"))
            return ended
        if self.max_steps:
            if self.val_loss is None or math.isfinite(self.val_loss):
                self.writer.delete_old()
            export(self.out_dir, step, raw_model, enc, self.sample)
        took = duration(time.perf_counter() - self.started)
        if self.world.device_type == "cuda":
            took += f"; peak GPU memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
        print(f"Done in {took}. The notebook play.ipynb plots this run's log.")
        if self.best_val_loss < math.inf and (self.out_dir / checkpoints.BEST).exists():
            lowest = f"{self.best_val_loss:.4f}"
            print(f"The lowest validation loss was {lowest}; its weights are in {checkpoints.BEST}.")
        if self.max_steps:
            print_next_commands(self.config, enc)
        return ended


def export(out_dir: Path, step: int, raw_model: Any, enc: Any, sample: str = "") -> None:
    """Write hf/, if the model is a GPT-2. What else fails here does not end the run: it is said."""
    hf = out_dir / "hf"
    print(f"Exporting the model to {hf}.", flush=True)
    make = functools.partial(make_card, run_folder=out_dir, sample=sample)
    try:
        export_huggingface(raw_model.eval(), enc, hf, step=step, make_card=make)
    except Exception as error:  # of a large package, say, or because the model was changed
        # a full disk or GPU: the same command tries again
        if isinstance(error.__cause__ or error, OSError) or is_out_of_memory(error):
            raise
        print(
            f"note: There is no {hf}. {first_line(error)}. The checkpoints have the model, for sample.py, too."
        )
