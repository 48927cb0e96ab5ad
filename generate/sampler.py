"""Sampler: logits -> a token, the same at any draft depth and whatever the batch holds beside it.

The uniform number of a token comes from a counter, (seed, row, position), not from a stream, so the token at a position
does not depend on those sampled before. Order: temperature, top-k, nucleus, sample in id order, all in float64.
V vocabulary.
"""

import hashlib
import struct

import torch
from torch import Tensor

from kernels.dispatch import logprobs

MIN_TEMPERATURE = 1e-4
FEW = 1024, 16384  # tokens in which a nucleus mostly ends

TokenLogprobs = tuple[int, float | None, list[tuple[int, float]] | None]  # id, its log p, the likeliest (id, log p)


def uniform(seed: int, row: int, position: int) -> float:
    """A number in [0, 1) from 53 bits of BLAKE2b over (seed, row, position)."""
    digest = hashlib.blake2b(struct.pack("<QQQ", seed % 2**64, row, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


class Sampler:
    """Samples a token id from logits.

    temperature <= 0 is greedy. nucleus outside (0, 1) and top_k <= 0 keep the whole vocabulary.
    """

    def __init__(self, temperature: float = 0.0, nucleus: float = 0.0, seed: int = 0, row: int = 0, top_k: int = 0):
        self.temperature, self.nucleus, self.top_k = temperature, nucleus, top_k
        self.seed, self.row = seed, row

    def sample(self, logits: Tensor, position: int) -> int:
        """logits [V] -> the id of the token at `position`; greedy ties go to the lowest id."""
        if self.temperature <= 0:
            return int(logits.argmax())
        p = self.probabilities(logits)
        target = uniform(self.seed, self.row, position) * float(p.sum())
        token = int(torch.searchsorted(p.cumsum(0), target, right=True))
        return min(token, int(p.nonzero()[-1]))  # rounding may leave the target past the last kept token

    def probabilities(self, logits: Tensor) -> Tensor:
        """logits [V] -> float64 [V], zero outside the top_k likeliest and outside the nucleus: the shortest
        prefix, most likely first, whose mass reaches `nucleus`. Ties go to the lowest id. Of the top_k it is a softmax
        of its own; what the nucleus leaves is not renormalized."""
        scaled = logits.double() / max(self.temperature, MIN_TEMPERATURE)
        if 0 < self.top_k < len(scaled):
            scaled[~largest(scaled, self.top_k)] = -torch.inf
        p = scaled.softmax(0)
        if not 0 < self.nucleus < 1:
            return p
        return p.where(largest(p, num_in_nucleus(p, self.nucleus)), 0.0)


def largest(values: Tensor, count: int) -> Tensor:
    """values [V] -> bool [V], true for the `count` largest, 1 to V. Ties go to the lowest id."""
    last = values.topk(count).values[-1]
    kept = values > last
    ties = (values == last).nonzero()[:, 0]
    kept[ties[: count - int(kept.sum())]] = True
    return kept


def num_in_nucleus(p: Tensor, nucleus: float) -> int:
    """p [V] -> how many of the most likely tokens have a mass that reaches `nucleus`. Mostly they are few, and sorting
    a vocabulary of 150,000 takes 17 ms."""
    for count in (*(few for few in FEW if few < len(p)), len(p)):
        mass = p.topk(count).values.cumsum(0)
        if mass[-1] >= nucleus:
            break
    return min(int(torch.searchsorted(mass, nucleus)) + 1, len(p))


def token_logprobs(logits: Tensor, targets: list[int], num_top: int) -> list[tuple[float, list[tuple[int, float]]]]:
    """logits [T, V], an id for each row -> for each row (log p of the id, [(id, log p), ...] of the num_top
    likeliest, ties by the lowest id). Those of the model itself: temperature, top-k and nucleus change nothing."""
    of_targets, best = logprobs(logits, torch.tensor(targets))
    of_best, _ = logprobs(logits, best)
    out = []
    for row, of_target, at, highest in zip(logits, of_targets.tolist(), best.tolist(), of_best.tolist(), strict=True):
        top: list[tuple[int, float]] = []
        most = min(num_top, len(row))
        if most > 0:
            ids = (row >= row.topk(most).values[-1]).nonzero()[:, 0]
            ids = ids[row[ids].argsort(descending=True, stable=True)[:most]]
            top = list(zip(ids.tolist(), (row[ids].double() - row[at].double() + highest).tolist(), strict=True))
        out.append((of_target, top))
    return out
