"""Self-check: greedy ids of Engine and spec_decode against a full forward over the text so far for every token.

    python dev/self_check.py                         the embedded model, 1 and 4 sequences, 32 tokens
    SNAP=/models/glm-5.2-int4 python dev/self_check.py --rows 2 --tokens 8

The full forwards keep no KV cache. Engine prefills once, clones the KV cache for N sequences and decodes, without
draft tokens and with those of DRAFT; then spec_decode with these. The prompt is that of REF, or the first ids of the
vocabulary. Variables are those of colibri.py. Prints the seconds of each; exit code 0 if all ids are equal, 1 with the
first difference of each sequence if not, 2 for bad usage or a bad snapshot.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import machine.interpreter  # noqa: F401 - first: what is missing is said in one line

# isort: split
from errors import Refused
from forward.kv_cache import make_kv_cache
from generate.decode import spec_decode
from generate.draft import Drafter
from generate.draft_length import DraftLength
from generate.engine import Engine, naive_generate
from generate.sampler import Sampler
from load.model import OpenedSnapshot, load_model
from machine.console import say
from machine.exit import exit_code
from modes.reference import read_reference, reference_path
from modes.run import run_mode
from settings import Settings

Result = TypeVar("Result")


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """-> (the result of `work`, seconds)."""
    started = time.perf_counter()
    result = work()
    return result, time.perf_counter() - started


def first_difference(ids: list[int], expected: list[int]) -> str | None:
    """The first difference of two lists of ids, in words; None if they are equal."""
    pairs = enumerate(zip(ids, expected, strict=True))
    return next((f"token {i} is {a}, a full forward gives {b}" for i, (a, b) in pairs if a != b), None)


def check(settings: Settings, opened: OpenedSnapshot, num_sequences: int, num_tokens: int) -> int:
    """-> exit code."""
    has_reference = settings.ref or reference_path(settings).exists()
    prompt = read_reference(settings, opened, "prompt_ids")[0] if has_reference else list(range(8))
    loaded = load_model(settings, opened)
    say(loaded.kernels)
    model = loaded.model
    expected, seconds = timed(lambda: naive_generate(model, prompt, num_tokens, Sampler()))
    print(f"a full forward for every token: {num_tokens} tokens in {seconds:.2f} s")
    num_different = 0
    for count, draft in product(sorted({1, num_sequences}), sorted({"0", loaded.draft})):
        engine = Engine(model, terminal_ids=(), draft=draft)
        run = partial(engine.generate_batch, prompt, count, max_tokens=num_tokens, temperature=0)
        (sequences, _), seconds = timed(run)
        what = f"{count} sequence{'s' if count > 1 else ''}, DRAFT={draft}"
        for row, ids in enumerate(sequences):
            if difference := first_difference(ids[len(prompt) :], expected):
                num_different += 1
                print(f"sequence {row} of {what}: {difference}")
        print(f"Engine, {what}: {seconds:.2f} s")
    kv = make_kv_cache(model.config, len(prompt) + num_tokens)
    drafter = Drafter(model, DraftLength(loaded.draft, loaded.draft_guard))
    ids, seconds = timed(lambda: list(spec_decode(model, kv, prompt, Sampler(), num_tokens, (), drafter)))
    if difference := first_difference(ids, expected):
        num_different += 1
        print(f"spec_decode: {difference}")
    print(f"spec_decode, DRAFT={loaded.draft}: {seconds:.2f} s")
    print("all ids are equal" if not num_different else f"{num_different} differ")
    return 1 if num_different else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4, help="sequences, default 4")
    parser.add_argument("--tokens", type=int, default=32, help="of each sequence, default 32")
    parser.add_argument("sizes", nargs="*", default=[], help="cap, expert_bits, dense_bits as of colibri.py")
    args = parser.parse_args(arguments)

    def run() -> int:
        if args.rows < 1 or args.tokens < 1:
            raise Refused("--rows and --tokens must be 1 or more")
        mode = partial(check, num_sequences=args.rows, num_tokens=args.tokens)
        return run_mode("self_check", Settings.read(args.sizes), mode)

    return exit_code("self_check", run)


if __name__ == "__main__":
    sys.exit(main())
