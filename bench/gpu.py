"""The questions for a GPU, the most important first; the answers are lines of --out/answers.jsonl."""

import dataclasses
import gc
import json
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from bench import measure, model, programs, steps
from bench.profile import matmul_rate
from plumbing.files import atomic_write
from plumbing.journal import read_log
from plumbing.machine import restore_attention
from plumbing.program import ROOT
from train_gpt2 import GPT, GPTConfig


class Questions:
    """The questions, each a method that returns a dict of numbers, and what they share."""

    def __init__(self, options):
        self.options, self.config, self.device = options, steps.configure(options), options.device
        self.deadline, self.out = time.monotonic() + 60 * options.minutes, Path(options.out).resolve()
        self.out.mkdir(parents=True, exist_ok=True)

    def step(self, changes="", make=steps.Ours, *args):
        """The step of the trainer, or of another side, with some settings changed."""
        config = steps.configure(self.options, changes)
        return steps.compare({"step": (make, config, *args)}, self.options.rounds, ours="step")

    def in_ddp(self):
        """The trainer's step in DDP, in a process group of one rank: NCCL, and a compiled graph that DDP cuts."""
        backend = "nccl" if self.device.startswith("cuda") and dist.is_nccl_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        try:
            return self.step("", steps.OursInDDP)
        finally:
            dist.destroy_process_group()

    def matmuls(self):
        """FLOP/s of the matmuls of each layer: forward, for the gradient of its input, and for that of its weight."""
        c, rates = self.config, {}
        dtype = torch.bfloat16 if self.device.startswith("cuda") else torch.float32
        for name, layer in GPT(GPTConfig(**c.shape | {"n_layer": 1})).named_modules():
            if isinstance(layer, torch.nn.Linear):
                weight = layer.weight.detach().to(self.device, dtype)
                x = weight.new_empty(c.batch_size * c.sequence_length, layer.in_features).normal_()
                y = torch.randn_like(x @ weight.T)
                rates[name] = [matmul_rate(x, weight.T), matmul_rate(y, weight), matmul_rate(y.T, x)]
        return {"flops_per_s": rates}

    def build_nanogpt(self):
        """build-nanogpt as published, on random shards, for 12 steps, and with 4 examples of HellaSwag."""
        with tempfile.TemporaryDirectory(dir=self.out) as temporary:
            folder = Path(temporary)
            for name in ("edu_fineweb10B", "hellaswag"):
                (folder / name).mkdir()
            for name in ("train_gpt2.py", "hellaswag.py"):
                source = Path(self.options.build_nanogpt, name).read_text(encoding="utf-8")
                source = source.replace("max_steps = 19073", "max_steps = 12")
                (folder / name).write_text(source, encoding="utf-8")
            steps.random_shards(folder / "edu_fineweb10B", 50257)
            examples = Path(self.options.hellaswag).read_text(encoding="utf-8").splitlines(keepends=True)[:4]
            (folder / "hellaswag" / "hellaswag_val.jsonl").write_text("".join(examples), encoding="utf-8")
            text = self.run_program("train_gpt2.py", cwd=folder)
        # the first steps warm up, and the last one includes an evaluation
        return {"tok_per_s": statistics.median(map(float, re.findall(r"tok/sec: ([\d.]+)", text)[2:-1]))}

    def trainer(self, changes):
        """train_gpt2.py on --shards, with settings changed: its losses, and its speed when the GPU is warm."""
        options, log = self.options, {}
        with tempfile.TemporaryDirectory(dir=self.out) as folder:  # gigabytes; the console's output is kept
            paths = f"data={options.shards},hellaswag_data={options.hellaswag},out_dir={folder}"
            flags = steps.as_flags(f"preset=gpt2,device={self.device},{paths},{options.settings},{changes}")
            text = self.run_program(ROOT / "train_gpt2.py", *flags, cwd=ROOT)
            for step, stream, value in read_log(Path(folder, "log.txt")):
                log.setdefault(stream, {})[step] = value
        speeds = list(log["tok/s"].values())
        notes = re.findall("^warning: .*|peak GPU memory .* GiB", text, re.MULTILINE)  # a lower B, the memory
        numbers = {"tok_per_s": statistics.median(speeds[20:] or speeds), "notes": notes}
        return numbers | {stream: log.get(stream) for stream in ("train", "val", "hella")}

    def run_program(self, *arguments, cwd):
        """The output of another Python program, which programs.txt keeps. It must end with the time."""
        left = self.deadline + 30 - time.monotonic()
        return measure.run_program(*arguments, cwd=cwd, log=self.out / "programs.txt", timeout=left)


def questions(q):
    """{name: (seconds on a GPU, a function that returns the numbers)}, in order."""
    options, cuda = q.options, q.device.startswith("cuda")
    B, T = q.config.batch_size, q.config.sequence_length
    headline = "val_every=0,hellaswag_every=0,sample_every=0,checkpoint_every=0"
    small, twice = max(1, B // 16), dataclasses.replace(options, rounds=2, limit=1000)
    text = f"{headline},batch_size={small},total_batch_size={2 * small * T},hellaswag_every=500"
    text += f",val_every=100,val_tokens={16 * B * T}"
    table = {
        "machine": (20, measure.machine, q.device),
        "60 steps of train_gpt2.py": (180, q.trainer, f"{headline},max_steps={60 if cuda else 4}"),
        "train_gpt2": (100, q.step),
        "matmuls": (30, q.matmuls),
        "Triton loss kernel is right": (40, model.check_kernel, 65536, q.config.vocab_size, q.device),
        "loss by the Triton kernel": (100, q.step, "triton_loss=True"),
        "fp8 output layer": (100, q.step, "dtype=fp8"),
        "fp8 output layer, Triton kernel": (100, q.step, "dtype=fp8,triton_loss=True"),
        "nanoGPT": (90, q.step, "", steps.make_nanogpt, options.peer),
        "transformers": (120, q.step, "", steps.make_transformers),
        "build-nanogpt as published": (120, q.build_nanogpt),
        "HellaSwag": (100, programs.score, twice),
        "sampling, 1 at a time": (60, programs.sample, twice),
        "sampling, 8 at a time": (60, programs.sample, dataclasses.replace(twice, num_samples=8)),
        f"train_gpt2, B={B // 2}": (100, q.step, f"batch_size={B // 2}"),
        f"train_gpt2, B={2 * B}": (100, q.step, f"batch_size={2 * B}"),
        "muon": (100, q.step, "optimizer=muon"),
        "DDP on one rank": (120, q.in_ddp),
        "activation checkpointing": (100, q.step, "activation_checkpointing=True"),
        f"not compiled, B={B // 2}": (60, q.step, f"compile=False,batch_size={B // 2}"),  # 64 take 74 GB
        "300 steps, float32": (240, q.trainer, f"{text},max_steps=300,dtype=float32"),
        "300 steps, auto": (240, q.trainer, f"{text},max_steps=300"),
        "1,000 steps, fp8": (240, q.trainer, f"{text},max_steps=1000,dtype=fp8"),
        "1,000 steps, auto": (240, q.trainer, f"{text},max_steps=1000"),
        "ladder": (300, steps.ladder, options),
    }
    possible = {"Triton": cuda, "nanoGPT": options.peer, "build-nanogpt": options.build_nanogpt}
    missing = [word for word, is_possible in possible.items() if not is_possible]
    return {name: question for name, question in table.items() if not any(word in name for word in missing)}


def run(options):
    """Ask the questions that have no answer yet, in order, while there is time; return all answers."""
    q, cuda = Questions(options), options.device.startswith("cuda")
    log = q.out / "answers.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    answers = {answer["benchmark"]: answer for answer in map(json.loads, lines)}

    def keep(name, answer):
        answers[name] = {"benchmark": name, **answer}
        with atomic_write(log, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(each) + "\n" for each in answers.values())

    asked = questions(q)
    for name, (needed, ask, *args) in asked.items():
        if name in answers or q.deadline - time.monotonic() < needed * cuda:
            continue
        keep(name, {"error": "The program ended before this was answered. To ask it again, delete this line."})
        start = time.monotonic()
        try:
            with restore_attention():  # the trainer may switch kernels off after a failure
                answer = ask(*args)
        except Exception as error:  # the other questions still have answers
            answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
        keep(name, answer | {"took_s": time.monotonic() - start})
        print(json.dumps(answers[name])[:400], flush=True)
        if "CUDA error" in answer.get("error", ""):  # the CUDA context is lost: a new process asks the rest
            left = (q.deadline - time.monotonic()) / 60
            os.execv(sys.executable, [sys.executable, "-m", "bench", *sys.argv[1:], f"--minutes={left}"])
        gc.collect()
        torch._dynamo.reset()
        torch.cuda.empty_cache()  # does nothing without CUDA
    left = ", ".join(name for name in asked if name not in answers)
    if left:
        print(f"Time is up. Run the same command again, or with more --minutes, to measure the rest: {left}.")
    return {"answers": answers}
