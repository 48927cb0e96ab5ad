"""For bench/speculation.py: the price of forwards and draft tokens of GLM-5.2, and a drafter with it as its clock."""

from collections.abc import Collection

from torch import Tensor

from forward.chunk import Chunk
from forward.model import Model
from generate.draft import Drafter
from generate.draft_length import DraftLength
from generate.forward_time import ForwardCost
from generate.proposers import Proposers
from generate.sampler import uniform
from generate.sequence import Drafts, Prefill, Sequence

# GLM-5.2 in int4, and a machine for it.
SPARSE_LAYERS, LAYERS, ACTIVE = 75, 78, 8
EXPERT, DENSE, HEAD = 18.9e6, 9.9e9, 0.476e9  # bytes: of an expert, of the dense weights, of the LM head
DRIVE, MEMORY = 2e9, 30e9  # bytes a second
ROW = 0.1  # seconds of arithmetic and attention that a token row adds to reading the weights
FORWARD = DENSE / MEMORY
DRAFT_TOKEN = (DENSE / LAYERS + HEAD) / MEMORY + ROW / LAYERS  # of the MTP layer, without its experts


class PriceMeter:
    """The price of a run so far: seconds, seconds of them waiting for the drive, experts read."""

    def __init__(self, model: Model):
        self.model = model
        config = model.config
        # Experts of GLM-5.2 that one of this model stands for: in a forward, and in the MTP layer.
        self.forward_scale = SPARSE_LAYERS * ACTIVE / (len(config.sparse_layers) * config.num_active_experts)
        self.draft_scale = ACTIVE / config.num_active_experts
        self.seconds = 0.0
        self.wait_seconds = 0.0
        self.experts_read = 0.0
        self.charged = self.num_experts()

    def num_experts(self) -> tuple[int, int]:
        """-> experts (requested, missed) so far."""
        counters = self.model.experts.counters
        return counters.hits + counters.misses, counters.misses

    def charge(self, seconds: float, scale: float) -> None:
        """Add seconds, and the price of the experts since the last charge; each stands for `scale` of GLM-5.2."""
        now = self.num_experts()
        requested, missed = (scale * (a - b) for a, b in zip(now, self.charged, strict=True))
        self.charged = now
        self.add(seconds, requested, missed)

    def add(self, seconds: float, requested: float, missed: float) -> None:
        self.experts_read += missed
        self.wait_seconds += missed * EXPERT / DRIVE
        self.seconds += seconds + requested * EXPERT / MEMORY + missed * EXPERT / DRIVE

    def now(self) -> float:
        """The clock of the drafter. Experts requested outside of forwards are those of the MTP layer."""
        self.charge(0.0, self.draft_scale)
        return self.seconds

    def charge_forward(self, num_rows: int) -> None:
        self.charge(FORWARD + num_rows * ROW, self.forward_scale)


class ScriptedProposer:
    """Replaces the MTP layer: draft tokens of a known text, correct with a given probability.

    Which ones are correct depends on the position only, so it is the same at every depth. Each costs as one of an MTP
    layer, whose experts are missed as often as those of the forwards of DRAFT=0.
    """

    hidden = None  # no hidden row waits for it
    is_ready = True

    def __init__(self, text: list[int], acceptance: float, meter: PriceMeter, miss_rate: float):
        self.text = text
        self.acceptance = acceptance
        self.meter = meter
        self.miss_rate = miss_rate

    def propose(self, ids: list[int], depth: int) -> list[int]:
        for _ in range(depth):
            self.meter.add(DRAFT_TOKEN, ACTIVE, ACTIVE * self.miss_rate)
        return [self.draft_token(len(ids) + i) for i in range(depth)]

    def draft_token(self, position: int) -> int:
        token = self.text[position]
        if uniform(1, 0, position) < self.acceptance:
            return token
        # A wrong one is another token of the text, so that it requests experts as a token of the text would.
        at = int(uniform(1, 1, position) * len(self.text))
        return next(other for other in self.text[at:] + self.text if other != token)


class NoNgrams:
    def propose(self, ids: list[int], max_tokens: int) -> tuple[str, list[int]]:
        return "n-gram", []


class PricedDrafter(Drafter):
    """The Drafter of the engine with the price as its clock. script: replaces all its proposers."""

    def __init__(
        self, model: Model, draft_length: DraftLength, meter: PriceMeter, script: ScriptedProposer | None = None
    ):
        super().__init__(model, draft_length, meter.now)
        self.meter = meter
        self.script = script

    def run_mtp(self, wanted: list[tuple[Proposers, list[int], int]]) -> Drafts:
        if self.script:
            return [self.script.propose(ids, depth) for _, ids, depth in wanted]
        drafts = super().run_mtp(wanted)
        self.meter.charge(DRAFT_TOKEN * sum(map(len, drafts)), self.meter.draft_scale)
        return drafts

    def observe(self, chunk: Chunk, hidden: Tensor, items: Collection[Sequence | Prefill]) -> None:
        self.meter.charge_forward(len(chunk.ids))
        super().observe(chunk, hidden, items)

    def measure(self) -> ForwardCost:
        return ForwardCost(self.meter.now(), self.meter.wait_seconds, *self.meter.num_experts())
