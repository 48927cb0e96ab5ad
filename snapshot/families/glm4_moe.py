"""glm4_moe (GLM-4.5, 4.6, 4.7): grouped queries, half of a head rotary, sigmoid router, MTP layer."""

from snapshot.config import ModelConfig
from snapshot.config_parts import (
    EXPERT_NAMES,
    check_count,
    read_dense_layers,
    read_experts,
    read_gqa,
    read_model,
    read_mtp,
    read_sigmoid_router,
)
from snapshot.family import Family

TEXT_PREFIX = ("[gMASK]", "<sop>")


def read_config(fields):
    """Fields -> ModelConfig."""
    model = read_model(fields, positions=131072)
    experts = read_experts(fields, EXPERT_NAMES)
    config = ModelConfig(
        text_prefix=TEXT_PREFIX,
        **model,
        **read_gqa(fields, model, rotary=0.5, output_bias=False),
        qk_norm="head" if fields.flag("use_qk_norm", False) else "",
        **read_dense_layers(fields, model["num_layers"], 1),
        **experts,
        **read_sigmoid_router(fields, experts),
        **read_mtp(fields),
    )
    return check_count(fields, config, "n_routed_experts")


FAMILY = Family(read_config)
