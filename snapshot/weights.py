"""The weights of a model by what they do: what the forward pass sees of a snapshot. Names are bound here, once."""

from dataclasses import dataclass

import torch

from kernels.weight import Weight


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    q_b: Weight  # [heads * width, q latent]
    k: Weight  # [width, hidden]
    k_norm: torch.Tensor
    k_norm_bias: torch.Tensor
    head_weights: Weight  # [heads, hidden]


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaWeights:
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    q_a: Weight | None = None  # without it q_b takes the hidden state
    q_a_norm: torch.Tensor | None = None
    q_b: Weight  # per head: nope rows, then rope rows
    kv_a: Weight  # latent rows, then rope rows
    kv_a_norm: torch.Tensor
    kv_b: Weight  # per head: nope key rows, then value rows
    o: Weight
    q_a_bias: torch.Tensor | None = None
    kv_a_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class GqaWeights:
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    q: Weight  # per head: rope rows, then the others
    k: Weight
    v: Weight
    o: Weight
    q_bias: torch.Tensor | None = None
    k_bias: torch.Tensor | None = None
    v_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None  # as wide as a head, or as all of them
    k_norm: torch.Tensor | None = None
    sinks: torch.Tensor | None = None  # [heads]


@dataclass(frozen=True, slots=True)
class MlpWeights:
    gate: Weight
    up: Weight
    down: Weight


@dataclass(frozen=True, slots=True)
class ExpertBiases:
    """Those of all experts of a layer, float32."""

    gate: torch.Tensor  # [experts, width]
    up: torch.Tensor
    down: torch.Tensor  # [experts, hidden]


@dataclass(frozen=True, slots=True)
class MoeWeights:
    router: Weight  # [experts, hidden], float32
    router_bias: torch.Tensor | None = None  # [experts] float32, takes part in the choice alone
    logit_bias: torch.Tensor | None = None  # [experts] float32, part of the logits
    shared: MlpWeights | None = None
    biases: ExpertBiases | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention: MlaWeights | GqaWeights
    indexer: IndexerWeights | None  # None on shared layers, and where a container has no indexer at all
    mlp: MlpWeights | MoeWeights


@dataclass(frozen=True, slots=True)
class MtpWeights:
    """The multi-token-prediction layer. It has the model's embedding and head, or copies of its own."""

    layer: LayerWeights
    input_proj: Weight  # [hidden, 2 * hidden], the half for the embedding first
    embed_norm: torch.Tensor
    hidden_norm: torch.Tensor
    norm: torch.Tensor
    embed: Weight
    lm_head: Weight


@dataclass(frozen=True, slots=True)
class ModelWeights:
    embed: Weight
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    lm_head: Weight
    has_indexer: bool
    mtp: MtpWeights | None = None


def bind_layer(tables):
    """{part: {word: Weight or tensor}} -> LayerWeights."""
    if "mlp" in tables:
        mlp = MlpWeights(**tables["mlp"])
    else:
        shared = MlpWeights(**tables["shared"]) if "shared" in tables else None
        biases = bind_biases(**tables["expert_biases"]) if "expert_biases" in tables else None
        mlp = MoeWeights(**tables["router"], shared=shared, biases=biases)
    indexer = IndexerWeights(**tables["indexer"]) if "indexer" in tables else None
    attention = MlaWeights if "kv_a" in tables["attention"] else GqaWeights
    return LayerWeights(attention(**tables["attention"]), indexer, mlp)


def bind_biases(gate_up, down):
    """gate_up [experts, 2 * width], gate and up by turns -> ExpertBiases."""
    return ExpertBiases(gate_up[:, 0::2].contiguous(), gate_up[:, 1::2].contiguous(), down)
