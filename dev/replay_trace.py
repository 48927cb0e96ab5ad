"""Replay a route trace through caches of several sizes and policies, without the model: what would have hit?

    ROUTE_TRACE=run.jsonl PROMPT="..." python colibri.py
    python dev/replay_trace.py run.jsonl
    python dev/replay_trace.py run.jsonl --budgets 1/8,1/4,1/2 --csv run.csv --plot run.png

A budget is a share of all experts of all layers. A request is an expert that a layer asks for in a chunk of rows, once
however many rows want it; a hit is one that is resident then. Chunks of one row count as decode, others as prefill.
The first half of the trace warms up and is not counted, unless --cold is given.

    LRU per layer    layers have equal shares; the expert used longest ago goes: EXPERT_TIER=reference
    LRU global       the same over all layers in one
    LFU, ageing      the expert used least often goes; all counts are halved every 500 tokens
    colibri          aged frequency over all layers (experts/policy.py): what the engine does
    fixed            always holds the experts that have most of the counted requests: it knows them in advance
    Belady           an upper bound that knows the future: after each request what is asked for soonest stays, of any
                     layer; it need not hold what was just used. It maximises decode and prefill together

All but the last two keep a token's worth of experts of each layer, where the budget has that many. A token's experts
are held together; those of a longer chunk are loaded one after another, the resident ones first.

Exit code 2 for bad input, said in one line. --plot needs matplotlib.
"""

import argparse
import csv
import heapq
import math
import sys
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from errors import Refused, printable
from experts.policy import EvictionPolicy, LruPolicy
from experts.route_trace import read_trace

HALVED_EVERY = 500  # tokens
PHASES = "decode", "prefill"


class GlobalLru(LruPolicy):
    """All layers in one, but for the floor."""

    def victim(self, protected, layer=None):
        """As of ExpertPolicy: from layers with more than `floor` residents, or the asking one."""
        layers = [other for other, held in self.residents.items() if len(held) > self.floor or other == layer]
        keys = [key for other in layers if (key := self.oldest(other, protected)) is not None]
        return min(keys, key=lambda key: (self.score(key), key), default=None)


class AgedLfu(EvictionPolicy):
    """Counts of uses that are all halved now and then."""

    def __init__(self, layers, num_experts, floor):
        super().__init__(layers, num_experts, floor)
        self.uses = {layer: [0.0] * num_experts for layer in layers}
        self.seen = dict.fromkeys(layers, 0)
        for layer, state in self.layers.items():
            state.score = self.uses[layer].__getitem__
        self.worth = [1.0] * len(self.layers)

    def used(self, layer, uses, chunk_rows):
        super().used(layer, uses, chunk_rows)
        counts, before = self.uses[layer], self.seen[layer] // HALVED_EVERY
        self.seen[layer] += chunk_rows
        halvings = self.seen[layer] // HALVED_EVERY - before
        if halvings:
            counts[:] = [count * 0.5**halvings for count in counts]
        for expert, rows in uses.items():
            counts[expert] += rows


POLICIES = {
    "LRU per layer": LruPolicy,
    "LRU global": GlobalLru,
    "LFU, ageing": AgedLfu,
    "colibri": EvictionPolicy,
}


@dataclass(frozen=True)
class Trace:
    """A trace and from which event on it counts."""

    layers: list
    num_experts: int
    top_k: int
    slot_bytes: int
    events: list  # (layer, rows, {expert: rows})
    counted_from: int

    @property
    def total(self):
        """Experts of all layers."""
        return len(self.layers) * self.num_experts

    def capacity(self, share):
        return max(1, int(share * self.total))

    @cached_property
    def keys(self):
        """The keys that each event asks for."""
        return [[(layer, expert) for expert in uses] for layer, _, uses in self.events]

    @cached_property
    def requests(self):
        """The counted requests of each key."""
        return Counter(key for keys in self.keys[self.counted_from :] for key in keys)


def load_trace(path, cold):
    """Refused when nothing would be counted."""
    header, events = read_trace(path)
    trace = Trace(
        **{name: header[name] for name in ("layers", "num_experts", "top_k", "slot_bytes")},
        events=events,
        counted_from=0 if cold else len(events) // 2,
    )
    if not trace.requests:
        raise Refused(f"{path}: holds no requests to count")
    return trace


# ---------------------------------------------------------------------------------------------------------------------
# Caches of `capacity` experts: each yields how many of an event's keys it hits, event by event


def online(trace, make_policy, capacity):
    """A cache as the engine's, under a policy."""
    floor = min(trace.top_k, capacity // len(trace.layers))
    policy = make_policy(trace.layers, trace.num_experts, floor)
    resident = set()
    for keys, (layer, rows, uses) in zip(trace.keys, trace.events, strict=True):
        policy.used(layer, uses, rows)
        missing = [key for key in keys if key not in resident]
        yield len(keys) - len(missing)
        together = set(keys) if rows == 1 else ()
        for key in missing:
            if len(resident) == capacity:
                victim = policy.victim(together, layer) or policy.victim((), layer)
                policy.evict(victim)
                resident.remove(victim)
            policy.admit(key)
            resident.add(key)


def fixed(trace, capacity):
    resident = {key for key, _ in trace.requests.most_common(capacity)}
    for keys in trace.keys:
        yield sum(key in resident for key in keys)


def belady(trace, capacity):
    """Keeps what is asked for soonest, of hits that count: no cache of that capacity has more of them."""
    resident = {}  # key: number of the event that asks for it next
    farthest = []  # heap of (-that number, key); some are out of date
    for keys, upcoming in zip(trace.keys, next_uses(trace), strict=True):
        yield sum(key in resident for key in keys)
        for key, number in zip(keys, upcoming, strict=True):
            resident[key] = number
            heapq.heappush(farthest, (-number, key))
        while len(resident) > capacity:
            number, key = heapq.heappop(farthest)
            if resident.get(key) == -number:
                del resident[key]


def next_uses(trace):
    """For each event the numbers of the events that ask for its keys next; infinite where that hit is not counted."""
    upcoming, following = [], {}
    for number in reversed(range(len(trace.keys))):
        upcoming.append([following.get(key, math.inf) for key in trace.keys[number]])
        following |= dict.fromkeys(trace.keys[number], number if number >= trace.counted_from else math.inf)
    return reversed(upcoming)


CACHES = {name: partial(online, make_policy=policy) for name, policy in POLICIES.items()}
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
    def hit_rate(self):
        return self.hits / self.requests


def replay(trace, budgets):
    """-> a Result for each policy, budget and phase that the trace has."""
    results = []
    phases = [PHASES[rows > 1] for _, rows, _ in trace.events]
    requests = Counter()
    for phase, keys in list(zip(phases, trace.keys, strict=True))[trace.counted_from :]:
        requests[phase] += len(keys)
    for name, cache in CACHES.items():
        for budget in budgets:
            slots, hits = trace.capacity(budget), Counter()
            for number, count in enumerate(cache(trace, capacity=slots)):
                if number >= trace.counted_from:
                    hits[phases[number]] += count
            results += [Result(name, budget, slots, p, hits[p], requests[p]) for p in PHASES if requests[p]]
        print(f"[replay] {name} done", file=sys.stderr)
    return results


# ---------------------------------------------------------------------------------------------------------------------
# What is printed


def describe(trace):
    """What the routing of the whole trace is like, a line each."""
    rows = dict.fromkeys(PHASES, 0)
    uses = {layer: Counter() for layer in trace.layers}
    before, shared, pairs = {}, 0, 0
    for layer, num_rows, chosen in trace.events:
        rows[PHASES[num_rows > 1]] += num_rows
        uses[layer].update(chosen)
        if num_rows == 1 and layer in before:
            shared += len(before[layer] & chosen.keys())
            pairs += len(chosen)
        before[layer] = chosen.keys()
    tokens = " and ".join(f"{rows[phase] / len(trace.layers):.0f} of {phase}" for phase in PHASES)
    top = max(1, trace.num_experts // 10)
    ranked = [sorted(counts.values(), reverse=True) for counts in uses.values() if counts]
    shares = [100 * sum(counts[:top]) / sum(counts) for counts in ranked]
    yield f"{len(trace.layers)} layers of {trace.num_experts} experts, {trace.top_k} a token; tokens: {tokens}"
    yield f"distinct experts of a layer: {spread([len(counts) for counts in ranked])}"
    yield f"uses of a layer's {top} most used experts: {spread(shares)} % (even: {100 * top / trace.num_experts:.1f} %)"
    if pairs:
        yield f"experts of a decoded token that the layer used just before: {100 * shared / pairs:.1f} %"


def spread(values):
    return f"{sum(values) / len(values):.1f} on average, {min(values):.1f} to {max(values):.1f}"


def table(trace, results, phase):
    """Hit rates of a phase in aligned columns, a line each."""
    budgets = list(dict.fromkeys(result.budget for result in results))
    titles = {phase: f"{phase}, hits in %" for phase in PHASES}
    width = max(map(len, (*titles.values(), *CACHES)))
    yield f"{titles[phase]:{width}}" + "".join(f"{budget!s:>9}" for budget in budgets)
    memory = [f"{trace.capacity(budget) * trace.slot_bytes / 1e9:.3g} GB" for budget in budgets]
    yield f"{'':{width}}" + "".join(f"{cell:>9}" for cell in memory)
    for name in CACHES:
        rates = [result.hit_rate for result in results if (result.policy, result.phase) == (name, phase)]
        yield f"{name:{width}}" + "".join(f"{100 * rate:>9.1f}" for rate in rates)


def write_csv(path, results):
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow("policy budget slots phase hits requests hit_rate".split())
        for r in results:
            writer.writerow([r.policy, r.budget, r.slots, r.phase, r.hits, r.requests, f"{r.hit_rate:.4f}"])


def import_pyplot():
    try:
        import matplotlib
    except ImportError:
        raise Refused("--plot needs matplotlib: pip install matplotlib, or leave --plot out") from None
    matplotlib.use("agg")  # a file, no window
    from matplotlib import pyplot

    return pyplot


def plot(pyplot, path, results):
    """Hit rate over budget, a panel for each phase."""
    phases = [phase for phase in PHASES if any(result.phase == phase for result in results)]
    figure, panels = pyplot.subplots(1, len(phases), figsize=(5 * len(phases), 4), squeeze=False, layout="constrained")
    for phase, panel in zip(phases, panels[0], strict=True):
        for name in CACHES:
            of_policy = sorted(
                (result.budget, 100 * result.hit_rate)
                for result in results
                if (result.policy, result.phase) == (name, phase)
            )
            panel.plot([float(budget) for budget, _ in of_policy], [rate for _, rate in of_policy], "o-", label=name)
        panel.set(title=phase, xlabel="share of the experts in memory", ylabel="hits, %", xlim=(0, 1), ylim=(0, 100))
        panel.grid(alpha=0.3)
    panels[0][0].legend()
    figure.savefig(path, format="png", dpi=150)
    pyplot.close(figure)


def parse_budgets(text):
    """ "1/16,0.25" -> [Fraction, ...] of more than 0 and at most 1."""
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


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, metavar="TRACE")
    parser.add_argument("--budgets", default="1/16,1/8,1/4,1/2,3/4", help="shares of all experts, with commas between")
    parser.add_argument("--cold", action="store_true", help="count from the first request on")
    parser.add_argument("--csv", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a PNG; needs matplotlib")
    args = parser.parse_args(arguments)
    try:
        run(args)
        return 0
    except Refused as error:
        print(f"replay_trace: {error}", file=sys.stderr)
    except OSError as error:
        print(f"replay_trace: {printable(str(error.filename))}: {error.strerror}", file=sys.stderr)
    except KeyboardInterrupt:
        print("\nreplay_trace: interrupted", file=sys.stderr)
        return 130
    return 2


def run(args):
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


if __name__ == "__main__":
    sys.exit(main())
