"""Reading REF: prompt_ids, full_ids (prompt and continuation) and tf_pred (the argmax after each of full_ids)."""

from pathlib import Path

from errors import Refused
from snapshot.config import read_json_object


def reference_path(settings):
    """REF, by default ref_glm.json of the snapshot."""
    return Path(settings.ref) if settings.ref else Path(settings.snap) / "ref_glm.json"


def read_reference(settings, opened, *keys):
    """The lists of ids under `keys` -> a dict; refuses what is missing, empty, outside the vocabulary, too long."""
    path = reference_path(settings)
    if not path.exists():
        raise Refused(f"{path}: no such file; REF must name a reference (dev/make_reference.py makes one)")
    raw, out = read_json_object(path), {}
    vocab_size = opened.config.vocab_size
    for key in keys:
        ids = raw.get(key)
        if not isinstance(ids, list) or not ids:
            raise Refused(f"{path}: {key} is missing or no list of token ids")
        for i, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise Refused(f"{path}: {key}[{i}] is {token!r}, no id of a vocabulary of {vocab_size}")
        if len(ids) > opened.context:
            raise Refused(f"{path}: {key} has {len(ids)} tokens, CTX is {opened.context}; raise CTX")
        out[key] = ids
    return out
