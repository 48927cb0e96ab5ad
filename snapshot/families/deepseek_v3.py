"""deepseek_v3 (DeepSeek-V3, R1, V3.1): MLA, sigmoid router in groups, MTP layer."""

from typing import Any

from snapshot import config_parts as parts
from snapshot.config import ModelConfig
from snapshot.config_fields import ConfigFields
from snapshot.family import Family

TEXT_PREFIX = ("<｜begin▁of▁sentence｜>",)
MOE_DEFAULTS: dict[str, Any] = dict(num_dense=3, count=256, active=8, groups=8, active_groups=4, scaling=2.5)


def parse_config(fields: ConfigFields) -> ModelConfig:
    common = parts.parse_common(fields, positions=4096, eps=1e-6)
    return ModelConfig(
        text_prefix=TEXT_PREFIX,
        rope_interleaved=fields.flag("rope_interleave", True),
        **common,
        **parts.parse_mla(fields, common, needs_q_lora=False),
        **parts.parse_sigmoid_moe(fields, common, **MOE_DEFAULTS),
    )


FAMILY = Family(parse_config)
