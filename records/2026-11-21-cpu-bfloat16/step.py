# ran at commit 625699d, where bench was one file; the functions that it uses are gone
"""A training step of quickstart's model in float32, in bfloat16, and in bfloat16 with attention in float32.

python records/2026-11-21-cpu-bfloat16/step.py ROUNDS, in the project's root.
"""

import dataclasses
import statistics
import sys
import tempfile
from functools import partial

sys.path.insert(0, ".")

import bench
import torch
from torch.nn import functional as F

torch.set_num_threads(1)
plain_attention = F.scaled_dot_product_attention


def attention_in_float32(q, k, v, **options):
    with torch.autocast("cpu", enabled=False):
        return plain_attention(q.float(), k.float(), v.float(), **options)


def step(run, attention):
    F.scaled_dot_product_attention = attention
    return run()


sides = {
    "float32": ("float32", torch.float32, plain_attention),
    "bfloat16": ("bfloat16", torch.bfloat16, plain_attention),
    "bfloat16, attention in float32": ("bfloat16", torch.bfloat16, attention_in_float32),
    "the same, residual stream in float32": ("bfloat16", torch.float32, attention_in_float32),
}
for T, B in ((128, 16), (64, 12), (512, 4)):
    flags = ["train", "--device=cpu", f"--batch-size={B}", f"--sequence-length={T}", f"--total-batch-size={B * T}"]
    config = bench.train_config(bench.cli.parse(bench.Options, flags), "cpu")
    runs = {}
    with tempfile.TemporaryDirectory() as folder:
        bench.random_shards(folder, config)
        for name, (dtype, residual_dtype, attention) in sides.items():
            changed = dataclasses.replace(config, dtype=dtype)
            run = bench.Ours(changed, folder, bench.single_process(changed, "cpu"), 1)
            run.raw_model.residual_dtype = residual_dtype
            runs[name] = partial(step, run, attention)
        measured = bench.interleave(runs, int(sys.argv[1]), "cpu")
    print(f"{config.n_layer} layers, {config.n_embd} wide, B {B}, T {T}")
    for name, side in measured.items():
        milliseconds = [1e3 * seconds for seconds in side["cpu_seconds"]]
        by_cpu = bench.paired_ratio(measured["float32"]["cpu_seconds"], side["cpu_seconds"])
        by_clock = bench.paired_ratio(measured["float32"]["seconds"], side["seconds"])
        print(f"  {name:40} {statistics.median(milliseconds):8.1f} ms CPU (least {min(milliseconds):.1f})  "
              f"{by_cpu:.2f}x of float32 by CPU seconds, {by_clock:.2f}x by the clock, loss {side['result']:.6f}")  # fmt: skip
