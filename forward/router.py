"""The router: the top-k experts of each token row, and a prediction of those of a later layer.

T token rows, D model width, E experts, A active experts of a row, U distinct experts of all rows, N assignments (row,
expert).
"""

import time

import torch
from torch import Tensor

from experts.prefetch import LONG_CHUNK
from forward.model import Model
from kernels import dispatch
from kernels.dispatch import group_by_expert, linear, rms_norm
from snapshot.config import ModelConfig
from snapshot.weights import MoeWeights

Uses = dict[int, int]  # {expert, ascending: number of its token rows}


def route(config: ModelConfig, weights: MoeWeights, x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, D] -> (expert ids [T, A] ascending, their weights in the sum [T, A]), computed in float32."""
    logits = linear(x, weights.router, weights.logit_bias)  # [T, E]
    weighting = config.normalize_weights, config.routed_scaling, config.expert_mass
    if config.router == "softmax":
        return dispatch.route_softmax(logits, config.num_active_experts, *weighting)
    assert weights.router_bias is not None  # every sigmoid router has one
    return dispatch.route(
        logits, weights.router_bias, config.num_active_experts, config.num_groups, config.num_active_groups, *weighting
    )


def route_by_expert(config: ModelConfig, weights: MoeWeights, x: Tensor) -> tuple[Uses, Tensor, Tensor, Tensor]:
    """x [T, D] -> (uses, and of group_by_expert: starts [U + 1], rows [N], weights [N])."""
    experts, starts, rows, topk_weights = group_by_expert(*route(config, weights, x), config.num_experts)
    return dict(zip(experts, starts.diff().tolist(), strict=True)), starts, rows, topk_weights


def prefetch_experts(model: Model, layer: int, residual: Tensor, shared: Tensor | None = None) -> None:
    """Prefetch the experts that a layer will probably request: those its router chooses for the residual [T, D] as it
    is now, without what comes in between. Nothing where the layer has no experts or prefetching does not pay.

    shared: the output [T, D] of the shared expert of the layer before, which is a part of what comes in between.
    """
    cache = model.experts
    is_sparse = layer in cache.pool_of and layer < model.config.num_layers
    if not is_sparse or not cache.prefetcher.should_predict(len(residual)):
        return
    started = time.perf_counter()
    with model.profile.measure("router"):
        weights = model.weights.layers[layer]
        assert isinstance(weights.mlp, MoeWeights)  # as in every layer that the cache knows
        if shared is not None and len(residual) < LONG_CHUNK:  # predictions for more rows are hardly ever wrong
            residual = residual + shared
        x = rms_norm(residual, weights.attention.post_norm, model.config.rms_norm_eps)
        uses, starts, _, topk_weights = route_by_expert(model.config, weights.mlp, x)
        # The larger its share, the surer is the prediction of an expert.
        sums = torch.cat([topk_weights.new_zeros(1), topk_weights.cumsum(0)])[starts].diff().tolist()
        share_of = dict(zip(uses, sums, strict=True))
        cache.prefetch(layer, {expert: uses[expert] for expert in sorted(uses, key=share_of.__getitem__, reverse=True)})
    cache.prefetcher.record_prediction(time.perf_counter() - started)
