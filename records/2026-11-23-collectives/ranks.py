# ran at commit 7141a9d; test_collectives, whose function it calls, is gone since
"""The collectives of 2, 4 and 8 ranks in all that a run goes through: PYTHONPATH=.:tests python records/.../ranks.py"""

import collections
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    import harness
    import test_collectives

    harness.run.__kwdefaults__["timeout"] = 600  # eight ranks on two cores
    for ranks in map(int, sys.argv[1:]):
        with tempfile.TemporaryDirectory() as folder:
            began = time.time()
            data = harness.make_shards(Path(folder) / "data")
            for name, lines in test_collectives.life_of_a_run(Path(folder), data, ranks).items():
                kinds = collections.Counter(line.split()[0] for line in lines)
                print(f"{ranks} ranks, {name}: {len(lines)} on each, all the same: {dict(kinds)}", flush=True)
            if ranks == 2:
                for line, times in collections.Counter(lines).items():
                    print(f"    {times} x {line}")
            print(f"    {time.time() - began:.0f} s", flush=True)
