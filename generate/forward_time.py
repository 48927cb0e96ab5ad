"""What a forward over R rows takes, by what earlier ones took:

    arithmetic(R) + experts(R) * missing share * wait for one that is missing

Medians of the last forwards with R rows for the arithmetic, slowly forgotten means for the rest. Where no forward had R
rows yet it is estimated from the nearest numbers of rows that some had.
"""

import math
import statistics
from bisect import bisect_left, insort
from collections import deque

KEPT = 0.97  # of a mean, from one sample to the next
SAMPLES = 9  # of which the median counts
ROW_COST = 0.15  # of the arithmetic of one row, for each further row, before it is known
UNION_GROWTH = 0.8  # R rows ask for R^this times the experts of one, before it is known


class DecayedRatio:
    """A slowly forgotten mean of a / b, from sums of a and of b."""

    def __init__(self, prior=None, weight=0.0):
        self.a, self.b = (prior or 0.0) * weight, weight

    def add(self, a, b=1.0):
        self.a, self.b = KEPT * self.a + a, KEPT * self.b + b

    @property
    def value(self):
        return self.a / self.b if self.b else None

    @property
    def hoped(self):
        """Of a share: half a standard error above its value."""
        return min(1.0, self.value + math.sqrt(self.value * (1 - self.value) / (self.b + 1)) / 2)


class RowTimes:
    """What forwards with so many rows took."""

    def __init__(self):
        self.forwards, self.last = 0, deque(maxlen=SAMPLES)
        self.arithmetic = None  # seconds without waiting for experts, the median of the last
        self.experts = DecayedRatio()  # distinct ones a forward, all layers together

    def add(self, arithmetic, experts):
        self.forwards += 1
        self.last.append(arithmetic)
        self.arithmetic = statistics.median(self.last)
        self.experts.add(experts)


class ForwardTime:
    """Of one model on one machine, for any number of rows."""

    def __init__(self):
        self.rows, self.known = {}, []  # number of rows -> Rows; these numbers, ascending
        # Share of the experts. One for all numbers of rows: what wrong guesses push out of memory is missed later, by a
        # forward without any.
        self.missing = DecayedRatio()
        self.wait = DecayedRatio()  # seconds for one that is missing

    def note(self, num_rows, seconds, waited, experts, missed):
        """A forward over so many rows: its seconds, those it waited for experts, the distinct experts it asked for, and
        how many of them were missing."""
        if num_rows not in self.rows:
            self.rows[num_rows] = RowTimes()
            insort(self.known, num_rows)
        self.rows[num_rows].add(seconds - waited, experts)
        self.missing.add(missed, experts)
        if missed:
            self.wait.add(waited, missed)

    def is_known(self, num_rows):
        """Whether two forwards or more had about so many rows."""
        return any(num_rows / 2 <= n <= 2 * num_rows and self.rows[n].forwards > 1 for n in self.known)

    def seconds(self, num_rows):
        """Expected seconds of a forward with so many rows; one at least must have been noted."""
        arithmetic, experts = self.parts(num_rows)
        return max(0.0, arithmetic) + experts * (self.missing.value or 0.0) * (self.wait.value or 0.0)

    def parts(self, num_rows):
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

    def scaled(self, near, num_rows):
        """As `parts`, from forwards with another number of rows alone."""
        rows = self.rows[near]
        growth = (1 + ROW_COST * (num_rows - 1)) / (1 + ROW_COST * (near - 1))
        return rows.arithmetic * growth, rows.experts.value * (num_rows / near) ** UNION_GROWTH
