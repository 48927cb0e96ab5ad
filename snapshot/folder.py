"""The folder of a snapshot: the one that SNAP means in a Hugging Face hub cache, and the files in it that are ours."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from errors import Refused, shorten

CACHE_PREFIX = "models--"  # of the folder of a model in a hub cache: models--org--name
SNAPSHOTS = "snapshots"  # holds a folder for each revision
SYSTEM_NAMES = ("thumbs.db", "desktop.ini", "icon\r", "ehthumbs.db")
# Models in other forms, to name instead of weights that are not there.
OTHER_MODELS = (".gguf", ".bin", ".pth", ".pt", ".onnx", ".npz", ".partial", ".incomplete")
MAX_LISTED = 8


def is_system_name(name: str) -> bool:
    """True for what a system or a tool adds to any folder: names with a dot first (.DS_Store, ._model.safetensors of a
    Mac, .cache of hf download), Thumbs.db."""
    return name.startswith(".") or name.lower() in SYSTEM_NAMES


def own_files(folder: Path, *suffixes: str) -> list[Path]:
    """What a folder holds with one of these suffixes, by name, without what a system adds. No suffix: everything."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise Refused(f"{folder}: {error.strerror}") from None
    return [folder / name for name in names if not is_system_name(name) and name.endswith(suffixes or "")]


def list_names(names: Iterable[str]) -> str:
    """Names for a message; the first of many."""
    names = [shorten(name) for name in names]
    more = [f"{len(names) - MAX_LISTED} more"] if len(names) > MAX_LISTED else []
    return ", ".join([*names[:MAX_LISTED], *more])


def no_weights(folder: Path) -> Refused:
    """The error for a folder without *.safetensors: it names a model of another form that is there instead."""
    others = [path.name for path in own_files(folder, *OTHER_MODELS)]
    but = f" but {list_names(others)}, which this engine does not read" if others else ""
    return Refused(
        f"{folder}: holds no *.safetensors and no GGUF model{but}; SNAP must name a snapshot folder or a GGUF file"
    )


def find_snapshot(folder: Path) -> Path:
    """The folder itself, or, of a model's folder in a hub cache, the revision of refs/main or its only one. Refused,
    with the choice, where there are several."""
    if not folder.is_dir() or os.path.lexists(folder / "config.json"):
        return folder
    root = folder.parent if folder.name == SNAPSHOTS and (folder.parent / "refs").is_dir() else folder
    if (root / SNAPSHOTS).is_dir():
        revisions = [path for path in own_files(root / SNAPSHOTS) if path.is_dir()]
        main = read_main(root)
        chosen = [path for path in revisions if path.name == main] or revisions
        if len(chosen) == 1:
            return chosen[0]
        if revisions:
            names = list_names(str(path.relative_to(root)) for path in revisions)
            raise Refused(f"{folder}: holds {len(revisions)} revisions of a model; name one of them: {names}")
        raise Refused(f"{folder}: holds no revision of a model (snapshots is empty); download it again")
    models = [path.name for path in own_files(folder) if path.name.startswith(CACHE_PREFIX)]
    if models:
        raise Refused(f"{folder}: is a cache of the Hugging Face hub; name one of its models: {list_names(models)}")
    return folder


def read_main(root: Path) -> str | None:
    """The revision that refs/main names, in a model's folder of a hub cache."""
    try:
        return (root / "refs" / "main").read_text(errors="replace").strip()
    except OSError:
        return None


def snapshot_name(folder: Path) -> str:
    """The name of a model: that of its folder, in a hub cache, where that is a revision, the model's own, and of a GGUF
    that of its file, without the number of a shard."""
    if folder.suffix == ".gguf":
        return re.sub(r"-[0-9]{5}-of-[0-9]{5}$", "", folder.stem)
    entry = folder.parents[1].name if folder.parent.name == SNAPSHOTS else ""
    return entry.split("--")[-1] if entry.startswith(CACHE_PREFIX) else folder.name
