"""glm4_moe (GLM-4.5, 4.6, 4.7): grouped queries, half of a head rotary, sigmoid router, MTP layer."""

from snapshot.config import ModelConfig
from snapshot.config_parts import (
    EXPERT_NAMES,
    check_num_experts,
    parse_common,
    parse_experts,
    parse_gqa,
    parse_mlp_types,
    parse_mtp,
    parse_sigmoid_router,
)
from snapshot.family import Family

TEXT_PREFIX = ("[gMASK]", "<sop>")


def parse_config(fields):
    """Fields -> ModelConfig."""
    model = parse_common(fields, positions=131072)
    experts = parse_experts(fields, EXPERT_NAMES)
    config = ModelConfig(
        text_prefix=TEXT_PREFIX,
        **model,
        **parse_gqa(fields, model, rotary=0.5, output_bias=False),
        qk_norm="head" if fields.flag("use_qk_norm", False) else "",
        **parse_mlp_types(fields, model["num_layers"], 1),
        **experts,
        **parse_sigmoid_router(fields, experts),
        **parse_mtp(fields),
    )
    return check_num_experts(fields, config, "n_routed_experts")


FAMILY = Family(parse_config)
