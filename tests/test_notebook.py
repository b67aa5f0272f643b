"""The notebooks: they run from top to bottom without a run and without a network, and redefine nothing."""

import base64
import io
import re
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import pytest
from nbclient import NotebookClient
from PIL import Image

from harness import ROOT, SCRIPTS, train, write_run


def read_notebook(name):
    return nbformat.read(ROOT / name, 4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


# ----- lessons.ipynb --------------------------------------------------------------------------------------


@pytest.mark.slow  # every week; test_project.py looks at the names that they take
@pytest.mark.gpt2
def test_the_lessons_run_without_a_run_a_network_or_a_gpu(tmp_path, monkeypatch):
    """From top to bottom, and print no warning."""
    for name in ("http_proxy", "https_proxy", "HF_ENDPOINT"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody answers
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    notebook = read_notebook("lessons.ipynb")
    execute(notebook, tmp_path)
    for cell in code_cells(notebook):
        pictures = ["image/png" in output.get("data", {}) for output in cell.outputs]
        assert any(pictures) or "plt.show()" not in cell.source


def test_each_lesson_has_an_exercise_and_its_answer():
    text = "\n".join(cell.source for cell in read_notebook("lessons.ipynb").cells)
    lessons, _, answers = text.partition("\n# Answers")
    _, *parts = re.split(r"^## (\d+)\. ", lessons, flags=re.MULTILINE)  # a number, then its lesson
    assert re.findall(r"^\*\*(\d+)\.\*\* ", answers, re.MULTILINE) == parts[::2]
    assert [lesson.count("**Exercise.**") for lesson in parts[1::2]] == [1] * 40


# ----- play.ipynb -----------------------------------------------------------------------------------------


@pytest.fixture
def run_cells(monkeypatch):
    """A function that runs the cells of play.ipynb in this process and returns their names."""

    def execute(runs=()):
        names = {}
        for cell in code_cells(read_notebook("play.ipynb")):
            exec(cell.source.replace("RUNS = []", f"RUNS = {list(runs)}"), names)
        return names

    plt.switch_backend("Agg")
    monkeypatch.setattr(plt, "show", lambda: None)  # the figures stay open, for a look at them
    with plt.rc_context():
        yield execute
    plt.close("all")


def figures():
    return [plt.figure(number) for number in plt.get_fignums()]


def titles():
    return [ax.get_title(loc="left") for figure in figures() for ax in figure.axes]


def recorded():
    """Of each picture, whether its title says that the runs are recorded ones."""
    return [figure.get_suptitle().startswith("Recorded: records/") for figure in figures()]


def labels(number=-1):
    """The labels of a picture's lines."""
    legend = figures()[number].axes[0].get_legend()
    return [text.get_text() for text in legend.get_texts()]


def write_losses(folder, losses, *, streams=("train", "val"), branched=None, **config):
    """A run whose streams have these values at steps 0, 1, ..."""
    log = []
    for stream in streams:
        log += [(step, stream, loss) for step, loss in enumerate(losses)]
    usual = dict(seed=1, data="texts", val_tokens=64, max_steps=2)
    usual |= dict(batch_ramp=0, vocab_size=50304, total_batch_size=64)
    fields = {"config": usual | config}
    if branched:
        fields["branched"] = branched
    write_run(Path(folder), log, **fields)


@pytest.mark.gpt2
def test_the_dashboard_shows_records_where_there_is_no_run(run_cells, output):
    run_cells()
    text = output()
    assert text.startswith("quickstart: 400 of 400 steps, 819,200 tokens")
    assert "No HellaSwag scores here" in text
    assert "95% interval" in text
    assert "decay-from-400 leaves constant at step 400" in text
    assert titles()[0] == "Loss"
    assert "Last loss: seeds, and mean" in titles()
    assert all(recorded())


@pytest.mark.gpt2
def test_the_dashboard_shows_a_run_that_is_in_progress(data, run_cells, output):
    """A torn last line is left alone. Of a GPU whose peak is known, the share that the run used is printed."""
    newest = Path("log/newest")
    train(data, newest, max_steps=2)
    with open(newest / "log.txt", "a", encoding="utf-8") as file:
        file.write("9 train 7777\n9 val 3.5\n9 wte 2.5\n10 val 99")
    run_txt = (newest / "run.txt").read_text(encoding="utf-8")
    on_gpu = re.sub(r"cores, .*", "cores, NVIDIA H100 80GB HBM3", run_txt)
    (newest / "run.txt").write_text(on_gpu, encoding="utf-8")
    run_cells()
    text = output()
    assert text.startswith("newest: 9 of 2 steps, 1,152 tokens\n    val     3.5000 at step 9")
    assert re.search(r"^newest: \d+% of the GPUs' peak \(MFU\)$", text, re.MULTILINE)
    assert recorded() == [False, False, True, True, True, True], "the run's own pictures are the first two"


def write_nanogpts_log(folder):
    """build-nanogpt's log.txt of a run that has diverged at its end, where it is torn."""
    lines = [f"{step} train {11 - step / 100:.6f}\n" for step in range(300)]
    for step in (0, 250):
        lines += [f"{step} val {11 - step / 100:.4f}\n", f"{step} hella 0.2{step:03d}\n"]
    lines.append("299 train nan\n299 val inf\n299 norm nan\n300 tra")
    folder.mkdir()
    (folder / "log.txt").write_text("".join(lines), encoding="utf-8")


def test_build_nanogpts_log_is_drawn_by_steps_with_the_loss_to_beat(run_cells, output):
    """It has no run.txt: only what the log says is told."""
    write_nanogpts_log(Path("log"))
    run_cells(runs=["log"])
    text = output()
    assert text.startswith("log: 299 steps; it has no run.txt\n")
    assert "hella   0.2250 at step 250" in text
    ax = figures()[0].axes[0]
    assert ax.get_xlabel() == "step"
    assert "HellaSwag" in titles()
    assert "OpenAI's GPT-2 124M, 3.292" in labels(0)
    assert 3.2924 in [line.get_ydata()[0] for line in ax.lines]


def test_openais_loss_is_drawn_for_its_own_text_and_tokens_only(run_cells):
    """A token of the byte tokenizer is called a byte."""
    cases = {
        "a": (["edu_fineweb10B"], 50304, "token"),
        "b": ("texts", 50304, "token"),
        "c": (["edu_fineweb10B"], 320, "byte"),
    }
    names = run_cells()
    for name, (data, vocab_size, unit) in cases.items():
        write_losses(name, [11, 7, 5], data=data, vocab_size=vocab_size)
        names["plot_loss"]([names["logs"].read_run(Path(name))])
        assert ("OpenAI's GPT-2 124M, 3.292" in labels()) == (name == "a")
        assert figures()[-1].axes[0].get_ylabel() == f"loss (nats per {unit})"


@pytest.mark.parametrize("first, head", [("a", "a: 4 of 2 steps, 256 tokens\n"), ("b", "b: 3 of 2 steps\n")])
def test_a_run_is_drawn_with_its_branches_from_where_they_leave_it(first, head, run_cells, output):
    """By steps: how many tokens a branch has seen is not known, as its parent may have had other steps."""
    write_losses("log/a", [6.0, 5.0, 4.0, 3.5, 3.25])
    changed = {"total_batch_size": [64, 8]}
    for name, step, last in [("b", 3, 3.4), ("c", 2, 3.0)]:
        branched = {"parent": "log/a", "step": step, "changed": changed}
        losses = [6.0, 5.0, 4.0, last]
        write_losses(f"log/{name}", losses, branched=branched, total_batch_size=8)
    run_cells(runs=[f"log/{first}"])
    text = output()
    assert text.startswith(head)
    assert "c leaves a at step 2: total_batch_size 64 -> 8\nb leaves a at step 3" in text
    lines = figures()[-2].axes[0].lines
    diamonds = [line for line in lines if line.get_marker() == "D"]
    assert [line.get_xydata()[0].tolist() for line in diamonds] == [[2, 4.0], [3, 3.4]]
    assert lines[1].get_xdata().tolist() == [2, 3]


# of each rate, the losses of two seeds
SWEEP = {0.5: [[8, 6, 4], [8, 4, 2]], 1.0: [[8, 7, 6], [8, 7, 5]], 2.0: [[9, 9, 9], [9, 9, 9]]}


def test_groups_are_drawn_as_ideas_and_as_a_sweep_and_compared_in_words(run_cells, output):
    """An idea is the mean with a band from the lowest to the highest, and the differences seed by seed."""
    streams = ("train", "val", "own")
    for rate, runs in SWEEP.items():
        for seed, losses in enumerate(runs):
            write_losses(f"log/lr-{rate}-{seed}", losses, streams=streams, seed=seed, max_lr=rate)
    run_cells(runs=[f"log/lr-{rate}-*" for rate in SWEEP])
    assert "lr-1.0-* ends 2.5000 above lr-0.5-*" in output()
    assert "own" in titles(), "a stream of one's own has a panel"
    left, right = figures()[2].axes
    band = left.collections[0].get_paths()[0].get_extents()
    assert left.lines[0].get_ydata().tolist() == [8, 5, 3]
    assert (band.y0, band.y1) == (2, 8)
    assert right.lines[1].get_xdata().tolist() == [2, 3]
    (sweep,) = figures()[3].axes
    assert sweep.get_xlabel() == "max_lr"
    assert sweep.lines[-1].get_ydata().tolist() == [3, 5.5, 9]


# ----- Both, as they are committed ------------------------------------------------------------------------


def defined(source):
    """The names of the functions, methods and classes in a module or cell, without those that Python or torch calls."""
    return set(re.findall(r"^ *(?:def|class) (?!__)(\w+)", source, re.MULTILINE))


both = pytest.mark.parametrize("name", ["play.ipynb", "lessons.ipynb"])


@both
def test_a_notebook_redefines_nothing(name):
    theirs = set()
    for script in [*map(ROOT.joinpath, SCRIPTS), *ROOT.glob("plumbing/**/*.py")]:
        theirs |= defined(script.read_text(encoding="utf-8"))
    assert {"GPT", "get_lr", "DataLoaderLite", "peak_flops", "get_encoding", "generate"} <= theirs
    for cell in code_cells(read_notebook(name)):
        assert not defined(cell.source) & theirs, cell.source


@both
def test_a_notebook_is_committed_with_outputs_that_another_run_would_not_change(name):
    """No counts, no times and no errors; under 1 MB."""
    notebook = read_notebook(name)
    pictures = 0
    for cell in code_cells(notebook):
        assert cell.execution_count is None
        assert not cell.metadata
        for output in cell.outputs:
            assert output.output_type != "error"
            pictures += "image/png" in output.get("data", {})
    assert pictures >= sum("plt.show()" in cell.source for cell in code_cells(notebook)) > 0
    assert (ROOT / name).stat().st_size < 1e6


# ----- PYTHONPATH=. python tests/test_notebook.py [NAMES] runs both, or these, and saves their outputs -----


def execute(notebook, folder):
    """Run a notebook in a kernel, in `folder`, and leave nothing in it that another run would change."""
    resources = {"metadata": {"path": str(folder)}}
    options = dict(record_timing=False, coalesce_streams=True)
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources, **options)
    client.execute()  # raises a cell's error
    for cell in code_cells(notebook):
        cell.execution_count = None
        assert "stderr" not in [output.get("name") for output in cell.outputs], "a warning is an error here"


def with_palette(png):
    """The picture, PNG in base64, with 32 colors instead of true color: a quarter of the size."""
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    picture = picture.quantize(32, Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE)
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def save_outputs(name):
    notebook = read_notebook(name)
    with tempfile.TemporaryDirectory() as folder:
        execute(notebook, folder)
    for cell in code_cells(notebook):
        for output in cell.outputs:
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = with_palette(output.data["image/png"])
    nbformat.write(notebook, ROOT / name)


if __name__ == "__main__":
    for name in sys.argv[1:] or ("play.ipynb", "lessons.ipynb"):
        save_outputs(name)
