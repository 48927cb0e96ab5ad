"""Tokens in, logits out: one forward pass, with the rows of logits that a caller needs.

A batch is [(ids, KvCache), ...]: new tokens of one sequence or of several. Each KV cache grows by its tokens. Logits
that are not finite never come out: see forward/finite.py. T token rows, B sequences, D model width, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from forward.chunk import TokenBatch
from forward.finite import check_logits
from forward.layers_forward import Progress, layers_forward
from forward.lm_head import LOGIT_ROWS, lm_head
from forward.model import Model
from kernels.dispatch import logprobs


@torch.inference_mode()
def step(model: Model, batch: TokenBatch, progress: Progress | None = None) -> Tensor:
    """-> logits float32 [B, V] after the last token of each sequence; no other logits are computed."""
    last = {}  # hidden row [1, D] of each sequence; a view would keep the whole chunk alive
    for chunk, hidden in layers_forward(model, batch, progress):
        for segment in chunk.segments:
            last[id(segment.kv)] = hidden[segment.rows][-1:].clone()
    return logits_after(model, torch.cat(list(last.values())), [kv.length - 1 for _, kv in batch])


def logits_after(model: Model, hidden: Tensor, positions: Sequence[int]) -> Tensor:
    """hidden [T, D] before the final norm, after the tokens at `positions` -> logits float32 [T, V]."""
    return check_logits(lm_head(model, hidden), positions)


@torch.inference_mode()
def step_all(model: Model, batch: TokenBatch) -> Tensor:
    """-> logits float32 [T, V], a row after each token of the batch."""
    chunks = layers_forward(model, batch)
    return torch.cat([logits_after(model, hidden, chunk.positions.tolist()) for chunk, hidden in chunks])


@torch.inference_mode()
def step_logprobs(
    model: Model, batch: TokenBatch, targets: list[int], progress: Progress | None = None
) -> tuple[Tensor, Tensor]:
    """targets: one id for each token of the batch, expected to follow it -> (log p of the target, float64; argmax),
    both [T]. The logits of a few rows exist at a time."""
    results = []
    remaining = torch.tensor(targets)
    for chunk, hidden in layers_forward(model, batch, progress):
        for rows, positions in zip(hidden.split(LOGIT_ROWS), chunk.positions.split(LOGIT_ROWS), strict=True):
            logits = logits_after(model, rows, positions.tolist())
            results.append(logprobs(logits, remaining[: len(rows)]))
            remaining = remaining[len(rows) :]
    of_targets, best = zip(*results, strict=True)
    return torch.cat(of_targets), torch.cat(best)
