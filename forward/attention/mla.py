"""Multi-head latent attention, absorbed: queries are taken into the latent space, so the cache is read as it lies.

kv_b is split per head into the key part Wk [N, L] and the value part Wv [V, L]: q . (Wk l) = (q Wk) . l, and
sum p Wv l = Wv sum p l. T rows, S positions, H heads, N nope width, R rotary width, L latent width, V value width.
"""

import torch

from forward.attention.indexer import select
from kernels.reference import latent_attention, linear, rms_norm, rope_interleaved

# Scores, or gathered latents, of one block of rows stay below this.
BLOCK_BYTES = 64 << 20


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
    query_latent = rms_norm(linear(x, weights.q_a, weights.q_a_bias), weights.q_a_norm, config.latent_norm_eps)
    queries = linear(query_latent, weights.q_b).view(-1, H, N + R)
    q_rope = rope_interleaved(queries[..., N:], chunk.cos, chunk.sin)
    compressed = linear(x, weights.kv_a, weights.kv_a_bias)
    latents = rms_norm(compressed[:, :L], weights.kv_a_norm, config.latent_norm_eps)
    rope_keys = rope_interleaved(compressed[:, L:], chunk.cos, chunk.sin)
    if indexer is not None:
        selections = select(config, layer, indexer, x, query_latent, chunk)

    kv_b = weights.kv_b.widen().view(H, N + V, L)
    q_latent = torch.einsum("thn,hnl->thl", queries[..., :N], kv_b[:, :N])
    mixed = torch.empty_like(q_latent)  # [T, H, L]
    for segment, selection in zip(chunk.segments, selections, strict=True):
        rows = segment.rows
        known = segment.kv.bind(layer).append(latents[rows], rope_keys[rows])
        mixed[rows] = attend(q_latent[rows], q_rope[rows], *known, segment.positions, selection, config.qk_head_dim)
    out = torch.einsum("thl,hvl->thv", mixed, kv_b[:, N:]).reshape(-1, H * V)
    return linear(out, weights.o, weights.o_bias), selections


def attend(q_latent, q_rope, latents, rope_keys, positions, selection, qk_head_dim):
    """One sequence: q_latent [T, H, L], latents [S, L] -> [T, H, L], a block of rows at a time."""
    H, L = q_latent.shape[1:]
    num_keys, row_floats = len(latents), H * len(latents)
    if selection is not None:
        num_keys = selection.shape[1]
        row_floats = num_keys * (L + rope_keys.shape[1] + H)
    step = max(1, BLOCK_BYTES // (4 * row_floats))
    out = []
    for start in range(0, len(q_latent), step):
        block = slice(start, start + step)
        if selection is None:
            keys = (latents, rope_keys)
            allowed = torch.arange(num_keys) <= positions[block, None]
        else:
            chosen = selection[block]
            allowed = chosen >= 0
            chosen = chosen.clamp_min(0)
            keys = (latents[chosen], rope_keys[chosen])
        out.append(latent_attention(q_latent[block], q_rope[block], *keys, allowed, qk_head_dim**-0.5))
    return torch.cat(out)
