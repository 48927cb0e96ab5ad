"""KV slots: each remembers a text, also after its request ended, so that the next that begins as it did is read faster.

Nothing is ever reused past the first token that differs.
"""

from dataclasses import dataclass

from forward.kv_cache import make_kv_cache
from generate.draft import NgramProposer, Proposers
from text.prompt import shared_prefix_length

KEPT_SHARE = 4  # a text is gone on with where it stands if at most so small a part of the common beginning is lost


class KvSlot:
    """A KvCache and the ids that it holds, kv.length of them; `ids` may go on behind that."""

    def __init__(self, model, context):
        self.model, self.kv, self.ids = model, make_kv_cache(model.config, context), []
        self.sources = Proposers(model, self.kv)
        self.job = None  # who writes here
        self.conversation = None  # whose text this is, if it has a name
        self.used = 0  # when it was last, by a counter

    def common(self, ids):
        """How many of these ids it holds, from the first on."""
        return shared_prefix_length(self.ids[: self.kv.length], ids)

    def begin(self, ids, length, source=None):
        """Go on with these ids, of which `length` are known here, or in the slot `source`."""
        if source and source is not self:
            self.kv.copy_prefix(source.kv, length)
            self.sources = source.sources.clone(self.kv)
        else:
            self.kv.trim(length)
        self.ids, self.sources.ngrams = list(ids), NgramProposer()

    def resume(self, saved, name):
        """Take over a conversation from generate/kv_file.py."""
        self.ids, self.sources = saved.load(name, self.kv), Proposers(self.model, self.kv)

    def forget(self):
        self.kv.trim(0)
        self.ids, self.conversation = [], None


@dataclass(frozen=True, slots=True)
class SlotChoice:
    """Slots for the rows of a request, and the slot whose first `length` positions the first of them begins with."""

    slots: list[KvSlot]
    source: KvSlot | None
    length: int


def choose(slots, prompt_ids, num_rows, conversation=None, may_reuse=True):
    """-> Choice, or None where not enough slots are free, or where the conversation is being answered.

    What has the longest common beginning is gone on with where it stands when little behind that is lost; else the
    beginning is copied into the slot that was not used for longest, from a busy one too. Slots of other conversations
    are taken last. At least one token of the prompt is left to be read.
    """
    own = next((slot for slot in slots if conversation is not None and slot.conversation == conversation), None)
    free = sorted((s for s in slots if not s.job), key=lambda s: (s.conversation is not None, s.used))
    if len(free) < num_rows or (own and own.job):
        return None
    common = {slot: slot.common(prompt_ids[:-1]) if may_reuse else 0 for slot in slots}
    source = max(slots, key=lambda slot: (common[slot], slot is own, not slot.job, slot.used))
    length = common[source]
    serves = length and not source.job and source.conversation is None
    if own:
        first = own
    elif serves and source.kv.length - length <= 1 + length // KEPT_SHARE:
        first = source
    else:
        first = free[0]
    others = sorted((slot for slot in free if slot is not first), key=lambda slot: slot is source and length > 0)
    return SlotChoice([first, *others[: num_rows - 1]], source if length else None, length)
