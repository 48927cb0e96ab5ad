"""What fits where, decided from headers alone, before anything is loaded.

need = this process as it is + resident weights + KV at CTX for each KV slot + scratch of a prefill chunk + slots of
every sparse layer. The budget is RAM_GB, or 88 % of what host and cgroup leave; what does not fit is refused with need
and have. The engine obeys this very plan. GB means 1e9 bytes.
"""

from dataclasses import asdict, dataclass

from errors import Refused
from experts.slots import ExpertSlots, share_out, slot_bytes
from forward.cost import scratch_bytes
from forward.kv_cache import kv_cache_bytes
from kernels.build import has_compiler
from kernels.quantize import ROWS_BYTES
from machine.memory import available_bytes, rss_bytes

AUTO_SHARE = 0.88
UNKNOWN_BUDGET = 8e9  # what is assumed of a machine that does not say, as the C engine does
DEFAULT_CHUNK, GOOD_CHUNK, MIN_CHUNK = 1024, 256, 64
# What the memory of a chunk may take of that which is left beside the resident part: so much down to GOOD_CHUNK rows,
# for a prefill reads nearly all experts once a chunk; below that so much.
SCRATCH_SHARE, MOST_SCRATCH_SHARE = 0.1, 0.5
FLOOR_SHARE = 4  # of the slots of a layer on average
PROCESS_STEP = 64 << 20  # the process is counted in steps of this, so that two looks at it agree


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes, all of them, but for the counts."""

    budget_bytes: int
    budget_source: str
    process_bytes: int  # interpreter, libraries and tokenizer, before loading
    resident_bytes: int
    kv_bytes: int
    scratch_bytes: int
    slots: tuple[ExpertSlots, ...]  # layers of about the same expert size share theirs
    floor: int  # experts that each layer keeps
    num_experts: int  # of each sparse layer
    context: int  # positions of a KV cache
    kv_slots: int  # KV caches
    prefill_chunk: int  # rows

    @property
    def num_slots(self):
        """Of all layers together."""
        return sum(slots.num_slots for slots in self.slots)

    @property
    def num_sparse_layers(self):
        return sum(len(slots.layers) for slots in self.slots)

    @property
    def cache_bytes(self):
        return sum(slots.num_bytes for slots in self.slots)

    @property
    def fixed_bytes(self):
        """What no choice of chunk or slots changes."""
        return self.process_bytes + self.resident_bytes + self.kv_bytes

    def takes_too_much(self, chunk):
        """Whether a chunk of so many rows takes more of what is left than it should."""
        share = SCRATCH_SHARE if chunk > GOOD_CHUNK else MOST_SCRATCH_SHARE
        return self.scratch_bytes > share * (self.budget_bytes - self.fixed_bytes)

    @property
    def need_bytes(self):
        return self.fixed_bytes + self.scratch_bytes + self.cache_bytes

    def lines(self):
        """The plan in two lines."""
        sizes = [slots.slot_bytes for slots in self.slots]
        each = f"{max(sizes, default=0) / 1e6:.2f} MB a slot"
        if len(sizes) > 1:
            each = f"{min(sizes) / 1e6:.2f} to {each}"
        experts = self.num_sparse_layers * self.num_experts
        slots = f" in each of {self.kv_slots} KV slots" if self.kv_slots > 1 else ""
        return (
            f"[plan] budget {gb(self.budget_bytes)} ({self.budget_source}) | need {gb(self.need_bytes)} = "
            f"process {gb(self.process_bytes)} + resident {gb(self.resident_bytes)} + KV {gb(self.kv_bytes)} + "
            f"scratch {gb(self.scratch_bytes)} + cache {gb(self.cache_bytes)}",
            f"[plan] cache: {self.num_slots} of {experts} experts in {self.num_sparse_layers} sparse layers "
            f"({self.num_slots / max(1, experts):.0%}), {each} | CTX {self.context}{slots} | "
            f"prefill in chunks of {self.prefill_chunk}",
        )

    def as_json(self):
        """Every number of the plan, for scripts/plan.py --json."""
        return asdict(self) | {name: getattr(self, name) for name in ("num_slots", "cache_bytes", "need_bytes")}


def gb(num_bytes):
    return f"{num_bytes / 1e9:.3f} GB"


def find_budget(ram_gb):
    """-> (bytes, where the number comes from). ram_gb 0 asks host and cgroup."""
    if ram_gb:
        return int(ram_gb * 1e9), f"RAM_GB={ram_gb:g}"
    available = available_bytes()
    if available is None:
        return int(UNKNOWN_BUDGET), "free memory is unknown, 8 GB assumed; set RAM_GB"
    return int(AUTO_SHARE * (available + rss_bytes())), "88 % of free memory"


def packing_bytes(config, disk):
    """Memory that quantizing one expert takes: the expert as stored, and a block of rows in float32 four times."""
    return disk.max_expert_bytes + 4 * min(ROWS_BYTES, 4 * config.hidden_size * config.moe_intermediate_size)


def make_plan(config, dense, disk, settings, context, tokenizer_bytes=0, kv_slots=1):
    """ResidentTensors and ExpertDisk of an opened snapshot -> Plan; `context` in positions, for each of kv_slots KV
    states. Refused if it does not fit.

    settings.cap > 0 asks for exactly that many slots (at most one for each expert); 0 takes what the budget allows. A
    prefill chunk that is not given is halved while the plan does not fit, or the chunk would take too much of what is
    left.
    """
    budget, source = find_budget(settings.ram_gb)
    sizes = {layer: slot_bytes(config, disk, layer, settings.expert_bits) for layer in disk.layers}
    is_native = settings.kernels != "reference" and has_compiler()
    packing = packing_bytes(config, disk) if disk.packs(settings.expert_bits) else 0

    def plan_with(chunk, cache_bytes=0):
        slots = share_out(sizes, config.num_experts, cache_bytes, settings.cap if settings.cap or cache_bytes else 1)
        return MemoryPlan(
            budget_bytes=budget,
            budget_source=source,
            process_bytes=-(-rss_bytes() // PROCESS_STEP) * PROCESS_STEP + tokenizer_bytes,
            resident_bytes=dense.num_bytes(settings.dense_bits),
            kv_bytes=kv_slots * kv_cache_bytes(config, context),
            scratch_bytes=scratch_bytes(config, chunk, context, is_native) + packing,
            slots=slots,
            floor=settings.cap or floor_of(config, slots),
            num_experts=config.num_experts,
            context=context,
            kv_slots=kv_slots,
            prefill_chunk=chunk,
        )

    chunk = settings.prefill_chunk or DEFAULT_CHUNK
    plan = plan_with(chunk)
    # Rows of a chunk and slots of the cache share what is left: more rows serve the prefill, more slots the decode.
    while not settings.prefill_chunk and chunk > MIN_CHUNK and (plan.need_bytes > budget or plan.takes_too_much(chunk)):
        chunk //= 2
        plan = plan_with(chunk)
    if plan.need_bytes > budget:
        need = f"{gb(plan.need_bytes)} with {f'cap {settings.cap}' if settings.cap else 'one expert slot per layer'}"
        slots = f" in each of {kv_slots} KV slots" if kv_slots > 1 else ""
        lower = "lower CTX or KV_SLOTS" if kv_slots > 1 else "lower CTX"
        raise Refused(
            f"this does not fit: need {need} and CTX={context}{slots}, have {gb(budget)} ({source}); "
            f"raise RAM_GB, {lower}, or quantize (python colibri.py cap expert_bits dense_bits)"
        )
    if not settings.cap and plan.cache_bytes:
        plan = plan_with(chunk, budget - plan.need_bytes + plan.cache_bytes)
    return plan


def floor_of(config, slots):
    """A token's experts, at most a quarter of what a layer has on average: below that no layer's share falls."""
    average = min((s.num_slots // len(s.layers) for s in slots), default=0)
    return max(1, min(config.num_active_experts, average // FLOOR_SHARE))
