"""Which expert stays in memory: what it was used for so far, slowly forgotten, decides. Bookkeeping only, no bytes.

A policy is told of every use and of every expert that comes or goes, and names the next to go. Keys are
(layer, expert). Layers must be given, and used, in the order in which they run.

ExpertPolicy has one budget over all layers, of which each layer keeps at least `floor` residents. An expert's score is
the sum over its uses of

    RECENT_WEIGHT * 2^(-age / RECENT) + 2^(-age / STEADY)

so it joins what this passage is about with what is popular; either alone loses where the other wins. Ages are in
tokens: a prefill of T rows makes everything T tokens older and counts its rows. They are the layer's own tokens, for
else a layer would look stale just because its turn comes later, as in plain LRU over a cycle of layers, which evicts
what is needed next. To the contrary, of two experts with one score that of the layer just computed goes: it is the
farthest from being needed.

LeastRecentlyUsed is the reference: a partition by layers, and in each the expert that was used longest ago goes.
"""

import math
from bisect import insort

RECENT, STEADY = 4, 512  # half-lives, tokens
RECENT_WEIGHT = 8.0
WAIT_HALVINGS = 1.0  # of a score that must wait a whole sweep over the layers for its next chance
LARGE = 1e100  # sums are scaled back before they overflow
LEAST_COUNT = 0.01  # aged uses that are worth writing down
MOST_HALVINGS = 300  # 2^-300 is nothing, and LARGE * 2^300 still a float


class DecayedCounts:
    """Uses of one layer's experts, halved every `half_life` tokens.

    Instead of making all sums smaller, a new use is worth more: `unit` is what one use counts now.
    """

    def __init__(self, num_experts, half_life):
        self.sums, self.half_life, self.unit = [0.0] * num_experts, half_life, 1.0
        self.worth = 0.0  # of a use that was added last

    def add(self, uses, tokens):
        """uses {expert: rows} spread evenly over the next `tokens` tokens, the last of them being now."""
        if self.unit > LARGE:
            self.sums, self.unit = [total / self.unit for total in self.sums], 1.0
        halvings = tokens / self.half_life
        self.unit *= 2.0 ** min(halvings, MOST_HALVINGS)
        # On average a row of a chunk is that much forgotten at its end.
        self.worth = self.unit if tokens == 1 else self.unit * (1 - 2.0**-halvings) / (halvings * math.log(2))
        for expert, rows in uses.items():
            self.sums[expert] += rows * self.worth

    def take_back(self, uses):
        """Of what was added last, {expert: rows} did not count."""
        for expert, rows in uses.items():
            self.sums[expert] = max(0.0, self.sums[expert] - rows * self.worth)


class LayerUsage:
    """What one layer used, and its residents in the order in which they go."""

    def __init__(self, num_experts):
        self.recent, self.steady = DecayedCounts(num_experts, RECENT), DecayedCounts(num_experts, STEADY)
        self.last_used = [0] * num_experts  # number of the call to `used`
        self.residents = set()
        self.ranking = None  # [(score, last use, expert)] ascending; None: sorted anew when asked for

    def score(self, expert):
        recent, steady = self.recent, self.steady
        return RECENT_WEIGHT * recent.sums[expert] / recent.unit + steady.sums[expert] / steady.unit

    def ranked(self):
        if self.ranking is None:
            self.ranking = sorted(map(self.entry, self.residents))
        return self.ranking

    def entry(self, expert):
        return self.score(expert), self.last_used[expert], expert


class EvictionPolicy:
    """One budget over all layers; the lowest score goes. See the head of this file."""

    def __init__(self, layers, num_experts, floor):
        """layers: ids in the order in which they run; floor: residents that each layer keeps, 0 or more."""
        self.layers, self.floor = {layer: LayerUsage(num_experts) for layer in layers}, floor
        self.places = {layer: place for place, layer in enumerate(self.layers)}
        count = len(self.layers)
        # For the layer that runs, the next one, ...: what a score is worth that waits so long for its next chance.
        self.worth = [2.0 ** (-WAIT_HALVINGS * ((ahead or count) / count)) for ahead in range(count)]
        self.running, self.calls = count - 1, 0

    def used(self, layer, uses, chunk_rows):
        """A layer asks for experts: uses {expert: how many of the chunk's rows chose it}."""
        self.running, self.calls = self.places[layer], self.calls + 1
        state = self.layers[layer]
        state.recent.add(uses, chunk_rows)
        state.steady.add(uses, chunk_rows)
        for expert in uses:
            state.last_used[expert] = self.calls
        state.ranking = None

    def retract_uses(self, layer, uses):
        """Of the layer's last call to `used`, {expert: rows} were guesses that turned out wrong."""
        state = self.layers[layer]
        state.recent.take_back(uses)
        state.steady.take_back(uses)
        state.ranking = None

    def admit(self, key):
        """A key is resident from now on."""
        layer, expert = key
        state = self.layers[layer]
        state.residents.add(expert)
        if state.ranking is not None:
            insort(state.ranking, state.entry(expert))

    def evict(self, key):
        """A key is resident no more. KeyError if it was not."""
        layer, expert = key
        state = self.layers[layer]
        state.residents.remove(expert)
        if state.ranking is not None:
            state.ranking = [entry for entry in state.ranking if entry[2] != expert]

    def victim(self, protected, layer=None):
        """The resident to go next, or None: the lowest score of those not in `protected`, of layers with more than
        `floor` residents or of the asking `layer`. Ties: the one used longest ago, then the lowest key."""
        lowest, key = (math.inf, 0), None
        place = -self.running
        for candidate, state in self.layers.items():
            worth = self.worth[place]
            place += 1
            if len(state.residents) > self.floor or candidate == layer:
                for score, last_used, expert in state.ranking or state.ranked():
                    if score * worth > lowest[0]:
                        break
                    if (candidate, expert) not in protected:
                        rank = score * worth, last_used
                        if rank < lowest:
                            lowest, key = rank, (candidate, expert)
                        break
        return key

    def score(self, key, more_rows=0):
        """What victim() compares, at this moment, for a key that is resident or not, as if that many rows more had used
        it; in uses, 0 or more."""
        layer, expert = key
        score = self.layers[layer].score(expert) + (RECENT_WEIGHT + 1) * more_rows
        return score * self.worth[self.places[layer] - self.running]

    def counts(self):
        """{key: aged uses}, what is worth keeping for another time. Ages with a half-life of STEADY tokens."""
        return {
            (layer, expert): total / state.steady.unit
            for layer, state in self.layers.items()
            for expert, total in enumerate(state.steady.sums)
            if total / state.steady.unit >= LEAST_COUNT
        }

    def prime(self, counts):
        """Begin with the counts of another time, as if used now. KeyError or IndexError: another model's."""
        for (layer, expert), uses in counts.items():
            state = self.layers[layer]
            state.steady.sums[expert] += uses * state.steady.unit
            state.ranking = None


class LruPolicy:
    """The reference: layers have equal shares, and in each the expert that was used longest ago goes."""

    def __init__(self, layers, num_experts, floor):
        """As of ExpertPolicy; equal shares are above any floor."""
        self.floor = floor
        self.residents = {layer: set() for layer in layers}
        self.last_used, self.calls = {}, 0

    def used(self, layer, uses, chunk_rows):
        self.calls += 1
        for expert in uses:
            self.last_used[layer, expert] = self.calls

    def retract_uses(self, layer, uses):
        """A use is a use: the expert was there last all the same."""

    def admit(self, key):
        layer, expert = key
        self.residents[layer].add(expert)

    def evict(self, key):
        layer, expert = key
        self.residents[layer].remove(expert)

    def victim(self, protected, layer=None):
        """From the layer with the most residents, the asking one if it is among them: so shares become equal."""
        for candidate in sorted(self.residents, key=lambda other: (-len(self.residents[other]), other != layer)):
            if (key := self.oldest(candidate, protected)) is not None:
                return key
        return None

    def oldest(self, layer, protected):
        """The resident of a layer that was used longest ago, or None. Of those used at once the lowest key, whichever
        came from disk first."""
        keys = [key for expert in self.residents[layer] if (key := (layer, expert)) not in protected]
        return min(keys, key=lambda key: (self.score(key), key), default=None)

    def score(self, key, more_rows=0):
        """The number of the last use: what was used later stays longer."""
        return self.last_used.get(key, 0)

    def counts(self):
        """Nothing is remembered for another time."""
        return {}

    def prime(self, counts):
        """Counts say nothing about recency."""
