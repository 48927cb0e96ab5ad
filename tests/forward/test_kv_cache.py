"""KV cache: append, trim, clone, and the MTP layer."""

import pytest
import torch

from forward.kv_cache import GqaKvCache, kv_cache_bytes, make_kv_cache
from forward.step import step
from tests.conftest import FIXTURES, reference


@pytest.fixture
def model(load):
    return load(FIXTURES / "glm_moe_dsa_mtp").model


def test_trim_drops_exactly_the_tail(model):
    ids = reference("glm_moe_dsa_mtp")[0]["seq"]
    kv = make_kv_cache(model.config, 48)
    expected = step(model, [(ids[:20], kv)])
    step(model, [([7, 7, 7], kv)])
    kv.trim(19)
    torch.testing.assert_close(step(model, [(ids[19:20], kv)]), expected, atol=1e-4, rtol=0)
    assert kv.length == 20


def test_a_clone_is_independent(model):
    ids = reference("glm_moe_dsa_mtp")[0]["seq"]
    kv = make_kv_cache(model.config, 20)
    step(model, [(ids[:20], kv)])
    clone = kv.clone(capacity=48)
    kv.trim(3)
    step(model, [([9, 9, 9], kv)])
    fresh = make_kv_cache(model.config, 48)
    expected = step(model, [(ids[:30], fresh)])
    torch.testing.assert_close(step(model, [(ids[20:30], clone)]), expected, atol=1e-4, rtol=0)
    assert (kv.length, clone.length, clone.capacity) == (6, 30, 48)


def test_the_mtp_layer_has_latents_and_index_keys_of_its_own(model):
    config = model.config
    kv = make_kv_cache(config, 8)
    latents, rope_keys = torch.ones(2, config.kv_lora_rank), torch.ones(2, config.rope_head_dim)
    cached = kv.append(config.num_layers, latents, rope_keys)
    assert [len(part) for part in cached] == [2, 2]
    assert len(kv.append_index(config.num_layers, torch.ones(2, config.index_head_dim))) == 2
    assert 2 not in kv.index_rows  # a shared layer


def test_gqa_holds_keys_and_values(load):
    config = load(FIXTURES / "mixtral").config
    kv = make_kv_cache(config, 8)
    assert isinstance(kv, GqaKvCache) and [tensor.shape[2] for tensor in kv.tensors] == list(config.kv_widths)
    keys, values = (torch.full((2, width), value) for width, value in zip(config.kv_widths, (1.0, 2.0), strict=True))
    cached = kv.append(1, keys, values)
    assert torch.equal(cached[0], keys) and torch.equal(cached[1], values)
    assert torch.equal(kv.keys[1, :2], keys) and torch.equal(kv.values[1, :2], values)


def test_num_bytes_are_those_allocated(model):
    kv = make_kv_cache(model.config, 100)
    allocated = sum(t.numel() * 4 for t in (kv.latents, kv.rope_keys, kv.index_keys))
    assert sum(t.nbytes for t in kv.tensors) == kv_cache_bytes(model.config, 100) == allocated


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda kv: kv.trim(3), "cannot trim"),
        (lambda kv: kv.trim(-1), "cannot trim"),
        (lambda kv: kv.advance(7), "full"),
        (lambda kv: kv.clone(1), "cannot copy"),
    ],
)
def test_misuse_is_an_error(model, action, message):
    kv = make_kv_cache(model.config, 8)
    kv.advance(2)
    with pytest.raises(ValueError, match=message):
        action(kv)
    assert kv.length == 2
