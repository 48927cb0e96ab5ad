"""How much RAM there is: what host and cgroup leave, and what this process holds. Bytes everywhere."""

import resource
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP_SELF = Path("/proc/self/cgroup")
LOOK_SECONDS = 0.25  # between two looks of a guard: reading the cgroups takes some tenths of a millisecond
MARGIN = 0.01  # of the budget that host and cgroups should have left
UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number near 2^63


def rss_bytes():
    """Resident memory of this process."""
    return psutil.Process().memory_info().rss


def peak_rss_bytes():
    """The most this process ever held; the kernel counts it in KiB, macOS in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def available_bytes():
    """The least of what the host and every cgroup above us leave; None when nothing can be read."""
    candidates = []
    with suppress(OSError, ValueError):  # a host without a readable /proc/meminfo
        candidates.append(psutil.virtual_memory().available)
    candidates += [limit - used for limit, used in cgroup_usage()]
    return max(0, min(candidates)) or None if candidates else None


class MemoryGuard:
    """Watches that the process stays within its budget, and that host and cgroups have memory left, whoever took it."""

    def __init__(self, budget_bytes, clock=time.monotonic):
        self.budget_bytes, self.clock, self.next_look = budget_bytes, clock, 0.0

    def spare_bytes(self):
        """Bytes that may still be taken, below 0 those to give back; None when the last look was just now."""
        now = self.clock()
        if now < self.next_look:
            return None
        self.next_look = now + LOOK_SECONDS
        spare, available = self.budget_bytes - rss_bytes(), available_bytes()
        return spare if available is None else min(spare, available - int(MARGIN * self.budget_bytes))


def cgroup_usage():
    """(limit, bytes that count against it) of every limited cgroup from ours up to the root, v2 and v1.

    Inactive file pages are given back under pressure, so they are not held against us.
    """
    out = []
    v2 = ("memory.max", "memory.current", "inactive_file")
    v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    for folder, is_v2 in cgroup_folders("memory"):
        limit_name, used_name, inactive_key = v2 if is_v2 else v1
        limit = read_number(folder / limit_name)
        used = read_number(folder / used_name)
        if limit is None or used is None or limit >= UNLIMITED:
            continue
        out.append((limit, used - read_stat(folder / "memory.stat", inactive_key)))
    return out


def cgroup_folders(controller):
    """(folder, whether it is of version 2) for our cgroup and each ancestor, in both hierarchies."""
    try:
        lines = CGROUP_SELF.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        is_v2 = hierarchy == "0"
        if is_v2:
            root = CGROUP_ROOT
        elif controller in controllers.split(","):
            root = CGROUP_ROOT / controller
        else:
            continue
        folder = root / path.lstrip("/")
        # In a container the path may name a place outside its own view; the root of the view then holds the limit.
        while True:
            yield folder, is_v2
            if folder == root or root not in folder.parents:
                break
            folder = folder.parent


def read_number(path):
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def read_stat(path, key):
    with suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    return 0
