"""What fits where, decided from headers alone, before anything is loaded.

need = this process as it is + resident weights + KV at CTX + scratch of a prefill chunk + slots x sparse layers x
bytes of a slot. The budget is RAM_GB, or 88 % of what host and cgroup leave; what does not fit is refused with need
and have. GB means 1e9 bytes.
"""

from dataclasses import dataclass

from forward.cost import scratch_bytes
from forward.kv_state import KvState
from snapshot.errors import Refused
from snapshot.expert_cache import slot_bytes
from snapshot.memory import available_bytes, rss_bytes

AUTO_SHARE = 0.88
UNKNOWN_BUDGET = 8e9  # what is assumed of a machine that does not say, as the C engine does


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes, all of them, but for the counts of slots."""

    budget: int
    budget_source: str
    process: int  # interpreter and libraries, before loading
    resident: int
    kv: int
    scratch: int
    slot: int
    num_sparse_layers: int
    num_experts: int
    num_slots: int  # per sparse layer

    @property
    def cache(self):
        return self.num_slots * self.num_sparse_layers * self.slot

    @property
    def need(self):
        return self.process + self.resident + self.kv + self.scratch + self.cache

    def lines(self):
        """The plan in two lines."""
        return (
            f"[plan] budget {gb(self.budget)} ({self.budget_source}) | need {gb(self.need)} = process "
            f"{gb(self.process)} + resident {gb(self.resident)} + KV {gb(self.kv)} + scratch {gb(self.scratch)} "
            f"+ cache {gb(self.cache)}",
            f"[plan] cache: {self.num_slots} of {self.num_experts} experts in each of {self.num_sparse_layers} "
            f"sparse layers, {self.slot / 1e6:.2f} MB a slot",
        )


def gb(num_bytes):
    return f"{num_bytes / 1e9:.2f} GB"


def find_budget(ram_gb):
    """-> (bytes, where the number comes from). ram_gb 0 asks host and cgroup."""
    if ram_gb:
        return int(ram_gb * 1e9), f"RAM_GB={ram_gb:g}"
    available = available_bytes()
    if available is None:
        return int(UNKNOWN_BUDGET), "unknown memory, 8 GB assumed; set RAM_GB"
    return int(AUTO_SHARE * (available + rss_bytes())), "88 % of free memory"


def make_plan(config, resident, disk, settings, context, prefill_chunk):
    """ResidentTensors and ExpertDisk of an opened snapshot -> Plan. `context` in positions, `prefill_chunk` in rows.

    settings.cap > 0 asks for exactly that many slots (at most one for each expert); 0 takes what the budget allows.
    """
    budget, source = find_budget(settings.ram_gb)
    fixed = dict(
        budget=budget,
        budget_source=source,
        process=rss_bytes(),
        resident=resident.num_bytes(settings.dense_bits),
        kv=KvState.bytes_for(config, context),
        scratch=scratch_bytes(config, prefill_chunk, context),
        slot=slot_bytes(config, disk, settings.expert_bits),
        num_sparse_layers=len(config.sparse_layers),
        num_experts=config.num_experts,
    )
    num_slots = min(max(settings.cap, 1), config.num_experts)
    plan = Plan(**fixed, num_slots=num_slots)
    if plan.need > budget:
        what = f"cap {num_slots}" if settings.cap else "one expert slot per layer"
        raise Refused(
            f"this does not fit: need {gb(plan.need)} with {what} and CTX={context}, have {gb(budget)} ({source}); "
            "raise RAM_GB, lower CTX, or quantise (python colibri.py cap expert_bits dense_bits)"
        )
    if not settings.cap and plan.cache:
        spare = (budget - plan.need) // (plan.num_sparse_layers * plan.slot)
        num_slots = min(1 + spare, config.num_experts)
    return Plan(**fixed, num_slots=num_slots)
