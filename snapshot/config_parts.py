"""Parts of a config.json that several families write alike -> keyword arguments of ModelConfig.

Defaults are those of transformers 5.24. A value that would change the arithmetic and is not computed here is refused.
"""

from snapshot.rope import parse_rope

# The engine keeps a few hundred bytes for each routed expert; GLM-5.2 has 19,200.
MAX_ROUTED_EXPERTS = 1 << 17
# transformers builds the latent norms with the class default, whatever rms_norm_eps says.
LATENT_NORM_EPS = 1e-6


def parse_common(fields, positions, eps=1e-5):
    """What every family has; positions and eps: its max_position_embeddings and rms_norm_eps where it says none."""
    fields.only("hidden_act", "silu")
    vocab_size = fields.count("vocab_size")
    return {
        "model_type": fields.get("model_type"),
        "vocab_size": vocab_size,
        "hidden_size": fields.count("hidden_size"),
        "num_layers": fields.count("num_hidden_layers", high=1024),
        "max_positions": fields.count("max_position_embeddings", positions, high=1 << 31),
        "rms_norm_eps": fields.number("rms_norm_eps", eps, high=1.0),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
        "stop_ids": fields.ids("eos_token_id", vocab_size),
    }


def parse_mtp(fields, default=0):
    """How many multi-token-prediction layers follow the last."""
    return {"num_mtp_layers": fields.count("num_nextn_predict_layers", default, low=0, high=1)}


def parse_mla(fields, model, latent_queries=True):
    """Multi-head latent attention; latent_queries: q_lora_rank must be given. `model` as parse_common gives it."""
    num_heads, rope_dim = fields.count("num_attention_heads"), fields.count("qk_rope_head_dim")
    if rope_dim % 2:
        fields.refuse("qk_rope_head_dim", f"is {rope_dim}, rotary pairs need an even width")
    nope_dim = fields.count("qk_nope_head_dim")
    # Numbers that follow from others: a config that says otherwise was put together from two.
    fields.only("qk_head_dim", nope_dim + rope_dim)
    fields.only("num_key_value_heads", num_heads)
    has_latent = latent_queries or fields.get("q_lora_rank", None) is not None
    return {
        "attention": "mla",
        "num_heads": num_heads,
        "q_lora_rank": fields.count("q_lora_rank") if has_latent else 0,
        "kv_lora_rank": fields.count("kv_lora_rank"),
        "nope_head_dim": nope_dim,
        "rope_head_dim": rope_dim,
        "v_head_dim": fields.count("v_head_dim"),
        "rope": parse_rope(fields, rope_dim, model["max_positions"]),
        "latent_norm_eps": LATENT_NORM_EPS,
        "attention_bias": fields.flag("attention_bias", False),
    }


def parse_gqa(fields, model, head_dim=None, rotary=None, theta=10000.0, absent=None, bias=False, output_bias=True):
    """Heads that share the keys and values of num_key_value_heads. `model` as parse_common gives it.

    The others are what the family takes where config.json says nothing: head_dim (None: the hidden size over the
    heads), the share of it that is rotary (None: all, and config.json has no say), rope_theta, absent as of parse_rope,
    attention_bias. output_bias: whether the output projection has one where the others do.
    """
    num_heads = fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        fields.refuse("num_key_value_heads", f"is {num_kv_heads}, which does not divide {num_heads} heads")
    if fields.get("head_dim", head_dim) is None and model["hidden_size"] % num_heads:
        fields.refuse("num_attention_heads", f"is {num_heads}, which does not divide the hidden size")
    head_dim = fields.count("head_dim", head_dim or model["hidden_size"] // num_heads)
    rope_dim = head_dim if rotary is None else int(head_dim * parse_partial_rotary_factor(fields, rotary))
    if rope_dim < 2 or rope_dim % 2:
        fields.refuse("head_dim", f"is {head_dim} and {rope_dim} of it rotary, pairs need an even width")
    has_bias = fields.flag("attention_bias", bias)
    return {
        "attention": "gqa",
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "nope_head_dim": head_dim - rope_dim,
        "rope_head_dim": rope_dim,
        "v_head_dim": head_dim,
        "rope": parse_rope(fields, rope_dim, model["max_positions"], theta, absent),
        "attention_bias": has_bias,
        "output_bias": has_bias and output_bias,
    }


def parse_sliding_window(fields, num_layers):
    """sliding_window: how many positions every layer sees; null or absent: all."""
    has_window = fields.get("sliding_window", None) is not None
    return {"sliding_windows": (fields.count("sliding_window"),) * num_layers if has_window else ()}


def parse_partial_rotary_factor(fields, default):
    """partial_rotary_factor, of rope_parameters or of the top level."""
    raw = fields.get("rope_parameters", {})
    rope = fields.inside("rope_parameters", raw if isinstance(raw, dict) else {})
    return rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", default), high=1.0)


def parse_experts(fields, key, width="moe_intermediate_size", count=None, active=None):
    """The routed experts; key: what the family calls their number, or several names of it; count and active: how many
    there are and how many a token has where config.json does not say (None: it must)."""
    names = key if isinstance(key, tuple) else (key,)
    num_experts = fields.count(names, *([count] if count else []), high=65536)
    return {
        "num_experts": num_experts,
        "num_active_experts": fields.count("num_experts_per_tok", *([active] if active else []), high=num_experts),
        "moe_intermediate_size": fields.count(width),
    }


EXPERT_NAMES = ("n_routed_experts", "num_experts", "num_local_experts")


def parse_sigmoid_router(fields, experts, groups=1, active_groups=1, scaling=1.0):
    """The noaux_tc router of DeepSeek-V3 and GLM, with shared experts; `experts` as parse_experts gives them."""
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    fields.only("mlp_bias", False)
    fields.only("moe_layer_freq", 1)
    num_experts = experts["num_experts"]
    num_groups = fields.count("n_group", groups, high=num_experts)
    num_active_groups = fields.count("topk_group", active_groups)
    if num_experts % num_groups:
        fields.refuse("n_group", f"is {num_groups}, which does not divide {num_experts} experts")
    if num_active_groups > num_groups:
        fields.refuse("topk_group", f"is {num_active_groups}, above n_group {num_groups}")
    num_active = experts["num_active_experts"]
    if num_active > num_active_groups * (num_experts // num_groups):
        fields.refuse("num_experts_per_tok", f"is {num_active}, more than topk_group groups hold")
    return {
        "num_shared_experts": fields.count("n_shared_experts", 1, high=64),
        "num_groups": num_groups,
        "num_active_groups": num_active_groups,
        "normalize_weights": fields.flag("norm_topk_prob", True),
        "routed_scaling": fields.number("routed_scaling_factor", scaling),
    }


def parse_mlp_types(fields, num_layers, default):
    """mlp_layer_types wins over first_k_dense_replace."""
    types = fields.words("mlp_layer_types", ("dense", "sparse"), num_layers)
    if types is None:
        num_dense = min(fields.count("first_k_dense_replace", default, low=0), num_layers)
        types = ("dense",) * num_dense + ("sparse",) * (num_layers - num_dense)
    return {"mlp_types": types, "intermediate_size": fields.count("intermediate_size")}


def parse_indexer(fields, attention, heads):
    """The DSA indexer but for which layers have one; `attention` as parse_mla gives it."""
    width, rope_dim = fields.count("index_head_dim", 128), attention["rope_head_dim"]
    if width < rope_dim:
        fields.refuse("index_head_dim", f"is {width}, below qk_rope_head_dim {rope_dim}")
    return {
        "index_topk": fields.count("index_topk", 2048, high=1 << 31),
        "index_num_heads": fields.count("index_n_heads", heads),
        "index_head_dim": width,
        "index_norm_eps": 1e-6,
    }


def check_num_experts(fields, config, key):
    """-> config; Refused where all layers together have more experts than the engine can keep account of."""
    if config.num_experts * len(config.sparse_layers) > MAX_ROUTED_EXPERTS:
        experts = f"{config.num_experts} experts in {len(config.sparse_layers)} layers"
        fields.refuse(key, f"makes {experts}, above {MAX_ROUTED_EXPERTS} in all")
    return config
