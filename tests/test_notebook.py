"""The notebooks: they run from top to bottom without a run and without a network, and redefine nothing."""

import ast
import base64
import io
import json
import re
import runpy
import subprocess
import sys
import tempfile

import matplotlib.pyplot as plt
import nbformat
import pytest
import torch
import train_gpt2
from nbclient import NotebookClient
from PIL import Image

from harness import ROOT, SCRIPTS, run, train

MODULES = [*(ROOT / name for name in SCRIPTS), *ROOT.glob("plumbing/**/*.py")]


def read_notebook(name):
    return nbformat.read(ROOT / name, 4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def execute(notebook, folder):
    """Run a notebook in a kernel, in `folder`, and leave nothing in it that another run would change."""
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", record_timing=False, resources=resources)
    client.execute()  # raises a cell's error
    for cell in code_cells(notebook):
        cell.execution_count = None
        texts = "".join(output.text for output in cell.outputs if output.output_type == "stream")
        assert not [output for output in cell.outputs if output.get("name") == "stderr"], "a warning is an error here"
        # what was printed in one output before the pictures, however the kernel has cut it
        pictures = [output for output in cell.outputs if output.output_type != "stream"]
        cell.outputs = [nbformat.v4.new_output("stream", text=texts)] * bool(texts) + pictures
    return [output for cell in code_cells(notebook) for output in cell.outputs]


@pytest.fixture
def run_cells(tmp_path, monkeypatch):
    """A function that runs a notebook's cells in this process, in tmp_path, and returns their names."""

    def execute(name="play.ipynb", runs=()):
        names = {}
        for cell in code_cells(read_notebook(name)):
            exec(cell.source.replace("RUNS = []", f"RUNS = {list(runs)}"), names)
        return names

    plt.switch_backend("Agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plt, "show", lambda: None)  # the figures stay open, for a look at them
    with plt.rc_context():
        yield execute
    plt.close("all")


def run_script(*args):
    sys.argv = list(args)
    runpy.run_path(args[0], run_name="__main__")


@pytest.mark.gpt2
@pytest.mark.filterwarnings(*(f"error::{kind}Warning" for kind in ("User", "Runtime", "Future", "Syntax")))
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # matplotlib's own, of numpy
@pytest.mark.usefixtures("run_cells")
def test_the_lessons_run_through_without_a_run_a_network_or_a_gpu(tmp_path, monkeypatch, capfd):
    for name in ("http_proxy", "https_proxy", "HF_ENDPOINT"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody answers
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pictures = []

    def show():
        plt.gcf().set_layout_engine("none")  # which would draw it twice
        plt.gcf().canvas.draw()
        pictures.extend(plt.get_fignums())
        plt.close("all")

    def run_forked(command, **options):
        run(run_script, *command[1:])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(plt, "show", show)
    monkeypatch.setattr(subprocess, "run", run_forked)  # it imports torch in no time
    cells, names = code_cells(read_notebook("lessons.ipynb")), {}
    for cell in cells:
        exec(cell.source, names)
    assert len(pictures) >= sum("plt.show()" in cell.source for cell in cells) > 0
    assert not capfd.readouterr().err
    for checkpointing in (False, True):
        check_memory_estimate(names["memory_parts"], checkpointing)


def check_memory_estimate(memory_parts, checkpointing):
    """Weights and gradients are those of the model; in the blocks, what autograd holds of as many elements as tokens.

    16 per channel and token of a block, where a CPU, whose attention is in float32, has one more; with checkpointing,
    a block's input, and while the backward pass is in it, all of that one.
    """
    config = train_gpt2.TrainConfig(n_layer=8, n_head=4, n_embd=64, block_size=128, sequence_length=80)
    parts = memory_parts(config, 2, checkpointing)
    model = train_gpt2.GPT(train_gpt2.GPTConfig(128, 50304, n_layer=8, n_head=4, n_embd=64))
    model.activation_checkpointing = checkpointing
    assert parts["weights"] == parts["gradients"] == 4 * sum(p.numel() for p in model.parameters())
    assert parts["optimizer"] == 2 * parts["weights"]
    assert parts["logits"] == 2 * (2 * 80 * 50304) * 2  # bytes of bfloat16, twice

    kept = {}
    keep = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t)
    with keep, torch.autocast("cpu", torch.bfloat16):
        model.hidden_states(torch.zeros(2, 80, dtype=torch.long))
    weights = {p.shape for p in model.parameters()} | {p.T.shape for p in model.parameters() if p.dim() == 2}
    elements = sum(t.numel() for t in kept.values() if t.shape not in weights and t.numel() >= 2 * 80 * 64)
    elements += 16 * 2 * 80 * 64 if checkpointing else 0
    assert parts["blocks"] == pytest.approx(2 * elements, rel=0.1)


def titles():
    return [ax.get_title(loc="left") for number in plt.get_fignums() for ax in plt.figure(number).axes]


def recorded():
    """Of each picture, whether its title says that the runs are recorded ones."""
    return [plt.figure(number).get_suptitle().startswith("Recorded: records/") for number in plt.get_fignums()]


@pytest.mark.gpt2
def test_the_dashboard_shows_a_run_that_is_in_progress_and_without_one_it_looks_at_records(
    data, tmp_path, run_cells, capsys
):
    """A torn last line is left alone."""
    run_cells()
    text = capsys.readouterr().out
    assert text.startswith("quickstart: 400 of 400 steps, 819,200 tokens") and "No HellaSwag scores here" in text
    assert "95% interval" in text and "decay-from-400 leaves constant at step 400" in text
    assert titles()[0] == "Loss" and "Last loss: seeds, and mean" in titles() and all(recorded())
    plt.close("all")
    train(data, tmp_path / "log" / "newest", max_steps=8)
    with open(tmp_path / "log" / "newest" / "log.txt", "a", encoding="utf-8") as file:
        file.write("9 train 7777\n9 val 3.5\n9 wte 2.5\n10 val 99")
    run_cells()
    expected = "newest: 9 of 8 steps, 1,152 tokens\n    val     3.5000 at step 9"
    assert capsys.readouterr().out.startswith(expected)
    assert recorded() == [False, False, True, True, True, True], "the run's own pictures are the first two"


def test_of_a_gpu_whose_peak_is_known_the_share_that_a_run_used_is_printed(data, tmp_path, run_cells, capsys):
    train(data, tmp_path / "log" / "a", max_steps=2)
    run_txt = tmp_path / "log" / "a" / "run.txt"
    on_gpu = re.sub("no GPU", "NVIDIA H100 80GB HBM3", run_txt.read_text(encoding="utf-8"))
    run_txt.write_text(on_gpu, encoding="utf-8")
    run_cells()
    assert re.search(r"^a: \d+% of the GPUs' peak \(MFU\)$", capsys.readouterr().out, re.MULTILINE)


def labels(number=-1):
    """Those of a picture's lines."""
    legend = plt.figure(plt.get_fignums()[number]).axes[0].get_legend()
    return [text.get_text() for text in legend.get_texts()]


def test_logs_of_peers_are_drawn_by_steps_with_the_loss_that_they_are_to_beat(tmp_path, run_cells, capsys):
    """They have no run.txt: only what the log says is told. At its end, build-nanogpt's has diverged."""
    folder = tmp_path / "log"
    folder.mkdir()
    lines = [f"{step} train {11 - step / 100:.6f}\n" for step in range(300)]
    lines += [f"{step} val {11 - step / 100:.4f}\n{step} hella 0.2{step:03d}\n" for step in (0, 250)]
    lines += ["299 train nan\n299 val inf\n299 norm nan\n300 tra"]
    (folder / "log.txt").write_text("".join(lines), encoding="utf-8")
    names = run_cells(runs=["log"])
    text = capsys.readouterr().out
    assert text.startswith("log: 299 steps; it has no run.txt\n") and "hella   0.2250 at step 250" in text
    assert plt.figure(1).axes[0].get_xlabel() == "step" and "HellaSwag" in titles()
    assert "OpenAI's GPT-2 124M, 3.292" in labels(0)
    assert 3.2924 in [line.get_ydata()[0] for line in plt.figure(1).axes[0].lines]
    printed = "step 0: train loss 4.2, val loss 4.2\niter 0: loss 4.2, time 9.9ms, mfu 1.00%\n"
    (tmp_path / "nanogpt.txt").write_text(printed, encoding="utf-8")
    names["plot_loss"](names["logs"].find_runs("nanogpt.txt"))
    assert labels() == ["nanogpt.txt, validation 4.200"], "of characters, perhaps"


def write_run(folder, losses, config, branched=None, streams=("train", "val")):
    """A run's folder with a log of these values at steps 0, 1, ... and a run.txt."""
    folder.mkdir(parents=True)
    log = "".join(f"{step} {stream} {loss}\n" for step, loss in enumerate(losses) for stream in streams)
    (folder / "log.txt").write_text(log, encoding="utf-8")
    usual = dict(seed=1, data="texts", val_tokens=64, max_steps=2, batch_ramp=0, vocab_size=50304)
    config = usual | {"total_batch_size": 64} | config
    text = f"config: {json.dumps(config)}\n" + (f"branched: {json.dumps(branched)}\n" if branched else "")
    (folder / "run.txt").write_text(text, encoding="utf-8")


def test_openais_loss_is_that_of_its_own_text_and_tokens(tmp_path, run_cells):
    names = run_cells()
    configs = {
        "edu": {"data": ["edu_fineweb10B"]},
        "other": {"data": "texts"},
        "bytes": {"data": ["edu_fineweb10B"], "vocab_size": 320},
    }
    for name, config in configs.items():
        write_run(tmp_path / name, [11, 7, 5], config)
        names["plot_loss"]([names["logs"].read_run(tmp_path / name)])
        assert ("OpenAI's GPT-2 124M, 3.292" in labels()) == name.startswith("edu")


def test_a_run_is_drawn_with_its_branches_from_where_they_leave_it(tmp_path, run_cells, capsys):
    """By steps: how many tokens a branch has seen is not known, as its parent may have had other steps."""
    write_run(tmp_path / "log" / "a", [6.0, 5.0, 4.0, 3.5, 3.25], {})
    for name, step, last in (("b", 3, 3.4), ("c", 2, 3.0)):
        branched = {"parent": "log/a", "step": step, "changed": {"total_batch_size": [64, 8]}}
        write_run(tmp_path / "log" / name, [6.0, 5.0, 4.0, last], {"total_batch_size": 8}, branched)
    for first in ("a", "b"):
        plt.close("all")
        run_cells(runs=[f"log/{first}"])
        text = capsys.readouterr().out
        assert text.startswith("a: 4 of 2 steps, 256 tokens\n" if first == "a" else "b: 3 of 2 steps\n")
        assert "c leaves a at step 2: total_batch_size 64 -> 8\nb leaves a at step 3" in text
        lines = plt.figure(plt.get_fignums()[-2]).axes[0].lines
        diamonds = [line.get_xydata()[0].tolist() for line in lines if line.get_marker() == "D"]
        assert diamonds == [[2, 4.0], [3, 3.4]] and lines[1].get_xdata().tolist() == [2, 3]


def test_runs_in_groups_are_drawn_as_ideas_and_as_a_sweep(tmp_path, run_cells, capsys):
    """The mean with a band from the lowest to the highest, the differences seed by seed; and streams of one's own."""
    for rate, runs in ((0.5, [[8, 6, 4], [8, 4, 2]]), (1.0, [[8, 7, 6], [8, 7, 5]]), (2.0, [[9, 9, 9], [9, 9, 9]])):
        for seed, losses in enumerate(runs):
            config = {"seed": seed, "max_lr": rate}
            write_run(tmp_path / "log" / f"lr-{rate}-{seed}", losses, config, streams=("train", "val", "own"))
    run_cells(runs=[f"log/lr-{rate}-*" for rate in (0.5, 1.0, 2.0)])
    assert recorded() == [False, False, False, False, True, True] and "own" in titles()
    ideas, sweep = (plt.figure(number).axes for number in (3, 4))
    band = ideas[0].collections[0].get_paths()[0].get_extents()
    assert ideas[0].lines[0].get_ydata().tolist() == [8, 5, 3] and (band.y0, band.y1) == (2, 8)
    assert ideas[1].lines[1].get_xdata().tolist() == [2, 3]
    assert sweep[0].get_xlabel() == "max_lr" and sweep[0].lines[-1].get_ydata().tolist() == [3, 5.5, 9]
    assert "lr-1.0-* ends 2.5000 above lr-0.5-*" in capsys.readouterr().out


def defined(tree):
    """The names of the functions, methods and classes in a module or cell."""
    return {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


@pytest.mark.parametrize("name", ["play.ipynb", "lessons.ipynb"])
def test_they_redefine_nothing_and_are_committed_with_outputs_small_and_with_prose_before_every_step(name):
    """Nothing that another run would change: no counts and no times; no errors; under 1 MB; each step is introduced."""
    theirs = set().union(*(defined(ast.parse(script.read_text(encoding="utf-8"))) for script in MODULES))
    assert {"GPT", "get_lr", "DataLoaderLite", "peak_flops", "get_encoding", "generate"} <= theirs
    notebook = read_notebook(name)
    assert (ROOT / name).stat().st_size < 1e6
    for before, cell in zip(notebook.cells, notebook.cells[1:]):
        if cell.cell_type == "code":
            assert before.cell_type == "markdown", cell.source
            assert not defined(ast.parse(cell.source)) & theirs, cell.source
            assert cell.execution_count is None and not cell.metadata
            assert not [output for output in cell.outputs if output.output_type == "error"]
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert "image/png" in outputs[1 if name == "play.ipynb" else -1].data, "the curve follows the summary"


def with_palette(png):
    """The picture, PNG in base64, with 128 colors of its own in place of true color: a third of the size."""
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    file = io.BytesIO()
    picture.quantize(128, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


if (
    __name__ == "__main__"
):  # PYTHONPATH=. python tests/test_notebook.py [NAMES] writes both, or these, with new outputs
    for name in sys.argv[1:] or ("play.ipynb", "lessons.ipynb"):
        with tempfile.TemporaryDirectory() as folder:
            notebook = read_notebook(name)
            outputs = execute(notebook, folder)
        for data in [output.data for output in outputs if "image/png" in output.get("data", {})]:
            data["image/png"] = with_palette(data["image/png"])
        nbformat.write(notebook, ROOT / name)
