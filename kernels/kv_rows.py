"""Rows of a KV cache in 8 bits: int8 codes in groups of 64 columns, and behind them a bfloat16 scale for each group."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.formats import GROUP

SMALLEST = torch.finfo(torch.float32).smallest_normal


def int8_row_bytes(width: int) -> int:
    """Bytes of a row of `width` columns: the codes, padded to an even number, and the scales."""
    return width + width % 2 + 2 * -(-width // GROUP)


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """A view of quantized rows of `width` columns, with what attention needs of the interface of a tensor of floats."""

    data: Tensor  # uint8 [..., int8_row_bytes(width)], contiguous
    width: int

    dtype = torch.int8

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.data.shape[:-1], self.width)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, rows: Any) -> "Int8Rows":
        return Int8Rows(self.data[rows], self.width)

    def data_ptr(self) -> int:
        return self.data.data_ptr()

    def heads(self, num_heads: int) -> "Int8Rows":
        """Rows [S, heads * bytes of a head] -> [S, heads, width of a head]."""
        return Int8Rows(self.data.view(len(self.data), num_heads, -1), self.width)

    def float(self) -> Tensor:
        """The values, float32 [..., width]."""
        W = self.width
        codes = F.pad(self.data[..., :W].view(torch.int8).float(), (0, -W % GROUP)).unflatten(-1, (-1, GROUP))
        scales = self.data[..., W + W % 2 :].contiguous().view(torch.bfloat16).float()
        return (codes * scales[..., None]).flatten(-2)[..., :W].contiguous()


KvRows = Tensor | Int8Rows


def quantize_kv(rows: Tensor, num_heads: int, out: Tensor) -> None:
    """Quantize rows [T, heads * width] of new positions, each head by itself, to out [T, heads * bytes of a head].

    The scale of a group is its largest magnitude / 127, rounded to bfloat16; codes are rounded half to even. A group
    that holds NaN or infinity gets the scale NaN.
    """
    x = rows.reshape(len(rows), num_heads, -1)
    W = x.shape[-1]
    groups = F.pad(x, (0, -W % GROUP)).unflatten(-1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / 127).bfloat16()
    bad = ~groups.isfinite().all(-1)
    scales = scales.masked_fill(bad, torch.nan).masked_fill(~bad & (scales.float() < SMALLEST), 0)
    divisors = scales.float().masked_fill(bad | (scales == 0), torch.inf)
    codes = (groups / divisors[..., None]).nan_to_num(0).round().to(torch.int8).flatten(-2)[..., :W]
    target = out.view(len(rows), num_heads, -1)
    target[..., :W] = codes.view(torch.uint8)
    target[..., W : W + W % 2] = 0
    target[..., W + W % 2 :] = scales.view(torch.uint8)
