"""Step 2 of an expert's way: bytes -> slot. Whose slot is taken says the policy; everything is counted.

The forward pass asks for expert ids and gets matrices; whether they came from memory or from disk it never learns, so
the size of the cache changes speed and nothing else. What is missing is read by other threads, all of it at once, while
what is there is computed with; behind that go the reads of what the next layer is likely to ask for.
"""

import threading
import time
from bisect import insort
from collections import deque
from dataclasses import dataclass

import torch

from experts.policy import EvictionPolicy, LruPolicy
from experts.prefetch import PrefetchController
from experts.read_queue import ExpertRead, ReadQueue
from experts.slots import ExpertSlotPool
from kernels.formats import integer_format
from kernels.quantize import quantize_rows, row_blocks
from kernels.weight import packed_bytes, packed_view, view_weight


@dataclass(slots=True)
class CacheCounters:
    """Unique experts asked for by a layer in one chunk, and what they cost."""

    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    wait_seconds: float = 0.0  # with nothing to compute
    ahead_useful_bytes: int = 0  # of bytes_read, those read before they were asked for
    ahead_wasted_bytes: int = 0  # of bytes_read, those that then were not
    evictions: int = 0  # experts given up for others, or for memory

    @property
    def hit_rate(self):
        """Share of hits, 0 to 1; 0 before the first request."""
        return self.hits / max(1, self.hits + self.misses)


# Reads come in bursts with gaps between, unlike those a drive is measured with: one in flight would leave it idle.
MIN_DEPTH = 2
GUESS_SHARE = 4  # one slot in so many may hold what was not asked for yet
ROOM_TO_GROW = 3  # slots that must be spare before one that was given back is used again


class ExpertCache:
    """The slots of `classes` (SlotClasses). One thread asks; reader threads fill slots.

    floor: experts that each layer keeps. tier: full, or reference: least recently used out, reading and computing by
    turns, nothing guessed. guard: tells how much memory may still be taken, see MemoryGuard; None: as much as planned.
    """

    def __init__(self, config, disk, classes, floor, bits=16, exact=False, tier="full", lookahead="auto", guard=None):
        self.disk, self.bits, self.exact, self.guard = disk, bits, exact, guard
        self.takes_turns = tier == "reference"
        policy = LruPolicy if self.takes_turns else EvictionPolicy
        self.pools = [ExpertSlotPool(slots) for slots in classes]
        self.policies = [policy(pool.layers, config.num_experts, floor) for pool in self.pools]
        self.home = {layer: i for i, pool in enumerate(self.pools) for layer in pool.layers}
        self.staging = torch.empty(disk.max_expert_bytes, dtype=torch.uint8) if disk.packs(bits) else None
        self.packing = threading.Lock()  # of the one staging buffer
        self.resident = {}  # (layer, expert): (slot, matrices)
        self.guesses = {}  # (layer, expert): Read, not asked for yet
        self.leaving = {}  # the same, of reads under way that turned out not to be needed
        self.planned = deque()  # (key, rows): guesses whose reads were not begun
        self.current = None  # the Request that is open
        self.lookahead = PrefetchController("0" if self.takes_turns else lookahead, len(self.home))
        self.queue = ReadQueue(self.fill, max(MIN_DEPTH, disk.depth))
        self.is_closed = False
        self.populating = threading.Thread(target=self.populate, daemon=True, name="expert slots")
        self.populating.start()
        self.reset_counters()

    def reset_counters(self):
        """Count from here on; what is resident stays."""
        self.counters, self.busy_before = CacheCounters(), self.queue.busy_seconds

    @property
    def busy_seconds(self):
        """How long the drive had something to read, since the counters were reset."""
        return self.queue.busy_seconds - self.busy_before

    @property
    def num_bytes(self):
        """Bytes of the slots there are, without those that the guard gave back."""
        return sum(pool.num_left * pool.slot_bytes for pool in self.pools)

    def request(self, layer, uses, chunk_rows=1):
        """A layer asks: uses {expert, ascending: how many of the chunk's rows chose it} -> a Request; the reads of what
        is missing begin."""
        return ExpertRequest(self, layer, uses, chunk_rows)

    # --- what is learned over time ---

    def counts(self):
        """{(layer, expert): aged uses}."""
        return {key: uses for policy in self.policies for key, uses in policy.counts().items()}

    def prime(self, counts):
        """Begin with the counts of another time."""
        for i, policy in enumerate(self.policies):
            policy.prime({key: uses for key, uses in counts.items() if self.home[key[0]] == i})

    def retract_uses(self, rejected: list[tuple[int, dict[int, int]]]) -> None:
        """Of the last request of each layer, {expert: rows} were draft tokens that were rejected: no uses."""
        for layer, uses in rejected:
            self.policies[self.home[layer]].retract_uses(layer, uses)

    # --- slots ---

    def take_slot(self, layer, needed, below=None):
        """A slot for an expert of a layer: a free one, or that of the expert which the policy gives up, not one of
        `needed` and none that scores `below` or more. None without any."""
        pool, policy = self.pools[self.home[layer]], self.policies[self.home[layer]]
        if pool.free:
            return pool.free.pop()
        victim = policy.victim(needed, layer)
        if victim is None or (below is not None and policy.score(victim) >= below):
            return None
        return self.drop(victim)

    def drop(self, key):
        """An expert is resident no more -> its slot."""
        self.policies[self.home[key[0]]].evict(key)
        self.counters.evictions += 1
        return self.resident.pop(key)[0]

    def free_slot(self, key, slot):
        self.pools[self.home[key[0]]].free.append(slot)

    def settle(self, read):
        """What a read that is over leaves behind: an expert, or a free slot."""
        if read.error:
            self.free_slot(read.key, read.slot)
            return
        self.resident[read.key] = read.slot, read.value
        self.policies[self.home[read.key[0]]].admit(read.key)
        self.counters.bytes_read += self.disk.places[read.key].stored_bytes

    def watch_memory(self):
        """Give slots back when memory is short, one expert in each layer stays possible; take them back one by one."""
        spare = self.guard.spare_bytes()
        if spare is None:
            return
        for pool, policy in zip(self.pools, self.policies, strict=True):
            while spare < 0 and pool.num_left > len(pool.layers):
                policy.floor = min(policy.floor, (pool.num_left - 1) // len(pool.layers))
                victim = None if pool.free else policy.victim(())
                if not pool.free and victim is None:
                    break  # the others are being read into; later, then
                pool.give_back(pool.free.pop() if pool.free else self.drop(victim))
                spare += pool.slot_bytes
            if spare > ROOM_TO_GROW * pool.slot_bytes and pool.take_back():
                spare -= ROOM_TO_GROW * pool.slot_bytes

    def check(self):
        """AssertionError if a slot was lost or is used twice; for tests, between requests."""
        for i, pool in enumerate(self.pools):
            slots = [*pool.free, *pool.given_back]
            slots += [slot for key, (slot, _) in self.resident.items() if self.home[key[0]] == i]
            coming = [*self.guesses.values(), *self.leaving.values()]
            slots += [read.slot for read in coming if self.home[read.key[0]] == i]
            assert len(slots) == len(set(slots)) == pool.num_slots, f"{len(slots)} slots of {pool.num_slots}"

    # --- guesses ---

    def look_ahead(self, layer, uses):
        """What a layer may ask for next, {expert, the likeliest first: rows}, is read once all that is needed now is
        asked for. What an earlier guess said holds no longer."""
        for key, read in list(self.guesses.items()):
            if (key[0] != layer or key[1] not in uses) and self.queue.cancel(read):
                self.free_slot(key, read.slot)
                del self.guesses[key]
        self.planned = deque(((layer, expert), rows) for expert, rows in uses.items())
        if not (self.current and self.current.missing):
            self.make_guesses()

    def make_guesses(self):
        """Begin planned reads, as far as there are slots."""
        needed = self.current.needed if self.current else ()
        while self.planned and self.guess(*self.planned[0], needed):
            self.planned.popleft()

    def guess(self, key, rows, needed):
        """Begin to read an expert that a layer may ask for, with so many rows -> whether there may be more guesses."""
        if key in self.resident or key in self.guesses or key in self.leaving:
            return True
        pool, policy = self.pools[self.home[key[0]]], self.policies[self.home[key[0]]]
        if len(self.guesses) >= max(1, pool.num_slots // GUESS_SHARE):
            return False
        below = self.lookahead.confidence * policy.score(key, rows)
        slot = self.take_slot(key[0], needed, below)
        if slot is None:
            return False
        self.guesses[key] = ExpertRead(key, slot, is_urgent=False)
        self.queue.submit(self.guesses[key])
        return True

    def resolve(self, layer, uses):
        """A layer asks: what was guessed and is there becomes resident -> reads of it that are still on their way.
        Wrong guesses are dropped, those under way when they are over."""
        for read in self.guesses.values():
            self.note(read, read.key[0] == layer and read.key[1] in uses)
        reads, wanted = [*self.guesses.values(), *self.leaving.values()], []
        self.guesses, self.leaving = {}, {}
        self.planned.clear()
        for read in reads:
            if read.key[0] != layer or read.key[1] not in uses:
                self.leave(read)
            elif not self.settled(read):
                self.queue.promote(read)
                wanted.append(read)
        return wanted

    def settled(self, read):
        """Whether a read is over; then it is settled."""
        if read.is_over:
            self.settle(read)
        return read.is_over

    def leave(self, read):
        """A read is no longer wanted."""
        if self.queue.cancel(read):
            self.free_slot(read.key, read.slot)
        elif not self.settled(read):
            self.leaving[read.key] = read

    def wait_for_leaving(self):
        """Block until a slot comes free of a read that is not needed."""
        assert self.leaving, "an expert is missing, and no slot will ever come free"
        for read in self.queue.wait(list(self.leaving.values())):
            self.settle(self.leaving.pop(read.key))

    def note(self, read, is_right):
        """Count a guess, and tell whether it paid: drive time that was free, or not, in seconds at the drive's pace."""
        num_bytes = self.disk.places[read.key].stored_bytes
        seconds, free = self.queue.times(read)
        if not seconds:
            return
        if is_right:
            self.counters.ahead_useful_bytes += num_bytes
        else:
            self.counters.ahead_wasted_bytes += num_bytes
        # Several reads share the drive, so a read's own time says little: its share of a read at the usual pace does.
        pace = self.queue.busy_seconds / max(1, self.queue.num_over)
        took = seconds if read.is_over else max(seconds, self.queue.mean_seconds)
        self.lookahead.note(is_right, pace * (free if is_right else seconds - free) / took)

    # --- bytes ---

    def fill(self, read):
        """Read one expert into its slot -> (gate, up, down) as Weights over the arena. Called in reader threads."""
        layer, expert = read.key
        region, place = self.pools[self.home[layer]].region(read.slot), self.disk.places[layer, expert]
        if self.bits == 16 or place.is_packed:
            self.disk.read(layer, expert, memoryview(region.numpy()))
            return tuple(as_weight(region, piece, self.exact) for piece in place.pieces)
        with self.packing:
            self.disk.read(layer, expert, memoryview(self.staging.numpy()))
            return self.pack_into(region, [as_weight(self.staging, piece) for piece in place.pieces])

    def pack_into(self, region, stored):
        """Pack three matrices one after the other into a slot."""
        matrices, at, fmt = [], 0, integer_format(self.bits)
        for weight in stored:
            matrices.append(packed_view(region[at:], fmt, weight.rows, weight.columns, self.exact))
            for start, stop in row_blocks(weight.rows, weight.columns):
                quantize_rows(matrices[-1], start, weight.dequantize(start, stop))
            at += packed_bytes(fmt, weight.rows, weight.columns)
        return tuple(matrices)

    def populate(self):
        for pool in self.pools:
            pool.populate(lambda: self.is_closed)

    def close(self):
        """End the threads."""
        self.is_closed = True
        self.populating.join()
        self.queue.close()


class ExpertRequest:
    """What one layer needs for one chunk. `ready` gives the experts as they are there, those on disk as they land.

    An expert is not evicted between asking and its use, while another can be. Leave the `with` block in any way: slots
    are never lost.
    """

    def __init__(self, cache, layer, uses, chunk_rows):
        self.cache, self.layer, self.experts = cache, layer, list(uses)
        if cache.guard:
            cache.watch_memory()
        cache.policies[cache.home[layer]].used(layer, uses, chunk_rows)
        self.reads = cache.resolve(layer, uses)
        coming = {read.key for read in self.reads}
        keys = [(layer, expert) for expert in self.experts]
        self.needed = {key for key in keys if key in cache.resident}  # there, and not used yet
        self.missing = deque(key for key in keys if key not in self.needed and key not in coming)
        cache.counters.hits += len(self.needed)
        cache.counters.misses += len(keys) - len(self.needed)
        cache.lookahead.note_misses(len(self.missing))

    def __enter__(self):
        self.cache.current = self
        self.ask()
        return self

    def __exit__(self, *error):
        """After an error reads may be under way: they end, and leave a resident expert or a free slot."""
        self.cache.current = None
        for read in self.reads:
            self.cache.leave(read)
        self.reads = []

    def ready(self, start, stop):
        """Yield lists of (index, (gate, up, down)) that cover experts[start:stop], in any order, each once.

        The matrices of a list are good until the next one is asked for.
        """
        index = {(self.layer, expert): start + i for i, expert in enumerate(self.experts[start:stop])}
        while index:
            while self.reads and self.cache.takes_turns:
                self.land()
            there = sorted(self.needed & index.keys())
            if there:
                yield [(index.pop(key), self.cache.resident[key][1]) for key in there]
                self.needed.difference_update(there)
                self.ask()
            elif self.reads:
                self.land()
            elif self.needed:
                self.give_up_last()
            else:
                self.cache.wait_for_leaving()
                self.ask()

    def ask(self):
        """Begin to read what is missing, as far as there are slots, and then what may be missing next."""
        while self.missing and (slot := self.cache.take_slot(self.layer, self.needed)):
            self.reads.append(ExpertRead(self.missing.popleft(), slot))
            self.cache.queue.submit(self.reads[-1])
        if not self.missing:
            self.cache.make_guesses()

    def land(self):
        """Wait for the next reads to end; the error of one that failed goes on."""
        started = time.perf_counter()
        over = self.cache.queue.wait(self.reads)
        self.cache.counters.wait_seconds += time.perf_counter() - started
        for read in over:
            self.reads.remove(read)
            self.cache.settle(read)
            if not read.error:
                self.needed.add(read.key)
        for read in over:
            if read.error:
                raise read.error

    def give_up_last(self):
        """All slots hold experts that are needed later: the one needed last goes, and is read again."""
        last = max(self.needed)
        self.needed.remove(last)
        self.cache.free_slot(last, self.cache.drop(last))
        insort(self.missing, last)
        self.cache.counters.hits -= 1
        self.cache.counters.misses += 1
        self.ask()


def as_weight(buffer, piece, exact=False):
    """A matrix as stored, seen in the buffer it was read into."""
    p = piece
    return view_weight(buffer, p.format, p.rows, p.columns, p.at, p.scales_at, p.scale_dtype, exact, p.within)
