"""A changed model is a model: edits of train_gpt2.py as people make them, each through the whole life of a run."""

import itertools
import re
import runpy
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
from edits import Changed
from harness import (
    ROOT,
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
    words = ["abcd", "-m", run_folder, "--temperature", 0, "--max-new-tokens", 70]
    status, text, _ = refusal_of(sample.main, *words)
    ids = itertools.takewhile(lambda i: i < 256, greedy_without_cache(model, list(b"abcd"), 70))
    assert status == 0
    assert text.rstrip("\n") == bytes(ids).decode(errors="replace")
    rendered = hellaswag.load_examples(examples, enc)
    sums = hellaswag.score(model, rendered, enc.n_vocab)[0]
    assert np.allclose(sums, four_rows(model, rendered), atol=1e-3)
    if (run_folder / "hf").exists():  # transformers reads it
        theirs = trainer.GPT.from_pretrained(run_folder / "hf").eval()
        idx = torch.arange(60)[None]
        torch.testing.assert_close(theirs(idx)[0], model(idx)[0][..., :257], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", edits.LIVES)
def test_a_changed_model_lives_the_life_of_a_run(name, changed, data, tmp_path):
    path = changed(edits.LIVES[name]).path
    options = dict(dropout=0.1) if "field" in name else {}
    [said] = run(live, path, tmp_path, data, options)
    is_gpt2 = name in edits.STILL_GPT2
    assert (tmp_path / "whole" / "hf").exists() == is_gpt2
    assert (" was written. The model" in said) == (not is_gpt2)
    assert ("state that is not a tensor, transformer.h.0." in said) == (name == "buffers")
    assert "is not the cross-entropy of the logits" not in said


@pytest.mark.parametrize("begin", ["branch_from", "init_from"])
def test_what_begins_with_a_model_may_be_longer_where_no_weight_depends_on_it(begin, changed, tmp_path):
    """As with rotary embeddings: it learns from longer sequences. Its tables of positions are as long."""
    trainer = changed(edits.ROTARY | edits.TABLES)
    trainer.train("parent")
    trainer.train(block_size=64, sequence_length=64, max_steps=24, **{begin: tmp_path / "parent"})
    weights = trainer.saved("out", step=24)["model"]
    assert torch.equal(weights["transformer.h.1.attn.sines"], torch.arange(64)[:, None].sin())
    assert torch.equal(weights["transformer.h.1.attn.causal"], torch.ones(64, 64).tril().bool())
    assert losses(tmp_path / "out", "val")[-1] < losses(tmp_path / "parent", "val")[-1]


FEW_STEPS = dict(max_steps=2, checkpoint_every=1, val_every=0)


@pytest.fixture
def unfinished(request, changed, out):
    """The folder of a run of the edited model that the test's parameter names, with its first checkpoint alone."""
    changed(edits.EDITS[request.param], name="other.py").train(**FEW_STEPS)
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
    assert "was trained by other code (train_gpt2.py, other.py)" in " ".join(said.split())
    copy = load_checkpoint(unfinished / "model_00001.pt")["code"]["other.py"]
    assert copy in said
    assert (unfinished / copy).read_bytes() == (tmp_path / "other.py").read_bytes()


@pytest.mark.parametrize("unfinished", ["relu squared"], indirect=True)
@pytest.mark.parametrize("max_steps", [0, 1])
def test_weights_that_are_trained_further_may_be_those_of_other_code(max_steps, unfinished, data, tmp_path):
    """But losses of a model are those of its code."""
    said = train(data, tmp_path / "new", init_from=unfinished, max_steps=max_steps)
    assert ("was trained by other code" in said) == (max_steps == 0)


@pytest.mark.parametrize("unfinished", ["relu squared"], indirect=True)
def test_samples_of_a_model_of_other_code_need_that_code(unfinished, tmp_path):
    words = ["abcd", "-m", unfinished, "--max-new-tokens", 3]
    assert "Add --code other.py" in refused(sample.main, *words)
    assert refusal_of(sample.main, *words, "--code", tmp_path / "other.py")[0] == 0


def test_a_finished_run_of_other_code_is_not_exported_as_the_model_of_this_one(changed, data, out):
    trainer = changed(edits.EDITS["relu squared"], name="train_relu2.py")
    [command] = printed_commands(trainer.train(max_steps=2))
    assert Path(command[-1]).samefile(trainer.path) and command[-2] == "--code"
    said = " ".join(train(data, out, max_steps=2).split())
    assert "was trained by other code (train_gpt2.py, train_relu2.py)" in said
    assert "Its model is in" in said
    assert not (out / "hf").exists()


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
            edits.GELU: "self.c_proj(activation(self.c_fc(x)))",
        }
    )
    trainer.train(**FEW_STEPS)
    return trainer


def test_modules_beside_the_file_are_kept_with_its_code(with_modules, out, tmp_path):
    """Also those that they import."""
    code = with_modules.saved("out", step=2)["code"]
    assert list(code) == ["train_gpt2.py", *MODULES]
    for name, copy in code.items():
        assert (out / copy).read_bytes() == (tmp_path / name).read_bytes()
    assert read_starts(out / "run.txt")[-1]["code"] == " ".join(code.values())


@pytest.mark.parametrize("names", [[], ["my_layers/functions.py"], ["train_gpt2.py", "my_layers/functions.py"]])
def test_a_change_of_any_byte_of_the_code_is_noticed(names, with_modules, out, tmp_path):
    """It is named by its file."""
    (out / "model_00002.pt").unlink()
    for name in names:
        with open(tmp_path / name, "a") as file:
            file.write("# a word\n")
    said = with_modules.train(**FEW_STEPS)
    assert ("was trained by other code" in said) == bool(names)
    assert ", ".join(names) in said


@pytest.mark.parametrize(
    "name, reason",
    [
        ("it.pyc", "does not name a Python file"),
        ("leaves.py", "ends the program"),
        ("no.py", "does not name a Python file"),
        ("plain.py", "has no load_model"),
    ],
)
def test_a_line_says_why_a_file_is_no_code_of_a_model(name, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("it.pyc").write_bytes((ROOT / "train_gpt2.py").read_bytes())
    Path("leaves.py").write_text("import sys\nsys.exit(0)\n")
    Path("plain.py").write_text("")
    assert f"--code {name} {reason}" in refused(sample.main, "abc", "--code", name)


@pytest.fixture
def with_activation(changed, tmp_path):
    """A trainer in exp/ that imports my_activation, a module beside it and in other/."""
    for name, function in (("exp", "relu"), ("other", "tanh")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "my_activation.py").write_text(f"import torch\n\nof = torch.{function}\n")
    return changed(edits.WITH_ACTIVATION, name="exp/train_my.py")


def run_script(path, folder, args):
    """python -P path args, with this folder in PYTHONPATH."""
    sys.path.insert(0, str(folder))
    sys.argv = [str(path), *args]
    runpy.run_path(str(path), run_name="__main__")


def test_a_module_of_the_same_name_from_elsewhere_is_named_in_training(with_activation, tmp_path):
    [said] = run(run_script, with_activation.path, tmp_path / "other", with_activation.flags("out", max_steps=1))
    other = tmp_path / "other" / "my_activation.py"
    assert f"my_activation is the module in {other}, and not the one beside train_my.py" in said


def test_the_code_of_a_run_is_the_file_as_it_was_when_the_flags_were_read(with_activation, out, tmp_path):
    """And not as it is seconds later, when torch is imported."""
    before = with_activation.path.read_bytes()
    run(run_script, with_activation.path, tmp_path / "exp", with_activation.flags("out", max_steps=1))
    [copy] = out.glob("train_my-*.py")
    assert copy.read_bytes() == before != with_activation.path.read_bytes()


def train_as_code(path, args):
    source_code.import_trainer(str(path)).main(args)


def sample_behind(folder, words):
    """Sample, as with this folder in PYTHONPATH."""
    sys.path.insert(0, str(folder))
    sample.main(words)


def test_with_code_a_module_beside_the_trainer_is_the_one_that_runs(with_activation, out, tmp_path):
    run(train_as_code, with_activation.path, with_activation.flags("out", max_steps=1))
    words = [
        "abc",
        "-m",
        str(out),
        "--temperature",
        "0",
        "--max-new-tokens",
        "8",
        "--code",
        str(with_activation.path),
    ]
    assert run(sample_behind, tmp_path / "other", words) == run(sample_behind, tmp_path / "exp", words)


@pytest.fixture
def examined(data, tmp_path):
    """The flags of a short run whose model is examined, on HellaSwag as well."""
    examples = examples_file(tmp_path, ["abc" * n for n in (1, 7)])
    return dict(block_size=128, max_steps=1, hellaswag_every=1, hellaswag_data=examples)


@pytest.mark.parametrize("name", edits.NOTES)
def test_what_a_changed_model_cannot_keep_is_said(name, changed, examined):
    edit, words = edits.NOTES[name]
    assert words in changed(edit).train(**examined)


def test_nothing_of_this_is_said_of_gpt2(data, out, examined):
    said = train(data, out, **examined)
    for _, words in edits.NOTES.values():
        assert words not in said
    assert "depend on the other rows" not in said
    assert "there are gradients" not in said


def test_random_numbers_in_evaluation_are_said_in_one_line(changed, examined):
    said = changed({edits.GELU: f"{edits.GELU} * (1 + 0.1 * torch.randn(()))"}).train(**examined)
    [line] = [line for line in said.splitlines() if line.startswith(("note: The model", "warning: ", "note: With"))]
    assert "draws random numbers in evaluation" in line


def test_dropout_on_another_number_of_ranks_is_no_lost_state(changed):
    trainer = changed(edits.EDITS["a field and dropout"])
    trainer.kill("out", dropout=0.2)
    assert "before the run was stopped" not in trainer.train(ranks=2, dropout=0.2)


def test_a_mistake_in_the_model_shows_as_itself(changed, out):
    """And not as torch.compile's."""
    trainer = changed({edits.PROJECTION: edits.PROJECTION.replace("4", "3")})
    said = trainer.train(compile=True, ends=[1])
    assert "shapes cannot be multiplied" in said
    assert f"return {edits.GELU}" in said
    assert "warning" not in said
    assert not out.exists()


def test_a_parameter_that_no_rank_uses_is_named(changed, out):
    error = changed({edits.POSITIONS: "self.transformer.wte(idx)"}).error(ranks=2)
    assert "A step does not use 1 parameter, such as transformer.wpe.weight" in error
    assert not out.exists()


whole_configure = train_gpt2.configure_optimizers


def two_with_one_parameter(model, config):
    """Two optimizers that both have the position embeddings."""
    wpe = [("transformer.wpe.weight", model.transformer.wpe.weight)]
    return [*whole_configure(model, config), torch.optim.SGD(wpe, lr=config.max_lr)]


def without_positions(model, config):
    """An optimizer of all parameters but the position embeddings."""
    rest = [(name, p) for name, p in model.named_parameters() if name != "transformer.wpe.weight"]
    return [torch.optim.AdamW(rest, lr=config.max_lr)]


def with_frozen_positions(model, config):
    model.transformer.wpe.requires_grad_(False)
    return without_positions(model, config)


def test_a_parameter_in_two_optimizers_is_refused(data, out):
    with patched(train_gpt2, "configure_optimizers", two_with_one_parameter):
        refused_run(dict(data=data, out_dir=out), "Two optimizers have the parameter transformer.wpe.weight")


def test_a_parameter_in_no_optimizer_is_named(data, out):
    with patched(train_gpt2, "configure_optimizers", without_positions):
        said = train(data, out, max_steps=1)
    assert "No optimizer has transformer.wpe.weight" in said


def test_a_parameter_in_no_optimizer_does_not_count_in_the_gradient_norm(data, tmp_path):
    """As if it were frozen."""
    for configure in (without_positions, with_frozen_positions):
        with patched(train_gpt2, "configure_optimizers", configure):
            train(data, tmp_path / configure.__name__)
    assert log_lines(tmp_path / "without_positions") == log_lines(tmp_path / "with_frozen_positions")


@pytest.mark.parametrize("line", edits.REFUSED)
def test_state_that_no_checkpoint_can_hold_is_named_before_the_first_step(line, changed, out):
    assert line in changed(edits.REFUSED[line]).error()
    assert not out.exists()


def test_adapters_train_over_frozen_weights(changed, data, tmp_path):
    """They are what the model makes of them, as no weights have them."""
    train(data, tmp_path / "base")
    trainer = changed(edits.LORA)
    said = trainer.check_resume(trainer.kill, init_from=tmp_path / "base")
    assert "The weights have nothing called transformer.h.0.mlp.low" in said
    after = trainer.saved("whole")["model"]
    for name, weight in trainer.saved("base")["model"].items():
        assert torch.equal(after[name], weight)
    assert after["transformer.h.0.mlp.low"].std() > 0.5
    assert after["transformer.h.0.mlp.up"].any()


def test_ranks_that_train_different_models_are_told_after_the_first_step_with_what_differs_most(changed):
    """DDP averages the gradients of those parameters that require one when the run begins."""
    loop = "    losses = []\n    for micro"
    frozen = "        self.transformer.wpe.requires_grad_(False)\n"
    trainer = changed(
        {edits.HIDDEN_STATES: frozen + edits.HIDDEN_STATES, loop: "    model.requires_grad_(True)\n" + loop}
    )
    assert "After step 0, transformer.wpe.weight is not the same on all ranks" in trainer.error(ranks=2)


def test_ranks_may_differ_where_the_trainer_says_so(changed, out):
    """As in DiLoCo, between two exchanges."""
    edit = {
        edits.SCALER: "    raw_model.ranks_differ = True\n" + edits.SCALER,
        edits.STEPS: "    next(parts.raw_model.parameters()).grad *= 1 + world.rank\n" + edits.STEPS,
    }
    changed(edit).train(ranks=2)
    assert len(losses(out)) == 12


def test_a_branch_whose_settings_change_the_model_is_examined_again(changed, tmp_path):
    trainer = changed(
        {
            edits.WIDTH: edits.WIDTH + "    flipped: int = 0  # 1: positions that depend on the number of tokens\n",
            f"{edits.POSITIONS}  # (B, T, C)": f"{edits.POSITIONS}  # (B, T, C)\n"
            "        x = x + self.config.flipped * self.transformer.wpe(pos.flip(0))",
        }
    )
    trainer.train("parent", max_steps=4)
    said = trainer.train("branch", branch_from=tmp_path / "parent", max_steps=8, flipped=1)
    assert edits.NO_CACHE in said


WEIGHT = "transformer.h.0.attn.c_attn.weight"
AVERAGE = edits.recipe("**State of your own.**")


@pytest.fixture(scope="module")
def averaged(folder):
    """The folder of a run that averages its weights, which nothing interrupts."""
    Changed(folder.parent, folder, AVERAGE).train("averaged")
    return folder.parent / "averaged"


def check_average(out_dir):
    checkpoint = load_checkpoint(out_dir / "model_00012.pt")
    average = checkpoint["own"]["ema"]
    assert average["n_averaged"] == 12
    assert not torch.equal(average[f"module.{WEIGHT}"], checkpoint["model"][WEIGHT])
    averages = losses(out_dir, "val_ema")
    plain = losses(out_dir, "val")
    assert averages[0] == plain[0]
    assert averages[0] > averages[-1] > plain[-1] + 0.01, "an average lags behind"


def test_an_average_of_the_weights_is_validated_and_saved(averaged):
    check_average(averaged)


def test_two_ranks_average_the_weights(changed, out):
    changed(AVERAGE).train(ranks=2)
    check_average(out)


@pytest.fixture
def killed(changed, tmp_path):
    """A trainer that averages the weights, and its run "killed" that was killed in step 6, after that checkpoint."""
    trainer = changed(AVERAGE)
    trainer.kill("killed")
    (tmp_path / "killed" / ".lock").unlink()  # a killed process leaves the file, without the lock
    return trainer


def test_an_average_of_the_weights_survives_a_kill(averaged, killed, tmp_path):
    said = killed.train("killed")
    assert killed.log("killed") == log_lines(averaged)
    assert "before the run was" not in said


def test_a_run_whose_checkpoint_has_an_average_does_not_continue_with_code_that_has_none(killed, data, tmp_path):
    before = listing(tmp_path / "killed")
    refused_run(dict(data=data, out_dir=tmp_path / "killed"), "cannot continue with", "ema")
    assert listing(tmp_path / "killed") == before


def test_a_branch_continues_the_average_of_its_parents_weights(averaged, changed):
    trainer = changed(AVERAGE)
    trainer.train("branch", branch_from=averaged / "model_00008.pt")
    assert trainer.log("branch") == log_lines(averaged)


def test_the_records_say_how_to_make_a_model_of_an_average(averaged, tmp_path):
    text = (ROOT / "records" / "README.md").read_text(encoding="utf-8")
    code = text.partition("turns the average into a checkpoint")[2].split("```python\n")[1].split("```")[0]
    code = code.replace("log/ema/model_00400.pt", str(averaged / "model_00012.pt"))
    code = code.replace("average.pt", str(tmp_path / "average.pt"))
    exec(code, {})
    model, _ = train_gpt2.load_model(str(tmp_path / "average.pt"))
    average = load_checkpoint(averaged / "model_00012.pt")["own"]["ema"]
    assert torch.equal(model.state_dict()[WEIGHT], average[f"module.{WEIGHT}"])


def test_float32_state_of_bfloat16_weights_is_not_rounded_on_resume(changed):
    """torch's load_state_dict would make it the weights' dtype."""
    trainer = changed(edits.MASTER_WEIGHTS)
    trainer.check_resume(trainer.kill)


@pytest.mark.parametrize(
    "name, interrupt",
    [
        ("a count", "kill"),
        ("a count", "stop"),
        ("weights that setup makes", "stop"),
        ("an attribute that validation reads", "kill"),
    ],
)
def test_what_is_done_again_is_compared_with_what_it_was(name, interrupt, changed):
    """Where a start begins with other things than the last one had, only the log can tell."""
    edit, words = edits.SECOND_LIVES[name]
    trainer = changed(edit)
    getattr(trainer, interrupt)("out", warmup_steps=0, val_every=2)
    before = trainer.log("out")
    said = trainer.train(warmup_steps=0, val_every=2)
    assert re.search(f"The {words} was .* before the run was stopped, and is", said)
    assert trainer.log("out")[: len(before)] != before


def before_update(line):
    return {edits.STEPS: f"    {line}\n{edits.STEPS}"}


@pytest.mark.parametrize(
    "value, text", [("0.1 + world.rank", "0.1"), ("16_777_217", "16777217"), ("1e300", "1e+300")]
)
def test_a_number_put_into_scalars_is_logged_as_rank_0_has_it(value, text, changed, out):
    changed(before_update(f'scalars["mine"] = {value}')).train(ranks=2, max_steps=2)
    assert set(read_log(out, "mine").values()) == {text}


def after_update(line):
    return {edits.AFTER_UPDATE: f"{edits.AFTER_UPDATE}    {line}\n"}


def test_a_number_may_be_taken_after_the_update(changed, out):
    trainer = changed(after_update('scalars["wte/after"] = parts.raw_model.lm_head.weight.norm(dtype=torch.float64)'))
    trainer.train()
    weight = trainer.saved("out")["model"]["lm_head.weight"]
    assert losses(out, "wte/after")[-1] == pytest.approx(weight.double().norm().item(), rel=1e-8)


@pytest.mark.parametrize("name", ["train", "val/docs", "val bpb", ""])
def test_a_name_that_a_number_cannot_have_is_refused(name, changed):
    assert f"{name!r} cannot be the name of a scalar" in changed(after_update(f"scalars[{name!r}] = 1")).error()


@pytest.fixture
def with_tokenizers(changed, tmp_path):
    """A trainer, a run of it on bytes in "first", and shards of a BPE tokenizer in "other", where it trains now."""
    trainer = changed(edits.EDITS["untied"])
    trainer.train("first")
    tokenizers.write_encoding(train_small("gpt2"), tmp_path / "small.tiktoken")
    (tmp_path / "text.txt").write_text("abcdefghijklmnop the ponds " * 400)
    make(tmp_path, tmp_path / "text.txt", name="other", tokenizer=str(tmp_path / "small.tiktoken"))
    trainer.data = tmp_path / "other"
    return trainer


def test_a_model_begins_with_another_tokenizer_by_the_tokens_that_both_have(with_tokenizers, tmp_path):
    """Their rows are taken over, whatever their ids; a token that is new begins with the mean."""
    still = dict(init_from=tmp_path / "first", max_steps=1, max_lr=1e-12, min_lr=0, val_every=0)
    said = with_tokenizers.train("second", **still)
    assert "Of the 1,000 tokens of small-gpt2, 257 are also in bytes" in said
    assert (
        source_code.import_trainer(str(with_tokenizers.path)).load_model(str(tmp_path / "second"))[1].n_vocab == 1000
    )
    first = with_tokenizers.saved("first")["model"]["lm_head.weight"]
    rows = with_tokenizers.saved("second", step=1)["model"]["lm_head.weight"]
    assert len(rows) == 1024
    old_rows = {bytes([i]): first[i] for i in range(256)} | {b"<|endoftext|>": first[256]}
    enc = train_small("gpt2")
    for i in range(1000):
        expected = old_rows.get(enc.decode_single_token_bytes(i), first.mean(0))
        torch.testing.assert_close(rows[i], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [dict(branch_from="first", max_steps=24), dict(init_from="first", max_steps=0)])
def test_a_branch_and_an_evaluation_need_the_models_tokenizer(options, with_tokenizers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = with_tokenizers.error("third", vocab_size=1024, **options)
    assert "have tokenizer small-gpt2, but the model uses bytes" in error


def test_an_evaluation_that_counts_counts_once_where_a_run_is_resumed(changed):
    """As for a rate that falls if the validation loss does not: a checkpoint is of the moment before its evaluation."""
    trainer = changed(edits.PLATEAU)
    trainer.check_resume(trainer.kill)
    for out in ("whole", "resumed"):
        assert trainer.saved(out)["own"]["plateau"]["last_epoch"] == 3, "of the evaluations of steps 0, 4 and 8"


def test_an_evaluation_in_which_a_run_is_stopped_counts_once(changed):
    """Step 8 has no other checkpoint than that of the stop."""
    trainer = changed(edits.PLATEAU | edits.STOPPED_IN_VALIDATION)
    options = dict(checkpoint_every=5, max_lr=1e-2, val_every=2)
    trainer.train("whole", resume=False, **options)
    assert "Stopped after 8 steps" in trainer.train("resumed", **options)
    trainer.train("resumed", **options)
    assert trainer.log("resumed") == trainer.log("whole")


def test_an_evaluation_that_counts_counts_once_in_a_branch(changed, tmp_path):
    trainer = changed(edits.PLATEAU)
    trainer.train("whole")
    trainer.train("branch", branch_from=tmp_path / "whole" / "model_00008.pt")
    assert trainer.log("branch") == trainer.log("whole")
