"""Writes the files (shards) of a container: safetensors laid out so that one aligned read brings one expert.

A shard is a sequence of tensor groups, each of which begins at a page of 4 KiB: the tensors of one expert, or all
others of a layer. A tensor named padding.* fills the last page of a group, because the format allows no gap. The
metadata names the format of each packed tensor (docs/formats.md). A shard is written under another name and renamed
when it is complete.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experts.disk import PAGE
from kernels.formats import MXFP4, WeightFormat
from machine.files import atomic_write
from snapshot.dense import PADDING
from snapshot.formats import SCALES
from snapshot.index import FORMATS_KEY, ITEM_BYTES

CHECKSUM = "colibri.sha256"  # metadata: of all bytes after the header
SOURCE = "colibri.source"
UNKNOWN = "0" * 64


@dataclass(frozen=True, slots=True)
class ContainerTensor:
    """Name, dtype and shape of one tensor of a shard."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def make_tensor(name: str, dtype: str, shape: tuple[int, ...]) -> ContainerTensor:
    return ContainerTensor(name, dtype, shape, math.prod(shape) * ITEM_BYTES[dtype])


def weight_tensors(
    name: str, fmt: WeightFormat, rows: int, columns: int, scale_dtype: str = "F16"
) -> list[ContainerTensor]:
    """The tensors of one weight matrix: its scales, if the format has any, then its data.

    scale_dtype is that of integer formats; fp8 has F32 scales, mxfp4 has bytes.
    """
    if not fmt.has_scales:
        return [make_tensor(name, str(fmt).upper(), (rows, columns))]
    shape = fmt.scale_shape(rows, columns)
    scale_dtype = "U8" if fmt is MXFP4 else scale_dtype if fmt.is_integer else "F32"
    scales = make_tensor(name + SCALES, scale_dtype, (math.prod(shape),))
    return [scales, make_tensor(name, "U8", (rows * fmt.row_bytes(columns),))]


@dataclass(frozen=True)
class Shard:
    """One file of a container. formats: names of packed tensors, or their prefixes up to a dot -> format name."""

    name: str
    groups: Sequence[Sequence[ContainerTensor]]
    formats: dict[str, str]
    source: str = ""

    @cached_property
    def tensors(self) -> list[ContainerTensor]:
        """All tensors of the groups, with padding after each group that does not end at a page."""
        tensors: list[ContainerTensor] = []
        for group in self.groups:
            tensors += group
            if missing := -sum(tensor.num_bytes for tensor in group) % PAGE:
                tensors.append(make_tensor(f"{PADDING}{Path(self.name).stem}.{len(tensors)}", "U8", (missing,)))
        return tensors

    @cached_property
    def header(self) -> bytes:
        """The checksum is UNKNOWN. Padded with blanks so that the data begins at a page."""
        metadata = {"format": "pt", FORMATS_KEY: json.dumps(self.formats), SOURCE: self.source, CHECKSUM: UNKNOWN}
        table: dict[str, Any] = {"__metadata__": metadata}
        at = 0
        for tensor in self.tensors:
            offsets = [at, at + tensor.num_bytes]
            table[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
            at += tensor.num_bytes
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % PAGE)
        return len(text).to_bytes(8, "little") + text

    @property
    def num_bytes(self) -> int:
        return len(self.header) + sum(tensor.num_bytes for tensor in self.tensors)

    def write(self, folder: Path, contents: Iterable[Tensor], with_checksum: bool = True) -> None:
        """contents: the bytes of every tensor of the groups in their order, as contiguous torch tensors of any dtype;
        taken one at a time, so a generator keeps memory small. OSError when the disk is full; the partial file stays
        and the next call overwrites it."""
        digest, remaining = hashlib.sha256(), iter(contents)
        with atomic_write(folder / self.name, sync=True, keep_partial=True) as file:
            file.write(self.header)
            for tensor in self.tensors:
                is_padding = tensor.name.startswith(PADDING)
                data = memoryview(bytes(tensor.num_bytes)) if is_padding else bytes_of(next(remaining))
                if len(data) != tensor.num_bytes:
                    raise ValueError(f"{tensor.name} has {len(data)} bytes, {tensor.num_bytes} expected")
                if with_checksum:
                    digest.update(data)
                file.write(data)
            if with_checksum:
                file.seek(0)
                file.write(replace_checksum(self.header, digest.hexdigest()))


def replace_checksum(header: bytes, digest: str) -> bytes:
    """The header with another checksum. It follows its key, whose quotes are unescaped only there."""
    key = f'"{CHECKSUM}":"'.encode()
    before, found, after = header.partition(key)
    return before + found + digest.encode() + after[len(UNKNOWN) :] if found else header


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
