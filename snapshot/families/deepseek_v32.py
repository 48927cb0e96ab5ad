"""deepseek_v32 (DeepSeek-V3.2): deepseek_v3 with a DSA indexer in every layer, whose rotary pairs lie in two halves."""

from snapshot import config_parts as parts
from snapshot.config import ModelConfig
from snapshot.config_fields import ConfigFields
from snapshot.families.deepseek_v3 import DEFAULTS, TEXT_PREFIX


def parse_config(fields: ConfigFields) -> ModelConfig:
    fields.defaults = DEFAULTS | dict(max_position_embeddings=163840, index_n_heads=64)
    fields.require("rope_interleave", True)
    common = parts.parse_common(fields)
    attention = parts.parse_mla(fields, common)
    return ModelConfig(
        text_prefix=TEXT_PREFIX,
        rope_interleaved=True,
        indexer_types=("full",) * common["num_layers"],
        index_rope_interleaved=False,
        **common,
        **attention,
        **parts.parse_indexer(fields, attention),
        **parts.parse_sigmoid_moe(fields, common),
    )
