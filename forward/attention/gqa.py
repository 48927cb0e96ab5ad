"""Grouped-query attention: groups of heads share a key and a value, which are kept as they are.

T rows, H heads, G groups, D width of a head, V width of a value.
"""

import torch

from kernels.dispatch import grouped_attention, linear, rms_norm, rotate


def gqa(config, layer, weights, x, chunk):
    """x [T, D] (normed) -> [T, D]. Appends this layer's keys and values to each sequence."""
    H, G, D, V = config.num_heads, config.num_kv_heads, config.qk_head_dim, config.v_head_dim
    queries, keys = linear(x, weights.q, weights.q_bias), linear(x, weights.k, weights.k_bias)
    values = linear(x, weights.v, weights.v_bias)
    if weights.q_norm is not None:
        queries = norm(queries, weights.q_norm, config.rms_norm_eps)
        keys = norm(keys, weights.k_norm, config.rms_norm_eps)
    turn = chunk.cos, chunk.sin, config.rope_interleaved
    queries, keys = rotate(queries.view(-1, H, D), 0, *turn), rotate(keys.view(-1, G, D), 0, *turn)

    out, window = [], config.sliding_window(layer)
    for segment in chunk.segments:
        rows = segment.rows
        all_keys, all_values = segment.kv.append(layer, keys[rows].flatten(1), values[rows])
        all_keys, all_values = all_keys.view(-1, G, D), all_values.view(-1, G, V)
        out.append(
            grouped_attention(queries[rows], all_keys, all_values, segment.first, window, weights.sinks, D**-0.5)
        )
    out = out[0] if len(out) == 1 else torch.cat(out)
    return linear(out.flatten(1), weights.o, weights.o_bias)


def norm(x, weight, eps):
    """RMS norm over as many columns as the weight has: each head of x [T, heads * D] by itself, or all of a row."""
    return rms_norm(x.view(-1, len(weight)), weight, eps).view(x.shape)
