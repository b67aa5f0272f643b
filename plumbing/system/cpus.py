"""How many cores this process may use."""

import math
import os
import re
from pathlib import Path


def num_cores(root: Path = Path("/")) -> int:
    """The cores by affinity and by the quota of the control groups, which containers have; `root` is the system's."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *map(math.ceil, quotas(root))]))


def quotas(root):
    """The cores that each control group of this process, and each of those around it, may use on average."""
    found, places = [], {root / "sys/fs/cgroup": "/"}
    for line in read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:  # version 2 has one tree
            places[root / "sys/fs/cgroup"] = path
        elif "cpu" in controllers.split(","):
            places |= {root / "sys/fs/cgroup/cpu": path, root / "sys/fs/cgroup" / controllers: path}
    for top, path in places.items():
        folder = top / path.strip("/")  # in a container it may be the host's path, and not be there
        for group in (folder, *folder.parents):
            if group == top.parent:
                break
            limit = (
                read(group / "cpu.max")
                or f"{read(group / 'cpu.cfs_quota_us')} {read(group / 'cpu.cfs_period_us')}"
            )
            numbers = re.fullmatch(r"(\d+)\s+(\d+)", limit.strip())  # "max" or -1: no limit
            if numbers and int(numbers[2]):
                found.append(int(numbers[1]) / int(numbers[2]))
    return found


def read(path):
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""
