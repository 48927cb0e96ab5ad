"""Cost model of a forward over R token rows, from what earlier ones took:

    arithmetic(R) + experts(R) * miss rate * seconds waited for a miss

Medians of the last forwards with R rows for the arithmetic, slowly decaying means for the rest. Where no forward had R
rows yet it is estimated from the nearest numbers of rows that some had.
"""

import math
import statistics
from bisect import bisect_left, insort
from collections import deque
from typing import NamedTuple

DECAY = 0.97  # of a mean, from one sample to the next
SAMPLES = 9  # of which the median counts
ROW_COST = 0.15  # of the arithmetic of one row, for each further row, before it is known
UNION_GROWTH = 0.8  # R rows ask for R^this times the experts of one, before it is known


class ForwardCost(NamedTuple):
    """What a forward took, or all forwards so far."""

    seconds: float
    waited: float  # seconds of them, for experts
    experts: float  # distinct ones that were asked for
    missed: float  # of these


class DecayedRatio:
    """A slowly decaying mean of a / b, from sums of a and of b."""

    def __init__(self, prior: float = 0.0, weight: float = 0.0):
        self.a, self.b = prior * weight, weight

    def add(self, a: float, b: float = 1.0) -> None:
        self.a, self.b = DECAY * self.a + a, DECAY * self.b + b

    @property
    def value(self) -> float:
        """0 before the first sample of a mean without a prior."""
        return self.a / self.b if self.b else 0.0

    @property
    def optimistic(self) -> float:
        """Of a share: half a standard error above its value."""
        return min(1.0, self.value + math.sqrt(self.value * (1 - self.value) / (self.b + 1)) / 2)


class RowTimes:
    """Times of forwards with one number of rows."""

    def __init__(self) -> None:
        self.forwards = 0
        self.last: deque[float] = deque(maxlen=SAMPLES)
        self.arithmetic = 0.0  # seconds without waiting for experts, the median of the last
        self.experts = DecayedRatio()  # distinct ones a forward, all layers together

    def add(self, arithmetic: float, experts: float) -> None:
        self.forwards += 1
        self.last.append(arithmetic)
        self.arithmetic = statistics.median(self.last)
        self.experts.add(experts)


class ForwardTime:
    """The cost model of one model on one machine, for any number of rows."""

    def __init__(self) -> None:
        self.rows: dict[int, RowTimes] = {}  # by number of rows
        self.known: list[int] = []  # these numbers, ascending
        # Share of the experts. One for all numbers of rows: what rejected draft tokens evict is missed later, by a
        # forward without any.
        self.miss_rate = DecayedRatio()
        self.wait = DecayedRatio()  # seconds for a miss

    def add(self, num_rows: int, cost: ForwardCost) -> None:
        """A forward over num_rows rows."""
        if num_rows not in self.rows:
            self.rows[num_rows] = RowTimes()
            insort(self.known, num_rows)
        self.rows[num_rows].add(cost.seconds - cost.waited, cost.experts)
        self.miss_rate.add(cost.missed, cost.experts)
        if cost.missed:
            self.wait.add(cost.waited, cost.missed)

    def is_known(self, num_rows: int) -> bool:
        """True if two forwards or more had about so many rows."""
        return any(num_rows / 2 <= n <= 2 * num_rows and self.rows[n].forwards > 1 for n in self.known)

    def seconds(self, num_rows: int) -> float:
        """Expected seconds of a forward with num_rows rows; at least one must have been added."""
        arithmetic, experts = self.parts(num_rows)
        return max(0.0, arithmetic) + experts * self.miss_rate.value * self.wait.value

    def parts(self, num_rows: int) -> tuple[float, float]:
        """-> (seconds without waiting, distinct experts)."""
        at = bisect_left(self.known, num_rows)
        below, above = self.known[max(0, at - 1) : at], self.known[at : at + 1]
        if above == [num_rows]:
            return self.rows[num_rows].arithmetic, self.rows[num_rows].experts.value
        if not below or not above or above[0] > 2 * num_rows:  # so far above nothing follows from it
            return self.scaled((below or above)[0], num_rows)
        low, high, part = self.rows[below[0]], self.rows[above[0]], (num_rows - below[0]) / (above[0] - below[0])
        arithmetic = low.arithmetic + part * (high.arithmetic - low.arithmetic)
        return arithmetic, low.experts.value + part * (high.experts.value - low.experts.value)

    def scaled(self, near: int, num_rows: int) -> tuple[float, float]:
        """As `parts`, from forwards with another number of rows alone."""
        rows = self.rows[near]
        growth = (1 + ROW_COST * (num_rows - 1)) / (1 + ROW_COST * (near - 1))
        return rows.arithmetic * growth, rows.experts.value * (num_rows / near) ** UNION_GROWTH
