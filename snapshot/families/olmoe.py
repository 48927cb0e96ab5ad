"""olmoe (OLMoE-1B-7B): all queries and all keys of a token normed together, softmax router."""

from errors import show
from snapshot.config import ModelConfig
from snapshot.config_parts import check_count, read_experts, read_gqa, read_model
from snapshot.family import Family


def read_config(fields):
    """Fields -> ModelConfig."""
    if (clip := fields.get("clip_qkv", None)) is not None:
        fields.refuse("clip_qkv", f"is {show(clip)}, this engine computes only null")
    model = read_model(fields, positions=4096)
    config = ModelConfig(
        **model,
        **read_gqa(fields, model),
        qk_norm="projection",
        **read_experts(fields, ("num_experts", "num_local_experts"), "intermediate_size", count=64, active=8),
        mlp_types=("sparse",) * model["num_layers"],
        router="softmax",
        normalize_weights=fields.flag("norm_topk_prob", False),
    )
    return check_count(fields, config, "num_experts")


FAMILY = Family(read_config)
