"""Proposers of draft tokens: n-gram look-up, and the model's own multi-token-prediction layer.

T token rows, D model width.
"""

import torch
from torch import Tensor

from forward.chunk import Chunk, Segment
from forward.kv_cache import KvCache
from forward.model import Model
from forward.mtp import mtp, mtp_logits


class NgramProposer:
    """Prompt lookup decoding: proposes what followed when the last tokens of the sequence occurred before. The longest
    match of 2 to 8 tokens counts, of equal ones the latest."""

    SHORTEST, LONGEST, LONG = 2, 8, 4
    MAX_PLACES = 64  # earlier places of a pair that are compared

    def __init__(self) -> None:
        self.places: dict[tuple[int, ...], tuple[int, ...]] = {}  # SHORTEST tokens -> where they end
        self.num_indexed = 1  # tokens

    def clone(self) -> "NgramProposer":
        other = NgramProposer()
        other.places, other.num_indexed = self.places.copy(), self.num_indexed
        return other

    def index(self, ids: list[int]) -> None:
        """Add the ids that are new."""
        for end in range(max(self.num_indexed, self.SHORTEST), len(ids)):
            pair = tuple(ids[end - self.SHORTEST : end])
            self.places[pair] = (*self.places.get(pair, ()), end)[-self.MAX_PLACES :]
        self.num_indexed = max(self.num_indexed, len(ids))

    def propose(self, ids: list[int], max_tokens: int) -> tuple[str, list[int]]:
        """-> (name of the proposer, draft tokens). A long match has a name of its own, for its drafts are accepted more
        often."""
        self.index(ids)
        best, best_end = 0, None
        for end in reversed(self.places.get(tuple(ids[-self.SHORTEST :]), ())):
            length = self.SHORTEST
            while length < min(self.LONGEST, end) and ids[end - length - 1] == ids[-length - 1]:
                length += 1
            if length > best:
                best, best_end = length, end
        if best_end is None:
            return "n-gram", []
        return "long n-gram" if best >= self.LONG else "n-gram", ids[best_end : best_end + max_tokens]


class MtpProposer:
    """The MTP layer on the KV cache of one sequence. A hidden row waits until the token that follows it is known."""

    FEW = 16  # rows of a chunk that may wait; a longer prefill goes through the layer at once
    MANY = 256  # rows that may wait, of all sequences together

    def __init__(self, model: Model, kv: KvCache):
        self.model, self.kv = model, kv
        self.first = kv.length  # position of the first waiting row
        self.hidden = torch.empty(0, model.config.hidden_size)  # [T, D] behind the final norm, the rows that wait
        self.tokens: list[int] = []  # at their positions

    @property
    def is_ready(self) -> bool:
        """True if the row before the next token waits. It does not after a forward that failed."""
        return 0 < self.kv.length - self.first <= len(self.hidden)

    def clone(self, kv: KvCache) -> "MtpProposer":
        """The same on a clone of the KV cache."""
        other = MtpProposer(self.model, kv)
        other.first, other.hidden, other.tokens = self.first, self.hidden, self.tokens
        return other

    def observe(self, chunk: Chunk, segment: Segment, hidden: Tensor, is_verifying: bool = False) -> None:
        """Keep the rows of our segment of a chunk, hidden [T, D] behind the final norm. Those of a prefill go through
        the layer at once, except the last; not in a forward that verifies draft tokens, whose experts are counted."""
        tokens = chunk.ids[segment.rows].tolist()
        num_waiting = segment.first_position - self.first
        if 0 <= num_waiting <= len(self.hidden):
            self.hidden = torch.cat([self.hidden[:num_waiting], hidden])
            self.tokens = self.tokens[:num_waiting] + tokens
        else:
            self.first, self.hidden, self.tokens = segment.first_position, hidden, tokens
        if self.first != self.kv.mtp_base + self.kv.mtp_length:
            self.kv.mtp_base, self.kv.mtp_length = self.first, 0  # the slots before are not known
        if len(hidden) > self.FEW and not is_verifying:
            self.advance()

    def advance(self) -> None:
        """Run the rows that wait through the layer; not the last, whose next token is not known yet."""
        mtp(self.model, [(self.tokens[1:], self.kv)], self.hidden[:-1])
        self.drop(len(self.hidden) - 1)

    def pop_waiting(self, ids: list[int]) -> tuple[list[int], Tensor]:
        """-> (tokens that follow the rows that wait, these rows [T, D]); they wait no more."""
        rows = self.hidden[: self.kv.length - self.first]
        tokens = ids[self.first + 1 : self.first + 1 + len(rows)]
        self.drop(len(rows))
        return tokens, rows

    def drop(self, count: int) -> None:
        """The first `count` rows wait no more."""
        self.first, self.hidden, self.tokens = self.first + count, self.hidden[count:], self.tokens[count:]

    def resume(self, ids: list[int]) -> None:
        """Continue with another text, of which the KV cache holds the first kv.length ids."""
        if not self.tokens or self.first > self.kv.length:
            self.first, self.hidden, self.tokens = self.kv.length, self.hidden[:0].clone(), []
        elif self.first < self.kv.length:
            catch_up(self.model, [(self, ids)])


def draft_by_mtp(model: Model, wanted: list[tuple[MtpProposer, list[int], int]]) -> list[list[int]]:
    """wanted [(proposer, ids: those of its KV cache and one more, depth), ...] -> draft tokens of each. Each is fed
    back for the next one, those of all sequences together."""
    s = catch_up(model, [(proposer, ids) for proposer, ids, _ in wanted])  # [sequences, D]
    lengths = [proposer.kv.mtp_length for proposer, _, _ in wanted]
    drafts: list[list[int]] = [[] for _ in wanted]
    active = list(range(len(wanted)))
    while True:
        best = mtp_logits(model, s).argmax(-1).tolist()
        for i, draft in zip(active, best, strict=True):
            drafts[i].append(draft)
        more = [at for at, i in enumerate(active) if len(drafts[i]) < wanted[i][2]]
        if not more:
            break
        active = [active[at] for at in more]
        s = mtp(model, [(drafts[i][-1:], wanted[i][0].kv) for i in active], s[more])
    for (proposer, _, _), length in zip(wanted, lengths, strict=True):
        proposer.kv.mtp_length = length  # slots of draft tokens are computed again once they are tokens
    return drafts


def catch_up(model: Model, wanted: list[tuple[MtpProposer, list[int]]]) -> Tensor:
    """wanted [(proposer, ids) as of draft_by_mtp, ...], a row waits in each: all that wait go through the layer -> s
    [proposers, D] of the last slot of each."""
    batch, rows = [], []
    for proposer, ids in wanted:
        tokens, hidden = proposer.pop_waiting(ids)
        batch.append((tokens, proposer.kv))
        rows.append(hidden)
    s = mtp(model, batch, torch.cat(rows))
    return s[torch.tensor([len(tokens) for tokens, _ in batch]).cumsum(0) - 1]


class Proposers:
    """Where the draft tokens of one sequence may come from. They belong to its KV cache, for all texts in it."""

    def __init__(self, model: Model, kv: KvCache):
        self.ngrams = NgramProposer()
        self.mtp = MtpProposer(model, kv) if model.weights.mtp else None

    def clone(self, kv: KvCache) -> "Proposers":
        """The same on a clone of the KV cache."""
        other = Proposers.__new__(Proposers)
        other.ngrams, other.mtp = self.ngrams.clone(), self.mtp and self.mtp.clone(kv)
        return other

    def resume(self, ids: list[int]) -> None:
        """Continue with another text, of which the KV cache holds the first kv.length ids: n-grams are forgotten, what
        the MTP layer knows of these ids is kept."""
        self.ngrams = NgramProposer()
        if self.mtp:
            self.mtp.resume(ids)
