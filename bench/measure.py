"""Measures the sides of a benchmark and prints the numbers."""

import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from plumbing.cli.console import output_of, progress_bar
from plumbing.run.source_code import git_commit

# sizes of the square matrices in `matmul_rate`
ROWS_ON_GPU = 8192
ROWS_ON_CPU = 1024


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Call function(). Returns (the seconds until a GPU's work is done as well, the result)."""
    start = time.perf_counter()
    result = function()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def measure(
    sides: Mapping[str, Callable[[], Any]], rounds: int, work: Mapping[str, float], *, unit: str, ours: str = ""
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Call the functions in `sides` alternately: once to warm up, then `rounds` times with a clock.

    work: {name: units per call, such as tokens}; ours: the side that the ratios compare with, by default the first.
    Prints a table; returns (its numbers, {name: last result}).
    """
    ours = ours or next(iter(sides))
    results = {}
    seconds = {name: [] for name in sides}
    print(f"warming up: {'; '.join(sides)}", flush=True)
    for function in sides.values():
        function()
    for _ in progress_bar(range(rounds), "rounds", delay=3):
        for name, function in sides.items():
            took, results[name] = timed(function)
            seconds[name].append(took)
    width = max(map(len, sides)) + 1
    print(f"{'':{width}}{unit + '/s':>12}{'ms':>10}{'ratio':>7}")
    per_unit = {name: np.array(seconds[name]) / work[name] for name in sides}
    measured = {}
    for name in sides:
        ratio = float(np.median(per_unit[name] / per_unit[ours]))
        speed = float(1 / np.median(per_unit[name]))
        milliseconds = 1e3 * np.median(seconds[name])
        print(f"{name:{width}}{speed:12,.1f}{milliseconds:10.2f}{ratio:7.2f}")
        measured[name] = {"seconds": seconds[name], "ratio": ratio, f"{unit}_per_s": speed}
    ratios = [side["ratio"] for name, side in measured.items() if name != ours]
    first_ratio = ratios[0] if ratios else None
    speed = measured[ours][f"{unit}_per_s"]
    return {"ratio": first_ratio, f"{unit}_per_s": speed, "sides": measured}, results


def matmul_rate(device: str, dtype: torch.dtype) -> float:
    """The peak FLOP/s that this machine reaches: the best of three runs, each with ten products of square matrices."""
    n = ROWS_ON_GPU if device.startswith("cuda") else ROWS_ON_CPU
    square = torch.randn(n, n, device=device, dtype=dtype)

    def ten_times():
        for _ in range(10):
            torch.mm(square, square)

    return 10 * 2 * n**3 / min(timed(ten_times)[0] for _ in range(3))


def machine(device: str) -> dict[str, Any]:
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
