"""The scheduler: an answer is the same alone and among others, and what is remembered changes nothing but time."""

import time

import pytest
import torch

from errors import Refused
from experts.route_observer import ForwardRoutes
from forward.kv_cache import make_kv_cache
from forward.step import step_all
from generate.batch import Batch
from generate.draft import Drafter, Proposers
from generate.draft_length import DraftLength
from generate.engine import Engine
from generate.kv_slots import KvSlot, choose_kv_slots
from generate.request import Finished, NewToken, Prefilled, Request, Started
from generate.sampler import Sampler, token_logprobs
from generate.score import ScoreRequest, score_requests
from generate.sequence import Prefill, Sequence
from load.model import load_model, open_snapshot
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
def test_the_same_text_alone_and_among_others(serve, expected, draft, slots):
    scheduler = serve(slots, DRAFT=draft)
    heard = {request: submit(scheduler, request) for request in expected}
    for request, ids in expected.items():
        assert heard[request].ids() == ids and heard[request].reason() == "length"
    again = [submit(scheduler, request) for request in reversed(expected)]
    assert [h.ids() for h in again] == list(reversed(expected.values()))
    numbers = scheduler.statistics()
    assert numbers["tokens"] == 2 * sum(map(len, expected.values())) and numbers["slots_free"] == slots
    assert (numbers["proposed"] > 0) == (draft != "0") and numbers["rows_length"] == 18


@pytest.mark.parametrize("more", [dict(cap=1), dict(PREFILL_CHUNK=4), dict(PREFILL_CHUNK=1, cap=1)], ids=str)
def test_the_same_text_with_little_memory(serve, expected, more):
    scheduler = serve(DRAFT="3", **more)
    heard = {request: submit(scheduler, request) for request in expected}
    assert {request: h.ids() for request, h in heard.items()} == expected


def test_who_comes_and_goes_changes_nothing(serve, expected):
    """Requests arrive at any token of others, and some of those are cancelled in between."""
    scheduler, requests, heard = serve(DRAFT="3"), list(expected), {}

    def arrive(event):
        if isinstance(event, NewToken):
            if len(heard) < len(requests):
                submit(requests[len(heard)])
            if requests.index(event.active.request) % 3 == 1 and len(heard[event.active.request].of(NewToken)) == 3:
                event.active.cancel()

    def submit(request):
        heard[request] = EventRecorder(then=arrive)
        scheduler.submit(request, heard[request])

    submit(requests[0])
    deadline = time.monotonic() + SECONDS
    while len(heard) < len(requests) and time.monotonic() < deadline:
        time.sleep(0.01)
    for at, request in enumerate(requests):
        is_cancelled = at % 3 == 1
        ids = heard[request].ids()
        assert ids == expected[request][:3] if is_cancelled else expected[request]
        assert heard[request].reason() == ("cancelled" if is_cancelled else "length")
    assert scheduler.statistics()["rows_cancelled"] == 3


def test_stop_ids_are_not_told(serve, expected):
    scheduler = serve(DRAFT="3")
    for request, ids in list(expected.items())[:4]:
        stop = ids[4]
        heard = submit(scheduler, Request(request.prompt_ids, 12, request.temperature, request.nucleus, request.top_k,
                                       request.seed, stop_ids=frozenset({stop, VOCAB - 1})))  # fmt: skip
        assert heard.ids() == ids[: ids.index(stop)] and heard.reason() == "stop"
        assert heard.active.stop_ids == {0: stop}


@pytest.mark.parametrize("most", [0, 1, 2])
def test_few_tokens_or_none(serve, expected, most):
    scheduler = serve(DRAFT="3")
    heard = submit(scheduler, Request(PROMPT, most))
    assert len(heard.ids()) == most and heard.reason() == "length"
    assert [type(e) for e in heard.events] == [Started, Prefilled, *[NewToken] * most, Finished]


@pytest.mark.parametrize("draft", ["0", "3"])
def test_samples_are_those_of_the_engine_for_rows(serve, draft):
    scheduler = serve(5, DRAFT=draft)
    rows, _ = Engine(scheduler.model, terminal_ids=()).generate_batch(PROMPT, 4, max_tokens=10, temperature=1.3, seed=7)
    request = Request(PROMPT, 10, 1.3, seed=7, num_samples=4)
    heard, other = submit(scheduler, request, 4), submit(scheduler, Request(PROMPT[:5], 9))
    for row in range(4):
        assert heard.ids(row) == rows[row][len(PROMPT) :]
    assert len(heard.of(Started)) == len(heard.of(Prefilled)) == 1 and len(other.ids()) == 9
    assert scheduler.statistics()["prompt_rows"] <= len(PROMPT) + 5  # read in once

    heard = submit(scheduler, request, 4, lambda e: e.active.cancel(1) if isinstance(e, NewToken) else None)
    assert [heard.ids(row) == rows[row][len(PROMPT) :] for row in range(4)] == [True, False, True, True]
    assert heard.reason(1) == "cancelled" and len(heard.ids(1)) <= 1


def test_a_row_that_is_cancelled_before_the_prompt_is_read_in(serve):
    scheduler = serve(3)
    rows, _ = Engine(scheduler.model, terminal_ids=()).generate_batch(PROMPT, 3, max_tokens=6, temperature=1.3, seed=7)
    first = lambda e: e.active.cancel(0) if isinstance(e, Started) else None  # noqa: E731
    heard = submit(scheduler, Request(PROMPT, 6, 1.3, seed=7, num_samples=3), 3, first)
    assert [heard.ids(row) for row in range(3)] == [[], *(ids[len(PROMPT) :] for ids in rows[1:])]
    assert heard.reason(0) == "cancelled" and scheduler.statistics()["slots_free"] == 3


# --- steps ------------------------------------------------------------------------------------------------------------


def test_a_short_prompt_does_not_wait_for_a_long_one(serve):
    """Nor do answers under way: each step gives a token of each, also that in which the short prompt is read in."""
    scheduler, forwards, rows = serve(3, DRAFT="0"), {}, []
    scheduler.chunked_prefill.shared_rows = 32
    counters, waited, read = scheduler.batch.counters, [], []
    long = Request(tuple(range(300)), 4)

    def count(event):
        if isinstance(event, NewToken):
            forwards.setdefault(event.active.request, []).append(counters.forwards)
            if event.active.request is short:
                rows.append(read[-1] - read[-2])
            if event.active.request is talking:
                read.append(counters.prompt_rows)
            if event.active.request is talking and len(forwards[talking]) == 2:
                scheduler.submit(long, heard)
            if event.active.request is talking and len(forwards[talking]) == 6:
                waited.append(counters.forwards)
                scheduler.submit(short, heard)

    talking, short = Request(PROMPT, 40), Request(PROMPT[3:9], 3)
    heard = EventRecorder(3, count)
    scheduler.submit(talking, heard)
    heard.wait()
    assert forwards[short][0] - waited[0] == 1 and forwards[long][0] - waited[0] > 5
    assert rows[:2] == [6, 32] and counters.prompt_rows == len(PROMPT) + 6 + 300  # then the long one goes on
    assert forwards[talking] == list(range(forwards[talking][0], forwards[talking][0] + 40))


def test_the_oldest_prompt_gets_on_whatever_shorter_ones_come(serve):
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


def test_an_expert_of_several_requests_is_asked_for_once(serve):
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


def test_the_head_follows_prompts_in_pieces(load):
    """Pieces of any size, beside answers whose guesses are verified, leave what a prefill at once leaves."""
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


def test_guesses_are_as_good_as_in_a_text_alone(serve):
    """The trained head beside prompts that are read in."""
    scheduler = serve(4, folder=EMBEDDED_SNAPSHOT, DRAFT="3", cap=0)
    text = TINY["full_ids"]
    heard = [submit(scheduler, Request(tuple(text[: 5 + i]), 40)) for i in range(8)]
    n = len(TINY["prompt_ids"])
    assert all(len(h.ids()) == 40 for h in heard)
    again = submit(scheduler, Request(tuple(TINY["prompt_ids"]), 40))
    assert again.ids() == text[n : n + 40]
    numbers = scheduler.statistics()
    assert numbers["accepted"] > 0.3 * numbers["proposed"] > 0
    assert numbers["tokens"] / numbers["answer_rows"] > 0.3


def test_only_what_was_said_is_learned_from(serve):
    scheduler = serve(4, folder=EMBEDDED_SNAPSHOT, DRAFT="3", cap=0)
    heard = [submit(scheduler, Request(tuple(TINY["full_ids"][i : i + 30]), 30, 1.0, seed=i)) for i in range(4)]
    assert all(len(h.ids()) == 30 for h in heard)
    assert scheduler.batch.drafter.routes is None
    last, numbers = scheduler.config.num_layers, scheduler.statistics()
    uses = sum(total for (layer, _), total in scheduler.model.experts.use_counts().items() if layer < last)
    # Of each text all but the last token went through, each with 4 experts a layer, less what was forgotten.
    tokens, layers = 4 * 59, len(scheduler.config.sparse_layers)
    assert 0.5 * tokens < uses / layers / 4 <= tokens < numbers["answer_rows"] + numbers["prompt_rows"]


# --- log-probabilities ------------------------------------------------------------------------------------------------


def test_logprobs_equal_those_of_score(serve):
    scheduler = serve(DRAFT="3", PREFILL_CHUNK=7)
    request = Request(PROMPT, 9, 1.2, seed=3, top_logprobs=3, prompt_logprobs=True)
    submit(scheduler, Request(PROMPT, 1)).wait()
    heard = submit(scheduler, request).wait()
    other = submit(scheduler, Request(PROMPT, 9, 1.2, seed=3))
    assert heard.ids() == other.ids() and all(e.logprob is e.top is None for e in other.of(NewToken))
    [prefilled], [started] = heard.of(Prefilled), heard.of(Started)
    assert started.cached_tokens == 0  # what is remembered has no log-probabilities
    entries = [*prefilled.prompt_logprobs, *((e.id, e.logprob, e.top) for e in heard.of(NewToken))]
    text = [*PROMPT, *heard.ids()]
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
    heard = submit(scheduler, Request(PROMPT, 0, prompt_logprobs=True)).wait()
    [prefilled] = heard.of(Prefilled)
    assert [top for _, _, top in prefilled.prompt_logprobs] == [None, *[[]] * (len(PROMPT) - 1)]
    one = submit(scheduler, Request((5,), 0, prompt_logprobs=True)).wait()
    assert one.of(Prefilled)[0].prompt_logprobs == [(5, None, None)]


def test_the_likeliest_of_equals_have_the_lowest_ids():
    logits = torch.tensor([[0.0, 2.0, -torch.inf, 2.0, 1.0, 2.0]])
    [(logprob, top)] = token_logprobs(logits, [4], 4)
    assert [token for token, _ in top] == [1, 3, 5, 4] and logprob == pytest.approx(top[-1][1])
    assert token_logprobs(logits, [2], 9)[0][0] == -torch.inf
    assert len(token_logprobs(logits, [1], 9)[0][1]) == 6 and token_logprobs(logits, [1], 0)[0][1] == []


# --- what is remembered -----------------------------------------------------------------------------------------------


def test_turns_of_two_conversations_by_turns(serve):
    """Each second turn reads in what is new alone, and the answers are those of a fresh start."""
    scheduler = serve(2, DRAFT="3")
    texts, answers = {"a": list(PROMPT), "b": [*PROMPT[:4], 9, 8, 7, 6, 5, 4]}, []
    for turn in range(3):
        for name, text in texts.items():
            request = Request(tuple(text), 6, conversation=name if turn else None)
            heard = submit(scheduler, request).wait()
            answers.append((request, heard.ids()))
            if turn:
                assert heard.of(Started)[0].cached_tokens == len(text) - 3
            text += [*heard.ids(), 3 + turn, 4]
    scheduler.close()
    for request, ids in answers:
        assert ids == reference_ids(scheduler.model, request)


def test_nothing_is_reused_past_the_first_token_that_differs(serve):
    scheduler = serve(1, DRAFT="3")
    first = submit(scheduler, Request(PROMPT, 8)).ids()
    text = [*PROMPT, *first]
    for at in (3, 6, len(PROMPT), len(PROMPT) + 4):
        other = (*text[:at], (text[at] + 1) % VOCAB, *text[at + 1 : at + 5])
        heard = submit(scheduler, Request(other, 8)).wait()
        assert heard.of(Started)[0].cached_tokens == at
        request = Request(tuple(text), 3)
        back = submit(scheduler, request).wait()
        assert back.of(Started)[0].cached_tokens == at
        assert heard.ids() == reference_ids(scheduler.model, Request(other, 8)) and back.ids() == reference_ids(
            scheduler.model, request
        )
    same = submit(scheduler, request).wait()
    assert same.of(Started)[0].cached_tokens == len(text) - 1  # one token must be read for the logits


def test_a_busy_slot_gives_its_beginning(serve):
    scheduler = serve(2, DRAFT="3")
    heard, then = EventRecorder(), EventRecorder()

    def join(event):
        if isinstance(event, NewToken) and len(heard.of(NewToken)) == 5:
            scheduler.submit(other, then)

    other = Request((*PROMPT, 77, 78), 8)
    heard.then = join
    scheduler.submit(Request(PROMPT, 20), heard)
    assert then.wait().of(Started)[0].cached_tokens == len(PROMPT)
    assert len(heard.ids()) == 20
    scheduler.close()
    assert then.ids() == reference_ids(scheduler.model, other) and heard.ids() == reference_ids(
        scheduler.model, Request(PROMPT, 20)
    )


def test_which_slots_are_taken(load):
    model = load(FIXTURES / NAME).model
    slots = [KvSlot(model, 30) for _ in range(3)]
    for used, (slot, ids) in enumerate(zip(slots, ([1, 2, 3, 4, 5, 6], [1, 2, 9], [7, 7, 7, 7]), strict=True), 1):
        slot.ids, slot.kv.length, slot.used = [*ids, 0], len(ids), used
    a, b, c = slots

    def chosen(*request, **more):
        choice = choose_kv_slots(slots, *request, **more)
        return choice and (choice.kv_slots, choice.source, choice.length)

    assert chosen([1, 2, 3, 4, 5, 6, 8], 1) == ([a], a, 6)
    assert chosen([7, 7, 7, 7], 1) == ([c], c, 3)  # one token is read for the logits
    assert chosen([7, 7, 8], 1) == ([a], c, 2)  # copied: the text there stays
    assert chosen([8, 8], 2) == ([a, b], None, 0)
    assert chosen([1, 2, 3, 4, 5, 6, 8], 3) == ([a, b, c], a, 6)
    assert chosen([1, 2, 3, 4, 5, 6, 8], 4) is None
    assert chosen([7, 7, 7, 7, 1], 1, may_reuse=False) == ([a], None, 0)
    a.active = "busy"
    assert chosen([1, 2, 3, 4, 5, 6, 8], 2) == ([b, c], a, 6) and chosen([8], 3) is None
    b.conversation = "b"
    assert chosen([1, 2, 9, 5], 1) == ([c], b, 3)  # a copy, the conversation stays
    assert chosen([1, 2, 9, 5], 1, "b") == ([b], b, 3) and chosen([5, 5], 1, "b") == ([b], None, 0)
    assert chosen([5, 5], 1, "new") == ([c], None, 0)
    b.active = "busy"
    assert chosen([5, 5], 1, "b") is None  # never twice at once


def test_one_conversation_is_never_answered_twice_at_once(serve):
    """The second waits for the first; others do not wait for it."""
    scheduler, order = serve(3, DRAFT="0"), []
    note = lambda event: order.append(event.active.id) if isinstance(event, Started | Finished) else None  # noqa: E731
    listeners = [EventRecorder(1, note) for _ in range(3)]
    block = EventRecorder(1, lambda e: time.sleep(0.2) if isinstance(e, Started) else None)
    scheduler.submit(Request(PROMPT[:2], 1), block)
    scheduler.submit(Request(PROMPT, 12, conversation="x"), listeners[0])
    scheduler.submit(Request((*PROMPT, 1), 3, conversation="x"), listeners[1])
    scheduler.submit(Request(PROMPT[:4], 3), listeners[2])
    for heard in listeners:
        heard.wait()
    assert order.index(4) < order.index(3) and [i for i in order if i != 4] == [2, 2, 3, 3]


# --- memory -----------------------------------------------------------------------------------------------------------


def test_every_slot_is_planned_for(load):
    settings = Settings.read([], {"SNAP": str(FIXTURES / NAME), "CTX": "64", "USAGE": "0"})
    plans = []
    for slots in (1, 6):
        opened = open_snapshot(settings, slots)
        plans.append(opened.plan)
        opened.close()
    assert plans[1].kv_bytes == 6 * plans[0].kv_bytes and plans[1].kv_slots == 6
    assert "in each of 6 KV slots" in plans[1].lines()[1] and "KV slots" not in plans[0].lines()[1]
    small = Settings.read([], {"SNAP": str(FIXTURES / NAME), "RAM_GB": "0.01", "USAGE": "0"})
    with pytest.raises(Refused, match=r"CTX=2048 in each of 6 KV slots, have .* lower CTX or KV_SLOTS"):
        open_snapshot(small, 6)


def test_taking_over_positions(load):
    model = load(FIXTURES / NAME, DRAFT="auto").model
    kv, other = make_kv_cache(model.config, 30), make_kv_cache(model.config, 20)
    step_all(model, [(list(PROMPT), kv)])
    other.copy_prefix(kv, 7)
    assert other.length == 7 and torch.equal(other.latents[:-1, :7], kv.latents[:-1, :7])
    both = [step_all(model, [(list(PROMPT[7:]), state)]) for state in (other, kv.clone(60)) if not state.trim(7)]
    assert torch.equal(*both)
    for length in (13, -1):
        with pytest.raises(ValueError, match="cannot copy"):
            other.copy_prefix(kv, length)
