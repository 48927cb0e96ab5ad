"""The mutable timeline of one sequence: what attention remembers of its tokens.

For each position and layer the normed latent (kv_lora_rank floats) and the rotated shared key (rope_head_dim); with
grouped queries the rotated keys stand in place of the latents, and the values in place of the shared keys. For each
layer that runs an indexer its key (index_head_dim). There is a row for every layer and one more for the
multi-token-prediction layer. float32, or what is appended is rounded to bfloat16, half to even (config.kv_dtype).
Pages cost memory only once written, so a long capacity is cheap.
"""

from dataclasses import dataclass

import torch

from kernels.formats import FORMATS


@dataclass(frozen=True, slots=True)
class LayerKvCache:
    """One layer of a KvState, bound at its current length: `append` writes there, and returns all up to the new end."""

    latents: torch.Tensor  # [capacity, kv_lora_rank], or all keys side by side
    rope_keys: torch.Tensor  # [capacity, rope_head_dim], or all values
    index_keys: torch.Tensor | None  # [capacity, index_head_dim] on layers with an indexer
    length: int

    def append(self, latents, rope_keys):
        """Rows of new positions -> (latents, rope_keys) of positions 0 .. new length."""
        return self._append(self.latents, latents), self._append(self.rope_keys, rope_keys)

    def append_index(self, keys):
        return self._append(self.index_keys, keys)

    def _append(self, store, rows):
        end = self.length + len(rows)
        store[self.length : end] = rows
        return store[:end]


def kv_dtype(config):
    """What a KvState of this model holds, as torch calls it."""
    return FORMATS[config.kv_dtype].dtype


class KvCache:
    """Capacity in positions. `length` positions are known; rows beyond it are scratch.

    The MTP layer's row has its own count, mtp_length: slot i of it needs the token after position i. Its first slot is
    that of position mtp_base, where drafting began.
    """

    def __init__(self, config, capacity):
        self.config, self.capacity, self.length = config, capacity, 0
        self.mtp_base = self.mtp_length = 0
        rows, dtype = config.num_layers + 1, kv_dtype(config)
        self.latents, self.rope_keys = (torch.empty(rows, capacity, width, dtype=dtype) for width in config.kv_widths)
        full = [i for i in range(rows) if config.layer_is_full(i)]
        self.index_rows = {layer: row for row, layer in enumerate(full)}
        self.index_keys = torch.empty(len(full), capacity, config.index_head_dim, dtype=dtype)

    @staticmethod
    def bytes_for(config, capacity):
        """Bytes of a state of that capacity, fully written."""
        rows = config.num_layers + 1
        full = sum(config.layer_is_full(i) for i in range(rows))
        width = rows * sum(config.kv_widths) + full * config.index_head_dim
        return kv_dtype(config).itemsize * capacity * width

    @property
    def bytes(self):
        return self.bytes_for(self.config, self.capacity)

    @property
    def room(self):
        """Positions that can still be appended."""
        return self.capacity - self.length

    def bind(self, layer):
        """The rows of one layer (num_layers is the MTP layer) as the forward pass uses them."""
        row = self.index_rows.get(layer)
        index_keys = None if row is None else self.index_keys[row]
        length = self.length if layer < self.config.num_layers else self.mtp_length
        return LayerKvCache(self.latents[layer], self.rope_keys[layer], index_keys, length)

    def advance(self, count):
        """`count` positions have been written in every layer. ValueError beyond the capacity."""
        if count > self.room:
            raise ValueError(f"KV state of {self.capacity} positions is full: {self.length} + {count}")
        self.length += count

    def trim(self, length):
        """Forget everything from position `length` on. ValueError for a length that is not known."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot trim a KV state of {self.length} positions to {length}")
        self.length = length
        # The token after the last position may be another one now.
        self.mtp_length = max(0, min(self.mtp_length, length - 1 - self.mtp_base))

    def clone(self, capacity=None):
        """An independent copy of the known positions, by default with the same capacity."""
        capacity = self.capacity if capacity is None else capacity
        if capacity < self.length:
            raise ValueError(f"a clone of {capacity} positions cannot hold {self.length}")
        other = KvCache(self.config, capacity)
        other.take(self, self.length)
        return other

    def take(self, other, length):
        """Become a copy of the first positions of another state of the same config, `length` of them. ValueError for
        more than it knows, or than fit here."""
        if not 0 <= length <= min(other.length, self.capacity):
            raise ValueError(
                f"{length} of {other.length} positions cannot be taken over by a KV state of {self.capacity}"
            )
        for mine, theirs in (
            (self.latents, other.latents),
            (self.rope_keys, other.rope_keys),
            (self.index_keys, other.index_keys),
        ):
            mine[:, :length] = theirs[:, :length]
        self.length, self.mtp_base, self.mtp_length = other.length, other.mtp_base, other.mtp_length
        if length < other.length:
            self.trim(length)
