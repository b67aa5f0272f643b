"""Writes and reads a run's two text files: log.txt, and run.txt, which describes each start of the run.

Each line of log.txt is `step stream value`. run.txt has a block for each start: lines of `name: value`, such as the
command, the settings, the machine and the commit, then a blank line.
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

from plumbing.cli.console import count, plain, quote_group
from plumbing.data.shards import origin
from plumbing.files import Name, atomic_write, named_errors, open_regular
from plumbing.run import source_code
from plumbing.run.commands import training_command

NUMBER = r"(-?\d{1,15}(?:\.\d{1,15})?(?:e[+-]\d{2,3})?|-?inf|nan)"
LINE = re.compile(rf"(\d{{1,15}}) ([\w/.-]+) {NUMBER}\n", re.ASCII)

NO_NAME = re.compile(r"[^\w/.-]", re.ASCII)  # characters that the name of a stream cannot have

# ----- log.txt ------------------------------------------------------------------------------------------


def read_log(path: Name, before: float = math.inf) -> Iterator[tuple[int, str, float]]:
    """Yield (step, stream, value) for each line below step `before`. Leave out damaged lines, with a warning."""
    damaged = 0
    line = "\n"
    with open_regular(path, "r", encoding="utf-8", errors="replace") as file:
        for line in file:
            match = LINE.fullmatch(line)
            if not match:
                damaged += 1
            elif int(match[1]) < before:
                yield int(match[1]), match[2], float(match[3])
    is_cut_short = not line.endswith("\n")  # by a crash
    if damaged > is_cut_short:
        print(f"warning: {count(damaged, 'damaged line')} of {path} left out.", flush=True)


def open_log(out_dir: Path, parent: Path, step: int) -> IO[str]:
    """Open log.txt to append. It begins with the intact lines of the parent's log (or its own) below `step`."""
    path = out_dir / "log.txt"
    source = parent / "log.txt"
    with atomic_write(path, "w", encoding="utf-8") as file:
        if source.exists():
            for at, stream, value in read_log(source, step):
                file.write(f"{at} {stream} {value:.9g}\n")
    return open(path, "a", encoding="utf-8")


def write_log(file: IO[str], step: int, values: dict[str, float]) -> None:
    """Write a line for each stream of {stream: value}, all of them in one write."""
    lines = [f"{step} {NO_NAME.sub('_', stream)} {value:.9g}\n" for stream, value in values.items()]
    with named_errors(file.name):
        file.write("".join(lines))
        file.flush()


def last_values(path: Path) -> dict[str, float]:
    """{stream: its last value} of a log.txt; {} if there is none."""
    if not path.exists():
        return {}
    return {stream: value for _, stream, value in read_log(path)}


# ----- run.txt ------------------------------------------------------------------------------------------

DICTS = ("config", "ran", "branched", "fingerprints")  # the fields that are dicts, in JSON


def read_starts(path: Path) -> list[dict[str, Any]]:
    """The starts that run.txt describes: {field: its text, or its dict for those in DICTS}, without damaged fields."""
    starts = []
    for block in path.read_text(encoding="utf-8", errors="replace").strip().split("\n\n"):
        fields: dict[str, Any] = {}
        for line in block.splitlines():
            name, _, text = line.partition(": ")
            with contextlib.suppress(ValueError, RecursionError):  # people may have edited it
                value = json.loads(text) if name in DICTS else plain(text, 2000)
                if isinstance(value, dict) == (name in DICTS):
                    fields[name] = value
        starts.append(fields)
    return starts


def write_start(config: Any, start: Any, *, ran: dict[str, Any], fingerprints: dict[str, list[str]]) -> None:
    """Add a Start to run.txt. Other programs may have written lines there in any encoding.

    ran: the trial's result; fingerprints: {a data folder's name in log.txt: those of its training and validation data}.
    """
    changes = source_code.git("diff", "HEAD")  # everything that is not committed
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    lines = {
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": " ".join(map(quote_group, training_command(type(config), start.typed))),
        "from step": str(start.step),
        "config": json.dumps(dataclasses.asdict(config)),
        "ran": json.dumps(ran),
        "data": "; ".join(plain(origin(folder.meta)) for folder in start.folders),
        "fingerprints": json.dumps(fingerprints),
        "versions": f"python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}",
        "machine": f"{platform.platform()}, {os.cpu_count()} cores, {', '.join(gpus) or 'no GPU'}",
        "ranks": os.environ.get("WORLD_SIZE", "1"),
        "commit": source_code.git_commit(),
        "changes": json.dumps(changes[:20_000]) if changes else "",
        "code": " ".join(source_code.code_of(type(config)).values()),
        "branched": json.dumps(start.branched) if start.branched else "",
    }
    entry = "".join(f"{name}: {text}\n" for name, text in lines.items() if text) + "\n"
    path = Path(config.out_dir, "run.txt")
    history = b""
    with contextlib.suppress(FileNotFoundError), open_regular(path) as file:
        history = file.read()
    with atomic_write(path) as file:
        file.write(history + entry.encode("utf-8", "surrogateescape"))


def torchrun_id() -> str:
    """An identifier of the torchrun that started this process; a restart does not change it."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', 'none')} of process {os.getppid()}"


# ----- Runs ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Logged:
    """A run that has a log. Without a run.txt (build-nanogpt writes none), only its streams are known."""

    folder: Path  # or a log file of any name
    starts: list[dict[str, Any]]  # from read_starts

    def fact(self, name: str, default: Any) -> Any:
        """A field of run.txt, from the last start that has it."""
        values = [start[name] for start in self.starts if name in start]
        return values[-1] if values else default

    @property
    def log(self) -> Path:
        return self.folder if self.folder.is_file() else self.folder / "log.txt"

    @property
    def config(self) -> dict[str, Any]:
        return self.fact("config", {})

    @functools.cached_property
    def streams(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """{stream: (steps, values)}. If a run was killed and repeated a step, the last value counts."""
        logged: dict[str, dict[int, float]] = collections.defaultdict(dict)
        for step, stream, value in read_log(self.log):
            logged[stream][step] = value
        streams = {}
        for stream, values in logged.items():
            steps = sorted(values)
            streams[stream] = np.array(steps), np.array([values[step] for step in steps])
        return streams

    @property
    def last_step(self) -> int:
        return max((int(steps[-1]) for steps, _ in self.streams.values()), default=0)


def read_run(folder: Name) -> Logged:
    path = Path(folder, "run.txt")
    return Logged(Path(folder), read_starts(path) if path.is_file() else [])


def find_runs(*patterns: str) -> list[Logged]:
    """The runs in folders that match any of these patterns, such as "log/gelu-*", and log files given by name."""
    folders = []
    for pattern in patterns:
        is_name = os.path.exists(pattern)  # a folder may have brackets in its name
        paths = [Path(pattern)] if is_name else [Path(name) for name in sorted(glob.glob(pattern))]
        for path in paths:
            folder = path.parent if path.name == "log.txt" else path
            if (folder / "log.txt").exists() or (is_name and folder.is_file()):
                folders.append(folder)
    return [read_run(folder) for folder in dict.fromkeys(folders)]
