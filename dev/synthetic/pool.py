"""Random weights at the speed of memory: one pool of packed normal numbers, every matrix a copy from anywhere in it.

The numbers are quantized as real ones are, so their codes have mean zero. Random bytes do not: a nibble has
mean -0.5, every matrix product then adds one direction that all tokens share, and all take the same experts.
A copy begins at any byte, not at a row, so two matrices that overlap in the pool have different rows.
"""

import numpy as np
import torch

from kernels.formats import FP8, integer_format
from kernels.packing import unpack_codes
from kernels.quantize import quantize, quantize_fp8

COLUMNS = 4096  # of the matrix that is packed to make a pool
SCALE_VALUES = 1 << 20
BLOCK_VALUES = 1 << 20
VARY = 0.1  # scales differ by as much, up and down


class Pool:
    """Bytes of one format; `spread` is the standard deviation of its values where every scale is 1."""

    def __init__(self, fmt, num_values, rng):
        self.format, self.rng, self.unit = fmt, rng, 1  # unit: bytes that belong together
        numbers = rng.standard_normal((-(-num_values // COLUMNS), COLUMNS), dtype=np.float32)
        numbers = torch.from_numpy(numbers)
        if fmt is FP8:
            data, _ = quantize_fp8(numbers)
            sample = data[:64].float()
        elif fmt.is_integer:
            # Groups of 64 and symmetric, whatever the format: only how codes lie in bytes counts.
            data, _ = quantize(numbers, integer_format(fmt.bits), steps=())
            sample, self.unit = unpack_codes(data[:64], fmt), 24 if fmt.bits == 3 else 1
        else:
            data, self.unit = numbers.to(fmt.dtype), fmt.dtype.itemsize
            sample = numbers
        self.spread = float(sample.square().mean().sqrt())
        # The length is coprime to that of a row, so a matrix larger than the pool repeats no row.
        self.bytes = data.reshape(-1).view(torch.uint8)[: -self.unit].clone()
        self.variations = torch.from_numpy(rng.uniform(1 - VARY, 1 + VARY, SCALE_VALUES).astype(np.float32))
        self.scaled = {}  # of a float format: spread -> the bytes with it

    def data(self, rows, columns, spread, keep=False, own=False):
        """uint8 [rows, row bytes]. Of a float format with that spread, of the others what their scales make of it.

        `keep` the pool as scaled, for many matrices of this spread. `own`: to be changed, so no view of the pool.
        """
        num_bytes = rows * self.format.row_bytes(columns)
        if self.format.has_scales:
            data = self.take(self.bytes, num_bytes, self.unit, own)
        elif keep:
            if spread not in self.scaled:
                self.scaled[spread] = self.scale(self.bytes.clone(), spread)
            data = self.take(self.scaled[spread], num_bytes, self.unit, own)
        else:
            data = self.scale(self.take(self.bytes, num_bytes, self.unit, own=True), spread)
        return data.view(rows, -1)

    def scale(self, data, spread):
        """Multiplies in place, a block at a time: the output head of a large model has a billion values."""
        for values in data.view(self.format.dtype).split(BLOCK_VALUES):
            values.copy_(values.float() * (spread / self.spread))
        return data

    def scales(self, rows, columns, spread, dtype, fmt, vary=True):
        """The scales of a matrix, alike or nearly, that give its values that spread; `fmt` says how many there are."""
        shape = torch.Size(fmt.scale_shape(rows, columns))
        varied = self.take(self.variations, shape.numel()) if vary else torch.ones(shape.numel())
        return (varied * (spread / self.spread)).to(dtype).view(shape)

    def take(self, source, count, unit=1, own=False):
        """`count` elements from anywhere: a view, or a copy where they run over the end or shall be one's own."""
        at, parts = int(self.rng.integers(len(source) // unit)) * unit, []
        while count:
            parts.append(source[at : at + count])
            at, count = 0, count - len(parts[-1])
        return torch.cat(parts) if own or len(parts) > 1 else parts[0]
