"""Tokens in, logits out: the calls everything above the forward pass is made of.

A batch is [(ids, KvCache), ...]: new tokens of one sequence or of several. Each state grows by its tokens. Logits that
are not finite never come out: see forward/finite.py.
"""

import torch

from forward.finite import check_logits
from forward.layers_forward import layers_forward
from forward.lm_head import LOGIT_ROWS, lm_head
from kernels.dispatch import logprobs as logprobs_and_best


@torch.inference_mode()
def step(model, batch, progress=None, on_hidden=None):
    """-> logits float32 [len(batch), vocab] after the last token of each sequence; no other logits are computed.
    on_hidden(chunk, hidden [rows, D] before the final norm) is called for each chunk."""
    return step_last(model, batch, [1] * len(batch), progress, on_hidden)


@torch.inference_mode()
def step_last(model, batch, counts, progress=None, on_hidden=None, observer=None):
    """counts: for each sequence how many of its tokens, from the last one back -> logits float32 [sum(counts), vocab]
    after these, in the order of the batch. on_hidden as of `step`, observer as of layers_forward."""
    hidden = step_hidden(model, batch, counts, progress, on_hidden, observer)
    positions = [i for (_, kv), count in zip(batch, counts, strict=True) for i in range(kv.length - count, kv.length)]
    return logits_after(model, torch.cat(hidden), positions)


@torch.inference_mode()
def step_hidden(model, batch, counts, progress=None, on_hidden=None, observer=None):
    """As of step_last, where a count may be 0 -> the hidden rows [count, D] before the final norm of each sequence."""
    wanted = {id(kv): kv.length + len(ids) - count for (ids, kv), count in zip(batch, counts, strict=True)}
    last = {id(kv): [] for _, kv in batch}
    for chunk, hidden in layers_forward(model, batch, progress, observer=observer):
        if on_hidden:
            on_hidden(chunk, hidden)
        for segment in chunk.segments:
            start = segment.start + max(0, wanted[id(segment.kv)] - segment.first_position)
            if start < segment.stop:  # a view would keep the whole chunk alive
                last[id(segment.kv)].append(hidden[start : segment.stop].clone())
    none = torch.empty(0, model.config.hidden_size)
    return [torch.cat(last[id(kv)] or [none]) for _, kv in batch]


@torch.inference_mode()
def logits_after(model, hidden, positions):
    """hidden [T, D] before the final norm, after the tokens at `positions` -> logits float32 [T, vocab]."""
    return check_logits(lm_head(model, hidden), positions)


@torch.inference_mode()
def step_all(model, batch, progress=None, on_hidden=None, observer=None):
    """-> logits float32 [all tokens of the batch, vocab], one row after each token. on_hidden as of `step`."""
    rows = []
    for chunk, hidden in layers_forward(model, batch, progress, observer=observer):
        if on_hidden:
            on_hidden(chunk, hidden)
        rows.append(check_logits(lm_head(model, hidden), positions_of(chunk)))
    return torch.cat(rows)


@torch.inference_mode()
def step_logprobs(model, batch, targets, progress=None):
    """targets: one id for each token of the batch, what should follow it -> (log p of the target, float64; argmax),
    both [all tokens]. The logits of a few rows exist at a time."""
    logprobs, best, at = [], [], 0
    for chunk, hidden in layers_forward(model, batch, progress):
        positions = positions_of(chunk)
        for start in range(0, len(hidden), LOGIT_ROWS):
            rows = slice(start, start + LOGIT_ROWS)
            logits = check_logits(lm_head(model, hidden[rows]), positions[rows])
            wanted = torch.tensor(targets[at : at + len(logits)])
            of_targets, of_rows = logprobs_and_best(logits, wanted)
            logprobs.append(of_targets)
            best.append(of_rows)
            at += len(logits)
    return torch.cat(logprobs), torch.cat(best)


def logprobs_of(logits, targets):
    """logits [T, vocab], targets [T] -> log-softmax(logits)[target], float64 [T]."""
    return logprobs_and_best(logits, targets)[0]


def positions_of(chunk):
    return [position for segment in chunk.segments for position in segment.positions.tolist()]
