"""Expert caching changes speed, never tokens: equal bits at every budget, history, prefetch, fault and drive."""

import errno
import os
import shutil

import pytest
import torch

from bench.reference_tier import ReferenceCache
from forward.kv_cache import make_kv_cache
from forward.step import step
from settings import EMBEDDED_SNAPSHOT
from tests.conftest import read_json

PROMPT = read_json(EMBEDDED_SNAPSHOT / "ref_glm.json")["full_ids"]
NUM_TOKENS = 24


def generate(model, prompt=PROMPT):
    """Greedy ids after a prompt, and their logits."""
    kv, ids, logits = make_kv_cache(model.config, len(prompt) + NUM_TOKENS), list(prompt), []
    for _ in range(NUM_TOKENS):
        logits.append(step(model, [(ids[kv.length :], kv)])[0])
        ids.append(int(logits[-1].argmax()))
    model.experts.check()
    return ids[len(prompt) :], torch.stack(logits)


@pytest.fixture(scope="module")
def expected():
    """The ids and logits of a model whose experts are all cached."""
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
def test_budgets_and_prefetch(load, same, cap, lookahead):
    """One slot a layer, a quarter of the experts, half of them, all."""
    model = load(EMBEDDED_SNAPSHOT, cap=cap, LOOKAHEAD=lookahead).model
    same(model)
    same(model)  # with the experts that the first run left in the cache
    prefetched = model.experts.counters.useful_prefetch_bytes + model.experts.counters.wasted_prefetch_bytes
    assert (prefetched > 0) == (lookahead != "0")


@pytest.mark.parametrize("cap", [1, 6, 24])
def test_the_reference_tier(load, same, cap, monkeypatch):
    """The cache that bench/streaming.py compares with."""
    monkeypatch.setattr("load.model.ExpertCache", ReferenceCache)
    model = load(EMBEDDED_SNAPSHOT, cap=cap, USAGE=1).model
    assert type(model.experts) is ReferenceCache
    same(model)
    assert model.experts.counters.useful_prefetch_bytes == 0


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
    """Three processes with one prompt; then one that starts with the history of another text."""

    def run(prompt, cache):
        process = run_colibri(6, PROMPT=prompt, TEMP=0, NGEN=24, USAGE=1, XDG_CACHE_HOME=cache, LOOKAHEAD=0)
        assert process.returncode == 0, process.stderr
        return process.stdout, b"[usage] starts with the expert usage" in process.stderr

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
    """Every eighth offset fails when it is first read, in one of several ways; half of the reads are short."""
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
    """The memory guard has slots released and reclaimed during the run."""
    model = load(EMBEDDED_SNAPSHOT, cap=12).model
    experts, calls = model.experts, 0

    class Guard:
        def spare_bytes(self):
            nonlocal calls
            calls += 1
            return [-5 * experts.pools[0].slot_bytes, 10**12, None, -(10**12), 10**12][calls % 5]

    experts.guard = Guard()
    same(model)
    assert calls > 50
