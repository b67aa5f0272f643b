"""Benchmarks: the program's own code compared with a reference, alternating in one process.

    python -m bench train       a step, and transformers in a plain loop
    python -m bench train --peer ../nanoGPT --variants batch_size=8 dtype=fp8
    python -m bench ladder      what each optimization adds to plain float32
    python -m bench data        fineweb.py, and tiktoken on one thread
    python -m bench hellaswag   packed rows, and four padded rows per example
    python -m bench sample      generate, a loop without a cache, transformers
    python -m bench start       the first update of a run, and importing torch
    python -m bench shakespeare --peer ../nanoGPT --text tinyshakespeare.txt
    python -m bench gpu         all questions for a GPU, one after the other

Each side is warmed up, then the sides alternate for --rounds rounds, so that other load on the machine affects all
of them alike; shakespeare runs each side once, on the CPU. A ratio is the median over the rounds of a side's time per
token divided by ours, or for start by that of importing torch. --json FILE saves the numbers.

gpu adds each answer to --out/answers.jsonl as a line of JSON, and starts nothing that would exceed --minutes. Repeat
the command to continue; delete a line to ask its question again.
"""

import dataclasses
import json
import os
from dataclasses import dataclass
from typing import Annotated

from plumbing import flags, program

BENCHMARKS = ("train", "ladder", "data", "hellaswag", "sample", "start", "shakespeare", "gpu")


@dataclass
class Options:
    what: Annotated[str, "positional"] = "train"  # the benchmark, one of those above
    device: str = "auto"  # cpu, cuda or mps; auto: best available
    json: str = ""  # write the numbers to this file
    rounds: int = 0  # rounds in which each side runs once; 0: 40 for train, 5 for the others
    # train, ladder, hellaswag, sample and gpu; shakespeare, for our side only
    settings: str = ""  # the trainer's settings, for all sides: preset=gpt2-medium,batch_size=8
    # train, shakespeare and gpu
    variants: tuple[str, ...] = ()  # train: more sides, the trainer with settings changed: a=1 a=2,b=3
    peer: str = ""  # a nanoGPT checkout; shakespeare runs its train.py, the others import its model.py
    text: str = "tinyshakespeare.txt"  # shakespeare: tiny Shakespeare, which README.md downloads with curl
    # data, hellaswag and sample
    tokenizer: str = "gpt2"  # data, hellaswag: gpt2, bytes or a .tiktoken file
    hellaswag: str = "hellaswag/hellaswag_val.jsonl"  # HellaSwag's examples, which gpu scores, too
    limit: int = 24  # hellaswag: examples to score; for gpu always 1000
    max_new_tokens: int = 256  # sample: tokens to generate
    num_samples: int = 1  # sample: sequences at a time
    # gpu
    out: str = "gpu_log"  # folder of the answers and raw logs
    minutes: float = 9.0  # time budget: start nothing that would exceed it
    shards: str = "edu_fineweb10B"  # shards to train on, 10M or more of GPT-2's tokens
    build_nanogpt: str = ""  # a build-nanogpt checkout, run as published except for its data and number of steps


def main(args=None):
    """Parse the flags and run one benchmark. --help and a mistyped flag need no torch, which takes seconds."""
    options = flags.parse(Options, args)
    complaints = []
    if options.what not in BENCHMARKS:
        suggestion = flags.suggest(options.what, BENCHMARKS)
        complaints.append(f"There is no benchmark called {options.what!r}. {suggestion}")
    flags.check(options, complaints, above_0=["max_new_tokens", "num_samples", "limit"])
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or torch's profiler prints lines of its own
    from bench import gpu, measure, programs, runs, steps
    from plumbing.files import check_new_output, new_output
    from plumbing.machine import choose_device

    if options.json:
        check_new_output(options.json)  # measuring takes minutes
    device = choose_device(options.device)
    options.device = "cuda:0" if device == "cuda" else device
    options.rounds = options.rounds or (40 if options.what == "train" else 5)
    benchmarks = dict(train=steps.train, ladder=steps.ladder, gpu=gpu.run)
    benchmarks |= dict(data=programs.data, hellaswag=programs.score, sample=programs.sample)
    benchmarks |= dict(start=runs.start, shakespeare=runs.shakespeare)
    numbers = benchmarks[options.what](options)
    if options.json:
        numbers |= measure.machine(options.device) | {"options": dataclasses.asdict(options)}
        text = json.dumps(numbers, indent=1)
        try:
            with new_output(options.json) as file:
                file.write(text + "\n")
        except (OSError, program.UserError) as error:  # measuring took minutes
            print(text)
            raise program.UserError(f"{error} The numbers are printed above.") from None


if __name__ == "__main__":
    program.run(main)
