"""glm4_moe (GLM-4.5, 4.6, 4.7): GQA, half of each head rotary, sigmoid router, MTP layer."""

from snapshot import config_parts as parts
from snapshot.config import ModelConfig
from snapshot.config_fields import ConfigFields
from snapshot.families.glm_moe_dsa import TEXT_PREFIX


def parse_config(fields: ConfigFields) -> ModelConfig:
    fields.defaults = dict(max_position_embeddings=131072, partial_rotary_factor=0.5, first_k_dense_replace=1)
    common = parts.parse_common(fields)
    return ModelConfig(
        text_prefix=TEXT_PREFIX,
        **common,
        **parts.parse_gqa(fields, common, partial_rotary=True, output_bias=False),
        qk_norm="head" if fields.flag("use_qk_norm", False) else "",
        **parts.parse_sigmoid_moe(fields, common),
    )
