"""KvState: append, trim, clone, bind, and the row of the MTP layer."""

import pytest
import torch

from forward.kv_cache import KvCache
from forward.step import step
from tests.conftest import FIXTURES, reference


@pytest.fixture
def model(load):
    return load(FIXTURES / "glm_moe_dsa_mtp").model


def test_trim_forgets_exactly_the_tail(model):
    ids = reference("glm_moe_dsa_mtp")[0]["seq"]
    kv = KvCache(model.config, 48)
    expected = step(model, [(ids[:20], kv)])
    step(model, [([7, 7, 7], kv)])
    kv.trim(19)
    torch.testing.assert_close(step(model, [(ids[19:20], kv)]), expected, atol=1e-4, rtol=0)
    assert kv.length == 20


def test_a_clone_goes_its_own_way(model):
    ids = reference("glm_moe_dsa_mtp")[0]["seq"]
    kv = KvCache(model.config, 20)
    step(model, [(ids[:20], kv)])
    clone = kv.clone(capacity=48)
    kv.trim(3)
    step(model, [([9, 9, 9], kv)])
    fresh = KvCache(model.config, 48)
    expected = step(model, [(ids[:30], fresh)])
    torch.testing.assert_close(step(model, [(ids[20:30], clone)]), expected, atol=1e-4, rtol=0)
    assert (kv.length, clone.length, clone.capacity) == (6, 30, 48)


def test_the_mtp_layer_has_a_row_with_its_own_indexer_keys(model):
    config = model.config
    kv = KvCache(config, 8)
    row = kv.bind(config.num_layers)
    latents, rope_keys = torch.ones(2, config.kv_lora_rank), torch.ones(2, config.rope_head_dim)
    known = row.append(latents, rope_keys)
    assert [len(part) for part in known] == [2, 2]
    assert len(row.append_index(torch.ones(2, config.index_head_dim))) == 2
    assert kv.bind(2).index_keys is None  # a shared layer


def test_bytes_are_what_is_allocated(model):
    kv = KvCache(model.config, 100)
    allocated = sum(t.numel() * 4 for t in (kv.latents, kv.rope_keys, kv.index_keys))
    assert kv.bytes == KvCache.bytes_for(model.config, 100) == allocated


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda kv: kv.trim(3), "cannot trim"),
        (lambda kv: kv.trim(-1), "cannot trim"),
        (lambda kv: kv.advance(7), "full"),
        (lambda kv: kv.clone(1), "cannot hold"),
    ],
)
def test_misuse_is_an_error(model, action, message):
    kv = KvCache(model.config, 8)
    kv.advance(2)
    with pytest.raises(ValueError, match=message):
        action(kv)
    assert kv.length == 2
