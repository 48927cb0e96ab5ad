"""Helpers of SERVE=stdio tests: a scheduler that plays scripts, requests as bytes, parsed replies."""

import io
import re
import threading
from types import SimpleNamespace

from experts.cache import CacheCounters
from generate.request import Finished, NewToken, Prefilled, Started
from server.stdio.pipe_server import run_pipe_server
from settings import EMBEDDED_SNAPSHOT, Settings
from snapshot.config_file import read_config
from text.prompt import PromptPrefix
from text.tokenizer import TextTokenizer

CONFIG = read_config(EMBEDDED_SNAPSHOT)[0]
TOKENIZER = TextTokenizer(EMBEDDED_SNAPSHOT, CONFIG)
PREFIX = tuple(PromptPrefix(CONFIG, TOKENIZER, enabled=True).ids)
STAT = re.compile(rb"STAT (\d+) \d+\.\d\d \d+\.\d \d+\.\d\d(?: (\d+) ([01]))?\n")
START = re.compile(rb"\x01\x01READY\x01\x01\nSTAT 0 0\.00 0\.0 \d+\.\d\d\n")
ERROR, END = b"\x01\x01ERROR\x01\x01 ", b"\x01\x01END\x01\x01\n"


class FakeActiveRequest:
    def __init__(self, request):
        self.id, self.request, self.stop_ids, self.cancelled = 1, request, {}, threading.Event()

    def cancel(self, row=None):
        self.cancelled.set()


class FakeScheduler:
    """Emits scripted answers: for each request a text or ids, which end in a stop token where max_tokens allows, or an
    exception. `ending` replaces the finish reason."""

    def __init__(self, *answers, context=64, num_slots=2, ending=None):
        self.answers, self.context, self.num_slots, self.ending = list(answers), context, num_slots, ending
        self.requests, self.submitted = [], []

    def statistics(self):
        return {"slots": self.num_slots}

    def submit(self, request, listener):
        self.requests.append(request)
        answer = self.answers.pop(0) if self.answers else "yes"
        if isinstance(answer, Exception):
            raise answer
        active = FakeActiveRequest(request)
        self.submitted.append(active)
        ids = TOKENIZER.encode(answer) if isinstance(answer, str) else answer
        listener(Started(active, 0))
        listener(Prefilled(active, None))
        for token in ids[: request.max_tokens]:
            listener(NewToken(active, 0, token, None, None))
        if self.ending == "never":
            return active
        reason, error = self.ending or ("stop" if len(ids) < request.max_tokens else "length", None)
        listener(Finished(active, 0, reason, error))
        return active


def fake_loaded(**counters):
    experts = SimpleNamespace(counters=CacheCounters(**counters))
    return SimpleNamespace(folder=EMBEDDED_SNAPSHOT, config=CONFIG, model=SimpleNamespace(experts=experts))


def serve(stdin, scheduler, stdout, loaded=None, **variables):
    stdin = stdin if isinstance(stdin, io.BufferedReader) else io.BufferedReader(io.BytesIO(stdin))
    options = Settings.read([], {name: str(value) for name, value in variables.items()})
    assert run_pipe_server(loaded or fake_loaded(), scheduler, stdin, stdout, options) == 0


def exchange(stdin, scheduler, loaded=None, **variables):
    """Return the bytes that stdin gives on stdout, after READY and its STAT."""
    out = io.BytesIO()
    serve(stdin, scheduler, out, loaded, **{"NGEN": 8, "SEED": 5, "TEMP": 0} | variables)
    start = START.match(out.getvalue())
    assert start, out.getvalue()
    return out.getvalue()[start.end() :]


def parse_replies(out):
    """Parse stdout into [(text, error or None, (tokens, prompt tokens or None, cut or None)), ...]."""
    found = []
    while out:
        body, end, rest = out.partition(END)
        stat = STAT.match(rest)
        assert end and stat, out
        text, mark, error = body.partition(ERROR)
        assert not mark or (error.endswith(b"\n") and error.count(b"\n") == 1)
        numbers = tuple(None if group is None else int(group) for group in stat.groups())
        found.append((text, error[:-1].decode() if mark else None, numbers))
        out = rest[stat.end() :]
    return found


def frame(text, max_tokens=8, temperature="0", top_p="1", slot=""):
    payload = text.encode()
    return (
        f"\x02PROMPT {len(payload)} {max_tokens} {temperature} {top_p} {slot}".rstrip().encode()
        + b"\n"
        + payload
        + b"\n"
    )
