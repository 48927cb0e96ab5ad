"""TF: run over the full_ids of REF, compare the argmax after every token with its tf_pred."""

from errors import Refused
from forward.kv_cache import make_kv_cache
from forward.step import step_logprobs
from load.model import load_model
from machine.console import PrefillProgress, say
from modes.reference import read_reference, reference_path
from modes.report import RunReport, profile_line, write_report

MAX_LISTED = 20


def forward_all(settings, opened):
    """-> 0 when the argmax after every position equals the reference, else 1."""
    reference = read_reference(settings, opened, "full_ids", "tf_pred")
    ids, expected = reference["full_ids"], reference["tf_pred"]
    if len(ids) != len(expected):
        raise Refused(f"{reference_path(settings)}: tf_pred has {len(expected)} entries for {len(ids)} of full_ids")
    loaded = load_model(settings, opened)
    model, run = loaded.model, RunReport("tf", loaded)
    run.num_prompt_ids = len(ids)
    kv = make_kv_cache(model.config, len(ids))
    predicted = step_logprobs(model, [(ids, kv)], expected, PrefillProgress(len(ids)))[1].tolist()
    run.end()
    seconds = run.phases()[0].seconds
    wrong = [i for i, (a, b) in enumerate(zip(predicted, expected, strict=True)) if a != b]
    for i in wrong[:MAX_LISTED]:
        say(f"[tf] position {i}: {predicted[i]}, the reference says {expected[i]}")
    if len(wrong) > MAX_LISTED:
        say(f"[tf] and {len(wrong) - MAX_LISTED} more")
    right = len(ids) - len(wrong)
    print(f"PREFILL (teacher-forcing): {right}/{len(ids)} positions equal | {len(ids) / seconds:.1f} pos/s")
    numbers = run.numbers(0, equal=right, compared=len(ids))
    run.summary(0)
    say(profile_line(numbers["profile"]))
    write_report(settings, numbers)
    return 1 if wrong else 0
