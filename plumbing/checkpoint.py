"""The folder of a run: found, started, described or refused; its log and its checkpoints; the signals that end it."""

import dataclasses
import datetime
import json
import math
import os
import pickle
import platform
import shutil
import signal
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

import tokenizer
from plumbing import cli
from plumbing.cli import UserError
from plumbing.distributed import flops_per_token, peak_flops, print0
from plumbing.huggingface import export_huggingface, load_huggingface

SHAPE = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")  # the fields of GPTConfig
OPENAI_MODELS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")

# fields that may change when a run is resumed: none of them affects what the model learns
MAY_CHANGE_ON_RESUME = {
    "out_dir", "resume", "device", "compile", "activation_checkpointing", "batch_size", "data",
    "val_every", "hellaswag_every", "hellaswag_limit", "hellaswag_data", "sample_every", "sample_prompt",
    "checkpoint_every", "keep_checkpoints",
}  # fmt: skip

# ----------------------------------------------------------------------------------------------------------
# Reading checkpoints


def list_checkpoints(folder):
    """The paths of a folder's checkpoints, oldest first."""
    paths = [path for path in Path(folder).glob("model_*.pt") if path.stem.removeprefix("model_").isdigit()]
    return sorted(paths, key=lambda path: int(path.stem.removeprefix("model_")))


def load_checkpoint(path):
    """Load a checkpoint's dict onto the CPU. weights_only: tensors and plain data, so that no file can run code."""
    not_ours = f"{path} is not a checkpoint of train_gpt2.py"
    remedy = "Use a model_*.pt file from one of its runs."
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns about the pickle protocol of other files
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        missing = {"model", "optimizer", "config", "step", "loader", "tokenizer_file"} - set(checkpoint)
        missing |= set(SHAPE) - set(checkpoint.get("config", ()))
    except (pickle.UnpicklingError, TypeError, AttributeError):
        raise UserError(f"{not_ours}, or it contains code, which is never run. {remedy}") from None
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        if getattr(error, "errno", None):
            raise UserError(
                f"Could not open checkpoint {path}: {error.strerror}. "
                "Check that it exists and that you have permission to read it."
            ) from None
        reason = (str(error).splitlines() or ["it is empty"])[0].rstrip(".")
        raise UserError(
            f"Checkpoint {path} is damaged: {reason}. Use another one, or copy it again from where it came."
        ) from None
    if missing:
        raise UserError(f"{not_ours}: it has no {', '.join(sorted(missing))}. {remedy}")
    return checkpoint


def newest_checkpoint(folder):
    """The newest intact checkpoint in a folder, as a dict, or None if there are none.

    Reports the damaged ones that it skips. Raises UserError if all are.
    """
    paths = list_checkpoints(folder)
    for path in reversed(paths):
        try:
            return load_checkpoint(path)
        except UserError as error:
            print(f"warning: {error} Skipping it and trying the checkpoint before it.", flush=True)
    if paths:
        raise UserError(
            f"None of the checkpoints in {folder} can be read, for the reasons above. "
            "Restore one from a backup, or train again with train_gpt2.py --no-resume."
        )
    return None


def model_state(checkpoint):
    """(shape, weights) of a checkpoint's dict: GPTConfig's fields and a state dict for GPT."""
    return {name: checkpoint["config"][name] for name in SHAPE}, checkpoint["model"]


def model_tokenizer(checkpoint):
    """The tokenizer in a checkpoint's dict."""
    try:
        return tokenizer.loads(checkpoint["tokenizer_file"])
    except ValueError as error:
        raise UserError(f"The checkpoint's tokenizer is damaged: {error}. Use another checkpoint.") from None


def load_model_state(source):
    """(shape, weights, tokenizer) of a GPT-2 name, a Hugging Face folder, a checkpoint, or a run's newest."""
    path = Path(source)
    if path.is_file():
        checkpoint = load_checkpoint(path)
        return *model_state(checkpoint), model_tokenizer(checkpoint)
    if (path / "config.json").exists() or source in OPENAI_MODELS:
        shape, weights = load_huggingface(source)
        trained = path / "tokenizer.tiktoken"  # export_huggingface leaves it there
        return shape, weights, tokenizer.get_encoding(str(trained) if trained.exists() else "gpt2")
    checkpoint = newest_checkpoint(path)
    if checkpoint is None and path.is_dir():
        raise UserError(
            f"The folder {source} has neither a checkpoint (model_*.pt) nor a config.json. "
            "Give a run's folder, or one in Hugging Face format."
        )
    if checkpoint is None:
        raise UserError(
            f"There is no model called {str(source)!r}. Give a checkpoint, a run's folder, a folder in Hugging Face "
            f"format or the name of a GPT-2. {cli.suggest(str(source), OPENAI_MODELS)}"
        )
    return *model_state(checkpoint), model_tokenizer(checkpoint)


def check_tokenizer(model_enc, enc, data):
    """Raise UserError unless the shards in `data`, of tokenizer `enc`, are of the model's tokenizer."""
    if model_enc.name.removesuffix("+chat") != enc.name.removesuffix("+chat"):
        raise UserError(
            f"The shards in {data} were made with tokenizer {enc.name}, but the model uses {model_enc.name}. "
            "Make shards with the model's tokenizer and give their folder with --data."
        )


def check_vocab_size(vocab_size, enc):
    """Raise UserError if a model of vocab_size rows has no row for some id of the tokenizer."""
    if vocab_size < enc.n_vocab:
        raise UserError(
            f"The model has room for {vocab_size} token ids, but tokenizer {enc.name} has {enc.n_vocab}. "
            f"Leave --vocab-size out, or set it to at least {enc.n_vocab}."
        )


def check_weights(weights, template):
    """Raise UserError unless the state dict `weights` has the names and shapes of `template`."""
    missing = [name for name in template if name not in weights]
    foreign = [name for name in weights if name not in template]
    wrong = [name for name in template if name in weights and weights[name].shape != template[name].shape]
    if missing or foreign or wrong:
        reason = (
            f"it has no {missing[0]}" if missing
            else f"it has {foreign[0]}, which GPT-2 does not have" if foreign
            else f"{wrong[0]} has the shape {tuple(weights[wrong[0]].shape)} instead of {tuple(template[wrong[0]].shape)}"
        )  # fmt: skip
        raise UserError(
            f"The model's weights do not fit its own settings: {reason}. It was probably changed after it was "
            "written; use another one."
        )


def padded_vocab_size(enc):
    """Rows of the embedding for a tokenizer: 50,257 tokens become 50,304 rows, even tiles for the matmuls."""
    return math.ceil(enc.n_vocab / 64) * 64


def resize(shape, weights, block_size, vocab_size):
    """Truncate the positions of a model's state to block_size and pad its vocabulary to at least vocab_size rows.

    New rows are the mean of the existing ones: a row of zeros would give logit 0, far above what a trained
    model assigns to most tokens.
    """
    wte, wpe = weights["transformer.wte.weight"], weights["transformer.wpe.weight"]
    new_rows = wte.mean(0).expand(max(0, vocab_size - len(wte)), -1)
    wte = torch.cat([wte, new_rows])
    wpe = wpe[:block_size].clone()
    shape = shape | {"vocab_size": len(wte), "block_size": len(wpe)}
    tied = {"transformer.wte.weight": wte, "lm_head.weight": wte, "transformer.wpe.weight": wpe}
    return shape, weights | tied


def load_initial_weights(config, enc):
    """(shape, weights) of --init-from, fitted to the run's block size and to the tokenizer of its data."""
    shape, weights, model_enc = load_model_state(config.init_from)
    check_tokenizer(model_enc, enc, config.data)
    shape, weights = resize(shape, weights, config.block_size, max(config.vocab_size, padded_vocab_size(enc)))
    if config.sequence_length > shape["block_size"]:
        raise UserError(
            f"--sequence-length {config.sequence_length} is longer than the {shape['block_size']} tokens that "
            f"{config.init_from} can read. Lower it to that or less."
        )
    return shape, weights


# ----------------------------------------------------------------------------------------------------------
# Writing checkpoints


def copy_to_cpu(state):
    """Copy the tensors in nested dicts and lists to the CPU, so that further training cannot change them."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {name: copy_to_cpu(value) for name, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [copy_to_cpu(value) for value in state]
    return state


def write_checkpoint(path, checkpoint, keep):
    """Write a checkpoint atomically, then delete all but the newest `keep`.

    Checkpoints of later steps are deleted, too: they were damaged, or the run would have resumed from them.
    """
    try:
        with cli.atomic_write(path) as file:
            torch.save(checkpoint, file)
    except RuntimeError as error:  # how torch's writer reports a write that failed
        reason = (str(error).splitlines() or ["RuntimeError"])[0].rstrip(".")
        raise UserError(
            f"Could not write {path}: {reason}. Check that its folder exists, is writable and has free space, "
            "then run the same command again."
        ) from None
    paths = list_checkpoints(path.parent)
    newest = paths.index(path)
    for unwanted in paths[: max(0, newest + 1 - keep)] + paths[newest + 1 :]:
        unwanted.unlink()


class CheckpointWriter:
    """Writes checkpoints in the background: the training loop waits for the copy to the CPU, not for the disk."""

    def __init__(self, out_dir, keep):
        self.out_dir, self.keep = Path(out_dir), keep
        self.executor, self.pending = ThreadPoolExecutor(1), None
        self.seconds = 0.0  # that the training loop has spent here

    def write(self, checkpoint):
        """Copy the checkpoint to the CPU and write it in the background, after the previous one has finished."""
        start = time.perf_counter()
        self.wait()
        checkpoint = copy_to_cpu(checkpoint)
        # re-tie the weights, so that the file stores them once
        checkpoint["model"]["lm_head.weight"] = checkpoint["model"]["transformer.wte.weight"]
        path = self.out_dir / f"model_{checkpoint['step']:05d}.pt"
        self.pending = self.executor.submit(write_checkpoint, path, checkpoint, self.keep)
        self.seconds += time.perf_counter() - start

    def wait(self):
        """Wait until the pending checkpoint is on disk; re-raises any error from writing it."""
        if self.pending:
            self.pending.result()
            self.pending = None


# ----------------------------------------------------------------------------------------------------------
# Finding and starting a run


def find_checkpoint(config, enc):
    """The newest intact checkpoint of the run in out_dir, or None if there is nothing to resume.

    Refuses a folder with a different run, and says what differs. Modifies nothing.
    """
    out_dir = Path(config.out_dir)
    if not config.resume or not out_dir.exists():
        return None
    remedy = "Choose another --out-dir, or move the old run aside with --no-resume."
    if (out_dir / "run.txt").exists():
        lines = (out_dir / "run.txt").read_text().splitlines()
        try:
            old = json.loads(next(line for line in lines if line.startswith("config: ")).removeprefix("config: "))
        except (StopIteration, ValueError):
            raise UserError(
                f"{out_dir / 'run.txt'} does not say what settings the run had, so it cannot be continued. {remedy}"
            ) from None
        new = {name: value for name, value in dataclasses.asdict(config).items() if name not in MAY_CHANGE_ON_RESUME}
        different = [f"{name} was {old.get(name)}, now {new[name]}" for name in new if new[name] != old.get(name)]
        if different:
            raise UserError(
                f"{out_dir} has a run with other settings ({', '.join(different)}). Use those to continue it, "
                "choose another --out-dir, or move the old run aside with --no-resume."
            )
    elif any(out_dir.glob("model_*.pt")) or (out_dir / "log.txt").exists():
        raise UserError(
            f"{out_dir} has a log or checkpoints but no run.txt, so it is not a run of train_gpt2.py. "
            "Choose another --out-dir, or move the folder aside with --no-resume."
        )
    checkpoint = newest_checkpoint(out_dir)
    if checkpoint:
        check_tokenizer(model_tokenizer(checkpoint), enc, config.data)
    return checkpoint


def describe_run(config):
    """What run.txt records of a start: command, configuration, versions, machine, commit."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    lines = {
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "config": json.dumps(dataclasses.asdict(config)),
        "versions": f"python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}",
        "machine": f"{platform.platform()}, {os.cpu_count()} cores, {', '.join(gpus) or 'no GPU'}",
        "ranks": os.environ.get("WORLD_SIZE", "1"),
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else "",
    }
    return "".join(f"{name}: {text}\n" for name, text in lines.items()) + "\n"


def start_run(config):
    """Create out_dir (with --no-resume, after moving the old run aside) and append this start to run.txt."""
    out_dir = Path(config.out_dir)
    try:
        if not config.resume and out_dir.exists() and any(out_dir.iterdir()):
            number = 1
            while Path(f"{out_dir}.{number}").exists():
                number += 1
            out_dir.rename(f"{out_dir}.{number}")
            print(f"Moved the old run from {out_dir} to {out_dir}.{number}.", flush=True)
        out_dir.mkdir(parents=True, exist_ok=True)
        for leftover in out_dir.glob("*.part"):  # left by a process that was killed while writing
            if leftover.is_file():
                leftover.unlink()
            else:
                shutil.rmtree(leftover)
    except OSError as error:
        raise UserError(
            f"Could not prepare the run's folder {out_dir}: {error.strerror}. "
            "Choose an --out-dir that you can write to."
        ) from None
    history = (out_dir / "run.txt").read_text() if (out_dir / "run.txt").exists() else ""
    with cli.atomic_write(out_dir / "run.txt", "w") as file:
        file.write(history + describe_run(config))


def open_log(out_dir, step):
    """Open log.txt for appending, after dropping lines from `step` on and any line truncated by a crash."""
    path = Path(out_dir) / "log.txt"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    with cli.atomic_write(path, "w") as file:
        file.writelines(line for line in lines if line.endswith("\n") and int(line.split()[0]) < step)
    return open(path, "a")


def install_signal_handlers():
    """Record SIGTERM and SIGINT in the returned list, so that the current step can finish.

    A second SIGINT exits at once.
    """
    received = []

    def record(number, frame):
        if number == signal.SIGINT and signal.SIGINT in received:
            os._exit(128 + signal.SIGINT)
        received.append(number)

    signal.signal(signal.SIGTERM, record)
    signal.signal(signal.SIGINT, record)
    return received


# ----------------------------------------------------------------------------------------------------------
# A run while it lasts


class Run:
    """What a run writes to its folder and to the console. On ranks other than 0 it writes nothing."""

    def __init__(self, config, world, start_step, val_loss, metadata):
        """val_loss is the last one measured, or None; `metadata` goes into each checkpoint."""
        self.config, self.world, self.out_dir = config, world, Path(config.out_dir)
        self.max_steps, self.start_step = config.max_steps, start_step
        self.val_loss, self.metadata = val_loss, metadata
        self.signals = install_signal_handlers()  # received so far
        self.started = time.perf_counter()
        world.run_on_master(start_run, config)
        if world.is_master:
            self.log = open_log(self.out_dir, start_step)
            self.writer = CheckpointWriter(self.out_dir, config.keep_checkpoints)

    def print_summary(self, raw_model, dtype, loader, B, optimizers):
        """Print what is about to run, in numbers that can be checked: model, data, batch, optimizer."""
        world, c, S, T = self.world, self.config, self.config.total_batch_size, loader.T
        self.flops_per_token, peak = flops_per_token(raw_model.config, T), peak_flops(world.device)
        self.peak = peak * world.size if peak else None
        device = torch.cuda.get_device_name() if world.device_type == "cuda" else world.device
        num_params = sum(p.numel() for p in raw_model.parameters())
        float8 = ", output layer in float8" if raw_model.float8_lm_head else ""
        print0(f"model: {num_params:,} parameters on {world.size} x {device}, {dtype}{float8}")
        tokens = loader.num_windows * T
        print0(f"data: {tokens:,} training tokens in {len(loader.paths)} shards, tokenizer {self.metadata['tokenizer']}")
        print0(f"step: {S:,} tokens = B {B} * T {T} * {world.size} ranks * {S // (B * T * world.size)} micro-steps")
        groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
        sizes = ", ".join(f"{len(params)} tensors with {sum(p.numel() for p in params):,}" for params in groups)
        print0(f"optimizer: {c.optimizer} on groups of {sizes} parameters")
        print0(f"run: {self.out_dir}, from step {self.start_step} to {self.max_steps}")

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

    def log_val_loss(self, step, loss):
        self.val_loss = loss
        self.report(step, f"val loss {loss:.6f}", val=loss)

    def log_hellaswag(self, step, counts):
        accuracy = counts.acc_norm / counts.n
        self.report(step, f"HellaSwag {counts.acc_norm}/{counts.n} = {accuracy:.4f}", hella=accuracy)

    def log_step(self, step, loss, lr, norm, tokens, seconds):
        """The update from `step` to the next took `seconds` for `tokens` tokens over all ranks."""
        rate = tokens / seconds
        mfu = f" | {rate * self.flops_per_token / self.peak:5.1%} MFU" if self.peak else ""
        left = datetime.timedelta(seconds=round(seconds * (self.max_steps - step - 1)))
        text = f"loss {loss:.6f} | lr {lr:.4e} | norm {norm:7.4f} | {1e3 * seconds:8.2f} ms | {rate:9,.0f} tok/s"
        self.report(step, f"{text}{mfu} | {left} left", **{"train": loss, "lr": lr, "norm": norm, "tok/s": rate})

    def save(self, step, state):
        """Write a checkpoint of `state`, what train_gpt2.py's training_state returns, in the background."""
        if self.world.is_master and step > self.start_step:
            self.writer.write({"step": step, "val_loss": self.val_loss, **state, **self.metadata})

    def wait(self):
        """Wait until the last checkpoint is on disk."""
        if self.world.is_master:
            self.writer.wait()

    def finish(self, step, stopped, raw_model, enc):
        """End the run after `step` steps: checkpoint on disk and, unless it was stopped, model exported.

        Returns the exit status. A run stopped in its last step still lacks its last evaluations, too.
        """
        self.wait()
        if stopped:
            print0(f"Stopped after {step} steps. The checkpoint is written; the same command continues from here.")
            return 128 + signal.SIGINT if signal.SIGINT in self.signals else 0
        if self.world.is_master:
            export_huggingface(raw_model, enc, self.out_dir / "hf")
            minutes = (time.perf_counter() - self.started) / 60
            on_cuda = self.world.device_type == "cuda"
            memory = f", at most {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if on_cuda else ""
            print(f"Done in {minutes:.1f} minutes{memory}, {self.writer.seconds:.1f} s of it for checkpoints.")
            print(f"The model is in {self.out_dir / 'hf'}.")
        return 0
