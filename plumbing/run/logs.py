"""A run's two texts, each written and read here: log.txt, and run.txt, which describes the run's starts.

log.txt has `step stream value` on each line. run.txt has a block for each start: lines of `name: value`, such as the
command, the settings, the machine and the commit, and a blank line at the end.
"""

import collections
import contextlib
import dataclasses
import datetime
import functools
import glob
import json
import math
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from plumbing.cli.console import plain, quote_group
from plumbing.data.shards import origin
from plumbing.files import Name, atomic_write, named_errors, open_regular
from plumbing.run import source_code
from plumbing.run.commands import train_command

NUMBER = r"(-?\d{1,15}(?:\.\d{1,15})?(?:e[+-]\d{2,3})?|-?inf|nan)"
LINE = re.compile(rf"(\d{{1,15}}) ([\w/.-]+) {NUMBER}\n", re.ASCII)
# what nanoGPT prints: "step 250: train loss 2.6230, val loss 2.6341" and "iter 250: loss 2.6230, time 31.07ms, ..."
NANOGPT = re.compile(
    rf"(?:step|iter) (\d{{1,15}}): (?:train )?loss {NUMBER},(?: val loss {NUMBER}\n)?", re.ASCII
)

NO_NAME = re.compile(r"[^\w/.-]", re.ASCII)  # what the name of a stream cannot have

# ----- log.txt ------------------------------------------------------------------------------------------


def read_log(path: Name, before: float = math.inf) -> Iterator[tuple[int, str, float]]:
    """Yield (step, stream, value) of a log's lines below step `before`; damaged ones are left out, with a warning.

    The log may be what nanoGPT prints, too.
    """
    damaged, printed, line = 0, False, "\n"
    with open_regular(path, "r", encoding="utf-8", errors="replace") as file:
        for line in file:
            match = LINE.fullmatch(line)
            if match and int(match[1]) < before:
                yield int(match[1]), match[2], float(match[3])
            elif not match and (match := NANOGPT.match(line)):
                printed = True
                values = {"train": match[2], "val": match[3]} if int(match[1]) < before else {}
                yield from ((int(match[1]), stream, float(value)) for stream, value in values.items() if value)
            elif not match:
                damaged += 1
    # no warning about a last line that a crash has cut short, or about what else is printed
    if damaged > (not line.endswith("\n")) and not printed:
        print(f"warning: {damaged} damaged lines of {path} are left out.", flush=True)


def open_log(out_dir: Path, parent: Path, step: int) -> IO[str]:
    """Open log.txt, which begins with the intact lines of the parent's (or its own) for steps below `step`."""
    path, source = out_dir / "log.txt", parent / "log.txt"
    with atomic_write(path, "w", encoding="utf-8") as file:
        for at, stream, value in read_log(source, step) if source.exists() else ():
            file.write(f"{at} {stream} {value:.9g}\n")
    return open(path, "a", encoding="utf-8")


def write_log(file: IO[str], step: int, values: dict[str, float]) -> None:
    """Write a line for each stream, {stream: value}, in one go."""
    lines = [f"{step} {NO_NAME.sub('_', stream)} {value:.9g}\n" for stream, value in values.items()]
    with named_errors(file.name):
        file.write("".join(lines))
        file.flush()


def last_values(path: Path) -> dict[str, float]:
    """{stream: its last value} of a log.txt; {} if there is none."""
    return {stream: value for _, stream, value in read_log(path)} if path.exists() else {}


# ----- run.txt ------------------------------------------------------------------------------------------

DICTS = ("config", "ran", "branched", "fingerprints")  # those fields that are in JSON


def read_starts(path: Path) -> list[dict[str, Any]]:
    """The starts that run.txt describes, each as a dict of texts and, for those in DICTS that are whole, of dicts."""
    starts = []
    for block in path.read_text(encoding="utf-8", errors="replace").strip().split("\n\n"):
        fields: dict[str, Any] = {}
        for line in block.splitlines():
            name, _, text = line.partition(": ")
            with contextlib.suppress(ValueError, RecursionError):  # people may have edited it
                value = json.loads(text) if name in DICTS else plain(text)
                if isinstance(value, dict) == (name in DICTS):
                    fields[name] = value
        starts.append(fields)
    return starts


def write_start(config: Any, start: Any, *, ran: dict[str, Any], fingerprints: dict[str, list[str]]) -> None:
    """Add a Start to run.txt, which may have another program's lines in any encoding.

    ran: what the trial found; fingerprints: {a folder's name in log.txt: those of its training and validation data}.
    """
    changes = source_code.git("diff", "HEAD")  # of what is not committed
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    lines = {
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": " ".join(map(quote_group, train_command(type(config), start.typed))),
        "from step": str(start.step),
        "config": json.dumps(dataclasses.asdict(config)),
        "ran": json.dumps(ran),
        "data": "; ".join(plain(origin(folder)) for folder in config.data),
        "fingerprints": json.dumps(fingerprints),
        "versions": f"python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}",
        "machine": f"{platform.platform()}, {os.cpu_count()} cores, {', '.join(gpus) or 'no GPU'}",
        "ranks": os.environ.get("WORLD_SIZE", "1"),
        "commit": source_code.git_commit(),
        "changes": json.dumps(changes[:20_000]) if changes else "",
        "code": " ".join(source_code.describe(type(config)).values()),
        "branched": json.dumps(start.branched) if start.branched else "",
    }
    entry = "".join(f"{name}: {text}\n" for name, text in lines.items() if text) + "\n"
    path, history = Path(config.out_dir, "run.txt"), b""
    with contextlib.suppress(FileNotFoundError), open_regular(path) as file:
        history = file.read()
    with atomic_write(path) as file:
        file.write(history + entry.encode("utf-8", "surrogateescape"))


def is_restarted() -> bool:
    """Whether torchrun has started this process anew after a crash."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def launch() -> str:
    """An identifier of the torchrun that started this process, which is the same after a restart."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', 'none')} of process {os.getppid()}"


# ----- A run, as its folder describes it ----------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Logged:
    """A run that has a log. Without a run.txt, as for one of nanoGPT or build-nanogpt, only its streams are known."""

    folder: Path  # or a log alone, in a file of any name
    starts: list[dict[str, Any]]  # as read_starts gives them

    def fact(self, name: str, default: Any) -> Any:
        """A field of run.txt, as the last start that has it says it."""
        return next((start[name] for start in reversed(self.starts) if name in start), default)

    @property
    def log(self) -> Path:
        return self.folder if self.folder.is_file() else self.folder / "log.txt"

    @property
    def config(self) -> dict[str, Any]:
        return self.fact("config", {})

    @functools.cached_property
    def streams(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """{stream: (steps, values)}. A step is there twice if the run was killed and resumed: its last value counts."""
        logged = collections.defaultdict(dict)
        for step, stream, value in read_log(self.log):
            logged[stream][step] = value
        return {
            name: (np.array(sorted(at)), np.array([at[i] for i in sorted(at)])) for name, at in logged.items()
        }

    @property
    def last_step(self) -> int:
        return max((int(steps[-1]) for steps, _ in self.streams.values()), default=0)


def read_run(folder: Name) -> Logged:
    path = Path(folder, "run.txt")
    return Logged(Path(folder), read_starts(path) if path.is_file() else [])


def find_runs(*patterns: str) -> list[Logged]:
    """The runs in the folders that match any of these patterns, as "log/gelu-*", and the logs alone that they name."""
    paths: list[Path] = []
    for pattern in patterns:
        # a folder may have brackets in its name
        found = map(Path, [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern)))
        paths += [path for path in found if (path / "log.txt").exists() or os.path.isfile(pattern)]
    return [read_run(path.parent if path.name == "log.txt" else path) for path in dict.fromkeys(paths)]
