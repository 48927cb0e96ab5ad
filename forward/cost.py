"""What a forward pass costs, next to the shapes it counts: memory beside its weights, operations, and bytes read.

One multiplication and the addition that goes with it are two operations (FLOPs). The indexer chooses beyond index_topk
positions; until then it only makes keys, and attention sees every position, or those of the layer's window.
"""

from dataclasses import fields, is_dataclass

import torch

from forward.attention import indexer
from forward.kv_cache import kv_dtype
from forward.lm_head import LOGIT_ROWS
from forward.moe import OUTPUT_BYTES
from kernels.formats import integer_format
from kernels.reference import BLOCK_BYTES, DEQUANTIZE_BYTES
from kernels.weight import Weight, packed_bytes


def scratch_bytes(config, chunk_rows, capacity, is_native=False):
    """An upper estimate of temporary float32 memory for chunks of that many rows over `capacity` positions.

    Sums what is alive at once in the hungriest stage of a layer; blocks are capped where the code caps them. The C
    kernels (is_native) hold neither scores nor widened weights: they make them row by row. Grouped queries have their
    scores made a row at a time, and experts with clamped gates their weights widened, by any kernels.
    """
    c = config
    is_mla = c.attention == "mla"
    row_scores = 0 if is_mla else 16 * c.num_heads * capacity
    rows = min(chunk_rows, capacity)
    q_width, v_width = c.num_heads * c.qk_head_dim, c.num_heads * c.v_head_dim
    index_width = c.index_num_heads * c.index_head_dim
    hidden = 5 * c.hidden_size  # residual, normed, output, and their sums
    widest = max(c.intermediate_size, c.moe_intermediate_size * max(1, c.num_shared_experts))
    moe = (6 if c.swiglu_limit else 3) * widest + 3 * c.hidden_size
    selection = 8 * rows * min(c.index_topk, capacity)
    logits = 6 * c.vocab_size * LOGIT_ROWS + 16 * c.vocab_size  # float32, a mask and a bit; one row in float64
    if is_native:
        attention = 2 * q_width + v_width + 2 * index_width + (0 if is_mla else 2 * sum(c.kv_widths))
        assignments = min(OUTPUT_BYTES, 4 * rows * c.num_active_experts * c.hidden_size)
        # Rows gathered for their experts, what comes out, and between them the two halves of the hidden layer.
        experts = assignments * (2 * c.hidden_size + 2 * c.moe_intermediate_size) // c.hidden_size
        widened = min(3 * DEQUANTIZE_BYTES, 12 * c.hidden_size * c.moe_intermediate_size) if c.swiglu_limit else 0
        return 4 * rows * (hidden + max(attention, moe)) + experts + selection + logits + row_scores + widened
    keys = 3 * c.num_heads * c.kv_lora_rank if is_mla else 2 * sum(c.kv_widths)
    attention = 2 * q_width + keys + 2 * index_width + v_width
    kv_b = c.num_heads * (c.nope_head_dim + c.v_head_dim) * c.kv_lora_rank
    blocks = 3 * max(indexer.BLOCK_BYTES, BLOCK_BYTES) if is_mla else row_scores
    full_scores = 4 * rows * c.num_heads * capacity  # small models never reach the block size
    # What a layer remembers in bfloat16 is widened before use.
    widened = capacity * max(sum(c.kv_widths), c.index_head_dim) if c.kv_dtype == "bf16" else 0
    return (
        4 * (rows * (hidden + max(attention, moe)) + kv_b + widened)
        + min(blocks, 4 * full_scores)
        + selection
        + (min(2 * DEQUANTIZE_BYTES, 8 * c.vocab_size * c.hidden_size) + logits)
    )


# --- operations -------------------------------------------------------------------------------------------------------


def full_layers(config, has_indexer=True):
    """How many layers run an indexer; none where the snapshot has none."""
    return sum(map(config.has_own_indexer, range(config.num_layers))) if has_indexer else 0


def attention_weights(config):
    """Weights of one layer's attention that a token is multiplied with."""
    c = config
    q_width, output = c.num_heads * c.qk_head_dim, c.num_heads * c.v_head_dim * c.hidden_size
    if c.attention == "gqa":
        return c.hidden_size * (q_width + sum(c.kv_widths)) + output
    queries = c.q_lora_rank * (c.hidden_size + q_width) if c.q_lora_rank else c.hidden_size * q_width
    kv_b = c.num_heads * (c.nope_head_dim + c.v_head_dim) * c.kv_lora_rank
    return queries + c.hidden_size * (c.kv_lora_rank + c.rope_head_dim) + kv_b + output


def matrix_weights(config, has_indexer=True):
    """Weights that a token is multiplied with before any choice of positions, without those of the head: of the routed
    experts its own alone."""
    c = config
    num_sparse = len(c.sparse_layers)
    experts = 3 * c.hidden_size * c.moe_intermediate_size * (c.num_active_experts + c.num_shared_experts)
    return (
        c.num_layers * attention_weights(c)
        + full_layers(c, has_indexer) * c.hidden_size * c.index_head_dim
        + (c.num_layers - num_sparse) * 3 * c.hidden_size * c.intermediate_size
        + num_sparse * (c.hidden_size * c.num_experts + experts)
    )


def choice_weights(config):
    """Weights of one indexer that a token is multiplied with when positions are chosen."""
    c = config
    return c.q_lora_rank * c.index_num_heads * c.index_head_dim + c.hidden_size * c.index_num_heads


def has_choice(config, has_indexer=True):
    """Whether an indexer chooses positions once there are more than index_topk."""
    return has_indexer and bool(config.indexer_types)


def most_seen(config, layer, has_indexer=True):
    """How many positions a row of a layer sees at most; None: all there are."""
    return (config.index_topk if has_choice(config, has_indexer) else config.sliding_window(layer)) or None


def seen(config, context, has_indexer=True):
    """Positions that one row sees with `context` there, itself included: summed over the layers."""
    limits = (most_seen(config, layer, has_indexer) for layer in range(config.num_layers))
    return sum(min(context, limit or context) for limit in limits)


def position_flops(config, num_seen, num_scored, num_choosing, has_indexer=True):
    """Operations that depend on positions: num_seen (layer, row, position) triples that attention sees; in each layer
    with an indexer num_scored pairs that it scores, and num_choosing rows that choose."""
    c = config
    # The scores of a position take its latent and its rotary key, and what it adds to the output is its latent again;
    # with grouped queries its key, and its value.
    widths = 2 * c.kv_lora_rank + c.rope_head_dim if c.attention == "mla" else c.qk_head_dim + c.v_head_dim
    scores = 2 * c.index_num_heads * (c.index_head_dim + 1)
    index = num_scored * scores + num_choosing * 2 * choice_weights(c)
    return num_seen * 2 * c.num_heads * widths + full_layers(c, has_indexer) * index


def decode_flops(config, context, has_indexer=True):
    """Operations of one token that sees `context` positions, itself included."""
    chooses = has_choice(config, has_indexer) and context > config.index_topk
    weights = matrix_weights(config, has_indexer) + config.vocab_size * config.hidden_size
    num_seen = seen(config, context, has_indexer)
    return 2 * weights + position_flops(config, num_seen, context * chooses, chooses, has_indexer)


def prefill_flops(config, num_tokens, has_indexer=True):
    """Operations of a prompt. Only its last token has logits."""

    def pairs(limit):
        free = min(limit or num_tokens, num_tokens)  # tokens that see all there is
        return free * (free + 1) // 2 + (num_tokens - free) * free

    num_seen = sum(pairs(most_seen(config, layer, has_indexer)) for layer in range(config.num_layers))
    choosing = max(0, num_tokens - config.index_topk) if has_choice(config, has_indexer) else 0
    scored = pairs(None) - (num_tokens - choosing) * (num_tokens - choosing + 1) // 2
    weights = num_tokens * matrix_weights(config, has_indexer) + config.vocab_size * config.hidden_size
    return 2 * weights + position_flops(config, num_seen, scored, choosing, has_indexer)


# --- bytes ------------------------------------------------------------------------------------------------------------


def kv_bytes_stored(config, has_indexer=True):
    """Of each token of each row, as long as its row lives; the row of the MTP layer is not counted."""
    kept = config.num_layers * sum(config.kv_widths)
    return kv_dtype(config).itemsize * (kept + full_layers(config, has_indexer) * config.index_head_dim)


def kv_bytes_read(config, context, has_indexer=True):
    """Of one row in one step that sees `context` positions."""
    chooses = has_choice(config, has_indexer) and context > config.index_topk
    kept = seen(config, context, has_indexer) * sum(config.kv_widths)
    index_keys = full_layers(config, has_indexer) * context * config.index_head_dim if chooses else 0
    return kv_dtype(config).itemsize * (kept + index_keys)


def held_bytes(part):
    """Bytes of weights: a tensor, a Weight, or a dataclass of such; None has none."""
    if isinstance(part, torch.Tensor):
        return part.numel() * part.element_size()
    if isinstance(part, Weight):
        return part.num_bytes
    return sum(held_bytes(getattr(part, f.name)) for f in fields(part)) if is_dataclass(part) else 0


def dense_bytes_read(weights, config, context):
    """Of ModelWeights in one step at `context` positions, however many rows it has: all but the embedding, which is
    only looked up, the MTP layer, and what an indexer chooses with where it need not."""
    num_bytes = sum(map(held_bytes, (*weights.layers, weights.norm, weights.lm_head)))
    if context <= config.index_topk:
        idle = [layer.indexer for layer in weights.layers if layer.indexer]
        num_bytes -= sum(held_bytes(one.q_b) + held_bytes(one.head_weights) for one in idle)
    return num_bytes


def expert_bytes(place, bits=16):
    """Of one expert in memory, read by each step that uses it: as stored, or quantized to `bits` at load."""
    if bits == 16 or place.is_packed:
        return place.stored_bytes
    return sum(packed_bytes(integer_format(bits), piece.rows, piece.columns) for piece in place.pieces)


def expected_experts(num_experts, num_active, num_rows):
    """Distinct experts of a layer that rows ask for together, if each chose evenly and on its own: an estimate, what a
    run asks for is measured."""
    return num_experts * (1 - (1 - num_active / num_experts) ** num_rows)
