"""REPLAY: measure the decode speed of a model on this machine.

The tokens are those of REF, so every run does the same work. prompt_ids but the last are prefilled; then full_ids, from
there to the last but one, go through the model one at a time, with the logits that a decoder would need. Prefill and
decode are timed and counted apart.
"""

import torch

from errors import Refused
from forward.kv_cache import make_kv_cache
from forward.step import step
from load.model import OpenedSnapshot, load_model
from machine.console import PrefillProgress
from modes.reference import read_reference, reference_path
from modes.report import RunReport, divide
from settings import Settings


def run_replay(settings: Settings, opened: OpenedSnapshot) -> int:
    """-> 0. The first line on stdout is REPLAY decode: N token in S s | X tok/s | expert hit Y%."""
    prompt, full = read_reference(settings, opened, "prompt_ids", "full_ids")
    if len(prompt) < 2 or len(full) <= len(prompt):
        raise Refused(f"{reference_path(settings)}: REPLAY needs two prompt_ids and one token more in full_ids")
    loaded = load_model(settings, opened)
    model, first = loaded.model, len(prompt) - 1
    run = RunReport("replay", loaded, first)
    kv = make_kv_cache(model.config, len(full))
    step(model, [(full[:first], kv)], PrefillProgress(first))
    run.prefilled = run.mark()
    num_equal = 0
    for at in range(first, len(full) - 1):
        logits = step(model, [([full[at]], kv)])  # [1, vocab]
        num_equal += int(torch.argmax(logits)) == full[at + 1]
    run.end()
    num_tokens = len(full) - 1 - first
    prefill, decode, _ = run.phases()
    print(
        f"REPLAY decode: {num_tokens} token in {decode.seconds:.2f} s | {num_tokens / decode.seconds:.2f} tok/s | "
        f"expert hit {100 * decode.cache.hit_rate:.1f}%"
    )
    print(
        f"REPLAY prefill: {first} token in {prefill.seconds:.2f} s | {first / prefill.seconds:.2f} tok/s | "
        f"{prefill.cache.bytes_read / 1e9:.3f} GB"
    )
    disk = divide(decode.cache.bytes_read / 1e9, decode.busy_seconds)
    print(f"REPLAY disk: {decode.cache.bytes_read / num_tokens / 1e6:.3f} MB a token | {disk:.2f} GB/s while reading")
    run.finish(settings, num_tokens, argmax_equal=num_equal)
    return 0
