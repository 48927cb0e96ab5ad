"""Hit rates of a route trace under several eviction policies and cache sizes, replayed without the model.

    ROUTE_TRACE=run.jsonl PROMPT="..." python colibri.py
    python dev/replay_trace.py run.jsonl --budgets 1/8,1/4,1/2 --csv run.csv --plot run.png

A budget is a share of all experts of all layers. A request is an expert that a layer needs for a chunk of token rows,
counted once for all rows; a hit is one that is cached then. Chunks of one row count as decode, others as prefill. The
first half of the trace warms the cache up and is not counted, unless --cold is given.

    LRU per layer    layers have equal shares; the least recently used expert is evicted (bench/reference_tier.py)
    LRU global       the same with one budget over all layers
    LFU, ageing      the least frequently used expert is evicted; all counts are halved every 500 tokens
    colibri          decayed use counts with one budget over all layers (experts/policy.py): the engine's policy
    fixed            always holds the experts with the most counted requests, known in advance
    Belady           an upper bound that knows the future: the experts requested soonest stay, of any layer; what was
                     just used need not stay. It maximizes decode and prefill together

All but the last two keep a token's worth of experts of each layer, or a quarter of its share of the budget where that
is less, as the engine does. A token's experts are cached together; those of a longer chunk are loaded one after
another, the cached ones first.

Exit code 2 for bad input, said in one line. --plot needs matplotlib.
"""

import argparse
import csv
import heapq
import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import machine.interpreter  # noqa: F401 - first: what is missing is said in one line

# isort: split
from bench.reference_tier import LruPolicy
from errors import Refused
from experts.policy import EvictionPolicy, ExpertKey, layer_floor
from experts.route_trace import Event, read_trace
from machine.console import say
from machine.exit import exit_code

HALVED_EVERY = 500  # tokens
PHASES = "decode", "prefill"


class GlobalLru(LruPolicy):
    """One budget over all layers, of which each keeps its floor."""

    def victim(self, protected: Collection[ExpertKey], layer: int | None = None) -> ExpertKey | None:
        layers = [other for other, cached in self.cached.items() if len(cached) > self.floor or other == layer]
        keys = [key for other in layers if (key := self.oldest(other, protected)) is not None]
        return min(keys, key=lambda key: (self.score(key), key), default=None)


class AgedLfu(EvictionPolicy):
    """Use counts that are all halved every HALVED_EVERY tokens."""

    def __init__(self, layers: Sequence[int], num_experts: int, floor: int) -> None:
        super().__init__(layers, num_experts, floor)
        self.uses = {layer: [0.0] * num_experts for layer in layers}
        self.seen = dict.fromkeys(layers, 0)
        for layer, usage in self.layers.items():
            usage.score = self.uses[layer].__getitem__  # type: ignore[method-assign, assignment]  # instead of decayed counts
        self.wait_factors = [1.0] * len(self.layers)

    def record_uses(self, layer: int, uses: dict[int, int], chunk_rows: int) -> None:
        super().record_uses(layer, uses, chunk_rows)
        counts, before = self.uses[layer], self.seen[layer] // HALVED_EVERY
        self.seen[layer] += chunk_rows
        halvings = self.seen[layer] // HALVED_EVERY - before
        if halvings:
            counts[:] = [count * 0.5**halvings for count in counts]
        for expert, rows in uses.items():
            counts[expert] += rows


Policy = EvictionPolicy | LruPolicy
POLICIES: dict[str, Callable[[Sequence[int], int, int], Policy]] = {
    "LRU per layer": LruPolicy,
    "LRU global": GlobalLru,
    "LFU, ageing": AgedLfu,
    "colibri": EvictionPolicy,
}


@dataclass(frozen=True)
class Trace:
    """A route trace, counted from an event on."""

    layers: list[int]
    num_experts: int
    top_k: int
    slot_bytes: int
    events: list[Event]
    counted_from: int

    def capacity(self, share: Fraction) -> int:
        """A share of the experts of all layers."""
        return max(1, int(share * len(self.layers) * self.num_experts))

    @cached_property
    def keys(self) -> list[list[ExpertKey]]:
        """The experts that each event requests."""
        return [[(layer, expert) for expert in uses] for layer, _, uses in self.events]

    @cached_property
    def requests(self) -> Counter[ExpertKey]:
        """The counted requests of each expert."""
        return Counter(key for keys in self.keys[self.counted_from :] for key in keys)


def load_trace(path: Path, cold: bool) -> Trace:
    """Refused when nothing would be counted."""
    header, events = read_trace(path)
    trace = Trace(
        **{name: header[name] for name in ("layers", "num_experts", "top_k", "slot_bytes")},
        events=events,
        counted_from=0 if cold else len(events) // 2,
    )
    if not trace.requests:
        raise Refused(f"{path}: has no requests to count")
    return trace


# --- caches -----------------------------------------------------------------------------------------------------------


def online(trace: Trace, make_policy: Callable[..., Policy], capacity: int) -> Iterator[int]:
    """A cache of `capacity` experts like the engine's, with an eviction policy -> its hits, event by event."""
    floor = layer_floor(trace.top_k, capacity // len(trace.layers))
    policy = make_policy(trace.layers, trace.num_experts, floor)
    cached: set[ExpertKey] = set()
    for keys, (layer, rows, uses) in zip(trace.keys, trace.events, strict=True):
        policy.record_uses(layer, uses, rows)
        missing = [key for key in keys if key not in cached]
        yield len(keys) - len(missing)
        together = set(keys) if rows == 1 else ()
        for key in missing:
            if len(cached) == capacity:
                victim = policy.victim(together, layer) or policy.victim((), layer)
                assert victim is not None, "a full cache has a victim"
                policy.evict(victim)
                cached.remove(victim)
            policy.admit(key)
            cached.add(key)


def fixed(trace: Trace, capacity: int) -> Iterator[int]:
    cached = {key for key, _ in trace.requests.most_common(capacity)}
    for keys in trace.keys:
        yield sum(key in cached for key in keys)


def belady(trace: Trace, capacity: int) -> Iterator[int]:
    """The optimum: keep the experts requested soonest. No cache of that capacity has more counted hits."""
    cached: dict[ExpertKey, float] = {}  # key: number of the event that requests it next
    farthest: list[tuple[float, ExpertKey]] = []  # heap of (-that number, key); some are out of date
    for keys, upcoming in zip(trace.keys, next_uses(trace), strict=True):
        yield sum(key in cached for key in keys)
        for key, number in zip(keys, upcoming, strict=True):
            cached[key] = number
            heapq.heappush(farthest, (-number, key))
        while len(cached) > capacity:
            number, key = heapq.heappop(farthest)
            if cached.get(key) == -number:
                del cached[key]


def next_uses(trace: Trace) -> Iterator[list[float]]:
    """For each event the numbers of the events that request its experts next; infinite where that hit is not
    counted."""
    upcoming: list[list[float]] = []
    following: dict[ExpertKey, float] = {}
    for number in reversed(range(len(trace.keys))):
        upcoming.append([following.get(key, math.inf) for key in trace.keys[number]])
        following |= dict.fromkeys(trace.keys[number], number if number >= trace.counted_from else math.inf)
    return reversed(upcoming)


CACHES: dict[str, Callable[..., Iterator[int]]] = {
    name: partial(online, make_policy=policy) for name, policy in POLICIES.items()
}
CACHES |= {"fixed": fixed, "Belady": belady}


@dataclass(frozen=True)
class Result:
    policy: str
    budget: Fraction
    slots: int
    phase: str
    hits: int
    requests: int

    @property
    def hit_rate(self) -> float:
        return self.hits / self.requests


def replay(trace: Trace, budgets: list[Fraction]) -> list[Result]:
    """Replay the trace with each policy and budget -> a Result for each, and for each phase that the trace has."""
    results = []
    phases = [PHASES[rows > 1] for _, rows, _ in trace.events]
    requests: Counter[str] = Counter()
    for phase, keys in list(zip(phases, trace.keys, strict=True))[trace.counted_from :]:
        requests[phase] += len(keys)
    for name, cache in CACHES.items():
        for budget in budgets:
            slots = trace.capacity(budget)
            hits: Counter[str] = Counter()
            for number, count in enumerate(cache(trace, capacity=slots)):
                if number >= trace.counted_from:
                    hits[phases[number]] += count
            results += [Result(name, budget, slots, p, hits[p], requests[p]) for p in PHASES if requests[p]]
        say(f"[replay] {name} done")
    return results


# --- output -----------------------------------------------------------------------------------------------------------


def describe(trace: Trace) -> Iterator[str]:
    """Lines about the routing of the whole trace."""
    rows = dict.fromkeys(PHASES, 0)
    uses: dict[int, Counter[int]] = {layer: Counter() for layer in trace.layers}
    before: dict[int, Collection[int]] = {}  # layer -> experts of its last event
    shared = total = 0  # experts of decoded tokens, and those of them that the layer used just before
    for layer, num_rows, chosen in trace.events:
        rows[PHASES[num_rows > 1]] += num_rows
        uses[layer].update(chosen)
        if num_rows == 1 and layer in before:
            shared += len(chosen.keys() & before[layer])
            total += len(chosen)
        before[layer] = chosen.keys()
    tokens = " and ".join(f"{rows[phase] / len(trace.layers):.0f} of {phase}" for phase in PHASES)
    top = max(1, trace.num_experts // 10)
    ranked = [sorted(counts.values(), reverse=True) for counts in uses.values() if counts]
    shares = [100 * sum(counts[:top]) / sum(counts) for counts in ranked]
    yield f"{len(trace.layers)} layers of {trace.num_experts} experts, {trace.top_k} a token; tokens: {tokens}"
    yield f"distinct experts of a layer: {spread([len(counts) for counts in ranked])}"
    yield f"uses of a layer's {top} most used experts: {spread(shares)} % (even: {100 * top / trace.num_experts:.1f} %)"
    if total:
        yield f"experts of a decoded token that the layer used just before: {100 * shared / total:.1f} %"


def spread(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.1f} on average, {min(values):.1f} to {max(values):.1f}"


def table(trace: Trace, results: list[Result], phase: str) -> Iterator[str]:
    """Lines of the hit rates of a phase, in aligned columns."""
    budgets = list(dict.fromkeys(result.budget for result in results))
    titles = {phase: f"{phase}, hits in %" for phase in PHASES}
    width = max(map(len, (*titles.values(), *CACHES)))
    yield f"{titles[phase]:{width}}" + "".join(f"{budget!s:>9}" for budget in budgets)
    memory = [f"{trace.capacity(budget) * trace.slot_bytes / 1e9:.3g} GB" for budget in budgets]
    yield f"{'':{width}}" + "".join(f"{cell:>9}" for cell in memory)
    for name in CACHES:
        rates = [result.hit_rate for result in results if (result.policy, result.phase) == (name, phase)]
        yield f"{name:{width}}" + "".join(f"{100 * rate:>9.1f}" for rate in rates)


def write_csv(path: Path, results: list[Result]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow("policy budget slots phase hits requests hit_rate".split())
        for r in results:
            writer.writerow([r.policy, r.budget, r.slots, r.phase, r.hits, r.requests, f"{r.hit_rate:.4f}"])


def import_pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise Refused("--plot needs matplotlib: pip install matplotlib, or leave --plot out") from None
    matplotlib.use("agg")  # a file, no window
    from matplotlib import pyplot

    return pyplot


def plot(pyplot: Any, path: Path, results: list[Result]) -> None:
    """Hit rate over budget, a panel for each phase."""
    phases = [phase for phase in PHASES if any(result.phase == phase for result in results)]
    figure, panels = pyplot.subplots(1, len(phases), figsize=(5 * len(phases), 4), squeeze=False, layout="constrained")
    for phase, panel in zip(phases, panels[0], strict=True):
        for name in CACHES:
            of_policy = [result for result in results if (result.policy, result.phase) == (name, phase)]
            points = sorted((float(result.budget), 100 * result.hit_rate) for result in of_policy)
            panel.plot(*zip(*points, strict=True), "o-", label=name)
        panel.set(title=phase, xlabel="share of the experts in memory", ylabel="hits, %", xlim=(0, 1), ylim=(0, 100))
        panel.grid(alpha=0.3)
    panels[0][0].legend()
    figure.savefig(path, format="png", dpi=150)
    pyplot.close(figure)


def parse_budgets(text: str) -> list[Fraction]:
    """Parse "1/16,0.25" into fractions of more than 0 and at most 1."""
    budgets = []
    for word in text.split(","):
        try:
            budget = Fraction(word)
        except (ValueError, ZeroDivisionError):
            budget = Fraction(0)
        if not 0 < budget <= 1:
            raise Refused(f"--budgets: {word!r} is no share of the experts, expected numbers such as 1/4 or 0.25")
        budgets.append(budget)
    return budgets


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, metavar="TRACE")
    parser.add_argument("--budgets", default="1/16,1/8,1/4,1/2,3/4", help="shares of all experts, with commas between")
    parser.add_argument("--cold", action="store_true", help="count from the first request on")
    parser.add_argument("--csv", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a PNG; needs matplotlib")
    args = parser.parse_args(arguments)
    return exit_code("replay_trace", lambda: run(args), "interrupted")


def run(args: argparse.Namespace) -> int:
    """-> exit code."""
    budgets = parse_budgets(args.budgets)
    pyplot = import_pyplot() if args.plot else None  # a long replay should not end with a missing package
    trace = load_trace(args.trace, args.cold)
    print(*describe(trace), sep="\n")
    results = replay(trace, budgets)
    for phase in PHASES:
        if any(result.phase == phase for result in results):
            print(*table(trace, results, phase), sep="\n")
    if args.csv:
        write_csv(args.csv, results)
    if args.plot:
        plot(pyplot, args.plot, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
