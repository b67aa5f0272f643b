"""Attacks on a run: nothing is silently wrong, nothing of others is lost, and nothing ends in a traceback.

Each test drives the commands as a user would, so that it can be run on an older version, too, and fail there.
tests/fuzz.py holds the malformed files; here is a short, seeded form of it.
"""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import fuzz
import pytest
import torch
from conftest import (
    flags,
    listing,
    make_shards,
    patched,
    read_log,
    run,
    start,
    status_of,
    tiny_flags,
    tiny_model,
    train,
)

import sample
import train_gpt2

OPTIONS = fuzz.OPTIONS  # 6 steps, checkpoints 2, 4 and 6


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A folder with data/, run/, of which 4 of 6 steps are done, and log.txt, what the run must come to."""
    return fuzz.make_good(tmp_path_factory.mktemp("good"))


@pytest.fixture
def folder(good, tmp_path):
    return shutil.copytree(good, tmp_path / "folder")


def resume(folder, **changes):
    return train(folder / "data", folder / "run", **OPTIONS | changes)


def error_of(capsys):
    """The one line that the last command ended with."""
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


def is_straight(folder):
    """Whether the run has come to what a run without an attack comes to."""
    expected = (folder / "log.txt").read_text().splitlines()
    streams = (" train ", " val ", " lr ", " norm ")
    lines = [line for line in (folder / "run" / "log.txt").read_text().splitlines() if any(s in line for s in streams)]
    return lines == [line for line in expected if any(s in line for s in streams)]


def change_checkpoint(path, change):
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)


# ----------------------------------------------------------------------------------------------------------
# One process per folder


def hold(started, args):
    """Train, and wait in the first step until killed."""

    def step_and_wait(*args):
        Path(started).touch()
        time.sleep(60)

    with patched(train_gpt2, "train_step", step_and_wait):
        train_gpt2.main(args)


def test_a_folder_belongs_to_one_running_process(folder, tmp_path, capsys):
    started = tmp_path / "started"
    (first,) = start(hold, started, tiny_flags(folder / "data", folder / "new", **OPTIONS), output=tmp_path / "output")
    while not started.exists():
        assert first.is_alive(), (tmp_path / "output").read_text()
        time.sleep(0.02)
    before = listing(folder / "new")
    for changes in ({}, {"resume": False}):
        assert train(folder / "data", folder / "new", **OPTIONS | changes) == 2
        line = error_of(capsys)
        assert f"process {first.pid} on {os.uname().nodename}" in line and "in use" in line
    assert listing(folder / "new") == before
    first.kill()  # the lock ends with the process
    first.join()
    assert train(folder / "data", folder / "new", **OPTIONS) == 0


# ----------------------------------------------------------------------------------------------------------
# A run is what its checkpoint says, on the data that it was started on


def test_the_checkpoint_decides_which_run_it_is_not_run_txt(folder, capsys):
    text = (folder / "run" / "run.txt").read_text()
    (folder / "run" / "run.txt").write_text(text.replace('"max_lr": 0.003', '"max_lr": 0.01'))
    assert resume(folder, max_lr=0.01) == 2
    assert "max_lr was 0.003, now 0.01" in error_of(capsys)
    assert resume(folder) == 0 and is_straight(folder)


def test_a_run_from_before_a_flag_continues_where_the_flag_has_its_default(folder, capsys):
    for path in (folder / "run").glob("model_*.pt"):
        change_checkpoint(path, lambda content: content["config"].pop("grad_clip"))
    run_txt = folder / "run" / "run.txt"
    run_txt.write_text(run_txt.read_text().replace('"grad_clip": 1.0, ', ""))
    assert resume(folder, grad_clip=0.5) == 2
    assert "grad_clip was 1.0, now 0.5" in error_of(capsys)
    assert resume(folder) == 0 and is_straight(folder)


def test_a_checkpoint_of_the_first_version_continues(folder):
    """It had no fingerprint of its data, and wrote "auto" for a dtype that was left to the machine."""

    def make_old(content):
        del content["loader"]["fingerprint"]
        content["config"]["dtype"] = "auto"
        for name in ("branch_from", "milestone_every", "keep_best", "wandb"):
            content["config"].pop(name, None)

    for path in (folder / "run").glob("model_*.pt"):
        change_checkpoint(path, make_old)
    assert resume(folder) == 0 and is_straight(folder)


KILLED_IN_FIRST_START = """
import os, signal, sys
import torch
torch.set_num_threads(1)
import train_gpt2
from plumbing import cli
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "0":
    from pathlib import Path
    def die(*args): os.kill(os.getpid(), signal.SIGKILL)
    train_gpt2.tokenizer.folder_encoding = die
cli.run(train_gpt2.main)
"""


def test_a_restart_under_no_resume_starts_afresh_if_the_first_start_was_killed_too_early(folder, tmp_path):
    """Killed before it has set the old run aside: the restart must not take the old run for its own."""
    (tmp_path / "killed.py").write_text(KILLED_IN_FIRST_START)
    args = tiny_flags(folder / "data", folder / "run", resume=False, **OPTIONS)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", "--max-restarts=1"]
    command = [sys.executable, *torchrun, str(tmp_path / "killed.py"), *args]
    time.sleep(1.1)  # run.txt has whole seconds
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    text = done.stdout
    assert done.returncode == 0, done.stderr
    assert "from step 0 to 6" in text and "Moved the old run" in text
    assert (folder / "run.1" / "model_00004.pt").exists()


def test_other_data_of_the_same_length_are_refused(folder, tmp_path, capsys):
    other = make_shards(tmp_path / "other", seed=1)
    assert train(other, folder / "run", **OPTIONS) == 2
    assert str(other) in error_of(capsys)
    moved = shutil.copytree(folder / "data", tmp_path / "moved")
    assert train(moved, folder / "run", **OPTIONS) == 0 and is_straight(folder)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda meta: meta | {"complete": False}, "not complete"),
        (lambda meta: meta | {"shards": meta["shards"] | {"tiny_train_000003.npy": 50}}, "tiny_train_000003.npy"),
        (lambda meta: meta | {"shards": meta["shards"] | {"tiny_train_000002.npy": 50}}, "tiny_train_000002.npy"),
    ],
)
def test_shards_that_are_not_all_there_are_refused_in_training(change, words, folder, capsys):
    path = folder / "data" / "meta.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    assert train(folder / "data", folder / "new", **OPTIONS) == 2
    assert words in error_of(capsys) and not (folder / "new").exists()


# ----------------------------------------------------------------------------------------------------------
# Ranks agree or stop


def train_alone_otherwise(args, changes, data, version):
    """Train with other flags, other data or another version of the program on rank 1."""
    if os.environ["RANK"] == "1":
        args = [*args, *flags(**changes), *(["--data", str(data)] if data else [])]
        if version:
            torch.__version__ = version
    train_gpt2.main(args)


@pytest.mark.parametrize(
    "changes, version, words",
    [
        ({"max_lr": 0.01}, "", "on rank 1 max_lr is 0.01 instead of 0.003"),
        ({"seed": 7}, "", "on rank 1 seed is 7 instead of 1337"),
        ({"data": "other"}, "", "on rank 1 training data is "),
        ({}, "2.11.0", "on rank 1 the version of torch is 2.11.0 instead of "),
    ],
    ids=["another learning rate", "another seed", "other data", "another torch"],
)
def test_ranks_that_differ_stop_and_say_who_differs_in_what(changes, version, words, folder, tmp_path):
    changes = dict(changes)
    data = changes.pop("data", None) and make_shards(tmp_path / "other", seed=1)
    args = tiny_flags(folder / "data", folder / "new", **OPTIONS)
    output = tmp_path / "output"
    statuses = run(train_alone_otherwise, args, changes, data, version, output=output, ranks=2)
    assert statuses == [2, 2], output.read_text()
    (line,) = [line for line in output.read_text().splitlines() if line.startswith("error: ")]
    assert words in line
    assert not (folder / "new").exists()


def test_ranks_may_have_their_files_in_different_places(folder, tmp_path):
    data = shutil.copytree(folder / "data", tmp_path / "elsewhere")
    args = tiny_flags(folder / "data", folder / "new", **OPTIONS)
    output = tmp_path / "output"
    changes = {"out_dir": "nowhere", "hellaswag_data": "there"}
    assert run(train_alone_otherwise, args, changes, data, "", output=output, ranks=2) == [0, 0], output.read_text()


# ----------------------------------------------------------------------------------------------------------
# Only our own files


def test_foreign_parts_and_a_foreign_model_survive_a_run_in_the_folder_they_are_in(folder, monkeypatch, capsys):
    """--out-dir . in a folder full of other things, with and without --no-resume."""
    place = folder / "mine"
    (place / "film.part").mkdir(parents=True)
    for name in ("film.part/reel", "disk.part", "notes.txt", "model_5.pt", "other.pt", "shard_train_000001.npy"):
        (place / name).write_text("dear")
    before = listing(place)
    monkeypatch.chdir(place)
    for changes in ({}, {"resume": False}):
        assert train(folder / "data", ".", **OPTIONS | changes) == 0
        after = listing(place)
        assert {name: after.get(name) for name in before} == before
    assert (folder / "mine.1" / "model_00006.pt").exists()


@pytest.mark.parametrize("changes", [{}, {"resume": False}])
def test_a_foreign_model_called_hf_is_refused_at_the_start(changes, folder, capsys):
    (folder / "run" / "hf").mkdir()
    (folder / "run" / "hf" / "model.safetensors").write_text("dear")
    before = listing(folder)
    assert resume(folder, **changes) == 2
    assert str(folder / "run" / "hf") in error_of(capsys)
    assert listing(folder) == before


def test_no_resume_leaves_the_data_that_lie_in_the_runs_folder(folder):
    data = shutil.copytree(folder / "data", folder / "run" / "data")
    for path in data.iterdir():
        shutil.copy(path, folder / "run")
    assert train(folder / "run", folder / "run", resume=False, **OPTIONS) == 0
    assert train(data, folder / "run", resume=False, **OPTIONS) == 0
    assert is_straight(folder) and (folder / "run" / "meta.json").exists()


def test_an_empty_out_dir_is_not_the_current_folder(folder, monkeypatch, capsys):
    (folder / "here").mkdir()
    monkeypatch.chdir(folder / "here")
    assert train(folder / "data", "", **OPTIONS) == 2
    assert "--out-dir is empty" in error_of(capsys)
    assert not list((folder / "here").iterdir())


# ----------------------------------------------------------------------------------------------------------
# Malformed files


SHORT = [
    "a bit flipped, place 3",
    "a huge bytearray",
    "averages of another parameter",
    "a step beyond the end",
    "a random state of noise",
    "tensors with not a number",
    "vocab_size 2**40",
]


def test_malformed_checkpoints_are_one_line_or_no_matter(good, tmp_path):
    names = [*SHORT, *random.Random(0).sample(sorted(fuzz.DAMAGES.keys() - set(SHORT)), 3)]
    found = [(name, command, said) for name, command, said, _ in fuzz.try_checkpoints(good, tmp_path, names)]
    assert len(found) == 3 * len(names)
    assert not [one for one in found if "WRONG" in one[2]]


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda c: c["optimizer"][0]["state"][0].pop("exp_avg"), "optimizer.0.state.0 has no exp_avg"),
        (lambda c: c["scaler"].update(scale="2"), "scaler.scale is a str instead of a number"),
    ],
)
def test_a_state_of_another_structure_is_refused(change, words, data, tmp_path, capsys):
    out, options = tmp_path / "out", dict(dtype="float16", max_steps=4)
    assert train(data, out, **options) == 0
    shutil.rmtree(out / "hf")  # the run is not finished yet
    change_checkpoint(out / "model_00004.pt", change)
    assert train(data, out, **options) == 2
    assert words in error_of(capsys)


def test_malformed_folders_are_one_line_or_no_matter(good, tmp_path):
    names = random.Random(0).sample(sorted(fuzz.folder_damages()), 12)
    found = [(name, said) for name, _, said, _ in fuzz.try_folders(good, tmp_path, names)]
    assert len(found) == len(names)
    assert not [one for one in found if "WRONG" in one[1]]


def test_damaged_lines_of_a_log_are_left_out_and_counted(folder, capsys):
    log = folder / "run" / "log.txt"
    lines = log.read_bytes().splitlines(keepends=True)
    odd = [b"\n", b"0 val nan\n", b"\0" * 50 + b"\n", "0 caf\u00e9 1\n".encode("latin-1"), b"1 train 0.1 0.2\n"]
    log.write_bytes(b"".join(odd + lines))
    assert resume(folder) == 0
    assert f"{len(odd)} damaged lines" in capsys.readouterr().out
    assert is_straight(folder)


def test_a_run_txt_that_cannot_be_opened_is_one_line(folder, capsys):
    (folder / "run" / "run.txt").unlink()
    (folder / "run" / "run.txt").mkdir()
    before = listing(folder)
    for changes in ({}, {"resume": False}):
        assert resume(folder, **changes) == 2
        assert "run.txt" in error_of(capsys)
        assert listing(folder) == before


# ----------------------------------------------------------------------------------------------------------
# Sizes and numbers that no machine has


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(n_layer=10**6), "Lower --n-layer"),
        (dict(n_layer=10**6, n_embd=2), "Lower --n-layer"),
        (dict(n_embd=2**20), "Lower --n-layer"),
        (dict(vocab_size=2**40), "--vocab-size"),
        (dict(block_size=2**40), "--block-size"),
        (dict(seed=2**64), "--seed is 18446744073709551616"),
        (dict(max_steps=10**400), "--max-steps is 1000"),
        (dict(beta1=1), "--beta1 is 1.0"),
        (dict(beta2=1), "--beta2 is 1.0"),
        (dict(muon_momentum=1), "--muon-momentum is 1.0"),
        (dict(device="cpu:abc"), "'cpu:abc'"),
        (dict(device="cpu:\u00b2"), "'cpu:\u00b2'"),
        (dict(device="cuda:7"), "cuda"),
        (dict(device="cuda:-1"), "'cuda:-1'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_no_machine_has_is_refused_before_memory_is_asked_for(options, words, folder, capsys):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert train(folder / "data", folder / "new", **OPTIONS | options) == 2
    assert words in error_of(capsys) and not (folder / "new").exists()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # KiB


def test_a_run_of_more_steps_than_there_are_seconds_says_how_long_it_will_take(folder):
    args = tiny_flags(folder / "data", folder / "new", **OPTIONS | dict(max_steps=2**60, val_every=0))
    assert run(stop_in_step_3, args, output=folder / "output") == [0], (folder / "output").read_text()


def stop_in_step_3(args):
    steps = []

    def step_and_stop(*args):
        steps.append(1)
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGHUP)  # the terminal was closed
        return train_step(*args)

    with patched(train_gpt2, "train_step", step_and_stop) as train_step:
        train_gpt2.main(args)


@pytest.mark.parametrize(
    "environment, words",
    [
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"RANK": "0"}, "MASTER_ADDR is not set"),
        ({"RANK": "3", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "rank 3 of 2"),
    ],
    ids=str,
)
def test_a_strange_environment_is_one_line(environment, words, folder, monkeypatch, capsys):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("plumbing.cli.RANK_GRACE_SECONDS", 0)
    assert train(folder / "data", folder / "new", **OPTIONS) == 2
    assert words in error_of(capsys) and not (folder / "new").exists()


# ----------------------------------------------------------------------------------------------------------
# Lost work


def test_a_closed_terminal_ends_the_step_and_writes_a_checkpoint(folder):
    args = tiny_flags(folder / "data", folder / "new", **OPTIONS)
    assert run(stop_in_step_3, args, output=folder / "output") == [0], (folder / "output").read_text()
    assert (folder / "new" / "model_00003.pt").exists()
    assert run(train_gpt2.main, args, output=folder / "output") == [0]
    assert list(read_log(folder / "new").items()) == [
        (int(line.split()[0]), line.split()[2])
        for line in (folder / "log.txt").read_text().splitlines()
        if " train " in line
    ]


def train_with_few_files(args):
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    train_gpt2.main(args)


def test_more_shards_than_files_may_be_open(folder, tmp_path):
    """1,100 shards under the usual ulimit -n 1024."""
    data = make_shards(tmp_path / "many", lengths=(600,) + (60,) * 1100)
    args = tiny_flags(data, tmp_path / "out", **OPTIONS)
    assert run(train_with_few_files, args, output=tmp_path / "output") == [0], (tmp_path / "output").read_text()
    assert sorted(read_log(tmp_path / "out")) == list(range(6))


def test_the_dtype_that_was_chosen_belongs_to_the_run(folder, tmp_path):
    """Where auto means float16 now, a float32 run stays one."""
    options = OPTIONS | dict(dtype="auto")
    args = tiny_flags(folder / "data", folder / "new", **options)
    assert run(stop_in_step_3, args, output=folder / "output") == [0], (folder / "output").read_text()
    content = torch.load(folder / "new" / "model_00003.pt", weights_only=True)
    assert content["config"]["dtype"] == "float32"
    assert run(train_where_auto_is_float16, args, output=folder / "output") == [0], (folder / "output").read_text()
    assert [value for _, value in sorted(read_log(folder / "new").items())] == [
        line.split()[2] for line in (folder / "log.txt").read_text().splitlines() if " train " in line
    ]


def train_where_auto_is_float16(args):
    from plumbing import distributed

    def choose(name, device, n_embd):
        return choose_dtype("float16" if name == "auto" else name, device, n_embd)

    with patched(distributed, "choose_dtype", choose) as choose_dtype:
        train_gpt2.main(args)


def test_a_branch_may_have_another_dtype(folder):
    options = OPTIONS | dict(dtype="float16", branch_from=folder / "run")
    assert train(folder / "data", folder / "new", **options) == 0
    assert sorted(read_log(folder / "new")) == list(range(6))


# ----------------------------------------------------------------------------------------------------------
# Checkpoints of the peers


def peer_weights(bias=True):
    """A GPT-2 with the 50,257 ids of OpenAI's tokenizer, in the names of nanoGPT and build-nanogpt."""
    weights = tiny_model(vocab_size=50304).state_dict()
    return {name: w for name, w in weights.items() if bias or not name.endswith("bias")}


class GPTConfig:
    """What build-nanogpt pickles into its checkpoints: an object of this class of the script that was run."""


def save_peers(folder):
    shape = dict(block_size=32, vocab_size=50304, n_layer=2, n_head=2, n_embd=32)
    wrapped = {f"_orig_mod.{name}": w for name, w in peer_weights(bias=False).items()}
    nanogpt = {"model": wrapped, "model_args": shape | {"bias": False, "dropout": 0.0}, "iter_num": 5, "config": {}}
    torch.save(nanogpt, folder / "ckpt.pt")
    config = GPTConfig()
    vars(config).update(shape)
    with patched(GPTConfig, "__module__", "__main__"):
        torch.save({"model": peer_weights(), "config": config, "step": 5, "val_loss": 3.0}, folder / "model_00005.pt")


@pytest.mark.parametrize("name", ["ckpt.pt", "model_00005.pt"])
def test_a_peers_checkpoint_is_read(name, tmp_path, monkeypatch):
    if "TIKTOKEN_CACHE_DIR" not in os.environ:
        pytest.skip("needs GPT-2's tokenizer: TIKTOKEN_CACHE_DIR")
    monkeypatch.setattr(sys.modules["__main__"], "GPTConfig", GPTConfig, raising=False)
    save_peers(tmp_path)
    model, enc = train_gpt2.load_model(str(tmp_path / name))
    expected = peer_weights()
    assert enc.n_vocab == 50257 and model.config.n_layer == 2
    for key, weight in model.state_dict().items():
        zero = name == "ckpt.pt" and key.endswith("bias")
        assert torch.equal(weight, torch.zeros_like(weight) if zero else expected[key]), key


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.update(model_args=dict(c["model_args"], n_layer="2")),
        lambda c: c.update(model_args=dict(c["model_args"], vocab_size=2**40)),
        lambda c: c.update(model_args={}),
        lambda c: c.update(model={3: torch.zeros(2)}),
        lambda c: c["model"].update({"_orig_mod.lm_head.weight": torch.zeros(50304, 32)}),
        lambda c: c["model"].update({"_orig_mod.transformer.ln_f.weight": torch.tensor(3.0)}),
        lambda c: c["model"].update({"_orig_mod.transformer.ln_f.weight": torch.ones(32, dtype=torch.int32)}),
        lambda c: c["model"].pop("_orig_mod.transformer.ln_f.weight"),
    ],
)
def test_a_malformed_checkpoint_of_a_peer_is_one_line(change, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.modules["__main__"], "GPTConfig", GPTConfig, raising=False)
    save_peers(tmp_path)
    change_checkpoint(tmp_path / "ckpt.pt", change)
    assert status_of(sample.main, ["abc", "-m", str(tmp_path / "ckpt.pt")]) == 2
    assert error_of(capsys)
