"""The drives that hold a snapshot: how one is read fastest, measured, and experts read from one, or striped over two.

Whether the page cache helps or costs a third, and how many reads a drive wants at once, differs from drive to drive: so
it is measured, on the snapshot's own files.
"""

import ctypes
import itertools
import os
import random
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

from errors import Refused
from machine.arena import Arena
from snapshot.reader import PAGE, align_to_page, open_file

MODES = ("direct", "buffered")
DEPTHS = (1, 2, 4, 8)  # reads in flight
NEAR = 0.95  # of the best speed is as good as the best
PROBE_SECONDS = 1.8  # with what surrounds the reads, below 2
ROUNDS = 2


class DriveWarning(UserWarning):
    """A drive is no longer used."""


@dataclass(frozen=True, slots=True)
class ReadRate:
    """One way to read a drive, and how fast it was."""

    mode: str
    depth: int
    gigabytes_per_second: float


@dataclass(frozen=True, slots=True)
class DriveSpeed:
    """How to read a drive, and how fast that is; `arms` is what was measured, without them the speed means nothing."""

    mode: str = "buffered"
    depth: int = 4
    gigabytes_per_second: float = 1.0
    arms: tuple[ReadRate, ...] = ()

    def best(self, mode):
        """The best speed measured in a mode, None where there is none."""
        return max((arm.gigabytes_per_second for arm in self.arms if arm.mode == mode), default=None)


def choose(arms):
    """Measured arms -> DriveSpeed: direct unless buffered is faster, for it costs neither a copy nor page cache; then
    the fewest reads in flight that are about as fast as any number."""

    def near(arms):
        best = max(arm.gigabytes_per_second for arm in arms)
        return [arm for arm in arms if arm.gigabytes_per_second >= NEAR * best]

    mode = min(near(arms), key=lambda arm: MODES.index(arm.mode)).mode
    arm = min(near([arm for arm in arms if arm.mode == mode]), key=lambda arm: arm.depth)
    return DriveSpeed(mode, arm.depth, arm.gigabytes_per_second, tuple(arms))


# ----------------------------------------------------------------------------------------------------------------------


class Drive:
    """One copy of a snapshot's files, in the folder `root`, and how they are read. Threads may share it."""

    def __init__(self, root, reader, speed=None):
        self.root, self.reader, self.speed = root, reader, speed or DriveSpeed()
        self.path_of = cache(lambda path: root / path.name)
        self.is_failed = False
        self.outstanding = 0  # bytes asked for and not there yet

    def read(self, place, buffer, what):
        """The runs of an expert's place, into `buffer`; `what` names it in a complaint."""
        is_direct = self.speed.mode == "direct" and is_page_aligned(buffer)
        for run in place.runs:
            path = self.path_of(run.path)
            if is_direct and run.is_congruent:
                before = run.offset % PAGE
                pages = buffer[run.at - before : align_to_page(run.at + run.num_bytes)]
                self.reader.read_direct(path, run.offset - before, pages, before + run.num_bytes, what)
            else:
                self.reader.read_into(path, run.offset, buffer[run.at : run.at + run.num_bytes], what)

    def forget(self, place):
        """Drop an expert from the page cache. Not done after each read: it costs half as much as reading, the kernel
        gives such pages back first when memory is short, and until then they are a second cache."""
        for run in place.runs:
            self.reader.drop_cached(self.path_of(run.path), run.offset, run.num_bytes)

    def takes_direct(self, place):
        """Whether an expert can be read directly, as far as is known."""
        return any(run.is_congruent and self.reader.can_read_direct(self.path_of(run.path)) for run in place.runs)


def is_page_aligned(buffer):
    """Whether a writable memoryview begins at a page."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % PAGE == 0


class DriveSet:
    """Drives with the same files. An expert is read from the drive that would be done with it first; one that fails
    for good is left out from then on, while there is another."""

    def __init__(self, drives):
        self.all, self.lock = list(drives), threading.Lock()

    def append(self, drive):
        self.all.append(drive)

    @property
    def usable(self):
        return [drive for drive in self.all if not drive.is_failed]

    @property
    def depth(self):
        """Reads to keep in flight over all drives."""
        return sum(drive.speed.depth for drive in self.usable)

    def read(self, place, buffer, what):
        """An expert from the drive that would be done first, or from the other when that one fails for good."""
        while True:
            drive = self.take(place.num_bytes)
            try:
                return drive.read(place, buffer, what)
            except Refused as error:
                self.give_up(drive, error)
            finally:
                with self.lock:
                    drive.outstanding -= place.num_bytes

    def take(self, num_bytes):
        """The usable drive that would have `num_bytes` more first; of equals the first."""
        with self.lock:
            drive = min(self.usable, key=lambda d: (d.outstanding + num_bytes) / d.speed.gigabytes_per_second)
            drive.outstanding += num_bytes
            return drive

    def give_up(self, drive, error):
        """Leave a drive out and warn; the error goes on when there is no other."""
        with self.lock:
            if self.usable == [drive]:
                raise error
            is_news, drive.is_failed = not drive.is_failed, True
        if is_news:
            warnings.warn(f"{error}; {drive.root} is no longer read from", DriveWarning, stacklevel=2)


def check_mirror(mirror, paths):
    """Refuse a folder that is no copy of the snapshot: of the files in `paths` sizes and headers are compared."""
    if not mirror.is_dir():
        raise Refused(f"SNAP_MIRROR={mirror}: no such folder; it must hold a copy of the snapshot")
    for path in paths:
        copy = mirror / path.name
        try:
            if os.path.samefile(path, copy):
                raise Refused(f"SNAP_MIRROR={mirror}: {path.name} is the snapshot's own file, not a copy of it")
            same = size_and_header(path) == size_and_header(copy)
        except OSError as error:
            raise Refused(f"SNAP_MIRROR={mirror}: {path.name}: {error.strerror}; copy the snapshot again") from None
        if not same:
            raise Refused(f"SNAP_MIRROR={mirror}: {path.name} differs from that of SNAP; copy the snapshot again")


def size_and_header(path):
    """Bytes of a safetensors file, and its header; index.py has checked how long that says it is in the snapshot."""
    with open(open_file(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        field = file.read(8)
        return size, field, file.read(min(int.from_bytes(field, "little"), size))


# ----------------------------------------------------------------------------------------------------------------------


def measure(drive, places, seconds=PROBE_SECONDS):
    """Read random ones of the experts' `places` in each mode at each depth -> Arms, in about `seconds` altogether.

    What a slow drive cannot do in that time is left out, the deeper arms first; so are direct reads where the file
    system refuses them.
    """
    size = max(place.num_bytes for place in places)
    arena = Arena(max(DEPTHS) * size)
    buffers = [memoryview(arena.memory)[i * size : (i + 1) * size] for i in range(max(DEPTHS))]
    samples = itertools.cycle(random.sample(places, len(places)))
    end = time.perf_counter() + seconds

    def time_arm(mode, depth, sample):
        return time_reads(Drive(drive.root, drive.reader, DriveSpeed(mode, depth)), sample, buffers)

    first = next(samples)
    pace = {mode: time_arm(mode, 1, [first]) for mode in MODES}  # seconds an expert took last
    modes = [mode for mode in MODES if mode != "direct" or drive.takes_direct(first)]
    share = seconds / (ROUNDS * len(DEPTHS) * len(modes))
    best = {}
    # All arms, then all again: a drive that others use for a while spoils one round, not an arm.
    for depth, mode in itertools.product(DEPTHS * ROUNDS, modes):
        count = depth * max(1, round(share / pace[mode] / depth))
        if best and time.perf_counter() + count * pace[mode] > end:
            continue
        sample = list(itertools.islice(samples, count))
        took = time_arm(mode, depth, sample)
        pace[mode] = took / count
        speed = sum(place.stored_bytes for place in sample) / took / 1e9
        best[mode, depth] = max(best.get((mode, depth), 0), speed)
    return tuple(ReadRate(mode, depth, speed) for (mode, depth), speed in best.items())


def time_reads(drive, places, buffers):
    """Seconds that it takes to read experts, as many at once as the drive's speed says."""
    depth = drive.speed.depth
    if drive.speed.mode == "buffered":
        for place in places:
            drive.forget(place)  # or memory would be measured, not the drive

    def work(i):
        for place in places[i::depth]:
            drive.read(place, buffers[i], "a sample of the experts")

    with ThreadPoolExecutor(depth) as pool:
        started = time.perf_counter()
        list(pool.map(work, range(depth)))
        return time.perf_counter() - started
