"""plumbing/run/model_card.py: a page with what the run measured, and nothing else."""

import json
import re

import pytest
import yaml
from plumbing.data import tokenizers
from plumbing.run.huggingface import export_huggingface
from plumbing.run.model_card import make_card

from harness import tiny_model

pytestmark = pytest.mark.gpt2

CONFIG = dict(data="/home/somebody/data", out_dir="/home/somebody/log", hellaswag_data="/home/somebody/val.jsonl")
CONFIG |= dict(preset="gpt2", init_from="", max_lr=6e-4, total_batch_size=1000, batch_ramp=0, max_steps=4)
CONFIG |= dict(val_tokens=5000, hellaswag_limit=200)
START = {"started": "2026-11-20T13:42:34+00:00", "machine": "Linux, 2 cores, NVIDIA H100", "ranks": "8"}
START |= {"versions": "python 3.11.7, torch 2.13.0", "commit": "fd912143f159"}


def start_text(config=CONFIG, **changes):
    fields = START | {"config": json.dumps(config)} | changes
    return "".join(f"{name}: {text}\n" for name, text in fields.items()) + "\n"


LOG = "".join(f"{step} train {5 - step}\n{step} lr 0.1\n" for step in range(4))
EVALUATIONS = "0 val 5.5\n4 val 1.25\n4 val_bpb 0.875\n0 hella 0.24\n4 hella 0.271\n"
RUN = start_text()


@pytest.fixture
def run(tmp_path):
    """A run's folder with an exported model that has no card yet."""
    export_huggingface(tiny_model(block_size=256), tokenizers.get_encoding("bytes"), tmp_path / "hf")
    return tmp_path


def card(run, text=RUN, log=LOG + EVALUATIONS, **options):
    """The card of the run with these two files."""
    (run / "run.txt").write_text(text, encoding="utf-8")
    (run / "log.txt").write_text(log, encoding="utf-8")
    return make_card(run / "hf", run, **options)


def test_the_card_has_what_the_run_measured_and_nothing_else(run):
    text = card(run, start_text() + start_text(machine="Linux, 8 cores", commit=""), sample="To be,\n```or```")
    _, header, page = text.split("---\n", 2)
    # no license: it is not ours to say
    expected = dict(library_name="transformers", pipeline_tag="text-generation", tags=["gpt2", "train_gpt2"])
    assert yaml.safe_load(header) == expected
    assert "trained from scratch" in page and "# A GPT-2 with 2 layers" in page
    assert "| validation loss on unseen tokens, nats per token | 1.2500 | 4 |" in page
    assert "| training loss of the last update, nats per token | 2.0000 | 3 |" in page
    assert "acc_norm (chance: 0.25) | 0.2710 | 4 |" in page
    assert "\n    ranks: 8\n    machine: Linux, 2 cores, NVIDIA H100\n" in page
    assert page.count("commit:") == 1 and "    machine: Linux, 8 cores\n" in page, "the second start is said, too"
    assert "\n\n    To be,\n    ```or```\n\n" in page
    assert '"max_lr": 0.0006' in page and "/home/somebody" not in text
    page = card(run, log=LOG)
    assert "validation loss" not in page and "HellaSwag" not in page and "A sample" not in page


def test_data_and_weights_of_the_hub_are_named(run):
    names = {"fineweb-edu": "HuggingFaceFW/fineweb-edu", "a/b-c.d, main": "a/b-c.d", "a/b: x": None}
    for origin, shown in names.items():
        text = card(run, start_text(CONFIG | {"init_from": "gpt2-medium"}, data=origin))
        header = yaml.safe_load(text.split("---")[1])
        assert header.get("datasets") == ([shown] if shown else None)
        assert header["base_model"] == "openai-community/gpt2-medium"
        assert "from the weights of another model" in text


@pytest.mark.parametrize("chat", ["", "+chat"])
def test_the_lines_that_load_the_model_work(run, chat, capsys):
    if chat:
        export_huggingface(tiny_model(block_size=256), tokenizers.get_encoding("bytes+chat"), run / "hf")
    [code] = re.findall("```python\n(.*?)```", card(run), re.DOTALL)
    exec(code.replace('folder = "."', f"folder = {str(run / 'hf')!r}"), {})
    out = capsys.readouterr().out
    assert "'role': 'assistant', 'content': " in out if chat else out.startswith("The ")


def test_text_from_files_is_shown_as_it_is_and_damaged_files_never_stop_an_export(run, capsys):
    page = card(run, start_text(machine="x<b>[a](http://b)\x1b[31m"), sample="a\x1b[2J\r\n<script>\u2028b")
    assert "    machine: x<b>[a](http://b)\\x1b[31m" in page
    assert "\x1b" not in page and "\n    a\\x1b[2J\n    <script>\n    b\n" in page
    assert card(run, "\0 \xff\n\nconfig: {", "0 train 5\n1 train nan\n") == ""
    assert capsys.readouterr().out.startswith("note: The exported model has no README.md: ")
