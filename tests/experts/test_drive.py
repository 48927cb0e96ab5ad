"""Drives: measured rates and the choice, drives.json, and experts striped over a snapshot and its mirror."""

import errno
import fcntl
import json
import os
import re
import shutil
import threading
import time
import warnings
from datetime import date, timedelta

import pytest

from errors import Refused
from experts import drive_speed
from experts.disk import ByteRange, ExpertDisk, ExpertLayout
from experts.drive import Drive, DriveSet, DriveWarning, ReadRate, choose_rate
from experts.drive_speed import DEPTHS, find_rates, measure, set_up_drives
from machine.arena import Arena
from snapshot import reader as reader_module
from snapshot.config_file import read_config
from snapshot.index import read_index
from snapshot.reader import O_DIRECT, PAGE, FileReader
from tests.conftest import FIXTURES, reference
from tests.forward.test_forward import all_logits

NAME = "glm_moe_dsa"
RATES = (
    ReadRate("direct", 1, 1.0),
    ReadRate("direct", 4, 2.0),
    ReadRate("buffered", 1, 1.2),
    ReadRate("buffered", 2, 1.9),
)
TODAY = date(2026, 11, 30)


@pytest.fixture
def reader():
    reader = FileReader()
    yield reader
    reader.close()


@pytest.fixture
def layouts(tmp_path):
    """40 experts of two pages each in a file."""
    (tmp_path / "data").write_bytes(os.urandom(80 * PAGE))
    ranges = [ByteRange(tmp_path / "data", 2 * i * PAGE, 2 * PAGE, 0) for i in range(40)]
    return [ExpertLayout((r,), (), r.num_bytes) for r in ranges]


@pytest.fixture
def disk(reader):
    config, family = read_config(FIXTURES / NAME)
    return ExpertDisk(config, family, read_index(FIXTURES / NAME), reader)


@pytest.fixture
def mirror(tmp_path):
    out = tmp_path / "mirror"
    shutil.copytree(FIXTURES / NAME, out)
    return out


# --- measured and chosen ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("direct", "buffered", "chosen"),
    [
        ((1.0, 2.0, 3.0, 3.1), (1.0, 1.0, 1.0, 1.0), ("direct", 4)),  # four at once are as good as eight
        ((1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.5, 2.0), ("buffered", 8)),
        ((2.9, 2.9, 3.0, 3.0), (2.0, 3.1, 3.1, 3.1), ("direct", 1)),  # as good as buffered, and costs no copy
        ((), (1.0, 1.1, 1.1, 1.1), ("buffered", 2)),
        ((0.2,), (0.1,), ("direct", 1)),  # a slow drive: deeper queues were not measured
    ],
)
def test_the_choice(direct, buffered, chosen):
    rates = [ReadRate("direct", *pair) for pair in zip(DEPTHS, direct, strict=False)]
    rates += [ReadRate("buffered", *pair) for pair in zip(DEPTHS, buffered, strict=False)]
    speed = choose_rate(rates)
    assert (speed.mode, speed.depth) == chosen
    assert ReadRate(*chosen, speed.gigabytes_per_second) in rates


def test_every_rate_is_measured_in_the_time_given(layouts, reader, tmp_path):
    started = time.perf_counter()
    rates = measure(Drive(tmp_path, reader), layouts, seconds=0.6)
    assert time.perf_counter() - started < 2
    modes = {rate.mode for rate in rates}
    assert modes == ({"direct", "buffered"} if reader.can_read_direct(tmp_path / "data") else {"buffered"})
    assert len(rates) == len(modes) * len(DEPTHS) and all(rate.gigabytes_per_second > 0 for rate in rates)


def test_a_slow_drive_is_measured_in_part(layouts, tmp_path):
    """Each read takes 50 ms, one after the other: the depths that would take too long are left out."""
    one = threading.Lock()

    def slow(*call):
        with one:
            time.sleep(0.05)
            return os.preadv(*call)

    reader, started = FileReader(slow), time.perf_counter()
    rates = measure(Drive(tmp_path, reader), layouts, seconds=0.4)
    reader.close()
    assert time.perf_counter() - started < 1.5
    assert 1 <= len(rates) < 2 * len(DEPTHS) and min(rate.depth for rate in rates) == 1


@pytest.mark.skipif(not O_DIRECT, reason="the system has no direct reads")
def test_refused_direct_reads_are_not_measured(layouts, tmp_path):
    def refuse(descriptor, *call):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return os.preadv(descriptor, *call)

    reader = FileReader(refuse)
    rates = measure(Drive(tmp_path, reader), layouts, seconds=0.1)
    reader.close()
    assert {rate.mode for rate in rates} == {"buffered"}


# --- remembered -------------------------------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch):
    """Measuring returns RATES at once -> the list of measured drives; no model is too small to measure."""
    calls = []
    monkeypatch.setattr(drive_speed, "measure", lambda drive, layouts: calls.append(drive) or RATES)
    monkeypatch.setattr(drive_speed, "SMALL_BYTES", 0)
    return calls


def test_a_drive_is_measured_once_in_thirty_days(disk, measured, tmp_path):
    def line(days):
        return set_up_drives(disk, "auto", tmp_path / "cache", today=TODAY + timedelta(days))

    words = "[drive] direct reads, 4 at a time: 2.00 GB/s (buffered 1.90); "
    assert line(0) == words + "measured now"
    assert line(1) == line(30) == words + "remembered from 2026-11-30"
    assert len(measured) == 1 and disk.drives.queue_depth == 4
    assert line(31) == line(0) == words + "measured now"  # too old; from the future
    assert os.listdir(tmp_path / "cache") == ["drives.json"]


def test_drives_and_sizes_of_experts_are_measured_apart(disk, measured, layouts, tmp_path, monkeypatch):
    drive, path = disk.drives.all[0], tmp_path / "drives.json"
    own = list(disk.layouts.values())
    assert find_rates(drive, own, path, TODAY)[1] == "measured now"
    assert find_rates(Drive(tmp_path, drive.reader), layouts, path, TODAY)[1] == "measured now"  # smaller experts
    monkeypatch.setattr(drive_speed, "mount_of", lambda file: ("/elsewhere", "xfs", "/dev/sdz1"))
    assert find_rates(drive, own, path, TODAY)[1] == "measured now"
    assert find_rates(drive, own, path, TODAY)[1] == "remembered from 2026-11-30"
    assert len(json.loads(path.read_text())) == 3


GOOD = ["direct", 1, 1.0]
BAD_RATES = [[], None, 3, [[]], [3], ["abc"], [GOOD, ["mmap", 1, 1.0]], [["direct", 0, 1.0]], [["direct", 1.5, 1.0]]]
BAD_RATES += [[["direct", 1, bad]] for bad in (-1.0, 0.0, float("nan"), float("inf"), "fast", None)]
BAD_ENTRIES = [None, [], {}, {"date": "yesterday", "arms": [GOOD]}, {"date": 3, "arms": [GOOD]}]


def test_a_damaged_file_is_written_again(disk, measured, tmp_path):
    path, drive, layouts = tmp_path / "drives.json", disk.drives.all[0], list(disk.layouts.values())
    find_rates(drive, layouts, path, TODAY)
    [key] = json.loads(path.read_text())
    texts = ["", "{", "[]", "3", "\xff", "[" * 100_000]
    texts += [json.dumps({key: entry}) for entry in BAD_ENTRIES]
    texts += [json.dumps({key: {"date": str(TODAY), "arms": rates}}) for rates in BAD_RATES]
    for text in texts:
        path.write_bytes(text.encode("latin-1"))
        assert find_rates(drive, layouts, path, TODAY) == (RATES, "measured now"), text[:80]
        assert find_rates(drive, layouts, path, TODAY) == (RATES, "remembered from 2026-11-30")


def test_a_cache_that_cannot_be_written(disk, measured, tmp_path):
    (tmp_path / "file").write_text("")
    for _ in range(2):
        assert set_up_drives(disk, "auto", tmp_path / "file").endswith("measured now")


@pytest.mark.parametrize(
    ("mode", "free", "chosen", "end"),
    [
        ("direct", 1 << 40, ("direct", 4, 2.0), "measured now, READ_MODE=direct"),
        ("buffered", 0, ("buffered", 2, 1.9), "measured now, READ_MODE=buffered"),
        ("auto", 1 << 40, ("buffered", 2, 1.9), "measured now, all experts fit into the page cache"),
    ],
)
def test_read_mode_and_free_memory(disk, measured, tmp_path, mode, free, chosen, end):
    line = set_up_drives(disk, mode, tmp_path, free_bytes=free)
    speed = disk.drives.all[0].speed
    assert (speed.mode, speed.depth, speed.gigabytes_per_second) == chosen and line.endswith("; " + end)


def test_small_experts_are_not_measured(disk, tmp_path):
    line = set_up_drives(disk, "auto", tmp_path)
    assert line == "[drive] buffered reads, 4 at a time; not measured: the experts are small"
    assert set_up_drives(disk, "direct", tmp_path).startswith("[drive] direct reads, 4 at a time; not measured")
    assert os.listdir(tmp_path) == []


# --- a mirror ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variables", [{"READ_MODE": "direct"}, {"READ_MODE": "buffered"}, {"SNAP_MIRROR": "mirror"}])
def test_read_modes_and_mirrors_do_not_change_the_logits(load, mirror, variables):
    ids = reference(NAME)[0]["seq"]
    plain = all_logits(load(FIXTURES / NAME, cap=2).model, ids)
    variables = {name: mirror if value == "mirror" else value for name, value in variables.items()}
    loaded = load(FIXTURES / NAME, cap=2, **variables)
    assert (all_logits(loaded.model, ids) == plain).all()
    assert len(loaded.drive.splitlines()) == len(loaded.disk.drives.all) == 1 + ("SNAP_MIRROR" in variables)


def test_a_mirror_is_a_copy(load, mirror, tmp_path):
    def refused(folder, message):
        with pytest.raises(Refused, match=f"SNAP_MIRROR={folder}: {message}"):
            load(FIXTURES / NAME, SNAP_MIRROR=folder)

    refused(tmp_path / "absent", "no such folder")
    refused(FIXTURES / NAME, "model.safetensors is the snapshot's own file")
    path = mirror / "model.safetensors"
    data = path.read_bytes()
    for other in (data[:-1], data + b"\0", data.replace(b"F16", b"I16", 1), b"\xff" * 8 + data[8:], b""):
        path.write_bytes(other)
        refused(mirror, "model.safetensors differs from that of SNAP")
    path.unlink()
    refused(mirror, "model.safetensors: No such file or directory; copy the snapshot again")


class Recorded:
    """A drive that records its reads, and raises `error` if set."""

    def __init__(self, speed, depth=1):
        self.root, self.speed = f"drive {speed}", ReadRate("direct", depth, speed)
        self.reads, self.outstanding_bytes, self.is_failed, self.error = [], 0, False, None

    def read_expert(self, layout, buffer, what):
        self.reads.append(what)
        if self.error:
            raise self.error


def test_reads_are_striped_by_speed(layouts):
    """Each goes to the drive that would finish first: of two drives the one twice as fast gets two of three."""
    drives = DriveSet([Recorded(2.0, depth=4), Recorded(1.0, depth=2)])
    assigned = [drives.assign(100) for _ in range(30)]
    assert [assigned.count(drive) for drive in drives.all] == [20, 10]
    assert assigned[0] is drives.all[0] and drives.queue_depth == 6
    equal = DriveSet([Recorded(1.0), Recorded(1.0)])
    assert [equal.all.index(equal.assign(100)) for _ in range(4)] == [0, 1, 0, 1]
    for _ in range(9):  # nothing outstanding: always the faster one
        drives = DriveSet([Recorded(2.0), Recorded(1.0)])
        drives.read_expert(layouts[0], None, "x")
        assert drives.all[0].reads == ["x"] and drives.all[0].outstanding_bytes == 0


def test_a_drive_that_fails_is_excluded(layouts):
    drives = DriveSet([Recorded(2.0, depth=4), Recorded(1.0, depth=2)])
    first, second = drives.all
    first.error = Refused("bad.safetensors: Input/output error")
    with pytest.warns(DriveWarning, match=r"bad.*Input/output error; drive 2.0 is no longer read from") as caught:
        for i in range(3):
            drives.read_expert(layouts[i], None, i)
    assert len(caught) == 1 and first.reads == [0] and second.reads == [0, 1, 2] and drives.queue_depth == 2
    second.error = Refused("the last one")
    for _ in range(2):
        with pytest.raises(Refused, match="the last one"):
            drives.read_expert(layouts[0], None, "x")
    assert first.outstanding_bytes == second.outstanding_bytes == 0


@pytest.mark.parametrize("broken", ["snapshot", "mirror"])
def test_many_threads_and_a_drive_that_breaks(mirror, monkeypatch, broken):
    """Eight threads read all experts four times, and halfway one copy begins to fail every read."""
    monkeypatch.setattr(reader_module, "RETRY_PAUSES", (0, 0))
    bad = os.stat((mirror if broken == "mirror" else FIXTURES / NAME) / "model.safetensors")
    meet, halfway, is_met = threading.Barrier(8), threading.Event(), threading.Event()

    def preadv(descriptor, *call):
        if halfway.is_set():
            if os.path.samestat(os.fstat(descriptor), bad):
                is_met.set()
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            is_met.wait(30)  # the good copy is busy until the other one was read
        return os.preadv(descriptor, *call)

    reader = FileReader(preadv)
    config, family = read_config(FIXTURES / NAME)
    disk = ExpertDisk(config, family, read_index(FIXTURES / NAME), reader)
    disk.add_mirror(mirror)
    data, wrong = (mirror / "model.safetensors").read_bytes(), []

    def work(i):
        size = disk.max_expert_bytes
        buffer = memoryview(Arena(size).memory)[:size]
        for turn in range(4):
            if turn == 2:
                meet.wait()
                halfway.set()
            for key in list(disk.layouts)[i::8]:
                disk.read_expert(*key, buffer)
                for r in disk.layouts[key].ranges:
                    if buffer[r.buffer_offset :][: r.num_bytes] != data[r.offset :][: r.num_bytes]:
                        wrong.append(key)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    reader.close()
    assert not wrong and [drive.is_failed for drive in disk.drives.all] == [broken == "snapshot", broken == "mirror"]
    assert len(caught) == 1 and re.search(
        r"errno 5\) at byte \d+, reading expert \d of layer \d", str(caught[0].message)
    )
    assert [drive.outstanding_bytes for drive in disk.drives.all] == [0, 0]
