"""Eviction policy of the expert cache: decayed use counts (LFU with aging); bookkeeping, no bytes.

The cache reports every use, admission and eviction, and asks for a victim. All layers share one budget, of which each
layer keeps at least `floor` experts. An expert's score is the sum over its uses of

    RECENT_WEIGHT * 2^(-age / RECENT) + 2^(-age / STEADY)

which joins recency with popularity; either alone loses where the other wins. Ages are in tokens: a prefill of T rows
ages every count by T tokens and adds the rows of each expert. They are the layer's own tokens, otherwise a layer would
look stale just because its turn comes later, as in plain LRU over a cycle of layers, which evicts what is needed next.
On the contrary: of two experts with one score, that of the layer just computed is evicted, for its next use is the
farthest away.
"""

import math
from bisect import insort
from collections.abc import Collection, Sequence

ExpertKey = tuple[int, int]  # (layer, expert)
Keys = Collection[ExpertKey]

RECENT, STEADY = 4, 128  # half-lives, tokens
REMEMBERED = 512  # half-life of the counts that later runs start with
RECENT_WEIGHT = 16.0
SWEEP_HALVINGS = 2.0  # of the score of a layer that runs again only after a whole sweep over the layers
RESCALE_ABOVE = 1e100  # sums are scaled back before they overflow
FLOOR_DIVISOR = 4  # a layer's floor is one token's experts, at most a quarter of a layer's average slots
MIN_COUNT = 0.01  # decayed uses worth saving
MAX_HALVINGS = 300  # 2^-300 is nothing, and RESCALE_ABOVE * 2^300 still a float


def layer_floor(num_active: int, average_slots: int) -> int:
    """Cached experts that each layer keeps, with `num_active` experts a token and so many slots a layer on average."""
    return min(average_slots, max(1, min(num_active, average_slots // FLOOR_DIVISOR)))


class DecayedCounts:
    """Uses of one layer's experts, halved every `half_life` tokens.

    Instead of scaling all sums down, a new use is worth more: `unit` is what one use counts now.
    """

    def __init__(self, num_experts: int, half_life: int) -> None:
        self.sums = [0.0] * num_experts
        self.half_life = half_life
        self.unit = 1.0
        self.last_weight = 0.0  # of each use that was added last

    def add(self, uses: dict[int, int], tokens: int) -> None:
        """uses {expert: rows}: spread evenly over the next `tokens` tokens, of which the last is now."""
        if self.unit > RESCALE_ABOVE:
            self.sums, self.unit = [total / self.unit for total in self.sums], 1.0
        halvings = tokens / self.half_life
        self.unit *= 2.0 ** min(halvings, MAX_HALVINGS)
        # At the end of a chunk its rows have decayed by that much on average.
        is_one = tokens == 1
        self.last_weight = self.unit if is_one else self.unit * (1 - 2.0**-halvings) / (halvings * math.log(2))
        for expert, rows in uses.items():
            self.sums[expert] += rows * self.last_weight

    def subtract_last(self, uses: dict[int, int]) -> None:
        """Take back {expert: rows} of what was added last."""
        for expert, rows in uses.items():
            self.sums[expert] = max(0.0, self.sums[expert] - rows * self.last_weight)


class LayerUsage:
    """The use counts of one layer, and its cached experts in order of eviction."""

    def __init__(self, num_experts: int) -> None:
        self.recent = DecayedCounts(num_experts, RECENT)
        self.steady = DecayedCounts(num_experts, STEADY)
        self.remembered = DecayedCounts(num_experts, REMEMBERED)
        self.last_used = [0] * num_experts  # number of the call to `record_uses`
        self.cached: set[int] = set()
        self.ranking: list[tuple[float, int, int]] | None = None  # ascending ranks; None: sorted when needed

    @property
    def counts(self) -> tuple[DecayedCounts, ...]:
        return self.recent, self.steady, self.remembered

    def score(self, expert: int) -> float:
        recent, steady = self.recent, self.steady
        return RECENT_WEIGHT * recent.sums[expert] / recent.unit + steady.sums[expert] / steady.unit

    def ranked(self) -> list[tuple[float, int, int]]:
        if self.ranking is None:
            self.ranking = sorted(map(self.rank, self.cached))
        return self.ranking

    def rank(self, expert: int) -> tuple[float, int, int]:
        return self.score(expert), self.last_used[expert], expert


class EvictionPolicy:
    """One budget over all layers; the expert with the lowest score is evicted."""

    def __init__(self, layers: Sequence[int], num_experts: int, floor: int) -> None:
        """layers: ids in the order in which they run; floor: cached experts that each layer keeps, 0 or more."""
        self.layers = {layer: LayerUsage(num_experts) for layer in layers}
        self.floor = floor
        self.positions = {layer: position for position, layer in enumerate(self.layers)}
        count = len(self.layers)
        # For the layer that runs, the next one, ...: the factor of a score that waits so long for its next use.
        self.wait_factors = [2.0 ** (-SWEEP_HALVINGS * ((ahead or count) / count)) for ahead in range(count)]
        self.running = count - 1  # position of the layer that runs
        self.num_calls = 0

    def record_uses(self, layer: int, uses: dict[int, int], chunk_rows: int) -> None:
        """A layer runs: uses {expert: how many of the chunk's rows chose it}."""
        self.running = self.positions[layer]
        self.num_calls += 1
        usage = self.layers[layer]
        for counts in usage.counts:
            counts.add(uses, chunk_rows)
        for expert in uses:
            usage.last_used[expert] = self.num_calls
        usage.ranking = None

    def retract_uses(self, layer: int, uses: dict[int, int]) -> None:
        """Of the layer's last uses, {expert: rows} were by draft tokens that were rejected."""
        usage = self.layers[layer]
        for counts in usage.counts:
            counts.subtract_last(uses)
        usage.ranking = None

    def admit(self, key: ExpertKey) -> None:
        """The expert is cached from now on."""
        layer, expert = key
        usage = self.layers[layer]
        usage.cached.add(expert)
        if usage.ranking is not None:
            insort(usage.ranking, usage.rank(expert))

    def evict(self, key: ExpertKey) -> None:
        """The expert is cached no longer. KeyError if it was not."""
        layer, expert = key
        usage = self.layers[layer]
        usage.cached.remove(expert)
        if usage.ranking is not None:
            usage.ranking = [rank for rank in usage.ranking if rank[2] != expert]

    def victim(self, protected: Keys, layer: int | None = None) -> ExpertKey | None:
        """The expert to evict next: the lowest score outside of `protected`, in layers with more than `floor` cached
        experts or the requesting `layer`. Ties: the one used longest ago, then the lowest key."""
        lowest: tuple[float, int] = (math.inf, 0)
        victim = None
        ahead = -self.running
        for candidate, usage in self.layers.items():
            factor = self.wait_factors[ahead]
            ahead += 1
            if len(usage.cached) > self.floor or candidate == layer:
                for score, last_used, expert in usage.ranking or usage.ranked():
                    if score * factor > lowest[0]:
                        break
                    if (candidate, expert) not in protected:
                        rank = score * factor, last_used
                        if rank < lowest:
                            lowest, victim = rank, (candidate, expert)
                        break
        return victim

    def score(self, key: ExpertKey, more_rows: int = 0) -> float:
        """The score that victim() compares now, of an expert that is cached or not, as if `more_rows` more token rows
        had used it. In uses, 0 or more."""
        layer, expert = key
        score = self.layers[layer].score(expert) + (RECENT_WEIGHT + 1) * more_rows
        return score * self.wait_factors[self.positions[layer] - self.running]

    def use_counts(self) -> dict[ExpertKey, float]:
        """{key: uses decayed with a half-life of REMEMBERED tokens}, those worth saving."""
        return {
            (layer, expert): total / usage.remembered.unit
            for layer, usage in self.layers.items()
            for expert, total in enumerate(usage.remembered.sums)
            if total / usage.remembered.unit >= MIN_COUNT
        }

    def prime(self, counts: dict[ExpertKey, float]) -> None:
        """Start with saved counts, as if used now. KeyError or IndexError: those of another model."""
        for (layer, expert), uses in counts.items():
            usage = self.layers[layer]
            for counts_of_life in (usage.steady, usage.remembered):
                counts_of_life.sums[expert] += uses * counts_of_life.unit
            usage.ranking = None
