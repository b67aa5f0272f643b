"""The command line that all programs share: flags, their help, errors in one line, a console that may fail."""

from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
import tyro

import train_gpt2
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
        (["--max-steps"], "--max-steps needs a value."),
        (["-m"], "-m/--model needs a value."),
        (["--max-step", "3"], "There is no flag called --max-step. Did you mean --max-steps?"),
        (["--no-compil"], "There is no flag called --no-compil. Did you mean --no-compile?"),
        (["--xyzzy=3"], "There is no flag called --xyzzy. Run with --help to see all flags."),
        (["Hi", "there"], "The argument 'there' was not expected. Run with --help to see all flags."),
        (["Hi", "--max-steps", "3", "there"], "The argument 'there' was not expected. Run with --help to see all flags."),
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
    assert error_of("trai", config_class=Required) == "what is 'trai', but it must be one of 'train', 'data'."
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
