"""For bench/infer_bench.py: the metrics of a run, and the lower bounds of a step's time."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bench import cost
from bench.infer_run import TimedRun
from bench.peaks import Peaks
from forward.kv_cache import kv_cache_bytes
from load.model import LoadedModel


@dataclass(frozen=True)
class StepCosts:
    """The cost model of one decode step: of all sequences together, and of each."""

    dense_bytes: int  # read in a step
    row_kv_bytes: int  # read in a step for each sequence
    row_flops: float
    expert_bytes: float  # requested by one sequence in a step


def share(part: float | None, whole: float | None) -> float | None:
    """part / whole; None if one of them is unknown or the whole is 0."""
    return part / whole if part is not None and whole else None


def percent(part: float | None, whole: float | None) -> float | None:
    ratio = share(part, whole)
    return None if ratio is None else 100 * ratio


def percentile(values: Iterable[float], fraction: float) -> float:
    """The smallest value that at least `fraction` of them do not exceed."""
    ascending = sorted(values)
    return ascending[max(0, math.ceil(fraction * len(ascending)) - 1)]


def bytes_per_step(run: TimedRun, costs: StepCosts) -> float:
    """Mean bytes that a step reads from memory."""
    num_bytes = run.forwards * costs.dense_bytes + run.union_bytes + run.token_rows * costs.row_kv_bytes
    return num_bytes / len(run.steps)


def floors(run: TimedRun, costs: StepCosts, peaks: Peaks, drive: float | None) -> dict[str, float | None]:
    """Least seconds of a step by memory, arithmetic and disk, each at its peak; None where a peak is unknown.

    drive: peak bytes/s of the drives.
    """
    return {
        "memory": share(bytes_per_step(run, costs), peaks.bandwidth),
        "arithmetic": share(run.token_rows / len(run.steps) * costs.row_flops, peaks.flops),
        "disk": share(run.disk_bytes / len(run.steps), drive),
    }


def summarize(
    run: TimedRun, costs: StepCosts, peaks: Peaks, drive: float | None, single: TimedRun | None = None
) -> dict[str, Any]:
    """-> the numbers of one line of the sweep. single: the run of one sequence in the same state, the baseline."""
    tpot = statistics.median_high(run.steps)
    tokens = run.batch * len(run.steps)
    speed = tokens / run.seconds
    floor = max((s for s in floors(run, costs, peaks, drive).values() if s is not None), default=None)
    union_ratio = share(run.row_bytes / run.batch, run.union_bytes)
    speedup = disk_ratio = None
    if single:
        speedup = speed * single.seconds / len(single.steps)
        disk_ratio = share(single.disk_bytes / len(single.steps), run.disk_bytes / len(run.steps))
    return {
        "batch_size": run.batch,
        "state": run.state,
        "ttft_sec": run.ttft,
        "tpot_sec": tpot,
        "tpot_p95_sec": percentile(run.steps, 0.95),
        "tok_per_sec": speed,
        "mbu_percent": percent(bytes_per_step(run, costs) / tpot, peaks.bandwidth),
        "mfu_percent": percent(run.token_rows / len(run.steps) * costs.row_flops / tpot, peaks.flops),
        "peak_vram_bytes": None,
        "peak_memory_bytes": run.peak_bytes,
        "decode_steps": len(run.steps),
        "steps_per_forward": len(run.steps) / run.forwards,
        "hit_rate": run.hit_rate,
        "disk_bytes_per_token": run.disk_bytes / tokens,
        "prefill_disk_bytes": run.prefill_disk_bytes,
        "disk_wait_share": run.wait_seconds / run.seconds,
        "drive_use": share(run.disk_bytes / run.seconds, drive),
        "expert_bytes_one_row": run.row_bytes / tokens,
        "expert_bytes_union": run.union_bytes / len(run.steps),
        "union_ratio": union_ratio,
        "speedup": speedup,
        "speedup_share": share(speedup, run.batch * (union_ratio or 0)),
        "disk_ratio": disk_ratio,
        "disk_speedup_share": share(speedup, run.batch * (disk_ratio or 0)),
        "floor_sec": floor,
        "floor_share": share(floor, run.seconds / len(run.steps)),
    }


def count_parameters(loaded: LoadedModel) -> dict[str, int]:
    """-> {format: parameters} of the whole model, all routed experts included."""
    counts: Counter[str] = Counter()
    for stored in loaded.dense.matrices.values():
        counts[str(stored.format)] += stored.rows * stored.columns
    for entry in loaded.dense.floats.values():
        counts[entry.dtype.lower()] += math.prod(entry.shape)
    for layout in loaded.disk.layouts.values():
        for matrix in layout.matrices:
            counts[str(matrix.format)] += matrix.rows * matrix.columns
    return dict(counts)


def step_costs(loaded: LoadedModel, bytes_of_layer: dict[int, float], context: int) -> StepCosts:
    """The costs at `context` positions. bytes_of_layer: of one expert of each layer."""
    config, weights = loaded.config, loaded.model.weights
    return StepCosts(
        dense_bytes=cost.dense_bytes_read(weights, config, context),
        row_kv_bytes=cost.kv_bytes_read(config, context, weights.has_indexer),
        row_flops=cost.decode_flops(config, context, weights.has_indexer),
        expert_bytes=config.num_active_experts * sum(bytes_of_layer[layer] for layer in config.sparse_layers),
    )


def max_sequences(loaded: LoadedModel, context: int) -> int:
    """KV caches of `context` positions that fit the memory budget, with one expert slot for each layer."""
    plan = loaded.plan
    least = sum(len(slots.layers) * slots.slot_bytes for slots in plan.expert_slots)
    room = plan.budget_bytes - plan.process_bytes - plan.dense_bytes - plan.scratch_bytes - least
    return max(0, room // kv_cache_bytes(loaded.config, context))
