"""One decoder layer: norm, attention, add, norm, MoE or MLP, add.

T token rows, D model width.
"""

from torch import Tensor

from experts.route_observer import RouteObserver
from forward.attention.gqa import gqa
from forward.attention.mla import mla
from forward.chunk import Chunk
from forward.mlp import mlp
from forward.model import Model
from forward.moe import moe
from forward.router import prefetch_experts
from kernels.dispatch import rms_norm
from snapshot.weights import LayerWeights, MlaWeights, MoeWeights


def layer_forward(
    model: Model, layer: int, weights: LayerWeights, x: Tensor, chunk: Chunk, observer: RouteObserver | None = None
) -> Tensor:
    """x [T, D] -> [T, D]. observer: as of moe."""
    config, attention = model.config, weights.attention
    prefetch_experts(model, layer, x)
    with model.profile.measure("attention"):
        normed = rms_norm(x, attention.input_norm, config.rms_norm_eps)
        if isinstance(attention, MlaWeights):
            out = mla(config, layer, attention, weights.indexer, normed, chunk)
        else:
            out = gqa(config, layer, attention, normed, chunk)
        normed = rms_norm(out, attention.post_norm, config.rms_norm_eps, x)  # adds x to out, in place
    if isinstance(weights.mlp, MoeWeights):
        return moe(model, layer, weights.mlp, normed, out, observer).add_(out)
    prefetch_experts(model, layer + 1, out)
    with model.profile.measure("dense-mlp"):
        return mlp(normed, weights.mlp).add_(out)
