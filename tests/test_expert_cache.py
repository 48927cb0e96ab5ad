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
    return (one for batch in cache.batches(layer, experts) for one in batch)


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


def test_an_expert_still_to_come_is_not_evicted(cache_of):
    """Plain LRU over an ascending sweep would miss every time; here what is resident is used first."""
    cache = cache_of(3)
    ask(cache, [4, 5, 6])
    assert ask(cache, [0, 1, 4, 5, 6]) == (2, 3)  # 0 takes the place of 6, needed last; 1 that of 0
    cache = cache_of(4)
    ask(cache, [4, 5, 6, 7])
    assert ask(cache, [0, 4, 5, 6]) == (3, 1)  # 7 is not wanted: it goes


def test_layers_have_slots_of_their_own(cache_of):
    cache = cache_of(1)
    assert ask(cache, [3], layer=1) == ask(cache, [3], layer=4) == (0, 1)
    assert ask(cache, [3], layer=1) == ask(cache, [3], layer=4) == (1, 0)


def test_bytes_are_counted_as_read(cache_of):
    cache = cache_of(2)
    ask(cache, [0, 1, 0])
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
    slot_bytes = -(-expert_bytes // 4096) * 4096
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
    assert sizes == {1: 12288, 2: 24576, 3: 12288, 4: 12288}
    assert len(loaded.model.experts.arena.bytes) == 3 * sum(sizes.values()) == loaded.plan.cache_bytes
    assert ask(loaded.model.experts, [0, 1, 2, 3]) == (0, 4)
