"""A changed model is a model: edits of train_gpt2.py as people make them, each through the whole life of a run."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import hellaswag
import numpy as np
import pytest
import sample
import torch
import train_gpt2
from plumbing.data import tokenizers
from plumbing.run import source_code
from plumbing.run.checkpoint import load_checkpoint
from plumbing.run.logs import read_starts

import edits
from corpora import make, train_small
from edits import changed_trainer, edited_run, error_of_edited, in_changed, train_changed
from harness import (
    KILLED,
    ROOT,
    error_in,
    examples_file,
    four_rows,
    greedy_without_cache,
    killed_at,
    listing,
    log_lines,
    losses,
    patched,
    read_log,
    refusal_of,
    refused,
    refused_run,
    run,
    signalled,
    tiny_flags,
    train,
)

pytestmark = pytest.mark.gpt2


def live(path, folder, data, options):
    """Train, be stopped, continue, branch, fine-tune, sample, score, end: all with the model in the file at `path`."""
    trainer = edits.import_trainer(path)
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
    """The run's model samples and scores as without a cache, and is exported as a model with the same logits."""
    model, enc = trainer.load_model(str(run_folder))
    assert vars(model.config).items() <= load_checkpoint(run_folder / "model_00008.pt")["config"].items()
    ids = itertools.takewhile(lambda i: i < 256, greedy_without_cache(model, list(b"abcd"), 70))
    words = ["abcd", "-m", run_folder, "--temperature", 0, "--max-new-tokens", 70]
    status, text, _ = refusal_of(sample.main, *words)
    assert (status, text.rstrip("\n")) == (0, bytes(ids).decode(errors="replace"))
    rendered = hellaswag.load_examples(examples, enc)
    sums = hellaswag.score(model, rendered, enc.n_vocab)[0]
    assert np.allclose(sums, four_rows(model, rendered), atol=1e-3)
    if (run_folder / "hf").exists():  # transformers reads it
        theirs = trainer.GPT.from_pretrained(run_folder / "hf").eval()
        idx = torch.arange(60)[None]
        torch.testing.assert_close(theirs(idx)[0], model(idx)[0][..., :257], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", edits.LIVES)
def test_a_changed_model_lives_the_life_of_a_run(name, data, tmp_path):
    path = changed_trainer(tmp_path / "train_gpt2.py", edits.LIVES[name])
    options = dict(dropout=0.1) if "field" in name else {}
    [said] = run(live, path, tmp_path, data, options)
    is_gpt2 = name in edits.STILL_GPT2
    assert (tmp_path / "whole" / "hf").exists() == is_gpt2
    assert ("note: There is no " in said) == (not is_gpt2)
    assert ("state that is no tensor, transformer.h.0." in said) == (name == "buffers")
    assert "is not the cross-entropy of the logits" not in said


def test_what_begins_with_a_model_may_be_longer_where_no_weight_depends_on_it(data, tmp_path):
    """As with rotary embeddings: a branch learns from longer sequences. Its tables of positions are as long."""
    path = changed_trainer(tmp_path / "train_rotary.py", edits.ROTARY | edits.TABLES)
    edited_run(path, data, tmp_path / "parent")
    for begin in ("branch_from", "init_from"):
        options = {"block_size": 64, "sequence_length": 64, "max_steps": 24, begin: tmp_path / "parent"}
        said = edited_run(path, data, tmp_path / begin, **options)
        last = load_checkpoint(tmp_path / begin / "model_00024.pt")
        positions, name = torch.arange(64), "transformer.h.1.attn."
        assert torch.equal(last["model"][f"{name}sines"], positions[:, None].sin())
        assert torch.equal(last["model"][f"{name}causal"], torch.ones(64, 64).tril().bool())
        assert losses(tmp_path / begin, "val")[-1] < losses(tmp_path / "parent", "val")[-1]
        assert ("differs from its parent in sequence_length" in " ".join(said.split())) == (begin == "branch_from")
        assert last["optimizer"][0]["state"][0]["step"] == 24  # of which a branch has 12 of its parent's


FEW_STEPS = dict(max_steps=2, checkpoint_every=1, val_every=0)


@pytest.fixture
def unfinished(request, data, out, tmp_path):
    """The folder of a run of the edited model that the test's parameter names, with its first checkpoint alone."""
    path = changed_trainer(tmp_path / "other.py", edits.EDITS[request.param])
    edited_run(path, data, out, **FEW_STEPS)
    (out / "model_00002.pt").unlink()
    return out


UNFIT = {  # {edit: the error where this version continues its run}
    "untied": "lm_head.weight and transformer.wte.weight differ, but are one tensor here",
    "a third group": "instead of transformer.wte.weight in group 0 of AdamW",
    "a field and dropout": "dropout was 0, now 'unknown', window was None, now 'unknown'",
}


@pytest.mark.parametrize("unfinished, reason", UNFIT.items(), indirect=["unfinished"], ids=UNFIT)
def test_a_checkpoint_of_another_version_that_does_not_fit_is_refused(unfinished, reason, data):
    before = listing(unfinished)
    refused_run(FEW_STEPS | dict(data=data, out_dir=unfinished), reason)
    assert listing(unfinished) == before


FIRST_WEIGHTS = {
    "untied": UNFIT["untied"],
    "a field and dropout": "has dropout, window, but GPTConfig has no such field",
}


@pytest.mark.parametrize("unfinished, reason", FIRST_WEIGHTS.items(), indirect=["unfinished"], ids=FIRST_WEIGHTS)
def test_weights_of_another_version_that_do_not_fit_are_refused(unfinished, reason, data, tmp_path):
    refused_run(FEW_STEPS | dict(data=data, out_dir=tmp_path / "new", init_from=unfinished), reason)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("unfinished", ["relu squared"], indirect=True)
def test_a_run_that_continues_with_other_code_names_both(unfinished, data, tmp_path):
    said = train(data, unfinished, **FEW_STEPS)
    copy = load_checkpoint(unfinished / "model_00001.pt")["code"]["other.py"]
    assert "was trained by other code than runs now (train_gpt2.py, other.py)" in " ".join(said.split())
    assert copy in said and (unfinished / copy).read_bytes() == (tmp_path / "other.py").read_bytes()


@pytest.mark.parametrize("unfinished", ["relu squared"], indirect=True)
def test_samples_of_a_model_of_other_code_need_that_code(unfinished, tmp_path):
    words = ["abcd", "-m", unfinished, "--max-new-tokens", 3]
    assert "Add --code other.py" in refused(sample.main, *words)
    assert refusal_of(sample.main, *words, "--code", tmp_path / "other.py")[0] == 0


def test_a_finished_run_of_other_code_is_not_exported_as_the_model_of_this_one(data, out, tmp_path):
    path = changed_trainer(tmp_path / "train_relu2.py", edits.EDITS["relu squared"])
    edited_run(path, data, out, max_steps=2)
    said = " ".join(train(data, out, max_steps=2).split())
    assert "is finished" in said and "was trained by other code than runs now (train_gpt2.py, train_relu2.py)" in said
    assert "Its model is in" in said and not (out / "hf").exists()


MODULES = {
    "my_layers/__init__.py": "",
    "my_layers/functions.py": "import torch\n\nactivation = torch.relu\nif 0:\n    import old\n",
    "my_layers/mlp.py": "from .functions import activation\n",
}


def write_with_modules(folder):
    """A trainer that imports from a package beside it, and in that a module that no one can import."""
    (folder / "my_layers").mkdir()
    for name, text in MODULES.items():
        (folder / name).write_text(text)
    (folder / "old.py").write_text("print 'of Python 2'")
    changes = {
        "import hellaswag\n": "import hellaswag\nfrom my_layers.mlp import activation\n",
        edits.GELU: "self.c_proj(activation(self.c_fc(x)))",
    }
    return changed_trainer(folder / "train_gpt2.py", changes)


def test_modules_beside_the_file_belong_to_its_code(data, tmp_path, monkeypatch):
    """They are kept with it, also those that they import, and a change of any byte is noticed, by the file's name."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # the file changes within a second
    path, out = write_with_modules(tmp_path), tmp_path / "out"
    args = tiny_flags(data, out)
    run(train_changed, path, args)
    for changed in ([], ["my_layers/functions.py"], ["train_gpt2.py", "my_layers/functions.py"]):
        if changed:
            with open(tmp_path / changed[0], "a") as file:
                file.write("# a word\n")
        (out / "model_00012.pt").unlink()
        [said] = run(train_changed, path, args)
        assert ("was trained by other code than runs now" in said) == bool(changed)
        assert ", ".join(changed) in said
        code = load_checkpoint(out / "model_00012.pt")["code"]
        assert list(code) == ["train_gpt2.py", *MODULES]
        for name, copy in code.items():
            assert (out / copy).read_bytes() == (tmp_path / name).read_bytes()
        assert read_starts(out / "run.txt")[-1]["code"] == " ".join(code.values())


@pytest.mark.parametrize(
    "name, reason", [("it.pyc", "is not a P"), ("leaves.py", "ends the program"), ("no.py", "is not a P")]
)
def test_a_line_says_why_a_file_is_no_code_of_a_model(name, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("it.pyc").write_bytes((ROOT / "train_gpt2.py").read_bytes())
    Path("leaves.py").write_text("import sys\nsys.exit(0)\n")
    assert f"--code {name} {reason}" in refused(sample.main, "abc", "--code", name)


def write_with_activation(folder):
    """A trainer in exp/ that imports my_activation, a module beside it and in other/."""
    for name, function in (("exp", "relu"), ("other", "tanh")):
        (folder / name).mkdir()
        (folder / name / "my_activation.py").write_text(f"import torch\n\nof = torch.{function}\n")
    return changed_trainer(folder / "exp" / "train_my.py", edits.WITH_ACTIVATION)


def test_a_module_of_the_same_name_from_elsewhere_is_named_in_training(data, out, tmp_path):
    """The copy is of the file as it was when the flags were read, and not seconds later, when torch is imported."""
    path = write_with_activation(tmp_path)
    before = path.read_bytes()
    paths = os.pathsep.join([str(tmp_path / "other"), str(ROOT)])
    command = [sys.executable, "-P", path, *tiny_flags(data, out, max_steps=1)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths})
    other = tmp_path / "other" / "my_activation.py"
    assert f"my_activation is the module in {other}, and not the one beside train_my.py" in done.stdout, done.stderr
    [copy] = (out).glob("train_my-*.py")
    assert copy.read_bytes() == before != path.read_bytes()


def train_as_code(path, args):
    source_code.import_trainer(str(path)).main(args)


def sample_behind(folder, words):
    """Sample, as with this folder in PYTHONPATH."""
    sys.path.insert(0, str(folder))
    sample.main(words)


def test_with_code_a_module_beside_the_trainer_is_the_one_that_runs(data, out, tmp_path):
    path = write_with_activation(tmp_path)
    run(train_as_code, path, tiny_flags(data, out, max_steps=1))
    words = ["abc", "-m", str(out), "--temperature", "0", "--max-new-tokens", "8", "--code", str(path)]
    [said] = run(sample_behind, tmp_path / "other", words)
    assert said == run(sample_behind, tmp_path / "exp", words)[0]


@pytest.mark.parametrize("name", edits.NOTES)
def test_what_a_changed_model_cannot_keep_is_said(name, data, out, tmp_path):
    changes, words = edits.NOTES[name]
    path = changed_trainer(tmp_path / "train_gpt2.py", changes)
    options = dict(hellaswag_every=1, hellaswag_data=examples_file(tmp_path, ["abc" * n for n in (1, 7)]))
    said = edited_run(path, data, out, block_size=128, max_steps=1, **options)
    assert words in said


def test_a_mistake_in_the_model_shows_as_itself(data, out, tmp_path):
    """And not as torch.compile's."""
    path = changed_trainer(tmp_path / "mistake.py", {edits.PROJECTION: edits.PROJECTION.replace("4", "3")})
    [said] = run(train_changed, path, tiny_flags(data, out, compile=True), ends=[1])
    assert "shapes cannot be multiplied" in said and f"return {edits.GELU}" in said
    assert "warning" not in said and not (out).exists()


def test_a_parameter_that_no_rank_uses_is_named(data, out, tmp_path):
    path = changed_trainer(tmp_path / "unused.py", {edits.POSITIONS: "self.transformer.wte(idx)"})
    said, _ = run(train_changed, path, tiny_flags(data, out), ranks=2, ends=[2, 2])
    assert "A step does not use 1 parameter, such as transformer.wpe.weight" in error_in(said)
    assert not (out).exists()


def two_with_one_parameter(model, config):
    """Two optimizers that both have the position embeddings."""
    wpe = [("transformer.wpe.weight", model.transformer.wpe.weight)]
    return [*whole_configure(model, config), torch.optim.SGD(wpe, lr=config.max_lr)]


def without_positions(model, config):
    """An optimizer of all parameters but the position embeddings."""
    rest = [(name, p) for name, p in model.named_parameters() if name != "transformer.wpe.weight"]
    return [torch.optim.AdamW(rest, lr=config.max_lr)]


whole_configure = train_gpt2.configure_optimizers


def test_a_parameter_in_two_optimizers_is_refused(data, out):
    with patched(train_gpt2, "configure_optimizers", two_with_one_parameter):
        line = "Two optimizers have the parameter transformer.wpe.weight"
        refused_run(dict(data=data, out_dir=out), line)


def test_a_parameter_in_no_optimizer_is_named(data, out):
    with patched(train_gpt2, "configure_optimizers", without_positions):
        said = train(data, out, max_steps=1)
    assert "No optimizer has transformer.wpe.weight" in said


def test_a_parameter_in_no_optimizer_does_not_count_in_the_gradient_norm(data, tmp_path):
    """As if it were frozen."""

    def frozen(model, config):
        model.transformer.wpe.requires_grad_(False)
        return without_positions(model, config)

    for name, configure in (("missing", without_positions), ("frozen", frozen)):
        with patched(train_gpt2, "configure_optimizers", configure):
            train(data, tmp_path / name)
    assert log_lines(tmp_path / "missing") == log_lines(tmp_path / "frozen")


@pytest.mark.parametrize("line", edits.REFUSED)
def test_state_that_no_checkpoint_can_hold_is_named_before_the_first_step(line, data, out, tmp_path):
    path = changed_trainer(tmp_path / "train_gpt2.py", edits.REFUSED[line])
    assert line in error_of_edited(path, data, out)
    assert not (out).exists()


def test_adapters_train_over_frozen_weights(data, tmp_path):
    """They are what the model makes of them, as no weights have them."""
    path = changed_trainer(tmp_path / "train_gpt2.py", edits.LORA)
    train(data, tmp_path / "base")
    args = {name: tiny_flags(data, tmp_path / name, init_from=tmp_path / "base") for name in ("whole", "killed")}
    [said] = run(train_changed, path, args["whole"])
    assert "The weights have nothing called transformer.h.0.mlp.low" in said
    run(in_changed, path, killed_at, 6, 4, args["killed"], ends=[KILLED])
    run(train_changed, path, args["killed"])
    assert log_lines(tmp_path / "killed") == log_lines(tmp_path / "whole")
    before, after = (load_checkpoint(tmp_path / name / "model_00012.pt")["model"] for name in ("base", "whole"))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert after["transformer.h.0.mlp.low"].std() > 0.5 and after["transformer.h.0.mlp.up"].any()


def test_ranks_that_train_different_models_are_told_after_the_first_step_with_what_differs_most(data, out, tmp_path):
    """DDP averages the gradients of those parameters that require one when the run begins."""
    changes = {
        "\n    def hidden_states(": "        self.transformer.wpe.requires_grad_(False)\n\n    def hidden_states(",
        "    losses = []\n    for micro": "    model.requires_grad_(True)\n    losses = []\n    for micro",
    }
    path = changed_trainer(tmp_path / "train_gpt2.py", changes)
    said, _ = run(train_changed, path, tiny_flags(data, out), ranks=2, ends=[2, 2])
    assert "After step 0, transformer.wpe.weight is not the same on all ranks" in error_in(said)
    assert not list((out).glob("model_*.pt"))


def test_a_branch_whose_settings_change_the_model_is_examined_again(data, tmp_path):
    changes = {
        edits.WIDTH: edits.WIDTH + "    flipped: int = 0  # 1: positions that depend on the number of tokens\n",
        f"{edits.POSITIONS}  # (B, T, C)": f"{edits.POSITIONS}  # (B, T, C)\n"
        "        x = x + self.config.flipped * self.transformer.wpe(pos.flip(0))",
    }
    path = changed_trainer(tmp_path / "train_gpt2.py", changes)
    edited_run(path, data, tmp_path / "parent", max_steps=4)
    options = dict(branch_from=tmp_path / "parent", max_steps=8, flipped=1)
    said = edited_run(path, data, tmp_path / "branch", **options)
    assert "With a cache this model computes something else" in said


WEIGHT = "transformer.h.0.attn.c_attn.weight"


def write_with_average(folder):
    return changed_trainer(folder / "train_gpt2.py", edits.recipe("**State of your own.**"))


@pytest.fixture(scope="module")
def averaged(folder):
    """The folder of a run that averages its weights, which nothing interrupts."""
    path = write_with_average(folder.parent)
    edited_run(path, folder, folder.parent / "averaged")
    return folder.parent / "averaged"


@pytest.fixture
def killed_averaged(folder, tmp_path):
    """The folder of such a run that was killed in step 6, with the checkpoint of step 4."""
    path = write_with_average(tmp_path)
    run(in_changed, path, killed_at, 6, 4, tiny_flags(folder, tmp_path / "killed"), ends=[KILLED])
    (tmp_path / "killed" / ".lock").unlink()  # a killed process leaves the file, without the lock
    return tmp_path / "killed"


def check_average(out_dir):
    checkpoint = load_checkpoint(out_dir / "model_00012.pt")
    average = checkpoint["own"]["ema"]
    assert average["n_averaged"] == 12
    assert not torch.equal(average[f"module.{WEIGHT}"], checkpoint["model"][WEIGHT])
    averages, plain = losses(out_dir, "val_ema"), losses(out_dir, "val")
    assert averages[0] == plain[0]
    assert averages[0] > averages[-1] > plain[-1] + 0.01, "an average lags behind"


def test_an_average_of_the_weights_is_validated_and_saved(averaged):
    check_average(averaged)


def test_two_ranks_average_the_weights(folder, out, tmp_path):
    args = tiny_flags(folder, out)
    run(train_changed, write_with_average(tmp_path), args, ranks=2, ends=[0, 0])
    check_average(out)


def test_an_average_of_the_weights_survives_a_kill(averaged, killed_averaged, folder, tmp_path):
    [said] = run(train_changed, tmp_path / "train_gpt2.py", tiny_flags(folder, killed_averaged))
    assert log_lines(killed_averaged) == log_lines(averaged)
    assert "before the run was" not in said


def test_a_run_whose_checkpoint_has_an_average_does_not_continue_with_code_that_has_none(killed_averaged, folder):
    before = listing(killed_averaged)
    refused_run(dict(data=folder, out_dir=killed_averaged), "cannot continue with", "ema")
    assert listing(killed_averaged) == before


def test_a_branch_continues_the_average_of_its_parents_weights(averaged, folder, tmp_path):
    args = tiny_flags(folder, tmp_path / "branch", branch_from=averaged / "model_00008.pt")
    run(train_changed, write_with_average(tmp_path), args)
    assert log_lines(tmp_path / "branch") == log_lines(averaged)


def test_the_records_say_how_to_make_a_model_of_an_average(averaged, tmp_path):
    text = (ROOT / "records" / "README.md").read_text(encoding="utf-8")
    code = text.partition("makes a checkpoint of it")[2].split("```python\n")[1].split("```")[0]
    code = code.replace("log/ema/model_00400.pt", str(averaged / "model_00012.pt"))
    code = code.replace("average.pt", str(tmp_path / "average.pt"))
    exec(code, {})
    model, _ = train_gpt2.load_model(str(tmp_path / "average.pt"))
    average = load_checkpoint(averaged / "model_00012.pt")["own"]["ema"]
    assert torch.equal(model.state_dict()[WEIGHT], average[f"module.{WEIGHT}"])


def test_float32_state_of_bfloat16_weights_is_not_rounded_on_resume(data, tmp_path):
    """torch's load_state_dict would make it the weights' dtype."""
    path = changed_trainer(tmp_path / "train_gpt2.py", edits.MASTER_WEIGHTS)
    edited_run(path, data, tmp_path / "whole")
    args = tiny_flags(data, tmp_path / "killed")
    run(in_changed, path, killed_at, 6, 4, args, ends=[KILLED])
    run(train_changed, path, args)
    assert log_lines(tmp_path / "killed") == log_lines(tmp_path / "whole")


def test_steps_that_are_done_again_are_compared_with_what_they_were(data, out, tmp_path):
    """Where the training counts in a global variable, a resumed run is another run, and only its log can tell."""
    path = changed_trainer(tmp_path / "train_gpt2.py", edits.HIDDEN)
    args = tiny_flags(data, out, warmup_steps=0)
    run(in_changed, path, killed_at, 7, 4, args, ends=[KILLED])
    before = log_lines(out)
    [said] = run(train_changed, path, args)
    assert "before the run was stopped, and is" in said and log_lines(out)[: len(before)] != before


def test_a_number_put_into_scalars_is_logged_as_rank_0_has_it(data, out, tmp_path):
    changes = {
        edits.STEPS: '    scalars["before"] = 0.1 + world.rank\n'
        '    scalars["count"], scalars["large"] = 16_777_217, 1e300\n' + edits.STEPS
    }
    path = changed_trainer(tmp_path / "train_gpt2.py", changes)
    run(train_changed, path, tiny_flags(data, out), ranks=2, ends=[0, 0])
    for name, text in {"before": "0.1", "count": "16777217", "large": "1e+300"}.items():
        assert set(read_log(out, name).values()) == {text}


def after_update(line):
    return {edits.AFTER_UPDATE: f"{edits.AFTER_UPDATE}    {line}\n"}


def test_a_number_may_be_taken_after_the_update(data, out, tmp_path):
    line = 'scalars["wte/after"] = parts.raw_model.lm_head.weight.norm(dtype=torch.float64)'
    path = changed_trainer(tmp_path / "train_gpt2.py", after_update(line))
    edited_run(path, data, out)
    weight = load_checkpoint(out / "model_00012.pt")["model"]["lm_head.weight"]
    assert losses(out, "wte/after")[-1] == pytest.approx(weight.double().norm().item(), rel=1e-8)


@pytest.mark.parametrize("name", ["train", "val/docs", "val bpb", ""])
def test_a_name_that_a_number_cannot_have_is_refused(name, data, out, tmp_path):
    path = changed_trainer(tmp_path / "train_gpt2.py", after_update(f"scalars[{name!r}] = 1"))
    assert f"{name!r} cannot be the name of a scalar" in error_of_edited(path, data, out)


@pytest.fixture(params=[{}, edits.EDITS["untied"]], ids=["tied", "untied"])
def with_tokenizers(request, data, tmp_path):
    """A trainer, a run of it on bytes in "first", and shards of a BPE tokenizer in "other"."""
    path = changed_trainer(tmp_path / "train_gpt2.py", request.param)
    edited_run(path, data, tmp_path / "first")
    tokenizers.write_encoding(train_small("gpt2"), tmp_path / "small.tiktoken")
    (tmp_path / "text.txt").write_text("abcdefghijklmnop the ponds " * 400)
    make(tmp_path, str(tmp_path / "text.txt"), name="other", tokenizer=str(tmp_path / "small.tiktoken"))
    return path


def test_a_model_begins_with_another_tokenizer_by_the_tokens_that_both_have(with_tokenizers, tmp_path):
    """Their rows are taken over, whatever their ids; a token that is new begins with the mean."""
    still = dict(init_from=tmp_path / "first", max_steps=1, max_lr=1e-12, min_lr=0, val_every=0)
    [said] = run(train_changed, with_tokenizers, tiny_flags(tmp_path / "other", tmp_path / "second", **still))
    assert "Of the 1,000 tokens of small-gpt2, 257 are also of bytes" in said
    first = load_checkpoint(tmp_path / "first" / "model_00012.pt")["model"]["lm_head.weight"]
    rows = load_checkpoint(tmp_path / "second" / "model_00001.pt")["model"]["lm_head.weight"]
    assert len(rows) == 1024
    enc = train_small("gpt2")
    for i in range(1000):
        token = enc.decode_single_token_bytes(i)
        expected = first.mean(0)
        if len(token) == 1:
            expected = first[token[0]]
        elif token == b"<|endoftext|>":
            expected = first[256]
        torch.testing.assert_close(rows[i], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [dict(branch_from="first", max_steps=24), dict(init_from="first", max_steps=0)])
def test_a_branch_and_an_evaluation_need_the_models_tokenizer(options, with_tokenizers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = tiny_flags("other", "third", vocab_size=1024, **options)
    [said] = run(train_changed, with_tokenizers, args, ends=[2])
    assert "have tokenizer small-gpt2, but the model uses bytes" in error_in(said)


def test_an_evaluation_that_counts_counts_once_where_a_run_is_resumed(data, tmp_path):
    """As for a rate that falls if the validation loss does not: a checkpoint is of the moment before its evaluation."""
    path = changed_trainer(tmp_path / "train_gpt2.py", edits.PLATEAU)
    edited_run(path, data, tmp_path / "whole")
    args = tiny_flags(data, tmp_path / "killed")
    run(in_changed, path, killed_at, 6, 4, args, ends=[KILLED])
    run(train_changed, path, args)
    assert log_lines(tmp_path / "killed") == log_lines(tmp_path / "whole")
    states = [load_checkpoint(tmp_path / name / "model_00012.pt")["own"] for name in ("whole", "killed")]
    assert states[0] == states[1] and states[0]["plateau"]["last_epoch"] == 4
    edited_run(path, data, tmp_path / "branch", branch_from=tmp_path / "whole" / "model_00008.pt")
    assert log_lines(tmp_path / "branch") == log_lines(tmp_path / "whole")
