"""Slots: the memory that experts are read into. Layers whose experts take about the same memory share one pool of them.

How many there are is decided before anything is loaded (SlotClass, share_out); a SlotPool is what a run has of it.
"""

from dataclasses import dataclass

from kernels.formats import integer_format
from kernels.weight import packed_bytes
from machine.arena import Arena
from snapshot.reader import PAGE

NEARLY = 15 / 16  # of a larger slot is near enough to share it


@dataclass(frozen=True, slots=True)
class ExpertSlots:
    """Slots of one size, and the layers that share them."""

    layers: tuple[int, ...]
    slot_bytes: int
    num_slots: int

    @property
    def num_bytes(self):
        return self.num_slots * self.slot_bytes


def slot_bytes(config, disk, layer, bits):
    """Bytes of one slot of a layer, whole pages: its experts as stored, or those in float formats packed at load."""
    places = [disk.places[layer, expert] for expert in range(config.num_experts)]
    size = max((place.num_bytes for place in places if bits == 16 or place.is_packed), default=0)
    if bits < 16 and not all(place.is_packed for place in places):
        D, W, fmt = config.hidden_size, config.moe_intermediate_size, integer_format(bits)
        size = max(size, 2 * packed_bytes(fmt, W, D) + packed_bytes(fmt, D, W))
    return -(-size // PAGE) * PAGE


def share_out(sizes, num_experts, budget_bytes=0, per_layer=0):
    """{layer: bytes of its slot} -> SlotClasses, largest slots first: `per_layer` slots for each layer, or as many as
    budget_bytes hold, the same share of each class's experts; at least one and at most num_experts for each layer."""
    groups = []
    for layer, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if not groups or size < NEARLY * groups[-1][0]:
            groups.append((size, []))
        groups[-1][1].append(layer)
    total = sum(size * len(layers) for size, layers in groups)
    classes = []
    for size, layers in groups:
        wanted = per_layer * len(layers) or budget_bytes * len(layers) // total
        wanted = min(max(wanted, len(layers)), num_experts * len(layers))
        classes.append(ExpertSlots(tuple(sorted(layers)), size, wanted))
    return tuple(classes)


class ExpertSlotPool:
    """The slots of a SlotClass, each a (start, stop) of the arena. A slot is free, handed out, or given back to the
    system."""

    def __init__(self, slots):
        self.layers, self.slot_bytes, self.num_slots = slots.layers, slots.slot_bytes, slots.num_slots
        self.arena = Arena(slots.num_bytes)
        starts = range((slots.num_slots - 1) * slots.slot_bytes, -1, -slots.slot_bytes)
        self.free = [(start, start + slots.slot_bytes) for start in starts]
        self.given_back = []

    def populate(self, is_over):
        """Have memory found for the slots, in the order in which they are handed out, until `is_over()`. A read into
        memory that is there already is up to a third faster."""
        for slot in reversed(tuple(self.free)):
            if is_over() or not self.arena.populate(*slot):
                return

    @property
    def num_left(self):
        """Slots that are not given back."""
        return self.num_slots - len(self.given_back)

    def region(self, slot):
        """The bytes of a slot, a uint8 tensor."""
        return self.arena.bytes[slice(*slot)]

    def give_back(self, slot):
        """A slot's memory goes to the system, until `take_back`."""
        self.arena.release(*slot)
        self.given_back.append(slot)

    def take_back(self):
        """One slot more that is free; False when there is none given back."""
        if not self.given_back:
            return False
        self.free.append(self.given_back.pop())
        return True
