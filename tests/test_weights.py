"""What a run leaves, here and in its process, and what begins from it, from another run or from a peer's weights."""

import gc
import os
import re
import shlex
import shutil
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
from plumbing.run.checkpoint import PeerConfig, load_checkpoint, unpickle
from plumbing.run.logs import read_starts

from harness import (
    Touch,
    assert_same_tensors,
    at_steps,
    change_checkpoint,
    examples_file,
    losses,
    printed_commands,
    refusal_of,
    refused,
    tiny_flags,
    tiny_model,
    train,
)

gpt2 = pytest.mark.gpt2


@gpt2
def test_a_checkpoint_is_plain_data_with_gpt2s_names(finished):
    """Which torch's safe loader reads without any class of ours; no prefixes, weights tied in the file."""
    checkpoint = torch.load(finished, weights_only=True)
    weights = checkpoint["model"]
    assert len(weights) == 2 + 2 * 12 + 2 + 1
    assert all(name.startswith(("transformer.", "lm_head.")) for name in weights)
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert weights["lm_head.weight"].data_ptr() == weights["transformer.wte.weight"].data_ptr()
    assert {"optimizer", "loader", "val_loss"} <= checkpoint.keys()
    assert (checkpoint["step"], checkpoint["tokenizer"]) == (1, "bytes")
    assert {"n_embd": 32, "vocab_size": 320}.items() <= checkpoint["config"].items()


@pytest.fixture(scope="module")
def scripted(folder):
    """The folder of a run of the real script in a real process, of which nothing is noted."""
    out = folder.parent / "out"
    # it is longer than the sequences, and not than the block
    examples = examples_file(folder.parent, ["A man is on a roof"])
    args = tiny_flags(folder, out, sample_every=12, hellaswag_every=12, hellaswag_data=examples)
    done = subprocess.run([sys.executable, train_gpt2.__file__, *args], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "note: " not in done.stdout
    return out


def test_a_run_leaves_its_checkpoints_texts_code_and_model(scripted):
    [source] = scripted.glob("train_gpt2-*.py")
    names = {"hf", "log.txt", "run.txt", "samples.txt", "model_00008.pt", "model_00012.pt", source.name}
    assert {path.name for path in scripted.iterdir()} == names
    assert source.read_bytes() == Path(train_gpt2.__file__).read_bytes()


@gpt2
def test_transformers_has_the_last_checkpoints_model_and_its_tokenizer(scripted):
    """Which it would train without dropout, as the run did."""
    from transformers import AutoTokenizer, GPT2LMHeadModel

    model, _ = train_gpt2.load_model(str(scripted))
    hf = GPT2LMHeadModel.from_pretrained(scripted / "hf").train()
    enc = AutoTokenizer.from_pretrained(scripted / "hf")
    text = "to be, or n\u00f6t \U0001f600"
    ids = enc(text)["input_ids"]
    assert ids == list(text.encode())
    with torch.no_grad():
        expected, _ = model(torch.tensor([ids]))
        torch.testing.assert_close(hf(torch.tensor([ids])).logits, expected[..., :257], atol=1e-4, rtol=0)
    assert (enc.model_max_length, enc.chat_template) == (32, None)
    ends = hf.generation_config
    assert (ends.eos_token_id, ends.pad_token_id) == ([256], 256)


@pytest.fixture(scope="module")
def trained(folder):
    """The folder of a run that has learned something."""
    out = folder.parent / "trained"
    train(folder, out, max_steps=20, val_every=20, max_lr=2e-2, checkpoint_every=0, vocab_size=384, block_size=64)
    first, last = losses(out, "val")
    assert last < first - 1
    return out


@gpt2
@pytest.mark.parametrize("name, limit", [("", 1e-5), ("model_00020.pt", 1e-5), ("hf", 0.05)])
def test_a_run_starts_from_the_weights_of_another(name, limit, trained, folder):
    """Its first loss is where the other ended. Of the 64 position embeddings the first 32 stay.

    The export has 257 ids, and is padded again: those rows weigh a little.
    """
    train(folder, "out", init_from=trained / name, max_steps=1)
    assert losses("out", "val")[0] == pytest.approx(losses(trained, "val")[-1], abs=limit)


@gpt2
@pytest.mark.parametrize("positions, ids", [(80, 448), (16, 320)])
def test_surplus_positions_and_ids_are_dropped_and_new_ones_made_of_the_others(positions, ids):
    """New positions are the first ones once more, and new ids the mean of the others."""
    weights = tiny_model(block_size=64, vocab_size=384).state_dict()
    extended = tiny_model(seed=1, block_size=positions, vocab_size=ids).extend(weights)
    wpe, wte = weights["transformer.wpe.weight"], weights["transformer.wte.weight"]
    assert torch.equal(extended["transformer.wpe.weight"], torch.cat([wpe, wpe])[:positions])
    rows = torch.cat([wte, wte.mean(0).expand(64, -1)])[:ids]
    assert torch.equal(extended["transformer.wte.weight"], rows)
    assert torch.equal(extended["lm_head.weight"], rows)


def test_a_run_needs_the_model_that_it_started_from_no_more(finished, folder):
    """Whose folder is the same with a slash behind it."""
    shutil.copytree(finished.parent, "first")
    train(folder, "out", init_from="first", max_steps=1)
    shutil.rmtree("first")
    assert "is finished" in train(folder, "out", init_from="first/", max_steps=1)


class GPTConfig:
    """What build-nanogpt pickles into its checkpoints: an object of this class of the script that was run."""

    __module__ = "__main__"


@pytest.fixture
def peers(monkeypatch):
    """Write checkpoints of nanoGPT and build-nanogpt, whose weights are these, in their names."""
    monkeypatch.setattr(sys.modules["__main__"], "GPTConfig", GPTConfig, raising=False)
    # their tokenizer is not looked at, and GPT-2's need not be there
    monkeypatch.setattr(tokenizers, "get_encoding", lambda name: types.SimpleNamespace(name=name, n_vocab=50257))
    model = tiny_model(vocab_size=50304)
    shape = vars(model.config)
    weights = model.state_dict()
    nanogpts = {name: weight for name, weight in weights.items() if not name.endswith("bias")}
    nanogpt = {
        "model": {f"module._orig_mod.{name}": weight for name, weight in nanogpts.items()},
        "model_args": shape | {"bias": False, "dropout": 0.0},
        "config": {},
    }
    torch.save(nanogpt, "ckpt.pt")
    config = GPTConfig()
    vars(config).update(shape)
    # people keep their best loss as a number of NumPy
    numbers = [np.dtype(name).type(1) for name in ("float64", "float32", "float16", "int64", "uint8", "bool")]
    torch.save({"model": weights, "config": config, "best": numbers}, "model_00005.pt")
    return weights


@gpt2
@pytest.mark.parametrize("name", ["ckpt.pt", "model_00005.pt"])
def test_a_peers_checkpoint_is_read(name, peers, output):
    """nanoGPT's has no biases, which is the same as biases of 0, and another GELU."""
    is_nanogpts = name == "ckpt.pt"
    for key, weight in peers.items():
        if is_nanogpts and key.endswith("bias"):
            weight.zero_()
    model, enc = train_gpt2.load_model(name)
    assert ("nanoGPT computes GELU exactly" in output()) == is_nanogpts
    assert (enc.name, model.config.n_head, model.training) == ("gpt2", 2, False)
    assert_same_tensors(dict(model.state_dict()), dict(peers))


@pytest.mark.parametrize("module", ["train_gpt2", "model"])
def test_a_peers_script_may_have_been_imported_by_any_of_its_names(module, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "model", types.ModuleType("model"))
    monkeypatch.setattr(sys.modules[module], "GPTConfig", GPTConfig, raising=False)
    monkeypatch.setattr(GPTConfig, "__module__", module)
    torch.save(GPTConfig(), tmp_path / "config.pt")
    monkeypatch.undo()
    assert isinstance(unpickle(tmp_path / "config.pt"), PeerConfig)


@gpt2
def test_names_of_wrappers_are_left_out_wherever_they_stand(peers):
    """As block by block they are compiled or shared out. And others call the weights model_state_dict."""
    wrapper = "module._orig_mod._fsdp_wrapped_module._checkpoint_wrapped_module."
    weights = {wrapper + re.sub(r"(\.h\.\d+\.)", rf"\1{wrapper}", name): peers[name] for name in peers}
    torch.save({"model_args": {"n_head": 2}, "model_state_dict": weights}, "ckpt.pt")
    assert_same_tensors(dict(train_gpt2.load_model("ckpt.pt")[0].state_dict()), dict(peers))


UNUSABLE = {
    "an n_head of 3": lambda c: c["model_args"].update(n_head=3),
    "transformer.ln_f.weight": lambda c: c["model"].pop("module._orig_mod.transformer.ln_f.weight"),
    "not finite": lambda c: [weight.fill_(torch.nan) for weight in c["model"].values()],
    "an n_head of None": lambda c: c["model_args"].clear(),
    "no embeddings or no blocks under GPT-2's names, but no weights": lambda c: c.pop("model"),
    "but x.0, x.1, x.2": lambda c: c.update(model={f"x.{i}": torch.zeros(2) for i in range(9)}),
    "is not a checkpoint of train_gpt2.py": lambda c: c.update(model_args=None),
    "perhaps code, which is never run": lambda c: c.update(x=np.array([Touch("touched")])),
}


@gpt2
@pytest.mark.parametrize("words", UNUSABLE)
def test_a_checkpoint_of_a_peer_that_cannot_be_used_is_one_line(words, peers):
    change_checkpoint("ckpt.pt", UNUSABLE[words])
    assert words in refused(sample.main, "abc", "-m", "ckpt.pt")
    assert not Path("touched").exists()


def test_the_newest_run_in_a_folder_of_runs_is_named():
    """Before there is a log/model_*.pt, people ask for log, where the quick start has made its own folder."""
    for name in ("old", "quickstart"):
        path = Path("log", name, "model_00001.pt")
        path.parent.mkdir(parents=True)
        path.touch()
    os.utime("log/old", (0, 0))
    assert re.search("The newest run is in log.quickstart", refused(sample.main, "Hi", "-m", "log"))


@pytest.fixture(scope="module")
def finished(folder):
    """A checkpoint of a run."""
    train(folder, folder.parent / "finished", max_steps=1)
    return folder.parent / "finished" / "model_00001.pt"


def test_a_copy_of_the_trainer_under_another_name_is_the_same_code(finished, folder):
    path = shutil.copy(finished, ".")
    [copy] = load_checkpoint(path)["code"].values()
    code = {"train_base.py": copy.replace("gpt2", "base")}
    change_checkpoint(path, lambda content: content.update(code=code))
    assert "other code" not in train(folder, "out", init_from=path, max_steps=0)


def test_what_a_checkpoint_and_a_folder_hold_steers_no_terminal(finished, folder, out):
    path = shutil.copy(finished, ".")

    def change(content):
        content["config"].update(sample_prompt="\x1b[2J", init_from="\x9b2J")
        content["code"] = {"\x1b[31mtrain.py": "\x9b31mtrain-01234567.py"}

    change_checkpoint(path, change)
    said = train(folder, out, branch_from=path, max_steps=2, preset="gpt2")
    (out / "\x1b[31mred-01234567.py").touch()  # the name of a trainer's copy
    said += train(folder, out, max_steps=1, resume=False)
    for text in ("sample_prompt \\x1b[2J", "\\x1b[31mtrain.py", "\\x9b31mtrain-01234567.py", "\\x1b[31mred-01234567"):
        assert text in said
    assert not {"\x1b", "\x9b"} & set(said)


def test_a_run_ends_well_where_transformers_cannot_be_imported(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    _, said, _ = refusal_of(train_gpt2.main, *tiny_flags(folder, "out", max_steps=2))
    assert re.search("note: No out.hf was written. import of transformers halted", said)


def test_no_tensor_of_a_run_stays_in_the_process(folder, monkeypatch):
    monkeypatch.setattr(gc, "freeze", lambda: None)  # in the tests what is frozen stays so
    counts = set()
    for name in ("first", "second"):
        train_gpt2.main(tiny_flags(folder, name, max_steps=1))
        gc.collect()
        counts.add(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
    assert len(counts) == 1


def test_from_python_the_command_is_that_of_the_words_that_were_passed(folder, monkeypatch):
    """In run.txt and after a stop, whatever the process was started with."""
    monkeypatch.setattr("sys.argv", ["a_notebook.py", "--its-own", "7"])
    options = dict(sample_prompt='It\'s "quoted"')
    with at_steps(lambda step, parts: os.kill(os.getpid(), signal.SIGTERM)):
        said = train(folder, "out", **options)
    command = ["python", os.path.relpath(train_gpt2.__file__), *tiny_flags(folder, "out", **options)]
    assert printed_commands(said) == [command]
    assert shlex.split(read_starts(Path("out/run.txt"))[0]["command"]) == command
