"""Number of threads: the cores that this process may run on, limited by the CPU quota of its cgroups."""

import math
import os
from contextlib import suppress

from machine.memory import cgroup_folders


def num_threads() -> int:
    """At least 1."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        cores = os.cpu_count() or 1
    return max(1, min(cores, math.ceil(cgroup_cpu_quota() or cores)))


def cgroup_cpu_quota() -> float | None:
    """Cores that our cgroup and its ancestors allow on average, the least of them; None without a limit."""
    limits = []
    for folder, is_v2 in cgroup_folders("cpu"):
        with suppress(OSError, ValueError):  # ValueError: "max", no limit
            if is_v2:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(quota) > 0:
                limits.append(int(quota) / int(period))
    return min(limits, default=None)
