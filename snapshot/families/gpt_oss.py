"""gpt_oss (gpt-oss-20b, 120b): windows in every other layer, sinks, yarn; experts with biases and a clamped gate."""

from snapshot.config import ModelConfig
from snapshot.config_parts import check_num_experts, parse_common, parse_experts, parse_gqa
from snapshot.family import Family

LAYER_TYPES = ("sliding_attention", "full_attention")
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def parse_config(fields):
    """Fields -> ModelConfig."""
    model = parse_common(fields, positions=131072)
    experts = parse_experts(fields, ("num_local_experts", "num_experts"), "intermediate_size", count=128, active=4)
    types = fields.words("layer_types", LAYER_TYPES, model["num_layers"])
    types = types or tuple(LAYER_TYPES[i % 2] for i in range(model["num_layers"]))
    window = fields.count("sliding_window", 128)
    config = ModelConfig(
        **model,
        **parse_gqa(fields, model, head_dim=64, theta=150000.0, absent=YARN, bias=True),
        sliding_windows=tuple(window if kind == "sliding_attention" else 0 for kind in types),
        has_sinks=True,
        **experts,
        mlp_types=("sparse",) * model["num_layers"],
        router="softmax",
        router_has_bias=True,
        swiglu_limit=fields.number("swiglu_limit", 7.0, low=1e-6),
        swiglu_alpha=fields.number("swiglu_alpha", 1.702),
    )
    # MXFP4 puts 32 columns under a scale.
    for key, width in (("hidden_size", config.hidden_size), ("intermediate_size", config.moe_intermediate_size)):
        if width % 32:
            fields.refuse(key, f"is {width}, expected a multiple of 32")
    return check_num_experts(fields, config, "num_local_experts")


FAMILY = Family(parse_config, router="router", alternates=True)
