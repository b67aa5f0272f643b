"""The folder of a run: what the run begins with, its files while it trains, and its end."""

import contextlib
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

from plumbing import checkpoint as checkpoints
from plumbing import journal, machine, settings
from plumbing.checkpoint import Checkpoint
from plumbing.distributed import World
from plumbing.files import FolderLock, check_replaceable, free_name, lock_folder
from plumbing.huggingface import check_export, export_huggingface, is_export_of
from plumbing.mirror import Mirror
from plumbing.modelcard import write_model_card
from plumbing.program import UserError, count, duration, plain, print0, print_next, quote_group, short
from tokenizer import has_chat_tokens

# the names of what a run writes into its folder
OURS = re.compile(rf"(run|log|samples)\.txt|hf|wandb|{checkpoints.BEST}|{checkpoints.CHECKPOINT_NAME.pattern}")

# ----- What a run begins with ---------------------------------------------------------------------------


class Start(NamedTuple):
    """What a run begins with: a checkpoint, initial weights or, if both are None, nothing."""

    checkpoint: Checkpoint | None = None  # the run's newest one or, for a new branch, its parent's
    weights: tuple[dict[str, int], dict[str, torch.Tensor]] | None = None  # shape and state dict of --init-from
    branched: dict[str, Any] | None = None  # of a new branch: its parent, the step and the changes, for run.txt
    finished: bool = False  # nothing is left to do

    @property
    def step(self) -> int:
        return self.checkpoint["step"] if self.checkpoint else 0


def lock_out_dir(config: Any, world: World) -> contextlib.AbstractContextManager[FolderLock | None]:
    """The lock on out_dir, taken on rank 0 before anything in it is read; a context of None on other ranks."""
    locks: list[FolderLock] = []
    world.broadcast_from_master(lambda: locks.append(lock_folder(config.out_dir)))
    return locks[0] if locks else contextlib.nullcontext()


def find_start(config: Any, preset: Any, enc: Any, fingerprints: dict[str, str]) -> Start:
    """Find what the run begins with: its newest intact checkpoint, or its parent's, or initial weights. Writes nothing.

    fingerprints: those of this run's data, {"training data": ..., "validation data": ...}.
    """
    resumes = config.resume or journal.is_restart(Path(config.out_dir))
    saved, branched = load_state(config.out_dir) if resumes else None, None
    if saved:
        different = settings.changes(config, saved["config"])
        if different:
            branch_off = f"add --branch-from {config.out_dir} --out-dir NEW to branch off"
            if different.keys() & settings.SAME_IN_A_BRANCH:
                branch_off = "begin a new run with another --out-dir"
            elif different.keys() == {"max_steps"} and config.max_steps > saved["step"]:
                words = " ".join(map(quote_group, longer_command(config, config.max_steps)))
                branch_off = f"train it for longer as a branch: {words}"
            raise UserError(
                f"{config.out_dir} has a run with other settings ({settings.in_words(different)}). Repeat its command "
                f"(in run.txt) to continue it, add --no-resume to move it aside, or {branch_off}"
            )
    elif config.branch_from:
        saved = load_state(config.branch_from)
        if not saved:  # `settings.inherit` has found one
            raise UserError(f"There is no longer a checkpoint in {config.branch_from}. Use another one.")
        branched = branch(config, saved)
        # the parent's best weights and its other checkpoints are not in the branch's folder
        saved["best_val_loss"], saved["temporary"] = math.inf, []
    elif config.init_from:
        return Start(weights=checkpoints.load_initial_weights(config, preset, enc))
    else:
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
    hf = Path(config.out_dir, "hf")
    if saved["step"] < config.max_steps or not is_export_of(hf, saved["model"], saved["config"], enc):
        return Start(saved, branched=branched)
    print(plain(f"The run in {config.out_dir} is finished. Its model is in {hf}.", 2000))
    print("To train again, name another --out-dir, or add --no-resume to move it aside.")
    print_next_commands(config, enc)
    return Start(saved, finished=True)


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
    changed = settings.changes(config, saved["config"])
    changed.pop("branch_from", None)
    fixed = {name: pair for name, pair in changed.items() if name in settings.SAME_IN_A_BRANCH}
    if fixed:
        raise UserError(
            f"A branch of {parent} cannot change these settings: {settings.in_words(fixed)}. Leave their flags out, or "
            f"begin a new run, with --init-from {parent} unless the model's shape changes."
        )
    if saved["step"] >= config.max_steps:
        raise UserError(
            f"--max-steps is {config.max_steps}, but {parent} has done {saved['step']} steps already. Give more steps."
        )
    return {"parent": str(folder), "step": saved["step"], "changed": changed}


# ----- Its folder at the start --------------------------------------------------------------------------


def prepare_folder(config: Any, start: Start) -> None:
    """Describe the start in run.txt; move aside an old run, or the damaged checkpoints of a run that continues."""
    out_dir = Path(config.out_dir)
    if start.checkpoint and not start.branched:
        found = checkpoints.list_checkpoints(out_dir)
        stale = [path for path in found if checkpoints.step_of(path) > start.step]
    else:
        stale = [path for path in out_dir.iterdir() if OURS.fullmatch(path.name)]
        if not any(path.is_dir() or path.stat().st_size for path in stale if path.name != "run.txt"):
            stale = []  # that run has no results
    if stale:
        aside = move_aside(stale, out_dir)
        names = ", ".join(sorted(path.name for path in stale))
        print(plain(f"Moved {names} from {out_dir} to {aside}.", 2000), flush=True)
    for leftover in out_dir.glob(".*.part"):  # left by a process that was killed while writing
        if OURS.fullmatch(leftover.stem[1:]) and leftover.is_file():
            leftover.unlink()
    journal.write_start(config, start.step, start.branched)


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
                aside.rmdir()
    raise error


def install_signal_handlers() -> list[int]:
    """Record the signals to stop in the returned list, so that the step can finish. A second SIGINT exits at once."""
    received: list[int] = []

    def record(number, frame):
        if number == signal.SIGINT and number in received:
            os._exit(128 + number)
        received.append(number)

    for number in (signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGHUP", signal.SIGINT)):  # no HUP on Windows
        signal.signal(number, record)
    return received


def diverged(config: Any, step: int, *, loss: float, norm: float, loader: Any, windows: list[int]) -> UserError:
    """The error for a loss or gradient norm that is not finite, in a batch with these `windows` of the global order."""
    places = loader.locate(np.array(windows))
    where = ", ".join(f"{loader.shards[i].path.name} token {offset}" for i, offset in places)
    rates = "--max-lr LOWER --muon-lr LOWER" if config.optimizer == "muon" else "--max-lr LOWER"
    remedy = f"Start again at a lower rate: --no-resume {rates}."
    if checkpoints.list_checkpoints(config.out_dir):
        remedy = (
            f"Continue from a checkpoint at a lower rate: --branch-from {config.out_dir} {rates} --out-dir NEW."
        )
    return UserError(
        f"Training diverged in step {step}: the loss is {loss}, the gradient norm {norm}. The batch includes the "
        f"sequences at {where}. {remedy}"
    )


def print_next_commands(config: Any, enc: Any) -> None:
    """Print two commands that come after a run: one to see what it has learned, one to train it for longer."""
    sample = sample_command(config.out_dir, enc, config.sample_prompt)
    print_next(sample, longer_command(config, 2 * config.max_steps))


def longer_command(config: Any, max_steps: int) -> list[Any]:
    """The command that trains a run for longer, as a branch."""
    out_dir = f"{config.out_dir.rstrip('/')}-longer"
    flags = [("--branch-from", config.out_dir), ("--out-dir", out_dir), ("--max-steps", max_steps)]
    return [*journal.launcher(), "train_gpt2.py", *flags]


def sample_command(source: str, enc: Any, prompt: str) -> list[Any]:
    """The command that continues a prompt, or chats, with a model."""
    if has_chat_tokens(enc):
        return ["python", "sample.py", "--chat", ("--model", source)]
    prompt = prompt or "The "
    if prompt.startswith("-"):  # not a flag
        return ["python", "sample.py", ("--model", source), "--", prompt]
    return ["python", "sample.py", prompt, ("--model" if str(source).startswith("-") else "-m", source)]


# ----- A run in progress --------------------------------------------------------------------------------


class Run(contextlib.AbstractContextManager["Run"]):
    """Writes a run's files and its lines on the console; ranks other than 0 only receive signals."""

    def __init__(
        self, config: Any, world: World, lock: FolderLock | None, start: Start, metadata: dict[str, Any]
    ):
        """lock: from `lock_out_dir`; metadata: what every checkpoint holds beside the state."""
        self.config, self.world, self.metadata, self.out_dir = config, world, metadata, Path(config.out_dir)
        saved: Any = start.checkpoint or {}
        self.start_step, self.max_steps = start.step, config.max_steps
        self.val_loss = saved.get("val_loss")  # the last one measured
        self.best_val_loss = saved.get("best_val_loss", math.inf)  # that of model_best.pt
        self.branched, self.sample = start.branched, ""
        is_cuda = world.device_type == "cuda"
        self.device_name = torch.cuda.get_device_name() if is_cuda else world.device
        self.flops_per_token = machine.flops_per_token(config, config.sequence_length)
        self.peak = machine.peak_flops(self.device_name)
        self.log: Any = None  # these three exist on rank 0 only
        self.writer: Any = None
        self.mirror: Mirror | None = None
        self.signals = install_signal_handlers()  # the signals received so far
        self.started = self.first_step_ended = time.perf_counter()
        world.broadcast_from_master(self.open, lock, start)

    def open(self, lock: FolderLock, start: Start) -> None:
        """Open what rank 0 writes to."""
        c, saved = self.config, start.checkpoint
        prepare_folder(c, start)
        parent = Path(start.branched["parent"]) if start.branched else self.out_dir
        check_replaceable(self.out_dir / "samples.txt")  # opening a pipe would wait for ever
        self.log = journal.open_log(self.out_dir, parent, self.start_step)
        deletable = saved["temporary"] if saved else []
        self.writer = checkpoints.CheckpointWriter(lock, c.keep_checkpoints, c.milestone_every, deletable)
        if c.wandb:
            self.mirror = Mirror(c, journal.read_log(self.out_dir / "log.txt"))
        if saved and start.branched:  # with a checkpoint of its own, a branch no longer depends on its parent
            self.writer.write({**saved, **self.metadata})

    def __exit__(self, *exception):
        """Wait until the newest checkpoint is on disk, however the run ends."""
        if self.world.is_master:
            try:
                self.writer.wait()
            finally:
                if self.mirror:
                    self.mirror.finish(status=1 if exception[0] else 0)
                with contextlib.suppress(OSError):  # a full disk was reported by the write that found it
                    self.log.close()

    def print_summary(
        self, raw_model: Any, loader: Any, num_val_windows: int, *, B: int, optimizers: list[Any]
    ) -> None:
        world, S, T = self.world, self.config.total_batch_size, loader.T
        num_params = sum(p.numel() for p in raw_model.parameters())
        print0(f"model: {num_params:,} parameters on {world.size} x {self.device_name}, {self.config.dtype}")
        tokens = loader.num_windows * T
        print0(f"data: {tokens:,} training tokens, which the run reads {self.max_steps * S / tokens:.3g} times")
        print0(f"validation: {num_val_windows * T:,} tokens; tokenizer {self.metadata['tokenizer']}")
        micro_steps = S // (B * T * world.size)
        print0(f"step: {S:,} tokens = B {B} * T {T} * ranks {world.size} * micro-steps {micro_steps}")
        for optimizer in optimizers:
            size = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
            print0(f"optimizer: {type(optimizer).__name__} for {size:,} parameters")
        branched = f", a branch of {self.branched['parent']}" if self.branched else ""
        print0(plain(f"run: {self.out_dir}{branched}, from step {self.start_step} to {self.max_steps}", 2000))

    def report(self, step: int, text: str, streams: dict[str, float]) -> None:
        """Print a line about a step and log its values, {stream: value}."""
        if not self.world.is_master:
            return
        self.writer.raise_error()  # a full disk ends the run now, not at the next checkpoint
        print(f"step {step:5d} | {text}", flush=True)
        journal.write_log(self.log, step, streams)
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
        if self.world.is_master and loss < self.best_val_loss:
            self.best_val_loss = loss
            best = {"step": step, "val_loss": loss, "model": raw_model.state_dict(), **self.metadata}
            self.writer.submit(checkpoints.BEST, best)

    def log_samples(self, step: int, texts: list[str]) -> None:
        """Print samples in lines of 80 columns, and keep them; the model card shows the last one."""
        self.sample = texts[-1]
        for text in texts:
            first, *rest = textwrap.wrap(repr(text), 58, drop_whitespace=False, break_on_hyphens=False)
            self.report(step, f"sample | {first}", {})
            for line in rest:
                print(f"{'':10} | {'':6} | {line}", flush=True)
        with open(self.out_dir / "samples.txt", "a", encoding="utf-8", errors="replace") as file:
            file.writelines(f"{step} {json.dumps(text)}\n" for text in texts)

    def log_hellaswag(self, step: int, counts: Any) -> None:
        """Log HellaSwag's Counts, unless a signal has ended the evaluation."""
        if counts is None:
            return
        accuracy = counts.acc_norm / counts.n
        self.report(step, f"HellaSwag {counts.acc_norm}/{counts.n} = {accuracy:.4f}", {"hella": accuracy})

    def log_step(self, step: int, loss: float, *, lr: float, norm: float, tokens: int, seconds: float) -> None:
        """Report the update of `step`, which took `seconds` for `tokens` tokens over all ranks."""
        if step == self.start_step:
            self.first_step_ended = time.perf_counter()
        rate = tokens / max(seconds, 1e-6)  # a clock may stand still
        lr_text = f"{lr:.1e}".replace("e-0", "e-")
        took = f"{1e3 * seconds:3.0f} ms" if seconds < 0.9995 else f"{short(seconds):>4} s"
        speed = f"{short(rate):>4} tok/s"
        left = f"{duration(self.seconds_left(step, seconds)):>4} left"
        # the columns line up and fit into 80 characters; with MFU, there is room for fewer digits
        if self.peak:
            mfu = rate * self.flops_per_token / (self.peak * self.world.size)
            text = f"loss {loss:6.3f} lr {lr_text} norm {norm:4.1f} {took} {speed} {mfu:3.0%} MFU {left}"
        else:
            text = f"loss {loss:7.4f}  lr {lr_text}  norm {norm:5.2f}  {took}  {speed}  {left}"
        self.report(step, text, {"train": loss, "lr": lr, "norm": norm, "tok/s": rate})

    def seconds_left(self, step: int, seconds: float) -> float:
        """How long the remaining steps take at the average since the first one, which compiles."""
        if step > self.start_step:
            seconds = (time.perf_counter() - self.first_step_ended) / (step - self.start_step)
        return seconds * (self.max_steps - step - 1)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write a checkpoint of `state`, as training_state of train_gpt2.py returns it, in the background."""
        if self.world.is_master:
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
            print_next([word for word in journal.command() if word.replace("_", "-") != "--no-resume"])
            return status
        hf = self.out_dir / "hf"
        print(plain(f"Exporting the model to {hf}.", 2000), flush=True)
        export_huggingface(raw_model, enc, hf)
        if check_export(raw_model, hf):  # the card says how to load it with transformers
            write_model_card(hf, self.out_dir, sample=self.sample)
        took = duration(time.perf_counter() - self.started)
        if self.world.device_type == "cuda":
            took += f"; peak GPU memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
        print(f"Done in {took}. The notebook play.ipynb plots this run's log.")
        if self.best_val_loss < math.inf:
            lowest = f"{self.best_val_loss:.4f}"
            print(f"The lowest validation loss was {lowest}; its weights are in {checkpoints.BEST}.")
        print_next_commands(self.config, enc)
        return status
