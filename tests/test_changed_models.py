"""A changed model is a model: edits of train_gpt2.py as people make them, each through the whole life of a run."""

import contextlib
import itertools
import re
import runpy
import shutil
import sys
from pathlib import Path

import hellaswag
import numpy as np
import pytest
import sample
import torch
import train_gpt2
from plumbing.cli.console import UserError
from plumbing.data import tokenizers
from plumbing.run import checks, source_code
from plumbing.run.checkpoint import load_checkpoint
from plumbing.run.logs import read_starts

from corpora import make_here, train_small
from edits import (
    EDITS,
    GELU,
    LIVES,
    LORA,
    MASTER_WEIGHTS,
    NO_CACHE,
    NOTES,
    PLATEAU,
    POSITIONS,
    PROJECTION,
    ROTARY,
    SCALER,
    SECOND_LIVES,
    STEPS,
    STILL_GPT2,
    STOPPED_IN_VALIDATION,
    TABLES,
    WIDTH,
    WITH_ACTIVATION,
    Changed,
    import_trainer,
    recipe,
    write_trainer,
)
from harness import (
    ROOT,
    at_steps,
    examples_file,
    four_rows,
    greedy_without_cache,
    listing,
    log_lines,
    losses,
    patched,
    printed_commands,
    read_log,
    refusal_of,
    refused,
    refused_run,
    run,
    signalled,
    tiny_flags,
    tiny_model,
    train,
)

pytestmark = pytest.mark.gpt2


def live(path, folder, data, options):
    """Train, be stopped, continue, branch, fine-tune, sample, score, end: all with the model in the file at `path`."""
    trainer = import_trainer(path)
    examples = examples_file(folder, ["abc" * n + "d" for n in (1, 2, 7, 12, 13)])
    options = dict(hellaswag_every=4, hellaswag_data=examples, block_size=64, max_steps=8) | options

    def train(out, **changes):
        trainer.main(tiny_flags(data, folder / out, **options | changes))

    whole = folder / "whole"
    train("whole", sample_every=8)
    assert losses(whole)[-1] < losses(whole)[0] - 0.1
    signalled(5, "SIGTERM", 1, 0, tiny_flags(data, folder / "stopped", **options))
    train("stopped")
    assert log_lines(folder / "stopped") == log_lines(whole)
    train("branch", branch_from=whole / "model_00004.pt")
    assert log_lines(folder / "branch") == log_lines(whole)
    train("tuned", init_from=whole, max_steps=1)
    assert losses(folder / "tuned", "val")[0] == pytest.approx(losses(whole, "val")[-1], abs=1e-6)
    before = listing(whole)
    train("whole")
    assert listing(whole) == before, "finished, once and for all"
    check_use(trainer, whole, examples)


def check_use(trainer, run_folder, examples):
    """The run's model samples and scores as without a cache."""
    model, enc = trainer.load_model(str(run_folder))
    words = ["abcd", "-m", run_folder, "--temperature", 0, "--max-new-tokens", 70]
    status, text, _ = refusal_of(sample.main, *words)
    ids = itertools.takewhile(lambda i: i < 256, greedy_without_cache(model, list(b"abcd"), 70))
    assert status == 0
    assert text.rstrip("\n") == bytes(ids).decode(errors="replace")
    rendered = hellaswag.load_examples(examples, enc)
    sums = hellaswag.score(model, rendered, enc.n_vocab)[0]
    assert np.allclose(sums, four_rows(model, rendered), atol=1e-3)


@pytest.mark.parametrize("name", LIVES)
def test_a_changed_model_lives_the_life_of_a_run(name, changed, data, tmp_path):
    path = changed(LIVES[name]).path
    options = dict(dropout=0.1) if "field" in name else {}
    [said] = run(live, path, tmp_path, data, options)
    is_gpt2 = name in STILL_GPT2
    assert Path("whole/hf").exists() == is_gpt2
    assert (" was written. The model" in said) == (not is_gpt2)
    assert ("state that is not a tensor, transformer.h.0." in said) == (name == "buffers")
    assert "is not the cross-entropy of the logits" not in said


def test_state_that_is_no_tensor_reaches_all_ranks_of_a_run_that_is_resumed(changed, out):
    trainer = changed(EDITS["buffers"])
    options = dict(ranks=2, max_steps=6, val_every=0)
    trainer.train(**options)
    whole = trainer.log("out")
    (out / "model_00006.pt").unlink()
    trainer.train(**options)
    assert trainer.log("out") == whole


@pytest.mark.parametrize("begin", ["branch_from", "init_from"])
def test_what_begins_with_a_model_may_be_longer_where_no_weight_depends_on_it(begin, changed):
    """As with rotary embeddings: it learns from longer sequences. Its tables of positions are as long."""
    trainer = changed(ROTARY | TABLES)
    trainer.train("parent", max_steps=6, checkpoint_every=0)
    trainer.train(block_size=64, sequence_length=64, **{begin: "parent"})
    weights = trainer.saved("out")["model"]
    assert torch.equal(weights["transformer.h.1.attn.sines"], torch.arange(64)[:, None].sin())
    assert torch.equal(weights["transformer.h.1.attn.causal"], torch.ones(64, 64).tril().bool())
    assert losses("out", "val")[-1] < losses("parent", "val")[-1]


FEW_STEPS = dict(max_steps=2, checkpoint_every=1, val_every=0)


UNTIED = "lm_head.weight and transformer.wte.weight differ, but are one tensor here"
UNFIT = {  # {edit: {the flag with which this version takes its run: the error}}
    "untied": {"out_dir": UNTIED, "init_from": UNTIED},
    "a third group": {"out_dir": "instead of transformer.wte.weight in group 0 of AdamW"},
    "a field and dropout": {
        "out_dir": "dropout was 0, now 'unknown', window was None, now 'unknown'",
        "init_from": "has dropout, window, but GPTConfig has no such field",
    },
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_another_version_has_saved_and_does_not_fit_is_refused(name, changed, data, out, tmp_path):
    changed(EDITS[name], name="other.py").train(**FEW_STEPS)
    (out / "model_00002.pt").unlink()
    before = listing(tmp_path)
    for flag, reason in UNFIT[name].items():
        refused_run(FEW_STEPS | dict(data=data, out_dir="new") | {flag: out}, reason)
        assert listing(tmp_path) == before


@pytest.fixture(scope="module")
def other(folder):
    """A trainer of other code, other.py, and what it has printed of its run "finished"."""
    trainer = Changed(folder.parent, folder, EDITS["relu squared"], name="other.py")
    with contextlib.chdir(folder.parent):
        return trainer, trainer.train("finished", **FEW_STEPS)


def test_a_run_that_goes_on_with_other_code_names_both_and_is_not_exported(other, data, out):
    """Neither when it is finished, nor when it continues."""
    trainer, _ = other
    shutil.copytree(trainer.folder / "finished", out)
    copy = trainer.saved("finished", step=1)["code"]["other.py"]
    for step in (2, 1):
        said = train(data, out, **FEW_STEPS)
        assert "was trained by other code (train_gpt2.py, other.py)" in " ".join(said.split())
        assert copy in said
        if step == 2:
            assert f"Its model is in {out / 'model_00002.pt'}" in said
            (out / "model_00002.pt").unlink()
    assert (out / copy).read_bytes() == trainer.path.read_bytes()


@pytest.mark.parametrize("max_steps", [0, 1])
def test_weights_that_are_trained_further_may_be_those_of_other_code(max_steps, other, data, out):
    """But losses of a model are those of its code."""
    said = train(data, out, init_from=other[0].folder / "finished", max_steps=max_steps)
    assert ("was trained by other code" in said) == (max_steps == 0)


def test_samples_of_a_model_of_other_code_need_that_code(other, monkeypatch, tmp_path):
    """Which the command at the end of its run has."""
    trainer, said = other
    monkeypatch.chdir(trainer.folder)
    assert "Add --code other.py" in refused(sample.main, "abcd", "-m", "finished")
    [command] = printed_commands(said)
    assert refusal_of(sample.main, *command[2:])[0] == 0
    code = tmp_path / "other.py"
    code.write_text(trainer.path.read_text() + "# a word")
    _, text, notes = refusal_of(sample.main, *command[2:], "--code", code)
    assert "other code" in notes and "other code" not in text


MODULES = {
    "my_layers/__init__.py": "",
    "my_layers/functions.py": "import torch\n\nactivation = torch.relu\nif 0:\n    import old\n",
    "my_layers/mlp.py": "from .functions import activation\n",
}


@pytest.fixture
def with_modules(changed, tmp_path, monkeypatch):
    """A trainer that imports from a package beside it, and in that a module that no one can import."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # the file changes within a second
    (tmp_path / "my_layers").mkdir()
    for name, text in MODULES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "old.py").write_text("print 'of Python 2'")
    trainer = changed(
        {
            "import hellaswag\n": "import hellaswag\nfrom my_layers.mlp import activation\n",
            GELU: "self.c_proj(activation(self.c_fc(x)))",
        }
    )
    trainer.train(**FEW_STEPS)
    return trainer


def test_the_code_of_a_run_includes_the_modules_beside_its_file(with_modules, out, tmp_path):
    """Also those that they import. Each is kept, and a change of any is noticed and named."""
    code = with_modules.saved("out", step=2)["code"]
    assert list(code) == ["train_gpt2.py", *MODULES]
    for name, copy in code.items():
        assert (out / copy).read_bytes() == (tmp_path / name).read_bytes()
    assert read_starts(out / "run.txt")[-1]["code"] == " ".join(code.values())
    for names in ([], ["train_gpt2.py", "my_layers/functions.py"]):
        for name in names:
            with open(tmp_path / name, "a") as file:
                file.write("# a word\n")
        said = with_modules.train(**FEW_STEPS)
        assert (f"was trained by other code ({', '.join(names)}" in " ".join(said.split())) == bool(names)


@pytest.mark.parametrize(
    "name, text, reason",
    [
        ("it.pyc", "", "does not name a Python file"),
        ("leaves.py", "import sys\nsys.exit(0)\n", "ends the program"),
        ("plain.py", "", "has no load_model"),
    ],
)
def test_a_line_says_why_a_file_is_no_code_of_a_model(name, text, reason, tmp_path):
    path = tmp_path / name
    path.write_text(text)
    assert f"--code {path} {reason}" in refused(sample.main, "abc", "--code", path)
    path.unlink()
    assert "does not name a Python file" in refused(sample.main, "abc", "--code", path)


@pytest.fixture
def with_activation(changed, tmp_path):
    """A trainer in exp/ that imports my_activation, a module beside it and in other/."""
    for name, function in (("exp", "relu"), ("other", "tanh")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "my_activation.py").write_text(f"import torch\n\nof = torch.{function}\n")
    return changed(WITH_ACTIVATION, name="exp/train_my.py")


def run_script(path, folder, args):
    """python -P path args, with this folder in PYTHONPATH."""
    sys.path.insert(0, str(folder))
    sys.argv = [str(path), *args]
    runpy.run_path(str(path), run_name="__main__")


def test_a_run_has_the_code_that_was_imported(with_activation, out):
    """A module of the same name from elsewhere is named. The file is as it was when the flags were read, and not as it
    is seconds later, when torch is imported.
    """
    before = with_activation.path.read_bytes()
    [said] = run(run_script, with_activation.path, "other", with_activation.flags("out", max_steps=1))
    other = Path("other/my_activation.py").resolve()
    assert f"my_activation is the module in {other}, and not the one beside train_my.py" in said
    [copy] = out.glob("train_my-*.py")
    assert copy.read_bytes() == before != with_activation.path.read_bytes()


def test_with_code_a_module_beside_the_trainer_is_the_one_that_runs(with_activation, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path / "other")
    trainer = source_code.import_trainer(str(with_activation.path))
    beside = sys.modules.pop("my_activation")
    assert trainer.my_activation is beside
    assert Path(beside.__file__).parent == tmp_path / "exp"


@pytest.fixture
def examined(tmp_path, monkeypatch, capsys):
    """examined(edit): what is said of a new model with this edit before its first step."""
    monkeypatch.syspath_prepend(tmp_path)  # and the path is restored

    def examine(edit):
        trainer = source_code.import_trainer(str(write_trainer(tmp_path / "edited.py", edit)))
        model = trainer.GPT(trainer.GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=128, vocab_size=320))
        checks.examine(model, 257, 128, torch.randint(97, 113, (8, 16)))
        return "".join(capsys.readouterr())

    return examine


@pytest.mark.parametrize("name", NOTES)
def test_what_a_changed_model_cannot_keep_is_said(name, examined):
    edit, words = NOTES[name]
    assert words in examined(edit)


def test_nothing_is_said_of_gpt2(examined):
    assert examined({}) == ""


def test_random_numbers_in_evaluation_are_said_in_one_line(examined):
    [line] = examined({GELU: f"{GELU} * (1 + 0.1 * torch.randn(()))"}).splitlines()
    assert "draws random numbers in evaluation" in line


def test_dropout_on_another_number_of_ranks_is_no_lost_state(changed):
    trainer = changed(EDITS["a field and dropout"])
    trainer.kill("out", dropout=0.2)
    assert "before the run was stopped" not in trainer.train(ranks=2, dropout=0.2)


def test_a_mistake_in_the_model_shows_as_itself(changed, out):
    """And not as torch.compile's."""
    trainer = changed({PROJECTION: PROJECTION.replace("4", "3")})
    said = trainer.train(compile=True, ends=[1])
    assert "shapes cannot be multiplied" in said
    assert f"return {GELU}" in said
    assert "warning" not in said
    assert not out.exists()


def without_positions(model, config):
    """An optimizer of all parameters but the position embeddings."""
    rest = [(name, p) for name, p in model.named_parameters() if name != "transformer.wpe.weight"]
    return [torch.optim.AdamW(rest, lr=config.max_lr)]


def with_frozen_positions(model, config):
    model.transformer.wpe.requires_grad_(False)
    return without_positions(model, config)


def test_a_parameter_in_two_optimizers_is_refused():
    model = tiny_model()
    optimizers = [torch.optim.SGD(model.parameters()), torch.optim.SGD(model.transformer.wpe.parameters())]
    with pytest.raises(UserError, match="Two optimizers have the parameter transformer.wpe.weight"):
        checks.check_groups(model, optimizers)


def test_a_parameter_in_no_optimizer_is_named_and_trained_as_if_it_were_frozen(data, tmp_path):
    """Its gradient has no part in the norm."""
    said = {}
    for configure in (without_positions, with_frozen_positions):
        name = configure.__name__
        with patched(train_gpt2, "configure_optimizers", configure):
            said[name] = train(data, tmp_path / name, max_steps=2, val_every=0)
    assert "No optimizer has transformer.wpe.weight" in said["without_positions"]
    assert log_lines("without_positions") == log_lines("with_frozen_positions")


def test_adapters_train_over_frozen_weights(changed, data):
    """They are what the model makes of them, as no weights have them."""
    train(data, "base")
    trainer = changed(LORA)
    said = trainer.check_resume(trainer.kill, init_from="base")
    assert "The weights have nothing called transformer.h.0.mlp.low" in said
    after = trainer.saved("whole")["model"]
    for name, weight in trainer.saved("base")["model"].items():
        assert torch.equal(after[name], weight)
    assert after["transformer.h.0.mlp.low"].std() > 0.5
    assert after["transformer.h.0.mlp.up"].any()


def test_ranks_may_differ_where_the_trainer_says_so(changed, out):
    """As in DiLoCo, between two exchanges."""
    edit = {
        SCALER: "    raw_model.ranks_differ = True\n" + SCALER,
        STEPS: "    next(parts.raw_model.parameters()).grad *= 1 + world.rank\n" + STEPS,
    }
    changed(edit).train(ranks=2)
    assert len(losses(out)) == 12


def test_a_branch_whose_settings_change_the_model_is_examined_again(changed):
    trainer = changed(
        {
            WIDTH: WIDTH + "    flipped: int = 0  # 1: positions that depend on the number of tokens\n",
            f"{POSITIONS}  # (B, T, C)": f"{POSITIONS}  # (B, T, C)\n"
            "        x = x + self.config.flipped * self.transformer.wpe(pos.flip(0))",
        }
    )
    trainer.train("parent", max_steps=4)
    said = trainer.train("branch", branch_from="parent", max_steps=8, flipped=1)
    assert NO_CACHE in said


WEIGHT = "transformer.h.0.attn.c_attn.weight"
AVERAGE = recipe("**State of your own.**")


@pytest.fixture(scope="module")
def averaged(folder):
    """The folder of a run that averages its weights, which nothing interrupts."""
    Changed(folder.parent, folder, AVERAGE).train("averaged")
    return folder.parent / "averaged"


def test_an_average_of_the_weights_is_validated_and_saved(averaged):
    checkpoint = load_checkpoint(averaged / "model_00012.pt")
    average = checkpoint["own"]["ema"]
    assert average["n_averaged"] == 12
    assert not torch.equal(average[f"module.{WEIGHT}"], checkpoint["model"][WEIGHT])
    averages, plain = losses(averaged, "val_ema"), losses(averaged, "val")
    assert averages[0] == plain[0]
    assert averages[-1] > plain[-1] + 0.01, "it lags behind"


def test_two_ranks_average_the_weights(averaged, changed, out):
    changed(AVERAGE).train(ranks=2)
    assert losses(out, "val_ema") == pytest.approx(losses(averaged, "val_ema"), abs=1e-5)


@pytest.fixture
def killed(changed, out):
    """A trainer that averages the weights; its run was killed in step 6, after the checkpoint of step 4."""
    trainer = changed(AVERAGE)
    trainer.kill("out")
    (out / ".lock").unlink()  # a killed process leaves the file, without the lock
    return trainer


def test_an_average_of_the_weights_survives_a_kill_and_needs_code_that_has_it(averaged, killed, data, out):
    before = listing(out)
    refused_run(dict(data=data, out_dir=out), "cannot continue with", "ema")
    assert listing(out) == before
    assert "before the run was" not in killed.train()
    assert killed.log("out") == log_lines(averaged)


def test_a_branch_continues_the_average_of_its_parents_weights(averaged, changed):
    trainer = changed(AVERAGE)
    trainer.train("branch", branch_from=averaged / "model_00008.pt")
    assert trainer.log("branch") == log_lines(averaged)


def test_the_records_say_how_to_make_a_model_of_an_average(averaged):
    text = (ROOT / "records" / "README.md").read_text(encoding="utf-8")
    code = text.partition("turns the average into a checkpoint")[2].split("```python\n")[1].split("```")[0]
    exec(code.replace("log/ema/model_00400.pt", f"{averaged}/model_00012.pt"), {})
    model, _ = train_gpt2.load_model("average.pt")
    average = load_checkpoint(averaged / "model_00012.pt")["own"]["ema"]
    assert torch.equal(model.state_dict()[WEIGHT], average[f"module.{WEIGHT}"])


def test_float32_state_of_bfloat16_weights_is_not_rounded_on_resume(changed):
    """torch's load_state_dict would make it the weights' dtype."""
    trainer = changed(MASTER_WEIGHTS)
    trainer.check_resume(trainer.kill)


@pytest.mark.parametrize(
    "name, interrupt",
    [
        ("a count", "kill"),
        ("weights that setup makes", "stop"),
        ("an attribute that validation reads", "kill"),
    ],
)
def test_what_is_done_again_is_compared_with_what_it_was(name, interrupt, changed):
    """Where a start begins with other things than the last one had, only the log can tell."""
    edit, words = SECOND_LIVES[name]
    trainer = changed(edit)
    getattr(trainer, interrupt)("out", warmup_steps=0, val_every=2)
    before = trainer.log("out")
    said = trainer.train(warmup_steps=0, val_every=2)
    assert re.search(f"The {words} was .* before the run was stopped, and is", said)
    assert trainer.log("out")[: len(before)] != before


SCALARS = 'scalars |= {"rank": 0.1 + world.rank, "int": 16_777_217, "large": 1e300}'


def test_numbers_put_into_scalars_are_logged_as_rank_0_has_them(changed, out):
    changed({STEPS: f"    {SCALARS}\n{STEPS}"}).train(ranks=2, max_steps=2)
    for name, text in (("rank", "0.1"), ("int", "16777217"), ("large", "1e+300")):
        assert list(read_log(out, name).values()) == [text] * 2


@pytest.mark.parametrize("name", ["train", "lr", "val/docs", "val bpb", ""])
def test_a_name_that_a_number_cannot_have_is_refused(name, data, out):
    with at_steps(after=lambda step, parts, done: done.scalars.update({name: 1})):
        refused_run(dict(data=data, out_dir=out), f"{name!r} cannot be the name of a scalar")


@pytest.fixture(scope="module")
def with_tokenizers(folder):
    """A trainer, a run of it on bytes in "first", and shards of a BPE tokenizer in "other", where it trains now."""
    trainer = Changed(folder.parent, folder, EDITS["untied"], name="untied.py")
    trainer.train("first", max_steps=1)
    path = folder.parent / "small.tiktoken"
    tokenizers.write_encoding(train_small("gpt2"), path)
    text = folder.parent / "text.txt"
    text.write_text("abcdefghijklmnop the ponds " * 400)
    trainer.data = make_here(text, name=folder.parent / "other", tokenizer=str(path))
    return trainer


def test_a_model_begins_with_another_tokenizer_by_the_tokens_that_both_have(with_tokenizers):
    """Their rows are taken over, whatever their ids; a token that is new begins with the mean."""
    folder = with_tokenizers.folder
    still = dict(init_from=folder / "first", max_steps=1, max_lr=1e-12, min_lr=0, val_every=0)
    said = with_tokenizers.train("second", **still)
    assert "Of the 1,000 tokens of small-gpt2, 257 are also in bytes" in said
    trainer = source_code.import_trainer(str(with_tokenizers.path))
    model, enc = trainer.load_model(str(folder / "second"))
    first = with_tokenizers.saved("first", step=1)["model"]["lm_head.weight"]
    ids = [enc.encode_single_token(bytes([byte])) for byte in range(256)]
    expected = first.mean(0).repeat(1024, 1)
    expected[[*ids, enc.eot_token]] = first[:257]
    torch.testing.assert_close(model.lm_head.weight[:1000], expected[:1000], rtol=0, atol=1e-6)


@pytest.mark.parametrize("flag, max_steps", [("branch_from", 24), ("init_from", 0)])
def test_a_branch_and_an_evaluation_need_the_models_tokenizer(flag, max_steps, with_tokenizers):
    options = {flag: with_tokenizers.folder / "first", "max_steps": max_steps, "vocab_size": 1024}
    assert "have tokenizer small-gpt2, but the model uses bytes" in with_tokenizers.error("third", **options)


def test_an_evaluation_that_counts_counts_once_where_a_run_is_resumed_or_branched(changed):
    """As for a rate that falls if the validation loss does not: a checkpoint is of the moment before its evaluation."""
    trainer = changed(PLATEAU)
    trainer.check_resume(trainer.kill)
    trainer.train("branch", branch_from="whole/model_00008.pt")
    assert trainer.log("branch") == trainer.log("whole")
    for out in ("whole", "resumed", "branch"):
        assert trainer.saved(out)["own"]["plateau"]["last_epoch"] == 3, "of the evaluations of steps 0, 4 and 8"


def test_an_evaluation_in_which_a_run_is_stopped_counts_once(changed):
    """Step 8 has no other checkpoint than that of the stop."""
    trainer = changed(PLATEAU | STOPPED_IN_VALIDATION)
    options = dict(checkpoint_every=5, max_lr=1e-2, val_every=2)
    trainer.train("whole", resume=False, **options)
    assert "Stopped after 8 steps" in trainer.train("resumed", **options)
    trainer.train("resumed", **options)
    assert trainer.log("resumed") == trainer.log("whole")
