"""Random weights at the speed of memory: a pool of packed normal numbers, each matrix a copy from a random place.

The numbers are quantized as real ones are, so their codes have mean zero. Random bytes do not: a nibble has
mean -0.5, every matrix product then adds one direction that all tokens share, and all take the same experts.
A copy begins at any byte, not at a row, so two matrices that overlap in the pool have different rows.
"""

import numpy as np
import torch
from torch import Tensor

from kernels.formats import FP8, WeightFormat, integer_format
from kernels.packing import unpack_codes
from kernels.quantize import quantize, quantize_fp8

COLUMNS = 4096  # of the matrix that is packed to make a pool
SCALE_VALUES = 1 << 20
BLOCK_VALUES = 1 << 20
VARY = 0.1  # scales differ by as much, up and down


class Pool:
    """Bytes of one format; `spread` is the standard deviation of its values where every scale is 1."""

    def __init__(self, fmt: WeightFormat, num_values: int, rng: np.random.Generator):
        self.format = fmt
        self.rng = rng
        self.unit = 1  # bytes that belong together
        numbers = torch.from_numpy(rng.standard_normal((-(-num_values // COLUMNS), COLUMNS), dtype=np.float32))
        if fmt is FP8:
            data, _ = quantize_fp8(numbers)
            sample = data[:64].float()
        elif fmt.is_integer:
            # Groups of 64 and symmetric, whatever the format: only how codes lie in bytes counts.
            data, _ = quantize(numbers, integer_format(fmt.bits), steps=())
            sample, self.unit = unpack_codes(data[:64], fmt), 24 if fmt.bits == 3 else 1
        else:
            assert fmt.dtype, "a float format"
            data, self.unit = numbers.to(fmt.dtype), fmt.dtype.itemsize
            sample = numbers
        self.spread = float(sample.square().mean().sqrt())
        # The length is coprime to that of a row, so a matrix larger than the pool repeats no row.
        self.bytes = data.reshape(-1).view(torch.uint8)[: -self.unit].clone()
        self.variations = torch.from_numpy(rng.uniform(1 - VARY, 1 + VARY, SCALE_VALUES).astype(np.float32))
        self.scaled: dict[float, Tensor] = {}  # of a float format: spread -> the bytes with it

    def data(self, rows: int, columns: int, spread: float, keep: bool = False, own: bool = False) -> Tensor:
        """uint8 [rows, row bytes]. Of a float format with that spread, of the others what their scales make of it.

        `keep` the pool as scaled, for many matrices of this spread. `own`: to be changed, so no view of the pool.
        """
        num_bytes = rows * self.format.row_bytes(columns)
        if self.format.has_scales:
            data = self.sample(self.bytes, num_bytes, self.unit, own)
        elif keep:
            if spread not in self.scaled:
                self.scaled[spread] = self.scale(self.bytes.clone(), spread)
            data = self.sample(self.scaled[spread], num_bytes, self.unit, own)
        else:
            data = self.scale(self.sample(self.bytes, num_bytes, self.unit, own=True), spread)
        return data.view(rows, -1)

    def scale(self, data: Tensor, spread: float) -> Tensor:
        """Multiplies in place, a block at a time: the output head of a large model has a billion values."""
        assert self.format.dtype, "a float format"
        for values in data.view(self.format.dtype).split(BLOCK_VALUES):
            values.copy_(values.float() * (spread / self.spread))
        return data

    def scales(
        self, rows: int, columns: int, spread: float, dtype: torch.dtype, fmt: WeightFormat, vary: bool = True
    ) -> Tensor:
        """The scales of a matrix, alike or nearly, that give its values that spread; `fmt` says how many there are."""
        shape = torch.Size(fmt.scale_shape(rows, columns))
        varied = self.sample(self.variations, shape.numel()) if vary else torch.ones(shape.numel())
        return (varied * (spread / self.spread)).to(dtype).view(shape)

    def sample(self, source: Tensor, count: int, unit: int = 1, own: bool = False) -> Tensor:
        """`count` elements from a random place: a view; a copy if they wrap around the end, or with `own`."""
        at = int(self.rng.integers(len(source) // unit)) * unit
        parts: list[Tensor] = []
        while count:
            parts.append(source[at : at + count])
            at, count = 0, count - len(parts[-1])
        return torch.cat(parts) if own or len(parts) > 1 else parts[0]
