"""A chunk: the token rows that go through all layers together, of one sequence or of several (chunked prefill).

T token rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from forward.kv_cache import KvCache, MlaKvCache
from kernels.reference import rope_angles
from snapshot.config import ModelConfig

K = TypeVar("K", bound=KvCache)
TokenBatch = list[tuple[list[int], KvCache]]  # new tokens of each sequence, and its KV cache


@dataclass(frozen=True, slots=True)
class Segment(Generic[K]):
    """Some rows of a chunk: the next positions of one sequence."""

    kv: K
    first_position: int
    rows: slice


@dataclass(frozen=True, slots=True)
class Chunk(Generic[K]):
    ids: Tensor  # [T]
    positions: Tensor  # [T]
    segments: tuple[Segment[K], ...]
    selections: list[Tensor | None]  # of each segment, by the last DSA indexer: [rows, index_topk], or None for all
    cos: Tensor  # [T, rope_head_dim / 2] of the rotary angles
    sin: Tensor

    def __len__(self) -> int:
        return len(self.ids)


MlaChunk = Chunk[MlaKvCache]  # of a model with MLA


def make_chunk(config: ModelConfig, batch: TokenBatch, is_mtp: bool = False) -> Chunk:
    """The next tokens of each sequence as one chunk; each sequence at most once.

    is_mtp: the rows are the next positions of the MTP layer, counted by mtp_length.
    """
    ids: list[int] = []
    segments = []
    spans = []  # positions of each sequence
    for new_ids, kv in batch:
        first_position = kv.mtp_length if is_mtp else kv.length
        segments.append(Segment(kv, first_position, slice(len(ids), len(ids) + len(new_ids))))
        spans.append(torch.arange(first_position, first_position + len(new_ids)))
        ids += new_ids
    positions = torch.cat(spans)
    cos, sin = rope_angles(positions, torch.tensor(config.rope.frequencies), config.rope.factor)
    return Chunk(torch.tensor(ids), positions, tuple(segments), [None] * len(segments), cos, sin)


def split_batch(batch: TokenBatch, max_rows: int) -> Iterator[TokenBatch]:
    """Split a batch in order into batches of at most max_rows token rows."""
    part: TokenBatch = []
    room = max_rows
    for ids, kv in batch:
        while ids:
            part.append((ids[:room], kv))
            ids = ids[room:]
            room -= len(part[-1][0])
            if not room:
                yield part
                part, room = [], max_rows
    if part:
        yield part
