"""The expert cache: eviction, slots, counters and the bytes that are read."""

import pytest
import safetensors.torch
import torch

from bench.reference_tier import ReferenceCache
from errors import Refused
from kernels.weight import packed_bytes
from tests.conftest import FIXTURES

LAYER = 2


@pytest.fixture
def cache_of(load):
    return lambda cap, **options: load(FIXTURES / "glm_moe_dsa", cap=cap, **options).model.experts


@pytest.fixture
def reference_cache_of(cache_of, monkeypatch):
    def reference_cache_of(cap):
        with monkeypatch.context() as patch:
            patch.setattr("load.model.ExpertCache", ReferenceCache)
            return cache_of(cap)

    return reference_cache_of


@pytest.fixture(params=["full", "reference"])
def tier(request, cache_of, reference_cache_of):
    """The product's cache, and the reference one of the streaming benchmark."""
    return cache_of if request.param == "full" else reference_cache_of


def iterate(cache, experts, layer=LAYER):
    """Request experts -> (expert, matrices) one after the other, while they are valid."""
    with cache.request(layer, dict.fromkeys(experts, 1)) as request:
        for batch in request.ready(0, len(experts)):
            yield from ((experts[i], matrices) for i, matrices in batch)


def use(cache, experts, layer=LAYER):
    """Request and use experts -> (hits, misses)."""
    before = cache.counters.hits, cache.counters.misses
    for expert, matrices in iterate(cache, experts, layer):
        assert [m.rows for m in matrices] == [32, 32, 64] and expert in experts
    cache.check()
    return cache.counters.hits - before[0], cache.counters.misses - before[1]


def cached_of(cache, layer=LAYER):
    return sorted(expert for at, expert in cache.cached if at == layer)


# --- eviction ---------------------------------------------------------------------------------------------------------


def test_the_most_used_experts_stay_cached(cache_of):
    cache = cache_of(1)  # four slots, one for each layer at least
    for _ in range(3):
        use(cache, [0, 1])
    assert use(cache, [0, 1, 2]) == (2, 1)
    assert use(cache, [3]) == (0, 1)
    assert use(cache, [4]) == (0, 1)  # not 0 and 1, which were used more, nor 3, used just now
    assert cached_of(cache) == [0, 1, 3, 4]


def test_layers_share_the_slots_and_each_keeps_its_floor(cache_of):
    cache = cache_of(2)
    use(cache, [0, 1, 2, 3, 4, 5, 6, 7])
    assert len(cached_of(cache)) == 8  # no other layer requested any yet
    for layer in (1, 3, 4):
        use(cache, [0, 1, 2], layer)
    assert [len(cached_of(cache, layer)) for layer in (1, 3, 4)] == [2, 2, 2]
    assert len(cached_of(cache)) == 2  # with a cap, each layer ends with as many slots as that


def test_the_reference_evicts_the_least_recently_used(reference_cache_of):
    cache = reference_cache_of(3)
    for layer in (1, 2, 3, 4):
        assert use(cache, [0, 1, 2], layer) == (0, 3)
    assert use(cache, [0]) == (1, 0)
    assert use(cache, [3]) == (0, 1)  # 1 was used longest ago
    assert cached_of(cache) == [0, 2, 3]
    assert use(cache, [0, 2, 3]) == (3, 0)
    assert cached_of(cache, 1) == [0, 1, 2]


def test_cached_experts_are_used_before_they_are_evicted(tier):
    """Plain LRU over an ascending sweep would miss every time."""
    cache = tier(1)
    use(cache, [4, 5, 6, 7])
    assert use(cache, [0, 1, 4, 5, 6, 7]) == (4, 2)
    cache = tier(1)
    use(cache, [4, 5, 6, 7])
    assert use(cache, [0, 4, 5, 6]) == (3, 1)  # 7 is not requested: it is evicted
    assert cached_of(cache) == [0, 4, 5, 6]


def test_groups_in_order_when_all_slots_hold_later_experts(tier):
    """The first group needs a slot, and every slot holds an expert of the second: one is evicted and read again."""
    cache, seen = tier(1), []
    use(cache, [4, 5, 6, 7])
    cache.reset_counters()
    with cache.request(LAYER, dict.fromkeys([0, 1, 4, 5, 6, 7], 1)) as request:
        for start in (0, 2, 4):
            for batch in request.ready(start, start + 2):
                seen += [i for i, _ in batch]
    assert sorted(seen[:2]) == [0, 1] and sorted(seen[2:4]) == [2, 3] and sorted(seen[4:]) == [4, 5]
    assert (cache.counters.hits, cache.counters.misses) == (3, 3)
    cache.check()


def test_primed_counts_decide_from_the_first_token(cache_of):
    cache = cache_of(1)
    cache.prime({(LAYER, 5): 40.0, (LAYER, 6): 30.0, (3, 1): 99.0})
    use(cache, [4, 5, 6, 7])
    use(cache, [0, 1])
    assert cached_of(cache) == [0, 1, 5, 6]
    assert cache.use_counts()[LAYER, 5] == pytest.approx(41, abs=0.5) and cache.use_counts()[3, 1] == pytest.approx(99)


# --- slots ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("used", [0, 1])
def test_an_interrupted_request_loses_no_slot(cache_of, used):
    cache = cache_of(1)
    with pytest.raises(KeyboardInterrupt), cache.request(LAYER, dict.fromkeys(range(5), 1)) as request:
        for _ in zip(range(used), request.ready(0, 5), strict=False):
            pass
        raise KeyboardInterrupt
    cache.check()
    assert use(cache, [0, 1, 2, 3, 4, 5, 6, 7])[1] >= 4
    assert not cache.abandoned


def test_a_failed_read_is_raised_and_loses_no_slot(cache_of, monkeypatch):
    cache, read = cache_of(1), type(cache_of(1).disk).read_expert

    def fails(disk, layer, expert, buffer):
        if expert == 2:
            raise Refused("the drive is gone")
        read(disk, layer, expert, buffer)

    monkeypatch.setattr(type(cache.disk), "read_expert", fails)
    for _ in range(5):
        with pytest.raises(Refused, match="gone"):
            use(cache, [0, 1, 2, 3, 4])
        cache.check()
    monkeypatch.undo()
    while cache.abandoned:  # reads in flight at the last error still hold slots
        cache.wait_for_abandoned()
    assert sum(use(cache, [0, 1, 2])) == 3 and {0, 1, 2} <= set(cached_of(cache))


def test_slots_are_released_and_reclaimed(cache_of):
    class Guard:
        spare = None

        def spare_bytes(self):
            return self.spare

    cache, [pool] = cache_of(4), cache_of(4).pools
    [pool], cache.guard = cache.pools, Guard()
    for layer in (1, 2, 3, 4):
        use(cache, [0, 1, 2, 3], layer)
    full, cache.guard.spare = cache.num_bytes, -3 * pool.slot_bytes
    use(cache, [0])
    assert len(pool.released) == 3 and cache.num_bytes == full - 3 * pool.slot_bytes
    cache.guard.spare = -(10**12)
    assert sum(use(cache, [5, 6, 7])) == 3  # a slot for each layer is always kept
    assert pool.num_usable == 4
    cache.guard.spare = 2 * pool.slot_bytes
    use(cache, [0])
    assert pool.num_usable == 4  # too little is spare: the slot would be released again at once
    cache.guard.spare = 10**12
    for left in range(5, 17):
        use(cache, [0])
        assert pool.num_usable == left
    use(cache, [0])
    assert pool.num_usable == 16
    tensors = safetensors.torch.load_file(FIXTURES / "glm_moe_dsa" / "model.safetensors")
    for expert, matrices in iterate(cache, list(range(8))):
        assert torch.equal(matrices[0].data, tensors[f"model.layers.{LAYER}.mlp.experts.{expert}.gate_proj.weight"])


# --- bytes ------------------------------------------------------------------------------------------------------------


def test_bytes_are_counted_as_read(cache_of):
    cache = cache_of(2)
    use(cache, [0, 1])
    use(cache, [0])
    assert cache.counters.bytes_read == 2 * 3 * 32 * 64 * 2
    assert cache.counters.hit_rate == pytest.approx(1 / 3)


@pytest.mark.parametrize("cap", [1, 2, 8])
def test_matrices_are_the_bytes_of_the_file(cache_of, cap):
    cache = cache_of(cap)
    tensors = safetensors.torch.load_file(FIXTURES / "glm_moe_dsa" / "model.safetensors")
    for experts in ([0, 3, 7], [1, 3, 5, 6], [0, 7]):
        for expert, matrices in iterate(cache, experts):
            for word, matrix in zip(("gate", "up", "down"), matrices, strict=True):
                name = f"model.layers.{LAYER}.mlp.experts.{expert}.{word}_proj.weight"
                assert torch.equal(matrix.data, tensors[name])


def test_the_arena_is_allocated_up_front(cache_of):
    [pool] = cache_of(2).pools
    expert_bytes = 3 * 32 * 64 * 2
    slot_bytes = (-(-expert_bytes // 4096) + 1) * 4096  # it does not start at a page of the file
    assert len(pool.arena.bytes) == 4 * 2 * slot_bytes  # four sparse layers
    assert all(start % 4096 == 0 and stop - start == slot_bytes for start, stop in pool.free)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_packed_slots_hold_what_packing_the_file_gives(cache_of, bits):
    from kernels.formats import integer_format
    from kernels.quantize import quantize_weight

    cache = cache_of(1, expert_bits=bits)
    tensors = safetensors.torch.load_file(FIXTURES / "glm_moe_dsa" / "model.safetensors")
    for expert, matrices in iterate(cache, [2, 5]):
        for word, matrix in zip(("gate", "up", "down"), matrices, strict=True):
            stored = tensors[f"model.layers.{LAYER}.mlp.experts.{expert}.{word}_proj.weight"]
            assert torch.equal(matrix.dequantize(), quantize_weight(stored.float(), integer_format(bits)).dequantize())
            assert matrix.num_bytes == packed_bytes(integer_format(bits), *stored.shape)


def test_layers_of_different_formats_have_slots_of_their_own_size(load, tmp_path):
    """One layer stored in F32: its slots are twice as large, the others' stay small."""
    import shutil

    shutil.copytree(FIXTURES / "glm_moe_dsa", tmp_path, dirs_exist_ok=True)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    for name in tensors:
        if name.startswith(f"model.layers.{LAYER}.mlp.experts."):
            tensors[name] = tensors[name].float()
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    loaded = load(tmp_path, cap=3)
    wide, narrow = loaded.model.experts.pools
    assert (wide.layers, wide.slot_bytes, wide.num_slots) == ((2,), 28672, 3)
    assert (narrow.layers, narrow.slot_bytes, narrow.num_slots) == ((1, 3, 4), 16384, 9)
    assert sum(len(pool.arena.bytes) for pool in (wide, narrow)) == loaded.plan.cache_bytes
    assert use(loaded.model.experts, [0, 1, 2, 3]) == (0, 4)
    shared = load(tmp_path, RAM_GB=1000).plan.expert_slots
    assert [slots.num_slots for slots in shared] == [8, 24]
