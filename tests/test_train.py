"""Whole runs: compared with a plain loop with transformers' GPT-2, on one process and two, and when things go wrong."""

import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import hellaswag
import numpy as np
import pytest
import tokenizer
import torch
import train_gpt2
from plumbing import distributed, fit
from plumbing.checkpoint import load_checkpoint, load_model_state, newest_checkpoint, resize
from plumbing.cli import UserError
from plumbing.distributed import World, has_float8
from plumbing.huggingface import export_huggingface
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from train_gpt2 import IGNORE_INDEX, orthogonalize

from harness import (
    ROOT,
    TINY,
    flags,
    make_shards,
    patched,
    read_log,
    refused,
    run,
    status_of,
    succeed,
    tiny_flags,
    tiny_model,
    train,
)


def losses(out_dir, stream="train"):
    return np.array([float(value) for value in read_log(out_dir, stream).values()])


# ----- Compared with a plain loop -----------------------------------------------------------------------


def windows_of(folder, split, T, masks):
    """x and y of every window in file order; targets that the mask leaves out are IGNORE_INDEX."""
    xs, ys = [], []
    for path in sorted(Path(folder).glob(f"*_{split}_*.npy")):
        tokens = np.load(path).astype(np.int64)
        mask = np.load(path.with_suffix(".mask")) if masks else np.ones(len(tokens))
        for start in range(0, len(tokens) - T, T):
            xs.append(tokens[start : start + T])
            ys.append(np.where(mask[start + 1 : start + T + 1], tokens[start + 1 : start + T + 1], IGNORE_INDEX))
    return torch.tensor(np.array(xs)), torch.tensor(np.array(ys))


def plain_loop(hf_directory, folder, masks):
    """What the log should say: ten steps of 8 windows in one batch with transformers and torch's own AdamW.

    The learning rates are worked by hand: after the warmup, progress goes by eighths of the cosine.
    """
    from transformers import GPT2LMHeadModel

    hf = GPT2LMHeadModel.from_pretrained(hf_directory).eval()
    hf.resize_token_embeddings(320, mean_resizing=False)
    weight = hf.transformer.wte.weight
    with torch.no_grad():
        weight[257:] = weight[:257].mean(0)  # how our vocabulary is padded
    decayed = [p for p in hf.parameters() if p.dim() >= 2]
    spared = [p for p in hf.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": spared, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, fused=False, foreach=False)
    rates = [1e-3, 2e-3] + [2e-4 + 0.9e-3 * (1 + math.cos(math.pi * eighths / 8)) for eighths in range(8)]

    def mean_loss(x, y):
        return F.cross_entropy(hf(x).logits.flatten(0, 1), y.flatten(), ignore_index=IGNORE_INDEX)

    x, y = windows_of(folder, "train", 16, masks)
    val_x, val_y = windows_of(folder, "val", 16, masks)
    expected = {"train": [], "norm": [], "lr": rates, "val": []}
    for step, rate in enumerate(rates):
        if step == 5:
            with torch.no_grad():
                expected["val"].append(mean_loss(val_x[:33], val_y[:33]).item())
        loss = mean_loss(x[8 * step : 8 * step + 8], y[8 * step : 8 * step + 8])
        loss.backward()
        expected["train"].append(loss.item())
        expected["norm"].append(torch.nn.utils.clip_grad_norm_(hf.parameters(), 1.0).item())
        for group in groups:
            adamw.param_groups[groups.index(group)]["lr"] = rate
        adamw.step()
        adamw.zero_grad()
    return expected


PLAIN = dict(max_steps=10, warmup_steps=2, max_lr=2e-3, min_lr=2e-4, val_every=5, val_tokens=33 * 16 + 5)
PLAIN |= dict(shuffle=False, checkpoint_every=0)


@pytest.fixture(scope="module", params=[False, True], ids=["all targets", "masked targets"])
def plain(request, tmp_path_factory):
    """A folder of shards, a model to begin from, and what a plain loop makes of the two."""
    folder = make_shards(tmp_path_factory.mktemp("plain") / "data", masks=request.param)
    start = folder.parent / "start"
    export_huggingface(tiny_model(vocab_size=257), tokenizer.get_encoding("bytes"), start)
    return folder, start, plain_loop(start, folder, request.param)


def assert_equals_plain_loop(out_dir, expected):
    assert np.allclose(losses(out_dir), expected["train"], atol=2e-5, rtol=0)
    assert np.allclose(losses(out_dir, "norm"), expected["norm"], rtol=1e-4)
    assert np.allclose(losses(out_dir, "lr"), expected["lr"], rtol=1e-6)
    assert losses(out_dir, "val")[1] == pytest.approx(expected["val"][0], abs=1e-5)


@pytest.mark.parametrize("batch_size", [1, 8])
def test_a_run_equals_a_plain_loop_with_transformers_whatever_the_accumulation(plain, batch_size, tmp_path):
    folder, start, expected = plain
    assert train(folder, tmp_path / "out", init_from=start, batch_size=batch_size, **PLAIN) == 0
    assert_equals_plain_loop(tmp_path / "out", expected)


def train_and_report(args, report):
    """Train, noting a digest of this rank's weights after each step and how often gradients were reduced."""
    digests, reductions = [], []

    def step_and_digest(model, *rest):
        result = train_step(model, *rest)
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        digests.append(hashlib.sha256(flat.numpy().tobytes()).hexdigest())
        return result

    def counting_ddp(*args, **options):
        assert options["bucket_cap_mb"] > 3 * 28, (
            "GPT-2 124M's blocks have 28 MB: torch's 25 would cut inside of each"
        )
        model = DDP(*args, **options)

        def reduce(state, bucket):
            reductions.append(bucket.index())
            return allreduce_hook(state, bucket)

        model.register_comm_hook(None, reduce)
        return model

    with patched(train_gpt2, "train_step", step_and_digest) as train_step:
        with patched(train_gpt2, "DDP", counting_ddp) as DDP:
            try:
                train_gpt2.main(args)
            finally:
                found = {"weights": digests, "reductions": len(reductions)}
                Path(f"{report}.{os.environ['RANK']}").write_text(json.dumps(found), encoding="utf-8")


def check_ranks_agree(report, steps):
    """The weights are those of the other rank after every step, and the gradients were reduced once in each."""
    first, second = [json.loads(Path(f"{report}.{rank}").read_text(encoding="utf-8")) for rank in (0, 1)]
    assert len(set(first["weights"])) == steps and first == second
    assert first["reductions"] == steps  # the tiny model's gradients fit in one bucket


def test_two_processes_equal_a_plain_loop_and_each_other(plain, tmp_path):
    """Two micro-steps on each of two ranks, as the plain loop's one batch of eight.

    Fails (each was tried) if no_sync covers the last forward pass, too, or no forward pass at all; if the loss is one
    rank's; if masked targets are averaged by micro-step.
    """
    folder, start, expected = plain
    args = tiny_flags(folder, tmp_path / "out", init_from=start, **PLAIN | {"batch_size": 2})
    succeed(train_and_report, args, tmp_path / "report", output=tmp_path / "output", ranks=2)
    assert_equals_plain_loop(tmp_path / "out", expected)
    check_ranks_agree(tmp_path / "report", 10)
    assert (tmp_path / "output.1").read_text(encoding="utf-8") == ""  # rank 1 has nothing to say


def test_two_processes_equal_one_with_muon(data, tmp_path):
    options = dict(optimizer="muon", batch_size=2, val_every=3, max_steps=10)
    assert train(data, tmp_path / "one", **options | {"batch_size": 8}) == 0
    args = tiny_flags(data, tmp_path / "two", **options)
    succeed(train_and_report, args, tmp_path / "report", output=tmp_path / "output", ranks=2)
    for stream in ("train", "val"):
        assert np.allclose(losses(tmp_path / "one", stream), losses(tmp_path / "two", stream), atol=2e-5, rtol=0)
    check_ranks_agree(tmp_path / "report", 10)


@pytest.mark.parametrize("batch_size", [5, 64])
def test_validation_does_not_depend_on_the_batch_size_or_on_train_shards(plain, batch_size, tmp_path):
    """37 windows, which no B here divides, of the validation split, compared with one batch of 37 rows."""
    folder, start, _ = plain
    masks = any(folder.glob("*.mask"))
    more = make_shards(tmp_path / "more", lengths=(2000, 3000, 1700, 900), masks=masks)
    (path,) = more.glob("*_val_*.npy")
    tokens = np.load(path)
    tokens[100:600:10] = 256  # more documents
    np.save(path, tokens)
    options = dict(init_from=start, batch_size=batch_size, total_batch_size=16 * batch_size)
    options |= dict(val_tokens=37 * 16, val_every=1)
    assert train(more, tmp_path / "out", **TINY | options | {"max_steps": 1}) == 0
    shape, weights, _ = load_model_state(start)
    model = train_gpt2.GPT.from_state(*resize(shape, weights, block_size=32, vocab_size=320))
    x, y = windows_of(more, "val", 16, masks)
    with torch.no_grad():
        expected = F.cross_entropy(model(x[:37])[0].flatten(0, 1), y[:37].flatten(), ignore_index=IGNORE_INDEX).item()
    assert losses(tmp_path / "out", "val")[0] == pytest.approx(expected, abs=1e-5)
    targets = y[:37][y[:37] != IGNORE_INDEX]
    num_bytes = (targets < 256).sum().item()  # a byte each, <|endoftext|> none
    bits_per_byte = expected * len(targets) / math.log(2) / num_bytes
    assert num_bytes < len(targets)
    assert losses(tmp_path / "out", "val_bpb")[0] == pytest.approx(bits_per_byte, rel=1e-5)


# ----- Learning -----------------------------------------------------------------------------------------


def test_the_same_command_gives_the_same_bits_and_another_seed_others(data, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert train(data, tmp_path / name, seed=seed, max_steps=6) == 0
    assert read_log(tmp_path / "a") == read_log(tmp_path / "b")
    assert read_log(tmp_path / "a", "val") == read_log(tmp_path / "b", "val")
    assert not set(read_log(tmp_path / "a").values()) & set(read_log(tmp_path / "c").values())


def test_a_model_learns_one_batch_by_heart(tmp_path):
    """8 windows of random letters: nothing to learn but the letters themselves, and the loss goes to 0."""
    folder = make_shards(tmp_path / "data", lengths=(200, 129))
    tokens = np.random.default_rng(0).integers(97, 113, 129).astype(np.uint16)
    np.save(folder / "tiny_train_000001.npy", tokens)
    options = dict(max_steps=80, max_lr=1e-2, min_lr=1e-3, val_every=0, batch_size=8, checkpoint_every=0)
    assert train(folder, tmp_path / "out", optimizer="muon", **options) == 0
    curve = losses(tmp_path / "out")
    assert curve[0] == pytest.approx(math.log(320), abs=0.1) and curve[-1] < 0.1


def hellaswag_file(folder, contexts, labels=(0, 1, 2, 3) * 3):
    """An example per context, with endings of four lengths."""
    rest = {"activity_label": "Roof", "endings": ["a b", "cde", "f", "gh"]}
    examples = [rest | {"ctx": ctx, "label": label} for ctx, label in zip(contexts, labels)]
    path = folder / "hellaswag.jsonl"
    path.write_text("".join(json.dumps(example) + "\n" for example in examples), encoding="utf-8")
    return path


def test_evaluation_leaves_the_training_losses_bit_for_bit_alone(data, tmp_path):
    hellaswag_data = hellaswag_file(tmp_path, [f"A man is on roof {n}. he" for n in range(6)])
    off = dict(val_every=0, sample_every=0, hellaswag_every=0, checkpoint_every=0)
    on = dict(val_every=1, sample_every=2, hellaswag_every=2, hellaswag_data=hellaswag_data, checkpoint_every=3)
    assert train(data, tmp_path / "off", **off) == 0
    assert train(data, tmp_path / "on", **on) == 0
    assert read_log(tmp_path / "off") == read_log(tmp_path / "on")
    assert sorted(read_log(tmp_path / "on", "hella")) == [0, 2, 4, 6, 8, 10, 12]
    assert sorted(read_log(tmp_path / "on", "val")) == list(range(13))  # the last update is evaluated too
    assert sorted(read_log(tmp_path / "off", "val")) == []


def test_hellaswags_score_is_acc_norm_over_all_ranks(data, tmp_path):
    """12 examples on 2 ranks score as on one, and as acc_norm of the exported model; acc is another number here."""
    labels = [0, 0, 0, 0, 1, 0, 1, 2, 1, 2, 1, 3]  # whichever ending a rule prefers, its count is its own
    hellaswag_data = hellaswag_file(tmp_path, ["ab " * n + "c" for n in range(1, 13)], labels)
    options = dict(hellaswag_every=6, hellaswag_data=hellaswag_data, max_steps=6, val_every=0, checkpoint_every=0)
    assert train(data, tmp_path / "one", **options) == 0
    args = tiny_flags(data, tmp_path / "two", **options)
    succeed(train_gpt2.main, args, output=tmp_path / "output", ranks=2)
    model, enc = train_gpt2.load_model(str(tmp_path / "one"))
    examples = hellaswag.load_examples(hellaswag_data, enc)
    total, mean, _ = hellaswag.score(model, examples, enc.n_vocab)
    acc, acc_norm = ((values.argmax(1) == labels).mean() for values in (total, mean))
    shares = [(mean.argmax(1) == labels)[rank::2].mean() for rank in (0, 1)]
    assert acc_norm not in (acc, *shares), "or this test could not tell them apart"
    for folder in ("one", "two"):
        assert float(read_log(tmp_path / folder, "hella")[6]) == pytest.approx(acc_norm)


def test_tok_per_s_counts_the_tokens_of_all_ranks_by_the_steps_time(data, tmp_path):
    """128 tokens in a step that takes a quarter of a second are 512 a second."""
    clock = itertools.count(0, 0.25)
    with patched(train_gpt2.time, "perf_counter", lambda: next(clock)):
        with patched(train_gpt2, "train_step", lambda *args: (1.0, 1.0, False)):
            assert train(data, tmp_path / "out", max_steps=2, val_every=0, checkpoint_every=0) == 0
    assert {float(value) for value in read_log(tmp_path / "out", "tok/s").values()} == {512.0}


# ----- Muon ---------------------------------------------------------------------------------------------


def newton_schulz_by_hand(G):
    """The iteration of Jordan et al. 2024 on one matrix in float64, written for wide ones."""
    X = G.T if G.shape[0] > G.shape[1] else G
    X = X / np.linalg.norm(X)
    for _ in range(5):
        A = X @ X.T
        X = 3.4445 * X - 4.7750 * A @ X + 2.0315 * A @ A @ X
    return X.T if G.shape[0] > G.shape[1] else X


@pytest.mark.parametrize("shape", [(16, 16), (16, 64), (64, 16)])
def test_orthogonalize_equals_a_loop_over_matrices_and_makes_singular_values_near_1(shape):
    G = torch.randn(5, *shape) * torch.tensor([1e-4, 1e-2, 1.0, 10.0, 1e3])[:, None, None]
    result = orthogonalize(G)
    for one, matrix in zip(result, G.double().numpy()):
        assert np.allclose(one.numpy(), newton_schulz_by_hand(matrix), atol=1e-3)
        values = np.linalg.svd(one.numpy(), compute_uv=False)
        # "about 1": the quintic's fixed band; the smallest of a square matrix may take longer to come up
        assert values.max() < 1.25 and np.median(values) > 0.65
        # the directions stay: U V^T of the input is what the result comes near to
        U, _, Vt = np.linalg.svd(matrix, full_matrices=False)
        assert (one.numpy() * (U @ Vt)).sum() / min(shape) > 0.7


@pytest.mark.parametrize("shape, split, scale", [((48, 16), 3, 1.0), ((64, 16), 1, 2.0), ((16, 64), 1, 1.0)])
def test_a_muon_step_equals_one_worked_matrix_by_matrix(shape, split, scale):
    """Nesterov momentum, orthogonalized per query, key and value, scaled by sqrt(rows/columns) if tall, decayed."""
    weights = [torch.nn.Parameter(torch.randn(shape)) for _ in range(2)]
    expected = [p.detach().double().numpy().copy() for p in weights]
    muon = train_gpt2.Muon([{"params": weights, "split": split}], 0.02, 0.9, 0.1)
    momenta = [np.zeros(shape) for _ in weights]
    for _ in range(3):
        for i, p in enumerate(weights):
            p.grad = torch.randn(shape)
            gradient = p.grad.double().numpy()
            momenta[i] = 0.9 * momenta[i] + 0.1 * gradient
            parts = np.split(0.9 * momenta[i] + 0.1 * gradient, split)
            update = np.concatenate([newton_schulz_by_hand(part) for part in parts])
            expected[i] = expected[i] * (1 - 0.02 * 0.1) - 0.02 * scale * update
        muon.step()
    for p, value in zip(weights, expected):
        assert np.allclose(p.detach().numpy(), value, atol=1e-3)


# ----- What a run writes --------------------------------------------------------------------------------


def test_log_txt_has_a_step_a_stream_and_a_value_per_line(data, tmp_path, capsys):
    assert train(data, tmp_path / "out") == 0
    lines = (tmp_path / "out" / "log.txt").read_text(encoding="utf-8").splitlines()
    assert all(re.fullmatch(r"\d+ (train|val|val_bpb|hella|lr|norm|tok/s) -?[\d.e+-]+", line) for line in lines)
    for stream in ("train", "lr", "norm", "tok/s"):
        assert sorted(read_log(tmp_path / "out", stream)) == list(range(12))
    assert sorted(read_log(tmp_path / "out", "val")) == [0, 4, 8, 12]
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ") and "norm" in line]
    for step, line in enumerate(printed):
        assert re.match(rf"step +{step} \| loss +\d.*lr .*norm .* ms.* tok/s.* left$", line) and len(line) <= 80, line
    assert len(printed) == 12
    text = (tmp_path / "out" / "run.txt").read_text(encoding="utf-8")
    assert all(f"\n{name}: " in "\n" + text for name in ("command", "config", "versions", "machine"))


def test_a_checkpoint_is_plain_data_with_gpt2s_names(data, tmp_path):
    """Which torch's safe loader reads without any class of ours; no prefixes, weights tied in the file."""
    assert train(data, tmp_path / "out") == 0
    checkpoint = torch.load(tmp_path / "out" / "model_00012.pt", weights_only=True)
    weights = checkpoint["model"]
    assert len(weights) == 2 + 2 * 12 + 2 + 1
    assert all(name.startswith(("transformer.", "lm_head.")) for name in weights)
    assert all(weight.dtype == torch.float32 for weight in weights.values())
    assert weights["lm_head.weight"].data_ptr() == weights["transformer.wte.weight"].data_ptr()
    assert checkpoint["step"] == 12 and checkpoint["tokenizer"] == "bytes"
    assert checkpoint["config"]["n_embd"] == 32 and checkpoint["config"]["vocab_size"] == 320
    assert checkpoint["loader"]["position"] == 12 * 8
    assert {"optimizer", "val_loss"} <= set(checkpoint)


def test_the_command_line_trains_evaluates_samples_and_exports(data, tmp_path):
    """The real script in a real process; what it exports is what its last checkpoint holds."""
    from transformers import AutoTokenizer, GPT2LMHeadModel

    args = tiny_flags(data, "out", sample_every=6)
    command = [sys.executable, str(ROOT / "train_gpt2.py"), *args]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert sum("| sample |" in line for line in done.stdout.splitlines()) == 8  # four each at steps 6 and 12
    out = tmp_path / "out"
    names = {"hf", "log.txt", "run.txt", "model_00008.pt", "model_00012.pt"}
    assert {path.name for path in out.iterdir()} == names
    model, enc = train_gpt2.load_model(str(out))
    hf = GPT2LMHeadModel.from_pretrained(out / "hf").eval()
    idx = torch.tensor([enc.encode_ordinary("abcdefgh")])
    with torch.no_grad():
        assert torch.allclose(model(idx)[0][..., :257], hf(idx).logits, atol=1e-4)
    assert AutoTokenizer.from_pretrained(out / "hf").decode(idx[0]) == "abcdefgh"


def test_a_run_goes_on_from_the_weights_of_another(data, tmp_path):
    """--init-from a run's folder, its checkpoint or its export: the first loss is where the other ended."""
    assert train(data, tmp_path / "first", max_steps=40, max_lr=1e-2, val_every=40, checkpoint_every=0) == 0
    trained = losses(tmp_path / "first", "val")[-1]
    assert trained < losses(tmp_path / "first", "val")[0] - 1
    for number, source in enumerate(("first", "first/model_00040.pt", "first/hf")):
        out = tmp_path / f"second{number}"
        assert train(data, out, init_from=tmp_path / source, max_steps=1, val_every=1) == 0
        # the export's vocabulary was cut and is padded again: those rows weigh a little
        assert losses(out, "val")[0] == pytest.approx(trained, abs=1e-5 if number < 2 else 0.05)


def test_fine_tuning_takes_the_block_size_of_a_shorter_model(data, tmp_path, capsys):
    """And resumes when that model is gone; a length that is asked for stays, and is refused."""
    options = {name: value for name, value in TINY.items() if name not in ("block_size", "sequence_length")}
    assert train(data, tmp_path / "first", max_steps=2, checkpoint_every=0) == 0
    args = flags(data=data, out_dir=tmp_path / "out", init_from=tmp_path / "first", **options | {"max_steps": 4})
    assert status_of(train_gpt2.main, args) == 0
    shape = load_checkpoint(tmp_path / "out" / "model_00004.pt")["config"]
    assert shape["block_size"] == shape["sequence_length"] == 32
    (tmp_path / "first").rename(tmp_path / "gone")
    capsys.readouterr()
    assert status_of(train_gpt2.main, args) == 0 and "is finished" in capsys.readouterr().out
    args = flags(data=data, out_dir=tmp_path / "two", init_from=tmp_path / "gone", sequence_length=64, **options)
    assert status_of(train_gpt2.main, args) == 2 and "--sequence-length 64" in capsys.readouterr().err


# ----- Precision and compiler ---------------------------------------------------------------------------


needs_float8 = pytest.mark.skipif(not has_float8("cpu"), reason="this processor does not multiply float8 matrices")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", pytest.param("fp8", marks=needs_float8)])
def test_half_precision_trains_and_keeps_float32_weights(data, tmp_path, dtype):
    options = dict(max_steps=24, max_lr=1e-2)
    assert train(data, tmp_path / "half", dtype=dtype, **options) == 0
    assert train(data, tmp_path / "full", dtype="float32", **options) == 0
    half, full = losses(tmp_path / "half"), losses(tmp_path / "full")
    assert len(half) == 24 and np.isfinite(half).all()
    assert half[0] == pytest.approx(full[0], abs=0.02) and (half != full).any()
    assert half[-1] < half[0] - 1
    checkpoint = load_checkpoint(tmp_path / "half" / "model_00024.pt")
    assert all(tensor.dtype == torch.float32 for tensor in checkpoint["model"].values())
    assert bool(checkpoint["scaler"]) == (dtype == "float16")


def infinite(model, loss):
    """The same loss; the gradient of the embedding, which is AdamW's, becomes infinite, once."""

    def hook(grad):
        handle.remove()
        return grad * math.inf

    handle = model.transformer.wte.weight.register_hook(hook)
    return loss


def test_an_overflow_in_float16_skips_the_step_of_every_optimizer(data, tmp_path):
    with spoiled(1, 0, infinite):
        assert train(data, tmp_path / "out", dtype="float16", optimizer="muon", max_steps=3, val_every=1) == 0
    val = losses(tmp_path / "out", "val")
    assert val[0] != val[1] == val[2] != val[3]
    # the scaler begins at 65,536
    assert load_checkpoint(tmp_path / "out" / "model_00003.pt")["scaler"]["scale"] == 2.0**15


def test_a_compiler_that_fails_at_its_first_call_costs_one_warning(data, tmp_path, capsys):
    def broken_compile(model, **options):
        def fail(*args, **kwargs):
            raise RuntimeError("no C++ compiler found\nand much more")

        return fail

    assert train(data, tmp_path / "plain", max_steps=4) == 0
    capsys.readouterr()
    with patched(torch, "compile", broken_compile):
        assert train(data, tmp_path / "broken", max_steps=4, compile=True) == 0
    printed = capsys.readouterr()
    warnings = [line for line in (printed.out + printed.err).splitlines() if "warning" in line]
    assert len(warnings) == 1 and "no C++ compiler found" in warnings[0]
    assert read_log(tmp_path / "plain") == read_log(tmp_path / "broken")


def no_flash():
    """Flash attention raises; the plain kernel, which is what is left, does not."""
    sdpa = F.scaled_dot_product_attention

    def attention(q, k, v, **options):
        if torch.backends.cuda.flash_sdp_enabled():
            raise RuntimeError("no kernel for this device")
        return sdpa(q, k, v, **options)

    return patched(F, "scaled_dot_product_attention", attention)


def train_without_flash_on_rank_1(args):
    with no_flash() if os.environ.get("RANK") == "1" else contextlib.nullcontext():
        train_gpt2.main(args)


def test_a_fused_attention_that_fails_costs_one_warning(data, tmp_path, capsys):
    with no_flash():
        assert train(data, tmp_path / "out", max_steps=2) == 0
    warnings = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert len(warnings) == 1 and "Fused attention failed" in warnings[0]


def test_a_defect_in_the_model_is_raised_and_not_explained_away(data, tmp_path):
    def broken(*args, **options):
        raise ValueError("a defect")

    with patched(train_gpt2.GPT, "forward", broken), pytest.raises(ValueError, match="a defect"):
        train(data, tmp_path / "out", max_steps=2)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_run_compiles_nothing_anew(data, tmp_path, capsys, backend):
    """With validation, HellaSwag and samples on; a recompilation is an error. inductor takes half a minute more."""
    import torch._dynamo

    hellaswag_data = hellaswag_file(tmp_path, ["ab " * n for n in (1, 3, 7)])
    options = dict(val_every=4, sample_every=4, hellaswag_every=4, hellaswag_data=hellaswag_data)
    assert train(data, tmp_path / "plain", **options) == 0
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()
    compile_with = functools.partial(torch.compile, backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=True), patched(torch, "compile", compile_with):
        assert train(data, tmp_path / "compiled", compile=True, **options) == 0
    assert graphs["unique_graphs"] == 1, "one for training and validation"
    assert "torch.compile failed" not in capsys.readouterr().out
    assert np.allclose(losses(tmp_path / "plain"), losses(tmp_path / "compiled"), atol=1e-4)
    assert np.allclose(losses(tmp_path / "plain", "val"), losses(tmp_path / "compiled", "val"), atol=1e-4)
    names = load_checkpoint(tmp_path / "compiled" / "model_00012.pt")["model"]
    assert not any("_orig_mod" in name or "module." in name for name in names)


def test_a_batch_ramp_compiles_for_few_shapes(data):
    """torch.compile gives up after 8. 8 ranks' shares of a ramp to 96 windows, with B = 48: 1, 2, ... 12 windows."""
    import torch._dynamo

    torch._dynamo.reset()
    model = torch.compile(tiny_model(), backend="aot_eager", dynamic=False)
    loader, config = train_gpt2.DataLoaderLite(data, "train", 6, 16), train_gpt2.TrainConfig()
    optimizers = [torch.optim.SGD(model.parameters())]
    torch._dynamo.utils.counters.clear()
    for num_windows in range(1, 13):
        args = loader, num_windows, optimizers, torch.amp.GradScaler("cpu", enabled=False), 0, config, [], World()
        train_gpt2.train_step(model, *args)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 5


# ----- What goes wrong in a step ------------------------------------------------------------------------


def no_room(largest_B):
    """A GPT.forward that has memory for so many rows."""
    forward = train_gpt2.GPT.forward

    def limited(self, idx, *args, **options):
        if len(idx) > largest_B:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return forward(self, idx, *args, **options)

    return patched(train_gpt2.GPT, "forward", limited)


def test_out_of_memory_at_the_first_step_halves_the_batch_and_leaves_the_losses(data, tmp_path, capsys):
    assert train(data, tmp_path / "small", batch_size=2) == 0
    capsys.readouterr()
    with no_room(2):
        assert train(data, tmp_path / "large", batch_size=8) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "Out of memory" in line]
    assert len(said) == 2 and "--batch-size 4" in said[0] and "--batch-size 2" in said[1]
    assert read_log(tmp_path / "small") == read_log(tmp_path / "large")
    assert read_log(tmp_path / "small", "val") == read_log(tmp_path / "large", "val")


def train_with_little_room_on_rank_1(args):
    with no_room(2) if os.environ["RANK"] == "1" else no_room(100):
        train_gpt2.main(args)


@pytest.mark.parametrize(
    "train_on_both, said",
    [
        (train_with_little_room_on_rank_1, "warning: Out of memory. Continuing with --batch-size 2"),
        (train_without_flash_on_rank_1, "warning: Fused attention failed"),
    ],
)
def test_what_one_rank_cannot_do_all_give_up(train_on_both, said, data, tmp_path):
    """And what DDP had set up for the failed try doesn't sum gradients any more."""
    output = tmp_path / "output"
    args = tiny_flags(data, tmp_path / "two", batch_size=4, max_steps=5)
    succeed(train_on_both, args, output=output, ranks=2)
    assert output.read_text(encoding="utf-8").count(said) == 1
    assert train(data, tmp_path / "one", batch_size=4, max_steps=5) == 0
    assert np.allclose(losses(tmp_path / "one"), losses(tmp_path / "two"), atol=2e-5, rtol=0)


class PeakMemory(TorchDispatchMode):
    """The most bytes that tensors made in this context held at a time."""

    def __init__(self):
        super().__init__()
        self.peak, self.storages = 0, weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self.storages:
                storage = tensor.untyped_storage()
                self.storages[storage] = storage.nbytes()
        self.peak = max(self.peak, sum(self.storages.values()))
        return result


def test_the_trial_takes_as_much_memory_as_the_steps_after_it(data):
    """Two micro-steps: in the second one there are gradients from the start, and later Adam's two moments."""
    options = dict(batch_size=2, total_batch_size=64, sequence_length=16, compile=False, optimizer="adamw")
    config, world, model = train_gpt2.TrainConfig(**options), World(), tiny_model()
    with PeakMemory() as trial:
        _, B = train_gpt2.fit_to_machine(model, config, world)
    loader = train_gpt2.DataLoaderLite(data, "train", B, 16)
    with PeakMemory() as steps:
        args = train_gpt2.configure_optimizers(model, config), torch.amp.GradScaler("cpu", enabled=False), 0, config
        for _ in range(2):
            train_gpt2.train_step(model, loader, 4, *args, [], world)
    assert 0.97 * steps.peak < trial.peak  # but for small tensors, such as losses and indices


def test_what_failed_trials_took_does_not_count_as_the_runs_memory():
    resets = []
    with patched(torch.cuda, "reset_peak_memory_stats", lambda: resets.append(len(failed))), no_room(2):
        failed, wrap = [], lambda model, *rest: failed.append(model) or model
        world, config = World(device="cpu"), train_gpt2.TrainConfig(total_batch_size=128, sequence_length=16)
        with patched(World, "device_type", "cuda"), patched(World, "autocast", lambda self: contextlib.nullcontext()):
            assert fit.find_what_fits(tiny_model(), wrap, config, world)[1] == 2
    assert resets == [3]  # B = 8, 4, 2


def test_too_little_memory_for_one_sequence_is_an_error(data, tmp_path):
    with no_room(0):
        line = refused(train_gpt2.main, *tiny_flags(data, tmp_path / "out", batch_size=4))
    assert "memory" in line and "--activation-checkpointing" in line
    assert not (tmp_path / "out").exists()


@contextlib.contextmanager
def spoiled(step, micro_step, spoil):
    """spoil(model, loss) takes the place of the loss in that micro-step of that step."""
    at = {"step": -1, "micro_step": None}  # no micro-step: outside of training

    def counting_step(*args):
        at.update(step=at["step"] + 1, micro_step=-1)
        try:
            return train_step(*args)
        finally:
            at["micro_step"] = None

    def forward(self, *args, **options):
        logits, loss = whole_forward(self, *args, **options)
        if at["micro_step"] is not None:
            at["micro_step"] += 1
        return logits, spoil(self, loss) if at == {"step": step, "micro_step": micro_step} else loss

    with patched(train_gpt2, "train_step", counting_step) as train_step:
        with patched(train_gpt2.GPT, "forward", forward) as whole_forward:
            yield


def train_with_a_nan_on_rank_1(args):
    """Rank 1's loss is NaN in the second micro-step of step 3."""
    defect = spoiled(3, 1, lambda model, loss: loss * math.nan)
    with defect if os.environ["RANK"] == "1" else contextlib.nullcontext():
        train_gpt2.main(args)


def test_a_nan_on_one_rank_stops_both_before_the_update_and_names_the_windows(data, tmp_path):
    """Step 3 of 8 windows, micro-step 1 of B = 2 on rank 1: windows 24 + (1 * 2 + 1) * 2 = 30, 31; tokens 480, 496."""
    output = tmp_path / "output"
    args = tiny_flags(data, tmp_path / "out", shuffle=False, batch_size=2, checkpoint_every=1, keep_checkpoints=9)
    assert run(train_with_a_nan_on_rank_1, args, output=output, ranks=2) == [2, 2]
    text = output.read_text(encoding="utf-8")
    (error,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert "step 3" in error and "loss is nan" in error and "Traceback" not in text
    assert "tiny_train_000001.npy token 480, tiny_train_000001.npy token 496" in error
    assert "token 448" not in error  # rank 0's window of that micro-step
    # without a torchrun that ends it, rank 1 waits for rank 0 to speak and then says the same
    assert (tmp_path / "output.1").read_text(encoding="utf-8") == error + "\n"
    assert sorted(read_log(tmp_path / "out")) == [0, 1, 2]
    assert newest_checkpoint(tmp_path / "out")["step"] == 3
    # without the poison the same command continues to the end
    assert train(data, tmp_path / "out", shuffle=False, batch_size=2, checkpoint_every=1, keep_checkpoints=9) == 0
    assert train(data, tmp_path / "straight", shuffle=False, batch_size=2) == 0
    assert np.allclose(losses(tmp_path / "out"), losses(tmp_path / "straight"), atol=2e-5, rtol=0)


def test_an_infinite_gradient_norm_stops_the_run_before_the_update(data, tmp_path):
    with spoiled(2, 0, infinite):
        line = refused(train_gpt2.main, *tiny_flags(data, tmp_path / "out", checkpoint_every=1))
    assert "step 2" in line and "gradient norm" in line and ".npy token" in line
    checkpoint = newest_checkpoint(tmp_path / "out")
    assert checkpoint["step"] == 2 and all(tensor.isfinite().all() for tensor in checkpoint["model"].values())


def test_a_presets_flags_are_defaults_and_the_command_line_wins():
    config = train_gpt2.parse_args(["--preset", "gpt2-medium", "--n_head", "8", "--max-steps=7"])
    assert (config.n_layer, config.n_embd, config.max_lr) == (24, 1024, 3e-4)
    assert (config.n_head, config.max_steps) == (8, 7)
    assert train_gpt2.parse_args(["--preset=quickstart"]).data == "python_docs"


# ----- The machine and the ranks ------------------------------------------------------------------------


def test_fp8_is_refused_in_one_line_where_torch_cannot_multiply_it(data, tmp_path):
    def missing(*args, **options):
        raise NotImplementedError("Could not run 'aten::_scaled_mm'")

    with patched(torch, "_scaled_mm", missing):
        line = refused(train_gpt2.main, *tiny_flags(data, tmp_path / "out", dtype="fp8"))
    assert "does not support --dtype fp8" in line and not (tmp_path / "out").exists()


def train_with_a_defect_on_rank_1(args):
    """Rank 1 fails alone in its third pass, and shutting down waits for the other rank for ever, as NCCL does."""
    passes = itertools.count()

    def forward(self, *args, **options):
        if os.environ["RANK"] == "1" and next(passes) == 2:
            raise ValueError("a defect")
        return whole_forward(self, *args, **options)

    with patched(train_gpt2.GPT, "forward", forward) as whole_forward:
        with patched(torch.distributed, "destroy_process_group", lambda: threading.Event().wait()):
            train_gpt2.main(args)


def test_a_rank_that_fails_alone_says_why_and_ends_at_once(data, tmp_path):
    args = tiny_flags(data, tmp_path / "out", batch_size=2)
    statuses = run(train_with_a_defect_on_rank_1, args, output=tmp_path / "output", ranks=2)
    assert statuses[1] == 1 and statuses[0] != 0
    assert "ValueError: a defect" in (tmp_path / "output.1").read_text(encoding="utf-8")


def signal_in_an_evaluation(name, args):
    """Rank 1 receives SIGTERM when the evaluation of step 4 begins."""
    calls = itertools.count()

    def evaluate(*args):
        if next(calls) == 1 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return whole_evaluate(*args)

    with patched(train_gpt2, name, evaluate) as whole_evaluate:
        train_gpt2.main(args)


@pytest.mark.parametrize("name, stream", [("evaluate_val_loss", "val"), ("evaluate_hellaswag", "hella")])
def test_a_signal_in_an_evaluation_stops_all_ranks_and_the_evaluation_is_done_again(name, stream, data, tmp_path):
    options = dict(hellaswag_every=4, hellaswag_data=hellaswag_file(tmp_path, ["ab " * n + "c" for n in range(1, 5)]))
    args = tiny_flags(data, tmp_path / "out", batch_size=2, **options)
    succeed(signal_in_an_evaluation, name, args, output=tmp_path / "output", ranks=2)
    assert sorted(read_log(tmp_path / "out")) == [0, 1, 2, 3] and 4 not in read_log(tmp_path / "out", stream)
    assert train(data, tmp_path / "out", batch_size=2, **options) == 0
    assert sorted(read_log(tmp_path / "out")) == list(range(12))
    assert sorted(read_log(tmp_path / "out", stream)) == [0, 4, 8, 12]


def test_samples_of_a_chat_model_are_answers_with_role_markers():
    enc, seen = tokenizer.with_chat(tokenizer.get_encoding("bytes")), []

    def generate(self, idx, *args, **options):
        seen.append(idx)
        return (torch.tensor([token] * 4) for token in [*b"Yes", enc.encode_single_token("<|end|>"), *b"rest"])

    with patched(train_gpt2.GPT, "generate", generate):
        config = train_gpt2.TrainConfig(sample_prompt="Hi")
        texts = train_gpt2.generate_samples(tiny_model(), enc, config, World())
    assert texts == ["<|user|>Hi<|end|><|assistant|>Yes"] * 4
    # 256 bytes, <|endoftext|>, <|user|>, <|assistant|>, <|system|>, <|end|>
    assert seen[0].tolist() == [[256, 257, *b"Hi", 260, 258]] * 4


def test_ranks_that_do_not_meet_give_up_with_a_sentence(monkeypatch):
    """Where nobody listens at all, and where torchrun's store has the port of a rank 0 that is gone."""
    monkeypatch.setattr(distributed, "CONNECT_SECONDS", 0.5)
    port = "1"  # where nobody listens
    for name, value in dict(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"127.0.0.1, {port}.* Start all ranks within a minute"):
        distributed.setup_distributed("cpu")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    stale = torch.distributed.HashStore()
    stale.set("port", port)
    monkeypatch.setattr(torch.distributed, "rendezvous", lambda *args, **options: iter([(stale, 1, 2)]))
    with pytest.raises(UserError, match="Start all ranks within a minute"):
        distributed.setup_distributed("cpu")


def test_tensors_are_looked_for_only_where_they_are(monkeypatch):
    """Among HellaSwag's million numbers that took seconds on every rank."""
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda message: None)
    looked_at = []
    monkeypatch.setattr(distributed, "tree_map_only", lambda kind, function, tree: looked_at.append(tree) or tree)
    for result in ([1, 2], {"model": {}}):
        assert World(size=2).broadcast_from_master(lambda result=result: result) == result
    assert looked_at == [{"model": {}}] * 2
