"""A long run of mixed prompts, to see that the budget holds, nothing leaks and the answers stay the same.

    python dev/soak.py --minutes 30
    python dev/soak.py --minutes 30 --snap /models/glm-5.2-int4 --ram 20

Without --snap a synthetic model of 1.5 GB is made in a temporary folder (TMPDIR says where) and runs in 0.7 GB; with it
RAM_GB says the budget where --ram does not. All other variables of docs/env_vars.md hold as they do for colibri.py, so
LOOKAHEAD=1 can be soaked too.

One process runs round after round, each in another order: prompts of 1 to 2,000 random ids, greedy and sampled, some
around the end of a prefill chunk; prompts abandoned during and after their prefill; log-likelihoods of several
continuations; and two fixed prompts, one greedy and one sampled, that must give the same ids whenever they recur. The
same --seed gives the same prompts. Memory is looked at every 50 ms.

A line every 10 s on stderr, and a verdict on stdout. Exit code 0: at no time more than 1.05 times the budget was held,
no slot of the expert cache was lost, no file and no thread was left, and the fixed prompts were the same every time.
1: one of these was broken, with the number. 2: bad usage or a bad snapshot. The first round is always run whole.
"""

import argparse
import math
import random
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from errors import Refused
from forward.finite import NonFinite
from forward.kv_cache import make_kv_cache
from generate.decode import spec_decode
from generate.sampler import Sampler
from generate.score import ScoreRequest, score_requests
from load.model import load_model, open_snapshot
from machine.console import say
from machine.memory import rss_bytes
from modes.run import announce
from settings import Settings

SYNTHETIC = Path(__file__).resolve().parent / "make_synthetic.py"
SYNTHETIC_RAM_GB = 0.7
ALLOWED = 1.05  # of the budget
LOOK_SECONDS, SAY_SECONDS = 0.05, 10
MAX_PROMPT, MAX_ANSWER = 2000, 16  # tokens
FIXED_PROMPT, FIXED_ANSWER = 96, 8


class SoakFailure(Exception):
    """A promise was not kept; the message says which, with its number."""


class Abandoned(Exception):
    """Ends a prefill in the middle, as an interrupt would."""


class SoakWatch:
    """A thread that looks at the memory of this process every 50 ms, and says every 10 s how things go."""

    def __init__(self, budget, describe):
        self.limit, self.describe = int(ALLOWED * budget), describe
        self.peak, self.started, self.is_over = 0, time.perf_counter(), threading.Event()
        self.thread = threading.Thread(target=self.look, name="soak watch")

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.is_over.set()
        self.thread.join()

    @property
    def seconds(self):
        return time.perf_counter() - self.started

    def look(self):
        said = 0.0
        while not self.is_over.wait(LOOK_SECONDS):
            rss = rss_bytes()
            self.peak = max(self.peak, rss)
            if self.seconds - said >= SAY_SECONDS:
                said = self.seconds
                say(f"[soak {said:.0f} s] {self.describe()} | RSS {rss / 1e9:.3f} GB, {self.of_limit()}")

    def of_limit(self):
        return f"peak {self.peak / 1e9:.3f} of {self.limit / 1e9:.3f} GB"

    def check(self):
        if self.peak > self.limit:
            raise SoakFailure(f"{self.peak / 1e9:.3f} GB were held, more than {ALLOWED} times the budget, "
                         f"{self.limit / 1e9:.3f} GB")  # fmt: skip


class Soak:
    """The work: rounds over one loaded model."""

    def __init__(self, loaded, seed):
        self.model, self.config = loaded.model, loaded.config
        self.context, self.chunk = loaded.context, loaded.plan.prefill_chunk
        self.random = random.Random(seed)
        self.longest = min(MAX_PROMPT, self.context - MAX_ANSWER)
        if self.longest < FIXED_PROMPT:
            raise Refused(f"CTX is {self.context}, a soak needs {FIXED_PROMPT + MAX_ANSWER} or more")
        fixed = self.ids(FIXED_PROMPT)
        self.fixed = {"greedy": (fixed, Sampler()), "sampled": (fixed, self.sampler())}
        self.answers = {}  # name of a fixed prompt -> its answer at first
        self.prompts = self.abandoned = self.scored = self.tokens = 0

    def ids(self, count):
        return self.random.choices(range(self.config.vocab_size), k=count)

    def sampler(self):
        return Sampler(0.8, 0.9, self.random.getrandbits(32))

    def any_sampler(self):
        return self.random.choice([Sampler(), self.sampler()])

    def describe(self):
        return (
            f"{self.prompts} prompts, {self.abandoned} abandoned, {self.scored} scored, {self.tokens} tokens, "
            f"expert hit {self.model.experts.counters.hit_rate:.0%}"
        )

    def round(self):
        """-> pieces of work in some order, each to be called."""
        works = [
            self.short_prompt,
            self.short_prompt,
            self.long_prompt,
            self.prompt_at_chunk_end,
            self.abandon_answer,
            self.abandon_prefill,
            self.score,
            *[partial(self.repeat, name) for name in self.fixed] * 2,
        ]
        self.random.shuffle(works)
        return works

    def generate(self, ids, sampler, count, progress=None):
        """The tokens that follow `ids`, as they come."""
        kv = make_kv_cache(self.config, len(ids) + count)
        for token in spec_decode(self.model, kv, ids, sampler, count, progress=progress):
            self.tokens += 1
            yield token

    def whole(self, ids, sampler, count, progress=None):
        """-> the answer, a list of `count` ids."""
        answer = list(self.generate(ids, sampler, count, progress))
        self.prompts += 1
        self.tokens += len(ids)
        return answer

    def short_prompt(self):
        length = self.random.randint(1, min(64, self.longest))
        self.whole(self.ids(length), self.any_sampler(), self.random.randint(1, MAX_ANSWER))

    def long_prompt(self):
        self.whole(self.ids(self.random.randint(64, self.longest)), self.any_sampler(), 4)

    def prompt_at_chunk_end(self):
        """One row less than a chunk, a whole one, one or a few more: of one chunk, or of two."""
        length = self.chunk * self.random.choice([1, 2]) + self.random.choice([-1, 0, 1, 7])
        self.whole(self.ids(max(1, min(length, self.longest))), self.any_sampler(), 4)

    def abandon_answer(self):
        """Nobody listens any longer after some tokens."""
        tokens = self.generate(self.ids(self.random.randint(1, 200)), self.any_sampler(), MAX_ANSWER)
        for _ in range(self.random.randint(1, MAX_ANSWER // 2)):
            next(tokens)
        tokens.close()
        self.abandoned += 1

    def abandon_prefill(self):
        """After one of its layers, perhaps in the second chunk."""
        steps = self.random.randint(1, self.config.num_layers * 3 // 2)

        def progress(*_):
            nonlocal steps
            steps -= 1
            if steps <= 0:
                raise Abandoned

        length = self.random.randint(FIXED_PROMPT, self.longest)
        try:
            self.whole(self.ids(length), Sampler(), 1, progress)
        except Abandoned:
            self.abandoned += 1

    def score(self):
        """A few contexts, some with several continuations."""
        requests = []
        for _ in range(self.random.randint(1, 4)):
            context = tuple(self.ids(self.random.randint(1, self.longest // 8)))
            for _ in range(self.random.randint(1, 3)):
                requests.append(ScoreRequest(context, tuple(self.ids(self.random.randint(1, MAX_ANSWER)))))
        scores = dict(score_requests(self.model, requests, self.context))
        if len(scores) != len(requests):
            raise SoakFailure(f"{len(scores)} of {len(requests)} requests were scored")
        self.scored += len(requests)
        self.tokens += sum(len(request.context) + len(request.continuation) for request in requests)

    def repeat(self, name):
        """A fixed prompt: the answer of the first time, whatever is in the cache now."""
        ids, sampler = self.fixed[name]
        answer = self.whole(ids, sampler, FIXED_ANSWER)
        first = self.answers.setdefault(name, answer)
        if answer != first:
            raise SoakFailure(f"the {name} prompt gave {answer} after {self.prompts} prompts, {first} at first")


def open_things():
    """-> (open files, threads) of this process, native threads too."""
    process = psutil.Process()
    return process.num_fds(), process.num_threads()


def run(loaded, minutes, seed):
    """Soak a loaded model -> the verdict in a line. Broken when a promise is not kept."""
    soak, before, rounds = Soak(loaded, seed), None, 0
    with SoakWatch(loaded.plan.budget_bytes, soak.describe) as watch:

        def is_late():
            return rounds and watch.seconds >= 60 * minutes

        while not is_late():
            for work in soak.round():
                work()
                loaded.model.experts.check()
                watch.check()
                if is_late():
                    break
            rounds += 1
            # What is opened once, at first use, and kept is no leak: the first round has opened all of it.
            before = before or open_things()
        for what, now, then in zip(("files", "threads"), open_things(), before, strict=True):
            if now > then:
                raise SoakFailure(f"{now} {what} are open, {then} were after the first round")
    return f"rounds: {rounds} | {watch.seconds:.0f} s | {soak.describe()} | {watch.of_limit()}"


def check_closed(folder, threads):
    """After the model is closed: no file of the snapshot is open, and as many Python threads run as before it."""
    files = [file.path for file in psutil.Process().open_files() if Path(file.path).is_relative_to(folder.resolve())]
    if files:
        raise SoakFailure(
            f"{len(files)} files of the snapshot are open after the model was closed, {files[0]} the first"
        )
    if threading.active_count() > threads:
        raise SoakFailure(f"{threading.active_count()} Python threads run after the model was closed, {threads} before")


def soak_folder(args, folder):
    settings = Settings.read([], snap=str(folder))
    ram_gb = args.ram or settings.ram_gb or (0.0 if args.snap else SYNTHETIC_RAM_GB)
    settings = replace(settings, ram_gb=ram_gb, usage=False)
    for notice in settings.notices:
        say(notice)
    threads = threading.active_count()
    opened = open_snapshot(settings)
    try:
        announce(opened)
        loaded = load_model(settings, opened)
        say(f"{loaded.kernels}\n{loaded.drive}")
        verdict = run(loaded, args.minutes, args.seed)
    finally:
        opened.close()
    check_closed(folder, threads)
    return verdict


def limit(text):
    """Minutes or GB: a number, not below 0."""
    try:
        number = float(text)
    except ValueError:
        number = -1
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number, 0 or above")
    return number


def make_parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=limit, default=30, help="default 30")
    parser.add_argument("--snap", type=Path, metavar="DIR", help="a snapshot; by default one is made")
    parser.add_argument("--ram", type=limit, default=0, metavar="GB", help="the budget")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts, default 1")
    return parser


def main(arguments=None):
    args = make_parser().parse_args(arguments)
    try:
        if args.snap:
            verdict = soak_folder(args, args.snap)
        else:
            with tempfile.TemporaryDirectory() as folder:
                script = [sys.executable, str(SYNTHETIC), "small", f"{folder}/small", "--report-tokens", "0"]
                made = subprocess.run([*script, "--moe-width", "1024", "--format", "bf16"], stdout=sys.stderr)
                if made.returncode:
                    return made.returncode
                verdict = soak_folder(args, Path(folder, "small"))
        print(f"soak: all kept | {verdict}")
        return 0
    except (SoakFailure, AssertionError, NonFinite) as error:
        print(f"soak: BROKEN: {error}")
        return 1
    except Refused as error:
        print(f"soak: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("soak: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
