"""Opens a snapshot: what SNAP names -> its config, its family and its tensors, from safetensors or a GGUF."""

from pathlib import Path

from errors import Refused
from snapshot.config import ModelConfig
from snapshot.config_file import read_config
from snapshot.family import Family
from snapshot.folder import find_snapshot, own_files
from snapshot.gguf_config import parse_config
from snapshot.gguf_files import find_gguf, first_shard, is_gguf, read_model
from snapshot.gguf_index import make_index
from snapshot.index import INDEX_FILE, OUT_SHARD, SHARD, SINGLE_FILE, TensorIndex, read_index


def locate(path: Path) -> Path:
    """What a path of the user means: a snapshot folder, in a hub cache that of its model, or the first file of a GGUF
    model, which may be the only one in a folder without a snapshot. Refused where it is neither."""
    if path.is_file():
        if not is_gguf(path):
            problem = "is a file, but no GGUF; it must name a GGUF file or the folder of a Hugging Face snapshot"
            raise Refused(f"SNAP={path}: {problem}")
        return first_shard(path)
    if not path.is_dir():
        what = "is no folder or regular file" if path.exists() else "no such folder or file"
        raise Refused(f"SNAP={path}: {what}; it must name a Hugging Face snapshot folder or a GGUF file")
    folder = find_snapshot(path)
    names = [file.name for file in own_files(folder, ".safetensors", INDEX_FILE)]
    is_snapshot = any(
        name in (SINGLE_FILE, INDEX_FILE) or SHARD.fullmatch(name) or OUT_SHARD.fullmatch(name) for name in names
    )
    return folder if is_snapshot else find_gguf(folder, below=not names) or folder


def read_snapshot(path: Path) -> tuple[ModelConfig, Family, TensorIndex]:
    """Read the headers of what `locate` found."""
    if path.is_dir():
        return *read_config(path), read_index(path)
    model = read_model(path)
    config, family = parse_config(model)
    return config, family, make_index(model, config, family)


def folder_of(path: Path) -> Path:
    """The folder that a snapshot is, in a hub cache by its model, or that a GGUF lies in."""
    return path.parent if path.is_file() else find_snapshot(path)
