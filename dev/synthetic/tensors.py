"""Every tensor of a synthetic snapshot: its published name, shape and contents."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dev.synthetic.structure import (
    CONSTANT,
    Config,
    LayerSizes,
    Routing,
    constant_columns,
    layer_sizes,
    rotary_weights,
    router_bias,
)

SILU_RMS = 0.596  # of silu(a) * b for independent standard normal a and b
QUERY = 8.0  # size of the one query latent that is the same for all tokens; the others have 1


@dataclass(frozen=True)
class SyntheticTensor:
    """Random normal numbers of standard deviation `spread`, or `values` where they are given.

    `patch` is (rows, values) that replace rows of the random ones; `constant` the columns, from the first, that hold
    CONSTANT instead.
    """

    name: str
    shape: tuple[int, ...]
    role: str  # expert, dense, ends (embedding and head), or small (never packed)
    spread: float = 0.0
    values: np.ndarray | None = None
    patch: tuple[np.ndarray, np.ndarray] | None = None
    constant: int = 0


Groups = list[list[SyntheticTensor]]  # each is contiguous in the file


def norm(name: str, width: int, first: int = 0, value: float = 1.0) -> SyntheticTensor:
    """A norm's weight: `value` in the first columns, 1 in the others."""
    values = np.ones(width, dtype=np.float32)
    values[:first] = value
    return SyntheticTensor(name, (width,), "small", values=values)


def matrix(
    name: str, rows: int, columns: int, size: float = 1.0, role: str = "dense", **special: Any
) -> SyntheticTensor:
    """A matrix whose output has the RMS of its input, times `size`."""
    return SyntheticTensor(name, (rows, columns), role, spread=size * columns**-0.5, **special)


def mlp(prefix: str, width: int, hidden: int, size: float, role: str = "dense") -> Iterator[SyntheticTensor]:
    """The three matrices of a gated MLP whose output has RMS `size` when its input has 1."""
    yield matrix(f"{prefix}.gate_proj.weight", width, hidden, role=role)
    yield matrix(f"{prefix}.up_proj.weight", width, hidden, role=role)
    yield matrix(f"{prefix}.down_proj.weight", hidden, width, size / SILU_RMS, role)


def model_groups(c: Config, routing: Routing, rng: np.random.Generator) -> Iterator[Groups]:
    """config.json -> for each file its tensors, in contiguous lists: the dense weights, then expert by expert."""
    for layer, sizes in enumerate(layer_sizes(c, routing)):
        base = f"model.layers.{layer}"
        dense = [*norms(c, base, sizes), *attention(c, f"{base}.self_attn", sizes, routing, rng)]
        if has_indexer(c, layer):
            dense += indexer(c, f"{base}.self_attn.indexer", routing, rng)
        if layer < c["first_k_dense_replace"]:
            yield [[*dense, *mlp(f"{base}.mlp", c["intermediate_size"], c["hidden_size"], sizes.mlp)]]
        else:
            yield sparse(c, f"{base}.mlp", dense, sizes.mlp, routing, rng)
    D, vocab = c["hidden_size"], c["vocab_size"]
    embedding = SyntheticTensor(
        "model.embed_tokens.weight", (vocab, D), "ends", spread=1.0, constant=constant_columns(D)
    )
    yield [[embedding, norm("model.norm.weight", D), matrix("lm_head.weight", vocab, D, role="ends")]]


def has_indexer(c: Config, layer: int) -> bool:
    """True if the layer selects positions itself; the others take the selection of a layer before, or there is none."""
    freq = c.get("index_topk_freq")
    return freq is not None and max(layer - c["index_skip_topk_offset"] + 1, 0) % freq == 0


def norms(c: Config, base: str, sizes: LayerSizes) -> Iterator[SyntheticTensor]:
    D, C = c["hidden_size"], constant_columns(c["hidden_size"])
    yield norm(f"{base}.input_layernorm.weight", D, C, sizes.stream / CONSTANT)  # the constant comes out as 1
    yield norm(f"{base}.post_attention_layernorm.weight", D, C, 0.0)


def sparse(
    c: Config, base: str, dense: list[SyntheticTensor], size: float, routing: Routing, rng: np.random.Generator
) -> Groups:
    """-> the lists of a sparse layer."""
    D, width, experts, active = (
        c[key] for key in ("hidden_size", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok")
    )
    router = rng.standard_normal((experts, D), dtype=np.float32) * np.float32(D**-0.5)
    bias = router_bias(experts, active, routing.zipf, rng)
    dense.append(SyntheticTensor(f"{base}.gate.weight", (experts, D), "small", values=router))
    dense.append(SyntheticTensor(f"{base}.gate.e_score_correction_bias", (experts,), "small", values=bias))
    # The mean of `active` experts is smaller than one of them; together with the shared expert they make `size`.
    size *= (c["n_shared_experts"] + c["routed_scaling_factor"] ** 2 / active) ** -0.5
    dense += mlp(f"{base}.shared_experts", width * c["n_shared_experts"], D, size)
    return [dense, *(list(mlp(f"{base}.experts.{i}", width, D, size, "expert")) for i in range(experts))]


def on_constant(rows: int, hidden: int, values: np.ndarray | float) -> np.ndarray:
    """A matrix [rows, hidden] that turns the constant, which comes in as 1, into `values` and ignores the rest."""
    C = constant_columns(hidden)
    out = np.zeros((rows, hidden), dtype=np.float32)
    out[:, :C] = np.broadcast_to(np.asarray(values), rows)[:, None] / C
    return out


def rotary_pattern(c: Config, routing: Routing) -> np.ndarray:
    """The rotary columns of queries and keys: their product is the distance-dependent part of the scores."""
    width = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]  # attention divides by its root
    pattern = np.zeros(c["qk_rope_head_dim"], dtype=np.float32)
    pattern[0::2] = np.sqrt(rotary_weights(c, routing.reach) * width**0.5)
    return pattern


def from_query(c: Config, pattern: np.ndarray) -> np.ndarray:
    """Rows over the query latents that turn the constant one into `pattern`."""
    width = c["q_lora_rank"]
    out = np.zeros((len(pattern), width), dtype=np.float32)
    out[:, 0] = pattern * (1 + QUERY**2 / width) ** 0.5 / QUERY  # the norm of the latents has made it smaller
    return out


def attention(
    c: Config, base: str, sizes: LayerSizes, routing: Routing, rng: np.random.Generator
) -> Iterator[SyntheticTensor]:
    D, H = c["hidden_size"], c["num_attention_heads"]
    QL, KL, N, R, V = (
        c[key] for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    pattern = rotary_pattern(c, routing)
    yield matrix(f"{base}.q_a_proj.weight", QL, D, patch=(np.arange(1), on_constant(1, D, QUERY)))
    yield norm(f"{base}.q_a_layernorm.weight", QL)
    rope_rows = np.arange(H)[:, None] * (N + R) + N + np.arange(R)  # the same for every head
    yield matrix(f"{base}.q_b_proj.weight", H * (N + R), QL, patch=(rope_rows, from_query(c, pattern)))
    latents = rng.standard_normal((KL, D), dtype=np.float32) * np.float32(D**-0.5)
    latents[:, : constant_columns(D)] = 0  # or all values that attention averages would share a direction
    kv_a = np.concatenate([latents, on_constant(R, D, pattern)])
    yield SyntheticTensor(f"{base}.kv_a_proj_with_mqa.weight", kv_a.shape, "dense", values=kv_a)
    yield norm(f"{base}.kv_a_layernorm.weight", KL)
    yield matrix(f"{base}.kv_b_proj.weight", H * (N + V), KL)
    yield matrix(f"{base}.o_proj.weight", D, H * V, sizes.out)


def indexer(c: Config, base: str, routing: Routing, rng: np.random.Generator) -> Iterator[SyntheticTensor]:
    """It prefers near positions as attention does, or a long text would lose its context to a random selection."""
    heads, head, D, R = c["index_n_heads"], c["index_head_dim"], c["hidden_size"], c["qk_rope_head_dim"]
    pattern = rotary_pattern(c, routing)
    rope_rows = np.arange(heads)[:, None] * head + np.arange(R)
    yield matrix(f"{base}.wq_b.weight", heads * head, c["q_lora_rank"], patch=(rope_rows, from_query(c, pattern)))
    yield matrix(f"{base}.wk.weight", head, D, patch=(np.arange(R), on_constant(R, D, pattern)))
    yield norm(f"{base}.k_norm.weight", head)
    yield SyntheticTensor(f"{base}.k_norm.bias", (head,), "small", values=np.zeros(head, dtype=np.float32))
    weights = rng.standard_normal((heads, D), dtype=np.float32) * np.float32(0.3 * D**-0.5)
    weights += on_constant(heads, D, 1.0)
    yield SyntheticTensor(f"{base}.weights_proj.weight", weights.shape, "dense", values=weights)
