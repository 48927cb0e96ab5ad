"""Soak test: a long run of mixed prompts within the memory budget, without leaks, with reproducible answers.

    python dev/soak.py --minutes 30
    python dev/soak.py --minutes 30 --snap /models/glm-5.2-int4 --ram 20

Without --snap a synthetic model of 1.5 GB is made in a temporary folder (TMPDIR sets where) and runs in 0.7 GB; with it
RAM_GB is the budget where --ram is not given. All other variables of docs/env_vars.md apply as for colibri.py, so
LOOKAHEAD=1 can be tested too.

One process runs rounds in random order: prompts of 1 to 2,000 random ids, greedy and sampled, some around the end of a
prefill chunk; prompts cancelled during and after their prefill; log-likelihoods of several continuations; and two fixed
prompts, one greedy and one sampled, that must give the same ids every time. The same --seed gives the same prompts.
Memory is sampled every 50 ms.

A line every 10 s on stderr, and a verdict on stdout. Exit code 0: RSS never exceeded 1.05 times the budget, no expert
slot was lost, no file and no thread leaked, and the fixed prompts gave the same ids every time. 1: one of these failed,
with the number. 2: bad usage or a bad snapshot. The first round is always completed.
"""

import argparse
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import machine.interpreter  # noqa: F401 - first: what is missing is said in one line

# isort: split
import psutil

from errors import Refused
from forward.finite import NonFinite
from forward.kv_cache import make_kv_cache
from generate.decode import spec_decode
from generate.sampler import Sampler
from generate.score import ScoreRequest, score_requests
from load.model import LoadedModel, load_model, open_snapshot
from machine.console import say
from machine.exit import exit_code
from machine.files import temporary_folder
from machine.memory import rss_bytes
from modes.run import announce
from scripts.options import number_from
from settings import Settings

SYNTHETIC = Path(__file__).resolve().parent / "make_synthetic.py"
SYNTHETIC_RAM_GB = 0.7
ALLOWED = 1.05  # of the budget
SAMPLE_SECONDS, SAY_SECONDS = 0.05, 10
MAX_PROMPT, MAX_ANSWER = 2000, 16  # tokens
FIXED_PROMPT, FIXED_ANSWER = 96, 8


Progress = Callable[[int, int, int], None] | None


class SoakFailure(Exception):
    """A check failed; the message says which, with its number."""


class Cancelled(Exception):
    """Raised during a prefill, as an interrupt would be."""


class SoakWatch:
    """A thread that samples the RSS of this process every 50 ms, and reports progress every 10 s."""

    def __init__(self, budget: int, describe: Callable[[], str]) -> None:
        self.limit = int(ALLOWED * budget)
        self.describe = describe
        self.peak = 0
        self.started = time.perf_counter()
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self.sample, name="soak watch")

    def __enter__(self) -> "SoakWatch":
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.is_over.set()
        self.thread.join()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def sample(self) -> None:
        said = 0.0
        while not self.is_over.wait(SAMPLE_SECONDS):
            rss = rss_bytes()
            self.peak = max(self.peak, rss)
            if self.seconds - said >= SAY_SECONDS:
                said = self.seconds
                say(f"[soak {said:.0f} s] {self.describe()} | RSS {rss / 1e9:.3f} GB, {self.peak_of_limit()}")

    def peak_of_limit(self) -> str:
        return f"peak {self.peak / 1e9:.3f} of {self.limit / 1e9:.3f} GB"

    def check(self) -> None:
        if self.peak > self.limit:
            raise SoakFailure(f"{self.peak / 1e9:.3f} GB RSS, more than {ALLOWED} times the budget, "
                         f"{self.limit / 1e9:.3f} GB")  # fmt: skip


class Soak:
    """Rounds of work over one loaded model."""

    def __init__(self, loaded: LoadedModel, seed: int) -> None:
        self.model, self.config = loaded.model, loaded.config
        self.context, self.chunk = loaded.context, loaded.plan.prefill_chunk
        self.random = random.Random(seed)
        self.longest = min(MAX_PROMPT, self.context - MAX_ANSWER)
        if self.longest < FIXED_PROMPT:
            raise Refused(f"CTX is {self.context}, a soak test needs {FIXED_PROMPT + MAX_ANSWER} or more")
        fixed = self.ids(FIXED_PROMPT)
        self.fixed = {"greedy": (fixed, Sampler()), "sampled": (fixed, self.sampler())}
        self.answers: dict[str, list[int]] = {}  # name of a fixed prompt -> its first answer
        self.prompts = self.cancelled = self.scored = self.tokens = 0

    def ids(self, count: int) -> list[int]:
        return self.random.choices(range(self.config.vocab_size), k=count)

    def sampler(self) -> Sampler:
        return Sampler(0.8, 0.9, self.random.getrandbits(32))

    def any_sampler(self) -> Sampler:
        return self.random.choice([Sampler(), self.sampler()])

    def describe(self) -> str:
        return (
            f"{self.prompts} prompts, {self.cancelled} cancelled, {self.scored} scored, {self.tokens} tokens, "
            f"expert hit {self.model.experts.counters.hit_rate:.0%}"
        )

    def round(self) -> list[Callable[[], None]]:
        """The tasks of a round, in random order."""
        tasks: list[Callable[[], None]] = [
            self.short_prompt,
            self.short_prompt,
            self.long_prompt,
            self.prompt_at_chunk_end,
            self.cancel_answer,
            self.cancel_prefill,
            self.score,
            *[partial(self.repeat, name) for name in self.fixed] * 2,
        ]
        self.random.shuffle(tasks)
        return tasks

    def generate(self, ids: list[int], sampler: Sampler, count: int, progress: Progress = None) -> Generator[int]:
        """Yield the `count` tokens that follow `ids`."""
        kv = make_kv_cache(self.config, len(ids) + count)
        for token in spec_decode(self.model, kv, ids, sampler, count, progress=progress):
            self.tokens += 1
            yield token

    def complete(self, ids: list[int], sampler: Sampler, count: int, progress: Progress = None) -> list[int]:
        """The answer to a prompt, `count` ids."""
        answer = list(self.generate(ids, sampler, count, progress))
        self.prompts += 1
        self.tokens += len(ids)
        return answer

    def short_prompt(self) -> None:
        length = self.random.randint(1, min(64, self.longest))
        self.complete(self.ids(length), self.any_sampler(), self.random.randint(1, MAX_ANSWER))

    def long_prompt(self) -> None:
        self.complete(self.ids(self.random.randint(64, self.longest)), self.any_sampler(), 4)

    def prompt_at_chunk_end(self) -> None:
        """A prompt that ends just before, at or just after the end of the first or second prefill chunk."""
        length = self.chunk * self.random.choice([1, 2]) + self.random.choice([-1, 0, 1, 7])
        self.complete(self.ids(max(1, min(length, self.longest))), self.any_sampler(), 4)

    def cancel_answer(self) -> None:
        """Stop after some tokens."""
        tokens = self.generate(self.ids(self.random.randint(1, 200)), self.any_sampler(), MAX_ANSWER)
        for _ in range(self.random.randint(1, MAX_ANSWER // 2)):
            next(tokens)
        tokens.close()
        self.cancelled += 1

    def cancel_prefill(self) -> None:
        """Stop after some layers, perhaps in the second chunk."""
        steps = self.random.randint(1, self.config.num_layers * 3 // 2)

        def progress(*_: int) -> None:
            nonlocal steps
            steps -= 1
            if steps <= 0:
                raise Cancelled

        length = self.random.randint(FIXED_PROMPT, self.longest)
        try:
            self.complete(self.ids(length), Sampler(), 1, progress)
        except Cancelled:
            self.cancelled += 1

    def score(self) -> None:
        """Score a few contexts, some with several continuations."""
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

    def repeat(self, name: str) -> None:
        """Run a fixed prompt: its first answer, whatever is cached now."""
        ids, sampler = self.fixed[name]
        answer = self.complete(ids, sampler, FIXED_ANSWER)
        first = self.answers.setdefault(name, answer)
        if answer != first:
            raise SoakFailure(f"the {name} prompt gave {answer} after {self.prompts} prompts, {first} at first")


def count_open() -> tuple[int, int]:
    """(open files, threads) of this process, native threads included."""
    process = psutil.Process()
    return process.num_fds(), process.num_threads()


def run(loaded: LoadedModel, minutes: float, seed: int) -> str:
    """Soak a loaded model -> the verdict in a line. SoakFailure when a check fails."""
    soak = Soak(loaded, seed)
    rounds = 0
    before: tuple[int, int] | None = None  # count_open() after the first round
    with SoakWatch(loaded.plan.budget_bytes, soak.describe) as watch:

        def is_late() -> bool:
            return rounds > 0 and watch.seconds >= 60 * minutes

        while not is_late():
            for task in soak.round():
                task()
                loaded.model.experts.check()
                watch.check()
                if is_late():
                    break
            rounds += 1
            # Files and threads opened once, at first use, are no leak: the first round has opened all of them.
            before = before or count_open()
        assert before
        for what, now, then in zip(("files", "threads"), count_open(), before, strict=True):
            if now > then:
                raise SoakFailure(f"{now} {what} are open, {then} were after the first round")
    return f"rounds: {rounds} | {watch.seconds:.0f} s | {soak.describe()} | {watch.peak_of_limit()}"


def check_closed(folder: Path, threads: int) -> None:
    """Check that the closed model left no file of the snapshot open and no more Python threads than before it."""
    files = [file.path for file in psutil.Process().open_files() if Path(file.path).is_relative_to(folder.resolve())]
    if files:
        raise SoakFailure(
            f"{len(files)} files of the snapshot are open after the model was closed, {files[0]} the first"
        )
    if threading.active_count() > threads:
        raise SoakFailure(f"{threading.active_count()} Python threads run after the model was closed, {threads} before")


def soak_folder(args: argparse.Namespace, folder: Path) -> str:
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


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=number_from(0), default=30, help="default 30")
    parser.add_argument("--snap", type=Path, metavar="DIR", help="a snapshot; by default a synthetic one")
    parser.add_argument("--ram", type=number_from(0), default=0, metavar="GB", help="the budget")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts, default 1")
    return parser


def main(arguments: list[str] | None = None) -> int:
    args = make_parser().parse_args(arguments)
    return exit_code("soak", lambda: soak_with(args), "interrupted")


def soak_with(args: argparse.Namespace) -> int:
    """Soak the model of the options, and print the verdict -> exit code."""
    try:
        psutil.Process()
    except psutil.Error:
        raise Refused("there is no /proc, where open files and threads are listed; a soak test counts them") from None
    try:
        if args.snap:
            verdict = soak_folder(args, args.snap)
        else:
            with temporary_folder() as folder:
                script = [sys.executable, str(SYNTHETIC), "small", f"{folder}/small", "--report-tokens", "0"]
                made = subprocess.run([*script, "--moe-width", "1024", "--format", "bf16"], stdout=sys.stderr)
                if made.returncode:
                    return made.returncode
                verdict = soak_folder(args, folder / "small")
        print(f"soak: passed | {verdict}")
        return 0
    except (SoakFailure, AssertionError, NonFinite) as error:
        print(f"soak: FAILED: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
