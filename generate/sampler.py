"""Logits -> a token, the same at any draft depth and in any company.

The uniform number of a token comes from a counter, (seed, row, position), not from a stream: whoever asks for the
token at a position gets the same draw. Order: temperature, top-k, nucleus, draw in id order, all in float64.
"""

import hashlib
import struct

import torch

from kernels.dispatch import logprobs

MIN_TEMPERATURE = 1e-4
FEW = 1024, 16384  # tokens in which a nucleus mostly ends


def uniform(seed, row, position):
    """A number in [0, 1) from 53 bits of BLAKE2b over (seed, row, position)."""
    digest = hashlib.blake2b(struct.pack("<QQQ", seed % 2**64, row, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


class Sampler:
    """temperature <= 0 is greedy. nucleus outside (0, 1) and top_k <= 0 keep the whole vocabulary."""

    def __init__(self, temperature=0.0, nucleus=0.0, seed=0, row=0, top_k=0):
        self.temperature, self.nucleus, self.seed, self.row, self.top_k = temperature, nucleus, seed, row, top_k

    def draw(self, logits, position):
        """logits [vocab] -> the id of the token at `position`; greedy ties go to the lowest id."""
        if self.temperature <= 0:
            return int(logits.argmax())
        p = self.probabilities(logits)
        target = uniform(self.seed, self.row, position) * float(p.sum())
        token = int(torch.searchsorted(p.cumsum(0), target, right=True))
        return min(token, int(p.nonzero()[-1]))  # rounding may leave the target past the last kept token

    def probabilities(self, logits):
        """logits [vocab] -> float64 [vocab], zero outside the top_k likeliest and outside the nucleus: the shortest
        prefix, most likely first, whose mass reaches `nucleus`. Ties go to the lowest id. Of the top_k it is a softmax
        of its own; what the nucleus leaves is not renormalized."""
        scaled = logits.double() / max(self.temperature, MIN_TEMPERATURE)
        if 0 < self.top_k < len(scaled):
            scaled[~largest(scaled, self.top_k)] = -torch.inf
        p = scaled.softmax(0)
        if not 0 < self.nucleus < 1:
            return p
        return p.where(largest(p, num_in_nucleus(p, self.nucleus)), 0.0)


def largest(values, count):
    """values [V] -> bool [V], true for the `count` largest, 1 to V. Ties go to the lowest id."""
    last = values.topk(count).values[-1]
    kept = values > last
    ties = (values == last).nonzero()[:, 0]
    kept[ties[: count - int(kept.sum())]] = True
    return kept


def num_in_nucleus(p, nucleus):
    """How many of the most likely have a mass that reaches `nucleus`. Mostly they are few, and to sort all of a
    vocabulary of 150,000 takes 17 ms."""
    for count in (*(few for few in FEW if few < len(p)), len(p)):
        mass = p.topk(count).values.cumsum(0)
        if mass[-1] >= nucleus:
            break
    return min(int(torch.searchsorted(mass, nucleus)) + 1, len(p))


def token_logprobs(logits, targets, num_top):
    """logits [T, vocab], an id for each row -> for each row (log p of the id, [(id, log p), ...] of the num_top
    likeliest, ties by the lowest id). Those of the model itself: temperature, top-k and nucleus change nothing."""
    of_targets, best = logprobs(logits, torch.tensor(targets))
    of_best, _ = logprobs(logits, best)
    out = []
    for row, of_target, at, highest in zip(logits, of_targets.tolist(), best.tolist(), of_best.tolist(), strict=True):
        top, most = [], min(num_top, len(row))
        if most > 0:
            ids = (row >= row.topk(most).values[-1]).nonzero()[:, 0]
            ids = ids[row[ids].argsort(descending=True, stable=True)[:most]]
            top = list(zip(ids.tolist(), (row[ids].double() - row[at].double() + highest).tolist(), strict=True))
        out.append((of_target, top))
    return out
