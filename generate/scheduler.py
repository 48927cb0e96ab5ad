"""Continuous batching: requests come and go at any time, and share every forward and every expert that is read.

    scheduler = Scheduler(loaded, num_slots=4)
    active = scheduler.submit(Request((1, 2, 3), max_tokens=20), print)   # events, from the scheduler's own thread
    scheduler.close()

A request waits in a queue, first in, first out, until there is a KV slot for each of its rows; a slot keeps its text
(generate/kv_slots.py). Its prompt is prefilled in chunks beside the sequences that decode (generate/batch.py). Its
tokens are the same alone or among others, at any draft depth. One thread runs the model and calls the listeners, which
must return at once: everybody waits for them. V vocabulary.
"""

import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from torch import Tensor

from errors import Refused
from forward.finite import NonFinite
from forward.layers_forward import Progress
from generate.batch import Batch
from generate.chunked_prefill import ChunkedPrefill
from generate.draft import Drafter
from generate.draft_length import DraftLength
from generate.kv_file import KvFileStore
from generate.kv_slots import KvSlot, choose_kv_slots
from generate.request import ActiveRequest, Event, NewToken, Prefilled, QueueFull, Request, Started, check_request
from generate.sampler import Sampler
from generate.sequence import Drafts, Prefill, PromptChunks, Sequence, StepResult
from load.model import LoadedModel
from text.prompt import shared_prefix_length

NUM_TIMED = 16  # requests whose time counts for retry_after


class Scheduler:
    """The request queue, the KV slots, and the thread that steps the batch.

    loaded: the model is the scheduler's until `close`. num_slots: by default as many as memory is planned for.
    max_queue: requests that may wait beside those that can start at once. store: saves conversations over restarts.
    draft: draft tokens a forward, auto or a number, by default as loaded. progress: makes a progress callback for a
    forward that only prefills, from its number of rows."""

    def __init__(
        self,
        loaded: LoadedModel,
        num_slots: int | None = None,
        max_queue: int = 8,
        store: KvFileStore | None = None,
        draft: int | str | None = None,
        progress: Callable[[int], Progress] | None = None,
    ):
        self.model, self.config, self.context = loaded.model, loaded.config, loaded.context
        self.max_queue, self.store, self.progress = max_queue, store, progress
        self.kv_slots = [KvSlot(self.model, self.context) for _ in range(num_slots or loaded.plan.kv_slots)]
        self.draft_length = DraftLength(loaded.draft if draft is None else draft, loaded.draft_guard)
        self.batch = Batch(self.model, Drafter(self.model, self.draft_length))
        self.prefills: list[Prefill] = []  # the oldest first
        plan = loaded.plan
        fits_memory = plan.num_expert_slots >= plan.num_sparse_layers * plan.num_experts
        self.chunked_prefill = ChunkedPrefill(self.model.prefill_chunk, fits_memory)
        self.waiting: deque[ActiveRequest] = deque()
        self.changed = threading.Condition()
        self.is_closing = False
        self.clock = itertools.count(1)
        self.finish_reasons: Counter[str] = Counter()  # of rows
        self.num_requests = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.durations: deque[float] = deque(maxlen=NUM_TIMED)  # seconds from the start of a request to its end
        self.thread = threading.Thread(target=self.run, daemon=True, name="scheduler")
        self.thread.start()

    # --- from any thread ---

    def submit(self, request: Request, listener: Callable[[Event], object]) -> ActiveRequest:
        """Queue a request; listener(event) gets all its events. QueueFull when too many wait, ValueError for what can
        never run, RuntimeError after `close`."""
        check_request(request, self.config, len(self.kv_slots), self.context)
        with self.changed:
            if self.is_closing:
                raise RuntimeError("the scheduler is closed")
            rows = sum(len(active.unfinished) for active in self.waiting) + request.num_samples
            if len(self.waiting) >= self.max_queue and rows > self.num_free:
                raise QueueFull(len(self.waiting), self.retry_after())
            self.num_requests += 1
            active = ActiveRequest(self.num_requests, request, listener, self.wake)
            self.waiting.append(active)
            self.changed.notify()
        return active

    @property
    def num_free(self) -> int:
        return sum(slot.active is None for slot in self.kv_slots)

    def retry_after(self) -> float:
        """Seconds until one more request has probably started."""
        mean = sum(self.durations) / len(self.durations) if self.durations else 1.0
        return max(1.0, mean * (len(self.waiting) + 1) / len(self.kv_slots))

    def wake(self) -> None:
        with self.changed:
            self.changed.notify()

    def statistics(self) -> dict[str, Any]:
        """The state of now, and sums since the start."""
        free = self.num_free
        return {
            "context": self.context,
            "slots": len(self.kv_slots),
            "slots_free": free,
            "slots_busy": len(self.kv_slots) - free,
            "queue": len(self.waiting),
            "max_queue": self.max_queue,
            "requests": self.num_requests,
            **{f"rows_{reason}": self.finish_reasons[reason] for reason in ("stop", "length", "cancelled", "error")},
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            **asdict(self.batch.counters),
        }

    def close(self) -> None:
        """Cancel everything, and end the thread; a prefill under way stops at the next layer."""
        with self.changed:
            self.is_closing = True
            self.changed.notify()
        if threading.current_thread() is not self.thread:
            self.thread.join()

    # --- the thread ---

    def run(self) -> None:
        while True:
            with self.changed:
                while not (self.is_closing or self.waiting or self.batch.sequences or self.prefills):
                    self.changed.wait()
                if self.is_closing:
                    break
            try:
                self.admit()
                self.step()
            except Exception as error:  # a fault of ours ends what is under way, not the server
                self.end_all("error", error)
        self.end_all("cancelled")
        while self.waiting:
            self.finish_rows(self.waiting.popleft())

    # --- admission ---

    def dequeue(self, active: ActiveRequest) -> None:
        with self.changed:
            self.waiting.remove(active)

    def admit(self) -> None:
        """Start what waits, in order, while there are KV slots. A request that waits for its own conversation does not
        hold up others."""
        for active in list(self.waiting):
            if active.is_cancelled:
                self.dequeue(active)
                self.finish_rows(active)
        for active in list(self.waiting):
            r = active.request
            choice = choose_kv_slots(self.kv_slots, r.prompt_ids, r.num_samples, r.conversation, not r.prompt_logprobs)
            if choice:
                self.dequeue(active)
                try:
                    self.start(active, *choice)
                except Exception as error:
                    for slot in choice[0]:
                        self.free(slot, "error")
                    self.finish_rows(active, "error", error)
            elif r.num_samples > self.num_free:
                break

    def start(self, active: ActiveRequest, kv_slots: list[KvSlot], source: KvSlot | None, length: int) -> None:
        """Give a request its KV slots; its prefill begins with the next step."""
        r, first = active.request, kv_slots[0]
        if self.store and r.conversation is not None and first.conversation != r.conversation:
            saved_ids = [] if r.prompt_logprobs else self.store.ids(r.conversation)
            if shared_prefix_length(saved_ids, r.prompt_ids[:-1]) > length:
                first.load(self.store, r.conversation)
                length, source = first.num_cached(r.prompt_ids[:-1]), first
        for row, slot in enumerate(kv_slots):
            slot.active, slot.row, slot.used = active, row, next(self.clock)
        active.kv_slots, active.started = kv_slots, time.monotonic()
        first.start(r.prompt_ids, length, source)
        for slot in kv_slots:
            slot.conversation = None
        first.conversation = r.conversation
        self.prompt_tokens += len(r.prompt_ids)
        self.cached_tokens += length
        active.emit(Started(active, length))
        self.prefills.append(
            Prefill(first.ids, first.kv, first.proposers, r.prompt_logprobs, r.top_logprobs, owner=active)
        )

    # --- one step: schedule, propose, forward, verify, publish ---

    def step(self) -> None:
        """Decode, and prefill some chunks of prompts, in one forward."""
        self.drop_cancelled()
        if not self.batch.sequences and not self.prefills:
            return
        sequences = self.batch.sequences
        chunks = self.chunked_prefill.schedule(self.prefills, len(sequences))
        try:
            drafts = self.batch.drafter.propose(sequences, chunks) if sequences else None
        except (Refused, NonFinite):
            self.batch.drafter.abandon()
            drafts = None
        self.run_forward(sequences, drafts, chunks)

    def run_forward(self, sequences: list[Sequence], drafts: Drafts | None, chunks: PromptChunks) -> None:
        """One forward; if it fails, each runs by itself and without drafts, so that only those end which fail."""

        def should_stop() -> bool:  # nobody waits any more for a prompt in it
            return self.is_closing or any(prompt.owner.is_cancelled for prompt, _ in chunks)

        shown = self.progress(sum(count for _, count in chunks)) if self.progress and not sequences else None
        try:
            logits = self.batch.forward(sequences, drafts, chunks, shown, should_stop)
        except Exception as error:
            if len(sequences) + len(chunks) > 1:
                for sequence in list(sequences):
                    self.run_forward([sequence], None, [])
                for chunk in chunks:
                    self.run_forward([], None, [chunk])
                return
            for sequence in list(sequences):
                self.end(sequence, "error", error)
            for prompt, _ in chunks:
                self.end_prefill(prompt, "error", error)
        else:
            if logits is not None:
                self.publish(sequences, drafts, chunks, logits)

    def publish(
        self, sequences: list[Sequence], drafts: Drafts | None, chunks: PromptChunks, logits: list[Tensor]
    ) -> None:
        """Verify, start the rows of prompts that are prefilled, emit tokens, free what ended."""
        results = self.batch.verify(sequences, drafts, logits)
        for (prompt, _), of_prompt in zip(chunks, logits[len(sequences) :], strict=True):
            if not prompt.num_left:
                results += self.start_rows(prompt, of_prompt)
        for result in results:
            self.publish_tokens(result)

    def start_rows(self, prompt: Prefill, logits: Tensor) -> list[StepResult]:
        """All rows of a request begin with the prompt's KV cache, each with a token of its own from logits [1, V]."""
        active, results = prompt.owner, []
        r = active.request
        self.prefills.remove(prompt)
        active.emit(Prefilled(active, prompt.logprobs))
        for row, slot in enumerate(active.kv_slots):
            if row not in active.unfinished:
                self.free(slot, "cancelled")  # during the prefill
                continue
            if row:
                slot.start(r.prompt_ids, len(r.prompt_ids), active.kv_slots[0])
            sampler = Sampler(r.temperature, r.nucleus, r.seed, row, r.top_k)
            sequence = Sequence(
                slot.ids, slot.kv, sampler, r.max_tokens, r.stop_ids, r.top_logprobs, slot.proposers, owner=slot
            )
            results.append(self.batch.start(sequence, logits))
        return results

    def publish_tokens(self, result: StepResult) -> None:
        """Emit what a sequence got, until it is cancelled."""
        sequence, active, row = result.sequence, result.sequence.owner.active, result.sequence.owner.row
        num_emitted = 0
        for token, logprob, top in result.tokens:
            if row in active.cancelled:
                sequence.truncate(len(sequence.ids) - len(result.tokens) + num_emitted)
                sequence.finish_reason = "cancelled"
                break
            active.emit(NewToken(active, row, token, logprob, top))
            num_emitted += 1
        self.batch.counters.tokens += num_emitted
        if sequence.stop_id is not None:
            active.stop_ids[row] = sequence.stop_id
        if sequence.finish_reason:
            self.end(sequence, sequence.finish_reason)

    # --- ends ---

    def drop_cancelled(self) -> None:
        for sequence in list(self.batch.sequences):
            if sequence.owner.row in sequence.owner.active.cancelled:
                self.end(sequence, "cancelled")
        for prompt in list(self.prefills):
            active = prompt.owner
            if active.is_cancelled:
                self.end_prefill(prompt, "cancelled")
            for row in sorted(active.unfinished & active.cancelled):
                self.finish(active, row, "cancelled")

    def end(self, sequence: Sequence, reason: str, error: Exception | None = None) -> None:
        """A sequence ends: its KV slot becomes free."""
        slot, active = sequence.owner, sequence.owner.active
        if sequence in self.batch.sequences:
            self.batch.sequences.remove(sequence)
        self.free(slot, reason)
        self.finish(active, slot.row, reason, error)

    def end_prefill(self, prompt: Prefill, reason: str, error: Exception | None = None) -> None:
        """All rows of a request end during its prefill."""
        self.prefills.remove(prompt)
        for slot in prompt.owner.kv_slots:
            self.free(slot, reason)
        self.finish_rows(prompt.owner, reason, error)

    def free(self, slot: KvSlot, reason: str) -> None:
        """The slot keeps its text for the prefix cache, except after an error."""
        if reason == "error":
            slot.clear()
        slot.active, slot.used = None, next(self.clock)

    def finish_rows(self, active: ActiveRequest, reason: str = "cancelled", error: Exception | None = None) -> None:
        for row in sorted(active.unfinished):
            self.finish(active, row, reason, error)

    def finish(self, active: ActiveRequest, row: int, reason: str, error: Exception | None = None) -> None:
        """Emit the end of a row; a conversation is saved."""
        self.finish_reasons[reason] += 1
        if active.unfinished == {row} and active.started:
            self.durations.append(time.monotonic() - active.started)
        active.finish(row, reason, error)
        name = active.request.conversation
        if self.store and name is not None and row == 0 and reason != "error":
            for slot in self.kv_slots:
                if slot.conversation == name and slot.active is None:
                    self.store.save(name, slot.ids[: slot.kv.length], slot.kv)

    def end_all(self, reason: str, error: Exception | None = None) -> None:
        """End all that is under way."""
        for sequence in list(self.batch.sequences):
            self.end(sequence, reason, error)
        for prompt in list(self.prefills):
            self.end_prefill(prompt, reason, error)
