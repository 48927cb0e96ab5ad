"""Which experts: the router, and what it would say of a layer that is not there yet."""

import time

import torch

from kernels import dispatch
from kernels.dispatch import group_by_expert, linear, rms_norm


def route(config, weights, x):
    """x [T, D] -> (expert ids [T, A] ascending, weights [T, A]); the router works in float32."""
    logits = linear(x, weights.router, weights.logit_bias)
    if config.router == "softmax":
        return dispatch.route_softmax(
            logits, config.num_active_experts, config.normalize_weights, config.routed_scaling, config.expert_mass
        )
    return dispatch.route(
        logits,
        weights.router_bias,
        config.num_active_experts,
        config.num_groups,
        config.num_active_groups,
        config.normalize_weights,
        config.routed_scaling,
        config.expert_mass,
    )


def rows_of_each(experts, starts):
    """Of what group_by_expert gives -> {expert: number of its rows}, ascending."""
    return dict(zip(experts, starts.diff().tolist(), strict=True))


def look_ahead(model, layer, residual):
    """Tell the cache which experts a layer is likely to ask for: those its router takes for the residual [T, D] as it
    is now, with what comes between left out. Nothing where the layer has no experts or guessing does not pay."""
    cache = model.experts
    if layer not in cache.home or layer >= model.config.num_layers or not cache.lookahead.wants(len(residual)):
        return
    started = time.perf_counter()
    with model.profile.measure("router"):
        weights = model.weights.layers[layer]
        x = rms_norm(residual, weights.attention.post_norm, model.config.rms_norm_eps)
        experts, starts, _, shares = group_by_expert(*route(model.config, weights.mlp, x), model.config.num_experts)
        uses = rows_of_each(experts, starts)
        # The router is surest of those to which it gives most.
        weight = torch.cat([shares.new_zeros(1), shares.cumsum(0)])[starts].diff().tolist()
        order = sorted(range(len(experts)), key=lambda i: -weight[i])
        cache.look_ahead(layer, {experts[i]: uses[experts[i]] for i in order})
    cache.lookahead.note_thinking(time.perf_counter() - started)
