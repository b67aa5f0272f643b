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

from plumbing import checkpoint as checkpoints
from plumbing.cli import UserError, count, is_rank_0, print_next
from plumbing.distributed import flops_per_token, is_restart, print0
from plumbing.files import atomic_write, lock_folder, open_regular
from plumbing.huggingface import export_huggingface, is_export_of
from plumbing.log import read_log
from plumbing.mirror import Mirror
from plumbing.peaks import peak_flops
from tokenizer import has_chat_tokens

# settings that may change when a run is resumed: none of them affects what the model learns
MAY_CHANGE_ON_RESUME = set(
    "preset out_dir resume branch_from device compile activation_checkpointing batch_size data val_every "
    "hellaswag_every hellaswag_limit hellaswag_data sample_every sample_prompt checkpoint_every keep_checkpoints "
    "keep_best milestone_every wandb".split()
)

# settings that may differ from node to node: the places of its files, and its devices
MAY_DIFFER_BETWEEN_RANKS = {"data", "out_dir", "init_from", "branch_from", "hellaswag_data", "device"}

# settings that a branch must share with its parent: weights, optimizer state and position in the data depend on them
SAME_IN_A_BRANCH = {*checkpoints.SHAPE, "init_from", "optimizer", "sequence_length", "seed", "shuffle"}

# settings that a branch does not take over from its parent: they say where it runs, and which run it is
OWN_IN_A_BRANCH = {"preset", "out_dir", "resume", "branch_from", "device", "compile"}

# ----------------------------------------------------------------------------------------------------------
# Finding what a run continues


@contextlib.contextmanager
def claim(config, world):
    """Hold the lock on out_dir, taken on rank 0 before anything in it is read. Yields it, or None on other ranks."""
    locks = []
    world.broadcast_from_master(lambda: locks.append(lock_folder(config.out_dir)))
    try:
        yield locks[0] if locks else None
    finally:
        for lock in locks:
            lock.close()


def find_start(config, preset, enc, fingerprints):
    """Find what the run begins with, as a checkpoint's dict; empty if it begins from scratch. Modifies nothing.

    That is the newest intact checkpoint in out_dir, with "finished" if there is nothing left to do; or, when a branch
    first starts, that of --branch-from, with "branched" for run.txt; or the weights of --init-from. A folder with
    another run is refused. preset: the TrainConfig of --preset. fingerprints: one per split, of its shards.
    """
    out_dir, checkpoint = Path(config.out_dir), None
    if resumes(config):
        checkpoint = checkpoints.newest_checkpoint(out_dir)
        if checkpoint:
            check_resume(config, checkpoint["config"], out_dir)
        elif (out_dir / "log.txt").exists() and not (out_dir / "run.txt").exists():
            raise UserError(
                f"{out_dir} has a log but no run.txt, so it is not a run of train_gpt2.py. "
                "Choose another --out-dir, or move the log aside with --no-resume."
            )
    if not checkpoint and config.branch_from:
        checkpoint = find_parent(config)
    if not checkpoint:
        return checkpoints.load_initial_weights(config, preset, enc) if config.init_from else {}
    checkpoints.check_tokenizer(checkpoints.model_tokenizer(checkpoint), enc, config.data)
    check_data(checkpoint, fingerprints, config)
    is_last = checkpoint["step"] == config.max_steps
    n_head = checkpoint["config"]["n_head"]
    checkpoint["finished"] = is_last and is_export_of(out_dir / "hf", checkpoint["model"], n_head, enc)
    return checkpoint


def settings_that_differ(config, then, place):
    """{name: (then, now)} of the settings in which `config` differs from those of the run in `place`.

    A setting that did not exist yet counts as TrainConfig's default.
    """
    unknown = [name for name in then if not hasattr(config, name)]
    if unknown:
        raise UserError(
            f"The run in {place} has the setting {unknown[0]}, which this version of train_gpt2.py does not know. "
            "Continue it with the version that started it, or use its weights with --init-from."
        )
    different = {}
    for field in dataclasses.fields(config):
        name, now = field.name, getattr(config, field.name)
        before = then.get(name, field.default)
        left_to_the_run = {"dtype": "auto", "vocab_size": 0}.get(name)
        is_inherited = name in checkpoints.SHAPE and config.init_from
        if now != before and left_to_the_run not in (now, before) and not is_inherited:
            different[name] = before, now
    return different


def say(different):
    """Put the result of `settings_that_differ` into words: "seed was 1, now 7, init_from was not given, now gpt2"."""
    words = {name: ["not given" if value == "" else value for value in pair] for name, pair in different.items()}
    return ", ".join(f"{name} was {then}, now {now}" for name, (then, now) in words.items())


def check_resume(config, then, out_dir):
    """Raise UserError if the run in out_dir, whose settings are `then`, is a different one."""
    different = settings_that_differ(config, then, out_dir)
    different = {name: pair for name, pair in different.items() if name not in MAY_CHANGE_ON_RESUME}
    if different:
        raise UserError(
            f"{out_dir} has a run with other settings ({say(different)}). Use those to continue it; or use the new "
            f"ones in another folder, with --branch-from {out_dir} --out-dir NEW; or move the old run aside with "
            "--no-resume."
        )
    # a run that started elsewhere is not taken for this branch; a branch may also be resumed without the flag
    if config.branch_from and Path(config.branch_from) != Path(then.get("branch_from", "")):
        raise UserError(
            f"{out_dir} has a run that was not started with --branch-from {config.branch_from}. To continue it, leave "
            "that out; or choose another --out-dir, or move the old run aside with --no-resume."
        )


def check_data(checkpoint, fingerprints, config):
    """Raise UserError if the shards of --data are not those of the checkpoint's run."""
    then = {"train": checkpoint["loader"].get("fingerprint"), "val": checkpoint.get("val_fingerprint")}
    different = [split for split in then if then[split] not in (None, fingerprints[split])]  # old checkpoints have none
    if different:
        raise UserError(
            f"The {' and '.join(different)} shards in {config.data} are not those that the run was started on. Give "
            "the original shards with --data, or start another run on these with --init-from and another --out-dir."
        )


def inherit(config, parse):
    """The config of a branch or of a fine-tuning, with settings missing from the command taken from a model.

    A branch takes all of its parent's settings; a fine-tuning only the block size, and only if that is shorter.
    parse: parses the same command line once more, with these values in place of the presets' own.
    """
    own = [config.out_dir] if config.resume else []  # it has the settings, too, in case the other model is gone
    if config.branch_from:
        then = checkpoints.peek_settings(config.branch_from, *own)
        if not then:
            raise UserError(
                f"There is no checkpoint in {config.branch_from} that can be read. "
                "Give --branch-from the folder of a run or one of its model_*.pt files."
            )
        taken = {name: value for name, value in then.items() if hasattr(config, name) and name not in OWN_IN_A_BRANCH}
    elif config.init_from:
        length = checkpoints.peek_settings(*own, config.init_from).get("block_size", math.inf)
        taken = {name: min(length, getattr(config, name)) for name in ("block_size", "sequence_length")}
    else:
        return config
    changed = parse(taken)
    words = [f"{name} {value}" for name, value in taken.items() if getattr(config, name) != getattr(changed, name)]
    if words:
        print0(f"From {config.branch_from or config.init_from}: {', '.join(words)}.")
    return changed


def find_parent(config):
    """The checkpoint of --branch-from, with "branched": the parent's folder, the step, and the settings that change."""
    parent = Path(config.branch_from)
    folder = parent.parent if parent.is_file() else parent
    if folder.resolve() == Path(config.out_dir).resolve():  # also with --no-resume, which would move the parent aside
        raise UserError(
            f"--out-dir {config.out_dir} is the folder of the run that --branch-from continues. "
            "Choose another --out-dir for the branch."
        )
    checkpoint = checkpoints.newest_checkpoint(parent)
    different = settings_that_differ(config, checkpoint["config"], parent)
    fixed = {name: pair for name, pair in different.items() if name in SAME_IN_A_BRANCH and pair[1] != ""}
    if fixed:  # --init-from may be left out
        raise UserError(
            f"A branch takes over the state of {parent}, so some settings must be the same: {say(fixed)}. Leave these "
            "flags out, or start a new run with --init-from."
        )
    if checkpoint["step"] >= config.max_steps:
        raise UserError(
            f"--max-steps is {config.max_steps}, but {parent} has done {checkpoint['step']} steps already. "
            "Give a branch more steps than that, or an earlier checkpoint."
        )
    changed = {name: [then, now] for name, (then, now) in different.items() if name not in MAY_CHANGE_ON_RESUME}
    checkpoint["branched"] = {"parent": str(folder), "step": checkpoint["step"], "changed": changed}
    # the parent's best weights and its other checkpoints are not in the branch's folder
    return checkpoint | {"best_val_loss": math.inf, "temporary": []}


def is_finished(config, start):
    """Whether the run, which begins with the dict `start`, has nothing left to do; if so, prints a note."""
    if not (start and start.get("finished")):
        return False
    if is_rank_0():
        print(f"The run in {config.out_dir} is finished. Its model is in {Path(config.out_dir, 'hf')}.")
        print_next(*next_commands(config))
    return True


def resumes(config):
    """Whether to continue the run in out_dir: with --no-resume, only if torchrun has restarted it after a crash."""
    launches = re.findall(r"^launch: (.+)$", read_text(Path(config.out_dir, "run.txt")), re.MULTILINE)
    return config.resume or (is_restart() and launches[-1:] == [launch()])


def launch():
    """An identifier of the torchrun that started this process; it stays the same when torchrun restarts the ranks."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return f"process {os.getppid()}" if run_id == "none" else run_id  # none: torchrun without a rendezvous


# ----------------------------------------------------------------------------------------------------------
# Starting a run


def is_ours(path):
    """Whether a file or folder in a run's folder has one of the names that this program uses."""
    names = ("run.txt", "log.txt", checkpoints.BEST, "hf", "wandb")
    return path.name in names or checkpoints.CHECKPOINT_NAME.fullmatch(path.name) is not None


def start_run(config, start_step, saved):
    """Make out_dir the run's folder and describe the start in run.txt. Leftovers are moved aside.

    These are the files of an old run with --no-resume, those of a run that was stopped before its first checkpoint,
    and otherwise unreadable checkpoints later than the one that the run continues from.
    """
    out_dir = Path(config.out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    branched = saved and saved.get("branched")
    if saved and not branched:
        stale = [path for path in checkpoints.list_checkpoints(out_dir) if checkpoints.step_of(path) > start_step]
    else:
        stale = [path for path in out_dir.iterdir() if is_ours(path)]
        log = out_dir / "log.txt"
        if {path.name for path in stale} <= {"run.txt", "log.txt"} and not (log.exists() and log.stat().st_size):
            stale = []  # that run has no results
    move_aside(stale, out_dir)
    for leftover in out_dir.glob(".*.part"):  # left by a process that was killed while writing
        if is_ours(out_dir / leftover.stem[1:]) and leftover.is_file():
            leftover.unlink()
    history = read_text(out_dir / "run.txt")
    with atomic_write(out_dir / "run.txt", "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(history + describe_run(config, start_step, branched))


def move_aside(paths, out_dir):
    """Move files from out_dir to a new folder next to it."""
    if not paths:
        return
    number = 1
    while os.path.lexists(f"{out_dir.resolve()}.{number}"):
        number += 1
    aside = Path(f"{out_dir.resolve()}.{number}")
    aside.mkdir()
    for path in sorted(paths, key=lambda path: path.name != "run.txt"):  # run.txt first
        path.rename(aside / path.name)
    print(f"Moved {', '.join(sorted(path.name for path in paths))} from {out_dir} to {aside}.", flush=True)


def read_text(path):
    """The text of a file that people may have edited; "" if it does not exist."""
    try:
        with open_regular(path, "r", encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return ""


def describe_run(config, start_step, branched):
    """The entry for a start in run.txt: command, configuration, versions, machine, commit."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
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
        "commit": subprocess.run(git, capture_output=True).stdout.decode().strip() if shutil.which("git") else "",
    }
    if branched:
        lines["branched"] = json.dumps(branched)
    return "".join(f"{name}: {text}\n" for name, text in lines.items() if text) + "\n"


def facts_for_all_ranks(config):
    """Facts that must be the same on all ranks: settings, and the versions of this program and of torch."""
    settings = dataclasses.asdict(config)
    facts = {name: value for name, value in settings.items() if name not in MAY_DIFFER_BETWEEN_RANKS}
    source = Path(__file__).parents[1] / "train_gpt2.py"
    version = hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    return facts | {"the version of train_gpt2.py": version, "the version of torch": str(torch.__version__)}


def facts_of_data(enc, train_loader, val_loader):
    """Facts that must be the same on all ranks: the tokenizer and the data."""
    fingerprints = {"training data": train_loader.fingerprint[:12], "validation data": val_loader.fingerprint[:12]}
    return {"the tokenizer": enc.name, **fingerprints}


def dtype_of(config, saved):
    """The name of the dtype to use: with "auto", a run that continues keeps the one that it began with."""
    return saved["config"]["dtype"] if saved and config.dtype == "auto" else config.dtype


def command_words():
    """The words of the command that started this process."""
    local_ranks, ranks = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    if "TORCHELASTIC_RUN_ID" not in os.environ or not local_ranks or not ranks:
        return ["python", *sys.argv]
    nodes = "--standalone" if local_ranks == ranks else f"--nnodes={int(ranks) // int(local_ranks)}"
    return ["torchrun", nodes, f"--nproc_per_node={local_ranks}", *sys.argv]


def next_commands(config, enc=None):
    """The commands to run after a finished run: one to see what it has learned, one to train it for longer."""
    words = ["--chat"] if enc and has_chat_tokens(enc) else [config.sample_prompt]
    launcher = command_words()[: -len(sys.argv)]
    branch = [*launcher, "train_gpt2.py", "--branch-from", config.out_dir]
    branch += ["--out-dir", f"{config.out_dir}-longer", "--max-steps", 2 * config.max_steps]
    return ["python", "sample.py", *words, "-m", config.out_dir], branch


def open_log(out_dir, step, parent=None):
    """Open log.txt for appending, after dropping damaged lines and those from `step` on.

    A branch begins with the lines of its parent's log.
    """
    path = Path(out_dir) / "log.txt"
    source = Path(parent) / "log.txt" if parent else path
    lines = read_log(source, step) if source.exists() else ()
    with atomic_write(path, "w", encoding="utf-8") as file:
        file.writelines(f"{at} {stream} {value:.9g}\n" for at, stream, value in lines)
    return open(path, "a", encoding="utf-8")


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
    """The UserError for a loss or gradient norm that is not finite; `where` names windows of the batch."""
    return UserError(
        f"Training diverged in step {step}: the loss is {loss} and the gradient norm {norm}. The batch contains, among "
        f"others, {where}. Continue from an earlier checkpoint with a lower rate: "
        f"--branch-from {out_dir} --max-lr LOWER --out-dir NEW."
    )


# ----------------------------------------------------------------------------------------------------------
# A run in progress


class Run:
    """Writes a run's files and its lines on the console; on ranks other than 0, nothing."""

    def __init__(self, config, world, lock, start_step, saved, metadata):
        """lock: from `claim`. saved: the checkpoint that the run begins with, or None.

        metadata: what every checkpoint also contains.
        """
        self.config, self.world, self.lock, self.out_dir = config, world, lock, Path(config.out_dir)
        self.max_steps, self.start_step, self.metadata = config.max_steps, start_step, metadata
        self.val_loss = saved and saved["val_loss"]  # the last one measured
        best_val_loss = saved and saved["best_val_loss"]  # the loss of model_best.pt
        self.best_val_loss = math.inf if best_val_loss is None else best_val_loss
        self.branched = saved and saved.get("branched")
        self.sample = ""
        self.signals = install_signal_handlers()  # the signals received so far
        self.started = self.first_step_ended = time.perf_counter()
        self.checkpoint_seconds = 0.0  # the training loop's time spent on checkpoints
        world.broadcast_from_master(self.open, saved)

    def open(self, saved):
        """Start the run in its folder."""
        start_run(self.config, self.start_step, saved)
        self.log = open_log(self.out_dir, self.start_step, self.branched and self.branched["parent"])
        keep, every = self.config.keep_checkpoints, self.config.milestone_every
        temporary = temporary_checkpoints(self.out_dir, saved)
        self.writer = checkpoints.CheckpointWriter(self.lock, keep, every, temporary)
        self.mirror = None
        if self.config.wandb:
            lines = read_log(self.out_dir / "log.txt", self.start_step)
            self.mirror = Mirror(self.config.wandb, self.out_dir, dataclasses.asdict(self.config), lines)
        if self.branched:  # with a checkpoint of its own, a branch no longer depends on its parent
            state = {name: value for name, value in saved.items() if name not in ("branched", "finished")}
            self.writer.write(state | self.metadata)

    def __enter__(self):
        return self

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

    def print_summary(self, raw_model, dtype, loader, num_val_windows, B, optimizers):
        """Print the sizes of the model, the data and the batch, and what each optimizer trains."""
        world, c, S, T = self.world, self.config, self.config.total_batch_size, loader.T
        device = torch.cuda.get_device_name() if world.device_type == "cuda" else world.device
        self.flops_per_token, peak = flops_per_token(raw_model.config, T), peak_flops(device)
        self.peak = peak * world.size if peak else None
        num_params = sum(p.numel() for p in raw_model.parameters())
        float8 = ", output layer in float8" if raw_model.float8_lm_head else ""
        print0(f"model: {num_params:,} parameters on {world.size} x {device}, {dtype}{float8}")
        tokens = loader.num_windows * T
        epochs = c.max_steps * S / tokens
        share = f"which the run reads {epochs:.1f} times"
        if epochs < 1:
            share = f"of which the run reads {100 * epochs:.2g}%"
        shards = count(len(loader.shards), "shard")
        print0(f"data: {tokens:,} training tokens in {shards}, {share}")
        print0(f"validation: {num_val_windows * T:,} tokens; tokenizer {self.metadata['tokenizer']}")
        micro_steps = count(S // (B * T * world.size), "micro-step")
        print0(f"step: {S:,} tokens = B {B} * T {T} * {count(world.size, 'rank')} * {micro_steps}")
        sizes = [sum(p.numel() for group in o.param_groups for p in group["params"]) for o in optimizers]
        names = [f"{type(o).__name__} for {size:,} parameters" for o, size in zip(optimizers, sizes)]
        print0(f"optimizer: {' and '.join(names)}")
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
        rate = tokens / max(seconds, 1e-6)  # a clock may stand still
        streams = {"train": loss, "lr": lr, "norm": norm, "tok/s": rate}
        # the columns line up and fit into 80 characters; with MFU, there is room for fewer digits
        words = [f"loss {loss:6.3f}" if self.peak else f"loss {loss:7.4f}", f"lr {lr:.1e}".replace("e-0", "e-")]
        words.append(f"norm {norm:4.1f}" if self.peak else f"norm {norm:5.2f}")
        words.append(f"{1e3 * seconds:3.0f} ms" if seconds < 0.9995 else f"{short(seconds):>4} s")
        words.append(f"{short(rate):>4} tok/s")
        if self.peak:
            words.append(f"{rate * self.flops_per_token / self.peak:3.0%} MFU")
        words.append(f"{duration(self.seconds_left(step, seconds)):>4} left")
        self.report(step, (" " if self.peak else "  ").join(words), **streams)

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
        status = 128 + signal.SIGINT if stopped and signal.SIGINT in self.signals else 0
        if not self.world.is_master:
            return status
        self.writer.wait()
        if stopped:
            verb = "continues, because a checkpoint is written" if step else "begins again"
            print(f"Stopped after {count(step, 'step')}. The same command {verb}.")
            print_next(command_words())
            return status
        hf = self.out_dir / "hf"
        print(f"Exporting the model to {hf}.", flush=True)
        export_huggingface(raw_model, enc, hf, self.out_dir, sample=self.sample)
        seconds = time.perf_counter() - self.started
        took = count(round(seconds), "second") if seconds < 100 else count(round(seconds / 60), "minute")
        if self.checkpoint_seconds > 1:
            took += f", {self.checkpoint_seconds:.0f} seconds of it for checkpoints"
        if self.world.device_type == "cuda":
            took += f", with at most {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB of GPU memory"
        print(f"Done in {took}. The notebook play.ipynb draws what the run has logged.")
        if self.config.keep_best and self.best_val_loss < math.inf:
            best = self.out_dir / checkpoints.BEST
            print(f"The weights with the lowest validation loss, {self.best_val_loss:.4f}, are in {best}.")
        print_next(*next_commands(self.config, enc))
        return status


def temporary_checkpoints(out_dir, saved):
    """The steps of the checkpoints in out_dir that a run which begins with the dict `saved` may delete."""
    if saved and "temporary" not in saved:  # an old checkpoint: its settings say which are milestones
        every = saved["config"].get("milestone_every", 0)
        steps = [checkpoints.step_of(path) for path in checkpoints.list_checkpoints(out_dir)]
        return [step for step in steps if step <= saved["step"] and not (every and step % every == 0)]
    return saved["temporary"] if saved else []


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
    return f"{minutes}m" if minutes < 100 else f"{short(minutes / 60)}h" if minutes < 6000 else f"{minutes // 1440}d"
