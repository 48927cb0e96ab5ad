"""A weight matrix in memory, in any format, and views of matrices that lie within larger buffers."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kernels.formats import FP8, WeightFormat
from kernels.packing import dequantize, dequantize_fp8


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix [out, in] as it lies in memory.

    `exact` keeps the activations it is multiplied with in float32; without it an integer format quantizes them
    (kernels/reference.quantize_activations).
    """

    data: Tensor  # [out, in] of a float dtype, or [out, row bytes] uint8
    columns: int
    format: WeightFormat
    scales: Tensor | None = None  # format.scale_shape, float32 or float16; uint8 of MXFP4
    exact: bool = False
    native: Any = field(default=None, compare=False, repr=False)  # kernels/native.py keeps its view of it here

    @property
    def rows(self) -> int:
        return self.data.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def dequantize(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Weight rows start .. stop as float32 [rows, columns]."""
        data = self.data[start:stop]
        if self.scales is None:
            return data.float()
        if self.format is FP8:
            return dequantize_fp8(data, self.scales, start)
        return dequantize(data, self.scales[start:stop], self.format, self.columns)

    def dequantize_rows(self, rows: Tensor) -> Tensor:
        """The weight rows of indices [T] as float32 [T, columns]."""
        if self.scales is None:
            return self.data[rows].float()
        if self.format is FP8:
            return torch.cat([self.dequantize(row, row + 1) for row in rows.tolist()])
        return dequantize(self.data[rows], self.scales[rows], self.format, self.columns)


@dataclass(frozen=True, slots=True)
class RowSelection:
    """The weight rows of a matrix that lies in a larger one of `rows` rows: first, first + step, and so on.
    is_transposed: the larger one lies as [in, out], in a float format."""

    first: int
    step: int
    rows: int
    is_transposed: bool = False

    def skip(self, start: int) -> "RowSelection":
        """Without the first `start` rows."""
        return replace(self, first=self.first + start * self.step)

    def select(self, matrix: Tensor, count: int) -> Tensor:
        """`count` rows of the larger matrix, as a view."""
        return matrix[self.first :: self.step][:count]


def view_weight(
    buffer: Tensor,
    fmt: WeightFormat,
    rows: int,
    columns: int,
    data_at: int,
    scales_at: int | None = None,
    scale_dtype: torch.dtype = torch.float32,
    exact: bool = False,
    selection: RowSelection | None = None,
) -> Weight:
    """A Weight over a uint8 buffer. Its data and scales, or those of the larger matrix that `selection` selects from,
    begin at the given bytes. Nothing is read or written."""
    selection = selection or RowSelection(0, 1, rows)
    data = buffer[data_at : data_at + selection.rows * fmt.row_bytes(columns)]
    if fmt.dtype:
        data = data.view(fmt.dtype)
    data = data.view(columns, -1).T if selection.is_transposed else data.view(selection.rows, -1)
    scales = None
    if fmt.has_scales:
        assert scales_at is not None, fmt
        shape = fmt.scale_shape(selection.rows, columns)
        scales = buffer[scales_at : scales_at + math.prod(shape) * scale_dtype.itemsize].view(scale_dtype).view(shape)
        scales = scales if fmt is FP8 else selection.select(scales, rows)
    return Weight(selection.select(data, rows), columns, fmt, scales, exact)


def packed_bytes(fmt: WeightFormat, rows: int, columns: int) -> int:
    """Bytes of a matrix that is quantized in memory, with its float32 scales: a multiple of 4."""
    return -(-fmt.num_bytes(rows, columns) // 4) * 4


def packed_view(buffer: Tensor, fmt: WeightFormat, rows: int, columns: int, exact: bool = False) -> Weight:
    """A Weight over the first packed_bytes of a uint8 buffer: scales, then data. Nothing is written yet."""
    scale_bytes = 4 * math.prod(fmt.scale_shape(rows, columns))
    return view_weight(buffer, fmt, rows, columns, scale_bytes, 0, exact=exact)
