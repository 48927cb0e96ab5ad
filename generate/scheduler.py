"""Continuous batching: requests come and go at any time, and share every forward and every expert that is read.

    scheduler = Scheduler(loaded, num_slots=4)
    job = scheduler.submit(Request((1, 2, 3), max_tokens=20), print)      # events, from the scheduler's own thread
    scheduler.close()

A request waits in a queue, first in, first out, until there is a KV slot for each of its rows; a slot remembers its
text (generate/kv_slots.py). Its prompt is prefilled beside the sequences that decode (generate/batch.py). What a
request gets is the same alone or among others, at any draft depth. One thread runs the model, and calls the listeners,
which hand on what they hear: all wait while one does not return.
"""

import itertools
import threading
import time
from collections import Counter, deque
from dataclasses import asdict

from generate.batch import Batch, Prefill, words_of
from generate.draft_length import DraftLength
from generate.kv_slots import KvSlot, choose
from generate.request import Finished, Job, NewToken, Prefilled, QueueFull, Request, Started, check_request
from text.prompt import shared_prefix_length

__all__ = ["Finished", "Job", "NewToken", "Prefilled", "QueueFull", "Request", "Scheduler", "Started"]

LAST = 16  # jobs whose time counts for retry_after


class Scheduler:
    """loaded: of load/model.py; the model is the scheduler's until `close`. num_slots: by default as many as memory
    is planned for. max_queue: requests that may wait beside those that can begin at once. saved: conversations over
    restarts (generate/kv_file.py), or None. draft: guesses a forward, auto or a number, by default as loaded."""

    def __init__(self, loaded, num_slots=None, max_queue=8, saved=None, draft=None):
        self.model, self.config, self.context = loaded.model, loaded.config, loaded.context
        self.max_queue, self.saved = max_queue, saved
        self.slots = [KvSlot(self.model, self.context) for _ in range(num_slots or loaded.plan.kv_slots)]
        self.governor = DraftLength(loaded.draft if draft is None else draft)
        plan = loaded.plan
        fits_memory = plan.num_expert_slots >= plan.num_sparse_layers * plan.num_experts
        self.batch = Batch(self.model, self.governor, fits_memory, self.free, self.finish, lambda: self.is_closing)
        self.waiting, self.changed, self.is_closing = deque(), threading.Condition(), False
        self.numbers_of_jobs, self.clock = itertools.count(1), itertools.count(1)
        self.ended, self.prompt_tokens, self.cached_tokens, self.num_jobs = Counter(), 0, 0, 0
        self.took = deque(maxlen=LAST)  # seconds from the begin of a job to its end
        self.thread = threading.Thread(target=self.run, daemon=True, name="scheduler")
        self.thread.start()

    # --- from any thread ---

    def submit(self, request, listener):
        """-> Job; listener(event) is told of everything. QueueFull when too many wait, ValueError for what can never
        run, RuntimeError after `close`."""
        check_request(request, self.config, len(self.slots), self.context)
        with self.changed:
            if self.is_closing:
                raise RuntimeError("the scheduler is closed")
            rows = sum(len(job.left) for job in self.waiting) + request.num_samples
            if len(self.waiting) >= self.max_queue and rows > self.num_free:
                raise QueueFull(len(self.waiting), self.retry_after())
            job = Job(next(self.numbers_of_jobs), request, listener, self.wake)
            self.waiting.append(job)
            self.num_jobs += 1
            self.changed.notify()
        return job

    @property
    def num_free(self):
        return sum(slot.job is None for slot in self.slots)

    def retry_after(self):
        """Seconds until one that waits has probably begun."""
        took = sum(self.took) / len(self.took) if self.took else 1.0
        return max(1.0, took * (len(self.waiting) + 1) / len(self.slots))

    def wake(self):
        with self.changed:
            self.changed.notify()

    def numbers(self):
        """What goes on, and what was done since the beginning."""
        free = self.num_free
        return {
            "context": self.context,
            "slots": len(self.slots),
            "slots_free": free,
            "slots_busy": len(self.slots) - free,
            "queue": len(self.waiting),
            "max_queue": self.max_queue,
            "requests": self.num_jobs,
            **{f"rows_{reason}": self.ended[reason] for reason in ("stop", "length", "cancelled", "error")},
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            **asdict(self.batch.counters),
        }

    def close(self):
        """Cancel everything, and end the thread; what is going through the layers stops at the next one."""
        with self.changed:
            self.is_closing = True
            self.changed.notify()
        if threading.current_thread() is not self.thread:
            self.thread.join()

    # --- the thread ---

    def run(self):
        while True:
            with self.changed:
                while not (self.is_closing or self.waiting) and self.batch.is_empty:
                    self.changed.wait()
                if self.is_closing:
                    break
            try:
                self.admit()
                self.batch.step()
            except Exception as error:  # a fault of ours ends what is under way, not the server
                self.end_all("error", words_of(error))
        self.end_all("cancelled")
        for job in self.take_waiting(lambda job: True):
            self.end_waiting(job)

    def take_waiting(self, is_wanted):
        """-> the jobs of the queue for which that holds; they wait no more."""
        with self.changed:
            taken = [job for job in self.waiting if is_wanted(job)]
            self.waiting = deque(job for job in self.waiting if job not in taken)
        return taken

    def end_waiting(self, job, reason="cancelled", error=None):
        for row in sorted(job.left):
            self.finish(job, row, reason, error)

    def admit(self):
        """Begin what waits, in order, as far as there are slots. Who waits for its own conversation holds up nobody."""
        for job in self.take_waiting(lambda job: job.is_dropped):
            self.end_waiting(job)
        for job in list(self.waiting):
            r = job.request
            choice = choose(self.slots, r.prompt_ids, r.num_samples, r.conversation, not r.prompt_logprobs)
            if choice:
                self.take_waiting(lambda other, job=job: other is job)
                try:
                    self.begin(job, choice)
                except Exception as error:
                    for slot in choice.slots:
                        self.free(slot, job, None, "error")
                    self.end_waiting(job, "error", words_of(error))
            elif r.num_samples > self.num_free:
                break

    def begin(self, job, choice):
        """A job gets its slots, and its prompt begins to be read in."""
        r, first = job.request, choice.slots[0]
        length, source = choice.length, choice.source
        if self.saved and r.conversation is not None and first.conversation != r.conversation:
            saved_ids = [] if r.prompt_logprobs else self.saved.ids(r.conversation)
            if shared_prefix_length(saved_ids, r.prompt_ids[:-1]) > length:
                first.resume(self.saved, r.conversation)
                length, source = first.common(r.prompt_ids[:-1]), first
        for slot in choice.slots:
            slot.job, slot.used = job, next(self.clock)
        job.began = time.monotonic()
        first.begin(r.prompt_ids, length, source)
        for slot in choice.slots:
            slot.conversation = None
        first.conversation = r.conversation
        self.prompt_tokens += len(r.prompt_ids)
        self.cached_tokens += length
        job.tell(Started(job, length))
        self.batch.readings.append(Prefill(job, choice.slots))

    def free(self, slot, job, row, reason):
        """Nobody writes to a slot any more; it remembers what stands in it, unless something went wrong there."""
        if reason == "error":
            slot.forget()
        slot.job, slot.used = None, next(self.clock)

    def finish(self, job, row, reason, error=None):
        self.ended[reason] += 1
        if job.left == {row} and job.began:
            self.took.append(time.monotonic() - job.began)
        job.finish(row, reason, error)
        name = job.request.conversation
        if self.saved and name is not None and row == 0 and reason != "error":
            for slot in self.slots:
                if slot.conversation == name and slot.job is None:
                    self.saved.save(name, slot.ids[: slot.kv.length], slot.kv)

    def end_all(self, reason, error=None):
        """Everything under way is over."""
        for of in [*self.batch.answers, *self.batch.readings]:
            self.batch.fail(of, reason, error)
