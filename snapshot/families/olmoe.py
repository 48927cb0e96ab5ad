"""olmoe (OLMoE-1B-7B): all queries and all keys of a token normed together, softmax router."""

from errors import show
from snapshot.config import ModelConfig
from snapshot.config_parts import check_num_experts, parse_common, parse_experts, parse_gqa
from snapshot.family import Family


def parse_config(fields):
    """Fields -> ModelConfig."""
    if (clip := fields.get("clip_qkv", None)) is not None:
        fields.refuse("clip_qkv", f"is {show(clip)}, this engine computes only null")
    model = parse_common(fields, positions=4096)
    config = ModelConfig(
        **model,
        **parse_gqa(fields, model),
        qk_norm="projection",
        **parse_experts(fields, ("num_experts", "num_local_experts"), "intermediate_size", count=64, active=8),
        mlp_types=("sparse",) * model["num_layers"],
        router="softmax",
        normalize_weights=fields.flag("norm_topk_prob", False),
    )
    return check_num_experts(fields, config, "num_experts")


FAMILY = Family(parse_config)
