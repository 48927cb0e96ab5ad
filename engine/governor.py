"""How many guesses a forward should verify: as many as make the most tokens a second, by what was measured.

A guess costs three things: making it, one more row of arithmetic, and the experts that this row asks for beside those
of the others, some of which must be read. A forward over R rows is expected to take

    arithmetic(R) + experts(R) * missing share * wait for one that is missing

and to give 1 + a1 + a1 a2 + ... tokens, where a_i is how often the i-th guess of a source was right when those before
it were. Everything on the right is measured as the run goes: medians of the last forwards with R rows for the
arithmetic, slowly forgotten means for the rest. Where no forward had R rows yet the nearest smaller one is scaled.

The choice is made by what guesses may be worth: their share of right ones is taken half a standard error above what was
seen, so that little is known for a short time only. And every now and then another depth than the best is tried, so
nothing is switched off for good; the pause between two trials grows while they confirm what is known.
"""

import math
import statistics
from collections import Counter, deque
from dataclasses import dataclass

MOST = 8  # guesses that auto makes
FIRST_PAUSE, LONGEST_PAUSE = 16, 192  # forwards between trials
LONGEST_TRIAL = 4  # forwards; it ends with the first wrong guess
KEPT = 0.97  # of a mean, from one sample to the next
SAMPLES = 9  # of which the median counts
PRIOR = {"MTP": 0.6, "n-gram": 0.3, "long n-gram": 0.6}  # how often a guess is right, before anything is known
PRIOR_WEIGHT = 2.0  # guesses that the prior counts for
ENOUGH = 3  # guesses at a position, before the next one is tried
ROW_COST = 0.15  # of the arithmetic of one row, for each further row, before it is known
UNION_GROWTH = 0.8  # R rows ask for R^this times the experts of one, before it is known
GAIN = 1.03  # in tokens a second that makes guessing worth it


class Mean:
    """A slowly forgotten mean of a / b, from sums of a and of b."""

    def __init__(self, prior=None, weight=0.0):
        self.a, self.b = (prior or 0.0) * weight, weight

    def add(self, a, b=1.0):
        self.a, self.b = KEPT * self.a + a, KEPT * self.b + b

    @property
    def value(self):
        return self.a / self.b if self.b else None

    @property
    def hoped(self):
        """Of a share: half a standard error above its value."""
        return min(1.0, self.value + math.sqrt(self.value * (1 - self.value) / (self.b + 1)) / 2)


@dataclass
class Rows:
    """What forwards with so many rows took."""

    arithmetic: deque  # seconds without waiting for experts
    experts: Mean  # distinct ones a forward, all layers together

    @staticmethod
    def unknown():
        return Rows(deque(maxlen=SAMPLES), Mean())


class Governor:
    """depth: auto, or a number of guesses. One for a run; sequences may share it."""

    def __init__(self, depth="auto"):
        self.fixed = None if depth == "auto" else int(depth)
        self.most = MOST if self.fixed is None else self.fixed
        self.right = {}  # source -> [Mean for each position]
        self.rows = {}  # number of rows -> Rows
        # Share of the experts. One for all numbers of rows: what wrong guesses push out of memory is missed later, by a
        # forward without any.
        self.missing = Mean()
        self.wait, self.drafting = Mean(), {}  # seconds for one that is missing; source -> seconds a guess
        self.pause, self.since, self.trials = FIRST_PAUSE, 0, 0
        self.trial, self.trial_left = None, 0  # the choice that is tried, and for how many forwards more
        self.depths = Counter()  # guesses made -> forwards
        self.tried, self.accepted = Counter(), Counter()  # (source, position) -> guesses
        self.plan = None  # (expected tokens, expected seconds) of the forward under way
        self.planned = [0, 0.0, 0.0, 0.0, 0.0]  # forwards of auto; expected tokens, seconds; measured tokens, seconds

    # --- what is expected ---

    def right_share(self, source, position):
        """The Mean of how often the guess at a position, 0 for the first, is right if those before it are."""
        means = self.right.setdefault(source, [])
        while len(means) <= position:
            means.append(Mean(means[-1].value if means else PRIOR[source], PRIOR_WEIGHT))
        return means[position]

    def tokens(self, source, depth, is_hope=False):
        """Expected tokens of a forward, or those that may be hoped for."""
        total, all_right = 1.0, 1.0
        for position in range(depth):
            share = self.right_share(source, position)
            all_right *= share.hoped if is_hope else share.value
            total += all_right
        return total

    def seconds(self, num_rows):
        """Expected seconds of a forward with so many rows; None before the first one."""
        known = [n for n in self.rows if self.rows[n].arithmetic]
        if not known:
            return None
        near = max((n for n in known if n <= num_rows), default=min(known))
        rows = self.rows[near]
        arithmetic = statistics.median(rows.arithmetic) * (1 + ROW_COST * (num_rows - near))
        experts = rows.experts.value * (num_rows / near) ** UNION_GROWTH
        return max(0.0, arithmetic) + experts * (self.missing.value or 0.0) * (self.wait.value or 0.0)

    def known_depth(self, source):
        """Positions of which enough is known to go one further."""
        means = self.right.get(source, ())
        return next((i for i, mean in enumerate(means) if mean.b < PRIOR_WEIGHT + ENOUGH), len(means))

    def rate(self, source, depth):
        """Tokens a second that may be hoped for."""
        making = self.drafting[source].value if source in self.drafting else 0.0
        return self.tokens(source, depth, is_hope=True) / (self.seconds(1 + depth) + depth * making)

    # --- what is done ---

    def choose(self, offers):
        """offers {source: guesses it could make} -> (source, depth); (None, 0) for none."""
        self.plan = None
        if not offers or self.most == 0:
            return None, 0
        if self.fixed is not None:
            source = "MTP" if "MTP" in offers else next(iter(offers))
            return source, min(self.fixed, offers[source])
        if self.seconds(1) is None or len(self.rows[1].arithmetic) < 2:
            return None, 0  # first of all, what one row costs
        choices = [(None, 0)]
        for source, most in offers.items():
            choices += [(source, depth) for depth in range(1, min(most, self.known_depth(source) + 1) + 1)]
        rates = {choice: self.rate(*choice) for choice in choices}
        best = max(choices, key=lambda choice: (rates[choice] / (1 if choice[1] == 0 else GAIN), -choice[1]))
        self.since += 1
        if self.since >= self.pause:
            self.trial, self.trial_left = self.other_than(best, choices), LONGEST_TRIAL
            self.since, self.trials = 0, self.trials + 1
            self.pause = min(2 * self.pause, LONGEST_PAUSE)
        choice = best
        if self.trial_left and self.trial in choices:
            choice, self.trial_left = self.trial, self.trial_left - 1
        self.plan = self.tokens(*choice), self.seconds(1 + choice[1])
        return choice

    def other_than(self, best, choices):
        """Another choice than the best: by turns one guess more, one guess fewer."""
        source, depth = best
        if source is None:
            return next(choice for choice in choices if choice[1] == 1)
        wanted = depth + 1 if self.trials % 2 == 0 else depth - 1
        return next((choice for choice in choices if choice == (source, wanted)), (None, 0) if wanted == 0 else best)

    def note(self, source, depth, drafting, accepted, seconds, waited, experts, missed):
        """What a forward did: how many guesses it verified, what making them took, how many were right; its seconds,
        those it waited for experts, the distinct experts it asked for, and how many of them were missing."""
        if accepted < depth or not depth:
            self.trial_left = 0
        rows = self.rows.setdefault(1 + depth, Rows.unknown())
        rows.arithmetic.append(seconds - waited)
        rows.experts.add(experts)
        self.missing.add(missed, experts)
        if missed:
            self.wait.add(waited, missed)
        self.depths[depth] += 1
        for position in range(min(accepted + 1, depth)):
            self.right_share(source, position).add(accepted > position)
            self.tried[source, position] += 1
            self.accepted[source, position] += accepted > position
        if depth:
            self.drafting.setdefault(source, Mean()).add(drafting, depth)
        if self.plan:
            added = (1, *self.plan, 1 + accepted, seconds)
            self.planned = [a + b for a, b in zip(self.planned, added, strict=True)]

    # --- what is said ---

    def numbers(self):
        """For REPORT."""
        sources = sorted({source for source, _ in self.tried})
        return {
            "draft_acceptance": {source: self.by_position(source) for source in sources},
            "draft_depths": {str(depth): count for depth, count in sorted(self.depths.items())},
            "draft_forwards_of_auto": self.planned[0],
            "draft_expected_tokens_seconds": self.planned[1:3],
            "draft_measured_tokens_seconds": self.planned[3:5],
            "experts_by_rows": {str(n): rows.experts.value for n, rows in sorted(self.rows.items())},
        }

    def by_position(self, source):
        """[[accepted, tried] of the first guess, of the second, ...]."""
        positions = range(1 + max(position for name, position in self.tried if name == source))
        return [[self.accepted[source, p], self.tried[source, p]] for p in positions]

    def lines(self):
        """What drafts did, in a line or two; none where there were none."""
        sources = sorted({source for source, _ in self.tried})
        if not sources:
            return
        words = []
        for source in sources:
            shares = [f"{a / t:.0%}" for a, t in self.by_position(source)]
            words.append(f"{source} {' '.join(shares)} of {self.tried[source, 0]}")
        depths = ", ".join(f"{depth}: {count}" for depth, count in sorted(self.depths.items()))
        yield f"[draft] right by position: {' | '.join(words)} | forwards by guesses {depths}"
        more = [f"{n} rows {rows.experts.value:.1f}" for n, rows in sorted(self.rows.items())]
        line = f"[draft] experts a forward: {', '.join(more)}"
        if count := self.planned[0]:
            tokens, seconds, real_tokens, real_seconds = (number / count for number in self.planned[1:])
            line += (
                f" | auto expected {tokens:.2f} tokens in {seconds * 1e3:.1f} ms a forward, "
                f"measured {real_tokens:.2f} in {real_seconds * 1e3:.1f}"
            )
        yield line
