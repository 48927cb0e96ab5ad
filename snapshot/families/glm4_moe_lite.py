"""glm4_moe_lite (GLM-4.7-Flash): MLA as in deepseek_v3, sigmoid router, MTP layer."""

from snapshot.config import ModelConfig
from snapshot.config_parts import (
    EXPERT_NAMES,
    check_count,
    read_dense_layers,
    read_experts,
    read_mla,
    read_model,
    read_mtp,
    read_sigmoid_router,
)
from snapshot.families.glm_moe_dsa import TEXT_PREFIX
from snapshot.family import Family


def read_config(fields):
    """Fields -> ModelConfig."""
    model = read_model(fields, positions=202752)
    experts = read_experts(fields, EXPERT_NAMES, count=64, active=4)
    config = ModelConfig(
        text_prefix=TEXT_PREFIX,
        rope_interleaved=fields.flag("rope_interleave", True),
        **model,
        **read_mla(fields, model, latent_queries=False),
        **read_dense_layers(fields, model["num_layers"], 1),
        **experts,
        **read_sigmoid_router(fields, experts, scaling=1.8),
        **read_mtp(fields),
    )
    return check_count(fields, config, "n_routed_experts")


FAMILY = Family(read_config)
