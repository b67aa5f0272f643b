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

CONFIG = {
    "data": "/home/somebody/data",
    "out_dir": "/home/somebody/log",
    "hellaswag_data": "/home/somebody/val.jsonl",
    "init_from": "",
    "max_lr": 6e-4,
}
START = {
    "started": "2026-11-20T13:42:34+00:00",
    "machine": "Linux, 2 cores, NVIDIA H100",
    "ranks": "8",
    "versions": "python 3.11.7, torch 2.13.0",
    "commit": "fd912143f159",
}


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


def test_the_header_says_what_the_model_is_and_no_license(run):
    """The license is not ours to say."""
    header = yaml.safe_load(card(run).split("---\n")[1])
    assert header == dict(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["gpt2", "train_gpt2"],
    )


@pytest.mark.parametrize(
    "line",
    [
        "| validation loss on unseen tokens, nats per token | 1.2500 | 4 |",
        "| training loss of the last update, nats per token | 2.0000 | 3 |",
        "acc_norm (chance: 0.25) | 0.2710 | 4 |",
        "trained from scratch",
        "# A GPT-2 with 2 layers",
        "\n    ranks: 8\n    machine: Linux, 2 cores, NVIDIA H100\n",
        '"max_lr": 0.0006',
    ],
)
def test_the_card_has_what_the_run_was_and_measured(line, run):
    assert line in card(run)


def test_the_card_has_no_path_of_the_authors(run):
    assert "/home/somebody" not in card(run)


def test_the_card_has_each_start(run):
    page = card(run, start_text() + start_text(machine="Linux, 8 cores", commit=""))
    assert page.count("commit:") == 1
    assert "    machine: Linux, 8 cores\n" in page


def test_the_card_shows_a_sample_as_code(run):
    assert "\n\n    To be,\n    ```or```\n\n" in card(run, sample="To be,\n```or```")


@pytest.mark.parametrize("words", ["validation loss", "HellaSwag", "A sample"])
def test_the_card_is_silent_on_what_was_not_measured(words, run):
    assert words not in card(run, log=LOG)


ORIGINS = {
    "fineweb-edu": ["HuggingFaceFW/fineweb-edu"],
    "a/b-c.d, main": ["a/b-c.d"],
    "a/b: x": None,
}


@pytest.mark.parametrize("origin", ORIGINS)
def test_data_of_the_hub_are_named(origin, run):
    header = yaml.safe_load(card(run, start_text(data=origin)).split("---")[1])
    assert header.get("datasets") == ORIGINS[origin]


def test_weights_of_the_hub_are_named(run):
    page = card(run, start_text(CONFIG | {"init_from": "gpt2-medium"}))
    assert "\nbase_model: openai-community/gpt2-medium\n" in page
    assert "from the weights of another model" in page


@pytest.mark.parametrize("chat", ["", "+chat"])
def test_the_lines_that_load_the_model_work(run, chat, capsys):
    if chat:
        export_huggingface(tiny_model(block_size=256), tokenizers.get_encoding("bytes+chat"), run / "hf")
    [code] = re.findall("```python\n(.*?)```", card(run), re.DOTALL)
    assert chat or 'generate("The",' in code  # GPT-2's tokens begin with the blank before a word
    exec(code.replace('folder = "."', f"folder = {str(run / 'hf')!r}"), {})
    out = capsys.readouterr().out
    assert "'role': 'assistant', 'content': " in out if chat else out.startswith("The")


def test_what_a_file_says_steers_no_terminal(run):
    page = card(run, start_text(machine="x<b>[a](http://b)\x1b[31m"))
    assert "    machine: x<b>[a](http://b)\\x1b[31m" in page


def test_a_sample_is_no_markdown(run):
    assert "\n    a\\x1b[2J\n    <script>\n    b\n" in card(run, sample="a\x1b[2J\r\n<script>\u2028b")


def test_damaged_files_never_stop_an_export(run, capsys):
    assert card(run, "\0 \xff\n\nconfig: {", "0 train 5\n1 train nan\n") == ""
    assert capsys.readouterr().out.startswith("note: The exported model has no README.md: ")
