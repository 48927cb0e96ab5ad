"""For bench/speculation.py: the price of forwards and draft tokens of GLM-5.2 on one machine; drafts of a script."""

from generate.draft import Drafter
from generate.sampler import uniform

# GLM-5.2 in int4, and a machine for it.
SPARSE_LAYERS, LAYERS, ACTIVE = 75, 78, 8
EXPERT, DENSE, HEAD = 18.9e6, 9.9e9, 0.476e9  # bytes: of an expert, of all that stays, of the output matrix
DRIVE, MEMORY = 2e9, 30e9  # bytes a second
ROW = 0.1  # seconds of arithmetic and attention that a row adds, beside reading the weights
FORWARD = DENSE / MEMORY
DRAFT_TOKEN = (DENSE / LAYERS + HEAD) / MEMORY + ROW / LAYERS  # of the head, without its experts


class Machine:
    """What the run so far costs there: seconds, those of them that it waits for the drive, experts read."""

    def __init__(self, model):
        self.model, config = model, model.config
        # Of a forward, and of the one layer of a head: experts there for one here.
        self.of_forward = SPARSE_LAYERS * ACTIVE / (len(config.sparse_layers) * config.num_active_experts)
        self.of_draft = ACTIVE / config.num_active_experts
        self.seconds = self.waited = self.read = 0.0
        self.seen = self.num_experts()

    def num_experts(self):
        """-> experts (asked for, missing) so far."""
        counters = self.model.experts.counters
        return counters.hits + counters.misses, counters.misses

    def charge(self, seconds, scale):
        """Some seconds, and the experts since the last charge."""
        now = self.num_experts()
        asked, missed = (scale * (a - b) for a, b in zip(now, self.seen, strict=True))
        self.seen = now
        self.pay(seconds, asked, missed)

    def pay(self, seconds, asked, missed):
        self.read += missed
        self.waited += missed * EXPERT / DRIVE
        self.seconds += seconds + asked * EXPERT / MEMORY + missed * EXPERT / DRIVE

    def now(self):
        """Seconds. What was asked for outside of forwards is the head's."""
        self.charge(0.0, self.of_draft)
        return self.seconds

    def forward(self, num_rows):
        """A forward is done."""
        self.charge(FORWARD + num_rows * ROW, self.of_forward)


class Script:
    """Replaces the MTP layer: draft tokens that are right with a chance, by position, the same in every arm. Each has
    the price of one of an MTP layer; of its experts as large a share is missed as in the forwards of DRAFT=0."""

    hidden, is_ready = None, True  # no row waits for it

    def __init__(self, text, chance, machine, missing):
        self.text, self.chance, self.machine, self.missing = text, chance, machine, missing

    def propose(self, ids, depth):
        for _ in range(depth):
            self.machine.pay(DRAFT_TOKEN, ACTIVE, ACTIVE * self.missing)
        return [self.draft_token(len(ids) + i) for i in range(depth)]

    def draft_token(self, position):
        token = self.text[position]
        if uniform(1, 0, position) < self.chance:
            return token
        # A wrong one is another token of the text, so that it asks for experts as a token of the text would.
        at = int(uniform(1, 1, position) * len(self.text))
        return next(other for other in self.text[at:] + self.text if other != token)


class NoNgrams:
    def propose(self, ids, max_tokens):
        return "n-gram", []


class PricedDrafter(Drafter):
    """The engine's own, except for the clock. With a script it is the only proposer."""

    def __init__(self, model, draft_length, machine, script=None):
        super().__init__(model, draft_length, machine.now)
        self.machine, self.script = machine, script

    def run_mtp(self, wanted):
        """The drafts of the MTP layer, at their price."""
        if self.script:
            return [self.script.propose(ids, depth) for _, ids, depth in wanted]
        drafts = super().run_mtp(wanted)
        self.machine.charge(DRAFT_TOKEN * sum(map(len, drafts)), self.machine.of_draft)
        return drafts

    def observe(self, chunk, hidden, items):
        self.machine.forward(len(chunk.ids))
        super().observe(chunk, hidden, items)

    def measure(self):
        return self.machine.now(), self.machine.waited, *self.machine.num_experts()
