"""How many guesses a forward should verify: as many as make the most tokens a second, by what was measured.

A guess costs three things: making it, one more row of arithmetic, and the experts that this row asks for beside those
of the others, some of which must be read (generate/forward_time.py). A forward is expected to give 1 + a1 + a1 a2 + ...
tokens of each sequence in it, where a_i is how often the i-th guess of a source was right when those before it were, a
slowly forgotten mean.

Of several sequences that guess which promises most for its time is taken first, then the next, and so on; where along
this way tokens a second are highest is the choice. For one sequence that is the best depth of each source.

The choice is made by what guesses may be worth: their share of right ones is taken half a standard error above what was
seen, so that little is known for a short time only. And every now and then another depth than the best is tried, in one
of the sequences, so nothing is switched off for good; the pause between two trials grows while they confirm what is
known.
"""

import sys
from collections import Counter
from itertools import permutations

from generate.forward_time import DecayedRatio, ForwardTime

MOST = 8  # guesses that auto makes
FIRST_PAUSE, LONGEST_PAUSE = 16, 192  # forwards between trials
LONGEST_TRIAL = 4  # forwards; it ends with the first wrong guess
PRIOR = {"MTP": 0.6, "n-gram": 0.3, "long n-gram": 0.6}  # how often a guess is right, before anything is known
PRIOR_WEIGHT = 2.0  # guesses that the prior counts for
ENOUGH = 3  # guesses at a position, before the next one is tried
GAIN = 1.03  # in tokens a second that makes guessing worth it


class DraftLength:
    """depth: auto, or a number of guesses. One for a run; sequences may share it."""

    def __init__(self, depth="auto"):
        self.fixed = None if depth == "auto" else int(depth)
        self.most = MOST if self.fixed is None else self.fixed
        self.right = {}  # source -> [Mean for each position]
        # Forwards that read a prompt in beside the sequences that guess have times of their own: they ask for nearly
        # all experts, and say nothing of those without.
        self.time, self.mixed_time = ForwardTime(), ForwardTime()
        self.drafting = {}  # source -> seconds a guess
        self.pause, self.since, self.trials = FIRST_PAUSE, 0, 0
        self.trial, self.trial_left = None, 0  # (sequence, choice) that is tried, and for how many forwards more
        self.depths = Counter()  # guesses made for a sequence -> forwards that it took part in
        self.tried, self.accepted = Counter(), Counter()  # (source, position) -> guesses
        self.plan = None  # (expected tokens, expected seconds) of the forward under way
        self.planned = [0, 0.0, 0.0, 0.0, 0.0]  # forwards of auto; expected tokens, seconds; measured tokens, seconds

    # --- what is expected ---

    def right_share(self, source, position):
        """The Mean of how often the guess at a position, 0 for the first, is right if those before it are."""
        means = self.right.setdefault(source, [])
        while len(means) <= position:
            means.append(DecayedRatio(means[-1].value if means else PRIOR[source], PRIOR_WEIGHT))
        return means[position]

    def chances(self, source, depth, is_hope=False):
        """For each guess the chance that it and those before it are right, or what may be hoped for."""
        out, all_right = [], 1.0
        for position in range(depth):
            share = self.right_share(source, position)
            all_right *= share.hoped if is_hope else share.value
            out.append(all_right)
        return out

    def known_depth(self, source):
        """Positions of which enough is known to go one further."""
        means = self.right.get(source, ())
        return next((i for i, mean in enumerate(means) if mean.b < PRIOR_WEIGHT + ENOUGH), len(means))

    def making(self, source):
        """Seconds of making one guess."""
        return self.drafting[source].value if source in self.drafting else 0.0

    # --- what is done ---

    def choose(self, offers, num_rows=None, room=sys.maxsize, is_mixed=False):
        """offers: for each sequence {source: guesses it could make} -> (source, depth) for each, (None, 0) for none.

        num_rows: of the forward without any guess, by default one a sequence. room: for guesses of all together.
        is_mixed: the forward has rows of other sequences too, whose prompts are read in.
        """
        self.plan = None
        num_rows = num_rows or len(offers)
        if self.most == 0 or not any(offers):
            return [(None, 0)] * len(offers)
        if self.fixed is not None:
            most = min(self.fixed, room // len(offers))
            return [self.deepest(offer, most) for offer in offers]
        time = self.mixed_time if is_mixed else self.time
        if not time.is_known(num_rows):
            return [(None, 0)] * len(offers)  # first of all, what a forward costs without guesses
        offers = [
            {source: min(most, self.known_depth(source) + 1) for source, most in offer.items()} for offer in offers
        ]
        chosen = self.best(offers, num_rows, room, time)
        self.since += 1
        if self.since >= self.pause:
            self.begin_trial(offers, chosen)
        if self.trial_left and self.trial[0] < len(chosen):
            at, choice = self.trial
            others = sum(depth for _, depth in chosen) - chosen[at][1]
            if others + choice[1] <= room and choice in choices_of(offers[at]):
                chosen[at], self.trial_left = choice, self.trial_left - 1
        tokens = len(offers) + sum(sum(self.chances(*choice)) for choice in chosen)
        self.plan = tokens, time.seconds(num_rows + sum(depth for _, depth in chosen))
        return chosen

    def deepest(self, offer, most):
        """The choice at a depth that was asked for."""
        if not offer or most < 1:
            return None, 0
        source = "MTP" if "MTP" in offer else next(iter(offer))
        return source, min(most, offer[source])

    def best(self, offers, num_rows, room, time):
        """The choices that promise the most tokens a second, by this ForwardTime."""
        best, best_rate = [(None, 0)] * len(offers), len(offers) / time.seconds(num_rows)
        names = sorted({source for offer in offers for source in offer})
        # Which source a sequence takes if it takes one: for each order of preference.
        orders = {
            tuple(next((name for name in order if name in offer), None) for offer in offers)
            for order in permutations(names)
        }
        for sources in sorted(orders, key=str):
            guesses = self.in_order(sources, offers, num_rows, time)[:room]
            tokens, making, end, depths = len(offers), 0.0, 0, [0] * len(offers)
            for count, (chance, seconds, _) in enumerate(guesses, 1):
                tokens, making = tokens + chance, making + seconds
                rate = tokens / (time.seconds(num_rows + count) + making) / GAIN
                if rate > best_rate:
                    best_rate, end = rate, count
            if end:
                for _, _, row in guesses[:end]:
                    depths[row] += 1
                best = [(source, depth) if depth else (None, 0) for source, depth in zip(sources, depths, strict=True)]
        return best

    def in_order(self, sources, offers, num_rows, time):
        """-> (chance, seconds of making it, sequence) of each guess, those that promise most for their time first."""
        total = sum(offer[source] for source, offer in zip(sources, offers, strict=True) if source)
        row_seconds = max(1e-9, (time.seconds(num_rows + total) - time.seconds(num_rows)) / total)
        guesses = []
        for row, (source, offer) in enumerate(zip(sources, offers, strict=True)):
            if source:
                making = self.making(source)
                for position, chance in enumerate(self.chances(source, offer[source], is_hope=True)):
                    guesses.append((-chance / (row_seconds + making), position, row, chance, making))
        return [(chance, making, row) for _, _, row, chance, making in sorted(guesses)]

    def begin_trial(self, offers, chosen):
        """For some forwards one sequence does something else than the best."""
        able = [at for at, offer in enumerate(offers) if offer]
        at = able[self.trials % len(able)]
        self.trial, self.trial_left = (at, self.other_than(chosen[at], choices_of(offers[at]))), LONGEST_TRIAL
        self.since, self.trials = 0, self.trials + 1
        self.pause = min(2 * self.pause, LONGEST_PAUSE)

    def other_than(self, best, choices):
        """Another choice than the best: by turns one guess more, one guess fewer."""
        source, depth = best
        if source is None:
            return next(choice for choice in choices if choice[1] == 1)
        wanted = depth + 1 if self.trials % 2 == 0 else depth - 1
        return next((choice for choice in choices if choice == (source, wanted)), (None, 0) if wanted == 0 else best)

    def note(self, turns, num_rows, drafting, seconds, waited, experts, missed, is_mixed=False):
        """What a forward did: of each sequence (source, guesses, how many of them were right); its rows without any;
        what making guesses took, {source: seconds}; the rest as of ForwardTime.note, is_mixed as of `choose`."""
        guesses = Counter()
        for at, (source, depth, accepted) in enumerate(turns):
            if (self.trial is None or at == self.trial[0]) and (accepted < depth or not depth):
                self.trial_left = 0
            self.depths[depth] += 1
            guesses[source] += depth
            for position in range(min(accepted + 1, depth)):
                self.right_share(source, position).add(accepted > position)
                self.tried[source, position] += 1
                self.accepted[source, position] += accepted > position
        time = self.mixed_time if is_mixed else self.time
        time.note(num_rows + guesses.total(), seconds, waited, experts, missed)
        for source, count in guesses.items():
            if count:
                self.drafting.setdefault(source, DecayedRatio()).add(drafting[source], count)
        if self.plan:
            added = (1, *self.plan, sum(1 + accepted for _, _, accepted in turns), seconds)
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
            "experts_by_rows": {str(n): rows.experts.value for n, rows in sorted(self.time.rows.items())},
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
        forwards, turns = sum(rows.forwards for rows in self.time.rows.values()), self.depths.total()
        of_each = f" of a sequence, {turns / forwards:.1f} of them in each," if turns > forwards else ""
        yield f"[draft] right by position: {' | '.join(words)} | forwards by guesses{of_each} {depths}"
        rows = self.time.rows
        often = sorted(rows, key=lambda n: -rows[n].forwards)[: MOST + 1]
        more = [f"{n} rows {rows[n].experts.value:.1f}" for n in sorted(often)]
        line = f"[draft] experts a forward: {', '.join(more)}"
        if count := self.planned[0]:
            tokens, seconds, real_tokens, real_seconds = (number / count for number in self.planned[1:])
            line += (
                f" | auto expected {tokens:.2f} tokens in {seconds * 1e3:.1f} ms a forward, "
                f"measured {real_tokens:.2f} in {real_seconds * 1e3:.1f}"
            )
        yield line


def choices_of(offer):
    """{source: guesses it could make} -> every (source, depth)."""
    return [(None, 0)] + [(source, depth) for source, most in offer.items() for depth in range(1, most + 1)]
