"""The model card of a run, hf/README.md: the model's shape, its last losses and the command that trained it."""

import re
from pathlib import Path

from plumbing.cli.console import first_line, note
from plumbing.files import read_json
from plumbing.run.logs import read_run

MEASURED = {
    "val": "validation loss, nats per token",
    "val_bpb": "validation loss, bits per byte",
    "train": "training loss of the last update, nats per token",
}


def make_card(directory: Path, run_folder: Path) -> str:
    """README.md for the exported model of a run; "" if that fails, with a note."""
    try:
        return card(directory, run_folder)
    except Exception as error:  # people may have edited run.txt, and the model is complete without a card
        note(f"The exported model has no README.md: {first_line(error)}")
        return ""


def card(directory: Path, run_folder: Path) -> str:
    run = read_run(run_folder)
    shape = read_json(directory / "config.json", "")
    rows = ""
    for stream, description in MEASURED.items():
        if stream in run.streams:
            rows += f"| {description} | {run.streams[stream][1][-1]:.4f} |\n"
    # equal runs in two folders have equal cards
    command = re.sub(r""" --out-dir[= ]("[^"]*"|'[^']*'|\S)+""", "", run.starts[0]["command"])
    return f"""\
# A GPT-2 with {shape["n_layer"]} layers

It has {shape["n_head"]} attention heads and {shape["n_embd"]} channels, a context of {shape["n_positions"]} tokens and
a vocabulary of {shape["vocab_size"]}.

| measured | value |
|---|---|
{rows}
This command of train_gpt2 trained it:

    {command}
"""
