"""For bench/infer_bench.py: runs -> the numbers of its table, and what a step costs at least."""

import math
import statistics
from collections import Counter
from dataclasses import dataclass

from bench import cost
from forward.kv_cache import kv_cache_bytes


@dataclass(frozen=True)
class Costs:
    """What one step costs whatever was measured: of all rows together, and of each."""

    dense_bytes: int  # read in a step
    row_kv_bytes: int  # read in a step by each row
    row_flops: float
    expert_bytes: float  # that one row asks for in a step


def share(part, whole):
    """part / whole, None where one of them is not known or there is nothing to divide by."""
    return part / whole if part is not None and whole else None


def percent(part, whole):
    return share(100 * part, whole)


def percentile(values, part):
    """The least of the values that `part` of them do not exceed."""
    return sorted(values)[max(0, math.ceil(part * len(values)) - 1)]


def bytes_of_step(run, costs):
    """Bytes that a step reads from memory, on average."""
    read = run.forwards * costs.dense_bytes + run.union_bytes + run.rows * costs.row_kv_bytes
    return read / len(run.steps)


def floors(run, costs, peaks, drive):
    """Seconds of a step at the peak of each: memory, arithmetic, disk; None where a peak is not known."""
    return {
        "memory": share(bytes_of_step(run, costs), peaks.bandwidth),
        "arithmetic": share(run.rows / len(run.steps) * costs.row_flops, peaks.flops),
        "disk": share(run.disk_bytes / len(run.steps), drive),
    }


def summarise(run, costs, peaks, drive, single=None):
    """Timed -> the numbers of one row of the sweep. single: the run of one row in the same state, to compare with."""
    tpot, tokens = statistics.median_high(run.steps), run.batch * len(run.steps)
    speed = tokens / run.seconds
    floor = max((s for s in floors(run, costs, peaks, drive).values() if s is not None), default=None)
    union_ratio = share(run.row_bytes / run.batch, run.union_bytes)
    gain = disk_ratio = None
    if single:
        gain = speed * single.seconds / len(single.steps)
        disk_ratio = share(single.disk_bytes / len(single.steps), run.disk_bytes / len(run.steps))
    return {
        "batch_size": run.batch,
        "state": run.state,
        "ttft_sec": run.ttft,
        "tpot_sec": tpot,
        "tpot_p95_sec": percentile(run.steps, 0.95),
        "tok_per_sec": speed,
        "mbu_percent": percent(bytes_of_step(run, costs) / tpot, peaks.bandwidth),
        "mfu_percent": percent(run.rows / len(run.steps) * costs.row_flops / tpot, peaks.flops),
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
        "speedup": gain,
        "speedup_share": share(gain, run.batch * (union_ratio or 0)),
        "disk_ratio": disk_ratio,
        "disk_speedup_share": share(gain, run.batch * (disk_ratio or 0)),
        "floor_sec": floor,
        "floor_share": share(floor, run.seconds / len(run.steps)),
    }


def count_parameters(loaded):
    """-> {format: parameters} of everything that is loaded, routed experts and all."""
    counts = Counter()
    for stored in loaded.dense.matrices.values():
        counts[str(stored.format)] += stored.rows * stored.columns
    for entry in loaded.dense.floats.values():
        counts[entry.dtype.lower()] += math.prod(entry.shape)
    for layout in loaded.disk.layouts.values():
        for matrix in layout.matrices:
            counts[str(matrix.format)] += matrix.rows * matrix.columns
    return dict(counts)


def find_costs(loaded, per_layer, context):
    """-> Costs at `context` positions."""
    config, weights = loaded.config, loaded.model.weights
    return Costs(
        dense_bytes=cost.dense_bytes_read(weights, config, context),
        row_kv_bytes=cost.kv_bytes_read(config, context, weights.has_indexer),
        row_flops=cost.decode_flops(config, context, weights.has_indexer),
        expert_bytes=config.num_active_experts * sum(per_layer[layer] for layer in config.sparse_layers),
    )


def full_rows(loaded, context):
    """Rows of `context` positions that the budget has room for, with one expert of each layer in memory."""
    plan = loaded.plan
    least = sum(len(slots.layers) * slots.slot_bytes for slots in plan.expert_slots)
    room = plan.budget_bytes - plan.process_bytes - plan.dense_bytes - plan.scratch_bytes - least
    return max(0, room // kv_cache_bytes(loaded.config, context))
