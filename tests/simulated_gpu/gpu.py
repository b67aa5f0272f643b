"""A simulated GPU for torch's CPU build.

It computes what a CPU computes, with a GPU's limit on memory and order of things: gpu.cpp is the device, and this file
answers for torch.cuda. Not simulated: speed, rounding and workspaces of a GPU's kernels, NCCL. It is loaded before
torch, which looks for GPUs only once.
"""

import contextlib
import ctypes
import gc
import importlib.util
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
import types
from pathlib import Path

HERE = Path(__file__).resolve().parent
TORCH = Path(importlib.util.find_spec("torch").origin).parent
LIBRARY = Path(os.environ.get("GPU_LIBRARY", HERE / "libgpu.so"))
# torch's name, compute capability, GiB as torch counts them: a little less than on the box
CARDS = {
    "H200": ("NVIDIA H200", (9, 0), 139.8),
    "A100": ("NVIDIA A100-SXM4-80GB", (8, 0), 79.3),
    "4090": ("NVIDIA GeForce RTX 4090", (8, 9), 23.5),
    "5090": ("NVIDIA GeForce RTX 5090", (12, 0), 31.4),
    "V100": ("Tesla V100-SXM2-16GB", (7, 0), 15.8),
    "1080": ("NVIDIA GeForce GTX 1080", (6, 1), 7.9),
}
# what torch 2.9's builds and later ones have kernels for (pull request 7046 of pytorch/test-infra)
KERNELS = {
    "cu126": "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90",
    "cu128": "sm_70 sm_75 sm_80 sm_86 sm_90 sm_100 sm_120",
    "cu130": "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120",
    "own": "sm_80 compute_90",  # which a later GPU compiles for itself
}


def build(library):
    """Compile the device for this Python's torch. Returns what went wrong, "" if nothing did."""
    if not shutil.which("g++") or sys.platform != "linux":
        return "needs Linux and g++"
    include = [f"-I{TORCH}/include", f"-I{TORCH}/include/torch/csrc/api/include"]
    options = ["-std=c++20", "-O0", "-shared", "-fPIC", *include, f"-L{TORCH}/lib", "-lc10", "-ltorch_cpu"]
    part = Path(f"{library}.part")
    said = subprocess.run(["g++", HERE / "gpu.cpp", *options, "-o", part], stderr=subprocess.PIPE, text=True).stderr
    if part.exists():
        part.rename(library)
    return said


def load():
    """Put the device into this process, before torch."""
    assert "torch" not in sys.modules, "torch has looked for GPUs already"
    if not LIBRARY.exists() and build(LIBRARY):
        sys.exit("The simulated GPU needs Linux, g++, and the headers of torch 2.13.")
    for path in (*TORCH.glob("lib/libgomp*"), TORCH / "lib/libc10.so", TORCH / "lib/libtorch_cpu.so", LIBRARY):
        ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)


def insert(*names, gib=None, build="cu130"):
    """Make torch.cuda say that these cards are in the machine. This process uses one, whose memory `gib` may lower."""
    import torch

    device, cuda, selected = torch.ops.card, torch.cuda, [0]
    sizes = [int((gib or CARDS[name][2]) * 2**30) for name in names]

    def index(place=None):
        number = torch.device(place).index if isinstance(place, (str, torch.device)) else place
        return selected[0] if number is None else number

    def select(place):
        selected[0] = index(place)
        device.select(selected[0])
        device.limit(sizes[selected[0]])

    def properties(place=None):
        title, (major, minor), _ = CARDS[names[index(place)]]
        numbers = dict(major=major, minor=minor, total_memory=sizes[index(place)], is_integrated=0)
        return types.SimpleNamespace(name=title, **numbers)

    device.insert(len(names), sizes[0])
    always = lambda value: lambda *args, **options: value  # noqa: E731
    answers = {True: "is_available is_initialized", False: "is_current_stream_capturing _is_in_bad_fork"}
    answers[None] = "init _lazy_init empty_cache manual_seed manual_seed_all"
    for answer, questions in answers.items():
        for question in questions.split():  # subtle: a function each, as dynamo knows them by their identity
            setattr(cuda, question, always(answer))
    cuda.device_count = always(len(names))
    cuda.current_device = cuda.random.current_device = lambda: selected[0]
    cuda.set_device = select
    cuda.device = lambda place: contextlib.nullcontext()
    cuda.default_generators = [torch.default_generator] * len(names)
    cuda.get_device_properties = properties
    cuda.get_device_name = lambda place=None: properties(place).name
    cuda.get_device_capability = lambda place=None: CARDS[names[index(place)]][1]
    cuda.is_bf16_supported = lambda *args: cuda.get_device_capability() >= (8, 0)
    cuda.get_arch_list = always(KERNELS[build].split())
    cuda.mem_get_info = lambda place=None: (sizes[index(place)] - device.used(), sizes[index(place)])
    cuda.memory_allocated = lambda *args: device.used()
    cuda.memory_reserved = lambda *args: device.used()
    cuda.max_memory_allocated = lambda *args: device.peak()
    cuda.reset_peak_memory_stats = lambda *args: device.reset_peak()
    cuda.set_per_process_memory_fraction = lambda part, place=None: device.limit(int(part * sizes[index(place)]))
    cuda.synchronize = lambda *args: device.synchronize()


def serve():
    """Run each (function, arguments, output, insert's arguments) that comes on stdin in a process; print its status."""
    import pytest  # noqa: F401 - what runs import, once for all of these processes
    import tokenizers  # noqa: F401
    import torch._inductor.cudagraph_trees  # noqa: F401
    import train_gpt2
    from plumbing.data.tokenizers import get_encoding
    from plumbing.run.huggingface import export_huggingface

    import harness

    train_gpt2.read_flags(
        train_gpt2.TrainConfig, train_gpt2.PRESETS, []
    )  # no whole run, which would start autograd's threads, and none for the GPU
    with tempfile.TemporaryDirectory() as folder:
        export_huggingface(harness.tiny_model(vocab_size=257), get_encoding("bytes"), Path(folder, "hf"))
    gc.freeze()

    while True:
        try:
            function, args, output, (names, options) = pickle.load(sys.stdin.buffer)
        except EOFError:
            os._exit(0)  # at once: to take all modules apart takes a second
        child = os.fork()
        if not child:
            signal.alarm(60)
            status = 1
            try:
                insert(*names, **options)
                status = harness.status_of(harness.child, function, args, output, dict(os.environ), os.getcwd())
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    load()
    serve()
