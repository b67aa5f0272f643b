"""bench/ on tiny shapes: the sides do the same work, the numbers are what they are called, a run on a GPU goes on."""

import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import train_gpt2
from bench import gpu, runs, steps
from bench.__main__ import Options, main
from plumbing import documents
from plumbing.huggingface import transposed

from harness import ROOT, flags, full_disk, refusal_of, status_of

SHAPE = "n_layer=1,n_head=2,n_embd=32"
TINY = f"{SHAPE},dtype=float32,vocab_size=320,batch_size=2,sequence_length=16,total_batch_size=64"
# a nanoGPT checkout as far as bench/ knows one, with our own model
PEER = """
import torch, train_gpt2

def GPTConfig(dropout, bias, **shape):
    assert dropout == 0.0 and bias
    return train_gpt2.GPTConfig(**shape)

class GPT(train_gpt2.GPT):
    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), learning_rate, betas, weight_decay=weight_decay)
"""
# build-nanogpt as far as bench/ knows it: where it looks for data, what it prints
BUILD_NANOGPT = """
import os
max_steps = 19073
for split in ("train", "val"):
    (shard,) = (name for name in os.listdir("edu_fineweb10B") if split in name)
    assert os.path.getsize("edu_fineweb10B/" + shard) > 2 * 20 * 64 * 1024
assert len(open("hellaswag/hellaswag_val.jsonl").readlines()) == 4
for step in range(max_steps):
    print(f"step {step:5d} | dt: 1.00ms | tok/sec: {1000.0 if 2 <= step < max_steps - 1 else 1.0:.2f}")
"""


@pytest.fixture
def measure(tmp_path):
    """A call of `python -m bench WHAT --json`, on a CPU, that returns the numbers; a folder of peers is in tmp_path."""
    (tmp_path / "model.py").write_text(PEER, encoding="utf-8")
    (tmp_path / "train_gpt2.py").write_text(BUILD_NANOGPT, encoding="utf-8")
    (tmp_path / "hellaswag.py").write_text("", encoding="utf-8")
    example = {"activity_label": "a", "endings": ["goes.", "stays on.", "sits.", "is"], "label": 1}
    lines = [json.dumps(example | {"ctx": f"A man {i}."}) for i in range(12)]
    (tmp_path / "h.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    file = tmp_path / "numbers.json"
    common = dict(settings=TINY, device="cpu", rounds=1, json=file, tokenizer="bytes", hellaswag=tmp_path / "h.jsonl")

    def call(what, *args, **options):
        file.unlink(missing_ok=True)
        assert status_of(main, [what, *flags(**common | options), *args]) == 0
        numbers = json.loads(file.read_text(encoding="utf-8"))
        assert {"device", "versions", "commit", "command", "options"} <= set(numbers)
        return numbers

    return call


def test_train_is_compared_with_transformers_a_peer_and_variants(measure, tmp_path):
    variants = ["batch_size=4", "plain_attention=True", "compile=False,optimizer=muon"]
    numbers = measure("train", "--variants", *variants, peer=tmp_path, rounds=3)
    sides, ours = numbers["sides"], numbers["sides"]["train_gpt2"]
    references = ["transformers", "transformers, fused AdamW", "nanoGPT"]
    assert list(sides) == ["train_gpt2", *references, *(f"train_gpt2 {variant}" for variant in variants)]
    assert numbers["tok_per_s"] == pytest.approx(64 / np.median(ours["seconds"])) and len(ours["seconds"]) == 3
    ratio = np.median(np.divide(sides["transformers"]["seconds"], ours["seconds"]))
    assert numbers["ratio"] == sides["transformers"]["ratio"] == pytest.approx(ratio)
    losses = numbers["losses"]
    assert list(losses.values()) == pytest.approx([np.log(320)] * 7, abs=0.5), "losses of random ids"
    for variant in variants[:2]:  # the same windows: sums of float32 in another order
        assert losses[f"train_gpt2 {variant}"] == pytest.approx(losses["train_gpt2"], abs=1e-4)
    assert all(numbers["families"][name] > 0 for name in ("matmul", "loss", "optimizer", "GELU", "other"))


def test_the_references_of_train_do_our_training(tmp_path):
    """transformers with our weights, on our batch: the loss and the weights after a step are ours, too."""
    config = steps.configure(Options("train", "cpu", settings=TINY))
    steps.random_shards(tmp_path, 320)
    theirs = steps.make_transformers(config, tmp_path)
    model = train_gpt2.GPT(train_gpt2.GPTConfig(**config.shape))
    model.load_state_dict(transposed(theirs.model.state_dict()))
    (optimizer,) = train_gpt2.configure_optimizers(model, config)
    loader = train_gpt2.DataLoaderLite(tmp_path, "train", 2, 16)
    # transformers leaves out the last target of each sequence, because there is none
    batches = [loader.next_batch() for _ in range(2)]
    loss = sum(model(x, F.pad(y[:, :-1], (0, 1), value=train_gpt2.IGNORE_INDEX))[1] / 2 for x, y in batches)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
    train_gpt2.apply_schedules([optimizer], 0, config)
    optimizer.step()
    assert theirs() == pytest.approx(loss.item(), abs=1e-5)
    for name, weight in transposed(theirs.model.state_dict()).items():
        assert torch.allclose(model.state_dict()[name], weight, atol=1e-5), name


def test_hellaswag_in_four_rows_chooses_what_packed_rows_choose(measure):
    numbers = measure("hellaswag", settings=f"{TINY},n_embd=64,vocab_size=64,block_size=16")  # longer examples
    assert numbers["examples"] == numbers["same_by_sum"] == numbers["same_by_mean"] == 12
    assert numbers["examples_per_s"] > 0


def test_sample_gives_the_same_tokens_on_every_side(measure):
    numbers = measure("sample", settings=f"{TINY},block_size=16", max_new_tokens=12, num_samples=2)
    assert numbers["same_tokens"] == {"sample.py": True, "without a cache": True, "transformers": True}
    assert numbers["tok_per_s"] > 0


def test_data_counts_the_tokens_that_tiktoken_counts(measure, monkeypatch):
    texts = [f"Document {i}. " * 50 for i in range(20)]
    monkeypatch.setattr(documents, "python_docs", lambda: texts)
    numbers = measure("data")
    expected = 20 * sum(len(text) + 1 for text in texts)
    assert numbers["tokens"] == {"fineweb.py": numbers["cores"] * expected, "tiktoken, one thread": expected}
    assert numbers["tok_per_s"] > 0


def test_start_ends_with_the_first_update(measure, tmp_path, monkeypatch):
    script = tmp_path / "trainer.py"
    monkeypatch.setattr(runs, "TRAINER", str(script))
    lines = ["import sys, time", "print('step     0 | loss  5.7', flush=True)"]
    lines += ["if '--preset=quickstart' in sys.argv:", "    time.sleep(60)"]
    script.write_text("\n".join(lines), encoding="utf-8")
    sides = measure("start")["sides"]
    assert 0 < sides["first update"]["seconds"][0] < 60 and sides["import torch"]["ratio"] == 1
    script.write_text("print('step     0 | val loss 5.7')\nraise SystemExit('full disk')", encoding="utf-8")
    with pytest.raises(RuntimeError, match="full disk"):
        runs.start(Options(rounds=1))


def test_shakespeare_has_the_last_losses_of_both_programs_on_nanogpts_split(measure, tmp_path):
    peer, text = tmp_path / "peer", tmp_path / "text.txt"
    data = peer / "data" / "shakespeare_char"
    data.mkdir(parents=True)
    text.write_bytes(b"To be, or not to be.\n" * 100)
    (data / "prepare.py").write_text(
        "open('length', 'w').write(str(len(open('input.txt').read())))", encoding="utf-8"
    )
    printed = ["assert open('data/shakespeare_char/length').read() == '2100'"]
    printed += [f"print('step {n}: train loss 1.7, val loss {loss}')" for n, loss in ((0, 4.25), (2000, 1.8857))]
    (peer / "train.py").write_text("\n".join(printed), encoding="utf-8")
    settings = "n_layer=1,n_head=2,n_embd=32,max_steps=1,val_every=1"
    sides = measure("shakespeare", peer=peer, text=text, settings=settings)["sides"]
    assert sides["nanoGPT"]["val_losses"] == [4.25, 1.8857]
    first, last = sides["train_gpt2"]["val_losses"]
    assert first == pytest.approx(np.log(320), abs=0.1) and last < first


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_the_ladder_adds_one_optimization_at_a_time(measure, monkeypatch, has_bfloat16):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda m, **options: compiled.append(m) or torch.nn.Sequential(m))
    monkeypatch.setattr(torch.nn.Sequential, "forward", lambda self, *args, **options: self[0](*args, **options))
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bfloat16)
    numbers = measure("ladder", settings=f"{SHAPE},batch_size=1,sequence_length=16,total_batch_size=16")
    sides, missing = numbers["sides"], ["TF32", "this program, B 64"] + ["bfloat16 autocast"] * (not has_bfloat16)
    assert list(sides) == [name for name in steps.RUNGS if name not in missing] and len(compiled) == 5
    # weights and data are the same in all rungs, but for the vocabulary's size
    assert all(loss == pytest.approx(np.log(50257), abs=0.2) for loss in numbers["losses"].values())
    assert numbers["tok_per_s"] == sides["this program"]["tok_per_s"] and sides["this program"]["ratio"] == 1
    assert numbers["ratio"] == pytest.approx(numbers["tok_per_s"] / sides["float32"]["tok_per_s"])


def test_the_precision_of_matmuls_is_set_before_a_model_is_compiled(tmp_path, monkeypatch):
    """torch.compile compiles again if it changes."""

    def fit(raw_model, config, world):
        assert torch.get_float32_matmul_precision() == "highest"
        return raw_model, config.batch_size

    monkeypatch.setattr(train_gpt2, "fit_to_machine", fit)
    steps.random_shards(tmp_path, 320)
    torch.set_float32_matmul_precision("medium")
    try:
        steps.Ours(steps.configure(Options("train", "cpu", settings=TINY)), tmp_path)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_numbers_that_cannot_be_saved_are_printed(measure, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("plumbing.files.os.fsync", full_disk)
    with pytest.raises(AssertionError):  # its status is not 0
        measure("sample", max_new_tokens=2)
    printed = capsys.readouterr()
    assert '"same_tokens": {' in printed.out
    assert printed.err.startswith(f"error: Could not write {tmp_path / 'numbers.json'}: No space left on device.")


def test_mistakes_are_one_line(tmp_path):
    mistakes = {
        "There is no model.py in": ["train", "--peer", tmp_path],
        "--peer is missing": ["shakespeare"],
        "quickstart": ["train", "--settings", "preset=quickstar"],
        "There is no flag called --plain": ["train", "--variants", "plain_atention=True"],
        "is not a multiple of 48": ["train", "--settings", "batch_size=3,sequence_length=16"],
        "--n-embd is -4": ["sample", "--settings", "n_embd=-4"],
        "tpu": ["train", "--device", "tpu"],
    }
    for part, args in mistakes.items():
        status, _, error = refusal_of(main, *args)
        assert status == 2 and error.startswith("error: ") and part in error and error.count("\n") == 1, error


@pytest.fixture
def ask(measure, tmp_path, data):
    """A call of `python -m bench gpu` that returns the answers."""
    peers = dict(peer=tmp_path, build_nanogpt=tmp_path, out=tmp_path / "out", shards=data)
    return lambda **options: measure("gpu", **peers | options)["answers"]


def test_every_question_is_answered_as_far_as_a_cpu_goes(ask, tmp_path, monkeypatch):
    trained, run_trainer, answers_folder = [], gpu.Questions.trainer, tmp_path / "out"
    for name in ("run", "build-nanogpt"):  # the user's
        (answers_folder / name).mkdir(parents=True)

    def trainer(q, changes):
        trained.append(changes)
        return run_trainer(q, changes) if len(trained) == 1 else {}

    monkeypatch.setattr(gpu.Questions, "trainer", trainer)
    monkeypatch.setattr(steps, "ladder", lambda options: {"rungs": {}})  # has a test of its own
    answers = ask()
    written = {"run", "build-nanogpt", "answers.jsonl", "programs.txt"}
    assert {path.name for path in answers_folder.iterdir()} == written
    errors = {name: answer["error"] for name, answer in answers.items() if "error" in answer}
    assert errors.keys() <= {"fp8 output layer"}, "not on every processor"
    assert list(answers)[:4] == ["machine", "60 steps of train_gpt2.py", "train_gpt2", "matmuls"]
    assert list(answers)[-1] == "ladder" and len(trained) == 5
    headline = answers["60 steps of train_gpt2.py"]
    assert len(headline["train"]) == 4 and headline["tok_per_s"] > 0 and headline["notes"] == []
    assert answers["build-nanogpt as published"]["tok_per_s"] == 1000
    assert all(rate > 0 for rates in answers["matmuls"]["flops_per_s"].values() for rate in rates)
    assert answers["HellaSwag"]["same_by_mean"] == 12 and answers["train_gpt2"]["families"]["matmul"] > 0
    names = ["train_gpt2", "nanoGPT", "transformers", "train_gpt2, B=1", "not compiled, B=1"]
    ours = answers["train_gpt2"]["losses"]["step"]
    for name in ("DDP on one rank", "activation checkpointing"):
        assert answers[name]["losses"]["step"] == pytest.approx(ours, abs=1e-5), name
    for name in names:
        assert answers[name]["losses"]["step"] == pytest.approx(np.log(320), abs=0.5), name


def test_a_run_that_was_cut_short_goes_on(ask, tmp_path, monkeypatch, capsys):
    assert ask(minutes=0) == {} and "to measure the rest: machine, 60 steps" in capsys.readouterr().out

    def killed():
        raise KeyboardInterrupt

    asked = []
    entries = {name: (1, lambda name=name: asked.append(name) or {}) for name in ("a", "b", "c")}
    monkeypatch.setattr(gpu, "questions", lambda q: entries | {"b": (1, killed)})
    with pytest.raises(AssertionError):  # its status is not 0
        ask()
    monkeypatch.setattr(gpu, "questions", lambda q: entries)
    answers = ask()
    assert asked == ["a", "c"] and "The program ended before" in answers["b"]["error"]
    assert len((tmp_path / "out" / "answers.jsonl").read_text(encoding="utf-8").splitlines()) == 3


def test_an_error_is_an_answer_and_a_lost_gpu_a_new_process(ask, monkeypatch):
    def fail(message):
        torch.backends.cuda.enable_flash_sdp(False)
        raise RuntimeError(message)

    started, message = [], "CUDA error: an illegal memory access was encountered"
    entries = {"a": (1, fail, "a"), "b": (1, lambda: {"flash": torch.backends.cuda.flash_sdp_enabled()})}
    monkeypatch.setattr(gpu, "questions", lambda q: entries | {"c": (1, fail, message)})
    monkeypatch.setattr(os, "execv", lambda program, args: started.append(args))
    answers = ask()
    assert answers["a"]["error"] == "RuntimeError: a" and answers["b"]["flash"], "kernels are allowed again"
    assert message in answers["c"]["error"] and len(started) == 1 and started[0][-1].startswith("--minutes=")


def test_what_was_not_measured_as_asked_is_an_error_not_a_number(ask, monkeypatch):
    """A compiler that fails, a B that does not fit, a trainer that ends with an error."""

    def no_compiler(model, **options):
        raise RuntimeError("no C++ compiler found")

    def fit_half(raw_model, config, world, fit=train_gpt2.fit_to_machine):
        model, B = fit(raw_model, config, world)
        return model, B if config.compile else B // 2

    monkeypatch.setattr(torch, "compile", no_compiler)
    monkeypatch.setattr(train_gpt2, "fit_to_machine", fit_half)
    entries = {"compiled": gpu.Questions.step, "trainer": gpu.Questions.trainer, "B": gpu.Questions.step}
    changes = {"compiled": "compile=True", "trainer": "max_lr=-1.0", "B": ""}
    monkeypatch.setattr(gpu, "questions", lambda q: {n: (1, ask, q, changes[n]) for n, ask in entries.items()})
    answers = ask()
    assert "torch.compile failed" in answers["compiled"]["error"]
    assert "Only 1 of 2 sequences fit in memory" in answers["B"]["error"]
    assert "status 2: error:" in answers["trainer"]["error"] and "-1.0" in answers["trainer"]["error"]


# ----- The Triton kernel. When it is imported, Triton decides whether kernels run in its interpreter, on a CPU


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs triton, which CUDA builds of torch bring")
def test_the_triton_kernel_computes_losses_and_gradients_in_its_interpreter():
    command = [sys.executable, "-c", "import test_bench; test_bench.check_triton_kernel()"]
    subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, cwd=ROOT, check=True, timeout=600)


def check_triton_kernel():
    """In float32, with rows that end inside the first and inside the third block of 8,192 logits."""
    from bench.triton_cross_entropy import kernel

    for V, scale in ((320, 1.0), (2 * 8192 + 48, 2.0**15)):
        logits = torch.randn(6, V) * torch.logspace(-1, 1.5, 6)[:, None] + torch.randn(6, 1) * 20
        targets = torch.tensor([0, V - 48, -100, 7, 8, 9])
        exact = logits.double().requires_grad_()
        expected = F.cross_entropy(exact, targets, reduction="none")
        expected.sum().backward()
        losses, gradient = torch.empty(6), torch.empty(6, V)
        kernel[(6,)](logits, targets, losses, gradient, np.log2(scale), -100, V, num_warps=32)
        torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(gradient.double() / scale, exact.grad, rtol=2e-5, atol=1e-9)
        assert losses[2] == 0 and not gradient[2].any(), "the target that is ignored"
        logits[1, 100] = torch.nan
        kernel[(6,)](logits, targets, losses, gradient, 0.0, -100, V, num_warps=32)
        assert losses.isfinite().tolist() == [True, False, True, True, True, True]
