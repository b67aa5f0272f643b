"""What the tests share: a tiny GPT, tiny shards, and ways to run the trainer in this process or in others.

Everything is seeded, runs on one thread and touches no network. What needs `../shared/data` skips without it.
"""

import atexit
import contextlib
import errno
import gc
import hashlib
import importlib.util
import io
import itertools
import json
import multiprocessing
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "data"
# the project's own scripts; a user's copies of the trainer are beside them
SCRIPTS = [
    "contamination.py",
    "fineweb.py",
    "hellaswag.py",
    "sample.py",
    "smoltalk.py",
    "tokenizer.py",
    "train_gpt2.py",
]

# conftest.py imports this file before torch, and the processes started from here inherit these variables. With two
# threads each, several processes on two cores would wait for each other more than they compute
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # without a network, torch warns that addresses have no names
path = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH")]  # packages may come from there
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS"):  # torchrun's, and a job's
    os.environ.pop(name, None)
if (SHARED / "tiktoken_cache").exists():
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(SHARED / "tiktoken_cache"))

import numpy as np
import pytest
import torch
import train_gpt2
from plumbing.cli import console
from plumbing.data import tokenizers
from plumbing.run import huggingface, source_code
from plumbing.run.checkpoint import list_checkpoints, newest_checkpoint
from plumbing.system import devices
from safetensors.torch import load_file
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.utils._pytree import tree_flatten

torch.set_num_threads(1)
os.fsync = lambda descriptor: None  # no test cuts the power, and a disk may take long
# a run ends with a comparison of its export with transformers, on 20,000 bytes: three times the work of a tiny run
text_to_compare = huggingface.text_to_compare
huggingface.text_to_compare = lambda enc: text_to_compare(enc)[:1000]

# a GPT of 2 layers that takes 5 ms a step, and a run that does everything but sampling and HellaSwag
TINY = dict(n_layer=2, n_head=2, n_embd=32, block_size=32, device="cpu", dtype="float32", compile=False)
TINY |= dict(sequence_length=16, batch_size=4, total_batch_size=128)
TINY |= dict(max_steps=12, warmup_steps=3, max_lr=3e-3, min_lr=3e-4)
TINY |= dict(val_every=4, val_tokens=512, hellaswag_every=0, sample_every=0, checkpoint_every=4)
LETTERS = b"abcdefghijklmnop"  # what the tiny shards are made of


# what Windows, macOS and a processor may lack
ON_THIS_SYSTEM = {
    "float8": devices.has_float8(torch.device("cpu")),
    "SIGKILL": hasattr(signal, "SIGKILL"),
    "SIGHUP": hasattr(signal, "SIGHUP"),
    "mkfifo": hasattr(os, "mkfifo"),
    "resource": importlib.util.find_spec("resource") is not None,
    "/dev/full": os.path.exists("/dev/full"),
    "bash": shutil.which("bash") is not None,
}


def needs(*names):
    """A marker: the test is skipped on a system that lacks one of these."""
    return pytest.mark.skipif(not all(map(ON_THIS_SYSTEM.__getitem__, names)), reason=f"needs {' and '.join(names)}")


def make_shards(folder, lengths=(2000, 3000, 1700), seed=0, masks=False):
    """Shards of the byte tokenizer: val, then train ones. Their text is drawn from a chain that can be learned."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    shards = {}
    for number, length in enumerate(lengths):
        # each letter is followed by the next one, or in a third of the cases by any
        is_any = rng.random(length) < 1 / 3
        steps = np.where(is_any, rng.integers(0, len(LETTERS), length), 1)
        places = np.cumsum(steps) % len(LETTERS)
        tokens = np.frombuffer(LETTERS, np.uint8)[places].astype(np.uint16)
        tokens[0] = 256  # <|endoftext|>
        path = folder / f"tiny_{'train' if number else 'val'}_{number:06d}.npy"
        np.save(path, tokens)
        shards[path.name] = length
        if masks:
            # long stretches of zeros, so that micro-batches differ much in what counts
            stretches = rng.random(length // 10 + 1) < 0.4
            mask = np.repeat(stretches, 10)[:length]
            with open(path.with_suffix(".mask"), "wb") as file:
                np.save(file, mask.astype(np.uint8))
    meta = {"dataset": "input", "tokenizer": "bytes", "vocab_size": 257, "shards": shards, "complete": True}
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    return folder


def change_meta(folder, **changes):
    """Change these entries of meta.json. Returns all of them."""
    path = Path(folder, "meta.json")
    meta = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(meta), encoding="utf-8")
    return meta


def windows(folder, split, T, masks):
    """x and y of every window in file order; targets that the mask leaves out are IGNORE_INDEX."""
    xs, ys = [], []
    for path in sorted(Path(folder).glob(f"*_{split}_*.npy")):
        tokens = np.load(path).astype(np.int64)
        mask = np.load(path.with_suffix(".mask")) if masks else np.ones(len(tokens))
        for start in range(0, len(tokens) - T, T):
            targets = slice(start + 1, start + T + 1)
            xs.append(tokens[start : start + T])
            ys.append(np.where(mask[targets], tokens[targets], train_gpt2.IGNORE_INDEX))
    return torch.tensor(np.array(xs)), torch.tensor(np.array(ys))


def examples_file(folder, contexts, labels=(0, 1, 2, 3) * 3):
    """An example per context, with endings of one to three characters."""
    rest = {"activity_label": "Roof", "endings": ["a b", "cde", "f", "gh"]}
    examples = [rest | {"ctx": ctx, "label": label} for ctx, label in zip(contexts, labels)]
    path = folder / "hellaswag.jsonl"
    path.write_text("".join(json.dumps(example) + "\n" for example in examples), encoding="utf-8")
    return path


def talk(*contents):
    """Alternating messages of a user and an assistant."""
    roles = itertools.cycle(["user", "assistant"])
    return [{"role": role, "content": content} for role, content in zip(roles, contents)]


def tiny_model(seed=0, **changes):
    """A GPT whose every weight is random, biases and norms too: nothing is hidden by a 0 or a 1."""
    torch.manual_seed(seed)
    shape = dict(block_size=32, vocab_size=320, n_layer=2, n_head=2, n_embd=32) | changes
    model = train_gpt2.GPT(train_gpt2.GPTConfig(**shape))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def parrot_model(block_size=256, text="ok"):
    """A chat model that says `text`, at most six different bytes, then <|end|>, whatever it is told."""
    model = tiny_model(n_layer=1, block_size=block_size).eval()
    words = tokenizers.get_encoding("bytes+chat").encode(f"<|assistant|>{text}<|end|>", allowed_special="all")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith(("ln_1.weight", "ln_2.weight")):
                parameter.zero_()  # the blocks add nothing: a token's embedding alone decides what comes next
        # the output layer is the embedding: a token and its successor have opposite signs in it, and ln_f's -1 turns
        # the token's, so that the successor is likely. So is the predecessor, but less: its numbers are smaller
        wte = model.transformer.wte.weight
        for place, (token, successor) in enumerate(zip(words, words[1:])):
            wte[token, place] = 2.0**place
            wte[successor, place] = -(2.0**place)
            model.transformer.ln_f.weight[place] = -1.0
    return model


@torch.no_grad()
def greedy_without_cache(model, ids, num_tokens, n_vocab=257):
    """The ids and those that follow, by the model's forward pass alone."""
    ids = [*ids]
    for _ in range(num_tokens):
        block = ids[-model.config.block_size :]
        logits, _ = model(torch.tensor([block]))
        ids.append(logits[0, -1, :n_vocab].argmax().item())
    return ids


@torch.no_grad()
def four_rows(model, examples, n_vocab=257):
    """The independent way: every ending behind its own copy of the context. Sums (examples, 4)."""
    sums = []
    for example in examples:
        for ending in example.endings:
            ids = torch.tensor(example.context + ending)
            logits, _ = model(ids[None, :-1])
            log_probs = logits[0, :, :n_vocab].log_softmax(-1)
            first = len(example.context)
            picked = [log_probs[place - 1, ids[place]] for place in range(first, len(ids))]
            sums.append(sum(picked).item())
    return np.array(sums).reshape(-1, 4)


def flags(**options):
    """{"max_steps": 3, "compile": False, "data": (a, b)} -> ["--max-steps", "3", "--no-compile", "--data", a, b]"""
    words = []
    for name, value in options.items():
        name = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, tuple):
            words += [f"--{name}", *map(str, value)]
        else:
            words += [f"--{name}", str(value)]
    return words


def printed_commands(text):
    """The commands under the last "Next:" of what a program printed, each as a list of words."""
    lines = text.rpartition("\nNext:\n")[2].splitlines()
    return [shlex.split(line) for line in lines if line.startswith("    ")]


def tiny_flags(data, out_dir, **changes):
    """The tiny run's flags with these changes. Passes and the like say how long it is, instead of max_steps."""
    options = TINY | changes
    if {"passes", "tokens_per_parameter"} & changes.keys():
        options.pop("max_steps")
    return flags(data=data, out_dir=out_dir, **options)


def status_of(main, *args):
    """The exit status with which a script's `main` would leave its process."""
    try:
        console.run(lambda: main(*args))
    except SystemExit as leaving:
        return leaving.code or 0
    return 0


def refusal_of(main, *args):
    """(exit status, stdout, stderr) of a script's `main` in this process; in a new one, imports take a second."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        status = status_of(main, [str(arg) for arg in args])
    return status, stdout.getvalue(), stderr.getvalue()


def refused(main, *args):
    """The one line on stderr with which a script's `main` refuses these arguments."""
    status, stdout, stderr = refusal_of(main, *args)
    # transformers shows a progress bar for loading; nothing else writes to stderr
    lines = [line for line in stderr.splitlines() if line.strip() and "Loading weights" not in line]
    assert status == 2 and len(lines) == 1 and lines[0].startswith("error: "), stderr
    assert "Traceback" not in stdout
    return lines[0]


def refused_run(changes, *words):
    """The one line with which the trainer refuses the tiny run with these changes; it has all of `words`.

    changes: settings, "data" and "out_dir" among them.
    """
    line = refused(train_gpt2.main, *tiny_flags(**changes))
    for word in words:
        assert word in line, line
    return line


def error_in(text):
    """The error, one line of a program's output."""
    (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
    return line


def train(data, out_dir, **changes):
    """Train in this process as the command line would, without an error. Returns the output.

    The export is not compared with transformers, which would take a sixth of the time.
    """
    with patched(huggingface, "check_export", lambda *args: None):
        status, stdout, stderr = refusal_of(train_gpt2.main, *tiny_flags(data, out_dir, **changes))
    assert status == 0, stdout + stderr
    return stdout + stderr


def read_log(out_dir, stream="train"):
    """{step: value as it is written} of one stream; a step that is there twice is an error."""
    values = {}
    for line in Path(out_dir, "log.txt").read_text(encoding="utf-8").splitlines():
        step, name, value = line.split(" ")
        if name == stream:
            assert int(step) > max(values, default=-1), "steps in order, each once"
            values[int(step)] = value
    return values


def losses(out_dir, stream="train"):
    return np.array([float(value) for value in read_log(out_dir, stream).values()])


def samples(out_dir):
    """{step: the texts sampled there}, from samples.txt."""
    texts = {}
    for line in (Path(out_dir) / "samples.txt").read_text(encoding="utf-8").splitlines():
        step, _, text = line.partition(" ")
        texts.setdefault(int(step), []).append(json.loads(text))
    return texts


def write_run(folder, log, **fields):
    """The folder of a run as far as plots and comparisons read it.

    log: the (step, stream, value) of log.txt. fields: the lines of run.txt, a text as it is and all else as JSON.
    """
    folder.mkdir(parents=True)
    lines = [f"{step} {stream} {value}\n" for step, stream, value in log]
    (folder / "log.txt").write_text("".join(lines), encoding="utf-8")
    with open(folder / "run.txt", "w", encoding="utf-8") as file:
        for name, value in fields.items():
            text = value if isinstance(value, str) else json.dumps(value)
            file.write(f"{name}: {text}\n")


def log_lines(out_dir):
    """The lines of log.txt but for throughput."""
    lines = (Path(out_dir) / "log.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if "tok/s" not in line]


def assert_same_tensors(ours, theirs):
    """Nested dicts and lists are equal, and so is every tensor in them, bit for bit."""
    (ours, structure), (theirs, their_structure) = tree_flatten(ours), tree_flatten(theirs)
    assert structure == their_structure
    for one, other in zip(ours, theirs):
        assert torch.equal(one, other) and one.dtype == other.dtype if isinstance(one, torch.Tensor) else one == other


def assert_same_run(out_dir, parent, names=("val_loss", "model", "optimizer", "scaler", "loader", "tokenizer_file")):
    """The same log, the same last checkpoint (weights, optimizer, data) and the same export."""
    assert log_lines(out_dir) == log_lines(parent)
    ours, theirs = newest_checkpoint(out_dir), newest_checkpoint(parent)
    for name in ("step", *names):
        assert_same_tensors(ours[name], theirs[name])
    assert_same_tensors(exported_weights(out_dir), exported_weights(parent))
    assert not list(Path(out_dir).glob("*.part"))


def exported_weights(out_dir):
    return [load_file(path) for path in Path(out_dir).glob("hf/*.safetensors")]


def steps_of(out_dir):
    return [int(path.stem.removeprefix("model_")) for path in list_checkpoints(out_dir)]


def change_checkpoint(path, change):
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)


class Touch:
    """An object whose unpickling makes a file: what a hostile file does."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def listing(folder):
    """{path: digest or "folder"} of all that is below `folder`: equal if nothing has changed."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(Path(folder).rglob("*"))
    }


# Other processes. They are forked from a server that has made a short run (preloaded.py) and does nothing else:
# each is as good as a new `python train_gpt2.py`, there in 20 ms instead of 3 s. Windows has no fork.
has_fork = "forkserver" in multiprocessing.get_all_start_methods()
processes = multiprocessing.get_context("forkserver" if has_fork else "spawn")
if has_fork:
    processes.set_forkserver_preload(["preloaded"])
ENVIRONMENT = dict(os.environ)  # of the test run: this file is imported before the first test


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


git = source_code.git


def no_git(*words):
    """In place of source_code.git: what a run notes must not depend on changes that are not committed."""
    return ""


def child(function, args, output, environment, folder):
    os.environ.clear()  # what it has is the server's
    os.environ.update(environment)
    os.chdir(folder)
    with open(output, "ab", 0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    source_code.git = no_git
    console.run(lambda: function(*args))


KILLED = -9  # the exit status after SIGKILL


def run(function, *args, ranks=0, ends=None, timeout=250):
    """Run function(*args) in a process, or in so many `ranks`; a list of what each of them printed.

    Each has the environment and folder of the test that starts it, whichever test was the first to start one.
    ends: the exit statuses that they must have, None for any but 0; without it, 0. With KILLED, Windows skips.
    """
    if ends and KILLED in ends and not ON_THIS_SYSTEM["SIGKILL"]:
        pytest.skip("needs SIGKILL")
    started, port = [], free_port()
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, f"{rank}") for rank in range(max(1, ranks))]
        for rank, output in enumerate(outputs):
            environment = dict(os.environ)
            if ranks:
                environment |= dict(RANK=f"{rank}", LOCAL_RANK=f"{rank}")
                environment |= dict(WORLD_SIZE=f"{ranks}", LOCAL_WORLD_SIZE=f"{ranks}")
                environment |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{port}")
            started.append(processes.Process(target=child, args=(function, args, output, environment, os.getcwd())))
            # the first one starts the server, which imports the trainer, and a test's folder may have a changed one
            with mock.patch.dict(os.environ, ENVIRONMENT, clear=True), contextlib.chdir(ROOT):
                started[-1].start()
        for process in started:
            process.join(timeout)
        hanging = [process for process in started if process.is_alive()]
        for process in hanging:
            process.kill()
            process.join()
        said = [output.read_text(encoding="utf-8") for output in outputs]
    printed = "\n".join(said)
    assert not hanging, f"{len(hanging)} of {len(started)} processes did not end in {timeout} s:\n{printed}"
    for process, end in zip(started, ends or [0] * len(started), strict=True):
        assert process.exitcode == end or (end is None and process.exitcode), printed
    return said


def elastic_worker(function, args):
    status = status_of(function, args)
    if status:
        os._exit(status)


def forked_torchrun(function, args, ranks=2, restarts=0):
    """What torchrun does with function(args), but that its processes are forked: they need not import torch again."""
    sys.argv = ["train_gpt2.py", *args]
    meeting = dict(rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id="tests")
    options = dict(max_restarts=restarts, monitor_interval=0.1, start_method="fork")
    elastic_launch(LaunchConfig(1, 1, ranks, **meeting, **options), elastic_worker)(function, args)


@contextlib.contextmanager
def patched(owner, name, value):
    """Make `owner.name` `value` inside the `with`, which yields what it was before."""
    before = getattr(owner, name)
    with mock.patch.object(owner, name, value):
        yield before


def full_disk(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "the disk")


def die_at(owner, name, when, last_act=lambda original, *args: None):
    """Patch owner.name: the first call for which when(*args) holds does last_act(original, *args) and is the last."""

    def mortal(*args, **options):
        if when(*args):
            last_act(original, *args)
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **options)

    original = getattr(owner, name)
    return patched(owner, name, mortal)


def write_half(save, checkpoint, file):
    """In place of torch.save: half of the file."""
    whole = io.BytesIO()
    save(checkpoint, whole)
    file.write(whole.getvalue()[: whole.tell() // 2])
    file.flush()


def wait_for_checkpoint(out_dir, step):
    """A last act: checkpoints are written while training continues."""

    def wait(*args):
        while not (Path(out_dir) / f"model_{step:05d}.pt").exists():
            time.sleep(0.01)

    return wait


@contextlib.contextmanager
def at_steps(before=lambda step, parts: None, after=lambda step, parts, done: None):
    """Inside the `with`, call these before and after each step of a run in this process."""

    def step_between(step, parts, signals):
        before(step, parts)
        done = train_step(step, parts, signals)
        after(step, parts, done)
        return done

    with patched(sys.modules["train_gpt2"], "train_step", step_between) as train_step:
        yield


def signalled(step, name, times, rank, args):
    """Train, and on `rank` send this process a signal in the middle of a step."""

    def send(now, parts):
        if now == step and os.environ.get("RANK", "0") == str(rank):
            for _ in range(times):
                os.kill(os.getpid(), getattr(signal, name))

    sys.argv = ["train_gpt2.py", *args]
    # a suite under nohup ignores SIGHUP, and what it starts does
    signal.signal(getattr(signal, name), signal.SIG_DFL)
    with at_steps(send):
        return sys.modules["train_gpt2"].main(args)


def signalled_in(name, number, rank, args):
    """Train, and on `rank` send this process SIGTERM when its evaluation of that name and number begins."""
    calls = itertools.count(1)

    def evaluate(*args, **options):
        if next(calls) == number and os.environ.get("RANK", "0") == str(rank):
            os.kill(os.getpid(), signal.SIGTERM)
        return whole_evaluate(*args, **options)

    with patched(train_gpt2, name, evaluate) as whole_evaluate:
        train_gpt2.main(args)


def killed_at(step, checkpoint, args):
    """Train, and be killed in that step, when that checkpoint, written meanwhile, is there."""
    wait = wait_for_checkpoint(args[args.index("--out-dir") + 1], checkpoint)
    trainer = sys.modules["train_gpt2"]
    with die_at(trainer, "train_step", lambda now, *rest: now == step, wait):
        trainer.main(args)


gc.freeze()
atexit.register(gc.unfreeze)  # triton 3.9 reports frozen objects as leaks at the end, on many lines
# each run ends with it, and the next one's collection would look at all that torch and transformers have: 0.3 s
gc.unfreeze = lambda: None
