"""gpt_oss (gpt-oss-20b, 120b): GQA, sliding windows in every other layer, attention sinks, YaRN, clamped SwiGLU."""

from snapshot import config_parts as parts
from snapshot.config import ModelConfig
from snapshot.config_fields import ConfigFields
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


def parse_config(fields: ConfigFields) -> ModelConfig:
    common = parts.parse_common(fields, positions=131072)
    names = "num_local_experts", "num_experts"
    types = fields.words("layer_types", LAYER_TYPES, common["num_layers"])
    types = types or tuple(LAYER_TYPES[i % 2] for i in range(common["num_layers"]))
    window = fields.count("sliding_window", 128)
    config = ModelConfig(
        **common,
        **parts.parse_gqa(fields, common, head_dim=64, theta=150000.0, absent=YARN, bias=True),
        sliding_windows=tuple(window if kind == "sliding_attention" else 0 for kind in types),
        has_sinks=True,
        **parts.parse_experts(fields, names, "intermediate_size", count=128, active=4),
        mlp_types=("sparse",) * common["num_layers"],
        router="softmax",
        router_has_bias=True,
        swiglu_limit=fields.number("swiglu_limit", 7.0, low=1e-6),
        swiglu_alpha=fields.number("swiglu_alpha", 1.702),
    )
    # MXFP4 has a scale for each 32 columns.
    for key, width in (("hidden_size", config.hidden_size), ("intermediate_size", config.moe_intermediate_size)):
        if width % 32:
            fields.reject(key, f"is {width}, expected a multiple of 32")
    return config


FAMILY = Family(parse_config, router_name="router", is_gate_up_interleaved=True)
