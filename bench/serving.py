"""Cost of continuous batching: several clients of the scheduler against one, and a short prompt beside a long one.

    make bench-serving            or     python bench/serving.py [--clients 8] [--tokens 32] [--small]
    SNAP=/models/glm-5.2-int4 RAM_GB=20 python bench/serving.py

Without SNAP two synthetic snapshots of GLM-5.2's layers are made (dev/make_synthetic.py, routing as in traces), one
after the other, in a temporary folder (TMPDIR says where; it must be on the drive that is to be measured):

    disk      4 layers, 256 experts in each of the 3 sparse ones, 16 GB, with RAM_GB 6 and READ_MODE=direct
    memory    4 layers, 64 experts, 4 GB, all of them in the cache

--small makes one of 0.2 GB and gives it a cache of a quarter of its experts, then of all; it shows that this program
works and measures little. With SNAP that snapshot is measured as it is, within RAM_GB.

Each client has a prompt of its own and samples with a seed of its own, at temperature 1, without drafts
(--draft measures with them). All begin together; what counts begins when the last has --warm tokens, and ends when the
first has all of its own. The lines:

    one client, N clients    tokens a second of all together; MB read and distinct experts a forward
    together                 how many times the speed of one. Where experts are read the best to expect is N x (bytes
                             a forward of one reads / bytes a forward of N reads), and the share of it that was reached
                             is said; the aim is 0.85. With all in memory the aim is 2.5 times.
    first token              of a prompt of 16 tokens that comes at a random moment while one of 2,000 is prefilled and
                             another client is answered, the median of several; and what it may take: two steps of
                             decode and one with a part of the long prompt

Numbers of a machine that does other things at the same time mean little.
"""

import argparse
import gc
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from errors import Refused
from generate.request import Finished, NewToken, Request
from generate.scheduler import Scheduler
from load.model import load_model, open_snapshot
from settings import EMBEDDED_SNAPSHOT, Settings

ROOT = Path(__file__).resolve().parents[1]
SIZES = {
    "disk": "glm-5.2 --layers 4 --experts 256 --vocab 32768",
    "memory": "glm-5.2 --layers 4 --experts 64 --vocab 32768",
    "small": "small --layers 5 --experts 64 --hidden 512 --moe-width 512 --vocab 4096",
}
PROMPT_IDS, LONG_IDS, SHORT_IDS = 16, 2000, 16
CONTEXT = 4096
SHORT_PROMPTS = 5  # that meet the long one


@dataclass(frozen=True)
class Rate:
    """What the steps of a window did."""

    tokens_per_second: float
    bytes_per_forward: float
    experts_per_forward: float


class Window:
    """A listener for all clients: what is counted from when all have `warm` tokens until one has all of its own."""

    def __init__(self, scheduler, num_clients, warm, tokens):
        self.scheduler, self.warm, self.last = scheduler, warm, warm + tokens
        self.counts, self.num_clients, self.num_over = {}, num_clients, 0
        self.start = self.stop = None
        self.is_over = threading.Event()

    def look(self):
        experts, done = self.scheduler.model.experts.counters, self.scheduler.batch.counters
        tokens = sum(self.counts.values())
        return time.perf_counter(), tokens, done.forwards, experts.bytes_read, experts.hits + experts.misses

    def __call__(self, event):
        if isinstance(event, NewToken):
            self.counts[event.active.id] = self.counts.get(event.active.id, 0) + 1
            if not self.start and len(self.counts) == self.num_clients and min(self.counts.values()) >= self.warm:
                self.start = self.look()
            elif self.start and not self.stop and self.counts[event.active.id] == self.last:
                self.stop = self.look()
        elif isinstance(event, Finished):
            self.num_over += 1
            if self.num_over == self.num_clients:
                self.is_over.set()

    def rate(self):
        seconds, tokens, forwards, num_bytes, experts = (b - a for a, b in zip(self.start, self.stop, strict=True))
        return Rate(tokens / seconds, num_bytes / forwards, experts / forwards)


class Texts:
    """Prompts: pieces of the snapshot's own ids where it has some, else random ones."""

    def __init__(self, folder, vocab_size):
        path = folder / "ref_glm.json"
        self.own = json.loads(path.read_text())["full_ids"] if path.exists() else []
        self.vocab_size, self.random = vocab_size, random.Random(1)

    def take(self, count):
        if len(self.own) < 2 * count:
            return tuple(self.random.choices(range(self.vocab_size), k=count))
        start = self.random.randrange(len(self.own) - count)
        return tuple(self.own[start : start + count])


def measure_rate(scheduler, texts, num_clients, warm, tokens):
    """-> Rate of so many clients."""
    window = Window(scheduler, num_clients, warm, tokens)
    for seed in range(num_clients):
        request = Request(texts.take(PROMPT_IDS), warm + tokens + 1, 1.0, seed=seed)
        scheduler.submit(request, window)
    window.is_over.wait()
    return window.rate()


class Talk:
    """A client that is answered all the time: when each of its tokens came."""

    def __init__(self):
        self.times, self.is_over = [], threading.Event()

    def __call__(self, event):
        if isinstance(event, NewToken):
            self.times.append(time.perf_counter())
        elif isinstance(event, Finished):
            self.is_over.set()

    def steps(self, since, until):
        """Seconds between its tokens in that time."""
        times = [t for t in self.times if since <= t <= until]
        return [b - a for a, b in zip(times, times[1:], strict=False)]


def measure_first_token(scheduler, texts):
    """-> seconds: (to the first tokens of short prompts, a step of decode, one with a part of the long prompt)."""
    firsts, chunks, decode = [], [], 0.0
    for seed in range(SHORT_PROMPTS):
        talk, long, short = Talk(), Talk(), Talk()
        talking = scheduler.submit(Request(texts.take(PROMPT_IDS), scheduler.context - PROMPT_IDS, 1.0), talk)
        wait_until(lambda talk=talk: len(talk.times) >= 6)
        decode = statistics.median(talk.steps(0, time.perf_counter()))
        ids = random.Random(seed).choices(range(scheduler.config.vocab_size), k=LONG_IDS)
        began = time.perf_counter()
        reading = scheduler.submit(Request(tuple(ids), 1), long)
        # Two parts of the long prompt tell what one takes; then the short one comes somewhere in the next.
        wait_until(lambda talk=talk, began=began: len(talk.steps(began, time.perf_counter())) >= 3)
        time.sleep(random.Random(seed).random() * max(talk.steps(began, time.perf_counter())))
        asked = time.perf_counter()
        scheduler.submit(Request(texts.take(SHORT_IDS), 1), short)
        short.is_over.wait()
        if not long.times:  # else there was nothing to wait for
            firsts.append(short.times[0] - asked)
        chunks += sorted(talk.steps(began, time.perf_counter()))[-2:]
        talking.cancel()
        reading.cancel()
        talk.is_over.wait()
        long.is_over.wait()
    return statistics.median(firsts), decode, statistics.median(chunks)


def wait_until(is_so):
    while not is_so():
        time.sleep(0.001)


def run(name, settings, args):
    """Load, measure, say."""
    opened = open_snapshot(settings, args.clients)
    loaded = load_model(settings, opened)
    scheduler = Scheduler(loaded, args.clients, draft=args.draft)
    texts, plan = Texts(loaded.folder, loaded.config.vocab_size), loaded.plan
    num_experts = plan.num_sparse_layers * plan.num_experts
    fits = plan.num_expert_slots >= num_experts
    print(
        f"\n{name}: {plan.num_expert_slots} of {num_experts} experts in memory | {loaded.kernels}",
        loaded.drive,
        flush=True,
    )
    try:
        if fits:  # until all of them are there
            measure_rate(scheduler, texts, args.clients, 1, 4 * args.tokens)
        rates = {}
        for num_clients in (1, args.clients, 1, args.clients):
            rates.setdefault(num_clients, []).append(
                measure_rate(scheduler, texts, num_clients, args.warm, args.tokens)
            )
        one, many = (middle(rates[count]) for count in (1, args.clients))
        for count, rate in ((1, one), (args.clients, many)):
            print(
                f"  {count} client{'s' if count > 1 else ' '}: {rate.tokens_per_second:.2f} tok/s | "
                f"{rate.bytes_per_forward / 1e6:.1f} MB read and {rate.experts_per_forward:.1f} experts a forward"
            )
        ratio = many.tokens_per_second / one.tokens_per_second
        line = f"  together: {ratio:.2f} times one client"
        if fits:
            line += ", the aim is 2.5"
        else:
            bound = args.clients * one.bytes_per_forward / many.bytes_per_forward
            line += f", {ratio / bound:.2f} of the {bound:.2f} that the bytes allow; the aim is 0.85"
        print(line, flush=True)
        first, decode, chunk = measure_first_token(scheduler, texts)
        print(
            f"  first token: {first:.3f} s, may take {2 * decode + chunk:.3f} = 2 x {decode:.3f} of decode + "
            f"{chunk:.3f} with {scheduler.chunked_prefill.shared_rows} rows of the long prompt"
        )
    finally:
        scheduler.close()
        loaded.close()


def middle(rates):
    """The mean of each number."""
    return Rate(*(statistics.mean(getattr(rate, name) for rate in rates) for name in Rate.__dataclass_fields__))


def read_settings(folder, cap=0, **variables):
    environ = {"SNAP": str(folder), "CTX": str(CONTEXT), "USAGE": "0"} | variables
    return Settings.read([str(cap)], environ)


def make_snapshot(folder, sizes):
    script = [sys.executable, str(ROOT / "dev" / "make_synthetic.py"), sizes.split()[0], str(folder)]
    more = [*sizes.split()[1:], *"--routing trace --prompt 64 --tokens 512 --report-tokens 0".split()]
    if subprocess.run([*script, *more], stdout=sys.stderr).returncode:
        raise Refused("the synthetic snapshot could not be made; SNAP names one that is there")


def make_parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=8, help="default 8")
    parser.add_argument("--tokens", type=int, default=32, help="of each client that count, default 32")
    parser.add_argument("--warm", type=int, default=8, help="tokens before, default 8")
    parser.add_argument("--draft", default="0", help="draft tokens a forward, auto or a number, default 0")
    parser.add_argument("--small", action="store_true", help="a small snapshot, to see that this program works")
    return parser


def main(arguments=None):
    args = make_parser().parse_args(arguments)
    try:
        settings = Settings.read([])
        if settings.snap != str(EMBEDDED_SNAPSHOT):
            run("own", settings, args)
            return 0
        with tempfile.TemporaryDirectory() as work:
            if args.small:
                folder = Path(work, "small")
                make_snapshot(folder, SIZES["small"])
                run("a quarter in memory", read_settings(folder, 16, READ_MODE="direct"), args)
                run("all in memory", read_settings(folder), args)
                return 0
            for name, variables in (("disk", {"RAM_GB": "6", "READ_MODE": "direct"}), ("memory", {"RAM_GB": "9"})):
                with tempfile.TemporaryDirectory(dir=work) as inner:
                    folder = Path(inner, "glm")
                    make_snapshot(folder, SIZES[name])
                    run(name, read_settings(folder, **variables), args)
                    gc.collect()  # the memory of one is needed by the next
        return 0
    except Refused as error:
        print(f"serving: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("serving: interrupted", file=sys.stderr)
        return 130
    return 2


if __name__ == "__main__":
    sys.exit(main())
