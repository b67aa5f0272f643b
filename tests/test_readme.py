"""Every command of the README, OPERATIONS.md and the recipes is run here, made short, or has a reason why it isn't."""

import dataclasses
import importlib
import io
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import contamination
import fineweb
import hellaswag
import plumbing.run.compare
import pytest
import sample
import smoltalk
import tokenizer
import torch
import train_gpt2
from bench import __main__ as bench
from torch.distributed.run import get_args_parser, parse_args

from corpora import write, write_texts
from edits import edits_of, write_trainer
from harness import ROOT, examples_file, flags, forked_torchrun, make_shards, read_log, refusal_of, run, status_of

README = (ROOT / "README.md").read_text(encoding="utf-8")
OPERATIONS = (ROOT / "OPERATIONS.md").read_text(encoding="utf-8")
RECIPES = (ROOT / "records" / "README.md").read_text(encoding="utf-8").partition("## Recipes\n")[2]
TEXT = README + OPERATIONS + RECIPES

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
SMALL = [*SHORT, *LENGTH, *flags(n_layer=1, n_head=2, n_embd=32, compile=False)]
MY_TEXTS = [*SMALL, "--data", "my_texts"]
NARROW = [*SHORT, "--n-embd", "32"]
DOCS = [*NARROW, "--data", "docs"]
SAMPLED = ["--sample-every", "2"]
EVALUATED = flags(
    data="my_texts", sequence_length=64, val_tokens=256, hellaswag_every=0, sample_every=0, device="cpu"
)
FEW = ["--max-new-tokens", "8", "--device", "cpu"]
BYTES = ["--tokenizer", "bytes"]  # GPT-2's tables come from the hub
FOUR_STEPS = ["--max-steps", "4"]
FIRST = ["--branch-from", "log/constant/model_00002.pt", *FOUR_STEPS]
EXAMPLES = ["--data", "hellaswag.jsonl", "--device", "cpu"]

# of each reader, in the order of the README: the beginning of a command, and what is added to it here. A journey is
# made in a folder of its own
JOURNEYS = {
    "a student": {
        "python fineweb.py --input tinyshakespeare.txt": [],
        "python train_gpt2.py --preset quickstart --data shakespeare": [*NARROW, *SAMPLED],
        'python sample.py "ROMEO:" -m log/shakespeare --temperature 0.8': FEW,
        "python train_gpt2.py --preset quickstart": [*DOCS, *SAMPLED],
        'python sample.py "The" -m log/quickstart --temperature 0.7': FEW,
        "python smoltalk.py --input chats.jsonl": [],
        "python train_gpt2.py --preset quickstart --init-from log/quickstart": SHORT,
        "python sample.py --chat -m log/chats": FEW,
    },
    "a researcher": {
        "python train_gpt2.py --preset quickstart": DOCS,
        "python train_gpt2.py --preset quickstart --max-steps 200": DOCS,
        "python train_relu2.py --preset quickstart --max-steps 200": DOCS,
        'python sample.py "The" -m log/relu2-1 --code train_relu2.py': FEW,
        'python fineweb.py --input "*.py"': [],
        "python train_gpt2.py --preset quickstart --data python_docs code": NARROW,
        "python train_gpt2.py --branch-from log/mixture": FOUR_STEPS,
        "python train_ema.py --preset quickstart": DOCS,
        "average.pt": [],
        'python sample.py "The" -m average.pt --code train_ema.py': FEW,
        "python train_student.py --preset quickstart --n-layer 2": DOCS,
    },
    "an operator": {
        'python fineweb.py --input "texts/*.parquet" --out-dir my_texts': BYTES,
        "python train_gpt2.py --data my_texts --out-dir log/texts": [*SMALL, "--passes", "0"],
        "python train_gpt2.py": MY_TEXTS,
        'python sample.py "Hello, I\'m a language model," -m log -n 4': FEW,
        "python hellaswag.py -m log": EXAMPLES,
        "python sample.py -m log --export my_gpt2": [],
        "python train_gpt2.py --init-from log --max-steps 0": EVALUATED,
        "GPT.from_pretrained": [],
        "python train_gpt2.py --out-dir log": [],
        "python train_gpt2.py --branch-from log --out-dir log/longer": FOUR_STEPS,
        "python train_gpt2.py --out-dir log/constant": MY_TEXTS,
        "python train_gpt2.py --branch-from log/constant/model_10000.pt --out-dir log/decayed": FIRST,
        "python train_gpt2.py --batch-ramp 300000000": [*SMALL, "--total-batch-size", "32768", "--dry-run"],
        "python train_gpt2.py --sequence-length 2048": [*MY_TEXTS, "--dry-run"],
    },
}
TORCHRUN = "torchrun --standalone --nproc-per-node="
TEXTS = [*MY_TEXTS, "--checkpoint-every", "1"]
JOURNEYS["an operator of a cluster"] = {
    "python train_gpt2.py --preset gpt2-xl --shard --dry-run --gpus 16": flags(n_layer=2, n_head=2, n_embd=32),
    TORCHRUN + "8 train_gpt2.py --preset gpt2-xl --shard": TEXTS,
    TORCHRUN + "8 --max-restarts=2 --log-dir=ranks --tee=3 train_gpt2.py": TEXTS,
    "torchrun --nnodes=2": TEXTS,
}
JOURNEYS["the same after a kill"] = {
    TORCHRUN + "4 train_gpt2.py --out-dir log": [],
    TORCHRUN + "7 train_gpt2.py --branch-from log": [*FOUR_STEPS, "--total-batch-size", "512"],
}
JOURNEYS["the same on another machine"] = {"python train_gpt2.py --out-dir moved/log": []}
NOT_RUN = {
    "python3 -m venv .venv": "installs a Python",
    "pip install": "needs a package index; .ci/run does it for the requirements",
    "python -m pytest": "is what runs this test",
    TORCHRUN + "8 train_gpt2.py": "is run as on two nodes",
    "python -m plumbing.run.compare": "is no program of the top level; test_compare.py runs it",
    "transformers serve log/chats/hf": "is a server, whose packages are not among the requirements",
    "jupyter lab play.ipynb": "is a server; test_notebook.py runs the notebook",
    "python records/2026-11-28-first-chat/make_chats.py": "writes a file that is written shorter here",
    "curl -o tinyshakespeare.txt": "needs a network",
    "python train_gpt2.py --init-from gpt2": "needs OpenAI's weights",
    "python train_gpt2.py --init-from log --data my_texts_4k": "needs another tokenizer: test_changed_models.py",
    "python smoltalk.py": "needs the hub",
    "python train_gpt2.py --preset chat --init-from log": "is the chat above with a larger model",
    "python fineweb.py": "needs the hub",
}
PROGRAMS = tuple(f"{name} " for name in "python python3 pip torchrun transformers jupyter curl".split())
LISTED = set().union(*JOURNEYS.values())


def commands():
    """The commands of the text, in fences of bash and in code spans; `a && b` and `a; b` are two."""
    found = []
    for fence in re.findall(r"```bash\n(.*?)```", re.sub("  +# .*", "", TEXT), re.DOTALL):
        found += re.sub(r" \\\n +", " ", fence).splitlines()
    prose = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
    found += [span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", prose)]
    parts = []
    for text in found:
        parts += [part.strip() for part in re.split(" && |; ", text.replace("$seed", "1"))]
    return [part for part in dict.fromkeys(parts) if part.startswith(PROGRAMS)]


@pytest.mark.gpt2
def test_the_evaluation_of_ones_own_counts_the_targets_alone(changed, data, out):
    """Of the 32 windows of a validation, in file order, by the model of the last step."""
    make_shards(data, masks=True)
    [code] = re.findall(r"^```python\n(    if is_due_now.*?)```", RECIPES, re.DOTALL | re.MULTILINE)
    comment = "    # add your own evaluation here"
    changed({comment: code + comment}).train(shuffle=False, ranks=2, shard=True)
    model, _ = train_gpt2.load_model(out)
    x, y = train_gpt2.DataLoaderLite(str(data), "val", 32, 16).next_batch()
    hits = model(x)[0].argmax(-1) == y
    expected = hits.sum() / (y != train_gpt2.IGNORE_INDEX).sum()
    assert float(read_log(out, "accuracy")[12]) == pytest.approx(expected.item(), abs=1e-4)


def entry(command):
    """The longest beginning of a command that is listed."""
    known = [name for name in LISTED | {*NOT_RUN} if command.startswith(name)]
    return max(known, key=len, default=command)


def test_every_command_is_run_or_has_a_reason():
    listed = {name for name in LISTED | {*NOT_RUN} if name.startswith(PROGRAMS)}
    assert {entry(command) for command in commands()} == listed


def make_inputs():
    """The files that the reader is supposed to have, and the copies of train_gpt2.py that the text's diffs make."""
    for name, diff in re.findall(r"(?ms)^--- train_gpt2.py\n\+\+\+ (\w+.py)\n(.*?)^(?=---|```)", TEXT):
        write_trainer(Path(name), edits_of(diff))
    text = 80 * "ROMEO:\nWhat light through yonder window breaks?\nIt is the east, and Juliet is the sun.\n\n"
    write("tinyshakespeare.txt", text)
    for name in ("texts", "tests", "plumbing/data"):
        os.makedirs(name)
    for name in ("tests/a.py", "plumbing/data/b.py"):
        write(name, text)
    write_texts("texts/a.parquet", [text[i::7] for i in range(7)])
    # quickstart would make the whole of Python's documentation into shards, and reading a part of it takes as long
    write("docs.txt", 6 * text)
    for name in ("docs", "python_docs"):
        assert status_of(fineweb.main, ["--input", "docs.txt", *BYTES, "--out-dir", name]) == 0
    examples_file(Path(), ["A man"])
    (conversation,) = re.findall(r"```json\n(.*\n)```", README)
    write("chats.jsonl", conversation * 200)


def shape_of(line):
    """A line of the console without its numbers and their units, and of a sample without its text."""
    head, _, _ = line.partition("sample | ")
    return " ".join(re.sub(r"\d[\d,.:e-]*(K| m?s)?\b", "#", head).split())


def torchrun(command, added):
    """What torchrun does with a command of the text, but with two processes on this machine."""
    words = parse_args(command[1:]).training_script_args
    forked_torchrun(train_gpt2.main, [*words, *added])


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """A function that makes a journey, command by command, and returns all that was printed."""

    def run_command(command, added):
        if command.startswith("torchrun"):
            [said] = run(torchrun, shlex.split(command), added)
            return said
        _, program, *args = shlex.split(command)
        monkeypatch.setattr(sys, "argv", [program])
        monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n/quit\n"))
        main = importlib.import_module(program.removesuffix(".py")).main
        status, said, errors = refusal_of(main, *args, *added)
        assert status == 0 and said, f"{command}\n{said}{errors}"
        return said

    def travel(journey):
        whole = {entry(command): command for command in commands()}
        printed = ""
        for name, added in JOURNEYS[journey].items():
            if name in whole:
                printed += run_command(whole[name], added)
            else:  # a part of a block of Python
                [block] = [block for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if name in block]
                exec(block.replace("model_00400", "model_00002"), {})
        return printed

    monkeypatch.syspath_prepend(tmp_path)
    make_inputs()
    return travel


@pytest.mark.gpt2
def test_a_students_commands_print_what_the_readme_shows(reader):
    printed = reader("a student")
    assert os.path.exists("log/chats/hf")
    shown = re.findall(r"^step .*$", README, re.MULTILINE)
    assert shown
    assert set(map(shape_of, shown)) <= set(map(shape_of, printed.splitlines()))


@pytest.mark.gpt2
def test_a_researchers_commands_run(reader):
    reader("a researcher")
    assert 2 in read_log("log/ema", "val_ema")
    state = torch.load("log/student/model_00002.pt", weights_only=True)
    assert "transformer.h.3.ln_1.weight" in state["own"]["teacher"]
    assert "transformer.h.2.ln_1.weight" not in state["model"]


@pytest.mark.gpt2
def test_an_operators_commands_run(reader):
    reader("an operator")
    assert os.path.exists("my_gpt2/model.safetensors")


@pytest.mark.gpt2
def test_an_operators_commands_run_on_a_cluster(reader):
    """With GPUs that are two processes on a CPU."""
    fineweb_command = ["--input", "docs.txt", *BYTES, "--out-dir", "my_texts"]
    assert status_of(fineweb.main, fineweb_command) == 0
    reader("an operator of a cluster")
    os.unlink("log/model_00002.pt")
    shutil.copytree("log", "moved/log")
    said = reader("the same after a kill")
    assert ", from step 1 to 2" in said
    assert "Settings" not in said, "the command asks for them"
    shutil.move("my_texts", "moved")
    assert ", from step 1 to 2" in reader("the same on another machine")


# beside the fields' flags: pip's, torchrun's since torch 2.10, Slurm's, lm_eval's
OTHERS = """--help --no-compile --no-resume --index-url --signals-to-handle --nodes --ntasks-per-node --gpus-per-node
--cpus-per-task --time --requeue --open-mode --signal --model --model_args --tasks --batch_size"""


def test_every_flag_that_the_readme_names_is_one_of_a_program():
    """A flag that was renamed does not live on in the README."""
    programs = (bench, contamination, fineweb, hellaswag, sample, smoltalk, tokenizer, plumbing.run.compare)
    known = {*OTHERS.split(), *re.findall("--[a-z-]+", get_args_parser().format_help())}
    for options in [train_gpt2.TrainConfig, *(program.Options for program in programs)]:
        known |= {"--" + field.name.replace("_", "-") for field in dataclasses.fields(options)}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z_-]+", TEXT))
    assert named - known == set()


LECTURE = """
torch.autocast( flash F.scaled_dot_product_attention F.cross_entropy( clip_grad_norm_( torch.compile( DDP(
torch.manual_seed RANK torchrun MFU no_sync( 50,304 TF32
"""


@pytest.mark.gpt2
def test_the_lectures_words_and_the_places_that_the_readme_names_for_them_are_in_the_trainer():
    source = (ROOT / "train_gpt2.py").read_text(encoding="utf-8")
    table = README.partition("| in the lecture |")[2].partition("\n\n")[0]
    places = " ".join(row.split(" | ")[1] for row in table.splitlines()[2:] if "](" not in row)
    names = re.findall(r"`[\w.]*?(\w+)`", places)
    comments = re.findall(r'the comment "(.*?)"', " ".join(README.split()))
    assert len(names) > 20 and comments
    assert [name for name in names if not re.search(rf"\b{name}\b", source)] == []
    words = [*LECTURE.split(), *(f"# {comment}" for comment in comments)]
    assert [word for word in words if word not in source] == []
