"""InferBench: timed runs of the engine for bench/infer_bench.py, and the bytes of the experts that they request."""

import time
from collections import Counter
from dataclasses import dataclass, replace

from torch import Tensor

from bench import cost
from bench.peaks import peak_memory, reset_peak
from experts.route_observer import RouteObserver
from generate.engine import Engine
from load.model import LoadedModel
from settings import Settings

SEED = 1


class RequestedBytes:
    """A RouteObserver that sums the bytes of requested experts: each once a layer and chunk, and once a token row."""

    def __init__(self, bytes_of_layer: dict[int, float], trace: RouteObserver | None = None):
        """bytes_of_layer: of one expert of each layer. trace: the observer that this one stands before."""
        self.bytes_of_layer = bytes_of_layer
        self.trace = trace
        self.reset()

    def reset(self) -> None:
        self.union_bytes = 0.0
        self.row_bytes = 0.0

    def record(self, layer: int, uses: dict[int, int], chunk_rows: int, rows: Tensor) -> None:
        expert_bytes = self.bytes_of_layer[layer]
        self.union_bytes += expert_bytes * len(uses)
        self.row_bytes += expert_bytes * sum(uses.values())
        if self.trace:
            self.trace.record(layer, uses, chunk_rows, rows)


@dataclass(frozen=True)
class TimedRun:
    """The measurements of one run of `batch` sequences."""

    batch: int
    state: str  # cold or warm
    ttft: float  # seconds
    steps: tuple[float, ...]  # seconds of each later step
    forwards: int  # of these steps
    token_rows: int  # that went through the layers in them
    peak_bytes: int
    union_bytes: float = 0.0  # of the experts that the steps requested, each once a forward
    row_bytes: float = 0.0  # the same, once for each token row that requested it
    disk_bytes: int = 0  # of experts, read in the steps
    prefill_disk_bytes: int = 0
    hit_rate: float | None = None
    wait_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(self.steps)


class InferBench:
    """A loaded model, a prompt, and the engine that continues it."""

    def __init__(self, loaded: LoadedModel, settings: Settings, ids: list[int], temperature: float):
        self.loaded = loaded
        self.ids = ids
        self.temperature = temperature
        self.experts = loaded.model.experts
        self.requested = RequestedBytes(mean_expert_bytes(loaded, settings), loaded.model.trace)
        model = replace(loaded.model, trace=self.requested)
        self.engine = Engine(model, terminal_ids=frozenset(), draft=settings.draft, draft_guard=settings.draft_guard)

    def drop_experts(self) -> None:
        """Evict all experts and drop them from the page cache."""
        for key in list(self.experts.cached):
            self.experts.free_expert_slot(key, self.experts.evict(key))
        for layout in self.loaded.disk.layouts.values():
            for drive in self.loaded.disk.drives.usable:
                drive.drop_from_page_cache(layout)

    def run(self, batch: int, num_tokens: int, is_cold: bool = False) -> TimedRun:
        # 1) prefill, clone, first tokens
        if is_cold:
            self.drop_experts()
        reset_peak()
        self.experts.reset_counters()
        steps = self.engine.generate(self.ids, batch, num_tokens, self.temperature, seed=SEED)
        started = time.perf_counter()
        next(steps)
        ttft = time.perf_counter() - started
        prefill_disk_bytes = self.experts.counters.bytes_read

        # 2) the later steps; those that one forward gives share its time
        if is_cold:
            self.drop_experts()
        self.experts.reset_counters()
        self.requested.reset()
        engine = self.engine
        first_forward, first_row = engine.forwards, engine.forward_rows
        forwards = engine.forwards
        bursts: list[list[float]] = []  # of each forward: seconds of its steps
        before = time.perf_counter()
        for _ in steps:
            now = time.perf_counter()
            if engine.forwards > forwards:
                bursts.append([])
            bursts[-1].append(now - before)
            before, forwards = now, engine.forwards
        counters = self.experts.counters
        return TimedRun(
            batch=batch,
            state="cold" if is_cold else "warm",
            ttft=ttft,
            steps=tuple(sum(burst) / len(burst) for burst in bursts for _ in burst),
            forwards=engine.forwards - first_forward,
            token_rows=engine.forward_rows - first_row,
            peak_bytes=peak_memory(),
            union_bytes=self.requested.union_bytes,
            row_bytes=self.requested.row_bytes,
            disk_bytes=counters.bytes_read,
            prefill_disk_bytes=prefill_disk_bytes,
            hit_rate=counters.hit_rate if counters.hits + counters.misses else None,
            wait_seconds=counters.wait_seconds,
        )


def mean_expert_bytes(loaded: LoadedModel, settings: Settings) -> dict[int, float]:
    """layer -> mean bytes in memory of one of its experts."""
    total: Counter[int] = Counter()
    count: Counter[int] = Counter()
    for (layer, _), layout in loaded.disk.layouts.items():
        total[layer] += cost.expert_bytes(layout, settings.expert_bits)
        count[layer] += 1
    return {layer: total[layer] / count[layer] for layer in total}
