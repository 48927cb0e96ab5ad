"""Mixture of experts: route, ask the cache, add weighted expert outputs to the shared one, in ascending expert order.

The cache is asked for expert ids and gives matrices, in whatever order they are there; where they were, this file never
learns.
"""

import torch

from forward.mlp import mlp
from forward.router import look_ahead, route, rows_of_each
from kernels.dispatch import add_experts, add_weighted, expert_outputs, group_by_expert
from kernels.reference import ClampedSwiGlu

OUTPUT_BYTES = 32 << 20  # of experts that were computed before their turn to be added


def moe(model, layer, weights, x, residual, observer=None):
    """x [T, D], the normed residual [T, D] -> [T, D]. Each distinct expert of the T rows is asked for once.

    observer: a RouteObserver of this forward pass, beside the one of all passes, model.trace.
    """
    with model.profile.measure("router"):
        chosen, shares = route(model.config, weights, x)  # [T, A] ascending, [T, A]
        experts, starts, rows, shares = group_by_expert(chosen, shares, model.config.num_experts)
        uses = rows_of_each(experts, starts)
    for told in (model.trace, observer):
        if told:
            told.record(layer, uses, len(x), rows)
    with model.experts.request(layer, uses, len(x)) as request:
        look_ahead(model, layer + 1, residual)
        with model.profile.measure("expert-matmul"):
            shared = weights.shared
            out = mlp(x, shared.gate, shared.up, shared.down) if shared else torch.zeros_like(x)
        for first, last in cut(starts.tolist(), OUTPUT_BYTES // (4 * x.shape[1])):
            start, stop = starts[first], starts[last]
            outputs = None
            for batch in request.ready(first, last):
                with model.profile.measure("expert-matmul"):
                    matrices = [three for _, three in batch]
                    indices = [index for index, _ in batch]
                    gates = gates_of(model.config, weights.biases, [experts[index] for index in indices])
                    if len(batch) == last - first:  # all were there: nothing is out of order
                        add_experts(out, x, matrices, starts[first : last + 1], rows, shares, gates)
                        continue  # to the end of `ready`, which lets go of them
                    if outputs is None:
                        outputs = torch.empty(int(stop - start), x.shape[1])
                    compute(outputs, x, matrices, indices, starts, rows, start, gates)
            if outputs is not None:
                with model.profile.measure("expert-matmul"):
                    add_weighted(out, outputs, rows[start:stop], shares[start:stop])
    return out


def gates_of(config, biases, experts):
    """How the two halves of these experts meet: None for silu."""
    if biases is None:
        return None
    parts = biases.gate[experts], biases.up[experts], biases.down[experts]
    return ClampedSwiGlu(*parts, config.swiglu_limit, config.swiglu_alpha)


def compute(outputs, x, matrices, indices, starts, rows, base, gates):
    """Some experts, wherever they stand among those of the layer, on their rows of x -> their places in outputs."""
    counts = starts[1:][indices] - starts[indices]
    places = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in indices])
    own_starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    expert_outputs(outputs, x[rows[places]], matrices, own_starts, torch.arange(len(places)), places - base, gates)


def cut(starts, most):
    """Experts -> (first, last) of consecutive ones with at most `most` assignments together, or one alone."""
    first = 0
    for last in range(1, len(starts)):
        if last + 1 == len(starts) or starts[last + 1] - starts[first] > most:
            yield first, last
            first = last
