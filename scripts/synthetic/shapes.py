"""config.json of the models that can be made: real layer shapes, as many layers, experts and words as wanted."""


def glm_5_2(layers, experts, vocab):
    """GLM-5.2 but for its depth: one dense layer instead of three, then sparse ones."""
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "vocab_size": vocab,
        "hidden_size": 6144,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 2048,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 1,
        "n_routed_experts": experts,
        "num_experts_per_tok": min(8, experts),
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "rope_parameters": {"rope_theta": 8000000.0, "rope_type": "default"},
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "eos_token_id": [0],
        "dtype": "bfloat16",
    }


def small(layers, experts, vocab, hidden=512, moe_width=512, active=8, index_topk=512):
    """The same architecture in sizes that a test can bear."""
    heads = max(1, hidden // 64)
    return glm_5_2(layers, experts, vocab) | {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": hidden // 2,
        "kv_lora_rank": hidden // 4,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "intermediate_size": 4 * hidden,
        "moe_intermediate_size": moe_width,
        "num_experts_per_tok": active,
        "index_topk": index_topk,
        "index_head_dim": 64,
        "index_n_heads": 16,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "max_position_embeddings": 131072,
    }
