"""KV slots: a cached prefix is not prefilled again, and the tokens are the same."""

import time

import pytest
import torch

from errors import Refused
from forward.kv_cache import make_kv_cache
from forward.step import step_all
from generate.kv_slots import KvSlot, choose_kv_slots
from generate.request import Finished, NewToken, Request, Started
from load.model import open_snapshot
from settings import Settings
from tests.conftest import FIXTURES
from tests.support.serving import NAME, PROMPT, VOCAB, EventRecorder, reference_ids, submit


def test_interleaved_turns_of_two_conversations(serve):
    """Each second turn prefills only its new tokens, and the answers are those of an empty KV cache."""
    scheduler = serve(2, DRAFT="3")
    texts, answers = {"a": list(PROMPT), "b": [*PROMPT[:4], 9, 8, 7, 6, 5, 4]}, []
    for turn in range(3):
        for name, text in texts.items():
            request = Request(tuple(text), 6, conversation=name if turn else None)
            recorder = submit(scheduler, request).wait()
            answers.append((request, recorder.ids()))
            if turn:
                assert recorder.of(Started)[0].cached_tokens == len(text) - 3
            text += [*recorder.ids(), 3 + turn, 4]
    scheduler.close()
    for request, ids in answers:
        assert ids == reference_ids(scheduler.model, request)


def test_nothing_is_reused_past_the_first_token_that_differs(serve):
    scheduler = serve(1, DRAFT="3")
    first = submit(scheduler, Request(PROMPT, 8)).ids()
    text = [*PROMPT, *first]
    for at in (3, 6, len(PROMPT), len(PROMPT) + 4):
        other = (*text[:at], (text[at] + 1) % VOCAB, *text[at + 1 : at + 5])
        recorder = submit(scheduler, Request(other, 8)).wait()
        assert recorder.of(Started)[0].cached_tokens == at
        request = Request(tuple(text), 3)
        back = submit(scheduler, request).wait()
        assert back.of(Started)[0].cached_tokens == at
        assert recorder.ids() == reference_ids(scheduler.model, Request(other, 8)) and back.ids() == reference_ids(
            scheduler.model, request
        )
    same = submit(scheduler, request).wait()
    assert same.of(Started)[0].cached_tokens == len(text) - 1  # one token must be prefilled for the logits


def test_a_busy_kv_slot_shares_its_prefix(serve):
    scheduler = serve(2, DRAFT="3")
    recorder, then = EventRecorder(), EventRecorder()

    def join(event):
        if isinstance(event, NewToken) and len(recorder.of(NewToken)) == 5:
            scheduler.submit(other, then)

    other = Request((*PROMPT, 77, 78), 8)
    recorder.then = join
    scheduler.submit(Request(PROMPT, 20), recorder)
    assert then.wait().of(Started)[0].cached_tokens == len(PROMPT)
    assert len(recorder.ids()) == 20
    scheduler.close()
    assert then.ids() == reference_ids(scheduler.model, other) and recorder.ids() == reference_ids(
        scheduler.model, Request(PROMPT, 20)
    )


def test_choice_of_kv_slots(load):
    model = load(FIXTURES / NAME).model
    slots = [KvSlot(model, 30) for _ in range(3)]
    for used, (slot, ids) in enumerate(zip(slots, ([1, 2, 3, 4, 5, 6], [1, 2, 9], [7, 7, 7, 7]), strict=True), 1):
        slot.ids, slot.kv.length, slot.used = [*ids, 0], len(ids), used
    a, b, c = slots

    def chosen(*request, **more):
        return choose_kv_slots(slots, *request, **more)

    assert chosen([1, 2, 3, 4, 5, 6, 8], 1) == ([a], a, 6)
    assert chosen([7, 7, 7, 7], 1) == ([c], c, 3)  # one token is prefilled for the logits
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
    record = lambda event: order.append(event.active.id) if isinstance(event, Started | Finished) else None  # noqa: E731
    listeners = [EventRecorder(1, record) for _ in range(3)]
    block = EventRecorder(1, lambda e: time.sleep(0.2) if isinstance(e, Started) else None)
    scheduler.submit(Request(PROMPT[:2], 1), block)
    scheduler.submit(Request(PROMPT, 12, conversation="x"), listeners[0])
    scheduler.submit(Request((*PROMPT, 1), 3, conversation="x"), listeners[1])
    scheduler.submit(Request(PROMPT[:4], 3), listeners[2])
    for recorder in listeners:
        recorder.wait()
    assert order.index(4) < order.index(3) and [i for i in order if i != 4] == [2, 2, 3, 3]


def test_every_kv_slot_is_planned_for(load):
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


def test_copying_a_prefix(load):
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
