"""olmoe (OLMoE-1B-7B): RMSNorm over the whole query and key projections, softmax router."""

from errors import show
from snapshot import config_parts as parts
from snapshot.config import ModelConfig
from snapshot.config_fields import ConfigFields


def parse_config(fields: ConfigFields) -> ModelConfig:
    fields.defaults = dict(max_position_embeddings=4096, num_experts=64, num_experts_per_tok=8)
    if (clip := fields.get("clip_qkv", None)) is not None:
        fields.reject("clip_qkv", f"is {show(clip)}, this engine computes only null")
    common = parts.parse_common(fields)
    return ModelConfig(
        **common,
        **parts.parse_gqa(fields, common),
        qk_norm="projection",
        **parts.parse_experts(fields, ("num_experts", "num_local_experts"), "intermediate_size"),
        mlp_types=("sparse",) * common["num_layers"],
        normalize_weights=fields.flag("norm_topk_prob", False),
    )
