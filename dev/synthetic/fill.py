"""Tensors -> the bytes of a file: the format of each, and its contents, copied from a pool or quantized."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from dev.synthetic.pool import Pool
from dev.synthetic.structure import CONSTANT
from dev.synthetic.tensors import Groups, SyntheticTensor
from kernels.formats import DTYPES, FLOATS, FORMATS, FP8, WeightFormat
from kernels.quantize import quantize, quantize_fp8
from scripts.container import ContainerTensor, make_tensor, weight_tensors

MOST_VALUES = 1 << 25  # in a pool: tens of MB

Item = TypeVar("Item")


@dataclass(frozen=True)
class Formats:
    """The format of each role."""

    expert: WeightFormat
    dense: WeightFormat

    @property
    def ends(self) -> WeightFormat:
        """Embedding and head: 8 bits in containers of the hub, floats in FP8 checkpoints."""
        if self.dense is FP8:
            return FLOATS["BF16"]
        return FORMATS["int8-row"] if self.dense.is_integer else self.dense

    @property
    def small(self) -> WeightFormat:
        """Norms and router: float32 in containers of the hub, else as the dense matrices."""
        return FLOATS["F32"] if self.dense.is_integer else self.ends

    def of(self, tensor: SyntheticTensor) -> WeightFormat:
        # The published bias is float32 everywhere.
        return FLOATS["F32"] if tensor.name.endswith("e_score_correction_bias") else getattr(self, tensor.role)


class Filler:
    """Makes the contents of tensors. `scale_dtype` is that of integer formats, F16 or F32."""

    def __init__(self, formats: Formats, scale_dtype: str, largest: int, rng: np.random.Generator):
        self.formats = formats
        self.scale_dtype = scale_dtype
        self.rng = rng
        self.num_values = min(max(4 * largest, 1 << 18), MOST_VALUES)
        self.pools: dict[str, Pool] = {}

    def pool(self, fmt: WeightFormat) -> Pool:
        """Formats with the same codes share one."""
        kind = fmt.name.split("-")[0]
        if kind not in self.pools:
            self.pools[kind] = Pool(fmt, self.num_values, self.rng)
        return self.pools[kind]

    def parts(self, tensor: SyntheticTensor) -> list[ContainerTensor]:
        """-> its tensors in the file: scales, if its format has any, and data."""
        fmt = self.formats.of(tensor)
        if len(tensor.shape) == 1:
            return [make_tensor(tensor.name, str(fmt).upper(), tensor.shape)]
        rows, columns = tensor.shape
        return weight_tensors(tensor.name, fmt, rows, columns, self.scale_dtype)

    def formats_of(self, groups: Groups) -> dict[str, str]:
        """Names of packed tensors (of experts their shared prefix) -> format names, for the metadata of a file."""
        formats = {}
        for tensor in (tensor for group in groups for tensor in group):
            fmt = self.formats.of(tensor)
            if fmt.has_scales and len(tensor.shape) > 1:
                expert = tensor.role == "expert"
                formats[tensor.name.split(".experts.")[0] + ".experts." if expert else tensor.name] = str(fmt)
        return formats

    def group_parts(self, group: list[SyntheticTensor]) -> list[ContainerTensor]:
        return list(in_order(group, map(self.parts, group)))

    def group_buffers(self, group: list[SyntheticTensor]) -> Iterator[Tensor]:
        """The contents in the order of group_parts; of the dense weights one tensor exists at a time."""
        return in_order(group, map(self.contents, group))

    def contents(self, tensor: SyntheticTensor) -> list[Tensor]:
        """-> [data], or [scales, data]."""
        fmt = self.formats.of(tensor)
        if tensor.values is not None:
            return self.encode(torch.from_numpy(tensor.values), fmt)
        if tensor.patch is not None and fmt is FP8:  # a block of 128 rows has one scale
            values = torch.from_numpy(self.rng.standard_normal(tensor.shape, dtype="float32")) * tensor.spread
            rows, patch = map(torch.from_numpy, tensor.patch)
            values[rows] = patch
            return self.encode(values, fmt)
        return self.copy(tensor, fmt)

    def encode(self, values: Tensor, fmt: WeightFormat) -> list[Tensor]:
        if fmt is FP8:
            return list(reversed(quantize_fp8(values)))
        if fmt.is_integer:
            return list(reversed(quantize(values, fmt, DTYPES[self.scale_dtype])))
        return [values.to(fmt.dtype)]

    def copy(self, tensor: SyntheticTensor, fmt: WeightFormat) -> list[Tensor]:
        """A matrix from the pool, with the rows and columns that are set."""
        pool, (rows, columns) = self.pool(fmt), tensor.shape
        own = tensor.patch is not None or tensor.constant > 0
        data = pool.data(rows, columns, tensor.spread, keep=tensor.role == "expert", own=own)
        buffers = [data]
        if fmt.has_scales:
            dtype = DTYPES[self.scale_dtype] if fmt.is_integer else torch.float32
            # Rows of different size would make the embedding's constant a different share of each.
            vary = not tensor.constant
            buffers = [pool.scales(rows, columns, tensor.spread, dtype, fmt, vary), data]
        if tensor.patch is not None:
            at, values = map(torch.from_numpy, tensor.patch)
            *scales, codes = self.encode(values, fmt)
            data[at] = codes.view(torch.uint8)
            if scales:
                buffers[0][at] = scales[0]
        if tensor.constant:
            self.set_constant(tensor, fmt, buffers)
        return buffers

    def set_constant(self, tensor: SyntheticTensor, fmt: WeightFormat, buffers: list[Tensor]) -> None:
        """The first columns of the embedding; it is float, or has whole bytes and one scale to a row."""
        if fmt.has_scales:
            codes = (CONSTANT / buffers[0].float()).round().clamp(-127, 127)
            buffers[1][:, : tensor.constant] = codes.to(torch.int8).view(torch.uint8)
        else:
            assert fmt.dtype, "a float format"
            buffers[0].view(fmt.dtype)[:, : tensor.constant] = CONSTANT


def in_order(group: list[SyntheticTensor], items: Iterable[list[Item]]) -> Iterator[Item]:
    """[scales and data of each tensor] -> flat; of an expert all scales first, so that they stay aligned whatever the
    length of the data."""
    ordered: Iterable[Iterable[Item]] = zip(*items, strict=True) if group[0].role == "expert" else items
    for several in ordered:
        yield from several
