"""ReadQueue: reader threads that read experts into slots, several at a time, while the forward pass computes.

Reads that are needed now (urgent) go before prefetches, which never occupy all threads. Two clocks run: `busy` while at
least one read is in flight, `slack` while no urgent read is pending or in flight: drive time that prefetches may use.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from experts.policy import ExpertKey


@dataclass(slots=True, eq=False)
class ExpertRead:
    """One expert on its way into a slot."""

    key: ExpertKey
    expert_slot: tuple[int, int]
    is_urgent: bool = True
    is_done: bool = False
    value: Any = None  # the result of `fill`
    error: BaseException | None = None  # what it raised
    started_at: float | None = None
    ended_at: float = 0.0
    slack_at_start: float = 0.0  # of the queue's clock
    slack_at_end: float = 0.0


class Stopwatch:
    """Seconds during which a condition held."""

    def __init__(self, is_running: bool) -> None:
        self.total = 0.0
        self.since = time.perf_counter() if is_running else None

    def set(self, is_running: bool) -> None:
        """Set whether the condition holds from now on."""
        now = time.perf_counter()
        self.total += 0.0 if self.since is None else now - self.since
        self.since = now if is_running else None

    @property
    def seconds(self) -> float:
        return self.total + (0.0 if self.since is None else time.perf_counter() - self.since)


class ReadQueue:
    """At most `depth()` reads in flight, at most half of them prefetches.

    One thread submits; `fill(read)` does the work of one read in a reader thread. `depth` is asked before each read.
    Threads start with the first reads and end with `close`.
    """

    def __init__(self, fill: Callable[[ExpertRead], Any], depth: Callable[[], int]) -> None:
        self.fill = fill
        self.depth = depth
        self.changed = threading.Condition()
        self.urgent: deque[ExpertRead] = deque()
        self.prefetches: deque[ExpertRead] = deque()
        self.in_flight: list[ExpertRead] = []
        self.threads: list[threading.Thread] = []
        self.is_closed = False
        self.busy = Stopwatch(False)
        self.slack = Stopwatch(True)
        self.num_done = 0
        self.total_read_seconds = 0.0

    def submit(self, read: ExpertRead) -> None:
        with self.changed:
            (self.urgent if read.is_urgent else self.prefetches).append(read)
            self.notify()
            self.add_threads()

    def add_threads(self) -> None:
        """Start the threads that the reads need which may be in flight now. The lock is held."""
        num_reads = len(self.urgent) + len(self.prefetches) + len(self.in_flight)
        while len(self.threads) < min(self.depth(), num_reads) and not self.is_closed:
            self.threads.append(threading.Thread(target=self.run_reader, daemon=True, name="expert reader"))
            self.threads[-1].start()

    def promote(self, read: ExpertRead) -> None:
        """Make a prefetch urgent."""
        with self.changed:
            read.is_urgent = True
            if read in self.prefetches:
                self.prefetches.remove(read)
                self.urgent.append(read)
            self.notify()

    def cancel(self, read: ExpertRead) -> bool:
        """Remove a read that has not started; False if it has."""
        with self.changed:
            for pending in (self.urgent, self.prefetches):
                if read in pending:
                    pending.remove(read)
                    self.notify()
                    return True
        return False

    def wait(self, reads: Sequence[ExpertRead]) -> list[ExpertRead]:
        """Block until one of `reads` is done -> all of them that are."""
        with self.changed:
            while not (done := [read for read in reads if read.is_done]):
                self.changed.wait()
        return done

    def read_times(self, read: ExpertRead) -> tuple[float, float]:
        """(seconds from the start of a read to its end or now, slack seconds among them); zeros before it started."""
        with self.changed:
            if read.started_at is None:
                return 0.0, 0.0
            if read.is_done:
                return read.ended_at - read.started_at, read.slack_at_end - read.slack_at_start
            return time.perf_counter() - read.started_at, self.slack.seconds - read.slack_at_start

    @property
    def busy_seconds(self) -> float:
        """Seconds during which at least one read was in flight."""
        with self.changed:
            return self.busy.seconds

    def notify(self) -> None:
        """Set the clocks and wake all waiting threads after a change. The lock is held."""
        self.busy.set(bool(self.in_flight))
        self.slack.set(not self.urgent and not any(read.is_urgent for read in self.in_flight))
        self.changed.notify_all()

    def run_reader(self) -> None:
        """Body of a reader thread."""
        while (read := self.start_next()) is not None:
            try:
                read.value = self.fill(read)
            except BaseException as error:  # raised in the thread that waits for the read
                read.error = error
            with self.changed:
                self.in_flight.remove(read)
                read.ended_at = time.perf_counter()
                read.slack_at_end = self.slack.seconds
                read.is_done = True
                self.num_done += 1
                self.total_read_seconds += read.ended_at - read.started_at  # type: ignore[operator]  # it started
                self.notify()
                if self.urgent:
                    self.add_threads()  # there may be more reads in flight than before

    @property
    def num_prefetches_in_flight(self) -> int:
        return sum(not read.is_urgent for read in self.in_flight)

    def start_next(self) -> ExpertRead | None:
        """Wait for the next read and start it; None when the queue is closed."""
        with self.changed:
            while not self.is_closed:
                depth = max(1, self.depth())
                has_room = len(self.in_flight) < depth
                if has_room and self.urgent:
                    read = self.urgent.popleft()
                elif has_room and self.prefetches and self.num_prefetches_in_flight < max(1, depth // 2):
                    read = self.prefetches.popleft()
                else:
                    self.changed.wait()
                    continue
                self.in_flight.append(read)
                self.notify()
                read.started_at = time.perf_counter()
                read.slack_at_start = self.slack.seconds
                return read
            return None

    def close(self) -> None:
        """Finish the reads in flight and drop the pending ones. A later submit starts threads again."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()
        for thread in self.threads:
            thread.join()
        self.urgent.clear()
        self.prefetches.clear()
        self.threads = []
        self.is_closed = False
