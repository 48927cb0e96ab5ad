"""deepseek_v3 (DeepSeek-V3, R1, V3.1): MLA, sigmoid router in groups, MTP layer."""

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
from snapshot.family import Family

TEXT_PREFIX = ("<｜begin▁of▁sentence｜>",)


def parse_config(fields):
    """Fields -> ModelConfig."""
    model = parse_common(fields, positions=4096, eps=1e-6)
    experts = parse_experts(fields, EXPERT_NAMES, count=256, active=8)
    config = ModelConfig(
        text_prefix=TEXT_PREFIX,
        rope_interleaved=fields.flag("rope_interleave", True),
        **model,
        **parse_mla(fields, model, latent_queries=False),
        **parse_mlp_types(fields, model["num_layers"], 3),
        **experts,
        **parse_sigmoid_router(fields, experts, groups=8, active_groups=4, scaling=2.5),
        **parse_mtp(fields),
    )
    return check_num_experts(fields, config, "n_routed_experts")


FAMILY = Family(parse_config)
