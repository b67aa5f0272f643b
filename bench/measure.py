"""How every side is measured, and how the numbers are shown."""

import gc
import math
import os
import re
import sys
import time
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from plumbing.cli.console import count, duration, output_of, progress_bar
from plumbing.run.source_code import git_commit

ROWS_ON_GPU, ROWS_ON_CPU = 8192, 1024  # of the square matrices in `matmul_rate`


def cpu_seconds():
    """CPU seconds of this process and, in hundredths, of those that it has started and waited for."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def timed(function):
    """Call function(): (seconds, CPU seconds, its result); on a GPU until its work is done."""
    start, cpu_start = time.perf_counter(), cpu_seconds()
    result = function()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - start, cpu_seconds() - cpu_start, result


def measure(sides, rounds, work, unit, ours=None):
    """Call the functions in `sides`, {name: function}, alternately: a warm-up, then `rounds` rounds that count.

    The warm-up tells how long these will take, and that is printed.
    work: {name: units per call, such as tokens}; ours: the reference, by default the first. Prints a table; returns
    (its numbers, {name: last result}). CPU seconds leave other processes out.
    """
    ours, results = ours or next(iter(sides)), {}
    measured: dict[str, Any] = {name: {"seconds": [], "cpu_seconds": []} for name in sides}
    gc.freeze()  # exclude existing objects from garbage collection
    print(f"warming up: {'; '.join(sides)}", flush=True)
    warm_up = sum(timed(function)[0] for function in sides.values())
    print(f"{count(rounds, 'round')} will take about {duration(math.ceil(rounds * warm_up))}", flush=True)
    for _ in progress_bar(range(rounds), "rounds", delay=3):
        for name, function in sides.items():
            seconds, cpu, results[name] = timed(function)
            measured[name]["seconds"].append(seconds)
            measured[name]["cpu_seconds"].append(cpu)
    gc.unfreeze()  # triton 3.9 reports what is frozen at the end as leaks, on many lines
    width = max(map(len, sides)) + 1
    print(f"{'':{width}}{unit + '/s':>12}{'ms':>10}{'CPU ms':>10}{'ratio':>7}{'by CPU':>8}")
    for name, side in measured.items():
        for clock, ratio in (("seconds", "ratio"), ("cpu_seconds", "cpu_ratio")):
            ours_per_unit = np.array(measured[ours][clock]) / work[ours]
            side[ratio] = float(np.median(np.array(side[clock]) / work[name] / ours_per_unit))
        seconds, cpu = np.median(side["seconds"]), np.median(side["cpu_seconds"])
        speed = side[f"{unit}_per_s"] = float(work[name] / seconds)
        print(f"{name:{width}}{speed:12,.1f}{1e3 * seconds:10.2f}{1e3 * cpu:10.2f}", end="")
        print(f"{side['ratio']:7.2f}{side['cpu_ratio']:8.2f}")
    ratio = next((side["ratio"] for name, side in measured.items() if name != ours), None)
    return {"ratio": ratio, f"{unit}_per_s": measured[ours][f"{unit}_per_s"], "sides": measured}, results


def matmul_rate(device, dtype):
    """FLOP/s of a square matrix times itself, the best of three times ten: what peak this machine reaches."""
    n = ROWS_ON_GPU if device.startswith("cuda") else ROWS_ON_CPU
    square = torch.randn(n, n, device=device, dtype=dtype)

    def ten_times():
        for _ in range(10):
            torch.mm(square, square)

    return 10 * 2 * n**3 / min(timed(ten_times)[0] for _ in range(3))


def machine(device):
    """The hardware and software versions of a measurement."""
    cpu = ", ".join(re.findall(r"Model name: +(.+)", output_of("lscpu")))
    cpu += f", {torch.get_num_threads()} of {os.cpu_count()} threads"
    query = "--query-gpu=driver_version,clocks.sm,power.limit"
    packages = ("torch", "numpy", "transformers", "tiktoken")
    return {
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else cpu,
        "nvidia-smi": output_of("nvidia-smi", query, "--format=csv"),
        "versions": {name: version(name) for name in packages} | {"python": sys.version},
        "commit": git_commit(),
        "command": " ".join(sys.argv),
    }
