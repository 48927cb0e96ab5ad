"""glm4_moe_lite (GLM-4.7-Flash): MLA as in deepseek_v3, sigmoid router, MTP layer."""

from snapshot.config import ModelConfig
from snapshot.config_parts import (
    EXPERT_NAMES,
    check_num_experts,
    parse_common,
    parse_experts,
    parse_mla,
    parse_mlp_types,
    parse_mtp,
    parse_sigmoid_router,
)
from snapshot.families.glm_moe_dsa import TEXT_PREFIX
from snapshot.family import Family


def parse_config(fields):
    """Fields -> ModelConfig."""
    model = parse_common(fields, positions=202752)
    experts = parse_experts(fields, EXPERT_NAMES, count=64, active=4)
    config = ModelConfig(
        text_prefix=TEXT_PREFIX,
        rope_interleaved=fields.flag("rope_interleave", True),
        **model,
        **parse_mla(fields, model, latent_queries=False),
        **parse_mlp_types(fields, model["num_layers"], 1),
        **experts,
        **parse_sigmoid_router(fields, experts, scaling=1.8),
        **parse_mtp(fields),
    )
    return check_num_experts(fields, config, "n_routed_experts")


FAMILY = Family(parse_config)
