"""What a conversion does, decided from headers alone: every file of the container, every group in it, every tensor."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from errors import Refused, printable
from experts.disk import MATRICES, ExpertDisk
from kernels.formats import DTYPES, FORMATS, MXFP4, WeightFormat
from kernels.quantize import SEARCH_STEPS, quantize, row_blocks
from scripts.container import PADDING, ContainerTensor, part_of, shard_bytes, shard_header, weight_parts
from snapshot.config import read_config
from snapshot.dense import DenseTensors, read_entry_bytes, read_stored_weight
from snapshot.formats import FP8_SCALES, SCALES, StoredWeight, find_stored_weight
from snapshot.index import TensorEntry, read_index
from snapshot.reader import FileReader

INDEXER_BITS = 8  # at least: its scores decide which positions a row sees at all
MIN_F16_SCALE = 2.0**-20  # of the largest of a matrix: below it F16 has no more than four bits left
SAMPLE_BYTES, SAMPLES = 4096, 16  # of each file, that tell one source from another of the same shapes


@dataclass(frozen=True, slots=True)
class ConversionOptions:
    """Bits of each kind of matrix (16: as stored; MTP 0: left out), columns of a group (0: a row), dtype of scales."""

    experts: int = 4
    dense: int = 4
    embeddings: int = 8
    mtp: int = 8
    group: int = 64
    scales: str = "F16"

    def target(self, role, fmt):
        """The format that a matrix of some role is packed to, or None where it is copied as it is."""
        bits = max(self.dense, INDEXER_BITS) if role == "indexer" else getattr(self, role)
        if bits == 16 or (fmt.is_packed and fmt.bits <= bits):
            return None
        return FORMATS[
            f"int{bits}-g64" if bits == 3 else f"int{bits}-g{self.group}" if self.group else f"int{bits}-row"
        ]


@dataclass(frozen=True, slots=True)
class ConvertedMatrix:
    """One matrix on its way: what it is to be called, where it is, and its new format (None: as it is)."""

    name: str
    role: str
    stored: StoredWeight
    target: WeightFormat | None
    scale_dtype: str

    @property
    def format(self):
        return self.target or self.stored.format

    @property
    def parts(self):
        """The tensors that are written: scales, if any, then data."""
        stored = self.stored
        if self.target or stored.format is MXFP4:
            return weight_parts(self.name, self.format, stored.rows, stored.columns, self.scale_dtype)
        if stored.scales is None:
            return [part_of(self.name, stored.data.dtype, (stored.rows, stored.columns))]
        return [part_of(entry.name, entry.dtype, entry.shape) for entry in (stored.scales, stored.data)]

    def tensors(self, reader):
        """The bytes of `parts`: read and quantized a block of rows at a time."""
        stored, fmt = self.stored, self.target
        if fmt is None and stored.within:
            weight = read_stored_weight(reader, stored)
            parts = [part for part in (weight.scales, weight.data) if part is not None]
            return [part.contiguous().view(torch.uint8).flatten() for part in parts]
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
            raise Refused(f"tensor {self.name}: its scales are out of what F16 holds; take --scales F32")
        return [scales, data]


@dataclass(frozen=True, slots=True)
class CopiedTensor:
    """A tensor that is copied byte by byte: a norm, a bias, a router, or one that the engine does not know."""

    entry: TensorEntry

    @property
    def parts(self):
        return [ContainerTensor(self.entry.name, self.entry.dtype, self.entry.shape, self.entry.num_bytes)]

    def tensors(self, reader):
        return [read_entry_bytes(reader, self.entry)]


class TensorGroup:
    """Matrices or copies that lie side by side from a page of their own: all scales, then all data, which keeps scales
    aligned whatever the sizes are."""

    def __init__(self, *items):
        self.items = items
        parts = [part for item in items for part in item.parts]
        self.order = sorted(range(len(parts)), key=lambda i: not parts[i].name.endswith((SCALES, FP8_SCALES)))
        self.parts = [parts[i] for i in self.order]

    def tensors(self, reader):
        """The bytes of `parts`, in their order."""
        tensors = [tensor for item in self.items for tensor in item.tensors(reader)]
        return [tensors[i] for i in self.order]


class Conversion:
    """All files of the container that a snapshot becomes. Refused for a snapshot that the engine would refuse."""

    def __init__(self, folder, options):
        self.folder, self.options, self.reader = folder, options, FileReader()
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
            top = list(self.table_groups(self.family.model_tensors(self.config), "embeddings"))
            shards = [top, *(self.layer_groups(layer) for layer in range(self.mtp_layer + has_mtp))]
        except Refused as error:
            # The engine does without the MTP layer, so it runs such a snapshot.
            if not has_mtp or f"tensor {mtp_prefix}" not in str(error):
                raise
            joint = " Or" if str(error).endswith("?") else "; or"
            raise Refused(f"{error}{joint} leave the MTP layer out with --mtp 0") from None
        top += [TensorGroup(CopiedTensor(index.find_entry(name))) for name in self.unknown_names(shards, mtp_prefix)]
        self.shards = {f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors": groups for i, groups in enumerate(shards)}
        # A name with bytes that are no text would make a header that no other program reads.
        self.source = f"{printable(folder.resolve().name)} {fingerprint(index, self.reader)}"

    def layer_groups(self, layer):
        """One layer: each matrix, the vectors and the router together, then each expert."""
        groups = []
        for part, table in self.dense.layer_tables(layer).items():
            role = "mtp" if layer == self.mtp_layer else "indexer" if part == "indexer" else "dense"
            groups += self.table_groups(table, None if part in ("router", "expert_biases") else role)
        if layer in self.disk.expert_bytes:
            role = "mtp" if layer == self.mtp_layer else "experts"
            groups += [self.expert(layer, expert, role) for expert in range(self.config.num_experts)]
        return groups

    def table_groups(self, table, role):
        """A group for each matrix of a table of names, one for all that is copied; without a role that is all."""
        copies = []
        for name, shape in table.values():
            if role is None or len(shape) == 1:
                copies.append(CopiedTensor(self.index.find_checked(name, shape)))
            else:
                yield TensorGroup(self.matrix(name, role, find_stored_weight(self.index, name, shape)))
        if copies:
            yield TensorGroup(*copies)

    def expert(self, layer, expert, role):
        names = self.family.expert_tensors(self.config, layer, expert)
        stored = zip(MATRICES, self.disk.matrices(layer, expert), strict=True)
        return TensorGroup(*(self.matrix(names[word][0], role, matrix) for word, matrix in stored))

    def matrix(self, name, role, stored):
        return ConvertedMatrix(name, role, stored, self.options.target(role, stored.format), self.options.scales)

    def unknown_names(self, shards, mtp_prefix):
        """Tensors nobody asked for, but for the padding of a container and an MTP layer that is left out."""
        known = set()
        for item in (item for groups in shards for group in groups for item in group.items):
            known |= {
                entry.name for entry in (item.stored.entries if isinstance(item, ConvertedMatrix) else (item.entry,))
            }
        left_out = (PADDING,) if self.options.mtp else (PADDING, mtp_prefix)
        return [name for name in self.index.entries if name not in known and not name.startswith(left_out)]

    def formats(self, file):
        """The stamp of a file: names of packed matrices -> formats; experts of one format by their common beginning."""
        stamp = {}
        for item in (item for group in self.shards[file] for item in group.items):
            if isinstance(item, ConvertedMatrix) and item.format.has_scales:
                head, marker, _ = item.name.partition(".experts.")
                if stamp.setdefault(head + marker, item.format.name) != item.format.name:
                    stamp[item.name] = item.format.name
        return stamp

    def num_bytes(self, file):
        """How long a file will be."""
        return shard_bytes(Path(file), [group.parts for group in self.shards[file]], self.formats(file), self.source)

    def header(self, file):
        """How a file will begin, but for the checksum."""
        return shard_header(Path(file), [group.parts for group in self.shards[file]], self.formats(file), self.source)


def fingerprint(index, reader):
    """Twelve digits that tell one source from another: names, places, and samples of each file from its first byte of
    data to its last. What changes between the samples alone is not noticed."""
    digest = hashlib.sha256()
    spans = {}
    for name in sorted(index.entries):
        entry = index.entries[name]
        shape = list(entry.shape)
        digest.update(f"{name} {entry.path.name} {entry.offset} {entry.num_bytes} {entry.dtype} {shape}\n".encode())
        first, end = spans.get(entry.path, (entry.offset, 0))
        spans[entry.path] = min(first, entry.offset), max(end, entry.offset + entry.num_bytes)
    for path, (first, end) in sorted(spans.items()):
        sample = bytearray(min(SAMPLE_BYTES, end - first))
        for i in range(SAMPLES):
            at = first + (end - first - len(sample)) * i // (SAMPLES - 1)
            reader.read_into(path, at, memoryview(sample), "a sample of the file")
            digest.update(sample)
    return digest.hexdigest()[:12]
