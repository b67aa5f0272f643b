"""All benchmarks that need a GPU, run one after the other: how fast is it, and which optimizations pay off on this one?

    python bench_gpu.py --out gpu_log --peer ../nanoGPT --build-nanogpt ../build-nanogpt

GPT-2 124M at 524,288 tokens a step. First the result: 60 steps of train_gpt2.py itself, with the GPU's clocks and
power; then nanoGPT and transformers, compiled, and build-nanogpt as published, on the same GPU in the same run; then
the ladder of bench.py. After that the details: where a step's time goes, compared with the roofline, and the rates of
its matmuls; whether evaluation triggers recompilation; how long HellaSwag takes; each optimization by itself, also
those that are not the default until a GPU has shown that they are right and faster; and the losses over 1,000 steps
with --dtype fp8 and bfloat16.

Each result is a line of JSON in --out/answers.jsonl, and a table is printed at the end. No benchmark is started that
needs longer than what is left of --minutes; repeating the command runs what has no result yet. To repeat a benchmark,
delete its line.

It needs torch 2.11 or newer, numpy, tiktoken, tqdm, safetensors, transformers and tyro. Without a network,
TIKTOKEN_CACHE_DIR must hold GPT-2's tables for those benchmarks that tokenize.
"""

import contextlib
import csv
import dataclasses
import gc
import importlib.util
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch._functorch.config
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel as DDP

import bench
import fineweb
import hellaswag
import tokenizer
from plumbing import (
    cli,  # before torch: sets how OpenMP threads wait
    kernels,
)
from plumbing.distributed import choose_device, cleanup_distributed, enable_fused_attention, flops_per_token
from plumbing.peaks import peak_flops
from train_gpt2 import PRESETS, TrainConfig, evaluate_hellaswag, evaluate_val_loss, generate_samples


@dataclass
class Options:
    """Benchmark the trainer on this GPU."""

    out: str = "gpu_log"  # folder of the results and raw logs; a benchmark with a result there is not run again
    minutes: float = 9.0  # start nothing that would take longer
    settings: str = ""  # changes to preset gpt2, for every side: n_layer=24,n_head=16,n_embd=1024
    shards: str = "python_docs"  # text to train on: 10M or more of GPT-2's tokens; else the built-in corpus
    hellaswag: str = ""  # HellaSwag's JSON lines, which the runs on text then score
    peer: str = ""  # a nanoGPT checkout
    build_nanogpt: str = ""  # a build-nanogpt checkout, run as published except for its data and number of steps


@dataclass(frozen=True)
class Bench:
    """State shared by the benchmarks; each benchmark is a method that returns a dict of numbers."""

    options: Options
    config: TrainConfig
    place: bench.Place
    deadline: float  # by time.monotonic(); processes that still run then get 30 more seconds

    @property
    def out(self):
        return Path(self.options.out)

    @property
    def seconds_left(self):
        return self.deadline + 30 - time.monotonic()

    def ours(self, changes="", fused_loss=""):
        """A callable that runs one step of the trainer, with `changes` to the settings, e.g. "batch_size=32"."""
        config = bench.apply_variant(self.config, changes) if changes else self.config
        return bench.Ours(config, self.out, bench.choose_place(config, self.place.device), 1, fused_loss)

    def reference(self, make, B, *args, **kwargs):
        """The step of another program's model, at B sequences per micro-step."""
        return rate(make(dataclasses.replace(self.config, batch_size=B), self.out, self.place, 1, *args, **kwargs))

    def machine(self):
        """The machine, its versions and its measured peaks."""
        smi = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,power.draw,power.limit", "--format=csv"]
        found = subprocess.run(smi, capture_output=True, text=True).stdout if shutil.which("nvidia-smi") else ""
        facts = bench.machine(self.place.device)
        peaks = {"matmul_peak": bench.matmul_peak(self.place.device), "datasheet_peak": peak_flops(facts["device"])}
        peaks["flops_per_token"] = flops_per_token(self.config, self.config.sequence_length)
        return facts | peaks | {"cudnn": torch.backends.cudnn.version(), "nvidia-smi": found}

    def headline(self, steps):
        """train_gpt2.py itself, without evaluations: sustained speed, with the GPU's clocks and power."""
        off = dict(val_every=0, hellaswag_every=0, sample_every=0, checkpoint_every=0)
        with sampled_clocks(self.out / "headline.smi.txt") as clocks:
            numbers = self.run_trainer("headline", max_steps=steps, **off)
        median = 1e3 * self.config.total_batch_size / numbers["tok_per_s"]
        return numbers | {"ms": median, "B": self.config.batch_size, "clocks": clocks}

    def ladder(self):
        """bench.py ladder in a process of its own, as it holds a model per rung; the seconds of each round, too."""
        c = self.config
        shape = {"n_layer": c.n_layer, "n_head": c.n_head, "n_embd": c.n_embd, "sequence_length": c.sequence_length}
        flags = [bench.to_flag(name, value) for name, value in shape.items()]
        flags += [f"--device={self.place.device}", f"--batch-size={min(16, c.batch_size)}"]
        if importlib.util.find_spec("matplotlib"):
            flags.append(f"--plot={self.out / 'ladder.png'}")
        json_file = self.out / "ladder.json"
        command = [sys.executable, Path(__file__).parent / "bench.py", "ladder", f"--json={json_file}", *flags]
        self.run_child("bench.py ladder", command, self.out / "ladder.txt")
        numbers = json.loads(json_file.read_text())
        return {key: numbers[key] for key in ("rungs", "tokens", "seconds", "cpu_seconds", "peak_gib")}

    def profile(self):
        """The trainer's step, and where its time goes."""
        run = self.ours()
        numbers = rate(run)
        return numbers | bench.roofline(run, numbers["ms"] / 1e3)

    def matmuls(self):
        """TFLOP/s of each matmul of the step, forward and for both gradients."""
        c, device = self.config, self.place.device
        dtype = torch.float32 if self.place.device_type == "cpu" else torch.bfloat16
        N, C, V = c.batch_size * c.sequence_length, c.n_embd, c.vocab_size
        shapes = {
            "c_attn": (C, 3 * C),
            "attn.c_proj": (C, C),
            "c_fc": (C, 4 * C),
            "mlp.c_proj": (4 * C, C),
            "lm_head": (C, V),
        }
        rates = {}
        print(f"{'TFLOP/s':14}{'forward':>10}{'grad x':>10}{'grad weight':>14}")
        for name, (inputs, outputs) in shapes.items():
            x, weight = (torch.randn(rows, inputs, device=device, dtype=dtype) for rows in (N, outputs))
            y = torch.randn(N, outputs, device=device, dtype=dtype)
            products = {"forward": (x, weight.T), "grad x": (y, weight), "grad weight": (y.T, x)}
            flops = 2 * N * inputs * outputs
            rates[name] = {key: flops / seconds_of(partial(torch.mm, *pair), device) for key, pair in products.items()}
            print(f"{name:14}" + "".join(f"{value / 1e12:11.1f}" for value in rates[name].values()))
        return {"flops_per_s": rates}

    def sync_points(self):
        """Where the host synchronizes with the GPU in a step: it should be once, for the loss and the norm."""
        run = self.ours()
        run()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                run()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        places = [f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchronizing CUDA" in str(w.message)]
        return {"sync_points": len(places), "places": places}

    def recompiles(self):
        """Check that validation, HellaSwag and sampling trigger no recompilation: raises an error if they do."""
        run, enc, examples = self.ours(), tokenizer.get_encoding("bytes"), synthetic_examples(64)
        run()
        with torch._dynamo.config.patch(error_on_recompile=True), contextlib.redirect_stdout(None):
            for _ in range(2):
                autocast, world = self.place.autocast(), self.place.world
                evaluate_val_loss(run.model, run.val_loader, 2 * run.B, run.B, autocast, world)
                evaluate_hellaswag(run.raw_model, examples, enc, autocast, world)
                generate_samples(run.raw_model, enc, self.config, autocast, world.device)
                run()
        return {"recompiled": False}

    def hellaswag(self, num_examples):
        """Seconds for `num_examples` examples inside a training process; the second call is what the loop sees."""
        model, enc, examples = self.ours().raw_model, tokenizer.get_encoding("bytes"), synthetic_examples(num_examples)
        evaluate = partial(evaluate_hellaswag, model, examples, enc, self.place.autocast(), self.place.world)
        first, second = (bench.timed(evaluate, self.place.device)[0] for _ in range(2))
        return {"examples": num_examples, "hellaswag_s": second, "first_s": first}

    def loss_kernel(self):
        """Losses and gradients of the Triton kernel compared with float64, in bfloat16 and with a float8 gradient."""
        torch.manual_seed(0)
        V, targets = self.config.vocab_size, torch.randint(50257, (256,), device=self.place.device)
        targets[::5] = -100
        logits = (3 * torch.randn(256, V, device=self.place.device)).bfloat16()
        exact = logits.double().requires_grad_()
        exact_losses = F.cross_entropy(exact, targets, reduction="none")
        exact_losses.sum().backward()
        errors = {}
        for name, float8 in (("bfloat16", False), ("float8", True)):
            losses, gradient = kernels.cross_entropy_triton(logits.clone(), targets, float8, -100)
            gradient = gradient.double() / (kernels.GRADIENT_SCALE if float8 else 1)
            error = (gradient - exact.grad).norm() / exact.grad.norm()
            errors[name] = {"loss": (losses - exact_losses).abs().max().item(), "gradient": error.item()}
        if errors["bfloat16"]["loss"] > 1e-4 or errors["bfloat16"]["gradient"] > 0.004:
            raise RuntimeError(f"the kernel is wrong: {errors}")
        if errors["float8"]["loss"] > 1e-4 or errors["float8"]["gradient"] > 0.08:
            raise RuntimeError(f"the kernel is wrong in float8: {errors}")
        return errors

    def gelu_by_sigmoid(self):
        """The step with GELU as x * sigmoid(2u), the same function: a shorter kernel than with a hyperbolic tangent."""

        def gelu(x, approximate):
            f = x.float()
            return (f * torch.sigmoid(1.5957691216057308 * (f + 0.044715 * f**3))).to(x.dtype)  # 2 * sqrt(2 / pi)

        with mock.patch.object(F, "gelu", gelu):
            return rate(self.ours())

    def with_attention(self, backend):
        """The step with one of the attention kernels."""
        # subtle: the compile cache does not key on the attention backend and would return the first one's graph
        with torch._functorch.config.patch(enable_autograd_cache=False), sdpa_kernel(backend):
            run = self.ours()
            numbers = rate(run)
            names = {event.key[:100] for event in bench.profiled(run)}
        return numbers | {"kernels": sorted(name for name in names if bench.family_of(name) == "attention")}

    def float32_residual(self):
        """The step with the residual stream kept in float32."""
        run = self.ours()
        run.raw_model.residual_dtype = torch.float32  # compiles the model once more
        return rate(run)

    def logits_returned(self):
        """The step with a forward pass that returns the logits together with the loss."""
        run = self.ours("compile=False")
        forward = run.raw_model.forward
        run.raw_model.forward = lambda x, y, return_logits: forward(x, y, return_logits=True)
        run.model = torch.compile(run.raw_model, dynamic=False) if self.config.compile else run.raw_model
        return rate(run)

    def one_micro_step(self, graphs="", bucket_views=True):
        """A step of a single micro-step, as on eight GPUs: plain, or wrapped in DDP to measure DDP's own overhead.

        graphs: "one graph", compiled before DDP sees it, or "a graph per bucket", as the trainer has it.
        """
        B, T = self.config.batch_size, self.config.sequence_length
        run = self.ours(f"total_batch_size={B * T},compile={self.config.compile and graphs != 'a graph per bucket'}")
        if not graphs:
            return rate(run, rounds=20)
        dist.init_process_group(
            "nccl" if self.place.device_type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
        )
        try:
            if self.config.compile and graphs == "a graph per bucket":
                run.model = torch.compile(run.model, dynamic=False)
            run.model = DDP(run.model, gradient_as_bucket_view=bucket_views)
            return rate(run, rounds=20)
        finally:
            cleanup_distributed()

    def real_run(self, name, steps, B, **changes):
        """The trainer on real text, 2 * B * T tokens a step: losses, and throughput after warm-up."""
        tokens = self.config.batch_size * self.config.sequence_length
        return self.run_trainer(
            name,
            batch_size=B,
            max_steps=steps,
            total_batch_size=2 * B * self.config.sequence_length,
            warmup_steps=steps // 10,
            val_every=steps // 4,
            val_tokens=16 * tokens,
            sample_every=steps // 2,
            checkpoint_every=steps // 2,
            hellaswag_every=steps // 2 if self.options.hellaswag else 0,
            hellaswag_data=self.options.hellaswag,
            **changes,
        )

    def run_trainer(self, name, **changes):
        """Run train_gpt2.py on --shards with `changes` to the settings; return what its log says."""
        if not Path(self.options.shards).exists():
            fineweb.prepare(fineweb.Options(dataset="python-docs", tokenizer="bytes", out_dir=self.options.shards))
        out_dir, output = self.out / name, self.out / f"{name}.txt"
        config = dataclasses.replace(
            self.config, data=self.options.shards, out_dir=str(out_dir), resume=False, **changes
        )
        flags = [bench.to_flag(field, value) for field, value in dataclasses.asdict(config).items()]
        try:
            self.run_child("train_gpt2.py", [sys.executable, Path(__file__).parent / "train_gpt2.py", *flags], output)
        finally:  # its logs stay, beside its output; its checkpoints, gigabytes, are not needed
            for kept in ("log.txt", "run.txt"):
                if (out_dir / kept).exists():
                    (out_dir / kept).replace(self.out / f"{name}.{kept}")
            shutil.rmtree(out_dir, ignore_errors=True)
        log = {}
        for line in (self.out / f"{name}.log.txt").read_text().splitlines():
            step, stream, value = line.split()
            log.setdefault(stream, {})[step] = float(value)
        text = output.read_text()
        smaller = re.search(r"out of memory.*--batch-size (\d+)", text, re.IGNORECASE)
        if smaller:
            raise RuntimeError(f"only B = {smaller[1]} of {config.batch_size} fits in memory. Give it with --settings.")
        peak = re.search(r"at most ([\d.]+) GiB", text)
        steps = config.max_steps
        speeds = list(log["tok/s"].values())[min(20, steps - 1) :]  # later steps only: the GPU is warm
        last = statistics.mean(list(log["train"].values())[-max(1, steps // 10) :])
        return {
            "val": log.get("val", {}),
            "hella": log.get("hella", {}),
            "mean of the last tenth's losses": last,
            "tok_per_s": statistics.median(speeds),
            "sustained_tok_per_s": statistics.harmonic_mean(speeds),
            "slowest_tok_per_s": min(speeds),
            "peak_gib": float(peak[1]) if peak else None,
        }

    def run_child(self, name, command, output, cwd=None):
        """Run another program, its output in the file `output`; raises RuntimeError with its last line if it fails."""
        with open(output, "w") as log:
            run = subprocess.run(command, cwd=cwd, stdout=log, stderr=subprocess.STDOUT, timeout=self.seconds_left)
        if run.returncode:
            last = (output.read_text().splitlines() or ["no output"])[-1]
            raise RuntimeError(f"{name} failed with status {run.returncode}: {last}. The rest is in {output}.")

    def build_nanogpt(self):
        """build-nanogpt as published, on random shards, 12 steps, and with 4 examples of HellaSwag."""
        folder, output = self.out / "build-nanogpt", self.out / "build-nanogpt.txt"
        (folder / "edu_fineweb10B").mkdir(parents=True, exist_ok=True)
        (folder / "hellaswag").mkdir(exist_ok=True)
        for name in ("train_gpt2.py", "hellaswag.py"):
            source = (Path(self.options.build_nanogpt) / name).read_text()
            (folder / name).write_text(source.replace("max_steps = 19073", "max_steps = 12"))
        gpt2 = dataclasses.replace(PRESETS["gpt2"], vocab_size=50257)
        bench.random_shards(folder / "edu_fineweb10B", gpt2, num_windows=8 * 512)
        example = {"ind": 0, "activity_label": "", "ctx": "A man sits.", "endings": ["He stands."] * 4, "label": 0}
        (folder / "hellaswag" / "hellaswag_val.jsonl").write_text((json.dumps(example) + "\n") * 4)
        try:
            self.run_child("build-nanogpt", [sys.executable, "train_gpt2.py"], output, cwd=folder)
        finally:
            shutil.rmtree(folder)
        # the first steps warm up, and the last one includes an evaluation
        speeds = [float(speed) for speed in re.findall(r"tok/sec: ([\d.]+)", output.read_text())][2:-1]
        median = statistics.median(speeds)
        return {"tok_per_s": median, "ms": 1e3 * gpt2.total_batch_size / median, "B": 64}

    def sampling(self, B):
        """Greedy GPT.generate, a loop without a cache and transformers' generate, at GPT-2's vocabulary."""
        shape = {name: getattr(self.config, name) for name in ("n_layer", "n_head", "n_embd")}
        options = bench.Options("sample", batch_size=B, rounds=2, **shape)
        numbers = bench.bench_sample(options, self.place.device)
        return {key: numbers[key] for key in ("rates", "ratios", "same_tokens", "seconds", "cpu_seconds")}


@contextlib.contextmanager
def sampled_clocks(path):
    """A dict that holds, when the block has ended, the medians of clocks, power and temperature while the GPU was busy.

    nvidia-smi writes them to `path` once a second; without it the dict stays empty.
    """
    medians = {}
    if not shutil.which("nvidia-smi"):
        yield medians
        return
    columns = ["clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "utilization.gpu"]
    command = ["nvidia-smi", f"--query-gpu={','.join(columns)}", "--format=csv,noheader,nounits", "--loop=1"]
    with open(path, "w") as file:
        process = subprocess.Popen(command, stdout=file)
        try:
            yield medians
        finally:
            process.terminate()
            process.wait()
    rows = [row for row in csv.reader(path.read_text().splitlines()) if len(row) == len(columns)]
    busy = [row for row in rows if float(row[-1]) > 90]
    if busy:
        medians |= {name: statistics.median(map(float, values)) for name, values in zip(columns, zip(*busy))}


def seconds_of(function, device, repeat=10):
    """Seconds of one call, the median of three times `repeat` calls after a warm-up."""
    function()
    times = [bench.timed(lambda: [function() for _ in range(repeat)], device)[0] for _ in range(3)]
    return statistics.median(times) / repeat


def rate(run, rounds=5):
    """tok/s, memory and loss of a run that makes one step at a time."""
    device, tokens = run.place.device, run.config.total_batch_size
    for _ in range(2):
        run()
    bench.peak_gib(device)
    seconds = [bench.timed(run, device) for _ in range(rounds)]
    median = statistics.median(each for each, _ in seconds)
    return {
        "tok_per_s": tokens / median,
        "ms": 1e3 * median,
        "peak_gib": bench.peak_gib(device),
        "loss": seconds[-1][1],
        "B": getattr(run, "B", run.config.batch_size),
    }


def synthetic_examples(num_examples):
    """Rendered examples of random bytes, on average as long as HellaSwag's in GPT-2's tokens: 45 and 4 times 29."""
    rng = np.random.default_rng(0)
    ids = lambda low, high: rng.integers(0, 256, rng.integers(low, high)).tolist()  # noqa: E731
    return [hellaswag.Rendered(ids(15, 76), [ids(5, 54) for _ in range(4)], 0, [100] * 4) for _ in range(num_examples)]


def benchmarks(b):
    """{name: (seconds on a GPU, a function that returns the numbers)}, the most important first."""
    B, cuda, compiled = b.config.batch_size, b.place.device_type == "cuda", b.config.compile
    entries = {"machine": (20, b.machine)}
    entries["60 steps of train_gpt2.py"] = 180, partial(b.headline, 60 if cuda else 4)
    if b.options.peer:
        entries[f"nanoGPT{', compiled' * compiled}"] = 90, partial(b.reference, bench.make_nanogpt, B, b.options.peer)
    fused = partial(b.reference, bench.make_transformers, B, fused=True)
    if compiled:
        entries["transformers, compiled"] = 120, partial(fused, compiled=True)
    if b.options.build_nanogpt:
        entries["build-nanogpt as published"] = 120, b.build_nanogpt
    entries["ladder"] = 300, b.ladder
    entries["train_gpt2"] = 100, b.profile
    entries["matmuls"] = 30, b.matmuls
    entries["recompiles"] = 120, b.recompiles
    if cuda:
        entries["sync points in a step"] = 80, b.sync_points
    entries["HellaSwag"] = 100, partial(b.hellaswag, hellaswag.NUM_EXAMPLES if cuda else 8)
    entries["loss fused by torch"] = 100, lambda: rate(b.ours(fused_loss="torch"))
    entries["fp8 output layer"] = 100, lambda: rate(b.ours("dtype=fp8"))
    if cuda:
        entries["Triton loss kernel is right"] = 30, b.loss_kernel
        entries["loss by the Triton kernel"] = 100, lambda: rate(b.ours(fused_loss="triton"))
        entries["fp8 output layer, Triton kernel"] = 100, lambda: rate(b.ours("dtype=fp8", fused_loss="triton"))
    entries["GELU by a sigmoid"] = 100, b.gelu_by_sigmoid
    for size in (2 * B, B // 2):
        entries[f"train_gpt2, B={size}"] = 100, lambda size=size: rate(b.ours(f"batch_size={size}"))
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION") if cuda else ("MATH",):
        entries[name] = 100, partial(b.with_attention, getattr(SDPBackend, name))
    entries["muon"] = 100, lambda: rate(b.ours("optimizer=muon"))
    entries["a real run"] = 240, partial(b.real_run, "real_run", 300, B)
    entries["residual stream in float32"] = 150, b.float32_residual
    entries["logits returned, too"] = 100, b.logits_returned
    entries["one micro-step a step"] = 100, b.one_micro_step
    for graphs in ("one graph", "a graph per bucket"):
        entries[f"one micro-step, DDP, {graphs}"] = 100, partial(b.one_micro_step, graphs)
    entries["one micro-step, DDP, no bucket views"] = 100, partial(b.one_micro_step, "a graph per bucket", False)
    for dtype in ("auto", "fp8"):
        steps_1000 = partial(b.real_run, f"steps_{dtype}", 1000, max(1, B // 16), dtype=dtype)
        entries[f"1,000 steps, {dtype}"] = 240, steps_1000
    entries["sampling, 1 sequence"], entries["sampling, 8"] = (60, partial(b.sampling, 1)), (60, partial(b.sampling, 8))
    for size in (B, B // 2):  # without the compiler, 64 sequences take 74 GB
        entries[f"not compiled, B={size}"] = 60, lambda size=size: rate(b.ours(f"compile=False,batch_size={size}"))
    entries["transformers, eager"] = 60, fused
    return entries


def table(results):
    """A table of the results with a speed, fastest first; then the other results."""
    machine = results.get("machine", {})
    rates = {name: result for name, result in results.items() if "ms" in result}
    ours = next((rates[name]["tok_per_s"] for name in rates if name.endswith(("train_gpt2", "train_gpt2.py"))), None)
    rows = [["", "tok/s", "ms", "GiB", "took s", "MFU", "of datasheet", "relative"]]
    for name, result in sorted(rates.items(), key=lambda item: -item[1]["tok_per_s"]):
        flops = result["tok_per_s"] * machine.get("flops_per_token", 0)
        peaks = [machine.get(peak) for peak in ("matmul_peak", "datasheet_peak")]
        shares = [f"{flops / peak:.1%}" if peak else "-" for peak in peaks]
        memory = f"{result['peak_gib']:.1f}" if result.get("peak_gib") else "-"
        relative = f"{result['tok_per_s'] / ours:.2f}" if ours else "-"
        speed, took = f"{result['tok_per_s']:,.0f}", f"{result['took_s']:.1f}"
        rows.append([name, speed, f"{result['ms']:.2f}", memory, took, *shares, relative])
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    for name, result in results.items():
        if name not in rates and name != "machine":
            numbers = {key: value for key, value in result.items() if key not in ("benchmark", "took_s")}
            lines.append(f"{name}: {json.dumps(numbers)[:300]}")
    return "\n".join(lines)


def main(args=None):
    """Run the benchmarks that have no result yet, then print the table."""
    started = time.monotonic()
    options = cli.parse(Options, args)
    gpt2 = dataclasses.replace(PRESETS["gpt2"], vocab_size=50304)
    config = bench.apply_variant(gpt2, options.settings) if options.settings else gpt2
    device = choose_device(config.device)
    if device == "cuda":
        device = "cuda:0"
        torch.set_float32_matmul_precision("high")  # TF32 for float32 matmuls, as in the trainer
    deadline = started + 60 * options.minutes
    b = Bench(options, config, bench.choose_place(config, device), deadline)
    b.out.mkdir(parents=True, exist_ok=True)
    bench.random_shards(b.out, config)
    log = b.out / "answers.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    results = {line["benchmark"]: line for line in lines}

    def keep(name, result, seconds):
        results[name] = {"benchmark": name, **result, "took_s": round(seconds, 1)}
        line = json.dumps(results[name])
        print(line if len(line) < 400 else line[:400] + " ...", flush=True)
        with open(log, "a") as file:
            file.write(line + "\n")

    running = b.out / "running.txt"  # the name of the benchmark that is running
    if running.exists():
        error = "The program ended before this was measured. To try again, delete its line from answers.jsonl."
        keep(running.read_text(), {"error": error}, 0)
    selected = benchmarks(b)
    for name, (needed, function) in selected.items():
        left = deadline - time.monotonic()
        if name in results or left < (needed if device.startswith("cuda") else 0):
            continue
        running.write_text(name)
        start = time.monotonic()
        try:
            result = function()
        except Exception as error:  # the other benchmarks still have results
            result = {"error": f"{type(error).__name__}: {error}"[:2000]}
        keep(name, result, time.monotonic() - start)
        running.unlink()
        if "CUDA error" in result.get("error", ""):  # the CUDA context is lost: restart the process to run the rest
            minutes = (deadline - time.monotonic()) / 60
            os.execv(sys.executable, [sys.executable, *sys.argv, f"--minutes={minutes}"])
        gc.collect()
        torch._dynamo.reset()
        enable_fused_attention(True)  # the trainer may have switched it off after a failure
        if b.place.device_type == "cuda":
            torch.cuda.empty_cache()
    print(table(results))
    left = [name for name in selected if name not in results]
    if left:
        names = ", ".join(left)
        print(f"The {options.minutes:g} minutes are over. Run the same command again to measure the rest: {names}.")


if __name__ == "__main__":
    cli.run(main)
