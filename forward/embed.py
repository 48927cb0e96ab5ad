"""The embedding: token ids -> rows of its table. T token rows, D model width."""

from torch import Tensor

from kernels.weight import Weight


def embed(weight: Weight, ids: Tensor) -> Tensor:
    """ids [T] -> float32 [T, D]; no scaling."""
    return weight.dequantize_rows(ids)
