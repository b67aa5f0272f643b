"""Prepares a run's folder at its start: moves old files aside, and describes the start in run.txt."""

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from plumbing.cli.console import print0
from plumbing.data.windows import stream_names
from plumbing.files import atomic_write, free_name, open_regular
from plumbing.run import checkpoint as checkpoints
from plumbing.run import logs, source_code

# the names of the files that a run writes into its folder
OURS = re.compile(
    rf"(run|log|samples)\.txt|hf|wandb|{source_code.COPY.pattern}|{checkpoints.BEST}|{checkpoints.CHECKPOINT_NAME.pattern}"
)


def prepare_folder(start: Any, parts: Any) -> None:
    """Move old files aside, and describe the start in run.txt."""
    config, out_dir = start.config, Path(start.config.out_dir)
    stale = stale_files(start, out_dir)
    if stale:
        # checkpoints first, from the newest to the oldest: if this is cut short, it leaves the run at an earlier step,
        # or no run
        stale.sort(key=lambda path: (path.suffix == ".pt", path.name), reverse=True)
        aside = move_aside(stale, out_dir)
        names = ", ".join(sorted(path.name for path in stale))
        print0(f"Moved {names} from {out_dir} to {aside}.")
    for leftover in out_dir.glob(".*.part"):  # left by a process that was killed while writing
        if OURS.fullmatch(leftover.stem[1:]) and leftover.is_file():
            leftover.unlink()
    ran = {name: value for name, value in parts.found._asdict().items() if name != "model"}
    ran["account"] = parts.found.account._asdict()
    ran["flops_per_token"] = parts.flops_per_token  # for the notebook's MFU
    logs.write_start(config, start, ran=ran, fingerprints=fingerprints(start))
    source_code.keep_copies(config)


def stale_files(start: Any, out_dir: Path) -> list[Path]:
    """For a run that continues, the damaged checkpoints after its step. For a new run, all files of an old run."""
    if start.saved and not start.branched:
        found = checkpoints.list_checkpoints(out_dir)
        return [path for path in found if checkpoints.step_of(path) > start.step]
    ours = [path for path in out_dir.iterdir() if OURS.fullmatch(path.name)]
    for path in ours:
        is_description = path.name == "run.txt" or source_code.COPY.fullmatch(path.name)
        if not is_description and (path.is_dir() or path.stat().st_size):
            return ours
    return []


def fingerprints(start: Any) -> dict[str, list[str]]:
    """Short fingerprints of each folder's training and validation data, by its name in log.txt ("": not read)."""
    shown = {}
    for name, folder in zip(stream_names(start.config.data), start.folders):
        read = {split: opened.fingerprint[:16] for split, opened in folder.opened.items()}
        shown[name] = [read.get("train", ""), read["val"]]
    return shown


def move_aside(paths: list[Path], out_dir: Path) -> Path:
    """Move files of `out_dir` to a new folder beside it, or inside it if they cannot leave it."""
    for aside in (free_name(out_dir.resolve()), free_name(out_dir / "old")):
        try:
            aside.mkdir()
            for path in paths:
                path.rename(aside / path.name)
            return aside
        except OSError as caught:  # out_dir is a mount point, or its parent belongs to someone else
            error = caught
            with contextlib.suppress(OSError):
                for path in aside.iterdir():
                    path.rename(out_dir / path.name)
                aside.rmdir()
    raise error


def keep_samples_before(path: Path, step: int) -> None:
    """Remove the samples from `step` on: a run that was killed will write them again."""
    if not os.path.lexists(path):
        return
    with open_regular(path, "r", encoding="utf-8", errors="replace") as file:  # refuses a link
        lines = []
        for line in file:
            number = line.partition(" ")[0]
            if not number.isdecimal() or int(number) < step:  # a user's line may have no number
                lines.append(line)
    with atomic_write(path, "w", encoding="utf-8") as file:
        file.writelines(lines)
