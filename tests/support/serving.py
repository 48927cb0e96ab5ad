"""Helpers of scheduler tests: requests, a recording listener, and reference ids from one full forward a token."""

import threading

from generate.engine import naive_generate
from generate.request import Finished, NewToken, Request
from generate.sampler import Sampler
from tests.conftest import reference

NAME = "glm_moe_dsa_mtp"
PROMPT = tuple(reference(NAME)[0]["greedy"]["prompt"])
VOCAB = 512
SECONDS = 60  # timeout of a test


class EventRecorder:
    """A listener that records events, calls `then` with each, and waits for the end of all rows of a request."""

    def __init__(self, rows=1, then=None):
        self.events, self.rows, self.then, self.is_over = [], rows, then, threading.Event()

    def __call__(self, event):
        self.events.append(event)
        if sum(isinstance(e, Finished) for e in self.events) == self.rows:
            self.is_over.set()
        if self.then:
            self.then(event)

    def of(self, kind, row=None):
        return [e for e in self.events if isinstance(e, kind) and (row is None or e.row == row)]

    def wait(self):
        assert self.is_over.wait(SECONDS), "the request did not finish"
        return self

    def ids(self, row=0):
        return [e.id for e in self.wait().of(NewToken, row)]

    def reason(self, row=0):
        [end] = self.wait().of(Finished, row)
        return end.reason


def submit(scheduler, request, rows=1, then=None):
    recorder = EventRecorder(rows, then)
    recorder.active = scheduler.submit(request, recorder)
    return recorder


def varied_requests(count, most=12):
    """Requests with different prompts and sampling parameters."""
    out = []
    for i in range(count):
        prompt = tuple((id * (i + 1) + i) % VOCAB for id in PROMPT[: 3 + 4 * i % 11]) * (1 + i % 3)
        settings = [{}, {"temperature": 1.2}, {"temperature": 0.9, "top_k": 9}, {"temperature": 1.5, "nucleus": 0.8}]
        out.append(Request(prompt, most - i % 5, seed=i, **settings[i % 4]))
    return out


def reference_ids(model, request, row=0):
    """The ids of one sequence, each token from a full forward over the text so far."""
    r = request
    sampler = Sampler(r.temperature, r.nucleus, r.seed, row, r.top_k)
    ids = naive_generate(model, r.prompt_ids, r.max_tokens, sampler)
    stop = next((at for at, token in enumerate(ids) if token in r.stop_ids), len(ids))
    return ids[:stop]
