"""The command line that all programs share: flags, their help, errors in one line, a console that may fail."""

import dataclasses
import errno
import functools
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Optional
from unittest import mock

import bench.__main__
import contamination
import fineweb
import hellaswag
import pytest
import sample
import smoltalk
import tokenizer
import torch
import train_gpt2
from plumbing.cli import console, flags
from plumbing.cli.console import UserError
from plumbing.run import compare
from plumbing.run.options import OTHER_TRAINERS

from harness import ROOT, SCRIPTS, needs, refused


@dataclass
class Options:
    """Options of a program that does not exist."""

    prompt: Annotated[str, "positional", "may be empty"] = ""  # the text
    # the model, or a file that holds one
    model: Annotated[str, "-m"] = "gpt2"
    max_steps: int = 3  # how many steps
    max_lr: float = 1.0  # how fast
    compile: bool = False  # compile it
    tf32: bool | None = None  # with fewer bits
    optimizer: Literal["adamw", "muon"] = "adamw"  # which one
    data: str = "text"  # where it is
    name: Annotated[str, "may be empty"] = ""  # what it is called
    inputs: tuple[str, ...] = ()  # files
    slopes: Optional[tuple[float, ...]] = None  # noqa: UP045 - how steep
    bias: None | float = -1.0  # where it begins


parse = functools.partial(flags.parse, Options)
compare_parse = functools.partial(flags.parse, compare.Options)


def read_flags(args):
    return train_gpt2.read_flags(train_gpt2.TrainConfig, train_gpt2.PRESETS, args)


def error_of(*args, parse=parse):
    with pytest.raises(UserError) as error:
        parse(args)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "line, options",
    [
        ("-m a.pt --max_lr=2 --compile -- -Hi", Options("-Hi", model="a.pt", max_lr=2.0, compile=True)),
        ("--inputs a b --inputs c --name '' --tf32=False", Options(inputs=("a", "b", "c"), tf32=False)),
        ("--tf32 True Hi --no-compile", Options("Hi", tf32=True)),
        ("--slopes 1 0.5 --bias -2 --max-steps 1e9", Options(slopes=(1.0, 0.5), bias=-2.0, max_steps=10**9)),
    ],
)
def test_flags_are_the_fields(line, options):
    """A list that is given twice is both; a switch may have a value, and knows if it was not given."""
    assert parse(shlex.split(line)) == options
    flags.check(options)


@pytest.mark.parametrize("words", [["--data=~/a"], ["--data", "~/a"]])
def test_a_path_may_begin_with_the_home_folder(words, monkeypatch):
    """A shell puts it there itself only where a word begins with ~."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("USERPROFILE", "/home/me")
    assert parse(words).data == "/home/me/a"


def test_each_of_several_paths_may_begin_with_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("USERPROFILE", "/home/me")
    assert parse(["--inputs", "~/a", "b", "~"]).inputs == ("/home/me/a", "b", "/home/me")
    assert compare_parse(["~/runs/*"]).groups == ("/home/me/runs/*",)


@pytest.mark.parametrize("words", [["--name=~/a"], ["~/a"]])
def test_a_text_that_is_no_path_keeps_its_tilde(words):
    assert "~/a" in vars(parse(words)).values()


@pytest.mark.parametrize(
    "words, said",
    [
        (["--max-steps=1.5"], "--max-steps.*'1.5'"),
        (["--data", ""], "--data.*empty"),
        (["--tf32=maybe"], "--tf32 is 'maybe', but it must be true or false"),
        (["caf\udce9"], r"The argument 'caf\\udce9' is not UTF-8 text. Type it in a UTF-8 terminal."),
        (["--max-l", "3", "--foo"], "--max-l. Did you mean --max-lr\\?.* called --foo."),
    ],
)
def test_a_mistake_is_one_line_with_the_flag_the_value_and_a_remedy(words, said, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")  # no line is wrapped
    assert re.search(said, error_of(*words))


@pytest.mark.parametrize(
    "program, words, advice",
    [
        (sample, ["The", "cat"], "Put quotes around a text of several words."),
        (hellaswag, ["gpt2"], "Which flag is it for?"),
        (bench.__main__, ["train", "ladder"], "Which flag is it for?"),
        (fineweb, ["books.txt"], "Use --input books.txt."),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_word_too_many_is_answered_with_what_the_program_takes(program, words, advice):
    """And not with a flag that has a similar name: cat is not --chat."""
    said = error_of(*words, parse=functools.partial(flags.parse, program.Options))
    assert said.startswith(f"The argument '{words[-1]}' was not expected. {advice}")


@pytest.mark.gpt2
def test_the_habits_of_other_trainers_are_answered_with_ours():
    answers = {
        "--lerning-rate 3": "Did you mean --max-lr?",
        "--eval-only": "Use --max-steps 0.",
        "lr=3e-4": "The argument 'lr=3e-4' was not expected. Use --max-lr.",
        "config/train_shakespeare_char.py": "Use --preset, which names a set of flags",
        "--preset gpt2-medum": "--preset: there is no 'gpt2-medum'. Did you mean gpt2-medium?",
        "--sample-prompt The king": "'king' was not expected. Which flag is it for?",
    }
    for words, said in answers.items():
        assert said in error_of(*words.split(), parse=read_flags)
    ours = {flags.flag_of(name) for name in vars(train_gpt2.TrainConfig())}
    assert {re.split("[ ,]", flag)[0] for flag in OTHER_TRAINERS if flag.startswith("--")} <= ours, "flags that exist"


def test_the_trainers_help_explains_every_preset_and_every_flag(capsys, monkeypatch):
    """With the values of the preset that was typed."""
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit, match="0"):
        read_flags(["--preset", "quickstart", "--help"])
    usage, description, explained = re.split(r"\n\n(?=Train GPT-2|flags:)", capsys.readouterr().out)
    assert re.search("--[a-z]+", explained.replace("--help", ""))[0] == "--preset", "the first one to choose"
    assert usage.startswith("usage: ")
    for preset in train_gpt2.PRESETS:
        assert re.search(rf"^    {preset} +\w", description, re.MULTILINE), "a line of its own"
    for heading in ("data folders", "evaluation", "the model", "the data", "the schedule", "the optimizer"):
        assert f"\n\n{heading}" in explained
    entries = [" ".join(entry.split()) for entry in re.split(r"\n  (?=-)", explained)]
    for name, value in dataclasses.asdict(train_gpt2.PRESETS["quickstart"]).items():
        [entry] = [entry for entry in entries if re.match(rf"{flags.flag_of(name)}[ ,]", entry)]
        shown = " ".join(value) if isinstance(value, tuple) else str(value)
        shown = {"True": "on", "False": "off"}.get(shown, shown)
        assert value in ("", None, ()) or f"(default: {shown})" in entry
        assert len(entry) > 20 and "None" not in entry
    shown = " ".join(entries)
    assert "--optimizer {adamw,muon} muon: for the blocks' matrices" in shown, "the comment in the field's line"
    assert "--data-weights FLOAT [FLOAT ...] shares of the folders" in shown, "or else the one above it"


def test_every_flag_of_every_program_has_a_help_text():
    programs = (bench.__main__, compare, contamination, fineweb, hellaswag, sample, smoltalk, tokenizer)
    for options in (train_gpt2.TrainConfig, *[program.Options for program in programs]):
        comments = flags.comments_of(options)
        assert all(comments[field.name][1] for field in dataclasses.fields(options)), options


@dataclass
class Numbers:
    n: flags.Positive[int] = 4
    lr: flags.Positive[float] = 0.1
    every: int = 250
    bias: float = -1.0


def test_a_number_is_in_the_range_that_stands_with_its_field():
    flags.check(Numbers(n=1, lr=1e-9, every=0, bias=-2.0))
    for numbers, said in (
        (dict(lr=0.0), "--lr is 0.0, but it must be above 0."),
        (dict(lr=float("inf")), "--lr is inf, but it must be above 0 and below 1e.18."),
        (dict(n=-3, bias=float("nan")), "--n is -3, .* --bias is nan, "),
    ):
        with pytest.raises(UserError, match=f"^{said}"):
            flags.check(Numbers(**numbers))


def test_what_a_file_or_a_model_says_is_shown_and_steers_no_terminal():
    """Control characters and those that turn the direction of writing are shown; spaces and joiners are text."""
    said = "a\tb\nc\x1b[31m\r\x07\x7f\x9b\u2028\u202e\u2066 \u00a0\u3000\u200d.\udcff"
    shown = "c\\x1b[31m\\r\\x07\\x7f\\x9b\\u2028\\u202e\\u2066 \u00a0\u3000\u200d.\\udcff"
    assert console.plain(said) == f"a\\tb\\n{shown}" and console.harmless(said) == f"a\tb\n{shown}"
    assert console.plain("x" * 100_000) == "x" * 200 + "..."
    assert (console.count(1, "document"), console.count(2000, "rank")) == ("1 document", "2,000 ranks")


def test_a_note_shows_what_a_file_says_in_one_line(capsys):
    console.note("The file says a\x1b[31m\nb.")
    assert capsys.readouterr().out == "note: The file says a\\x1b[31m\\nb.\n"


@needs("bash")
def test_a_printed_command_survives_a_shell_whatever_its_words_are(capsys, tmp_path, monkeypatch):
    """Values that begin with a dash, are empty or hold control characters; and a script in another folder."""
    monkeypatch.chdir(tmp_path)
    values = ["-Hi", "a\n\x1b[31mb\u202e'", "", "x" * 50, "$HOME `id` !1", "C:\\n", "\\", "It's a model"]
    console.print_next(["printf", "%s\\n%%\\n", "sample.py", *(("--flag", value) for value in values)])
    printed = capsys.readouterr().out.partition("Next:\n")[2]
    assert printed.isascii() and printed.startswith("    printf ")
    assert '"It\'s a model"' in printed, "double quotes, which cmd.exe has too"
    shown = subprocess.run(
        ["bash", "-c", printed], capture_output=True, env=os.environ | {"LC_ALL": "C.UTF-8"}
    ).stdout
    script, *words = shown.decode().split("\n%\n")[:-1]
    assert Path(script).resolve() == ROOT / "sample.py"
    assert words == ["--flag=-Hi", *(word for value in values[1:] for word in ("--flag", value))]


SCRIPT = """
import sys, time
from plumbing.cli import console

def main():
    {body}

console.run(lambda: None)  # as programs parse their flags before slow imports
console.run(main{keywords})
"""


def write_script(folder, *lines, keywords=""):
    path = folder / "script.py"
    path.write_text(SCRIPT.format(body="\n    ".join(lines), keywords=keywords))
    return str(path)


def run_script(folder, *lines, shell="", keywords="", **environment):
    """What a program of these lines prints and its status; shell: what follows its name on a command line."""
    script = write_script(folder, *lines, keywords=keywords)
    command = f'"{sys.executable}" "{script}" {shell}; exit ${{PIPESTATUS[0]}}'
    env = {**os.environ, **environment}
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=env, timeout=60)


SLOW = ("torch", "numpy", "transformers", "datasets", "pyarrow", "tiktoken")
COMMANDS = [[str(ROOT / name)] for name in SCRIPTS] + [["-m", "bench"]]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: Path(command[-1]).stem)
def test_help_and_a_mistyped_flag_do_not_wait_for_slow_imports(command, tmp_path):
    for package in SLOW:
        (tmp_path / f"{package}.py").write_text("raise ImportError('this is slow')", encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = functools.partial(subprocess.run, capture_output=True, text=True, cwd=ROOT, env=env)
    shown = run([sys.executable, *command, "--help"])
    assert shown.returncode == 0 and "usage: " in shown.stdout, shown.stderr
    safe = [] if "-m" in command else ["-P"]  # without the script's folder in the path
    refused = run([sys.executable, *safe, *command, "--xyzzy"])
    assert refused.returncode == 2 and "There is no flag called --xyzzy" in refused.stderr


TALK = [
    "from tqdm import tqdm",
    "for number in tqdm(range(9)):",
    "    print('line', number, '\\u00e9 \\udcff')",
    "    time.sleep(0.01)",
    "open(__file__ + '.done', 'w').close()",
    "print('the end', end='')",
]


@needs("/dev/full")
def test_the_console_does_not_end_a_program(tmp_path):
    """Neither a reader that is gone nor a full disk, closed streams, or an encoding that lacks a character."""
    for shell in ("| head -1", "> /dev/full 2>&1", ">&- 2>&-", ""):
        done = run_script(tmp_path, *TALK, shell=shell, PYTHONUNBUFFERED="", PYTHONIOENCODING="ascii")
        assert done.returncode == 0 and "Error" not in done.stderr and "Exception" not in done.stderr
        (tmp_path / "script.py.done").unlink()
    assert done.stdout.startswith("line 0 ? ?\nline 1") and done.stdout.endswith("the end") and "9/9" in done.stderr


@needs("/dev/full")
def test_a_closed_pipe_ends_a_program_that_is_run_for_its_output(tmp_path):
    product = dict(keywords=", output_is_product=True", PYTHONUNBUFFERED="")  # what is still buffered fails again
    done = run_script(tmp_path, *TALK, shell="| head -1", **product)
    assert (done.returncode, done.stdout) == (141, "line 0 \u00e9 ?\n")
    assert "Error" not in done.stderr and "Exception" not in done.stderr
    for lines in (TALK, TALK[-1:]):
        done = run_script(tmp_path, *lines, shell="> /dev/full", **product)
        assert done.returncode == 2 and "Exception" not in done.stderr
        assert done.stderr.splitlines()[-1] == "error: Could not write the output: No space left on device."
    assert not (tmp_path / "script.py.done").exists()


@pytest.mark.parametrize(
    "error, said",
    [
        (UserError("In a\nb."), "error: In a\\nb."),
        (OSError(errno.ENOSPC, "No space left on device", "a"), "a: No space left on device. Free some space"),
        (OSError(errno.EIO, "Input/output error"), "write a file: Input/output error. Check that disk"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"), "not enough memory. CUDA out of memory. Tried."),
        (RuntimeError("[alloc_cpu.cpp:127] can't allocate memory: you"), "memory. [alloc_cpu.cpp:127] can't"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "is not enough memory."),
    ],
)
def test_what_the_machine_refuses_is_one_line_whichever_library_says_it(error, said):
    assert said in refused(mock.Mock(side_effect=error))


def test_a_package_that_is_missing_is_one_line_also_while_a_program_imports(tmp_path):
    script = Path(write_script(tmp_path, "pass"))
    script.write_text(f"{script.read_text()}\nimport no_such_package")  # after the program has read its flags
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: The package no_such_package is not installed for ")


def test_a_bug_keeps_its_traceback_and_an_exit_status_is_left_alone(tmp_path):
    done = run_script(tmp_path, "1 / 0")
    assert done.returncode == 1 and "Traceback" in done.stderr
    assert run_script(tmp_path, "sys.exit(7)").returncode == 7


def test_a_rank_that_fails_says_so_and_waits_for_no_other(tmp_path):
    wait = "import atexit; atexit.register(time.sleep, 60)"  # as a process group does whose other ranks are busy
    for line, status in (
        ("raise console.UserError('That is no.')", 2),
        ("1 / 0", 1),
        ("raise KeyboardInterrupt", 130),
    ):
        done = run_script(tmp_path, wait, line, WORLD_SIZE="2", RANK="0")
        assert done.returncode == status and done.stderr


# subtle: Python notes a signal between two of its steps, and one that arrives just before a long sleep begins waits for
# its end. So what is interrupted here sleeps for short times
WAIT = ["print('ready', flush=True)", "for _ in range(3000): time.sleep(0.01)"]


def interrupt(*command, **environment):
    """Send SIGINT once the program has said that it is ready; its status and what it says then."""
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, *command], **pipes, env={**os.environ, **environment}) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    return process.returncode, said


def test_an_interrupt_is_one_line_also_while_torch_is_imported(tmp_path):
    script = write_script(tmp_path, *WAIT)
    assert interrupt(script) == (130, "interrupted\n")
    assert interrupt(script, RANK="1") == (130, ""), "rank 0 says it"
    (tmp_path / "torch.py").write_text("\n".join(["import time", *WAIT]))
    path = f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"
    assert interrupt(str(ROOT / "train_gpt2.py"), PYTHONPATH=path) == (-signal.SIGINT, "interrupted\n")
