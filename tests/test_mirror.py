"""--wandb mirrors the log at Weights & Biases, and whatever fails there leaves the training alone."""

import importlib.util
import json
import shutil
import sys

import pytest
from plumbing import mirror

from harness import listing, read_log, train

# Stands for wandb: notes every call in calls.jsonl and, as the server, knows each run's steps. $FAKE_WANDB says what
# goes wrong.
FAKE = """
import json, os, time, types
from pathlib import Path

FOLDER = Path(__file__).parent
TROUBLE = os.environ.get("FAKE_WANDB", "")

class CommError(Exception):
    pass

errors, Settings, setup = types.SimpleNamespace(CommError=CommError), dict, dict

def note(called, /, **options):
    with open(FOLDER / "calls.jsonl", "a") as file:
        file.write(json.dumps([called, options]) + "\\n")

def teardown():
    note("teardown")

def login(prompt, verify):
    return TROUBLE != "no login"

class Run:
    def __init__(self, mode, id):
        self.offline, self.id, self.url = mode == "offline", id, "https://wandb.example/" + id
        self.dir = str(FOLDER / "offline-run" / "files")
        server = FOLDER / (id + ".json")
        self.starting_step = json.loads(server.read_text()) if server.exists() and not self.offline else 0

    def log(self, values, step):
        if TROUBLE == "log fails":
            raise RuntimeError("no more space\\nat the server")
        if TROUBLE == "log hangs":
            time.sleep(1000)
        note("log", id=self.id, step=step, values=values)
        if not self.offline:
            (FOLDER / (self.id + ".json")).write_text(str(step + 1))

    def finish(self, exit_code):
        note("finish", exit_code=exit_code)

def init(mode, id, settings, **options):
    note("init", mode=mode, id=id, **options)
    if TROUBLE == "unreachable" and mode == "online":
        raise CommError("timed out")
    return Run(mode, id)
"""


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    """The folder of the fake package."""
    folder = tmp_path / "packages" / "wandb"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(FAKE)
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    yield folder
    sys.modules.pop("wandb", None)


def calls(folder, name):
    """The options of every call of a function, in order."""
    lines = map(json.loads, (folder / "calls.jsonl").read_text().splitlines())
    return [options for called, options in lines if called == name]


def logged(options):
    """{(step, stream): value as log.txt has it} of calls of log; a stream's step that comes twice is an error."""
    pairs = [((call["step"], stream), f"{value:.9g}") for call in options for stream, value in call["values"].items()]
    assert len(pairs) == len(dict(pairs))
    assert [call["step"] for call in options] == sorted(call["step"] for call in options)
    return dict(pairs)


def log_of(out_dir):
    streams = ("train", "val", "val_bpb", "lr", "norm", "tok/s")
    return {(step, stream): value for stream in streams for step, value in read_log(out_dir, stream).items()}


def test_the_log_and_the_settings_are_mirrored(data, tmp_path, wandb, capsys):
    assert train(data, tmp_path / "run", wandb="gpt2") == 0
    assert logged(calls(wandb, "log")) == log_of(tmp_path / "run")
    (init,) = calls(wandb, "init")
    assert init["mode"] == "online" and init["project"] == "gpt2" and init["dir"] == str(tmp_path / "run")
    assert init["config"]["max_lr"] == 3e-3 and init["config"]["vocab_size"] == 320
    assert calls(wandb, "finish") == [{"exit_code": 0}]
    assert f"mirrored at https://wandb.example/{init['id']}" in capsys.readouterr().out


def lose_the_last_steps(out_dir):
    """Leave a finished run as a crash after step 11 would, whose newest checkpoint is of step 8."""
    (out_dir / "model_00012.pt").unlink()
    shutil.rmtree(out_dir / "hf")


def test_a_resumed_run_goes_on_in_the_same_curve(data, tmp_path, wandb):
    """The server has the steps up to 9, the checkpoint is of step 8, the new process repeats all from there."""
    run = tmp_path / "run"
    assert train(data, run, wandb="gpt2") == 0
    sent = [call for call in calls(wandb, "log") if call["step"] < 10]
    lose_the_last_steps(run)
    (identity,) = {call["id"] for call in calls(wandb, "init")}
    (wandb / f"{identity}.json").write_text("10")
    (wandb / "calls.jsonl").unlink()
    sys.modules.pop("wandb")

    assert train(data, run, wandb="gpt2", batch_size=2) == 0
    (init,) = calls(wandb, "init")
    assert init["id"] == identity and init["resume"] == "allow" and init["allow_val_change"]
    again = calls(wandb, "log")
    assert {call["step"] for call in again} == {10, 11, 12}
    assert logged(sent + again).keys() == log_of(run).keys()


def test_an_offline_run_has_the_whole_curve_after_a_resume(data, tmp_path, wandb, monkeypatch, capsys):
    """Its upload replaces what the server had, so the last of them has to have all steps, each once."""
    monkeypatch.setenv("FAKE_WANDB", "no login")
    run = tmp_path / "run"
    assert train(data, run, wandb="gpt2") == 0
    assert f"wandb sync {wandb / 'offline-run'}" in capsys.readouterr().out
    lose_the_last_steps(run)
    (wandb / "calls.jsonl").unlink()
    assert train(data, run, wandb="gpt2") == 0
    assert [init["mode"] for init in calls(wandb, "init")] == ["offline"]
    assert logged(calls(wandb, "log")) == log_of(run)


def test_a_branch_is_a_run_of_its_own_with_its_parents_curve(data, tmp_path, wandb):
    parent, branch = tmp_path / "parent", tmp_path / "branch"
    assert train(data, parent, wandb="gpt2") == 0
    (wandb / "calls.jsonl").unlink()
    assert train(data, branch, wandb="gpt2", branch_from=parent / "model_00008.pt", max_lr=1e-3) == 0
    (init,) = calls(wandb, "init")
    assert init["id"] != (parent / "wandb" / "run_id.txt").read_text()
    assert logged(calls(wandb, "log")) == log_of(branch)


def test_without_a_network_an_offline_run_is_written(data, tmp_path, wandb, monkeypatch):
    monkeypatch.setenv("FAKE_WANDB", "unreachable")
    assert train(data, tmp_path / "run", wandb="gpt2") == 0
    assert [init["mode"] for init in calls(wandb, "init")] == ["online", "offline"]
    assert len(calls(wandb, "teardown")) == 1


@pytest.mark.parametrize(
    "trouble, words", [("log fails", "has failed (RuntimeError: no more space)."), ("log hangs", "has not answered")]
)
def test_training_neither_ends_nor_waits_with_wandb(trouble, words, data, tmp_path, wandb, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_WANDB", trouble)
    monkeypatch.setattr(mirror, "FINISH_SECONDS", 0.1)
    assert train(data, tmp_path / "run", wandb="gpt2") == 0
    out = capsys.readouterr().out
    assert out.count("warning: ") == 1 and words in out
    assert len(read_log(tmp_path / "run")) == 12


def test_a_run_that_ends_in_an_error_is_failed_there_too(data, tmp_path, wandb):
    assert train(data, tmp_path / "run", wandb="gpt2", max_lr=1e17, grad_clip=0) == 2
    assert calls(wandb, "finish") == [{"exit_code": 1}]


def test_without_the_package_it_is_an_error_before_anything_is_written(data, tmp_path, monkeypatch, capsys):
    (tmp_path / "packages" / "wandb").mkdir(parents=True)  # what wandb leaves in a working directory is no package
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    if importlib.util.find_spec("wandb").origin:
        monkeypatch.setattr(mirror, "is_installed", lambda: False)
    before = listing(tmp_path)
    assert train(data, tmp_path / "run", wandb="gpt2") == 2
    assert "pip install wandb" in capsys.readouterr().err
    assert listing(tmp_path) == before


def test_the_real_wandb_writes_its_offline_run(data, tmp_path, monkeypatch, capsys):
    if not mirror.is_installed():
        pytest.skip("wandb is optional and not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = tmp_path / "run"
    assert train(data, run, wandb="gpt2", hellaswag_every=0) == 0
    out = capsys.readouterr().out
    assert "warning" not in out
    (folder,) = (run / "wandb").glob("offline-run-*")
    identity = (run / "wandb" / "run_id.txt").read_text()
    assert f"wandb sync {folder}" in out and folder.name.endswith(identity)
    content = (folder / f"run-{identity}.wandb").read_bytes()
    assert all(stream in content for stream in (b"train", b"val", b"lr", b"norm", b"tok/s", b"max_lr"))
