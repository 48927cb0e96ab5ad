"""HeadKvCache: keys and values by heads, cloned, trimmed, rows dropped."""

import pytest
import torch

from generate.head_kv_cache import HeadKvCache


def test_a_cache_by_heads():
    cache = HeadKvCache(3, 2, 10, 4, 8)
    assert (cache.num_rows, cache.capacity, cache.length, cache.get_pos()) == (2, 10, 0, 0)
    assert cache.num_bytes == 2 * 3 * 2 * 10 * 4 * 8 * 4 and cache.get_layer_cache(1)[0].shape == (2, 10, 4, 8)
    keys = torch.randn(2, 6, 4, 8)
    known, values = cache.append(1, keys, -keys)
    assert torch.equal(known, keys) and torch.equal(values, -keys) and cache.length == 0
    cache.advance(6)
    assert cache.lengths.tolist() == [6, 6]
    assert torch.equal(cache.append(1, keys[:, :2], keys[:, :2])[0], torch.cat([keys, keys[:, :2]], 1))
    for call in (lambda: cache.append(0, keys, keys), lambda: cache.advance(5), lambda: cache.check_room(5)):
        with pytest.raises(ValueError, match="10 positions with 6 has no room for"):
            call()
    cache.trim(3)
    assert cache.length == 3
    with pytest.raises(ValueError, match="cannot trim a cache of 3 positions to 4"):
        cache.trim(4)
    cache.reset()
    assert cache.length == 0


def test_a_prefill_is_copied_to_every_sequence_with_its_extra_tensors():
    one = HeadKvCache(2, 1, 5, 2, 4)
    keys = torch.randn(1, 5, 2, 4)
    for layer in range(2):
        one.append(layer, keys + layer, keys - layer)
    one.advance(5)
    one.extra["last"] = torch.tensor([[7.0]])
    many = one.clone(3, 9)
    assert many.lengths.tolist() == [5, 5, 5] and many.capacity == 9
    for layer in range(2):
        assert all(torch.equal(many.keys[layer, row, :5], keys[0] + layer) for row in range(3))
    many.extra["last"][1] = 0
    many.keys[0, 1] = 0
    assert one.extra["last"].item() == 7 and torch.equal(one.keys[0], keys)  # copies
    many.keep([2, 0])
    assert many.num_rows == 2 and many.extra["last"].tolist() == [[7], [7]]
    for other, message in [
        (HeadKvCache(2, 1, 99, 2, 4), "cannot hold one of 99"),
        (HeadKvCache(3, 1, 5, 2, 4), "does not fit"),
        (HeadKvCache(2, 2, 5, 2, 4), "does not fit"),
        (HeadKvCache(2, 1, 5, 2, 5), "does not fit"),
    ]:
        with pytest.raises(ValueError, match=message):
            HeadKvCache(2, 3, 9, 2, 4).prefill(other)
    with pytest.raises(ValueError, match="only an empty cache"):
        many.prefill(one)
