"""KV cache of one sequence: latents and rotated keys (MLA) or keys and values (GQA) of its tokens, for every layer.

float32, or rounded when it is written to bfloat16 or to int8 in groups of 64 columns (config.kv_dtype). Pages cost
memory only once written, so a large capacity is cheap.

L decoder layers and after them the multi-token prediction (MTP) layer, C capacity in positions, T new positions, S all
positions up to the last new one.
"""

from typing import Self

import torch
from torch import Tensor

from kernels.dispatch import quantize_kv
from kernels.kv_rows import Int8Rows, KvRows, int8_row_bytes
from snapshot.config import ModelConfig

KV_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}


class KvCache:
    """The first `length` positions are valid, the rest is scratch.

    The MTP layer has a length of its own, mtp_length, because its position i needs the token after position i. Its
    position 0 is that of position mtp_base of the sequence, where drafting began.
    """

    def __init__(self, config: ModelConfig, capacity: int) -> None:
        self.config = config
        self.capacity = capacity
        self.length = 0
        self.mtp_base = 0
        self.mtp_length = 0
        # All that is kept, each [layers, C, width]; with int8 rows of bytes.
        self.tensors = [self._allocate(config.num_layers + 1, width, kv_heads(config)) for width in config.kv_widths]

    def _allocate(self, num_layers: int, width: int, num_heads: int) -> Tensor:
        dtype, stored = KV_DTYPES[self.config.kv_dtype], stored_width(self.config, width, num_heads)
        return torch.empty(num_layers, self.capacity, stored, dtype=dtype)

    def append(self, layer: int, first: Tensor, second: Tensor) -> tuple[KvRows, KvRows]:
        """New latents and rotated keys, or keys and values, [T, width] -> those of all positions, [S, width]."""
        (one, other), num_heads = self.tensors[:2], kv_heads(self.config)
        return (
            self._append(one[layer], layer, first, num_heads),
            self._append(other[layer], layer, second, num_heads),
        )

    def _append(self, store: Tensor, layer: int, rows: Tensor, num_heads: int) -> KvRows:
        """rows [T, width] -> store [C, width] of the layer up to them, [S, width], or as int8 those of each head."""
        start = self.length if layer < self.config.num_layers else self.mtp_length
        end = start + len(rows)
        if store.dtype != torch.uint8:
            store[start:end] = rows
            return store[:end]
        quantize_kv(rows, num_heads, store[start:end])
        return Int8Rows(store[:end], rows.shape[1] // num_heads)

    def floats(self, at: int, rows: Tensor) -> Tensor:
        """Rows [T, width] of tensors[at] as float32."""
        if rows.dtype != torch.uint8:
            return rows.float()
        num_heads = kv_heads(self.config) if at < 2 else 1
        width = (*self.config.kv_widths, self.config.index_head_dim)[at] // num_heads
        return Int8Rows(rows, width).heads(num_heads).float()

    @property
    def room(self) -> int:
        """Positions that can still be appended."""
        return self.capacity - self.length

    def advance(self, count: int) -> None:
        """Count `count` positions that every layer has appended. ValueError beyond the capacity."""
        if count > self.room:
            raise ValueError(f"the KV cache is full: {self.length} + {count} of {self.capacity} positions")
        self.length += count

    def trim(self, length: int) -> None:
        """Drop everything from position `length` on. ValueError beyond the valid positions."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot trim a KV cache of {self.length} positions to {length}")
        self.length = length
        # The token after the last position may be another one now.
        self.mtp_length = max(0, min(self.mtp_length, length - 1 - self.mtp_base))

    def clone(self, capacity: int | None = None) -> Self:
        """An independent copy, by default of the same capacity. ValueError if the positions do not fit."""
        other = type(self)(self.config, capacity or self.capacity)
        other.copy_prefix(self, self.length)
        return other

    def copy_prefix(self, other: Self, length: int) -> None:
        """Become a copy of the first `length` positions of another cache of the same config. ValueError for more than
        are valid there or fit here."""
        if not 0 <= length <= min(other.length, self.capacity):
            raise ValueError(f"cannot copy {length} of {other.length} positions to a KV cache of {self.capacity}")
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            mine[:, :length] = theirs[:, :length]
        self.length, self.mtp_base, self.mtp_length = other.length, other.mtp_base, other.mtp_length
        if length < other.length:
            self.trim(length)


class MlaKvCache(KvCache):
    """Normed latents and rotated keys, which all heads share; index keys in layers that run a DSA indexer."""

    def __init__(self, config: ModelConfig, capacity: int) -> None:
        super().__init__(config, capacity)
        self.latents, self.rope_keys = self.tensors  # [L + 1, C, kv_lora_rank], [L + 1, C, rope_head_dim]
        self.index_rows = {layer: row for row, layer in enumerate(index_layers(config))}
        self.index_keys = self._allocate(len(self.index_rows), config.index_head_dim, 1)  # [their number, C, width]
        self.tensors.append(self.index_keys)

    def append_index(self, layer: int, keys: Tensor) -> KvRows:
        """keys [T, index_head_dim] of new positions -> [S, index_head_dim]."""
        return self._append(self.index_keys[self.index_rows[layer]], layer, keys, 1)


class GqaKvCache(KvCache):
    """Rotated keys and values, the KV heads of a position side by side."""

    def __init__(self, config: ModelConfig, capacity: int) -> None:
        super().__init__(config, capacity)
        # [L + 1, C, num_kv_heads * qk_head_dim], [L + 1, C, num_kv_heads * v_head_dim]
        self.keys, self.values = self.tensors


def make_kv_cache(config: ModelConfig, capacity: int) -> KvCache:
    """An empty KV cache for the model's kind of attention."""
    return MlaKvCache(config, capacity) if config.attention == "mla" else GqaKvCache(config, capacity)


def kv_cache_bytes(config: ModelConfig, capacity: int) -> int:
    """Memory of a cache of that capacity once every position is written."""
    return capacity * position_bytes(config, config.num_layers + 1, len(index_layers(config)))


def position_bytes(config: ModelConfig, num_layers: int, num_indexers: int) -> int:
    """Bytes of a position in `num_layers` layers, of which `num_indexers` keep index keys."""
    layer = sum(stored_width(config, width, kv_heads(config)) for width in config.kv_widths)
    width = num_layers * layer + num_indexers * stored_width(config, config.index_head_dim, 1)
    return KV_DTYPES[config.kv_dtype].itemsize * width


def stored_width(config: ModelConfig, width: int, num_heads: int) -> int:
    """Elements that a row of `width` columns takes in the cache."""
    return num_heads * int8_row_bytes(width // num_heads) if config.kv_dtype == "int8" else width


def kv_heads(config: ModelConfig) -> int:
    """Heads whose keys and values lie side by side in a row: one for all with MLA."""
    return 1 if config.attention == "mla" else config.num_kv_heads


def index_layers(config: ModelConfig) -> list[int]:
    """The layers that run an indexer, the MTP layer (number num_layers) included."""
    return [layer for layer in range(config.num_layers + 1) if config.has_own_indexer(layer)]
