"""Mixture of experts: the shared expert's output, and the weighted sum of each token row's top-k routed experts.

Experts are requested from the expert cache by id and come in the order in which they are ready; where from is not known
here. The sum is always in ascending expert id, so that order changes no bit.

T token rows, D model width, U distinct experts of all rows, N assignments (row, expert).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from experts.route_observer import RouteObserver
from forward.mlp import mlp
from forward.model import Model
from forward.router import prefetch_experts, route_by_expert
from kernels.dispatch import add_experts, add_weighted, expert_outputs
from kernels.reference import ClampedSwiGlu
from snapshot.config import ModelConfig
from snapshot.weights import ExpertBiases, MoeWeights

OUTPUT_BYTES = 32 << 20  # most of the outputs of experts that wait for one with a lower id


def moe(
    model: Model, layer: int, weights: MoeWeights, x: Tensor, residual: Tensor, observer: RouteObserver | None = None
) -> Tensor:
    """x [T, D], the normed residual [T, D] -> [T, D]. Each distinct expert of the T rows is requested once.

    observer: of this forward pass, beside the one of all passes, model.trace.
    """
    with model.profile.measure("router"):
        uses, starts, rows, topk_weights = route_by_expert(model.config, weights, x)  # of U experts, [U + 1], [N], [N]
    for route_observer in filter(None, (model.trace, observer)):
        route_observer.record(layer, uses, len(x), rows)
    experts = list(uses)
    with model.experts.request(layer, uses, len(x)) as request:
        with model.profile.measure("expert-matmul"):
            out = mlp(x, weights.shared) if weights.shared else torch.zeros_like(x)
        prefetch_experts(model, layer + 1, residual, out if weights.shared else None)
        for first, last in split_experts(starts.tolist(), OUTPUT_BYTES // (4 * x.shape[1])):
            start, stop = starts[first], starts[last]
            outputs = None  # [assignments of these experts, D], once one of them is ready before a lower id
            for batch in request.ready(first, last):
                with model.profile.measure("expert-matmul"):
                    matrices = [three for _, three in batch]
                    indices = [index for index, _ in batch]
                    swiglu = clamped_swiglu(model.config, weights.biases, [experts[index] for index in indices])
                    if len(batch) == last - first:  # all at once: add in place
                        add_experts(out, x, matrices, starts[first : last + 1], rows, topk_weights, swiglu)
                        continue  # ends `ready`, which releases them
                    if outputs is None:
                        outputs = torch.empty(int(stop - start), x.shape[1])
                    places, own_starts = assignments_of(starts, indices)
                    gathered, own_rows = x[rows[places]], torch.arange(len(places))
                    expert_outputs(outputs, gathered, matrices, own_starts, own_rows, places - start, swiglu)
            if outputs is not None:
                with model.profile.measure("expert-matmul"):
                    add_weighted(out, outputs, rows[start:stop], topk_weights[start:stop])
    return out


def clamped_swiglu(config: ModelConfig, biases: ExpertBiases | None, experts: list[int]) -> ClampedSwiGlu | None:
    """The clamped SwiGLU of these experts; None for models that use the plain one."""
    if biases is None:
        return None
    of_experts = biases.gate[experts], biases.up[experts], biases.down[experts]
    return ClampedSwiGlu(*of_experts, config.swiglu_limit, config.swiglu_alpha)


def assignments_of(starts: Tensor, indices: list[int]) -> tuple[Tensor, Tensor]:
    """-> (assignments of experts number `indices` of the layer's U, one expert after the other; their starts)."""
    assignments = [torch.arange(int(starts[i]), int(starts[i + 1])) for i in indices]
    counts = starts.diff()[indices]
    return torch.cat(assignments), torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def split_experts(starts: list[int], max_assignments: int) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of consecutive experts with at most max_assignments together, or of one alone."""
    first = 0
    for last in range(1, len(starts)):
        if last + 1 == len(starts) or starts[last + 1] - starts[first] > max_assignments:
            yield first, last
            first = last
