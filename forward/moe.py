"""Mixture of experts: route, ask the cache, add weighted expert outputs in ascending expert order, add the shared one.

The cache is asked for expert ids and gives matrices; where they were, this file never learns.
"""

import torch

from forward.mlp import mlp
from kernels.dispatch import add_experts, linear, sigmoid
from kernels.reference import route_sigmoid


def moe(model, layer, weights, x):
    """x [T, D] -> [T, D]. Each distinct expert of the T rows is asked for once."""
    with model.profile.measure("router"):
        chosen, shares = route(model.config, weights, x)  # [T, A] ascending, [T, A]
        rows, column = shares.nonzero(as_tuple=True)  # an expert without weight adds nothing: it is not fetched
        chosen, shares = chosen[rows, column], shares[rows, column]
        order = chosen.argsort(stable=True)  # assignments grouped by expert, rows ascending within
        experts, counts = chosen.unique(return_counts=True)
        rows, shares = rows[order], shares[order]
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        out, at = torch.zeros_like(x), 0
    for batch in model.experts.batches(layer, experts.tolist()):
        with model.profile.measure("expert-matmul"):
            add_experts(out, x, [three for _, three in batch], starts[at : at + len(batch) + 1], rows, shares)
            at += len(batch)
    with model.profile.measure("expert-matmul"):
        shared = weights.shared
        return out + mlp(x, shared.gate, shared.up, shared.down)


def route(config, weights, x):
    """x [T, D] -> (expert ids [T, A] ascending, weights [T, A]); the router works in float32."""
    return route_sigmoid(
        sigmoid(linear(x, weights.router)),
        weights.router_bias,
        config.num_active_experts,
        config.num_groups,
        config.num_active_groups,
        config.normalise_weights,
        config.routed_scaling,
        config.expert_mass,
    )
