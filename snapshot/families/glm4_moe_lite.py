"""glm4_moe_lite (GLM-4.7-Flash): MLA as in deepseek_v3, sigmoid router, MTP layer."""

from snapshot import config_parts as parts
from snapshot.config import ModelConfig
from snapshot.config_fields import ConfigFields
from snapshot.families.glm_moe_dsa import TEXT_PREFIX


def parse_config(fields: ConfigFields) -> ModelConfig:
    fields.defaults = dict(
        max_position_embeddings=202752,
        first_k_dense_replace=1,
        n_routed_experts=64,
        num_experts_per_tok=4,
        routed_scaling_factor=1.8,
    )
    common = parts.parse_common(fields)
    return ModelConfig(
        text_prefix=TEXT_PREFIX,
        rope_interleaved=fields.flag("rope_interleave", True),
        **common,
        **parts.parse_mla(fields, common, needs_q_lora=False),
        **parts.parse_sigmoid_moe(fields, common),
    )
