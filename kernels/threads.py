"""How many threads this process may keep busy: the cores it may run on, and what the cgroup's quota leaves."""

import math
import os
from contextlib import suppress
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
SELF = Path("/proc/self/cgroup")


def num_threads():
    """At least 1."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        cores = os.cpu_count() or 1
    return max(1, min(cores, math.ceil(quota() or cores)))


def quota():
    """Cores that the cgroup allows on average, the tightest of ours and of those above it; None without a limit."""
    limits = []
    for folder in cgroup_folders():
        with suppress(OSError, ValueError, IndexError):
            allowed, period = (folder / "cpu.max").read_text().split()
            limits.append(int(allowed) / int(period))
        with suppress(OSError, ValueError):
            allowed = int((folder / "cpu.cfs_quota_us").read_text())
            if allowed > 0:
                limits.append(allowed / int((folder / "cpu.cfs_period_us").read_text()))
    return min(limits, default=None)


def cgroup_folders():
    """Our cgroup and each above it, of version 2 and of the cpu controller of version 1."""
    try:
        lines = SELF.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy != "0" and "cpu" not in controllers.split(","):
            continue
        root = CGROUP if hierarchy == "0" else CGROUP / "cpu"
        folder = root / path.lstrip("/")
        yield folder
        yield from (above for above in folder.parents if above == root or root in above.parents)
