"""deepseek_v3 (DeepSeek-V3, R1, V3.1): MLA, sigmoid router in groups, MTP layer."""

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
from snapshot.family import Family

TEXT_PREFIX = ("<｜begin▁of▁sentence｜>",)


def read_config(fields):
    """Fields -> ModelConfig."""
    model = read_model(fields, positions=4096, eps=1e-6)
    experts = read_experts(fields, EXPERT_NAMES, count=256, active=8)
    config = ModelConfig(
        text_prefix=TEXT_PREFIX,
        rope_interleaved=fields.flag("rope_interleave", True),
        **model,
        **read_mla(fields, model, latent_queries=False),
        **read_dense_layers(fields, model["num_layers"], 3),
        **experts,
        **read_sigmoid_router(fields, experts, groups=8, active_groups=4, scaling=2.5),
        **read_mtp(fields),
    )
    return check_count(fields, config, "n_routed_experts")


FAMILY = Family(read_config)
