"""glm4_moe (GLM-4.5, 4.6, 4.7): GQA, half of each head rotary, sigmoid router, MTP layer."""

from snapshot import config_parts as parts
from snapshot.config import ModelConfig
from snapshot.config_fields import ConfigFields
from snapshot.family import Family

TEXT_PREFIX = ("[gMASK]", "<sop>")


def parse_config(fields: ConfigFields) -> ModelConfig:
    common = parts.parse_common(fields, positions=131072)
    return ModelConfig(
        text_prefix=TEXT_PREFIX,
        **common,
        **parts.parse_gqa(fields, common, rotary=0.5, output_bias=False),
        qk_norm="head" if fields.flag("use_qk_norm", False) else "",
        **parts.parse_sigmoid_moe(fields, common, num_dense=1),
    )


FAMILY = Family(parse_config)
