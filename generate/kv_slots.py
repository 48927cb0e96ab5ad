"""KV slots, the prefix cache: each keeps its text after its request ended, for a later prompt with the same prefix.

Nothing is ever reused past the first token that differs.
"""

from collections.abc import Sequence

from forward.kv_cache import make_kv_cache
from forward.model import Model
from generate.kv_file import KvFileStore
from generate.proposers import NgramProposer, Proposers
from generate.request import ActiveRequest
from text.prompt import shared_prefix_length

MAX_LOST_DIVISOR = 4  # a slot is continued in place if at most 1 / 4 of the shared prefix is lost behind it


class KvSlot:
    """A KV cache, and the ids of a text of which it holds the first kv.length."""

    def __init__(self, model: Model, context: int):
        self.model, self.kv = model, make_kv_cache(model.config, context)
        self.ids: list[int] = []
        self.proposers = Proposers(model, self.kv)
        self.active: ActiveRequest | None = None  # the request that writes here
        self.row = 0  # of that request
        self.conversation: str | None = None  # the name of the text, if it has one
        self.used = 0  # when it was last, by a counter

    def num_cached(self, ids: Sequence[int]) -> int:
        """The length of the prefix of these ids that it holds."""
        return shared_prefix_length(self.ids[: self.kv.length], ids)

    def start(self, ids: Sequence[int], length: int, source: "KvSlot | None" = None) -> None:
        """Continue with these ids, of which the first `length` are cached here, or in the slot `source`."""
        if source and source is not self:
            self.kv.copy_prefix(source.kv, length)
            self.proposers = source.proposers.clone(self.kv)
        else:
            self.kv.trim(length)
        self.ids, self.proposers.ngrams = list(ids), NgramProposer()

    def load(self, store: KvFileStore, name: str) -> None:
        """Take over a saved conversation."""
        self.ids, self.proposers = store.load(name, self.kv), Proposers(self.model, self.kv)

    def clear(self) -> None:
        self.kv.trim(0)
        self.ids, self.conversation = [], None


# KV slots for the rows of a request, and the slot whose first `length` positions the first of them begins with.
KvSlotChoice = tuple[list[KvSlot], KvSlot | None, int]


def choose_kv_slots(
    kv_slots: list[KvSlot],
    prompt_ids: Sequence[int],
    num_rows: int,
    conversation: str | None = None,
    may_reuse: bool = True,
) -> KvSlotChoice | None:
    """Choose the KV slots for a request; None where not enough are free, or where the conversation is being answered.

    The slot with the longest shared prefix is continued in place when little behind the prefix is lost; else the prefix
    is copied, from a busy slot too, into the one that was least recently used. Slots of other conversations are taken
    last. At least one token of the prompt is left to prefill.
    """
    own = next((slot for slot in kv_slots if conversation is not None and slot.conversation == conversation), None)
    free = sorted((s for s in kv_slots if not s.active), key=lambda s: (s.conversation is not None, s.used))
    if len(free) < num_rows or (own and own.active):
        return None
    num_cached = {slot: slot.num_cached(prompt_ids[:-1]) if may_reuse else 0 for slot in kv_slots}
    source = max(kv_slots, key=lambda slot: (num_cached[slot], slot is own, not slot.active, slot.used))
    length = num_cached[source]
    is_usable = length and not source.active and source.conversation is None
    if own:
        first = own
    elif is_usable and source.kv.length - length <= 1 + length // MAX_LOST_DIVISOR:
        first = source
    else:
        first = free[0]
    others = sorted((slot for slot in free if slot is not first), key=lambda slot: slot is source and length > 0)
    return [first, *others[: num_rows - 1]], source if length else None, length
