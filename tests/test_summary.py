"""The account of a run, said before its first step: its numbers are those of the run."""

import re
from unittest import mock

import pytest
import train_gpt2
from plumbing.cli.console import UserError
from plumbing.data import shards
from plumbing.run.summary import size
from plumbing.system import devices

from edits import ADAMW
from harness import at_steps, flags, make_shards, patched, refusal_of, run, tiny_flags, train


def rows_of(printed):
    """{name: text} of the account in what was printed."""
    return dict(re.findall(r"(?m)^(\w+): +(.+)$", printed))


@pytest.fixture
def dry_run(tmp_path, monkeypatch):
    """A function that returns what a dry run of the tiny run with these changes prints."""
    monkeypatch.chdir(tmp_path)

    def run_dry(data="none", **changes):
        args = tiny_flags(data, "out", dry_run=True, **changes)
        _, said, _ = refusal_of(train_gpt2.main, *args)
        return said

    return run_dry


@pytest.mark.gpt2
def test_the_account_of_gpt2(tmp_path, monkeypatch):
    """By hand: 124,475,904 parameters of 16 bytes; for each of 10**10 tokens 6 FLOPs for each parameter in a matmul,
    all but 1024 * 768, and 12 * 12 * 768 * 1024 for attention; by 312e12 * 0.4 of them in a second.
    """
    monkeypatch.chdir(tmp_path)
    printed = refusal_of(train_gpt2.main, "--dry-run", "--data", "none", "--device", "cpu")[1]
    assert "(compute-optimal for this size: 2.5B tokens, " in printed
    said = rows_of(printed)
    assert said["model"].startswith("124,475,904 parameters on 1 x ")
    assert said["compute"] == "8.5e+18 FLOPs: 19h on an A100, 2.4h on 8, at 40% of their peak"
    assert said["memory"].startswith("2.0 GB for weights, gradients and optimizer")
    assert said["disk"] == "2 checkpoints of 1.5 GB, 498 MB for hf/"


@pytest.mark.gpt2
@pytest.mark.parametrize("shard, memory, free", [(True, "3.1 GB", True), (False, "25 GB", False)])
def test_an_account_answers_for_another_machine(shard, memory, free, tmp_path, monkeypatch):
    """By hand: 1,557,686,400 parameters of 16 bytes, on 8 cards of 24 GB or in shares of an eighth."""
    monkeypatch.chdir(tmp_path)
    typed = dict(preset="gpt2-xl", device="cpu", gpus=8, gpu_memory=24, shard=shard)
    _, printed, _ = refusal_of(train_gpt2.main, *flags(**typed), "--dry-run")
    said = rows_of(printed)
    assert said["model"].startswith("1,557,686,400 parameters on 8 x GPU of 24 GB")
    assert said["memory"].startswith(f"{memory} for weights, gradients and optimizer")
    assert "* ranks 8 *" in said["step"]
    assert ("more than the 24 GB free" in printed) != free


def test_another_machine_is_asked_about_in_a_dry_run_only(dry_run):
    assert "add --dry-run" in refusal_of(train_gpt2.main, *tiny_flags("none", "out", gpus=2))[2]


def test_a_start_reads_what_a_folder_says_of_itself_once(data, out):
    """A new run, and one that continues."""
    for _ in range(2):
        with patched(shards, "read_meta", mock.Mock(side_effect=shards.read_meta)):
            train(data, out)
            assert shards.read_meta.call_count == 1
        (out / "model_00012.pt").unlink()


def test_the_account_is_that_of_the_run(data, out):
    """Windows of 16 tokens and a target: 187 and 106 in the training shards, 124 in the other."""
    said = rows_of(train(data, out))
    model, _ = train_gpt2.load_model(str(out))
    assert said["model"].startswith(f"{sum(p.numel() for p in model.parameters()):,} parameters on 1 x ")
    assert said["data"] == "4,688 training tokens; the run reads 1,536: 0.33 passes"
    assert said["validation"] == "512 of 1,984 tokens, drawn from all of them; tokenizer: bytes"
    assert said["step"] == "128 tokens = B 4 * T 16 * ranks 1 * micro-steps 2"
    assert said["run"] == f"{out}, from step 0 to 12"


def test_a_branch_reads_on_in_its_parents_passes(data, out, tmp_path):
    train(data, out)
    said = rows_of(train(data, tmp_path / "longer", branch_from=out, max_steps=24))
    assert said["data"] == "4,688 training tokens; the run reads 3,072: 0.66 passes"
    assert said["run"].endswith(f", a branch of {out}, from step 12 to 24")


def test_each_folder_has_its_share_of_the_run_in_passes(data, out, tmp_path):
    """1,536 tokens; of the one that has 3,000, in 187 windows of 16, three quarters."""
    other = make_shards(tmp_path / "other", lengths=(2000, 3000))
    said = train((data, other), out, data_weights=(1, 3))
    assert f"{other}: 2,992 tokens, 75.0% of the run, 0.39 passes" in said


def test_micro_steps_are_those_of_a_rank(data, out):
    args = tiny_flags(data, out, max_steps=1, warmup_steps=1, batch_size=2)
    said, _ = run(train_gpt2.main, args, ranks=2)
    assert rows_of(said)["step"] == "128 tokens = B 2 * T 16 * ranks 2 * micro-steps 2"


def test_milestones_and_the_best_weights_take_space_on_the_disk(dry_run):
    disk = rows_of(dry_run(milestone_every=3, keep_best=True))["disk"]
    assert re.fullmatch(r"6 checkpoints of 20 MB, (6.5 MB) for model_best.pt, \1 for hf/", disk)


def test_each_optimizer_is_named_with_its_rate(dry_run):
    """By hand: 12 * 32**2 in the matrices of each of 2 blocks."""
    said = dry_run(optimizer="muon", muon_lr=0.02)
    assert re.search(r"(?m)^optimizer: +Muon for 24,576 parameters, --muon-lr 0.02$", said)
    assert re.search(r"(?m)^optimizer: +AdamW for [\d,]+ parameters, --max-lr 0.003$", said)


def test_a_model_that_is_larger_than_the_free_memory_is_told_before_the_run(dry_run, monkeypatch):
    monkeypatch.setattr(devices, "free_memory", lambda device: 10e6)
    assert "That is more than the 10 MB free here. With --shard" in dry_run()


def test_a_run_of_days_on_a_cpu_is_told_what_is_shorter(data, out):
    def stop(step, parts):
        raise UserError("That is enough.")

    args = tiny_flags(data, out, max_steps=10**9)
    with at_steps(stop):
        _, said, _ = refusal_of(train_gpt2.main, *args)
    assert "note: That takes more than a day. Use --preset quickstart" in said


def test_hours_of_a_gpu_are_not_said_of_a_model_that_is_too_small_to_fill_it(dry_run):
    assert "A100" not in rows_of(dry_run())["compute"]


@pytest.mark.parametrize("vocab_size", [320, 8192])
def test_what_is_compute_optimal_is_said_of_bpe_only(vocab_size, dry_run):
    assert ("compute-optimal" in dry_run(vocab_size=vocab_size)) == (vocab_size > 320)


def test_a_branch_and_a_resume_are_told_the_rates_that_were_set(data, out, tmp_path):
    """And not how far the parent's have decayed."""
    train(data, tmp_path / "parent", optimizer="muon", max_steps=8, schedule="wsd", muon_lr=0.07)
    (tmp_path / "parent" / "model_00008.pt").unlink()
    for changes in (dict(max_steps=8), dict(branch_from=tmp_path / "parent", out_dir=out, max_steps=12)):
        options = dict(out_dir=tmp_path / "parent", optimizer="muon", schedule="wsd", muon_lr=0.07) | changes
        said = train(data, **options)
        assert re.search(r"(?m)^optimizer: +Muon for 24,576 parameters, --muon-lr 0.07$", said)
        assert re.search(r"(?m)^optimizer: +AdamW for [\d,]+ parameters, --max-lr 0.003$", said)


SGD = {ADAMW: "torch.optim.SGD(groups, lr=config.max_lr, momentum=0.9)"}


def test_what_another_optimizer_keeps_is_counted_after_the_first_step(changed, data, out):
    """One number for each parameter, and not two."""
    said = changed(SGD).train()
    (parameters,) = re.findall(r"optimizer: +SGD for ([\d,]+) parameters, --max-lr 0.003", said)
    num_bytes = 4 * int(parameters.replace(",", ""))
    assert f"state takes {size(num_bytes)}, and not {size(2 * num_bytes)} as the account above assumes" in said
    assert "as the account above" not in train(data, out.with_name("muon"), optimizer="muon")


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_checkpoints_take_what_is_said(optimizer, data, out):
    """Muon keeps one number for each parameter, AdamW two. Beside the state there are some kilobytes."""
    said = rows_of(train(data, out, optimizer=optimizer, n_embd=64, max_steps=2))
    number, unit = re.search(r"of ([\d.]+) (KB|MB)", said["disk"]).groups()
    num_bytes = float(number) * {"KB": 1e3, "MB": 1e6}[unit]
    size = (out / "model_00002.pt").stat().st_size
    assert num_bytes == pytest.approx(size, rel=0.08)
