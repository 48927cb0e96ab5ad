"""Bytes a forward pass needs beside its weights, next to the shapes it counts."""

from forward.attention import indexer
from forward.lm_head import LOGIT_ROWS
from kernels.reference import BLOCK_BYTES, WIDEN_BYTES


def scratch_bytes(config, chunk_rows, capacity):
    """An upper estimate of temporary float32 memory for chunks of that many rows over `capacity` positions.

    Sums what is alive at once in the hungriest stage of a layer; blocks are capped where the code caps them.
    """
    c = config
    rows = min(chunk_rows, capacity)
    q_width, latent_width = c.num_heads * c.qk_head_dim, c.num_heads * c.kv_lora_rank
    index_width = c.index_num_heads * c.index_head_dim
    hidden = 5 * c.hidden_size  # residual, normed, output, and their sums
    attention = 2 * q_width + 3 * latent_width + 2 * index_width + c.num_heads * c.v_head_dim
    widest = max(c.intermediate_size, c.moe_intermediate_size * c.num_shared_experts)
    moe = 3 * widest + 3 * c.hidden_size
    kv_b = c.num_heads * (c.nope_head_dim + c.v_head_dim) * c.kv_lora_rank
    blocks = 3 * max(indexer.BLOCK_BYTES, BLOCK_BYTES)
    selection = 8 * rows * min(c.index_topk, capacity)
    full_scores = 4 * rows * c.num_heads * capacity  # small models never reach the block size
    logits = 6 * c.vocab_size * LOGIT_ROWS + 16 * c.vocab_size  # float32, a mask and a bit; one row in float64
    return (
        4 * (rows * (hidden + max(attention, moe)) + kv_b)
        + min(blocks, 4 * full_scores)
        + selection
        + (min(2 * WIDEN_BYTES, 8 * c.vocab_size * c.hidden_size) + logits)
    )
