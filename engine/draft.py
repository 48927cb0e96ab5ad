"""Where drafts come from. A source guesses; spec_decode verifies, so a wrong guess costs time and nothing else."""

import time

import torch

from forward.mtp import mtp, mtp_logits
from kernels.dispatch import rms_norm


class NoDraft:
    """The empty source: one token per forward."""

    def follow(self, chunk, hidden):
        """A chunk went through the layers; hidden [rows, D] before the final norm."""

    def propose(self, ids, max_tokens):
        """ids of the sequence so far -> at most max_tokens guesses of what follows."""
        return []

    def verified(self, accepted):
        """The forward over the last guesses is done, and so many of them were right."""


class NgramSource:
    """What followed when the last tokens stood there before: the longest match of 2 to 8 tokens, the latest of them."""

    SHORTEST, LONGEST, LONG = 2, 8, 4
    TRIED = 64  # earlier places of a pair that are looked at

    def __init__(self):
        self.places, self.known = {}, 1  # last SHORTEST tokens -> where they ended; tokens that are in there

    def offer(self, ids, max_tokens):
        """-> (name of the source, guesses); a long match is another source than a short one, for it is right more
        often."""
        for end in range(max(self.known, self.SHORTEST), len(ids)):
            self.places.setdefault(tuple(ids[end - self.SHORTEST : end]), []).append(end)
        self.known = max(self.known, len(ids))
        best, at = 0, None
        for end in reversed(self.places.get(tuple(ids[-self.SHORTEST :]), ())[-self.TRIED :]):
            length = self.SHORTEST
            while length < min(self.LONGEST, end) and ids[end - length - 1] == ids[-length - 1]:
                length += 1
            if length > best:
                best, at = length, end
        if at is None:
            return "n-gram", []
        return "long n-gram" if best >= self.LONG else "n-gram", list(ids[at : at + max_tokens])


class MtpSource:
    """The model's own multi-token-prediction layer on one KvState. Hidden rows are kept until a token follows them."""

    FEW, MANY = 16, 256  # rows of a chunk that may wait; rows that wait at most

    def __init__(self, model, kv):
        self.model, self.kv = model, kv
        self.first, self.hidden = kv.length, None  # position of the first row that waits; [rows, D]

    def follow(self, chunk, hidden):
        """Keep the rows of our sequence; those of a prefill go through the layer at once, but for the last."""
        for segment in chunk.segments:
            if segment.kv is self.kv:
                self.keep(segment.first, hidden[segment.rows])
                rows = segment.stop - segment.start
                if rows > self.FEW:
                    skipped = self.first + 1 - segment.first  # -1 when the row before the chunk waits
                    self.absorb(chunk.ids[segment.start + skipped : segment.stop].tolist())

    def keep(self, first, hidden):
        hidden = rms_norm(hidden, self.model.weights.norm, self.model.config.rms_norm_eps)
        waiting = first - self.first
        if self.hidden is not None and 0 <= waiting <= len(self.hidden):
            self.hidden = torch.cat([self.hidden[:waiting], hidden])
        else:
            self.first, self.hidden = first, hidden
        if self.first != self.kv.mtp_base + self.kv.mtp_length:
            self.kv.mtp_base, self.kv.mtp_length = self.first, 0  # the slots before are not known: begin anew

    def absorb(self, tokens):
        """The tokens that follow the first rows that wait -> s [1, D] of the last of them."""
        s = mtp(self.model, self.kv, tokens, self.hidden[: len(tokens)])
        self.hidden, self.first = self.hidden[len(tokens) :], self.first + len(tokens)
        return s[-1:]

    def keep_up(self, ids):
        """No guess is wanted now: let not too many rows wait."""
        if self.hidden is not None and len(self.hidden) > self.MANY:
            self.catch_up(ids)

    def catch_up(self, ids):
        self.hidden = self.hidden[: self.kv.length - self.first]
        return self.absorb(ids[self.first + 1 : self.first + 1 + len(self.hidden)])

    def propose(self, ids, max_tokens):
        """ids: those of the KV state and one more -> guesses; each is fed back for the next."""
        s, guesses = self.catch_up(ids), []
        length = self.kv.mtp_length
        while True:
            guesses.append(int(mtp_logits(self.model, s)[0].argmax()))
            if len(guesses) == max_tokens:
                break
            s = mtp(self.model, self.kv, guesses[-1:], s)
        self.kv.mtp_length = length  # slots of guesses are made anew when they are tokens
        return guesses


class Drafter(NoDraft):
    """All sources of one sequence; the governor chooses one, and how far it may go."""

    def __init__(self, model, kv, governor, clock=time.perf_counter):
        self.model, self.governor, self.clock = model, governor, clock
        self.ngrams = NgramSource()
        self.mtp = MtpSource(model, kv) if model.weights.mtp else None
        self.choice = self.before = None

    def follow(self, chunk, hidden):
        if self.mtp:
            self.mtp.follow(chunk, hidden)

    def propose(self, ids, max_tokens):
        most = min(max_tokens, self.governor.most)
        name, found = self.ngrams.offer(ids, most) if most else ("n-gram", [])
        offers = ({name: len(found)} if found else {}) | ({"MTP": most} if self.mtp and most else {})
        source, depth = self.governor.choose(offers)
        started, guesses = self.clock(), []
        if source == "MTP":
            guesses = self.mtp.propose(ids, depth)
        elif source:
            guesses = found[:depth]
        if self.mtp and source != "MTP":
            self.mtp.keep_up(ids)
        self.choice = source, len(guesses), self.clock() - started
        self.before = self.look()
        if guesses:
            self.model.experts.verify()
        return guesses

    def look(self):
        counters = self.model.experts.counters
        return self.clock(), counters.wait_seconds, counters.hits + counters.misses, counters.misses

    def verified(self, accepted):
        spent = [now - before for now, before in zip(self.look(), self.before, strict=True)]
        self.governor.note(*self.choice, accepted, *spent)
        if self.model.experts.routes is not None:
            self.model.experts.verified(1 + accepted)
