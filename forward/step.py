"""Tokens in, logits out: the calls everything above the forward pass is made of.

A batch is [(ids, KvState), ...]: new tokens of one sequence or of several. Each state grows by its tokens. Logits that
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
    last = {}
    for chunk, hidden in layers_forward(model, batch, progress):
        if on_hidden:
            on_hidden(chunk, hidden)
        for segment in chunk.segments:
            last[id(segment.kv)] = hidden[segment.stop - 1].clone()  # a view would keep the whole chunk alive
    logits = lm_head(model, torch.stack([last[id(kv)] for _, kv in batch]))
    return check_logits(logits, [kv.length - 1 for _, kv in batch])


@torch.inference_mode()
def step_all(model, batch, progress=None, on_hidden=None):
    """-> logits float32 [all tokens of the batch, vocab], one row after each token. on_hidden as of `step`."""
    rows = []
    for chunk, hidden in layers_forward(model, batch, progress):
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
