"""The notebook: runs from top to bottom on a fresh run or on none, without a network, and redefines nothing."""

import ast
import json
import os

import nbformat
from conftest import ROOT, make_shards, train
from nbclient import NotebookClient

SCRIPTS = ("train_gpt2", "tokenizer", "hellaswag", "fineweb", "sample", "smoltalk", "bench", "cli")

# what every Python that finds this on its path does first: a look at a network is an error and leaves a note
NO_NETWORK = """
import os, socket
connect, look_up = socket.socket.connect, socket.getaddrinfo
def connect_here(self, address):
    if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
        refuse(address)
    return connect(self, address)
def look_up_here(host, *args, **kwargs):
    if host not in (None, "", "127.0.0.1", "::1", "localhost"):
        refuse(host)
    return look_up(host, *args, **kwargs)
def refuse(address):
    with open(os.environ["NETWORK_NOTES"], "a") as file:
        file.write(f"{address}\\n")
    raise OSError(f"the notebook may not reach {address}")
socket.socket.connect, socket.getaddrinfo = connect_here, look_up_here
"""


def read_notebook():
    return nbformat.read(ROOT / "play.ipynb", 4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def execute(notebook, folder, monkeypatch):
    """Run the notebook's cells in a kernel of their own in `folder`; returns all that they printed.

    The kernel has no GPU and no network, and GPT-2's tokenizer tables are out of its reach.
    """
    blocked = folder / "no_network"
    blocked.mkdir()
    (blocked / "sitecustomize.py").write_text(NO_NETWORK)
    notes = blocked / "notes.txt"
    for name, value in {
        "PYTHONPATH": os.pathsep.join([str(blocked), str(ROOT)]), "NETWORK_NOTES": str(notes),
        "TIKTOKEN_CACHE_DIR": str(blocked), "CUDA_VISIBLE_DEVICES": "",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    client.execute()  # raises CellExecutionError where a cell does
    assert not notes.exists(), notes.read_text()
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert not [output for output in outputs if output.get("name") == "stderr"], "a warning is an error here"
    return "".join(output.text for output in outputs if output.output_type == "stream")


def without_lessons():
    """The notebook up to its lessons, and of these the cell that loads a model."""
    notebook = read_notebook()
    lessons = next(i for i, cell in enumerate(notebook.cells) if cell.source.startswith("# The lessons"))
    loading = next(cell for cell in notebook.cells[lessons:] if "load_model(" in cell.source)
    notebook.cells = [*notebook.cells[:lessons], loading]
    return notebook


def pictures(notebook):
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return [output for output in outputs if "image/png" in output.get("data", {})]


def test_it_runs_through_on_a_fresh_run_whose_log_is_being_written(tmp_path, monkeypatch):
    """The run's own figures are printed and its own checkpoint is taken; a torn last line is left alone."""
    data = make_shards(tmp_path / "data")
    for name in ("older", "newest"):
        assert train(data, tmp_path / "log" / name, max_steps=8 if name == "newest" else 1) == 0
    os.utime(tmp_path / "log" / "older" / "log.txt", (0, 0))
    with open(tmp_path / "log" / "newest" / "log.txt", "a") as file:
        file.write("9 train 7777\n9 val 3.5\n10 val 99")

    notebook = read_notebook()
    text = execute(notebook, tmp_path, monkeypatch)
    assert "newest: 2 layers, 2 heads, 32 channels, adamw; 9 of 8 steps, 1,152 tokens" in text
    assert "val: 3.5000 at step 9\n" in text
    # 2 * 12 * 32^2 weights in the blocks, 4 norms and biases of 9 widths a block, 320 + 32 embeddings, the last norm
    parameters = 2 * (12 * 32**2 + 13 * 32) + (320 + 32) * 32 + 2 * 32
    assert f"newest: {parameters:,} parameters, tokenizer bytes" in text
    committed = read_notebook()
    assert len(pictures(notebook)) == len(pictures(committed)) >= 16


def test_without_a_run_it_looks_at_the_recorded_one(tmp_path, monkeypatch):
    """In the pictures and where a model is wanted."""
    notebook = without_lessons()
    text = execute(notebook, tmp_path, monkeypatch)
    assert text.startswith("muon: 2 layers") and "\nmuon: 454,144 parameters" in text


def test_a_log_of_build_nanogpt_and_a_run_without_a_checkpoint_will_do(tmp_path, monkeypatch):
    """Three streams, no run.txt: OpenAI's loss stands beside, and the model is the recorded one."""
    folder = tmp_path / "log"
    folder.mkdir()
    lines = [f"{step} train {11 - step / 100:.6f}\n" for step in range(300)]
    lines += [f"{step} val {11 - step / 100:.4f}\n{step} hella 0.2{step:03d}\n" for step in (0, 250)]
    (folder / "log.txt").write_text("".join(lines) + "300 tra")
    notebook = without_lessons()
    text = execute(notebook, tmp_path, monkeypatch)
    # 299 steps of 2^19 tokens had been seen when step 299 began
    assert f"299 of 19,073 steps, {299 * 2**19:,} tokens" in text and "hella: 0.2250 at step 250" in text
    assert "taking the recorded model" in text and "\nmuon: 454,144 parameters" in text


def defined(tree):
    """The names of the functions, methods and classes in a module or cell."""
    return {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def assigned(tree):
    """The names that a module or cell assigns to outside of functions; loops' and unpacked ones, too."""
    outside = [node for node in tree.body if not isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    nodes = [node for statement in outside for node in ast.walk(statement) if isinstance(node, ast.Name)]
    return {node.id for node in nodes if isinstance(node.ctx, ast.Store)}


def imported(tree):
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    return {alias.asname or alias.name for node in imports for alias in node.names}


def test_it_redefines_nothing_of_the_scripts():
    """No def or class has the name of one in a script; no assignment that of an import, a class or a constant."""
    trees = [ast.parse((ROOT / f"{script}.py").read_text()) for script in SCRIPTS if (ROOT / f"{script}.py").exists()]
    theirs = set().union(*map(defined, trees))
    kept = {name for name in theirs | set().union(*map(assigned, trees)) if name[0].isupper()}  # classes, CONSTANTS
    assert {"GPT", "get_lr", "DataLoaderLite", "flops_per_token", "get_encoding", "generate"} <= theirs
    assert {"GPT", "PRESETS", "PEAK_FLOPS", "IGNORE_INDEX"} <= kept
    cells = [ast.parse(cell.source) for cell in code_cells(read_notebook())]
    kept |= set().union(*map(imported, cells))
    for tree in cells:
        assert not defined(tree) & theirs, ast.unparse(tree)
        assert not assigned(tree) & kept, ast.unparse(tree)


def test_a_redefinition_would_be_noticed():
    """Of `class GPT`, `def get_lr` in an `if`, `PRESETS = ...`, `a, IGNORE_INDEX = ...` and a loop's `mpl` each counts."""
    source = "class GPT: pass\nif 1:\n  def get_lr(): x = 1\nPRESETS = {}\na, IGNORE_INDEX = 1, 2\nfor mpl in (): b = 1"
    tree = ast.parse(source)
    assert defined(tree) == {"GPT", "get_lr"}
    assert {"PRESETS", "a", "IGNORE_INDEX", "mpl", "b"} <= assigned(tree)


def test_it_is_committed_with_its_outputs_small_and_with_prose_before_every_step():
    """Cells numbered as one run from the top numbers them; no errors; under 1.5 MB; each step is introduced."""
    notebook = read_notebook()
    assert (ROOT / "play.ipynb").stat().st_size < 1.5e6
    assert [cell.execution_count for cell in code_cells(notebook)] == list(range(1, len(code_cells(notebook)) + 1))
    assert not [o for cell in code_cells(notebook) for o in cell.outputs if o.output_type == "error"]
    for before, cell in zip(notebook.cells, notebook.cells[1:]):
        if cell.cell_type == "code":
            assert before.cell_type == "markdown", cell.source


def test_the_recorded_run_is_whole_and_small():
    """Its log, run.txt and shards' meta.json are there; the model's file is under 1 MB and finite."""
    import torch

    import train_gpt2

    record = ROOT / "records" / "2026-11-20-quickstart-sample-run"
    for name in ("muon", "adamw"):
        streams = {line.split()[1] for line in (record / name / "log.txt").read_text().splitlines()}
        assert streams == {"train", "val", "hella", "lr", "norm", "tok/s"}
        assert json.loads((record / name / "meta.json").read_text())["tokenizer"] == "bytes"
        assert "config: {" in (record / name / "run.txt").read_text()
    model, enc = train_gpt2.load_model(str(record / "muon"))
    assert enc.name == "bytes" and all(torch.isfinite(p).all() for p in model.parameters())
    assert max(path.stat().st_size for path in record.rglob("*")) < 2**20
