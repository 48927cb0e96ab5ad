"""The gated MLP: dense layers, shared experts and routed experts alike."""

from kernels.dispatch import linear, silu_product


def mlp(x, gate, up, down):
    """x [T, D] -> down(silu(gate x) * up x) [T, D]."""
    return linear(silu_product(linear(x, gate), linear(x, up)), down)
