"""Contention: what disturbed a measurement, from the counters of the system."""

import os
from dataclasses import replace

import pytest

from machine import contention
from machine.contention import Activity, describe_contention, drive_bytes, measure_activity, waiting_shares

QUIET = Activity(100.0, 5000.0, 10.0, 3.0, 10**12, 10**9)


def after(**more):
    """Two seconds later on two processors, of which this process had one second, and read 1 GB."""
    numbers = {"cpu_seconds": 1.0, "stolen_seconds": 0, "own_cpu_seconds": 1.0, "drive_bytes": 10**9} | more
    numbers |= {"seconds": 2.0, "own_bytes": 10**9}
    return Activity(*(getattr(QUIET, name) + numbers[name] for name in Activity.__slots__))


@pytest.fixture(autouse=True)
def two_processors(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)


@pytest.mark.parametrize(
    ("moment", "waiting", "expected"),
    [
        (after(), {}, ""),
        (after(cpu_seconds=1.5, drive_bytes=1.1 * 10**9), {"cpu": 20.0, "io": 5.0}, ""),
        (after(cpu_seconds=3.8), {}, "other processes used 70% of the processors' time"),
        (after(stolen_seconds=0.4), {}, "the host took 10% of the processors' time"),
        (after(drive_bytes=1.5 * 10**9), {}, "other processes moved 0.50 GB on the drive"),
        (after(), {"io": 60.0}, "processes had waited for a drive 60 % of the time just before"),
        (after(), {"cpu": 71.0}, "processes had waited for a processor 71 % of the time just before"),
    ],
)
def test_what_disturbed_a_measurement(moment, waiting, expected):
    assert describe_contention(QUIET, moment, waiting) == expected


def test_a_system_that_does_not_say_all():
    assert describe_contention(replace(QUIET, drive_bytes=None), replace(after(), drive_bytes=None), {}) == ""
    assert describe_contention(replace(QUIET, own_bytes=None), after(drive_bytes=10**12), {}) == ""


def test_counters_of_the_system(tmp_path, monkeypatch):
    monkeypatch.setattr(contention, "PROC", tmp_path)
    assert drive_bytes(os.makedev(254, 1)) is None
    (tmp_path / "diskstats").write_text("   7  0 loop0 1 2 3\n 254       1 vda1 5 0 100 0 7 0 50 0 0 0 0\n")
    assert drive_bytes(os.makedev(254, 1)) == 150 * 512
    assert drive_bytes(os.makedev(7, 0)) is None and drive_bytes(os.makedev(0, 44)) is None  # cut off; btrfs
    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure" / "io").write_text("some avg10=61.50 avg60=2.00 avg300=1.00 total=5\nfull avg10=0.00\n")
    monkeypatch.setattr(os, "getloadavg", lambda: (2.5, 9.0, 9.0))
    assert waiting_shares() == {"io": 61.5, "cpu": 50.0}  # by the load average
    (tmp_path / "pressure" / "cpu").write_text("some avg10=3.25 avg60=0.00 avg300=0.00 total=5\n")
    assert waiting_shares() == {"io": 61.5, "cpu": 3.25}


def test_this_machine():
    before = measure_activity(os.stat(__file__).st_dev)
    end = os.times().user + 0.05
    while os.times().user < end:
        pass
    after = measure_activity(os.stat(__file__).st_dev)
    assert after.seconds > before.seconds and after.own_cpu_seconds >= before.own_cpu_seconds + 0.05
    assert after.cpu_seconds >= before.cpu_seconds


def test_without_proc_nothing_counts_as_disturbed(monkeypatch, tmp_path):
    def missing():
        raise FileNotFoundError(2, "No such file or directory", "/proc/stat")

    monkeypatch.setattr(contention, "PROC", tmp_path)
    monkeypatch.setattr("psutil.cpu_times", missing)
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    before = measure_activity(0)
    assert describe_contention(before, measure_activity(0), waiting_shares()) == ""
