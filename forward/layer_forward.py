"""One decoder layer: norm, attention, add, norm, moe or mlp, add."""

from forward.attention.gqa import gqa
from forward.attention.mla import mla
from forward.mlp import mlp
from forward.moe import moe
from forward.router import look_ahead
from kernels.dispatch import rms_norm
from snapshot.weights import MoeWeights


def layer_forward(model, layer, weights, x, chunk, selections, observer=None):
    """x [T, D] -> ([T, D], selections of the last full layer). observer: as of moe."""
    config, attention = model.config, weights.attention
    look_ahead(model, layer, x)
    with model.profile.measure("attention"):
        normed = rms_norm(x, attention.input_norm, config.rms_norm_eps)
        if config.attention == "mla":
            out, selections = mla(config, layer, attention, weights.indexer, normed, chunk, selections)
        else:
            out = gqa(config, layer, attention, normed, chunk)
        normed = rms_norm(out, attention.post_norm, config.rms_norm_eps, added=x)
    if isinstance(weights.mlp, MoeWeights):
        return moe(model, layer, weights.mlp, normed, out, observer).add_(out), selections
    look_ahead(model, layer + 1, out)
    with model.profile.measure("dense-mlp"):
        return mlp(normed, weights.mlp.gate, weights.mlp.up, weights.mlp.down).add_(out), selections
