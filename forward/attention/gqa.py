"""Grouped-query attention (GQA): the query heads of a group share a key and a value head. With a sliding window and
attention sinks where the model has them.

T token rows, S positions up to the last new one, D model width, H query heads, G KV heads, K width of a query or key
head, V width of a value head.
"""

import torch
from torch import Tensor

from forward.chunk import Chunk
from forward.kv_cache import GqaKvCache
from kernels.dispatch import apply_rope, grouped_attention, linear, rms_norm
from kernels.kv_rows import Int8Rows, KvRows
from snapshot.config import ModelConfig
from snapshot.weights import GqaWeights


def gqa(config: ModelConfig, layer: int, weights: GqaWeights, x: Tensor, chunk: Chunk[GqaKvCache]) -> Tensor:
    """x [T, D] (normed) -> [T, D]. Appends keys and values to the KV cache of each sequence."""
    H, G, K = config.num_heads, config.num_kv_heads, config.qk_head_dim
    queries = linear(x, weights.q, weights.q_bias)  # [T, H * K]
    keys = linear(x, weights.k, weights.k_bias)  # [T, G * K]
    values = linear(x, weights.v, weights.v_bias)  # [T, G * V]
    if weights.q_norm is not None and weights.k_norm is not None:
        queries = head_norm(queries, weights.q_norm, config.rms_norm_eps)
        keys = head_norm(keys, weights.k_norm, config.rms_norm_eps)
    rope = chunk.cos, chunk.sin, config.rope_interleaved
    queries = apply_rope(queries.view(-1, H, K), 0, *rope)  # [T, H, K]
    keys = apply_rope(keys.view(-1, G, K), 0, *rope).flatten(1)  # [T, G * K]

    outputs = []
    window = config.sliding_window(layer)
    for segment in chunk.segments:
        rows = segment.rows
        all_keys, all_values = segment.kv.append(layer, keys[rows], values[rows])
        cached = by_head(all_keys, G), by_head(all_values, G)  # [S, G, K], [S, G, V]
        position = segment.first_position
        outputs.append(grouped_attention(queries[rows], *cached, position, window, weights.sinks, K**-0.5))
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)  # [T, H, V]
    return linear(out.flatten(1), weights.o, weights.o_bias)


def by_head(rows: KvRows, num_heads: int) -> KvRows:
    """Rows [S, heads * width] of a KV cache -> [S, heads, width]."""
    return rows.heads(num_heads) if isinstance(rows, Int8Rows) else rows.view(len(rows), num_heads, -1)


def head_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over as many columns as the weight has: each head of x [T, heads * K] by itself, or a whole row."""
    return rms_norm(x.view(-1, len(weight)), weight, eps).view(x.shape)
