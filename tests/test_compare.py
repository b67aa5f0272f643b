"""python -m plumbing.run.compare: groups of runs that differ in nothing but their seed, and what these seeds show."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import train_gpt2
from plumbing.run import compare, logs

from harness import ROOT, make_shards, needs, refused, status_of, train

CONFIG = {"max_steps": 2, "data": ["texts"], "val_tokens": 512, "max_lr": 0.001, "hellaswag_limit": 0}
DATA = {"texts": ["aaaa", "bbbb"]}  # fingerprints of the training and the validation data


def write_run(folder, last, seed=1, *, data=DATA, code="gelu", branched=None, **changes):
    """The folder of a finished run whose last validation loss is `last`, or whose streams end as this dict says."""
    folder.mkdir(parents=True)
    ends = last if isinstance(last, dict) else {"val": last}
    log = "".join(f"2 {name} {value:.9g}\n" for name, value in ends.items())
    (folder / "log.txt").write_text(f"0 val 5.5\n1 train 4.5\n{log}", encoding="utf-8")
    fields = {"config": CONFIG | {"seed": seed, "out_dir": str(folder)} | changes, "fingerprints": data}
    fields |= {"branched": branched} if branched else {}
    text = f"code: {code}\n" + "".join(f"{name}: {json.dumps(value)}\n" for name, value in fields.items())
    (folder / "run.txt").write_text(f"{text}\nranks: 2\n\n", encoding="utf-8")  # it was resumed once


def write_groups(folder, ends, more, **changes):
    """Three seeds of each of two groups, a-* and, with these changes, b-*, whose streams end higher by `more`."""
    for seed in (1, 2, 3):
        write_run(folder / f"a-{seed}", {name: end + seed / 1000 for name, end in ends.items()}, seed)
        higher = {name: end + more + seed / 999 for name, end in ends.items()}
        write_run(folder / f"b-{seed}", higher, seed, **changes)
    return f"{folder}/a-*", f"{folder}/b-*"


def printed(capsys, *args):
    assert status_of(compare.main, list(args)) == 0
    return capsys.readouterr().out.splitlines()


def test_the_interval_is_students(tmp_path, capsys):
    """His own example of 1908: ten patients' extra sleep, 1.58 hours, 95% interval 0.70 to 2.46 (R's t.test(sleep))."""
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    for seed in range(10):
        write_run(tmp_path / f"a-{seed}", first[seed], seed)
        write_run(tmp_path / f"b-{9 - seed}", second[9 - seed], 9 - seed, code="relu")
    [[a, b]] = compare.read_tables([f"{tmp_path}/a-*", f"{tmp_path}/b-*"])
    mean, half, seeds = compare.difference(a, b)
    assert (mean, mean - half, mean + half, seeds) == pytest.approx((1.58, 0.70, 2.46, 10), abs=0.005)
    assert compare.verdict(a, b).endswith(", 10 seeds): " + b.name + " is worse.")
    assert compare.verdict(b, a).endswith(a.name + " is better.")
    # R's sd of both: 1.79 and 2.00
    head, ours, theirs, _ = printed(capsys, a.name, b.name)
    assert re.search(r" 0\.7500 +\+-1\.7890 +10 x .*code gelu$", ours)
    assert re.search(r" 2\.3300 +\+-2\.0022 +10 x .*code relu$", theirs)


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"max_lr": 0.002, "beta2": 0.9}, "max_lr, beta2"),
        ({"code": "relu"}, "code"),
        ({"data": {"texts": ["cccc", "bbbb"]}}, "training data"),
        ({"data": {"texts": ["aaaa", "cccc"]}}, "what they are measured on"),
        ({"branched": {"parent": "log/base", "step": 1, "changed": {}}}, "branch: parent, branch: step"),
    ],
)
def test_runs_of_a_group_differ_in_nothing_that_changes_what_they_learn(tmp_path, changes, named):
    write_run(tmp_path / "a-1", 4.0)
    write_run(tmp_path / "a-2", 4.1, 2, batch_size=64, preset="baby", wandb="mine")
    assert compare.read_group(f"{tmp_path}/a-*").ends == {1: 4.0, 2: 4.1}
    write_run(tmp_path / "a-3", 4.2, 3, **changes)
    told = refused(compare.main, f"{tmp_path}/a-*")
    assert f"a-3 and {tmp_path}/a-1 differ in {named}. Give each of them its own pattern." in told


def test_code_that_was_changed_while_a_run_was_stopped_is_other_code(tmp_path):
    for seed, first, then in ((1, "gelu", "gelu"), (2, "gelu", "relu"), (3, "relu", "gelu")):
        write_run(tmp_path / f"a-{seed}", 4.0, seed, code=first)
        with open(tmp_path / f"a-{seed}" / "run.txt", "a", encoding="utf-8") as file:
            file.write(f"code: {then}\n\n")
    for pattern in ("a-[12]", "a-[13]", "a-[23]"):
        assert "differ in code." in refused(compare.main, f"{tmp_path}/{pattern}")


def test_the_same_seed_counts_once_and_is_called_out_if_its_losses_are_others(tmp_path, capsys):
    write_run(tmp_path / "a-1", {"val": 4.0, "train": 4.3, "hella": 0.25})
    write_run(tmp_path / "a-1-again", {"val": 4.00001, "train": 4.3, "hella": 0.25})
    write_run(tmp_path / "a-2", {"val": 6.0, "hella": 0.5}, 2)
    assert compare.read_group(f"{tmp_path}/a-*").ends == {1: 4.0, 2: 6.0}
    assert f"{tmp_path}/a-1-again repeats {tmp_path}/a-1" in capsys.readouterr().out
    # what a change in memory leaves behind, also where so coarse a number as an accuracy is the same
    write_run(tmp_path / "a-3", {"val": 4.01, "train": 4.4, "hella": 0.25})
    for stream, ends in (("val", "4.01 and 4.0"), ("hella", "4.4 and 4.3")):
        told = refused(compare.main, f"{tmp_path}/a-*", "--stream", stream)
        assert f"{tmp_path}/a-3 and {tmp_path}/a-1 have the same settings, code and seed, but end at {ends}" in told


def test_runs_that_are_not_finished_or_have_no_such_stream_are_named_and_left_out(tmp_path, capsys):
    write_run(tmp_path / "a-1", 4.0)
    write_run(tmp_path / "a-2", 4.0, 2, max_steps=1009)
    write_run(tmp_path / "a-3", {}, 3)  # trained to the end, but validated last in the middle
    (tmp_path / "a-3" / "log.txt").write_text("0 val 5\n1 val 4\n1 train 4\n2 lr 0\n", encoding="utf-8")
    write_run(tmp_path / "a-4", {}, 4)
    (tmp_path / "a-4" / "log.txt").write_text("0 train 5\n1 tra", encoding="utf-8")
    (tmp_path / "a-5").mkdir()
    (tmp_path / "a-5" / "log.txt").write_text("0 val 9\n2 val 3\n", encoding="utf-8")  # build-nanogpt's
    *told, _, line = printed(capsys, f"{tmp_path}/a-*")
    assert told == [
        f"{tmp_path}/a-2 is left out: its last val is of step 2 of 1,009.",
        f"{tmp_path}/a-3 is left out: its last val is of step 1 of 2.",
        f"{tmp_path}/a-4 is left out: its log has no val, but has train.",
        f"{tmp_path}/a-5 is left out: its run.txt is missing or damaged (KeyError('seed')).",
    ]
    assert "4.0000" in line and "1 x" in line
    assert "No finished run matches" in refused(compare.main, f"{tmp_path}/a-1", f"{tmp_path}/a-2")
    assert "No finished run matches" in refused(compare.main, f"{tmp_path}/b-*")
    assert "pattern in quotes" in refused(compare.main)


@pytest.mark.parametrize("value", ["[7]", '{"texts": 1}', "\xff"])
def test_a_damaged_run_txt_is_one_line_and_no_traceback(tmp_path, capsys, value):
    for seed in (1, 2):
        write_run(tmp_path / f"a-{seed}", 4.0, seed, branched={"parent": "log/base", "step": 1, "changed": {}})
    path = tmp_path / "a-2" / "run.txt"
    whole = path.read_text(encoding="utf-8")
    for field in ("config", "fingerprints", "branched", "code"):
        path.write_text(re.sub(f"(?m)^{field}: .*", f"{field}: {value}", whole), encoding="latin-1")
        status, told = status_of(compare.main, [f"{tmp_path}/a-*"]), capsys.readouterr()
        left_out = f"{path.parent} is left out: its run.txt is missing or damaged" in told.out
        assert left_out if field == "config" else left_out or status == 2, "never averaged with the other one"
        assert len(told.err.splitlines()) == (status == 2)


def test_noise_a_run_that_diverged_one_seed_and_other_seeds_show_nothing(tmp_path, capsys):
    a, b = write_groups(tmp_path, {"val": 4.0}, -1, code="relu")
    for seed, end in ((1, 4.1), (2, 4.2), (3, 3.9)):  # 0.1, 0.2 and -0.1 more, less what a-* have of their seeds
        write_run(tmp_path / f"c-{seed}", end + seed / 1000, seed, code="relu")
    # by hand: 0.0667 +- 4.303 * 0.1528 / sqrt(3)
    told = "(95% interval -0.3126 to +0.4459, 3 seeds). Seeds alone may do that: neither is shown to be better."
    assert printed(capsys, a, f"{tmp_path}/c-*")[-1].endswith(told)
    for last in ("nan", "inf"):
        (tmp_path / "b-2" / "log.txt").write_text(f"2 val {last}\n", encoding="utf-8")
        for both in ((a, b), (b, a)):
            assert printed(capsys, *both)[-1].endswith("cannot be compared, because one of their runs has diverged.")
    *_, one, none = printed(capsys, *(f"{tmp_path}/{name}" for name in ("a-1", "b-1", "b-3")))
    assert "with one seed. That shows nothing" in one
    assert f"b-3 and {tmp_path}/a-1 have no seed in common." in none


OTHER = {"texts": ["aaaa", "cccc"]}


@pytest.mark.parametrize(
    "stream, changes",
    [
        ("val", {"data": OTHER}),
        ("val", {"val_tokens": 1024}),
        ("train", {"data": {"texts": ["cccc", "bbbb"]}}),
        ("hella", {"hellaswag_limit": 100}),
    ],
)
def test_groups_that_are_measured_on_something_else_are_tables_of_their_own(tmp_path, capsys, stream, changes):
    """Also HellaSwag's accuracy on another number of examples. Bits per byte are compared, as who asks for them may."""
    ends = {"val": 4.0, "hella": 0.25, "train": 4.0, "val_bpb": 1.0, "own": 7.0}
    a, b = write_groups(tmp_path, ends, 0.1, **changes)
    *tables, told = printed(capsys, a, b, "--stream", stream)
    assert len([line for line in tables if line.startswith("last ")]) == 2 and "ends" not in str(tables)
    assert told.startswith("These tables cannot be compared") and "--stream val_bpb" in told
    first, *table, verdict = printed(capsys, a, b, "--stream", "val_bpb")
    assert "what they are measured on" not in str(table)
    assert first.startswith("note: These are not measured on the same tokens") == (stream == "val")
    assert verdict.endswith("is higher." if stream == "val" else "is worse.")
    assert "ends 0.1000 above" in printed(capsys, a, b, "--stream", "own")[-1]


def test_what_is_better_depends_on_the_stream(tmp_path, capsys):
    ends = {"val": 4.0, "hella": 0.25, "train": 4.0, "val/code": 4.0, "cloze": 0.5}
    a, b = write_groups(tmp_path, ends, 0.1, code="relu")
    found = {stream: printed(capsys, a, b, "--stream", stream)[-1].split()[-1] for stream in ends}
    assert found == {"val": "worse.", "val/code": "worse.", "train": "worse.", "hella": "better.", "cloze": "higher."}
    assert printed(capsys, b, a, "--stream", "cloze")[-1].split()[-1] == "lower."
    write_run(tmp_path / "c", 4.0)  # the training loss of its last step is logged before the step after it
    assert compare.read_group(f"{tmp_path}/c", "train").ends == {1: 4.5}


def test_mixtures_are_compared_on_each_folder_and_by_their_mean_only_where_the_shares_are_the_same(tmp_path, capsys):
    both = {"docs": ["aaaa", "bbbb"], "code": ["cccc", "dddd"]}
    for name, code, weights in (("a", 2.0, [0.5, 0.5]), ("b", 2.1, [0.25, 0.75])):
        write_run(tmp_path / name, {"val/code": code, "val": 2.5}, data=both, data_weights=weights)
    a, b = f"{tmp_path}/a", f"{tmp_path}/b"
    assert printed(capsys, a, b)[-1].startswith("These tables cannot be compared")
    _, ours, theirs, verdict = printed(capsys, a, b, "--stream", "val/code")
    assert ours.endswith("data_weights [0.5, 0.5]") and theirs.endswith("data_weights [0.25, 0.75]")
    assert "b ends 0.1000 above" in verdict


@pytest.mark.parametrize("others", [[7, 3], [0.07, 0.03], [2.1, 0.9]])
def test_shares_are_the_same_where_their_sum_is_another(others, tmp_path):
    both = {"docs": ["aaaa", "bbbb"], "code": ["cccc", "dddd"]}
    for seed, weights in enumerate([[0.7, 0.3], others]):
        write_run(tmp_path / f"a-{seed}", 2.5, seed, data=both, data_weights=weights)
        write_run(tmp_path / f"b-{seed}", 2.6, 0, code="relu", data=both, data_weights=weights)
    assert compare.read_group(f"{tmp_path}/a-*").ends == {0: 2.5, 1: 2.5}
    assert len(compare.read_tables([f"{tmp_path}/a-0", f"{tmp_path}/b-1"])) == 1


def test_a_name_with_brackets_a_log_and_its_folder_are_the_same_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "log" / "a[1]", 4.0)
    for name in ("log/a[1]", "log/a[1]/", "log/a[1]/log.txt", "log/*"):
        assert compare.read_group(name).ends == {1: 4.0}


NANOGPT = """\
number of parameters: 0.80M
step 0: train loss 4.1676, val loss 4.1649
iter 0: loss 4.1828, time 4251.39ms, mfu -100.00%
step 2: train loss 3.2411, val loss 3.2488
saving checkpoint to out
iter 2: loss 3.2196, time 3311.05ms, mfu 0.01%
"""


def test_logs_of_nanogpt_and_of_killed_runs_are_read(tmp_path, capsys):
    (tmp_path / "nanogpt.txt").write_text(NANOGPT, encoding="utf-8")
    (tmp_path / "killed").mkdir()
    log = "0 val 6.5\n3 val 4.5\nx\n2 val 5\n3 val 4.25\n4 va"
    (tmp_path / "killed" / "log.txt").write_text(log, encoding="utf-8")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")  # a file is a log only where it is named

    def streams(pattern):
        [run] = logs.find_runs(pattern)
        return {name: dict(zip(*map(list, both))) for name, both in run.streams.items()}

    printed_by_it = {"train": {0: 4.1828, 2: 3.2196}, "val": {0: 4.1649, 2: 3.2488}}
    assert streams(f"{tmp_path}/nanogpt.txt") == printed_by_it
    assert streams(f"{tmp_path}/*") == {"val": {0: 6.5, 2: 5, 3: 4.25}}
    assert "2 damaged lines of" in capsys.readouterr().out


def test_help_says_how_the_command_is_typed():
    words = [sys.executable, "-m", "plumbing.run.compare", "--help"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.startswith("usage: python -m plumbing.run.compare GROUPS [flags]\n")


@needs("/dev/full")
def test_a_table_that_cannot_be_written_is_an_error(tmp_path):
    write_run(tmp_path / "a", 4.0)
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "plumbing.run.compare", tmp_path / "a"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (2, "error: Could not write the output: No space left on device.\n")


def test_the_command_compares_real_runs(data, tmp_path, capsys, monkeypatch):
    """Also those on the same data at other paths; other data at one path are other data. A change in memory shows."""
    copy = shutil.copytree(data, tmp_path / "copy")
    options = dict(max_steps=4, val_every=4, checkpoint_every=0, min_lr=1e-7)
    for rate in ("3e-3", "1e-6"):
        for seed, path in ((1, data), (2, f"{data}/"), (3, copy)):
            train(path, tmp_path / f"lr-{rate}-{seed}", **options, seed=seed, max_lr=rate)
    *_, first, second, verdict = printed(capsys, f"{tmp_path}/lr-3*", f"{tmp_path}/lr-1*")
    assert "3 x  max_lr 0.003" in first and "3 x  max_lr 1e-06" in second
    assert "3 seeds" in verdict and verdict.endswith("lr-1* is worse.")
    shutil.rmtree(copy)
    make_shards(copy, seed=5)
    train(copy, tmp_path / "other-data", **options)
    assert len(compare.read_tables([f"{tmp_path}/other-data", f"{tmp_path}/lr-1*"])) == 2
    monkeypatch.setattr(train_gpt2.MLP, "forward", lambda self, x: self.c_proj(self.c_fc(x)))
    train(data, tmp_path / "lr-3e-3-linear", **options, seed=1, max_lr="3e-3")
    assert "Something that is not recorded was different" in refused(compare.main, f"{tmp_path}/lr-3*")
