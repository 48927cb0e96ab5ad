"""How the snapshot's drives are read: measured at the first use of a drive, remembered in the user's cache folder."""

import json
import math
import os
from contextlib import suppress
from dataclasses import astuple, replace
from datetime import date
from pathlib import Path

from experts.drive import MODES, DriveSpeed, ReadRate, choose, measure
from machine.files import save_text

FILE = "drives.json"
MOUNTS = Path("/proc/self/mountinfo")
SMALL_BYTES = 256_000_000  # experts that are read in less time than a measurement takes
MAX_DAYS = 30  # after that a drive is measured anew
MAX_FILE_BYTES = 1_000_000


def set_up_drives(disk, read_mode, cache, free_bytes=0, today=None):
    """Decide how each drive of an ExpertDisk is read -> what was decided, a line for each drive.

    `read_mode` is auto, direct or buffered; `cache` is the folder that keeps what was measured; `free_bytes` of memory
    are left when the model is loaded. Where all experts fit in there, the page cache gives what a slot has lost faster
    than any drive, so auto reads buffered.
    """
    today, lines = today or date.today(), []
    fits = read_mode == "auto" and disk.stored_bytes <= free_bytes
    mode = "buffered" if fits else read_mode
    for name, drive in zip(("drive", "mirror"), disk.drives.all, strict=False):
        if disk.stored_bytes < SMALL_BYTES:
            drive.speed = DriveSpeed("buffered" if mode == "auto" else mode)
            source = "not measured, the experts are few bytes"
        else:
            arms, source = find_arms(drive, list(disk.places.values()), cache / FILE, today)
            # Where the file system refuses direct reads there are buffered arms alone.
            speed = choose([arm for arm in arms if arm.mode == mode] or arms)
            drive.speed = replace(speed, arms=arms)
            source += ", all experts fit into the page cache" if fits else ""
        source += "" if read_mode == "auto" else f", READ_MODE={read_mode}"
        lines.append(f"[{name}] {describe(drive.speed)}; {source}")
    return "\n".join(lines)


def describe(speed):
    """direct reads, 4 at a time: 2.31 GB/s (buffered 1.90)"""
    words = f"{speed.mode} reads, {speed.depth} at a time"
    if speed.arms:
        others = [(mode, speed.best(mode)) for mode in MODES if mode != speed.mode]
        words += f": {speed.gigabytes_per_second:.2f} GB/s"
        words += "".join(f" ({mode} {best:.2f})" for mode, best in others if best)
    return words


def find_arms(drive, places, path, today):
    """The arms of a drive, remembered in the file `path` or measured and written there -> (arms, where from)."""
    known, key = load(path), key_of(drive, places)
    if key in known:
        day, arms = known[key]
        if 0 <= (today - day).days <= MAX_DAYS:
            return arms, f"remembered from {day}"
    arms = measure(drive, places)
    save(path, load(path) | {key: (today, arms)})
    return arms, "measured now"


def key_of(drive, places):
    """What a measurement holds for: device, file system and mount point, and experts of about this size."""
    file = os.path.realpath(drive.path_of(places[0].runs[0].path))  # a snapshot may be links to files elsewhere
    device = os.stat(file).st_dev
    size = max(place.num_bytes for place in places)
    words = [
        f"{os.major(device)}:{os.minor(device)}",
        *mount_of(file),
        f"experts up to {1 << (size - 1).bit_length()} bytes",
    ]
    return " ".join(words)


def mount_of(file):
    """The mount of a file in words: mount point, file system, source; nothing where the system does not say."""
    with suppress(OSError):
        best = ()
        for line in MOUNTS.read_text(errors="replace").splitlines():
            left, _, right = line.partition(" - ")
            folder, kind = left.split()[4], right.split()[:2]
            if Path(file).is_relative_to(folder) and (not best or len(folder) >= len(best[0])):
                best = (folder, *kind)
        return best
    return ()


def load(path):
    """The file of measurements -> key: (day, arms). What is not as `save` writes it is left out."""
    try:
        with open(path, "rb") as file:
            entries = json.loads(file.read(MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    known = {}
    for key, entry in entries.items() if isinstance(entries, dict) else ():
        with suppress(TypeError, ValueError, KeyError):
            arms = tuple(ReadRate(*fields) for fields in entry["arms"])
            if arms and all(map(is_sane, arms)):
                known[key] = date.fromisoformat(entry["date"]), arms
    return known


def is_sane(arm):
    """Whether an arm of the file can be one that was measured."""
    speed = arm.gigabytes_per_second
    is_number = isinstance(speed, float) and math.isfinite(speed) and speed > 0
    return arm.mode in MODES and type(arm.depth) is int and 1 <= arm.depth <= 64 and is_number


def save(path, known):
    """Write the file of measurements, whole or not at all; where it cannot be written the next run measures again."""
    entries = {key: {"date": str(day), "arms": [astuple(arm) for arm in arms]} for key, (day, arms) in known.items()}
    save_text(path, json.dumps(entries, indent=1))
