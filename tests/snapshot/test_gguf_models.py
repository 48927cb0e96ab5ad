"""GGUF models: the files of one, config from metadata, tensors by the names of the family, and what they answer."""

import json
import re
import shutil
import struct
from dataclasses import fields

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from load.model import open_snapshot
from modes.reference import reference_path
from settings import Settings
from snapshot.config_file import read_config
from snapshot.dense import read_stored_weight
from snapshot.folder import snapshot_name
from snapshot.gguf_config import parse_config
from snapshot.gguf_files import read_model
from snapshot.gguf_index import make_index
from snapshot.opening import locate
from snapshot.reader import FileReader
from tests.conftest import FIXTURES, read_json
from tests.support.gguf_files import Typed, write_dequantized, write_gguf
from tests.support.gguf_models import REAL, encode, split_gguf, tensors_of, unpack_header, write_as_gguf
from tests.support.hostile import attempt, few, open_headers

WHOLE = "qwen3moe_q4_k_m"
HEADERS = [name for name in read_json(REAL / "sizes.json") if name != "qwen35moe_ud_q4_k"]
# Snapshots that a GGUF can hold: FP8 and MXFP4 are stored otherwise, YaRN of DeepSeek has two mscales.
FAMILIES = [
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa_mtp",
    "gpt_oss",
    "mixtral",
    "olmoe",
    "qwen3_moe",
]
EQUAL = "oracle: 24/24 tokens equal\n"


def refused(path, *patterns):
    line = attempt(lambda: open_headers(path))
    assert line, "nothing was refused"
    for pattern in patterns:
        assert pattern in line, line
    return line


def config_of(path):
    return parse_config(read_model(path))[0]


@pytest.fixture
def changed(tmp_path):
    """changed(family, metadata...) -> a snapshot as a GGUF."""

    def write(name, metadata=(), **options):
        return write_as_gguf(FIXTURES / name, tmp_path / "model.gguf", metadata, **options)

    return write


# --- files that llama.cpp wrote ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*HEADERS, WHOLE])
def test_config_is_that_of_the_hub(tmp_path, name):
    """The metadata of llama.cpp's converter leads to the config.json it was made from, and no tensor is left."""
    first = REAL / name / "model.gguf" if name == WHOLE else unpack_header(name, tmp_path / name)
    model = read_model(first)
    config, family = parse_config(model)
    expected, _ = read_config(REAL / name)
    different = {f.name for f in fields(config) if getattr(config, f.name) != getattr(expected, f.name)}
    different -= {"stop_ids"} if "gptoss" in name else set()  # the hub has three, the file one
    assert different == ({"rope_interleaved"} if "mixtral" in name else set())  # rows of q and k lie in pairs
    index = make_index(model, config, family)
    assert [name for name, entry in index.entries.items() if name == entry.name] == []
    # Every tensor of the model is found, up to the first of a type without kernels.
    refused(first, "which is not run yet; take a file of the model in BF16, F16 or F32")


def test_an_unknown_architecture_is_named(tmp_path):
    refused(unpack_header("qwen35moe_ud_q4_k", tmp_path / "x"), "'qwen35moe', this engine knows deepseek2, deepseek32,")


def test_a_real_file_dequantized(run_colibri, tmp_path):
    """A file of llama.cpp with its weights unpacked by the package gguf: tokens of transformers, from an expert on disk
    in three places, with native kernels and the reference, in the first mode and in teacher forcing."""
    pytest.importorskip("gguf", reason="the package gguf is missing; it dequantizes")
    path = write_dequantized(REAL / WHOLE / "model.gguf", tmp_path / "model.gguf")
    shutil.copy(REAL / WHOLE / "ref_glm.json", tmp_path)
    for variables in ({}, {"KERNELS": "reference"}, {"RAM_GB": "0.5"}):
        process = run_colibri(SNAP=path, **variables)
        assert process.stdout.decode().endswith(EQUAL), process.stderr
    assert b"36/36 positions equal" in run_colibri(SNAP=tmp_path, TF=1).stdout


# --- every family, end to end -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_a_gguf_answers_as_its_snapshot(run_colibri, oracle_folder, tmp_path, name):
    """Fixtures of transformers, written as llama.cpp's converter writes them: the same tokens and the same config."""
    folder = oracle_folder(name)
    path = write_as_gguf(folder, tmp_path / "model.gguf")
    ours, hub = config_of(path), read_config(folder)[0]
    free = {"rope_interleaved", "text_prefix", "model_type", "stop_ids"}
    assert {f.name for f in fields(ours) if getattr(ours, f.name) != getattr(hub, f.name)} <= free
    process = run_colibri(SNAP=path, REF=folder / "ref_glm.json")
    assert process.stdout.decode().endswith(EQUAL), process.stderr


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "glm4_moe"])
def test_scores_are_equal_to_the_last_bit(run_colibri, tmp_path, name):
    """Log-likelihoods of token ids: every weight is the one of the snapshot."""
    path = write_as_gguf(FIXTURES / name, tmp_path / "model.gguf")
    (tmp_path / "ids.txt").write_text("3 9 1 2 3 4 5 6 7 8 9 10 11 12\n1 2 300 301 302\n")
    hub, ours = (run_colibri(SNAP=snap, SCORE=tmp_path / "ids.txt").stdout for snap in (FIXTURES / name, path))
    assert len(hub.splitlines()) == 2 and ours == hub


def test_deepseek_v32_answers_as_its_snapshot(run_colibri, tmp_path):
    """YaRN with one mscale, as all published models have; indexer in every layer, rotary pairs in halves."""
    folder = shutil.copytree(FIXTURES / "deepseek_v32", tmp_path / "hub")
    config = read_json(folder / "config.json")
    config["rope_parameters"]["mscale"] = config["rope_parameters"]["mscale_all_dim"]
    (folder / "config.json").write_text(json.dumps(config))
    path = write_as_gguf(folder, tmp_path / "model.gguf")
    assert config_of(path).rope == read_config(folder)[0].rope
    hub, ours = (run_colibri(SNAP=snap, REF=folder / "ref_glm.json").stdout for snap in (folder, path))
    assert hub.startswith(b"reference: ") and hub == ours


# --- forms of the files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["file", "folder", "below", "any shard", "shards in a folder", "hub cache"])
def test_what_snap_may_name(run_colibri, tmp_path, form):
    """The file, the folder with it, any shard, the folder of a hub cache: one model each time."""
    folder = (
        tmp_path / "cache" / "models--org--OLMoE-GGUF" / "snapshots" / "0123abc" if form == "hub cache" else tmp_path
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = write_as_gguf(FIXTURES / "olmoe", folder / "OLMoE-BF16.gguf")
    (folder / "mmproj-F16.gguf").write_bytes(b"not read")
    snap = path
    if "shard" in form:
        snap = split_gguf(path, 3)
        snap = tmp_path if "folder" in form else snap.with_name("OLMoE-BF16-00003-of-00003.gguf")
    elif form == "folder":
        (tmp_path / "config.json").write_text("{}")  # as folders of GGUF on the hub have it
        snap = tmp_path
    elif form == "below":
        (tmp_path / "BF16").mkdir()
        path.rename(tmp_path / "BF16" / path.name)
        snap = tmp_path
    elif form == "hub cache":
        snap = folder.parents[1]
    process = run_colibri(SNAP=snap, REF=FIXTURES / "olmoe" / "ref_glm.json")
    assert process.stdout.decode().endswith(EQUAL), process.stderr
    assert b"[snapshot] OLMoE-BF16: olmoe" in process.stderr


def test_several_models_are_listed(tmp_path):
    """A folder with every quant of a repository."""
    for name in ("a-Q4_K_M.gguf", "a-Q8_0-00001-of-00002.gguf", "a-Q8_0-00002-of-00002.gguf"):
        (tmp_path / name).touch()
    refused(tmp_path, "holds 2 GGUF models; SNAP must name one of the files: a-Q4_K_M.gguf, a-Q8_0-00001-of-00002.gguf")


def test_missing_shards_are_named_by_number(changed):
    first = split_gguf(changed("olmoe"), 4)
    for number in (1, 3):
        first.with_name(f"model-0000{number}-of-00004.gguf").unlink()
    refused(first.with_name("model-00002-of-00004.gguf"), "2 of 4 shards of model are there, not number 1, 3;")
    refused(first.parent, "2 of 4 shards of model are there, not number 1, 3;")


def test_shards_of_other_models(changed):
    first = split_gguf(changed("olmoe"), 2)
    second = first.with_name("model-00002-of-00002.gguf")
    whole = second.read_bytes()
    shutil.copy(first, second)
    refused(first, "says that it is shard 1 of 2, its name 2 of 2")
    second.write_bytes(whole)
    first.rename(first.with_name("model.gguf"))
    refused(first.with_name("model.gguf"), "says that it is shard 1 of 2, its name a model in one file")
    write_gguf(second, {"split.no": 1, "split.count": 2}, encode({"token_embd.weight": torch.zeros(2, 2)}))
    first.with_name("model.gguf").rename(first)
    refused(first, "tensor token_embd.weight is in both")
    write_gguf(second, {"split.no": 1, "split.count": 2}, encode({"more": torch.zeros(2, 2)}))
    refused(first, "says the model has", "tensors, the files hold")


def test_a_snapshot_beside_a_gguf_is_read(tmp_path):
    """A folder with both forms: the snapshot, as before."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(FIXTURES / "olmoe" / name, tmp_path)
    write_as_gguf(FIXTURES / "olmoe", tmp_path / "a.gguf")
    assert locate(tmp_path) == tmp_path and attempt(lambda: open_headers(tmp_path)) is None
    # Safetensors that are no part of a snapshot: references of a model, an imatrix.
    (tmp_path / "model.safetensors").rename(tmp_path / "ref.safetensors")
    assert locate(tmp_path) == tmp_path / "a.gguf"


def test_another_file_is_named(tmp_path):
    (tmp_path / "x.txt").write_text("GGU")
    refused(tmp_path / "x.txt", "is a file, but no GGUF; it must name a GGUF file or the folder")


def test_names_of_models(tmp_path):
    assert snapshot_name(tmp_path / "GLM-4.6-UD-Q4_K_XL-00001-of-00005.gguf") == "GLM-4.6-UD-Q4_K_XL"
    write_as_gguf(FIXTURES / "olmoe", tmp_path / "a.gguf")
    assert reference_path(Settings.read([], {"SNAP": str(tmp_path / "a.gguf")})) == tmp_path / "ref_glm.json"


# --- tensors ----------------------------------------------------------------------------------------------------------


def weights_of(path, name):
    """A dense matrix as it lies in memory."""
    opened, reader = open_snapshot(Settings.read([], {"SNAP": str(path), "RAM_GB": "4"})), FileReader()
    try:
        stored = opened.dense.matrices[name]
        blocks = [
            read_stored_weight(reader, stored.slice_rows(i, min(i + 7, stored.rows))).dequantize()
            for i in range(0, stored.rows, 7)
        ]
        return read_stored_weight(reader, stored).dequantize(), torch.cat(blocks)
    finally:
        reader.close()
        opened.close()


@pytest.mark.parametrize("kv_b", ["split", "joined"])
def test_kv_b_whole_and_split(changed, kv_b):
    """Keys lie transposed in a tensor of their own, in files before 2025 with the values: the same matrix, also in the
    blocks of rows in which it is quantized at load."""
    old = {f"deepseek2.attention.{key}": value for key, value in (("key_length_mla", None), ("value_length_mla", None))}
    old |= {"deepseek2.attention.key_length": 24, "deepseek2.attention.value_length": 20}
    path = changed("deepseek_v3", old if kv_b == "joined" else {}, kv_b=kv_b)
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    expected = safetensors.torch.load_file(FIXTURES / "deepseek_v3" / "model.safetensors")[name].float()
    whole, by_rows = weights_of(path, name)
    assert torch.equal(whole, expected) and torch.equal(by_rows, expected)


def test_kv_b_of_two_types_is_float32(tmp_path):
    folder = FIXTURES / "deepseek_v3"
    path = write_as_gguf(folder, tmp_path / "model.gguf")
    tensors = tensors_of(folder)
    tensors = {name: t.half() if name.endswith("attn_v_b.weight") else t for name, t in tensors.items()}
    write_gguf(path, read_model(path).metadata, encode(tensors))
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    expected = safetensors.torch.load_file(folder / "model.safetensors")[name].float()
    assert (weights_of(path, name)[0] - expected).abs().max() < 1e-4  # of the values in float16


def test_kv_b_twice_and_wrong(changed):
    path = changed("deepseek_v3")
    tensors = tensors_of(FIXTURES / "deepseek_v3")
    metadata = read_model(path).metadata
    more = {"blk.0.attn_kv_b.weight": torch.zeros(4, 4)}
    write_gguf(path, metadata, encode(tensors | more))
    refused(path, "layer 0 has its kv_b twice, whole and split")
    tensors["blk.0.attn_k_b.weight"] = tensors["blk.0.attn_k_b.weight"].transpose(1, 2)
    write_gguf(path, metadata, encode(tensors))
    refused(path, "tensor blk.0.attn_k_b.weight has shape", "the metadata asks for")
    del tensors["blk.0.attn_k_b.weight"]
    write_gguf(path, metadata, encode(tensors))
    refused(path, "tensor blk.0.attn_k_b.weight is missing")


def test_fused_tensors(run_colibri, tmp_path):
    """Rows of queries, keys and values in one tensor; gate and up of all experts in one, as newer converters write."""
    folder = FIXTURES / "qwen3_moe"
    path = write_as_gguf(folder, tmp_path / "model.gguf")
    tensors = tensors_of(folder)
    for layer in range(4):
        prefix = f"blk.{layer}."
        tensors[prefix + "attn_qkv.weight"] = torch.cat([tensors.pop(f"{prefix}attn_{x}.weight") for x in "qkv"])
        if f"{prefix}ffn_gate_exps.weight" not in tensors:
            continue  # a dense layer
        gate_up = [tensors.pop(f"{prefix}ffn_{x}_exps.weight") for x in ("gate", "up")]
        tensors[prefix + "ffn_gate_up_exps.weight"] = torch.cat(gate_up, 1)
    write_gguf(path, read_model(path).metadata, encode(tensors))
    process = run_colibri(SNAP=path, REF=folder / "ref_glm.json")
    assert process.stdout.decode().endswith(EQUAL), process.stderr
    tensors["blk.0.attn_qkv.weight"] = tensors["blk.0.attn_qkv.weight"][:-1]
    write_gguf(path, read_model(path).metadata, encode(tensors))
    refused(path, "tensor blk.0.attn_qkv.weight has 127 rows, the metadata asks for 128")


def test_experts_one_by_one(run_colibri, tmp_path):
    """Files of Mixtral before April 2024: a tensor for each matrix of each expert."""
    folder = FIXTURES / "mixtral"
    path = write_as_gguf(folder, tmp_path / "model.gguf")
    tensors = {}
    for name, tensor in tensors_of(folder).items():
        match = re.fullmatch(r"(blk\.\d+\.ffn_\w+)_exps\.weight", name)
        tensors |= {f"{match[1]}.{i}.weight": t for i, t in enumerate(tensor)} if match else {name: tensor}
    write_gguf(path, read_model(path).metadata, encode(tensors))
    process = run_colibri(SNAP=path, REF=folder / "ref_glm.json")
    assert process.stdout.decode().endswith(EQUAL), process.stderr


def test_types_may_change_by_layer_and_matrix(run_colibri, tmp_path):
    """Gate in float32, down in float16 of one layer alone: every slice of an expert has its own type."""
    folder = FIXTURES / "qwen3_moe"
    path = write_as_gguf(folder, tmp_path / "model.gguf")
    tensors = tensors_of(folder)
    tensors["blk.3.ffn_gate_exps.weight"] = tensors["blk.3.ffn_gate_exps.weight"].float()
    tensors["blk.2.ffn_up_exps.weight"] = tensors["blk.2.ffn_up_exps.weight"].float()
    write_gguf(path, read_model(path).metadata, encode(tensors))
    process = run_colibri(SNAP=path, REF=folder / "ref_glm.json")
    assert process.stdout.decode().endswith(EQUAL), process.stderr


def test_messages_have_the_names_of_the_file(changed):
    """Missing tensors, shapes and layers, in the words of a GGUF."""
    refused(changed("qwen3_moe", drop=("blk.2.attn_q.weight",)), "model.gguf: tensor blk.2.attn_q.weight is missing")
    refused(changed("qwen3_moe", drop=("blk.2.ffn_down_exps.weight",)), "tensor blk.2.ffn_down_exps.weight is missing")
    missing = [f"blk.2.ffn_{word}_exps.weight" for word in ("gate", "up", "down")]
    refused(changed("qwen3_moe", drop=missing), "tensor blk.2.ffn_gate_exps.weight is missing")
    refused(changed("qwen3_moe", {"qwen3moe.block_count": 5}), "layer 4 has no tensors, blk.4.attn_norm.weight for one")
    refused(
        changed("qwen3_moe", {"qwen3moe.block_count": 3}), "holds tensors of layer 3, the metadata asks for 3 layers"
    )
    refused(changed("qwen3_moe", {"qwen3moe.expert_count": 4}), "ffn_gate_inp.weight has shape [8, 64], the metadata")
    refused(changed("qwen3_moe", drop=("token_embd.weight",)), "tensor token_embd.weight is missing")
    line = refused(changed("qwen3_moe", {"qwen3moe.embedding_length": None}), "qwen3moe.embedding_length is missing")
    assert "hidden_size" not in line


def test_unused_tensors_are_named(tmp_path):
    folder = FIXTURES / "olmoe"
    path = write_as_gguf(folder, tmp_path / "model.gguf")
    write_gguf(path, read_model(path).metadata, encode(tensors_of(folder) | {"blk.0.attn_q.scale": torch.zeros(1)}))
    opened = open_snapshot(Settings.read([], {"SNAP": str(path), "RAM_GB": "4"}))
    opened.close()
    notice = "a tensor has no place in the model of the metadata, not used: blk.0.attn_q.scale"
    assert f"[snapshot] {notice}" in opened.notices


# --- the traps of metadata --------------------------------------------------------------------------------------------


def test_defaults_are_those_of_llama_cpp(changed):
    """Keys that may be absent, and what is taken then; families of transformers have other defaults."""
    config = config_of(changed("olmoe", {"olmoe.rope.freq_base": None, "olmoe.attention.head_count_kv": None}))
    assert config.rope.frequencies[1] == pytest.approx(10000 ** (-1 / 8)) and config.num_kv_heads == config.num_heads
    absent = {f"glm4moe.{key}": None for key in ("expert_weights_scale", "expert_weights_norm", "expert_group_count")}
    absent |= {"glm4moe.expert_gating_func": None, "glm4moe.expert_group_used_count": None}
    config = config_of(changed("glm4_moe", absent))
    assert (config.routed_scaling, config.normalize_weights, config.num_groups) == (1.0, False, 1)
    assert config_of(changed("glm4_moe", {"glm4moe.expert_weights_scale": 0.0})).routed_scaling == 1.0
    dense = {"glm4moe.leading_dense_block_count": None}
    assert config_of(changed("glm4_moe", dense)).mlp_types == ("sparse",) * 4


def test_numbers_are_those_that_were_meant(changed):
    """float32 has no 1e-06 and no 1.8: the shortest number that is the same float32 is the one of config.json."""
    config = config_of(changed("glm4_moe", {"glm4moe.expert_weights_scale": 1.8}))
    assert config.routed_scaling == 1.8 and config.rms_norm_eps == 1e-05


@pytest.mark.parametrize("value", [Typed(10, 8), Typed(5, 8), Typed(0, 8), [8, 8, 8, 8]])
def test_any_width_and_equal_lists(changed, value):
    """Whole numbers of any type, and one for each layer where all are equal."""
    assert config_of(changed("qwen3_moe", {"qwen3moe.attention.key_length": 16, "qwen3moe.expert_count": value}))


def test_what_differs_by_layer_is_refused(changed):
    path = changed("qwen3_moe", {"qwen3moe.attention.head_count_kv": [2, 2, 1, 2]})
    refused(path, "qwen3moe.attention.head_count_kv is [2, 2, 1, 2]: it differs from layer to layer")


GATING = [
    ("deepseek_v3", "deepseek2", 4, "expert_gating_func is 4, this engine computes only 2"),
    ("glm4_moe", "glm4moe", 1, "expert_gating_func is 1, this engine computes only 2"),
    ("qwen3_moe", "qwen3moe", 2, "expert_gating_func is 2, this engine computes only 1"),
    ("gpt_oss", "gpt-oss", 1, "expert_gating_func is 1, this engine computes only 3"),
    ("mixtral", "llama", 4, "expert_gating_func is 4, this engine computes only 1"),
]


@pytest.mark.parametrize(("name", "architecture", "value", "message"), GATING)
def test_gating_functions(changed, name, architecture, value, message):
    """Another than the family's is refused by name; a wrong one would choose other experts."""
    refused(changed(name, {f"{architecture}.expert_gating_func": value}), f"{architecture}.{message}")


def test_a_missing_gating_function_of_deepseek2(changed):
    """A correction bias says sigmoid, as V3 has it; V2 has none. llama.cpp goes by the number of layers."""
    absent = {"deepseek2.expert_gating_func": None}
    assert config_of(changed("deepseek_v3", absent)).router == "sigmoid"
    layers = [f"blk.{layer}.exp_probs_b.bias" for layer in range(9)]
    absent |= {"deepseek2.expert_weights_norm": False}
    path = changed("deepseek_v3", absent, drop=layers)
    refused(
        path, "deepseek2.expert_group_count is 4 with topk_method 'group_limited_greedy', this engine computes only"
    )
    config = config_of(changed("deepseek_v3", absent | {"deepseek2.expert_group_count": 1}, drop=layers))
    assert (config.model_type, config.router, config.normalize_weights) == ("deepseek_v2", "softmax", False)


def test_groups_that_a_file_of_deepseek_v3_does_not_say(changed):
    """Files before the end of 2025: with 256 experts and a sigmoid router there are 8 groups, and a notice says so."""
    absent = {f"deepseek2.{key}": None for key in ("expert_group_count", "expert_group_used_count")}
    config = config_of(changed("deepseek_v3", absent | {"deepseek2.expert_count": 256}))
    assert (config.num_groups, config.num_active_groups) == (8, 4)
    assert "expert_group_count is absent: experts are chosen from 4 of 8 groups" in " ".join(config.notices)
    config = config_of(changed("deepseek_v3", absent))
    assert (config.num_groups, config.notices) == (1, ())
    absent = {"deepseek2.expert_group_used_count": None}
    refused(changed("deepseek_v3", absent), "deepseek2.expert_group_used_count is missing")


def test_glm_flash_is_told_by_layers_and_vocabulary(tmp_path):
    """The same architecture as DeepSeek; its texts begin otherwise."""
    metadata = read_model(write_as_gguf(FIXTURES / "deepseek_v3", tmp_path / "a.gguf")).metadata
    embedding = encode({"token_embd.weight": torch.zeros(154880, 1), "blk.1.exp_probs_b.bias": torch.zeros(1)})
    path = write_gguf(tmp_path / "b.gguf", metadata | {"deepseek2.block_count": 48}, embedding)
    config = config_of(path)
    assert (config.model_type, config.text_prefix) == ("glm4_moe_lite", ("[gMASK]", "<sop>"))


def test_indexer_types(changed):
    """One flag a layer; absent, all layers own an indexer, but in files of a million positions those of GLM-5.2."""
    key = "glm-dsa.attention.indexer.types"
    assert config_of(changed("glm_moe_dsa_mtp", {key: None})).indexer_types == ("full",) * 5
    config = config_of(changed("glm_moe_dsa_mtp", {key: None, "glm-dsa.context_length": 1 << 20}))
    assert config.indexer_types == ("full", "full", "full", "shared", "shared")
    refused(
        changed("glm_moe_dsa_mtp", {key: [True, False, True]}), "indexer.types is [True, False, True], expected true"
    )
    for name in ("head_count", "key_length", "top_k"):
        refused(changed("glm_moe_dsa_mtp", {f"glm-dsa.attention.indexer.{name}": None}), f"indexer.{name} is missing")


def test_nextn_blocks(changed):
    """block_count counts them; they draft where they are, and may be missing though the metadata has them."""
    opened = open_snapshot(Settings.read([], {"SNAP": str(changed("glm4_moe")), "RAM_GB": "4", "DRAFT": "1"}))
    opened.close()
    assert opened.config.num_layers == 4 and opened.config.num_mtp_layers == 1 and not opened.dense.mtp_problem
    names = [name for name in tensors_of(FIXTURES / "glm4_moe") if name.startswith("blk.4.")]
    assert names
    path = changed("glm4_moe", drop=names)
    opened = open_snapshot(Settings.read([], {"SNAP": str(path), "RAM_GB": "4", "DRAFT": "1"}))
    opened.close()
    assert opened.dense.mtp_problem == "the snapshot has no multi-token-prediction layer"
    path = changed("glm4_moe", drop=["blk.4.nextn.eh_proj.weight"])
    opened = open_snapshot(Settings.read([], {"SNAP": str(path), "RAM_GB": "4", "DRAFT": "1"}))
    opened.close()
    assert (
        opened.dense.mtp_problem == "tensor blk.4.nextn.eh_proj.weight of the multi-token-prediction layer is missing"
    )
    refused(changed("glm4_moe", {"glm4moe.nextn_predict_layers": 9}), "nextn_predict_layers is 9 of 5 blocks")


def test_tied_embeddings(changed):
    """No output.weight: the embedding is the head."""
    assert config_of(changed("olmoe", drop=["output.weight"])).tie_word_embeddings
    assert attempt(lambda: open_headers(changed("olmoe", drop=["output.weight"]))) is None


def test_a_dense_llama_is_named(changed):
    refused(changed("mixtral", {"llama.expert_count": None}), "has no experts (expert_count)")


ROPE = [
    ({"rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope'"),
    ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, "rope.scaling.type is 'linear'"),
    ({"rope.scale_linear": 4.0}, "rope.scaling.type is 'linear'"),
    ({"rope.dimension_count": 8}, "rope.dimension_count is 8, this engine computes only 16"),
    ({"rope.scaling.attn_factor": 2.0}, "rope.scaling.attn_factor is 2.0, this engine computes only 1"),
    ({"attention.value_length": 8}, "attention.value_length is 8, this engine computes only 16"),
]


@pytest.mark.parametrize(("values", "message"), ROPE)
def test_rope_that_is_not_computed(changed, values, message):
    refused(changed("qwen3_moe", {f"qwen3moe.{key}": value for key, value in values.items()}), message)


def test_scaling_by_one_is_none(changed):
    """What converters write for models without scaling."""
    for kind in ("none", "linear"):
        values = {"qwen3moe.rope.scaling.type": kind, "qwen3moe.rope.scaling.factor": 1.0}
        assert config_of(changed("qwen3_moe", values)).rope == read_config(FIXTURES / "qwen3_moe")[0].rope


def test_yarn(changed):
    """The multiplier is a tenth of mscale_all_dim. MLA leaves cos and sin alone; elsewhere they get the factor."""
    values = {"type": "yarn", "factor": 40.0, "original_context_length": 4096, "yarn_log_multiplier": 0.1}
    rope = config_of(changed("deepseek_v3", {f"deepseek2.rope.scaling.{k}": v for k, v in values.items()})).rope
    assert rope.factor == 1.0 and rope.score_factor == pytest.approx(1.3688879**2)
    values.pop("yarn_log_multiplier")
    rope = config_of(changed("deepseek_v3", {f"deepseek2.rope.scaling.{k}": v for k, v in values.items()})).rope
    assert (rope.factor, rope.score_factor) == (1.0, 1.0)
    rope = config_of(changed("qwen3_moe", {f"qwen3moe.rope.scaling.{k}": v for k, v in values.items()})).rope
    assert rope.factor == pytest.approx(1.3688879) and rope.score_factor == 1.0


def test_sliding_windows_of_gpt_oss(changed):
    """Every other layer where no pattern says it; a pattern is a period or a list."""
    key = "gpt-oss.attention.sliding_window_pattern"
    assert config_of(changed("gpt_oss")).sliding_windows == (16, 0, 16, 0)
    assert config_of(changed("gpt_oss", {key: 4})).sliding_windows == (16, 16, 16, 0)
    assert config_of(changed("gpt_oss", {key: [False, True, True, False]})).sliding_windows == (0, 16, 16, 0)
    refused(changed("gpt_oss", {key: [True]}), "sliding_window_pattern is [True], expected a number or")


def test_stop_ids(changed):
    """The ids of end of text, turn and message, each once."""
    ids = {"tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 7}
    assert config_of(changed("olmoe", ids)).stop_ids == (7, 9)


ODD = [-1, 0, 1 << 40, 0.5, float("nan"), float("inf"), True, "x", [1, 2], ["x"]]


@pytest.mark.parametrize("name", ["deepseek_v3", "glm_moe_dsa_mtp", "gpt_oss", "glm4_moe"])
def test_any_value_of_any_key_is_read_or_refused(changed, name):
    """One line, whatever a key holds, and never more memory than the file has bytes."""
    path = changed(name)
    model = read_model(path)
    tensors = encode({})
    keys = [key for key in model.metadata if not key.startswith("general.")]
    for i, key in enumerate(keys):
        for value in ODD[i % 3 :: 3]:
            kind = {int: 11, float: 12}.get(type(value))
            wrong = Typed(kind, value) if kind else value
            metadata = {k: Typed(12, v) if type(v) is float else v for k, v in model.metadata.items()} | {key: wrong}
            write_gguf(
                path.with_name("odd.gguf"), metadata, tensors | encode({"token_embd.weight": torch.zeros(512, 1)})
            )
            attempt(lambda: parse_config(read_model(path.with_name("odd.gguf"))))


@few
@given(st.data())
def test_any_file_is_opened_or_refused(tmp_path, data):
    """Bytes changed anywhere before the tensors' data: one line, or a model that fits its tensors."""
    path = tmp_path / "model.gguf"
    if not path.exists():
        write_as_gguf(FIXTURES / "olmoe", path)
        (tmp_path / "whole").write_bytes(path.read_bytes())
    changed = bytearray((tmp_path / "whole").read_bytes())
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(4, 4000))
        new = data.draw(st.sampled_from([b"\xff", b"\x00", b"\x01", b"\xff" * 8, bytes(8)]))
        changed[at : at + len(new)] = new
    path.write_bytes(changed)
    attempt(lambda: open_headers(path))


def test_a_mirror_is_compared_by_its_start(tmp_path):
    """SNAP_MIRROR of a GGUF: a copy, as a file or a folder; another file of the same name is refused."""
    path = write_as_gguf(FIXTURES / "olmoe", tmp_path / "model.gguf")
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    shutil.copy(path, mirror)
    for value in (mirror, mirror / "model.gguf"):
        open_snapshot(Settings.read([], {"SNAP": str(path), "RAM_GB": "4", "SNAP_MIRROR": str(value)})).close()
    data = bytearray(path.read_bytes())
    data[data.index(struct.pack("<I", 3)) + 1] ^= 1
    (mirror / "model.gguf").write_bytes(data)
    variables = {"SNAP": str(path), "RAM_GB": "4", "SNAP_MIRROR": str(mirror)}
    line = attempt(lambda: open_snapshot(Settings.read([], variables)))
    assert line and "model.gguf differs from that of SNAP" in line
