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
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch

from plumbing import checkpoint as checkpoints
from plumbing.cli import UserError, count, print_next
from plumbing.distributed import environment_number, flops_per_token, git_commit, is_restart, peak_flops, print0
from plumbing.files import atomic_write, free_name, lock_folder, open_regular
from plumbing.huggingface import export_huggingface, is_export_of
from plumbing.log import read_log
from plumbing.mirror import Mirror
from plumbing.modelcard import write_model_card
from tokenizer import has_chat_tokens

# settings that may change when a run is resumed, because they do not affect what the model learns
MAY_CHANGE_ON_RESUME = set(
    "preset out_dir resume device compile activation_checkpointing batch_size data val_every hellaswag_every "
    "hellaswag_limit hellaswag_data sample_every sample_prompt checkpoint_every keep_checkpoints keep_best "
    "milestone_every wandb".split()
)
LEFT_OPEN = {"dtype": "auto", "vocab_size": 0, "branch_from": ""}  # these values mean: as the run has it
# settings that may differ from node to node
MAY_DIFFER_BETWEEN_RANKS = {"data", "out_dir", "init_from", "branch_from", "hellaswag_data", "device"}
# settings that a branch must share with its parent, because the state depends on them
SAME_IN_A_BRANCH = {*checkpoints.SHAPE, "init_from", "optimizer", "sequence_length", "seed", "shuffle"}
# settings that a branch does not take over from its parent
OWN_IN_A_BRANCH = {"preset", "out_dir", "resume", "branch_from", "device", "compile"}
# the names of what this program writes into a run's folder
OURS = re.compile(rf"(run|log)\.txt|hf|wandb|{checkpoints.BEST}|{checkpoints.CHECKPOINT_NAME.pattern}")

# ----- Finding what a run continues ---------------------------------------------------------------------


def claim(config, world):
    """The lock on out_dir, taken on rank 0 before anything in it is read; a context of None on other ranks."""
    locks = []
    world.broadcast_from_master(lambda: locks.append(lock_folder(config.out_dir)))
    return locks[0] if locks else contextlib.nullcontext()


def inherit(config, parse):
    """The config of a branch, with its parent's settings, or of a fine-tuning, with a block size that is not longer.

    parse: parses the same command line once more, with these values in place of the presets' own.
    """
    source = config.branch_from or config.init_from
    if not source:
        return config
    own = [config.out_dir] if config.resume else []  # it has the settings, too, in case the other model is gone
    then = checkpoints.peek_settings(*own, source)
    if not config.branch_from:
        length = then.get("block_size", math.inf)
        taken = {name: min(length, getattr(config, name)) for name in ("block_size", "sequence_length")}
    elif "max_steps" in then:  # the settings of a run
        taken = {
            name: value for name, value in then.items() if hasattr(config, name) and name not in OWN_IN_A_BRANCH
        }
    else:
        raise UserError(
            f"There is no checkpoint in {source} that can be read. Give a run's folder or a model_*.pt."
        )
    changed = parse(taken)
    words = [f"{name} {value}" for name, value in vars(changed).items() if value != getattr(config, name)]
    if words:
        print0(f"From {source}: {', '.join(words)}.")
    return changed


def find_start(config, preset, enc, fingerprints):
    """Find what the run begins with, as a checkpoint's dict; empty if it begins from scratch. Modifies nothing.

    That is the newest intact checkpoint in out_dir, with "finished" if nothing is left to do; or, for a new branch,
    that of --branch-from, with "branched" for run.txt; or the weights of --init-from. fingerprints: {data: its own}.
    """
    saved = load_state(config.out_dir) if resumes(config) else None
    branched = None
    if saved:
        different = changes(config, saved["config"])
        if different:
            raise UserError(
                f"{config.out_dir} has a run with other settings ({say(different)}). Use those to continue it, or add "
                f"--no-resume to move it aside, or --branch-from {config.out_dir} --out-dir NEW to branch off."
            )
    elif config.branch_from:
        saved = load_state(config.branch_from)
        branched = check_branch(config, saved)
        # the parent's best weights and its other checkpoints are not in the branch's folder
        saved |= {"best_val_loss": math.inf, "temporary": []}
    else:
        return checkpoints.load_initial_weights(config, preset, enc) if config.init_from else {}
    checkpoints.check_tokenizer(checkpoints.model_tokenizer(saved), enc, config.data)
    then = {"training data": saved["loader"].get("fingerprint"), "validation data": saved["val_fingerprint"]}
    if any(then[data] not in (None, fingerprints[data]) for data in then):  # older versions wrote none
        raise UserError(
            f"The shards in {config.data} are not those of the run. Give those with --data, or start another run."
        )
    hf, finished = Path(config.out_dir, "hf"), False
    if saved["step"] == config.max_steps:
        finished = is_export_of(hf, saved["model"], saved["config"], enc)
    if finished:
        print(f"The run in {config.out_dir} is finished. Its model is in {hf}.")
        print_next(*next_commands(config, enc))
    return saved | {"finished": finished, "branched": branched}


def load_state(source):
    """Load the newest checkpoint of a run or of a file, or None. UserError if it lacks what a run continues from."""
    saved = checkpoints.newest_checkpoint(source)
    if saved and "optimizer" not in saved:
        raise UserError(
            f"{source} has weights, but no state of a run. To start a run from them, use --init-from."
        )
    return saved and {"temporary": [], "val_fingerprint": None} | saved  # older versions did not write these


def changes(config, then):
    """{name: (then, now)} of the settings that affect the losses and in which `config` differs from those of a run."""
    # a setting that did not exist yet counts as TrainConfig's default
    now, then = dataclasses.asdict(config), dataclasses.asdict(type(config)()) | then
    free = MAY_CHANGE_ON_RESUME | {name for name, value in LEFT_OPEN.items() if now[name] == value}
    if config.init_from:
        free |= {*checkpoints.SHAPE}  # the model's
    different = {}
    for name, before in then.items():
        after = now.get(name, "unknown")
        if name not in free and str(before).rstrip("/") != str(after).rstrip("/"):  # "log/" is the folder "log"
            different[name] = (before, after)
    return different


def say(different):
    """The result of `changes` in words."""
    return ", ".join(f"{name} was {then!r}, now {now!r}" for name, (then, now) in different.items())


def check_branch(config, saved):
    """Refuse a branch that cannot continue from the checkpoint `saved`. Returns what run.txt says of it, as a dict."""
    parent = Path(config.branch_from)
    folder = parent.parent if parent.is_file() else parent
    if folder.samefile(config.out_dir):  # also with --no-resume, which would move the parent aside
        raise UserError(
            f"--branch-from continues the run in {folder} itself. Choose another --out-dir for the branch."
        )
    changed = changes(config, saved["config"])
    changed.pop("branch_from", None)
    fixed = {name: pair for name, pair in changed.items() if name in SAME_IN_A_BRANCH}
    if fixed:
        raise UserError(
            f"A branch of {parent} keeps its settings: {say(fixed)}. Leave them out, or use --init-from."
        )
    if saved["step"] >= config.max_steps:
        done, steps = saved["step"], config.max_steps
        raise UserError(f"--max-steps is {steps}, but {parent} has done {done} steps already. Give more steps.")
    return {"parent": str(folder), "step": saved["step"], "changed": changed}


def resumes(config):
    """Whether to continue the run in out_dir: with --no-resume, only if torchrun has restarted it after a crash."""
    if config.resume or not is_restart():
        return config.resume
    return f"\nlaunch: {launch()}\n".encode() in read_history(Path(config.out_dir, "run.txt"))


def launch():
    """An identifier of the torchrun that started this process, which is the same after a restart."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return f"process {os.getppid()}" if run_id == "none" else run_id  # none: torchrun without a rendezvous


# ----- Starting a run -----------------------------------------------------------------------------------


def start_run(config, start_step, saved):
    """Describe the start in out_dir's run.txt, and move aside an old run, or checkpoints that cannot be read."""
    out_dir = Path(config.out_dir)
    if saved and not saved["branched"]:
        stale = [
            path for path in checkpoints.list_checkpoints(out_dir) if checkpoints.step_of(path) > start_step
        ]
    else:
        stale = [path for path in out_dir.iterdir() if OURS.fullmatch(path.name)]
        if not any(path.is_dir() or path.stat().st_size for path in stale if path.name != "run.txt"):
            stale = []  # that run has no results
    if stale:
        aside = free_name(out_dir.resolve())
        aside.mkdir()
        for path in stale:
            path.rename(aside / path.name)
        names = ", ".join(sorted(path.name for path in stale))
        print(f"Moved {names} from {out_dir} to {aside}.", flush=True)
    for leftover in out_dir.glob(".*.part"):  # left by a process that was killed while writing
        if OURS.fullmatch(leftover.stem[1:]) and leftover.is_file():
            leftover.unlink()
    path = out_dir / "run.txt"
    history = read_history(path)
    with atomic_write(path) as file:
        file.write(history + describe_run(config, start_step, saved).encode("utf-8", "surrogateescape"))


def read_history(path):
    try:
        with open_regular(path) as file:
            return file.read()
    except FileNotFoundError:
        return b""


def describe_run(config, start_step, saved):
    """The entry for a start in run.txt: command, configuration, versions, machine, commit."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    lines = {
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(command_words()),
        "launch": launch(),
        "from step": str(start_step),
        "config": json.dumps(dataclasses.asdict(config)),
        "versions": f"python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}",
        "machine": f"{platform.platform()}, {os.cpu_count()} cores, {', '.join(gpus) or 'no GPU'}",
        "ranks": os.environ.get("WORLD_SIZE", "1"),
        "commit": git_commit(),
        "branched": json.dumps(saved["branched"]) if saved.get("branched") else "",
    }
    return "".join(f"{name}: {text}\n" for name, text in lines.items() if text) + "\n"


def facts_for_all_ranks(config):
    """Facts that must be the same on all ranks: settings, and the versions of this program and of torch."""
    facts = dataclasses.asdict(config)
    for name in MAY_DIFFER_BETWEEN_RANKS:
        del facts[name]
    source = (Path(__file__).parents[1] / "train_gpt2.py").read_bytes()
    facts["the version of train_gpt2.py"] = hashlib.sha256(source).hexdigest()[:12]
    facts["the version of torch"] = str(torch.__version__)
    return facts


def command_words():
    """The words of the command that started this process."""
    local_ranks, ranks = environment_number("LOCAL_WORLD_SIZE", 0), environment_number("WORLD_SIZE", 0)
    if not local_ranks:
        return ["python", *sys.argv]
    nodes = "--standalone" if local_ranks == ranks else f"--nnodes={ranks // local_ranks}"
    return ["torchrun", nodes, f"--nproc_per_node={local_ranks}", *sys.argv]


def next_commands(config, enc):
    """The commands to run after a run: one to see what it has learned, one to train it for longer."""
    words = ["--chat"] if has_chat_tokens(enc) else [config.sample_prompt]
    launcher = command_words()[: -len(sys.argv)]
    branch = [*launcher, "train_gpt2.py", "--branch-from", config.out_dir]
    branch += ["--out-dir", f"{config.out_dir}-longer", "--max-steps", 2 * config.max_steps]
    return ["python", "sample.py", *words, "-m", config.out_dir], branch


def open_log(out_dir, parent, step):
    """Open log.txt, which begins with the intact lines of the parent's (or its own) for steps below `step`."""
    path, source = Path(out_dir, "log.txt"), Path(parent, "log.txt")
    with atomic_write(path, "w", encoding="utf-8") as file:
        for at, stream, value in read_log(source, step) if source.exists() else ():
            file.write(f"{at} {stream} {value:.9g}\n")
    return open(path, "a", encoding="utf-8")


def install_signal_handlers():
    """Record the signals to stop in the returned list, so that the step can finish. A second SIGINT exits at once."""
    received = []

    def record(number, frame):
        if number == signal.SIGINT and number in received:
            os._exit(128 + number)
        received.append(number)

    for number in (signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGHUP", signal.SIGINT)):  # no HUP on Windows
        signal.signal(number, record)
    return received


def diverged(step, loss, norm, where, out_dir):
    """The UserError for a loss or gradient norm that is not finite; `where` names windows of the batch."""
    return UserError(
        f"Training diverged in step {step}: the loss is {loss}, the gradient norm {norm}. The batch has, among others, "
        f"{where}. Lower the rate: --branch-from {out_dir} --max-lr LOWER --out-dir NEW."
    )


# ----- A run in progress --------------------------------------------------------------------------------


class Run(contextlib.AbstractContextManager):
    """Writes a run's files and its lines on the console; on ranks other than 0, nothing."""

    def __init__(self, config, world, lock, saved, metadata):
        """lock: from `claim`. saved: the checkpoint that the run begins with, or {}. metadata: goes into every one."""
        self.config, self.world, self.metadata, self.out_dir = config, world, metadata, Path(config.out_dir)
        self.start_step, self.max_steps = saved.get("step", 0), config.max_steps
        self.val_loss = saved.get("val_loss")  # the last one measured
        self.best_val_loss = saved.get("best_val_loss", math.inf)  # that of model_best.pt
        self.branched, self.sample = saved.get("branched"), ""
        self.signals = install_signal_handlers()  # the signals received so far
        self.started = self.first_step_ended = time.perf_counter()
        world.broadcast_from_master(self.open, lock, saved)

    def open(self, lock, saved):
        c = self.config
        start_run(c, self.start_step, saved)
        parent = self.branched["parent"] if self.branched else self.out_dir
        self.log = open_log(self.out_dir, parent, self.start_step)
        temporary = saved.get("temporary", [])
        self.writer = checkpoints.CheckpointWriter(lock, c.keep_checkpoints, c.milestone_every, temporary)
        self.mirror = Mirror(c, read_log(self.out_dir / "log.txt")) if c.wandb else None
        if self.branched:  # with a checkpoint of its own, a branch no longer depends on its parent
            del saved["branched"], saved["finished"]
            self.writer.write(saved | self.metadata)

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

    def print_summary(self, raw_model, loader, num_val_windows, B, optimizers):
        world, S, T = self.world, self.config.total_batch_size, loader.T
        device = torch.cuda.get_device_name() if world.device_type == "cuda" else world.device
        self.flops_per_token, self.peak = flops_per_token(raw_model.config, T), peak_flops(device)
        num_params = sum(p.numel() for p in raw_model.parameters())
        print0(f"model: {num_params:,} parameters on {world.size} x {device}, {self.config.dtype}")
        tokens = loader.num_windows * T
        print0(f"data: {tokens:,} training tokens, which the run reads {self.max_steps * S / tokens:.3g} times")
        print0(f"validation: {num_val_windows * T:,} tokens; tokenizer {self.metadata['tokenizer']}")
        micro_steps = S // (B * T * world.size)
        print0(f"step: {S:,} tokens = B {B} * T {T} * ranks {world.size} * micro-steps {micro_steps}")
        for optimizer in optimizers:
            size = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
            print0(f"optimizer: {type(optimizer).__name__} for {size:,} parameters")
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
            error.filename = self.log.name  # a failed write does not set it
            raise
        if self.mirror:
            self.mirror.log(step, streams)

    def log_val_loss(self, step, loss, bpb, raw_model):
        """Log a validation loss and its bits per byte; with --keep-best, keep the weights of the lowest so far."""
        self.val_loss = loss
        self.report(step, f"val loss {loss:.6f} | {bpb:.4f} bits per byte", val=loss, val_bpb=bpb)
        if self.world.is_master and self.config.keep_best and loss < self.best_val_loss:
            self.best_val_loss = loss
            best = {"step": step, "val_loss": loss, "model": raw_model.state_dict(), **self.metadata}
            self.writer.submit(checkpoints.BEST, best)

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
        self.report(step, text, **{"train": loss, "lr": lr, "norm": norm, "tok/s": rate})

    def seconds_left(self, step, seconds):
        """How long the remaining steps take at the average since the first one, which compiles."""
        if step == self.start_step:
            self.first_step_ended = time.perf_counter()
        else:
            seconds = (time.perf_counter() - self.first_step_ended) / (step - self.start_step)
        return seconds * (self.max_steps - step - 1)

    def save(self, step, state):
        """Write a checkpoint of `state`, as training_state of train_gpt2.py returns it, in the background."""
        if self.world.is_master and step > self.start_step:
            losses = {"val_loss": self.val_loss, "best_val_loss": self.best_val_loss}
            self.writer.write({"step": step, **losses, **state, **self.metadata})

    def finish(self, step, stopped, raw_model, enc):
        """End the run after `step` steps: export the model, unless the run was stopped. Returns the exit status."""
        status = 128 + signal.SIGINT if stopped and signal.SIGINT in self.signals else 0
        if not self.world.is_master:
            return status
        self.writer.wait()
        if stopped:
            print(f"Stopped after {count(step, 'step')}. The same command continues the run.")
            print_next(command_words())
            return status
        hf = self.out_dir / "hf"
        print(f"Exporting the model to {hf}.", flush=True)
        export_huggingface(raw_model, enc, hf)
        write_model_card(hf, self.out_dir, sample=self.sample)
        took = duration(time.perf_counter() - self.started)
        if self.world.device_type == "cuda":
            took += f", with at most {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB of GPU memory"
        print(f"Done in {took}. The notebook play.ipynb draws what the run has logged.")
        if self.best_val_loss < math.inf:
            best = self.out_dir / checkpoints.BEST
            print(f"The weights with the lowest validation loss, {self.best_val_loss:.4f}, are in {best}.")
        print_next(*next_commands(self.config, enc))
        return status


def short(number):
    """A positive number in at most four characters: 1.234 -> "1.2", 852.1 -> "852", 58234 -> "58K"."""
    unit = ""
    for larger in "KMGT":
        if number >= 999.5:
            number, unit = number / 1000, larger
    return f"{number:.0f}{unit}" if number >= 9.95 else f"{number:.1f}{unit}"


def duration(seconds):
    """A time in at most four characters: 156 -> "2:36", 1000 -> "16m", 16300 -> "4.5h", 400000 -> "111h"."""
    minutes = int(seconds) // 60
    if minutes < 10:
        return f"{minutes}:{int(seconds) % 60:02d}"
    if minutes < 100:
        return f"{minutes}m"
    return f"{short(minutes / 60)}h" if minutes < 6000 else f"{minutes // 1440}d"
