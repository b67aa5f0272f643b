"""How every side is measured, and how the numbers are shown."""

import gc
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from plumbing.distributed import World

ROOT = Path(__file__).resolve().parents[1]


def timed(function):
    """Call function(): (seconds, CPU seconds, its result); on a GPU until its work is done."""
    start, cpu_start = time.perf_counter(), time.process_time()
    result = function()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - start, time.process_time() - cpu_start, result


def interleave(sides, rounds):
    """Call the functions in `sides`, {name: function}, alternately: a warm-up, then `rounds` rounds that count.

    Returns {name: {"seconds": [...], "cpu_seconds": [...], "peak_gib": ..., "result": of the last call}}. CPU seconds
    show what a side costs when other processes share the machine; the peak is a GPU's, with the weights of all sides.
    """
    measured = {name: dict(seconds=[], cpu_seconds=[]) for name in sides}
    gc.freeze()  # exclude existing objects from garbage collection
    for number in World().progress_bar(range(rounds + 1), "rounds"):
        for name, function in sides.items():
            side = measured[name]
            if torch.cuda.is_initialized():
                torch.cuda.reset_peak_memory_stats()
            seconds, cpu_seconds, side["result"] = timed(function)
            side["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
            if number > 0:
                side["seconds"].append(seconds)
                side["cpu_seconds"].append(cpu_seconds)
    return measured


def report(measured, work, unit, ours=None):
    """Print a table of `interleave`'s results; return the numbers.

    work: {side: its units per call, such as tokens}; ours: the side that the others are compared with, by default the
    first.
    """
    ours = ours or next(iter(measured))
    width, sides = max(map(len, measured)) + 1, {}
    print(f"{'':{width}}{unit + '/s':>12}{'ms':>10}{'CPU ms':>10}{'GiB':>7}{'ratio':>7}{'by CPU':>8}")
    for name, result in measured.items():
        side = sides[name] = {"peak_gib": result["peak_gib"]}
        for clock, ratio in (("seconds", "ratio"), ("cpu_seconds", "cpu_ratio")):
            ours_per_unit = np.array(measured[ours][clock]) / work[ours]
            side[ratio] = float(np.median(np.array(result[clock]) / work[name] / ours_per_unit))
            side[clock] = result[clock]
        ms, cpu_ms = 1e3 * np.median(side["seconds"]), 1e3 * np.median(side["cpu_seconds"])
        side[f"{unit}_per_s"] = rate = float(1e3 * work[name] / ms)
        print(f"{name:{width}}{rate:12,.1f}{ms:10.2f}{cpu_ms:10.2f}{side['peak_gib']:7.1f}", end="")
        print(f"{side['ratio']:7.2f}{side['cpu_ratio']:8.2f}")
    ratio = next((side["ratio"] for name, side in sides.items() if name != ours), None)
    return {"ratio": ratio, f"{unit}_per_s": sides[ours][f"{unit}_per_s"], "sides": sides}


def machine():
    """The hardware and software versions of a measurement."""
    cpu = ", ".join(re.findall(r"Model name: +(.+)", output_of("lscpu")))
    cpu += f", {torch.get_num_threads()} of {os.cpu_count()} threads"
    versions = {name: importlib.metadata.version(name) for name in ("torch", "numpy", "transformers", "tiktoken")}
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_initialized() else cpu,
        "nvidia-smi": output_of(
            "nvidia-smi", "--query-gpu=driver_version,clocks.sm,power.draw,power.limit", "--format=csv"
        ),
        "versions": versions | {"python": sys.version},
        "commit": output_of("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"),
        "command": " ".join(sys.argv),
    }


def output_of(*command):
    """What a command prints; "" if it is not installed."""
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() if shutil.which(command[0]) else ""
