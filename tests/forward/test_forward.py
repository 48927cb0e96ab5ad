"""The forward pass against transformers' own numbers: logits, hidden states, routing, selections, greedy ids."""

import pytest
import torch

import forward.attention.mla
import forward.layers_forward
import forward.moe
import forward.router
import forward.step
from forward.kv_cache import make_kv_cache
from forward.step import step, step_all
from generate.decode import spec_decode
from generate.sampler import Sampler
from tests.conftest import ORACLES, reference, write_fused

TOLERANCE = 1e-3  # float32; the logits have a standard deviation near 3


def all_logits(model, ids, lengths=None):
    """Logits after each of ids, fed in parts of the given lengths (default: at once)."""
    kv = make_kv_cache(model.config, len(ids))
    start, out = 0, []
    for length in lengths or [len(ids)]:
        out.append(step_all(model, [(ids[start : start + length], kv)]))
        start += length
    assert start == len(ids) == kv.length
    return torch.cat(out)


def greedy(model, prompt, num_tokens):
    kv = make_kv_cache(model.config, len(prompt) + num_tokens)
    return list(spec_decode(model, kv, prompt, Sampler(), num_tokens))


def check(model, name):
    """Everything ref.json says of logits and greedy ids."""
    ref, tensors = reference(name)
    logits = all_logits(model, ref["seq"])
    torch.testing.assert_close(logits, tensors["logits"], atol=TOLERANCE, rtol=0)
    assert logits.argmax(-1).tolist() == ref["teacher"]["argmax"]
    log_p = logits.double().log_softmax(-1)
    best = log_p.max(-1).values
    following = log_p[:-1].gather(1, torch.tensor(ref["seq"][1:])[:, None])[:, 0]
    assert torch.allclose(best, torch.tensor(ref["teacher"]["logprob_argmax"]).double(), atol=TOLERANCE)
    assert torch.allclose(following, torch.tensor(ref["teacher"]["logprob_next"]).double(), atol=TOLERANCE)
    prompt, continuation = ref["greedy"]["prompt"], ref["greedy"]["continuation"]
    assert greedy(model, prompt, len(continuation)) == continuation


@pytest.mark.parametrize("name", ORACLES)
def test_logits_log_probabilities_and_greedy_ids(name, oracle_folder, load):
    check(load(oracle_folder(name)).model, name)


@pytest.mark.parametrize("name", [name for name in ORACLES if name != "glm_moe_dsa_fp8"])  # FP8 is published unfused
def test_fused_naming_is_the_same_model(name, oracle_folder, load, tmp_path):
    check(load(write_fused(oracle_folder(name), tmp_path / "fused")).model, name)


@pytest.mark.parametrize("name", ORACLES)
def test_hidden_states_of_every_layer(name, oracle_folder, load, monkeypatch):
    ref, tensors = reference(name)
    model, hidden = load(oracle_folder(name)).model, []
    plain = forward.layers_forward.layer_forward

    def recording(model, layer, weights, x, *more):
        hidden.append(x)
        return plain(model, layer, weights, x, *more)

    monkeypatch.setattr(forward.layers_forward, "layer_forward", recording)
    kv = make_kv_cache(model.config, len(ref["seq"]))
    [(_, last)] = forward.layers_forward.layers_forward(model, [(ref["seq"], kv)])
    expected = tensors["hidden"]
    torch.testing.assert_close(torch.stack([*hidden, last]), expected, atol=TOLERANCE, rtol=1e-4)


@pytest.mark.parametrize("name", ORACLES)
def test_routed_experts_and_weights(name, oracle_folder, load, monkeypatch):
    ref, _ = reference(name)
    model, routes = load(oracle_folder(name), LOOKAHEAD=0).model, []
    plain = forward.router.route

    def recording(config, weights, x):
        routes.append(plain(config, weights, x))
        return routes[-1]

    monkeypatch.setattr(forward.router, "route", recording)
    all_logits(model, ref["seq"])
    assert len(routes) == len(ref["routing"])
    for layer, (experts, weights) in zip(model.config.sparse_layers, routes, strict=True):
        for position, expected in ref["routing"][str(layer)].items():
            mine = dict(zip(experts[int(position)].tolist(), weights[int(position)].tolist(), strict=True))
            assert sorted(mine) == sorted(expected["experts"])
            for expert, weight in zip(expected["experts"], expected["weights"], strict=True):
                assert mine[expert] == pytest.approx(weight, abs=1e-4)


@pytest.mark.parametrize("name", [name for name in ORACLES if name != "glm_moe_dsa_dense"])
def test_dsa_selections(name, oracle_folder, load, monkeypatch):
    ref, _ = reference(name)
    model, chosen = load(oracle_folder(name)).model, {}
    plain = forward.attention.mla.select_positions

    def recording(config, layer, *rest):
        [chosen[layer]] = selections = plain(config, layer, *rest)
        return selections

    monkeypatch.setattr(forward.attention.mla, "select_positions", recording)
    all_logits(model, ref["seq"])
    full = [str(i) for i in range(model.config.num_layers) if model.config.has_own_indexer(i)]
    assert full == [layer for layer in ref["dsa_selected"] if int(layer) < model.config.num_layers]
    for layer in full:
        for position, expected in ref["dsa_selected"][layer].items():
            mine = [s for s in chosen[int(layer)][int(position)].tolist() if s >= 0]
            assert mine == sorted(expected)


# --- expert cache, prefill chunk and batch change speed, never tokens -------------------------------------------------


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("cap", [1, 2, 0])
def test_same_ids_at_every_cap(name, cap, oracle_folder, load):
    loaded = load(oracle_folder(name), cap=cap)
    config, counters = loaded.model.config, loaded.model.experts.counters
    num_layers = len(config.sparse_layers)
    assert loaded.plan.num_expert_slots == (cap or config.num_experts) * num_layers
    check(loaded.model, name)
    loaded.model.experts.check()
    if cap:
        assert counters.misses + counters.hits > 2 * config.num_experts * num_layers
        assert counters.misses > config.num_experts * num_layers


@pytest.mark.parametrize("cap", [1, 3, 5, 8])
@pytest.mark.parametrize("rows", [1, 40, 1000])
def test_expert_outputs_have_the_same_bits_in_any_order_of_reads(cap, rows, oracle_folder, load, monkeypatch):
    """Few outputs wait at a time, and a chunk requests each expert once."""
    ids = reference("glm_moe_dsa")[0]["seq"]
    uncapped = load(oracle_folder("glm_moe_dsa"), LOOKAHEAD=0).model
    expected = all_logits(uncapped, ids)
    requested = uncapped.experts.counters.misses  # by one chunk
    model = load(oracle_folder("glm_moe_dsa"), cap=cap, LOOKAHEAD=0).model
    counters = model.experts.counters
    monkeypatch.setattr(forward.moe, "OUTPUT_BYTES", 4 * model.config.hidden_size * rows)
    assert torch.equal(all_logits(model, ids), expected)
    assert (counters.hits, counters.misses) == (0, requested)
    cached = len(model.experts.cached)
    assert torch.equal(all_logits(model, ids), expected)
    assert counters.hits + counters.misses == 2 * requested
    # An expert slot for each, or one group: cached experts are used before they are evicted.
    if cap == 8 or rows == 1000:
        assert counters.hits == cached


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("chunk", [1, 2, 5, 11, 12, 13, 47, 48])
def test_same_logits_at_every_prefill_chunk(name, chunk, oracle_folder, load):
    ref, tensors = reference(name)
    model = load(oracle_folder(name), PREFILL_CHUNK=chunk).model
    logits = all_logits(model, ref["seq"])
    torch.testing.assert_close(logits, tensors["logits"], atol=TOLERANCE, rtol=0)
    assert greedy(model, ref["greedy"]["prompt"], 24) == ref["greedy"]["continuation"]


@pytest.mark.parametrize("name", ORACLES)
def test_one_token_at_a_time_equals_one_batch(name, oracle_folder, load):
    ref, tensors = reference(name)
    model = load(oracle_folder(name)).model
    logits = all_logits(model, ref["seq"], [1] * len(ref["seq"]))
    torch.testing.assert_close(logits, tensors["logits"], atol=TOLERANCE, rtol=0)
    assert logits.argmax(-1).tolist() == ref["teacher"]["argmax"]
    torch.testing.assert_close(all_logits(model, ref["seq"], [12, 1, 2, 20, 13]), logits, atol=TOLERANCE, rtol=0)


def test_sequences_in_one_batch_do_not_see_each_other(oracle_folder, load):
    """Three sequences of different lengths and prefixes in one forward pass, each with its own logits."""
    ref, tensors = reference("glm_moe_dsa")
    model = load(oracle_folder("glm_moe_dsa"), PREFILL_CHUNK=16).model
    ids = ref["seq"]
    caches = [make_kv_cache(model.config, 48) for _ in range(3)]
    step(model, [(ids[:20], caches[0])])
    batch = [(ids[20:33], caches[0]), (ids[:1], caches[1]), (ids[:30], caches[2])]
    last = step(model, batch)
    expected = tensors["logits"][[32, 0, 29]]
    torch.testing.assert_close(last, expected, atol=TOLERANCE, rtol=0)
    everything = step_all(model, [(ids[33:40], caches[0]), (ids[30:31], caches[2])])
    expected = torch.cat([tensors["logits"][33:40], tensors["logits"][30:31]])
    torch.testing.assert_close(everything, expected, atol=TOLERANCE, rtol=0)


def test_each_expert_is_requested_once_per_chunk(oracle_folder, load, monkeypatch):
    model = load(oracle_folder("glm_moe_dsa"), PREFILL_CHUNK=24).model
    requests, plain = [], model.experts.request

    def recording(layer, uses, rows):
        requests.append((layer, tuple(uses)))
        return plain(layer, uses, rows)

    monkeypatch.setattr(type(model.experts), "request", lambda self, *rest: recording(*rest))
    all_logits(model, reference("glm_moe_dsa")[0]["seq"])
    assert [layer for layer, _ in requests] == [1, 2, 3, 4] * 2  # two chunks of 24 rows
    assert all(list(experts) == sorted(set(experts)) for _, experts in requests)


def test_logits_are_computed_only_for_requested_rows(oracle_folder, load, monkeypatch):
    model, rows = load(oracle_folder("glm_moe_dsa"), PREFILL_CHUNK=10).model, []
    plain = forward.step.lm_head
    monkeypatch.setattr(forward.step, "lm_head", lambda model, hidden: rows.append(len(hidden)) or plain(model, hidden))
    step(model, [(list(range(30)), make_kv_cache(model.config, 30))])
    assert rows == [1]


def test_an_impossible_batch_is_refused_before_anything_runs(oracle_folder, load):
    model = load(oracle_folder("glm_moe_dsa")).model
    kv, other = make_kv_cache(model.config, 4), make_kv_cache(model.config, 4)
    for batch, message in [
        ([([1], other), ([1, 2, 3, 4, 5], kv)], "5 tokens do not fit a KV cache with room for 4"),
        ([([1], kv), ([2], kv)], "twice"),
        ([([1], kv), ([], other)], "no tokens"),
    ]:
        with pytest.raises(ValueError, match=message):
            step(model, batch)
    assert kv.length == other.length == 0 and model.experts.counters.misses == 0


def test_a_container_without_any_indexer_runs_dense_with_a_warning(oracle_folder, load, tmp_path):
    """As published containers: within index_topk positions nothing changes; an incomplete indexer is refused."""
    import safetensors.torch

    from errors import Refused

    ref, tensors = reference("glm_moe_dsa_dense")
    source = oracle_folder("glm_moe_dsa_dense")
    weights = safetensors.torch.load_file(source / "model.safetensors")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    bare = {name: tensor for name, tensor in weights.items() if ".indexer." not in name}
    safetensors.torch.save_file(bare, tmp_path / "model.safetensors")
    loaded = load(tmp_path)
    assert [n for n in loaded.notices if n.startswith("[DSA]")]
    torch.testing.assert_close(all_logits(loaded.model, ref["seq"]), tensors["logits"], atol=TOLERANCE, rtol=0)

    del weights["model.layers.1.self_attn.indexer.k_norm.bias"]
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(Refused, match=r"indexer is incomplete.*layers\.1\.self_attn\.indexer\.k_norm\.bias"):
        load(tmp_path)
