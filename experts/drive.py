"""DriveSet: experts read from one drive, or striped over the drives of the snapshot and its mirror."""

import ctypes
import os
import threading
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from errors import Refused
from snapshot.reader import PAGE, FileReader, align_to_page, open_file

if TYPE_CHECKING:  # disk.py imports this file
    from experts.disk import ExpertLayout

MODES = ("direct", "buffered")  # O_DIRECT, or through the page cache
TOLERANCE = 0.95  # of the best speed counts as the best


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
    """One copy of a snapshot's files, in the folder `root`, and how they are read. Thread-safe."""

    def __init__(self, root: Path, reader: FileReader, speed: ReadRate | None = None) -> None:
        self.root = root
        self.reader = reader
        self.speed = speed or ReadRate()  # how it is read
        self.rates: tuple[ReadRate, ...] = ()  # all that were measured
        self.path_of = cache(lambda path: root / path.name)
        self.is_failed = False
        self.outstanding_bytes = 0  # of reads that have not ended

    def read_expert(self, layout: "ExpertLayout", buffer: memoryview, what: str) -> None:
        """Read the byte ranges of an expert into `buffer`; `what` names the expert in an error."""
        is_direct = self.speed.mode == "direct" and is_page_aligned(buffer)
        for r in layout.ranges:
            path = self.path_of(r.path)
            if is_direct and r.is_congruent:
                before = r.offset % PAGE
                pages = buffer[r.buffer_offset - before : align_to_page(r.buffer_offset + r.num_bytes)]
                self.reader.read_direct(path, r.offset - before, pages, before + r.num_bytes, what)
            else:
                self.reader.read_into(path, r.offset, buffer[r.buffer_offset : r.buffer_offset + r.num_bytes], what)

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
        return sum(drive.speed.depth for drive in self.usable)

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

    def assign(self, num_bytes: int) -> Drive:
        """The usable drive that would finish `num_bytes` more first, of equals the first; they become outstanding."""
        with self.lock:
            drive = min(self.usable, key=lambda d: (d.outstanding_bytes + num_bytes) / d.speed.gigabytes_per_second)
            drive.outstanding_bytes += num_bytes
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
    """Size and header of a safetensors file. The header's length was checked in the snapshot, not in a mirror."""
    with open(open_file(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        field = file.read(8)
        return size, field, file.read(min(int.from_bytes(field, "little"), size))
