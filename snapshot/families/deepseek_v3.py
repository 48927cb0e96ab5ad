"""deepseek_v3 (DeepSeek-V3, R1, V3.1): MLA, sigmoid router in groups, MTP layer."""

from snapshot import config_parts as parts
from snapshot.config import ModelConfig
from snapshot.config_fields import ConfigFields

TEXT_PREFIX = ("<｜begin▁of▁sentence｜>",)
DEFAULTS = {
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
}


def parse_config(fields: ConfigFields) -> ModelConfig:
    fields.defaults = DEFAULTS
    common = parts.parse_common(fields)
    return ModelConfig(
        text_prefix=TEXT_PREFIX,
        rope_interleaved=fields.flag("rope_interleave", True),
        **common,
        **parts.parse_mla(fields, common, needs_q_lora=False),
        **parts.parse_sigmoid_moe(fields, common),
    )
