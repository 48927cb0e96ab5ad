"""Every tensor of a synthetic snapshot: its published name, its shape, and what stands in it."""

from dataclasses import dataclass

import numpy as np

from scripts.synthetic.structure import (
    CONSTANT,
    constant_columns,
    effective_positions,
    rotary_pattern,
    router_bias,
)
from scripts.synthetic.text import ACTIVE, COMMON

SILU_RMS = 0.596  # of silu(a) * b for independent standard normal a and b
QUERY_CONSTANT = 8.0  # the query latent that is the same for every token; the others have size 1


@dataclass(frozen=True)
class Tensor:
    """`values` float32 where something is built in, else `spread`: random, normal, of that standard deviation."""

    name: str
    shape: tuple
    role: str  # expert, dense, io (embedding and head), or small (never packed)
    spread: float = 0.0
    values: np.ndarray | None = None


@dataclass(frozen=True)
class LayerSizes:
    """Sizes (RMS) that the weights of a layer are scaled for."""

    stream: float  # the residual stream as it comes in
    out: float  # gain of o_proj
    mlp: float  # what the MLP shall add


def layer_sizes(c, routing):
    """One for each layer. `slow` is the share of the stream, in energy, that moves with the context."""
    width, theta = c["qk_rope_head_dim"], c["rope_parameters"]["rope_theta"]
    content = c["qk_nope_head_dim"] / (c["qk_nope_head_dim"] + width)
    positions = effective_positions(theta, width, routing.reach, content)
    constant = CONSTANT**2 * constant_columns(c["hidden_size"]) / c["hidden_size"]
    energy, slow, sizes = 1.0, 0.0, []
    for layer in range(c["num_hidden_layers"]):
        wanted = routing.attention if layer else routing.context
        kept = 0.8 * slow / energy  # of the energy of a row, in the mean of the rows before it
        kept += (1 - slow / energy) * routing.topic * (1 - COMMON) ** 2 / ACTIVE
        out = wanted / np.sqrt(kept + (1 - slow / energy) / positions)
        sizes.append(LayerSizes(np.sqrt(energy + constant), out, routing.mlp))
        slow += wanted**2
        energy += wanted**2 + routing.mlp**2
    return sizes


def all_tensors(c, routing, rng):
    """Layer by layer, then embedding, norm and head: the order in the files."""
    for layer, sizes in enumerate(layer_sizes(c, routing)):
        yield from layer_tensors(c, layer, sizes, routing, rng)
    D, vocab = c["hidden_size"], c["vocab_size"]
    yield Tensor("model.embed_tokens.weight", (vocab, D), "io", spread=1.0)
    yield norm("model.norm.weight", D)
    yield matrix("lm_head.weight", vocab, D, role="io")


def norm(name, width, first=0, value=1.0):
    """A norm's weight: ones, but `value` in the first columns."""
    values = np.ones(width, dtype=np.float32)
    values[:first] = value
    return Tensor(name, (width,), "small", values=values)


def matrix(name, rows, columns, size=1.0, role="dense"):
    """Keeps the size of what goes through it, times `size`."""
    return Tensor(name, (rows, columns), role, spread=size * columns**-0.5)


def mlp(prefix, width, hidden, size, role="dense"):
    yield matrix(f"{prefix}.gate_proj.weight", width, hidden, role=role)
    yield matrix(f"{prefix}.up_proj.weight", width, hidden, role=role)
    yield matrix(f"{prefix}.down_proj.weight", hidden, width, size / SILU_RMS, role)


def layer_tensors(c, layer, sizes, routing, rng):
    D, width, experts = c["hidden_size"], c["moe_intermediate_size"], c["n_routed_experts"]
    base, C = f"model.layers.{layer}", constant_columns(D)
    yield norm(f"{base}.input_layernorm.weight", D, C, sizes.stream / CONSTANT)  # the constant comes out as 1
    yield norm(f"{base}.post_attention_layernorm.weight", D, C, 0.0)
    yield from attention_tensors(c, f"{base}.self_attn", sizes, routing, rng)
    freq, offset = c["index_topk_freq"], c["index_skip_topk_offset"]
    if max(layer - offset + 1, 0) % freq == 0:
        yield from indexer_tensors(c, f"{base}.self_attn.indexer", routing, rng)
    if layer < c["first_k_dense_replace"]:
        yield from mlp(f"{base}.mlp", c["intermediate_size"], D, sizes.mlp)
        return
    router = rng.standard_normal((experts, D), dtype=np.float32) * D**-0.5
    yield Tensor(f"{base}.mlp.gate.weight", (experts, D), "small", values=router)
    bias = router_bias(experts, c["num_experts_per_tok"], routing.zipf, 1.0, rng)
    yield Tensor(f"{base}.mlp.gate.e_score_correction_bias", (experts,), "small", values=bias)
    # The mean of A experts is smaller than one of them; with the shared expert both together make `mlp`.
    energy = c["n_shared_experts"] + c["routed_scaling_factor"] ** 2 / c["num_experts_per_tok"]
    size = sizes.mlp / np.sqrt(energy)
    yield from mlp(f"{base}.mlp.shared_experts", width * c["n_shared_experts"], D, size)
    for expert in range(experts):
        yield from mlp(f"{base}.mlp.experts.{expert}", width, D, size, "expert")


def attention_tensors(c, base, sizes, routing, rng):
    D, H, C = c["hidden_size"], c["num_attention_heads"], constant_columns(c["hidden_size"])
    QL, KL, N, R, V = (
        c[key] for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    pattern = np.zeros(R, dtype=np.float32)  # the first of each rotary pair
    pattern[0::2] = np.sqrt(rotary_pattern(c["rope_parameters"]["rope_theta"], R, routing.reach) * np.sqrt(N + R))
    q_a = rng.standard_normal((QL, D), dtype=np.float32) * D**-0.5
    q_a[0] = 0
    q_a[0, :C] = QUERY_CONSTANT / C
    yield Tensor(f"{base}.q_a_proj.weight", q_a.shape, "dense", values=q_a)
    yield norm(f"{base}.q_a_layernorm.weight", QL)
    q_b = rng.standard_normal((H, N + R, QL), dtype=np.float32) * QL**-0.5
    q_b[:, N:] *= 0.3
    q_b[:, :, 0] = 0
    q_b[:, N:, 0] = pattern / QUERY_CONSTANT * np.sqrt(1 + QUERY_CONSTANT**2 / QL)  # its norm takes that away again
    yield Tensor(f"{base}.q_b_proj.weight", (H * (N + R), QL), "dense", values=q_b.reshape(-1, QL))
    kv_a = rng.standard_normal((KL + R, D), dtype=np.float32) * D**-0.5
    kv_a[:, :C] = 0
    kv_a[KL:] = 0
    kv_a[KL:, :C] = pattern[:, None] / C
    yield Tensor(f"{base}.kv_a_proj_with_mqa.weight", kv_a.shape, "dense", values=kv_a)
    yield norm(f"{base}.kv_a_layernorm.weight", KL)
    yield matrix(f"{base}.kv_b_proj.weight", H * (N + V), KL)
    yield matrix(f"{base}.o_proj.weight", D, H * V, sizes.out)


def indexer_tensors(c, base, routing, rng):
    heads, head, D = c["index_n_heads"], c["index_head_dim"], c["hidden_size"]
    yield matrix(f"{base}.wq_b.weight", heads * head, c["q_lora_rank"])
    yield matrix(f"{base}.wk.weight", head, D)
    yield norm(f"{base}.k_norm.weight", head)
    yield Tensor(f"{base}.k_norm.bias", (head,), "small", values=np.zeros(head, dtype=np.float32))
    yield matrix(f"{base}.weights_proj.weight", heads, D)
