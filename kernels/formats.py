"""The weight formats: their names and their byte layouts. Knows neither tensors' contents, files nor layers.

docs/formats.md describes each format byte by byte. A matrix [out, in] is row-major; value = code * scale, with

    f32 f16 bf16   the values themselves
    fp8-b128       float8 e4m3, a scale for each block of 128 x 128; blocks at the edges may be partial
    int8           one signed byte
    int4           two to a byte, even column in the low nibble, stored code + 8
    int2           four to a byte, lowest bits first, stored code + 2
    mxfp4          two float4 (e2m1) to a byte, even column in the low nibble, a scale 2^(byte - 127) for 32 columns
    int3-g64       64 columns in 24 bytes: 16 with the low two bits, 8 with the high bit, stored code + 4

An integer format has one scale for a row ("int4-row") or for each group of columns of it ("int4-g64").
"""

import math
from dataclasses import dataclass

import torch

BLOCK = 128  # rows and columns of an fp8 block
GROUP = 64  # columns of a group, unless a snapshot says otherwise
GROUPS = (16, 32, 48, 64, 96, 128, 192, 256)
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
SCALE_DTYPES = DTYPES | {"U8": torch.uint8}


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The byte layout of a weight matrix."""

    name: str
    bits: int  # of a code
    group: int = 0  # columns that share a scale; 0 = all of a row
    dtype: torch.dtype | None = None  # of a float format that torch has

    @property
    def is_packed(self) -> bool:
        """True for formats of few bits, which are not quantized again."""
        return self.dtype is None

    @property
    def is_integer(self) -> bool:
        return self.is_packed and self is not MXFP4

    @property
    def has_scales(self) -> bool:
        return self.is_packed or self is FP8

    @property
    def max_code(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def row_bytes(self, columns: int) -> int:
        """Bytes of one weight row, without its scales."""
        if self.bits == 3:
            return 24 * -(-columns // 64)
        return -(-columns * self.bits // 8)

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """[rows, groups], or [row blocks, column blocks]."""
        if self is FP8:
            return -(-rows // BLOCK), -(-columns // BLOCK)
        return rows, -(-columns // self.group) if self.group else 1

    def num_bytes(self, rows: int, columns: int, scale_bytes: int = 4) -> int:
        """Bytes of a matrix with its scales of `scale_bytes` bytes each; those of MXFP4 have one."""
        scale_bytes = 1 if self is MXFP4 else scale_bytes
        scales = scale_bytes * math.prod(self.scale_shape(rows, columns)) if self.has_scales else 0
        return rows * self.row_bytes(columns) + scales

    def __str__(self) -> str:
        return self.name


FLOATS = {stored: WeightFormat(stored.lower(), 8 * dtype.itemsize, dtype=dtype) for stored, dtype in DTYPES.items()}
FP8 = WeightFormat("fp8-b128", 8, BLOCK, torch.float8_e4m3fn)
MXFP4 = WeightFormat("mxfp4", 4, 32)
INTEGERS = (
    *(WeightFormat(f"int{bits}-row", bits) for bits in (8, 4, 2)),
    *(WeightFormat(f"int{bits}-g{group}", bits, group) for bits in (8, 4, 2) for group in GROUPS),
    WeightFormat("int3-g64", 3, 64),
)
FORMATS = {fmt.name: fmt for fmt in (*FLOATS.values(), FP8, MXFP4, *INTEGERS)}


def integer_format(bits: int) -> WeightFormat:
    """The format that quantizing to 8, 4, 3 or 2 bits gives."""
    return FORMATS[f"int{bits}-g{GROUP}"]
