"""DraftLength, the draft length controller: how many draft tokens a forward verifies, for most tokens a second.

A draft token costs three things: making it, one more token row of arithmetic, and the experts that this row asks for
beside those of the others, some of which must be read (generate/forward_time.py). A forward is expected to give
1 + a1 + a1 a2 + ... tokens of each sequence in it, where a_i is how often the i-th draft token of a proposer was
accepted when those before it were, a slowly decaying mean.

Of several sequences the draft token that promises most for its time is taken first, then the next, and so on; where
along this way tokens a second are highest is the choice. For one sequence that is the best depth of each proposer.

The choice is made by what draft tokens may be worth: acceptance is taken half a standard error above what was seen, so
that little is known for a short time only. And every now and then another depth than the best is tried, in one of the
sequences, so nothing is switched off for good; the pause between two trials grows while they confirm what is known.

At a fixed depth nothing is chosen, but a guard, as in the C engine, stops drafting for some forwards where hardly any
draft token is accepted, and tries again; the pauses double while that stays so.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

from generate.forward_time import DecayedRatio, ForwardCost, ForwardTime
from machine.console import say

Offer = dict[str, int]  # proposer -> draft tokens that it could make
Choice = tuple[str | None, int]  # proposer and draft tokens; (None, 0) for none

MAX_DEPTH = 8  # draft tokens of a sequence that auto makes
FIRST_PAUSE, LONGEST_PAUSE = 16, 192  # forwards between trials
LONGEST_TRIAL = 4  # forwards; it ends with the first draft token not accepted
PRIOR = {"MTP": 0.6, "n-gram": 0.3, "long n-gram": 0.6}  # acceptance, before anything is known
PRIOR_WEIGHT = 2.0  # draft tokens that the prior counts for
ENOUGH = 3  # draft tokens at a position, before the next one is tried
GAIN = 1.03  # in tokens a second that makes drafting worth it
GUARD_SHARE = 0.1  # of the draft tokens of a fixed depth that must be accepted
GUARD_ERRORS, GUARD_DRAFTS = (
    4,
    400,
)  # standard errors below that share, for a pause; draft tokens that are judged together
GUARD_PAUSE, LONGEST_GUARD_PAUSE = 64, 1024  # forwards without draft tokens


class DraftLength:
    """Chooses the draft length, and learns from each forward. One for a run; sequences may share it.

    depth: auto, or a number of draft tokens. guard: pause a fixed depth while hardly any draft token is accepted. say:
    gets a notice of that."""

    def __init__(self, depth: int | str = "auto", guard: bool = True, say: Callable[[str], object] = say):
        self.guard = guard
        self.say = say
        self.guard_pause = GUARD_PAUSE
        self.guard_left = 0  # forwards of the pause
        self.paused_forwards = 0
        self.judged: tuple[int, int] = 0, 0  # draft tokens since the last pause or judgment, and how many were accepted
        self.fixed = None if depth == "auto" else int(depth)
        self.most = MAX_DEPTH if self.fixed is None else self.fixed
        self.acceptance: dict[str, list[DecayedRatio]] = {}  # proposer -> of each position
        # Forwards that prefill beside the sequences that draft have times of their own: they ask for nearly all
        # experts, and say nothing of those without.
        self.time, self.mixed_time = ForwardTime(), ForwardTime()
        self.drafting: dict[str, DecayedRatio] = {}  # proposer -> seconds a draft token
        self.pause = FIRST_PAUSE
        self.since = 0  # forwards since the last trial
        self.trials = 0
        self.trial: tuple[int, Choice] | None = None  # (sequence, choice) that is tried
        self.trial_left = 0  # forwards of it
        self.depths: Counter[int] = Counter()  # draft tokens of a sequence -> forwards that it took part in
        self.tried: Counter[tuple[str, int]] = Counter()  # (proposer, position) -> draft tokens
        self.accepted: Counter[tuple[str, int]] = Counter()
        self.expected: tuple[float, float] | None = None  # (tokens, seconds) of the forward under way
        self.planned = [0, 0.0, 0.0, 0.0, 0.0]  # forwards of auto; expected tokens, seconds; measured tokens, seconds

    # --- what is expected ---

    def acceptance_at(self, proposer: str, position: int) -> DecayedRatio:
        """How often the draft token at a position, 0 for the first, is accepted if those before it are."""
        means = self.acceptance.setdefault(proposer, [])
        while len(means) <= position:
            means.append(DecayedRatio(means[-1].value if means else PRIOR[proposer], PRIOR_WEIGHT))
        return means[position]

    def chances(self, proposer: str | None, depth: int, is_optimistic: bool = False) -> list[float]:
        """For each draft token the chance that it and those before it are accepted, or what may be hoped for."""
        out, all_accepted = [], 1.0
        for position in range(depth):
            assert proposer
            share = self.acceptance_at(proposer, position)
            all_accepted *= share.optimistic if is_optimistic else share.value
            out.append(all_accepted)
        return out

    def known_depth(self, proposer: str) -> int:
        """Positions of which enough is known to go one further."""
        means = self.acceptance.get(proposer, ())
        return next((i for i, mean in enumerate(means) if mean.b < PRIOR_WEIGHT + ENOUGH), len(means))

    def drafting_seconds(self, proposer: str) -> float:
        """Seconds of making one draft token."""
        return self.drafting[proposer].value if proposer in self.drafting else 0.0

    # --- the choice ---

    def choose(
        self, offers: list[Offer], num_rows: int | None = None, room: int = sys.maxsize, is_mixed: bool = False
    ) -> list[Choice]:
        """offers: for each sequence -> a choice for each.

        num_rows: token rows of the forward without any draft token, by default one a sequence. room: for the draft
        tokens of all together. is_mixed: the forward prefills, too.
        """
        self.expected = None
        num_rows = num_rows or len(offers)
        if self.most == 0 or not any(offers):
            return [(None, 0)] * len(offers)
        if self.fixed is not None:
            if self.guard_left:
                self.guard_left -= 1
                self.paused_forwards += 1
                return [(None, 0)] * len(offers)
            most = min(self.fixed, room // len(offers))
            return [deepest_choice(offer, most) for offer in offers]
        time = self.mixed_time if is_mixed else self.time
        if not time.is_known(num_rows):
            return [(None, 0)] * len(offers)  # first of all, what a forward costs without draft tokens
        offers = [{name: min(most, self.known_depth(name) + 1) for name, most in offer.items()} for offer in offers]
        chosen = self.best_choices(offers, num_rows, room, time)
        self.since += 1
        if self.since >= self.pause:
            self.start_trial(offers, chosen)
        if self.trial and self.trial_left and self.trial[0] < len(chosen):
            at, choice = self.trial
            others = sum(depth for _, depth in chosen) - chosen[at][1]
            if others + choice[1] <= room and choice in all_choices(offers[at]):
                chosen[at], self.trial_left = choice, self.trial_left - 1
        tokens = len(offers) + sum(sum(self.chances(*choice)) for choice in chosen)
        self.expected = tokens, time.seconds(num_rows + sum(depth for _, depth in chosen))
        return chosen

    def best_choices(self, offers: list[Offer], num_rows: int, room: int, time: ForwardTime) -> list[Choice]:
        """The choices that promise the most tokens a second, by this ForwardTime."""
        best: list[Choice] = [(None, 0)] * len(offers)
        best_rate = len(offers) / time.seconds(num_rows)
        names = sorted({name for offer in offers for name in offer})
        # Which proposer a sequence takes if it takes one: for each order of preference.
        orders = {
            tuple(next((name for name in order if name in offer), None) for offer in offers)
            for order in permutations(names)
        }
        for proposers in sorted(orders, key=str):
            drafts = self.ranked_drafts(proposers, offers, num_rows, time)[:room]
            tokens, making, end, depths = float(len(offers)), 0.0, 0, [0] * len(offers)
            for count, (chance, seconds, _) in enumerate(drafts, 1):
                tokens, making = tokens + chance, making + seconds
                rate = tokens / (time.seconds(num_rows + count) + making) / GAIN
                if rate > best_rate:
                    best_rate, end = rate, count
            if end:
                for _, _, sequence in drafts[:end]:
                    depths[sequence] += 1
                best = [(name, depth) if depth else (None, 0) for name, depth in zip(proposers, depths, strict=True)]
        return best

    def ranked_drafts(
        self, proposers: tuple[str | None, ...], offers: list[Offer], num_rows: int, time: ForwardTime
    ) -> list[tuple[float, float, int]]:
        """-> (chance, seconds of making it, sequence) of each draft token, those that promise most for their time
        first."""
        total = sum(offer[name] for name, offer in zip(proposers, offers, strict=True) if name)
        row_seconds = max(1e-9, (time.seconds(num_rows + total) - time.seconds(num_rows)) / total)
        drafts = []
        for sequence, (name, offer) in enumerate(zip(proposers, offers, strict=True)):
            if name:
                making = self.drafting_seconds(name)
                for position, chance in enumerate(self.chances(name, offer[name], is_optimistic=True)):
                    drafts.append((-chance / (row_seconds + making), position, sequence, chance, making))
        return [(chance, making, sequence) for _, _, sequence, chance, making in sorted(drafts)]

    def start_trial(self, offers: list[Offer], chosen: list[Choice]) -> None:
        """For some forwards one sequence makes another choice than the best."""
        able = [at for at, offer in enumerate(offers) if offer]
        at = able[self.trials % len(able)]
        self.trial, self.trial_left = (at, self.other_choice(chosen[at], all_choices(offers[at]))), LONGEST_TRIAL
        self.since = 0
        self.trials += 1
        self.pause = min(2 * self.pause, LONGEST_PAUSE)

    def other_choice(self, best: Choice, choices: list[Choice]) -> Choice:
        """Another choice than the best: by turns one draft token more, one fewer."""
        name, depth = best
        if name is None:
            return next(choice for choice in choices if choice[1] == 1)
        wanted = depth + 1 if self.trials % 2 == 0 else depth - 1
        return next((choice for choice in choices if choice == (name, wanted)), (None, 0) if wanted == 0 else best)

    def update(
        self,
        turns: list[tuple[str | None, int, int]],
        num_rows: int,
        drafting: dict[str | None, float],
        cost: ForwardCost,
        is_mixed: bool = False,
    ) -> None:
        """Learn from a forward. turns: of each sequence (proposer, draft tokens, how many were accepted); num_rows: its
        token rows without them; drafting: seconds of making them, by proposer; is_mixed as of `choose`."""
        num_drafts: Counter[str | None] = Counter()
        for at, (name, depth, accepted) in enumerate(turns):
            if (self.trial is None or at == self.trial[0]) and (accepted < depth or not depth):
                self.trial_left = 0
            self.depths[depth] += 1
            num_drafts[name] += depth
            for position in range(min(accepted + 1, depth)):
                assert name
                self.acceptance_at(name, position).add(accepted > position)
                self.tried[name, position] += 1
                self.accepted[name, position] += accepted > position
        time = self.mixed_time if is_mixed else self.time
        time.add(num_rows + num_drafts.total(), cost)
        for name, count in num_drafts.items():
            if name and count:
                self.drafting.setdefault(name, DecayedRatio()).add(drafting[name], count)
        if self.fixed is not None and self.guard and num_drafts.total():
            self.judge(num_drafts.total(), sum(accepted for _, _, accepted in turns))
        if self.expected:
            added = (1, *self.expected, sum(1 + accepted for _, _, accepted in turns), cost.seconds)
            self.planned = [a + b for a, b in zip(self.planned, added, strict=True)]

    def judge(self, num_drafts: int, num_accepted: int) -> None:
        """Pause a fixed depth if too few of the last draft tokens were accepted."""
        drafts, accepted = self.judged[0] + num_drafts, self.judged[1] + num_accepted
        self.judged = (drafts, accepted) if drafts < GUARD_DRAFTS else (0, 0)
        if accepted >= GUARD_SHARE * drafts:
            self.guard_pause = GUARD_PAUSE
        if accepted + GUARD_ERRORS * (accepted + 1) ** 0.5 >= GUARD_SHARE * drafts:
            return
        self.judged = 0, 0
        self.guard_left = self.guard_pause
        self.guard_pause = min(2 * self.guard_pause, LONGEST_GUARD_PAUSE)
        self.say(
            f"[draft] {accepted} of {drafts} draft tokens accepted: none for {self.guard_left} forwards, "
            "then another try (DRAFT_GUARD=0 never pauses)"
        )

    # --- statistics ---

    def statistics(self) -> dict[str, Any]:
        """For REPORT."""
        proposers = sorted({name for name, _ in self.tried})
        return {
            "draft_acceptance": {name: self.by_position(name) for name in proposers},
            "draft_depths": {str(depth): count for depth, count in sorted(self.depths.items())},
            "draft_paused_forwards": self.paused_forwards,
            "draft_forwards_of_auto": self.planned[0],
            "draft_expected_tokens_seconds": self.planned[1:3],
            "draft_measured_tokens_seconds": self.planned[3:5],
            "experts_by_rows": {str(n): rows.experts.value for n, rows in sorted(self.time.rows.items())},
        }

    def by_position(self, proposer: str) -> list[list[int]]:
        """[[accepted, tried] of the first draft token, of the second, ...]."""
        positions = range(1 + max(position for name, position in self.tried if name == proposer))
        return [[self.accepted[proposer, p], self.tried[proposer, p]] for p in positions]

    def summary_lines(self) -> Iterator[str]:
        """The statistics in two lines; none where there were no draft tokens."""
        proposers = sorted({name for name, _ in self.tried})
        if not proposers:
            return
        words = []
        for name in proposers:
            shares = [f"{a / t:.0%}" for a, t in self.by_position(name)]
            words.append(f"{name} {' '.join(shares)} of {self.tried[name, 0]}")
        depths = ", ".join(f"{depth}: {count}" for depth, count in sorted(self.depths.items()))
        forwards, turns = sum(rows.forwards for rows in self.time.rows.values()), self.depths.total()
        batched = f" (mean batch of {turns / forwards:.1f} sequences)" if turns > forwards else ""
        yield f"[draft] accepted by position: {' | '.join(words)} | forwards by draft tokens{batched}: {depths}"
        rows = self.time.rows
        often = sorted(rows, key=lambda n: -rows[n].forwards)[: MAX_DEPTH + 1]
        more = [f"{n} rows {rows[n].experts.value:.1f}" for n in sorted(often)]
        line = f"[draft] experts per forward: {', '.join(more)}"
        if count := self.planned[0]:
            tokens, seconds, measured_tokens, measured_seconds = (number / count for number in self.planned[1:])
            line += (
                f" | auto expected {tokens:.2f} tokens in {seconds * 1e3:.1f} ms per forward, "
                f"measured {measured_tokens:.2f} in {measured_seconds * 1e3:.1f} ms"
            )
        yield line


def deepest_choice(offer: Offer, most: int) -> Choice:
    """The choice at a fixed depth."""
    if not offer or most < 1:
        return None, 0
    name = "MTP" if "MTP" in offer else next(iter(offer))
    return name, min(most, offer[name])


def all_choices(offer: Offer) -> list[Choice]:
    none: Choice = None, 0
    return [none, *((name, depth) for name, most in offer.items() for depth in range(1, most + 1))]
