"""Snapshots with missing, foreign, misplaced or irregular files: refused in one line that names the file."""

import os
import shutil

import pytest
import safetensors.torch

from snapshot.index import INDEX_FILE
from tests.support.hostile import (
    MODEL_BYTES,
    MODEL_FILES,
    NAMES,
    TEXT_FILES,
    load,
    open_headers,
    opened,
    refused,
    text_of,
    write_config,
    write_index,
    write_model,
)


def save(path, names):
    """A safetensors file with some tensors of the fixture; a dict renames them: new name -> name."""
    tensors = safetensors.torch.load(MODEL_BYTES)
    names = names if isinstance(names, dict) else {name: name for name in names}
    safetensors.torch.save_file({new: tensors[name].clone() for new, name in names.items()}, path)


def names_of(*layers):
    """The names of some layers; None means tensors outside of layers."""
    prefixes = tuple(f"model.layers.{layer}." for layer in layers if layer is not None)
    inside = [name for name in NAMES if name.startswith(prefixes)]
    return inside + [name for name in NAMES if None in layers and not name.startswith("model.layers.")]


def split(folder, pattern):
    """Shards of layer 0 and tensors outside of layers, of layers 1 and 2, of 3 and 4 -> [(path, names), ...]."""
    (folder / "model.safetensors").unlink()
    shards = []
    for number, layers in enumerate([(None, 0), (1, 2), (3, 4)]):
        shards.append((folder / pattern.format(number, number + 1), names_of(*layers)))
        save(*shards[-1])
    return shards


@pytest.mark.parametrize("pattern", ["model-{1:05d}-of-00003.safetensors", "out-{0:05d}.safetensors"])
def test_a_shard_is_missing(folder, pattern):
    """The error counts the shards and names the missing one, if it is known, and a missing tensor.

    Containers of the C engine do not say how many shards there should be: a missing last one shows in a tensor alone.
    A file of the MTP layer is not counted.
    """
    shards = split(folder, pattern)
    for (path, names), layer in [*zip(shards, (0, 1, 3), strict=True)] * 2:
        assert opened(folder) is None
        path.rename(folder / "aside")
        there = f"2 of 3 shards are there, {path.name} is not"
        if path.name == "out-00002.safetensors":
            there = "2 shards are there, out-00000.safetensors to out-00001.safetensors"
        tensor = f"model.layers.{layer}.input_layernorm.weight"
        assert tensor in names
        refused(folder, f"layer {layer} has no tensors, {tensor} for one", there)
        (folder / "aside").rename(path)
        if layer == 3:
            save(folder / "out-mtp-00000.safetensors", {"model.layers.5.eh_proj.weight": "lm_head.weight"})
    for path, _ in shards:
        path.unlink()
    save(folder / "model-00002-of-00002.safetensors", NAMES)  # every tensor is there, but a file is missing
    refused(folder, "1 of 2 shards are there, model-00001-of-00002.safetensors is not")


def test_a_shard_of_an_index_is_missing(folder):
    shards = split(folder, "model-{1:05d}-of-00003.safetensors")
    write_index(folder, {name: path.name for path, names in shards for name in names})
    assert opened(folder) is None
    for path, names in shards:
        path.rename(folder / "aside")
        refused(folder, f"{path.name} is missing (2 of 3 files are there) and with it tensor {names[0]}")
        (folder / "aside").rename(path)


def test_a_layer_without_tensors(folder):
    """config.json says 6 layers, the file has 0 to 2 and 4 to 5."""
    names = {name: name for name in names_of(None, 0, 1, 2, 4)}
    names |= {name.replace(".4.", ".5."): name for name in names_of(4)}
    save(folder / "model.safetensors", names)
    fields = dict(num_hidden_layers=6, mlp_layer_types=None, indexer_types=["full", "full", *["shared"] * 4])
    write_config(folder, fields)
    tensor = "model.layers.3.input_layernorm.weight"
    refused(folder, f"layer 3 has no tensors, {tensor} for one; config.json asks for 6 layers")


def test_more_layers_than_config_asks_for(folder):
    """A model without its last layers is another model; only the MTP layer may follow."""
    save(folder / "model.safetensors", [name for name in NAMES if ".indexer." not in name])
    for layers in (3, 4):
        fields = dict(indexer_types=["full", *["shared"] * (layers - 1)], mlp_layer_types=None)
        write_config(folder, fields | {"num_hidden_layers": layers})
        refused(folder, f"holds tensors of layer {layers}, config.json asks for {layers} layers")


def test_a_file_of_another_model(folder):
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    save(folder / "other.safetensors", {"model.layers.0.self_attn.q_proj.weight": "lm_head.weight"})
    refused(folder, "other.safetensors: holds no tensor of this model; move it out of the folder")
    write_model(folder / "other.safetensors", {}, b"")
    refused(folder, "other.safetensors: holds no tensor of this model")
    write_index(folder, dict.fromkeys(NAMES, "weights.safetensors"))  # an index lists the files of the snapshot
    assert opened(folder) is None


BAD_FILE_NAMES = ["../x.safetensors", "/x.safetensors", "sub/x.safetensors", "..", "", "model.bin"]
BAD_FILE_NAMES += ["a\0.safetensors", "a\n.safetensors", "\ud800.safetensors", "y" * 10_000 + "/x.safetensors", 5, None]


def test_an_index_that_leads_out_of_the_folder(folder):
    """Even if the file exists."""
    for place in (folder.parent, folder / "sub"):
        place.mkdir(exist_ok=True)
        shutil.copy(folder / "model.safetensors", place / "x.safetensors")
    for file in BAD_FILE_NAMES:
        write_index(folder, dict.fromkeys(NAMES, file))
        refused(folder, f"{INDEX_FILE}: weight_map puts ", "expected the name of a *.safetensors file beside it")
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    write_index(folder, {"a": "y" * 300 + ".safetensors"})  # a name longer than the system allows
    refused(folder, "yyy...", "is missing (0 of 1 files are there)")
    write_index(folder, dict.fromkeys(NAMES, "weights.safetensors") | {"a": "folder.safetensors"})
    (folder / "folder.safetensors").mkdir()
    refused(folder, "folder.safetensors: is not a regular file")


NO_FILES = [os.mkfifo, os.mkdir, lambda path: path.symlink_to("nowhere"), lambda path: path.symlink_to(path.name)]


@pytest.mark.parametrize("put", NO_FILES, ids=["fifo", "folder", "link to nothing", "link to itself"])
def test_irregular_files_are_refused(folder, text_folder, put):
    """Nothing that could block the reader is opened, and a dangling link is not an absent file."""
    for place, action, names in ((folder, open_headers, MODEL_FILES), (text_folder, text_of, TEXT_FILES)):
        for name in names:
            path, aside = place / name, place / "aside"
            if path.exists():
                path.rename(aside)
            put(path)
            refused(place, f"{name}: ", action=action)
            path.rmdir() if path.is_dir() else path.unlink()
            if aside.exists():
                aside.rename(path)
        assert opened(place, action) is None


def test_the_layout_of_the_hub_cache(folder, tmp_path):
    """snapshots/REVISION/name -> ../../blobs/HASH, all of it read-only."""
    blobs, revision = tmp_path / "blobs", tmp_path / "snapshots" / "revision"
    blobs.mkdir()
    revision.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / f"{number:064x}")
        (blobs / f"{number:064x}").chmod(0o444)
        (revision / path.name).symlink_to(f"../../blobs/{number:064x}")
    for place in (blobs, revision):
        place.chmod(0o555)
    assert opened(revision, load) is None
    for place in (blobs, revision):
        place.chmod(0o755)
