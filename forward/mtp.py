"""The multi-token-prediction layer: from what the model knows at a position and the token that follows, the one after.

Slot i of it takes the hidden row of position i, behind the final norm, and the token at position i + 1:

    x = input_proj([embed_norm(embed(token)); hidden_norm(hidden)])  ->  one decoder layer over the slots so far
    s = norm(x)          lm_head(s) predicts the token at position i + 2

A chain of drafts feeds s back as the hidden row, with the drafted token. DeepSeek-V3, section 2.2; GLM-5 is the same.
"""

import torch

from forward.chunk import Chunk, Segment, angles
from forward.embed import embed
from forward.layer_forward import layer_forward
from kernels.dispatch import linear, rms_norm


@torch.inference_mode()
def mtp(model, kv, tokens, hidden):
    """tokens: T ids that follow the next T slots of kv; hidden [T, D], behind the final norm -> s [T, D]. The slots are
    appended; ValueError where kv has no room for them."""
    config, weights, first = model.config, model.weights.mtp, kv.mtp_length
    stop = first + len(tokens)
    if stop > kv.capacity:
        raise ValueError(f"{len(tokens)} more slots do not fit the {kv.capacity} of a KV state with {first}")
    segments = (Segment(kv, first, 0, len(tokens)),)
    chunk = Chunk(torch.tensor(tokens), segments, *angles(config, torch.arange(first, stop)))
    words = rms_norm(embed(weights.embed, chunk.ids), weights.embed_norm, config.rms_norm_eps)
    known = rms_norm(hidden, weights.hidden_norm, config.rms_norm_eps)
    x = linear(torch.cat([words, known], dim=-1), weights.input_proj)
    x, _ = layer_forward(model, config.num_layers, weights.layer, x, chunk, [None])
    kv.mtp_length = stop
    return rms_norm(x, weights.norm, config.rms_norm_eps)


@torch.inference_mode()
def mtp_logits(model, s):
    """s [T, D] -> logits [T, vocab]."""
    return linear(s, model.weights.mtp.lm_head)
