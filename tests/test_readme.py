"""Every command of the README is run here, made short, or listed with the reason why it can't be."""

import dataclasses
import importlib
import io
import json
import re
import shlex
import subprocess
import sys

from conftest import ROOT, SHARED, flags, status_of

import contamination
import fineweb
import hellaswag
import sample
import smoltalk
import tokenizer
import train_gpt2
from bench import __main__ as bench

README = (ROOT / "README.md").read_text(encoding="utf-8")
PROGRAMS = ("python", "pip", "torchrun", "transformers", "jupyter")

# flags that make a command a matter of a second: a later flag overrides an earlier one
SHORT = flags(
    max_steps=2,
    warmup_steps=1,
    batch_size=4,
    total_batch_size=256,
    val_tokens=256,
    hellaswag_every=0,
    sample_every=0,
    device="cpu",
)
LENGTH = flags(sequence_length=64, block_size=64)
TINY = [*SHORT, *LENGTH, *flags(n_layer=1, n_head=2, n_embd=32, compile=False), "--data", "texts"]
FEW = ["--max-new-tokens", "8", "--device", "cpu"]
BYTES = ["--tokenizer", "bytes"]  # GPT-2's tables come from the hub

# command: what is added to it here. They run in this order, in one folder.
RUN = {
    "python train_gpt2.py --help": [],
    "python train_gpt2.py --preset quickstart": [*SHORT, "--data", "docs"],
    "python fineweb.py --input tinyshakespeare.txt --tokenizer bytes --out-dir shakespeare": [],
    "python train_gpt2.py --preset quickstart --data shakespeare --out-dir log/shakespeare --max-steps 1000 "
    '--sample-prompt "ROMEO:"': [*SHORT, "--sample-every", "2"],
    'python sample.py "ROMEO:" -m log/shakespeare --temperature 0.8': FEW,
    "python fineweb.py --input 'texts/*.parquet' --out-dir texts": BYTES,
    "python train_gpt2.py --data texts --out-dir log/texts --total-batch-size 65536 --max-steps 5000 "
    "--warmup-steps 100 --keep-best": TINY,
    "python train_gpt2.py": TINY,
    'python sample.py "Hello, I\'m a language model," -m log -n 4': FEW,
    "python hellaswag.py -m log": ["--data", "examples.jsonl", "--device", "cpu"],
    "python sample.py -m log --export my_gpt2": [],
    "python smoltalk.py": ["--input", "chats.jsonl", "--out-dir", "smoltalk", *BYTES, "--max-length", "64"],
    "python train_gpt2.py --preset chat --init-from log": [*SHORT, *LENGTH],
    "python sample.py --chat -m log/chat": FEW,
    "python train_gpt2.py --branch-from log --out-dir log/longer --max-steps 30000": [*TINY, "--max-steps", "4"],
    "python train_gpt2.py --out-dir log/constant --schedule wsd --decay-fraction 0 --milestone-every 5000": TINY,
    "python train_gpt2.py --branch-from log/constant/model_10000.pt --out-dir log/decayed --schedule wsd "
    "--decay-fraction 0.2 --max-steps 12500": [
        *TINY,
        "--max-steps",
        "4",
        "--branch-from",
        "log/constant/model_00002.pt",
    ],
}

NOT_RUN = {
    "pip install -r requirements.txt": "needs a package index; .ci/run does it",
    "python -m pytest": "is what runs this test",
    "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cu126": "needs PyTorch's package index",
    "pip install 'transformers[serving]'": "needs a package index",
    "transformers serve log/chat/hf": "is a server, whose packages are not among the requirements",
    "pip install jupyterlab": "needs a package index",
    "jupyter lab play.ipynb": "is a server; test_notebook.py runs the notebook",
    "python train_gpt2.py --init-from gpt2 --data texts --out-dir log/tuned --batch-size 8 --total-batch-size 65536 "
    "--max-steps 200 --warmup-steps 20 --max-lr 3e-5 --min-lr 3e-6 --hellaswag-every 0": "needs OpenAI's weights",
    "python fineweb.py": "needs the hub",
    "python fineweb.py --pretokenized 99": "needs the hub",
    "torchrun --standalone --nproc-per-node=8 train_gpt2.py": "needs 8 GPUs; test_train.py starts ranks on a CPU",
    "torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 train_gpt2.py": "needs two machines",
}


def commands(readme):
    """The commands of a README: indented lines, and code spans in prose and tables; `a && b` is two."""
    plain = re.sub(r"```.*?```", "", readme, flags=re.DOTALL)
    lines = re.findall(r"^ {4}(.+)$", plain, re.MULTILINE)
    spans = re.findall(r"`([^`]+)`", "\n".join(line for line in plain.splitlines() if not line.startswith("    ")))
    found = [part.strip() for text in [*lines, *spans] for part in text.replace("\n", " ").split(" && ")]
    return [command for command in found if command.startswith(tuple(f"{program} " for program in PROGRAMS))]


def test_every_command_is_run_or_has_a_reason():
    """And none is listed that the README no longer has."""
    assert set(commands(README)) == {*RUN, *NOT_RUN}
    assert all(NOT_RUN.values()) and not set(RUN) & set(NOT_RUN)


def test_a_command_is_found_wherever_it_stands():
    """In an indented line, a table, a paragraph; not in a fenced script; `&&` joins two."""
    text = "Say `python a.py`, then:\n\n    pip install b && python c.py --x 'y z'\n\n| GPU | `torchrun d.py` |\n"
    text += "```bash\npython f.py\n```\nor `python\ng.py`\n    step 1 | python\n"
    expected = ["pip install b", "python c.py --x 'y z'", "python a.py", "torchrun d.py", "python g.py"]
    assert commands(text) == expected


def make_inputs(folder):
    """The files that the README's reader is supposed to have."""
    import pyarrow
    from pyarrow import parquet

    text = "ROMEO:\nBut soft, what light through yonder window breaks?\nIt is the east, and Juliet is the sun.\n\n" * 80
    if (SHARED / "tinyshakespeare.txt").exists():
        text = (SHARED / "tinyshakespeare.txt").read_text()[:20000]
    (folder / "tinyshakespeare.txt").write_text(text)
    (folder / "texts").mkdir()
    parquet.write_table(pyarrow.table({"text": [text[i::7] for i in range(7)]}), folder / "texts" / "a.parquet")
    # quickstart would make the whole of Python's documentation into shards
    part = ["--dataset", "python-docs", *BYTES, "--max-tokens", "20000", "--out-dir", "docs"]
    assert status_of(fineweb.main, part) == 0
    examples = [{"activity_label": "X", "ctx": "A man", "endings": ["runs.", "sits.", "flies.", "is."], "label": 1}]
    (folder / "examples.jsonl").write_text("".join(json.dumps(example) + "\n" for example in examples))
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    (folder / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 200)


def shape_of(line):
    """A line of the console without its numbers, and of a sample without its text."""
    return " ".join(re.sub(r"\d[\d,.:e-]*", "#", line.split("sample | ")[0]).split())


def test_the_commands_run(tmp_path, monkeypatch, capsys):
    """One after the other in one folder, as a reader would; each ends with status 0."""
    monkeypatch.chdir(tmp_path)
    make_inputs(tmp_path)
    printed = ""
    for command, added in RUN.items():
        _, program, *args = shlex.split(command)
        monkeypatch.setattr(sys, "argv", [program, *args, *added])
        monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n/quit\n"))
        capsys.readouterr()
        status = status_of(importlib.import_module(program.removesuffix(".py")).main)
        output = capsys.readouterr()
        assert status == 0, f"{command}\n{output.out}{output.err}"
        assert output.out, command
        printed += output.out
    assert (tmp_path / "my_gpt2" / "model.safetensors").exists()
    assert (tmp_path / "log" / "chat" / "hf").exists()
    lines = re.findall(r"^ {4}(step .*)$", README, re.MULTILINE)
    assert lines and set(map(shape_of, lines)) <= set(map(shape_of, printed.splitlines()))


def test_the_slurm_script_is_a_shell_script(tmp_path):
    scripts = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    assert len(scripts) == 1 and scripts[0].startswith("#!/bin/bash\n#SBATCH ")
    (tmp_path / "job.sh").write_text(scripts[0])
    assert subprocess.run(["bash", "-n", str(tmp_path / "job.sh")], capture_output=True).returncode == 0
    named = set(re.findall(r"--([a-z-]+)=", scripts[0].split("srun torchrun")[1]))
    from torch.distributed.run import get_args_parser

    known = {option.lstrip("-").replace("_", "-") for option in get_args_parser()._option_string_actions}
    assert named <= known


def test_every_flag_that_the_readme_names_is_one_of_a_program():
    """A flag that was renamed does not live on in the README."""
    programs = (bench, contamination, fineweb, hellaswag, sample, smoltalk, tokenizer)
    options = [train_gpt2.TrainConfig, *(program.Options for program in programs)]
    known = {"--" + field.name.replace("_", "-") for config in options for field in dataclasses.fields(config)}
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", prose))
    others = {
        "--standalone",
        "--nnodes",
        "--nproc-per-node",
        "--rdzv-backend",
        "--rdzv-endpoint",
        "--shutdown-timeout",
        "--index-url",
        "--help",
    }
    assert named - known - others == set()
