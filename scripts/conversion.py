"""Conversion: every shard, tensor group and tensor of the container that a snapshot becomes, from headers alone."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from errors import Refused, printable
from experts.disk import MATRICES, ExpertDisk
from kernels.formats import DTYPES, FORMATS, MXFP4, WeightFormat
from kernels.quantize import SEARCH_STEPS, quantize, row_blocks
from scripts.container import ContainerTensor, Shard, make_tensor, weight_tensors
from snapshot.config_file import read_config
from snapshot.dense import PADDING, DenseTensors, read_entry_bytes, read_stored_weight
from snapshot.formats import FP8_SCALES, SCALES, StoredWeight, find_stored_weight
from snapshot.index import TensorEntry, TensorIndex, read_index
from snapshot.reader import FileReader

INDEXER_BITS = 8  # at least: its scores decide which positions a token attends to at all
MIN_F16_SCALE = 2.0**-20  # of the largest of a matrix: below it F16 has no more than four bits left
SAMPLE_BYTES = 4096
NUM_SAMPLES = 16  # of each file, which tell one source from another of the same shapes


@dataclass(frozen=True, slots=True)
class ConversionOptions:
    """Bits of each kind of matrix (16: as stored; MTP 0: left out), columns of a group (0: a row), dtype of scales."""

    experts: int = 4
    dense: int = 4
    embeddings: int = 8
    mtp: int = 8
    group: int = 64
    scales: str = "F16"

    def target(self, role: str, fmt: WeightFormat) -> WeightFormat | None:
        """The format that a matrix of a role is quantized to; None: it is copied as stored."""
        bits = max(self.dense, INDEXER_BITS) if role == "indexer" else getattr(self, role)
        if bits == 16 or (fmt.is_packed and fmt.bits <= bits):
            return None
        group = 64 if bits == 3 else self.group
        return FORMATS[f"int{bits}-g{group}" if group else f"int{bits}-row"]


@dataclass(frozen=True, slots=True)
class ConvertedMatrix:
    """A matrix of the source: its name in the container, where it is stored, and its new format (None: as stored)."""

    name: str
    role: str
    stored: StoredWeight
    target: WeightFormat | None
    scale_dtype: str

    @property
    def format(self) -> WeightFormat:
        return self.target or self.stored.format

    @property
    def tensors(self) -> list[ContainerTensor]:
        """The tensors that are written: scales, if any, then data."""
        stored = self.stored
        if self.target or stored.format is MXFP4:
            return weight_tensors(self.name, self.format, stored.rows, stored.columns, self.scale_dtype)
        if stored.scales is None:
            return [make_tensor(self.name, stored.data.dtype, (stored.rows, stored.columns))]
        return [make_tensor(entry.name, entry.dtype, entry.shape) for entry in (stored.scales, stored.data)]

    def read_contents(self, reader: FileReader) -> list[Tensor]:
        """The contents of `tensors`: read, and quantized a block of weight rows at a time."""
        stored, fmt = self.stored, self.target
        if fmt is None and stored.selection:
            weight = read_stored_weight(reader, stored)
            contents = [tensor for tensor in (weight.scales, weight.data) if tensor is not None]
            return [tensor.contiguous().view(torch.uint8).flatten() for tensor in contents]
        if fmt is None:
            return [read_entry_bytes(reader, entry) for entry in reversed(stored.entries)]
        data = torch.empty(stored.rows, fmt.row_bytes(stored.columns), dtype=torch.uint8)
        scales = torch.empty(fmt.scale_shape(stored.rows, stored.columns), dtype=DTYPES[self.scale_dtype])
        largest = 0.0
        for start, stop in row_blocks(stored.rows, stored.columns):
            matrix = read_stored_weight(reader, stored.slice_rows(start, stop)).dequantize()
            if not matrix.isfinite().all():
                raise Refused(f"{stored.data.path}: tensor {stored.name} holds a NaN or infinity; download it again")
            largest = max(largest, matrix.abs().max().item())
            data[start:stop], scales[start:stop] = quantize(matrix, fmt, scales.dtype, SEARCH_STEPS)
        if scales.dtype == torch.float16 and largest and not MIN_F16_SCALE <= scales.abs().max() < torch.inf:
            raise Refused(f"tensor {self.name}: its scales are outside the range of F16; use --scales F32")
        return [scales, data]


@dataclass(frozen=True, slots=True)
class CopiedTensor:
    """A tensor that is copied byte by byte: a norm, a bias, a router, or one that the engine does not know."""

    entry: TensorEntry

    @property
    def tensors(self) -> list[ContainerTensor]:
        return [ContainerTensor(self.entry.name, self.entry.dtype, self.entry.shape, self.entry.num_bytes)]

    def read_contents(self, reader: FileReader) -> list[Tensor]:
        return [read_entry_bytes(reader, self.entry)]


Item = ConvertedMatrix | CopiedTensor


class TensorGroup:
    """Items that lie side by side from a page of their own: all scales, then all data, which keeps scales aligned
    whatever the sizes are."""

    def __init__(self, *items: Item) -> None:
        self.items = items
        tensors = [tensor for item in items for tensor in item.tensors]
        self.order = sorted(range(len(tensors)), key=lambda i: not tensors[i].name.endswith((SCALES, FP8_SCALES)))
        self.tensors = [tensors[i] for i in self.order]

    def read_contents(self, reader: FileReader) -> list[Tensor]:
        """The contents of `tensors`, in their order."""
        contents = [tensor for item in self.items for tensor in item.read_contents(reader)]
        return [contents[i] for i in self.order]


class Conversion:
    """All shards of a container. Refused for a snapshot that the engine would refuse."""

    def __init__(self, folder: Path, options: ConversionOptions) -> None:
        self.folder = folder
        self.options = options
        self.reader = FileReader()
        self.config, self.family = read_config(folder)
        self.index = index = read_index(folder)
        self.dense = DenseTensors(self.config, self.family, index)
        self.mtp_layer = self.config.num_layers
        mtp_prefix = self.family.layer_prefix(self.mtp_layer)
        has_mtp = bool(options.mtp) and index.has_layer(mtp_prefix)
        layers = (*self.config.sparse_layers, *([self.mtp_layer] if has_mtp else []))
        try:
            self.disk = ExpertDisk(self.config, self.family, index, self.reader, layers)
            index.check_unused_files(mtp_prefix)
            top = list(self.table_groups(self.dense.top, "embeddings"))
            shards = [top, *(self.layer_groups(layer) for layer in range(self.mtp_layer + has_mtp))]
        except Refused as error:
            # The engine runs such a snapshot, without the MTP layer.
            if not has_mtp or f"tensor {mtp_prefix}" not in str(error):
                raise
            joint = " Or" if str(error).endswith("?") else "; or"
            raise Refused(f"{error}{joint} leave the MTP layer out with --mtp 0") from None
        top += [TensorGroup(CopiedTensor(index.find_entry(name))) for name in self.unknown_names(shards, mtp_prefix)]
        self.shards = {f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors": groups for i, groups in enumerate(shards)}
        # Printable: other programs could not read a header with bytes that are no text.
        self.source = f"{printable(folder.resolve().name)} {fingerprint(index, self.reader)}"

    def layer_groups(self, layer: int) -> list[TensorGroup]:
        """One layer: each matrix, then vectors and router together, then each expert."""
        groups: list[TensorGroup] = []
        is_mtp = layer == self.mtp_layer
        for section, table in self.dense.layer_tables(layer).items():
            role = "mtp" if is_mtp else "indexer" if section == "indexer" else "dense"
            groups += self.table_groups(table, None if section in ("router", "expert_biases") else role)
        if layer in self.disk.expert_bytes:
            role = "mtp" if is_mtp else "experts"
            groups += [self.expert_group(layer, expert, role) for expert in range(self.config.num_experts)]
        return groups

    def table_groups(self, table: dict[str, tuple[str, tuple[int, ...]]], role: str | None) -> Iterator[TensorGroup]:
        """A group for each matrix of a table of tensor names, and one for all that is copied: vectors, and without a
        role matrices too."""
        copies = []
        for name, shape in dict(table.values()).items():  # tied embeddings are in it twice
            if role is None or len(shape) == 1:
                copies.append(CopiedTensor(self.index.find_checked(name, shape)))
            else:
                yield TensorGroup(self.make_matrix(name, role, find_stored_weight(self.index, name, shape)))
        if copies:
            yield TensorGroup(*copies)

    def expert_group(self, layer: int, expert: int, role: str) -> TensorGroup:
        names = self.family.expert_tensors(self.config, layer, expert)
        stored = zip(MATRICES, self.disk.stored_weights(layer, expert), strict=True)
        return TensorGroup(*(self.make_matrix(names[word][0], role, matrix) for word, matrix in stored))

    def make_matrix(self, name: str, role: str, stored: StoredWeight) -> ConvertedMatrix:
        return ConvertedMatrix(name, role, stored, self.options.target(role, stored.format), self.options.scales)

    def unknown_names(self, shards: Iterable[Iterable[TensorGroup]], mtp_prefix: str) -> list[str]:
        """Tensors that the engine does not use, except the padding of a container and an MTP layer that is left out."""
        known = set()
        for item in (item for groups in shards for group in groups for item in group.items):
            entries = item.stored.entries if isinstance(item, ConvertedMatrix) else (item.entry,)
            known |= {entry.name for entry in entries}
        left_out: tuple[str, ...] = (PADDING,) if self.options.mtp else (PADDING, mtp_prefix)
        if self.dense.head_name == self.dense.embed_name:  # a copy of the embedding: quantized it would differ
            left_out += (self.family.model_tensors(self.config)["lm_head"][0],)
        return [name for name in self.index.entries if name not in known and not name.startswith(left_out)]

    def shard(self, name: str) -> Shard:
        """Experts of one format have one entry in its formats, under their shared prefix."""
        formats: dict[str, str] = {}
        for item in (item for group in self.shards[name] for item in group.items):
            if isinstance(item, ConvertedMatrix) and item.format.has_scales:
                head, marker, _ = item.name.partition(".experts.")
                if formats.setdefault(head + marker, item.format.name) != item.format.name:
                    formats[item.name] = item.format.name
        return Shard(name, [group.tensors for group in self.shards[name]], formats, self.source)


def fingerprint(index: TensorIndex, reader: FileReader) -> str:
    """Twelve hex digits that identify a source: its tensor names, byte ranges, and samples of each file from the first
    byte of data to the last. Changes between the samples go unnoticed."""
    digest = hashlib.sha256()
    spans: dict[Path, tuple[int, int]] = {}
    for name in sorted(index.entries):
        entry = index.entries[name]
        shape = list(entry.shape)
        digest.update(f"{name} {entry.path.name} {entry.offset} {entry.num_bytes} {entry.dtype} {shape}\n".encode())
        first, end = spans.get(entry.path, (entry.offset, 0))
        spans[entry.path] = min(first, entry.offset), max(end, entry.offset + entry.num_bytes)
    for path, (first, end) in sorted(spans.items()):
        sample = bytearray(min(SAMPLE_BYTES, end - first))
        for i in range(NUM_SAMPLES):
            at = first + (end - first - len(sample)) * i // (NUM_SAMPLES - 1)
            reader.read_into(path, at, memoryview(sample), "a sample of the file")
            digest.update(sample)
    return digest.hexdigest()[:12]
