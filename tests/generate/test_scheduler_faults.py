"""The scheduler: queueing, cancellation and failures do not affect other requests."""

import threading
import time

import pytest
import safetensors.torch

from errors import Refused
from generate.request import Finished, NewToken, Prefilled, QueueFull, Request, Started
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


# --- the queue --------------------------------------------------------------------------------------------------------


def test_a_full_queue_gives_retry_after(serve):
    scheduler, begun, go_on = serve(2, 2), threading.Event(), threading.Event()

    def hold(event):
        if isinstance(event, Started):
            begun.set()
            go_on.wait(SECONDS)

    first = EventRecorder(2, hold)
    scheduler.submit(Request(PROMPT, 3, num_samples=2), first)
    assert begun.wait(SECONDS)
    waiting = [submit(scheduler, Request(PROMPT[:5], 3)) for _ in range(2)]
    with pytest.raises(QueueFull, match="the queue is full: 2 requests are waiting") as full:
        submit(scheduler, Request(PROMPT, 3))
    assert full.value.retry_after >= 1
    assert scheduler.statistics()["queue"] == 2 and scheduler.statistics()["slots_busy"] == 2
    go_on.set()
    assert [len(h.ids()) for h in waiting] == [3, 3]
    assert [h.ids() for h in [submit(scheduler, Request(PROMPT[:5], 3))]] == [waiting[0].ids()]


def test_without_a_queue_as_many_run_as_there_are_kv_slots(serve):
    scheduler = serve(2, 0)
    block = EventRecorder(1, lambda e: time.sleep(0.3) if isinstance(e, Started) else None)
    scheduler.submit(Request(PROMPT, 2), block)
    second = submit(scheduler, Request(PROMPT, 2))
    with pytest.raises(QueueFull):
        submit(scheduler, Request(PROMPT, 2))
    assert len(second.ids()) == 2


def test_first_in_first_out(serve):
    scheduler, order = serve(2), []
    record = lambda event: order.append(event.active.id) if isinstance(event, Started) else None  # noqa: E731
    rows = [1, 1, 2, 1, 2, 1]
    recorder = [submit(scheduler, Request(PROMPT, 4, num_samples=n), n, record) for n in rows]
    for h in recorder:
        h.wait()
    assert order == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request((), 3), "at least one token id"),
        (Request((1, VOCAB), 3), "from 0 to 511"),
        (Request((1, -1), 3), "from 0 to 511"),
        (Request((1, True), 3), "at least one token id"),
        (Request(PROMPT, -1), "max_tokens=-1"),
        (Request(PROMPT, 1, temperature=float("nan")), "temperature=nan"),
        (Request(PROMPT, 1, top_logprobs=-2), "top_logprobs=-2"),
        (Request(PROMPT, 1, seed=1.5), "expected whole numbers"),
        (Request(PROMPT, "3"), "expected whole numbers"),
        (Request(PROMPT, 1, num_samples=5), "num_samples=5: expected 1 to 4"),
        (Request(PROMPT, 1, num_samples=0), "num_samples=0"),
        (Request((1,) * 60, 6), "60 prompt tokens and 6 more do not fit 64 positions"),
        (Request((1,) * 65, 1), "65 prompt tokens and 1 more do not fit 64"),
        (Request((1,) * 65, 0), "65 prompt tokens and 0 more do not fit 64"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_request_that_can_never_run_is_refused_at_once(serve, request_, words):
    scheduler = serve(CTX=64)
    with pytest.raises(ValueError, match=words):
        scheduler.submit(request_, EventRecorder())


@pytest.mark.parametrize(("length", "most"), [(64, 1), (60, 5), (64, 0), (1, 64)])
def test_the_largest_that_fits(serve, length, most):
    scheduler = serve(CTX=64, DRAFT="3")
    recorder = submit(scheduler, Request((3,) * length, most))
    assert len(recorder.ids()) == most and recorder.reason() == "length"


# --- cancel -----------------------------------------------------------------------------------------------------------


def test_cancel_during_a_prefill_stops_within_a_layer(serve, monkeypatch):
    """The KV slot can be used at once, sequences beside it continue, and the next answer is that of an empty cache."""
    scheduler, recorder = serve(2, DRAFT="3", PREFILL_CHUNK=100), EventRecorder()
    layers, plain = [], scheduler.batch.run_layers

    def cancel(layer, num_layers, rows):
        layers.append((layer, rows))
        if recorder.of(Started) and layers.count((2, rows)) == 2 and rows > 20:
            recorder.of(Started)[0].active.cancel()

    def run_layers(scheduled, progress, should_stop):
        return plain(scheduled, cancel, should_stop)

    monkeypatch.setattr(scheduler.batch, "run_layers", run_layers)
    other = submit(scheduler, Request(PROMPT, 20, 1.0))
    long = Request(tuple(range(300)), 4)
    scheduler.submit(long, recorder)
    assert recorder.reason() == "cancelled" and not recorder.of(NewToken) and not recorder.of(Prefilled)
    big = [layer for layer, rows in layers if rows > 20]
    assert big[-1] == 2 and big.count(1) == big.count(2) == big.count(3) + 1  # not a layer more
    monkeypatch.setattr(scheduler.batch, "run_layers", plain)
    again = submit(scheduler, long)
    scheduler_ids, other_ids = again.ids(), other.ids()
    assert again.of(Started)[0].cached_tokens > 0  # the chunks before stay cached
    numbers = scheduler.statistics()
    assert numbers["rows_cancelled"] == 1 and numbers["rows_length"] == 2 and numbers["failed_forwards"] >= 1
    scheduler.close()
    assert scheduler_ids == reference_ids(scheduler.model, long)
    assert other_ids == reference_ids(scheduler.model, Request(PROMPT, 20, 1.0))
    scheduler.model.experts.check()


def test_cancel_in_the_queue_and_between_tokens(serve):
    scheduler = serve(1, DRAFT="3")
    first = EventRecorder(
        1, lambda e: e.active.cancel() if isinstance(e, NewToken) and len(first.of(NewToken)) == 3 else None
    )
    scheduler.submit(Request(PROMPT, 500), first)
    waiting = submit(scheduler, Request(PROMPT, 5))
    waiting.active.cancel()
    assert waiting.reason() == "cancelled" and [type(e) for e in waiting.events] == [Finished]
    assert len(first.ids()) == 3 and first.reason() == "cancelled"
    next_one = Request((*PROMPT, *first.ids(), 5), 6)
    recorder = submit(scheduler, next_one).wait()
    assert recorder.of(Started)[0].cached_tokens >= len(PROMPT) + 2
    assert recorder.ids() == reference_ids(scheduler.model, next_one)
    recorder.active.cancel()  # too late, and no harm
    assert scheduler.statistics()["rows_length"] == 1


def test_cancel_from_another_thread(serve):
    scheduler = serve(2, DRAFT="0")
    recorder = submit(scheduler, Request(PROMPT, 1500))
    deadline = time.monotonic() + SECONDS
    while len(recorder.of(NewToken)) < 5 and time.monotonic() < deadline:
        time.sleep(0.005)
    recorder.active.cancel()
    assert recorder.reason() == "cancelled" and 5 <= len(recorder.ids()) < 1500


def test_a_listener_that_raises_ends_its_request_alone(serve, expected):
    scheduler = serve(DRAFT="3")
    request = next(iter(expected))

    def broken(event):
        if isinstance(event, NewToken):
            raise OSError("gone")

    bad, good = submit(scheduler, Request(PROMPT, 100), then=broken), submit(scheduler, request)
    assert good.ids() == expected[request]
    assert bad.reason() == "cancelled" and len(bad.ids()) == 1
    assert bad.of(Finished)[0].error == "OSError: gone"


def test_close_ends_everything_at_once(serve):
    scheduler = serve(2, PREFILL_CHUNK=100)
    recorder = [submit(scheduler, Request(PROMPT, 1500)) for _ in range(4)]
    recorder.append(submit(scheduler, Request(tuple(range(500)), 1500, num_samples=2), 2))
    deadline = time.monotonic() + SECONDS
    while not recorder[0].of(NewToken) and time.monotonic() < deadline:
        time.sleep(0.005)
    scheduler.close()
    assert not scheduler.thread.is_alive()
    assert [h.reason() for h in recorder[:4]] == ["cancelled"] * 4 and recorder[4].reason(1) == "cancelled"
    scheduler.close()
    with pytest.raises(RuntimeError, match="closed"):
        submit(scheduler, Request(PROMPT, 1))


def test_a_listener_may_close(serve):
    scheduler = serve(1)
    recorder = submit(
        scheduler, Request(PROMPT, 1500), then=lambda e: scheduler.close() if isinstance(e, NewToken) else None
    )
    assert recorder.reason() == "cancelled"
    scheduler.thread.join(SECONDS)
    assert not scheduler.thread.is_alive()


def test_idle_costs_nothing(serve):
    scheduler = serve(1)
    submit(scheduler, Request(PROMPT, 2)).wait()
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - before < 0.1


# --- errors ------------------------------------------------------------------------------------------------------


def test_a_nan_ends_its_own_request_alone(serve, expected, tmp_path):
    """A token whose embedding is NaN: its request gets the error, the others continue at any draft depth."""
    folder = tmp_path / "nan"
    folder.mkdir()
    source = FIXTURES / NAME
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    tensors = safetensors.torch.load_file(source / "model.safetensors")
    bad = VOCAB - 3
    tensors["model.embed_tokens.weight"][bad] = float("nan")
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    assert all(bad not in (*request.prompt_ids, *ids) for request, ids in expected.items())
    scheduler = serve(5, folder=folder, DRAFT="3")
    requests = list(expected)
    recorder = [submit(scheduler, request) for request in requests[:3]]
    broken = submit(scheduler, Request((*PROMPT, bad), 5, num_samples=2), 2)
    recorder += [submit(scheduler, request) for request in requests[3:6]]
    assert [h.ids() for h in recorder] == [expected[request] for request in requests[:6]]
    assert broken.reason(0) == broken.reason(1) == "error"
    assert "not finite at position" in broken.of(Finished)[0].error
    assert scheduler.statistics()["rows_error"] == 2 and scheduler.statistics()["slots_free"] == 5
    assert submit(scheduler, Request(PROMPT, 4)).ids() == reference_ids(scheduler.model, Request(PROMPT, 4))


def test_read_errors(serve, expected):
    """A transient one changes nothing; a permanent one ends what needs the expert, and the server continues."""
    scheduler, requests = serve(3, cap=1, DRAFT="3"), list(expected)
    disk, plain, fail = scheduler.model.experts.disk, scheduler.model.experts.disk.read_expert, []

    def read(*place):
        if fail and fail[-1]():
            raise Refused("model.safetensors at 4096: Input/output error (5)")
        return plain(*place)

    disk.read_expert = read
    failures = [True]
    fail.append(lambda: failures and failures.pop())
    recorder = [submit(scheduler, request) for request in requests[:3]]
    assert [h.ids() for h in recorder] == [expected[request] for request in requests[:3]] and not failures
    fail.append(lambda: True)
    recorder = [submit(scheduler, request) for request in requests[3:6]]
    assert [h.reason() for h in recorder] == ["error"] * 3
    assert all("Input/output error (5)" in h.of(Finished)[0].error for h in recorder)
    fail.clear()
    assert [submit(scheduler, request).ids() for request in requests[3:6]] == [expected[r] for r in requests[3:6]]
    scheduler.close()
    scheduler.model.experts.check()


def test_an_internal_error_ends_only_the_running_requests(serve, expected, monkeypatch):
    scheduler = serve(2)
    request = next(iter(expected))
    monkeypatch.setattr(scheduler.chunked_prefill, "schedule", lambda *_: 1 / 0)
    recorder = [submit(scheduler, request), submit(scheduler, Request(PROMPT, 3, num_samples=2), 2)]
    assert recorder[0].reason() == recorder[1].reason(1) == "error"
    assert recorder[0].of(Finished)[0].error.startswith("ZeroDivisionError")
    monkeypatch.undo()
    assert submit(scheduler, request).ids() == expected[request]
