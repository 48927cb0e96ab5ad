"""What attention remembers of several rows: by heads, or as the latents of MLA. Both are cloned, trimmed, thinned out.

All rows of a HeadCache have the same length. LatentCache holds one KvCache (forward/kv_cache.py) for each row, and each
has a length of its own, for a row whose guesses are right is ahead of the others.
"""

import torch

from forward.kv_cache import make_kv_cache


class HeadKvCache:
    """Keys and values [layers, rows, capacity, heads, head_dim], zeros at first. `extra` is what a model keeps for each
    row beside them: tensors whose first dimension is the row, cloned and thinned out with it."""

    def __init__(self, num_layers, num_rows, capacity, num_heads, head_dim, dtype=torch.float32, device="cpu"):
        shape = (num_layers, num_rows, capacity, num_heads, head_dim)
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.lengths = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.extra = {}

    @property
    def num_rows(self):
        return self.keys.shape[1]

    @property
    def capacity(self):
        return self.keys.shape[2]

    @property
    def length(self):
        """Positions that are known, in every row."""
        return int(self.lengths[0])

    @property
    def bytes(self):
        return sum(t.numel() * t.element_size() for t in (self.keys, self.values, *self.extra.values()))

    def get_pos(self):
        """As `length`: the name that nanochat's models use."""
        return self.length

    def get_layer_cache(self, layer):
        """-> (keys, values) of one layer, views [rows, capacity, heads, head_dim]."""
        return self.keys[layer], self.values[layer]

    def check_room(self, count):
        """ValueError where `count` more positions do not fit."""
        if self.length + count > self.capacity:
            raise ValueError(f"a cache of {self.capacity} positions with {self.length} has no room for {count} more")

    def append(self, layer, keys, values):
        """keys, values [rows, T, heads, head_dim] of the next T positions -> (keys, values) of all up to there. The
        length stays: `advance` when the last layer is done."""
        start, stop = self.length, self.length + keys.shape[1]
        self.check_room(stop - start)
        for store, new in zip(self.get_layer_cache(layer), (keys, values), strict=True):
            store[:, start:stop] = new
        return self.keys[layer, :, :stop], self.values[layer, :, :stop]

    def advance(self, count):
        self.check_room(count)
        self.lengths += count

    def trim(self, length):
        """Forget everything from position `length` on. ValueError for a length that is not known."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot trim a cache of {self.length} positions to {length}")
        self.lengths.fill_(length)

    def reset(self):
        """Forget everything, what `extra` holds too."""
        self.trim(0)
        self.extra.clear()

    def keep(self, rows):
        """Go on with some rows only, in the order given."""
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]
        self.lengths = self.lengths[rows]
        self.extra = {name: tensor[rows] for name, tensor in self.extra.items()}

    def prefill(self, other):
        """Take the positions of a cache of one row, or of as many as this one. ValueError where this one is not empty,
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

    def clone(self, num_rows, capacity):
        """A cache of one row -> one of num_rows independent copies of it."""
        layers, _, _, heads, dim = self.keys.shape
        out = HeadKvCache(layers, num_rows, capacity, heads, dim, self.keys.dtype, self.keys.device)
        out.prefill(self)
        return out


class BatchKvCache:
    """A KvCache for each row."""

    def __init__(self, states):
        self.states = states

    @staticmethod
    def empty(config, capacity, num_rows=1):
        return BatchKvCache([make_kv_cache(config, capacity) for _ in range(num_rows)])

    @property
    def num_rows(self):
        return len(self.states)

    @property
    def capacity(self):
        return self.states[0].capacity

    @property
    def lengths(self):
        """Positions that are known, of each row."""
        return [state.length for state in self.states]

    @property
    def bytes(self):
        return sum(state.num_bytes for state in self.states)

    def trim(self, length):
        """Forget everything from position `length` on, in every row. ValueError for a length that one does not know."""
        for state in self.states:
            state.trim(length)

    def trim_rows(self, lengths):
        """As `trim`, to a length for each row."""
        for state, length in zip(self.states, lengths, strict=True):
            state.trim(length)

    def reset(self):
        self.trim(0)

    def keep(self, rows):
        """Go on with some rows only, in the order given."""
        self.states = [self.states[row] for row in rows]

    def clone(self, num_rows, capacity):
        """A cache of one row -> one of num_rows independent copies of it."""
        [state] = self.states
        return BatchKvCache([state.clone(capacity) for _ in range(num_rows)])
