"""plumbing/system/limits.py: as many cores as this process may use, which in a container are fewer than there are."""

import os

import pytest
from plumbing.system import limits


def make_system(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="ascii")
    return root


V1 = "4:memory:/\n3:cpu,cpuacct:/docker/ab\n1:name=systemd:/\n"


@pytest.mark.parametrize(
    "files, expected",
    [
        ({}, 192),
        ({"sys/fs/cgroup/cpu.max": "200000 100000"}, 2),  # as a container sees its own group
        ({"sys/fs/cgroup/cpu.max": "150000 100000\n", "proc/self/cgroup": "0::/\n"}, 2),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, 192),
        ({"sys/fs/cgroup/cpu.max": "10000 100000\n"}, 1),
        # of a group and those around it the smallest
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000",
                "sys/fs/cgroup/a/cpu.max": "300000 100000",
            },
            3,
        ),
        # where the host's name of the group is not there
        ({"proc/self/cgroup": "0::/../x\n", "sys/fs/cgroup/cpu.max": "400000 100000"}, 4),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "500000",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            5,
        ),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu/docker/ab/cpu.cfs_quota_us": "50000",
                "sys/fs/cgroup/cpu/docker/ab/cpu.cfs_period_us": "100000",
            },
            1,
        ),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu/docker/ab/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/docker/ab/cpu.cfs_period_us": "100000",
            },
            192,
        ),
    ],
)
def test_a_containers_quota_counts_and_not_the_hosts_cores(tmp_path, files, expected, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(192), raising=False)
    assert limits.num_cores(make_system(tmp_path, files)) == expected


def test_no_more_than_the_cores_that_the_process_is_bound_to(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 4}, raising=False)
    assert limits.num_cores(make_system(tmp_path, {"sys/fs/cgroup/cpu.max": "900000 100000"})) == 2
    assert limits.num_cores() >= 1
