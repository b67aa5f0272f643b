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
from torch.nn import functional as F

from harness import (
    ON_THIS_SYSTEM,
    assert_same_run,
    error_in,
    examples_file,
    flags,
    losses,
    patched,
    read_log,
    signalled,
    tiny_flags,
    train,
)
from simulated_gpu import gpu as simulated


@pytest.fixture(scope="module")
def gpu(tmp_path_factory, request):
    """gpu(function, *args, cards=["H200"], **options): run it in a process with these GPUs; its status and output."""
    folder = tmp_path_factory.mktemp("gpu")
    cache = getattr(request.config, "cache", None)  # compiling takes ten seconds: once for each source and torch
    source = hashlib.sha256(Path(simulated.__file__).with_name("gpu.cpp").read_bytes()).hexdigest()[:8]
    library = (cache.mkdir("gpu") if cache else folder) / f"{source}-{torch.__version__}.so"
    problem = "torch has CUDA itself" if torch.version.cuda else ""
    if not problem and not library.exists():
        problem = simulated.build(library)
    if problem and "error:" in problem and torch.__version__.startswith("2.13."):
        pytest.fail(problem)
    if problem:
        pytest.skip(problem[:200])
    command = [sys.executable, simulated.__file__]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with subprocess.Popen(command, **pipes, env=os.environ | {"GPU_LIBRARY": str(library)}) as server:

        def on_gpu(function, *args, cards=("H200",), **options):
            output = folder / "output"
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


RUNS = {  # cards, what torch was built for, flags, and what the summary says
    "float32": (["H200"], "cu130", dict(dtype="float32"), "NVIDIA H200, float32"),
    "bfloat16": (["A100"], "cu130", dict(dtype="auto", optimizer="muon"), "NVIDIA A100-SXM4-80GB, bfloat16"),
    "fp8": (["4090"], "cu130", dict(dtype="fp8"), "NVIDIA GeForce RTX 4090, fp8"),
    "recomputing": (["H200"], "cu130", dict(dtype="bfloat16", activation_checkpointing=True), "H200, bfloat16"),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_with_everything(gpu, name, folder, tmp_path):
    """In float32 it computes what the CPU computes. Its checkpoints are whole: copies to the host have ended."""
    cards, build, changes, words = RUNS[name]
    if name == "fp8" and not ON_THIS_SYSTEM["float8"]:
        pytest.skip("needs float8")
    out_dir = tmp_path / "out"
    status, said = gpu(train_gpt2.main, all_flags(folder, out_dir, max_steps=6, **changes), cards=cards, build=build)
    assert status == 0 and words in said and "warning" not in said.lower(), said
    assert losses(out_dir)[-1] < losses(out_dir)[0] - 0.3 and list(read_log(out_dir, "hella")) == [0, 6]
    assert (out_dir / "samples.txt").stat().st_size and (out_dir / "hf" / "model.safetensors").exists()
    for path in list_checkpoints(out_dir):
        assert all(tensor.isfinite().all() for tensor in load_checkpoint(path)["model"].values())
    if name == "float32":
        options = dict(hellaswag_every=6, hellaswag_data=folder.parent / "hellaswag.jsonl", max_steps=6)
        train(folder, tmp_path / "cpu", **options)
        for stream in ("train", "val", "norm", "hella"):
            assert np.allclose(losses(out_dir, stream), losses(tmp_path / "cpu", stream), atol=1e-4, rtol=0)


def test_a_stop_its_continuation_and_a_branch_are_the_run_bit_for_bit(gpu, folder, tmp_path):
    """In float16, whose gradient scaler has a state of its own."""
    names = ("whole", "stopped", "branch")
    changes = dict(
        dtype="float16",
        optimizer="muon",
        hellaswag_every=0,
        sample_every=0,
    )
    whole, stopped, branch = [all_flags(folder, tmp_path / name, **changes) for name in names]
    assert gpu(train_gpt2.main, whole)[0] == 0
    assert gpu(signalled, 5, "SIGTERM", 1, 0, stopped)[0] == 0
    assert max(read_log(tmp_path / "stopped")) == 5
    assert gpu(train_gpt2.main, stopped)[0] == 0
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")
    parent = tmp_path / "whole" / "model_00008.pt"
    assert gpu(train_gpt2.main, [*branch, "--branch-from", str(parent)])[0] == 0
    assert_same_run(tmp_path / "branch", tmp_path / "whole", ["val_loss", "model", "optimizer", "scaler", "loader"])


# ----- Memory -------------------------------------------------------------------------------------------


def train_uncompiled(args):
    """Train with a compiler that changes nothing, whose better use of memory the trial counts on."""
    with patched(torch, "compile", lambda model, **options: model):
        train_gpt2.main(args)


def test_b_is_halved_until_it_fits(gpu, folder, tmp_path):
    """And the steps after the trial fit as well, though they hold gradients and Adam's two moments.

    Those and the weights are 16 bytes for each of 0.94M parameters, 15 MB, and a sequence takes about 5.5 MB: 256 ids
    with 16 numbers for each of 256 channels and 4 for each of 320 logits, 4 bytes each. 5% of the card are left alone.
    """
    options = dict(
        n_layer=1, n_embd=256, block_size=256, sequence_length=256, batch_size=8, total_batch_size=16 * 256
    )
    for megabytes, B, halvings in ((100, 8, 0), (50, 4, 1), (38, 2, 2)):
        args = tiny_flags(
            folder,
            tmp_path / f"{B}",
            device="cuda",
            compile=True,
            max_steps=2,
            **options,
        )
        status, said = gpu(train_uncompiled, args, gib=megabytes * 1e6 / 2**30)
        assert status == 0 and f"B {B} *" in said and said.count("Out of memory") == halvings, said
        assert np.allclose(losses(tmp_path / f"{B}"), losses(tmp_path / "8"), atol=1e-5, rtol=0)


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
    whole, args = (all_flags(folder, tmp_path / name, max_steps=6) for name in ("whole", "out"))
    assert gpu(train_gpt2.main, whole)[0] == 0
    for stage, (module, name, call) in STAGES.items():
        status, said = gpu(train_on_a_gpu_that_fills, module, name, call, args)
        assert status == 2 and "Traceback" not in said, stage
        assert "There is not enough memory. CUDA out of memory" in error_in(said), stage
    assert gpu(train_gpt2.main, args)[0] == 0
    assert_same_run(tmp_path / "out", tmp_path / "whole")


# ----- Order --------------------------------------------------------------------------------------------


def train_and_count_waits(args):
    """Print how often the host waits for the GPU in each step, and while each batch is handed over."""
    found = {"step": [], "loader": []}

    def counting(name, function):
        def call(*rest, **options):
            before = torch.ops.card.waits()
            result = function(*rest, **options)
            found[name].append(torch.ops.card.waits() - before)
            return result

        return call

    loader = train_gpt2.DataLoaderLite
    with patched(train_gpt2, "train_step", counting("step", train_gpt2.train_step)):
        with patched(loader, "next_batch", counting("loader", loader.next_batch)):
            train_gpt2.main(args)
    print(json.dumps(found))


def test_the_host_waits_once_per_step_and_never_in_the_loader(gpu, folder, tmp_path):
    """For the loss, the norm and the signals, which it reads in one copy; neither Muon nor AdamW waits."""
    options = dict(
        device="cuda",
        max_steps=4,
        optimizer="muon",
        dtype="bfloat16",
    )
    _, said = gpu(train_and_count_waits, tiny_flags(folder, tmp_path / "out", **options))
    found = json.loads(said.splitlines()[-1])
    assert found["step"] == [1] * 4
    assert len(found["loader"]) >= 8 and not any(found["loader"])


# ----- Decisions ----------------------------------------------------------------------------------------

# cards, torch's build, flags, and what a dry run says
DECISIONS = [
    (["H200"], "cu126", {}, ["NVIDIA H200, bfloat16", "B 64 *"]),  # the preset's own B, which is for 80 GB
    (["A100"], "cu130", {"dtype": "fp8"}, ["does not support --dtype fp8"]),  # which is Ada's
    (["V100"], "cu128", {}, ["Tesla V100-SXM2-16GB, float16"]),  # Volta is before bfloat16
    (["V100"], "cu130", {}, ["none for this machine's Tesla V100"]),
    (["H200", "1080"], "cu126", {}, ["GTX 1080, float16"]),  # each rank asks for its own GPU
    (["H200", "1080"], "cu128", {}, ["none for this machine's NVIDIA GeForce GTX 1080"]),
]


def train_as_local_rank(rank, args):
    os.environ["LOCAL_RANK"] = f"{rank}"
    train_gpt2.main(args)


@pytest.mark.parametrize("cards, build, changes, words", DECISIONS, ids=lambda value: str(value)[:20])
def test_what_is_decided_on_a_gpu(gpu, cards, build, changes, words, tmp_path):
    """By the last of several ranks on this machine."""
    options = dict(
        dry_run=True,
        compile=False,
        device="cuda",
        data="none",
        out_dir=tmp_path / "out",
    )
    args = flags(**options, **changes)
    _, said = gpu(train_as_local_rank, len(cards) - 1, args, cards=cards, build=build)
    assert all(text in said for text in words), said


def no_kernel(q, k, v, **options):
    """In place of attention: any kernel but the plain one fails."""
    if torch.backends.cuda.flash_sdp_enabled():
        raise RuntimeError("no kernel")
    return attention(q, k, v, **options)


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
def test_what_fails_on_a_gpu_is_given_up_alone_with_one_warning(gpu, name, data, tmp_path):
    options = dict(
        device="cuda",
        compile=name != "attention",
        max_steps=2,
        block_size=128,
        sequence_length=128,
    )
    args = tiny_flags(data, tmp_path / "out", **options)
    status, said = gpu(train_with_less, name, args)
    assert status == 0 and re.findall(r"step failed with (.*) \(", said) == LESS[name][-1], said
