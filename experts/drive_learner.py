"""DriveLearner: how one drive is read best, learned from the expert reads of the run itself.

Reads are grouped into windows of consecutive ones. Most windows are read in the present setting: a mode (O_DIRECT or
buffered) and a number of reads in flight. Now and then one is a trial of another setting, compared with the windows
before and after it, so that a drive that others load for a while spoils no comparison. The setting changes once several
trials say clearly that another one is faster; what was remembered of earlier runs decides only what is tried first.

A read that shared the drive with n reads on average had 1/n of the drive while it lasted: bytes over the sum of
these times is the speed of a window, whatever was in flight when it began and ended. No clock and no I/O of its own.
"""

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

Setting = tuple[str, int]  # (mode, reads in flight)

DEPTHS = (2, 4, 8, 16)  # reads in flight; one alone would leave the drive idle between two reads
TRIAL_SHARE = 0.02  # of the reads, and of the bytes, at most
MIN_READS, MAX_READS = 8, 32  # of a window that are measured
WINDOW_BYTES = 64_000_000  # that a window should have, within these bounds
MARGIN = math.log(1.05)  # a faster setting is faster by that much
NOISE = 0.15  # least standard deviation of the logarithm of a comparison
SURENESS = 2.0  # standard errors
MIN_WEIGHT = 1.5  # trials before a setting can win
FORGET = 0.98  # factor of all that trials told, at each occasion for one
PRIOR_WEIGHT = {False: 0.02, True: 0.005}  # of what is remembered, in trials; True: it is weak
LEVEL_FORGET = 0.9  # factor of a window's weight in the present speed, with each later one
BEST_READS = 32  # the best speed seen is that of so many reads


@dataclass(slots=True, eq=False)
class Window:
    """Consecutive reads in one setting. Those at either end, which share the drive with reads in another setting, are
    not measured."""

    setting: Setting
    num_reads: int
    margin_reads: int  # at the start
    tail_reads: int = 0
    trial: "Window | None" = None  # the trial that came before this window
    speed_before: float = 0.0  # of a trial: the speed of the last window before it
    num_started: int = 0
    num_open: int = 0  # measured reads that have not ended, those not started included
    num_bytes: int = 0
    seconds: float = 0.0  # of the drive

    def __post_init__(self) -> None:
        self.num_open = self.num_reads

    @property
    def is_trial(self) -> bool:
        return self.speed_before > 0

    @property
    def is_started(self) -> bool:
        return self.num_started == self.margin_reads + self.num_reads + self.tail_reads

    @property
    def speed(self) -> float:
        """Bytes a second; 0 without a measured read."""
        return self.num_bytes / self.seconds if self.seconds else 0.0


@dataclass(slots=True, eq=False)
class TimedRead:
    """A read in flight."""

    window: Window
    is_measured: bool
    started_at: float
    load_at_start: float  # of the learner

    @property
    def mode(self) -> str:
        return self.window.setting[0]


@dataclass(slots=True)
class Evidence:
    """What trials told of a setting: logarithms of its speed over that of the present one, as decayed sums."""

    weight: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        self.weight += 1
        self.total += value
        self.squares += value * value

    def decay(self) -> None:
        self.weight *= FORGET
        self.total *= FORGET
        self.squares *= FORGET

    @property
    def mean(self) -> float:
        return self.total / self.weight if self.weight else 0.0

    @property
    def deviation(self) -> float:
        variance = self.squares / self.weight - self.mean**2 if self.weight else 0.0
        return max(NOISE, math.sqrt(max(0.0, variance)))

    @property
    def lower(self) -> float:
        """The setting is at least so good."""
        return self.mean - SURENESS * self.deviation / math.sqrt(self.weight) if self.weight else -math.inf

    def upper(self, prior: float, prior_weight: float) -> float:
        """The setting is at most so good, as far as trials and what is remembered tell."""
        weight = self.weight + prior_weight
        mean = (self.total + prior_weight * prior) / weight
        return mean + SURENESS * self.deviation / math.sqrt(weight)


@dataclass(slots=True)
class DriveCounters:
    """Reads of one drive, as far as they ended."""

    reads: int = 0
    num_bytes: int = 0
    trial_reads: int = 0
    trial_bytes: int = 0
    cached_bytes: int = 0  # of experts that lay in the page cache; not in num_bytes
    changes: int = 0  # of the setting


@dataclass(eq=False)
class DriveLearner:
    """Thread-safe. Call `begin` when a read starts, then `end`, or `drop` if it failed."""

    setting: Setting  # the present one
    modes: tuple[str, ...]  # that may be tried
    prior: Mapping[Setting, float] = field(default_factory=dict)  # speeds that are remembered, in any unit
    is_weak: bool = True  # what is remembered says little
    max_bytes: int = 0  # of one read
    counters: DriveCounters = field(default_factory=DriveCounters)

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.evidence: dict[Setting, Evidence] = {}
        self.prior_factor = 1.0  # what is remembered is forgotten, too
        self.num_started = 0
        self.num_trial_reads = 0  # started, or yet to start
        self.next_occasion = 0  # number of the read before which a trial may begin
        self.in_flight = 0
        self.peak_in_flight = 0  # since the last occasion
        self.load = 0.0  # integral of in_flight over time
        self.clock = 0.0  # time of the last change of in_flight
        self.best = 0.0  # bytes a second, the best seen
        self.block_reads = self.block_bytes = 0  # of the windows that the best speed is looked for in
        self.block_seconds = 0.0
        self.level_bytes = self.level_seconds = 0.0  # of the windows in the present setting, decayed
        self.last_speed = 0.0  # of the last of them
        self.cached_bytes = 0  # from the page cache since then
        self.level_cached = 0.0  # decayed like level_bytes
        self.window = self.plain_window()

    # --- reads --------------------------------------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        """Reads that should be in flight now."""
        return self.window.setting[1]

    @property
    def speed(self) -> float:
        """Bytes a second in the present setting, of late; 0 before they are known."""
        return self.level_bytes / self.level_seconds if self.level_seconds else 0.0

    def begin(self, now: float) -> TimedRead:
        with self.lock:
            window = self.window
            self.count_load(now, 1)
            self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
            index = window.num_started - window.margin_reads
            window.num_started += 1
            self.num_started += 1
            if window.is_started:
                self.window = self.next_window(window)
            return TimedRead(window, 0 <= index < window.num_reads, now, self.load)

    def end(self, read: TimedRead, now: float, num_bytes: int) -> None:
        """num_bytes: that came from the drive."""
        with self.lock:
            self.count_load(now, -1)
            window, counters = read.window, self.counters
            counters.reads += 1
            counters.num_bytes += num_bytes
            if window.is_trial:
                counters.trial_reads += 1
                counters.trial_bytes += num_bytes
            if read.is_measured:
                seconds, load = now - read.started_at, self.load - read.load_at_start
                if load > 0:
                    window.seconds += seconds * seconds / load  # seconds / (load / seconds) reads in flight
                    window.num_bytes += num_bytes
                self.close_one(window)

    def drop(self, read: TimedRead, now: float) -> None:
        """A read failed."""
        with self.lock:
            self.count_load(now, -1)
            if read.is_measured:
                self.close_one(read.window)

    def add_cached(self, num_bytes: int) -> None:
        """Bytes were read that lay in the page cache."""
        with self.lock:
            self.counters.cached_bytes += num_bytes
            self.cached_bytes += num_bytes

    def count_load(self, now: float, change: int) -> None:
        self.load += self.in_flight * (now - self.clock)
        self.clock = now
        self.in_flight += change

    # --- windows ------------------------------------------------------------------------------------------------------

    def plain_window(self, margin_reads: int = 0, trial: Window | None = None) -> Window:
        return Window(self.setting, self.window_reads(self.setting[1]), margin_reads, trial=trial)

    def window_reads(self, depth: int) -> int:
        """Measured reads of a window."""
        return max(MIN_READS, 2 * depth, min(MAX_READS, WINDOW_BYTES // max(1, self.max_bytes)))

    def next_window(self, window: Window) -> Window:
        """The window after one whose reads have all started."""
        if window.is_trial:
            return self.plain_window(window.margin_reads, window)
        if self.last_speed and not window.trial and self.num_started >= self.next_occasion:
            return self.trial_window() or self.plain_window()
        return self.plain_window()

    def trial_window(self) -> Window | None:
        """A trial of the most promising setting; None if none is, or not enough has been read for it."""
        setting = self.most_promising()
        margin = max(setting[1] if setting else 0, self.setting[1])
        measured = self.window_reads(margin)
        num_reads = self.num_trial_reads + measured + 2 * margin
        num_bytes = self.counters.trial_bytes + (measured + 2 * margin) * self.max_bytes
        if self.num_started < num_reads / TRIAL_SHARE or self.counters.num_bytes < num_bytes / TRIAL_SHARE:
            return None
        self.next_occasion = self.num_started + round((measured + 2 * margin) / TRIAL_SHARE)
        self.peak_in_flight = self.in_flight
        self.prior_factor *= FORGET
        for evidence in self.evidence.values():
            evidence.decay()
        if setting is None:
            return None
        self.num_trial_reads = num_reads
        return Window(setting, measured, margin, margin, speed_before=self.last_speed)

    def most_promising(self) -> Setting | None:
        """The setting that may be the fastest; None if none can be faster than the present one."""
        present = self.prior.get(self.setting)
        best, bound = None, MARGIN
        for setting in self.alternatives():
            remembered = self.prior.get(setting)
            prior = math.log(remembered / present) if remembered and present else 0.0
            weight = self.prior_factor * PRIOR_WEIGHT[self.is_weak or not (remembered and present)]
            upper = self.evidence.get(setting, Evidence()).upper(prior, weight)
            if upper > bound:
                best, bound = setting, upper
        return best

    def alternatives(self) -> list[Setting]:
        """Settings to compare with the present one: more reads in flight where there would be any, the other mode, and
        fewer in flight."""
        mode, depth = self.setting
        out = [(mode, more) for more in DEPTHS if more > depth and self.peak_in_flight >= depth][:1]
        out += [(other, depth) for other in self.modes if other != mode]
        return out + [(mode, fewer) for fewer in reversed(DEPTHS) if fewer < min(depth, self.peak_in_flight)]

    def close_one(self, window: Window) -> None:
        """A measured read of a window ended; with the last one the window is judged."""
        window.num_open -= 1
        if window.num_open or not window.speed:
            return
        if window.is_trial:
            return  # the window after it is still open
        if window.setting != self.setting:
            return  # one of before a change
        self.level_bytes = LEVEL_FORGET * self.level_bytes + window.num_bytes
        self.level_seconds = LEVEL_FORGET * self.level_seconds + window.seconds
        self.level_cached = LEVEL_FORGET * self.level_cached + self.cached_bytes
        self.cached_bytes = 0
        self.add_to_block(window)
        trial = window.trial
        if trial and trial.speed and not trial.num_open:
            self.judge(trial, math.sqrt(trial.speed_before * window.speed))
        self.last_speed = window.speed

    def add_to_block(self, window: Window) -> None:
        """A few reads may be fast by chance, or because others paused: the best speed is that of some windows."""
        self.block_reads += window.num_reads
        self.block_bytes += window.num_bytes
        self.block_seconds += window.seconds
        if self.block_reads >= BEST_READS:
            self.best = max(self.best, self.block_bytes / self.block_seconds)
            self.block_reads, self.block_bytes, self.block_seconds = 0, 0, 0.0

    def judge(self, trial: Window, speed: float) -> None:
        """Compare a trial with the speed of the present setting around it; change the setting if it is clearly
        slower."""
        evidence = self.evidence.setdefault(trial.setting, Evidence())
        value = math.log(trial.speed / speed)
        if self.setting[0] == "buffered" and trial.setting[0] == "direct":
            # Direct reads would leave nothing in the page cache, which now serves a part beside the drive.
            value -= math.log1p(self.level_cached / self.level_bytes)
        evidence.add(value)
        if evidence.weight >= MIN_WEIGHT and evidence.lower > MARGIN:
            # What told for the new setting tells against the old one.
            against = Evidence(evidence.weight, -evidence.total, evidence.squares)
            self.evidence = {self.setting: against}
            self.level_bytes *= math.exp(evidence.mean)
            self.setting = trial.setting
            self.last_speed = 0.0
            self.counters.changes += 1
            self.window = self.plain_window(margin_reads=trial.margin_reads)

    # --- what was learned ---------------------------------------------------------------------------------------------

    def learned(self) -> dict[Setting, float]:
        """Bytes a second of the present setting and of those tried beside it."""
        with self.lock:
            speed = self.speed
            tried = {setting: speed * math.exp(e.mean) for setting, e in self.evidence.items() if e.weight >= 0.5}
            return {self.setting: speed, **tried} if speed else {}
