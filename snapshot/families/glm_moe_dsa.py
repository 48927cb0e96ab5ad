"""glm_moe_dsa (GLM-5, 5.1, 5.2): MLA with a DSA indexer, sigmoid router, MTP layer."""

from snapshot import config_parts as parts
from snapshot.config import ModelConfig
from snapshot.config_fields import ConfigFields

TEXT_PREFIX = ("[gMASK]", "<sop>")


def parse_config(fields: ConfigFields) -> ModelConfig:
    fields.defaults = dict(
        max_position_embeddings=202752, index_n_heads=32, first_k_dense_replace=3, routed_scaling_factor=2.5
    )
    fields.require("rope_interleave", True)
    fields.require("indexer_rope_interleave", True)
    common = parts.parse_common(fields)
    attention = parts.parse_mla(fields, common)
    return ModelConfig(
        text_prefix=TEXT_PREFIX,
        rope_interleaved=True,
        indexer_types=parse_indexer_types(fields, common["num_layers"]),
        **common,
        **attention,
        **parts.parse_indexer(fields, attention),
        **parts.parse_sigmoid_moe(fields, common),
    )


def parse_indexer_types(fields: ConfigFields, num_layers: int) -> tuple[str, ...]:
    """indexer_types takes precedence over index_topk_pattern, and that over the freq / offset schedule."""
    types = fields.words("indexer_types", ("full", "shared"), num_layers)
    pattern = fields.get("index_topk_pattern", None)
    if types is not None and isinstance(pattern, str | list):
        by_pattern = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern if isinstance(letter, str)]
        if by_pattern != list(types):
            fields.prefer("indexer_types", types, "index_topk_pattern", pattern)
    elif types is None and isinstance(pattern, str):
        if len(pattern) != num_layers or set(pattern) - set("FS"):
            fields.reject("index_topk_pattern", f"must be {num_layers} letters, each F or S")
        types = tuple("full" if letter == "F" else "shared" for letter in pattern)
    elif types is None and pattern is not None:
        types = fields.words("index_topk_pattern", ("full", "shared"), num_layers)
    if types is None:
        freq = max(fields.count("index_topk_freq", 1, low=0), 1)
        offset = fields.count("index_skip_topk_offset", 2, low=0)
        types = tuple("full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(num_layers))
    if types[0] != "full":
        fields.reject("indexer_types", "must begin with full: a shared layer reuses an earlier selection")
    return types
