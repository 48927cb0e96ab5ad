"""For bench/infer_bench.py: one timed run of the engine, and the expert bytes that it asks for."""

import time
from collections import Counter
from dataclasses import dataclass, replace

from bench import cost
from bench.peaks import peak_memory, reset_peak
from generate.engine import Engine

SEED = 1


class Asked:
    """Stands where a route trace would: bytes of the experts that are asked for, the distinct ones, and those of all
    rows one by one."""

    def __init__(self, bytes_of_layer, trace=None):
        self.bytes_of_layer, self.trace = bytes_of_layer, trace
        self.reset()

    def reset(self):
        self.union_bytes = self.row_bytes = 0

    def record(self, layer, uses, chunk_rows, rows=None):
        each = self.bytes_of_layer[layer]
        self.union_bytes += each * len(uses)
        self.row_bytes += each * sum(uses.values())
        if self.trace:
            self.trace.record(layer, uses, chunk_rows, rows)


@dataclass(frozen=True)
class Timed:
    """One run of `batch` rows as it was measured."""

    batch: int
    state: str  # cold or warm
    ttft: float  # seconds
    steps: tuple[float, ...]  # seconds of each later step
    forwards: int  # of these steps
    rows: int  # that went through the layers in them
    peak_bytes: int
    union_bytes: int = 0  # of the experts that the steps asked for, each once a step
    row_bytes: int = 0  # the same, once for each row that asked
    disk_bytes: int = 0  # of experts, read in the steps
    prefill_disk_bytes: int = 0
    hit_rate: float | None = None
    wait_seconds: float = 0.0

    @property
    def seconds(self):
        return sum(self.steps)


class InferBench:
    """A loaded model and a prompt."""

    def __init__(self, loaded, settings, ids, temperature):
        self.loaded, self.ids, self.temperature = loaded, ids, temperature
        self.experts = loaded.model.experts
        self.asked = Asked(layer_bytes(loaded, settings), loaded.model.trace)
        model = replace(loaded.model, trace=self.asked)
        self.engine = Engine(model, terminal_ids=frozenset(), draft=settings.draft)

    def drop_experts(self):
        """Evict all experts and drop them from the page cache."""
        for key in list(self.experts.cached):
            self.experts.free_expert_slot(key, self.experts.evict(key))
        for layout in self.loaded.disk.layouts.values():
            for drive in self.loaded.disk.drives.usable:
                drive.drop_from_page_cache(layout)

    def run(self, batch, num_tokens, is_cold=False):
        """-> Timed."""
        if is_cold:
            self.drop_experts()
        reset_peak()
        self.experts.reset_counters()
        generator = self.engine.generate(self.ids, batch, num_tokens, self.temperature, seed=SEED)
        started = time.perf_counter()
        next(generator)
        ttft, bursts = time.perf_counter() - started, []
        prefill = self.experts.counters.bytes_read
        if is_cold:
            self.drop_experts()
        self.experts.reset_counters()
        self.asked.reset()
        engine, forwards = self.engine, self.engine.forwards
        first_forward, first_row = engine.forwards, engine.forward_rows
        before = time.perf_counter()
        for _ in generator:
            now = time.perf_counter()
            if engine.forwards > forwards:
                bursts.append([])
            bursts[-1].append(now - before)
            before, forwards = now, engine.forwards
        counters = self.experts.counters
        return Timed(
            batch=batch,
            state="cold" if is_cold else "warm",
            ttft=ttft,
            steps=tuple(sum(burst) / len(burst) for burst in bursts for _ in burst),
            forwards=engine.forwards - first_forward,
            rows=engine.forward_rows - first_row,
            peak_bytes=peak_memory(),
            union_bytes=self.asked.union_bytes,
            row_bytes=self.asked.row_bytes,
            disk_bytes=counters.bytes_read,
            prefill_disk_bytes=prefill,
            hit_rate=counters.hit_rate if counters.hits + counters.misses else None,
            wait_seconds=counters.wait_seconds,
        )


def layer_bytes(loaded, settings):
    """layer -> mean bytes of one of its experts in memory."""
    total, count = Counter(), Counter()
    for (layer, _), layout in loaded.disk.layouts.items():
        total[layer] += cost.expert_bytes(layout, settings.expert_bits)
        count[layer] += 1
    return {layer: total[layer] / count[layer] for layer in total}
