"""A dense Llama as a Mixtral with the same output: its config.json, and its tensors one by one.

Each gated MLP is cut along its width into NUM_EXPERTS experts, and every token takes all of them. The router's weights
are zero, so all its logits are equal and Mixtral weighs each expert with exactly 1 / NUM_EXPERTS; down_proj is
multiplied by NUM_EXPERTS, a power of two, which rounds nothing. What differs from the dense model is the order in which
sums are added.
"""

import numpy as np
import torch

NUM_EXPERTS = 16
POSITION_BASE = "llama.rope.freq_base"


def make_config(metadata):
    """Metadata of a GGUF of the architecture llama -> config.json of the Mixtral."""
    heads, hidden = metadata["llama.attention.head_count"], metadata["llama.embedding_length"]
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": metadata["llama.vocab_size"],
        "hidden_size": hidden,
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "intermediate_size": metadata["llama.feed_forward_length"] // NUM_EXPERTS,  # of one expert
        "num_local_experts": NUM_EXPERTS,
        "num_experts_per_tok": NUM_EXPERTS,
        "hidden_act": "silu",
        "max_position_embeddings": metadata["llama.context_length"],
        "sliding_window": None,
        "rope_parameters": {"rope_theta": shortest(metadata[POSITION_BASE]), "rope_type": "default"},
        "rms_norm_eps": shortest(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "tie_word_embeddings": True,
        "dtype": "float32",
        **special_ids(metadata),
    }


def special_ids(metadata):
    """The ids that begin a text, end it and fill it up."""
    words = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {key: metadata[f"tokenizer.ggml.{word}_token_id"] for key, word in words.items()}


def shortest(value):
    """A float32 as the shortest decimal number that means it: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def model_tensors(config, read):
    """Every tensor of the snapshot, (name, float32), in groups: what stands outside the layers, then layer by layer.

    read: the name of a GGUF tensor -> float32 [rows, columns], or [width] of a norm.
    """
    yield [
        ("model.embed_tokens.weight", read("token_embd.weight")),
        ("model.norm.weight", read("output_norm.weight")),
    ]
    for layer in range(config["num_hidden_layers"]):
        yield list(layer_tensors(config, layer, lambda word, layer=layer: read(f"blk.{layer}.{word}.weight")))


def layer_tensors(config, layer, read):
    """One layer under the names that Mixtral has on the hub; read as above, but of the layer's own words."""
    prefix = f"model.layers.{layer}."
    attention, moe = prefix + "self_attn.", prefix + "block_sparse_moe."
    yield prefix + "input_layernorm.weight", read("attn_norm")
    yield prefix + "post_attention_layernorm.weight", read("ffn_norm")
    yield attention + "q_proj.weight", in_halves(read("attn_q"), config["num_attention_heads"])
    yield attention + "k_proj.weight", in_halves(read("attn_k"), config["num_key_value_heads"])
    yield attention + "v_proj.weight", read("attn_v")
    yield attention + "o_proj.weight", read("attn_output")
    yield moe + "gate.weight", torch.zeros(NUM_EXPERTS, config["hidden_size"])
    for expert, (gate, up, down) in enumerate(cut(read("ffn_gate"), read("ffn_up"), read("ffn_down"))):
        yield f"{moe}experts.{expert}.w1.weight", gate
        yield f"{moe}experts.{expert}.w3.weight", up
        yield f"{moe}experts.{expert}.w2.weight", down


def cut(gate, up, down):
    """gate and up [width, hidden], down [hidden, width] of a dense MLP -> (gate, up, down) of each expert."""
    parts = gate.chunk(NUM_EXPERTS), up.chunk(NUM_EXPERTS), (down * NUM_EXPERTS).chunk(NUM_EXPERTS, dim=1)
    return [tuple(part.contiguous() for part in expert) for expert in zip(*parts, strict=True)]


def in_halves(weight, heads):
    """Rows of a query or key projection, [heads * width, hidden], from pairs to halves.

    A llama GGUF turns the rows 2i and 2i + 1 of a head together; transformers, and so Mixtral, the rows i and
    i + width / 2. This is the inverse of what the converter of llama.cpp does to the rows.
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
