"""The cost model of a forward pass: FLOPs, and bytes of weights and KV cache that it reads.

A multiplication with its addition counts as two FLOPs. The indexer selects positions beyond index_topk; up to there it
only makes keys, and attention sees every position, or those of the layer's sliding window. `context`: the positions
that a token sees, itself included; has_indexer: whether the snapshot holds the indexers that its config names.
"""

from dataclasses import fields, is_dataclass

from torch import Tensor

from experts.disk import ExpertLayout
from forward.kv_cache import position_bytes
from kernels.formats import integer_format
from kernels.weight import Weight, packed_bytes
from snapshot.config import ModelConfig
from snapshot.weights import ModelWeights


def num_indexers(config: ModelConfig, has_indexer: bool = True) -> int:
    """Layers that run an indexer, without the MTP layer."""
    return sum(map(config.has_own_indexer, range(config.num_layers))) if has_indexer else 0


def attention_weights(config: ModelConfig) -> int:
    """Weights of one layer's attention that a token is multiplied with."""
    c = config
    q_width = c.num_heads * c.qk_head_dim
    output = c.num_heads * c.v_head_dim * c.hidden_size
    if c.attention == "gqa":
        return c.hidden_size * (q_width + sum(c.kv_widths)) + output
    queries = c.q_lora_rank * (c.hidden_size + q_width) if c.q_lora_rank else c.hidden_size * q_width
    kv_b = c.num_heads * (c.nope_head_dim + c.v_head_dim) * c.kv_lora_rank
    return queries + c.hidden_size * (c.kv_lora_rank + c.rope_head_dim) + kv_b + output


def matrix_weights(config: ModelConfig, has_indexer: bool = True) -> int:
    """Weights that a token is multiplied with at any context: without the output head, with its active experts only."""
    c = config
    num_sparse = len(c.sparse_layers)
    experts = 3 * c.hidden_size * c.moe_intermediate_size * (c.num_active_experts + c.num_shared_experts)
    return (
        c.num_layers * attention_weights(c)
        + num_indexers(c, has_indexer) * c.hidden_size * c.index_head_dim
        + (c.num_layers - num_sparse) * 3 * c.hidden_size * c.intermediate_size
        + num_sparse * (c.hidden_size * c.num_experts + experts)
    )


def selection_weights(config: ModelConfig) -> int:
    """Weights of one indexer that a token is multiplied with when positions are selected."""
    c = config
    return c.q_lora_rank * c.index_num_heads * c.index_head_dim + c.hidden_size * c.index_num_heads


def selects(config: ModelConfig, context: int, has_indexer: bool = True) -> bool:
    """True where indexers select among the positions."""
    return has_indexer and bool(config.indexer_types) and context > config.index_topk


def attention_span(config: ModelConfig, layer: int, has_indexer: bool = True) -> int | None:
    """Most positions that a row of a layer attends to; None without a limit."""
    is_dsa = has_indexer and bool(config.indexer_types)
    return (config.index_topk if is_dsa else config.sliding_window(layer)) or None


def attended_positions(config: ModelConfig, context: int, has_indexer: bool = True) -> int:
    """Positions that one row attends to, summed over the layers."""
    spans = (attention_span(config, layer, has_indexer) for layer in range(config.num_layers))
    return sum(min(context, span or context) for span in spans)


def attention_flops(
    config: ModelConfig, num_attended: int, num_scored: int, num_selecting: int, has_indexer: bool = True
) -> int:
    """FLOPs that depend on the context: num_attended (layer, row, position) triples; in each layer with an indexer
    num_scored pairs of a row and a position that it scores, and num_selecting rows that select."""
    c = config
    # MLA: a latent and a rotated key for the score of a position, the latent again for its share of the output. GQA: a
    # key, and a value.
    widths = 2 * c.kv_lora_rank + c.rope_head_dim if c.attention == "mla" else c.qk_head_dim + c.v_head_dim
    scores = 2 * c.index_num_heads * (c.index_head_dim + 1)
    index = num_scored * scores + num_selecting * 2 * selection_weights(c)
    return num_attended * 2 * c.num_heads * widths + num_indexers(c, has_indexer) * index


def decode_flops(config: ModelConfig, context: int, has_indexer: bool = True) -> int:
    """FLOPs of one token that sees `context` positions."""
    is_selecting = selects(config, context, has_indexer)
    weights = matrix_weights(config, has_indexer) + config.vocab_size * config.hidden_size
    num_attended = attended_positions(config, context, has_indexer)
    return 2 * weights + attention_flops(config, num_attended, context * is_selecting, is_selecting, has_indexer)


def prefill_flops(config: ModelConfig, num_tokens: int, has_indexer: bool = True) -> int:
    """FLOPs of the prefill of a prompt, with the logits of its last token only."""

    def pairs(span: int | None) -> int:
        unlimited = min(span or num_tokens, num_tokens)  # tokens that see all positions before them
        return unlimited * (unlimited + 1) // 2 + (num_tokens - unlimited) * unlimited

    num_attended = sum(pairs(attention_span(config, layer, has_indexer)) for layer in range(config.num_layers))
    selecting = num_tokens - config.index_topk if selects(config, num_tokens, has_indexer) else 0
    scored = pairs(None) - (num_tokens - selecting) * (num_tokens - selecting + 1) // 2
    weights = num_tokens * matrix_weights(config, has_indexer) + config.vocab_size * config.hidden_size
    return 2 * weights + attention_flops(config, num_attended, scored, selecting, has_indexer)


# --- bytes ------------------------------------------------------------------------------------------------------------


def kv_bytes_per_token(config: ModelConfig, has_indexer: bool = True) -> int:
    """Bytes of the KV cache that a token takes, without the MTP layer."""
    return position_bytes(config, config.num_layers, num_indexers(config, has_indexer))


def kv_bytes_read(config: ModelConfig, context: int, has_indexer: bool = True) -> int:
    """Bytes of the KV cache that a decode step reads for one sequence at `context` positions."""
    keys = attended_positions(config, context, has_indexer) * position_bytes(config, 1, 0)
    is_selecting = selects(config, context, has_indexer)
    return keys + (context * position_bytes(config, 0, num_indexers(config)) if is_selecting else 0)


def weight_bytes(part: object) -> int:
    """Bytes of a tensor, a Weight, or a dataclass of such; 0 for anything else."""
    if isinstance(part, Tensor):
        return part.nbytes
    if isinstance(part, Weight):
        return part.num_bytes
    return sum(weight_bytes(getattr(part, f.name)) for f in fields(part)) if is_dataclass(part) else 0


def dense_bytes_read(weights: ModelWeights, config: ModelConfig, context: int) -> int:
    """Bytes of dense weights that a step reads at `context` positions, for any number of rows: without the embedding,
    the MTP layer, and the indexers' selection weights where nothing is selected."""
    num_bytes = sum(map(weight_bytes, (*weights.layers, weights.norm, weights.lm_head)))
    if context <= config.index_topk:
        idle = [layer.indexer for layer in weights.layers if layer.indexer]
        num_bytes -= sum(weight_bytes(one.q_b) + weight_bytes(one.head_weights) for one in idle)
    return num_bytes


def expert_bytes(layout: ExpertLayout, bits: int = 16) -> int:
    """Bytes of an expert in memory, which each step that uses it reads: as stored, or quantized to `bits` at load."""
    if bits == 16 or layout.is_packed:
        return layout.stored_bytes
    return sum(packed_bytes(integer_format(bits), matrix.rows, matrix.columns) for matrix in layout.matrices)
