# ran at commit 7141a9d; the tests' functions that it uses are gone since
"""What torch.compile compiles in a run and after its resumption: PYTHONPATH=.:tests python records/.../graphs.py"""

import contextlib
import functools
import io
import tempfile
from pathlib import Path

import harness
import test_graphs

# a ramp from 1,024 windows to 2,048, everything evaluated before each step, and a SIGTERM after two of four steps
RUN = dict(n_layer=1, n_embd=16, sequence_length=32, max_steps=4, compile=True, checkpoint_every=0)
RUN |= dict(total_batch_size=2**16, batch_size=2**11, batch_ramp=2**15 + 1, val_every=1, val_tokens=2**11)
RUN |= dict(hellaswag_every=1, sample_every=1)
CASES = {
    "aot_eager, AdamW": ("aot_eager", {}),
    "aot_eager, Muon": ("aot_eager", dict(optimizer="muon")),
    "aot_eager, activation checkpointing": ("aot_eager", dict(activation_checkpointing=True)),
    "aot_eager, bfloat16": ("aot_eager", dict(dtype="bfloat16")),
    "aot_eager, float16": ("aot_eager", dict(dtype="float16")),
    "aot_eager, masked targets": ("aot_eager", dict(masks=True)),
    "inductor, AdamW": ("inductor", {}),
}

for name, (backend, changes) in CASES.items():
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        data = harness.make_shards(folder / "data", (3000, 70000), masks=changes.pop("masks", False))
        options = RUN | dict(hellaswag_data=harness.examples_file(folder, ["a cat", "hi"])) | changes
        run = functools.partial(harness.train, data, folder / "out", **options)
        for what, stop_after in (("stopped after two steps", 2), ("resumed", 0)):
            with contextlib.redirect_stdout(io.StringIO()) as said:
                found = test_graphs.count_graphs(run, stop_after, backend)
            breaks = dict(test_graphs.COUNTERS["graph_break"]) or "none"
            fell_back = "torch.compile" in said.getvalue()
            print(f"{name}, {what}: graphs {found}, graph breaks {breaks}{', GAVE UP' * fell_back}", flush=True)
