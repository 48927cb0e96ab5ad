"""Log-likelihoods of continuations, many requests to a sweep over the experts.

Requests with the same context form a group: the context goes through the model once, each continuation on a clone of
its KV cache. Groups are put together into waves: the contexts of a wave go through the model together, then its
continuations, so each expert is fetched once for as many requests as fit a prefill chunk and the KV memory. What all
contexts of a wave begin with, as examples before a question, goes through first and once. The last token of a
continuation needs no forward.
"""

from dataclasses import dataclass

import torch

from forward.kv_cache import make_kv_cache
from forward.lm_head import LOGIT_ROWS
from forward.step import logprobs_of, step, step_logprobs
from text.prompt import shared_prefix_length


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Token ids; the context holds at least one."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """Sum of log p of the continuation's tokens, and whether each of them is the argmax (ties: lowest id)."""

    logprob: float
    greedy: bool


@dataclass(slots=True)
class ScoreCounters:
    """Rows that went through the model."""

    context_rows: int = 0
    continuation_rows: int = 0


def score_requests(model, requests, max_positions, counters=None, progress=None):
    """requests: list of Request, each of at most max_positions + 1 tokens -> yields (index, Score), wave by wave.

    The KV caches that exist at once hold at most max_positions positions together; a group that needs more has its
    continuations go through the model in several parts. `progress` is layers_forward's.
    """
    counters = counters or ScoreCounters()
    groups = {}
    for index, request in enumerate(requests):
        groups.setdefault(request.context, []).append(index)
    for wave in make_waves(groups, requests, max_positions):
        yield from score_wave(model, wave, requests, max_positions, counters, progress)


def positions_of(context, indices, requests):
    """Positions of the KV caches of a group: each continuation on a clone of the context."""
    return sum(len(context) + max(len(requests[i].continuation) - 1, 0) for i in indices)


def make_waves(groups, requests, max_positions):
    """Groups in order, as many to a wave as their states and the logits of their contexts allow; at least one."""
    wave, used = [], 0
    for context, indices in groups.items():
        need = positions_of(context, indices, requests)
        if wave and (used + need > max_positions or len(wave) == LOGIT_ROWS):
            yield wave
            wave, used = [], 0
        wave.append((context, indices))
        used += need
    if wave:
        yield wave


def score_wave(model, wave, requests, max_positions, counters, progress):
    """One wave of groups [(context, request indices), ...] -> (index, Score) of each request."""
    # 1) every context once; a state is as long as its longest continuation needs
    states = []
    for context, indices in wave:
        longest = max(len(requests[i].continuation) for i in indices)
        states.append(make_kv_cache(model.config, len(context) + max(longest - 1, 0)))
    logits = read_contexts(model, [list(context) for context, _ in wave], states, counters, progress)

    # 2) the first token of a continuation follows from the context's last logits
    sums, greedy, rest = {}, {}, []
    for row, ((_, indices), kv) in enumerate(zip(wave, states, strict=True)):
        argmax = int(logits[row].argmax())
        for i in indices:
            continuation = requests[i].continuation
            first = continuation[:1]
            sums[i] = float(logprobs_of(logits[row : row + 1], torch.tensor(first))) if first else 0.0
            greedy[i] = all(token == argmax for token in first)
            if len(continuation) > 1:
                rest.append((i, kv))

    # 3) the others, as many in one forward as their states allow
    room = max_positions - sum(kv.capacity for kv in states)
    for part in parts_that_fit(rest, requests, room):
        batch = [(list(requests[i].continuation[:-1]), kv) for i, kv in own_states(part, requests)]
        targets = [token for i, _ in part for token in requests[i].continuation[1:]]
        logprobs, best = step_logprobs(model, batch, targets, progress)
        counters.continuation_rows += len(targets)
        at = 0
        for i, kv in part:
            count = len(requests[i].continuation) - 1
            sums[i] += float(logprobs[at : at + count].sum())
            greedy[i] &= best[at : at + count].tolist() == targets[at : at + count]
            at += count
            kv.trim(len(requests[i].context))  # the state is the context's again
    for _, indices in wave:
        for i in indices:
            yield i, Score(sums[i], greedy[i])


def read_contexts(model, contexts, states, counters, progress):
    """Contexts, lists of ids, into their empty states -> logits [contexts, vocab] after each."""
    shared = shared_length(contexts, model.prefill_chunk)
    if shared:
        step(model, [(contexts[0][:shared], states[0])], progress)
        for kv in states[1:]:
            kv.copy_prefix(states[0], shared)
    rest = [context[shared:] for context in contexts]
    counters.context_rows += shared + sum(map(len, rest))
    return step(model, list(zip(rest, states, strict=True)), progress)


def shared_length(contexts, chunk):
    """How many ids, that all contexts begin with, should go through the model first: 0 where that takes more sweeps
    over the experts, one for each `chunk` rows, than to read each context in whole. A context keeps one id at least."""
    first, last = min(contexts), max(contexts)  # in order, what lies between begins as they do
    shared = shared_prefix_length(first[:-1], last)

    def sweeps(rows):
        return -(-rows // chunk)

    rows = sum(map(len, contexts))
    is_worth_it = len(contexts) > 1 and sweeps(shared) + sweeps(rows - len(contexts) * shared) <= sweeps(rows)
    return shared if is_worth_it else 0


def parts_that_fit(rest, requests, room):
    """Cut [(request index, its context's state), ...] so that the clones of a part hold at most `room` positions.
    The first continuation of a state in a part needs no clone."""
    part, seen, used = [], set(), 0
    for i, kv in rest:
        need = len(requests[i].context) + len(requests[i].continuation) - 1 if id(kv) in seen else 0
        if part and used + need > room:
            yield part
            part, seen, used, need = [], set(), 0, 0
        part.append((i, kv))
        seen.add(id(kv))
        used += need
    if part:
        yield part


def own_states(part, requests):
    """Give each continuation a state of its own: the context's for its first, clones of it for the others."""
    out, seen = [], set()
    for i, kv in part:
        taken = id(kv) in seen
        out.append((i, kv.clone(kv.length + len(requests[i].continuation) - 1) if taken else kv))
        seen.add(id(kv))
    return out
