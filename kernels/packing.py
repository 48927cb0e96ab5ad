"""Weight formats: their ids, how their bytes are packed, and back. Knows arrays, not files or layers.

A format stored as it is: BF16, F16, F32 (row-major [out, in]). A packed format has `bits` 8, 4 or 2 and one F32 scale
for each group of 64 columns of a row; value = q * scale, with

    q8  one signed byte
    q4  two to a byte, even column in the low nibble, stored q + 8
    q2  four to a byte, lowest bits first, stored q + 2

scale = max(max|w| / qmax, 1e-8), qmax = 2^(bits-1) - 1, q = round half to even(w / scale) clipped to [-qmax-1, qmax]:
the formula of the C engine, for each group instead of each row.
"""

from dataclasses import dataclass

import torch

GROUP = 64
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
PACK_BYTES = 16 << 20  # float32 rows that are packed at once; packing takes about four times that for a moment


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix [out, in] as it lies in memory: `data` in a float dtype, or packed bytes with `scales`."""

    data: torch.Tensor  # [out, in] float, or [out, row bytes] int8 / uint8
    columns: int
    bits: int = 16  # 16 means as stored
    scales: torch.Tensor | None = None  # [out, groups] float32 when packed

    @property
    def rows(self):
        return self.data.shape[0]

    @property
    def num_bytes(self):
        scales = 0 if self.scales is None else self.scales.numel() * 4
        return self.data.numel() * self.data.element_size() + scales

    def widen(self, start=0, stop=None):
        """Rows start..stop as float32 [rows, columns]."""
        data = self.data[start:stop]
        if self.bits == 16:
            return data.float()
        return unpack(data, self.scales[start:stop], self.bits, self.columns)


def row_bytes(bits, columns):
    """Bytes of one packed row, without its scales."""
    return -(-columns * bits // 8)


def num_groups(columns):
    return -(-columns // GROUP)


def packed_bytes(bits, rows, columns):
    """Bytes of a packed matrix with its scales, a multiple of 4."""
    return -(-rows * (row_bytes(bits, columns) + 4 * num_groups(columns)) // 4) * 4


def packed_view(buffer, bits, rows, columns):
    """A packed Weight over the first packed_bytes of a uint8 buffer: scales, then data. Nothing is written yet."""
    scale_bytes, data_bytes = rows * num_groups(columns) * 4, rows * row_bytes(bits, columns)
    scales = buffer[:scale_bytes].view(torch.float32).view(rows, -1)
    data = buffer[scale_bytes : scale_bytes + data_bytes].view(torch.int8 if bits == 8 else torch.uint8)
    return Weight(data.view(rows, -1), columns, bits, scales)


def empty_packed(bits, rows, columns):
    """A packed Weight in memory of its own, not written yet."""
    return packed_view(torch.empty(packed_bytes(bits, rows, columns), dtype=torch.uint8), bits, rows, columns)


def pack(matrix, bits):
    """float [out, in] -> Weight in `bits` bits."""
    weight = empty_packed(bits, *matrix.shape)
    pack_rows(weight, 0, matrix)
    return weight


def row_blocks(rows, columns):
    """(start, stop) of the rows that are packed at once."""
    step = max(1, PACK_BYTES // (4 * columns))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def pack_rows(weight, start, matrix):
    """Quantise float rows [n, in] into rows start .. start + n of a packed Weight; a last group may be shorter."""
    rows, columns = matrix.shape
    bits, qmax, groups = weight.bits, 2 ** (weight.bits - 1) - 1, num_groups(columns)
    padded = torch.zeros(rows, groups * GROUP)
    padded[:, :columns] = matrix
    padded = padded.view(rows, groups, GROUP)
    scales = (padded.abs().amax(-1) / qmax).clamp_min(1e-8)
    q = (padded / scales[..., None]).round_().clamp_(-qmax - 1, qmax).view(rows, -1)[:, :columns].to(torch.int8)
    weight.scales[start : start + rows] = scales
    if bits == 8:
        weight.data[start : start + rows] = q
        return
    per_byte = 8 // bits
    width = row_bytes(bits, columns) * per_byte
    codes = torch.full((rows, width), 2 ** (bits - 1), dtype=torch.uint8)  # the padding decodes to zero
    codes[:, :columns] += q.view(torch.uint8)  # modulo 256, so a negative q comes out right
    codes = codes.view(rows, -1, per_byte)
    packed = codes[..., 0]
    for i in range(1, per_byte):
        packed = packed | codes[..., i] << (bits * i)
    weight.data[start : start + rows] = packed


def unpack(data, scales, bits, columns):
    """Packed rows -> float32 [rows, columns]."""
    if bits == 8:
        q = data
    else:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        codes = (data[..., None] >> shifts) & (2**bits - 1)
        q = codes.flatten(1)[:, :columns].to(torch.int8) - 2 ** (bits - 1)
    return q.float() * scales.repeat_interleave(GROUP, dim=1)[:, :columns]
