"""The attention operations of reference.py in plain torch: absorbed MLA, GQA, the lightning indexer and its top k.

T token rows, S key positions, D columns, H heads, G key-value heads, K selected positions, L latent width, R rotary
width.
"""

import torch
from torch import Tensor

from kernels.kv_rows import Int8Rows, KvRows
from kernels.weight import Weight

# Limit of the scores, or gathered latents, of one block of token rows of attention.
BLOCK_BYTES = 64 << 20


def top_k_mask(scores: Tensor, k: int) -> Tensor:
    """scores [T, N] -> boolean [T, N] with exactly k true in each row: the k largest, ties to the lowest index.

    NaN counts as the largest, so that it is selected and noticed."""
    if k >= scores.shape[-1]:
        return torch.ones_like(scores, dtype=torch.bool)
    scores = scores.masked_fill(scores.isnan(), torch.inf)
    threshold = scores.topk(k, dim=-1).values[:, -1:]
    above, tied = scores > threshold, scores == threshold
    room = k - above.sum(-1, keepdim=True)
    return above | (tied & (tied.cumsum(-1) <= room))


def top_k_indices(scores: Tensor, k: int) -> Tensor:
    """scores [T, N] -> [T, min(k, N)] indices of the largest, ascending by index."""
    return top_k_mask(scores, k).nonzero()[:, 1].view(scores.shape[0], -1)


def top_k_positions(scores: Tensor, first: int, topk: int) -> Tensor:
    """scores [T, S], S > topk; row t sees the positions up to first + t -> [T, topk]: its top k, ascending, -1 where
    there are fewer. A row that sees a NaN selects nothing, and attention over nothing gives NaN."""
    own = torch.arange(first, first + len(scores))[:, None]
    later = torch.arange(scores.shape[1]) > own
    selected = top_k_indices(scores.masked_fill(later, -torch.inf), topk)
    bad = scores.masked_fill(later, 0.0).isnan().any(-1, keepdim=True)
    return selected.masked_fill_((selected > own) | bad, -1)


def index_scores(queries: Tensor, head_weights: Tensor, keys: KvRows) -> Tensor:
    """Scores of the lightning indexer (DSA): sum over heads of weight * relu(query . key).

    queries [T, H, D], head_weights [T, H] (already scaled), keys [S, D], float32, bfloat16 or int8 -> [T, S].
    """
    T, H, D = queries.shape
    scores = (queries.reshape(T * H, D) @ keys.float().T).relu_().view(T, H, -1) * D**-0.5
    return torch.einsum("th,ths->ts", head_weights, scores)


def absorbed_attention(
    queries: Tensor,
    kv_b: Weight,
    latents: KvRows,
    rope_keys: KvRows,
    position: int,
    selection: Tensor | None,
    value_dim: int,
    scale: float,
) -> Tensor:
    """Absorbed MLA (multi-head latent attention) of T new rows of one sequence over the cached latents.

    queries [T, H, N + R], RoPE applied; kv_b Weight [H * (N + V), L], for each head N key rows and V value rows;
    latents [S, L] and rope_keys [S, R] of all positions, the new ones included, float32, bfloat16 or int8. Row t is
    position `position` + t and attends to the positions up to its own, or to those of selection [T, K] (ascending, -1
    where there are fewer). -> [T, H, V], float32.
    q . (Wk l) = (q Wk) . l, and sum p Wv l = Wv sum p l: one key for all heads.
    """
    T, H = queries.shape[:2]
    R, L = rope_keys.shape[1], latents.shape[1]
    N = queries.shape[2] - R
    weights = kv_b.dequantize().view(H, N + value_dim, L)
    q_latent = torch.einsum("thn,hnl->thl", queries[..., :N], weights[:, :N])
    num_keys = len(latents) if selection is None else selection.shape[1]
    row_floats = H * num_keys if selection is None else num_keys * (L + R + H)
    latents, rope_keys = (rows.float() if isinstance(rows, Int8Rows) else rows for rows in (latents, rope_keys))
    step, mixed = max(1, BLOCK_BYTES // (4 * row_floats)), torch.empty_like(q_latent)
    if selection is None:
        latents, rope_keys = latents.float(), rope_keys.float()
    for start in range(0, T, step):
        rows = slice(start, start + step)
        if selection is None:
            keys = latents, rope_keys
            allowed = torch.arange(num_keys) <= torch.arange(position + start, position + min(start + step, T))[:, None]
        else:
            selected = selection[rows].clamp_min(0)
            keys, allowed = (latents[selected].float(), rope_keys[selected].float()), selection[rows] >= 0
        mixed[rows] = latent_attention(q_latent[rows], queries[rows, :, N:], *keys, allowed, scale)
    return torch.einsum("thl,hvl->thv", mixed, weights[:, N:])


def latent_attention(
    q_latent: Tensor, q_rope: Tensor, latents: Tensor, rope_keys: Tensor, allowed: Tensor, scale: float
) -> Tensor:
    """Attention over latents, one key for all heads.

    q_latent [T, H, L], q_rope [T, H, R]; latents [S, L] and rope_keys [S, R], or one selection for each row
    [T, K, L] and [T, K, R]; allowed boolean [T, S or K]. -> [T, H, L], the attention-weighted latents.
    """
    scores = q_latent @ latents.transpose(-1, -2) + q_rope @ rope_keys.transpose(-1, -2)
    scores = (scores * scale).masked_fill_(~allowed[:, None, :], -torch.inf)
    return scores.softmax(-1) @ latents


def grouped_attention(
    queries: Tensor,
    keys: KvRows,
    values: KvRows,
    position: int,
    window: int = 0,
    sinks: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Grouped-query attention (GQA) of T new rows of one sequence: G key-value heads, each of H / G query heads.

    queries [T, H, D]; keys [S, G, D] and values [S, G, V] of all positions, the new ones included, float32, bfloat16 or
    int8.
    Row t is position `position` + t and attends to the positions up to its own; window > 0: a sliding window of the
    last `window` of them. sinks [H]: attention sinks, one more score of each head in the softmax. -> [T, H, V].

    Row by row, over the positions that the row attends to: its bits do not depend on the batch composition.
    """
    T, H, D = queries.shape
    G, V = values.shape[1:]
    keys, values = (rows.float() if isinstance(rows, Int8Rows) else rows for rows in (keys, values))
    keys, values, out = keys.permute(1, 2, 0), values.transpose(0, 1), torch.empty(T, H, V)
    queries = queries.reshape(T, G, H // G, D) * scale
    for t in range(T):
        visible = slice(max(0, position + t + 1 - window) if window else 0, position + t + 1)
        scores = queries[t] @ keys[:, :, visible].float()  # [G, H / G, visible]
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(G, -1, 1)], dim=-1)
        probabilities = scores.softmax(-1)[..., : visible.stop - visible.start]
        out[t] = (probabilities @ values[:, visible].float()).view(H, V)
    return out
