"""The account of a run, said before its first step: its numbers are those of the run."""

import re

import pytest
import train_gpt2

from harness import refusal_of, tiny_flags, train


def account_of(printed):
    return dict(re.findall(r"(?m)^(\w+): +(.+)$", printed))


def dry_run(**changes):
    args = tiny_flags("none", "out", dry_run=True, device="cpu", **changes)
    return account_of(refusal_of(train_gpt2.main, *args)[1])


@pytest.mark.gpt2
def test_the_account_of_gpt2(tmp_path, monkeypatch):
    """By hand: 124,475,904 parameters of 16 bytes; for each of 10**10 tokens 6 FLOPs for each parameter in a matmul,
    all but 1024 * 768, and 12 * 12 * 768 * 1024 for attention; by 312e12 * 0.4 of them in a second.
    """
    monkeypatch.chdir(tmp_path)
    said = account_of(refusal_of(train_gpt2.main, "--dry-run", "--data", "none", "--device", "cpu")[1])
    assert said["model"].startswith("124,475,904 parameters on 1 x ")
    assert said["compute"] == "8.5e+18 FLOPs: 19h on an A100, 2.4h on 8, at 40% of their peak"
    assert said["memory"].startswith("2.0 GB for weights, gradients and optimizer")
    assert said["disk"] == "2 checkpoints of 1.5 GB, 498 MB for hf/"


def test_hours_of_a_gpu_are_not_said_of_a_model_that_is_too_small_to_fill_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "A100" not in dry_run()["compute"]


@pytest.mark.parametrize("vocab_size", [320, 8192])
def test_what_is_compute_optimal_is_said_of_bpe_only(vocab_size, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = refusal_of(train_gpt2.main, *tiny_flags("none", "out", dry_run=True, vocab_size=vocab_size))[1]
    assert ("compute-optimal" in printed) == (vocab_size > 320)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_checkpoints_take_what_is_said(optimizer, data, tmp_path):
    """Muon keeps one number for each parameter, AdamW two. Beside the state there are some kilobytes."""
    said = account_of(train(data, tmp_path / "out", optimizer=optimizer, n_embd=64, max_steps=2))
    number, unit = re.search(r"of ([\d.]+) (KB|MB)", said["disk"]).groups()
    num_bytes = float(number) * {"KB": 1e3, "MB": 1e6}[unit]
    measured = (tmp_path / "out" / "model_00002.pt").stat().st_size
    assert num_bytes == pytest.approx(measured, rel=0.08), said["disk"]
