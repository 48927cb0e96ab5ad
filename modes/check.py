"""No mode: generate greedily from the prompt of REF, stop tokens ignored, and compare with its continuation."""

from errors import Refused
from forward.kv_cache import make_kv_cache
from generate.decode import spec_decode
from generate.draft import Drafter
from generate.sampler import Sampler
from load.model import OpenedSnapshot, load_model
from machine.console import PrefillProgress
from modes.reference import read_reference, reference_path
from modes.report import RunReport
from settings import Settings


def run_check(settings: Settings, opened: OpenedSnapshot) -> int:
    """-> 0 when every token equals the reference, else 1."""
    prompt, full = read_reference(settings, opened, "prompt_ids", "full_ids")
    if full[: len(prompt)] != prompt or len(full) == len(prompt):
        raise Refused(f"{reference_path(settings)}: full_ids must be prompt_ids and at least one token more")
    loaded = load_model(settings, opened)
    model, expected = loaded.model, full[len(prompt) :]
    run = RunReport("oracle", loaded, len(prompt))
    kv = make_kv_cache(loaded.config, loaded.context)
    drafter, progress = Drafter(model, run.draft_length), PrefillProgress(len(prompt))
    generated = []
    for token in spec_decode(model, kv, prompt, Sampler(), len(expected), (), drafter, progress, run.counters):
        generated.append(token)
        run.on_token()
    run.end()
    differs = [i for i, (a, b) in enumerate(zip(generated, expected, strict=True)) if a != b]
    num_equal = len(expected) - len(differs)
    print("reference:", *expected)
    print("colibri:  ", *generated)
    print(f"oracle: {num_equal}/{len(expected)} tokens equal")
    if differs:
        first = differs[0]
        print(f"oracle: first difference at position {len(prompt) + first}: {generated[first]}, not {expected[first]}")
    run.finish(settings, run.counters.tokens - 1, equal=num_equal, compared=len(expected))
    return 1 if differs else 0
