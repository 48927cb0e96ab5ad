"""Hidden rows -> logits, computed only for the rows that are asked for."""

from kernels.reference import linear, rms_norm


def lm_head(model, hidden):
    """hidden [T, D] before the final norm -> logits float32 [T, vocab]."""
    with model.profile.measure("lm_head"):
        normed = rms_norm(hidden, model.weights.norm, model.config.rms_norm_eps)
        return linear(normed, model.weights.lm_head)
