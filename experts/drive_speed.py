"""How each drive is read: measured on the snapshot's own files at its first use, remembered in the user's cache folder.

Whether the page cache helps or costs a third, and the best queue depth, differ from drive to drive.
"""

import itertools
import json
import math
import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple
from datetime import date
from pathlib import Path

from experts.disk import ExpertDisk, ExpertLayout
from experts.drive import MODES, Drive, ReadRate, choose_rate
from machine.arena import Arena
from machine.files import save_text

FILE = "drives.json"
MOUNTS = Path("/proc/self/mountinfo")
SMALL_BYTES = 256_000_000  # experts that are read faster than a drive is measured
MAX_DAYS = 30  # then a drive is measured again
MAX_FILE_BYTES = 1_000_000
DEPTHS = (1, 2, 4, 8)  # queue depths that are measured
PROBE_SECONDS = 1.8  # with what surrounds the reads, below 2
ROUNDS = 2

Rates = tuple[ReadRate, ...]
Measurements = dict[str, tuple[date, Rates]]  # what a measurement holds for -> (day, rates)


def set_up_drives(disk: ExpertDisk, read_mode: str, cache: Path, free_bytes: int = 0, today: date | None = None) -> str:
    """Decide how each drive of an ExpertDisk is read -> a notice, one line for each drive.

    read_mode: auto, direct or buffered; cache: folder of drives.json; free_bytes: memory left once the model is loaded.
    Where all experts fit in there, the page cache serves what the expert cache has evicted faster than any drive, so
    auto reads buffered.
    """
    today = today or date.today()
    lines = []
    fits_page_cache = read_mode == "auto" and disk.stored_bytes <= free_bytes
    mode = "buffered" if fits_page_cache else read_mode
    for name, drive in zip(("drive", "mirror"), disk.drives.all, strict=False):
        if disk.stored_bytes < SMALL_BYTES:
            drive.speed = ReadRate("buffered" if mode == "auto" else mode)
            source = "not measured: the experts are small"
        else:
            drive.rates, source = find_rates(drive, list(disk.layouts.values()), cache / FILE, today)
            # Where the file system refuses O_DIRECT there are only buffered rates.
            drive.speed = choose_rate([rate for rate in drive.rates if rate.mode == mode] or drive.rates)
            source += ", all experts fit into the page cache" if fits_page_cache else ""
        source += "" if read_mode == "auto" else f", READ_MODE={read_mode}"
        lines.append(f"[{name}] {describe(drive)}; {source}")
    return "\n".join(lines)


def describe(drive: Drive) -> str:
    """direct reads, 4 at a time: 2.31 GB/s (buffered 1.90)"""
    speed = drive.speed
    text = f"{speed.mode} reads, {speed.depth} at a time"
    if drive.rates:
        text += f": {speed.gigabytes_per_second:.2f} GB/s"
        others = [rate for rate in drive.rates if rate.mode != speed.mode]
        if others:
            text += f" ({others[0].mode} {max(rate.gigabytes_per_second for rate in others):.2f})"
    return text


def find_rates(drive: Drive, layouts: Sequence[ExpertLayout], path: Path, today: date) -> tuple[Rates, str]:
    """The rates of a drive, from the file `path` or measured and saved there -> (rates, their source)."""
    measurements = load_measurements(path)
    key = measurement_key(drive, layouts)
    if key in measurements:
        day, rates = measurements[key]
        if 0 <= (today - day).days <= MAX_DAYS:
            return rates, f"remembered from {day}"
    rates = measure(drive, layouts)
    save_measurements(path, load_measurements(path) | {key: (today, rates)})
    return rates, "measured now"


def measure(drive: Drive, layouts: Sequence[ExpertLayout], seconds: float = PROBE_SECONDS) -> Rates:
    """Read random experts in each mode at each queue depth, in about `seconds` altogether.

    What a slow drive cannot do in that time is left out, deep queues first; so is O_DIRECT where the file system
    refuses it.
    """
    buffers = read_buffers(max(DEPTHS), max(layout.num_bytes for layout in layouts))
    samples = itertools.cycle(random.sample(layouts, len(layouts)))
    end = time.perf_counter() + seconds

    def time_mode(mode: str, depth: int, sample: list[ExpertLayout]) -> float:
        return time_reads(Drive(drive.root, drive.reader, ReadRate(mode, depth)), sample, buffers)

    first = next(samples)
    pace = {mode: time_mode(mode, 1, [first]) for mode in MODES}  # seconds an expert took last
    modes = [mode for mode in MODES if mode != "direct" or drive.supports_direct(first)]
    share = seconds / (ROUNDS * len(DEPTHS) * len(modes))
    best: dict[tuple[str, int], float] = {}
    # All of them, then all again: load by others for a while spoils one round, not one rate.
    for depth, mode in itertools.product(DEPTHS * ROUNDS, modes):
        count = depth * max(1, round(share / pace[mode] / depth))
        if best and time.perf_counter() + count * pace[mode] > end:
            continue
        sample = list(itertools.islice(samples, count))
        took = time_mode(mode, depth, sample)
        pace[mode] = took / count
        speed = sum(layout.stored_bytes for layout in sample) / took / 1e9
        best[mode, depth] = max(best.get((mode, depth), 0), speed)
    return tuple(ReadRate(mode, depth, speed) for (mode, depth), speed in best.items())


def read_buffers(count: int, num_bytes: int) -> list[memoryview]:
    """Page-aligned buffers of num_bytes, whole pages, each."""
    memory = memoryview(Arena(count * num_bytes).memory)
    return [memory[i * num_bytes : (i + 1) * num_bytes] for i in range(count)]


def time_reads(drive: Drive, layouts: Sequence[ExpertLayout], buffers: Sequence[memoryview]) -> float:
    """Seconds to read experts at the queue depth of the drive's speed; a buffer for each read in flight."""
    depth = drive.speed.depth
    if drive.speed.mode == "buffered":
        for layout in layouts:
            drive.drop_from_page_cache(layout)  # otherwise memory would be measured, not the drive

    def read_share(i: int) -> None:
        for layout in layouts[i::depth]:
            drive.read_expert(layout, buffers[i], "a sample of the experts")

    with ThreadPoolExecutor(depth) as pool:
        started = time.perf_counter()
        list(pool.map(read_share, range(depth)))
        return time.perf_counter() - started


def measurement_key(drive: Drive, layouts: Sequence[ExpertLayout]) -> str:
    """What a measurement holds for: device, mount point, file system, and experts of about this size."""
    file = os.path.realpath(drive.path_of(layouts[0].ranges[0].path))  # a snapshot may be links to files elsewhere
    device = os.stat(file).st_dev
    size = max(layout.num_bytes for layout in layouts)
    experts = f"experts up to {1 << (size - 1).bit_length()} bytes"
    return " ".join([f"{os.major(device)}:{os.minor(device)}", *mount_of(file), experts])


def mount_of(file: str) -> tuple[str, ...]:
    """(mount point, file system, source) of a file; () where the system does not say."""
    best: tuple[str, ...] = ()
    with suppress(OSError):
        for line in MOUNTS.read_text(errors="replace").splitlines():
            left, _, right = line.partition(" - ")
            folder = left.split()[4]
            if Path(file).is_relative_to(folder) and (not best or len(folder) >= len(best[0])):
                best = (folder, *right.split()[:2])
    return best


def load_measurements(path: Path) -> Measurements:
    """Read drives.json. Entries that save_measurements would not write are left out."""
    try:
        with open(path, "rb") as file:
            entries = json.loads(file.read(MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    measurements = {}
    for key, entry in entries.items() if isinstance(entries, dict) else ():
        with suppress(TypeError, ValueError, KeyError):
            rates = tuple(ReadRate(mode, depth, speed) for mode, depth, speed in entry["arms"])
            if rates and all(map(is_plausible, rates)):
                measurements[key] = date.fromisoformat(entry["date"]), rates
    return measurements


def is_plausible(rate: ReadRate) -> bool:
    speed = rate.gigabytes_per_second
    is_number = isinstance(speed, float) and math.isfinite(speed) and speed > 0
    return rate.mode in MODES and type(rate.depth) is int and 1 <= rate.depth <= 64 and is_number


def save_measurements(path: Path, measurements: Measurements) -> None:
    """Write drives.json; where that is not possible the next run measures again."""
    entries = {
        key: {"date": str(day), "arms": [astuple(rate) for rate in rates]} for key, (day, rates) in measurements.items()
    }
    save_text(path, json.dumps(entries, indent=1))
