# ran at commit 6d951c3, where bench was one file; the functions that it uses are gone
"""The table and the picture of ladder.json by processor seconds: python by_cpu_seconds.py, in the project's root."""

import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, ".")

import bench

folder = Path(__file__).parent
numbers = json.loads((folder / "ladder.json").read_text())
seconds, rows, previous = numbers["cpu_seconds"], {}, "float32"
for name, times in seconds.items():
    median = statistics.median(times)
    gain, total = (bench.paired_ratio(seconds[other], times) for other in (previous, "float32"))
    rows[name] = {"ms": 1e3 * median, "tok_per_s": numbers["tokens"][name] / median, "total": total}
    previous = name
    print(f"{name:20}{1e3 * median:9.0f} ms{rows[name]['tok_per_s']:8.0f} tok/s{gain:7.2f}{total:7.2f}")
bench.draw_ladder(rows, f"{numbers['device']}, by processor seconds", folder / "ladder.png")
