"""Float matrices -> quantized weights: the choice of scales, rounding to codes, fp8 blocks."""

import torch
from torch import Tensor

from kernels.formats import BLOCK, FP8, WeightFormat
from kernels.packing import pack_codes
from kernels.weight import Weight, packed_bytes, packed_view

ROWS_BYTES = 16 << 20  # float32 weight rows that are read and quantized at once
CACHE_BYTES = 1 << 20  # of them, what the arithmetic works on at once: a few copies of it stay in the processor's cache
MIN_SCALE = {torch.float32: 1e-8, torch.float16: 2.0**-24}  # of F16 the smallest number above zero
FP8_MAX = 448.0
# Steps of search_scales: where the extreme value of a group falls, as a share of the largest code. Above 1 it is
# clipped and the others get finer steps. QUICK_STEPS is for weights that are quantized at load.
SEARCH_STEPS = (0.9, 1.0, 1.1, 1.2)
QUICK_STEPS = (1.0,)


def quantize(
    matrix: Tensor, fmt: WeightFormat, scale_dtype: torch.dtype = torch.float32, steps: tuple[float, ...] = QUICK_STEPS
) -> tuple[Tensor, Tensor]:
    """float [out, in] -> (data uint8 [out, row bytes], scales [out, groups]) in an integer format.

    code = round half to even(w / scale), clipped; the scale is that of search_scales(steps). With 8 bits, or without
    steps, it is the formula of the C engine: max(max|w| / qmax, 1e-8), qmax = 2^(bits-1) - 1. A last group may be
    shorter.
    """
    rows, columns = matrix.shape
    data = torch.empty(rows, fmt.row_bytes(columns), dtype=torch.uint8)
    scales = torch.empty(fmt.scale_shape(rows, columns), dtype=scale_dtype)
    for block in cache_blocks(rows, columns):
        groups = split_groups(matrix[block], fmt)
        if steps and fmt.bits < 8:
            block_scales = search_scales(groups, fmt.max_code, scale_dtype, steps)
        else:
            block_scales = clamp_scales(groups.abs().amax(-1, keepdim=True) / fmt.max_code, scale_dtype)
        scales[block] = block_scales[..., 0]
        data[block] = pack_codes(round_to_codes(groups, block_scales, fmt.max_code), columns, fmt)
    return data, scales


def quantize_with_scales(matrix: Tensor, scales: Tensor, fmt: WeightFormat) -> Tensor:
    """float [out, in] and scales [out, groups] chosen before -> data uint8 [out, row bytes]."""
    rows, columns = matrix.shape
    data = torch.empty(rows, fmt.row_bytes(columns), dtype=torch.uint8)
    for block in cache_blocks(rows, columns):
        codes = round_to_codes(split_groups(matrix[block], fmt), scales[block, :, None], fmt.max_code)
        data[block] = pack_codes(codes, columns, fmt)
    return data


def quantize_weight(matrix: Tensor, fmt: WeightFormat) -> Weight:
    """float [out, in] -> Weight in an integer format, in memory of its own."""
    buffer = torch.empty(packed_bytes(fmt, *matrix.shape), dtype=torch.uint8)
    weight = packed_view(buffer, fmt, *matrix.shape)
    quantize_rows(weight, 0, matrix)
    return weight


def quantize_rows(weight: Weight, start: int, matrix: Tensor) -> None:
    """Quantize float rows [n, in] into rows start .. start + n of a Weight in an integer format."""
    stop = start + len(matrix)
    assert weight.scales is not None
    weight.data[start:stop], weight.scales[start:stop] = quantize(matrix, weight.format)


def quantize_fp8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """float [out, in] -> (fp8 [out, in], float32 scales of the blocks); the largest value of a block becomes 448."""
    rows, columns = matrix.shape
    down, across = FP8.scale_shape(rows, columns)
    padded = torch.zeros(down * BLOCK, across * BLOCK)
    padded[:rows, :columns] = matrix
    blocks = padded.view(down, BLOCK, across, BLOCK)
    scales = (blocks.abs().amax((1, 3)) / FP8_MAX).clamp_min(1e-8)
    blocks = (blocks / scales[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX)
    return blocks.view(padded.shape)[:rows, :columns].to(torch.float8_e4m3fn), scales


def row_blocks(rows: int, columns: int) -> list[tuple[int, int]]:
    """(start, stop) of the weight rows that are quantized at once: whole blocks of fp8."""
    step = max(1, ROWS_BYTES // (4 * columns * BLOCK)) * BLOCK
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def cache_blocks(rows: int, columns: int) -> list[slice]:
    """Slices of weight rows that fit the processor's cache."""
    step = max(1, CACHE_BYTES // (4 * columns))
    return [slice(start, start + step) for start in range(0, rows, step)]


def split_groups(matrix: Tensor, fmt: WeightFormat) -> Tensor:
    """float [rows, columns] -> float32 [rows, groups, group], padded with zeros."""
    rows, columns = matrix.shape
    group = fmt.group or columns
    padded = torch.zeros(rows, fmt.scale_shape(rows, columns)[1] * group)
    padded[:, :columns] = matrix
    return padded.view(rows, -1, group)


def round_to_codes(values: Tensor, scales: Tensor, high: int) -> Tensor:
    """values [..., group], scales [..., 1] -> codes as floats, round half to even, clipped to [-high - 1, high]."""
    return (values / scales.float()).round_().clamp_(-high - 1, high)


def clamp_scales(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales [..., 1] in the given dtype, none closer to zero than the smallest it can hold."""
    least = MIN_SCALE[dtype]
    return torch.where(scales.abs() < least, least, scales).to(dtype)


def search_scales(groups: Tensor, high: int, dtype: torch.dtype, steps: tuple[float, ...]) -> Tensor:
    """groups [..., group] -> scales [..., 1], chosen to lower the squared error of each group.

    Codes reach one further down than up, so the value that is furthest from zero goes to the lowest code, whatever its
    sign: scales may be negative. Of the scales that put it there, or a `step` further, the best is taken, and then
    moved to where the error is least for the codes it gave (least squares: sum of w * code / sum of code^2).
    """
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    candidates = [clamp_scales(extreme / (-(high + 1) * step), torch.float32) for step in steps]
    best, least = candidates[0], squared_error(groups, candidates[0], high)
    for scales in candidates[1:]:
        error = squared_error(groups, scales, high)
        better = error < least
        best, least = torch.where(better, scales, best), torch.where(better, error, least)
    codes = round_to_codes(groups, best, high)
    weight = codes.square().sum(-1, keepdim=True)
    fitted = (groups * codes).sum(-1, keepdim=True) / weight.clamp_min(1e-30)
    return clamp_scales(torch.where(weight > 0, fitted, best), dtype)


def squared_error(groups: Tensor, scales: Tensor, high: int) -> Tensor:
    """Of quantizing groups [..., group] with scales [..., 1] -> [..., 1]."""
    codes = round_to_codes(groups, scales, high)
    return torch.addcmul(groups, codes, scales, value=-1).square_().sum(-1, keepdim=True)
