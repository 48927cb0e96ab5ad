"""deepseek_v2 (DeepSeek-V2-Lite, Coder-V2-Lite): MLA, softmax router without groups or normalized weights."""

from errors import show
from snapshot import config_parts as parts
from snapshot.config import ModelConfig
from snapshot.config_fields import ConfigFields
from snapshot.families.deepseek_v3 import TEXT_PREFIX

DEFAULTS = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "first_k_dense_replace": 0,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
}


def parse_config(fields: ConfigFields) -> ModelConfig:
    fields.defaults = DEFAULTS
    fields.require("scoring_func", "softmax")
    fields.require("norm_topk_prob", False)
    fields.require("mlp_bias", False)
    fields.require("moe_layer_freq", 1)
    if fields.get("topk_method", "greedy") != "greedy" and fields.get("n_group", 1) != 1:
        groups, method = show(fields.get("n_group", 1)), show(fields.get("topk_method"))
        fields.reject("n_group", f"is {groups} with topk_method {method}, this engine computes only greedy here")
    common = parts.parse_common(fields)
    num_dense = min(fields.count("first_k_dense_replace", low=0), common["num_layers"])
    return ModelConfig(
        text_prefix=TEXT_PREFIX,
        rope_interleaved=True,
        **common,
        **parts.parse_mla(fields, common, needs_q_lora=False),
        **parts.parse_experts(fields),
        mlp_types=("dense",) * num_dense + ("sparse",) * (common["num_layers"] - num_dense),
        intermediate_size=fields.count("intermediate_size"),
        num_shared_experts=fields.count("n_shared_experts", high=64),
        normalize_weights=False,
        routed_scaling=fields.number("routed_scaling_factor", 1.0),
    )
