"""python -m plumbing.run.compare: groups of runs that differ only in their seed, and what these seeds show."""

import dataclasses
import json
import os
import re
from pathlib import Path

import pytest
import torch
import train_gpt2
from plumbing.run import compare, logs

import harness
from harness import make_shards, refusal_of, refused, train

CONFIG = {"max_steps": 2, "data": ["texts"], "val_tokens": 512, "max_lr": 0.001, "hellaswag_limit": 0}
DATA = {"texts": ["aaaa", "bbbb"]}  # fingerprints of the training and the validation data
OTHER_TRAINING = {"texts": ["cccc", "bbbb"]}
OTHER_VALIDATION = {"texts": ["aaaa", "cccc"]}
BOTH = {"docs": ["aaaa", "bbbb"], "code": ["cccc", "dddd"]}
BRANCHED = {"parent": "log/base", "step": 1, "changed": {}}


def write_run(folder, ends, seed=1, *, data=DATA, code="gelu", branched=None, **changes):
    """The folder of a finished and once resumed run whose streams, or whose val alone, have these last values."""
    if not isinstance(ends, dict):
        ends = {"val": ends}
    log = [(0, "val", 5.5), (1, "train", 4.5), (1, "own", 4.5)]
    log += [(2, stream, end) for stream, end in ends.items()]
    config = CONFIG | {"seed": seed, "out_dir": str(folder)} | changes
    fields = {"code": code, "fingerprints": data, "config": config}
    if branched:
        fields["branched"] = branched
    harness.write_run(Path(folder), log, **fields)
    add_start(folder, "ranks: 2")


def add_start(folder, text):
    with open(f"{folder}/run.txt", "a", encoding="utf-8") as file:
        file.write(f"\n{text}\n\n")


def groups(stream="val", **changes):
    """Two groups of three seeds. The second one has these changes, and ends 0.25 higher."""
    for seed in (1, 2, 3):
        write_run(f"a-{seed}", {stream: 4 + seed / 8}, seed)
        write_run(f"b-{seed}", {stream: 4.25 + seed / 8}, seed, **changes)
    return "a-*", "b-*"


def printed(*words):
    """The lines that the comparison of these groups prints."""
    status, said, _ = refusal_of(compare.main, *words)
    assert status == 0
    return said.splitlines()


# ----- The interval -------------------------------------------------------------------------------------


def test_the_interval_is_students_of_the_differences_between_equal_seeds():
    """Student's own example of 1908: ten patients' extra sleep. One group's files are in the opposite order.

    R's t.test(sleep, paired = TRUE): 1.58 hours, 95% interval 0.70 to 2.46, here with t = 2.26 for 2.262.
    R's sd of both: 1.79 and 2.00.
    """
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    for seed in range(10):
        write_run(f"a-{seed}", first[seed], seed)
        write_run(f"b-{9 - seed}", second[seed], seed, code="relu")
    _, first, second, verdict = printed("a-*", "b-*")
    assert verdict == "b-* ends 1.5800 above a-* (95% interval +0.7010 to +2.4590, 10 seeds): b-* is worse."
    assert re.search(r" 0\.7500 +\+-1\.7890 +10 x .*code gelu$", first)
    assert re.search(r" 2\.3300 +\+-2\.0022 +10 x .*code relu$", second)
    assert printed("b-*", "a-*")[-1].endswith("a-* is better.")


@pytest.mark.parametrize("n, quantile", [*enumerate(compare.T_975, start=1)])
def test_the_quantiles_are_those_of_students_distribution(n, quantile):
    """Its density is integrated from 0: 0.475 lie between that and the 0.975 quantile."""
    t = torch.linspace(0, quantile, 10_001, dtype=torch.float64)
    density = torch.distributions.StudentT(n).log_prob(t).exp()
    assert torch.trapezoid(density, t).item() == pytest.approx(0.475, abs=3e-4)


def test_a_difference_that_seeds_alone_may_make_shows_nothing():
    """By hand, of differences d: mean(d) +- t * sd(d) / sqrt(n), with t = 4.30 of n - 1 degrees of freedom."""
    for seed, difference in enumerate([0.1, 0.2, -0.1]):
        write_run(f"a-{seed}", 4, seed)
        write_run(f"b-{seed}", 4 + difference, seed, code="relu")
    verdict = printed("a-*", "b-*")[-1]
    assert "(95% interval -0.3126 to +0.4459, 3 seeds). Seeds alone may do that" in verdict


def test_a_run_that_diverged_shows_nothing():
    both = groups(code="relu")
    for last, order in (("nan", 1), ("inf", -1)):
        Path("b-2/log.txt").write_text(f"2 val {last}\n", encoding="utf-8")
        assert printed(*both[::order])[-1].endswith("one of their runs has diverged.")


@pytest.mark.parametrize(
    "other, said",
    [("b-1", "with one seed. That shows nothing"), ("b-3", "have no seed in common.")],
)
def test_one_seed_or_no_common_one_shows_nothing(other, said):
    groups(code="relu")
    assert said in printed("a-1", other)[-1]


# ----- Groups -------------------------------------------------------------------------------------------


OTHER_FACTS = {
    "code": {"code": "relu"},
    "training data": {"data": OTHER_TRAINING},
    "what they are measured on": {"data": OTHER_VALIDATION},
    "branch: parent, branch: step": {"branched": None},
    "branch: parent": {"branched": BRANCHED | {"parent": 2}},
    "branch: step": {"branched": BRANCHED | {"step": 2}},
}


@pytest.mark.parametrize("named, changes", OTHER_FACTS.items())
def test_runs_of_a_group_differ_in_nothing_that_changes_what_they_learn(named, changes):
    write_run("a-1", 4.0, branched=BRANCHED)
    write_run("a-2", 4.2, 2, **{"branched": BRANCHED} | changes)
    told = refused(compare.main, "a-*")
    assert f"a-2 and a-1 differ in {named}. Give each of them its own pattern." in told


RECIPE = {field.name for field in dataclasses.fields(train_gpt2.Recipe)} - {"preset", "branch_from"}


@pytest.mark.parametrize("name", sorted(vars(train_gpt2.TrainConfig()).keys() - {"seed", "data"}))
def test_settings_of_the_recipe_alone_make_another_group(name):
    changes = {name: [2.0, 1.0] if name == "data_weights" else 1}
    write_run("a-1", 4.0)
    write_run("a-2", 4.1, 2, **changes)
    _, said, error = refusal_of(compare.main, "a-*")
    assert f" differ in {name}" in error if name in RECIPE else " 2 x" in said


def test_code_that_was_changed_while_a_run_was_stopped_is_other_code():
    for seed, code in enumerate(["gelu gelu", "gelu relu", "relu gelu"], start=1):
        first, then = code.split()
        write_run(f"a-{seed}", 4.0, seed, code=first)
        add_start(f"a-{seed}", f"code: {then}")
    for pattern in ("a-[12]", "a-[13]", "a-[23]"):
        assert "differ in code." in refused(compare.main, pattern)


def test_a_setting_is_the_one_with_which_a_run_was_last_resumed():
    write_run("a", 4.0, val_tokens=64)
    write_run("b", 4.0)
    config = CONFIG | {"seed": 1, "val_tokens": 64}
    add_start("b", f"config: {json.dumps(config)}")
    assert len(compare.read_tables(["a", "b"])) == 1


def test_shares_are_the_same_where_their_sum_is_another():
    for seed, weights in enumerate([[0.7, 0.3], [7, 3], [2.1, 0.9]]):
        write_run(f"a-{seed}", 2.5, seed, data=BOTH, data_weights=weights)
    assert " 3 x" in printed("a-*")[1]


def test_the_same_seed_counts_once():
    write_run("a-1", {"val": 4.0, "train": 4.3})
    write_run("a-1-again", {"val": 4.00001, "train": 4.3})
    write_run("a-2", 6.0, 2)
    first, *_, line = printed("a-*")
    assert first.startswith("a-1-again repeats a-1 ")
    assert " 5.0000 " in line


@pytest.mark.parametrize("stream, ends", [("val", "4.01 and 4.0"), ("hella", "4.4 and 4.3")])
def test_the_same_seed_with_other_losses_is_called_out(stream, ends):
    """A change in memory leaves this behind, also where so coarse a number as an accuracy is the same."""
    write_run("a-1", {"val": 4.0, "train": 4.3, "hella": 0.25})
    write_run("a-3", {"val": 4.01, "train": 4.4, "hella": 0.25})
    told = refused(compare.main, "a-*", "--stream", stream)
    assert f"a-3 and a-1 have the same settings, code and seed, but end at {ends}" in told


# {what a log.txt has: why the run is left out}
UNFINISHED = {
    "0 val 5\n1 val 4\n1 train 4\n2 lr 0\n": "its last val is at step 1 of 2",  # trained to the end
    "0 train 5\n1 tra": "its log has no val. It has: train",
}


@pytest.mark.parametrize("log, reason", UNFINISHED.items())
def test_a_run_that_is_not_finished_is_named_and_left_out(log, reason):
    write_run("a-1", 4.0)
    write_run("a-2", {}, 2)
    Path("a-2/log.txt").write_text(log, encoding="utf-8")
    told, _, line = printed("a-*")
    assert told == f"a-2 is left out: {reason}."
    assert "1 x" in line
    assert "No finished run matches" in refused(compare.main, "a-1", "a-[2]")


@pytest.mark.parametrize("field", ["config", "fingerprints", "branched", "code"])
@pytest.mark.parametrize("value", ["[7]", '{"texts": 1}', "\xff"])
def test_a_run_with_a_damaged_run_txt_is_never_averaged_with_another(field, value):
    for seed in (1, 2):
        write_run(f"a-{seed}", 4.0, seed, branched=BRANCHED)
    path = Path("a-2/run.txt")
    text = re.sub(f"(?m)^{field}: .*", f"{field}: {value}", path.read_text(encoding="utf-8"))
    path.write_text(text, encoding="latin-1")
    _, said, error = refusal_of(compare.main, "a-*")
    assert f"{path.parent} is left out: its run.txt is missing or damaged" in said or " differ in " in error


# ----- Tables -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stream, changes",
    [
        ("val", {"data": OTHER_VALIDATION}),
        ("val", {"val_tokens": 1024}),
        ("train", {"data": OTHER_TRAINING}),
        ("hella", {"hellaswag_limit": 100}),
    ],
)
def test_groups_that_are_measured_on_something_else_are_tables_of_their_own(stream, changes):
    *tables, told = printed(*groups(stream, **changes), "--stream", stream)
    assert len([line for line in tables if line.startswith("last ")]) == 2
    assert "ends" not in str(tables)
    assert told.startswith("These tables cannot be compared") and "--stream val_bpb" in told


@pytest.mark.parametrize("changes", [{"data": OTHER_VALIDATION}, {"val_tokens": 1024}])
def test_bits_per_byte_on_other_tokens_are_compared_without_a_judgement(changes):
    """Only who asks for that knows whether the text is the same."""
    stream = "val_bpb/texts"
    first, *table, verdict = printed(*groups(stream, **changes), "--stream", stream)
    assert first.startswith("note: These are not measured on the same tokens")
    assert "what they are measured on" not in str(table)
    assert verdict.endswith("is higher.")


@pytest.mark.parametrize(
    "stream, higher",
    [
        ("val", "worse"),
        ("val/code", "worse"),
        ("val_bpb", "worse"),
        ("train", "worse"),
        ("hella", "better"),
        ("own", "higher"),
    ],
)
def test_whether_more_is_better_depends_on_the_stream(stream, higher):
    verdict = printed(*groups(stream, code="relu"), "--stream", stream)[-1]
    assert "ends 0.2500 above" in verdict
    assert verdict.endswith(f"is {higher}.")


@pytest.mark.parametrize("stream", ["train", "own"])
def test_what_the_last_step_logs_is_logged_one_step_earlier(stream):
    write_run("c", 4.0)
    assert compare.read_group("c", stream).ends == {1: 4.5}


def test_mixtures_are_compared_on_each_folder_and_not_by_a_mean_of_other_shares():
    write_run("a", {"val/code": 2.0, "val": 2.5}, data=BOTH, data_weights=[0.5, 0.5])
    write_run("b", {"val/code": 2.1, "val": 2.5}, data=BOTH, data_weights=[0.25, 0.75])
    assert printed("a", "b")[-1].startswith("These tables cannot be compared")
    _, first, second, verdict = printed("a", "b", "--stream", "val/code")
    assert first.endswith("data_weights [0.5, 0.5]")
    assert second.endswith("data_weights [0.25, 0.75]")
    assert "b ends 0.1000 above" in verdict


# ----- Logs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["log/a[1]", "log/a[1]/", "log/a[1]/log.txt", "log/*", "log/*/log.txt"])
def test_a_name_with_brackets_a_log_and_its_folder_are_the_same_run(name):
    write_run("log/a[1]", 4.0)
    assert compare.read_group(name).ends == {1: 4.0}


def test_the_log_of_a_killed_run_is_read(output):
    """A step that was done twice has its last value. A file is a log only where it is named."""
    os.mkdir("killed")
    log = "0 val 6.5\n3 val 4.5\nx\n2 val 5\n3 val 4.25\n4 va"
    Path("killed/log.txt").write_text(log, encoding="utf-8")
    Path("picture.png").write_bytes(b"\x89PNG")
    [run] = logs.find_runs("*")
    steps, values = run.streams["val"]
    assert [*zip(steps, values)] == [(0, 6.5), (2, 5), (3, 4.25)]
    assert "2 damaged lines of" in output()


# ----- The command --------------------------------------------------------------------------------------


def test_runs_that_were_trained_are_compared(data, monkeypatch):
    """On the same data elsewhere, with another rate, on other data in the same folder, with other code in memory."""

    def trained(name, path=data, **changes):
        train(path, name, max_steps=2, checkpoint_every=0, min_lr=1e-7, **changes)

    trained("a-1", seed=1)
    trained("a-2", make_shards("copy"), seed=2)
    trained("rate", seed=1, max_lr=1e-6)
    _, first, second, _ = printed("a-*", "rate")
    assert first.endswith("2 x  max_lr 0.003")
    assert second.endswith("1 x  max_lr 1e-06")
    monkeypatch.setattr(train_gpt2.MLP, "forward", lambda self, x: self.c_proj(self.c_fc(x)))
    trained("a-3", seed=1)
    assert "Something that is not recorded was different" in refused(compare.main, "a-*")
    make_shards(data, seed=5)
    trained("other", seed=1)
    assert len(compare.read_tables(["a-2", "other"])) == 2
