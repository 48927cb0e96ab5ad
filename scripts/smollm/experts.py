"""Converts a dense Llama to a Mixtral with the same output: its config.json, and its tensors one by one.

Each gated MLP is split along its width into NUM_EXPERTS experts, and the router selects all of them for every token.
The router's weights are zero, so its logits are equal and Mixtral weighs each expert with exactly 1 / NUM_EXPERTS;
down_proj is multiplied by NUM_EXPERTS, a power of two, which is exact. Only the order of sums differs from the dense
model.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

NUM_EXPERTS = 16
Metadata = dict[str, Any]  # of a GGUF, by its keys
ReadTensor = Callable[[str], Tensor]  # name of a GGUF tensor -> float32 [rows, columns], or [width] of a norm
ROPE_BASE = "llama.rope.freq_base"


def make_config(metadata: Metadata) -> dict[str, Any]:
    """-> config.json of the Mixtral for a GGUF of the architecture llama."""
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
        "rope_parameters": {"rope_theta": shortest_decimal(metadata[ROPE_BASE]), "rope_type": "default"},
        "rms_norm_eps": shortest_decimal(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "tie_word_embeddings": True,
        "dtype": "float32",
        **special_ids(metadata),
    }


def special_ids(metadata: Metadata) -> dict[str, int]:
    """The ids of the bos, eos and padding tokens."""
    words = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {key: metadata[f"tokenizer.ggml.{word}_token_id"] for key, word in words.items()}


def shortest_decimal(value: float) -> float:
    """The shortest decimal number that rounds to this float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def model_tensors(config: dict[str, Any], read: ReadTensor) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield every tensor of the snapshot, (name, float32): those outside the layers, then each layer."""
    yield [
        ("model.embed_tokens.weight", read("token_embd.weight")),
        ("model.norm.weight", read("output_norm.weight")),
    ]
    for layer in range(config["num_hidden_layers"]):
        yield list(layer_tensors(config, layer, read))


def layer_tensors(config: dict[str, Any], layer: int, read: ReadTensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a layer under Mixtral's names on the hub."""

    def stored(name: str) -> Tensor:
        return read(f"blk.{layer}.{name}.weight")

    prefix = f"model.layers.{layer}."
    attention, moe = prefix + "self_attn.", prefix + "block_sparse_moe."
    yield prefix + "input_layernorm.weight", stored("attn_norm")
    yield prefix + "post_attention_layernorm.weight", stored("ffn_norm")
    yield attention + "q_proj.weight", rope_rows_in_halves(stored("attn_q"), config["num_attention_heads"])
    yield attention + "k_proj.weight", rope_rows_in_halves(stored("attn_k"), config["num_key_value_heads"])
    yield attention + "v_proj.weight", stored("attn_v")
    yield attention + "o_proj.weight", stored("attn_output")
    yield moe + "gate.weight", torch.zeros(NUM_EXPERTS, config["hidden_size"])
    for expert, (gate, up, down) in enumerate(split_mlp(stored("ffn_gate"), stored("ffn_up"), stored("ffn_down"))):
        yield f"{moe}experts.{expert}.w1.weight", gate
        yield f"{moe}experts.{expert}.w3.weight", up
        yield f"{moe}experts.{expert}.w2.weight", down


def split_mlp(gate: Tensor, up: Tensor, down: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """gate and up [width, hidden], down [hidden, width] of a dense MLP -> (gate, up, down) of each expert."""
    chunks = gate.chunk(NUM_EXPERTS), up.chunk(NUM_EXPERTS), (down * NUM_EXPERTS).chunk(NUM_EXPERTS, dim=1)
    return [(g.contiguous(), u.contiguous(), d.contiguous()) for g, u, d in zip(*chunks, strict=True)]


def rope_rows_in_halves(weight: Tensor, heads: int) -> Tensor:
    """Reorder the rows of a query or key projection [heads * width, hidden] from rotary pairs to halves.

    A llama GGUF rotates the rows 2i and 2i + 1 of a head together; transformers, and so Mixtral, the rows i and
    i + width / 2. This inverts the permutation of llama.cpp's converter.
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
