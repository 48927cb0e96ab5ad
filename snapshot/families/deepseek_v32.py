"""deepseek_v32 (DeepSeek-V3.2): deepseek_v3 with a DSA indexer in every layer, whose rotary pairs lie in two halves."""

from snapshot import config_parts as parts
from snapshot.config import ModelConfig
from snapshot.config_fields import ConfigFields
from snapshot.families.deepseek_v3 import TEXT_PREFIX
from snapshot.family import Family


def parse_config(fields: ConfigFields) -> ModelConfig:
    fields.require("rope_interleave", True)
    common = parts.parse_common(fields, positions=163840, eps=1e-6)
    attention = parts.parse_mla(fields, common)
    experts = parts.parse_experts(fields, count=256, active=8)
    return ModelConfig(
        text_prefix=TEXT_PREFIX,
        rope_interleaved=True,
        indexer_types=("full",) * common["num_layers"],
        index_rope_interleaved=False,
        **common,
        **attention,
        **parts.parse_indexer(fields, attention, heads=64),
        **parts.parse_mlp_types(fields, common["num_layers"], 3),
        **experts,
        **parts.parse_sigmoid_router(fields, experts, groups=8, active_groups=4, scaling=2.5),
        **parts.parse_mtp(fields),
    )


FAMILY = Family(parse_config)
