"""What the processes of harness.run have behind them when they are forked: a short run, with all that it imports.

It makes the modules, regular expressions and so on that a process makes once, in 0.2 s.
"""

import gc
import tempfile
from pathlib import Path

import matplotlib.pyplot  # noqa: F401
import pytest  # noqa: F401
import tokenizers  # noqa: F401
import torch._dynamo  # noqa: F401

import harness

with tempfile.TemporaryDirectory() as folder:
    harness.train(harness.make_shards(Path(folder, "data")), Path(folder, "out"), max_steps=1, val_every=0)
gc.collect()  # and threads end
gc.freeze()  # the garbage collection in each run then has little to look at
