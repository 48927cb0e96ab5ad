"""Reads REF: prompt_ids, full_ids (prompt and continuation) and tf_pred (the argmax after each of full_ids)."""

from pathlib import Path

from errors import Refused
from load.model import OpenedSnapshot, snapshot_folder
from machine.fields import FieldReader
from settings import Settings
from snapshot.opening import folder_of
from snapshot.reader import read_json_object


def reference_path(settings: Settings) -> Path:
    """REF, by default ref_glm.json of the snapshot, beside a GGUF."""
    return Path(settings.ref) if settings.ref else folder_of(snapshot_folder(settings)) / "ref_glm.json"


def read_reference(settings: Settings, opened: OpenedSnapshot, *keys: str) -> list[list[int]]:
    """-> the token ids of each key. Refused for ids that are missing, outside the vocabulary, or more than CTX."""
    path = reference_path(settings)
    if not path.exists():
        raise Refused(f"{path}: no such file; REF must name a reference (dev/make_reference.py makes one)")
    fields = FieldReader(read_json_object(path), str(path))
    all_ids = [fields.wholes(key, high=opened.config.vocab_size - 1) for key in keys]
    for key, ids in zip(keys, all_ids, strict=True):
        if not ids:
            raise Refused(f"{path}: {key} is empty")
        if len(ids) > opened.context:
            raise Refused(f"{path}: {key} has {len(ids)} tokens, CTX is {opened.context}; raise CTX")
    return all_ids
