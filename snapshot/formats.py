"""Which bytes of a snapshot mean which weight format. The formats themselves are in kernels/formats.py.

A matrix X comes as one of

    X of dtype BF16, F16 or F32                      as published
    X of dtype F8_E4M3 with X_scale_inv              FP8 checkpoints, blocks of 128 x 128
    X of dtype U8 with X.qs                          containers; X flat, so [out, in] comes from config.json

or lies with others in a larger tensor, as snapshot/fused.py says.

A container names its formats in the metadata of its files (FORMATS_KEY). Where it does not, as in all that the C engine
wrote, byte counts tell them apart, in the order in which the C engine tries.
"""

import math
from dataclasses import dataclass, replace

from errors import Refused, shorten, show
from kernels.formats import BLOCK, FLOATS, FORMATS, FP8, GROUPS, MXFP4, WeightFormat
from kernels.weight import RowSelection
from snapshot.index import TensorEntry

SCALES = ".qs"
FP8_SCALES = "_scale_inv"
E8_COLUMNS, E8_BYTES = 256, 98


# What byte counts may be taken for, the first match first: groups of other sizes than 64 exist with 4 bits alone.
UNSTAMPED = [FORMATS[name] for name in ("int8-row int8-g64 int4-row int2-row int2-g64 int3-g64").split()]
UNSTAMPED += [FORMATS[f"int4-g{group}"] for group in GROUPS]


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A matrix in the files: its format, and where its data and scales lie, or those of the larger one it is in."""

    name: str
    format: WeightFormat
    rows: int
    columns: int
    data: TensorEntry
    scales: TensorEntry | None = None
    within: RowSelection | None = None

    @property
    def entries(self):
        """The tensors it consists of."""
        return (self.data,) if self.scales is None else (self.data, self.scales)

    @property
    def num_bytes(self):
        """Bytes in the files, and in memory when kept as stored."""
        return sum(entry.num_bytes for entry in self.entries)

    def slice_rows(self, start, stop):
        """Rows start .. stop alone; of an fp8 matrix start must begin a block."""
        if self.within:
            return replace(self, rows=stop - start, within=self.within.skip(start))
        scales, rows = self.scales, stop - start
        if scales is not None:
            unit = BLOCK if self.format is FP8 else 1
            row_bytes = scales.num_bytes // self.format.scale_shape(self.rows, self.columns)[0]
            num_scale_rows = self.format.scale_shape(rows, self.columns)[0]
            scales = slice_bytes(scales, start // unit * row_bytes, num_scale_rows * row_bytes)
        row_bytes = self.format.row_bytes(self.columns)
        data = slice_bytes(self.data, start * row_bytes, rows * row_bytes)
        return replace(self, rows=rows, data=data, scales=scales)


def slice_bytes(entry, start, num_bytes):
    """Some bytes of a tensor; the shape no longer means anything."""
    return replace(entry, offset=entry.offset + start, num_bytes=num_bytes, shape=())


def find_stored_weight(index, name, shape):
    """The matrix `name` of `shape` [out, in] -> StoredWeight, in whatever format it is. Refused if it is none."""
    if name + SCALES in index:
        return container_weight(index, name, *shape)
    if index.dtype_of(name) == "F8_E4M3":
        return fp8_weight(index, name, *shape)
    entry = index.find_checked(name, shape)
    return StoredWeight(name, FLOATS[entry.dtype], *shape, entry)


def fp8_weight(index, name, rows, columns):
    """float8 e4m3 beside its block scales, as in published FP8 checkpoints."""
    blocks = FP8.scale_shape(rows, columns)
    if name + FP8_SCALES not in index:
        raise index.incomplete(f"tensor {name} is FP8 and its scales {name + FP8_SCALES} are missing")
    scales = index.find_entry(name + FP8_SCALES)
    if scales.dtype in ("F8_E8M0", "U8"):
        raise Refused(f"{scales.path}: tensor {scales.name} holds UE8M0 scales, which this engine does not read")
    scales = index.find_checked(scales.name, blocks)
    return StoredWeight(name, FP8, rows, columns, index.find_checked(name, (rows, columns), ("F8_E4M3",)), scales)


def container_weight(index, name, rows, columns):
    """Packed bytes X with scales X.qs, told apart by a stamp or by how many there are."""
    data, scales = index.find_entry(name), index.find_entry(name + SCALES)

    def refuse(problem):
        raise Refused(f"{data.path}: tensor {name} {problem}; config.json asks for {rows} x {columns} weights")

    if data.dtype not in ("U8", "I8"):
        refuse(f"has scales {name + SCALES} but dtype {shorten(data.dtype)}, expected U8")
    if len(data.shape) > 1 and data.shape[0] != rows:
        refuse(f"has shape {show(list(data.shape))}")
    num_scales = math.prod(scales.shape)
    stamp = index.declared_format(name)
    if stamp is not None:
        if stamp not in FORMATS or not FORMATS[stamp].has_scales:
            refuse(f"is stamped {show(stamp)}, which is no packed format this engine reads")
        fmt = FORMATS[stamp]
        if data.num_bytes != rows * fmt.row_bytes(columns) or num_scales != math.prod(fmt.scale_shape(rows, columns)):
            refuse(f"is stamped {fmt} and has {data.num_bytes} bytes and {num_scales} scales, which do not fit")
    else:
        fmt = infer_format(data.num_bytes, num_scales, scales.dtype, rows, columns, refuse)
    dtypes = ("F32",) if fmt is FP8 else ("U8",) if fmt is MXFP4 else ("F32", "F16")
    if scales.dtype not in dtypes:
        refuse(f"has scales of dtype {shorten(scales.dtype)}, {fmt} goes with {' or '.join(dtypes)}")
    return StoredWeight(name, fmt, rows, columns, data, scales)


def infer_format(num_bytes, num_scales, scale_dtype, rows, columns, refuse):
    """Byte and scale counts -> Format. The first kind whose bytes match it is; then the scales must match too."""
    if num_scales == 1 and columns % E8_COLUMNS == 0 and num_bytes == rows * columns // E8_COLUMNS * E8_BYTES:
        refuse("is in the E8 lattice format, which this engine does not read")
    for bits in (8, 4, 2, 3):
        kind = [fmt for fmt in UNSTAMPED if fmt.bits == bits]
        if num_bytes != rows * kind[0].row_bytes(columns):
            continue
        for fmt in (*kind, FP8) if bits == 8 else kind:
            if num_scales == math.prod(fmt.scale_shape(rows, columns)):
                if fmt is FP8 and scale_dtype in ("F8_E8M0", "U8"):
                    refuse("has UE8M0 scales, which this engine does not read")
                return fmt
        refuse(f"has the bytes of {bits} bits a weight but {num_scales} scales, which fit no group size")
    refuse(f"has {num_bytes} bytes, which fit no format this engine reads")
