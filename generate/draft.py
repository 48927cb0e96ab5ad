"""Speculative decoding: draft tokens for each sequence. A forward verifies them, so a wrong one costs time alone.

T token rows, D model width.
"""

import operator
import time
from collections.abc import Callable, Collection

from torch import Tensor

from experts.route_observer import ForwardRoutes
from forward.chunk import Chunk
from forward.lm_head import LOGIT_ROWS
from forward.model import Model
from generate.draft_length import Choice, DraftLength, Offer
from generate.forward_time import ForwardCost
from generate.proposers import MtpProposer, NgramProposer, Proposers, catch_up, draft_by_mtp
from generate.sequence import Drafts, Prefill, PromptChunks, Sequence
from kernels.dispatch import rms_norm


class NoDraft:
    """No draft tokens: a forward gives a sequence one token."""

    routes: ForwardRoutes | None = None  # observer of the next forward, where it verifies draft tokens

    def propose(self, sequences: list[Sequence], prompt_chunks: PromptChunks = ()) -> Drafts:
        """-> draft tokens for each sequence of the next forward, which has these chunks of prompts beside them."""
        return [[] for _ in sequences]

    def observe(self, chunk: Chunk, hidden: Tensor, items: Collection[Sequence | Prefill]) -> None:
        """A chunk of these sequences and prompts went through the layers; hidden [T, D] before the final norm."""

    def finish(self, accepted: list[int]) -> None:
        """The forward over the last drafts is done: how many draft tokens of each sequence were accepted."""

    def abandon(self) -> None:
        """The forward over the last drafts failed or was stopped: nothing is learned from it."""


class Drafter(NoDraft):
    """Chooses a proposer and a number of draft tokens for each sequence, as its DraftLength expects them to pay."""

    def __init__(self, model: Model, draft_length: DraftLength, clock: Callable[[], float] = time.perf_counter):
        self.model, self.draft_length, self.clock = model, draft_length, clock
        # Of the forward under way:
        self.turns: list[tuple[str | None, int, int]] = []  # (proposer, draft tokens, pending ids) of each sequence
        self.num_prompt_rows = 0
        self.drafting: dict[str | None, float] = {}  # proposer -> seconds of making its drafts
        self.before = ForwardCost(0, 0, 0, 0)

    def observe(self, chunk: Chunk, hidden: Tensor, items: Collection[Sequence | Prefill]) -> None:
        if not self.model.weights.mtp:
            return
        hidden = rms_norm(hidden, self.model.weights.norm, self.model.config.rms_norm_eps)
        proposers = {id(item.kv): item.proposers for item in items}
        for segment in chunk.segments:
            if of_sequence := proposers[id(segment.kv)]:
                assert of_sequence.mtp
                of_sequence.mtp.observe(chunk, segment, hidden[segment.rows], self.routes is not None)

    def propose(self, sequences: list[Sequence], prompt_chunks: PromptChunks = ()) -> Drafts:
        for prompt, _ in prompt_chunks:
            mtp = prompt.proposers.mtp if prompt.proposers else None
            if mtp and len(mtp.tokens) > MtpProposer.FEW:
                mtp.advance()
        self.num_prompt_rows = sum(count for _, count in prompt_chunks)
        num_pending = [len(sequence.ids) - sequence.kv.length for sequence in sequences]
        if self.draft_length.most == 0 and not self.model.weights.mtp:  # nothing to choose, no hidden row that waits
            self.turns, self.before = [(None, 0, num_new) for num_new in num_pending], self.measure()
            return super().propose(sequences)
        num_rows = sum(num_pending) + self.num_prompt_rows
        # One chunk, and no more logits than memory is planned for.
        room = max(0, min(LOGIT_ROWS - sum(num_pending), self.model.prefill_chunk - num_rows))
        by_ngram, offers = [], []
        for sequence, num_new in zip(sequences, num_pending, strict=True):
            proposers = proposers_of(sequence)
            most = min(sequence.num_left - 1, self.draft_length.most, room)
            name, draft = proposers.ngrams.propose(sequence.ids, most) if most > 0 else ("n-gram", [])
            by_ngram.append(draft)
            offers.append({name: len(draft)} if draft else {})
            # With more pending ids the hidden row before the first draft token is not known yet.
            if proposers.mtp and most > 0 and num_new == 1 and proposers.mtp.is_ready:
                offers[-1]["MTP"] = most
        choices = self.draft_length.choose(offers, num_rows, room, self.num_prompt_rows > 0)
        choices = align_choices(sequences, choices, offers, room)
        drafts = self.make_drafts(sequences, choices, by_ngram)
        self.turns = [
            (name, len(draft), num_new) for (name, _), draft, num_new in zip(choices, drafts, num_pending, strict=True)
        ]
        self.before = self.measure()
        self.routes = ForwardRoutes() if any(drafts) else None
        return drafts

    def make_drafts(self, sequences: list[Sequence], choices: list[Choice], by_ngram: Drafts) -> Drafts:
        """-> draft tokens of each sequence; the time is kept in `drafting`."""
        started = self.clock()
        drafts = [draft[:depth] for draft, (_, depth) in zip(by_ngram, choices, strict=True)]
        by_mtp = [i for i, (name, _) in enumerate(choices) if name == "MTP"]
        if by_mtp:
            wanted = [(proposers_of(sequences[i]), sequences[i].ids, choices[i][1]) for i in by_mtp]
            for i, draft in zip(by_mtp, self.run_mtp(wanted), strict=True):
                drafts[i] = draft
        between = self.clock()
        idle = [sequence for i, sequence in enumerate(sequences) if i not in by_mtp]
        self.limit_waiting([(proposers_of(sequence).mtp, sequence.ids) for sequence in idle])
        self.drafting = dict.fromkeys((name for name, _ in choices), self.clock() - between)
        self.drafting["MTP"] = between - started
        return drafts

    def run_mtp(self, wanted: list[tuple[Proposers, list[int], int]]) -> Drafts:
        """wanted [(proposers, ids, depth), ...] -> draft tokens of the MTP layer for each."""
        return draft_by_mtp(
            self.model, [(proposers.mtp, ids, depth) for proposers, ids, depth in wanted if proposers.mtp]
        )

    def limit_waiting(self, idle: list[tuple[MtpProposer | None, list[int]]]) -> None:
        """Run hidden rows through the MTP layer where too many wait, of sequences that need no draft of it now."""
        ready = [(mtp, ids) for mtp, ids in idle if mtp and mtp.is_ready]
        if sum(len(mtp.tokens) for mtp, _ in ready) > MtpProposer.MANY:
            catch_up(self.model, ready)

    def measure(self) -> ForwardCost:
        """Of all forwards so far."""
        counters = self.model.experts.counters
        return ForwardCost(self.clock(), counters.wait_seconds, counters.hits + counters.misses, counters.misses)

    def finish(self, accepted: list[int]) -> None:
        cost = ForwardCost(*map(operator.sub, self.measure(), self.before))
        turns = [(name, depth, count) for (name, depth, _), count in zip(self.turns, accepted, strict=True)]
        num_rows = sum(num_new for _, _, num_new in self.turns) + self.num_prompt_rows
        self.draft_length.update(turns, num_rows, self.drafting, cost, self.num_prompt_rows > 0)
        if self.routes:
            accepted_rows: set[int] = set()
            first = 0
            for (_, depth, num_new), count in zip(self.turns, accepted, strict=True):
                accepted_rows.update(range(first, first + num_new + count))
                first += num_new + depth
            self.retract_uses(accepted_rows.union(range(first, first + self.num_prompt_rows)))

    def abandon(self) -> None:
        self.retract_uses(set())

    def retract_uses(self, accepted_rows: set[int]) -> None:
        """Expert uses by the other token rows of the forward do not count."""
        if self.routes:
            self.model.experts.retract_uses(self.routes.rejected_uses(accepted_rows))
            self.routes = None


def proposers_of(sequence: Sequence) -> Proposers:
    assert sequence.proposers, "a sequence that drafts has proposers"
    return sequence.proposers


def align_choices(sequences: list[Sequence], choices: list[Choice], offers: list[Offer], room: int) -> list[Choice]:
    """Let sequences at the same place of the same text, such as greedy ones, make the same choice, where there is room:
    then they stay together, and ask for the same experts."""
    keys = [
        (len(sequence.ids), *sequence.ids[-NgramProposer.LONGEST :], *offer.items())
        for sequence, offer in zip(sequences, offers, strict=True)
    ]
    deepest: dict[tuple, Choice] = {}
    for key, choice in zip(keys, choices, strict=True):
        deepest[key] = max(deepest.get(key, choice), choice, key=lambda choice: choice[1])
    same = [deepest[key] for key in keys]
    return same if sum(depth for _, depth in same) <= room else choices
