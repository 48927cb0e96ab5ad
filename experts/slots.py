"""ExpertSlotPool: the memory that experts are read into. Layers whose experts have about the same size share a pool.

split_into_slots decides how many slots there are before anything is loaded; an ExpertSlotPool is their memory.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from experts.disk import ExpertDisk
from kernels.formats import integer_format
from kernels.weight import packed_bytes
from machine.arena import Arena
from snapshot.config import ModelConfig
from snapshot.reader import PAGE

SHARED_SIZE = 15 / 16  # of a larger slot: experts from this size on share it

ExpertSlot = tuple[int, int]  # start and stop in the arena of its pool


@dataclass(frozen=True, slots=True)
class ExpertSlots:
    """How many slots of one size there are, and the layers that share them."""

    layers: tuple[int, ...]
    slot_bytes: int
    num_slots: int

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.slot_bytes


def expert_slot_bytes(config: ModelConfig, disk: ExpertDisk, layer: int, bits: int) -> int:
    """Bytes of one slot of a layer, whole pages: its experts as stored, or those in float formats quantized at load."""
    layouts = [disk.layouts[layer, expert] for expert in range(config.num_experts)]
    size = max((layout.num_bytes for layout in layouts if bits == 16 or layout.is_packed), default=0)
    if bits < 16 and not all(layout.is_packed for layout in layouts):
        D, W, fmt = config.hidden_size, config.moe_intermediate_size, integer_format(bits)
        size = max(size, 2 * packed_bytes(fmt, W, D) + packed_bytes(fmt, D, W))
    return -(-size // PAGE) * PAGE


def split_into_slots(
    sizes: dict[int, int], num_experts: int, budget_bytes: int = 0, per_layer: int = 0
) -> tuple[ExpertSlots, ...]:
    """sizes {layer: bytes of its slot} -> ExpertSlots, largest slots first.

    There are `per_layer` slots for each layer, or as many as budget_bytes hold, for each size the same share of its
    experts; at least one and at most num_experts for each layer.
    """
    groups: list[tuple[int, list[int]]] = []
    for layer, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if not groups or size < SHARED_SIZE * groups[-1][0]:
            groups.append((size, []))
        groups[-1][1].append(layer)
    total = sum(size * len(layers) for size, layers in groups)
    out = []
    for size, layers in groups:
        wanted = per_layer * len(layers) or budget_bytes * len(layers) // total
        wanted = min(max(wanted, len(layers)), num_experts * len(layers))
        out.append(ExpertSlots(tuple(sorted(layers)), size, wanted))
    return tuple(out)


class ExpertSlotPool:
    """The slots of one size. Each is free, in use, or released: its memory is given back to the system."""

    def __init__(self, slots: ExpertSlots) -> None:
        self.layers = slots.layers
        self.slot_bytes = slots.slot_bytes
        self.num_slots = slots.num_slots
        self.arena = Arena(slots.num_bytes)
        starts = range((slots.num_slots - 1) * slots.slot_bytes, -1, -slots.slot_bytes)
        self.free: list[ExpertSlot] = [(start, start + slots.slot_bytes) for start in starts]
        self.released: list[ExpertSlot] = []

    def populate(self, should_stop: Callable[[], bool]) -> None:
        """Have the system back the slots with memory, in the order of their use. Reads into memory that is populated
        are up to a third faster."""
        for expert_slot in reversed(tuple(self.free)):
            if should_stop() or not self.arena.populate(*expert_slot):
                return

    @property
    def num_usable(self) -> int:
        """Slots that are not released."""
        return self.num_slots - len(self.released)

    def memory_of(self, expert_slot: ExpertSlot) -> Tensor:
        """The uint8 bytes of a slot."""
        return self.arena.bytes[slice(*expert_slot)]

    def release(self, expert_slot: ExpertSlot) -> None:
        """Give a slot's memory back to the system, until `reclaim`."""
        self.arena.release(*expert_slot)
        self.released.append(expert_slot)

    def reclaim(self) -> bool:
        """Make one released slot free again; False if there is none."""
        if not self.released:
            return False
        self.free.append(self.released.pop())
        return True
