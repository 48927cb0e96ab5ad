"""How each drive is read at first, and what a run learned of it.

At the first use of a drive it is measured on the snapshot's own files; later runs begin with what is remembered
(experts/drive_records.py). Whether the page cache helps or costs a third, and the best queue depth, differ from drive
to drive.
"""

import itertools
import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import date
from pathlib import Path

from experts.disk import ExpertDisk, ExpertLayout
from experts.drive import MODES, Drive, ReadRate
from experts.drive_learner import DEPTHS as LEARNED_DEPTHS
from experts.drive_learner import DriveLearner
from experts.drive_records import FILE, MIN_READS, DriveRecord, load_records, save_records, update_record
from machine.arena import Arena
from machine.contention import describe_contention, measure_activity, waiting_shares

MOUNTS = Path("/proc/self/mountinfo")
SMALL_BYTES = 256_000_000  # experts that are read faster than a drive is measured
MAX_DAYS = 30  # without a run that learned; then a drive is measured again
DEPTHS = (1, 2, 4, 8)  # queue depths that are measured
PROBE_SECONDS = 1.8  # with what surrounds the reads, below 2
ROUNDS = 2
CACHED_SAMPLES = 64  # experts that are looked for in the page cache
MOSTLY_CACHED = 0.9  # of them: the page cache holds the model

Rates = tuple[ReadRate, ...]


def set_up_drives(disk: ExpertDisk, read_mode: str, cache: Path, free_bytes: int = 0, today: date | None = None) -> str:
    """Decide how each drive of an ExpertDisk is read at first -> a notice, one line for each drive.

    read_mode: auto, direct or buffered; cache: folder of drives.json; free_bytes: memory left once the model is loaded.
    Where all experts fit in there, or lie there already, the page cache serves what the expert cache has evicted faster
    than any drive, so auto reads buffered.
    """
    today = today or date.today()
    lines = []
    for name, drive in zip(("drive", "mirror"), disk.drives.all, strict=False):
        if disk.stored_bytes < SMALL_BYTES:
            drive.speed = ReadRate("buffered" if read_mode == "auto" else read_mode)
            source = "not measured: the experts are small"
        else:
            fits = disk.stored_bytes <= free_bytes
            source = set_up_drive(drive, list(disk.layouts.values()), read_mode, cache / FILE, fits, today)
        source += "" if read_mode == "auto" else f", READ_MODE={read_mode}"
        lines.append(f"[{name}] {describe(drive)}; {source}")
    return "\n".join(lines)


def set_up_drive(
    drive: Drive, layouts: Sequence[ExpertLayout], read_mode: str, path: Path, fits: bool, today: date
) -> str:
    """Decide how one drive is read at first, and have it learn -> where that comes from, in words. fits: all experts
    fit into the page cache."""
    is_auto = read_mode == "auto"
    cached = cached_share(drive, layouts) if is_auto else 0.0
    record = find_record(drive, layouts, path, today)
    if record and not record.weakness:
        source = f"remembered from {record.day}"
    elif cached >= MOSTLY_CACHED:
        record, source = None, "not measured"
    else:
        record = measure_record(drive, layouts, today)
        save_records(path, [(measurement_key(drive, layouts), record)])
        source = "measured now" + (f", a weak start: {record.weakness}" if record.weakness else "")
    mode = "buffered" if is_auto and (fits or cached >= MOSTLY_CACHED) else read_mode
    drive.rates = record.rates if record else ()
    drive.speed = record.choose(mode) if record else ReadRate(mode)
    if record and record.day == today and source.startswith("measured"):
        drive.best_at_start = drive.speed.gigabytes_per_second * 1e9
    drive.prefers_page_cache = is_auto
    has_direct = not record or any(rate.mode == "direct" for rate in record.rates)
    modes = MODES if is_auto and has_direct and not fits else (drive.speed.mode,)
    depth = min(LEARNED_DEPTHS, key=lambda depth: (abs(depth - drive.speed.depth), depth))
    drive.learner = DriveLearner(
        (drive.speed.mode, depth),
        modes,
        record.speeds if record else {},
        is_weak=not record or bool(record.weakness),
        max_bytes=max(layout.stored_bytes for layout in layouts),
    )
    if is_auto and fits:
        source += ", all experts fit into the page cache"
    elif cached >= MOSTLY_CACHED:
        source += f", {cached:.0%} of the experts lie in the page cache"
    return source


def remember_drives(disk: ExpertDisk, read_mode: str, cache: Path, today: date | None = None) -> None:
    """Add to drives.json what a run learned of each drive."""
    today = today or date.today()
    path, layouts = cache / FILE, list(disk.layouts.values())
    for drive in disk.drives.all:
        learner = drive.learner
        if learner and learner.counters.reads >= MIN_READS and learner.speed:
            with suppress(OSError):  # the files are gone
                key = measurement_key(drive, layouts)
                is_free = read_mode == "auto" and len(learner.modes) > 1
                save_records(path, [(key, update_record(load_records(path).get(key), learner, today, is_free))])


def describe(drive: Drive) -> str:
    """direct reads, 4 at a time: 2.31 GB/s (buffered 1.90)"""
    speed = drive.speed
    text = f"{speed.mode} reads, {drive.depth} at a time"
    if drive.rates:
        text += f": {speed.gigabytes_per_second:.2f} GB/s"
        others = [rate for rate in drive.rates if rate.mode != speed.mode]
        if others:
            text += f" ({others[0].mode} {max(rate.gigabytes_per_second for rate in others):.2f})"
    return text


def describe_learned(drive: Drive) -> str | None:
    """A line about what a run learned of a drive; None if it read nothing or does not learn."""
    learner = drive.learner
    if not learner or not (learner.counters.reads or learner.counters.cached_bytes):
        return None
    counters, (mode, depth) = learner.counters, learner.setting
    line = f"[drive] {drive.root.name or drive.root}: {mode} reads, {depth} at a time"
    if learner.speed:
        line += f": {learner.speed / 1e9:.2f} GB/s of late"
    if learner.best:
        line += f", {learner.best / 1e9:.2f} at best"
    if counters.changes:
        line += f"; changed {counters.changes} times" if counters.changes > 1 else "; changed once"
    if counters.trial_reads:
        line += f"; {counters.trial_reads / counters.reads:.1%} of the reads tried other ways"
    if counters.cached_bytes:
        line += f"; {counters.cached_bytes / 1e9:.2f} GB more from the page cache"
    return line


def cached_share(drive: Drive, layouts: Sequence[ExpertLayout]) -> float:
    """About the share of the experts that lies in the page cache, 0 to 1; 0 where the system does not tell."""
    sample = random.sample(layouts, min(len(layouts), CACHED_SAMPLES))
    return sum(map(drive.cached_share, sample)) / len(sample)


def find_record(drive: Drive, layouts: Sequence[ExpertLayout], path: Path, today: date) -> DriveRecord | None:
    """What is remembered of a drive, if no more than MAX_DAYS ago."""
    record = load_records(path).get(measurement_key(drive, layouts))
    return record if record and 0 <= (today - record.day).days <= MAX_DAYS else None


def measure_record(drive: Drive, layouts: Sequence[ExpertLayout], today: date) -> DriveRecord:
    """Measure a drive, and what disturbed that."""
    device = os.stat(drive.path_of(layouts[0].ranges[0].path)).st_dev
    waiting, before = waiting_shares(), measure_activity(device)
    rates = measure(drive, layouts)
    return DriveRecord(today, rates, weakness=describe_contention(before, measure_activity(device), waiting))


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
