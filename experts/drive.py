"""DriveSet: experts read from one drive, or striped over the drives of the snapshot and its mirror."""

import ctypes
import os
import threading
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from errors import Refused
from experts.drive_learner import DriveLearner, Setting
from snapshot.reader import PAGE, FileReader, align_to_page, open_file

if TYPE_CHECKING:  # disk.py imports this file
    from experts.disk import ExpertLayout

MODES = ("direct", "buffered")  # O_DIRECT, or through the page cache
TOLERANCE = 0.95  # of the best speed counts as the best
GGUF_START_BYTES = 1 << 16  # of a GGUF that are compared with those of its mirror
CACHED_SHARE = 0.5  # of an expert in the page cache, from which on it is read from there
FULL_FACTOR = 2  # a drive with as many reads in flight as it should have counts as that much slower


class DriveWarning(UserWarning):
    """A drive is no longer used."""


@dataclass(frozen=True, slots=True)
class ReadRate:
    """One way to read a drive, and how fast that is; until it is measured the speed is a placeholder."""

    mode: str = "buffered"
    depth: int = 4  # reads in flight
    gigabytes_per_second: float = 1.0


def choose_rate(rates: Sequence[ReadRate]) -> ReadRate:
    """Choose O_DIRECT unless buffered reads are faster, for it needs no copy and no page cache; then the smallest queue
    depth that is about as fast as any."""

    def near_best(rates: Sequence[ReadRate]) -> list[ReadRate]:
        best = max(rate.gigabytes_per_second for rate in rates)
        return [rate for rate in rates if rate.gigabytes_per_second >= TOLERANCE * best]

    mode = min(near_best(rates), key=lambda rate: MODES.index(rate.mode)).mode
    return min(near_best([rate for rate in rates if rate.mode == mode]), key=lambda rate: rate.depth)


class Drive:
    """One copy of a snapshot's files, in the folder `root`, and how they are read: as `speed` says, or as `learner`
    finds best. Thread-safe."""

    def __init__(self, root: Path, reader: FileReader, speed: ReadRate | None = None) -> None:
        self.root = root
        self.reader = reader
        self.speed = speed or ReadRate()  # how it is read at first
        self.rates: tuple[ReadRate, ...] = ()  # all that were measured before this run
        self.best_at_start = 0.0  # bytes a second, if it was measured when this run began
        self.learner: DriveLearner | None = None
        self.prefers_page_cache = False  # experts in the page cache are read from there, whatever the mode
        self.path_of = cache(lambda path: root / path.name)
        self.is_failed = False
        self.outstanding_bytes = 0  # of reads that have not ended
        self.outstanding_reads = 0

    @property
    def depth(self) -> int:
        """Reads to keep in flight."""
        return self.learner.depth if self.learner else self.speed.depth

    @property
    def bytes_per_second(self) -> float:
        """Of late in this run, or as it was measured before."""
        return (self.learner.speed if self.learner else 0.0) or self.speed.gigabytes_per_second * 1e9

    @property
    def best_bytes_per_second(self) -> float | None:
        """The best speed seen in this run, else the one remembered; None if there is neither."""
        best = max(self.learner.best if self.learner else 0.0, self.best_at_start)
        return best or (self.speed.gigabytes_per_second * 1e9 if self.rates else None)

    @property
    def setting(self) -> Setting:
        """How it is read now, trials apart."""
        return self.learner.setting if self.learner else (self.speed.mode, self.speed.depth)

    def read_expert(self, layout: "ExpertLayout", buffer: memoryview, what: str) -> None:
        """Read an expert into `buffer`, and learn from it; `what` names the expert in an error."""
        learner = self.learner
        if learner is None:
            self.read_ranges(layout, buffer, self.speed.mode, what)
            return
        cached = self.cached_share(layout)
        if cached >= CACHED_SHARE and self.prefers_page_cache:
            self.read_ranges(layout, buffer, "buffered", what)
            learner.add_cached(layout.stored_bytes)
            return
        read = learner.begin(time.perf_counter())
        try:
            self.read_ranges(layout, buffer, read.mode, what)
        except BaseException:
            learner.drop(read, time.perf_counter())
            raise
        from_cache = round(cached * layout.stored_bytes) if read.mode == "buffered" else 0
        learner.end(read, time.perf_counter(), layout.stored_bytes - from_cache)
        if from_cache:
            learner.add_cached(from_cache)

    def read_ranges(self, layout: "ExpertLayout", buffer: memoryview, mode: str, what: str) -> None:
        """Read the byte ranges of an expert into `buffer`; `what` names the expert in an error."""
        is_direct = mode == "direct" and is_page_aligned(buffer)
        for r in layout.ranges:
            path = self.path_of(r.path)
            if is_direct and r.is_congruent:
                before = r.offset % PAGE
                pages = buffer[r.buffer_offset - before : align_to_page(r.buffer_offset + r.num_bytes)]
                self.reader.read_direct(path, r.offset - before, pages, before + r.num_bytes, what)
            else:
                self.reader.read_into(path, r.offset, buffer[r.buffer_offset : r.buffer_offset + r.num_bytes], what)

    def cached_share(self, layout: "ExpertLayout") -> float:
        """About the share of an expert that lies in the page cache, 0 to 1; 0 where the system does not tell."""
        ranges = layout.ranges
        shares = [self.reader.cached_share(self.path_of(r.path), r.offset, r.num_bytes) for r in ranges]
        return sum(shares) / len(shares)

    def drop_from_page_cache(self, layout: "ExpertLayout") -> None:
        """Drop an expert from the page cache. Not done after each read: that costs half as much as reading, the kernel
        reclaims such pages first when memory is short, and until then they are a second cache."""
        for r in layout.ranges:
            self.reader.drop_cached(self.path_of(r.path), r.offset, r.num_bytes)

    def supports_direct(self, layout: "ExpertLayout") -> bool:
        """True if O_DIRECT can read an expert, as far as is known."""
        return any(r.is_congruent and self.reader.can_read_direct(self.path_of(r.path)) for r in layout.ranges)


def is_page_aligned(buffer: memoryview) -> bool:
    """True if a writable buffer begins at a page."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % PAGE == 0


class DriveSet:
    """Drives with the same files. Each expert is read from the drive that would finish it first; a drive that fails for
    good is excluded while there is another."""

    def __init__(self, drives: Iterable[Drive]) -> None:
        self.all = list(drives)
        self.lock = threading.Lock()

    @property
    def usable(self) -> list[Drive]:
        return [drive for drive in self.all if not drive.is_failed]

    @property
    def queue_depth(self) -> int:
        """Reads to keep in flight over all drives."""
        return sum(drive.depth for drive in self.usable)

    @property
    def bytes_per_second(self) -> float | None:
        """What plain reads from all drives give together, at the best speed seen in this run; None if one of them is
        unknown."""
        speeds = [drive.best_bytes_per_second for drive in self.all]
        return None if None in speeds else sum(filter(None, speeds))

    @property
    def cached_bytes(self) -> int:
        """Bytes of experts that were read from the page cache so far, as far as is known."""
        return sum(drive.learner.counters.cached_bytes for drive in self.all if drive.learner)

    def read_expert(self, layout: "ExpertLayout", buffer: memoryview, what: str) -> None:
        """Read an expert from the drive that would finish first, or from another when that one fails for good."""
        while True:
            drive = self.assign(layout.num_bytes)
            try:
                return drive.read_expert(layout, buffer, what)
            except Refused as error:
                self.exclude(drive, error)
            finally:
                with self.lock:
                    drive.outstanding_bytes -= layout.num_bytes
                    drive.outstanding_reads -= 1

    def assign(self, num_bytes: int) -> Drive:
        """The usable drive that would finish `num_bytes` more first, of equals the first; they become outstanding."""

        def seconds(drive: Drive) -> float:
            is_full = drive.outstanding_reads >= drive.depth
            return (drive.outstanding_bytes + num_bytes) / drive.bytes_per_second * (FULL_FACTOR if is_full else 1)

        with self.lock:
            usable = self.usable
            drive = min(usable, key=seconds) if len(usable) > 1 else usable[0]
            drive.outstanding_bytes += num_bytes
            drive.outstanding_reads += 1
            return drive

    def exclude(self, drive: Drive, error: Refused) -> None:
        """Exclude a drive and warn; raise the error if it is the only one."""
        with self.lock:
            if self.usable == [drive]:
                raise error
            is_first_failure = not drive.is_failed
            drive.is_failed = True
        if is_first_failure:
            warnings.warn(f"{error}; {drive.root} is no longer read from", DriveWarning, stacklevel=2)


def check_mirror(mirror: Path, paths: Iterable[Path]) -> None:
    """Refuse a folder that is no copy of the snapshot: sizes and headers of the files in `paths` are compared."""
    if not mirror.is_dir():
        raise Refused(f"SNAP_MIRROR={mirror}: no such folder; it must hold a copy of the snapshot")
    for path in paths:
        copy = mirror / path.name
        try:
            if os.path.samefile(path, copy):
                raise Refused(f"SNAP_MIRROR={mirror}: {path.name} is the snapshot's own file, not a copy of it")
            is_same = size_and_header(path) == size_and_header(copy)
        except OSError as error:
            raise Refused(f"SNAP_MIRROR={mirror}: {path.name}: {error.strerror}; copy the snapshot again") from None
        if not is_same:
            raise Refused(f"SNAP_MIRROR={mirror}: {path.name} differs from that of SNAP; copy the snapshot again")


def size_and_header(path: Path) -> tuple[int, bytes, bytes]:
    """Size and header of a safetensors file, or start of a GGUF. The header's length was checked in the snapshot alone,
    not in a mirror."""
    with open(open_file(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        field = file.read(8)
        length = GGUF_START_BYTES if field.startswith(b"GGUF") else int.from_bytes(field, "little")
        return size, field, file.read(min(length, size))
