"""KV cache by heads of several sequences of one length, for models of nanochat's kind: see generate/head_batch.py."""

from typing import Self

import torch
from torch import Tensor


class HeadKvCache:
    """Keys and values [layers, rows, capacity, heads, head_dim], a row for each sequence, zeros at first. `extra` is
    what a model keeps beside them: tensors whose first dimension is the row, cloned and dropped with it. n_layers,
    cache_seqlens, get_pos and prev_embedding are the names by which nanochat's models ask."""

    def __init__(
        self,
        num_layers: int,
        num_rows: int,
        capacity: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        shape = (num_layers, num_rows, capacity, num_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = torch.zeros(num_rows, dtype=torch.int32, device=device)  # all equal
        self.extra: dict[str, Tensor] = {}

    @property
    def n_layers(self) -> int:
        return self.keys.shape[0]

    @property
    def cache_seqlens(self) -> Tensor:
        return self.lengths

    @property
    def prev_embedding(self) -> Tensor | None:
        """Embedding [rows, 1, width] of the last token, for a model that mixes it into the next one; in `extra`."""
        return self.extra.get("prev_embedding")

    @prev_embedding.setter
    def prev_embedding(self, value: Tensor) -> None:
        self.extra["prev_embedding"] = value

    @property
    def num_rows(self) -> int:
        return self.keys.shape[1]

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    @property
    def length(self) -> int:
        """Valid positions, in every row."""
        return int(self.lengths[0])

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.keys, self.values, *self.extra.values()))

    def get_pos(self) -> int:
        return self.length

    def get_layer_cache(self, layer: int) -> tuple[Tensor, Tensor]:
        """-> (keys, values) of one layer, views [rows, capacity, heads, head_dim]."""
        return self.keys[layer], self.values[layer]

    def check_room(self, count: int) -> None:
        """ValueError where `count` more positions do not fit."""
        if self.length + count > self.capacity:
            raise ValueError(f"a cache of {self.capacity} positions with {self.length} has no room for {count} more")

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """keys, values [rows, T, heads, head_dim] of the next T positions -> (keys, values) of all up to there. The
        length stays: call `advance` when the last layer is done."""
        start, stop = self.length, self.length + keys.shape[1]
        self.check_room(stop - start)
        for store, new in zip(self.get_layer_cache(layer), (keys, values), strict=True):
            store[:, start:stop] = new
        return self.keys[layer, :, :stop], self.values[layer, :, :stop]

    def advance(self, count: int) -> None:
        self.check_room(count)
        self.lengths += count

    def trim(self, length: int) -> None:
        """Drop everything from position `length` on. ValueError beyond the valid positions."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot trim a cache of {self.length} positions to {length}")
        self.lengths.fill_(length)

    def reset(self) -> None:
        """Drop everything, what `extra` holds too."""
        self.trim(0)
        self.extra.clear()

    def keep(self, rows: list[int]) -> None:
        """Keep some rows only, in the order given, where the first ones are: no second cache exists meanwhile."""
        for layer in range(self.n_layers):
            for store in self.get_layer_cache(layer):
                store[: len(rows)] = store[rows]
        self.keys, self.values = self.keys[:, : len(rows)], self.values[:, : len(rows)]
        self.lengths = self.lengths[rows]
        self.extra = {name: tensor[rows] for name, tensor in self.extra.items()}

    def prefill(self, other: Self) -> None:
        """Copy the positions of a cache of one row, or of as many as this one. ValueError where this one is not empty,
        is of another shape, or has less capacity."""
        mine, theirs = self.keys.shape, other.keys.shape
        if self.length:
            raise ValueError(f"only an empty cache can be prefilled, this one has {self.length} positions")
        if (mine[0], *mine[3:]) != (theirs[0], *theirs[3:]) or theirs[1] not in (1, mine[1]):
            raise ValueError(f"a cache of shape {tuple(theirs)} does not fit one of {tuple(mine)}")
        if other.capacity > self.capacity:
            raise ValueError(f"a cache of {self.capacity} positions cannot hold one of {other.capacity}")
        n = other.length
        self.keys[:, :, :n], self.values[:, :, :n] = other.keys[:, :, :n], other.values[:, :, :n]
        self.lengths.fill_(n)
        repeats = self.num_rows // other.num_rows
        self.extra = {name: tensor.repeat_interleave(repeats, 0).clone() for name, tensor in other.extra.items()}

    def clone(self, num_rows: int, capacity: int) -> Self:
        """Of a cache of one row -> one of num_rows independent copies of it."""
        layers, _, _, heads, dim = self.keys.shape
        out = type(self)(layers, num_rows, capacity, heads, dim, self.keys.dtype, self.keys.device)
        out.prefill(self)
        return out


class HeadKvRow:
    """One row of a HeadKvCache as the KV cache of a sequence."""

    def __init__(self, cache: HeadKvCache, row: int):
        self.cache, self.row = cache, row

    @property
    def length(self) -> int:
        return self.cache.length

    def trim(self, length: int) -> None:
        """As of the cache, for all rows: they have one length."""
        if length < self.cache.length:
            self.cache.trim(length)
