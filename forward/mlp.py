"""The gated MLP (SwiGLU) of dense layers and shared experts. T token rows, D model width."""

from torch import Tensor

from kernels.dispatch import gated_mlp
from snapshot.weights import MlpWeights


def mlp(x: Tensor, weights: MlpWeights) -> Tensor:
    """x [T, D] -> down(silu(gate x) * up x) [T, D]."""
    return gated_mlp(x, weights.gate, weights.up, weights.down)
