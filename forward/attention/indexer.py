"""The DSA lightning indexer: which earlier positions a row may attend to, chosen for all heads together.

Only "full" layers run it; the "shared" layers after one reuse its selection. Up to index_topk positions everything is
selected, and that is written as None.
"""

import torch

from kernels.dispatch import index_scores, linear
from kernels.reference import layer_norm, rope_interleaved, top_k_indices

# Index scores of one block of rows, heads included, stay below this.
BLOCK_BYTES = 64 << 20


def select(config, layer, weights, x, query_latent, chunk):
    """x [T, D] (normed), query_latent [T, q_lora_rank] -> for each segment None (all earlier positions) or the
    selected positions [rows, index_topk], ascending, -1 where a row has fewer."""
    H, D, R = config.index_num_heads, config.index_head_dim, config.rope_head_dim
    queries = linear(query_latent, weights.q_b).view(-1, H, D)
    queries = torch.cat([rope_interleaved(queries[..., :R], chunk.cos, chunk.sin), queries[..., R:]], dim=-1)
    keys = layer_norm(linear(x, weights.k), weights.k_norm, weights.k_norm_bias, config.index_norm_eps)
    keys = torch.cat([rope_interleaved(keys[..., :R], chunk.cos, chunk.sin), keys[..., R:]], dim=-1)
    head_weights = linear(x, weights.head_weights) * H**-0.5
    selections = []
    for segment in chunk.segments:
        known = segment.kv.bind(layer).append_index(keys[segment.rows])
        if len(known) <= config.index_topk:
            selections.append(None)
            continue
        rows = segment.rows
        selections.append(select_rows(queries[rows], head_weights[rows], known, segment.positions, config.index_topk))
    return selections


def select_rows(queries, head_weights, keys, positions, topk):
    """queries [T, H, D], keys [S, D], S > topk -> [T, topk] positions, ascending, padded with -1."""
    step = max(1, BLOCK_BYTES // (4 * queries.shape[1] * len(keys)))
    out = []
    for start in range(0, len(queries), step):
        block = slice(start, start + step)
        scores = index_scores(queries[block], head_weights[block], keys)
        later = torch.arange(len(keys)) > positions[block, None]
        chosen = top_k_indices(scores.masked_fill_(later, -torch.inf), topk)
        out.append(chosen.masked_fill_(chosen > positions[block, None], -1))
    return torch.cat(out)
