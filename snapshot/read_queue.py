"""Reader threads: what is asked for is read in that order, several at a time, while the asker goes on.

`fill(read)` does the work of one read. Threads start with the first reads and end with `close`. How long at least one
read was under way is counted: the drive's busy time.
"""

import threading
import time
from collections import deque


class Read:
    """One expert on its way into a slot. `value` is what `fill` made of it, `error` what kept it from that."""

    __slots__ = ("error", "is_over", "key", "slot", "value")

    def __init__(self, key, slot):
        self.key, self.slot = key, slot
        self.is_over, self.value, self.error = False, None, None


class ReadQueue:
    """At most `depth` reads at once. One thread asks; `fill` is called in others."""

    def __init__(self, fill, depth):
        self.fill, self.depth = fill, max(1, depth)
        self.change = threading.Condition()
        self.waiting, self.threads, self.is_closed = deque(), [], False
        self.under_way, self.busy_since, self.busy_before = 0, 0.0, 0.0

    def submit(self, read):
        """Put a read in line."""
        with self.change:
            self.waiting.append(read)
            if len(self.threads) < self.depth:
                self.threads.append(threading.Thread(target=self.work, daemon=True, name="expert reader"))
                self.threads[-1].start()
            self.change.notify_all()

    def cancel(self, read):
        """-> whether the read had not begun; then it never will."""
        with self.change:
            if read in self.waiting:
                self.waiting.remove(read)
                return True
        return False

    def wait(self, reads):
        """Block until one of `reads` is over -> all of them that are."""
        with self.change:
            while not (over := [read for read in reads if read.is_over]):
                self.change.wait()
        return over

    @property
    def busy_seconds(self):
        """How long at least one read was under way."""
        with self.change:
            return self.busy_before + (time.perf_counter() - self.busy_since if self.under_way else 0.0)

    def work(self):
        """A reader thread."""
        while (read := self.take()) is not None:
            try:
                read.value = self.fill(read)
            except BaseException as error:  # it belongs to whoever asked
                read.error = error
            with self.change:
                read.is_over = True
                self.under_way -= 1
                if not self.under_way:
                    self.busy_before += time.perf_counter() - self.busy_since
                self.change.notify_all()

    def take(self):
        """The next read, begun; None when the queue is closed."""
        with self.change:
            while not self.waiting and not self.is_closed:
                self.change.wait()
            if self.is_closed:
                return None
            if not self.under_way:
                self.busy_since = time.perf_counter()
            self.under_way += 1
            return self.waiting.popleft()

    def close(self):
        """What is under way ends, what waits is dropped. Reads after that start threads anew."""
        with self.change:
            self.is_closed = True
            self.change.notify_all()
        for thread in self.threads:
            thread.join()
        self.waiting.clear()
        self.threads, self.is_closed = [], False
