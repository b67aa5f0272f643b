"""plumbing/run/model_card.py: a page with what the run was and measured, and nothing else."""

from pathlib import Path

import pytest
from plumbing.data import tokenizers
from plumbing.run.huggingface import export_huggingface

from harness import tiny_model, write_run

pytestmark = pytest.mark.gpt2

LOG = [(0, "val", 5.5), (3, "train", 2), (4, "val", 1.25), (4, "val_bpb", 0.875), (4, "lr", 0.1)]
FIRST = 'python train_gpt2.py --preset quickstart --out-dir "log/a b" --sample-prompt "To be\x1b[31m"'
PAGE = """\
# A GPT-2 with 2 layers

It has 2 attention heads and 32 channels, a context of 256 tokens and
a vocabulary of 257.

| measured | value |
|---|---|
| validation loss, nats per token | 1.2500 |
| validation loss, bits per byte | 0.8750 |
| training loss of the last update, nats per token | 2.0000 |

This command of train_gpt2 trained it:

    python train_gpt2.py --preset quickstart --sample-prompt "To be\\x1b[31m"
"""


def card(**fields):
    """The card of a run with these lines in run.txt; None if there is none."""
    folder = Path("run")
    write_run(folder, LOG, **fields)
    model, enc = tiny_model(block_size=256), tokenizers.get_encoding("bytes")
    export_huggingface(model, enc, folder / "hf", run_folder=folder)
    page = folder / "hf" / "README.md"
    return page.read_text(encoding="utf-8") if page.exists() else None


def test_the_card_has_the_models_shape_and_the_runs_last_losses_and_first_command():
    """What could steer a terminal is shown."""
    assert card(command=FIRST, started="\n\ncommand: python train_gpt2.py --out-dir b") == PAGE


def test_a_run_without_a_description_is_exported_without_a_card(output):
    assert card() is None
    assert output().startswith("note: The exported model has no README.md: ")
