"""The account of a run, said before its first step: its numbers are those of the run."""

import re

import pytest
import train_gpt2
from plumbing.cli.console import UserError
from plumbing.run.summary import size
from plumbing.system import devices

from edits import ADAMW
from harness import at_steps, flags, refusal_of, tiny_flags, train


def rows_of(printed):
    """{name: text} of the account in what was printed."""
    return dict(re.findall(r"(?m)^(\w+): +(.+)$", printed))


@pytest.mark.gpt2
def test_the_account_of_gpt2():
    """By hand: 124,475,904 parameters of 16 bytes; for each of 10**10 tokens 6 FLOPs for each parameter in a matmul,
    all but 1024 * 768, and 12 * 12 * 768 * 1024 for attention; by 312e12 * 0.4 of them in a second.
    """
    typed = flags(dry_run=True, data="none", device="cpu", batch_size=1)  # a small one takes less time
    printed = refusal_of(train_gpt2.main, *typed)[1]
    assert "(compute-optimal for this size: 2.5B tokens, " in printed
    said = rows_of(printed)
    assert said["model"].startswith("124,475,904 parameters on 1 x ")
    assert said["compute"] == "8.5e+18 FLOPs: 19h on an A100, 2.4h on 8, at 40% of their peak"
    assert said["memory"].startswith("2.0 GB for weights, gradients and optimizer")
    assert said["disk"] == "2 checkpoints of 1.5 GB, 498 MB for hf/"


@pytest.mark.gpt2
@pytest.mark.parametrize("shard, memory, is_told", [(True, "6.5 MB", False), (False, "52 MB", True)])
def test_an_account_answers_for_another_machine(shard, memory, is_told):
    """By hand: 4 * (12 * 256**2 + 13 * 256) parameters in the blocks, 512 in ln_f and 256 * (320 + 32), of 16 bytes,
    on 8 cards of 40 MB or in shares of an eighth. Of 12 steps every third has a milestone.
    """
    shape = dict(n_layer=4, n_embd=256, vocab_size=320, batch_size=1, total_batch_size=256, dtype="auto")
    machine = dict(dry_run=True, gpus=8, gpu_memory=0.04, shard=shard)
    printed = train("none", "out", milestone_every=3, keep_best=True, **machine, **shape)
    said = rows_of(printed)
    assert said["model"].startswith("3,249,664 parameters on 8 x GPU of 0.04 GB, bfloat16")
    assert said["memory"].startswith(f"{memory} for weights, gradients and optimizer")
    assert said["step"] == "256 tokens = B 1 * T 16 * ranks 8 * micro-steps 2"
    assert said["disk"] == "6 checkpoints of 39 MB, 13 MB for model_best.pt, 13 MB for hf/"
    assert ("more than the 40 MB free" in printed) == is_told
    assert "--gpu" not in printed.rpartition("Next:")[2]
    # what is known of large models and of BPE: hours of a GPU, and how many tokens are optimal
    assert "A100" not in printed and "compute-optimal" not in printed


def test_another_machine_is_asked_about_in_a_dry_run_only():
    assert "add --dry-run" in refusal_of(train_gpt2.main, *tiny_flags("none", "out", gpu_memory=80))[2]


def test_the_account_is_that_of_the_run(data, out):
    """Windows of 16 tokens and a target: 187 and 106 in the training shards, 124 in the other."""
    said = rows_of(train(data, out))
    model, _ = train_gpt2.load_model(out)
    assert said["model"].startswith(f"{sum(p.numel() for p in model.parameters()):,} parameters on 1 x ")
    assert said["data"] == "4,688 training tokens; the run reads 1,536: 0.33 passes"
    assert said["validation"] == "512 of 1,984 tokens, drawn from all of them; tokenizer: bytes"
    assert said["step"] == "128 tokens = B 4 * T 16 * ranks 1 * micro-steps 2"
    assert said["run"] == f"{out}, from step 0 to 12"


def test_a_branch_reads_on_in_its_parents_passes(data, out, recwarn):
    train(data, out, max_steps=6)
    said = rows_of(train(data, "longer", branch_from=out, max_steps=24, dry_run=True))
    assert said["data"] == "4,688 training tokens; the run reads 3,072: 0.66 passes"
    assert said["run"].endswith(f", a branch of {out}, from step 6 to 24")
    # torch warns of weights that are copied to a model without memory
    assert not [warning.message for warning in recwarn.list if warning.category is UserWarning]


def test_a_model_that_is_larger_than_the_free_memory_is_told_before_the_run(monkeypatch):
    monkeypatch.setattr(devices, "free_memory", lambda device: 10e6)
    assert "That is more than the 10 MB free here. With --shard" in train("none", "out", dry_run=True)


def test_a_run_of_days_on_a_cpu_is_told_what_is_shorter(data, out):
    def stop(step, parts):
        raise UserError("That is enough.")

    args = tiny_flags(data, out, max_steps=10**9)
    with at_steps(stop):
        _, said, _ = refusal_of(train_gpt2.main, *args)
    assert "note: That takes more than a day. Use --preset quickstart" in said


def test_each_optimizer_is_named_with_the_rate_that_was_set(data, out):
    """By hand: 12 * 32**2 in the matrices of each of 2 blocks. A branch and a resume are not told how far
    the rates have decayed.
    """
    options = dict(optimizer="muon", schedule="wsd", muon_lr=0.07)
    said = [train(data, out, max_steps=4, **options)]
    said.append(train(data, "branch", branch_from=out, max_steps=5, **options))
    (out / "model_00004.pt").unlink()
    said.append(train(data, out, max_steps=4, **options))
    for text in said:
        assert re.search(r"(?m)^optimizer: +Muon for 24,576 parameters, --muon-lr 0.07$", text)
        assert re.search(r"(?m)^optimizer: +AdamW for [\d,]+ parameters, --max-lr 0.003$", text)


SGD = {ADAMW: "torch.optim.SGD(groups, lr=config.max_lr, momentum=0.9)"}


def test_what_another_optimizer_keeps_is_counted_after_the_first_step(changed, data, out):
    """One number for each parameter, and not two."""
    said = changed(SGD).train(max_steps=2)
    (parameters,) = re.findall(r"optimizer: +SGD for ([\d,]+) parameters, --max-lr 0.003", said)
    num_bytes = 4 * int(parameters.replace(",", ""))
    assert f"state takes {size(num_bytes)}, and not {size(2 * num_bytes)} as the account above assumes" in said
    assert "as the account above" not in train(data, "muon", optimizer="muon", max_steps=2)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_checkpoints_take_what_is_said(optimizer, data, out):
    """Muon keeps one number for each parameter, AdamW two. Beside the state there are some kilobytes."""
    said = rows_of(train(data, out, optimizer=optimizer, n_embd=64, max_steps=2))
    number, unit = re.search(r"of ([\d.]+) (KB|MB)", said["disk"]).groups()
    num_bytes = float(number) * {"KB": 1e3, "MB": 1e6}[unit]
    size = (out / "model_00002.pt").stat().st_size
    assert num_bytes == pytest.approx(size, rel=0.08)
