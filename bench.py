"""The measured numbers: the program's own code beside a reference, in turn, in one process.

    python bench.py train                       the step of --preset beside transformers in a plain loop
    python bench.py train --peer ../nanoGPT     and beside the GPT of a nanoGPT checkout
    python bench.py data --input docs/*.parquet    fineweb.py beside tiktoken on one thread
    python bench.py hellaswag --data hellaswag_val.jsonl    packed rows beside four padded rows an example
    python bench.py sample                      generate beside a loop without a cache, and transformers'

Every run is warmed up, then the runs take turns for --rounds rounds: what else the machine does hits all
of them alike. A ratio is the median over the rounds of reference / ours. --json FILE keeps the numbers.
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

import train_gpt2 as t  # before torch: it sets how OpenMP's threads wait

import numpy as np
import torch
import torch.nn.functional as F
import tyro

from plumbing import cli, documents
import fineweb
import hellaswag
import tokenizer
from plumbing.cli import UserError
from plumbing.huggingface import MATRICES


@dataclass
class Options:
    """Measure the program beside references in the same run."""

    what: tyro.conf.Positional[Literal["train", "data", "hellaswag", "sample"]]  # what to measure
    device: str = "auto"  # cpu, cuda or mps; auto takes the best there is
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of activations, for every side
    json: str = ""  # write the numbers to this file
    rounds: int = 0  # turns that each side takes; 0: 20 of train, 5 of the others
    steps: int = 0  # training steps per turn; 0: about half a second's worth, so that many turns can be compared
    # train, and the shape of the model elsewhere; 0: the preset's
    preset: str = ""  # of train_gpt2.py; default quickstart on a CPU, gpt2 on a GPU
    peer: str = ""  # a nanoGPT checkout; its model.py is imported from there and trained beside ours
    variants: tuple[str, ...] = ()  # more of ours, with other settings: compile=False batch_size=32,compile=True
    batch_size: int = 0  # B, sequences per micro-step (of sample: sequences at a time)
    sequence_length: int = 0  # T, tokens per sequence
    total_batch_size: int = 0  # tokens per step
    n_layer: int = 0  # blocks
    n_head: int = 0  # attention heads
    n_embd: int = 0  # channels
    vocab_size: int = 0  # rows of the embedding
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
    """(seconds, what function() returns); on CUDA by events, so that the device's work is what counts."""
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
    """Peak memory since the last call, all sides' weights included: CUDA's tensors, or resident memory."""
    if device.startswith("cuda"):
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak / 2**30
    try:
        status = Path("/proc/self/status").read_text()
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the high-water mark starts again from here
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 2**20
    except OSError:
        return math.nan


def alternate(runs, rounds, device):
    """Call the functions `runs` {name: function} in turn, one warm-up and `rounds` times.

    Returns {name: {"seconds": [...], "cpu_seconds": [...], "peak_gib": ..., "result": of the last call}};
    the processor's seconds say what a side costs where others use the machine, too.
    """
    measured = {name: {"seconds": [], "cpu_seconds": [], "peak_gib": 0.0, "result": None} for name in runs}
    gc.freeze()  # what is there stays: collecting between the turns is then cheap
    for turn in range(-1, rounds):
        for name, function in runs.items():
            gc.collect()
            peak_gib(device)
            busy = time.process_time()
            seconds, measured[name]["result"] = timed(function, device)
            busy = time.process_time() - busy
            measured[name]["peak_gib"] = max(measured[name]["peak_gib"], peak_gib(device))
            if turn >= 0:
                measured[name]["seconds"].append(seconds)
                measured[name]["cpu_seconds"].append(busy)
    return measured


def report(options, device, measured, work, unit, extra=None):
    """Print the table of `alternate`'s result, the first run being ours; write and return what --json holds.

    work: how many `unit` a run does, e.g. tokens.
    """
    ours, *others = measured
    width = max(map(len, measured)) + 2
    print(f"{'':{width}}{unit + '/s':>12}{'median s':>11}{'min':>9}{'max':>9}{'peak GiB':>10}{'CPU s':>9}{'ratio':>7}"
          f"{'(of the rounds)':>17}{'by CPU s':>10}")
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
            busy = zip(run["cpu_seconds"], measured[ours]["cpu_seconds"])
            cpu_ratios[name] = statistics.median(theirs / mine for theirs, mine in busy)
            line += f"{ratios[name]:7.2f}{f'({min(paired):.2f} to {max(paired):.2f})':>17}{cpu_ratios[name]:10.2f}"
        print(line)
    numbers = {
        "what": options.what, "ratio": ratios[others[0]] if others else None, f"{unit}_per_s": rates[ours],
        "ratios": ratios, "cpu_ratios": cpu_ratios, "rates": rates,
        **{key: {name: run[key] for name, run in measured.items()} for key in ("seconds", "cpu_seconds", "peak_gib")},
        **(extra or {}), **machine(device), "options": dataclasses.asdict(options),
    }  # fmt: skip
    if options.json:
        with cli.atomic_write(options.json, "w") as file:
            file.write(json.dumps(numbers, indent=1) + "\n")
    return numbers


def machine(device):
    """Where and with what a number was measured."""
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
    """The TrainConfig that the flags mean."""
    preset = options.preset or ("gpt2" if device.startswith("cuda") else "quickstart")
    if preset not in t.PRESETS:
        raise UserError(f"got --preset {preset}, needed one that exists, {cli.suggest(preset, t.PRESETS)}")
    names = ("batch_size", "sequence_length", "total_batch_size", "n_layer", "n_head", "n_embd", "vocab_size")
    config = dataclasses.replace(t.PRESETS[preset], **{n: getattr(options, n) for n in names if getattr(options, n)})
    num_ids = 257 if preset == "quickstart" else 50257
    micro_batch = config.batch_size * config.sequence_length
    config = dataclasses.replace(
        config,
        dtype=options.dtype,
        optimizer="adamw",  # as the references; a variant may have another
        block_size=max(config.block_size, config.sequence_length),
        vocab_size=config.vocab_size or math.ceil(num_ids / 64) * 64,
        total_batch_size=options.total_batch_size or max(1, config.total_batch_size // micro_batch) * micro_batch,
    )
    t.check_config(config, 1)
    return config


def alone(options, device):
    """The one process of this run, as the trainer describes it."""
    return t.Distributed(0, 0, 1, device, t.choose_dtype(options, device.split(":")[0]))


def random_shards(folder, config, num_windows=256):
    """Shards of random ids: the time of a step does not depend on what it reads, and no text is needed."""
    size = max(num_windows, config.total_batch_size // config.sequence_length) * config.sequence_length + 1
    for split in ("val_000000", "train_000001"):
        ids = np.random.default_rng(0).integers(config.vocab_size, size=size).astype(np.uint16)
        np.save(Path(folder) / f"random_{split}.npy", ids)


class Ours:
    """The trainer's own pieces, put together as train_gpt2.train does; calling it makes --steps steps."""

    def __init__(self, config, folder, ddp, steps):
        self.config, self.ddp, self.steps, self.step = config, ddp, steps, 0
        torch.manual_seed(0)
        shape = (config.block_size, config.vocab_size, config.n_layer, config.n_head, config.n_embd)
        self.raw_model = t.GPT(t.GPTConfig(*shape))
        self.model, self.B = t.fit_to_machine(self.raw_model, config, ddp)
        if config.compile and self.model is self.raw_model:
            raise RuntimeError("torch.compile failed: what would be measured is not what was asked for")
        layout = dict(B=self.B, T=config.sequence_length, device=ddp.device)
        self.loader = t.DataLoaderLite(folder, "train", **layout, shuffle=config.shuffle)
        self.val_loader = t.DataLoaderLite(folder, "val", **layout)
        self.optimizers = t.configure_optimizers(self.raw_model, config, ddp.device_type)
        self.scaler = torch.amp.GradScaler(ddp.device_type, enabled=ddp.dtype == torch.float16)

    def __call__(self):
        c = self.config
        num_windows = c.total_batch_size // c.sequence_length
        for _ in range(self.steps):
            t.set_schedules(self.optimizers, self.step, c)
            loss, _ = t.train_step(
                self.model, self.loader, self.optimizers, self.scaler, num_windows, c, self.ddp
            )
            self.step += 1
        return loss


class Reference:
    """A model of somebody else in the loop that everybody writes first."""

    def __init__(self, config, folder, ddp, steps, model, loss_of, optimizer):
        self.config, self.ddp, self.steps, self.step = config, ddp, steps, 0
        self.model, self.loss_of, self.optimizer = model.to(ddp.device).train(), loss_of, optimizer
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
                batch = self.tokens[self.position : self.position + span + 1].to(self.ddp.device)
                x, y = (ids.view(c.batch_size, c.sequence_length) for ids in (batch[:-1], batch[1:]))
                with self.ddp.autocast():
                    loss = self.loss_of(self.model, x, y) / accumulation
                loss.backward()
                total += loss.detach()
                self.position += span
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), c.grad_clip)
            for group in self.optimizer.param_groups:
                group["lr"] = t.get_lr(self.step, c)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
        return float(total)


def transformers_model(config):
    """transformers' GPT-2 of that shape, without dropout."""
    import transformers  # takes seconds

    transformers.logging.set_verbosity_error()
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_positions=config.block_size, vocab_size=config.vocab_size, n_layer=config.n_layer, n_head=config.n_head,
        n_embd=config.n_embd, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, use_cache=False,
        bos_token_id=config.vocab_size - 1, eos_token_id=config.vocab_size - 1,
    ))  # fmt: skip


def make_transformers(config, folder, ddp, steps, compiled=False, **adamw):
    """transformers and AdamW with our settings; its loss shifts the labels itself."""
    model = transformers_model(config).to(ddp.device)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.max_lr, betas=(config.beta1, config.beta2), eps=1e-8, **adamw)
    model = torch.compile(model, dynamic=False) if compiled else model
    return Reference(config, folder, ddp, steps, model, lambda m, x, y: m(input_ids=x, labels=x).loss, optimizer)


def make_peer(config, folder, ddp, steps, peer):
    """The GPT of a nanoGPT checkout, with the optimizer that it makes for itself."""
    path = Path(peer) / "model.py"
    if not path.exists():
        raise UserError(f"got --peer {peer} without model.py, needed a checkout of nanoGPT, clone one and name it")
    spec = importlib.util.spec_from_file_location("peer_model", path)
    module = sys.modules["peer_model"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    shape = {name: getattr(config, name) for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")}
    with contextlib.redirect_stdout(None):
        model = module.GPT(module.GPTConfig(**shape, dropout=0.0, bias=True)).to(ddp.device)
        betas = (config.beta1, config.beta2)
        optimizer = model.configure_optimizers(config.weight_decay, config.max_lr, betas, ddp.device_type)
    model = torch.compile(model) if config.compile else model
    return Reference(config, folder, ddp, steps, model, lambda m, x, y: m(x, y)[1], optimizer)


def make_runs(options, config, folder, ddp, steps):
    """What `train` compares: {name: a function that builds it}, ours first, the main reference second."""
    here = (folder, ddp, steps)
    cuda = ddp.device_type == "cuda"
    runs = {"train_gpt2": lambda: Ours(config, *here)}
    if cuda:
        runs["transformers, compiled"] = lambda: make_transformers(config, *here, compiled=True, fused=True)
        runs["transformers, eager"] = lambda: make_transformers(config, *here, fused=True)
    else:
        runs["transformers"] = lambda: make_transformers(config, *here)
        runs["transformers, fused AdamW"] = lambda: make_transformers(config, *here, fused=True)
    if options.peer:
        runs[f"nanoGPT{', compiled' if config.compile else ''}"] = lambda: make_peer(config, *here, options.peer)
    for variant in options.variants:
        changed = apply_variant(config, variant)
        other = alone(changed, ddp.device)  # a variant may have another dtype
        runs[f"train_gpt2 {variant}"] = lambda changed=changed, other=other: Ours(changed, folder, other, steps)
    return runs


def to_flag(field, value):
    """A field's value on the trainer's command line; a switch has none there: --compile or --no-compile."""
    if str(value) in ("True", "False"):
        return f"--{'no-' * (str(value) == 'False')}{field}"
    return f"--{field}={value}"


def apply_variant(config, variant):
    """"compile=False,batch_size=32" applied to a TrainConfig."""
    flags = [to_flag(pair.split("=")[0], pair.split("=")[-1]) for pair in variant.split(",")]
    changed = cli.parse(t.TrainConfig, flags, default=config)
    t.check_config(changed, 1)
    return changed


# what the names of kernels (on a CPU, of operators) have in common; the first family that matches counts
FAMILIES = {
    "attention": r"flash|fmha|sdpa|attention",
    "optimizer": r"adam|multi_tensor|foreach|lerp|norm_kernel",
    "loss": r"softmax|nll|loss|logsumexp",
    "matmul": r"gemm|nvjet|cutlass|cublas|xmma|splitk|::addmm|::mm|::bmm|matmul",
    "copies": r"memcpy|memset|direct_copy|::copy_|::cat|to_copy_\d+$",
}


def profiled(run):
    """The profiler's averages over a turn of a run: by kernel, on a CPU by operator."""
    activity = torch.profiler.ProfilerActivity
    activity = activity.CUDA if run.ddp.device_type == "cuda" else activity.CPU
    with torch.profiler.profile(activities=[activity]) as profile:
        run()
    return profile.key_averages()


def roofline(ours, seconds):
    """Print where a step's time goes, by family of kernels, beside the least it could take; return the numbers.

    The least: matmuls at the measured bf16 matmul peak, attention's causal half likewise, three passes over
    bfloat16 logits and 28 bytes per weight for AdamW at the measured copy bandwidth.
    """
    device, c = ours.ddp.device, ours.config
    cuda = device.startswith("cuda")
    spent = dict.fromkeys([*FAMILIES, "pointwise"], 0.0)
    kernels = {}
    for event in profiled(ours):
        microseconds = event.self_device_time_total if cuda else event.self_cpu_time_total
        family = next((name for name, names in FAMILIES.items() if re.search(names, event.key.lower())), "pointwise")
        spent[family] += microseconds / 1e6
        kernels[event.key] = microseconds / 1e6

    flops, bandwidth = matmul_peak(device), copy_bandwidth(device)
    tokens, T = c.total_batch_size, c.sequence_length
    shape = ours.raw_model.config
    attention = 12 * c.n_layer * T * c.n_embd * tokens
    work = t.flops_per_token(shape, T) * tokens
    least = {
        "matmul": (work - attention) / flops, "attention": attention / 2 / flops,
        "loss": 3 * 2 * shape.vocab_size * tokens / bandwidth,
        "optimizer": 28 * sum(p.numel() for p in ours.raw_model.parameters()) / bandwidth,
    }  # fmt: skip
    print(f"measured peaks: matmul {flops / 1e12:.2f} TFLOP/s, copy {bandwidth / 1e9:.0f} GB/s")
    for family, duration in sorted(spent.items(), key=lambda item: -item[1]):
        bound = f"{1e3 * least[family]:9.2f} ms at least" if family in least else ""
        print(f"  {family:10}{1e3 * duration:10.2f} ms {duration / sum(spent.values()):6.1%}{bound}")
    datasheet = t.peak_flops(ours.ddp)
    mfu = {"measured": work / seconds / flops} | ({"datasheet": work / seconds / datasheet} if datasheet else {})
    print("MFU (PaLM's convention): " + ", ".join(f"{share:.1%} of the {name} peak" for name, share in mfu.items()))
    return {
        "matmul_peak": flops, "copy_bandwidth": bandwidth, "mfu": mfu, "families": spent, "least": least,
        "kernels": dict(sorted(kernels.items(), key=lambda item: -item[1])[:40]),
        "attention_backend": attention_backend(c, ours.ddp),
    }  # fmt: skip


def matmul_peak(device):
    """FLOP/s of a large matmul: bf16 and 8192 on a GPU; on a CPU float32, in which it trains, and 1024."""
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


def attention_backend(config, ddp):
    """Which implementation scaled_dot_product_attention chooses for the step."""
    shape = (config.batch_size, config.n_head, config.sequence_length, config.n_embd // config.n_head)
    q = torch.empty(shape, device=ddp.device, dtype=ddp.dtype, requires_grad=True)
    if not hasattr(torch, "_fused_sdp_choice"):
        return "unknown"
    return torch.nn.attention.SDPBackend(torch._fused_sdp_choice(q, q, q, is_causal=True)).name


def bench_train(options, device):
    """Steps of the same tokens, model shape, optimizer and precision: ours, transformers', nanoGPT's."""
    config = train_config(options, device)
    ddp = alone(config, device)
    with tempfile.TemporaryDirectory() as folder:
        random_shards(folder, config)
        runs = {name: build() for name, build in make_runs(options, config, folder, ddp, 1).items()}
        ours = runs["train_gpt2"]
        steps = options.steps or max(1, round(0.5 / min(timed(ours, device)[0] for _ in range(3))))
        for run in runs.values():
            run.steps = steps
        c = config
        print(f"{c.n_layer} layers, {c.n_head} heads, {c.n_embd} wide, B {ours.B}, T {c.sequence_length}")
        print(f"{config.total_batch_size:,} tokens a step, {steps} steps a turn, {ddp.dtype}")
        measured = alternate(runs, options.rounds, device)
        extra = {"steps": steps, "losses": {name: run["result"] for name, run in measured.items()}}
        ours.steps = 1
        extra |= roofline(ours, statistics.median(measured["train_gpt2"]["seconds"]) / steps)
    return report(options, device, measured, steps * config.total_batch_size, "tok", extra)


# -----------------------------------------------------------------------------
# Data preparation


def bench_data(options, device):
    """fineweb.py from documents to shards on all cores, beside tiktoken on one thread with the texts in memory."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if options.input:
            sources = documents.list_inputs(options.input)
            texts = [p.text for s in sources for p in documents.read_pieces(s.name, s.name, "text")]
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

        measured = alternate({"fineweb.py": ours, "tiktoken, one thread": tiktoken}, options.rounds, device)
        tokens = measured["fineweb.py"]["result"]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if tokens != measured["tiktoken, one thread"]["result"]:
        print(f"the sides disagree: {tokens:,} and {measured['tiktoken, one thread']['result']:,} tokens")
    print(f"{len(texts):,} documents, {tokens:,} tokens, {cores} cores")
    numbers = report(options, device, measured, tokens, "tok", {"cores": cores, "tokens": tokens})
    print(f"{numbers['ratio'] / cores:.0%} of {cores} cores x one thread")
    return numbers


# -----------------------------------------------------------------------------
# HellaSwag and sampling


def some_model(options, device):
    """The --model, or GPT-2 124M with seeded random weights, (GPT, tokenizer)."""
    if options.model:
        model, enc = t.load_model(options.model)
        return model.to(device).eval(), enc
    torch.manual_seed(0)
    enc = tokenizer.get_encoding(options.tokenizer)
    shape = {name: getattr(options, name) for name in ("n_layer", "n_head", "n_embd") if getattr(options, name)}
    return t.GPT(t.GPTConfig(vocab_size=math.ceil(enc.n_vocab / 64) * 64, **shape)).to(device).eval(), enc


@torch.no_grad()
def four_rows(model, examples, n_vocab):
    """HellaSwag as it is usually scored: an example at a time, context and ending in four padded rows."""
    device = next(model.parameters()).device
    picks = []
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
        picks.append([total.argmin().item(), (total / mask.sum(1)).argmin().item()])
    return np.array(picks)


def bench_hellaswag(options, device):
    """hellaswag.predict beside `four_rows`, by the same weights, and whether both choose the same endings."""
    model, enc = some_model(options, device)
    limit = options.limit or (1000 if device.startswith("cuda") else 24)
    lines = itertools.islice(hellaswag.iterate_examples(options.data), limit)
    examples = [hellaswag.render_example(line, enc) for line in lines]
    ddp = alone(options, device)

    def under_autocast(function):
        with ddp.autocast():
            return function(model, examples, enc.n_vocab)[:, :2]

    runs = {"hellaswag.py": lambda: under_autocast(hellaswag.predict), "four rows": lambda: under_autocast(four_rows)}
    measured = alternate(runs, options.rounds, device)
    same = (measured["hellaswag.py"]["result"] == measured["four rows"]["result"]).sum(0).tolist()
    print(f"{len(examples)} examples, {ddp.dtype}: same ending by sum {same[0]}, by mean {same[1]}")
    extra = {"examples": len(examples), "same_by_sum": same[0], "same_by_mean": same[1]}
    numbers = report(options, device, measured, len(examples), "examples", extra)
    seconds = hellaswag.NUM_EXAMPLES / numbers["examples_per_s"]
    print(f"all {hellaswag.NUM_EXAMPLES:,} examples at this rate: {seconds:.1f} s")
    return numbers


@torch.no_grad()
def without_cache(model, idx, max_new_tokens, n_vocab):
    """Greedy continuation that runs the whole text again for every token."""
    for _ in range(max_new_tokens):
        logits = model(idx[:, -model.config.block_size :])[0][:, -1, :n_vocab]
        idx = torch.cat([idx, logits.argmax(-1, keepdim=True)], 1)
    return idx


def bench_sample(options, device):
    """Greedy GPT.generate beside a loop without a cache and transformers' generate, with the same weights."""
    model, enc = some_model(options, device)
    B, n = options.batch_size or 1, options.max_new_tokens
    prompt = torch.tensor([enc.encode_ordinary("Hello, I'm a language model,")] * B, device=device)
    dtype = t.choose_dtype(options, device.split(":")[0])
    model.to(dtype).residual_dtype = dtype  # as sample.py has it
    hf = transformers_model(model.config).to(device, dtype).eval()
    with torch.no_grad():
        weights = dict(hf.named_parameters())
        for name, parameter in model.named_parameters():
            weights[name].copy_(parameter.T if name.endswith(MATRICES) else parameter)
    padding = list(range(enc.n_vocab, model.config.vocab_size)) or None  # not to be generated, by nobody

    def ours():
        return torch.stack(list(model.generate(prompt, n, enc.n_vocab, temperature=0)), 1).tolist()

    def plain():
        return without_cache(model, prompt, n, enc.n_vocab)[:, prompt.size(1) :].tolist()

    def transformers():
        ids = hf.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=n, min_new_tokens=n, do_sample=False,
            use_cache=True, suppress_tokens=padding, pad_token_id=0,
        )  # fmt: skip
        return ids[:, prompt.size(1) :].tolist()

    runs = {"sample.py": ours, "without a cache": plain, "transformers": transformers}
    measured = alternate(runs, options.rounds, device)
    results = [run.pop("result") for run in measured.values()]
    same = {name: result == results[0] for name, result in zip(measured, results)}
    print(f"{n} tokens for {B} sequence(s), {dtype}, greedy; same tokens as ours: {same}")
    return report(options, device, measured, B * n, "tok", {"same_tokens": same, "max_new_tokens": n})


# -----------------------------------------------------------------------------


def main(args=None):
    options = cli.parse(Options, args)
    device = t.choose_device(options)
    for name in ("rounds", "steps", "limit", "batch_size", "sequence_length", "total_batch_size", "n_layer", "n_head"):
        if getattr(options, name) < 0:
            raise UserError(f"got {name} {getattr(options, name)}, needed 0 or more, leave it out for the default")
    if options.max_new_tokens < 1:
        raise UserError(f"got --max-new-tokens {options.max_new_tokens}, needed 1 or more, leave it out for 256")
    options.rounds = options.rounds or (20 if options.what == "train" else 5)
    if device == "cuda":
        device = "cuda:0"
        torch.set_float32_matmul_precision("high")  # TF32 where something is float32, as the trainer does
    bench = {"train": bench_train, "data": bench_data, "hellaswag": bench_hellaswag, "sample": bench_sample}
    bench[options.what](options, device)


if __name__ == "__main__":
    cli.run(main)
