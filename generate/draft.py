"""Where drafts come from. A source guesses; the forward verifies, so a wrong guess costs time and nothing else."""

import copy
import time

import torch

from experts.route_observer import ForwardRoutes
from forward.lm_head import LOGIT_ROWS
from forward.mtp import mtp, mtp_logits
from kernels.dispatch import rms_norm


class NoDraft:
    """The empty source: one token per forward. `propose` and `verified` are for a sequence alone, the last four methods
    for several that go through the layers together."""

    routes = None  # the observer of the next forward

    def follow(self, chunk, hidden):
        """A chunk went through the layers; hidden [rows, D] before the final norm."""

    def propose(self, ids, max_tokens):
        """ids of the sequence so far -> at most max_tokens guesses of what follows."""
        return []

    def verified(self, accepted):
        """The forward over the last guesses is done, and so many of them were right."""

    def clone(self, cache, ids):
        """The source of one sequence with these ids -> one of several that begin as it did, in a LatentCache."""
        return self

    def keep(self, rows):
        """Go on with some sequences only, in the order given."""

    def propose_rows(self, wanted):
        """wanted [(ids, max_tokens, num_new), ...]: as of `propose`, for each sequence, and how many of its ids the
        forward takes beside the guesses -> guesses of each."""
        return [[] for _ in wanted]

    def verified_rows(self, accepted):
        """As `verified`: a number for each sequence."""


class NgramProposer:
    """What followed when the last tokens stood there before: the longest match of 2 to 8 tokens, the latest of them."""

    SHORTEST, LONGEST, LONG = 2, 8, 4
    TRIED = 64  # earlier places of a pair that are looked at

    def __init__(self):
        self.places, self.known = {}, 1  # last SHORTEST tokens -> where they ended; tokens that are in there

    def clone(self):
        other = NgramProposer()
        other.places, other.known = self.places.copy(), self.known
        return other

    def read(self, ids):
        """Learn the places of ids that are new."""
        for end in range(max(self.known, self.SHORTEST), len(ids)):
            pair = tuple(ids[end - self.SHORTEST : end])
            self.places[pair] = (*self.places.get(pair, ()), end)[-self.TRIED :]
        self.known = max(self.known, len(ids))

    def offer(self, ids, max_tokens):
        """-> (name of the source, guesses); a long match is another source than a short one, for it is right more
        often."""
        self.read(ids)
        best, at = 0, None
        for end in reversed(self.places.get(tuple(ids[-self.SHORTEST :]), ())):
            length = self.SHORTEST
            while length < min(self.LONGEST, end) and ids[end - length - 1] == ids[-length - 1]:
                length += 1
            if length > best:
                best, at = length, end
        if at is None:
            return "n-gram", []
        return "long n-gram" if best >= self.LONG else "n-gram", list(ids[at : at + max_tokens])


class MtpProposer:
    """The model's own multi-token-prediction layer on one KvCache. Hidden rows are kept until a token follows them."""

    FEW, MANY = 16, 256  # rows of a chunk that may wait; rows that wait at most, of all sequences together

    def __init__(self, model, kv):
        self.model, self.kv = model, kv
        self.first, self.hidden = kv.length, None  # position of the first row that waits; [rows, D]
        self.tokens = []  # at the positions of these rows

    @property
    def is_ready(self):
        """Whether the row before the next token waits: not so where the last forward came to no end."""
        return self.hidden is not None and 0 < self.kv.length - self.first <= len(self.hidden)

    def clone(self, kv):
        """The same on a clone of our KvCache."""
        other = MtpProposer(self.model, kv)
        other.first, other.hidden, other.tokens = self.first, self.hidden, self.tokens
        return other

    def follow(self, chunk, segment, hidden, is_verifying=False):
        """Keep our rows of a chunk, behind the final norm; those of a prefill go through the layer at once, but for the
        last, and not while draft tokens are verified: that time is not theirs."""
        self.keep(segment.first_position, hidden, chunk.ids[segment.rows].tolist())
        if len(hidden) > self.FEW and not is_verifying:
            self.absorb()

    def keep(self, first, hidden, tokens):
        waiting = first - self.first
        if self.hidden is not None and 0 <= waiting <= len(self.hidden):
            self.hidden, self.tokens = torch.cat([self.hidden[:waiting], hidden]), self.tokens[:waiting] + tokens
        else:
            self.first, self.hidden, self.tokens = first, hidden, tokens
        if self.first != self.kv.mtp_base + self.kv.mtp_length:
            self.kv.mtp_base, self.kv.mtp_length = self.first, 0  # the slots before are not known: begin anew

    def waiting(self, ids):
        """-> (tokens that follow the rows that wait, these rows); they wait no more."""
        rows = self.hidden[: self.kv.length - self.first]
        tokens = ids[self.first + 1 : self.first + 1 + len(rows)]
        self.forget(len(rows))
        return tokens, rows

    def absorb(self):
        """All rows that wait but the last go through the layer: the token that follows it is not known yet."""
        mtp(self.model, [(self.tokens[1:], self.kv)], self.hidden[:-1])
        self.forget(len(self.hidden) - 1)

    def forget(self, count):
        """So many rows wait no more."""
        self.first, self.hidden, self.tokens = self.first + count, self.hidden[count:], self.tokens[count:]

    def resume(self, ids):
        """The sequence goes on with these ids, of which the KV cache holds the first."""
        if self.hidden is None or self.first > self.kv.length:
            self.first, self.hidden, self.tokens = self.kv.length, None, []
        elif self.first < self.kv.length:
            catch_up(self.model, [(self, ids)])


def mtp_guesses(model, wanted):
    """wanted [(MtpSource, ids, depth), ...], ids: those of its KV cache and one more -> guesses of each. Each guess is
    fed back for the next, those of all sequences together."""
    s = catch_up(model, [(source, ids) for source, ids, _ in wanted])
    lengths, guesses = [source.kv.mtp_length for source, _, _ in wanted], [[] for _ in wanted]
    going = list(range(len(wanted)))
    while True:
        best = mtp_logits(model, s).argmax(-1).tolist()
        for i, guess in zip(going, best, strict=True):
            guesses[i].append(guess)
        more = [at for at, i in enumerate(going) if len(guesses[i]) < wanted[i][2]]
        if not more:
            break
        going = [going[at] for at in more]
        s = mtp(model, [(guesses[i][-1:], wanted[i][0].kv) for i in going], s[more])
    for (source, _, _), length in zip(wanted, lengths, strict=True):
        source.kv.mtp_length = length  # slots of guesses are made anew when they are tokens
    return guesses


def catch_up(model, wanted):
    """wanted [(MtpSource, ids), ...] as of mtp_guesses, a row waits in each: all that wait go through the layer -> s
    [sources, D] of the last slot of each."""
    batch, rows = [], []
    for source, ids in wanted:
        tokens, hidden = source.waiting(ids)
        batch.append((tokens, source.kv))
        rows.append(hidden)
    s = mtp(model, batch, torch.cat(rows))
    return s[torch.tensor([len(tokens) for tokens, _ in batch]).cumsum(0) - 1]


class Proposers:
    """What one sequence guesses from."""

    def __init__(self, model, kv):
        self.kv, self.ngrams = kv, NgramProposer()
        self.mtp = MtpProposer(model, kv) if model.weights.mtp else None

    def clone(self, kv):
        """The same on a clone of our KvCache."""
        other = copy.copy(self)
        other.kv, other.ngrams, other.mtp = kv, self.ngrams.clone(), self.mtp and self.mtp.clone(kv)
        return other


class Drafter(NoDraft):
    """All sources of one sequence, or of several; the governor chooses one for each, and how far it may go."""

    def __init__(self, model, kv, governor, clock=time.perf_counter):
        """kv None: of no sequence yet, see `take`."""
        self.model, self.governor, self.clock = model, governor, clock
        self.rows = [Proposers(model, kv)] if kv else []
        self.reading = []  # Sources of sequences that do not guess yet
        self.turns = self.drafting = self.before = None  # of the forward under way
        self.num_others = 0  # its rows of sequences that do not guess

    def clone(self, cache, ids):
        [row] = self.rows
        row.ngrams.read(ids)  # once for all
        other = copy.copy(self)
        other.rows = [row.clone(kv) for kv in cache.states]
        return other

    def resume(self, ids):
        """Another text on the KV cache that we follow, which holds the first of these ids: what stood elsewhere is
        forgotten, what the multi-token-prediction layer remembers is kept."""
        [row] = self.rows
        row.ngrams = NgramProposer()
        if row.mtp:
            row.mtp.resume(ids)

    def keep(self, rows):
        self.rows = [self.rows[row] for row in rows]

    def take(self, rows, reading=()):
        """Which sequences go through the layers next, as Sources: those that guess, in the order of propose_rows, and
        those of which more of the prompt is read in."""
        self.rows, self.reading = list(rows), list(reading)

    def follow(self, chunk, hidden):
        if not self.model.weights.mtp:
            return
        hidden = rms_norm(hidden, self.model.weights.norm, self.model.config.rms_norm_eps)
        sources = {id(row.kv): row.mtp for row in (*self.rows, *self.reading)}
        for segment in chunk.segments:
            if source := sources.get(id(segment.kv)):
                source.follow(chunk, segment, hidden[segment.rows], self.routes is not None)

    def propose(self, ids, max_tokens):
        return self.propose_rows([(ids, max_tokens, 1)])[0]

    def verified(self, accepted):
        self.verified_rows([accepted])

    def propose_rows(self, wanted, num_others=0):
        """num_others: rows of the forward that belong to sequences which do not guess; they come after all others."""
        self.num_others = num_others
        for row in self.reading:
            if row.mtp and row.mtp.hidden is not None and len(row.mtp.hidden) > MtpProposer.FEW:
                row.mtp.absorb()
        num_own = sum(num_new for _, _, num_new in wanted)
        num_rows = num_own + num_others
        # One chunk, and no more logits than memory is planned for.
        room = max(0, min(LOGIT_ROWS - num_own, self.model.prefill_chunk - num_rows))
        found, offers = [], []
        for row, (ids, max_tokens, num_new) in zip(self.rows, wanted, strict=True):
            most = min(max_tokens, self.governor.most, room)
            name, guesses = row.ngrams.offer(ids, most) if most > 0 else ("n-gram", [])
            found.append(guesses)
            offers.append({name: len(guesses)} if guesses else {})
            # With more new ids the hidden row before the guess is not known yet.
            if row.mtp and most > 0 and num_new == 1 and row.mtp.is_ready:
                offers[-1]["MTP"] = most
        choices = self.governor.choose(offers, num_rows, room, num_others > 0)
        choices = self.together(choices, offers, wanted, room)
        guesses, self.drafting = self.make(choices, wanted, found)
        self.turns = [
            (source, len(of_row), num_new)
            for (source, _), of_row, (_, _, num_new) in zip(choices, guesses, wanted, strict=True)
        ]
        self.before = self.look()
        self.routes = ForwardRoutes() if any(guesses) else None
        return guesses

    def together(self, choices, offers, wanted, room):
        """Sequences at the same place of the same text, such as greedy ones, do the same: then they stay together, and
        ask for the same experts."""
        keys = [
            (len(ids), *ids[-NgramProposer.LONGEST :], *offer.items())
            for (ids, _, _), offer in zip(wanted, offers, strict=True)
        ]
        deepest = {}
        for key, choice in zip(keys, choices, strict=True):
            deepest[key] = max(deepest.get(key, choice), choice, key=lambda choice: choice[1])
        same = [deepest[key] for key in keys]
        return same if sum(depth for _, depth in same) <= room else choices

    def make(self, choices, wanted, found):
        """-> (guesses of each sequence, {source: seconds})."""
        started = self.clock()
        guesses = [of_row[:depth] for of_row, (_, depth) in zip(found, choices, strict=True)]
        chained = [i for i, (source, _) in enumerate(choices) if source == "MTP"]
        if chained:
            of_head = self.chain([(self.rows[i], wanted[i][0], choices[i][1]) for i in chained])
            for i, of_row in zip(chained, of_head, strict=True):
                guesses[i] = of_row
        between = self.clock()
        self.keep_up([(self.rows[i].mtp, wanted[i][0]) for i in range(len(wanted)) if i not in chained])
        seconds = dict.fromkeys((source for source, _ in choices), self.clock() - between)
        return guesses, seconds | {"MTP": between - started}

    def chain(self, wanted):
        """wanted [(Sources, ids, depth), ...] -> guesses of the multi-token-prediction layer for each."""
        return mtp_guesses(self.model, [(row.mtp, ids, depth) for row, ids, depth in wanted])

    def keep_up(self, idle):
        """idle [(MtpSource or None, ids), ...], of which no guess is wanted now: let not too many rows wait."""
        idle = [(source, ids) for source, ids in idle if source and source.is_ready]
        if sum(len(source.hidden) for source, _ in idle) > MtpProposer.MANY:
            catch_up(self.model, idle)

    def look(self):
        counters = self.model.experts.counters
        return self.clock(), counters.wait_seconds, counters.hits + counters.misses, counters.misses

    def verified_rows(self, accepted):
        spent = [now - before for now, before in zip(self.look(), self.before, strict=True)]
        turns = [(source, depth, right) for (source, depth, _), right in zip(self.turns, accepted, strict=True)]
        num_rows = sum(num_new for _, _, num_new in self.turns) + self.num_others
        self.governor.note(turns, num_rows, self.drafting, *spent, self.num_others > 0)
        if self.routes:
            at, right_rows = 0, set()
            for (_, depth, num_new), right in zip(self.turns, accepted, strict=True):
                right_rows.update(range(at, at + num_new + right))
                at += num_new + depth
            right_rows.update(range(at, at + self.num_others))
            self.retract_uses(right_rows)

    def given_up(self):
        """The forward over the last guesses came to no end: nothing is learned from it."""
        if self.routes:
            self.retract_uses(set())

    def retract_uses(self, accepted_rows):
        """Uses of experts by other rows of the forward do not count."""
        self.model.experts.retract_uses(self.routes.rejected_uses(accepted_rows))
        self.routes = None
