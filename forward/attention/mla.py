"""Multi-head latent attention (MLA), absorbed: queries are projected into the latent space, so that attention runs over
the latents of the KV cache as they are. DeepSeek-V2, section 2.1.

T token rows, S positions up to the last new one, D model width, H heads, N width of a head's part without rotation
(nope), R of its rotated part, L latent width, V value width of a head.
"""

import torch
from torch import Tensor

from forward.attention.indexer import select_positions
from forward.chunk import MlaChunk
from kernels.dispatch import absorbed_attention, apply_rope, linear, rms_norm
from snapshot.config import ModelConfig
from snapshot.weights import IndexerWeights, MlaWeights


def mla(
    config: ModelConfig, layer: int, weights: MlaWeights, indexer: IndexerWeights | None, x: Tensor, chunk: MlaChunk
) -> Tensor:
    """x [T, D] (normed) -> [T, D]. A layer with an indexer writes chunk.selections, one without reuses them.
    Appends latents and rotated keys to the KV cache of each sequence."""
    N, R, L, V = config.nope_head_dim, config.rope_head_dim, config.kv_lora_rank, config.v_head_dim
    rope = chunk.cos, chunk.sin, config.rope_interleaved
    query_latent = x  # [T, q_lora_rank]; some models have no query latent
    if weights.q_a is not None:
        assert weights.q_a_norm is not None
        query_latent = rms_norm(linear(x, weights.q_a, weights.q_a_bias), weights.q_a_norm, config.latent_norm_eps)
    queries = linear(query_latent, weights.q_b).view(-1, config.num_heads, N + R)
    queries = apply_rope(queries, N, *rope)  # [T, H, N + R]
    compressed = apply_rope(linear(x, weights.kv_a, weights.kv_a_bias), L, *rope)  # [T, L + R]
    latents = rms_norm(compressed[:, :L], weights.kv_a_norm, config.latent_norm_eps)  # [T, L]
    rope_keys = compressed[:, L:]  # [T, R], one for all heads
    if indexer is not None:
        chunk.selections[:] = select_positions(config, layer, indexer, x, query_latent, chunk)

    outputs = []
    scale = config.qk_head_dim**-0.5 * config.rope.score_factor
    for segment, selection in zip(chunk.segments, chunk.selections, strict=True):
        rows = segment.rows
        cached = segment.kv.append(layer, latents[rows], rope_keys[rows])  # [S, L], [S, R]
        position = segment.first_position
        outputs.append(absorbed_attention(queries[rows], weights.kv_b, *cached, position, selection, V, scale))
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)  # [T, H, V]
    return linear(out.flatten(1), weights.o, weights.o_bias)
