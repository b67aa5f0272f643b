"""All ranks call the same collectives, with the same shapes, from the same lines, whatever happens in a run."""

import os
import signal
import traceback
from pathlib import Path

import torch
import train_gpt2
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness import ROOT, examples_file, patched, run, tiny_flags


class Recorder(TorchDispatchMode):
    """Notes what torch's process group is asked for, by DDP and for objects as well, in a file per rank.

    An AssertionError if another rank's next one is not the same. event: what happens before the collective `number`.
    """

    def __init__(self, folder, event, number):
        super().__init__()
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        folder.mkdir(parents=True, exist_ok=True)
        self.file = open(folder / f"{rank}", "w", encoding="utf-8", buffering=1)
        self.others = [folder / f"{other}" for other in range(size) if other != rank]
        self.event, self.number, self.count = event, number, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            if self.count == self.number:
                self.event()
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            what = [function.overloadpacket.__name__, *(f"{list(t.shape)} {t.dtype}" for t in tensors)]
            self.compare(" ".join([*what, *place()]))
        return function(*args, **kwargs or {})

    def compare(self, line):
        print(line, file=self.file)
        for path in self.others:
            lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
            theirs = lines[self.count : self.count + 1] or [line]
            assert theirs == [line], f"rank {path.name}: {theirs[0]}\nrank {Path(self.file.name).name}: {line}"
        self.count += 1


def place():
    """The program's line that is being executed, and the one in distributed.py that it has called, if any."""
    paths = [(Path(frame.filename), frame) for frame in traceback.extract_stack()]
    own = [(path, frame) for path, frame in paths if path.is_relative_to(ROOT) and path.parent.name != "tests"]
    callers = [(path, frame) for path, frame in own if path.name != "distributed.py"]
    return [f"{path.name}:{frame.lineno}" for path, frame in [callers[-1], own[-1]]]


def nothing():
    pass


def be_told_to_stop():
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)


def train_recorded(folder, event, number, args):
    with Recorder(folder, event, number):
        train_gpt2.main(args)


def train_where_rank_1_lacks_memory(folder, args):
    """For four rows in training: all ranks take two."""

    def limited(self, idx, *rest, **options):
        if torch.is_grad_enabled() and len(idx) > 2 and os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, idx, *rest, **options)

    with patched(train_gpt2.GPT, "forward", limited) as forward:
        train_recorded(folder, nothing, -1, args)


def collectives(folder, ranks):
    """What all of the ranks have called."""
    first, *others = [(folder / f"{rank}").read_text(encoding="utf-8").splitlines() for rank in range(ranks)]
    assert others == [first] * len(others)
    return first


def life_of_a_run(folder, data, ranks):
    """{what: its collectives} and what rank 0 says, from a start with too little memory to a continuation's end."""
    rest = dict(n_layer=1, optimizer="muon", hellaswag_every=2, hellaswag_data=examples_file(folder, ["a cat", "hi"]))
    rest |= dict(sample_every=4, max_steps=4, val_every=2, checkpoint_every=2, total_batch_size=128 * ranks)
    found, said = {}, ""

    def record(name, function, *args):
        nonlocal said
        said += run(function, folder / name, *args, ranks=ranks)[0]
        found[name] = collectives(folder / name, ranks)

    flags = tiny_flags(data, folder / "out", **rest)
    record("new, with too little memory", train_where_rank_1_lacks_memory, flags)
    record("finished", train_recorded, nothing, -1, flags)
    parent = folder / "out" / "model_00002.pt"
    branch = [*tiny_flags(data, folder / "branch", **rest), "--branch-from", str(parent), "--max-lr", "1e-3"]
    record("branch", train_recorded, nothing, -1, branch)
    stopped = tiny_flags(data, folder / "stopped", **rest)
    record("stopped", train_recorded, be_told_to_stop, len(found["new, with too little memory"]) // 2, stopped)
    record("continued", train_recorded, nothing, -1, stopped)
    return found, said


def test_ranks_call_the_same_collectives_in_all_that_a_run_goes_through(folder, tmp_path):
    found, said = life_of_a_run(tmp_path, folder, 2)
    kinds = {line.split()[0] for lines in found.values() for line in lines}
    assert {"allreduce_", "broadcast_", "allgather_", "_allgather_base_"} <= kinds, "DDP's, objects' and Muon's"
    assert "Out of memory" in said and "is finished" in said and "Stopped after" in said
    assert "FutureWarning" not in said
    assert len(found["finished"]) < 30, "a finished run does not send its checkpoint to the other ranks"
