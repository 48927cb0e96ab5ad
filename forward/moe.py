"""Mixture of experts: route, ask the cache, add weighted expert outputs to the shared one, in ascending expert order.

The cache is asked for expert ids and gives matrices, in whatever order they are there; where they were, this file never
learns.
"""

import time

import torch

from forward.mlp import mlp
from kernels import dispatch
from kernels.dispatch import add_experts, add_weighted, expert_outputs, group_by_expert, linear, rms_norm

OUTPUT_BYTES = 32 << 20  # of experts that were computed before their turn to be added


def moe(model, layer, weights, x, residual):
    """x [T, D], the normed residual [T, D] -> [T, D]. Each distinct expert of the T rows is asked for once."""
    with model.profile.measure("router"):
        chosen, shares = route(model.config, weights, x)  # [T, A] ascending, [T, A]
        experts, starts, rows, shares = group_by_expert(chosen, shares, model.config.num_experts)
        uses = rows_of_each(experts, starts)
    if model.trace:
        model.trace.record(layer, uses, len(x))
    with model.experts.request(layer, uses, len(x)) as request:
        look_ahead(model, layer + 1, residual, request)
        with model.profile.measure("expert-matmul"):
            out = mlp(x, weights.shared.gate, weights.shared.up, weights.shared.down)
        for first, last in cut(starts.tolist(), OUTPUT_BYTES // (4 * x.shape[1])):
            start, stop = starts[first], starts[last]
            outputs = None
            for batch in request.ready(first, last):
                with model.profile.measure("expert-matmul"):
                    matrices = [three for _, three in batch]
                    if len(batch) == last - first:  # all were there: nothing is out of order
                        add_experts(out, x, matrices, starts[first : last + 1], rows, shares)
                        continue  # to the end of `ready`, which lets go of them
                    if outputs is None:
                        outputs = torch.empty(int(stop - start), x.shape[1])
                    compute(outputs, x, matrices, [index for index, _ in batch], starts, rows, start)
            if outputs is not None:
                with model.profile.measure("expert-matmul"):
                    add_weighted(out, outputs, rows[start:stop], shares[start:stop])
    return out


def rows_of_each(experts, starts):
    """Of what group_by_expert gives -> {expert: number of its rows}, ascending."""
    return dict(zip(experts, starts.diff().tolist(), strict=True))


def look_ahead(model, layer, residual, request):
    """Tell the cache which experts the next layer is likely to ask for: those its router takes for the residual as it is
    before this layer's experts are added."""
    experts = model.experts.lookahead
    if layer < model.config.num_layers and layer in model.experts.home and experts.wants(len(residual)):
        started = time.perf_counter()
        with model.profile.measure("router"):
            weights = model.weights.layers[layer]
            x = rms_norm(residual, weights.attention.post_norm, model.config.rms_norm_eps)
            chosen = group_by_expert(*route(model.config, weights.mlp, x), model.config.num_experts)
            request.look_ahead(layer, rows_of_each(*chosen[:2]))
        experts.note_thinking(time.perf_counter() - started)


def compute(outputs, x, matrices, indices, starts, rows, base):
    """Some experts, wherever they stand among those of the layer, on their rows of x -> their places in outputs."""
    counts = starts[1:][indices] - starts[indices]
    places = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in indices])
    own_starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    expert_outputs(outputs, x[rows[places]], matrices, own_starts, torch.arange(len(places)), places - base)


def cut(starts, most):
    """Experts -> (first, last) of consecutive ones with at most `most` assignments together, or one alone."""
    first = 0
    for last in range(1, len(starts)):
        if last + 1 == len(starts) or starts[last + 1] - starts[first] > most:
            yield first, last
            first = last


def route(config, weights, x):
    """x [T, D] -> (expert ids [T, A] ascending, weights [T, A]); the router works in float32."""
    return dispatch.route(
        linear(x, weights.router),
        weights.router_bias,
        config.num_active_experts,
        config.num_groups,
        config.num_active_groups,
        config.normalise_weights,
        config.routed_scaling,
        config.expert_mass,
    )
