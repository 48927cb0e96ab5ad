"""A chunk: the rows that go through all layers together, of one sequence or of several."""

from dataclasses import dataclass

import torch

from forward.kv_cache import KvCache
from kernels.reference import rope_angles


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows start..stop of a chunk are the next positions of one sequence."""

    kv: KvCache
    first: int  # position of its first row
    start: int
    stop: int

    @property
    def rows(self):
        return slice(self.start, self.stop)

    @property
    def positions(self):
        return torch.arange(self.first, self.first + self.stop - self.start)


@dataclass(frozen=True, slots=True)
class Chunk:
    """T rows: their token ids and rotary angles, and which sequence each belongs to."""

    ids: torch.Tensor  # [T]
    segments: tuple[Segment, ...]
    cos: torch.Tensor  # [T, rope_head_dim / 2]
    sin: torch.Tensor

    def __len__(self):
        return len(self.ids)


def make_chunk(config, pieces, is_mtp=False):
    """[(ids, kv), ...] -> Chunk; each sequence at most once. is_mtp: the rows are the next slots of the
    multi-token-prediction layer, which has positions of its own."""
    ids, segments = [], []
    for piece, kv in pieces:
        first = kv.mtp_length if is_mtp else kv.length
        segments.append(Segment(kv, first, len(ids), len(ids) + len(piece)))
        ids += piece
    positions = torch.cat([segment.positions for segment in segments])
    cos, sin = rope_angles(positions, torch.tensor(config.rope.frequencies), config.rope.factor)
    return Chunk(torch.tensor(ids), tuple(segments), cos, sin)


def split_batch(batch, max_rows):
    """Cut [(ids, kv), ...] into lists of pieces of at most max_rows rows in all, in order."""
    chunk, rows = [], 0
    for ids, kv in batch:
        at = 0
        while at < len(ids):
            piece = ids[at : at + max_rows - rows]
            chunk.append((piece, kv))
            at, rows = at + len(piece), rows + len(piece)
            if rows == max_rows:
                yield chunk
                chunk, rows = [], 0
    if chunk:
        yield chunk
