"""No mode: generate greedily from the prompt of REF, stop tokens ignored, and compare with its continuation."""

from errors import Refused
from forward.kv_cache import make_kv_cache
from generate.decode import spec_decode
from generate.draft import Drafter
from generate.sampler import Sampler
from load.model import load_model
from machine.console import PrefillProgress, say
from modes.reference import read_reference, reference_path
from modes.report import RunReport, profile_line, write_report


def run_oracle(settings, opened):
    """-> 0 when every token equals the reference, else 1."""
    reference = read_reference(settings, opened, "prompt_ids", "full_ids")
    prompt, full = reference["prompt_ids"], reference["full_ids"]
    if full[: len(prompt)] != prompt or len(full) == len(prompt):
        raise Refused(f"{reference_path(settings)}: full_ids must be prompt_ids and at least one token more")
    loaded = load_model(settings, opened)
    model, run, generated = loaded.model, RunReport("oracle", loaded), []
    counters, run.num_prompt_ids = run.counters, len(prompt)
    kv = make_kv_cache(model.config, loaded.context)
    max_tokens = len(full) - len(prompt)
    draft, progress = Drafter(model, kv, run.governor), PrefillProgress(len(prompt))
    for token in spec_decode(model, kv, prompt, Sampler(), max_tokens, (), draft, progress, counters):
        generated.append(token)
        run.on_token()
    run.end()
    expected = full[len(prompt) :]
    num_equal = sum(a == b for a, b in zip(generated, expected, strict=True))
    print("reference:", *expected)
    print("colibri:  ", *generated)
    print(f"oracle: {num_equal}/{len(expected)} tokens equal")
    if num_equal < len(expected):
        first = next(i for i, (a, b) in enumerate(zip(generated, expected, strict=True)) if a != b)
        print(f"oracle: first difference at position {len(prompt) + first}: {generated[first]}, not {expected[first]}")
    numbers = run.numbers(counters.tokens - 1, equal=num_equal, compared=len(expected))
    run.summary(counters.tokens - 1)
    say(profile_line(numbers["profile"]))
    write_report(settings, numbers)
    return 0 if num_equal == len(expected) else 1
