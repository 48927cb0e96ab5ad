"""The DSA lightning indexer: which earlier positions a row may attend to, chosen for all heads together.

Only "full" layers run it; the "shared" layers after one reuse its selection. Up to index_topk positions everything is
selected, and that is written as None.
"""

import torch

from kernels.dispatch import index_scores, layer_norm, linear, rotate, top_positions

# Index scores of one block of rows, heads included, stay below this.
BLOCK_BYTES = 64 << 20


def select(config, layer, weights, x, query_latent, chunk):
    """x [T, D] (normed), query_latent [T, q_lora_rank] -> for each segment None (all earlier positions) or the
    selected positions [rows, index_topk], ascending, -1 where a row has fewer."""
    H, D = config.index_num_heads, config.index_head_dim
    keys = layer_norm(linear(x, weights.k), weights.k_norm, weights.k_norm_bias, config.index_norm_eps)
    keys = rotate(keys, 0, chunk.cos, chunk.sin, config.index_rope_interleaved)
    known = [segment.kv.append_index(layer, keys[segment.rows]) for segment in chunk.segments]
    if all(len(keys) <= config.index_topk for keys in known):
        return [None] * len(known)
    queries = linear(query_latent, weights.q_b).view(-1, H, D)
    queries = rotate(queries, 0, chunk.cos, chunk.sin, config.index_rope_interleaved)
    head_weights = linear(x, weights.head_weights) * H**-0.5
    return [
        None
        if len(keys) <= config.index_topk
        else select_rows(queries[s.rows], head_weights[s.rows], keys, s.first, config.index_topk)
        for s, keys in zip(chunk.segments, known, strict=True)
    ]


def select_rows(queries, head_weights, keys, first, topk):
    """queries [T, H, D], of positions from `first` on; keys [S, D], S > topk -> [T, topk] positions, ascending, padded
    with -1."""
    step = max(1, BLOCK_BYTES // (4 * queries.shape[1] * len(keys)))
    out = []
    for start in range(0, len(queries), step):
        block = slice(start, start + step)
        scores = index_scores(queries[block], head_weights[block], keys)
        out.append(top_positions(scores, first + start, topk))
    return out[0] if len(out) == 1 else torch.cat(out)
