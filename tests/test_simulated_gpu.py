"""The program on the simulated GPU of tests/simulated_gpu: what CUDA would do, in which order, on any machine."""

import functools
import hashlib
import importlib
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import train_gpt2
from plumbing.run.checkpoint import list_checkpoints, load_checkpoint
from plumbing.run.logs import read_starts
from torch.nn import functional as F

from harness import (
    assert_same_run,
    error_in,
    examples_file,
    flags,
    losses,
    needs,
    patched,
    read_log,
    signalled,
    tiny_flags,
    train,
)
from simulated_gpu import gpu as simulated
from simulated_gpu import tracker


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The compiled device. Compiling takes ten seconds: once for each source and torch, where it can be kept."""
    if torch.version.cuda:
        pytest.skip("torch has CUDA itself")
    source = Path(simulated.__file__).with_name("gpu.cpp")
    folder = source.with_name("__pycache__")
    if not os.access(source.parent, os.W_OK):
        folder = tmp_path_factory.mktemp("library")
    folder.mkdir(exist_ok=True)
    library = folder / f"{hashlib.sha256(source.read_bytes()).hexdigest()[:8]}-{torch.__version__}.so"
    problem = "" if library.exists() else simulated.build(library)
    if "error:" in problem and torch.__version__.startswith("2.13."):
        pytest.fail(problem)
    if problem:
        pytest.skip(problem[:200])
    return library


@pytest.fixture(scope="module")
def gpu(library, tmp_path_factory):
    """gpu(function, *args, cards=["H200"], **options): run it in a process with these GPUs; its status and output."""
    output = tmp_path_factory.mktemp("gpu") / "output"
    command = [sys.executable, simulated.__file__]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with subprocess.Popen(command, **pipes, env=os.environ | {"GPU_LIBRARY": str(library)}) as server:

        def on_gpu(function, *args, cards=("H200",), **options):
            output.unlink(missing_ok=True)
            pickle.dump((function, args, output, (cards, options)), server.stdin)
            server.stdin.flush()
            return int(server.stdout.readline()), output.read_text(encoding="utf-8")

        yield on_gpu
        server.stdin.close()


def all_flags(folder, out_dir, **changes):
    """A run that does everything."""
    data = examples_file(folder.parent, ["a cat", "The dog sat", "hi"])
    options = dict(
        device="cuda",
        hellaswag_every=6,
        hellaswag_data=data,
        sample_every=6,
        sample_prompt="abc",
    )
    return tiny_flags(folder, out_dir, **options | changes)


RUNS = {  # cards, flags, and what the summary says
    "bfloat16": (["A100"], dict(dtype="auto", optimizer="muon"), "NVIDIA A100-SXM4-80GB, bfloat16"),
    "fp8": (["4090"], dict(dtype="fp8"), "NVIDIA GeForce RTX 4090, fp8"),
    "recomputing": (["H200"], dict(dtype="bfloat16", activation_checkpointing=True), "NVIDIA H200, bfloat16"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs("float8") if name == "fp8" else ()) for name in RUNS]
)
def test_a_run_with_everything(name, gpu, folder, out):
    """Its checkpoints are whole: copies to the host have ended."""
    cards, changes, words = RUNS[name]
    status, said = gpu(train_gpt2.main, all_flags(folder, out, max_steps=6, **changes), cards=cards)
    assert status == 0
    assert words in said
    assert "warning" not in said.lower()
    assert losses(out)[-1] < losses(out)[0] - 0.3
    assert (out / "hf" / "model.safetensors").exists()
    for path in list_checkpoints(out):
        for weight in load_checkpoint(path)["model"].values():
            assert weight.isfinite().all()


@pytest.mark.gpt2
@pytest.mark.skipif(torch.__version__ < "2.13", reason="the simulated GPU is for torch 2.13")
@pytest.mark.parametrize(
    "device, shape, layouts",
    [
        ("cuda", "gpt2", ["--shard --gpus 2", "--shard --gpus 8 --activation-checkpointing", "--gpus 8"]),
        ("cpu", "gpt2-xl --vocab-size 8192", ["--shard --gpus 8", "--gpus 8 --activation-checkpointing"]),
    ],
)
def test_the_account_is_what_torchs_own_tracker_counts(device, shape, layouts, gpu):
    """Also on a machine without a GPU, of another machine's."""
    common = f"--preset {shape} --n-layer 3 --sequence-length 256 --gpu-memory 24 --batch-size 4"
    status, said = gpu(tracker.compare, [f"{common} {layout}" for layout in layouts], device)
    assert status == 0
    found = [json.loads(line) for line in said.splitlines()]
    assert len(found) == len(layouts)
    for told in found:
        assert told["account"] == pytest.approx(told["tracked"], rel=0.1)


def test_in_float32_a_run_computes_what_the_cpu_computes(gpu, folder, tmp_path):
    args = all_flags(folder, tmp_path / "gpu", max_steps=6, dtype="float32")
    assert gpu(train_gpt2.main, args)[0] == 0
    train_gpt2.main([*args, "--device", "cpu", "--out-dir", str(tmp_path / "cpu")])
    for stream in ("train", "val", "norm", "hella"):
        assert np.allclose(losses(tmp_path / "gpu", stream), losses(tmp_path / "cpu", stream), atol=1e-4, rtol=0)


# with a gradient scaler, which has a state of its own
FLOAT16 = dict(device="cuda", dtype="float16", optimizer="muon")


@pytest.fixture(scope="module")
def whole(gpu, folder):
    """The folder of a run in float16."""
    assert gpu(train_gpt2.main, tiny_flags(folder, folder.parent / "whole", **FLOAT16))[0] == 0
    return folder.parent / "whole"


def test_a_run_that_is_stopped_continues_bit_for_bit(gpu, whole, folder, out):
    args = tiny_flags(folder, out, **FLOAT16)
    assert gpu(signalled, 5, "SIGTERM", 1, 0, args)[0] == 0
    assert max(read_log(out)) == 7  # two steps behind the checkpoint, which the next start repeats
    assert gpu(train_gpt2.main, args)[0] == 0
    assert_same_run(out, whole)


def test_a_branch_is_its_parent_bit_for_bit(gpu, whole, folder, out):
    args = tiny_flags(folder, out, branch_from=whole / "model_00008.pt", **FLOAT16)
    assert gpu(train_gpt2.main, args)[0] == 0
    assert_same_run(out, whole, ["val_loss", "model", "optimizer", "scaler", "loader"])


@pytest.mark.parametrize("T, uses_cudnn", [(64, False), (128, True)])
def test_cudnns_attention_is_for_multiples_of_128_tokens(T, uses_cudnn, gpu, data, out):
    """For others its backward pass has given NaN."""
    lengths = dict(block_size=T, sequence_length=T, total_batch_size=256)
    args = tiny_flags(data, out, device="cuda", max_steps=1, **lengths)
    assert gpu(train_gpt2.main, args)[0] == 0
    assert ("cudnn" in read_starts(out / "run.txt")[0]["ran"]["attention"]) == uses_cudnn


# ----- Memory -------------------------------------------------------------------------------------------


def train_uncompiled(args):
    """Train with a compiler that changes nothing, whose better use of memory the trial counts on."""
    with patched(torch, "compile", lambda model, **options: model):
        train_gpt2.main(args)


SMALL = dict(
    n_layer=1,
    n_embd=128,
    block_size=128,
    sequence_length=128,
    batch_size=8,
    total_batch_size=16 * 128,
    max_steps=2,
    val_every=0,
)


@pytest.mark.parametrize("megabytes, B, halvings", [(30, 8, 0), (15, 4, 0), (11, 2, 1)])
def test_b_is_halved_until_it_fits(megabytes, B, halvings, gpu, folder, tmp_path):
    """And the steps after the trial fit as well, though they hold gradients and Adam's two moments.

    Those and the weights are 16 bytes for each of 0.26M parameters, 4 MB, and a sequence takes about 1.7 MB: 128 ids
    with 16 numbers for each of 128 channels and 4 for each of 320 logits, 4 bytes each. 5% of the card are left alone.
    """
    args = tiny_flags(folder, tmp_path / "gpu", device="cuda", compile=True, **SMALL)
    status, said = gpu(train_uncompiled, args, gib=megabytes * 1e6 / 2**30)
    assert status == 0, said
    assert f"B {B} *" in said
    assert said.count("Out of memory") == halvings
    train(folder, tmp_path / "cpu", **SMALL)
    assert np.allclose(losses(tmp_path / "gpu"), losses(tmp_path / "cpu"), atol=1e-5, rtol=0)


STAGES = {  # where, and in which call of the process
    "validation": ("train_gpt2", "evaluate_val_loss", 2),
    "HellaSwag": ("train_gpt2", "evaluate_hellaswag", 1),
    "sampling": ("train_gpt2", "generate_samples", 1),
    "the export": ("plumbing.run.run", "export_huggingface", 1),
}


def train_on_a_gpu_that_fills(module, name, call, args):
    """From this call of the function on, there is no more memory than is in use."""

    def full(*rest, **options):
        calls.append(name)
        if len(calls) == call:
            torch.ops.card.limit(torch.ops.card.used())
        return original(*rest, **options)

    calls = []
    with patched(importlib.import_module(module), name, full) as original:
        train_gpt2.main(args)


def test_out_of_memory_later_costs_one_line_and_no_work(gpu, folder, tmp_path):
    """In one evaluation after another, and in the export. Then the run ends as one that had enough."""
    whole = all_flags(folder, tmp_path / "whole", max_steps=6)
    args = all_flags(folder, tmp_path / "out", max_steps=6)
    assert gpu(train_gpt2.main, whole)[0] == 0
    for stage, (module, name, call) in STAGES.items():
        status, said = gpu(train_on_a_gpu_that_fills, module, name, call, args)
        assert status == 2, stage
        assert "There is not enough memory. CUDA out of memory" in error_in(said), stage
    assert gpu(train_gpt2.main, args)[0] == 0
    assert_same_run(tmp_path / "out", tmp_path / "whole")


# ----- Order --------------------------------------------------------------------------------------------


def train_and_count_waits(args):
    """Print how often the host waits for the GPU in each step, and while each batch is handed over."""
    found = {"train_step": [], "next_batch": []}

    def count(owner, name):
        function = getattr(owner, name)

        def counted(*rest, **options):
            before = torch.ops.card.waits()
            result = function(*rest, **options)
            found[name].append([torch.ops.card.waits() - before, torch.get_float32_matmul_precision()])
            return result

        return patched(owner, name, counted)

    with count(train_gpt2, "train_step"), count(train_gpt2.DataLoaderLite, "next_batch"):
        train_gpt2.main(args)
    print(json.dumps(found))


def test_the_host_waits_once_in_a_step_and_never_in_the_loader(gpu, data, out):
    """For the loss, the norm and the signals, which it reads in one copy; neither Muon nor AdamW waits."""
    args = tiny_flags(data, out, device="cuda", max_steps=4, optimizer="muon", dtype="bfloat16")
    _, said = gpu(train_and_count_waits, args)
    found = json.loads(said.splitlines()[-1])
    assert found["train_step"] == [[1, "high"]] * 4
    assert {waits for waits, _ in found["next_batch"]} == {0}


# ----- Decisions ----------------------------------------------------------------------------------------

# cards, torch's build, flags, and what a dry run says
DECISIONS = [
    (["H200"], "cu126", {}, ["NVIDIA H200, bfloat16", "B 64 *"]),  # the preset's own B, which is for 80 GB
    (["A100"], "cu130", {"dtype": "fp8"}, ["does not support --dtype fp8"]),  # which is Ada's
    (["V100"], "cu128", {}, ["Tesla V100-SXM2-16GB, float16"]),  # Volta is before bfloat16
    (["V100"], "cu130", {}, ["none for this machine's Tesla V100"]),
    (["H200", "1080"], "cu126", {}, ["GTX 1080, float16"]),  # each rank asks for its own GPU
    (["H200", "1080"], "cu128", {}, ["none for this machine's NVIDIA GeForce GTX 1080"]),
    (["5090"], "cu126", {}, ["none for this machine's NVIDIA GeForce RTX 5090"]),
    (["5090"], "own", {}, ["NVIDIA GeForce RTX 5090, bfloat16"]),
]


def train_in(environment, args):
    """Train with these environment variables."""
    os.environ.update(environment)
    train_gpt2.main(args)


@pytest.mark.parametrize("cards, build, changes, words", DECISIONS, ids=lambda value: str(value)[:20])
def test_a_rank_decides_for_its_own_gpu(gpu, cards, build, changes, words, out):
    """Here the last of several ranks on this machine, in a dry run."""
    args = flags(dry_run=True, compile=False, device="cuda", data="none", out_dir=out, n_layer=1, **changes)
    environment = {"LOCAL_RANK": f"{len(cards) - 1}"}
    _, said = gpu(train_in, environment, args, cards=cards, build=build)
    for text in words:
        assert text in said


@pytest.mark.parametrize(
    "device, words",
    [
        ("cuda:0", "--device is cuda:0, but several ranks need a GPU each"),
        ("cuda", "2 processes on this machine share 1 GPU. Use --nproc-per-node=1"),
    ],
)
def test_ranks_without_a_gpu_each_do_not_wait_for_each_other(device, words, gpu, data, out):
    environment = dict(RANK="1", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    status, said = gpu(train_in, environment, tiny_flags(data, out, device=device))
    assert status == 2
    assert words in said


def no_kernel(*args, **options):
    """In place of attention: any kernel but the plain one fails."""
    if torch.backends.cuda.flash_sdp_enabled():
        raise RuntimeError("no kernel")
    return attention(*args, **options)


def no_compiler(graph, inputs):
    raise OSError(28, "No space left on device")


attention = F.scaled_dot_product_attention
LESS = {  # what fails, and what is given up, one after the other
    "attention": (F, "scaled_dot_product_attention", no_kernel, ["cuDNN's attention", "fused attention"]),
    "the compiler": (torch, "compile", functools.partial(torch.compile, backend=no_compiler), ["torch.compile"]),
}


def train_with_less(name, args):
    with patched(*LESS[name][:3]):
        train_gpt2.main(args)


@pytest.mark.parametrize("name", LESS)
def test_what_fails_on_a_gpu_is_given_up_alone_with_one_warning(gpu, name, data, out):
    options = dict(device="cuda", compile=name != "attention", max_steps=2)
    args = tiny_flags(data, out, block_size=128, sequence_length=128, **options)
    args = [word for word in args if word != "--compile"]  # the default on a GPU
    status, said = gpu(train_with_less, name, args)
    assert status == 0
    assert re.findall(r"step failed with (.*) \(", said) == LESS[name][-1]
