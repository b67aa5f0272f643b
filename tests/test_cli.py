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

from harness import ROOT, SCRIPTS, git, needs, refusal_of, refused, status_of


@dataclass
class Options:
    """Options of a program that does not exist."""

    prompt: Annotated[str, "positional", "may be empty"] = ""  # the text
    # the model, or a file that holds one
    model: Annotated[str, "-m"] = "gpt2"
    max_steps: int = 3  # how many steps
    max_lr: float = 1.0  # how fast, in % of the usual rate
    compile: bool = False  # compile it
    tf32: bool | None = None  # with fewer bits
    optimizer: Literal["adamw", "muon"] = "adamw"  # which one
    data: str = "text"  # where it is
    name: Annotated[str, "may be empty"] = ""  # what it is called
    inputs: tuple[str, ...] = ("c", "d")  # files
    slopes: Optional[tuple[float, ...]] = None  # noqa: UP045 - how steep
    bias: None | float = -1.0  # where it begins


parse = functools.partial(flags.parse, Options)


def read_flags(args):
    return train_gpt2.read_flags(train_gpt2.TrainConfig, train_gpt2.PRESETS, args)


@pytest.mark.parametrize(
    "line, options",
    [
        ("-m a.pt --max_lr=2 --compile -- -Hi", Options("-Hi", model="a.pt", max_lr=2.0, compile=True)),
        ("--inputs a b --inputs c --name '' --tf32=True", Options(inputs=("a", "b", "c"), tf32=True)),
        ("--tf32 False Hi --no-compile", Options("Hi", tf32=False)),
        ("--slopes 1 0.5 --bias -2 --max-steps 1e9", Options(slopes=(1.0, 0.5), bias=-2.0, max_steps=10**9)),
        ("--optimizer Muon", Options(optimizer="muon")),
    ],
)
def test_flags_are_the_fields(line, options):
    """A list that is given twice is both; a switch may have a value, and knows if it was not given."""
    assert parse(shlex.split(line)) == options
    flags.check(options)


def test_a_path_may_begin_with_the_home_folder_and_a_text_with_a_tilde(monkeypatch):
    """A shell puts the folder there itself only where a word begins with ~."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("USERPROFILE", "/home/me")
    options = parse(["~/a", "--data=~/a", "--name=~/a", "--inputs", "~/a", "b", "~"])
    assert options == Options("~/a", data="/home/me/a", name="~/a", inputs=("/home/me/a", "b", "/home/me"))
    assert flags.parse(compare.Options, ["~/runs/*"]).groups == ("/home/me/runs/*",)


def parse_of(program):
    return functools.partial(flags.parse, program.Options)


@pytest.mark.gpt2
@pytest.mark.parametrize(
    "parse, words, said",
    [
        (parse, "--max-steps=1.5e0", "--max-steps.*'1.5e0'"),
        (parse, "--data ''", "--data.*empty"),
        (parse, "--tf32=maybe", "--tf32 is 'maybe', but it must be true or false"),
        (parse, "caf\udce9", r"The argument 'caf\\udce9' is not UTF-8 text. Type it in a UTF-8 terminal."),
        (parse, "--max-l 3 --foo", "--max-l. Did you mean --max-lr\\?.* called --foo."),
        # a word too many, and no flag that has a similar name: cat is not --chat
        (parse_of(sample), "The cat", "'cat' was not expected. Put quotes around a text of several words."),
        (parse_of(hellaswag), "gpt2", "'gpt2' was not expected. Which flag is it for?"),
        (parse_of(fineweb), "books.txt", "'books.txt' was not expected. Use --input books.txt."),
        # the habits of other trainers
        (read_flags, "--lerning-rate 3", "Did you mean --max-lr\\?"),
        (read_flags, "--eval-only", "Use --max-steps 0."),
        (read_flags, "lr=3e-4", "'lr=3e-4' was not expected. Use --max-lr."),
        (read_flags, "quickstart", "Use --preset quickstart."),
        (read_flags, "config/train_shakespeare_char.py", "Use --preset, which names a set of flags"),
        (read_flags, "--sample-prompt The king", "'king' was not expected. Which flag is it for?"),
    ],
)
def test_a_mistake_is_one_line_with_the_flag_the_value_and_a_remedy(parse, words, said, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")  # no line is wrapped
    with pytest.raises(UserError, match=said) as error:
        parse(shlex.split(words))
    assert "\n" not in str(error.value)


def test_the_answers_to_other_trainers_flags_name_flags_that_exist():
    ours = {flags.flag_of(name) for name in vars(train_gpt2.TrainConfig())}
    named = {re.split("[ ,]", flag)[0] for flag in OTHER_TRAINERS if flag.startswith("--")}
    assert named <= ours


def explained(parse, *words):
    """What --help says: what comes before the flags, and the text on flags in one line."""
    status, said, _ = refusal_of(parse, *words, "--help")
    assert status == 0
    before, _, text = said.partition("\n\nflags:")
    return before, " ".join(text.split())


@pytest.mark.parametrize(
    "entry",
    [
        "-m TEXT, --model TEXT the model, or a file that holds one (default: gpt2)",  # the comment is above its line
        "--max-lr FLOAT how fast, in % of the usual rate (default: 1.0)",
        "--compile, --no-compile compile it (default: off)",
        "--tf32, --no-tf32 with fewer bits --optimizer {adamw,muon} which one (default: adamw)",
        "--name TEXT what it is called --inputs TEXT [TEXT ...] files (default: c d)",
        "--slopes FLOAT [FLOAT ...]",
    ],
)
def test_a_flags_help_is_its_fields_comment_and_default(entry):
    assert entry in explained(parse)[1]


def test_the_trainers_help_explains_each_preset_and_shows_the_values_of_the_one_that_was_typed():
    before, text = explained(read_flags, "--preset", "quickstart")
    for preset in train_gpt2.PRESETS:
        assert re.search(rf"^    {preset} +\w", before, re.MULTILINE), "a line of its own"
    for default in ("(default: log/quickstart)", "(default: python_docs)", "model_best.pt (default: on)"):
        assert default in text


PROGRAMS = [bench.__main__, compare, contamination, fineweb, hellaswag, sample, smoltalk, tokenizer]


@pytest.mark.parametrize("options", [train_gpt2.TrainConfig, *(program.Options for program in PROGRAMS)])
def test_every_flag_of_a_program_has_a_help_text(options):
    comments = flags.comments_of(options)
    for field in dataclasses.fields(options):
        assert comments[field.name][1]


def test_what_could_steer_a_terminal_is_shown(output):
    """Control characters and those that turn the direction of writing are shown; spaces and joiners are text."""
    said = "a\tb\nc\x1b[31m\r\x07\x7f\x9b\u2028\u202e\u2066 \u00a0\u3000\u200d.\udcff"
    shown = "c\\x1b[31m\\r\\x07\\x7f\\x9b\\u2028\\u202e\\u2066 \u00a0\u3000\u200d.\\udcff"
    assert console.plain(said) == f"a\\tb\\n{shown}"
    assert console.harmless(said) == f"a\tb\n{shown}"
    console.note("The file says a\x1b[31m\nb.")
    assert output() == "note: The file says a\\x1b[31m\\nb.\n"
    assert console.plain("x" * 100_000) == "x" * 200 + "..."


def read_by_a_shell(*words):
    """The words that a shell reads in a command that was printed."""
    _, said, _ = refusal_of(lambda args: console.print_next(["printf", "%s\\n%%\\n", *words]))
    printed = said.partition("Next:\n")[2]
    assert printed.isascii()
    env = os.environ | {"LC_ALL": "C.UTF-8"}
    shown = subprocess.run(["bash", "-c", printed], capture_output=True, env=env).stdout
    return shown.decode().split("\n%\n")[:-1]


@needs("bash")
@pytest.mark.parametrize(
    "value", ["a\n\x1b[31mb\u202e'", "", "x" * 50, "$HOME", "`id`", "!1", '"', "C:\\n", "\\", "It's a model"]
)
def test_a_printed_command_survives_a_shell_whatever_its_words_are(value):
    assert read_by_a_shell(("--flag", value)) == ["--flag", value]


@needs("bash")
def test_a_script_is_printed_with_its_path_and_a_value_with_a_dash_as_no_flag():
    script, value = read_by_a_shell("sample.py", ("--flag", "-Hi"))
    assert Path(script).resolve() == ROOT / "sample.py"
    assert value == "--flag=-Hi"


def test_a_printed_command_has_double_quotes_where_they_do():
    """cmd.exe has no others."""
    assert console.quote("It's a model") == '"It\'s a model"'


SCRIPT = """
import sys, time
from plumbing.cli import console

def main():
    {body}

console.run(lambda: None)  # as programs parse their flags before slow imports
console.run(main{keywords})
"""


def write_script(*lines, keywords=""):
    Path("script.py").write_text(SCRIPT.format(body="\n    ".join(lines), keywords=keywords))


def run_script(*lines, shell="", keywords="", **environment):
    """What a program of these lines prints and its status; shell: what follows its name on a command line."""
    write_script(*lines, keywords=keywords)
    command = f'"{sys.executable}" script.py {shell}; exit ${{PIPESTATUS[0]}}'
    env = {**os.environ, **environment}
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=env, timeout=250)


SLOW = ("torch", "numpy", "transformers", "datasets", "pyarrow", "tiktoken")


@pytest.mark.parametrize("command", [*SCRIPTS, "-m bench", "-m plumbing.run.compare"])
def test_flags_are_read_before_slow_imports(command, tmp_path):
    for package in SLOW:
        (tmp_path / f"{package}.py").write_text("raise ImportError('this is slow')", encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    safe = [] if "-m" in command else ["-P"]  # without the script's folder in the path
    words = [sys.executable, *safe, *command.split(), "--help"]
    shown = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=env)
    assert re.match(f"usage: (python )?{command} ", shown.stdout), shown.stderr


TALK = [
    "from tqdm import tqdm",
    "for number in tqdm(range(9)):",
    "    print('line', number, '\\u00e9 \\udcff')",
    "    time.sleep(0.01)",
    "open(__file__ + '.done', 'w').close()",
    "print('the end', end='')",
]


@needs("/dev/full")
def test_the_console_does_not_end_a_program():
    """Neither a reader that is gone nor a full disk, closed streams, or an encoding that lacks a character."""
    for shell in ("| head -1", "> /dev/full 2>&1", ">&- 2>&-", ""):
        done = run_script(*TALK, shell=shell, PYTHONUNBUFFERED="", PYTHONIOENCODING="ascii")
        assert done.returncode == 0 and "Error" not in done.stderr and "Exception" not in done.stderr
        os.remove("script.py.done")
    assert done.stdout.startswith("line 0 ? ?\nline 1") and done.stdout.endswith("the end") and "9/9" in done.stderr


@needs("/dev/full")
def test_a_closed_pipe_ends_a_program_that_is_run_for_its_output():
    product = dict(keywords=", output_is_product=True", PYTHONUNBUFFERED="")  # what is still buffered fails again
    done = run_script(*TALK, shell="| head -1", **product)
    assert (done.returncode, done.stdout) == (141, "line 0 \u00e9 ?\n")
    assert "Error" not in done.stderr and "Exception" not in done.stderr
    for lines in (TALK, TALK[-1:]):
        done = run_script(*lines, shell="> /dev/full", **product)
        assert done.returncode == 2 and "Exception" not in done.stderr
        assert done.stderr.splitlines()[-1] == "error: Could not write the output: No space left on device."
    assert not os.path.exists("script.py.done")


@pytest.mark.parametrize(
    "error, said",
    [
        (UserError("In a\nb."), "error: In a\\nb."),
        (OSError(errno.ENOSPC, "No space left on device", "a"), "a: No space left on device. Free some space"),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "a"), "a: Disk quota exceeded. Free some space"),
        (OSError(errno.EIO, "Input/output error"), "write a file: Input/output error. Check that disk"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"), "not enough memory. CUDA out of memory. Tried."),
        (RuntimeError("[alloc_cpu.cpp:127] can't allocate memory: you"), "memory. [alloc_cpu.cpp:127] can't"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "is not enough memory."),
    ],
)
def test_what_the_machine_refuses_is_one_line_whichever_library_says_it(error, said):
    assert said in refused(mock.Mock(side_effect=error))


def test_the_process_ends_with_the_status_of_its_result():
    assert status_of(lambda: mock.Mock(status=7)) == 7


def test_a_package_that_is_missing_is_one_line_also_while_a_program_imports():
    lines = ["from plumbing.cli import console", "console.run(lambda: None)", "import no_such_package"]
    Path("script.py").write_text("\n".join(lines))
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True)
    assert done.returncode == 2
    assert re.fullmatch("error: The package no_such_package is not installed for .*\n", done.stderr)


@pytest.mark.parametrize(
    "line, status, said",
    [
        ("raise console.UserError('That is no.')", 2, "error: That is no."),
        ("1 / 0", 1, "Traceback"),
        ("raise KeyboardInterrupt", 130, "interrupted"),
    ],
)
def test_a_rank_that_fails_says_so_and_waits_for_no_other(line, status, said):
    wait = "import atexit; atexit.register(time.sleep, 60)"  # as a process group does whose other ranks are busy
    done = run_script(wait, line, WORLD_SIZE="2", RANK="0")
    assert done.returncode == status
    assert said in done.stderr


# subtle: Python notes a signal between two of its steps, and one that arrives just before a long sleep begins waits for
# its end. So what is interrupted here sleeps for short times
WAIT = ["print('ready', flush=True)", "for _ in range(3000): time.sleep(0.01)"]


def interrupt(*command, **environment):
    """Send SIGINT once the program has said that it is ready; its status and what it says then."""
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, *command], **pipes, env={**os.environ, **environment}) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=250)
    return process.returncode, said


def test_an_interrupt_is_one_line_also_while_torch_is_imported(tmp_path):
    write_script(*WAIT)
    assert interrupt("script.py") == (130, "interrupted\n")
    assert interrupt("script.py", RANK="1") == (130, ""), "rank 0 says it"
    (tmp_path / "torch.py").write_text("\n".join(["import time", *WAIT]))
    path = f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"
    assert interrupt(str(ROOT / "train_gpt2.py"), PYTHONPATH=path) == (-signal.SIGINT, "interrupted\n")


def test_a_command_that_is_not_there_has_no_output():
    assert console.output_of("no-such-program", "-h") == ""


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a clone")
def test_the_commit_is_the_programs_and_not_that_of_the_folder_where_one_stands():
    assert git("rev-parse", "--show-toplevel") == str(ROOT)
