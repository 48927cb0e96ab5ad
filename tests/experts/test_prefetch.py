"""Expert prefetch: useful and wasted prefetches, their place in the read queue, and when `auto` makes them."""

import threading

import pytest

from experts.prefetch import LONG_CHUNK, PAUSE, PREDICTIONS, TRIAL, PrefetchController
from experts.read_queue import ExpertRead, ReadQueue
from forward import layer_forward
from forward.mlp import mlp
from forward.router import route_by_expert
from kernels.dispatch import rms_norm
from settings import EMBEDDED_SNAPSHOT
from tests.conftest import FIXTURES
from tests.experts.test_expert_tier import generate
from tests.forward.test_forward import all_logits
from tests.support.server_process import wait_for


def test_prefetched_bytes_are_counted(load):
    counters = {}
    for mode in ("0", "1"):
        model = load(EMBEDDED_SNAPSHOT, cap=6, LOOKAHEAD=mode).model
        generate(model)
        counters[mode] = model.experts.counters
    off, on = counters["0"], counters["1"]
    assert on.hits + on.misses == off.hits + off.misses and on.hits > off.hits
    assert off.useful_prefetch_bytes == off.wasted_prefetch_bytes == 0
    assert on.useful_prefetch_bytes > on.wasted_prefetch_bytes > 0  # the prediction is right in 70 of 100
    assert on.useful_prefetch_bytes + on.wasted_prefetch_bytes < on.bytes_read < 1.5 * off.bytes_read


@pytest.mark.parametrize("rows", [12, LONG_CHUNK])
def test_the_shared_expert_is_part_of_the_prediction(load, monkeypatch, rows):
    """The router of the next layer sees something nearer to the residual with the shared expert's output than without;
    for many rows the residual alone is enough."""
    model, predicted, expected = load(EMBEDDED_SNAPSHOT, LOOKAHEAD=1).model, {}, {}
    plain = model.experts.prefetch

    def prefetch(layer, uses):
        predicted.setdefault(layer, uses)  # the first prediction for a layer comes from the layer before
        plain(layer, uses)

    def moe(model, layer, weights, x, residual, observer=None):
        if layer + 1 < model.config.num_layers:
            after = model.weights.layers[layer + 1]
            shared = mlp(x, weights.shared) if rows < LONG_CHUNK else 0
            normed = rms_norm(residual + shared, after.attention.post_norm, model.config.rms_norm_eps)
            expected[layer + 1] = route_by_expert(model.config, after.mlp, normed)[0]
        return plain_moe(model, layer, weights, x, residual, observer)

    plain_moe = layer_forward.moe
    monkeypatch.setattr(layer_forward, "moe", moe)
    model.experts.prefetch = prefetch
    all_logits(model, list(range(10, 10 + rows)))
    assert len(expected) >= 2 and {layer: predicted[layer] for layer in expected} == expected


def test_a_new_prediction_replaces_the_last(load):
    """A pending prefetch that is no longer predicted is not read; one in flight ends and is dropped by the request."""
    cache = load(FIXTURES / "glm_moe_dsa", cap=4, LOOKAHEAD=1).model.experts
    cache.queue.depth = lambda: 4  # two prefetches, whatever the queue depth of this drive
    may_go, plain = threading.Event(), cache.queue.fill
    cache.queue.fill = lambda read: may_go.wait() and plain(read)
    try:
        cache.prefetch(2, dict.fromkeys((7, 6, 5, 4), 1))
        wait_for(lambda: cache.queue.in_flight)
        cache.prefetch(2, {3: 1, 5: 1})
        started = {read.key for read in cache.queue.in_flight}
        assert started <= {(2, 7), (2, 6)} and set(cache.prefetches) == started | {(2, 5), (2, 3)}
    finally:
        may_go.set()  # a cache with a blocked read can never be closed
    with cache.request(2, {3: 1}) as request:
        list(request.ready(0, 1))
    cache.check()


def test_a_useful_prefetch_is_a_hit_and_wasted_ones_are_dropped(load):
    cache = load(FIXTURES / "glm_moe_dsa", cap=4, LOOKAHEAD=1).model.experts
    with cache.request(1, {0: 1}) as request:
        cache.prefetch(2, {3: 1, 4: 1, 5: 1})
        list(request.ready(0, 1))
    assert set(cache.prefetches) == {(2, 3), (2, 4), (2, 5)}
    cache.queue.wait([cache.prefetches[2, 4]])
    with cache.request(2, {4: 1, 6: 1}) as request:
        assert (cache.counters.hits, cache.counters.misses) == (1, 2)
        assert not cache.prefetches
        list(request.ready(0, 2))
    cache.check()


def test_an_expert_that_the_open_request_reads_is_not_read_twice(load):
    """The second read took a slot of its own for the same expert: the first slot was lost for good."""
    experts = load(FIXTURES / "glm_moe_dsa", cap=6).model.experts
    with experts.request(2, dict.fromkeys(range(4), 1)) as request:
        in_flight = {read.key for read in request.reads}
        assert in_flight
        experts.prefetch(2, dict.fromkeys(range(6), 1))
        assert experts.prefetches.keys().isdisjoint(in_flight)
        for _ in request.ready(0, 4):
            pass
    experts.check()
    with experts.request(2, dict.fromkeys(range(8), 1)) as request:
        for _ in request.ready(0, 8):
            pass
    while experts.abandoned:
        experts.wait_for_abandoned()
    experts.check()


def test_a_prefetch_evicts_no_expert_with_a_higher_score(load):
    cache = load(FIXTURES / "glm_moe_dsa", cap=1, LOOKAHEAD=1).model.experts
    for _ in range(20):
        with cache.request(1, {0: 1, 1: 1, 2: 1, 3: 1}) as request:
            list(request.ready(0, 4))
    with cache.request(1, {0: 1}) as request:
        list(request.ready(0, 1))
        cache.prefetch(2, {5: 1})
        assert not cache.prefetches  # 20 uses are worth more than a predicted one
        cache.prefetch(2, {5: 400})
        assert set(cache.prefetches) == {(2, 5)}


def test_urgent_reads_go_before_prefetches():
    order, may_go = [], threading.Event()

    def fill(read):
        order.append(read.key)
        may_go.wait()

    queue = ReadQueue(fill, lambda: 2)
    reads = [ExpertRead(i, None, is_urgent=False) for i in range(4)]
    for read in reads:
        queue.submit(read)
    urgent = ExpertRead("needed", None)
    queue.submit(urgent)
    try:
        wait_for(lambda: len(order) == 2)  # one prefetch beside it: a thread is always left for urgent reads
        assert set(order) == {0, "needed"}
        queue.promote(reads[3])
    finally:
        may_go.set()
    while not all(read.is_done for read in reads):
        queue.wait([read for read in reads if not read.is_done])
    assert order.index(3) < order.index(2)
    queue.close()
    seconds, slack = queue.read_times(urgent)
    assert slack == 0 < seconds


def run_controller(gain, loss):
    """Run `auto` with prefetches of this gain and loss in seconds a token -> (whether it predicts, by token; it)."""
    controller, predicts = PrefetchController("auto", 2), []
    for _ in range(400):
        answers = [controller.should_predict(1) for _ in range(2 * PREDICTIONS)]
        if answers[0]:
            controller.record_prefetch(True, gain)
            controller.record_prefetch(False, loss)
            controller.record_prediction(0.001)
        predicts.append(answers[0])
    return predicts, controller


def test_prefetch_pauses_when_it_loses_and_is_tried_again():
    predicts, controller = run_controller(gain=0.01, loss=0.002)
    assert all(predicts)
    predicts, controller = run_controller(gain=0.002, loss=0.01)
    trials = "".join("x" if on else "." for on in predicts).split("x" * TRIAL)
    assert sum(predicts) < 5 * TRIAL
    assert [len(pause) for pause in trials[1:-1]] == [PAUSE * 2**i for i in range(len(trials) - 2)]
    assert controller.should_predict(LONG_CHUNK)  # a long chunk is predicted well enough
    assert not PrefetchController("0", 2).should_predict(LONG_CHUNK) and PrefetchController("1", 2).should_predict(1)


def test_prefetch_without_a_gain_pauses():
    predicts, _ = run_controller(gain=0.0, loss=0.0)
    assert sum(predicts) < 5 * TRIAL


@pytest.mark.parametrize("mode", ["auto", "1"])
def test_nothing_is_predicted_while_nothing_is_missing(mode):
    """All experts are cached: even running the next router would be wasted."""
    controller = PrefetchController(mode, 2)
    for misses, wanted in [(0, True), (0, True), (0, True), (0, False), (0, False), (3, True), (0, True)]:
        controller.record_misses(misses)
        assert controller.should_predict(1) == wanted
