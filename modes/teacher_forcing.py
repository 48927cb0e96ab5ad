"""TF: run over the full_ids of REF, compare the argmax after every token with its tf_pred."""

import time

from forward.kv_state import KvState
from forward.step import step_all
from modes.console import prefill_progress, profile_line, say
from modes.reference import read_reference, reference_path
from snapshot.errors import Refused

MAX_LISTED = 20


def forward_all(settings, loaded):
    """-> 0 when the argmax after every position equals the reference, else 1."""
    reference = read_reference(settings, loaded, "full_ids", "tf_pred")
    ids, expected = reference["full_ids"], reference["tf_pred"]
    if len(ids) != len(expected):
        raise Refused(f"{reference_path(settings)}: tf_pred has {len(expected)} entries for {len(ids)} of full_ids")
    model = loaded.model
    kv, predicted = KvState(model.config, len(ids)), []
    started = time.perf_counter()
    for at in range(0, len(ids), model.prefill_chunk):  # a chunk's logits at a time
        piece = ids[at : at + model.prefill_chunk]
        predicted += step_all(model, [(piece, kv)], prefill_progress).argmax(-1).tolist()
    seconds = time.perf_counter() - started
    wrong = [i for i, (a, b) in enumerate(zip(predicted, expected, strict=True)) if a != b]
    for i in wrong[:MAX_LISTED]:
        say(f"[tf] position {i}: {predicted[i]}, the reference says {expected[i]}")
    if len(wrong) > MAX_LISTED:
        say(f"[tf] and {len(wrong) - MAX_LISTED} more")
    right = len(ids) - len(wrong)
    print(f"PREFILL (teacher-forcing): {right}/{len(ids)} positions equal | {len(ids) / seconds:.1f} pos/s")
    say(profile_line(model, seconds))
    return 1 if wrong else 0
