"""glm_moe_dsa (GLM-5, 5.1, 5.2): what its config.json says. MLA with a DSA indexer, sigmoid router, MTP layer."""

from snapshot.config import ModelConfig
from snapshot.config_parts import (
    EXPERT_NAMES,
    check_num_experts,
    parse_common,
    parse_experts,
    parse_indexer,
    parse_mla,
    parse_mlp_types,
    parse_mtp,
    parse_sigmoid_router,
)
from snapshot.family import Family

TEXT_PREFIX = ("[gMASK]", "<sop>")


def parse_config(fields):
    """Fields -> ModelConfig."""
    fields.only("rope_interleave", True)
    fields.only("indexer_rope_interleave", True)
    model = parse_common(fields, positions=202752)
    attention = parse_mla(fields, model)
    experts = parse_experts(fields, EXPERT_NAMES)
    config = ModelConfig(
        text_prefix=TEXT_PREFIX,
        rope_interleaved=True,
        indexer_types=parse_indexer_types(fields, model["num_layers"]),
        **model,
        **attention,
        **parse_indexer(fields, attention, heads=32),
        **parse_mlp_types(fields, model["num_layers"], 3),
        **experts,
        **parse_sigmoid_router(fields, experts, scaling=2.5),
        **parse_mtp(fields),
    )
    return check_num_experts(fields, config, "n_routed_experts")


def parse_indexer_types(fields, num_layers):
    """An explicit indexer_types beats index_topk_pattern, which beats the freq / offset schedule."""
    types = fields.words("indexer_types", ("full", "shared"), num_layers)
    pattern = fields.get("index_topk_pattern", None)
    if types is None and isinstance(pattern, str):
        if len(pattern) != num_layers or set(pattern) - set("FS"):
            fields.refuse("index_topk_pattern", f"must be {num_layers} letters, each F or S")
        types = tuple("full" if letter == "F" else "shared" for letter in pattern)
    elif types is None and pattern is not None:
        types = fields.words("index_topk_pattern", ("full", "shared"), num_layers)
    elif types is None:
        freq = max(fields.count("index_topk_freq", 1, low=0), 1)
        offset = fields.count("index_skip_topk_offset", 2, low=0)
        types = tuple("full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(num_layers))
    if types[0] != "full":
        fields.refuse("indexer_types", "must begin with full: a shared layer reuses an earlier selection")
    return types


FAMILY = Family(parse_config)
