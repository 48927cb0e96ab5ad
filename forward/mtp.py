"""The multi-token-prediction layer: from what the model knows at a position and the token that follows, the one after.

Slot i of it takes the hidden row of position i, behind the final norm, and the token at position i + 1:

    x = input_proj([embed_norm(embed(token)); hidden_norm(hidden)])  ->  one decoder layer over the slots so far
    s = norm(x)          lm_head(s) predicts the token at position i + 2

A chain of drafts feeds s back as the hidden row, with the drafted token. DeepSeek-V3, section 2.2; GLM-5 is the same.
"""

import torch

from forward.chunk import make_chunk, split_batch
from forward.embed import embed
from forward.layer_forward import layer_forward
from kernels.dispatch import linear, rms_norm


@torch.inference_mode()
def mtp(model, batch, hidden):
    """batch [(tokens, kv), ...]: the ids that follow the next slots of each sequence; hidden [all tokens, D], behind
    the final norm -> s [all tokens, D]. The slots are appended; ValueError, before anything is computed, where a kv has
    no room for them."""
    for tokens, kv in batch:
        if kv.mtp_length + len(tokens) > kv.capacity:
            raise ValueError(
                f"{len(tokens)} more slots do not fit the {kv.capacity} of a KV cache with {kv.mtp_length}"
            )
    out, at = [], 0
    for pieces in split_batch(batch, model.prefill_chunk):
        chunk = make_chunk(model.config, pieces, is_mtp=True)
        out.append(mtp_chunk(model, chunk, hidden[at : at + len(chunk)]))
        at += len(chunk)
    return torch.cat(out)


def mtp_chunk(model, chunk, hidden):
    """The rows that go through the layer together -> s [rows, D]."""
    config, weights = model.config, model.weights.mtp
    words = rms_norm(embed(weights.embed, chunk.ids), weights.embed_norm, config.rms_norm_eps)
    known = rms_norm(hidden, weights.hidden_norm, config.rms_norm_eps)
    x = linear(torch.cat([words, known], dim=-1), weights.input_proj)
    x, _ = layer_forward(model, config.num_layers, weights.layer, x, chunk, [None] * len(chunk.segments))
    for segment in chunk.segments:
        segment.kv.mtp_length += segment.stop - segment.start
    return rms_norm(x, weights.norm, config.rms_norm_eps)


@torch.inference_mode()
def mtp_logits(model, s):
    """s [T, D] -> logits [T, vocab]."""
    return linear(s, model.weights.mtp.lm_head)
