"""glm_moe_dsa (GLM-5, 5.1, 5.2): what its config.json says, and the names and shapes of its tensors.

Declarative: which numbers, which names. The arithmetic is forward/'s.
"""

from snapshot.config import ModelConfig
from snapshot.errors import show

TEXT_PREFIX = ("[gMASK]", "<sop>")
# transformers builds the two latent norms with the class default, whatever rms_norm_eps says.
LATENT_NORM_EPS = 1e-6
INDEX_NORM_EPS = 1e-6
# The engine keeps a few hundred bytes for each routed expert; GLM-5.2 has 19,200.
MAX_ROUTED_EXPERTS = 1 << 17


def read_config(fields):
    """Fields -> ModelConfig, with the defaults of transformers 5.24."""
    fields.only("hidden_act", "silu")
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    fields.only("mlp_bias", False)
    fields.only("moe_layer_freq", 1)
    fields.only("rope_interleave", True)
    fields.only("indexer_rope_interleave", True)
    vocab_size = fields.count("vocab_size")
    num_layers = fields.count("num_hidden_layers", high=1024)
    num_experts = fields.count(("n_routed_experts", "num_experts", "num_local_experts"), high=65536)
    config = ModelConfig(
        model_type="glm_moe_dsa",
        vocab_size=vocab_size,
        hidden_size=fields.count("hidden_size"),
        num_layers=num_layers,
        max_positions=fields.count("max_position_embeddings", 202752, high=1 << 31),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-5, high=1.0),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        stop_ids=fields.ids("eos_token_id", vocab_size),
        text_prefix=TEXT_PREFIX,
        num_mtp_layers=fields.count("num_nextn_predict_layers", 0, low=0, high=1),
        num_heads=fields.count("num_attention_heads"),
        q_lora_rank=fields.count("q_lora_rank"),
        kv_lora_rank=fields.count("kv_lora_rank"),
        nope_head_dim=fields.count("qk_nope_head_dim"),
        rope_head_dim=fields.count("qk_rope_head_dim"),
        v_head_dim=fields.count("v_head_dim"),
        rope_theta=read_rope_theta(fields),
        latent_norm_eps=LATENT_NORM_EPS,
        attention_bias=fields.flag("attention_bias", False),
        indexer_types=read_indexer_types(fields, num_layers),
        index_topk=fields.count("index_topk", 2048, high=1 << 31),
        index_num_heads=fields.count("index_n_heads", 32),
        index_head_dim=fields.count("index_head_dim", 128),
        index_norm_eps=INDEX_NORM_EPS,
        mlp_types=read_mlp_types(fields, num_layers),
        intermediate_size=fields.count("intermediate_size"),
        num_experts=num_experts,
        num_active_experts=fields.count("num_experts_per_tok", high=num_experts),
        moe_intermediate_size=fields.count("moe_intermediate_size"),
        num_shared_experts=fields.count("n_shared_experts", 1, high=64),
        num_groups=fields.count("n_group", 1, high=num_experts),
        num_active_groups=fields.count("topk_group", 1),
        normalise_weights=fields.flag("norm_topk_prob", True),
        routed_scaling=fields.number("routed_scaling_factor", 2.5),
    )
    check_sizes(fields, config)
    return config


def check_sizes(fields, c):
    """Numbers that must agree with each other."""
    if c.rope_head_dim % 2:
        fields.refuse("qk_rope_head_dim", f"is {c.rope_head_dim}, rotary pairs need an even width")
    if c.index_head_dim < c.rope_head_dim:
        fields.refuse("index_head_dim", f"is {c.index_head_dim}, below qk_rope_head_dim {c.rope_head_dim}")
    if c.num_experts % c.num_groups:
        fields.refuse("n_group", f"is {c.num_groups}, which does not divide {c.num_experts} experts")
    if c.num_active_groups > c.num_groups:
        fields.refuse("topk_group", f"is {c.num_active_groups}, above n_group {c.num_groups}")
    if c.num_active_experts > c.num_active_groups * (c.num_experts // c.num_groups):
        fields.refuse("num_experts_per_tok", f"is {c.num_active_experts}, more than topk_group groups hold")
    if c.indexer_types[0] != "full":
        fields.refuse("indexer_types", "must begin with full: a shared layer reuses an earlier selection")
    if c.num_experts * len(c.sparse_layers) > MAX_ROUTED_EXPERTS:
        experts = f"{c.num_experts} experts in {len(c.sparse_layers)} layers"
        fields.refuse("n_routed_experts", f"makes {experts}, above {MAX_ROUTED_EXPERTS} in all")
    # Numbers that follow from others: a config that says otherwise was put together from two.
    fields.only("qk_head_dim", c.qk_head_dim)
    fields.only("num_key_value_heads", c.num_heads)


def read_rope_theta(fields):
    """rope_parameters.rope_theta, or the older top-level rope_theta; other rope types are refused by name."""
    rope = fields.get(("rope_parameters", "rope_scaling"), {})
    if not isinstance(rope, dict):
        fields.refuse("rope_parameters", "must be an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        fields.refuse("rope_parameters.rope_type", f"is {show(kind)}, this engine computes only 'default' here")
    theta = rope.get("rope_theta", fields.get("rope_theta", 10000.0))
    if isinstance(theta, bool) or not isinstance(theta, (int, float)) or not 1 <= theta <= 1e12:
        fields.refuse("rope_parameters.rope_theta", f"is {show(theta)}, expected a number from 1 to 1e12")
    return float(theta)


def read_mlp_types(fields, num_layers):
    """mlp_layer_types wins over first_k_dense_replace."""
    types = fields.words("mlp_layer_types", ("dense", "sparse"), num_layers)
    if types is None:
        num_dense = min(fields.count("first_k_dense_replace", 3, low=0), num_layers)
        types = ("dense",) * num_dense + ("sparse",) * (num_layers - num_dense)
    return types


def read_indexer_types(fields, num_layers):
    """An explicit indexer_types beats index_topk_pattern, which beats the freq / offset schedule."""
    types = fields.words("indexer_types", ("full", "shared"), num_layers)
    if types is not None:
        return types
    pattern = fields.get("index_topk_pattern", None)
    if isinstance(pattern, str):
        if len(pattern) != num_layers or set(pattern) - set("FS"):
            fields.refuse("index_topk_pattern", f"must be {num_layers} letters, each F or S")
        return tuple("full" if letter == "F" else "shared" for letter in pattern)
    if pattern is not None:
        return fields.words("index_topk_pattern", ("full", "shared"), num_layers)
    freq = max(fields.count("index_topk_freq", 1, low=0), 1)
    offset = fields.count("index_skip_topk_offset", 2, low=0)
    return tuple("full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(num_layers))


# ---------------------------------------------------------------------------------------------------------------------
# Names and shapes. A table maps the engine's word to (tensor name, shape); rows first.


def model_tensors(c):
    table = {
        "embed": ("model.embed_tokens.weight", (c.vocab_size, c.hidden_size)),
        "norm": ("model.norm.weight", (c.hidden_size,)),
    }
    if not c.tie_word_embeddings:
        table["lm_head"] = ("lm_head.weight", (c.vocab_size, c.hidden_size))
    return table


def layer_prefix(layer):
    return f"model.layers.{layer}."


def mtp_tensor(layer):
    """The tensor that tells a multi-token-prediction layer from one more of the main series."""
    return layer_prefix(layer) + "eh_proj.weight"


def mtp_tensors(c, layer):
    """What the multi-token-prediction layer has beside a sparse layer's tensors."""
    prefix, D = layer_prefix(layer), c.hidden_size
    return {
        "input_proj": (mtp_tensor(layer), (D, 2 * D)),  # embedding half first
        "embed_norm": (prefix + "enorm.weight", (D,)),
        "hidden_norm": (prefix + "hnorm.weight", (D,)),
        "norm": (prefix + "shared_head.norm.weight", (D,)),
    }


def mtp_own_tensors(c, layer):
    """Copies of the model's embedding and head that an MTP layer may bring; absent in most snapshots."""
    shape = (c.vocab_size, c.hidden_size)
    return {
        "embed": (layer_prefix(layer) + "embed_tokens.weight", shape),
        "lm_head": (layer_prefix(layer) + "shared_head.head.weight", shape),
    }


def attention_tensors(c, layer):
    prefix = layer_prefix(layer)
    attention = prefix + "self_attn."
    q_width, kv_width = c.num_heads * c.qk_head_dim, c.num_heads * (c.nope_head_dim + c.v_head_dim)
    table = {
        "input_norm": (prefix + "input_layernorm.weight", (c.hidden_size,)),
        "post_norm": (prefix + "post_attention_layernorm.weight", (c.hidden_size,)),
        "q_a": (attention + "q_a_proj.weight", (c.q_lora_rank, c.hidden_size)),
        "q_a_norm": (attention + "q_a_layernorm.weight", (c.q_lora_rank,)),
        "q_b": (attention + "q_b_proj.weight", (q_width, c.q_lora_rank)),
        "kv_a": (attention + "kv_a_proj_with_mqa.weight", (c.kv_lora_rank + c.rope_head_dim, c.hidden_size)),
        "kv_a_norm": (attention + "kv_a_layernorm.weight", (c.kv_lora_rank,)),
        "kv_b": (attention + "kv_b_proj.weight", (kv_width, c.kv_lora_rank)),
        "o": (attention + "o_proj.weight", (c.hidden_size, c.num_heads * c.v_head_dim)),
    }
    if c.attention_bias:
        table |= {
            "q_a_bias": (attention + "q_a_proj.bias", (c.q_lora_rank,)),
            "kv_a_bias": (attention + "kv_a_proj_with_mqa.bias", (c.kv_lora_rank + c.rope_head_dim,)),
            "o_bias": (attention + "o_proj.bias", (c.hidden_size,)),
        }
    return table


def indexer_tensors(c, layer):
    prefix = layer_prefix(layer) + "self_attn.indexer."
    return {
        "q_b": (prefix + "wq_b.weight", (c.index_num_heads * c.index_head_dim, c.q_lora_rank)),
        "k": (prefix + "wk.weight", (c.index_head_dim, c.hidden_size)),
        "k_norm": (prefix + "k_norm.weight", (c.index_head_dim,)),
        "k_norm_bias": (prefix + "k_norm.bias", (c.index_head_dim,)),
        "head_weights": (prefix + "weights_proj.weight", (c.index_num_heads, c.hidden_size)),
    }


def mlp_tensors(c, prefix, width):
    return {
        "gate": (prefix + "gate_proj.weight", (width, c.hidden_size)),
        "up": (prefix + "up_proj.weight", (width, c.hidden_size)),
        "down": (prefix + "down_proj.weight", (c.hidden_size, width)),
    }


def dense_tensors(c, layer):
    return mlp_tensors(c, layer_prefix(layer) + "mlp.", c.intermediate_size)


def shared_expert_tensors(c, layer):
    return mlp_tensors(c, layer_prefix(layer) + "mlp.shared_experts.", c.moe_intermediate_size * c.num_shared_experts)


def router_tensors(c, layer):
    prefix = layer_prefix(layer) + "mlp.gate."
    return {
        "router": (prefix + "weight", (c.num_experts, c.hidden_size)),
        "router_bias": (prefix + "e_score_correction_bias", (c.num_experts,)),
    }


def expert_tensors(c, layer, expert):
    """One tensor for each matrix of an expert, the published naming."""
    return mlp_tensors(c, f"{layer_prefix(layer)}mlp.experts.{expert}.", c.moe_intermediate_size)


def fused_expert_tensors(c, layer):
    """All experts of a layer in two tensors, gate rows before up rows: how transformers keeps them in memory."""
    prefix, E, W = layer_prefix(layer) + "mlp.experts.", c.num_experts, c.moe_intermediate_size
    return {
        "gate_up": (prefix + "gate_up_proj", (E, 2 * W, c.hidden_size)),
        "down": (prefix + "down_proj", (E, c.hidden_size, W)),
    }
