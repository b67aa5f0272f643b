"""python -m plumbing.run.compare: runs in groups by what differs in settings or code, and what their seeds show."""

import json
import shutil

import pytest
from plumbing.run import compare, logs

from harness import make_shards, refused, status_of, train

CODE = """
class MLP:
    def forward(self, x):
        return {}
"""
CONFIG = {"max_steps": 2, "data": "texts", "val_tokens": 512, "max_lr": 0.001}


def write_run(folder, last, seed=1, code="gelu(x)", started="2026-01-02", **changes):
    """The folder of a finished run whose validation loss ends at `last` ({stream: value} if it has several), and which
    kept a source.
    """
    folder.mkdir(parents=True)
    ends = "".join(
        f"2 {name} {value}\n" for name, value in (last if isinstance(last, dict) else {"val": last}).items()
    )
    (folder / "log.txt").write_text(f"0 val 5.5\n1 train 4.5\n{ends}", encoding="utf-8")
    config = CONFIG | {"seed": seed, "out_dir": str(folder)} | changes
    lines = f"started: {started}\nconfig: {json.dumps(config)}\ncommit: 1234\n"
    if "branch_from" in changes:
        branched = {"parent": changes["branch_from"], "step": 1, "changed": {}}
        lines += f"branched: {json.dumps(branched)}\n"
    (folder / "run.txt").write_text(f"{lines}\n", encoding="utf-8")
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
    write_run(tmp_path / "unfinished", 4.0)  # trained to the end, but validated last in the middle
    (tmp_path / "unfinished" / "log.txt").write_text("0 val 5\n1 val 4\n1 train 4\n2 lr 0\n", encoding="utf-8")
    write_run(tmp_path / "without", {"lr": 0.1})
    (tmp_path / "without" / "log.txt").write_text("0 train 5\n1 train 4\n", encoding="utf-8")
    (a, b, c), *others = groups_of(tmp_path)
    assert [[group.name for group in groups] for groups in others] == [["other"], ["other-windows"]]
    assert "z-1 ends 1.0000 below a with one seed. That shows nothing" in compare.verdict(a, b)
    assert compare.verdict(a, c) == "z-2 and a have no seed in common. Run both with the same seeds."
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path / 'running'} is left out: its last val is of step 2 of 9.",
        f"{tmp_path / 'unfinished'} is left out: its last val is of step 1 of 2.",
        f"{tmp_path / 'without'} is left out: its log has no val.",
    ]


@pytest.mark.parametrize("last", ["nan", "inf"])
def test_a_loss_that_is_no_number_is_never_better(tmp_path, last):
    for seed in (1, 2, 3):
        write_run(tmp_path / f"ok-{seed}", 4.0 + seed / 10, seed)
        write_run(tmp_path / f"hot-{seed}", last if seed == 2 else 3.0 + seed / 9, seed, max_lr=0.1)
    (groups,) = groups_of(tmp_path)
    hot, ok = groups
    for one, other in ((ok, hot), (hot, ok)):
        assert compare.verdict(one, other).startswith(f"hot ends at {last} with seed 2:")
        assert "better" not in compare.verdict(one, other)
    assert [line.split()[0] for line in compare.report(groups)][2:4] == ["ok", "hot"]


def test_runs_that_begin_from_another_pair_by_seed_and_not_by_the_parents_path(tmp_path, monkeypatch):
    """Fine-tunings and branches, of parents with their own seeds, settings and code; also after all were moved."""
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "log"
    for seed in (1, 2, 3):
        write_run(log / f"base-{seed}", 4.0, seed, started="2026-01-01")
        write_run(log / f"wide-{seed}", 4.0, seed, started="2026-01-01", code="relu(x)")
        for way in ("init", "branch"):
            for base in ("base", "wide"):
                start = {f"{way}_from": f"log/{base}-{seed}"}
                write_run(log / f"{way}-{base}-{seed}", 3.0 + seed / 10, seed, max_lr=0.1, **start)
        # all three with one seed, but of parents that have their own; and the other way round
        write_run(log / f"four-{seed}", 3.0, seed, init_from="log/base-4")
        write_run(log / f"same-{seed}", 3.0, 1337, init_from=f"log/base-{seed}/model_00002.pt")
    write_run(log / "base-4", 4.0, 4, started="2026-01-01", max_lr=0.5)
    write_run(log / "middle", 3.0, init_from="log/base-1/model_00001.pt")
    write_run(log / "openai", 3.0, init_from="gpt2")

    def check(log):
        (groups,) = groups_of(log)
        sizes = {group.name: len(group.runs) for group in groups}
        three = ["base", "branch-base", "branch-wide", "init-base", "init-wide", "same", "four", "wide"]
        assert sizes == dict.fromkeys(three, 3) | {"base-4": 1, "middle": 1, "openai": 1}
        assert [list(group.losses) for group in groups if len(group.runs) == 3] == [[1, 2, 3]] * 8
        base, branch, init = (group for group in groups if group.name in ("base", "branch-base", "init-base"))
        assert "begins from scratch" in base.different and "parent's weights, model_00002" in init.different
        assert "parent's code" not in init.different, "where others have no parent, its traits are too many to list"
        assert "parent's state, model_00001" in branch.different
        (two,) = compare.group_runs(logs.find_runs(f"{log}/init-base-*", f"{log}/init-wide-*"))
        assert all("parent's code train_gpt2" in group.different for group in two)
        return compare.verdict(base, init)

    told = check(log)
    assert "3 seeds" in told
    log.rename(tmp_path / "moved")
    assert check(tmp_path / "moved") == told
    # another run in a parent's place is not the parent
    shutil.rmtree(tmp_path / "moved" / "base-1")
    write_run(tmp_path / "moved" / "base-1", 4.0, started="2026-01-03")
    (groups,) = compare.group_runs(logs.find_runs(f"{tmp_path}/moved/init-base-*"))
    assert [len(group.runs) for group in groups] == [1, 2] and "log/base-1" in groups[0].different


def test_a_seed_that_was_run_twice_counts_once_and_is_named(tmp_path, capsys):
    write_run(tmp_path / "a-1", 4.0)
    write_run(tmp_path / "a-1-again", 5.0)
    write_run(tmp_path / "a-2", 6.0, 2)
    (tmp_path / "link").symlink_to(tmp_path / "a-2")  # the same folder, and no run of its own
    ((a,),) = groups_of(tmp_path)
    assert a.losses == {1: 4.5, 2: 6.0}
    (told,) = capsys.readouterr().out.splitlines()
    assert told.startswith(f"{tmp_path / 'a-1-again'} repeats {tmp_path / 'a-1'}")


def test_code_is_what_ran_and_neither_its_comments_nor_other_files(tmp_path):
    for seed in (1, 2):
        write_run(tmp_path / f"a-{seed}", 4.0, seed)
    edited = "# edited between stop and resume\n" + CODE.format("gelu(x)")
    (tmp_path / "a-1" / "train_gpt2-89abcdef.py").write_text(edited, encoding="utf-8")
    (tmp_path / "a-2" / "loss-analysis.py").write_text("print(1)", encoding="utf-8")
    (tmp_path / "a-2" / "plot-deadbeef.py").write_text("print 1 of Python 2", encoding="utf-8")
    ((a,),) = groups_of(tmp_path)
    assert a.traits["code"].startswith("train_gpt2 ") and " and " not in a.traits["code"]


def test_a_damaged_run_txt_is_named_and_not_a_traceback(tmp_path, capsys):
    for name in ("a", "cut", "no-seed", "no-dict"):
        write_run(tmp_path / name, 4.0)
    text = (tmp_path / "cut" / "run.txt").read_text(encoding="utf-8")
    (tmp_path / "cut" / "run.txt").write_text(text[: text.index("max_lr")], encoding="utf-8")
    (tmp_path / "no-seed" / "run.txt").write_text('config: {"max_steps": 2, "data": ["texts"]}\n\n', encoding="utf-8")
    (tmp_path / "no-dict" / "run.txt").write_text("config: 7\nbranched: {}\n\xff", encoding="latin-1")
    (groups,) = groups_of(tmp_path)
    assert [group.name for group in groups] == ["a"]
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path / 'cut'} is left out: its run.txt is damaged.",
        f"{tmp_path / 'no-dict'} is left out: its run.txt is damaged.",
        f"{tmp_path / 'no-seed'} is left out: its run.txt has no seed.",
    ]


def test_values_of_another_kind_in_a_run_txt_are_damage_too(tmp_path, capsys):
    for number, wrong in enumerate([{"seed": [1]}, {"max_steps": "2"}, {"data": 3}, {"data_weights": 1}]):
        write_run(tmp_path / str(number), 4.0, **wrong)
    assert groups_of(tmp_path) == []
    assert capsys.readouterr().out.count("its run.txt is damaged") == 4
    write_run(tmp_path / "odd", 4.0)
    with open(tmp_path / "odd" / "run.txt", "a", encoding="utf-8") as file:
        file.write('branched: {"parent": 3, "step": "1"}\nfingerprints: {"texts": 1}\n')
    ((odd,),) = groups_of(tmp_path)
    assert odd.loss == 4.0 and odd.runs[0].branch_step == 0


def test_every_name_is_found_or_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "log" / "a[1]", 4.0)
    write_run(tmp_path / "log" / "b", 4.5, max_lr=0.1)
    assert status_of(compare.main, ["log/a[1]", "log/b", "log/b/", "log/b/log.txt"]) == 0
    assert "b ends 0.5000 above a[1]" in capsys.readouterr().out
    assert status_of(compare.main, []) == 0 and "2 x" not in capsys.readouterr().out
    told = refused(compare.main, "log/b", "log/c-*", "log/d")
    assert "log/c-* or log/d" in told
    told = refused(compare.main, "--stream", "val/code", "log/b")
    assert "val/code" in told and "val, train" in told


MIXTURE = {"data": ["data/docs", "data/code"]}


def test_a_mixture_is_compared_on_each_folder_and_by_its_mean_only_where_the_shares_are_the_same(tmp_path, capsys):
    for seed in (1, 2, 3):
        for share, docs, code in ((0.25, 3.0, 2.0), (0.5, 2.5, 2.25)):
            ends = {"val/docs": docs + seed / 100, "val/code": code + seed / 50, "val": 9 - docs}
            weights = [10 * share, 10 * (1 - share)]
            write_run(tmp_path / f"share-{share}-{seed}", ends, seed, data_weights=weights, **MIXTURE)
        write_run(tmp_path / f"alone-{seed}", 2.0 + seed / 100, seed, data=["data/docs/"])
    quarter, half = f"{tmp_path}/share-0.25-*", f"{tmp_path}/share-0.5-*"
    assert status_of(compare.main, [quarter, half]) == 0
    head, names, first, second, in_code, in_docs, _ = capsys.readouterr().out.splitlines()
    assert head.startswith("data/docs data/code: ") and names.split()[:2] == ["val/code", "val/docs"]
    assert first.split()[:5] == ["share-0.25", "2.0400", "+-0.0200", "3.0200", "+-0.0100"]
    assert second.endswith("3 x  data_weights 0.5 0.5")
    assert "0.2500 above share-0.25 in val/code" in in_code and in_code.endswith("share-0.5 is worse.")
    assert "0.5000 below share-0.25 in val/docs" in in_docs and in_docs.endswith("share-0.5 is better.")
    # with the same shares, however they are written, the mean is the same measure
    write_run(tmp_path / "other", {"val/docs": 1, "val/code": 2, "val": 3}, data_weights=[1, 1], max_lr=1, **MIXTURE)
    (groups,) = compare.group_runs(logs.find_runs(half, f"{tmp_path}/other"))
    assert groups[0].streams == ["val", "val/code", "val/docs"] and "data_weights" not in groups[1].different
    # one folder's own loss, of runs that have others beside it or not
    assert status_of(compare.main, ["--stream", "val/docs", quarter, f"{tmp_path}/alone-*"]) == 0
    _, names, *_, verdict, _ = capsys.readouterr().out.splitlines()
    assert names.split()[0] == "val/docs"
    assert "alone ends 1.0000 below share-0.25 in val/docs" in verdict and verdict.endswith("alone is better.")
    assert len(compare.group_runs(logs.find_runs(quarter, f"{tmp_path}/alone-*"))) == 2


def test_of_an_accuracy_more_is_better_and_a_step_s_own_streams_end_at_the_last_step(tmp_path):
    for seed in (1, 2, 3):
        for name, hella in (("a", 0.25), ("b", 0.3)):
            write_run(tmp_path / f"{name}-{seed}", {"hella": hella + seed / 999}, seed, code=name)
    (groups,) = compare.group_runs(logs.find_runs(f"{tmp_path}/*"), "hella")
    assert compare.verdict(*groups).endswith("b is better.")
    assert [line.split()[0] for line in compare.report(groups)][2:4] == ["b", "a"]
    (groups,) = compare.group_runs(logs.find_runs(f"{tmp_path}/*"), "train")
    assert [group.losses for group in groups] == [dict.fromkeys((1, 2, 3), 4.5)] * 2


NANOGPT = """\
Overriding: dataset = shakespeare_char
number of parameters: 0.80M
step 0: train loss 4.1676, val loss 4.1649
iter 0: loss 4.1828, time 4251.39ms, mfu -100.00%
iter 1: loss 4.1373, time 27.11ms, mfu -100.00%
step 2: train loss 3.2411, val loss 3.2488
saving checkpoint to out
iter 2: loss 3.2196, time 3311.05ms, mfu 0.01%
"""


def test_logs_of_nanogpt_and_build_nanogpt_are_read_beside_ours(tmp_path, capsys):
    for seed in (1, 2):
        write_run(tmp_path / f"ours-{seed}", 3.0, seed)
    nano, build = tmp_path / "nanogpt.txt", tmp_path / "build-nanogpt" / "log.txt"
    nano.write_text(NANOGPT, encoding="utf-8")
    build.parent.mkdir()
    build.write_text("0 val 10.9512\n0 hella 0.2463\n0 train 10.955029\n50 val 3.5\n", encoding="utf-8")
    streams = {name: dict(zip(*map(list, both))) for name, both in logs.read_run(nano).streams.items()}
    assert streams == {"train": {0: 4.1828, 1: 4.1373, 2: 3.2196}, "val": {0: 4.1649, 2: 3.2488}}
    assert len(logs.find_runs(f"{tmp_path}/*")) == 3, "a file is a log only where it is named, or by its suffix"
    assert len(logs.find_runs(f"{tmp_path}/nano*.txt")) == 1
    assert status_of(compare.main, [f"{tmp_path}/ours-*", str(nano), str(build)]) == 0
    head, _, first, second, third, *verdicts, _ = capsys.readouterr().out.splitlines()
    assert head.startswith("texts: ") and first.split()[:2] == ["ours", "3.0000"]
    assert second.split()[:2] == ["nanogpt.txt", "3.2488"] and second.endswith("a log alone, to step 2")
    assert third.split()[:2] == ["build-nanogpt", "3.5000"] and third.endswith("a log alone, to step 50")
    assert verdicts[0].startswith("nanogpt.txt ends 0.2488 above ours. ") and "does not say" in verdicts[0]
    assert status_of(compare.main, [str(nano), str(build)]) == 0
    head, *_, verdict, _ = capsys.readouterr().out.splitlines()
    assert head.startswith("unknown data: ") and verdict.startswith("build-nanogpt ends 0.2512 above nanogpt.txt. ")


def test_the_command_compares_real_runs(data, tmp_path, capsys):
    """Also those on the same data at other paths; and other data at one path are other data."""
    copy = shutil.copytree(data, tmp_path / "copy")
    for rate in ("3e-3", "1e-6"):
        for seed, path in ((1, data), (2, f"{data}/"), (3, copy)):
            options = dict(seed=seed, max_steps=4, val_every=4, checkpoint_every=0, max_lr=rate, min_lr=1e-7)
            train(path, tmp_path / f"lr-{rate}-{seed}", **options)
    shutil.rmtree(copy)
    make_shards(copy, seed=5)
    train(copy, tmp_path / "other-data", **options)
    assert len(compare.group_runs(logs.find_runs(f"{tmp_path}/other-data", f"{tmp_path}/lr-3*"))) == 2
    assert status_of(compare.main, [f"{tmp_path}/lr-3*", f"{tmp_path}/lr-1*"]) == 0
    head, _, first, second, verdict, _ = capsys.readouterr().out.splitlines()
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
