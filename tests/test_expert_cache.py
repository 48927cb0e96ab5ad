"""The expert cache: who stays, who goes, and what is counted."""

import pytest
import safetensors.torch
import torch

from kernels.packing import packed_bytes
from tests.conftest import FIXTURES

LAYER = 2


@pytest.fixture
def cache_of(load):
    return lambda cap, **options: load(FIXTURES / "glm_moe_dsa", cap=cap, **options).model.experts


def everything(cache, experts, layer=LAYER):
    """(expert, matrices) one after the other, while they are good."""
    with cache.request(layer, experts) as request:
        for batch in request.ready(0, len(experts)):
            yield from ((experts[i], matrices) for i, matrices in batch)


def ask(cache, experts, layer=LAYER):
    """Ask for experts -> the hits and misses that cost."""
    before = cache.counters.hits, cache.counters.misses
    for expert, matrices in everything(cache, experts, layer):
        assert [m.rows for m in matrices] == [32, 32, 64] and expert in experts
    return cache.counters.hits - before[0], cache.counters.misses - before[1]


def test_the_least_recently_used_goes(cache_of):
    cache = cache_of(3)
    assert ask(cache, [0, 1, 2]) == (0, 3)
    assert ask(cache, [0]) == (1, 0)
    assert ask(cache, [3]) == (0, 1)  # 1 was used longest ago
    assert list(cache.resident[LAYER]) == [2, 0, 3]
    assert ask(cache, [0, 2, 3]) == (3, 0)


def test_what_is_there_is_used_before_it_goes(cache_of):
    """Plain LRU over an ascending sweep would miss every time."""
    cache = cache_of(3)
    ask(cache, [4, 5, 6])
    assert ask(cache, [0, 1, 4, 5, 6]) == (3, 2)
    cache = cache_of(4)
    ask(cache, [4, 5, 6, 7])
    assert ask(cache, [0, 4, 5, 6]) == (3, 1)  # 7 is not wanted: it goes
    assert list(cache.resident[LAYER]) == [4, 5, 6, 0]


def test_groups_in_order_when_all_slots_hold_what_comes_later(cache_of):
    """The first group needs a slot, and every slot holds an expert of the second: one is given up and read again."""
    cache, seen = cache_of(2), []
    ask(cache, [6, 7])
    cache.reset_counters()
    with cache.request(LAYER, [0, 1, 6, 7]) as request:
        for start in (0, 2):
            for batch in request.ready(start, start + 2):
                seen += [i for i, _ in batch]
    assert sorted(seen[:2]) == [0, 1] and sorted(seen[2:]) == [2, 3]
    assert (cache.counters.hits, cache.counters.misses) == (1, 3)


@pytest.mark.parametrize("used", [0, 1])
def test_a_request_that_is_left_early_loses_no_slot(cache_of, used):
    cache = cache_of(3)
    with pytest.raises(KeyboardInterrupt), cache.request(LAYER, [0, 1, 2, 3, 4]) as request:
        for _ in zip(range(used), request.ready(0, 5), strict=False):
            pass
        raise KeyboardInterrupt
    assert len(cache.free[LAYER]) + len(cache.resident[LAYER]) == 3
    assert ask(cache, [0, 1, 2, 3, 4, 5, 6, 7])[1] >= 5


def test_a_failed_read_is_raised_and_loses_no_slot(cache_of, monkeypatch):
    from snapshot.errors import Refused

    cache, read = cache_of(3), type(cache_of(1).disk).read

    def fails(disk, layer, expert, buffer):
        if expert == 2:
            raise Refused("the drive is gone")
        read(disk, layer, expert, buffer)

    monkeypatch.setattr(type(cache.disk), "read", fails)
    for _ in range(5):
        with pytest.raises(Refused, match="gone"):
            ask(cache, [0, 1, 2, 3, 4])
        assert len(cache.free[LAYER]) + len(cache.resident[LAYER]) == 3
    monkeypatch.undo()
    assert sum(ask(cache, [0, 1, 2])) == 3 and sorted(cache.resident[LAYER]) == [0, 1, 2]


def test_layers_have_slots_of_their_own(cache_of):
    cache = cache_of(1)
    assert ask(cache, [3], layer=1) == ask(cache, [3], layer=4) == (0, 1)
    assert ask(cache, [3], layer=1) == ask(cache, [3], layer=4) == (1, 0)


def test_bytes_are_counted_as_read(cache_of):
    cache = cache_of(2)
    ask(cache, [0, 1])
    ask(cache, [0])
    assert cache.counters.bytes_read == 2 * 3 * 32 * 64 * 2
    assert cache.counters.hit_rate == pytest.approx(1 / 3)


@pytest.mark.parametrize("cap", [1, 2, 8])
def test_matrices_are_the_bytes_of_the_file(cache_of, cap):
    cache = cache_of(cap)
    tensors = safetensors.torch.load_file(FIXTURES / "glm_moe_dsa" / "model.safetensors")
    for experts in ([0, 3, 7], [1, 3, 5, 6], [0, 7]):
        for expert, matrices in everything(cache, experts):
            for word, matrix in zip(("gate", "up", "down"), matrices, strict=True):
                name = f"model.layers.{LAYER}.mlp.experts.{expert}.{word}_proj.weight"
                assert torch.equal(matrix.data, tensors[name])


def test_the_arena_is_allocated_up_front(cache_of):
    cache = cache_of(2)
    expert_bytes = 3 * 32 * 64 * 2
    slot_bytes = (-(-expert_bytes // 4096) + 1) * 4096  # the file does not begin it at a page
    assert len(cache.arena.bytes) == 4 * 2 * slot_bytes  # four sparse layers
    for slots in cache.free.values():
        assert all(start % 4096 == 0 and stop - start == slot_bytes for start, stop in slots)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_packed_slots_hold_what_packing_the_file_gives(cache_of, bits):
    from kernels.packing import grouped, pack

    cache = cache_of(1, expert_bits=bits)
    tensors = safetensors.torch.load_file(FIXTURES / "glm_moe_dsa" / "model.safetensors")
    for expert, matrices in everything(cache, [2, 5]):
        for word, matrix in zip(("gate", "up", "down"), matrices, strict=True):
            stored = tensors[f"model.layers.{LAYER}.mlp.experts.{expert}.{word}_proj.weight"]
            assert torch.equal(matrix.widen(), pack(stored.float(), grouped(bits)).widen())
            assert matrix.num_bytes == packed_bytes(grouped(bits), *stored.shape)


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
    sizes = loaded.plan.slot_bytes
    assert sizes == {1: 16384, 2: 28672, 3: 16384, 4: 16384}
    assert len(loaded.model.experts.arena.bytes) == 3 * sum(sizes.values()) == loaded.plan.cache_bytes
    assert ask(loaded.model.experts, [0, 1, 2, 3]) == (0, 4)
