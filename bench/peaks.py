"""Peak FLOP/s and bandwidth of a machine: measured for processor, memory and drives, by name for an accelerator.

Names are compared word by word, so that L40 is not L4 and A4000 not A40. An entry fits a name that has all its words,
and none that names another product (laptop, ti, a slice of a card): unknown devices get no number. The numbers
are those of the vendors' data sheets, of dense bf16, without sparsity.
"""

import math
import random
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from experts.disk import ExpertDisk
from experts.drive import Drive, ReadRate
from experts.drive_speed import read_buffers, time_reads
from kernels import dispatch
from machine.arena import Arena
from machine.memory import peak_rss_bytes

READ_BYTES = 256 << 20  # of memory, more than caches hold
LARGE = 2048  # rows, columns and inner length of a large product
MEASURE_SECONDS = 0.5
DRIVE_BYTES = 400e6  # read at each depth
DEPTHS = (2, 4, 8)

# Words of a name -> (FLOP/s, bytes/s). Of several that fit, the one with the most words counts.
PEAKS = {
    # Blackwell
    "gb300": (2.5e15, 8.0e12),
    "gb200": (2.5e15, 8.0e12),
    "b300": (2.25e15, 8.0e12),
    "b200": (2.25e15, 8.0e12),
    # Hopper
    "gh200 480gb": (989e12, 4.0e12),
    "h200": (989e12, 4.8e12),
    "h200 nvl": (835e12, 4.8e12),
    "h100": (989e12, 3.35e12),
    "h100 nvl": (835e12, 3.9e12),
    "h100 pcie": (756e12, 2.0e12),
    "h20": (148e12, 4.0e12),
    # Ampere
    "a100 40gb": (312e12, 1.555e12),
    "a100 40gb pcie": (312e12, 1.555e12),
    "a100 80gb": (312e12, 2.039e12),
    "a100 80gb pcie": (312e12, 1.935e12),
    "a40": (149.7e12, 696e9),
    "a30": (165e12, 933e9),
    "a10": (125e12, 600e9),
    "rtx a6000": (154.8e12, 768e9),
    # Ada
    "l40s": (362e12, 864e9),
    "l40": (181e12, 864e9),
    "l4": (121e12, 300e9),
    # AMD Instinct
    "mi355x": (2.5e15, 8.0e12),
    "mi325x": (1307.4e12, 6.0e12),
    "mi300x": (1307.4e12, 5.3e12),
    "mi300a": (980.6e12, 5.3e12),
    "mi250x": (383e12, 3.277e12),
    "mi250": (362.1e12, 3.277e12),
    "mi210": (181e12, 1.638e12),
    # GeForce
    "rtx 5090": (209.5e12, 1.792e12),
    "rtx 4090": (165.2e12, 1.008e12),
    "rtx 3090": (71e12, 936e9),
}
# A name with one of these words is another product, unless the entry has the word too.
VARIANTS = {"laptop", "mobile", "max", "q", "ti", "super", "d", "sff", "ada", "pro", "quadro", "mig", "nvl", "pcie"}


def find_peaks(name: str) -> tuple[float | None, float | None]:
    """A device's name -> (FLOP/s, bytes/s), or (None, None) when it is not known."""
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    entries = {entry: set(entry.split()) for entry in PEAKS}
    fitting = [entry for entry, own in entries.items() if own <= words and not (VARIANTS & words) - own]
    return PEAKS[max(fitting, key=lambda entry: len(entries[entry]))] if fitting else (None, None)


# --- measured ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peaks:
    """Peak FLOP/s and bytes/s, None where unknown, and the sources of both numbers."""

    flops: float | None
    bandwidth: float | None
    flops_source: str
    bandwidth_source: str


def best_seconds(work: Callable[[], object]) -> float:
    """Minimum seconds of one call, over many."""
    best, end = math.inf, time.perf_counter() + MEASURE_SECONDS
    while time.perf_counter() < end or best == math.inf:
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best


def measure_bandwidth(threads: int) -> tuple[float, str]:
    """-> (bytes/s of a plain read of memory, in words how)."""
    memory = Arena(READ_BYTES).allocate(READ_BYTES).fill_(1)
    if dispatch.is_native():
        work, how = lambda: dispatch.active.read_memory(memory), "plain read by the C kernels"
    else:
        numbers = memory.view(torch.float32)
        work, how = numbers.sum, "sum by torch"
    how = f"measured: {how}, {READ_BYTES >> 20} MiB, {threads} thread{'s' * (threads > 1)}"
    return READ_BYTES / best_seconds(work), how


def measure_flops(threads: int) -> tuple[float, str]:
    """-> (FLOP/s of a large product in torch, in words how): bf16 or float32, whichever is faster here."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rates = {}
        for dtype in (torch.bfloat16, torch.float32):
            x, w = (torch.ones(LARGE, LARGE, dtype=dtype) for _ in range(2))
            rates[dtype] = 2 * LARGE**3 / best_seconds(partial(F.linear, x, w))
    finally:
        torch.set_num_threads(before)
    dtype = max(rates, key=lambda dtype: rates[dtype])
    how = f"torch {str(dtype).removeprefix('torch.')} linear, {LARGE} in each direction"
    return rates[dtype], f"measured: {how}, {threads} thread{'s' * (threads > 1)}"


def find_machine_peaks(
    threads: int, name: str | None = None, flops: float | None = None, bandwidth: float | None = None
) -> Peaks:
    """-> Peaks: given numbers, else those of the table for a device's name, else measured ones."""
    if name is not None:
        of_table = find_peaks(name)
        arithmetic, memory = ((value, "table, by the device's name") for value in of_table)
    if flops:
        arithmetic = flops, "given"
    elif name is None:
        arithmetic = measure_flops(threads)
    if bandwidth:
        memory = bandwidth, "given"
    elif name is None:
        memory = measure_bandwidth(threads)
    return Peaks(arithmetic[0], memory[0], arithmetic[1], memory[1])


def measure_drives(disk: ExpertDisk) -> float:
    """Bytes/s of plain reads of random experts past the page cache, at the best of some queue depths; all drives
    together."""
    layouts = list(disk.layouts.values())
    count = min(len(layouts), round(DRIVE_BYTES / disk.max_expert_bytes))
    buffers = read_buffers(max(DEPTHS), disk.max_expert_bytes)

    def rate(drive: Drive, mode: str, depth: int, count: int) -> float:
        sample = random.choices(layouts, k=max(1, count // depth) * depth)
        seconds = time_reads(Drive(drive.root, drive.reader, ReadRate(mode, depth)), sample, buffers)
        return sum(layout.stored_bytes for layout in sample) / seconds

    speed = 0.0
    for drive in disk.drives.usable:
        rate(drive, "direct", 1, 1)  # shows whether the file system refuses O_DIRECT
        mode = "direct" if drive.supports_direct(layouts[0]) else "buffered"
        speed += max(rate(drive, mode, depth, count) for depth in DEPTHS)
    return speed


def reset_peak() -> None:
    """Reset the peak memory that the system counts, where it can (Linux)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Peak bytes of the process since reset_peak, or since its start where the system cannot reset."""
    try:
        [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
        return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return peak_rss_bytes()
