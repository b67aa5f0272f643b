"""Everything that a GPU raises as questions, asked one after the other: which lever pays on this one?

    python bench_gpu.py --out gpu_log --peer ../nanoGPT --build-nanogpt ../build-nanogpt

GPT-2 124M at 524,288 tokens a step: ours, transformers (eager and compiled), nanoGPT and build-nanogpt as published, on
one card in one run; where a step's time goes beside the roofline; whether an evaluation compiles anything anew; how
long HellaSwag takes; then each lever by itself, and the losses with --dtype fp8 beside bfloat16's over 1,000 steps.

Each answer is a line of JSON in --out/answers.jsonl, and a table ends the run. Nothing new is started after --minutes;
the same command again asks what has no answer yet (to ask something again, delete its line).

It needs torch 2.11 or newer, numpy, tiktoken, tqdm, safetensors, transformers and tyro, but no network: where there is
none, TIKTOKEN_CACHE_DIR must hold GPT-2's tables for those questions that tokenize.
"""

import contextlib
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
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import bench  # before torch: train_gpt2 says how OpenMP's threads wait

import numpy as np
import torch
import torch._functorch.config
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel as DDP

from plumbing import cli
import fineweb
import hellaswag
import tokenizer
import train_gpt2 as t


@dataclass
class Options:
    """Measure on this GPU whatever is not known of it yet."""

    out: str = "gpu_log"  # folder of the answers and raw logs; what has been answered there is not asked again
    minutes: float = 9.0  # start nothing new after that
    settings: str = ""  # what differs from preset gpt2, for every side: n_layer=24,n_head=16,n_embd=1024
    shards: str = "python_docs"  # of the real runs: GPT-2's tokens, 10M or more; else made of the built-in corpus
    hellaswag: str = ""  # its JSON lines, for the real run to score, too
    peer: str = ""  # a nanoGPT checkout
    build_nanogpt: str = ""  # a build-nanogpt checkout, run as published but for its data and number of steps


@dataclass(frozen=True)
class Bench:
    """What all questions share: each is a method's call that returns numbers."""

    options: Options
    config: t.TrainConfig
    ddp: t.Distributed
    deadline: float  # of time.monotonic(), from which on nothing new is started; what runs then has 30 seconds more

    @property
    def out(self):
        return Path(self.options.out)

    def ours(self, changes=""):
        """The trainer's step with `changes` to the settings, e.g. "batch_size=32,compile=False"."""
        config = bench.apply_variant(self.config, changes) if changes else self.config
        return bench.Ours(config, self.out, bench.alone(config, self.ddp.device), 1)

    def reference(self, make, B, *args, **kwargs):
        return rate(make(dataclasses.replace(self.config, batch_size=B), self.out, self.ddp, 1, *args, **kwargs))

    def machine(self):
        smi = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,power.draw,power.limit", "--format=csv"]
        found = subprocess.run(smi, capture_output=True, text=True).stdout if shutil.which("nvidia-smi") else ""
        peaks = {"matmul_peak": bench.matmul_peak(self.ddp.device), "datasheet_peak": t.peak_flops(self.ddp)}
        peaks["flops_per_token"] = t.flops_per_token(self.config, self.config.sequence_length)
        return bench.machine(self.ddp.device) | peaks | {"cudnn": torch.backends.cudnn.version(), "nvidia-smi": found}

    def profile(self):
        run = self.ours()
        numbers = rate(run)
        return numbers | bench.roofline(run, numbers["ms"] / 1e3)

    def waits(self):
        """Where the host waits for the GPU in a step: the trainer means to do so once, for the loss and the norm."""
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
        return {"waits": len(places), "places": places}

    def recompiles(self):
        """Whether validation, HellaSwag or sampling compile anything anew: an error here if one does."""
        run, enc, examples = self.ours(), tokenizer.get_encoding("bytes"), synthetic_examples(64)
        run()
        with torch._dynamo.config.patch(error_on_recompile=True), contextlib.redirect_stdout(None):
            for _ in range(2):
                t.evaluate_val_loss(run.model, run.val_loader, 2 * run.B, self.ddp)
                t.evaluate_hellaswag(run.raw_model, examples, enc, self.ddp)
                t.print_samples(run.raw_model, enc, self.config, 0, self.ddp)
                run()
        return {"recompiled": False}

    def hellaswag(self, num_examples):
        """Seconds for as many examples as HellaSwag has, inside a training process, the second time as in the loop."""
        model, enc, examples = self.ours().raw_model, tokenizer.get_encoding("bytes"), synthetic_examples(num_examples)
        evaluate = partial(t.evaluate_hellaswag, model, examples, enc, self.ddp)
        first, second = (bench.timed(evaluate, self.ddp.device)[0] for _ in range(2))
        return {"examples": num_examples, "hellaswag_s": second, "first_s": first}

    def with_attention(self, backend):
        # subtle: the cache of compiled graphs does not know the backend, and would give back the first one's
        with torch._functorch.config.patch(enable_autograd_cache=False), sdpa_kernel(backend):
            run = self.ours()
            numbers = rate(run)
            names = {event.key[:100] for event in bench.profiled(run)}
        return numbers | {"kernels": sorted(n for n in names if re.search(bench.FAMILIES["attention"], n.lower()))}

    def float32_residual(self):
        run = self.ours()
        run.raw_model.residual_dtype = torch.float32  # which compiles it once more
        return rate(run)

    def logits_returned(self):
        run = self.ours("compile=False")
        forward = run.raw_model.forward
        run.raw_model.forward = lambda x, y, return_logits: forward(x, y, return_logits=True)
        run.model = torch.compile(run.raw_model, dynamic=False) if self.config.compile else run.raw_model
        return rate(run)

    def one_micro_step(self, parts="", bucket_views=True):
        """A step of one micro-step, as eight GPUs take it: alone, or with DDP around it, whose own cost shows.

        parts: "one graph", compiled before DDP sees it, or "a graph per bucket", as the trainer has it.
        """
        B, T = self.config.batch_size, self.config.sequence_length
        run = self.ours(f"total_batch_size={B * T},compile={self.config.compile and parts != 'a graph per bucket'}")
        if not parts:
            return rate(run, rounds=20)
        dist.init_process_group("nccl" if self.ddp.device_type == "cuda" else "gloo", store=dist.HashStore(), rank=0,
                                world_size=1)  # fmt: skip
        try:
            if self.config.compile and parts == "a graph per bucket":
                run.model = torch.compile(run.model, dynamic=False)
            run.model = DDP(run.model, gradient_as_bucket_view=bucket_views)
            return rate(run, rounds=20)
        finally:
            t.leave_distributed()

    def autotuned(self):
        run = self.ours("compile=False")
        run.model = torch.compile(run.raw_model, dynamic=False, mode="max-autotune-no-cudagraphs")
        return rate(run)

    def real_run(self, name, steps, B, **changes):
        """The trainer itself on real text, 2 * B * T tokens a step: its losses, and its speed once it is warm."""
        if not Path(self.options.shards).exists():
            fineweb.prepare(fineweb.Options(dataset="python-docs", tokenizer="bytes", out_dir=self.options.shards))
        out_dir = self.out / name
        tokens = self.config.batch_size * self.config.sequence_length
        config = dataclasses.replace(
            self.config, data=self.options.shards, out_dir=str(out_dir), resume=False, batch_size=B, max_steps=steps,
            total_batch_size=2 * B * self.config.sequence_length, warmup_steps=steps // 10, val_every=steps // 4,
            val_tokens=16 * tokens, sample_every=steps // 2, checkpoint_every=steps // 2,
            hellaswag_every=steps // 2 if self.options.hellaswag else 0, hellaswag_data=self.options.hellaswag,
            **changes,
        )  # fmt: skip
        flags = [bench.to_flag(field, value) for field, value in dataclasses.asdict(config).items()]
        command = [sys.executable, str(Path(__file__).parent / "train_gpt2.py"), *flags]
        left = self.deadline + 30 - time.monotonic()
        try:
            with open(self.out / f"{name}.txt", "w") as log:
                run = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=left)
        finally:
            shutil.rmtree(out_dir / "hf", ignore_errors=True)
            for checkpoint in out_dir.glob("*.pt*"):  # gigabytes that nobody asked for
                checkpoint.unlink()
        if run.returncode:
            raise RuntimeError((self.out / f"{name}.txt").read_text().splitlines()[-1])
        lines = [line.split() for line in (out_dir / "log.txt").read_text().splitlines()]
        log = {}
        for step, stream, value in lines:
            log.setdefault(stream, {})[step] = float(value)
        speeds = list(log["tok/s"].values())[min(20, steps - 1) :]
        last = statistics.mean(list(log["train"].values())[-steps // 10 :])
        return {"val": log["val"], "hella": log.get("hella", {}), "mean of the last tenth's losses": last,
                "tok_per_s": statistics.median(speeds), "slowest_tok_per_s": min(speeds)}  # fmt: skip

    def build_nanogpt(self):
        """build-nanogpt as published, on random shards, 12 steps, and with 4 examples of HellaSwag."""
        folder = self.out / "build-nanogpt"
        (folder / "edu_fineweb10B").mkdir(parents=True, exist_ok=True)
        (folder / "hellaswag").mkdir(exist_ok=True)
        for name in ("train_gpt2.py", "hellaswag.py"):
            source = (Path(self.options.build_nanogpt) / name).read_text()
            (folder / name).write_text(source.replace("max_steps = 19073", "max_steps = 12"))
        gpt2 = dataclasses.replace(t.PRESETS["gpt2"], vocab_size=50257)
        bench.random_shards(folder / "edu_fineweb10B", gpt2, num_windows=8 * 512)
        example = {"ind": 0, "activity_label": "", "ctx": "A man sits.", "endings": ["He stands."] * 4, "label": 0}
        (folder / "hellaswag" / "hellaswag_val.jsonl").write_text((json.dumps(example) + "\n") * 4)
        left = min(180, self.deadline + 30 - time.monotonic())
        command = [sys.executable, "train_gpt2.py"]
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=left)
        (self.out / "build-nanogpt.txt").write_text(run.stdout + run.stderr)
        shutil.rmtree(folder)
        # the first steps warm up, the last one evaluates, too
        speeds = [float(speed) for speed in re.findall(r"tok/sec: ([\d.]+)", run.stdout)][2:-1]
        if not speeds:
            raise RuntimeError((run.stdout + run.stderr).splitlines()[-1])
        median = statistics.median(speeds)
        return {"tok_per_s": median, "ms": 1e3 * gpt2.total_batch_size / median, "B": 64}

    def sampling(self, B):
        """Greedy GPT.generate beside a loop without a cache and transformers' generate, at GPT-2's vocabulary."""
        shape = {name: getattr(self.config, name) for name in ("n_layer", "n_head", "n_embd")}
        options = bench.Options("sample", batch_size=B, rounds=2, json=str(self.out / f"sample_{B}.json"), **shape)
        numbers = bench.bench_sample(options, self.ddp.device)
        return {"rates": numbers["rates"], "ratios": numbers["ratios"], "same_tokens": numbers["same_tokens"]}


def rate(run, rounds=5):
    """tok/s, memory and loss of a run that makes one step at a time."""
    device, tokens = run.ddp.device, run.config.total_batch_size
    for _ in range(2):
        run()
    bench.peak_gib(device)
    seconds = [bench.timed(run, device) for _ in range(rounds)]
    median = statistics.median(each for each, _ in seconds)
    return {
        "tok_per_s": tokens / median, "ms": 1e3 * median, "peak_gib": bench.peak_gib(device), "loss": seconds[-1][1],
        "B": getattr(run, "B", run.config.batch_size),
    }  # fmt: skip


def synthetic_examples(num_examples):
    """Rendered examples of random bytes, on average as long as HellaSwag's in GPT-2's tokens: 45 and 4 times 29."""
    rng = np.random.default_rng(0)
    ids = lambda low, high: rng.integers(0, 256, rng.integers(low, high)).tolist()  # noqa: E731
    return [hellaswag.Rendered(ids(15, 76), [ids(5, 54) for _ in range(4)], 0, [100] * 4) for _ in range(num_examples)]


def questions(b):
    """{what is asked: a function that returns the numbers}, in the order of what is wanted most."""
    B, cuda, peer = b.config.batch_size, b.ddp.device_type == "cuda", b.options.peer
    asked = {"machine": b.machine, f"train_gpt2, B={B}": b.profile}
    for size in (B, B // 2):
        if cuda:
            compiled = dict(compiled=True, fused=True)
            asked[f"transformers, compiled, B={size}"] = partial(b.reference, bench.make_transformers, size, **compiled)
        asked[f"transformers, eager, B={size}"] = partial(b.reference, bench.make_transformers, size, fused=True)
        if peer:
            asked[f"nanoGPT, B={size}"] = partial(b.reference, bench.make_peer, size, peer)
        if b.options.build_nanogpt and size == B:
            asked["build-nanogpt as published"] = b.build_nanogpt
    asked["recompiles"] = b.recompiles
    if cuda:
        asked["waits for the GPU in a step"] = b.waits
    asked["HellaSwag"] = partial(b.hellaswag, hellaswag.NUM_EXAMPLES if cuda else 8)
    for size in (2 * B, B // 2):
        asked[f"train_gpt2, B={size}"] = lambda size=size: rate(b.ours(f"batch_size={size}"))
    asked["a real run"] = partial(b.real_run, "real_run", 300, B)
    asked["fp8 output layer"] = lambda: rate(b.ours("dtype=fp8"))
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION") if cuda else ("MATH",):
        asked[name] = partial(b.with_attention, getattr(SDPBackend, name))
    asked["residual stream in float32"] = b.float32_residual
    asked["logits returned, too"] = b.logits_returned
    asked["not compiled"] = lambda: rate(b.ours("compile=False"))
    asked["muon"] = lambda: rate(b.ours("optimizer=muon"))
    asked["one micro-step a step"] = b.one_micro_step
    for parts in ("one graph", "a graph per bucket"):
        asked[f"one micro-step, DDP, {parts}"] = partial(b.one_micro_step, parts)
    asked["one micro-step, DDP, no bucket views"] = partial(b.one_micro_step, "a graph per bucket", False)
    for dtype in ("auto", "fp8"):
        asked[f"1,000 steps, {dtype}"] = partial(b.real_run, f"steps_{dtype}", 1000, max(1, B // 16), dtype=dtype)
    asked["sampling, 1 sequence"], asked["sampling, 8"] = partial(b.sampling, 1), partial(b.sampling, 8)
    asked["max-autotune"] = b.autotuned
    return asked


def table(answers):
    """The answers with a speed, fastest first, beside ours; then the others' numbers as they are."""
    machine = answers.get("machine", {})
    rates = {name: a for name, a in answers.items() if "ms" in a}
    ours = next((a["tok_per_s"] for name, a in rates.items() if name.startswith("train_gpt2")), None)
    rows = [["", "tok/s", "ms", "GiB", "took s", "MFU", "of datasheet", "beside ours"]]
    for name, a in sorted(rates.items(), key=lambda item: -item[1]["tok_per_s"]):
        flops = a["tok_per_s"] * machine.get("flops_per_token", 0)
        peaks = [machine.get(peak) for peak in ("matmul_peak", "datasheet_peak")]
        shares = [f"{flops / peak:.1%}" if peak else "-" for peak in peaks]
        memory = f"{a['peak_gib']:.1f}" if "peak_gib" in a else "-"
        beside = f"{a['tok_per_s'] / ours:.2f}" if ours else "-"
        rows.append([name, f"{a['tok_per_s']:,.0f}", f"{a['ms']:.2f}", memory, f"{a['took_s']:.1f}", *shares, beside])
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    for name, a in answers.items():
        if name not in rates and name != "machine":
            numbers = {key: value for key, value in a.items() if key not in ("question", "took_s")}
            lines.append(f"{name}: {json.dumps(numbers)[:300]}")
    return "\n".join(lines)


def main(args=None):
    started = time.monotonic()
    options = cli.parse(Options, args)
    gpt2 = dataclasses.replace(t.PRESETS["gpt2"], vocab_size=50304)
    config = bench.apply_variant(gpt2, options.settings) if options.settings else gpt2
    device = t.choose_device(config)
    if device == "cuda":
        device = "cuda:0"
        torch.set_float32_matmul_precision("high")  # TF32 where something is float32, as the trainer does
    deadline = started + 60 * options.minutes
    b = Bench(options, config, bench.alone(config, device), deadline)
    b.out.mkdir(parents=True, exist_ok=True)
    bench.random_shards(b.out, config)
    log = b.out / "answers.jsonl"
    answers = {a["question"]: a for a in map(json.loads, log.read_text().splitlines())} if log.exists() else {}

    def keep(name, answer, seconds):
        answers[name] = {"question": name, **answer, "took_s": round(seconds, 1)}
        line = json.dumps(answers[name])
        print(line if len(line) < 400 else line[:400] + " ...", flush=True)
        with open(log, "a") as file:
            file.write(line + "\n")

    asking = b.out / "asking.txt"  # the question that has no answer yet
    if asking.exists():
        keep(asking.read_text(), {"error": "the process ended while this was asked"}, 0)
    asked = questions(b)
    for name, question in asked.items():
        if name in answers or time.monotonic() > deadline:
            continue
        asking.write_text(name)
        start = time.monotonic()
        try:
            answer = question()
        except Exception as error:  # the other questions still have answers
            answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
        keep(name, answer, time.monotonic() - start)
        asking.unlink()
        if "CUDA error" in answer.get("error", ""):  # this process has lost the GPU; another one goes on from here
            minutes = (deadline - time.monotonic()) / 60
            os.execv(sys.executable, [sys.executable, *sys.argv, f"--minutes={minutes}"])
        gc.collect()
        torch._dynamo.reset()
        t.enable_fused_attention(True)  # a failed try of the trainer's has switched it off
        if b.ddp.device_type == "cuda":
            torch.cuda.empty_cache()
    print(table(answers))
    unanswered = [name for name in asked if name not in answers]
    if unanswered:
        print(f"{options.minutes} minutes were over: the same command asks what is left, {', '.join(unanswered)}")


if __name__ == "__main__":
    cli.run(main)
