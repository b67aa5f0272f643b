"""The cores and the memory that this process may use, by its CPU affinity and its Linux control groups."""

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")  # tests use another one


def num_cores(root: Path = ROOT) -> int:
    """The number of cores that the CPU affinity and the control groups' quotas allow."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = []
    for group in control_groups("cpu", root):
        older = read(group / "cpu.cfs_quota_us") + " " + read(group / "cpu.cfs_period_us")  # version 1
        numbers = re.fullmatch(r"(\d+) (\d+)", read(group / "cpu.max") or older)  # "max" or -1: no limit
        if numbers and int(numbers[2]):
            quotas.append(math.ceil(int(numbers[1]) / int(numbers[2])))
    return max(1, min([cores, *quotas]))


def memory_limits(root: Path = ROOT) -> list[int]:
    """The memory limits of the control groups in bytes. All processes in a group share its limit."""
    limits = []
    for group in control_groups("memory", root):
        limits += [read(group / "memory.max"), read(group / "memory.limit_in_bytes")]
    return [int(limit) for limit in limits if limit.isdigit()]  # "max": no limit


def control_groups(controller: str, root: Path) -> Iterator[Path]:
    """The folders of this process's control group and of the groups that contain it, for versions 2 and 1."""
    lines = read(root / "proc/self/cgroup") or "0::/"
    for names, group in re.findall("(?m)^[0-9]+:(.*?):(.*)$", lines):
        mounts = [names, controller] if controller in names.split(",") else []
        if not names:
            mounts = [".", "unified"]  # version 2 has one tree; beside version 1, it is in unified/
        for mount in mounts:
            top = root / "sys/fs/cgroup" / mount
            # a container may see its own group as the root of the tree, without the parents in its name
            folder = top / group.strip("/")
            yield from (level for level in (folder, *folder.parents) if level.is_relative_to(top))


def read(path):
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").strip()
    except (OSError, ValueError):
        return ""
