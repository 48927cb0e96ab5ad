"""The weight format of each matrix of a snapshot, and where its bytes lie. kernels/formats.py defines the formats.

A matrix X is stored as

    X of dtype BF16, F16 or F32                      as published
    X of dtype F8_E4M3 with X_scale_inv              FP8 checkpoints, blocks of 128 x 128
    X of dtype U8 with X.qs                          containers; X is flat, config.json gives [out, in]
    kv_b in two tensors                              GGUF (TensorIndex.kv_parts), put together when it is read

or inside a larger tensor (snapshot/fused.py).

A container declares its formats in the metadata of its files (FORMATS_KEY). Without it, as in containers of the C
engine, byte counts identify them, in the order in which the C engine tries.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NoReturn

from errors import Refused, shorten, show
from kernels.formats import BLOCK, FLOATS, FORMATS, FP8, GROUPS, MXFP4, WeightFormat
from kernels.weight import RowSelection
from snapshot.foreign import ADVICE
from snapshot.index import TensorEntry, TensorIndex

SCALES = ".qs"
FP8_SCALES = "_scale_inv"
E8_COLUMNS = 256
E8_BYTES = 98

# Formats that byte counts may mean, the first match first: group sizes other than 64 exist with 4 bits alone.
INFERRED_FORMATS = [FORMATS[name] for name in "int8-row int8-g64 int4-row int2-row int2-g64 int3-g64".split()]
INFERRED_FORMATS += [FORMATS[f"int4-g{group}"] for group in GROUPS]


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A matrix in the files: format and byte ranges of data and scales, with `selection` those of the larger matrix."""

    name: str
    format: WeightFormat
    rows: int
    columns: int
    data: TensorEntry
    scales: TensorEntry | None = None
    selection: RowSelection | None = None
    kv_parts: tuple[TensorEntry, TensorEntry] | None = None  # the two tensors of kv_b; `data` is the first
    first_row: int = 0  # of the rows of kv_parts

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        """Data, then scales if there are any."""
        if self.kv_parts:
            return self.kv_parts
        return (self.data,) if self.scales is None else (self.data, self.scales)

    @property
    def num_bytes(self) -> int:
        """Bytes in the files, and in memory if kept as stored."""
        if self.kv_parts:
            return self.format.num_bytes(self.rows, self.columns)
        return sum(entry.num_bytes for entry in self.entries)

    def slice_rows(self, start: int, stop: int) -> "StoredWeight":
        """Weight rows start .. stop; of an FP8 matrix start must begin a block."""
        if self.kv_parts:
            return replace(self, rows=stop - start, first_row=self.first_row + start)
        if self.selection:
            return replace(self, rows=stop - start, selection=self.selection.skip(start))
        scales, rows = self.scales, stop - start
        if scales is not None:
            unit = BLOCK if self.format is FP8 else 1
            row_bytes = scales.num_bytes // self.format.scale_shape(self.rows, self.columns)[0]
            num_scale_rows = self.format.scale_shape(rows, self.columns)[0]
            scales = slice_bytes(scales, start // unit * row_bytes, num_scale_rows * row_bytes)
        row_bytes = self.format.row_bytes(self.columns)
        data = slice_bytes(self.data, start * row_bytes, rows * row_bytes)
        return replace(self, rows=rows, data=data, scales=scales)


def slice_bytes(entry: TensorEntry, start: int, num_bytes: int) -> TensorEntry:
    """A byte range of a tensor; its shape means nothing."""
    return replace(entry, offset=entry.offset + start, num_bytes=num_bytes, shape=())


def find_stored_weight(index: TensorIndex, name: str, shape: tuple[int, ...]) -> StoredWeight:
    """The matrix `name` of `shape` [out, in] in whatever format it is stored. Refused if none fits."""
    rows, columns = shape
    if name in index.kv_parts:
        keys, values = index.kv_parts[name]
        fmt = entry_format(index, keys)
        fmt = fmt if entry_format(index, values) is fmt else FLOATS["F32"]
        return StoredWeight(name, fmt, rows, columns, keys, kv_parts=(keys, values))
    if name + SCALES in index:
        return find_packed_weight(index, name, rows, columns)
    dtype = index.find_entry(name).dtype
    if dtype not in FLOATS:
        index.refuse_quantized(name)
    if dtype == "F8_E4M3":
        return find_fp8_weight(index, name, rows, columns)
    entry = index.find_checked(name, shape, index.matrix_dtypes)
    return StoredWeight(name, entry_format(index, entry), rows, columns, entry)


def entry_format(index: TensorIndex, entry: TensorEntry) -> WeightFormat:
    """The format of a matrix without scales beside it. Blocks of a GGUF get theirs here once kernels/formats.py has
    them; until then they are refused by name."""
    if entry.dtype not in FLOATS:
        index.refuse_blocks(entry)
    return FLOATS[entry.dtype]


def find_fp8_weight(index: TensorIndex, name: str, rows: int, columns: int) -> StoredWeight:
    """float8 e4m3 with block scales, as in published FP8 checkpoints."""
    if name + FP8_SCALES not in index:
        raise index.incomplete(f"tensor {name} is FP8 and its scales {name + FP8_SCALES} are missing")
    scales = index.find_entry(name + FP8_SCALES)
    if scales.dtype in ("F8_E8M0", "U8"):
        raise Refused(f"{scales.path}: tensor {scales.name} holds UE8M0 scales, which this engine does not read")
    num_scales = math.prod(scales.shape)
    if num_scales in (1, rows) and num_scales != math.prod(FP8.scale_shape(rows, columns)):
        each = "the whole matrix" if num_scales == 1 else "each row (channel)"
        problem = f"is FP8 with a scale for {each}, this engine reads a scale for each block of 128 x 128"
        raise Refused(f"{scales.path}: tensor {name} {problem}; {ADVICE}")
    scales = index.find_checked(scales.name, FP8.scale_shape(rows, columns))
    data = index.find_checked(name, (rows, columns), ("F8_E4M3",))
    return StoredWeight(name, FP8, rows, columns, data, scales)


def find_packed_weight(index: TensorIndex, name: str, rows: int, columns: int) -> StoredWeight:
    """Packed bytes X with scales X.qs; the format is declared by the file or inferred from byte counts."""
    data, scales = index.find_entry(name), index.find_entry(name + SCALES)

    def refuse(problem: str) -> NoReturn:
        raise Refused(f"{data.path}: tensor {name} {problem}; {index.config_name} asks for {rows} x {columns} weights")

    if data.dtype not in ("U8", "I8"):
        refuse(f"has scales {name + SCALES} but dtype {shorten(data.dtype)}, expected U8")
    if len(data.shape) > 1 and data.shape[0] != rows:
        refuse(f"has shape {show(list(data.shape))}")
    num_scales = math.prod(scales.shape)
    declared = index.declared_format(name)
    if declared is not None:
        if declared not in FORMATS or not FORMATS[declared].has_scales:
            refuse(f"is declared as {show(declared)}, which is no packed format this engine reads")
        fmt = FORMATS[declared]
        if data.num_bytes != rows * fmt.row_bytes(columns) or num_scales != math.prod(fmt.scale_shape(rows, columns)):
            refuse(f"is declared as {fmt} and has {data.num_bytes} bytes and {num_scales} scales, which do not fit")
    else:
        fmt = infer_format(data.num_bytes, num_scales, scales.dtype, rows, columns, refuse)
    dtypes = ("F32",) if fmt is FP8 else ("U8",) if fmt is MXFP4 else ("F32", "F16")
    if scales.dtype not in dtypes:
        refuse(f"has scales of dtype {shorten(scales.dtype)}, {fmt} goes with {' or '.join(dtypes)}")
    return StoredWeight(name, fmt, rows, columns, data, scales)


def infer_format(
    num_bytes: int, num_scales: int, scale_dtype: str, rows: int, columns: int, refuse: Callable[[str], NoReturn]
) -> WeightFormat:
    """Byte and scale counts -> WeightFormat. The bytes decide the number of bits, then the scales the group size."""
    if num_scales == 1 and columns % E8_COLUMNS == 0 and num_bytes == rows * columns // E8_COLUMNS * E8_BYTES:
        refuse("is in the E8 lattice format, which this engine does not read")
    for bits in (8, 4, 2, 3):
        candidates = [fmt for fmt in INFERRED_FORMATS if fmt.bits == bits]
        if num_bytes != rows * candidates[0].row_bytes(columns):
            continue
        for fmt in (*candidates, FP8) if bits == 8 else candidates:
            if num_scales == math.prod(fmt.scale_shape(rows, columns)):
                if fmt is FP8 and scale_dtype in ("F8_E8M0", "U8"):
                    refuse("has UE8M0 scales, which this engine does not read")
                return fmt
        refuse(f"has the bytes of {bits} bits a weight but {num_scales} scales, which fit no group size")
    refuse(f"has {num_bytes} bytes, which fit no format this engine reads")
