"""ExpertCache: the expert slots in memory, and their hits, misses, evictions and prefetches.

The forward pass requests expert ids and gets matrices; it never learns whether they came from memory or from disk, so
the size of the cache changes speed and nothing else. Misses are read by reader threads, all at once, while cached
experts are computed; prefetches for the next layer queue behind them.
"""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from experts.disk import ExpertDisk
from experts.policy import EvictionPolicy, ExpertKey, Keys
from experts.prefetch import PrefetchController
from experts.read_queue import ExpertRead, ReadQueue
from experts.request import ExpertRequest
from experts.slots import ExpertSlot, ExpertSlotPool, ExpertSlots
from kernels.formats import integer_format
from kernels.quantize import quantize_rows, row_blocks
from kernels.weight import Weight, packed_bytes, packed_view
from machine.memory import MemoryGuard
from snapshot.config import ModelConfig

MIN_DEPTH = 2  # reads in flight: they come in bursts, and one alone would leave the drive idle in between
PREFETCH_DIVISOR = 4  # at most num_slots / 4 slots hold prefetches
SLOTS_TO_RECLAIM = 3  # that memory must have room for before one released slot is reclaimed

Matrices = tuple[Weight, ...]  # gate, up, down


@dataclass(slots=True)
class CacheCounters:
    """Distinct experts that a layer requested for one chunk, and what they cost."""

    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    wait_seconds: float = 0.0  # for reads, with nothing to compute
    useful_prefetch_bytes: int = 0  # of bytes_read
    wasted_prefetch_bytes: int = 0  # of bytes_read: read but not requested
    evictions: int = 0
    rows: int = 0  # token rows of the requests
    assignments: int = 0  # of token rows to experts: rows times the active experts, fewer with TOPP

    @property
    def hit_rate(self) -> float:
        """Share of hits, 0 to 1; 0 before the first request."""
        return self.hits / max(1, self.hits + self.misses)

    @property
    def active_experts(self) -> float:
        """Experts that a token row is assigned to in a layer, on average."""
        return self.assignments / max(1, self.rows)


class ExpertCache:
    """One thread requests; reader threads fill slots.

    slots: ExpertSlots of each size. floor: experts that each layer keeps. bits: of experts in float formats, which are
    quantized at load below 16. exact: see Weight. prefetch: the mode of PrefetchController. guard: None
    never releases slots.
    """

    def __init__(
        self,
        config: ModelConfig,
        disk: ExpertDisk,
        slots: Sequence[ExpertSlots],
        floor: int,
        bits: int = 16,
        exact: bool = False,
        prefetch: str = "auto",
        guard: MemoryGuard | None = None,
    ) -> None:
        self.disk = disk
        self.bits = bits
        self.exact = exact
        self.guard = guard
        self.pools = [ExpertSlotPool(of_size) for of_size in slots]
        self.policies = [EvictionPolicy(pool.layers, config.num_experts, floor) for pool in self.pools]
        self.pool_of = {layer: pool for pool in self.pools for layer in pool.layers}
        self.policy_of = {layer: policy for policy in self.policies for layer in policy.layers}
        self.staging = torch.empty(disk.max_expert_bytes, dtype=torch.uint8) if disk.quantizes(bits) else None
        self.staging_lock = threading.Lock()
        self.cached: dict[ExpertKey, tuple[ExpertSlot, Matrices]] = {}
        self.predicted: deque[tuple[ExpertKey, int]] = deque()  # (expert, rows) to prefetch, not started
        self.prefetches: dict[ExpertKey, ExpertRead] = {}  # started, not requested yet
        self.abandoned: dict[ExpertKey, ExpertRead] = {}  # in flight, no longer wanted
        self.open_request: ExpertRequest | None = None
        self.prefetcher = PrefetchController(prefetch, len(self.pool_of))
        self.queue = ReadQueue(self.read_into_slot, lambda: max(MIN_DEPTH, disk.drives.queue_depth))
        self.is_closed = False
        self.populate_thread = threading.Thread(target=self.populate, daemon=True, name="expert slots")
        self.populate_thread.start()
        self.reset_counters()

    def reset_counters(self) -> None:
        """Restart the counters; cached experts stay."""
        self.counters = CacheCounters()
        self.busy_before = self.queue.busy_seconds

    @property
    def busy_seconds(self) -> float:
        """Seconds during which the drive had something to read, since the counters were reset."""
        return self.queue.busy_seconds - self.busy_before

    @property
    def num_bytes(self) -> int:
        """Bytes of the slots that are not released."""
        return sum(pool.num_usable * pool.slot_bytes for pool in self.pools)

    def request(self, layer: int, uses: dict[int, int], chunk_rows: int = 1) -> ExpertRequest:
        """Request the experts of a layer and start to read the misses. uses {expert, ascending: how many of the chunk's
        rows chose it}."""
        return ExpertRequest(self, layer, uses, chunk_rows)

    # --- use counts ---------------------------------------------------------------------------------------------------

    def use_counts(self) -> dict[ExpertKey, float]:
        """{(layer, expert): decayed uses}."""
        return {key: uses for policy in self.policies for key, uses in policy.use_counts().items()}

    def prime(self, counts: dict[ExpertKey, float]) -> None:
        """Start with the use counts of earlier runs."""
        for policy in self.policies:
            policy.prime({key: uses for key, uses in counts.items() if self.policy_of[key[0]] is policy})

    def retract_uses(self, rejected: list[tuple[int, dict[int, int]]]) -> None:
        """Of the last request of each layer, {expert: rows} were draft tokens that were rejected: no uses."""
        for layer, uses in rejected:
            self.policy_of[layer].retract_uses(layer, uses)

    # --- slots --------------------------------------------------------------------------------------------------------

    def allocate_expert_slot(self, layer: int, protected: Keys, below: float | None = None) -> ExpertSlot | None:
        """A free slot, or that of the victim which is evicted: not one of `protected`, and with a score lower than
        `below`. None without any."""
        pool = self.pool_of[layer]
        if pool.free:
            return pool.free.pop()
        policy = self.policy_of[layer]
        victim = policy.victim(protected, layer)
        if victim is None or (below is not None and policy.score(victim) >= below):
            return None
        return self.evict(victim)

    def evict(self, key: ExpertKey) -> ExpertSlot:
        """Evict a cached expert -> its slot."""
        self.policy_of[key[0]].evict(key)
        self.counters.evictions += 1
        return self.cached.pop(key)[0]

    def free_expert_slot(self, key: ExpertKey, expert_slot: ExpertSlot) -> None:
        self.pool_of[key[0]].free.append(expert_slot)

    def admit(self, read: ExpertRead) -> None:
        """Cache the expert of a read that is done, or free its slot if it failed."""
        if read.error:
            self.free_expert_slot(read.key, read.expert_slot)
            return
        self.cached[read.key] = read.expert_slot, read.value
        self.policy_of[read.key[0]].admit(read.key)
        self.counters.bytes_read += self.disk.layouts[read.key].stored_bytes

    def make_room(self, num_bytes: int) -> None:
        """Release slots where the memory budget does not hold num_bytes more, which are about to be written."""
        if self.guard:
            self.guard.next_check = 0.0  # now, not in a moment
            self.adjust_to_memory(self.guard, num_bytes)

    def adjust_to_memory(self, guard: MemoryGuard, reserved: int = 0) -> None:
        """Release slots when memory is short, keeping one for each layer; reclaim them one by one."""
        spare = guard.spare_bytes()
        if spare is None:
            return
        spare -= reserved
        for pool, policy in zip(self.pools, self.policies, strict=True):
            while spare < 0 and pool.num_usable > len(pool.layers):
                policy.floor = min(policy.floor, (pool.num_usable - 1) // len(pool.layers))
                if pool.free:
                    pool.release(pool.free.pop())
                elif victim := policy.victim(()):
                    pool.release(self.evict(victim))
                else:
                    break  # reads into the other slots are in flight
                spare += pool.slot_bytes
            if spare > SLOTS_TO_RECLAIM * pool.slot_bytes and pool.reclaim():
                spare -= SLOTS_TO_RECLAIM * pool.slot_bytes

    def check(self) -> None:
        """AssertionError if a slot was lost or is used twice; for tests, between requests."""
        for pool in self.pools:
            slots = [*pool.free, *pool.released]
            slots += [expert_slot for key, (expert_slot, _) in self.cached.items() if self.pool_of[key[0]] is pool]
            reads = [*self.prefetches.values(), *self.abandoned.values()]
            slots += [read.expert_slot for read in reads if self.pool_of[read.key[0]] is pool]
            assert len(slots) == len(set(slots)) == pool.num_slots, f"{len(slots)} slots of {pool.num_slots}"

    # --- prefetch -----------------------------------------------------------------------------------------------------

    def prefetch(self, layer: int, uses: dict[int, int]) -> None:
        """Read the experts that a layer is predicted to request, {expert, most likely first: rows}, behind all reads
        that are needed now. Replaces the last prediction."""
        for key, read in list(self.prefetches.items()):
            if (key[0] != layer or key[1] not in uses) and self.queue.cancel(read):
                self.free_expert_slot(key, read.expert_slot)
                del self.prefetches[key]
        self.predicted = deque(((layer, expert), rows) for expert, rows in uses.items())
        if not (self.open_request and self.open_request.missing):
            self.start_prefetches()

    def start_prefetches(self) -> None:
        """Start predicted reads, as far as there are slots."""
        protected = self.open_request.needed if self.open_request else ()
        while self.predicted and self.start_prefetch(*self.predicted[0], protected):
            self.predicted.popleft()

    def start_prefetch(self, key: ExpertKey, rows: int, protected: Keys) -> bool:
        """Prefetch an expert that `rows` token rows may use; False if there is no slot for it."""
        if key in self.cached or key in self.prefetches or key in self.abandoned:
            return True
        if self.open_request and any(read.key == key for read in self.open_request.reads):
            return True
        if len(self.prefetches) >= max(1, self.pool_of[key[0]].num_slots // PREFETCH_DIVISOR):
            return False
        below = self.prefetcher.accuracy * self.policy_of[key[0]].score(key, rows)
        expert_slot = self.allocate_expert_slot(key[0], protected, below)
        if expert_slot is None:
            return False
        self.prefetches[key] = ExpertRead(key, expert_slot, is_urgent=False)
        self.queue.submit(self.prefetches[key])
        return True

    def claim_prefetches(self, layer: int, uses: dict[int, int]) -> list[ExpertRead]:
        """A layer requests experts: admit prefetches that are done -> those of its experts that are in flight. Wasted
        ones are dropped, those in flight when they end."""
        requested = {(layer, expert) for expert in uses}
        for read in self.prefetches.values():
            self.record_prefetch(read, read.key in requested)
        reads = [*self.prefetches.values(), *self.abandoned.values()]
        wanted = []
        self.prefetches, self.abandoned = {}, {}
        self.predicted.clear()
        for read in reads:
            if read.key not in requested:
                self.abandon(read)
            elif read.is_done:
                self.admit(read)
            else:
                self.queue.promote(read)
                wanted.append(read)
        return wanted

    def abandon(self, read: ExpertRead) -> None:
        """A read is no longer wanted."""
        if self.queue.cancel(read):
            self.free_expert_slot(read.key, read.expert_slot)
        elif read.is_done:
            self.admit(read)
        else:
            self.abandoned[read.key] = read

    def wait_for_abandoned(self) -> None:
        """Block until an abandoned read frees its slot."""
        assert self.abandoned, "an expert is missing, and no slot will ever come free"
        for read in self.queue.wait(list(self.abandoned.values())):
            self.admit(self.abandoned.pop(read.key))

    def record_prefetch(self, read: ExpertRead, is_useful: bool) -> None:
        """Count a prefetch, and report the drive time that it gained (slack) or cost, scaled to the drive's pace."""
        seconds, slack = self.queue.read_times(read)
        if not seconds:
            return
        num_bytes = self.disk.layouts[read.key].stored_bytes
        if is_useful:
            self.counters.useful_prefetch_bytes += num_bytes
        else:
            self.counters.wasted_prefetch_bytes += num_bytes
        # Several reads share the drive, so a read's own time says little: its share of a read at the usual pace does.
        num_done = max(1, self.queue.num_done)
        pace = self.queue.busy_seconds / num_done
        took = seconds if read.is_done else max(seconds, self.queue.total_read_seconds / num_done)
        self.prefetcher.record_prefetch(is_useful, pace * (slack if is_useful else seconds - slack) / took)

    # --- bytes --------------------------------------------------------------------------------------------------------

    def read_into_slot(self, read: ExpertRead) -> Matrices:
        """Read one expert into its slot, in a reader thread -> (gate, up, down) as Weights over the arena."""
        layer, expert = read.key
        memory = self.pool_of[layer].memory_of(read.expert_slot)
        layout = self.disk.layouts[read.key]
        if self.bits == 16 or layout.is_packed:
            self.disk.read_expert(layer, expert, memory.numpy().data)
            return tuple(matrix.view(memory, self.exact) for matrix in layout.matrices)
        assert self.staging is not None
        with self.staging_lock:
            self.disk.read_expert(layer, expert, self.staging.numpy().data)
            return self.quantize_into(memory, [matrix.view(self.staging) for matrix in layout.matrices])

    def quantize_into(self, memory: Tensor, stored: list[Weight]) -> Matrices:
        """Quantize three matrices one after the other into a slot."""
        matrices = []
        offset = 0
        fmt = integer_format(self.bits)
        for weight in stored:
            matrices.append(packed_view(memory[offset:], fmt, weight.rows, weight.columns, self.exact))
            for start, stop in row_blocks(weight.rows, weight.columns):
                quantize_rows(matrices[-1], start, weight.dequantize(start, stop))
            offset += packed_bytes(fmt, weight.rows, weight.columns)
        return tuple(matrices)

    def populate(self) -> None:
        for pool in self.pools:
            pool.populate(lambda: self.is_closed)

    def close(self) -> None:
        """End the threads."""
        self.is_closed = True
        self.populate_thread.join()
        self.queue.close()
