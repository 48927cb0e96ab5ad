"""glm4_moe_lite (GLM-4.7-Flash): MLA as in deepseek_v3, sigmoid router, MTP layer."""

from snapshot import config_parts as parts
from snapshot.config import ModelConfig
from snapshot.config_fields import ConfigFields
from snapshot.families.glm_moe_dsa import TEXT_PREFIX
from snapshot.family import Family


def parse_config(fields: ConfigFields) -> ModelConfig:
    common = parts.parse_common(fields, positions=202752)
    return ModelConfig(
        text_prefix=TEXT_PREFIX,
        rope_interleaved=fields.flag("rope_interleave", True),
        **common,
        **parts.parse_mla(fields, common, needs_q_lora=False),
        **parts.parse_sigmoid_moe(fields, common, num_dense=1, count=64, active=4, scaling=1.8),
    )


FAMILY = Family(parse_config)
