"""Contention: how much of the processors and of a drive others use while this process measures."""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

PROC = Path("/proc")
SECTOR = 512  # bytes, whatever the drive's own are
MAX_CPU = 0.3  # share of the processors that others may use before a measurement counts as disturbed
MAX_STOLEN = 0.05  # share of the processors that the host of a virtual machine took
MAX_TRAFFIC = 0.2  # bytes that others moved on the drive, over those that this process read
MAX_WAITING = {"cpu": 50.0, "io": 25.0}  # percent of ten seconds in which some process waited, before the measurement


@dataclass(frozen=True, slots=True)
class Activity:
    """Counters of the machine and of this process at one moment. None: the system does not say."""

    seconds: float
    cpu_seconds: float  # of all processes on all processors
    stolen_seconds: float
    own_cpu_seconds: float
    drive_bytes: int | None  # read from the drive and written to it, by all processes
    own_bytes: int | None  # that this process had drives read


def measure_activity(device: int) -> Activity:
    """The counters now; `device` is the st_dev of a file on the drive."""
    own, used, stolen = os.times(), 0.0, 0.0
    with suppress(OSError):  # no /proc
        cpu = psutil.cpu_times()
        stolen = getattr(cpu, "steal", 0.0)
        used = sum(cpu) - cpu.idle - getattr(cpu, "iowait", 0.0) - stolen
        used -= getattr(cpu, "guest", 0.0) + getattr(cpu, "guest_nice", 0.0)  # they are in user and nice, too
    return Activity(time.perf_counter(), used, stolen, own.user + own.system, drive_bytes(device), own_read_bytes())


def drive_bytes(device: int) -> int | None:
    """Bytes moved on a block device since the machine started; None for one without counters, as below btrfs or NFS."""
    with suppress(OSError, ValueError, IndexError):
        for line in (PROC / "diskstats").read_text().splitlines():
            fields = line.split()
            if (int(fields[0]), int(fields[1])) == (os.major(device), os.minor(device)):
                return (int(fields[5]) + int(fields[9])) * SECTOR
    return None


def own_read_bytes() -> int | None:
    with suppress(OSError, ValueError, IndexError):
        return int((PROC / "self/io").read_text().split("read_bytes:")[1].split()[0])
    return None


def waiting_shares() -> dict[str, float]:
    """Percent of the last ten seconds in which some process waited, for a processor (cpu) and for a drive (io). Where
    the system keeps no such numbers, cpu by the load average, or nothing."""
    shares = {}
    for name in MAX_WAITING:
        with suppress(OSError, ValueError, IndexError):
            text = (PROC / "pressure" / name).read_text()
            shares[name] = float(text.split("avg10=")[1].split()[0])
    if "cpu" not in shares:
        with suppress(OSError):
            waiting = os.getloadavg()[0] - (os.cpu_count() or 1)
            shares["cpu"] = 100 * min(1.0, max(0.0, waiting))
    return shares


def describe_contention(before: Activity, after: Activity, waiting: dict[str, float]) -> str:
    """What disturbed a measurement between two moments, in words; "" if nothing did. waiting: shares before it."""
    seconds = max(1e-9, after.seconds - before.seconds) * (os.cpu_count() or 1)
    stolen = (after.stolen_seconds - before.stolen_seconds) / seconds
    if stolen > MAX_STOLEN:
        return f"the host took {stolen:.0%} of the processors' time"
    own = after.own_cpu_seconds - before.own_cpu_seconds
    others = (after.cpu_seconds - before.cpu_seconds - own) / seconds
    if others > MAX_CPU:
        return f"other processes used {others:.0%} of the processors' time"
    if None not in (before.drive_bytes, after.drive_bytes, before.own_bytes, after.own_bytes):
        mine = after.own_bytes - before.own_bytes  # type: ignore[operator]  # none of them is None
        foreign = after.drive_bytes - before.drive_bytes - mine  # type: ignore[operator]
        if foreign > MAX_TRAFFIC * mine > 0:
            return f"other processes moved {foreign / 1e9:.2f} GB on the drive"
    for name, what in (("io", "a drive"), ("cpu", "a processor")):
        if waiting.get(name, 0.0) > MAX_WAITING[name]:
            return f"processes had waited for {what} {waiting[name]:.0f} % of the time just before"
    return ""
