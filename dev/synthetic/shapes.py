"""config.json of the models that can be made: real layer shapes, as many layers, experts and ids as wanted."""

import argparse
from typing import Any

# Defaults of the command line for each model. `report_tokens` are run at the end, a minute or two on one core.
DEFAULTS: dict[str, dict[str, int]] = {
    "glm-5.2": dict(
        layers=4, experts=256, active=8, hidden=6144, moe_width=2048, vocab=154880, index_topk=2048,
        prompt=512, tokens=256, report_tokens=768,
    ),
    "small": dict(
        layers=8, experts=64, active=8, hidden=512, moe_width=512, vocab=4096, index_topk=512,
        prompt=2000, tokens=500, report_tokens=1024,
    ),
}  # fmt: skip


def make_config(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The sizes of `args`, in the shapes of a model: GLM-5.2 has fixed ones, `small` follows the hidden size.

    One dense layer, then sparse ones.
    """
    hidden = args.hidden
    heads, q_lora, kv_lora, nope, rope, value, dense, index_heads, index_head, theta, positions = (
        (64, 2048, 512, 192, 64, 256, 12288, 32, 128, 8e6, 1048576)
        if name == "glm-5.2"
        else (max(1, hidden // 64), hidden // 2, hidden // 4, 64, 32, 64, 4 * hidden, 16, 64, 1e6, 131072)
    )
    config = {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "vocab_size": args.vocab,
        "hidden_size": hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": q_lora,
        "kv_lora_rank": kv_lora,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "intermediate_size": dense,
        "moe_intermediate_size": args.moe_width,
        "first_k_dense_replace": 1,
        "n_routed_experts": args.experts,
        "num_experts_per_tok": args.active,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "index_topk": args.index_topk,
        "index_head_dim": index_head,
        "index_n_heads": index_heads,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "eos_token_id": [0],
        "dtype": "bfloat16",
    }
    return {key: value for key, value in config.items() if not (args.no_indexer and key.startswith("index_"))}
