"""MTP layers that are missing, incomplete, weakly quantized, or have their own embedding and head."""

import shutil

import pytest
import safetensors.torch

from forward.kv_cache import make_kv_cache
from forward.mtp import mtp, mtp_logits
from tests.conftest import FIXTURES, read_json
from tests.generate.test_mtp import NAME, REF, generate, hidden_rows


def without(folder, out, *names):
    """A copy of a snapshot without the tensors whose names contain one of `names`."""
    shutil.copytree(folder, out)
    tensors = safetensors.torch.load_file(out / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not any(part in name for part in names)}
    assert len(kept) < len(tensors)
    safetensors.torch.save_file(kept, out / "model.safetensors")
    return out


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ("model.layers.5.", "the snapshot has no multi-token-prediction layer"),
        ("layers.5.enorm", "tensor model.layers.5.enorm.weight of the multi-token-prediction layer is missing"),
        ("layers.5.mlp.experts.3.up", "tensor model.layers.5.mlp.experts.3.up_proj.weight of the"),
    ],
)
def test_an_incomplete_mtp_layer_is_a_notice_and_not_used(load, run_colibri, tmp_path, part, reason):
    folder = without(FIXTURES / NAME, tmp_path / "s", part)
    loaded = load(folder, DRAFT="auto")
    [notice] = [line for line in loaded.notices if line.startswith("[MTP]")]
    assert notice.startswith(f"[MTP] no draft tokens from the MTP layer: {reason}")
    assert loaded.model.weights.mtp is None
    assert not [line for line in load(folder, DRAFT=0).notices if line.startswith("[MTP]")]
    process = run_colibri(SNAP=folder, REPORT=tmp_path / "r.json")
    assert process.returncode == 0, process.stderr
    assert "MTP" not in read_json(tmp_path / "r.json")["draft_acceptance"]  # n/a, not 0 %


def test_an_indexer_of_its_own_is_not_needed(load, tmp_path):
    folder = without(FIXTURES / NAME, tmp_path / "s", "layers.5.self_attn.indexer")
    loaded = load(folder, DRAFT="auto")
    assert loaded.model.weights.mtp.layer.indexer is None
    ids, _, counters = generate(loaded.model, REF["greedy"]["prompt"], 24, draft="2")
    assert ids == REF["greedy"]["continuation"] and counters.proposed > 0


def test_its_own_embedding_and_head_are_used(load, tmp_path):
    """They differ from the model's: drafts change, the text does not."""
    shutil.copytree(FIXTURES / NAME, tmp_path / "s")
    tensors = safetensors.torch.load_file(tmp_path / "s" / "model.safetensors")
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    tensors["model.layers.5.shared_head.head.weight"] = head.roll(1, 0).contiguous()
    tensors["model.layers.5.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    safetensors.torch.save_file(tensors, tmp_path / "s" / "model.safetensors")
    model = load(tmp_path / "s", DRAFT="auto").model
    kv = make_kv_cache(model.config, 60)
    hidden = hidden_rows(model, kv, REF["seq"])
    s = mtp(model, [(REF["seq"][1:], kv)], hidden[:-1])
    assert mtp_logits(model, s).argmax(-1).tolist() == [(i + 1) % 512 for i in REF["mtp"]["argmax"]]
    assert generate(model, REF["greedy"]["prompt"], 24, draft="2")[0] == REF["greedy"]["continuation"]


def test_an_mtp_layer_in_int4_by_row_is_a_warning(tmp_path, load):
    from scripts.convert import main

    options = "--experts 16 --dense 16 --embeddings 16 --mtp 4 --group 0".split()
    assert main([str(FIXTURES / NAME), str(tmp_path / "out"), *options]) == 0
    loaded = load(tmp_path / "out", DRAFT="auto")
    assert any("one scale a row" in line for line in loaded.notices)
    ids, _, counters = generate(loaded.model, REF["greedy"]["prompt"], 24, draft="2")
    assert ids == REF["greedy"]["continuation"] and counters.proposed > 0
