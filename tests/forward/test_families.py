"""Every model type and naming: equality with transformers, modes, batches, draft tokens, costs and conversion."""

import json
import shutil
import signal
from dataclasses import replace

import pytest
import safetensors.torch
import torch

import colibri
import forward.router
from bench import cost
from forward.kv_cache import make_kv_cache
from forward.mtp import mtp, mtp_logits
from forward.step import step_all
from generate.decode import DecodeCounters, spec_decode
from generate.draft import Drafter
from generate.draft_length import DraftLength
from generate.engine import Engine
from generate.proposers import MtpProposer, draft_by_mtp
from generate.sampler import Sampler
from generate.score import ScoreRequest, score_requests
from tests.conftest import FAMILIES, FIXTURES, read_json, reference, write_fused
from tests.forward.test_forward import TOLERANCE, all_logits, check
from tests.generate.test_mtp import layers_forward_of
from tests.scripts.test_convert import dequantized
from tests.scripts.test_convert import run as convert

MTP = ("glm_moe_dsa_mtp", "glm4_moe", "deepseek_v3")
NEAR = 0.15  # error of 8 bits in logits, whose standard deviation is near 3: 0.02 to 0.11
# gpt_oss is fused wherever it is found, and published as MXFP4; FP8 is found under hub names alone.
OTHER_NAMING = {"gpt_oss": ("mxfp4",), "glm_moe_dsa_fp8": ()}
NAMINGS = [(name, naming) for name in FAMILIES for naming in ("hub", *OTHER_NAMING.get(name, ("fused",)))]


@pytest.fixture
def folder(tmp_path):
    """folder(name, naming) -> a snapshot that is named so."""

    def named(name, naming):
        if naming == "fused":
            return write_fused(FIXTURES / name, tmp_path / "fused")
        if naming == "mxfp4":
            shutil.copy(
                FIXTURES / name / "ref_glm.json", shutil.copytree(FIXTURES / "gpt_oss_mxfp4", tmp_path / "mxfp4")
            )
            return tmp_path / "mxfp4"
        return FIXTURES / name

    return named


# --- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize(("name", "naming"), NAMINGS)
def test_logits_log_probabilities_and_greedy_ids(folder, load, name, naming, kernels):
    check(load(folder(name, naming), KERNELS=kernels).model, name)


@pytest.mark.parametrize(("name", "naming"), NAMINGS)
def test_one_expert_slot_a_layer_gives_the_same_ids(folder, load, name, naming):
    loaded = load(folder(name, naming), cap=1)
    check(loaded.model, name)
    loaded.model.experts.check()
    assert loaded.plan.num_expert_slots == len(loaded.config.sparse_layers)
    assert loaded.model.experts.counters.misses > loaded.config.num_experts


@pytest.mark.parametrize("name", FAMILIES)
def test_routed_experts_and_weights(load, monkeypatch, name):
    ref, _ = reference(name)
    model, routes, plain = load(FIXTURES / name, LOOKAHEAD=0).model, [], forward.router.route

    def recording(*arguments):
        routes.append(plain(*arguments))
        return routes[-1]

    monkeypatch.setattr(forward.router, "route", recording)
    all_logits(model, ref["seq"])
    assert [str(layer) for layer in model.config.sparse_layers] == list(ref["routing"])
    for (experts, weights), layer in zip(routes, ref["routing"].values(), strict=True):
        for position, expected in layer.items():
            mine = dict(zip(experts[int(position)].tolist(), weights[int(position)].tolist(), strict=True))
            assert mine == pytest.approx(dict(zip(expected["experts"], expected["weights"], strict=True)), abs=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_the_same_bits_in_any_batch(load, name):
    """At once, one at a time, in uneven chunks, and beside another sequence."""
    model, ids = load(FIXTURES / name, PREFILL_CHUNK=20).model, reference(name)[0]["seq"]
    expected = all_logits(model, ids)
    for lengths in ([1] * 48, [12, 1, 2, 20, 13]):
        assert torch.equal(all_logits(model, ids, lengths), expected)
    caches = [make_kv_cache(model.config, 48) for _ in range(2)]
    both = step_all(model, [(ids, caches[0]), (ids[:7], caches[1])])
    assert torch.equal(both, torch.cat([expected, expected[:7]]))


MISREAD = {  # fields of a misread config.json, on the fixture whose logits show it
    "mixtral": [dict(normalize_weights=False), dict(rope_interleaved=True), dict(router="sigmoid")],
    "qwen3_moe": [dict(normalize_weights=False), dict(sliding_windows=(0, 0, 20, 0))],
    "olmoe": [dict(normalize_weights=True), dict(num_active_experts=3)],
    "glm4_moe": [dict(rope_interleaved=True), dict(routed_scaling=1.0), dict(nope_head_dim=0, rope_head_dim=16)],
    "deepseek_v3": [dict(num_groups=1, num_active_groups=1), dict(rope_interleaved=False)],
    "deepseek_v3_yarn": [dict(score_factor=1.0), dict(factor=1.0), dict(rope_interleaved=True)],
    "deepseek_v32": [dict(index_rope_interleaved=True), dict(index_topk=48), dict(score_factor=1.0)],
    "glm4_moe_lite": [dict(routed_scaling=1.0), dict(num_shared_experts=0)],
    "deepseek_v2": [dict(normalize_weights=True), dict(score_factor=1.0), dict(rope_interleaved=False)],
    "gpt_oss": [
        dict(sliding_windows=(0,) * 4),
        dict(sliding_windows=(17, 0, 17, 0)),
        dict(swiglu_limit=1e3),
        dict(swiglu_alpha=1.0),
    ],
}


@pytest.mark.parametrize(("name", "mistake"), [(name, one) for name in MISREAD for one in MISREAD[name]], ids=str)
def test_the_fixtures_show_a_misread_config(load, name, mistake):
    model, (ref, tensors) = load(FIXTURES / name).model, reference(name)
    of_rope = {key: mistake.pop(key) for key in ("score_factor", "factor") if key in mistake}
    config = replace(model.config, rope=replace(model.config.rope, **of_rope), **mistake)
    if "num_shared_experts" in mistake:
        layers = [replace(layer, mlp=replace(layer.mlp, shared=None)) for layer in model.weights.layers[1:]]
        model = replace(model, weights=replace(model.weights, layers=(model.weights.layers[0], *layers)))
    if "router" in mistake:
        bias = torch.zeros(config.num_experts)
        layers = [replace(layer, mlp=replace(layer.mlp, router_bias=bias)) for layer in model.weights.layers]
        model = replace(model, weights=replace(model.weights, layers=tuple(layers)))
    if "rope_head_dim" in mistake:
        frequencies = tuple(10000.0 ** (-j / 8) for j in range(8))
        config = replace(config, rope=replace(config.rope, frequencies=frequencies))
    logits = all_logits(replace(model, config=config), ref["seq"])
    assert (logits - tensors["logits"]).abs().max() > 20 * TOLERANCE


# --- the modes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "naming"), NAMINGS)
def test_every_mode(folder, monkeypatch, capsys, tmp_path, name, naming):
    """The check, teacher forcing, SCORE and REPLAY, as colibri.py does them."""
    ref, _ = reference(name)
    seq, log_p = ref["seq"], ref["teacher"]["logprob_next"]
    (tmp_path / "requests").write_text(f"40 8 {' '.join(map(str, seq))}\n12 5 {' '.join(map(str, seq[:17]))}\n")
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("SNAP", str(folder(name, naming)))
    monkeypatch.setenv("USAGE", "0")
    said = []
    for variable, value in (("DRAFT", "auto"), ("TF", "1"), ("SCORE", str(tmp_path / "requests")), ("REPLAY", "1")):
        monkeypatch.setenv(variable, value)
        assert colibri.main([]) == 0
        said.append(capsys.readouterr().out)
        monkeypatch.delenv(variable)
    signal.signal(signal.SIGTERM, handler)
    assert said[0].endswith("oracle: 24/24 tokens equal\n")
    assert "PREFILL (teacher-forcing): 36/36 positions equal" in said[1]
    assert said[3].startswith("REPLAY decode: 24 token in ")
    lines = [line.split() for line in said[2].splitlines()]
    assert [float(line[0]) for line in lines] == pytest.approx([sum(log_p[39:]), sum(log_p[11:16])], abs=1e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_scores_of_many_requests_equal_those_of_one(load, name):
    model, (ref, _) = load(FIXTURES / name, cap=2).model, reference(name)
    seq, log_p, best = ref["seq"], ref["teacher"]["logprob_next"], ref["teacher"]["argmax"]
    cuts = [(12, 20), (12, 13), (30, 48), (1, 4), (47, 48)]
    requests = [ScoreRequest(tuple(seq[:start]), tuple(seq[start:stop])) for start, stop in cuts]
    for index, score in score_requests(model, requests, 100):
        start, stop = cuts[index]
        assert score.logprob == pytest.approx(sum(log_p[start - 1 : stop - 1]), abs=TOLERANCE)
        assert score.greedy == (best[start - 1 : stop - 1] == seq[start:stop])


@pytest.mark.parametrize("name", FAMILIES)
def test_sequences_of_one_batch(load, name):
    """Greedy sequences equal those of transformers; a sampled one is the same alone and in the batch."""
    model, (ref, _) = load(FIXTURES / name, cap=3).model, reference(name)
    prompt, continuation = ref["greedy"]["prompt"], ref["greedy"]["continuation"]
    engine = Engine(model)
    rows, _ = engine.generate_batch(prompt, num_samples=2, max_tokens=10, temperature=0)
    ends = [i for i, token in enumerate(continuation[:10]) if token in model.config.stop_ids]
    assert rows == [prompt + continuation[: (ends or [10])[0]]] * 2
    sampled, _ = engine.generate_batch(prompt, num_samples=3, max_tokens=10, temperature=1.0, seed=3)
    alone, _ = engine.generate_batch(prompt, num_samples=1, max_tokens=10, temperature=1.0, seed=3)
    assert sampled[0] == alone[0] and len(set(map(tuple, sampled))) > 1


# --- draft tokens -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("name", MTP)
def test_the_mtp_layer_equals_transformers(load, name, kernels):
    model, (ref, tensors) = load(FIXTURES / name, DRAFT="auto", KERNELS=kernels).model, reference(name)
    kv = make_kv_cache(model.config, 60)
    rows = torch.cat([hidden for _, hidden in layers_forward_of(model, ref["seq"], kv)])
    s = mtp(model, [(ref["seq"][1:], kv)], rows[:-1])
    torch.testing.assert_close(mtp_logits(model, s), tensors["mtp_logits"], atol=TOLERANCE, rtol=0)
    assert mtp_logits(model, s).argmax(-1).tolist() == ref["mtp"]["argmax"]
    for position, expected in ref["mtp"]["chained_drafts"].items():
        known = int(position) + 1
        kv = make_kv_cache(model.config, 60)
        source = MtpProposer(model, kv)
        for chunk, hidden in layers_forward_of(model, ref["seq"][:known], kv):
            source.observe(chunk, *chunk.segments, hidden)
        wanted = [(source, ref["seq"][: known + 1], len(expected["draft"]))]
        assert draft_by_mtp(model, wanted) == [expected["draft"]]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("draft", ["1", "3"])
def test_drafts_change_no_token(load, name, draft):
    """Of the MTP layer where there is one, else of n-grams."""
    model, (ref, _) = load(FIXTURES / name, DRAFT=draft).model, reference(name)
    prompt, continuation, counters = ref["greedy"]["prompt"], ref["greedy"]["continuation"], DecodeCounters()
    kv = make_kv_cache(model.config, 60)
    drafter = Drafter(model, DraftLength(draft))
    ids = list(spec_decode(model, kv, prompt, Sampler(), 24, (), drafter, None, counters))
    assert ids == continuation
    assert (model.weights.mtp is not None) == (name in MTP)
    if name in MTP:
        assert counters.proposed > 0


@pytest.mark.parametrize("name", ["deepseek_v3_yarn", "deepseek_v32", "glm4_moe_lite"])
def test_an_mtp_layer_made_of_the_last_one_drafts_and_changes_no_token(load, tmp_path, name):
    """transformers has none for these: no numbers to compare, but the names, the wiring and the tokens."""
    source, gen = tmp_path / "source", torch.Generator().manual_seed(1)
    shutil.copytree(FIXTURES / name, source)
    config = read_json(source / "config.json")
    D, last = config["hidden_size"], f"model.layers.{config['num_hidden_layers']}."
    tensors = safetensors.torch.load_file(source / "model.safetensors")
    before = f"model.layers.{config['num_hidden_layers'] - 1}."
    tensors |= {key.replace(before, last): value.clone() for key, value in tensors.items() if key.startswith(before)}
    for key in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{last}{key}.weight"] = torch.ones(D)
    tensors[last + "eh_proj.weight"] = torch.randn(D, 2 * D, generator=gen) * D**-0.5
    safetensors.torch.save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    assert convert(source, tmp_path / "out", "--experts", 16, "--dense", 16, "--embeddings", 16, "--mtp", 8) == 0
    prompt, continuation = (reference(name)[0]["greedy"][key] for key in ("prompt", "continuation"))
    for folder in (source, tmp_path / "out"):
        model, counters = load(folder, DRAFT=2).model, DecodeCounters()
        kv = make_kv_cache(model.config, 60)
        drafter = Drafter(model, DraftLength("2"))
        assert list(spec_decode(model, kv, prompt, Sampler(), 24, (), drafter, None, counters)) == continuation
        assert model.weights.mtp is not None and counters.proposed > 20
        assert (model.weights.mtp.layer.indexer is not None) == (name == "deepseek_v32")


# --- the cost model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_costs_are_those_of_the_weights(load, name):
    """FLOPs are those of the stored matrices, a prefill's the sum of its tokens'; KV bytes are those allocated."""
    loaded = load(FIXTURES / name)
    config, dense = loaded.config, loaded.dense
    selection = [".wq_b.", ".indexer.weights_proj."]
    not_counted = (dense.embed_name, dense.head_name)
    counted = sum(
        stored.rows * stored.columns
        for stored in dense.matrices.values()
        if stored.name not in not_counted and not any(part in stored.name for part in selection)
    )
    routers = len(config.sparse_layers) * config.num_experts * config.hidden_size
    layout = loaded.disk.layouts[config.sparse_layers[0], 0]
    of_expert = sum(matrix.rows * matrix.columns for matrix in layout.matrices)
    experts = len(config.sparse_layers) * config.num_active_experts * of_expert
    assert cost.matrix_weights(config, dense.has_indexer) == counted + routers + experts
    for length in (1, 13, 40):
        head = 2 * config.vocab_size * config.hidden_size
        tokens = [cost.decode_flops(config, context, dense.has_indexer) - head for context in range(1, length + 1)]
        assert cost.prefill_flops(config, length, dense.has_indexer) == sum(tokens) + head
    kv = make_kv_cache(config, 50)
    num_bytes = 4 * sum(tensor.numel() for tensor in kv.tensors)
    of_mtp = sum(config.kv_widths) + (config.index_head_dim if config.indexer_types else 0)
    assert 50 * (cost.kv_bytes_per_token(config, dense.has_indexer) + 4 * of_mtp) == num_bytes


# --- conversion -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "naming"), NAMINGS)
def test_a_container_of_eight_bits(folder, load, tmp_path, name, naming):
    """It equals the model of its dequantized weights, and is near the original."""
    out = tmp_path / "out"
    assert convert(folder(name, naming), out, "--experts", 8, "--dense", 8, "--verify") == 0
    ids, loaded = reference(name)[0]["seq"], load(out, cap=2, EXACT=1)
    assert {fmt.name for fmt in loaded.disk.formats()} == {"mxfp4" if naming == "mxfp4" else "int8-g64"}
    logits, plain = all_logits(loaded.model, ids), load(dequantized(out, tmp_path / "plain"))
    torch.testing.assert_close(logits, all_logits(plain.model, ids), atol=1e-4, rtol=0)
    # At later positions another key or expert is selected now and then.
    near = (logits - reference(name)[1]["logits"])[:8]
    assert near.abs().median() < NEAR


def test_fewer_bits_than_mxfp4_has(folder, load, tmp_path):
    assert convert(folder("gpt_oss", "mxfp4"), tmp_path / "out", "--experts", 3, "--dense", 8, "--verify") == 0
    ids, loaded = reference("gpt_oss")[0]["seq"], load(tmp_path / "out", EXACT=1)
    assert {fmt.name for fmt in loaded.disk.formats()} == {"int3-g64"}
    plain = load(dequantized(tmp_path / "out", tmp_path / "plain"))
    torch.testing.assert_close(all_logits(loaded.model, ids), all_logits(plain.model, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("name", "naming"), NAMINGS)
def test_quantized_at_load(folder, load, name, naming):
    """MXFP4 stays as stored, with a notice."""
    loaded = load(folder(name, naming), cap=2, expert_bits=8, dense_bits=8, EXACT=1)
    near = (all_logits(loaded.model, reference(name)[0]["seq"]) - reference(name)[1]["logits"])[:8]
    assert 0 < near.abs().median() < NEAR
    kept = [line for line in loaded.notices if "expert_bits 8 has no effect on weights that are stored as" in line]
    assert len(kept) == (naming == "mxfp4")


@pytest.mark.parametrize(("name", "naming"), [(name, "hub") for name in FAMILIES] + [("gpt_oss", "mxfp4")])
def test_a_container_of_sixteen_bits_is_the_model_itself(folder, load, tmp_path, name, naming):
    bits = [word for role in ("experts", "dense", "embeddings", "mtp") for word in (f"--{role}", 16)]
    assert convert(folder(name, naming), tmp_path / "out", "--verify", *bits) == 0
    check(load(tmp_path / "out", cap=1).model, name)
