"""gpt_oss (gpt-oss-20b, 120b): GQA, sliding windows in every other layer, attention sinks, YaRN, clamped SwiGLU."""

from snapshot import config_parts as parts
from snapshot.config import ModelConfig
from snapshot.config_fields import ConfigFields
from snapshot.family import Family

FAMILY = Family(router_name="router", is_gate_up_interleaved=True)
LAYER_TYPES = ("sliding_attention", "full_attention")
DEFAULTS = {
    "max_position_embeddings": 131072,
    "head_dim": 64,
    "rope_theta": 150000.0,
    "rope_parameters": dict(rope_type="yarn", factor=32.0, truncate=False, original_max_position_embeddings=4096),
    "attention_bias": True,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
    "swiglu_alpha": 1.702,
}


def parse_config(fields: ConfigFields) -> ModelConfig:
    fields.defaults = DEFAULTS
    common = parts.parse_common(fields)
    types = fields.words("layer_types", LAYER_TYPES, common["num_layers"])
    types = types or tuple(LAYER_TYPES[i % 2] for i in range(common["num_layers"]))
    window = fields.count("sliding_window")
    config = ModelConfig(
        **common,
        **parts.parse_gqa(fields, common),
        sliding_windows=tuple(window if kind == "sliding_attention" else 0 for kind in types),
        has_sinks=True,
        **parts.parse_experts(fields, ("num_local_experts", "num_experts"), "intermediate_size"),
        mlp_types=("sparse",) * common["num_layers"],
        router_has_bias=True,
        swiglu_limit=fields.number("swiglu_limit", low=1e-6),
        swiglu_alpha=fields.number("swiglu_alpha"),
    )
    # MXFP4 has a scale for each 32 columns.
    for key, width in (("hidden_size", config.hidden_size), ("intermediate_size", config.moe_intermediate_size)):
        if width % 32:
            fields.reject(key, f"is {width}, expected a multiple of 32")
    return config
