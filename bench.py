"""Benchmarks: the program's own code compared with a reference, alternating in one process.

    python bench.py train                       the step of --preset, compared with transformers in a plain loop
    python bench.py train --peer ../nanoGPT     and with the GPT of a nanoGPT checkout
    python bench.py ladder --plot ladder.png    what each optimization gains, from plain float32 to this program
    python bench.py data --input docs/*.parquet    fineweb.py compared with tiktoken on one thread
    python bench.py hellaswag --data hellaswag_val.jsonl    packed rows compared with four padded rows an example
    python bench.py sample                      generate, compared with a loop without a cache and transformers'

Each side is warmed up, then the sides alternate for --rounds rounds, so that other load on the machine affects all of
them alike. A ratio is the median over the rounds of reference / ours. --json FILE saves the numbers.
"""

import contextlib
import dataclasses
import gc
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
import tyro

import fineweb
import hellaswag
import tokenizer
from plumbing import (
    cli,  # before torch: sets how OpenMP threads wait
    documents,
)
from plumbing.cli import UserError
from plumbing.distributed import World, choose_device, choose_dtype, flops_per_token
from plumbing.files import atomic_write
from plumbing.huggingface import MATRICES
from plumbing.peaks import peak_flops
from train_gpt2 import (
    GPT,
    PRESETS,
    CausalSelfAttention,
    DataLoaderLite,
    GPTConfig,
    TrainConfig,
    apply_schedules,
    check_config,
    configure_optimizers,
    fit_to_machine,
    get_lr,
    load_model,
    train_step,
)


@dataclass
class Options:
    """Benchmark the program against references in the same process."""

    what: tyro.conf.Positional[Literal["train", "ladder", "data", "hellaswag", "sample"]]  # what to measure
    device: str = "auto"  # cpu, cuda or mps; auto: best available
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of activations, for every side
    json: str = ""  # write the numbers to this file
    rounds: int = 0  # rounds in which each side runs once; 0: 20 of train, 5 of the others
    steps: int = 0  # train: steps per round; 0: about half a second of them
    # train and ladder, and the shape of the model elsewhere; 0: the preset's
    preset: str = ""  # of train_gpt2.py; default quickstart on a CPU, gpt2 on a GPU
    peer: str = ""  # a nanoGPT checkout, whose model.py is imported and trained for comparison
    variants: tuple[str, ...] = ()  # our own with other settings: compile=False batch_size=32,compile=True
    batch_size: int = 0  # B, sequences per micro-step (of sample: sequences at a time)
    sequence_length: int = 0  # T, tokens per sequence
    total_batch_size: int = 0  # tokens per step
    n_layer: int = 0  # blocks
    n_head: int = 0  # attention heads
    n_embd: int = 0  # channels
    vocab_size: int = 0  # rows of the embedding
    plot: str = ""  # ladder: draw the tokens per second of each rung into this file
    # data, hellaswag, sample
    input: tuple[str, ...] = ()  # data: documents, as fineweb.py takes them; default the built-in corpus
    tokenizer: str = "gpt2"  # data, hellaswag, sample: gpt2, bytes or a .tiktoken file
    model: str = ""  # hellaswag, sample: a GPT-2 name, checkpoint or folder; default GPT-2 124M with random weights
    data: str = "hellaswag/hellaswag_val.jsonl"  # hellaswag: the examples
    limit: int = 0  # hellaswag: examples; 0: 24 on a CPU, 1000 on a GPU
    max_new_tokens: int = 256  # sample: tokens to generate


# -----------------------------------------------------------------------------
# Measuring


def timed(function, device):
    """Time function(): (seconds, its result); on CUDA with events, so that the GPU's time is measured."""
    if not device.startswith("cuda"):
        start = time.perf_counter()
        result = function()
        return time.perf_counter() - start, result
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    result = function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3, result


def peak_gib(device):
    """Peak memory since the last call, with the weights of all sides: CUDA's allocator, or a CPU's resident memory."""
    if device.startswith("cuda"):
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak / 2**30
    try:
        status = Path("/proc/self/status").read_text()
        Path("/proc/self/clear_refs").write_text("5")  # Linux: reset the peak
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 2**20
    except OSError:
        return math.nan


def interleave(runs, rounds, device):
    """Call the functions in `runs`, {name: function}, alternately: one warm-up and `rounds` rounds.

    Returns {name: {"seconds": [...], "cpu_seconds": [...], "peak_gib": ..., "result": of the last call}}. CPU seconds
    show what a side costs when other processes share the machine.
    """
    measured = {name: {"seconds": [], "cpu_seconds": [], "peak_gib": 0.0, "result": None} for name in runs}
    gc.freeze()  # exclude existing objects, so that collecting between the rounds is cheap
    for round_number in range(-1, rounds):
        for name, function in runs.items():
            gc.collect()
            peak_gib(device)
            cpu_start = time.process_time()
            seconds, measured[name]["result"] = timed(function, device)
            cpu_seconds = time.process_time() - cpu_start
            measured[name]["peak_gib"] = max(measured[name]["peak_gib"], peak_gib(device))
            if round_number >= 0:
                measured[name]["seconds"].append(seconds)
                measured[name]["cpu_seconds"].append(cpu_seconds)
    return measured


def report(options, device, measured, work, unit, extra=None):
    """Print a table of `interleave`'s results, the first of which is ours; write and return the --json dict.

    work: how many of `unit` one call does, e.g. tokens.
    """
    ours, *others = measured
    width = max(map(len, measured)) + 2
    print(
        f"{'':{width}}{unit + '/s':>12}{'median s':>11}{'min':>9}{'max':>9}{'peak GiB':>10}{'CPU s':>9}{'ratio':>7}"
        f"{'(of the rounds)':>17}{'by CPU s':>10}"
    )
    rates, ratios, cpu_ratios = {}, {}, {}
    for name, run in measured.items():
        seconds = run["seconds"]
        median = statistics.median(seconds)
        rates[name] = work / median
        line = f"{name:{width}}{work / median:12,.1f}{median:11.4f}{min(seconds):9.4f}{max(seconds):9.4f}"
        line += f"{run['peak_gib']:10.2f}{statistics.median(run['cpu_seconds']):9.4f}"
        if name != ours:
            paired = [theirs / mine for theirs, mine in zip(seconds, measured[ours]["seconds"])]
            ratios[name] = statistics.median(paired)
            cpu_pairs = zip(run["cpu_seconds"], measured[ours]["cpu_seconds"])
            cpu_ratios[name] = statistics.median(theirs / mine for theirs, mine in cpu_pairs)
            line += f"{ratios[name]:7.2f}{f'({min(paired):.2f} to {max(paired):.2f})':>17}{cpu_ratios[name]:10.2f}"
        print(line)
    numbers = {
        "ratio": ratios[others[0]] if others else None,
        f"{unit}_per_s": rates[ours],
        "ratios": ratios,
        "cpu_ratios": cpu_ratios,
        "rates": rates,
        **(extra or {}),
    }
    return save(options, device, measured, numbers)


def save(options, device, measured, numbers):
    """Add measurements, machine and settings to `numbers`; write them to --json and return them."""
    keys = ("seconds", "cpu_seconds", "peak_gib")
    raw = {key: {name: run[key] for name, run in measured.items()} for key in keys}
    settings = {"what": options.what, "options": dataclasses.asdict(options)}
    numbers = numbers | raw | machine(device) | settings
    if options.json:
        with atomic_write(options.json, "w") as file:
            file.write(json.dumps(numbers, indent=1) + "\n")
    return numbers


def machine(device):
    """The hardware and software versions of a measurement."""
    if device.startswith("cuda"):
        name = torch.cuda.get_device_name()
    else:
        cpuinfo = Path("/proc/cpuinfo")
        found = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
        name = f"{found[1] if found else platform.processor()}, {torch.get_num_threads()} of {os.cpu_count()} threads"
    packages = ("torch", "numpy", "transformers", "tiktoken")
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    return {
        "device": name,
        "versions": {"python": platform.python_version(), **{p: importlib.metadata.version(p) for p in packages}},
        "commit": commit,
        "command": " ".join(sys.argv),
    }


# -----------------------------------------------------------------------------
# The training step


def train_config(options, device):
    """The TrainConfig that the flags describe."""
    preset = options.preset or ("gpt2" if device.startswith("cuda") else "quickstart")
    if preset not in PRESETS:
        raise UserError(f"There is no preset called {preset!r}. {cli.suggest(preset, PRESETS)}")
    names = ("batch_size", "sequence_length", "total_batch_size", "n_layer", "n_head", "n_embd", "vocab_size")
    config = dataclasses.replace(PRESETS[preset], **{n: getattr(options, n) for n in names if getattr(options, n)})
    num_ids = 257 if preset == "quickstart" else 50257
    micro_batch = config.batch_size * config.sequence_length
    config = dataclasses.replace(
        config,
        dtype=options.dtype,
        optimizer="adamw",  # as in the references; a variant may have another
        block_size=max(config.block_size, config.sequence_length),
        vocab_size=config.vocab_size or math.ceil(num_ids / 64) * 64,
        total_batch_size=options.total_batch_size or max(1, config.total_batch_size // micro_batch) * micro_batch,
    )
    check_config(config, 1)
    return config


@dataclass(frozen=True)
class Place:
    """Where a benchmark runs: a single process on a device, with a dtype for activations."""

    device: str
    dtype: torch.dtype

    @property
    def device_type(self):
        return self.device.split(":")[0]

    @property
    def world(self):
        return World(device=self.device)

    def autocast(self):
        return torch.autocast(self.device_type, self.dtype, enabled=self.dtype != torch.float32)


def choose_place(options, device):
    """The Place that --dtype asks for, or the best dtype for the model's width."""
    dtype, _ = choose_dtype(options.dtype, device, options.n_embd)
    return Place(device, dtype)


def random_shards(folder, config, num_windows=256):
    """Write shards of random ids: the time of a step does not depend on the data."""
    size = max(num_windows, config.total_batch_size // config.sequence_length) * config.sequence_length + 1
    for split in ("val_000000", "train_000001"):
        ids = np.random.default_rng(0).integers(config.vocab_size, size=size).astype(np.uint16)
        np.save(Path(folder) / f"random_{split}.npy", ids)


class Ours:
    """The trainer's own parts, put together as in train_gpt2.train; a call makes `steps` steps."""

    def __init__(self, config, folder, place, steps, fused_loss=""):
        self.config, self.place, self.steps, self.step = config, place, steps, 0
        torch.manual_seed(0)
        shape = (config.block_size, config.vocab_size, config.n_layer, config.n_head, config.n_embd)
        self.raw_model = GPT(GPTConfig(*shape))
        self.raw_model.fused_loss = fused_loss
        self.model, self.B = fit_to_machine(self.raw_model, config, place.dtype, place.autocast(), place.world)
        if config.compile and self.model is self.raw_model:
            raise UserError("torch.compile failed, as the warning above says, so its speed cannot be measured.")
        if self.B < config.batch_size:
            raise UserError(f"Only {self.B} of {config.batch_size} sequences fit in memory. Try --batch-size {self.B}.")
        layout = dict(B=self.B, T=config.sequence_length, device=place.device)
        self.loader = DataLoaderLite(folder, "train", **layout, shuffle=config.shuffle)
        self.val_loader = DataLoaderLite(folder, "val", **layout)
        self.optimizers = configure_optimizers(self.raw_model, config)
        self.scaler = torch.amp.GradScaler(place.device_type, enabled=place.dtype == torch.float16)

    def __call__(self):
        c = self.config
        num_windows = c.total_batch_size // c.sequence_length
        for _ in range(self.steps):
            apply_schedules(self.optimizers, self.step, c)
            loss, _, _ = train_step(
                self.model,
                self.loader,
                num_windows,
                self.B,
                self.optimizers,
                self.scaler,
                self.step,
                c,
                [],
                self.place.autocast(),
                self.place.world,
            )
            self.step += 1
        return loss


class Reference:
    """Another implementation's model in a plain training loop; a call makes `steps` steps."""

    def __init__(self, config, folder, place, steps, model, loss_of, optimizer):
        self.config, self.place, self.steps, self.step = config, place, steps, 0
        self.model, self.loss_of, self.optimizer = model.to(place.device).train(), loss_of, optimizer
        self.position = 0
        self.tokens = torch.from_numpy(np.load(Path(folder) / "random_train_000001.npy").astype(np.int64))

    def __call__(self):
        c = self.config
        span = c.batch_size * c.sequence_length
        accumulation = c.total_batch_size // span
        for _ in range(self.steps):
            total = 0.0
            for _ in range(accumulation):
                if self.position + span + 1 > len(self.tokens):
                    self.position = 0
                batch = self.tokens[self.position : self.position + span + 1].to(self.place.device)
                x, y = (ids.view(c.batch_size, c.sequence_length) for ids in (batch[:-1], batch[1:]))
                with self.place.autocast():
                    loss = self.loss_of(self.model, x, y) / accumulation
                loss.backward()
                total += loss.detach()
                self.position += span
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), c.grad_clip)
            for group in self.optimizer.param_groups:
                group["lr"] = get_lr(self.step, c)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
        return float(total)


def transformers_model(config):
    """transformers' GPT-2 of the same shape, without dropout."""
    import transformers  # takes seconds

    transformers.logging.set_verbosity_error()
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_positions=config.block_size,
            vocab_size=config.vocab_size,
            n_layer=config.n_layer,
            n_head=config.n_head,
            n_embd=config.n_embd,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
            use_cache=False,
            bos_token_id=config.vocab_size - 1,
            eos_token_id=config.vocab_size - 1,
        )
    )


def plain_adamw(model, config, fused):
    """torch's AdamW with our settings; fused is True, or None for torch's default."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.max_lr, betas=betas, eps=1e-8, fused=fused)


def make_transformers(config, folder, place, steps, compiled=False, fused=None):
    """transformers' GPT-2 and AdamW with our settings; its loss shifts the labels itself."""
    model = transformers_model(config).to(place.device)
    optimizer = plain_adamw(model, config, fused)
    model = torch.compile(model, dynamic=False) if compiled else model
    return Reference(config, folder, place, steps, model, lambda m, x, y: m(input_ids=x, labels=x).loss, optimizer)


def make_nanogpt(config, folder, place, steps, checkout):
    """The GPT from a nanoGPT checkout, with its own optimizer configuration."""
    path = Path(checkout) / "model.py"
    if not path.exists():
        raise UserError(f"There is no model.py in {checkout}. Give the folder of a nanoGPT checkout with --peer.")
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    module = sys.modules["nanogpt_model"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    shape = {name: getattr(config, name) for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")}
    with contextlib.redirect_stdout(None):
        model = module.GPT(module.GPTConfig(**shape, dropout=0.0, bias=True)).to(place.device)
        betas = (config.beta1, config.beta2)
        optimizer = model.configure_optimizers(config.weight_decay, config.max_lr, betas, place.device_type)
    model = torch.compile(model) if config.compile else model
    return Reference(config, folder, place, steps, model, lambda m, x, y: m(x, y)[1], optimizer)


def make_runs(options, config, folder, place, steps):
    """What `train` compares: {name: a function that builds it}, ours first, the main reference second."""
    setting = (folder, place, steps)
    cuda = place.device_type == "cuda"
    runs = {"train_gpt2": lambda: Ours(config, *setting)}
    if cuda:
        runs["transformers, compiled"] = lambda: make_transformers(config, *setting, compiled=True, fused=True)
        runs["transformers, eager"] = lambda: make_transformers(config, *setting, fused=True)
    else:
        runs["transformers"] = lambda: make_transformers(config, *setting)
        runs["transformers, fused AdamW"] = lambda: make_transformers(config, *setting, fused=True)
    if options.peer:
        runs[f"nanoGPT{', compiled' if config.compile else ''}"] = lambda: make_nanogpt(config, *setting, options.peer)
    for variant in options.variants:
        changed = apply_variant(config, variant)
        other = choose_place(changed, place.device)  # a variant may have another dtype
        runs[f"train_gpt2 {variant}"] = lambda changed=changed, other=other: Ours(changed, folder, other, steps)
    return runs


def to_flag(field, value):
    """A field's flag on the trainer's command line: --batch_size=8; a switch is --compile or --no-compile."""
    if str(value) in ("True", "False"):
        return f"--{'no-' * (str(value) == 'False')}{field}"
    return f"--{field}={value}"


def apply_variant(config, variant):
    """ "compile=False,batch_size=32" applied to a TrainConfig."""
    flags = [to_flag(pair.split("=")[0], pair.split("=")[-1]) for pair in variant.split(",")]
    changed = cli.parse(TrainConfig, flags, default=config)
    check_config(changed, 1)
    return changed


# patterns that identify each family of kernels (on a CPU, operators) by their names; the first match counts
KERNEL_FAMILIES = {
    "attention": r"flash|fmha|sdpa|attention",
    "loss": r"softmax|nll|loss|logsumexp|cross_entropy",
    "LayerNorm, residual": r"layer_?norm",
    "matmul": r"gemm|nvjet|cutlass|cublas|xmma|splitk|::addmm|::mm|::bmm|matmul|scaled_mm",
    "optimizer": r"adam|multi_tensor|foreach|lerp|norm_kernel",
    "embedding": r"embedding",
    "bias gradients": r"(red|per)_fused_\w*sum|::sum$",
    "GELU": r"gelu",
    "q, k, v gradients": r"_cat_|::cat$|catarray",
    "copies": r"memcpy|memset|direct_copy|::copy_|to_copy(_t|_add)?_\d+$",
}


def profiled(run):
    """Profile one call of `run`: averages per kernel, or per operator on a CPU."""
    activity = torch.profiler.ProfilerActivity
    activity = activity.CUDA if run.place.device_type == "cuda" else activity.CPU
    with torch.profiler.profile(activities=[activity]) as profile:
        run()
    return profile.key_averages()


def roofline(ours, seconds):
    """Print a step's time by family of kernels, next to its theoretical minimum; return the numbers.

    The minimum: matmuls, and the causal half of attention, at the measured bf16 matmul peak; three passes over bfloat16
    logits, and 28 bytes per weight for AdamW, at the measured copy bandwidth.
    """
    device, c = ours.place.device, ours.config
    cuda = device.startswith("cuda")
    measured = dict.fromkeys([*KERNEL_FAMILIES, "other"], 0.0)
    kernels = {}
    for event in profiled(ours):
        microseconds = event.self_device_time_total if cuda else event.self_cpu_time_total
        measured[family_of(event.key)] += microseconds / 1e6
        kernels[event.key] = microseconds / 1e6

    flops, bandwidth = matmul_peak(device), copy_bandwidth(device)
    tokens, T = c.total_batch_size, c.sequence_length
    shape = ours.raw_model.config
    attention = 12 * c.n_layer * T * c.n_embd * tokens
    work = flops_per_token(shape, T) * tokens
    lower_bound = {
        "matmul": (work - attention) / flops,
        "attention": attention / 2 / flops,
        "loss": 3 * 2 * shape.vocab_size * tokens / bandwidth,
        "optimizer": 28 * sum(p.numel() for p in ours.raw_model.parameters()) / bandwidth,
    }
    print(f"measured peaks: matmul {flops / 1e12:.2f} TFLOP/s, copy {bandwidth / 1e9:.0f} GB/s")
    for family, duration in sorted(measured.items(), key=lambda item: -item[1]):
        bound = f"{1e3 * lower_bound[family]:9.2f} ms at least" if family in lower_bound else ""
        print(f"  {family:20}{1e3 * duration:10.2f} ms {duration / sum(measured.values()):6.1%}{bound}")
    datasheet = peak_flops(machine(device)["device"])
    mfu = {"measured": work / seconds / flops} | ({"datasheet": work / seconds / datasheet} if datasheet else {})
    print("MFU (PaLM's convention): " + ", ".join(f"{share:.1%} of the {name} peak" for name, share in mfu.items()))
    return {
        "matmul_peak": flops,
        "copy_bandwidth": bandwidth,
        "mfu": mfu,
        "families": measured,
        "least": lower_bound,
        "kernels": dict(sorted(kernels.items(), key=lambda item: -item[1])[:40]),
        "attention_backend": attention_backend(c, ours.place),
    }


def family_of(kernel):
    """The family in KERNEL_FAMILIES that a kernel's name belongs to."""
    matches = (family for family, pattern in KERNEL_FAMILIES.items() if re.search(pattern, kernel.lower()))
    return next(matches, "other")


def matmul_peak(device):
    """FLOP/s of a large matmul: bf16 of size 8192 on a GPU; float32, as in training, of size 1024 on a CPU."""
    n, dtype, repeat = (8192, torch.bfloat16, 20) if device.startswith("cuda") else (1024, torch.float32, 3)
    a = torch.randn(n, n, device=device, dtype=dtype)
    a @ a
    return max(2 * n**3 * repeat / timed(lambda: [a @ a for _ in range(repeat)], device)[0] for _ in range(3))


def copy_bandwidth(device):
    """Bytes per second that a copy reads and writes."""
    a = torch.zeros(2**30 if device.startswith("cuda") else 2**27, device=device, dtype=torch.uint8)
    b = torch.empty_like(a)
    b.copy_(a)
    return max(2 * len(a) / timed(lambda: b.copy_(a), device)[0] for _ in range(5))


def attention_backend(config, place):
    """The implementation that scaled_dot_product_attention chooses for the step."""
    shape = (config.batch_size, config.n_head, config.sequence_length, config.n_embd // config.n_head)
    q = torch.empty(shape, device=place.device, dtype=place.dtype, requires_grad=True)
    if not hasattr(torch, "_fused_sdp_choice"):
        return "unknown"
    return torch.nn.attention.SDPBackend(torch._fused_sdp_choice(q, q, q, is_causal=True)).name


def bench_train(options, device):
    """Compare training steps with the same tokens, model shape, optimizer and precision."""
    config = train_config(options, device)
    place = choose_place(config, device)
    with tempfile.TemporaryDirectory() as folder:
        random_shards(folder, config)
        runs = {name: build() for name, build in make_runs(options, config, folder, place, 1).items()}
        ours = runs["train_gpt2"]
        steps = options.steps or max(1, round(0.5 / min(timed(ours, device)[0] for _ in range(3))))
        for run in runs.values():
            run.steps = steps
        c = config
        print(f"{c.n_layer} layers, {c.n_head} heads, {c.n_embd} wide, B {ours.B}, T {c.sequence_length}")
        print(f"{config.total_batch_size:,} tokens a step, {steps} steps a round, {place.dtype}")
        measured = interleave(runs, options.rounds, device)
        extra = {"steps": steps, "losses": {name: run["result"] for name, run in measured.items()}}
        ours.steps = 1
        extra |= roofline(ours, statistics.median(measured["train_gpt2"]["seconds"]) / steps)
    return report(options, device, measured, steps * config.total_batch_size, "tok", extra)


# -----------------------------------------------------------------------------
# The ladder


@dataclass(frozen=True)
class Rung:
    """A rung of build-nanogpt's lecture: the optimizations that are switched on."""

    name: str
    tf32: bool = False  # float32 matmuls in TensorFloat-32
    dtype: str = "float32"  # of autocast
    compile: bool = False
    flash: bool = False  # attention in one kernel
    vocab_size: int = 50257  # 50304 is the next multiple of 128
    fused: bool | None = None  # AdamW in one kernel


def make_rungs(device):
    """The rungs that exist on this device, in the lecture's order."""
    cpu = device.startswith("cpu")
    changes = {
        "TF32": dict(tf32=True),
        "bfloat16 autocast": dict(dtype="bfloat16"),
        "torch.compile": dict(compile=True),
        "flash attention": dict(flash=True),
        "vocabulary 50304": dict(vocab_size=50304),
        "fused AdamW": dict(fused=True),
    }
    if cpu:
        del changes["TF32"]
    if cpu and not torch.cpu._is_avx512_bf16_supported():
        del changes["bfloat16 autocast"]
    rungs = [Rung("float32")]
    for name, change in changes.items():
        rungs.append(dataclasses.replace(rungs[-1], name=name, **change))
    return rungs


class PlainAttention(CausalSelfAttention):
    """Attention without a fused kernel: the T x T scores of each head are written to memory."""

    def forward(self, x, attn_mask=None, cache=None):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (part.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for part in (q, k, v))
        scores = q @ k.mT / math.sqrt(k.size(-1))  # (B, nh, T, T)
        future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        y = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


def make_rung(rung, config, folder, device):
    """The program's GPT in a plain loop, with the optimizations of `rung` and no others."""
    config = dataclasses.replace(config, vocab_size=rung.vocab_size, dtype=rung.dtype)
    torch.manual_seed(0)
    model = GPT(GPTConfig(config.block_size, config.vocab_size, config.n_layer, config.n_head, config.n_embd))
    if not rung.flash:
        for block in model.transformer.h:
            block.attn.__class__ = PlainAttention  # keeps its weights
    model.to(device)
    optimizer = plain_adamw(model, config, rung.fused)
    trained = torch.compile(model, dynamic=False) if rung.compile else model
    run = Reference(config, folder, choose_place(config, device), 1, trained, lambda m, x, y: m(x, y)[1], optimizer)

    def step():
        torch.set_float32_matmul_precision("high" if rung.tf32 else "highest")
        return run()

    return step


def ladder_config(options, device):
    """GPT-2 124M with the lecture's B of 16 on a GPU, a small GPT with GPT-2's vocabulary on a CPU."""
    shape = dict(batch_size=16)
    if not device.startswith("cuda"):
        shape = dict(n_layer=4, n_head=6, n_embd=384, batch_size=1, sequence_length=512)
    given = {name: getattr(options, name) or value for name, value in shape.items()}
    options = dataclasses.replace(options, preset="gpt2", **given)
    micro_batch = options.batch_size * (options.sequence_length or PRESETS["gpt2"].sequence_length)
    return train_config(dataclasses.replace(options, total_batch_size=micro_batch), device)


def bench_ladder(options, device):
    """Compare the lecture's optimizations, each on top of those before it, and then this program's own step."""
    config = ladder_config(options, device)
    rungs = make_rungs(device)
    ours = dataclasses.replace(config, dtype=rungs[-1].dtype, compile=rungs[-1].compile, vocab_size=50304)
    larger = dataclasses.replace(ours, batch_size=PRESETS["gpt2"].batch_size)
    larger.total_batch_size = larger.batch_size * larger.sequence_length
    print(f"{config.n_layer} layers, {config.n_head} heads, {config.n_embd} wide, T {config.sequence_length}")
    with tempfile.TemporaryDirectory() as folder:
        random_shards(folder, dataclasses.replace(larger, vocab_size=50257))
        runs = {rung.name: make_rung(rung, config, folder, device) for rung in rungs}
        runs["this program"] = Ours(ours, folder, choose_place(ours, device), 1)
        tokens = dict.fromkeys(runs, config.total_batch_size)
        if device.startswith("cuda"):
            name = f"this program, B {larger.batch_size}"
            try:
                runs[name] = Ours(larger, folder, choose_place(larger, device), 1)
                tokens[name] = larger.total_batch_size
            except UserError as error:  # it does not fit
                print(error)
        measured = interleave(runs, options.rounds, device)

    # seconds per token, so that rungs with another B can be compared
    seconds = {name: [s / tokens[name] for s in run["seconds"]] for name, run in measured.items()}
    rows, previous = {}, "float32"
    for name, run in measured.items():
        rows[name] = {
            "ms": 1e3 * statistics.median(run["seconds"]),
            "tok_per_s": 1 / statistics.median(seconds[name]),
            "gain": paired_ratio(seconds[previous], seconds[name]),
            "total": paired_ratio(seconds["float32"], seconds[name]),
            "loss": run["result"],
        }
        previous = name
    print(f"{'':22}{'ms':>10}{'tok/s':>12}{'gain':>8}{'in all':>8}{'peak GiB':>10}")
    for name, row in rows.items():
        line = f"{name:22}{row['ms']:10.2f}{row['tok_per_s']:12,.0f}{row['gain']:8.2f}{row['total']:8.2f}"
        print(f"{line}{measured[name]['peak_gib']:10.2f}")
    ours = seconds[name]  # of the last rung
    ratios = {rung: paired_ratio(times, ours) for rung, times in seconds.items()}
    numbers = {
        "ratio": ratios["float32"],
        "ratios": ratios,
        "tok_per_s": rows[name]["tok_per_s"],
        "rungs": rows,
        "tokens": tokens,
    }
    numbers = save(options, device, measured, numbers)
    if options.plot:
        draw_ladder(rows, numbers["device"], options.plot)
    return numbers


def paired_ratio(theirs, ours):
    """The median over the rounds of theirs / ours."""
    return statistics.median(a / b for a, b in zip(theirs, ours))


def draw_ladder(rows, device, path):
    """Draw a bar per rung with its tokens per second."""
    import matplotlib  # takes a second

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names, speeds = list(rows), [row["tok_per_s"] for row in rows.values()]
    figure, axes = plt.subplots(figsize=(9, 0.5 * len(rows) + 1.2), layout="constrained")
    colors = ["tab:orange" if name.startswith("this program") else "tab:blue" for name in names]
    bars = axes.barh(names, speeds, color=colors)
    labels = [f"{row['tok_per_s']:,.0f} tok/s   {row['ms']:,.1f} ms   {row['total']:.1f}x" for row in rows.values()]
    axes.bar_label(bars, labels, padding=4)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.5 * max(speeds))
    axes.set_xlabel("training tokens per second (also: milliseconds per step, and speed relative to the first rung)")
    axes.set_title(f"Each optimization on top of those before it\n{device}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


# -----------------------------------------------------------------------------
# Data preparation


def bench_data(options, device):
    """Compare fineweb.py, from documents to shards on all cores, with single-threaded tiktoken on texts in memory."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if options.input:
            sources = documents.list_inputs(options.input)
            texts = [p.text for s in sources for p in documents.read_pieces(s.name, s.name, "text", 0)]
            chosen = {"input": options.input}
        else:
            texts, chosen = documents.python_docs(), {"dataset": "python-docs"}
        enc = tokenizer.get_encoding(options.tokenizer)
        stack.enter_context(contextlib.redirect_stdout(None))
        stack.enter_context(contextlib.redirect_stderr(open(os.devnull, "w")))
        numbers = itertools.count()

        def ours():
            out_dir = f"{folder}/{next(numbers)}"
            fineweb.prepare(fineweb.Options(**chosen, out_dir=out_dir, tokenizer=options.tokenizer))
            return json.loads(Path(out_dir, "meta.json").read_text())["tokens"]

        def tiktoken():
            return sum(len(enc.encode_ordinary(text)) + 1 for text in texts)

        measured = interleave({"fineweb.py": ours, "tiktoken, one thread": tiktoken}, options.rounds, device)
        tokens = measured["fineweb.py"]["result"]
    cores = documents.num_cores()
    if tokens != measured["tiktoken, one thread"]["result"]:
        others = measured["tiktoken, one thread"]["result"]
        print(f"warning: fineweb.py made {tokens:,} tokens and tiktoken {others:,}, so the speeds cannot be compared.")
    print(f"{len(texts):,} documents, {tokens:,} tokens, {cores} cores")
    numbers = report(options, device, measured, tokens, "tok", {"cores": cores, "tokens": tokens})
    print(f"{numbers['ratio'] / cores:.0%} of {cores} cores x one thread")
    return numbers


# -----------------------------------------------------------------------------
# HellaSwag and sampling


def load_or_random_model(options, device):
    """(GPT, tokenizer) of --model, or GPT-2 124M with seeded random weights."""
    if options.model:
        model, enc = load_model(options.model)
        return model.to(device).eval(), enc
    torch.manual_seed(0)
    enc = tokenizer.get_encoding(options.tokenizer)
    shape = {name: getattr(options, name) for name in ("n_layer", "n_head", "n_embd") if getattr(options, name)}
    return GPT(GPTConfig(vocab_size=math.ceil(enc.n_vocab / 64) * 64, **shape)).to(device).eval(), enc


@torch.no_grad()
def four_rows(model, examples, n_vocab):
    """HellaSwag as usually scored: one example at a time, in four padded rows of context and ending."""
    device = next(model.parameters()).device
    predictions = []
    for context, endings, *_ in examples:
        length = len(context) + max(map(len, endings))
        tokens, mask = torch.zeros(2, 4, length, dtype=torch.long)
        for row, ending in enumerate(endings):
            tokens[row, : len(context) + len(ending)] = torch.tensor(context + ending)
            mask[row, len(context) : len(context) + len(ending)] = 1
        tokens, mask = tokens.to(device), mask.to(device)
        logits = model(tokens)[0][:, :-1, :n_vocab].float()
        losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(4, -1)
        total = (losses * mask[:, 1:]).sum(1)
        predictions.append([total.argmin().item(), (total / mask.sum(1)).argmin().item()])
    return np.array(predictions)


def bench_hellaswag(options, device):
    """Compare hellaswag.predict with `four_rows` on the same weights, and check that their choices agree."""
    model, enc = load_or_random_model(options, device)
    limit = options.limit or (1000 if device.startswith("cuda") else 24)
    lines = itertools.islice(hellaswag.iterate_examples(options.data), limit)
    examples = [hellaswag.render_example(line, enc) for line in lines]
    place = choose_place(options, device)

    def under_autocast(function):
        with place.autocast():
            return function(model, examples, enc.n_vocab)[:, :2]

    runs = {"hellaswag.py": lambda: under_autocast(hellaswag.predict), "four rows": lambda: under_autocast(four_rows)}
    measured = interleave(runs, options.rounds, device)
    same = (measured["hellaswag.py"]["result"] == measured["four rows"]["result"]).sum(0).tolist()
    print(f"{len(examples)} examples, {place.dtype}: same ending by sum {same[0]}, by mean {same[1]}")
    extra = {"examples": len(examples), "same_by_sum": same[0], "same_by_mean": same[1]}
    numbers = report(options, device, measured, len(examples), "examples", extra)
    seconds = hellaswag.NUM_EXAMPLES / numbers["examples_per_s"]
    print(f"all {hellaswag.NUM_EXAMPLES:,} examples at this rate: {seconds:.1f} s")
    return numbers


@torch.no_grad()
def generate_without_cache(model, idx, max_new_tokens, n_vocab):
    """Greedy decoding that recomputes the whole sequence for every token."""
    for _ in range(max_new_tokens):
        logits = model(idx[:, -model.config.block_size :])[0][:, -1, :n_vocab]
        idx = torch.cat([idx, logits.argmax(-1, keepdim=True)], 1)
    return idx


def bench_sample(options, device):
    """Compare greedy GPT.generate with a loop without a cache and with transformers' generate, on the same weights."""
    model, enc = load_or_random_model(options, device)
    B, n = options.batch_size or 1, options.max_new_tokens
    prompt = torch.tensor([enc.encode_ordinary("Hello, I'm a language model,")] * B, device=device)
    dtype, _ = choose_dtype(options.dtype, device, model.config.n_embd)
    model.to(dtype).residual_dtype = dtype  # as in sample.py
    hf = transformers_model(model.config).to(device, dtype).eval()
    with torch.no_grad():
        weights = dict(hf.named_parameters())
        for name, parameter in model.named_parameters():
            weights[name].copy_(parameter.T if name.endswith(MATRICES) else parameter)
    # ids that only pad the vocabulary, which no side may generate
    padding = list(range(enc.n_vocab, model.config.vocab_size)) or None

    def ours():
        return torch.stack(list(model.generate(prompt, n, enc.n_vocab, temperature=0)), 1).tolist()

    def without_cache():
        return generate_without_cache(model, prompt, n, enc.n_vocab)[:, prompt.size(1) :].tolist()

    def transformers():
        ids = hf.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=n,
            min_new_tokens=n,
            do_sample=False,
            use_cache=True,
            suppress_tokens=padding,
            pad_token_id=0,
        )
        return ids[:, prompt.size(1) :].tolist()

    runs = {"sample.py": ours, "without a cache": without_cache, "transformers": transformers}
    measured = interleave(runs, options.rounds, device)
    results = [run.pop("result") for run in measured.values()]
    same = {name: result == results[0] for name, result in zip(measured, results)}
    print(f"{n} tokens for {B} sequence(s), {dtype}, greedy; same tokens as ours: {same}")
    return report(options, device, measured, B * n, "tok", {"same_tokens": same, "max_new_tokens": n})


# -----------------------------------------------------------------------------


def main(args=None):
    """Parse the flags and run one benchmark."""
    options = cli.parse(Options, args)
    device = choose_device(options.device)
    sizes = "rounds steps limit batch_size sequence_length total_batch_size n_layer n_head n_embd vocab_size".split()
    for name in sizes:
        if getattr(options, name) < 0:
            raise UserError(f"{cli.flag_of(name)} is {getattr(options, name)}, but it must be 0 or more.")
    if options.max_new_tokens < 1:
        raise UserError(f"--max-new-tokens is {options.max_new_tokens}, but it must be 1 or more.")
    options.rounds = options.rounds or (20 if options.what == "train" else 5)
    if device == "cuda":
        device = "cuda:0"
    if device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")  # TF32 for float32 matmuls, as in the trainer
    benchmarks = {
        "train": bench_train,
        "ladder": bench_ladder,
        "data": bench_data,
        "hellaswag": bench_hellaswag,
        "sample": bench_sample,
    }
    benchmarks[options.what](options, device)


if __name__ == "__main__":
    cli.run(main)
