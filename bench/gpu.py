"""The questions for a GPU, the most important first; the answers are lines of --out/answers.jsonl.

GPT-2 124M at 524,288 tokens a step, unless the flags say otherwise: what train_gpt2.py itself reaches, where a step's
time goes and what its matmuls reach, the Triton kernel for the loss, float8, other programs on the same GPU, HellaSwag
and sampling, settings one by one, losses on real text, and finally the ladder.
"""

import dataclasses
import gc
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional as F

import fineweb
from bench import model, programs, steps
from bench.measure import ROOT, interleave, machine
from bench.profile import roofline
from plumbing import kernels
from plumbing.distributed import enable_fused_attention, flops_per_token
from plumbing.log import read_log
from train_gpt2 import PRESETS, TrainConfig


class Questions:
    """The questions, each a method that returns a dict of numbers, and the settings that they share."""

    def __init__(self, options, config, deadline):
        self.options, self.config, self.deadline = options, config, deadline
        self.out, self.device = Path(options.out).resolve(), options.device

    def machine(self):
        """The machine and its software versions."""
        smi = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,power.draw,power.limit", "--format=csv"]
        found = subprocess.run(smi, capture_output=True, text=True).stdout if shutil.which("nvidia-smi") else ""
        facts = machine(self.device) | {"cudnn": torch.backends.cudnn.version(), "nvidia-smi": found}
        return facts | {"flops_per_token": flops_per_token(self.config, self.config.sequence_length)}

    def step(self, variant="", profile=False):
        """The trainer's step with some settings changed."""
        side = steps.Ours(steps.apply_variant(self.config, variant), self.out)
        numbers = rate(side)
        return numbers | (roofline(side, numbers["ms"] / 1e3) if profile else {})

    def matmuls(self):
        """FLOP/s of each matmul of the step, forward and for both gradients."""

        def ten_times(a, b):
            for _ in range(10):
                torch.mm(a, b)

        c, dtype = self.config, torch.bfloat16 if self.device.startswith("cuda") else torch.float32
        N, C, rates = c.batch_size * c.sequence_length, c.n_embd, {}
        shapes = {"c_attn": (C, 3 * C), "attn.c_proj": (C, C), "c_fc": (C, 4 * C), "mlp.c_proj": (4 * C, C)}
        for name, (inputs, outputs) in (shapes | {"lm_head": (C, c.vocab_size)}).items():
            sizes = (N, inputs), (outputs, inputs), (N, outputs)
            x, weight, y = (torch.randn(size, device=self.device, dtype=dtype) for size in sizes)
            for product, (a, b) in dict(forward=(x, weight.T), grad_x=(y, weight), grad_weight=(y.T, x)).items():
                times = interleave({"": partial(ten_times, a, b)}, 3, self.device)[""]["seconds"]
                rates[f"{name} {product}"] = 10 * 2 * N * inputs * outputs / statistics.median(times)
        return {"flops_per_s": rates}

    def triton_kernel(self, num_rows=65536, compared=256):
        """Errors relative to float64 in the Triton kernel's last rows, whose offsets do not fit into 32 bits."""
        torch.manual_seed(0)
        targets = torch.randint(50257, (num_rows,), device=self.device)
        targets[::5] = -100
        logits = torch.randn(num_rows, self.config.vocab_size, device=self.device, dtype=torch.bfloat16) * 3
        exact = logits[-compared:].double().requires_grad_()
        exact_losses = F.cross_entropy(exact, targets[-compared:], reduction="none")
        exact_losses.sum().backward()
        losses, float8_gradient = model.cross_entropy_float8(logits, targets, -100)
        same_losses = model.cross_entropy_in_place(logits, targets)  # the gradient takes the logits' place
        gradients = {"float8": float8_gradient[-compared:].double() / kernels.GRADIENT_SCALE, "bfloat16": logits}
        errors = {"losses": max((each[-compared:] - exact_losses).abs().max().item() for each in (losses, same_losses))}
        for name, gradient in gradients.items():
            difference = gradient[-compared:].double() - exact.grad
            errors[name] = (difference.norm() / exact.grad.norm()).item()
        if not (errors["losses"] < 1e-4 and errors["bfloat16"] < 0.004 and errors["float8"] < 0.08):
            raise RuntimeError(f"the kernel is wrong: {errors}")
        return errors

    def peer(self, make, *args):
        """The step of another program's model."""
        return rate(make(self.config, self.out, *args))

    def build_nanogpt(self):
        """build-nanogpt as published, on random shards, for 12 steps, and with 4 examples of HellaSwag."""
        folder, output = self.out / "build-nanogpt", self.out / "build-nanogpt.txt"
        for name in ("edu_fineweb10B", "hellaswag"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for name in ("train_gpt2.py", "hellaswag.py"):
            source = Path(self.options.build_nanogpt, name).read_text(encoding="utf-8")
            (folder / name).write_text(source.replace("max_steps = 19073", "max_steps = 12"), encoding="utf-8")
        gpt2 = dataclasses.replace(PRESETS["gpt2"], vocab_size=50257)
        steps.random_shards(folder / "edu_fineweb10B", gpt2, num_windows=8 * 512)
        example = {"ind": 0, "activity_label": "", "ctx": "A man sits.", "endings": ["He stands."] * 4, "label": 0}
        (folder / "hellaswag" / "hellaswag_val.jsonl").write_text((json.dumps(example) + "\n") * 4)
        text = self.run_child([sys.executable, "train_gpt2.py"], output, cwd=folder)
        shutil.rmtree(folder)
        # the first steps warm up, and the last one includes an evaluation
        median = statistics.median(map(float, re.findall(r"tok/sec: ([\d.]+)", text)[2:-1]))
        return {"tok_per_s": median, "ms": 1e3 * gpt2.total_batch_size / median, "B": 64}

    def trainer(self, name, **changes):
        """train_gpt2.py on --shards, with settings changed: its losses, and its speed when the GPU is warm."""
        if not Path(self.options.shards).exists():
            fineweb.prepare(fineweb.Options(dataset="python-docs", tokenizer="bytes", out_dir=self.options.shards))
        folder = self.out / name
        shutil.rmtree(folder, ignore_errors=True)
        config = dataclasses.replace(self.config, data=self.options.shards, out_dir=str(folder), **changes)
        flags = [f"--{field.name}={getattr(config, field.name)}" for field in dataclasses.fields(TrainConfig)]
        text = self.run_child([sys.executable, str(ROOT / "train_gpt2.py"), *flags], self.out / f"{name}.txt")
        if "out of memory" in text.lower():
            raise RuntimeError(f"B = {config.batch_size} does not fit in memory. Give a smaller --batch-size.")
        log = {}
        for step, stream, value in read_log(folder / "log.txt"):
            log.setdefault(stream, {})[step] = value
        shutil.rmtree(folder)  # gigabytes; the console's output is kept
        speeds = list(log["tok/s"].values())[min(20, config.max_steps - 1) :]
        median, peak = statistics.median(speeds), re.search(r"at most ([\d.]+) GiB", text)
        numbers = {"tok_per_s": median, "ms": 1e3 * config.total_batch_size / median, "slowest_tok_per_s": min(speeds)}
        numbers |= {"B": config.batch_size, "peak_gib": float(peak[1]) if peak else 0.0}
        return numbers | {stream: log.get(stream, {}) for stream in ("train", "val", "hella")}

    def run_child(self, command, output, cwd=ROOT):
        """Run another program; return its output, which the file `output` keeps. RuntimeError if it fails."""
        with open(output, "w", encoding="utf-8") as log:
            left = self.deadline + 30 - time.monotonic()
            child = subprocess.run(command, cwd=cwd, stdout=log, stderr=subprocess.STDOUT, timeout=left)
        text = output.read_text(encoding="utf-8")
        if child.returncode:
            last = (text.splitlines() or ["no output"])[-1]
            raise RuntimeError(f"status {child.returncode}: {last}. The rest is in {output}.")
        return text

    def benchmark(self, function, **changes):
        """Another benchmark with its options changed."""
        numbers = function(dataclasses.replace(self.options, json="", **changes))
        return {key: value for key, value in numbers.items() if key not in ("options", "versions", "command")}


def rate(side):
    """Speed, memory and loss of a side that makes one step at a time, alone."""
    numbers = interleave({"": side}, 5, side.config.device, warmups=2)[""]
    median = statistics.median(numbers["seconds"])
    speed = {"tok_per_s": side.config.total_batch_size / median, "ms": 1e3 * median, "B": side.B}
    return speed | {"peak_gib": numbers["peak_gib"], "loss": numbers["result"]}


def questions(q):
    """{name: (seconds on a GPU, a function that returns the numbers)}, in order."""
    c, options, cuda = q.config, q.options, q.device.startswith("cuda")
    B, compiled = c.batch_size, ", compiled" * c.compile
    off = dict(val_every=0, hellaswag_every=0, sample_every=0, checkpoint_every=0)
    asked = {"machine": (20, q.machine)}
    asked["60 steps of train_gpt2.py"] = 180, partial(q.trainer, "headline", max_steps=60 if cuda else 4, **off)
    asked["train_gpt2"] = 100, partial(q.step, profile=True)
    asked["matmuls"] = 30, q.matmuls
    if cuda:
        asked["Triton loss kernel is right"] = 40, q.triton_kernel
        asked["loss by the Triton kernel"] = 100, partial(q.step, "triton_loss=True", profile=True)
    asked["fp8 output layer"] = 100, partial(q.step, "dtype=fp8", profile=True)
    if cuda:
        asked["fp8 output layer, Triton kernel"] = 100, partial(q.step, "dtype=fp8,triton_loss=True", profile=True)
    if options.peer:
        asked[f"nanoGPT{compiled}"] = 90, partial(q.peer, steps.make_nanogpt, options.peer)
    asked[f"transformers{compiled}"] = 120, partial(q.peer, steps.make_transformers, True)
    if options.build_nanogpt:
        asked["build-nanogpt as published"] = 120, q.build_nanogpt
    if options.hellaswag:
        limit = dict(data=options.hellaswag, limit=1000 if cuda else 8, rounds=2)
        asked["HellaSwag"] = 100, partial(q.benchmark, programs.score, **limit)
    for size in (B // 2, 2 * B):
        asked[f"train_gpt2, B={size}"] = 100, partial(q.step, f"batch_size={size}")
    asked["muon"] = 100, partial(q.step, "optimizer=muon")
    asked[f"not compiled, B={B // 2}"] = 60, partial(q.step, f"compile=False,batch_size={B // 2}")  # 64 take 74 GB
    small = max(1, B // 16)
    real = off | dict(batch_size=small, total_batch_size=2 * small * c.sequence_length, val_every=100)
    real |= dict(val_tokens=16 * B * c.sequence_length)
    if options.hellaswag:
        real |= dict(hellaswag_every=500, hellaswag_data=options.hellaswag)
    for dtype, num_steps in (("float32", 300), ("auto", 300), ("fp8", 1000), ("auto", 1000)):
        run = partial(q.trainer, f"{dtype}_{num_steps}", dtype=dtype, max_steps=num_steps, **real)
        asked[f"{num_steps:,} steps, {dtype}"] = 240, run
    for size in (1, 8):
        asked[f"sampling, {size} at a time"] = 60, partial(q.benchmark, programs.sample, batch_size=size, rounds=2)
    asked["ladder"] = 300, partial(q.benchmark, steps.ladder)
    return asked


def run(options):
    """Ask the questions that have no answer yet, in order, while there is time."""
    deadline = time.monotonic() + 60 * options.minutes
    q = Questions(options, steps.make_settings(options), deadline)
    q.out.mkdir(parents=True, exist_ok=True)
    steps.random_shards(q.out, q.config)
    log, running = q.out / "answers.jsonl", q.out / "running.txt"  # running: the question that is being asked
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
    answers = {line["benchmark"]: line for line in lines}

    def keep(name, answer, seconds=0.0):
        answers[name] = {"benchmark": name, **answer, "took_s": round(seconds, 1)}
        line = json.dumps(answers[name])
        print(line if len(line) < 400 else line[:400] + " ...", flush=True)
        with open(log, "a", encoding="utf-8") as file:
            file.write(line + "\n")

    if running.exists():
        error = "The program ended before this was answered. To ask it again, delete this line."
        keep(running.read_text(encoding="utf-8"), {"error": error})
    asked = questions(q)
    for name, (needed, ask) in asked.items():
        left = deadline - time.monotonic()
        if name in answers or left < (needed if options.device.startswith("cuda") else 0):
            continue
        running.write_text(name, encoding="utf-8")
        start = time.monotonic()
        try:
            answer = ask()
        except Exception as error:  # the other questions still have answers
            answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
        keep(name, answer, time.monotonic() - start)
        running.unlink()
        if "CUDA error" in answer.get("error", ""):  # the CUDA context is lost: a new process asks the rest
            left = (deadline - time.monotonic()) / 60
            os.execv(sys.executable, [sys.executable, "-m", "bench", *sys.argv[1:], f"--minutes={left}"])
        gc.collect()
        torch._dynamo.reset()
        enable_fused_attention(True)  # the trainer may have switched it off after a failure
        if options.device.startswith("cuda"):
            torch.cuda.empty_cache()
    left = ", ".join(name for name in asked if name not in answers)
    if left:
        print(f"The {options.minutes:g} minutes are over. Run the same command again to measure the rest: {left}.")
