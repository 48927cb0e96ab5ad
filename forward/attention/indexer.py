"""The DSA lightning indexer: selects the earlier positions that a token row attends to, the same for all heads.

Only layers with an indexer of their own ("full") run it; the "shared" layers after one reuse its selection. Up to
index_topk positions all are selected, which is written as None. DeepSeek-V3.2, DeepSeek Sparse Attention.

T token rows, S positions up to the last new one, H index heads, D index width.
"""

import torch
from torch import Tensor

from forward.chunk import MlaChunk
from kernels.dispatch import apply_rope, index_scores, layer_norm, linear, top_k_positions
from kernels.kv_rows import KvRows
from snapshot.config import ModelConfig
from snapshot.weights import IndexerWeights

BLOCK_BYTES = 64 << 20  # most of the index scores of one block of rows, all heads


def select_positions(
    config: ModelConfig, layer: int, weights: IndexerWeights, x: Tensor, query_latent: Tensor, chunk: MlaChunk
) -> list[Tensor | None]:
    """x [T, model width] (normed), query_latent [T, q_lora_rank] -> for each segment None (all earlier positions) or
    the selected positions [rows, index_topk], ascending, padded with -1. Appends index keys to each KV cache."""
    H, D = config.index_num_heads, config.index_head_dim
    rope = chunk.cos, chunk.sin, config.index_rope_interleaved
    keys = layer_norm(linear(x, weights.k), weights.k_norm, weights.k_norm_bias, config.index_norm_eps)  # [T, D]
    keys = apply_rope(keys, 0, *rope)
    cached = [segment.kv.append_index(layer, keys[segment.rows]) for segment in chunk.segments]  # each [S, D]
    if all(len(keys) <= config.index_topk for keys in cached):
        return [None] * len(cached)
    queries = apply_rope(linear(query_latent, weights.q_b).view(-1, H, D), 0, *rope)  # [T, H, D]
    head_weights = linear(x, weights.head_weights) * H**-0.5  # [T, H]
    return [
        select_rows(queries[s.rows], head_weights[s.rows], keys, s.first_position, config.index_topk)
        for s, keys in zip(chunk.segments, cached, strict=True)
    ]


def select_rows(queries: Tensor, head_weights: Tensor, keys: KvRows, first_position: int, topk: int) -> Tensor | None:
    """queries [T, H, D] of positions from first_position on, head_weights [T, H], keys [S, D] -> a selection."""
    if len(keys) <= topk:
        return None
    step = max(1, BLOCK_BYTES // (4 * queries.shape[1] * len(keys)))
    selected = []
    for start in range(0, len(queries), step):
        block = slice(start, start + step)
        scores = index_scores(queries[block], head_weights[block], keys)  # [block, S]
        selected.append(top_k_positions(scores, first_position + start, topk))
    return selected[0] if len(selected) == 1 else torch.cat(selected)
