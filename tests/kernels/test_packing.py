"""Packed weights: the formats byte by byte, how far a value can move, and how scales are chosen."""

import pytest
import torch

from kernels.formats import DTYPES, FORMATS, FP8, INTEGERS, MXFP4, integer_format
from kernels.packing import dequantize
from kernels.quantize import SEARCH_STEPS, quantize, quantize_fp8, quantize_rows, quantize_weight
from kernels.reference import linear, quantize_activations
from kernels.weight import RowSelection, Weight, packed_bytes, packed_view, view_weight

COLUMNS = [64, 192, 1, 63, 65, 191]


def random(rows, columns, seed=1):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def fp8(matrix):
    data, scales = quantize_fp8(matrix)
    return Weight(data, matrix.shape[1], FP8, scales)


def spread(scales, fmt, columns):
    """One scale for each column."""
    return scales.float().repeat_interleave(fmt.group or columns, dim=1)[:, :columns]


@pytest.mark.parametrize("fmt", INTEGERS, ids=str)
@pytest.mark.parametrize("columns", COLUMNS)
def test_bytes_follow_their_description(fmt, columns):
    """Every value unpacked as docs/formats.md describes it, one at a time."""
    data, scales = quantize(random(3, columns), fmt)
    assert data.shape == (3, fmt.row_bytes(columns)) and scales.shape == fmt.scale_shape(3, columns)
    dequantized = dequantize(data, scales, fmt, columns)
    for row in range(3):
        for column in range(columns):
            code = code_of(data[row].tolist(), fmt.bits, column)
            scale = scales[row, column // fmt.group if fmt.group else 0]
            assert dequantized[row, column] == code * scale


def code_of(row, bits, column):
    """The code of a column, from the bytes of a row."""
    if bits == 8:
        return row[column] - 256 * (row[column] > 127)
    if bits == 4:
        return (row[column // 2] >> 4 * (column % 2) & 15) - 8
    if bits == 2:
        return (row[column // 4] >> 2 * (column % 4) & 3) - 2
    group, within = 24 * (column // 64), column % 64
    low = row[group + within // 4] >> 2 * (within % 4) & 3
    high = row[group + 16 + within // 8] >> within % 8 & 1
    return low + 4 * high - 4


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("columns", COLUMNS)
def test_without_a_search_values_move_by_at_most_half_a_step(bits, columns):
    """The formula of the C engine: the largest value is met, the others are at most half a step away."""
    matrix, fmt = random(5, columns), integer_format(bits)
    data, scales = quantize(matrix, fmt, steps=())
    assert ((dequantize(data, scales, fmt, columns) - matrix).abs() <= spread(scales, fmt, columns) / 2 + 1e-6).all()


def test_known_bytes():
    """Even columns in the low nibble, stored code + 8; two bits stored code + 2, lowest first."""
    row = torch.tensor([[7.0, -7.0, 3.0, 0.0]])
    data, scales = quantize(row, integer_format(4), steps=())
    assert data.tolist() == [[15 | 1 << 4, 11 | 8 << 4]] and scales.tolist() == [[1.0]]
    data, scales = quantize(row, integer_format(8))
    assert data.view(torch.int8).tolist() == [[127, -127, 54, 0]] and scales.tolist() == [[pytest.approx(7 / 127)]]
    data, _ = quantize(torch.tensor([[1.0, -1.0, 0.0, 1.0]]), integer_format(2), steps=())
    assert data.tolist() == [[3 | 1 << 2 | 2 << 4 | 3 << 6]]


@pytest.mark.parametrize(("bits", "share"), [(4, 0.75), (3, 0.55), (2, 0.3)])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float16])
def test_searched_scales_lower_the_squared_error(bits, share, scale_dtype):
    """Against max / qmax, on gaussian weights; measured 0.71, 0.50, 0.25 on weights of models/tiny too."""
    matrix, fmt = random(64, 512) * 0.02, integer_format(bits)

    def error(steps):
        return (
            (dequantize(*quantize(matrix, fmt, scale_dtype, steps), fmt, 512) - matrix)
            .square()
            .view(64, -1, 64)
            .sum(-1)
        )

    plain, searched = error(()), error(SEARCH_STEPS)
    assert searched.sum() < share * plain.sum()
    assert (searched <= plain * 1.02).float().mean() > 0.97  # group by group, not only on the whole


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_groups_of_zeros_and_of_tiny_and_huge_values(bits, scale_dtype):
    matrix, fmt = torch.zeros(4, 70), integer_format(bits)
    matrix[1], matrix[2, 3], matrix[3, 69] = 1e-9, 1000.0, -1e-3
    dequantized = dequantize(*quantize(matrix, fmt, scale_dtype, SEARCH_STEPS), fmt, 70)
    assert not dequantized[0].any() and dequantized.isfinite().all()
    assert dequantized[1].abs().max() < 1e-7
    assert dequantized[2, 3] == pytest.approx(1000.0, rel=1e-3) and dequantized[3, 69] == pytest.approx(-1e-3, rel=1e-2)


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_packing_in_blocks_of_rows_is_packing_at_once(bits, monkeypatch):
    matrix, fmt = random(11, 70), integer_format(bits)
    at_once = quantize_weight(matrix, fmt)
    blocks = packed_view(torch.zeros(packed_bytes(fmt, 11, 70), dtype=torch.uint8), fmt, 11, 70)
    for start in range(0, 11, 4):
        quantize_rows(blocks, start, matrix[start : start + 4])
    assert torch.equal(blocks.dequantize(), at_once.dequantize())
    assert 0 <= packed_bytes(fmt, 11, 70) - at_once.num_bytes < 4
    monkeypatch.setattr("kernels.quantize.CACHE_BYTES", 4 * 70 * 3)
    assert torch.equal(quantize_weight(matrix, fmt).dequantize(), at_once.dequantize())


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_a_selection_of_rows_equals_those_of_the_whole(fmt):
    matrix = random(300, 200)
    if fmt is FP8:
        weight = fp8(matrix)
    elif fmt is MXFP4:
        weight = mxfp4(300, 200)
    elif fmt.has_scales:
        weight = quantize_weight(matrix, fmt)
    else:
        weight = Weight(matrix.to(fmt.dtype), 200, fmt)
    whole, ids = weight.dequantize(), torch.tensor([299, 0, 127, 128, 0])
    assert torch.equal(weight.dequantize_rows(ids), whole[ids])
    assert torch.equal(weight.dequantize(3, 150), whole[3:150]) and torch.equal(weight.dequantize(256), whole[256:])
    assert weight.num_bytes == fmt.num_bytes(300, 200)


def mxfp4(rows, columns):
    """Any bytes are a matrix of this format; exponents near those of real weights."""
    gen = torch.Generator().manual_seed(4)
    data = torch.randint(0, 256, (rows, MXFP4.row_bytes(columns)), generator=gen, dtype=torch.uint8)
    scales = torch.randint(110, 135, MXFP4.scale_shape(rows, columns), generator=gen, dtype=torch.uint8)
    return Weight(data, columns, MXFP4, scales)


def test_mxfp4_value_by_value():
    """e2m1: a sign, two bits of exponent, one of fraction; the even column is in the low nibble (OCP MX v1.0)."""
    weight = mxfp4(5, 70)
    values = weight.dequantize()
    for row in range(5):
        for column in range(70):
            nibble = int(weight.data[row, column // 2]) >> 4 * (column % 2) & 15
            sign, exponent, fraction = nibble >> 3, nibble >> 1 & 3, nibble & 1
            size = (1 + fraction / 2) * 2.0 ** (exponent - 1) if exponent else fraction / 2
            assert values[row, column] == (-1) ** sign * size * 2.0 ** (int(weight.scales[row, column // 32]) - 127)


def test_a_matrix_within_a_larger_one():
    """Every other row, or every other column of one that lies as [in, out]; rows of it, and the rest after some."""
    matrix = random(12, 8)
    for is_transposed in (False, True):
        lying = (matrix.T if is_transposed else matrix).contiguous()
        buffer = torch.cat([torch.zeros(8), lying.flatten()]).view(torch.uint8)
        for first in (0, 1):
            selection = RowSelection(first, 2, 12, is_transposed)
            weight = view_weight(buffer, FORMATS["f32"], 6, 8, 32, selection=selection)
            assert torch.equal(weight.dequantize(), matrix[first::2]) and weight.rows == 6
            rest = view_weight(buffer, FORMATS["f32"], 3, 8, 32, selection=selection.skip(2))
            assert torch.equal(rest.dequantize(), matrix[first::2][2:5])


@pytest.mark.parametrize("shape", [(128, 128), (160, 144), (5, 300), (129, 1)])
def test_fp8_blocks_at_the_edges_are_partial(shape):
    matrix = random(*shape)
    weight = fp8(matrix)
    for row in range(0, shape[0], 31):
        for column in range(0, shape[1], 17):
            expected = weight.data[row, column].float() * weight.scales[row // 128, column // 128]
            assert weight.dequantize()[row, column] == expected
    torch.testing.assert_close(weight.dequantize(), matrix, rtol=2**-4, atol=1e-2)


def test_linear_in_blocks_equals_linear_at_once(monkeypatch):
    x, bias = torch.randn(3, 200), torch.randn(300)
    matrix = random(300, 200, seed=2)
    for weight in (
        quantize_weight(matrix, integer_format(8)),
        Weight(*quantize_fp8(matrix)[:1], 200, FP8, quantize_fp8(matrix)[1]),
    ):
        expected = linear(x, weight, bias)
        monkeypatch.setattr("kernels.reference.DEQUANTIZE_BYTES", 4 * 200 * 130)
        torch.testing.assert_close(linear(x, weight, bias), expected, atol=1e-5, rtol=1e-5)
        monkeypatch.undo()


# --- activations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", COLUMNS)
def test_activations_are_quantized_to_eight_bits_in_groups(columns):
    x = random(4, columns) * torch.tensor([[1e-6], [1.0], [1e4], [0.0]])
    rounded = quantize_activations(x)
    for start in range(0, columns, 64):
        part = x[:, start : start + 64]
        scale = part.abs().amax(-1, keepdim=True) / 127
        expected = torch.where(scale > 0, (part / scale).round() * scale, 0.0)
        assert torch.equal(rounded[:, start : start + 64], expected)
    assert rounded.shape == x.shape and not rounded[3].any()


def test_activations_too_small_to_divide_by_become_zero():
    x = torch.tensor([[1e-43, -3e-44, 2e-40] + [0.0] * 61, [1e-30] * 64])
    assert not quantize_activations(x)[0].any()
    torch.testing.assert_close(quantize_activations(x)[1], x[1])


def test_integer_weights_quantize_activations_and_exact_does_not():
    x, matrix = torch.randn(3, 192), random(8, 192)
    weight = quantize_weight(matrix, integer_format(4))
    exact = Weight(weight.data, 192, weight.format, weight.scales, exact=True)
    torch.testing.assert_close(linear(x, exact), x @ weight.dequantize().T)
    torch.testing.assert_close(linear(x, weight), quantize_activations(x) @ weight.dequantize().T)
    assert not torch.equal(linear(x, weight), linear(x, exact))
    for dtype in DTYPES.values():
        plain = Weight(matrix.to(dtype), 192, FORMATS[{v: k for k, v in DTYPES.items()}[dtype].lower()])
        torch.testing.assert_close(linear(x, plain), x @ plain.dequantize().T)


def test_nan_and_infinity_stay():
    x = torch.ones(2, 64)
    x[0, 5], x[1, 7] = torch.inf, torch.nan
    assert not quantize_activations(x).isfinite().all(dim=-1).any()
