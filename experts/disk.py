"""ExpertDisk: where the bytes of each routed expert lie in the snapshot's files, and reading one expert.

Adjacent byte ranges are merged into one read: published files store the three matrices of an expert next to each other,
our containers their scales too, so an expert is one read. A fused layer (snapshot/fused.py) needs two or four.

A byte range lies at the same offset modulo a page in the buffer as in the file, and shares no page with another range:
so one layout serves buffered reads, which take the bytes of the range, and O_DIRECT reads, which take whole pages.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from experts.drive import Drive, DriveSet, check_mirror
from experts.policy import ExpertKey
from kernels.formats import SCALE_DTYPES, WeightFormat
from kernels.weight import RowSelection, Weight, view_weight
from snapshot.config import ModelConfig
from snapshot.family import Family
from snapshot.formats import StoredWeight, find_stored_weight
from snapshot.fused import find_fused_experts
from snapshot.index import TensorIndex
from snapshot.reader import PAGE, FileReader, align_to_page

MATRICES = ("gate", "up", "down")
Layers = Iterable[int] | None  # None: all


@dataclass(frozen=True, slots=True)
class ByteRange:
    """One read: num_bytes from `offset` of a file to `buffer_offset` of the buffer."""

    path: Path
    offset: int
    num_bytes: int
    buffer_offset: int
    is_congruent: bool = True  # both offsets agree modulo a page; O_DIRECT needs that


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """One matrix in the buffer of its expert: where its data and its scales begin."""

    format: WeightFormat
    rows: int
    columns: int
    data_offset: int
    scales_offset: int | None
    scale_dtype: torch.dtype
    selection: RowSelection | None = None  # of weight rows that alternate with those of another matrix

    def view(self, buffer: Tensor, exact: bool = False) -> Weight:
        """The matrix as stored, over the uint8 buffer that its expert was read into."""
        shape, offsets = (self.rows, self.columns), (self.data_offset, self.scales_offset)
        return view_weight(buffer, self.format, *shape, *offsets, self.scale_dtype, exact, self.selection)


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """The reads of one expert, and its matrices gate, up, down in a buffer of num_bytes, whole pages."""

    ranges: tuple[ByteRange, ...]
    matrices: tuple[MatrixLayout, ...]
    num_bytes: int

    @property
    def stored_bytes(self) -> int:
        """Bytes of the expert in the files."""
        return sum(byte_range.num_bytes for byte_range in self.ranges)

    @property
    def is_packed(self) -> bool:
        """True if a matrix is stored in few bits; such an expert is never quantized again."""
        return any(matrix.format.is_packed for matrix in self.matrices)


class ExpertDisk:
    """The routed experts of a snapshot, by default those of its sparse layers; all are checked when it is opened.

    They are read from `drives`: that of the snapshot and, if there is one, that of its mirror.
    """

    def __init__(
        self, config: ModelConfig, family: Family, index: TensorIndex, reader: FileReader, layers: Layers = None
    ) -> None:
        self.config = config
        self.family = family
        self.index = index
        self.reader = reader
        self.drives = DriveSet([Drive(index.folder, reader)])
        self.layers: tuple[int, ...] = tuple(config.sparse_layers if layers is None else layers)
        self.fused = {layer: find_fused_experts(config, family, index, layer) for layer in self.layers}
        keys = product(self.layers, range(config.num_experts))
        self.layouts: dict[ExpertKey, ExpertLayout] = {key: layout_expert(self.stored_weights(*key)) for key in keys}
        self.expert_bytes = dict.fromkeys(self.layers, 0)  # layer -> bytes that hold any of its experts as stored
        for (layer, _), layout in self.layouts.items():
            self.expert_bytes[layer] = max(self.expert_bytes[layer], layout.num_bytes)

    def stored_weights(self, layer: int, expert: int) -> list[StoredWeight]:
        """StoredWeights gate, up, down of one expert."""
        if fused := self.fused[layer]:
            return fused(expert)
        table = self.family.expert_tensors(self.config, layer, expert)
        return [find_stored_weight(self.index, *table[name]) for name in MATRICES]

    def quantizes(self, bits: int) -> bool:
        """True if any expert is quantized at load for expert_bits=`bits`."""
        return bits < 16 and not all(layout.is_packed for layout in self.layouts.values())

    def formats(self, layers: Layers = None) -> tuple[WeightFormat, ...]:
        """The distinct formats of the routed experts of all or some layers, in order of appearance."""
        layers = self.layers if layers is None else layers
        layouts = (layout for (layer, _), layout in self.layouts.items() if layer in layers)
        return tuple(dict.fromkeys(matrix.format for layout in layouts for matrix in layout.matrices))

    @property
    def max_expert_bytes(self) -> int:
        """Bytes of a buffer that holds any expert of the model as stored."""
        return max(self.expert_bytes.values(), default=0)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all experts in the files."""
        return sum(layout.stored_bytes for layout in self.layouts.values())

    def add_mirror(self, folder: Path) -> None:
        """Stripe reads over a second copy of the snapshot too. Refused where the folder is no copy."""
        paths = {byte_range.path for layout in self.layouts.values() for byte_range in layout.ranges}
        check_mirror(folder, sorted(paths))
        self.drives.all.append(Drive(folder, self.reader))

    def read_expert(self, layer: int, expert: int, buffer: memoryview) -> None:
        """Read one expert into a writable `buffer` of its layout's num_bytes or more. Thread-safe. O_DIRECT needs a
        buffer that begins at a page; others are read through the page cache."""
        self.drives.read_expert(self.layouts[layer, expert], buffer, f"expert {expert} of layer {layer}")


def layout_expert(matrices: list[StoredWeight]) -> ExpertLayout:
    """StoredWeights -> ExpertLayout: in file order, adjacent byte ranges merged, no page shared by two ranges."""
    # Matrices whose weight rows alternate share their tensors.
    entries = dict.fromkeys(entry for stored in matrices for entry in stored.entries)
    ranges: list[ByteRange] = []
    offsets: dict[tuple[Path, int], int] = {}  # (path, offset in the file) -> offset in the buffer
    end = 0
    for entry in sorted(entries, key=lambda entry: (str(entry.path), entry.offset)):
        last = ranges[-1] if ranges else None
        is_adjacent = last and (last.path, last.offset + last.num_bytes) == (entry.path, entry.offset)
        if last and is_adjacent and end % entry.item_bytes == 0:
            ranges[-1] = replace(last, num_bytes=last.num_bytes + entry.num_bytes)
        else:
            # A tensor that the file does not align to its own item size must be aligned in memory.
            is_congruent = entry.offset % entry.item_bytes == 0
            end = align_to_page(end) + (entry.offset % PAGE if is_congruent else 0)
            ranges.append(ByteRange(entry.path, entry.offset, entry.num_bytes, end, is_congruent))
        offsets[entry.path, entry.offset] = end
        end += entry.num_bytes

    def matrix_layout(stored: StoredWeight) -> MatrixLayout:
        data, scales = stored.data, stored.scales
        data_offset = offsets[data.path, data.offset]
        scales_offset = offsets[scales.path, scales.offset] if scales else None
        dtype = SCALE_DTYPES[scales.dtype] if scales else torch.float32
        shape = stored.rows, stored.columns
        return MatrixLayout(stored.format, *shape, data_offset, scales_offset, dtype, stored.selection)

    return ExpertLayout(tuple(ranges), tuple(map(matrix_layout, matrices)), align_to_page(end))
