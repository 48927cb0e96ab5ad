"""TF, teacher forcing: one pass over full_ids of REF, the argmax after every token compared with tf_pred."""

from errors import Refused
from forward.kv_cache import make_kv_cache
from forward.step import step_logprobs
from load.model import OpenedSnapshot, load_model
from machine.console import PrefillProgress, say
from modes.reference import read_reference, reference_path
from modes.report import RunReport
from settings import Settings

MAX_LISTED = 20  # differences


def run_teacher_forcing(settings: Settings, opened: OpenedSnapshot) -> int:
    """-> 0 when the argmax after every position equals the reference, else 1."""
    ids, expected = read_reference(settings, opened, "full_ids", "tf_pred")
    if len(ids) != len(expected):
        raise Refused(f"{reference_path(settings)}: tf_pred has {len(expected)} entries for {len(ids)} of full_ids")
    loaded = load_model(settings, opened)
    run = RunReport("tf", loaded, len(ids))
    kv = make_kv_cache(loaded.config, len(ids))
    predicted = step_logprobs(loaded.model, [(ids, kv)], expected, PrefillProgress(len(ids)))[1].tolist()
    run.end()
    differs = [i for i, (a, b) in enumerate(zip(predicted, expected, strict=True)) if a != b]
    for i in differs[:MAX_LISTED]:
        say(f"[tf] position {i}: {predicted[i]}, the reference says {expected[i]}")
    if len(differs) > MAX_LISTED:
        say(f"[tf] and {len(differs) - MAX_LISTED} more")
    num_equal, seconds = len(ids) - len(differs), run.phases()[0].seconds
    print(f"PREFILL (teacher-forcing): {num_equal}/{len(ids)} positions equal | {len(ids) / seconds:.1f} pos/s")
    run.finish(settings, equal=num_equal, compared=len(ids))
    return 1 if differs else 0
