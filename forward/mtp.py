"""The multi-token prediction (MTP) layer: predicts the token after the next one, for draft tokens.

Its position i takes the hidden row of position i, behind the final norm, and the token at position i + 1:

    x = input_proj([embed_norm(embed(token)); hidden_norm(hidden)])  ->  one decoder layer over the positions so far
    s = norm(x)          lm_head(s) predicts the token at position i + 2

A chain of draft tokens feeds s back as the hidden row, with the token drafted last. DeepSeek-V3, section 2.2; GLM-5 is
the same. T token rows, D model width, V vocabulary.
"""

import torch
from torch import Tensor

from forward.chunk import TokenBatch, make_chunk, split_batch
from forward.embed import embed
from forward.layer_forward import layer_forward
from forward.model import Model
from kernels.dispatch import linear, rms_norm


@torch.inference_mode()
def mtp(model: Model, batch: TokenBatch, hidden: Tensor) -> Tensor:
    """Append the next MTP positions of each sequence -> s [T, D].

    batch [(tokens, kv), ...]: the ids that follow these positions; hidden [T, D] behind the final norm, in the order of
    the batch. ValueError, before anything is computed, where a KV cache has no room.
    """
    for tokens, kv in batch:
        if kv.mtp_length + len(tokens) > kv.capacity:
            raise ValueError(f"{len(tokens)} more MTP positions do not fit: {kv.mtp_length} of {kv.capacity} are used")
    config, weights = model.config, model.weights.mtp
    assert weights is not None
    out = []
    for part in split_batch(batch, model.prefill_chunk):
        chunk = make_chunk(config, part, is_mtp=True)
        embedded = rms_norm(embed(weights.embed, chunk.ids), weights.embed_norm, config.rms_norm_eps)
        normed = rms_norm(hidden[: len(chunk)], weights.hidden_norm, config.rms_norm_eps)
        hidden = hidden[len(chunk) :]
        x = linear(torch.cat([embedded, normed], dim=-1), weights.input_proj)  # [T, 2 D] -> [T, D]
        x = layer_forward(model, config.num_layers, weights.layer, x, chunk)
        for segment in chunk.segments:
            segment.kv.mtp_length += segment.rows.stop - segment.rows.start
        out.append(rms_norm(x, weights.norm, config.rms_norm_eps))
    return torch.cat(out)


@torch.inference_mode()
def mtp_logits(model: Model, s: Tensor) -> Tensor:
    """s [T, D] -> logits [T, V]."""
    assert model.weights.mtp is not None
    return linear(s, model.weights.mtp.lm_head)
