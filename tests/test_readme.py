"""Every command of the README and its recipes is run here, made short, or listed with the reason why it can't be."""

import dataclasses
import importlib
import io
import re
import shlex
import sys

import contamination
import fineweb
import hellaswag
import pytest
import sample
import smoltalk
import tokenizer
import torch
import train_gpt2
from bench import __main__ as bench

from corpora import write_parquet
from harness import ROOT, examples_file, flags, status_of

README = (ROOT / "README.md").read_text(encoding="utf-8")
RECORDS = (ROOT / "records" / "README.md").read_text(encoding="utf-8")
RECIPES = RECORDS.partition("## Recipes\n")[2].partition("**Slurm")[0]
README += RECIPES

# flags that make a command a matter of a second: a later flag overrides an earlier one, but for a list
FAST = dict(max_steps=2, warmup_steps=1, batch_size=4, total_batch_size=256, val_tokens=256, hellaswag_every=0)
SHORT = flags(**FAST, sample_every=0, device="cpu")
LENGTH = flags(sequence_length=64, block_size=64)
SMALL = [*SHORT, *LENGTH, *flags(n_layer=1, n_head=2, n_embd=32, compile=False)]
TINY = [*SMALL, "--data", "my_texts"]
FEW = ["--max-new-tokens", "8", "--device", "cpu"]
BYTES = ["--tokenizer", "bytes"]  # GPT-2's tables come from the hub
DECAYED = "--branch-from log/constant/model_10000.pt --out-dir log/decayed --decay-fraction 0.2 --max-steps 12500"
FIRST = ["--branch-from", "log/constant/model_00002.pt", "--max-steps", "4"]

# the beginning of a command: what is added to it here. They run in this order, in one folder
RUN = {
    "python train_gpt2.py --preset quickstart": [*SHORT, "--data", "docs"],
    'python sample.py "The " -m log/quickstart --temperature 0.7': FEW,
    "python train_gpt2.py --preset quickstart --max-steps 200": [*SHORT, "--data", "docs"],
    "python train_relu2.py --preset quickstart --max-steps 200": [*SHORT, "--data", "docs"],
    'python sample.py "The " -m log/relu2-1 --code train_relu2.py': FEW,
    "python fineweb.py --input tinyshakespeare.txt": [],
    "python train_gpt2.py --preset quickstart --data shakespeare": [*SHORT, "--sample-every", "2"],
    'python sample.py "ROMEO:" -m log/shakespeare --temperature 0.8': FEW,
    'python fineweb.py --input "*.py"': [],
    "python train_gpt2.py --preset quickstart --data python_docs code": SHORT,
    "python train_gpt2.py --branch-from log/mixture": ["--max-steps", "4"],
    'python fineweb.py --input "texts/*.parquet" --out-dir my_texts': BYTES,
    "python train_gpt2.py --data my_texts --out-dir log/texts": [*SMALL, "--passes", "0"],
    "python smoltalk.py --input chats.jsonl": [],
    "python train_gpt2.py --preset quickstart --init-from log/quickstart": SHORT,
    "python sample.py --chat -m log/chats": FEW,
    "python train_gpt2.py": TINY,
    'python sample.py "Hello, I\'m a language model," -m log -n 4': FEW,
    "python hellaswag.py -m log": ["--data", "hellaswag.jsonl", "--device", "cpu"],
    "python sample.py -m log --export my_gpt2": [],
    "python train_gpt2.py --init-from log --max-steps 0": [
        "--data",
        "my_texts",
        "--sequence-length",
        "64",
        *SHORT[2:],
    ],
    "python train_gpt2.py --branch-from log --out-dir log/longer": ["--max-steps", "4"],
    "python train_gpt2.py --batch-ramp 300000000": [*SMALL, *flags(data="docs", total_batch_size=32768), "--dry-run"],
    "python train_gpt2.py --sequence-length 2048": [*TINY, "--dry-run"],
    "python train_gpt2.py --out-dir log/constant": TINY,
    "python train_gpt2.py " + DECAYED: FIRST,
}
NOT_RUN = {
    "python3 -m venv .venv": "installs a Python",
    "pip install": "needs a package index; .ci/run does it for the requirements",
    "python -m pytest": "is what runs this test",
    "python -m plumbing.run.compare": "is no program of the top level; test_compare.py runs it",
    "transformers serve log/chats/hf": "is a server, whose packages are not among the requirements",
    "jupyter lab play.ipynb": "is a server; test_notebook.py runs the notebook",
    "python records/2026-11-22-first-chat/make_chats.py": "writes a file that is written shorter here",
    "curl -o tinyshakespeare.txt": "needs a network",
    "python train_gpt2.py --init-from gpt2": "needs OpenAI's weights",
    "python train_gpt2.py --init-from log --data my_texts_4k": "needs another tokenizer: test_changed_models.py",
    "python smoltalk.py": "needs the hub",
    "python train_gpt2.py --preset chat --init-from log": "is the chat above with a larger model",
    "python fineweb.py": "needs the hub",
    "torchrun --": "needs several GPUs; test_ranks.py starts some on a CPU",
}
PROGRAMS = tuple(f"{name} " for name in "python python3 pip torchrun transformers jupyter curl".split())


def commands():
    """The commands of the README, in fences of bash and PowerShell and in code spans; `a && b` and `a; b` are two."""
    fences = re.findall(r"```(?:bash|powershell)\n(.*?)```", README, re.DOTALL)
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    found = [line for fence in fences for line in re.sub(r" \\\n +", " ", fence).splitlines()]
    found += [span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", prose)]
    parts = [part.strip().replace("$seed", "1") for text in found for part in re.split(" && |; ", text)]
    return [part for part in dict.fromkeys(parts) if part.startswith(PROGRAMS)]


def entry(command):
    """The longest beginning of a command that is listed in RUN or NOT_RUN."""
    return max((known for known in [*RUN, *NOT_RUN] if command.startswith(known)), key=len, default=command)


def test_every_command_is_run_or_has_a_reason():
    assert {entry(command) for command in commands()} == {*RUN, *NOT_RUN}


def changed_trainers():
    """{name: source} of the copies of train_gpt2.py that the README's diffs make."""
    changed = {}
    changes = r"^--- train_gpt2.py\n\+\+\+ (\w+).py\n(.*?)^(?=---|```)"
    for name, diff in re.findall(changes, README, re.DOTALL | re.MULTILINE):
        source = (ROOT / "train_gpt2.py").read_text(encoding="utf-8")
        for hunk in re.split(r"^@@ .* @@\n", diff, flags=re.MULTILINE)[1:]:
            before, after = ("".join(re.findall(rf"^[ {sign}](.*\n)", hunk, re.MULTILINE)) for sign in "-+")
            assert source.count(before) == 1, before
            source = source.replace(before, after)
        changed[name] = source
    return changed


def make_inputs(folder):
    """The files that the README's reader is supposed to have."""
    for name, source in changed_trainers().items():
        (folder / f"{name}.py").write_text(source, encoding="utf-8")
    text = 80 * (
        "ROMEO:\nBut soft, what light through yonder window breaks?\nIt is the east, and Juliet is the sun.\n\n"
    )
    (folder / "tinyshakespeare.txt").write_text(text, encoding="utf-8")
    for name in ("texts", "tests", "plumbing/data"):
        (folder / name).mkdir(parents=True)
    for name in ("tests/a.py", "plumbing/data/b.py"):
        (folder / name).write_text(text, encoding="utf-8")
    write_parquet(folder / "texts" / "a.parquet", [text[i::7] for i in range(7)])
    # quickstart would make the whole of Python's documentation into shards, and reading a part of it takes as long
    (folder / "docs.txt").write_text(5 * text, encoding="utf-8")
    for name in ("docs", "python_docs"):
        assert status_of(fineweb.main, ["--input", "docs.txt", *BYTES, "--out-dir", name]) == 0
    examples_file(folder, ["A man"])
    (conversation,) = re.findall(r"```json\n(.*\n)```", README)
    (folder / "chats.jsonl").write_text(conversation * 200, encoding="utf-8")


def shape_of(line):
    """A line of the console without its numbers, and of a sample without its text."""
    return " ".join(re.sub(r"\d[\d,.:e-]*", "#", line.split("sample | ")[0]).split())


@pytest.mark.gpt2
def test_the_commands_run_and_print_what_the_readme_shows(tmp_path, monkeypatch, capsys):
    """One after the other in one folder, as a reader would; each ends with status 0."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    make_inputs(tmp_path)
    whole, printed = {entry(command): command for command in commands()}, ""
    for start, added in RUN.items():
        _, program, *args = shlex.split(whole[start])
        monkeypatch.setattr(sys, "argv", [program, *args, *added])
        monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n/quit\n"))
        capsys.readouterr()
        status = status_of(importlib.import_module(program.removesuffix(".py")).main)
        output = capsys.readouterr()
        assert status == 0 and output.out, f"{start}\n{output.out}{output.err}"
        printed += output.out
    names = {"torch": torch}
    # that of the recipes needs a trainer that averages its weights
    for program in re.findall(r"```python\n(.*?)```", README.removesuffix(RECIPES), re.DOTALL):
        exec(program, names)
    exec("assert model(torch.tensor([[1, 2]]))[0].shape[:2] == (1, 2)", names)
    assert (tmp_path / "my_gpt2" / "model.safetensors").exists() and (tmp_path / "log" / "chats" / "hf").exists()
    shown = re.findall(r"^step .*$", README, re.MULTILINE)
    assert shown and set(map(shape_of, shown)) <= set(map(shape_of, printed.splitlines()))


def test_every_flag_that_the_readme_names_is_one_of_a_program():
    """A flag that was renamed does not live on in the README."""
    programs = (bench, contamination, fineweb, hellaswag, sample, smoltalk, tokenizer)
    options = [train_gpt2.TrainConfig, *(program.Options for program in programs)]
    known = {"--" + field.name.replace("_", "-") for config in options for field in dataclasses.fields(config)}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z_-]+", README))
    torchrun = "--standalone --nnodes --nproc-per-node --rdzv-backend --rdzv-endpoint".split()
    lm_eval = "--model --model_args --tasks --batch_size".split()
    assert named - known - {*torchrun, *lm_eval, "--index-url", "--help"} == set()


@pytest.mark.gpt2
def test_what_the_readme_says_of_the_code_is_in_it():
    """The lecture's words and the places that it names for them, and two changes that can be made as they stand."""
    source = (ROOT / "train_gpt2.py").read_text(encoding="utf-8")
    table = README.partition("| | in |")[2].partition("\n\n")[0]
    names = [name.rpartition(".")[2] for name in re.findall(r"`([\w.]+)`", table)]
    assert len(names) > 20 and [name for name in names if not re.search(rf"\b{name}\b", source)] == []
    words = (
        "torch.autocast( flash F.scaled_dot_product_attention F.cross_entropy( clip_grad_norm_( torch.compile( DDP("
    )
    words += " torch.manual_seed RANK torchrun MFU no_sync( 50,304 TF32"
    assert [word for word in words.split() if word not in source] == []
    assert [*changed_trainers()] == ["train_relu2", "train_rotary"]
