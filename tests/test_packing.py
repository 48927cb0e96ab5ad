"""Packed weights: the formula, the order of nibbles, and how far a value can move."""

import pytest
import torch

from kernels.packing import pack, pack_rows, packed_bytes, packed_view
from kernels.reference import linear


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("columns", [64, 192, 1, 63, 65, 191])
def test_values_move_by_at_most_half_a_step(bits, columns):
    matrix = torch.randn(5, columns, generator=torch.Generator().manual_seed(1))
    weight = pack(matrix, bits)
    widened = weight.widen()
    assert widened.shape == matrix.shape and 0 <= packed_bytes(bits, 5, columns) - weight.num_bytes < 4
    steps = weight.scales.repeat_interleave(64, dim=1)[:, :columns]
    assert ((widened - matrix).abs() <= steps / 2 + 1e-6).all()
    assert torch.equal(weight.widen(2, 4), widened[2:4])


def test_known_bytes():
    """Even columns in the low nibble, stored q + 8; two bits stored q + 2, lowest first."""
    row = torch.tensor([[7.0, -7.0, 3.0, 0.0]])
    assert pack(row, 4).data.tolist() == [[15 | 1 << 4, 11 | 8 << 4]]
    assert pack(row, 8).scales.tolist() == [[pytest.approx(7 / 127)]]
    assert pack(torch.tensor([[1.0, -1.0, 0.0, 1.0]]), 2).data.tolist() == [[3 | 1 << 2 | 2 << 4 | 3 << 6]]


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_packing_in_blocks_of_rows_is_packing_at_once(bits):
    matrix = torch.randn(11, 70, generator=torch.Generator().manual_seed(4))
    blocks = packed_view(torch.zeros(packed_bytes(bits, 11, 70), dtype=torch.uint8), bits, 11, 70)
    for start in range(0, 11, 4):
        pack_rows(blocks, start, matrix[start : start + 4])
    assert torch.equal(blocks.widen(), pack(matrix, bits).widen())


def test_a_zero_matrix_stays_zero():
    for bits in (8, 4, 2):
        assert not pack(torch.zeros(2, 70), bits).widen().any()


def test_linear_in_blocks_equals_linear_at_once(monkeypatch):
    matrix = torch.randn(37, 96, generator=torch.Generator().manual_seed(2))
    x, bias = torch.randn(3, 96), torch.randn(37)
    weight = pack(matrix, 8)
    expected = x @ weight.widen().T + bias
    monkeypatch.setattr("kernels.reference.WIDEN_BYTES", 4 * 96 * 5)
    torch.testing.assert_close(linear(x, weight, bias), expected, atol=1e-5, rtol=1e-5)
