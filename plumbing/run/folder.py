"""The folder of a run: what the run begins with, its files while it trains, and its end."""

import contextlib
import functools
import json
import math
import os
import re
import signal
import textwrap
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from plumbing.cli.console import UserError, count, duration, first_line, print0, print_next, quote_group, short
from plumbing.data import shards
from plumbing.data.tokenizers import has_chat_tokens
from plumbing.files import FolderLock, atomic_write, check_replaceable, free_name, lock_folder, open_regular
from plumbing.run import checkpoint as checkpoints
from plumbing.run import logs, options, source_code
from plumbing.run.checkpoint import Checkpoint
from plumbing.run.huggingface import export_huggingface, is_export_of
from plumbing.run.model_card import make_card
from plumbing.run.wandb_log import Mirror
from plumbing.system import devices
from plumbing.system.autofit import Fit, is_out_of_memory
from plumbing.system.distributed import World

# the names of what a run writes into its folder
SOURCE_COPY = re.compile(r".+-[0-9a-f]{8}\.py")
OURS = re.compile(
    rf"(run|log|samples)\.txt|hf|wandb|{SOURCE_COPY.pattern}|{checkpoints.BEST}|{checkpoints.CHECKPOINT_NAME.pattern}"
)

SECONDS_PER_LINE = 0.5  # of the console, about steps

# ----- What a run begins with ---------------------------------------------------------------------------


Weights = tuple[dict[str, Any], dict[str, torch.Tensor]]  # a model's settings and its state dict


class Start(NamedTuple):
    """What a run begins with: a checkpoint, initial weights or, if both are None, nothing."""

    checkpoint: Checkpoint | None = None  # the run's newest one or, for a new branch, its parent's
    initial: Weights | None = None  # those of --init-from's model
    branched: dict[str, Any] | None = None  # of a new branch: its parent, the step and the changes, for run.txt
    finished: bool = False  # nothing is left to do

    @property
    def step(self) -> int:
        return self.checkpoint["step"] if self.checkpoint else 0

    @property
    def model(self) -> Weights | None:
        """(settings, weights) of the model to begin with: GPTConfig's fields and a state dict. None: a new one."""
        if self.checkpoint:
            return checkpoints.model_settings(self.checkpoint), self.checkpoint["model"]
        return self.initial


def lock_out_dir(config: Any, world: World) -> contextlib.AbstractContextManager[FolderLock | None]:
    """The lock on out_dir, taken on rank 0 before anything in it is read; a context of None on other ranks."""
    locks: list[FolderLock] = []
    world.broadcast_from_master(lambda: locks.append(lock_folder(config.out_dir)))
    return locks[0] if locks else contextlib.nullcontext()


def find_start(config: Any, enc: Any, fingerprints: dict[str, str]) -> Start:
    """Find what the run begins with: its newest intact checkpoint, or its parent's, or initial weights. Writes nothing.

    fingerprints: those of this run's data, {"training data": ..., "validation data": ...}.
    """
    resumes = config.resume or logs.is_restart(Path(config.out_dir))
    saved = load_state(config.out_dir) if resumes else None
    begins_branch = bool(config.branch_from and not saved)
    if begins_branch:
        saved = load_state(config.branch_from)
        if not saved:  # `options.inherit` has found one
            raise UserError(f"There is no longer a checkpoint in {config.branch_from}. Use another one.")
    if not saved and config.init_from:
        model = checkpoints.load_saved_model(config.init_from)
        checkpoints.check_tokenizer(model.enc, enc, config.data)
        source_code.compare(model.code, type(config), config.init_from, may_be_a_copy=True)
        return Start(initial=(model.settings, model.weights))
    if not saved:
        return Start()
    checkpoints.check_tokenizer(checkpoints.model_tokenizer(saved), enc, config.data)
    # only samples of each shard are compared, see files.py
    then = {"training data": saved["loader"]["fingerprint"], "validation data": saved["val_fingerprint"]}
    for name, before in then.items():
        if before != fingerprints[name]:
            raise UserError(
                f"The {name} in {config.data} are not what this run began with. Give the run's own with --data, or "
                "begin a new run: --out-dir NEW and, to keep the weights, --init-from RUN without --branch-from."
            )
    branched = branch(config, saved) if begins_branch else None
    if not branched:
        refuse_other_settings(config, saved)
    out_dir = Path(config.out_dir)
    hf, step = out_dir / "hf", saved["step"]
    is_exported = is_export_of(hf, saved["model"], step)
    if step == config.max_steps and (is_exported or logs.is_export_noted(out_dir)):
        model = hf if is_exported else checkpoints.list_checkpoints(out_dir)[-1]
        print(f"The run in {config.out_dir} is finished. Its model is in {model}.")
        print("To train again, name another --out-dir, or add --no-resume to move it aside.")
        print_next_commands(config, enc)
        return Start(finished=True)
    source = config.branch_from if branched else config.out_dir
    source_code.compare(saved.get("code", {}), type(config), source, may_be_a_copy=True)
    return Start(saved, branched=branched)


def refuse_other_settings(config: Any, saved: Checkpoint) -> None:
    """Raise UserError if the run in out_dir has other settings, with the command that does what may be wanted."""
    different = options.changes(config, saved["config"])
    if not different:
        return
    advice = f"add --branch-from {config.out_dir} --out-dir NEW to branch off"
    if config.max_steps == 0:
        advice = f"evaluate it: add --init-from {config.out_dir} --out-dir NEW"
    elif options.changes(config, saved["config"], fixed=True):
        advice = "begin a new run with another --out-dir"
    elif different.keys() == {"max_steps"}:
        # a run that is to be shorter than what it has done still needs some steps in which its rate decays
        max_steps = max(config.max_steps, math.ceil(1.1 * saved["step"]))
        done = "" if max_steps == config.max_steps else f" (it has done {saved['step']} already)"
        words = " ".join(map(quote_group, longer_command(config, max_steps)))
        advice = f"train it for {max_steps} steps{done} as a branch: {words}"
    raise UserError(
        f"{config.out_dir} has a run with other settings ({options.in_words(different)}). Repeat its command "
        f"(in run.txt) to continue it, add --no-resume to move it aside, or {advice}"
    )


def load_state(source: str) -> Checkpoint | None:
    """Load the newest checkpoint of a run or of a file, or None. UserError if it lacks what a run continues from."""
    saved = checkpoints.newest_checkpoint(source)
    if saved and "optimizer" not in saved:
        raise UserError(
            f"{source} has weights, but not the optimizer state that a run continues from. To start a run from "
            "them, use --init-from."
        )
    return saved


def branch(config: Any, saved: Checkpoint) -> dict[str, Any]:
    """What run.txt says of a new branch from the checkpoint `saved`. UserError if it cannot continue from that."""
    parent = Path(config.branch_from)
    folder = parent.parent if parent.is_file() else parent
    if folder.samefile(config.out_dir):  # also with --no-resume, which would move the parent aside
        raise UserError(
            f"--out-dir is the folder of the parent (--branch-from), {folder}. Give the branch a folder of its own."
        )
    changed = options.changes(config, saved["config"])
    changed.pop("branch_from", None)
    fixed = options.changes(config, saved["config"], fixed=True)
    if fixed:
        raise UserError(
            f"A branch of {parent} cannot change these settings: {options.in_words(fixed)}. Leave their flags out, or "
            f"begin a new run, with --init-from {parent} unless the model's shape changes."
        )
    if saved["step"] >= config.max_steps:
        raise UserError(
            f"--max-steps is {config.max_steps}, but {parent} has done {saved['step']} steps already. Give more steps "
            "or, to evaluate it, use --init-from in place of --branch-from."
        )
    # the parent's best weights and its other checkpoints are not in the branch's folder
    saved["best_val_loss"], saved["temporary"] = math.inf, []
    return {"parent": str(folder), "step": saved["step"], "changed": changed}


# ----- Its folder at the start --------------------------------------------------------------------------


def prepare_folder(config: Any, start: Start, ran: dict[str, Any]) -> None:
    """Describe the start in run.txt; move aside an old run, or the damaged checkpoints of a run that continues."""
    out_dir = Path(config.out_dir)
    if start.checkpoint and not start.branched:
        found = checkpoints.list_checkpoints(out_dir)
        stale = [path for path in found if checkpoints.step_of(path) > start.step]
    else:
        ours = [path for path in out_dir.iterdir() if OURS.fullmatch(path.name)]
        results = [path for path in ours if path.name != "run.txt" and not SOURCE_COPY.fullmatch(path.name)]
        stale = ours if any(path.is_dir() or path.stat().st_size for path in results) else []
    if stale:
        aside = move_aside(stale, out_dir)
        names = ", ".join(sorted(path.name for path in stale))
        print(f"Moved {names} from {out_dir} to {aside}.", flush=True)
    for leftover in out_dir.glob(".*.part"):  # left by a process that was killed while writing
        if OURS.fullmatch(leftover.stem[1:]) and leftover.is_file():
            leftover.unlink()
    logs.write_start(config, start.step, start.branched, ran)
    source_code.keep_copy(config)


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


def install_signal_handlers() -> list[int]:
    """Record the signals to stop in the returned list, so that the step can finish. A second SIGINT exits at once."""
    received: list[int] = []

    def record(number, frame):
        if number == signal.SIGINT and number in received:
            os._exit(128 + number)
        received.append(number)

    hang_up = getattr(signal, "SIGHUP", signal.SIGINT)  # Windows has none
    is_ignored = signal.getsignal(hang_up) == signal.SIG_IGN  # under nohup
    for number in (signal.SIGTERM, signal.SIGINT, *([] if is_ignored else [hang_up])):
        signal.signal(number, record)
    return received


def diverged(
    config: Any, step: int, loss: float, norm: float, *, loader: Any, start: int, B: int, batch_losses: list[Any]
) -> UserError:
    """The error for a loss or gradient norm that is not finite, in a step whose windows begin at `start`.

    batch_losses: for each rank, the losses of its micro-batches, of B windows each.
    """
    losses = np.array(batch_losses).T.flatten()  # in the order of the micro-batches
    bad = np.flatnonzero(~np.isfinite(losses)).tolist() or range(len(losses))
    windows = [start + number * B + row for number in bad for row in range(B)][:4]
    places = loader.locate(np.array(windows))
    where = ", ".join(f"{loader.shards[i].path.name} token {offset}" for i, offset in places)
    rates = "--max-lr LOWER --muon-lr LOWER" if config.optimizer == "muon" else "--max-lr LOWER"
    # from the checkpoint of this very step, no step has succeeded
    good = [path for path in checkpoints.list_checkpoints(config.out_dir) if checkpoints.step_of(path) < step]
    remedy = f"--branch-from {good[-1]} {rates} --out-dir NEW" if good else f"--no-resume {rates}"
    return UserError(
        f"Training diverged in step {step}: the loss is {loss}, the gradient norm {norm}. The batch includes the "
        f"sequences at {where}. Train at a lower rate: {remedy}."
    )


def print_next_commands(config: Any, enc: Any) -> None:
    """Print two commands that come after a run: one to see what it has learned, one to train it for longer."""
    sample = sample_command(config.out_dir, enc, config.sample_prompt, source_code.file_of(type(config)))
    print_next(sample, longer_command(config, 2 * config.max_steps))


def longer_command(config: Any, max_steps: int) -> list[Any]:
    """The command that trains a run for longer, as a branch."""
    out_dir = f"{config.out_dir.rstrip('/')}-longer"
    flags = [("--branch-from", config.out_dir), ("--out-dir", out_dir), ("--max-steps", max_steps)]
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
        config: Any,
        world: World,
        lock: FolderLock | None,
        start: Start,
        metadata: dict[str, Any],
        fit: Fit,
    ):
        """lock: from `lock_out_dir`; metadata: what every checkpoint holds beside the state; fit: from the trial."""
        self.config, self.world, self.metadata, self.out_dir = config, world, metadata, Path(config.out_dir)
        saved: Any = start.checkpoint or {}
        self.start_step, self.max_steps = start.step, config.max_steps
        self.val_loss = saved.get("val_loss")  # the last one measured
        self.best_val_loss = saved.get("best_val_loss", math.inf)  # that of model_best.pt
        self.sample = ""
        self.lr_before = None  # a new branch: that of its parent's last step
        self.flops_per_token = fit.flops_per_token
        self.peak = devices.peak_flops(world.device_name)
        self.log: Any = None  # these three exist on rank 0 only
        self.writer: Any = None
        self.mirror: Mirror | None = None
        self.signals = install_signal_handlers()  # the signals received so far
        self.started = self.first_step_ended = time.perf_counter()
        self.step_printed = -math.inf  # when
        world.broadcast_from_master(self.open, lock, start, fit)

    def open(self, lock: FolderLock, start: Start, fit: Fit) -> None:
        """Open what rank 0 writes to."""
        c, saved = self.config, start.checkpoint
        prepare_folder(c, start, {name: value for name, value in fit._asdict().items() if name != "model"})
        parent = Path(start.branched["parent"]) if start.branched else self.out_dir
        self.log = logs.open_log(self.out_dir, parent, self.start_step)
        check_replaceable(self.out_dir / "samples.txt")  # a link would be followed
        keep_samples_before(self.out_dir / "samples.txt", self.start_step)
        deletable = saved["temporary"] if saved else []
        self.writer = checkpoints.CheckpointWriter(lock, c.keep_checkpoints, c.milestone_every, deletable)
        if c.wandb:
            self.mirror = Mirror(c, logs.read_log(self.out_dir / "log.txt"))
        if saved and start.branched:
            rates = [value for _, stream, value in logs.read_log(self.out_dir / "log.txt") if stream == "lr"]
            self.lr_before = rates[-1] if rates else None
            # with a checkpoint of its own, a branch no longer depends on its parent
            self.writer.write({**saved, **self.metadata})

    def __exit__(self, kind, error, traceback):
        """Wait until the newest checkpoint is on disk, however the run ends."""
        if self.world.is_master:
            try:
                self.writer.wait()
            finally:
                if self.mirror:
                    self.mirror.finish(status=1 if kind else 0)
                with contextlib.suppress(OSError):  # a full disk was reported by the write that found it
                    self.log.close()
        if "Expected to have finished reduction in the prior iteration" in str(error):
            raise UserError(
                "In the last step a parameter had no gradient on some rank, but DDP needs one of each. If only some "
                "batches use a part of the model, such as an expert, add 0 times the sum of its parameters to the loss."
            ) from None

    def report(self, step: int, text: str, streams: dict[str, float]) -> None:
        """Print a line about a step, unless `text` is empty, and log its values, {stream: value}."""
        if not self.world.is_master:
            return
        self.writer.raise_error()  # a full disk ends the run now, not at the next checkpoint
        if text:
            print(f"step {step:5d} | {text}", flush=True)
        logs.write_log(self.log, step, streams)
        if self.mirror:
            self.mirror.log(step, streams)

    def log_val_loss(self, step: int, losses: tuple[float, float] | None) -> None:
        """Log a validation loss and its bits per byte, unless a signal has ended the evaluation."""
        if losses is None:
            return
        loss, bpb = losses
        self.val_loss = loss
        self.report(step, f"val loss {loss:.6f} | {bpb:.4f} bits per byte", {"val": loss, "val_bpb": bpb})

    def keep_best(self, step: int, loss: float, raw_model: Any) -> None:
        """Keep the weights as model_best.pt if this is the lowest validation loss so far."""
        if self.world.is_master and self.max_steps and loss < self.best_val_loss:
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
        """Log HellaSwag's Counts, unless a signal has ended the evaluation."""
        if counts is None:
            return
        accuracy = counts.acc_norm / counts.n
        self.report(step, f"HellaSwag {counts.acc_norm}/{counts.n} = {accuracy:.4f}", {"hella": accuracy})

    def log_step(
        self, step: int, loss: float, *, lr: float, norm: float, tokens: int, seconds: float, scalars: Any = None
    ) -> None:
        """Report the update of `step`, which took `seconds` for `tokens` tokens over all ranks; log `scalars`, too."""
        now = time.perf_counter()
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
        streams = {"train": loss, "lr": lr, "norm": norm, "tok/s": rate} | (scalars or {})
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

    def save(self, step: int, raw_model: Any, optimizers: list[Any], scaler: Any, loader: Any) -> None:
        """Write a checkpoint of all that is given, in the background."""
        if self.world.is_master:
            if shards.fingerprint([shard.path for shard in loader.shards]) != loader.fingerprint:
                raise UserError(
                    f"The shards in {self.config.data} have changed since the run began to read them, so this is no "
                    "longer that run. Restore them, and repeat the command to continue from the last checkpoint."
                )
            state = checkpoints.training_state(raw_model, optimizers, scaler, loader)
            losses = {"val_loss": self.val_loss, "best_val_loss": self.best_val_loss}
            self.writer.write({"step": step, **losses, **state, **self.metadata})

    def finish(self, step: int, stopped: bool, raw_model: Any, *, enc: Any) -> int:
        """End the run after `step` steps: export the model, unless the run was stopped. Returns the exit status."""
        status = 128 + signal.SIGINT if stopped and signal.SIGINT in self.signals else 0
        if not self.world.is_master:
            return status
        self.writer.wait()
        if stopped:
            again = "The same command" if self.config.resume else "The same command without --no-resume"
            print(f"Stopped after {count(step, 'step')}. {again} continues the run.")
            print_next(logs.command(without="resume"))
            return status
        if self.max_steps:
            if self.val_loss is None or math.isfinite(self.val_loss):
                self.writer.delete_old()
            self.export(step, raw_model, enc)
        took = duration(time.perf_counter() - self.started)
        if self.world.device_type == "cuda":
            took += f"; peak GPU memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
        print(f"Done in {took}. The notebook play.ipynb plots this run's log.")
        if self.best_val_loss < math.inf and (self.out_dir / checkpoints.BEST).exists():
            lowest = f"{self.best_val_loss:.4f}"
            print(f"The lowest validation loss was {lowest}; its weights are in {checkpoints.BEST}.")
        if self.max_steps:
            print_next_commands(self.config, enc)
        return status

    def export(self, step: int, raw_model: Any, enc: Any) -> None:
        """Write hf/, if the model is a GPT-2. What fails here does not end the run, nor is it tried again later."""
        hf = self.out_dir / "hf"
        print(f"Exporting the model to {hf}.", flush=True)
        make = functools.partial(make_card, run_folder=self.out_dir, sample=self.sample)
        try:
            export_huggingface(raw_model.eval(), enc, hf, step=step, make_card=make)
        except Exception as error:  # of a large package, say, or because the model was changed
            # a full disk or GPU: the same command tries again
            if isinstance(error.__cause__ or error, OSError) or is_out_of_memory(error):
                raise
            reason = first_line(error)
            print(f"note: There is no {hf}. {reason}. The checkpoints have the model, for sample.py, too.")
            logs.note_export(self.out_dir, reason)
