"""Weight formats: their names, how their bytes are packed, and back. Knows arrays, not files or layers.

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

from dataclasses import dataclass, field, replace

import torch

BLOCK = 128  # rows and columns of an fp8 block
GROUP = 64  # columns of a group, unless a snapshot says otherwise
GROUPS = (16, 32, 48, 64, 96, 128, 192, 256)
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
SCALE_DTYPES = DTYPES | {"U8": torch.uint8}
FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# The two values of a byte side by side, as one number of eight bytes: looked up in a quarter of the time.
FLOAT4_PAIRS = torch.tensor([[FLOAT4[i & 15], FLOAT4[i >> 4]] for i in range(256)]).view(torch.float64).flatten()
FLOAT4_SCALES = torch.tensor([2.0 ** (byte - 127) for byte in range(255)] + [torch.nan])
PACK_BYTES = 16 << 20  # float32 rows that are read and packed at once
CACHE_BYTES = 1 << 20  # of them, what the arithmetic works on at once: a few copies of it stay in the processor's cache
MIN_SCALE = {torch.float32: 1e-8, torch.float16: 2.0**-24}  # of F16 the smallest number above zero
FP8_MAX = 448.0
# How scales are searched (best_scales): where the furthest value of a group falls, as a share of the far end. Above 1
# it is clipped and the others get finer steps. QUICK is for weights that are packed as they are read.
SEARCH = (0.9, 1.0, 1.1, 1.2)
QUICK = (1.0,)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One way a matrix lies in bytes."""

    name: str
    bits: int  # of a code
    group: int = 0  # columns that share a scale; 0 = all of a row
    dtype: torch.dtype | None = None  # of a float format that torch has

    @property
    def is_packed(self):
        """Whether a matrix is of few bits as it is, and not packed again."""
        return self.dtype is None

    @property
    def is_integer(self):
        return self.is_packed and self is not MXFP4

    @property
    def has_scales(self):
        return self.is_packed or self is FP8

    def row_bytes(self, columns):
        """Bytes of one row, without its scales."""
        if self.bits == 3:
            return 24 * -(-columns // 64)
        return -(-columns * self.bits // 8)

    def scale_shape(self, rows, columns):
        """[rows, groups], or [row blocks, column blocks]."""
        if self is FP8:
            return -(-rows // BLOCK), -(-columns // BLOCK)
        return rows, -(-columns // self.group) if self.group else 1

    def num_bytes(self, rows, columns, scale_bytes=4):
        """Bytes of a matrix with its scales, of `scale_bytes` bytes each; those of MXFP4 have one."""
        scale_bytes = 1 if self is MXFP4 else scale_bytes
        scales = scale_bytes * torch.Size(self.scale_shape(rows, columns)).numel() if self.has_scales else 0
        return rows * self.row_bytes(columns) + scales

    def __str__(self):
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


def grouped(bits):
    """The format that packing to 8, 4, 3 or 2 bits gives."""
    return FORMATS[f"int{bits}-g{GROUP}"]


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix [out, in] as it lies in memory.

    `exact` keeps the activations it is multiplied with in float32; without it an integer format rounds them
    (kernels/reference.round_activations).
    """

    data: torch.Tensor  # [out, in] of a float dtype, or [out, row bytes] uint8
    columns: int
    format: WeightFormat
    scales: torch.Tensor | None = None  # format.scale_shape, float32 or float16
    exact: bool = False
    native: object = field(default=None, compare=False, repr=False)  # kernels/native.py keeps its view of it here

    @property
    def rows(self):
        return self.data.shape[0]

    @property
    def num_bytes(self):
        scales = 0 if self.scales is None else self.scales.numel() * self.scales.element_size()
        return self.data.numel() * self.data.element_size() + scales

    def widen(self, start=0, stop=None):
        """Rows start .. stop as float32 [rows, columns]."""
        data = self.data[start:stop]
        if not self.format.has_scales:
            return data.float()
        if self.format is FP8:
            return unpack_blocks(data, self.scales, start)
        return unpack(data, self.scales[start:stop], self.format, self.columns)

    def take(self, rows):
        """Some rows, by index [T], as float32 [T, columns]."""
        if self.format is FP8:
            return torch.cat([self.widen(row, row + 1) for row in rows.tolist()])
        if not self.format.has_scales:
            return self.data[rows].float()
        return unpack(self.data[rows], self.scales[rows], self.format, self.columns)


@dataclass(frozen=True, slots=True)
class RowSelection:
    """The rows of a matrix that lies in a larger one of `rows` rows: first, first + step, and so on. is_transposed:
    the larger one lies as [in, out], in a float format."""

    first: int
    step: int
    rows: int
    is_transposed: bool = False

    def after(self, start):
        """Without the rows before `start`."""
        return replace(self, first=self.first + start * self.step)

    def pick(self, matrix, count):
        """`count` rows out of the larger matrix, a view."""
        return matrix[self.first :: self.step][:count]


def view_weight(
    buffer, fmt, rows, columns, data_at, scales_at=None, scale_dtype=torch.float32, exact=False, within=None
):
    """A Weight over a uint8 buffer whose data and scales, or those of the matrix it is within, begin at the given
    bytes. Nothing is read or written."""
    within = within or RowSelection(0, 1, rows)
    data = buffer[data_at : data_at + within.rows * fmt.row_bytes(columns)]
    if fmt.dtype:
        data = data.view(fmt.dtype)
    data = data.view(columns, -1).T if within.is_transposed else data.view(within.rows, -1)
    scales = None
    if fmt.has_scales:
        shape = torch.Size(fmt.scale_shape(within.rows, columns))
        scales = buffer[scales_at : scales_at + shape.numel() * scale_dtype.itemsize].view(scale_dtype).view(shape)
        scales = scales if fmt is FP8 else within.pick(scales, rows)
    return Weight(within.pick(data, rows), columns, fmt, scales, exact)


# ---------------------------------------------------------------------------------------------------------------------
# Packing


def packed_bytes(fmt, rows, columns):
    """Bytes of a matrix packed in memory, with its float32 scales: a multiple of 4."""
    return -(-fmt.num_bytes(rows, columns) // 4) * 4


def packed_view(buffer, fmt, rows, columns, exact=False):
    """A Weight over the first packed_bytes of a uint8 buffer: scales, then data. Nothing is written yet."""
    scale_bytes = 4 * torch.Size(fmt.scale_shape(rows, columns)).numel()
    return view_weight(buffer, fmt, rows, columns, scale_bytes, 0, exact=exact)


def empty_packed(fmt, rows, columns, exact=False):
    """A packed Weight in memory of its own, not written yet."""
    buffer = torch.empty(packed_bytes(fmt, rows, columns), dtype=torch.uint8)
    return packed_view(buffer, fmt, rows, columns, exact)


def pack(matrix, fmt):
    """float [out, in] -> Weight in an integer format."""
    weight = empty_packed(fmt, *matrix.shape)
    pack_rows(weight, 0, matrix)
    return weight


def row_blocks(rows, columns):
    """(start, stop) of the rows that are packed at once: whole blocks of fp8."""
    step = max(1, PACK_BYTES // (4 * columns * BLOCK)) * BLOCK
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def pack_rows(weight, start, matrix):
    """Quantise float rows [n, in] into rows start .. start + n of a Weight in an integer format."""
    stop = start + len(matrix)
    weight.data[start:stop], weight.scales[start:stop] = quantise(matrix, weight.format)


def quantise(matrix, fmt, scale_dtype=torch.float32, steps=QUICK):
    """float [out, in] -> (data uint8 [out, row bytes], scales [out, groups]) in an integer format.

    code = round half to even(w / scale), clipped; the scale is that of best_scales(steps). With 8 bits, or without
    steps, it is the formula of the C engine: max(max|w| / qmax, 1e-8), qmax = 2^(bits-1) - 1. A last group may be
    shorter.
    """
    rows, columns = matrix.shape
    data = torch.empty(rows, fmt.row_bytes(columns), dtype=torch.uint8)
    scales = torch.empty(fmt.scale_shape(rows, columns), dtype=scale_dtype)
    high = 2 ** (fmt.bits - 1) - 1
    for block in cache_blocks(rows, columns):
        groups = in_groups(matrix[block], fmt)
        if steps and fmt.bits < 8:
            chosen = best_scales(groups, high, scale_dtype, steps)
        else:
            chosen = at_least(groups.abs().amax(-1, keepdim=True) / high, scale_dtype)
        scales[block] = chosen[..., 0]
        data[block] = pack_codes(encode(groups, chosen, high), columns, fmt)
    return data, scales


def requantise(matrix, scales, fmt):
    """float [out, in] -> data uint8 [out, row bytes], with scales that were chosen before."""
    rows, columns = matrix.shape
    data = torch.empty(rows, fmt.row_bytes(columns), dtype=torch.uint8)
    for block in cache_blocks(rows, columns):
        codes = encode(in_groups(matrix[block], fmt), scales[block, :, None], 2 ** (fmt.bits - 1) - 1)
        data[block] = pack_codes(codes, columns, fmt)
    return data


def cache_blocks(rows, columns):
    """The rows of a matrix in slices that the arithmetic works on one after the other."""
    step = max(1, CACHE_BYTES // (4 * columns))
    return [slice(start, start + step) for start in range(0, rows, step)]


def in_groups(matrix, fmt):
    """float [rows, columns] -> float32 [rows, groups, group], filled with zeros."""
    rows, columns = matrix.shape
    group = fmt.group or columns
    padded = torch.zeros(rows, fmt.scale_shape(rows, columns)[1] * group)
    padded[:, :columns] = matrix
    return padded.view(rows, -1, group)


def encode(values, scales, high):
    """values [..., group], scales [..., 1] -> codes as floats, round half to even, clipped to [-high - 1, high]."""
    return (values / scales.float()).round_().clamp_(-high - 1, high)


def at_least(scales, dtype):
    """Scales [..., 1] in the given dtype, none closer to zero than the smallest it can hold."""
    least = MIN_SCALE[dtype]
    return torch.where(scales.abs() < least, least, scales).to(dtype)


def best_scales(groups, high, dtype, steps):
    """groups [..., group] -> scales [..., 1], chosen to lower the squared error of each group.

    Codes reach one further down than up, so the value that is furthest from zero goes to the far end, whatever its
    sign: scales may be negative. Of the scales that put it there, or a `step` further, the best is taken, and then
    moved to where the error is least for the codes it gave (least squares: sum of w * code / sum of code^2).
    """
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    best, least = None, None
    for step in steps:
        scales = at_least(extreme / (-(high + 1) * step), torch.float32)
        codes = encode(groups, scales, high)
        error = torch.addcmul(groups, codes, scales, value=-1).square_().sum(-1, keepdim=True)
        if best is None:
            best, least = scales, error
        else:
            better = error < least
            best, least = torch.where(better, scales, best), torch.where(better, error, least)
    codes = encode(groups, best, high)
    weight = codes.square().sum(-1, keepdim=True)
    fitted = (groups * codes).sum(-1, keepdim=True) / weight.clamp_min(1e-30)
    return at_least(torch.where(weight > 0, fitted, best), dtype)


def pack_codes(groups, columns, fmt):
    """Codes as floats [rows, groups, group] -> uint8 [rows, row bytes]. What pads a row decodes to zero."""
    codes = groups.flatten(1)[:, :columns].to(torch.int8).view(torch.uint8)
    rows = len(codes)
    if fmt.bits == 8:
        return codes
    width = fmt.row_bytes(columns) * 8 // fmt.bits
    padded = torch.full((rows, width), 2 ** (fmt.bits - 1), dtype=torch.uint8)
    padded[:, :columns] += codes  # modulo 256, so a negative code comes out right
    if fmt.bits == 3:
        padded = padded.view(rows, -1, 64)
        return torch.cat([pack_bits(padded & 3, 2), pack_bits(padded >> 2, 1)], dim=-1).view(rows, -1)
    return pack_bits(padded, fmt.bits)


def pack_bits(values, bits):
    """uint8 [..., n] of so many bits each -> [..., n * bits / 8], the first value in the lowest bits."""
    parts = values.unflatten(-1, (-1, 8 // bits))
    packed = parts[..., 0].clone()
    for i in range(1, 8 // bits):
        packed |= parts[..., i] << (bits * i)
    return packed


# ---------------------------------------------------------------------------------------------------------------------
# Unpacking


def unpack(data, scales, fmt, columns):
    """Packed rows and their scales -> float32 [rows, columns]."""
    values = unpack_codes(data, fmt)[:, :columns]
    group = fmt.group or columns
    scales = FLOAT4_SCALES[scales.int()] if fmt is MXFP4 else scales.float()
    whole = columns // group
    values[:, : whole * group].unflatten(1, (whole, group)).mul_(scales[:, :whole, None])
    if whole * group < columns:
        values[:, whole * group :] *= scales[:, -1:]
    return values


def unpack_codes(data, fmt):
    """uint8 [rows, row bytes] -> codes as float32 [rows, columns and padding]."""
    rows = len(data)
    if fmt is MXFP4:
        return FLOAT4_PAIRS.index_select(0, data.flatten().int()).view(torch.float32).view(rows, -1)
    if fmt.bits == 8:
        return data.view(torch.int8).float()
    codes = torch.empty(rows, data.shape[1] * 8 // fmt.bits)
    if fmt.bits == 3:
        low, high = data.view(rows, -1, 24).split([16, 8], dim=-1)
        unpack_bits(low, 2, codes.view(rows, -1, 16, 4))
        bits = torch.empty(rows, high.shape[1], 8, 8)
        unpack_bits(high, 1, bits)
        codes.add_(bits.view(rows, -1), alpha=4)
    else:
        unpack_bits(data, fmt.bits, codes.view(rows, -1, 8 // fmt.bits))
    return codes.sub_(2 ** (fmt.bits - 1))


def unpack_bits(data, bits, out):
    """uint8 [..., n] into float32 `out` [..., n, 8 / bits], the lowest bits first."""
    for i in range(8 // bits):
        out[..., i] = data >> (bits * i) & (2**bits - 1)


def unpack_blocks(data, scales, first=0):
    """fp8 rows `first` .. of a matrix, [rows, columns] -> float32; scales [row blocks, column blocks] of all of it."""
    values = data.float()
    rows = scales[torch.arange(first, first + len(data)) // BLOCK].float()
    for at in range(0, values.shape[1], BLOCK):
        values[:, at : at + BLOCK] *= rows[:, at // BLOCK, None]
    return values


def quantise_blocks(matrix):
    """float [out, in] -> (fp8 [out, in], float32 scales of the blocks); the largest value of a block becomes 448."""
    rows, columns = matrix.shape
    down, across = FP8.scale_shape(rows, columns)
    padded = torch.zeros(down * BLOCK, across * BLOCK)
    padded[:rows, :columns] = matrix
    blocks = padded.view(down, BLOCK, across, BLOCK)
    scales = (blocks.abs().amax((1, 3)) / FP8_MAX).clamp_min(1e-8)
    blocks = (blocks / scales[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX)
    return blocks.view(padded.shape)[:rows, :columns].to(torch.float8_e4m3fn), scales
