"""A sparse layer: route, ask the cache, add the experts' outputs in ascending id, add the shared expert.

The cache hands out matrices; where they were a moment ago is none of this file's business.
"""

import torch
import torch.nn.functional as F

from forward.mlp import mlp
from kernels.reference import route_sigmoid


def moe(model, layer, weights, x):
    """x [T, D] -> [T, D]. Each distinct expert of the T rows is asked for once."""
    with model.profile.measure("router"):
        chosen, shares = route(model.config, weights, x)  # [T, A] ascending, [T, A]
        rows, column = shares.nonzero(as_tuple=True)  # an expert without weight adds nothing: it is not fetched
        chosen, shares = chosen[rows, column], shares[rows, column]
        order = chosen.argsort(stable=True)  # assignments grouped by expert, rows ascending within
        experts, counts = chosen.unique(return_counts=True)
        row_groups = rows[order].split(counts.tolist())
        share_groups = shares[order].split(counts.tolist())
        out = torch.zeros_like(x)
    stream = model.experts.stream(layer, experts.tolist())
    for (_, matrices), rows, share in zip(stream, row_groups, share_groups, strict=True):
        with model.profile.measure("expert-matmul"):
            out.index_add_(0, rows, mlp(x[rows], *matrices) * share[:, None])
    with model.profile.measure("expert-matmul"):
        shared = weights.shared
        return out + mlp(x, shared.gate, shared.up, shared.down)


def route(config, weights, x):
    """x [T, D] -> (expert ids [T, A] ascending, weights [T, A]); the router works in float32."""
    return route_sigmoid(
        F.linear(x, weights.router),
        weights.router_bias,
        config.num_active_experts,
        config.num_groups,
        config.num_active_groups,
        config.normalise_weights,
        config.routed_scaling,
        config.expert_mass,
    )
