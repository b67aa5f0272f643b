"""The notebook: runs from top to bottom on a fresh run or on none, without a network, and redefines nothing."""

import ast
import json
import os

import matplotlib.pyplot as plt
import nbformat
import pytest
import torch
import train_gpt2
from nbclient import NotebookClient

from harness import ROOT, make_shards, train

SCRIPTS = [*ROOT.glob("*.py"), *ROOT.glob("plumbing/*.py")]

# what every Python that finds this on its path does first: a look at a network is an error and leaves a note
NO_NETWORK = """
import os, sys
def refuse_networks(event, args):
    if event in ("socket.connect", "socket.getaddrinfo"):
        host = args[1][0] if event == "socket.connect" else args[0]
        if host not in (None, "", "127.0.0.1", "::1", "localhost", "/"):  # "/": the path of a socket on this machine
            with open(os.environ["NETWORK_NOTES"], "a") as file:
                file.write(f"{host}\\n")
            raise OSError(f"the notebook may not reach {host}")
sys.addaudithook(refuse_networks)
"""


def read_notebook():
    return nbformat.read(ROOT / "play.ipynb", 4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture
def run_cells(tmp_path, monkeypatch):
    """A function that runs the cells before the lessons in this process, in tmp_path, and returns their names."""

    def run(with_model=False):
        """with_model: also the lessons' cell that loads a model."""
        cells = read_notebook().cells
        lessons = next(i for i, cell in enumerate(cells) if cell.source.startswith("# The lessons"))
        loading = next(cell for cell in cells[lessons:] if "load_model(" in cell.source)
        names = {}
        for cell in cells[:lessons] + [loading] * with_model:
            if cell.cell_type == "code":
                exec(cell.source, names)
        return names

    plt.switch_backend("Agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plt, "show", lambda: None)  # the figures stay open, for a look at them
    with plt.rc_context():
        yield run
    plt.close("all")


@pytest.fixture
def names(run_cells, capsys):
    """The names of the cells before the lessons, which have drawn the recorded run."""
    names = run_cells()
    capsys.readouterr()
    return names


def test_it_runs_through_on_a_fresh_run_whose_log_is_being_written(tmp_path, monkeypatch):
    """In a kernel without a GPU, a network and GPT-2's tokenizer tables.

    The run's own figures are printed and its own checkpoint is taken; a torn last line is left alone.
    """
    data = make_shards(tmp_path / "data")
    for name in ("longest", "newest"):
        assert train(data, tmp_path / "log" / name, max_steps=8 if name == "longest" else 1) == 0
    with open(tmp_path / "log" / "longest" / "log.txt", "a", encoding="utf-8") as file:
        file.write("9 train 7777\n9 val 3.5\n10 val 99")

    blocked = tmp_path / "no_network"
    blocked.mkdir()
    (blocked / "sitecustomize.py").write_text(NO_NETWORK, encoding="utf-8")
    notes = blocked / "notes.txt"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(blocked), str(ROOT)]))
    monkeypatch.setenv("NETWORK_NOTES", str(notes))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(blocked))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    notebook, where = read_notebook(), {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()  # raises a cell's error
    assert not notes.exists(), notes.read_text(encoding="utf-8")
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert not [output for output in outputs if output.get("name") == "stderr"], "a warning is an error here"
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 16
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "longest: 2 layers, 2 heads, 32 channels, adamw; 9 of 8 steps, 1,152 tokens" in text
    assert "val: 3.5000 at step 9\n" in text
    # 2 * 12 * 32^2 weights in the blocks, 4 norms and biases of 9 widths a block, 320 + 32 embeddings, the last norm
    parameters = 2 * (12 * 32**2 + 13 * 32) + (320 + 32) * 32 + 2 * 32
    assert f"longest: {parameters:,} parameters, of which 2,016 pad the vocabulary; tokenizer bytes" in text


def test_without_a_run_it_looks_at_the_recorded_one(run_cells, capsys):
    """In the pictures and where a model is wanted."""
    run_cells(with_model=True)
    text = capsys.readouterr().out
    assert text.startswith("quickstart: 4 layers") and "\nquickstart: 850,688 parameters" in text
    assert "No HellaSwag scores here" in text


def test_a_log_of_build_nanogpt_and_a_run_without_a_checkpoint_will_do(tmp_path, run_cells, capsys):
    """Three streams, no run.txt: only what the log says is told, and the model is the recorded one."""
    folder = tmp_path / "log"
    folder.mkdir()
    lines = [f"{step} train {11 - step / 100:.6f}\n" for step in range(300)]
    lines += [f"{step} val {11 - step / 100:.4f}\n{step} hella 0.2{step:03d}\n" for step in (0, 250)]
    (folder / "log.txt").write_text("".join(lines) + "300 tra", encoding="utf-8")
    run_cells(with_model=True)
    text = capsys.readouterr().out
    assert text.startswith("log: 299 steps; it has no run.txt") and "tokens\n" not in text.split("val:")[0]
    assert "hella: 0.2250 at step 250" in text
    assert "look at the recorded model" in text and "\nquickstart: 850,688 parameters" in text


def write_run(folder, losses, config=None, shards=None, branched=None, stream="val"):
    """A run's folder with a log of these values at steps 0, 1, ...; with a config, a run.txt of two starts."""
    folder.mkdir(parents=True)
    log = "".join(f"{step} {stream} {loss}\n" for step, loss in enumerate(losses))
    (folder / "log.txt").write_text(log, encoding="utf-8")
    if config is not None:
        block = [f"command: train_gpt2.py --out-dir {folder}", f"config: {json.dumps(config)}"]
        block += [f"branched: {json.dumps(branched)}"] if branched else []
        block += ["machine: Linux, 2 cores, no GPU", "ranks: 1", ""]
        restart = [line for line in block if not line.startswith("branched")]  # only the first start says it
        (folder / "run.txt").write_text("\n".join(block) + "\n" + "\n".join(restart), encoding="utf-8")
    if shards:
        (folder / "meta.json").write_text(json.dumps(shards), encoding="utf-8")
    return folder


def test_openais_loss_is_drawn_for_fineweb_edu_in_gpt2_tokens_only(tmp_path, names):
    """Made by fineweb.py or ready-made; not for other data, nor for a log that doesn't say what was trained on."""
    folders = {}
    for name, dataset in (("own", "fineweb-edu"), ("ready", "kjj0/finewebedu10B-gpt2"), ("other", "input")):
        shards = {"dataset": dataset, "tokenizer": "gpt2", "vocab_size": 50257}
        folders[name] = write_run(tmp_path / name, [11, 7, 5], {}, shards)
    folders["unknown"] = write_run(tmp_path / "unknown", [11, 7, 5])
    for name, folder in folders.items():
        names["plot_loss"]([names["read_run"](folder)])
        ax = plt.gcf().axes[0]
        labels = [text.get_text() for text in plt.gcf().legends[0].get_texts()]
        assert ("OpenAI's GPT-2 124M: 3.2924" in labels) == (name in ("own", "ready")), name
        assert ax.get_xlabel() == ("step" if name == "unknown" else "tokens seen")
    told = names["read_run"](folders["unknown"], names["PRESETS"]["gpt2"])  # by somebody who knows how it was trained
    assert names["curve"](told, "val")[0].tolist() == [0, 2**19, 2 * 2**19]


def test_branches_are_drawn_from_where_they_leave_their_parent(tmp_path, names, capsys):
    """Parent, branch and branch of the branch are found from any of them; tokens before a branch are the parent's."""
    log = tmp_path / "log"
    write_run(log / "a", [6.0, 5.0, 4.0, 3.5, 3.25], {"total_batch_size": 100})
    write_run(log / "unrelated", [6.5, 5.5], {})
    changed = {"total_batch_size": [100, 1000]}
    branched = {"parent": "log/a", "step": 2, "changed": changed}
    write_run(log / "c", [6.0, 5.0, 4.0, 3.0], {"total_batch_size": 1000}, branched=branched)
    branched = {"parent": str(log / "c"), "step": 3, "changed": {"max_lr": [0.002, 0.001]}}
    write_run(log / "b", [6.0, 5.0, 4.0, 3.0, 2.5], {"total_batch_size": 10}, branched=branched)
    for start in "acb":
        family = names["find_family"](log / start)
        assert [run.name for run in family] == ["a", "c", "b"]
    assert names["curve"](family[2], "val")[0].tolist() == [0, 100, 200, 1200, 1210]

    names["plot_branches"](family)
    ax = plt.gcf().axes[0]
    diamonds = [line.get_xydata()[0].tolist() for line in ax.lines if line.get_marker() == "D"]
    assert diamonds == [[200, 4.0], [1200, 3.0]]
    assert ax.lines[-2].get_xdata().tolist() == [1200, 1210]  # the last branch's own part
    names["print_end_losses"](family)
    table = capsys.readouterr().out
    assert "2.5000   max_lr 0.002 -> 0.001" in table and "3.0000   total_batch_size 100 -> 1000" in table

    other = write_run(tmp_path / "moved" / "a", [9.0, 8.0], {})  # another run of the parent's name is not the parent
    (log / "b").rename(other.parent / "b")
    assert names["parent_of"](other.parent / "b", other) is None
    (log / "c" / "log.txt").unlink()
    assert names["read_run"](other.parent / "b").parent is None


def test_runs_of_one_idea_are_drawn_as_their_mean_with_a_band(tmp_path, names, capsys):
    """Over the steps that all have; a pattern without a run, and settings that differ beside the seed, are said."""
    for idea, losses in (("a", [[8, 6, 4], [8, 4, 2, 1]]), ("b", [[8, 7, 6], [8, 7, 5]])):
        for seed, of_run in enumerate(losses):
            write_run(tmp_path / "log" / f"{idea}-{seed}", of_run, {"seed": seed, "max_lr": 1 + (idea == "b") * seed})
    runs = names["choose_runs"]({"a": "log/a-*", "nothing": "log/c-*", "b": "log/b-*"})
    assert capsys.readouterr().out.splitlines() == [
        "No run matches log/c-*: there is no such folder with a log.txt.",
        "b: these runs differ in more than the seed: max_lr.",
    ]
    assert [(run.name, *names["curve"](run, "val", False)[1]) for run in runs] == [("a", 8, 5, 3), ("b", 8, 7, 5.5)]

    names["plot_loss"](runs)
    ax = plt.gcf().axes[0]
    band = ax.collections[0].get_paths()[0].get_extents()
    assert ax.lines[0].get_ydata().tolist() == [8, 5, 3] and (band.y0, band.y1) == (2, 8)


def test_the_table_has_every_run_and_the_lowest_bits_per_byte_first(tmp_path, names, capsys):
    write_run(tmp_path / "log" / "worse", [3.5, 3, 3.25], {"seed": 5, "vocab_size": 320}, stream="val_bpb")
    write_run(tmp_path / "log" / "better", [3, 2], {"seed": 6, "vocab_size": 320}, stream="val_bpb")
    write_run(tmp_path / "log" / "unknown", [11, 10])
    names["print_table"](list(map(names["read_run"], names["find_runs"]())))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    # GPT-2 124M has 124,439,808 parameters, of which 50,257 * 768 are its table
    parameters = f"{124_439_808 - (50_257 - 320) * 768:,}"
    assert rows == [
        ["better", "2.0000", "2.0000", "1", parameters, "6", "-"],
        ["worse", "3.2500", "3.0000", "2", parameters, "5", "-"],
        ["unknown", "-", "-", "1", "-", "-", "-"],
    ]


def functions_of(*wanted):
    """These functions of the notebook, without the cells around them."""
    names = {}
    for cell in code_cells(read_notebook()):
        for node in ast.parse(cell.source).body:
            if getattr(node, "name", "") in wanted:
                exec(ast.unparse(node), names)
    return names


def test_what_fits_on_a_gpu_is_counted():
    """GPT-2 XL, 1,557.7M parameters: 22 bytes of each and 1.3 GiB under DDP; 32 C bytes per token and block."""
    names = functions_of("memory_parts", "gpu_memory", "largest_batch")
    gpu_memory, xl = names["gpu_memory"], train_gpt2.PRESETS["gpt2-xl"]
    assert gpu_memory(xl, 0, gpus=8) / 2**30 == pytest.approx(22 * 1557.7e6 / 2**30 + 1.3, abs=0.05)
    assert gpu_memory(xl, 0, gpus=8) - gpu_memory(xl, 0, gpus=1) == pytest.approx(4 * 1557.7e6, rel=1e-3)
    sequence = 1024 * (32 * 1600 * 48 + 2 * 50304)
    assert gpu_memory(xl, 3, gpus=8) - gpu_memory(xl, 2, gpus=8) == sequence
    for card, plain, checkpointing in ((24, 0, 0), (40, 2, 16), (80, 16, 64)):
        assert names["largest_batch"](xl, card * 2**30, 8, False) == plain
        assert names["largest_batch"](xl, card * 2**30, 8, True) == checkpointing


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_memory_estimate_counts_what_a_forward_pass_keeps(checkpointing):
    """Weights and gradients are those of the model; in the blocks, what autograd holds of as many elements as tokens.

    16 per channel and token of a block, where a CPU, whose attention is in float32, has one more; with checkpointing,
    a block's input, and while the backward pass is in it, all of that one.
    """
    config = train_gpt2.TrainConfig(n_layer=8, n_head=4, n_embd=64, block_size=128, sequence_length=80)
    parts = functions_of("memory_parts")["memory_parts"](config, 2, checkpointing)
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


def defined(tree):
    """The names of the functions, methods and classes in a module or cell."""
    return {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def test_it_redefines_nothing_of_the_scripts():
    theirs = set().union(*(defined(ast.parse(script.read_text(encoding="utf-8"))) for script in SCRIPTS))
    assert {"GPT", "get_lr", "DataLoaderLite", "flops_per_token", "get_encoding", "generate"} <= theirs
    for cell in code_cells(read_notebook()):
        assert not defined(ast.parse(cell.source)) & theirs, cell.source


def test_it_is_committed_with_its_outputs_small_and_with_prose_before_every_step():
    """Cells numbered as one run from the top numbers them; no errors; under 1.5 MB; each step is introduced."""
    notebook = read_notebook()
    assert (ROOT / "play.ipynb").stat().st_size < 1.5e6
    assert [cell.execution_count for cell in code_cells(notebook)] == list(range(1, len(code_cells(notebook)) + 1))
    assert not [o for cell in code_cells(notebook) for o in cell.outputs if o.output_type == "error"]
    for before, cell in zip(notebook.cells, notebook.cells[1:]):
        if cell.cell_type == "code":
            assert before.cell_type == "markdown", cell.source
