"""The metadata of a GGUF -> the config.json that its model has on the hub, checked by its family as any other is.

Each architecture is a function that adds what it says in its own way. A key that is absent means what llama.cpp takes
for it, not what a family of transformers does. Messages name the keys of the file.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from errors import Refused, show
from snapshot.config import ModelConfig
from snapshot.config_file import parse_model_config
from snapshot.family import Family
from snapshot.gguf_files import GgufModel
from snapshot.gguf_metadata import COPIED, LABELS, Metadata, MetadataFields

SOFTMAX, SIGMOID, TOP_K_SOFTMAX = 1, 2, 3  # expert_gating_func
EMBEDDING = "token_embd.weight"
STOP_KEYS = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
FLASH_LAYERS, FLASH_TOKENS = (47, 48), 154880  # of GLM-4.7-Flash, the only MLA model of GLM without indexers
V3_EXPERTS, V3_GROUPS = 256, (8, 4)  # of DeepSeek-V3 and R1; their files before the end of 2025 do not say the groups
V2_EXPERTS = 160  # of DeepSeek-V2, not of Lite
LONG_CONTEXT = 1 << 20  # of GLM-5.2, whose files may not say which layers have an indexer
LOG_MULTIPLIER = 0.1  # yarn_log_multiplier is this times mscale_all_dim


def parse_config(model: GgufModel) -> tuple[ModelConfig, Family]:
    """The config of a GGUF model, and the family with the names that snapshot/gguf_index.py gives its tensors."""
    architecture = model.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        problem = f"general.architecture is {show(architecture)}, this engine knows {known}"
        raise Refused(f"{model.path}: {problem}")
    m = Metadata(model, architecture)
    add_common(m)
    model_type, add = ARCHITECTURES[architecture]
    m.config["model_type"] = model_type
    add(m)
    fields = MetadataFields(m.config, model.path)
    fields.architecture, fields.notices = architecture, m.notices
    config, family = parse_model_config(fields)
    if architecture == "llama":
        # Rows of queries and keys lie so that rotary pairs are neighbors; nothing is moved back.
        config = replace(config, rope_interleaved=True)
    return config, replace(family, is_gate_up_interleaved=False)


def add_common(m: Metadata) -> None:
    """What all architectures say alike."""
    if EMBEDDING not in m.model.tensors:
        raise Refused(f"{m.model.path}: tensor {EMBEDDING} is missing; the file is no language model, or a part of one")
    m.whole("expert_count", 0) or refuse_dense(m)
    m.config |= {name: m.find(key) for name, key in COPIED.items()}
    stop_ids = [m.model.metadata[key] for key in STOP_KEYS if key in m.model.metadata]
    m.config |= {
        "vocab_size": m.model.tensors[EMBEDDING].shape[0],  # whatever vocab_size says
        "num_hidden_layers": m.num_layers,
        "num_nextn_predict_layers": m.whole("nextn_predict_layers", 0),
        "tie_word_embeddings": "output.weight" not in m.model.tensors,
        "eos_token_id": [token for i, token in enumerate(stop_ids) if token not in stop_ids[:i]],
        "moe_intermediate_size": m.find("expert_feed_forward_length"),
        "intermediate_size": m.find("feed_forward_length"),
        "rope_parameters": rope_parameters(m),
    }
    for key in ("rope.scaling.yarn_ext_factor", "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):
        m.require(key, 1, *([-1] if "ext" in key else []))
    if "rope_freqs.weight" in m.model.tensors:
        raise Refused(f"{m.model.path}: tensor rope_freqs.weight scales the rotary frequencies, which is not computed")


def refuse_dense(m: Metadata) -> NoReturn:
    raise Refused(f"{m.model.path}: has no experts (expert_count); this engine runs Mixture-of-Experts models")


def rope_parameters(m: Metadata) -> dict[str, Any]:
    """Rotary frequencies: plain, or scaled by YaRN. Linear scaling by 1 is none."""
    kind = m.find("rope.scaling.type", "linear")
    factor = m.find("rope.scaling.factor", m.find("rope.scale_linear", 1.0)) or 1.0
    rope = {"rope_theta": m.find("rope.freq_base", 10000.0)}
    if kind == "none" or (kind == "linear" and factor == 1):
        return rope | {"rope_type": "default"}
    rope |= {"rope_type": kind, "factor": factor}
    rope["original_max_position_embeddings"] = m.find("rope.scaling.original_context_length")
    rope |= {name: m.find(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
    return rope


def add_gqa(m: Metadata, partial_rotary: bool = False) -> None:
    """Grouped-query attention: heads, and how much of each is rotary."""
    heads, width = m.whole("attention.head_count", low=1), m.whole("embedding_length", low=1)
    head_dim = m.whole("attention.key_length", width // heads, low=1)
    m.require("attention.value_length", head_dim)
    m.config |= {"num_key_value_heads": m.whole("attention.head_count_kv", heads), "head_dim": head_dim}
    rotary = m.whole("rope.dimension_count", head_dim)
    if partial_rotary:
        # The half keeps the product with the width, rounded down, from falling below the number.
        m.config["rope_parameters"]["partial_rotary_factor"] = min(1.0, (rotary + 0.5) / head_dim)
    else:
        m.require("rope.dimension_count", head_dim)


def add_mla(m: Metadata) -> None:
    """Multi-head latent attention. Files with key_length_mla have the sizes of the absorbed form under the names of the
    others, older ones their own."""
    qk, v = (m.find(f"attention.{kind}_length_mla") for kind in ("key", "value"))
    if qk is None or v is None:
        qk, v = m.whole("attention.key_length"), m.whole("attention.value_length")
    rotary = m.whole("rope.dimension_count")
    m.config |= {
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": (qk if type(qk) is int else 0) - rotary,
        "v_head_dim": v,
        "kv_lora_rank": m.find("attention.kv_lora_rank"),
        "q_lora_rank": m.find("attention.q_lora_rank") or None,
    }
    rope = m.config["rope_parameters"]
    if rope["rope_type"] == "yarn":
        # mscale is not stored; as large as mscale_all_dim, it leaves cos and sin as they are.
        mscale = m.find("rope.scaling.yarn_log_multiplier", 0.0)
        mscale = mscale / LOG_MULTIPLIER if isinstance(mscale, float) else mscale
        rope |= {"mscale": mscale, "mscale_all_dim": mscale, "attention_factor": 1.0}


def add_experts(m: Metadata, gating: int) -> None:
    """Routed and shared experts of models with dense layers before them. gating: of files that do not say it."""
    scale = m.find("expert_weights_scale", 0)
    groups = m.whole("expert_group_count", 0) or 1
    if m.find("expert_gating_func", gating) != gating:
        m.require("expert_gating_func", gating)
    m.config |= {
        "first_k_dense_replace": m.whole("leading_dense_block_count", 0),
        "n_shared_experts": m.whole("expert_shared_count", 0),
        "routed_scaling_factor": scale or 1.0,
        "norm_topk_prob": m.find("expert_weights_norm", False),
        "n_group": groups,
        "topk_group": m.whole("expert_group_used_count") if groups > 1 else 1,
    }
    width = m.config["moe_intermediate_size"]
    if type(width) is int:
        m.require("expert_shared_feed_forward_length", m.config["n_shared_experts"] * width)


def add_deepseek2(m: Metadata) -> None:
    """DeepSeek-V3 and R1, Kimi-K2; GLM-4.7-Flash has the same architecture. A correction bias tells them from V2."""
    add_mla(m)
    gating = m.find("expert_gating_func", SIGMOID if m.has("exp_probs_b.bias") else SOFTMAX)
    add_experts(m, SOFTMAX if gating == SOFTMAX else SIGMOID)
    if gating == SOFTMAX:
        method = "greedy" if m.config["n_group"] == 1 else "group_limited_greedy"
        m.config |= {"model_type": "deepseek_v2", "topk_method": method}
        if m.find("expert_group_count") is None and m.config["num_experts"] == V2_EXPERTS:
            m.say("expert_group_count is absent: experts are chosen without groups, DeepSeek-V2 itself has 8")
    elif m.num_layers in FLASH_LAYERS and m.config["vocab_size"] == FLASH_TOKENS:
        m.config["model_type"] = "glm4_moe_lite"
    elif m.find("expert_group_count") is None and m.config["num_experts"] == V3_EXPERTS:
        m.config["n_group"], m.config["topk_group"] = groups, active = V3_GROUPS
        m.say(f"expert_group_count is absent: experts are chosen from {active} of {groups} groups, as in DeepSeek-V3")


def add_indexer(m: Metadata) -> None:
    """MLA with a DSA indexer."""
    add_mla(m)
    add_experts(m, SIGMOID)
    for name in ("index_n_heads", "index_head_dim", "index_topk"):
        m.config[name] = m.whole(LABELS[name], low=1)


def add_glm_dsa(m: Metadata) -> None:
    """GLM-5: some layers may share the selection of an earlier one."""
    add_indexer(m)
    key, layers = LABELS["indexer_types"], range(m.num_layers)
    types = m.model.metadata.get(f"{m.architecture}.{key}")
    if types is None:
        shares = m.whole("context_length") >= LONG_CONTEXT
        types = [not shares or i < 3 or (i - 2) % 4 == 0 for i in layers]
    if not isinstance(types, list) or len(types) < len(layers) or any(type(own) not in (bool, int) for own in types):
        m.refuse(key, f"is {show(types)}, expected true or false for each of {len(layers)} layers")
    m.config["indexer_types"] = ["full" if own else "shared" for own in types[: len(layers)]]


def add_glm4moe(m: Metadata) -> None:
    """GLM-4.5 to 4.7: half of each head rotary; norms and biases of the projections where the tensors are."""
    add_gqa(m, partial_rotary=True)
    add_experts(m, SIGMOID)
    m.config |= {"use_qk_norm": m.has("attn_q_norm.weight"), "attention_bias": has_qkv_bias(m)}


def has_qkv_bias(m: Metadata) -> bool:
    return m.has("attn_q.bias") or m.has("attn_qkv.bias")


def add_qwen3moe(m: Metadata) -> None:
    """Qwen3: weights of experts are always normalized. Layers may be dense, though no key says which."""
    add_gqa(m)
    m.require("expert_gating_func", SOFTMAX)
    width = m.config["moe_intermediate_size"]
    m.config |= {"norm_topk_prob": True, "intermediate_size": m.config["intermediate_size"] or width}
    m.config["attention_bias"] = has_qkv_bias(m)
    m.config["mlp_only_layers"] = [i for i in range(m.num_layers) if f"blk.{i}.ffn_gate.weight" in m.model.tensors]


def add_olmoe(m: Metadata) -> None:
    """OLMoE: weights of experts are never normalized; feed_forward_length is the width of an expert."""
    add_gqa(m)
    m.require("expert_gating_func", SOFTMAX)
    m.config |= {"norm_topk_prob": False, "clip_qkv": m.find("attention.clamp_kqv") or None}


def add_mixtral(m: Metadata) -> None:
    """Mixtral: a Llama with experts, of width feed_forward_length."""
    add_gqa(m)
    m.require("expert_gating_func", SOFTMAX)
    m.config["attention_bias"] = has_qkv_bias(m)


def add_gpt_oss(m: Metadata) -> None:
    """gpt-oss: a softmax over the chosen logits, and sliding windows in every other layer."""
    add_gqa(m)
    m.require("expert_gating_func", TOP_K_SOFTMAX)
    key, layers = LABELS["layer_types"], range(m.num_layers)
    pattern = m.model.metadata.get(f"{m.architecture}.{key}", 2)
    if type(pattern) is int and pattern > 0:  # the last of so many layers sees all positions
        pattern = [i % pattern < pattern - 1 for i in layers]
    if not isinstance(pattern, list) or len(pattern) < len(layers):
        m.refuse(key, f"is {show(pattern)}, expected a number or a value for each of {len(layers)} layers")
    m.config["layer_types"] = [f"{'sliding' if pattern[i] else 'full'}_attention" for i in layers]
    m.config["sliding_window"] = m.whole("attention.sliding_window", low=1)
    m.config["intermediate_size"] = m.config["moe_intermediate_size"] or m.config["intermediate_size"]
    m.config["rope_parameters"]["truncate"] = False  # no key says it


ARCHITECTURES: dict[str, tuple[str, Callable[[Metadata], None]]] = {
    "deepseek2": ("deepseek_v3", add_deepseek2),
    "deepseek32": ("deepseek_v32", add_indexer),
    "glm-dsa": ("glm_moe_dsa", add_glm_dsa),
    "glm4moe": ("glm4_moe", add_glm4moe),
    "gpt-oss": ("gpt_oss", add_gpt_oss),
    "llama": ("mixtral", add_mixtral),
    "olmoe": ("olmoe", add_olmoe),
    "qwen3moe": ("qwen3_moe", add_qwen3moe),
}
