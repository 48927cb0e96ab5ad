"""Step 1 of an expert's way: (layer, expert) -> where its bytes lie, and reading them. No policy, no memory of its own.

Runs that touch in a file are read at once: in published files the three matrices of an expert lie together, so an
expert is one read. A fused layer (all experts in two 3-D tensors) costs two.
"""

from dataclasses import dataclass
from pathlib import Path

from kernels.packing import DTYPES
from snapshot.errors import Refused

PAGE = 4096
MATRICES = ("gate", "up", "down")


@dataclass(frozen=True, slots=True)
class Run:
    """One read: num_bytes at `offset` of the file, to `at` in the buffer."""

    path: Path
    offset: int
    num_bytes: int
    at: int


@dataclass(frozen=True, slots=True)
class Piece:
    """One matrix in the buffer an expert was read into."""

    at: int
    dtype: str
    shape: tuple[int, int]


@dataclass(frozen=True, slots=True)
class ExpertPlace:
    """Reads and layout of one expert; `pieces` in the order gate, up, down."""

    runs: tuple[Run, ...]
    pieces: tuple[Piece, ...]
    num_bytes: int


class ExpertDisk:
    """The routed experts of a snapshot, all checked when it is opened."""

    def __init__(self, config, family, index, reader):
        self.reader = reader
        self.places = {}
        # layer -> bytes that hold any expert of it as stored
        self.expert_bytes = dict.fromkeys(config.sparse_layers, 0)
        for layer in config.sparse_layers:
            fused = fused_entries(config, family, index, layer)
            for expert in range(config.num_experts):
                if fused:
                    parts = fused_parts(fused, expert, config.moe_intermediate_size)
                else:
                    table = family.expert_tensors(config, layer, expert)
                    entries = [index.find(*table[word]) for word in MATRICES]
                    parts = [(e.path, e.offset, e.num_bytes, e.dtype, e.shape) for e in entries]
                place = self.places[layer, expert] = lay_out(parts)
                self.expert_bytes[layer] = max(self.expert_bytes[layer], place.num_bytes)

    @property
    def max_expert_bytes(self):
        """Bytes of a buffer that holds any expert of the model as stored."""
        return max(self.expert_bytes.values(), default=0)

    def read(self, layer, expert, buffer):
        """Read one expert into `buffer` -> ExpertPlace, which says where its matrices now lie in it."""
        place = self.places[layer, expert]
        for run in place.runs:
            part = buffer[run.at : run.at + run.num_bytes]
            self.reader.read_into(run.path, run.offset, part, f"expert {expert} of layer {layer}")
        return place


def fused_entries(config, family, index, layer):
    """The two 3-D tensors of a layer, or None when its experts are stored one by one."""
    table = family.fused_expert_tensors(config, layer)
    present = [name in index for name, _ in table.values()]
    if not any(present):
        return None
    single = family.expert_tensors(config, layer, 0)["gate"][0]
    if single in index:
        raise Refused(f"{index.folder}: layer {layer} has its experts twice, as {single} and fused")
    return {word: index.find(*table[word]) for word in table}


def fused_parts(fused, expert, width):
    """Gate rows, then up rows, of one slice; the down matrix of another."""
    gate_up, down = fused["gate_up"], fused["down"]
    hidden = gate_up.shape[2]
    half = width * hidden * gate_up.item_bytes
    start = gate_up.offset + 2 * half * expert
    down_bytes = hidden * width * down.item_bytes
    return [
        (gate_up.path, start, half, gate_up.dtype, (width, hidden)),
        (gate_up.path, start + half, half, gate_up.dtype, (width, hidden)),
        (down.path, down.offset + down_bytes * expert, down_bytes, down.dtype, (hidden, width)),
    ]


def lay_out(parts):
    """Matrices (path, offset, bytes, dtype, shape) -> ExpertPlace: buffer order is file order, touching runs merge."""
    runs, pieces, end = [], [None] * len(parts), 0
    for i in sorted(range(len(parts)), key=lambda i: (str(parts[i][0]), parts[i][1])):
        path, offset, num_bytes, dtype, shape = parts[i]
        last = runs[-1] if runs else None
        touches = last and last.path == path and last.offset + last.num_bytes == offset
        if touches and end % DTYPES[dtype].itemsize == 0:
            runs[-1] = Run(path, last.offset, last.num_bytes + num_bytes, last.at)
        else:
            end = -(-end // PAGE) * PAGE
            runs.append(Run(path, offset, num_bytes, end))
        pieces[i] = Piece(end, dtype, tuple(shape))
        end += num_bytes
    return ExpertPlace(tuple(runs), tuple(pieces), end)
