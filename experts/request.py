"""ExpertRequest: the experts that one layer needs for one chunk, yielded as they are cached or read."""

import time
from bisect import insort
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from experts.read_queue import ExpertRead

if TYPE_CHECKING:  # cache.py makes requests
    from experts.cache import ExpertCache, Matrices


class ExpertRequest:
    """A context manager: `ready` yields cached experts first, then those on disk as their reads end.

    An expert is not evicted between its request and its use while another can be. However the `with` block ends, no
    slot is lost.
    """

    def __init__(self, cache: "ExpertCache", layer: int, uses: dict[int, int], chunk_rows: int) -> None:
        self.cache = cache
        self.layer = layer
        self.experts = list(uses)
        if cache.guard:
            cache.adjust_to_memory(cache.guard)
        cache.policy_of[layer].record_uses(layer, uses, chunk_rows)
        self.reads = cache.claim_prefetches(layer, uses)
        in_flight = {read.key for read in self.reads}
        keys = [(layer, expert) for expert in self.experts]
        self.needed = {key for key in keys if key in cache.cached}  # cached and not used yet
        self.missing = deque(key for key in keys if key not in self.needed and key not in in_flight)
        cache.counters.hits += len(self.needed)
        cache.counters.misses += len(keys) - len(self.needed)
        cache.counters.rows += chunk_rows
        cache.counters.assignments += sum(uses.values())
        cache.prefetcher.record_misses(len(self.missing))

    def __enter__(self) -> "ExpertRequest":
        self.cache.open_request = self
        self.start_reads()
        return self

    def __exit__(self, *error: Any) -> None:
        """After an error reads may be in flight: each ends as a cached expert or a free slot."""
        self.cache.open_request = None
        for read in self.reads:
            self.cache.abandon(read)
        self.reads = []

    def ready(self, start: int, stop: int) -> Iterator[list[tuple[int, "Matrices"]]]:
        """Yield lists of (index, (gate, up, down)) that cover experts[start:stop], in any order, each once.

        The matrices of a list are valid until the next list is taken.
        """
        index = {(self.layer, expert): start + i for i, expert in enumerate(self.experts[start:stop])}
        while index:
            keys = sorted(self.needed & index.keys())
            if keys:
                yield [(index.pop(key), self.cache.cached[key][1]) for key in keys]
                self.needed.difference_update(keys)
                self.start_reads()
            elif self.reads:
                self.wait_for_reads()
            elif self.needed:
                self.evict_last()
            else:
                self.cache.wait_for_abandoned()
                self.start_reads()

    def start_reads(self) -> None:
        """Start to read what is missing, as far as there are slots, then prefetches."""
        while self.missing and (expert_slot := self.cache.allocate_expert_slot(self.layer, self.needed)):
            self.reads.append(ExpertRead(self.missing.popleft(), expert_slot))
            self.cache.queue.submit(self.reads[-1])
        if self.cache.predicted and not self.missing:
            self.cache.start_prefetches()

    def wait_for_reads(self) -> None:
        """Block until a read is done; raise the error of one that failed."""
        started = time.perf_counter()
        done = self.cache.queue.wait(self.reads)
        self.cache.counters.wait_seconds += time.perf_counter() - started
        for read in done:
            self.reads.remove(read)
            self.cache.admit(read)
            if not read.error:
                self.needed.add(read.key)
        for read in done:
            if read.error:
                raise read.error

    def evict_last(self) -> None:
        """All slots hold experts that are needed later: evict the one needed last, to be read again."""
        last = max(self.needed)
        self.needed.remove(last)
        self.cache.free_expert_slot(last, self.cache.evict(last))
        insort(self.missing, last)
        self.cache.counters.hits -= 1
        self.cache.counters.misses += 1
        self.start_reads()
