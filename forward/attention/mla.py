"""Multi-head latent attention, absorbed: queries are taken into the latent space, so the cache is read as it lies.

T rows, H heads, N nope width, R rotary width, L latent width, V value width.
"""

import torch

from forward.attention.indexer import select
from kernels.dispatch import absorbed_attention, linear, rms_norm, rotate


def mla(config, layer, weights, indexer, x, chunk, selections):
    """x [T, D] (normed) -> ([T, D], selections). `selections` come from the nearest earlier full layer; a layer with
    an indexer makes its own. Appends this layer's latents and keys to each sequence."""
    H, N, R, L, V = (
        config.num_heads,
        config.nope_head_dim,
        config.rope_head_dim,
        config.kv_lora_rank,
        config.v_head_dim,
    )
    turn = chunk.cos, chunk.sin, config.rope_interleaved
    query_latent = x  # of models that have none
    if weights.q_a is not None:
        query_latent = rms_norm(linear(x, weights.q_a, weights.q_a_bias), weights.q_a_norm, config.latent_norm_eps)
    queries = rotate(linear(query_latent, weights.q_b).view(-1, H, N + R), N, *turn)
    compressed = rotate(linear(x, weights.kv_a, weights.kv_a_bias), L, *turn)
    latents = rms_norm(compressed[:, :L], weights.kv_a_norm, config.latent_norm_eps)
    rope_keys = compressed[:, L:]
    if indexer is not None:
        selections = select(config, layer, indexer, x, query_latent, chunk)

    out, scale = [], config.qk_head_dim**-0.5 * config.rope.score_factor
    for segment, selection in zip(chunk.segments, selections, strict=True):
        rows = segment.rows
        known = segment.kv.append(layer, latents[rows], rope_keys[rows])
        out.append(absorbed_attention(queries[rows], weights.kv_b, *known, segment.first, selection, V, scale))
    out = out[0] if len(out) == 1 else torch.cat(out)
    return linear(out.flatten(1), weights.o, weights.o_bias), selections
