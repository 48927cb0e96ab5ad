"""Tokens in, logits out: the two calls everything above the forward pass is made of.

A batch is [(ids, KvState), ...]: new tokens of one sequence or of several. Each state grows by its tokens.
"""

import torch

from forward.layers_forward import layers_forward
from forward.lm_head import lm_head


@torch.inference_mode()
def step(model, batch, progress=None):
    """-> logits float32 [len(batch), vocab] after the last token of each sequence; no other logits are computed."""
    last = {}
    for chunk, hidden in layers_forward(model, batch, progress):
        for segment in chunk.segments:
            last[id(segment.kv)] = hidden[segment.stop - 1]
    return lm_head(model, torch.stack([last[id(kv)] for _, kv in batch]))


@torch.inference_mode()
def step_all(model, batch, progress=None):
    """-> logits float32 [all tokens of the batch, vocab], one row after each token."""
    rows = [lm_head(model, hidden) for _, hidden in layers_forward(model, batch, progress)]
    return torch.cat(rows)
