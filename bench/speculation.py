"""Benchmark of speculative decoding: DRAFT 0, 1, 3 and auto, with all, half, or nearly none of the experts in memory.

    make bench-speculation        or     python bench/speculation.py [--tokens 160] [--csv bench/speculation.csv]

Two models, each in three regimes: `all`, every expert cached; `half`, expert slots for half of them; `cold`, one slot
in each layer, so that almost every expert is read.

    tiny        models/tiny, greedy, with its own MTP layer and n-grams
    small       a synthetic snapshot (dev/make_synthetic.py small, 0.1 GB in a temporary folder) that recites its
                text, whatever its logits are, so that experts are used as in traces of real models. A scripted
                proposer replaces the MTP layer: each draft token is accepted with the probability `acceptance`;
                n-grams are off

The cost is a price, not a time: every forward is priced as one of GLM-5.2 on one machine (its numbers are printed
first), by the experts that it requested and missed, as counted in the run. An expert of the run stands for as many of
GLM-5.2's as make its 600 a token. The draft length controller measures the same price, so its choices, and all columns
but the tokens a second, are the same on any machine. There is no expert prefetch (LOOKAHEAD=0) and no usage history
(USAGE=0). A run has one controller for all its texts, and starts with another text, without draft tokens, that is not
counted.

    tok/fw      tokens a forward
    experts     distinct experts requested, a token
    GB/token    read by GLM-5.2, for the draft tokens too
    s/token     the price; then its ratio to that of DRAFT=0 and to that of the best fixed depth
    wall        tokens a second of this machine, noisy

The aims: auto costs at most 5 % more than the best fixed depth, 0 included, and at most 3 % more than DRAFT=0, in each
table; models/tiny gives at least 1.5 tokens a forward with its own MTP layer. Exit code 0 whether they are met or not;
1 if two depths did not give the same tokens, 2 for bad usage. THREADS, KERNELS, READ_MODE and XDG_CACHE_HOME are those
of colibri.py. About 4 minutes of one core.
"""

import argparse
import csv
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import machine.interpreter  # noqa: F401 - first: what is missing is said in one line

# isort: split
from bench.speculation_price import DRAFT_TOKEN, DRIVE, EXPERT, FORWARD, MEMORY, ROW
from bench.speculation_run import Job, run_arm
from bench.synthetic import make_snapshot
from errors import Refused
from machine.console import say
from machine.exit import exit_code
from machine.files import temporary_folder
from settings import EMBEDDED_SNAPSHOT
from snapshot.config_file import read_config
from snapshot.reader import read_json_object
from text.prompt import PromptPrefix, shared_prefix_length
from text.tokenizer import TextTokenizer

ROOT = Path(__file__).resolve().parents[1]
DEPTHS = ("0", "1", "3", "auto")
REGIMES = {"all": lambda num_experts: num_experts, "half": lambda num_experts: num_experts // 2, "cold": lambda _: 1}
ACCEPTANCES = (0.3, 0.6, 0.9)  # of the scripted proposer
OVER_BEST, OVER_PLAIN, LEAST_TOKENS = 1.05, 1.03, 1.5  # the aims

TEXTS = (
    "And it came to pass, when",
    "In the beginning God created",
    "HAMLET.\nWhat should we say,",
    "hacker: n. A person who",
    "The LORD is my shepherd",
)
NUM_SMALL_TEXTS, SMALL_PROMPT = 2, 24
COLUMNS = (
    "model regime acceptance arm tokens forwards tokens_per_forward experts_per_token gb_per_token seconds_per_token "
    "over_plain over_best mb_read_per_token wall_tok_s acceptance_by_position depths"
).split()

Line = dict[str, Any]  # of the table, by COLUMNS


class TokensDiffer(Exception):
    """Two draft depths did not give the same tokens."""


def run_tables(
    model: str, folder: Path, regime: str, jobs: list[Job], acceptances: tuple[float | None, ...]
) -> list[Line]:
    """Run all depths of a regime, for each acceptance of the scripted proposer; None: the model's own proposers.

    DRAFT=0 is run once for all. TokensDiffer if two depths give other tokens.
    """
    cap = max(1, REGIMES[regime](read_json_object(folder / "config.json")["n_routed_experts"]))
    plain, expected, miss_rate = run_arm(folder, cap, "0", jobs)
    lines = []
    for acceptance in acceptances:
        table = [plain | {"arm": "0"}]
        for depth in DEPTHS[1:]:
            line, ids, _ = run_arm(folder, cap, depth, jobs, acceptance or 0.0, miss_rate)
            if ids != expected:
                at = shared_prefix_length(expected, ids)
                raise TokensDiffer(f"{model}, {regime}, DRAFT={depth}: not the tokens of DRAFT=0, from token {at} on")
            table.append(line | {"arm": depth})
        best = min(line["seconds_per_token"] for line in table if line["arm"] != "auto")
        for line in table:
            line |= {"model": model, "regime": regime, "acceptance": "own" if acceptance is None else acceptance}
            line["over_plain"] = line["seconds_per_token"] / plain["seconds_per_token"]
            line["over_best"] = line["seconds_per_token"] / best
        print_table(table)
        lines += table
    return lines


# --- output -----------------------------------------------------------------------------------------------------------


def print_prices() -> None:
    print(f"prices of GLM-5.2 in int4: drive {DRIVE / 1e9:g} GB/s, memory {MEMORY / 1e9:g} GB/s | a forward "
          f"{FORWARD:.3f} s, each token row {ROW:.3f} s, each expert {EXPERT / MEMORY * 1e3:.2f} ms and "
          f"{EXPERT / DRIVE * 1e3:.2f} ms to read it | a draft token {DRAFT_TOKEN * 1e3:.1f} ms")  # fmt: skip


def print_table(lines: list[Line]) -> None:
    first = lines[0]
    is_own = first["acceptance"] == "own"
    proposers = (
        "its own MTP layer and n-grams" if is_own else f"scripted draft tokens, acceptance {first['acceptance']}"
    )
    print(f"\n{first['model']}, {first['regime']}: {proposers}, {first['tokens']} tokens")
    print(f"  {'DRAFT':6}{'tok/fw':>8}{'experts':>9}{'GB/token':>10}{'s/token':>9}{'/ 0':>7}{'/ best':>8}{'wall':>7}")
    for line in lines:
        print(f"  {line['arm']:6}{line['tokens_per_forward']:8.2f}{line['experts_per_token']:9.1f}"
              f"{line['gb_per_token']:10.2f}{line['seconds_per_token']:9.3f}{line['over_plain']:7.3f}"
              f"{line['over_best']:8.3f}{line['wall_tok_s']:7.0f}", flush=True)  # fmt: skip


def print_verdict(lines: list[Line]) -> None:
    """Compare the costs of auto, and the tokens a forward of models/tiny, with the aims."""

    def label(line: Line) -> str:
        return f"{line['model']}, {line['regime']}, acceptance {line['acceptance']}"

    autos = [line for line in lines if line["arm"] == "auto"]
    for name, most, baseline in (
        ("over_best", OVER_BEST, "the best fixed depth"),
        ("over_plain", OVER_PLAIN, "DRAFT=0"),
    ):
        worst = max(autos, key=lambda line: line[name])
        missed = [line for line in autos if line[name] > most]
        print(f"auto over {baseline}: at most {worst[name]:.3f} ({label(worst)}), aim {most}: "
              f"{f'MISSED in {len(missed)} of {len(autos)} tables' if missed else 'met'}")  # fmt: skip
        for line in missed:
            print(f"  {label(line)}: {line[name]:.3f}")
    fixed = [line for line in lines if line["model"] == "tiny" and line["arm"] != "auto"]
    best = max(fixed, key=lambda line: line["tokens_per_forward"])
    value = best["tokens_per_forward"]
    print(f"models/tiny with its own MTP layer, DRAFT={best['arm']}: {value:.2f} tokens a forward, aim {LEAST_TOKENS}: "
          f"{'met' if value >= LEAST_TOKENS else 'MISSED'}")  # fmt: skip


# --- command line -----------------------------------------------------------------------------------------------------


def tiny_jobs(num_tokens: int) -> list[Job]:
    config, _ = read_config(EMBEDDED_SNAPSHOT)
    tokenizer = TextTokenizer(EMBEDDED_SNAPSHOT, config)
    prefix = PromptPrefix(config, tokenizer, enabled=True)
    return [(prefix.prepend(tokenizer.encode(text)), num_tokens, None) for text in TEXTS]


def small_jobs(folder: Path, num_tokens: int) -> list[Job]:
    """Consecutive excerpts of the snapshot's text."""
    ids, size = read_json_object(folder / "ref_glm.json")["full_ids"], SMALL_PROMPT + num_tokens
    texts = [ids[i * size : (i + 1) * size] for i in range(1 + NUM_SMALL_TEXTS)]
    return [(text[:SMALL_PROMPT], num_tokens, text) for text in texts]


def run_models(num_tokens: int) -> list[Line]:
    lines: list[Line] = []
    jobs = tiny_jobs(num_tokens)
    for regime in REGIMES:
        lines += run_tables("tiny", EMBEDDED_SNAPSHOT, regime, jobs, (None,))
    with temporary_folder() as work:
        folder = work / "small"
        total = (1 + NUM_SMALL_TEXTS) * (SMALL_PROMPT + num_tokens)
        make_snapshot(folder, f"small --layers 6 --moe-width 256 --prompt 2 --report-tokens 0 --tokens {total}")
        jobs = small_jobs(folder, num_tokens)
        for regime in REGIMES:
            lines += run_tables("small", folder, regime, jobs, ACCEPTANCES)
    return lines


def run(args: argparse.Namespace) -> int:
    started = time.perf_counter()
    if args.tokens < 16:
        raise Refused(f"--tokens is {args.tokens}, it must be 16 or more")
    with open(args.csv, "w", newline="", encoding="utf-8") as file:
        print_prices()
        try:
            lines = run_models(args.tokens)
        except TokensDiffer as error:
            say(f"speculation: WRONG TOKENS: {error}")
            return 1
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(lines)
    print()
    print_verdict(lines)
    print(f"the tokens of all depths are equal | {len(lines)} lines in {args.csv} | "
          f"{(time.perf_counter() - started) / 60:.1f} minutes")  # fmt: skip
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=160, help="of each text, default 160, at least 16")
    parser.add_argument("--csv", type=Path, default=ROOT / "bench" / "speculation.csv", help="default: %(default)s")
    return exit_code("speculation", partial(run, parser.parse_args(arguments)), "interrupted")


if __name__ == "__main__":
    sys.exit(main())
