"""Benchmarks: the program's own code compared with a reference, alternating in one process.

    python -m bench train       a step, and transformers in a plain loop
    python -m bench train --peer ../nanoGPT --variants batch_size=8
    python -m bench ladder      what each optimization adds to plain float32
    python -m bench data        fineweb.py, and tiktoken on one thread
    python -m bench hellaswag   packed rows, and four padded rows per example
    python -m bench sample      generate, a loop without a cache, transformers
    python -m bench gpu         all questions for a GPU, one after the other

Each side is warmed up, then the sides alternate for --rounds rounds, so that other load on the machine affects all
of them alike. A ratio is the median over the rounds of reference / ours. --json FILE saves the numbers.

gpu adds each answer to --out/answers.jsonl as a line of JSON, and starts nothing that would exceed --minutes. Repeat
the command to continue; delete a line to ask its question again.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from plumbing import cli

BENCHMARKS = ("train", "ladder", "data", "hellaswag", "sample", "gpu")


@dataclass
class Options:
    """What to measure, and how."""

    what: Annotated[str, "positional"] = "train"  # train, ladder, data, hellaswag, sample or gpu, as above
    device: str = "auto"  # cpu, cuda or mps; auto: best available
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # dtype of activations, for every side
    json: str = ""  # write the numbers to this file
    rounds: int = 0  # rounds in which each side runs once; 0: 20 for train, 5 for the others
    # train, ladder and gpu, and the shape of the model elsewhere; 0: the preset's
    preset: str = ""  # a preset of train_gpt2.py; default quickstart on a CPU, gpt2 on a GPU
    steps: int = 0  # train: steps per round; 0: about half a second of them
    variants: tuple[str, ...] = ()  # train: more sides, the trainer with settings changed: a=1 a=2,b=3
    peer: str = ""  # train, gpu: a nanoGPT checkout, whose model.py is imported and trained
    batch_size: int = 0  # B, sequences per micro-step (sample: sequences at a time)
    sequence_length: int = 0  # T, tokens per sequence
    total_batch_size: int = 0  # tokens per step
    n_layer: int = 0  # blocks
    n_head: int = 0  # attention heads
    n_embd: int = 0  # channels
    vocab_size: int = 0  # rows of the embedding
    # data, hellaswag and sample
    input: tuple[str, ...] = ()  # data: documents, as fineweb.py takes them; default the built-in corpus
    tokenizer: str = "gpt2"  # gpt2, bytes or a .tiktoken file
    model: str = ""  # a GPT-2 name, checkpoint or folder; default GPT-2 124M with random weights
    data: str = "hellaswag/hellaswag_val.jsonl"  # hellaswag: the examples
    limit: int = 0  # hellaswag: examples; 0: 24 on a CPU, 1000 on a GPU
    max_new_tokens: int = 256  # sample: tokens to generate
    # gpu
    out: str = "gpu_log"  # folder of the answers and raw logs
    minutes: float = 9.0  # time budget: start nothing that would exceed it
    shards: str = "python_docs"  # shards to train on, 10M or more of GPT-2's tokens; default the built-in corpus
    hellaswag: str = ""  # HellaSwag's examples, which the runs on text then score
    build_nanogpt: str = ""  # a build-nanogpt checkout, run as published except for its data and number of steps


def parse_args(args=None):
    """The checked Options of a command line. --help and a mistyped flag need no torch, which takes seconds."""
    options = cli.parse(Options, args)
    suggestion = cli.suggest(options.what, BENCHMARKS)
    complaint = (options.what not in BENCHMARKS, f"There is no benchmark called {options.what!r}. {suggestion}")
    cli.check(options, [complaint], above_0="max_new_tokens")
    return options


def main(args=None):
    """Parse the flags and run one benchmark."""
    options = parse_args(args)
    from bench import gpu, programs, steps
    from plumbing.distributed import choose_device
    from plumbing.files import check_new_output

    if options.json:
        check_new_output(options.json)  # measuring takes minutes
    device = choose_device(options.device)
    options.device = "cuda:0" if device == "cuda" else device
    options.rounds = options.rounds or (20 if options.what == "train" else 5)
    benchmarks = dict(train=steps.train, ladder=steps.ladder, gpu=gpu.run)
    benchmarks |= dict(data=programs.data, hellaswag=programs.score, sample=programs.sample)
    benchmarks[options.what](options)


if __name__ == "__main__":
    cli.run(main)
