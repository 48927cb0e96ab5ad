"""Scratch memory of a forward pass: what a prefill chunk needs beside weights and KV cache, for the memory plan."""

from forward.attention import indexer
from forward.lm_head import LOGIT_ROWS
from forward.moe import OUTPUT_BYTES
from kernels.reference import DEQUANTIZE_BYTES
from kernels.reference_attention import BLOCK_BYTES
from snapshot.config import ModelConfig

FEW_ROWS, FEW_SCORES = (
    8,
    16 << 20,
)  # of kernels/csrc/attention.c: token rows whose scores are held at once; their number


def scratch_bytes(config: ModelConfig, chunk_rows: int, capacity: int, is_native: bool = False) -> int:
    """An upper estimate of temporary float32 memory for chunks of chunk_rows rows over `capacity` positions.

    Sums what is alive at once in the largest stage of a layer; blocks are capped where the code caps them. The C
    kernels (is_native) hold the attention scores of a few rows, and no dequantized weights but those of experts with a
    clamped SwiGLU, which any kernels dequantize.
    """
    c = config
    is_mla = c.attention == "mla"
    row_scores = 0 if is_mla else 16 * c.num_heads * capacity
    native_scores = 4 * min(FEW_SCORES, FEW_ROWS * c.num_heads * capacity)
    rows = min(chunk_rows, capacity)
    q_width = c.num_heads * c.qk_head_dim
    v_width = c.num_heads * c.v_head_dim
    index_width = c.index_num_heads * c.index_head_dim
    hidden = 5 * c.hidden_size  # residual, normed, output, and their sums
    widest = max(c.intermediate_size, c.moe_intermediate_size * max(1, c.num_shared_experts))
    moe = (6 if c.swiglu_limit else 3) * widest + 3 * c.hidden_size
    selection = 8 * rows * min(c.index_topk, capacity)
    logits = 6 * c.vocab_size * LOGIT_ROWS + 16 * c.vocab_size  # float32, a mask and a bit; one row in float64
    keys = 2 * sum(c.kv_widths)
    if is_mla:
        keys = 0 if is_native else 3 * c.num_heads * c.kv_lora_rank
    attention = 2 * q_width + v_width + 2 * index_width + keys
    common = 4 * rows * (hidden + max(attention, moe)) + selection + logits
    if is_native:
        assignments = min(OUTPUT_BYTES, 4 * rows * c.num_active_experts * c.hidden_size)
        # Rows gathered for their experts, their outputs, and between them the two halves of the hidden layer.
        experts = assignments * (2 * c.hidden_size + 2 * c.moe_intermediate_size) // c.hidden_size
        dequantized = min(3 * DEQUANTIZE_BYTES, 12 * c.hidden_size * c.moe_intermediate_size) if c.swiglu_limit else 0
        return common + experts + native_scores + dequantized
    kv_b = c.num_heads * (c.nope_head_dim + c.v_head_dim) * c.kv_lora_rank
    blocks = 3 * max(indexer.BLOCK_BYTES, BLOCK_BYTES) if is_mla else row_scores
    full_scores = 16 * rows * c.num_heads * capacity  # small models never reach the block size
    # A layer's KV cache in fewer bits is converted to float32 before use.
    converted = capacity * max(sum(c.kv_widths), c.index_head_dim) if c.kv_dtype != "f32" else 0
    dequantized = min(2 * DEQUANTIZE_BYTES, 8 * c.vocab_size * c.hidden_size)
    return common + 4 * (kv_b + converted) + min(blocks, full_scores) + dequantized
