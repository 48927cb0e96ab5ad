"""Step 1 of an expert's way: (layer, expert) -> where its bytes lie, and reading them. No policy, no memory of its own.

Runs that touch in a file are read at once: in published files the three matrices of an expert lie together, and in
our containers their scales do too, so an expert is one read. A fused layer (snapshot/fused.py) costs two, or four.

A run lies in the buffer as it lies in the file, modulo a page, and shares no page with another: so the same layout
takes the run's bytes alone (a buffered read), or all pages that hold some of them (a direct one).
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from experts.drive import Drive, DriveSet, check_mirror
from kernels.formats import SCALE_DTYPES, WeightFormat
from kernels.weight import RowSelection
from snapshot.formats import find_stored_weight
from snapshot.fused import find_fused_experts
from snapshot.reader import PAGE, align_to_page

MATRICES = ("gate", "up", "down")


@dataclass(frozen=True, slots=True)
class ByteRange:
    """One read: num_bytes at `offset` of the file, to `at` in the buffer."""

    path: Path
    offset: int
    num_bytes: int
    at: int
    is_congruent: bool = True  # at and offset agree modulo a page: without that it cannot be read directly


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """One matrix in the buffer an expert was read into: where its data and its scales, if any, begin."""

    format: WeightFormat
    rows: int
    columns: int
    at: int
    scales_at: int | None
    scale_dtype: torch.dtype | None
    within: RowSelection | None = None


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """Reads and layout of one expert; `pieces` in the order gate, up, down; the buffer is num_bytes, whole pages."""

    runs: tuple[ByteRange, ...]
    pieces: tuple[MatrixLayout, ...]
    num_bytes: int

    @property
    def stored_bytes(self):
        """Bytes of the files that belong to the expert."""
        return sum(run.num_bytes for run in self.runs)

    @property
    def is_packed(self):
        """Whether a matrix is stored in few bits: then the expert is kept as stored, whatever is asked."""
        return any(piece.format.is_packed for piece in self.pieces)


class ExpertDisk:
    """The routed experts of a snapshot, all checked when it is opened; by default those of its sparse layers.

    They are read from `drives`: the snapshot's own, and that of a mirror when there is one.
    """

    def __init__(self, config, family, index, reader, layers=None):
        self.config, self.family, self.index, self.reader = config, family, index, reader
        self.drives = DriveSet([Drive(index.folder, reader)])
        self.layers = layers = config.sparse_layers if layers is None else layers
        self.fused = {layer: find_fused_experts(config, family, index, layer) for layer in layers}
        self.places = {}
        # layer -> bytes that hold any expert of it as stored
        self.expert_bytes = dict.fromkeys(layers, 0)
        for layer in layers:
            for expert in range(config.num_experts):
                place = self.places[layer, expert] = lay_out(self.matrices(layer, expert))
                self.expert_bytes[layer] = max(self.expert_bytes[layer], place.num_bytes)

    def matrices(self, layer, expert):
        """StoredWeights gate, up, down of one expert."""
        if self.fused[layer]:
            return self.fused[layer](expert)
        table = self.family.expert_tensors(self.config, layer, expert)
        return [find_stored_weight(self.index, *table[word]) for word in MATRICES]

    def packs(self, bits):
        """Whether any expert is packed at load when `bits` are asked for."""
        return bits < 16 and not all(place.is_packed for place in self.places.values())

    def formats(self, layers=None):
        """The formats of the routed experts, of all layers or of some, each once, in the order in which they come."""
        layers = self.layers if layers is None else layers
        places = (place for (layer, _), place in self.places.items() if layer in layers)
        return tuple(dict.fromkeys(piece.format for place in places for piece in place.pieces))

    @property
    def max_expert_bytes(self):
        """Bytes of a buffer that holds any expert of the model as stored."""
        return max(self.expert_bytes.values(), default=0)

    @property
    def stored_bytes(self):
        """Bytes of the files that belong to any expert."""
        return sum(place.stored_bytes for place in self.places.values())

    @property
    def depth(self):
        """Reads to keep in flight."""
        return self.drives.depth

    def add_mirror(self, folder):
        """Read from a second copy of the snapshot too; Refused where it is none."""
        check_mirror(folder, sorted({run.path for place in self.places.values() for run in place.runs}))
        self.drives.append(Drive(folder, self.reader))

    def read(self, layer, expert, buffer):
        """Read one expert into `buffer`, a writable memoryview of its place's num_bytes or more, laid out as the place
        says. Threads may call it at once. Direct reads need a buffer that begins at a page; others are buffered."""
        self.drives.read(self.places[layer, expert], buffer, f"expert {expert} of layer {layer}")


def lay_out(matrices):
    """StoredWeights -> ExpertPlace: buffer order is file order, runs that touch merge, no two share a page."""
    # Matrices whose rows lie by turns share what they are in.
    entries = dict.fromkeys(entry for stored in matrices for entry in stored.entries)
    runs, at, end = [], {}, 0
    for entry in sorted(entries, key=lambda entry: (str(entry.path), entry.offset)):
        last = runs[-1] if runs else None
        touches = last and last.path == entry.path and last.offset + last.num_bytes == entry.offset
        if touches and end % entry.item_bytes == 0:
            runs[-1] = replace(last, num_bytes=last.num_bytes + entry.num_bytes)
        else:
            # Where the file puts numbers across their own size, memory cannot do as the file does.
            is_congruent = entry.offset % entry.item_bytes == 0
            end = align_to_page(end) + (entry.offset % PAGE if is_congruent else 0)
            runs.append(ByteRange(entry.path, entry.offset, entry.num_bytes, end, is_congruent))
        at[entry.path, entry.offset] = end
        end += entry.num_bytes

    def piece_of(stored):
        data, scales = stored.data, stored.scales
        scales_at = scales and at[scales.path, scales.offset]
        scale_dtype = scales and SCALE_DTYPES[scales.dtype]
        data_at = at[data.path, data.offset]
        return MatrixLayout(stored.format, stored.rows, stored.columns, data_at, scales_at, scale_dtype, stored.within)

    return ExpertLayout(tuple(runs), tuple(map(piece_of, matrices)), align_to_page(end))
