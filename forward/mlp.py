"""The gated MLP: dense layers, shared experts and routed experts alike."""

from kernels.dispatch import gated_mlp


def mlp(x, gate, up, down):
    """x [T, D] -> down(silu(gate x) * up x) [T, D]."""
    return gated_mlp(x, gate, up, down)
