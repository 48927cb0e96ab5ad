"""Benchmark of continuous batching: N clients of the scheduler against one, and a short prompt beside a long prefill.

    make bench-serving            or     python bench/serving.py [--clients 8] [--tokens 32] [--small]
    SNAP=/models/glm-5.2-int4 RAM_GB=20 python bench/serving.py

Without SNAP two synthetic snapshots of GLM-5.2's layers are written (dev/make_synthetic.py, routing as in traces), one
after the other, to a temporary folder (set TMPDIR to put it on the drive to measure):

    disk      4 layers, 256 experts in each of the 3 sparse ones, 16 GB, with RAM_GB 6 and READ_MODE=direct
    memory    4 layers, 64 experts, 4 GB, all of them cached

--small writes one of 0.2 GB and runs it with a quarter of its experts cached, then with all: a smoke test of this
program, not a measurement. With SNAP that snapshot is measured as it is, within RAM_GB.

Each client has its own prompt and seed, at temperature 1, without draft tokens (--draft turns them on). All start
together; the measured window begins when every client has --warm tokens and ends when the first one has --tokens more.
The lines of the output:

    one client, N clients    tokens a second of all clients together; MB read and distinct experts a forward
    together                 speedup of N clients over one. Where experts are read, the bound is N x (bytes a forward
                             of one client reads / bytes a forward of N clients reads), and the line says which share
                             of it was reached; the aim is 0.85. With all experts cached the aim is 2.5 times.
    first token              seconds to the first token of a prompt of 16 tokens, submitted at a random moment while a
                             prompt of 2,000 is prefilled and another client decodes: the median of several. The limit
                             is two decode steps and one step with a prefill chunk

On a machine with other load the numbers mean little.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import machine.interpreter  # noqa: F401 - first: what is missing is said in one line

# isort: split
from bench.synthetic import make_snapshot
from generate.request import Event, Finished, NewToken, Request
from generate.scheduler import Scheduler
from load.model import load_model, open_snapshot
from machine.exit import exit_code
from machine.files import temporary_folder
from settings import EMBEDDED_SNAPSHOT, Settings

ROUTING = "--routing trace --prompt 64 --tokens 512 --report-tokens 0"
SNAPSHOTS = {
    "disk": f"glm-5.2 --layers 4 --experts 256 --vocab 32768 {ROUTING}",
    "memory": f"glm-5.2 --layers 4 --experts 64 --vocab 32768 {ROUTING}",
    "small": f"small --layers 5 --experts 64 --hidden 512 --moe-width 512 --vocab 4096 {ROUTING}",
}
PROMPT_TOKENS = 16
LONG_PROMPT_TOKENS = 2000
SHORT_PROMPT_TOKENS = 16
CONTEXT = 4096
NUM_SHORT_PROMPTS = 5  # submitted during the prefill of a long one


@dataclass(frozen=True)
class ServingCounters:
    """Sums since the scheduler started, and the time at which they were taken."""

    seconds: float
    tokens: int
    forwards: int
    bytes_read: int
    experts: int  # distinct ones that layers requested


@dataclass(frozen=True)
class ServingRate:
    """Throughput within a measured window."""

    tokens_per_second: float
    bytes_per_forward: float
    experts_per_forward: float


class MeasuredWindow:
    """The listener of all clients. The window lasts from when all have `warm` tokens until one has `tokens` more."""

    def __init__(self, scheduler: Scheduler, num_clients: int, warm: int, tokens: int):
        self.scheduler = scheduler
        self.num_clients = num_clients
        self.warm = warm
        self.last = warm + tokens
        self.tokens: Counter[int] = Counter()  # request id -> tokens so far
        self.num_finished = 0
        self.start: ServingCounters | None = None
        self.stop: ServingCounters | None = None
        self.all_finished = threading.Event()

    def read_counters(self) -> ServingCounters:
        experts, batch = self.scheduler.model.experts.counters, self.scheduler.batch.counters
        return ServingCounters(
            seconds=time.perf_counter(),
            tokens=self.tokens.total(),
            forwards=batch.forwards,
            bytes_read=experts.bytes_read,
            experts=experts.hits + experts.misses,
        )

    def __call__(self, event: Event) -> None:
        if isinstance(event, NewToken):
            self.tokens[event.active.id] += 1
            if not self.start:
                if len(self.tokens) == self.num_clients and min(self.tokens.values()) >= self.warm:
                    self.start = self.read_counters()
            elif not self.stop and self.tokens[event.active.id] == self.last:
                self.stop = self.read_counters()
        elif isinstance(event, Finished):
            self.num_finished += 1
            if self.num_finished == self.num_clients:
                self.all_finished.set()

    def rate(self) -> ServingRate:
        assert self.start and self.stop
        differences = (b - a for a, b in zip(astuple(self.start), astuple(self.stop), strict=True))
        seconds, tokens, forwards, bytes_read, experts = differences
        return ServingRate(tokens / seconds, bytes_read / forwards, experts / forwards)


class PromptSource:
    """Random excerpts of the snapshot's reference ids where it has enough of them, else random ids."""

    def __init__(self, folder: Path, vocab_size: int):
        path = folder / "ref_glm.json"
        self.reference_ids: list[int] = json.loads(path.read_text())["full_ids"] if path.exists() else []
        self.vocab_size = vocab_size
        self.random = random.Random(1)

    def next_prompt(self, num_tokens: int) -> tuple[int, ...]:
        if len(self.reference_ids) < 2 * num_tokens:
            return tuple(self.random.choices(range(self.vocab_size), k=num_tokens))
        start = self.random.randrange(len(self.reference_ids) - num_tokens)
        return tuple(self.reference_ids[start : start + num_tokens])


def measure_rate(scheduler: Scheduler, prompts: PromptSource, num_clients: int, warm: int, tokens: int) -> ServingRate:
    window = MeasuredWindow(scheduler, num_clients, warm, tokens)
    for seed in range(num_clients):
        request = Request(prompts.next_prompt(PROMPT_TOKENS), warm + tokens + 1, 1.0, seed=seed)
        scheduler.submit(request, window)
    window.all_finished.wait()
    return window.rate()


class TokenTimes:
    """The listener of one client: when each of its tokens was sampled."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.finished = threading.Event()

    def __call__(self, event: Event) -> None:
        if isinstance(event, NewToken):
            self.times.append(time.perf_counter())
        elif isinstance(event, Finished):
            self.finished.set()

    def intervals(self, since: float = 0.0) -> list[float]:
        """Seconds between consecutive tokens from `since` on."""
        times = [t for t in self.times if t >= since]
        return [b - a for a, b in zip(times, times[1:], strict=False)]


def measure_first_token(scheduler: Scheduler, prompts: PromptSource) -> tuple[float, float, float]:
    """-> median seconds to a short prompt's first token, of a decode step, of a step with a prefill chunk."""
    first_tokens: list[float] = []
    chunk_steps: list[float] = []
    decode_step = 0.0
    for seed in range(NUM_SHORT_PROMPTS):
        decoding, long, short = TokenTimes(), TokenTimes(), TokenTimes()
        # 1) one client decodes alone
        request = Request(prompts.next_prompt(PROMPT_TOKENS), scheduler.context - PROMPT_TOKENS, 1.0)
        decoding_request = scheduler.submit(request, decoding)
        wait_until(lambda client=decoding: len(client.times) >= 6)  # type: ignore[misc]  # bound in this turn
        decode_step = statistics.median(decoding.intervals())
        # 2) a long prompt joins; its first two prefill chunks show how long a step with one takes
        ids = random.Random(seed).choices(range(scheduler.config.vocab_size), k=LONG_PROMPT_TOKENS)
        started = time.perf_counter()
        long_request = scheduler.submit(Request(tuple(ids), 1), long)
        wait_until(lambda client=decoding, since=started: len(client.intervals(since)) >= 3)  # type: ignore[misc]
        # 3) the short prompt comes at a random moment of a step
        time.sleep(random.Random(seed).random() * max(decoding.intervals(started)))
        submitted = time.perf_counter()
        scheduler.submit(Request(prompts.next_prompt(SHORT_PROMPT_TOKENS), 1), short)
        short.finished.wait()
        if not long.times:  # else the prefill was over before
            first_tokens.append(short.times[0] - submitted)
        chunk_steps += sorted(decoding.intervals(started))[-2:]
        decoding_request.cancel()
        long_request.cancel()
        decoding.finished.wait()
        long.finished.wait()
    return statistics.median(first_tokens), decode_step, statistics.median(chunk_steps)


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.001)


def mean_rate(rates: list[ServingRate]) -> ServingRate:
    """The mean of each number."""
    return ServingRate(*map(statistics.mean, zip(*map(astuple, rates), strict=True)))


def run(name: str, settings: Settings, args: argparse.Namespace) -> None:
    """Load a snapshot, measure it and print the lines."""
    loaded = load_model(settings, open_snapshot(settings, args.clients))
    scheduler = Scheduler(loaded, args.clients, draft=args.draft)
    prompts = PromptSource(loaded.folder, loaded.config.vocab_size)
    num_experts = loaded.plan.num_sparse_layers * loaded.plan.num_experts
    all_fit = loaded.plan.num_expert_slots >= num_experts
    print(f"\n{name}: {loaded.plan.num_expert_slots} of {num_experts} experts fit in memory | {loaded.kernels}",
          loaded.drive, flush=True)  # fmt: skip
    try:
        if all_fit:  # fill the expert cache
            measure_rate(scheduler, prompts, args.clients, 1, 4 * args.tokens)
        rates: dict[int, list[ServingRate]] = {1: [], args.clients: []}
        for num_clients in (1, args.clients) * 2:
            rates[num_clients].append(measure_rate(scheduler, prompts, num_clients, args.warm, args.tokens))
        one, many = (mean_rate(rates[num_clients]) for num_clients in (1, args.clients))
        for num_clients, rate in ((1, one), (args.clients, many)):
            print(f"  {num_clients} client{'s' if num_clients > 1 else ' '}: {rate.tokens_per_second:.2f} tok/s | "
                  f"{rate.bytes_per_forward / 1e6:.1f} MB read and {rate.experts_per_forward:.1f} experts a "
                  "forward")  # fmt: skip
        speedup = many.tokens_per_second / one.tokens_per_second
        if all_fit:
            aim = "the aim is 2.5"
        else:
            bound = args.clients * one.bytes_per_forward / many.bytes_per_forward
            aim = f"{speedup / bound:.2f} of the bound {bound:.2f} by bytes read; the aim is 0.85"
        print(f"  together: {speedup:.2f} times one client, {aim}", flush=True)
        first_token, decode_step, chunk_step = measure_first_token(scheduler, prompts)
        print(f"  first token: {first_token:.3f} s, limit {2 * decode_step + chunk_step:.3f} = 2 x {decode_step:.3f} "
              f"of decode + {chunk_step:.3f} with {scheduler.chunked_prefill.shared_rows} tokens of the long "
              "prompt")  # fmt: skip
    finally:
        scheduler.close()
        loaded.close()


def snapshot_settings(folder: Path, variables: dict[str, str], cap: int = 0) -> Settings:
    environ = {"SNAP": str(folder), "CTX": str(CONTEXT), "USAGE": "0"} | variables
    return Settings.read([str(cap)], environ)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=8, help="default 8")
    parser.add_argument("--tokens", type=int, default=32, help="measured tokens of each client, default 32")
    parser.add_argument("--warm", type=int, default=8, help="tokens of each client before the window, default 8")
    parser.add_argument("--draft", default="0", help="draft tokens a forward, auto or a number, default 0")
    parser.add_argument("--small", action="store_true", help="a small snapshot, a smoke test of this program")
    return parser


def run_all(args: argparse.Namespace) -> int:
    settings = Settings.read([])
    if settings.snap != str(EMBEDDED_SNAPSHOT):
        run("own", settings, args)
        return 0
    regimes = {"disk": {"RAM_GB": "6", "READ_MODE": "direct"}, "memory": {"RAM_GB": "9"}}
    for name in ("small",) if args.small else regimes:
        with temporary_folder() as work:
            folder = work / name
            make_snapshot(folder, SNAPSHOTS[name])
            if args.small:
                run("a quarter in memory", snapshot_settings(folder, {"READ_MODE": "direct"}, 16), args)
                run("all in memory", snapshot_settings(folder, {}), args)
            else:
                run(name, snapshot_settings(folder, regimes[name]), args)
                gc.collect()  # the next one needs the memory
    return 0


def main(arguments: list[str] | None = None) -> int:
    return exit_code("serving", lambda: run_all(make_parser().parse_args(arguments)), "interrupted")


if __name__ == "__main__":
    sys.exit(main())
