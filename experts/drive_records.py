"""drives.json in the user's cache folder: how drives are read best, measured before a run and learned in runs.

A record is where a run begins to learn (experts/drive_learner.py), and each run updates it. Older speeds count less.
"""

import json
import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import astuple, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from experts.drive import MODES, ReadRate, choose_rate
from experts.drive_learner import DriveLearner, Setting
from machine.files import save_text

FILE = "drives.json"
MAX_FILE_BYTES = 1_000_000
MIN_READS = 100  # of a run, to be worth remembering
OLD_READS, HALF_LIFE = 400, 7  # what is remembered counts as so many reads, half as many after so many days
MAX_DEPTH = 64
MAX_TEXT = 200  # characters of a weakness


@dataclass(frozen=True, slots=True)
class DriveRecord:
    """What is remembered of a drive with experts of some size."""

    day: date  # of the last run that added to it
    rates: tuple[ReadRate, ...]
    chosen: Setting | None = None  # how the last run read in the end; None: what choose_rate says of the rates
    weakness: str = ""  # what disturbed the measurement, in words

    def choose(self, mode: str) -> ReadRate:
        """The rate to begin with. mode: auto, direct or buffered. Where the file system refuses O_DIRECT there are only
        buffered rates."""
        if self.chosen and mode in ("auto", self.chosen[0]):
            return next(rate for rate in self.rates if (rate.mode, rate.depth) == self.chosen)
        return choose_rate([rate for rate in self.rates if rate.mode == mode] or self.rates)

    @property
    def speeds(self) -> dict[Setting, float]:
        """Setting -> bytes a second."""
        return {(rate.mode, rate.depth): rate.gigabytes_per_second * 1e9 for rate in self.rates}


Records = dict[str, DriveRecord]  # what a record holds for -> it


def update_record(old: DriveRecord | None, learner: DriveLearner, today: date, is_free: bool) -> DriveRecord:
    """Add what a run learned. is_free: it could choose any mode.

    The speed of the run counts by its reads beside the older one; the settings that it tried keep their ratios. One
    that it did not try keeps its ratio to one that it did, if possible of the same mode.
    """
    learned, present = learner.learned(), learner.setting
    before = old.speeds if old else {}
    factor = 1.0
    if old and not old.weakness and present in before:
        old_reads = OLD_READS * 0.5 ** (max(0, (today - old.day).days) / HALF_LIFE)
        factor = (before[present] / learned[present]) ** (old_reads / (old_reads + learner.counters.reads))
    speeds = {setting: speed * factor for setting, speed in learned.items()}
    known = [setting for setting in learned if setting in before]
    for setting, speed in before.items():
        if setting not in learned:
            beside = min(known, key=lambda other: other[0] != setting[0], default=None)
            speeds[setting] = speed * (speeds[beside] / before[beside] if beside else 1.0)
    rates = [ReadRate(*setting, speed / 1e9) for setting, speed in speeds.items()]
    chosen = present if is_free else (old.chosen if old else None)
    return DriveRecord(today, tuple(filter(is_plausible, rates)), chosen)


def load_records(path: Path) -> Records:
    """Read drives.json. Entries that save_records would not write are left out."""
    try:
        with open(path, "rb") as file:
            entries = json.loads(file.read(MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    records = {}
    for key, entry in entries.items() if isinstance(entries, dict) else ():
        with suppress(TypeError, ValueError, KeyError):
            records[key] = read_record(entry)
    return records


def read_record(entry: dict) -> DriveRecord:
    """TypeError, ValueError or KeyError for an entry that is none."""
    rates = tuple(ReadRate(mode, depth, speed) for mode, depth, speed in entry["arms"])
    weakness = entry.get("weak", "")
    chosen = entry.get("chosen")
    if chosen is not None:
        mode, depth = chosen
        chosen = mode, depth
    is_known = chosen is None or chosen in {(rate.mode, rate.depth) for rate in rates}
    if not rates or not all(map(is_plausible, rates)) or not is_known:
        raise ValueError("no plausible rates")
    if not isinstance(weakness, str) or len(weakness) > MAX_TEXT:
        raise ValueError("no weakness in words")
    return DriveRecord(date.fromisoformat(entry["date"]), rates, chosen, weakness)


def is_plausible(rate: ReadRate) -> bool:
    speed = rate.gigabytes_per_second
    is_number = isinstance(speed, float) and math.isfinite(speed) and speed > 0
    return rate.mode in MODES and type(rate.depth) is int and 1 <= rate.depth <= MAX_DEPTH and is_number


def save_records(path: Path, changed: Iterable[tuple[str, DriveRecord]]) -> None:
    """Write drives.json with some records changed; where that is not possible the next run measures again."""
    records = load_records(path) | dict(changed)
    entries: dict[str, dict[str, Any]] = {}
    for key, record in records.items():
        entries[key] = {"date": str(record.day), "arms": [astuple(rate) for rate in record.rates]}
        if record.chosen:
            entries[key]["chosen"] = list(record.chosen)
        if record.weakness:
            entries[key]["weak"] = record.weakness
    save_text(path, json.dumps(entries, indent=1))
