"""Scoring: log-likelihoods of continuations, many requests to one pass over the experts.

Requests with the same context form a group: the context is prefilled once, each continuation runs on a clone of its KV
cache. Groups form waves: the contexts of a wave go through the model together, then its continuations, so each expert
is read once for as many requests as fit a prefill chunk and the KV memory. The prefix that all contexts of a wave
share, such as few-shot examples, is prefilled once. The last token of a continuation needs no forward. V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from forward.kv_cache import KvCache, make_kv_cache
from forward.layers_forward import Progress
from forward.lm_head import LOGIT_ROWS
from forward.model import Model
from forward.step import step, step_logprobs
from kernels import dispatch
from text.prompt import positions_needed, shared_prefix_length


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Token ids; the context holds at least one."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]

    @property
    def num_positions(self) -> int:
        """KV cache positions of context and continuation."""
        return positions_needed(len(self.context), max(len(self.continuation), 1))


Groups = dict[tuple[int, ...], list[int]]  # context -> numbers of its requests
Group = tuple[tuple[int, ...], list[int]]  # one of them


@dataclass(frozen=True, slots=True)
class Score:
    """Sum of log p of the continuation's tokens, and whether each of them is the argmax (ties: lowest id)."""

    logprob: float
    greedy: bool


@dataclass(slots=True)
class ScoreCounters:
    """Token rows that went through the model."""

    context_rows: int = 0
    continuation_rows: int = 0


def score_requests(
    model: Model,
    requests: list[ScoreRequest],
    max_positions: int,
    counters: ScoreCounters | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[int, Score]]:
    """Score requests of at most max_positions + 1 tokens each; yield (number of the request, Score), wave by wave.

    The KV caches that exist at once hold at most max_positions positions together; a group that needs more has its
    continuations go through the model in several batches. `progress` is that of layers_forward.
    """
    counters = counters or ScoreCounters()
    groups: Groups = {}
    for index, request in enumerate(requests):
        groups.setdefault(request.context, []).append(index)
    for wave in make_waves(groups, requests, max_positions):
        yield from score_wave(model, wave, requests, max_positions, counters, progress)


def make_waves(groups: Groups, requests: list[ScoreRequest], max_positions: int) -> Iterator[list[Group]]:
    """Groups in order, as many to a wave as their KV caches and the logits of their contexts allow; at least one."""
    wave: list[Group] = []
    used = 0
    for context, indices in groups.items():
        # Each continuation is on a clone of the context.
        need = sum(requests[i].num_positions for i in indices)
        if wave and (used + need > max_positions or len(wave) == LOGIT_ROWS):
            yield wave
            wave, used = [], 0
        wave.append((context, indices))
        used += need
    if wave:
        yield wave


def score_wave(
    model: Model,
    wave: list[Group],
    requests: list[ScoreRequest],
    max_positions: int,
    counters: ScoreCounters,
    progress: Progress | None,
) -> Iterator[tuple[int, Score]]:
    """-> (number, Score) of each request of a wave."""
    # 1) every context once; a KV cache is as long as its longest continuation needs
    capacities = [max(requests[i].num_positions for i in indices) for _, indices in wave]
    caches = [make_kv_cache(model.config, capacity) for capacity in capacities]
    logits = prefill_contexts(model, [list(context) for context, _ in wave], caches, counters, progress)

    # 2) the first token of a continuation follows from the context's last logits
    sums, greedy, rest = {}, {}, []
    for row, ((_, indices), kv) in enumerate(zip(wave, caches, strict=True)):
        argmax = int(logits[row].argmax())
        for i in indices:
            continuation = requests[i].continuation
            first = continuation[:1]
            sums[i] = float(dispatch.logprobs(logits[row : row + 1], torch.tensor(first))[0]) if first else 0.0
            greedy[i] = all(token == argmax for token in first)
            if len(continuation) > 1:
                rest.append((i, kv))

    # 3) the others, as many in one forward as their KV caches allow
    room = max_positions - sum(kv.capacity for kv in caches)
    for some in batches_that_fit(rest, requests, room):
        for i, logprob, is_greedy in score_continuations(model, some, requests, progress):
            sums[i] += logprob
            greedy[i] &= is_greedy
            counters.continuation_rows += len(requests[i].continuation) - 1
    for _, indices in wave:
        for i in indices:
            yield i, Score(sums[i], greedy[i])


def prefill_contexts(
    model: Model, contexts: list[list[int]], caches: list[KvCache], counters: ScoreCounters, progress: Progress | None
) -> Tensor:
    """Prefill contexts into empty KV caches -> logits [contexts, V] after each."""
    shared = shared_length(contexts, model.prefill_chunk)
    if shared:
        step(model, [(contexts[0][:shared], caches[0])], progress)
        for kv in caches[1:]:
            kv.copy_prefix(caches[0], shared)
    rest = [context[shared:] for context in contexts]
    counters.context_rows += shared + sum(map(len, rest))
    return step(model, list(zip(rest, caches, strict=True)), progress)


def shared_length(contexts: list[list[int]], chunk: int) -> int:
    """Length of the shared prefix that should be prefilled once; 0 where that takes more passes over the experts, one
    for each `chunk` rows, than to prefill each context whole. A context keeps one id at least."""
    first, last = min(contexts), max(contexts)  # what is ordered between them shares their prefix
    shared = shared_prefix_length(first[:-1], last)

    def passes(rows: int) -> int:
        return -(-rows // chunk)

    rows = sum(map(len, contexts))
    is_worth_it = len(contexts) > 1 and passes(shared) + passes(rows - len(contexts) * shared) <= passes(rows)
    return shared if is_worth_it else 0


@dataclass(frozen=True, slots=True)
class Continuation:
    """The continuation of a request, and the KV cache of its context, or one to clone with `capacity` positions."""

    index: int  # of the request
    kv: KvCache
    capacity: int = 0  # of the clone; 0: the KV cache itself


def batches_that_fit(
    rest: list[tuple[int, KvCache]], requests: list[ScoreRequest], room: int
) -> Iterator[list[Continuation]]:
    """Divide (number of a request, the KV cache of its context) so that the clones of a batch hold at most `room`
    positions: its first continuation of a context is given the context's KV cache, the others clones of it."""
    batch: list[Continuation] = []
    seen: set[int] = set()
    used = 0
    for i, kv in rest:
        need = requests[i].num_positions if id(kv) in seen else 0
        if batch and used + need > room:
            yield batch
            batch, seen, used, need = [], set(), 0, 0
        batch.append(Continuation(i, kv, need))
        seen.add(id(kv))
        used += need
    if batch:
        yield batch


def score_continuations(
    model: Model, batch: list[Continuation], requests: list[ScoreRequest], progress: Progress | None
) -> list[tuple[int, float, bool]]:
    """One forward over all but the first tokens of continuations -> (number, log p, whether each is the argmax) of
    each. The clones live no longer than that."""
    caches = [item.kv.clone(item.capacity) if item.capacity else item.kv for item in batch]
    texts = [requests[item.index].continuation for item in batch]
    targets = [token for text in texts for token in text[1:]]
    inputs = [(list(text[:-1]), kv) for text, kv in zip(texts, caches, strict=True)]
    logprobs, best = step_logprobs(model, inputs, targets, progress)
    results, start = [], 0
    for item, text in zip(batch, texts, strict=True):
        end = start + len(text) - 1
        is_greedy = best[start:end].tolist() == targets[start:end]
        results.append((item.index, float(logprobs[start:end].sum()), is_greedy))
        start = end
        item.kv.trim(len(requests[item.index].context))
    return results
