"""FileReader threads: what is asked for is read in that order, several at a time, while the asker goes on.

`fill(read)` does the work of one read. Threads start with the first reads and end with `close`. What is needed now goes
before what may be needed later, and the latter never takes all threads. Two clocks run: how long at least one read was
under way, which is the drive's busy time; and how long nothing was needed now, time that guesses have for free.
"""

import threading
import time
from collections import deque


class ExpertRead:
    """One expert on its way into a slot. `value` is what `fill` made of it, `error` what kept it from that.

    `seconds` it took, `free_seconds` of them while nothing else was needed: up to now, if it is under way.
    """

    __slots__ = ("began", "ended", "error", "free_before", "free_until", "is_over", "is_urgent", "key", "slot", "value")

    def __init__(self, key, slot, is_urgent=True):
        self.key, self.slot, self.is_urgent = key, slot, is_urgent
        self.is_over, self.value, self.error = False, None, None
        self.began = self.ended = self.free_before = self.free_until = None


class Stopwatch:
    """Seconds during which something held."""

    def __init__(self, is_running):
        self.before, self.since = 0.0, time.perf_counter() if is_running else None

    def set(self, is_running):
        """From now on it holds, or it does not."""
        if is_running != (self.since is not None):
            now = time.perf_counter()
            if is_running:
                self.since = now
            else:
                self.before, self.since = self.before + now - self.since, None

    @property
    def seconds(self):
        return self.before + (0.0 if self.since is None else time.perf_counter() - self.since)


class ReadQueue:
    """At most `depth` reads at once, at most half of them guesses. One thread asks; `fill` is called in others."""

    def __init__(self, fill, depth):
        self.fill, self.depth = fill, max(1, depth)
        self.guess_depth = max(1, self.depth // 2)
        self.change = threading.Condition()
        self.urgent, self.guesses = deque(), deque()  # that wait
        self.under_way = []
        self.threads, self.is_closed = [], False
        self.busy, self.free = Stopwatch(False), Stopwatch(True)
        self.num_over, self.seconds_over = 0, 0.0  # reads, and what each took together

    def submit(self, read):
        """Put a read in line."""
        with self.change:
            (self.urgent if read.is_urgent else self.guesses).append(read)
            self.tell()
            if len(self.threads) < self.depth:
                self.threads.append(threading.Thread(target=self.work, daemon=True, name="expert reader"))
                self.threads[-1].start()

    def promote(self, read):
        """A guess is needed now."""
        with self.change:
            read.is_urgent = True
            if read in self.guesses:
                self.guesses.remove(read)
                self.urgent.append(read)
            self.tell()

    def cancel(self, read):
        """-> whether the read had not begun; then it never will."""
        with self.change:
            for waiting in (self.urgent, self.guesses):
                if read in waiting:
                    waiting.remove(read)
                    self.tell()
                    return True
        return False

    def wait(self, reads):
        """Block until one of `reads` is over -> all of them that are."""
        with self.change:
            while not (over := [read for read in reads if read.is_over]):
                self.change.wait()
        return over

    def times(self, read):
        """-> (seconds since a read began, those of them that were free), up to its end; zeros before it began."""
        with self.change:
            if read.began is None:
                return 0.0, 0.0
            if read.is_over:
                return read.ended - read.began, read.free_until - read.free_before
            return time.perf_counter() - read.began, self.free.seconds - read.free_before

    @property
    def mean_seconds(self):
        """What a read takes."""
        return self.seconds_over / max(1, self.num_over)

    @property
    def busy_seconds(self):
        """How long at least one read was under way."""
        with self.change:
            return self.busy.seconds

    def tell(self):
        """Something changed: set the clocks, wake who waits. The lock is held."""
        self.busy.set(bool(self.under_way))
        self.free.set(not self.urgent and not any(read.is_urgent for read in self.under_way))
        self.change.notify_all()

    def work(self):
        """A reader thread."""
        while (read := self.take()) is not None:
            try:
                read.value = self.fill(read)
            except BaseException as error:  # it belongs to whoever asked
                read.error = error
            with self.change:
                self.under_way.remove(read)
                read.ended, read.free_until, read.is_over = time.perf_counter(), self.free.seconds, True
                self.num_over += 1
                self.seconds_over += read.ended - read.began
                self.tell()

    def take(self):
        """The next read, begun; None when the queue is closed."""
        with self.change:
            while not self.is_closed:
                if self.urgent:
                    read = self.urgent.popleft()
                elif self.guesses and sum(not read.is_urgent for read in self.under_way) < self.guess_depth:
                    read = self.guesses.popleft()
                else:
                    self.change.wait()
                    continue
                self.under_way.append(read)
                self.tell()
                read.began, read.free_before = time.perf_counter(), self.free.seconds
                return read
            return None

    def close(self):
        """What is under way ends, what waits is dropped. Reads after that start threads anew."""
        with self.change:
            self.is_closed = True
            self.change.notify_all()
        for thread in self.threads:
            thread.join()
        self.urgent.clear()
        self.guesses.clear()
        self.threads, self.is_closed = [], False
