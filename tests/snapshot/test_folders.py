"""Folders as people have them: files of systems, strays, pointers, hub caches, quantized checkpoints of others."""

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from errors import Refused
from load.model import open_snapshot
from settings import Settings
from snapshot.folder import find_snapshot, own_files, snapshot_name
from snapshot.index import INDEX_FILE
from snapshot.opening import locate
from tests.conftest import FAMILIES, FIXTURES, ROOT
from tests.support.hostile import (
    MODEL_BYTES,
    NAMES,
    TEXT_FILES,
    copy_files,
    load,
    open_headers,
    opened,
    refused,
    text_of,
    write_config,
    write_index,
)

SYSTEM_FILES = ("._model.safetensors", ".DS_Store", "Thumbs.db", "desktop.ini", "._config.json", ".gitattributes")


def notices(folder, **variables):
    """The notices of a snapshot, as stderr shows them."""
    snapshot = open_snapshot(Settings.read([], {"SNAP": str(folder), "RAM_GB": "4"} | variables))
    snapshot.close()
    return [line for line in snapshot.notices if line.startswith(("[snapshot]", "[config]"))]


def add_system_files(folder):
    for name in SYSTEM_FILES:
        (folder / name).write_bytes(b"\0\5\26\7 Mac OS X")
    (folder / ".cache").mkdir()


# --- files that are not ours ------------------------------------------------------------------------------------------


def test_files_of_the_system_are_not_the_models(folder):
    """A Mac that copies to exFAT leaves ._model.safetensors: "is shorter than its header says, download it again"."""
    add_system_files(folder)
    (folder / "model-00002-of-00002.safetensors.partial").write_bytes(b"half")
    assert opened(folder, load) is None
    assert notices(folder) == []
    (folder / "model.safetensors").rename(folder / "out-00000.safetensors")  # all that the folder holds is read
    assert opened(folder) is None and notices(folder) == []


def test_only_model_safetensors_is_the_model(folder):
    """As transformers loads it. A file beside it was read too, and "holds no tensor of this model" ended the start."""
    shutil.copy(folder / "model.safetensors", folder / "copy.safetensors")
    (folder / "broken.safetensors").write_bytes(b"x")
    assert opened(folder, load) is None
    assert notices(folder) == [
        "[snapshot] not read: broken.safetensors, copy.safetensors (model.safetensors is the whole model)"
    ]
    tensors = safetensors.torch.load(MODEL_BYTES)
    norm = tensors.pop("model.norm.weight")
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    safetensors.torch.save_file({"model.norm.weight": norm}, folder / "copy.safetensors")
    refused(folder, "tensor model.norm.weight is missing", "not read: broken.safetensors, copy.safetensors")


def test_an_index_beside_model_safetensors_does_not_count(folder):
    """transformers loads model.safetensors alone then, whatever model.safetensors.index.json lists."""
    write_index(folder, dict.fromkeys(NAMES, "model-00001-of-00001.safetensors"))
    assert opened(folder, load) is None
    assert notices(folder) == [f"[snapshot] not read: {INDEX_FILE} (model.safetensors is the whole model)"]


def test_a_file_that_the_index_does_not_list_is_named(folder):
    write_index(folder, dict.fromkeys(NAMES, "model.safetensors"))
    assert notices(folder) == []
    (folder / "consolidated.safetensors").write_bytes(b"x")
    assert notices(folder) == [f"[snapshot] not read: consolidated.safetensors (not in {INDEX_FILE})"]


def test_tensors_without_a_place_are_named(folder):
    """Biases of a model whose config.json says attention_bias false were passed over without a word."""
    tensors = safetensors.torch.load(MODEL_BYTES)
    tensors |= {f"model.layers.{i}.self_attn.o_proj.bias": torch.ones(64) for i in range(2)}
    tensors |= {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "padding.0": torch.ones(4)}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    [line] = notices(folder)
    names = "model.layers.0.self_attn.o_proj.bias, model.layers.1.self_attn.o_proj.bias"
    assert line == f"[snapshot] 2 tensors have no place in the model of config.json, not used: {names}"


def test_a_target_folder_with_files_of_the_system_is_empty(tmp_path):
    """get_smollm and make_synthetic refused a folder that the Finder had looked into."""
    add_system_files(tmp_path)
    assert own_files(tmp_path) == [] and own_files(tmp_path, ".safetensors") == []
    (tmp_path / "model.safetensors").touch()
    assert own_files(tmp_path) == own_files(tmp_path, ".safetensors") == [tmp_path / "model.safetensors"]


def test_a_lora_adapter_is_named(folder):
    """transformers applies it; here the answers would be those of the model without it."""
    (folder / "adapter_config.json").write_text("{}")
    refused(folder, "adapter_config.json: the folder holds a LoRA adapter, which this engine does not apply; merge it")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "mmproj-BF16.gguf", "model.safetensors.partial"])
def test_a_model_in_another_form_is_named(folder, name):
    (folder / "model.safetensors").rename(folder / name)
    refused(folder, f"holds no *.safetensors and no GGUF model but {name}, which this engine does not read")


# --- something else under the name of a file --------------------------------------------------------------------------

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 4976698672\n"
OTHERS = {
    POINTER: "is a Git LFS pointer, not the file itself; run git lfs pull there, or hf download",
    b"<!DOCTYPE html><html>": "is a web page, not the file itself",
    b"GGUF\3\0\0\0": "is a GGUF file under another name; name it *.gguf and set SNAP to it",
    b"PK\3\4": "is a zip archive",
}


@pytest.mark.parametrize("data", OTHERS, ids=["lfs", "html", "gguf", "zip"])
def test_what_lies_there_instead_of_the_file_is_named(folder, text_folder, data):
    """A clone without git lfs has pointers: "is shorter than its header says", "is not valid JSON"."""
    write_index(folder, dict.fromkeys(NAMES, "model.safetensors"))
    for place, action, names in (
        (folder, open_headers, ("config.json", "generation_config.json", INDEX_FILE, "model.safetensors")),
        (text_folder, text_of, TEXT_FILES),
    ):
        for name in names:
            path = place / name
            before = path.read_bytes() if path.exists() else None
            path.write_bytes(data)
            assert str(path) in refused(place, OTHERS[data], action=action)
            path.write_bytes(before) if before else path.unlink()


# --- quantized by others ----------------------------------------------------------------------------------------------

MATRIX = "model.layers.0.self_attn.o_proj"
FP8 = torch.zeros(64, 64).to(torch.float8_e4m3fn)
BYTES = torch.zeros(64, 32, dtype=torch.uint8)
QUANTIZED = {
    "AWQ": {".qweight": torch.zeros(64, 8, dtype=torch.int32), ".scales": torch.zeros(1, 64), ".qzeros": BYTES},
    "GPTQ": {".qweight": torch.zeros(8, 64, dtype=torch.int32), ".scales": torch.zeros(1, 64), ".qzeros": BYTES},
    "compressed-tensors": {
        ".weight_packed": torch.zeros(64, 8, dtype=torch.int32),
        ".weight_scale": torch.zeros(64, 1),
    },
    "bitsandbytes (NF4)": {".weight": BYTES, ".weight.quant_state.bitsandbytes__nf4": BYTES, ".weight.absmax": BYTES},
    "bitsandbytes (8 bits)": {".weight": BYTES.to(torch.int8), ".SCB": torch.zeros(64)},
    "NVFP4": {".weight": BYTES, ".weight_scale": BYTES, ".weight_scale_2": torch.zeros(())},
    "FP8 with a scale for each channel": {".weight": FP8, ".weight_scale": torch.ones(64, 1)},
    "FP8 with a scale for the whole matrix": {".weight": FP8, ".weight_scale": torch.ones(())},
    "FP8 with a scale for each row": {".weight": FP8, ".weight_scale_inv": torch.ones(64, 1)},
    "int8 with a scale for each channel": {".weight": BYTES.to(torch.int8), ".weight_scale": torch.ones(64, 1)},
}


@pytest.mark.parametrize("method", QUANTIZED)
def test_checkpoints_quantized_by_others_are_named(folder, method):
    """ "is missing, is the download complete?" said the engine of an AWQ model whose config.json does not tell."""
    tensors = safetensors.torch.load(MODEL_BYTES)
    del tensors[MATRIX + ".weight"]
    tensors |= {MATRIX + ending: tensor.clone() for ending, tensor in QUANTIZED[method].items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    line = refused(folder, method, MATRIX, "take the original")
    assert "download" not in line


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "x"])
def test_a_quant_method_is_named(folder, method):
    write_config(folder, {"quantization_config": {"quant_method": method}})
    refused(folder, f"quantization_config.quant_method is '{method}': the weights are quantized with ")


# --- the hub cache ----------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(folder, tmp_path):
    """A model of a hub cache, with one revision."""
    entry = tmp_path / "hub" / "models--org--Name-7B"
    (entry / "refs").mkdir(parents=True)
    (entry / "blobs").mkdir()
    (entry / "refs" / "main").write_text("aaaa")
    shutil.copytree(folder, entry / "snapshots" / "aaaa")
    return entry


def test_a_model_of_a_hub_cache_is_its_snapshot(cache):
    """SNAP at models--org--name, which people copy: "config.json: no such file"."""
    revision = cache / "snapshots" / "aaaa"
    add_system_files(cache / "snapshots")
    for place in (cache, cache / "snapshots", revision):
        assert find_snapshot(place) == revision
        assert opened(place) is None
    assert snapshot_name(revision) == "Name-7B" and snapshot_name(cache) == cache.name
    (cache / "refs" / "main").unlink()
    assert find_snapshot(cache) == revision


def test_several_revisions(cache):
    """That of refs/main; without it they are listed."""
    shutil.copytree(cache / "snapshots" / "aaaa", cache / "snapshots" / "bbbb")
    assert find_snapshot(cache).name == "aaaa"
    (cache / "refs" / "main").write_text("cccc")  # its download was interrupted
    message = "holds 2 revisions of a model; name one of them: snapshots/aaaa, snapshots/bbbb"
    refused(cache, message)
    assert find_snapshot(cache / "snapshots" / "bbbb").name == "bbbb"
    shutil.rmtree(cache / "snapshots")
    (cache / "snapshots").mkdir()
    refused(cache, "holds no revision of a model")
    refused(cache.parent, "is a cache of the Hugging Face hub; name one of its models: models--org--Name-7B")


def test_every_door_takes_a_model_of_a_hub_cache(cache, tmp_path, run_colibri):
    """The check reads the reference of the same folder; scripts/plan.py and convert take it too, a mirror as well."""
    from scripts.convert import main as convert
    from scripts.plan import main as plan

    revision = cache / "snapshots" / "aaaa"
    copy = copy_files(ROOT / "models" / "tiny", ("tokenizer.json",), tmp_path / "text")
    assert plan([str(cache)]) == 0
    assert convert([str(cache), str(tmp_path / "out"), "--experts", "8"]) == 0
    (revision / "ref_glm.json").write_text(json.dumps({"prompt_ids": [1, 2], "full_ids": [1, 2, 3]}))
    done = run_colibri(SNAP=cache, RAM_GB=4, NGEN=1, SNAP_MIRROR=copy)
    assert b"SNAP_MIRROR" in done.stderr and done.returncode == 2
    done = run_colibri(SNAP=cache, RAM_GB=4)
    assert b"[snapshot] Name-7B: glm_moe_dsa" in done.stderr and done.returncode in (0, 1), done.stderr


@pytest.mark.parametrize("name", FAMILIES)
def test_an_ordinary_snapshot_has_no_notice(name):
    """Nothing disagrees in what transformers has saved, and every tensor has its place."""
    assert notices(FIXTURES / name) == [] == notices(FIXTURES / name, DRAFT="0")


def test_a_device_is_no_snapshot():
    """SNAP=/dev/null was said not to be there."""
    with pytest.raises(Refused, match="SNAP=/dev/null: is no folder or regular file"):
        locate(Path("/dev/null"))
