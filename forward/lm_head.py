"""The output head: hidden rows -> logits, computed only for the rows that are requested.

T token rows, D model width, V vocabulary.
"""

from torch import Tensor

from forward.model import Model
from kernels.dispatch import linear, rms_norm

# Rows whose logits exist at once where many are wanted: 64 rows of a vocabulary of 150,000 are 40 MB.
LOGIT_ROWS = 64


def lm_head(model: Model, hidden: Tensor) -> Tensor:
    """hidden [T, D] before the final norm -> logits float32 [T, V]."""
    with model.profile.measure("lm_head"):
        normed = rms_norm(hidden, model.weights.norm, model.config.rms_norm_eps)
        return linear(normed, model.weights.lm_head)
