"""The files of a GGUF model: the one that a folder holds, and the shards of a split one."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from errors import Refused, shorten, show
from snapshot.folder import list_names, own_files
from snapshot.gguf import MAGIC, read_gguf
from snapshot.index import TensorEntry

SUFFIX = ".gguf"
SHARD = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")
# Files beside a model that are none: projectors of pictures, importance matrices, MTP layers alone.
NO_MODELS = ("mmproj", "imatrix", "mtp-")


@dataclass(frozen=True, slots=True)
class GgufModel:
    """All files of a model: the metadata of the first, the tensors of each by the names that the files give them."""

    path: Path  # the first file
    paths: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]


def is_gguf(path: Path) -> bool:
    """True for a file that is a GGUF by its name or its first bytes."""
    try:
        with open(path, "rb") as file:
            return path.name.endswith(SUFFIX) or file.read(len(MAGIC)) == MAGIC
    except OSError:
        return path.name.endswith(SUFFIX)


def find_gguf(folder: Path, below: bool = True) -> Path | None:
    """The first file of the only GGUF model of a folder, or of the folders `below`; None if there is none. Several are
    listed, and refused."""
    models = list_models(folder)
    if not models and below:
        models = [model for below in own_files(folder) if below.is_dir() for model in list_models(below)]
    if len(models) > 1:
        names = list_names(str(path.relative_to(folder)) for path in models)
        raise Refused(f"{folder}: holds {len(models)} GGUF models; SNAP must name one of the files: {names}")
    return models[0] if models else None


def list_models(folder: Path) -> list[Path]:
    """The first file of each GGUF model of a folder."""
    files = [path for path in own_files(folder, SUFFIX) if not path.name.startswith(NO_MODELS)]
    return list(dict.fromkeys(first_shard(path) for path in files))


def first_shard(path: Path) -> Path:
    """The first shard of a split model, whichever is named; a model in one file is that itself."""
    match = SHARD.fullmatch(path.name)
    return path.with_name(f"{match['stem']}-00001-of-{match['count']}{SUFFIX}") if match else path


def list_shards(path: Path) -> list[Path]:
    """All shards of a model, by number. Missing ones are refused by their numbers."""
    match = SHARD.fullmatch(path.name)
    if not match:
        return [path]
    stem, count = match["stem"], int(match["count"])
    there = {file.name for file in own_files(path.parent, SUFFIX)}
    names = [f"{stem}-{number:05d}-of-{count:05d}{SUFFIX}" for number in range(1, count + 1)]
    missing = [str(number) for number, name in enumerate(names, 1) if name not in there]
    if missing or not names:
        problem = f"{count - len(missing)} of {count} shards of {shorten(stem)} are there"
        raise Refused(f"{path.parent}: {problem}, not number {list_names(missing)}; is the download complete?")
    return [path.with_name(name) for name in names]


def read_model(path: Path) -> GgufModel:
    """Read the headers of all files of the model that `path` is the first of."""
    paths = list_shards(path)
    metadata: dict[str, Any] = {}
    tensors: dict[str, TensorEntry] = {}
    promised = None
    for i, shard in enumerate(paths):
        file = read_gguf(shard)
        check_split(shard, file.metadata, i, len(paths))
        metadata = metadata or file.metadata
        promised = promised or file.metadata.get("split.tensors.count")
        for name, entry in file.tensors.items():
            if name in tensors:
                both = f"{tensors[name].path.name} and {shard.name}"
                raise Refused(f"{shard.parent}: tensor {name} is in both {both}; the files belong to two models")
            tensors[name] = entry
    if promised is not None and promised != len(tensors):
        problem = f"says the model has {show(promised)} tensors, the files hold {len(tensors)}"
        raise Refused(f"{path}: {problem}; download the model again")
    return GgufModel(path, tuple(paths), metadata, tensors)


def check_split(path: Path, metadata: dict[str, Any], number: int, count: int) -> None:
    """Refuse a shard under another's name: what it says of itself must be what its name says."""
    says = metadata.get("split.no", 0), metadata.get("split.count", 1) or 1
    if says != (number, count):
        own = f"shard {says[0] + 1} of {says[1]}" if all(type(n) is int for n in says) else f"shard {show(says)}"
        expected = f"{number + 1} of {count}" if count > 1 else "a model in one file"
        advice = "give the shards their names, -00001-of-00005.gguf and so on"
        raise Refused(f"{path}: says that it is {own}, its name {expected}; {advice}")
