"""What a scheduler is asked for, and what it tells about it."""

import math
from dataclasses import dataclass

from text.prompt import positions_needed


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, and one or several answers to it. The sampling settings are those of generate/sampler.py."""

    prompt_ids: tuple[int, ...]
    max_tokens: int  # 0: only the prompt is read in
    temperature: float = 0.0  # 0 = greedy
    nucleus: float = 1.0
    top_k: int = 0
    seed: int = 0
    num_samples: int = 1  # rows 0 .. n-1 of the sampler, each in a KV slot of its own
    stop_ids: frozenset[int] = frozenset()
    top_logprobs: int | None = None  # None: no log-probabilities; n: those of the token and of the n likeliest
    prompt_logprobs: bool = False  # log-probabilities of the prompt's tokens too; then all of it is read in
    conversation: str | None = None  # whose KV slot is kept, and saved where the scheduler saves any


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt begins to be read in; so many of its tokens were remembered."""

    job: "Job"
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The prompt is read in. prompt_logprobs: None, or for each token (id, log p, top): None for the first's log p."""

    job: "Job"
    prompt_logprobs: list | None


@dataclass(frozen=True, slots=True)
class NewToken:
    """The next token of a row. log p and the likeliest [(id, log p), ...] are None unless they were asked for."""

    job: "Job"
    row: int
    id: int
    logprob: float | None
    top: list | None


@dataclass(frozen=True, slots=True)
class Finished:
    """The last that is told of a row. reason: stop (the id is in job.stop_ids[row]), length, cancelled or error."""

    job: "Job"
    row: int
    reason: str
    error: str | None


class QueueFull(Exception):
    """As many wait as may; it is worth trying again after `retry_after` seconds."""

    def __init__(self, num_waiting, retry_after):
        super().__init__(f"{num_waiting} requests wait already; try again in {retry_after:.0f} s")
        self.retry_after = retry_after


class Job:
    """A request on its way. The thread that runs the model owns it, but for `cancel`."""

    def __init__(self, number, request, listener, wake):
        self.id, self.request, self.listener, self.wake = number, request, listener, wake
        self.stop_ids = {}  # row -> the stop token that ended it
        self.left = set(range(request.num_samples))  # rows that are not finished
        self.cancelled = set()
        self.began = None  # when, by time.monotonic
        self.fault = None  # what the listener raised

    def cancel(self, row=None):
        """End one row, or all. From any thread, at any time."""
        self.cancelled.update(range(self.request.num_samples) if row is None else (row,))
        self.wake()

    @property
    def is_dropped(self):
        """Nobody waits for any of it any more."""
        return self.left <= self.cancelled

    def tell(self, event):
        """Give an event to the listener, in order. One that raises is not asked to bear more of it: its job ends."""
        try:
            self.listener(event)
        except Exception as error:
            self.fault = self.fault or f"{type(error).__name__}: {error}"
            self.cancel()

    def finish(self, row, reason, error=None):
        self.left.discard(row)
        self.tell(Finished(self, row, reason, error or (self.fault if reason == "cancelled" else None)))


def check_request(request, config, num_slots, context):
    """ValueError, in one line, for a request that can never run."""
    r, num_ids = request, len(request.prompt_ids)
    if not num_ids or not all(type(i) is int and 0 <= i < config.vocab_size for i in r.prompt_ids):
        raise ValueError(f"a prompt is at least one token id, each from 0 to {config.vocab_size - 1}")
    wholes = (r.max_tokens, r.top_k, r.seed, r.num_samples)
    if any(type(number) is not int for number in wholes):
        raise ValueError(f"max_tokens, top_k, seed, num_samples = {wholes}: expected whole numbers")
    if r.max_tokens < 0 or not 0 <= r.temperature < math.inf or (r.top_logprobs or 0) < 0:
        raise ValueError(
            f"max_tokens={r.max_tokens}, temperature={r.temperature}, top_logprobs={r.top_logprobs}: "
            "expected numbers that are not negative"
        )
    if not 1 <= r.num_samples <= num_slots:
        raise ValueError(f"num_samples={r.num_samples}: expected 1 to {num_slots}, a KV slot for each")
    if positions_needed(num_ids, max(r.max_tokens, 1)) > context:
        raise ValueError(f"{num_ids} prompt tokens and {r.max_tokens} more do not fit {context} positions")
