"""How every side is measured, and how the numbers are shown and saved."""

import dataclasses
import gc
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from plumbing.files import new_output

ROOT = Path(__file__).resolve().parents[1]


def timed(function, device):
    """Time function(): (seconds, its result); on CUDA with events, so that the GPU's time is measured."""
    if not device.startswith("cuda"):
        start = time.perf_counter()
        result = function()
        return time.perf_counter() - start, result
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    result = function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3, result


def interleave(sides, rounds, device, warmups=1):
    """Call the functions in `sides`, {name: function}, alternately: `warmups` rounds and then `rounds` that count.

    Returns {name: {"seconds": [...], "cpu_seconds": [...], "peak_gib": ..., "result": of the last call}}. CPU seconds
    show what a side costs when other processes share the machine; the peak is a GPU's, with the weights of all sides.
    """
    measured = {name: dict(seconds=[], cpu_seconds=[], peak_gib=0.0) for name in sides}
    gc.freeze()  # exclude existing objects, so that collecting between the rounds is cheap
    bar = tqdm(range(-warmups, rounds), "rounds", leave=False, delay=2, disable=not sys.stderr.isatty())
    for round_number in bar:
        for name, function in sides.items():
            side = measured[name]
            gc.collect()
            if device.startswith("cuda"):
                torch.cuda.reset_peak_memory_stats()
            cpu_start = time.process_time()
            seconds, side["result"] = timed(function, device)
            cpu_seconds = time.process_time() - cpu_start
            side["peak_gib"] = max(side["peak_gib"], torch.cuda.max_memory_allocated() / 2**30)
            if round_number >= 0:
                side["seconds"].append(seconds)
                side["cpu_seconds"].append(cpu_seconds)
    return measured


def report(options, measured, work, unit, ours=None, **extra):
    """Print a table of `interleave`'s results; write the numbers to --json and return them.

    work: the number of units in a call, e.g. tokens, or {side: that number}; ours: the side that the others are
    compared with, by default the first.
    """
    ours = ours or next(iter(measured))
    work = work if isinstance(work, dict) else dict.fromkeys(measured, work)
    seconds = {name: np.array(side["seconds"]) / work[name] for name, side in measured.items()}
    cpu_seconds = {name: np.array(side["cpu_seconds"]) / work[name] for name, side in measured.items()}
    rates = {name: float(1 / np.median(times)) for name, times in seconds.items()}
    others = [name for name in measured if name != ours]
    ratios = {name: float(np.median(seconds[name] / seconds[ours])) for name in others}
    cpu_ratios = {name: float(np.median(cpu_seconds[name] / cpu_seconds[ours])) for name in others}
    width, on_gpu = max(map(len, measured)) + 1, options.device.startswith("cuda")
    print(f"{'':{width}}{unit + '/s':>12}{'ms':>10}{'CPU ms':>10}{'GiB' * on_gpu:>7}{'ratio':>7}{'by CPU':>8}")
    for name, side in measured.items():
        ms, cpu_ms = (1e3 * np.median(side[key]) for key in ("seconds", "cpu_seconds"))
        gib = f"{side['peak_gib']:.1f}" if on_gpu else ""
        line = f"{name:{width}}{rates[name]:12,.1f}{ms:10.2f}{cpu_ms:10.2f}{gib:>7}"
        print(line + (f"{ratios[name]:7.2f}{cpu_ratios[name]:8.2f}" if name in ratios else ""))
    numbers = {"ratio": next(iter(ratios.values()), None), f"{unit}_per_s": rates[ours], "rates": rates}
    numbers |= {"ratios": ratios, "cpu_ratios": cpu_ratios, **extra}
    for key in ("seconds", "cpu_seconds", "peak_gib"):
        numbers[key] = {name: side[key] for name, side in measured.items()}
    numbers |= machine(options.device) | {"options": dataclasses.asdict(options)}
    if options.json:
        with new_output(options.json) as file:
            file.write(json.dumps(numbers, indent=1) + "\n")
    return numbers


def machine(device):
    """The hardware and software versions of a measurement."""
    if device.startswith("cuda"):
        name = torch.cuda.get_device_name()
    else:
        cpuinfo = Path("/proc/cpuinfo")
        found = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
        name = f"{found[1] if found else platform.processor()}, {torch.get_num_threads()} of {os.cpu_count()} threads"
    versions = {package: importlib.metadata.version(package) for package in "torch numpy transformers tiktoken".split()}
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    versions["python"] = platform.python_version()
    return {"device": name, "versions": versions, "commit": commit, "command": " ".join(sys.argv)}
