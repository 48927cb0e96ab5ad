"""Step 2 of an expert's way: bytes -> slot. Per-layer slots in one arena, least recently used out, everything counted.

The forward pass asks for expert ids and gets matrices; whether they came from memory or from disk it never learns, so
the size of the cache changes speed and nothing else. What is missing is read by other threads, all of it at once, while
what is there is computed with.
"""

import threading
import time
from bisect import insort
from collections import OrderedDict, deque
from dataclasses import dataclass

import torch

from kernels.packing import grouped, pack_rows, packed_bytes, packed_view, row_blocks, view_weight
from snapshot.arena import Arena
from snapshot.expert_disk import PAGE
from snapshot.read_queue import Read, ReadQueue


@dataclass(slots=True)
class CacheCounters:
    """Unique experts asked for by a layer in one chunk, and what they cost."""

    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    wait_seconds: float = 0.0  # with nothing to compute

    @property
    def hit_rate(self):
        """Share of hits, 0 to 1; 0 before the first request."""
        return self.hits / max(1, self.hits + self.misses)


def slot_bytes(config, disk, layer, bits):
    """Bytes of one slot of a layer, whole pages: its experts as stored, or those in float formats packed at load."""
    places = [disk.places[layer, expert] for expert in range(config.num_experts)]
    size = max((place.num_bytes for place in places if bits == 16 or place.is_packed), default=0)
    if bits < 16 and not all(place.is_packed for place in places):
        D, W, fmt = config.hidden_size, config.moe_intermediate_size, grouped(bits)
        size = max(size, 2 * packed_bytes(fmt, W, D) + packed_bytes(fmt, D, W))
    return -(-size // PAGE) * PAGE


# Reads come in bursts with gaps between, unlike those a drive is measured with: one in flight would leave it idle.
MIN_DEPTH = 2


class ExpertCache:
    """`num_slots` slots for each sparse layer. One thread asks; reader threads fill slots."""

    def __init__(self, config, disk, num_slots, bits=16, exact=False):
        self.disk, self.bits, self.exact = disk, bits, exact
        layers = config.sparse_layers
        sizes = {layer: slot_bytes(config, disk, layer, bits) for layer in layers}
        self.arena = Arena(num_slots * sum(sizes.values()))
        self.staging = torch.empty(disk.max_expert_bytes, dtype=torch.uint8) if disk.packs(bits) else None
        self.packing = threading.Lock()  # of the one staging buffer
        # layer -> its free slots, each a (start, stop) of the arena
        self.free, at = {}, 0
        for layer, size in sizes.items():
            self.free[layer] = [(at + i * size, at + (i + 1) * size) for i in reversed(range(num_slots))]
            at += num_slots * size
        # layer -> expert: (slot, matrices), least recently used first
        self.resident = {layer: OrderedDict() for layer in layers}
        self.queue = ReadQueue(self.fill, max(MIN_DEPTH, disk.depth))
        self.reset_counters()

    def reset_counters(self):
        """Count from here on; what is resident stays."""
        self.counters, self.busy_before = CacheCounters(), self.queue.busy_seconds

    @property
    def busy_seconds(self):
        """How long the drive had something to read, since the counters were reset."""
        return self.queue.busy_seconds - self.busy_before

    def request(self, layer, experts):
        """Ask for ascending distinct `experts` of a layer -> a Request; the reads of what is missing begin."""
        return Request(self, layer, experts)

    def take_slot(self, layer, needed):
        """A free slot of the layer, or that of the expert used longest ago and not `needed`; None without any."""
        if self.free[layer]:
            return self.free[layer].pop()
        resident = self.resident[layer]
        victim = next((expert for expert in resident if expert not in needed), None)
        return None if victim is None else resident.pop(victim)[0]

    def fill(self, read):
        """Read one expert into its slot -> (gate, up, down) as Weights over the arena. Called in reader threads."""
        layer, expert = read.key
        region, place = self.arena.bytes[slice(*read.slot)], self.disk.places[layer, expert]
        if self.bits == 16 or place.is_packed:
            self.disk.read(layer, expert, memoryview(region.numpy()))
            return tuple(as_weight(region, piece, self.exact) for piece in place.pieces)
        with self.packing:
            self.disk.read(layer, expert, memoryview(self.staging.numpy()))
            return self.pack_into(region, [as_weight(self.staging, piece) for piece in place.pieces])

    def close(self):
        """End the reader threads."""
        self.queue.close()

    def pack_into(self, region, stored):
        """Pack three matrices one after the other into a slot."""
        matrices, at, fmt = [], 0, grouped(self.bits)
        for weight in stored:
            matrices.append(packed_view(region[at:], fmt, weight.rows, weight.columns, self.exact))
            for start, stop in row_blocks(weight.rows, weight.columns):
                pack_rows(matrices[-1], start, weight.widen(start, stop))
            at += packed_bytes(fmt, weight.rows, weight.columns)
        return tuple(matrices)


class Request:
    """What one layer needs for one chunk. `ready` gives the experts as they are there, those on disk as they land.

    An expert is not evicted between asking and its use, while another can be. Leave the `with` block in any way: slots
    are never lost.
    """

    def __init__(self, cache, layer, experts):
        self.cache, self.layer, self.experts = cache, layer, experts
        self.resident = cache.resident[layer]
        self.needed = {expert for expert in experts if expert in self.resident}  # there, and not used yet
        self.missing = deque(expert for expert in experts if expert not in self.needed)
        self.reads = []
        for expert in self.needed:
            self.resident.move_to_end(expert)
        cache.counters.hits += len(self.needed)
        cache.counters.misses += len(self.missing)

    def __enter__(self):
        self.ask()
        return self

    def __exit__(self, *error):
        """After an error reads may be under way: they end, and leave a resident expert or a free slot."""
        for read in self.reads:
            if self.cache.queue.cancel(read):
                self.cache.free[self.layer].append(read.slot)
            else:
                self.cache.queue.wait([read])
                self.settle(read)
        self.reads = []

    def ready(self, start, stop):
        """Yield lists of (index, (gate, up, down)) that cover experts[start:stop], in any order, each once.

        The matrices of a list are good until the next one is asked for.
        """
        index = {expert: start + i for i, expert in enumerate(self.experts[start:stop])}
        while index:
            there = sorted(self.needed & index.keys())
            if there:
                yield [(index.pop(expert), self.resident[expert][1]) for expert in there]
                self.needed.difference_update(there)
                self.ask()
            elif self.reads:
                self.land()
            else:
                self.give_up_last()

    def ask(self):
        """Begin to read what is missing, as far as there are slots."""
        while self.missing and (slot := self.cache.take_slot(self.layer, self.needed)):
            self.reads.append(Read((self.layer, self.missing.popleft()), slot))
            self.cache.queue.submit(self.reads[-1])

    def land(self):
        """Wait for the next reads to end; the error of one that failed goes on."""
        started = time.perf_counter()
        over = self.cache.queue.wait(self.reads)
        self.cache.counters.wait_seconds += time.perf_counter() - started
        for read in over:
            self.reads.remove(read)
            self.settle(read)
        for read in over:
            if read.error:
                raise read.error

    def settle(self, read):
        """What a read that is over leaves behind: an expert, or a free slot."""
        if read.error:
            self.cache.free[self.layer].append(read.slot)
            return
        expert = read.key[1]
        self.resident[expert] = read.slot, read.value
        self.needed.add(expert)
        self.cache.counters.bytes_read += self.cache.disk.places[read.key].stored_bytes

    def give_up_last(self):
        """All slots hold experts that are needed later: the one needed last goes, and is read again."""
        last = max(self.needed)
        self.needed.remove(last)
        self.resident.move_to_end(last, last=False)
        insort(self.missing, last)
        self.cache.counters.hits -= 1
        self.cache.counters.misses += 1
        self.ask()


def as_weight(buffer, piece, exact=False):
    """A matrix as stored, seen in the buffer it was read into."""
    p = piece
    return view_weight(buffer, p.format, p.rows, p.columns, p.at, p.scales_at, p.scale_dtype, exact)
