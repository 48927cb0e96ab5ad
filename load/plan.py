"""The memory plan: what fits the memory budget, decided from headers alone, before anything is loaded.

need = this process as it is + dense weights + KV caches of CTX positions + scratch memory of a prefill chunk + expert
slots of every sparse layer. The budget is RAM_GB, or 88 % of what host and cgroup leave. A model that does not fit is
refused with need and have. The engine allocates what the plan says. GB means 1e9 bytes.
"""

from dataclasses import asdict, dataclass
from typing import Any

from errors import Refused
from experts.disk import ExpertDisk
from experts.policy import layer_floor
from experts.slots import ExpertSlots, expert_slot_bytes, split_into_slots
from forward.kv_cache import kv_cache_bytes
from forward.scratch import scratch_bytes
from kernels.build import has_compiler
from kernels.quantize import ROWS_BYTES
from machine.memory import available_bytes, rss_bytes, total_bytes
from settings import Settings
from snapshot.dense import DenseTensors

AUTO_SHARE = 0.88
UNKNOWN_BUDGET = 8e9  # assumed where free memory cannot be read, as the C engine does
DEFAULT_CHUNK = 1024
STREAMING_CHUNK = 4096  # where not all experts fit: a chunk reads nearly all that are missing, however many its rows
GOOD_CHUNK = 256
MIN_CHUNK = 64
# Shares of the memory beside the fixed part that a prefill chunk's scratch may take. The first holds down to GOOD_CHUNK
# rows, because a prefill reads nearly all experts once a chunk; below that the second.
SCRATCH_SHARE = 0.1
MOST_SCRATCH_SHARE = 0.5
PROCESS_STEP = 64 << 20  # the process's size is rounded up to this, so that two plans in a row agree
JSON_KEYS = {"dense_bytes": "resident_bytes", "expert_slots": "slots", "num_expert_slots": "num_slots"}


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    budget_bytes: int
    budget_source: str
    process_bytes: int  # interpreter, libraries and tokenizer, before loading
    dense_bytes: int
    kv_bytes: int
    scratch_bytes: int
    expert_slots: tuple[ExpertSlots, ...]  # one entry for layers whose experts are about the same size
    floor: int  # expert slots that every layer keeps
    num_experts: int  # of each sparse layer
    context: int  # positions of a KV cache
    kv_slots: int  # KV caches
    prefill_chunk: int  # token rows

    @property
    def num_expert_slots(self) -> int:
        """Of all layers together."""
        return sum(slots.num_slots for slots in self.expert_slots)

    @property
    def num_sparse_layers(self) -> int:
        return sum(len(slots.layers) for slots in self.expert_slots)

    @property
    def cache_bytes(self) -> int:
        """Of the expert cache."""
        return sum(slots.num_bytes for slots in self.expert_slots)

    @property
    def fixed_bytes(self) -> int:
        """The part that does not depend on the prefill chunk and the number of expert slots."""
        return self.process_bytes + self.dense_bytes + self.kv_bytes

    @property
    def need_bytes(self) -> int:
        return self.fixed_bytes + self.scratch_bytes + self.cache_bytes

    @property
    def kv_room_bytes(self) -> int:
        """What KV caches may take at most: expert slots make room for them, down to one in each layer."""
        least = sum(len(slots.layers) * slots.slot_bytes for slots in self.expert_slots)
        return self.budget_bytes - (self.need_bytes - self.kv_bytes - self.cache_bytes) - least

    def lines(self) -> tuple[str, str]:
        """The two [plan] lines for stderr."""
        sizes = sorted(slots.slot_bytes for slots in self.expert_slots) or [0]
        slot_size = " to ".join(f"{size / 1e6:.2f}" for size in dict.fromkeys((sizes[0], sizes[-1])))
        experts = self.num_sparse_layers * self.num_experts
        in_slots = f" in each of {self.kv_slots} KV slots" if self.kv_slots > 1 else ""
        return (
            f"[plan] memory budget {gb(self.budget_bytes)} ({self.budget_source}) | need {gb(self.need_bytes)} = "
            f"process {gb(self.process_bytes)} + dense weights {gb(self.dense_bytes)} + KV cache {gb(self.kv_bytes)} + "
            f"scratch {gb(self.scratch_bytes)} + expert cache {gb(self.cache_bytes)}",
            f"[plan] expert cache: {self.num_expert_slots} of {experts} experts in {self.num_sparse_layers} sparse "
            f"layers ({self.num_expert_slots / max(1, experts):.0%}), {slot_size} MB an expert | "
            f"CTX {self.context} positions{in_slots} | prefill chunks of {self.prefill_chunk} tokens",
        )

    def as_json(self) -> dict[str, Any]:
        """Every number of the plan, for scripts/plan.py --json."""
        derived = {name: getattr(self, name) for name in ("num_expert_slots", "cache_bytes", "need_bytes")}
        return {JSON_KEYS.get(name, name): value for name, value in (asdict(self) | derived).items()}


def gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3f} GB"


def memory_budget(ram_gb: float, anywhere: bool = False) -> tuple[int, str]:
    """-> (bytes, where the number comes from). ram_gb 0 asks host and cgroup; so does more than they have at all, but
    for a plan that may be of another machine."""
    budget, asked, available = int(ram_gb * 1e9), f"RAM_GB={ram_gb:g}", available_bytes()
    total, limit = total_bytes() or (None, "")
    excess = f"{asked} is more than the {gb(total)} that {limit}" if total and budget > total else ""
    if budget and (anywhere or not excess):
        free = None if available is None else available + rss_bytes()
        short = f", but only {gb(free)} are free now" if free and budget > free else ""
        return budget, excess or asked + short
    if available is None:
        return int(UNKNOWN_BUDGET), "free memory is unknown, 8 GB assumed; set RAM_GB"
    return int(AUTO_SHARE * (available + rss_bytes())), "; ".join(filter(None, ("88 % of free memory", excess)))


def make_plan(
    settings: Settings,
    dense: DenseTensors,
    disk: ExpertDisk,
    context: int,
    tokenizer_bytes: int,
    kv_slots: int,
    anywhere: bool = False,
) -> MemoryPlan:
    """Plan the memory of an opened snapshot with kv_slots KV caches of `context` positions. Refused if it does not fit.

    cap > 0: exactly that many expert slots in each layer (at most one for each expert); 0: what the budget allows. A
    prefill chunk that is not given is halved while the plan does not fit or its scratch memory exceeds its share.
    anywhere: RAM_GB counts even where this machine has less.
    """
    config = dense.config
    budget, source = memory_budget(settings.ram_gb, anywhere)
    sizes = {layer: expert_slot_bytes(config, disk, layer, settings.expert_bits) for layer in disk.layers}
    is_native = settings.kernels != "reference" and has_compiler()
    # Quantizing an expert at load takes the expert as stored, and a block of weight rows in float32 four times.
    block_bytes = min(ROWS_BYTES, 4 * config.hidden_size * config.moe_intermediate_size)
    quantize_bytes = disk.max_expert_bytes + 4 * block_bytes if disk.quantizes(settings.expert_bits) else 0

    def plan_with(chunk: int, cache_bytes: int = 0) -> MemoryPlan:
        per_layer = settings.cap if settings.cap or cache_bytes else 1
        slots = split_into_slots(sizes, config.num_experts, cache_bytes, per_layer)
        average = min((s.num_slots // len(s.layers) for s in slots), default=0)
        return MemoryPlan(
            budget_bytes=budget,
            budget_source=source,
            process_bytes=-(-rss_bytes() // PROCESS_STEP) * PROCESS_STEP + tokenizer_bytes,
            dense_bytes=dense.num_bytes(settings.dense_bits),
            kv_bytes=kv_slots * kv_cache_bytes(config, context),
            scratch_bytes=scratch_bytes(config, chunk, context, is_native) + quantize_bytes,
            expert_slots=slots,
            floor=settings.cap or layer_floor(config.num_active_experts, average),
            num_experts=config.num_experts,
            context=context,
            kv_slots=kv_slots,
            prefill_chunk=chunk,
        )

    plan = plan_with(DEFAULT_CHUNK)
    all_bytes = config.num_experts * sum(sizes.values())
    fits = settings.cap in (0, config.num_experts) and plan.need_bytes - plan.cache_bytes + all_bytes <= budget
    chunk = settings.prefill_chunk or (DEFAULT_CHUNK if fits else STREAMING_CHUNK)
    plan = plan_with(chunk)
    # A large chunk makes the prefill faster, more expert slots the decode: both share what the fixed part leaves.
    while not settings.prefill_chunk and chunk > MIN_CHUNK:
        share = SCRATCH_SHARE if chunk > GOOD_CHUNK else MOST_SCRATCH_SHARE
        if plan.need_bytes <= budget and plan.scratch_bytes <= share * (budget - plan.fixed_bytes):
            break
        chunk //= 2
        plan = plan_with(chunk)
    if plan.need_bytes > budget:
        need = f"{gb(plan.need_bytes)} with {f'cap {settings.cap}' if settings.cap else 'one expert slot per layer'}"
        in_slots = f" in each of {kv_slots} KV slots" if kv_slots > 1 else ""
        or_slots = " or KV_SLOTS" if kv_slots > 1 else ""
        raise Refused(
            f"the model does not fit in memory: need {need} and CTX={context}{in_slots}, have {gb(budget)} ({source}); "
            f"raise RAM_GB, lower CTX{or_slots}, or quantize (python colibri.py cap expert_bits dense_bits)"
        )
    if not settings.cap and plan.cache_bytes:
        plan = plan_with(chunk, budget - plan.need_bytes + plan.cache_bytes)
    return plan
