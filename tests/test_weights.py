"""What a run leaves, here and in its process, and what begins from it, from another run or from a peer's weights."""

import gc
import os
import shlex
import signal
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import sample
import torch
import train_gpt2
from plumbing.data import tokenizers
from plumbing.run.checkpoint import load_checkpoint

from harness import (
    TINY,
    Touch,
    at_steps,
    change_checkpoint,
    flags,
    losses,
    printed_commands,
    refusal_of,
    refused,
    status_of,
    tiny_flags,
    tiny_model,
    train,
)


@pytest.mark.gpt2
def test_a_checkpoint_is_plain_data_with_gpt2s_names(data, tmp_path):
    """Which torch's safe loader reads without any class of ours; no prefixes, weights tied in the file."""
    train(data, tmp_path / "out")
    path = tmp_path / "out" / "model_00012.pt"
    checkpoint = torch.load(path, weights_only=True)
    weights = checkpoint["model"]
    assert len(weights) == 2 + 2 * 12 + 2 + 1
    assert all(name.startswith(("transformer.", "lm_head.")) for name in weights)
    assert all(weight.dtype == torch.float32 for weight in weights.values())
    assert weights["lm_head.weight"].data_ptr() == weights["transformer.wte.weight"].data_ptr()
    assert checkpoint["step"] == 12 and checkpoint["tokenizer"] == "bytes"
    assert checkpoint["config"]["n_embd"] == 32 and checkpoint["config"]["vocab_size"] == 320
    assert checkpoint["loader"]["position"] == 12 * 8
    assert {"optimizer", "val_loss"} <= set(checkpoint)


@pytest.mark.gpt2
def test_the_command_line_trains_evaluates_samples_and_exports(data, tmp_path):
    """The real script in a real process; what it exports is what its last checkpoint holds."""
    from transformers import AutoTokenizer, GPT2LMHeadModel

    args = tiny_flags(data, "out", sample_every=6)
    command = [sys.executable, train_gpt2.__file__, *args]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert sum("| sample |" in line for line in done.stdout.splitlines()) == 8  # four each at steps 6 and 12
    out = tmp_path / "out"
    names = {"hf", "log.txt", "run.txt", "samples.txt", "model_00008.pt", "model_00012.pt"}
    [source] = out.glob("train_gpt2-*.py")
    assert {path.name for path in out.iterdir()} == {*names, source.name}
    assert source.read_bytes() == Path(train_gpt2.__file__).read_bytes()
    model, enc = train_gpt2.load_model(str(out))
    hf = GPT2LMHeadModel.from_pretrained(out / "hf").eval()
    idx = torch.tensor([enc.encode_ordinary("abcdefgh")])
    with torch.no_grad():
        assert torch.allclose(model(idx)[0][..., :257], hf(idx).logits, atol=1e-4)
    text, theirs = "to be, or n\u00f6t \U0001f600", AutoTokenizer.from_pretrained(out / "hf")
    assert theirs(text)["input_ids"] == list(text.encode()) and theirs.model_max_length == 32
    assert theirs.chat_template is None
    assert (hf.generation_config.eos_token_id, hf.generation_config.pad_token_id) == ([256], 256)


@pytest.mark.gpt2
def test_a_run_goes_on_from_the_weights_of_another(data, tmp_path):
    """--init-from a run's folder, its checkpoint or its export: the first loss is where the other ended.

    Of its 64 position embeddings the first 32 stay.
    """
    options = dict(max_lr=1e-2, checkpoint_every=0, vocab_size=384, block_size=64)
    train(data, tmp_path / "first", max_steps=40, val_every=40, **options)
    trained = losses(tmp_path / "first", "val")[-1]
    assert trained < losses(tmp_path / "first", "val")[0] - 1
    for number, source in enumerate(("first", "first/model_00040.pt", "first/hf")):
        out = tmp_path / f"second{number}"
        train(data, out, init_from=tmp_path / source, max_steps=1, val_every=1)
        # the export's vocabulary was cut and is padded again: those rows weigh a little
        assert losses(out, "val")[0] == pytest.approx(trained, abs=1e-5 if number < 2 else 0.05)


@pytest.mark.gpt2
def test_longer_sequences_begin_with_the_position_embeddings_once_more(data, tmp_path):
    """And more ids with the mean of the others; with fewer of both, the first stay."""
    train(data, tmp_path / "first", max_steps=8, val_every=0)
    still = dict(max_steps=1, max_lr=1e-12, min_lr=0, val_every=0)
    train(data, tmp_path / "long", init_from=tmp_path / "first", block_size=80, vocab_size=384, **still)
    train(data, tmp_path / "short", init_from=tmp_path / "long", block_size=16, vocab_size=320, **still)
    first, long, short = (
        load_checkpoint(next((tmp_path / name).glob("model_*.pt")))["model"] for name in ("first", "long", "short")
    )
    wpe, wte = (first[f"transformer.{name}.weight"] for name in ("wpe", "wte"))
    close = dict(rtol=0, atol=1e-6)
    longer = torch.cat([wpe, wpe, wpe[:16]])
    torch.testing.assert_close(long["transformer.wpe.weight"], longer, **close)
    wider = torch.cat([wte, wte.mean(0).expand(64, -1)])
    torch.testing.assert_close(long["lm_head.weight"], wider, **close)
    torch.testing.assert_close(short["transformer.wpe.weight"], wpe[:16], **close)
    torch.testing.assert_close(short["transformer.wte.weight"], wte, **close)


def test_fine_tuning_takes_the_block_size_of_a_shorter_model(data, tmp_path):
    """And resumes when that model is gone; a length that is asked for stays, and is refused."""
    options = {name: value for name, value in TINY.items() if name not in ("block_size", "sequence_length")}
    train(data, tmp_path / "first", max_steps=2, checkpoint_every=0)
    args = flags(data=data, out_dir=tmp_path / "out", init_from=tmp_path / "first", **options | {"max_steps": 4})
    assert status_of(train_gpt2.main, args) == 0
    shape = load_checkpoint(tmp_path / "out" / "model_00004.pt")["config"]
    assert shape["block_size"] == shape["sequence_length"] == 32
    train(data, tmp_path / "long", max_steps=1, block_size=200)
    rest = options | dict(preset="quickstart", init_from=tmp_path / "long", max_steps=1)
    assert status_of(train_gpt2.main, flags(data=data, out_dir=tmp_path / "short", **rest)) == 0
    shape = load_checkpoint(tmp_path / "short" / "model_00001.pt")["config"]
    assert (shape["block_size"], shape["sequence_length"]) == (200, 128), "no longer than the preset's"
    (tmp_path / "first").rename(tmp_path / "gone")
    assert "is finished" in refusal_of(train_gpt2.main, *args)[1]
    args = flags(data=data, out_dir=tmp_path / "two", init_from=tmp_path / "gone", sequence_length=64, **options)
    assert "--sequence-length 64" in refused(train_gpt2.main, *args)


class GPTConfig:
    """What build-nanogpt pickles into its checkpoints: an object of this class of the script that was run."""

    __module__ = "__main__"


@pytest.fixture
def peers(tmp_path, monkeypatch):
    """A folder with checkpoints of nanoGPT and build-nanogpt, whose weights are these, in their names."""
    monkeypatch.setattr(sys.modules["__main__"], "GPTConfig", GPTConfig, raising=False)
    # their tokenizer is not looked at, and GPT-2's need not be there
    monkeypatch.setattr(tokenizers, "get_encoding", lambda name: types.SimpleNamespace(name=name, n_vocab=50257))
    shape = dict(block_size=32, vocab_size=50304, n_layer=2, n_head=2, n_embd=32)
    weights = tiny_model(**shape).state_dict()
    wrapped = {}
    for name, weight in weights.items():
        if not name.endswith("bias"):
            wrapped[f"module._orig_mod.{name}"] = weight
    nanogpt = {"model": wrapped, "iter_num": 5, "config": {}}
    nanogpt["model_args"] = shape | {"bias": False, "dropout": 0.0}
    torch.save(nanogpt, tmp_path / "ckpt.pt")
    config = GPTConfig()
    vars(config).update(shape)
    torch.save({"model": weights, "config": config, "step": 5, "val_loss": 3.0}, tmp_path / "model_00005.pt")
    return tmp_path, weights


@pytest.mark.gpt2
@pytest.mark.parametrize("name", ["ckpt.pt", "model_00005.pt"])
def test_a_peers_checkpoint_is_read(name, peers):
    folder, expected = peers
    model, enc = train_gpt2.load_model(str(folder / name))
    assert enc.name == "gpt2" and model.config.n_layer == model.config.n_head == 2
    for key, weight in model.state_dict().items():
        zero = name == "ckpt.pt" and key.endswith("bias")
        assert torch.equal(weight, torch.zeros_like(weight) if zero else expected[key]), key


UNUSABLE = {
    "an n_head of 3": lambda c: c["model_args"].update(n_head=3),
    "transformer.ln_f.weight": lambda c: c["model"].pop("module._orig_mod.transformer.ln_f.weight"),
    "not finite": lambda c: [weight.fill_(torch.nan) for weight in c["model"].values()],
    "an n_head of None": lambda c: c["model_args"].clear(),
    "no embeddings": lambda c: c.pop("model"),
    "is not a checkpoint of train_gpt2.py": lambda c: c.update(model_args=None),
}


@pytest.mark.gpt2
@pytest.mark.parametrize("words", UNUSABLE)
def test_a_checkpoint_of_a_peer_that_cannot_be_used_is_one_line(words, peers):
    path = peers[0] / "ckpt.pt"
    change_checkpoint(path, UNUSABLE[words])
    assert words in refused(sample.main, "abc", "-m", path)


def test_the_newest_run_in_a_folder_of_runs_is_named(data, tmp_path):
    """Before there is a log/model_*.pt, people ask for log, where the quick start has made a folder of its own."""
    for name in ("log/old", "log/quickstart"):
        train(data, tmp_path / name, max_steps=1, val_every=0)
    os.utime(tmp_path / "log" / "old", (0, 0))
    newest = f"The newest run is in {tmp_path / 'log' / 'quickstart'}"
    assert newest in refused(sample.main, "Hi", "-m", tmp_path / "log")
    assert newest in refused(train_gpt2.main, *tiny_flags(data, tmp_path / "out", init_from=tmp_path / "log"))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int64", "uint8", "bool"])
def test_numbers_of_numpy_in_a_checkpoint_are_read(dtype, peers):
    """A fork of nanoGPT keeps its best loss so. What a file holds beside its model does not matter here."""
    path = peers[0] / "ckpt.pt"
    change_checkpoint(path, lambda content: content.update(best_val_loss=np.dtype(dtype).type(1)))
    assert train_gpt2.load_model(str(path))[0].config.n_layer == 2


def test_an_array_of_objects_in_a_checkpoint_is_refused(peers):
    path = peers[0] / "ckpt.pt"
    change_checkpoint(path, lambda content: content.update(x=np.array([Touch(peers[0] / "touched")])))
    assert "perhaps code, which is never run" in refused(sample.main, "abc", "-m", path)
    assert not (peers[0] / "touched").exists()


def test_a_copy_of_the_trainer_under_another_name_is_the_same_code(data, tmp_path):
    """And goes on with the run; one that was changed is named."""
    train(data, tmp_path / "out", max_steps=2)
    path = tmp_path / "out" / "model_00002.pt"
    [(name, copy)] = load_checkpoint(path)["code"].items()
    change_checkpoint(path, lambda c: c.update(code={"train_base.py": copy.replace("train_gpt2", "train_base")}))
    assert "other code" not in train(data, tmp_path / "next", init_from=path, max_steps=1)
    change_checkpoint(path, lambda c: c.update(code={name: "train_gpt2-01234567.py"}))
    assert "other code" in train(data, tmp_path / "other", init_from=path, max_steps=1)


def test_what_a_checkpoint_calls_its_code_is_shown_harmless(data, tmp_path):
    train(data, tmp_path / "out", max_steps=2)
    path = tmp_path / "out" / "model_00002.pt"
    change_checkpoint(path, lambda c: c.update(code={"\x1b[31mtrain.py": "\x9b31mtrain-01234567.py"}))
    said = train(data, tmp_path / "next", init_from=path, max_steps=1)
    assert "\\x1b[31mtrain.py" in said and "\\x9b31mtrain-01234567.py" in said
    assert not {"\x1b", "\x9b"} & set(said)


def test_a_run_ends_well_where_transformers_cannot_be_imported(data, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    said = train(data, tmp_path / "out", max_steps=2)
    assert f"note: There is no {tmp_path / 'out' / 'hf'}. import of transformers halted" in said


def test_nothing_of_a_run_stays_in_the_process_that_has_called_main(data, tmp_path, monkeypatch):
    """No tensor, no handler of signals; an error while the folder is opened leaves nothing behind, either."""
    monkeypatch.setattr(gc, "freeze", lambda: None)  # in the tests what is frozen stays so
    numbers = [signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGINT)]
    alive = []
    handlers = []
    (tmp_path / "run" / "run.txt").mkdir(parents=True)
    (tmp_path / "samples").mkdir()
    (tmp_path / "mine.txt").touch()
    (tmp_path / "samples" / "samples.txt").symlink_to(tmp_path / "mine.txt")
    for out in ("first", "second", "run", "samples", "third"):
        args = tiny_flags(data, tmp_path / out, max_steps=2, val_every=1)
        refused(train_gpt2.main, *args) if out in ("run", "samples") else train_gpt2.main(args)
        gc.collect()
        alive.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
        handlers.append([signal.getsignal(number) for number in numbers])
    assert len(set(alive)) == 1 and handlers == handlers[:1] * 5
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_from_python_the_command_is_that_of_what_was_passed(data, tmp_path, monkeypatch):
    """In run.txt and after a stop, whatever the process was started with."""
    monkeypatch.setattr("sys.argv", ["a_notebook.py", "--its-own", "7"])
    args = tiny_flags(data, tmp_path / "out", sample_prompt="It's")
    with at_steps(lambda step, parts: os.kill(os.getpid(), signal.SIGTERM)):
        said = train(data, tmp_path / "out", sample_prompt="It's")
    command = ["python", os.path.relpath(train_gpt2.__file__), *args]
    assert printed_commands(said) == [command]
    [line] = [
        line for line in (tmp_path / "out" / "run.txt").read_text().splitlines() if line.startswith("command: ")
    ]
    assert shlex.split(line)[1:] == command


def test_a_run_from_before_a_setting_existed_continues_with_its_default(data, tmp_path):
    train(data, tmp_path / "out", max_steps=4)
    for path in (tmp_path / "out").glob("model_*.pt"):
        change_checkpoint(path, lambda content: content["config"].pop("muon_momentum"))
    train(data, tmp_path / "longer", branch_from=tmp_path / "out", max_steps=6)
    assert "is finished after 4 steps" in train(data, tmp_path / "out", max_steps=4)


def test_a_vocabulary_that_was_typed_is_not_another_one(data, tmp_path):
    train(data, tmp_path / "first", max_steps=1, val_every=0)
    for number, sizes in enumerate([dict(vocab_size=258), dict(vocab_size=258, init_from=tmp_path / "first")]):
        train(data, tmp_path / str(number), max_steps=1, val_every=0, **sizes)
        saved = load_checkpoint(tmp_path / str(number) / "model_00001.pt")
        assert saved["config"]["vocab_size"] == len(saved["model"]["lm_head.weight"]) == 258
