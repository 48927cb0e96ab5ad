"""DriveLearner on a simulated drive: wrong memories overruled, few trials, no flip-flop; then in the engine."""

import math
import re
import threading

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from experts import drive_speed
from experts.drive import Drive, DriveSet, ReadRate
from experts.drive_learner import DEPTHS, TRIAL_SHARE, DriveLearner
from experts.drive_speed import describe_learned
from experts.read_queue import ExpertRead, ReadQueue
from modes.report import RunReport
from settings import EMBEDDED_SNAPSHOT, Settings
from tests.experts.test_expert_tier import expected, same  # noqa: F401 - fixtures
from tests.support.server_process import wait_for
from tests.support.simulated_drive import SIZE, SimulatedDrive

GB = 1e9
BOTH = ("direct", "buffered")
# GB/s of all reads together with 1, 2, 3, ... in flight; more are as the last.
TWO_AT_ONCE = {"direct": (0.52, 1.7), "buffered": (0.5, 0.9)}
ARRAY = {"direct": (1, 1.9, 2.8, 3.6, 4.4, 5, 5.5, 6), "buffered": (1,)}
HARD_DISK = {"direct": (0.15, 0.15, 0.12, 0.08, 0.07), "buffered": (0.07,)}
SAME = {"direct": (2,), "buffered": (2,)}


def of_table(table):
    return lambda mode, count, seconds: GB * table[mode][min(count, len(table[mode])) - 1]


def learn(speed, setting, num_reads, prior=(), is_weak=False, modes=BOTH, **options):
    """-> (the learner, [(reads so far, setting) of each change]); the trials stay within their share at any time."""
    learner, changes = DriveLearner(setting, modes, dict(prior), is_weak, max_bytes=SIZE), []

    def check():
        counters = learner.counters
        assert counters.trial_reads <= TRIAL_SHARE * counters.reads
        assert counters.trial_bytes <= TRIAL_SHARE * counters.num_bytes
        if counters.changes > len(changes):
            changes.append((counters.reads, learner.setting))

    SimulatedDrive(speed, **options).run(learner, num_reads, check)
    return learner, changes


# --- a drive by itself ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "start", "end", "within"),
    [
        (TWO_AT_ONCE, ("buffered", 2), ("direct", 2), 2600),
        (ARRAY, ("direct", 2), ("direct", 8), 7500),
        (HARD_DISK, ("direct", 4), ("direct", 2), 6500),
        (HARD_DISK, ("direct", 8), ("direct", 2), 25_000),
    ],
)
@pytest.mark.parametrize("noise", [0, 0.2])
def test_a_wrong_memory_is_overruled(table, start, end, within, noise):
    """One read at a time, remembered of a busy moment, was obeyed for thirty days on a drive that gives three times as
    much with two. What is remembered here speaks against everything else; the run believes its own reads."""
    prior = {(mode, depth): 0.4 * GB for mode in BOTH for depth in (2, 4, 8)} | {start: 1.7 * GB}
    learner, changes = learn(of_table(table), start, within, prior, noise=noise, burst=(8, 16))
    assert learner.setting == end, changes
    assert learner.speed == pytest.approx(of_table(table)(*end, 0), rel=0.2)


def test_a_right_memory_is_kept_and_hardly_doubted():
    prior = {("direct", 2): 1.7 * GB, ("direct", 4): 1.7 * GB, ("buffered", 2): 0.9 * GB}
    learner, changes = learn(of_table(TWO_AT_ONCE), ("direct", 2), 20_000, prior)
    assert not changes and learner.speed == pytest.approx(1.7 * GB)
    assert learner.learned() == {
        ("direct", 2): pytest.approx(1.7 * GB),
        ("direct", 4): pytest.approx(1.7 * GB, rel=0.05),
        ("buffered", 2): pytest.approx(0.9 * GB, rel=0.05),
    }
    # Half as fast in one trial: it is not tried again for long, as each such trial costs time.
    assert learner.counters.trial_reads < TRIAL_SHARE * 20_000


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("swing", [0, 0.6])
def test_noise_changes_nothing(seed, swing):
    """All settings are equally fast; reads take 0.4 to 2.5 times their time, and others load the drive for seconds."""

    def speed(mode, count, seconds):
        return 2 * GB * (1 + swing * math.sin(seconds * 1.7) * math.sin(seconds * 0.31))

    learner, changes = learn(speed, ("direct", 4), 25_000, is_weak=True, noise=0.4, burst=(1, 8), seed=seed)
    assert len(changes) <= 1, changes
    assert learner.counters.trial_reads > 100


def test_a_drive_that_becomes_another():
    """Direct reads become slow after a minute, as beside another program that reads: the run follows."""

    def speed(mode, count, seconds):
        return GB * (0.5 if mode == "direct" and seconds > 60 else 2 if mode == "direct" else 1.5)

    learner, changes = learn(speed, ("direct", 2), 20_000, noise=0.1)
    assert [setting for _, setting in changes] == [("buffered", 2)]
    assert learner.best == pytest.approx(2 * GB, rel=0.1)  # U is held against the best that was seen
    assert learner.speed == pytest.approx(1.5 * GB, rel=0.1)


@pytest.mark.parametrize(("cached_share", "end"), [(0.0, "direct"), (0.2, "direct"), (0.6, "buffered")])
def test_what_the_page_cache_serves_counts_for_buffered_reads(cached_share, end):
    """Direct reads are 1.6 times as fast, but the page cache serves a part beside the buffered ones."""
    learner = DriveLearner(("buffered", 2), BOTH, max_bytes=SIZE)
    drive = SimulatedDrive(of_table({"direct": (1.6,), "buffered": (1,)}))
    cached = round(SIZE * cached_share / (1 - cached_share))
    drive.run(learner, 10_000, lambda: learner.setting[0] == "buffered" and learner.add_cached(cached))
    assert learner.setting[0] == end


def test_more_reads_at_once_are_tried_only_where_there_are_any():
    """Each layer misses two experts: four at a time would be two at a time."""
    learner, _ = learn(of_table(ARRAY), ("direct", 4), 10_000, burst=(1, 2), modes=("direct",))
    assert learner.counters.trial_reads == 0
    learner, _ = learn(of_table(SAME), ("direct", 4), 10_000, burst=(1, 2))
    assert {setting for setting, _ in learner.evidence.items()} <= {("buffered", 4)}


@settings(max_examples=25)
@given(
    st.lists(st.floats(0.05, 8), min_size=1, max_size=16),
    st.lists(st.floats(0.05, 8), min_size=1, max_size=16),
    st.sampled_from(DEPTHS),
    st.tuples(st.integers(1, 12), st.integers(0, 30)).map(lambda pair: (pair[0], sum(pair))),
    st.floats(0, 0.6),
    st.booleans(),
)
@example([0.1], [8.0], 16, (1, 1), 0.0, True)
def test_any_drive_is_tried_little(direct, buffered, depth, burst, noise, is_weak):
    """At any moment at most 2 % of the reads and of the bytes were trials (checked after each read)."""
    table = of_table({"direct": direct, "buffered": buffered})
    learner, _ = learn(table, ("direct", depth), 3000, is_weak=is_weak, noise=noise, burst=burst)
    assert learner.in_flight == 0 and learner.setting[1] in DEPTHS and learner.counters.reads == 3000


def test_failed_reads_are_no_speed():
    """Every fifth read fails: windows end all the same, and the speed is that of the others."""
    learner = DriveLearner(("direct", 2), BOTH, max_bytes=SIZE)
    for number in range(4000):
        read = learner.begin(number)
        if number % 5:
            learner.end(read, number + 0.5, SIZE)
        else:
            learner.drop(read, number + 0.25)
    assert learner.speed == pytest.approx(2 * SIZE) and learner.counters.reads == 3200
    assert 0 < learner.counters.trial_reads <= TRIAL_SHARE * 3200


# --- several drives ---------------------------------------------------------------------------------------------------


def test_each_drive_learns_by_itself():
    """Two threads' worth of reads on each: one drive wants one mode, its mirror the other."""
    drives = DriveSet([Drive(name, None, ReadRate("direct", 2, 1.0)) for name in ("first", "second")])
    tables = of_table({"direct": (2,), "buffered": (1,)}), of_table({"direct": (1,), "buffered": (2,)})
    for drive, speed in zip(drives.all, tables, strict=True):
        drive.learner = DriveLearner(("direct", 2), BOTH, max_bytes=SIZE)
        SimulatedDrive(speed, burst=(2, 2)).run(drive.learner, 4000)
    assert [drive.setting[0] for drive in drives.all] == ["direct", "buffered"]
    assert drives.bytes_per_second == pytest.approx(4 * GB, rel=0.05)


def test_a_slow_drive_is_given_as_little_as_it_turns_out_to_do():
    """What is remembered says that both are equal."""
    drives = DriveSet([Drive(name, None, ReadRate("direct", 4, 1.0)) for name in ("fast", "slow")])
    for drive, gigabytes in zip(drives.all, (3, 1), strict=True):
        drive.learner = DriveLearner(("direct", 4), ("direct",), max_bytes=SIZE)
        SimulatedDrive(lambda *_, gigabytes=gigabytes: gigabytes * GB).run(drive.learner, 100)
    assigned = [drives.assign(100).root for _ in range(80)]
    assert assigned.count("fast") == pytest.approx(60, abs=2)


# --- the read queue and the engine ------------------------------------------------------------------------------------


def test_reads_in_flight_follow_the_depth():
    depth, now, peak, gate = [2], set(), [], threading.Semaphore(0)

    def fill(read):
        now.add(read.key)
        peak.append(len(now))
        gate.acquire(timeout=60)
        now.discard(read.key)

    queue = ReadQueue(fill, lambda: depth[0])
    reads = [ExpertRead(i, None) for i in range(20)]
    for read in reads:
        queue.submit(read)
    try:
        for wanted, num_ended in ((2, 1), (8, 1), (3, 8), (1, 5)):
            depth[0] = wanted
            gate.release(num_ended)
            wait_for(lambda wanted=wanted: len(now) == min(wanted, len(reads) - queue.num_done))
        assert max(peak) == 8
    finally:
        gate.release(100)
        queue.close()
    assert all(read.is_done for read in reads if read.started_at)


def test_learning_changes_no_token(load, same, monkeypatch, tmp_path):  # noqa: F811
    """Trials all the time, of both modes and several depths, while tokens are generated."""
    monkeypatch.setattr(drive_speed, "SMALL_BYTES", 0)
    monkeypatch.setattr(drive_speed, "measure", lambda *_: (ReadRate("direct", 2, 1.0), ReadRate("buffered", 2, 1.0)))
    monkeypatch.setattr(drive_speed, "cached_share", lambda *_: 0.0)
    monkeypatch.setattr("load.model.available_bytes", lambda: 0)
    monkeypatch.setattr("experts.drive_learner.TRIAL_SHARE", 0.5)
    monkeypatch.setattr("experts.drive_learner.MAX_READS", 8)
    monkeypatch.setattr(Drive, "cached_share", lambda *_: 0.0)
    folder = tmp_path / "colibri.py"
    folder.mkdir()
    (folder / "kernels").symlink_to(Settings.read([], {}).cache / "kernels")
    loaded = load(EMBEDDED_SNAPSHOT, cap=4, LOOKAHEAD="1", XDG_CACHE_HOME=tmp_path)
    same(loaded.model)
    learner = loaded.disk.drives.all[0].learner
    assert learner.counters.trial_reads > 20 and learner.evidence and learner.speed > 0
    report = RunReport("prompt", loaded)
    [drive] = report.numbers(1)["drives"]
    assert drive["trial_reads"] == learner.counters.trial_reads and drive["best_bytes_s"] == learner.best > 0
    line = describe_learned(loaded.disk.drives.all[0])
    assert re.search(r"tiny: .* at a time: \d+\.\d\d GB/s of late, .* of the reads tried other ways", line), line
    loaded.close()
    assert "chosen" in (folder / "drives.json").read_text()
