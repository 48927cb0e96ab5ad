"""Requests to the scheduler, and the events that it emits for them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from errors import Refused
from forward.finite import NonFinite
from generate.sampler import TokenLogprobs
from snapshot.config import ModelConfig
from text.prompt import positions_needed

if TYPE_CHECKING:  # a KV slot knows the request that writes to it
    from generate.kv_slots import KvSlot


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, and one or several answers to it. The sampling settings are those of generate/sampler.py."""

    prompt_ids: tuple[int, ...]
    max_tokens: int  # 0: the prompt is prefilled and nothing sampled
    temperature: float = 0.0  # 0 = greedy
    nucleus: float = 1.0
    top_k: int = 0
    seed: int = 0
    num_samples: int = 1  # rows 0 .. n-1 of the sampler, each in a KV slot of its own
    stop_ids: frozenset[int] = frozenset()
    top_logprobs: int | None = None  # None: no log-probabilities; n: those of the token and of the n likeliest
    prompt_logprobs: bool = False  # log-probabilities of the prompt's tokens too; then all of it is prefilled
    conversation: str | None = None  # its KV slot is kept, and saved where the scheduler has a store


@dataclass(frozen=True, slots=True)
class Started:
    """The prefill begins; cached_tokens of the prompt were in the prefix cache."""

    active: "ActiveRequest"
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The prompt is prefilled. prompt_logprobs: None, or for each token (id, log p, top); no log p of the first."""

    active: "ActiveRequest"
    prompt_logprobs: list[TokenLogprobs] | None


@dataclass(frozen=True, slots=True)
class NewToken:
    """The next token of a row. log p and the likeliest [(id, log p), ...] are None unless they were asked for."""

    active: "ActiveRequest"
    row: int
    id: int
    logprob: float | None
    top: list[tuple[int, float]] | None


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a row. reason: stop (the id is in active.stop_ids[row]), length, cancelled or error."""

    active: "ActiveRequest"
    row: int
    reason: str
    error: str | None


Event = Started | Prefilled | NewToken | Finished


class QueueFull(Exception):
    """No more requests may wait; try again after `retry_after` seconds."""

    def __init__(self, num_waiting: int, retry_after: float):
        super().__init__(f"the queue is full: {num_waiting} requests are waiting; try again in {retry_after:.0f} s")
        self.retry_after = retry_after


class ActiveRequest:
    """A request that waits or runs. The thread that runs the model owns it, except for `cancel`."""

    def __init__(self, number: int, request: Request, listener: Callable[[Event], object], wake: Callable[[], None]):
        self.id, self.request = number, request
        self.listener, self.wake = listener, wake
        self.stop_ids: dict[int, int] = {}  # row -> the stop token that ended it
        self.unfinished = set(range(request.num_samples))  # rows
        self.cancelled: set[int] = set()  # rows
        self.kv_slots: list[KvSlot] = []  # one for each row
        self.started: float | None = None  # by time.monotonic
        self.fault: str | None = None  # the listener's exception

    def cancel(self, row: int | None = None) -> None:
        """End one row, or all. From any thread, at any time."""
        self.cancelled.update(range(self.request.num_samples) if row is None else (row,))
        self.wake()

    @property
    def is_cancelled(self) -> bool:
        """True if every row that has not finished is cancelled."""
        return self.unfinished <= self.cancelled

    def emit(self, event: Event) -> None:
        """Give an event to the listener, in order. A listener that raises ends its request."""
        try:
            self.listener(event)
        except Exception as error:
            self.fault = self.fault or f"{type(error).__name__}: {error}"
            self.cancel()

    def finish(self, row: int, reason: str, error: Exception | str | None = None) -> None:
        self.unfinished.discard(row)
        text = describe_error(error) if error else self.fault if reason == "cancelled" else None
        self.emit(Finished(self, row, reason, text))


def check_request(request: Request, config: ModelConfig, num_slots: int, context: int) -> None:
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


def describe_error(error: Exception | str) -> str:
    """One line for an error; those of the engine are one already."""
    is_known = isinstance(error, Refused | NonFinite | ValueError | str)
    return str(error) if is_known else f"{type(error).__name__}: {error}"
