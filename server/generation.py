"""All answers of one HTTP request: their jobs, and the way from the engine's thread to the event loop."""

import asyncio
import time
from collections import deque
from contextlib import suppress

from generate.request import Finished, NewToken, Prefilled, QueueFull, Started
from server.openai.api_error import ApiError
from text.prompt import max_answer_tokens

RETRY_SECONDS = 0.2  # between two looks whether the queue takes another prompt


class Generation:
    """prompts: lists of ids; each gets `sampling.n` answers, choice number prompt * n + row. make_answer(number) ->
    Answer. What waits for room in the queue, of a request with many prompts, is submitted as others of it end."""

    def __init__(self, service, prompts, sampling, make_answer, prompt_logprobs=False):
        self.service, self.sampling, self.prompts = service, sampling, prompts
        self.prompt_logprobs = prompt_logprobs
        self.answers = [make_answer(number) for number in range(len(prompts) * sampling.n)]
        self.loop, self.wake, self.events = asyncio.get_running_loop(), asyncio.Event(), deque()
        self.waiting, self.jobs = deque(range(len(prompts))), {}
        self.began, self.num_cached, self.is_started, self.is_abandoned = time.perf_counter(), 0, False, False
        self.failure = None
        self.submit_more()

    # --- jobs ---

    def submit_more(self):
        """Submit prompts while the queue takes them. ApiError where not even one of them is in."""
        while self.waiting:
            try:
                number = self.waiting[0]
                job = self.service.submit(self.request(number), lambda event, number=number: self.hear(number, event))
            except QueueFull as full:
                if self.jobs:
                    return
                self.service.metrics.refused.inc()
                wait = str(max(1, round(full.retry_after)))
                raise ApiError(429, str(full), code="queue_full", headers={"Retry-After": wait}) from None
            except ValueError as error:
                self.abandon()
                raise ApiError(400, str(error)) from None
            except RuntimeError:
                raise closing() from None
            self.jobs[number] = job
            self.waiting.popleft()

    def request(self, number):
        """The engine's Request for a prompt. What is more than the room behind it is cut off."""
        ids, sampling = self.prompts[number], self.sampling
        room = max_answer_tokens(len(ids), self.service.context)
        return self.service.request(
            ids, sampling, room if sampling.max_tokens is None else min(sampling.max_tokens, room), self.prompt_logprobs
        )

    def hear(self, number, event):
        """The engine's thread tells something."""
        self.events.append((number, event, time.perf_counter()))
        try:
            self.loop.call_soon_threadsafe(self.wake.set)
        except RuntimeError:
            self.abandon()  # the loop is gone: nobody listens

    def abandon(self):
        """Nobody waits for the answers any more; those that are over do not notice."""
        if self.is_abandoned:
            return
        self.is_abandoned = True
        for job in self.jobs.values():
            job.cancel()
        for answer in self.answers:
            if not answer.is_over:
                self.service.metrics.answer_over(answer, "error" if self.failure else "cancelled")
        self.wake.set()

    # --- what comes ---

    @property
    def is_over(self):
        return self.is_abandoned or all(answer.is_over for answer in self.answers)

    async def next(self, timeout):
        """-> [("choice", number, Delta), ...] that have come, and ("prompt", number, logprobs) of prompts that were
        read in; None when nothing happened in so many seconds. ApiError when the engine failed."""
        end = self.loop.time() + timeout
        while not self.events and not self.is_over and not self.failure:
            if self.loop.time() >= end:
                return None
            self.submit_more()
            await self.wait(min(end - self.loop.time(), RETRY_SECONDS if self.waiting else timeout))
        if self.failure:
            raise self.failure
        found = []
        while self.events and not self.is_over:
            try:
                found += self.take(*self.events.popleft())
            except ApiError as failure:
                self.failure = failure
                if not found:
                    raise
                break  # what came before it is given first
        return found

    async def wait(self, seconds):
        """Until something comes, or for so long."""
        self.wake.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.wake.wait()

    def take(self, prompt, event, now):
        if isinstance(event, Started):
            self.is_started = True
            self.num_cached += event.cached_tokens
            self.service.metrics.prompt_started(len(self.prompts[prompt]), event.cached_tokens)
            return
        if isinstance(event, Prefilled):
            if self.prompt_logprobs:
                yield "prompt", prompt, event.prompt_logprobs
            return
        number = prompt * self.sampling.n + event.row
        answer = self.answers[number]
        if answer.is_over:
            return
        if isinstance(event, NewToken):
            if answer.first_time is None:
                self.service.metrics.first_token.observe(now - self.began)
            delta = answer.push(event, now)
            if answer.is_over:
                self.jobs[prompt].cancel(event.row)
        else:
            delta = answer.finish(self.reason(event))
        if answer.is_over:
            self.service.metrics.answer_over(answer, answer.finish_reason)
            self.submit_more()
        if delta:
            yield "choice", number, delta

    def reason(self, finished: Finished):
        """Why the engine ended an answer that we still want."""
        if finished.reason == "error":
            self.service.say(f"[http] an answer failed: {finished.error}")
            raise ApiError(500, f"the engine failed: {finished.error}", code="engine_error")
        if finished.reason == "cancelled":
            raise closing()
        return finished.reason

    def usage(self):
        """The tokens of all prompts and answers."""
        prompt = sum(map(len, self.prompts))
        answers = sum(answer.num_tokens for answer in self.answers)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answers,
            "total_tokens": prompt + answers,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
            "completion_tokens_details": {"reasoning_tokens": sum(answer.num_thoughts for answer in self.answers)},
        }


def closing():
    return ApiError(503, "the server is shutting down", code="shutting_down")
