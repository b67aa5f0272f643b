"""The folder of a run, from its start or resumption to its export, and the signals that stop a run."""

import contextlib
import dataclasses
import datetime
import hashlib
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from plumbing.checkpoint import (
    BEST,
    CHECKPOINT_NAME,
    SHAPE,
    CheckpointWriter,
    check_tokenizer,
    load_checkpoint,
    load_initial_weights,
    model_tokenizer,
    newest_checkpoint,
)
from plumbing.cli import UserError
from plumbing.distributed import flops_per_token, is_restart, launch_time, print0
from plumbing.files import atomic_write, lock_folder
from plumbing.huggingface import check_export_folder, export_huggingface
from plumbing.mirror import Mirror
from plumbing.peaks import peak_flops

# settings that may change when a run is resumed: none of them affects what the model learns
MAY_CHANGE_ON_RESUME = {
    "preset",
    "out_dir",
    "resume",
    "branch_from",
    "device",
    "compile",
    "activation_checkpointing",
    "batch_size",
    "data",
    "val_every",
    "hellaswag_every",
    "hellaswag_limit",
    "hellaswag_data",
    "sample_every",
    "sample_prompt",
    "checkpoint_every",
    "keep_checkpoints",
    "keep_best",
    "milestone_every",
    "wandb",
}

# settings that may differ from node to node: where its files are, and its devices
MAY_DIFFER_BETWEEN_RANKS = {"data", "out_dir", "init_from", "branch_from", "hellaswag_data", "device"}

# settings that a branch must share with its parent: weights, optimizer state and position in the data depend on them
SAME_IN_A_BRANCH = {*SHAPE, "init_from", "optimizer", "sequence_length", "seed", "shuffle"}

# ----------------------------------------------------------------------------------------------------------
# Finding what a run continues


def find_start(config, preset, enc, fingerprint):
    """What the run begins with, as a checkpoint's dict; empty if it begins from scratch. Modifies nothing.

    That is the newest intact checkpoint in out_dir; or, when a branch first starts, the one of --branch-from, with
    the entry "branched" for run.txt; or the weights of --init-from. Refuses a folder with a different run, and says
    what differs. preset: the TrainConfig of --preset.
    """
    out_dir = Path(config.out_dir)
    if out_dir.is_dir():
        read_text(out_dir / "run.txt")  # report an unreadable one now, before the model is made
    if resumes(config) and out_dir.exists():
        checkpoint = newest_checkpoint(out_dir)
        if checkpoint:
            check_resume(config, checkpoint, out_dir)
        elif (out_dir / "log.txt").exists() and not (out_dir / "run.txt").exists():
            raise UserError(
                f"{out_dir} has a log but no run.txt, so it is not a run of train_gpt2.py. "
                "Choose another --out-dir, or move the log aside with --no-resume."
            )
    else:
        checkpoint = None
    if not (checkpoint and checkpoint["step"] == config.max_steps):  # a finished run is not exported again
        check_export_folder(out_dir / "hf")
    if not checkpoint and config.branch_from:
        checkpoint = find_parent(config)
    if checkpoint:
        check_tokenizer(model_tokenizer(checkpoint), enc, config.data)
        check_data(checkpoint, fingerprint, config)
        return checkpoint
    return load_initial_weights(config, preset, enc) if config.init_from else {}


def check_settings(config, checkpoint, place):
    """Raise UserError unless all settings in a checkpoint from `place` exist in `config`, with the same type."""
    for name, then in checkpoint["config"].items():
        now = getattr(config, name, None) if isinstance(name, str) else None
        if now is None:
            raise UserError(
                f"The run in {place} has a setting {name!r:.60}, which this version of train_gpt2.py does not know. "
                "Continue it with the version that started it, or use its weights with --init-from."
            )
        is_whole_float = isinstance(now, float) and type(then) is int
        if type(then) is not type(now) and not is_whole_float:
            raise UserError(
                f"The checkpoint of step {checkpoint['step']} in {place} is damaged: its setting {name} is "
                f"{then!r:.60}. Delete it to continue from the checkpoint before it."
            )


def settings_that_differ(config, checkpoint):
    """{name: (in the checkpoint, now)} of the settings in which `config` differs from a checkpoint's.

    A setting that did not exist yet when the checkpoint was written counts as TrainConfig's default.
    """
    different = {}
    for field in dataclasses.fields(config):
        now = getattr(config, field.name)
        then = checkpoint["config"].get(field.name, field.default)
        is_left_to_the_run = (
            (field.name == "dtype" and "auto" in (now, then))
            or (field.name == "vocab_size" and now == 0)
            or (field.name in SHAPE and config.init_from)
        )
        if now != then and not is_left_to_the_run:
            different[field.name] = then, now
    return different


def say(different):
    """Say what `settings_that_differ` returns: "seed was 1, now 7, init_from was not given, now gpt2"."""
    words = {name: ["not given" if value == "" else value for value in pair] for name, pair in different.items()}
    return ", ".join(f"{name} was {then}, now {now}" for name, (then, now) in words.items())


def check_resume(config, checkpoint, out_dir):
    """Raise UserError if the checkpoint in out_dir is of a run with other settings."""
    check_settings(config, checkpoint, out_dir)
    different = settings_that_differ(config, checkpoint)
    different = {name: pair for name, pair in different.items() if name not in MAY_CHANGE_ON_RESUME}
    if different:
        raise UserError(
            f"{out_dir} has a run with other settings ({say(different)}). Use those to continue it; or continue it "
            f"with the new ones in another folder, with --branch-from {out_dir} --out-dir NEW; or choose another "
            "--out-dir, or move the old run aside with --no-resume."
        )
    # a run that started elsewhere is not taken for this branch; a branch may also be resumed without the flag
    if config.branch_from and Path(config.branch_from) != Path(checkpoint["config"].get("branch_from", "")):
        raise UserError(
            f"{out_dir} has a run that was not started with --branch-from {config.branch_from}. Leave that out to "
            "continue this run; or choose another --out-dir; or move the old run aside with --no-resume."
        )
    if checkpoint["step"] > config.max_steps:
        raise UserError(
            f"The newest checkpoint in {out_dir} is damaged: its step is {checkpoint['step']}, but the run has "
            f"{config.max_steps} steps. Delete it to continue from the checkpoint before it."
        )


def check_data(checkpoint, fingerprint, config):
    """Raise UserError if the shards of --data are not those of the checkpoint's run."""
    then = checkpoint["loader"].get("fingerprint", fingerprint)  # older checkpoints have none
    if not isinstance(then, str) or then != fingerprint:
        raise UserError(
            f"The shards in {config.data} are not those that the run was started on. Give the original shards with "
            "--data, or start another run on these with --init-from and another --out-dir."
        )


def find_parent(config):
    """The checkpoint of --branch-from, with "branched": the parent's folder, the step, and the settings that change."""
    parent = Path(config.branch_from)
    folder = parent.parent if parent.is_file() else parent
    if folder.resolve() == Path(config.out_dir).resolve():  # also with --no-resume, which would move the parent aside
        raise UserError(
            f"--out-dir {config.out_dir} is the folder of the run that --branch-from continues. "
            "Choose another --out-dir for the branch."
        )
    checkpoint = load_checkpoint(parent, for_resume=True) if parent.is_file() else newest_checkpoint(parent)
    if not checkpoint:
        raise UserError(
            f"There is no checkpoint in {parent} to branch from. Give a run's folder or one of its model_*.pt files."
        )
    check_settings(config, checkpoint, parent)
    different = settings_that_differ(config, checkpoint)
    fixed = {name: pair for name, pair in different.items() if name in SAME_IN_A_BRANCH and pair[1] != ""}
    if fixed:  # --init-from may be left out
        raise UserError(
            f"A branch takes over weights, optimizer state and position in the data of {parent}, so some settings must "
            f"be the same: {say(fixed)}. Give the flags of that run, which are in its run.txt, and change only others; "
            "or start a new run with --init-from."
        )
    if checkpoint["step"] >= config.max_steps:
        raise UserError(
            f"--max-steps is {config.max_steps}, but {parent} has done {checkpoint['step']} steps already. "
            "Give a branch more steps than that, or an earlier checkpoint."
        )
    changed = {name: [then, now] for name, (then, now) in different.items() if name not in MAY_CHANGE_ON_RESUME}
    checkpoint["branched"] = {"parent": str(folder), "step": checkpoint["step"], "changed": changed}
    checkpoint["best_val_loss"] = math.inf  # the parent's best weights are not in the branch's folder
    return checkpoint


def is_finished(config, start_step):
    """Whether the run has done its last step and has been exported; if so, prints that."""
    exported = Path(config.out_dir) / "hf"
    finished = start_step == config.max_steps and exported.exists()
    if finished:
        print0(
            f"The run in {config.out_dir} is finished, after {start_step} steps. Its model is in {exported}. To "
            f"extend it, use --branch-from {config.out_dir} with a larger --max-steps and another --out-dir."
        )
    return finished


def resumes(config):
    """Whether to continue the run in out_dir: with --no-resume, only if torchrun has restarted it after a crash."""
    return config.resume or (is_restart() and belongs_to_this_launch(config.out_dir))


def belongs_to_this_launch(out_dir):
    """Whether the run in out_dir was started by the torchrun that has now restarted this process."""
    launched = launch_time()
    starts = re.findall(r"^started: (.+)$", read_text(Path(out_dir) / "run.txt"), re.MULTILINE)
    if launched is None or not starts:
        return bool(starts)
    with contextlib.suppress(ValueError):
        return datetime.datetime.fromisoformat(starts[-1]).timestamp() >= math.floor(launched)
    return False


# ----------------------------------------------------------------------------------------------------------
# Starting a run


def is_ours(path):
    """Whether a file or folder in a run's folder has one of the names that this program uses."""
    return path.name in ("run.txt", "log.txt", BEST, "hf", "wandb") or CHECKPOINT_NAME.fullmatch(path.name) is not None


def start_run(config, start_step, branched):
    """Make out_dir the run's folder (with --no-resume, after moving an old run's files aside) and describe the start.

    Returns the folder's lock, which is held until the process ends.
    """
    out_dir = Path(config.out_dir)
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(out_dir)
        if not resumes(config):
            move_aside(out_dir)
        for leftover in out_dir.glob("*.part"):  # left by a process that was killed while writing
            if is_ours(leftover.with_suffix("")) and leftover.is_file():
                leftover.unlink()
    except OSError as error:
        raise UserError(
            f"Could not prepare the run's folder {out_dir}: {error.strerror}. "
            "Choose an --out-dir that you can write to."
        ) from None
    history = read_text(out_dir / "run.txt")
    with atomic_write(out_dir / "run.txt", "w", encoding="utf-8") as file:
        file.write(history + describe_run(config, start_step, branched))
    return lock


def move_aside(out_dir):
    """Move the files of the run in out_dir to a new folder next to it; other files stay where they are."""
    ours = sorted(filter(is_ours, out_dir.iterdir()), key=lambda path: path.name != "run.txt")  # run.txt first
    if not ours:
        return
    number = 1
    while Path(f"{out_dir.resolve()}.{number}").exists():
        number += 1
    aside = Path(f"{out_dir.resolve()}.{number}")
    aside.mkdir()
    for path in ours:
        path.rename(aside / path.name)
    print(f"Moved the old run from {out_dir} to {aside}.", flush=True)


def read_text(path):
    """The text of a file that people may have edited; "" if it does not exist."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        raise UserError(
            f"Could not open {path}: {error.strerror}. Check that it exists and that you have permission to read it."
        ) from None


def describe_run(config, start_step, branched):
    """What run.txt records of a start: command, configuration, versions, machine, commit."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    lines = {
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": describe_command(),
        "from step": str(start_step),
        "config": json.dumps(dataclasses.asdict(config)),
        "versions": f"python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}",
        "machine": f"{platform.platform()}, {os.cpu_count()} cores, {', '.join(gpus) or 'no GPU'}",
        "ranks": os.environ.get("WORLD_SIZE", "1"),
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else "",
    }
    if branched:
        lines["branched"] = json.dumps(branched)
    return "".join(f"{name}: {text}\n" for name, text in lines.items()) + "\n"


def facts_for_all_ranks(config):
    """What must be the same on all ranks: settings, and the versions of this program and of torch."""
    settings = dataclasses.asdict(config)
    facts = {name: value for name, value in settings.items() if name not in MAY_DIFFER_BETWEEN_RANKS}
    source = Path(__file__).parents[1] / "train_gpt2.py"
    version = hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    return facts | {"the version of train_gpt2.py": version, "the version of torch": str(torch.__version__)}


def facts_of_data(enc, train_loader, val_loader):
    """What must be the same on all ranks: the tokenizer and the data."""
    fingerprints = {"training data": train_loader.fingerprint[:12], "validation data": val_loader.fingerprint[:12]}
    return {"the tokenizer": enc.name, **fingerprints}


def dtype_of(config, saved, device):
    """The name of the dtype to use: with "auto", a run that continues keeps the one that it began with."""
    if not saved or config.dtype != "auto":
        return config.dtype
    name = saved["config"]["dtype"]
    # the first version saved "auto" itself, which was float32 for small models on a CPU
    return "float32" if name == "auto" and device == "cpu" and config.n_embd < 512 else name


def describe_command():
    """The command that started this process, quoted for a shell."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return shlex.join(["python", *sys.argv])
    local_ranks, ranks = os.environ["LOCAL_WORLD_SIZE"], os.environ["WORLD_SIZE"]
    nodes = "--standalone" if local_ranks == ranks else f"--nnodes={int(ranks) // int(local_ranks)}"
    return shlex.join(["torchrun", nodes, f"--nproc_per_node={local_ranks}", *sys.argv])


LOG_LINE = re.compile(r"(\d{1,15}) ([\w/.-]+) (-?\d{1,15}(\.\d{1,15})?(e[+-]\d\d)?)\n", re.ASCII)


def intact_log_lines(path, before):
    """The intact lines of a log.txt for steps before `before`. Warns of damaged lines, except a cut last one."""
    lines = read_text(path).splitlines(keepends=True)
    matches = [LOG_LINE.fullmatch(line) for line in lines]
    damaged = len(lines) - len(list(filter(None, matches)))
    if damaged > (bool(lines) and not lines[-1].endswith("\n")):  # a crash may have cut the last one short
        print(f"warning: {damaged} damaged lines of {path} are left out.", flush=True)
    return [match[0] for match in matches if match and int(match[1]) < before]


def open_log(out_dir, step, parent=None):
    """Open log.txt for appending, after dropping damaged lines and those from `step` on.

    A branch begins with the lines of its parent's log.
    """
    path = Path(out_dir) / "log.txt"
    lines = intact_log_lines(Path(parent) / "log.txt" if parent else path, step)
    with atomic_write(path, "w") as file:
        file.writelines(lines)
    return open(path, "a")


def install_signal_handlers():
    """Record SIGTERM, SIGINT and SIGHUP in the returned list, so that the current step can finish.

    A second SIGINT exits at once.
    """
    received = []

    def record(number, frame):
        if number == signal.SIGINT and signal.SIGINT in received:
            os._exit(128 + signal.SIGINT)
        received.append(number)

    for name in ("SIGTERM", "SIGINT", "SIGHUP"):  # Windows has no SIGHUP
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), record)
    return received


def diverged(step, loss, norm, where, out_dir):
    """The UserError for a loss or gradient norm that is not finite; `where` is what the batch read."""
    return UserError(
        f"Training diverged in step {step}: the loss is {loss} and the gradient norm {norm} in a batch with {where}, "
        "... Continue from an earlier checkpoint with a lower rate: "
        f"--branch-from {out_dir} --max-lr LOWER --out-dir NEW."
    )


# ----------------------------------------------------------------------------------------------------------
# A run while it lasts


class Run:
    """Writes a run's files and its lines on the console; on ranks other than 0, nothing."""

    def __init__(self, config, world, start_step, saved, metadata):
        """saved: the checkpoint that the run begins with, or None. metadata: what every checkpoint also contains."""
        self.config, self.world, self.out_dir = config, world, Path(config.out_dir)
        self.max_steps, self.start_step, self.metadata = config.max_steps, start_step, metadata
        self.val_loss = saved and saved["val_loss"]  # the last one measured
        best_val_loss = saved and saved["best_val_loss"]  # of model_best.pt
        self.best_val_loss = math.inf if best_val_loss is None else best_val_loss
        self.branched = saved and saved.get("branched")
        self.sample = ""
        self.signals = install_signal_handlers()  # received so far
        self.started = self.first_step_ended = time.perf_counter()
        self.checkpoint_seconds = 0.0  # of the training loop's time
        world.broadcast_from_master(self.open, saved)

    def open(self, saved):
        """Start the run in its folder."""
        self.lock = start_run(self.config, self.start_step, self.branched)
        self.log = open_log(self.out_dir, self.start_step, self.branched and self.branched["parent"])
        self.writer = CheckpointWriter(self.out_dir, self.config.keep_checkpoints, self.config.milestone_every)
        self.mirror = None
        if self.config.wandb:
            log_lines = intact_log_lines(self.out_dir / "log.txt", self.start_step)
            self.mirror = Mirror(self.config.wandb, self.out_dir, dataclasses.asdict(self.config), log_lines)
        if self.branched:  # with a checkpoint of its own, a branch no longer depends on its parent
            state = {name: value for name, value in saved.items() if name != "branched"}
            self.writer.write(state | self.metadata)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        """However the run ends, wait until its newest checkpoint is on disk, and release the folder."""
        if self.world.is_master:
            try:
                self.writer.wait()
            finally:
                if self.mirror:
                    self.mirror.finish(status=1 if exception[0] else 0)
                with contextlib.suppress(OSError):  # a full disk was reported by the write that found it
                    self.log.close()
                self.lock.close()

    def print_summary(self, raw_model, dtype, loader, num_val_windows, B, optimizers):
        """Print the sizes of the model, the data, the batch and the optimizer's groups."""
        world, c, S, T = self.world, self.config, self.config.total_batch_size, loader.T
        device = torch.cuda.get_device_name() if world.device_type == "cuda" else world.device
        self.flops_per_token, peak = flops_per_token(raw_model.config, T), peak_flops(device)
        self.peak = peak * world.size if peak else None
        num_params = sum(p.numel() for p in raw_model.parameters())
        float8 = ", output layer in float8" if raw_model.float8_lm_head else ""
        print0(f"model: {num_params:,} parameters on {world.size} x {device}, {dtype}{float8}")
        tokens, epochs = loader.num_windows * T, c.max_steps * S / (loader.num_windows * T)
        print0(
            f"data: {tokens:,} training tokens in {len(loader.shards)} shards, of which the run makes {epochs:.2f} "
            f"epochs; {num_val_windows * T:,} validation tokens; tokenizer {self.metadata['tokenizer']}"
        )
        print0(f"step: {S:,} tokens = B {B} * T {T} * {world.size} ranks * {S // (B * T * world.size)} micro-steps")
        groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
        sizes = ", ".join(f"{len(params)} tensors with {sum(p.numel() for p in params):,}" for params in groups)
        print0(f"optimizer: {c.optimizer} on groups of {sizes} parameters")
        branched = f", a branch of {self.branched['parent']}" if self.branched else ""
        print0(f"run: {self.out_dir}{branched}, from step {self.start_step} to {self.max_steps}")

    def report(self, step, text, **streams):
        """Print a line about a step and log its `step stream value` lines in one write."""
        if not self.world.is_master:
            return
        print(f"step {step:5d} | {text}", flush=True)
        try:
            self.log.write("".join(f"{step} {stream} {value:.9g}\n" for stream, value in streams.items()))
            self.log.flush()
        except OSError as error:
            raise UserError(
                f"Could not write {self.log.name}: {error.strerror}. Check that its folder exists, is writable and "
                "has free space, then run the same command again."
            ) from error
        if self.mirror:
            self.mirror.log(step, streams)

    def log_val_loss(self, step, loss, raw_model):
        """Log a validation loss; with --keep-best, keep the weights if it is the lowest so far."""
        self.val_loss = loss
        self.report(step, f"val loss {loss:.6f}", val=loss)
        if self.world.is_master and self.config.keep_best and loss < self.best_val_loss:
            self.best_val_loss = loss
            self.writer.write_best({"step": step, "val_loss": loss, "model": raw_model.state_dict(), **self.metadata})

    def log_samples(self, step, texts):
        """Print samples; the model card shows the last one."""
        self.sample = texts[-1]
        for text in texts:
            self.report(step, f"sample | {text!r}")

    def log_hellaswag(self, step, counts):
        accuracy = counts.acc_norm / counts.n
        self.report(step, f"HellaSwag {counts.acc_norm}/{counts.n} = {accuracy:.4f}", hella=accuracy)

    def log_step(self, step, loss, lr, norm, tokens, seconds):
        """Report the update of `step`, which took `seconds` for `tokens` tokens over all ranks."""
        rate = tokens / seconds
        mfu = f" | {rate * self.flops_per_token / self.peak:5.1%} MFU" if self.peak else ""
        seconds_left = min(self.seconds_left(step, seconds), 1e12)  # a timedelta has a maximum
        left = datetime.timedelta(seconds=round(seconds_left))
        text = f"loss {loss:.6f} | lr {lr:.4e} | norm {norm:7.4f} | {1e3 * seconds:8.2f} ms | {rate:9,.0f} tok/s"
        self.report(step, f"{text}{mfu} | {left} left", **{"train": loss, "lr": lr, "norm": norm, "tok/s": rate})

    def seconds_left(self, step, seconds):
        """How long the remaining steps will take at the average so far, evaluations and checkpoints included.

        The first step, which compiles, does not count.
        """
        if step == self.start_step:
            self.first_step_ended = time.perf_counter()
        else:
            seconds = (time.perf_counter() - self.first_step_ended) / (step - self.start_step)
        return seconds * (self.max_steps - step - 1)

    def save(self, step, state):
        """Write a checkpoint of `state`, as training_state of train_gpt2.py returns it, in the background."""
        if self.world.is_master and step > self.start_step:
            start = time.perf_counter()
            losses = {"val_loss": self.val_loss, "best_val_loss": self.best_val_loss}
            self.writer.write({"step": step, **losses, **state, **self.metadata})
            self.checkpoint_seconds += time.perf_counter() - start

    def finish(self, step, stopped, raw_model, enc):
        """End the run after `step` steps: wait for the checkpoint and, unless the run was stopped, export the model.

        Returns the exit status. A run that was stopped in its last step is not exported: it lacks its evaluations.
        """
        if self.world.is_master:
            self.writer.wait()
        if stopped:
            print0(f"Stopped after {step} steps. The checkpoint is written; the same command continues from here.")
            return 128 + signal.SIGINT if signal.SIGINT in self.signals else 0
        if self.world.is_master:
            export_huggingface(raw_model, enc, self.out_dir / "hf", self.out_dir, sample=self.sample)
            minutes = (time.perf_counter() - self.started) / 60
            on_cuda = self.world.device_type == "cuda"
            memory = f", at most {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if on_cuda else ""
            print(f"Done in {minutes:.1f} minutes{memory}, {self.checkpoint_seconds:.1f} s of it for checkpoints.")
            print(f"The model is in {self.out_dir / 'hf'}.")
            if self.config.keep_best and self.best_val_loss < math.inf:
                print(
                    f"The weights with the lowest validation loss, {self.best_val_loss:.4f}, are in "
                    f"{self.out_dir / BEST}."
                )
        return 0
