"""Opening a snapshot: valid layouts load, broken ones are refused by name."""

import json
import os
import shutil

import pytest
import safetensors.torch
import torch

from errors import Refused
from snapshot.index import read_header, read_index
from snapshot.reader import FileReader
from tests.conftest import FIXTURES, read_json, reference
from tests.forward.test_forward import check

NAME = "glm_moe_dsa"


@pytest.fixture
def folder(tmp_path):
    """A writable copy of a fixture."""
    out = tmp_path / "snapshot"
    shutil.copytree(FIXTURES / NAME, out)
    return out


def tensors_of(folder):
    return safetensors.torch.load_file(folder / "model.safetensors")


def save(tensors, path):
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def split(folder, count, with_index):
    """Replace model.safetensors by `count` shards, with or without the index file."""
    tensors = tensors_of(folder)
    (folder / "model.safetensors").unlink()
    names, weight_map = sorted(tensors), {}
    for i in range(count):
        shard = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        part = names[i::count]  # the matrices of an expert end up in different files
        save({name: tensors[name] for name in part}, folder / shard)
        weight_map |= dict.fromkeys(part, shard)
    if with_index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


# --- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_index", [True, False])
def test_shards_with_and_without_an_index(folder, load, with_index):
    split(folder, 3, with_index)
    check(load(folder, cap=2).model, NAME)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_float_formats(folder, load, dtype):
    """BF16 converted to F32 is the same model; in F16 the fixture's logits move by less than 0.05."""
    tensors = {name: tensor.to(dtype) for name, tensor in tensors_of(folder).items()}
    save(tensors, folder / "model.safetensors")
    model = load(folder, cap=2).model
    if dtype == torch.float32:
        check(model, NAME)
    else:
        from tests.forward.test_forward import all_logits

        ref, expected = reference(NAME)
        torch.testing.assert_close(all_logits(model, ref["seq"]), expected["logits"], atol=0.05, rtol=0)


def test_a_float32_router_in_a_bfloat16_model(folder, load):
    """transformers keeps gate.weight in F32 when it saves a BF16 model again."""
    tensors = tensors_of(folder)
    for name in tensors:
        if name.endswith("mlp.gate.weight"):
            tensors[name] = tensors[name].float()
    save(tensors, folder / "model.safetensors")
    check(load(folder).model, NAME)


def test_tied_embeddings(folder, load):
    """Without lm_head.weight and with tie_word_embeddings the head is the embedding."""
    from tests.forward.test_forward import all_logits

    tensors = tensors_of(folder)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save(tensors, folder / "model.safetensors")
    untied = all_logits(load(folder).model, [1, 2, 3])
    del tensors["lm_head.weight"]
    save(tensors, folder / "model.safetensors")
    change(folder, tie_word_embeddings=True)
    torch.testing.assert_close(all_logits(load(folder).model, [1, 2, 3]), untied, atol=1e-5, rtol=1e-5)


def test_an_expert_is_one_read_if_its_matrices_are_adjacent(folder, load):
    disk = load(folder).model.experts.disk
    assert {len(layout.ranges) for layout in disk.layouts.values()} == {1}
    split(folder, 3, with_index=False)
    disk = load(folder).model.experts.disk
    assert {len(layout.ranges) for layout in disk.layouts.values()} == {3}


def test_a_symlinked_and_read_only_snapshot(folder, load, tmp_path, monkeypatch):
    """The hub cache holds links to blobs; nothing is ever opened for writing or created in a snapshot."""
    links = tmp_path / "links"
    links.mkdir()
    for path in folder.iterdir():
        os.symlink(path, links / path.name)
        os.chmod(path, 0o444)
    flags, plain = [], os.open
    monkeypatch.setattr(
        os, "open", lambda path, flag, *rest, **more: flags.append(flag) or plain(path, flag, *rest, **more)
    )
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    check(load(links).model, NAME)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert flags and not any(flag & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) for flag in flags)


# --- refused by name --------------------------------------------------------------------------------------------------


def change(folder, **fields):
    """Change config.json; a value of None deletes the key."""
    config = read_json(folder / "config.json") | fields
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))


def refused(load, folder, pattern):
    with pytest.raises(Refused, match=pattern) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_a_missing_or_empty_folder(load, tmp_path):
    refused(load, tmp_path / "absent", "absent: no such folder")
    refused(load, tmp_path, r"config\.json: no such file")


def test_no_weights(load, folder):
    (folder / "model.safetensors").unlink()
    refused(load, folder, r"holds no \*\.safetensors")


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("with_index", [True, False])
def test_a_missing_shard(load, folder, number, with_index):
    split(folder, 3, with_index)
    (folder / f"model-{number:05d}-of-00003.safetensors").unlink()
    refused(load, folder, rf"model-{number:05d}-of-00003\.safetensors")


def test_a_missing_tensor_layer_and_expert(load, folder):
    tensors = tensors_of(folder)
    for name in ("model.layers.2.self_attn.o_proj.weight", "model.layers.3.mlp.experts.7.up_proj.weight"):
        save({n: t for n, t in tensors.items() if n != name}, folder / "model.safetensors")
        refused(load, folder, f"tensor {name} is missing")
    save({n: t for n, t in tensors.items() if not n.startswith("model.layers.3.")}, folder / "model.safetensors")
    refused(load, folder, "layer 3 has no tensors")


def test_a_shape_that_contradicts_config_json(load, folder):
    change(folder, moe_intermediate_size=16)
    refused(load, folder, r"shape \[.*\], config\.json asks for")


def test_an_index_that_points_to_the_wrong_file(load, folder):
    split(folder, 2, with_index=True)
    listing = folder / "model.safetensors.index.json"
    weight_map = read_json(listing)["weight_map"]
    weight_map["model.norm.weight"] = next(f for f in weight_map.values() if f != weight_map["model.norm.weight"])
    listing.write_text(json.dumps({"weight_map": weight_map}))
    refused(load, folder, r"says model\.norm\.weight is in")


def test_the_same_name_in_two_files(load, folder):
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    refused(load, folder, r"is in both a\.safetensors and other\.safetensors")


@pytest.mark.parametrize("delta", [-1, -4096, 1, 4096])
def test_a_file_shorter_or_longer_than_its_header_says(load, folder, delta):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:delta] if delta < 0 else data + b"\0" * delta)
    refused(load, folder, rf"model\.safetensors: is {'shorter' if delta < 0 else 'longer'} than its header says")


def test_a_file_that_shrinks_while_it_is_read(folder, load):
    """The file shrinks after its headers were read: the read is refused and leaks no expert slot."""
    loaded = load(folder, cap=1)
    experts = loaded.model.experts
    os.truncate(folder / "model.safetensors", 600_000)
    with (
        pytest.raises(Refused, match="inside expert 7 of layer 4; download it again"),
        experts.request(4, {7: 1}) as asked,
    ):
        list(asked.ready(0, 1))
    experts.check()


@pytest.mark.parametrize("data", [b"", b"\x00\x01", b"\xff" * 8 + b"{}", (4).to_bytes(8, "little") + b"nope"])
def test_a_file_that_is_no_safetensors(tmp_path, data):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with pytest.raises(Refused, match=r"bad\.safetensors"):
        read_header(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "does not fill"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, "impossible"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}, "impossible"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, "gap"),
        ({"dtype": "F32", "shape": [1]}, "lacks"),
        ("F32", "lacks"),
    ],
)
def test_malformed_header_entries_are_refused(tmp_path, fields, message):
    header = json.dumps({"a.weight": fields}).encode()
    path = tmp_path / "bad.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    with pytest.raises(Refused, match=rf"tensor a\.weight.*{message}"):
        read_header(path)


def test_an_unsupported_dtype(load, folder):
    tensors = tensors_of(folder)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    save(tensors, folder / "model.safetensors")
    refused(load, folder, r"model\.norm\.weight has dtype F8_E4M3, expected BF16, F16, F32")


def test_unused_tensors_are_ignored(load, folder):
    """An unsupported dtype matters only on a tensor that is needed."""
    tensors = tensors_of(folder) | {"rotary.inv_freq": torch.ones(3, dtype=torch.int64)}
    save(tensors, folder / "model.safetensors")
    check(load(folder).model, NAME)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"num_attention_heads": -4}, "num_attention_heads is -4"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"model_type": "gpt2"}, "model_type is 'gpt2', this engine knows .*glm_moe_dsa"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.quant_method is 'gptq'"),
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "quantization_config.fmt is 'e5m2'"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}, "weight_block_size is"),
        ({"quantization_config": "fp8"}, "quantization_config must be an object"),
        (
            {"rope_parameters": {"rope_type": "linear"}},
            "rope_type is 'linear', this engine computes only 'default' or 'y",
        ),
        ({"rope_parameters": {"rope_theta": "big"}}, "rope_theta is 'big'"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7"),
        ({"n_group": 3}, "n_group is 3"),
        ({"topk_group": 2}, "topk_group is 2"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types must be a list of 5"),
        ({"indexer_types": ["shared"] * 5}, "must begin with full"),
        ({"eos_token_id": [511, "512"]}, "eos_token_id holds '512', expected token ids"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps is 'tiny'"),
    ],
)
def test_invalid_config_values_are_refused(load, folder, fields, message):
    change(folder, **fields)
    refused(load, folder, rf"config\.json: .*{message}")


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff", "[" * 100_000])
def test_a_config_that_is_no_json_object(load, folder, text):
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    refused(load, folder, r"config\.json: (is not valid JSON|must hold a JSON object)")


# --- alternative spellings of config.json --------------------------------------------------------------------


def config_of(folder, **fields):
    from snapshot.config_file import read_config

    change(folder, **fields)
    return read_config(folder)[0]


def test_the_schedule_of_glm_5_2(folder):
    """index_topk_freq 4 and index_skip_topk_offset 3 over 78 layers: full at 0, 1, 2, 6, 10, ... 74."""
    fields = dict(indexer_types=None, index_topk_freq=4, index_skip_topk_offset=3)
    config = config_of(folder, num_hidden_layers=78, mlp_layer_types=None, first_k_dense_replace=3, **fields)
    full = [i for i, kind in enumerate(config.indexer_types) if kind == "full"]
    assert full == [0, 1, 2, *range(6, 75, 4)] and len(full) == 21
    assert config.mlp_types == ("dense",) * 3 + ("sparse",) * 75


def test_without_a_schedule_every_layer_is_full(folder):
    config = config_of(folder, indexer_types=None, index_topk_freq=None, index_skip_topk_offset=None)
    assert config.indexer_types == ("full",) * 5


@pytest.mark.parametrize("pattern", ["FFSFS", ["full", "full", "shared", "full", "shared"]])
def test_index_topk_pattern_takes_precedence_over_the_schedule(folder, pattern):
    config = config_of(folder, indexer_types=None, index_topk_freq=1, index_topk_pattern=pattern)
    assert config.indexer_types == ("full", "full", "shared", "full", "shared")


def test_aliases_defaults_and_ignored_keys(folder):
    config = config_of(folder, n_routed_experts=None, num_experts=8, rope_parameters=None, rope_theta=5e5, head_dim=192)
    assert (config.num_experts, config.qk_head_dim) == (8, 24)
    assert config.rope.frequencies[1] == pytest.approx(5e5**-0.25)


def test_all_declared_stop_ids(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [511, 3]}))
    assert config_of(folder, eos_token_id=[511, 7]).stop_ids == (511, 7, 3)
    assert config_of(folder, eos_token_id=5).stop_ids == (5, 511, 3)


def test_header_offsets_agree_with_the_safetensors_library(folder):
    """Every tensor read at the offset this engine computed equals what the library reads."""
    index, expected, reader = read_index(folder), tensors_of(folder), FileReader()
    from snapshot.dense import read_float_tensor

    assert set(index.entries) == set(expected)
    for name, entry in index.entries.items():
        assert torch.equal(read_float_tensor(reader, entry), expected[name])
    reader.close()
