"""Writes the files of a container: ordinary safetensors, laid out so that one aligned read brings one expert.

A file is a row of groups, each of which begins at a page of 4 KiB: the tensors of one expert, or all the others of a
layer. Where a group does not fill its last page a tensor named padding.* does, for the format allows no gap. The
metadata says in which format each packed tensor is (docs/formats.md). A file is written under another name and renamed
when it is whole, so a file that has its name is complete.
"""

import hashlib
import json
import math
from dataclasses import dataclass

import torch

from experts.disk import PAGE
from kernels.formats import MXFP4
from machine.files import atomic_write
from snapshot.formats import SCALES
from snapshot.index import FORMATS_KEY, ITEM_BYTES

PADDING = "padding."  # begins the names of tensors that fill a page
CHECKSUM = "colibri.sha256"  # metadata: of all that follows the header
SOURCE = "colibri.source"
UNKNOWN = "0" * 64


@dataclass(frozen=True, slots=True)
class ContainerTensor:
    """One tensor of a file that is to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def part_of(name, dtype, shape):
    """A Part of a dtype that the engine knows."""
    return ContainerTensor(name, dtype, shape, math.prod(shape) * ITEM_BYTES[dtype])


def weight_parts(name, fmt, rows, columns, scale_dtype="F16"):
    """The tensors of one matrix in a float or integer format, in fp8 with F32 scales or mxfp4 with bytes for scales:
    scales, then data."""
    if not fmt.has_scales:
        return [part_of(name, str(fmt).upper(), (rows, columns))]
    shape = fmt.scale_shape(rows, columns)
    scale_dtype = "U8" if fmt is MXFP4 else scale_dtype if fmt.is_integer else "F32"
    scales = part_of(name + SCALES, scale_dtype, (math.prod(shape),))
    return [scales, part_of(name, "U8", (rows * fmt.row_bytes(columns),))]


def padded(groups, stem):
    """Groups of Parts -> one list, with what fills the last page of each."""
    parts = []
    for group in groups:
        parts += group
        missing = -sum(part.num_bytes for part in group) % PAGE
        if missing:
            parts.append(part_of(f"{PADDING}{stem}.{len(parts)}", "U8", (missing,)))
    return parts


def make_header(parts, metadata):
    """The header of a file, filled with blanks so that the data begins at a page."""
    table, at = {"__metadata__": metadata}, 0
    for part in parts:
        offsets = [at, at + part.num_bytes]
        table[part.name] = {"dtype": part.dtype, "shape": list(part.shape), "data_offsets": offsets}
        at += part.num_bytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    return len(text).to_bytes(8, "little") + text


def shard_bytes(path, groups, formats, source=""):
    """How long write_shard's file will be."""
    parts = padded(groups, path.stem)
    return len(make_header(parts, make_metadata(formats, source))) + sum(part.num_bytes for part in parts)


def make_metadata(formats, source):
    return {"format": "pt", FORMATS_KEY: json.dumps(formats), SOURCE: source, CHECKSUM: UNKNOWN}


def shard_header(path, groups, formats, source=""):
    """The header of write_shard's file, the checksum still UNKNOWN."""
    return make_header(padded(groups, path.stem), make_metadata(formats, source))


def with_checksum_of(header, digest):
    """A header with another checksum. It stands behind its key, and nowhere else can these quotes be unescaped."""
    key = f'"{CHECKSUM}":"'.encode()
    before, found, after = header.partition(key)
    return before + found + digest.encode() + after[len(UNKNOWN) :] if found else header


def write_shard(path, groups, buffers, formats, source="", with_checksum=True):
    """Write one file of a container.

    groups: lists of Parts, each list from a page of its own. buffers: for every Part in that order its bytes, as a
    contiguous tensor of any dtype; taken one at a time, so a generator keeps memory small. formats: names of packed
    tensors, or their beginnings up to a dot -> format name. OSError when the disk is full; the partial file stays
    and the next call begins it anew.
    """
    parts, digest, buffers = padded(groups, path.stem), hashlib.sha256(), iter(buffers)
    header = make_header(parts, make_metadata(formats, source))
    with atomic_write(path, sync=True, keep_partial=True) as file:
        file.write(header)
        for part in parts:
            data = bytes(part.num_bytes) if part.name.startswith(PADDING) else as_bytes(next(buffers))
            if len(data) != part.num_bytes:
                raise ValueError(f"{part.name} has {len(data)} bytes, {part.num_bytes} expected")
            if with_checksum:
                digest.update(data)
            file.write(data)
        if with_checksum:
            file.seek(0)
            file.write(with_checksum_of(header, digest.hexdigest()))


def as_bytes(tensor):
    """The memory of a contiguous tensor."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
