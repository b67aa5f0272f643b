"""What the processes of harness.run have behind them when they are forked: a short run, with all that it imports.

It makes the modules, regular expressions and so on that a process makes once, in 1.3 s.
"""

import gc
import tempfile
from pathlib import Path

import matplotlib.pyplot  # noqa: F401
import pytest  # noqa: F401
import tokenizers  # noqa: F401
import torch._dynamo  # noqa: F401
import train_gpt2

import harness

with tempfile.TemporaryDirectory() as folder:
    data = harness.make_shards(Path(folder, "data"))
    flags = harness.tiny_flags(data, Path(folder, "out"), max_steps=1, val_every=0)
    harness.refusal_of(train_gpt2.main, *flags)  # and transformers, with which its export is compared
gc.collect()  # and threads end
gc.freeze()  # the garbage collection in each run then has little to look at
