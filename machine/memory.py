"""Memory of the host, of the cgroups and of this process, in bytes."""

import ctypes
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP_SELF = Path("/proc/self/cgroup")
CHECK_SECONDS = 0.25  # between two checks of a guard: reading the cgroups takes some tenths of a millisecond
MARGIN = 0.01  # of the budget, which host and cgroups should have left
M_ARENA_MAX = -8  # of glibc's mallopt
LIBC = ctypes.CDLL(None)
UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number near 2^63


def share_heap() -> None:
    """Let the threads of this process that start from now on share one heap. glibc gives each a heap of its own, which
    keeps what was freed: 10 MB and more for each reader thread that quantizes experts."""
    if hasattr(LIBC, "mallopt"):
        LIBC.mallopt(M_ARENA_MAX, 1)


def rss_bytes() -> int:
    """Resident set size of this process; its peak where there is no /proc."""
    try:
        return int(psutil.Process().memory_info().rss)
    except (psutil.Error, OSError):
        return peak_rss_bytes()


def peak_rss_bytes() -> int:
    """Peak resident set size of this program, without what the process held before its exec."""
    with suppress(OSError, ValueError, IndexError):  # ru_maxrss of Linux includes the parent that forked us
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere


def available_bytes() -> int | None:
    """The least that the host, our cgroup and its ancestors have left; None if nothing can be read."""
    candidates = []
    with suppress(OSError, ValueError):  # a host without a readable /proc/meminfo
        candidates.append(psutil.virtual_memory().available)
    candidates += [limit - used for limit, used in cgroup_usage()]
    return max(0, min(candidates)) or None if candidates else None


def total_bytes() -> tuple[int, str] | None:
    """-> (memory that this process could ever have, what sets that limit); None if nothing can be read."""
    limits = [(limit, "this cgroup allows") for limit, _ in cgroup_usage()]
    with suppress(OSError, ValueError):
        limits.append((psutil.virtual_memory().total, "this machine has"))
    return min(limits, default=None)


class MemoryGuard:
    """Keeps the process within its memory budget, and some memory of host and cgroups free, whoever uses it."""

    def __init__(self, budget_bytes: int, clock: Callable[[], float] = time.monotonic):
        self.budget_bytes = budget_bytes
        self.clock = clock
        self.next_check = 0.0  # by the clock

    def spare_bytes(self) -> int | None:
        """Bytes that may still be used; negative: bytes to release; None if the last check was just now."""
        now = self.clock()
        if now < self.next_check:
            return None
        self.next_check = now + CHECK_SECONDS
        spare, available = self.budget_bytes - rss_bytes(), available_bytes()
        return spare if available is None else min(spare, available - int(MARGIN * self.budget_bytes))


def cgroup_usage() -> list[tuple[int, int]]:
    """(limit, bytes in use) of every limited cgroup from ours up to the root, v2 and v1.

    Inactive file pages are reclaimed under pressure, so they do not count as used.
    """
    usage = []
    v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    v2 = ("memory.max", "memory.current", "inactive_file")
    for folder, is_v2 in cgroup_folders("memory"):
        limit_name, used_name, inactive_key = v2 if is_v2 else v1
        limit = read_cgroup_number(folder / limit_name)
        used = read_cgroup_number(folder / used_name)
        if limit is not None and used is not None and limit < UNLIMITED:
            usage.append((limit, used - (read_cgroup_number(folder / "memory.stat", inactive_key) or 0)))
    return usage


def cgroup_folders(controller: str) -> Iterator[tuple[Path, bool]]:
    """(folder, whether it is of version 2) of our cgroup and each ancestor, in both hierarchies."""
    try:
        lines = CGROUP_SELF.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        is_v2 = hierarchy == "0"
        if not is_v2 and controller not in controllers.split(","):
            continue
        root = CGROUP_ROOT if is_v2 else CGROUP_ROOT / controller
        folder = root / path.lstrip("/")
        # In a container the path may point outside of what it can see; the visible root then holds the limit.
        yield from ((each, is_v2) for each in (folder, *folder.parents) if each.is_relative_to(root))


def read_cgroup_number(path: Path, key: str = "") -> int | None:
    """The number of a file, or that of the line `key number`; None if it is not there or "max"."""
    with suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            name, _, value = line.rpartition(" ")
            if name == key:
                return int(value)
    return None
