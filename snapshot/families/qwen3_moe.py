"""qwen3_moe (Qwen3-30B-A3B, 235B-A22B): GQA, RMSNorm of each query and key head, softmax router."""

from errors import show
from snapshot import config_parts as parts
from snapshot.config import ModelConfig
from snapshot.config_fields import ConfigFields


def parse_config(fields: ConfigFields) -> ModelConfig:
    fields.defaults = dict(max_position_embeddings=32768, rms_norm_eps=1e-6, num_experts=128, num_experts_per_tok=8)
    common = parts.parse_common(fields)
    has_window = fields.flag("use_sliding_window", False)
    return ModelConfig(
        **common,
        **parts.parse_gqa(fields, common),
        qk_norm="head",
        **(parts.parse_sliding_window(fields, common["num_layers"]) if has_window else {}),
        **parts.parse_experts(fields, ("num_experts", "num_local_experts")),
        mlp_types=parse_sparse_step(fields, common["num_layers"]),
        intermediate_size=fields.count("intermediate_size"),
        normalize_weights=fields.flag("norm_topk_prob", False),
    )


def parse_sparse_step(fields: ConfigFields, num_layers: int) -> tuple[str, ...]:
    """MLP types: every decoder_sparse_step-th layer is sparse, except those of mlp_only_layers."""
    step = fields.count("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers", [])
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        fields.reject("mlp_only_layers", f"is {show(dense)}, expected a list of layers")
    return tuple("sparse" if (i + 1) % step == 0 and i not in dense else "dense" for i in range(num_layers))
