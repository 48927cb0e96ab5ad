"""How many threads this process may keep busy: the cores it may run on, and what the cgroup's quota leaves."""

import math
import os
from contextlib import suppress

from machine.memory import cgroup_folders


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
    for folder, is_v2 in cgroup_folders("cpu"):
        with suppress(OSError, ValueError):  # also "max", which is no limit
            if is_v2:
                allowed, period = (folder / "cpu.max").read_text().split()
            else:
                allowed, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(allowed) > 0:
                limits.append(int(allowed) / int(period))
    return min(limits, default=None)
