"""qwen3_moe (Qwen3-30B-A3B, 235B-A22B): grouped queries, each head of queries and keys normed, softmax router."""

from errors import show
from snapshot.config import ModelConfig
from snapshot.config_parts import check_num_experts, parse_common, parse_experts, parse_gqa, parse_sliding_window
from snapshot.family import Family


def parse_config(fields):
    """Fields -> ModelConfig."""
    model = parse_common(fields, positions=32768, eps=1e-6)
    config = ModelConfig(
        **model,
        **parse_gqa(fields, model),
        qk_norm="head",
        **(parse_sliding_window(fields, model["num_layers"]) if fields.flag("use_sliding_window", False) else {}),
        **parse_experts(fields, ("num_experts", "num_local_experts"), count=128, active=8),
        mlp_types=parse_sparse_step(fields, model["num_layers"]),
        intermediate_size=fields.count("intermediate_size"),
        router="softmax",
        normalize_weights=fields.flag("norm_topk_prob", False),
    )
    return check_num_experts(fields, config, "num_experts")


def parse_sparse_step(fields, num_layers):
    """Every decoder_sparse_step-th layer has experts, but for those of mlp_only_layers."""
    step, dense = fields.count("decoder_sparse_step", 1), fields.get("mlp_only_layers", [])
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        fields.refuse("mlp_only_layers", f"is {show(dense)}, expected a list of layers")
    is_sparse = ((i + 1) % step == 0 and i not in dense for i in range(num_layers))
    return tuple("sparse" if sparse else "dense" for sparse in is_sparse)


FAMILY = Family(parse_config)
