"""Parts of config.json that several families share -> keyword arguments of ModelConfig.

Defaults are those of transformers 5.24, in fields.defaults where families differ. A value that changes the arithmetic
and is not computed here is refused.
"""

from typing import Any

from snapshot.config_fields import ConfigFields
from snapshot.rope import parse_rope, rope_fields

EXPERT_NAMES = ("n_routed_experts", "num_experts", "num_local_experts")

Part = dict[str, Any]  # keyword arguments of ModelConfig


def parse_common(fields: ConfigFields) -> Part:
    """Keys of every family."""
    fields.require("hidden_act", "silu")
    vocab_size = fields.count("vocab_size")
    return {
        "model_type": fields.get("model_type"),
        "vocab_size": vocab_size,
        "hidden_size": fields.count("hidden_size"),
        "num_layers": fields.count("num_hidden_layers", high=1024),
        "max_positions": fields.count("max_position_embeddings", high=1 << 31),
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-5, high=1.0),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
        "stop_ids": fields.token_ids("eos_token_id", vocab_size),
    }


def parse_mla(fields: ConfigFields, common: Part, needs_q_lora: bool = True) -> Part:
    """Multi-head latent attention (MLA); needs_q_lora: refuse a config without q_lora_rank."""
    num_heads = fields.count("num_attention_heads")
    rope_dim = fields.count("qk_rope_head_dim")
    if rope_dim % 2:
        fields.reject("qk_rope_head_dim", f"is {rope_dim}, rotary pairs need an even width")
    nope_dim = fields.count("qk_nope_head_dim")
    # Values that follow from others: a config that contradicts them was put together from two.
    fields.require("qk_head_dim", nope_dim + rope_dim)
    fields.require("num_key_value_heads", num_heads)
    has_q_lora = needs_q_lora or fields.get("q_lora_rank", None) is not None
    return {
        "attention": "mla",
        "num_heads": num_heads,
        "q_lora_rank": fields.count("q_lora_rank") if has_q_lora else 0,
        "kv_lora_rank": fields.count("kv_lora_rank"),
        "nope_head_dim": nope_dim,
        "rope_head_dim": rope_dim,
        "v_head_dim": fields.count("v_head_dim"),
        "rope": parse_rope(fields, rope_dim, common["max_positions"]),
        "attention_bias": fields.flag("attention_bias", False),
    }


def parse_gqa(fields: ConfigFields, common: Part, partial_rotary: bool = False, output_bias: bool = True) -> Part:
    """Grouped-query attention (GQA). partial_rotary: read partial_rotary_factor; else all columns are rotary.
    output_bias: the output projection has a bias if the others do."""
    num_heads = fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        fields.reject("num_key_value_heads", f"is {num_kv_heads}, which does not divide {num_heads} heads")
    if fields.get("head_dim", None) is None and common["hidden_size"] % num_heads:
        fields.reject("num_attention_heads", f"is {num_heads}, which does not divide the hidden size")
    head_dim = fields.count("head_dim", common["hidden_size"] // num_heads)
    rope_dim = int(head_dim * parse_partial_rotary_factor(fields)) if partial_rotary else head_dim
    if rope_dim < 2 or rope_dim % 2:
        fields.reject("head_dim", f"is {head_dim} and {rope_dim} of it rotary, pairs need an even width")
    has_bias = fields.flag("attention_bias", False)
    return {
        "attention": "gqa",
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "nope_head_dim": head_dim - rope_dim,
        "rope_head_dim": rope_dim,
        "v_head_dim": head_dim,
        "rope": parse_rope(fields, rope_dim, common["max_positions"]),
        "attention_bias": has_bias,
        "output_bias": has_bias and output_bias,
    }


def parse_sliding_window(fields: ConfigFields, num_layers: int) -> Part:
    """sliding_window: the same for every layer; null or absent: none."""
    has_window = fields.get("sliding_window", None) is not None
    return {"sliding_windows": (fields.count("sliding_window"),) * num_layers if has_window else ()}


def parse_partial_rotary_factor(fields: ConfigFields) -> float:
    """partial_rotary_factor, in rope_parameters or at the top level."""
    at_top, rope = fields.number("partial_rotary_factor"), rope_fields(fields)
    factor: float = rope.number("partial_rotary_factor", at_top, high=1.0)
    rope.prefer("partial_rotary_factor", factor, "that of the top level", fields.find("partial_rotary_factor"))
    return factor


def parse_experts(
    fields: ConfigFields, names: tuple[str, ...] = EXPERT_NAMES, width: str = "moe_intermediate_size"
) -> Part:
    """Routed experts. names: keys of their number, the family's own first; width: the key of their width."""
    num_experts = fields.count(fields.alias(*names), high=65536)
    return {
        "num_experts": num_experts,
        "num_active_experts": fields.count("num_experts_per_tok", high=num_experts),
        "moe_intermediate_size": fields.count(width),
    }


def parse_sigmoid_moe(fields: ConfigFields, common: Part) -> Part:
    """MoE of DeepSeek-V3 and GLM: dense layers first, a noaux_tc router, shared experts, an MTP layer."""
    fields.require("scoring_func", "sigmoid")
    fields.require("topk_method", "noaux_tc")
    fields.require("mlp_bias", False)
    fields.require("moe_layer_freq", 1)
    experts = parse_experts(fields)
    num_experts, num_active = experts["num_experts"], experts["num_active_experts"]
    num_groups = fields.count("n_group", 1, high=num_experts)
    num_active_groups = fields.count("topk_group", 1)
    if num_experts % num_groups:
        fields.reject("n_group", f"is {num_groups}, which does not divide {num_experts} experts")
    if num_active_groups > num_groups:
        fields.reject("topk_group", f"is {num_active_groups}, above n_group {num_groups}")
    if num_active > num_active_groups * (num_experts // num_groups):
        fields.reject("num_experts_per_tok", f"is {num_active}, more than topk_group groups hold")
    types = fields.words("mlp_layer_types", ("dense", "sparse"), common["num_layers"])
    num_dense = min(fields.count("first_k_dense_replace", low=0), common["num_layers"])
    by_number = ("dense",) * num_dense + ("sparse",) * (common["num_layers"] - num_dense)
    if types is not None and types != by_number and fields.find("first_k_dense_replace") is not None:
        fields.prefer("mlp_layer_types", list(types), "first_k_dense_replace", num_dense)
    types = types or by_number
    return experts | {
        "router": "sigmoid",
        "mlp_types": types,
        "intermediate_size": fields.count("intermediate_size"),
        "num_shared_experts": fields.count("n_shared_experts", 1, high=64),
        "num_groups": num_groups,
        "num_active_groups": num_active_groups,
        "normalize_weights": fields.flag("norm_topk_prob", True),
        "routed_scaling": fields.number("routed_scaling_factor", 1.0),
        "num_mtp_layers": fields.count(fields.alias("num_nextn_predict_layers", "num_mtp_layers"), 0, low=0, high=1),
    }


def parse_indexer(fields: ConfigFields, attention: Part) -> Part:
    """The DSA indexer, except which layers have one."""
    width, rope_dim = fields.count("index_head_dim", 128), attention["rope_head_dim"]
    if width < rope_dim:
        fields.reject("index_head_dim", f"is {width}, below qk_rope_head_dim {rope_dim}")
    return {
        "index_topk": fields.count("index_topk", 2048, high=1 << 31),
        "index_num_heads": fields.count("index_n_heads"),
        "index_head_dim": width,
    }
