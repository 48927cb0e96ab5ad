"""Bytes a forward pass needs beside its weights, next to the shapes it counts."""

from forward.attention import indexer
from forward.lm_head import LOGIT_ROWS
from forward.moe import OUTPUT_BYTES
from kernels.reference import BLOCK_BYTES, WIDEN_BYTES


def scratch_bytes(config, chunk_rows, capacity, is_native=False):
    """An upper estimate of temporary float32 memory for chunks of that many rows over `capacity` positions.

    Sums what is alive at once in the hungriest stage of a layer; blocks are capped where the code caps them. The C
    kernels (is_native) hold neither scores nor widened weights: they make them row by row.
    """
    c = config
    rows = min(chunk_rows, capacity)
    q_width, v_width = c.num_heads * c.qk_head_dim, c.num_heads * c.v_head_dim
    index_width = c.index_num_heads * c.index_head_dim
    hidden = 5 * c.hidden_size  # residual, normed, output, and their sums
    widest = max(c.intermediate_size, c.moe_intermediate_size * c.num_shared_experts)
    moe = 3 * widest + 3 * c.hidden_size
    selection = 8 * rows * min(c.index_topk, capacity)
    logits = 6 * c.vocab_size * LOGIT_ROWS + 16 * c.vocab_size  # float32, a mask and a bit; one row in float64
    if is_native:
        attention = 2 * q_width + v_width + 2 * index_width
        assignments = min(OUTPUT_BYTES, 4 * rows * c.num_active_experts * c.hidden_size)
        # Rows gathered for their experts, what comes out, and between them the two halves of the hidden layer.
        experts = assignments * (2 * c.hidden_size + 2 * c.moe_intermediate_size) // c.hidden_size
        return 4 * rows * (hidden + max(attention, moe)) + experts + selection + logits
    attention = 2 * q_width + 3 * c.num_heads * c.kv_lora_rank + 2 * index_width + v_width
    kv_b = c.num_heads * (c.nope_head_dim + c.v_head_dim) * c.kv_lora_rank
    blocks = 3 * max(indexer.BLOCK_BYTES, BLOCK_BYTES)
    full_scores = 4 * rows * c.num_heads * capacity  # small models never reach the block size
    return (
        4 * (rows * (hidden + max(attention, moe)) + kv_b)
        + min(blocks, 4 * full_scores)
        + selection
        + (min(2 * WIDEN_BYTES, 8 * c.vocab_size * c.hidden_size) + logits)
    )
