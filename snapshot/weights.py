"""The weights of a model by their role in the forward pass, bound from tensor names once.

Types without a shape are norms and biases, float32 [width].
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kernels.weight import Weight


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    q_b: Weight  # [heads * width, q_lora_rank]
    k: Weight  # [width, hidden]
    k_norm: Tensor
    k_norm_bias: Tensor
    head_weights: Weight  # [heads, hidden]


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaWeights:
    input_norm: Tensor
    post_norm: Tensor
    q_a: Weight | None = None  # None: q_b takes the hidden state
    q_a_norm: Tensor | None = None
    q_b: Weight  # for each head nope rows, then rope rows
    kv_a: Weight  # latent rows, then rope rows
    kv_a_norm: Tensor
    kv_b: Weight  # for each head nope key rows, then value rows
    o: Weight
    q_a_bias: Tensor | None = None
    kv_a_bias: Tensor | None = None
    o_bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class GqaWeights:
    input_norm: Tensor
    post_norm: Tensor
    q: Weight  # for each head rope rows, then the others
    k: Weight
    v: Weight
    o: Weight
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None
    q_norm: Tensor | None = None  # of a head, or of all heads
    k_norm: Tensor | None = None
    sinks: Tensor | None = None  # [heads]


@dataclass(frozen=True, slots=True)
class MlpWeights:
    gate: Weight
    up: Weight
    down: Weight


@dataclass(frozen=True, slots=True)
class ExpertBiases:
    """Biases of all experts of a layer, float32."""

    gate: Tensor  # [experts, width]
    up: Tensor
    down: Tensor  # [experts, hidden]


@dataclass(frozen=True, slots=True)
class MoeWeights:
    router: Weight  # [experts, hidden], float32
    router_bias: Tensor | None = None  # [experts] float32, for the top-k alone
    logit_bias: Tensor | None = None  # [experts] float32, on the logits
    shared: MlpWeights | None = None
    biases: ExpertBiases | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention: MlaWeights | GqaWeights
    indexer: IndexerWeights | None  # None on "shared" layers and in a model without indexer
    mlp: MlpWeights | MoeWeights


@dataclass(frozen=True, slots=True)
class MtpWeights:
    """The multi-token-prediction (MTP) layer, with the model's embedding and head or its own."""

    layer: LayerWeights
    input_proj: Weight  # [hidden, 2 * hidden], embedding half first
    embed_norm: Tensor
    hidden_norm: Tensor
    norm: Tensor
    embed: Weight
    lm_head: Weight


@dataclass(frozen=True, slots=True)
class ModelWeights:
    embed: Weight
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Weight
    has_indexer: bool
    mtp: MtpWeights | None = None


def bind_layer(tables: dict[str, dict[str, Any]]) -> LayerWeights:
    """{part of a layer: {word: Weight or Tensor}} -> LayerWeights."""
    mlp: MlpWeights | MoeWeights
    if "mlp" in tables:
        mlp = MlpWeights(**tables["mlp"])
    else:
        shared = MlpWeights(**tables["shared"]) if "shared" in tables else None
        biases = bind_expert_biases(**tables["expert_biases"]) if "expert_biases" in tables else None
        mlp = MoeWeights(**tables["router"], shared=shared, biases=biases)
    indexer = IndexerWeights(**tables["indexer"]) if "indexer" in tables else None
    attention = tables["attention"]
    return LayerWeights(MlaWeights(**attention) if "kv_a" in attention else GqaWeights(**attention), indexer, mlp)


def bind_expert_biases(
    down: Tensor, gate_up: Tensor | None = None, gate: Tensor | None = None, up: Tensor | None = None
) -> ExpertBiases:
    """gate and up [experts, width], or gate_up [experts, 2 * width] in which they alternate -> ExpertBiases."""
    if gate_up is not None:
        gate, up = gate_up[:, 0::2].contiguous(), gate_up[:, 1::2].contiguous()
    assert gate is not None and up is not None
    return ExpertBiases(gate, up, down)
