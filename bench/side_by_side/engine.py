"""This engine's counterpart of llama-bench: one test in one process, its speed as JSON with the same names.

    SNAP=DIR python bench/side_by_side/engine.py --prompt 512
    SNAP=DIR python bench/side_by_side/engine.py --gen 64 --depth 4096

Random ids. All experts are cached before the clock starts, as llama-bench warms up, and positions up to the depth are
prefilled. A prefill gives the logits of its last token, a decode those of every token.
"""

import argparse
import json
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import machine.interpreter  # noqa: F401 - first: what is missing is said in one line

# isort: split
from errors import Refused
from forward.kv_cache import make_kv_cache
from forward.step import step
from load.model import LoadedModel, load_model
from machine.exit import exit_code
from scripts.options import OneLineParser, whole_from
from settings import Settings

WARM_UP = 32  # tokens
AT_ONCE = 8  # experts requested together


def cache_experts(loaded: LoadedModel) -> None:
    """Bring every expert into its slot. Refused where there are too few."""
    num_experts, slots = len(loaded.disk.layouts), loaded.plan.num_expert_slots
    if slots < num_experts:
        raise Refused(f"{slots} of {num_experts} experts fit in memory; a warm run needs all: a larger RAM_GB")
    experts, config = loaded.model.experts, loaded.config
    for layer in config.sparse_layers:
        for first in range(0, config.num_experts, AT_ONCE):
            uses = dict.fromkeys(range(first, min(first + AT_ONCE, config.num_experts)), 1)
            with experts.request(layer, uses) as request:
                for _ in request.ready(0, len(uses)):
                    pass


def run(args: argparse.Namespace) -> int:
    tokens = args.prompt or args.gen
    settings = replace(Settings.read([], draft="0"), usage=False, ctx=args.depth + tokens + WARM_UP)
    loaded = load_model(settings)
    model = loaded.model
    cache_experts(loaded)
    ids = random.Random(1).choices(range(loaded.config.vocab_size), k=args.depth + tokens)
    kv = make_kv_cache(loaded.config, len(ids))
    step(model, [(ids[:WARM_UP], kv)])
    kv.trim(0)
    if args.depth:
        step(model, [(ids[: args.depth], kv)])
    model.experts.reset_counters()
    started = time.perf_counter()
    if args.prompt:
        step(model, [(ids[args.depth :], kv)])
    else:
        for at in range(args.depth, len(ids)):
            step(model, [([ids[at]], kv)])
    seconds = time.perf_counter() - started
    result = {
        "n_prompt": args.prompt,
        "n_gen": args.gen,
        "n_depth": args.depth,
        "avg_ts": tokens / seconds,
        "kernels": loaded.kernels.removeprefix("[kernels] ").split(",")[0],
        "hit_rate": model.experts.counters.hit_rate,
    }
    print(json.dumps([result]))
    loaded.close()
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", type=whole_from(1), default=0, help="tokens of a prefill")
    what.add_argument("--gen", type=whole_from(1), default=0, help="tokens of a decode")
    parser.add_argument("--depth", type=whole_from(0), default=0, help="positions before them")
    return exit_code("engine", lambda: run(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
