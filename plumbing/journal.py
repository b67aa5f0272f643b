"""A run's two texts, each written and read here: log.txt, and run.txt, which describes the run's starts.

log.txt has `step stream value` on each line. run.txt has a block for each start: lines of `name: value`, such as the
command, the settings, the machine and the commit, and a blank line at the end.
"""

import dataclasses
import datetime
import json
import math
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from plumbing import program
from plumbing.distributed import environment_number
from plumbing.files import Name, atomic_write, named_errors, open_regular
from plumbing.program import plain, quote

LINE = re.compile(r"(\d{1,15}) ([\w/.-]+) (-?\d{1,15}(\.\d{1,15})?(e[+-]\d{2,3})?|-?inf|nan)\n", re.ASCII)

# ----- log.txt ------------------------------------------------------------------------------------------


def read_log(path: Name, before: float = math.inf) -> Iterator[tuple[int, str, float]]:
    """Yield (step, stream, value) of log.txt's lines below step `before`; damaged ones are left out, with a warning."""
    damaged, line = 0, "\n"
    with open_regular(path, "r", encoding="utf-8", errors="replace") as file:
        for line in file:
            match = LINE.fullmatch(line)
            if not match:
                damaged += 1
            elif int(match[1]) < before:
                yield int(match[1]), match[2], float(match[3])
    if damaged > (not line.endswith("\n")):  # no warning about a last line that a crash has cut short
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
    with named_errors(file.name):
        file.write("".join(f"{step} {stream} {value:.9g}\n" for stream, value in values.items()))
        file.flush()


# ----- run.txt ------------------------------------------------------------------------------------------


def read_history(out_dir: Path) -> bytes:
    try:
        with open_regular(out_dir / "run.txt") as file:
            return file.read()
    except FileNotFoundError:
        return b""


def read_starts(path: Path) -> list[dict[str, Any]]:
    """The starts that run.txt describes, each as a dict of texts and, for "config" and "branched", of dicts."""
    starts = []
    for block in path.read_text(encoding="utf-8", errors="replace").strip().split("\n\n"):
        fields: dict[str, Any] = {}
        for line in block.splitlines():
            name, _, text = line.partition(": ")
            fields[name] = json.loads(text) if name in ("config", "branched") else plain(text)
        starts.append(fields)
    return starts


def write_start(config: Any, start_step: int, branched: dict[str, Any] | None) -> None:
    """Add a start to run.txt, which may have another program's lines in any encoding."""
    changes = program.git("diff", "HEAD")  # of what is not committed
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    lines = {
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": " ".join(map(quote, command())),
        "launch": launch(),
        "from step": str(start_step),
        "config": json.dumps(dataclasses.asdict(config)),
        "versions": f"python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}",
        "machine": f"{platform.platform()}, {os.cpu_count()} cores, {', '.join(gpus) or 'no GPU'}",
        "ranks": os.environ.get("WORLD_SIZE", "1"),
        "commit": program.git_commit(),
        "changes": json.dumps(changes[:20_000]) if changes else "",
        "branched": json.dumps(branched) if branched else "",
    }
    entry = "".join(f"{name}: {text}\n" for name, text in lines.items() if text) + "\n"
    out_dir = Path(config.out_dir)
    history = read_history(out_dir)
    with atomic_write(out_dir / "run.txt") as file:
        file.write(history + entry.encode("utf-8", "surrogateescape"))


def is_restart(out_dir: Path) -> bool:
    """Whether torchrun has restarted this process after a crash, and has started the run in out_dir before."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return restarts != "0" and f"\nlaunch: {launch()}\n".encode() in read_history(out_dir)


def launch() -> str:
    """An identifier of the torchrun that started this process, which is the same after a restart."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if run_id != "none":
        return run_id
    # torchrun without a rendezvous: <its own temporary folder>/attempt_<n>/<rank>/error.json
    parts = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parts
    return parts[-4] if len(parts) > 3 else f"process {os.getppid()}"


def launcher() -> list[str]:
    """The words of the command that started this process, up to the script."""
    local_ranks, ranks = environment_number("LOCAL_WORLD_SIZE", 0), environment_number("WORLD_SIZE", 0)
    if not local_ranks:
        return ["python"]
    nodes = ["--standalone"]
    if local_ranks != ranks:  # without an endpoint, each node would wait for itself
        endpoint = f"--rdzv-endpoint={os.environ.get('MASTER_ADDR', 'HOST')}:29500"
        nodes = [f"--nnodes={ranks // local_ranks}", "--rdzv-backend=c10d", endpoint]
    return ["torchrun", *nodes, f"--nproc_per_node={local_ranks}"]


def command() -> list[str]:
    """The words of the command that started this process."""
    return [*launcher(), *sys.argv]
