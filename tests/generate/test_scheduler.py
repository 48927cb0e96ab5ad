"""The scheduler: a text is the same alone and in any batch; steps, chunked prefill, log-probabilities."""

import time
from dataclasses import replace

import pytest
import torch

from experts.route_observer import ForwardRoutes
from forward.kv_cache import make_kv_cache
from forward.step import step_all
from generate.batch import Batch
from generate.draft import Drafter
from generate.draft_length import DraftLength
from generate.engine import Engine
from generate.proposers import Proposers
from generate.request import Finished, NewToken, Prefilled, Request, Started
from generate.sampler import Sampler, token_logprobs
from generate.score import ScoreRequest, score_requests
from generate.sequence import Prefill, Sequence
from load.model import load_model
from settings import EMBEDDED_SNAPSHOT, Settings
from tests.conftest import FIXTURES, read_json
from tests.support.serving import NAME, PROMPT, SECONDS, VOCAB, EventRecorder, reference_ids, submit, varied_requests

TINY = read_json(EMBEDDED_SNAPSHOT / "ref_glm.json")


@pytest.fixture(scope="module")
def expected():
    """{request: its ids}, made once."""
    loaded = load_model(Settings.read([], {"SNAP": str(FIXTURES / NAME), "USAGE": "0", "DRAFT": "0"}))
    yield {request: reference_ids(loaded.model, request) for request in varied_requests(9)}
    loaded.close()


# --- the same text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("draft", "slots"), [("0", 4), ("1", 4), ("3", 4), ("auto", 4), ("3", 1)])
def test_the_same_text_alone_and_in_a_batch(serve, expected, draft, slots):
    scheduler = serve(slots, DRAFT=draft)
    recorder = {request: submit(scheduler, request) for request in expected}
    for request, ids in expected.items():
        assert recorder[request].ids() == ids and recorder[request].reason() == "length"
    again = [submit(scheduler, request) for request in reversed(expected)]
    assert [h.ids() for h in again] == list(reversed(expected.values()))
    numbers = scheduler.statistics()
    assert numbers["tokens"] == 2 * sum(map(len, expected.values())) and numbers["slots_free"] == slots
    assert (numbers["proposed"] > 0) == (draft != "0") and numbers["rows_length"] == 18


@pytest.mark.parametrize("more", [dict(cap=1), dict(PREFILL_CHUNK=4), dict(PREFILL_CHUNK=1, cap=1)], ids=str)
def test_the_same_text_with_little_memory(serve, expected, more):
    scheduler = serve(DRAFT="3", **more)
    recorder = {request: submit(scheduler, request) for request in expected}
    assert {request: h.ids() for request, h in recorder.items()} == expected


def test_requests_that_come_and_go_change_nothing(serve, expected):
    """Requests arrive at any token of others, and some of those are cancelled in between."""
    scheduler, requests, recorder = serve(DRAFT="3"), list(expected), {}

    def arrive(event):
        if isinstance(event, NewToken):
            if len(recorder) < len(requests):
                submit(requests[len(recorder)])
            if requests.index(event.active.request) % 3 == 1 and len(recorder[event.active.request].of(NewToken)) == 3:
                event.active.cancel()

    def submit(request):
        recorder[request] = EventRecorder(then=arrive)
        scheduler.submit(request, recorder[request])

    submit(requests[0])
    deadline = time.monotonic() + SECONDS
    while len(recorder) < len(requests) and time.monotonic() < deadline:
        time.sleep(0.01)
    for at, request in enumerate(requests):
        is_cancelled = at % 3 == 1
        ids = recorder[request].ids()
        assert ids == expected[request][:3] if is_cancelled else expected[request]
        assert recorder[request].reason() == ("cancelled" if is_cancelled else "length")
    assert scheduler.statistics()["rows_cancelled"] == 3


def test_stop_ids_are_not_emitted(serve, expected):
    scheduler = serve(DRAFT="3")
    for request, ids in list(expected.items())[:4]:
        stop = ids[4]
        recorder = submit(scheduler, replace(request, max_tokens=12, stop_ids=frozenset({stop, VOCAB - 1})))
        assert recorder.ids() == ids[: ids.index(stop)] and recorder.reason() == "stop"
        assert recorder.active.stop_ids == {0: stop}


@pytest.mark.parametrize("most", [0, 1, 2])
def test_few_tokens_or_none(serve, expected, most):
    scheduler = serve(DRAFT="3")
    recorder = submit(scheduler, Request(PROMPT, most))
    assert len(recorder.ids()) == most and recorder.reason() == "length"
    assert [type(e) for e in recorder.events] == [Started, Prefilled, *[NewToken] * most, Finished]


@pytest.mark.parametrize("draft", ["0", "3"])
def test_samples_equal_those_of_engine(serve, draft):
    scheduler = serve(5, DRAFT=draft)
    rows, _ = Engine(scheduler.model, terminal_ids=()).generate_batch(PROMPT, 4, max_tokens=10, temperature=1.3, seed=7)
    request = Request(PROMPT, 10, 1.3, seed=7, num_samples=4)
    recorder, other = submit(scheduler, request, 4), submit(scheduler, Request(PROMPT[:5], 9))
    for row in range(4):
        assert recorder.ids(row) == rows[row][len(PROMPT) :]
    assert len(recorder.of(Started)) == len(recorder.of(Prefilled)) == 1 and len(other.ids()) == 9
    assert scheduler.statistics()["prompt_rows"] <= len(PROMPT) + 5  # prefilled once

    recorder = submit(scheduler, request, 4, lambda e: e.active.cancel(1) if isinstance(e, NewToken) else None)
    assert [recorder.ids(row) == rows[row][len(PROMPT) :] for row in range(4)] == [True, False, True, True]
    assert recorder.reason(1) == "cancelled" and len(recorder.ids(1)) <= 1


def test_a_sequence_cancelled_during_the_prefill(serve):
    scheduler = serve(3)
    rows, _ = Engine(scheduler.model, terminal_ids=()).generate_batch(PROMPT, 3, max_tokens=6, temperature=1.3, seed=7)
    first = lambda e: e.active.cancel(0) if isinstance(e, Started) else None  # noqa: E731
    recorder = submit(scheduler, Request(PROMPT, 6, 1.3, seed=7, num_samples=3), 3, first)
    assert [recorder.ids(row) for row in range(3)] == [[], *(ids[len(PROMPT) :] for ids in rows[1:])]
    assert recorder.reason(0) == "cancelled" and scheduler.statistics()["slots_free"] == 3


# --- steps ------------------------------------------------------------------------------------------------------------


def test_a_short_prompt_does_not_wait_for_a_long_one(serve):
    """Nor do sequences that decode: each step gives a token of each, also the one that prefills the short prompt."""
    scheduler, forwards, rows = serve(3, DRAFT="0"), {}, []
    scheduler.chunked_prefill.shared_rows = 32
    counters, waited, read = scheduler.batch.counters, [], []
    long = Request(tuple(range(300)), 4)

    def count(event):
        if isinstance(event, NewToken):
            forwards.setdefault(event.active.request, []).append(counters.forwards)
            if event.active.request is short:
                rows.append(read[-1] - read[-2])
            if event.active.request is decoding:
                read.append(counters.prompt_rows)
            if event.active.request is decoding and len(forwards[decoding]) == 2:
                scheduler.submit(long, recorder)
            if event.active.request is decoding and len(forwards[decoding]) == 6:
                waited.append(counters.forwards)
                scheduler.submit(short, recorder)

    decoding, short = Request(PROMPT, 40), Request(PROMPT[3:9], 3)
    recorder = EventRecorder(3, count)
    scheduler.submit(decoding, recorder)
    recorder.wait()
    assert forwards[short][0] - waited[0] == 1 and forwards[long][0] - waited[0] > 5
    assert rows[:2] == [6, 32] and counters.prompt_rows == len(PROMPT) + 6 + 300  # then the long one continues
    assert forwards[decoding] == list(range(forwards[decoding][0], forwards[decoding][0] + 40))


def test_the_oldest_prompt_makes_progress_whatever_shorter_ones_come(serve):
    scheduler = serve(4, DRAFT="0", PREFILL_CHUNK=8)
    seen = []

    def more(event):
        if isinstance(event, Prefilled):
            seen.append(event.active.request)
            if event.active.request is not long and long not in seen and len(seen) < 100:
                for i in range(2):
                    scheduler.submit(Request(PROMPT[i : i + 6], 1), then)

    then, long = EventRecorder(10**6, more), Request(tuple(range(60)), 1)
    for request in (long, Request(PROMPT[:6], 1), Request(PROMPT[1:7], 1)):
        scheduler.submit(request, then)
    deadline = time.monotonic() + SECONDS
    while long not in seen and time.monotonic() < deadline:
        time.sleep(0.01)
    assert long in seen and 5 < len(seen) < 100


def test_an_expert_of_several_requests_is_requested_once(serve):
    scheduler = serve(6, folder=EMBEDDED_SNAPSHOT, DRAFT="0", cap=4)
    asked, plain = [], scheduler.model.experts.request

    def request(layer, uses, rows):
        asked.append((layer, rows))
        return plain(layer, uses, rows)

    scheduler.model.experts.request = request
    block = EventRecorder(1, lambda e: time.sleep(0.3) if isinstance(e, Started) else None)
    scheduler.submit(Request(tuple(TINY["prompt_ids"]), 8), block)
    others = [submit(scheduler, Request(tuple(TINY["full_ids"][i : i + 5]), 8)) for i in range(5)]
    assert all(len(h.ids()) == 8 for h in [block, *others])
    layers = list(scheduler.config.sparse_layers)
    forwards = scheduler.statistics()["forwards"]
    assert [layer for layer, _ in asked] == layers * forwards and forwards <= 10
    assert max(rows for _, rows in asked) >= 25  # the prompts together


def test_the_mtp_layer_follows_chunked_prefills(load):
    """Chunks of any size, beside sequences whose drafts are verified, leave the KV cache of a prefill at once."""
    model = load(EMBEDDED_SNAPSHOT, DRAFT="auto").model
    text, states = TINY["full_ids"], []
    for pieces in [[60], [10, 30, 3, 17], [3, 5, 20, 32], [1] * 20 + [40]]:
        kv = make_kv_cache(model.config, 80)
        batch, proposers = Batch(model, Drafter(model, DraftLength("3"))), Proposers(model, kv)
        prompt = Prefill(text[:61], kv, proposers)
        for count in pieces:
            batch.drafter.routes = ForwardRoutes() if count % 2 else None
            [logits] = batch.forward([], None, [(prompt, count)])
            assert len(logits) == 0
            batch.drafter.abandon()
        batch.drafter.propose([Sequence(text[:61], kv, Sampler(), 4, proposers=proposers)])
        states.append(kv)
    for kv in states:
        assert (kv.mtp_base, kv.mtp_length) == (0, 60)
        assert torch.equal(kv.latents[:, :60], states[0].latents[:, :60])


def test_acceptance_beside_prefills_is_as_good_as_alone(serve):
    """The trained MTP layer beside prefills."""
    scheduler = serve(4, folder=EMBEDDED_SNAPSHOT, DRAFT="3", cap=0)
    text = TINY["full_ids"]
    recorder = [submit(scheduler, Request(tuple(text[: 5 + i]), 40)) for i in range(8)]
    n = len(TINY["prompt_ids"])
    assert all(len(h.ids()) == 40 for h in recorder)
    again = submit(scheduler, Request(tuple(TINY["prompt_ids"]), 40))
    assert again.ids() == text[n : n + 40]
    numbers = scheduler.statistics()
    assert numbers["accepted"] > 0.3 * numbers["proposed"] > 0
    assert numbers["tokens"] / numbers["answer_rows"] > 0.3


def test_only_emitted_tokens_count_as_expert_uses(serve):
    scheduler = serve(4, folder=EMBEDDED_SNAPSHOT, DRAFT="3", cap=0)
    recorder = [submit(scheduler, Request(tuple(TINY["full_ids"][i : i + 30]), 30, 1.0, seed=i)) for i in range(4)]
    assert all(len(h.ids()) == 30 for h in recorder)
    assert scheduler.batch.drafter.routes is None
    last, numbers = scheduler.config.num_layers, scheduler.statistics()
    uses = sum(total for (layer, _), total in scheduler.model.experts.use_counts().items() if layer < last)
    # Of each text all but the last token went through, each with 4 experts a layer, less what decayed.
    tokens, layers = 4 * 59, len(scheduler.config.sparse_layers)
    assert 0.5 * tokens < uses / layers / 4 <= tokens < numbers["answer_rows"] + numbers["prompt_rows"]


# --- log-probabilities ------------------------------------------------------------------------------------------------


def test_logprobs_equal_those_of_score(serve):
    scheduler = serve(DRAFT="3", PREFILL_CHUNK=7)
    request = Request(PROMPT, 9, 1.2, seed=3, top_logprobs=3, prompt_logprobs=True)
    submit(scheduler, Request(PROMPT, 1)).wait()
    recorder = submit(scheduler, request).wait()
    other = submit(scheduler, Request(PROMPT, 9, 1.2, seed=3))
    assert recorder.ids() == other.ids() and all(e.logprob is e.top is None for e in other.of(NewToken))
    [prefilled], [started] = recorder.of(Prefilled), recorder.of(Started)
    assert started.cached_tokens == 0  # cached positions have no log-probabilities
    entries = [*prefilled.prompt_logprobs, *((e.id, e.logprob, e.top) for e in recorder.of(NewToken))]
    text = [*PROMPT, *recorder.ids()]
    assert [id for id, _, _ in entries] == text and entries[0][1:] == (None, None)
    scheduler.close()

    requests = [ScoreRequest(tuple(text[:i]), (text[i],)) for i in range(1, len(text))]
    scores = dict(score_requests(scheduler.model, requests, 2048))
    logits = step_all(scheduler.model, [(text, make_kv_cache(scheduler.config, 40))])
    for i, (id, logprob, top) in enumerate(entries[1:]):
        assert logprob == pytest.approx(scores[i].logprob, abs=1e-5)
        best = sorted(range(VOCAB), key=lambda t: (-float(logits[i][t]), t))[:3]
        assert [token for token, _ in top] == best
        of_best = logits[i].double().log_softmax(0)[best]
        assert [p for _, p in top] == pytest.approx(of_best.tolist(), abs=1e-5)
        assert scores[i].greedy == (best[0] == id)


def test_prompt_logprobs_alone(serve):
    scheduler = serve()
    recorder = submit(scheduler, Request(PROMPT, 0, prompt_logprobs=True)).wait()
    [prefilled] = recorder.of(Prefilled)
    assert [top for _, _, top in prefilled.prompt_logprobs] == [None, *[[]] * (len(PROMPT) - 1)]
    one = submit(scheduler, Request((5,), 0, prompt_logprobs=True)).wait()
    assert one.of(Prefilled)[0].prompt_logprobs == [(5, None, None)]


def test_top_logprobs_ties_go_to_the_lowest_ids():
    logits = torch.tensor([[0.0, 2.0, -torch.inf, 2.0, 1.0, 2.0]])
    [(logprob, top)] = token_logprobs(logits, [4], 4)
    assert [token for token, _ in top] == [1, 3, 5, 4] and logprob == pytest.approx(top[-1][1])
    assert token_logprobs(logits, [2], 9)[0][0] == -torch.inf
    assert len(token_logprobs(logits, [1], 9)[0][1]) == 6 and token_logprobs(logits, [1], 0)[0][1] == []
