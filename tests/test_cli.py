"""The command line that all programs share: flags, their help, errors in one line, a console that may fail."""

import dataclasses
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import pytest
import tyro

import train_gpt2
from conftest import ROOT
from plumbing import cli
from plumbing.cli import UserError


@dataclass
class Options:
    """Options of a program that does not exist."""

    prompt: tyro.conf.Positional[str] = ""  # the text
    # the model, or a file that holds one
    model: Annotated[str, tyro.conf.arg(aliases=["-m"])] = "gpt2"
    # the run
    max_steps: int = 3  # how many steps
    max_lr: float = 1.0  # how fast
    compile: bool = False  # compile it
    # the rest: what nobody needs
    optimizer: Literal["adamw", "muon"] = "adamw"  # which one
    data: str = "text"  # where it is
    inputs: tuple[str, ...] = ()  # files


@dataclass
class Required:
    what: tyro.conf.Positional[Literal["train", "data"]]  # what to measure
    rounds: int = 0  # how often


def error_of(*args, config_class=Options, **kwargs):
    with pytest.raises(UserError) as error:
        cli.parse(config_class, args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


# ----------------------------------------------------------------------------------------------------------
# Flags


def test_flags_are_the_fields_and_a_default_instance_sets_their_defaults():
    args = ["Hi", "-m", "a.pt", "--max_lr=2", "--compile", "--inputs", "a", "b"]
    options = cli.parse(Options, args, default=Options(max_steps=7))
    assert options == Options("Hi", model="a.pt", max_lr=2.0, compile=True, inputs=("a", "b"), max_steps=7)


@pytest.mark.parametrize(
    "args, sentence",
    [
        (["--max-steps", "many"], "--max-steps is 'many', but it must be a whole number."),
        (["--max_steps=1e3"], "--max-steps is '1e3', but it must be a whole number."),
        (["--max-lr", "fast"], "--max-lr is 'fast', but it must be a number."),
        (["--optimizer", "sgd"], "--optimizer is 'sgd', but it must be one of 'adamw', 'muon'."),
        (["--optimizer=muo"], "--optimizer is 'muo', but it must be one of 'adamw', 'muon'. Did you mean muon?"),
        (["--max-steps"], "--max-steps needs a value."),
        (["-m"], "-m/--model needs a value."),
        (["--max-step", "3"], "There is no flag called --max-step. Did you mean --max-steps?"),
        (["--no-compil"], "There is no flag called --no-compil. Did you mean --no-compile?"),
        (["--xyzzy=3"], "There is no flag called --xyzzy. Run with --help to see all flags."),
        (["Hi", "there"], "The argument 'there' was not expected. Run with --help to see all flags."),
        (["Hi", "--max-lr", "3", "there"], "The argument 'there' was not expected. Run with --help to see all flags."),
        (
            ["Hi", "--compile=False"],
            "--compile takes no value. Use --compile to switch it on and --no-compile to switch it off.",
        ),
        (["--max-lr", "fast " * 30], f"--max-lr is '{'fast ' * 30}', but it must be a number."),
    ],
)
def test_a_mistake_is_one_plain_sentence(args, sentence, monkeypatch):
    assert error_of(*args) == sentence
    monkeypatch.setenv("COLUMNS", "40")
    assert error_of(*args) == sentence


def test_all_mistakes_are_told_at_once():
    mistakes = ["--max-steps", "many", "--max-l", "3", "--optimizer=sgd", "--foo", "-3", "-x", "a"]
    assert error_of("Hi", "--max-lr=-1", *mistakes) == (
        "--max-steps is 'many', but it must be a whole number. "
        "There is no flag called --max-l. Did you mean --max-lr? "
        "--optimizer is 'sgd', but it must be one of 'adamw', 'muon'. "
        "There is no flag called --foo. Run with --help to see all flags. "
        "There is no flag called -x. Run with --help to see all flags."
    )


def test_a_missing_argument_does_not_hide_the_other_mistakes():
    assert error_of(config_class=Required) == "The argument {train,data} is missing: what to measure."
    assert error_of("tray", config_class=Required).startswith("what is 'tray', but it must be one of 'train', 'data'.")
    said = error_of("train", "--rounds", "x", "--round", "3", config_class=Required)
    assert said.startswith("--rounds is 'x', but it must be a whole number. There is no flag called --round.")


# ----------------------------------------------------------------------------------------------------------
# Suggestions


def test_the_names_of_other_trainers_are_answered_with_ours():
    answers = {
        "--max-iters": "Use --max-steps.",
        "--lr": "Use --max-lr.",
        "--learning_rate": "Use --max-lr.",
        "--lerning-rate": "Did you mean --max-lr?",
        "--gradient-accumulation-steps": "Use --total-batch-size, which counts tokens.",
        "--eval-interval": "Use --val-every.",
        "--input-bin": "Use --data.",
        "--n_layers": "Did you mean --n-layer?",
        "--nproc_per_node": "Use torchrun --nproc_per_node=N.",
    }
    for flag, answer in answers.items():
        said = error_of(f"{flag}=3", config_class=train_gpt2.TrainConfig, synonyms=cli.OTHER_TRAINERS)
        assert said == f"There is no flag called {flag}. {answer}"


def test_the_synonyms_lead_to_flags_that_exist():
    ours = cli.flag_names(train_gpt2.TrainConfig, {})
    for flag in cli.OTHER_TRAINERS:
        assert not flag.startswith("--") or flag.split(",")[0] in ours.values(), flag
    theirs = " ".join(cli.OTHER_TRAINERS.values()).split()
    assert len(theirs) == len(set(theirs)), "each leads to one flag"
    assert not set(theirs) & set(ours), "a flag of ours needs no explanation"


def test_a_suggestion_names_the_nearest_or_the_synonym_or_all():
    devices = ["auto", "cpu", "cuda", "mps"]
    assert cli.suggest("gpu", devices, {"gpu": "cuda"}) == "Use cuda."
    assert cli.suggest("cudda", devices) == "Did you mean cuda?"
    assert cli.suggest("tpu-v5", devices) == "Choose from auto, cpu, cuda, mps."


# ----------------------------------------------------------------------------------------------------------
# Help


def help_of(capsys, config_class=Options, **kwargs):
    with pytest.raises(SystemExit) as leaving:
        cli.parse(config_class, ["--help"], **kwargs)
    assert leaving.value.code == 0
    return capsys.readouterr().out


def test_help_is_the_modules_docstring_and_the_flags_under_their_headings(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    printed = help_of(capsys)
    assert printed.startswith(__doc__)
    expected = """
 options
  -h, --help                show this help message and exit
  -m STR, --model STR       the model, or a file that holds one (default: gpt2)

 the run
  --max-steps INT           how many steps (default: 3)
  --max-lr FLOAT            how fast (default: 1.0)
  --compile, --no-compile   compile it (default: False)

 the rest: what nobody needs
  --optimizer {adamw,muon}  which one (default: adamw)
  --data STR                where it is (default: text)
"""
    assert expected in printed


def test_the_docstring_is_wrapped_but_not_its_examples(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    example = "    python train.py --data somewhere     # a line longer than the window"
    monkeypatch.setattr(sys.modules[__name__], "__doc__", f"Train a model {'very ' * 9}well.\n\n{example}\n")
    printed = help_of(capsys)
    assert printed.startswith("Train a model very very very very very\nvery very very very well.\n\n" + example)


@pytest.mark.parametrize("preset", train_gpt2.PRESETS)
def test_the_trainers_help_explains_every_preset_and_every_flag(preset, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        train_gpt2.parse_args(["--preset", preset, "--help"])
    description, flags = capsys.readouterr().out.split("\nusage: ")
    assert re.search(rf"^    {preset} +\w", description, re.MULTILINE), "a line of its own"
    assert description.count("    python ") >= 2, "two examples or more"
    for heading in ("the run", "the model", "the batch", "the schedule", "the optimizer", "evaluation and output"):
        assert f"\n\n {heading}" in flags
    defaults = train_gpt2.PRESETS[preset]
    for name, value in dataclasses.asdict(defaults).items():
        flag = "--" + name.replace("_", "-")
        [(text, default)] = re.findall(rf"\n  {flag}\b(?!-).*?\s\s+(\S.*?) \(default: (.*?)\)\n", flags + "\n")
        assert len(text) > 5 and shlex.split(default) == [str(value)], flag


def test_an_unknown_preset_is_told_with_the_other_mistakes():
    with pytest.raises(UserError) as error:
        train_gpt2.parse_args(["--preset", "gpt2-medum", "--max-iters", "3"])
    assert "--preset is 'gpt2-medum'" in str(error.value) and "Did you mean gpt2-medium?" in str(error.value)
    assert str(error.value).endswith("There is no flag called --max-iters. Use --max-steps.")


def test_the_presets_that_the_flag_takes_are_those_there_are():
    field = train_gpt2.TrainConfig.__dataclass_fields__["preset"]
    assert list(get_args(field.type)) == list(train_gpt2.PRESETS)


# ----------------------------------------------------------------------------------------------------------
# Programs

SCRIPT = """
import errno, os, sys, time
sys.path.insert(0, {root!r})
from dataclasses import dataclass
from plumbing import cli

@dataclass
class Options:
    number: int = 0  # how often

def main():
    {body}

cli.run(main{keywords})
"""


def write_script(folder, *lines, keywords=""):
    path = folder / "script.py"
    path.write_text(SCRIPT.format(root=str(ROOT), body="\n    ".join(lines), keywords=keywords))
    return str(path)


def test_help_of_a_light_program_does_not_wait_for_torch(tmp_path):
    script = write_script(tmp_path, "try: cli.parse(Options)", "finally: assert 'torch' not in sys.modules")
    done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "how often" in done.stdout, done.stderr
