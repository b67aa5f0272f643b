"""Compare the program's speed with references, alternating in one process.

    python -m bench train       a step, and transformers in a plain loop
    python -m bench train --peer ../nanoGPT --variants batch_size=8 dtype=fp8
    python -m bench ladder      what each optimization adds to plain float32
    python -m bench hellaswag   ours (packed rows) against four padded rows
    python -m bench sample      generate, a loop without a cache, transformers

Each side is warmed up. Then the sides alternate for --rounds rounds, so that
other load on the machine affects all of them alike. A ratio is a side's time
per token divided by ours: the median over the rounds.
"""

import dataclasses
import json
from dataclasses import dataclass
from typing import Annotated, Literal

from plumbing.cli import console, flags


@dataclass
class Options:
    # one of the benchmarks above
    what: Annotated[Literal["train", "ladder", "hellaswag", "sample"], "positional"] = "train"
    device: str = "auto"  # cpu, cuda or mps; auto: best available
    json: str = ""  # write the numbers to this new file
    rounds: int = 0  # rounds in which each side runs once; 0: 40 for train, 5 for the others
    settings: str = ""  # the trainer's settings, for all sides: preset=gpt2-medium,batch_size=8
    # train
    variants: tuple[str, ...] = ()  # more sides: the trainer with other settings, such as a=1 a=2,b=3
    peer: str = ""  # a nanoGPT checkout: its model.py becomes one more side
    # hellaswag and sample
    tokenizer: str = "gpt2"  # hellaswag: gpt2, bytes or a .tiktoken file
    hellaswag: str = "hellaswag/hellaswag_val.jsonl"  # HellaSwag's examples
    limit: flags.Positive[int] = 24  # hellaswag: examples to score
    max_new_tokens: flags.Positive[int] = 256  # sample: tokens to generate
    num_samples: flags.Positive[int] = 1  # sample: sequences at a time


def main(args=None):
    """Parse the flags and run one benchmark. --help and a mistyped flag do not wait for torch."""
    options = flags.parse(Options, args)
    flags.check(options)
    from bench import measure, programs, steps
    from plumbing.files import check_new_output, new_output
    from plumbing.system.devices import choose_device

    if options.json:
        check_new_output(options.json)  # before minutes of measuring
    device = choose_device(options.device)
    options.device = "cuda:0" if device == "cuda" else device
    if not options.rounds:
        options.rounds = 40 if options.what == "train" else 5
    benchmarks = dict(train=steps.train, ladder=steps.ladder, hellaswag=programs.score, sample=programs.sample)
    numbers = benchmarks[options.what](options)
    if options.json:
        numbers |= measure.machine(options.device) | {"options": dataclasses.asdict(options)}
        with new_output(options.json) as file:
            file.write(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    console.run(main)
