"""Placement decides speed, never tokens: the same bits for every budget, history, guess, fault and drive."""

import errno
import os
import shutil
import threading

import pytest
import torch

from experts.prefetch import LONG_CHUNK, LOOKS, PAUSE, TRIAL, PrefetchController
from experts.read_queue import ExpertRead, ReadQueue
from forward.kv_cache import make_kv_cache
from forward.step import step
from settings import EMBEDDED_SNAPSHOT
from tests.conftest import FIXTURES, read_json

PROMPT = read_json(EMBEDDED_SNAPSHOT / "ref_glm.json")["full_ids"]
NUM_TOKENS = 24


def generate(model, prompt=PROMPT):
    """Greedy ids after a prompt, and the logits they were taken from."""
    kv, ids, logits = make_kv_cache(model.config, len(prompt) + NUM_TOKENS), list(prompt), []
    for _ in range(NUM_TOKENS):
        logits.append(step(model, [(ids[kv.length :], kv)])[0])
        ids.append(int(logits[-1].argmax()))
    model.experts.check()
    return ids[len(prompt) :], torch.stack(logits)


@pytest.fixture(scope="module")
def expected():
    """Of a model whose experts all stay in memory."""
    from load.model import load_model
    from settings import Settings

    loaded = load_model(Settings.read([], {"SNAP": str(EMBEDDED_SNAPSHOT), "USAGE": "0"}))
    yield generate(loaded.model)
    loaded.close()


@pytest.fixture
def same(expected):
    def same(model, prompt=PROMPT):
        ids, logits = generate(model, prompt)
        assert ids == expected[0] and torch.equal(logits, expected[1])

    return same


@pytest.mark.parametrize("lookahead", ["0", "1", "auto"])
@pytest.mark.parametrize("cap", [1, 6, 12, 24])
def test_budgets_and_guesses(load, same, cap, lookahead):
    """One slot a layer, a quarter of the experts, half of them, all."""
    model = load(EMBEDDED_SNAPSHOT, cap=cap, LOOKAHEAD=lookahead).model
    same(model)
    same(model)  # with what the first left in the cache
    guessed = model.experts.counters.ahead_useful_bytes + model.experts.counters.ahead_wasted_bytes
    assert (guessed > 0) == (lookahead != "0")


@pytest.mark.parametrize("cap", [1, 6, 24])
def test_the_reference_tier(load, same, cap):
    model = load(EMBEDDED_SNAPSHOT, cap=cap, EXPERT_TIER="reference", USAGE=1).model
    same(model)
    assert model.experts.counters.ahead_useful_bytes == 0


@pytest.mark.parametrize("chunk", [1, 7, 40])
def test_prefill_chunks(load, same, chunk):
    same(load(EMBEDDED_SNAPSHOT, cap=5, PREFILL_CHUNK=chunk).model)


def test_after_other_prompts(load, same):
    model = load(EMBEDDED_SNAPSHOT, cap=6).model
    for start in (0, 300, 900):
        generate(model, list(range(start, start + 50)))
    same(model)


@pytest.mark.slow
def test_history_deleted_kept_and_swapped(run_colibri, tmp_path):
    """Three processes of one prompt; then one begins with the history of another text."""

    def run(prompt, cache):
        process = run_colibri(6, PROMPT=prompt, TEMP=0, NGEN=24, USAGE=1, XDG_CACHE_HOME=cache, LOOKAHEAD=0)
        assert process.returncode == 0, process.stderr
        return process.stdout, b"[usage] begins with what" in process.stderr

    for name in ("mine", "other"):
        (tmp_path / name / "colibri.py").mkdir(parents=True)
        kernels = tmp_path.parent / "kernels"  # compiled once for all
        kernels.mkdir(exist_ok=True)
        (tmp_path / name / "colibri.py" / "kernels").symlink_to(kernels)
    first, had = run("In the beginning", tmp_path / "mine")
    assert not had
    assert run("In the beginning", tmp_path / "mine") == (first, True)
    run("2 3 5 7 11 13", tmp_path / "other")
    [mine] = (tmp_path / "mine" / "colibri.py" / "usage").iterdir()
    [other] = (tmp_path / "other" / "colibri.py" / "usage").iterdir()
    assert mine.name == other.name and mine.read_text() != other.read_text()
    shutil.copy(other, mine)
    assert run("In the beginning", tmp_path / "mine") == (first, True)
    mine.unlink()
    assert run("In the beginning", tmp_path / "mine") == (first, False)


def test_transient_read_errors(load, same):
    """Every eighth place of the file fails when it is first read, in one way or another; half the reads are short."""
    seen, faults = set(), (errno.EINTR, errno.EIO, errno.EAGAIN)

    def flaky(descriptor, buffers, offset):
        if offset not in seen:
            seen.add(offset)
            if len(seen) % 8 == 0:  # a second try waits a tenth of a second
                number = faults[len(seen) // 8 % len(faults)]
                raise OSError(number, os.strerror(number))
        if offset % 8192 < 4096:
            return os.preadv(descriptor, [buffers[0][:4096]], offset)
        return os.preadv(descriptor, buffers, offset)

    loaded = load(EMBEDDED_SNAPSHOT, cap=4)
    loaded.reader.preadv = flaky
    same(loaded.model)
    assert len(seen) > 150


@pytest.mark.parametrize("lookahead", ["0", "1"])
def test_with_a_mirror(load, same, tmp_path, lookahead):
    mirror = shutil.copytree(EMBEDDED_SNAPSHOT, tmp_path / "mirror")
    model = load(EMBEDDED_SNAPSHOT, cap=6, SNAP_MIRROR=mirror, LOOKAHEAD=lookahead).model
    same(model)


def test_memory_that_comes_and_goes(load, same):
    """The guard takes slots away in the middle of everything, and gives them back."""
    model = load(EMBEDDED_SNAPSHOT, cap=12).model
    experts, looks = model.experts, 0

    class Guard:
        def spare_bytes(self):
            nonlocal looks
            looks += 1
            return [-5 * experts.pools[0].slot_bytes, 10**12, None, -(10**12), 10**12][looks % 5]

    experts.guard = Guard()
    same(model)
    assert looks > 50


# --- guesses ----------------------------------------------------------------------------------------------------------


def test_guesses_are_counted_and_their_bytes_too(load):
    counters = {}
    for mode in ("0", "1"):
        experts = load(EMBEDDED_SNAPSHOT, cap=6, LOOKAHEAD=mode).model
        generate(experts)
        counters[mode] = experts.experts.counters
    off, on = counters["0"], counters["1"]
    assert on.hits + on.misses == off.hits + off.misses and on.hits > off.hits
    assert off.ahead_useful_bytes == off.ahead_wasted_bytes == 0
    assert on.ahead_useful_bytes > on.ahead_wasted_bytes > 0  # the next router is right in 70 of 100
    assert on.ahead_useful_bytes + on.ahead_wasted_bytes < on.bytes_read < 1.5 * off.bytes_read


def test_a_second_look_replaces_the_first(load):
    """What waits and is no longer expected is not read; what is under way ends, and is dropped by the request."""
    cache = load(FIXTURES / "glm_moe_dsa", cap=4, LOOKAHEAD=1).model.experts
    may_go, plain = threading.Event(), cache.queue.fill
    cache.queue.fill = lambda read: may_go.wait() and plain(read)
    cache.look_ahead(2, dict.fromkeys((7, 6, 5, 4), 1))
    while not cache.queue.under_way:
        pass
    cache.look_ahead(2, {3: 1, 5: 1})
    begun = {read.key for read in cache.queue.under_way}
    assert begun <= {(2, 7), (2, 6)} and set(cache.guesses) == begun | {(2, 5), (2, 3)}
    may_go.set()
    with cache.request(2, {3: 1}) as request:
        list(request.ready(0, 1))
    cache.check()


def test_a_wrong_guess_goes_and_a_right_one_is_a_hit(load):
    cache = load(FIXTURES / "glm_moe_dsa", cap=4, LOOKAHEAD=1).model.experts
    with cache.request(1, {0: 1}) as request:
        cache.look_ahead(2, {3: 1, 4: 1, 5: 1})
        list(request.ready(0, 1))
    assert set(cache.guesses) == {(2, 3), (2, 4), (2, 5)}
    cache.queue.wait([cache.guesses[2, 4]])
    with cache.request(2, {4: 1, 6: 1}) as request:
        assert (cache.counters.hits, cache.counters.misses) == (1, 2)
        assert not cache.guesses
        list(request.ready(0, 2))
    cache.check()


def test_no_guess_takes_the_place_of_what_is_dearer(load):
    cache = load(FIXTURES / "glm_moe_dsa", cap=1, LOOKAHEAD=1).model.experts
    for _ in range(20):
        with cache.request(1, {0: 1, 1: 1, 2: 1, 3: 1}) as request:
            list(request.ready(0, 4))
    with cache.request(1, {0: 1}) as request:
        list(request.ready(0, 1))
        cache.look_ahead(2, {5: 1})
        assert not cache.guesses  # 20 uses are worth more than one that may not come
        cache.look_ahead(2, {5: 400})
        assert set(cache.guesses) == {(2, 5)}


def test_needed_reads_go_before_guesses():
    order, may_go = [], []

    def fill(read):
        order.append(read.key)
        while not may_go:
            pass

    queue = ReadQueue(fill, 2)
    reads = [ExpertRead(i, None, is_urgent=False) for i in range(4)]
    for read in reads:
        queue.submit(read)
    urgent = ExpertRead("needed", None)
    queue.submit(urgent)
    while len(order) < 2:  # one guess at a time beside it: a thread is always left for what is needed
        pass
    assert set(order) == {0, "needed"}
    queue.promote(reads[3])
    may_go.append(True)
    while not all(read.is_over for read in reads):
        queue.wait([read for read in reads if not read.is_over])
    assert order.index(3) < order.index(2)
    queue.close()
    seconds, free = queue.times(urgent)
    assert free == 0 < seconds


def lookahead_after(gain, loss):
    """What `auto` does in each token after guesses that gained and lost so many seconds a token."""
    lookahead, asked = PrefetchController("auto", 2), []
    for _ in range(400):
        wants = [lookahead.wants(1) for _ in range(2 * LOOKS)]
        if wants[0]:
            lookahead.note(True, gain)
            lookahead.note(False, loss)
            lookahead.note_thinking(0.001)
        asked.append(wants[0])
    return asked, lookahead


def test_guessing_ends_where_it_does_not_pay_and_is_tried_again():
    asked, lookahead = lookahead_after(gain=0.01, loss=0.002)
    assert all(asked)
    asked, lookahead = lookahead_after(gain=0.002, loss=0.01)
    trials = "".join("x" if on else "." for on in asked).split("x" * TRIAL)
    assert sum(asked) < 5 * TRIAL
    assert [len(pause) for pause in trials[1:-1]] == [PAUSE * 2**i for i in range(len(trials) - 2)]
    assert lookahead.wants(LONG_CHUNK)  # what a whole chunk needs is known well enough
    assert not PrefetchController("0", 2).wants(LONG_CHUNK) and PrefetchController("1", 2).wants(1)


def test_guessing_without_a_gain_ends_too():
    asked, _ = lookahead_after(gain=0.0, loss=0.0)
    assert sum(asked) < 5 * TRIAL


@pytest.mark.parametrize("mode", ["auto", "1"])
def test_where_nothing_is_missing_nothing_is_guessed(mode):
    """Everything in memory: even asking the next router would be for nothing."""
    lookahead = PrefetchController(mode, 2)
    for misses, wanted in [(0, True), (0, True), (0, True), (0, False), (0, False), (3, True), (0, True)]:
        lookahead.note_misses(misses)
        assert lookahead.wants(1) == wanted
