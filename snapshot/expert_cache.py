"""Step 2 of an expert's way: bytes -> slot. Per-layer slots in one arena, least recently used out, everything counted.

The forward pass asks for expert ids and gets matrices; whether they came from memory or from disk it never learns, so
the size of the cache changes speed and nothing else.
"""

import time
from collections import OrderedDict
from dataclasses import dataclass

import torch

from kernels.packing import grouped, pack_rows, packed_bytes, packed_view, row_blocks, view_weight
from snapshot.arena import Arena
from snapshot.expert_disk import PAGE


@dataclass(slots=True)
class CacheCounters:
    """Unique experts asked for by a layer in one chunk, and what they cost."""

    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    wait_seconds: float = 0.0

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


class ExpertCache:
    """`num_slots` slots for each sparse layer. One thread uses it."""

    def __init__(self, config, disk, num_slots, bits=16, exact=False):
        self.disk, self.num_slots, self.bits, self.exact = disk, num_slots, bits, exact
        layers = config.sparse_layers
        sizes = {layer: slot_bytes(config, disk, layer, bits) for layer in layers}
        self.arena = Arena(num_slots * sum(sizes.values()))
        self.staging = torch.empty(disk.max_expert_bytes, dtype=torch.uint8) if disk.packs(bits) else None
        # layer -> its free slots, each a (start, stop) of the arena
        self.free, at = {}, 0
        for layer, size in sizes.items():
            self.free[layer] = [(at + i * size, at + (i + 1) * size) for i in reversed(range(num_slots))]
            at += num_slots * size
        # layer -> expert: (slot, matrices), least recently used first
        self.resident = {layer: OrderedDict() for layer in layers}
        self.counters = CacheCounters()

    def reset_counters(self):
        """Count from here on; what is resident stays."""
        self.counters = CacheCounters()

    def batches(self, layer, experts):
        """Yield lists of (expert, (gate, up, down)) that cover ascending distinct `experts` in order.

        The matrices of a list are good until the next one is asked for. All come in one list when they have slots;
        otherwise half of the slots hold a list, and the others what is still to come. An expert that is still to come
        is not evicted while another can be; when all others are still to come, the one needed last goes.
        """
        size = self.num_slots if len(experts) <= self.num_slots else max(1, self.num_slots // 2)
        for start in range(0, len(experts), size):
            batch = experts[start : start + size]
            waiting = set(experts[start:])
            yield [(expert, self.get(layer, expert, waiting)) for expert in batch]

    def get(self, layer, expert, waiting):
        """The matrices of one expert, read when they are not there. Those `waiting` are wanted in this call."""
        resident = self.resident[layer]
        if expert in resident:
            self.counters.hits += 1
            resident.move_to_end(expert)
        else:
            self.counters.misses += 1
            slot = self.take_slot(layer, waiting)
            started = time.perf_counter()
            resident[expert] = slot, self.load(layer, expert, slot)
            self.counters.wait_seconds += time.perf_counter() - started
        return resident[expert][1]

    def take_slot(self, layer, waiting):
        """A free slot of the layer, or that of the expert to evict."""
        if self.free[layer]:
            return self.free[layer].pop()
        resident = self.resident[layer]
        victim = next((expert for expert in resident if expert not in waiting), None)
        if victim is None:
            victim = max(resident)
        return resident.pop(victim)[0]

    def load(self, layer, expert, slot):
        """Read one expert into a slot -> its (gate, up, down) as Weights over the arena."""
        region = self.arena.bytes[slice(*slot)]
        place = self.disk.places[layer, expert]
        try:
            if self.bits == 16 or place.is_packed:
                self.disk.read(layer, expert, memoryview(region.numpy()))
                matrices = tuple(as_weight(region, piece, self.exact) for piece in place.pieces)
            else:
                self.disk.read(layer, expert, memoryview(self.staging.numpy()))
                matrices = self.pack_into(region, [as_weight(self.staging, piece) for piece in place.pieces])
        except BaseException:
            self.free[layer].append(slot)  # a failed read costs no slot
            raise
        self.counters.bytes_read += sum(run.num_bytes for run in place.runs)
        return matrices

    def pack_into(self, region, stored):
        """Pack three matrices one after the other into a slot."""
        matrices, at, fmt = [], 0, grouped(self.bits)
        for weight in stored:
            matrices.append(packed_view(region[at:], fmt, weight.rows, weight.columns, self.exact))
            for start, stop in row_blocks(weight.rows, weight.columns):
                pack_rows(matrices[-1], start, weight.widen(start, stop))
            at += packed_bytes(fmt, weight.rows, weight.columns)
        return tuple(matrices)


def as_weight(buffer, piece, exact=False):
    """A matrix as stored, seen in the buffer it was read into."""
    p = piece
    return view_weight(buffer, p.format, p.rows, p.columns, p.at, p.scales_at, p.scale_dtype, exact)
