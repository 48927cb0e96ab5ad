"""RouteObserver: receives which experts each token row of a forward pass uses."""

from typing import Protocol

from torch import Tensor


class RouteObserver(Protocol):
    """Owned by the caller of a forward pass."""

    def record(self, layer: int, uses: dict[int, int], chunk_rows: int, rows: Tensor) -> None:
        """A layer routed a chunk of `chunk_rows` token rows. uses: {expert, ascending: how many of the rows use it};
        rows [sum of uses]: the row numbers of the first expert, then those of the next."""


class ForwardRoutes:
    """The expert uses of one forward pass over draft tokens, kept until it is known which token rows are accepted."""

    def __init__(self) -> None:
        self.routes: list[tuple[int, dict[int, int], Tensor]] = []

    def record(self, layer: int, uses: dict[int, int], chunk_rows: int, rows: Tensor) -> None:
        self.routes.append((layer, uses, rows))

    def rejected_uses(self, accepted_rows: set[int]) -> list[tuple[int, dict[int, int]]]:
        """The uses by other rows than `accepted_rows`, for ExpertCache.retract_uses: [(layer, {expert: rows}), ...]."""
        rejected = []
        for layer, uses, rows in self.routes:
            row = iter(rows.tolist())
            of_layer = {expert: sum(next(row) not in accepted_rows for _ in range(n)) for expert, n in uses.items()}
            rejected.append((layer, {expert: count for expert, count in of_layer.items() if count}))
        return rejected
