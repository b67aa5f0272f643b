"""python -m plumbing.compare: runs in groups by what differs in settings or code, and what their seeds show."""

import json
import shutil

import pytest
from plumbing.run import compare, logs

from harness import refused, status_of, train

CODE = """
class MLP:
    def forward(self, x):
        return {}
"""
CONFIG = {"max_steps": 2, "data": "texts", "val_tokens": 512, "max_lr": 0.001}


def write_run(folder, last, seed=1, code="gelu(x)", **changes):
    """The folder of a finished run whose validation loss ends at `last`, and which kept a source."""
    folder.mkdir(parents=True)
    (folder / "log.txt").write_text(f"0 val 5.5\n1 train 4.5\n2 val {last}\n", encoding="utf-8")
    config = CONFIG | {"seed": seed, "out_dir": str(folder)} | changes
    (folder / "run.txt").write_text(f"config: {json.dumps(config)}\ncommit: 1234\n\n", encoding="utf-8")
    (folder / "train_gpt2-01234567.py").write_text(CODE.format(code), encoding="utf-8")


def groups_of(folder):
    return compare.group_runs(logs.find_runs(f"{folder}/*"))


def test_the_interval_is_students(tmp_path):
    """His own example of 1908: ten patients' extra sleep, 1.58 hours, 95% interval 0.70 to 2.46 (R's t.test(sleep))."""
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    for seed in range(10):
        write_run(tmp_path / f"a-{seed}", first[seed], seed)
        write_run(tmp_path / f"b-{9 - seed}", second[9 - seed], 9 - seed, code="relu(x)")
    ((a, b),) = groups_of(tmp_path)
    mean, half, seeds = compare.difference(a, b)
    assert (mean, mean - half, mean + half, seeds) == pytest.approx((1.58, 0.70, 2.46, 10), abs=0.005)
    assert "b ends 1.5800 above a (95% interval +0.70" in compare.verdict(a, b)
    assert compare.verdict(a, b).endswith("10 seeds): b is worse.") and compare.verdict(b, a).endswith("a is better.")


def test_groups_are_told_apart_by_code_and_settings_and_not_by_what_changes_no_loss(tmp_path, capsys):
    write_run(tmp_path / "gelu-1", 4.0)
    write_run(tmp_path / "gelu-2", 4.5, seed=2, code="gelu(x)  # the same, with a comment", batch_size=64)
    write_run(tmp_path / "fast-1", 4.1, max_lr=0.002)
    write_run(tmp_path / "relu-1", 3.9, code="relu(x)")
    (groups,) = groups_of(tmp_path)
    assert {group.name: group.losses for group in groups} == {
        "fast-1": {1: 4.1},
        "gelu": {1: 4.0, 2: 4.5},
        "relu-1": {1: 3.9},
    }
    fast, gelu, relu = (group.different.split(", code train_gpt2 ") for group in groups)
    assert [fast[0], gelu[0], relu[0]] == ["max_lr 0.002", "max_lr 0.001", "max_lr 0.001"]
    assert fast[1] == gelu[1] != relu[1]
    assert capsys.readouterr().out == ""


def test_only_finished_runs_on_the_same_data_are_ranked_together_and_one_seed_shows_nothing(tmp_path, capsys):
    write_run(tmp_path / "a", 4.0)
    write_run(tmp_path / "other", 1.0, data="other", max_lr=0.002)
    write_run(tmp_path / "other-windows", 1.0, val_tokens=1024)
    write_run(tmp_path / "z-1", 3.0, max_lr=0.002)
    write_run(tmp_path / "z-2", 3.0, max_lr=0.003, seed=2)
    write_run(tmp_path / "running", 4.0, max_steps=9)
    write_run(tmp_path / "unknown", 4.0)
    (tmp_path / "unknown" / "run.txt").unlink()
    (a, b, c), *others = groups_of(tmp_path)
    assert [[group.name for group in groups] for groups in others] == [["other"], ["other-windows"]]
    assert "z-1 ends 1.0000 below a with one seed. That shows nothing" in compare.verdict(a, b)
    assert compare.verdict(a, c) == "z-2 and a have no seed in common. Run both with the same seeds."
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path / 'running'} is left out: it has done 2 of 9 steps.",
        f"{tmp_path / 'unknown'} is left out, as it has no run.txt.",
    ]


def test_the_command_compares_real_runs(data, tmp_path, capsys):
    for rate in ("3e-3", "1e-6"):
        for seed in (1, 2, 3):
            options = dict(seed=seed, max_steps=8, val_every=8, checkpoint_every=0, max_lr=rate, min_lr=1e-7)
            train(data, tmp_path / f"lr-{rate}-{seed}", **options)
    assert status_of(compare.main, [f"{tmp_path}/lr-3*", f"{tmp_path}/lr-1*"]) == 0
    head, first, second, verdict, _ = capsys.readouterr().out.splitlines()
    assert head.startswith(str(data)) and first.split()[0] == "lr-3e-3" and first.endswith("3 x  max_lr 0.003")
    assert second.split()[0] == "lr-1e-6" and "3 seeds): lr-1e-6 is worse." in verdict
    assert "none-*" in refused(compare.main, tmp_path / "none-*")


def test_branches_and_their_parents_are_found_from_any_of_them(tmp_path):
    """Parent, branch and branch of a branch, also after all were moved; another run of the parent's name is none."""
    log = tmp_path / "log"
    for name, parent, step in (("a", "", 0), ("c", "gone/a", 2), ("b", str(log / "c"), 3), ("unrelated", "", 0)):
        (log / name).mkdir(parents=True)
        first = 7 if name == "unrelated" else 6
        (log / name / "log.txt").write_text(
            f"0 val {first}.5\n3 val 4.5\n2 val 5\n3 val 4.25\n4 va", encoding="utf-8"
        )
        branched = f"branched: {json.dumps({'parent': parent, 'step': step, 'changed': {}})}\n" if parent else ""
        # a resumed branch says only in its first start that it is one
        (log / name / "run.txt").write_text(f"ranks: 1\n{branched}\nranks: 2\n", encoding="utf-8")
    runs = logs.find_runs(f"{log}/*")
    for one in runs[:3]:
        assert [each.folder.name for each in logs.family(one, runs)] == ["a", "c", "b"]
    steps, losses = runs[0].streams["val"]
    assert steps.tolist() == [0, 2, 3] and losses.tolist() == [6.5, 5, 4.25] and runs[0].last_step == 3
    shutil.rmtree(log / "a")
    (log / "unrelated").rename(log / "a")
    assert [each.folder.name for each in logs.read_run(log / "b").line] == ["b", "c"]
