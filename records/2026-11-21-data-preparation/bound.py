# ran at commit 8bee6f1; fineweb.MAX_THREADS is gone since
"""What the process that hands out the work and writes the shards costs itself: bound.py CHECKOUT MAX_THREADS FILES...

Prints its CPU seconds (all its threads, not those of processes that tokenize) and the tokens made.
"""

import json
import resource
import sys
import tempfile
import time
from pathlib import Path

checkout, max_threads, *files = sys.argv[1:]
sys.path.insert(0, checkout)
import fineweb

fineweb.MAX_THREADS = int(max_threads)
with tempfile.TemporaryDirectory() as folder:
    start = time.perf_counter()
    # a part other than the first has no validation sample, as FineWeb-Edu has none; half of the files are read
    fineweb.prepare(fineweb.Options(input=tuple(files), out_dir=folder, num_proc=2, part="1/2"))
    seconds = time.perf_counter() - start
    [meta] = Path(folder).glob("meta*.json")
    tokens = json.loads(meta.read_text())["tokens"]
usage = resource.getrusage(resource.RUSAGE_SELF)
print(f"{tokens:,} tokens: {usage.ru_utime + usage.ru_stime:.2f} s of CPU here, {seconds:.1f} s in all", flush=True)
