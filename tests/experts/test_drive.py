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
from dataclasses import replace
from datetime import date, timedelta

import pytest

from errors import Refused
from experts import drive_speed
from experts.disk import ByteRange, ExpertDisk, ExpertLayout
from experts.drive import Drive, DriveSet, DriveWarning, ReadRate, choose_rate
from experts.drive_learner import DriveLearner
from experts.drive_records import DriveRecord, load_records, save_records, update_record
from experts.drive_speed import DEPTHS, measure, measurement_key, remember_drives, set_up_drive, set_up_drives
from machine.arena import Arena
from snapshot import reader as reader_module
from snapshot.config_file import read_config
from snapshot.index import read_index
from snapshot.reader import O_DIRECT, PAGE, FileReader
from tests.conftest import FIXTURES, reference
from tests.forward.test_forward import all_logits
from tests.support.simulated_drive import SIZE, SimulatedDrive

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
    """Measuring returns RATES at once -> the list of measured drives; no model is too small to measure, nothing lies in
    the page cache, the machine is quiet."""
    calls = []
    monkeypatch.setattr(drive_speed, "measure", lambda drive, layouts: calls.append(drive) or RATES)
    monkeypatch.setattr(drive_speed, "SMALL_BYTES", 0)
    monkeypatch.setattr(drive_speed, "cached_share", lambda drive, layouts: 0.0)
    monkeypatch.setattr(drive_speed, "describe_contention", lambda *moments: "")
    return calls


WORDS = "[drive] direct reads, 4 at a time: 2.00 GB/s (buffered 1.90); "


def test_a_drive_is_measured_once_in_thirty_days(disk, measured, tmp_path):
    def line(days):
        return set_up_drives(disk, "auto", tmp_path / "cache", today=TODAY + timedelta(days))

    assert line(0) == WORDS + "measured now"
    assert line(1) == line(30) == WORDS + "remembered from 2026-11-30"
    assert len(measured) == 1 and disk.drives.queue_depth == 4
    assert line(31) == line(0) == WORDS + "measured now"  # too old; from the future
    assert os.listdir(tmp_path / "cache") == ["drives.json"]


def test_a_drive_measured_on_a_busy_machine_is_measured_again(disk, measured, tmp_path, monkeypatch):
    """A measurement of a busy moment, 0.52 GB/s of a drive of 1.7, was believed for thirty days."""
    busy = "other processes used 80% of the processors' time"
    monkeypatch.setattr(drive_speed, "describe_contention", lambda *moments: busy)
    for _ in range(2):
        assert set_up_drives(disk, "auto", tmp_path) == WORDS + f"measured now, a weak start: {busy}"
        assert disk.drives.all[0].learner.is_weak
    monkeypatch.setattr(drive_speed, "describe_contention", lambda *moments: "")
    assert set_up_drives(disk, "auto", tmp_path) == WORDS + "measured now" and len(measured) == 3
    assert "remembered" in set_up_drives(disk, "auto", tmp_path) and not disk.drives.all[0].learner.is_weak


def test_drives_and_sizes_of_experts_are_measured_apart(disk, measured, layouts, tmp_path, monkeypatch):
    drive, path = disk.drives.all[0], tmp_path / "drives.json"
    own = list(disk.layouts.values())

    def source(drive, layouts):
        return set_up_drive(drive, layouts, "auto", path, False, TODAY)

    assert source(drive, own) == "measured now"
    assert source(Drive(tmp_path, drive.reader), layouts) == "measured now"  # smaller experts
    monkeypatch.setattr(drive_speed, "mount_of", lambda file: ("/elsewhere", "xfs", "/dev/sdz1"))
    assert source(drive, own) == "measured now"
    assert source(drive, own) == "remembered from 2026-11-30"
    assert len(json.loads(path.read_text())) == 3


GOOD = ["direct", 1, 1.0]
BAD_RATES = [[], None, 3, [[]], [3], ["abc"], [GOOD, ["mmap", 1, 1.0]], [["direct", 0, 1.0]], [["direct", 1.5, 1.0]]]
BAD_RATES += [[["direct", 1, bad]] for bad in (-1.0, 0.0, float("nan"), float("inf"), "fast", None)]
BAD_ENTRIES = [None, [], {}, {"date": "yesterday", "arms": [GOOD]}, {"date": 3, "arms": [GOOD]}]
BAD_CHOICES = [3, "direct", ["direct"], ["direct", 2], ["direct", 1, 1.0], [["direct"], 1], {"direct": 1}]
BAD_ENTRIES += [{"date": str(TODAY), "arms": [GOOD], "chosen": chosen} for chosen in BAD_CHOICES]
BAD_ENTRIES += [{"date": str(TODAY), "arms": [GOOD], "weak": weak} for weak in (3, ["busy"], "x" * 1000)]


def test_a_damaged_file_is_written_again(disk, measured, tmp_path):
    path = tmp_path / "drives.json"
    set_up_drives(disk, "auto", tmp_path, today=TODAY)
    [key] = json.loads(path.read_text())
    texts = ["", "{", "[]", "3", "\xff", "[" * 100_000]
    texts += [json.dumps({key: entry}) for entry in BAD_ENTRIES]
    texts += [json.dumps({key: {"date": str(TODAY), "arms": rates}}) for rates in BAD_RATES]
    for text in texts:
        path.write_bytes(text.encode("latin-1"))
        assert set_up_drives(disk, "auto", tmp_path, today=TODAY) == WORDS + "measured now", text[:80]
        assert set_up_drives(disk, "auto", tmp_path, today=TODAY) == WORDS + "remembered from 2026-11-30"


def test_what_a_run_learned_is_remembered(disk, measured, tmp_path):
    """A run finds buffered reads faster than the direct ones it began with: the next one begins with them. With
    READ_MODE, a run tells nothing about the other mode."""
    drive, gigabyte = disk.drives.all[0], 1e9
    slow_direct = {"direct": 0.5 * gigabyte, "buffered": 1.7 * gigabyte}

    def run(mode, day):
        line = set_up_drives(disk, mode, tmp_path, today=TODAY + timedelta(day))
        SimulatedDrive(lambda mode, *_: slow_direct[mode]).run(drive.learner, 12_000)
        remember_drives(disk, mode, tmp_path, TODAY + timedelta(day))
        return line

    def records():
        [entry] = json.loads((tmp_path / "drives.json").read_text()).values()
        return {(mode, depth): speed for mode, depth, speed in entry["arms"]}, entry

    assert run("auto", 0).startswith("[drive] direct reads, 4 at a time: 2.00 GB/s")
    speeds, entry = records()
    assert entry["chosen"] == ["buffered", 4] and speeds["buffered", 4] == pytest.approx(1.7, rel=0.01)
    assert speeds["direct", 4] == pytest.approx(0.5, rel=0.1) and "weak" not in entry
    assert run("auto", 40) == WORDS + "measured now"  # forgotten by then
    line = run("auto", 41)
    assert line.startswith("[drive] buffered reads, 4 at a time: 1.7") and line.endswith("remembered from 2027-01-09")
    assert drive.learner.counters.changes == 0
    assert run("direct", 42).startswith("[drive] direct reads, 4 at a time: 0.5")
    assert records()[1]["chosen"] == ["buffered", 4] and records()[1]["date"] == "2027-01-11"
    assert drive.learner.setting[0] == "direct"


def test_old_speeds_weigh_less_than_new_ones():
    """Settings that a run did not try keep their ratio to the present one."""
    learner = DriveLearner(("direct", 2), ("direct", "buffered"), max_bytes=SIZE)
    SimulatedDrive(lambda *_: 1e9).run(learner, 400)
    assert learner.learned() == {("direct", 2): pytest.approx(1e9)}
    rates = ReadRate("direct", 2, 4.0), ReadRate("buffered", 4, 2.0)
    for days, weakness, expected in ((0, "", 2.0), (7, "", 4 ** (1 / 3)), (700, "", 1.0), (0, "busy", 1.0)):
        old = DriveRecord(TODAY - timedelta(days), rates, ("direct", 2), weakness)
        new = update_record(old, learner, TODAY, True)
        speeds = [pytest.approx(expected, rel=1e-6), pytest.approx(expected / 2, rel=1e-6)]
        assert [rate.gigabytes_per_second for rate in new.rates] == speeds
        assert new.day == TODAY and new.chosen == ("direct", 2) and not new.weakness
    new = update_record(None, learner, TODAY, False)
    assert new.rates == (ReadRate("direct", 2, pytest.approx(1.0)),) and new.chosen is None


def test_a_short_run_is_not_remembered(disk, measured, tmp_path):
    set_up_drives(disk, "auto", tmp_path)
    before = (tmp_path / "drives.json").read_bytes()
    SimulatedDrive(lambda *_: 1e9).run(disk.drives.all[0].learner, 50)
    remember_drives(disk, "auto", tmp_path)
    assert (tmp_path / "drives.json").read_bytes() == before


def test_runs_beside_each_other_keep_each_others_records(tmp_path):
    """The file is read again before it is written."""
    record = DriveRecord(TODAY, RATES)
    path = tmp_path / "drives.json"
    save_records(path, [("one", record)])
    save_records(path, [("two", replace(record, chosen=("direct", 4), weakness="busy"))])
    assert load_records(path) == {"one": record, "two": replace(record, chosen=("direct", 4), weakness="busy")}


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
    drive = disk.drives.all[0]
    speed = drive.speed
    assert (speed.mode, speed.depth, speed.gigabytes_per_second) == chosen and line.endswith("; " + end)
    assert drive.learner.modes == (chosen[0],) and drive.prefers_page_cache == (mode == "auto")


def test_small_experts_are_not_measured(disk, tmp_path):
    line = set_up_drives(disk, "auto", tmp_path)
    assert line == "[drive] buffered reads, 4 at a time; not measured: the experts are small"
    assert set_up_drives(disk, "direct", tmp_path).startswith("[drive] direct reads, 4 at a time; not measured")
    assert os.listdir(tmp_path) == []


# --- the page cache ---------------------------------------------------------------------------------------------------


def test_a_model_in_the_page_cache_is_read_from_there(disk, measured, tmp_path, monkeypatch):
    """Whatever was remembered; and it is not measured, which would throw it out of the page cache."""
    monkeypatch.setattr(drive_speed, "cached_share", lambda drive, layouts: 0.97)
    end = ", 97% of the experts lie in the page cache"
    line = "[drive] buffered reads, 4 at a time; not measured" + end
    assert set_up_drives(disk, "auto", tmp_path) == line and not measured
    save_records(tmp_path / "drives.json", [(measurement_key(disk.drives.all[0], list(disk.layouts.values())), RECORD)])
    line = "[drive] buffered reads, 2 at a time: 1.90 GB/s (direct 2.00); remembered from 2026-11-30" + end
    assert set_up_drives(disk, "auto", tmp_path, today=TODAY) == line and not measured
    assert set_up_drives(disk, "direct", tmp_path, today=TODAY).startswith("[drive] direct reads")


RECORD = DriveRecord(TODAY, RATES, ("direct", 4))


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system drops no pages")
def test_experts_in_the_page_cache_are_read_from_there(reader, layouts, tmp_path):
    """Each for itself, though direct reads were remembered. A mode that the user chose is kept."""
    file, num_bytes = tmp_path / "data", 2 * PAGE
    data, buffer = file.read_bytes(), memoryview(Arena(num_bytes).memory)[:num_bytes]
    with open(file, "rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if reader.cached_share(file, 0, 80 * PAGE) > 0:
            pytest.skip("the file system is the page cache")
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(opened.fileno(), 20 * PAGE, 0)  # the first ten experts
    for prefers, cached in ((True, 10), (False, 0)):
        drive = Drive(tmp_path, reader)
        drive.learner, drive.prefers_page_cache = DriveLearner(("direct", 2), ("direct",)), prefers
        num_cached = sum(drive.cached_share(layout) == 1 for layout in layouts)
        assert 10 <= num_cached <= 20  # the kernel may have read ahead
        for i, layout in enumerate(layouts):
            drive.read_expert(layout, buffer, "x")
            assert buffer == data[i * num_bytes : (i + 1) * num_bytes]
            if i == 9:
                assert drive.learner.counters.cached_bytes == cached * num_bytes
        assert drive.learner.counters.reads == 40 - (num_cached if prefers else 0)


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


class Recorded(Drive):
    """A drive that records its reads, and raises `error` if set."""

    def __init__(self, speed, depth=1):
        super().__init__(f"drive {speed}", None, ReadRate("direct", depth, speed))
        self.reads, self.error = [], None

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
