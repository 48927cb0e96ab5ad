"""Codes into bytes and back: the bit layouts of the quantized formats, and dequantization to float32."""

import torch
from torch import Tensor

from kernels.formats import BLOCK, MXFP4, WeightFormat

FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# The two values of a byte side by side as one number of eight bytes: the look-up takes a quarter of the time.
FLOAT4_PAIRS = torch.tensor([[FLOAT4[i & 15], FLOAT4[i >> 4]] for i in range(256)]).view(torch.float64).flatten()
FLOAT4_SCALES = torch.tensor([2.0 ** (byte - 127) for byte in range(255)] + [torch.nan])


def pack_codes(groups: Tensor, columns: int, fmt: WeightFormat) -> Tensor:
    """Codes as floats [rows, groups, group] -> uint8 [rows, row bytes]. Padding decodes to zero."""
    codes = groups.flatten(1)[:, :columns].to(torch.int8).view(torch.uint8)  # [rows, columns]
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


def pack_bits(values: Tensor, bits: int) -> Tensor:
    """uint8 [..., n], `bits` bits each -> [..., n * bits / 8], the first value in the lowest bits."""
    parts = values.unflatten(-1, (-1, 8 // bits))
    packed = parts[..., 0].clone()
    for i in range(1, 8 // bits):
        packed |= parts[..., i] << (bits * i)
    return packed


def unpack_codes(data: Tensor, fmt: WeightFormat) -> Tensor:
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


def unpack_bits(data: Tensor, bits: int, out: Tensor) -> None:
    """uint8 [..., n] into float32 `out` [..., n, 8 / bits], the lowest bits first."""
    for i in range(8 // bits):
        out[..., i] = data >> (bits * i) & (2**bits - 1)


def dequantize(data: Tensor, scales: Tensor, fmt: WeightFormat, columns: int) -> Tensor:
    """uint8 [rows, row bytes] and scales [rows, groups] -> float32 [rows, columns]."""
    values = unpack_codes(data, fmt)[:, :columns]
    group = fmt.group or columns
    scales = FLOAT4_SCALES[scales.int()] if fmt is MXFP4 else scales.float()
    whole = columns // group
    values[:, : whole * group].unflatten(1, (whole, group)).mul_(scales[:, :whole, None])
    if whole * group < columns:
        values[:, whole * group :] *= scales[:, -1:]
    return values


def dequantize_fp8(data: Tensor, scales: Tensor, first: int = 0) -> Tensor:
    """fp8 weight rows `first` .. of a matrix, [rows, columns] -> float32; scales [row blocks, column blocks] of all."""
    values = data.float()
    rows = scales[torch.arange(first, first + len(data)) // BLOCK].float()
    for at in range(0, values.shape[1], BLOCK):
        values[:, at : at + BLOCK] *= rows[:, at // BLOCK, None]
    return values
