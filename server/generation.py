"""Generation: all choices of one HTTP request, from the engine's thread to the event loop."""

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

from generate.request import ActiveRequest, Event, Finished, NewToken, Prefilled, QueueFull, Started
from server.http_service import HttpService
from server.openai.api_error import ApiError, JsonObject, internal_error
from server.openai.choice_stream import ChoiceDelta, ChoiceStream, MakeParser
from server.openai.sampling_params import SamplingParams

RETRY_SECONDS = 0.2  # after which a full queue is tried again

# The number of a choice and what it gained; or the number of a prompt that was prefilled.
Update = tuple[int, ChoiceDelta | Prefilled]


class Generation:
    """Each prompt is one request to the engine, of `n` sequences: choice prompt * n + row. Prompts that have no
    room in the queue are submitted while others end."""

    def __init__(self, service: HttpService, prompts: list[list[int]], params: SamplingParams, make_parser: MakeParser):
        self.service = service
        self.params = params
        self.prompts = prompts
        self.n = params.request.num_samples
        self.choices = [
            ChoiceStream(service.tokenizer, make_parser(), ids, params.stop_strings, params.hides_special)
            for ids in prompts
            for _ in range(self.n)
        ]
        self.loop = asyncio.get_running_loop()
        self.has_event = asyncio.Event()
        self.events: deque[tuple[int, Event, float]] = deque()  # (prompt, event, time)
        self.waiting = deque(range(len(prompts)))  # prompts that are not submitted yet
        self.active: dict[int, ActiveRequest] = {}  # prompt -> its request
        self.start_time = time.perf_counter()
        self.num_cached = 0  # prompt tokens found in the prefix cache
        self.is_started = False
        self.is_aborted = False
        self.failure: Exception | None = None
        self.submit_waiting()

    # --- requests ---

    def submit_waiting(self) -> None:
        """Submit prompts until the queue is full. ApiError if not even the first one has room."""
        while self.waiting:
            prompt = self.waiting[0]
            try:
                seed = self.service.next_seed() if self.params.seed is None else self.params.seed
                request = self.service.make_request(self.params.request, self.prompts[prompt], seed)
                self.active[prompt] = self.service.scheduler.submit(request, partial(self.queue_event, prompt))
            except QueueFull as full:
                if self.active:
                    return
                self.service.metrics.refused.inc()
                seconds = str(max(1, round(full.retry_after)))
                raise ApiError(429, str(full), code="queue_full", headers={"Retry-After": seconds}) from None
            except ValueError as error:
                self.abort()
                raise ApiError(400, str(error)) from None
            except RuntimeError:
                raise shutting_down() from None
            self.waiting.popleft()

    def queue_event(self, prompt: int, event: Event) -> None:
        """Queue an event; the engine's thread calls this."""
        self.events.append((prompt, event, time.perf_counter()))
        try:
            self.loop.call_soon_threadsafe(self.has_event.set)
        except RuntimeError:  # the event loop has ended
            self.abort()

    def abort(self) -> None:
        """Cancel the choices that are not finished."""
        if self.is_aborted:
            return
        self.is_aborted = True
        for request in self.active.values():
            request.cancel()
        for choice in self.choices:
            if not choice.is_finished:
                self.service.metrics.choice_ended(choice, "error" if self.failure else "cancelled")
        self.has_event.set()

    def fail(self, error: Exception) -> ApiError:
        """End the choices with an error -> what the client sees of it. An unexpected one is logged."""
        if not isinstance(error, ApiError):
            self.service.say(f"[http] generation failed: {type(error).__name__}: {error}")
            error = internal_error()
        self.failure = error
        self.abort()
        return error

    # --- events ---

    @property
    def is_finished(self) -> bool:
        return self.is_aborted or all(choice.is_finished for choice in self.choices)

    async def next_updates(self, timeout: float) -> list[Update] | None:
        """Wait for updates; None if none came within `timeout` seconds. Raises what failed."""
        end = self.loop.time() + timeout
        while not self.events and not self.is_finished and not self.failure:
            left = end - self.loop.time()
            if left <= 0:
                return None
            self.submit_waiting()
            self.has_event.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, RETRY_SECONDS) if self.waiting else left):
                    await self.has_event.wait()
        if self.failure:
            raise self.failure
        updates: list[Update] = []
        while self.events and not self.is_finished:
            try:
                updates += self.handle_event(*self.events.popleft())
            except Exception as failure:
                self.failure = failure
                if not updates:
                    raise
                break  # the updates before it go out first
        return updates

    def handle_event(self, prompt: int, event: Event, event_time: float) -> Iterator[Update]:
        if isinstance(event, Started):
            self.is_started = True
            self.num_cached += event.cached_tokens
            self.service.metrics.prompt_tokens.inc(len(self.prompts[prompt]))
            self.service.metrics.cached_tokens.inc(event.cached_tokens)
            return
        if isinstance(event, Prefilled):
            if self.params.request.prompt_logprobs:
                yield prompt, event
            return
        number = prompt * self.n + event.row
        choice = self.choices[number]
        if choice.is_finished:
            return
        if isinstance(event, NewToken):
            if choice.first_token_time is None:
                self.service.metrics.first_token.observe(event_time - self.start_time)
            delta = choice.add_token(event, event_time)
            if choice.is_finished:
                self.active[prompt].cancel(event.row)
        else:
            delta = choice.flush(self.check_reason(event))
        if choice.is_finished:
            self.service.metrics.choice_ended(choice, choice.finish_reason)
            self.submit_waiting()
        if delta:
            yield number, delta

    def check_reason(self, finished: Finished) -> str:
        """Return the finish reason; ApiError if the engine failed or shuts down."""
        if finished.reason == "error":
            self.service.say(f"[http] generation failed: {finished.error}")
            raise ApiError(500, f"the engine failed: {finished.error}", code="engine_error")
        if finished.reason == "cancelled":
            raise shutting_down()
        return finished.reason

    def usage(self) -> JsonObject:
        """Return the token counts of all prompts and choices."""
        prompt_tokens = sum(map(len, self.prompts))
        completion_tokens = sum(choice.num_tokens for choice in self.choices)
        reasoning_tokens = sum(choice.num_reasoning_tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
            "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
        }


def shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down")
