"""The reference expert cache that bench/streaming.py compares with: LRU per layer, reading and computing by turns.

python bench/reference_tier.py      runs colibri.py with it, with all its variables but LOOKAHEAD and USAGE
"""

import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import machine.interpreter  # noqa: F401 - first: what is missing is said in one line

# isort: split
import load.model
from colibri import main
from experts.cache import ExpertCache, ExpertRequest
from experts.policy import ExpertKey
from experts.prefetch import PrefetchController


class LruPolicy:
    """Least recently used: layers have equal shares, and in each the expert that was used longest ago is evicted.

    Its methods are those of experts.policy.EvictionPolicy.
    """

    def __init__(self, layers: Sequence[int], num_experts: int, floor: int) -> None:
        self.floor = floor  # not needed: equal shares are above any floor
        self.cached: dict[int, set[int]] = {layer: set() for layer in layers}
        self.last_used: dict[ExpertKey, int] = {}  # number of the call to record_uses
        self.num_calls = 0

    def record_uses(self, layer: int, uses: dict[int, int], chunk_rows: int) -> None:
        self.num_calls += 1
        for expert in uses:
            self.last_used[layer, expert] = self.num_calls

    def retract_uses(self, layer: int, uses: dict[int, int]) -> None:
        """A rejected draft token counts: the expert was needed all the same."""

    def admit(self, key: ExpertKey) -> None:
        layer, expert = key
        self.cached[layer].add(expert)

    def evict(self, key: ExpertKey) -> None:
        layer, expert = key
        self.cached[layer].remove(expert)

    def victim(self, protected: Collection[ExpertKey], layer: int | None = None) -> ExpertKey | None:
        """From the layer with the most cached experts, the asking one if it is among them: shares become equal."""
        for candidate in sorted(self.cached, key=lambda other: (-len(self.cached[other]), other != layer)):
            if (key := self.oldest(candidate, protected)) is not None:
                return key
        return None

    def oldest(self, layer: int, protected: Collection[ExpertKey]) -> ExpertKey | None:
        """The cached expert of a layer that was used longest ago; of equals the lowest id, in whatever order they were
        read."""
        keys = [key for expert in self.cached[layer] if (key := (layer, expert)) not in protected]
        return min(keys, key=lambda key: (self.score(key), key), default=None)

    def score(self, key: ExpertKey, more_rows: int = 0) -> int:
        return self.last_used.get(key, 0)

    def use_counts(self) -> dict[ExpertKey, float]:
        return {}

    def prime(self, counts: dict[ExpertKey, float]) -> None:
        """Counts say nothing about recency."""


class ReferenceCache(ExpertCache):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        num_experts = self.disk.config.num_experts
        self.policies = [LruPolicy(pool.layers, num_experts, 0) for pool in self.pools]  # type: ignore[misc]  # duck
        for pool, policy in zip(self.pools, self.policies, strict=True):
            self.policy_of |= dict.fromkeys(pool.layers, policy)
        self.prefetcher = PrefetchController("0", len(self.pool_of))

    def request(self, layer: int, uses: dict[int, int], chunk_rows: int = 1) -> "ReferenceRequest":
        return ReferenceRequest(self, layer, uses, chunk_rows)


class ReferenceRequest(ExpertRequest):
    def ready(self, start: int, stop: int) -> Iterator[list]:
        self.wait_for_reads()
        yield from super().ready(start, stop)

    def wait_for_reads(self) -> None:
        """Wait for all reads: nothing is computed meanwhile."""
        while self.reads:
            super().wait_for_reads()


if __name__ == "__main__":
    load.model.ExpertCache = ReferenceCache  # type: ignore[misc]  # the class that load_model makes
    sys.exit(main(sys.argv[1:]))
